"""What launch.py does, for the ops over packed sequences without a pool and for states alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernel_reference.checks import fail
from kernel_reference.integers import cdiv, power_of_two_at_least
from kernel_reference.launching import Launch, TmaLaunch, by_alignment, launch_nothing
from kernel_reference.together import compiled_together
from lightning_attn import launch
from lightning_attn.boxes import tma_box
from lightning_attn.kernels import states
from lightning_attn.kernels.schedule import RowStrides, StateStrides
from lightning_attn.kernels.states import StateSizes, SumStrides
from lightning_attn.launch import NO_STATES, keep_state, prepare_prefill
from lightning_attn.packed.plan import StatePlan, StateProblem, in_one_launch, plan_state
from lightning_attn.plan import (
    BackwardProblem,
    Heads,
    Operand,
    PrefillPlan,
    PrefillProblem,
    Strides,
    fitted,
)
from lightning_attn.tensors import Packed, PackedBackward, Prefill, State

Tensor = torch.Tensor

# Programs that go round lanes: of one an SM two rounds, so that the last ones are short. In float32 more, of which the
# second half begin as others end: 64 heads of 128, 65536 tokens, on an H100 66 us for 83.
MOST_ROUND = 264
MOST_IN_FLOAT32 = 528


def prepare_packed(problem: PrefillProblem, plan: PrefillPlan | None, tensors: Packed) -> Callable[[Packed], None]:
    """What runs the prefill of packed sequences."""
    device = tensors.q.device
    if problem.sequences == 0 or problem.rows == 0:
        return _without_tokens(problem, lambda t: t.initial_state, lambda t: t.final_state, lambda t: (t.out,))
    prefill, keep = prepare_prefill(problem, plan, device), _keep_launch(problem, device)

    def run(t: Packed) -> None:
        prefill(Prefill(t.q, t.k, t.v, t.out, t.slopes, t.initial_state, t.final_state, t.cu_seqlens))
        keep(t.cu_seqlens, t.initial_state, t.final_state)

    return compiled_together(run, device)


def prepare_packed_backward(
    problem: BackwardProblem, plan: PrefillPlan | None, tensors: PackedBackward
) -> Callable[[PackedBackward], None]:
    """What makes their gradients: the problem says how."""
    device = tensors.q.device
    if problem.dv.sequences == 0 or problem.dv.rows == 0:
        return _without_tokens(
            problem.dv, lambda t: t.d_final, lambda t: t.d_initial, lambda t: (t.d_q, t.d_k, t.d_v)
        )  # fmt: skip
    other = None if plan is None else fitted(plan, problem.dq.heads)
    prefill_dq = prepare_prefill(problem.dq, other, device)
    prefill_dk = prepare_prefill(problem.dk, other, device)
    prefill_dv = prepare_prefill(problem.dv, plan, device)
    keep = _keep_launch(problem.dv, device)

    def run(t: PackedBackward) -> None:
        cu = t.cu_seqlens
        prefill_dq(Prefill(t.d_out, t.v, t.k, t.d_q, t.slopes, t.initial_state, None, cu))
        prefill_dk(Prefill(t.v, t.d_out, t.q, t.d_k, t.slopes, t.d_final, None, cu))
        prefill_dv(Prefill(t.k, t.q, t.d_out, t.d_v, t.slopes, t.d_final, t.d_initial, cu))
        if problem.dv.final is not None:
            keep(cu, t.d_final, t.d_initial)

    return compiled_together(run, device)


def prepare_state(problem: StateProblem, plan: StatePlan | None, tensors: State) -> Callable[[State], None]:
    """What makes states without outputs. Two plans are kept: slices of fused tensors may be 16-byte aligned or not."""
    device = tensors.k.device
    if problem.sequences == 0:
        return launch_nothing
    if problem.rows == 0:
        return lambda t: keep_state(t.initial_state, t.final_state)

    def make(aligned: bool) -> Callable[..., None]:
        found = _plan_state(problem, plan, aligned, device)
        return (_make_lanes if found.lanes else _make_segments)(problem, found, device)

    run = by_alignment(make, slice(0, 2))
    return compiled_together(
        lambda t: run(t.k, t.v, t.slopes, t.cu_seqlens, t.initial_state, t.final_state), device
    )  # fmt: skip


def _plan_state(problem: StateProblem, pinned: StatePlan | None, aligned: bool, device: torch.device) -> StatePlan:
    """The caller's, if it has pinned one, else the device's."""
    suits_tma = aligned and problem.suits_tma()
    if pinned is None:
        return plan_state(problem.heads, problem.is_float32, launch.device_limits(device), suits_tma, problem.forgets())
    if pinned.lanes and not (problem.is_float32 if pinned.bf16x6 else suits_tma):
        wanted = "without lanes where k and v are not in 16 bits, 16-byte aligned, with strides of whole 16 bytes"
        fail("plan", wanted, pinned)
    return pinned


def _make_segments(problem: StateProblem, plan: StatePlan, device: torch.device) -> Callable[..., None]:
    """By the portable kernels: one launch where no sequence can be longer than a segment, else two."""
    sizes, strides = _state_sizes(problem, plan), _sum_strides(problem)
    tiles = cdiv(sizes.D, sizes.BLOCK_D) * cdiv(sizes.E, sizes.BLOCK_E) * sizes.H
    whole = problem.rows // plan.segment
    if problem.ragged:
        segments, partial = whole + problem.sequences, whole + min(problem.sequences, whole)
    else:
        segments = partial = problem.sequences * cdiv(problem.rows, plan.segment)
    counts = (problem.rows, problem.sequences, problem.reach)
    sums = Launch(
        states.segment_sums, (tiles * segments, 1, 1), (*counts, problem.scale, strides, sizes), device,
        num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
    several = problem.rows > plan.segment
    # Only loads, sums and stores: small tiles, so that many are on their way.
    small = sizes._replace(BLOCK_D=min(sizes.BLOCK_D, 64), BLOCK_E=min(sizes.BLOCK_E, 32))
    tiles = cdiv(sizes.D, small.BLOCK_D) * cdiv(sizes.E, small.BLOCK_E) * sizes.H
    whole_sums = Launch(
        states.whole_sums, (tiles * problem.sequences, 1, 1), (*counts, strides._replace(k=None, v=None), small),
        device, num_warps=4,
    )  # fmt: skip
    size = (partial if several else 0, sizes.H, sizes.D, sizes.E)

    def run(k, v, slopes, cu, first, last):  # type: ignore[no-untyped-def]
        between = torch.empty(size, dtype=torch.float32, device=device)
        sums(k, v, slopes, cu, first, last, between)
        if several:
            whole_sums(slopes, cu, first, last, between)

    return run


def _make_lanes(problem: StateProblem, plan: StatePlan, device: torch.device) -> Callable[..., None]:
    """By the kernels for sm_90: a launch for lanes, and one that adds them up, or one for both, with the same bits."""
    from lightning_attn.kernels import hopper_remembered

    most = min(plan.lanes, cdiv(problem.rows, plan.segment))
    items = slots = problem.sequences * most
    whole = problem.rows // plan.segment
    by_lanes = not problem.ragged or items <= whole + problem.sequences
    if not by_lanes:
        items, slots = whole + problem.sequences, whole + min(problem.sequences, whole)
    is_one = in_one_launch(problem, plan)
    waits = plan.dependent_launch and not is_one
    sizes = _state_sizes(problem, plan)._replace(
        LANES=plan.lanes, BY_LANES=by_lanes, DEPENDENT_LAUNCH=waits, WARPS=plan.num_warps
    )  # fmt: skip
    of_state = cdiv(sizes.E, sizes.BLOCK_E) * sizes.H
    sums = _lanes_launch(problem, plan, sizes, of_state * items, device)
    strides = _sum_strides(problem)._replace(k=None, v=None)
    counts = (problem.rows, problem.sequences, problem.reach)
    small = sizes._replace(BLOCK_D=64, BLOCK_E=16, WARPS=4)
    tiles = cdiv(sizes.D, small.BLOCK_D) * cdiv(sizes.E, small.BLOCK_E) * sizes.H
    added = Launch(
        hopper_remembered.what_is_remembered, (tiles * problem.sequences, 1, 1), (*counts, strides, small), device,
        num_warps=4, dependent_launch=plan.dependent_launch,
    )  # fmt: skip
    size = (slots if problem.rows > plan.segment else 0, sizes.H, sizes.D, sizes.E)

    # What a launch that adds up by itself has besides.
    of_one = () if plan.bf16x6 else (None,)

    def run(k, v, slopes, cu, first, last):  # type: ignore[no-untyped-def]
        between = torch.empty(size, dtype=torch.float32, device=device)
        if is_one:
            counts = torch.zeros(problem.sequences * of_state, dtype=torch.int32, device=device)
            sums(k, v, slopes, cu, first, last, between, counts)
            return
        sums(k, v, slopes, cu, *of_one, last, between, *of_one)
        added(slopes, cu, first, last, between)

    return run


def _lanes_launch(
    problem: StateProblem, plan: StatePlan, sizes: StateSizes, programs: int, device: torch.device
) -> Callable[..., None]:
    strides = _sum_strides(problem)
    if not in_one_launch(problem, plan):
        strides = strides._replace(initial=None)
    # Two programs an SM.
    more: dict[str, Any] = {"maxnreg": 128} if problem.heads.head_qk <= 128 else {}
    counts = (problem.rows, problem.sequences, problem.reach, problem.scale)
    if plan.bf16x6:
        from lightning_attn.kernels import hopper_round_float32

        return Launch(
            hopper_round_float32.lane_states, (min(MOST_IN_FLOAT32, programs), 1, 1), (*counts, strides, sizes),
            device, num_warps=plan.num_warps, **more,
        )  # fmt: skip
    kernel: Any
    if problem.heads.head_qk > 128:
        from lightning_attn.kernels import hopper_round

        kernel, programs = hopper_round.lane_states, min(MOST_ROUND, programs)
    else:
        from lightning_attn.kernels import hopper_remembered

        kernel = hopper_remembered.lane_states
    boxes = [tma_box(operand, plan.chunk, 64) for operand in (problem.k, problem.v)]
    return TmaLaunch(
        kernel, (programs, 1, 1), (*counts, strides._replace(k=None, v=None), sizes), device, boxes,
        num_warps=plan.num_warps, **more,
    )  # fmt: skip


def _sum_strides(problem: StateProblem) -> SumStrides:
    return SumStrides(
        RowStrides.of(problem.k.strides), RowStrides.of(problem.v.strides), _state_strides(problem.initial),
        _state_strides(problem.final), _state_strides(problem.final),
    )  # fmt: skip


def _state_sizes(problem: StateProblem, plan: StatePlan) -> StateSizes:
    heads, operands = problem.heads, (problem.k, problem.v)
    return StateSizes(
        heads.num_heads, heads.num_heads // heads.num_heads_qk, heads.num_heads // heads.num_heads_v, heads.head_qk,
        heads.head_v, plan.block_d, plan.block_e, plan.chunk, plan.segment, plan.num_stages, problem.reversed,
        any(_is_wide(operand, plan.segment, max(plan.block_d, plan.block_e)) for operand in operands),
        "bf16x6" if plan.bf16x6 else "ieee",
    )  # fmt: skip


def _is_wide(operand: Operand, rows: int, padding: int) -> bool:
    elements = max(operand.sizes[3], padding)
    return rows * operand.strides[1] + elements * operand.strides[3] >= 2**31


def _keep_launch(problem: PrefillProblem, device: torch.device) -> Launch:
    """What fills in the states of sequences without tokens."""
    heads = problem.heads
    sizes = _keep_sizes(heads)
    strides = SumStrides(None, None, _state_strides(problem.initial), _state_strides(problem.final), None)
    tiles = cdiv(sizes.D, sizes.BLOCK_D) * cdiv(sizes.E, sizes.BLOCK_E) * sizes.H
    rest = (problem.rows, problem.sequences, strides, sizes)
    return Launch(states.keep_states, (tiles * problem.sequences, 1, 1), rest, device, num_warps=4)


def _keep_sizes(heads: Heads) -> StateSizes:
    block_d, block_e = (min(64, power_of_two_at_least(max(16, size))) for size in (heads.head_qk, heads.head_v))
    return StateSizes(
        heads.num_heads, 1, 1, heads.head_qk, heads.head_v, block_d, block_e, 16, 16, 1, False, False, "ieee"
    )  # fmt: skip


def _state_strides(strides: Strides | None) -> StateStrides:
    return NO_STATES if strides is None else StateStrides(*strides)


def _without_tokens(
    problem: PrefillProblem, before: Callable[..., Tensor | None], after: Callable[..., Tensor],
    rows: Callable[..., tuple[Tensor, ...]],
) -> Callable[..., None]:  # fmt: skip
    """What fills in results where there is no sequence or no token."""

    def run(t: object) -> None:
        for tensor in rows(t):
            tensor.zero_()
        if problem.sequences and problem.final is not None:
            keep_state(before(t), after(t))

    return run
