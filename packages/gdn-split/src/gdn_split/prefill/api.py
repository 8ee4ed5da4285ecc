"""What a chunked delta rule is given in prefill, from the fused projections of packed sequences."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from gdn_split.api import Layout, check_kinds
from gdn_split.prefill import (
    ops,  # noqa: F401  defines the ops that are taken below
)
from gdn_split.prefill.plan import PrefillPlan
from kernel_reference.checks import REFUSALS, check_bool, check_dense, check_int, describe, fail, given
from kernel_reference.plans import plan_as_ints
from kernel_reference.transforms import are_active, refuse_derivatives

Tensor = torch.Tensor

_inputs = torch.ops.gdn_split.prefill_inputs.default
_keep = torch.ops.gdn_split.keep_inputs.default


class GdnInputs(NamedTuple):
    """What chunked kernels of the gated delta rule take, packed.

    q, k are [T, Hqk, Dk], v and z [T, Hv, Dv], in the dtype of mixed_qkvz; the log decays g and beta are [T, Hv],
    float32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    g: Tensor
    beta: Tensor


def gdn_prefill_inputs(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    cu_seqlens: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
    *,
    conv_state: Tensor | None = None,
    slots: Tensor | None = None,
    has_initial_state: Tensor | bool = True,
    qk_norm: bool = True,
    chunk_size: int | None = None,
    activation: Literal["silu"] | None = "silu",
    layout: Layout = "interleaved",
    plan: PrefillPlan | None = None,
) -> GdnInputs:
    """Split, convolve, norm and gate packed sequences: the inputs of a chunked delta rule (fla's, for one).

    Each sequence is convolved by itself, as :func:`split_conv1d_update` does, from the inputs in its slot or from
    zeros. Then q and k are divided by ``sqrt(sum of squares + 1e-6)``, ``g = -exp(A_log) softplus(a + dt_bias)`` and
    ``beta = sigmoid(b)``, all in float32. Source: Gated Delta Networks (arXiv 2412.06464).

    Args:
        mixed_qkvz: [T, 2*nqk*hq + 2*nv*hv], bfloat16, float16 or float32, any row stride, packed rows; mixed_ba:
            [T, 2*nv], likewise; num_heads_qk, num_heads_v, head_qk, head_v, layout: as for the split.
        conv_weight: [qkv_dim, width], width 2 to 4, weight[:, -1] on the newest token, any strides.
        conv_bias: [qkv_dim], packed, or None.
        cu_seqlens: [S + 1] int32 or int64, packed, from 0, non-decreasing, at most T: sequence i is rows cu_seqlens[i]
            to cu_seqlens[i + 1] - 1. Sequences may be empty. Rows after the last are 0 in all results.
        A_log, dt_bias: [Hv], packed, of any of the three dtypes.
        conv_state: [num_slots, qkv_dim, width - 1], any strides, of any of the three dtypes, or None: every sequence
            begins with zeros. Updated in place: afterwards a slot holds its sequence's last width - 1 inputs, and that
            of an empty sequence is as it was.
        slots: [S] int32 or int64, packed, with conv_state: each sequence's slot, -1 for one that has none. No two may
            share a slot.
        has_initial_state: [S] bool, packed, or one bool for all: whether a sequence begins with the inputs in its slot.
        qk_norm: whether q and k are divided by their norms.
        chunk_size: None, or a power of two up to 256: g is then the sum over the tokens of its chunk so far, chunks
            being counted from the first token of each sequence.
        activation: "silu" or None.
        plan: a launch plan to use instead of the one made for the device (see ``gdn_split.prefill.plan.plan_prefill``).

    Returns:
        GdnInputs(q, k, v, z, g, beta). Differentiable once, but for transforms of torch.func, where there is no
        conv_state.

    Raises:
        TypeError, ValueError: an argument is not as described; nothing has been written. Bounds and slots are checked
            on a CPU, and on a GPU inside ``checks.validate_values()``; unchecked, rows of impossible bounds are 0 and a
            slot outside the pool counts as none.
    """
    if activation not in ("silu", None):
        fail("activation", '"silu" or None', repr(activation))
    check_bool("qk_norm", qk_norm)
    chunk = 0 if chunk_size is None else check_int("chunk_size", chunk_size, 1)
    has, initial = (None, has_initial_state) if isinstance(has_initial_state, bool) else (has_initial_state, True)
    sizes = (num_heads_qk, num_heads_v, head_qk, head_v, layout, plan_as_ints(plan, PrefillPlan))
    numbers = (activation == "silu", qk_norm, initial, chunk, *sizes)
    tensors = (mixed_qkvz, mixed_ba, conv_weight, conv_bias, cu_seqlens, conv_state, slots, has, A_log, dt_bias)
    named = dict(zip(_TENSORS, tensors, strict=True))
    try:
        if conv_state is not None or are_active():
            refuse_derivatives(**named)
        made = GdnInputs(*_inputs(*tensors, *numbers))
        if conv_state is not None:
            _keep(*tensors, *numbers[:9])
    except REFUSALS:
        if not isinstance(has_initial_state, (bool, Tensor)):
            fail("has_initial_state", "a bool or a bool tensor [S]", describe(has_initial_state), TypeError)
        required = {name: named.pop(name) for name in _TENSORS if name not in _MAY_BE_NONE}
        check_dense(**required, **given(**named))
        check_kinds(sizes)
        raise
    return made


_TENSORS = (
    "mixed_qkvz", "mixed_ba", "conv_weight", "conv_bias", "cu_seqlens", "conv_state", "slots", "has_initial_state",
    "A_log", "dt_bias",
)  # fmt: skip
_MAY_BE_NONE = ("conv_bias", "conv_state", "slots", "has_initial_state")
