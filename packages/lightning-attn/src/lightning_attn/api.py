"""The public functions: check the arguments, say what is wrong, call the op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernel_reference.checks import (
    REFUSALS,
    as_float,
    as_int,
    check_dense,
    describe,
    fail,
    given,
    known,
    values_are_checked,
)
from kernel_reference.plans import plan_as_ints
from kernel_reference.transforms import are_active, refuse_derivatives
from lightning_attn import (
    arguments,
    ops,
    transforms,
)
from lightning_attn.arguments import Names
from lightning_attn.plan import DecodePlan, PrefillPlan
from lightning_attn.tensors import Decode

Tensor = torch.Tensor

_varlen = torch.ops.lightning_attn.varlen.default
_decode = torch.ops.lightning_attn.decode.default
_verify = torch.ops.lightning_attn.verify.default
_commit = torch.ops.lightning_attn.commit.default
_verify_tree = torch.ops.lightning_attn.verify_tree.default
_commit_path = torch.ops.lightning_attn.commit_path.default


class LightningResult(NamedTuple):
    """``out`` [b, h, n, e], contiguous, and the final states ``kv`` [b, h, 1, d, e] in float32."""

    out: Tensor
    kv: Tensor


class Snapshots(NamedTuple):
    """States to keep inside the sequences of a call, up to P of each, for prefix caching.

    ``positions`` [B, P]: the number of tokens of the sequence, in this call, after which the state is kept, 1 to its
    length, in any order; ``slots`` [B, P]: the slot of the pool it goes to. Both int32 or int64, contiguous; -1 in
    either is unused.
    """

    positions: Tensor
    slots: Tensor


def lightning_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ed: Tensor,
    block_size: int = 256,
    kv_history: Tensor | None = None,
    *,
    scale: float = 1.0,
    plan: PrefillPlan | None = None,
) -> LightningResult:
    """Causal linear attention with a per-head decay over a batch of sequences of one length.

    For each head with decay rate s: ``S_t = exp(-s) S_{t-1} + k_t v_t^T`` and ``o_t = scale * S_t^T q_t``, S [d, e] in
    float32, starting from ``kv_history`` or zeros. Source: Lightning Attention-2 (arXiv 2401.04658), MiniMax-01 (arXiv
    2501.08313).

    Args:
        q, k: [b, h, n, d]; v: [b, h, n, e]. One dtype of bfloat16, float16 and float32, any strides; d and e from 16
            to 256; n and b may be 0.
        ed: the decay rates s >= 0, float32, any shape of h elements, contiguous. See :func:`lightning_attn.slopes`.
        block_size: without effect; accepted for compatibility.
        kv_history: the states before the first token, [b, h, d, e] float32, any strides; not modified. To continue an
            earlier call, its ``kv[:, :, -1]``.
        scale: factor of the outputs.
        plan: a launch plan to use instead of the one made for the device (see ``lightning_attn.plan``).

    Returns:
        LightningResult(out [b, h, n, e] in the dtype of q, kv [b, h, 1, d, e] float32), both new: kv is the state after
        the last token, ``kv[:, :, -1]`` for callers that expect the states of all blocks. Differentiable once, in
        reverse and forward mode, in q, k, v and kv_history; torch.func's transforms work, vmap over any tensor too.

    Raises:
        TypeError, ValueError: an argument is not as described. Decay rates are checked on a CPU, and elsewhere inside
            ``kernel_reference.checks.validate_values``. Unchecked, one below 0, or NaN, counts as 0, and an infinite
            one forgets the state at each token, on every device.
    """
    as_int("block_size", block_size)
    scale = as_float("scale", scale)
    numbers = (scale, plan_as_ints(plan, PrefillPlan))
    try:
        op: Any = ops.attention_inference
        if torch.is_grad_enabled() and ed.requires_grad:
            fail("ed", "without gradient (decay rates have none here; pass ed.detach())", "requires_grad=True")
        if are_active():
            op = transforms.attention
        elif torch.is_grad_enabled():
            if q.requires_grad or k.requires_grad or v.requires_grad:
                op = ops.attention
            if kv_history is not None and kv_history.requires_grad:
                op = ops.attention
        return LightningResult(*op(q, k, v, ed, kv_history, *numbers))
    except REFUSALS:
        explain(check_dense, q=q, k=k, v=v, ed=ed, **given(kv_history=kv_history))
        raise


def lightning_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    cu_seqlens: Tensor,
    *,
    state_pool: Tensor,
    slots: Tensor,
    has_initial_state: Tensor | bool,
    scale: float = 1.0,
    out: Tensor | None = None,
    snapshot: Snapshots | None = None,
    plan: PrefillPlan | None = None,
) -> Tensor:
    """The recurrence of :func:`lightning_attention` over a ragged batch, prefill and decode rows mixed, in one call.

    States live in a pool: that of sequence i is read from ``state_pool[slots[i]]``, if it has one, and the state after
    its last token is written there. An empty sequence leaves its slot unchanged, bit for bit.

    Args:
        q, k: [T, Hqk, D]; v: [T, Hv, E]. One dtype of bfloat16, float16 and float32, any strides (slices of one
            fused tensor, say); D and E from 16 to 256. H is the greater of Hqk and Hv, and a multiple of the other:
            head h reads head ``h // (H / Hqk)`` of q and k, and v likewise.
        slopes: the decay rates s >= 0, float32, any shape of H elements, contiguous.
        cu_seqlens: [B + 1] int32 or int64, contiguous, from 0, non-decreasing, at most T: sequence i is rows
            cu_seqlens[i] to cu_seqlens[i + 1] - 1. Rows after the last sequence are 0 in the result.
        state_pool: [num_slots, H, D, E] float32, bfloat16 or float16, any strides in which no two elements
            overlap and dimensions do not interleave; updated in place.
        slots: [B] int32 or int64, contiguous; -1 for padding, whose rows are 0 and for which no state is read or
            written. No two sequences may share a slot.
        has_initial_state: [B] bool, contiguous, or one bool for all: whether the sequence starts from its slot's state;
            if not, from zeros, whatever the slot holds.
        scale: factor of the outputs.
        out: [T, H, E] in the dtype of q to write instead of a new tensor; strides as for the pool, overlapping no
            other tensor.
        snapshot: states to keep as well; see :class:`Snapshots`. Padding keeps none, and nothing else in the call may
            use a snapshot's slot.
        plan: a launch plan to use instead of the one made for the device.

    Returns:
        out [T, H, E], contiguous if new. Not differentiable.

    Raises:
        TypeError, ValueError: an argument is not as described; nothing has been written. Values are checked on
            a CPU, and elsewhere inside ``kernel_reference.checks.validate_values``. Unchecked, bounds of sequences are
            clamped to 0 .. T, slots outside the pool are padding, impossible snapshots unused and rates as for
            :func:`lightning_attention`.
    """
    scale = as_float("scale", scale)
    numbers = (scale, plan_as_ints(plan, PrefillPlan))
    positions, snapshot_slots = (None, None) if snapshot is None else _parts(snapshot)
    own_states, all_have_states = _initial(has_initial_state)
    try:
        refuse_derivatives(
            q=q, k=k, v=v, slopes=slopes, cu_seqlens=cu_seqlens, state_pool=state_pool, slots=slots, out=out
        )
        result = _allocate_out(q, v) if out is None else out
        _varlen(
            q, k, v, slopes, cu_seqlens, state_pool, slots, own_states, positions, snapshot_slots, result,
            all_have_states, *numbers,
        )  # fmt: skip
    except REFUSALS:
        explain(
            check_dense, q=q, k=k, v=v, slopes=slopes, cu_seqlens=cu_seqlens, state_pool=state_pool, slots=slots,
            **given(
                out=out, has_initial_state=own_states, **{"snapshot.positions": positions},
                **{"snapshot.slots": snapshot_slots},
            ),
        )  # fmt: skip
        explain(arguments.check_packed, ("T",), q, k, v)
        raise
    return result


def lightning_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    slopes: Tensor,
    *,
    scale: float = 1.0,
    out: Tensor | None = None,
    plan: DecodePlan | None = None,
) -> Tensor:
    """One token of each sequence: the recurrence of :func:`lightning_attention`, its states advanced in their pool.

    Args:
        q, k: [B, Hqk, D]; v: [B, Hv, E]; dtypes, strides, heads and sizes as for :func:`lightning_attention_varlen`.
        state_pool: [num_slots, H, D, E], as there; updated in place. The product k v^T is formed in float32.
        slots: [B] int32 or int64, contiguous; -1 for padding, whose row is 0 and which writes no state. No two
            sequences may share a slot.
        slopes, scale: as there.
        out: [B, H, E] in the dtype of q to write instead of a new tensor; strides as for the pool, overlapping no
            other tensor.
        plan: a launch plan to use instead of the one made for the device.

    Returns:
        out [B, H, E], contiguous if new. Not differentiable.

    Raises:
        TypeError, ValueError: an argument is not as described; nothing has been written. Slots and decay rates are
            checked on a CPU, and elsewhere inside ``kernel_reference.checks.validate_values``. Unchecked, a slot
            outside the pool is padding and rates are as for :func:`lightning_attention`.
    """
    scale = as_float("scale", scale)
    numbers = (scale, plan_as_ints(plan, DecodePlan))
    try:
        refuse_derivatives(q=q, k=k, v=v, state_pool=state_pool, slots=slots, slopes=slopes, out=out)
        result = _allocate_out(q, v) if out is None else out
        _decode(q, k, v, state_pool, slots, slopes, result, *numbers)
    except REFUSALS:
        explain(check_dense, q=q, k=k, v=v, state_pool=state_pool, slots=slots, slopes=slopes, **given(out=out))
        explain(arguments.check_packed, ("B",), q, k, v)
        raise
    return result


def linear_decode_forward_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_caches: Tensor,
    slope_rate: Tensor,
    slot_idx: Tensor,
    BLOCK_SIZE: int = 32,
    *,
    plan: DecodePlan | None = None,
) -> Tensor:
    """:func:`lightning_decode` with the signature engines call.

    Args:
        q, k: [B, H, 1, D]; v: [B, H, 1, E]; dtypes, strides and sizes as there.
        kv_caches: [num_slots, H, D, E], the ``state_pool`` there; updated in place.
        slope_rate: the decay rates s >= 0, float32, any shape of H elements, contiguous.
        slot_idx: [B], the ``slots`` there.
        BLOCK_SIZE: without effect; accepted for compatibility.
        plan: a launch plan to use instead of the one made for the device.

    Returns:
        [B, H * E], new, contiguous. Rows of padding are 0. Not differentiable.

    Raises:
        TypeError, ValueError: as there, with these names.
    """
    as_int("BLOCK_SIZE", BLOCK_SIZE)
    ints = plan_as_ints(plan, DecodePlan)
    try:
        refuse_derivatives(q=q, k=k, v=v, kv_caches=kv_caches, slope_rate=slope_rate, slot_idx=slot_idx)
        q_rows, k_rows, v_rows = _only_token(q, k, v)
        out = _allocate_out(q_rows, v_rows)
    except REFUSALS:
        explain(check_dense, q=q, k=k, v=v, kv_caches=kv_caches, slope_rate=slope_rate, slot_idx=slot_idx)
        raise
    try:
        _decode(q_rows, k_rows, v_rows, kv_caches, slot_idx, slope_rate, out, 1.0, ints)
    except (*REFUSALS, ValueError):
        # The op knows its arguments by other names.
        explain(check_dense, q=q, k=k, v=v, kv_caches=kv_caches, slope_rate=slope_rate, slot_idx=slot_idx)
        tensors = Decode(q_rows, k_rows, v_rows, kv_caches, slot_idx, slope_rate, out)
        explain(arguments.check_decode, tensors, 1.0, ints, _NAMES_OF_ENGINES)
        if not torch.compiler.is_compiling():
            explain(arguments.overlap("decode", tensors, _NAMES_OF_ENGINES), *tensors)
        if values_are_checked(q.device):
            explain(arguments.check_decode_values, tensors, _NAMES_OF_ENGINES)
        raise
    return out.flatten(1)


_NAMES_OF_ENGINES = Names(state_pool="kv_caches", slots="slot_idx", slopes="slope_rate")


def _only_token(q: Any, k: Any, v: Any) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, 1, D|E] as [B, H, D|E]: views."""
    for name, tensor, tail in (("q", q, "D"), ("k", k, "D"), ("v", v, "E")):
        if not isinstance(tensor, Tensor):
            check_dense(**{name: tensor})
        if tensor.ndim != 4 or tensor.shape[2] != 1:
            tokens_first = tensor.ndim == 4 and tensor.shape[1] == 1
            hint = f" (pass {name}.transpose(1, 2) if it is [B, 1, H, {tail}])" if tokens_first else ""
            fail(name, f"[B, H, 1, {tail}]{hint}", describe(tensor))
        if any([known(one != other) for one, other in zip(tensor.shape[:2], q.shape[:2], strict=True)]):
            fail(name, f"[{q.shape[0]}, {q.shape[1]}, 1, {tail}] as q is", describe(tensor))
    return q[:, :, 0], k[:, :, 0], v[:, :, 0]


