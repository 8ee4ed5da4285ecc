"""Tiles over lists: of sparse prefill, where each is a sequence of one part, and of decoding where they are few."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tilelang_mla.plan import (
    DecodeProblem,
    DecodeTiles,
    DeviceLimits,
    cdiv,
    keys_in_flight,
    merging_cost,
    plan_of_whole_lists,
    plan_without_schedule,
    tiles_8bit,
    tiles_of_keys,
)

# Rows of a tile, and heads up to which keys are the rows of MMAs; sizes of their keys, and of a block of them.
_ROWS, _FEW_HEADS = 64, 16
_LATENT, _ROPES, _BLOCK, _STAGES = 512, (0, 64), 64, 2
# Of decoding: rows of a tile whose keys are the rows of MMAs, and the fewest parts of lists of any lengths that have
# such tiles for larger ones.
_FEW_ROWS, _LEAST_PARTS = 16, 4
# Costs in quarters of a microsecond, of an H200: of a part's beginning and end, of a block of its keys, and how much of
# merging_cost is one. Of tiles of 16 and of 32 rows, whose keys are rows, of those of 64 rows, and of a pair of these.
_OF_16, _OF_32, _OF_64, _OF_PAIRS = (29, 11, 0.8), (58, 12, 1.0), (50, 14, 8.0), (34, 12, 4.0)


def sparse_prefill_tiles(problem: DecodeProblem, limits: DeviceLimits) -> DecodeTiles:
    """Those that are chosen.

    Of up to 16 heads keys are the rows of MMAs. Scores of 32, 64 and 128 heads, asked for early, take 2290, 2466 and
    4206 us for 2409, 2546 and 4431 (4096 tokens, H100).
    """
    if problem.num_heads <= _FEW_HEADS:
        few = DecodeTiles(_FEW_HEADS, _BLOCK, _STAGES, by_rows=True)
        if of_few_heads(few, problem) and few.shared_memory(problem) <= limits.shared_memory:
            return few
    block_n, num_stages = keys_in_flight(problem.dim_nope, problem.dim_rope, limits, problem.bits)
    return DecodeTiles(_ROWS, block_n, num_stages, by_rows=True, early=problem.num_heads > _FEW_HEADS)


def plan_of_lists(problem: DecodeProblem, limits: DeviceLimits, counted: bool) -> tuple[DecodeTiles, bool]:
    """The plan of a call without one, and whether its programs share the batch. counted: lists have lengths."""
    few = tiles_of_few_lists(problem, limits)
    if counted:
        # Programs have to find shares; parts of lists too short for them cost less. 4 lists of 64 heads: 18.8 us for
        # 24.7, of 1 to 2048 keys 17.0 for 20.6, of 100 14.2 for 19.9 (H200).
        places = 0 if few is None else problem.sequences * few.row_tiles(problem.rows)
        fits = few is not None and places * _LEAST_PARTS <= limits.cores
        return (few, False) if few is not None and fits else (plan_without_schedule(problem, limits), True)
    plan, shared = plan_of_whole_lists(problem, limits)
    if few is None or shared or _cost(problem, few) >= _cost(problem, tiles_8bit(problem, plan, limits)):
        return plan, shared
    return few, False


def tiles_of_few_lists(problem: DecodeProblem, limits: DeviceLimits) -> DecodeTiles | None:
    """Of few lists of records of more than 16 heads tiles of 16 rows: soon begun and ended, in parts for all SMs.

    H200: 4 lists of 32, 64 and 128 heads take 15.7, 18.8 and 23.0 us so, 20.2, 21.6 and 21.2 in larger tiles; one 12.0,
    12.6 and 15.6 for 18.4, 16.6 and 15.2; 10 of 64 27.9 for 26.9, of 512 keys 16.5 for 20.1.
    """
    if problem.cache != "656" or problem.rows <= _FEW_ROWS or problem.sequences == 0:
        return None
    tiles = tiles_of_keys(replace(problem, num_heads=1, seqlen_q=1), DecodeTiles(_ROWS, _BLOCK, _STAGES), limits)
    places = problem.sequences * tiles.row_tiles(problem.rows)
    if not tiles.keys_are_rows(problem) or places > limits.cores:
        return None
    most = min(max(1, cdiv(problem.capacity, tiles.block_n)), limits.cores // places)
    return min((replace(tiles, num_splits=number) for number in range(1, most + 1)), key=partial(_cost, problem))


def _cost(problem: DecodeProblem, tiles: DecodeTiles) -> float:
    """Of as many parts of each list, which all run at once."""
    by_rows = _OF_PAIRS if tiles.paired else _OF_64
    start, block, merged = by_rows if tiles.block_m == _ROWS else _OF_16 if tiles.block_m == _FEW_ROWS else _OF_32
    blocks = cdiv(cdiv(problem.capacity, tiles.block_n), tiles.num_splits)
    parts = problem.sequences * tiles.num_splits if tiles.num_splits > 1 else 0
    return float(start + blocks * block + merging_cost(parts, problem.rows) / merged)


def has_a_part_each(tiles: DecodeTiles, problem: DecodeProblem, programs: int) -> bool:
    """Whether programs, of as many parts of each list, have one each, and a kernel that knows so."""
    return programs == tiles.num_parts(problem.sequences) * tiles.row_tiles(problem.rows) and knows_parts(tiles)


def knows_parts(tiles: DecodeTiles) -> bool:
    """Whether there is such a kernel: not of tiles of 32 rows: 8 lists of 32 heads take 24.7 us so, not 23.9 (H200)."""
    return tiles.block_m in (_FEW_ROWS, _ROWS)


def of_few_heads(tiles: DecodeTiles, problem: DecodeProblem) -> bool:
    """Whether keys are the rows of MMAs and heads the columns: a kernel of its own, of latents of 512."""
    shape = (tiles.block_m, tiles.block_n, tiles.num_stages) == (_FEW_HEADS, _BLOCK, _STAGES)
    right = problem.dim_nope == _LATENT and problem.dim_rope in _ROPES
    return shape and right and bool(tiles.by_rows) and not tiles.early and not tiles.paired and not tiles.narrow


def takes(tiles: DecodeTiles, problem: DecodeProblem) -> bool:
    """Whether a kernel of whole lists takes them."""
    blocks = tiles.covers(problem) or of_few_heads(tiles, problem)
    return blocks and tiles.num_splits == 1 and tiles.spare_parts == 0
