"""Attention to listed blocks of keys for NVIDIA's sm_90, in 16 bits, with copies and products in flight.

Two warpgroups have 64 rows each, one behind the other in a sequence's positions, of one head. The rows of each belong
to one row of the layout. A warp of its own merges the two lists and asks the tensor memory accelerator for the keys of
each 64 that either wants, a second one does so for the values; what is wanted by whom goes along in shared memory. The
warpgroups take all tiles, and leave out the scores of what they did not want: neighbouring rows of a layout mostly list
the same. While a tile's values are being multiplied, the scores of the next one are made and their softmax is taken
(FlashAttention-3, arXiv 2407.08608, section 3.2):

    scores = q k_i^T      in flight together with      acc += weights_(i-1) v_(i-1)
    softmax of scores     while the second product runs

Programs stay, one on each multiprocessor, and take one pair of such rows after the other. A third warp looks the next
pair up and fetches its queries, and the other two are ahead by as many tiles as there is room for, while the warpgroups
still finish the pair before.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from blocksparse_attn.kernels.softmax import LN_2, LOG2_E, cap, finite, logarithm
from blocksparse_attn.kernels.tiles import (
    PAGED,
    keys_of_sequence,
    list_of,
    locate,
    place_in_batch,
    share,
)

__all__ = ["TensorDescriptor", "attend", "descriptor_layout"]

# Rows of a warpgroup, keys that are listed together, and columns that shared memory is swizzled over: 128 bytes.
ROWS: tl.constexpr = tl.constexpr(64)
KEYS: tl.constexpr = tl.constexpr(64)
COLUMNS: tl.constexpr = tl.constexpr(64)
# Rows of values that are zeroed together: those of a pattern of swizzling.
STRIP: tl.constexpr = tl.constexpr(8)
# Where there are no keys: behind all, and so that 64 more do not run over.
NOWHERE: tl.constexpr = tl.constexpr(2**31 - 128)
# The least normal number of float32, or a little more.
TINY: tl.constexpr = tl.constexpr(1.2e-38)
# Where ``put`` keeps what, of a pair of rows ...
THERE: tl.constexpr = tl.constexpr(0)
START: tl.constexpr = tl.constexpr(1)
TOKEN: tl.constexpr = tl.constexpr(2)
BATCH: tl.constexpr = tl.constexpr(3)
CONTEXT: tl.constexpr = tl.constexpr(4)
LENGTH: tl.constexpr = tl.constexpr(5)
POSSIBLE: tl.constexpr = tl.constexpr(6)
HEAD: tl.constexpr = tl.constexpr(7)
SPLIT: tl.constexpr = tl.constexpr(8)
ROW: tl.constexpr = tl.constexpr(9)
ALL_ROWS: tl.constexpr = tl.constexpr(10)
SEQUENCE: tl.constexpr = tl.constexpr(11)
K_BEGIN: tl.constexpr = tl.constexpr(12)
FROM_A: tl.constexpr = tl.constexpr(13)
END_A: tl.constexpr = tl.constexpr(14)
LAST_A: tl.constexpr = tl.constexpr(15)
FROM_B: tl.constexpr = tl.constexpr(16)
END_B: tl.constexpr = tl.constexpr(17)
LAST_B: tl.constexpr = tl.constexpr(18)
NOTES: tl.constexpr = tl.constexpr(19)
# Pairs whose numbers are kept.
PAIRS: tl.constexpr = tl.constexpr(2)
# ... and of a tile of keys: where its halves are, counted from the first row of the first warpgroup, and from that of
# the second, or NOWHERE for one that did not list it; and whether it is a tile.
PER_TILE: tl.constexpr = tl.constexpr(5)


def descriptor_layout(block: list[int]) -> gl.NVMMASharedLayout:
    """How a descriptor lays a block of 16-bit elements out in shared memory."""
    return gl.NVMMASharedLayout(block[-1] * 2, 16, rank=len(block))


@gluon.jit
def put(notes, i, number, num_warps: gl.constexpr):
    """Keep a number in shared memory: what is asked for again only after the walk needs no register through it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    notes.index(i).store((gl.full([1], 0, notes.dtype, layout) + number).to(notes.dtype))


