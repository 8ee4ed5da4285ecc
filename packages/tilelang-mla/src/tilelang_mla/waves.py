"""How many programs share the keys of tiles, and how many there are: the waves that they take on the SMs."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_reference.integers import cdiv, power_of_two_at_most

# Programs that share a tile's keys, at most: what they merge is written and read again.
MOST_PARTS = 8
# Keys of a block where programs look which sequences are long; rows and turns at most. 512 of up to 100 keys take 32.8
# us for 36.1 at one head and 43.1 for 41.6 at 64, 2000 at one 110 for 105 (H200).
_LOOKED_AT, _LOOKED_ROWS, _LOOKED_TURNS = 64, 16, 4
# Bytes of keys and values that tiles at work at once find in L2, of 50 or 60 MB.
_IN_L2 = 32 * 2**20


def parts_of_tiles(tiles: int, blocks: int, cores: int) -> int:
    """How many programs share a tile's keys, where there are no more tiles than SMs: as many as should end first.

    In half blocks of 0.75 us a program has 10 beside its blocks, and merging takes 2 and 2.5 a part: as eleven shapes
    had it on an H200 (variants.jsonl).
    """
    numbers = range(1, MOST_PARTS + 1 if tiles <= cores else 2)
    own = [cdiv(tiles * parts, cores) * (2 * cdiv(blocks, parts) + 10) for parts in numbers]
    return min(numbers, key=lambda parts: own[parts - 1] + (2 + 5 * parts // 2 if parts > 1 else 0))


def programs_of_tiles(tiles: int, slots: int, cores: int) -> int:
    """Programs of a launch that has so many tiles, at most, in so many slots of a schedule.

    Programs take the next slot from a count of those taken: tiles are of unlike cost. Where all tiles run at once each
    slot has a program, as those of slots that are nobody's end soon: 512 tokens of 32 heads behind 8192 take 145 us for
    148 (H100).
    """
    return slots if tiles <= cores else min(slots, cores)


def heads_at_once(heads: int, size: int) -> int:
    """Heads, each with so many bytes of keys and values, whose tiles are taken together: groups of like numbers."""
    most = max(1, min(heads, _IN_L2 // max(1, size)))
    return cdiv(heads, cdiv(heads, most))


def shares_of(row_tiles: int, cores: int) -> int:
    """Shares of a batch that each of its tiles of rows is given: as many as fill the SMs, once if that can be.

    Where tiles are so many that an eighth of the SMs would have none, they are filled up to four times over.
    """
    tiles = max(1, row_tiles)
    numbers = [max(1, turns * cores // tiles) for turns in (1, 2, 3, 4)]
    idle = [cdiv(number * tiles, cores) * cores / (number * tiles) for number in numbers]
    return next(
        (number for number, of in zip(numbers, idle, strict=True) if of <= 8 / 7), numbers[idle.index(min(idle))]
    )


def finds_long(capacity: int, block_n: int, rows: int, places: int, programs: int) -> bool:
    """Whether programs look which whole sequences have two blocks, to take those first: of few rows, in few turns."""
    two = block_n == _LOOKED_AT and block_n < capacity <= 2 * block_n
    return two and rows <= _LOOKED_ROWS and programs < places <= _LOOKED_TURNS * programs


def get_splits(
    batch_size: int, num_heads: int, seqlen_q: int, avg_seqlen_k: int, block_size_h: int = 64, block_size_n: int = 128,
    streaming_info: Sequence[int] | None = None, *, cores: int,
) -> int:  # fmt: skip
    """The static rule: in how many parts keys are cut for two tiles an SM, a power of two, rounded down."""
    natural = batch_size * seqlen_q * cdiv(num_heads, block_size_h)
    target = 2 * cores
    if natural >= target:
        return 1
    effective = avg_seqlen_k
    if streaming_info is not None and len(streaming_info) >= 2:
        effective = min(effective, (streaming_info[0] + streaming_info[1]) * block_size_n)
    # No sequence, no token or no head: nothing is to be cut.
    wanted = cdiv(target, natural) if natural else 1
    splits = min(wanted, max(1, effective // block_size_n))
    return power_of_two_at_most(splits)
