"""Launches: ask the plan, set the grid, start the kernel on the tensors' device and its current stream.

Nothing here checks arguments (arguments.py does), but for what their addresses tell. Each ``prepare_`` function takes a
problem, a plan or None for the device's own, and the op's tensors; what it returns is called with tensors that look
like those. On CPU tensors a call works only under Triton's interpreter (TRITON_INTERPRET=1, set before triton is
imported) and with a plan given: that is how kernels are tested with no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from kernel_reference.checks import fail
from kernel_reference.dispatch import allocator
from kernel_reference.integers import cdiv, power_of_two_at_least
from kernel_reference.lasting import Counters
from kernel_reference.launching import (
    Launch,
    TmaLaunch,
    device_properties,
    has_gluon,
    launch_nothing,
)
from kernel_reference.together import compiled_together
from lightning_attn.apart import behind_tokens, programs_apart, programs_besides
from lightning_attn.boxes import prefill_boxes, tma_box
from lightning_attn.fitting import fitted_prefill, may_share, narrowed, takes_tokens
from lightning_attn.halves import MOST_ROWS, are_beside, beside, in_turn
from lightning_attn.kernels import carried, chunked, recurrent
from lightning_attn.kernels.schedule import DecodeStrides, RowStrides, Sizes, StateStrides, Strides
from lightning_attn.plan import (
    DecodePlan,
    DecodeProblem,
    DeviceLimits,
    Heads,
    PrefillPlan,
    PrefillProblem,
    plan_decode,
    unsegmented,
)
from lightning_attn.tensors import Attention, Commit, Decode, MainPrefill, Prefill, Varlen

Tensor = torch.Tensor

# For kernels that are told of a tensor that is not there.
_NO_ROWS = RowStrides(0, 0, 0, 0)
NO_STATES = StateStrides(0, 0, 0, 0)

# For each pool, of programs that have read a state which another one replaces.
counters = Counters()


@lru_cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of the device a tensor is on."""
    found = device_properties(device)
    return DeviceLimits(
        cores=found.cores,
        shared_memory=found.shared_memory or DeviceLimits.shared_memory,
        hopper=found.capability == (9, 0) and has_gluon(),
        blackwell=found.capability >= (10, 0),
        dependent_launch=found.capability >= (9, 0),
        bf16=found.capability >= (8, 0),
    )


def prepare_attention(
    problem: PrefillProblem, plan: PrefillPlan | None, tensors: Attention
) -> Callable[[Attention], None]:
    """What runs the dense prefill."""
    if problem.rows == 0:
        return lambda t: keep_state(t.kv_history, t.kv)
    if problem.sequences == 0:
        return launch_nothing
    prefill = prepare_prefill(problem, plan, tensors.q.device)

    def run(t: Attention) -> None:
        prefill(Prefill(t.q, t.k, t.v, t.out, t.ed, t.kv_history, t.kv))

    return compiled_together(run, tensors.q.device)


def prepare_varlen(problem: PrefillProblem, plan: PrefillPlan | None, tensors: Varlen) -> Callable[[Varlen], None]:
    """What runs the ragged prefill."""
    if problem.rows == 0:
        return launch_nothing
    prefill = prepare_prefill(problem, plan, tensors.q.device)
    reads, snapshots = problem.initial is not None, problem.snapshots > 0

    def run(t: Varlen) -> None:
        prefill(Prefill(
            t.q, t.k, t.v, t.out, t.slopes, t.state_pool if reads else None, t.state_pool, t.cu_seqlens, t.slots,
            t.has_initial_state, t.positions if snapshots else None, t.snapshot_slots if snapshots else None,
        ))  # fmt: skip

    return compiled_together(run, tensors.q.device)


def prepare_decode(problem: DecodeProblem, plan: DecodePlan | None, tensors: Decode) -> Callable[[Decode], None]:
    """What decodes one token a sequence, or makes the outputs of draft tokens."""
    run = _prepare_tokens(problem, plan, tensors.k.device)
    return lambda t: run(t.q, t.k, t.v, t.state_pool, t.slots, t.slopes, None, t.out)


def prepare_commit(problem: DecodeProblem, plan: DecodePlan | None, tensors: Commit) -> Callable[[Commit], None]:
    """What advances states by the accepted of the draft tokens."""
    run = _prepare_tokens(problem, plan, tensors.k.device)
    return lambda t: run(None, t.k, t.v, t.state_pool, t.slots, t.slopes, t.accepted, None)


