"""From the levels of a cascade to launches: one for all of them, or one for each; and at most one that merges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kernel_reference.dispatch import allocator_of
from kernel_reference.launching import Run, without_memory
from kernel_reference.packing import Late
from prefix_prefill.arguments import PrefillTensors
from prefix_prefill.cascade.joined import have_one_cache, joined_plan, prepare_joined
from prefix_prefill.cascade.pieces import plan_in_pieces
from prefix_prefill.launch import device_limits, prepare_kernel, prepare_prefill
from prefix_prefill.merging.launch import LAUNCH_NOTHING
from prefix_prefill.plan import PrefillPlan, Problem, plan_prefill

Tensor = torch.Tensor
_K_SCALE, _V_SCALE = (PrefillTensors._fields.index(name) for name in ("k_scale", "v_scale"))
# What a level before the last leaves: parts, their lse, and of each row how many there are.
_PARTS = 3


def prepare_cascade(
    problems: Sequence[Problem], plans: Sequence[PrefillPlan | None], levels: Sequence[PrefillTensors]
) -> Run:
    """What attends to the levels of a cascade, called with tensors that look like these, or with their addresses.

    All at once where that is quicker: see joined.py. Else all but the last leave their results in parts, which the last
    one adds to its own.
    """
    if problems[0].tokens == 0:
        return LAUNCH_NOTHING
    apart = _prepare_levels(problems, plans, levels)
    plan = None
    if all(plan is None for plan in plans):
        plan = joined_plan(problems, device_limits(levels[0].q.device))
    if plan is None:
        return apart
    together = prepare_joined(problems, plan, levels)

    def run(levels: Sequence[PrefillTensors]) -> None:
        (together if have_one_cache(levels) else apart)(levels)

    # Prompts, which the GPU is at for longer than the host.
    return Run(run, lambda _: False)


def _prepare_levels(
    problems: Sequence[Problem], plans: Sequence[PrefillPlan | None], levels: Sequence[PrefillTensors]
) -> Run:
    """Level by level."""
    before = [_SharedLevel(*each, problems[-1]) for each in zip(problems[:-1], plans, levels, strict=False)]
    last = prepare_prefill(problems[-1], plans[-1], levels[-1])

    def run(levels: Sequence[PrefillTensors]) -> None:
        parts: list[Tensor] = []
        for level, tensors in zip(before, levels, strict=False):
            parts += level(*tensors)
        last(*levels[-1], *parts)

    def at(levels: Sequence[PrefillTensors]) -> bool:
        # Parts are released once all that reads them is launched.
        workspaces: list[Tensor] = []
        parts: list[int] = []
        for level, pointers in zip(before, levels, strict=False):
            workspace, own = level.workspace()
            if not level.at(own, *pointers):
                return False
            workspaces.append(workspace)
            parts += own
        return last.at(*levels[-1], *parts)

    def again(levels: Sequence[PrefillTensors]) -> Callable[..., bool] | None:
        late = [Late(number) for number in range(_PARTS * len(before))]
        begins = []
        for i, (level, pointers) in enumerate(zip(before, levels, strict=False)):
            begin = level.again(late[_PARTS * i : _PARTS * (i + 1)], *pointers)
            if begin is None:
                return None
            begins.append((level.workspace, begin))
        last_again = last.again(*levels[-1], *late)
        if last_again is None:
            return None

        def start() -> bool:
            workspaces: list[Tensor] = []
            parts: list[int] = []
            for new_workspace, begin in begins:
                workspace, own = new_workspace()
                workspaces.append(workspace)
                parts += own
                if not begin(*parts):
                    return False
            return last_again(*parts)

        return start

    return Run(run, at, again)


class _SharedLevel:
    """A launch over a level before the last, which leaves parts, their lse, and of each row how many there are."""

    def __init__(
        self, problem: Problem, plan: PrefillPlan | None, tensors: PrefillTensors, last: Problem
    ) -> None:  # fmt: skip
        self._problem, self._plan, self._last, self._device = problem, plan, last, tensors.q.device
        self._forms = PrefillTensors(*map(without_memory, tensors))  # type: ignore[arg-type]
        self._made: dict[bool, _LeavingParts] = {}

    def __call__(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        # As launching.by_alignment has it, for what returns something.
        return self._of(given[3].data_ptr() % 16 == given[4].data_ptr() % 16 == 0)(*given)

    def workspace(self) -> tuple[Tensor, tuple[int, int, int]]:
        """Memory for what it leaves where all tensors are aligned, and the addresses of that."""
        return self._of(True).workspace()

    def at(self, places: Sequence[Any], *pointers: Any) -> bool:
        own = self._of(True)
        return own.attend.at(*own.given(pointers, places))  # type: ignore[no-any-return]

    def again(self, places: Sequence[Any], *pointers: Any) -> Callable[..., bool] | None:
        own = self._of(True)
        return own.attend.again(*own.given(pointers, places))  # type: ignore[no-any-return]

    def _of(self, aligned: bool) -> _LeavingParts:
        if aligned not in self._made:
            plan = self._plan
            if plan is None:
                limits, tma = device_limits(self._device), self._problem.tma and aligned
                plan = plan_prefill(replace(self._problem, tma=tma), limits, self._problem.num_splits)
                plan = plan_in_pieces(plan, self._problem, self._last)
            self._made[aligned] = _LeavingParts(self._problem, plan, self._forms, self._device)
        return self._made[aligned]


class _LeavingParts:
    """The same by a plan."""

    def __init__(self, problem: Problem, plan: PrefillPlan, forms: PrefillTensors, device: torch.device) -> None:
        self.attend: Any = prepare_kernel(problem, plan, forms, device)
        rows = problem.tokens * problem.num_heads * max(plan.num_splits, 1)
        if plan.num_splits == 0:
            # Tiles are cut only where they are fewer than programs.
            rows = max(rows, plan.programs * plan.block_m)
        self._rows, self._size, self._tokens = rows, problem.head_dim_v, problem.tokens
        self._hopper, self._device = plan.hopper, device
        numbers = rows * (self._size + 1)
        # At multiples of 16 bytes.
        self._behind_part, self._behind_lse = 4 * rows * self._size, 4 * (numbers + -numbers % 4)
        size = self._behind_lse + 4 * problem.tokens
        self._new_workspace = allocator_of((size,), (1,), torch.uint8, device)

    def __call__(self, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        pieces = torch.empty(self._tokens, dtype=torch.int32, device=self._device)
        # In one: so the portable kernel takes them.
        workspace = torch.empty(self._rows * (self._size + 1), dtype=torch.float32, device=self._device)
        part = workspace[: self._rows * self._size].view(self._rows, self._size)
        part_lse = workspace[self._rows * self._size :]
        self.attend(*self.given(tensors, (part if self._hopper else workspace, part_lse, pieces)))
        return part, part_lse, pieces

    def workspace(self) -> tuple[Tensor, tuple[int, int, int]]:
        workspace = self._new_workspace()
        place = workspace.data_ptr()
        return workspace, (place, place + self._behind_part, place + self._behind_lse)

    def given(self, tensors: Sequence[Any], places: Sequence[Any]) -> tuple[Any, ...]:
        """What the kernel is called with, of tensors or of addresses."""
        part, part_lse, pieces = places
        kept = (part, part_lse) if self._hopper else (part,)
        return *tensors[:9], None, tensors[_K_SCALE], tensors[_V_SCALE], None, None, None, None, *kept, pieces
