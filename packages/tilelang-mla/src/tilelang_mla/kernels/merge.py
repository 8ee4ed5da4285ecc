"""The combine kernel of split-KV decoding.

A program merges one of ``pieces`` pieces, a power of two, of the same row of each of ``sequences_each`` sequences: rows
of one sequence that has many parts are merged side by side. Its threads are in as many groups, which take turns at the
parts: the more parts there are, the fewer elements a program should have.
"""

from typing import Any, NamedTuple

from tilelang_mla.kernels.common import FLOOR, LN_2, LOG2_E, WARP, log_of_sum, macro
from tilelang_mla.kernels.decode.groups import PLANNED, SHARED

# Parts that a thread loads at once, and elements of a row that it combines.
_AT_ONCE, _MERGED = 4, 4
# Programs that an SM's registers are to hold: 56 a thread. With 8 parts at once it took 94, for 5 programs, and 4096
# rows of two parts 17 us.
_PROGRAMS = 9
# Sequences of a program, at most, as plan.py has it: a thread looks one up.
_SEQUENCES = 32


class Row(NamedTuple):
    """A row of partial results."""

    parts: Any
    part_lse: Any
    first_part: Any
    num_parts: Any
    row: Any


class Constants(NamedTuple):
    """What the kernel is compiled for: elements of a row, threads that they keep busy, those there are, and how."""

    dim_nope: int
    width: int
    threads: int
    serial: bool


class Tensors(NamedTuple):
    """What is read and written."""

    first_part: Any
    out: Any
    lse: Any
    parts: Any
    part_lse: Any
    sinks: Any = None


class Numbers(NamedTuple):
    """Of a launch."""

    heads: Any
    num_splits: Any
    sequences_each: Any
    pieces: Any
    scheduled: Any
    wants_lse: Any


class Registers(NamedTuple):
    """A thread's: merged elements, those of a chunk of parts, and the weights of these."""

    merged: Any
    loaded: Any
    weights: Any


class Found(NamedTuple):
    """Sequences of a program that have something to merge, those of few parts from the first place on, the others from
    the last one down: which, the first part of each, and how many; and how many there are of either."""

    which: Any
    first: Any
    parts: Any
    counts: Any


class Exchange(NamedTuple):
    """Where groups of threads find each other's elements, and sums of weights."""

    elements: Any
    sums: Any


