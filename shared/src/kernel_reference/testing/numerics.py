"""How far a kernel is from float64, measured beside plain PyTorch of the same dtype.

A kernel's error may be at most twice that of a plain PyTorch version in the same dtype, plus one rounding of the
output, on four figures: the maximum, the mean, the worst row, and the worst row relative to its own size, which sees a
wrong small row among large ones. Results of 16 bits or fewer must not lean towards zero or away from it either, as
truncated ones do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernel_reference.checks import check_tensors, fail

# Rows of fewer columns may be near zero by cancellation alone, where an error relative to them says nothing.
_COLUMNS_OF_A_ROW = 16
# So many rows on either side tell what the baseline's error in a row might have been, and by luck is not.
_BESIDE = 2
_LUCK = 4
# GPUs may flush what is below the normal range of float32 to zero, whatever the dtype of the result.
_FLUSHED = torch.finfo(torch.float32).tiny
# A mean of fewer errors, or of errors of fewer rows, whose columns share what was rounded before, is chance.
_ELEMENTS_OF_A_LEAN = 512
_ROWS_OF_A_LEAN = 16
# Truncation leans by half a unit in the last place, a result rounded to nearest by none: a bound half-way between.
_LEAN = 0.25
_SIGMAS = 6
# A maximum of so many draws is no longer luck.
_DRAWS = 16
# Of fewer, one large error makes a mean, or the worst of rows.
_FEW_NUMBERS = 64


@dataclass(frozen=True)
class ErrorReport:
    """Errors of a tensor.

    maximum: of one element; at: its index.
    mean: over all elements.
    worst_row: the largest root mean square over a row, which is the last dimension; row: that row's index.
    relative_row: the largest root mean square of a row's errors divided by that of the oracle's row; at_row: that row's
    index. 0 and () where rows have fewer than 16 columns; rows of zeros are left out.
    """

    maximum: float
    mean: float
    worst_row: float
    at: tuple[int, ...]
    row: tuple[int, ...]
    relative_row: float
    at_row: tuple[int, ...]


def measure(actual: torch.Tensor, oracle: torch.Tensor) -> ErrorReport:
    """The errors of ``actual`` [..., columns] against ``oracle``, float64 of the same shape.

    An infinity that the oracle has too is no error. A NaN in ``actual`` is an infinite error. The oracle itself must
    not hold NaN (ValueError). Integers are exact or wrong: compare them with
    :func:`kernel_reference.testing.guards.bitwise_equal`.
    """
    check_tensors(actual=actual, oracle=oracle)
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
        return ErrorReport(0.0, 0.0, 0.0, (), (), 0.0, ())
    error = _errors(actual, oracle)
    rows = _rows(error)
    shares = _shares_of_rows(rows, actual, oracle)
    return ErrorReport(
        float(error.max()), float(error.mean()), float(rows.max()), _index(error), _index(rows) if rows.dim() else (),
        0.0 if shares is None else float(shares.max()), () if shares is None else _index(shares),
    )  # fmt: skip


def assert_close_to_oracle(
    actual: torch.Tensor, oracle64: torch.Tensor, same_dtype_baseline: torch.Tensor, *, what: str = "the result",
    again: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> ErrorReport:  # fmt: skip
    """Raise AssertionError unless each error of ``actual`` is at most twice the baseline's plus one rounding.

    actual: what the kernel returned, of any float dtype. oracle64: the exact result in float64. same_dtype_baseline: a
    plain PyTorch version computed in ``actual``'s dtype. All of one shape, rows in the last dimension. One rounding is
    half a unit in the last place of ``actual``'s dtype: at the largest value for the maximum, of the mean and the root
    mean square of the values for the mean and the worst row, and half of the dtype's eps for the worst relative row.
    Whole rows may cancel, where a weight that all columns share does, and be off by any part of themselves: a row whose
    error is within four times the baseline's in a row beside it is not counted there.

    The lean of a result is the mean of its errors in units of the last place, each counted positive away from zero and
    negative towards it: 0 for rounding to nearest, -1/2 for truncation. It may be at most twice the baseline's plus 1/4
    plus six times what chance makes of it, which is estimated from how rows, heads and so on differ. It is judged in
    dtypes of 16 bits or fewer, where arithmetic is finer than the result, of results of at least 16 rows, where the
    baseline's errors are those of its last rounding, and by the elements that are not small beside their row.

    again: makes the oracle's and the baseline's results of other inputs like the test's own, say each number moved by
    a few hundredths of itself, anew at every call. The largest error of few numbers, or of few large ones, is luck, and
    twice the baseline's may be less than the kernel's however alike they are: where the maximum or the worst row alone
    is above its bound, the baseline's is the largest of as many draws as it takes, at most 16 more. So is the mean, of
    fewer than 64 numbers, and the worst relative row, of fewer than 64 rows.

    NaN never passes. The message gives the figures and where the worst are. Returns the kernel's errors.

    ValueError or TypeError is raised if the oracle or the baseline cannot judge: other shapes or dtypes, or not finite
    where the oracle is.
    """
    check_tensors(actual=actual, oracle64=oracle64, same_dtype_baseline=same_dtype_baseline)
    if same_dtype_baseline.dtype != actual.dtype:
        fail("same_dtype_baseline", f"of actual's dtype {actual.dtype}", same_dtype_baseline.dtype, TypeError)
    plain = measure(same_dtype_baseline, oracle64)
    if not math.isfinite(plain.maximum):
        fail("same_dtype_baseline", "finite where the oracle is", f"an infinite error at {plain.at}")
    kernel = measure(actual, oracle64)
    if actual.numel() == 0:
        return kernel
    limits = torch.finfo(actual.dtype)
    size = _without_infinities(oracle64.detach()).abs()
    half_ulp = limits.eps / 2
    # Below the normal range the spacing no longer shrinks with the value.
    floor = limits.smallest_normal * half_ulp
    figures: list[tuple[str, float, float, float, str]] = [
        (
            "maximum",
            kernel.maximum,
            plain.maximum,
            float(size.max()),
            f"at {kernel.at}: {_shown(actual, oracle64, kernel)}",
        ),
        ("mean", kernel.mean, plain.mean, float(size.mean()), ""),
        ("worst row", kernel.worst_row, plain.worst_row, float(_rows(size).max()), f"row {kernel.row}"),
        ("relative row", *_unexplained(actual, oracle64, same_dtype_baseline, plain.relative_row)),
    ]
    judged = [
        (name, error, 2 * baseline + half_ulp * magnitude + floor, baseline, where)
        for name, error, baseline, magnitude, where in figures
    ]
    judged += _lean(actual, oracle64, same_dtype_baseline)
    if again is not None:
        judged = _redrawn(judged, actual, again)
    _assert_within(judged, actual, what)
    return kernel


def assert_no_lean(
    actual: torch.Tensor, oracle64: torch.Tensor, same_dtype_baseline: torch.Tensor, *, what: str = "the result"
) -> None:
    """The lean alone of :func:`assert_close_to_oracle`, for a baseline that may not be judged by the rest.

    Example:
        >>> exact = torch.rand(32, 32, dtype=torch.float64) + 1
        >>> assert_no_lean(exact.bfloat16(), exact, exact.bfloat16())
    """
    _assert_within(_lean(actual, oracle64, same_dtype_baseline), actual, what)


# Name, error, bound, the baseline's error, where or which way.
_Judged = tuple[str, float, float, float, str]


def _redrawn(
    judged: list[_Judged], actual: torch.Tensor, again: Callable[[], tuple[torch.Tensor, torch.Tensor]]
) -> list[_Judged]:
    """The baseline's maximum and worst row, and those figures that are luck of few numbers or rows, of several draws,
    if these alone are above."""
    by_luck = {"maximum", "worst row"}
    by_luck |= {"mean"} if actual.numel() < _FEW_NUMBERS else set()
    by_luck |= {"relative row"} if actual.dim() and actual[..., 0].numel() < _FEW_NUMBERS else set()
    for _ in range(_DRAWS):
        above = {name for name, error, bound, *_ in judged if not error <= bound}
        if not above or above - by_luck:
            break
        oracle, baseline = again()
        drawn = measure(baseline, oracle)
        figures = (drawn.maximum, drawn.mean, drawn.worst_row, drawn.relative_row)
        largest = dict(zip(("maximum", "mean", "worst row", "relative row"), figures, strict=True))
        largest = {name: figure for name, figure in largest.items() if name in by_luck}
        judged = [
            (name, error, bound + 2 * max(largest.get(name, 0.0) - plain, 0), max(largest.get(name, 0.0), plain), where)
            for name, error, bound, plain, where in judged
        ]
    return judged


def _lean(actual: torch.Tensor, oracle: torch.Tensor, baseline: torch.Tensor) -> list[_Judged]:
    leans = _leans(actual, oracle, baseline)
    if leans is None:
        return []
    kernels, its_bound, plains = leans
    towards = "towards zero" if kernels < 0 else "away from zero"
    return [("lean", abs(kernels), its_bound, abs(plains), f"units in the last place, {towards}")]


def _assert_within(judged: list[_Judged], actual: torch.Tensor, what: str) -> None:
    lines = []
    failed = False
    for name, error, bound, baseline, where in judged:
        over = not error <= bound
        failed |= over
        verdict = "ABOVE" if over else "within"
        lines.append(f"  {name:<12}  {error:10.3e}  {verdict:<6}  {bound:10.3e}  {baseline:13.3e}  {where}".rstrip())
    if failed:
        dtype = str(actual.dtype).removeprefix("torch.")
        heading = f"  {'error':<12}  {'kernel':>10}  {'':<6}  {'bound':>10}  {'plain PyTorch':>13}"
        raise AssertionError(
            f"{what} {tuple(actual.shape)} is further from float64 than twice plain {dtype} PyTorch and a rounding:\n"
            + "\n".join([heading, *lines])
        )


def _errors(actual: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    values = actual.detach().double()
    return torch.where(values == oracle, 0.0, (values - oracle).abs()).nan_to_num(nan=math.inf, posinf=math.inf)


def _shares_of_rows(rows: torch.Tensor, actual: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor | None:
    """The errors of rows divided by the rows' sizes; None where rows are too short for that."""
    if not oracle.dim() or oracle.shape[-1] < _COLUMNS_OF_A_ROW:
        return None
    # What any result may be off, however small its row: the spacing no longer shrinks with the value down there.
    limits = torch.finfo(actual.dtype)
    least = max(limits.smallest_normal * limits.eps / 2, _FLUSHED if actual.dtype != torch.float64 else 0.0)
    size = _rows(_without_infinities(oracle))
    return torch.where(size > 0, (rows - least).clamp(min=0) / size, 0.0)


