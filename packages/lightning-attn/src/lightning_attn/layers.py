"""Layers of models whose ``forward`` may be put in place of a library's: they hold nothing of their own."""

from __future__ import annotations

from typing import Any

import torch

from lightning_attn.api import lightning_attention, lightning_decode

Tensor = torch.Tensor


class MiniMaxLightningAttention(torch.nn.Module):
    """``forward`` of the layer of this name in transformers: MiniMax-Text-01's lightning attention.

    Prefill, chunks that continue a cache, and decoding go through the kernels. The states in transformers' cache, and
    the decay rates, are float32 whatever the model's dtype. Prefill is differentiable; decoding raises ValueError where
    gradients are recorded.
    """

    can_torch_compile = True

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """As the layer that it replaces."""
        # Its name from transformers 5.24 on.
        past_key_values = kwargs.pop("cache", past_key_values)
        batch, tokens, _width = hidden_states.shape
        qkv = self.act_fn(self.qkv_proj(hidden_states))
        if attention_mask is not None:
            qkv = qkv * attention_mask[:, :, None].to(qkv.dtype)
        # A head's q, k and v lie side by side; the kernels read them there.
        qkv = qkv.view(batch, tokens, self.num_attention_heads, 3, self.head_dim)
        state = None if past_key_values is None else past_key_values.get_linear_cache(self.layer_idx)
        rates = _decay_rates(self, hidden_states.device)
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


def _decay_rates(layer: Any, device: torch.device) -> Tensor:
    """In float32: the layer's own buffer is rounded with the model's weights."""
    rates: Tensor | None = layer.__dict__.get("_decay_rates")
    if rates is None or rates.device != device:
        with torch.device("cpu"):
            rates = layer.get_slope_rate().float().flatten().to(device)
        layer.__dict__["_decay_rates"] = rates
    return rates
