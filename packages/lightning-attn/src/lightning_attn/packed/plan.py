"""The plan of states without outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernel_reference.integers import cdiv, is_power_of_two, power_of_two_at_least
from kernel_reference.plans import Plan
from lightning_attn.plan import DeviceLimits, Heads, Operand, Strides, fits_hopper


@dataclass(frozen=True)
class StateProblem:
    """Keys and values of which the states alone are wanted: operands, strides as for :class:`PrefillProblem`.

    ``reach``: a token whose weight in its state is exp(-reach) or less is left out.
    """

    heads: Heads
    k: Operand
    v: Operand
    initial: Strides | None
    final: Strides
    rows: int
    sequences: int
    scale: float
    reach: float
    is_float32: bool
    ragged: bool
    reversed: bool

    def suits_tma(self) -> bool:
        """Whether the kernels for sm_90 can take k and v, if they are 16-byte aligned."""
        return not self.is_float32 and self.k.suits_tma() and self.v.suits_tma()

    def forgets(self) -> bool:
        return self.reach < math.inf


@dataclass(frozen=True)
class StatePlan(Plan):
    """States alone: programs take ``segment`` tokens, ``chunk`` at a time, for ``block_d`` x ``block_e`` of a state.

    ``bf16x6``: float32 is multiplied as six products of bfloat16, without it on no tensor core. ``lanes``: by the
    kernels for sm_90, with at most so many programs for what a head remembers of a sequence; 0 by the portable ones.
    ``dependent_launch``: the second of those is begun before the first has ended.
    """

    chunk: int
    block_d: int
    block_e: int
    segment: int
    num_warps: int
    num_stages: int
    bf16x6: bool = False
    lanes: int = 0
    dependent_launch: bool = False

    def covers(self, heads: Heads) -> bool:
        """Whether its blocks are such that a kernel can take them; any heads will do, but for those of sm_90."""
        if self.lanes:
            fits = fits_hopper(heads) and self.lanes > 0 and self.segment > 0 and self.segment % self.chunk == 0
            tiles = (self.chunk, self.block_d, self.block_e, self.num_warps)
            if self.bf16x6:
                return fits and tiles == (64, 64, 64, 8) and self.num_stages == 1
            return fits and tiles == (64, 64, 64, 4) and 1 <= self.num_stages <= most_stages(heads)
        if not is_power_of_two(self.chunk, self.block_d, self.block_e, self.num_warps):
            return False
        blocks = min(self.chunk, self.block_d, self.block_e)
        return blocks >= 16 and self.num_stages >= 1 and self.segment >= 1 and self.segment % self.chunk == 0


def most_stages(heads: Heads) -> int:
    """Chunks that shared memory has room for: of small heads of two programs an SM, which read as fast as it can."""
    room = 108 if heads.head_qk <= 128 else 216
    return min(8, room // (8 + 8 * cdiv(heads.head_qk, 64)))


def plan_state(
    heads: Heads, is_float32: bool, limits: DeviceLimits, suits_tma: bool = False, forgets: bool = False
) -> StatePlan:  # fmt: skip
    """The plan for states without outputs on this device.

    ``suits_tma``: as ``StateProblem.suits_tma`` says, and aligned. ``forgets``: what heads have is left out.
    """
    longest = power_of_two_at_least(max(16, heads.head_qk, heads.head_v))
    is_by_lanes = forgets and limits.hopper and fits_hopper(heads)
    if is_by_lanes and is_float32 and limits.bf16:
        return StatePlan(64, 64, 64, 512, 8, 1, True, 8, limits.dependent_launch)
    if is_by_lanes and suits_tma:
        # On an H200, 64 heads that remember up to 6144 tokens: of 128 24.9 us, by 512 tokens 29.1, by 768 26.3, by 2048
        # 27.4; of 64 14.4, by 512 15.1; of 256 61.3, by 4096 57.0, but 16 heads and four sequences 68.9 and 72.2.
        segment, lanes = max(1024, 8 * longest), 8
        if longest <= 128 and 4 * heads.num_heads * cdiv(heads.head_v, 64) >= 3 * limits.cores:
            # Fewer lanes fill the device. There, by 1024, 1280 and 1536 tokens: one sequence 23.9, 23.2 and 23.5, 16 of
            # 4096 204, 199 and 188; but one at 8 heads of 128 13.2 and 13.9, at 64 of 64 13.9 and 14.6.
            segment, lanes = 1536, 6
        return StatePlan(64, 64, 64, segment, 4, most_stages(heads), False, lanes, limits.dependent_launch)
    # Sums of segments that are not the whole state then take 6 % of the bytes of k and v in 16 bits, twice.
    segment = 16 * longest
    widest = 64 if is_float32 else 128
    block_d, block_e = (
        min(widest, power_of_two_at_least(max(16, size))) for size in (heads.head_qk, heads.head_v)
    )  # fmt: skip
    if is_float32:
        return StatePlan(32, block_d, block_e, segment, 4, 2, limits.bf16)
    num_warps = 8 if block_d * block_e > 64 * 128 else 4
    stages = 3 if limits.shared_memory > 64 * 1024 else 2
    return StatePlan(64, block_d, block_e, segment, num_warps, stages)


def in_one_launch(problem: StateProblem, plan: StatePlan) -> bool:
    """Whether the last program of a state's lanes adds them up, without a launch behind, with the same bits.

    On an H200, us by two launches and by one, 64 heads of 128: 256 sequences of 256 tokens 1005 and 848, 16 of 4096 206
    and 204 (H100 268 and 252), 13 unlike ones 118 and 116; but one of 65536 23.9 and 26.6, 4 of 16384 65.3 and 68.0. Of
    larger heads, whose programs go round lanes, where most have one: 64 of 256, 16 of 1024 334 and 293, but 4 of 4096
    133 and 138. In float32 16 of 4096 790 and 811.
    """
    is_short = problem.heads.head_qk <= 128 or problem.rows <= problem.sequences * plan.segment
    return problem.sequences >= 8 and not plan.bf16x6 and is_short
