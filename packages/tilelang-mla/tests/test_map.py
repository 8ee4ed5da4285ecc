"""The grids of benchmarks/map.py can be measured: every point of the sample is a case, and the smallest are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_reference.bench.dry import DryBench, rehearse, rehearse_cases
from kernel_reference.bench.run import load_cases

MAP = Path(__file__).parents[1] / "benchmarks" / "map.py"
SPOTS = MAP.with_name("spots.py")


@pytest.mark.skipif(not MAP.is_file(), reason="an sdist has no benchmarks")
def test_every_point_of_the_maps_is_a_case_and_the_smallest_are_right() -> None:
    counts = rehearse(MAP)
    assert 40 <= sum(counts.values()) <= 90


@pytest.mark.skipif(not SPOTS.is_file(), reason="an sdist has no benchmarks")
def test_every_figure_that_is_quoted_is_of_a_case_of_the_benchmark() -> None:
    every = {case.name for case in load_cases(MAP.with_name("cases.py"), DryBench.device)}
    assert len(every & set(rehearse_cases(SPOTS, judged=0))) == 17


@pytest.mark.skipif(not MAP.is_file(), reason="an sdist has no benchmarks")
def test_peers_that_are_a_file_beside_the_cases_are_found_when_their_turn_comes() -> None:
    pytest.importorskip("triton")
    rows = [
        peer
        for case in load_cases(MAP.with_name("cases.py"), DryBench.device)
        for name, peer in case.peers.items()
        if name.endswith("alone")
    ]
    assert len(rows) == 18
    assert all(callable(peer()) for peer in rows)
