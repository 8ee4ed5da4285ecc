"""Integer arithmetic of launch plans: rounding up and powers of two. Imports nothing, so that a plan stays pure."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up.

    >>> cdiv(10, 4)
    3
    """
    return -(-a // b)


def is_power_of_two(*numbers: int) -> bool:
    """Whether each is 1, 2, 4, 8 ...

    >>> is_power_of_two(1, 64), is_power_of_two(64, 48), is_power_of_two(0)
    (True, False, False)
    """
    return all(number >= 1 and number & (number - 1) == 0 for number in numbers)


def power_of_two_at_least(n: int) -> int:
    """The smallest power of two that is >= n, for n >= 1.

    >>> power_of_two_at_least(80)
    128
    """
    return 1 << (n - 1).bit_length()


def power_of_two_at_most(n: int) -> int:
    """The largest power of two that is <= n, for n >= 1.

    >>> power_of_two_at_most(80)
    64
    """
    return 1 << (n.bit_length() - 1)


def power_of_two_in(n: int) -> int:
    """The largest power of two that divides n, for n >= 1.

    >>> power_of_two_in(80)
    16
    """
    return n & -n
