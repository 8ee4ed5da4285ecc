"""Launch plans of selected attention: pure functions from a problem and the device's limits, see ``..plan``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from blocksparse_attn.plan import DeviceLimits, heads_per_tile
from kernel_reference.integers import cdiv, is_power_of_two, power_of_two_at_least, power_of_two_at_most
from kernel_reference.plans import Plan, quickest_splits

# Entries of all lists of a tile: each is compared with each, in registers.
MOST_ENTRIES = 128
# Tokens of a tile, which are bits of a number.
MOST_TOKENS = 16
# Rows of a tile that WGMMA multiplies, and of one whose tokens share blocks.
_MOST_ROWS = 64
_SHARED_ROWS = 128
# Blocks of a sequence that a map has numbers for, and bytes of all maps.
_MOST_COLUMNS = 2**15
_MOST_MAPS = 2**28
_MOST_COMPARED = 8192
# By the rows of one token and of a tile: the most blocks that the lists of its tokens may make together, as a share of
# their entries; with more, each token is walked by itself. MiniMax-M3's prefill of 8192 tokens on an H200, in us: 4573
# one token at a time; 3341 for four where 27.4 of 64 blocks differ, 6077 where 55.2 do; 3852 for two where 20.3 of 32
# differ, 5515 where 30.0 do.
_UNITED_SHARE = {(16, 64): 0.625, (16, 32): 0.75, (32, 64): 0.6875}


@dataclass(frozen=True)
class Problem:
    """One call of ``selected_attention``. ``capacity``: keys that a row of the block table has slots for.

    ``bits`` and ``cache_bits``: of an element of q and of the cache.
    """

    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    block_size: int
    topk: int
    tokens: int
    sequences: int
    capacity: int
    page_size: int
    bits: int = 16
    cache_bits: int = 16
    page_layout: str = "NHD"
    causal: bool = True
    softmax_scale: float = 1.0
    k_factor: float = 1.0
    v_factor: float = 1.0

    @property
    def group(self) -> int:
        """Query heads that share a kv head, and so its lists."""
        return self.num_heads // self.num_heads_kv


@dataclass(frozen=True)
class SelectedPlan(Plan):
    """Tiles of ``block_m`` rows: ``packed`` tokens, a power of two, of the query heads of a kv head.

    A tile walks what any of its tokens lists, ``block_n`` keys at a time. ``num_splits`` programs share the list. Where
    those lists make more than ``most_united`` blocks, as the device finds, each of the tokens is walked by itself,
    ``alone_n`` keys at a time, with ``alone_warps`` and ``alone_stages``; ``alone_n`` 0: never.
    ``by_blocks``: block by block instead, so many tokens at a time, 0: not; ``block_n`` is the block's size. What half
    of a tile of neighbours list is multiplied for all of them at once before, if ``shared``, on sm_90, where
    descriptors can address queries and caches.
    ``dependent_launch``, on sm_90: tiles of one token, and their merge kernel, may start before the kernel ahead of
    each has ended. ``max_registers``, of Triton before 3.7, on NVIDIA's GPUs: of a thread of a tile of one token; 0: as
    many as it takes. ``e4m3``: widen keys and values by the GPU's own instruction (NVIDIA from sm_89 on);
    ``pairs``: which are read two elements at a time, where caches lie so that they can be.
    """

    block_m: int
    block_n: int
    num_splits: int
    num_warps: int
    num_stages: int
    packed: int = 1
    most_united: int = 0
    alone_n: int = 0
    alone_warps: int = 4
    alone_stages: int = 1
    dependent_launch: bool = False
    max_registers: int = 0
    e4m3: bool = False
    by_blocks: int = 0
    pairs: bool = False
    shared: bool = False

    def alone(self, problem: Problem) -> SelectedPlan:
        """The plan of the kernel for tokens whose lists have little in common."""
        return replace(
            self, block_m=rows_of_token(problem), block_n=self.alone_n, num_warps=self.alone_warps,
            num_stages=self.alone_stages, packed=1,
        )  # fmt: skip

    def covers(self, problem: Problem) -> bool:
        """Whether the kernel can run this problem with this plan."""
        if not is_power_of_two(self.block_m, self.block_n, self.num_warps):
            return False
        if min(self.block_m, self.block_n) < 16 or min(self.num_stages, self.num_splits) < 1:
            return False
        if self.max_registers and not 32 <= self.max_registers <= 255:
            return False
        if self.e4m3 and problem.cache_bits != 8:
            return False
        if self.pairs and not (self.e4m3 and self.packed == 1 and problem.bits == 16 and _has_pairs(problem)):
            return False
        if self.by_blocks:
            return self._covers_by_blocks(problem) and (not self.shared or _can_share(problem))
        if self.shared:
            return False
        if self.packed == 1:
            return self.alone_n == 0
        if self.dependent_launch:
            return False
        if self.alone_n and not replace(self.alone(problem), alone_n=0).covers(problem):
            return False
        rows = self.packed * heads_per_tile(problem.group, self.block_m)
        if not 1 < self.packed <= MOST_TOKENS or rows > self.block_m:
            return False
        if needs_map(problem, self):
            # A number has the block above the tokens' bits.
            return bool(cdiv(problem.capacity, problem.block_size) <= _MOST_COLUMNS)
        return is_power_of_two(self.packed) and problem.block_size >= self.block_n

    def _covers_by_blocks(self, problem: Problem) -> bool:
        if problem.bits != 16 or problem.cache_bits != 16 or self.block_n != problem.block_size:
            return False
        if self.packed != 1 or self.num_splits != 1 or self.dependent_launch or self.by_blocks < 1:
            return False
        blocks = cdiv(problem.capacity, problem.block_size) * problem.sequences
        # Entries are numbered in 32 bits.
        numbered = 0 < blocks * problem.num_heads_kv < 2**31 - 1
        return numbered and problem.topk > 0 and power_of_two_at_least(problem.group) <= self.block_m


def needs_map(problem: Problem, plan: SelectedPlan) -> bool:
    """Whether the lists of a tile's tokens are united by a map of all blocks: where they are too long to compare."""
    return plan.packed * power_of_two_at_least(max(1, problem.topk)) > MOST_ENTRIES


