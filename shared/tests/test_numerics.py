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


def test_three_times_the_baselines_error_fails_on_three_figures() -> None:
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


def few_large(error: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of which one is large, in float64 and off by so much there."""
    exact = torch.full((8, 16), 1e-3, dtype=torch.float64)
    exact[3, 5] = 1
    rounded = exact.float()
    rounded[3, 5] += error
    return exact, rounded


def test_the_largest_of_few_errors_is_judged_beside_that_of_more_draws() -> None:
    exact, plain = few_large(1e-6)
    actual = few_large(3e-6)[1]
    # What shifts all alike shifts the means, which are not above.
    plain[:3] += 1e-6
    with pytest.raises(AssertionError, match=r"maximum .* ABOVE"):
        assert_close_to_oracle(actual, exact, plain)
    draws = iter([few_large(error) for error in (0.0, 1e-6, 2e-6, 9e-6)])
    assert_close_to_oracle(actual, exact, plain, again=lambda: next(draws))
    # The fourth was not asked for.
    assert len(list(draws)) == 1


def test_an_error_above_those_of_all_draws_fails_with_the_largest_of_them_named() -> None:
    exact, plain = few_large(1e-6)
    plain[:3] += 1e-6
    draws = iter([few_large(1.2e-6)] * 17)
    with pytest.raises(AssertionError, match=r"maximum  *2\.9..e-06  ABOVE .* 1\.1..e-06"):
        assert_close_to_oracle(few_large(3e-6)[1], exact, plain, again=lambda: next(draws))
    assert len(list(draws)) == 1


def test_means_above_their_bounds_and_results_within_them_ask_for_no_draws() -> None:
    def none() -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    exact, plain = few_large(1e-6)
    assert_close_to_oracle(plain, exact, plain, again=none)
    for wrong in (plain + 3e-6, torch.full_like(plain, torch.nan)):
        with pytest.raises(AssertionError, match=r"mean .* ABOVE"):
            assert_close_to_oracle(wrong, exact, plain, again=none)


def test_the_mean_of_few_numbers_is_judged_beside_draws_and_that_of_many_is_not() -> None:
    for numbers in (12, 64):
        exact = torch.linspace(1, 2, numbers, dtype=torch.float64)
        plain = exact.float()
        near = exact, (exact + 2e-6).float()
        if numbers == 12:
            assert_close_to_oracle((exact + 3e-6).float(), exact, plain, again=lambda near=near: near)
        else:
            with pytest.raises(AssertionError, match=r"mean .* ABOVE"):
                assert_close_to_oracle((exact + 3e-6).float(), exact, plain, again=lambda near=near: near)


def test_the_relative_row_of_few_rows_is_judged_beside_draws_and_that_of_many_is_not() -> None:
    for rows in (12, 64):
        exact = torch.full((rows, 16), 1.0, dtype=torch.float64)
        exact[3] = 1e-3
        near = exact.float()
        near[3] *= 1 + 6e-6
        off = exact.float()
        off[3] *= 1 + 1e-5
        if rows == 12:
            assert_close_to_oracle(off, exact, exact.float(), again=lambda near=(exact, near): near)
        else:
            with pytest.raises(AssertionError, match=r"relative row .* ABOVE"):
                assert_close_to_oracle(off, exact, exact.float(), again=lambda near=(exact, near): near)


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


# What the absolute figures do not see


def truncated(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded towards zero, as by dropping the lower bits of a wider number."""
    nearest = exact.to(dtype)
    bits = nearest.view({2: torch.int16, 1: torch.int8}[dtype.itemsize])
    return torch.where(nearest.double().abs() > exact.abs(), bits - 1, bits).view(dtype)


def causal_attention(dtype: torch.dtype, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """256 rows of attention, of which the first sees one key and the last 2048: exact, and plain."""
    q, k, v = (torch.randn(heads, n, 64).to(dtype) for n in (256, 2048, 2048))
    seen = torch.arange(2048) <= 8 * torch.arange(256)[:, None]

    def scores(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ y.mT / 8).masked_fill(~seen, -torch.inf)

    exact = scores(q.double(), k.double()).softmax(-1) @ v.double()
    weights = torch.exp(scores(q.float(), k.float()) - 4)
    return exact, (weights.to(dtype).float() @ v.float() / weights.sum(-1, keepdim=True)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_small_row_of_zeros_among_large_rows_fails(dtype: torch.dtype) -> None:
    exact = torch.randn(64, 128, dtype=torch.float64)
    exact[10:24] *= 2.0**-11
    zeroed = exact.to(dtype)
    zeroed[17] = 0
    with pytest.raises(AssertionError, match=r"relative row .* ABOVE .* row \(17,\)") as caught:
        assert_close_to_oracle(zeroed, exact, exact.to(dtype))
    assert str(caught.value).count("ABOVE") == 1


def test_a_wrong_block_in_the_last_rows_of_attention_whose_values_are_small_fails() -> None:
    exact, plain = causal_attention(torch.float16)
    # Of the others the plain version is far off, as where a few rows were computed in another way.
    plain[:, :32] *= 1.25
    wrong = plain.clone()
    wrong[1, -16:, 32:48] = wrong[1, -16:, 48:]
    with pytest.raises(AssertionError, match=r"relative row .* ABOVE .* row \(1, 2[45]\d\)") as caught:
        assert_close_to_oracle(wrong, exact, plain)
    assert str(caught.value).count("ABOVE") == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_truncation_in_place_of_rounding_fails_beside_a_baseline_with_errors_of_its_own(dtype: torch.dtype) -> None:
    exact = torch.randn(64, 96, dtype=torch.float64)
    noise = 0.25 * torch.finfo(dtype).eps * exact.abs() * torch.randn_like(exact)
    with pytest.raises(AssertionError, match=r"lean .* ABOVE .* towards zero") as caught:
        assert_close_to_oracle(truncated(exact, dtype), exact, (exact + noise).to(dtype))
    assert str(caught.value).count("ABOVE") == 1


def test_attention_that_is_truncated_fails_and_that_is_rounded_passes() -> None:
    exact, plain = causal_attention(torch.bfloat16)
    assert_close_to_oracle(plain, exact, plain)
    assert_close_to_oracle(exact.bfloat16(), exact, plain)
    with pytest.raises(AssertionError, match=r"lean .* ABOVE"):
        assert_close_to_oracle(truncated(exact, torch.bfloat16), exact, plain)


def test_leaning_away_from_zero_fails_too_and_the_heading_gives_the_units() -> None:
    exact = torch.randn(64, 96, dtype=torch.float64)
    up = -truncated(-exact - exact.sign() * torch.finfo(torch.bfloat16).eps * exact.abs() * 0.75, torch.bfloat16)
    noisy = (exact * (1 + torch.finfo(torch.bfloat16).eps * 0.4 * torch.randn_like(exact))).bfloat16()
    with pytest.raises(AssertionError, match="units in the last place, away from zero"):
        assert_close_to_oracle(up, exact, noisy)


SHAPES = [(64, 96), (16, 32), (7, 40), (3, 1), (128, 4), (4, 100, 64), (1, 2048), (2, 8, 16, 24), (300,), (1000, 1)]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounded_results_of_rows_of_every_size_pass_beside_any_baseline(shape, dtype) -> None:
    for _ in range(5):
        exact = torch.randn(shape, dtype=torch.float64)
        if len(shape) > 1:
            exact *= torch.exp2(torch.randint(-6, 7, (*shape[:-1], 1)).double())
        exact[..., -1:] *= torch.rand_like(exact[..., -1:]) > 0.5
        exact = exact.clamp(-400, 400)
        rounded = exact.to(dtype)
        noisy = (exact * (1 + torch.finfo(dtype).eps * 0.3 * torch.randn_like(exact))).to(dtype)
        for plain in (rounded, noisy):
            assert_close_to_oracle(rounded, exact, plain)
            assert_close_to_oracle(plain, exact, plain)


def test_rows_of_zeros_and_of_what_is_flushed_to_zero_are_not_judged_by_their_size() -> None:
    exact = torch.randn(64, 32, dtype=torch.float64)
    exact[3], exact[4], exact[5, :31] = 0, exact[4] * 1e-42, 0
    for dtype in (torch.float32, torch.bfloat16):
        flushed = exact.to(dtype)
        flushed[4] = 0
        assert_close_to_oracle(flushed, exact, exact.to(dtype))


def test_a_logarithm_of_a_sum_may_pass_zero_anywhere() -> None:
    lse = torch.randn(4, 500, dtype=torch.float64) * 3
    lse[:, ::7], lse[:, 3] = -torch.inf, 1e-12
    # As where it is a maximum and a logarithm, each of them rounded.
    plain, other = ((lse + 2.0**-24 * 3 * torch.randn_like(lse)).float() for _ in range(2))
    assert_close_to_oracle(other, lse, plain)


def test_errors_that_a_row_shares_are_no_lean() -> None:
    """A row of attention is divided by one sum, whose error all of its columns have."""
    for _ in range(10):
        exact = torch.randn(20, 128, dtype=torch.float64)
        off = 1 + torch.finfo(torch.bfloat16).eps * 0.3 * torch.randn(2, 20, 1, dtype=torch.float64)
        plain, other = (exact * off).bfloat16()
        assert_close_to_oracle(other, exact, plain)


def test_a_small_row_between_large_ones_fails_where_the_baseline_is_never_that_far_off() -> None:
    exact = torch.randn(64, 128, dtype=torch.float64)
    exact[17] *= 2.0**-6
    # Elsewhere a whole row is further off than that one is large.
    plain = exact.bfloat16()
    plain[40] += 0.25
    zeroed = exact.bfloat16()
    zeroed[17] = 0
    with pytest.raises(AssertionError, match=r"relative row .* ABOVE .* row \(17,\)"):
        assert_close_to_oracle(zeroed, exact, plain)


def test_rows_that_cancel_as_a_whole_may_be_off_by_any_part_of_themselves() -> None:
    """A weight of linear attention is a product that all columns share, and now and then almost 0."""
    for _ in range(100):
        weight, *signs = torch.randn(3, 4, 70, 1, dtype=torch.float64)
        # No row's error is next to nothing: chance would have it that all rows beside the one were such.
        noise, other = (sign.sign() * (1 + torch.rand(4, 70, 1, dtype=torch.float64)) / 2 for sign in signs)
        values = torch.randn(4, 70, 48, dtype=torch.float64)
        weight[2, 11] = 1e-6
        exact, plain, kernel = (w * values for w in (weight, weight + 1e-7 * noise, weight + 1e-7 * other))
        assert_close_to_oracle(kernel.float(), exact, plain.float())


def test_measure_finds_the_row_that_is_furthest_off_for_its_size() -> None:
    oracle = torch.ones(3, 16, dtype=torch.float64)
    oracle[1] = 0.25
    report = measure((oracle - 0.125).float(), oracle)
    assert (report.relative_row, report.at_row) == (0.5, (1,))
    # So few columns may cancel.
    assert measure(oracle[:, :15].float() - 0.125, oracle[:, :15]).relative_row == 0
