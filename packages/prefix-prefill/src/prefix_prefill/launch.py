"""From a checked problem and its plan to launches; called with the tensors of the op, in their order.

On CPU tensors a launch works only under Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported) and
with a plan given: that is how kernels are tested with no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any

import torch

from kernel_reference.checks import fail
from kernel_reference.dispatch import allocator
from kernel_reference.integers import cdiv, power_of_two_at_least, power_of_two_in
from kernel_reference.launching import (
    Launch,
    Run,
    TmaBox,
    TmaLaunch,
    by_alignment,
    device_properties,
    has_gluon,
    launch_nothing,
    without_memory,
)
from prefix_prefill.arguments import MergeTensors, PrefillTensors
from prefix_prefill.kernels import groups, merge, portable
from prefix_prefill.plan import (
    DeviceLimits,
    PrefillPlan,
    Problem,
    column_tiles,
    has_values_split,
    head_tiles,
    heads_per_tile,
    most_tiles,
    num_slots,
    plan_prefill,
    tokens_per_tile,
)

Tensor = torch.Tensor
Start = Callable[..., None]

# Kernels read 8-bit floats as integers: not every target knows the types.
_FP8 = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}
# Rows, or tokens, that one program of a merge kernel takes, of a tile in pieces at a time: there a warp has one.
_MERGED_ROWS, _ROWS_OF_PIECES = 16, 4
# Numbers of an entry that says which tile is in pieces: see kernels/merge.py.
_ENTRY = 8
_TENSORS = len(PrefillTensors._fields)


@lru_cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of the device a tensor is on."""
    found = device_properties(device)
    return DeviceLimits(
        cores=found.cores,
        shared_memory=found.shared_memory,
        hopper=found.capability == (9, 0) and has_gluon(),
        turing=found.capability == (7, 5),
    )


@dataclass(frozen=True)
class _Pages:
    """How keys or values lie in pages: ``x`` elements together, strides by (page, token, head, element / x, rest)."""

    x: int
    strides: tuple[int, int, int, int, int]

    @classmethod
    def of(cls, cache: Tensor, page_layout: str) -> _Pages:
        s = cache.stride()
        if page_layout == "NHD":
            return cls(cache.shape[3], (s[0], s[1], s[2], 0, s[3]))
        if page_layout == "HND":
            return cls(cache.shape[3], (s[0], s[2], s[1], 0, s[3]))
        if cache.ndim == 5:
            return cls(cache.shape[4], (s[0], s[3], s[1], s[2], s[4]))
        return cls(cache.shape[2], (s[0], s[3], s[1], 0, s[2]))

    def reach(self, head_dim: int) -> int:
        """Elements from a head's first element to its last."""
        return (head_dim - 1) // self.x * self.strides[3] + (self.x - 1) * self.strides[4]


def _contiguous_tokens(problem: Problem, values: _Pages, block_n: int) -> int:
    """Tokens of a page that are loaded together where they, not elements, are contiguous; 0 where elements are."""
    box = min(block_n, power_of_two_in(problem.page_size))
    transposed = values.strides[1] == 1 and values.strides[4] != 1
    # Fewer than 16 bytes are no gain.
    return box if transposed and box * problem.cache_bits >= 128 else 0


def _scaling(scale: Tensor | None) -> tuple[int, tuple[int, ...]]:
    """How scales vary, 1 with the kv head at most and 2 with the token too, and strides by (page, token, head)."""
    if scale is None:
        return 0, (0, 0, 0)
    if scale.ndim == 3:
        return 2, scale.stride()
    return 1, (0, 0, scale.stride()[0] if scale.ndim and scale.shape[0] > 1 else 0)


def _limit(out: Tensor) -> int:
    """The largest number of an 8-bit result; others are not clamped."""
    return int(torch.finfo(out.dtype).max) if out.dtype.itemsize == 1 else 0


