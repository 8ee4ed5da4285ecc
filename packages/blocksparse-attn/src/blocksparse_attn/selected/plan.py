"""Launch plans of selected attention: pure functions from a problem and the device's limits, see ``..plan``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from blocksparse_attn.plan import DeviceLimits, heads_per_tile
from kernel_reference.integers import cdiv, is_power_of_two, power_of_two_at_least, power_of_two_at_most
from kernel_reference.plans import Plan

# More partial results than this take the merge kernel too long.
_MOST_SPLITS = 128
# Entries of all lists of a tile: each is compared with each, in registers.
MOST_ENTRIES = 128
# Tokens of a tile, which are bits of a number.
MOST_TOKENS = 16
# Rows of a tile that WGMMA multiplies.
_MOST_ROWS = 64


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

    def alone(self, problem: Problem) -> SelectedPlan:
        """The plan of the kernel for tokens whose lists have little in common."""
        return replace(
            self, block_m=rows_of_token(problem), block_n=self.alone_n, num_warps=self.alone_warps,
            num_stages=self.alone_stages, packed=1,
        )  # fmt: skip

    def covers(self, problem: Problem) -> bool:
        """Whether the kernel can run this problem with this plan."""
        if not is_power_of_two(self.block_m, self.block_n, self.num_warps, self.packed):
            return False
        if min(self.block_m, self.block_n) < 16 or min(self.num_stages, self.num_splits) < 1:
            return False
        if self.packed == 1:
            return self.alone_n == 0
        if self.alone_n and not replace(self.alone(problem), alone_n=0).covers(problem):
            return False
        rows = self.packed * heads_per_tile(problem.group, self.block_m)
        entries = self.packed * power_of_two_at_least(max(1, problem.topk))
        fits = rows <= self.block_m and entries <= MOST_ENTRIES and self.packed <= MOST_TOKENS
        return fits and problem.block_size >= self.block_n


def rows_of_token(problem: Problem) -> int:
    """Rows of a tile of one token."""
    return max(16, power_of_two_at_least(min(problem.group, _MOST_ROWS)))


def plan_selected(problem: Problem, limits: DeviceLimits) -> SelectedPlan:
    """The plan for a problem on this device."""
    small = limits.shared_memory <= 64 * 1024
    wide = max(problem.head_dim, problem.head_dim_v) > 128
    if problem.bits == 32 or small:
        plan = SelectedPlan(16, 16, 1, 4, 1)
    else:
        large = limits.shared_memory > 200 * 1024
        # The lists, then the block table are loaded ahead of the keys, of which two tiles are on their way.
        block_n = 32 if wide else 64
        plan = SelectedPlan(
            rows_of_token(problem), block_n, 1, 4, (8 if problem.block_size < block_n else 6) if large else 3
        )
        plan = _packed(problem, plan)
    return replace(plan, num_splits=_splits(problem, plan, limits))


def _packed(problem: Problem, plan: SelectedPlan) -> SelectedPlan:
    """Neighbouring tokens in one tile: a block that several of them list is read once."""
    each = problem.tokens // max(1, problem.sequences)
    if problem.block_size < plan.block_n or each < 8:
        return plan
    entries = power_of_two_at_least(max(1, problem.topk))
    tokens = min(_MOST_ROWS // problem.group, MOST_ENTRIES // entries, MOST_TOKENS)
    if tokens < 2:
        return plan
    tokens = power_of_two_at_most(tokens)
    block_m = max(16, power_of_two_at_least(tokens * problem.group))
    return replace(plan, block_m=block_m, num_stages=min(plan.num_stages, 4), packed=tokens)


def num_slots(problem: Problem, plan: SelectedPlan) -> int:
    """Slots in the grid for tiles of tokens: sequences, and the rows before and after all, may leave one unfilled."""
    return problem.tokens // plan.packed + problem.sequences + 2


def head_tiles(problem: Problem, plan: SelectedPlan) -> int:
    """Tiles of the query heads of a kv head."""
    return cdiv(problem.group, heads_per_tile(problem.group, plan.block_m))


def _splits(problem: Problem, plan: SelectedPlan, limits: DeviceLimits) -> int:
    """Splits of a tile's list: as many as keep all SMs evenly busy, and no more."""
    # Two of these programs fit on an SM, and each waits for memory most of its time.
    cores = 2 * limits.cores
    tiles = max(1, cdiv(problem.tokens, plan.packed) * problem.num_heads_kv * head_tiles(problem, plan))
    if tiles >= 2 * cores:
        return 1
    steps = max(1, cdiv(problem.topk * problem.block_size, plan.block_n))
    most = max(1, min(_MOST_SPLITS, steps // 2))

    def cost(splits: int) -> int:
        """In steps: programs run in waves, prologue and epilogue cost two, merging costs three."""
        return cdiv(tiles * splits, cores) * (cdiv(steps, splits) + 2) + 3 * (splits > 1)

    return min(range(1, most + 1), key=cost)
