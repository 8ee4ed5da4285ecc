"""How the work is laid over a device: pure functions from a problem and the device's limits to a launch plan.

A plan is a value: it can be built, printed and tested on a machine with no GPU, and pinned by a caller with ``plan=``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from kernel_reference.integers import (
    cdiv,
    is_power_of_two,
    power_of_two_at_least,
    power_of_two_at_most,
    power_of_two_in,
)
from kernel_reference.plans import Plan

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
class MoveProblem:
    """A split, or a merge: rows between fused projections and parts.

    ``strides``: row strides of mixed_qkvz, mixed_ba, mixed_qkv, z, b and a. ``row_bytes``: of mixed_qkvz and mixed_ba
    together. ``as_integers``: of dtypes that Triton cannot name, or would change.
    """

    shape: GroupShape
    rows: int
    row_bytes: int
    strides: tuple[int, ...]
    interleaved: bool
    merge: bool
    as_integers: bool


@dataclass(frozen=True)
class ConvProblem:
    """A split with a convolution of ``tokens`` new tokens of each sequence.

    ``strides`` as for a move; ``state_strides`` (slot, channel, tap); ``weight_strides`` (channel, tap).
    ``as_integers``: mixed_ba, b and a are.
    """

    shape: GroupShape
    sequences: int
    tokens: int
    num_slots: int
    strides: tuple[int, ...]
    state_strides: tuple[int, ...]
    weight_strides: tuple[int, ...]
    width: int
    interleaved: bool
    has_bias: bool
    silu: bool
    as_integers: bool

    @property
    def taps_adjacent(self) -> bool:
        """Whether a channel's taps lie together in the state."""
        _, channel, tap = self.state_strides
        return tap == 1 and channel > 1

    @property
    def in_vectors(self) -> bool:
        """Whether the state keeps three taps, and those of a channel lie together, and all channels, or channels do."""
        _, channel, tap = self.state_strides
        return self.width == 4 and ((channel, tap) == (3, 1) or channel == 1)


@dataclass(frozen=True)
class StepProblem:
    """A decode step, or the verification or the commit of drafts: ``tokens`` of each sequence through the whole layer.

    ``strides``: row strides of mixed_qkvz and mixed_ba. ``conv_strides`` (slot, channel, tap); ``weight_strides``
    (channel, tap); ``state_strides`` (slot, head, Dk, Dv); ``out_strides`` (row, head), None where nothing is put out.
    ``path_length``: the most tokens that may be committed.
    """

    shape: GroupShape
    sequences: int
    tokens: int
    num_slots: int
    strides: tuple[int, ...]
    conv_strides: tuple[int, ...]
    weight_strides: tuple[int, ...]
    state_strides: tuple[int, ...]
    state_bytes: int
    out_strides: tuple[int, int] | None
    width: int
    interleaved: bool
    silu: bool
    qk_norm: bool
    has_norm: bool
    scale: float
    norm_eps: float
    writes: bool
    path_length: int

    @property
    def k_inner(self) -> bool:
        """Whether the state's elements that lie together are those along Dk."""
        return self.state_strides[2] == 1 and self.state_strides[3] != 1

    @property
    def packed_state(self) -> bool:
        """Whether a head's state is one piece of memory."""
        sizes = self.shape.head_v, self.shape.head_qk
        return self.state_strides[2:] in ((sizes[0], 1), (1, sizes[1]))


@dataclass(frozen=True)
class DeviceLimits:
    """What the plan needs to know of a processor.

    ``cores`` are NVIDIA's SMs or an NPU's vector cores; ``on_chip_bytes`` is the buffer a core works in;
    ``programs_per_core`` is how many programs a core keeps in flight to hide memory latency: 1 where it must be given
    one long program instead. ``dependent_launch``: a kernel can be started before the one ahead of it has ended, and
    wait on the device (NVIDIA from sm_90 on). ``register_limit``: the compiler takes a limit of a thread's registers.
    """

    cores: int
    on_chip_bytes: int = 85 * 1024
    programs_per_core: int = 1
    dependent_launch: bool = False
    register_limit: bool = False


