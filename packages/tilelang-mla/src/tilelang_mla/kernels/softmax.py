"""Online softmax over rows of scores in registers: macros of both attentions.

Scores are those of a softmax of powers of two. A macro's first argument is TileLang's language, ``T``.
"""

from typing import Any, NamedTuple

from tilelang_mla.kernels.common import FLOOR, HEADROOM, LN_2, WARP, log_of_sum, macro, row_owners

# Columns of WGMMA's accumulators before a thread has columns again.
COLUMNS = 8


class Softmax(NamedTuple):
    """Of a tile, in registers: [rows, keys of a block], or [rows] where it is not said.

    rescale: what brings earlier sums to the running maximum of a row. partial_sum: [rows, COLUMNS], the sums of the
    columns that a thread holds, until all blocks are added up. limit: the first key that a row does not see.
    highest: a row's largest score, where it is wanted; the running maximum may be a little below.
    """

    scores: Any
    weights: Any
    running_max: Any
    block_max: Any
    rescale: Any
    row_sum: Any
    partial_sum: Any
    limit: Any
    highest: Any = None


@macro
def mask(T, s, first_key, unmasked):
    """Hide from each row the keys behind its limit; all rows see those before ``unmasked``."""
    if first_key + s.scores.shape[1] > unmasked:
        for i, j in T.Parallel(*s.scores.shape):
            s.scores[i, j] = T.if_then_else(first_key + j < s.limit[i], s.scores[i, j], -T.infinity(T.float32))


@macro
def raise_max(T, s, scale):
    """The running maximum with a block's scores, and the factors that bring earlier sums to it."""
    T.reduce_max(s.scores, s.block_max, dim=1)
    for i in T.Parallel(s.running_max.shape[0]):
        s.block_max[i] = s.block_max[i] * scale
        s.rescale[i] = 1
        if s.block_max[i] > s.running_max[i] + HEADROOM:
            s.rescale[i] = T.exp2(s.running_max[i] - s.block_max[i])
            s.running_max[i] = s.block_max[i]


def owner_of_sum(i: Any, j: Any) -> Any:
    """A thread and its register, as in WGMMA's accumulators: four threads have two rows of COLUMNS columns."""
    return i // 16 * WARP + i % 8 * 4 + j // 2, i % 16 // 8 * 2 + j % 2


@macro
def exponentiate(T, s, scale):
    """Scores to weights, and their sums: each thread has those of its own columns until the rows are finished."""
    rows, block_n = s.scores.shape
    for i, j in T.Parallel(rows, block_n):
        s.scores[i, j] = T.exp2(s.scores[i, j] * scale - s.running_max[i])
    for i, j in T.Parallel(rows, COLUMNS):
        s.partial_sum[i, j] = s.partial_sum[i, j] * s.rescale[i]
    for i_piece in T.unroll(block_n // COLUMNS):
        for i, j in T.Parallel(rows, COLUMNS):
            s.partial_sum[i, j] = s.partial_sum[i, j] + s.scores[i, i_piece * COLUMNS + j]
    T.copy(s.scores, s.weights)


@macro
def raise_highest(T, s):
    """Each row's largest score with a block's, after :func:`raise_max`, where it is wanted."""
    if s.highest is not None:
        for i in T.Parallel(s.highest.shape[0]):
            s.highest[i] = T.max(s.highest[i], s.block_max[i])


@macro
def scale_rows(T, acc, factor):
    """Multiply each row by a number of its own."""
    for i, j in T.Parallel(*acc.shape):
        acc[i, j] = acc[i, j] * factor[i]


@macro
def any_moved(T, rescale):
    """Whether a row of the warp has a new running maximum."""
    moved = T.alloc_var(T.int32, init=0)
    for i in T.Parallel(rescale.shape[0], loop_layout=row_owners(T, rescale.shape[0])):
        if rescale[i] != 1:
            moved = 1
    return T.any_sync(moved != 0) != 0


@macro
def invert_sums(T, s):
    """The last rescale: by 1 / row sum. A sum of NaN stays NaN."""
    for i in T.Parallel(s.row_sum.shape[0]):
        s.rescale[i] = T.if_then_else(s.row_sum[i] == 0, 0, 1 / s.row_sum[i])


@macro
def zero_tail(T, values, stage, first_key, length):
    """Zero a block's rows from ``length`` on: a weight of 0 times the NaN that one may hold would be NaN."""
    for i, j in T.Parallel(*values.shape[1:]):
        if first_key + i >= length:
            values[stage, i, j] = T.cast(0, values.dtype)


@macro
def clear(T, s):
    """A finite floor of the running maximum: a row that has seen nothing yet makes no NaN of two infinities."""
    T.clear(s.partial_sum)
    T.fill(s.running_max, FLOOR)
    if s.highest is not None:
        T.fill(s.highest, -T.infinity(T.float32))


def natural_lse(T: Any, s: Softmax, i: Any) -> Any:
    """The natural logarithm of a row's sum of weights; minus infinity of a row that has seen nothing."""
    return T.if_then_else(
        s.row_sum[i] == 0, -T.infinity(T.float32), log_of_sum(T, s.running_max[i], s.row_sum[i], LN_2)
    )
