"""The whole decode step of a Gated DeltaNet layer, and drafts: verified without a trace, then committed."""

from __future__ import annotations

from typing import Any, Literal

import torch

from gdn_split import (
    ops,  # noqa: F401  defines the ops that are taken below
    straight,
)
from gdn_split.api import Layout, check_kinds
from gdn_split.arguments import check_positive, check_projections, check_sizes
from gdn_split.plan import StepPlan
from kernel_reference.checks import REFUSALS, as_float, check_bool, check_choice, check_dense, fail, given
from kernel_reference.gated_delta import STATE_LAYOUTS
from kernel_reference.plans import plan_as_ints
from kernel_reference.transforms import are_active, refuse_derivatives

Tensor = torch.Tensor
StateLayout = Literal["KV", "VK"]

_decode_step = torch.ops.gdn_split.decode_step.default
_verify = torch.ops.gdn_split.verify.default
_commit = torch.ops.gdn_split.commit.default


def gdn_decode_step(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    conv_state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    state_pool: Tensor,
    slots: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    qk_norm: bool = True,
    scale: float | None = None,
    activation: Literal["silu"] | None = "silu",
    layout: Layout = "interleaved",
    state_layout: StateLayout = "KV",
    tokens_per_sequence: int = 1,
    out: Tensor | None = None,
    plan: StepPlan | None = None,
) -> Tensor:
    """A decode step of a Gated DeltaNet layer, from its fused projections to its gated outputs, in one launch.

    The projections are split and convolved as :func:`split_conv1d_update` does. Then, for each V head with state S
    [Dk, Dv], q and k being divided by ``sqrt(sum of squares + 1e-6)``::

        S = exp(g) S        g = -exp(A_log) softplus(a + dt_bias)
        u = beta (v - S^T k)        beta = sigmoid(b)
        S = S + k u^T
        o = S^T (scale q)

    and with a norm ``o / sqrt(mean(o^2) + norm_eps) * norm_weight * silu(z)``. All of it is in float32. Source: Gated
    Delta Networks (arXiv 2412.06464).

    Args:
        mixed_qkvz, mixed_ba, conv_state, conv_weight, conv_bias, activation, layout: as for
            :func:`split_conv1d_update`; mixed_ba is bfloat16, float16 or float32.
        state_pool: [num_slots, Hv, Dk, Dv], or [num_slots, Hv, Dv, Dk] with ``state_layout="VK"``; bfloat16, float16 or
            float32, any strides; updated in place. It overlaps no other argument, and no two of its elements overlap.
            Of several tokens the state in between is not rounded.
        slots: [S] int32 or int64, packed: each sequence's row of both pools, -1 for padding, whose outputs are 0. No
            two sequences may share a slot. They are checked on a CPU, and on a GPU inside ``checks.validate_values()``;
            unchecked, one outside either pool counts as padding.
        A_log, dt_bias: [Hv], packed, of any of the three dtypes.
        num_heads_qk, num_heads_v, head_qk, head_v: as for the split; head sizes at most 256.
        norm_weight: [Dv], packed, or None: o is returned as it is, and z is not read.
        norm_eps: of the norm.
        qk_norm: whether q and k are divided by their norms.
        scale: of q; None is Dk^-0.5.
        tokens_per_sequence: new tokens of each sequence, adjacent rows, taken in order: N = S * tokens_per_sequence.
        out: [N, Hv, Dv] to write instead of a new tensor, bfloat16, float16 or float32, packed along Dv, overlapping no
            other argument.
        plan: a launch plan to use instead of the one made for the device (see ``gdn_split.plan.plan_step``).

    Returns:
        [N, Hv, Dv], packed, in the dtype of mixed_qkvz unless given. Not differentiable.

    Raises:
        TypeError, ValueError: an argument is not as described; nothing has been written.
    """
    numbers = _numbers(
        tokens_per_sequence, activation, qk_norm, state_layout, scale, norm_eps, num_heads_qk, num_heads_v, head_qk,
        head_v, layout, plan,
    )  # fmt: skip
    tensors = (mixed_qkvz, mixed_ba, conv_state, conv_weight, conv_bias, state_pool, slots, A_log, dt_bias, norm_weight)
    try:
        if out is None and plan is None and (made := straight.stepped_again(tensors, numbers)) is not None:
            return made
        _refuse_derivatives(_STEP_TENSORS, (*tensors, out))
        if out is None and plan is None and straight.is_possible(tensors, (tokens_per_sequence, *numbers[6:10])):
            return straight.decode_step(tensors, numbers)
        result = mixed_qkvz.new_empty((mixed_qkvz.shape[0], num_heads_v, head_v)) if out is None else out
        _decode_step(*tensors, result, *numbers)
    except REFUSALS:
        _explain(_STEP_TENSORS, (*tensors, out), numbers)
        raise
    return result


