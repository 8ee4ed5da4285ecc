"""Bounds of packed sequences: read in one copy, checked by name, clamped."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel_reference.ragged import check_cu_seqlens, clamped_ranges, read_integers


def test_bounds_give_the_lengths_between_them() -> None:
    assert check_cu_seqlens("cu", [0, 3, 3, 8], 9) == [3, 0, 5]
    assert check_cu_seqlens("cu", [0], 0) == []


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([], r"^cu must be \[B \+ 1\], got no entries$"),
        ([1, 3], r"^cu\[0\] must be 0, got 1$"),
        ([0, 3, 2], r"^cu\[2\] must be from cu\[1\] = 3 to 8 \(the rows of k\), got 2$"),
        ([0, 9], r"^cu\[1\] must be from cu\[0\] = 0 to 8 \(the rows of k\), got 9$"),
        ([0, -1], r"^cu\[1\] must be from cu\[0\] = 0 to 8 \(the rows of k\), got -1$"),
    ],
)
def test_the_first_bad_bound_is_named(bounds: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_cu_seqlens("cu", bounds, 8, "k")


@given(st.lists(st.integers(-20, 20), min_size=1, max_size=6), st.integers(0, 10))
def test_clamped_ranges_lie_within_the_rows_and_are_the_bounds_where_those_are_right(bounds, rows) -> None:
    ranges = clamped_ranges(torch.tensor(bounds), rows)
    assert len(ranges) == len(bounds) - 1
    assert all(0 <= begin <= end <= rows for begin, end in ranges)
    for (begin, end), first, last in zip(ranges, bounds, bounds[1:], strict=False):
        if 0 <= first <= last <= rows:
            assert (begin, end) == (first, last)


def test_integers_are_read_by_name_whatever_their_dtype_and_shape() -> None:
    tensors = {
        "table": torch.tensor([[3, -1], [2**31 - 1, 0]], dtype=torch.int32),
        "slots": torch.tensor([7, 2**40])[::1],
        "accepted": None,
        "none": torch.empty(0, dtype=torch.int64),
        "flags": torch.tensor([True, False]),
    }
    assert read_integers(tensors) == {
        "table": [3, -1, 2**31 - 1, 0], "slots": [7, 2**40], "none": [], "flags": [1, 0],
    }  # fmt: skip
    assert read_integers({"accepted": None}) == {}
