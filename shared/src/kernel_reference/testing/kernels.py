"""Device code of the interpreter's self-test: one small kernel for each thing that the repair must get right."""

import triton
import triton.language as tl


@triton.jit
def copy(p_x, p_y, first, valid, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    """y = x[first:first + valid], followed by OTHER."""
    o = tl.arange(0, BLOCK)
    tl.store(p_y + o, tl.load(p_x + first.to(tl.int64) + o, mask=o < valid, other=OTHER))


@triton.jit
def cast(p_x, p_y, ROUNDING: tl.constexpr, BLOCK: tl.constexpr):
    """y = x in y's dtype."""
    o = tl.arange(0, BLOCK)
    tl.store(p_y + o, tl.load(p_x + o).to(p_y.dtype.element_ty, fp_downcast_rounding=ROUNDING))


@triton.jit
def arithmetic(p_a, p_b, p_sum, p_product, p_larger, p_maximum, p_negative, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    a = tl.load(p_a + o)
    b = tl.load(p_b + o)
    tl.store(p_sum + o, a + b)
    tl.store(p_product + o, a * b)
    tl.store(p_larger + o, tl.where(a > b, a, b))
    tl.store(p_maximum + o, tl.maximum(a, b))
    tl.store(p_negative + o, -a)


@triton.jit
def reduce(p_x, p_maximum, p_sum, BLOCK: tl.constexpr):
    x = tl.load(p_x + tl.arange(0, BLOCK))
    tl.store(p_maximum, tl.max(x, axis=0))
    tl.store(p_sum, tl.sum(x, axis=0))


@triton.jit
def flag(p_x, p_y, BLOCK: tl.constexpr):
    """y = 1 where x > 0 and 0 elsewhere."""
    o = tl.arange(0, BLOCK)
    tl.store(p_y + o, (tl.load(p_x + o) > 0).to(p_y.dtype.element_ty))


@triton.jit
def constant(p_y, VALUE: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(p_y + tl.arange(0, BLOCK), tl.full([BLOCK], VALUE, p_y.dtype.element_ty))


@triton.jit
def dot(p_a, p_b, p_y, K: tl.constexpr, BLOCK: tl.constexpr):
    """y [BLOCK, BLOCK] float32 = a [BLOCK, K] @ b [K, BLOCK]."""
    o = tl.arange(0, BLOCK)
    o_k = tl.arange(0, K)
    a = tl.load(p_a + o[:, None] * K + o_k[None, :])
    b = tl.load(p_b + o_k[:, None] * BLOCK + o[None, :])
    tl.store(p_y + o[:, None] * BLOCK + o[None, :], tl.dot(a, b, tl.zeros([BLOCK, BLOCK], tl.float32)))


@triton.jit
def view(p_x, p_bits, p_y, BLOCK: tl.constexpr):
    """bits = the bits of x as integers; y = the same bits made floats again."""
    o = tl.arange(0, BLOCK)
    bits = tl.load(p_x + o).to(p_bits.dtype.element_ty, bitcast=True)
    tl.store(p_bits + o, bits)
    tl.store(p_y + o, bits.to(p_y.dtype.element_ty, bitcast=True))


@triton.jit
def add_atomically(p_x, p_index, p_y, valid, BLOCK: tl.constexpr):
    """y[index[i]] += x[i] for i < valid."""
    o = tl.arange(0, BLOCK)
    m = o < valid
    tl.atomic_add(p_y + tl.load(p_index + o), tl.load(p_x + o), mask=m)


@triton.jit
def count(p_y, start, end):
    """y = the number of steps of a loop whose bounds are run-time scalars."""
    steps = 0
    for _ in range(start, end):
        steps += 1
    tl.store(p_y, steps)
