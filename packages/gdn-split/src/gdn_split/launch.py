"""Launches: ask the plan, set the grid, start the kernel on the tensors' device and its current stream.

Nothing here checks arguments (arguments.py does). Each ``prepare_`` function takes a problem, a plan or None for the
device's own, and the op's tensors. What it returns is called with the kernel's tensors, which look like those. On CPU
tensors a call works only under Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported) and with a plan
given: that is how kernels are tested with no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from gdn_split.kernels.convolution import Convolution, split_and_convolve
from gdn_split.kernels.split import Sizes, Strides, split_by_group, split_by_run
from gdn_split.plan import (
    ConvPlan,
    ConvProblem,
    DeviceLimits,
    GroupShape,
    MoveProblem,
    SplitPlan,
    columns_of_z,
    plan_conv,
    plan_split,
)
from gdn_split.tensors import Convolve, Merge, Split
from kernel_reference.integers import power_of_two_at_least
from kernel_reference.launching import Launch, device_properties, launch_nothing


@lru_cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of the device a tensor is on. The NPU branch, for Ascend, is unmeasured."""
    found = device_properties(device)
    if found.kind == "npu":
        return DeviceLimits(cores=found.cores)
    return DeviceLimits(
        cores=found.cores,
        on_chip_bytes=found.shared_memory,
        programs_per_core=8,
        dependent_launch=found.capability >= (9, 0),
        register_limit=found.kind == "cuda",
    )


def prepare_move(problem: MoveProblem, plan: SplitPlan | None, tensors: Split | Merge) -> Callable[..., None]:
    """What copies the projections into the parts, or back: called with (qkvz, ba, mixed_qkv, z, b, a)."""
    device = tensors.mixed_qkv.device if isinstance(tensors, Merge) else tensors.mixed_qkvz.device
    if problem.rows == 0:
        return launch_nothing
    if plan is None:
        plan = plan_split(problem.rows, problem.shape, problem.row_bytes, device_limits(device))
    s_qkvz, s_ba, *s_parts = problem.strides
    strides, sizes = Strides(s_qkvz, s_ba, None, *s_parts), _sizes(problem.shape, problem.interleaved)
    rest: tuple[Any, ...]
    if plan.rows_per_program:
        kernel = split_by_run
        rest = (problem.rows, plan.rows_per_program, strides, sizes, problem.merge, plan.rows_per_step)
    else:
        kernel = split_by_group
        steps = (plan.rows_per_step, plan.rows_per_step_ba)
        rest = (problem.rows, strides, sizes, problem.merge, *steps, plan.dependent_launch)
    return Launch(
        kernel, (plan.programs, 1, 1), rest, device, as_integers=range(6) if problem.as_integers else (),
        dependent_launch=bool(plan.dependent_launch), num_warps=plan.num_warps,
    )  # fmt: skip


def prepare_split_conv1d_update(problem: ConvProblem, plan: ConvPlan | None, tensors: Convolve) -> Callable[..., None]:
    """What splits and convolves: called with (qkvz, ba, state, weight, bias, slots, mixed_qkv, z, b, a).

    Without a bias any tensor may be passed for it: it is not read.
    """
    device = tensors.mixed_qkvz.device
    if problem.sequences == 0:
        return launch_nothing
    if plan is None:
        limits = device_limits(device)
        state = (problem.taps_adjacent, problem.in_vectors)
        plan = plan_conv(problem.sequences, problem.tokens, problem.shape, limits, *state)
    s_qkvz, s_ba, *s_parts = problem.strides
    s_slot, s_channel, s_tap = problem.state_strides
    s_weight_channel, s_weight_tap = problem.weight_strides
    # By the device, so that a plan that does not wait gives the same bits.
    hopper = plan.dependent_launch or (device.type == "cuda" and device_limits(device).dependent_launch)
    conv = Convolution(
        s_channel, s_tap, s_weight_channel, s_weight_tap, problem.tokens, problem.width, problem.has_bias,
        problem.silu, plan.block, columns_of_z(problem.shape, plan.block), bool(plan.fours),
        bool(hopper),
    )  # fmt: skip
    rest = (
        problem.sequences, problem.num_slots, Strides(s_qkvz, s_ba, s_slot, *s_parts),
        _sizes(problem.shape, problem.interleaved), conv, plan.sequences_per_program, plan.rows_per_step_ba,
        plan.dependent_launch,
    )  # fmt: skip
    # mixed_ba, b and a are copied; all else is a float.
    return Launch(
        split_and_convolve, (plan.programs, 1, 1), rest, device, as_integers=(1, 8, 9) if problem.as_integers else (),
        dependent_launch=bool(plan.dependent_launch), num_warps=plan.num_warps,
    )  # fmt: skip


def _sizes(shape: GroupShape, interleaved: bool) -> Sizes:
    widths = (shape.head_qk, shape.ratio * shape.head_v, shape.num_heads_v)
    blocks = [power_of_two_at_least(width) for width in widths]
    return Sizes(shape.num_heads_qk, shape.ratio, shape.head_qk, shape.head_v, interleaved, *blocks)
