"""Joined levels of a cascade on sm_90: where the keys of each end, in whose last tile of keys the rest is masked.

A sequence's keys are those of the levels before the last, each from a whole tile on, and then its own: kernels/join.py.
So the main loop is that of one level: only what a tile holds past the end of its level is seen by no row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def load_end(batch, i_n, LEVEL: gl.constexpr):
    """Where the keys of a level of sequence ``i_n`` end, which stands behind the lengths of all sequences."""
    real = (i_n >= 0) & (i_n < batch.num_sequences)
    p_end = batch.p_seqlens + (LEVEL + 1) * batch.num_sequences.to(gl.int64) + i_n
    return gl.load(p_end, mask=real, other=0)


@gluon.jit
def end_at(key, end, loop, C):
    """The end of the level that the tile from ``key`` on belongs to; ``end`` is the last level's."""
    for i in gl.static_range(C.JOINED):
        own = loop.ends[C.JOINED - 1 - i]
        end = gl.where(key < own, own, end)
    return end


@gluon.jit
def partial_tiles(loop, C):
    """The tiles of a loop in which a level ends that does not fill it; of a level that does, one before all."""
    tiles = ()
    for i in gl.static_range(C.JOINED):
        end = loop.ends[i]
        tile = end // C.BLOCK_N - loop.start // C.BLOCK_N
        tiles = tiles + (gl.where(end % C.BLOCK_N == 0, -1, tile),)
    return tiles


@gluon.jit
def is_full(i, tiles, C):
    """Whether tile i is none of these."""
    full = i >= 0
    for level in gl.static_range(C.JOINED):
        full = full & (i != tiles[level])
    return full
