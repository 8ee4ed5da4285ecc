"""In how many pieces tiles of few rows are cut, as far as shapes tell, as pure functions of a problem."""

from __future__ import annotations

from math import isqrt

from kernel_reference.integers import cdiv
from prefix_prefill.problem import Problem, is_packed, rows_of_a_sequence
from prefix_prefill.tiles import head_tiles, tokens_per_tile

# Tiles of few rows are cut in pieces of so many keys where each is so many keys shorter for it: one that decodes
# behind 1000 and 2000 takes 10.2 and 12.8 us on an H100 in 8 and 16 pieces, 15.2 whole, and 14.9 in 4.
_SHORT_PIECE, _WORTH_A_MERGE, _MERGED_TOGETHER = 128, 512, 16


def has_few_rows(problem: Problem) -> bool:
    """Whether no sequence has more rows than one consumer takes; packed, than the portable kernel's least tile."""
    return rows_of_a_sequence(problem) <= (16 if is_packed(problem) else 64)


def _most_keys(problem: Problem) -> int:
    """A bound of the keys that a tile of few rows sees."""
    keys = min(problem.capacity + problem.new_kv * problem.max_seqlen_q, problem.max_seqlen_k)
    if problem.left >= 0 and problem.right >= 0:
        keys = min(keys, problem.left + tokens_per_tile(problem.group, 64) + problem.right)
    return keys


def _short_pieces(problem: Problem, programs: int) -> int:
    """In how many pieces tiles of few rows may be cut, as kernels/balance.py cuts them."""
    tiles = problem.sequences * problem.num_heads_kv * head_tiles(problem.group, 64)
    keys = _most_keys(problem)
    return max(1, min(programs // max(1, tiles), cdiv(keys, max(_SHORT_PIECE, isqrt(8 * keys)))))


def is_worth_a_merge(problem: Problem, programs: int) -> bool:
    """Whether tiles of few rows and keys are so few that their pieces are many keys shorter."""
    keys = _most_keys(problem)
    return keys - keys // _short_pieces(problem, programs) >= _WORTH_A_MERGE


def pieces_of_one(problem: Problem, programs: int) -> int:
    """In how many pieces the tiles of one token are cut, 0 if that is left to the device, which takes 1.6 us to find
    what shapes tell here. More than are merged at a time would be slow if the bound is far off.
    """
    plain = not (problem.shared or problem.carried) and not is_packed(problem)
    alone = problem.sequences == problem.tokens == 1 and problem.num_splits == 0 and has_few_rows(problem) and plain
    pieces = _short_pieces(problem, programs) if alone else 1
    return pieces if 1 < pieces <= _MERGED_TOGETHER else 0
