"""Cascades on sm_90: the parts that levels leave for the last one, which adds them to its own results."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from prefix_prefill.kernels.hopper.config import ROWS, begin_of
from prefix_prefill.kernels.hopper.rows import rows_of, scale_rows
from prefix_prefill.kernels.hopper.softmax import acc_layout
from prefix_prefill.kernels.softmax import finite, log_sum_exp


@gluon.jit
def store_pieces(pointers, i_group, pieces, tile, C):
    """Of each row in how many parts its results are, once for all heads."""
    o_m = i_group * ROWS + gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [4], [0]))
    o_t, o_h, m_row = rows_of(o_m, tile, C)
    p_pieces = pointers.parts[2] + (tile.begin + o_t).to(gl.int64)
    gl.store(p_pieces, o_t * 0 + pieces, mask=m_row & (o_h == 0) & (pieces > 0))


@gluon.jit
def with_levels(pointers, i_group, accs, sums, tile, rows, V, C):
    """A tile's results with the parts of its rows of the levels before: accumulators, their max, row sum and lse."""
    row_sum, lse = sums
    o_m = i_group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, V.L_S))
    o_t, _, m_row = rows_of(o_m, tile, C)
    row = (tile.begin + o_t).to(gl.int64)
    new_max = lse
    for i in gl.static_range(C.CARRIED):
        pieces = gl.load(pointers.parts[3 * i + 5] + row, mask=m_row, other=0)
        for i_piece in range(gl.max(pieces, 0)):
            new_max = gl.maximum(new_max, load_lse(pointers, o_m, i, i_piece, pieces, tile, rows, C))
    new_sum = gl.exp(lse - finite(new_max))
    accs = scale_rows(accs, new_sum / gl.where(row_sum == 0, 1.0, row_sum), V, C)
    for i in gl.static_range(C.CARRIED):
        pieces = gl.load(pointers.parts[3 * i + 5] + row, mask=m_row, other=0)
        for i_piece in range(gl.max(pieces, 0)):
            weight = gl.exp(load_lse(pointers, o_m, i, i_piece, pieces, tile, rows, C) - finite(new_max))
            new_sum += weight
            added = ()
            for t in gl.static_range(len(V.OWN)):
                added = added + (
                    with_part(accs[t], weight, pointers.parts[3 * i + 3], i_group, i_piece, tile, rows, t, V, C),
                )
            accs = added
    return accs, new_max, new_sum, log_sum_exp(new_max, new_sum)


@gluon.jit
def place_of(o_m, i_piece, tile, rows, C):
    """Where a level has put part ``i_piece`` of rows."""
    o_t, o_h, _ = rows_of(o_m, tile, C)
    row = (tile.begin + o_t).to(gl.int64)
    return ((row * 0 + i_piece) * rows + row) * (C.GROUP * C.HEADS_KV) + o_h


@gluon.jit
def load_lse(pointers, o_m, i: gl.constexpr, i_piece, pieces, tile, rows, C):
    """The lse of rows' parts of level i, -inf where a row has fewer."""
    _, _, m_row = rows_of(o_m, tile, C)
    p_lse = pointers.parts[3 * i + 4] + place_of(o_m, i_piece, tile, rows, C)
    return gl.load(p_lse, mask=m_row & (i_piece < pieces), other=float("-inf"))


@gluon.jit
def with_part(acc, weight, p_part, i_group, i_piece, tile, rows, T: gl.constexpr, V, C):
    """Columns of the tile that is the consumer's number T, with those of one more part by its weight.

    Of a weight of 0 there may be no part: nothing is loaded.
    """
    TILE: gl.constexpr = C.V_TILES[V.OWN[T]]
    BEGIN: gl.constexpr = begin_of(C.V_TILES, V.OWN[T], C.DV)
    layout: gl.constexpr = acc_layout(TILE)
    o_m = i_group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    o_d = BEGIN + gl.arange(0, TILE, gl.SliceLayout(0, layout))
    weight = gl.convert_layout(weight, gl.SliceLayout(1, layout))
    p_tile = p_part + place_of(o_m, i_piece, tile, rows, C)[:, None] * C.DV + o_d[None, :]
    b_part = gl.load(p_tile, mask=(weight != 0)[:, None] & (o_d < C.DV)[None, :], other=0.0)
    return acc + b_part * weight[:, None]
