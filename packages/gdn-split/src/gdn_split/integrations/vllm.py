"""``VLLM_PLUGINS=gdn_split`` for vLLM: the Gated DeltaNet layers of Qwen3-Next and Qwen3.5.

vLLM finds :func:`register` by the entry point ``vllm.general_plugins`` and calls it in each of its processes. A step in
which all sequences decode goes from its projections to the gated outputs in one launch; of others the split is ours,
bit for bit vLLM's, and convolution, recurrence and norm are vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch

from gdn_split.api import Layout, fused_qkvzba_split_reshape_cat
from gdn_split.step.api import gdn_decode_step

try:
    from vllm import envs
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        QwenGatedDeltaNetAttention,
        _encode_layer_name,
    )
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
except ImportError as missing:
    raise ImportError("this needs vLLM 0.33: gdn-split[vllm]") from missing

Tensor = torch.Tensor

NAME = "gdn_split"
THEIRS = "QwenGatedDeltaNetAttention"


def register() -> None:
    """Put this package into layers that vLLM makes from now on, if ``VLLM_PLUGINS`` names it; any number of times."""
    if NAME in (envs.VLLM_PLUGINS or ()) and THEIRS not in op_registry_oot:
        PluggableLayer.register_oot(name=THEIRS)(GatedDeltaNetLayer)


class GatedDeltaNetLayer(QwenGatedDeltaNetAttention):
    """``QwenGatedDeltaNetAttention`` from its projections on; steps with drafts, and all of ROCm, stay vLLM's own."""

    def forward_cuda(self, hidden_states: Tensor) -> Tensor:
        """[N, hidden] to [N, hidden]; what lies between the projections is one op, as vLLM's graphs know it."""
        if not self._is_covered():
            theirs: Tensor = super().forward_cuda(hidden_states)
            return theirs
        mixed_qkvz, _ = self.in_proj_qkvz(hidden_states)
        mixed_ba, _ = self.in_proj_ba(hidden_states)
        _, heads, _, head_v = self._sizes()
        # Rows that pad a graph are read afterwards.
        core = hidden_states.new_zeros((len(hidden_states), heads, head_v))
        torch.ops.vllm.qwen_gdn_attention_core_fused_norm_packed(
            mixed_qkvz, mixed_ba, core, layer_name=_encode_layer_name(self.prefix)
        )
        out: Tensor = self.out_proj(core.flatten(-2))[0]
        return out

    def _forward_core_fused_norm_packed(self, mixed_qkvz: Tensor, ba: Tensor, core_attn_out: Tensor) -> None:
        """What the op calls: from both projections to the gated, normed outputs [N, Hv, Dv]."""
        if not self._is_covered():
            super()._forward_core_fused_norm_packed(mixed_qkvz, ba, core_attn_out)
            return
        steps = get_forward_context().attn_metadata
        step = steps.get(self.prefix) if isinstance(steps, dict) else None
        layout: Layout = "interleaved" if self.gqa_interleaved_layout else "contiguous"
        if step is not None and self._decodes(step):
            self._decode(step, mixed_qkvz, ba, core_attn_out, layout)
            return
        parts = fused_qkvzba_split_reshape_cat(mixed_qkvz, ba, *self._sizes(), layout=layout)
        self._forward_core(parts.mixed_qkv, parts.b, parts.a, core_attn_out)
        if step is not None:
            rows = step.num_actual_tokens
            core_attn_out[:rows] = self.norm(core_attn_out[:rows], parts.z[:rows])

    def _decode(self, step: Any, mixed_qkvz: Tensor, ba: Tensor, out: Tensor, layout: Layout) -> None:
        rows = step.num_actual_tokens
        slots = getattr(step, "gdn_split_slots", None)
        if slots is None:
            # Made by the step's first layer. vLLM's block 0 is nobody's, and stands for padding.
            slots = torch.where(step.non_spec_state_indices_tensor == 0, -1, step.non_spec_state_indices_tensor)
            step.gdn_split_slots = slots
        gdn_decode_step(
            mixed_qkvz[:rows], ba[:rows], self._conv_state(), self.conv1d.weight.squeeze(1), self.conv1d.bias,
            self.kv_cache[1], slots[:rows], self.A_log, self.dt_bias, *self._sizes(), norm_weight=self.norm.weight,
            norm_eps=self.norm.eps, layout=layout, state_layout="VK", out=out[:rows],
        )  # fmt: skip

    def _sizes(self) -> tuple[int, int, int, int]:
        """Heads of this rank, and their sizes."""
        ranks = self.tp_size
        return self.num_k_heads // ranks, self.num_v_heads // ranks, self.head_k_dim, self.head_v_dim

    def _is_covered(self) -> bool:
        """Whether what the layer was made with is this package's: SiLU, both projections cut by ranks, no drafts."""
        replicated = self.disable_tp_for_ba_proj and self.tp_size > 1
        return not (replicated or self.enable_fused_gdn_spec_decode or self.norm.activation not in ("silu", "swish"))

    def _decodes(self, step: Any) -> bool:
        """Whether each sequence has one token, and its states just what such a step needs."""
        if step.spec_sequence_masks is not None or step.num_prefills or not step.num_decodes:
            return False
        return self._conv_state().shape[2] == self.conv_kernel_size - 1

    def _conv_state(self) -> Tensor:
        """[slots, channels, width - 1]."""
        state: Tensor = self.kv_cache[0]
        return state if is_conv_state_dim_first() else state.transpose(-1, -2)
