"""The decoding kernel over listed keys: each query token has a list of its own, of positions in the pool.

A list is a sequence, of one query token: the roles, the shares and the combine kernel are those of dense attention. Its
keys lie anywhere, and entries that are no key are hidden from the softmax, block by block.
"""

from typing import Any

from tilelang_mla.kernels.common import ROWS
from tilelang_mla.kernels.decode.groups import Inputs, Outputs, Sizes
from tilelang_mla.kernels.decode.kernel import run_roles
from tilelang_mla.kernels.decode.keys import options_of, run_keys
from tilelang_mla.kernels.decode.records import run_records


def attend_sparse(
    T: Any, *, cache: str, dim_nope: int, dim_rope: int, dtype: Any, block_n: int, num_stages: int,
    serial: bool = False, block_m: int = ROWS, by_rows: bool = False, paired: bool = False,
    joined: bool = False, even: bool = False,
) -> Any:  # fmt: skip
    """The kernel. cache: "" of q's dtype or "656" of records, whose parts are kv, rope and scales; else kv stands in.

    ``lists`` are as many as have a length in common, 0 where all entries count. sink: a logit of each head, which takes
    part in the softmax and has no value; with ``sinks`` 0 it stands in.
    """
    S = Sizes(
        dim_nope, dim_rope, dtype, block_n, num_stages, True, cache, sparse=True, rows=block_m,
        by_rows=by_rows and not serial, paired=paired and not serial, joined=joined and not serial,
        even=even,
    )  # fmt: skip
    run = run_roles if serial else run_records if S.records_are_rows else run_keys if S.keys_are_rows else run_roles
    records = cache == "656"
    batch, rows, pages, page_size = (T.dynamic(name) for name in ("batch", "rows", "pages", "page_size"))
    columns, bounds, places, room = (T.dynamic(name) for name in ("columns", "bounds", "places", "room"))
    num_pieces, num_lengths, num_sinks = (T.dynamic(name) for name in ("num_pieces", "num_lengths", "num_sinks"))
    q_batch, q_row, kv_page, kv_row = (T.dynamic(name) for name in ("q_batch", "q_row", "kv_page", "kv_row"))
    rope_page, rope_row, scales_page, scales_row = (
        T.dynamic(name) for name in ("rope_page", "rope_row", "scales_page", "scales_row")
    )
    out_batch, out_row, table_row = (T.dynamic(name) for name in ("out_batch", "out_row", "table_row"))
    s_lse_batch, s_lse_head, s_lse_token = (T.dynamic(name) for name in ("s_lse_batch", "s_lse_head", "s_lse_token"))
    lse_batch, lse_head, lse_token = (T.dynamic(name) for name in ("lse_batch", "lse_head", "lse_token"))
    kv_width, kv_dtype = (dim_nope, T.float8_e4m3fn) if records else (S.width, dtype)
    line = 16 if records else 8
    of_scales = T.Tensor((T.dynamic("num_scales"),), T.float32)
    if records:
        of_scales = T.StridedTensor((pages, page_size, S.scales), (scales_page, scales_row, 1), T.float32)

    @T.prim_func
    def attend_decode_sparse(
        q: T.StridedTensor((batch, rows, S.width), (q_batch, q_row, 1), dtype),
        kv: T.StridedTensor((pages, page_size, kv_width), (kv_page, kv_row, 1), kv_dtype),
        rope: T.StridedTensor((pages, page_size, S.rope_columns), (rope_page, rope_row, 1), dtype),
        scales: of_scales,
        lengths: T.Tensor((num_lengths,), T.int32),
        indices: T.StridedTensor((batch, columns), (table_row, 1), T.int32),
        sink: T.Tensor((num_sinks,), T.float32),
        first_part: T.Tensor((bounds,), T.int32),
        order: T.Tensor((places,), T.int32),
        out: T.StridedTensor((batch, rows, dim_nope), (out_batch, out_row, 1), dtype),
        lse: T.StridedTensor((lse_batch, lse_head, lse_token), (s_lse_batch, s_lse_head, s_lse_token), T.float32),
        parts: T.Tensor((room, rows, dim_nope), T.float32),
        part_lse: T.Tensor((room, rows), T.float32),
        pieces: T.Tensor((num_pieces,), T.int32),
        scale: T.float32,
        num_parts: T.int32,
        num_splits: T.int32,
        scheduled: T.int32,
        ordered: T.int32,
        wants_lse: T.int32,
        lists: T.int32,
        sinks: T.int32,
        num_programs: T.int32,
    ):
        with T.Kernel(num_programs, **options_of(S, serial)) as i_program:
            T.assume(kv_page % line == 0)
            T.assume(kv_row % line == 0)
            if records:
                T.assume(rope_page % 8 == 0)
                T.assume(rope_row % 8 == 0)
                T.assume(scales_page % 4 == 0)
                T.assume(scales_row % 4 == 0)
            inputs = Inputs(q, kv, lengths, indices, first_part, order, rope, scales, lists, sink, sinks)
            outputs = Outputs(out, lse, parts, part_lse, pieces)
            numbers = (scale, rows, 0, num_parts, num_splits, scheduled, ordered, wants_lse)
            run(T, S, serial, inputs, outputs, numbers, i_program, num_programs)

    return attend_decode_sparse
