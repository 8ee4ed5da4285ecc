"""What tiles of queries cost: the keys that their rows see, more from tile to tile, up to the window or the length."""

from typing import NamedTuple

import triton
import triton.language as tl

# A tile's beginning and end take the time of so many keys.
OVERHEAD: tl.constexpr = tl.constexpr(192)
# A sequence is taken to have no more keys than that: costs of tiles fit in 32 bits.
MOST_KEYS: tl.constexpr = tl.constexpr(2**29)


class Costs(NamedTuple):
    """Of the tiles of a sequence for one head, in keys: tile i costs ``base + i * TOKENS``, from tile ``ramp`` on
    ``cap``, and OVERHEAD beside.
    """

    tiles: object
    base: object
    cap: object
    ramp: object


@triton.jit
def quotient(a, b):
    """a // b, from 0 to below 2^53, in float64: integers of 64 bits are divided by a function call."""
    return (a.to(tl.float64) / b.to(tl.float64)).to(tl.int64)


@triton.jit
def costs_of(sequence, batch, C):
    """What the tiles of a sequence, or of a block of sequences, cost."""
    tiles = (sequence.q_len + C.TOKENS - 1) // C.TOKENS
    length = tl.minimum(sequence.length, MOST_KEYS)
    cap = length
    base = length
    if C.HAS_RIGHT:
        right = tl.minimum(length, batch.right)
        base = tl.minimum(sequence.context, MOST_KEYS) + C.TOKENS + right
        if C.HAS_LEFT:
            cap = tl.minimum(length, tl.minimum(length, batch.left) + C.TOKENS + right)
        base = tl.minimum(base, cap)
    ramp = tl.minimum(tiles, (cap - base + C.TOKENS - 1) // C.TOKENS)
    return Costs(tiles, base, cap, ramp)


@triton.jit
def cost_before(i, costs, C):
    """What the tiles before tile i cost."""
    rising = tl.minimum(i, costs.ramp).to(tl.int64)
    level = i.to(tl.int64) - rising
    return (rising + level) * OVERHEAD + rising * costs.base + rising * (rising - 1) // 2 * C.TOKENS + level * costs.cap


@triton.jit
def tile_at(x, costs, C):
    """The tile that is being worked on when the tiles of a head have cost x."""
    level = cost_before(costs.ramp, costs, C)
    # The larger root of a quadratic equation, in the form that does not cancel; then made exact.
    b = (costs.base + OVERHEAD).to(tl.float32) - 0.5 * C.TOKENS
    far = x.to(tl.float32)
    i = (2.0 * far / (b + tl.sqrt(b * b + 2.0 * C.TOKENS * far))).to(tl.int64)
    i = tl.where(cost_before(i, costs, C) > x, i - 1, i)
    i = tl.where(cost_before(i + 1, costs, C) <= x, i + 1, i)
    return tl.where(x >= level, costs.ramp + quotient(tl.maximum(x - level, 0), costs.cap + OVERHEAD), i)


@triton.jit
def last_cost(costs, C):
    """What the last tile costs, which costs most."""
    return tl.minimum(costs.base + tl.minimum(costs.tiles - 1, costs.ramp) * C.TOKENS, costs.cap) + OVERHEAD


@triton.jit
def tiles_below(keys, costs, C):
    """How many tiles of a sequence cost less than so many keys."""
    rising = tl.minimum(tl.maximum(keys - costs.base + C.TOKENS - 1, 0) // C.TOKENS, costs.ramp)
    return tl.where(keys > costs.cap, costs.tiles, rising)
