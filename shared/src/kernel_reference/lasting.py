"""Memory that stays between calls, such as counters that kernels leave at zero."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch


def lasting(make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """A tensor on ``device`` that outlives the call which makes it, ready for use on every stream.

    On a GPU another thread makes it: torch.compile's CUDA graphs own what theirs allocates while they warm up, and
    refuse what stays. While a graph is captured it is the graph's own, and made anew in each replay: not to be kept by
    anyone who reads or writes it.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return make()

    def make_apart() -> torch.Tensor:
        with torch.cuda.device(device):
            made = make()
            torch.cuda.current_stream().synchronize()
        return made

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make_apart).result()


@lru_cache
def nothing(device: torch.device) -> torch.Tensor:
    """What a kernel is passed for a tensor that it neither reads nor writes: one float32 a device."""
    return lasting(lambda: torch.empty(1, dtype=torch.float32, device=device), device)