def rows_of_token(problem: Problem) -> int:
    """Rows of a tile of one token."""
    return max(16, power_of_two_at_least(min(problem.group, _MOST_ROWS)))


def plan_selected(problem: Problem, limits: DeviceLimits) -> SelectedPlan:
    """The plan for a problem on this device."""
    if limits.hopper and _has_blocks_of_many(problem):
        # MiniMax-M3's prefill of 8192 tokens, random lists, in one run on an H200 (triton 3.6.0, 2026-11-23): 0.59 of
        # the time of tokens walked one by one; 0.66 with 128 rows and eight warps, 0.59 with 8192 tokens at once.
        # Queries are asked for a step ahead, without stages.
        plan = SelectedPlan(
            64, problem.block_size, 1, 4, 1, by_blocks=_tokens_at_once(problem), shared=_can_share(problem)
        )
        if plan.covers(problem):
            return plan
    if problem.bits == 32 or limits.shared_memory <= 64 * 1024:
        plan = SelectedPlan(16, 16, 1, 4, 1)
    else:
        plan = _packed(problem, limits, _of_rows(rows_of_token(problem), problem, limits))
    # Decoding B1 9.2 us for 12.5, B32 53.3 for 58.3, B128 161 for 178, each beside the same plan.
    dependent = limits.hopper and plan.packed == 1
    e4m3 = limits.hopper and problem.cache_bits == 8
    pairs = e4m3 and plan.packed == 1 and problem.bits == 16 and _has_pairs(problem)
    plan = replace(plan, num_splits=_splits(problem, plan, limits), dependent_launch=dependent, e4m3=e4m3, pairs=pairs)
    return _of_few_tiles(_decoding(plan, problem, limits) if dependent else plan, problem)


