"""Launch plans: pure functions from a problem and the device's limits to tile sizes, splits and the kernel to use.

A plan is a value: it can be built, printed and tested without a GPU, and pinned by a caller with ``plan=``.
It depends on shapes only, never on lengths or lists, which only the device knows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernel_reference.integers import (
    cdiv,
    is_power_of_two,
    power_of_two_at_least,
    power_of_two_at_most,
    power_of_two_in,
)
from kernel_reference.plans import Plan, quickest_splits

# Rows up to which the query heads of a kv head are packed: more tokens list more blocks that only some of them want.
_MOST_PACKED = 64
# Rows of float32 up to which each is a program. Decode of 131072 keys of 16 heads of 128 on an H200 (triton 3.6.0,
# 2026-11-26): 335 us, 606 with eight warps, 1810 in tiles of 16 rows, most of which are padding; a copy takes 258.
_MOST_SINGLE = 8
# Heads times the share that each lists, from which on they are multiplied together, of sizes up to 64 and others: what
# any of them lists is multiplied for all, row by row what each lists. Eight heads of 128 over one kv head that list all
# take 204 us in thirds for 468, half 202 for 232, 20 % at random 614 for 358; six that list all 200 for 339, four 379
# for 449, half 380 for 241; of 64 elements four 394 for 309, eight that list half 249 for 159 (H200, 2026-11-27).
_MOST_LISTED = (6, 4)
# Lists are short below this many keys a row, on average, of small blocks and of others. Phi-3-small's prompts on an
# H200 (triton 3.6.0, 2026-11-24), with 64 keys a tile for 128: 156 us for 167 of 4096 tokens (1072 keys a row), 356 for
# 374 of 8192 (1384); but 1410 for 1392 of 32768 that list 1521, 969 for 949 of 16384 (1924), 3105 for 2858 of 32768
# (2962).
_SHORT_LISTS = (1024, 1450)
# Half of the heads are taken first, so that fewer keys and values are in use at a time, where one sequence has so many
# keys, and so many tokens: of few rows those of no sequence, which each half has, leave programs idle.
# Phi-3-small's prompts on an H100 (triton 3.6.0, 2026-11-25), as shares of 238fd36's time, all heads and 16 of 32 in
# turn: 32768 tokens 1.040, 1.006; 65536 1.026, 1.007; all blocks of 32768 1.012, 0.997; 9 % of them 1.008, 1.016; a
# chunk of 2048 behind 30720 1.013, 0.988; 16384 1.040, 1.039. With 4 in turn 16384 take 1.022, the chunk 1.376; beside
# all heads the former 0.967, on an H200 0.978. But that would be a fifth kernel to compile in a layer's life.
_MANY_KEYS = 32768
_CHUNK = 2048
# Of the 227 KiB that a program may have, less barriers and the queue of work items.
_HOPPER_BYTES = 225 * 1024
# So many tokens that they fill the tiles of any plan.
_ANY = 2**31 - 1


@dataclass(frozen=True)
class Problem:
    """One call, as plan, launch and reference are told of it; it is made by ``arguments.check_attend``.

    ``tokens``: rows of q; in a padded batch, its sequences times their length. ``layouts``: heads of the layout, 1 or
    as many as query heads. ``rows``: of the layout. ``entries``: columns listed by a head, at most. ``page_size``: of a
    paged cache, 0 without one. ``capacity``: keys that a sequence may have. ``bits``: of an element. ``tma``:
    layout, strides and alignment are such that TMA descriptors can address queries, keys and values, and the call has
    no negative scale. ``left``: of the window, -1 without one. ``num_splits`` 0: as the plan has it. ``scattered``:
    rows that follow one another list mostly different blocks.
    """

    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    q_block: int
    k_block: int
    layouts: int
    rows: int
    entries: int
    tokens: int
    sequences: int
    max_seqlen_q: int
    capacity: int
    page_size: int = 0
    padded: bool = False
    bits: int = 16
    tma: bool = False
    page_layout: str = "NHD"
    softmax_scale: float = 1.0
    softcap: float = 0.0
    left: int = -1
    num_splits: int = 0
    scattered: bool = False

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.num_heads // self.num_heads_kv


@dataclass(frozen=True)
class DeviceLimits:
    """What the plan needs to know of a processor.

    ``cores``: SMs (compute units). ``shared_memory``: the most that a program may use, in bytes. ``hopper``: sm_90,
    with TMA and WGMMA, and a Triton that brings Gluon.
    """

    cores: int
    shared_memory: int = 64 * 1024
    hopper: bool = False


@dataclass(frozen=True)
class AttentionPlan(Plan):
    """Tiles of ``block_m`` rows walk the keys that they list, ``block_n`` at a time.

    A tile is rows of one head and of one row of its layout; with ``packed``, so many tokens of all query heads of a kv
    head, and walks the union of their lists. ``num_splits`` programs share the keys of a tile (split-KV); more than one
    leave partial results to a merge kernel. ``hopper``: use the kernel for sm_90, which takes the same rows of
    ``heads_together`` heads in turn, 0: of all, before the next rows of these; with ``in_turn`` its consumers issue
    their products in turn; a score may exceed the running max by ``slack`` powers of two before that follows, 0 to 8.
    ``thirds``: packed tiles of float32 are multiplied on tensor cores, in three parts of 11, 11 and 2 bits.
    ``as_free``: on sm_90 programs take tiles as they come free, not in a fixed order.
    """

    block_m: int
    block_n: int
    num_splits: int
    num_warps: int
    num_stages: int
    packed: int = 0
    hopper: bool = False
    heads_together: int = 0
    in_turn: bool = False
    slack: int = 0
    thirds: bool = False
    as_free: bool = False

    def covers(self, problem: Problem) -> bool:
        """Whether a kernel can run this problem with this plan."""
        if not is_power_of_two(self.block_m, self.block_n, self.num_warps):
            return False
        few = self.packed and problem.bits == 32
        if self.block_m < (1 if few else 16) or self.block_n < (8 if few else 16):
            return False
        if min(self.num_stages, self.num_splits) < 1:
            return False
        if self.thirds and not (self.packed and self.block_m >= 16 and problem.bits == 32):
            return False
        if self.hopper:
            return (
                problem.tma
                and fits_hopper(problem)
                and not self.packed
                and self.block_m == 128
                and self.block_n in ((64,) if _widest(problem) > 128 else (64, 128))
                and self.num_warps == 4
                and self.num_stages >= 2
                and self.heads_together >= 0
                and 0 <= self.slack <= 8
                and problem.num_heads % max(1, self.heads_together) == 0
                and _hopper_bytes(problem, self, 1) <= _HOPPER_BYTES
            )
        if self.heads_together or self.in_turn or self.slack or self.as_free:
            return False
        if self.packed:
            return 1 <= self.packed <= self.block_m // heads_per_tile(problem.group, self.block_m)
        return problem.q_block % self.block_m == 0


def fits_hopper(problem: Problem) -> bool:
    """Whether the kernel for sm_90 supports these sizes and dtypes."""
    # Shared memory is swizzled in groups of eight rows, and TMA boxes of a page hold one of them or more.
    sizes = problem.page_size % 8 == problem.head_dim % 8 == problem.head_dim_v % 8 == 0
    # The kernel counts rows, keys and entries in 32 bits.
    pieces = problem.entries * (problem.k_block // hopper_piece(problem.k_block))
    return sizes and max(problem.tokens, problem.capacity, pieces) < 2**31 and problem.bits == 16


def _widest(problem: Problem) -> int:
    return max(problem.head_dim, problem.head_dim_v)


def hopper_piece(block: int) -> int:
    """Rows of a block that share a list, or keys of one that lie together, in the sm_90 kernel's tiles."""
    return min(64, power_of_two_in(block))