def _lse_strides(lse: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if lse is None else lse.stride()


def prepare_prefill(problem: Problem, plan: PrefillPlan | None, tensors: PrefillTensors) -> Start:
    """What attends, called with tensors that look like these."""
    if problem.tokens == 0:
        return launch_nothing
    device = tensors.q.device
    forms = PrefillTensors(*map(without_memory, tensors))  # type: ignore[arg-type]

    def make(aligned: bool) -> Start:
        tma = problem.tma and aligned
        chosen = plan
        if chosen is None:
            chosen = plan_prefill(replace(problem, tma=tma), device_limits(device), problem.num_splits)
        elif chosen.hopper and not tma:
            wanted = "without hopper where the cache has scales, softmax_scale is below 0, or keys or values are not"
            fail("plan", f"{wanted} 16-byte aligned and of strides of whole 16 bytes", chosen)
        if chosen.hopper:
            return _with_pieces(_hopper(problem, chosen, forms, device), problem, chosen, forms, device)
        return _with_splits(_portable(problem, chosen, forms, device), problem, chosen, forms, device)

    # Slices of a cache may come aligned or not: k, v and the caches must be for TMA.
    return by_alignment(make, slice(1, 5))


def _grid(problem: Problem, plan: PrefillPlan) -> tuple[int, int, int]:
    """Of the portable kernel: a slot for every tile."""
    slots = num_slots(problem, tokens_per_tile(problem.group, plan.block_m))
    return slots * problem.num_heads_kv * head_tiles(problem.group, plan.block_m) * plan.num_splits, 1, 1


def _programs(problem: Problem, plan: PrefillPlan) -> int:
    """Of the kernel for sm_90: as many as the plan has, and no more than there may be pieces of tiles."""
    if plan.num_splits:
        return min(plan.programs, most_tiles(problem, plan.block_m) * plan.num_splits)
    return plan.programs


def _counts(problem: Problem, block_table: Tensor) -> tuple[int, ...]:
    """The integers of both kernels that differ between batches: arguments of their own, as Triton would specialise on
    those in tuples.
    """
    return problem.tokens, problem.sequences, problem.num_blocks, problem.capacity, block_table.stride()[0]


# The tensors, or their pointers, as the kernels take them, what belongs together in one group. Named one by one, which
# is the quickest way that Python has.


def _for_portable(q, k, v, k_cache, v_cache, table, cu, lengths, alibi, sinks, k_s, v_s, out_s, *rows):  # type: ignore[no-untyped-def]
    out, lse, draft, workspace, *levels = rows
    scales, results = (k_s, v_s, out_s), groups.Results(out, lse, workspace)
    batch = (table, cu, lengths, draft)
    return q, k, v, k_cache, v_cache, batch, (alibi, sinks), scales, results, tuple(levels) or None


def _for_hopper(q, table, cu, lengths, alibi, sinks, k_s, v_s, out_s, out, lse, draft, *parts):  # type: ignore[no-untyped-def]
    return (q, out, lse), (table, cu, lengths, draft), (alibi, sinks), (k_s, v_s, out_s), parts


def _for_hopper_without_tails(*given):  # type: ignore[no-untyped-def]
    return None, None, None, None, *_for_hopper(*given)  # type: ignore[no-untyped-call]


def _portable(problem: Problem, plan: PrefillPlan, forms: PrefillTensors, device: torch.device) -> Start:
    """The kernel for every target."""
    q, k, v, out = forms.q, forms.k, forms.v, forms.out
    d, d_v, nothing = problem.head_dim, problem.head_dim_v, (0, 0, 0)
    k_pages, v_pages = (_Pages.of(cache, problem.page_layout) for cache in (forms.k_cache, forms.v_cache))
    (k_scaled, s_k_scale), (v_scaled, s_v_scale) = _scaling(forms.k_scale), _scaling(forms.v_scale)
    s_k, s_v = (nothing if new is None else new.stride() for new in (k, v))
    reach = max(
        k_pages.reach(d), v_pages.reach(d_v), *((d - 1) * s[2] for s in (q.stride(), s_k)),
        *((d_v - 1) * s[2] for s in (out.stride(), s_v)),
    )  # fmt: skip
    strides = groups.Strides(
        q=q.stride(), k=s_k, v=s_v, k_cache=k_pages.strides, v_cache=v_pages.strides, k_scale=s_k_scale,
        v_scale=s_v_scale, out=out.stride(),
    )  # fmt: skip
    slots = num_slots(problem, tokens_per_tile(problem.group, plan.block_m))
    scores = groups.Scores(problem.softmax_scale, problem.softcap)
    numbers = groups.Numbers(problem.k_scale, problem.v_scale, problem.out_scale, strides)
    config = groups.Config(
        GROUP=problem.group,
        HEADS_KV=problem.num_heads_kv,
        D=d,
        BLOCK_D=max(16, power_of_two_at_least(d)),
        DV=d_v,
        BLOCK_DV=max(16, power_of_two_at_least(d_v)),
        PAGE=problem.page_size,
        BOX=_contiguous_tokens(problem, v_pages, plan.block_n),
        X=k_pages.x,
        STEP=k_pages.strides[1] if k_pages.x < d else 0,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        HEADS=heads_per_tile(problem.group, plan.block_m),
        TOKENS=tokens_per_tile(problem.group, plan.block_m),
        STAGES=plan.num_stages,
        NEW_KV=problem.new_kv,
        FP8=_FP8.get(forms.k_cache.dtype, 0),
        K_SCALED=k_scaled,
        V_SCALED=v_scaled,
        LIMIT=0 if problem.shared else _limit(out),
        SOFTCAP=problem.softcap > 0,
        DRAFT=problem.draft,
        HAS_LEFT=problem.left >= 0,
        HAS_RIGHT=problem.right >= 0,
        SKIP_DECODE=problem.skip_decode,
        SHARED=problem.shared,
        CARRIED=problem.carried,
        WIDE=reach >= 2**31,
    )
    counts = (*_counts(problem, forms.block_table), *_lse_strides(forms.lse), slots, plan.num_splits)
    return Launch(
        portable.attend,
        _grid(problem, plan),
        (*counts, problem.left, problem.right, scores, numbers, config),
        device,
        # The caches, where their dtype is not every target's.
        as_integers=(3, 4) if config.FP8 else (),
        group=_for_portable,
        num_warps=plan.num_warps,
    )


def prepare_kernel(problem: Problem, plan: PrefillPlan, forms: PrefillTensors, device: torch.device) -> Start:
    """The plan's kernel alone, called with the op's tensors and what it has beside them."""
    return (_hopper if plan.hopper else _portable)(problem, plan, forms, device)


def _boxes(problem: Problem, forms: PrefillTensors, box: int, k_columns: int, v_columns: int) -> list[TmaBox]:
    """Of the caches, and of new keys and values, whose rows are as one page; for tiles of so many columns.

    A box is at most 128 bytes wide, over which shared memory is swizzled.
    """
    boxes = []
    for cache, size, columns in (
        (forms.k_cache, problem.head_dim, k_columns), (forms.v_cache, problem.head_dim_v, v_columns)
    ):  # fmt: skip
        page, token, head, _, _ = _Pages.of(cache, problem.page_layout).strides
        sizes = [problem.num_blocks, problem.num_heads_kv, problem.page_size, size]
        width = min(columns, 1024 // problem.cache_bits)
        boxes.append(TmaBox(sizes, [page, head, token, 1], [1, 1, box, width], problem.cache_bits))
    if forms.k is None or forms.v is None:
        return 2 * boxes
    for new, size, columns in ((forms.k, problem.head_dim, k_columns), (forms.v, problem.head_dim_v, v_columns)):
        token, head, _ = new.stride()
        rows = [1, problem.num_heads_kv, problem.tokens, size]
        boxes.append(TmaBox(rows, [8, head, token, 1], [1, 1, box, min(columns, 64)]))
    return boxes


def _hopper(problem: Problem, plan: PrefillPlan, forms: PrefillTensors, device: torch.device) -> Run:
    """The kernel for sm_90, called like the portable one."""
    from prefix_prefill.kernels import hopper

    box = min(plan.block_n, power_of_two_in(problem.page_size))
    k_tiles, v_tiles = (column_tiles(size, problem.cache_bits) for size in (problem.head_dim, problem.head_dim_v))
    if plan.q_in_registers:
        # One of 256 columns would take more registers than there are.
        k_tiles, v_tiles = ((128, 128) if tiles == (256,) else tiles for tiles in (k_tiles, v_tiles))
    boxes = _boxes(problem, forms, box, k_tiles[0], v_tiles[0])
    # A second tile whose boxes are as wide as those of the first comes by the same descriptor.
    k_tail, v_tail = (
        tiles[-1] * problem.cache_bits < min(1024, tiles[0] * problem.cache_bits) for tiles in (k_tiles, v_tiles)
    )
    if k_tail or v_tail:
        boxes += _boxes(problem, forms, box, k_tiles[-1], v_tiles[-1])
    (k_scaled, s_k_scale), (v_scaled, s_v_scale) = _scaling(forms.k_scale), _scaling(forms.v_scale)
    # In units of 8, and None for 1: of strides of 72 Triton would not know that, and 1 it forgets in partitions (3.6).
    all_strides = (forms.q.stride(), forms.out.stride())
    of_rows = [(s[0] // 8, s[1] // 8, None) if s[2] == 1 and not (s[0] | s[1]) % 8 else s for s in all_strides]
    strides = hopper.Strides(s_k_scale[2], s_v_scale[2], s_k_scale[:2], s_v_scale[:2], *of_rows)
    scores = hopper.Scores(problem.softmax_scale, problem.softcap)
    numbers = hopper.Numbers(problem.k_scale, problem.v_scale, problem.out_scale, strides)
    config = hopper.Config(
        GROUP=problem.group,
        HEADS_KV=problem.num_heads_kv,
        D=problem.head_dim,
        DV=problem.head_dim_v,
        K_TILES=k_tiles,
        V_TILES=v_tiles,
        PAGE=problem.page_size,
        BOX=box,
        BLOCK_N=plan.block_n,
        HEADS=heads_per_tile(problem.group, plan.block_m),
        HEAD_TILES=head_tiles(problem.group, plan.block_m),
        TOKENS=tokens_per_tile(problem.group, plan.block_m),
        CONSUMERS=2 if has_values_split(problem) else plan.block_m // 64,
        GROUPS=plan.block_m // 64,
        STAGES=plan.num_stages,
        Q_IN_REGISTERS=plan.q_in_registers,
        IN_PARTS=problem.shared or plan.num_splits != 1,
        IS_FP8=problem.cache_bits == 8,
        K_TOKENS=k_scaled == 2,
        V_TOKENS=v_scaled == 2,
        NEW_KV=problem.new_kv,
        LIMIT=0 if problem.shared else _limit(forms.out),
        ALIBI=problem.alibi,
        SOFTCAP=problem.softcap > 0,
        DRAFT=problem.draft,
        HAS_LEFT=problem.left >= 0,
        HAS_RIGHT=problem.right >= 0,
        SKIP_DECODE=problem.skip_decode,
        SHARED=problem.shared,
        CARRIED=problem.carried,
    )
    rest = (
        *_counts(problem, forms.block_table), *_lse_strides(forms.lse), plan.num_splits, problem.left, problem.right,
        (scores, numbers), config,
    )  # fmt: skip
    grid = (_programs(problem, plan), 1, 1)
    group = _for_hopper if len(boxes) > 4 else _for_hopper_without_tails
    attend = TmaLaunch(hopper.attend, grid, rest, device, boxes, group=group, num_warps=4)

    def in_order(q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, *others: Any) -> tuple[Any, ...]:
        if len(boxes) == 4:
            return k_cache, v_cache, k, v, q, *others
        tails = (k_cache if k_tail else None, v_cache if v_tail else None, k if k_tail else None, v if v_tail else None)
        return k_cache, v_cache, k, v, *tails, q, *others

    return Run(lambda *tensors: attend(*in_order(*tensors)), lambda *pointers: attend.at(*in_order(*pointers)))


def _with_pieces(attend: Run, problem: Problem, plan: PrefillPlan, forms: PrefillTensors, device: torch.device) -> Run:
    """A launch of the kernel for sm_90, which may leave tiles in parts, and one that merges them."""
    if plan.num_splits == 1:
        return Run(
            lambda *tensors: attend(*tensors[:_TENSORS], None, None, None, *tensors[_TENSORS:]),
            lambda *pointers: attend.at(*pointers, None, None, None),
        )
    # The interpreter knows no launches that depend on each other.
    dependent = device.type != "cpu"
    config = merge.MergeConfig(
        GROUP=problem.group,
        HEADS_KV=problem.num_heads_kv,
        HEADS=heads_per_tile(problem.group, plan.block_m),
        TOKENS=tokens_per_tile(problem.group, plan.block_m),
        BLOCK_M=plan.block_m,
        ROWS=_ROWS_OF_PIECES,
        D=problem.head_dim_v,
        BLOCK_D=max(16, power_of_two_at_least(problem.head_dim_v)),
        LIMIT=_limit(forms.out),
        WIDE=(problem.head_dim_v - 1) * forms.out.stride()[2] >= 2**31,
        DEPENDENT=dependent,
    )
    programs = _programs(problem, plan)
    # By number of the piece, for all rows; by program, two for each.
    entries = most_tiles(problem, plan.block_m) * plan.num_splits if plan.num_splits else 2 * programs
    rows = problem.tokens * problem.num_heads * plan.num_splits if plan.num_splits else 2 * programs * plan.block_m
    # As many programs as work at a time, and no more for a tile than it has rows, if max_seqlen_q is right.
    most = 16 * plan.programs
    in_tile = min(plan.block_m, problem.max_seqlen_q * heads_per_tile(problem.group, plan.block_m))
    across = max(1, min(cdiv(in_tile, _ROWS_OF_PIECES), most // entries))
    rest = (problem.tokens, *_lse_strides(forms.lse), problem.out_scale, across, forms.out.stride(), config)
    grid = (min(entries, most) * across, 1, 1)
    merge_pieces = Launch(merge.merge_pieces, grid, rest, device, dependent_launch=dependent, num_warps=4)
    sizes = ((rows, problem.head_dim_v), torch.float32), ((rows,), torch.float32), ((entries + 1, _ENTRY), torch.int64)
    new_part, new_part_lse, new_noted = [_scratch(size, dtype, device) for size, dtype in sizes]
    # The same in one, at multiples of 16 bytes.
    ends = [*accumulate(cdiv(prod(size) * dtype.itemsize, 16) * 16 for size, dtype in sizes)]
    new_workspace = _scratch((ends[-1],), torch.uint8, device)

    def run(*tensors: Tensor | None) -> None:
        given = PrefillTensors(*tensors[:_TENSORS])  # type: ignore[arg-type]
        part, part_lse, noted = new_part(), new_part_lse(), new_noted()
        attend(*tensors[:_TENSORS], part, part_lse, noted, *tensors[_TENSORS:])
        merge_pieces(given.sinks, given.out_scale, given.out, given.lse, part, part_lse, noted)

    def at(*pointers: int | None) -> bool:
        workspace = new_workspace()
        part = workspace.data_ptr()
        pieces = (part, part + ends[0], part + ends[1])
        if not merge_pieces.is_ready() or not attend.at(*pointers, *pieces):
            return False
        *_, sinks, _, _, out_scale, out, lse, _ = pointers
        return merge_pieces.at(sinks, out_scale, out, lse, *pieces)

    return Run(run, at)


def _scratch(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """What makes scratch memory while a call runs."""
    return allocator(torch.empty(size, dtype=dtype, device="meta"), device)


def _with_splits(
    attend: Start, problem: Problem, plan: PrefillPlan, forms: PrefillTensors, device: torch.device
) -> Start:
    """A launch that may leave partial results in a workspace, and then one that merges them."""
    if plan.num_splits == 1:
        # Of a workspace's type, so that the same kernel takes it.
        nothing = _scratch((0,), torch.float32, device)
        return lambda *tensors: attend(*tensors[:_TENSORS], nothing(), *tensors[_TENSORS:])
    slots = num_slots(problem, _MERGED_ROWS)
    config = merge.SplitConfig(
        H=problem.num_heads,
        D=problem.head_dim_v,
        BLOCK_D=max(16, power_of_two_at_least(problem.head_dim_v)),
        TOKENS=_MERGED_ROWS,
        NEW_KV=problem.new_kv,
        LIMIT=_limit(forms.out),
        SKIP_DECODE=problem.skip_decode,
        WIDE=(problem.head_dim_v - 1) * forms.out.stride()[2] >= 2**31,
    )
    counts = (problem.tokens, problem.sequences, problem.capacity, slots, plan.num_splits, *_lse_strides(forms.lse))
    rest = (*counts, problem.out_scale, forms.out.stride(), config)
    merge_splits = Launch(merge.merge_splits, (slots * problem.num_heads, 1, 1), rest, device, num_warps=4)
    parts = plan.num_splits * problem.tokens * problem.num_heads
    new_workspace = _scratch((parts * (problem.head_dim_v + 1),), torch.float32, device)

    def run(*tensors: Tensor | None) -> None:
        given = PrefillTensors(*tensors[:_TENSORS])  # type: ignore[arg-type]
        workspace = new_workspace()
        attend(*tensors[:_TENSORS], workspace, *tensors[_TENSORS:])
        of_batch = (given.cu_seqlens_q, given.seqlens_k)
        merge_splits(*of_batch, given.sinks, given.out_scale, given.out, given.lse, workspace)

    return run


def prepare_merge(tensors: MergeTensors) -> Start:
    """What merges two results, called with tensors that look like these."""
    out_a, lse_a, out_b, lse_b, out, lse = tensors
    rows, num_heads, head_dim = out_a.shape
    if out_a.numel() == 0:
        return launch_nothing
    strides = [merge.Strides(*(x.stride() for x in pair)) for pair in ((out_a, lse_a), (out_b, lse_b), (out, lse))]
    rest = (rows, *strides, num_heads, head_dim, max(16, power_of_two_at_least(head_dim)), _MERGED_ROWS)
    grid = (cdiv(rows, _MERGED_ROWS) * num_heads, 1, 1)
    return Launch(merge.merge_states, grid, rest, out_a.device, num_warps=4)
