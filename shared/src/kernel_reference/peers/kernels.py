"""Kernels whose programs write to the memory of other ranks, and wait for what the same programs there write.

What has come says so itself: memory that waits holds nothing but EMPTY, a NaN all of whose bits are ones, and what is
sent has none. Who has read an element makes it EMPTY again. So a writer neither waits until all of its data are there
nor tells anyone, a reader goes on with the first of them, and no launch or replay of a CUDA graph begins with another
number. After the protocol LL of NCCL, whose words carry a flag each, and the all-reduce of TensorRT-LLM for small
messages (https://github.com/NVIDIA/TensorRT-LLM), which waits for another value than -0.

Nobody waits before writing either: calls take the two halves of the memory in turn. A rank ends a call with something
of each other rank, which had therefore entered it, and ended the one before, whose half comes next. Whose turn it is
stands in the device's memory, for the sake of graphs: see ``half_of_call``.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# A power of two, and programs of a call are fewer.
CALL: tl.constexpr = tl.constexpr(2**16)


class ExchangeConfig(NamedTuple):
    """What ``exchange_and_merge`` is compiled for.

    HEADS: those that a rank gets. SHARDED: whether each gets its own, or all get all. ROWS: of a tile. THREADS: of a
    program. DEPENDENT: whether it may be started before the kernel ahead of it has ended.
    """

    WORLD: int
    HEADS: int
    D: int
    BLOCK_D: int
    ROWS: int
    THREADS: int
    SHARDED: bool
    DEPENDENT: bool


class GatherConfig(NamedTuple):
    """What ``gather_rows`` is compiled for: ranks, elements of a tile; the others as there."""

    WORLD: int
    BLOCK: int
    THREADS: int
    DEPENDENT: bool


class PlaceConfig(NamedTuple):
    """What ``place_rows`` is compiled for: ranks; words of a row, and the power of two from them on; rows of a tile."""

    WORLD: int
    WIDTH: int
    BLOCK: int
    ROWS: int
    DEPENDENT: bool


class Pools(NamedTuple):
    """Addresses of each rank's rows and counters: this rank's first, then those of the ranks behind it in turn."""

    rows: Any
    counters: Any


class Peers(NamedTuple):
    """Addresses of each rank's memory: this rank's first, then those of the ranks behind it in turn. half: its bytes.

    Numbers of the launch: a table of them would be read from memory first, twice.
    """

    buffers: Any
    half: Any


class PartStrides(NamedTuple):
    """Of a rank's partial results."""

    out_row: Any
    out_head: Any
    lse_row: Any
    lse_head: Any


class WholeStrides(NamedTuple):
    """Of what is gathered: a row's, and a rank's."""

    row: Any
    rank: Any


@triton.jit
def bits_of(b):
    """Elements as integers, of which EMPTY is -1."""
    return b.to(tl.int16 if b.dtype.primitive_bitwidth == 16 else tl.int32, bitcast=True)


@triton.jit
def sendable(bits):
    """Bits without EMPTY: another NaN in its place."""
    return tl.where(bits == -1, (1 << (bits.dtype.primitive_bitwidth - 1)) - 1, bits).to(bits.dtype)


@triton.jit
def is_awaited(bits, THREADS: tl.constexpr):
    """Whether one of them is still EMPTY: the same for all threads, which would else part for ever.

    Each of them holds elements of its own. Of a tile with fewer several would hold the same, read it at different
    moments, and not be asked about what the others saw.
    """
    tl.static_assert(bits.numel >= THREADS, "a tile that waits has an element a thread")
    return tl.max((bits == -1).to(tl.int32), None) > 0


@triton.jit
def half_of_call(p_calls, peers):
    """Where in each rank's memory the half begins that this call uses: the other one than the call before.

    A call counts CALL, of which each program adds its part in ``end_call``: what the others have added meanwhile does
    not carry.
    """
    return tl.where((tl.load(p_calls, volatile=True) & CALL) == 0, 0, peers.half)


@triton.jit
def end_call(p_calls):
    """Behind all that a program does, and so behind what its threads have read of the calls."""
    tl.debug_barrier()
    rest = 1 - tl.num_programs(0) + CALL
    tl.atomic_add(p_calls, tl.where(tl.program_id(0) == 0, rest, 1), sem="relaxed")