def lightning_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    slopes: Tensor,
    *,
    parents: Tensor | None = None,
    scale: float = 1.0,
    out: Tensor | None = None,
    plan: DecodePlan | None = None,
) -> Tensor:
    """The outputs of T draft tokens of each sequence, states unchanged; :func:`lightning_commit` comes next.

    Each output has the bits that decoding its token, and those before it on its path, would give.

    Args:
        q, k: [B, T, Hqk, D]; v: [B, T, Hv, E]; T at most 16, or 32 with ``parents``; dtypes, strides, heads and sizes
            as for :func:`lightning_attention_varlen`.
        state_pool: [num_slots, H, D, E], as there; not modified.
        slots: [B] int32 or int64, contiguous; -1 for padding, whose rows are 0.
        slopes, scale: as there.
        parents: drafts that branch: [B, T] int32 or int64, contiguous; token t of sequence b continues token
            ``parents[b, t]``, which is less than t, or the pool's state if that is -1. Without it each token continues
            the one before it.
        out: [B, T, H, E] in the dtype of q to write instead of a new tensor; strides as for the pool, no memory of
            the other tensors.
        plan: a launch plan to use instead of the one made for the device.

    Returns:
        out [B, T, H, E], contiguous if new. Not differentiable.

    Raises:
        TypeError, ValueError: as for :func:`lightning_decode`. Unchecked, a parent that is not below its child counts
            as -1.
    """
    scale = as_float("scale", scale)
    numbers = (scale, plan_as_ints(plan, DecodePlan))
    tensors = {"q": q, "k": k, "v": v, "state_pool": state_pool, "slots": slots, "slopes": slopes}
    try:
        refuse_derivatives(**tensors, parents=parents, out=out)
        result = _allocate_out(q, v) if out is None else out
        if parents is None:
            _verify(q, k, v, state_pool, slots, slopes, result, *numbers)
        else:
            _verify_tree(q, k, v, state_pool, slots, slopes, parents, result, *numbers)
    except REFUSALS:
        explain(check_dense, **tensors, **given(parents=parents, out=out))
        explain(arguments.check_packed, ("B", "T"), q, k, v)
        raise
    return result


