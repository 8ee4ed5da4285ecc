"""Where two programs share an SM of sm_90, as pure functions of a problem: one's queries come and results go while the
other multiplies, for which each has half of the registers and of shared memory.
"""

from __future__ import annotations

from kernel_reference.integers import cdiv
from prefix_prefill.problem import Problem, is_gathered, is_packed, rows_of_a_sequence

# Of windows up to so many keys tiles are of 64 rows, and two programs share an SM: one's queries come and results go
# while the other multiplies. 4 x 512 behind 16384, window 128, heads of 64 and 128, 45.7 and 31.3 us on an H100, not
# 50.2 and 35.5.
SHORT_WINDOW = 256
# Registers a thread of what loads, of two programs an SM with heads of more than 192, so that a consumer has 216.
LOADING_LARGE = 40
# The most keys of tiles that were timed as short ones.
_MOST_SHORT = 2048


def fits_twice(problem: Problem) -> bool:
    """Whether half of an SM's registers hold an accumulator, and half of its memory the tiles."""
    return problem.largest_head <= 256 and problem.cache_bits == 16


def keys_of_two(problem: Problem) -> int:
    """The keys of a tile of programs that share an SM."""
    return 64 if problem.largest_head <= 128 else 32


def is_capped_by_two(problem: Problem, few: bool, programs: int) -> bool:
    """Whether scores are capped, in more instructions than one consumer an SM has time for, of so few rows or tiles, or
    of tiles that are left whole: 8 drafts of 5 behind 17 to 50000, heads of 64, 55.5 us on an H200, by one 75.0.

    few: whether a sequence has few rows, or a batch few tiles.
    """
    capped = problem.softcap > 0 and problem.largest_head <= 128 and is_plain(problem)
    return capped and (few or has_whole_tiles_by_two(problem, programs))


def has_whole_tiles_by_two(problem: Problem, programs: int) -> bool:
    """Whether capped rows of a window fill so many tiles of 64 that two programs an SM take about one each. Not cut,
    those that have their keys in common read them at the same time. Of a sequence they are an odd number: of an even
    one, tiles of 128 leave no half empty.

    us on an H200, 64 / 8 heads of 96, window 4096, by tiles of 128 rows, of 64, and of 64 whole: 6 x 33 135, 84 and 78,
    8 x 33 183, 151 and 129; of 128 126, 92 and 86, 167, 182 and 147, but 16 x 33 241, 259 and 255. Of 64 4 x 33 54 and
    63, cut and whole.
    """
    rows = rows_of_a_sequence(problem)
    plain = problem.head_dim == problem.head_dim_v in (96, 128) and is_plain(problem) and not problem.joined
    if not (plain and problem.softcap > 0 and problem.left >= 0 and 64 < rows <= 320 and cdiv(rows, 64) % 2):
        return False
    tiles = problem.sequences * cdiv(rows, 64) * problem.num_heads_kv
    return 7 * programs <= 4 * tiles <= 10 * programs


def has_short_tiles_of_64(problem: Problem, programs: int) -> bool:
    """Whether each program has a tile of 64 rows of few keys at the most: large heads take half as long for it.

    us on an H200, by tiles of 128 rows and of 64, as decoding has: heads of 192, 1 and 16 x 33 with nothing before 9.2
    and 6.3, 9.7 and 7.0, 4 x 33 behind 1000 23.0 and 14.0, 1 x 256 13.8 and 10.4; of 256 13.3 and 11.4.
    """
    large = problem.head_dim == problem.head_dim_v in (192, 256) and not (problem.softcap or problem.left >= 0)
    if not large or problem.joined or not is_plain(problem):
        return False
    tiles = problem.sequences * cdiv(rows_of_a_sequence(problem), 64) * problem.num_heads_kv
    return tiles <= programs and min(problem.capacity, problem.max_seqlen_k) <= _MOST_SHORT


def is_capped_by_warps(problem: Problem) -> bool:
    """Whether two programs an SM were timed with CAPPING 4: these heads, 2 to 7 % less."""
    return problem.softcap > 0 and problem.head_dim == problem.head_dim_v in (64, 96, 256) and is_plain(problem)


def is_capped_by_warps_of_one(problem: Problem) -> bool:
    """The same of one program an SM: 4 x 2048 behind 1000 452 us on an H200, so 496. Others lose, by 2 to 6 %."""
    return problem.softcap > 0 and problem.head_dim == problem.head_dim_v == 192 and is_plain(problem)


def is_plain(problem: Problem) -> bool:
    """Whether a cache of 16 bits holds all keys; what is new, a draft, gathered or shared was not timed by two."""
    other = problem.new_kv or problem.draft or problem.alibi or problem.shared or problem.carried
    return not (other or is_gathered(problem) or is_packed(problem)) and problem.cache_bits == 16


def has_short_window(problem: Problem) -> bool:
    """Whether rows see few more keys than a tile has, and so little that tiles' beginnings and ends count. Of heads of
    256 no window above 128 was timed.
    """
    short = 0 <= problem.left < SHORT_WINDOW and 0 <= problem.right < SHORT_WINDOW
    shorter = problem.left + problem.right < SHORT_WINDOW // 2
    large = problem.head_dim == problem.head_dim_v == 256 and shorter and is_plain(problem)
    fits = fits_twice(problem) and (problem.head_dim_v <= 192 or large)
    return short and fits and not (problem.alibi or is_packed(problem))
