"""The tile scheduler: which rows and which keys a program works on, for the kernels of every target.

A tile holds TOKENS tokens of one sequence with HEADS query heads each, all of one kv head, so that keys and values are
loaded once for all of them. Row m is head ``m % HEADS`` of token ``m // HEADS``. Lengths are known on the device alone,
so the grid has a slot for every tile that there may be: a program searches cu_seqlens_q for its slot's tile.
"""

import triton
import triton.language as tl


@triton.jit
def program_tile(pid, num_slots, HEADS_KV: tl.constexpr, HEAD_TILES: tl.constexpr):
    """A program's kv head, grid slot, tile of its query heads and split. Heavy tiles come first, of all heads."""
    i = pid // HEADS_KV
    return pid % HEADS_KV, i % num_slots, i // num_slots % HEAD_TILES, i // num_slots // HEAD_TILES


@triton.jit
def row_at(p_cu, i_n, num_sequences, rows):
    """The first row of a sequence, clamped. Sequence -1 begins before all others, ``num_sequences`` after them."""
    inside = (i_n >= 0) & (i_n <= num_sequences)
    row = tl.load(p_cu + i_n, mask=inside, other=0).to(tl.int64)
    row = tl.minimum(tl.maximum(row, 0), rows)
    return tl.where(i_n > num_sequences, rows, row)


@triton.jit
def first_slot(p_cu, i_n, num_sequences, rows, TOKENS: tl.constexpr):
    """The slot of a sequence's first tile: those of two sequences never overlap, whatever their lengths."""
    return row_at(p_cu, i_n, num_sequences, rows) // TOKENS + i_n + 1


@triton.jit
def find_tile(p_cu, i_slot, num_sequences, rows, TOKENS: tl.constexpr):
    """A slot's sequence and tile, and the sequence's first row and rows; 0 rows for a slot past its last tile.

    The rows before the first sequence, where a wrong cu_seqlens leaves some, count as sequence -1, those after the last
    one as sequence ``num_sequences``. A sequence's last tile comes first: under a causal mask it sees the most keys.
    """
    i_n = i_slot * 0 - 1
    above = i_slot * 0 + num_sequences + 1
    while above - i_n > 1:
        middle = (i_n + above) // 2
        if first_slot(p_cu, middle, num_sequences, rows, TOKENS) <= i_slot:
            i_n = middle
        else:
            above = middle
    begin = row_at(p_cu, i_n, num_sequences, rows)
    end = tl.maximum(row_at(p_cu, i_n + 1, num_sequences, rows), begin)
    i_own = i_slot - first_slot(p_cu, i_n, num_sequences, rows, TOKENS)
    i_tile = (end - begin + TOKENS - 1) // TOKENS - 1 - i_own
    end = tl.where((i_tile < 0) | (i_own < 0), begin, end)
    return i_n, tl.maximum(i_tile, 0).to(tl.int32), begin, (end - begin).to(tl.int32)


@triton.jit
def lengths(p_seqlens, i_n, num_sequences, q_len, capacity, NEW_KV: tl.constexpr, SHARED: tl.constexpr):
    """Tokens before the new ones, all tokens, and whether such a sequence can be.

    SHARED: the new ones are not among them, and none is before another.
    """
    real = (i_n >= 0) & (i_n < num_sequences)
    length = tl.load(p_seqlens + i_n, mask=real, other=0).to(tl.int64)
    context = length - q_len
    cached = length
    if NEW_KV:
        cached = context
    if SHARED:
        context = length * 0
        q_len = q_len * 0
    # Compared before it is subtracted: a length near -2^63 would wrap.
    valid = real & (length >= q_len) & (cached <= capacity) & (length < 2**31)
    return tl.where(valid, context, 0).to(tl.int32), tl.where(valid, length, 0).to(tl.int32), valid


@triton.jit
def key_range(
    context, length, i_tile, q_len, left, right, TOKENS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):
    """The keys from ``low`` to before ``high`` that any row of a tile sees."""
    first = context + i_tile * TOKENS
    last = context + tl.minimum((i_tile + 1) * TOKENS, q_len) - 1
    low = first * 0
    high = length
    if HAS_LEFT:
        # Written so that a window of 2^31 - 1 tokens does not overflow.
        low = tl.maximum(first, left) - left
    if HAS_RIGHT:
        high = last + 1 + tl.minimum(right, length - last - 1)
    return tl.minimum(low, high), high


@triton.jit
def split_range(count, i_split, num_splits):
    """The first and the last + 1 of the key tiles that this split takes."""
    each = (count + num_splits - 1) // num_splits
    return tl.minimum(i_split * each, count), tl.minimum((i_split + 1) * each, count)
