"""Run every package's example and demo and print one table.

``python -m kernel_reference.bench.demo packages/*/examples/demo.py``. A demo.py defines
``real_size(device: torch.device) -> Iterable[Row]`` and ``interpreted() -> Iterable[Row]``, quickstart.py beside it;
``interpreted`` may raise ``Skip``.
Each of the three runs in a process of its own; ``interpreted`` only where there is no GPU, with TRITON_INTERPRET=1. A
step that needs a kernel language which is not installed, as Triton is not on macOS, is skipped, and the table says so.
Exit code 0: all that could ran and was within its limit; 1: a package failed, and is named; 2: nothing to run.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_reference.bench.machine import package_of
from kernel_reference.bench.table import significant
from kernel_reference.checks import fail

if TYPE_CHECKING:
    from torch import Tensor, device

GPU_KERNEL = "GPU kernel"
CPU_IMPLEMENTATION = "CPU implementation"
INTERPRETED_KERNEL = "kernel in Triton's interpreter"
CPU_TARGET_KERNEL = "kernel through TileLang's CPU target"
IMPLEMENTATIONS = (GPU_KERNEL, CPU_IMPLEMENTATION, INTERPRETED_KERNEL, CPU_TARGET_KERNEL)

# Kernel languages, of which a machine may lack one, and the exit code of a step that does.
_LANGUAGES = {"triton": "Triton (on Linux alone)", "tilelang": "TileLang"}
_SKIPPED = 77

# Enough of a traceback to see where and why, short enough that several failures fit a screen.
_TAIL_LINES = 25
_HEARTBEAT_S = 20.0


class Skip(Exception):
    """Raised by a demo's ``interpreted`` where this machine cannot run its kernels; the message says why."""


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
    limit: the largest error that passes; 0 where the result must be exact.
    plain_ms: the time of the reference in plain PyTorch, in float32 on the same GPU; None without a GPU.
    """

    kernel: str
    implementation: str
    device: str
    shape: str
    error: float
    time_ms: float
    note: str = ""
    limit: float = field(default=0.0, kw_only=True)
    plain_ms: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("kernel", "implementation", "device", "shape", "note"):
            if not isinstance(getattr(self, name), str):
                fail(name, "a string", repr(getattr(self, name)), TypeError)
        if self.implementation not in IMPLEMENTATIONS:
            fail("implementation", f"one of {IMPLEMENTATIONS}", repr(self.implementation))
        for name in ("error", "time_ms", "limit", *(("plain_ms",) if self.plain_ms is not None else ())):
            value = float(getattr(self, name))
            if not 0 <= value < float("inf"):
                fail(name, "a finite number >= 0", value)
            # A NumPy or tensor scalar would not pass through JSON.
            object.__setattr__(self, name, value)

    @property
    def is_ok(self) -> bool:
        return self.error <= self.limit


def ran_on(device: device) -> tuple[str, str]:
    """What ran in ``real_size``, and the device, as a row names them."""
    import torch

    return (GPU_KERNEL, torch.cuda.get_device_name(device)) if device.type == "cuda" else (CPU_IMPLEMENTATION, "cpu")


def median_ms(call: Callable[[], object], device: device, repeats: int = 5, what: str = "", calls: int = 20) -> float:
    """The median of ``repeats`` runs, of one call each or on a GPU of ``calls``; whoever asks has called it before."""
    import torch

    times = []
    calls = calls if device.type == "cuda" else 1
    for _ in shown(range(repeats), what):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - started) / calls)
    return statistics.median(times)


def plain_ms(call: Callable[[], object], device: device) -> float | None:
    """The time of the reference in plain PyTorch on a GPU; None on a CPU, where it is what has been timed."""
    if device.type != "cuda":
        return None
    call()
    return median_ms(call, device, 3, calls=1)


def error_of_rows(out: Tensor, wanted: Tensor) -> float:
    """The largest difference of a row of a head from float64, over its largest value; of the worst row."""
    difference, size = (x.abs().amax(-1) for x in (out.double() - wanted, wanted))
    # A row that sees no key is 0.
    error = float((difference / size.where(size > 0, 1)).max())
    if error != error:
        raise ArithmeticError("the result holds NaN")
    return error


def shown(items: Iterable[Any], what: str) -> Iterator[Any]:
    """``items`` with a bar of how many are done, where somebody watches."""
    items = list(items)
    for number, item in enumerate(items, start=1):
        yield item
        if what and sys.stderr.isatty():
            bar = ("#" * (30 * number // len(items))).ljust(30)
            print(f"\r{what} [{bar}] {number}/{len(items)}", end="\n" if number == len(items) else "", file=sys.stderr)


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
    skipped: dict[tuple[str, str], str] = {}
    with tempfile.TemporaryDirectory() as folder:
        steps = [step for path in chosen.demos for step in _steps(path, Path(folder), on_gpu)]
        took: list[float] = []
        for number, step in enumerate(steps, start=1):
            title = f"[{number}/{len(steps)}] {step.package}: {step.name}"
            start = time.monotonic()
            reason, skip = _run(step, title, chosen.timeout)
            took.append(time.monotonic() - start)
            rows = _read(step.rows) if step.rows else []
            found += [(step.package, row) for row in rows]
            if skip:
                skipped[step.package, step.name] = skip
            elif step.rows and not rows and not reason:
                reason = f"{step.name}() yielded no row"
                print(reason, file=sys.stderr)
            if reason:
                failed.setdefault(step.package, f"{step.name}: {reason}")
    width = _width()
    longest = max(range(len(steps)), key=took.__getitem__)
    what = f"{steps[longest].package}: {steps[longest].name}"
    print(f"{len(steps)} steps in {sum(took):.0f} s, the longest {what} in {took[longest]:.1f} s")
    print("\n" + as_text(found, width, colours=sys.stdout.isatty()))
    for (package, name), reason in skipped.items():
        print(textwrap.fill(f"skipped: {package}, {name}: {reason}", width, subsequent_indent="  "))
    for package, row in found:
        if not row.is_ok:
            failed.setdefault(package, f"{row.kernel}: an error of {row.error:.1e}, over the limit of {row.limit:.1e}")
    for package, reason in failed.items():
        print(f"FAILED: {package}: {reason}", file=sys.stderr)
    return 1 if failed else 0


def _width() -> int:
    return max(80, min(120, shutil.get_terminal_size().columns))


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


def _run(step: _Step, title: str, timeout: float) -> tuple[str, str]:
    """Run one step, showing that it lives. Returns why it failed and why it was skipped, empty where it was not."""
    # An interpreter asked for by the caller's shell would make the reference rows wait for kernels they do not run.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if step.interpreted:
        environment["TRITON_INTERPRET"] = "1"
    start, cpu = time.monotonic(), _cpu_of_children()
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
        output.seek(0)
        tail = output.read().splitlines()[-_TAIL_LINES:]
        if reason == f"exit code {_SKIPPED}" and tail:
            print(textwrap.fill(f"{title} skipped: {tail[-1]}", _width(), subsequent_indent="    "), flush=True)
            return "", tail[-1]
        if reason:
            print(
                "\n".join([f"{title} failed, {reason}; its last lines:", *(f"    {line}" for line in tail)]),
                file=sys.stderr,
            )
        else:
            # Beside other work a step takes longer than it computes.
            cpu = _cpu_of_children() - cpu
            print(f"{title} done in {time.monotonic() - start:.1f} s, {cpu:.1f} s of CPU time", flush=True)
    return reason, ""


def _cpu_of_children() -> float:
    """Seconds of CPU time of all processes that were started here and have ended."""
    times = os.times()
    return times.children_user + times.children_system


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

    # TileLang's kernels run without Triton.
    if name == "interpreted" and importlib.util.find_spec("triton"):
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
        try:
            for row in rows:
                if not isinstance(row, Row):
                    fail(f"what {name}() yields", "a kernel_reference.bench.demo.Row", repr(row), TypeError)
                out.write(json.dumps(dataclasses.asdict(row)) + "\n")
                out.flush()
        except (ModuleNotFoundError, Skip) as error:
            language = _LANGUAGES.get((getattr(error, "name", None) or "").partition(".")[0])
            # On a GPU a missing language is a failure: nothing falls back silently.
            if name != "interpreted" or not (language or isinstance(error, Skip)):
                raise
            print(f"its kernels need {language}, which is not installed here" if language else error)
            sys.exit(_SKIPPED)


def _read(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    # A step that was stopped may have left half a line.
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [Row(**json.loads(line)) for line in lines]


def as_text(rows: Iterable[tuple[str, Row]], width: int, colours: bool = False) -> str:
    """The demo's table, at most ``width`` >= 80 columns wide: a section a package, in it one an implementation.

    A row is the function with its numbers and its verdict, and below it, in whole words, its shape and its note.
    """
    rows = list(rows)
    beside = any(row.plain_ms is not None for _, row in rows)
    headings = ["error", "limit", "time", *(["speed-up"] if beside else []), "result"]

    def line(name: str, cells: Sequence[str], indent: str) -> list[str]:
        numbers = "  ".join(
            [f"{cells[0]:>9}", f"{cells[1]:>7}", f"{cells[2]:>7}", *(f"{cell:>8}" for cell in cells[3:-1])]
        )
        left = width - len(numbers) - 8
        first = f"{indent}{name}"
        lines = [f"{first:<{left}}{numbers}  {cells[-1]}".rstrip()]
        # A long name keeps its line to itself.
        return lines if len(first) < left else [first, f"{'':<{left}}{numbers}  {cells[-1]}".rstrip()]

    lines = [*line("error against float64", headings, ""), "-" * width]
    for package, of_package in groupby(rows, key=lambda row: row[0]):
        lines.append(package)
        for (implementation, where), group in groupby(
            of_package, key=lambda row: (row[1].implementation, row[1].device)
        ):
            lines.append(f"  {implementation}, {where}")
            for _, row in group:
                lines += line(row.kernel, _cells(row, beside), "    ")
                lines += _indented("; ".join(filter(None, (row.shape, row.note))), width)
        lines.append("")
    ok = sum(row.is_ok for _, row in rows)
    lines += ["-" * width, f"{ok} of {len(rows)} results within their limits"]
    if beside:
        lines += textwrap.wrap("speed-up: over the reference in plain PyTorch, float32, on the same GPU", width)
    text = "\n".join(lines) + "\n"
    if colours:
        text = text.replace("  ok\n", "  \033[32mok\033[0m\n").replace("  OVER\n", "  \033[1;31mOVER\033[0m\n")
    return text


def _indented(text: str, width: int) -> list[str]:
    indent = " " * 6
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _cells(row: Row, beside: bool) -> list[str]:
    error = f"{row.error:.1e}" if row.error else "exact"
    limit = f"{row.limit:.1e}" if row.limit else "exact"
    speed_up = [f"{significant(row.plain_ms / row.time_ms)} x" if row.plain_ms and row.time_ms else ""]
    return [error, limit, _duration(row.time_ms), *(speed_up if beside else []), "ok" if row.is_ok else "OVER"]


def _duration(ms: float) -> str:
    if ms < 1:
        return f"{significant(ms * 1e3)} us"
    return f"{significant(ms)} ms" if ms < 1e3 else f"{significant(ms / 1e3)} s"


if __name__ == "__main__":
    # As a script this module is __main__, and its Row would not be the Row that a demo.py imports.
    from kernel_reference.bench import demo

    sys.exit(demo.main())