@gluon.jit
def get(notes, i, num_warps: gl.constexpr = 4):
    """A number that ``put`` kept."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    return gl.max(notes.index(i).load(layout), 0)


@gluon.jit
def pointers(p, i_b, token, i_h, o_d, s):
    """To rows of a head [ROWS, BLOCK_D], by strides of (sequence, token, head, element)."""
    off = i_b.to(gl.int64) * s[0] + token.to(gl.int64) * s[1] + i_h.to(gl.int64) * s[2]
    return p + off[:, None] + o_d.to(gl.int64)[None, :] * s[3]


@gluon.jit
def natural_logarithm(m, total, unit):
    """log(2^m total), and -inf for a row that saw nothing, where m is a score in units of ``unit`` log2(e) as rounded.

    What undoes that factor is taken in two parts, so that a large score is rounded once.
    """
    rounded = unit * LOG2_E
    rounded = gl.where(rounded == 0, 1.0, rounded)
    ratio = unit / rounded
    rest = gl.fma(-ratio, rounded, unit) / rounded
    log_total = gl.log(gl.where(total == 0, 1.0, total))
    return gl.where(total == 0, float("-inf"), gl.fma(finite(m), ratio, gl.fma(finite(m), rest, log_total)))


# What is brought


@gluon.jit
def keys_of_entry(p_list, i, end, columns, K_BLOCK: gl.constexpr):
    """Where the keys of a list's entry i begin, an entry being 64 keys of a column, and NOWHERE behind its end.

    Columns that are not there are just before that, where no row sees them.
    """
    PER_BLOCK: gl.constexpr = K_BLOCK // KEYS
    column = gl.load(p_list + i // PER_BLOCK, mask=i < end, other=-1)
    at = gl.where((column >= 0) & (column < columns), column * K_BLOCK + i % PER_BLOCK * KEYS, NOWHERE - 1)
    return gl.where(i < end, at, NOWHERE)


@gluon.jit
def next_keys(p_list, i_a, i_b, lists, columns, K_BLOCK: gl.constexpr):
    """The next 64 keys that a row of either list sees: where they begin, or NOWHERE, and whether each list has them.

    Both lists are walked once, in whatever order they are; rising ones meet where they list the same.
    """
    end_a, end_b, last_a, last_b = lists
    at = i_a * 0 + NOWHERE
    for_a = at < 0
    for_b = at < 0
    while ((i_a < end_a) | (i_b < end_b)) & (at == NOWHERE):
        at_a = keys_of_entry(p_list, i_a, end_a, columns, K_BLOCK)
        at_b = keys_of_entry(p_list, i_b, end_b, columns, K_BLOCK)
        least = gl.minimum(at_a, at_b)
        for_a = (at_a == least) & (least <= last_a)
        for_b = (at_b == least) & (least <= last_b)
        i_a += (at_a == least).to(gl.int32)
        i_b += (at_b == least).to(gl.int32)
        at = gl.where(for_a | for_b, least, at)
    return at, for_a, for_b, i_a, i_b


@gluon.jit
def fetch(
    d, boxes, arrived, stage, at, half: gl.constexpr, p_row, i_n, i_kv, k_begin, length, keys, num_blocks,
    BLOCK_D: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Start bringing 64 keys, or values, to one half of a tile. What is not there, and NOWHERE, is filled with 0."""
    BOXES: gl.constexpr = KEYS // BOX
    first_box = stage * (BOXES * HALVES * (BLOCK_D // COLUMNS)) + half * BOXES
    for i_box in gl.static_range(BOXES):
        key = at + i_box * BOX
        if PAGE:
            block = gl.load(p_row + key // PAGE, mask=key < length, other=-1).to(gl.int64)
            outer = gl.where((block >= 0) & (block < num_blocks), block, num_blocks).to(gl.int32)
            place = key % PAGE
        else:
            outer = i_n
            place = gl.where(at == NOWHERE, keys, k_begin + key)
        for i_c in gl.static_range(BLOCK_D // COLUMNS):
            tma.async_copy_global_to_shared(
                d, [outer, i_kv, place, i_c * COLUMNS], arrived,
                boxes.index(first_box + i_c * (BOXES * HALVES) + i_box),
            )  # fmt: skip


@gluon.jit
def zero_rows(strips, first_strip, at, length, BLOCK_D: gl.constexpr, HALVES: gl.constexpr):
    """Zero the values of keys from ``length`` on: weights of 0 would not silence NaN there. By one warp."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    o_row = gl.arange(0, STRIP, gl.SliceLayout(1, layout))
    for strip in range((length - at) // STRIP, KEYS // STRIP):
        keep = (at + strip * STRIP + o_row < length)[:, None]
        for i_c in gl.static_range(BLOCK_D // COLUMNS):
            place = strips.index(first_strip + i_c * (KEYS // STRIP * HALVES) + strip)
            b_strip = place.load(layout)
            place.store(gl.where(keep, b_strip, 0.0).to(b_strip.dtype))


@gluon.jit
def bring_tiles(
    d, boxes, strips, arrived, free, told, p_list, p_row, i, ends, start, walk, lists, source, BLOCK_D: gl.constexpr,
    K_BLOCK: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    VALUES: gl.constexpr,
):  # fmt: skip
    """Bring the tiles of keys, or of values, each as soon as its place in shared memory is free; tell what they are.

    Behind the last tile of keys one is told of that is none. Values behind a sequence's end are zeroed here before they
    are handed on: such a tile arrives at a barrier of this warp's own, that behind those of the stages. Tile i is the
    first; the number of the one behind the last, and of those that had an end, are returned.
    """
    HALVES: gl.constexpr = BLOCK_N // KEYS
    BYTES: gl.constexpr = BLOCK_N * BLOCK_D * 2
    STRIPS: gl.constexpr = BLOCK_N // STRIP * (BLOCK_D // COLUMNS)
    i_a, i_b, columns = walk
    i_n, i_kv, k_begin, length, keys, num_blocks = source
    there = i >= 0
    while there:
        stage = i % STAGES
        at, for_a, for_b, i_a, i_b = next_keys(p_list, i_a, i_b, lists, columns, K_BLOCK)
        there = at != NOWHERE
        second = i_a * 0 + NOWHERE
        second_for_a = second < 0
        second_for_b = second < 0
        if HALVES == 2:
            second, second_for_a, second_for_b, i_a, i_b = next_keys(p_list, i_a, i_b, lists, columns, K_BLOCK)
        # A place is free at first: waiting for the phase before the first one returns at once.
        mbarrier.wait(free.index(stage), (i // STAGES & 1) ^ 1)
        if not VALUES:
            put(told, stage * PER_TILE, gl.where(for_a, at - start, NOWHERE), 1)
            put(told, stage * PER_TILE + 1, gl.where(second_for_a, second - start, NOWHERE), 1)
            put(told, stage * PER_TILE + 2, gl.where(for_b, at - start - ROWS, NOWHERE), 1)
            put(told, stage * PER_TILE + 3, gl.where(second_for_b, second - start - ROWS, NOWHERE), 1)
            put(told, stage * PER_TILE + 4, there, 1)
            tl.debug_barrier()
        if there:
            landing = stage
            if VALUES:
                # Compared so that NOWHERE does not run over.
                first_ends = at > length - KEYS
                second_ends = (second > length - KEYS) & (second != NOWHERE)
                landing = gl.where(first_ends | second_ends, STAGES, stage)
            mbarrier.expect(arrived.index(landing), BYTES)
            fetch(d, boxes, arrived.index(landing), stage, at, 0, p_row, i_n, i_kv, k_begin, length, keys, num_blocks,
                  BLOCK_D, PAGE, BOX, HALVES)  # fmt: skip
            if HALVES == 2:
                fetch(d, boxes, arrived.index(landing), stage, second, 1, p_row, i_n, i_kv, k_begin, length, keys,
                      num_blocks, BLOCK_D, PAGE, BOX, HALVES)  # fmt: skip
            if VALUES:
                if landing == STAGES:
                    mbarrier.wait(arrived.index(STAGES), ends & 1)
                    ends += 1
                    if first_ends:
                        zero_rows(strips, stage * STRIPS, at, length, BLOCK_D, HALVES)
                    if second_ends:
                        zero_rows(strips, stage * STRIPS + KEYS // STRIP, second, length, BLOCK_D, HALVES)
                    fence_async_shared()
                    tl.debug_barrier()
                    mbarrier.arrive(arrived.index(stage))
            i += 1
        else:
            if not VALUES:
                mbarrier.arrive(arrived.index(stage))
                i += 1
    return i, ends


@gluon.jit
def bring(
    d, p_crow, p_col, p_table, memory, barriers, keys, num_blocks, s_col, s_table, KIND: gl.constexpr,
    GROUP: gl.constexpr, BLOCK_D: gl.constexpr, K_BLOCK: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """The tiles of keys, or of values, of one pair of rows after the other."""
    boxes, strips, notes, told = memory
    noted, note_free, arrived, free = barriers
    # Signs of strides would take registers.
    gl.assume(s_col >= 0)
    gl.assume(s_table >= 0)
    n = gl.program_id(0) * 0
    i = n
    ends = n
    mbarrier.wait(noted.index(0), 0)
    there = get(notes, THERE, 1) != 0
    while there:
        i_note = n % PAIRS
        note = i_note * NOTES
        i_n = get(notes, note + SEQUENCE, 1)
        i_b = get(notes, note + BATCH, 1)
        i_h = get(notes, note + HEAD, 1)
        start = get(notes, note + START, 1)
        length = get(notes, note + LENGTH, 1)
        k_begin = get(notes, note + K_BEGIN, 1)
        from_a = get(notes, note + FROM_A, 1)
        end_a = get(notes, note + END_A, 1)
        last_a = get(notes, note + LAST_A, 1)
        from_b = get(notes, note + FROM_B, 1)
        end_b = get(notes, note + END_B, 1)
        last_b = get(notes, note + LAST_B, 1)
        tl.debug_barrier()
        mbarrier.arrive(note_free.index(i_note))
        # Where there are no pages it is not read.
        p_row = p_crow
        if KIND == PAGED:
            p_row = p_table + i_n.to(gl.int64) * s_table
        i, ends = bring_tiles(
            d, boxes, strips, arrived, free, told, p_col + i_h.to(gl.int64) * s_col, p_row, i, ends, start,
            (from_a, from_b, gl.maximum(last_a, last_b) // K_BLOCK + 1), (end_a, end_b, last_a, last_b),
            (i_b, i_h // GROUP, k_begin, length, keys, num_blocks),
            BLOCK_D, K_BLOCK, PAGE, BOX, BLOCK_N, STAGES, VALUES,
        )  # fmt: skip
        n += 1
        mbarrier.wait(noted.index(n % PAIRS), n // PAIRS & 1)
        there = get(notes, n % PAIRS * NOTES + THERE, 1) != 0


@gluon.jit
def scout(
    d_q, p_crow, p_q_starts, p_q_ends, p_k_starts, p_k_ends, q_boxes, notes, barriers, rows, num_sequences, keys,
    s_crow, layout_rows, entries, places, KIND: gl.constexpr, GROUP: gl.constexpr, HEADS_KV: gl.constexpr,
    BLOCK_D: gl.constexpr, Q_BLOCK: gl.constexpr, K_BLOCK: gl.constexpr, BLOCK_M: gl.constexpr, SPLITS: gl.constexpr,
    Q_STAGES: gl.constexpr,
):  # fmt: skip
    """Look one pair of rows after the other up, note its numbers, fetch its queries; behind the last, note the end."""
    noted, note_free, q_arrived, q_free = barriers
    HALVES: gl.constexpr = BLOCK_M // ROWS
    gl.assume(s_crow >= 0)
    work = gl.program_id(0)
    turn = work * 0
    n = work * 0
    while work < places * (GROUP * HEADS_KV * SPLITS):
        # All heads of the same rows come one after the other: they have about as much to do.
        i_h = work % (GROUP * HEADS_KV)
        i_split = work // (GROUP * HEADS_KV) % SPLITS
        i_w = work // (GROUP * HEADS_KV * SPLITS)
        i_n, i_place, begin, q_len = locate(p_q_starts, p_q_ends, i_w, num_sequences, rows, BLOCK_M, 2, KIND)
        k_begin, length, possible = keys_of_sequence(p_k_starts, p_k_ends, i_n, q_len, keys, KIND)
        context = length - q_len
        i_tile = (length - 1) // BLOCK_M - i_place
        if (q_len > 0) & (i_place >= 0) & (i_tile >= context // BLOCK_M):
            start = i_tile * BLOCK_M
            i_b, first_token, all_rows = place_in_batch(begin, begin - context, rows, num_sequences, KIND)
            from_a, end_a, last_a = list_of_half(
                p_crow, i_h, start, context, length, s_crow, layout_rows, entries, possible, i_split, Q_BLOCK, K_BLOCK,
                SPLITS,
            )  # fmt: skip
            from_b, end_b, last_b = list_of_half(
                p_crow, i_h, start + ROWS, context, length, s_crow, layout_rows, entries, possible, i_split, Q_BLOCK,
                K_BLOCK, SPLITS,
            )  # fmt: skip
            # A place is free at first: waiting for the phase before the first one returns at once.
            i_note = n % PAIRS
            mbarrier.wait(note_free.index(i_note), (n // PAIRS & 1) ^ 1)
            note = i_note * NOTES
            put(notes, note + THERE, 1, 1)
            put(notes, note + START, start, 1)
            # Rows and keys are fewer than 2^31, as the launch sees to.
            put(notes, note + TOKEN, first_token, 1)
            put(notes, note + BATCH, i_b, 1)
            put(notes, note + CONTEXT, context, 1)
            put(notes, note + LENGTH, length, 1)
            put(notes, note + POSSIBLE, possible, 1)
            put(notes, note + HEAD, i_h, 1)
            put(notes, note + SPLIT, i_split, 1)
            put(notes, note + ROW, begin - context, 1)
            put(notes, note + ALL_ROWS, all_rows, 1)
            put(notes, note + SEQUENCE, gl.maximum(i_n, 0), 1)
            put(notes, note + K_BEGIN, k_begin, 1)
            put(notes, note + FROM_A, from_a, 1)
            put(notes, note + END_A, end_a, 1)
            put(notes, note + LAST_A, last_a, 1)
            put(notes, note + FROM_B, from_b, 1)
            put(notes, note + END_B, end_b, 1)
            put(notes, note + LAST_B, last_b, 1)
            tl.debug_barrier()
            mbarrier.arrive(noted.index(i_note))
            i_q = n % Q_STAGES
            mbarrier.wait(q_free.index(i_q), (n // Q_STAGES & 1) ^ 1)
            mbarrier.expect(q_arrived.index(i_q), BLOCK_M * BLOCK_D * 2)
            for i_half in gl.static_range(HALVES):
                row = (first_token + start).to(gl.int32) + i_half * ROWS
                for i_c in gl.static_range(BLOCK_D // COLUMNS):
                    # Rows of other sequences, or none, come along: each has scores of its own, that are not kept.
                    tma.async_copy_global_to_shared(
                        d_q, [i_b.to(gl.int32), i_h, row, i_c * COLUMNS], q_arrived.index(i_q),
                        q_boxes.index((i_q * HALVES + i_half) * (BLOCK_D // COLUMNS) + i_c),
                    )  # fmt: skip
            n += 1
        # Every second turn goes backwards, so that no program has the longer rows each time.
        turn += 1
        work = turn * 2 * gl.num_programs(0) - 1 - work
    mbarrier.wait(note_free.index(n % PAIRS), (n // PAIRS & 1) ^ 1)
    put(notes, n % PAIRS * NOTES + THERE, 0, 1)
    tl.debug_barrier()
    mbarrier.arrive(noted.index(n % PAIRS))


# What is made of it


@gluon.jit
def sum_of_own(weights, BLOCK_N: gl.constexpr):
    """Four sums a row, each of the columns that one thread has: those are added up once, behind the last tile.

    Sums over threads are shuffles, for which each tile's softmax would wait.
    """
    return gl.sum(gl.sum(gl.reshape(weights, [ROWS, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def weigh(
    scores, m, total, at, second, factor, softcap, L_S: gl.constexpr, BLOCK_N: gl.constexpr,
    SOFTCAP: gl.constexpr, MASKED: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Weights relative to the largest score so far, that score, the sums so far, and what the past decays by.

    Keys are counted from the first row: a row sees those up to its own number.
    """
    if SOFTCAP:
        scores = cap(scores * factor, softcap, False) * LOG2_E
    if MASKED:
        o_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, L_S))
        o_key = at + o_n
        if BLOCK_N > KEYS:
            o_key = gl.where(o_n < KEYS, o_key, second + (o_n - KEYS))
        o_row = gl.arange(0, ROWS, gl.SliceLayout(1, L_S))
        scores = gl.where(o_key[None, :] <= o_row[:, None], scores, float("-inf"))
    most = gl.max(scores, 1)
    if SOFTCAP:
        new_m = gl.maximum(m, most)
        weights = gl.exp2(scores - finite(new_m)[:, None])
    else:
        # A factor of 0 or more keeps the order; multiplied here, it costs no instruction.
        new_m = gl.maximum(m, most * factor)
        weights = gl.exp2(scores * factor - finite(new_m)[:, None])
    decay = gl.exp2(m - finite(new_m))
    L_T: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    total = total * gl.convert_layout(decay, L_T)[:, None] + sum_of_own(weights, BLOCK_N)
    return weights.to(dtype), new_m, total, decay


@gluon.jit
def weigh_tile(
    scores, m, total, at, second, factor, softcap, L_S: gl.constexpr, BLOCK_N: gl.constexpr,
    SOFTCAP: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """``weigh``, with masks only where some row does not see the whole tile.

    Both ways are branches of their own: in straight code ptxas moves the softmax past the wait for the product that it
    is to run beside.
    """
    last = at
    if BLOCK_N > KEYS:
        last = gl.maximum(at, second)
    if last < 0:
        weights, new_m, new_total, decay = weigh(
            scores, m, total, at, second, factor, softcap, L_S, BLOCK_N, SOFTCAP, False, dtype
        )
    else:
        weights, new_m, new_total, decay = weigh(
            scores, m, total, at, second, factor, softcap, L_S, BLOCK_N, SOFTCAP, True, dtype
        )
    return weights, new_m, new_total, decay


@gluon.jit
def tile_told(told, arrived, i, i_half, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Wait for tile i of keys: where its halves are, from this warpgroup's first row, and whether it is a tile."""
    stage = i % STAGES
    mbarrier.wait(arrived.index(stage), i // STAGES & 1)
    at = get(told, stage * PER_TILE + i_half * 2)
    second = at
    if BLOCK_N > KEYS:
        second = get(told, stage * PER_TILE + i_half * 2 + 1)
    return at, second, get(told, stage * PER_TILE + 4) != 0


@gluon.jit
def add_values(b_p, acc, tiles, arrived, i, STAGES: gl.constexpr):
    """Wait for tile i of values, and start adding its product with the weights to ``acc``."""
    stage = i % STAGES
    mbarrier.wait(arrived.index(stage), i // STAGES & 1)
    return warpgroup_mma(b_p, tiles.index(stage), acc, is_async=True)


@gluon.jit
def walk(
    q_tile, memory, barriers, i, n, i_half, scale, softcap, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, SOFTCAP: gl.constexpr, L_S: gl.constexpr, L_O: gl.constexpr,
):  # fmt: skip
    """All tiles of a pair, for 64 of its rows: the sum of weighted values, the largest score, the sum of weights.

    Weights are relative to that score, which carries a factor log2(e). Tile i of keys is the pair's first, and the
    number of the next pair's first is returned too. Behind its tiles each of the n pairs before had one of keys that is
    none, and no values for it: to tile i of keys belongs tile i - n of values.
    """
    k_tiles, v_tiles, told = memory
    k_arrived, v_arrived, k_free, v_free = barriers
    dtype: gl.constexpr = q_tile.dtype
    L_P: gl.constexpr = gl.DotOperandLayout(0, L_O, 2)
    factor = scale
    if not SOFTCAP:
        # Scores that are left out are -inf, of which a factor of 0 would make NaN.
        factor = factor * LOG2_E
        factor = gl.where(factor < TINY, TINY, factor)
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, L_S))
    acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, L_O)
    b_zero = gl.zeros([ROWS, BLOCK_N], gl.float32, L_S)
    total = sum_of_own(b_zero, BLOCK_N)
    at, second, there = tile_told(told, k_arrived, i, i_half, BLOCK_N, STAGES)
    if there:
        # Beside the softmax of the first tile there is no product to run.
        stage = i % STAGES
        scores = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), b_zero, use_acc=False, is_async=True)
        b_scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_free.index(stage))
        weights, m, total, decay = weigh_tile(
            b_scores, m, total, at, second, factor, softcap, L_S, BLOCK_N, SOFTCAP, dtype
        )
        b_p = gl.convert_layout(weights, L_P)
        i += 1
        at, second, there = tile_told(told, k_arrived, i, i_half, BLOCK_N, STAGES)
        while there:
            stage = i % STAGES
            scores = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), b_zero, use_acc=False, is_async=True)
            product = add_values(b_p, acc, v_tiles, v_arrived, i - 1 - n, STAGES)
            # The scores alone are waited for: the product runs on beside their softmax.
            b_scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(k_free.index(stage))
            weights, m, total, decay = weigh_tile(
                b_scores, m, total, at, second, factor, softcap, L_S, BLOCK_N, SOFTCAP, dtype
            )
            acc = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(v_free.index((i - 1 - n) % STAGES))
            b_p = gl.convert_layout(weights, L_P)
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, L_O))[:, None]
            i += 1
            at, second, there = tile_told(told, k_arrived, i, i_half, BLOCK_N, STAGES)
        product = add_values(b_p, acc, v_tiles, v_arrived, i - 1 - n, STAGES)
        acc = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(v_free.index((i - 1 - n) % STAGES))
    # All warps have read what they were told, before that is overwritten.
    tl.debug_barrier()
    mbarrier.arrive(k_free.index(i % STAGES))
    return acc, m, gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, L_S)), i + 1


