"""Launch plans: pure functions from a problem and the device's limits.

A plan is a value: it can be built, printed and tested on a machine with no GPU, and pinned by a caller with ``plan=``.
What of a plan depends on lengths is a tensor, made on the device by schedule.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kernel_reference.integers import cdiv as cdiv
from kernel_reference.integers import power_of_two_at_most
from kernel_reference.plans import Plan
from tilelang_mla.waves import MOST_PARTS, heads_at_once, parts_of_tiles, programs_of_tiles, shares_of

# Rows of a WGMMA: query tokens x heads are packed into tiles of as many.
_ROWS = 64
# Parts beyond one a sequence, in multiples of what the device runs at once: schedules of more are not looked at.
WAVES = 2
# Costs are in units of an eighth of the time of a block of keys, some 2 us. What a part costs beside its blocks: its
# beginning and end, and, where it is not alone, 64 rows of 512 float32 to write.
_BLOCK, _START, _MERGE = 8, 8, 8
# A block of records, and what it takes programs to find their shares of a batch.
_BLOCK_OF_RECORDS, _SHARING = 13, 12
# Rows of parts, of 512 float32, that are written and read again by all programs together in a unit.
_MERGED_ROWS = 128
# Register budget of a consumer's thread: for accumulators, scores and weights.
_IN_REGISTERS = 176
# Shared memory beside the stages: factors of rows, rows of pages, work items, and barriers, each aligned to 1024 bytes.
_BESIDE = 3072
# Blocks of a cache of 8 bits that are in flight before they are widened, and what a record of it has beside its
# latents and ropes as if these had 8 bits: 16 bytes of scales and 64 more of rope.
_RAW_STAGES, _SCALES = 3, 80
# Of the kernel whose rows of MMA are keys: latents, keys of a block and of a stage, and the most stages: more than are
# loaded in the time of a block show nothing.
_LATENT, _ROPE, _KEYS, _OF_STAGE, _MOST_STAGES = 512, 64, 128, 64, 5
# Keys of a page that TMA brings at once; 8 at once take longer than one by one (266 us for 263, pages of 64 254; H100).
_BOX = 16
# Of 64 rows the accumulators leave no registers to widen keys in, but where a block is one stage, of as many.
_FEW_ROWS, STAGES_OF_RECORDS = 32, 3
# Rows of the kernel that widens no key; and elements of q side by side, two numbers of 8 bits each.
_NARROW, _LINE = 16, 128
# Pieces of a row, of 32 bytes or more: of 64 elements as many. And the fewest where one may have most of the parts.
_MOST_PIECES, _PIECES = 16, 4
# Blocks of keys from which on one sequence may have most of the parts, so that rows are cut though others may have one:
# one of 100000 keys among 63 of up to 1000 takes 105 us for 128 at 64 heads, 84 for 91 at 16 (H100).
_LONG = 256
# Programs of the combine kernel on an SM, at most; those that run at once, of which fewer would all be on the SMs that
# are free first; and sequences of a program.
_MERGING, _MERGED_AT_ONCE, _MERGED_BY_ONE = 16, 9, 32
# Keys up to which a sequence is left whole: starting the kernel that merges takes longer than a block of keys.
_SHORT = 128
# More partial results take the combine kernel too long.
MOST_SPLITS = 256


@dataclass(frozen=True)
class DeviceLimits:
    """What a plan needs to know of a GPU: its SMs, and the bytes of shared memory that a program may have."""

    cores: int
    shared_memory: int = 227 * 1024


@dataclass(frozen=True)
class PrefillProblem:
    """A prefill, as plan, launch and reference are told of it; it is made by ``arguments.check_prefill``.

    ``tokens``, ``tokens_k``: rows of q and of k. ``bits``: of an element.
    """

    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    tokens: int
    sequences: int
    max_seqlen_q: int
    causal: bool = True
    bits: int = 16
    tokens_k: int = 0
    max_seqlen_k: int = 0
    softmax_scale: float = 1.0


@dataclass(frozen=True)
class DecodeProblem:
    """A step of decoding, as plan, launch and reference are told of it; it is made by ``arguments.check_decode``.

    ``dim_rope``: elements of q and of the cache behind the latent's ``dim_nope``. ``capacity``: keys that a sequence
    may have. ``bits``: of an element. ``pages``: of the pool. ``per_token``: lengths are those that each query token
    sees, in place of the causal rule. ``cache``: "" of q's dtype, or its format of 8 bits, "e4m3" or "656".
    """

    num_heads: int
    dim_nope: int
    dim_rope: int
    seqlen_q: int
    sequences: int
    capacity: int
    page_size: int
    bits: int = 16
    pages: int = 0
    softmax_scale: float = 1.0
    causal: bool = True
    per_token: bool = False
    cache: str = ""

    @property
    def rows(self) -> int:
        """Rows of a sequence: its query tokens x heads."""
        return self.seqlen_q * self.num_heads


@dataclass(frozen=True)
class PrefillPlan(Plan):
    """Tiles of ``block_m`` queries of a head; their keys, ``block_n`` to a stage, ``num_stages`` in flight.

    ``num_splits``: programs that share a tile's keys, in parts that are merged, whose elements 32 bits count.
    """

    block_m: int
    block_n: int
    num_stages: int
    num_splits: int = 1

    def covers(self, problem: PrefillProblem) -> bool:
        """Whether its blocks are such that a kernel can take them, for this problem."""
        blocks = self.block_m in (64, 128) and self.block_n in (32, 64, 96, 128)
        blocks &= 1 <= self.num_stages <= 4 and 1 <= self.num_splits <= MOST_PARTS
        elements = problem.tokens * problem.num_heads * problem.head_dim_v * self.num_splits
        blocks &= self.num_splits == 1 or elements < 2**31
        return blocks and problem.num_heads % problem.num_heads_kv == 0

    def shared_memory(self, problem: PrefillProblem) -> int:
        """Bytes of a program: a tile of q, stages of keys and values, and what the scheduler tells of."""
        keys = self.num_stages * self.block_n * (problem.head_dim + problem.head_dim_v)
        return (self.block_m * problem.head_dim + keys) * problem.bits // 8 + _BESIDE

    def num_slots(self, problem: PrefillProblem) -> int:
        """Slots of a head in the schedule: as many tiles as sequences of any lengths can need.

        Two more are for rows behind the last sequence, and before the first where that begins too late.
        """
        return problem.tokens // self.block_m + problem.sequences + 2

    def num_tiles(self, problem: PrefillProblem) -> int:
        """Tiles that sequences of any lengths may have, in all heads."""
        return problem.num_heads * (cdiv(problem.tokens, self.block_m) + problem.sequences - 1)

    def heads_at_once(self, problem: PrefillProblem) -> int:
        """Heads of the queries whose tiles are taken together, by turns: as many as keep a sequence's keys in L2."""
        held = cdiv(problem.tokens_k, max(1, problem.sequences)) * (problem.head_dim + problem.head_dim_v)
        group = problem.num_heads // problem.num_heads_kv
        return heads_at_once(problem.num_heads_kv, held * problem.bits // 8) * group

    def num_programs(self, problem: PrefillProblem, cores: int) -> int:
        """Programs of a launch."""
        slots = self.num_slots(problem) * problem.num_heads
        return programs_of_tiles(self.num_tiles(problem) * self.num_splits, slots * self.num_splits, cores)


@dataclass(frozen=True)
class DecodeTiles(Plan):
    """Tiles of ``block_m`` rows, packed query tokens x heads; a part of a sequence's keys, ``block_n`` to a stage.

    ``num_stages`` blocks are in flight. A grid has ``num_splits`` parts for each sequence and ``spare_parts`` for all
    of them, which those share that are cut further; neither depends on the batch or on lengths. ``by_rows``: the
    producer's threads keep addresses of keys that lie anywhere, and widen those of 8 bits for more than 32 rows, unless
    :meth:`records_are_rows`.
    ``narrow``: keys of 8 bits are not widened, but q in bfloat16 and weights are two numbers of 8 bits each. By choice
    alone: tensor cores keep 13 bits of such sums, so that large products which cancel take small ones with them.
    ``rows``: the query tokens x heads of a sequence that it was made for; 0: any.
    ``early``: scores of a block are asked for before the values of the one before it are there; only where dense keys
    of 16 bits are loaded by TMA or by rows, and in sparse prefill. ``paired``: two programs, of tiles of rows side by
    side, widen half of the keys each, for both.
    """

    block_m: int
    block_n: int
    num_stages: int
    num_splits: int = 1
    spare_parts: int = 0
    by_rows: bool = False
    narrow: bool = False
    early: bool = False
    paired: bool = False
    rows: int = 0

    def covers(self, problem: DecodeProblem) -> bool:
        """Whether its blocks are such that a kernel can take them, for this problem."""
        if self.keys_are_rows(problem):
            blocks = self.block_m in (16, _FEW_ROWS) and 2 <= self.num_stages <= _MOST_STAGES
        else:
            blocks = self.block_m == _ROWS and self.block_n in (16, 32, 64, 128) and 1 <= self.num_stages <= 4
        if self.narrow:
            blocks &= self.keys_are_rows(problem) and self.block_m == _NARROW and problem.cache == "e4m3"
        if self.paired:
            blocks &= self.widens_by_rows(problem) and self.row_tiles(problem.rows) % 2 == 0
        return blocks and 1 <= self.num_splits <= MOST_SPLITS and self.spare_parts >= 0

    def shared_memory(self, problem: DecodeProblem) -> int:
        """Bytes of a program: a tile of q and its weights, stages of keys, and what the scheduler tells of."""
        if self.keys_are_rows(problem):
            width = problem.dim_nope + problem.dim_rope
            key, held = (656, width) if problem.cache == "656" else (width, cdiv(width, _LINE) * _LINE)
            # Of few rows each of a record's scales has weights of its own.
            weights = 4 if problem.cache == "656" and self.block_m == _NARROW else 1
            held = 2 * self.block_m * (held + 2 * weights * self.block_n)
            return held + self.num_stages * _OF_STAGE * (key + 1) + 172 * self.block_m + _BESIDE + 2048
        width = problem.dim_nope + problem.dim_rope
        if self.block_m == _NARROW:
            # Keys of 16 bits are rows: q and weights twice, and what is known of rows.
            held = 2 * self.block_m * (width + self.block_n) + self.num_stages * self.block_n * width
            return held * problem.bits // 8 + 172 * self.block_m + _BESIDE + 1024
        if self.records_are_rows(problem):
            held = 2 * self.block_m * (width + 2 * self.block_n) + STAGES_OF_RECORDS * _OF_STAGE * 657
            return held + 172 * self.block_m + _BESIDE + 1024
        held = (self.block_m + self.num_stages * self.block_n) * width + self.block_m * self.block_n
        raw = _RAW_STAGES * self.block_n * (width + _SCALES) if problem.cache and not self.loads_by_rows(problem) else 0
        return held * problem.bits // 8 + raw + _BESIDE

    def num_programs(self, problem: DecodeProblem, shared: bool, planned: bool, cores: int) -> int:
        """Programs of a launch. Parts of no schedule are in no order: a program for each is more even."""
        row_tiles = self.row_tiles(problem.rows)
        if shared:
            return (self.spare_parts + 1) * row_tiles
        programs = self.num_parts(problem.sequences) * row_tiles
        return min(programs, cores - cores % 2 if self.paired else cores) if planned else programs

    def keys_are_rows(self, problem: DecodeProblem) -> bool:
        """Whether keys of 8 bits are the rows of MMAs, widened in registers."""
        right = problem.dim_nope == _LATENT and problem.dim_rope % 64 == 0
        return bool(problem.cache) and right and self.block_n == _KEYS

    def loads_by_rows(self, problem: DecodeProblem) -> bool:
        """Whether keys that lie anywhere are loaded by rows: latents of 512, a rope of 64 or, of 16 bits, none."""
        bare = problem.dim_rope == 0 and not problem.cache
        right = problem.dim_nope == _LATENT and (problem.dim_rope == _ROPE or bare)
        return bool(self.by_rows) and right and (self.block_m, self.block_n) == (_ROWS, _OF_STAGE)

    def loads_boxes(self, problem: DecodeProblem) -> bool:
        """Whether such keys come by TMA, 16 at a time: of 16 bits, in pages of a multiple of as many."""
        return not problem.cache and self.loads_by_rows(problem) and problem.page_size % _BOX == 0

    def records_are_rows(self, problem: DecodeProblem) -> bool:
        """Whether records that one program would widen by rows are the rows of MMAs instead, in as many stages as
        :data:`STAGES_OF_RECORDS`: 64 of 16384 at 64 heads 359 us for 482 (H100). Two that share take less: 346 for 394.
        """
        return problem.cache == "656" and self.widens_by_rows(problem) and not self.paired

    def widens_by_rows(self, problem: DecodeProblem) -> bool:
        """Whether keys of 8 bits are loaded by rows, and widened on their way."""
        return bool(problem.cache) and self.loads_by_rows(problem)

    def joins(self, problem: DecodeProblem) -> bool:
        """Whether programs of the two parts of each sequence are a cluster that merges them: one tile of rows each.

        What they give each other, half of an accumulator in float32, takes the memory of two stages.
        """
        pair = self.num_splits == 2 and self.spare_parts == 0 and self.row_tiles(problem.rows) == 1
        return pair and self.num_stages >= 2 and (self.loads_by_rows(problem) or self.keys_are_rows(problem))

    def asks_early(self, problem: DecodeProblem) -> bool:
        """Whether the decoding kernel asks for scores early: blocks lie in one page each, or keys come by rows."""
        return bool(self.early) and (problem.page_size % self.block_n == 0 or self.loads_by_rows(problem))

    def num_parts(self, sequences: int) -> int:
        """Parts in the grid: no schedule of this plan has more."""
        return sequences * self.num_splits + self.spare_parts

    def row_tiles(self, rows: int) -> int:
        """Tiles that hold the packed rows of a sequence, each once."""
        return cdiv(rows, self.block_m)


def plan_prefill(problem: PrefillProblem, limits: DeviceLimits) -> PrefillPlan:
    """The largest blocks that fit: two tiles of 64 rows, one a consumer warpgroup, share the keys."""
    size = problem.bits // 8
    queries = 128 * max(problem.head_dim, problem.head_dim_v) * size
    for block_n, num_stages in ((128, 2), (64, 2), (64, 1), (32, 1)):
        keys = num_stages * block_n * (problem.head_dim + problem.head_dim_v) * size
        held = problem.head_dim_v // 2 + block_n // 2 + block_n // 4
        if queries + keys + _BESIDE <= limits.shared_memory and held <= _IN_REGISTERS:
            # Of a sequence's mean: bits are not to depend on bounds of lengths, which may be above them.
            blocks = cdiv(problem.tokens_k, block_n * max(1, problem.sequences))
            whole = PrefillPlan(128, block_n, num_stages)
            return replace(whole, num_splits=parts_of_tiles(whole.num_tiles(problem), blocks, limits.cores))
    return PrefillPlan(64, 32, 1)


def decode_tiles(
    rows: int, dim_nope: int, dim_rope: int, max_seqlen_k: int | None, limits: DeviceLimits,
    num_splits: int | None = None, bits: int = 16, *, known: Callable[[bool], bool] = bool,
) -> DecodeTiles:  # fmt: skip
    """The tiles of ``plan_decode``, from no length and no batch: its bits with ``num_splits`` depend on neither.

    ``rows``: query tokens x heads. ``max_seqlen_k`` None: any. ``known``: says of a comparison with it whether it holds
    for certain; while torch.compile traces, the number may be a symbol that only the device knows.
    """
    block_n, num_stages = keys_in_flight(dim_nope, dim_rope, limits, bits)
    # On an H200 by rows 274 us for 435 over pages of 16 at 128 heads, 165 for 228 at 16; over lists 84 for 127.
    by_rows = dim_nope == _LATENT and dim_rope in (0, _ROPE) and block_n == _OF_STAGE
    # 256 rows of 128 x 4096: 522 us for 566 (H100). Lists took 0.98 to 1.02 of the time; other sizes were not timed.
    early = by_rows and dim_rope == _ROPE and rows > 2 * _ROWS
    if num_splits is not None:
        return DecodeTiles(_ROWS, block_n, num_stages, num_splits, 0, by_rows, early=early, rows=rows)
    alone = max_seqlen_k is not None and known(max_seqlen_k <= _SHORT)
    spare = 0 if alone else WAVES * parts_at_once(rows, limits.cores)
    return DecodeTiles(_ROWS, block_n, num_stages, 1, spare, by_rows, early=early, rows=rows)


def tiles_8bit(problem: DecodeProblem, tiles: DecodeTiles, limits: DeviceLimits) -> DecodeTiles:
    """The same parts over a cache of 8 bits.

    Of more than 32 rows those of the loader by rows, which widens a key once for 64 of them: 0.79 to
    0.88 of the time of those below on an H200, at 64 and 128 heads. Else
    those of :func:`tiles_of_keys` where that kernel is: on an H200 it took 0.30 to 0.79 of the time of the other one,
    over lists 0.54 to 1.03. Else smaller blocks, beside which those fit that are still to be widened. Tiles of keys
    that a plan asks for stay as they are.
    """
    if tiles.keys_are_rows(problem):
        return tiles
    by_rows = DecodeTiles(_ROWS, _OF_STAGE, 2, tiles.num_splits, tiles.spare_parts, True)
    if problem.rows > _FEW_ROWS and by_rows.loads_by_rows(problem):
        return replace(by_rows, paired=by_rows.row_tiles(problem.rows) % 2 == 0)
    of_keys = tiles_of_keys(problem, tiles, limits)
    if of_keys.keys_are_rows(problem):
        return of_keys
    return DecodeTiles(_ROWS, 32, 2, tiles.num_splits, tiles.spare_parts)


def tiles_of_keys(problem: DecodeProblem, tiles: DecodeTiles, limits: DeviceLimits) -> DecodeTiles:
    """The same parts over a cache of 8 bits, for the kernel whose rows of MMAs are keys, widened in registers.

    Latents are 512, ropes a multiple of 64.
    """
    block_m = _NARROW if problem.rows <= _NARROW else _FEW_ROWS
    for num_stages in range(_MOST_STAGES, 1, -1):
        chosen = DecodeTiles(block_m, _KEYS, num_stages, tiles.num_splits, tiles.spare_parts)
        if chosen.shared_memory(problem) <= limits.shared_memory:
            return chosen
    return chosen


def plan_without_schedule(problem: DecodeProblem, limits: DeviceLimits) -> DecodeTiles:
    """The plan of a call without one, from shapes alone: a part of each sequence, and one more for each further share.

    Programs share the keys of the batch by its lengths, on the device; a share's beginning cuts one sequence at most.
    """
    tiles = decode_tiles(problem.rows, problem.dim_nope, problem.dim_rope, problem.capacity, limits, 1, problem.bits)
    if problem.cache:
        tiles = tiles_8bit(problem, tiles, limits)
    blocks = max(1, cdiv(problem.capacity, tiles.block_n))
    most = max(1, problem.sequences * blocks)
    shares = min(most, shares_of(tiles.row_tiles(problem.rows), limits.cores))
    return replace(tiles, spare_parts=shares - 1)


def plan_of_call(problem: DecodeProblem, limits: DeviceLimits) -> tuple[DecodeTiles, bool]:
    """The plan of a call without one, and whether its programs share the batch: short sequences are whole, by turns."""
    tiles = plan_without_schedule(problem, limits)
    return (replace(tiles, spare_parts=0), False) if problem.capacity <= _SHORT else (tiles, True)


def plan_of_whole_lists(problem: DecodeProblem, limits: DeviceLimits) -> tuple[DecodeTiles, bool]:
    """The plan of a call without one whose lists all count to their ends, and whether its programs share the batch.

    The host knows how long such lists are: where equal parts of each that run at once cost less than shares, which
    programs have to find first, each list has those. On an H100, in graphs, 0.85 to 0.98 of the time of shares.
    """
    tiles = plan_without_schedule(problem, limits)
    lists, blocks = problem.sequences, max(1, cdiv(problem.capacity, tiles.block_n))
    places = lists * tiles.row_tiles(problem.rows)
    block = _BLOCK_OF_RECORDS if problem.cache else _BLOCK

    def cost(blocks_each: int, parts: int) -> int:
        merged = merge_cost(problem.rows) + parts * problem.rows // _MERGED_ROWS if parts > lists else 0
        return blocks_each * block + _START + merged

    turns = cdiv(places, limits.cores)
    # Of more lists than SMs programs take whole ones by turns, if few SMs have none in the last: 256 of 64 heads 247 us
    # for 255 (H100).
    even = turns > 1 and 8 * places >= 7 * turns * limits.cores
    numbers = range(1, 2 if even else min(blocks, limits.cores // max(1, places)) + 1)
    costs = {number: cost(turns * cdiv(blocks, number), number * lists) for number in numbers}
    if not costs:
        return tiles, True
    best = min(costs, key=lambda number: costs[number])
    shares = tiles.spare_parts + 1
    shared = cost(cdiv(lists * (blocks + 1), shares), lists + shares - 1) + _SHARING
    if shared < costs[best]:
        return tiles, True
    return replace(tiles, num_splits=best, spare_parts=0), False


def parts_at_once(rows: int, cores: int) -> int:
    """Parts that run at once: one tile of rows fills an SM's shared memory."""
    return max(1, cores // max(1, cdiv(rows, _ROWS)))


def part_cost(blocks: Any, merge: Any) -> Any:
    """Of a part, in eighths of a block's time; integers, or tensors of them."""
    return blocks * _BLOCK + _START + merge


def merge_cost(rows: int) -> int:
    """Cost of writing a partial result, in float32."""
    return max(1, cdiv(_MERGE * min(rows, _ROWS), _ROWS))


def merging_cost(parts: Any, rows: int) -> Any:
    """Cost of the combine kernel, which reads all partial results."""
    return parts * rows // _MERGED_ROWS


def merge_grid(sequences: int, rows: int, capacity: int, tiles: DecodeTiles, cores: int) -> tuple[int, int]:
    """Of the combine kernel: sequences of a program, one after the other, and pieces of a row.

    A thread has loads of 4 parts in flight, so that a row of more parts is cut into pieces, with a group of threads for
    each 8. Where most rows have nothing to combine, programs are to be few.
    """
    parts = parts_at_once(rows, cores) // sequences if tiles.spare_parts else tiles.num_splits
    # Of 11 equal parts two pieces: 4 lists of 128 heads take 24.5 us for 26.2 (H100).
    pieces = min(_MOST_PIECES, power_of_two_at_most(max(1, parts // 8 if tiles.spare_parts else cdiv(parts, 8))))
    if tiles.spare_parts:
        # Not where parts are pinned: sums of other pieces have other bits, and those are the same in any batch.
        pieces = min(pieces, power_of_two_at_most(max(1, _MERGED_AT_ONCE * cores // (sequences * rows))))
        if rows <= 2 * _ROWS and capacity >= _LONG * tiles.block_n:
            pieces = max(pieces, _PIECES)
    each = max(1, cdiv(sequences * rows * pieces, _MERGING * cores))
    return min(each, sequences, _MERGED_BY_ONE), pieces


def keys_in_flight(dim_nope: int, dim_rope: int, limits: DeviceLimits, bits: int) -> tuple[int, int]:
    """Keys of a stage, and stages in shared memory beside a tile of q and its weights."""
    width = (dim_nope + dim_rope) * bits // 8
    for block_n, num_stages in ((64, 2), (32, 2), (32, 1)):
        if (_ROWS + num_stages * block_n) * width + _ROWS * block_n * bits // 8 + _BESIDE <= limits.shared_memory:
            return block_n, num_stages
    return 16, 1
