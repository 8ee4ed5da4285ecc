"""The demo runs every package's example and kernels, shows one table, and fails by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from kernel_reference.bench import demo
from kernel_reference.bench.demo import Row, as_text
from kernel_reference.testing.forks import outcome_alone

# What a machine without a kernel language has in its place.
WITHOUT = "import sys; sys.modules['triton'] = None"

DEMO = """
import os
from kernel_reference.bench.demo import CPU_IMPLEMENTATION, INTERPRETED_KERNEL, Row

assert os.environ.get("TRITON_INTERPRET") in (None, "1")


def real_size(device):
    assert "TRITON_INTERPRET" not in os.environ
    yield Row("split", CPU_IMPLEMENTATION, "cpu", "4096 tokens", 0.0, 12.5)


def interpreted():
    assert os.environ["TRITON_INTERPRET"] == "1"
    yield Row("split", INTERPRETED_KERNEL, "cpu", "64 tokens", 1.5e-3, 1800.0, note="every 8th row", limit=2e-3)
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


# To import torch takes a process 3 s: where it is not asked how they start, steps are forks of one that has it.
FORK = """
import os, runpy
from kernel_reference.bench import demo
command = {command}
if command[1] == "-m":
    code = demo.main(command[3:])
    if code:
        os._exit(code)
else:
    runpy.run_path(command[1], run_name="__main__")
"""


class Forked:
    """What ``subprocess.Popen`` gives for a step."""

    def __init__(self, command: tuple[str, ...], env: dict[str, str], stdout: IO[str], stderr: int) -> None:
        self.code, printed = outcome_alone(FORK.format(command=command), env)
        stdout.write(printed)

    def wait(self, timeout: float) -> int | None:
        return self.code


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome_alone("", os.environ)  # the first fork starts the process that all are forked from
    monkeypatch.setattr(demo.subprocess, "Popen", Forked)


def test_one_table_tells_for_every_row_what_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main([package(tmp_path, "gdn-split")], has_gpu=lambda: False) == 0
    out = capsys.readouterr().out
    assert "[1/3] gdn-split: quickstart.py ..." in out
    assert "[3/3] gdn-split: interpreted done in" in out
    assert "3 steps in" in out
    assert "the longest gdn-split: " in out
    table = [" ".join(line.split()) for line in out.splitlines()]
    assert table[table.index("gdn-split") :] == [
        "gdn-split",
        "CPU implementation, cpu",
        "split exact exact 12.5 ms ok",
        "4096 tokens",
        "kernel in Triton's interpreter, cpu",
        "split 1.5e-03 2.0e-03 1.8 s ok",
        "64 tokens; every 8th row",
        "",
        "-" * 80,
        "2 of 2 results within their limits",
        "",
    ]


@pytest.mark.usefixtures("forked")
def test_on_a_gpu_nothing_is_interpreted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main([package(tmp_path, "gdn-split")], has_gpu=lambda: True) == 0
    out = capsys.readouterr().out
    assert "[2/2] gdn-split: real_size done" in out
    assert "interpreter" not in out


@pytest.mark.usefixtures("forked")
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


@pytest.mark.usefixtures("forked")
def test_rows_survive_a_process_that_is_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed = DEMO.replace("12.5)", "12.5)\n    os.kill(os.getpid(), 9)")
    assert demo.main([package(tmp_path, "killed", killed)], has_gpu=lambda: True) == 1
    printed = capsys.readouterr()
    assert "FAILED: killed: real_size: exit code -9" in printed.err
    assert "CPU implementation" in printed.out


@pytest.mark.usefixtures("forked")
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
@pytest.mark.usefixtures("forked")
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


SHAPE = "Phi-3-small, 1 token of each of 4 sequences, behind 16383, bfloat16"
NOTE = "error relative to a row's largest value; of a sample of rows, all heads"
LONG = "a_function_whose_name_leaves_no_room_for_its_numbers_x"
H200 = (demo.GPU_KERNEL, "NVIDIA H200", SHAPE)
ROWS = [
    ("gdn-split", Row("fused_qkvzba_split_reshape_cat", *H200, 0.0, 0.0974, plain_ms=0.345)),
    ("mla", Row(LONG, *H200, 9e-3, 12.0, NOTE, limit=7.8e-3)),
]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_a_terminal_and_cuts_no_word(width: int) -> None:
    text = as_text(ROWS, width)
    assert max(map(len, text.splitlines())) == width
    words = text.split()
    for _, row in ROWS:
        assert set(f"{row.kernel} {row.shape};".replace(";", " ").split()) <= {word.rstrip(";") for word in words}