@gluon.jit
def store_rows(
    acc, tile, p_out, i_b, i_h, token, start, context, length, s_out, DV: gl.constexpr, BLOCK_DV: gl.constexpr
):
    """Store the outputs of 64 positions from ``start``, where those are the sequence's queries.

    They go by way of a tile of shared memory, so that each row is stored in whole lines.
    """
    L_IO: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # All warps are done with what the tile held, before that is overwritten.
    tl.debug_barrier()
    tile.store(acc.to(tile.dtype))
    # All warps have stored their rows, before others load them.
    tl.debug_barrier()
    position = start + gl.arange(0, ROWS, gl.SliceLayout(1, L_IO))
    o_d = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, L_IO))
    m_row = (position >= context) & (position < length)
    p_tile = pointers(p_out, i_b, token + position, i_h, o_d, s_out)
    gl.store(p_tile, tile.load(L_IO), mask=m_row[:, None] & (o_d < DV)[None, :])


@gluon.jit
def store_part(
    acc, p_part, notes, note, i_h, start, context, length, DV: gl.constexpr, BLOCK_DV: gl.constexpr, H: gl.constexpr,
    L_O: gl.constexpr,
):  # fmt: skip
    """Store a split's part of the outputs, in float32, of the same positions as ``store_rows``."""
    position = start + gl.arange(0, ROWS, gl.SliceLayout(1, L_O))
    o_d = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, L_O))
    m_row = (position >= context) & (position < length)
    row = get(notes, note + SPLIT).to(gl.int64) * get(notes, note + ALL_ROWS) + get(notes, note + ROW) + position
    gl.store(p_part + (row * H + i_h)[:, None] * DV + o_d[None, :], acc, mask=m_row[:, None] & (o_d < DV)[None, :])


