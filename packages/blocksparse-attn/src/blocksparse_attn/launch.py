"""Launches: from a problem, its plan and tensors to a kernel, its grid and its arguments.

A prepared launch holds no tensor, and is called with any of the same shapes, strides and dtypes. On CPU tensors that
works only under Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported) and with a plan given: that is
how kernels are tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import cycle
from math import prod
from typing import Any

import torch

from blocksparse_attn.arguments import Tensors
from blocksparse_attn.kernels import merge, portable, tiles
from blocksparse_attn.kernels.groups import (
    Bounds,
    HopperConfig,
    Lists,
    Outputs,
    OutputStrides,
    PortableConfig,
    Strides,
)
from blocksparse_attn.plan import (
    AttentionPlan,
    DeviceLimits,
    Problem,
    hopper_piece,
    hopper_sizes,
    merged_width,
    merges_lists,
    needs_table,
    num_slots,
    plan_attention,
    portable_piece,
    programs_of,
    query_stages,
    tokens_per_tile,
)
from kernel_reference.checks import fail
from kernel_reference.dispatch import allocator_of
from kernel_reference.integers import cdiv, power_of_two_at_least, power_of_two_in
from kernel_reference.lasting import lasting, nothing
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

# Numbers of partial results that a warp of the merge kernel has at once: 64 of a thread.
_MERGED_NUMBERS = 2048
# Streams whose counters are kept, 1 kB each; and calls in graphs that have one each, 16 bytes.
_MOST_STREAMS, _MOST_CAPTURED = 64, 4096

Tensor = torch.Tensor
Pointer = Tensor | int | None


@lru_cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of the device a tensor is on."""
    found = device_properties(device)
    hopper = found.capability == (9, 0) and has_gluon()
    return DeviceLimits(cores=found.cores, shared_memory=found.shared_memory, hopper=hopper)


def prepare_attend(problem: Problem, plan: AttentionPlan | None, tensors: Tensors) -> Run:
    """A prepared launch, called with the op's sixteen tensors; ``plan`` None: the one made for their device.

    Calls whose q, k and v are not all 16-byte aligned have a plan of their own.
    """
    if not problem.tokens:
        return Run(launch_nothing, lambda *_: True)
    device = tensors.q.device
    forms = Tensors(*map(without_memory, tensors))  # type: ignore[arg-type]

    def make(aligned: bool) -> Run:
        here = replace(problem, tma=problem.tma and aligned)
        chosen = plan_attention(here, device_limits(device)) if plan is None else plan
        if chosen.hopper and not here.tma:
            wanted = "without hopper where softmax_scale is below 0, or queries, keys or values are"
            fail("plan", f"{wanted} not 16-byte aligned and of strides of whole 16 bytes", chosen)
        launch = _attend(here, chosen, forms, device)
        attend: Launch | Run = launch
        if merges_lists(here, chosen):
            # A column, and its rows, for each that a split may see.
            size = programs_of(here, chosen) * 2 * merged_width(here, chosen)
            attend = _with_memory(launch, allocator_of((size,), (1,), torch.int32, device))
        elif chosen.as_free:
            attend = _with_memory(launch, counters_of(device).new)
        if chosen.num_splits == 1:
            return without_parts(attend, device)
        return _in_parts(attend, here, chosen, forms, device)

    return by_alignment(make, slice(3))


