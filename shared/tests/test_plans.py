"""A launch plan on its way through a torch op, and back."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kernel_reference.plans import Plan, plan_as_ints


@dataclass(frozen=True)
class SplitPlan(Plan):
    block: int
    num_warps: int
    hopper: bool = False


@dataclass(frozen=True)
class OtherPlan(Plan):
    block: int


@pytest.mark.parametrize("plan", [SplitPlan(64, 4, True), SplitPlan(16, 8)])
def test_a_plan_comes_back_from_the_ints_that_an_op_takes(plan: SplitPlan) -> None:
    ints = plan_as_ints(plan, SplitPlan)
    assert ints is not None
    assert [type(number) for number in ints] == [int] * 3
    assert SplitPlan.from_ints(ints) == plan
    assert SplitPlan.from_ints(tuple(ints)) == plan


def test_no_plan_is_none_on_either_side() -> None:
    assert plan_as_ints(None, SplitPlan) is None
    assert SplitPlan.from_ints(None) is None


def test_ints_of_another_count_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^plan must be the numbers of a SplitPlan, got \[64\]$"):
        SplitPlan.from_ints([64])


@pytest.mark.parametrize("plan", [OtherPlan(64), [64, 4, 0], "fast"])
def test_what_is_no_plan_of_the_kind_is_refused_with_the_name_of_the_kind(plan: object) -> None:
    package = __name__.partition(".")[0]
    with pytest.raises(TypeError, match=rf"^plan must be a {package}\.SplitPlan or None, got "):
        plan_as_ints(plan, SplitPlan)
