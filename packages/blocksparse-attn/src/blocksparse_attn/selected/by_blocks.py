"""Launches of selected attention block by block: the entries of all lists, sorted, and the two kernels over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from blocksparse_attn.kernels.selected import Inputs
from blocksparse_attn.kernels.selected_blocks import (
    NOTHING,
    BlocksConfig,
    BlockStrides,
    Entries,
    Factors,
    attend_blocks,
    combine_blocks,
)
from blocksparse_attn.selected.arguments import Tensors
from blocksparse_attn.selected.plan import Problem, SelectedPlan
from kernel_reference.integers import cdiv, power_of_two_at_least
from kernel_reference.launching import Launch

Tensor = torch.Tensor
Pointer = Tensor | int | None

_CHUNK = 256


def prepare_by_blocks(
    problem: Problem, plan: SelectedPlan, forms: Tensors, device: torch.device
) -> Callable[..., None]:
    """A prepared launch, called with the op's twelve tensors."""
    size, size_v, heads = problem.head_dim, problem.head_dim_v, problem.num_heads_kv
    s_k, s_v = (
        s if problem.page_layout == "NHD" else (s[0], s[2], s[1], s[3])
        for s in (forms.k_cache.stride(), forms.v_cache.stride())
    )
    config = BlocksConfig(
        GROUP=problem.group, HEADS_KV=heads, D=size, BLOCK_D=max(16, power_of_two_at_least(size)), DV=size_v,
        BLOCK_DV=max(16, power_of_two_at_least(size_v)), PAGE=problem.page_size, BLOCK=problem.block_size,
        TOPK=problem.topk, TOPK_P=power_of_two_at_least(problem.topk),
        TOKEN_ROWS=power_of_two_at_least(problem.group), BLOCK_M=plan.block_m, CHUNK=_CHUNK, STAGES=plan.num_stages,
        K_SCALES=0 if forms.k_scale is None else forms.k_scale.shape[0],
        V_SCALES=0 if forms.v_scale is None else forms.v_scale.shape[0],
    )  # fmt: skip
    strides = BlockStrides(forms.q.stride(), s_k, s_v, forms.out.stride())
    s_lse = (0, 1) if forms.lse is None else forms.lse.stride()
    blocks = max(1, cdiv(problem.capacity, problem.block_size))
    pages, s_table = forms.k_cache.shape[0], forms.block_table.stride(0)
    factors = Factors(problem.softmax_scale, problem.k_factor, problem.v_factor)
    most = min(plan.by_blocks, problem.tokens)
    launches = {}
    for tokens in {most, problem.tokens % most or most}:
        entries = tokens * heads * problem.topk
        attend = Launch(
            attend_blocks, (cdiv(entries, _CHUNK), 1, 1),
            (entries, blocks, pages, s_table, factors, strides, config), device, group=_grouped,
            num_warps=plan.num_warps,
        )  # fmt: skip
        combine = Launch(combine_blocks, (tokens * heads, 1, 1), (*s_lse, strides, config), device, num_warps=4)
        launches[tokens] = attend, combine

    def run(*twelve: Tensor | None) -> None:
        given = Tensors(*twelve)  # type: ignore[arg-type]
        for first in range(0, problem.tokens, most):
            rows = slice(first, min(first + most, problem.tokens))
            attend, combine = launches[rows.stop - first]
            number, order, reach, inside = sorted_entries(problem, given, rows, blocks)
            part = given.q.new_empty(order.numel() * problem.group * size_v)
            part_lse = torch.empty(order.numel() * problem.group, dtype=torch.float32, device=device)
            attend(
                given.q[rows], given.k_cache, given.v_cache, None, given.k_scale, given.v_scale, given.block_table,
                number, order, reach, part, part_lse,
            )  # fmt: skip
            lse = None if given.lse is None else given.lse[:, rows]
            combine(part, part_lse, reach, inside, given.sinks, given.out[rows], lse)

    return run


def sorted_entries(problem: Problem, given: Tensors, rows: slice, blocks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Entries of these rows' lists, by number, as ``Entries`` has them, and int8: which rows are of a sequence.

    On the tensors' device, without waiting for it; of lists of any content.
    """
    device, heads = given.indices.device, problem.num_heads_kv
    row = torch.arange(rows.start, rows.stop, device=device)
    bounds = given.cu_seqlens_q.long().clamp(0, problem.tokens)
    sequence = torch.searchsorted(bounds[1:].contiguous(), row, right=True)
    inside = sequence < problem.sequences
    sequence = sequence.clamp(max=problem.sequences - 1)
    begin, end, length = bounds[sequence], bounds[sequence + 1], given.seqlens_k.long()[sequence]
    inside = inside & (begin <= row) & (end - begin <= length) & (length <= problem.capacity)
    high = length - end + row + 1 if problem.causal else length
    high = torch.where(inside, high, 0).int()[:, None, None]
    listed = given.indices[rows]
    there = (listed >= 0) & (listed < (high + (problem.block_size - 1)) // problem.block_size)
    reach = torch.where(there, (high - listed * problem.block_size).clamp(max=problem.block_size), 0)
    first = (sequence * (blocks * heads)).int()[:, None, None] + torch.arange(heads, device=device).int()[:, None]
    number, order = torch.where(there, first + listed * heads, int(NOTHING)).flatten().sort(stable=True)
    return number, order, reach, inside.to(torch.int8)


def _grouped(*flat: Pointer) -> tuple[Any, ...]:
    """A kernel's arguments of tensors or, from the second call on, of pointers, in plain tuples."""
    inputs, (table, *listed), results = flat[:6], flat[6:10], flat[10:]
    if type(flat[0]) is int:
        return inputs, table, tuple(listed), *results
    return Inputs(*inputs), table, Entries(*listed), *results