def merge(T: Any, *, dim_nope: int, dtype: Any, serial: bool = False, sink: bool = False) -> Any:
    """The kernel; rows of sequences of one part are left alone.

    sink: with a logit of each head that takes part in the softmax and has no value; lse does not know of it.

    first_part: of a schedule, [batch + 1]; or, where programs cut the batch, the first part and the number of parts of
    each sequence, [2 * batch].
    """
    batch, rows, bounds, room = (T.dynamic(name) for name in ("batch", "rows", "bounds", "room"))
    out_batch, out_row = T.dynamic("out_batch"), T.dynamic("out_row")
    lse_batch, lse_head, lse_token = (T.dynamic(name) for name in ("lse_batch", "lse_head", "lse_token"))
    s_lse_batch, s_lse_head, s_lse_token = (T.dynamic(name) for name in ("s_lse_batch", "s_lse_head", "s_lse_token"))
    # Whole warps, some of whose threads may have no elements.
    width = -(-dim_nope // (_MERGED * WARP)) * WARP
    threads = 1 if serial else width
    C = Constants(dim_nope, width, threads, serial)

    @T.prim_func
    def merge_parts(
        first_part: T.Tensor((bounds,), T.int32),
        out: T.StridedTensor((batch, rows, dim_nope), (out_batch, out_row, 1), dtype),
        lse: T.StridedTensor((lse_batch, lse_head, lse_token), (s_lse_batch, s_lse_head, s_lse_token), T.float32),
        parts: T.Tensor((room, rows, dim_nope), T.float32),
        part_lse: T.Tensor((room, rows), T.float32),
        heads: T.int32,
        num_splits: T.int32,
        sequences_each: T.int32,
        pieces: T.int32,
        scheduled: T.int32,
        wants_lse: T.int32,
    ):
        with T.Kernel(T.ceildiv(batch, sequences_each) * rows * pieces, threads=threads) as i_program:
            T.assume(out_batch % 8 == 0)
            T.assume(out_row % 8 == 0)
            tensors = Tensors(first_part, out, lse, parts, part_lse)
            numbers = Numbers(heads, num_splits, sequences_each, pieces, scheduled, wants_lse)
            merge_program(T, C, tensors, numbers, i_program)

    if not sink:
        return merge_parts
    num_sinks = T.dynamic("num_sinks")

    @T.prim_func
    def merge_parts_with_sinks(
        first_part: T.Tensor((bounds,), T.int32),
        out: T.StridedTensor((batch, rows, dim_nope), (out_batch, out_row, 1), dtype),
        lse: T.StridedTensor((lse_batch, lse_head, lse_token), (s_lse_batch, s_lse_head, s_lse_token), T.float32),
        parts: T.Tensor((room, rows, dim_nope), T.float32),
        part_lse: T.Tensor((room, rows), T.float32),
        sinks: T.Tensor((num_sinks,), T.float32),
        heads: T.int32,
        num_splits: T.int32,
        sequences_each: T.int32,
        pieces: T.int32,
        scheduled: T.int32,
        wants_lse: T.int32,
    ):
        with T.Kernel(T.ceildiv(batch, sequences_each) * rows * pieces, threads=threads) as i_program:
            T.assume(out_batch % 8 == 0)
            T.assume(out_row % 8 == 0)
            tensors = Tensors(first_part, out, lse, parts, part_lse, sinks)
            numbers = Numbers(heads, num_splits, sequences_each, pieces, scheduled, wants_lse)
            merge_program(T, C, tensors, numbers, i_program)

    return merge_parts_with_sinks


def with_sink(T: Any, sinks: Any, i_row: Any, sum_of: Any, highest: Any) -> Any:
    """A row's sum of weights, with that of its head's sink if there are any."""
    return sum_of if sinks is None else sum_of + T.exp2(sinks[i_row] * LOG2_E - highest)


@macro
def merge_program(T, C, tensors, numbers, i_program):
    """What a program merges."""
    out, parts, part_lse = tensors.out, tensors.parts, tensors.part_lse
    sequences_each, pieces = numbers.sequences_each, numbers.pieces
    dim_nope, width, threads, serial = C
    batch, rows = out.shape[:2]
    if not serial:
        T.annotate_min_blocks_per_sm(_PROGRAMS)
        if numbers.scheduled == SHARED:
            # Programs of the kernel ahead write down how they cut the batch; any other cut was there before they began.
            T.pdl_sync()
    merged = T.alloc_local((_MERGED,), T.float32)
    loaded = T.alloc_local((_AT_ONCE * _MERGED,), T.float32)
    factors = T.alloc_local((_AT_ONCE,), T.float32)
    of_groups = T.alloc_shared((width, _MERGED), T.float32)
    sum_of_groups = T.alloc_shared((width,), T.float32)
    which = T.alloc_shared((_SEQUENCES,), T.int32)
    first_of = T.alloc_shared((_SEQUENCES,), T.int32)
    parts_of = T.alloc_shared((_SEQUENCES,), T.int32)
    counts = T.alloc_shared((2,), T.int32)
    found = Found(which, first_of, parts_of, counts)
    registers, exchange = Registers(merged, loaded, factors), Exchange(of_groups, sum_of_groups)
    thread = T.get_thread_binding()
    i_all = T.alloc_var(T.int32, init=T.truncdiv(i_program, pieces))
    i_piece = T.alloc_var(T.int32, init=i_program - i_all * pieces)
    i_batch = T.alloc_var(T.int32, init=T.truncdiv(i_all, rows))
    i_row = i_all - i_batch * rows
    T.assume(i_row >= 0)
    T.assume(i_row < rows)
    first_b = T.alloc_var(T.int32, init=i_batch * sequences_each)
    own = T.alloc_var(T.int32, init=T.min(T.min(sequences_each, _SEQUENCES), batch - first_b))
    of_group = T.alloc_var(T.int32, init=threads if serial else T.truncdiv(threads, pieces))
    group = T.alloc_var(T.int32, init=0 if serial else T.truncdiv(thread, of_group))
    begin = T.min(i_piece * of_group + thread - group * of_group, dim_nope // _MERGED - 1) * _MERGED
    # Sequences of few parts have a group of threads each, if that is of whole warps, in turns before all others, whose
    # parts the groups share.
    few = T.alloc_var(T.int32, init=1)
    if not serial:
        if pieces > 1 and of_group >= WARP:
            few = _AT_ONCE
    if thread == 0:
        counts[0] = 0
        counts[1] = 0
    if not serial:
        T.sync_threads()
    for lane in T.serial(own if serial else 1):
        find_parts(T, tensors, numbers, found, first_b, own, few, lane if serial else thread)
    if not serial:
        T.sync_threads()
        if numbers.scheduled != SHARED:
            T.pdl_sync()
        # What takes the results may be launched meanwhile; it waits for all of them.
        T.pdl_trigger()
    turns = T.alloc_var(T.int32, init=T.truncdiv(counts[0] + (pieces - 1), pieces))
    for turn in T.serial(turns + counts[1]):
        alone = turn < turns
        i = T.alloc_var(T.int32, init=T.if_then_else(alone, turn * pieces + group, own - 1 - (turn - turns)))
        there = T.alloc_var(T.int32, init=T.if_then_else(alone and i >= counts[0], 0, 1))
        if there != 0:
            own_parts = T.alloc_var(T.int32, init=parts_of[i])
            row = Row(parts, part_lse, first_of[i], own_parts, i_row)
            own_group = T.alloc_var(T.int32, init=T.if_then_else(alone, 0, group))
            groups = T.alloc_var(T.int32, init=T.if_then_else(alone, 1, pieces))
            if serial:
                for j in T.serial(dim_nope // _MERGED):
                    merge_row(T, C, tensors, numbers, registers, exchange, row, first_b + which[i], j * _MERGED, 0, 1)
            else:
                merge_row(
                    T, C, tensors, numbers, registers, exchange, row, first_b + which[i], begin, own_group, groups
                )


@macro
def merge_row(T, C, tensors, numbers, registers, exchange, row, i_b, begin, group, groups):
    """Elements ``begin`` .. ``begin + _MERGED`` of a row, by groups of threads that share its parts.

    Who has its first elements writes the logarithm.
    """
    out, lse, sinks, merged = tensors.out, tensors.lse, tensors.sinks, registers.merged
    # On their way while the highest is looked for.
    load_parts(T, row, registers, begin, group, groups)
    highest = highest_lse(T, row, C.serial)
    sum_of = T.alloc_var(T.float32, init=0)
    sum_of = merge_elements(T, row, registers, highest, begin, group, groups)
    thread = T.get_thread_binding()
    of_group = T.alloc_var(T.int32, init=T.truncdiv(C.threads, groups))
    if groups > 1:
        # The row before has been read.
        T.sync_threads()
        for j in T.vectorized(_MERGED):
            exchange.elements[thread, j] = merged[j]
        exchange.sums[thread] = sum_of
        T.sync_threads()
    if group == 0:
        for i_group in T.serial(groups - 1):
            sum_of = sum_of + exchange.sums[thread + (i_group + 1) * of_group]
            for j in T.vectorized(_MERGED):
                merged[j] = merged[j] + exchange.elements[thread + (i_group + 1) * of_group, j]
        total = T.alloc_var(T.float32, init=with_sink(T, sinks, row.row, sum_of, highest))
        for j in T.unroll(_MERGED):
            merged[j] = T.if_then_else(sum_of == 0, 0, merged[j] / total)
        if C.serial:
            for j in T.unroll(_MERGED):
                out[i_b, row.row, begin + j] = merged[j]
        else:
            for j in T.vectorized(_MERGED):
                out[i_b, row.row, begin + j] = merged[j]
    if numbers.wants_lse != 0:
        if begin == 0 and group == 0:
            token = T.alloc_var(T.int32, init=T.truncdiv(row.row, numbers.heads))
            head = T.alloc_var(T.int32, init=row.row - token * numbers.heads)
            lse[i_b, head, token] = T.if_then_else(
                sum_of == 0, -T.infinity(T.float32), log_of_sum(T, highest, sum_of, LN_2)
            )


@macro
def find_parts(T, tensors, numbers, found, first_b, own, few, lane):
    """Of one of a program's sequences the first part, and how many."""
    if lane < own:
        first_part, room = tensors.first_part, tensors.part_lse.shape[0]
        i_b = T.alloc_var(T.int32, init=first_b + lane)
        own_first = T.alloc_var(T.int32, init=i_b * numbers.num_splits)
        own_parts = T.alloc_var(T.int32, init=numbers.num_splits)
        if numbers.scheduled == SHARED:
            own_first = T.max(T.min(first_part[2 * i_b], room), 0)
            own_parts = T.min(first_part[2 * i_b + 1], room - own_first)
        if numbers.scheduled == PLANNED:
            # As where a part is found.
            own_first = T.max(T.min(first_part[i_b], room), 0)
            own_parts = T.max(T.min(first_part[i_b + 1], room), 0) - own_first
        if own_parts > 1:
            # In any order: rows are merged each by itself.
            place = T.alloc_var(T.int32, init=0)
            if own_parts <= few:
                place = T.atomic_add(found.counts[0], 1, return_prev=True)
            else:
                place = own - 1 - T.atomic_add(found.counts[1], 1, return_prev=True)
            found.which[place] = lane
            found.first[place] = own_first
            found.parts[place] = own_parts


@macro
def highest_lse(T, row, serial):
    """The highest logarithm of a row's parts; each warp asks for all of them."""
    part_lse, own_first, own_parts, i_row = row.part_lse, row.first_part, row.num_parts, row.row
    # A finite floor, as everywhere.
    found = T.alloc_var(T.float32, init=FLOOR)
    if serial:
        for s in T.serial(own_parts):
            found = T.max(found, part_lse[own_first + s, i_row])
    else:
        lane = T.get_thread_binding() % WARP
        for i in T.serial(T.truncdiv(own_parts + (WARP - 1), WARP)):
            if i * WARP + lane < own_parts:
                found = T.max(found, part_lse[own_first + i * WARP + lane, i_row])
        for i in T.unroll(5):
            found = T.max(found, T.shfl_xor(found, T.shift_left(1, i)))
    return found


@macro
def load_parts(T, row, registers, begin, first, groups):
    """Of every ``groups``-th part from ``first`` on as many as are loaded at once: logarithms, and elements."""
    _, loaded, weights = registers
    T.assume(begin >= 0)
    T.assume(begin + _MERGED <= row.parts.shape[2])
    T.assume(begin % _MERGED == 0)
    for s in T.unroll(_AT_ONCE):
        if first + s * groups < row.num_parts:
            part = row.first_part + first + s * groups
            T.assume(part >= 0)
            T.assume(part < row.part_lse.shape[0])
            weights[s] = row.part_lse[part, row.row]
            for j in T.vectorized(_MERGED):
                loaded[s * _MERGED + j] = row.parts[part, row.row, begin + j]


@macro
def merge_elements(T, row, registers, highest, begin, group, groups):
    """Elements ``begin`` .. ``begin + _MERGED`` of a row over a group's parts, and the sum of their weights.

    The first parts are loaded already.
    """
    merged, loaded, weights = registers
    for j in T.unroll(_MERGED):
        merged[j] = 0
    sum_of = T.alloc_var(T.float32, init=0)
    for chunk in T.serial(T.truncdiv(row.num_parts - group + (_AT_ONCE * groups - 1), _AT_ONCE * groups)):
        first = group + chunk * _AT_ONCE * groups
        if chunk > 0:
            load_parts(T, row, registers, begin, first, groups)
        for s in T.unroll(_AT_ONCE):
            # A part that saw nothing has written nothing that counts, NaN perhaps.
            if first + s * groups < row.num_parts and weights[s] != -T.infinity(T.float32):
                weights[s] = T.exp2(weights[s] - highest)
                sum_of = sum_of + weights[s]
                for j in T.unroll(_MERGED):
                    merged[j] = merged[j] + weights[s] * loaded[s * _MERGED + j]
    return sum_of
