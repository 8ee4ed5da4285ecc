"""Gated DeltaNet layers of Qwen3-Next and Qwen3.5 in transformers, with the split and the decode step of one launch."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch.nn.functional import softplus
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from gdn_split.api import SplitResult, fused_qkvzba_split_reshape_cat
from gdn_split.step.api import gdn_decode_step
from kernel_reference.checks import fail
from kernel_reference.integrations.transformers import VERSION, enabled

Tensor = torch.Tensor


def enable() -> ExitStack:
    """Put this package into the Gated DeltaNet layers of models that are made until the result is closed.

    Used as ``with enable():`` round ``from_pretrained`` or ``from_config``, or called once and left on. A model made
    meanwhile keeps its layers. Qwen3-Next's projections are split by one kernel, bit for bit as transformers does; with
    a cache, a single token of each sequence goes from its projections to the gated outputs in one launch, in float32.
    Qwen3.5's layers, whose projections are apart, take that decode step alone.

    Raises, in the model's call, ValueError for a decode step that records gradients, and when a layer is made, for an
    activation other than SiLU.
    """
    return enabled(
        {
            "Qwen3NextGatedDeltaNet": QwenNextLayer,
            "Qwen3_5GatedDeltaNet": Qwen35Layer,
            "Qwen3_5MoeGatedDeltaNet": Qwen35MoeLayer,
        }
    )


class _Layer:
    """What the layers share: sizes, the states in transformers' cache, and what follows the convolution."""

    engine: Any
    # Of transformers' layer, which a subclass has too.
    layer_idx: int
    activation: str
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    key_dim: int
    value_dim: int
    conv_kernel_size: int
    conv1d: Any
    norm: Any
    out_proj: Any
    A_log: Tensor
    dt_bias: Tensor

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)  # type: ignore[call-arg]
        if self.activation not in ("silu", "swish"):
            fail("hidden_act", '"silu"', repr(self.activation))

    def _sizes(self) -> tuple[int, int, int, int]:
        return self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim

    def _states_of_a_step(self, hidden_states: Tensor, cache: Any) -> tuple[Tensor, Tensor] | None:
        """Both states if this is one token after others, and they need not be rolled back."""
        if cache is None or hidden_states.shape[1] != 1:
            return None
        conv_state, state = cache.get_conv_state(self.layer_idx), cache.get_recurrent_state(self.layer_idx)
        if conv_state is None or state is None or cache.is_recording_past(self.layer_idx):
            return None
        if torch.is_grad_enabled():
            fail("a decode step", "under torch.no_grad() or torch.inference_mode()", "one with gradients enabled")
        return conv_state, state

    def _step(
        self, qkvz: Tensor, ba: Tensor, conv_state: Tensor, state: Tensor, layout: Literal["interleaved", "contiguous"]
    ) -> Tensor:
        """One token of each sequence through the layer, and both states, transformers' own, advanced."""
        slots = torch.arange(qkvz.shape[0], dtype=torch.int32, device=qkvz.device)
        # transformers keeps as many inputs as the convolution is wide, one more than it will need again.
        kept = conv_state[:, :, 1 - self.conv_kernel_size :]
        out = gdn_decode_step(
            qkvz, ba, kept, self.conv1d.weight.squeeze(1), self.conv1d.bias, state, slots, self.A_log, self.dt_bias,
            *self._sizes(), norm_weight=self.norm.weight, norm_eps=self.norm.variance_epsilon, layout=layout,
        )  # fmt: skip
        return self.out_proj(out.flatten(1)[:, None])

    def _attend(self, parts: SplitResult, batch: int, cache: Any, options: dict[str, Any]) -> Tensor:
        """The gated delta rule, the gated norm and the output projection, by transformers' functions."""
        tokens = parts.z.shape[0] // batch
        mixed_qkv, z, b, a = (part.reshape(batch, tokens, -1) for part in parts)
        state = None if cache is None else cache.get_recurrent_state(self.layer_idx)
        widths = (self.key_dim, self.key_dim, self.value_dim)
        sizes = (self.head_k_dim, self.head_k_dim, self.head_v_dim)
        split = zip(mixed_qkv.split(widths, 2), sizes, strict=True)
        q, k, v = (part.reshape(batch, tokens, -1, size) for part, size in split)
        if VERSION < (5, 23):
            # Later versions repeat them where they must.
            q, k = (part.repeat_interleave(self.num_v_heads // self.num_k_heads, 2) for part in (q, k))
        step = state is not None and tokens == 1
        rule = self.engine.torch_recurrent_gated_delta_rule if step else self.engine.torch_chunk_gated_delta_rule
        out, state = rule(
            q, k, v, g=-self.A_log.float().exp() * softplus(a.float() + self.dt_bias), beta=b.sigmoid(),
            initial_state=state, output_final_state=cache is not None, use_qk_l2norm_in_kernel=True,
            cu_seqlens=options.pop("cu_seq_lens_q", None), **options,
        )  # fmt: skip
        if cache is not None:
            cache.update_recurrent_state(state, self.layer_idx)
        normed = self.norm(out.reshape(-1, self.head_v_dim), z.reshape(-1, self.head_v_dim))
        return self.out_proj(normed.reshape(batch, tokens, -1))


class QwenNextLayer(_Layer, modeling_qwen3_next.Qwen3NextGatedDeltaNet):
    """``Qwen3NextGatedDeltaNet``: the projections interleaved, one a QK head."""

    engine = modeling_qwen3_next

    @force_accelerate_hooks("conv1d")
    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """As the layer that it replaces."""
        # Its name from transformers 5.24 on.
        cache_params = options.pop("cache", cache_params)
        hidden_states = self.engine.apply_mask_to_padding_states(hidden_states, attention_mask)
        batch, tokens, _ = hidden_states.shape
        qkvz = self.in_proj_qkvz(hidden_states).flatten(0, 1)
        ba = self.in_proj_ba(hidden_states).flatten(0, 1)
        states = self._states_of_a_step(hidden_states, cache_params)
        if states is not None:
            return self._step(qkvz, ba, *states, "interleaved")
        parts = fused_qkvzba_split_reshape_cat(qkvz, ba, *self._sizes())
        inputs = parts.mixed_qkv.view(batch, tokens, -1).transpose(1, 2)
        if cache_params is not None:
            width = self.conv_kernel_size
            inputs = cache_params.update_conv_state(inputs, self.layer_idx, conv_kernel_size=width)
        weight = self.conv1d.weight.squeeze(1)
        convolved = self.engine.causal_conv1d_fn(
            inputs, weight, self.conv1d.bias, activation=self.activation, **options
        )  # fmt: skip
        # Of what was cached, the convolution has made rows too.
        parts = parts._replace(mixed_qkv=convolved[:, :, -tokens:].transpose(1, 2))
        return self._attend(parts, batch, cache_params, options)


class _ApartLayer(_Layer):
    """Qwen3.5: the projections apart, in the order that the contiguous layout has."""

    in_proj_qkv: Any
    in_proj_z: Any
    in_proj_b: Any
    in_proj_a: Any

    @force_accelerate_hooks("conv1d")
    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """As the layer that it replaces."""
        # Its name from transformers 5.24 on.
        cache_params = options.pop("cache", cache_params)
        states = self._states_of_a_step(hidden_states, cache_params)
        if states is None:
            # Nothing is to be split, and nothing is copied.
            return super().forward(hidden_states, cache_params, attention_mask, **options)  # type: ignore[misc]
        hidden_states = self.engine.apply_mask_to_padding_states(hidden_states, attention_mask)
        qkvz = torch.cat((self.in_proj_qkv(hidden_states), self.in_proj_z(hidden_states)), 2).flatten(0, 1)
        ba = torch.cat((self.in_proj_b(hidden_states), self.in_proj_a(hidden_states)), 2).flatten(0, 1)
        return self._step(qkvz, ba, *states, "contiguous")


class Qwen35Layer(_ApartLayer, modeling_qwen3_5.Qwen3_5GatedDeltaNet):
    """``Qwen3_5GatedDeltaNet``."""

    engine = modeling_qwen3_5


class Qwen35MoeLayer(_ApartLayer, modeling_qwen3_5_moe.Qwen3_5MoeGatedDeltaNet):
    """``Qwen3_5MoeGatedDeltaNet``."""

    engine = modeling_qwen3_5_moe
