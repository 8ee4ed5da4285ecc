"""Which rows a program works on, where their keys are, and which blocks they list: what the kernels share.

The rows of q are cut into segments, and these into tiles, each of which has a slot in the grid. The segments of a
ragged or paged batch are the rows before the first sequence, each sequence, and the rows after the last one; those of
a padded batch are three for each sequence: the padding before it, its own rows, and the padding after it. Rows of no
sequence are written as such. A row's number is that in q as [tokens, ...]; in a padded batch it is ``sequence * length
+ token``.
"""

import triton
import triton.language as tl

# Where keys are: one sequence after the other, each in a row of a padded batch, in pages.
RAGGED: tl.constexpr = tl.constexpr(0)
PADDED: tl.constexpr = tl.constexpr(1)
PAGED: tl.constexpr = tl.constexpr(2)


@triton.jit
def part_of(pid, slots, num_splits, HEADS: tl.constexpr):
    """Of a program: which of a kv head's HEADS query heads, or tiles of them, its split, slot and kv head.

    The kv heads come one after the other, so that the keys of one stay in the L2 cache.
    """
    i = pid // HEADS
    return pid % HEADS, i % num_splits, i // num_splits % slots, i // num_splits // slots


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
def bound(batch, i, KIND: tl.constexpr):
    """The first row of segment i, never falling with i whatever the bounds hold; that after the last one is the end."""
    if KIND == PADDED:
        i_n = i // 3
        inside = i_n < batch.sequences
        begin = clamped(load_or(batch.bounds.q_starts, i_n, inside, 0), 0, batch.rows)
        end = clamped(load_or(batch.bounds.q_ends, i_n, inside, batch.rows), begin, batch.rows)
        part = i % 3
        row = i_n.to(tl.int64) * batch.rows + tl.where(part == 0, 0, tl.where(part == 1, begin, end))
    else:
        inside = (i > 0) & (i <= batch.sequences + 1)
        row = clamped(load_or(batch.bounds.q_starts, i - 1, inside, 0), 0, batch.rows)
        row = tl.where(i > batch.sequences + 1, batch.rows, row)
    return row


@triton.jit
def number_of_segments(batch, KIND: tl.constexpr):
    segments = batch.sequences + 2
    if KIND == PADDED:
        segments = batch.sequences * 3
    return segments


