"""The states that sequences leave, without outputs: sums over segments in parallel, then the sums of those.

Of a sequence of n tokens, token j enters its state with a^(n-1-j), a = exp(-s): weights of its distance from the end,
so that segments need nothing of each other. They are counted from there, and those that a head has forgotten are not
read. Backwards (REVERSED), as gradients go, token j enters with a^(j+1), and segments are counted from the start.

States are held transposed, [E, D]: the weighted values are then the operand that a tensor core takes from registers.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lightning_attn.kernels.decay import base_two_rate, decay_over, rest_of_rate
from lightning_attn.kernels.schedule import (
    Batch,
    Counts,
    Rows,
    States,
    bounds,
    carried_slot,
    locate,
    program,
    rows_of_head,
    state_pointers,
)


class StateSizes(NamedTuple):
    """The constants that these kernels are compiled for; ``WIDE``: offsets inside a tile need 64 bits."""

    H: int
    RATIO_K: int
    RATIO_V: int
    D: int
    E: int
    BLOCK_D: int
    BLOCK_E: int
    CHUNK: int
    SEGMENT: int
    STAGES: int
    REVERSED: bool
    WIDE: bool
    PRECISION: str
    # Of those for sm_90: lanes of a head and sequence at most, and whether each has programs and places for as many;
    # whether the second launch begins before the first has ended; warps of a program.
    LANES: int = 0
    BY_LANES: bool = False
    DEPENDENT_LAUNCH: bool = False
    WARPS: int = 4


class SumStrides(NamedTuple):
    """Strides of k and v (RowStrides), and of states (StateStrides)."""

    k: Any
    v: Any
    initial: Any
    final: Any
    partial: Any


@triton.jit
def tokens_in_reach(p_slopes, i_h, reach, length):
    """How many of a sequence's tokens, from its end, enter its state with more than exp(-reach)."""
    slope = tl.load(p_slopes + i_h)
    slope = tl.minimum(tl.where(slope > 0.0, slope, 1e-30), 256.0)
    tokens = tl.minimum(tl.ceil(tl.div_rn(reach, slope)), 2147483520.0).to(tl.int32)
    return tl.minimum(tokens.to(tl.int64), length)