def prepare_prefill(
    problem: PrefillProblem, plan: PrefillPlan | None, device: torch.device, whole: bool = False
) -> Callable[[Prefill], None]:
    """What runs a prefill.

    ``whole``: a program takes a whole sequence. Two plans are kept: slices of fused tensors may come 16-byte aligned
    or not.
    """
    # As launching.by_alignment has it, of a group.
    made: dict[bool, Callable[[Prefill], None]] = {}

    def run(t: Prefill) -> None:
        aligned = not (t.q.data_ptr() | t.k.data_ptr() | t.v.data_ptr() | t.out.data_ptr()) & 15
        if aligned not in made:
            found = _plan_prefill(problem, plan, aligned, device)
            made[aligned] = _make_prefill(problem, unsegmented(found) if whole else found, device)
        made[aligned](t)

    return run


def _plan_prefill(
    problem: PrefillProblem, pinned: PrefillPlan | None, aligned: bool, device: torch.device
) -> PrefillPlan:
    """The caller's if it has pinned one, else the device's, which a gradient takes too that sm_90's cannot address."""
    suits_tma = aligned and problem.suits_tma()
    if pinned is not None and (suits_tma or pinned.bf16x6 or not pinned.hopper):
        return pinned
    if pinned is not None and not problem.is_gradient:
        wanted = "without hopper where q, k, v and out are not 16-byte aligned, with strides of whole 16 bytes"
        fail("plan", wanted, pinned)
    return fitted_prefill(problem, device_limits(device), suits_tma)


def _make_prefill(problem: PrefillProblem, plan: PrefillPlan, device: torch.device) -> Callable[[Prefill], None]:
    is_beside = are_beside(problem, plan)
    if not is_beside and plan.hopper and plan.bf16x6 and problem.heads.head_qk > MOST_ROWS:
        return in_turn(problem, lambda half: _make_prefill(half, plan, device))
    sizes, strides = _sizes(problem.heads, plan, problem), _strides(problem)
    grid = (cdiv(sizes.E, sizes.BLOCK_E) * sizes.H * _segments(problem, plan), 1, 1)
    rest = (problem.rows, problem.sequences, problem.num_slots, problem.snapshots, problem.scale)
    if plan.chunk == 1:
        arguments = (*rest, strides._replace(carried=None), sizes)
        by_token = Launch(recurrent.prefill, grid, arguments, device, num_warps=plan.num_warps)
        return lambda t: by_token(
            t.q, t.k, t.v, t.out, t.slopes, t.cu_seqlens, t.slots, t.has_initial, t.initial, t.final, t.positions,
            t.snapshot_slots,
        )  # fmt: skip
    if plan.roles and plan.segment and not problem.ragged:
        sizes = sizes._replace(PART=plan.part or plan.segment, SUMMED=_most_summed(problem.heads))
    is_apart = plan.apart and takes_tokens(problem)
    if is_apart:
        sizes, grid = sizes._replace(APART=True), (programs_apart(problem, grid[0]), 1, 1)
    if plan.long and takes_tokens(problem) and not is_apart:
        sizes = sizes._replace(LONG=plan.long)
        more = programs_besides(plan, _segments(problem, plan))
        grid = (grid[0] + cdiv(sizes.E, sizes.BLOCK_E) * sizes.H * more, 1, 1)
    # A ragged batch's kernel is one for all, whether this one's segments are shared or not.
    may_share = plan.hopper and (plan.bf16x6 or (plan.roles and plan.block_e == 64))
    sizes = sizes._replace(SHARED=may_share and plan.segment > 0 and (problem.ragged or plan.shares > 1))
    main: MainPrefill
    if plan.hopper and plan.bf16x6:
        from lightning_attn.kernels import hopper_float32

        if is_beside:
            main = beside(problem, hopper_float32.prefill, grid, (*rest, strides), sizes, device)
        else:
            main = _whole(Launch(
                hopper_float32.prefill, grid, (*rest, strides, sizes), device, num_warps=plan.num_warps,
                dependent_launch=sizes.APART,
            ))  # fmt: skip
    elif plan.hopper:
        main = _hopper_launch(problem, plan, grid, rest, strides, sizes, device)
    else:
        main = _whole(Launch(
            chunked.prefill, grid, (*rest, strides, sizes), device, num_warps=plan.num_warps, num_stages=plan.num_stages
        ))  # fmt: skip
    if is_apart:
        main = behind_tokens(main, problem, sizes, strides, device)
    made = _with_segments(problem, plan, sizes, device, main) if plan.segment and not plan.chained else main
    return _with_snapshots(made, problem, sizes, strides, device) if problem.snapshots else made


