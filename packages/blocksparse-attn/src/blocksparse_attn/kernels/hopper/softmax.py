"""Softmax of the kernel for sm_90, on tiles of scores in registers: which keys a row sees, weights, their sums."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from blocksparse_attn.kernels.hopper.memory import ROWS, WHOLE, get
from blocksparse_attn.kernels.softmax import LOG2_E, finite, tanh


@gluon.jit
def sums_of_threads(weights, BLOCK_N: gl.constexpr):
    """Four sums a row, each of the columns that one thread has: those are added up once, after the last tile.

    Sums over threads are shuffles, for which each tile's softmax would wait.
    """
    return gl.sum(gl.sum(gl.reshape(weights, [ROWS, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def in_pieces(scores, config: gl.constexpr):
    """Scores [ROWS, pieces of a tile, eights of a piece, threads that share a row, columns of a thread]."""
    return gl.reshape(scores, [ROWS, config.BLOCK_N // config.PIECE, config.PIECE // 8, 4, 2])


@gluon.jit
def first_of(cells, stage, COUNT: gl.constexpr, layout: gl.constexpr, config: gl.constexpr):
    """The first COUNT of a stage's 32 numbers."""
    OF: gl.constexpr = 32 // COUNT
    counted = cells._reinterpret(gl.int32, [config.STAGES * OF, COUNT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return counted.index(stage * OF).load(layout)


@gluon.jit
def last_seen(channels, stage, i_half, L: gl.constexpr, config: gl.constexpr):
    """The last key of each piece that each of a consumer's rows sees, counted from the piece's first [ROWS, PIECES].

    It is below 0 where there is none, and may be behind the piece. ``L``: the layout of ``in_pieces``.
    """
    PIECES: gl.constexpr = config.BLOCK_N // config.PIECE
    L_PAIRS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, L)))
    L_PIECE: gl.constexpr = gl.SliceLayout(0, L_PAIRS)
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, L_PAIRS))
    if config.TABLE:
        o_at = first_of(channels.keys, stage, PIECES, L_PIECE, config) - i_half * ROWS
        o_bits = first_of(channels.bits, stage, PIECES, L_PIECE, config)
        listed = o_bits[None, :] >> (i_half * (ROWS // config.LIST_ROWS) + o_row // config.LIST_ROWS)[:, None]
        last = gl.where((listed & 1) != 0, o_row[:, None] - o_at[None, :], -1)
    else:
        first = stage * 32 + i_half * 2
        o_at = gl.arange(0, PIECES, L_PIECE) * 0 + get(channels.bits, first)
        if PIECES > 1:
            o_at = gl.where(gl.arange(0, PIECES, L_PIECE) == 0, o_at, get(channels.bits, first + 1))
        last = o_row[:, None] - o_at[None, :]
    return last


@gluon.constexpr_function
def text_of_comparison(name):
    return f"{{ .reg .pred seen; setp.{name}.s32 seen, $2, $3; selp.f32 $0, $1, 0fFF800000, seen; }}"


@gluon.jit
def where_compared(scores, name: gl.constexpr, a, b):
    """Scores where a compares with b, else -inf. In PTX: Triton would keep each truth in a register of its own, which
    takes a tile of 128 keys from 439 instructions to 646.
    """
    TEXT: gl.constexpr = text_of_comparison(name)
    return gl.inline_asm_elementwise(TEXT, "=f,f,r,r", [scores, a, b], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def masked(scores, last, left, config: gl.constexpr):
    """Scores of a tile, -inf of the keys that a row does not see.

    Offsets of a thread's columns from its first are constants: each column takes one comparison with an immediate.
    """
    b_s = in_pieces(scores, config)
    L: gl.constexpr = b_s.type.layout
    L_EIGHT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, L))))
    L_THREAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, L))))
    L_COLUMN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    o_eight = gl.arange(0, config.PIECE // 8, L_EIGHT) * 8
    o_thread = gl.arange(0, 4, L_THREAD) * 2
    o_key = o_eight[None, None, :, None, None] + gl.arange(0, 2, L_COLUMN)[None, None, None, None, :]
    ends = last[:, :, None, None, None] - o_thread[None, None, None, :, None]
    b_s = where_compared(b_s, "le", o_key, ends)
    if config.HAS_LEFT:
        # This overflows only for pieces that no row sees.
        low = gl.maximum(last - left, 0)
        b_s = where_compared(b_s, "ge", o_key, low[:, :, None, None, None] - o_thread[None, None, None, :, None])
    b_s = gl.reshape(b_s, [ROWS, config.BLOCK_N])
    return gl.convert_layout(b_s, scores.type.layout)


@gluon.jit
def larger(running_max, most, config: gl.constexpr):
    """The new running max. With SLACK no score exceeds it by more powers of two, so that it seldom grows, and what was
    summed is seldom rescaled; weights above 1 are as exact.
    """
    if config.SLACK:
        new_max = gl.where(most > running_max + config.SLACK, most, running_max)
    else:
        new_max = gl.maximum(running_max, most)
    return new_max


@gluon.jit
def weigh(scores, running_max, row_sums, factor, config: gl.constexpr, dtype: gl.constexpr):
    """Weights relative to the new running max, that max, the new row sums, and what the past is rescaled by."""
    most = gl.max(scores, 1)
    if config.SOFTCAP:
        # Capped scores carry the factor already.
        new_max = larger(running_max, most, config)
        weights = gl.exp2(scores - finite(new_max)[:, None])
    else:
        # A factor of 0 or more keeps the order; multiplied here, it costs no instruction.
        new_max = larger(running_max, most * factor, config)
        weights = gl.exp2(scores * factor - finite(new_max)[:, None])
    rescale = gl.exp2(running_max - finite(new_max))
    L_T: gl.constexpr = gl.SliceLayout(1, row_sums.type.layout)
    row_sums = row_sums * gl.convert_layout(rescale, L_T)[:, None] + sums_of_threads(weights, config.BLOCK_N)
    return weights.to(dtype), new_max, row_sums, rescale


@gluon.jit
def softmax_step(
    scores, running_max, row_sums, channels, stage, i_half, scoring, config: gl.constexpr, MASK: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """``weigh``, of capped and masked scores. The stage of keys is handed back as soon as nothing of it is needed."""
    if MASK:
        b_s = in_pieces(scores, config)
        L: gl.constexpr = b_s.type.layout
        last = last_seen(channels, stage, i_half, L, config)
        # All warps have read where the keys are.
        tl.debug_barrier()
    mbarrier.arrive(channels.k.empty.index(stage))
    factor = scoring.scale
    if config.SOFTCAP:
        scores = tanh(scores * (factor / scoring.softcap)) * (scoring.softcap * LOG2_E)
    if MASK:
        scores = masked(scores, last, scoring.left, config)
    return weigh(scores, running_max, row_sums, factor, config, dtype)


@gluon.jit
def softmax_of_tile(
    scores, running_max, row_sums, channels, stage, i_half, mode, scoring, config: gl.constexpr, dtype: gl.constexpr
):
    """``softmax_step``, masked only where some row does not see the whole tile.

    Both are branches of their own: in straight code ptxas moves the softmax past the wait for the product that it is
    to overlap with.
    """
    if mode == WHOLE:
        weights, new_max, new_sums, rescale = softmax_step(
            scores, running_max, row_sums, channels, stage, i_half, scoring, config, False, dtype
        )
    else:
        weights, new_max, new_sums, rescale = softmax_step(
            scores, running_max, row_sums, channels, stage, i_half, scoring, config, True, dtype
        )
    return weights, new_max, new_sums, rescale


@gluon.jit
def natural_logarithm(running_max, row_sum, unit):
    """log(2^running_max row_sum), and -inf for a row that saw nothing; the max is a score in units of ``unit`` log2(e)
    as rounded.

    What undoes that factor is taken in two parts, so that a large score is rounded once.
    """
    rounded = unit * LOG2_E
    rounded = gl.where(rounded == 0, 1.0, rounded)
    ratio = unit / rounded
    rest = gl.fma(-ratio, rounded, unit) / rounded
    log_sum = gl.log(gl.where(row_sum == 0, 1.0, row_sum))
    top = finite(running_max)
    return gl.where(row_sum == 0, float("-inf"), gl.fma(top, ratio, gl.fma(top, rest, log_sum)))
