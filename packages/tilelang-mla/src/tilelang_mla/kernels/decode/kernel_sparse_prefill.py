"""The kernel of sparse prefill: each query token has a list of keys of its own, which no program shares with another.

A work item is a whole list and a tile of 64 heads. The roles are those of decoding; tiles of a token run side by side,
so that they find its keys in L2. Of up to 16 heads keys are the rows of WGMMA (keys_16bit.py).
"""

from typing import Any

from tilelang_mla.kernels.common import GROUP, ROWS
from tilelang_mla.kernels.decode.groups import EVENLY, Inputs, Outputs, Sizes
from tilelang_mla.kernels.decode.kernel import run_roles
from tilelang_mla.kernels.decode.keys import options_of
from tilelang_mla.kernels.decode.keys_16bit import TEXT, run_keys_16bit


def attend_sparse_prefill(
    T: Any, *, dim_nope: int, dim_rope: int, dtype: Any, block_n: int, num_stages: int, serial: bool = False,
    by_rows: bool = False, early: bool = False, block_m: int = ROWS,
) -> Any:  # fmt: skip
    """The kernel. counted: whether ``lengths`` are those of the lists, else it stands in; and sinks of ``sink``.

    block_m: 64 heads of a tile, or 16, which are columns.
    """
    S = Sizes(
        dim_nope, dim_rope, dtype, block_n, num_stages, True, sparse=True, by_rows=by_rows and not serial, whole=True,
        early=early, rows=ROWS if serial else block_m,
    )  # fmt: skip
    keys_are_rows = S.rows < ROWS
    options = {"threads": 4 * GROUP, "prelude": TEXT} if keys_are_rows else options_of(S, serial)
    tokens, heads, keys, topk = (T.dynamic(name) for name in ("tokens", "heads", "keys", "topk"))
    num_lengths, num_sinks = T.dynamic("num_lengths"), T.dynamic("num_sinks")
    q_token, q_head, kv_key, kv_head = (T.dynamic(name) for name in ("q_token", "q_head", "kv_key", "kv_head"))
    out_token, out_head = T.dynamic("out_token"), T.dynamic("out_head")

    @T.prim_func
    def attend_prefill_sparse(
        q: T.StridedTensor((tokens, heads, S.width), (q_token, q_head, 1), dtype),
        # Pages of one key, so that an entry of a list is a page.
        kv: T.StridedTensor((keys, 1, S.width), (kv_key, kv_head, 1), dtype),
        indices: T.Tensor((tokens, topk), T.int32),
        lengths: T.Tensor((num_lengths,), T.int32),
        sink: T.Tensor((num_sinks,), T.float32),
        out: T.StridedTensor((tokens, heads, dim_nope), (out_token, out_head, 1), dtype),
        max_logits: T.Tensor((tokens, heads), T.float32),
        lse: T.Tensor((tokens, heads, 1), T.float32),
        scale: T.float32,
        counted: T.int32,
        sinks: T.int32,
        num_programs: T.int32,
    ):
        with T.Kernel(num_programs, **options) as i_program:
            # As arguments are checked: rows may be read in vectors of 16 bytes.
            T.assume(kv_key % 8 == 0)
            T.assume(kv_head % 8 == 0)
            inputs = Inputs(q, kv, lengths, indices, None, None, lists=counted, sink=sink, sinks=sinks)
            outputs = Outputs(out, lse, max_logits=max_logits)
            numbers = (scale, heads, 0, tokens, 1, EVENLY, 0, 1)
            if keys_are_rows:
                run_keys_16bit(T, S, inputs, outputs, numbers, i_program, num_programs)
            else:
                run_roles(T, S, serial, inputs, outputs, numbers, i_program, num_programs)

    return attend_prefill_sparse