def test_a_row_says_its_verdict_and_on_a_gpu_how_much_faster_it_is() -> None:
    text = as_text(ROWS, 120)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "fused_qkvzba_split_reshape_cat exact exact 97.4 us 3.54 x ok" in lines
    assert any(line.endswith("9.0e-03 7.8e-03 12 ms OVER") for line in lines)
    assert "1 of 2 results within their limits" in lines
    assert "speed-up" not in as_text([("p", Row("k", demo.CPU_IMPLEMENTATION, "cpu", "s", 0.0, 1.0))], 80)


@pytest.mark.usefixtures("forked")
def test_an_error_over_its_limit_fails_the_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inexact = DEMO.replace("0.0, 12.5)", "1e-2, 12.5, limit=8e-3)")
    assert demo.main([package(tmp_path, "gdn-split", inexact)], has_gpu=lambda: True) == 1
    assert "FAILED: gdn-split: split: an error of 1.0e-02, over the limit of 8.0e-03" in capsys.readouterr().err


def test_without_a_kernel_language_its_step_is_skipped_and_the_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = DEMO.replace('    assert os.environ["TRITON_INTERPRET"] == "1"', "    import triton.language")
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "sitecustomize.py").write_text(WITHOUT)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'without'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert demo.main([package(tmp_path, "needs-it", needs)], has_gpu=lambda: False) == 0
    out = capsys.readouterr().out
    skipped = "[3/3] needs-it: interpreted skipped: its kernels need Triton (on Linux alone), which is not installed"
    assert skipped in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    assert "skipped: needs-it, interpreted: its kernels need Triton" in out
    assert "1 of 1 results within their limits" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU Triton was imported before it could interpret")
def test_a_demo_says_itself_why_its_kernels_cannot_run_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    raising = DEMO.replace("    yield Row", "    raise Skip('no compiler')\n    yield Row")
    skips = f"from kernel_reference.bench.demo import Skip\n{raising}"
    with pytest.raises(SystemExit) as ended:
        demo._collect(Path(package(tmp_path, "gdn-split", skips)), "interpreted", tmp_path / "rows.jsonl")
    assert ended.value.code == demo._SKIPPED
    assert capsys.readouterr().out == "no compiler\n"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(demo.Skip):
        demo._collect(Path(package(tmp_path, "other", skips)), "real_size", tmp_path / "rows.jsonl")


@pytest.mark.usefixtures("forked")
def test_on_a_gpu_a_missing_kernel_language_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs = DEMO.replace(
        '    assert "TRITON_INTERPRET" not in os.environ', "    raise ModuleNotFoundError(name='triton')"
    )
    assert demo.main([package(tmp_path, "gdn-split", needs)], has_gpu=lambda: True) == 1
    assert "FAILED: gdn-split: real_size: exit code 1" in capsys.readouterr().err


def test_an_error_of_rows_is_of_the_worst_one_and_never_nan() -> None:
    wanted = torch.tensor([[1.0, 2.0], [0.0, 0.0]]).double()
    assert demo.error_of_rows(torch.tensor([[1.0, 1.5], [0.0, 0.0]]), wanted) == 0.25
    assert demo.error_of_rows(torch.tensor([[1.0, 2.0], [0.0, 0.5]]), wanted) == 0.5
    with pytest.raises(ArithmeticError, match="NaN"):
        demo.error_of_rows(wanted * float("nan"), wanted)


def test_a_time_is_the_median_of_calls_one_each_on_a_cpu() -> None:
    calls = []
    assert demo.median_ms(lambda: calls.append(1), torch.device("cpu"), 3) > 0
    assert len(calls) == 3
    assert demo.plain_ms(lambda: calls.append(1), torch.device("cpu")) is None
    assert len(calls) == 3


ON_A_GPU = """
import torch
from kernel_reference.bench.demo import Row, median_ms, plain_ms, ran_on

calls = []


def real_size(device):
    time = median_ms(lambda: calls.append("ours"), device)
    plain = plain_ms(lambda: calls.append("plain"), device)
    yield Row("split", *ran_on(device), "4096 tokens", 0.0, time, str(len(calls)), plain_ms=plain)
"""


def test_on_a_gpu_calls_are_timed_twenty_at_a_time_between_waits_beside_plain_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    waits: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    rows = tmp_path / "rows.jsonl"
    demo._collect(Path(package(tmp_path, "gdn-split", ON_A_GPU)), "real_size", rows)
    (row,) = demo._read(rows)
    # Five times 20 of ours; of plain PyTorch one to warm up and three.
    assert (row.implementation, row.device, row.note) == (demo.GPU_KERNEL, "NVIDIA H200", "104")
    assert len(waits) == 2 * (5 + 3)
    table = as_text([("gdn-split", row)], 80)
    assert "  GPU kernel, NVIDIA H200" in table.splitlines()
    assert " x  ok" in table
    assert "speed-up: over the reference in plain PyTorch, float32, on the same GPU" in table
