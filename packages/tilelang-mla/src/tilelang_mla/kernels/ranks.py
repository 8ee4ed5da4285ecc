"""The kernel that merges partial results, of ranks after their exchange or of parts of keys: a program a row."""

from typing import Any

from tilelang_mla.kernels.common import FLOOR, LN_2, WARP, log_of_sum, macro

_LOG2_E = 1.4426950408889634
# Elements of a thread. A row, which has its lse behind it, begins on a multiple of 4 bytes and no more.
_EACH = 2


def merge_ranks(T: Any, *, dim_nope: int, dtype: Any, serial: bool = False, of_float32: bool = False) -> Any:
    """The kernel; ``part_lse`` are natural logarithms, -inf or +inf where a rank saw nothing.

    of_float32: whether partial results are, and not of the dtype of what they are merged to.
    """
    ranks, rows = T.dynamic("ranks"), T.dynamic("rows")
    part_rank, part_row = T.dynamic("part_rank"), T.dynamic("part_row")
    lse_rank, lse_row = T.dynamic("lse_rank"), T.dynamic("lse_row")
    threads = 1 if serial else max(WARP, dim_nope // _EACH)

    @T.prim_func
    def merge_of_ranks(
        parts: T.StridedTensor((ranks, rows, dim_nope), (part_rank, part_row, 1), T.float32 if of_float32 else dtype),
        part_lse: T.StridedTensor((ranks, rows), (lse_rank, lse_row), T.float32),
        out: T.Tensor((rows, dim_nope), dtype),
        lse: T.Tensor((rows,), T.float32),
    ):
        with T.Kernel(rows, threads=threads) as i_row:
            T.assume(part_rank % 2 == 0)
            T.assume(part_row % 2 == 0)
            merged = T.alloc_local((_EACH,), T.float32)
            thread = T.get_thread_binding()
            # A finite floor, as everywhere.
            highest = T.alloc_var(T.float32, init=FLOOR)
            for r in T.serial(ranks):
                highest = T.max(highest, power_of(T, part_lse, r, i_row))
            sum_of = T.alloc_var(T.float32, init=0)
            if serial:
                for begin in T.serial(dim_nope // _EACH):
                    sum_of = merge_row(T, parts, part_lse, out, merged, highest, i_row, begin * _EACH)
            else:
                sum_of = merge_row(T, parts, part_lse, out, merged, highest, i_row, thread * _EACH)
            if thread == 0:
                lse[i_row] = T.if_then_else(sum_of == 0, -T.infinity(T.float32), log_of_sum(T, highest, sum_of, LN_2))

    return merge_of_ranks


def power_of(T: Any, part_lse: Any, rank: Any, row: Any) -> Any:
    """A rank's logarithm, of 2; FlashMLA's +inf is -inf here."""
    found = part_lse[rank, row]
    return T.if_then_else(found == T.infinity(T.float32), -T.infinity(T.float32), found * _LOG2_E)


@macro
def merge_row(T, parts, part_lse, out, merged, highest, i_row, begin):
    """Elements of a row from ``begin`` on, and the sum of its weights."""
    sum_of = T.alloc_var(T.float32, init=0)
    for j in T.unroll(_EACH):
        merged[j] = 0
    for r in T.serial(parts.shape[0]):
        power = T.alloc_var(T.float32, init=power_of(T, part_lse, r, i_row))
        # Of a rank that saw nothing nothing counts, NaN perhaps.
        if power != -T.infinity(T.float32):
            weight = T.alloc_var(T.float32, init=T.exp2(power - highest))
            sum_of = sum_of + weight
            for j in T.unroll(_EACH):
                if begin + j < parts.shape[2]:
                    merged[j] = merged[j] + weight * T.cast(parts[r, i_row, begin + j], T.float32)
    for j in T.unroll(_EACH):
        if begin + j < parts.shape[2]:
            out[i_row, begin + j] = T.if_then_else(sum_of == 0, 0, merged[j] / sum_of)
    return sum_of
