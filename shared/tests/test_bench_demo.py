"""The demo runs every package's example and kernels, shows one table, and fails by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kernel_reference.bench import demo
from kernel_reference.bench.demo import Row, of_rows
from kernel_reference.bench.table import plain

DEMO = """
import os
from kernel_reference.bench.demo import CPU_IMPLEMENTATION, INTERPRETED_KERNEL, Row

assert os.environ.get("TRITON_INTERPRET") in (None, "1")


def real_size(device):
    assert "TRITON_INTERPRET" not in os.environ
    yield Row("split", CPU_IMPLEMENTATION, "cpu", "4096 tokens", 0.0, 12.5)


def interpreted():
    assert os.environ["TRITON_INTERPRET"] == "1"
    yield Row("split", INTERPRETED_KERNEL, "cpu", "64 tokens", 1.5e-3, 1800.0, note="every 8th row")
"""


def package(tmp_path: Path, name: str, demo_text: str = DEMO, quickstart: str = "print('fine')") -> str:
    folder = tmp_path / name / "examples"
    folder.mkdir(parents=True)
    (folder / "demo.py").write_text(demo_text)
    (folder / "quickstart.py").write_text(quickstart)
    return str(folder / "demo.py")


@pytest.fixture(autouse=True)
def narrow_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the caller's shell had asked for the interpreter: only the interpreted step may see it.
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_one_table_tells_for_every_row_what_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main([package(tmp_path, "gdn-split")], has_gpu=lambda: False) == 0
    out = capsys.readouterr().out
    assert "[1/3] gdn-split: quickstart.py ..." in out
    assert "[3/3] gdn-split: interpreted done in" in out
    rows = [line.split() for line in out.splitlines() if " tokens " in line]
    assert [" ".join(row) for row in rows] == [
        "gdn-split split CPU implementation cpu 4096 tokens 0 (exact) 12.5 ms",
        "split kernel in Triton's interpreter cpu 64 tokens 1.5e-03 1.8 s every 8th row",
    ]


def test_on_a_gpu_nothing_is_interpreted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main([package(tmp_path, "gdn-split")], has_gpu=lambda: True) == 0
    out = capsys.readouterr().out
    assert "[2/2] gdn-split: real_size done" in out
    assert "interpreter" not in out


def test_a_failing_package_is_named_after_the_table_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = DEMO.replace("12.5)", "12.5)\n    raise RuntimeError('kernel does not fit')")
    paths = [package(tmp_path, "broken", broken), package(tmp_path, "sound")]
    assert demo.main(paths, has_gpu=lambda: True) == 1
    printed = capsys.readouterr()
    assert "FAILED: broken: real_size: exit code 1" in printed.err
    assert "RuntimeError: kernel does not fit" in printed.err
    assert "sound" in printed.out
    assert printed.out.count("CPU implementation") == 2, "rows that came before the failure are shown"
    assert "FAILED: sound" not in printed.err


def test_rows_survive_a_process_that_is_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed = DEMO.replace("12.5)", "12.5)\n    os.kill(os.getpid(), 9)")
    assert demo.main([package(tmp_path, "killed", killed)], has_gpu=lambda: True) == 1
    printed = capsys.readouterr()
    assert "FAILED: killed: real_size: exit code -9" in printed.err
    assert "CPU implementation" in printed.out


def test_a_failing_quickstart_fails_its_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "for i in range(100):\n    print('line', i)\nimport no_such_module"
    assert demo.main([package(tmp_path, "gdn-split", quickstart=text)], has_gpu=lambda: True) == 1
    err = capsys.readouterr().err
    assert "FAILED: gdn-split: quickstart.py: exit code 1" in err
    assert "No module named 'no_such_module'" in err
    assert "line 99" in err
    assert "line 10\n" not in err


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param("return ()", "real_size() yielded no row", id="nothing"),
        pytest.param(
            "return [('split', 0.0)]", "what real_size() yields must be a kernel_reference.bench.demo.Row", id="tuple"
        ),
    ],
)
def test_a_demo_that_yields_no_rows_fails(tmp_path: Path, capsys: Any, body: str, words: str) -> None:
    text = f"def real_size(device):\n    {body}\n"
    assert demo.main([package(tmp_path, "gdn-split", text)], has_gpu=lambda: True) == 1
    assert words in capsys.readouterr().err


def test_a_step_that_hangs_is_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(demo, "_steps", lambda *_: [demo._Step("p", "hangs", ("sleep", "60"))])
    monkeypatch.setattr(demo, "_HEARTBEAT_S", 0.2)
    assert demo.main([package(tmp_path, "p"), "--timeout", "0.7"], has_gpu=lambda: True) == 1
    printed = capsys.readouterr()
    assert "FAILED: p: hangs: stopped after 0.7 s" in printed.err
    assert "p: hangs still running" in printed.out


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main([str(tmp_path / "demo.py")], has_gpu=lambda: True) == 2
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"implementation": "GPU"}, "implementation must be one of"),
        ({"error": float("nan")}, "error must be a finite number >= 0, got nan"),
        ({"time_ms": -1.0}, "time_ms must be a finite number >= 0, got -1.0"),
        ({"shape": (4096, 128)}, "shape must be a string, got (4096, 128)"),
    ],
)
def test_a_row_that_would_mislead_is_refused(changes: dict[str, Any], words: str) -> None:
    values = dict(kernel="k", implementation=demo.GPU_KERNEL, device="cpu", shape="s", error=0.0, time_ms=1.0)
    with pytest.raises((ValueError, TypeError)) as caught:
        Row(**(values | changes))
    assert words in str(caught.value)


def test_the_note_column_appears_only_where_something_is_noted() -> None:
    row = Row("k", demo.GPU_KERNEL, "NVIDIA H200", "s", 0.0, 0.0123)
    text = plain(of_rows([("p", row)]))
    assert "note" not in text
    assert "12.3 us" in text
    noted = Row("k", demo.GPU_KERNEL, "NVIDIA H200", "s", 0.0, 1.0, note="every 8th row")
    assert "note" in plain(of_rows([("p", row), ("p", noted)]))
