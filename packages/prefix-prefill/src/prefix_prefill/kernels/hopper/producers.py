"""Producer warps of the sm_90 kernel: one issues the TMA loads of keys, one those of values; converters widen 8 bits.

load      global memory --TMA--> a stage of 16 bits, or, of an 8-bit cache, one of 8 bits
convert   a stage of 8 bits --registers--> one of 16 bits, which holds the same numbers exactly
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from prefix_prefill.kernels.hopper.config import (
    STRIP,
    Source,
    begin_of,
    column_of,
    comes_ahead,
    comes_box_by_box,
    converter_warps,
    has_light_consumers,
    is_gathered,
    units_in,
    width_of,
)
from prefix_prefill.kernels.hopper.gather import gather_cached
from prefix_prefill.kernels.hopper.items import done, has_item, loop_of, tile_of
from prefix_prefill.kernels.hopper.joined import end_at
from prefix_prefill.kernels.hopper.memory import release, wait_empty, with_new_boxes
from prefix_prefill.kernels.hopper.softmax import unit_of


@gluon.jit
def key_of_tile(i, loop, C):
    """The position of the first key of tile i."""
    key = loop.start + i * C.BLOCK_N
    if C.NEW_KV:
        key += gl.where(i < loop.first_new, 0, loop.to_new)
    return key


@gluon.jit
def end_of_tile(i, loop, C):
    """The position before which the keys of tile i are of its source, cached or new, and are seen."""
    end = loop.cached_high
    if C.NEW_KV:
        end = gl.where(i < loop.first_new, end, loop.high)
    if C.JOINED:
        end = end_at(key_of_tile(i, loop, C), end, loop, C)
    return end


@gluon.jit
def cached_tiles(loop, C):
    """How many of a program's tiles hold cached keys; they come first."""
    count = loop.count
    if C.NEW_KV:
        count = gl.minimum(gl.maximum(loop.first_new, 0), loop.count)
    return count


