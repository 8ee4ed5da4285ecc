"""How the work is laid over a device: pure functions from a problem and the device's limits to a launch plan.

A plan is a value: it can be built, printed and tested on a machine with no GPU, and pinned by a caller with ``plan=``.
None depends on how many sequences a call has, nor on their lengths, so that a sequence's result has the same bits
whatever its neighbours are.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Heads:
    """The heads of a call: the lesser of ``num_heads_qk`` and ``num_heads_v`` divides the greater."""

    num_heads_qk: int
    num_heads_v: int
    head_qk: int
    head_v: int

    @property
    def num_heads(self) -> int:
        """Heads of the outputs and of the states."""
        return max(self.num_heads_qk, self.num_heads_v)


@dataclass(frozen=True)
class DeviceLimits:
    """What the plan needs to know of a processor.

    ``cores`` are multiprocessors (compute units); ``shared_memory`` is the most that a program may use, in bytes.
    ``hopper``: sm_90, with its tensor memory accelerator and warpgroup products, and a Triton that brings Gluon;
    ``blackwell``: sm_100 and later.
    ``dependent_launch``: a kernel can be started before the one ahead of it has ended, and wait on the device.
    """

    cores: int
    shared_memory: int = 64 * 1024
    hopper: bool = False
    blackwell: bool = False
    dependent_launch: bool = False


@dataclass(frozen=True)
class PrefillPlan:
    """One walk over the tokens of every sequence, ``chunk`` tokens and ``block_e`` columns of a state at a time.

    A program holds those columns in pieces of ``block_d`` rows. ``chunk`` 1: token by token. ``segment`` 0: a program
    walks a whole sequence. Otherwise programs walk pieces of that many tokens at the same time, after two smaller
    launches that make the states between them. ``hopper``: by the kernel made for sm_90.
    """

    chunk: int
    block_e: int
    segment: int
    num_warps: int
    num_stages: int
    block_d: int = 128
    hopper: bool = False

    def as_ints(self) -> list[int]:
        """The plan as a torch op takes it."""
        return [int(number) for number in astuple(self)]

    def covers(self, heads: Heads) -> bool:
        """Whether its blocks are such that a kernel can take them, for these heads."""
        if not (_is_power_of_two(self.chunk, self.block_d, self.block_e, self.num_warps) and self.num_stages >= 1):
            return False
        if min(self.block_d, self.block_e) < 16 or self.segment < 0 or self.segment % self.chunk:
            return False
        if self.chunk == 1:
            return self.block_d >= heads.head_qk and not self.segment and not self.hopper
        if self.chunk < 16:
            return False
        return not self.hopper or (
            fits_hopper(heads)
            and self.chunk == self.block_e == 64
            and self.block_d == heads.head_qk
            and self.num_warps == 4
            and self.num_stages >= 2
        )


@dataclass(frozen=True)
class DecodePlan:
    """One launch over a few tokens of every sequence: a program takes ``block_e`` columns of a state."""

    block_e: int
    num_warps: int
    dependent_launch: bool = False

    def as_ints(self) -> list[int]:
        """The plan as a torch op takes it."""
        return [int(number) for number in astuple(self)]

    def covers(self, heads: Heads) -> bool:
        """Whether its blocks are such that a kernel can take them: any heads will do."""
        del heads
        return _is_power_of_two(self.block_e, self.num_warps) and self.block_e >= 16


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two_at_least(n: int) -> int:
    """The smallest power of two that is >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def _is_power_of_two(*numbers: int) -> bool:
    return all(number >= 1 and number & (number - 1) == 0 for number in numbers)


def fits_hopper(heads: Heads) -> bool:
    """Whether heads are of sizes that the kernel for sm_90 is written for: its state has 64 rows of 64 or 128."""
    return heads.head_qk in (64, 128) and heads.head_v % 64 == 0


def plan_prefill(
    heads: Heads,
    multiplied_as_16_bits: bool,
    limits: DeviceLimits,
    hopper: bool = False,
    snapshots: bool = False,
) -> PrefillPlan:
    """The plan for q, k and v of these heads on this device.

    ``multiplied_as_16_bits``: bfloat16; float16 and float32 are multiplied in 32 bits, token by token. ``hopper``:
    strides and alignment are such that the tensor memory accelerator can address the tensors. ``snapshots``: some are
    wanted.
    """
    if hopper and limits.hopper and multiplied_as_16_bits and fits_hopper(heads):
        # Measured on an H200, 64 heads x 128 and 131072 tokens: 2 stages 3.17 ms, 3 stages 2.26, 4 stages 2.05.
        return PrefillPlan(64, 64, _segment(heads, 64, limits), 4, 4, block_d=heads.head_qk, hopper=True)
    if not multiplied_as_16_bits:
        # A warp alone needs no barrier when it sums a token's output, but holds no more than 128 rows.
        block_d = max(16, power_of_two_at_least(heads.head_qk))
        return PrefillPlan(1, 16, 0, max(1, block_d // 128), 1, block_d=block_d)
    # The largest tiles whose state, scores and operands stay in a thread's registers, as the compiler reports them.
    block_e = 16 if heads.head_qk > 128 or limits.blackwell or snapshots else 32
    block_d = min(64, max(16, power_of_two_at_least(heads.head_qk)))
    block_e = min(block_e, max(16, power_of_two_at_least(heads.head_v)))
    stages = 2 if limits.shared_memory > 64 * 1024 else 1
    return PrefillPlan(32, block_e, _segment(heads, block_e, limits), 4, stages, block_d)


def _segment(heads: Heads, block_e: int, limits: DeviceLimits) -> int:
    """Tokens of a segment: 0 where one sequence alone keeps the device busy, or nearly."""
    if 4 * heads.num_heads * cdiv(heads.head_v, block_e) >= 3 * limits.cores:
        return 0
    # The states between segments then take 3 % of the bytes of q, k, v and o in 16 bits.
    return 16 * power_of_two_at_least(max(heads.head_qk, heads.head_v))


def plan_decode(heads: Heads, limits: DeviceLimits) -> DecodePlan:
    """The plan for a few tokens of every sequence on this device."""
    # Made for many sequences. One alone would be quicker in smaller blocks, but a plan does not depend on how many
    # there are. benchmarks/tune.py tries the others.
    return DecodePlan(min(64, power_of_two_at_least(max(16, heads.head_v))), 4, limits.dependent_launch)
