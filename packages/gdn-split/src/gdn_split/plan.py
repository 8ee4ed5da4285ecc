"""How the work is laid over a device: pure functions from a problem and the device's limits to a launch plan.

A plan is a value: it can be built, printed and tested on a machine with no GPU, and pinned by a caller with ``plan=``.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from math import gcd

MAX_PROGRAMS = 2**31 - 1


@dataclass(frozen=True)
class GroupShape:
    """The sizes of one rank's projection: ``num_heads_v`` must be a multiple of ``num_heads_qk``."""

    num_heads_qk: int
    num_heads_v: int
    head_qk: int
    head_v: int

    @property
    def ratio(self) -> int:
        """Value heads of one QK head."""
        return self.num_heads_v // self.num_heads_qk

    @property
    def qkv_width(self) -> int:
        """Elements in a row of mixed_qkv."""
        return 2 * self.num_heads_qk * self.head_qk + self.num_heads_v * self.head_v

    @property
    def qkvz_width(self) -> int:
        """Elements in a row of mixed_qkvz."""
        return self.qkv_width + self.num_heads_v * self.head_v

    @property
    def ba_width(self) -> int:
        """Elements in a row of mixed_ba."""
        return 2 * self.num_heads_v


@dataclass(frozen=True)
class DeviceLimits:
    """What the plan needs to know of a processor.

    ``cores`` are NVIDIA's multiprocessors or an NPU's vector cores; ``on_chip_bytes`` is the buffer a core works in;
    ``programs_per_core`` is how many programs a core keeps in flight to hide memory latency: 1 where it must be given
    one long program instead. ``dependent_launch``: a kernel can be started before the one ahead of it has ended, and
    wait on the device (NVIDIA from sm_90 on).
    """

    cores: int
    on_chip_bytes: int = 85 * 1024
    programs_per_core: int = 1
    dependent_launch: bool = False


@dataclass(frozen=True)
class SplitPlan:
    """One launch of the split or of the merge.

    ``rows_per_program`` 0: a program takes ``rows_per_step`` rows of one head group, or ``rows_per_step_ba`` rows of b
    and a. Otherwise a program walks that many adjacent rows, whole, ``rows_per_step`` at a time.
    """

    programs: int
    rows_per_program: int
    rows_per_step: int
    rows_per_step_ba: int
    num_warps: int
    dependent_launch: bool = False

    def as_ints(self) -> list[int]:
        """The plan as a torch op takes it."""
        return [int(number) for number in astuple(self)]


@dataclass(frozen=True)
class ConvPlan:
    """One launch of the split with convolution: a program takes ``sequences_per_program`` through ``block`` columns."""

    programs: int
    sequences_per_program: int
    block: int
    rows_per_step_ba: int
    num_warps: int
    dependent_launch: bool = False

    def as_ints(self) -> list[int]:
        """The plan as a torch op takes it."""
        return [int(number) for number in astuple(self)]


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two_at_most(n: int) -> int:
    """The largest power of two that is <= n, for n >= 1."""
    return 1 << (n.bit_length() - 1)


def power_of_two_at_least(n: int) -> int:
    """The smallest power of two that is >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def plan_split(rows: int, shape: GroupShape, row_bytes: int, limits: DeviceLimits) -> SplitPlan:
    """The plan for ``rows`` rows of ``row_bytes`` bytes (mixed_qkvz and mixed_ba together) on this device."""
    if limits.programs_per_core == 1:
        return _one_program_a_core(rows, row_bytes, limits)
    return _one_program_a_tile(rows, shape, row_bytes, limits)


def _one_program_a_core(rows: int, row_bytes: int, limits: DeviceLimits) -> SplitPlan:
    rows_per_program = max(1, cdiv(rows, limits.cores))
    # What a step reads and what it writes are in the buffer together. Rounded down: a tile has a power of two rows.
    fitting = max(1, limits.on_chip_bytes // (2 * row_bytes))
    rows_per_step = min(64, power_of_two_at_most(fitting), power_of_two_at_least(rows_per_program))
    return SplitPlan(cdiv(rows, rows_per_program), rows_per_program, rows_per_step, rows_per_step, num_warps=4)


def _one_program_a_tile(rows: int, shape: GroupShape, row_bytes: int, limits: DeviceLimits) -> SplitPlan:
    in_flight = limits.cores * limits.programs_per_core
    group_bytes = max(1, row_bytes // shape.num_heads_qk)
    # Measured on an H200: 4 KiB and two warps a program are best up to 1024 tokens of Qwen3-Next, twice that from 8192
    # on (by 1 to 2 %).
    tile_bytes = 8192 if rows * shape.num_heads_qk > 16 * in_flight else 4096
    rows_per_step = min(64, power_of_two_at_most(max(1, tile_bytes // group_bytes)))
    rows_per_step_ba = min(64, 4 * rows_per_step)
    while True:
        programs = cdiv(rows, rows_per_step_ba) + cdiv(rows, rows_per_step) * shape.num_heads_qk
        if programs <= MAX_PROGRAMS:
            return SplitPlan(programs, 0, rows_per_step, rows_per_step_ba, tile_bytes // 2048, limits.dependent_launch)
        rows_per_step, rows_per_step_ba = 2 * rows_per_step, 2 * rows_per_step_ba


def plan_conv(sequences: int, tokens: int, shape: GroupShape, limits: DeviceLimits) -> ConvPlan:
    """The plan for ``sequences`` sequences of ``tokens`` tokens each on this device."""
    widths = (shape.head_qk, shape.ratio * shape.head_v)
    # Tiles that divide both widths need no mask; where only tiny ones do, one masked tile of each is better.
    block = min(128, gcd(*widths) & -gcd(*widths))
    if block < 32:
        block = min(256, power_of_two_at_least(max(widths)))
    tiles = 2 * sum(cdiv(width, block) for width in widths) * shape.num_heads_qk
    # Sequences of one program share a load of the weights. On an H200 with Qwen3-Next: 1 and four warps up to 16
    # sequences (2.3 us), 2 at 64 (4.2 us) and 4 at 256 (11.4 us) with one warp, which needs no barriers.
    crowd = sequences * tiles // (2 * limits.cores * max(4, limits.programs_per_core))
    sequences_per_program = min(4, power_of_two_at_most(max(1, crowd)))
    num_warps = 4 if sequences_per_program == 1 else 1
    rows_per_step_ba = min(64, 16 * sequences_per_program)
    while True:
        programs = cdiv(sequences * tokens, rows_per_step_ba) + cdiv(sequences, sequences_per_program) * tiles
        if programs <= MAX_PROGRAMS:
            return ConvPlan(
                programs, sequences_per_program, block, rows_per_step_ba, num_warps, limits.dependent_launch
            )
        sequences_per_program, rows_per_step_ba = 2 * sequences_per_program, 2 * rows_per_step_ba
