"""Gradients on a CPU: each sequence in float32 by kernel_reference's oracle, the layout as a mask of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from blocksparse_attn.gradients.arguments import Inputs, Results
from blocksparse_attn.lists import block_mask
from blocksparse_attn.plan import Problem
from kernel_reference.attention_gradients import attention_gradients
from kernel_reference.blocks import mask_function
from kernel_reference.differentiable import Backward
from kernel_reference.integers import cdiv
from kernel_reference.ragged import clamped_ranges


def backward(problem: Problem, inputs: Inputs, given: Backward, gradients: Results) -> None:
    """Write the gradients; those of rows of no sequence, or of one of impossible lengths, are 0."""
    for x in gradients:
        x.zero_()
    sequences = [(q, k) for q, k in _ranges(problem, inputs) if 0 < q.stop - q.start <= k.stop - k.start]
    longest = max([k.stop - k.start for _, k in sequences], default=0)
    rows, columns = min(problem.rows, cdiv(longest, problem.q_block)), cdiv(longest, problem.k_block)
    visible = mask_function(block_mask(inputs.crow, inputs.col, rows, columns), problem.q_block, problem.k_block)
    # A padded batch as one of packed rows.
    q, k, v, d_out = (x.flatten(0, 1) if problem.padded else x for x in (*inputs[:3], given.d_out))
    d_q, d_k, d_v = (x.flatten(0, 1) if problem.padded else x for x in gradients[:3])
    d_lse = given.d_lse
    if d_lse is not None and problem.padded:
        d_lse = d_lse.transpose(0, 1).flatten(1)
    d_sinks = torch.zeros(problem.num_heads)
    for own, keys in sequences:
        found = attention_gradients(
            q[own], k[keys], v[keys], d_out[own], None if d_lse is None else d_lse[:, own],
            cu_seqlens_q=torch.tensor([0, own.stop - own.start]),
            cu_seqlens_k=torch.tensor([0, keys.stop - keys.start]),
            softmax_scale=problem.softmax_scale, left=problem.left, mask=visible, softcap=problem.softcap,
            sinks=inputs.sinks, compute_dtype=torch.float32,
        )  # fmt: skip
        d_q[own] = found.q.to(d_q.dtype)
        d_k[keys] = found.k.to(d_k.dtype)
        d_v[keys] = found.v.to(d_v.dtype)
        if found.sinks is not None:
            d_sinks = d_sinks + found.sinks
    if inputs.sinks is not None:
        gradients.d_sinks.copy_(d_sinks)


def _ranges(problem: Problem, inputs: Inputs) -> Iterator[tuple[slice, slice]]:
    """Rows of q and of k of each sequence, those of possible bounds."""
    if inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None:
        rows, bounds = clamped_ranges(inputs.cu_seqlens_q, inputs.q.shape[0]), pairwise(inputs.cu_seqlens_k.tolist())
        for (first, last), (begin, end) in zip(rows, bounds, strict=True):
            if 0 <= begin <= end <= inputs.k.shape[0]:
                yield slice(first, last), slice(begin, end)
        return
    length_q, length_k = inputs.q.shape[1], inputs.k.shape[1]
    for i in range(problem.sequences):
        first, last, begin, end = (
            default if bounds is None else int(bounds[i])
            for bounds, default in zip(inputs[9:13], (0, length_q, 0, length_k), strict=True)
        )
        first, last = (min(max(bound, 0), length_q) for bound in (first, last))
        if 0 <= begin <= end <= length_k:
            own = slice(i * length_q + first, i * length_q + max(first, last))
            yield own, slice(i * length_k + begin, i * length_k + end)
