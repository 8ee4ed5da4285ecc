"""Device code: rows of packed sequences, and walks along them.

A thread that walks along rows of its channels keeps the last few inputs in registers. They begin anew where a sequence
does, which few walks pass.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gdn_split.kernels.layer import quick_sigmoid


class Packed(NamedTuple):
    """Packed sequences, and where the inputs before them lie, if anywhere: see :func:`has_state`."""

    cu: Any
    slots: Any
    has: Any
    conv: Any
    s_slot: Any
    rows: Any
    count: Any
    num_slots: Any


class Where(NamedTuple):
    """Of each row its sequence, its position in it, the row after the sequence's last, and whether it is in any."""

    sequence: Any
    position: Any
    end: Any
    live: Any


@triton.jit
def sequence_of(p_cu, row, sequences):
    """The last sequence that begins at this row or before it."""
    # A warp's.
    BLOCK: tl.constexpr = 32
    low = tl.cast(0, tl.int32)
    high = sequences
    while high - low > BLOCK:
        middle = (low + high) // 2
        if tl.load(p_cu + middle).to(tl.int64) <= row:
            low = middle
        else:
            high = middle
    # Of so many all are asked at once: each load of a search waits for the one before it.
    o = low + 1 + tl.arange(0, BLOCK)
    begins = tl.load(p_cu + o, mask=o < high, other=0).to(tl.int64)
    return low + tl.sum(((o < high) & (begins <= row)).to(tl.int32), axis=0)


@triton.jit
def find_rows(p_cu, o_row, first, last, rows, sequences):
    """Where the rows o_row, from first to last, are: mostly all in one sequence."""
    i_n = sequence_of(p_cu, tl.maximum(first, 0), sequences)
    begin = tl.load(p_cu + i_n).to(tl.int64)
    end = tl.load(p_cu + i_n + 1).to(tl.int64)
    b_n = i_n + tl.zeros_like(o_row).to(tl.int32)
    b_begin = begin + tl.zeros_like(o_row)
    b_end = end + tl.zeros_like(o_row)
    while (end <= last) & (i_n + 1 < sequences):
        i_n += 1
        begin = end
        end = tl.load(p_cu + i_n + 1).to(tl.int64)
        after = o_row >= begin
        b_n = tl.where(after, i_n, b_n)
        b_begin = tl.where(after, begin, b_begin)
        b_end = tl.where(after, end, b_end)
    live = (o_row >= 0) & (o_row < rows) & (o_row >= b_begin) & (o_row < b_end)
    return Where(b_n, o_row - b_begin, b_end, live)


@triton.jit
def has_state(p_slots, p_has, sequence, m, num_slots):
    """The slots of sequences, and whether they begin with the inputs that lie there."""
    slot = tl.load(p_slots + sequence, mask=m, other=-1).to(tl.int64)
    m = m & (slot >= 0) & (slot < num_slots)
    if p_has is not None:
        m = m & (tl.load(p_has + sequence, mask=m, other=0) != 0)
    return tl.where(m, slot, 0), m


class Walked(NamedTuple):
    """Where a head's rows lie, of the projections and of the result; the first row, and which elements there are."""

    x: Any
    s_x: Any
    y: Any
    s_y: Any
    first: Any
    o: Any
    m: Any


@triton.jit
def load_four(walked, row, wanted):
    """Four rows of the projections."""
    rows = ()
    for j in tl.static_range(4):
        p = walked.x + (row + j) * walked.s_x + walked.o
        rows = rows + (tl.load(p, mask=walked.m & wanted, other=0.0),)
    return rows


@triton.jit
def result_of_row(xs, j: tl.constexpr, w, b_bias, NORMED: tl.constexpr, HOPPER: tl.constexpr, conv: tl.constexpr):
    """What a row of inputs gives; xs[j + 3] are its own, and before them those of the rows before it."""
    acc = xs[j + 3] * w[0] + xs[j + 2] * w[1]
    if conv.WIDTH > 2:
        acc += xs[j + 1] * w[2]
    if conv.WIDTH > 3:
        acc += xs[j] * w[3]
    if conv.HAS_BIAS:
        acc += b_bias
    if conv.SILU:
        acc *= quick_sigmoid(acc, HOPPER)
    if NORMED:
        acc *= tl.rsqrt(tl.sum(acc * acc, axis=0) + 1e-6)
    return acc