@gluon.jit
def finish(
    acc, m, total, scale, tile, p_sinks, p_out, p_lse, p_part, p_part_lse, notes, note, i_half, s_out, s_lse,
    DV: gl.constexpr, BLOCK_DV: gl.constexpr, H: gl.constexpr, SPLITS: gl.constexpr, SOFTCAP: gl.constexpr,
    L_S: gl.constexpr, L_O: gl.constexpr,
):  # fmt: skip
    """Make outputs, or a split's part of them, of what ``walk`` summed for 64 rows, and store them and their lse.

    As in ``softmax.store``: a part is without the sink, which ``softmax.merge`` adds once.
    """
    start = get(notes, note + START) + i_half * ROWS
    context = get(notes, note + CONTEXT)
    length = get(notes, note + LENGTH)
    token = get(notes, note + TOKEN)
    i_b = get(notes, note + BATCH)
    i_h = get(notes, note + HEAD)
    possible = get(notes, note + POSSIBLE) != 0
    position = start + gl.arange(0, ROWS, gl.SliceLayout(1, L_S))
    m_row = (position >= context) & (position < length)
    log_sum = natural_logarithm(m, total, 1.0 if SOFTCAP else scale)
    if SPLITS == 1:
        if p_sinks is not None:
            m = m * LN_2
            b_sink = gl.load(p_sinks + i_h).to(gl.float32)
            b_sink = gl.where(possible, b_sink, float("-inf"))
            new_m = gl.maximum(m, b_sink)
            decay = gl.exp(m - finite(new_m))
            total = total * decay + gl.exp(b_sink - finite(new_m))
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, L_O))[:, None]
            log_sum = logarithm(new_m, total)
        if p_lse is not None:
            # Signs of strides would take registers through the walk.
            for i_s in gl.static_range(3):
                gl.assume(s_lse[i_s] >= 0)
            off = i_b.to(gl.int64) * s_lse[0] + i_h.to(gl.int64) * s_lse[1] + (token + position).to(gl.int64) * s_lse[2]
            gl.store(p_lse + off, log_sum, mask=m_row)
    else:
        place = (
            (get(notes, note + SPLIT).to(gl.int64) * H + i_h) * get(notes, note + ALL_ROWS)
            + get(notes, note + ROW)
            + position
        )
        gl.store(p_part_lse + place, gl.where(possible, log_sum, float("inf")), mask=m_row)
    acc = acc * gl.convert_layout(1.0 / gl.where(total == 0, 1.0, total), gl.SliceLayout(1, L_O))[:, None]
    if SPLITS == 1:
        store_rows(acc, tile, p_out, i_b, i_h, token, start, context, length, s_out, DV, BLOCK_DV)
    else:
        store_part(acc, p_part, notes, note, i_h, start, context, length, DV, BLOCK_DV, H, L_O)


