"""The decoding kernel: its tensors, its memory, and which warpgroup has which role.

A work item is a tile of 64 rows, packed query tokens x heads, of a sequence and a part of its keys. Under a schedule,
and where programs share the batch by themselves, the kernel is persistent: a program takes one item after the other.
Three warpgroups have a role each:

========  ====================================================================================================
producer  finds what an item is, loads q, and key blocks to shared memory, a ring buffer of ``num_stages`` of them;
          the first keys of an item are loaded while the other two still finish the one before, its q when the last
          scores of that are there (dense, in 16 bits; else when its result has left)
score     multiplies q by the keys, makes the weights, shares them, and multiplies the left half of the latents
value     multiplies the right half of the latents by these weights
========  ====================================================================================================

A block is kept as left half, right half and rope, so that each is freed as soon as its reader is done. Lengths, batch,
heads, tokens, pages, scale and parts are not specialised on: one compiled kernel serves all of them. ``T`` is
TileLang's language, handed in, so that tests may hand in one for machines without warpgroups (``serial``).
"""

from typing import Any

from tilelang_mla.kernels.common import GROUP, macro
from tilelang_mla.kernels.decode.by_length import COUNTS
from tilelang_mla.kernels.decode.groups import (
    LONG_FIRST,
    SHARED,
    Barriers,
    Inputs,
    Launch,
    Memory,
    Outputs,
    Sizes,
    alloc_barriers,
    alloc_memory,
    alloc_softmax,
)
from tilelang_mla.kernels.decode.keys import options_of
from tilelang_mla.kernels.decode.roles import produce, score, value
from tilelang_mla.kernels.decode.serial import attend_serially
from tilelang_mla.kernels.decode.shares import find_share, take_long_first
from tilelang_mla.kernels.decode.widen import Raw, alloc_raw
from tilelang_mla.kernels.softmax import COLUMNS, Softmax, owner_of_sum

_SCORES, _VALUES, _PRODUCER = 0, 1, 2


def attend(
    T: Any, *, dim_nope: int, dim_rope: int, dtype: Any, block_n: int, num_stages: int, gather: bool,
    serial: bool = False, per_token: bool = False, by_rows: bool = False, early: bool = False,
    boxes: bool = False,
) -> Any:  # fmt: skip
    """The kernel.

    gather: rows of a block may lie in many pages and are loaded one by one; else a block is one piece of a page of a
    multiple of ``block_n`` tokens. A page that the pool does not have reads as zeros either way. The kernel's
    ``scale`` is that of a softmax of powers of two, and above 0. per_token: ``seqlens_k`` is [batch, tokens], the keys
    that each query token sees, in place of the causal rule. by_rows: such rows are loaded by rows.cuh, or,
    with ``boxes`` and a ``page_size`` that is a multiple of 16, by boxes.cuh.
    """
    boxes = boxes and not serial
    gather = gather and not boxes
    by_rows = by_rows and gather
    S = Sizes(dim_nope, dim_rope, dtype, block_n, num_stages, gather, by_rows=by_rows, early=early, boxes=boxes)
    batch, rows, pages, page_size = (T.dynamic(name) for name in ("batch", "rows", "pages", "page_size"))
    columns, bounds, places, room = (T.dynamic(name) for name in ("columns", "bounds", "places", "room"))
    num_pieces = T.dynamic("num_pieces")
    q_batch, q_row, kv_page, kv_row = (T.dynamic(name) for name in ("q_batch", "q_row", "kv_page", "kv_row"))
    out_batch, out_row, table_row = (T.dynamic(name) for name in ("out_batch", "out_row", "table_row"))
    lse_batch, lse_head, lse_token = (T.dynamic(name) for name in ("lse_batch", "lse_head", "lse_token"))
    s_lse_batch, s_lse_head, s_lse_token = (T.dynamic(name) for name in ("s_lse_batch", "s_lse_head", "s_lse_token"))

    lengths = (batch, T.dynamic("tokens_of")) if per_token else (batch,)

    @T.prim_func
    def attend_decode(
        q: T.StridedTensor((batch, rows, S.width), (q_batch, q_row, 1), dtype),
        kv: T.StridedTensor((pages, page_size, S.width), (kv_page, kv_row, 1), dtype),
        seqlens_k: T.Tensor(lengths, T.int32),
        block_table: T.StridedTensor((batch, columns), (table_row, 1), T.int32),
        first_part: T.Tensor((bounds,), T.int32),
        order: T.Tensor((places,), T.int32),
        out: T.StridedTensor((batch, rows, dim_nope), (out_batch, out_row, 1), dtype),
        lse: T.StridedTensor((lse_batch, lse_head, lse_token), (s_lse_batch, s_lse_head, s_lse_token), T.float32),
        parts: T.Tensor((room, rows, dim_nope), T.float32),
        part_lse: T.Tensor((room, rows), T.float32),
        pieces: T.Tensor((num_pieces,), T.int32),
        scale: T.float32,
        heads: T.int32,
        causal: T.int32,
        num_parts: T.int32,
        num_splits: T.int32,
        scheduled: T.int32,
        ordered: T.int32,
        wants_lse: T.int32,
        num_programs: T.int32,
    ):
        with T.Kernel(num_programs, **options_of(S, serial)) as i_program:
            # As arguments.py checks: rows may be read in vectors of 16 bytes.
            T.assume(kv_page % 8 == 0)
            T.assume(kv_row % 8 == 0)
            T.assume(out_batch % 8 == 0)
            T.assume(out_row % 8 == 0)
            inputs = Inputs(q, kv, seqlens_k, block_table, first_part, order)
            outputs = Outputs(out, lse, parts, part_lse, pieces)
            numbers = (scale, heads, causal, num_parts, num_splits, scheduled, ordered, wants_lse)
            run_roles(T, S, serial, inputs, outputs, numbers, i_program, num_programs)

    return attend_decode


