"""From a checked problem and its plan to launches; called with the tensors of the op, in their order.

On CPU tensors a launch works only under Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported) and
with a plan given: that is how kernels are tested with no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from kernel_reference.checks import fail
from kernel_reference.integers import power_of_two_at_least
from kernel_reference.launching import Launch, Run, by_alignment, device_properties, has_gluon, without_memory
from prefix_prefill.addressing import Batch, Pages, chunk_of_keys, contiguous_tokens, largest_of, scaling
from prefix_prefill.arguments import PrefillTensors
from prefix_prefill.hopper.launch import prepare_hopper
from prefix_prefill.kernels import groups, portable
from prefix_prefill.merging.launch import LAUNCH_NOTHING, Sized, with_pieces, with_splits
from prefix_prefill.merging.launch import prepare_merge as prepare_merge
from prefix_prefill.plan import DeviceLimits, PrefillPlan, Problem, kind_of_batch, plan_prefill
from prefix_prefill.tiles import head_tiles, heads_per_tile, num_slots, tokens_per_tile
from prefix_prefill.widening import with_widening

Tensor = torch.Tensor
Start = Callable[..., None]

# Kernels read 8-bit floats as integers: not every target knows the types.
_FP8 = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}


@lru_cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of the device a tensor is on."""
    found = device_properties(device)
    return DeviceLimits(
        cores=found.cores,
        shared_memory=found.shared_memory,
        hopper=found.capability == (9, 0) and has_gluon(),
        turing=found.capability == (7, 5),
        gaps=takes_gaps(),
    )


@lru_cache
def takes_gaps() -> bool:
    """``DeviceLimits.gaps``: from 3.8 on, a view of shared memory is as large as what it is a view of."""
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)


class Layer:
    """What attends, batch after batch, with tensors that look like these but for the sizes of a batch.

    Kernels, their groups of arguments and descriptors' boxes are made once for each plan; :meth:`of_batch` adds a
    batch's integers and grids.
    """

    def __init__(self, problem: Problem, plan: PrefillPlan | None, tensors: PrefillTensors) -> None:
        self.problem, self._plan, self._device = problem, plan, tensors.q.device
        self._forms = PrefillTensors(*map(without_memory, tensors))  # type: ignore[arg-type]
        self._first = Batch.of(problem, self._forms)
        self._plans: dict[Any, PrefillPlan] = {}
        self._sized: dict[PrefillPlan, Sized] = {}

    def of_batch(self, batch: Batch | None = None) -> Run:
        """What attends to a batch; without one to that of the tensors that the layer was made with."""
        batch = batch or self._first
        # Slices of a cache may come aligned or not: k, v and the caches must be for TMA.
        return by_alignment(lambda aligned: self._make(batch, aligned), slice(1, 5))

    def _make(self, batch: Batch, aligned: bool) -> Run:
        plan = self._plan or self._plan_of(batch.problem, self.problem.tma and aligned)
        if plan.hopper and not (self.problem.tma and aligned):
            wanted = "without hopper where the cache has scales, softmax_scale is below 0, or keys or values are not"
            fail("plan", f"{wanted} 16-byte aligned and of strides of whole 16 bytes", plan)
        sized = self._sized.get(plan)
        if sized is None:
            given = batch, plan, self._forms, self._device
            sized = with_widening(_attending, *given) if plan.widened else _attending(*given)
            self._sized[plan] = sized
        return sized(batch)

    def _plan_of(self, problem: Problem, tma: bool) -> PrefillPlan:
        kind = tma and kind_of_batch(problem, device_limits(self._device))
        plan = self._plans.get(kind)
        if plan is None:
            plan = plan_prefill(replace(problem, tma=tma), device_limits(self._device), problem.num_splits)
            if plan.hopper:
                self._plans[kind] = plan
        return plan


def _attending(batch: Batch, plan: PrefillPlan, forms: PrefillTensors, device: torch.device) -> Sized:
    """The plan's kernel, and the merge of its parts."""
    given = batch, plan, forms, device
    return with_pieces(prepare_hopper(*given), *given) if plan.hopper else with_splits(_portable(*given), *given)


def prepare_prefill(problem: Problem, plan: PrefillPlan | None, tensors: PrefillTensors) -> Run:
    """What attends, called with tensors that look like these."""
    if problem.tokens == 0:
        return LAUNCH_NOTHING
    return Layer(problem, plan, tensors).of_batch()


