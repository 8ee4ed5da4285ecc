"""Records of layers inside an engine, and steps in CUDA graphs; models are in the packages' test_transformers.py."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from kernel_reference.bench import engines
from kernel_reference.bench.engines import Load, Stack, Timing, captured


def stack(name: str) -> Stack:
    return Stack(name, config=None, enable=lambda: pytest.fail("not called"), caches=(), loads=[Load(1)], layers="1")


def test_a_stack_that_fails_leaves_what_was_timed_before_it_and_those_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(stack: Stack, device: torch.device, rounds: int) -> Iterator[Timing]:
        yield Timing(stack.name, stack.layers, 1, 1, 0, False, theirs_us=2.0, ours_us=1.0, difference=0.0)
        if stack.name == "fails":
            raise RuntimeError("an illegal address")
        yield Timing(stack.name, stack.layers, 8, 1, 0, False, theirs_us=2.0, ours_us=1.0, difference=0.0)

    monkeypatch.setattr(engines, "measure", measure)
    monkeypatch.setattr(engines, "load_stacks", lambda file, dry: [stack("fails"), stack("runs")])
    out = tmp_path / "timings.jsonl"
    assert engines.main(["--dry", "engines.py", "--out", str(out)]) == 1
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["stack"], line["sequences"]) for line in lines] == [("fails", 1), ("runs", 1), ("runs", 8)]
    assert "fails: an illegal address" in capsys.readouterr().err


def test_a_captured_step_keeps_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    ids = torch.arange(3)
    kept = weakref.ref(ids)
    replay: Any = captured(partial(torch.add, ids, 1))
    del ids
    # A graph reads addresses: whose memory is given back, it reads what lies there next.
    assert kept() is not None
    assert replay().tolist() == [1, 2, 3]
    del replay
    assert kept() is None


@pytest.mark.gpu
def test_replays_give_the_same_whatever_is_allocated_between() -> None:
    replay = captured(partial(torch.add, torch.arange(32, device="cuda"), 1))
    others = [torch.full((32,), -(2**40), device="cuda") for _ in range(8)]
    assert replay().tolist() == list(range(1, 33))
    del others


def test_what_an_indexer_looks_through_is_filled_and_taken_back_with_keys_and_values() -> None:
    keys, values, idx_keys = (torch.zeros(1, heads, 8, 4) for heads in (2, 2, 1))
    lengths = [torch.tensor([5]), torch.tensor([7])]
    layer = SimpleNamespace(
        keys=keys, values=values, idx_keys=idx_keys, cumulative_length=lengths[0], idx_cumulative_length=lengths[1]
    )
    engines._fill(SimpleNamespace(layers=[layer]), 3)
    assert all(states.count_nonzero() == states.numel() for states in (keys, values, idx_keys))
    assert [length.tolist() for length in lengths] == [[3], [3]]


def test_a_table_has_a_row_a_load_and_gpu_with_its_graph_beside_it() -> None:
    def timing(tokens: int, cached: int, graph: bool, theirs_us: float, device: str = "NVIDIA H200") -> Timing:
        return Timing("Model", "2", 4, tokens, cached, graph, theirs_us, 1000.0, difference=0.0, device=device)

    steps = [timing(1, 64, False, 4000.0, "NVIDIA H100 80GB HBM3"), timing(1, 64, False, 2000.0)]
    lines = engines.markdown([timing(512, 0, False, 3000.0), *steps, timing(1, 64, True, 1500.0)])
    assert lines[2:] == [
        "| Model | 4 x 512 | - | H200 | 3.00 ms | 1.00 ms | - | - | 2.05e+06 |",
        "| Model | 4 x 1 | 64 | H100 | 4.00 ms | 1.00 ms | - | - | 4000 |",
        "| Model | 4 x 1 | 64 | H200 | 2.00 ms | 1.00 ms | 1.50 ms | 1.00 ms | 4000 |",
    ]


def test_records_are_read_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing("runs", "1", 8, 1, 0, False, theirs_us=2.0, ours_us=1.0, difference=0.0)
    monkeypatch.setattr(engines, "measure", lambda stack, device, rounds: iter([timing]))
    monkeypatch.setattr(engines, "load_stacks", lambda file, dry: [stack("runs")])
    assert engines.main(["--dry", "engines.py", "--out", str(tmp_path / "timings.jsonl")]) == 0
    assert engines.read([tmp_path / "timings.jsonl"]) == [timing]
