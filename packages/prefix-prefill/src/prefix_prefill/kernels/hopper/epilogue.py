"""What a consumer warpgroup of the sm_90 kernel does with its accumulators in the end: results, or partial ones."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from prefix_prefill.kernels.hopper.config import ROWS, begin_of
from prefix_prefill.kernels.hopper.items import pieces_if_first, tile_of
from prefix_prefill.kernels.hopper.levels import store_pieces, with_levels
from prefix_prefill.kernels.hopper.rows import (
    afresh,
    own_columns,
    pointers_to,
    row_layout,
    rows_of,
    scale_all,
    scale_rows,
    scaled,
)
from prefix_prefill.kernels.hopper.softmax import HEADROOM_INVERSE, acc_layout, natural_log_sum_exp
from prefix_prefill.kernels.softmax import LN_2, finite, log_sum_exp


@gluon.jit
def finish(pointers, memory, i_group, accs, sums, table, i_item, scores, numbers, sizes, V, C):
    """Epilogue: results, or, of a tile in parts or of a level of a cascade, partial ones."""
    running_max, row_sum = sums
    i_group = afresh(i_group)
    # Looked up again: through the main loop it would take registers.
    tile = tile_of(table, i_item, C, 4)
    if C.IS_FP8 and not C.NEW_KV:
        if not C.V_TOKENS:
            v_scale = scaled(numbers.v_scale, pointers.scales[1], tile.i_kv.to(gl.int64) * numbers.strides.v_scale)
            accs = scale_all(accs, v_scale, V)
        if V.RESCALED:
            row_sum = row_sum * HEADROOM_INVERSE
            accs = scale_all(accs, HEADROOM_INVERSE, V)
    lse = natural_log_sum_exp(running_max, row_sum, 1.0 if C.SOFTCAP else scores.softmax_scale)
    pieces = 0
    if C.SHARED or C.CARRIED:
        pieces = pieces_if_first(table, i_item, 4)
    if C.CARRIED:
        running_max = running_max * LN_2
        if tile.valid & (pieces > 0):
            sums = (row_sum, lse)
            accs, running_max, row_sum, lse = with_levels(pointers, i_group, accs, sums, tile, sizes.rows, V, C)
    if C.SHARED:
        store_part(pointers, i_group, accs, row_sum, lse, tile, sizes.rows, V, C)
        if V.OWN[0] == 0:
            store_pieces(pointers, i_group, pieces, tile, C)
    else:
        whole = tile.part < 0
        if C.IN_PARTS:
            if not whole:
                store_part(pointers, i_group, accs, row_sum, lse, tile, sizes.rows, V, C)
        if whole:
            store_whole(pointers, memory, i_group, accs, (running_max, row_sum, lse), tile, numbers, sizes, V, C)


@gluon.jit
def store_whole(pointers, memory, i_group, accs, sums, tile, numbers, sizes, V, C):
    """The results of a tile that is not cut: with the sink, lse and the output over its scale."""
    running_max, row_sum, lse = sums
    o_m = i_group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, V.L_S))
    o_t, o_h, m_row = rows_of(o_m, tile, C)
    if pointers.sinks is not None:
        if not C.CARRIED:
            running_max = running_max * LN_2
        b_sink = gl.load(pointers.sinks + o_h).to(gl.float32)
        b_sink = gl.where(tile.valid, b_sink, float("-inf"))
        new_max = gl.maximum(running_max, b_sink)
        rescale = gl.exp(running_max - finite(new_max))
        row_sum = row_sum * rescale + gl.exp(b_sink - finite(new_max))
        accs = scale_rows(accs, rescale, V, C)
        lse = log_sum_exp(new_max, row_sum)
    if pointers.lse is not None and V.OWN[0] == 0:
        row = (tile.begin + o_t).to(gl.int64)
        gl.store(pointers.lse + o_h.to(gl.int64) * sizes.lse_head + row * sizes.lse_token, lse, mask=m_row)
    out_scale = scaled(numbers.out_scale, pointers.scales[2], 0)
    sum_inverse = 1.0 / (gl.where(row_sum == 0, 1.0, row_sum) * out_scale)
    accs = scale_rows(accs, sum_inverse, V, C)
    store_out(pointers, memory, i_group, accs, tile, numbers.strides, V, C)


@gluon.jit
def store_part(pointers, i_group, accs, row_sum, lse, tile, rows, V, C):
    """A consumer's partial outputs, normalised, and their lse: where, ``merge.write_entry`` has said."""
    p_part = pointers.parts[0]
    p_part_lse = pointers.parts[1]
    accs = scale_rows(accs, 1.0 / gl.where(row_sum == 0, 1.0, row_sum), V, C)
    if V.OWN[0] == 0:
        o_m = i_group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, V.L_S))
        _, _, m_row = rows_of(o_m, tile, C)
        gl.store(p_part_lse + place_of_part(o_m, tile, rows, C), lse, mask=m_row)
    for t in gl.static_range(len(V.OWN)):
        store_columns_of_part(p_part, i_group, accs[t], tile, rows, t, V, C)