def _whole(launch: Launch) -> MainPrefill:
    def run(t: Prefill, between: Tensor | None = None) -> None:
        launch(
            t.q, t.k, t.v, t.out, t.slopes, t.cu_seqlens, t.slots, t.has_initial, t.initial, t.final, between,
            t.positions, t.snapshot_slots,
        )  # fmt: skip

    return run


def _hopper_launch(
    problem: PrefillProblem, plan: PrefillPlan, grid: tuple[int, int, int], counts: tuple[Any, ...], strides: Strides,
    sizes: Sizes, device: torch.device,
) -> MainPrefill:  # fmt: skip
    if plan.roles:
        from lightning_attn.kernels import hopper_roles

        kernel: Any = hopper_roles.prefill
    else:
        from lightning_attn.kernels import hopper

        kernel = hopper.prefill
    boxes, strides, given, group = prefill_boxes(problem, plan, strides)
    launch = TmaLaunch(
        kernel, grid, (*counts, strides, sizes), device, boxes, group=group,
        num_warps=plan.num_warps, dependent_launch=sizes.DEPENDENT_LAUNCH or sizes.APART,
    )  # fmt: skip

    chains = _chains(problem, plan.segment) if plan.chained else 0
    new_states = _workspace((2 * chains, sizes.H, sizes.E, _carried_rows(sizes.D)), device)
    tiles = chains * sizes.H * cdiv(sizes.E, sizes.BLOCK_E)
    of_pool = problem.num_slots * sizes.H * cdiv(sizes.E, sizes.BLOCK_E)
    no_turns: tuple[Tensor | None, ...] = () if plan.roles else (None,)
    is_chained, may_be_long = plan.chained, sizes.LONG > 0

    def run(t: Prefill, between: Tensor | None = None) -> None:
        turns = no_turns
        if is_chained:
            between = new_states()
            turns = (torch.zeros(tiles, dtype=torch.int32, device=device),)
        elif may_be_long and t.slots is not None:
            turns = (counters.of(t.final, of_pool),)
        launch(
            *given(t), t.slopes, t.cu_seqlens, t.slots, t.has_initial, t.initial, t.final, between, *turns,
            t.positions, t.snapshot_slots,
        )  # fmt: skip

    return run


def _most_summed(heads: Heads) -> int:
    """Segments of a sequence whose states the kernel by roles sums by itself: of more, a launch carries them.

    On an H100, 16384 tokens, us by itself and by a launch: 32 heads of 64, of 4 segments, 118 and 121; of 8 segments, 8
    heads of 128 85.2 and 84.4, 4 60 and 56.
    """
    # A larger state leaves no registers for another.
    return 4 if heads.head_qk <= 128 else 0