def _attend(problem: Problem, plan: AttentionPlan, forms: Tensors, device: torch.device) -> Launch:
    """The launch of results or partial results, called with the sixteen tensors and the two of partial results."""
    keys, values = _Keys(forms.k, problem), _Keys(forms.v, problem)
    out = _batched(forms.out.stride())
    *s_lse, s_lse_token = _lse_strides(forms.lse)
    strides = Strides(_batched(forms.q.stride()), keys.strides, values.strides, out, s_lse_token)
    slots = num_slots(problem, plan)
    grid = (programs_of(problem, plan), 1, 1)
    table_stride = 0 if forms.block_table is None else forms.block_table.stride()[0]
    numbers = (
        forms.q.shape[-3], problem.sequences, problem.capacity, keys.outer, table_stride,
        *(x.stride()[0] if x.shape[0] > 1 else 0 for x in (forms.crow, forms.col)), problem.rows, problem.entries,
        slots, plan.num_splits, *s_lse, (problem.softmax_scale, problem.softcap), problem.left,
    )  # fmt: skip
    group = _grouped(problem.padded, plan.hopper)
    if plan.hopper:
        from blocksparse_attn.kernels.hopper.kernel import attend

        config = _hopper_config(problem, plan)
        boxes = [
            _Keys(forms.q, replace(problem, page_size=0)).tma_box(problem.head_dim, 64),
            keys.tma_box(problem.head_dim, config.BOX),
            values.tma_box(problem.head_dim_v, config.BOX),
        ]
        programs = (min(grid[0], persistent_programs(device)), 1, 1)
        # None for 1, which Triton 3.6 forgets in the second consumer's partition: it would store number by number.
        rest = (*numbers, OutputStrides((*out[:3], None if out[3] == 1 else out[3]), s_lse_token), config)
        return TmaLaunch(attend, programs, rest, device, boxes, group=group, num_warps=4)
    kernel = portable.attend_packed if plan.packed else portable.attend_lists
    rest = (*numbers, strides, _portable_config(problem, plan, keys, values, strides))
    return Launch(kernel, grid, rest, device, group=group, num_warps=plan.num_warps)