@gluon.jit
def page_of(key, source, loop, C):
    """The page that holds a box of keys; for one that no row sees, or that does not exist, one past the last."""
    seen = key < loop.cached_high
    if C.HAS_LEFT:
        seen = seen & (key + C.BOX > loop.low)
    block = gl.load(source.p_row + key // C.PAGE, mask=seen, other=-1).to(gl.int64)
    return gl.where((block >= 0) & (block < source.num_blocks), block, source.num_blocks).to(gl.int32)


@gluon.jit
def pages_of(key, source, loop, COUNT: gl.constexpr, C):
    """The pages of as many boxes, all on their way before the first is waited for."""
    pages = ()
    for i in gl.static_range(COUNT):
        pages = pages + (page_of(key + i * C.BOX, source, loop, C),)
    return pages


@gluon.jit
def pages_of_tile(key, source, loop, BOXES: gl.constexpr, C):
    """The pages that hold as many boxes of keys, one a lane, by one load; a lane past them has a page past the last."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    return page_of(gl.where(lane < BOXES, key + lane * C.BOX, loop.cached_high), source, loop, C)


@gluon.jit
def of_lane(numbers, i):
    """Lane i's of 32 numbers of 0 or more, for the whole warp."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    return gl.max(gl.where(lane == i, numbers, 0), 0)


@gluon.jit
def issue_boxes(d, ring, stage, box, key, pages, i_kv, TILES: gl.constexpr, SIZE: gl.constexpr, C):
    """TMA loads of boxes from ``box`` on, whose pages are known."""
    for i in gl.static_range(len(pages)):
        at = (pages[i], i_kv, (key + i * C.BOX) % C.PAGE)
        issue_cached(d, ring, stage, box + i, at, TILES, SIZE, C)


@gluon.jit
def issue_cached(d, ring, stage, box, at, TILES: gl.constexpr, SIZE: gl.constexpr, C):
    """TMA loads of BOX cached rows of a page."""
    if C.PACKED:
        # Of values a box has a row for each of a head's elements; of keys one for 8 of them, of 8 tokens.
        IN_ROW: gl.constexpr = SIZE // d[0].block_type.shape[2]
        TOKENS: gl.constexpr = d[0].block_type.shape[3] // IN_ROW
        i_outer, i_head, row = at
        for i in gl.static_range(C.BOX // TOKENS):
            to = ring.boxes[0].index((stage * C.BLOCK_N + box * C.BOX) // TOKENS + i)
            at_token = [i_outer, i_head, 0, (row + i * TOKENS) * IN_ROW]
            tma.async_copy_global_to_shared(d[0], at_token, ring.full.index(stage), to)
    else:
        issue_loads(d, ring, stage, box, at, TILES, SIZE, C)


@gluon.jit
def issue_loads(d, ring, stage, box, at, TILES: gl.constexpr, SIZE: gl.constexpr, C):
    """TMA loads of one box of rows. What lies out of bounds becomes 0."""
    for t in gl.static_range(len(TILES)):
        issue_loads_of_tile(d, ring, stage, box, at, TILES, t, SIZE, C)


@gluon.jit
def issue_loads_of_tile(
    d, ring, stage, box, at, TILES: gl.constexpr, T: gl.constexpr, SIZE: gl.constexpr, C
):  # fmt: skip
    """Those of the columns of tile T. The second descriptor is for boxes that are narrower than the first tile's."""
    BITS: gl.constexpr = d[0].dtype.primitive_bitwidth
    WIDTH: gl.constexpr = width_of(TILES[T], BITS)
    COUNT: gl.constexpr = TILES[T] // WIDTH
    BEGIN: gl.constexpr = begin_of(TILES, T, SIZE)
    BOXES: gl.constexpr = ring.tiles[T].shape[1] // ring.boxes[T].shape[3]
    i_outer, i_head, row = at
    for i_c in gl.static_range(COUNT):
        to = ring.boxes[T].index((stage * COUNT + i_c) * BOXES + box)
        at_column = [i_outer, i_head, row, BEGIN + i_c * WIDTH]
        if WIDTH == width_of(TILES[0], BITS):
            tma.async_copy_global_to_shared(d[0], at_column, ring.full.index(stage), to)
        else:
            tma.async_copy_global_to_shared(d[1], at_column, ring.full.index(stage), to)


@gluon.jit
def load_cached(d_cache, ring, before, count, source, loop, TILES: gl.constexpr, SIZE: gl.constexpr, C):
    """Load ``count`` tiles of cached keys, or of values, each as soon as its stage is empty; ``before`` were before."""
    KEYS: gl.constexpr = ring.tiles[0].shape[1]
    BOXES: gl.constexpr = KEYS // C.BOX
    TILE_BYTES: gl.constexpr = KEYS * column_of(TILES, len(TILES)) * d_cache[0].dtype.primitive_bitwidth // 8
    # Pages are looked up a few at a time: all at once would take too many registers.
    FEW: gl.constexpr = C.NEW_KV or (C.IS_FP8 and not C.K_FP8)
    MOST: gl.constexpr = 2 if C.NEW_KV and C.HAS_LEFT else (4 if FEW else 8)
    AT_ONCE: gl.constexpr = BOXES if BOXES < MOST else MOST
    for i in range(count):
        stage = (before + i) % ring.full.shape[0]
        first_key = loop.start + i * KEYS
        # The first ones while the stage is still read.
        pages = pages_of(first_key, source, loop, AT_ONCE, C)
        wait_empty(ring, before + i)
        mbarrier.expect(ring.full.index(stage), TILE_BYTES)
        issue_boxes(d_cache, ring, stage, 0, first_key, pages, source.i_kv, TILES, SIZE, C)
        for i_g in range(1, BOXES // AT_ONCE):
            key = first_key + i_g * AT_ONCE * C.BOX
            pages = pages_of(key, source, loop, AT_ONCE, C)
            issue_boxes(d_cache, ring, stage, i_g * AT_ONCE, key, pages, source.i_kv, TILES, SIZE, C)


@gluon.jit
def load_cached_ahead(d_cache, ring, before, count, source, loop, TILES: gl.constexpr, SIZE: gl.constexpr, C):
    """As ``load_cached``, a tile's pages on their way while the tile before it is loaded."""
    KEYS: gl.constexpr = ring.tiles[0].shape[1]
    BOXES: gl.constexpr = KEYS // C.BOX
    TILE_BYTES: gl.constexpr = KEYS * column_of(TILES, len(TILES)) * d_cache[0].dtype.primitive_bitwidth // 8
    # BOXES as a run-time value, so that the loop is not unrolled.
    boxes = BOXES + (source.num_blocks >> 31)
    key = loop.start
    pages = pages_of_tile(key, source, loop, BOXES, C)
    for i in range(count):
        stage = (before + i) % ring.full.shape[0]
        next_pages = pages_of_tile(key + KEYS, source, loop, BOXES, C)
        wait_empty(ring, before + i)
        mbarrier.expect(ring.full.index(stage), TILE_BYTES)
        for box in range(boxes):
            at = (of_lane(pages, box), source.i_kv, key % C.PAGE)
            issue_cached(d_cache, ring, stage, box, at, TILES, SIZE, C)
            key += C.BOX
        pages = next_pages


@gluon.jit
def load_cached_box_by_box(d_cache, ring, before, count, source, loop, TILES: gl.constexpr, SIZE: gl.constexpr, C):
    """As ``load_cached``, one box after the other, the page of the next one on its way meanwhile."""
    KEYS: gl.constexpr = ring.tiles[0].shape[1]
    BOXES: gl.constexpr = KEYS // C.BOX
    TILE_BYTES: gl.constexpr = KEYS * column_of(TILES, len(TILES)) * d_cache[0].dtype.primitive_bitwidth // 8
    # BOXES as a run-time value, so that the loop is not unrolled.
    boxes = BOXES + (source.num_blocks >> 31)
    key = loop.start
    page = page_of(key, source, loop, C)
    for i in range(count):
        stage = (before + i) % ring.full.shape[0]
        wait_empty(ring, before + i)
        mbarrier.expect(ring.full.index(stage), TILE_BYTES)
        for box in range(boxes):
            issue_cached(d_cache, ring, stage, box, (page, source.i_kv, key % C.PAGE), TILES, SIZE, C)
            key += C.BOX
            page = page_of(key, source, loop, C)


@gluon.jit
def load_keys_by_units(d_cache, ring, before, count, source, loop, C):
    """As ``load_cached``, keys in units of 64 columns, each as soon as its stage is empty."""
    BOXES: gl.constexpr = C.BLOCK_N // C.BOX
    AT_ONCE: gl.constexpr = BOXES if BOXES < 8 else 8
    for i in range(count):
        first_key = loop.start + i * C.BLOCK_N
        pages = pages_of(first_key, source, loop, AT_ONCE, C)
        for t in gl.static_range(units_in(C)):
            place = (before + i) * units_in(C) + t
            stage = place % C.K_UNITS
            wait_empty(ring, place)
            mbarrier.expect(ring.full.index(stage), C.BLOCK_N * 128)
            for i_g in gl.static_range(BOXES // AT_ONCE):
                key = first_key + i_g * AT_ONCE * C.BOX
                if BOXES > AT_ONCE:
                    pages = pages_of(key, source, loop, AT_ONCE, C)
                for box in gl.static_range(AT_ONCE):
                    at = [pages[box], source.i_kv, (key + box * C.BOX) % C.PAGE, t * 64]
                    to = ring.boxes[0].index(stage * BOXES + i_g * AT_ONCE + box)
                    tma.async_copy_global_to_shared(d_cache[0], at, ring.full.index(stage), to)


@gluon.jit
def load_new(d_new, ring, before, count, source, loop, TILES: gl.constexpr, SIZE: gl.constexpr, C):
    """Load the tiles of new keys, or of values, that come after ``count`` tiles of cached ones."""
    into = with_new_boxes(ring, TILES, C)
    KEYS: gl.constexpr = ring.tiles[0].shape[1]
    PER_TILE: gl.constexpr = C.BLOCK_N // KEYS
    for i in range(count, loop.count * PER_TILE):
        stage = (before + i) % ring.full.shape[0]
        wait_empty(ring, before + i)
        mbarrier.expect(ring.full.index(stage), KEYS * column_of(TILES, len(TILES)) * 2)
        first_key = key_of_tile(i // PER_TILE, loop, C) + i % PER_TILE * KEYS
        for box in range(KEYS // C.NEW_BOX):
            key = first_key + box * C.NEW_BOX
            row = gl.where((key < loop.high) & (key + C.NEW_BOX > loop.low), source.new_row + key, source.rows)
            issue_loads(d_new, into, stage, box, (0, source.i_kv, row), TILES, SIZE, C)


@gluon.jit
def load_keys(d_cache, d_new, p_table, cached, ring, table, sizes, batch, C):
    """Load the keys of all items."""
    load(d_cache, d_new, p_table, cached, ring, table, sizes, batch, C.K_TILES, C.D, C.K_UNITS, C)


@gluon.jit
def load_values(d_cache, d_new, p_table, cached, ring, table, sizes, batch, C):
    """Load the values of all items."""
    load(d_cache, d_new, p_table, cached, ring, table, sizes, batch, C.V_TILES, C.DV, 0, C)


@gluon.jit
def load(
    d_cache, d_new, p_table, cached, ring, table, sizes, batch,
    TILES: gl.constexpr, SIZE: gl.constexpr, UNITS: gl.constexpr, C,
):  # fmt: skip
    """Load the keys, or the values, of all items, each descriptor a pair: see ``issue_loads``; or from a Pool.

    Cached ones go to the ring ``cached``, which for a 16-bit cache is ``ring``; new ones to ``ring``.
    """
    ELEMENT_BYTES: gl.constexpr = 2 if is_gathered(C) else d_cache[0].dtype.primitive_bitwidth // 8
    PER_TILE: gl.constexpr = C.BLOCK_N // ring.tiles[0].shape[1]
    before = batch.num_sequences * 0
    before_cached = before
    i_item = before
    while has_item(table, i_item, 1):
        tile = tile_of(table, i_item, C, 1)
        loop = loop_of(tile, batch, C)
        done(table, i_item)
        i_item += 1
        i_n = gl.minimum(gl.maximum(tile.i_n, 0), batch.num_sequences - 1)
        p_row = p_table + i_n.to(gl.int64) * sizes.s_table
        source = Source(p_row, sizes.num_blocks, tile.i_kv, sizes.rows, tile.begin - tile.context)
        tiles = cached_tiles(loop, C) * PER_TILE
        at = before_cached if ELEMENT_BYTES == 1 else before
        if UNITS:
            load_keys_by_units(d_cache, cached, at, tiles, source, loop, C)
        elif is_gathered(C):
            gather_cached(d_cache, cached, at, tiles, source, loop, TILES, SIZE, C)
        elif comes_box_by_box(TILES, d_cache[0].dtype.primitive_bitwidth, C):
            load_cached_box_by_box(d_cache, cached, at, tiles, source, loop, TILES, SIZE, C)
        elif comes_ahead(C):
            load_cached_ahead(d_cache, cached, at, tiles, source, loop, TILES, SIZE, C)
        else:
            load_cached(d_cache, cached, at, tiles, source, loop, TILES, SIZE, C)
        before_cached += tiles
        if C.NEW_KV:
            if ELEMENT_BYTES == 1:
                # Only once the converter has waited for the last cached tile's stage may a new tile's be waited
                # for: from two phases ahead the past looks like the future.
                last = gl.maximum(before_cached - 1, 0)
                mbarrier.wait(cached.empty.index(last % C.STAGES), last // C.STAGES & 1, pred=before_cached > 0)
            load_new(d_new, ring, before, tiles, source, loop, TILES, SIZE, C)
        before += loop.count * PER_TILE


@gluon.jit
def convert_keys(cached, ring, table, batch, tokens, C):
    """Widen the tiles of 8-bit keys, and look up the scales of their tokens."""
    convert(cached, ring, table, batch, tokens, C.K_TOKENS or C.V_TOKENS, C)


@gluon.jit
def convert_values(cached, ring, table, batch, C):
    """Widen the tiles of 8-bit values."""
    convert(cached, ring, table, batch, None, False, C)


@gluon.jit
def convert(cached, ring, table, batch, tokens, SCALED: gl.constexpr, C):
    """Widen the tiles of 8-bit keys, or values, of all items to 16 bits, as soon as there is an empty stage."""
    before = batch.num_sequences * 0
    before_cached = before
    i_item = before
    while has_item(table, i_item, converter_warps(C)):
        tile = tile_of(table, i_item, C, converter_warps(C))
        loop = loop_of(tile, batch, C)
        done(table, i_item)
        i_item += 1
        tiles = cached_tiles(loop, C)
        for i in range(tiles):
            scales = (0, 0)
            if SCALED:
                scales = scales_of_tile(tokens, tile.i_n, tile.i_kv, loop.start + i * C.BLOCK_N, loop, batch, C)
            mbarrier.wait(cached.full.index((before_cached + i) % C.STAGES), (before_cached + i) // C.STAGES & 1)
            wait_empty(ring, before + i)
            if SCALED:
                put_scales(scales, tokens.memory, (before + i) % (C.STAGES + 1), C)
            convert_tile(cached, ring, before_cached + i, before + i, C)
        before_cached += tiles
        before += loop.count


@gluon.jit
def scales_of_tile(tokens, i_n, i_kv, key, loop, batch, C):
    """The scales of a tile's tokens; 0 of those that no row sees, whose memory may hold anything."""
    o_key = key + gl.arange(0, C.BLOCK_N, gl.BlockedLayout([1], [32], [converter_warps(C)], [0]))
    i_n = gl.minimum(gl.maximum(i_n, 0), batch.num_sequences - 1)
    p_row = tokens.p_table + i_n.to(gl.int64) * tokens.sizes.s_table
    seen = (o_key >= loop.low) & (o_key < loop.cached_high)
    block = gl.load(p_row + o_key // C.PAGE, mask=seen, other=-1).to(gl.int64)
    seen = (block >= 0) & (block < tokens.sizes.num_blocks)
    s = tokens.strides
    return (
        load_scales(tokens.k_scale, block, o_key % C.PAGE, i_kv, s.k_tokens, s.k_scale, seen, C.K_TOKENS),
        load_scales(tokens.v_scale, block, o_key % C.PAGE, i_kv, s.v_tokens, s.v_scale, seen, C.V_TOKENS),
    )


@gluon.jit
def load_scales(p_scale, block, token, i_kv, s_tokens, s_head, seen, THERE: gl.constexpr):
    """One scale for each token, where there are any."""
    b_scale = token.to(gl.float32)
    if THERE:
        offset = block * s_tokens[0] + token.to(gl.int64) * s_tokens[1] + i_kv.to(gl.int64) * s_head
        b_scale = gl.load(p_scale + offset, mask=seen, other=0.0)
    return b_scale


@gluon.jit
def put_scales(scales, memory, slot, C):
    """Scales of tokens into shared memory, those of values in their unit."""
    if C.K_TOKENS:
        memory.k.index(slot).store(scales[0])
    if C.V_TOKENS:
        unit, inverse = unit_of(gl.max(gl.abs(scales[1]), 0))
        memory.v.index(slot).store(scales[1] * inverse)
        memory.units.index(slot).store(
            gl.full([1], 0.0, gl.float32, gl.BlockedLayout([1], [32], [converter_warps(C)], [0])) + unit
        )


@gluon.jit
def convert_columns(fp8_tile, tile, C):
    """A tile of 8 bits to one of 16, a few rows at a time: a converter has hardly any registers."""
    WIDTH: gl.constexpr = width_of(tile.shape[1], 8)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [converter_warps(C), 1], [1, 0])
    # The warps meet before each store to a tile: where there are registers for them, more rows are stored at once.
    MORE: gl.constexpr = 4 if has_light_consumers(C) and C.CONSUMERS == 1 else 1
    ROWS_AT_ONCE: gl.constexpr = STRIP * MORE * (converter_warps(C) // 2)
    for i_r in gl.static_range(C.BLOCK_N // ROWS_AT_ONCE):
        b_strip = fp8_tile.slice(i_r * ROWS_AT_ONCE, ROWS_AT_ONCE, dim=0).load(layout).to(gl.float16)
        if tile.dtype != gl.float16:
            # Through float32: from float16 to bfloat16 itself there is only an instruction at exp2's rate.
            b_strip = b_strip.to(gl.float32).to(tile.dtype)
        tile.slice(i_r * ROWS_AT_ONCE, ROWS_AT_ONCE, dim=0).store(b_strip)


@gluon.jit
def convert_tile(cached, ring, i_cached, i, C):
    """Tile i_cached of the one ring to tile i of the other."""
    stage = i_cached % C.STAGES
    for t in gl.static_range(len(ring.tiles)):
        convert_columns(cached.tiles[t].index(stage), ring.tiles[t].index(i % C.STAGES), C)
    fence_async_shared()
    mbarrier.arrive(ring.full.index(i % C.STAGES))
    release(cached, i_cached)
