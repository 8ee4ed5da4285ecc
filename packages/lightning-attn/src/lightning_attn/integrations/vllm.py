"""``VLLM_PLUGINS=lightning_attn`` for vLLM: the lightning attention of MiniMax-Text-01 and of Bailing's MoE.

vLLM finds :func:`register` by the entry point ``vllm.general_plugins`` and calls it in each of its processes. Its
layers keep their projections, norms and states; the recurrence over a mixed step is one launch, as is decoding.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_attn.api import lightning_attention_varlen, lightning_decode

try:
    from vllm import envs
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
    from vllm.model_executor.layers.mamba.linear.bailing_linear_attn import BailingMoELinearAttention
    from vllm.model_executor.layers.mamba.linear.minimax_linear_attn import MiniMaxText01LinearAttention
except ImportError as missing:
    raise ImportError("this needs vLLM 0.33: lightning-attn[vllm]") from missing

Tensor = torch.Tensor

NAME = "lightning_attn"


def register() -> None:
    """Put this package into layers that vLLM makes from now on, if ``VLLM_PLUGINS`` names it; any number of times."""
    if NAME not in (envs.VLLM_PLUGINS or ()):
        return
    for layer, theirs in ((MiniMaxLayer, MiniMaxText01LinearAttention), (BailingLayer, BailingMoELinearAttention)):
        if theirs.__name__ not in op_registry_oot:
            PluggableLayer.register_oot(name=theirs.__name__)(layer)


class _Recurrence:
    """The part of vLLM's layers between the activation of q, k and v, [T, H, D] of float32, and the norm."""

    tp_slope: Tensor

    def _prefill_and_mix_infer(
        self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, state_indices_tensor: Tensor, attn_metadata: Any
    ) -> Tensor:
        """[T, H * D] of a step whose tokens to decode come first. Their states [slots, H, D, D] are advanced."""
        # vLLM has zeroed the states of new sequences.
        out = lightning_attention_varlen(
            q, k, v, self.tp_slope, attn_metadata.query_start_loc, state_pool=kv_cache,
            slots=state_indices_tensor.contiguous(), has_initial_state=True,
        )  # fmt: skip
        return out.flatten(1)

    def _decode_infer(
        self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, state_indices_tensor: Tensor, attn_metadata: Any
    ) -> Tensor:
        """[B, H * D] of a token of each sequence."""
        rows, slots = attn_metadata.num_decode_tokens, state_indices_tensor[: attn_metadata.num_decodes]
        out = lightning_decode(q[:rows], k[:rows], v[:rows], kv_cache, slots.contiguous(), self.tp_slope)
        return out.flatten(1)


class MiniMaxLayer(_Recurrence, MiniMaxText01LinearAttention):
    """``MiniMaxText01LinearAttention`` with its recurrence in one launch."""


class BailingLayer(_Recurrence, BailingMoELinearAttention):
    """``BailingMoELinearAttention`` with its recurrence in one launch; steps with drafts stay vLLM's own."""

    def _prefill_and_mix_infer(
        self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, state_indices_tensor: Tensor, attn_metadata: Any
    ) -> Tensor:
        layer: Any = BailingMoELinearAttention if _has_drafts(attn_metadata) else _Recurrence
        out: Tensor = layer._prefill_and_mix_infer(self, q, k, v, kv_cache, state_indices_tensor, attn_metadata)
        return out

    def _decode_infer(
        self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, state_indices_tensor: Tensor, attn_metadata: Any
    ) -> Tensor:
        layer: Any = BailingMoELinearAttention if _has_drafts(attn_metadata) else _Recurrence
        out: Tensor = layer._decode_infer(self, q, k, v, kv_cache, state_indices_tensor, attn_metadata)
        return out


def _has_drafts(attn_metadata: Any) -> bool:
    """Whether sequences that decode have a slot for each draft."""
    slots = getattr(attn_metadata, "state_indices_tensor_d", None)
    return slots is not None and slots.ndim > 1
