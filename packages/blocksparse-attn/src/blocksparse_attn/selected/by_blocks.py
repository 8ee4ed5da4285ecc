"""Launches of selected attention block by block: the entries of all lists, sorted, and the two kernels over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from blocksparse_attn.kernels.groups import Bounds
from blocksparse_attn.kernels.selected import Inputs
from blocksparse_attn.kernels.selected_blocks import (
    BlocksConfig,
    BlockStrides,
    Entries,
    Factors,
    attend_blocks,
    begin_numbers,
    combine_blocks,
    number_entries,
    place_entries,
    share_entries,
)
from blocksparse_attn.launch import persistent_programs
from blocksparse_attn.selected.arguments import Tensors
from blocksparse_attn.selected.plan import Problem, SelectedPlan, tokens_of_shared
from kernel_reference.integers import cdiv, power_of_two_at_least, power_of_two_in
from kernel_reference.launching import Launch, TmaBox, TmaLaunch

Tensor = torch.Tensor
Pointer = Tensor | int | None

# MiniMax-M3's prefill of 8192 tokens on an H100 (triton 3.6.0, 2026-11-27): lists alike to three quarters, which leave
# a block few tokens, 1929 us for 2094 with 256; random ones 2755 for 2784.
_CHUNK = 128
# With as many keys a step as a block of 64 or 128 has; of 64, twice as many, blocks of 128 take 727 us for 640 (H100).
_STAGES, _Q_STAGES = 2, 2
# Numbers that are counted, in place of sorting entries; those that one program adds up, and entries that one places, at
# a time.
_MOST_COUNTED, _SCANNED, _PLACED = 2**17, 4096, 512
# A tile that shares fewer blocks is not worth partial results more.
_LEAST_SHARED = 4


def prepare_by_blocks(
    problem: Problem, plan: SelectedPlan, forms: Tensors, device: torch.device
) -> Callable[..., None]:
    """A prepared launch, called with the op's twelve tensors."""
    size, size_v, heads = problem.head_dim, problem.head_dim_v, problem.num_heads_kv
    blocks = max(1, cdiv(problem.capacity, problem.block_size))
    # Half of the bits are half of the time of sorting.
    dtype = torch.int16 if blocks * problem.sequences * heads < 2**15 - 1 else torch.int32
    config = BlocksConfig(
        NOTHING=torch.iinfo(dtype).max, GROUP=problem.group, HEADS_KV=heads, HEADS_P=power_of_two_at_least(heads),
        D=size, BLOCK_D=max(16, power_of_two_at_least(size)), DV=size_v,
        BLOCK_DV=max(16, power_of_two_at_least(size_v)), PAGE=problem.page_size, BLOCK=problem.block_size,
        TOPK=problem.topk, TOPK_P=power_of_two_at_least(problem.topk),
        TOKEN_ROWS=power_of_two_at_least(problem.group), BLOCK_M=plan.block_m, CHUNK=_CHUNK, STAGES=plan.num_stages,
        CAUSAL=problem.causal, K_SCALES=0 if forms.k_scale is None else forms.k_scale.shape[0],
        V_SCALES=0 if forms.v_scale is None else forms.v_scale.shape[0],
        TILE=tokens_of_shared(problem) if plan.shared else 0, LEAST_BLOCKS=_LEAST_SHARED,
    )  # fmt: skip
    # Of caches by (page, slot, head, element).
    order = (0, 1, 2, 3) if problem.page_layout == "NHD" else (0, 2, 1, 3)
    s_k, s_v = (tuple(cache.stride(i) for i in order) for cache in (forms.k_cache, forms.v_cache))
    strides = BlockStrides(forms.q.stride(), s_k, s_v, forms.out.stride())
    s_lse = (0, 1) if forms.lse is None else forms.lse.stride()
    pages, s_table = forms.k_cache.shape[0], forms.block_table.stride(0)
    factors = Factors(problem.softmax_scale, problem.k_factor, problem.v_factor)
    most, each = min(plan.by_blocks, problem.tokens), heads * problem.topk
    numbers_in_all = blocks * problem.sequences * heads
    # Those of each turn, and how many entries they are in all.
    counts = (numbers_in_all + 1) * cdiv(problem.tokens, most) if plan.shared and numbers_in_all <= _MOST_COUNTED else 0
    numbering = Launch(
        number_entries, (problem.tokens, 1, 1),
        (problem.tokens, problem.sequences, problem.capacity, blocks, counts, forms.indices.stride()[:2], config),
        device, group=_grouped_for_numbers, num_warps=1,
    )  # fmt: skip
    begin = Launch(begin_numbers, (1, 1, 1), (numbers_in_all, _SCANNED), device, num_warps=16)
    launches = {}
    for tokens in {most, problem.tokens % most or most}:
        entries = tokens * each
        attend = Launch(
            attend_blocks, (cdiv(entries, _CHUNK), 1, 1),
            (entries, blocks, blocks * problem.sequences, pages, s_table, factors, strides, config), device,
            group=_grouped,
            num_warps=plan.num_warps,
        )  # fmt: skip
        combine = Launch(combine_blocks, (tokens * heads, 1, 1), (*s_lse, strides, config), device, num_warps=4)
        share = _sharing(problem, forms, strides, config, tokens, device) if plan.shared else None
        place = Launch(
            place_entries, (cdiv(entries, _PLACED), 1, 1), (entries, _PLACED, config), device, num_warps=4
        )  # fmt: skip
        launches[tokens] = share, place, attend, combine

    def run(*twelve: Tensor | None) -> None:
        given = Tensors(*twelve)  # type: ignore[arg-type]
        numbers, reaches = (
            torch.empty(problem.tokens * each, dtype=kind, device=device) for kind in (dtype, torch.int32)
        )
        all_inside = torch.empty(problem.tokens, dtype=torch.int8, device=device)
        counted = torch.empty(counts, dtype=torch.int32, device=device) if counts else None
        numbering(given.indices, given.cu_seqlens_q, given.seqlens_k, numbers, reaches, all_inside, counted)
        for first in range(0, problem.tokens, most):
            rows = slice(first, min(first + most, problem.tokens))
            share, place, attend, combine = launches[rows.stop - first]
            listed = slice(first * each, rows.stop * each)
            shared: tuple[Tensor | None, ...] = (None, None, None)
            number, reach, inside = numbers[listed], reaches[listed], all_inside[rows]
            own = None if counted is None else counted[first // most * (numbers_in_all + 1) :][: numbers_in_all + 1]
            if share is not None:
                shared = share(given, rows, number, reach, own)
            total = None
            if own is None:
                number, order = number.sort(stable=True)
            else:
                total, unsorted = own[numbers_in_all:], number
                number, order = torch.empty_like(number), torch.empty_like(reach)
                begin(own)
                place(unsorted, own, number, order)
            part = given.q.new_empty(order.numel() * problem.group * size_v)
            part_lse = torch.empty(order.numel() * problem.group, dtype=torch.float32, device=device)
            attend(
                given.q[rows], given.k_cache, given.v_cache, None, given.k_scale, given.v_scale, given.block_table,
                number, order, reach, total, part, part_lse,
            )  # fmt: skip
            lse = None if given.lse is None else given.lse[:, rows]
            combine(part, part_lse, reach, inside, *shared, given.sinks, given.out[rows], lse)

    return run


def _sharing(
    problem: Problem, forms: Tensors, strides: BlockStrides, config: BlocksConfig, tokens: int, device: torch.device
) -> Callable[..., tuple[Tensor, ...]]:
    """The launches of what tiles of tokens share, which is taken from the entries of these: what is shared, and the
    partial results of it."""
    from blocksparse_attn.kernels.hopper.shared import SharedConfig, attend_shared

    heads, group = problem.num_heads_kv, problem.group
    tiles = cdiv(tokens, config.TILE)
    block, s_q = problem.block_size, strides.q
    inner = SharedConfig(
        GROUP=group, HEADS_KV=heads, BLOCK_D=problem.head_dim, BLOCK_DV=problem.head_dim_v, PAGE=problem.page_size,
        BOX=min(block, power_of_two_in(problem.page_size)), LISTED=config.TOPK_P, STAGES=_STAGES,
        Q_STAGES=_Q_STAGES, BLOCK_N=block, PIECE=block,
    )  # fmt: skip
    pages = forms.k_cache.shape[0]
    each = config.TILE // 2
    boxes = [
        TmaBox([tokens, heads, group, problem.head_dim], [s_q[0], s_q[1] * group, s_q[1], 1], [each, 1, group, 64]),
        *(
            TmaBox([pages, heads, problem.page_size, size], [s[0], s[2], s[1], 1], [1, 1, inner.BOX, 64])
            for s, size in ((strides.k, problem.head_dim), (strides.v, problem.head_dim_v))
        ),
    ]
    blocks = max(1, cdiv(problem.capacity, problem.block_size))
    share = Launch(
        share_entries, (tiles * heads, 1, 1), (tokens, config), device, num_warps=1 if problem.topk <= 16 else 4
    )
    factors = (problem.softmax_scale * problem.k_factor, problem.v_factor)
    attend = TmaLaunch(
        attend_shared, (min(tiles * heads, persistent_programs(device)), 1, 1),
        (
            tokens, tiles, blocks, blocks * problem.sequences, pages, forms.block_table.stride(0), factors, inner,
        ), device, boxes, num_warps=4,
    )  # fmt: skip

    def run(
        given: Tensors, rows: slice, numbers: Tensor, reaches: Tensor, counted: Tensor | None
    ) -> tuple[Tensor, ...]:
        shared = torch.empty(tiles * heads * (2 * config.TOPK_P + 1), dtype=torch.int32, device=device)
        part = given.q.new_empty(tokens * problem.num_heads * problem.head_dim_v)
        part_lse = torch.empty(tokens * problem.num_heads, dtype=torch.float32, device=device)
        share(numbers, reaches, shared, counted)
        attend(given.q[rows], given.k_cache, given.v_cache, given.block_table, shared, part, part_lse)
        return shared, part, part_lse

    return run


def _grouped_for_numbers(
    indices: Pointer, cu: Pointer, lengths: Pointer, number: Pointer, reach: Pointer, inside: Pointer, counts: Pointer
) -> tuple[Any, ...]:
    bounds = (cu, None, None, lengths)
    return indices, bounds if type(indices) is int else Bounds(*bounds), number, reach, inside, counts


def _grouped(*flat: Pointer) -> tuple[Any, ...]:
    """A kernel's arguments of tensors or, from the second call on, of pointers, in plain tuples."""
    inputs, (table, *listed), results = flat[:6], flat[6:11], flat[11:]
    if type(flat[0]) is int:
        return inputs, table, tuple(listed), *results
    return Inputs(*inputs), table, Entries(*listed), *results
