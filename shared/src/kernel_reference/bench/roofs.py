"""What this device can do at most, measured and not read off a data sheet: copy bandwidth and bf16 GEMM rate."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kernel_reference.bench.timers import Clock


@dataclass(frozen=True)
class Roofs:
    """Copy bandwidth in GB/s (1e9 bytes, read plus written) and bf16 GEMM in TFLOP/s (1e12, 2 a multiply-add)."""

    copy_gb_per_s: float
    gemm_tflop_per_s: float


def measure(
    device: torch.device, clock: Clock, *, copy_bytes: int = 4 << 30, gemm_size: int = 8192, repeats: int = 10
) -> Roofs:
    """Measure the roofs of ``device``: medians of ``repeats`` calls after a warm-up.

    copy_bytes: of the source; halved until source and destination fit in a quarter of the free memory.
    gemm_size: n of the n x n x n product. On random data: on zeros a GPU draws less power and runs faster.
    """
    while copy_bytes > clock.free_bytes() // 8 and copy_bytes > 1 << 20:
        copy_bytes //= 2
    source = torch.randint(0, 256, (copy_bytes,), dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    copy_us = _median_us(partial(destination.copy_, source), clock, repeats)
    del source, destination
    a, b = (torch.randn(gemm_size, gemm_size, dtype=torch.bfloat16, device=device) for _ in range(2))
    gemm_us = _median_us(lambda: torch.mm(a, b), clock, repeats)
    return Roofs(2 * copy_bytes / copy_us * 1e-3, 2 * gemm_size**3 / gemm_us * 1e-6)


def _median_us(call: Callable[[], object], clock: Clock, repeats: int) -> float:
    clock.synchronize()
    warm = 3
    return statistics.median(clock.sample_us([call] * (warm + repeats))[warm:])
