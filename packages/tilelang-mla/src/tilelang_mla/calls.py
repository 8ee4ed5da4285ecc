"""What the public functions share, FlashMLA's names among them: the op of decoding, scales, plans, limits."""

from __future__ import annotations

from types import NoneType
from typing import Any, NamedTuple

import torch

from kernel_reference.checks import (
    REFUSALS,
    check_dense,
    check_float,
    check_int,
    describe,
    fail,
    given,
    known,
    values_are_checked,
)
from kernel_reference.dispatch import runs_now
from kernel_reference.launching import device_properties
from kernel_reference.transforms import are_active, refuse_derivatives
from tilelang_mla import arguments, straight
from tilelang_mla.arguments import Decode8bitTensors, DecodeOptions, DecodeTensors, Names
from tilelang_mla.caches import format_of, scale_of
from tilelang_mla.plan import DecodeTiles, DeviceLimits
from tilelang_mla.schedule import DecodePlan
from tilelang_mla.sparse.arguments import SparseOptions, SparseTensors, check_sparse

Tensor = torch.Tensor
# Of a plan first_part, order if there is one, tiles.
Parts = tuple[Tensor, Tensor | None, DecodeTiles]

_decode = torch.ops.tilelang_mla.decode.default
_decode_sparse = torch.ops.tilelang_mla.decode_sparse.default
_decode_8bit = torch.ops.tilelang_mla.decode_8bit.default


class Call(NamedTuple):
    """What both drop-in and own function are given, their scale checked."""

    q: Tensor
    kv: Tensor
    seqlens_k: Tensor | None
    block_table: Tensor | None
    dim_nope: int
    softmax_scale: float | None
    causal: bool
    kv_scale: float | Tensor | None = None


def run_decode(
    call: Call, out: Tensor | None, return_lse: bool, parts: Parts | None, names: Names
) -> tuple[Tensor, Tensor | None]:
    """The op; what it refuses is said in the names that the caller knows."""
    q, kv, seqlens_k, block_table, dim_nope, scale, causal, kv_scale = call
    first_part, order, tiles = (None, None, None) if parts is None else parts
    tensors = (q, kv, seqlens_k, block_table, first_part, order, kv_scale)
    numbers = (dim_nope, scale, causal, return_lse, tiles)
    if out is None and (made := straight.decoded_again(tensors, numbers)) is not None:
        return made
    check_int(names.dim_nope, dim_nope)
    ints = None if tiles is None else tiles.as_ints()

    def named() -> dict[str, Tensor]:
        optional = given(**{names.first_part: first_part, names.order: order, "out": out})
        return {"q": q, names.kv: kv, names.seqlens_k: seqlens_k, "block_table": block_table, **optional}

    try:
        # Most calls are made where neither can be: they need no names.
        if torch.is_grad_enabled() or are_active():
            refuse_derivatives(**named())
        batch, seqlen_q, num_heads = q.shape[:3]
        shape = (batch, seqlen_q, num_heads, max(0, dim_nope))
        result = q.new_empty(shape) if out is None else out
        lse = q.new_empty((batch, num_heads, seqlen_q), dtype=torch.float32) if return_lse else None
        scale = q.shape[-1] ** -0.5 if scale is None else scale
    except (*REFUSALS, ValueError):
        check_dense(**named())
        check_ranks({"q": (q, f"[B, Sq, Hq, {names.dim_nope} + dpe]", 4)})
        raise
    inputs: tuple[Any, ...]
    try:
        if kv_scale is None and format_of(kv) is None:
            inputs, op = (q, kv, seqlens_k, block_table, first_part, order), _decode
        else:
            kv_scale = scale_of(kv, kv_scale)
            inputs, op = (q, kv, seqlens_k, block_table, first_part, order, kv_scale), _decode_8bit
        if out is None and runs_now(inputs):
            return straight.decode((q, kv, seqlens_k, block_table, first_part, order, kv_scale), numbers)
        op(*inputs, result, lse, dim_nope, scale, causal, ints)
    except (*REFUSALS, ValueError) as error:
        check_dense(**named())
        if not isinstance(kv_scale, (Tensor, NoneType)):
            # The error is of this scale, and the op takes tensors.
            raise
        of_op: DecodeTensors | Decode8bitTensors
        lengths: Any = seqlens_k
        table: Any = block_table
        if format_of(kv) is None:
            of_op = DecodeTensors(q, kv, lengths, table, first_part, order, result, lse)
        else:
            own_scale: Any = kv_scale
            of_op = Decode8bitTensors(q, kv, lengths, table, first_part, order, own_scale, result, lse)
        problem, plan = arguments.check_decode(of_op, DecodeOptions(dim_nope, scale, causal, ints), names)
        if isinstance(error, ValueError) and values_are_checked(q.device):
            arguments.check_decode_values(problem, plan, of_op, names)
        raise
    return result, lse


