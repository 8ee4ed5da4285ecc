"""Launches of gradients: delta, then the gradients of k and v, then that of q; see ``..launch``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernel_reference.checks import fail
from kernel_reference.differentiable import Backward
from kernel_reference.launching import on_device
from tilelang_mla.forms import form_of
from tilelang_mla.gradients.arguments import Inputs
from tilelang_mla.gradients.plan import MOST_COLUMNS, BackwardPlan, plan_backward
from tilelang_mla.launch import LOG2_E, ZERO_SCALE, check_aligned, device_limits, kernels
from tilelang_mla.plan import PrefillProblem

Tensor = torch.Tensor


def keys_constants(problem: PrefillProblem, plan: BackwardPlan, dtype: torch.dtype) -> dict[str, Any]:
    """What the kernel of keys is compiled for."""
    return {
        "head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v, "dtype": dtype, "block_m": plan.keys_m,
        "block_n": plan.keys_n, "num_stages": plan.keys_stages,
    }  # fmt: skip


def queries_constants(problem: PrefillProblem, plan: BackwardPlan, dtype: torch.dtype) -> dict[str, Any]:
    """What the kernel of queries is compiled for."""
    return {
        "head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v, "dtype": dtype, "block_m": plan.queries_m,
        "block_n": plan.queries_n, "num_stages": plan.queries_stages,
    }  # fmt: skip


def prepare_backward(
    problem: PrefillProblem, plan: BackwardPlan | None, inputs: Inputs, backward: Backward
) -> Callable[..., None]:
    """What writes the gradients, called with the tensors of inputs and backward, and with d_q, d_k and d_v."""
    q, k, v = inputs[:3]
    if q.numel() == 0 or k.numel() == 0:
        return _nothing
    limits = device_limits(q.device)
    chosen = plan_backward(problem, limits) if plan is None else plan
    if chosen is None:
        fail("q", f"of heads of at most {MOST_COLUMNS} with those of v, for a gradient", [*q.shape[2:], *v.shape[2:]])
    dtype, device, causal, scale = q.dtype, q.device, int(problem.causal), problem.softmax_scale
    forms = [form_of(tensor.shape, tensor.stride()) for tensor in (q, k, v)]
    of_keys, of_queries, of_outputs = kernels(
        ("backward_of_keys", keys_constants(problem, chosen, dtype)),
        ("backward_of_queries", queries_constants(problem, chosen, dtype)),
        ("delta", {"head_dim_v": problem.head_dim_v, "dtype": dtype}),
    )
    keys_slots, queries_slots = chosen.slots(problem)
    of_scores = max(abs(scale), ZERO_SCALE) * LOG2_E
    tokens = problem.tokens

    def run(q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, d_out, d_lse, d_q, d_k, d_v):  # type: ignore[no-untyped-def]
        q, k, v = [
            tensor.contiguous() if 0 in form[1] else tensor.as_strided(*form)
            for tensor, form in zip((q, k, v), forms, strict=True)
        ]
        check_aligned(q=q, k=k, v=v)
        if scale < 0:
            q = -q
        d_out = d_out.contiguous()
        if d_out.data_ptr() % 16:
            d_out = d_out.clone()
        delta = torch.empty_like(lse)
        of_lse = lse.new_empty((1, tokens)) if d_lse is None else d_lse
        of_outputs(out, d_out, of_lse, delta, int(d_lse is not None))
        given = (q, k, v, d_out, lse, delta, cu_seqlens_q, cu_seqlens_k)
        of_keys(*given, d_k, d_v, of_scores, abs(scale), causal, keys_slots)
        of_queries(*given, d_q, of_scores, scale, causal, queries_slots)

    return on_device(device, run)


def _nothing(*tensors: Tensor | None) -> None:
    """Where there are no queries or no keys."""
    for gradient in tensors[-3:]:
        if gradient is not None:
            gradient.zero_()