def _with_segments(
    problem: PrefillProblem, plan: PrefillPlan, sizes: Sizes, device: torch.device, main: MainPrefill
) -> Callable[[Prefill], None]:
    """Segments in parallel, after the one or two launches that make the states between them."""
    strides, segment, most_summed = _strides(problem), plan.segment, sizes.SUMMED
    sizes = sizes._replace(SUMMED=0, SHARED=False, APART=False, LONG=0, IN_TURN=0)
    counts = (problem.rows, problem.sequences, problem.num_slots)
    # A sequence has states to carry if it is longer than a segment: see schedule.carried_slot.
    chains = _chains(problem, segment)
    states = problem.rows // segment + chains if chains and problem.ragged else chains * cdiv(problem.rows, segment)
    # Of which the last of a sequence is nobody's: of a ragged batch only the device knows how many there are.
    passed = states if problem.ragged else states - chains
    own = _own_states_launch(problem, plan, sizes, strides, passed, device)
    # Small tiles: the chain of a sequence's segments is latency alone. One kernel whatever stages the others have.
    part = plan.part or segment
    small = sizes._replace(BLOCK_E=16, BLOCK_D=min(32, sizes.BLOCK_D), STAGES=1, PART=part, WARPS=4)
    grid = (cdiv(sizes.E, 16) * cdiv(sizes.D, small.BLOCK_D) * sizes.H * chains, 1, 1)
    carry_strides = Strides(initial=strides.initial, carried=strides.carried)
    carry = Launch(
        carried.carry_states, grid, (*counts, carry_strides, small), device, num_warps=2,
        dependent_launch=sizes.DEPENDENT_LAUNCH,
    )  # fmt: skip
    size = (states, sizes.H, sizes.E, _carried_rows(sizes.D))
    new_states = _workspace(size, device)
    new_own = new_states if part == segment else _workspace((segment // part, *size), device)
    is_carried = states > most_summed * chains

    def run(t: Prefill) -> None:
        between, slopes, cu, slots = new_own(), t.slopes, t.cu_seqlens, t.slots
        if states:
            own(t.k, t.v, slopes, cu, slots, between)
        if is_carried:
            of_parts = between
            if part < segment:
                between = new_states()
            carry(slopes, cu, slots, t.has_initial, t.initial, of_parts, between)
        main(t, between)

    return run


def _own_states_launch(
    problem: PrefillProblem, plan: PrefillPlan, sizes: Sizes, strides: Strides, passed: int, device: torch.device
) -> Callable[..., None]:
    """What makes the states that segments would leave had they begun from zero, whatever columns the plan has."""
    sizes = sizes._replace(BLOCK_E=min(plan.block_e, 64))
    tiles = cdiv(sizes.E, sizes.BLOCK_E) * sizes.H * passed
    arguments = (problem.rows, problem.sequences, problem.num_slots, problem.scale, Strides(carried=strides.carried))
    if plan.hopper and not plan.bf16x6:
        from lightning_attn.kernels import hopper_states

        # As many chunks as shared memory has room for.
        stages = min(8, 216 // (8 + 8 * cdiv(sizes.D, 64)))
        boxes = [tma_box(operand, plan.chunk, 64) for operand in (problem.k, problem.v)]
        part = plan.part or plan.segment
        sizes = sizes._replace(BLOCK_D=64, STAGES=stages, WARPS=4, PART=part)
        grid = (tiles * (plan.segment // part), 1, 1)
        more = {}
        if sizes.D <= 128:
            # Two programs an SM.
            more = {"maxnreg": 128}
            sizes = sizes._replace(STAGES=min(8, 108 // (8 + 8 * cdiv(sizes.D, 64))))
        return TmaLaunch(hopper_states.segment_states, grid, (*arguments, sizes), device, boxes, num_warps=4, **more)
    arguments = (*arguments[:-1], strides._replace(q=None, o=None, initial=None, final=None))
    if plan.hopper:
        from lightning_attn.kernels import hopper_float32

        kernel: Any = hopper_float32.segment_states
    else:
        kernel = chunked.segment_states
    stages = min(3, plan.num_stages)
    rest = (*arguments, sizes._replace(STAGES=stages))
    return Launch(kernel, (tiles, 1, 1), rest, device, num_warps=plan.num_warps, num_stages=stages)


def _with_snapshots(
    prefill: Callable[[Prefill], None], problem: PrefillProblem, sizes: Sizes, strides: Strides, device: torch.device
) -> Callable[[Prefill], None]:
    """The prefill, and then what advances snapshots from whole chunks to their positions."""
    block_d = max(16, power_of_two_at_least(sizes.D))
    grid = (cdiv(sizes.E, 64) * sizes.H * problem.sequences * problem.snapshots, 1, 1)
    sizes = sizes._replace(BLOCK_D=block_d, BLOCK_E=64, STAGES=1, IN_TURN=0, SHARED=False, WARPS=4)
    of_tokens = DecodeStrides(k=strides.k, v=strides.v, pool=strides.final)
    rest = (problem.rows, problem.num_slots, problem.snapshots, of_tokens, sizes)
    finish = Launch(recurrent.finish_snapshots, grid, rest, device, num_warps=8)

    def run(t: Prefill) -> None:
        prefill(t)
        finish(t.k, t.v, t.slopes, t.cu_seqlens, t.slots, t.final, t.positions, t.snapshot_slots)

    return run


def _prepare_tokens(problem: DecodeProblem, plan: DecodePlan | None, device: torch.device) -> Callable[..., None]:
    """What takes a few tokens one by one, called with q, k, v, pool, slots, slopes, accepted and out by position."""
    if problem.sequences == 0 or problem.tokens == 0:
        return launch_nothing
    if plan is None:
        limits = device_limits(device)
        plan = narrowed(plan_decode(problem.heads, limits), problem.heads, problem.sequences, limits)
    heads = problem.heads
    sizes = _sizes(heads, PrefillPlan(1, plan.block_e, 0, 1, 1, max(16, power_of_two_at_least(heads.head_qk))))
    q, o = (_NO_ROWS if strides is None else RowStrides(*strides) for strides in (problem.q, problem.o))
    strides = DecodeStrides(q, RowStrides(*problem.k), RowStrides(*problem.v), StateStrides(*problem.pool), o)
    grid = (cdiv(sizes.E, sizes.BLOCK_E) * sizes.H * problem.sequences, 1, 1)
    kernel = recurrent.decode
    if plan.hopper:
        # Gluon, which comes with the Triton that device_limits found.
        from lightning_attn.kernels import hopper_tokens

        kernel = hopper_tokens.decode
        sizes = sizes._replace(WARPS=plan.num_warps, STATE_D=problem.pool[2], STATE_E=problem.pool[3], LINES=plan.lines)
    rest = (
        problem.num_slots, problem.scale, strides, problem.tokens, sizes, problem.writes, plan.dependent_launch,
    )  # fmt: skip
    # A draft's results have the bits of decoding: what is fused in one of these kernels must be in the others.
    return Launch(
        kernel, grid, rest, device, num_warps=plan.num_warps, enable_fp_fusion=bool(plan.hopper),
        dependent_launch=bool(plan.dependent_launch),
    )  # fmt: skip


def _sizes(heads: Heads, plan: PrefillPlan, problem: PrefillProblem | None = None) -> Sizes:
    is_wide = is_reversed = False
    turn = 0
    precision = None
    if problem is not None:
        if problem.dtype == "float32":
            precision = "bf16x6" if plan.bf16x6 else "ieee"
        # Of rows within a chunk and of elements within a row.
        longest = max(plan.block_d, heads.head_qk, heads.head_v)
        operands = (problem.q, problem.k, problem.v, problem.o)
        is_wide = any(max(plan.chunk * o.strides[1], longest * o.strides[3]) >= 2**31 for o in operands)
        is_reversed, turn = problem.reversed, problem.in_turn
    num_heads = heads.num_heads
    return Sizes(
        num_heads, num_heads // heads.num_heads_qk, num_heads // heads.num_heads_v, heads.head_qk, heads.head_v,
        plan.block_d, plan.block_e, plan.chunk, plan.segment, plan.num_stages, is_reversed, is_wide, precision,
        plan.dependent_launch, plan.chained, plan.num_warps if plan.hopper else Sizes._field_defaults["WARPS"],
        IN_TURN=turn,
    )  # fmt: skip


def _strides(problem: PrefillProblem) -> Strides:
    heads = problem.heads
    q, k, v, o = (RowStrides.of(operand.strides) for operand in (problem.q, problem.k, problem.v, problem.o))
    initial, final = (
        NO_STATES if strides is None else StateStrides(*strides) for strides in (problem.initial, problem.final)
    )  # fmt: skip
    rows = _carried_rows(heads.head_qk)
    state = rows * heads.head_v
    return Strides(q, k, v, o, initial, final, StateStrides(heads.num_heads * state, state, 1, rows))


def _workspace(size: tuple[int, ...], device: torch.device) -> Callable[[], Tensor]:
    """What allocates states in float32."""
    return allocator(torch.empty(size, dtype=torch.float32, device="meta"), device)


def _carried_rows(head_qk: int) -> int:
    """Rows of a state between segments: a stride of which Triton knows that it is a multiple of 16."""
    return cdiv(head_qk, 16) * 16


def _segments(problem: PrefillProblem, plan: PrefillPlan) -> int:
    """Programs a head and tile: one a sequence and, ragged, one for the rows of none; or as many for segments, or their
    shares.
    """
    if not plan.segment:
        return problem.sequences + problem.ragged
    shares = plan.shares if may_share(problem, plan.segment) else 1
    if problem.ragged:
        return (problem.rows // plan.segment + problem.sequences + 1) * shares
    return problem.sequences * cdiv(problem.rows, plan.segment) * shares


def _chains(problem: PrefillProblem, segment: int) -> int:
    """How many sequences may be longer than a segment."""
    if problem.rows <= segment:
        return 0
    return min(problem.sequences, problem.rows // segment) if problem.ragged else problem.sequences


def keep_state(history: Tensor | None, state: Any) -> None:
    """The state after no tokens: [b, h, d, e] or [b, h, 1, d, e], either as the other."""
    if history is None:
        state.zero_()
    else:
        state.copy_(history.view(state.shape))
