"""Accumulators of large heads on sm_90, rescaled by each warp for itself, and only where the max of a row has grown."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from prefix_prefill.kernels.hopper.softmax import acc_layout


@gluon.constexpr_function
def numbers_together(columns):
    """How many of a lane's numbers one text takes: of two rows, as ``acc_layout`` has them."""
    return min(32, columns // 2)


@gluon.constexpr_function
def operands_of(count):
    """As many results as numbers, and a factor for each."""
    return "=f," * count + "f," * (2 * count - 1) + "f"


@gluon.constexpr_function
def text_of(count):
    """Numbers times their factors, those of two rows by turns of two; as they are where all of a warp's are 1."""
    text = "{ .reg .pred grown, other; "
    for i in range(count):
        text += f"mov.f32 ${i}, ${count + i}; "
    text += f"setp.neu.f32 grown, ${2 * count}, 0f3F800000; setp.neu.f32 other, ${2 * count + 2}, 0f3F800000; "
    text += "or.pred grown, grown, other; vote.sync.any.pred grown, grown, 0xffffffff; @!grown bra.uni DONE; "
    for i in range(count):
        text += f"mul.f32 ${i}, ${i}, ${2 * count + i}; "
    return text + "DONE: }"


@gluon.jit
def rescale_tile(acc, rescale):
    """One accumulator, its columns as many at a time as one text takes."""
    COUNT: gl.constexpr = numbers_together(acc.shape[1])
    TEXT: gl.constexpr = text_of(COUNT)
    OPERANDS: gl.constexpr = operands_of(COUNT)
    factor = gl.convert_layout(rescale, gl.SliceLayout(1, acc_layout(acc.shape[1])))[:, None]
    return gl.inline_asm_elementwise(TEXT, OPERANDS, [acc, factor], dtype=gl.float32, is_pure=False, pack=COUNT)


@gluon.jit
def rescale_grown(accs, rescale, V):
    """Accumulators, tile by tile, times a factor for each row, which is 1 where the max has not grown."""
    rescaled = ()
    for t in gl.static_range(len(V.OWN)):
        rescaled = rescaled + (rescale_tile(accs[t], rescale),)
    return rescaled
