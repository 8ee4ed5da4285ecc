"""The grids of benchmarks/map.py can be measured: every point of the sample is a case, and the smallest are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_reference.bench.dry import DryBench, judge, rehearse, rehearse_cases
from kernel_reference.bench.run import load_module

MAP = Path(__file__).parents[1] / "benchmarks" / "map.py"
SPOTS = MAP.with_name("spots.py")
CLIFFS = MAP.with_name("cliffs.py")


@pytest.mark.skipif(not MAP.is_file(), reason="an sdist has no benchmarks")
def test_every_point_of_the_maps_is_a_case_and_the_smallest_are_right() -> None:
    counts = rehearse(MAP)
    assert 40 <= sum(counts.values()) <= 90


@pytest.mark.skipif(not CLIFFS.is_file(), reason="an sdist has no benchmarks")
def test_every_cliff_is_a_case_that_owes_a_speed() -> None:
    cases = [*load_module(CLIFFS, "cases(device)").cases(DryBench().device)]
    assert len({case.name for case in cases}) == len(cases) >= 60
    assert all(case.requirements for case in cases)


@pytest.mark.skipif(not SPOTS.is_file(), reason="an sdist has no benchmarks")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_figure_that_is_quoted_is_of_a_case_and_short_prompts_are_right(dtype: str) -> None:
    assert len(rehearse_cases(SPOTS, judged=0)) == 19
    spots = load_module(SPOTS, "cases(device)")
    case = spots.prefill(DryBench.device, dtype, dtype=dtype, heads=2, tokens=70, sequences=2)
    judge(spots.beside_bfloat16(case) if dtype == "float16" else case)
