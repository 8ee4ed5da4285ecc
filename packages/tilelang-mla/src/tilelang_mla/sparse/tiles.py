"""Tiles of sparse prefill, where each list is a sequence of one part."""

from __future__ import annotations

from tilelang_mla.plan import DecodeProblem, DecodeTiles, DeviceLimits, keys_in_flight

# Rows of a tile, and heads up to which keys are the rows of MMAs; sizes of their keys, and of a block of them.
_ROWS, _FEW_HEADS = 64, 16
_LATENT, _ROPES, _BLOCK, _STAGES = 512, (0, 64), 64, 2


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


def of_few_heads(tiles: DecodeTiles, problem: DecodeProblem) -> bool:
    """Whether keys are the rows of MMAs and heads the columns: a kernel of its own, of latents of 512."""
    shape = (tiles.block_m, tiles.block_n, tiles.num_stages) == (_FEW_HEADS, _BLOCK, _STAGES)
    right = problem.dim_nope == _LATENT and problem.dim_rope in _ROPES
    return shape and right and bool(tiles.by_rows) and not tiles.early and not tiles.paired and not tiles.narrow


def takes(tiles: DecodeTiles, problem: DecodeProblem) -> bool:
    """Whether a kernel of whole lists takes them."""
    blocks = tiles.covers(problem) or of_few_heads(tiles, problem)
    return blocks and tiles.num_splits == 1 and tiles.spare_parts == 0
