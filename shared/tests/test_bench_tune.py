"""Does the search find the best plan that works, and say of the others why not?"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernel_reference.bench.tune import (
    Named,
    Problem,
    Search,
    changes,
    input_sets,
    of_attention,
    of_heads,
    of_rows,
    search_all,
)


@dataclass(frozen=True)
class Plan:
    block: int = 32
    warps: int = 4
    stages: int = 2


class FakeClock:
    """A call costs what it adds."""

    l2_bytes = 60 * 2**20

    def __init__(self) -> None:
        self.device_us = 0.0

    def free_bytes(self) -> int:
        return 10**9

    def host_seconds(self) -> float:
        return self.device_us * 1e-6

    def synchronize(self) -> None:
        return None

    def sample_us(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        times = []
        for call in calls:
            before = self.device_us
            call()
            times.append(self.device_us - before)
        return times

    def flush(self) -> None:
        return None

    def capture(self, run: Callable[[], None]) -> Callable[[], object]:
        raise AssertionError("nothing here is short")


def cost(plan: Plan) -> float:
    """Larger blocks want more warps; the best is (64, 8, 3)."""
    return 200 + abs(plan.block - 64) + 10 * abs(plan.warps * 8 - plan.block) / 8 + 5 * abs(plan.stages - 3)


class Fake:
    """A problem of two sets of inputs."""

    def __init__(self, clock: FakeClock, **options: Any) -> None:
        self.clock, self.forgotten, self.turns = clock, 0, set[int]()
        groups = [changes(block=(16, 32, 64, 128), warps=(2, 4, 8)), changes(stages=(2, 3, 4))]
        given = {"searches": [(Plan(), groups)], "used": Plan(), **options}
        self.problem = Problem(
            sets=2, call=self.call, results=self.results, apart_by=of_rows, apart_at_most=0.01, forget=self.forget,
            **given,
        )  # fmt: skip

    def call(self, plan: Plan, turn: int) -> None:
        self.turns.add(turn)
        self.clock.device_us += cost(plan)

    def results(self, plan: Plan) -> list[torch.Tensor]:
        return [torch.ones(4, 8)]

    def forget(self) -> None:
        self.forgotten += 1


def search(fake: Fake) -> tuple[Search[Plan], Plan]:
    search = Search(fake.problem, fake.clock, 0.001)
    return search, search.run()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_the_best_of_all_groups_is_found_and_timed_beside_the_one_in_use(clock: FakeClock) -> None:
    fake = Fake(clock)
    found, best = search(fake)
    assert best == Plan(64, 8, 3)
    assert found.times_us[best] == cost(best)
    assert found.times_us[Plan()] == cost(Plan())
    assert fake.turns == {0, 1}
    assert fake.forgotten > 0


def test_a_plan_in_use_that_is_the_best_stays(clock: FakeClock) -> None:
    assert search(Fake(clock, used=Plan(64, 8, 3), searches=[(Plan(), [changes(warps=(2, 4))])]))[1] == Plan(64, 8, 3)


def caused(error: Exception) -> ValueError:
    refusal = ValueError("plan must be one that fits")
    refusal.__context__ = error
    return refusal


@pytest.mark.parametrize(
    ("raised", "why"),
    [
        (ValueError("plan must be such that it covers"), "refused: it does not cover the problem"),
        (RuntimeError("no\n kernel"), "fails: RuntimeError: no kernel"),
        (type("OutOfResources", (Exception,), {})("shared memory, too little"), "does not fit: shared memory"),
        (caused(type("OutOfResources", (Exception,), {})("threads, too few")), "does not fit: threads"),
    ],
    ids=["refused", "fails", "too large", "too large, by a launch"],
)
def test_plans_that_fail_are_left_out_with_their_reason(clock: FakeClock, raised: Exception, why: str) -> None:
    fake = Fake(clock)

    def results(plan: Plan) -> list[torch.Tensor]:
        if plan.block == 64:
            raise raised
        return [torch.ones(4, 8)]

    fake.problem.results = results
    found, best = search(fake)
    assert best.block != 64
    assert {reason for plan, reason in found.skipped.items() if plan.block == 64} == {why}


@pytest.mark.parametrize("wrong", [1.02, float("nan")])
def test_a_plan_of_wrong_results_has_no_time(clock: FakeClock, wrong: float) -> None:
    fake = Fake(clock)
    fake.problem.results = lambda plan: [torch.ones(4, 8) * (wrong if plan.stages == 3 else 1.001)]
    found, best = search(fake)
    assert best.stages != 3
    assert all(plan.stages != 3 for plan in found.times_us)
    assert any(reason.startswith("wrong") for reason in found.skipped.values())


def test_results_are_overwritten_so_that_the_next_plan_does_not_inherit_them(clock: FakeClock) -> None:
    fake = Fake(clock)
    memory = torch.ones(4, 8)
    # Only the plan in use writes; the others leave what is there.
    fake.problem.results = lambda plan: [torch.ones(4, 8)] if plan == Plan() else [memory]
    found, _ = search(fake)
    assert len(found.times_us) == 2


def test_differences_are_relative_to_the_largest_of_a_row_or_head() -> None:
    wanted = torch.tensor([[[100.0, 1.0], [1.0, 0.5]]])
    assert of_rows(wanted + torch.tensor([0.0, 0.1]), wanted) == pytest.approx(0.1)
    # Two tokens of two heads of one element.
    wanted = wanted.permute(1, 2, 0)
    assert of_heads(wanted + torch.tensor([[0.0], [0.1]]), wanted) == pytest.approx(0.1)
    assert of_rows(wanted * float("nan"), wanted) == of_heads(wanted * float("nan"), wanted) == float("inf")


def test_sets_of_inputs_are_more_than_the_cache_holds_and_fit_in_memory(clock: FakeClock) -> None:
    one = torch.empty(4 * 2**20, dtype=torch.uint8)
    sets = input_sets(one, 2**40, 0, clock)
    assert clock.l2_bytes < sets * one.nbytes < clock.free_bytes()


def test_attention_of_a_benchmark_is_called_on_each_of_its_sets(clock: FakeClock) -> None:
    @dataclass
    class Inputs:
        q: torch.Tensor
        number: int

    class Attention:
        bytes_moved = 2**40

        def __init__(self) -> None:
            self.made, self.called = 0, list[int]()

        def make_inputs(self) -> Inputs:
            self.made += 1
            return Inputs(torch.ones(2**18, 8), self.made)

        def call(self, inputs: Any, *, plan: Plan) -> SimpleNamespace:
            self.called.append(inputs.number)
            clock.device_us += cost(plan)
            return SimpleNamespace(out=inputs.q.clone())

    attention = Attention()
    searches = [(Plan(), [changes(stages=(2, 3))])]
    problem = of_attention(attention, attention.make_inputs(), Plan(), searches, clock, 0.01)
    assert problem.sets == attention.made > 1
    assert Search(problem, clock, 0.001).run() == Plan(stages=3)
    assert set(attention.called) == set(range(1, problem.sets + 1))


def test_what_is_found_is_said_and_written_one_problem_after_the_other(
    clock: FakeClock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_memory(_: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory. All of it")

    problems = [Named("first", lambda _: Fake(clock).problem), Named("too large", without_memory)]
    search_all(problems, clock, 0.001, tmp_path / "plans.json")
    said = capsys.readouterr().out
    assert "[1/2] first" in said
    assert "block=64, warps=8, stages=3" in said
    assert "left out: out of memory" in said
    (kept,) = json.loads((tmp_path / "plans.json").read_text())
    assert kept["problem"] == "first"
    assert (
        kept["best"]
        == kept["plans"][0]
        == {"us": cost(Plan(64, 8, 3)), "kind": "Plan", "block": 64, "warps": 8, "stages": 3}
    )
