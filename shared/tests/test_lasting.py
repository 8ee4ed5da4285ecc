"""Memory that stays between calls: who makes it, and whether it is found again."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernel_reference.lasting import Counters, lasting


def test_what_lasts_is_made_by_another_thread_unless_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.compile's graphs own what a thread allocates while they warm up."""
    seen: list[Any] = []
    here, gpu, capturing = threading.get_ident(), SimpleNamespace(type="cuda"), False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(seen.append(device)))
    waited = SimpleNamespace(synchronize=lambda: seen.append(threading.get_ident()))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: waited)

    def make() -> torch.Tensor:
        seen.append(threading.get_ident())
        return torch.ones(2)

    assert lasting(make, gpu).sum() == 2  # type: ignore[arg-type]
    assert seen == [gpu, seen[1], seen[1]]
    assert seen[1] != here
    capturing = True
    for device in (gpu, torch.device("cpu")):
        seen.clear()
        assert lasting(make, device).sum() == 2  # type: ignore[arg-type]
        assert seen == [here]


def test_counters_of_a_pool_are_found_once_made_unless_they_are_too_few() -> None:
    pool, counters = torch.zeros(4), Counters()
    assert counters.found(pool, 2) is None
    made = counters.of(pool, 2)
    assert counters.found(pool, 2) is counters.of(pool, 1) is made
    assert counters.found(pool, 3) is None
    more = counters.of(pool, 3)
    assert counters.found(pool, 2) is more is not made
    # Graphs hold an address alone.
    assert [*map(id, counters._kept)] == [id(made), id(more)]
