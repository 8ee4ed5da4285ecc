"""Are two revisions of a package timed in turn, each by its own sources?"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kernel_reference.bench import beside

CASES = """
from types import SimpleNamespace
import torch, toy

def cases(device):
    for n in {sizes}:
        yield SimpleNamespace(name=f"n{{n}}", bytes_moved=4 * n, ours={{"toy": toy.twice}},
                              make_inputs=lambda n=n: torch.ones(n, device=device))
"""


def tree(root: Path, body: str, sizes: tuple[int, ...] = (8, 16)) -> Path:
    """Sources of a package whose ``twice`` does this, and its cases."""
    source = root / "packages/toy/src/toy"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text(f"def twice(x):\n    {body}\n", encoding="utf-8")
    benchmarks = root / "packages/toy/benchmarks"
    benchmarks.mkdir()
    (benchmarks / "cases.py").write_text(CASES.format(sizes=sizes), encoding="utf-8")
    return benchmarks / "cases.py"


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "toy-beside.jsonl").read_text(encoding="utf-8").splitlines()]


def test_each_revision_is_timed_by_its_own_sources_whatever_it_prints_and_a_case_of_one_alone_is_counted(
    tmp_path: Path, capsys
) -> None:
    tree(tmp_path / "old", "assert len(x) > 8, 'the old one'; print('compiling'); return x * 2", (8, 16, 24, 32))
    cases = tree(tmp_path / "new", "import os; os.write(1, b'[0]'); return x + x", (8, 16, 24, 64))
    out = tmp_path / "out"
    command = [str(cases), "--old", str(tmp_path / "old"), "--out", str(out), "--commits", "abc", "def"]
    assert beside.main([*command, "--only", "n[13468]"]) == 1
    failed, found = records(out)
    assert (failed["case"], failed["note"]) == ("n8", "old: AssertionError: the old one")
    assert (found["case"], found["implementation"]) == ("n16", "toy")
    assert found["old_us"] > 0
    assert found["ratio"] == found["new_us"] / found["old_us"]
    assert len(found["times_us"]["old"]) == 10
    assert (found["old_commit"], found["commit"]) == ("abc", "def")
    assert "1 cases are new; 1 are gone" in capsys.readouterr().out


class Clocked:
    """A revision that is as slow as it is told, and slower right after another call."""

    prepared: ClassVar[list[str]] = []

    def __init__(self, us: float, calls: list[str], name: str) -> None:
        self.us, self.calls, self.name = us, calls, name

    def tell(self, **command: Any) -> None:
        self.command = command

    def hear(self) -> Any:
        if self.command["do"] == "prepare":
            self.prepared.append(self.name)
            return ["toy"]
        if self.command["do"] == "release":
            return True
        self.calls.append(self.name)
        return self.us

    def ask(self, **command: Any) -> Any:
        self.tell(**command)
        return self.hear()


def test_the_ratio_is_of_medians_and_neither_revision_is_always_first() -> None:
    calls: list[str] = []
    both: Any = {"old": Clocked(10.0, calls, "old"), "new": Clocked(12.0, calls, "new")}
    (found,) = beside.time_case(both, "n8", 8, random.Random(0))
    assert found["ratio"] == pytest.approx(1.2)
    assert set(calls[::2]) == {"old", "new"}
    assert calls.count("old") == calls.count("new") == 8


def test_each_revision_is_once_the_first_to_take_memory(monkeypatch) -> None:
    monkeypatch.setattr(Clocked, "prepared", [])
    both: Any = {"old": Clocked(10.0, [], "old"), "new": Clocked(12.0, [], "new")}
    beside.time_case(both, "n8", 1, random.Random(0), memories=2)
    assert sorted(Clocked.prepared[::2]) == ["new", "old"]


def test_a_tree_without_the_cases_is_named(tmp_path: Path, capsys) -> None:
    cases = tree(tmp_path / "new", "return x")
    assert beside.main([str(cases), "--old", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "must be a file of cases" in capsys.readouterr().err


def test_a_revision_whose_cases_cannot_be_read_is_named_with_the_reason(tmp_path: Path, capfd) -> None:
    cases = tree(tmp_path / "new", "return x")
    tree(tmp_path / "old", "return x").write_text("import a_library_that_is_gone", encoding="utf-8")
    assert beside.main([str(cases), "--old", str(tmp_path / "old"), "--out", str(tmp_path)]) == 2
    told = capfd.readouterr().err
    assert "beside: the cases of old cannot be read: ModuleNotFoundError" in told
    assert "a_library_that_is_gone" in told