@triton.jit
def load_tile(rows, o_row, o_column, m_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """[rows, columns], 0 where masked and past ``WIDTH`` columns. No mask of columns where none is needed."""
    if WIDE:
        o_row = o_row.to(tl.int64)
        o_column = o_column.to(tl.int64)
    m = m_row[:, None]
    if WIDTH % BLOCK:
        m = m & (o_column[None, :] < WIDTH)
    return tl.load(rows.p + o_row[:, None] * rows.stride + o_column[None, :] * rows.element, mask=m, other=0.0)


@triton.jit
def tile_of_state(states, slot, i_h, o_d, o_e, sizes: tl.constexpr):
    """Addresses of a state's tile, [e, d], and which of them are inside of it."""
    p_tile = state_pointers(states, slot.to(tl.int64), i_h, o_d, o_e)
    return p_tile, (o_d[None, :] < sizes.D) & (o_e[:, None] < sizes.E)


@triton.jit
def zero_tile(sizes: tl.constexpr):
    BLOCK_E: tl.constexpr = sizes.BLOCK_E
    BLOCK_D: tl.constexpr = sizes.BLOCK_D
    return tl.zeros([BLOCK_E, BLOCK_D], tl.float32)


@triton.jit
def tile_offsets(i_tile, sizes: tl.constexpr):
    """Rows and columns of a state that tile i_tile holds."""
    TILES_D: tl.constexpr = (sizes.D + sizes.BLOCK_D - 1) // sizes.BLOCK_D
    o_d = (i_tile % TILES_D) * sizes.BLOCK_D + tl.arange(0, sizes.BLOCK_D)
    o_e = (i_tile // TILES_D) * sizes.BLOCK_E + tl.arange(0, sizes.BLOCK_E)
    return o_d, o_e


@triton.jit
def decayed_initial(initial, i_n, i_h, o_d, o_e, p_slopes, length, sizes: tl.constexpr):
    """What a sequence's initial state is after all of its tokens."""
    p_tile, m = tile_of_state(initial, i_n, i_h, o_d, o_e, sizes)
    # Without tokens every bit stays.
    rate = base_two_rate(p_slopes, i_h)
    return tl.load(p_tile, mask=m, other=0.0) * decay_over(rate, rest_of_rate(p_slopes, i_h, rate), length)


@triton.jit
def segment_sum(k, v, begin, end, anchor, rate, scale, o_d, o_e, sizes: tl.constexpr):
    """The sum of rows begin to end, of which those at ``anchor`` have the greatest weight: [BLOCK_E, BLOCK_D]."""
    acc = zero_tile(sizes)
    o_c = tl.arange(0, sizes.CHUNK)
    count = (end - begin).to(tl.int32)
    k = Rows(k.p + begin * k.stride, k.stride, k.element)
    v = Rows(v.p + begin * v.stride, v.stride, v.element)
    first_distance = (begin - anchor).to(tl.int32)
    for row in tl.range(0, count, sizes.CHUNK, num_stages=sizes.STAGES):
        o_row = row + o_c
        m_row = o_row < count
        distance = first_distance + o_row
        if not sizes.REVERSED:
            distance = -distance
        b_weight = tl.exp2(-rate * tl.maximum(distance, 0).to(tl.float32))
        b_v = load_tile(v, o_row, o_e, m_row, sizes.E, sizes.BLOCK_E, sizes.WIDE)  # [CHUNK, BLOCK_E]
        b_k = load_tile(k, o_row, o_d, m_row, sizes.D, sizes.BLOCK_D, sizes.WIDE)  # [CHUNK, BLOCK_D]
        b_weighted = (b_v.to(tl.float32) * b_weight[:, None]).to(b_v.dtype)
        acc = tl.dot(tl.trans(b_weighted), b_k, acc, input_precision=sizes.PRECISION)
    return acc * scale


@triton.jit(do_not_specialize=["rows", "num_sequences"])
def segment_sums(
    p_k, p_v, p_slopes, p_cu, p_initial, p_final, p_partial, rows, num_sequences, reach, scale, strides,
    sizes: tl.constexpr,
):  # fmt: skip
    """The sum of one segment for one head and tile. It is the whole state where the head reaches no further back.

    Without tokens a state is the initial one, or 0.
    """
    batch = Batch(p_cu, None, None, Counts(rows, num_sequences, num_sequences))
    s_k, s_v = strides.k, strides.v
    initial, final, partial = (
        States(p_initial, strides.initial),
        States(p_final, strides.final),
        States(p_partial, strides.partial),
    )
    TILES_D: tl.constexpr = (sizes.D + sizes.BLOCK_D - 1) // sizes.BLOCK_D
    i_tile, i_h, i_w = program(sizes.H, TILES_D * ((sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E))
    i_h = i_h.to(tl.int64)
    i_n, i_segment, first, last = locate(batch, i_w, sizes.SEGMENT)
    if i_n < num_sequences:
        tokens = tokens_in_reach(p_slopes, i_h, reach, last - first)
        nearest = i_segment.to(tl.int64) * sizes.SEGMENT
        furthest = tl.minimum(nearest + sizes.SEGMENT, tokens)
        if (nearest < tokens) | (i_segment == 0):
            if sizes.REVERSED:
                begin = first + nearest
                end = first + furthest
                # The first token enters with one decay already.
                anchor = first - 1
            else:
                begin = last - furthest
                end = last - nearest
                anchor = last - 1
            k = rows_of_head(p_k, s_k, i_n, i_h, sizes.RATIO_K)
            v = rows_of_head(p_v, s_v, i_n, i_h, sizes.RATIO_V)
            o_d, o_e = tile_offsets(i_tile, sizes)
            rate = base_two_rate(p_slopes, i_h)
            acc = segment_sum(k, v, begin, end, anchor, rate, scale, o_d, o_e, sizes)
            if tokens > sizes.SEGMENT:
                slot = carried_slot(batch, i_n, first, sizes.SEGMENT) + i_segment
                p_tile, m = tile_of_state(partial, slot, i_h, o_d, o_e, sizes)
                tl.store(p_tile, acc, mask=m)
            else:
                if p_initial is not None:
                    acc += decayed_initial(initial, i_n, i_h, o_d, o_e, p_slopes, last - first, sizes)
                p_tile, m = tile_of_state(final, i_n, i_h, o_d, o_e, sizes)
                tl.store(p_tile, acc, mask=m)


@triton.jit(do_not_specialize=["rows", "num_sequences"])
def whole_sums(
    p_slopes, p_cu, p_initial, p_final, p_partial, rows, num_sequences, reach, strides, sizes: tl.constexpr
):  # fmt: skip
    """The states of heads that reach back beyond a segment: the sums of segments, from the furthest to the nearest."""
    batch = Batch(p_cu, None, None, Counts(rows, num_sequences, num_sequences))
    initial, final, partial = (
        States(p_initial, strides.initial),
        States(p_final, strides.final),
        States(p_partial, strides.partial),
    )
    TILES_D: tl.constexpr = (sizes.D + sizes.BLOCK_D - 1) // sizes.BLOCK_D
    i_tile, i_h, i_n = program(sizes.H, TILES_D * ((sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E))
    i_h = i_h.to(tl.int64)
    first, last = bounds(batch, i_n)
    tokens = tokens_in_reach(p_slopes, i_h, reach, last - first)
    if tokens > sizes.SEGMENT:
        o_d, o_e = tile_offsets(i_tile, sizes)
        b_S = zero_tile(sizes)
        if p_initial is not None:
            b_S += decayed_initial(initial, i_n, i_h, o_d, o_e, p_slopes, last - first, sizes)
        first_slot = carried_slot(batch, i_n, first, sizes.SEGMENT)
        segments = tl.cdiv(tokens, sizes.SEGMENT)
        for i in range(segments):
            p_tile, m = tile_of_state(partial, first_slot + segments - 1 - i, i_h, o_d, o_e, sizes)
            b_S += tl.load(p_tile, mask=m, other=0.0)
        p_tile, m = tile_of_state(final, i_n, i_h, o_d, o_e, sizes)
        tl.store(p_tile, b_S, mask=m)


@triton.jit(do_not_specialize=["rows", "num_sequences"])
def keep_states(p_cu, p_initial, p_final, rows, num_sequences, strides, sizes: tl.constexpr):
    """The states of sequences without tokens, which prefill leaves alone: the initial ones, or 0."""
    batch = Batch(p_cu, None, None, Counts(rows, num_sequences, num_sequences))
    initial, final = States(p_initial, strides.initial), States(p_final, strides.final)
    TILES_D: tl.constexpr = (sizes.D + sizes.BLOCK_D - 1) // sizes.BLOCK_D
    i_tile, i_h, i_n = program(sizes.H, TILES_D * ((sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E))
    i_h = i_h.to(tl.int64)
    begin, end = bounds(batch, i_n)
    if begin == end:
        o_d, o_e = tile_offsets(i_tile, sizes)
        b_S = zero_tile(sizes)
        if p_initial is not None:
            p_tile, m = tile_of_state(initial, i_n, i_h, o_d, o_e, sizes)
            b_S = tl.load(p_tile, mask=m, other=0.0)
        p_tile, m = tile_of_state(final, i_n, i_h, o_d, o_e, sizes)
        tl.store(p_tile, b_S, mask=m)
