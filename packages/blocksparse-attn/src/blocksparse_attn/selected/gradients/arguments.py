"""What arguments of the ops of gradients must be: those of ``selected``, and gradients of its results."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from blocksparse_attn.arguments import lse_shape
from blocksparse_attn.selected.arguments import Options, Tensors, check_selected
from blocksparse_attn.selected.plan import Problem
from kernel_reference.checks import fail
from kernel_reference.differentiable import Backward, check_results

Tensor = torch.Tensor


class Inputs(NamedTuple):
    """The tensors of ``selected_attention``, in its order: those of ``selected`` but its results."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    indices: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None


class Results(NamedTuple):
    """``d_sinks`` [0] without sinks."""

    d_q: Tensor
    d_k: Tensor
    d_v: Tensor
    d_sinks: Tensor


def new_results(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out and lse."""
    q = inputs.q
    return q.new_empty((*q.shape[:-1], inputs.v_cache.shape[-1])), q.new_empty(lse_shape(q), dtype=torch.float32)


def new_gradients(inputs: Inputs) -> Results:
    """Contiguous ones."""
    sinks = inputs.q.new_empty(0) if inputs.sinks is None else torch.empty_like(inputs.sinks)
    d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3])
    return Results(d_q, d_k, d_v, sinks)


def check_attention(inputs: Inputs, numbers: tuple[Any, ...]) -> Problem:
    """The problem of ``selected_attention``; raises where its arguments make none that has gradients."""
    problem = check_selected(Tensors(*inputs, *new_results(inputs)), Options(*numbers))
    if inputs.k_cache.dtype != inputs.q.dtype:
        dtype = inputs.q.dtype
        fail("k_cache.dtype", f"{dtype} as that of q is, where gradients are wanted", inputs.k_cache.dtype, TypeError)
    return problem


def check_backward(inputs: Inputs, backward: Backward, numbers: tuple[Any, ...]) -> Problem:
    """The problem of ``selected_attention_backward``."""
    problem = check_attention(inputs, numbers)
    q = inputs.q
    check_results(q, backward, (*q.shape[:-1], problem.head_dim_v), lse_shape(q))
    return problem
