"""Kernels of test_codegen.py."""

import triton
import triton.language as tl


@triton.jit
def copy(p_x, p_y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_y + o, tl.load(p_x + o, mask=o < n), mask=o < n)


@triton.jit
def centre(p_x, p_y, BLOCK: tl.constexpr):
    """Holds all of x while it adds it up."""
    o = tl.arange(0, BLOCK)
    x = tl.load(p_x + o)
    tl.store(p_y + o, x - tl.sum(x, axis=0))


@triton.jit
def matmul(p_a, p_b, p_c, k, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for i in range(0, k, BLOCK):
        a = tl.load(p_a + o[:, None] * k + i + o[None, :])
        b = tl.load(p_b + (i + o)[:, None] * BLOCK + o[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(p_c + o[:, None] * BLOCK + o[None, :], acc)


@triton.jit
def halting(p_x, p_y):
    x = tl.load(p_x)
    tl.device_assert(x > 0, "positive")
    tl.store(p_y, x)


@triton.jit
def undefined(p_x, p_y):
    tl.store(p_y, tl.load(p_x) + missing)  # noqa: F821


@triton.jit
def divide(p_x, p_y, n):
    o_x = tl.arange(0, 128)
    b_x = tl.load(p_x + o_x)
    # ptxas has functions of its own for these.
    for _ in range(n):
        b_x = b_x // (tl.load(p_y + o_x) + b_x) + n
    tl.store(p_x + o_x, b_x % (n + o_x.to(tl.int64)))
