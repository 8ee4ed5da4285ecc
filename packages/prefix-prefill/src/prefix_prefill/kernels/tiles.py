"""Which rows and which keys a program works on: what the kernels for every target and for sm_90 share.

A tile holds TOKENS tokens of one sequence with HEADS query heads each, all of one kv head, so that keys and values are
read once for all of them. Row m is head ``m % HEADS`` of token ``m // HEADS``.
"""

import triton
import triton.language as tl


@triton.jit
def part_of(pid, places, HEADS_KV: tl.constexpr, HEAD_TILES: tl.constexpr):
    """A program's kv head, grid place, tile of its query heads and split.

    The tiles with the most keys come first, of all heads, so that the last programs to run are short ones.
    """
    i = pid // HEADS_KV
    return pid % HEADS_KV, i % places, i // places % HEAD_TILES, i // places // HEAD_TILES


@triton.jit
def row_at(p_cu, i_n, num_sequences, rows):
    """The first row of a sequence, clamped. Sequence -1 begins before all others, ``num_sequences`` after them."""
    inside = (i_n >= 0) & (i_n <= num_sequences)
    row = tl.load(p_cu + i_n, mask=inside, other=0).to(tl.int64)
    row = tl.minimum(tl.maximum(row, 0), rows)
    return tl.where(i_n > num_sequences, rows, row)


@triton.jit
def first_tile(p_cu, i_n, num_sequences, rows, TOKENS: tl.constexpr):
    """The grid place of a sequence's first tile: no two sequences' tiles meet, whatever their lengths."""
    return row_at(p_cu, i_n, num_sequences, rows) // TOKENS + i_n + 1


@triton.jit
def locate(p_cu, i_w, num_sequences, rows, TOKENS: tl.constexpr):
    """Sequence, tile and the sequence's rows of grid place i_w; a place past the sequence's last tile has no rows.

    The rows before the first sequence, where a wrong cu_seqlens leaves some, count as sequence -1, those after the last
    one as sequence ``num_sequences``. A sequence's last tile comes first: under a causal mask it sees the most keys.
    """
    i_n = i_w * 0 - 1
    above = i_w * 0 + num_sequences + 1
    while above - i_n > 1:
        middle = (i_n + above) // 2
        if first_tile(p_cu, middle, num_sequences, rows, TOKENS) <= i_w:
            i_n = middle
        else:
            above = middle
    begin = row_at(p_cu, i_n, num_sequences, rows)
    end = tl.maximum(row_at(p_cu, i_n + 1, num_sequences, rows), begin)
    i_place = i_w - first_tile(p_cu, i_n, num_sequences, rows, TOKENS)
    i_tile = (end - begin + TOKENS - 1) // TOKENS - 1 - i_place
    end = tl.where((i_tile < 0) | (i_place < 0), begin, end)
    return i_n, tl.maximum(i_tile, 0).to(tl.int32), begin, (end - begin).to(tl.int32)


@triton.jit
def lengths(p_seqlens, i_n, num_sequences, q_len, capacity, APART: tl.constexpr):
    """Tokens before the new ones, all tokens, and whether such a sequence can be."""
    real = (i_n >= 0) & (i_n < num_sequences)
    length = tl.load(p_seqlens + i_n, mask=real, other=0).to(tl.int64)
    context = length - q_len
    cached = length
    if APART:
        cached = context
    # Compared before it is taken away: a length near -2^63 would wrap.
    possible = real & (length >= q_len) & (cached <= capacity) & (length < 2**31)
    return tl.where(possible, context, 0).to(tl.int32), tl.where(possible, length, 0).to(tl.int32), possible


@triton.jit
def keys_of_tile(
    context, length, i_tile, q_len, left, right, TOKENS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):
    """The keys from ``low`` to before ``high`` that any row of a tile sees."""
    first = context + i_tile * TOKENS
    last = context + tl.minimum((i_tile + 1) * TOKENS, q_len) - 1
    low = first * 0
    high = length
    if HAS_LEFT:
        # A window of 2^31 - 1 tokens must not run over.
        low = tl.maximum(first, left) - left
    if HAS_RIGHT:
        high = last + 1 + tl.minimum(right, length - last - 1)
    return tl.minimum(low, high), high


@triton.jit
def share(count, i_split, SPLITS: tl.constexpr):
    """The first and the last + 1 of the key tiles that this split takes."""
    each = (count + SPLITS - 1) // SPLITS
    return tl.minimum(i_split * each, count), tl.minimum((i_split + 1) * each, count)


@triton.jit
def visible(o_key, position, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Whether rows at ``position`` see these keys, as far as window and causality go; all operands broadcast."""
    distance = o_key - position
    seen = distance == distance
    if HAS_LEFT:
        seen = seen & (distance >= -left)
    if HAS_RIGHT:
        seen = seen & (distance <= right)
    return seen


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """tanh; where the quotient would cancel, below 1/4, the series serves, if float32's last digits are wanted."""
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    y = (1.0 - e) / (1.0 + e)
    y = tl.where(x < 0, -y, y)
    if PRECISE:
        s = x * x
        series = 1.0 + s * (
            -0.3333333333333333
            + s
            * (0.13333333333333333 + s * (-0.05396825396825397 + s * (0.021869488536155203 - s * 0.008863235529902197)))
        )
        y = tl.where(tl.abs(x) < 0.25, x * series, y)
    return y


@triton.jit
def cap(scores, softcap, PRECISE: tl.constexpr):
    """softcap * tanh(scores / softcap)."""
    return softcap * tanh(scores / softcap, PRECISE)
