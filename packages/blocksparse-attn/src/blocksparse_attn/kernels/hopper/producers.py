"""The producer warps of the kernel for sm_90, one warp each: the scheduler, and the loaders of keys and of values.

The scheduler is ahead by one work item: it looks up the next one and issues the TMA loads of its queries. A loader
merges the two lists of an item, A's and B's, and loads each 64 keys that either lists, or the values, a tile of 64 or
128 at a time, as soon as a stage is empty. Both walk the lists themselves, so that they need not meet.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from blocksparse_attn.kernels.hopper.memory import (
    BATCH,
    COLUMNS,
    END_A,
    END_B,
    FROM_A,
    FROM_B,
    HEAD,
    HEADER_SIZE,
    HEADER_VALID,
    ITEM_SIZE,
    K_BEGIN,
    KEYS,
    LAST_A,
    LAST_B,
    LENGTH,
    NOWHERE,
    QUEUE,
    ROWS,
    SEQUENCE,
    START,
    STRIP,
    VALID,
    Item,
    get,
    put,
    put_item,
)
from blocksparse_attn.kernels.tiles import PAGED, keys_of_sequence, list_of, locate, share, split_row


class ListPair(NamedTuple):
    """The lists of A and B, in entries of 64 keys: their ends, and the last position that a row of each sees."""

    col: Any
    end_a: Any
    end_b: Any
    last_a: Any
    last_b: Any
    columns: Any


class Source(NamedTuple):
    """Where the keys of a work item are: its row of the block table, or its first key in a sequence of k."""

    pages: Any
    i_b: Any
    i_kv: Any
    begin: Any
    length: Any
    keys: Any
    num_pages: Any


# The scheduler


@gluon.jit
def list_of_half(layout, i_h, i_split, start, context, length, possible, config: gl.constexpr):
    """A split's share of the list of 64 rows, in entries of 64 keys: from, to, and the last position that they see."""
    last = gl.minimum(start + (ROWS - 1), length - 1)
    begin, end = list_of(layout, i_h, start // config.Q_BLOCK, possible & (last >= gl.maximum(start, context)))
    begin = begin * (config.K_BLOCK // KEYS)
    from_entry, to_entry = share(end * (config.K_BLOCK // KEYS) - begin, i_split, config.SPLITS)
    return begin + from_entry, begin + to_entry, last


@gluon.jit
def schedule(d_q, channels, batch, layout, slots, config: gl.constexpr):
    """Queue one work item after the other and load its queries; after the last, queue one that is not valid."""
    queue = channels.queue
    CONSUMERS: gl.constexpr = config.BLOCK_M // ROWS
    HEADS: gl.constexpr = config.GROUP * config.HEADS_KV
    gl.assume(layout.s_crow >= 0)
    work = gl.program_id(0)
    turn = work * 0
    n = work * 0
    while work < slots * (HEADS * config.SPLITS):
        # All heads of the same rows come one after the other: they have about as much to do.
        i_h = work % HEADS
        i_split = work // HEADS % config.SPLITS
        i_w = work // (HEADS * config.SPLITS)
        i_n, i_slot, begin, q_len = locate(batch, i_w, config.BLOCK_M, 2, config.KIND)
        k_begin, length, possible = keys_of_sequence(batch, i_n, q_len, config.KIND)
        context = length - q_len
        i_tile = (length - 1) // config.BLOCK_M - i_slot
        if (q_len > 0) & (i_slot >= 0) & (i_tile >= context // config.BLOCK_M):
            start = i_tile * config.BLOCK_M
            i_b, first_token, all_rows = split_row(batch, begin, begin - context, config.KIND)
            from_a, end_a, last_a = list_of_half(layout, i_h, i_split, start, context, length, possible, config)
            from_b, end_b, last_b = list_of_half(layout, i_h, i_split, start + ROWS, context, length, possible, config)
            i_queue = n % QUEUE
            mbarrier.wait(queue.empty.index(i_queue), (n // QUEUE & 1) ^ 1)
            # Rows and keys are fewer than 2^31, as the plan sees to.
            item = Item(
                1, start, first_token, i_b, context, length, possible, i_h, i_split, begin - context, all_rows,
                gl.maximum(i_n, 0), k_begin, from_a, end_a, last_a, from_b, end_b, last_b,
            )  # fmt: skip
            put_item(queue.items, i_queue * ITEM_SIZE, item)
            tl.debug_barrier()
            mbarrier.arrive(queue.full.index(i_queue))
            i_q = n % config.Q_STAGES
            mbarrier.wait(channels.q.empty.index(i_q), (n // config.Q_STAGES & 1) ^ 1)
            mbarrier.expect(channels.q.full.index(i_q), config.BLOCK_M * config.BLOCK_D * 2)
            for i_half in gl.static_range(CONSUMERS):
                row = (first_token + start).to(gl.int32) + i_half * ROWS
                for i_c in gl.static_range(config.BLOCK_D // COLUMNS):
                    # Rows of other sequences, or none, come along: their scores are never stored.
                    i_box = (i_q * CONSUMERS + i_half) * (config.BLOCK_D // COLUMNS) + i_c
                    tma.async_copy_global_to_shared(
                        d_q, [i_b.to(gl.int32), i_h, row, i_c * COLUMNS], channels.q.full.index(i_q),
                        channels.q.boxes.index(i_box),
                    )  # fmt: skip
            n += 1
        # Snake order: every second turn goes backwards, so that no program has the longer rows each time.
        turn += 1
        work = turn * 2 * gl.num_programs(0) - 1 - work
    mbarrier.wait(queue.empty.index(n % QUEUE), (n // QUEUE & 1) ^ 1)
    put(queue.items, n % QUEUE * ITEM_SIZE + VALID, 0, 1)
    tl.debug_barrier()
    mbarrier.arrive(queue.full.index(n % QUEUE))


# The loaders


@gluon.jit
def keys_of_entry(pair, i, end, K_BLOCK: gl.constexpr):
    """The position of the 64 keys of entry i, and NOWHERE after the list's end.

    Columns that are not there come just before NOWHERE, where no row sees them.
    """
    PER_BLOCK: gl.constexpr = K_BLOCK // KEYS
    column = gl.load(pair.col + i // PER_BLOCK, mask=i < end, other=-1)
    at = gl.where((column >= 0) & (column < pair.columns), column * K_BLOCK + i % PER_BLOCK * KEYS, NOWHERE - 1)
    return gl.where(i < end, at, NOWHERE)


@gluon.jit
def next_keys(pair, i_a, i_b, K_BLOCK: gl.constexpr):
    """The next 64 keys that a row of either list sees: their position, or NOWHERE, and whether each list has them.

    Both lists are walked once, in whatever order they are; rising ones meet where they list the same.
    """
    at = i_a * 0 + NOWHERE
    for_a = at < 0
    for_b = at < 0
    while ((i_a < pair.end_a) | (i_b < pair.end_b)) & (at == NOWHERE):
        at_a = keys_of_entry(pair, i_a, pair.end_a, K_BLOCK)
        at_b = keys_of_entry(pair, i_b, pair.end_b, K_BLOCK)
        least = gl.minimum(at_a, at_b)
        for_a = (at_a == least) & (least <= pair.last_a)
        for_b = (at_b == least) & (least <= pair.last_b)
        i_a += (at_a == least).to(gl.int32)
        i_b += (at_b == least).to(gl.int32)
        at = gl.where(for_a | for_b, least, at)
    return at, for_a, for_b, i_a, i_b


@gluon.jit
def load_half(
    d, boxes, full, stage, at, half: gl.constexpr, source, BLOCK_D: gl.constexpr, config: gl.constexpr
):  # fmt: skip
    """Issue the TMA loads of 64 keys, or values, of a tile. What is not there, and NOWHERE, is filled with 0."""
    BOXES: gl.constexpr = KEYS // config.BOX
    HALVES: gl.constexpr = config.BLOCK_N // KEYS
    first_box = stage * (BOXES * HALVES * (BLOCK_D // COLUMNS)) + half * BOXES
    for i_box in gl.static_range(BOXES):
        key = at + i_box * config.BOX
        if config.PAGE:
            page = gl.load(source.pages + key // config.PAGE, mask=key < source.length, other=-1).to(gl.int64)
            outer = gl.where((page >= 0) & (page < source.num_pages), page, source.num_pages).to(gl.int32)
            slot = key % config.PAGE
        else:
            outer = source.i_b
            slot = gl.where(at == NOWHERE, source.keys, source.begin + key)
        for i_c in gl.static_range(BLOCK_D // COLUMNS):
            tma.async_copy_global_to_shared(
                d, [outer, source.i_kv, slot, i_c * COLUMNS], full,
                boxes.index(first_box + i_c * (BOXES * HALVES) + i_box),
            )  # fmt: skip


@gluon.jit
def zero_rows(strips, first_strip, at, length, config: gl.constexpr):
    """Zero the values of keys from ``length`` on, of which weights of 0 would make NaN of NaN. By one warp."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    o_row = gl.arange(0, STRIP, gl.SliceLayout(1, layout))
    for strip in range((length - at) // STRIP, KEYS // STRIP):
        keep = (at + strip * STRIP + o_row < length)[:, None]
        for i_c in gl.static_range(config.BLOCK_DV // COLUMNS):
            cells = strips.index(first_strip + i_c * (config.BLOCK_N // STRIP) + strip)
            b_strip = cells.load(layout)
            cells.store(gl.where(keep, b_strip, 0.0).to(b_strip.dtype))


@gluon.jit
def put_header(headers, stage, at, for_a, for_b, second, second_for_a, second_for_b, start, valid):
    """Say where the halves of a tile of keys begin, for A and for B, and whether it is a tile."""
    header = stage * HEADER_SIZE
    put(headers, header, gl.where(for_a, at - start, NOWHERE), 1)
    put(headers, header + 1, gl.where(second_for_a, second - start, NOWHERE), 1)
    put(headers, header + 2, gl.where(for_b, at - start - ROWS, NOWHERE), 1)
    put(headers, header + 3, gl.where(second_for_b, second - start - ROWS, NOWHERE), 1)
    put(headers, header + HEADER_VALID, valid, 1)


@gluon.jit
def load_item(d, channels, pair, i_a, i_b, source, start, i, ends, config: gl.constexpr, VALUES: gl.constexpr):
    """Load the tiles of keys, or of values, of one work item; tile i is its first.

    After the last tile of keys comes a header alone, which says that there is none. Values past a sequence's end are
    zeroed here before the tile is handed on: TMA signals such a tile to the barrier after those of the stages, which
    is this warp's own. Returned are the number of the next item's first tile, and how many tiles had an end.
    """
    ring = channels.v if VALUES else channels.k
    BLOCK_D: gl.constexpr = config.BLOCK_DV if VALUES else config.BLOCK_D
    STAGES: gl.constexpr = config.STAGES
    HALVES: gl.constexpr = config.BLOCK_N // KEYS
    BYTES: gl.constexpr = config.BLOCK_N * BLOCK_D * 2
    STRIPS: gl.constexpr = config.BLOCK_N // STRIP * (BLOCK_D // COLUMNS)
    valid = i >= 0
    while valid:
        stage = i % STAGES
        at, for_a, for_b, i_a, i_b = next_keys(pair, i_a, i_b, config.K_BLOCK)
        valid = at != NOWHERE
        second = i_a * 0 + NOWHERE
        second_for_a = second < 0
        second_for_b = second < 0
        if HALVES == 2:
            second, second_for_a, second_for_b, i_a, i_b = next_keys(pair, i_a, i_b, config.K_BLOCK)
        mbarrier.wait(ring.empty.index(stage), (i // STAGES & 1) ^ 1)
        if not VALUES:
            put_header(
                channels.headers, stage, at, for_a, for_b, second, second_for_a, second_for_b, start, valid
            )  # fmt: skip
            tl.debug_barrier()
        if valid:
            landing = stage
            if VALUES:
                # Compared so that NOWHERE does not overflow.
                first_ends = at > source.length - KEYS
                second_ends = (second > source.length - KEYS) & (second != NOWHERE)
                landing = gl.where(first_ends | second_ends, STAGES, stage)
            mbarrier.expect(ring.full.index(landing), BYTES)
            load_half(d, ring.boxes, ring.full.index(landing), stage, at, 0, source, BLOCK_D, config)
            if HALVES == 2:
                load_half(d, ring.boxes, ring.full.index(landing), stage, second, 1, source, BLOCK_D, config)
            if VALUES:
                if landing == STAGES:
                    mbarrier.wait(ring.full.index(STAGES), ends & 1)
                    ends += 1
                    if first_ends:
                        zero_rows(channels.strips, stage * STRIPS, at, source.length, config)
                    if second_ends:
                        zero_rows(channels.strips, stage * STRIPS + KEYS // STRIP, second, source.length, config)
                    fence_async_shared()
                    tl.debug_barrier()
                    mbarrier.arrive(ring.full.index(stage))
            i += 1
        else:
            if not VALUES:
                mbarrier.arrive(ring.full.index(stage))
                i += 1
    return i, ends


@gluon.jit
def load(d, channels, batch, layout, p_table, s_table, num_pages, config: gl.constexpr, VALUES: gl.constexpr):
    """Load the keys, or the values, of one work item after the other."""
    queue = channels.queue
    # Tests for negative strides would take registers.
    gl.assume(layout.s_col >= 0)
    gl.assume(s_table >= 0)
    n = gl.program_id(0) * 0
    i = n
    ends = n
    mbarrier.wait(queue.full.index(0), 0)
    valid = get(queue.items, VALID, 1) != 0
    while valid:
        i_queue = n % QUEUE
        base = i_queue * ITEM_SIZE
        i_n = get(queue.items, base + SEQUENCE, 1)
        i_b = get(queue.items, base + BATCH, 1)
        i_h = get(queue.items, base + HEAD, 1)
        start = get(queue.items, base + START, 1)
        length = get(queue.items, base + LENGTH, 1)
        k_begin = get(queue.items, base + K_BEGIN, 1)
        from_a = get(queue.items, base + FROM_A, 1)
        end_a = get(queue.items, base + END_A, 1)
        last_a = get(queue.items, base + LAST_A, 1)
        from_b = get(queue.items, base + FROM_B, 1)
        end_b = get(queue.items, base + END_B, 1)
        last_b = get(queue.items, base + LAST_B, 1)
        tl.debug_barrier()
        mbarrier.arrive(queue.empty.index(i_queue))
        # Not read where there are no pages.
        p_pages = layout.lists.crow
        if config.KIND == PAGED:
            p_pages = p_table + i_n.to(gl.int64) * s_table
        p_list = layout.lists.col + i_h.to(gl.int64) * layout.s_col
        columns = gl.maximum(last_a, last_b) // config.K_BLOCK + 1
        pair = ListPair(p_list, end_a, end_b, last_a, last_b, columns)
        source = Source(p_pages, i_b, i_h // config.GROUP, k_begin, length, batch.keys, num_pages)
        i, ends = load_item(d, channels, pair, from_a, from_b, source, start, i, ends, config, VALUES)
        n += 1
        mbarrier.wait(queue.full.index(n % QUEUE), n // QUEUE & 1)
        valid = get(queue.items, n % QUEUE * ITEM_SIZE + VALID, 1) != 0
