"""How far a result is off, where results fill a device."""

from __future__ import annotations

import torch

Tensor = torch.Tensor

# Elements that are compared at once.
_PIECE = 2**26


def error_by_largest(got: Tensor, wanted: Tensor) -> float:
    """The largest difference by the largest element, piece by piece: results fill a device."""
    if got.shape != wanted.shape:
        raise ValueError(f"of shape {tuple(got.shape)} in place of {tuple(wanted.shape)}")
    if not got.numel():
        return 0.0
    axis = max(range(got.ndim), key=lambda i: got.shape[i]) if got.ndim else 0
    got, wanted = (x if x.ndim else x[None] for x in (got, wanted))
    size = max(1, _PIECE * got.shape[axis] // got.numel())
    worst, largest = (torch.zeros((), device=got.device) for _ in range(2))
    for g, w in zip(got.split(size, axis), wanted.split(size, axis), strict=True):
        # NaN stays.
        worst = torch.maximum(worst, (g.float() - w.float()).abs().max())
        largest = torch.maximum(largest, w.float().abs().max())
    return float(worst / largest.clamp(min=1e-9))
