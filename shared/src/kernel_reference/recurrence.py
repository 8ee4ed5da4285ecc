"""Linear attention with a per-head decay: token by token, which is its definition, and in chunks, which is quicker.

For each head with decay rate s >= 0: ``S_t = exp(-s) S_{t-1} + k_t v_t^T`` and ``o_t = scale * S_t^T q_t``, S being
[D, E]. Source: Lightning Attention-2 (arXiv 2401.04658) and MiniMax-01 (arXiv 2501.08313).

Both forms carry a state from one call to the next, so decoding is a call with sequences of one token; checking T draft
tokens is a call whose final state is dropped, and :func:`commit` advances the state by those accepted.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from .checks import as_int, check_tensors, fail, values_are_checked
from .paging import check_integers, sequence_ranges


class RecurrenceResult(NamedTuple):
    """``out`` [T, H, E] and the final ``state`` [B, H, D, E]."""

    out: torch.Tensor
    state: torch.Tensor


class _Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slopes: torch.Tensor
    state: torch.Tensor
    ranges: list[tuple[int, int]]


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    dtype: torch.dtype,
) -> _Inputs:
    """Check, convert to ``dtype`` and repeat the heads so that q, k and v have as many."""
    check_tensors(q=q, k=k, v=v, slopes=slopes)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("slopes", slopes)):
        if not tensor.dtype.is_floating_point:
            fail(name, "of a floating-point dtype", tensor.dtype, TypeError)
        if tensor.device != q.device:
            fail(name, f"on {q.device}", tensor.device)
    if not dtype.is_floating_point:
        fail("compute_dtype", "a floating-point dtype", dtype, TypeError)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 3:
            fail(name, "3-D [T, heads, elements]", f"{tensor.ndim}-D")
        if tensor.shape[0] != q.shape[0]:
            fail(name, f"of {q.shape[0]} tokens, as q", tensor.shape[0])
    if k.shape[2] != q.shape[2]:
        fail("k", f"of head size {q.shape[2]}, as q", k.shape[2])
    heads = max(q.shape[1], k.shape[1], v.shape[1])
    repeated = []
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape[1] == 0 or heads % tensor.shape[1]:
            fail(name, f"of heads that divide {heads}", tensor.shape[1])
        ratio = heads // tensor.shape[1]
        repeated.append(tensor.to(dtype) if ratio == 1 else tensor.to(dtype).repeat_interleave(ratio, dim=1))
    if slopes.numel() != heads:
        fail("slopes", f"of {heads} elements, one for each head", slopes.numel())
    if values_are_checked(slopes.device) and not bool((slopes >= 0).all()):
        fail("slopes", "0 or more", float(slopes.min()))
    ranges = sequence_ranges("cu_seqlens", cu_seqlens, q.shape[0])
    shape = (len(ranges), heads, q.shape[2], v.shape[2])
    if initial_state is not None:
        check_tensors(initial_state=initial_state)
    if initial_state is None:
        state = torch.zeros(shape, dtype=dtype, device=q.device)
    elif initial_state.shape != shape:
        fail("initial_state", f"of shape {list(shape)}", list(initial_state.shape))
    elif initial_state.device != q.device:
        fail("initial_state", f"on {q.device}", initial_state.device)
    else:
        state = initial_state.to(dtype)
    q, k, v = repeated
    return _Inputs(q, k, v, slopes.reshape(heads).to(dtype), state, ranges)


def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    scale: float = 1.0,
    compute_dtype: torch.dtype = torch.float64,
) -> RecurrenceResult:
    """The recurrence, token by token; all sequences advance together, so the time is that of the longest.

    Args:
        q, k, v: packed [T, Hq, D], [T, Hk, D], [T, Hv, E], any float dtype and strides. With H the most heads of the
            three, the others repeat theirs: head h of H reads head ``h // (H / own)``.
        slopes: H decay rates s >= 0, of any shape.
        cu_seqlens: [B + 1] int32 or int64; one sequence without it. Sequences may be empty.
        initial_state: [B, H, D, E]; zeros without it; not modified.
        scale: of the outputs.
        compute_dtype: of every step and both results, inputs being converted first.

    Returns out [T, H, E], 0 in rows of no sequence, and the final state [B, H, D, E]. Differentiable in all tensors.
    Raises TypeError or ValueError, naming the argument, for dtypes, shapes and devices that do not fit.
    """
    q, k, v, slopes, state, ranges = _prepare(q, k, v, slopes, cu_seqlens, initial_state, compute_dtype)
    decay = torch.exp(-slopes)[:, None, None]
    begins = torch.tensor([begin for begin, _ in ranges], dtype=torch.int64, device=q.device)
    lengths = torch.tensor([end - begin for begin, end in ranges], dtype=torch.int64, device=q.device)
    rows, outs = [], []
    for t in range(max((end - begin for begin, end in ranges), default=0)):
        alive = torch.nonzero(lengths > t)[:, 0]
        row = begins[alive] + t
        advanced = decay * state[alive] + k[row][..., :, None] * v[row][..., None, :]
        state = advanced if len(alive) == len(ranges) else state.index_copy(0, alive, advanced)
        rows.append(row)
        outs.append(scale * torch.einsum("bhde,bhd->bhe", advanced, q[row]))
    out = v.new_zeros(v.shape)
    if rows:
        out = out.index_copy(0, torch.cat(rows), torch.cat(outs))
    return RecurrenceResult(out, state)


def linear_attention_chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    scale: float = 1.0,
    chunk_size: int = 64,
    compute_dtype: torch.dtype = torch.float64,
) -> RecurrenceResult:
    """What :func:`linear_attention` gives, by matrix products over chunks of ``chunk_size`` tokens.

    With i and j the 0-based positions in a chunk: token i sees token j <= i with weight ``exp(-s (i - j))``, and the
    state before the chunk with ``exp(-s (i + 1))``; token j enters the new state with ``exp(-s (last - j))``, and the
    old one decays by ``exp(-s (last + 1))``. No exponent is above 0, so nothing overflows. Arguments, results and
    errors are the same.
    """
    if as_int("chunk_size", chunk_size) < 1:
        fail("chunk_size", "at least 1", chunk_size)
    q, k, v, slopes, state, ranges = _prepare(q, k, v, slopes, cu_seqlens, initial_state, compute_dtype)
    s = slopes[:, None, None]

    @cache
    def weights(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Those in a chunk of so many tokens, of the state before it, and into the one after; what that decays by."""
        position = torch.arange(tokens, dtype=compute_dtype, device=q.device)
        distance = position[:, None] - position
        inside = torch.where(distance >= 0, torch.exp(-s * distance.clamp(min=0)), 0)
        before, entering = torch.exp(-s * (position[:, None] + 1)), torch.exp(-s * (position[-1] - position)[:, None])
        return inside, before, entering, torch.exp(-s * (position[-1] + 1))

    pieces, rows, finals = [], [], []
    for sequence, (begin, end) in enumerate(ranges):
        carried = state[sequence]
        for first in range(begin, end, chunk_size):
            chunk = slice(first, min(first + chunk_size, end))
            # [H, C, D] and [H, C, E]
            qc, kc, vc = q[chunk].transpose(0, 1), k[chunk].transpose(0, 1), v[chunk].transpose(0, 1)
            inside, before, entering, decay = weights(qc.shape[1])
            pieces.append(scale * ((inside * (qc @ kc.mT)) @ vc + before * (qc @ carried)).transpose(0, 1))
            rows.append(torch.arange(chunk.start, chunk.stop, device=q.device))
            carried = decay * carried + (entering * kc).mT @ vc
        finals.append(carried)
    out = v.new_zeros(v.shape)
    if rows:
        out = out.index_copy(0, torch.cat(rows), torch.cat(pieces))
    return RecurrenceResult(out, torch.stack(finals) if finals else state)


