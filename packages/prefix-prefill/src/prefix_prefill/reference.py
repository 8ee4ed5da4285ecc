"""The CPU implementation of the ops: each sequence in float32, its cached keys and values made dense."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch

from kernel_reference.attention import AttentionResult, attention, merge_attention_states
from kernel_reference.checks import values_are_checked
from kernel_reference.paging import Scale, gather
from kernel_reference.ragged import clamped_ranges
from prefix_prefill import arguments
from prefix_prefill.arguments import FP8, MergeTensors, PrefillTensors
from prefix_prefill.cascade import arguments as levels
from prefix_prefill.plan import Problem
from prefix_prefill.values import check_values

Tensor = torch.Tensor


def prefill(*given: Any) -> None:
    """The op ``prefill`` on a CPU."""
    tensors, numbers = arguments.prefill_arguments(given)
    problem = arguments.check_prefill(tensors, numbers)
    if values_are_checked(tensors.q.device):
        check_values(tensors, numbers)
    arguments.overlap_of_prefill(tensors)(*tensors)
    sequences = _sequences(problem, tensors)
    skipped = [rows.start for _, rows, *_ in sequences if problem.skip_decode and rows.stop == rows.start + 1]
    _clear(tensors.out, tensors.lse, skipped)
    for i, rows, context, cached in sequences:
        if rows.start not in skipped:
            _attend(problem, tensors, i, rows, context, cached)


def cascade(*given: Any) -> None:
    """The op ``cascade`` on a CPU: level by level, merged."""
    tensors, numbers = levels.cascade_arguments(given)
    problems = levels.check_cascade(tensors, numbers)
    if values_are_checked(tensors.q.device):
        levels.check_cascade_values(tensors, numbers)
    levels.overlap_of_cascade(tensors)(*levels.flat(tensors))
    _clear(tensors.out, tensors.lse, [])
    every = levels.tensors_of_levels(tensors)
    heads, rows_in_all = tensors.q.shape[1], tensors.q.shape[0]
    parts = []
    for problem, level in zip(problems, every, strict=True):
        out, lse = torch.zeros(tensors.out.shape), torch.full((heads, rows_in_all), -torch.inf)
        sequences = _sequences(problem, level)
        for i, rows, context, cached in sequences:
            _attend(problem, level._replace(out=out, lse=lse), i, rows, context, cached)
        parts.append(AttentionResult(out, lse))
    whole = reduce(lambda a, b: merge_attention_states(*a, *b, compute_dtype=torch.float32), parts)
    for _, rows, *_ in sequences:
        tensors.out[rows] = _rounded(whole.out[rows], problem, every[-1])
        if tensors.lse is not None:
            tensors.lse[:, rows] = whole.lse[:, rows]


def _sequences(problem: Problem, tensors: PrefillTensors) -> list[tuple[int, slice, int, int]]:
    """Number, rows, older tokens and tokens in the cache of the sequences that can be."""
    found = []
    ranges = clamped_ranges(tensors.cu_seqlens_q, problem.tokens)
    for i, ((begin, end), total) in enumerate(zip(ranges, tensors.seqlens_k.tolist(), strict=True)):
        context = total - (end - begin)
        cached = context if problem.new_kv else total
        if end > begin and (total if problem.shared else context) >= 0 and cached <= problem.capacity:
            found.append((i, slice(begin, end), context, cached))
    return found


def _attend(problem: Problem, tensors: PrefillTensors, i: int, rows: slice, context: int, cached: int) -> None:
    """One sequence. Pages wholly before the window are not read; positions count from the first page that is."""
    first = min(max(0, context - problem.left), cached) // problem.page_size if problem.left >= 0 else 0
    pages = tensors.block_table[i : i + 1, first:]
    tokens = cached - first * problem.page_size
    keys, values = (
        _dense(cache, pages, tokens, problem.page_layout, number, scale)
        for cache, number, scale in (
            (tensors.k_cache, problem.k_scale, tensors.k_scale), (tensors.v_cache, problem.v_scale, tensors.v_scale)
        )
    )  # fmt: skip
    if tensors.k is not None and tensors.v is not None:
        keys, values = torch.cat([keys, tensors.k[rows].float()]), torch.cat([values, tensors.v[rows].float()])
    q = quantised(tensors.q[rows]) if problem.quantize_q else tensors.q[rows]
    result = attention(
        q, keys, values, softmax_scale=problem.softmax_scale, window=(problem.left, problem.right),
        softcap=problem.softcap, sinks=tensors.sinks, alibi_slopes=tensors.alibi_slopes, compute_dtype=torch.float32,
        mask=None if tensors.draft_mask is None else _drafted(tensors.draft_mask[rows], keys.shape[0]),
    )  # fmt: skip
    tensors.out[rows] = _rounded(result.out, problem, tensors)
    if tensors.lse is not None:
        tensors.lse[:, rows] = result.lse


def quantised(q: Tensor) -> Tensor:
    """Rows of heads, each rounded to e4m3 in units of the power of two by which its largest number is 128 to 256."""
    largest = q.float().abs().amax(-1, keepdim=True)
    # Units and their inverses are normal numbers.
    exponent = (largest.frexp().exponent - 1).clamp(-119, 126) - 7
    return q.float().ldexp(-exponent).to(torch.float8_e4m3fn).float().ldexp(exponent)


def _rounded(whole: Tensor, problem: Problem, tensors: PrefillTensors) -> Tensor:
    """Outputs as ``tensors.out`` holds them."""
    dtype = tensors.out.dtype
    if dtype in FP8:
        limit = torch.finfo(dtype).max
        scale = tensors.out_scale
        divisor = problem.out_scale if scale is None else scale.reshape(()) * problem.out_scale
        whole = (whole / divisor).clamp(-limit, limit)
    return whole.to(dtype)


def _drafted(bits: Tensor, num_keys: int) -> Tensor:
    """What new tokens [q_len] with these masks of drafts see of keys, the new ones last: [1, q_len, num_keys]."""
    seen = torch.ones(1, len(bits), num_keys, dtype=torch.bool)
    places = torch.arange(len(bits))
    seen[0, :, num_keys - len(bits) :] = ((bits[:, None] >> places.clamp(max=63)) & 1).bool() & (places < 63)
    return seen


def _clear(out: Tensor, lse: Tensor | None, kept: list[int]) -> None:
    """What rows of no sequence hold, in all rows but those to be left as they are."""
    cleared = torch.ones(out.shape[0], dtype=torch.bool)
    cleared[kept] = False
    # Indexing is not implemented for 8-bit floats; zero has no bits set in any dtype.
    (out.view(torch.uint8) if out.element_size() == 1 else out)[cleared] = 0
    if lse is not None:
        lse[:, cleared] = -torch.inf


def _dense(cache: Tensor, pages: Tensor, tokens: int, page_layout: str, number: float, scale: Tensor | None) -> Tensor:
    """The first tokens [tokens, Hkv, D] of one sequence's pages [1, columns], in float32, scaled."""
    if scale is not None and scale.numel() == 1:
        scale = scale.reshape(())
    if cache.shape[0] == 0:
        # No page exists, and one that does not exist reads as zeros.
        cache = cache.new_zeros((1, *cache.shape[1:]))
        pages = torch.full_like(pages, -1)
        scale = None if scale is None or scale.ndim == 3 else scale
    by: Scale | None = scale
    if scale is None and (number != 1 or cache.dtype in FP8):
        by = number
    lengths = torch.tensor([tokens], dtype=torch.int64)
    return gather(cache, pages, lengths, page_layout, scale=by, dtype=torch.float32).tokens


def merge(*given: Tensor) -> None:
    """The op ``merge`` on a CPU."""
    tensors = MergeTensors(*given)
    arguments.check_merge(*tensors)
    arguments.overlap_of_merge(tensors)(*tensors)
    out_a, lse_a, out_b, lse_b, out, lse = tensors
    result = merge_attention_states(out_a, lse_a, out_b, lse_b, compute_dtype=torch.float32)
    out.copy_(result.out)
    lse.copy_(result.lse)
