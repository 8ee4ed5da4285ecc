"""What both attentions share: the sizes of a warpgroup, and constants and functions of the softmax."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from tilelang import language

# Rows of a WGMMA, threads of a warpgroup, and of a warp.
ROWS = 64
GROUP = 128
WARP = 32
# A finite floor of the running maximum: a row that has seen nothing yet makes no NaN of two infinities.
FLOOR = -1e30
# How far scores, as powers of two, may be above the running maximum before it moves and accumulators are rescaled:
# weights of up to 256 are as accurate as those of up to 1, and a rescale becomes rare.
HEADROOM = 8.0
LN_2 = 0.6931471805599453
LOG2_E = 1.4426950408889634


def macro(function: Callable[..., Any]) -> Callable[..., Any]:
    """TileLang's macro, made of the function when it is first called.

    TileLang rewrites a macro in about 20 ms, and no kernel calls a third of them.
    """
    made: list[Any] = []

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        if not made:
            made.append(language.macro(function))
        return made[0](*given, **named)

    return call


def row_owners(T: Any, rows: int) -> Any:
    """Which threads hold a row of WGMMA's accumulators: four, with two rows each of the 16 of a warp.

    The ``loop_layout`` of loops that only read values of rows. TileLang finds the same one by itself, but for each such
    loop once for every operation of the role, which takes more than half of the time in which it lowers a kernel.
    """

    def owner(i: Any, replica: Any) -> Any:
        return i // 16 * WARP + i % 8 * 4 + replica, i % 16 // 8

    return T.Fragment((rows,), forward_fn=owner, replicate=4)


def number_of_sum(i: Any, j: Any) -> Any:
    """Which of a thread's accumulators is one of 64 rows, as WGMMA has them."""
    return j // 8 * 4 + i % 16 // 8 * 2 + j % 2


def log_of_sum(T: Any, running_max: Any, row_sum: Any, unit: float = 1.0) -> Any:
    """The logarithm of row_sum * 2 ** running_max: of 2, or with ``unit`` ln 2 the natural one.

    In float64: the approximate one is off by more than the rounding of the result.
    """
    log_of = T.cast(running_max, T.float64) + T.log2(T.cast(row_sum, T.float64))
    return T.cast(log_of * T.float64(unit), T.float32)