def needs_table(problem: Problem) -> bool:
    """Whether the sm_90 kernel's consumers look up where each key of a tile is, as blocks are smaller than 64.

    Otherwise a number for each 64 keys says so, and whether 64 rows list them.
    """
    return min(hopper_piece(problem.q_block), hopper_piece(problem.k_block)) < 64


def hopper_sizes(head_dim: int) -> tuple[int, int]:
    """The two pieces that the sm_90 kernel multiplies a head size in, the second 0 where one is enough.

    Both are powers of two: 96 is 64 and 32, 192 is 128 and 64, 80 is 64 and 16, and 112 is padded to 128.
    """
    first = power_of_two_at_most(max(64, head_dim))
    if head_dim <= first:
        return first, 0
    rest = max(16, power_of_two_at_least(head_dim - first))
    return (2 * first, 0) if rest == first else (first, rest)


def hopper_columns(head_dim: int) -> int:
    """Elements of a head in the sm_90 kernel's shared memory, where a second piece has 64."""
    first, rest = hopper_sizes(head_dim)
    return first + (64 if rest else 0)


def query_stages(problem: Problem, plan: AttentionPlan) -> int:
    """Stages of queries in the sm_90 kernel: two, where shared memory allows, so that the next ones load meanwhile."""
    return 2 if _hopper_bytes(problem, plan, 2) <= _HOPPER_BYTES else 1


