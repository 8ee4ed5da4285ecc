"""Which keys a sparse attention attends to: scores of a lightning indexer and the positions of the highest: the oracle.

DeepSeek-V3.2 scores every earlier token with a few small heads, and attends to those with the highest scores alone
(https://github.com/deepseek-ai/DeepSeek-V3.2-Exp, section 2 of its report).
"""

from __future__ import annotations

import torch

from .checks import as_int, check_shape, check_tensors, describe, fail
from .paging import check_integers


def index_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    *,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Scores of the keys of one sequence: ``scores[t, s] = sum_h weights[t, h] * relu(q[t, h] . k[s])``.

    Args:
        q: [T, H, D]; k: [N, D]; weights: [T, H]; of any dtypes.
        lengths: [T] integers: each token sees so many of the first keys.
        compute_dtype: in which products are made and summed.

    Returns [T, N] of compute_dtype, -inf where a token sees no key. Raises TypeError or ValueError, naming what is bad.
    """
    check_tensors(q=q, k=k, weights=weights, lengths=lengths)
    if q.ndim != 3:
        fail("q", "[T, H, D]", describe(q))
    tokens, heads, dim = q.shape
    if k.ndim != 2 or k.shape[1] != dim:
        fail("k", f"[N, {dim}]", describe(k))
    check_shape("weights", weights, (tokens, heads))
    check_integers("lengths", lengths, (tokens,))
    scores = torch.full((tokens, len(k)), -torch.inf, dtype=compute_dtype, device=q.device)
    keys = k.to(compute_dtype)
    for token, length in enumerate(lengths.tolist()):
        if not 0 <= length <= len(k):
            fail(f"lengths[{token}]", f"from 0 to {len(k)}", length)
        products = (q[token].to(compute_dtype) @ keys[:length].mT).relu()
        scores[token, :length] = weights[token].to(compute_dtype) @ products
    return scores


def top_positions(scores: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    """The positions of the ``k`` highest of the first ``lengths[t]`` scores of each row, in ascending order.

    Of equal scores those at lower positions come first, the two zeros are equal, and NaN is above all.

    Args:
        scores: [T, N], floating.
        lengths: [T] integers from 0 to N.
        k: 1 or more.

    Returns int32 [T, k], with -1 behind the last of a row of fewer. Raises TypeError or ValueError, naming what is bad.
    """
    check_tensors(scores=scores, lengths=lengths)
    if scores.ndim != 2 or not scores.is_floating_point():
        fail("scores", "[T, N], floating", describe(scores))
    if as_int("k", k) < 1:
        fail("k", "at least 1", k)
    tokens, width = scores.shape
    check_integers("lengths", lengths, (tokens,))
    # A GPU's sort has NaN with a sign below all.
    scores = scores.masked_fill(scores.isnan(), torch.nan)
    positions = torch.full((tokens, k), -1, dtype=torch.int32, device=scores.device)
    for token, length in enumerate(lengths.tolist()):
        if not 0 <= length <= width:
            fail(f"lengths[{token}]", f"from 0 to {width}", length)
        order = scores[token, :length].sort(descending=True, stable=True).indices[:k]
        positions[token, : len(order)] = order.sort().values.int()
    return positions
