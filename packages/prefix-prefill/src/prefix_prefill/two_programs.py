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
# And of five tiles of 64 rows a sequence.
_MOST_OF_FIVE = 16384
# Of the heads that decode by two, and have most to gain: see ``decodes_by_two``.
_TIMED_HEAD = 128


def fits_twice(problem: Problem) -> bool:
    """Whether half of an SM's registers hold an accumulator, and half of its memory the tiles."""
    return problem.largest_head <= 256 and problem.cache_bits == 16


def keys_of_two(problem: Problem) -> int:
    """The keys of a tile of programs that share an SM."""
    return 64 if problem.largest_head <= 128 else 32


def is_capped_by_two(problem: Problem, few: bool, programs: int) -> bool:
    """Whether scores are capped, in more instructions than one consumer an SM has time for, of so few rows or tiles, or
    of tiles that are left whole: 8 drafts of 5 behind 17 to 50000, heads of 64, 55.5 us on an H200, by one 75.0.

    few: whether a sequence has few rows, or a batch few tiles. Of many keys these are still fewer: 4 x 33 behind 16384,
    heads of 128, 206 us on an H200, by one 150, 1 x 33 40.5 and 57.0.
    """
    capped = problem.softcap > 0 and problem.largest_head <= 128 and is_plain(problem)
    if problem.head_dim == _TIMED_HEAD and problem.left < 0 and not _has_few_keys(problem):
        few = few and (rows_of_a_sequence(problem) <= 64 or 5 * _tiles_of_64(problem) <= 2 * programs)
    return capped and (few or has_whole_tiles_by_two(problem, programs))


def has_whole_tiles_by_two(problem: Problem, programs: int) -> bool:
    """Whether capped rows of a window fill so many tiles of 64 that two programs an SM take about one each. Not cut,
    those that have their keys in common read them at the same time. Of a sequence they are an odd number: of an even
    one, tiles of 128 leave no half empty.

    us on an H200, 64 / 8 heads of 96, window 4096, by tiles of 128 rows, of 64, and of 64 whole: 6 x 33 135, 84 and 78,
    8 x 33 183, 151 and 129; of 128 126, 92 and 86, 167, 182 and 147, but 16 x 33 241, 259 and 255. Of 64 4 x 33 54 and
    63, cut and whole.
    """
    if not (problem.softcap > 0 and problem.left >= 0):
        return False
    rows = rows_of_a_sequence(problem)
    plain = problem.head_dim == problem.head_dim_v in (96, 128) and is_plain(problem) and not problem.joined
    if not (plain and 64 < rows <= 320 and cdiv(rows, 64) % 2):
        return False
    return 7 * programs <= 4 * _tiles_of_64(problem) <= 10 * programs


def pieces_by_two(problem: Problem, programs: int) -> int:
    """Of ``has_whole_tiles_by_two``: four pieces where there are a few tiles more than programs, whose second round
    would be empty but for those; else 1.

    us on an H200, 8 x 33 behind 16384, 64 / 8 heads of 96, window 4096: whole 127, in 3, 4 and 5 pieces 119, 116 and
    126, 7 x 33 127, 110, 106 and 109; but 8 x 33 behind 1 to 60000 60.4, 58.5, 62.0 and 66.5.
    """
    return 4 if _tiles_of_64(problem) > 2 * programs else 1


def has_short_tiles_of_64(problem: Problem, programs: int) -> bool:
    """Whether each program has a tile of 64 rows of few keys at the most: large heads take half as long for it. Of 128
    each of the two that share an SM may have more, of an odd number of tiles a sequence.

    us on an H200, by tiles of 128 rows and of 64, as decoding has: heads of 192, 1 and 16 x 33 with nothing before 9.2
    and 6.3, 9.7 and 7.0, 4 x 33 behind 1000 23.0 and 14.0, 1 x 256 13.8 and 10.4; of 256 13.3 and 11.4; of 128 4 x 33
    behind 1000 25.8 and 17.8, 1 x 256 behind 500 17.0 and 14.4, 16 x 33 behind 1000 52.5 and 39.2, with nothing before
    13.3 and 10.0; but 1 x 512 behind 1000 26.3 and 29.2.
    """
    if not _has_few_keys(problem) or problem.left >= 0:
        return False
    if problem.head_dim != problem.head_dim_v or problem.head_dim not in (_TIMED_HEAD, 192, 256):
        return False
    small = problem.head_dim == _TIMED_HEAD
    if not (decodes_by_two(problem) if small else is_plain(problem)) or problem.softcap or problem.joined:
        return False
    rows, tiles = rows_of_a_sequence(problem), _tiles_of_64(problem)
    odd = small and rows <= 320 and cdiv(rows, 64) % 2 == 1 and tiles <= 3 * programs
    return tiles <= programs or odd


