"""The CPU implementation of selected attention: kernel_reference's oracle in float32."""

from __future__ import annotations

import torch

from blocksparse_attn.selected.arguments import Tensors
from blocksparse_attn.selected.plan import Problem
from kernel_reference.checks import validate_values
from kernel_reference.ragged import clamped_ranges
from kernel_reference.selection import selected_attention


def attend(problem: Problem, tensors: Tensors) -> None:
    """Write ``out``, and ``lse`` if there is one; sequences of impossible lengths are 0 and -inf."""
    q, k, v, indices, block_table, _, seqlens_k, sinks = tensors[:8]
    ranges = clamped_ranges(tensors.cu_seqlens_q, problem.tokens)
    tensors.out.zero_()
    if tensors.lse is not None:
        tensors.lse.fill_(-torch.inf)
    if not len(k):
        # No page exists, and one that does not exist reads as zeros.
        k, v = k.new_zeros(1, *k.shape[1:]), v.new_zeros(1, *v.shape[1:])
        block_table = block_table * 0 - 1
    scales = [
        factor if scale is None else scale * factor
        for scale, factor in ((tensors.k_scale, problem.k_factor), (tensors.v_scale, problem.v_factor))
    ]
    for i, ((begin, end), total) in enumerate(zip(ranges, seqlens_k.tolist(), strict=True)):
        if begin == end or not end - begin <= total <= problem.capacity:
            continue
        rows = slice(begin, end)
        with validate_values(False):
            result = selected_attention(
                q[rows], k, v, indices[rows], block_size=problem.block_size, block_table=block_table[i : i + 1],
                cu_seqlens_q=torch.tensor([0, end - begin]), seqlens_k=seqlens_k[i : i + 1],
                page_layout=problem.page_layout, causal=problem.causal, softmax_scale=problem.softmax_scale,
                sinks=sinks, k_scale=scales[0], v_scale=scales[1], compute_dtype=torch.float32,
            )  # fmt: skip
        tensors.out[rows].copy_(result.out)
        if tensors.lse is not None:
            tensors.lse[:, rows].copy_(result.lse)
