"""How the work is laid over a device: pure functions from a problem and the device's limits to a launch plan.

A plan is a value: it can be built, printed and tested on a machine with no GPU, and pinned by a caller with ``plan=``.
None depends on how many sequences a call has, nor on their lengths, so that a sequence's result has the same bits
whatever its neighbours are; but for what changes no bits (fitting.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernel_reference.integers import cdiv, is_power_of_two, power_of_two_at_least
from kernel_reference.plans import Plan

Strides = tuple[int, ...]


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
class Operand:
    """Sizes and strides of q, k, v or o as (sequence, row, head, element)."""

    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]

    def suits_tma(self) -> bool:
        """Whether TMA can address it: packed elements, other strides of whole 16 bytes."""
        outer = zip(self.sizes[:3], self.strides[:3], strict=True)
        return self.strides[3] == 1 and all(
            size == 1 or (stride > 0 and stride % 8 == 0 and stride < 2**39) for size, stride in outer
        )


@dataclass(frozen=True)
class PrefillProblem:
    """Many tokens of every sequence: what is read and written, and how it is addressed.

    ``initial`` and ``final``: strides (slot, head, d, e) of the states before and after, or None where there are none.
    ``ragged``: all sequences' rows are packed, and ``rows`` counts them all; otherwise each has ``rows``.
    ``dtype``: bfloat16, float16 or float32. ``snapshots``: how many each sequence may have. ``reversed``: from the last
    token to the first, as gradients go.
    """

    heads: Heads
    q: Operand
    k: Operand
    v: Operand
    o: Operand
    initial: Strides | None
    final: Strides | None
    rows: int
    sequences: int
    num_slots: int
    scale: float
    dtype: str
    snapshots: int = 0
    ragged: bool = False
    reversed: bool = False
    # How a gradient's memory is laid out is no caller's choice, so that no caller is told of it.
    is_gradient: bool = False
    # Of two launches for parts of a larger state the first or the second, which adds its outputs to the first one's.
    in_turn: int = 0

    def suits_tma(self) -> bool:
        """Whether TMA can address q, k, v and o, if they are 16-byte aligned."""
        return all(operand.suits_tma() for operand in (self.q, self.k, self.v, self.o))


@dataclass(frozen=True)
class BackwardProblem:
    """The gradients of a batch of sequences of one length: a prefill each for dq, dk and dv."""

    dq: PrefillProblem
    dk: PrefillProblem
    dv: PrefillProblem


@dataclass(frozen=True)
class DecodeProblem:
    """A few tokens of every sequence: strides (sequence, token, head, element) and, of the pool, (slot, head, d, e).

    ``q`` and ``o`` None: no outputs. ``writes``: whether states are stored in the pool.
    """

    heads: Heads
    sequences: int
    tokens: int
    num_slots: int
    q: Strides | None
    k: Strides
    v: Strides
    pool: Strides
    o: Strides | None
    scale: float
    writes: bool


@dataclass(frozen=True)
class DeviceLimits:
    """What the plan needs to know of a processor.

    ``cores`` are SMs (compute units); ``shared_memory`` is the most that a program may use, in bytes.
    ``bf16``: tensor cores multiply bfloat16, of which Triton makes products of float32's precision.
    ``hopper``: sm_90, with TMA and WGMMA, and a Triton that brings Gluon; ``blackwell``: sm_100 and later.
    ``dependent_launch``: a kernel can be started before the one ahead of it has ended, and wait on the device.
    """

    cores: int
    shared_memory: int = 64 * 1024
    hopper: bool = False
    blackwell: bool = False
    dependent_launch: bool = False
    bf16: bool = False


# The most programs that share a segment: ``weight_before`` in kernels/schedule.py has as many weights.
MOST_SHARES = 4
# Fewer programs besides than ``long_from`` in kernels/hopper_long.py counts where bounds fall, twice over.
MOST_BESIDES = 1024


@dataclass(frozen=True)
class PrefillPlan(Plan):
    """A prefill, ``chunk`` tokens and ``block_e`` columns of a state at a time.

    A program holds those columns in pieces of ``block_d`` rows. ``chunk`` 1: token by token. ``segment`` 0: a program
    takes a whole sequence. Otherwise programs take segments of that many tokens in parallel, after one or two smaller
    launches that make the states between them; ``part`` > 0: the first of them by a program for so many tokens, by the
    kernel for sm_90. ``hopper``: by the kernel made for sm_90, 64 columns and 4 warps, or 128
    and 8, by roles too. ``bf16x6``: a product of float32 is six of bfloat16 parts on tensor
    cores; otherwise FMAs, or what matrix instructions of float32 there are.
    ``dependent_launch``: by the kernel for sm_90, segments' launches start before those ahead of them have ended.
    ``chained``: by the kernel for sm_90, there is one launch, in which segments pass their states on. Measured on an
    H100, 64 heads of 64, 16384 tokens: 282 us, in chains of 1024 tokens 264, of 256 234; but of 16 x 500 tokens 98 and
    124, and of 8 heads of 128, 32768 tokens, 152 and, of 2048, 162.
    ``roles``: by that for sm_90 whose warps load, make scores, or follow a state, the only one of more than 128 rows.
    ``shares``: so many programs by roles, or in float32 on sm_90, share each segment, with the same bits.
    ``apart``: by the kernels for sm_90, a packed batch of as many rows as sequences has a launch ahead that takes the
    sequences of one token, with the same bits. ``long``: by the kernels for sm_90, a packed batch's segments (or
    whole sequences) of so many tokens or more may have programs more, of ``besides`` a head and tile for all, with the
    same bits.
    """

    chunk: int
    block_e: int
    segment: int
    num_warps: int
    num_stages: int
    block_d: int = 128
    hopper: bool = False
    bf16x6: bool = False
    dependent_launch: bool = False
    chained: bool = False
    roles: bool = False
    part: int = 0
    shares: int = 1
    apart: bool = False
    long: int = 0
    besides: int = 0

    def covers(self, heads: Heads) -> bool:
        """Whether its blocks are such that a kernel can take them, for these heads."""
        if not (is_power_of_two(self.chunk, self.block_d, self.block_e, self.num_warps) and self.num_stages >= 1):
            return False
        if min(self.block_d, self.block_e) < 16 or self.segment < 0 or self.segment % self.chunk:
            return False
        if self.chunk == 1:
            return self.block_d >= heads.head_qk and not self.segment and not self.hopper
        if self.chunk < 16:
            return False
        if (self.dependent_launch or self.chained) and not (self.hopper and self.segment):
            return False
        if self.roles and not self.hopper:
            return False
        shares_by_roles = self.roles and self.num_stages >= 3 and self.block_e == 64
        if self.shares != 1 and not (self.segment and self.hopper and (shares_by_roles or self.bf16x6)):
            return False
        may_be_long = self.hopper and not (self.roles or self.chained or self.apart) and heads.head_qk <= 128
        if self.long < 0 or (self.long and not (may_be_long and (self.segment or not self.bf16x6))):
            return False
        # Each share has a chunk: who has none is not counted among those that another waits for.
        if not 0 <= self.besides < MOST_BESIDES or (self.besides and self.long < MOST_SHARES * self.chunk):
            return False
        if self.besides and self.shares != 1:
            return False
        if not 1 <= self.shares <= MOST_SHARES:
            return False
        if self.part and (not self.hopper or self.bf16x6 or self.chained):
            return False
        if self.part and (not 0 < self.part <= self.segment or self.part % self.chunk or self.segment % self.part):
            return False
        if (self.dependent_launch or self.roles) and self.chained:
            return False
        if self.apart and (not self.hopper or self.roles or self.chained or heads.head_qk > 128):
            return False
        if not self.hopper:
            return True
        if not fits_hopper(heads) or self.chunk != 64:
            return False
        if self.roles:
            is_wide = (self.block_e, self.num_warps) == (128, 8) and heads.head_v > 64 and heads.head_qk <= 128
            fits = self.block_d == 64 and (is_wide or (self.block_e, self.num_warps) == (64, 4))
            return fits and 2 <= self.num_stages <= stages_of_roles(heads, self.block_e) and not self.bf16x6
        if self.bf16x6:
            is_exact = (self.block_d, self.block_e, self.num_warps, self.num_stages) == (64, 64, 8, 1)
            return is_exact and not (self.dependent_launch or self.chained)
        if heads.head_qk > 128 or self.block_d != hopper_columns(heads):
            return False
        # A warpgroup for 64 columns each, which share the scores. Shared memory has no room for more stages.
        if (self.block_e, self.num_warps) == (128, 8):
            return heads.head_v > 64 and 2 <= self.num_stages <= 3
        return (self.block_e, self.num_warps) == (64, 4) and 2 <= self.num_stages <= (7 if self.block_d == 64 else 4)


@dataclass(frozen=True)
class DecodePlan(Plan):
    """One launch over a few tokens of every sequence: a program takes ``block_e`` columns of a state.

    ``hopper``: by the kernel made for sm_90, in which each warp has columns to itself; or, ``lines``, has them where a
    state is only read, and whole lines where it is written. The bits of a plan's results are the same whatever is
    called, but two plans may round a sum over rows differently.
    """

    block_e: int
    num_warps: int
    dependent_launch: bool = False
    hopper: bool = False
    lines: bool = False

    def covers(self, heads: Heads) -> bool:
        """Whether its blocks are such that a kernel can take them: any heads will do, but for lines."""
        if not is_power_of_two(self.block_e, self.num_warps) or self.block_e < 16:
            return False
        if self.lines:
            # Threads share a column's rows alike both ways, which is what makes the bits the same.
            is_shared = 4 * self.num_warps <= self.block_e <= 128 and heads.head_qk > 16
            return self.hopper and is_shared and self.num_warps <= 32
        return not self.hopper or self.num_warps <= self.block_e <= 128 * self.num_warps


def fits_hopper(heads: Heads) -> bool:
    """Whether heads are of sizes that the kernels for sm_90 are written for.

    Its tiles have 64 columns of v and 64, 128 or 256 of q and k; TMA fills those that are not there with zeros.
    """
    return 32 < heads.head_qk <= 256 and heads.head_v > 32


def hopper_columns(heads: Heads) -> int:
    """Columns of q and k that are a piece for the kernel for sm_90: those of these heads, rounded up to 64 or 128."""
    return min(128, max(64, power_of_two_at_least(heads.head_qk)))


def stages_of_roles(heads: Heads, block_e: int = 64) -> int:
    """As many as shared memory has room for, beside a tile of scores and what is small."""
    columns = cdiv(heads.head_qk, 64) * 64
    if heads.head_qk > 64 and 0 < heads.head_qk % 64 <= 32:
        # As width_of in kernels/hopper_ring.py.
        columns += max(16, power_of_two_at_least(heads.head_qk % 64)) - 64
    return (226 - 8) // (block_e // 8 + columns // 4)


def fitted(plan: PrefillPlan, heads: Heads) -> PrefillPlan:
    """A plan that a caller has pinned, for other head sizes than the forward's."""
    if plan.covers(heads):
        return plan
    plan = replace(plan, shares=1)
    if plan.chunk == 1:
        return replace(plan, block_d=max(16, power_of_two_at_least(heads.head_qk)))
    if fits_hopper(heads) and heads.head_qk > 128 and not plan.bf16x6:
        return replace(plan, block_d=64, block_e=64, num_warps=4, num_stages=3, chained=False, roles=True)
    if fits_hopper(heads) and heads.head_qk <= 128:
        plan = replace(plan, block_d=64 if plan.roles else hopper_columns(heads))
        return plan if plan.covers(heads) else replace(plan, block_e=64, num_warps=4)
    return replace(plan, chunk=32, block_e=16, block_d=64, num_stages=1, hopper=False, roles=False, part=0)