@dataclass(frozen=True)
class SplitPlan(Plan):
    """One launch of the split or of the merge.

    ``rows_per_program`` 0: a program takes ``rows_per_step`` rows of one head group, or ``rows_per_step_ba`` rows of b
    and a. Otherwise a program walks that many adjacent rows, whole, ``rows_per_step`` at a time; that kernel does not
    wait for the one ahead, and ``dependent_launch`` is not for it.
    """

    programs: int
    rows_per_program: int
    rows_per_step: int
    rows_per_step_ba: int
    num_warps: int
    dependent_launch: bool = False

    def covers(self, rows: int, shape: GroupShape) -> bool:
        """Whether its programs reach every row, in steps that a kernel can take, after the kernel ahead has ended."""
        if not is_power_of_two(self.rows_per_step, self.rows_per_step_ba, self.num_warps):
            return False
        if self.rows_per_program:
            walked = self.programs * self.rows_per_program
            return self.rows_per_program > 0 and walked >= rows and not self.dependent_launch
        return self.programs >= cdiv(rows, self.rows_per_step_ba) + cdiv(rows, self.rows_per_step) * shape.num_heads_qk


@dataclass(frozen=True)
class ConvPlan(Plan):
    """One launch of the split with convolution: a program takes ``sequences_per_program`` through ``block`` columns.

    ``fours``: a thread takes four adjacent channels of a state that is in vectors of these.
    """

    programs: int
    sequences_per_program: int
    block: int
    rows_per_step_ba: int
    num_warps: int
    dependent_launch: bool = False
    fours: bool = False

    def covers(self, sequences: int, tokens: int, shape: GroupShape, in_vectors: bool = False) -> bool:
        """Whether its programs reach every sequence and column, in steps that a kernel can take.

        ``in_vectors``: as a :class:`ConvProblem` says.
        """
        if self.fours and (not in_vectors or self.block < 4 or not _fits(shape, self.block)):
            return False
        if not is_power_of_two(self.sequences_per_program, self.block, self.rows_per_step_ba, self.num_warps):
            return False
        tiles = cdiv(sequences, self.sequences_per_program) * _tiles(shape, self.block)
        return self.programs >= cdiv(sequences * tokens, self.rows_per_step_ba) + tiles


@dataclass(frozen=True)
class StepPlan(Plan):
    """One launch of a decode step: a program takes ``block_v`` columns of one V head of a sequence.

    In a verification of drafts that branch it takes the head, ``block_v`` of its columns at a time.

    ``run``: elements of the state's inner dimension that a row of threads reads at a time. ``max_registers``: of a
    thread; 0 leaves them to the compiler. ``ahead``: a program fetches what the program that many behind it needs into
    the L2 cache (NVIDIA from sm_90 on, states that are one piece of memory each); 0: nothing.
    ``early``: the state is written before the outputs are normed, and of one or two tokens k and q read it together,
    before it changes. ``streams``: a state that is written is the first to leave the L2 cache. ``first``: all is loaded
    before any branch, and the state before anything is computed.
    """

    block_v: int
    run: int
    num_warps: int
    max_registers: int = 0
    dependent_launch: bool = False
    ahead: int = 0
    early: bool = False
    streams: bool = False
    first: bool = False

    def covers(self, problem: StepProblem) -> bool:
        """Whether its programs reach every column, in steps that a kernel can take."""
        if not is_power_of_two(self.block_v, self.run, self.num_warps):
            return False
        if self.ahead < 0 or (self.ahead and not problem.packed_state):
            return False
        inner = power_of_two_at_least(problem.shape.head_qk) if problem.k_inner else self.block_v
        return self.run <= inner and self.block_v <= power_of_two_at_least(problem.shape.head_v)


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