def _grid(problem: Problem, plan: PrefillPlan) -> tuple[int, int, int]:
    """Of the portable kernel: a slot for every tile."""
    slots = num_slots(problem, tokens_per_tile(problem.group, plan.block_m))
    return slots * problem.num_heads_kv * head_tiles(problem.group, plan.block_m) * plan.num_splits, 1, 1


def _for_portable(q, k, v, k_cache, v_cache, table, cu, lengths, alibi, sinks, k_s, v_s, out_s, *rows):  # type: ignore[no-untyped-def]
    out, lse, draft, workspace, *levels = rows
    scales, results = (k_s, v_s, out_s), groups.Results(out, lse, workspace)
    batch = (table, cu, lengths, draft)
    return q, k, v, k_cache, v_cache, batch, (alibi, sinks), scales, results, tuple(levels) or None


def _portable(
    first: Batch, plan: PrefillPlan, forms: PrefillTensors, device: torch.device
) -> Callable[[Batch], Launch]:
    """The kernel for every target."""
    problem = first.problem
    q, k, v, out = forms.q, forms.k, forms.v, forms.out
    d, d_v, nothing = problem.head_dim, problem.head_dim_v, (0, 0, 0)
    k_pages, v_pages = (Pages.of(cache, problem.page_layout) for cache in (forms.k_cache, forms.v_cache))
    (k_scaled, s_k_scale), (v_scaled, s_v_scale) = scaling(forms.k_scale), scaling(forms.v_scale)
    s_k, s_v = (nothing if new is None else new.stride() for new in (k, v))
    reach = max(
        k_pages.reach(d), v_pages.reach(d_v), *((d - 1) * s[2] for s in (q.stride(), s_k)),
        *((d_v - 1) * s[2] for s in (out.stride(), s_v)),
    )  # fmt: skip
    strides = groups.Strides(
        q=q.stride(), k=s_k, v=s_v, k_cache=k_pages.strides, v_cache=v_pages.strides, k_scale=s_k_scale,
        v_scale=s_v_scale, out=out.stride(),
    )  # fmt: skip
    scores = groups.Scores(problem.softmax_scale, problem.softcap)
    numbers = groups.Numbers(problem.k_scale, problem.v_scale, problem.out_scale, strides)
    config = groups.Config(
        GROUP=problem.group,
        HEADS_KV=problem.num_heads_kv,
        D=d,
        BLOCK_D=max(16, power_of_two_at_least(d)),
        DV=d_v,
        BLOCK_DV=max(16, power_of_two_at_least(d_v)),
        PAGE=problem.page_size,
        BOX=contiguous_tokens(problem, v_pages, plan.block_n),
        X=k_pages.x,
        CHUNK=chunk_of_keys(problem, k_pages, plan.block_m),
        STEP=k_pages.strides[1] if k_pages.x < d else 0,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        HEADS=heads_per_tile(problem.group, plan.block_m),
        TOKENS=tokens_per_tile(problem.group, plan.block_m),
        STAGES=plan.num_stages,
        NEW_KV=problem.new_kv,
        FP8=_FP8.get(forms.k_cache.dtype, 0),
        QUANTIZED_Q=problem.quantize_q,
        K_SCALED=k_scaled,
        V_SCALED=v_scaled,
        LIMIT=0 if problem.shared else largest_of(out),
        SOFTCAP=problem.softcap > 0,
        DRAFT=problem.draft,
        HAS_LEFT=problem.left >= 0,
        HAS_RIGHT=problem.right >= 0,
        SKIP_DECODE=problem.skip_decode,
        SHARED=problem.shared,
        CARRIED=problem.carried,
        WIDE=reach >= 2**31,
    )

    def counts(batch: Batch) -> tuple[int, ...]:
        return *batch.counts, num_slots(batch.problem, config.TOKENS), plan.num_splits

    attend = Launch(
        portable.attend,
        _grid(problem, plan),
        (*counts(first), problem.left, problem.right, scores, numbers, config),
        device,
        # The caches, where their dtype is not every target's.
        as_integers=(3, 4) if config.FP8 else (),
        group=_for_portable,
        num_warps=plan.num_warps,
    )

    return lambda batch: attend if batch is first else attend.resized(_grid(batch.problem, plan), counts(batch))


def prepare_kernel(problem: Problem, plan: PrefillPlan, forms: PrefillTensors, device: torch.device) -> Start:
    """The plan's kernel alone, called with the op's tensors and what it has beside them."""
    batch = Batch.of(problem, forms)
    return (prepare_hopper if plan.hopper else _portable)(batch, plan, forms, device)(batch)
