"""What arguments of the ops of gradients must be: those of ``attend``, and gradients of its results."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from blocksparse_attn.arguments import Options, Tensors, check_attend, lse_shape
from blocksparse_attn.lists import check_lists, reach
from blocksparse_attn.plan import Problem
from kernel_reference.checks import describe, fail
from kernel_reference.differentiable import Backward, check_results

Tensor = torch.Tensor


class Inputs(NamedTuple):
    """The tensors of ``attention``, in its order; crow_t and col_t are the transposed layout's lists."""

    q: Tensor
    k: Tensor
    v: Tensor
    crow: Tensor
    col: Tensor
    crow_t: Tensor
    col_t: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    q_starts: Tensor | None
    q_ends: Tensor | None
    k_starts: Tensor | None
    k_ends: Tensor | None
    sinks: Tensor | None

    def attending(self, out: Tensor, lse: Tensor) -> Tensors:
        """As tensors of ``attend``."""
        return Tensors(
            self.q, self.k, self.v, self.crow, self.col, self.cu_seqlens_q, self.cu_seqlens_k, None, None,
            self.q_starts, self.q_ends, self.k_starts, self.k_ends, self.sinks, out, lse,
        )  # fmt: skip


class Results(NamedTuple):
    """``d_sinks`` [0] without sinks."""

    d_q: Tensor
    d_k: Tensor
    d_v: Tensor
    d_sinks: Tensor


def results_for(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse."""
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(lse_shape(q), dtype=torch.float32)


def gradients_for(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Results:
    """Contiguous ones."""
    d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return Results(d_q, d_k, d_v, q.new_empty(0) if sinks is None else torch.empty_like(sinks))


def new_results(inputs: Inputs) -> tuple[Tensor, Tensor]:
    return results_for(inputs.q, inputs.v)


def new_gradients(inputs: Inputs) -> Results:
    return gradients_for(inputs.q, inputs.k, inputs.v, inputs.sinks)


def options_of(numbers: tuple[Any, ...]) -> Options:
    """max_seqlen_q, q_block, k_block, softmax_scale, left, right, softcap, and what the forward pass alone has."""
    before, scoring, more = numbers[:3], numbers[3:7], numbers[7:] or (0,)
    return Options(*before, "NHD", *scoring, *more)  # type: ignore[call-arg]


def check_attention(inputs: Inputs, numbers: tuple[Any, ...]) -> Problem:
    """The problem of ``attention``; raises where its arguments make none."""
    options = options_of(numbers)
    problem = check_attend(inputs.attending(*new_results(inputs)), options)
    heads, columns = check_lists(inputs.crow_t, inputs.col_t)
    wanted = reach(problem.rows, problem.q_block, problem.k_block)
    if (heads, columns) != (problem.layouts, wanted):
        fail("crow_t", f"of {problem.layouts} heads and {wanted} columns", describe(inputs.crow_t))
    return problem


def check_backward(inputs: Inputs, backward: Backward, numbers: tuple[Any, ...]) -> Problem:
    """The problem of ``attention_backward``."""
    problem = check_attention(inputs, numbers)
    q = inputs.q
    check_results(q, backward, (*q.shape[:-1], problem.head_dim_v), lse_shape(q))
    return problem
