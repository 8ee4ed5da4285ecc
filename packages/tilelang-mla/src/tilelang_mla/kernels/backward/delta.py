"""The kernel of delta: of each query and head, the product of its output and that one's gradient."""

from typing import Any

_ROWS, _THREADS = 32, 128


def delta(T: Any, *, head_dim_v: int, dtype: Any, serial: bool = False) -> Any:
    """The kernel; less the gradient of the logarithm, where ``has_d_lse`` is not 0."""
    tokens, heads, of_d_lse = (T.dynamic(name) for name in ("tokens", "heads", "of_d_lse"))

    @T.prim_func
    def products_of_outputs(
        out: T.Tensor((tokens, heads, head_dim_v), dtype),
        d_out: T.Tensor((tokens, heads, head_dim_v), dtype),
        d_lse: T.Tensor((of_d_lse, tokens), T.float32),
        result: T.Tensor((heads, tokens), T.float32),
        has_d_lse: T.int32,
    ):
        # All heads of some tokens side by side: they lie together.
        with T.Kernel(T.ceildiv(tokens, _ROWS) * heads, threads=1 if serial else _THREADS) as i_program:
            products = T.alloc_fragment((_ROWS, head_dim_v), T.float32)
            sums = T.alloc_fragment((_ROWS,), T.float32)
            i_tile = T.alloc_var(T.int32, init=T.truncdiv(i_program, heads))
            i_head = T.alloc_var(T.int32, init=i_program - i_tile * heads)
            first = T.alloc_var(T.int32, init=i_tile * _ROWS)
            for i, j in T.Parallel(_ROWS, head_dim_v):
                products[i, j] = 0
                if first + i < tokens:
                    products[i, j] = T.cast(out[first + i, i_head, j], T.float32) * T.cast(
                        d_out[first + i, i_head, j], T.float32
                    )
            T.reduce_sum(products, sums, dim=1)
            for i in T.Parallel(_ROWS):
                if first + i < tokens:
                    result[i_head, first + i] = sums[i]
                    if has_d_lse != 0:
                        result[i_head, first + i] = sums[i] - d_lse[i_head, first + i]

    return products_of_outputs
