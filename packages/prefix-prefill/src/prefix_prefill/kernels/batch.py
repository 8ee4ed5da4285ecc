"""A ragged batch as persistent programs read it: sequences one by one or many together, and the keys of a tile."""

from typing import NamedTuple

import triton
import triton.language as tl

from prefix_prefill.kernels.schedule import key_range, lengths, row_at


class Batch(NamedTuple):
    """A ragged batch: cu_seqlens_q, seqlens_k, rows, sequences, keys that a row of the block table has room for; and
    the window, tokens that a row sees to its left and right, itself left out.
    """

    p_cu: object
    p_seqlens: object
    rows: object
    num_sequences: object
    capacity: object
    left: object
    right: object


class Sequence(NamedTuple):
    """A sequence, or a block of them: first row, new tokens, older tokens, all tokens, and whether it can be."""

    begin: object
    q_len: object
    context: object
    length: object
    valid: object


class Keys(NamedTuple):
    """The keys that any row of a tile sees, from ``low`` to before ``high``, of the cached ones to before
    ``cached_high``; in tiles of keys, cached ones first, from ``cached_first`` on, then new ones from ``new_first`` on.
    """

    low: object
    cached_high: object
    high: object
    cached_first: object
    cached_tiles: object
    new_first: object
    new_tiles: object


@triton.jit
def sequence_at(batch, i_n, C):
    """Sequence ``i_n``, a number or a block of them; one that is left to others has no new tokens.

    The rows before the first sequence, where a wrong cu_seqlens leaves some, count as sequence -1, those after the last
    one as sequence ``num_sequences``.
    """
    begin = row_at(batch.p_cu, i_n, batch.num_sequences, batch.rows)
    end = tl.maximum(row_at(batch.p_cu, i_n + 1, batch.num_sequences, batch.rows), begin)
    q_len = (end - begin).to(tl.int32)
    context, length, valid = lengths(
        batch.p_seqlens, i_n, batch.num_sequences, q_len, batch.capacity, C.NEW_KV, C.SHARED
    )
    if C.SKIP_DECODE:
        q_len = tl.where(valid & (q_len == 1), 0, q_len)
    return Sequence(begin, q_len, context, length, valid)


@triton.jit
def keys_of(sequence, i_tile, left, right, C):
    """The keys of a tile of queries, cached ones and new ones in tiles of their own."""
    context = sequence.context
    low, high = key_range(
        context, sequence.length, i_tile, sequence.q_len, left, right, C.TOKENS, C.HAS_LEFT, C.HAS_RIGHT
    )
    high = tl.where(sequence.valid, high, low)
    cached_high = high
    new_first = low * 0
    new_tiles = new_first
    if C.NEW_KV:
        cached_high = tl.minimum(high, context)
        new_first = tl.maximum(low - context, 0) // C.BLOCK_N
        new_tiles = tl.maximum((high - context + C.BLOCK_N - 1) // C.BLOCK_N - new_first, 0)
    cached_first = low // C.BLOCK_N
    cached_tiles = tl.maximum((cached_high + C.BLOCK_N - 1) // C.BLOCK_N - cached_first, 0)
    return Keys(low, cached_high, high, cached_first, cached_tiles, new_first, new_tiles)
