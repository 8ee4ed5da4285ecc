"""Where two programs share an SM of sm_90, as pure functions of a problem: one's queries come and results go while the
other multiplies, for which each has half of the registers and of shared memory.
"""

from __future__ import annotations

from prefix_prefill.problem import Problem, is_gathered, is_packed

# Of windows up to so many keys tiles are of 64 rows, and two programs share an SM: one's queries come and results go
# while the other multiplies. 4 x 512 behind 16384, window 128, heads of 64 and 128, 45.7 and 31.3 us on an H100, not
# 50.2 and 35.5.
SHORT_WINDOW = 256
# Registers a thread of what loads, of two programs an SM with heads of more than 192, so that a consumer has 216.
LOADING_LARGE = 40


def fits_twice(problem: Problem) -> bool:
    """Whether half of an SM's registers hold an accumulator, and half of its memory the tiles."""
    return problem.largest_head <= 256 and problem.cache_bits == 16


def keys_of_two(problem: Problem) -> int:
    """The keys of a tile of programs that share an SM."""
    return 64 if problem.largest_head <= 128 else 32


def is_capped_by_two(problem: Problem) -> bool:
    """Whether scores are capped, in more instructions than one consumer an SM has time for: 8 drafts of 5 behind 17 to
    50000, heads of 64, 55.5 us on an H200, so 75.0.
    """
    return problem.softcap > 0 and problem.largest_head <= 128 and is_plain(problem)


def is_capped_by_warps(problem: Problem) -> bool:
    """Whether two programs an SM were timed with CAPPING 4: these heads, 2 to 7 % less."""
    return problem.softcap > 0 and problem.head_dim == problem.head_dim_v in (64, 96, 256) and is_plain(problem)


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
