"""What arguments of the ops of gradients must be: those of ``prefill``, and gradients of its results."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernel_reference.checks import check_dtype, check_same_device, check_same_dtype, check_shape, describe, fail
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


class Backward(NamedTuple):
    """What the inputs' gradients come of: results, contiguous, and gradients of them."""

    out: Tensor
    lse: Tensor
    d_out: Tensor
    d_lse: Tensor | None


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
    for name, tensor in (("out", backward.out), ("d_out", backward.d_out)):
        check_shape(name, tensor, (*q.shape[:2], problem.head_dim_v))
        check_same_dtype(name, tensor, "q", q)
    for name, given in (("lse", backward.lse), ("d_lse", backward.d_lse)):
        if given is not None:
            check_shape(name, given, (q.shape[1], q.shape[0]))
            check_dtype(name, given, torch.float32)
    for name, given in backward._asdict().items():
        if given is not None:
            check_same_device(name, given, "q", q)
            if name != "d_out" and not given.is_contiguous():
                fail(name, "contiguous", describe(given))
    return problem
