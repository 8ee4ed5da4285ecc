"""The decoding kernel over a cache of 8 bits: keys as rows (keys.py, records.py), or widened by the
producer (rows.py, widen.py).

All else is as in kernel.py.
"""

from typing import Any

from tilelang_mla.kernels.common import ROWS
from tilelang_mla.kernels.decode.groups import Inputs, Outputs, Sizes
from tilelang_mla.kernels.decode.kernel import run_roles
from tilelang_mla.kernels.decode.keys import options_of, run_keys
from tilelang_mla.kernels.decode.records import run_records


def attend_8bit(
    T: Any, *, cache: str, dim_nope: int, dim_rope: int, dtype: Any, block_n: int, num_stages: int,
    serial: bool = False, per_token: bool = False, block_m: int = ROWS, by_rows: bool = False, narrow: bool = False,
    paired: bool = False,
) -> Any:  # fmt: skip
    """The kernel. cache: "e4m3", with one scale, or "656": records, with a scale of each 128 latents and a rope of q's
    dtype. The rest is as :func:`tilelang_mla.kernels.decode.attend` has it; keys lie anywhere.
    """
    S = Sizes(
        dim_nope, dim_rope, dtype, block_n, num_stages, True, cache, rows=block_m, by_rows=by_rows, narrow=narrow,
        paired=paired and not serial,
    )  # fmt: skip
    run = run_roles if serial else run_records if S.records_are_rows else run_keys if S.keys_are_rows else run_roles
    records = cache == "656"
    # What 16 bytes are of the rope's elements.
    line = 8 if records else 16
    batch, rows, pages, page_size = (T.dynamic(name) for name in ("batch", "rows", "pages", "page_size"))
    columns, bounds, places, room = (T.dynamic(name) for name in ("columns", "bounds", "places", "room"))
    num_pieces, scaled_pages, scaled_rows = (T.dynamic(name) for name in ("num_pieces", "scaled_pages", "scaled_rows"))
    q_batch, q_row, kv_page, kv_row = (T.dynamic(name) for name in ("q_batch", "q_row", "kv_page", "kv_row"))
    rope_page, rope_row, scales_page, scales_row = (
        T.dynamic(name) for name in ("rope_page", "rope_row", "scales_page", "scales_row")
    )
    out_batch, out_row, table_row = (T.dynamic(name) for name in ("out_batch", "out_row", "table_row"))
    lse_batch, lse_head, lse_token = (T.dynamic(name) for name in ("lse_batch", "lse_head", "lse_token"))
    s_lse_batch, s_lse_head, s_lse_token = (T.dynamic(name) for name in ("s_lse_batch", "s_lse_head", "s_lse_token"))

    lengths = (batch, T.dynamic("tokens_of")) if per_token else (batch,)

    @T.prim_func
    def attend_decode_8bit(
        q: T.StridedTensor((batch, rows, S.width), (q_batch, q_row, 1), dtype),
        kv: T.StridedTensor((pages, page_size, dim_nope), (kv_page, kv_row, 1), T.float8_e4m3fn),
        rope: T.StridedTensor((pages, page_size, S.rope_columns), (rope_page, rope_row, 1), S.rope_dtype(T)),
        scales: T.StridedTensor((scaled_pages, scaled_rows, S.scales), (scales_page, scales_row, 1), T.float32),
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
            # As caches are checked: rows may be read in vectors of 16 bytes.
            T.assume(kv_page % 16 == 0)
            T.assume(kv_row % 16 == 0)
            T.assume(rope_page % line == 0)
            T.assume(rope_row % line == 0)
            if records:
                T.assume(scales_page % 4 == 0)
                T.assume(scales_row % 4 == 0)
            inputs = Inputs(q, kv, seqlens_k, block_table, first_part, order, rope, scales)
            outputs = Outputs(out, lse, parts, part_lse, pieces)
            numbers = (scale, heads, causal, num_parts, num_splits, scheduled, ordered, wants_lse)
            run(T, S, serial, inputs, outputs, numbers, i_program, num_programs)

    return attend_decode_8bit
