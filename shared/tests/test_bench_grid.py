"""A map's sample holds every two values that may meet, in few points, the same for the same seed."""

from __future__ import annotations

import math
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_reference.bench.grid import Axis, Map, Point, Value, cover, key_of

PREFILL = [
    Axis("dtype", ["bfloat16", "float16", "float32"]),
    Axis("head size", [64, 72, 96, 128, 256]),
    Axis("heads", [4, 8, 16, 40, 64]),
    Axis("tokens", [500, 3000, 8192, 32768]),
    Axis("sequences", [1, 4, 16]),
]


def is_small(point: Point) -> bool:
    return bool(point["tokens"] * point["sequences"] * point["heads"] <= 2**20)


def pairs_of(points: list[dict[str, Value]]) -> set[tuple[Any, ...]]:
    return {pair for point in points for pair in combinations(sorted(point.items()), 2)}


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[Axis], set[tuple[int, ...]]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    every = list(product(*map(range, sizes)))
    refused = draw(st.sets(st.sampled_from(every), max_size=len(every)))
    return [Axis(f"axis {i}", range(size)) for i, size in enumerate(sizes)], refused


@settings(max_examples=150, deadline=None)
@given(grid=grids(), seed=st.integers(0, 3))
def test_every_pair_that_some_allowed_point_holds_is_in_the_sample(
    grid: tuple[list[Axis], set[tuple[int, ...]]], seed: int
) -> None:
    axes, refused = grid
    names = [axis.name for axis in axes]

    def allows(point: Point) -> bool:
        return tuple(point.values()) not in refused

    allowed = [dict(zip(names, row, strict=True)) for row in product(*(a.values for a in axes)) if row not in refused]
    found = cover(axes, allows, seed=seed)
    assert all(allows(point) for point in found)
    assert pairs_of(found) == pairs_of(allowed)
    assert len({tuple(point.values()) for point in found}) == len(found)


def test_a_grid_of_900_points_is_covered_by_few() -> None:
    found = cover(PREFILL, is_small)
    assert 25 <= len(found) <= 40
    assert cover(PREFILL, is_small) == found
    assert cover(PREFILL, is_small, seed=1) != found


def test_known_points_come_first_and_what_they_cover_is_not_covered_again() -> None:
    cliff = {"dtype": "float16", "head size": 128, "heads": 8, "tokens": 32768, "sequences": 1}
    found = cover(PREFILL, is_small, known=[cliff])
    assert found[0] == cliff
    assert len(found) <= 40


def test_a_number_of_points_cuts_the_sample_or_fills_it_up() -> None:
    whole = cover(PREFILL, is_small)
    assert cover(PREFILL, is_small, points=10) == whole[:10]
    more = cover(PREFILL, is_small, points=60)
    assert (more[: len(whole)], len({tuple(p.values()) for p in more})) == (whole, 60)
    assert len(cover(PREFILL[:2], lambda point: True, points=1000)) == 15


def test_a_point_is_known_by_its_values_whatever_their_order() -> None:
    assert key_of("decode", {"a": 1, "b": "x"}) == key_of("decode", {"b": "x", "a": 1})
    assert key_of("decode", {"a": 1, "b": "x"}) != key_of("prefill", {"a": 1, "b": "x"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"axes": PREFILL[:1]}, "axes must be at least two of different names"),
        ({"axes": [PREFILL[0], PREFILL[0]]}, "axes must be at least two of different names"),
        ({"axes": [Axis(f"a{i}", range(40)) for i in range(4)]}, "axes must span at most 200000 points, got 2560000"),
        ({"known": [{"dtype": "float8"}]}, "known must hold points of the axes"),
        ({"known": [dict.fromkeys("ab", 1)], "axes": [Axis("a", [1, 2]), Axis("b", [1])]}, "known must hold allowed"),
    ],
)
def test_a_map_that_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    values: dict[str, Any] = {"name": "x", "axes": PREFILL, "case": lambda p: None, "allows": lambda p: False}
    with pytest.raises(ValueError, match=words):
        Map(**(values | changes))
    assert math.prod(len(axis.values) for axis in PREFILL) == 900


def test_an_axis_has_distinct_values() -> None:
    with pytest.raises(ValueError, match="values of page must be distinct"):
        Axis("page", [16, 16])
