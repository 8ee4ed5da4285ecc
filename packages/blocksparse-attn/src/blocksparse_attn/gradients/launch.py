"""Launches of gradients: from a problem, its plan and tensors to two kernels, their grids and arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from blocksparse_attn.gradients.arguments import Backward, Inputs
from blocksparse_attn.gradients.plan import BackwardPlan, num_tiles, plan_backward
from blocksparse_attn.kernels import tiles
from blocksparse_attn.kernels.backward import (
    BackwardConfig,
    Given,
    GivenStrides,
    backward_keys,
    backward_queries,
)
from blocksparse_attn.kernels.groups import Bounds, Lists
from blocksparse_attn.launch import device_limits
from blocksparse_attn.plan import Problem
from kernel_reference.dispatch import allocator
from kernel_reference.integers import power_of_two_at_least
from kernel_reference.launching import Launch, launch_nothing

Tensor = torch.Tensor
Pointer = Tensor | int | None


def prepare_backward(
    problem: Problem, plan: BackwardPlan | None, inputs: Inputs, backward: Backward
) -> Callable[..., None]:
    """A prepared launch, called with the tensors of the op and the four that it writes."""
    device = inputs.q.device
    all_keys = inputs.k.shape[0] if not problem.padded else inputs.k.shape[0] * inputs.k.shape[1]
    if not problem.tokens and not all_keys:
        return launch_nothing
    chosen = plan_backward(problem, device_limits(device)) if plan is None else plan
    strides = GivenStrides(*(_batched(x.stride()) for x in (*inputs[:3], backward.d_out)))
    config = _config(problem, chosen, strides)
    rows, keys = inputs.q.shape[-3], inputs.k.shape[-3]

    def launch(kernel: Any, crow: Tensor, col: Tensor, slots: int, heads: int, group: Callable[..., Any]) -> Launch:
        of_lists = (*(x.stride(0) if x.shape[0] > 1 else 0 for x in (crow, col)), crow.shape[1] - 1, col.shape[1])
        rest = (
            rows, problem.sequences, keys, *of_lists, slots, (problem.softmax_scale, problem.softcap), problem.left,
            strides, config,
        )  # fmt: skip
        return Launch(kernel, (slots * heads, 1, 1), rest, device, group=group, num_warps=chosen.num_warps)

    slots_q = num_tiles(problem.tokens, chosen.block_m, problem, 2)
    slots_k = num_tiles(all_keys, chosen.block_n, problem, 1)
    of_queries = launch(backward_queries, inputs.crow, inputs.col, slots_q, problem.num_heads, _grouped(problem.padded))
    of_keys = launch(
        backward_keys, inputs.crow_t, inputs.col_t, slots_k, problem.num_heads_kv, _grouped(problem.padded)
    )
    new_delta = allocator(torch.empty(backward.lse.shape, dtype=torch.float32, device=device))

    def run(*tensors: Tensor) -> None:
        given, (d_q, d_k, d_v, d_sinks) = tensors[:-4], tensors[-4:]
        q, k, v, crow, col, crow_t, col_t, *bounds, sinks, out, lse, d_out, d_lse = given
        delta = new_delta()
        own = (q, k, v, d_out, out, lse, d_lse, delta)
        of_queries(*own, crow, col, *bounds, d_q)
        of_keys(*own, crow_t, col_t, *bounds, d_k, d_v)
        if sinks is not None:
            d_sinks.copy_(_of_sinks(sinks, lse, delta))

    return run


def _of_sinks(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The weight of a sink has no value: its gradient is that of a score whose value is 0."""
    weight = torch.exp(sinks.float()[:, None] - lse)
    seen = lse != -torch.inf
    each = torch.where(seen, weight * delta, 0)
    return -each.sum((0, 2) if each.ndim == 3 else 1)


def _config(problem: Problem, plan: BackwardPlan, strides: GivenStrides) -> BackwardConfig:
    size, size_v = problem.head_dim, problem.head_dim_v
    reach = max(s[3] * n for s, n in zip(strides, (size, size, size_v, size_v), strict=True))
    return BackwardConfig(
        KIND=int(tiles.PADDED if problem.padded else tiles.RAGGED), GROUP=problem.group,
        HEADS_KV=problem.num_heads_kv, D=size, BLOCK_D=max(16, power_of_two_at_least(size)), DV=size_v,
        BLOCK_DV=max(16, power_of_two_at_least(size_v)), Q_BLOCK=problem.q_block, K_BLOCK=problem.k_block,
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, SOFTCAP=problem.softcap > 0, HAS_LEFT=problem.left >= 0,
        WIDE=reach >= 2**31, STAGES=plan.num_stages,
    )  # fmt: skip


def _batched(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides by (sequence, token, head, element), of what has one row of tokens by (0, ...)."""
    return strides if len(strides) == 4 else (0, *strides)


def _grouped(padded: bool) -> Callable[..., tuple[Any, ...]]:
    """A kernel's arguments of tensors or, from the second call on, of pointers, in plain tuples."""

    def group(*flat: Pointer) -> tuple[Any, ...]:
        given, (crow, col), bounds, results = flat[:8], flat[8:10], flat[10:16], flat[16:]
        cu_q, cu_k, *of_padded = bounds
        wanted = tuple(of_padded) if padded else (cu_q, None, cu_k, None)
        if type(crow) is int:
            return given, (crow, col), wanted, *results
        return Given(*given), Lists(crow, col), Bounds(*wanted), *results

    return group
