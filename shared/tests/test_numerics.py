"""The rule that judges a kernel's numbers."""

from __future__ import annotations

import pytest
import torch

from kernel_reference.testing.numerics import assert_close_to_oracle, measure

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrices of unit scale, as of a projection with a hidden size of 2048."""
    return torch.randn(64, 2048).to(dtype), torch.randn(2048, 96).to(dtype)


def by_chunks(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product rounded to its dtype after every 64 columns, as a plain version without a wide accumulator is."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for part, other in zip(a.split(64, 1), b.split(64, 0), strict=True):
        total += part @ other
    return total


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_result_rounded_once_passes(dtype: torch.dtype) -> None:
    a, b = inputs(dtype)
    exact = a.double() @ b.double()
    report = assert_close_to_oracle(exact.to(dtype), exact, by_chunks(a, b))
    assert 0 < report.mean < report.worst_row < report.maximum


@pytest.mark.parametrize("dtype", DTYPES)
def test_beside_a_good_baseline_there_is_room_for_one_rounding_and_no_more(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    exact = torch.full((4, 8), 1 + eps / 4, dtype=torch.float64)
    plain = torch.ones(4, 8, dtype=dtype)
    # The other neighbour of the exact value: 3/4 of a step, where twice the baseline and a rounding make 1.
    assert_close_to_oracle(plain + eps, exact, plain)
    with pytest.raises(AssertionError, match="maximum"):
        assert_close_to_oracle(plain + 2 * eps, exact, plain)


def test_three_times_the_baselines_error_fails_on_all_three_figures() -> None:
    a, b = inputs(torch.bfloat16)
    exact = a.double() @ b.double()
    plain = by_chunks(a, b)
    worse = (exact + 3 * (plain.double() - exact)).bfloat16()
    with pytest.raises(AssertionError) as caught:
        assert_close_to_oracle(worse, exact, plain, what="mixed_qkv")
    message = str(caught.value)
    assert message.startswith("mixed_qkv (64, 96) is further from float64")
    assert message.count("ABOVE") == 3


def test_one_bad_row_fails_where_the_maximum_and_the_mean_do_not() -> None:
    exact = torch.randn(512, 128, dtype=torch.float64)
    plain = exact.float()
    # One outlier in the baseline is what the maximum is judged by.
    plain[0, 0] += 1e-3
    row = exact.float()
    row[300] += 5e-4
    with pytest.raises(AssertionError, match=r"worst row .* ABOVE .* row \(300,\)") as caught:
        assert_close_to_oracle(row, exact, plain)
    assert "maximum" in str(caught.value).split("within")[0]


def test_a_shift_of_every_element_fails_on_the_mean() -> None:
    exact = torch.zeros(64, 64, dtype=torch.float64)
    plain = torch.zeros(64, 64)
    plain[:, 0] = 1e-3
    shifted = torch.full((64, 64), 2e-4)
    with pytest.raises(AssertionError, match=r"mean .* ABOVE"):
        assert_close_to_oracle(shifted, exact, plain)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_fails_and_is_named(bad: float) -> None:
    exact = torch.randn(3, 5, 7, dtype=torch.float64)
    actual = exact.bfloat16()
    actual[1, 4, 2] = bad
    with pytest.raises(AssertionError, match=r"at \(1, 4, 2\): -?(nan|inf), should be"):
        assert_close_to_oracle(actual, exact, exact.bfloat16())


def test_nan_in_oracle_and_baseline_too_is_refused_rather_than_passed() -> None:
    exact = torch.zeros(2, 2, dtype=torch.float64)
    exact[1, 0] = float("nan")
    with pytest.raises(ValueError, match=r"oracle must be free of NaN, got NaN at \(1, 0\)"):
        assert_close_to_oracle(exact.float(), exact, exact.float())
    with pytest.raises(ValueError, match="same_dtype_baseline must be finite"):
        assert_close_to_oracle(torch.zeros(2, 2), exact.nan_to_num(), exact.float())


def test_an_infinity_that_the_oracle_has_too_is_no_error() -> None:
    lse = torch.tensor([[1.0, float("-inf")], [2.0, float("-inf")]], dtype=torch.float64)
    report = assert_close_to_oracle(lse.float(), lse, lse.float())
    assert report.maximum == 0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float64])
def test_other_float_dtypes_are_judged_by_their_own_rounding(dtype: torch.dtype) -> None:
    exact = torch.rand(16, 16, dtype=torch.float64) + 1
    rounded = exact.to(dtype)
    assert_close_to_oracle(rounded, exact, rounded)
    two_steps = (exact + 2 * torch.finfo(dtype).eps).to(dtype)
    with pytest.raises(AssertionError):
        assert_close_to_oracle(two_steps, exact, exact.to(dtype) if dtype.itemsize == 8 else rounded)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (), (5,)])
def test_empty_scalar_and_one_dimensional_results_are_judged(shape: tuple[int, ...]) -> None:
    exact = torch.randn(shape, dtype=torch.float64)
    assert_close_to_oracle(exact.half(), exact, exact.half())


def test_measure_reports_hand_computed_errors_and_their_places() -> None:
    oracle = torch.zeros(2, 4, dtype=torch.float64)
    actual = torch.tensor([[0.0, 0, 0, 3], [2, 2, 2, 2]])
    report = measure(actual, oracle)
    assert (report.maximum, report.at) == (3, (0, 3))
    assert (report.worst_row, report.row) == (2, (1,))
    assert report.mean == 11 / 8


@pytest.mark.parametrize(
    ("actual", "oracle", "plain", "message"),
    [
        (torch.zeros(2), torch.zeros(2), torch.zeros(2), "oracle must be float64"),
        (torch.zeros(2), torch.zeros(3).double(), torch.zeros(3), "oracle's shape"),
        (
            torch.zeros(2),
            torch.zeros(2).double(),
            torch.zeros(2).half(),
            "same_dtype_baseline must be of actual's dtype",
        ),
        (torch.zeros(2).int(), torch.zeros(2).double(), torch.zeros(2).int(), "floating-point"),
    ],
)
def test_what_cannot_be_judged_is_refused(
    actual: torch.Tensor, oracle: torch.Tensor, plain: torch.Tensor, message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        assert_close_to_oracle(actual, oracle, plain)
