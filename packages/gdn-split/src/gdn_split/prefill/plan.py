"""What plan.py does, for the inputs of a chunked delta rule and their gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gdn_split.plan import MAX_PROGRAMS, DeviceLimits, GroupShape
from kernel_reference.integers import cdiv, is_power_of_two, power_of_two_at_least
from kernel_reference.plans import Plan


@dataclass(frozen=True)
class PrefillProblem:
    """The inputs of a chunked delta rule, of ``rows`` rows in ``sequences``; strides as for a step.

    ``conv_strides`` None: no sequence has a slot. ``initial``: whether any begins with what lies there. ``chunk``: over
    which g is summed, or 0.
    """

    shape: GroupShape
    rows: int
    sequences: int
    num_slots: int
    strides: tuple[int, int]
    conv_strides: tuple[int, ...] | None
    weight_strides: tuple[int, ...]
    width: int
    interleaved: bool
    silu: bool
    qk_norm: bool
    initial: bool
    chunk: int


@dataclass(frozen=True)
class PrefillPlan(Plan):
    """One launch over packed sequences: a program takes ``rows`` rows of one head, or ``rows_ba`` rows of all gates.

    ``walk``: rows of one head that a program walks, a few at a time, where none of them is among a sequence's first;
    others it takes ``rows`` at a time. 0: a program takes ``rows`` once. ``max_registers`` as for a step. ``ahead``:
    rows that are loaded before the first of them is computed.
    """

    rows: int
    rows_ba: int
    num_warps: int
    dependent_launch: bool = False
    walk: int = 0
    max_registers: int = 0
    ahead: int = 4

    def covers(self, problem: PrefillProblem) -> bool:
        """Whether a kernel can take these steps, and its programs can be counted."""
        if not is_power_of_two(self.rows, self.rows_ba, self.num_warps):
            return False
        if self.walk and (not is_power_of_two(self.walk) or self.walk < max(4, self.rows)):
            return False
        if problem.chunk and self.rows_ba != problem.chunk:
            return False
        return prefill_programs(problem, self) <= MAX_PROGRAMS


@dataclass(frozen=True)
class PrefillBackwardPlan(Plan):
    """The gradients of that: a program walks ``steps`` rows of a head, the last of which are the next one's first.

    ``rows_ba``: rows of a program of gates, which has four warps. ``max_registers`` as for a step. ``ahead``: how many
    rows ahead of a walk its rows are prefetched into L2 (NVIDIA from sm_90 on), a multiple of four; 0: they are
    not. ``lag``: how many runs behind the walks the programs are that copy the gradient of z.
    """

    steps: int
    rows_ba: int
    num_warps: int
    max_registers: int = 0
    dependent_launch: bool = False
    ahead: int = 0
    lag: int = 0

    def programs(self, problem: PrefillProblem) -> tuple[int, int]:
        """Programs of gates, and walks of a head."""
        return cdiv(problem.rows, self.rows_ba), cdiv(problem.rows, self.steps - problem.width + 1)


def prefill_programs(problem: PrefillProblem, plan: PrefillPlan) -> int:
    """Programs of heads and of gates."""
    units = 2 * problem.shape.num_heads_qk + 2 * problem.shape.num_heads_v
    return cdiv(problem.rows, plan.rows_ba) + cdiv(problem.rows, plan.walk or plan.rows) * units


def plan_prefill(problem: PrefillProblem, limits: DeviceLimits) -> PrefillPlan:
    """The plan for the inputs of a chunked delta rule on this device."""
    block = power_of_two_at_least(max(problem.shape.head_qk, problem.shape.head_v))
    # 16 elements a thread of four warps, four times: more would leave an SM with few programs. Of few rows less.
    rows = min(64, max(1, 2048 // block))
    units = 2 * problem.shape.num_heads_qk + 2 * problem.shape.num_heads_v
    while rows > 4 and cdiv(problem.rows, rows) * units < 4 * limits.cores:
        rows //= 2
    # With sums over chunks the block of gates holds the rows before it too, and is as long as they are.
    rows_ba = problem.chunk or 64
    while cdiv(problem.rows, rows) * units > MAX_PROGRAMS // 2:
        rows *= 2
    plan = PrefillPlan(rows, rows_ba, num_warps=4, dependent_launch=limits.dependent_launch)
    # Qwen3-Next on an H200, a copy, these walks, none: 8192 rows of one sequence 100, 112, 138 us; of
    # seven 100, 112, 151; of 64 100, 119, -; of 256 100, 131, 158; 8000 of 1000 98, 153, 171; 512 of one 8, 15, 12.
    # With eight rows ahead, not four: 8192 rows of one sequence 109.5, of seven 110, of 64 118, of 256 130.5, 32768
    # rows of 256 443, not 451; but 2048 rows 30.3, not 30.1, and 1024 18.9, not 18.3.
    if block == 128 and problem.rows >= max(1024, 8 * problem.sequences):
        limit = 96 if limits.register_limit else 0
        ahead = 8 if problem.rows >= 8000 else 4
        plan = replace(plan, rows=2, num_warps=1, walk=16, max_registers=limit, ahead=ahead)
    return plan


def plan_prefill_backward(problem: PrefillProblem, limits: DeviceLimits) -> PrefillBackwardPlan:
    """The plan for the gradients of these on this device."""
    block = power_of_two_at_least(max(problem.shape.head_qk, problem.shape.head_v))
    units = 2 * problem.shape.num_heads_qk + 2 * problem.shape.num_heads_v
    # Four channels a thread: of each its weights, their gradients and the last few rows are kept too.
    # Qwen3-Next's 8192 rows on an H200: walks of 64 rows 198 us, of 128 209, of 256 240; in seven sequences 201, 213.
    num_warps, steps = min(8, max(1, block // 128)), 64 if problem.rows <= 8192 else 128
    while steps > 16 and cdiv(problem.rows, steps) * units * num_warps < 32 * limits.cores:
        steps //= 2
    # Of z last, on an H100, a copy 179 us: 8192 rows 224.9, 32 runs behind 221.1, 64 215.9, all 217.2; of seven
    # sequences 225.1, 222.8, 216.7, 217.8, of 64 240.5, 238.5, 233.2, 228.8; 32768 rows 828, 813, 808, 814.
    lag = 64 if problem.rows >= 2048 else 0
    while (cdiv(problem.rows, steps - 3) + lag) * units > MAX_PROGRAMS:
        steps *= 2
    # Some 155 otherwise, of which an SM holds 12 programs rather than 16.
    max_registers = 128 if num_warps == 1 and limits.register_limit else 0
    # 8192 rows on an H100, 12 ahead and none: heads of 64 128.8, 141.4 us, of 96 196.6, 207.7, of 256 152.0, 160.1; but
    # of 128, whose walks wait the least for memory, 250.1, 232.9 (on an H200 185.8, 192.9), 4 ahead 229.3; in seven
    # sequences 229.5 for 233.6, in 64 262.9 for 268.8. 32768 rows 908 for 830, 512 rows 35.0 for 33.2.
    ahead = 4 if steps <= 64 else 0
    if (problem.shape.head_qk, problem.shape.head_v) != (128, 128):
        ahead = 12
    if problem.rows < 2048:
        ahead = 0
    return PrefillBackwardPlan(
        steps, problem.chunk or 64, num_warps, max_registers, limits.dependent_launch, ahead, lag
    )
