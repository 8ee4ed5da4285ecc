"""Sequences of one token by themselves: as many programs of little shared memory as an SM has room for.

A packed batch of as many rows as sequences has two launches: ``tokens``, which takes each sequence of one token, and
the prefill (``sizes.APART``), whose programs go round the segments of the others, and may begin before the tokens are
done. Which these are only the device knows. A token's results have the same bits in either. Other batches are the
prefill's alone, whose programs have a segment each: going round, a prompt of 4096 tokens behind 127 of one took longer.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lightning_attn.kernels.hopper_groups import Decays, HeadRows, Pools
from lightning_attn.kernels.hopper_rows import hidden_zero, single_token, store_zeros
from lightning_attn.kernels.schedule import (
    Batch,
    Counts,
    States,
    bounds,
    has_initial,
    locate,
    program,
    rows_of_head,
    slot_of,
)

# Sequences whose bounds are looked at together: each warp has all of them.
TOGETHER = gl.constexpr(128)


@gluon.jit
def numbers(sizes: gl.constexpr):
    return hidden_zero(sizes) + gl.arange(0, TOGETHER, gl.BlockedLayout([4], [32], [sizes.WARPS], [0]))


@gluon.jit
def segments_from(batch, first, sizes: gl.constexpr):
    """How many segments the prefill takes of each of the sequences from ``first`` on: of one token none.

    The one after the last stands for the rows of no sequence, and has one segment at least.
    """
    o_n = first + numbers(sizes)
    last = batch.count.sequences
    rows = batch.count.rows
    begin = gl.load(batch.p_cu + o_n, mask=o_n <= last, other=0).to(gl.int64)
    after = gl.load(batch.p_cu + o_n + 1, mask=o_n < last, other=0).to(gl.int64)
    # Clamped as ``bounds`` does.
    begin = gl.minimum(gl.maximum(begin, 0), rows)
    end = gl.minimum(gl.maximum(gl.where(o_n < last, after, rows), begin), rows)
    length = (end - begin).to(gl.int32)
    if sizes.SEGMENT:
        segments = (length + (sizes.SEGMENT - 1)) // sizes.SEGMENT
    else:
        segments = gl.where(length > 0, 1, 0)
    segments = gl.where(o_n == last, gl.maximum(segments, 1), gl.where(length == 1, 0, segments))
    return gl.where(o_n <= last, segments, 0)


@gluon.jit
def are_apart(batch):
    """Whether the launch of tokens is ahead."""
    return batch.count.rows == batch.count.sequences


@gluon.jit
def wait_for_ahead(batch, sizes: gl.constexpr):
    """Wait for what is ahead of the prefill; but of the tokens it needs nothing, and they have waited for the rest."""
    if sizes.APART:
        if not are_apart(batch):
            tl.extra.cuda.gdc_wait()
    else:
        tl.extra.cuda.gdc_wait()


@gluon.jit
def wait_for_call(batch, sizes: gl.constexpr):
    """Wait for what is ahead of the call, where the prefill is its first launch: before anything is loaded, bounds and
    slots too, which a kernel ahead may have written.

    Of more rows than a segment's the launch of segments' states is ahead, which begins when all before it has ended.
    """
    if sizes.DEPENDENT_LAUNCH:
        if batch.count.rows <= sizes.SEGMENT:
            wait_for_ahead(batch, sizes)


@gluon.jit
def items_of(batch, sizes: gl.constexpr):
    """How many there are for the prefill: of each segment one a head and tile; or one for each of its programs."""
    items = gl.num_programs(0)
    if are_apart(batch):
        segments = gl.to_tensor(0).to(gl.int32)
        for first in range(0, batch.count.sequences + 1, TOGETHER):
            segments += gl.sum(segments_from(batch, first, sizes), axis=0)
        items = segments * (sizes.H * ((sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E))
    return items


@gluon.jit
def locate_item(batch, i_w, sizes: gl.constexpr):
    """``locate``; where tokens are apart, of the i_w-th segment of the other sequences."""
    i_w = i_w.to(gl.int32)
    if are_apart(batch):
        i_n, i_segment = nth_of_others(batch, i_w, sizes)
        begin, end = bounds(batch, i_n)
    else:
        i_n, i_segment, begin, end = locate(batch, i_w, sizes.SEGMENT)
        i_segment += i_n * 0
    return i_n, i_segment, begin, end


@gluon.jit
def nth_of_others(batch, i_w, sizes: gl.constexpr):
    """Sequence and segment of the i_w-th segment of sequences that have not one token."""
    first = gl.to_tensor(0).to(gl.int32)
    passed = gl.to_tensor(0).to(gl.int32)
    segments = segments_from(batch, 0, sizes)
    count = gl.sum(segments, axis=0)
    while passed + count <= i_w:
        passed += count
        first += TOGETHER
        segments = segments_from(batch, first, sizes)
        count = gl.sum(segments, axis=0)
    i_n, passed = nth_of(segments, i_w, passed, sizes)
    return first + i_n, i_w - passed


@gluon.jit
def nth_of(segments, number, passed, sizes: gl.constexpr):
    """Which of ``numbers`` has the segment of this number, and how many are before it. passed: before them all."""
    o_n = numbers(sizes)
    before = passed
    i_n = gl.to_tensor(0).to(gl.int32)
    for i in gl.static_range(7):  # TOGETHER is 2^7.
        count = gl.sum(gl.where(o_n < i_n + (TOGETHER >> (i + 1)), segments, 0), axis=0)
        is_behind = before + count <= number
        i_n = gl.where(is_behind, i_n + (TOGETHER >> (i + 1)), i_n)
        passed = gl.where(is_behind, before + count, passed)
    return i_n, passed


@gluon.jit(do_not_specialize=["rows", "num_sequences", "num_slots"])
def tokens(
    p_q, p_k, p_v, p_o, p_slopes, p_cu, p_slots, p_has, p_initial, p_final, rows, num_sequences, num_slots, scale,
    strides, sizes: gl.constexpr,
):  # fmt: skip
    """``hopper_rows.single_token`` for each sequence that has one."""
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    batch = Batch(p_cu, p_slots, p_has, Counts(rows, num_sequences, num_slots))
    pools = Pools(States(p_initial, strides.initial), States(p_final, strides.final), None)
    i_e, i_h, i_n = program(sizes.H, (sizes.E + BLOCK_E - 1) // BLOCK_E)
    i_h = i_h.to(gl.int64)
    i_n = i_n.to(gl.int64)
    column = i_e * BLOCK_E
    i_first = i_n * 0
    q = rows_of_head(p_q, strides.q, i_first, i_h, sizes.RATIO_QK)
    k = rows_of_head(p_k, strides.k, i_first, i_h, sizes.RATIO_QK)
    v = rows_of_head(p_v, strides.v, i_first, i_h, sizes.RATIO_V)
    o = rows_of_head(p_o, strides.o, i_first, i_h, 1)
    tl.extra.cuda.gdc_wait()
    # Only now: the prefill reads what is ahead of this launch without waiting.
    tl.extra.cuda.gdc_launch_dependents()
    row, end = bounds(batch, i_n)
    slot = slot_of(batch, i_n)
    has = has_initial(batch, i_n)
    if end - row == 1:
        if slot >= 0:
            single_token(HeadRows(q, k, v, o), row, column, pools, has, slot, i_h, Decays(p_slopes, scale), sizes)
        else:
            store_zeros(o, row, end, column, sizes)
