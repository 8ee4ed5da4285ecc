"""The peers that prefix-prefill is timed beside, each as a function of tensors; for cases.py and map.py.

A function of this module imports its peer when it is called, and returns what calls it: where the import fails, a run
goes on without that peer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch

Tensor = torch.Tensor
Pair = tuple[Tensor, ...]

FA3, FA3_SCHEDULED, FA3_BF16 = "FA3", "FA3, schedule made before", "FA3, bf16 cache"
CONTEXT, UNIFIED, SGLANG = "vLLM context_attention_fwd", "vLLM unified_attention", "sglang extend"
CONTEXT_FP8, UNIFIED_FP8 = f"{CONTEXT}, fp8", f"{UNIFIED}, fp8"


def has_peer(name: str) -> bool:
    """Whether inputs for this peer are worth their memory."""
    return importlib.util.find_spec(name) is not None


class Paged(NamedTuple):
    """A ragged batch over pages [blocks, page, heads, elements] that hold the new tokens too.

    window: (left, right) with the token itself left out, or None.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float
    window: tuple[int, int] | None
    softcap: float = 0.0
    sinks: Tensor | None = None


def fa3() -> Callable[..., Tensor]:
    """FlashAttention-3 as vLLM ships it; ``schedule``: what :func:`fa3_schedule` made."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    def call(i: Paged, schedule: Tensor | None = None) -> Tensor:
        out: Tensor = flash_attn_varlen_func(
            i.q,
            i.k_cache,
            i.v_cache,
            i.max_seqlen_q,
            i.cu_seqlens_q,
            i.max_seqlen_k,
            seqused_k=i.seqlens_k,
            block_table=i.block_table,
            softmax_scale=i.softmax_scale,
            causal=True,
            window_size=list(i.window) if i.window else None,
            softcap=i.softcap,
            scheduler_metadata=schedule,
            fa_version=3,
            **({"s_aux": i.sinks} if i.sinks is not None else {}),
        )
        return out

    return call


def fa3_contiguous() -> Callable[..., Tensor]:
    """FlashAttention-3 over keys and values [T, heads, elements] of prompts alone, with no pages."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    def call(i: Paged, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash_attn_varlen_func(
            i.q,
            k,
            v,
            i.max_seqlen_q,
            i.cu_seqlens_q,
            i.max_seqlen_k,
            cu_seqlens_k=i.cu_seqlens_q,
            softmax_scale=i.softmax_scale,
            causal=True,
            fa_version=3,
        )
        return out

    return call


def fa3_schedule(i: Paged) -> Tensor | None:
    """What vLLM works out once a step and gives to FA3 in every layer; None where it cannot be made."""
    if not i.q.is_cuda or not has_peer("vllm"):
        return None
    try:
        from vllm.vllm_flash_attn import get_scheduler_metadata

        found: Tensor = get_scheduler_metadata(
            batch_size=i.seqlens_k.shape[0],
            max_seqlen_q=i.max_seqlen_q,
            max_seqlen_k=i.max_seqlen_k,
            num_heads_q=i.q.shape[1],
            num_heads_kv=i.k_cache.shape[2],
            headdim=i.q.shape[2],
            cache_seqlens=i.seqlens_k,
            qkv_dtype=i.q.dtype,
            cu_seqlens_q=i.cu_seqlens_q,
            page_size=i.k_cache.shape[1],
            causal=True,
            window_size=i.window or (-1, 0),
        )
    except (ImportError, AttributeError, RuntimeError, TypeError):
        # Its own row of the table then says that there is none; the plain call stands beside it.
        return None
    return found


def unified(fp8: bool = False) -> Callable[..., Tensor]:
    """vLLM's Triton kernel for all; the scales are [1] float32."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    mode = KVQuantMode.FP8_PER_TENSOR if fp8 else KVQuantMode.NONE

    def call(i: Paged, k_scale: Tensor, v_scale: Tensor) -> Tensor:
        out = torch.empty_like(i.q)
        # The buffers that vLLM adds, for a split over the keys, are for fewer sequences that decode than are here.
        unified_attention(
            q=i.q,
            k=i.k_cache,
            v=i.v_cache,
            out=out,
            cu_seqlens_q=i.cu_seqlens_q,
            max_seqlen_q=i.max_seqlen_q,
            seqused_k=i.seqlens_k,
            max_seqlen_k=i.max_seqlen_k,
            softmax_scale=i.softmax_scale,
            causal=True,
            window_size=i.window or (-1, -1),
            block_table=i.block_table,
            softcap=i.softcap,
            q_descale=None,
            k_descale=k_scale,
            v_descale=v_scale,
            kv_quant_mode=mode,
            **({"sinks": i.sinks} if i.sinks is not None else {}),
        )
        return out

    return call


def sglang() -> Callable[..., Tensor]:
    """sglang's extend kernel; where older tokens lie in a pool of single ones, and where each sequence's begin."""
    from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd

    def call(
        i: Paged, k: Tensor, v: Tensor, tokens: Tensor, token_starts: Tensor, window_starts: Tensor | None
    ) -> Tensor:
        out = torch.empty_like(i.q)
        extend_attention_fwd(
            i.q,
            k,
            v,
            out,
            i.k_cache.flatten(0, 1),
            i.v_cache.flatten(0, 1),
            i.cu_seqlens_q,
            token_starts,
            tokens,
            None,
            True,
            None,
            i.max_seqlen_q,
            1.0,
            1.0,
            sm_scale=i.softmax_scale,
            sliding_window_size=i.window[0] if i.window else -1,
            window_kv_offsets=window_starts if i.window else None,
        )
        return out

    return call


def context() -> Callable[..., Tensor]:
    """vLLM's older kernel, over an x-packed cache; the same call serves ours of that signature."""
    from vllm.v1.attention.ops.prefix_prefill import context_attention_fwd

    return by_engines_signature(context_attention_fwd)


def by_engines_signature(function: Callable[..., object]) -> Callable[..., Tensor]:
    """A function with the signature of ``context_attention_fwd``; ``window``: tokens that a token sees, or None."""

    def call(i: Paged, k: Tensor, v: Tensor, caches: Pair, dtype: str, scales: Pair, window: int | None) -> Tensor:
        out = torch.empty_like(i.q)
        function(
            i.q,
            k,
            v,
            out,
            dtype,
            *caches,
            i.block_table,
            i.cu_seqlens_q,
            i.seqlens_k,
            i.max_seqlen_k,
            i.max_seqlen_q,
            *scales,
            sliding_window=window,
            sm_scale=i.softmax_scale,
        )
        return out

    return call
