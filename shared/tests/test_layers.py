"""Is a layer that differs found out, eagerly and in a graph?"""

from __future__ import annotations

import pytest
import torch

from kernel_reference.testing import layers
from kernel_reference.testing.layers import assert_alike

HEADS = {"heads": 2, "within": 0.01}


@pytest.fixture
def x(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """What both calls read. Without a GPU the graph is the call itself."""
    monkeypatch.setattr(layers, "captured", lambda call: call)
    return torch.arange(1.0, 25.0).view(3, 8)


def test_calls_that_differ_by_rounding_are_alike(x: torch.Tensor) -> None:
    assert_alike(lambda: x * 1.001, lambda: x, **HEADS, renew=x.neg_)


def test_a_small_head_is_not_measured_by_a_large_one(x: torch.Tensor) -> None:
    x[:, 4:] *= 1000
    off = x.clone()
    off[:, :4] *= 1.1
    with pytest.raises(AssertionError, match=r"differs by 0\.1"):
        assert_alike(lambda: off, lambda: x, **HEADS)


def test_no_number_is_alike_to_none(x: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="differs by nan"):
        assert_alike(lambda: x * torch.nan, lambda: x, **HEADS)


def test_a_graph_that_reads_other_memory_than_the_call_is_found(x: torch.Tensor) -> None:
    kept = x.clone()
    assert_alike(lambda: kept, lambda: x, **HEADS)
    with pytest.raises(AssertionError, match="differs by"):
        assert_alike(lambda: kept, lambda: x, **HEADS, renew=x.neg_)