@gluon.jit
def consume(
    p_sinks, p_out, p_lse, p_part, p_part_lse, memory, barriers, i_half, softcap, s_out, s_lse,
    BLOCK_D: gl.constexpr, DV: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr, H: gl.constexpr, SPLITS: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """A warpgroup's 64 rows of one pair after the other: their outputs, or a split's part of them."""
    k_tiles, v_tiles, q_tiles, out_tiles, notes, scale_smem, told = memory
    k_arrived, v_arrived, k_free, v_free, q_arrived, q_free, noted, note_free = barriers
    L_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    L_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])

    # Numbers of the pair of rows, and of the tile of keys: behind each pair's tiles one counts that is none.
    n = i_half * 0
    i = i_half * 0
    mbarrier.wait(noted.index(0), 0)
    there_are_rows = get(notes, THERE) != 0
    while there_are_rows:
        i_q = n % Q_STAGES
        note = n % PAIRS * NOTES
        q_tile = q_tiles.index(i_q * 2 + i_half)
        mbarrier.wait(q_arrived.index(i_q), n // Q_STAGES & 1)
        acc, m, total, i = walk(
            q_tile, (k_tiles, v_tiles, told), (k_arrived, v_arrived, k_free, v_free), i, n, i_half, get(scale_smem, 0),
            softcap, BLOCK_DV, BLOCK_N, STAGES, SOFTCAP, L_S, L_O,
        )  # fmt: skip
        # Outputs go where the queries were, if they are as wide.
        out_tile = q_tile
        if BLOCK_DV != BLOCK_D:
            out_tile = out_tiles.index(i_half)
        finish(
            acc, m, total, get(scale_smem, 0), out_tile, p_sinks, p_out, p_lse, p_part, p_part_lse, notes, note,
            i_half, s_out, s_lse, DV, BLOCK_DV, H, SPLITS, SOFTCAP, L_S, L_O,
        )  # fmt: skip
        # Queries are brought by another way than results were written: the fence keeps them in order.
        fence_async_shared()
        tl.debug_barrier()
        mbarrier.arrive(q_free.index(i_q))
        mbarrier.arrive(note_free.index(n % PAIRS))
        n += 1
        mbarrier.wait(noted.index(n % PAIRS), n // PAIRS & 1)
        there_are_rows = get(notes, n % PAIRS * NOTES + THERE) != 0


@gluon.jit
def list_of_half(
    p_crow, i_h, start, context, length, s_crow, layout_rows, entries, possible, i_split, Q_BLOCK: gl.constexpr,
    K_BLOCK: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """A split's share of the list of 64 rows, 64 keys an entry: from, to, and the last key that any of them may see."""
    last = gl.minimum(start + (ROWS - 1), length - 1)
    begin, end = list_of(
        p_crow, i_h, start // Q_BLOCK, s_crow, layout_rows, entries, possible & (last >= gl.maximum(start, context))
    )
    begin = begin * (K_BLOCK // KEYS)
    from_entry, to_entry = share(end * (K_BLOCK // KEYS) - begin, i_split, SPLITS)
    return begin + from_entry, begin + to_entry, last


@gluon.jit(
    do_not_specialize=[
        "rows", "num_sequences", "keys", "num_blocks", "s_table", "s_crow", "s_col", "layout_rows", "entries", "places",
        "left",
    ]
)  # fmt: skip
def attend(
    d_q, d_k, d_v,
    p_crow, p_col, p_table, p_q_starts, p_q_ends, p_k_starts, p_k_ends, p_sinks, p_out, p_lse, p_part, p_part_lse,
    rows, num_sequences, keys, num_blocks, s_table, s_crow, s_col, layout_rows, entries, places, scale, softcap, left,
    s_out, s_lse,
    KIND: gl.constexpr, GROUP: gl.constexpr, HEADS_KV: gl.constexpr, BLOCK_D: gl.constexpr, DV: gl.constexpr,
    BLOCK_DV: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr, Q_BLOCK: gl.constexpr, K_BLOCK: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SPLITS: gl.constexpr, SOFTCAP: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
):  # fmt: skip
    """``portable.attend_lists`` without a window, by any number of programs. Tiles of BLOCK_N keys are one or two times
    64 of a list.

    Queries, keys and values are descriptors of [sequences, or 1, or pages, heads, places, D or DV], in boxes of 64
    columns and 64 places, or, of pages, BOX places.
    """
    dtype: gl.constexpr = d_k.dtype
    box_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    halves: gl.constexpr = BLOCK_M // ROWS
    q_count: gl.constexpr = Q_STAGES * halves * (BLOCK_D // COLUMNS)
    k_count: gl.constexpr = STAGES * (BLOCK_D // COLUMNS) * (BLOCK_N // BOX)
    v_count: gl.constexpr = STAGES * (BLOCK_DV // COLUMNS) * (BLOCK_N // BOX)
    q_boxes = gl.allocate_shared_memory(dtype, [q_count, 1, 1, ROWS, COLUMNS], box_layout)
    k_boxes = gl.allocate_shared_memory(dtype, [k_count, 1, 1, BOX, COLUMNS], box_layout)
    v_boxes = gl.allocate_shared_memory(dtype, [v_count, 1, 1, BOX, COLUMNS], box_layout)
    # The same bytes as the products take them: 64 columns of all rows, then the next 64.
    q_tiles = q_boxes._reinterpret(dtype, [Q_STAGES * halves, ROWS, BLOCK_D], tile_layout)
    k_tiles = k_boxes._reinterpret(dtype, [STAGES, BLOCK_N, BLOCK_D], tile_layout)
    v_tiles = v_boxes._reinterpret(dtype, [STAGES, BLOCK_N, BLOCK_DV], tile_layout)
    strips: gl.constexpr = STAGES * (BLOCK_DV // COLUMNS) * (BLOCK_N // STRIP)
    v_strips = v_boxes._reinterpret(dtype, [strips, STRIP, COLUMNS], tile_layout)
    out_tiles = q_tiles
    if BLOCK_DV != BLOCK_D:
        out_tiles = gl.allocate_shared_memory(dtype, [halves, ROWS, BLOCK_DV], tile_layout)
    k_arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_arrived = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_arrived = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_arrived.index(i), count=1)
        mbarrier.init(v_arrived.index(i), count=1)
        mbarrier.init(k_free.index(i), count=halves)
        mbarrier.init(v_free.index(i), count=halves)
    mbarrier.init(v_arrived.index(STAGES), count=1)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_arrived.index(i), count=1)
        mbarrier.init(q_free.index(i), count=halves)
    noted = gl.allocate_shared_memory(gl.int64, [PAIRS, 1], mbarrier.MBarrierLayout())
    note_free = gl.allocate_shared_memory(gl.int64, [PAIRS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PAIRS):
        mbarrier.init(noted.index(i), count=1)
        # Who reads notes: the warpgroups, and the warps that bring keys and values.
        mbarrier.init(note_free.index(i), count=halves + 2)
    notes = gl.allocate_shared_memory(gl.int32, [PAIRS * NOTES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    scale_smem = gl.allocate_shared_memory(gl.float32, [1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int32, [STAGES * PER_TILE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    put(scale_smem, 0, scale, 4)
    fence_async_shared()
    memory = (k_tiles, v_tiles, q_tiles, out_tiles, notes, scale_smem, told)
    barriers = (k_arrived, v_arrived, k_free, v_free, q_arrived, q_free, noted, note_free)
    pid = gl.program_id(0)
    i_half = pid * 0
    # Registers a thread: a multiprocessor has 65536, and warps that look up and start copies need fewer.
    gl.warp_specialize([
        (consume, (
            p_sinks, p_out, p_lse, p_part, p_part_lse, memory, barriers, i_half, softcap, s_out, s_lse, BLOCK_D, DV,
            BLOCK_DV, BLOCK_N, STAGES, Q_STAGES, GROUP * HEADS_KV, SPLITS, SOFTCAP,
        )),
        (consume, (
            p_sinks, p_out, p_lse, p_part, p_part_lse, memory, barriers, i_half + 1, softcap, s_out, s_lse, BLOCK_D,
            DV, BLOCK_DV, BLOCK_N, STAGES, Q_STAGES, GROUP * HEADS_KV, SPLITS, SOFTCAP,
        )),
        (bring, (
            d_k, p_crow, p_col, p_table, (k_boxes, v_strips, notes, told), (noted, note_free, k_arrived, k_free), keys,
            num_blocks, s_col, s_table, KIND, GROUP, BLOCK_D, K_BLOCK, PAGE, BOX, BLOCK_N, STAGES, False,
        )),
        (bring, (
            d_v, p_crow, p_col, p_table, (v_boxes, v_strips, notes, told), (noted, note_free, v_arrived, v_free), keys,
            num_blocks, s_col, s_table, KIND, GROUP, BLOCK_DV, K_BLOCK, PAGE, BOX, BLOCK_N, STAGES, True,
        )),
        (scout, (
            d_q, p_crow, p_q_starts, p_q_ends, p_k_starts, p_k_ends, q_boxes, notes,
            (noted, note_free, q_arrived, q_free), rows, num_sequences, keys, s_crow, layout_rows, entries, places,
            KIND, GROUP, HEADS_KV, BLOCK_D, Q_BLOCK, K_BLOCK, BLOCK_M, SPLITS, Q_STAGES,
        )),
    ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip
