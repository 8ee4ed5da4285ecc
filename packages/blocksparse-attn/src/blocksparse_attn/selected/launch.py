"""Launches of selected attention: from a problem, its plan and tensors to a kernel, its grid and its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton

from blocksparse_attn.arguments import has_tma_strides
from blocksparse_attn.kernels import merge, tiles
from blocksparse_attn.kernels.groups import Bounds, Outputs, Strides
from blocksparse_attn.kernels.selected import Inputs, Numbers, SelectedConfig, attend_selected
from blocksparse_attn.kernels.unite import HEADER, unite_lists
from blocksparse_attn.launch import Parts, device_limits, in_parts, merge_config, without_parts
from blocksparse_attn.selected.arguments import Tensors
from blocksparse_attn.selected.by_blocks import prepare_by_blocks
from blocksparse_attn.selected.plan import Problem, SelectedPlan, head_tiles, needs_map, num_slots, plan_selected
from kernel_reference.dispatch import allocator_of
from kernel_reference.integers import cdiv, power_of_two_at_least
from kernel_reference.launching import Launch, Run, by_alignment, launch_nothing, without_memory

Tensor = torch.Tensor
Pointer = Tensor | int | None


def prepare_selected(problem: Problem, plan: SelectedPlan | None, tensors: Tensors) -> Run:
    """A prepared launch, called with the op's twelve tensors; ``plan`` None: the one made for their device."""
    if not problem.tokens:
        return Run(launch_nothing, lambda *_: True)
    device = tensors.q.device
    forms = Tensors(*map(without_memory, tensors))  # type: ignore[arg-type]
    chosen = plan_selected(problem, device_limits(device)) if plan is None else plan
    if chosen.by_blocks:
        # Long prompts, whose host time shows nowhere.
        unscaled = forms.k_scale is None and forms.v_scale is None
        shared = chosen.shared and unscaled and all(map(has_tma_strides, forms[:3]))

        def make_by_blocks(aligned: bool) -> Callable[..., None]:
            return prepare_by_blocks(problem, replace(chosen, shared=shared and aligned), forms, device)

        return Run(by_alignment(make_by_blocks, slice(3)), lambda *_: False)
    if chosen.pairs:
        there = all(_lies_in_pairs(cache) for cache in (forms.k_cache, forms.v_cache))

        def make(aligned: bool) -> Run:
            return _prepare(problem, replace(chosen, pairs=aligned and there), forms, device)

        return by_alignment(make, slice(1, 3))
    return _prepare(problem, chosen, forms, device)


def _lies_in_pairs(cache: Tensor) -> bool:
    """Whether two elements of a head lie together at a multiple of their size, if the cache begins at one."""
    *strides, last = cache.stride()
    return last == 1 and all(stride % 2 == 0 for stride in strides)


def _prepare(problem: Problem, chosen: SelectedPlan, forms: Tensors, device: torch.device) -> Run:
    """The launches of a plan that walks each token's list."""
    attend = _attend(problem, chosen, forms, device)
    if chosen.num_splits == 1:
        return without_parts(attend, device)
    parts = Parts(chosen.num_splits, problem.tokens, problem.num_heads, problem.head_dim_v, device)
    return in_parts(attend, _merge(problem, chosen, forms, device), parts, _to_merge)


def _to_merge(
    q: Pointer, k: Pointer, v: Pointer, indices: Pointer, table: Pointer, cu: Pointer, lengths: Pointer,
    sinks: Pointer, k_scale: Pointer, v_scale: Pointer, out: Pointer, lse: Pointer,
) -> tuple[Pointer, ...]:  # fmt: skip
    return cu, lengths, sinks, out, lse


def _attend(problem: Problem, plan: SelectedPlan, forms: Tensors, device: torch.device) -> Run:
    """The launches of results or partial results, called with the twelve tensors and the two of partial results.

    Tiles of several tokens have a launch before them, which unites their lists, and may have one beside them, for
    tokens that are walked by themselves.
    """
    attend = _walk(problem, plan, plan, forms, device)
    if plan.packed == 1:
        return Run(lambda *fourteen: attend(*fourteen, None), lambda *fourteen: attend.at(*fourteen, None))
    config = attend.rest[-1]
    slots = num_slots(problem, plan)
    columns = cdiv(problem.capacity, problem.block_size)
    numbers = columns if config.MAPPED else 2 * config.TOKENS * config.TOPK_P
    entries = slots * problem.num_heads_kv * (int(HEADER) + numbers)
    new_work = allocator_of((entries,), (1,), torch.int32, device)
    unite = Launch(
        unite_lists, (slots * problem.num_heads_kv, 1, 1),
        (problem.tokens, problem.sequences, problem.capacity, forms.indices.stride()[:2], config), device,
        group=_grouped_for_lists, num_warps=4,
    )  # fmt: skip
    walks = [attend]
    if plan.alone_n:
        walks.append(_walk(problem, plan.alone(problem), plan, forms, device))

    def run(*fourteen: Tensor | None) -> None:
        work = new_work()
        unite(fourteen[3], *fourteen[5:7], work)
        for walk in walks:
            walk(*fourteen, work)

    def at(*fourteen: int | None) -> bool:
        room = new_work()
        work = room.data_ptr()
        return unite.at(fourteen[3], *fourteen[5:7], work) and all([walk.at(*fourteen, work) for walk in walks])

    return Run(run, at)


