"""Records of layers inside an engine; the models themselves are in the packages' test_transformers.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernel_reference.bench import engines
from kernel_reference.bench.engines import Load, Stack, Timing


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