def gdn_verify(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    conv_state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    state_pool: Tensor,
    slots: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
    *,
    tokens_per_sequence: int,
    parents: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    qk_norm: bool = True,
    scale: float | None = None,
    activation: Literal["silu"] | None = "silu",
    layout: Layout = "interleaved",
    state_layout: StateLayout = "KV",
    out: Tensor | None = None,
    plan: StepPlan | None = None,
) -> Tensor:
    """The outputs of each sequence's draft tokens, both states unchanged; :func:`gdn_commit` comes next.

    Args:
        tokens_per_sequence: drafts of each sequence, at most 16.
        parents: drafts that branch: [S, tokens_per_sequence] int32 or int64, packed; draft t of sequence s continues
            draft ``parents[s, t]``, which is less than t, or the states of the pools if that is -1. Without it each
            draft continues the one before it.
        mixed_qkvz, mixed_ba, conv_state, conv_weight, conv_bias, state_pool, slots, A_log, dt_bias, num_heads_qk,
            num_heads_v, head_qk, head_v, norm_weight, norm_eps, qk_norm, scale, activation, layout, state_layout, out,
            plan: as for :func:`gdn_decode_step`; nothing is written but out.

    Returns:
        [N, Hv, Dv], what :func:`gdn_decode_step` of the drafts, or of each path of them, returns. Not differentiable.

    Raises:
        TypeError, ValueError: as there. Unchecked, a parent that is not before its child counts as -1.
    """
    numbers = _numbers(
        tokens_per_sequence, activation, qk_norm, state_layout, scale, norm_eps, num_heads_qk, num_heads_v, head_qk,
        head_v, layout, plan,
    )  # fmt: skip
    tensors = (mixed_qkvz, mixed_ba, conv_state, conv_weight, conv_bias, state_pool, slots, A_log, dt_bias, norm_weight)
    names = (*_STEP_TENSORS, "parents")
    try:
        _refuse_derivatives(names, (*tensors, out, parents))
        result = mixed_qkvz.new_empty((mixed_qkvz.shape[0], num_heads_v, head_v)) if out is None else out
        _verify(*tensors, result, parents, *numbers)
    except REFUSALS:
        _explain(names, (*tensors, out, parents), numbers)
        raise
    return result


