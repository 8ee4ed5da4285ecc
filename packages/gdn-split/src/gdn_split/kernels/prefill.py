"""Device code: what a chunked delta rule is given in prefill, from the projections of packed sequences.

A program takes rows of one head of q, k, v or z, or of all heads' gates. Rows in memory cannot be shifted among
threads: an input is read again for each tap that it is under, which the L1 cache serves; or a thread walks along rows
of its channels, and keeps the last few in registers.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gdn_split.kernels.layer import Gate, log_decay, sigmoid
from gdn_split.kernels.split import columns_of_b_and_a, columns_of_group, wait_for_inputs
from gdn_split.kernels.walks import (
    Packed,
    Walked,
    copy_live_rows,
    copy_rows,
    find_rows,
    has_state,
    sequence_of,
    walk_any,
)


class Prefill(NamedTuple):
    """Constants: rows of a program, of a head or of gates, whose HEADS it takes at a time; CHUNK: over which g is
    summed, or 0.

    INITIAL: whether any sequence begins with the inputs in its slot. WALK: rows that a program walks where none of them
    is among a sequence's first; others it takes ROWS at a time. 0: it takes ROWS once.
    """

    ROWS: int
    ROWS_BA: int
    HEADS: int
    CHUNK: int
    QK_NORM: bool
    INITIAL: bool
    WALK: int
    AHEAD: int


class PrefillStrides(NamedTuple):
    """Row strides of the projections, and the stride of the convolution's slots."""

    qkvz: Any
    ba: Any
    conv_slot: Any


