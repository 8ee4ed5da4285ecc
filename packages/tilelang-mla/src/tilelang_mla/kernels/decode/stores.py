"""What the roles of decoding store of a work item: rows of latents, results or partial ones, and numbers of rows."""

from tilelang_mla.kernels.common import GROUP, LN_2, log_of_sum, macro, number_of_sum, row_owners
from tilelang_mla.kernels.softmax import natural_lse


@macro
def store_lse(T, launch, lse, s, work, rows):
    for i in T.Parallel(*s.row_sum.shape, loop_layout=row_owners(T, s.row_sum.shape[0])):
        if work.first_row + i < rows:
            lse[
                work.sequence,
                T.truncmod(work.first_row + i, launch.heads),
                T.truncdiv(work.first_row + i, launch.heads),
            ] = natural_lse(T, s, i)


@macro
def store_max(T, max_logits, s, work):
    """Natural, as lse is; minus infinity of a row that has seen nothing."""
    for i in T.Parallel(*s.highest.shape, loop_layout=row_owners(T, s.highest.shape[0])):
        if work.first_row + i < max_logits.shape[1]:
            max_logits[work.sequence, work.first_row + i] = s.highest[i] * LN_2


@macro
def store_part(T, parts, acc, work, begin):
    for i, j in T.Parallel(*acc.shape):
        if work.first_row + i < parts.shape[1]:
            parts[work.part, work.first_row + i, begin + j] = acc[i, j]


@macro
def store_part_by_rows(T, parts, acc, work, begin):
    """The same by rows.cuh: 8 and 16 lists of 128 heads take 0.945 of the time (H200), 16 bits as long or longer."""
    own = T.alloc_local((acc.shape[1] // 2,), T.float32)
    T.assume(work.part >= 0)
    T.assume(work.part < parts.shape[0])
    T.assume(work.first_row >= 0)
    T.assume(work.first_row < parts.shape[1])
    for i, j in T.Parallel(*acc.shape):
        T.call_extern("handle", "mla::rows::keep", T.access_ptr(own[0], "rw"), number_of_sum(i, j), acc[i, j])
    T.call_extern(
        "handle", f"mla::rows::store_part<{acc.shape[1]}>", T.access_ptr(own[0], "r"),
        T.access_ptr(parts[work.part, work.first_row, begin], "w"), parts.shape[2], parts.shape[1] - work.first_row,
        T.get_thread_binding() % GROUP,
    )  # fmt: skip


@macro
def store_part_lse(T, launch, part_lse, s, work):
    """Of 2. The quick logarithm is near enough to weigh parts, but not for a sum that is asked for."""
    for i in T.Parallel(*s.row_sum.shape, loop_layout=row_owners(T, s.row_sum.shape[0])):
        log_of = T.alloc_var(T.float32, init=-T.infinity(T.float32))
        if s.row_sum[i] != 0:
            log_of = s.running_max[i] + T.log2(s.row_sum[i])
            if launch.wants_lse != 0:
                log_of = log_of_sum(T, s.running_max[i], s.row_sum[i])
        if work.first_row + i < part_lse.shape[1]:
            part_lse[work.part, work.first_row + i] = log_of