def _walk(problem: Problem, plan: SelectedPlan, whole: SelectedPlan, forms: Tensors, device: torch.device) -> Launch:
    """The launch of one kernel that attends; ``whole``: the plan of the call."""
    size, size_v = problem.head_dim, problem.head_dim_v
    s_k, s_v = (_by_slot(cache, problem) for cache in (forms.k_cache, forms.v_cache))
    if plan.pairs:
        s_k, s_v = ((*(stride // 2 for stride in s[:3]), 1) for s in (s_k, s_v))
    s_lse = (0, 1) if forms.lse is None else forms.lse.stride()
    s_q, s_out = (0, *forms.q.stride()), (0, *forms.out.stride())
    numbers = Numbers(
        problem.softmax_scale, problem.k_factor, problem.v_factor, Strides(s_q, s_k, s_v, s_out, s_lse[1]),
        forms.indices.stride()[:2],
    )  # fmt: skip
    config = SelectedConfig(
        GROUP=problem.group, HEADS_KV=problem.num_heads_kv, D=size, BLOCK_D=max(16, power_of_two_at_least(size)),
        DV=size_v, BLOCK_DV=max(16, power_of_two_at_least(size_v)), PAGE=problem.page_size, BLOCK=problem.block_size,
        PIECE=min(plan.block_n, problem.block_size), TOPK=problem.topk,
        TOPK_P=power_of_two_at_least(max(1, problem.topk)), BLOCK_M=plan.block_m, BLOCK_N=plan.block_n,
        TOKENS=plan.packed, STAGES=plan.num_stages, CAUSAL=problem.causal, IS_FP8=problem.cache_bits == 8,
        NATIVE=plan.e4m3, PAIRS=plan.pairs,
        K_SCALES=_count(forms.k_scale), V_SCALES=_count(forms.v_scale),
        ONE_PAGE=plan.block_n <= problem.block_size and problem.page_size % plan.block_n == 0,
        WIDE=(size_v - 1) * s_out[3] >= 2**31, DEPENDENT=_is_dependent(plan, device),
        NEIGHBOURS=whole.packed if whole.alone_n else 0, MOST_UNITED=whole.most_united,
        MAPPED=whole.packed > 1 and needs_map(problem, whole),
        ABOVE_0=whole.packed > 1 and needs_map(problem, whole) and forms.k_scale is None
        and problem.softmax_scale * problem.k_factor > 0 and problem.cache_bits == 16,
    )  # fmt: skip
    rest = (
        problem.tokens, problem.sequences, problem.capacity, forms.k_cache.shape[0], forms.block_table.stride()[0],
        plan.num_splits, 0, s_lse[0], numbers, config,
    )  # fmt: skip
    grid = (num_slots(problem, plan) * head_tiles(problem, plan), plan.num_splits, problem.num_heads_kv)
    # Kernels read 8-bit floats as integers: not every target knows the type.
    as_integers = (1, 2) if problem.cache_bits == 8 else ()
    return Launch(
        attend_selected, grid, rest, device, group=_grouped, as_integers=as_integers,
        dependent_launch=config.DEPENDENT, num_warps=plan.num_warps,
        **_limited(plan),
    )  # fmt: skip


def _limited(plan: SelectedPlan) -> dict[str, int]:
    """The compiler's limit of registers. Triton 3.7 takes 127 by itself where 3.6 takes 168, and would spill."""
    older = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    return {"maxnreg": plan.max_registers} if older and plan.packed == 1 and plan.max_registers else {}


def _is_dependent(plan: SelectedPlan, device: torch.device) -> bool:
    """Whether the launches of a plan are dependent ones."""
    return plan.dependent_launch and _has_dependent_launches(device)


def _has_dependent_launches(device: torch.device) -> bool:
    return device.type == "cuda" and device_limits(device).hopper


def _by_slot(cache: Tensor, problem: Problem) -> tuple[int, ...]:
    """Strides by (page, slot, head, element)."""
    s = cache.stride()
    return s if problem.page_layout == "NHD" else (s[0], s[2], s[1], s[3])


def _count(scale: Tensor | None) -> int:
    return 0 if scale is None else scale.shape[0]


def _grouped(
    q: Pointer, k: Pointer, v: Pointer, indices: Pointer, table: Pointer, cu: Pointer, lengths: Pointer,
    sinks: Pointer, k_scale: Pointer, v_scale: Pointer, out: Pointer, lse: Pointer, part: Pointer, part_lse: Pointer,
    work: Pointer,
) -> tuple[Any, ...]:  # fmt: skip
    """A kernel's arguments of tensors or, from the second call on, of pointers, in plain tuples."""
    outputs = (out, lse, part, part_lse)
    if type(q) is int:
        return (q, k, v, indices, k_scale, v_scale), table, (cu, None, None, lengths), sinks, outputs, work
    bounds = Bounds(cu, None, None, lengths)
    return Inputs(q, k, v, indices, k_scale, v_scale), table, bounds, sinks, Outputs(*outputs), work


def _grouped_for_lists(indices: Pointer, cu: Pointer, lengths: Pointer, work: Pointer) -> tuple[Any, ...]:
    if type(indices) is int:
        return indices, (cu, None, None, lengths), work
    return indices, Bounds(cu, None, None, lengths), work


def _merge(problem: Problem, plan: SelectedPlan, forms: Tensors, device: torch.device) -> Launch:
    """The merge kernel, called with cu_seqlens_q, seqlens_k, sinks, out, lse and the partial results."""
    s_out = (0, *forms.out.stride())
    s_lse = (0, 1) if forms.lse is None else forms.lse.stride()
    # Behind tiles of several tokens, which end before it starts, too: steps with few of a prompt's tokens then take the
    # kernel that decoding has compiled, in place of one more, which a server would compile in the middle of its day.
    dependent = (plan.dependent_launch or plan.packed > 1) and _has_dependent_launches(device)
    # Where no SM has two programs, four warps merge, and the next step's programs may come before they have ended: one
    # sequence 8.07 us for 8.33 on an H100. Four warps for 8 sequences take 19.1 us for 16.8 on an H200.
    programs = num_slots(problem, plan) * problem.num_heads_kv * head_tiles(problem, plan) * plan.num_splits
    few = dependent and plan.packed == 1 and programs <= device_limits(device).cores
    config = merge_config(
        int(tiles.PAGED), problem.num_heads, problem.head_dim_v, s_out[3], dependent=dependent, ahead=few
    )
    rest = (
        problem.tokens, problem.sequences, problem.capacity, plan.packed, int(plan.packed > 1), plan.num_splits, 0,
        *s_lse, s_out, config,
    )  # fmt: skip
    grid = (problem.tokens * problem.num_heads, 1, 1)
    return Launch(
        merge.merge, grid, rest, device, group=_grouped_for_merging, dependent_launch=dependent,
        num_warps=4 if few else 1,
    )  # fmt: skip


def _grouped_for_merging(cu: Pointer, lengths: Pointer, sinks: Pointer, *outputs: Pointer) -> tuple[Any, ...]:
    if type(cu) is int:
        return (cu, None, None, lengths), sinks, outputs
    return Bounds(cu, None, None, lengths), sinks, Outputs(*outputs)
