"""The states between segments, of what each segment leaves by itself: latency alone, so that loads go far ahead."""

import triton
import triton.language as tl

from lightning_attn.kernels.chunked import load_piece
from lightning_attn.kernels.decay import advanced_by, base_two_rate, kept_and_lost, rest_of_rate
from lightning_attn.kernels.schedule import (
    Batch,
    Counts,
    States,
    carried_slot,
    chunks_in_reach,
    has_initial,
    locate_chain,
    nth_segment,
    program,
    slot_of,
    state_pointers,
)


@triton.jit(do_not_specialize=["rows", "num_sequences", "num_slots"])
def carry_states(
    p_slopes, p_cu, p_slots, p_has, p_initial, p_own, p_carried, rows, num_sequences, num_slots, strides,
    sizes: tl.constexpr,
):  # fmt: skip
    """Turn the states of a segment's parts into the state before the next one, from a sequence's initial state on.

    The initial state is stored too: a pool's slot is overwritten while the segments run. p_own may be p_carried.
    """
    batch = Batch(p_cu, p_slots, p_has, Counts(rows, num_sequences, num_slots))
    initial, carried = States(p_initial, strides.initial), States(p_carried, strides.carried)
    of_parts = States(p_own, strides.carried)
    if sizes.DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    PIECES: tl.constexpr = (sizes.D + sizes.BLOCK_D - 1) // sizes.BLOCK_D
    i_tile, i_h, i_chain = program(sizes.H, PIECES * ((sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E))
    i_e = i_tile // PIECES
    i = i_tile % PIECES
    i_h = i_h.to(tl.int64)
    i_n, first, last = locate_chain(batch, i_chain, sizes.SEGMENT)
    slot = slot_of(batch, i_n)
    if (last - first > sizes.SEGMENT) & (slot >= 0):
        BLOCK_D: tl.constexpr = sizes.BLOCK_D
        BLOCK_E: tl.constexpr = sizes.BLOCK_E
        REVERSED: tl.constexpr = sizes.REVERSED
        o_d = i * BLOCK_D + tl.arange(0, BLOCK_D)
        o_e = i_e * BLOCK_E + tl.arange(0, BLOCK_E)
        m = (o_d[None, :] < sizes.D) & (o_e[:, None] < sizes.E)
        b_S = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
        if p_initial is not None:
            if has_initial(batch, i_n):
                b_S = load_piece(initial, slot, i_h, i, i_e, sizes)
        rate = base_two_rate(p_slopes, i_h)
        rest = rest_of_rate(p_slopes, i_h, rate)
        first_slot = carried_slot(batch, i_n, first, sizes.SEGMENT)
        segments = tl.cdiv(last - first, sizes.SEGMENT)
        # From one on that is not in reach, parts have not been made.
        tokens = chunks_in_reach(rate, sizes) * sizes.CHUNK
        PARTS: tl.constexpr = sizes.SEGMENT // sizes.PART
        AHEAD: tl.constexpr = max(2, 8 // PARTS)
        kept, lost = kept_and_lost(rate, (last - first) * 0 + sizes.SEGMENT, rest)
        # Backwards the first one is the sequence's last, which may be short.
        shorter = last - first - (segments - 1) * sizes.SEGMENT
        kept_of_first, lost_of_first = kept_and_lost(rate, shorter, rest)
        p_parts = state_pointers(of_parts, first_slot * 0, i_h, o_d, o_e)
        p_states = state_pointers(carried, first_slot * 0, i_h, o_d, o_e)
        own = (tl.zeros([BLOCK_E, BLOCK_D], tl.float32),) * AHEAD
        for i_first in range(1 - AHEAD, segments, AHEAD):
            # Those of the next round are loaded before this one's states are stored, which the loads might wait for.
            next_own = ()
            for j in tl.static_range(AHEAD):
                i_next = i_first + AHEAD + j
                i_own = (first_slot + nth_segment(i_next, segments, REVERSED)) * PARTS
                made = tokens
                if REVERSED and j == 0:
                    made = tl.where(i_next == 1, tl.minimum(tokens, shorter), tokens)
                b_own = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
                for i_part in tl.static_range(PARTS):
                    is_there = m & (i_next < segments) & (i_part * sizes.PART < made)
                    b_own += tl.load(p_parts + (i_own + i_part) * strides.carried.slot, mask=is_there, other=0.0)
                next_own = next_own + (b_own,)
            for j in tl.static_range(AHEAD):
                kept_by = kept
                lost_by = lost
                if REVERSED and j == 0:
                    kept_by = tl.where(i_first == 1, kept_of_first, kept)
                    lost_by = tl.where(i_first == 1, lost_of_first, lost)
                b_S = tl.where(i_first > 0, advanced_by(b_S, kept_by, lost_by, own[j]), b_S)
                i_state = first_slot + nth_segment(i_first + j, segments, REVERSED)
                is_there = m & (i_first + j >= 0) & (i_first + j < segments)
                tl.store(p_states + i_state * strides.carried.slot, b_S, mask=is_there)
            own = next_own
