"""What a program works on: its tile, head, sequence and segment; and the groups of arguments that all kernels share.

``Sizes`` and ``Strides`` come from the launch. ``Counts`` are made in the kernel: in a tuple Triton would specialise on
them. So are the groups that hold pointers, which a launch gives one by one, as they are in each call.
"""

from typing import Any, NamedTuple, Self

import triton
import triton.language as tl


class Sizes(NamedTuple):
    """The constants that a kernel is compiled for: heads and head sizes of a problem, blocks of its plan."""

    # Heads of the outputs and states, and how many of them share a head of q and k, and of v.
    H: int
    RATIO_QK: int
    RATIO_V: int
    # Head sizes, and the blocks that a program takes of them.
    D: int
    E: int
    BLOCK_D: int
    BLOCK_E: int
    # Tokens of a step, tokens of a segment (0: whole sequences) and pipeline depth.
    CHUNK: int = 1
    SEGMENT: int = 0
    STAGES: int = 1
    # From the last token to the first, as gradients go.
    REVERSED: bool = False
    # Offsets inside a tile need 64 bits.
    WIDE: bool = False
    # Of products of float32, as tl.dot takes it; None for 16 bits.
    PRECISION: Any = None
    # The three launches of a prefill in segments start one another.
    DEPENDENT_LAUNCH: bool = False
    # There is one launch, in which segments pass their states on.
    CHAINED: bool = False
    # For kernels for sm_90: warps of a program and, of those that go token by token, a state's strides along d and e.
    WARPS: int = 4
    STATE_D: int = 0
    STATE_E: int = 0
    # Of those kernels: what stores a state loads it in whole lines too.
    LINES: bool = False
    # Of kernels that make, carry or sum the states of segments: tokens of a part, of which each segment has as many.
    PART: int = 0
    # Of the kernel by roles: it sums by itself what goes before a segment, where a sequence has as many at most.
    SUMMED: int = 0
    # Of that of float32, for parts of a larger state's rows, the first or the second of two launches: one after the
    # other, of which the second adds its outputs to the first one's, or beside each other, which add theirs to zeros.
    IN_TURN: int = 0
    BESIDE: int = 0
    # Of those by roles and of float32: several programs may share a segment.
    SHARED: bool = False
    # Of those for sm_90: sequences of one token are another launch's, and programs go round the segments of the others.
    APART: bool = False
    # Of those for sm_90: a packed batch's segments of so many tokens or more have other programs besides (0: none has).
    LONG: int = 0


class Counts(NamedTuple):
    """Rows of a sequence (of all, where rows are packed), sequences, and slots of the pool."""

    rows: Any
    sequences: Any
    slots: Any


