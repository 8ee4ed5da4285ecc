"""The indexer's cache of keys: 128 e4m3 and a float32 scale of each token, page by page. Torch only.

A page has the keys of all its tokens first and their scales behind them, as DeepGEMM's ``fp8_paged_mqa_logits`` reads
it and vLLM and SGLang write it: ``uint8 [pages, page_size, 1, 132]``, whose rows of 132 bytes are no tokens' records.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernel_reference.checks import check_dense, describe, fail, known
from tilelang_mla.caches import E4M3, check_begin
from tilelang_mla.indexer.plan import INDEX_DIM

Tensor = torch.Tensor

INDEX_BYTES = INDEX_DIM + 4
_MOST, _LEAST = 448.0, torch.finfo(torch.float32).tiny


class IndexViews(NamedTuple):
    """Keys [pages, page_size, 128] in float8_e4m3fn and their scales [pages, page_size] in float32."""

    keys: Tensor
    scales: Tensor


def quantize_index_k(k: Tensor) -> Tensor:
    """Pages of the indexer's keys in 8 bits: what :func:`tilelang_mla.index_scores` takes as ``k_cache``.

    Each key has a scale of its own, its largest element over 448. An engine that writes token by token assigns to the
    two tensors of :func:`index_cache_views`. Source: the cache of DeepGEMM's ``fp8_paged_mqa_logits``.

    Args:
        k: [pages, page_size, 128], floating.

    Returns:
        uint8 [pages, page_size, 1, 132].

    Raises TypeError or ValueError, naming the argument, for what is not as said above.
    """
    check_dense(k=k)
    if not k.is_floating_point():
        fail("k", "floating", describe(k), TypeError)
    if k.ndim != 3 or known(k.shape[2] != INDEX_DIM):
        fail("k", f"[pages, page_size, {INDEX_DIM}]", describe(k))
    scales = (k.float().abs().amax(-1) / _MOST).clamp(min=_LEAST)
    keys = (k.float() / scales[..., None]).clamp(-_MOST, _MOST).to(E4M3)
    pieces = [piece.contiguous().view(torch.uint8).flatten(1) for piece in (keys, scales)]
    return torch.cat(pieces, 1).view(k.shape[0], k.shape[1], 1, INDEX_BYTES)


def index_cache_views(k_cache: Tensor) -> IndexViews:
    """The keys and the scales of an indexer's cache, in its own memory: assign to them to write a token.

    Args:
        k_cache: uint8 [pages, page_size, 1, 132] or [pages, page_size, 132], pages contiguous, page_size a multiple
            of 4.

    Returns:
        IndexViews(keys, scales): float8_e4m3fn [pages, page_size, 128] and float32 [pages, page_size].

    Raises TypeError or ValueError, naming the argument, for what is not as said above.
    """
    check_dense(k_cache=k_cache)
    check_index_cache("k_cache", k_cache, 4)
    return views_of(k_cache)


def check_index_cache(name: str, k_cache: Tensor, step: int) -> None:
    """Pages of a multiple of so many tokens, in one piece each and 16 bytes apart or a multiple of that."""
    if k_cache.dtype != torch.uint8:
        fail(f"{name}.dtype", "uint8", k_cache.dtype, TypeError)
    right = k_cache.ndim in (3, 4) and not known(k_cache.shape[-1] != INDEX_BYTES)
    if not right or (k_cache.ndim == 4 and known(k_cache.shape[2] != 1)):
        fail(name, f"[pages, page_size, 1, {INDEX_BYTES}] or [pages, page_size, {INDEX_BYTES}]", describe(k_cache))
    if known(k_cache.shape[1] % step != 0) or known(k_cache.shape[1] < step):
        fail(name, f"of pages of a multiple of {step} tokens", describe(k_cache))
    if known(k_cache.stride(-1) != 1) or known(k_cache.stride(1) != INDEX_BYTES):
        fail(name, "of contiguous pages", describe(k_cache))
    check_begin(name, k_cache)
    if known(k_cache.shape[0] > 1) and (known(k_cache.stride(0) % 16 != 0) or known(k_cache.stride(0) == 0)):
        fail(name, "of pages 16 bytes apart or a multiple of that", describe(k_cache))


def views_of(k_cache: Tensor) -> IndexViews:
    """The same of a cache that has been checked."""
    pages, page_size = k_cache.shape[:2]
    by_page = k_cache.stride(0)
    keys = k_cache.as_strided((pages, page_size, INDEX_DIM), (by_page, INDEX_DIM, 1)).view(E4M3)
    begin = k_cache.storage_offset() + page_size * INDEX_DIM
    scales = k_cache.as_strided((pages, 4 * page_size), (by_page, 1), begin).view(torch.float32)
    return IndexViews(keys, scales)
