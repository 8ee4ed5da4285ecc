"""What the kernel for sm_90 does without TMA and WGMMA: rows of zeros, states, and sequences of one token."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lightning_attn.kernels.decay import base_two_rate, entering, kept_and_lost, seeing, unit_of
from lightning_attn.kernels.hopper_ring import piece_layout, pieces_of, width_of
from lightning_attn.kernels.schedule import (
    States,
    StateStrides,
    carried_slot,
    has_initial,
    snapshot_slot,
    state_pointers,
)


@gluon.constexpr_function
def tile_layout(columns, WARPS):
    """Rows x columns of 16-bit elements, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def whole_rows(sizes):
    """Rows of a state, rounded up to a power of two."""
    return max(sizes.BLOCK_D, 1 << (sizes.D - 1).bit_length())


@gluon.constexpr_function
def columns_of_token(sizes):
    """Columns of a state that are taken at a time: 64 registers of a thread."""
    rows = max(sizes.BLOCK_D, 1 << (sizes.D - 1).bit_length())
    return min(sizes.BLOCK_E, 64 * 32 * sizes.WARPS // rows)


@gluon.constexpr_function
def decoding_layout(COLUMNS, WARPS):
    """A state's tile [columns, rows], 16 bytes of a packed pool a thread.

    Of eight warps four have the rows, as where there are four, so that sums over rows have the same bits.
    """
    if WARPS == 8:
        return gl.BlockedLayout([2, 1], [16, 2], [2, 4], [0, 1])
    along = min(16, COLUMNS // 4)
    return gl.BlockedLayout([4, 1], [along, 32 // along], [1, WARPS], [0, 1])


@gluon.jit
def opaque(values):
    """The same values, opaque to compilers, which do not move this across the WGMMAs either.

    Otherwise what is computed from them is hoisted and kept in registers, of which there are none to spare.
    """
    bits: gl.constexpr = values.dtype.primitive_bitwidth
    if bits == 64:
        return gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [values], values.dtype, is_pure=False, pack=1)
    else:
        pack: gl.constexpr = 32 // bits
        return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [values], values.dtype, is_pure=False, pack=pack)


@gluon.jit
def hidden_zero(sizes: gl.constexpr):
    """0, which no compiler knows where programs go round: what is made of it they do not make ahead of all items, in
    more registers than there are. A multiple of 16 to them, as what memory is addressed with must be.
    """
    if sizes.APART:
        return opaque(gl.to_tensor(0).to(gl.int32)) * 16
    else:
        return 0


@gluon.jit
def zero_after(smem, length, ROWS: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr):
    """Zero a tile's rows from ``length`` on: they are another sequence's, and its NaN would survive a weight of 0."""
    layout: gl.constexpr = tile_layout(COLUMNS, WARPS)
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    b_tile = smem.load(layout)
    smem.store(gl.where(o_row[:, None] < length, b_tile, 0.0).to(b_tile.dtype))


@gluon.jit
def store_weights(
    buffers, rate, o_i, o_k, length, scale, REVERSED: gl.constexpr, SHORT: gl.constexpr, IN_UNITS: gl.constexpr
):
    """The weights with which chunks of this length see the state before them, and enter the one after."""
    tl.debug_barrier()
    if SHORT:
        o_i = opaque(o_i)
    if IN_UNITS:
        unit = unit_of(scale)
        buffers.seeing.store(seeing(rate, o_i, length, scale, REVERSED) * unit)
        scale = scale / unit
    else:
        buffers.seeing.store(seeing(rate, o_i, length, scale, REVERSED))
    if SHORT:
        o_k = opaque(o_k)
    buffers.entering.store(entering(rate, o_k, length, scale, REVERSED))
    # Here, and not in the loop over chunks.
    tl.debug_barrier()


@gluon.jit
def store_zeros(o, begin, end, column, sizes: gl.constexpr):
    """Zero rows begin to end of one head's BLOCK_E columns."""
    CHUNK: gl.constexpr = sizes.CHUNK
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    layout: gl.constexpr = tile_layout(BLOCK_E, sizes.WARPS)
    o_row = hidden_zero(sizes) + gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    o_e = column + gl.arange(0, BLOCK_E, gl.SliceLayout(0, layout))
    b_zero = gl.zeros([CHUNK, BLOCK_E], o.p.dtype.element_ty, layout)
    for row in range(begin, end, CHUNK):
        p_tile = o.p + (row + o_row)[:, None].to(gl.int64) * o.stride + o_e[None, :] * o.element
        m = (row + o_row)[:, None] < end
        if sizes.E % BLOCK_E:
            m = m & (o_e[None, :] < sizes.E)
        gl.store(p_tile, b_zero, mask=m)


@gluon.jit
def zero_state(sizes: gl.constexpr):
    """A state's tile, [BLOCK_E, D], in pieces of BLOCK_D rows."""
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    S = ()
    for i in gl.static_range(pieces_of(sizes)):
        S = S + (gl.zeros([BLOCK_E, width_of(sizes, i)], gl.float32, piece_layout(sizes, i)),)
    return S


@gluon.jit
def rows_of_piece(o_d, p: gl.constexpr, sizes: gl.constexpr):
    """Rows of piece p of a state. o_d: of the first one."""
    if width_of(sizes, p) < sizes.BLOCK_D:
        return p * sizes.BLOCK_D + gl.arange(0, width_of(sizes, p), gl.SliceLayout(0, piece_layout(sizes, p)))
    else:
        return o_d + p * sizes.BLOCK_D


@gluon.jit
def columns_of_piece(o_e, p: gl.constexpr, sizes: gl.constexpr):
    """Columns of a state, or what there is of each, where piece p has them. o_e: where the first one has them."""
    return gl.convert_layout(o_e, gl.SliceLayout(1, piece_layout(sizes, p)))


@gluon.jit
def load_tile(states, slot, i_h, o_d, o_e, sizes: gl.constexpr, FRESH: gl.constexpr = False):
    """A tile of a state, [e, d] in float32, 0 outside of it. FRESH: written meanwhile, so that L1 may not have it."""
    p_tile = state_pointers(states, slot, i_h.to(gl.int64), o_d, o_e)
    cache: gl.constexpr = ".cg" if FRESH else ".ca"
    if sizes.D % o_d.shape[0] or sizes.E % sizes.BLOCK_E:
        m = (o_d[None, :] < sizes.D) & (o_e[:, None] < sizes.E)
        b_S = gl.load(p_tile, mask=m, other=0.0, cache_modifier=cache)
    else:
        b_S = gl.load(p_tile, cache_modifier=cache)
    return b_S.to(gl.float32)


@gluon.jit
def load_state(states, slot, i_h, o_d, o_e, sizes: gl.constexpr, FRESH: gl.constexpr = False):
    """All pieces of a state's tile. o_d: rows of the first one."""
    S = ()
    for i in gl.static_range(pieces_of(sizes)):
        o_row, o_column = rows_of_piece(o_d, i, sizes), columns_of_piece(o_e, i, sizes)
        S = S + (load_tile(states, slot, i_h, o_row, o_column, sizes, FRESH),)
    return S


@gluon.jit
def state_before(pools, batch, span, i_h, o_d, o_e, sizes: gl.constexpr):
    """The state before a segment: what was carried to it, or what its sequence begins from; and whether it was carried.

    Of sequences of SUMMED segments at most none is: their programs sum up what segments leave.
    """
    S = zero_state(sizes)
    is_carried = False
    if sizes.SEGMENT:
        is_carried = span.length > sizes.SEGMENT
        if sizes.SUMMED:
            is_carried = span.length > sizes.SEGMENT * sizes.SUMMED
        if is_carried:
            i_state = carried_slot(batch, span.i_n, span.first, sizes.SEGMENT) + span.i_segment
            S = load_state(pools.carried, i_state.to(gl.int64), i_h, o_d, o_e, sizes)
    if pools.initial.p is not None:
        if has_initial(batch, span.i_n) and not is_carried:
            S = load_state(pools.initial, span.slot, i_h, o_d, o_e, sizes)
    return S, is_carried


@gluon.jit
def store_tile(p_tile, o_d, o_e, b_S, sizes: gl.constexpr):
    """Store what lies inside a state."""
    b_S = b_S.to(p_tile.dtype.element_ty)
    if sizes.D % o_d.shape[0] or sizes.E % sizes.BLOCK_E:
        gl.store(p_tile, b_S, mask=(o_d[None, :] < sizes.D) & (o_e[:, None] < sizes.E))
    else:
        gl.store(p_tile, b_S)


@gluon.jit
def store_state(states, slot, i_h, o_d, o_e, S, sizes: gl.constexpr):
    """The reverse of load_state."""
    strides = states.strides
    # Only here: the 32 offsets along d would otherwise be computed before the main loop and kept through it.
    s_d = opaque(gl.to_tensor(strides.d).to(gl.int64))
    opaque_states = States(states.p, StateStrides(strides.slot, strides.head, s_d, strides.e))
    p_tile = state_pointers(opaque_states, slot, i_h.to(gl.int64), o_d, o_e)
    for i in gl.static_range(pieces_of(sizes)):
        if width_of(sizes, i) < sizes.BLOCK_D:
            o_row, o_column = rows_of_piece(o_d, i, sizes), columns_of_piece(o_e, i, sizes)
            p_last = state_pointers(opaque_states, slot, i_h.to(gl.int64), o_row, o_column)
            store_tile(p_last, o_row, o_column, S[i], sizes)
        else:
            store_tile(p_tile + i * sizes.BLOCK_D * s_d, o_d + i * sizes.BLOCK_D, o_e, S[i], sizes)


@gluon.jit
def store_snapshots(snapshots, batch, states, i_n, at, i_h, o_d, o_e, S, sizes: gl.constexpr):
    """Store the state at this row for every snapshot that wants it."""
    for i_p in range(snapshots.count):
        slot = snapshot_slot(snapshots, batch, i_n, i_p, at, sizes.CHUNK)
        if slot >= 0:
            store_state(states, slot, i_h, o_d, o_e, S, sizes)


@gluon.jit
def single_token(rows, row, column, pools, has, slot, i_h, decays, sizes: gl.constexpr):
    """A sequence of one token, in float32: it is bound by its state, for which no ring of chunks is set up.

    rows: HeadRows. has: whether it starts from a state.
    """
    COLUMNS: gl.constexpr = columns_of_token(sizes)
    for i in gl.static_range(sizes.BLOCK_E // COLUMNS):
        first = column + i * COLUMNS
        loaded = load_token(rows, row, first, pools.initial, has, slot, i_h, COLUMNS, sizes)
        take_token(loaded, rows.o, row, decays, pools.final, slot, i_h, sizes)


@gluon.jit
def load_token(rows, row, column, initial, has, slot, i_h, COLUMNS: gl.constexpr, sizes: gl.constexpr):
    """What ``take_token`` needs for so many columns of a state: where they are, these, and q, k and v."""
    D: gl.constexpr = whole_rows(sizes)
    layout: gl.constexpr = decoding_layout(COLUMNS, sizes.WARPS)
    q = rows.q
    k = rows.k
    v = rows.v
    row = row.to(gl.int64)
    o_d = hidden_zero(sizes) + gl.arange(0, D, gl.SliceLayout(0, layout))
    o_e = column + gl.arange(0, COLUMNS, gl.SliceLayout(1, layout))
    b_S = gl.zeros([COLUMNS, D], gl.float32, layout)
    if initial.p is not None:
        if has:
            b_S = load_tile(initial, slot, i_h, o_d, o_e, sizes)
    b_q = gl.load(q.p + row * q.stride + o_d * q.element, mask=o_d < sizes.D, other=0.0).to(gl.float32)
    b_k = gl.load(k.p + row * k.stride + o_d * k.element, mask=o_d < sizes.D, other=0.0).to(gl.float32)
    b_v = gl.load(v.p + row * v.stride + o_e * v.element, mask=o_e < sizes.E, other=0.0).to(gl.float32)
    return (o_d, o_e), (b_S, b_q, b_k, b_v)


@gluon.jit
def take_token(loaded, o, row, decays, final, slot, i_h, sizes: gl.constexpr):
    """Store the state behind the token, and its output."""
    o_d, o_e = loaded[0]
    b_S, b_q, b_k, b_v = loaded[1]
    kept, lost = kept_and_lost(base_two_rate(decays.p_slopes, i_h), 1)
    b_S = b_S * kept + (b_S * lost + b_v[:, None] * b_k[None, :])
    store_tile(state_pointers(final, slot, i_h.to(gl.int64), o_d, o_e), o_d, o_e, b_S, sizes)
    b_o = gl.sum(b_S * b_q[None, :], axis=1) * decays.scale
    p_o = o.p + row.to(gl.int64) * o.stride + o_e * o.element
    if sizes.IN_TURN == 2:
        b_o = b_o + gl.load(p_o, mask=o_e < sizes.E, other=0.0)
    gl.store(p_o, b_o.to(o.p.dtype.element_ty), mask=o_e < sizes.E)
