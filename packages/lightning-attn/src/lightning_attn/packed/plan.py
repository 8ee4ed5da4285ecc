"""The plan of states without outputs."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_reference.integers import is_power_of_two, power_of_two_at_least
from kernel_reference.plans import Plan
from lightning_attn.plan import DeviceLimits, Heads, Operand, Strides


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


@dataclass(frozen=True)
class StatePlan(Plan):
    """States alone: programs take ``segment`` tokens, ``chunk`` at a time, for ``block_d`` x ``block_e`` of a state.

    ``bf16x6``: float32 is multiplied as six products of bfloat16, without it on no tensor core.
    """

    chunk: int
    block_d: int
    block_e: int
    segment: int
    num_warps: int
    num_stages: int
    bf16x6: bool = False

    def covers(self, heads: Heads) -> bool:
        """Whether its blocks are such that a kernel can take them: any heads will do."""
        del heads
        if not is_power_of_two(self.chunk, self.block_d, self.block_e, self.num_warps):
            return False
        blocks = min(self.chunk, self.block_d, self.block_e)
        return blocks >= 16 and self.num_stages >= 1 and self.segment >= 1 and self.segment % self.chunk == 0


def plan_state(heads: Heads, is_float32: bool, limits: DeviceLimits) -> StatePlan:
    """The plan for states without outputs on this device."""
    longest = power_of_two_at_least(max(16, heads.head_qk, heads.head_v))
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
