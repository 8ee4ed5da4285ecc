"""The ops on a CPU: the recurrence as kernel_reference has it, with the kernels' answers to bad values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kernel_reference import recurrence
from kernel_reference.checks import values_are_checked
from kernel_reference.ragged import clamped_ranges
from lightning_attn import arguments
from lightning_attn.tensors import Attention, AttentionBackward, Commit, Decode, PathCommit, TreeVerify, Varlen
from lightning_attn.trees import arguments as tree_arguments

Tensor = torch.Tensor

# About ten tensors of this many tokens in float32 are alive at once; a multiple of the chunk.
_PIECE = 2048


def new_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Packed, uninitialised out [b, h, n, e] and kv [b, h, 1, d, e] for these inputs."""
    batch, num_heads, tokens, head_qk = q.shape
    kv = q.new_empty((batch, num_heads, 1, head_qk, v.shape[3]), dtype=torch.float32)
    return q.new_empty((batch, num_heads, tokens, v.shape[3])), kv


def new_gradients(t: AttentionBackward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed, uninitialised dq, dk, dv and d_history [b, h, d, e], [b, h, 0, 0] where that is not made."""
    history = (*t.q.shape[:2], *((t.q.shape[3], t.v.shape[3]) if t.asks_for_states() else (0, 0)))
    d_q, d_k, d_v = (tensor.new_empty(tuple(tensor.shape)) for tensor in (t.q, t.k, t.v))
    return d_q, d_k, d_v, t.q.new_empty(history, dtype=torch.float32)


def attention(*given: Any) -> tuple[Tensor, Tensor]:
    """The op ``attention``."""
    t, numbers = Attention(*given[:5]), given[5:]
    problem = arguments.check_attention(t, *numbers)
    _check_rates(t.ed)
    out, kv = new_results(t.q, t.v)
    initial = torch.zeros_like(kv[:, :, 0]) if t.kv_history is None else t.kv_history
    for i in range(problem.sequences):
        q_i, k_i, v_i, out_i = _tokens_first(i, t.q, t.k, t.v, out)
        kv[i, :, 0] = attend(q_i, k_i, v_i, t.ed, initial[i], problem.scale, out_i)
    return out, kv


def attention_backward(*given: Any) -> tuple[Tensor, ...]:
    """The op ``attention_backward``: the gradients as linear attentions of their own.

    With g_t the gradient of out_t, a = exp(-s) and R_t the gradient of the state S_t, through all that comes of it:
    ``R_t = a R_{t+1} + scale q_t g_t^T`` from the last token to the first, with R_n = d_kv / a. Then
    ``dq_t = scale S_t g_t``, ``dk_t = R_t v_t``, ``dv_t = R_t^T k_t`` and ``d_history = a R_0``.
    """
    t, (scale, *plan) = AttentionBackward(*given[:7]), given[7:]
    arguments.check_attention_backward(t, scale, *plan)
    _check_rates(t.ed)
    d_q, d_k, d_v, d_history = gradients = new_gradients(t)
    for i in range(t.q.shape[0]):
        q_i, k_i, v_i, g_i = _tokens_first(i, t.q, t.k, t.v, t.d_out)
        history = None if t.kv_history is None else t.kv_history[i]
        last = None if t.d_kv is None else t.d_kv[i, :, 0]
        found = gradients_of(q_i, k_i, v_i, g_i, t.ed, history, last, scale)
        for whole, part in zip((d_q, d_k, d_v), found, strict=False):
            whole[i] = part.transpose(0, 1)
        if d_history.shape[3]:
            d_history[i] = found[3]
    return gradients


def varlen(*given: Any) -> None:
    """The op ``varlen``."""
    t, (all_have_initial_state, scale, *plan) = Varlen(*given[:11]), given[11:]
    arguments.check_varlen(t, all_have_initial_state, scale, *plan)
    arguments.overlap("varlen", t)(*t)
    if values_are_checked(t.q.device):
        arguments.check_varlen_values(t)
    pool = t.state_pool
    t.out.zero_()
    ranges = clamped_ranges(t.cu_seqlens, t.q.shape[0])
    for i, slot in _in_pool(t.slots, pool):
        begin, end = ranges[i]
        if begin == end:
            continue
        starts_from_pool = all_have_initial_state if t.has_initial_state is None else bool(t.has_initial_state[i])
        state = pool[slot] if starts_from_pool else torch.zeros_like(pool[slot])
        stops = []
        if t.positions is not None and t.snapshot_slots is not None:
            stops = [*zip(t.positions[i].tolist(), t.snapshot_slots[i].tolist(), strict=True)]
        first = begin
        for position, kept_in in [*sorted(stops), (end - begin, slot)]:
            if 1 <= position <= end - begin and 0 <= kept_in < pool.shape[0]:
                rows = slice(first, begin + position)
                state = attend(t.q[rows], t.k[rows], t.v[rows], t.slopes, state, scale, t.out[rows])
                pool[kept_in] = state
                first = begin + position


def decode(*given: Any) -> None:
    """The op ``decode``."""
    t, (scale, *plan) = Decode(*given[:7]), given[7:]
    arguments.check_decode(t, scale, *plan)
    _check_decode("decode", t)
    t.out.zero_()
    for i, slot in _in_pool(t.slots, t.state_pool):
        t.out[i], t.state_pool[slot] = _step(t.q[i], t.k[i], t.v[i], t.slopes, t.state_pool[slot], scale)


def verify(*given: Any) -> None:
    """The op ``verify``."""
    t, (scale, *plan) = Decode(*given[:7]), given[7:]
    arguments.check_verify(t, scale, *plan)
    _check_decode("verify", t)
    t.out.zero_()
    for i, slot in _in_pool(t.slots, t.state_pool):
        state = t.state_pool[slot]
        for token in range(t.q.shape[1]):
            q, k, v = t.q[i, token], t.k[i, token], t.v[i, token]
            t.out[i, token], state = _step(q, k, v, t.slopes, state, scale)


def commit(*given: Any) -> None:
    """The op ``commit``."""
    t, plan = Commit(*given[:6]), given[6:]
    arguments.check_commit(t, *plan)
    _check_decode("commit", t)
    counts = t.accepted.tolist()
    for i, slot in _in_pool(t.slots, t.state_pool):
        if 1 <= counts[i] <= t.k.shape[1]:
            state = t.state_pool[slot]
            for token in range(counts[i]):
                k, v = t.k[i, token], t.v[i, token]
                _, state = _step(k, k, v, t.slopes, state, 1.0)
            t.state_pool[slot] = state


def verify_tree(*given: Any) -> None:
    """The op ``verify_tree``."""
    t, (scale, *plan) = TreeVerify(*given[:8]), given[8:]
    tree_arguments.check_verify_tree(t, scale, *plan)
    _check_tree("verify_tree", t)
    t.out.zero_()
    parents = t.parents.tolist()
    for i, slot in _in_pool(t.slots, t.state_pool):
        states = [t.state_pool[slot]]
        for node, parent in enumerate(parents[i]):
            before = states[parent + 1 if -1 <= parent < node else 0]
            t.out[i, node], after = _step(t.q[i, node], t.k[i, node], t.v[i, node], t.slopes, before, scale)
            states.append(after)


def commit_path(*given: Any) -> None:
    """The op ``commit_path``."""
    t, plan = PathCommit(*given[:7]), given[7:]
    tree_arguments.check_commit_path(t, *plan)
    _check_tree("commit_path", t)
    counts, paths, nodes = t.accepted.tolist(), t.path.tolist(), t.k.shape[1]
    for i, slot in _in_pool(t.slots, t.state_pool):
        if 1 <= counts[i] <= t.path.shape[1]:
            state = t.state_pool[slot]
            for node in paths[i][: counts[i]]:
                row = min(max(node, 0), nodes - 1)
                _, state = _step(t.k[i, row], t.k[i, row], t.v[i, row], t.slopes, state, 1.0)
            t.state_pool[slot] = state


def _check_tree(op: str, t: TreeVerify | PathCommit) -> None:
    arguments.overlap(op, t)(*t)
    if values_are_checked(t.slots.device):
        tree_arguments.check_tree_values(t)


def gradients_of(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, slopes: Tensor, history: Tensor | None, d_last: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv and the gradient of the state before one sequence [n, H, D|E]: see :func:`attention_backward`."""
    tokens, heads, head_qk = q.shape
    zeros = torch.zeros(heads, head_qk, v.shape[2], dtype=torch.float32, device=q.device)
    d_q = torch.empty_like(q)
    attend(d_out, v, k, slopes, (zeros if history is None else history).mT, scale, d_q)
    q, k, v, d_out = (tensor.flip(0) for tensor in (q, k, v, d_out))
    d_k, d_v = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    attend(v, d_out, q, slopes, zeros.mT, scale, d_k)
    d_first = scale * attend(k, q, d_out, slopes, zeros, scale, d_v)
    rates = rates_of(slopes).reshape(-1)
    d_history = torch.exp(-rates)[:, None, None] * d_first
    if d_last is not None:
        # What the final state's gradient brings is added apart: d_last / a, as an initial state, would overflow.
        age = torch.arange(tokens, dtype=torch.float32, device=q.device)
        weight = torch.exp(-age[:, None] * rates)[:, :, None]
        d_k += weight * torch.einsum("nhe,hde->nhd", v.float(), d_last)
        d_v += weight * torch.einsum("nhd,hde->nhe", k.float(), d_last)
        d_history += torch.exp(-rates * tokens)[:, None, None] * d_last
    return d_q, d_k.flip(0), d_v.flip(0), d_history


def _check_rates(ed: Tensor) -> None:
    if values_are_checked(ed.device):
        arguments.check_rates("ed", ed)


def _check_decode(op: str, t: Decode | Commit) -> None:
    arguments.overlap(op, t)(*t)
    if values_are_checked(t.slots.device):
        arguments.check_decode_values(t)


def rates_of(slopes: Tensor) -> Tensor:
    """Decay rates as the kernels take them: one below 0 and NaN count as 0; from 256 on nothing is left in float32."""
    return torch.where(slopes > 0, slopes, 0).clamp(max=256)


def attend(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor, scale: float, out: Tensor | None = None
) -> Tensor:
    """One sequence, q, k [n, Hqk, D], v [n, Hv, E], from state [H, D, E]: its out [n, H, E] and the state after it."""
    state = state.to(torch.float32)
    for first in range(0, q.shape[0], _PIECE):
        piece = slice(first, first + _PIECE)
        result = recurrence.linear_attention_chunked(
            q[piece], k[piece], v[piece], rates_of(slopes), initial_state=state[None], scale=scale,
            compute_dtype=torch.float32,
        )  # fmt: skip
        if out is not None:
            out[piece] = result.out
        state = result.state[0]
    return state


def _tokens_first(i: int, *tensors: Tensor) -> Iterator[Tensor]:
    """Sequence i of each [b, h, n, d] as [n, h, d]: a view."""
    return (tensor[i].transpose(0, 1) for tensor in tensors)


def _in_pool(slots: Tensor, state_pool: Tensor) -> list[tuple[int, int]]:
    """The sequences that are not padding, each with its slot."""
    return [(i, slot) for i, slot in enumerate(slots.tolist()) if 0 <= slot < state_pool.shape[0]]


def _step(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One token of one sequence, [H, D|E]: its output and the state after it, rounded to the dtype of the pool.

    So drafts have the bits of decoding. In float32 the factor exp(-s) would be rounded the same way at every token, and
    over many that shows.
    """
    result = recurrence.linear_attention(
        q[None], k[None], v[None], rates_of(slopes), initial_state=state[None], scale=scale, compute_dtype=torch.float64
    )
    return result.out[0], result.state[0].to(state.dtype)
