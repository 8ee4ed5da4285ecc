"""Launches of gradients: from a problem, its plan and tensors to two kernels, their grids and arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from blocksparse_attn.gradients.arguments import Inputs
from blocksparse_attn.gradients.plan import BackwardPlan, num_tiles, plan_backward
from blocksparse_attn.kernels import tiles
from blocksparse_attn.kernels.backward import (
    Given,
    GivenStrides,
    backward_keys,
    backward_queries,
)
from blocksparse_attn.kernels.groups import Bounds, Lists, PortableConfig
from blocksparse_attn.launch import device_limits
from blocksparse_attn.plan import Problem
from kernel_reference.differentiable import Backward
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
    of_queries = (chosen.block_m, chosen.block_n, chosen.num_stages)
    of_keys = (chosen.keys_m, chosen.keys_n, chosen.keys_stages)
    rows, keys = inputs.q.shape[-3], inputs.k.shape[-3]
    scores = (problem.softmax_scale, problem.softcap)
    group = _grouped(problem.padded)
    slots_q = num_tiles(problem.tokens, chosen.block_m, problem, 2)
    slots_k = num_tiles(all_keys, chosen.keys_n, problem, 1)
    of_rows, of_columns = _lists(inputs.crow, inputs.col), _lists(inputs.crow_t, inputs.col_t)
    by_queries = Launch(
        backward_queries, (slots_q * problem.num_heads, 1, 1),
        (
            rows, problem.sequences, keys, *of_rows, slots_q, scores, problem.left, strides,
            _config(problem, of_queries, strides),
        ), device, group=group, num_warps=chosen.num_warps,
    )  # fmt: skip
    by_keys = Launch(
        backward_keys, (slots_k * problem.num_heads_kv, 1, 1),
        (
            rows, problem.sequences, keys, *of_columns, slots_k, slots_q, scores, problem.left, strides,
            _config(problem, of_keys, strides, bool(chosen.keys_held)), chosen.block_m, chosen.heads_together,
        ), device, group=group, num_warps=chosen.keys_warps,
    )  # fmt: skip
    new_delta = allocator(torch.empty(backward.lse.shape, dtype=torch.float32, device=device))
    stats = (problem.num_heads, slots_q * chosen.block_m, 2)
    new_stats = allocator(torch.empty(stats, dtype=torch.float32, device=device))

    def run(*tensors: Tensor) -> None:
        given, (d_q, d_k, d_v, d_sinks) = tensors[:-4], tensors[-4:]
        q, k, v, crow, col, crow_t, col_t, *bounds, sinks, out, lse, d_out, d_lse = given
        delta = new_delta()
        own = (q, k, v, d_out, out, lse, d_lse, delta, new_stats())
        by_queries(*own, crow, col, *bounds, d_q)
        by_keys(*own, crow_t, col_t, *bounds, d_k, d_v)
        if sinks is not None:
            d_sinks.copy_(gradients_of_sinks(sinks, lse, delta))

    return run


def _lists(crow: Tensor, col: Tensor) -> tuple[int, ...]:
    """Strides of heads, rows and the width of col."""
    return *(x.stride(0) if x.shape[0] > 1 else 0 for x in (crow, col)), crow.shape[1] - 1, col.shape[1]


def gradients_of_sinks(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The weight of a sink has no value: its gradient is that of a score whose value is 0."""
    weight = torch.exp(sinks.float()[:, None] - lse)
    seen = lse != -torch.inf
    each = torch.where(seen, weight * delta, 0)
    return -each.sum((0, 2) if each.ndim == 3 else 1)


def _config(problem: Problem, tile: tuple[int, int, int], strides: GivenStrides, held: bool = False) -> PortableConfig:
    """``tile``: queries, keys and stages."""
    size, size_v = problem.head_dim, problem.head_dim_v
    block_m, block_n, stages = tile
    sizes = (size, size, size_v, size_v)
    reach = max(s[3] * n + s[1] * max(block_m, block_n) for s, n in zip(strides, sizes, strict=True))
    return PortableConfig(
        KIND=int(tiles.PADDED if problem.padded else tiles.RAGGED), GROUP=problem.group,
        HEADS_KV=problem.num_heads_kv, D=size, BLOCK_D=max(16, power_of_two_at_least(size)), DV=size_v,
        BLOCK_DV=max(16, power_of_two_at_least(size_v)), PAGE=0, BOX=0, X=size, STEP=0, Q_BLOCK=problem.q_block,
        K_BLOCK=problem.k_block, BLOCK_M=block_m, BLOCK_N=block_n, SOFTCAP=problem.softcap > 0,
        HAS_LEFT=problem.left >= 0, WIDE=reach >= 2**31, STAGES=stages, TOKENS=0, PIECE=block_n, HELD=held,
    )  # fmt: skip


def _batched(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides by (sequence, token, head, element), of what has one row of tokens by (0, ...)."""
    return strides if len(strides) == 4 else (0, *strides)


def _grouped(padded: bool) -> Callable[..., tuple[Any, ...]]:
    """A kernel's arguments of tensors or, from the second call on, of pointers, in plain tuples."""

    def group(*flat: Pointer) -> tuple[Any, ...]:
        given, (crow, col), bounds, results = flat[:9], flat[9:11], flat[11:17], flat[17:]
        cu_q, cu_k, *of_padded = bounds
        wanted = tuple(of_padded) if padded else (cu_q, None, cu_k, None)
        if type(crow) is int:
            return given, (crow, col, None), wanted, *results
        return Given(*given), Lists(crow, col), Bounds(*wanted), *results

    return group
