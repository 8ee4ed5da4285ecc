"""Layers of models whose ``forward`` may be put in place of a library's: they hold nothing of their own."""

from __future__ import annotations

from typing import Any, Literal

import torch

from gdn_split.step.api import gdn_decode_step
from kernel_reference.checks import fail

Tensor = torch.Tensor


class Qwen3NextGatedDeltaNet(torch.nn.Module):
    """``forward`` of the layers of Qwen3-Next and Qwen3.5 in transformers: a decode step in one launch.

    A single token of each sequence goes from its projections to the gated outputs in float32; all else, and an
    activation other than SiLU, is the layer's own ``forward``. Raises ValueError for a step that records gradients.
    """

    can_torch_compile = True

    def forward(
        self: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """As the layer that it replaces."""
        # Its name from transformers 5.24 on.
        cache_params = kwargs.pop("cache", cache_params)
        states = None if attention_mask is not None else _states_of_a_step(self, hidden_states, cache_params)
        if states is None:
            theirs: Tensor = type(self).forward(self, hidden_states, cache_params, attention_mask, **kwargs)
            return theirs
        qkvz, ba, layout = _projections(self, hidden_states[:, 0])
        conv_state, state = states
        slots = torch.arange(len(qkvz), dtype=torch.int32, device=qkvz.device)
        # transformers keeps as many inputs as the convolution is wide, one more than it will need again.
        kept = conv_state[:, :, 1 - self.conv_kernel_size :]
        sizes = self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim
        out = gdn_decode_step(
            qkvz, ba, kept, self.conv1d.weight.squeeze(1), self.conv1d.bias, state, slots, self.A_log, self.dt_bias,
            *sizes, norm_weight=self.norm.weight, norm_eps=self.norm.variance_epsilon, layout=layout,
        )  # fmt: skip
        projected: Tensor = self.out_proj(out.flatten(1)[:, None])
        return projected


def _states_of_a_step(layer: Any, hidden_states: Tensor, cache: Any) -> tuple[Tensor, Tensor] | None:
    """Both states if this is one token after others, and they need not be rolled back."""
    if cache is None or hidden_states.shape[1] != 1 or layer.activation not in ("silu", "swish"):
        return None
    conv_state, state = cache.get_conv_state(layer.layer_idx), cache.get_recurrent_state(layer.layer_idx)
    if conv_state is None or state is None or cache.is_recording_past(layer.layer_idx):
        return None
    if torch.is_grad_enabled():
        fail("a decode step", "under torch.no_grad() or torch.inference_mode()", "one with gradients enabled")
    return conv_state, state


def _projections(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Literal["interleaved", "contiguous"]]:
    """Of rows [B, hidden]: both of Qwen3-Next, or the four of Qwen3.5 side by side."""
    if hasattr(layer, "in_proj_qkvz"):
        return layer.in_proj_qkvz(x), layer.in_proj_ba(x), "interleaved"
    qkvz = torch.cat((layer.in_proj_qkv(x), layer.in_proj_z(x)), 1)
    return qkvz, torch.cat((layer.in_proj_b(x), layer.in_proj_a(x)), 1), "contiguous"
