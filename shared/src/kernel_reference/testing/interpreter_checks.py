"""The interpreter's self-test: what small kernels (kernels.py) compute in it, beside PyTorch's CPU results.

Imported once TRITON_INTERPRET is set, as it imports the kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernel_reference.testing import kernels


def _difference(got: torch.Tensor, wanted: torch.Tensor) -> str | None:
    """The first element whose bits differ, as a sentence; every NaN is as good as another."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    same = got.view(bits) == wanted.view(bits)
    if got.is_floating_point():
        same |= torch.isnan(got.double()) & torch.isnan(wanted.double())
    if bool(same.all()):
        return None
    at = int((~same).nonzero()[0])
    return f"element {at} of {got.dtype} is {got.double()[at].item()}, not {wanted.double()[at].item()}"


# Ties that go down and up, a carry into the exponent, overflow to infinity, subnormals, infinities and NaN.
_AWKWARD = (
    1.00390625, 1.01171875, 1.00390626, -1.99999, 3.3961775e38, -1e-40, 9.2e-41, 0.0,
    -0.0, float("inf"), float("-inf"), float("nan"), 448.0, 1e30, -479.0, 0.0703125,
)  # fmt: skip
_BLOCK = len(_AWKWARD)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _to_fp8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def _check_copies() -> str | None:
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, *_FP8):
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        # Every pattern of 8 bits, quiet and signalling NaN among them, and so in the upper byte of the wider ones.
        pattern = (torch.arange(256) << 8 * (dtype.itemsize - 1)) | 1
        x = pattern.to(bits).view(dtype)
        y = torch.zeros(64, dtype=bits).view(dtype)
        for first in range(0, 256, 48):
            valid = min(48, 256 - first)
            kernels.copy[(1,)](x, y, first, valid, -2.0 if dtype.is_floating_point else -2, 64)
            other = torch.full((64 - valid,), -2.0).to(dtype)
            if not torch.equal(y.view(bits), torch.cat([x[first : first + valid].view(bits), other.view(bits)])):
                return f"{dtype} elements {first} to {first + valid} arrive with other bits"
    return None