class SparseCall(NamedTuple):
    """What a function of sparse decoding is given."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    topk_length: Tensor | None
    attn_sink: Tensor | None
    dim_nope: int
    softmax_scale: float | None


def run_sparse(
    call: SparseCall, out: Tensor | None, return_lse: bool, parts: Parts | None, names: Names
) -> tuple[Tensor, Tensor | None]:
    """The op of sparse decoding; lse has a token's heads side by side, as the kernel writes them."""
    q, kv, indices, topk_length, attn_sink, dim_nope, scale = call
    first_part, order, tiles = (None, None, None) if parts is None else parts
    tensors = (q, kv, indices, topk_length, attn_sink, first_part, order)
    numbers = (dim_nope, scale, None, return_lse, tiles)
    if out is None and (made := straight.decoded_again(tensors, numbers)) is not None:
        return made
    check_int(names.dim_nope, dim_nope)
    ints = None if tiles is None else tiles.as_ints()

    def named() -> dict[str, Tensor]:
        optional = given(topk_length=topk_length, attn_sink=attn_sink, out=out)
        return {"q": q, names.kv: kv, "indices": indices, **optional}

    try:
        if torch.is_grad_enabled() or are_active():
            refuse_derivatives(**named())
        batch, seqlen_q, num_heads = q.shape[:3]
        result = q.new_empty((batch, seqlen_q, num_heads, max(0, dim_nope))) if out is None else out
        lse = q.new_empty((batch, seqlen_q, num_heads), dtype=torch.float32).transpose(1, 2) if return_lse else None
        scale = q.shape[-1] ** -0.5 if scale is None else scale
    except (*REFUSALS, ValueError):
        check_dense(**named())
        check_ranks({"q": (q, f"[B, Sq, Hq, {names.dim_nope} + dpe]", 4)})
        raise
    inputs = (*tensors, result, lse)
    try:
        if out is None and runs_now(tensors):
            return straight.decode_lists(tensors, numbers)
        _decode_sparse(*inputs, dim_nope, scale, ints)
    except (*REFUSALS, ValueError):
        check_dense(**named())
        check_sparse(SparseTensors(*inputs), SparseOptions(dim_nope, scale, ints), names.kv)
        raise
    return result, lse


def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of the device a tensor is on; what is no CUDA device counts as one SM."""
    if device.type != "cuda":
        return DeviceLimits(1)
    properties = device_properties(device)
    return DeviceLimits(properties.cores, properties.shared_memory)


def checked_scale(softmax_scale: float | None) -> float | None:
    # torch would take a tensor for a number, and wait for the device to tell it.
    if softmax_scale is not None:
        check_float("softmax_scale", softmax_scale, "a float or None")
    return softmax_scale


def decode_parts(plan: DecodePlan) -> Parts:
    if not isinstance(plan, DecodePlan):
        fail("plan", "a tilelang_mla.DecodePlan, from plan_decode, or None", describe(plan), TypeError)
    if not isinstance(plan.tiles, DecodeTiles):
        fail("plan.tiles", "a tilelang_mla.DecodeTiles", describe(plan.tiles), TypeError)
    return plan.first_part, plan.order, plan.tiles


def check_ranks(tensors: dict[str, tuple[Tensor, str, int]]) -> None:
    for name, (tensor, wanted, rank) in tensors.items():
        if tensor.ndim != rank or known(tensor.shape[-1] < 1):
            fail(name, wanted, describe(tensor))
