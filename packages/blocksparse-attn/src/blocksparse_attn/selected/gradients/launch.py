"""Launches of gradients: what tokens list, then two kernels, their grids and arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from blocksparse_attn.gradients.launch import gradients_of_sinks
from blocksparse_attn.kernels.selected_backward import (
    Given,
    Scales,
    SelectedBackwardConfig,
    SlotStrides,
    backward_pieces,
    backward_tokens,
)
from blocksparse_attn.launch import device_limits
from blocksparse_attn.selected.gradients.arguments import Inputs
from blocksparse_attn.selected.gradients.lists import listed_pieces
from blocksparse_attn.selected.gradients.plan import BackwardPlan, plan_backward, rows
from blocksparse_attn.selected.plan import Problem
from kernel_reference.differentiable import Backward
from kernel_reference.dispatch import allocator
from kernel_reference.integers import cdiv, power_of_two_at_least
from kernel_reference.launching import Launch

Tensor = torch.Tensor
Pointer = Tensor | int | None


def prepare_backward(
    problem: Problem, plan: BackwardPlan | None, inputs: Inputs, backward: Backward
) -> Callable[..., None]:
    """A prepared launch, called with the tensors of the op and the four that it writes."""
    device, pages = inputs.q.device, inputs.k_cache.shape[0]
    if not (problem.tokens and problem.sequences and pages and problem.capacity and problem.topk):
        return _write_zeros
    chosen = plan_backward(problem, device_limits(device)) if plan is None else plan
    of_results = (torch.empty(x.shape, device="meta").stride() for x in inputs[1:3])
    k, v, d_k, d_v = (_by_slot(s, problem) for s in (*(x.stride() for x in inputs[1:3]), *of_results))
    strides = SlotStrides(inputs.q.stride(), k, v, backward.d_out.stride(), d_k, d_v)
    scales = Scales(problem.softmax_scale, problem.k_factor, problem.v_factor)
    block_m, keys_n = rows(problem, chosen), max(16, chosen.piece)
    of_tokens = _config(problem, inputs, strides, chosen, (block_m, chosen.block_n, chosen.num_stages))
    of_pieces = _config(problem, inputs, strides, chosen, (chosen.block_m, keys_n, chosen.keys_stages))
    by_tokens = Launch(
        backward_tokens, (problem.tokens * problem.num_heads_kv * cdiv(problem.group, block_m), 1, 1),
        (problem.tokens, scales, strides, of_tokens), device, group=_grouped, num_warps=chosen.num_warps,
    )  # fmt: skip
    by_pieces = Launch(
        backward_pieces, (pages * (problem.page_size // chosen.piece) * problem.num_heads_kv, 1, 1),
        (problem.tokens, scales, strides, of_pieces), device, group=_grouped, num_warps=chosen.keys_warps,
    )  # fmt: skip
    new_delta = allocator(torch.empty(backward.lse.shape, dtype=torch.float32, device=device))

    def run(*tensors: Tensor) -> None:
        given, (out, lse, d_out, d_lse), (d_q, d_k, d_v, d_sinks) = Inputs(*tensors[:10]), tensors[10:14], tensors[14:]
        delta = new_delta()
        own = (*given[:3], d_out, out, lse, d_lse, delta, given.k_scale, given.v_scale)
        pieces = listed_pieces(problem, given, chosen.piece)
        by_tokens(*own, pieces.slot, pieces.reach, d_q)
        by_pieces(*own, pieces.begins, pieces.token, pieces.token_reach, d_k, d_v)
        if given.sinks is not None:
            d_sinks.copy_(gradients_of_sinks(given.sinks, lse, delta))

    return run


def _write_zeros(*tensors: Tensor) -> None:
    """Where nothing is seen, lse, and so a sink's part of it, is -inf or the sink itself, whatever q, k and v are."""
    for x in tensors[14:17]:
        x.zero_()
    sinks, lse, d_lse, d_sinks = tensors[7], tensors[11], tensors[13], tensors[17]
    if sinks is not None:
        d_sinks.zero_() if d_lse is None else d_sinks.copy_(gradients_of_sinks(sinks, lse, -d_lse))


def _config(
    problem: Problem, inputs: Inputs, strides: SlotStrides, plan: BackwardPlan, tile: tuple[int, int, int]
) -> SelectedBackwardConfig:
    """``tile``: rows, keys and stages."""
    size, size_v = problem.head_dim, problem.head_dim_v
    reach = max(s[-1] * n for s, n in zip(strides[:4], (size, size, size_v, size_v), strict=True))
    return SelectedBackwardConfig(
        GROUP=problem.group, HEADS_KV=problem.num_heads_kv, D=size, BLOCK_D=max(16, power_of_two_at_least(size)),
        DV=size_v, BLOCK_DV=max(16, power_of_two_at_least(size_v)), PAGE=problem.page_size, PIECE=plan.piece,
        ENTRIES=problem.topk * (problem.block_size // plan.piece), BLOCK_M=tile[0],
        TOKEN_ROWS=min(tile[0], power_of_two_at_least(problem.group)), BLOCK_N=tile[1], STAGES=tile[2],
        K_SCALES=_count(inputs.k_scale), V_SCALES=_count(inputs.v_scale), WIDE=reach >= 2**31,
    )  # fmt: skip


def _count(scale: Tensor | None) -> int:
    return 0 if scale is None else scale.shape[0]


def _by_slot(strides: tuple[int, ...], problem: Problem) -> tuple[int, ...]:
    """By (page, slot, head, element)."""
    return strides if problem.page_layout == "NHD" else (strides[0], strides[2], strides[1], strides[3])


def _grouped(*flat: Pointer) -> tuple[Any, ...]:
    """A kernel's arguments of tensors or, from the second call on, of pointers, in a plain tuple."""
    return (flat[:10] if type(flat[0]) is int else Given(*flat[:10])), *flat[10:]
