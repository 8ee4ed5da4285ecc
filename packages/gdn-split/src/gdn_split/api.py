"""The public functions: check the arguments, say what is wrong, call the op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from gdn_split import (
    derivatives,
    ops,  # noqa: F401  defines the ops that are taken below
    straight,
)
from gdn_split.arguments import check_positive, check_projections, check_sizes
from gdn_split.plan import ConvPlan, GroupShape, SplitPlan
from gdn_split.reference import new_parts
from kernel_reference import projection
from kernel_reference.checks import REFUSALS, check_dense, describe, fail
from kernel_reference.plans import plan_as_ints

Layout = Literal["interleaved", "contiguous"]

_split = torch.ops.gdn_split.split.default
_split_inference = torch.ops.gdn_split.split_inference.default
_split_into = torch.ops.gdn_split.split_into.default
_merge = torch.ops.gdn_split.merge.default
_merge_inference = torch.ops.gdn_split.merge_inference.default
_merge_into = torch.ops.gdn_split.merge_into.default
_split_conv1d_update = torch.ops.gdn_split.split_conv1d_update.default


class SplitResult(NamedTuple):
    """The parts of the projections, packed and 16-byte aligned.

    mixed_qkv [N, 2*nqk*hq + nv*hv] holds all q, all k, all v; z is [N, nv, hv]; b and a are [N, nv].
    """

    mixed_qkv: torch.Tensor
    z: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor


class MergeResult(NamedTuple):
    """The fused projections: mixed_qkvz [N, 2*nqk*hq + 2*nv*hv] and mixed_ba [N, 2*nv]."""

    mixed_qkvz: torch.Tensor
    mixed_ba: torch.Tensor


class RowOrder(NamedTuple):
    """For each row of the two contiguous weights, the row of the interleaved one that goes there: int64, on the CPU."""

    qkvz: torch.Tensor
    ba: torch.Tensor


def fused_qkvzba_split_reshape_cat(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
    *,
    layout: Layout = "interleaved",
    out: Sequence[torch.Tensor] | None = None,
    plan: SplitPlan | None = None,
) -> SplitResult:
    """Split the fused projections of Gated DeltaNet into (mixed_qkv, z, b, a): a bit-exact copy by one kernel.

    Args:
        mixed_qkvz: [N, 2*nqk*hq + 2*nv*hv], any dtype of 1, 2, 4 or 8 bytes, any row stride, packed rows. N may be 0.
            ``interleaved`` (Qwen3-Next): per QK head q (hq), k (hq), v (r*hv), z (r*hv), where r = nv / nqk.
            ``contiguous`` (Qwen3.5): all q, all k, all v, all z.
        mixed_ba: [N, 2*nv], any such dtype. ``interleaved``: per QK head b (r), a (r). ``contiguous``: all b, all a.
        num_heads_qk, num_heads_v: QK and V heads on this rank; num_heads_v is a multiple of num_heads_qk.
        head_qk, head_v: elements in a QK and in a V head.
        layout: "interleaved" or "contiguous".
        out: four tensors (mixed_qkv, z, b, a) to write instead of new ones; any row stride. They overlap neither each
            other nor the inputs.
        plan: a launch plan to use instead of the one made for the device (see ``gdn_split.plan.plan_split``).

    Returns:
        SplitResult(mixed_qkv, z, b, a). V head g*r + j belongs to QK head g. Differentiable in reverse and
        forward mode and under torch.func: the backward is one :func:`merge_qkvzba`, a tangent is split as values are,
        and a batch of torch.vmap is more rows. Refused with ``out``, and for a transform inside torch.compile.

    Raises:
        TypeError, ValueError: an argument is not as described; nothing has been written.
    """
    sizes = (num_heads_qk, num_heads_v, head_qk, head_v, layout, plan_as_ints(plan, SplitPlan))
    try:
        needs_gradient = torch.is_grad_enabled() and (mixed_qkvz.requires_grad or mixed_ba.requires_grad)
        if out is not None:
            out = _checked_out(out, SplitResult._fields, needs_gradient)
            _split_into(mixed_qkvz, mixed_ba, *out, *sizes)
            return SplitResult(*out)
        may_be_derived = needs_gradient or derivatives.may_be_asked()
        op = _derived(derivatives.split, _split) if may_be_derived else _split_inference
        return SplitResult(*op(mixed_qkvz, mixed_ba, *sizes))
    except REFUSALS:
        check_kinds(sizes, mixed_qkvz=mixed_qkvz, mixed_ba=mixed_ba)
        raise


def merge_qkvzba(
    mixed_qkv: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
    *,
    layout: Layout = "interleaved",
    out: Sequence[torch.Tensor] | None = None,
    plan: SplitPlan | None = None,
) -> MergeResult:
    """Write the parts back into the fused projections: the inverse of :func:`fused_qkvzba_split_reshape_cat`.

    Args:
        mixed_qkv: [N, 2*nqk*hq + nv*hv]; z: [N, nv, hv] of its dtype; b, a: [N, nv] of one dtype. Any row stride,
            packed rows, dtypes of 1, 2, 4 or 8 bytes.
        num_heads_qk, num_heads_v, head_qk, head_v, layout, plan: as for the split.
        out: two tensors (mixed_qkvz, mixed_ba) to write instead of new ones; they overlap neither each other nor the
            inputs.

    Returns:
        MergeResult(mixed_qkvz [N, 2*nqk*hq + 2*nv*hv], mixed_ba [N, 2*nv]). Differentiable as the split is.

    Raises:
        TypeError, ValueError: an argument is not as described; nothing has been written.
    """
    sizes = (num_heads_qk, num_heads_v, head_qk, head_v, layout, plan_as_ints(plan, SplitPlan))
    parts = (mixed_qkv, z, b, a)
    check_kinds(sizes, mixed_qkv=mixed_qkv, z=z, b=b, a=a)
    if out is None:
        op = _derived(derivatives.merge, _merge) if derivatives.may_be_asked(*parts) else _merge_inference
        return MergeResult(*op(*parts, *sizes))
    needs_gradient = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
    out = _checked_out(out, MergeResult._fields, needs_gradient)
    _merge_into(*parts, *out, *sizes)
    return MergeResult(*out)


def split_views(
    mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> SplitResult:
    """The parts of projections in the contiguous layout, as views: no kernel and no copy.

    Arguments as for :func:`fused_qkvzba_split_reshape_cat` with ``layout="contiguous"``. The results share the
    inputs' memory and row strides, so that mixed_qkv, b and a are packed only along the last dimension.

    Raises:
        TypeError, ValueError: an argument is not as described there.
    """
    check_dense(mixed_qkvz=mixed_qkvz, mixed_ba=mixed_ba)
    shape = check_sizes(num_heads_qk, num_heads_v, head_qk, head_v, "contiguous")
    check_projections(mixed_qkvz, mixed_ba, shape)
    mixed_qkv, z = mixed_qkvz.split([shape.qkv_width, num_heads_v * head_v], dim=1)
    b, a = mixed_ba.split(num_heads_v, dim=1)
    return SplitResult(mixed_qkv, z.unflatten(1, (num_heads_v, head_v)), b, a)


def contiguous_row_order(num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int) -> RowOrder:
    """The row permutation that makes interleaved projection weights contiguous, for a loader to apply once.

    ``weight_qkvz[order.qkvz]`` and ``weight_ba[order.ba]`` produce projections in the contiguous layout, whose parts
    are views (:func:`split_views`). With tensor parallelism pass this rank's heads and permute this rank's rows.

    Returns:
        RowOrder(qkvz int64 [2*nqk*hq + 2*nv*hv], ba int64 [2*nv]). For the scales of a quantised weight, or rows packed
        several to an element, see :func:`block_order`.
    """
    check_sizes(num_heads_qk, num_heads_v, head_qk, head_v, "contiguous")
    return RowOrder(*projection.contiguous_row_order(num_heads_qk, num_heads_v, head_qk, head_v))


def block_order(row_order: torch.Tensor, rows_per_block: int) -> torch.Tensor:
    """The same permutation for blocks of rows: one scale, or one packed element, for each ``rows_per_block`` rows.

    Args:
        row_order: int64 [rows], from :func:`contiguous_row_order`.
        rows_per_block: e.g. 128 for fp8 weights with 128 x 128 scales, 8 for int4 rows packed into an int32.

    Returns:
        int64 [rows / rows_per_block]: permute the scales' (or packed) rows with it.

    Raises:
        ValueError: the permutation would split a block, so these scales cannot follow it.
    """
    check_positive(rows_per_block=rows_per_block)
    check_dense(row_order=row_order)
    if row_order.ndim != 1 or row_order.dtype != torch.int64:
        fail("row_order", "an int64 tensor [rows] made by contiguous_row_order", describe(row_order), TypeError)
    rows = row_order.shape[0]
    if rows % rows_per_block:
        fail("rows_per_block", f"a divisor of the {rows} rows", rows_per_block)
    blocks = row_order.view(-1, rows_per_block)
    first = blocks[:, :1]
    whole = (blocks == first + torch.arange(rows_per_block, device=row_order.device)).all() and (
        first % rows_per_block == 0
    ).all()
    if not whole:
        fail("rows_per_block", "a divisor of every run of rows that stays together (head_qk, r*head_v)", rows_per_block)
    return first[:, 0] // rows_per_block


def split_conv1d_update(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    conv_state: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    slots: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
    *,
    tokens_per_sequence: int = 1,
    activation: Literal["silu"] | None = "silu",
    layout: Layout = "interleaved",
    out: Sequence[torch.Tensor] | None = None,
    plan: ConvPlan | None = None,
) -> SplitResult:
    """Split and advance the causal depthwise convolution over q|k|v by each sequence's new tokens, in one launch.

    For channel c of mixed_qkv: ``y_t = act(bias + sum_i weight[c, i] * x[t - width + 1 + i])``, older x from the state;
    products and sum in float32. Afterwards the state holds the last width - 1 inputs, before the convolution.

    Args:
        mixed_qkvz, mixed_ba: as for :func:`fused_qkvzba_split_reshape_cat`, with N = S * tokens_per_sequence, the
            tokens of a sequence adjacent; mixed_qkvz is bfloat16, float16 or float32.
        conv_state: [num_slots, qkv_dim, width - 1], any strides, bfloat16, float16 or float32; updated in place,
            conv_state[..., -1] is the newest input. qkv_dim = 2*nqk*hq + nv*hv, in the order of mixed_qkv. It overlaps
            no other argument, and no two of its elements overlap.
        conv_weight: [qkv_dim, width], width 2 to 4, weight[:, -1] on the newest token, any strides.
        conv_bias: [qkv_dim], packed, or None.
        slots: [S] int32 or int64, packed: the row of conv_state of each sequence, -1 for padding, whose rows of all
            four results are 0. No two sequences may share a slot. Slots are checked on a CPU, and on a GPU inside
            ``checks.validate_values()``; unchecked, one outside the pool counts as padding.
        tokens_per_sequence: new tokens of each sequence.
        activation: "silu" or None.
        out, layout, plan: as for the split; the plan is a ``gdn_split.plan.ConvPlan``.

    Returns:
        SplitResult, mixed_qkv after the convolution in the dtype of mixed_qkvz. Not differentiable, and refused in
        transforms of torch.func.

    Raises:
        TypeError, ValueError: an argument is not as described; nothing has been written.
    """
    if activation not in ("silu", None):
        fail("activation", '"silu" or None', repr(activation))
    sizes = (num_heads_qk, num_heads_v, head_qk, head_v, layout, plan_as_ints(plan, ConvPlan))
    tensors = (mixed_qkvz, mixed_ba, conv_state, conv_weight, conv_bias, slots)
    numbers = (tokens_per_sequence, activation == "silu", *sizes)
    try:
        if out is None and plan is None and (again := straight.convolved_again(tensors, numbers)) is not None:
            return SplitResult._make(again)
        if torch.is_grad_enabled():
            _refuse_gradients(tensors)
        if out is None and plan is None and straight.is_possible(tensors, (tokens_per_sequence, *sizes[:4])):
            return SplitResult._make(straight.split_conv1d_update(tensors, numbers))
        _refuse_transforms("a call of split_conv1d_update")
        parts: tuple[torch.Tensor, ...]
        if out is None:
            parts = new_parts(mixed_qkvz, mixed_ba, GroupShape(num_heads_qk, num_heads_v, head_qk, head_v))
        else:
            parts = _checked_out(out, SplitResult._fields, needs_gradient=False)
        _split_conv1d_update(*tensors, *parts, *numbers)
    except REFUSALS:
        named = dict(zip(_CONV_TENSORS, tensors, strict=True))
        if conv_bias is None:
            del named["conv_bias"]
        check_kinds(sizes, **named)
        check_positive(tokens_per_sequence=tokens_per_sequence)
        check_projections(mixed_qkvz, mixed_ba, check_sizes(*sizes[:5]))
        raise
    return SplitResult(*parts)


_CONV_TENSORS = ("mixed_qkvz", "mixed_ba", "conv_state", "conv_weight", "conv_bias", "slots")


def _derived(function: Callable[..., Any], op: Callable[..., Any]) -> Callable[..., Any]:
    """What to call where a derivative may be wanted: torch.compile traces the op, and knows only gradients."""
    if not torch.compiler.is_compiling():
        return function
    if derivatives.is_forward_or_transformed():
        fail("a call inside torch.func.jvp, torch.vmap or other transforms", "outside torch.compile", "one inside both")
    return op


def _refuse_transforms(call: str) -> None:
    """For calls that write given tensors. The op refuses tangents, but torch.compile drops them before it."""
    if derivatives.is_transformed() or (torch.compiler.is_compiling() and derivatives.is_forward_or_transformed()):
        fail(call, "outside torch.func.jvp, torch.vmap and other transforms", "one inside")


def _refuse_gradients(tensors: Sequence[torch.Tensor | None]) -> None:
    for name, tensor in zip(_CONV_TENSORS, tensors, strict=True):
        if tensor is not None and tensor.requires_grad:
            fail(name, "without gradient (call under torch.no_grad() or inference_mode())", "requires_grad=True")


def check_kinds(sizes: tuple[object, ...], **tensors: object) -> None:
    """What torch would refuse before our own checks run, in its own words.

    Where host time counts, this is called only after torch has refused.
    """
    check_dense(**tensors)
    check_positive(**dict(zip(("num_heads_qk", "num_heads_v", "head_qk", "head_v"), sizes, strict=False)))
    if not isinstance(sizes[4], str):
        fail("layout", "a str", describe(sizes[4]), TypeError)


def _checked_out(out: Sequence[torch.Tensor], names: tuple[str, ...], needs_gradient: bool) -> tuple[torch.Tensor, ...]:
    if needs_gradient:
        fail("out", "None for inputs that require a gradient", "preallocated tensors")
    if not isinstance(out, (tuple, list)) or len(out) != len(names):
        fail("out", f"{len(names)} tensors ({', '.join(names)})", describe(out), TypeError)
    _refuse_transforms("a call with out=")
    named = {f"out.{name}": tensor for name, tensor in zip(names, out, strict=True)}
    check_dense(**named)
    for name, tensor in named.items():
        if tensor.requires_grad and torch.is_grad_enabled():
            fail(name, "a tensor that does not require a gradient", "requires_grad=True")
    return tuple(out)
