"""Kernels whose programs write to the memory of other ranks, and wait for the same programs there.

A counter a program and pair of ranks says what has come: who has written adds one to it in the reader's memory, who
waits takes one off. So nothing is set back between launches, nor between replays of a CUDA graph.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class ExchangeConfig(NamedTuple):
    """What ``exchange_and_merge`` is compiled for.

    HEADS: those that a rank gets. SHARDED: whether each gets its own, or all get all. READY: whether all ranks have
    waited for each other since the memory was read last. ROWS: of a tile. DEPENDENT: whether it may be started before
    the kernel ahead of it has ended.
    """

    WORLD: int
    HEADS: int
    D: int
    BLOCK_D: int
    ROWS: int
    SHARDED: bool
    READY: bool
    DEPENDENT: bool


class GatherConfig(NamedTuple):
    """What ``gather_rows`` is compiled for: ranks, elements of a row on each and of a tile; the others as there."""

    WORLD: int
    WIDTH: int
    BLOCK: int
    READY: bool
    DEPENDENT: bool


class Peers(NamedTuple):
    """Addresses of each rank's memory and counters: this rank's first, then those of the ranks behind it in turn.

    Numbers of the launch: a table of them would be read from memory first, twice.
    """

    buffers: Any
    signals: Any


class PartStrides(NamedTuple):
    """Of a rank's partial results."""

    out_row: Any
    out_head: Any
    lse_row: Any
    lse_head: Any


@triton.jit
def meet(signals, rank, WORLD: tl.constexpr):
    """Tell this program of all other ranks that it has written, and wait until they have."""
    place = tl.program_id(0) * WORLD
    # What all threads wrote is told by one.
    tl.debug_barrier()
    for step in tl.static_range(1, WORLD):
        p_theirs = tl.cast(signals[step], tl.pointer_type(tl.int32))
        tl.atomic_add(p_theirs + place + rank, 1, sem="release", scope="sys")
    p_own = tl.cast(signals[0], tl.pointer_type(tl.int32))
    for step in tl.static_range(1, WORLD):
        p_count = p_own + place + (rank + step) % WORLD
        while tl.atomic_add(p_count, 0, sem="acquire", scope="sys") < 1:
            pass
        tl.atomic_add(p_count, -1, sem="relaxed", scope="sys")
    tl.debug_barrier()


