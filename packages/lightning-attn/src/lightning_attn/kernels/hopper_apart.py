"""Batches whose sequences have one token each: as many programs of little shared memory as an SM has room for.

Whether a packed batch is one only the device knows. Where it may be, two launches follow each other: ``tokens``, which
does nothing if some sequence has another length, and the prefill (``sizes.APART``), which does nothing if none has. A
token's results have the same bits in either.

On an H200, 128 sequences, us: 8 heads of 64 in float32 30 -> 15, 64 of 128 in bfloat16 306 -> 272; by name, 16 of 128
in float16 96 -> 75, 8 of 96 39 -> 27. A prompt among the sequences takes up to 28 % longer where programs go round.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lightning_attn.kernels.hopper_rows import columns_of_token, load_token, store_zeros, take_token
from lightning_attn.kernels.schedule import Batch, Counts, States, has_initial, program, rows_of_head, slot_of


@gluon.jit
def items_of(batch, sizes: gl.constexpr):
    """Programs that the prefill has in its grid where it has one for each."""
    items = batch.count.sequences + 1
    if sizes.SEGMENT:
        items += batch.count.rows // sizes.SEGMENT
    return items * (sizes.H * ((sizes.E + sizes.BLOCK_E - 1) // sizes.BLOCK_E))


@gluon.jit
def are_tokens(batch, sizes: gl.constexpr):
    """Whether each sequence has one token; of as many rows as sequences, none is then before or behind them."""
    THREADS: gl.constexpr = 32 * sizes.WARPS
    o_n = gl.arange(0, THREADS, gl.BlockedLayout([1], [32], [sizes.WARPS], [0]))
    off = o_n * 0
    for first in range(0, batch.count.sequences + 1, THREADS):
        is_bound = first + o_n <= batch.count.sequences
        begin = gl.load(batch.p_cu + first + o_n, mask=is_bound, other=0)
        off = gl.where(is_bound & (begin != first + o_n), 1, off)
    return gl.max(off, axis=0) == 0


@gluon.jit
def has_work(batch, sizes: gl.constexpr):
    """Whether there is anything to do for the prefill, once what is ahead of the call has ended."""
    wanted = batch.count.rows != batch.count.sequences
    if batch.count.rows == batch.count.sequences:
        # Ahead of it is the launch of tokens, which lets it begin once what may have written the bounds has ended.
        wanted = are_tokens(batch, sizes) == 0
        tl.extra.cuda.gdc_wait()
    elif sizes.SEGMENT == 0:
        tl.extra.cuda.gdc_wait()
    return wanted


@gluon.jit(do_not_specialize=["rows", "num_sequences", "num_slots"])
def tokens(
    p_q, p_k, p_v, p_o, p_slopes, p_cu, p_slots, p_has, p_initial, p_final, rows, num_sequences, num_slots, scale,
    strides, sizes: gl.constexpr,
):  # fmt: skip
    """``hopper_rows.single_token`` for all sequences, of which there are as many as rows, or for none."""
    BLOCK_E: gl.constexpr = sizes.BLOCK_E
    batch = Batch(p_cu, p_slots, p_has, Counts(rows, num_sequences, num_slots))
    initial, final = States(p_initial, strides.initial), States(p_final, strides.final)
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
    # Only now: the prefill reads the bounds without waiting.
    tl.extra.cuda.gdc_launch_dependents()
    slot = slot_of(batch, i_n)
    has = has_initial(batch, i_n) & (slot >= 0)
    rows_of_token = (q, k, v, o)
    COLUMNS: gl.constexpr = columns_of_token(sizes)
    # All are on their way before the first is waited for.
    loaded = load_token(rows_of_token, i_n, column, initial, has, slot, i_h, COLUMNS, sizes)
    if are_tokens(batch, sizes):
        if slot >= 0:
            take_token(loaded, o, i_n, p_slopes, final, slot, i_h, scale, sizes)
            for i in gl.static_range(1, sizes.BLOCK_E // COLUMNS):
                first = column + i * COLUMNS
                more = load_token(rows_of_token, i_n, first, initial, has, slot, i_h, COLUMNS, sizes)
                take_token(more, o, i_n, p_slopes, final, slot, i_h, scale, sizes)
        else:
            store_zeros(o, i_n, i_n + 1, column, sizes)