@gluon.jit
def store_columns_of_part(p_part, i_group, acc, tile, rows, T: gl.constexpr, V, C):
    """The columns of the tile that is the consumer's number T."""
    TILE: gl.constexpr = C.V_TILES[V.OWN[T]]
    BEGIN: gl.constexpr = begin_of(C.V_TILES, V.OWN[T], C.DV)
    layout: gl.constexpr = acc_layout(TILE)
    o_m = i_group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    o_d = BEGIN + gl.arange(0, TILE, gl.SliceLayout(0, layout))
    _, _, m_row = rows_of(o_m, tile, C)
    p_tile = p_part + place_of_part(o_m, tile, rows, C)[:, None] * C.DV + o_d[None, :]
    gl.store(p_tile, acc, mask=m_row[:, None] & own_columns(o_d, C.V_TILES, V.OWN[T], C.DV)[None, :])


@gluon.jit
def place_of_part(o_m, tile, rows, C):
    """Where the partial results of rows go, as ``merging.merge_pieces`` looks for them."""
    o_t, o_h, _ = rows_of(o_m, tile, C)
    row = tile.part.to(gl.int64) * rows + tile.begin + o_t
    of_piece = row * (C.GROUP * C.HEADS_KV) + o_h
    return gl.where(tile.by_share, tile.part.to(gl.int64) * (C.GROUPS * ROWS) + o_m, of_piece)


@gluon.jit
def store_out(pointers, memory, i_group, accs, tile, strides, V, C):
    """A consumer's outputs."""
    out_dtype: gl.constexpr = pointers.out.dtype.element_ty
    # Through the memory of q, so that each row is stored in whole lines.
    THROUGH: gl.constexpr = memory.out is not None and out_dtype == pointers.q.dtype.element_ty
    if THROUGH:
        tl.debug_barrier()
        for t in gl.static_range(len(V.OWN)):
            memory.out[V.OWN[t]].index(i_group).store(accs[t].to(out_dtype))
        tl.debug_barrier()
    for t in gl.static_range(len(V.OWN)):
        store_columns(pointers, memory, i_group, accs[t], tile, strides, THROUGH, t, V, C)


@gluon.jit
def store_columns(
    pointers, memory, i_group, acc, tile, strides, THROUGH: gl.constexpr, T: gl.constexpr, V, C
):  # fmt: skip
    """The columns of the tile that is the consumer's number T."""
    TILE: gl.constexpr = C.V_TILES[V.OWN[T]]
    BEGIN: gl.constexpr = begin_of(C.V_TILES, V.OWN[T], C.DV)
    layout: gl.constexpr = row_layout(TILE) if THROUGH else acc_layout(TILE)
    o_m = i_group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    o_d = BEGIN + gl.arange(0, TILE, gl.SliceLayout(0, layout))
    o_t, o_h, m_row = rows_of(o_m, tile, C)
    if THROUGH:
        b_out = memory.out[V.OWN[T]].index(i_group).load(layout)
    else:
        if C.LIMIT:
            acc = gl.where(acc > C.LIMIT, C.LIMIT, gl.where(acc < -C.LIMIT, -C.LIMIT, acc))
        b_out = acc.to(pointers.out.dtype.element_ty)
    p_tile = pointers_to(pointers.out, tile.begin + o_t, o_h, o_d, strides.out)
    gl.store(p_tile, b_out, mask=m_row[:, None] & own_columns(o_d, C.V_TILES, V.OWN[T], C.DV)[None, :])