def gdn_commit(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    conv_state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    state_pool: Tensor,
    slots: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    accepted: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
    *,
    tokens_per_sequence: int,
    path: Tensor | None = None,
    qk_norm: bool = True,
    activation: Literal["silu"] | None = "silu",
    layout: Layout = "interleaved",
    state_layout: StateLayout = "KV",
    plan: StepPlan | None = None,
) -> None:
    """Advance both states of each sequence by its first ``accepted`` drafts, or by those of a path among them.

    Args:
        accepted: [S] int32 or int64, packed, from 0 to tokens_per_sequence (with ``path`` to P); 0 leaves both states
            unchanged, bit for bit.
        path: of drafts that branch the accepted ones: [S, P] int32 or int64, packed, P at most tokens_per_sequence: the
            drafts from the pools' states on, ascending, of which the first ``accepted`` count.
        mixed_qkvz, mixed_ba, conv_state, conv_weight, conv_bias, state_pool, slots, A_log, dt_bias, num_heads_qk,
            num_heads_v, head_qk, head_v, tokens_per_sequence, qk_norm, activation, layout, state_layout, plan: as given
            to :func:`gdn_verify`; both states are updated in place.

    Not differentiable.

    Raises:
        TypeError, ValueError: as for :func:`gdn_decode_step`. Unchecked, an ``accepted`` outside its bounds counts as
            0, and a draft of a path outside 0 to tokens_per_sequence - 1 as the nearest.
    """
    numbers = _numbers(
        tokens_per_sequence, activation, qk_norm, state_layout, None, 0.0, num_heads_qk, num_heads_v, head_qk, head_v,
        layout, plan,
    )  # fmt: skip
    tensors = (
        mixed_qkvz,
        mixed_ba,
        conv_state,
        conv_weight,
        conv_bias,
        state_pool,
        slots,
        A_log,
        dt_bias,
        accepted,
        path,
    )
    try:
        _refuse_derivatives(_COMMIT_TENSORS, tensors)
        _commit(*tensors, *numbers)
    except REFUSALS:
        _explain(_COMMIT_TENSORS, tensors, numbers)
        raise


_LAYER_TENSORS = (
    "mixed_qkvz", "mixed_ba", "conv_state", "conv_weight", "conv_bias", "state_pool", "slots", "A_log", "dt_bias",
)  # fmt: skip
_STEP_TENSORS = (*_LAYER_TENSORS, "norm_weight", "out")
_COMMIT_TENSORS = (*_LAYER_TENSORS, "accepted", "path")
_MAY_BE_NONE = ("conv_bias", "norm_weight", "out", "parents", "path")


def _numbers(
    tokens: int, activation: str | None, qk_norm: Any, state_layout: str, scale: float | None, norm_eps: float,
    num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int, layout: str, plan: StepPlan | None,
) -> tuple[Any, ...]:  # fmt: skip
    """What the ops take behind their tensors."""
    if activation not in ("silu", None):
        fail("activation", '"silu" or None', repr(activation))
    if qk_norm is not True and qk_norm is not False:
        check_bool("qk_norm", qk_norm)
    if scale is None:
        if type(head_qk) is not int or head_qk < 1:
            check_positive(head_qk=head_qk)
        scale = head_qk**-0.5
    if type(scale) is not float:
        scale = as_float("scale", scale)
    if type(norm_eps) is not float:
        norm_eps = as_float("norm_eps", norm_eps)
    ints = None if plan is None else plan_as_ints(plan, StepPlan)
    return (
        tokens, activation == "silu", qk_norm, state_layout, scale, norm_eps, num_heads_qk, num_heads_v, head_qk,
        head_v, layout, ints,
    )  # fmt: skip


def _refuse_derivatives(names: tuple[str, ...], tensors: tuple[Tensor | None, ...]) -> None:
    if torch.is_grad_enabled() or are_active():
        refuse_derivatives(**dict(zip(names, tensors, strict=True)))


def _explain(names: tuple[str, ...], tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
    """Raise our own error instead of torch's."""
    tokens, _, _, state_layout, _, _, *sizes = numbers
    named = dict(zip(names, tensors, strict=True))
    optional = {name: named.pop(name) for name in _MAY_BE_NONE if name in named}
    check_dense(**named, **given(**optional))
    check_positive(tokens_per_sequence=tokens)
    check_choice("state_layout", state_layout, STATE_LAYOUTS)
    check_kinds(tuple(sizes))
    check_projections(tensors[0], tensors[1], check_sizes(*sizes[:5]))
