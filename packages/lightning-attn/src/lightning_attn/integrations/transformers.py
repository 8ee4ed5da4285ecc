"""MiniMax-Text-01's lightning attention in transformers, by this package: prefill, continuation and decoding."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from transformers.models.minimax import modeling_minimax

from kernel_reference.integrations.transformers import enabled
from lightning_attn.api import lightning_attention, lightning_decode

Tensor = torch.Tensor


def enable() -> ExitStack:
    """Put this package into the lightning attention of MiniMax models that are made until the result is closed.

    Used as ``with enable():`` round ``from_pretrained`` or ``from_config``, or called once and left on. A model made
    meanwhile keeps its layers. Prefill, chunks that continue a cache, and decoding go through the kernels. The states
    in transformers' cache, and the decay rates, are float32 whatever the model's dtype. Padding is zeroed as
    transformers zeroes it. Prefill is differentiable; decoding raises ValueError where gradients are recorded.
    """
    return enabled({"MiniMaxLightningAttention": LightningLayer})


class LightningLayer(modeling_minimax.MiniMaxLightningAttention):
    """``MiniMaxLightningAttention`` with its recurrence in one or two launches."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self._rates: Tensor | None = None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """As the layer that it replaces."""
        batch, tokens, _width = hidden_states.shape
        qkv = self.act_fn(self.qkv_proj(hidden_states))
        qkv = modeling_minimax.apply_mask_to_padding_states(qkv, attention_mask)
        # A head's q, k and v lie side by side; the kernels read them there.
        qkv = qkv.view(batch, tokens, self.num_attention_heads, 3, self.head_dim)
        state = None if past_key_values is None else past_key_values.get_linear_cache(self.layer_idx)
        rates = self._decay_rates(hidden_states.device)
        if state is not None and tokens == 1:
            q, k, v = qkv[:, 0].unbind(2)
            slots = torch.arange(batch, dtype=torch.int32, device=q.device)
            out = lightning_decode(q, k, v, state, slots, rates)
        else:
            q, k, v = qkv.transpose(1, 2).unbind(3)
            history = None if state is None else state.float()
            result = lightning_attention(q, k, v, rates, kv_history=history)
            out, state = result.out.transpose(1, 2), result.kv[:, :, -1]
        if past_key_values is not None:
            past_key_values.set_linear_cache(self.layer_idx, state)
        gated = self.output_gate(hidden_states).sigmoid() * self.norm(out.reshape(batch, tokens, -1))
        return self.out_proj(gated), state

    def _decay_rates(self, device: torch.device) -> Tensor:
        """In float32: the module's own buffer is rounded with the model's weights."""
        if self._rates is None or self._rates.device != device:
            with torch.device("cpu"):
                self._rates = self.get_slope_rate().float().flatten()
            self._rates = self._rates.to(device)
        return self._rates