@triton.jit
def walk(
    walked, w, b_bias, NORMED: tl.constexpr, HOPPER: tl.constexpr, WALK: tl.constexpr, AHEAD: tl.constexpr,
    conv: tl.constexpr,
):  # fmt: skip
    """Store WALK rows of a head, before all of which there are as many as the convolution needs."""
    TAPS: tl.constexpr = conv.WIDTH - 1
    dtype: tl.constexpr = walked.y.dtype.element_ty
    before = ()
    for i in tl.static_range(3):
        p = walked.x + (walked.first - 3 + i) * walked.s_x + walked.o
        before = before + (tl.load(p, mask=walked.m & (3 - i <= TAPS), other=0.0).to(tl.float32),)
    new = ()
    for step in tl.static_range(0, AHEAD, 4):
        new = new + load_four(walked, walked.first + step, True)
    for step in range(0, WALK, 4):
        xs = before
        later = ()
        for j in tl.static_range(AHEAD):
            if j < 4:
                xs = xs + (new[j].to(tl.float32),)
            else:
                later = later + (new[j],)
        # The next rows are on their way while these are computed.
        new = later + load_four(walked, walked.first + step + AHEAD, step + AHEAD < WALK)
        for j in tl.static_range(4):
            b_y = result_of_row(xs, j, w, b_bias, NORMED, HOPPER, conv)
            row = walked.first + step + j
            tl.store(walked.y + row * walked.s_y + walked.o, b_y.to(dtype), mask=walked.m)
        before = (xs[4], xs[5], xs[6])


@triton.jit
def walk_at_once(walked, w, b_bias, NORMED: tl.constexpr, HOPPER: tl.constexpr, WALK: tl.constexpr, conv: tl.constexpr):
    """The same, all rows being loaded before the first is computed."""
    dtype: tl.constexpr = walked.y.dtype.element_ty
    rows = ()
    for i in tl.static_range(WALK + 3):
        p = walked.x + (walked.first - 3 + i) * walked.s_x + walked.o
        rows = rows + (tl.load(p, mask=walked.m & (i + conv.WIDTH > 3), other=0.0),)
    for step in tl.static_range(WALK):
        xs = ()
        for j in tl.static_range(4):
            xs = xs + (rows[step + j].to(tl.float32),)
        b_y = result_of_row(xs, 0, w, b_bias, NORMED, HOPPER, conv)
        tl.store(walked.y + (walked.first + step) * walked.s_y + walked.o, b_y.to(dtype), mask=walked.m)


@triton.jit
def inputs_before(walked, packed, channel, row, position, i_n, INITIAL: tl.constexpr, conv: tl.constexpr):
    """The inputs of the three rows before one, the oldest first: in its sequence, or in what lies before that."""
    TAPS: tl.constexpr = conv.WIDTH - 1
    if INITIAL:
        near = (position >= 0) & (position < TAPS)
        slot, has = has_state(packed.slots, packed.has, i_n, near, packed.num_slots)
        o_channel = (channel + walked.o).to(tl.int64) * conv.S_CHANNEL
        p_slot = packed.conv + slot * packed.s_slot + o_channel
    found = ()
    for i in tl.static_range(3):
        m = walked.m & (3 - i <= TAPS)
        inside = (position >= 3 - i) & (row >= 3 - i)
        x = tl.load(walked.x + (row - (3 - i)) * walked.s_x + walked.o, mask=m & inside, other=0.0).to(tl.float32)
        if INITIAL:
            p_tap = p_slot + (TAPS - (3 - i) + position) * conv.S_TAP
            x += tl.load(p_tap, mask=m & has & (position < 3 - i), other=0.0).to(tl.float32)
        found = found + (x,)
    return found