def unsegmented(plan: PrefillPlan) -> PrefillPlan:
    """The plan, but that a program takes a whole sequence."""
    return replace(plan, segment=0, part=0, dependent_launch=False, chained=False, shares=1)


def plan_prefill(
    heads: Heads,
    dtype: str,
    limits: DeviceLimits,
    suits_tma: bool = False,
    snapshots: bool = False,
) -> PrefillPlan:
    """The plan for q, k and v of these heads on this device.

    ``dtype``: bfloat16, float16 or float32. ``suits_tma``: strides and alignment are such that TMA can address the
    tensors. ``snapshots``: some are wanted.
    """
    if suits_tma and limits.hopper and dtype != "float32" and fits_hopper(heads):
        return _plan_hopper(heads, limits)
    # The largest tiles whose state, scores and operands stay in a thread's registers, as the compiler reports them.
    block_d = min(64, max(16, power_of_two_at_least(heads.head_qk)))
    if dtype == "float32" and limits.hopper and limits.bf16 and fits_hopper(heads):
        return PrefillPlan(64, 64, _segment(heads, 64, limits), 8, 1, 64, hopper=True, bf16x6=True)
    if dtype == "float32":
        # Operands and their parts take twice the registers, and those of so many rows of a state would spill.
        warps = 8 if limits.bf16 and heads.head_qk > 128 else 4
        stages = 2 if limits.shared_memory > 64 * 1024 and limits.bf16 and warps == 4 else 1
        return PrefillPlan(32, 16, _segment(heads, 16, limits), warps, stages, min(32, block_d), bf16x6=limits.bf16)
    is_float16 = dtype == "float16"
    widest = 192 if is_float16 else 256
    if limits.hopper and not snapshots and 128 < heads.head_qk <= widest and heads.head_v > 32:
        # WGMMAs of two warpgroups.
        return PrefillPlan(64, 64, _segment(heads, 64, limits), 8, 2, 32)
    is_narrow = heads.head_qk > (64 if is_float16 else 128) or limits.blackwell or snapshots
    block_e = min(16 if is_narrow else 32, max(16, power_of_two_at_least(heads.head_v)))
    stages = 2 if limits.shared_memory > 64 * 1024 else 1
    return PrefillPlan(32, block_e, _segment(heads, block_e, limits), 4, stages, block_d)


