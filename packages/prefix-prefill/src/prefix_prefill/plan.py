"""From a problem and the device's limits to a launch plan, as pure functions of plain values.

A plan is a value: it can be built, printed and tested on a machine with no GPU, and pinned by a caller with ``plan=``.
It follows from shapes alone, never from lengths, which only the device knows: there the kernel for sm_90 finds out how
its programs share them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernel_reference.integers import cdiv, power_of_two_at_least
from kernel_reference.plans import Plan, quickest_splits
from prefix_prefill.covering import MOST_SHARED, blocks_of_keys, is_mixed, why_not
from prefix_prefill.covering import fits_hopper as fits_hopper
from prefix_prefill.pieces import has_few_rows, is_worth_a_merge, pieces_of_one
from prefix_prefill.problem import MOST_TOKENS as MOST_TOKENS
from prefix_prefill.problem import DeviceLimits as DeviceLimits
from prefix_prefill.problem import Problem as Problem
from prefix_prefill.problem import is_converted_by_heads_of_128, is_worth_widening, rows_of_a_sequence
from prefix_prefill.problem import is_gathered as is_gathered
from prefix_prefill.problem import is_packed as is_packed
from prefix_prefill.tiles import (
    has_few_tiles,
    head_tiles,
    most_tiles,
    shared_bytes,
    tokens_per_tile,
)
from prefix_prefill.two_programs import (
    LOADING_LARGE,
    SHORT_WINDOW,
    decodes_by_two,
    has_one_each,
    has_tiles_of_64,
    is_by_two,
    is_capped_by_two,
    is_capped_by_warps,
    is_plain,
    keys_of_two,
    pieces_by_two,
)

# A tile of fewer keys is never cut (kernels/balance.py); to merge nothing takes 2 us of 12, behind 500 keys (H100).
_FEW_KEYS = 1024
# Of tiles that a window keeps this short, cutting and merging costs more than it saves: behind 16384 and 8000, window
# 1024, 4 x 512 104.3 us on an H200, whole 95.9, 1 x 256 47.8 and 32.6, 64 that decode 90.6 and 76.4, one 23.1 and 17.5.
_SHORT_TILE = 1280
# Registers a thread of what loads, where tiles are whole: the scheduler needs fewer, and consumers have the others. 1 x
# 8192, 16384 and 65536 take 897, 3427 and 54109 us so, shared 982, 3729 and 57813; 1 x 2048 85.1, by 56 registers 87.1.
_LOADING_WHOLE = 40


@dataclass(frozen=True)
class PrefillPlan(Plan):
    """Tiles of ``block_m`` rows, each a query head of a token, take the keys ``block_n`` at a time.

    The query heads of a kv head stand together in a tile. Each is cut into ``num_splits`` pieces; more than one leave
    partial results to a merge kernel. ``hopper``: by the kernel made for sm_90, of which ``programs`` at the most work
    at a time, one piece after another; 0 splits leave it to that kernel to cut as the lengths of the batch ask for;
    ``q_in_registers``: its products read so many tiles of queries (``column_tiles``, of 256 halves) from registers,
    which leaves shared memory's bandwidth to keys and values. ``capping`` 1: weights of capped scores are relative to a
    constant, where that is exact enough; 2: scores up to 0.2 of the cap by a series, too (4 x 512 behind 16384 986 us
    on an H200, not 1220; 1: 1356); 3: and those up to 0.8 of it by a longer one (behind 8192, queries 1, 2, 3, 4.5 and
    9 times as large, 294, 320, 319, 330 and 418 us, with 2 296, 422, 420, 442 and 403); 4: as 3, each warp for
    itself (by two programs an SM 48.7 for 51.6, by one 1094 for 1067); 0: to a running max.
    ``per_core``: programs that share an SM and its registers. ``widened``: 1 where a kernel before it widens 8 bits.
    ``loading``: registers a thread of the warps that load and schedule, 24, 40, 56 or 72; over an 8-bit cache 24, or
    with 72 as many as there are, for converters too (decoding of 31 behind 8192 200 us for 204, a chunk 1871 for 1812).
    """

    block_m: int
    block_n: int
    num_splits: int
    num_warps: int
    num_stages: int
    hopper: bool = False
    programs: int = 132
    q_in_registers: int = 0
    capping: int = 3
    loading: int = 56
    per_core: int = 1
    widened: int = 0

    def covers(self, problem: Problem) -> bool:
        """Whether its blocks are such that a kernel can take them, for this problem."""
        return not why_not(self, problem)


def multiplies_8_bits(problem: Problem) -> bool:
    """Whether the kernel for sm_90 multiplies 8-bit keys as they are: scales of tokens come with widened ones."""
    return problem.quantize_q and not problem.token_scales


def has_values_split(problem: Problem) -> bool:
    """Whether the kernel for sm_90 has two consumers share the values' columns: an accumulator of more than 256 would
    take all registers of one.
    """
    return problem.head_dim_v > 256


def may_be_in_parts(plan: PrefillPlan) -> bool:
    """Whether the kernel for sm_90 is one that may cut tiles: that of few rows is, so that a layer has one of them."""
    return plan.num_splits != 1 or plan.block_m == 64


def programs_of(problem: Problem, plan: PrefillPlan) -> int:
    """Of the kernel for sm_90: as many as the plan has, and no more than there may be pieces of tiles."""
    if plan.num_splits:
        return min(plan.programs, most_tiles(problem, plan.block_m) * plan.num_splits)
    return plan.programs


def plan_prefill(problem: Problem, limits: DeviceLimits, num_splits: int = 0) -> PrefillPlan:
    """The plan for a problem on this device; ``num_splits`` 0 leaves that number to the plan as well."""
    # By as many splits, bits are the same.
    widened = is_worth_widening(problem)
    if num_splits:
        # How keys are cut depends on the rows of a tile: with as many in every batch, a sequence keeps its bits.
        problem = replace(problem, tokens=MOST_TOKENS, max_seqlen_q=MOST_TOKENS, capacity=MOST_TOKENS)
    left = is_packed(problem) and (has_few_rows(problem) or not limits.gaps)
    if limits.hopper and problem.tma and fits_hopper(problem) and not left:
        plan = _hopper(problem, limits.cores)
        one_each = plan.per_core == 2 and has_one_each(problem, limits.cores)
        plan = replace(plan, programs=limits.cores * (1 if one_each else plan.per_core))
        splits = _pieces(problem, limits.cores)
        if widened and plan.block_m == 128:
            plan = replace(plan, widened=1, q_in_registers=0)
        in_16_bits = problem.cache_bits == 16 or plan.widened
        # Heads of 192 have fewer, and take 409 us for 431 of 4 x 2048 (H200); new keys were not timed so.
        roomy = plan.loading > _LOADING_WHOLE or problem.new_kv
        if (num_splits or splits) == 1 and in_16_bits and plan.block_m == plan.block_n == 128 and roomy:
            plan = replace(plan, loading=_LOADING_WHOLE)
    else:
        plan = _portable(problem, limits)
        splits = _splits(problem, plan, limits)
    return replace(plan, num_splits=num_splits or splits)


def kind_of_batch(problem: Problem, limits: DeviceLimits) -> tuple[bool, bool, bool, bool, bool, int, bool]:
    """All that plans for sm_90 look at of a batch's sizes: of those with equal kinds, plans are equal.

    It is found in a fraction of the time of a plan, and new sizes come with every step of a server.
    """
    cores = limits.cores
    few_rows, few_tiles = has_few_rows(problem), has_few_tiles(problem, cores)
    of_64 = few_rows or has_tiles_of_64(problem, cores)
    by_two = is_capped_by_two(problem, few_rows or few_tiles, cores)
    few = few_rows, of_64, few_tiles, by_two, has_one_each(problem, cores)
    return *few, _pieces(problem, limits.cores), is_worth_widening(problem)


def _pieces(problem: Problem, programs: int) -> int:
    """In how many pieces shapes tell that tiles are best: in 1, then nothing is shared on the device, and nothing
    merged; or 0, which leaves it to the device.
    """
    by_two = pieces_by_two(problem, programs)
    return by_two or int(_has_whole_tiles(problem, programs)) or pieces_of_one(problem, programs)


def _rows_of_a_tile(problem: Problem) -> int:
    """On sm_90: one consumer of 64 rows where no sequence has more: decoding, and the first tokens of drafts. Two that
    keep the slopes of large heads spill registers.
    """
    few = has_few_rows(problem) or problem.largest_head > 256
    return 64 if few or (problem.alibi and problem.largest_head > 128) else 128


def _has_whole_tiles(problem: Problem, programs: int) -> bool:
    """Whether shapes alone tell that programs need not share tiles: those of few keys, and many that fill all programs.

    What each costs is not known here: behind how many keys a sequence begins, only the device knows.
    """
    keys = min(problem.capacity + problem.new_kv * problem.max_seqlen_q, problem.max_seqlen_k)
    # With the portable one that decodes, packed keys have four kernels without that of whole tiles.
    if is_packed(problem):
        return False
    if keys <= _FEW_KEYS:
        return not has_few_rows(problem) or not is_worth_a_merge(problem, programs)
    if problem.shared or problem.carried:
        return False
    tokens = tokens_per_tile(problem.group, _rows_of_a_tile(problem))
    if problem.left >= 0 and problem.right >= 0:
        keys = min(keys, problem.left + tokens + problem.right)
        # Longer tiles of larger heads take longer than a merge.
        if keys <= _FEW_KEYS or (keys <= _SHORT_TILE and problem.largest_head <= 128 and problem.cache_bits == 16):
            # One that decodes behind 8000 in a window of 1024 takes 17.5 us on an H200, behind 1000 in 8 pieces 9.0.
            return not (decodes_by_two(problem) and has_few_rows(problem) and is_worth_a_merge(problem, programs))
    return problem.group <= 64 and not has_few_rows(problem) and _prompts_fill_programs(problem, keys, programs)


def _prompts_fill_programs(problem: Problem, keys: int, programs: int) -> bool:
    """Whether the tiles of prompts, of up to so many keys, keep all programs busy if none is cut: behind a long context
    idle ones cost most. us on an H200, 32 / 8 heads, as the device shares tiles, and whole.
    """
    tokens = tokens_per_tile(problem.group, _rows_of_a_tile(problem))
    longest = min(problem.max_seqlen_q, problem.tokens)
    # All as long, behind as many keys at the most: 4 x 1024 behind 1024 207.9 and 185.8, 4 x 2048 behind 2048 716.4 and
    # 690.6; other heads were not timed.
    alike = problem.tokens == problem.sequences * longest > longest and problem.largest_head == 128
    mostly_new = keys <= power_of_two_at_least(longest) * (2 if alike else 1)
    mostly_new = mostly_new or (problem.new_kv and problem.capacity <= _FEW_KEYS)
    if keys <= _SHORT_TILE or (mostly_new and problem.sequences > 1):
        # The longest tiles come first: 8 x 1024 213 and 195, ten of 17 to 4000 542 and 525.
        return problem.tokens // tokens * problem.num_heads_kv >= 2 * programs
    if problem.sequences != 1 or 4 * longest < keys == problem.max_seqlen_k:
        # One whose bound tells of a longer context: 2048 behind 30720 1740 and 1794 (H100).
        return False
    tiles = cdiv(longest, tokens) * problem.num_heads_kv
    rounds = cdiv(tiles, programs)
    if rounds > 4:
        return problem.new_kv and mostly_new
    # 1 x 2048, 3.9 rounds, 92.3 and 82.7; but 1 x 8192, 15.5 rounds, 898.4 and 916.2.
    return tiles >= 0.96 * rounds * programs


def _hopper(problem: Problem, programs: int) -> PrefillPlan:
    few_tiles = has_few_tiles(problem, programs)
    # 4 x 33 behind 16384, heads of 192, window 4096: 26.2 us on an H200, by 128 rows 31.2.
    few_gathered = few_tiles and problem.largest_head > 128 and is_gathered(problem)
    of_64 = _rows_of_a_tile(problem) == 64 or has_tiles_of_64(problem, programs) or few_gathered
    if is_mixed(problem):
        # Converters to bfloat16 take registers from the consumers.
        return PrefillPlan(64 if of_64 else 128, 64, 0, 4, 3, hopper=True)
    if is_by_two(problem, of_64, few_tiles, programs):
        return _two_programs(problem)
    # The largest tiles of keys whose scores stay in registers and two of which, values included, fit in shared memory.
    block_n = 64 if problem.alibi and problem.largest_head <= 256 else blocks_of_keys(problem)[-1]
    return _one_consumer(problem, block_n) if of_64 else _two_consumers(problem, block_n)


def _two_programs(problem: Problem) -> PrefillPlan:
    """A plan for sm_90 by which two programs share an SM."""
    # Heads of 192, 16 x 2048 behind 1000, pages of 24 and 64: 147, 145 us on an H200, by one an SM 213, 190.
    # Of 256, behind 16384 179 us on an H200, by one 196; 4 x 33 behind 1000, capped, 12.3 and 16.7; 64 and one that
    # decode behind 8000 28.0 and 9.5, by one 33.4 and 9.3.
    loading = LOADING_LARGE if problem.head_dim_v > 192 else 56
    stages = 4 if problem.largest_head <= 64 else 2
    plan = PrefillPlan(64, keys_of_two(problem), 0, 4, stages, hopper=True, per_core=2, loading=loading)
    return replace(plan, capping=4) if is_capped_by_warps(problem, 2) else plan


def _one_consumer(problem: Problem, block_n: int) -> PrefillPlan:
    """A plan for sm_90 whose one consumer takes tiles of 64 rows."""
    if 128 < problem.head_dim_v <= 256 or is_gathered(problem):
        # One that decodes behind 8000, heads of 192: 33.5 us on an H200, by 128 keys 36.5; 16 and 64 that do 0.999.
        block_n = min(block_n, 64)
    plan = PrefillPlan(64, block_n, 0, 4, 2, hopper=True)
    if is_gathered(problem):
        # 1, 16 and 64 rows behind 8000, 1000 and 8000: 25.8, 27.9, 547.6 us on an H200, by 128 keys 31.0, 33.1, 509.3.
        return replace(plan, num_stages=4) if shared_bytes(problem, 64, 64, 4) <= MOST_SHARED else plan
    if is_converted_by_heads_of_128(problem):
        plan = replace(plan, loading=72)
    small = problem.head_dim == problem.head_dim_v == 64 and is_plain(problem) and not problem.joined
    # 64 that decode behind 8000 266 us on an H200, by 2 stages 277, 8 ragged ones over pages of 24 75.7 and 78.8;
    # but 8 x 5 behind 2000 20.3 and 20.0. By 4 stages 269, 75.8 and 20.5.
    return replace(plan, num_stages=3) if small or (problem.cache_bits == 8 and block_n == 64) else plan


def _two_consumers(problem: Problem, block_n: int) -> PrefillPlan:
    """A plan for sm_90 whose two consumers take 64 rows each."""
    gathered = is_gathered(problem)
    if problem.head_dim_v > 128 and (0 <= problem.left < SHORT_WINDOW or problem.softcap or gathered):
        # Capped, 4 x 2048 behind 1000 491 us on an H100, by 128 keys 580; gathered, registers go to what copies.
        block_n = 64
    holds = _holds_queries(problem)
    stages, loading = 3 if problem.cache_bits == 8 and block_n == 64 else 2, 56
    if holds and problem.cache_bits == 16:
        stages, loading = 4, 40
    if problem.head_dim == problem.head_dim_v in (192, 256) and not gathered:
        # 4 x 512 behind 16384 take 1521 us on an H100, by 56 registers 1610; of heads of 256 1699, 1797.
        loading = 24
    plan = PrefillPlan(128, block_n, 0, 4, stages, hopper=True, loading=loading, q_in_registers=int(holds))
    return replace(plan, capping=4) if is_capped_by_warps(problem, 1) else plan


def _holds_queries(problem: Problem) -> bool:
    """Whether queries stay in registers: 4 x 512 behind 16384, heads of 64, 776 us on an H100, so 719, with 40 for what
    loads 694; in a window of 4096 216 for 220; of 128 over an 8-bit cache 992 for 1012, 8-bit queries 887 for 941. What
    is capped, new, gathered or shared was not timed.
    """
    if multiplies_8_bits(problem):
        return not problem.alibi
    other = problem.left >= 0 or problem.softcap or problem.alibi or problem.draft or problem.new_kv or problem.shared
    plain = not (other or problem.carried or is_gathered(problem) or is_packed(problem) or problem.token_scales)
    return plain and problem.head_dim == problem.head_dim_v == (128 if problem.cache_bits == 8 else 64)


def _portable(problem: Problem, limits: DeviceLimits) -> PrefillPlan:
    block_d = max(16, power_of_two_at_least(problem.largest_head))
    in_whole_loads = problem.head_dim % 8 == problem.head_dim_v % 8 == 0
    if problem.bits == 32:
        most_m, block_n, warps, stages = 16, 16, 4, 1
    else:
        # Wider tiles, or fewer warps, spill on one target or another. Heads not of whole 16 bytes are loaded number by
        # number; of heads of 17, light, ptxas 12.8 made a kernel that reads what it never wrote (testing.sass).
        light = block_d <= 64 and problem.cache_bits == problem.bits and in_whole_loads
        # On sm_120, which has 99 KB as sm_86, four spill where there is a window.
        few_warps = light and not problem.draft and not 64 * 1024 < limits.shared_memory < 160 * 1024
        most_m, block_n, warps, stages = 64, 64 if light else 32, 4 if few_warps else 8, 2
        if limits.hopper and block_d == 128 and not is_mixed(problem):
            # Twice the rows use each key that is loaded, and no register is spilled here.
            most_m, block_n = 128, 64
    if block_d > 256:
        # Twice the accumulators of heads of 256, and twice the keys and values.
        most_m, warps = (16, 8) if problem.bits == 32 else (32, 8)
        block_n = min(block_n, 32 if limits.shared_memory >= 160 * 1024 else 16)
    if limits.shared_memory <= 64 * 1024:
        # Masks of wider tiles take more scalar registers than gfx942 has.
        block_n, stages = 16, 1
        if (limits.turing and problem.bits == 16 and block_d > 128) or block_d > 256:
            # 64 rows of heads of 256 would take 80 KB, of 64.
            most_m = 16 if block_d > 256 else 32
    # One of three, whatever batches come: for decoding, drafts and prompts. With the merge kernel a layer needs four.
    block_m = next(size for size in (16, most_m // 2, most_m) if size >= min(most_m, rows_of_a_sequence(problem)))
    light = (in_whole_loads or block_m == 16) and problem.cache_bits == problem.bits
    warps = 4 if block_m < most_m and block_d <= 128 and light else warps
    if limits.hopper and _has_whole_rows(problem):
        block_n, stages = _tiles_of_keys(problem, block_m)
    return PrefillPlan(block_m, block_n, 1, warps, stages)


def _has_whole_rows(problem: Problem) -> bool:
    """Whether heads are of 65 to 128 numbers of 16 bits, in loads known to be aligned: others spill registers."""
    sizes = (problem.head_dim, problem.head_dim_v)
    return problem.bits == problem.cache_bits == 16 and 64 < max(sizes) <= 128 and not any(size % 16 for size in sizes)


def _tiles_of_keys(problem: Problem, block_m: int) -> tuple[int, int]:
    """Keys in a tile of the portable kernel on sm_90, and stages, for heads of 128: where there is no TMA.

    us on an H200 with 32 / 8 heads, pages of 1 and x-packed ones of 16: 64 that decode behind 8000 by tiles of 32 keys
    and 3 stages 575 and 734, of 64 and 2 667 and 934; chunks of 512 behind 16384 by 128 and 3 1673 and 2701, 64 and 3
    1976 and 2980, 64 and 2 2187 and 3089. A prompt of 2048 that fills its table, H100: by 128 177.5, by 64 and 3 156.8.
    """
    if block_m == 16:
        # Of 128 keys, 537 us where Triton 3.6 makes them, 3.7 compiles none.
        return 32, 3
    # What takes registers in the main loop, beside scores of 128 keys.
    biased = problem.softcap != 0 or problem.alibi or problem.draft
    padded = min(problem.head_dim, problem.head_dim_v) < 128
    roomy = not biased and problem.capacity > 2 * _FEW_KEYS and (problem.left < 0 or not (padded or problem.new_kv))
    return (128 if block_m == 128 and roomy else 64), 3


def _splits(problem: Problem, plan: PrefillPlan, limits: DeviceLimits) -> int:
    """Programs that share a tile's keys: as many as keep all SMs evenly busy, and no more."""
    # Tiles with something to do, were the lengths equal.
    sequences = max(1, problem.sequences)
    each = cdiv(cdiv(problem.tokens, sequences), tokens_per_tile(problem.group, plan.block_m))
    tiles = max(1, sequences * each * head_tiles(problem.group, plan.block_m) * problem.num_heads_kv)
    if tiles >= 2 * limits.cores:
        return 1
    keys = cdiv(min(problem.capacity, problem.max_seqlen_k), plan.block_n)
    # A split of fewer than four tiles of keys costs more than it saves.
    return quickest_splits(tiles, keys, limits.cores, least=4)
