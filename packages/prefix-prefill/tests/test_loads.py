"""What does the main loop cost? Its loads of tiles, which Triton's interpreter tells, of the lowest version too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from prefix_prefill import PrefillPlan


@pytest.fixture
def cost(device: torch.device, kernels, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """What a batch costs: loads of tiles, which only the interpreter tells."""
    if device.type == "cuda":
        pytest.skip("counts loads, which only the interpreter tells")
    from triton.runtime.interpreter import InterpreterBuilder

    loads = []
    load = InterpreterBuilder.create_masked_load

    def counted(self, pointers, *rest):
        loads.append(pointers.data.size)
        return load(self, pointers, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)

    def count(batch, **options) -> int:
        loads.clear()
        kernels.prefill(batch, PrefillPlan(16, 16, 1, 4, 1))
        batch.check()
        return len([size for size in loads if size > 16])

    return count


def test_trap_a_window_bounds_the_loop_over_the_context(tensors, cost) -> None:
    """One that only masks costs 8 times as much at 320 tokens as at 40."""
    for cached in (False, True):
        options = {"window": (20, 0), "cached": cached, "heads": (1, 1), "head_dim": 16}
        short, long = (cost(tensors.batch([size], **options)) for size in [(40, 10), (320, 10)])
        assert long <= short + 4, f"{long} for a long context, {short} for a short one"


def tiles_of(lengths: list[tuple[int, int]], tile: int) -> int:
    """Tiles of q, k and v that a main loop loads in tiles of so many tokens and keys, cached and new ones in turn."""
    count = 0
    for context, new in lengths:
        for end in range(tile, new + tile, tile):
            count += 1 + 2 * (-(-context // tile) + -(-min(end, new) // tile))
    return count


def test_trap_a_ragged_batch_costs_the_sum_of_its_work(tensors, cost) -> None:
    """Tiles past a short sequence's end, as many as the longest one has, would each load the short one's context."""
    for lengths in ([(160, 1), (0, 60), (160, 2)], [(160, 1)], [(0, 0), (33, 17), (64, 0)]):
        spent = cost(tensors.batch(lengths, heads=(1, 1), head_dim=16))
        assert spent <= tiles_of(lengths, 16), f"{spent} tiles loaded for {lengths}"


def test_trap_query_heads_of_a_kv_head_share_what_is_read_of_it(tensors, cost) -> None:
    one, eight = (cost(tensors.batch([(60, 2)], heads=(heads, 1), head_dim=16)) for heads in (1, 8))
    assert eight <= one, f"{eight} for eight heads, {one} for one"
