"""Attention over keys that groups of sequences share level by level: a system prompt, a document, a sequence's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch

from kernel_reference.checks import (
    REFUSALS,
    as_float,
    as_int,
    as_splits,
    check_bool,
    check_choice,
    check_dense,
    describe,
    fail,
    given,
)
from kernel_reference.paging import LAYOUTS
from kernel_reference.transforms import are_active, refuse_derivatives
from prefix_prefill import arguments, ops
from prefix_prefill.api import AttentionResult, PageLayout, as_scale, require_out_scale, require_scales
from prefix_prefill.arguments import FP8, NAMES
from prefix_prefill.cascade.arguments import CascadeLevel

Tensor = torch.Tensor
# Sequences of levels that need no closer look where they hold nothing else.
_PLAIN = {list, tuple}


@overload
def cascade_attention(
    q: Tensor, levels: Sequence[CascadeLevel], *, max_seqlen_q: int, page_layout: PageLayout = "NHD",
    softmax_scale: float | None = None, softcap: float = 0.0, draft_mask: Tensor | None = None,
    sinks: Tensor | None = None, k_scale: float | Tensor | None = None, v_scale: float | Tensor | None = None,
    out_scale: float | Tensor | None = None, out: Tensor | None = None, return_lse: Literal[False] = False,
    num_splits: int | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def cascade_attention(
    q: Tensor, levels: Sequence[CascadeLevel], *, max_seqlen_q: int, page_layout: PageLayout = "NHD",
    softmax_scale: float | None = None, softcap: float = 0.0, draft_mask: Tensor | None = None,
    sinks: Tensor | None = None, k_scale: float | Tensor | None = None, v_scale: float | Tensor | None = None,
    out_scale: float | Tensor | None = None, out: Tensor | None = None, return_lse: Literal[True],
    num_splits: int | None = None,
) -> AttentionResult: ...  # fmt: skip
@overload
def cascade_attention(
    q: Tensor, levels: Sequence[CascadeLevel], *, max_seqlen_q: int, page_layout: PageLayout = "NHD",
    softmax_scale: float | None = None, softcap: float = 0.0, draft_mask: Tensor | None = None,
    sinks: Tensor | None = None, k_scale: float | Tensor | None = None, v_scale: float | Tensor | None = None,
    out_scale: float | Tensor | None = None, out: Tensor | None = None, return_lse: bool,
    num_splits: int | None = None,
) -> Tensor | AttentionResult: ...  # fmt: skip
def cascade_attention(
    q: Tensor,
    levels: Sequence[CascadeLevel],
    *,
    max_seqlen_q: int,
    page_layout: PageLayout = "NHD",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    draft_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    out_scale: float | Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    num_splits: int | None = None,
) -> Tensor | AttentionResult:
    """Softmax attention of a ragged batch's new tokens over keys that groups of them share, loaded once a group.

    Each level cuts the T rows anew: its group g has the rows from ``cu_seqlens_q[g]`` to before ``cu_seqlens_q[g + 1]``
    and ``seqlens_k[g]`` keys, in the pages of ``block_table[g]``. A row sees all keys of its group on every level but
    the last, whose groups are the sequences and which is causal as :func:`prefix_prefill` is: its keys hold the new
    tokens. The result is the attention over the keys of all levels, one after another. Source: FlashInfer (arXiv
    2501.01005), section 3.1.2; Hydragen (arXiv 2402.05099).

    Args:
        q: [T, Hq, D] as :func:`prefix_prefill` takes it.
        levels: one or more :class:`CascadeLevel`: ``k_cache``, ``v_cache`` of ``page_layout``, of one dtype and number
            of heads on all levels, where they may be the same tensors; ``block_table`` [G, max_blocks];
            ``cu_seqlens_q`` [G + 1]; ``seqlens_k`` [G], on levels before the last 0 or more.
        max_seqlen_q: an upper bound of the new tokens of a sequence, a group of the last level.
        page_layout, softmax_scale, softcap, draft_mask, sinks, k_scale, v_scale, out_scale, out, return_lse: as there;
            scales are of the caches of all levels.
        num_splits: in how many pieces each row's keys are cut on each level; a fixed number makes a row's result
            bitwise independent of the rows that it shares a group with. None: as plan or device find best.

    Returns:
        out [T, Hq, Dv], or with return_lse AttentionResult(out, lse [Hq, T] float32), as :func:`prefix_prefill`. Rows
        of no sequence of the last level are 0 and -inf. Not differentiable.

    Raises:
        TypeError, ValueError: an argument is not as said above, on level 2 as ``levels[2].block_table``. Values in
            device memory are checked on a CPU, and on a GPU inside ``kernel_reference.checks.validate_values``.
            Unchecked, a group whose length cannot be has no keys on its level; on the last its rows are 0 and -inf.
    """
    own_k, k_number = as_scale("k_scale", k_scale)
    own_v, v_number = as_scale("v_scale", v_scale)
    own_out, out_number = as_scale("out_scale", out_scale)
    if type(levels) not in _PLAIN or {*map(type, levels)} != {CascadeLevel}:
        _check(levels)
    tensors = (q, tuple(levels), sinks, own_k, own_v, own_out, out, None, draft_mask)
    asked = None
    if not torch.compiler.is_dynamo_compiling():
        # As prefix_prefill has it: what was found right once need not be looked at again.
        asked = ops.asked(
            "cascade_attention", return_lse, max_seqlen_q, page_layout, softmax_scale, softcap, num_splits, k_number,
            v_number, out_number, k_scale is None, v_scale is None, out_scale is None,
        )  # fmt: skip
        served = ops.cascade_again(tensors, asked)
        if served is not None:
            result, lse = served
            return result if lse is None else AttentionResult(result, lse)
    _check(levels)
    max_seqlen_q = as_int("max_seqlen_q", max_seqlen_q)
    check_bool("return_lse", return_lse)
    scale = None if softmax_scale is None else as_float("softmax_scale", softmax_scale)
    softcap = as_float("softcap", softcap)
    splits = as_splits(num_splits)
    try:
        if torch.is_grad_enabled() or are_active():
            refuse_derivatives(q=q, sinks=sinks, k_scale=own_k, v_scale=own_v, out_scale=own_out, out=out)
            for i, (k_cache, v_cache, *_) in enumerate(levels):
                if are_active() or k_cache.requires_grad or v_cache.requires_grad:
                    refuse_derivatives(**{f"levels[{i}].k_cache": k_cache, f"levels[{i}].v_cache": v_cache})
        for level in levels:
            require_scales(level.k_cache, level.v_cache, k_scale, v_scale)
        if out is not None:
            require_out_scale(out, out_scale, NAMES)
        numbers = (
            max_seqlen_q, page_layout, q.shape[2] ** -0.5 if scale is None else scale, softcap, k_number, v_number,
            out_number, splits,
        )  # fmt: skip
        result, lse = ops.cascade(tensors, numbers, return_lse, None if out_scale is None else FP8[0], asked)
    except REFUSALS:
        named = given(sinks=sinks, k_scale=own_k, v_scale=own_v, out_scale=own_out, out=out, draft_mask=draft_mask)
        check_dense(q=q, **named)
        for i, level in enumerate(levels):
            _check_dense(i, level)
        check_choice("page_layout", page_layout, LAYOUTS)
        arguments.check_q(q)
        if levels[0].v_cache.ndim != 4:
            fail("levels[0].v_cache", "of 4 dimensions", describe(levels[0].v_cache))
        raise
    return result if lse is None else AttentionResult(result, lse)


def _check(levels: Sequence[CascadeLevel]) -> None:
    """Levels are such, each of tensors; that these are dense is looked at where the op refuses them."""
    if isinstance(levels, CascadeLevel) or not isinstance(levels, Sequence):
        fail("levels", "a sequence of CascadeLevel", describe(levels), TypeError)
    if not levels:
        fail("levels", "one level or more", "none")
    for i, level in enumerate(levels):
        if not isinstance(level, CascadeLevel):
            fail(f"levels[{i}]", "a CascadeLevel", describe(level), TypeError)
        if not all([type(tensor) is Tensor for tensor in level]):
            _check_dense(i, level)


def _check_dense(i: int, level: CascadeLevel) -> None:
    check_dense(**{f"levels[{i}].{name}": tensor for name, tensor in level._asdict().items()})
