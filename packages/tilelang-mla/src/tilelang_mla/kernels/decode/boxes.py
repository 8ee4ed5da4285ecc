"""Loads of key blocks by TMA from pages that are no whole blocks but hold a multiple of 16 keys: as many at a time.

A warp of the producer has 16 keys of a block, which lie in one page.
"""

from pathlib import Path
from typing import Any

from tilelang_mla.kernels.common import WARP, macro
from tilelang_mla.kernels.decode.rows import at

TEXT = Path(__file__).with_name("boxes.cuh").read_text()
# Keys of a warp; elements of a chunk, chunks of half the latents of 512, and of a rope.
KEYS = 16
_CHUNK, _CHUNKS, _OF_ROPE = 64, 4, 1
# As cuTensorMapEncodeTiled numbers bfloat16, float16, swizzles of 128 bytes, and L2 that asks for as many.
_BF16, _F16, _SWIZZLE, _LINES = 9, 6, 3, 2


def key_of(T: Any, S: Any, work: Any, step: Any, thread: Any) -> Any:
    """The first key that a thread's warp has of a block."""
    return (work.first + step) * S.block_n + T.truncdiv(thread, WARP) * KEYS


def descriptor_of(T: Any, S: Any, kv: Any) -> Any:
    """What TMA is told of the cache: boxes of a chunk of a warp's keys."""
    pages, page_size, width = kv.shape
    strides = (T.int64(2), *(2 * T.cast(stride, T.int64) for stride in (kv.strides[1], kv.strides[0])))
    kind = _BF16 if S.dtype == T.bfloat16 else _F16
    box, each = (_CHUNK, KEYS, 1), (1, 1, 1)
    return T.create_tma_descriptor(
        kind, 3, kv.data, width, page_size, pages, *strides, *box, *each, 0, _SWIZZLE, _LINES, 0
    )


@macro
def page_of(T, S, inputs, work, step, thread):
    """The page of a warp's keys; -1 where these are behind the last."""
    key = T.alloc_var(T.int32, init=key_of(T, S, work, step, thread))
    i_page = T.alloc_var(T.int32, init=-1)
    if key < work.length:
        i_page = inputs.block_table[work.sequence, T.truncdiv(key, inputs.kv.shape[1])]
    return i_page


@macro
def load_boxes(T, S, inputs, memory, barriers, work, i_page, step, stage, phase, thread):
    """A block; returns the page of the next one, which takes as long to look up as half a block."""
    row = T.alloc_var(T.int32, init=T.truncmod(key_of(T, S, work, step, thread), inputs.kv.shape[1]))
    T.barrier_wait(barriers.left_empty[stage], phase)
    load_part(T, S, inputs.kv, memory.k_l, barriers.left_full, (0, _CHUNKS), stage, i_page, row, thread)
    if S.dim_rope:
        load_part(
            T, S, inputs.kv, memory.k_rope, barriers.left_full, (S.dim_nope, _OF_ROPE), stage, i_page, row, thread
        )
    T.barrier_arrive(barriers.left_full[stage])
    T.barrier_wait(barriers.right_empty[stage], phase)
    load_part(T, S, inputs.kv, memory.k_r, barriers.right_full, (S.half, _CHUNKS), stage, i_page, row, thread)
    T.barrier_arrive(barriers.right_full[stage])
    return page_of(T, S, inputs, work, step + 1, thread)


@macro
def load_part(T, S, kv, ring, full, part, stage, i_page, row, thread):
    """Of a warp's keys the elements that a ring holds: ``part`` is the first of them, and how many chunks they are."""
    T.call_extern(
        "handle", f"mla::boxes::load<{KEYS}, {part[1]}>", descriptor_of(T, S, kv), full[stage],
        at(T, ring[stage, 0, 0]), part[0], i_page, row, thread,
    )  # fmt: skip
