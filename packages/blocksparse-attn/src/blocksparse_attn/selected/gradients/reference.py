"""Gradients of selected attention on a CPU: kernel_reference's oracle in float32, one sequence at a time."""

from __future__ import annotations

import torch

from blocksparse_attn.gradients.arguments import Results
from blocksparse_attn.selected.gradients.arguments import Inputs
from blocksparse_attn.selected.plan import Problem
from kernel_reference.checks import validate_values
from kernel_reference.differentiable import Backward
from kernel_reference.ragged import clamped_ranges
from kernel_reference.selection import selected_attention_gradients


def backward(problem: Problem, inputs: Inputs, given: Backward, gradients: Results) -> None:
    """Write the gradients; sequences of impossible lengths have none."""
    q, k, v, indices, block_table, _, seqlens_k, sinks = inputs[:8]
    gradients.d_q.zero_()
    d_k, d_v, d_sinks = (torch.zeros(x.shape) for x in gradients[1:])
    scales = [
        factor if scale is None else scale * factor
        for scale, factor in ((inputs.k_scale, problem.k_factor), (inputs.v_scale, problem.v_factor))
    ]
    if not len(k):
        # No page exists, and one that does not exist reads as zeros.
        k, v = k.new_zeros(1, *k.shape[1:]), v.new_zeros(1, *v.shape[1:])
        block_table = block_table * 0 - 1
    ranges = clamped_ranges(inputs.cu_seqlens_q, problem.tokens)
    for i, ((begin, end), total) in enumerate(zip(ranges, seqlens_k.tolist(), strict=True)):
        if begin == end or not end - begin <= total <= problem.capacity:
            continue
        rows = slice(begin, end)
        with validate_values(False):
            found = selected_attention_gradients(
                q[rows], k, v, indices[rows], given.d_out[rows], None if given.d_lse is None else given.d_lse[:, rows],
                block_size=problem.block_size, block_table=block_table[i : i + 1],
                cu_seqlens_q=torch.tensor([0, end - begin]), seqlens_k=seqlens_k[i : i + 1],
                page_layout=problem.page_layout, causal=problem.causal, softmax_scale=problem.softmax_scale,
                sinks=sinks, k_scale=scales[0], v_scale=scales[1], compute_dtype=torch.float32,
            )  # fmt: skip
        gradients.d_q[rows] = found.q.to(q.dtype)
        d_k += found.k[: len(d_k)]
        d_v += found.v[: len(d_v)]
        if found.sinks is not None:
            d_sinks += found.sinks
    for written, exact in zip(gradients[1:], (d_k, d_v, d_sinks), strict=True):
        written.copy_(exact)