def plan_conv(
    sequences: int, tokens: int, shape: GroupShape, limits: DeviceLimits, taps_adjacent: bool = False,
    in_vectors: bool = False,
) -> ConvPlan:  # fmt: skip
    """The plan for ``sequences`` sequences of ``tokens`` tokens each on this device.

    ``taps_adjacent``, ``in_vectors``: as a :class:`ConvProblem` says. Where the first holds and channels are apart, a
    tap is read 2 bytes in every few.
    """
    widths = (shape.head_qk, shape.ratio * shape.head_v)
    # Tiles that divide both widths need no mask; where only tiny ones do, one masked tile of each is better.
    block = min(128, power_of_two_in(gcd(*widths)))
    if block < 32:
        block = min(256, power_of_two_at_least(max(widths)))
    fours = in_vectors and _fits(shape, block)
    # One sequence of Qwen3-Next makes fewer tiles of 128 than an H200 has cores: 1.39 us, of 64 with two warps 1.07.
    # These times and those below were taken with calls that overlap; one alone takes about 0.3 us more.
    if not fours and block == 128 and sequences * _tiles(shape, block) < limits.cores:
        block = 64
    tiles = _tiles(shape, block)
    # Sequences of one program share a load of the weights. Of Qwen3-Next on an H200, tap by tap, in us: 16 sequences,
    # one a program 2.4, four 2.7; 64 sequences 7.8 and 4.3; 256 sequences 30.7 and 11.7. With adjacent taps two are the
    # best. By fours, on an H100: 64 sequences by one, two and four 5.07, 4.88, 5.21, 256 15.1, 14.9, 15.5, but 16 by
    # one and two 2.38, 2.55.
    if sequences * tiles < 4 * limits.cores * max(4, limits.programs_per_core):
        sequences_per_program = 1
    else:
        sequences_per_program = 2 if taps_adjacent or fours else 4
    # A warp takes 128 channels by fours: on an H100 16 sequences 2.38 us, not 2.65 by an earlier form, whose loads of
    # channel-last states were of a channel a thread, 64 4.88, not 5.05, one 1.72, not 1.85.
    if fours:
        sequences_per_program = max(sequences_per_program, 128 // block)
    num_warps = 1 if fours else 2 if block == 64 else 4
    rows_per_step_ba = 8 if fours else 16 * sequences_per_program
    while True:
        programs = cdiv(sequences * tokens, rows_per_step_ba) + cdiv(sequences, sequences_per_program) * tiles
        if programs <= MAX_PROGRAMS:
            return ConvPlan(
                programs, sequences_per_program, block, rows_per_step_ba, num_warps, limits.dependent_launch, fours
            )
        sequences_per_program, rows_per_step_ba = 2 * sequences_per_program, 2 * rows_per_step_ba


def _fits(shape: GroupShape, block: int) -> bool:
    """Whether each tile of ``block`` columns is full."""
    return shape.head_qk % block == 0 and shape.ratio * shape.head_v % block == 0


def columns_of_z(shape: GroupShape, block: int) -> int:
    """How many columns of z a program copies whose like convolve ``block``: twice as many if that leaves none over."""
    return 2 * block if shape.ratio * shape.head_v % (2 * block) == 0 else block


def _tiles(shape: GroupShape, block: int) -> int:
    """Tiles of ``block`` columns in a row of mixed_qkvz; none holds columns of two groups, or of two of q, k, v, z."""
    width_v = shape.ratio * shape.head_v
    of_a_group = 2 * cdiv(shape.head_qk, block) + cdiv(width_v, block) + cdiv(width_v, columns_of_z(shape, block))
    return of_a_group * shape.num_heads_qk


# Elements of a state that a program holds: 64 registers of each of 256 threads, so that two programs share an SM.
_STATE_ELEMENTS = 16384


def plan_step(problem: StepProblem, limits: DeviceLimits) -> StepPlan:
    """The plan for a decode step on this device."""
    block_k, all_v = (power_of_two_at_least(size) for size in (problem.shape.head_qk, problem.shape.head_v))
    block_v = min(all_v, max(1, _STATE_ELEMENTS // block_k))
    inner = block_k if problem.k_inner else block_v
    num_warps = min(8, max(4, block_k * block_v // 2048))
    # Along Dk runs of 128 bytes, which are summed among threads. Along Dv each warp has its own.
    run = min(inner, 128 // problem.state_bytes) if problem.k_inner else min(inner, max(1, block_v // num_warps))
    slices = cdiv(problem.shape.head_v, block_v)
    programs = problem.sequences * problem.shape.num_heads_v * slices
    # Of few programs half of that, whose sums pass through fewer threads: one sequence on an H100 4.40 us, not 4.82, of
    # runs of 8 7.05, of 64 4.76.
    if problem.k_inner and problem.state_bytes == 4 and problem.tokens == 1 and programs <= limits.cores:
        run = min(run, 16)
    # Of several tokens that costs some 60 bytes of stack. With more registers, and one program an SM, 64 sequences of
    # Qwen3-Next took an H200 194 us with two tokens, and 92 with one.
    whole = block_k * block_v == _STATE_ELEMENTS
    max_registers = 128 if whole and limits.register_limit else 0
    # While there are more programs than start at once, two an SM. Of Qwen3-Next on an H200, in us without and with: 64
    # sequences 80.8 and 78.4, of bfloat16 states 57.4 and 53.9, 256 sequences 216 and 202. Float32 states push each
    # other out of the cache if fetched further ahead: 95.0 at 264. Of nearer ones 99 was the best by 0.4 us.
    ahead = 0
    # Larger heads, in slices, lose by it: 64 sequences of 8 heads of 256 96.3 us, not 94.1, of 192 58.6, not 57.6.
    many = programs > 2 * limits.cores and slices == 1
    if many and whole and limits.dependent_launch and problem.packed_state:
        ahead = limits.cores * 2 if problem.state_bytes == 2 else limits.cores * 3 // 4
    # 64 sequences 75.5 us, not 78.6, of bfloat16 states 41.0, not 45.3 (VK), one 4.4, not 4.6; of four tokens along Dk
    # 99.8, not 107.4, and along Dv 94.3, not 98.3.
    early = whole and problem.writes and problem.out_strides is not None and problem.tokens <= 4
    # Three programs of four warps an SM: 64 sequences of bfloat16 states along Dv 45.0 us, not 50.3; with 128 registers
    # 53.4. Along Dk that has not been timed.
    if early and problem.tokens == 1 and problem.state_bytes == 2 and not problem.k_inner and max_registers:
        run, num_warps, max_registers = block_v // 4, 4, 168
    # Of many programs, float32 states along Dv, one token: runs shared by two warps, on an H200 32 sequences 37.6 us,
    # not 38.0, 64 73.6, not 75.1, 256 271.7, not 278.8, 64 of 8 heads of 192 53.2, not 57.7; but 16 21.6, not 21.0. An
    # H100, whose memory is slower, gains and loses up to 1 % by it.
    short = problem.state_bytes == 2
    if early and problem.tokens == 1 and not short and not problem.k_inner and programs >= 1024:
        run = 2 * run
    # Of four tokens, programs of four warps, along Dv and of 16-bit states by longer runs: 64 sequences 88.3 us, not
    # 96.1, 256 317.8, not 339.8, 64 of 8 heads of 192 72.8, not 88.8; of 16-bit states 16 24.4, not 26.7, 64 76.2, not
    # 92.5, along Dk 70.1, not 82.2. But of few programs four sequences 11.3 us, not 10.0, of 16-bit states 10.8, not
    # 9.4, and an H100 loses 2.5 % with 32 sequences of float32 states.
    if early and problem.tokens == 4 and max_registers and programs > (2 * limits.cores if short else 1535):
        num_warps, max_registers = 4, 255
        run = min(run, block_k // 4) if problem.k_inner else block_v // 4
    # On an H100, in us, without and with: 1 sequence 4.64, 4.32, 4 8.48, 7.99, 16 26.5, 26.1, 64 103.2, 100.3, 256
    # 393.9, 383.2; of bfloat16 states 4 8.44, 7.01, 64 61.2, 59.5. On an H200 4 7.22, 6.86, but 64 75.3, 75.6.
    streams = early and problem.tokens == 1
    # On an H100, in us, without and with: 8 sequences 14.6, 13.6, 64 97.4, 95.7, 256 384.3, 377.4, two tokens of 64
    # 105.2, 100.1, four 102.4, 100.7; but one 4.41, 4.87, two 5.26, 5.72: a program waits longest for what it asks for
    # first, and with few of them nothing else is done meanwhile. Of sm_80 and gfx942 registers are too few.
    decodes = problem.writes and problem.out_strides is not None
    first = decodes and limits.dependent_launch and programs > limits.cores
    return StepPlan(block_v, run, num_warps, max_registers, limits.dependent_launch, ahead, early, streams, first)