def _hopper_bytes(problem: Problem, plan: AttentionPlan, q_stages: int) -> int:
    """Bytes of shared memory that the sm_90 kernel's tiles take, with where their keys are."""
    size, size_v = hopper_columns(problem.head_dim), hopper_columns(problem.head_dim_v)
    apart = hopper_sizes(problem.head_dim) != hopper_sizes(problem.head_dim_v)
    columns = plan.num_stages * plan.block_n * (size + size_v) + plan.block_m * (size_v if apart else 0)
    # 32 numbers a stage; with a table two of 32 pieces, and the tiles looked for ahead.
    places = plan.num_stages * 256 + 2048 if needs_table(problem) else plan.num_stages * 128
    return (columns + q_stages * plan.block_m * size) * problem.bits // 8 + places


def heads_per_tile(group: int, block_m: int) -> int:
    """Query heads of one kv head in a packed tile."""
    return min(group, block_m)


def tokens_per_tile(plan: AttentionPlan) -> int:
    """Tokens whose rows fill a tile."""
    return plan.packed or plan.block_m


def num_slots(problem: Problem, plan: AttentionPlan) -> int:
    """Slots in the grid for tiles of rows, of one head or group of heads: see kernels/tiles.py.

    Each segment of rows may leave a tile that is not full, at its beginning too where tiles lie at multiples of their
    size in the positions of a sequence.
    """
    segments = 3 * problem.sequences if problem.padded else problem.sequences + 2
    return problem.tokens // tokens_per_tile(plan) + segments * (1 if plan.packed else 2)


def programs_of(problem: Problem, plan: AttentionPlan) -> int:
    """Programs that share the work, were there one for each."""
    head_tiles = problem.group
    if plan.packed:
        head_tiles = cdiv(problem.group, heads_per_tile(problem.group, plan.block_m))
    return num_slots(problem, plan) * problem.num_heads_kv * head_tiles * plan.num_splits


def merges_lists(problem: Problem, plan: AttentionPlan) -> bool:
    """Whether a packed tile merges its lists in memory before it walks them, as it gathers several blocks."""
    return bool(plan.packed) and portable_piece(problem, plan) < plan.block_n


def portable_piece(problem: Problem, plan: AttentionPlan) -> int:
    """Keys of one block that a tile of the portable kernels gathers together."""
    return min(plan.block_n, power_of_two_in(problem.k_block))


def merged_width(problem: Problem, plan: AttentionPlan) -> int:
    """Columns that a split of a packed tile sees, at most."""
    columns = cdiv(min(problem.rows * problem.q_block, problem.capacity), problem.k_block)
    return max(1, cdiv(columns, plan.num_splits))


def plan_attention(problem: Problem, limits: DeviceLimits) -> AttentionPlan:
    """The plan for a problem on this device."""
    if problem.num_splits:
        # How keys are cut depends on the rows of a tile: with as many in every batch, a sequence keeps its bits.
        problem = replace(problem, tokens=_ANY, max_seqlen_q=_ANY)
    if _most_queries(problem) == 1 or _most_queries(problem) * problem.group <= _MOST_PACKED:
        plan = _packed(problem, limits)
    elif limits.hopper and problem.tma and fits_hopper(problem):
        plan = _hopper(problem)
    else:
        plan = _lists(problem, limits)
    return replace(plan, num_splits=problem.num_splits or _splits(problem, plan, limits))


