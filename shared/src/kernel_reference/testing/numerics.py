"""How far a kernel is from float64, measured beside plain PyTorch of the same dtype.

No tolerance is chosen by hand: a kernel's error may be at most twice that of a plain PyTorch version in the same
dtype, plus one rounding of the output, on three figures: the maximum, the mean and the worst row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernel_reference.checks import fail


@dataclass(frozen=True)
class ErrorReport:
    """Absolute errors of a tensor.

    maximum: of one element; at: its index.
    mean: over all elements.
    worst_row: the largest root mean square over a row, which is the last dimension; row: that row's index.
    """

    maximum: float
    mean: float
    worst_row: float
    at: tuple[int, ...]
    row: tuple[int, ...]


def measure(actual: torch.Tensor, oracle: torch.Tensor) -> ErrorReport:
    """The errors of ``actual`` [..., columns] against ``oracle``, float64 of the same shape.

    An infinity that the oracle has too is no error. A NaN in ``actual`` is an infinite error. The oracle itself must
    not hold NaN (ValueError). Integers are exact or wrong: compare them with
    :func:`kernel_reference.testing.guards.bitwise_equal`.
    """
    if oracle.dtype != torch.float64:
        fail("oracle", "float64", oracle.dtype, TypeError)
    if not actual.is_floating_point():
        fail("actual", "of a floating-point dtype", actual.dtype, TypeError)
    if actual.shape != oracle.shape:
        fail("actual", f"of the oracle's shape {tuple(oracle.shape)}", tuple(actual.shape))
    oracle = oracle.detach().to(actual.device)
    if bool(oracle.isnan().any()):
        fail("oracle", "free of NaN", f"NaN at {_index(oracle.isnan().double())}")
    if actual.numel() == 0:
        return ErrorReport(0.0, 0.0, 0.0, (), ())
    values = actual.detach().double()
    error = torch.where(values == oracle, 0.0, (values - oracle).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    rows = _rows(error)
    return ErrorReport(
        float(error.max()), float(error.mean()), float(rows.max()), _index(error), _index(rows) if rows.dim() else ()
    )


def assert_close_to_oracle(
    actual: torch.Tensor, oracle64: torch.Tensor, same_dtype_baseline: torch.Tensor, *, what: str = "the result"
) -> ErrorReport:
    """Raise AssertionError unless each error of ``actual`` is at most twice the baseline's plus one rounding.

    actual: what the kernel returned, of any float dtype. oracle64: the exact result in float64. same_dtype_baseline: a
    plain PyTorch version computed in ``actual``'s dtype. All of one shape, rows in the last dimension. One rounding is
    half a unit in the last place of ``actual``'s dtype: at the largest value for the maximum, and of the mean and the
    root mean square of the values for the others. NaN never passes. The message gives the three figures and where the
    worst are. Returns the kernel's errors.

    ValueError or TypeError is raised if the oracle or the baseline cannot judge: other shapes or dtypes, or not finite
    where the oracle is.
    """
    if same_dtype_baseline.dtype != actual.dtype:
        fail("same_dtype_baseline", f"of actual's dtype {actual.dtype}", same_dtype_baseline.dtype, TypeError)
    plain = measure(same_dtype_baseline, oracle64)
    if not math.isfinite(plain.maximum):
        fail("same_dtype_baseline", "finite where the oracle is", f"an infinite error at {plain.at}")
    kernel = measure(actual, oracle64)
    if actual.numel() == 0:
        return kernel
    limits = torch.finfo(actual.dtype)
    size = oracle64.detach().double().abs()
    size = torch.where(size.isinf(), 0.0, size)
    half_ulp = limits.eps / 2
    # Below the normal range the spacing no longer shrinks with the value.
    floor = limits.smallest_normal * half_ulp
    figures = [
        (
            "maximum",
            kernel.maximum,
            plain.maximum,
            float(size.max()),
            f"at {kernel.at}: {_shown(actual, oracle64, kernel)}",
        ),
        ("mean", kernel.mean, plain.mean, float(size.mean()), ""),
        ("worst row", kernel.worst_row, plain.worst_row, float(_rows(size).max()), f"row {kernel.row}"),
    ]
    lines = []
    failed = False
    for name, error, baseline, magnitude, where in figures:
        bound = 2 * baseline + half_ulp * magnitude + floor
        over = not error <= bound
        failed |= over
        verdict = "ABOVE" if over else "within"
        lines.append(f"  {name:<9}  {error:10.3e}  {verdict:<6}  {bound:10.3e}  {baseline:13.3e}  {where}".rstrip())
    if failed:
        dtype = str(actual.dtype).removeprefix("torch.")
        heading = f"  {'error':<9}  {'kernel':>10}  {'':<6}  {'bound':>10}  {'plain PyTorch':>13}"
        raise AssertionError(
            f"{what} {tuple(actual.shape)} is further from float64 than twice plain {dtype} PyTorch and a rounding:\n"
            + "\n".join([heading, *lines])
        )
    return kernel


def _rows(values: torch.Tensor) -> torch.Tensor:
    """Root mean square over the last dimension, without overflow."""
    if values.dim() == 0:
        return values
    largest = values.amax(-1, keepdim=True)
    scaled = torch.where(largest > 0, values / largest, 0.0)
    return torch.where(largest.isinf(), math.inf, largest * scaled.square().mean(-1, keepdim=True).sqrt()).squeeze(-1)


def _index(values: torch.Tensor) -> tuple[int, ...]:
    """Where the largest value is."""
    return tuple(int(i) for i in torch.unravel_index(values.argmax(), values.shape))


def _shown(actual: torch.Tensor, oracle: torch.Tensor, report: ErrorReport) -> str:
    return f"{actual[report.at].item()}, should be {oracle[report.at].item()}"