def has_odd_tiles_of_64(problem: Problem, programs: int) -> bool:
    """Whether there are so few tiles, of an odd number of 64 rows a sequence, that many keys are shared well too: heads
    of 128, 1 x 33 behind 8000, 16384 and 60000 25.3, 37.5 and 104.6 us on an H200, by 128 rows 29.9, 44.4 and 110.1,
    2 x 33 behind 8000 39.1 and 43.4, but 4 x 33 77.7 and 69.8; 1 x 80 behind 8000 34.5 and 39.2, but behind 30000 106.5
    and 98.7.
    """
    if _has_few_keys(problem) or problem.head_dim != _TIMED_HEAD or problem.left >= 0 or problem.draft:
        return False
    rows = rows_of_a_sequence(problem)
    most = 320 if min(problem.capacity, problem.max_seqlen_k) <= _MOST_OF_FIVE else 192
    odd = 64 < rows <= most and cdiv(rows, 64) % 2 == 1 and 5 * _tiles_of_64(problem) <= 2 * programs
    return odd and decodes_by_two(problem)


def decodes_by_two(problem: Problem) -> bool:
    """Whether tiles of 64 rows are by two programs an SM, where scores are not capped: one waits for each step of a
    tile of few keys, and another beside it fills the time.

    us on an H200, 32 / 8 heads of 128, by one and by two: 200 behind 20 47.9 and 25.5, 256 behind 500 142.7 and 133.5,
    one behind 8000 18.0 and 15.9, 8 ragged ones 73.5 and 68.2, 64 behind 8000 478.5 and 480.3, one behind 120000 120.0
    and 120.4, behind 500 10.4 and 10.7. Of 64, 80, 96 drafts lose: 16 x 8 behind 8000 70.8 and 74.8, 96.8 and 100.2,
    111.4 and 114.6, 16 x 16 behind 2000 of 80 31.2 and 34.8.
    """
    timed = problem.head_dim == problem.head_dim_v == _TIMED_HEAD and not (problem.softcap or problem.joined)
    return timed and _is_plain_or_draft(problem) and not (problem.draft and problem.left >= 0)


def has_one_each(problem: Problem, programs: int) -> bool:
    """Whether of two programs an SM one works: sequences have several tokens each, and no more tiles than there are
    SMs. More pieces would take longer to merge than they save; of more than 64 rows, where keys are few.

    us on an H200, by two and by one, heads of 128: 16 x 16 behind 2000 48.5 and 41.6, capped 48.3 and 43.1, 2 x 16
    16.7 and 12.9, 8 x 5 27.8 and 26.2, 16 x 8 behind 8000 135.4 and 133.7; a tree of 32 behind 1000 13.9 and 12.6.
    """
    timed = problem.head_dim == problem.head_dim_v == _TIMED_HEAD and problem.max_seqlen_q > 1
    many = problem.softcap > 0 or not _has_few_keys(problem)
    timed = timed and not (many and rows_of_a_sequence(problem) > 64)
    return timed and not has_short_window(problem) and _tiles_of_64(problem) <= programs


def has_whole_short_tiles(problem: Problem, programs: int) -> bool:
    """Whether tiles of 64 rows of several tokens a sequence are too many to be cut, and of so few keys that unlike
    lengths matter little: then nothing is merged.
    """
    if not (_has_few_keys(problem) and problem.max_seqlen_q > 1 and decodes_by_two(problem)):
        return False
    few = rows_of_a_sequence(problem) <= 64 and _tiles_of_64(problem) <= programs
    return (few or has_short_tiles_of_64(problem, programs)) and 2 * _tiles_of_64(problem) > programs


def _has_few_keys(problem: Problem) -> bool:
    return min(problem.capacity, problem.max_seqlen_k) <= _MOST_SHORT


def _tiles_of_64(problem: Problem) -> int:
    """Tiles of 64 rows, if all sequences are as long as the longest."""
    return problem.sequences * cdiv(rows_of_a_sequence(problem), 64) * problem.num_heads_kv


def is_capped_by_warps(problem: Problem) -> bool:
    """Whether two programs an SM were timed with CAPPING 4: these heads, 2 to 7 % less."""
    return problem.softcap > 0 and problem.head_dim == problem.head_dim_v in (64, 96, 256) and is_plain(problem)


def is_capped_by_warps_of_one(problem: Problem) -> bool:
    """The same of one program an SM: 4 x 2048 behind 1000 452 us on an H200, so 496. Others lose, by 2 to 6 %."""
    return problem.softcap > 0 and problem.head_dim == problem.head_dim_v == 192 and is_plain(problem)


def is_plain(problem: Problem) -> bool:
    """Whether a cache of 16 bits holds all keys; what is new, a draft, gathered or shared was not timed by two."""
    return _is_plain_or_draft(problem) and not problem.draft


def _is_plain_or_draft(problem: Problem) -> bool:
    other = problem.new_kv or problem.alibi or problem.shared or problem.carried
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
