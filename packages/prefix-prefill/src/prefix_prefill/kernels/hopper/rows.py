"""The rows of a tile of the sm_90 kernel, as a consumer has them: tokens and heads, addresses, accumulators."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from prefix_prefill.kernels.hopper.config import begin_of, column_of
from prefix_prefill.kernels.hopper.softmax import acc_layout


@gluon.jit
def afresh(numbers):
    """The same, as if not known before: what is made of them is made again for each item, and takes no registers
    in between.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [numbers], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def rows_of(o_m, tile, C):
    """Token and head of a tile's rows, and whether there are such."""
    o_t = tile.i_tile * C.TOKENS + o_m // C.HEADS
    o_g = tile.i_hb * C.HEADS + o_m % C.HEADS
    m_row = (o_m < C.TOKENS * C.HEADS) & (o_t < tile.q_len) & (o_g < C.GROUP)
    return o_t, tile.i_kv * C.GROUP + gl.minimum(o_g, C.GROUP - 1), m_row


@gluon.jit
def own_columns(o_d, TILES: gl.constexpr, T: gl.constexpr, SIZE: gl.constexpr):
    """Which of the columns that tile T holds the head has and no tile before."""
    own = o_d < SIZE
    if begin_of(TILES, T, SIZE) < column_of(TILES, T):
        own = own & (o_d >= column_of(TILES, T))
    return own


@gluon.jit
def scaled(number, p_scale, offset):
    """A number times the scale that is there, if there are scales."""
    if p_scale is not None:
        number = number * gl.load(p_scale + offset)
    return number


@gluon.constexpr_function
def row_layout(tile):
    """Where rows of a tile are loaded and stored: as many threads side by side as take 16 bytes each."""
    across = min(tile // 8, 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def scale_rows(accs, factor, V, C):
    """Accumulators, tile by tile, times a factor for each row."""
    scaled_accs = ()
    for t in gl.static_range(len(V.OWN)):
        row_factor = gl.convert_layout(factor, gl.SliceLayout(1, acc_layout(C.V_TILES[V.OWN[t]])))
        scaled_accs = scaled_accs + (accs[t] * row_factor[:, None],)
    return scaled_accs


@gluon.jit
def scale_all(accs, factor, V):
    """Accumulators, tile by tile, times one number."""
    scaled_accs = ()
    for t in gl.static_range(len(V.OWN)):
        scaled_accs = scaled_accs + (accs[t] * factor,)
    return scaled_accs


@gluon.jit
def pointers_to(p, row, o_h, o_d, s):
    """Rows of heads [ROWS, TILE], by strides of (token, head, element); where the last one is None, elements lie side
    by side and the others are in units of 8.
    """
    o_d = o_d.to(gl.int64)[None, :]
    o_row = row.to(gl.int64) * s[0] + o_h.to(gl.int64) * s[1]
    if s[2] is None:
        o_row = o_row * 8
    else:
        o_d = o_d * s[2]
    return p + o_row[:, None] + o_d