def _grouped(padded: bool, by_tma: bool) -> Callable[..., tuple[Any, ...]]:
    """What makes a kernel's arguments of tensors, or pointers; q, k and v are not among them if they travel by TMA.

    Only a call that compiles needs the names of groups: pointers come in plain tuples, which take the host less time.
    """

    def group(
        q: Pointer, k: Pointer, v: Pointer, crow: Pointer, col: Pointer, cu_q: Pointer, cu_k: Pointer, table: Pointer,
        seqlens_k: Pointer, q_starts: Pointer, q_ends: Pointer, k_starts: Pointer, k_ends: Pointer, sinks: Pointer,
        out: Pointer, lse: Pointer, part: Pointer, part_lse: Pointer, memory: Pointer = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        bounds = (q_starts, q_ends, k_starts, k_ends) if padded else (cu_q, None, cu_k, seqlens_k)
        outputs = out, lse, part, part_lse
        if type(crow) is int:
            return q, k, v, (crow, col, memory), table, bounds, sinks, outputs
        return q, k, v, Lists(crow, col, memory), table, Bounds(*bounds), sinks, Outputs(*outputs)

    return (lambda *others: group(None, None, None, *others)[3:]) if by_tma else group


def _grouped_for_merging(padded: bool) -> Callable[..., tuple[Any, ...]]:
    """:func:`_grouped` of the merge kernel, which is not given queries, keys, values and lists."""

    def group(
        cu_q: Pointer, cu_k: Pointer, table: Pointer, seqlens_k: Pointer, q_starts: Pointer, q_ends: Pointer,
        k_starts: Pointer, k_ends: Pointer, sinks: Pointer, *outputs: Pointer,
    ) -> tuple[Any, ...]:  # fmt: skip
        bounds = (q_starts, q_ends, k_starts, k_ends) if padded else (cu_q, None, cu_k, seqlens_k)
        if type(outputs[0]) is int:
            return bounds, sinks, outputs
        return Bounds(*bounds), sinks, Outputs(*outputs)

    return group


def _kind(problem: Problem) -> int:
    kind = tiles.PADDED if problem.padded else tiles.PAGED if problem.page_size else tiles.RAGGED
    return int(kind)


def _hopper_config(problem: Problem, plan: AttentionPlan) -> HopperConfig:
    (size, tail), (size_v, tail_v) = hopper_sizes(problem.head_dim), hopper_sizes(problem.head_dim_v)
    piece, table = hopper_piece(problem.k_block), needs_table(problem)
    return HopperConfig(
        KIND=_kind(problem), GROUP=problem.group, HEADS_KV=problem.num_heads_kv, BLOCK_D=size, TAIL_D=tail,
        DV=problem.head_dim_v, BLOCK_DV=size_v, TAIL_DV=tail_v, PAGE=problem.page_size,
        BOX=min(piece, power_of_two_in(problem.page_size)) if problem.page_size else piece,
        Q_BLOCK=problem.q_block, K_BLOCK=problem.k_block, LIST_ROWS=hopper_piece(problem.q_block), PIECE=piece,
        TABLE=table, UNIFORM=plan.block_n > 64 and not table, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n,
        SOFTCAP=problem.softcap > 0, HAS_LEFT=problem.left >= 0, STAGES=plan.num_stages,
        Q_STAGES=query_stages(problem, plan), TOGETHER=plan.heads_together or problem.num_heads,
        IN_TURN=bool(plan.in_turn), SLACK=plan.slack, AS_FREE=bool(plan.as_free),
    )  # fmt: skip


def _portable_config(
    problem: Problem, plan: AttentionPlan, keys: _Keys, values: _Keys, strides: Strides
) -> PortableConfig:
    size, size_v = problem.head_dim, problem.head_dim_v
    piece = portable_piece(problem, plan)
    reach = max(keys.reach(size), values.reach(size_v), (size - 1) * strides.q[3], (size_v - 1) * strides.out[3])
    return PortableConfig(
        KIND=_kind(problem), GROUP=problem.group, HEADS_KV=problem.num_heads_kv, D=size,
        BLOCK_D=max(16, power_of_two_at_least(size)), DV=size_v, BLOCK_DV=max(16, power_of_two_at_least(size_v)),
        PAGE=problem.page_size, BOX=values.box(piece) if problem.page_size else 0, X=keys.x,
        STEP=keys.strides[1] if keys.x < size else 0, Q_BLOCK=problem.q_block, K_BLOCK=problem.k_block,
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, SOFTCAP=problem.softcap > 0, HAS_LEFT=problem.left >= 0,
        WIDE=reach >= 2**31, STAGES=plan.num_stages, TOKENS=plan.packed, PIECE=piece, THIRDS=plan.thirds,
    )  # fmt: skip


class _Keys:
    """How keys or values lie: sizes, and strides by (page or sequence, slot, head, element / x, element % x).

    ``outer`` sequences or pages, of which a ragged batch has one, of ``slots`` each.
    """

    def __init__(self, keys: Tensor, problem: Problem) -> None:
        s = keys.stride()
        self.x = keys.shape[-1]
        if keys.ndim == 3:
            self.outer, self.slots, self.heads = 1, *keys.shape[:2]
            self.strides: tuple[int, ...] = (0, s[0], s[1], 0, s[2])
        elif not problem.page_size or problem.page_layout == "NHD":
            self.outer, self.slots, self.heads = keys.shape[:3]
            self.strides = (s[0], s[1], s[2], 0, s[3])
        elif problem.page_layout == "HND":
            self.outer, self.heads, self.slots = keys.shape[:3]
            self.strides = (s[0], s[2], s[1], 0, s[3])
        elif keys.ndim == 5:
            self.outer, self.heads, _, self.slots, self.x = keys.shape
            self.strides = (s[0], s[3], s[1], s[2], s[4])
        else:
            self.outer, self.heads, self.x, self.slots = keys.shape
            self.strides = (s[0], s[3], s[1], 0, s[2])

    def reach(self, head_dim: int) -> int:
        """Elements from a head's first element to its last."""
        return (head_dim - 1) // self.x * self.strides[3] + (self.x - 1) * self.strides[4]

    def box(self, block_n: int) -> int:
        """Slots that are loaded together where slots, not elements, lie side by side; 0 where elements do."""
        box = min(block_n, power_of_two_in(self.slots))
        across = self.strides[1] == 1 and self.strides[4] != 1
        # Fewer than 16 bytes are no gain.
        return box if across and box >= 8 else 0

    def tma_box(self, head_dim: int, box: int) -> TmaBox:
        """For a TMA descriptor over (page or sequence, head, slot, element)."""
        # A single sequence has no stride to the next; a descriptor wants a multiple of 16 bytes.
        outer = self.strides[0] if self.outer > 1 else 8
        strides = [outer, self.strides[2], self.strides[1], 1]
        # A box is 128 bytes wide, over which shared memory is swizzled.
        return TmaBox([self.outer, self.heads, self.slots, head_dim], strides, [1, 1, box, 64])


def _batched(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides by (sequence, ...), of what has one row of tokens by (0, ...)."""
    return strides if len(strides) == 4 else (0, *strides)


def _lse_strides(lse: Tensor | None) -> tuple[int, ...]:
    """Strides by (sequence, head, token), of what is not there and of what has one row of tokens by (0, ...)."""
    if lse is None:
        return 0, 0, 1
    return lse.stride() if lse.ndim == 3 else (0, *lse.stride())


def persistent_programs(device: torch.device) -> int:
    """One program per SM; without a GPU so few that each has several work items, as it has there."""
    return device_limits(device).cores if device.type == "cuda" else 3


class Parts:
    """What makes room for partial results in the least host time: outputs [splits, tokens, heads, Dv] and lse [splits,
    heads, tokens], in float32."""

    def __init__(self, splits: int, tokens: int, heads: int, head_dim_v: int, device: torch.device) -> None:
        # lse comes first, as many as make whole 16 bytes.
        self._lse = (splits, heads, tokens)
        self._begin = cdiv(splits * heads * tokens, 4) * 4
        self._out = (splits, tokens, heads, head_dim_v)
        total = self._begin + splits * tokens * heads * head_dim_v
        self._new = allocator_of((total,), (1,), torch.float32, device)

    def tensors(self) -> tuple[Tensor, Tensor]:
        room = self._new()
        return room[self._begin :].view(self._out), room[: prod(self._lse)].view(self._lse)

    def room(self) -> tuple[Tensor, int, int]:
        """What must be kept until all is launched, and the addresses of both."""
        room = self._new()
        begin = room.data_ptr()
        return room, begin + 4 * self._begin, begin


def without_parts(attend: Launch | Run, device: torch.device) -> Run:
    """A launch of results. A kernel is the same with splits and without: it is always given partial results."""
    no_part = nothing(device)
    nowhere = no_part.data_ptr()
    return Run(
        lambda *tensors: attend(*tensors, no_part, no_part), lambda *pointers: attend.at(*pointers, nowhere, nowhere)
    )


def merge_config(
    kind: int, heads: int, head_dim_v: int, s_element: int, *, dependent: bool = False, ahead: bool = False
) -> merge.MergeConfig:
    """What the merge kernel is compiled for; ``s_element``: the stride of a head's elements in out."""
    block_dv = max(16, power_of_two_at_least(head_dim_v))
    return merge.MergeConfig(
        KIND=kind, H=heads, DV=head_dim_v, BLOCK_DV=block_dv, TOGETHER=min(16, max(1, _MERGED_NUMBERS // block_dv)),
        WIDE=(head_dim_v - 1) * s_element >= 2**31, DEPENDENT=dependent, AHEAD=ahead,
    )  # fmt: skip


class Counters:
    """Counters that are zero when a kernel starts, and again when it has ended, as it sees to itself.

    Calls of one stream follow each other, and those on other streams have other counters. A captured call has one of
    its own for good, from memory that no graph owns, as graphs may be replayed beside anything.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._alone = device.type != "cuda" or torch.cuda.device_count() == 1
        # By stream, and for captured calls. Graphs hold an address alone: all that they were given is kept.
        self._made: dict[int, Iterator[Tensor]] = {}
        self._for_graphs: Iterator[Tensor] = iter(())
        self._kept: list[Tensor] = []

    def new(self) -> Tensor:
        if self._alone:
            return self._new()
        with torch.cuda.device(self._device):
            return self._new()

    def _new(self) -> Tensor:
        if self._device.type != "cuda":
            return torch.zeros(1, dtype=torch.int32, device=self._device)
        if torch.cuda.is_current_stream_capturing():
            one = next(self._for_graphs, None)
            # Of a process that has called nothing before, or captured very many: the graph zeroes one at each replay.
            return torch.zeros(1, dtype=torch.int32, device=self._device) if one is None else one
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        made = self._made.get(stream)
        if made is None:
            if not self._kept:
                memory = self._zeros(_MOST_CAPTURED)
                self._kept.append(memory)
                # No generator, which two threads may not ask at once.
                self._for_graphs = map(memory.__getitem__, range(_MOST_CAPTURED))
            if len(self._made) >= _MOST_STREAMS:
                self._made.pop(next(iter(self._made)))
            # As many as may be under way, were a stream's name given to another one.
            made = self._made[stream] = cycle(self._zeros(64).unbind())
        return next(made)

    def _zeros(self, count: int) -> Tensor:
        # Launches take addresses of whole 16 bytes.
        return lasting(lambda: torch.zeros(count, 4, dtype=torch.int32, device=self._device), self._device)


counters_of = lru_cache(Counters)


def _with_memory(attend: Launch, new: Callable[[], Tensor]) -> Run:
    """A launch whose programs share memory, new in each call."""

    def at(*eighteen: int | None) -> bool:
        memory = new()
        return attend.at(*eighteen, memory.data_ptr())

    return Run(lambda *eighteen: attend(*eighteen, new()), at)


def _in_parts(attend: Launch | Run, problem: Problem, plan: AttentionPlan, forms: Tensors, device: torch.device) -> Run:
    """Split-KV: a launch that leaves partial results and one that merges them; called with the sixteen tensors."""
    heads, size_v = problem.num_heads, problem.head_dim_v
    s_out = _batched(forms.out.stride())
    dependent = device.type == "cuda" and device_limits(device).hopper
    config = merge_config(_kind(problem), heads, size_v, s_out[3], dependent=dependent)
    # Triton 3.6 loses a stride of 1 of out in a tuple that holds another stride beside it: they are two arguments.
    rest = (
        forms.q.shape[-3], problem.sequences, problem.capacity, tokens_per_tile(plan), 1 if plan.packed else 2,
        plan.num_splits, *_lse_strides(forms.lse), s_out, config,
    )  # fmt: skip
    grid = (problem.tokens * heads, 1, 1)
    merging = Launch(
        merge.merge, grid, rest, device, group=_grouped_for_merging(problem.padded), dependent_launch=dependent,
        num_warps=1,
    )  # fmt: skip
    parts = Parts(plan.num_splits, problem.tokens, heads, size_v, device)
    return in_parts(attend, merging, parts, lambda *sixteen: sixteen[5:])


def in_parts(attend: Launch | Run, merging: Launch, parts: Parts, to_merge: Callable[..., tuple[Any, ...]]) -> Run:
    """Both launches, over room for partial results; ``to_merge``: those of the first one's tensors that the second is
    given too."""

    def run(*tensors: Tensor | None) -> None:
        both = parts.tensors()
        attend(*tensors, *both)
        merging(*to_merge(*tensors), *both)

    def at(*pointers: int | None) -> bool:
        # The memory itself is kept until both are launched.
        room = parts.room()
        both = room[1:]
        if not (merging.is_ready() and attend.at(*pointers, *both)):
            return False
        return merging.at(*to_merge(*pointers), *both)

    return Run(run, at)
