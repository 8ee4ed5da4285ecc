"""Which rows a program works on, where its keys are and which blocks it lists: what the kernels share.

The rows of q are cut into segments, and these into tiles, each of which is a place in the grid. Of a ragged or paged
batch the segments are the rows before the first sequence, each sequence, and the rows behind the last one; of a padded
batch three for each sequence: the rows before it, its own, and those behind it. Rows of no sequence are written as
such. A row's number is that in q as [tokens, ...], of a padded batch ``sequence * length + token``.
"""

import triton
import triton.language as tl

# Where keys are: one sequence behind the other, each in a row of a padded batch, in pages.
RAGGED: tl.constexpr = tl.constexpr(0)
PADDED: tl.constexpr = tl.constexpr(1)
PAGED: tl.constexpr = tl.constexpr(2)


@triton.jit
def part_of(pid, places, HEADS: tl.constexpr, SPLITS: tl.constexpr):
    """Of a program: which of a kv head's HEADS query heads, or tiles of them, its split, grid place and kv head.

    The kv heads come one after the other, whose keys the second level of caches may hold.
    """
    i = pid // HEADS
    return pid % HEADS, i % SPLITS, i // SPLITS % places, i // SPLITS // places


@triton.jit
def clamped(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def load_or(p, i, inside, other):
    """An int64, or ``other`` where there is none."""
    if p is None:
        x = i.to(tl.int64) * 0 + other
    else:
        x = tl.load(p + i, mask=inside, other=0).to(tl.int64)
        x = tl.where(inside, x, other)
    return x


@triton.jit
def bound(p_starts, p_ends, i, num_sequences, rows, KIND: tl.constexpr):
    """The first row of segment i, never falling with i, whatever the bounds hold; that after the last one is the end.

    ``rows``: those of q, of a padded batch those of a sequence.
    """
    if KIND == PADDED:
        i_n = i // 3
        inside = i_n < num_sequences
        begin = clamped(load_or(p_starts, i_n, inside, 0), 0, rows)
        end = clamped(load_or(p_ends, i_n, inside, rows), begin, rows)
        part = i % 3
        row = i_n.to(tl.int64) * rows + tl.where(part == 0, 0, tl.where(part == 1, begin, end))
    else:
        inside = (i > 0) & (i <= num_sequences + 1)
        row = clamped(load_or(p_starts, i - 1, inside, 0), 0, rows)
        row = tl.where(i > num_sequences + 1, rows, row)
    return row


@triton.jit
def locate(p_starts, p_ends, i_w, num_sequences, rows, TOKENS: tl.constexpr, SLACK: tl.constexpr, KIND: tl.constexpr):
    """The sequence of grid place i_w, which of its tiles that is, from the last, its first row and how many it has.

    A segment of n rows has ``n // TOKENS + SLACK`` places or more. SLACK 2 serves tiles that do not begin where the
    segment does. The number of a sequence is -1 for rows that are of none.
    """
    segments = num_sequences + 2
    if KIND == PADDED:
        segments = num_sequences * 3
    below = i_w * 0
    above = i_w * 0 + segments
    while above - below > 1:
        middle = (below + above) // 2
        first = bound(p_starts, p_ends, middle, num_sequences, rows, KIND) // TOKENS + middle * SLACK
        if first <= i_w:
            below = middle
        else:
            above = middle
    begin = bound(p_starts, p_ends, below, num_sequences, rows, KIND)
    end = tl.maximum(bound(p_starts, p_ends, below + 1, num_sequences, rows, KIND), begin)
    i_place = i_w - (begin // TOKENS + below * SLACK)
    if KIND == PADDED:
        i_n = tl.where(below % 3 == 1, below // 3, -1)
    else:
        i_n = tl.where(below <= num_sequences, below - 1, -1)
    return i_n, i_place.to(tl.int32), begin, (end - begin).to(tl.int32)


@triton.jit
def place_in_batch(begin, row, rows, num_sequences, KIND: tl.constexpr):
    """The sequence of a padded batch that rows are in, or 0, their tokens in it, and how many rows there are in all."""
    i_b = begin * 0
    all_rows = rows.to(tl.int64)
    if KIND == PADDED:
        i_b = begin // rows
        all_rows = all_rows * num_sequences
    return i_b, row - i_b * rows, all_rows


@triton.jit
def head_of(p, i_b, i_kv, s, KIND: tl.constexpr):
    """The keys, or values, of a kv head, in a padded batch those of a sequence."""
    p += i_kv.to(tl.int64) * s[2]
    if KIND == PADDED:
        p += i_b * s[0]
    return p


@triton.jit
def keys_of_sequence(p_starts, p_ends, i_n, q_len, keys, KIND: tl.constexpr):
    """Where a sequence's keys begin, how many there are, and whether such a sequence can be.

    ``keys``: those of k, of a padded batch those of a row, of a paged cache what a row of the block table has room for.
    A sequence that cannot be has as many keys as queries, so that its rows have positions.
    """
    real = i_n >= 0
    i = tl.maximum(i_n, 0)
    if KIND == RAGGED:
        begin = load_or(p_starts, i, real, 0)
        end = load_or(p_starts, i + 1, real, 0)
    else:
        begin = load_or(p_starts, i, real, 0)
        end = load_or(p_ends, i, real, keys)
    # Each is compared before they are subtracted, which could wrap.
    possible = real & (begin >= 0) & (begin <= end) & (end <= keys)
    length = tl.where(possible, end - begin, 0)
    # Positions have 32 bits, and those of a tile go on behind the last key, by two blocks of 2^16 at most.
    possible = possible & (length >= q_len) & (length < 2**31 - 2**17)
    return tl.where(possible, begin, 0), tl.where(possible, length, q_len).to(tl.int32), possible


@triton.jit
def list_of(p_crow, o_h, i_row, s_crow, layout_rows, entries, wanted):
    """Where the columns of rows of a layout begin and end, in their heads' lists; nothing is listed where not wanted.

    Bounds that cannot be list nothing either.
    """
    inside = wanted & (i_row < layout_rows)
    p = p_crow + o_h.to(tl.int64) * s_crow + i_row
    begin = tl.load(p, mask=inside, other=0)
    end = tl.load(p + 1, mask=inside, other=0)
    inside = inside & (begin >= 0) & (begin <= end) & (end <= entries)
    return tl.where(inside, begin, 0), tl.where(inside, end, 0)


@triton.jit
def share(count, i_split, SPLITS: tl.constexpr):
    """The first and the last + 1 of so many that this split takes."""
    each = (count + SPLITS - 1) // SPLITS
    return tl.minimum(i_split * each, count), tl.minimum((i_split + 1) * each, count)


@triton.jit
def place_of(p_row, o_key, high, k_begin, num_blocks, PAGE: tl.constexpr):
    """Page and place of keys, and whether there is such a page; those that do not exist read as zeros."""
    if PAGE:
        block = tl.load(p_row + o_key // PAGE, mask=o_key < high, other=-1).to(tl.int64)
        fits = (block >= 0) & (block < num_blocks)
        block = tl.where(fits, block, 0)
        place = (o_key % PAGE).to(tl.int64)
    else:
        fits = o_key < high
        block = o_key.to(tl.int64) * 0
        place = k_begin + o_key
    return block, place, fits


@triton.jit
def wide(o, WIDE: tl.constexpr):
    """Offsets along a head in 64 bits, only where a head's elements lie that far apart."""
    if WIDE:
        o = o.to(tl.int64)
    return o


@triton.jit
def load_tile(p, off, o_d, fits, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Queries, keys or values [rows, BLOCK_D], zeros in rows that do not fit."""
    m_tile = fits[:, None]
    if D != BLOCK_D:
        m_tile = m_tile & (tl.arange(0, BLOCK_D) < D)[None, :]
    return tl.load(p + off[:, None] + o_d[None, :], mask=m_tile, other=0.0)


@triton.jit
def load_across(
    p_v, p_row, at, o_dv, s_v, num_blocks, low, high,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, BOX: tl.constexpr,
):  # fmt: skip
    """Values [BLOCK_N, BLOCK_D] where a page's places, not a head's elements, lie next to each other.

    BOX places of a page lie together, and are loaded together: masks are of whole boxes, or each would be of one place.
    """
    o_box = at + tl.arange(0, BLOCK_N // BOX) * BOX
    o_in = tl.arange(0, BOX)
    m_box = (o_box < high) & (o_box + BOX > low)
    block = tl.load(p_row + o_box // PAGE, mask=m_box, other=-1).to(tl.int64)
    m_box = (block >= 0) & (block < num_blocks)
    # A remainder is not known to be a multiple: places would be loaded one by one.
    off = tl.where(m_box, block, 0) * s_v[0] + tl.multiple_of(o_box % PAGE, BOX)
    m_tile = m_box[:, None, None]
    if D != BLOCK_D:
        m_tile = m_tile & (tl.arange(0, BLOCK_D) < D)[None, :, None]
    b_v = tl.load(p_v + off[:, None, None] + o_dv[None, :, None] + o_in[None, None, :], mask=m_tile, other=0)
    o_key = o_box[:, None] + o_in[None, :]
    b_v = tl.where(((o_key >= low) & (o_key < high))[:, None, :], b_v, 0)
    return tl.reshape(tl.permute(b_v, (0, 2, 1)), [BLOCK_N, BLOCK_D])
