"""The producer warps of the kernel for sm_90, one warp each: the scheduler, and the loaders of keys and of values.

The scheduler is ahead by one work item: it looks up the next one and issues the TMA loads of its queries. The lists of
an item's rows are merged, and each piece of a block that any of them has is loaded, keys or values, as soon as a stage
is empty: a tile of 64 or 128 gathers pieces of 16, 32 or 64. Of pieces of 64 each loader walks the lists itself, so
that they need not meet; of smaller ones, a tile of which takes as long to look for as to multiply, the scheduler does.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from blocksparse_attn.kernels.hopper.memory import (
    BATCH,
    COLUMNS,
    CONTEXT,
    HEAD,
    ITEM_SIZE,
    K_BEGIN,
    LENGTH,
    NOWHERE,
    QUEUE,
    ROWS,
    SEQUENCE,
    START,
    VALID,
    WALKED,
    Item,
    get,
    put,
    put_item,
)
from blocksparse_attn.kernels.hopper.pieces import (
    Source,
    has_unseen,
    lanes,
    load_piece,
    piece_of,
    zero_unseen,
)
from blocksparse_attn.kernels.hopper.walks import modes_for, next_tile, places_for, positions, walk_of
from blocksparse_attn.kernels.tiles import PAGED, keys_of_sequence, list_of, locate, share, split_row

# Slots of a segment of rows beyond its whole tiles, see ``locate``.
ENDS: tl.constexpr = tl.constexpr(2)
# Pieces of keys from which on a work item is a long one, and work items of a program that are many.
LONG: tl.constexpr = tl.constexpr(96)
MANY: tl.constexpr = tl.constexpr(16)

# The scheduler


@gluon.jit
def lists_of(layout, item, num_splits, config: gl.constexpr):
    """A split's share of each of the item's lists, in entries of PIECE keys: the first and the last + 1 of each."""
    PER_BLOCK: gl.constexpr = config.K_BLOCK // config.PIECE
    o_list = lanes()
    o_first = item.start + o_list * config.LIST_ROWS
    o_last = gl.minimum(o_first + (config.LIST_ROWS - 1), item.length - 1)
    wanted = item.possible & (o_last >= gl.maximum(o_first, item.context))
    wanted = wanted & (o_list < config.BLOCK_M // config.LIST_ROWS)
    begin, end = list_of(layout, item.i_h, o_first // config.Q_BLOCK, wanted)
    begin = begin * PER_BLOCK
    from_entry, to_entry = share(end * PER_BLOCK - begin, item.i_split, num_splits)
    return begin + from_entry, begin + to_entry


@gluon.jit
def place_of(work, slots, num_splits, config: gl.constexpr):
    """Head, split and slot of a work item.

    TOGETHER heads of the same rows come one after the other, as they have about as much to do, then the next rows of
    the same heads. All heads are together but for plans that say otherwise: with all rows of one head after the other,
    whose keys would stay in the L2 cache, 2048 tokens behind 30720 took 420 us on an H200, where this takes 299.
    """
    TOGETHER: gl.constexpr = config.TOGETHER
    first = work * 0
    if TOGETHER < config.GROUP * config.HEADS_KV:
        each = slots * num_splits * TOGETHER
        first = work // each * TOGETHER
        work = work % each
    # Slots of rows before the first sequence, of which there are seldom any, come last.
    slot = work // (TOGETHER * num_splits) + ENDS
    return first + work % TOGETHER, work // TOGETHER % num_splits, gl.where(slot < slots, slot, slot - slots)


@gluon.jit
def await_end(channels, n, pieces, config: gl.constexpr):
    """Wait until a program may ask for its item n: as the one before begins, or where that has so many pieces, ends.

    What is asked for earlier is kept from programs that come free before: 4 x 128 tokens behind 65408 took 247 us on an
    H200 for 152. Shorter items hide little of what the next one has to look up.
    """
    if n > 0:
        if config.Q_STAGES > 1:
            mbarrier.wait(channels.q.empty.index(n % config.Q_STAGES), (n // config.Q_STAGES & 1) ^ 1)
        if pieces >= LONG:
            mbarrier.wait(channels.queue.full.index(QUEUE), (n - 1) & 1)


@gluon.jit
def next_work(channels, lists, work, turn, n, pieces, items, config: gl.constexpr):
    """The work item after ``work``, a program's number ``turn`` - 1, of ``items``; n and ``pieces``: see above."""
    programs = gl.num_programs(0)
    # Snake order: every second turn goes backwards, so that no program has the longer rows each time.
    after = turn * 2 * programs - 1 - work
    if config.AS_FREE:
        # Where rows that follow one another list different blocks, items of a fixed order add up to 1.27 of an even
        # share. Results do not depend on which program takes an item.
        if not config.TABLE:
            # Of many, the last ones matter little.
            if items <= MANY * programs:
                await_end(channels, n, pieces, config)
        taken = gl.atomic_add(lists.memory, 1, sem="relaxed")
        # Each program has asked once for more than there are: the counter is as the next call wants it. No branch, as
        # ptxas would not know the warp's threads to be together behind it.
        gl.store(lists.memory, 0, mask=taken == items - 1)
        after = programs + taken
    return after


