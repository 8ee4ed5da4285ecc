"""A launch plan on its way through a torch op, and back."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from kernel_reference.plans import Plan, check_covers, plan_as_ints


@dataclass(frozen=True)
class SplitPlan(Plan):
    block: int
    num_warps: int
    hopper: bool = False

    def covers(self, problem: OtherPlan) -> bool:
        return self.block % problem.block == 0 < self.block <= 128 and not (self.hopper and self.num_warps > 4)


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


@pytest.mark.parametrize(
    ("plan", "hint"),
    [
        (SplitPlan(48, 4), ", as with block 32, 64, 96 or 128"),
        (SplitPlan(-1, 1), ", as with block 32, 64, 96 or 128"),
        (SplitPlan(64, 8, True), ", as with num_warps 0, 1, 2, 3 or others, or with hopper False"),
        # Two of its fields are wrong.
        (SplitPlan(48, 8, True), ""),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_cover_a_problem_is_refused_with_the_one_field_that_may_be_mended(
    plan: SplitPlan, hint: str
) -> None:
    check_covers(None, OtherPlan(32))
    check_covers(SplitPlan(64, 4, True), OtherPlan(32))
    says = re.escape(f"plan must be one made for OtherPlan(block=32){hint}, got {plan}")
    with pytest.raises(ValueError, match=f"^{says}$"):
        check_covers(plan, OtherPlan(32))
