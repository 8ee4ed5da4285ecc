"""Device code: gradients of what a chunked delta rule is given in prefill.

A gradient reaches an input from as many rows as the convolution has taps. Rows in memory cannot be shifted among
threads, so that a thread walks along rows of its channels, and keeps the last few in registers.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gdn_split.kernels.ahead import fetch
from gdn_split.kernels.layer import Gate, exponential, log_decay, quick_sigmoid, sigmoid_and_slope
from gdn_split.kernels.prefill import add_within, elements_of_unit, filter_of_unit, rows_of_unit
from gdn_split.kernels.split import columns_of_b_and_a, columns_of_group, wait_for_inputs
from gdn_split.kernels.walks import find_rows


class Backward(NamedTuple):
    """Constants: the rows that a program walks, and rows and heads of gates that one takes.

    A walk's last WIDTH - 1 rows are the next one's first. CHUNK: over which g was summed, or 0. AHEAD: how many rows
    ahead of a walk its rows are prefetched into the L2 cache, or 0. LAG: how many runs behind the walks the programs
    of z are.
    """

    STEPS: int
    ROWS_BA: int
    HEADS: int
    CHUNK: int
    QK_NORM: bool
    AHEAD: int
    LAG: int


class BackwardStrides(NamedTuple):
    """Row strides of the projections."""

    qkvz: Any
    ba: Any


class Rows(NamedTuple):
    """A row and those before it, newest first; or what belongs to them."""

    x_0: Any
    x_1: Any
    x_2: Any
    x_3: Any


class Head(NamedTuple):
    """Where a head's rows lie, of the projections, of the result's gradient and of the projections'; which are walked.

    o, m: its elements, and which there are.
    """

    x: Any
    s_x: Any
    d: Any
    s_d: Any
    dx: Any
    position: Any
    first: Any
    end: Any
    rows: Any
    o: Any
    m: Any


class Reached(NamedTuple):
    """Of a walk so far: what reaches the last rows, newest first, and shares of the weights and of the bias."""

    d: Any
    weights: Any
    bias: Any


@triton.jit(do_not_specialize=["rows", "sequences"])
def gates_backward(
    p_ba, p_cu, p_a_log, p_dt_bias, p_dg, p_dbeta, p_dba, p_sums, p_position, rows, sequences, strides,
    sizes: tl.constexpr, back: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Gradients of b and a of HEADS heads in ROWS_BA rows; of the first heads each row's position, or -1.

    p_sums [runs of ROWS_BA rows, 2, V heads] float32: the shares of these rows in the gradients of A_log and dt_bias.
    """
    NV: tl.constexpr = sizes.NQK * sizes.R
    PARTS: tl.constexpr = (NV + back.HEADS - 1) // back.HEADS
    # In front of the rows behind them, to which the sums of a chunk may reach.
    BLOCK: tl.constexpr = back.ROWS_BA + back.CHUNK
    wait_for_inputs(DEPENDENT)
    i_p = (tl.program_id(0) // PARTS).to(tl.int64)
    h = tl.program_id(0) % PARTS * back.HEADS
    first = i_p * back.ROWS_BA
    o_row = first + tl.arange(0, BLOCK)
    last = tl.minimum(first + BLOCK, rows) - 1
    found = find_rows(p_cu, o_row, first, last, rows, sequences)
    own = (o_row < first + back.ROWS_BA) & (o_row < rows)
    tl.store(p_position + o_row, tl.where(found.live, found.position, -1).to(tl.int32), mask=own & (h == 0))
    o_h = h + tl.arange(0, back.HEADS)
    m_h = o_h < NV
    c_b, c_a = columns_of_b_and_a(o_h, sizes)
    m = (found.live & own)[:, None] & m_h[None, :]
    p_row = p_ba + o_row[:, None] * strides.ba
    b = tl.load(p_row + c_b[None, :], mask=m, other=0.0).to(tl.float32)
    a = tl.load(p_row + c_a[None, :], mask=m, other=0.0).to(tl.float32)
    b_a_log = tl.load(p_a_log + o_h, mask=m_h, other=0.0).to(tl.float32)[None, :]
    b_dt = tl.load(p_dt_bias + o_h, mask=m_h, other=0.0).to(tl.float32)[None, :]
    o_gate = o_row[:, None] * NV + o_h[None, :]
    dg = tl.load(p_dg + o_gate, mask=found.live[:, None] & m_h[None, :], other=0.0).to(tl.float32)
    dbeta = tl.load(p_dbeta + o_gate, mask=m, other=0.0).to(tl.float32)
    if back.CHUNK:
        ends = (found.position % back.CHUNK == back.CHUNK - 1) | (found.end == o_row + 1)
        ends = tl.broadcast_to(ends.to(tl.int32)[:, None], [BLOCK, back.HEADS])
        dg, _ = tl.associative_scan((dg, ends), 0, add_within, reverse=True)
    _, of_beta = sigmoid_and_slope(b)
    of_softplus, _ = sigmoid_and_slope(a + b_dt)
    da = -dg * exponential(b_a_log) * of_softplus
    m_out = own[:, None] & m_h[None, :]
    p_out = p_dba + o_row[:, None] * (2 * NV)
    dtype: tl.constexpr = p_dba.dtype.element_ty
    tl.store(p_out + c_b[None, :], tl.where(m, dbeta * of_beta, 0.0).to(dtype), mask=m_out)
    tl.store(p_out + c_a[None, :], tl.where(m, da, 0.0).to(dtype), mask=m_out)
    g = log_decay(a, Gate(b_a_log, b_dt))
    p_sum = p_sums + i_p * (2 * NV) + o_h
    tl.store(p_sum, tl.sum(tl.where(m, dg * g, 0.0), axis=0), mask=m_h)
    tl.store(p_sum + NV, tl.sum(tl.where(m, da, 0.0), axis=0), mask=m_h)


@triton.jit
def load_row(p, row, stride, o, wanted, m_c):
    """Elements o of one row."""
    return tl.load(p + row * stride + o, mask=wanted & m_c, other=0.0)


@triton.jit
def gradient_of_convolved(
    x, w, b_bias, b_d, NORMED: tl.constexpr, HOPPER: tl.constexpr, conv: tl.constexpr
):  # fmt: skip
    """The gradient before activation and norm, of what the convolution makes of rows x."""
    acc = x.x_0 * w[0] + x.x_1 * w[1]
    if conv.WIDTH > 2:
        acc += x.x_2 * w[2]
    if conv.WIDTH > 3:
        acc += x.x_3 * w[3]
    if conv.HAS_BIAS:
        acc += b_bias
    b_s = acc
    if conv.SILU:
        gate = quick_sigmoid(acc, HOPPER)
        b_s = acc * gate
    if NORMED:
        r = tl.rsqrt(tl.sum(b_s * b_s, axis=0) + 1e-6)
        product = tl.sum(b_s * b_d, axis=0) * r * r
        b_d = r * (b_d - b_s * product)
    if conv.SILU:
        b_d *= gate + b_s * (1.0 - gate)
    return b_d


@triton.jit
def rows_before(xs, j: tl.constexpr, position, WHOLE: tl.constexpr):
    """Row j of four and those before it, of the same sequence; xs begins with three rows more."""
    x_0, x_1, x_2, x_3 = xs[j + 3], xs[j + 2], xs[j + 1], xs[j]
    if not WHOLE:
        x_0 = tl.where(position >= 0, x_0, 0.0)
        x_1 = tl.where(position >= 1, x_1, 0.0)
        x_2 = tl.where(position >= 2, x_2, 0.0)
        x_3 = tl.where(position >= 3, x_3, 0.0)
    return Rows(x_0, x_1, x_2, x_3)


@triton.jit
def walk_four(
    xs, ds, positions, owns, reached, w, b_bias, WHOLE: tl.constexpr, NORMED: tl.constexpr, HOPPER: tl.constexpr,
    conv: tl.constexpr,
):  # fmt: skip
    """What four rows add to the walk, and the gradients of the rows WIDTH - 1 before them.

    owns: whether a row is of this walk alone. WHOLE: whether all are, and all rows under the convolution of their
    sequence.
    """
    # Each by itself: what sums within a row wait for can be done for the others meanwhile.
    found = ()
    for j in tl.static_range(4):
        x = rows_before(xs, j, positions[j], WHOLE)
        found = found + (gradient_of_convolved(x, w, b_bias, ds[j], NORMED, HOPPER, conv),)
    done = ()
    for j in tl.static_range(4):
        position = positions[j]
        x = rows_before(xs, j, position, WHOLE)
        b_d = found[j]
        if not WHOLE:
            b_d = tl.where(position >= 0, b_d, 0.0)
        b_1, b_2, b_3, b_own = b_d, b_d, b_d, b_d
        if not WHOLE:
            b_1 = tl.where(position >= 1, b_d, 0.0)
            b_2 = tl.where(position >= 2, b_d, 0.0)
            b_3 = tl.where(position >= 3, b_d, 0.0)
            b_own = tl.where(owns[j], b_d, 0.0)
        s = reached.weights
        s_0 = s.x_0 + b_own * x.x_0
        s_1 = s.x_1 + b_own * x.x_1
        s_2, s_3 = s.x_2, s.x_3
        d_1 = reached.d.x_0 + b_1 * w[1]
        d_2, d_3 = reached.d.x_1, reached.d.x_2
        last = d_1
        if conv.WIDTH > 2:
            s_2 += b_own * x.x_2
            d_2 += b_2 * w[2]
            last = d_2
        if conv.WIDTH > 3:
            s_3 += b_own * x.x_3
            d_3 += b_3 * w[3]
            last = d_3
        done = done + (last,)
        bias = reached.bias
        if conv.HAS_BIAS:
            bias += b_own
        reached = Reached(Rows(b_d * w[0], d_1, d_2, d_3), Rows(s_0, s_1, s_2, s_3), bias)
    return reached, done


@triton.jit
def load_four(head, first, WHOLE: tl.constexpr):
    """Rows of the projections and of the result's gradient from the first on. WHOLE: there are four."""
    new = ()
    loaded = ()
    for j in tl.static_range(4):
        row = first + j
        m = head.m
        if not WHOLE:
            m = m & (row < head.rows)
        new = new + (tl.load(head.x + row * head.s_x + head.o, mask=m, other=0.0),)
        loaded = loaded + (tl.load(head.d + row * head.s_d + head.o, mask=m, other=0.0),)
    return new, loaded


@triton.jit
def store_four(head, step, done, S_DX: tl.constexpr, TAPS: tl.constexpr, WHOLE: tl.constexpr):
    """Gradients of the rows TAPS before those of a step, of which the first ones may not be of this walk."""
    dtype: tl.constexpr = head.dx.dtype.element_ty
    for j in tl.static_range(4):
        row = head.first + step + (j - TAPS)
        m = head.m & (step >= TAPS - j)
        if not WHOLE:
            m = m & (row < head.end)
        tl.store(head.dx + row * S_DX + head.o, done[j].to(dtype), mask=m)


@triton.jit
def fetch_four(head, row, BLOCK: tl.constexpr):
    """Prefetch four rows of the projections and of the result's gradient into the L2 cache."""
    LINE: tl.constexpr = 1024 // head.x.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = BLOCK // LINE if BLOCK > LINE else 1
    o = tl.arange(0, 8 * LINES)
    i_t = row + o // LINES % 4
    first = o % LINES * LINE
    p = tl.where(o < 4 * LINES, head.x + i_t * head.s_x + first, head.d + i_t * head.s_d + first)
    fetch(p, (i_t < head.rows).to(tl.int32), None)


@triton.jit
def in_float32(x_3, x_2, x_1, new, loaded):
    """Rows with the three before them, and gradients."""
    xs = (x_3, x_2, x_1)
    ds = ()
    for j in tl.static_range(4):
        xs = xs + (new[j].to(tl.float32),)
        ds = ds + (loaded[j].to(tl.float32),)
    return xs, ds


@triton.jit
def walk(
    head, w, b_bias, NORMED: tl.constexpr, S_DX: tl.constexpr, HOPPER: tl.constexpr, conv: tl.constexpr,
    back: tl.constexpr,
):  # fmt: skip
    """Store the gradients of a head's rows: the shares of these rows in those of the weights and of the bias."""
    TAPS: tl.constexpr = conv.WIDTH - 1
    BLOCK: tl.constexpr = conv.BLOCK
    first = head.first
    # What is loaded a step ahead below, the compiler moves behind the step's arithmetic to save registers.
    AHEAD: tl.constexpr = back.AHEAD
    FETCHES: tl.constexpr = HOPPER and AHEAD > 0
    if FETCHES:
        for early in tl.static_range(0, AHEAD, 4):
            fetch_four(head, first + early, BLOCK)
    x_1 = load_row(head.x, first - 1, head.s_x, head.o, first >= 1, head.m).to(tl.float32)
    x_2 = load_row(head.x, first - 2, head.s_x, head.o, first >= 2, head.m).to(tl.float32)
    x_3 = load_row(head.x, first - 3, head.s_x, head.o, first >= 3, head.m).to(tl.float32)
    zero = tl.zeros([BLOCK], tl.float32)
    reached = Reached(Rows(zero, zero, zero, zero), Rows(zero, zero, zero, zero), zero)
    o_row = first + tl.arange(0, back.STEPS)
    b_position = tl.load(head.position + o_row, mask=o_row < head.rows, other=-1)
    begin = 0
    # Most walks pass no sequence's first rows. All but their last rows, which the next walk passes too, need no
    # condition then, and no position in a sequence.
    if tl.min(b_position, axis=0) >= TAPS:
        begin = back.STEPS - 4
        new, loaded = load_four(head, first, True)
        for step in range(0, back.STEPS - 4, 4):
            xs, ds = in_float32(x_3, x_2, x_1, new, loaded)
            if FETCHES:
                fetch_four(head, first + step + AHEAD, BLOCK)
            # The next rows are on their way while these are computed.
            new, loaded = load_four(head, first + step + 4, True)
            free = (0, 0, 0, 0)
            reached, done = walk_four(xs, ds, free, free, reached, w, b_bias, True, NORMED, HOPPER, conv)
            store_four(head, step, done, S_DX, TAPS, True)
            x_3, x_2, x_1 = xs[4], xs[5], xs[6]
    for step in range(begin, back.STEPS, 4):
        positions = ()
        owns = ()
        for j in tl.static_range(4):
            row = first + step + j
            positions = positions + (tl.load(head.position + row, mask=row < head.rows, other=-1),)
            owns = owns + (row < head.end,)
        if FETCHES:
            # Of walks whose rows are loaded here alone.
            fetch_four(head, tl.where(begin == 0, first + step + AHEAD, head.rows), BLOCK)
        new, loaded = load_four(head, first + step, False)
        xs, ds = in_float32(x_3, x_2, x_1, new, loaded)
        reached, done = walk_four(xs, ds, positions, owns, reached, w, b_bias, False, NORMED, HOPPER, conv)
        store_four(head, step, done, S_DX, TAPS, False)
        x_3, x_2, x_1 = xs[4], xs[5], xs[6]
    return reached


@triton.jit(do_not_specialize=["rows"])
def inputs_backward(
    p_qkvz, p_weight, p_bias, p_position, p_dq, p_dk, p_dv, p_dz, p_dqkvz, p_sums, rows, strides,
    sizes: tl.constexpr, conv: tl.constexpr, back: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The gradient of mixed_qkvz, of a run of rows of one head of q, k, v or z. Neighbours share rows.

    p_sums [runs, WIDTH, channels] float32: the shares of these rows in the gradients of the convolution's weights,
    oldest tap first; with a bias [runs, WIDTH + 1, channels], of which those of the bias are the last.
    """
    NQK: tl.constexpr = sizes.NQK
    NV: tl.constexpr = sizes.NQK * sizes.R
    HQ: tl.constexpr = sizes.HQ
    HV: tl.constexpr = sizes.HV
    # Heads of q, k and v are walked; z's are behind them.
    WALKED: tl.constexpr = 2 * NQK + NV
    UNITS: tl.constexpr = WALKED + NV
    COLUMNS: tl.constexpr = 2 * NQK * HQ + 2 * NV * HV
    CHANNELS: tl.constexpr = 2 * NQK * HQ + NV * HV
    WIDTH: tl.constexpr = conv.WIDTH
    TAPS: tl.constexpr = conv.WIDTH - 1
    LENGTH: tl.constexpr = back.STEPS - TAPS
    BLOCK: tl.constexpr = conv.BLOCK
    dtype: tl.constexpr = p_dqkvz.dtype.element_ty
    wait_for_inputs(DEPENDENT)
    i_u = tl.program_id(0) % UNITS
    is_z = i_u >= WALKED
    # Programs of z take a quarter of a walk's time: the last of them run while the last walks end.
    i_p = (tl.program_id(0) // UNITS - tl.where(is_z, back.LAG, 0)).to(tl.int64)
    first = i_p * LENGTH
    is_run = (i_p >= 0) & (first < rows)
    end = tl.minimum(first + LENGTH, rows)
    o = tl.arange(0, BLOCK)
    if is_run & ~is_z:
        column, channel, m_c = elements_of_unit(i_u, o, sizes, conv)
        p_d, s_d = rows_of_unit(p_dq, p_dk, p_dv, i_u, sizes)
        w, b_bias = filter_of_unit(p_weight, p_bias, channel, o, m_c, conv)
        head = Head(
            p_qkvz + column, strides.qkvz, p_d, s_d, p_dqkvz + column, p_position, first, end, rows, o, m_c
        )  # fmt: skip
        if back.QK_NORM and i_u < 2 * NQK:
            reached = walk(head, w, b_bias, True, COLUMNS, DEPENDENT, conv, back)
        else:
            reached = walk(head, w, b_bias, False, COLUMNS, DEPENDENT, conv, back)
        s = reached.weights
        p_sum = p_sums + i_p * ((WIDTH + conv.HAS_BIAS) * CHANNELS) + channel + o
        tl.store(p_sum + TAPS * CHANNELS, s.x_0, mask=m_c)
        tl.store(p_sum + (TAPS - 1) * CHANNELS, s.x_1, mask=m_c)
        if WIDTH > 2:
            tl.store(p_sum + (TAPS - 2) * CHANNELS, s.x_2, mask=m_c)
        if WIDTH > 3:
            tl.store(p_sum, s.x_3, mask=m_c)
        if conv.HAS_BIAS:
            tl.store(p_sum + WIDTH * CHANNELS, reached.bias, mask=m_c)
    elif is_run:
        i_v = i_u - WALKED
        _, _, _, c_z = columns_of_group(i_v // sizes.R, sizes)
        p_to = p_dqkvz + c_z + i_v % sizes.R * HV
        ROWS: tl.constexpr = 16
        o_j = tl.arange(0, ROWS)
        m_v = (o < HV)[None, :]
        for step in range(0, LENGTH, ROWS):
            row = first + step + o_j
            m_row = row < end
            m_z = m_row[:, None] & m_v
            b_z = tl.load(p_dz + row[:, None] * (NV * HV) + i_v * HV + o[None, :], mask=m_z, other=0.0)
            # Of rows of no sequence too, so that no load waits for another.
            position = tl.load(p_position + row, mask=m_row, other=-1)
            b_z = tl.where(position[:, None] >= 0, b_z.to(dtype), 0.0)
            tl.store(p_to + row[:, None] * COLUMNS + o[None, :], b_z.to(dtype), mask=m_z)


@triton.jit
def sum_of_shares(p, count, o, m, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Elements o, summed over so many rows of STRIDE."""
    ROWS: tl.constexpr = 32
    o_row = tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, count, ROWS):
        row = first + o_row
        p_row = p + row.to(tl.int64)[:, None] * STRIDE
        acc += tl.load(p_row + o[None, :], mask=(row < count)[:, None] & m[None, :], other=0.0)
    return tl.sum(acc, axis=0)


@triton.jit(do_not_specialize=["walks", "gates"])
def add_shares(
    p_of_channels, p_of_heads, p_dweight, p_dbias, p_da_log, p_ddt_bias, walks, gates, sizes: tl.constexpr,
    conv: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Gradients of weights [channels, WIDTH], bias, A_log and dt_bias: the sums of what the other two kernels left."""
    NV: tl.constexpr = sizes.NQK * sizes.R
    WIDTH: tl.constexpr = conv.WIDTH
    CHANNELS: tl.constexpr = 2 * sizes.NQK * sizes.HQ + NV * sizes.HV
    SHARES: tl.constexpr = (WIDTH + conv.HAS_BIAS) * CHANNELS
    TILES: tl.constexpr = (SHARES + BLOCK - 1) // BLOCK
    wait_for_inputs(DEPENDENT)
    i_p = tl.program_id(0)
    if i_p < TILES:
        o = i_p * BLOCK + tl.arange(0, BLOCK)
        b = sum_of_shares(p_of_channels, walks, o, o < SHARES, SHARES, BLOCK)
        i = o // CHANNELS
        channel = o % CHANNELS
        tl.store(p_dweight + channel * WIDTH + i, b.to(p_dweight.dtype.element_ty), mask=i < WIDTH)
        if conv.HAS_BIAS:
            tl.store(p_dbias + channel, b.to(p_dbias.dtype.element_ty), mask=i == WIDTH)
    else:
        o = (i_p - TILES) * BLOCK + tl.arange(0, BLOCK)
        b = sum_of_shares(p_of_heads, gates, o, o < 2 * NV, 2 * NV, BLOCK)
        tl.store(p_da_log + o, b.to(p_da_log.dtype.element_ty), mask=o < NV)
        tl.store(p_ddt_bias + o - NV, b.to(p_ddt_bias.dtype.element_ty), mask=(o >= NV) & (o < 2 * NV))