@triton.jit
def place_of_part(buffer, source, items, p_like, config: tl.constexpr):
    """Where a half at ``buffer`` has what ``source`` wrote, as bits: [items, D] like p_like; and [items] logarithms."""
    BITS: tl.constexpr = p_like.dtype.element_ty.primitive_bitwidth
    ROW: tl.constexpr = config.D * (BITS // 8)
    items = tl.cast(items, tl.int64)
    p_out = tl.cast(buffer + source * items * ROW, tl.pointer_type(tl.int16 if BITS == 16 else tl.int32))
    if ROW % 16 == 0:
        p_out = tl.multiple_of(p_out, 16)
    behind = (config.WORLD * items * ROW + 15) // 16 * 16
    p_lse = tl.cast(buffer + behind, tl.pointer_type(tl.int32)) + source * items
    return p_out, p_lse


@triton.jit
def row_elements(m, config: tl.constexpr):
    """Places of a row's elements, and which of rows m's there are."""
    o_d = tl.arange(0, config.BLOCK_D)
    mask = m[:, None]
    if config.D != config.BLOCK_D:
        mask = mask & (o_d < config.D)[None, :]
    return o_d, mask


@triton.jit
def take_rows(p_out, p_lse, item, m, p_like, config: tl.constexpr):
    """Rows that another rank writes to p_out and p_lse, once they are there; -inf where m is not."""
    THREADS: tl.constexpr = config.THREADS
    ALIKE: tl.constexpr = (THREADS + config.ROWS - 1) // config.ROWS
    o_d, mask = row_elements(m, config)
    p_out += item[:, None] * config.D + o_d[None, :]
    # As often as there are threads to ask.
    o_alike = tl.arange(0, ALIKE)[None, :]
    p_lse = (p_lse + item)[:, None] + o_alike * 0
    m_lse = m[:, None] & (o_alike >= 0)
    out = tl.load(p_out, mask=mask, other=0, volatile=True)
    lse = tl.load(p_lse, mask=m_lse, other=0, volatile=True)
    while is_awaited(out, THREADS) | is_awaited(lse, THREADS):
        out = tl.load(p_out, mask=mask, other=0, volatile=True)
        lse = tl.load(p_lse, mask=m_lse, other=0, volatile=True)
    # Several threads have read a logarithm.
    tl.debug_barrier()
    tl.store(p_out, tl.full(out.shape, -1, out.dtype), mask=mask)
    tl.store(p_lse, tl.full(lse.shape, -1, lse.dtype), mask=m_lse & (o_alike == 0))
    b_lse = tl.where(m, tl.max(lse, 1).to(tl.float32, bitcast=True), float("-inf"))
    return out.to(p_like.dtype.element_ty, bitcast=True), b_lse


@triton.jit
def load_own_rows(p_out, p_lse, first_head, item, m, strides, config: tl.constexpr):
    """A tile of this rank's own results, of heads from ``first_head`` on."""
    row, head = item // config.HEADS, first_head + item % config.HEADS
    o_d, mask = row_elements(m, config)
    o_out = row * strides.out_row + head * strides.out_head
    b_out = tl.load(p_out + o_out[:, None] + o_d[None, :], mask=mask, other=0.0)
    return b_out, tl.load(p_lse + row * strides.lse_row + head * strides.lse_head, mask=m, other=float("-inf"))


@triton.jit
def send_rows(p_out, p_lse, first, rank, items, strides, peers, half, config: tl.constexpr):
    """A tile of items from ``first`` on to each rank, of its heads."""
    WORLD: tl.constexpr = config.WORLD
    item = (first + tl.arange(0, config.ROWS)).to(tl.int64)
    m = item < items
    o_d, mask = row_elements(m, config)
    for step in tl.static_range(1, WORLD):
        peer = (rank + step) % WORLD
        first_head = peer * config.HEADS if config.SHARDED else 0
        p_part, p_part_lse = place_of_part(peers.buffers[step] + half, rank, items, p_out, config)
        b_out, b_lse = load_own_rows(p_out, p_lse, first_head, item, m, strides, config)
        tl.store(p_part + item[:, None] * config.D + o_d[None, :], sendable(bits_of(b_out)), mask=mask)
        tl.store(p_part_lse + item, sendable(bits_of(b_lse)), mask=m)


@triton.jit(do_not_specialize=["rank", "rows"])
def exchange_and_merge(
    p_out, p_lse, p_merged, p_merged_lse, p_calls, rank, rows, strides, peers, config: tl.constexpr
):  # fmt: skip
    """Send every rank its heads' partial results, and merge all ranks' for this one, as ``merge_partials`` does.

    out: [rows, H, D], lse: [rows, H]; merged: [rows, HEADS, D] and [rows, HEADS]. A rank's memory has parts
    [WORLD, rows * HEADS, D] and their logarithms. A program merges what the same programs of the others have sent, a
    tile at a time, while the next one is on its way.
    """
    if config.DEPENDENT:
        tl.extra.cuda.gdc_wait()
    WORLD: tl.constexpr = config.WORLD
    ROWS: tl.constexpr = config.ROWS
    BLOCK_D: tl.constexpr = config.BLOCK_D
    items = rows * config.HEADS
    begin, stride = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    half = half_of_call(p_calls, peers)
    send_rows(p_out, p_lse, begin, rank, items, strides, peers, half, config)
    own_head = rank * config.HEADS if config.SHARDED else 0
    for first in range(begin, items, stride):
        item = (first + tl.arange(0, ROWS)).to(tl.int64)
        m = item < items
        own_out, own_lse = load_own_rows(p_out, p_lse, own_head, item, m, strides, config)
        if first + stride < items:
            send_rows(p_out, p_lse, first + stride, rank, items, strides, peers, half, config)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        highest = total - float("inf")
        # In the order of ranks, on every rank: the same bits.
        for source in tl.static_range(0, WORLD):
            b_out, b_lse = own_out, own_lse
            if source != rank:
                p_part, p_part_lse = place_of_part(peers.buffers[0] + half, source, items, p_out, config)
                b_out, b_lse = take_rows(p_part, p_part_lse, item, m, p_out, config)
            # FlashMLA writes +inf where a rank saw no key; what such a part holds, NaN perhaps, does not count.
            b_lse = tl.where(b_lse == float("inf"), float("-inf"), b_lse)
            b_part = tl.where((b_lse == float("-inf"))[:, None], 0.0, b_out.to(tl.float32))
            higher = tl.maximum(highest, b_lse)
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            before, weight = tl.exp(highest - shift), tl.exp(b_lse - shift)
            acc = acc * before[:, None] + b_part * weight[:, None]
            total = total * before + weight
            highest = higher
        merged = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        merged_lse = tl.where(highest == float("-inf"), 0.0, highest) + tl.log(total)
        o_d, mask = row_elements(m, config)
        p_row = p_merged + item[:, None] * config.D + o_d[None, :]
        tl.store(p_row, merged.to(p_merged.dtype.element_ty), mask=mask)
        tl.store(p_merged_lse + item, merged_lse, mask=m)
    end_call(p_calls)


@triton.jit
def send_words(p_x, p_whole, tile, rank, width, s_row, strides, peers, half, config: tl.constexpr):
    """A tile of x to every rank's memory, and to this one's result."""
    WORLD: tl.constexpr = config.WORLD
    chunks = (width + config.BLOCK - 1) // config.BLOCK
    row = tl.cast(tile // chunks, tl.int64)
    o_x = (tile % chunks) * config.BLOCK + tl.arange(0, config.BLOCK)
    bits = sendable(tl.load(p_x + row * s_row + o_x, mask=o_x < width))
    for step in tl.static_range(1, WORLD):
        p_theirs = tl.multiple_of(tl.cast(peers.buffers[step] + half, p_x.dtype), 16)
        tl.store(p_theirs + (row * WORLD + rank) * width + o_x, bits, mask=o_x < width)
    tl.store(p_whole + row * strides.row + rank * strides.rank + o_x, bits, mask=o_x < width)


@triton.jit(do_not_specialize=["rank", "rows"])
def gather_rows(p_x, p_whole, p_calls, rank, rows, width, s_row, strides, peers, config: tl.constexpr):
    """Rows of every rank, x [rows, width] as integers, to whole [rows, WORLD, width]: by way of its memory.

    A rank's memory has [rows, WORLD, width]. A program takes what the same programs of the others have sent.
    """
    if config.DEPENDENT:
        tl.extra.cuda.gdc_wait()
    WORLD: tl.constexpr = config.WORLD
    BLOCK: tl.constexpr = config.BLOCK
    chunks = (width + BLOCK - 1) // BLOCK
    tiles, stride = rows * chunks, tl.num_programs(0)
    half = half_of_call(p_calls, peers)
    send_words(p_x, p_whole, tl.program_id(0), rank, width, s_row, strides, peers, half, config)
    p_memory = tl.multiple_of(tl.cast(peers.buffers[0] + half, p_x.dtype), 16)
    for tile in range(tl.program_id(0), tiles, stride):
        if tile + stride < tiles:
            send_words(p_x, p_whole, tile + stride, rank, width, s_row, strides, peers, half, config)
        row = tl.cast(tile // chunks, tl.int64)
        o_x = (tile % chunks) * BLOCK + tl.arange(0, BLOCK)
        for step in tl.static_range(1, WORLD):
            source = (rank + step) % WORLD
            p_own = p_memory + (row * WORLD + source) * width + o_x
            bits = tl.load(p_own, mask=o_x < width, other=0, volatile=True)
            while is_awaited(bits, config.THREADS):
                bits = tl.load(p_own, mask=o_x < width, other=0, volatile=True)
            tl.store(p_own, tl.full(bits.shape, -1, bits.dtype), mask=o_x < width)
            tl.store(p_whole + row * strides.row + source * strides.rank + o_x, bits, mask=o_x < width)
    end_call(p_calls)


@triton.jit
def meet(counters, rank, WORLD: tl.constexpr):
    """Wait until the same program of each rank has come as far: what all of them have written is there for all."""
    place = tl.program_id(0) * WORLD
    tl.debug_barrier()
    for step in tl.static_range(1, WORLD):
        p_theirs = tl.cast(counters[step], tl.pointer_type(tl.int32))
        tl.atomic_add(p_theirs + place + rank, 1, sem="release", scope="sys")
    p_own = tl.cast(counters[0], tl.pointer_type(tl.int32))
    for step in tl.static_range(1, WORLD):
        p_count = p_own + place + (rank + step) % WORLD
        while tl.atomic_add(p_count, 0, sem="acquire", scope="sys") < 1:
            pass
        # A peer may be at the next meeting already, and have added two.
        tl.atomic_add(p_count, -1, sem="relaxed", scope="sys")
    tl.debug_barrier()


@triton.jit(do_not_specialize=["rank", "rows", "nowhere"])
def place_rows(p_k, p_v, p_places, rank, rows, nowhere, s_k, s_v, pools, config: tl.constexpr):
    """Row t of k and of v, [rows, WIDTH] words each, to place ``p_places[t]`` of every rank's [.., 2, WIDTH].

    What is not below ``nowhere`` goes nowhere. Kernels of other kinds read what has been placed, and know its address:
    it has no second half, and ranks meet before they write, when all have read, and behind that.
    """
    if config.DEPENDENT:
        tl.extra.cuda.gdc_wait()
    WORLD: tl.constexpr = config.WORLD
    WIDTH: tl.constexpr = config.WIDTH
    ROWS: tl.constexpr = config.ROWS
    o_word = tl.arange(0, config.BLOCK)[None, :]
    meet(pools.counters, rank, WORLD)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        place = tl.load(p_places + row, mask=row < rows, other=nowhere)
        mask = ((place >= 0) & (place < nowhere))[:, None]
        if WIDTH != config.BLOCK:
            mask = mask & (o_word < WIDTH)
        b_k = tl.load(p_k + row[:, None] * s_k + o_word, mask=mask)
        b_v = tl.load(p_v + row[:, None] * s_v + o_word, mask=mask)
        o_place = place[:, None] * (2 * WIDTH) + o_word
        for step in tl.static_range(0, WORLD):
            # This rank's own last.
            p_rows = tl.multiple_of(tl.cast(pools.rows[(step + 1) % WORLD], p_k.dtype), 16)
            tl.store(p_rows + o_place, b_k, mask=mask)
            tl.store(p_rows + o_place + WIDTH, b_v, mask=mask)
    meet(pools.counters, rank, WORLD)
