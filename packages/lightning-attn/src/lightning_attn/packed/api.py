"""Packed sequences without a pool, as training has them, and the states that sequences leave."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernel_reference.checks import (
    REFUSALS,
    as_float,
    check_bool,
    check_dense,
    check_no_tangents,
    fail,
    given,
)
from kernel_reference.plans import plan_as_ints
from kernel_reference.transforms import are_active, check_no_transforms, refuse_derivatives
from lightning_attn import (
    arguments,
    ops,
)
from lightning_attn.api import explain
from lightning_attn.packed.plan import StatePlan
from lightning_attn.plan import PrefillPlan

Tensor = torch.Tensor

_state = torch.ops.lightning_attn.state.default


class PackedResult(NamedTuple):
    """``out`` [T, H, E], contiguous, and the states ``final_state`` [N, H, D, E] in float32."""

    out: Tensor
    final_state: Tensor


def lightning_attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    cu_seqlens: Tensor,
    *,
    initial_state: Tensor | None = None,
    scale: float = 1.0,
    plan: PrefillPlan | None = None,
) -> PackedResult:
    """:func:`lightning_attention` over packed sequences of unlike lengths, differentiable: a training batch, say.

    Args:
        q, k: [T, H, D]; v: [T, H, E]. One dtype of bfloat16, float16 and float32, any strides; D and E from 16 to 256.
        slopes: the decay rates s >= 0, float32, any shape of H elements, contiguous.
        cu_seqlens: [N + 1] int32 or int64, contiguous, from 0, non-decreasing, at most T: sequence i is rows
            cu_seqlens[i] to cu_seqlens[i + 1] - 1. Sequences may be empty. Rows after the last sequence are 0 in the
            results.
        initial_state: the states before the sequences' first tokens, [N, H, D, E] float32, any strides; not modified.
            Zeros without it.
        scale: factor of the outputs.
        plan: a launch plan to use instead of the one made for the device.

    Returns:
        PackedResult(out [T, H, E] in the dtype of q, final_state [N, H, D, E] float32), both new. Differentiable once,
        in reverse mode, in q, k, v and initial_state, through both; gradients have the same bits in every run.

    Raises:
        TypeError, ValueError: an argument is not as described. Bounds and decay rates are checked on a CPU, and
            elsewhere inside ``kernel_reference.checks.validate_values``. Unchecked, bounds are clamped to 0 .. T and
            rates as for :func:`lightning_attention`.
    """
    scale = as_float("scale", scale)
    numbers = (scale, plan_as_ints(plan, PrefillPlan))
    tensors = {"q": q, "k": k, "v": v, "slopes": slopes, "cu_seqlens": cu_seqlens}
    try:
        if torch.is_grad_enabled() and slopes.requires_grad:
            fail("slopes", "without gradient (decay rates have none here; pass slopes.detach())", "requires_grad=True")
        if are_active():
            check_no_transforms(**tensors, initial_state=initial_state)
            check_no_tangents(**tensors, initial_state=initial_state)
        return PackedResult(*ops.packed(q, k, v, slopes, cu_seqlens, initial_state, *numbers))
    except REFUSALS:
        explain(check_dense, **tensors, **given(initial_state=initial_state))
        explain(arguments.check_packed, ("T",), q, k, v)
        raise


def lightning_state(
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    cu_seqlens: Tensor,
    *,
    initial_state: Tensor | None = None,
    exact: bool = False,
    plan: StatePlan | None = None,
) -> Tensor:
    """The states that packed sequences leave, without their outputs: for context parallelism, or a prefix cache.

    A head reads no more than the last ``ceil(24 / slope)`` tokens of a sequence: those before enter its state with
    weights of at most exp(-24) = 4e-11, together at most ``4e-11 / (1 - exp(-slope))`` of the largest product k v^T.

    Args:
        k: [T, Hk, D]; v: [T, Hv, E]. One dtype of bfloat16, float16 and float32, any strides; D and E from 16 to 256.
            H is the greater of Hk and Hv, and a multiple of the other: head h reads head ``h // (H / Hk)`` of k, and v
            likewise.
        slopes: the decay rates s >= 0, float32, any shape of H elements, contiguous.
        cu_seqlens: [N + 1] int32 or int64, contiguous, from 0, non-decreasing, at most T; sequences may be empty.
        initial_state: the states before the first tokens, [N, H, D, E] float32, any strides; not modified. Zeros
            without it.
        exact: whether every token is read, as :func:`lightning_attention_packed` does.
        plan: a launch plan to use instead of the one made for the device.

    Returns:
        [N, H, D, E] float32, new, contiguous. Not differentiable: the ``final_state`` of
        :func:`lightning_attention_packed` is.

    Raises:
        TypeError, ValueError: an argument is not as described. Bounds and decay rates are checked on a CPU, and
            elsewhere inside ``kernel_reference.checks.validate_values``. Unchecked, bounds are clamped to 0 .. T, which
            leaves arbitrary the states of sequences whose bounds fall, and rates are as for
            :func:`lightning_attention`.
    """
    check_bool("exact", exact)
    ints = plan_as_ints(plan, StatePlan)
    tensors = {"k": k, "v": v, "slopes": slopes, "cu_seqlens": cu_seqlens}
    sequences: Any = cu_seqlens
    if sequences is None:
        # To the op it means a batch [b, h, n, d].
        check_dense(**tensors)
    try:
        refuse_derivatives(**tensors, initial_state=initial_state)
        state: Tensor = _state(k, v, slopes, cu_seqlens, initial_state, 1.0, exact, False, ints)
        return state
    except REFUSALS:
        explain(check_dense, **tensors, **given(initial_state=initial_state))
        explain(arguments.check_packed, ("T",), None, k, v)
        raise