@macro
def run_roles(T, S, serial, inputs, outputs, numbers, i_program, num_programs):
    """What a program does, in shared memory and with barriers of its own."""
    memory = Memory(*alloc_memory(T, S))
    if S.is_8bit and not (S.by_rows and not serial):
        memory = memory._replace(raw=Raw(*alloc_raw(T, S)))
    if S.sparse:
        memory = memory._replace(valid=T.alloc_shared((S.num_stages, S.block_n), T.uint8))
    if S.ahead:
        # TileLang lays small buffers by their names between large ones: here this one fits.
        sizes = T.alloc_shared((COUNTS,), T.int32)
        memory = memory._replace(counts=sizes)
    s = Softmax(*alloc_softmax(T, S))
    if not serial:
        T.annotate_layout({s.partial_sum: T.Fragment((S.rows, COLUMNS), forward_fn=owner_of_sum)})
    acc_l = T.alloc_fragment((S.rows, S.half), T.float32)
    acc_r = T.alloc_fragment((S.rows, S.half), T.float32)
    rescale_r = T.alloc_fragment((S.rows,), T.float32)

    thread = T.get_thread_binding()
    rows, heads = inputs.q.shape[1], numbers[1]
    row_tiles = T.alloc_var(T.int32, init=T.truncdiv(rows + (S.rows - 1), S.rows))
    tokens = T.alloc_var(T.int32, init=T.truncdiv(rows, heads))
    launch = Launch(*numbers, tokens, row_tiles, i_program, num_programs)
    if S.clustered:
        # TileLang starts clusters before what is ahead of them has ended.
        T.pdl_sync()
    if not S.known:
        if launch.scheduled == SHARED:
            find_share(T, S, launch, inputs, memory, thread, serial)
    if S.ahead:
        if launch.ordered == LONG_FIRST:
            take_long_first(T, S, launch, inputs, memory, thread, serial)
    if serial:
        attend_serially(T, S, launch, inputs, outputs, memory, s, acc_l, acc_r)
    else:
        if not S.ahead or S.early:
            # The combine kernel may start; it waits for the end of this one itself. Of unlike sequences and few rows it
            # would be on the SMs that are free first: one of 100000 keys among short ones 59 us for 63 (H200).
            T.pdl_trigger()
        barriers = Barriers(*alloc_barriers(T, S))
        if S.early:
            barriers = barriers._replace(scored=T.alloc_barrier(GROUP))
        if S.ahead:
            barriers = barriers._replace(sums_empty=T.alloc_barrier(GROUP))
        if S.loaders == 2:
            with T.ws(_PRODUCER, _PRODUCER + 1):
                produce(T, S, launch, inputs, outputs.pieces, memory, barriers, thread - 2 * GROUP)
        else:
            with T.ws(_PRODUCER):
                produce(T, S, launch, inputs, outputs.pieces, memory, barriers, thread - 2 * GROUP)
        with T.ws(_SCORES):
            score(T, S, launch, inputs, outputs, memory, barriers, s, acc_l)
        with T.ws(_VALUES):
            value(T, S, launch, inputs, outputs, memory, barriers, rescale_r, acc_r)
        if S.paired:
            # Nobody ends while the other may still write to it.
            T.cluster_sync()
