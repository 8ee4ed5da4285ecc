"""What both attentions have: the sizes of a warpgroup, and what their softmax starts from and ends with."""

from typing import Any

# Rows of a warpgroup's matrix product, its threads, and those of a warp.
ROWS = 64
GROUP = 128
WARP = 32
# A finite floor of the running maximum: a row that has seen nothing yet makes no NaN of two infinities.
FLOOR = -1e30
# How far scores, as powers of two, may be above what is subtracted from them before what was summed is brought to a new
# maximum: weights of up to 256 are as near as those of up to 1, and sums are multiplied a few times a walk at most.
HEADROOM = 8.0
LN_2 = 0.6931471805599453


def row_owners(T: Any, rows: int) -> Any:
    """Which threads hold a row of WGMMA's accumulators: four, with two rows each of the 16 of a warp.

    The ``loop_layout`` of loops that only read values of rows. TileLang finds the same one by itself, but for each such
    loop once for every operation of the role, which takes more than half of the time in which it lowers a kernel.
    """

    def owner(i: Any, replica: Any) -> Any:
        return i // 16 * WARP + i % 8 * 4 + replica, i % 16 // 8

    return T.Fragment((rows,), forward_fn=owner, replicate=4)


def log_of_sum(T: Any, top: Any, total: Any, unit: float = 1.0) -> Any:
    """The logarithm of total x 2 to the top: of 2, or with ``unit`` ln 2 the natural one.

    By way of float64, since the quick one is off by more than the rounding of what comes of it.
    """
    log_of = T.cast(top, T.float64) + T.log2(T.cast(total, T.float64))
    return T.cast(log_of * T.float64(unit), T.float32)