@gluon.jit
def load_queries(d_q, q, i_q, i_b, i_h, row, config: gl.constexpr):
    """Issue the TMA loads of a work item's queries. Rows of other sequences, or none, are never stored."""
    CONSUMERS: gl.constexpr = config.BLOCK_M // ROWS
    CHUNKS: gl.constexpr = config.BLOCK_D // COLUMNS
    full = q.full.index(i_q)
    mbarrier.expect(full, config.BLOCK_M * (config.BLOCK_D + (COLUMNS if config.TAIL_D else 0)) * 2)
    for i_half in gl.static_range(CONSUMERS):
        i_tile = i_q * CONSUMERS + i_half
        at = row + i_half * ROWS
        for i_c in gl.static_range(CHUNKS):
            tma.async_copy_global_to_shared(
                d_q, [i_b, i_h, at, i_c * COLUMNS], full, q.boxes.index(i_tile * CHUNKS + i_c)
            )
        if config.TAIL_D:
            tma.async_copy_global_to_shared(d_q, [i_b, i_h, at, config.BLOCK_D], full, q.tail_boxes.index(i_tile))


@gluon.jit
def walk_item(walked, walk, entries, i, config: gl.constexpr):
    """Look for the tiles of a work item, of which tile i is the first: the number of the next item's is returned.

    After the last one comes a tile without pieces.
    """
    at_entries = positions(walk, entries, config)
    valid = i >= 0
    while valid:
        at, bits, entries, at_entries = next_tile(walk, entries, at_entries, config)
        valid = piece_of(at, 0, config) != NOWHERE
        slot = i % WALKED
        mbarrier.wait(walked.empty.index(slot), (i // WALKED & 1) ^ 1)
        walked.pieces.index(slot * 2).store(at)
        walked.pieces.index(slot * 2 + 1).store(bits)
        tl.debug_barrier()
        mbarrier.arrive(walked.full.index(slot))
        i += 1
    return i


@gluon.jit
def walked_tile(walked, i):
    """Wait for tile i of ``walk_item``: its pieces, and which lists have them."""
    L_PIECES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = i % WALKED
    mbarrier.wait(walked.full.index(slot), i // WALKED & 1)
    at = walked.pieces.index(slot * 2).load(L_PIECES)
    bits = walked.pieces.index(slot * 2 + 1).load(L_PIECES)
    tl.debug_barrier()
    mbarrier.arrive(walked.empty.index(slot))
    return at, bits


@gluon.jit
def schedule(d_q, channels, batch, layout, slots, num_splits, left, config: gl.constexpr):
    """Queue one work item after the other and load its queries; after the last, queue one that is not valid."""
    queue = channels.queue
    gl.assume(layout.s_crow >= 0)
    if config.TABLE:
        gl.assume(layout.s_col >= 0)
    work = gl.program_id(0)
    items = slots * (config.GROUP * config.HEADS_KV) * num_splits
    turn = work * 0
    n = work * 0
    i = work * 0
    pieces = work * 0
    while work < items:
        i_h, i_split, i_w = place_of(work, slots, num_splits, config)
        i_n, i_slot, begin, q_len = locate(batch, i_w, config.BLOCK_M, ENDS, config.KIND)
        k_begin, length, possible = keys_of_sequence(batch, i_n, q_len, config.KIND)
        context = length - q_len
        i_tile = (length - 1) // config.BLOCK_M - i_slot
        if (q_len > 0) & (i_slot >= 0) & (i_tile >= context // config.BLOCK_M):
            start = i_tile * config.BLOCK_M
            i_b, first_token, all_rows = split_row(batch, begin, begin - context, config.KIND)
            i_queue = n % QUEUE
            mbarrier.wait(queue.empty.index(i_queue), (n // QUEUE & 1) ^ 1)
            # Rows and keys are fewer than 2^31, as the plan sees to.
            item = Item(
                1, start, first_token, i_b, context, length, possible, i_h, i_split, begin - context, all_rows,
                gl.maximum(i_n, 0), k_begin,
            )  # fmt: skip
            put_item(queue.items, i_queue * ITEM_SIZE, item)
            o_entry, o_end = lists_of(layout, item, num_splits, config)
            if not config.TABLE:
                if config.AS_FREE:
                    pieces = gl.max(o_end - o_entry, 0)
                queue.lists.index(i_queue * 2).store(o_entry)
                queue.lists.index(i_queue * 2 + 1).store(o_end)
            tl.debug_barrier()
            mbarrier.arrive(queue.full.index(i_queue))
            i_q = n % config.Q_STAGES
            mbarrier.wait(channels.q.empty.index(i_q), (n // config.Q_STAGES & 1) ^ 1)
            load_queries(d_q, channels.q, i_q, i_b.to(gl.int32), i_h, (first_token + start).to(gl.int32), config)
            if config.TABLE:
                p_list = layout.lists.col + i_h.to(gl.int64) * layout.s_col
                walk, entries = walk_of(p_list, o_entry, o_end, start, context, length, left, config)
                i = walk_item(channels.walked, walk, entries, i, config)
            n += 1
        turn += 1
        work = next_work(channels, layout.lists, work, turn, n, pieces, items, config)
    mbarrier.wait(queue.empty.index(n % QUEUE), (n // QUEUE & 1) ^ 1)
    put(queue.items, n % QUEUE * ITEM_SIZE + VALID, 0, 1)
    tl.debug_barrier()
    mbarrier.arrive(queue.full.index(n % QUEUE))


# The loaders


@gluon.jit
def put_header(channels, stage, walk, at, bits, mode_a, mode_b, config: gl.constexpr):
    """Say what the tile in a stage of keys is for A and for B, and, for whoever masks it, where its keys are.

    Said whether or not one masks it: behind a branch ptxas would not know the warp's threads to be together, and would
    choose one anew for each TMA load.
    """
    PIECES: gl.constexpr = config.BLOCK_N // config.PIECE
    put(channels.modes, stage * 2, mode_a, 1)
    put(channels.modes, stage * 2 + 1, mode_b, 1)
    if config.TABLE:
        channels.keys.index(stage).store(at - walk.start)
        channels.bits.index(stage).store(bits)
    elif config.UNIFORM:
        places_a = places_for(walk, at, bits, 0, config)
        places_b = places_for(walk, at, bits, 1, config)
        first = stage * 32
        put(channels.bits, first, places_a[0], 1)
        put(channels.bits, first + 1, places_a[1], 1)
        put(channels.bits, first + 2, places_b[0], 1)
        put(channels.bits, first + 3, places_b[1], 1)
    else:
        # A thread for each consumer and piece, in the order of ``Channels``.
        o_half = lanes() // 2
        o_second = lanes() % 2 != 0
        o_at = gl.where(o_second, piece_of(at, PIECES - 1, config), piece_of(at, 0, config))
        o_bits = gl.where(o_second, bits[PIECES - 1], bits[0])
        listed = (o_bits >> o_half) & 1
        channels.keys.index(stage).store(gl.where(listed != 0, o_at - walk.start - o_half * ROWS, NOWHERE))


@gluon.jit
def load_item(d, channels, walk, entries, source, i, i_walked, ends, config: gl.constexpr, VALUES: gl.constexpr):
    """Load the tiles of keys, or of values, of one work item; tile i is its first, as ``walk_item`` counts i_walked.

    After the last tile of keys comes a header alone, which says that there is none. Values that no row sees are zeroed
    here before the tile is handed on: TMA signals such a tile to the barrier after those of the stages, which is this
    warp's own. Returned are both numbers of the next item's first tile, and how many tiles were such.
    """
    ring = channels.v if VALUES else channels.k
    BLOCK_D: gl.constexpr = config.BLOCK_DV if VALUES else config.BLOCK_D
    TAIL: gl.constexpr = config.TAIL_DV if VALUES else config.TAIL_D
    STAGES: gl.constexpr = config.STAGES
    PIECES: gl.constexpr = config.BLOCK_N // config.PIECE
    BYTES: gl.constexpr = config.BLOCK_N * (BLOCK_D + (COLUMNS if TAIL else 0)) * 2
    at_entries = entries
    if not config.TABLE:
        at_entries = positions(walk, entries, config)
    valid = i >= 0
    while valid:
        stage = i % STAGES
        if config.TABLE:
            at, bits = walked_tile(channels.walked, i_walked)
            i_walked += 1
        else:
            at, bits, entries, at_entries = next_tile(walk, entries, at_entries, config)
        valid = piece_of(at, 0, config) != NOWHERE
        # Shuffles take longer than a load's issue: none is left for when the stage is empty and its tile awaited.
        landing = stage
        mode_a = stage
        mode_b = stage
        if VALUES:
            landing = gl.where(has_unseen(walk, at, source.length, config), STAGES, stage)
        else:
            mode_a, mode_b = modes_for(walk, at, bits, valid, config)
        mbarrier.wait(ring.empty.index(stage), (i // STAGES & 1) ^ 1)
        if not VALUES:
            put_header(channels, stage, walk, at, bits, mode_a, mode_b, config)
        tl.debug_barrier()
        if valid:
            full = ring.full.index(landing)
            mbarrier.expect(full, BYTES)
            for i_piece in gl.static_range(PIECES):
                one = piece_of(at, i_piece, config)
                load_piece(d, ring, full, stage, one, i_piece, source, BLOCK_D, TAIL, config)
            if VALUES:
                if landing == STAGES:
                    mbarrier.wait(full, ends & 1)
                    ends += 1
                    zero_unseen(channels, stage, walk, at, source.length, config)
                    fence_async_shared()
                    tl.debug_barrier()
                    mbarrier.arrive(ring.full.index(stage))
            i += 1
        else:
            if not VALUES:
                mbarrier.arrive(ring.full.index(stage))
                i += 1
    return i, i_walked, ends


@gluon.jit
def load(d, channels, batch, layout, p_table, s_table, num_pages, left, config: gl.constexpr, VALUES: gl.constexpr):
    """Load the keys, or the values, of one work item after the other."""
    queue = channels.queue
    # Tests for negative strides would take registers.
    gl.assume(layout.s_col >= 0)
    gl.assume(s_table >= 0)
    L_LISTS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    n = gl.program_id(0) * 0
    i = n
    i_walked = n
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
        context = get(queue.items, base + CONTEXT, 1)
        length = get(queue.items, base + LENGTH, 1)
        k_begin = get(queue.items, base + K_BEGIN, 1)
        o_entry = lanes() * 0
        o_end = o_entry
        if not config.TABLE:
            o_entry = queue.lists.index(i_queue * 2).load(L_LISTS)
            o_end = queue.lists.index(i_queue * 2 + 1).load(L_LISTS)
        tl.debug_barrier()
        mbarrier.arrive(queue.empty.index(i_queue))
        # Not read where there are no pages.
        p_pages = layout.lists.crow
        if config.KIND == PAGED:
            p_pages = p_table + i_n.to(gl.int64) * s_table
        p_list = layout.lists.col + i_h.to(gl.int64) * layout.s_col
        walk, entries = walk_of(p_list, o_entry, o_end, start, context, length, left, config)
        source = Source(p_pages, i_b, i_h // config.GROUP, k_begin, length, batch.keys, num_pages)
        i, i_walked, ends = load_item(d, channels, walk, entries, source, i, i_walked, ends, config, VALUES)
        if config.AS_FREE and not config.TABLE and not VALUES:
            mbarrier.arrive(queue.full.index(QUEUE))
        n += 1
        mbarrier.wait(queue.full.index(n % QUEUE), n // QUEUE & 1)
        valid = get(queue.items, n % QUEUE * ITEM_SIZE + VALID, 1) != 0