def _most_queries(problem: Problem) -> int:
    return max(1, min(problem.max_seqlen_q, problem.tokens))


def _hopper(problem: Problem) -> AttentionPlan:
    narrow = _widest(problem) > 128 or _has_short_lists(problem)
    plan = _hopper_tiles(problem)
    while _hopper_bytes(problem, plan, 1) > _HOPPER_BYTES:
        plan = replace(plan, num_stages=plan.num_stages - 1)
    two = replace(plan, num_stages=2)
    if _widest(problem) > 128 and query_stages(problem, two) > query_stages(problem, plan):
        # The next queries come meanwhile. Heads of 192, 32768 tokens on an H200: 4103 us for 4254.
        plan = two
    long = problem.capacity >= _MANY_KEYS and problem.tokens >= _CHUNK and problem.sequences == 1
    if long and not (narrow or problem.num_splits) and problem.num_heads >= 32 and problem.num_heads_kv % 2 == 0:
        plan = replace(plan, heads_together=problem.num_heads // 2)
    return replace(plan, as_free=_takes_tiles_as_free(problem, narrow))


def _hopper_tiles(problem: Problem) -> AttentionPlan:
    """Keys and stages of the sm_90 kernel's tiles, before these are made to fit, and how its consumers follow each
    other. us of prompts of 32768 tokens in a pattern, triton 3.6.0, on an H200 if not said otherwise, 2026-11-26.
    """
    table, size = needs_table(problem), _widest(problem)
    wide, narrow = AttentionPlan(128, 128, 1, 4, 2, hopper=True), AttentionPlan(128, 64, 1, 4, 4, hopper=True)
    if size > 128:
        # Heads of 192: 4184 for 4394, with slack alone 4239; of 256 4826 for 5187, 4879.
        return replace(narrow, in_turn=True, slack=8)
    if _has_short_lists(problem):
        # They fill tiles of 128 keys badly.
        return narrow
    if problem.scattered and problem.q_block < 128 and not table:
        # Both consumers multiply both pieces of a tile, even if each is listed for one of them. 18 % of the blocks at
        # random 3867 with 64 keys a tile for 7909, in a pattern 3068 for 2774 (H100).
        return replace(narrow, num_stages=5)
    if table or hopper_sizes(size)[1]:
        # Blocks of 48 and 96: 2957 for 3093, 2815 for 2899, with slack too 3111 and 2887; of 16 3995 for 3841. Heads of
        # 72, 80 and 96: 2685 for 2725, 2372 for 2400, 2549 for 2622, with slack more than without either.
        return replace(wide, in_turn=min(problem.q_block, problem.k_block) > 16)
    if size <= 64:
        # Heads of 64: 1961 with three stages, with slack and four 1861, and in turn 1858.
        return replace(wide, num_stages=4, in_turn=True, slack=8)
    return wide


def _has_short_lists(problem: Problem) -> bool:
    """Whether rows list few keys, on average: see ``_SHORT_LISTS``."""
    return problem.entries * problem.k_block < _SHORT_LISTS[not needs_table(problem)] * problem.rows


def _takes_tiles_as_free(problem: Problem, narrow: bool) -> bool:
    """Whether programs of the sm_90 kernel take tiles as they come free, not in a fixed order.

    Rows whose lists differ take different times, few tiles come out uneven, and so do keys that are looked up one by
    one. A fixed order is quicker for one prompt alone, in tiles of 64 keys that all take about as long: 1024 tokens
    with heads of 128 25.5 us on an H100, as programs come free 29.1, 2048 with heads of 96 59.8 and 63.4; but 4 x 512
    34.8 and 31.5 on an H200, 4 x 128 behind 8064 over blocks of 32 57.6 and 37.6, behind 65408 over blocks of 16 371.7
    and 192.4. Both sides are in benchmarks/README.md.
    """
    return problem.scattered or problem.sequences != 1 or needs_table(problem) or not narrow


def _listed_share(problem: Problem) -> float:
    """Of the blocks of keys before its queries, how many a row lists on average, by the width of the lists."""
    return 2 * problem.entries * problem.k_block / max(1, problem.rows**2 * problem.q_block)


def _packed(problem: Problem, limits: DeviceLimits) -> AttentionPlan:
    tokens = _most_queries(problem)
    several = limits.hopper and tokens * problem.group <= 16 and _widest(problem) <= 128
    alike = min(1.0, _listed_share(problem)) * min(8, problem.group) >= _MOST_LISTED[_widest(problem) > 64]
    if problem.bits == 32 and several and alike and problem.page_layout != "x-packed":
        return AttentionPlan(16, 16, 1, 4, 3, tokens, thirds=True)
    if problem.bits == 32 and tokens * problem.group <= _MOST_SINGLE:
        block_n, num_warps = (8, 1) if _widest(problem) > 128 else (min(32, power_of_two_in(problem.k_block)), 4)
        return AttentionPlan(1, block_n, 1, num_warps, 1, 1)
    if problem.bits == 32 or limits.shared_memory <= 64 * 1024:
        # Masks of wider tiles take more scalar registers than gfx942 has.
        most_m, block_n, stages = 16, 16, 1
    else:
        # Wider tiles spill. More stages hide the latency of memory as far as shared memory holds them; with pages the
        # block table is loaded some stages ahead of the keys.
        large = limits.shared_memory > 200 * 1024
        most_m, block_n, stages = (32, 64, 5 if problem.page_size else 3) if large else (32, 32, 2)
    block_m = min(most_m, max(16, power_of_two_at_least(tokens * problem.group)))
    if _widest(problem) > 128:
        block_n = min(block_n, 32)
    packed = min(tokens, block_m // heads_per_tile(problem.group, block_m))
    plan = AttentionPlan(block_m, block_n, 1, 4 if block_m == 16 else 8, stages, packed)
    if limits.shared_memory > 200 * 1024 and plan.num_stages > 1 and merges_lists(problem, plan):
        # Merged lists are loaded some stages ahead of what they list.
        plan = replace(plan, num_stages=stages + 2)
    return plan


def _lists(problem: Problem, limits: DeviceLimits) -> AttentionPlan:
    block_d = max(16, power_of_two_at_least(_widest(problem)))
    if problem.bits == 32:
        # Phi-3-small's prompt of 8192 on an H100 (triton 3.6.0, 2026-11-26): 30.1 ms with 16 rows, 18.5 with 32; with
        # 64 rows or 32 keys 18.3 to 23.0, in more registers or shared memory than other GPUs have.
        return AttentionPlan(min(32 if block_d <= 128 else 16, power_of_two_in(problem.q_block)), 16, 1, 4, 1)
    block_m = min(64 if block_d <= 128 else 32, power_of_two_in(problem.q_block))
    if limits.shared_memory <= 64 * 1024:
        return AttentionPlan(block_m, 16, 1, 8 if block_m == 64 else 4, 1)
    return AttentionPlan(block_m, 64 if block_d <= 64 else 32, 1, 4 if block_m < 64 else 8, 2)


def _splits(problem: Problem, plan: AttentionPlan, limits: DeviceLimits) -> int:
    """Splits of a tile's keys: as many as keep all SMs evenly busy, and no more."""
    sequences = max(1, problem.sequences)
    each = cdiv(cdiv(problem.tokens, sequences), tokens_per_tile(plan))
    heads, cores = problem.num_heads, limits.cores
    if plan.packed:
        # Two of these programs fit on an SM, of single rows four, and each waits for memory most of its time.
        cores *= 2 if plan.block_m > 1 else 4
        heads = problem.num_heads_kv * cdiv(problem.group, heads_per_tile(problem.group, plan.block_m))
    # Tiles that are not empty, were the lengths equal.
    tiles = max(1, sequences * each * heads)
    if tiles >= 2 * cores:
        return 1
    # In a ragged batch the capacity is that of all sequences together.
    keys = problem.capacity if problem.padded or problem.page_size else problem.capacity // sequences
    steps = cdiv(min(keys, problem.rows * problem.q_block), plan.block_n)
    # A split of fewer than four steps costs more than it saves.
    return quickest_splits(tiles, steps, cores, least=4)