@triton.jit
def columns_of_unit(i_u, sizes: tl.constexpr):
    """Of head i_u of q, then of k, then of v: its first column in mixed_qkvz, channel of the convolution, and width."""
    NQK: tl.constexpr = sizes.NQK
    HQ: tl.constexpr = sizes.HQ
    HV: tl.constexpr = sizes.HV
    is_v = i_u >= 2 * NQK
    is_k = (i_u >= NQK) & (i_u < 2 * NQK)
    head = i_u - tl.where(is_v, 2 * NQK, tl.where(is_k, NQK, 0))
    c_q, c_k, _, _ = columns_of_group(head, sizes)
    _, _, c_v, _ = columns_of_group(head // sizes.R, sizes)
    column = tl.where(is_v, c_v + head % sizes.R * HV, tl.where(is_k, c_k, c_q))
    channel = tl.where(is_v, 2 * NQK * HQ + head * HV, i_u * HQ)
    return column, channel, tl.where(is_v, HV, HQ)


@triton.jit
def elements_of_unit(i_u, o, sizes: tl.constexpr, conv: tl.constexpr):
    """First column and channel of that head, and which of its elements o there are."""
    column, channel, width = columns_of_unit(i_u, sizes)
    # No mask where none is needed.
    if sizes.HQ == conv.BLOCK and sizes.HV == conv.BLOCK:
        m = o < conv.BLOCK
    else:
        m = o < width
    return column, channel, m


@triton.jit
def rows_of_unit(p_q, p_k, p_v, i_u, sizes: tl.constexpr):
    """That head's rows in what is laid out as q, k and v: the first, and the stride of rows."""
    NQK: tl.constexpr = sizes.NQK
    HQ: tl.constexpr = sizes.HQ
    HV: tl.constexpr = sizes.HV
    p = p_v + (i_u - 2 * NQK) * HV
    stride = NQK * sizes.R * HV
    if i_u < 2 * NQK:
        stride = NQK * HQ
        if i_u < NQK:
            p = p_q + i_u * HQ
        else:
            p = p_k + (i_u - NQK) * HQ
    return p, stride


@triton.jit
def filter_of_unit(p_weight, p_bias, channel, o, m, conv: tl.constexpr):
    """The weights of a head's elements o, newest tap first, and the bias."""
    WIDTH: tl.constexpr = conv.WIDTH
    p = p_weight + (channel + o).to(tl.int64) * conv.S_WEIGHT_CHANNEL + (WIDTH - 1) * conv.S_WEIGHT_TAP
    w = ()
    for i in tl.static_range(WIDTH):
        w = w + (tl.load(p - i * conv.S_WEIGHT_TAP, mask=m, other=0.0).to(tl.float32),)
    b_bias = 0.0
    if conv.HAS_BIAS:
        b_bias = tl.load(p_bias + channel + o, mask=m, other=0.0).to(tl.float32)
    return w, b_bias


@triton.jit
def load_earlier(p_x, i, o_row, found, m_x, stride):
    """The input i rows before each row, of the same sequence."""
    m = (found.position >= i) & (o_row >= i)
    return tl.load(p_x - i * stride, mask=m_x & m[:, None], other=0.0).to(tl.float32)


@triton.jit
def load_before(p_before, i, found, m, conv: tl.constexpr):
    """The input i rows before each row, where that is before the sequence: of those in its slot."""
    m = m & (found.position < i)[:, None]
    o_tap = (conv.WIDTH - 1 - i + found.position) * conv.S_TAP
    return tl.load(p_before + o_tap[:, None], mask=m, other=0.0).to(tl.float32)


@triton.jit
def gates(p_ba, o_row, m, o_h, p_a_log, p_dt_bias, sizes: tl.constexpr):
    """g and beta of these heads in these rows, [ROWS, HEADS]."""
    m_h = o_h < sizes.NQK * sizes.R
    c_b, c_a = columns_of_b_and_a(o_h, sizes)
    m = m[:, None] & m_h[None, :]
    b_a_log = tl.load(p_a_log + o_h, mask=m_h, other=0.0).to(tl.float32)[None, :]
    gate = Gate(b_a_log, tl.load(p_dt_bias + o_h, mask=m_h, other=0.0).to(tl.float32)[None, :])
    b = tl.load(p_ba + o_row[:, None] + c_b[None, :], mask=m, other=0.0).to(tl.float32)
    a = tl.load(p_ba + o_row[:, None] + c_a[None, :], mask=m, other=0.0).to(tl.float32)
    return log_decay(a, gate), sigmoid(b), m


@triton.jit
def add_within(g, starts, g_next, starts_next):
    """Sums that begin anew where a chunk does."""
    return tl.where(starts_next != 0, g_next, g + g_next), starts | starts_next


@triton.jit(do_not_specialize=["rows", "sequences", "num_slots"])
def prefill_inputs(
    p_qkvz, p_ba, p_weight, p_bias, p_cu, p_conv, p_slots, p_has, p_a_log, p_dt_bias, p_q, p_k, p_v, p_z, p_g, p_beta,
    rows, sequences, num_slots, strides, sizes: tl.constexpr, conv: tl.constexpr, prefill: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS rows of a head of q, k, v or z, or ROWS_BA rows of all gates. Neighbours share rows."""
    NQK: tl.constexpr = sizes.NQK
    NV: tl.constexpr = sizes.NQK * sizes.R
    HQ: tl.constexpr = sizes.HQ
    R: tl.constexpr = sizes.R
    HV: tl.constexpr = sizes.HV
    BLOCK: tl.constexpr = conv.BLOCK
    ROWS: tl.constexpr = prefill.ROWS
    ROWS_BA: tl.constexpr = prefill.ROWS_BA
    wait_for_inputs(DEPENDENT)
    i_p = tl.program_id(0)
    programs_ba = tl.cdiv(rows, ROWS_BA).to(tl.int32)
    if i_p < programs_ba:
        # Behind the rows before them, to which the sums of a chunk may reach.
        BEFORE: tl.constexpr = prefill.CHUNK
        BLOCK_BA: tl.constexpr = prefill.ROWS_BA + prefill.CHUNK
        # A few heads at a time: all would take the registers by which other programs hide their latency.
        BLOCK_H: tl.constexpr = prefill.HEADS
        first_ba = i_p.to(tl.int64) * ROWS_BA
        o_ba = first_ba - BEFORE + tl.arange(0, BLOCK_BA)
        of_ba = find_rows(p_cu, o_ba, first_ba - BEFORE, first_ba + ROWS_BA - 1, rows, sequences)
        own = (o_ba >= first_ba) & (o_ba < rows)
        for h in range(0, NV, BLOCK_H):
            o_h = h + tl.arange(0, BLOCK_H)
            g, beta, m = gates(p_ba, o_ba * strides.ba, of_ba.live, o_h, p_a_log, p_dt_bias, sizes)
            if prefill.CHUNK:
                starts = (of_ba.position % prefill.CHUNK == 0).to(tl.int32)[:, None]
                g, _ = tl.associative_scan((g, tl.broadcast_to(starts, [BLOCK_BA, BLOCK_H])), 0, add_within)
            o_gate = o_ba[:, None] * NV + o_h[None, :]
            m_gate = own[:, None] & (o_h < NV)[None, :]
            tl.store(p_g + o_gate, tl.where(m, g, 0.0), mask=m_gate)
            tl.store(p_beta + o_gate, tl.where(m, beta, 0.0), mask=m_gate)
    else:
        UNITS: tl.constexpr = 2 * NQK + 2 * NV
        i_p -= programs_ba
        i_u = i_p % UNITS
        o = tl.arange(0, BLOCK)
        if prefill.WALK:
            first = (i_p // UNITS).to(tl.int64) * prefill.WALK
            i_n = sequence_of(p_cu, first, sequences)
            # Rows that the walk is behind the first one of its sequence; negative where it is not in one as a whole.
            behind = first - tl.maximum(tl.load(p_cu + i_n).to(tl.int64), 0)
            end = tl.minimum(tl.load(p_cu + i_n + 1).to(tl.int64), rows)
            behind = tl.where(first + prefill.WALK <= end, behind, -1)
            packed = Packed(p_cu, p_slots, p_has, p_conv, strides.conv_slot, rows, sequences, num_slots)
            if i_u >= 2 * NQK + NV:
                head = i_u - 2 * NQK - NV
                _, _, _, c_z = columns_of_group(head // R, sizes)
                p_from = p_qkvz + c_z + head % R * HV
                if behind >= 0:
                    copy_rows(p_from, strides.qkvz, p_z + head * HV, NV * HV, first, prefill.WALK, HV, o)
                else:
                    copy_live_rows(p_from, strides.qkvz, p_z + head * HV, NV * HV, packed, first, prefill.WALK, HV, o)
            else:
                column, channel, m = elements_of_unit(i_u, o, sizes, conv)
                p_y, s_y = rows_of_unit(p_q, p_k, p_v, i_u, sizes)
                w, b_bias = filter_of_unit(p_weight, p_bias, channel, o, m, conv)
                walked = Walked(p_qkvz + column, strides.qkvz, p_y, s_y, first, o, m)
                if prefill.QK_NORM and i_u < 2 * NQK:
                    walk_any(walked, packed, channel, w, b_bias, behind, True, DEPENDENT, prefill, conv)
                else:
                    walk_any(walked, packed, channel, w, b_bias, behind, False, DEPENDENT, prefill, conv)
        else:
            first = (i_p // UNITS).to(tl.int64) * ROWS
            o_row = first + tl.arange(0, ROWS)
            m_row = o_row < rows
            found = find_rows(p_cu, o_row, first, tl.minimum(first + ROWS, rows) - 1, rows, sequences)
            if i_u < 2 * NQK + NV:
                column, channel, m_c = elements_of_unit(i_u, o, sizes, conv)
                m_x = found.live[:, None] & m_c[None, :]
                p_x = p_qkvz + o_row[:, None] * strides.qkvz + column + o[None, :]
                p_w = (
                    p_weight + (channel + o).to(tl.int64) * conv.S_WEIGHT_CHANNEL + (conv.WIDTH - 1) * conv.S_WEIGHT_TAP
                )
                # All loads before the first use: what lies before a sequence is a branch that few programs take.
                x_0 = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
                x_1 = load_earlier(p_x, 1, o_row, found, m_x, strides.qkvz)
                x_2 = x_1
                x_3 = x_1
                if conv.WIDTH > 2:
                    x_2 = load_earlier(p_x, 2, o_row, found, m_x, strides.qkvz)
                if conv.WIDTH > 3:
                    x_3 = load_earlier(p_x, 3, o_row, found, m_x, strides.qkvz)
                if prefill.INITIAL:
                    if tl.min(tl.where(found.live, found.position, conv.WIDTH)) < conv.WIDTH - 1:
                        slot, m_n = has_state(p_slots, p_has, found.sequence, found.live, num_slots)
                        p_before = p_conv + (slot * strides.conv_slot)[:, None]
                        p_before += (channel + o).to(tl.int64)[None, :] * conv.S_CHANNEL
                        m_n = m_n[:, None] & m_c[None, :]
                        x_1 += load_before(p_before, 1, found, m_n, conv)
                        if conv.WIDTH > 2:
                            x_2 += load_before(p_before, 2, found, m_n, conv)
                        if conv.WIDTH > 3:
                            x_3 += load_before(p_before, 3, found, m_n, conv)
                acc = x_0 * tl.load(p_w, mask=m_c, other=0.0).to(tl.float32)[None, :]
                acc += x_1 * tl.load(p_w - conv.S_WEIGHT_TAP, mask=m_c, other=0.0).to(tl.float32)[None, :]
                if conv.WIDTH > 2:
                    acc += x_2 * tl.load(p_w - 2 * conv.S_WEIGHT_TAP, mask=m_c, other=0.0).to(tl.float32)[None, :]
                if conv.WIDTH > 3:
                    acc += x_3 * tl.load(p_w - 3 * conv.S_WEIGHT_TAP, mask=m_c, other=0.0).to(tl.float32)[None, :]
                if conv.HAS_BIAS:
                    acc += tl.load(p_bias + channel + o, mask=m_c, other=0.0).to(tl.float32)[None, :]
                if conv.SILU:
                    acc = acc * sigmoid(acc)
                acc = tl.where(m_x, acc, 0.0)
                if prefill.QK_NORM:
                    if i_u < 2 * NQK:
                        acc *= tl.rsqrt(tl.sum(acc * acc, axis=1) + 1e-6)[:, None]
                y = acc.to(p_q.dtype.element_ty)
                m_y = m_row[:, None] & m_c[None, :]
                if i_u < NQK:
                    tl.store(p_q + o_row[:, None] * (NQK * HQ) + i_u * HQ + o[None, :], y, mask=m_y)
                elif i_u < 2 * NQK:
                    tl.store(p_k + o_row[:, None] * (NQK * HQ) + (i_u - NQK) * HQ + o[None, :], y, mask=m_y)
                else:
                    tl.store(p_v + o_row[:, None] * (NV * HV) + (i_u - 2 * NQK) * HV + o[None, :], y, mask=m_y)
            else:
                head = i_u - 2 * NQK - NV
                _, _, _, c_z = columns_of_group(head // sizes.R, sizes)
                m_z = m_row[:, None] & (o < HV)[None, :]
                p_from = p_qkvz + o_row[:, None] * strides.qkvz + c_z + head % sizes.R * HV + o[None, :]
                b_z = tl.load(p_from, mask=m_z & found.live[:, None], other=0.0)
                tl.store(p_z + o_row[:, None] * (NV * HV) + head * HV + o[None, :], b_z, mask=m_z)


@triton.jit(do_not_specialize=["rows", "num_slots"])
def keep_inputs(
    p_qkvz, p_cu, p_conv, p_slots, p_has, rows, num_slots, strides, sizes: tl.constexpr, conv: tl.constexpr,
    INITIAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The state after a sequence: its last inputs, of one head of q, k or v. An empty one keeps its own."""
    UNITS: tl.constexpr = 2 * sizes.NQK + sizes.NQK * sizes.R
    TAPS: tl.constexpr = conv.WIDTH - 1
    wait_for_inputs(DEPENDENT)
    i_n = tl.program_id(0) // UNITS
    begin = tl.maximum(tl.load(p_cu + i_n).to(tl.int64), 0)
    end = tl.minimum(tl.load(p_cu + i_n + 1).to(tl.int64), rows)
    slot = tl.load(p_slots + i_n).to(tl.int64)
    if (slot >= 0) & (slot < num_slots) & (end > begin):
        column, channel, width = columns_of_unit(tl.program_id(0) % UNITS, sizes)
        o = tl.arange(0, conv.BLOCK)[:, None]
        o_t = tl.arange(0, 4)[None, :]
        # A tile of all taps: every old one is read before a new one is written.
        position = end - begin - TAPS + o_t
        m = (o < width) & (o_t < TAPS)
        x = tl.load(p_qkvz + (begin + position) * strides.qkvz + column + o, mask=m & (position >= 0), other=0.0)
        x = x.to(tl.float32)
        p_slot = p_conv + slot * strides.conv_slot + (channel + o).to(tl.int64) * conv.S_CHANNEL
        if INITIAL:
            m_old = m & (position < 0) & (position >= -TAPS)
            if p_has is not None:
                m_old = m_old & (tl.load(p_has + i_n) != 0)
            x += tl.load(p_slot + (TAPS + position) * conv.S_TAP, mask=m_old, other=0.0).to(tl.float32)
            tl.debug_barrier()
        tl.store(p_slot + o_t * conv.S_TAP, x.to(p_conv.dtype.element_ty), mask=m)
