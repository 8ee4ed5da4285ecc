"""Tiles: a head's columns in those of the kernel for sm_90, and the rows of any."""

from __future__ import annotations

from kernel_reference.integers import cdiv, power_of_two_at_least
from prefix_prefill.problem import Problem


def column_tiles(head_dim: int, cache_bits: int = 16) -> tuple[int, ...]:
    """A head's columns as the kernel for sm_90 has them: one tile or two, each a power of two, of 32 bytes at least.

    Two where that is less than one: 64 and 16 for 80, 128 and 64 for 192. Of 112, 128 are as quick as 64, 32 and 16.
    """
    whole = power_of_two_at_least(head_dim)
    if whole <= 64:
        return (64,)
    # Shared memory is swizzled over no less.
    rest = max(256 // cache_bits, power_of_two_at_least(head_dim - whole // 2))
    # The N of a WGMMA is 256 at most.
    return (whole // 2, rest) if rest < whole // 2 or whole > 256 else (whole,)


def tiles_in_registers(head_dim: int) -> int:
    """How many of a head's tiles of queries may stay in registers, which have no room for more of larger heads."""
    return 1 if head_dim > 192 else len(column_tiles(head_dim))


def value_tiles(head_dim: int, block_m: int, cache_bits: int = 16) -> tuple[int, ...]:
    """The same of values, which are the columns of products: a WGMMA of fewer than 64 is as slow as one of 64.

    us on an H100, heads of 96: 4 x 512 behind 16384 by one tile of 128 869, by 64 and 32 1057. Where one consumer waits
    for memory, each box that is loaded counts: 64 that decode behind 8000 took 879 by 128 (FA3 583).
    """
    padded = cache_bits == 16 and block_m == 128 and 64 < head_dim <= 128
    return (128,) if padded else column_tiles(head_dim, cache_bits)


def heads_per_tile(group: int, block_m: int) -> int:
    """Query heads of one kv head that stand together in a tile."""
    return min(group, block_m)


def tokens_per_tile(group: int, block_m: int) -> int:
    """Tokens whose query heads fill a tile."""
    return block_m // heads_per_tile(group, block_m)


def head_tiles(group: int, block_m: int) -> int:
    """Tiles that the query heads of one kv head take."""
    return cdiv(group, heads_per_tile(group, block_m))


def num_slots(problem: Problem, tokens: int) -> int:
    """Slots of the grid for tiles of so many tokens: each sequence may leave one tile that is not full, and so may the
    rows before the first one and after the last: see kernels/schedule.py.
    """
    return problem.tokens // tokens + problem.sequences + 2


def most_tiles(problem: Problem, block_m: int) -> int:
    """Tiles that a batch may have: each sequence may leave one that is not full, and so may the rows before the first
    one and after the last: see kernels/batch.py.
    """
    tokens = tokens_per_tile(problem.group, block_m)
    tiles = problem.tokens // tokens + min(problem.sequences + 2, problem.tokens)
    return tiles * head_tiles(problem.group, block_m) * problem.num_heads_kv


def has_few_tiles(problem: Problem, programs: int) -> bool:
    """Whether all of a batch's tiles of 128 rows are fewer than programs."""
    return most_tiles(problem, 128) < programs


def units_of_keys(problem: Problem, block_n: int) -> int:
    """How many units of 64 columns of keys have room on sm_90, where tiles of heads of 192 come in such, else 0.

    Two tiles of 128 keys and two of values are 16 KB more than there is. Keys are read in the first half of a tile's
    time, values to its end: with five of six units of keys neither is waited for. 4 x 512 behind 16384 take 1334 us on
    an H200, with whole tiles of keys and three halves of values 1561, with nothing loaded 1307. Not over pages of 8,
    which are looked up for each unit: 16 x 33 with nothing before 14.5 us, as before 11.7.
    """
    plain = problem.cache_bits == 16 and not (problem.new_kv or problem.alibi or problem.page_size % 16)
    return 5 if block_n == 128 and problem.head_dim == problem.head_dim_v == 192 and plain else 0


def stages_of_values(problem: Problem, block_n: int, stages: int) -> tuple[int, int]:
    """Stages of values on sm_90, and keys in each: half a tile's where values have more than 128 numbers, as two whole
    tiles have no room beside two of keys. While a tile's two are multiplied, the first of the next one comes.

    Heads of 192, 4 x 512 behind 16384: 1327 us on an H100, by whole tiles of 64 keys 1399.
    """
    if units_of_keys(problem, block_n):
        return 2, block_n
    return (3, block_n // 2) if block_n == 128 and problem.head_dim_v > 128 else (stages, block_n)


def shared_bytes(problem: Problem, block_m: int, block_n: int, stages: int, widened: bool = False) -> int:
    """What tiles of q, keys and values take of shared memory on sm_90: over a cache of 8 bits, but one that is widened
    before, those of 16 bits and the tiles they come from.
    """
    bits = 16 if widened else problem.cache_bits
    keys, values = sum(column_tiles(problem.head_dim, bits)), sum(value_tiles(problem.head_dim_v, block_m, bits))
    v_stages, v_keys = stages_of_values(problem, block_n, stages)
    columns = 64 * units_of_keys(problem, block_n) or stages * keys
    if bits == 16:
        return 2 * (block_m * keys + block_n * columns + v_stages * v_keys * values)
    # Keys that are multiplied as they are have no second tiles, and queries have as many bits.
    own = 1 if problem.quantize_q and not problem.token_scales else 3
    of_q = block_m * keys * (1 if own == 1 else 2)
    scales = 8 * (stages + 1) * block_n if problem.token_scales else 0
    return of_q + stages * block_n * (own * keys + 3 * values) + scales
