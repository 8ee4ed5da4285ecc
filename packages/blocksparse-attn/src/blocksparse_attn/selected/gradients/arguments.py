"""What arguments of the ops of gradients must be: those of ``selected``, and gradients of its results."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from blocksparse_attn.arguments import lse_shape
from blocksparse_attn.gradients.arguments import Results, gradients_for, results_for
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


def new_results(inputs: Inputs) -> tuple[Tensor, Tensor]:
    return results_for(inputs.q, inputs.v_cache)


def new_gradients(inputs: Inputs) -> Results:
    return gradients_for(inputs.q, inputs.k_cache, inputs.v_cache, inputs.sinks)


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
