"""The ops over packed sequences without a pool, and states alone, on a CPU."""

from __future__ import annotations

from typing import Any

import torch

from kernel_reference.checks import values_are_checked
from kernel_reference.ragged import clamped_ranges
from lightning_attn.arguments import check_rates
from lightning_attn.packed import arguments as packed_arguments
from lightning_attn.reference import attend, gradients_of, rates_of
from lightning_attn.tensors import Packed, PackedBackward, State

Tensor = torch.Tensor

# Tokens whose weighted values in float32 are alive at once.
_PIECE = 8192


def new_packed_results(q: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Packed, uninitialised out [T, H, E] and final states [N, H, D, E] for these inputs."""
    return q.new_empty((*q.shape[:2], v.shape[2])), new_packed_states(q, v, cu_seqlens)


def new_packed_states(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Packed, uninitialised states, float32, for k and v packed, or as [b, h, n, d|e]."""
    if cu_seqlens is None:
        size = (*k.shape[:2], k.shape[3], v.shape[3])
    else:
        size = (cu_seqlens.shape[0] - 1, max(k.shape[1], v.shape[1]), k.shape[2], v.shape[2])
    return k.new_empty(size, dtype=torch.float32)


def new_packed_gradients(t: PackedBackward) -> tuple[Tensor, ...]:
    """Packed, uninitialised dq, dk, dv and the gradient of the initial states, [N, H, 0, 0] where that is not made."""
    d_initial = new_packed_states(t.k, t.v, t.cu_seqlens)
    if not t.asks_for_states():
        d_initial = d_initial.new_empty((*d_initial.shape[:2], 0, 0))
    return (*(x.new_empty(tuple(x.shape)) for x in t[:3]), d_initial)


def packed(*given: Any) -> tuple[Tensor, Tensor]:
    """The op ``packed``."""
    t, numbers = Packed(*given[:6]), given[6:]
    problem = packed_arguments.check_packed_attention(t, *numbers)
    if values_are_checked(t.q.device):
        packed_arguments.check_packed_values(t.slopes, t.cu_seqlens, "q", t.q.shape[0])
    out, final = new_packed_results(t.q, t.v, t.cu_seqlens)
    out.zero_()
    for i, (begin, end) in enumerate(clamped_ranges(t.cu_seqlens, t.q.shape[0])):
        rows = slice(begin, end)
        initial = torch.zeros_like(final[i]) if t.initial_state is None else t.initial_state[i]
        final[i] = attend(t.q[rows], t.k[rows], t.v[rows], t.slopes, initial, problem.scale, out[rows])
    return out, final


def packed_backward(*given: Any) -> tuple[Tensor, ...]:
    """The op ``packed_backward``."""
    t, (scale, *plan) = PackedBackward(*given[:8]), given[8:]
    packed_arguments.check_packed_backward(t, scale, *plan)
    if values_are_checked(t.q.device):
        packed_arguments.check_packed_values(t.slopes, t.cu_seqlens, "q", t.q.shape[0])
    d_q, d_k, d_v, d_initial = gradients = new_packed_gradients(t)
    for rows_of in (d_q, d_k, d_v):
        rows_of.zero_()
    for i, (begin, end) in enumerate(clamped_ranges(t.cu_seqlens, t.q.shape[0])):
        rows = slice(begin, end)
        own = (t.q[rows], t.k[rows], t.v[rows], t.d_out[rows])
        initial = None if t.initial_state is None else t.initial_state[i]
        last = None if t.d_final is None else t.d_final[i]
        d_q[rows], d_k[rows], d_v[rows], d_first = gradients_of(*own, t.slopes, initial, last, scale)
        if d_initial.shape[3]:
            d_initial[i] = d_first
    return gradients


def state(*given: Any) -> Tensor:
    """The op ``state``."""
    t, numbers = State(*given[:5]), given[5:]
    problem = packed_arguments.check_state(t, *numbers)
    if t.cu_seqlens is None:
        ranges = [(0, problem.rows)] * problem.sequences
        if values_are_checked(t.k.device):
            check_rates("slopes", t.slopes)
    else:
        ranges = clamped_ranges(t.cu_seqlens, problem.rows)
        if values_are_checked(t.k.device):
            packed_arguments.check_packed_values(t.slopes, t.cu_seqlens, "k", problem.rows)
    final = new_packed_states(t.k, t.v, t.cu_seqlens)
    rates, heads = rates_of(t.slopes).reshape(-1), problem.heads
    for i, (begin, end) in enumerate(ranges):
        if t.cu_seqlens is None:
            k, v = t.k[i].transpose(0, 1), t.v[i].transpose(0, 1)
        else:
            k, v = t.k[begin:end], t.v[begin:end]
        if t.initial_state is None:
            final[i] = 0
        else:
            final[i] = torch.exp(-rates * (end - begin))[:, None, None] * t.initial_state[i]
        for h in range(heads.num_heads):
            rate = float(rates[h])
            k_h, v_h = k[:, h * heads.num_heads_qk // heads.num_heads], v[:, h * heads.num_heads_v // heads.num_heads]
            final[i, h] += _weighted_sum(k_h, v_h, rate, problem.reach, problem.reversed, problem.scale)
    return final


def _weighted_sum(k: Tensor, v: Tensor, rate: float, reach: float, reverse: bool, scale: float) -> Tensor:
    """The state that [n, D] and [n, E] leave in one head, of the tokens in reach of its decay."""
    tokens = k.shape[0]
    in_reach = torch.ceil(torch.tensor(reach) / rate) if rate > 0 else torch.tensor(float("inf"))
    count = min(tokens, int(in_reach.clamp(max=tokens)))
    first = 0 if reverse else tokens - count
    total = torch.zeros(k.shape[1], v.shape[1], dtype=torch.float32, device=k.device)
    for begin in range(first, first + count, _PIECE):
        rows = slice(begin, min(begin + _PIECE, first + count))
        place = torch.arange(rows.start, rows.stop, dtype=torch.float32, device=k.device)
        distance = place + 1 if reverse else tokens - 1 - place
        weighted = v[rows].float() * (scale * torch.exp(-rate * distance))[:, None]
        total += k[rows].float().mT @ weighted
    return total
