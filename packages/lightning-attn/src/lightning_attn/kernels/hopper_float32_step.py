"""A chunk of ``hopper_float32``: its outputs, and the state after it."""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from lightning_attn.kernels.decay import decay_over, decayed, entering, seeing
from lightning_attn.kernels.hopper_parts import (
    allocate_parts,
    issue_product,
    load_rows,
    product_layout,
    rows_layout,
    store_parts,
    there,
)
from lightning_attn.kernels.hopper_ring import pieces_of
from lightning_attn.kernels.hopper_rows import opaque


class Pieces(NamedTuple):
    """Shared memory: bfloat16 parts of two pieces of q, k and the state, and of a chunk's values.

    weighted: values as they enter the state, then the scores. within: weights of scores, in float32.
    """

    q: Any
    k: Any
    S: Any
    v: Any
    weighted: Any
    within: Any


@gluon.jit
def allocate_pieces(sizes: gl.constexpr):
    CHUNK: gl.constexpr = sizes.CHUNK
    BLOCK_D: gl.constexpr = sizes.BLOCK_D
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    q = ()
    k = ()
    S = ()
    for i in gl.static_range(min(2, pieces_of(sizes))):  # noqa: B007 (Triton takes no _)
        q = q + (allocate_parts(CHUNK, BLOCK_D),)
        k = k + (allocate_parts(CHUNK, BLOCK_D),)
        S = S + (allocate_parts(BLOCK_E, BLOCK_D),)
    v = allocate_parts(CHUNK, BLOCK_E)
    weighted = allocate_parts(CHUNK, BLOCK_E)
    # Swizzled so that a warp's eight rows have no bank conflicts.
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    within = gl.allocate_shared_memory(gl.float32, [CHUNK, CHUNK], swizzled)
    return Pieces(q, k, S, v, weighted, within)


@gluon.jit
def weights_within(rates, scale, sizes: gl.constexpr):
    """[keys, queries]: the weight with which a chunk's queries see its keys."""
    L_O: gl.constexpr = product_layout(sizes.CHUNK)
    o_i = opaque(gl.arange(0, sizes.CHUNK, gl.SliceLayout(0, L_O)))
    o_j = opaque(gl.arange(0, sizes.CHUNK, gl.SliceLayout(1, L_O)))
    distance = o_i[None, :] - o_j[:, None]
    if sizes.REVERSED:
        distance = -distance
    weights = decay_over(rates[0], rates[1], gl.maximum(distance, 0)) * scale
    return gl.where(distance >= 0, weights, 0.0)


@gluon.jit
def load_piece(rows, row, length, p: gl.constexpr, sizes: gl.constexpr):
    """Piece p of a chunk of q or k."""
    BLOCK_D: gl.constexpr = sizes.BLOCK_D
    REST: gl.constexpr = sizes.D - p * BLOCK_D
    return load_rows(rows, row, length, p * BLOCK_D, sizes.D, BLOCK_D, sizes, MASKED=REST < BLOCK_D)


@gluon.jit
def store_values(pieces, v, rates, scale, length, sizes: gl.constexpr):
    """Parts of a chunk's values, as they are and as they enter the state."""
    o_row = opaque(gl.arange(0, sizes.CHUNK, gl.SliceLayout(1, rows_layout(sizes.BLOCK_E))))
    store_parts(there(pieces.v), v)
    weights = entering(rates[0], o_row, length, scale, sizes.REVERSED, rates[1])
    store_parts(there(pieces.weighted), v * weights[:, None])


@gluon.jit
def first_pieces(pieces, q, k, v, S, rates, scale, row, length, column, sizes: gl.constexpr):
    """Weights of scores, parts of the first chunk's values and first piece, and the next piece of q and k."""
    PIECES: gl.constexpr = pieces_of(sizes)
    b_q = load_piece(q, row, length, 0, sizes)
    b_k = load_piece(k, row, length, 0, sizes)
    b_v = load_rows(v, row, length, column, sizes.E, sizes.BLOCK_E, sizes)
    store_parts(there(pieces.q[0]), b_q)
    store_parts(there(pieces.k[0]), b_k)
    store_parts(there(pieces.S[0]), S[0])
    store_values(pieces, b_v, rates, scale, length, sizes)
    pieces.within.store(weights_within(rates, scale, sizes))
    if PIECES > 1:
        b_q = load_piece(q, row, length, 1, sizes)
        b_k = load_piece(k, row, length, 1, sizes)
    return b_q, b_k


