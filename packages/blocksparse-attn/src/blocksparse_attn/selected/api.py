"""The public function: checks the arguments, says what is wrong, calls the op."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from blocksparse_attn import arguments as attend_arguments
from blocksparse_attn.api import AttentionResult
from blocksparse_attn.selected import straight
from blocksparse_attn.selected.arguments import Tensors, check_selected, check_values
from blocksparse_attn.selected.gradients import ops as gradients
from blocksparse_attn.selected.gradients.arguments import Inputs, check_attention, new_results
from blocksparse_attn.selected.plan import SelectedPlan
from blocksparse_attn.selected.straight import Numbers
from kernel_reference.checks import (
    REFUSALS,
    as_float,
    check_bool,
    check_dense,
    check_int,
    given,
    values_are_checked,
)
from kernel_reference.differentiable import are_wanted
from kernel_reference.dispatch import runs_now
from kernel_reference.plans import plan_as_ints
from kernel_reference.transforms import are_active, refuse_derivatives

Tensor = torch.Tensor

_selected = torch.ops.blocksparse_attn.selected.default
_GIVEN = Tensors._fields[:10]


@overload
def selected_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indices: Tensor,
    *,
    block_size: int,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    page_layout: Literal["NHD", "HND"] = "NHD",
    causal: bool = True,
    softmax_scale: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    out: Tensor | None = None,
    return_lse: Literal[False] = False,
    plan: SelectedPlan | None = None,
) -> Tensor: ...


@overload
def selected_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indices: Tensor,
    *,
    block_size: int,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    page_layout: Literal["NHD", "HND"] = "NHD",
    causal: bool = True,
    softmax_scale: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    out: Tensor | None = None,
    return_lse: Literal[True],
    plan: SelectedPlan | None = None,
) -> AttentionResult: ...


@overload
def selected_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indices: Tensor,
    *,
    block_size: int,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    page_layout: Literal["NHD", "HND"] = "NHD",
    causal: bool = True,
    softmax_scale: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool,
    plan: SelectedPlan | None = None,
) -> Tensor | AttentionResult: ...


def selected_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indices: Tensor,
    *,
    block_size: int,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    page_layout: Literal["NHD", "HND"] = "NHD",
    causal: bool = True,
    softmax_scale: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    plan: SelectedPlan | None = None,
) -> Tensor | AttentionResult:
    """Softmax attention of each token to the blocks of keys that are selected for it and for a kv head.

    Query i of a sequence of ``q_len`` queries and ``k_len`` keys is at position ``p = k_len - q_len + i``; prefill,
    chunked prefill, drafts and decode are one call. It sees the key at position j when ``indices`` lists the block
    ``j // block_size`` for its token and kv head and, causal, ``j <= p``. Source: Native Sparse Attention (arXiv
    2502.11089), its selected branch.

    Args:
        q: [T, Hq, D]; bfloat16, float16 or float32; D from 16 to 256.
        k_cache, v_cache: the pages of a cache that holds the new tokens too, of q's dtype or float8_e4m3fn; any
            strides. Hkv divides Hq: query head h reads kv head ``h // (Hq / Hkv)``.
        indices: [T, Hkv, topk] int32, lists contiguous: blocks of the token's own sequence, in any order; -1 is
            nothing, wherever it stands. A block may be listed once.
        block_size: tokens of a block: a power of two from 1 to 256.
        block_table: [B, max_blocks] int32 or int64, rows contiguous: position p of sequence b is in page
            ``block_table[b, p // page]``. A page that the pool does not have reads as zeros.
        cu_seqlens_q: [B + 1] int32 or int64, contiguous, from 0, never falling, at most T: where sequences begin. Rows
            past the last sequence are 0 in out and -inf in lse.
        seqlens_k: [B] int32 or int64, contiguous: tokens of each sequence, new ones included.
        page_layout: of the pages: "NHD" [blocks, page, Hkv, D] or "HND" [blocks, Hkv, page, D]; a page holds any number
            of tokens from 1 on.
        causal: False: a token sees all keys of its blocks, up to the sequence's end.
        softmax_scale: ``D ** -0.5`` when None.
        sinks: [Hq] float32, bfloat16 or float16, contiguous: logits in the softmax's denominator only.
        k_scale, v_scale: what stored keys and values are multiplied by: a float, or float32 [1] or [Hkv], contiguous.
        out: written instead of a new tensor: [T, Hq, Dv] of q's dtype, which shares no memory with another argument.
        return_lse: whether to return lse too.
        plan: a launch plan to use instead of the one made for the device.

    Returns:
        out [T, Hq, Dv], contiguous if new, in q's dtype; with return_lse AttentionResult(out, lse), lse [Hq, T] in
        float32. A token that sees no key gives 0, and in lse its sink, or -inf.

        Both are differentiable, once and in reverse mode, in q, k_cache, v_cache and sinks; gradients of caches are in
        their shapes, 0 in slots that no token sees, and the same to the last bit at every call.

    Raises:
        TypeError, ValueError: an argument is not as described; nothing has been written. Inputs that require a gradient
            are refused with ``out`` and with a cache of 8 bits; scales that do, tangents and the transforms of
            torch.func are with anything. Values in device memory are checked for CPU tensors, and inside
            ``kernel_reference.checks.validate_values``. Otherwise blocks out of bounds list nothing, and a sequence of
            impossible lengths gives 0 and -inf.
    """
    check_bool("return_lse", return_lse)
    check_bool("causal", causal)
    scale = None if softmax_scale is None else as_float("softmax_scale", softmax_scale)
    ints = None if plan is None else plan_as_ints(plan, SelectedPlan)
    (k_tensor, k_factor), (v_tensor, v_factor) = _scale("k_scale", k_scale), _scale("v_scale", v_scale)
    inputs = (
        q, k_cache, v_cache, indices, block_table, cu_seqlens_q, seqlens_k, sinks, k_tensor, v_tensor,
    )  # fmt: skip
    numbers = (return_lse, block_size, page_layout, causal, scale, k_factor, v_factor, ints)
    if out is None:
        again = straight.attended_again(inputs, numbers)
        if again is not None:
            return AttentionResult(*again) if return_lse else again[0]  # type: ignore[arg-type]
        if are_wanted(q, k_cache, v_cache, sinks):
            both = _differentiable(inputs, numbers[1:])
            return both if return_lse else both.out
    result, lse = _call(inputs, Numbers(*numbers), out)
    return result if lse is None else AttentionResult(result, lse)


def _call(inputs: tuple[Any, ...], numbers: Numbers, out: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The op's results, without torch's dispatcher where nothing is lost; ``out``: that of the caller, if any."""
    try:
        if are_active() or torch.is_grad_enabled():
            refuse_derivatives(**_named(*inputs), **given(out=out))
        # In a table of launches 16.0 is 16.
        numbers = numbers._replace(block_size=check_int("block_size", numbers.block_size, 1))
        if out is None and runs_now(inputs):
            return straight.attended(inputs, numbers)
        results = straight.new_results(inputs, numbers, out)
        _selected(*inputs, *results, *straight.options_of(inputs, numbers))
        return results
    except (*REFUSALS, ValueError):
        check_dense(**_named(*inputs), **given(out=out))
        attend_arguments.check_of_results(inputs[0], inputs[2], "v_cache")
        refused = Tensors(*(*inputs, *straight.new_results(inputs, numbers, out)))
        problem = check_selected(refused, straight.options_of(inputs, numbers))
        if values_are_checked(refused.q.device):
            check_values(problem, refused)
        raise


def _differentiable(inputs: tuple[Any, ...], options: tuple[Any, ...]) -> AttentionResult:
    """By the op that autograd knows."""
    q = inputs[0]
    given: tuple[Any, ...] = ()
    try:
        refuse_derivatives(k_scale=inputs[8], v_scale=inputs[9])
        scale = q.shape[-1] ** -0.5 if options[3] is None else options[3]
        given = (*options[:3], scale, *options[4:])
        return AttentionResult(*gradients.attention(*inputs, *given))
    except (*REFUSALS, ValueError):
        check_dense(**_named(*inputs))
        attend_arguments.check_of_results(q, inputs[2], "v_cache")
        if given:
            tensors = Inputs(*inputs)
            problem = check_attention(tensors, given)
            if values_are_checked(q.device):
                check_values(problem, Tensors(*tensors, *new_results(tensors)))
        raise


def _named(*inputs: Any) -> dict[str, Any]:
    """Inputs by name, those that may be left out only where they are not None."""
    named = dict(zip(_GIVEN, inputs, strict=True))
    return {**dict(zip(_GIVEN[:7], inputs[:7], strict=True)), **given(**named)}


def _scale(name: str, scale: float | Tensor | None) -> tuple[Tensor | None, float]:
    """A scale as the op takes it: a tensor or none, and a factor."""
    if scale is None:
        return None, 1.0
    if isinstance(scale, Tensor):
        return scale, 1.0
    return None, as_float(name, scale, "a float or a tensor")