def _plan_hopper(heads: Heads, limits: DeviceLimits) -> PrefillPlan:
    """The plan for sm_90 in 16 bits: by roles, but where the last of a head's pieces would have a few rows."""
    columns, stages, part = hopper_columns(heads), 4, 0
    if suits_two_followers(heads, limits):
        segment = _round_of(heads, limits, 128)
        # On an H100, us in parts of 1024 and 2048 and whole: 64 heads of 72 266, 274 and 291, 32 175, 165 and 173.
        of_large = 1024 if max(heads.head_qk, heads.head_v) < 96 else 2048
        part = of_large if segment == 8192 else 2048 if segment == 4096 else 0
        waits = limits.dependent_launch and segment > 0
        return PrefillPlan(64, 128, segment, 8, 4, 64, hopper=True, dependent_launch=waits, roles=True, part=part)
    programs, by_roles = heads.num_heads * cdiv(heads.head_v, 64), suits_roles(heads)
    if by_roles and heads.head_qk <= 128:
        segment = _round_of(heads, limits)
        part = _part(heads, segment)
        if columns == 64:
            stages = 6
    else:
        segment = _segment(heads, 64, limits)
        if columns == 128 and 8 * programs >= 3 * limits.cores:
            # Half as many fill the device. On an H100, 16384 tokens in segments of 2048, 4096 and 8192, us: 32 heads of
            # 72 215, 204 and 224, of 80 228, 221 and 215.
            segment *= 2
        if heads.head_qk > 128:
            stages = 3
            # On an H100, 32 heads of 192, 16384 tokens: 603 us in one go, 758 in segments of 8192; of 192 and 128,
            # whose programs are fewer, 602 and 456.
            if 10 * programs >= 7 * limits.cores:
                segment = 0
        elif segment and columns == 64:
            # Measured with heads of 64 and 128, on an H200. 64 of 128, 131072 tokens: 2 stages 3.17 ms, 3 stages 2.26,
            # 4 stages 2.05. Of segments of heads of 64, two programs of 3 stages share an SM: 16 x 512 tokens 79 us,
            # with 4 stages 87, 2 83.
            stages = 3
    waits = limits.dependent_launch and segment > 0
    block_d = 64 if by_roles else columns
    return PrefillPlan(
        64, 64, segment, 4, stages, block_d, hopper=True, dependent_launch=waits, roles=by_roles, part=part
    )  # fmt: skip


