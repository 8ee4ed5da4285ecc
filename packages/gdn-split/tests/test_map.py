"""The grids of benchmarks/map.py can be measured: every point of the sample is a case, and the smallest are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_reference.bench.dry import rehearse, rehearse_cases

MAP = Path(__file__).parents[1] / "benchmarks" / "map.py"
SPOTS = MAP.with_name("spots.py")


@pytest.mark.skipif(not MAP.is_file(), reason="an sdist has no benchmarks")
def test_every_point_of_the_maps_is_a_case_and_the_smallest_are_right() -> None:
    counts = rehearse(MAP)
    assert 40 <= sum(counts.values()) <= 130
    assert set(counts) == {"split", "merge", "convolution", "decode step", "inputs of prefill"}


@pytest.mark.skipif(not SPOTS.is_file(), reason="an sdist has no benchmarks")
def test_every_figure_that_is_quoted_is_of_a_case_and_the_smallest_are_right() -> None:
    assert len(rehearse_cases(SPOTS, judged=3)) >= 26