class RowStrides(NamedTuple):
    """Strides of q, k, v or o, in elements; where ``element`` is None it is 1, and the others are in units of 8."""

    sequence: Any
    row: Any
    head: Any
    element: Any

    @classmethod
    def of(cls, strides: tuple[int, int, int, int]) -> Self:
        """In units of 8 if they are such multiples and not of 16, of which alone Triton knows.

        Rows of heads of 72 would be loaded number by number.
        """
        *outer, element = strides
        is_known = all(stride % 16 == 0 for stride in outer)
        if is_known or element != 1 or any(stride % 8 or stride >= 2**31 for stride in outer):
            return cls(*strides)
        return cls(*(stride // 8 for stride in outer), None)


class StateStrides(NamedTuple):
    """Strides of states, in elements."""

    slot: Any
    head: Any
    d: Any
    e: Any


class Strides(NamedTuple):
    """Those of a prefill kernel's tensors, as far as it has them.

    Kernels take them out of the tuple before their first ``if``: inside of one Triton 3.6 loses strides of 1.
    """

    q: Any = None
    k: Any = None
    v: Any = None
    o: Any = None
    initial: Any = None
    final: Any = None
    carried: Any = None


class DecodeStrides(NamedTuple):
    """Those of a decode kernel's tensors, as far as it has them."""

    q: Any = None
    k: Any = None
    v: Any = None
    pool: Any = None
    o: Any = None


class Batch(NamedTuple):
    """The sequences of a call. p_cu None: of ``rows`` rows each, otherwise packed. p_has None: all have a state."""

    p_cu: Any
    p_slots: Any
    p_has: Any
    count: Any


class Snapshots(NamedTuple):
    """For each sequence ``count`` positions at which to keep the state, and the slots for it."""

    p_positions: Any
    p_slots: Any
    count: Any


class Rows(NamedTuple):
    """The rows of one head of q, k, v or o: the first one's address and the strides between rows and elements."""

    p: Any
    stride: Any
    element: Any


class States(NamedTuple):
    """States by slot: a pool, initial states or a workspace."""

    p: Any
    strides: Any


@triton.jit
def program(H: tl.constexpr, TILES: tl.constexpr, LAST_FIRST: tl.constexpr = False):
    """Tile, head and sequence (or segment) of a program. The grid has one dimension: others end at 65535.

    LAST_FIRST: from the end on, of which most is still in the L2 cache after a launch that went through all of it.
    """
    return item(tl.program_id(0), tl.num_programs(0), H, TILES, LAST_FIRST)


@triton.jit
def item(i, items, H: tl.constexpr, TILES: tl.constexpr, LAST_FIRST: tl.constexpr):
    """The same of the i-th of so many items."""
    if LAST_FIRST:
        i = items - 1 - i
    return i % TILES, (i // TILES) % H, i // (TILES * H)


@triton.jit
def last_first(i_w, count, shares):
    """The grid index, of as many, that a ragged batch's program takes: prompts, which engines put last, begin first.

    But ahead of the rows of no sequence, whose programs end at once: the two tiles of a head, which load the same q and
    k, would begin on SMs that these leave, one here and one there.
    """
    return (2 * count - 1 - shares - i_w) % count


@triton.jit
def rows_of_head(p, strides, i_n, i_h, RATIO: tl.constexpr):
    """A sequence's rows of the head that RATIO heads share, head i_h among them."""
    first = i_n.to(tl.int64) * strides.sequence + (i_h // RATIO) * strides.head
    if strides.element is None:
        rows = Rows(p + first * 8, strides.row * 8, 1)
    else:
        rows = Rows(p + first, strides.row, strides.element)
    return rows


@triton.jit
def bounds(batch, i_n):
    """The rows of a sequence, clamped; the one after the last stands for the rows after it."""
    if batch.p_cu is None:
        begin = i_n.to(tl.int64) * 0
        end = begin + batch.count.rows
    else:
        begin = tl.minimum(tl.maximum(tl.load(batch.p_cu + i_n).to(tl.int64), 0), batch.count.rows)
        after = tl.load(batch.p_cu + i_n + 1, mask=i_n < batch.count.sequences, other=batch.count.rows).to(tl.int64)
        end = tl.minimum(tl.maximum(after, begin), batch.count.rows)
    return begin, end


@triton.jit
def first_segment(batch, i_n, SEGMENT: tl.constexpr):
    """The grid index of a ragged sequence's first segment: no two sequences share one, whatever their lengths."""
    begin = tl.minimum(tl.maximum(tl.load(batch.p_cu + i_n).to(tl.int64), 0), batch.count.rows)
    return begin // SEGMENT + i_n


@triton.jit
def carried_slot(batch, i_n, begin, SEGMENT: tl.constexpr):
    """The slot, in the workspace, of the state before the sequence's first segment; the next segments' follow it.

    A sequence of n > SEGMENT rows has at most n // SEGMENT + 1 segments, which is what f + min(i, f) leaves room for,
    f being the whole segments of rows before sequence i.
    """
    if batch.p_cu is None:
        slot = i_n.to(tl.int64) * tl.cdiv(batch.count.rows, SEGMENT)
    else:
        before = begin // SEGMENT
        slot = before + tl.minimum(before, i_n)
    return slot


@triton.jit
def chain_of(batch, i_n, begin, SEGMENT: tl.constexpr):
    """The number of a sequence among those longer than a segment, or one that none of them has."""
    if batch.p_cu is None:
        chain = i_n.to(tl.int64)
    else:
        chain = tl.minimum((begin // SEGMENT).to(tl.int64), i_n)
    return chain


@triton.jit
def chunks_in_reach(rate, sizes: tl.constexpr):
    """Chunks of a segment, at its end, that its own state takes in: those before are forgotten, and not read.

    In 16 bits tokens whose weight in the next segment is exp(-24) at most, as in ``lightning_state``; in float32 those
    of a weight below 2^-150, which is 0.
    """
    FORGOTTEN: tl.constexpr = 34.625 if sizes.PRECISION is None else 150.0
    reach = tl.minimum(FORGOTTEN / tl.maximum(rate, 1e-30), sizes.SEGMENT + 0.0).to(tl.int32)
    return tl.cdiv(reach, sizes.CHUNK)


@triton.jit
def nth_segment(i_step, segments, REVERSED: tl.constexpr):
    """Its number, in the order in which states go from one to the next."""
    return segments - 1 - i_step if REVERSED else i_step


@triton.jit
def sequence_of(batch, i_w, SEGMENT: tl.constexpr):
    """The ragged sequence that grid index i_w is of."""
    # Ahead of sequence i's first index are i, and one more for each whole segment of rows before it: where a batch
    # has none, i is i_w. Each step waits for a load: of 7, rows of one token took 4 to 30 % longer.
    i_n = tl.minimum(tl.maximum(i_w - batch.count.rows // SEGMENT, 0), batch.count.sequences)
    above = i_n * 0 + tl.minimum(i_w, batch.count.sequences) + 1
    while above - i_n > 1:
        middle = (i_n + above) // 2
        if first_segment(batch, middle, SEGMENT) <= i_w:
            i_n = middle
        else:
            above = middle
    return i_n


@triton.jit
def locate(batch, i_w, SEGMENT: tl.constexpr, BY_SEGMENT: tl.constexpr = False):
    """Sequence, segment and the sequence's rows of grid index i_w. Segments past the sequence's last have no rows.

    BY_SEGMENT: where all have as many, the first ones of all sequences come first.
    """
    if SEGMENT == 0:
        i_n = i_w
        i_segment = 0
    elif batch.p_cu is None and BY_SEGMENT:
        i_n = i_w % batch.count.sequences
        i_segment = i_w // batch.count.sequences
    elif batch.p_cu is None:
        i_n = i_w // tl.cdiv(batch.count.rows, SEGMENT)
        i_segment = i_w % tl.cdiv(batch.count.rows, SEGMENT)
    else:
        i_n = sequence_of(batch, i_w, SEGMENT)
        i_segment = (i_w - first_segment(batch, i_n, SEGMENT)).to(tl.int32)
    begin, end = bounds(batch, i_n)
    # Indices before the first sequence's have no rows.
    end = tl.where(i_segment < 0, begin, end)
    return i_n, tl.maximum(i_segment, 0), begin, end


@triton.jit
def last_up_to(batch, number, SEGMENT: tl.constexpr, CHAINS: tl.constexpr):
    """The last ragged sequence whose first slot in the workspace (CHAINS: whose chain) is at most this number."""
    i_n = number * 0
    above = number * 0 + batch.count.sequences
    while above - i_n > 1:
        middle = (i_n + above) // 2
        begin, _ = bounds(batch, middle)
        if CHAINS:
            at = chain_of(batch, middle, begin, SEGMENT)
        else:
            at = carried_slot(batch, middle, begin, SEGMENT)
        if at <= number:
            i_n = middle
        else:
            above = middle
    return i_n


@triton.jit
def locate_state(batch, i_state, SEGMENT: tl.constexpr, REVERSED: tl.constexpr):
    """Sequence, segment and the sequence's rows of the i-th state that a segment passes on.

    Where all have as many, none is of a sequence's last segment, or REVERSED of its first. Of a ragged batch it is the
    workspace's slot i_state, and a slot that is nobody's has no rows; sequences longer than a segment alone have slots:
    many short ones take no programs.
    """
    if batch.p_cu is None:
        passed = tl.cdiv(batch.count.rows, SEGMENT) - 1
        i_n = i_state // passed
        i_segment = i_state % passed
        if REVERSED:
            i_segment += 1
        begin, end = bounds(batch, i_n)
    else:
        i_n = last_up_to(batch, i_state, SEGMENT, False)
        begin, end = bounds(batch, i_n)
        i_segment = (i_state - carried_slot(batch, i_n, begin, SEGMENT)).to(tl.int32)
        # Slots before the first sequence's.
        end = tl.where(i_segment < 0, begin, end)
        i_segment = tl.maximum(i_segment, 0)
    return i_n, i_segment, begin, end


@triton.jit
def locate_chain(batch, i_chain, SEGMENT: tl.constexpr):
    """The sequence of this number among those longer than a segment, and its rows; no rows where there is none."""
    i_n = i_chain
    if batch.p_cu is not None:
        i_n = last_up_to(batch, i_chain, SEGMENT, True)
    begin, end = bounds(batch, i_n)
    if batch.p_cu is not None:
        end = tl.where(chain_of(batch, i_n, begin, SEGMENT) == i_chain, end, begin)
    return i_n, begin, end


@triton.jit
def segment_rows(first, last, i_segment, SEGMENT: tl.constexpr):
    """The rows of a segment, of a sequence's rows ``first`` to ``last``; all of them where there are no segments."""
    begin = first
    end = last
    if SEGMENT:
        begin = tl.minimum(first + i_segment * SEGMENT, last)
        end = tl.minimum(begin + SEGMENT, last)
    return begin, end


@triton.jit
def shares_of(batch, PROGRAMS: tl.constexpr, SEGMENT: tl.constexpr):
    """How many programs share a segment, of PROGRAMS a segment without shares: as the grid has it."""
    if batch.p_cu is None:
        segments = batch.count.sequences * tl.cdiv(batch.count.rows, SEGMENT)
    else:
        segments = batch.count.rows // SEGMENT + batch.count.sequences + 1
    return tl.num_programs(0) // (PROGRAMS * segments)


@triton.jit
def chunks_before(i_share, shares, chunks):
    """Chunks of a segment before those of one of its at most four shares, an even number of them, or all:
    roles wait for scores by the parity of a chunk's number.

    A program only follows the state over these, half of what its own take it, each: so each has fewer than the one
    ahead. On an H100, 8 heads of 96, of whose 32 chunks the first of two has 18, 20 and 22: 47.2, 46.3 and 47.2 us.
    """
    nearest = (chunks * weight_before(i_share) // weight_before(shares) + 1) // 2 * 2
    return tl.where(i_share == shares, chunks, tl.minimum(nearest, chunks))


@triton.jit
def weight_before(i_share):
    """10, 6, 4 and 2, added up."""
    weights = tl.where(i_share > 0, 10, 0) + tl.where(i_share > 1, 6, 0)
    return weights + tl.where(i_share > 2, 4, 0) + tl.where(i_share > 3, 2, 0)


@triton.jit
def slot_of(batch, i_n):
    """The sequence's slot in the pool, -1 for padding and for the rows of no sequence."""
    if batch.p_slots is None:
        slot = i_n.to(tl.int64)
        if batch.p_cu is not None:
            slot = tl.where(i_n < batch.count.sequences, slot, -1)
    else:
        slot = tl.load(batch.p_slots + i_n, mask=i_n < batch.count.sequences, other=-1).to(tl.int64)
        slot = tl.where((slot >= 0) & (slot < batch.count.slots), slot, -1)
    return slot


@triton.jit
def has_initial(batch, i_n):
    """Whether the sequence starts from a state, where the call has initial states at all."""
    if batch.p_has is None:
        has = True
    else:
        has = tl.load(batch.p_has + i_n, mask=i_n < batch.count.sequences, other=0) != 0
    return has


@triton.jit
def next_snapshot(snapshots, batch, i_n, at, CHUNK: tl.constexpr):
    """The first row >= ``at``, whole chunks from the sequence's start, at which a snapshot wants the state."""
    first, last = bounds(batch, i_n)
    # Past every row.
    row = last + CHUNK
    for i_p in range(snapshots.count):
        position = tl.load(snapshots.p_positions + i_n * snapshots.count + i_p).to(tl.int64)
        floor = first + position // CHUNK * CHUNK
        wanted = (position >= 1) & (position <= last - first) & (floor >= at)
        row = tl.where(wanted, tl.minimum(row, floor), row)
    return row.to(tl.int32)


@triton.jit
def snapshot_slot(snapshots, batch, i_n, i_p, at, CHUNK: tl.constexpr):
    """The slot of snapshot i_p of a sequence if its position lies in the chunk that begins ``at`` this row, else -1.

    Of a position inside the chunk the rest is added by ``recurrent.finish_snapshots``.
    """
    first, last = bounds(batch, i_n)
    position = tl.load(snapshots.p_positions + i_n * snapshots.count + i_p).to(tl.int64)
    slot = tl.load(snapshots.p_slots + i_n * snapshots.count + i_p).to(tl.int64)
    wanted = (position >= 1) & (position <= last - first) & (first + position // CHUNK * CHUNK == at)
    return tl.where(wanted & (slot < batch.count.slots), slot, -1)


@triton.jit
def state_pointers(states, slot, i_h, o_d, o_e):
    """A tile of a state, transposed: [e, d]."""
    strides = states.strides
    p_tile = states.p + slot * strides.slot + i_h * strides.head
    return p_tile + o_d.to(tl.int64)[None, :] * strides.d + o_e.to(tl.int64)[:, None] * strides.e
