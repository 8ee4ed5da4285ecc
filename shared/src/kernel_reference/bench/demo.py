"""Run every package's example and demo and print one table.

``python -m kernel_reference.bench.demo packages/*/examples/demo.py``. A demo.py defines
``real_size(device: torch.device) -> Iterable[Row]`` and ``interpreted() -> Iterable[Row]``, quickstart.py beside it.
Each of the three runs in a process of its own; ``interpreted`` only where there is no GPU, with TRITON_INTERPRET=1.
Exit code 0: all ran; 1: a package failed, and is named; 2: nothing to run.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_reference.bench.machine import package_of
from kernel_reference.bench.table import Table, show, significant
from kernel_reference.checks import fail

GPU_KERNEL = "GPU kernel"
CPU_IMPLEMENTATION = "CPU implementation"
INTERPRETED_KERNEL = "kernel in Triton's interpreter"
CPU_TARGET_KERNEL = "kernel through TileLang's CPU target"
IMPLEMENTATIONS = (GPU_KERNEL, CPU_IMPLEMENTATION, INTERPRETED_KERNEL, CPU_TARGET_KERNEL)

# Enough of a traceback to see where and why, short enough that several failures fit a screen.
_TAIL_LINES = 25
_HEARTBEAT_S = 20.0


@dataclass(frozen=True)
class Row:
    """One line of the demo's table.

    kernel: the public function, ``fused_qkvzba_split_reshape_cat``.
    implementation: what ran, one of ``IMPLEMENTATIONS``.
    device: as a person would say it: ``NVIDIA H200``, ``cpu``.
    shape: sizes and dtype in words: ``Qwen3-Next-80B, 4096 tokens, bfloat16``.
    error: against float64, >= 0 (0 is exact); NaN is refused.
    time_ms: of one call, in milliseconds, after a warm-up.
    note: anything the reader must know, such as the sample of rows that the error was taken on.
    """

    kernel: str
    implementation: str
    device: str
    shape: str
    error: float
    time_ms: float
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("kernel", "implementation", "device", "shape", "note"):
            if not isinstance(getattr(self, name), str):
                fail(name, "a string", repr(getattr(self, name)), TypeError)
        if self.implementation not in IMPLEMENTATIONS:
            fail("implementation", f"one of {IMPLEMENTATIONS}", repr(self.implementation))
        for name in ("error", "time_ms"):
            value = float(getattr(self, name))
            if not 0 <= value < float("inf"):
                fail(name, "a finite number >= 0", value)
            # A NumPy or tensor scalar would not pass through JSON.
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class _Step:
    """One process of one package."""

    package: str
    name: str
    command: Sequence[str]
    interpreted: bool = False
    rows: Path | None = None


def main(arguments: Sequence[str] | None = None, *, has_gpu: Callable[[], bool] | None = None) -> int:
    """The command. Returns the exit code. ``has_gpu`` stands in for the question to torch."""
    parser = argparse.ArgumentParser(prog="python -m kernel_reference.bench.demo", description="Run packages' demos.")
    parser.add_argument("demos", type=Path, nargs="+", metavar="demo.py", help="packages/*/examples/demo.py")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for each process (default 1200)")
    parser.add_argument("--collect", choices=("real_size", "interpreted"), help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.collect:
        _collect(chosen.demos[0], chosen.collect, chosen.rows)
        return 0
    absent = [str(path) for path in chosen.demos if not path.is_file()]
    if absent:
        print(f"demo: no such file: {', '.join(absent)}", file=sys.stderr)
        return 2
    on_gpu = (has_gpu or _has_gpu)()
    print("a GPU is here: kernels run on it" if on_gpu else "no GPU here: CPU implementations, and kernels interpreted")
    found: list[tuple[str, Row]] = []
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        steps = [step for path in chosen.demos for step in _steps(path, Path(folder), on_gpu)]
        for number, step in enumerate(steps, start=1):
            reason = _run(step, f"[{number}/{len(steps)}] {step.package}: {step.name}", chosen.timeout)
            rows = _read(step.rows) if step.rows else []
            found += [(step.package, row) for row in rows]
            if step.rows and not rows and not reason:
                reason = f"{step.name}() yielded no row"
                print(reason, file=sys.stderr)
            if reason:
                failed.setdefault(step.package, f"{step.name}: {reason}")
    show(of_rows(found))
    for package, reason in failed.items():
        print(f"FAILED: {package}: {reason}", file=sys.stderr)
    return 1 if failed else 0


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _steps(path: Path, folder: Path, on_gpu: bool) -> list[_Step]:
    package = package_of(path)[0]
    steps = [_Step(package, "quickstart.py", (sys.executable, str(path.with_name("quickstart.py"))))]
    for name in ("real_size",) if on_gpu else ("real_size", "interpreted"):
        rows = folder / f"{package}-{name}.jsonl"
        command = (sys.executable, "-m", __spec__.name, str(path), "--collect", name, "--rows", str(rows))
        steps.append(_Step(package, name, command, name == "interpreted", rows))
    return steps


def _run(step: _Step, title: str, timeout: float) -> str:
    """Run one step, showing that it lives. Returns the reason of its failure, empty where it succeeded."""
    # An interpreter asked for by the caller's shell would make the reference rows wait for kernels they do not run.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if step.interpreted:
        environment["TRITON_INTERPRET"] = "1"
    start = time.monotonic()
    print(f"{title} ...", flush=True)
    # A file and not a pipe: a step that prints much must not block on it, and the tail is all that is wanted.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(step.command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            reason = _wait(process, title, start, timeout)
        except BaseException:
            process.kill()
            process.wait()
            raise
        if reason:
            output.seek(0)
            tail = output.read().splitlines()[-_TAIL_LINES:]
            print(
                "\n".join([f"{title} failed, {reason}; its last lines:", *(f"    {line}" for line in tail)]),
                file=sys.stderr,
            )
        else:
            print(f"{title} done in {time.monotonic() - start:.1f} s", flush=True)
    return reason


def _wait(process: subprocess.Popen[bytes], title: str, start: float, timeout: float) -> str:
    while True:
        left = start + timeout - time.monotonic()
        try:
            code = process.wait(min(_HEARTBEAT_S, max(left, 0.0)))
        except subprocess.TimeoutExpired:
            if left <= _HEARTBEAT_S:
                process.kill()
                process.wait()
                return f"stopped after {timeout:g} s"
            print(f"{title} still running, {time.monotonic() - start:.0f} s", flush=True)
        else:
            return f"exit code {code}" if code else ""


def _collect(path: Path, name: str, target: Path) -> None:
    """In the process of a step: write the rows of demo.py's function ``name`` to ``target``, each as it comes."""
    import torch

    if name == "interpreted":
        from kernel_reference.testing import interpreter

        interpreter.repair()
    spec = importlib.util.spec_from_file_location("demo", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} must be a Python file")
    # The example may import what lies beside it, as a script may.
    sys.path.insert(0, str(path.resolve().parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module
    spec.loader.exec_module(module)
    rows: Iterable[Row]
    if name == "interpreted":
        rows = module.interpreted()
    else:
        rows = module.real_size(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    with target.open("w", encoding="utf-8") as out:
        for row in rows:
            if not isinstance(row, Row):
                fail(f"what {name}() yields", "a kernel_reference.bench.demo.Row", repr(row), TypeError)
            out.write(json.dumps(dataclasses.asdict(row)) + "\n")
            out.flush()


def _read(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    # A step that was stopped may have left half a line.
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [Row(**json.loads(line)) for line in lines]


def of_rows(rows: Iterable[tuple[str, Row]]) -> Table:
    """The demo's table: a section a package."""
    rows = list(rows)
    columns = ["package", "kernel", "implementation", "device", "shape", "error vs float64", "time"]
    noted = any(row.note for _, row in rows)
    table = Table("demo", [*columns, "note"] if noted else columns, right=frozenset({"error vs float64", "time"}))
    for package in dict.fromkeys(package for package, _ in rows):
        mine = [row for name, row in rows if name == package]
        table.sections.append([_cells(package if i == 0 else "", row, noted) for i, row in enumerate(mine)])
    return table


def _cells(package: str, row: Row, noted: bool) -> list[str]:
    error = f"{row.error:.1e}" if row.error else "0 (exact)"
    cells = [package, row.kernel, row.implementation, row.device, row.shape, error, _duration(row.time_ms)]
    return [*cells, row.note] if noted else cells


def _duration(ms: float) -> str:
    if ms < 1:
        return f"{significant(ms * 1e3)} us"
    return f"{significant(ms)} ms" if ms < 1e3 else f"{significant(ms / 1e3)} s"


if __name__ == "__main__":
    # As a script this module is __main__, and its Row would not be the Row that a demo.py imports.
    from kernel_reference.bench import demo

    sys.exit(demo.main())