def _of_few_tiles(plan: SelectedPlan, problem: Problem) -> SelectedPlan:
    """The plan, with two stages where a token's list has no more tiles: what would be loaded ahead is none.

    8 sequences of 4 tokens, one block of 32 each, heads of 128, 4.5 us on an H100, with eight stages 6.7; 16 keys a
    token with heads of 64 4.0 and 5.6; but of four tiles of heads of 256 with four stages 13.1, with six 12.3.
    """
    few = problem.topk * problem.block_size <= 2 * plan.block_n
    return replace(plan, num_stages=min(plan.num_stages, 2)) if plan.packed == 1 and few else plan


def _decoding(plan: SelectedPlan, problem: Problem, limits: DeviceLimits) -> SelectedPlan:
    """The plan where a grid of plans had a better one: MiniMax-M3's heads on an H200, triton 3.6.0, 2026-11-24.

    Lists of 8 and 16 blocks of 128, of 16 and 32 of 64, 1 to 128 sequences; each beside ``plan``, as a share of its
    time. Numbers of sequences between those whose programs would leave SMs idle keep it.
    """
    wide = max(problem.head_dim, problem.head_dim_v)
    if problem.bits != 16 or plan.block_m != 16 or not 64 < wide <= 128 or not _is_measured(problem):
        return plan
    tiles, cores = problem.tokens * problem.num_heads_kv * head_tiles(problem, plan), limits.cores
    keys = problem.topk * problem.block_size
    if not 1024 <= keys <= 2048:
        return plan
    if problem.cache_bits == 8:
        # 128 keys at a time, of which one, two or four tiles are on their way. On an H200, us: 8 sequences 15.1, with
        # a stage less 15.9, 32 25.6 for 38.4 with 64 keys, 64 42.1 for 54.5; on an H100 one sequence 7.5 for 8.2, 32
        # 30.3 for 34.6 with a stage less, and 128 as planned, 101, 102.6 with two warps, 104.8 with 128 keys.
        full = [full for full in (cores, 2 * cores) if 0.9 * full <= tiles <= full]
        if problem.block_size >= 128 and full:
            stages = 5 if full[0] == cores else 3
            return replace(plan, block_n=128, num_splits=1, num_stages=stages, max_registers=0)
        if problem.block_size >= 128 and 4 * tiles <= cores:
            splits = min(16, keys // 128, 2 * cores // tiles)
            stages = 2 if 128 * splits == keys else 3
            return replace(plan, block_n=128, num_splits=splits, num_stages=stages, max_registers=0)
        return plan
    # Two programs of five stages fit on an SM: 64 sequences 0.81 to 0.91 with one split, 32 sequences 0.83 to 0.98.
    deep = replace(plan, num_warps=4, num_stages=5, max_registers=0)
    if any(0.9 * full <= tiles <= full for full in (cores, 2 * cores)):
        return replace(deep, num_splits=1)
    if 4 * tiles > 2 * cores:
        return plan
    if problem.block_size >= 128 and 8 * tiles <= cores:
        # On an H200 one sequence 6.9 us for 7.7 with 64 keys at a time, four 11.1 for 11.6; eight 16.8 for 15.2.
        deep = replace(deep, block_n=128, num_stages=2)
    # 0.85 to 0.99.
    return replace(deep, num_splits=min(16, keys // deep.block_n, 2 * cores // tiles))


def _has_blocks_of_many(problem: Problem) -> bool:
    """Whether each block is listed by many tokens, which are worth their partial results, as MiniMax-M3's are."""
    each = problem.tokens // max(1, problem.sequences)
    measured = problem.block_size == 128 and not _is_wide(problem) and problem.group <= 16
    return measured and problem.tokens >= 2048 and each >= 256 and _tokens_at_once(problem) >= 1024


def tokens_of_shared(problem: Problem) -> int:
    """Tokens of a tile for blocks that neighbours share."""
    return _SHARED_ROWS // problem.group


def _can_share(problem: Problem) -> bool:
    """Whether there is a kernel, of sm_90, for the blocks that neighbouring tokens share."""
    candidates = power_of_two_at_least(max(1, problem.topk))
    return (
        problem.block_size in (64, 128)
        and problem.head_dim == problem.head_dim_v
        and problem.head_dim in (64, 128)
        and problem.group in (4, 8, 16)
        and problem.softmax_scale * problem.k_factor > 0
        and problem.page_size % 8 == 0
        # Each entry of a tile is compared with each candidate, in registers.
        and candidates * candidates * tokens_of_shared(problem) <= _MOST_COMPARED
    )


def _tokens_at_once(problem: Problem) -> int:
    """As many as have 1 GB of partial results."""
    each = 2 * problem.num_heads * max(1, problem.topk) * problem.head_dim_v
    return power_of_two_at_most(max(1, 2**30 // each))


def _of_rows(block_m: int, problem: Problem, limits: DeviceLimits) -> SelectedPlan:
    """A plan for tiles of so many rows."""
    block_n = 32 if _is_wide(problem) else 64
    if limits.shared_memory <= 200 * 1024:
        return SelectedPlan(block_m, block_n, 1, 4, 3)
    if _is_wide(problem) and problem.block_size < 32 and block_m == 16:
        # Qwen3.8, decoding B32: 56.9 us for 61.0 with 32 keys and two tiles on their way.
        return SelectedPlan(block_m, 64, 1, 4, 3)
    if not _is_measured(problem):
        # The lists, then the block table are loaded ahead of the keys, of which two tiles are on their way.
        return SelectedPlan(block_m, block_n, 1, 4, 8 if problem.block_size < block_n else 6)
    # With one tile on its way more programs fit on an SM: 133 us for 156, decoding B128.
    if block_m == 32 and problem.block_size >= 128 and problem.cache_bits == 16:
        # Prefill, two tokens of random lists: 5515 us for 7209 with 64 keys. Rows of one token gain nothing, 4609 for
        # 4573, nor do those of four, 9749 for 6077.
        block_n = 128
    # So four programs of 16 rows fit on an SM, as those of smaller heads do: decoding B128 127.7 us for 133, of e4m3
    # 235 for 276.
    limited = block_m == 16 and max(problem.head_dim, problem.head_dim_v) > 64
    return SelectedPlan(block_m, block_n, 1, 4, 3, max_registers=128 if limited else 0)


def _has_pairs(problem: Problem) -> bool:
    """Whether heads are of pairs of elements, and of two products' smallest size or more."""
    sizes = problem.head_dim, problem.head_dim_v
    return all(size % 2 == 0 and size > 16 for size in sizes)


def _is_wide(problem: Problem) -> bool:
    return max(problem.head_dim, problem.head_dim_v) > 128


def _is_measured(problem: Problem) -> bool:
    """Whether tiles are such as MiniMax-M3's, with which an H200 was measured: triton 3.6, torch 2.11, 2026-11-23."""
    return problem.block_size >= 64 and not _is_wide(problem)


def _packed(problem: Problem, limits: DeviceLimits, alone: SelectedPlan) -> SelectedPlan:
    """Neighbouring tokens in one tile: a block that several of them list is read once."""
    each = problem.tokens // max(1, problem.sequences)
    if each < 8:
        return alone
    large = limits.shared_memory > 200 * 1024 and not _is_wide(problem)
    if large and problem.block_size < 64 and alone.block_m == 16 and problem.cache_bits == 16:
        return _of_small_blocks(problem)
    if problem.block_size < alone.block_n:
        return alone
    entries = power_of_two_at_least(max(1, problem.topk))
    tokens = min(_MOST_ROWS // problem.group, MOST_ENTRIES // entries, MOST_TOKENS)
    if tokens < 2:
        return alone
    tokens = power_of_two_at_most(tokens)
    block_m = max(16, power_of_two_at_least(tokens * problem.group))
    plan = replace(_of_rows(block_m, problem, limits), packed=tokens, max_registers=0)
    if limits.shared_memory <= 200 * 1024:
        return plan
    if problem.cache_bits == 8 or not _is_measured(problem):
        return replace(plan, num_stages=4)
    if block_m > 32:
        # 5944 us for 6077 with random lists, 3309 for 3341 with lists that are alike to three quarters.
        plan = replace(plan, num_stages=5)
    if block_m == alone.block_m:
        return plan
    share = _UNITED_SHARE[alone.block_m, block_m]
    return replace(
        plan, most_united=int(share * tokens * problem.topk), alone_n=alone.block_n, alone_warps=alone.num_warps,
        alone_stages=alone.num_stages, max_registers=alone.max_registers,
    )  # fmt: skip


def _of_small_blocks(problem: Problem) -> SelectedPlan:
    """Prompts over blocks of fewer than 64 keys; long lists of neighbours are united by a map, where that pays.

    On an H100 (triton 3.6.0, 2026-11-27), in us, 512 blocks of 32, heads of 64, 12 to a kv head: 7733 with 64 keys at a
    time, of which 8 tiles are on their way, 5129 with 128 and two, five tokens in a tile 3010, ten 6097; of random
    lists 7590, 5063, 3434. 64 blocks of 32, heads of 128: 4534, 2338; four tokens 2422, by a kernel that spills. On an
    H200, with blocks looked up two tiles ahead and pages one, five tokens 2484 for 2993, with three stages 2384.
    """
    alone = SelectedPlan(16, 128, 1, 4, 2)
    tokens = min(_MOST_ROWS // problem.group, MOST_TOKENS)
    plan = SelectedPlan(_MOST_ROWS, 128, 1, 4, 3, packed=tokens)
    columns = cdiv(problem.capacity, problem.block_size)
    if tokens < 4 or problem.topk <= 64 or max(problem.head_dim, problem.head_dim_v) > 64:
        return alone
    if 4 * columns * num_slots(problem, plan) * problem.num_heads_kv > _MOST_MAPS or columns > _MOST_COLUMNS:
        return alone
    # A tile takes as long as its tokens by themselves where they list 0.57 times as many blocks as they have entries.
    return replace(
        plan, most_united=tokens * problem.topk // 2, alone_n=alone.block_n, alone_warps=alone.num_warps,
        alone_stages=alone.num_stages,
    )  # fmt: skip


def num_slots(problem: Problem, plan: SelectedPlan) -> int:
    """Slots in the grid for tiles of tokens: sequences, and the rows before and after all, may leave one unfilled."""
    if plan.packed == 1:
        return problem.tokens
    return problem.tokens // plan.packed + problem.sequences + 2


def head_tiles(problem: Problem, plan: SelectedPlan) -> int:
    """Tiles of the query heads of a kv head."""
    return cdiv(problem.group, heads_per_tile(problem.group, plan.block_m))


def _splits(problem: Problem, plan: SelectedPlan, limits: DeviceLimits) -> int:
    """Splits of a tile's list: as many as keep all SMs evenly busy, and no more."""
    tiles = max(1, cdiv(problem.tokens, plan.packed) * problem.num_heads_kv * head_tiles(problem, plan))
    if tiles >= 4 * limits.cores:
        return 1
    # So many of these programs fit on an SM, and each waits for memory most of its time.
    resident = 4 if limits.shared_memory > 200 * 1024 and _is_measured(problem) and plan.packed == 1 else 2
    cores = resident * limits.cores
    steps = max(1, cdiv(problem.topk * problem.block_size, plan.block_n))
    return quickest_splits(tiles, steps, cores, least=2)