def _unexplained(
    actual: torch.Tensor, oracle: torch.Tensor, baseline: torch.Tensor, plain: float
) -> tuple[float, float, float, str]:
    """The largest share of a row that its error is, the baseline's, 1 for a rounding, and where: rows aside whose error
    is that of the baseline in rows beside them, along the dimension that has most."""
    oracle = oracle.detach().to(actual.device)
    rows = _rows(_errors(actual, oracle))
    shares = _shares_of_rows(rows, actual, oracle)
    if shares is None:
        return 0.0, plain, 1.0, ""
    if shares.dim():
        plains = _rows(_errors(baseline.to(actual.device), oracle))
        dim = max(range(rows.dim()), key=lambda d: rows.shape[d])
        lines = plains.movedim(dim, -1).unsqueeze(-2).flatten(0, -3) if plains.dim() > 1 else plains[None, None]
        beside = torch.nn.functional.max_pool1d(lines, 2 * _BESIDE + 1, 1, _BESIDE)
        beside = beside.view(plains.movedim(dim, -1).shape).movedim(-1, dim)
        shares = torch.where(rows > _LUCK * beside, shares, 0.0)
    return float(shares.max()), plain, 1.0, f"row {_index(shares)}"


def _leans(actual: torch.Tensor, oracle: torch.Tensor, baseline: torch.Tensor) -> tuple[float, float, float] | None:
    """How far ``actual`` leans, how far it may, and how far the baseline does; None where that cannot be told."""
    if actual.dtype.itemsize > 2 or actual.dim() < 2 or actual[..., 0].numel() < _ROWS_OF_A_LEAN:
        return None
    oracle = oracle.detach().to(actual.device)
    limits = torch.finfo(actual.dtype)
    counted = oracle.isfinite() & (oracle.abs() >= limits.smallest_normal) & (oracle.abs() <= limits.max)
    # What cancelled is small, and the errors of its terms are many units of its last place.
    counted &= oracle.abs() >= 0.5 * _rows(_without_infinities(oracle)).unsqueeze(-1)
    exponent = torch.frexp(torch.where(counted, oracle, 1.0)).exponent - 1
    # Errors of more than a unit were made before the last rounding, and would drown it.
    errors = [
        torch.where(
            counted, (torch.ldexp((x.detach().double() - oracle) * oracle.sign(), -exponent) / limits.eps), 0.0
        ).clamp(-1, 1)
        for x in (actual, baseline.to(actual.device))
    ]
    number = int(counted.sum())
    rows = int(counted.any(-1).sum())
    if number < _ELEMENTS_OF_A_LEAN or rows < _ROWS_OF_A_LEAN or float(errors[1].abs().sum()) / number > 0.5:
        return None
    kernels, plains = (float(error.sum()) / number for error in errors)
    chance = max(_spread(errors[0], counted, dim) for dim in [None, *range(actual.dim())])
    return kernels, 2 * abs(plains) + _LEAN + _SIGMAS * chance, plains


def _spread(errors: torch.Tensor, counted: torch.Tensor, dim: int | None) -> float:
    """The standard deviation of the mean of the errors, if those at one index of ``dim``, or of one row, belong
    together. 0 where these are too few to tell.
    """
    others = [-1] if dim is None else [other for other in range(errors.dim()) if other != dim]
    weight = counted.double().sum(others).flatten()
    total = errors.sum(others).flatten()[weight > 0]
    weight = weight[weight > 0]
    if len(weight) < _ROWS_OF_A_LEAN // 2:
        return 0.0
    # Of a ratio of sums over groups of any size.
    mean = total.sum() / weight.sum()
    return float(
        (total - mean * weight).square().sum().sqrt() / weight.sum() * (len(weight) / (len(weight) - 1)) ** 0.5
    )


def _without_infinities(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.isinf(), 0.0, values.double())


def _rows(values: torch.Tensor) -> torch.Tensor:
    """Root mean square over the last dimension, without overflow."""
    values = values.abs()
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