@triton.jit
def walk_over_starts(
    walked, packed, channel, w, b_bias, NORMED: tl.constexpr, HOPPER: tl.constexpr, WALK: tl.constexpr,
    INITIAL: tl.constexpr, conv: tl.constexpr,
):  # fmt: skip
    """The same of any rows: of no sequence, whose results are 0, or of several."""
    dtype: tl.constexpr = walked.y.dtype.element_ty
    i_n = sequence_of(packed.cu, walked.first, packed.count)
    begin = tl.load(packed.cu + i_n).to(tl.int64)
    end = tl.load(packed.cu + i_n + 1).to(tl.int64)
    before = inputs_before(walked, packed, channel, walked.first, walked.first - begin, i_n, INITIAL, conv)
    for step in range(0, WALK, 4):
        new = ()
        for j in tl.static_range(4):
            row = walked.first + step + j
            p = walked.x + row * walked.s_x + walked.o
            new = new + (tl.load(p, mask=walked.m & (row < packed.rows), other=0.0).to(tl.float32),)
        for j in tl.static_range(4):
            row = walked.first + step + j
            while (end <= row) & (i_n + 1 < packed.count):
                i_n += 1
                begin = end
                end = tl.load(packed.cu + i_n + 1).to(tl.int64)
            if row == begin:
                before = inputs_before(walked, packed, channel, row, row - begin, i_n, INITIAL, conv)
            xs = before + (new[j],)
            b_y = result_of_row(xs, 0, w, b_bias, NORMED, HOPPER, conv)
            b_y = tl.where((row >= begin) & (row < end), b_y, 0.0)
            p_y = walked.y + row * walked.s_y + walked.o
            tl.store(p_y, b_y.to(dtype), mask=walked.m & (row < packed.rows))
            before = (xs[1], xs[2], xs[3])


@triton.jit
def walk_any(
    walked, packed, channel, w, b_bias, behind, NORMED: tl.constexpr, HOPPER: tl.constexpr, prefill: tl.constexpr,
    conv: tl.constexpr,
):  # fmt: skip
    """Store a walk's rows, which begin ``behind`` a sequence's first: negative where they are not all in it."""
    if behind >= conv.WIDTH - 1:
        if prefill.AHEAD < prefill.WALK:
            walk(walked, w, b_bias, NORMED, HOPPER, prefill.WALK, prefill.AHEAD, conv)
        else:
            walk_at_once(walked, w, b_bias, NORMED, HOPPER, prefill.WALK, conv)
    else:
        walk_over_starts(walked, packed, channel, w, b_bias, NORMED, HOPPER, prefill.WALK, prefill.INITIAL, conv)


@triton.jit
def copy_rows(p_from, s_from, p_to, s_to, first, LENGTH: tl.constexpr, WIDTH: tl.constexpr, o):
    """Elements o of LENGTH rows."""
    ROWS: tl.constexpr = 16 if LENGTH > 16 else LENGTH
    m = (o < WIDTH)[None, :]
    for step in range(0, LENGTH, ROWS):
        o_row = (first + step + tl.arange(0, ROWS))[:, None]
        tl.store(p_to + o_row * s_to + o[None, :], tl.load(p_from + o_row * s_from + o[None, :], mask=m), mask=m)


@triton.jit
def copy_live_rows(p_from, s_from, p_to, s_to, packed, first, LENGTH: tl.constexpr, WIDTH: tl.constexpr, o):
    """The same of any rows: of those of no sequence zeros."""
    ROWS: tl.constexpr = 16 if LENGTH > 16 else LENGTH
    for step in range(0, LENGTH, ROWS):
        o_row = first + step + tl.arange(0, ROWS)
        last = tl.minimum(first + step + ROWS, packed.rows) - 1
        found = find_rows(packed.cu, o_row, first + step, last, packed.rows, packed.count)
        m = (o_row < packed.rows)[:, None] & (o < WIDTH)[None, :]
        b = tl.load(p_from + o_row[:, None] * s_from + o[None, :], mask=m & found.live[:, None], other=0.0)
        tl.store(p_to + o_row[:, None] * s_to + o[None, :], b, mask=m)
