"""The grids of benchmarks/map.py can be measured: every point of the sample is a case, and the smallest are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_reference.bench.dry import DryBench, judge, rehearse, rehearse_cases
from kernel_reference.bench.run import load_module

MAP = Path(__file__).parents[1] / "benchmarks" / "map.py"
SPOTS = MAP.with_name("spots.py")
HOST = MAP.with_name("host.py")


@pytest.mark.skipif(not MAP.is_file(), reason="an sdist has no benchmarks")
def test_every_point_of_the_maps_is_a_case_and_the_smallest_are_right() -> None:
    counts = rehearse(MAP)
    assert 40 <= sum(counts.values()) <= 90


@pytest.mark.skipif(not SPOTS.is_file(), reason="an sdist has no benchmarks")
def test_every_figure_that_is_quoted_is_of_a_case_and_the_smallest_are_right() -> None:
    rehearse_cases(HOST)
    names = rehearse_cases(SPOTS)
    spots = load_module(SPOTS, "cases(device)")
    assert all(any(name.startswith(start) for name in names) for start in spots.FROM_CLIFFS)
    judge(spots.packed(DryBench.device, spots.Shape(spots.LLAMA3_8B, ((40, 3), (17, 1)))))
    judge(spots.cliffs.new_keys(DryBench.device, (40, 17)))
    judge(spots.large_scores(spots.cliffs.case(DryBench.device, "cap", (2, 5, 30), soft_cap=30)))
