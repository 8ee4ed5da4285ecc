"""What launch.py does, for decode steps and drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gdn_split import launch
from gdn_split.kernels import step as kernels
from gdn_split.kernels import trees
from gdn_split.kernels.convolution import Convolution
from gdn_split.kernels.layer import Step as StepConstants
from gdn_split.kernels.layer import StepStrides
from gdn_split.plan import StepPlan, StepProblem, plan_step
from gdn_split.tensors import Commit, Step
from kernel_reference.integers import cdiv, power_of_two_at_least
from kernel_reference.lasting import Counters
from kernel_reference.launching import Launch, launch_nothing

Tensor = torch.Tensor

counters = Counters()


def prepare_step(problem: StepProblem, plan: StepPlan | None, tensors: Step | Commit) -> Callable[..., None]:
    """What takes tokens through a layer: called with an op's tensors."""
    if problem.sequences == 0 or problem.path_length == 0:
        return launch_nothing
    if plan is None:
        plan = plan_step(problem, launch.device_limits(tensors.mixed_qkvz.device))
    return StepLaunch(problem, plan, tensors)


class StepLaunch:
    """A launch, with what it needs beside an op's tensors: called with these."""

    def __init__(self, problem: StepProblem, plan: StepPlan, tensors: Step | Commit) -> None:
        self._problem = problem
        self._run = launch_of(problem, plan, tensors)
        parts = problem.has_norm and _slices(problem, plan) > 1
        self._raw = (
            (problem.sequences * problem.tokens, problem.shape.num_heads_v, problem.shape.head_v) if parts else None
        )
        counted = _updaters(problem, plan)
        if parts and not _is_tree(tensors):
            counted += problem.shape.num_heads_v
        # Pools of no slots have some too: the kernel is the same.
        self._count = max(1, problem.num_slots if problem.writes else problem.sequences) * counted
        self._device = tensors.mixed_qkvz.device

    def __call__(self, *given: Tensor | None) -> None:
        arrived, raw = self._beside(given[2])
        self._run(*in_order(self._problem, given, arrived, raw))

    def at(self, conv_state: Tensor, addresses: tuple[int | None, ...]) -> Callable[[int], bool] | None:
        """What starts it on these tensors and the output at an address, as :meth:`.Launch.at` does; for aligned ones.

        None where calls like this one do not have that at all, or not yet.
        """
        if self._raw is not None or not self._run.is_ready():
            return None
        arrived = None
        if self._count:
            found = counters.found(conv_state, self._count)
            if found is None:
                return None
            arrived = found.data_ptr()
        return self._run.but_last(*in_order(self._problem, (*addresses, None), arrived, None)[:-1])

    def _beside(self, conv_state: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        arrived = None
        if self._count and self._problem.writes and conv_state is not None:
            arrived = counters.of(conv_state, self._count)
        elif self._count:
            # Launches that only read may share slots, and so no counters.
            arrived = torch.zeros(self._count, dtype=torch.int32, device=self._device)
        raw = torch.empty(self._raw, dtype=torch.float32, device=self._device) if self._raw is not None else None
        return arrived, raw


def _group(problem: StepProblem) -> int:
    """QK heads whose inputs one program keeps: all of Qwen3-Next's."""
    return max(1, 2048 // power_of_two_at_least(problem.shape.head_qk))


def _chunk(tokens: int) -> int:
    """Tokens whose inputs are loaded together: registers hold those of four."""
    return tokens if tokens < 3 else 4


def _slices(problem: StepProblem, plan: StepPlan) -> int:
    """Programs that share a head."""
    return cdiv(problem.shape.head_v, plan.block_v)


def _is_tree(tensors: Step | Commit) -> bool:
    return isinstance(tensors, Step) and tensors.parents is not None


def _updaters(problem: StepProblem, plan: StepPlan) -> int:
    """Programs of a sequence that keep the inputs of q and k: none where one program alone reads them."""
    shared = problem.writes and problem.shape.ratio * _slices(problem, plan) > 1
    return cdiv(problem.shape.num_heads_qk, _group(problem)) if shared else 0


def in_order(problem: StepProblem, given: tuple[Any, ...], arrived: Any, raw: Any) -> tuple[Any, ...]:
    """An op's tensors, and what a launch adds, as the kernel takes them; or the addresses of all these."""
    if problem.out_strides is None:
        accepted, path = given[9:]
        return *given[:9], None, accepted, path, arrived, raw, None
    norm, out, *parents = given[9:]
    if parents and parents[0] is not None:
        return *given[:9], norm, parents[0], raw, out
    return *given[:9], norm, None, None, arrived, raw, out


def launch_of(problem: StepProblem, plan: StepPlan, tensors: Step | Commit) -> Launch:
    """The kernel's launch."""
    shape = problem.shape
    s_slot, s_channel, s_tap = problem.conv_strides
    s_weight_channel, s_weight_tap = problem.weight_strides
    s_qkvz, s_ba = problem.strides
    s_out, s_out_head = problem.out_strides or (0, 0)
    conv = Convolution(
        s_channel, s_tap, s_weight_channel, s_weight_tap, problem.tokens, problem.width,
        tensors.conv_bias is not None, problem.silu, 0,
    )  # fmt: skip
    s_state_slot, s_state_head, s_k, s_v = problem.state_strides
    block_k = power_of_two_at_least(shape.head_qk)
    # Threads of a warp take 16 bytes each.
    lanes = min(block_k, max(1, 32 * 16 // (problem.state_bytes * plan.run)))
    step = StepConstants(
        block_k, plan.block_v, _slices(problem, plan), s_k, s_v, problem.k_inner, plan.run, lanes, problem.qk_norm,
        problem.writes, _group(problem), _chunk(problem.tokens), plan.ahead, bool(plan.early), bool(plan.streams),
        bool(plan.first),
    )  # fmt: skip
    strides = StepStrides(s_qkvz, s_ba, s_slot, s_state_slot, s_state_head, s_out, s_out_head)
    numbers = (problem.scale, problem.norm_eps, strides, launch._sizes(shape, problem.interleaved), conv, step)
    kernel = kernels.advance
    counts: tuple[int, ...] = (problem.sequences, problem.num_slots, problem.path_length)
    programs = problem.sequences * (shape.num_heads_v * _slices(problem, plan) + _updaters(problem, plan))
    if _is_tree(tensors):
        kernel, counts = trees.verify_tree, (problem.num_slots,)
        programs = problem.sequences * shape.num_heads_v
    options: dict[str, Any] = {"maxnreg": plan.max_registers} if plan.max_registers else {}
    return Launch(
        kernel, (programs, 1, 1), (*counts, *numbers, plan.dependent_launch),
        tensors.mixed_qkvz.device, num_warps=plan.num_warps, dependent_launch=bool(plan.dependent_launch), **options,
    )  # fmt: skip