def suits_roles(heads: Heads) -> bool:
    """Whether the kernel by roles is the faster one, or, of more than 128 rows, the only one.

    Its last piece costs as much as one of 64 rows, but where it has 32 at most. On an H200, 16384 tokens, us by roles
    and without: 64 heads of 72 271 and 298, 32 154 and 181, 64 of 80 245 and 281, 32 of 88 174 and 194.
    """
    return heads.head_qk > 128 or heads.head_qk % 16 == 0 or 64 < heads.head_qk < 96


def suits_two_followers(heads: Heads, limits: DeviceLimits) -> bool:
    """Whether by roles a state of 128 columns is followed by two warpgroups, which share scores, q and k.

    A second tile of few columns takes as long as the first one, and loads q and k again; but segments are half as
    long. On an H100, 16384 tokens, us by one warpgroup and by two: 64 heads of 72 356 and 265, 32 196 and 166, 16 111
    and 106 (65536 385 and 416), 64 of 80 353 and 296, of 104 441 and 378; of 96 289 and 310, 8 of 128 86 and 93.
    """
    least, most = sorted((heads.head_qk, heads.head_v))
    is_between = least > 64 and most < 128 and (heads.head_qk % 16 > 0 or most < 96)
    return is_between and 6 * heads.num_heads > limits.cores


