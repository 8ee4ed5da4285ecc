"""Memory that stays between calls, such as counters that kernels leave as zeros."""

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


class Counters:
    """For each pool of states the counters of the programs that have read it, or taken part of what becomes of it.

    Zeros, which every launch leaves as zeros. They are a pool's own, some for each slot: launches that run at the same
    time share neither slots nor, so, counters. A pool is known by its address. Counters are never freed, since a
    captured graph may hold on to them: 4 bytes each.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []

    def of(self, pool: torch.Tensor, count: int) -> torch.Tensor:
        """At least ``count`` counters for this pool."""
        found = self.found(pool, count)
        if found is None:
            found = lasting(lambda: torch.zeros(count, dtype=torch.int32, device=pool.device), pool.device)
            # While a graph is captured, what is made is the graph's own: zeros in each replay.
            if not (pool.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._kept.append(found)
                self._found[pool.data_ptr(), pool.device] = found
        return found

    def found(self, pool: torch.Tensor, count: int) -> torch.Tensor | None:
        """These, if they are made."""
        found = self._found.get((pool.data_ptr(), pool.device))
        return found if found is not None and found.shape[0] >= count else None


@lru_cache
def nothing(device: torch.device) -> torch.Tensor:
    """What a kernel is passed for a tensor that it neither reads nor writes: one float32 a device."""
    return lasting(lambda: torch.empty(1, dtype=torch.float32, device=device), device)
