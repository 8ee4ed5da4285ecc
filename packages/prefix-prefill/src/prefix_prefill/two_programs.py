"""Which calls have tiles of 64 rows on sm_90, and where two programs share an SM, as pure functions of a problem.

While one program's queries come and results go, the other multiplies. Each has half of an SM's registers and of its
shared memory, and tiles of 64 rows. By the size of heads, N being SMs, and tiles counted as if all sequences were as
long as the longest:

=========  =================  =========================================================================
heads      scores             two programs share an SM
=========  =================  =========================================================================
up to 192  any                in a window of fewer than 256 keys to each side
256        any                in a window of fewer than 128 keys to both sides together
up to 128  capped             one tile a sequence, or fewer tiles of 128 rows than N; with heads of 128
                              behind more than 2048 keys one a sequence, or up to 2 N / 5
96, 128    capped, in window  3 or 5 tiles a sequence, and 7 N / 4 to 10 N / 4 in all
128        not capped         wherever tiles are of 64 rows
=========  =================  =========================================================================

Tiles are of 64 rows where no sequence has more, and, not capped and in no window, where there are as few as this. Where
a sequence has an odd number of them, tiles of 128 rows would leave a half empty:

=========  ===========  =========================================
heads      keys         tiles of 64 rows
=========  ===========  =========================================
128        up to 2048   up to N; 1, 3 or 5 a sequence: up to 3 N
128        up to 16384  3 or 5 a sequence: up to 2 N / 5
128        more         3 a sequence: up to 2 N / 5
192, 256   up to 2048   up to N
=========  ===========  =========================================

All but short windows: over a cache of 16 bits that holds all keys, in pages that TMA loads; masks of drafts with heads
of 128, up to 2048 keys or one tile a sequence, not capped. What both sides of each bound take is in
benchmarks/README.md, "Two programs an SM"; what is not here was slower, or not timed.
"""

from __future__ import annotations

from typing import NamedTuple

from kernel_reference.integers import cdiv
from prefix_prefill.problem import MOST_TOKENS, Problem, is_gathered, is_packed, rows_of_a_sequence

SHORT_WINDOW = 256
# Registers a thread of what loads, of two programs an SM with heads of more than 192, so that a consumer has 216.
LOADING_LARGE = 40
_FEW_KEYS = 2048
# Sizes of heads with which each warp chooses its series of capped scores (``PrefillPlan.capping`` 4), by the programs
# that share an SM: 2 to 7 % less time by two, 9 % by one; with others 2 to 6 % more.
_CAPPED_BY_WARPS = {1: (192,), 2: (64, 96, 256)}


class _Bound(NamedTuple):
    """Behind up to ``keys`` keys: how many tiles of 64 rows there may be for each SM, and how many where each sequence
    has an odd number of them, up to ``most_odd``. ``drafts``: under masks of drafts too.
    """

    keys: int
    tiles: float
    most_odd: int = 0
    odd_tiles: float = 0
    drafts: bool = False


_TILES_OF_64 = {
    128: (_Bound(_FEW_KEYS, 1, 5, 3, drafts=True), _Bound(16384, 0, 5, 2 / 5), _Bound(MOST_TOKENS, 0, 3, 2 / 5)),
    192: (_Bound(_FEW_KEYS, 1),),
    256: (_Bound(_FEW_KEYS, 1),),
}


def fits_twice(problem: Problem) -> bool:
    """Whether half of an SM's registers hold an accumulator, and half of its memory the tiles."""
    return problem.largest_head <= 256 and problem.cache_bits == 16


def keys_of_two(problem: Problem) -> int:
    """The keys of a tile of programs that share an SM."""
    return 64 if problem.largest_head <= 128 else 32


def has_tiles_of_64(problem: Problem, programs: int) -> bool:
    """Whether few tiles are of 64 rows though sequences have more: the second table above."""
    bounds = _TILES_OF_64.get(_size(problem), ())
    if not bounds or problem.left >= 0 or problem.softcap or problem.joined or not _is_plain_or_draft(problem):
        return False
    bound = next((bound for bound in bounds if _keys(problem) <= bound.keys), None)
    if bound is None or (problem.draft and not bound.drafts):
        return False
    own = _tiles_of_a_sequence(problem)
    is_odd = own % 2 == 1 and own <= bound.most_odd
    return _tiles_of_64(problem) <= programs * (bound.odd_tiles if is_odd else bound.tiles)


def is_by_two(problem: Problem, of_64: bool, few_tiles: bool, programs: int) -> bool:
    """Whether two programs share an SM: the first table above.

    of_64: whether tiles are of 64 rows. few_tiles: whether those of 128 rows are fewer than programs.
    """
    if has_short_window(problem) or (of_64 and decodes_by_two(problem)):
        return True
    return is_capped_by_two(problem, of_64 or few_tiles, programs)