def _round_of(heads: Heads, limits: DeviceLimits, block_e: int = 64) -> int:
    """Tokens of a segment, of which those of a sequence of 16384 are about a program an SM.

    On an H200, 16384 tokens, us in segments of 1024, 2048, 4096 and 8192: 4 heads of 128 40, 57, 115, -; 8 -, 67, 93,
    -; 16 -, 127, 113, 228; 32 -, 256, 223, 195.
    """
    programs = heads.num_heads * cdiv(heads.head_v, block_e)
    if 4 * programs >= 3 * limits.cores:
        return 0
    # States then take 5 % of the bytes of q, k and v in 16 bits at most.
    shortest = 16 * power_of_two_at_least(max(heads.head_qk, heads.head_v))
    # The power of two nearest to 16384 programs / cores.
    return max(shortest, power_of_two_at_least(cdiv(11585 * programs, limits.cores)))


def _part(heads: Heads, segment: int) -> int:
    """Tokens of a segment's part: 0 where programs of whole segments read as fast as the device can, or nearly.

    Parts' states and segments' take 5 % of the bytes of q, k and v in 16 bits at most. On an H200, 64 heads of 64,
    16384 tokens: 176 us, in parts of 1024 163; but 16 of 128, in segments of 4096, 113 and 121.
    """
    if segment < 8192:
        return 0
    d, e = heads.head_qk, heads.head_v
    part = power_of_two_at_least(cdiv(40 * d * e * segment, (2 * d + e) * segment - 40 * d * e))
    return part if part < segment else 0


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
    columns = power_of_two_at_least(max(16, heads.head_v))
    if limits.hopper and heads.num_heads <= 16 and heads.head_qk == heads.head_v == 128:
        # On an H100, 8 heads: 1, 4, 8 and 64 sequences 2.8, 3.9, 5.3 and 27.1 us, by whole columns 3.0, 4.0, 5.6 and
        # 28.4; four drafts of 8 sequences 4.8 and 5.2.
        return DecodePlan(32, 4, limits.dependent_launch, hopper=True, lines=True)
    if limits.hopper and heads.num_heads <= 16 and heads.head_qk <= 128:
        # On an H200, 8 heads of 128: 1, 4 and 8 sequences 5.2, 6.1 and 7.1 us (portable kernel: 5.9, 6.8, 7.7),
        # four drafts of 8 sequences 7.8 (10.1); but 64 sequences 23.3 (22.0), and 32 of 64 heads 76 (71).
        return DecodePlan(min(32, columns), 2, limits.dependent_launch, hopper=True)
    if limits.hopper and heads.head_qk == heads.head_v >= 64:
        # On an H200, 64 heads: 32 sequences 71.5 us (portable kernel: 72.8), 1 4.6 (5.0), 256 530.6 (531.4); 1, 2 and
        # 4 drafts of 32 verified 34.2, 36.7 and 39.4 (40.4, 44.0, 65.4; copy 33.7 to 35.2), 4 committed 71.9 (79.7).
        # On an H100, 64 of 64: 8 and 64 sequences 7.5 and 49.0 us (8.1 and 49.3), 8 trees of 8 drafts 12.3 (18.1).
        # On an H200, 1 and 64 sequences: 40 of 72 2.2 and 35.7 us (portable kernel: 2.3 and 58.4), 40 of 128 2.8 and
        # 87.5 (2.9, 88.0), 64 of 96 2.6 and 81.9 (2.7, 88.2). In halves, for which a tree's walks have registers: 1 and
        # 16 of 40 of 256 8.1 and 88.9 (8.7, 90.5), 1 and 200 of 8 of 256 2.7 and 227 (3.7, 221).
        return DecodePlan(32 if heads.head_qk > 128 else 64, 4, limits.dependent_launch, hopper=True, lines=True)
    return DecodePlan(min(64, columns), 4, limits.dependent_launch)