def commit(
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    slopes: torch.Tensor,
    accepted: torch.Tensor,
    *,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The state after the first ``accepted[b]`` of T draft tokens of each sequence; 0 leaves it as it was, bit for bit.

    Args:
        k, v: [B, T, Hk, D] and [B, T, Hv, E].
        state: [B, H, D, E], not modified; H the greater of Hk and Hv.
        slopes: H decay rates.
        accepted: [B] int32 or int64, from 0 to T.

    Returns [B, H, D, E] in ``compute_dtype``. Raises TypeError or ValueError for dtypes and shapes that do not fit.
    """
    check_tensors(k=k, v=v, state=state, slopes=slopes)
    if k.ndim != 4:
        fail("k", "4-D [B, T, Hk, D]", f"{k.ndim}-D")
    if v.ndim != 4 or v.shape[:2] != k.shape[:2]:
        fail("v", f"of shape [{k.shape[0]}, {k.shape[1]}, Hv, E]", list(v.shape))
    batch, drafts = k.shape[:2]
    check_integers("accepted", accepted, (batch,))
    possible = (accepted >= 0) & (accepted <= drafts)
    if values_are_checked(accepted.device) and not bool(possible.all()):
        fail("accepted", f"from 0 to {drafts}", accepted.tolist())
    counts = torch.where(possible, accepted, 0).to(k.device)
    taken = torch.arange(drafts, device=k.device) < counts[:, None]
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    keys = k[taken]
    return linear_attention(
        keys, keys, v[taken], slopes, cu_seqlens=ends, initial_state=state, compute_dtype=compute_dtype
    ).state