@triton.jit
def place_of_part(buffer, source, items, p_like, config: tl.constexpr):
    """Where a rank's memory has what ``source`` wrote: [items, D] elements as p_like's, and [items] logarithms."""
    ROW: tl.constexpr = config.D * (p_like.dtype.element_ty.primitive_bitwidth // 8)
    items = tl.cast(items, tl.int64)
    p_out = tl.cast(buffer + source * items * ROW, p_like.dtype)
    if ROW % 16 == 0:
        p_out = tl.multiple_of(p_out, 16)
    behind = (config.WORLD * items * ROW + 15) // 16 * 16
    p_lse = tl.cast(buffer + behind, tl.pointer_type(tl.float32)) + source * items
    return p_out, p_lse


@triton.jit
def load_rows(p_out, p_lse, o_out, o_lse, m, config: tl.constexpr):
    """Rows of results from ``o_out`` on and their logarithms; -inf where m is not."""
    o_d = tl.arange(0, config.BLOCK_D)
    b_lse = tl.load(p_lse + o_lse, mask=m, other=float("-inf"))
    mask = m[:, None]
    if config.D != config.BLOCK_D:
        mask = mask & (o_d < config.D)[None, :]
    return tl.load(p_out + o_out[:, None] + o_d[None, :], mask=mask, other=0.0), b_lse


@triton.jit
def store_rows(p_out, p_lse, item, m, b_out, b_lse, config: tl.constexpr):
    o_d = tl.arange(0, config.BLOCK_D)
    mask = m[:, None]
    if config.D != config.BLOCK_D:
        mask = mask & (o_d < config.D)[None, :]
    tl.store(p_out + item[:, None] * config.D + o_d[None, :], b_out, mask=mask)
    tl.store(p_lse + item, b_lse, mask=m)


@triton.jit
def load_own_rows(p_out, p_lse, first_head, item, m, strides, config: tl.constexpr):
    """A tile of this rank's own results, of heads from ``first_head`` on."""
    row, head = item // config.HEADS, first_head + item % config.HEADS
    o_out = row * strides.out_row + head * strides.out_head
    return load_rows(p_out, p_lse, o_out, row * strides.lse_row + head * strides.lse_head, m, config)


@triton.jit(do_not_specialize=["rank", "rows"])
def exchange_and_merge(
    p_out, p_lse, p_merged, p_merged_lse, rank, rows, strides, peers, config: tl.constexpr
):  # fmt: skip
    """Send every rank its heads' partial results, then merge all ranks' for this one, as ``merge_partials`` does.

    out: [rows, H, D], lse: [rows, H]; merged: [rows, HEADS, D] and [rows, HEADS]. A rank's memory has parts
    [WORLD, rows * HEADS, D] and their logarithms. A program merges what the same programs of the others have sent.
    """
    if config.DEPENDENT:
        tl.extra.cuda.gdc_wait()
    WORLD: tl.constexpr = config.WORLD
    ROWS: tl.constexpr = config.ROWS
    BLOCK_D: tl.constexpr = config.BLOCK_D
    items = rows * config.HEADS
    begin, stride = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    if not config.READY:
        meet(peers.signals, rank, WORLD)
    for step in tl.static_range(1, WORLD):
        peer = (rank + step) % WORLD
        first_head = peer * config.HEADS if config.SHARDED else 0
        p_part, p_part_lse = place_of_part(peers.buffers[step], rank, items, p_out, config)
        for first in range(begin, items, stride):
            item = (first + tl.arange(0, ROWS)).to(tl.int64)
            m = item < items
            b_out, b_lse = load_own_rows(p_out, p_lse, first_head, item, m, strides, config)
            store_rows(p_part, p_part_lse, item, m, b_out, b_lse, config)
    meet(peers.signals, rank, WORLD)
    own_head = rank * config.HEADS if config.SHARDED else 0
    for first in range(begin, items, stride):
        item = (first + tl.arange(0, ROWS)).to(tl.int64)
        m = item < items
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        highest = total - float("inf")
        # In the order of ranks, on every rank: the same bits.
        for source in tl.static_range(0, WORLD):
            if source == rank:
                b_out, b_lse = load_own_rows(p_out, p_lse, own_head, item, m, strides, config)
            else:
                p_part, p_part_lse = place_of_part(peers.buffers[0], source, items, p_out, config)
                b_out, b_lse = load_rows(p_part, p_part_lse, item * config.D, item, m, config)
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
        store_rows(p_merged, p_merged_lse, item, m, merged.to(p_merged.dtype.element_ty), merged_lse, config)


@triton.jit(do_not_specialize=["rank", "rows"])
def gather_rows(p_x, rank, rows, s_row, peers, config: tl.constexpr):
    """Write this rank's part of rows, x [rows, WIDTH], to every rank's memory, [rows, WORLD, WIDTH]."""
    if config.DEPENDENT:
        tl.extra.cuda.gdc_wait()
    WORLD: tl.constexpr = config.WORLD
    WIDTH: tl.constexpr = config.WIDTH
    CHUNKS: tl.constexpr = (WIDTH + config.BLOCK - 1) // config.BLOCK
    if not config.READY:
        meet(peers.signals, rank, WORLD)
    for tile in range(tl.program_id(0), rows * CHUNKS, tl.num_programs(0)):
        row = tl.cast(tile // CHUNKS, tl.int64)
        o_x = (tile % CHUNKS) * config.BLOCK + tl.arange(0, config.BLOCK)
        b_x = tl.load(p_x + row * s_row + o_x, mask=o_x < WIDTH)
        for step in tl.static_range(0, WORLD):
            p_whole = tl.cast(peers.buffers[step], p_x.dtype)
            p_whole = tl.multiple_of(p_whole, 16)
            tl.store(p_whole + (row * WORLD + rank) * WIDTH + o_x, b_x, mask=o_x < WIDTH)
    meet(peers.signals, rank, WORLD)