def lightning_commit(
    k: Tensor,
    v: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    slopes: Tensor,
    accepted: Tensor,
    *,
    path: Tensor | None = None,
    plan: DecodePlan | None = None,
) -> None:
    """Advance the state of each sequence by the first ``accepted`` of its T draft tokens, or of a path among them.

    Args:
        k: [B, T, Hqk, D]; v: [B, T, Hv, E], as given to :func:`lightning_verify`.
        state_pool: [num_slots, H, D, E], as there; updated in place.
        slots: [B] int32 or int64, contiguous; -1 for padding, which writes nothing. No two sequences may share a slot.
        slopes: as there.
        accepted: [B] int32 or int64, contiguous, 0 to T (with ``path`` to P); 0 leaves the state unchanged, bit for
            bit.
        path: of drafts that branch the accepted ones: [B, P] int32 or int64, contiguous, P at most T: the tokens from
            the pool's state on, ascending, of which the first ``accepted`` count.
        plan: a launch plan to use instead of the one made for the device.

    Not differentiable.

    Raises:
        TypeError, ValueError: as for :func:`lightning_decode`. Unchecked, an ``accepted`` outside its bounds counts as
            0, and a token outside 0 to T - 1 as the nearest.
    """
    ints = plan_as_ints(plan, DecodePlan)
    tensors = {"k": k, "v": v, "state_pool": state_pool, "slots": slots, "slopes": slopes, "accepted": accepted}
    try:
        refuse_derivatives(**tensors, path=path)
        if path is None:
            _commit(k, v, state_pool, slots, slopes, accepted, ints)
        else:
            _commit_path(k, v, state_pool, slots, slopes, accepted, path, ints)
    except REFUSALS:
        explain(check_dense, **tensors, **given(path=path))
        raise


def explain(check: Callable[..., object], *given: Any, **named: Any) -> None:
    """Raise our own error instead of torch's, which prints whole arrays."""
    try:
        check(*given, **named)
    except (ValueError, TypeError) as said:
        raise said from None


def _allocate_out(q: Tensor, v: Tensor) -> Tensor:
    """A packed, uninitialised [..., H, E] for q [..., Hqk, D] and v [..., Hv, E]."""
    return q.new_empty((*q.shape[:-2], max(q.shape[-2], v.shape[-2]), v.shape[-1]))


def _initial(has_initial_state: Tensor | bool) -> tuple[Tensor | None, bool]:
    if isinstance(has_initial_state, bool):
        return None, has_initial_state
    if not isinstance(has_initial_state, Tensor):
        fail("has_initial_state", "a bool or a bool tensor [B]", describe(has_initial_state), TypeError)
    return has_initial_state, False


def _parts(snapshot: Snapshots) -> Snapshots:
    if not isinstance(snapshot, Snapshots):
        fail("snapshot", "a lightning_attn.Snapshots or None", describe(snapshot), TypeError)
    for name, tensor in snapshot._asdict().items():
        # None would read as no snapshot at all.
        check_dense(**{f"snapshot.{name}": tensor})
    return snapshot