def _check_cast_to_bfloat16() -> str | None:
    x = torch.tensor(_AWKWARD)
    y = torch.empty(_BLOCK, dtype=torch.bfloat16)
    kernels.cast[(1,)](x, y, None, _BLOCK)
    if problem := _difference(y, x.bfloat16()):
        return problem
    kernels.cast[(1,)](x, y, "rtz", _BLOCK)
    truncated = (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    if problem := _difference(y, torch.where(x.isnan(), x.bfloat16(), truncated)):
        return f"towards zero, {problem}"
    back = torch.empty(_BLOCK)
    kernels.cast[(1,)](y, back, None, _BLOCK)
    if problem := _difference(back, y.float()):
        return f"back to float32, {problem}"
    integers = torch.tensor([257, 258, 259, -131071, 0, 1, 2, 3], dtype=torch.int32)
    y = torch.empty(8, dtype=torch.bfloat16)
    kernels.cast[(1,)](integers, y, None, 8)
    return _difference(y, integers.float().bfloat16())


def _check_cast_to_fp8() -> str | None:
    for dtype in _FP8:
        for source in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.tensor(_AWKWARD).to(source)
            y = torch.empty(_BLOCK, dtype=dtype)
            kernels.cast[(1,)](x, y, None, _BLOCK)
            if problem := _difference(y, _to_fp8(x.float(), dtype)):
                return f"from {source}, {problem}"
            back = torch.empty(_BLOCK, dtype=source)
            kernels.cast[(1,)](y, back, None, _BLOCK)
            if problem := _difference(back, y.to(source)):
                return f"back to {source}, {problem}"
    return None


def _check_arithmetic() -> str | None:
    a = torch.tensor(_AWKWARD).bfloat16()
    b = a.flip(0).roll(3)
    results = [torch.empty(_BLOCK, dtype=torch.bfloat16) for _ in range(5)]
    kernels.arithmetic[(1,)](a, b, *results, _BLOCK)
    wanted = {"a + b": a + b, "a * b": a * b, "where(a > b, a, b)": torch.where(a > b, a, b)}
    wanted |= {"maximum(a, b)": torch.fmax(a, b), "-a": -a}
    for got, (name, value) in zip(results, wanted.items(), strict=True):
        # The sign of a maximum of zeros, and of 0 - 0, is nobody's promise.
        if problem := _difference(got + 0.0, value + 0.0):
            return f"{name}: {problem}"
    return None


def _check_reductions() -> str | None:
    x = (torch.arange(64) % 7 - 3.5).bfloat16() + 4
    maximum, total = torch.empty(2, dtype=torch.bfloat16).split(1)
    kernels.reduce[(1,)](x, maximum, total, 64)
    return _difference(maximum, x.max().reshape(1)) or _difference(total, x.float().sum().bfloat16().reshape(1))


def _check_comparison() -> str | None:
    x = torch.tensor(_AWKWARD).bfloat16()
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        y = torch.empty(_BLOCK, dtype=dtype)
        kernels.flag[(1,)](x, y, _BLOCK)
        if problem := _difference(y, (x > 0).to(dtype)):
            return problem
    return None


def _check_constant() -> str | None:
    y = torch.zeros(_BLOCK, dtype=torch.bfloat16)
    kernels.constant[(1,)](y, -1.5, _BLOCK)
    return _difference(y, torch.full_like(y, -1.5))


def _check_dot() -> str | None:
    for dtype in (torch.bfloat16, *_FP8):
        # Whole numbers whose sums, of about 1500, are exact in float32 and need more bits than bfloat16 has.
        a = (torch.arange(16 * 32) * 7 % 15).float().reshape(16, 32).to(dtype)
        b = (torch.arange(32 * 16) * 5 % 13).float().reshape(32, 16).to(dtype)
        y = torch.empty(16 * 16)
        kernels.dot[(1,)](a, b, y, 32, 16)
        if problem := _difference(y, (a.float() @ b.float()).flatten()):
            return f"of {dtype}, {problem}"
    return None


def _check_view() -> str | None:
    for dtype, bits in ((torch.bfloat16, torch.int16), *((fp8, torch.int8) for fp8 in _FP8)):
        x = _to_fp8(torch.tensor(_AWKWARD), dtype) if dtype.itemsize == 1 else torch.tensor(_AWKWARD).to(dtype)
        seen = torch.empty(_BLOCK, dtype=bits)
        y = torch.empty(_BLOCK, dtype=dtype)
        kernels.view[(1,)](x, seen, y, _BLOCK)
        if problem := _difference(seen, x.view(bits)) or _difference(y.view(bits), seen):
            return f"of {dtype}, {problem}"
    return None


def _check_atomic_add() -> str | None:
    x = torch.ones(16, dtype=torch.bfloat16)
    index = torch.tensor([0, 1, 1, 3, 3, 3, 3, 0] * 2, dtype=torch.int64)
    y = torch.tensor([0.5, 1.0, 2.0, 254.0], dtype=torch.bfloat16)
    kernels.add_atomically[(1,)](x, index, y, 8, 16)
    # 254 + 4 ones, one by one: 256 + 1 rounds back to 256.
    return _difference(y, torch.tensor([2.5, 3.0, 2.0, 256.0], dtype=torch.bfloat16))


def _check_loop() -> str | None:
    y = torch.zeros(1, dtype=torch.int32)
    kernels.count[(1,)](y, 2, 7)
    return _difference(y, torch.tensor([5], dtype=torch.int32))


CHECKS: dict[str, Callable[[], str | None]] = {
    "load and store": _check_copies,
    "cast to bfloat16": _check_cast_to_bfloat16,
    "cast to fp8": _check_cast_to_fp8,
    "bfloat16 arithmetic": _check_arithmetic,
    "bfloat16 reduction": _check_reductions,
    "bfloat16 comparison made a number": _check_comparison,
    "bfloat16 constant": _check_constant,
    "dot": _check_dot,
    "view as integers": _check_view,
    "bfloat16 atomic add": _check_atomic_add,
    "loop with a run-time bound": _check_loop,
}
