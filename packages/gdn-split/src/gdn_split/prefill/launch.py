"""What launch.py does, for the inputs of a chunked delta rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gdn_split import launch
from gdn_split.kernels import prefill as kernels
from gdn_split.kernels import prefill_backward as gradients
from gdn_split.kernels.convolution import Convolution
from gdn_split.prefill.plan import (
    PrefillBackwardPlan,
    PrefillPlan,
    PrefillProblem,
    plan_prefill,
    plan_prefill_backward,
    prefill_programs,
)
from gdn_split.tensors import Prefill, PrefillGradients
from kernel_reference.integers import cdiv, power_of_two_at_least
from kernel_reference.launching import Launch, launch_nothing

Tensor = torch.Tensor


def prepare_inputs(problem: PrefillProblem, plan: PrefillPlan | None, tensors: Prefill) -> Callable[..., None]:
    """What makes q, k, v, z, g and beta: called with :func:`in_order` of the tensors and these."""
    device = tensors.mixed_qkvz.device
    if problem.rows == 0:
        return launch_nothing
    if problem.sequences == 0:
        return _nothing
    if plan is None:
        plan = plan_prefill(problem, launch.device_limits(device))
    # With sums over chunks a block of gates is twice as long, of which one warp holds half as many heads.
    heads = min(4 if problem.chunk and plan.num_warps == 1 else 8, power_of_two_at_least(problem.shape.num_heads_v))
    prefill = kernels.Prefill(
        plan.rows, plan.rows_ba, heads, problem.chunk, problem.qk_norm, problem.initial, plan.walk, plan.ahead
    )  # fmt: skip
    rest = (
        problem.rows, problem.sequences, problem.num_slots, _strides(problem),
        launch._sizes(problem.shape, problem.interleaved), _convolution(problem, tensors), prefill,
        plan.dependent_launch,
    )  # fmt: skip
    limit: dict[str, Any] = {"maxnreg": plan.max_registers} if plan.max_registers else {}
    return Launch(
        kernels.prefill_inputs, (prefill_programs(problem, plan), 1, 1), rest, device, num_warps=plan.num_warps,
        dependent_launch=bool(plan.dependent_launch), **limit,
    )  # fmt: skip


def prepare_kept(problem: PrefillProblem, tensors: Prefill, dependent: bool | None = None) -> Callable[..., None]:
    """What advances the convolution's states: called with (qkvz, cu_seqlens, conv_state, slots, has_initial_state)."""
    device, shape = tensors.mixed_qkvz.device, problem.shape
    if problem.sequences == 0 or problem.rows == 0:
        return launch_nothing
    if dependent is None:
        dependent = launch.device_limits(device).dependent_launch
    rest = (
        problem.rows, problem.num_slots, _strides(problem), launch._sizes(shape, problem.interleaved),
        _convolution(problem, tensors), problem.initial, dependent,
    )  # fmt: skip
    programs = problem.sequences * (2 * shape.num_heads_qk + shape.num_heads_v)
    return Launch(kernels.keep_inputs, (programs, 1, 1), rest, device, num_warps=4, dependent_launch=dependent)


def prepare_backward(
    problem: PrefillProblem, plan: PrefillBackwardPlan | None, tensors: Prefill
) -> Callable[..., None]:
    """What makes all gradients: called with gradients of results, tensors, and :func:`.new_gradients` of them."""
    device, shape = tensors.mixed_qkvz.device, problem.shape
    if problem.rows == 0 or problem.sequences == 0:
        return _no_gradients
    if plan is None:
        plan = plan_prefill_backward(problem, launch.device_limits(device))
    gates, walks = plan.programs(problem)
    of_gates, of_rows, sums = backward_launches(problem, plan, tensors)
    workspace = partial(torch.empty, dtype=torch.float32, device=device)
    shares = problem.width + (tensors.conv_bias is not None)

    def start(d: PrefillGradients, t: Prefill, made: tuple[Tensor, ...]) -> None:
        d_qkvz, d_ba, *of_weights = made
        of_heads = workspace(gates, 2, shape.num_heads_v)
        of_channels = workspace(walks, shares, shape.qkv_width)
        position = torch.empty(problem.rows, dtype=torch.int32, device=device)
        of_gates(t.mixed_ba, t.cu_seqlens, t.A_log, t.dt_bias, d.g, d.beta, d_ba, of_heads, position)
        of_rows(t.mixed_qkvz, t.conv_weight, t.conv_bias, position, *d[:4], d_qkvz, of_channels)
        sums(of_channels, of_heads, *of_weights)

    return start