@gluon.jit
def step(pieces, ahead, following, o, S, rates, scale, row, length, column, sizes: gl.constexpr):
    """One chunk: store its outputs, return the state after it and what is ahead.

    ahead: of the second piece of q and k, where there are two, or of the next chunk's.
    following: q, k, v, and of the next chunk the first row and how many there are from it on.
    """
    PIECES: gl.constexpr = pieces_of(sizes)
    CHUNK: gl.constexpr = sizes.CHUNK
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    L_O: gl.constexpr = product_layout(CHUNK)
    rate, rest = rates
    q, k, v, next_row, next_length = following
    b_q, b_k = ahead
    b_zero = gl.zeros([CHUNK, CHUNK], gl.float32, L_O)
    b_scores = b_zero  # [keys, queries]
    b_seen = b_zero  # [BLOCK_E, queries]
    next_S = ()
    for p in gl.static_range(PIECES):
        fence_async_shared()
        tl.debug_barrier()
        scores = issue_product(there(pieces.k[p % 2]), there(pieces.q[p % 2]), b_zero, False, True)
        seen = issue_product(there(pieces.S[p % 2]), there(pieces.q[p % 2]), b_zero, False, True)
        update = issue_product(there(pieces.weighted), there(pieces.k[p % 2]), b_zero, True, False)
        if p + 1 < PIECES:
            store_parts(there(pieces.q[(p + 1) % 2]), opaque(b_q))
            store_parts(there(pieces.k[(p + 1) % 2]), opaque(b_k))
            store_parts(there(pieces.S[(p + 1) % 2]), opaque(S[p + 1]))
        # Of two pieces at most.
        if p == 0:
            b_q = load_piece(q, next_row, next_length, 0, sizes)
            b_k = load_piece(k, next_row, next_length, 0, sizes)
        scores, seen, update = warpgroup_mma_wait(0, deps=[scores, seen, update])
        b_scores = b_scores + scores
        b_seen = b_seen + seen
        next_S = next_S + (decayed(S[p], rate, length, rest) + update,)
    # Past this barrier no warp reads parts of a piece, or the weighted values, any more.
    tl.debug_barrier()
    scores_parts = there(pieces.weighted)
    store_parts(scores_parts, b_scores * pieces.within.load(L_O))
    fence_async_shared()
    tl.debug_barrier()
    out = issue_product(there(pieces.v), scores_parts, b_zero, True, False)
    store_parts(there(pieces.q[0]), opaque(b_q))
    store_parts(there(pieces.k[0]), opaque(b_k))
    store_parts(there(pieces.S[0]), opaque(next_S[0]))
    if PIECES > 1:
        b_q = load_piece(q, next_row, next_length, 1, sizes)
        b_k = load_piece(k, next_row, next_length, 1, sizes)
    b_v = load_rows(v, next_row, next_length, column, sizes.E, BLOCK_E, sizes)
    o_i = opaque(gl.arange(0, CHUNK, gl.SliceLayout(0, L_O)))
    o_e = column + opaque(gl.arange(0, BLOCK_E, gl.SliceLayout(1, L_O)))
    p_tile = o.p + row.to(gl.int64) * o.stride
    p_tile = p_tile + o_i[None, :].to(gl.int64) * o.stride + o_e[:, None].to(gl.int64) * o.element
    m = (o_i[None, :] < length) & (o_e[:, None] < sizes.E)
    b_seen = b_seen * seeing(rate, o_i, length, scale, sizes.REVERSED, rest)[None, :]
    if sizes.IN_TURN == 2:
        b_seen = b_seen + gl.load(p_tile, mask=m, other=0.0)
    b_o = b_seen + warpgroup_mma_wait(0, deps=[out])  # [BLOCK_E, queries]
    # Nor the values and the scores.
    tl.debug_barrier()
    store_values(pieces, b_v, rates, scale, gl.minimum(next_length, CHUNK), sizes)
    if sizes.BESIDE:
        gl.atomic_add(p_tile, b_o, mask=m, sem="relaxed")
    else:
        gl.store(p_tile, b_o, mask=m)
    return next_S, (b_q, b_k)


@gluon.jit
def follow(parts, rows, S, rates, scale, start, end, chunks, column, sizes: gl.constexpr):
    """The state after so many chunks, the first of which begins at ``start``: no row from ``end`` on is theirs."""
    CHUNK: gl.constexpr = sizes.CHUNK
    stride: gl.constexpr = -CHUNK if sizes.REVERSED else CHUNK
    k, v = rows
    b_k = load_piece(k, start, end - start, 0, sizes)
    b_v = load_rows(v, start, end - start, column, sizes.E, sizes.BLOCK_E, sizes)
    for i in range(chunks):
        row = start + i * stride
        following = (row + stride, gl.where(i + 1 < chunks, end - row - stride, 0))
        length = gl.minimum(end - row, CHUNK)
        S, b_k, b_v = own_step(parts, rows, (b_k, b_v), following, S, rates, scale, row, length, column, sizes)
    return S


@gluon.jit
def own_step(parts, rows, now, following, S, rates, scale, row, length, column, sizes: gl.constexpr):
    """The state after one chunk, without its outputs, and the next chunk's v and first piece of k.

    parts: of keys, one or two pieces, and of weighted values. rows: k and v. now: this chunk's v and first piece of k.
    following: of the next chunk the first row, and how many there are from it on.
    """
    PIECES: gl.constexpr = pieces_of(sizes)
    BLOCK_D: gl.constexpr = sizes.BLOCK_D
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    rate, rest = rates
    next_row, next_length = following
    k_parts, weighted = parts
    k, v = rows
    b_k, b_v = now
    o_row = opaque(gl.arange(0, sizes.CHUNK, gl.SliceLayout(1, rows_layout(sizes.BLOCK_E))))
    weighted = there(weighted)
    store_parts(weighted, b_v * entering(rate, o_row, length, scale, sizes.REVERSED, rest)[:, None])
    b_zero = gl.zeros([BLOCK_E, BLOCK_D], gl.float32, product_layout(BLOCK_D))
    store_parts(there(k_parts[0]), b_k)
    next_S = ()
    for p in gl.static_range(PIECES):
        if p + 1 < PIECES:
            b_k = load_piece(k, row, length, p + 1, sizes)
        else:
            b_k = load_piece(k, next_row, next_length, 0, sizes)
            b_v = load_rows(v, next_row, next_length, column, sizes.E, BLOCK_E, sizes)
        fence_async_shared()
        tl.debug_barrier()
        update = issue_product(weighted, there(k_parts[p % 2]), b_zero, True, False)
        if p + 1 < PIECES:
            store_parts(there(k_parts[(p + 1) % 2]), b_k)
        update = warpgroup_mma_wait(0, deps=[update])
        next_S = next_S + (decayed(S[p], rate, length, rest) + update,)
    # Past this barrier no warp reads the parts any more.
    tl.debug_barrier()
    return next_S, b_k, b_v