def has_short_window(problem: Problem) -> bool:
    """Whether rows see few more keys than a tile has, and so little that tiles' beginnings and ends count."""
    if not (0 <= problem.left < SHORT_WINDOW and 0 <= problem.right < SHORT_WINDOW and fits_twice(problem)):
        return False
    large = _size(problem) == 256 and problem.left + problem.right < SHORT_WINDOW // 2 and is_plain(problem)
    return (problem.head_dim_v <= 192 or large) and not (problem.alibi or is_packed(problem))


def is_capped_by_two(problem: Problem, few: bool, programs: int) -> bool:
    """Whether scores are capped, in more instructions than one consumer an SM has time for, of few rows or tiles, or of
    tiles that are left whole.
    """
    if not (problem.softcap > 0 and problem.largest_head <= 128 and is_plain(problem)):
        return False
    if problem.head_dim == 128 and problem.left < 0 and _keys(problem) > _FEW_KEYS:
        few = few and (_tiles_of_a_sequence(problem) == 1 or 5 * _tiles_of_64(problem) <= 2 * programs)
    return few or _is_capped_in_whole_tiles(problem, programs)


def decodes_by_two(problem: Problem) -> bool:
    """Whether tiles of 64 rows are by two programs an SM, where scores are not capped: one waits for each step of a
    tile of few keys, and another beside it fills the time.
    """
    timed = _size(problem) == 128 and not (problem.softcap or problem.joined)
    return timed and _is_plain_or_draft(problem) and not (problem.draft and problem.left >= 0)


def has_one_each(problem: Problem, programs: int) -> bool:
    """Whether of two programs an SM one works: sequences have several tokens each, and no more tiles than there are
    SMs. More pieces would take longer to merge than they save; of more than a tile a sequence, where keys are few.
    """
    if _size(problem) != 128 or problem.max_seqlen_q == 1 or has_short_window(problem):
        return False
    short = not problem.softcap and _keys(problem) <= _FEW_KEYS
    return (short or _tiles_of_a_sequence(problem) == 1) and _tiles_of_64(problem) <= programs


def pieces_by_two(problem: Problem, programs: int) -> int:
    """In how many pieces two programs an SM take each tile, as far as shapes tell; else 0.

    Whole tiles that have their keys in common read them at the same time, and unlike lengths matter little where keys
    are few. Capped ones, a few more than there are programs, would leave a second round nearly empty: 4 pieces.
    """
    tiles = _tiles_of_64(problem)
    if _is_capped_in_whole_tiles(problem, programs):
        return 4 if tiles > 2 * programs else 1
    if _keys(problem) > _FEW_KEYS or problem.max_seqlen_q == 1 or not decodes_by_two(problem):
        return 0
    few = _tiles_of_a_sequence(problem) == 1 and tiles <= programs
    return int((few or has_tiles_of_64(problem, programs)) and 2 * tiles > programs)


def _is_capped_in_whole_tiles(problem: Problem, programs: int) -> bool:
    """Whether capped rows of a window fill so many tiles of 64 that two programs an SM take about one each."""
    if not (problem.softcap > 0 and problem.left >= 0 and _size(problem) in (96, 128)):
        return False
    timed = _tiles_of_a_sequence(problem) in (3, 5) and is_plain(problem) and not problem.joined
    return timed and 7 * programs <= 4 * _tiles_of_64(problem) <= 10 * programs


def is_capped_by_warps(problem: Problem, per_core: int) -> bool:
    """Whether each warp chooses its series of capped scores, of so many programs an SM."""
    return problem.softcap > 0 and _size(problem) in _CAPPED_BY_WARPS[per_core] and is_plain(problem)


def is_plain(problem: Problem) -> bool:
    """Whether a cache of 16 bits holds all keys; what is new, a draft, gathered or shared was not timed by two."""
    return _is_plain_or_draft(problem) and not problem.draft


def _is_plain_or_draft(problem: Problem) -> bool:
    other = problem.new_kv or problem.alibi or problem.shared or problem.carried
    return not (other or is_gathered(problem) or is_packed(problem)) and problem.cache_bits == 16


def _size(problem: Problem) -> int:
    """The size of heads; 0 where values have another one than keys, with which nothing was timed."""
    return problem.head_dim if problem.head_dim == problem.head_dim_v else 0


def _keys(problem: Problem) -> int:
    """A bound of the keys of a sequence."""
    return min(problem.capacity, problem.max_seqlen_k)


def _tiles_of_a_sequence(problem: Problem) -> int:
    """Tiles of 64 rows that the longest one takes."""
    return cdiv(rows_of_a_sequence(problem), 64)


def _tiles_of_64(problem: Problem) -> int:
    """All tiles of 64 rows, if all sequences are as long as the longest."""
    return problem.sequences * _tiles_of_a_sequence(problem) * problem.num_heads_kv
