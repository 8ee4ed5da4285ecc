"""Gradients on a CPU: each sequence in float32 by kernel_reference's oracle."""

from __future__ import annotations

from itertools import pairwise

import torch

from kernel_reference.attention_gradients import attention_gradients
from kernel_reference.differentiable import Backward
from kernel_reference.ragged import clamped_ranges
from tilelang_mla.gradients.arguments import Gradients, Inputs
from tilelang_mla.plan import PrefillProblem


def backward(problem: PrefillProblem, inputs: Inputs, given: Backward, gradients: Gradients) -> None:
    """Write the gradients; those of rows of no sequence, or of one of impossible bounds, are 0."""
    for x in gradients:
        x.zero_()
    ranges = clamped_ranges(inputs.cu_seqlens_q, problem.tokens)
    for (begin, end), (first, last) in zip(ranges, pairwise(inputs.cu_seqlens_k.tolist()), strict=True):
        if not (begin < end and 0 <= first < last <= problem.tokens_k):
            continue
        # Those before see no key.
        begin = max(begin, end - (last - first)) if problem.causal else begin
        own, keys = slice(begin, end), slice(first, last)
        found = attention_gradients(
            inputs.q[own], inputs.k[keys], inputs.v[keys], given.d_out[own],
            None if given.d_lse is None else given.d_lse[:, own], cu_seqlens_q=torch.tensor([0, end - begin]),
            cu_seqlens_k=torch.tensor([0, last - first]), causal=problem.causal, softmax_scale=problem.softmax_scale,
            compute_dtype=torch.float32,
        )  # fmt: skip
        gradients.d_q[own] = found.q.to(gradients.d_q.dtype)
        gradients.d_k[keys] = found.k.to(gradients.d_k.dtype)
        gradients.d_v[keys] = found.v.to(gradients.d_v.dtype)
