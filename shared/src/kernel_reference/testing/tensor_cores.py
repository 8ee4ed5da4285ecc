"""How a GPU's matrix instructions sum: toward zero, a few products at a time.

An MMA of 16 bits adds 16 products to its accumulator at once. The terms are aligned to the largest of them, and what
lies below the accumulator's last place is cut off, not rounded: a sum that grows loses half a unit in its last place
at each step, always toward zero. After D / 16 steps it is several units off where float32 operands are about one, and
so is the lse of a row in which one key outweighs the others, which is that key's score.

Of 576 products of unit scale times 1.5, 640 rows of up to 180 keys, the lse is up to 1.4e-4 off at 145 (9 of its
units) by these sums, 1.2e-4 if terms are aligned and cut to 25 bits, and 2.1e-5 by float32 operands.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

# Columns that an MMA of 16 bits adds to an accumulator at once.
STEP = 16


def toward_zero(exact: Tensor) -> Tensor:
    """Of float64 the float32 next to it, toward zero."""
    rounded = exact.float()
    nearer = torch.nextafter(rounded, torch.zeros((), device=rounded.device))
    return torch.where(rounded.double().abs() > exact.abs(), nearer, rounded)


def truncated_product(a: Tensor, b: Tensor, before: Tensor | None = None, *, step: int = STEP) -> Tensor:
    """``a @ b`` [..., M, N] in float32 as tensor cores sum it, added to what an accumulator holds ``before``.

    Example:
        >>> a, b = torch.ones(1, 32), torch.cat([torch.full((16, 1), 2.0**20), torch.full((16, 1), 1.5 / 16)])
        >>> truncated_product(a, b).item() - 2**24, (a.double() @ b.double()).item() - 2**24
        (0.0, 1.5)
    """
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    acc = a.new_zeros((*batch, a.shape[-2], b.shape[-1]), dtype=torch.float32) if before is None else before
    for i in range(0, a.shape[-1], step):
        acc = toward_zero(acc.double() + a[..., i : i + step].double() @ b[..., i : i + step, :].double())
    return acc
