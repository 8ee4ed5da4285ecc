"""Masks of tree drafts on sm_90: 63 bits a row, in shared memory, and what they leave of a tile of scores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from prefix_prefill.kernels.softmax import halves_of


@gluon.jit
def store_masks(p_draft, row, o_t, m_row, i_group, positions, sizes, C):
    """The halves of rows' masks into the memory behind that of their positions, causality in them."""
    bits = gl.load(p_draft + row, mask=m_row, other=0)
    if C.HAS_RIGHT:
        last = gl.minimum(o_t + gl.minimum(sizes.right, 62), 62).to(gl.int64)
        bits = bits & (((last * 0 + 2) << last) - 1)
    low, high = halves_of(bits)
    positions.index(C.GROUPS + i_group).store(low)
    positions.index(2 * C.GROUPS + i_group).store(high)


@gluon.jit
def word_of(low, high, o_first, end):
    """The bits of 32 keys from new token ``o_first`` on, below 0 older ones, which are seen, as all before ``end``."""
    shift = gl.minimum(gl.maximum(o_first, 0), 63)
    upper = gl.where(shift < 32, (high << 1) << (31 - gl.minimum(shift, 31)), 0)
    # Logical shifts: the highest bit of ``low`` is no sign.
    lower = gl.where(shift < 32, shifted(low, gl.minimum(shift, 31)), shifted(high, gl.maximum(shift - 32, 0)))
    word = lower | upper
    older = gl.minimum(gl.maximum(-o_first, 0), 31)
    word = gl.where(o_first < 0, (low << older) | ((1 << older) - 1), word)
    word = gl.where(o_first <= -32, -1, word)
    exist = gl.minimum(gl.maximum(end, 0), 31)
    return gl.where(end >= 32, word, word & ((1 << exist) - 1))


@gluon.jit
def shifted(bits, by):
    """Bits to the right, zeros from the left."""
    return gl.where(by == 0, bits, (bits >> 1 & 0x7FFFFFFF) >> gl.maximum(by - 1, 0))


@gluon.jit
def only_drafted(scores, low, high, o_first, end, V, C):
    """Scores [ROWS, BLOCK_N] of keys from new token ``o_first`` on, -inf where a row's mask, or ``end``, has it so.

    Columns by registers and by threads apart, as WGMMA lays them out: bits to be tested are then constants.
    """
    WORDS: gl.constexpr = C.BLOCK_N // 32
    b_s = gl.reshape(scores, [scores.shape[0], C.BLOCK_N // 8, 4, 2])
    layout: gl.constexpr = b_s.type.layout
    L_WORD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    group = gl.arange(0, C.BLOCK_N // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    group = group[None, :, None, None]
    thread = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))[None, None, :, None]
    register = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))[None, None, None, :]
    words = gl.convert_layout(word_of(low, high, o_first, end), L_WORD)[:, None, None, None]
    for i in gl.static_range(1, WORDS):
        word = gl.convert_layout(word_of(low, high, o_first + 32 * i, end - 32 * i), L_WORD)[:, None, None, None]
        words = gl.where(group < 4 * i, words, word)
    bit = (words >> (2 * thread)) >> (group % 4 * 8 + register)
    return gl.convert_layout(gl.reshape(gl.where((bit & 1) != 0, b_s, float("-inf")), scores.shape), V.L_S)
