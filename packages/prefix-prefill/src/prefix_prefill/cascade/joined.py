"""A cascade in one launch: each tile of rows walks the keys of all levels, one after another, with one running softmax.

Levels of their own save nothing where the rows of a sequence fill tiles: as many products are made, and keys that all
rows share come from the cache either way. One walk leaves no partial results, and its programs share all keys alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from kernel_reference.dispatch import fresh
from kernel_reference.integers import cdiv
from kernel_reference.launching import Launch
from prefix_prefill.arguments import PrefillTensors
from prefix_prefill.kernels.join import JoinConfig, join
from prefix_prefill.launch import prepare_prefill
from prefix_prefill.plan import DeviceLimits, PrefillPlan, Problem, fits_hopper, is_gathered, is_packed, plan_prefill
from prefix_prefill.tiles import tokens_per_tile

Tensor = torch.Tensor
Levels = Sequence[PrefillTensors]
# Levels whose ends the kernel for sm_90 knows, the last one included.
_MOST_LEVELS = 3
# The most keys of a tile, from which on a level begins.
_MOST_KEYS = 128
# Rows that fill no tile, of all: more would cost what joining saves.
_MOST_EMPTY = 1 / 32


def joined(problems: Sequence[Problem]) -> Problem:
    """The problem of all levels as one batch: a run of rows that no level cuts may begin at each of their bounds."""
    capacity = sum(cdiv(problem.capacity, _MOST_KEYS) * _MOST_KEYS for problem in problems)
    runs = sum(problem.sequences + 1 for problem in problems)
    return replace(problems[-1], carried=0, joined=len(problems) - 1, sequences=runs, capacity=capacity)


def may_be_joined(problems: Sequence[Problem], plan: PrefillPlan) -> bool:
    """Whether the kernel is written for levels like these: of one cache, which only memory tells."""
    last = problems[-1]
    other = last.draft or last.token_scales or is_packed(last) or is_gathered(last)
    whole = plan.hopper and plan.block_n % last.page_size == 0
    counted = joined(problems).capacity < 2**31 and last.tokens < 2**31
    return whole and counted and 1 < len(problems) <= _MOST_LEVELS and not other


def joined_plan(problems: Sequence[Problem], limits: DeviceLimits) -> PrefillPlan | None:
    """The plan of one launch where shapes tell that it is the quicker way: each sequence's rows fill tiles."""
    last = problems[-1]
    if not limits.hopper or not last.tma or not fits_hopper(last) or any(problem.num_splits for problem in problems):
        return None
    plan = plan_prefill(joined(problems), limits)
    if not plan.hopper or plan.block_m < 128 or not may_be_joined(problems, plan):
        return None
    tokens = tokens_per_tile(last.group, plan.block_m)
    if last.tokens == last.sequences * last.max_seqlen_q:
        # All are as long, if the bound is right.
        tiles = last.sequences * cdiv(last.max_seqlen_q, tokens)
    else:
        tiles = last.tokens // tokens + last.sequences
    return plan if tiles * tokens <= last.tokens * (1 + _MOST_EMPTY) else None


def have_one_cache(levels: Levels) -> bool:
    """Whether all levels have the same pages, aligned as TMA asks."""
    k, v = levels[-1].k_cache, levels[-1].v_cache
    if k.data_ptr() % 16 or v.data_ptr() % 16:
        return False
    return all(
        own is other or (own.data_ptr() == other.data_ptr() and own.stride() == other.stride())
        for level in levels[:-1]
        for own, other in ((level.k_cache, k), (level.v_cache, v))
    )


def prepare_joined(problems: Sequence[Problem], plan: PrefillPlan, levels: Levels) -> Callable[[Levels], None]:
    """What attends to all levels at once, by a plan of :func:`joined`; called with tensors that look like these."""
    last, device = levels[-1], levels[-1].q.device
    problem = joined(problems)
    count, size = len(problems), (problem.sequences, problem.capacity // problem.page_size)
    spare = _MOST_LEVELS - count
    counts = (
        problem.tokens,
        problem.num_blocks,
        *(*(each.sequences for each in problems), *[0] * spare),
        *(*(level.block_table.stride()[0] for level in levels), *[0] * spare),
        *(*(each.capacity for each in problems), *[0] * spare),
        size[1],
    )
    config = JoinConfig(LEVELS=count, KEYS=plan.block_n, PAGE=problem.page_size)

    def grouped(*given: Tensor) -> tuple[object, ...]:
        tables, bounds, lengths = (given[i * count : (i + 1) * count] for i in range(3))
        return tables, bounds, lengths, *given[3 * count :]

    joining = Launch(join, (problem.sequences, 1, 1), (*counts, config), device, group=grouped, num_warps=4)
    sizes = (size, (size[0] + 1,), (count, size[0]))

    def batch_of(made: Sequence[Tensor], tensors: PrefillTensors) -> PrefillTensors:
        table, bounds, lengths = made
        return tensors._replace(block_table=table, cu_seqlens_q=bounds, seqlens_k=lengths)

    forms = [torch.empty(each, dtype=torch.int32, device="meta") for each in sizes]
    attend = prepare_prefill(problem, plan, batch_of(forms, last))

    def run(levels: Levels) -> None:
        made = [fresh(each, dtype=torch.int32, device=device) for each in sizes]
        joining(
            *(level.block_table for level in levels),
            *(level.cu_seqlens_q for level in levels),
            *(level.seqlens_k for level in levels),
            *made,
        )
        attend(*batch_of(made, levels[-1]))

    return run
