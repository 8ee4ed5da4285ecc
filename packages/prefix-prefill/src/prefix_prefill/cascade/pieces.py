"""In how many pieces a level before the last is cut, as pure functions of problems and a plan: the rows behind it add
up one part a piece, one after another.

What a level takes, and what its parts do, in us on an H100 with heads of 128: by each program 1.4 for 128 keys, where
no more than half of all programs read keys of their own, as memory is not faster; and for each part of the last level's
tiles 1 where each program has one of these, half of that where few have, twice as much where each has two.
"""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from kernel_reference.integers import cdiv
from prefix_prefill.plan import PrefillPlan, Problem
from prefix_prefill.tiles import head_tiles, tokens_per_tile

# Keys that a program is through with in the time that a row's part takes; fewer pieces were never quicker.
_KEYS_OF_A_PART, _LEAST = 92, 4


def plan_in_pieces(plan: PrefillPlan, level: Problem, last: Problem) -> PrefillPlan:
    """The plan of a level before the last, with as many programs as cut its tiles in the pieces that are best for both
    levels together. Where its keys are fewer than the bound, the device cuts it as before.

    128 that decode with 8 heads to 1 behind 8192 keys take 68.4 us for 72.8, 32 behind 32768 64 for 89, 32 with 32
    heads to 8 80 for 96 (H100).
    """
    if plan.num_splits or not plan.hopper:
        return plan
    return replace(plan, programs=min(plan.programs, _tiles(level, plan.block_m) * _pieces(plan, level, last)))


def _pieces(plan: PrefillPlan, level: Problem, last: Problem) -> int:
    keys = min(level.capacity, level.max_seqlen_k)
    # What a part costs, in halves of what it costs a program with one tile of the last level.
    behind = _tiles(last, 64)
    halves = max(2 * behind, plan.programs + behind) * level.head_dim_v
    best = isqrt(2 * keys * plan.programs * 128 // (_KEYS_OF_A_PART * halves))
    return max(_LEAST, min(best, plan.programs // (2 * level.num_heads_kv)))


def _tiles(problem: Problem, block_m: int) -> int:
    """Tiles of a level whose groups have as many rows each."""
    groups = max(1, problem.sequences)
    each = cdiv(cdiv(problem.tokens, groups), tokens_per_tile(problem.group, block_m))
    return groups * each * head_tiles(problem.group, block_m) * problem.num_heads_kv
