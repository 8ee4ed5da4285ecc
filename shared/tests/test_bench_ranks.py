"""Are calls of several ranks checked against one GPU's, and timed as their slowest rank?"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from kernel_reference.bench.ranks import ONE, Call, RanksCase, Timed, measure
from kernel_reference.testing.distributed import run

CPU = torch.device("cpu")


def make(device: torch.device, rank: int, world: int) -> Mapping[str, Call]:
    x = torch.arange(8.0, device=device)
    own = slice(4 * rank, 4 * rank + 4)
    return {ONE: Call(lambda: x), "shared": Call(lambda: x[own], lambda whole: whole[own])}


def _measured(rank: int) -> list[Timed]:
    case = RanksCase("a copy", {"elements": 8}, make, efficiency={"shared": 1e-9}, us_at_most={ONE: 1e-9})
    one, shared = measure(case, CPU, 3)
    assert (one.case, one.implementation, one.world, one.error) == ("a copy", ONE, 2, 0)
    assert one.efficiency == 0.5
    assert (one.owed, one.met) == ("at most 1e-09 us", False)
    assert shared.efficiency == one.median_us / 2 / shared.median_us
    assert (shared.owed, shared.met) == ("efficiency >= 1e-09", True)

    def wrong(device: torch.device, rank: int, world: int) -> Mapping[str, Call]:
        return {ONE: Call(lambda: torch.ones(3)), "shared": Call(lambda: torch.ones(3) + 0.1 * rank)}

    with pytest.raises(RuntimeError, match=r"a copy, shared: off by 0.1 of the largest element of one GPU's"):
        measure(RanksCase("a copy", {}, wrong), CPU, 1)
    with pytest.raises(ValueError, match=r"make must be a function that gives a call 'one GPU', got "):
        measure(RanksCase("a copy", {}, lambda device, rank, world: {"shared": Call(lambda: torch.ones(3))}), CPU, 1)
    return [one, shared]


def test_a_call_is_checked_against_one_gpu_s_and_takes_as_long_as_its_slowest_rank() -> None:
    first, second = run(2, _measured)
    assert first == second
