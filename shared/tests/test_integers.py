"""The arithmetic of launch plans, beside what it is defined by."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from kernel_reference.integers import (
    cdiv,
    is_power_of_two,
    power_of_two_at_least,
    power_of_two_at_most,
    power_of_two_in,
)

counts = st.integers(1, 2**40)


@given(st.integers(0, 2**40), counts)
def test_cdiv_is_the_least_count_of_pieces_that_hold_the_whole(a: int, b: int) -> None:
    pieces = cdiv(a, b)
    assert pieces * b >= a > (pieces - 1) * b or a == pieces == 0


@given(counts)
def test_powers_of_two_around_a_number_enclose_it_within_a_factor_of_two(n: int) -> None:
    least, most = power_of_two_at_least(n), power_of_two_at_most(n)
    assert most <= n <= least < 2 * n
    assert is_power_of_two(least, most)
    assert (least == most) == is_power_of_two(n)


@given(counts)
def test_the_power_of_two_in_a_number_leaves_an_odd_one(n: int) -> None:
    assert is_power_of_two(power_of_two_in(n))
    assert n % power_of_two_in(n) == 0
    assert n // power_of_two_in(n) % 2 == 1


def test_numbers_below_one_are_no_powers_of_two() -> None:
    assert not is_power_of_two(0)
    assert not is_power_of_two(-2)
    assert not is_power_of_two(4, 0)
    assert is_power_of_two(1, 2, 4)


def test_plans_and_their_arithmetic_need_no_torch() -> None:
    """A plan is pure: it can be made and looked at where there is neither a GPU nor torch."""
    code = "import sys, kernel_reference.integers, kernel_reference.plans; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
