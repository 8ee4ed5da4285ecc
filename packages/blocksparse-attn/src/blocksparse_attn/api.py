"""The public functions: check the arguments, say what is wrong, call the op."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch

from blocksparse_attn import arguments, straight
from blocksparse_attn.arguments import Options, Tensors
from blocksparse_attn.gradients import ops as gradients
from blocksparse_attn.layout import BlockLayout
from blocksparse_attn.lists import Names, check_blocks, in_32_bits, with_heads
from blocksparse_attn.plan import AttentionPlan
from blocksparse_attn.straight import Numbers
from blocksparse_attn.values import check_values
from kernel_reference.checks import (
    REFUSALS,
    as_float,
    as_splits,
    as_window,
    check_bool,
    check_choice,
    check_dense,
    check_int,
    describe,
    fail,
    given,
    known,
    values_are_checked,
)
from kernel_reference.differentiable import are_wanted
from kernel_reference.dispatch import runs_now
from kernel_reference.paging import LAYOUTS
from kernel_reference.plans import plan_as_ints
from kernel_reference.transforms import are_active, refuse_derivatives

Tensor = torch.Tensor
PageLayout = Literal["NHD", "HND", "x-packed"]

_attend = torch.ops.blocksparse_attn.attend.default

# The block size that callers of the drop-in function need not give.
_BLOCK_SIZE = 64


class AttentionResult(NamedTuple):
    """``out`` [T, Hq, Dv] and ``lse`` [Hq, T], the natural log-sum-exp of the scores in float32.

    In a padded batch they are [B, T, Hq, Dv] and [B, Hq, T].
    """

    out: Tensor
    lse: Tensor


@overload
def blocksparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    block_table: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    page_layout: PageLayout = "NHD",
    q_starts: Tensor | None = None,
    q_ends: Tensor | None = None,
    k_starts: Tensor | None = None,
    k_ends: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    window: tuple[int, int] | None = None,
    out: Tensor | None = None,
    return_lse: Literal[False] = False,
    num_splits: int | None = None,
    plan: AttentionPlan | None = None,
) -> Tensor: ...


@overload
def blocksparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    block_table: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    page_layout: PageLayout = "NHD",
    q_starts: Tensor | None = None,
    q_ends: Tensor | None = None,
    k_starts: Tensor | None = None,
    k_ends: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    window: tuple[int, int] | None = None,
    out: Tensor | None = None,
    return_lse: Literal[True],
    num_splits: int | None = None,
    plan: AttentionPlan | None = None,
) -> AttentionResult: ...


@overload
def blocksparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    block_table: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    page_layout: PageLayout = "NHD",
    q_starts: Tensor | None = None,
    q_ends: Tensor | None = None,
    k_starts: Tensor | None = None,
    k_ends: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    window: tuple[int, int] | None = None,
    out: Tensor | None = None,
    return_lse: bool,
    num_splits: int | None = None,
    plan: AttentionPlan | None = None,
) -> Tensor | AttentionResult: ...


def blocksparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    block_table: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    page_layout: PageLayout = "NHD",
    q_starts: Tensor | None = None,
    q_ends: Tensor | None = None,
    k_starts: Tensor | None = None,
    k_ends: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    window: tuple[int, int] | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    num_splits: int | None = None,
    plan: AttentionPlan | None = None,
) -> Tensor | AttentionResult:
    """Causal softmax attention to the key blocks that a layout lists for each head and block of queries.

    Query i of a sequence of ``q_len`` queries and ``k_len`` keys is at position ``p = k_len - q_len + i``: prefill,
    chunked prefill, speculative drafts and decode are one call. It sees the key at position j when ``j <= p``, the
    layout's row ``p // q_block`` lists column ``j // k_block``, and j is in the window. Scores are ``softmax_scale *
    q.k``, then ``softcap * tanh(score / softcap)``. Source: FlashAttention-2 (arXiv 2307.08691) over the block-sparse
    pattern of Phi-3-small (arXiv 2404.14219).

    Batches are ragged, paged or padded. All tensors are on one device and may have any strides, except where noted.

    Args:
        q: [T, Hq, D], or padded [B, T, Hq, D]; bfloat16, float16 or float32; D from 16 to 256.
        k, v: ragged [Tk, Hkv, D] and [Tk, Hkv, Dv]; padded [B, Tk, Hkv, D] and [B, Tk, Hkv, Dv]; or, with block_table,
            the pages of a cache that holds the new tokens too. Of q's dtype; Dv from 16 to 256. Hkv divides Hq: query
            head h reads kv head ``h // (Hq / Hkv)``.
        layout: a :class:`BlockLayout` of Hq heads or of one for all, with rows for the longest sequence: a query past
            the last row sees nothing.
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32 or int64, contiguous, from 0, never falling, at most T and Tk: where
            the sequences of a ragged batch begin; a paged batch has cu_seqlens_q only. Rows past the last sequence are
            0 in out and -inf in lse.
        max_seqlen_q: an upper bound of the queries of a sequence, at most what the layout has rows for; it only sizes
            the launch. Required unless q is padded, where None stands for the rows of a sequence.
        block_table: [B, max_blocks] int32 or int64, rows contiguous: position p of sequence b is in page
            ``block_table[b, p // page]``. A page that the pool does not have reads as zeros.
        seqlens_k: with block_table: [B] int32 or int64, contiguous: tokens of each sequence, new ones included.
        page_layout: of the pages: "NHD" [blocks, page, Hkv, D]; "HND" [blocks, Hkv, page, D]; "x-packed" [blocks, Hkv,
            D / x, page, x] and [blocks, Hkv, Dv, page]. A page holds any number of tokens from 1 on.
        q_starts, q_ends, k_starts, k_ends: of a padded batch: [B] int32 or int64, contiguous: sequence b is rows
            ``starts[b] .. ends[b] - 1``, all of them when None. Other rows are not read, and 0 and -inf in the results.
        softmax_scale: ``D ** -0.5`` when None; 0 is a scale like any other.
        softcap: 0 is off.
        sinks: [Hq] float32, bfloat16 or float16, contiguous: logits in the softmax's denominator only, and so in lse;
            neither scaled nor capped.
        window: (left, right): a query sees keys up to ``left`` tokens before its position; -1 is unlimited. Keys after
            it are masked whatever ``right`` is.
        out: written instead of a new tensor: [T, Hq, Dv] or [B, T, Hq, Dv] of q's dtype, with strides under which
            elements neither overlap nor interleave, and no memory shared with another argument.
        return_lse: whether to return lse too.
        num_splits: how many ways each row's keys are split, 1 or more: results are then batch invariant, to the last
            bit. None: as the plan has it.
        plan: a launch plan to use instead of the one made for the device; has its own num_splits.

    Returns:
        out, contiguous if new, in q's dtype; with return_lse AttentionResult(out, lse). A query that sees no key gives
        0, and in lse its sink, or -inf without sinks. NaN in a key or value that no query of a sequence sees changes
        nothing; one that some query sees may contaminate other rows of the same tile.

        Both results of ragged and padded batches are differentiable, once and in reverse mode, in q, k, v and sinks;
        gradients are the same to the last bit at every call. The transposed lists that they need are made at the first
        and kept with the layout.

    Raises:
        TypeError, ValueError: an argument is not as described; nothing has been written. Inputs that require a gradient
            are refused with a cache or ``out``; tangents and the transforms of torch.func are with anything. Values in
            device memory are checked for CPU tensors, and inside ``kernel_reference.checks.validate_values``. Otherwise
            out-of-bounds queries are clamped to the rows of q; a sequence with impossible bounds of keys, with fewer
            keys than queries, or with more than its row of the block table has slots for, gives 0 and -inf.
    """
    left, right = (-1, 0) if window is None else as_window(window)
    check_bool("return_lse", return_lse)
    scale = None if softmax_scale is None else as_float("softmax_scale", softmax_scale)
    softcap = as_float("softcap", softcap)
    splits = 0 if num_splits is None else as_splits(num_splits)
    ints = None if plan is None else plan_as_ints(plan, AttentionPlan)
    if ints is not None and splits:
        fail("num_splits", "None where a plan is given, which has its own", num_splits)
    if not isinstance(layout, BlockLayout):
        fail("layout", "a blocksparse_attn.BlockLayout", describe(layout), TypeError)
    inputs = (
        q, k, v, layout.crow, layout.col, cu_seqlens_q, cu_seqlens_k, block_table, seqlens_k, q_starts, q_ends,
        k_starts, k_ends, sinks,
    )  # fmt: skip
    rest = (left, right, softcap, splits, layout.scattered, ints)
    numbers = (max_seqlen_q, return_lse, layout.q_block, layout.k_block, page_layout, scale, *rest)
    if out is None:
        again = straight.attended_again(inputs, numbers)
        if again is not None:
            return AttentionResult(*again) if return_lse else again[0]  # type: ignore[arg-type]
        if block_table is None and are_wanted(q, k, v, sinks):
            both = _differentiable(inputs, max_seqlen_q, layout, scale, rest)
            return both if return_lse else both.out
    result, lse = _call(inputs, numbers, _NAMES, out)
    return result if lse is None else AttentionResult(result, lse)


def _differentiable(
    inputs: tuple[Any, ...], longest: int | None, layout: BlockLayout, scale: float | None, numbers: tuple[Any, ...]
) -> AttentionResult:
    """By the op that autograd knows."""
    q, v = inputs[0], inputs[2]
    options: Options | None = None
    try:
        given = Numbers(longest, True, layout.q_block, layout.k_block, "NHD", scale, *numbers)
        options = straight.options_of(inputs, given)
        tensors = (*inputs[:5], *layout.transposed(), *inputs[5:7], *inputs[9:])
        return AttentionResult(*gradients.attention(*tensors, *options[:3], *options[4:]))
    except (*REFUSALS, ValueError):
        check_dense(**_named(*inputs, None))
        arguments.check_of_results(q, v)
        if options is not None:
            lse = q.new_empty(arguments.lse_shape(q), dtype=torch.float32)
            result = q.new_empty((*q.shape[:-1], v.shape[-1]))
            refused = Tensors(*(*inputs, result, lse))
            problem = arguments.check_attend(refused, options, _NAMES)
            if values_are_checked(q.device):
                check_values(problem, refused, _NAMES)
        raise


_NAMES = Names(crow="layout.crow", col="layout.col", heads="layout")


def blocksparse_flash_attn_varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_k: Tensor,
    cu_seqlens_q: Tensor | None,
    sm_scale: float | None,
    sparse_layout: BlockLayout | tuple[Tensor, Tensor],
    *,
    block_size: int | None = None,
    q_block_size: int | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """:func:`blocksparse_attention` of a ragged batch, with the signature of vLLM's function of that name.

    Args:
        q: [T, Hq, D]; k: [Tk, Hkv, D]; v: [Tk, Hkv, Dv]; as there.
        cu_seqlens_k, cu_seqlens_q: as there. cu_seqlens_q None: decode, one query a sequence, when T is the number of
            sequences; otherwise prefill, as many queries as keys, when T is Tk.
        sm_scale: softmax_scale there.
        sparse_layout: a BlockLayout, or its lists (crow [heads or 1, rows + 1], col [heads or 1, nnz]), rows
            contiguous; for one head also [rows + 1] and [nnz]. Entries of a pair past ``crow[h, -1]`` are not read;
            columns should increase in each row, and none may be listed twice, which is checked where values are. A
            pair of int64, as vLLM's ``dense_to_crow_col`` makes them, is converted to int32 in each call: a
            BlockLayout saves both.
        block_size: tokens of a block of keys, a multiple of 16; 64 when None.
        q_block_size: tokens of a block of queries, a multiple or a divisor of it; block_size when None. A BlockLayout
            has both, and what is given with one must agree.
        max_seqlen: an upper bound of the tokens of a sequence, at most what the layout has rows for; it only sizes the
            launch.

    Returns:
        [T, Hq, Dv], new and contiguous, in q's dtype. Not differentiable.

    Raises:
        TypeError, ValueError: as there, under these names; or cu_seqlens_q is None where T is neither of the two.
    """
    scale = None if sm_scale is None else as_float("sm_scale", sm_scale)
    if max_seqlen is not None:
        max_seqlen = check_int("max_seqlen", max_seqlen, 0)
    crow, col, q_block, k_block = _lists(sparse_layout, block_size, q_block_size)
    longest = (crow.shape[1] - 1) * q_block
    if max_seqlen is not None and known(max_seqlen > longest):
        fail("max_seqlen", f"at most {longest}, as sparse_layout has rows for", max_seqlen)
    named = {"q": q, "k": k, "v": v, "cu_seqlens_k": cu_seqlens_k, **given(cu_seqlens_q=cu_seqlens_q)}
    try:
        cu_seqlens_q, most = _queries(q, k, cu_seqlens_k, cu_seqlens_q)
        ragged = q.ndim == 3
    except REFUSALS:
        check_dense(**named)
        arguments.check_of_results(q, v)
        raise
    if not ragged:
        fail("q", "[T, Hq, D]", describe(q))
    most = min(most, longest if max_seqlen is None else max_seqlen)
    scattered = getattr(sparse_layout, "scattered", False)
    return _call(
        (q, k, v, crow, col, cu_seqlens_q, cu_seqlens_k, *(None,) * 7),
        (most, False, q_block, k_block, "NHD", scale, -1, 0, 0.0, 0, scattered, None),
        _NAMES_OF_PAIRS if isinstance(sparse_layout, (tuple, list)) else _NAMES_OF_ENGINES,
        required=_REQUIRED | {"cu_seqlens_k"},
    )[0]  # fmt: skip


_NAMES_OF_ENGINES = Names(
    crow="sparse_layout.crow", col="sparse_layout.col", heads="sparse_layout", max_seqlen_q="max_seqlen",
    softmax_scale="sm_scale",
)  # fmt: skip
_NAMES_OF_PAIRS = _NAMES_OF_ENGINES._replace(
    crow="sparse_layout[0]", col="sparse_layout[1]", q_block="q_block_size", k_block="block_size"
)

_GIVEN = (*Tensors._fields[:3], *Tensors._fields[5:14], "out")
_REQUIRED = frozenset(Tensors._fields[:3])


def _named(*tensors: Any, required: frozenset[str] = _REQUIRED) -> dict[str, Any]:
    """What the caller gave of q, k, v, the two lists, the op's optional inputs, and out, by name."""
    named = dict(zip(_GIVEN, (*tensors[:3], *tensors[5:]), strict=True))
    return {name: tensor for name, tensor in named.items() if tensor is not None or name in required}


def _call(
    inputs: tuple[Any, ...], numbers: tuple[Any, ...], names: Names, out: Tensor | None = None,
    required: frozenset[str] = _REQUIRED,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The op's results, without torch's dispatcher where nothing is lost; errors are raised again under the names that
    the caller knows. out: that of the caller, if any."""
    given = Numbers(*numbers)
    try:
        # Names are looked up where they may be wanted alone.
        if are_active() or torch.is_grad_enabled():
            refuse_derivatives(**_named(*inputs, out))
        if given.max_seqlen_q is not None:
            given = given._replace(max_seqlen_q=check_int(names.max_seqlen_q, given.max_seqlen_q, 0))
        if out is None and runs_now(inputs):
            return straight.attended(inputs, given)
        results = straight.new_results(inputs, given, out)
        _attend(*inputs, *results, *straight.options_of(inputs, given))
        return results
    except (*REFUSALS, ValueError):
        check_dense(**_named(*inputs, out, required=required))
        check_choice("page_layout", given.page_layout, LAYOUTS)
        arguments.check_of_results(inputs[0], inputs[2])
        refused = Tensors(*(*inputs, *straight.new_results(inputs, given, out)))
        problem = arguments.check_attend(refused, straight.options_of(inputs, given), names)
        if values_are_checked(refused.q.device):
            check_values(problem, refused, names)
        raise


def _queries(q: Tensor, k: Tensor, cu_seqlens_k: Tensor, cu_seqlens_q: Tensor | None) -> tuple[Tensor, int]:
    """cu_seqlens_q, and the bound of a sequence's queries that shapes give."""
    if cu_seqlens_q is not None:
        return cu_seqlens_q, q.shape[0]
    sequences = cu_seqlens_k.shape[0] - 1
    if known(q.shape[0] == sequences):
        return torch.arange(sequences + 1, dtype=cu_seqlens_k.dtype, device=cu_seqlens_k.device), 1
    if known(q.shape[0] == k.shape[0]):
        return cu_seqlens_k, q.shape[0]
    wanted = f"given unless q has one row a sequence ({sequences}) or as many as k ({k.shape[0]})"
    fail("cu_seqlens_q", wanted, f"None with {q.shape[0]} rows of q")


def _lists(
    layout: BlockLayout | tuple[Tensor, Tensor], block_size: int | None, q_block_size: int | None
) -> tuple[Tensor, Tensor, int, int]:
    """crow, col, q_block and k_block."""
    if block_size is not None:
        block_size = check_int("block_size", block_size, 1)
    if q_block_size is not None:
        q_block_size = check_int("q_block_size", q_block_size, 1)
    if isinstance(layout, BlockLayout):
        if block_size not in (None, layout.k_block):
            fail("block_size", f"{layout.k_block} as that of sparse_layout is", block_size)
        if q_block_size not in (None, layout.q_block):
            fail("q_block_size", f"{layout.q_block} as that of sparse_layout is", q_block_size)
        return layout.crow, layout.col, layout.q_block, layout.k_block
    if not isinstance(layout, (tuple, list)) or len(layout) != 2:
        fail("sparse_layout", "a blocksparse_attn.BlockLayout or (crow, col)", describe(layout), TypeError)
    crow, col = in_32_bits(*with_heads(*layout, _NAMES_OF_PAIRS))
    k_block = _BLOCK_SIZE if block_size is None else block_size
    q_block = k_block if q_block_size is None else q_block_size
    check_blocks(q_block, k_block, _NAMES_OF_PAIRS)
    return crow, col, q_block, k_block
