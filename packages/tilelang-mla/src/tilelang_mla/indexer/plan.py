"""Plans of the indexer's kernels: pure functions from a problem and the device's limits."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_reference.integers import cdiv
from kernel_reference.plans import Plan
from tilelang_mla.plan import DeviceLimits

# Elements of a key, and heads that rows of WGMMA's operands can be made of.
INDEX_DIM = 128
INDEX_HEADS = (16, 32, 64, 128)
# Pages are of a multiple of so many tokens: the swizzle of a TMA load spans 8 rows, and scales are loaded in 16 bytes.
PAGE_STEP = 16
# Rows of q, tokens x heads, of a tile: with 512 keys come through L2 at half of what the tensor cores could take.
_MOST_ROWS = 512
# Rows of a consumer warpgroup: a thread has their 64 sums and 32 weights in registers.
_OF_GROUP = 128
# Programs for each SM, that those of unlike length even out; and keys of a chunk, of which they get one after another.
_PROGRAMS, _CHUNK_KEYS = 8, 512
# Beside the ring: what is told of a tile, and barriers.
_BESIDE = 2048
# Positions that the top-k's bit map has, of 32 to a word; longer rows are refused.
_WORDS = (4096, 32768)
MOST_POSITIONS = 32 * _WORDS[-1]
# Positions of a list: candidates and lists lie in shared memory.
MOST_TOPK = 4096
# Threads of a program of the top-k: all of an SM where rows are few, else half.
_THREADS = (1024, 512)


@dataclass(frozen=True)
class IndexProblem:
    """Scores of the indexer, as plan, launch and reference are told of them.

    each: tokens of a sequence where it has as many as the others; 0 where they are ragged. width: of a row of scores.
    capacity: keys that a sequence may have.
    """

    heads: int
    tokens: int
    sequences: int
    each: int
    page_size: int
    pages: int
    capacity: int
    width: int
    clean: bool

    @property
    def ragged(self) -> bool:
        """Whether bounds tell which tokens a sequence has."""
        return self.each == 0


@dataclass(frozen=True)
class TopkProblem:
    """A top-k, as plan, launch and reference are told of it; page_size 0: positions stay."""

    tokens: int
    width: int
    topk: int
    each: int
    page_size: int


@dataclass(frozen=True)
class IndexPlan(Plan):
    """Tiles of ``tile_tokens`` query tokens; blocks of ``block_n`` keys, ``num_stages`` in flight.

    Chunks of blocks go to ``programs`` of a tile round-robin: no sequence's length is known where these are launched.
    Consumer warpgroups share a block's keys, or where its rows of q are more than 128, those.
    """

    tile_tokens: int
    block_n: int
    num_stages: int
    warpgroups: int
    chunk: int
    programs: int = 1

    def covers(self, problem: IndexProblem) -> bool:
        """Whether its blocks are such that the kernel can take them, for this problem."""
        rows = self.tile_tokens * problem.heads
        by_key = rows <= _OF_GROUP and self.block_n == 64 * self.warpgroups and self.warpgroups in (1, 2, 4)
        by_token = self.block_n == 64 and rows == _OF_GROUP * self.warpgroups and self.warpgroups in (2, 4)
        counts = 2 <= self.num_stages <= 16 and min(self.tile_tokens, self.chunk, self.programs) >= 1
        return (by_key or by_token) and counts

    def shared_memory(self, problem: IndexProblem) -> int:
        """Bytes of a program: a tile of q, the ring of keys and their scales, and a block's sums."""
        # Scales of 16 keys take the space of 32.
        ring = self.num_stages * self.block_n * (INDEX_DIM + 8)
        sums = 4 * self.tile_tokens * self.block_n
        return self.tile_tokens * problem.heads * INDEX_DIM + ring + sums + _BESIDE

    def num_slots(self, problem: IndexProblem) -> int:
        """Slots of tiles: as many as sequences of any lengths can need, and of tokens that are none's."""
        if not problem.ragged:
            return problem.sequences * cdiv(problem.each, self.tile_tokens)
        return problem.tokens // self.tile_tokens + problem.sequences + 2

    def piece(self, problem: IndexProblem) -> int:
        """Keys of a TMA load: they lie together in a page."""
        return next(size for size in (64, 32, 16) if problem.page_size % size == 0)


def plan_index_scores(problem: IndexProblem, limits: DeviceLimits) -> IndexPlan:
    """As many tokens to a tile as sequences have on average, and as many programs as fill the SMs a few times over."""
    tokens = problem.each or cdiv(problem.tokens, max(1, problem.sequences))
    tile_tokens = 1
    while tile_tokens < tokens and tile_tokens * problem.heads < _MOST_ROWS:
        tile_tokens *= 2
    rows = tile_tokens * problem.heads
    if rows <= _OF_GROUP:
        block_n, num_stages, warpgroups = 128, 4, 2
    else:
        block_n, num_stages, warpgroups = 64, 8, rows // _OF_GROUP
    chunk = _CHUNK_KEYS // block_n
    slots = IndexPlan(tile_tokens, block_n, num_stages, warpgroups, chunk).num_slots(problem)
    chunks = cdiv(min(problem.width, problem.capacity), _CHUNK_KEYS)
    most = max(1, min(chunks, cdiv(_PROGRAMS * limits.cores, max(1, slots))))
    # As many that those of a row without a rest have as many chunks.
    programs = max(1, cdiv(chunks, cdiv(chunks, most))) if chunks else 1
    return IndexPlan(tile_tokens, block_n, num_stages, warpgroups, chunk, programs)


def topk_words(width: int) -> int:
    """Words of the bit map for rows of so many scores."""
    return next(words for words in _WORDS if width <= 32 * words)


def topk_threads(tokens: int, limits: DeviceLimits) -> int:
    """Threads of a program, which has a row."""
    return _THREADS[0] if tokens <= limits.cores else _THREADS[1]
