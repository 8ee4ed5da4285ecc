"""A head's columns in the tiles of the kernel for sm_90."""

from __future__ import annotations

from kernel_reference.integers import power_of_two_at_least


def column_tiles(head_dim: int, cache_bits: int = 16) -> tuple[int, ...]:
    """A head's columns as the kernel for sm_90 has them: one tile or two, each a power of two, of 32 bytes at least.

    Two where that is less than one: 64 and 16 for 80, 128 and 64 for 192. Of 112, 128 are as quick as 64, 32 and 16.
    """
    whole = power_of_two_at_least(head_dim)
    if whole <= 64:
        return (64,)
    # Shared memory is swizzled over no less.
    rest = max(256 // cache_bits, power_of_two_at_least(head_dim - whole // 2))
    # The N of a WGMMA is 256 at most.
    return (whole // 2, rest) if rest < whole // 2 or whole > 256 else (whole,)
