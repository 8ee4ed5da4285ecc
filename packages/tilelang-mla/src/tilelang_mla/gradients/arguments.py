"""What arguments of the ops of gradients must be: those of ``prefill``, and gradients of its results."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernel_reference.differentiable import Backward, check_results
from tilelang_mla.arguments import PrefillOptions, PrefillTensors, check_prefill
from tilelang_mla.plan import PrefillPlan, PrefillProblem

Tensor = torch.Tensor


class Inputs(NamedTuple):
    """The tensors of ``attention``, in its order."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


class Gradients(NamedTuple):
    """Of q, k and v."""

    d_q: Tensor
    d_k: Tensor
    d_v: Tensor


def new_results(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out and lse."""
    q = inputs.q
    return q.new_empty((*q.shape[:2], inputs.v.shape[2])), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def new_gradients(inputs: Inputs) -> Gradients:
    """Contiguous ones."""
    return Gradients(*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3]))


def check_attention(inputs: Inputs, numbers: tuple[Any, ...]) -> tuple[PrefillProblem, PrefillPlan | None]:
    """The problem of ``attention``; raises where its arguments make none."""
    return check_prefill(PrefillTensors(*inputs, *new_results(inputs)), PrefillOptions(*numbers))


def check_backward(inputs: Inputs, backward: Backward, numbers: tuple[Any, ...]) -> PrefillProblem:
    """The problem of ``attention_backward``."""
    problem, _ = check_attention(inputs, numbers)
    q = inputs.q
    check_results(q, backward, (*q.shape[:2], problem.head_dim_v), (q.shape[1], q.shape[0]))
    return problem
