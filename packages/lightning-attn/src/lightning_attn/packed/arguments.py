"""What arguments.py does, for the ops over packed sequences without a pool and for states alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kernel_reference.checks import check_float, check_same_device, check_same_dtype, check_shape, describe, fail, known
from kernel_reference.plans import check_covers
from kernel_reference.ragged import check_cu_seqlens, read_integers
from lightning_attn.arguments import (
    Ints,
    bits_of_rates,
    check_bits_of_rates,
    check_heads,
    check_indices,
    check_like_first,
    check_matrices,
    check_packed,
    check_prefill_plan,
    check_slopes,
    if_transposed,
    of_dense,
    of_rows,
    strides_of_new,
    transposed,
)
from lightning_attn.packed.plan import StatePlan, StateProblem
from lightning_attn.plan import BackwardProblem, Heads, Operand, PrefillProblem
from lightning_attn.tensors import Packed, PackedBackward, State

Tensor = torch.Tensor

# A token that far back has a weight of 4e-11, which float32 does not see beside 1.
REACH = 24.0


def check_packed_attention(t: Packed, scale: float, plan: Ints = None) -> PrefillProblem:
    """Packed sequences and the states before them."""
    check_float("scale", scale)
    heads = check_packed(("T",), t.q, t.k, t.v)
    if heads.num_heads_qk != heads.num_heads_v:
        fail("v", f"of {heads.num_heads_qk} heads as q is (repeat the others')", f"{heads.num_heads_v} heads")
    check_slopes("slopes", t.slopes, heads.num_heads, "q", t.q, "[T, H, D]")
    states = _check_sequences(t.cu_seqlens, t.initial_state, heads, "q", t.q)
    check_prefill_plan(plan, heads, t.q.dtype)
    rows = t.q.shape[0]
    return PrefillProblem(
        heads, of_rows(t.q), of_rows(t.k), of_rows(t.v),
        _packed_or_new(t.out, (rows, heads.num_heads, heads.head_v)),
        None if t.initial_state is None else t.initial_state.stride(), strides_of_new(states), rows, states[0],
        states[0], scale, str(t.q.dtype).removeprefix("torch."), ragged=True,
    )  # fmt: skip


def check_packed_backward(t: PackedBackward, scale: float, plan: Ints = None) -> BackwardProblem:
    """Their gradients: three prefills, as ``arguments.check_attention_backward`` says."""
    forward = check_packed_attention(Packed(*t[:6]), scale, plan)
    heads = forward.heads
    check_shape("d_out", t.d_out, (forward.rows, heads.num_heads, heads.head_v))
    check_same_device("d_out", t.d_out, "q", t.q)
    check_same_dtype("d_out", t.d_out, "q", t.q)
    states = (forward.sequences, heads.num_heads, heads.head_qk, heads.head_v)
    if t.d_final is not None:
        check_matrices("d_final_state", t.d_final, states, "q", t.q)
    d_q, d_k, d_v = (
        _packed_or_new(new, like.shape) for new, like in ((t.d_q, t.q), (t.d_k, t.k), (t.d_v, t.v))
    )  # fmt: skip
    d_out, last = of_rows(t.d_out), None if t.d_final is None else t.d_final.stride()
    dq = replace(
        forward, heads=Heads(heads.num_heads, heads.num_heads, heads.head_v, heads.head_qk), q=d_out, k=forward.v,
        v=forward.k, o=d_q, initial=transposed(forward.initial), final=None, is_gradient=True,
    )  # fmt: skip
    dk = replace(dq, q=forward.v, k=d_out, v=forward.q, o=d_k, initial=transposed(last), reversed=True)
    first = strides_of_new(states) if t.asks_for_states() else None
    dv = replace(dk, heads=heads, q=forward.k, k=forward.q, v=d_out, o=d_v, initial=last, final=first)
    return BackwardProblem(dq, dk, dv)


def check_state(t: State, scale: float, exact: bool, reverse: bool, plan: Ints = None) -> StateProblem:
    """Keys and values alone: packed sequences or, without cu_seqlens, a batch [b, h, n, d] of one length."""
    check_float("scale", scale)
    if t.cu_seqlens is not None:
        heads = check_packed(("T",), None, t.k, t.v)
        check_slopes("slopes", t.slopes, heads.num_heads, "k", t.k, "[T, H, D]")
        states = _check_sequences(t.cu_seqlens, t.initial_state, heads, "k", t.k)
        rows, k, v = t.k.shape[0], of_rows(t.k), of_rows(t.v)
    else:
        for name, tensor, tail in (("k", t.k, "d"), ("v", t.v, "e")):
            if tensor.ndim != 4:
                fail(name, f"[b, h, n, {tail}]", describe(tensor))
            check_like_first(name, tensor, "k", t.k)
        check_shape("v", t.v, (*t.k.shape[:3], t.v.shape[3]))
        num_heads, rows = t.k.shape[1:3]
        heads = check_heads("k", num_heads, num_heads, t.k.shape[3], t.v.shape[3])
        check_slopes("slopes", t.slopes, num_heads, "k", t.k, "[b, h, n, d]")
        states = (t.k.shape[0], num_heads, heads.head_qk, heads.head_v)
        if t.initial_state is not None:
            check_matrices("initial_state", t.initial_state, states, "k", t.k)
        k, v = of_dense(t.k), of_dense(t.v)
    check_covers(StatePlan.from_ints(plan), heads)
    return StateProblem(
        heads, k, v, None if t.initial_state is None else t.initial_state.stride(), strides_of_new(states), rows,
        states[0], scale, math.inf if exact else REACH, t.k.dtype == torch.float32,
        t.cu_seqlens is not None, reverse,
    )  # fmt: skip


def check_packed_values(slopes: Tensor, cu_seqlens: Tensor, of: str, rows: int) -> None:
    """Decay rates and bounds of sequences."""
    found = read_integers({"slopes": bits_of_rates(slopes), "cu_seqlens": cu_seqlens})
    check_bits_of_rates("slopes", found["slopes"])
    check_cu_seqlens("cu_seqlens", found["cu_seqlens"], rows, of)


def _check_sequences(
    cu_seqlens: Tensor, initial_state: Tensor | None, heads: Heads, as_in: str, first: Tensor
) -> tuple[int, int, int, int]:
    """The bounds of packed sequences and, if any, the states before them; the shape of the states."""
    if cu_seqlens.ndim != 1 or known(cu_seqlens.shape[0] < 1):
        fail("cu_seqlens", "[N + 1]", describe(cu_seqlens))
    check_indices("cu_seqlens", cu_seqlens, tuple(cu_seqlens.shape), as_in, first)
    states = (cu_seqlens.shape[0] - 1, heads.num_heads, heads.head_qk, heads.head_v)
    if initial_state is not None:
        hint = if_transposed("initial_state", initial_state, states)
        check_matrices("initial_state", initial_state, states, as_in, first, hint)
    return states


def _packed_or_new(tensor: Any, shape: Sequence[int]) -> Operand:
    """Of a tensor [rows, heads, elements]; where the op allocates it, of a packed one."""
    if tensor is not None:
        return of_rows(tensor)
    (n, h, d), (s_n, s_h, s_d) = shape, strides_of_new(shape)
    return Operand((1, n, h, d), (0, s_n, s_h, s_d))
