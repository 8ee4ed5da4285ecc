"""Launches of the kernels that combine partial results: of tiles in pieces, of splits, of two results.

Each comes with the workspace that the attention before it leaves its partial results in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

import torch

from kernel_reference.dispatch import allocator_of
from kernel_reference.integers import cdiv, power_of_two_at_least
from kernel_reference.lasting import lasting
from kernel_reference.launching import Launch, Run, launch_nothing
from kernel_reference.packing import Late
from prefix_prefill.addressing import Batch, largest_of
from prefix_prefill.arguments import MergeTensors, PrefillTensors
from prefix_prefill.kernels import merge
from prefix_prefill.plan import PrefillPlan, may_be_in_parts, programs_of
from prefix_prefill.tiles import heads_per_tile, most_tiles, num_slots, tokens_per_tile

Tensor = torch.Tensor
# What attends to a batch, of what was made ready for another one of the same layer.
Sized = Callable[[Batch], Run]

# Rows, or tokens, that one program of a merge kernel takes; of a tile in pieces it takes one.
_MERGED_ROWS = 16
# Programs that merge pieces, at the most, for each that attends.
_MERGING = 16
# Numbers of an entry that says which tile is in pieces: see kernels/merge.py.
_ENTRY = 8
_TENSORS = len(PrefillTensors._fields)
LAUNCH_NOTHING = Run(launch_nothing, lambda *_: False)


def with_pieces(attend: Sized, first: Batch, plan: PrefillPlan, forms: PrefillTensors, device: torch.device) -> Sized:
    """A launch of the kernel for sm_90, which may leave tiles in parts, and one that merges them."""
    if plan.num_splits == 1:
        noted_on = device if may_be_in_parts(plan) else None
        return lambda batch: _without_pieces(attend(batch), noted_on)
    from prefix_prefill.kernels.hopper.merging import MergeConfig, merge_pieces

    problem = first.problem
    # The interpreter knows no launches that depend on each other.
    dependent = device.type != "cpu"
    tile = tokens_per_tile(problem.group, plan.block_m), plan.block_m
    block_d = max(16, power_of_two_at_least(problem.head_dim_v))
    config = MergeConfig(
        GROUP=problem.group,
        HEADS_KV=problem.num_heads_kv,
        HEADS=heads_per_tile(problem.group, plan.block_m),
        D=problem.head_dim_v,
        BLOCK_D=block_d,
        # A lane has four columns: so no warp waits for another one.
        WARPS=max(1, block_d // 128),
        LIMIT=largest_of(forms.out),
        WIDE=(problem.head_dim_v - 1) * forms.out.stride()[2] >= 2**31,
        DEPENDENT=dependent,
    )

    def sizes(batch: Batch) -> tuple[int, int, int, int]:
        """Entries and rows of the workspace; programs that merge, and how many of them take a tile."""
        problem = batch.problem
        programs = programs_of(problem, plan)
        # By number of the piece, for all rows; by program, parts of two tiles for each, of which one begins there.
        entries = most_tiles(problem, plan.block_m) * plan.num_splits if plan.num_splits else programs
        rows = problem.tokens * problem.num_heads * plan.num_splits if plan.num_splits else 2 * programs * plan.block_m
        # No more for a tile than it has rows, if max_seqlen_q is right.
        most = _MERGING * plan.programs
        in_tile = min(plan.block_m, problem.max_seqlen_q * config.HEADS)
        across = max(1, min(in_tile, most // entries))
        return entries, rows, min(entries, most) * across, across

    def counts(batch: Batch, across: int) -> tuple[int, ...]:
        return batch.problem.tokens, *batch.s_lse, across, *tile

    _, _, programs, across = sizes(first)
    rest = (*counts(first, across), problem.out_scale, forms.out.stride(), config)
    merging = Launch(merge_pieces, (programs, 1, 1), rest, device, dependent_launch=dependent, num_warps=config.WARPS)

    def sized(batch: Batch) -> Run:
        entries, rows, programs, across = sizes(batch)
        own = merging if batch is first else merging.resized((programs, 1, 1), counts(batch, across))
        return _attend_and_merge(attend(batch), own, (rows, config.D, entries), device)

    return sized


def _without_pieces(attend: Run, noted_on: torch.device | None) -> Run:
    """noted_on: where the kernel takes a workspace, in which it says that nothing is in parts; None: it takes none."""
    new: list[Callable[[], Tensor]] = []
    if noted_on is not None:
        # Of either type that the kernel takes: a view of one as the other takes the host longer.
        new = [_scratch((1, _ENTRY), torch.int64, noted_on), _scratch((4,), torch.float32, noted_on)]

    def run(*tensors: Tensor | None) -> None:
        noted, part = [make() for make in new] or (None, None)
        attend(*tensors[:_TENSORS], part, part, noted, *tensors[_TENSORS:])

    def pieces() -> tuple[int | None, ...]:
        return 3 * (None if noted_on is None else _nothing_in_parts(noted_on).data_ptr(),)

    def with_places(*pointers: Any) -> tuple[Any, ...]:
        return *pointers[:_TENSORS], *pieces(), *pointers[_TENSORS:]

    return Run(
        run,
        lambda *pointers: attend.at(*with_places(*pointers)),
        lambda *pointers: attend.again(*with_places(*pointers)),
    )


@lru_cache
def _nothing_in_parts(device: torch.device) -> Tensor:
    """One for all calls past the dispatcher, into which every one writes the same, and of which nobody reads: memory of
    its own would take each call 1 us. Calls of the op have some: torch.compile's CUDA graphs own what is allocated
    under them, and refuse what stays.
    """
    return lasting(lambda: torch.empty((1, _ENTRY), dtype=torch.int64, device=device), device)


def _attend_and_merge(attend: Run, merge_pieces: Launch, sizes: tuple[int, int, int], device: torch.device) -> Run:
    """Both kernels, over a workspace for so many rows of so many columns, and entries."""
    rows, columns, entries = sizes
    forms = ((rows, columns), torch.float32), ((rows,), torch.float32), ((entries + 1, _ENTRY), torch.int64)
    new_part, new_part_lse, new_noted = [_scratch(size, dtype, device) for size, dtype in forms]
    # The same in one, at multiples of 16 bytes.
    ends = [*accumulate(cdiv(prod(size) * dtype.itemsize, 16) * 16 for size, dtype in forms)]
    new_workspace = _scratch((ends[-1],), torch.uint8, device)

    def run(*tensors: Tensor | None) -> None:
        given = PrefillTensors(*tensors[:_TENSORS])  # type: ignore[arg-type]
        part, part_lse, noted = new_part(), new_part_lse(), new_noted()
        attend(*tensors[:_TENSORS], part, part_lse, noted, *tensors[_TENSORS:])
        merge_pieces(given.sinks, given.out_scale, given.out, given.lse, part, part_lse, noted)

    def merged(*pointers: Any) -> tuple[Any, ...]:
        given = PrefillTensors(*pointers[:_TENSORS])
        return given.sinks, given.out_scale, given.out, given.lse

    def at(*pointers: Any) -> bool:
        workspace = new_workspace()
        part = workspace.data_ptr()
        pieces = part, part + ends[0], part + ends[1]
        started = merge_pieces.is_ready() and attend.at(*pointers[:_TENSORS], *pieces, *pointers[_TENSORS:])
        return started and merge_pieces.at(*merged(*pointers), *pieces)

    def again(*pointers: Any) -> Callable[..., bool] | None:
        pieces = _late_behind(pointers, 3)
        attend_again = attend.again(*pointers[:_TENSORS], *pieces, *pointers[_TENSORS:])
        merge_again = merge_pieces.again(*merged(*pointers), *pieces)
        if attend_again is None or merge_again is None:
            return None
        behind_part, behind_lse, _ = ends

        def start(*late: int) -> bool:
            workspace = new_workspace()
            part = workspace.data_ptr()
            late = *late, part, part + behind_part, part + behind_lse
            return attend_again(*late) and merge_again(*late)

        return start

    return Run(run, at, again)


def _late_behind(pointers: Sequence[Any], count: int) -> tuple[Late, ...]:
    """So many addresses more that are not known before."""
    known = sum([type(pointer) is Late for pointer in pointers])
    return tuple([Late(number) for number in range(known, known + count)])


@lru_cache(256)
def _scratch(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """What makes scratch memory while a call runs."""
    strides = [*accumulate(reversed(size[1:]), mul, initial=1)]
    return allocator_of(size, tuple(reversed(strides)), dtype, device)


def with_splits(
    attend: Callable[[Batch], Launch], first: Batch, plan: PrefillPlan, forms: PrefillTensors, device: torch.device
) -> Sized:
    """A launch that may leave partial results in a workspace, and then one that merges them."""
    if plan.num_splits == 1:
        # Of a workspace's type, so that the same kernel takes it.
        nothing = _scratch((0,), torch.float32, device)

        def whole(batch: Batch) -> Run:
            start = attend(batch)
            return Run(
                lambda *tensors: start(*tensors[:_TENSORS], nothing(), *tensors[_TENSORS:]),
                lambda *pointers: start.at(*pointers[:_TENSORS], 0, *pointers[_TENSORS:]),
                lambda *pointers: start.again(*pointers[:_TENSORS], 0, *pointers[_TENSORS:]),
            )

        return whole
    problem = first.problem
    config = merge.SplitConfig(
        H=problem.num_heads,
        D=problem.head_dim_v,
        BLOCK_D=max(16, power_of_two_at_least(problem.head_dim_v)),
        TOKENS=_MERGED_ROWS,
        NEW_KV=problem.new_kv,
        LIMIT=largest_of(forms.out),
        SKIP_DECODE=problem.skip_decode,
        WIDE=(problem.head_dim_v - 1) * forms.out.stride()[2] >= 2**31,
    )

    def counts(batch: Batch) -> tuple[int, ...]:
        problem = batch.problem
        slots = num_slots(problem, _MERGED_ROWS)
        return problem.tokens, problem.sequences, problem.capacity, slots, plan.num_splits, *batch.s_lse

    def grid(batch: Batch) -> tuple[int, int, int]:
        return num_slots(batch.problem, _MERGED_ROWS) * problem.num_heads, 1, 1

    rest = (*counts(first), problem.out_scale, forms.out.stride(), config)
    merging = Launch(merge.merge_splits, grid(first), rest, device, num_warps=4)

    def sized(batch: Batch) -> Run:
        start = attend(batch)
        merge_splits = merging if batch is first else merging.resized(grid(batch), counts(batch))
        parts = plan.num_splits * batch.problem.tokens * problem.num_heads
        new_workspace = _scratch((parts * (problem.head_dim_v + 1),), torch.float32, device)

        def run(*tensors: Tensor | None) -> None:
            given = PrefillTensors(*tensors[:_TENSORS])  # type: ignore[arg-type]
            workspace = new_workspace()
            start(*tensors[:_TENSORS], workspace, *tensors[_TENSORS:])
            of_batch = (given.cu_seqlens_q, given.seqlens_k)
            merge_splits(*of_batch, given.sinks, given.out_scale, given.out, given.lse, workspace)

        def merged(*pointers: Any) -> tuple[Any, ...]:
            given = PrefillTensors(*pointers[:_TENSORS])
            return given.cu_seqlens_q, given.seqlens_k, given.sinks, given.out_scale, given.out, given.lse

        def at(*pointers: Any) -> bool:
            workspace = new_workspace()
            place = workspace.data_ptr()
            started = merge_splits.is_ready() and start.at(*pointers[:_TENSORS], place, *pointers[_TENSORS:])
            return started and merge_splits.at(*merged(*pointers), place)

        def again(*pointers: Any) -> Callable[..., bool] | None:
            (place,) = _late_behind(pointers, 1)
            attend_again = start.again(*pointers[:_TENSORS], place, *pointers[_TENSORS:])
            merge_again = merge_splits.again(*merged(*pointers), place)
            if attend_again is None or merge_again is None:
                return None

            def begin(*late: int) -> bool:
                workspace = new_workspace()
                late = *late, workspace.data_ptr()
                return attend_again(*late) and merge_again(*late)

            return begin

        return Run(run, at, again)

    return sized


def prepare_merge(tensors: MergeTensors) -> Run | Launch:
    """What merges two results, called with tensors that look like these."""
    out_a, lse_a, out_b, lse_b, out, lse = tensors
    rows, num_heads, head_dim = out_a.shape
    if out_a.numel() == 0:
        return LAUNCH_NOTHING
    strides = [merge.Strides(*(x.stride() for x in pair)) for pair in ((out_a, lse_a), (out_b, lse_b), (out, lse))]
    rest = (rows, *strides, num_heads, head_dim, max(16, power_of_two_at_least(head_dim)), _MERGED_ROWS)
    grid = (cdiv(rows, _MERGED_ROWS) * num_heads, 1, 1)
    return Launch(merge.merge_states, grid, rest, out_a.device, num_warps=4)