@triton.jit
def segment(batch, i, KIND: tl.constexpr):
    """The sequence of segment i, -1 for rows of none, its first row and how many it has."""
    begin = bound(batch, i, KIND)
    end = tl.maximum(bound(batch, i + 1, KIND), begin)
    if KIND == PADDED:
        i_n = tl.where(i % 3 == 1, i // 3, -1)
    else:
        i_n = tl.where(i <= batch.sequences, i - 1, -1)
    return i_n, begin, (end - begin).to(tl.int32)


@triton.jit
def locate(batch, i_w, TOKENS, SLACK, KIND: tl.constexpr):
    """The sequence of slot i_w, which of its tiles that is, from the last, its first row and how many it has.

    A segment of n rows has at least ``n // TOKENS + SLACK`` slots. SLACK 2 serves tiles that do not begin where the
    segment does. The number of a sequence is -1 for rows of none.
    """
    below = i_w * 0
    above = i_w * 0 + number_of_segments(batch, KIND)
    while above - below > 1:
        middle = (below + above) // 2
        first = bound(batch, middle, KIND) // TOKENS + middle * SLACK
        if first <= i_w:
            below = middle
        else:
            above = middle
    i_n, begin, q_len = segment(batch, below, KIND)
    i_slot = i_w - (begin // TOKENS + below * SLACK)
    return i_n, i_slot.to(tl.int32), begin, q_len


@triton.jit
def segment_of(batch, row, below, above, KIND: tl.constexpr):
    """The number of a row's segment, which is from ``below`` to before ``above``."""
    while above - below > 1:
        middle = (below + above) // 2
        if bound(batch, middle, KIND) <= row:
            below = middle
        else:
            above = middle
    return below


@triton.jit
def locate_row(batch, row, TOKENS, SLACK, KIND: tl.constexpr):
    """The first row of a row's segment, and whether there is a slot for its tile, see ``locate``.

    Every row is in a segment, but where bounds fall some segments have no slots.
    """
    below = segment_of(batch, row, row * 0, row * 0 + number_of_segments(batch, KIND), KIND)
    i_n, begin, q_len = segment(batch, below, KIND)
    _, length, _ = keys_of_sequence(batch, i_n, q_len, KIND)
    context = tl.where(SLACK == 1, 0, length - q_len)
    i_slot = (context + q_len - 1) // TOKENS - (context + (row - begin).to(tl.int32)) // TOKENS
    i_w = begin // TOKENS + below * SLACK + i_slot
    _, its_slot, its_begin, its_len = locate(batch, i_w, TOKENS, SLACK, KIND)
    return begin, (its_begin == begin) & (its_len == q_len) & (its_slot == i_slot)


@triton.jit
def sequence_of(batch, row, KIND: tl.constexpr):
    """The sequence of a row of a ragged or paged batch, -1 for rows of none, its first row, how many it has, how many
    keys, and whether these lengths are possible.

    It is looked for where it is in a batch of equal lengths, as of decoding, before it is searched for: that takes one
    load after the other, where all loads of a right guess are on their way together.
    """
    segments = number_of_segments(batch, KIND)
    guess = ((row.to(tl.int32) + 0.5) * batch.sequences / batch.rows).to(tl.int32) + 1
    guess = tl.minimum(guess, segments - 1)
    begin, end = bound(batch, guess, KIND), bound(batch, guess + 1, KIND)
    i_n, q_len = tl.where(guess <= batch.sequences, guess - 1, -1), (end - begin).to(tl.int32)
    _, length, possible = keys_of_sequence(batch, i_n, q_len, KIND)
    if (begin > row) | (end <= row):
        i_n, begin, q_len = segment(batch, segment_of(batch, row, guess * 0, segments, KIND), KIND)
        _, length, possible = keys_of_sequence(batch, i_n, q_len, KIND)
    return i_n, begin, q_len, length, possible


@triton.jit
def split_row(batch, begin, row, KIND: tl.constexpr):
    """The sequence of a padded batch that rows are in, or 0, their tokens in it, and how many rows there are in all."""
    i_b = begin * 0
    all_rows = batch.rows.to(tl.int64)
    if KIND == PADDED:
        i_b = begin // batch.rows
        all_rows = all_rows * batch.sequences
    return i_b, row - i_b * batch.rows, all_rows


@triton.jit
def head_of(p, i_b, i_kv, s, KIND: tl.constexpr):
    """The keys, or values, of a kv head; in a padded batch, of a sequence."""
    p += i_kv.to(tl.int64) * s[2]
    if KIND == PADDED:
        p += i_b * s[0]
    return p


@triton.jit
def keys_of_sequence(batch, i_n, q_len, KIND: tl.constexpr):
    """Where a sequence's keys begin, how many there are, and whether its lengths are possible.

    A sequence of impossible lengths has as many keys as queries, so that its rows have positions.
    """
    real = i_n >= 0
    i = tl.maximum(i_n, 0)
    if KIND == RAGGED:
        begin = load_or(batch.bounds.k_starts, i, real, 0)
        end = load_or(batch.bounds.k_starts, i + 1, real, 0)
    else:
        begin = load_or(batch.bounds.k_starts, i, real, 0)
        end = load_or(batch.bounds.k_ends, i, real, batch.keys)
    # Each is compared before they are subtracted, which could wrap.
    possible = real & (begin >= 0) & (begin <= end) & (end <= batch.keys)
    length = tl.where(possible, end - begin, 0)
    # Positions have 32 bits, and those of a tile go on after the last key, by two blocks of 2^16 at most.
    possible = possible & (length >= q_len) & (length < 2**31 - 2**17)
    return tl.where(possible, begin, 0), tl.where(possible, length, q_len).to(tl.int32), possible


@triton.jit
def list_of(layout, o_h, i_row, wanted):
    """Where the columns of rows of a layout begin and end, in their heads' lists; nothing is listed where not wanted.

    Impossible bounds list nothing either.
    """
    inside = wanted & (i_row < layout.rows)
    p = layout.lists.crow + o_h.to(tl.int64) * layout.s_crow + i_row
    begin = tl.load(p, mask=inside, other=0)
    end = tl.load(p + 1, mask=inside, other=0)
    inside = inside & (begin >= 0) & (begin <= end) & (end <= layout.entries)
    return tl.where(inside, begin, 0), tl.where(inside, end, 0)


@triton.jit
def rows_of_tile(i_tile, context, length, BLOCK_M: tl.constexpr):
    """Positions of a tile's rows, clamped to those of the sequence's queries, and which rows there are."""
    position = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = (position >= context) & (position < length)
    return tl.minimum(tl.maximum(position, context), length - 1), m_row


@triton.jit
def keys_of_tile(i_tile, context, length, left, BLOCK_M: tl.constexpr, HAS_LEFT: tl.constexpr):
    """The first and the last + 1 of the keys that some row of a tile may see."""
    high = tl.minimum(i_tile * BLOCK_M + (BLOCK_M - 1), length - 1) + 1
    low = high * 0
    if HAS_LEFT:
        low = tl.maximum(tl.maximum(i_tile * BLOCK_M, context) - left, 0)
    return low, high


@triton.jit
def share(count, i_split, num_splits):
    """The first and the last + 1 of ``count`` that this split takes."""
    each = (count + num_splits - 1) // num_splits
    return tl.minimum(i_split * each, count), tl.minimum((i_split + 1) * each, count)


@triton.jit
def slot_of(cache, o_key, high, PAGE: tl.constexpr):
    """Page and slot of keys, and whether there is such a page; those that do not exist read as zeros."""
    if PAGE:
        page = tl.load(cache.pages + o_key // PAGE, mask=o_key < high, other=-1).to(tl.int64)
        fits = (page >= 0) & (page < cache.num_pages)
        page = tl.where(fits, page, 0)
        slot = (o_key % PAGE).to(tl.int64)
    else:
        fits = o_key < high
        page = o_key.to(tl.int64) * 0
        slot = cache.begin + o_key
    return page, slot, fits


@triton.jit
def wide(o, WIDE: tl.constexpr):
    """Offsets along a head, in 64 bits only where a head's elements lie that far apart."""
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
def load_across(cache, o_key, o_dv, s_page, visible, config: tl.constexpr):
    """Values [BLOCK_N, BLOCK_DV] where a page's slots, not a head's elements, lie side by side.

    BOX slots of a page are loaded together, under one mask: a mask for each would split the load.
    """
    BOX: tl.constexpr = config.BOX
    BLOCK_N: tl.constexpr = config.BLOCK_N
    BLOCK_DV: tl.constexpr = config.BLOCK_DV
    o_box = tl.min(tl.reshape(o_key, [BLOCK_N // BOX, BOX]), 1)
    o_in = tl.arange(0, BOX)
    m_box = (o_box < visible.high) & (o_box + BOX > visible.low)
    page = tl.load(cache.pages + o_box // config.PAGE, mask=m_box, other=-1).to(tl.int64)
    m_box = (page >= 0) & (page < cache.num_pages)
    # A remainder is not known to be a multiple: slots would be loaded one by one.
    off = tl.where(m_box, page, 0) * s_page + tl.multiple_of(o_box % config.PAGE, BOX)
    m_tile = m_box[:, None, None]
    if config.DV != BLOCK_DV:
        m_tile = m_tile & (tl.arange(0, BLOCK_DV) < config.DV)[None, :, None]
    b_v = tl.load(cache.v + off[:, None, None] + o_dv[None, :, None] + o_in[None, None, :], mask=m_tile, other=0)
    o_key = o_box[:, None] + o_in[None, :]
    b_v = tl.where(((o_key >= visible.low) & (o_key < visible.high))[:, None, :], b_v, 0)
    return tl.reshape(tl.permute(b_v, (0, 2, 1)), [BLOCK_N, BLOCK_DV])
