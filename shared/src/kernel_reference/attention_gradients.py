"""Gradients of softmax attention by their formulas, in float64 by default: the oracle of backward kernels.

A kv head's query heads and a block of rows are computed at a time.

With weights ``p = exp(score - lse)``, ``delta = sum(d_out * out) - d_lse`` and ``d_p = d_out v^T`` the gradient of a
score is ``p (d_p - delta)``. Source: FlashAttention-2 (arXiv 2307.08691), section 3.1.2; that of lse, and of a sink,
whose weight has no value, follow in the same way.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch

from .attention import MaskFunction
from .checks import check_float, check_tensors, fail
from .paging import sequence_ranges

Tensor = torch.Tensor

_ROWS_AT_ONCE = 256


class AttentionGradients(NamedTuple):
    """Of q, k and v, in their shapes, and of the sinks [Hq], or None without sinks."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None


class _Chunk(NamedTuple):
    """The gradients of some rows [G, R, D], of the keys and values they see [K, D], [K, Dv], and of sinks [G]."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None


def attention_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = True,
    softmax_scale: float | None = None,
    left: int = -1,
    mask: MaskFunction | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    compute_dtype: torch.dtype = torch.float64,
) -> AttentionGradients:
    """What a loss with the gradients d_out and d_lse of :func:`.attention.attention`'s results has for gradients.

    The arguments are those of that function, but causal by default: q [T, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv],
    packed; d_out [T, Hq, Dv]; d_lse [Hq, T], zeros without it; left: of the window, -1 without one. Results are in
    ``compute_dtype``. Of rows of no sequence they are 0, and what no row sees contaminates nothing. Raises ValueError
    for shapes that differ.

    >>> q, k, v, d_out = torch.randn(4, 5, 2, 16)
    >>> cu = torch.tensor([0, 5])
    >>> attention_gradients(q, k, v, d_out, cu_seqlens_q=cu, cu_seqlens_k=cu).k.shape
    torch.Size([5, 2, 16])
    """
    check_tensors(q=q, k=k, v=v, d_out=d_out)
    check_float("softcap", softcap)
    if d_out.shape != (*q.shape[:2], v.shape[2]):
        fail("d_out", f"of shape {[*q.shape[:2], v.shape[2]]}", list(d_out.shape))
    if d_lse is not None and d_lse.shape != (q.shape[1], q.shape[0]):
        fail("d_lse", f"of shape {[q.shape[1], q.shape[0]]}", list(d_lse.shape))
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    group = q.shape[1] // k.shape[1]
    d_q, d_k, d_v = (x.new_zeros(x.shape, dtype=compute_dtype) for x in (q, k, v))
    d_sinks = None if sinks is None else sinks.new_zeros(sinks.shape, dtype=compute_dtype)
    ranges = zip(
        sequence_ranges("cu_seqlens_q", cu_seqlens_q, q.shape[0]),
        sequence_ranges("cu_seqlens_k", cu_seqlens_k, k.shape[0]),
        strict=True,
    )
    for sequence, ((q_begin, q_end), (k_begin, k_end)) in enumerate(ranges):
        keys = slice(k_begin, k_end)
        k_position = torch.arange(k_end - k_begin, device=q.device)
        for head_kv, first in product(range(k.shape[1]), range(q_begin, q_end, _ROWS_AT_ONCE)):
            rows = slice(first, min(first + _ROWS_AT_ONCE, q_end))
            heads = slice(head_kv * group, (head_kv + 1) * group)
            position = torch.arange(rows.start, rows.stop, device=q.device)[:, None] - q_end + len(k_position)
            visible = (k_position <= (position if causal else len(k_position)))[None].expand(group, len(position), -1)
            if left >= 0:
                visible = visible & (k_position >= position - left)
            if mask is not None:
                head = torch.arange(heads.start, heads.stop, device=q.device)[:, None, None]
                visible = visible & mask(torch.tensor(sequence, device=q.device), head, position, k_position)
            own_q, own_d_out = (x[rows, heads].transpose(0, 1).to(compute_dtype) for x in (q, d_out))
            own_k, own_v = (x[keys, head_kv].to(compute_dtype) for x in (k, v))
            found = _of_chunk(
                own_q, own_d_out, None if d_lse is None else d_lse[heads, rows].to(compute_dtype), own_k, own_v,
                visible, scale, softcap, None if sinks is None else sinks[heads].to(compute_dtype),
            )  # fmt: skip
            d_q[rows, heads] = found.q.transpose(0, 1)
            d_k[keys, head_kv] += found.k
            d_v[keys, head_kv] += found.v
            if d_sinks is not None and found.sinks is not None:
                d_sinks[heads] += found.sinks
    return AttentionGradients(d_q, d_k, d_v, d_sinks)


def _of_chunk(
    q: Tensor, d_out: Tensor, d_lse: Tensor | None, k: Tensor, v: Tensor, visible: Tensor, scale: float,
    softcap: float, sinks: Tensor | None,
) -> _Chunk:  # fmt: skip
    """q [G, R, D], d_out [G, R, Dv], d_lse [G, R], k [K, D], v [K, Dv], visible [G, R, K], sinks [G]."""
    # Products with zero would keep the NaN of what nothing sees.
    k, v = (torch.where(visible.any((0, 1))[:, None], x, 0) for x in (k, v))
    scores, slope = scale * (q @ k.T), None
    if softcap:
        capped = torch.tanh(scores / softcap)
        scores, slope = softcap * capped, 1 - capped**2
    scores = scores.masked_fill(~visible, -torch.inf)
    denominator = scores if sinks is None else torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:2], 1)], 2)
    lse = denominator.logsumexp(2) if denominator.shape[2] else scores.new_full(scores.shape[:2], -torch.inf)
    finite = lse.masked_fill(lse == -torch.inf, 0)
    weights = torch.exp(scores - finite[..., None])
    delta = (d_out * (weights @ v)).sum(2)
    if d_lse is not None:
        delta = delta - d_lse
    d_scores = torch.where(visible, weights * (d_out @ v.T - delta[..., None]), 0)
    if slope is not None:
        d_scores = torch.where(visible, d_scores * slope, 0)
    return _Chunk(
        scale * (d_scores @ k), scale * torch.einsum("grk,grd->kd", d_scores, q),
        torch.einsum("grk,grd->kd", weights, d_out),
        None if sinks is None else -(torch.exp(sinks[:, None] - finite) * delta).sum(1),
    )  # fmt: skip
