"""Kernels of test_interpreter.py."""

import triton
import triton.language as tl


@triton.jit
def softmax(p_x, p_y, columns, stride, BLOCK: tl.constexpr):
    """A row's softmax, bfloat16 in and out, float32 inside."""
    o = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64) * stride
    x = tl.load(p_x + row + o, mask=o < columns, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(p_y + row + o, (e / tl.sum(e, axis=0)).to(tl.bfloat16), mask=o < columns)


@triton.jit
def extremes(p_a, p_b, p_max, p_min, p_clamp, p_abs, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    a = tl.load(p_a + o)
    b = tl.load(p_b + o)
    tl.store(p_max + o, tl.maximum(a, b))
    tl.store(p_min + o, tl.minimum(a, b))
    tl.store(p_clamp + o, tl.clamp(a, -1.0, 1.0))
    tl.store(p_abs + o, tl.abs(a))


@triton.jit
def fused(p_x, p_y, p_z, p_out, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(p_out + o, tl.fma(tl.load(p_x + o), tl.load(p_y + o), tl.load(p_z + o)))


@triton.jit
def running(p_x, p_sum, p_total, BLOCK: tl.constexpr):
    x = tl.load(p_x + tl.arange(0, BLOCK))
    tl.store(p_sum + tl.arange(0, BLOCK), tl.cumsum(x, axis=0))
    tl.store(p_total, tl.sum(x, axis=0))


@triton.jit
def cast(p_x, p_y, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(p_y + o, tl.load(p_x + o).to(p_y.dtype.element_ty))


@triton.jit
def move(p_x, p_y, stride, BLOCK: tl.constexpr):
    """Row 1 of rows that lie more than 2^31 elements apart."""
    o = tl.arange(0, BLOCK)
    i = tl.program_id(0).to(tl.int64)
    tl.store(p_y + i * BLOCK + o, tl.load(p_x + i * stride + o))


@triton.jit
def swap(p_y, p_expected, p_new, p_old):
    tl.store(p_old, tl.atomic_cas(p_y, tl.load(p_expected), tl.load(p_new)))
