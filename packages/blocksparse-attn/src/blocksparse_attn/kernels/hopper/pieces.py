"""A piece of a tile: its boxes and their pages, the TMA loads of them, and zeros where there is nothing."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from blocksparse_attn.kernels.hopper.memory import COLUMNS, NOWHERE, STRIP


class Source(NamedTuple):
    """Where the keys of a work item are: its row of the block table, or its first key in a sequence of k."""

    pages: Any
    i_b: Any
    i_kv: Any
    begin: Any
    length: Any
    keys: Any
    num_pages: Any


@gluon.jit
def lanes():
    """0, 1, ... 31: a number in each thread of a warp, however few of them there are to keep.

    Reduced over all 32 they are one instruction, REDUX, whose result ptxas knows to be the same in all threads, as TMA
    wants its coordinates. After shuffles it would not know, and each TMA load took 25 more instructions.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    return gl.arange(0, 32, layout)


@gluon.jit
def one_of(numbers, i: gl.constexpr):
    """The i-th of a warp's numbers of 0 or more."""
    return gl.max(gl.where(lanes() == i, numbers, 0), 0)


@gluon.jit
def piece_of(at, i: gl.constexpr, config: gl.constexpr):
    """Where the i-th piece of a tile is; pieces are a number in each thread, without TABLE, of two at most, a tuple."""
    one = at
    if config.TABLE:
        one = one_of(at, i)
    else:
        one = at[i]
        if not config.UNIFORM:
            # Reduced anew after each wait, after which ptxas would not know the threads to be together: see ``lanes``.
            one = gl.max(lanes() * 0 + one, 0)
    return one


@gluon.jit
def page_of(key, source, config: gl.constexpr):
    """The page of a box of keys; one after the last, which TMA fills with 0, where there is none."""
    page = gl.load(source.pages + key // config.PAGE, mask=key < source.length, other=-1).to(gl.int64)
    return gl.where((page >= 0) & (page < source.num_pages), page, source.num_pages).to(gl.int32)


@gluon.jit
def load_piece(
    d, ring, full, stage, at, i_piece: gl.constexpr, source, BLOCK_D: gl.constexpr, TAIL: gl.constexpr,
    config: gl.constexpr,
):  # fmt: skip
    """Issue the TMA loads of a piece of a tile. What is not there, and NOWHERE, is filled with 0."""
    BOXES: gl.constexpr = config.PIECE // config.BOX
    # Looked up together: one by one, each page is waited for before the next is asked for.
    TOGETHER: gl.constexpr = min(4, BOXES)
    ALL: gl.constexpr = config.BLOCK_N // config.BOX
    CHUNKS: gl.constexpr = BLOCK_D // COLUMNS
    for i_group in gl.static_range(BOXES // TOGETHER):
        first = at + i_group * TOGETHER * config.BOX
        pages = ()
        if config.PAGE:
            for i_box in gl.static_range(TOGETHER):
                pages = pages + (page_of(first + i_box * config.BOX, source, config),)
        for i_box in gl.static_range(TOGETHER):
            key = first + i_box * config.BOX
            if config.PAGE:
                outer = pages[i_box]
                slot = key % config.PAGE
            else:
                outer = source.i_b
                slot = gl.where(at == NOWHERE, source.keys, source.begin + key)
            row = i_piece * BOXES + i_group * TOGETHER + i_box
            for i_c in gl.static_range(CHUNKS):
                box = ring.boxes.index((stage * CHUNKS + i_c) * ALL + row)
                tma.async_copy_global_to_shared(d, [outer, source.i_kv, slot, i_c * COLUMNS], full, box)
            if TAIL:
                box = ring.tail_boxes.index(stage * ALL + row)
                tma.async_copy_global_to_shared(d, [outer, source.i_kv, slot, BLOCK_D], full, box)


@gluon.jit
def zero_strips(strips, first_strip, at, low, length, CHUNKS: gl.constexpr, config: gl.constexpr):
    """Zero the values of keys before ``low`` and from ``length`` on, in a piece: by one warp.

    Weights of 0 would make NaN of NaN.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    o_row = gl.arange(0, STRIP, gl.SliceLayout(1, layout))
    for strip in range(0, config.PIECE // STRIP):
        o_key = at + strip * STRIP + o_row
        keep = ((o_key >= low) & (o_key < length))[:, None]
        for i_c in gl.static_range(CHUNKS):
            cells = strips.index(first_strip + i_c * (config.BLOCK_N // STRIP) + strip)
            b_strip = cells.load(layout)
            cells.store(gl.where(keep, b_strip, 0.0).to(b_strip.dtype))


@gluon.jit
def partly_unseen(one, walk, length, config: gl.constexpr):
    """Whether a piece has keys that no row of the item sees. Compared so that NOWHERE does not overflow."""
    return ((one > length - config.PIECE) & (one != NOWHERE)) | (one < walk.low)


@gluon.jit
def has_unseen(walk, at, length, config: gl.constexpr):
    """``partly_unseen`` of any piece of a tile."""
    if config.TABLE:
        unseen = gl.max(partly_unseen(at, walk, length, config).to(gl.int32), 0) != 0
    else:
        unseen = partly_unseen(at[0], walk, length, config)
        if config.BLOCK_N > config.PIECE:
            unseen = unseen | partly_unseen(at[1], walk, length, config)
    return unseen


@gluon.jit
def zero_unseen(channels, stage, walk, at, length, config: gl.constexpr):
    """Zero the values in a tile that no row of the item sees, past the sequence's end or before the window."""
    PIECES: gl.constexpr = config.BLOCK_N // config.PIECE
    STRIPS: gl.constexpr = config.BLOCK_N // STRIP
    CHUNKS: gl.constexpr = config.BLOCK_DV // COLUMNS
    for i_piece in gl.static_range(PIECES):
        one = piece_of(at, i_piece, config)
        if partly_unseen(one, walk, length, config):
            own: gl.constexpr = i_piece * (config.PIECE // STRIP)
            first = stage * (STRIPS * CHUNKS) + own
            zero_strips(channels.strips, first, one, walk.low, length, CHUNKS, config)
            if config.TAIL_DV:
                zero_strips(channels.tail_strips, stage * STRIPS + own, one, walk.low, length, 1, config)
