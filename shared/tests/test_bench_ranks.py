"""Are calls of several ranks checked against one GPU's, and timed as their slowest rank?"""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest
import torch

from kernel_reference.bench.ranks import ONE, Call, RanksCase, measure
from kernel_reference.testing.distributed import run

Tensor = torch.Tensor
CPU = torch.device("cpu")


def make(device: torch.device, rank: int, world: int) -> Mapping[str, Call]:
    x = torch.arange(8.0, device=device)

    def slow_on_one_rank() -> Tensor:
        time.sleep(0.05 * rank)
        return x[4 * rank : 4 * rank + 4]

    return {
        ONE: Call(lambda: (time.sleep(0.02), x)[1]),
        "shared": Call(slow_on_one_rank, lambda whole: whole[4 * rank : 4 * rank + 4]),
    }


def _measured(rank: int) -> None:
    case = RanksCase("a copy", {"elements": 8}, make, efficiency={"shared": 0.9}, us_beside_half={ONE: 1e6})
    one, shared = measure(case, CPU, 3)
    assert (one.case, one.implementation, one.world, one.error) == ("a copy", ONE, 2, 0)
    assert one.efficiency == 0.5
    assert (one.owed, one.met) == ("at most 1e+06 us beyond its share", True)
    # Rank 0 is done at once, and both say what rank 1 took.
    assert shared.p20_us >= 50_000
    assert shared.efficiency == one.median_us / 2 / shared.median_us
    assert (shared.owed, shared.met) == ("efficiency >= 0.9", False)

    def wrong(device: torch.device, rank: int, world: int) -> Mapping[str, Call]:
        return {ONE: Call(lambda: torch.ones(3)), "shared": Call(lambda: torch.ones(3) + 0.1 * rank)}

    with pytest.raises(RuntimeError, match=r"a copy, shared: off by 0.1 of the largest element of one GPU's"):
        measure(RanksCase("a copy", {}, wrong), CPU, 1)
    with pytest.raises(ValueError, match=r"make must be a function that gives a call 'one GPU', got "):
        measure(RanksCase("a copy", {}, lambda device, rank, world: {"shared": Call(lambda: torch.ones(3))}), CPU, 1)


def test_a_call_is_checked_against_one_gpu_s_and_takes_as_long_as_its_slowest_rank() -> None:
    run(2, _measured)