# Columns of shares that one program sums: of Qwen3-Next's weights 512 programs.
_SUMMED = 64


def backward_launches(
    problem: PrefillProblem, plan: PrefillBackwardPlan, tensors: Prefill
) -> tuple[Launch, Launch, Launch]:
    """The launches: of gates and rows' positions, of the rest, and of the sums of what these leave of the weights'."""
    device, shape = tensors.mixed_qkvz.device, problem.shape
    gates, walks = plan.programs(problem)
    heads = min(8, power_of_two_at_least(shape.num_heads_v))
    back = gradients.Backward(plan.steps, plan.rows_ba, heads, problem.chunk, problem.qk_norm, plan.ahead, plan.lag)
    strides, sizes = gradients.BackwardStrides(*problem.strides), launch._sizes(shape, problem.interleaved)
    conv = _convolution(problem, tensors)
    options: dict[str, Any] = {"dependent_launch": bool(plan.dependent_launch)}
    limit: dict[str, Any] = {"maxnreg": plan.max_registers} if plan.max_registers else {}
    of_gates = (problem.rows, problem.sequences, strides, sizes, back, plan.dependent_launch)
    of_rows = (problem.rows, strides, sizes, conv, back, plan.dependent_launch)
    of_sums = (walks, gates, sizes, conv, _SUMMED, plan.dependent_launch)
    units = 2 * shape.num_heads_qk + 2 * shape.num_heads_v
    shares = problem.width + (tensors.conv_bias is not None)
    parts = gates * cdiv(shape.num_heads_v, heads)
    tiles = cdiv(shares * shape.qkv_width, _SUMMED) + cdiv(2 * shape.num_heads_v, _SUMMED)
    return (
        Launch(gradients.gates_backward, (parts, 1, 1), of_gates, device, num_warps=4, **options),
        Launch(
            gradients.inputs_backward,
            ((walks + plan.lag) * units, 1, 1),
            of_rows,
            device,
            num_warps=plan.num_warps,
            **options,
            **limit,
        ),
        Launch(gradients.add_shares, (tiles, 1, 1), of_sums, device, num_warps=4, **options),
    )


def _no_gradients(d: PrefillGradients, t: Prefill, made: tuple[Tensor, ...]) -> None:
    for gradient in made:
        gradient.zero_()


def in_order(t: Prefill, outs: tuple[Tensor, ...], initial: bool) -> tuple[Tensor | None, ...]:
    """An op's tensors and results as the kernel takes them."""
    state = (t.conv_state, t.slots, t.has_initial_state) if initial else (None, None, None)
    return t.mixed_qkvz, t.mixed_ba, t.conv_weight, t.conv_bias, t.cu_seqlens, *state, t.A_log, t.dt_bias, *outs


def _nothing(*tensors: Tensor | None) -> None:
    for out in tensors[10:]:
        if out is not None:
            out.zero_()


def _strides(problem: PrefillProblem) -> kernels.PrefillStrides:
    s_qkvz, s_ba = problem.strides
    return kernels.PrefillStrides(s_qkvz, s_ba, 0 if problem.conv_strides is None else problem.conv_strides[0])


def _convolution(problem: PrefillProblem, tensors: Prefill) -> Convolution:
    _, s_channel, s_tap = problem.conv_strides or (0, 0, 0)
    s_weight_channel, s_weight_tap = problem.weight_strides
    block = power_of_two_at_least(max(problem.shape.head_qk, problem.shape.head_v))
    return Convolution(
        s_channel, s_tap, s_weight_channel, s_weight_tap, 0, problem.width, tensors.conv_bias is not None,
        problem.silu, block,
    )  # fmt: skip
