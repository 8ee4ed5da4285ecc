"""From the levels of a cascade to launches: one for all of them, or one for each; and at most one that merges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kernel_reference.launching import launch_nothing, without_memory
from prefix_prefill.arguments import PrefillTensors
from prefix_prefill.cascade.joined import have_one_cache, joined_plan, prepare_joined
from prefix_prefill.launch import device_limits, prepare_kernel, prepare_prefill
from prefix_prefill.plan import PrefillPlan, Problem, plan_prefill

Tensor = torch.Tensor


def prepare_cascade(
    problems: Sequence[Problem], plans: Sequence[PrefillPlan | None], levels: Sequence[PrefillTensors]
) -> Callable[[Sequence[PrefillTensors]], None]:
    """What attends to the levels of a cascade, called with tensors that look like these.

    All at once where that is quicker: see joined.py. Else all but the last leave their results in parts, which the last
    one adds to its own.
    """
    if problems[0].tokens == 0:
        return launch_nothing
    apart = _prepare_levels(problems, plans, levels)
    plan = None
    if all(plan is None for plan in plans):
        plan = joined_plan(problems, device_limits(levels[0].q.device))
    if plan is None:
        return apart
    together = prepare_joined(problems, plan, levels)

    def run(levels: Sequence[PrefillTensors]) -> None:
        (together if have_one_cache(levels) else apart)(levels)

    return run


def _prepare_levels(
    problems: Sequence[Problem], plans: Sequence[PrefillPlan | None], levels: Sequence[PrefillTensors]
) -> Callable[[Sequence[PrefillTensors]], None]:
    """Level by level."""
    *before, last = [_prepare_level(*each) for each in zip(problems, plans, levels, strict=True)]

    def run(levels: Sequence[PrefillTensors]) -> None:
        parts: list[Tensor] = []
        for attend, tensors in zip(before, levels, strict=False):
            parts += attend(*tensors)
        last(*levels[-1], *parts)

    return run


def _prepare_level(problem: Problem, plan: PrefillPlan | None, tensors: PrefillTensors) -> Callable[..., Any]:
    if not problem.shared:
        return prepare_prefill(problem, plan, tensors)
    device = tensors.q.device
    forms = PrefillTensors(*map(without_memory, tensors))  # type: ignore[arg-type]
    made: dict[bool, Callable[..., Any]] = {}

    def run(*given: Tensor) -> Any:
        # As launching.by_alignment has it, for what returns something.
        aligned = given[3].data_ptr() % 16 == given[4].data_ptr() % 16 == 0
        if aligned not in made:
            chosen = plan
            if chosen is None:
                tma = problem.tma and aligned
                chosen = plan_prefill(replace(problem, tma=tma), device_limits(device), problem.num_splits)
            made[aligned] = _leaving_parts(problem, chosen, forms, device)
        return made[aligned](*given)

    return run


def _leaving_parts(
    problem: Problem, plan: PrefillPlan, forms: PrefillTensors, device: torch.device
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """A launch over a level before the last: parts, their lse, and of each row how many there are."""
    attend = prepare_kernel(problem, plan, forms, device)
    rows = problem.tokens * problem.num_heads * max(plan.num_splits, 1)
    if plan.num_splits == 0:
        # Tiles are cut only where they are fewer than programs.
        rows = max(rows, plan.programs * plan.block_m)

    size = problem.head_dim_v
    k_scale, v_scale = (PrefillTensors._fields.index(name) for name in ("k_scale", "v_scale"))

    def run(*tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        pieces = torch.empty(problem.tokens, dtype=torch.int32, device=device)
        if plan.hopper:
            part = torch.empty((rows, size), dtype=torch.float32, device=device)
            part_lse = torch.empty(rows, dtype=torch.float32, device=device)
            kept: tuple[Tensor, ...] = part, part_lse
        else:
            # In one: so the portable kernel takes them.
            workspace = torch.empty(rows * (size + 1), dtype=torch.float32, device=device)
            part, part_lse = workspace[: rows * size].view(rows, size), workspace[rows * size :]
            kept = (workspace,)
        attend(*tensors[:9], None, tensors[k_scale], tensors[v_scale], None, None, None, None, *kept, pieces)
        return part, part_lse, pieces

    return run
