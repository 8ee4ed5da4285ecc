"""Time a package beside its peers.

``python -m kernel_reference.bench.run packages/<name>/benchmarks/cases.py --out DIR``.
cases.py defines ``cases(device: torch.device) -> Iterable[Case]``; making a case must be cheap, its inputs are made
when its turn comes. Exit code 0: all measured; 1: one of ours failed its check, or regressed against ``--compare``;
2: nothing could be measured.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Protocol

import torch

from kernel_reference.bench import machine, roofs
from kernel_reference.bench.case import Call, Case
from kernel_reference.bench.compare import only, report
from kernel_reference.bench.measure import Stamp, measure
from kernel_reference.bench.processes import run_together
from kernel_reference.bench.record import Record, load, save
from kernel_reference.bench.table import of_records, show
from kernel_reference.bench.timers import Clock, CudaClock

# What compiling may take where --within says nothing.
COMPILE_SECONDS = 600.0


class UnusableError(Exception):
    """Nothing can be measured; the message says why."""


class Bench(Protocol):
    """The device of a run: where inputs live, its clock, its roofs and its description."""

    @property
    def device(self) -> torch.device:
        """Where inputs are made."""

    @property
    def clock(self) -> Clock:
        """What times it."""

    def roofs(self) -> roofs.Roofs:
        """Measure the roofs."""

    def machine(self) -> machine.Machine:
        """Describe the machine."""

    def tidy(self) -> None:
        """Give one case's memory back before the next."""


class CudaBench:
    """The current CUDA device. Raises UnusableError where there is none."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UnusableError("a benchmark needs a GPU, and torch.cuda.is_available() is False: nothing was measured")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.clock = CudaClock(self.device)

    def roofs(self) -> roofs.Roofs:
        return roofs.measure(self.device, self.clock)

    def machine(self) -> machine.Machine:
        return machine.describe(self.device)

    def tidy(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


def load_module(path: Path, wanted: str) -> ModuleType:
    """The Python file ``path``, which may import what lies beside it. Raises UnusableError where there is none."""
    # Unique, so that the cases.py of two packages can be loaded in one process.
    name = f"{path.stem}_" + re.sub(r"\W", "_", str(path.resolve()))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UnusableError(f"{path} must be a Python file that defines {wanted}")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[name] = module
    with _beside(path.resolve().parent):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Imports find the files of ``folder``, and not those of another package's that have the same names."""
    for name in {file.stem for file in folder.glob("*.py")} & set(sys.modules):
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent != folder:
            del sys.modules[name]
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def load_cases(path: Path, device: torch.device) -> list[Case]:
    """The cases of ``path`` for ``device``. Raises UnusableError where it defines none, or one name twice."""
    module = load_module(path, "cases(device)")
    function = getattr(module, "cases", None)
    if not callable(function):
        raise UnusableError(f"{path} must define cases(device), got none")
    found: list[Case] = list(function(device))
    names = [case.name for case in found]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise UnusableError(f"{path} must name each case once, got twice: {', '.join(doubled)}")
    return found


def main(arguments: Sequence[str] | None = None, *, bench: Bench | None = None) -> int:
    """The command. Returns the exit code. ``bench`` is the device to measure; by default the current CUDA device."""
    parser = argparse.ArgumentParser(prog="python -m kernel_reference.bench.run", description="Time a package's cases.")
    parser.add_argument("cases", type=Path, help="benchmarks/cases.py of a package")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for <package>.jsonl and <package>.svg")
    parser.add_argument("--compare", type=Path, metavar="OLD.jsonl", help="report what changed since this record")
    parser.add_argument("--only", type=re.compile, metavar="REGEX", help="only cases whose name matches")
    parser.add_argument("--quick", action="store_true", help="an eighth of the time: shows that all runs")
    parser.add_argument("--seconds", type=float, default=0.4, help="device time an implementation (default 0.4)")
    parser.add_argument("--commit", help="the commit to record where the sources are no git checkout")
    parser.add_argument(
        "--processes", type=int, default=0, metavar="N", help="call all once in N processes first: all cores compile"
    )
    parser.add_argument(
        "--compile-only", action="store_true", help="do that, for --within seconds, and measure nothing"
    )
    parser.add_argument("--within", type=float, metavar="SECONDS", help="begin no case later than this")
    # Of what --processes starts: which cases, as I/N.
    parser.add_argument("--share", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.compile_only and not chosen.processes:
        parser.error("--compile-only must be given with --processes N, in which to compile")
    try:
        # Read before measuring: device time is not spent to learn that a file name was wrong.
        old = _read_old(chosen.compare) if chosen.compare else None
        return _run(chosen, old, bench or CudaBench())
    except UnusableError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def _read_old(path: Path) -> list[Record]:
    try:
        return load(path)
    except (OSError, ValueError) as error:
        raise UnusableError(f"--compare must name a readable record: {error}") from error


def _run(chosen: argparse.Namespace, old: Sequence[Record] | None, bench: Bench) -> int:
    every = load_cases(chosen.cases, bench.device)
    cases = [case for case in every if chosen.only is None or chosen.only.search(case.name)]
    if not cases:
        raise UnusableError(f"--only must match a case of {chosen.cases}, got none of {[c.name for c in every]}")
    if chosen.share:
        number, count = map(int, chosen.share.split("/"))
        return _call_once(cases[number::count], bench)
    start = time.monotonic()
    package, version = machine.package_of(chosen.cases)
    if chosen.processes:
        # Half of the time is left to measure in; what is not compiled then is where it is called.
        share = 1.0 if chosen.compile_only else 0.5
        _compile(chosen, start + (chosen.within * share if chosen.within else COMPILE_SECONDS))
        _say(f"compiled in {chosen.processes} processes ({time.monotonic() - start:.1f} s)")
    if chosen.compile_only:
        return 0
    described = bench.machine()
    _say(f"{package} {version} on {described.device}: {len(cases)} cases; measuring the roofs")
    measured = bench.roofs()
    _say(f"copy {measured.copy_gb_per_s:.0f} GB/s, bf16 GEMM {measured.gemm_tflop_per_s:.0f} TFLOP/s")
    commit = chosen.commit or machine.commit_of(chosen.cases.resolve().parent)
    stamp = Stamp(package, version, described, measured, commit, datetime.now(UTC).isoformat(timespec="seconds"))
    seconds, rounds = (chosen.seconds / 8, 3) if chosen.quick else (chosen.seconds, 10)
    target = chosen.out / f"{package}.jsonl"
    records: list[Record] = []
    for number, case in enumerate(cases, start=1):
        if chosen.within and time.monotonic() - start > chosen.within:
            _say(f"{chosen.within:g} s are over: {len(cases) - number + 1} of {len(cases)} cases are not measured")
            break
        began = time.perf_counter()
        found = measure(case, bench.device, bench.clock, stamp, seconds=seconds, rounds=rounds)
        bench.tidy()
        records += found
        # After every case, so that a peer that takes the process down takes no result with it.
        save(records, target)
        _say(f"[{number}/{len(cases)}] {case.name}: {_outcome(found)} ({time.perf_counter() - began:.1f} s)")
    show(of_records(records))
    _say(f"wrote {target}")
    _draw(records, chosen.out / f"{package}.svg")
    red = [record for record in records if record.ours and record.status == "red"]
    for record in red:
        _say(f"RED: {record.case} / {record.implementation}: {record.note}")
    code = 0
    if old is not None:
        code = report(only(old, chosen.only), records)
    return 1 if red else code


def _compile(chosen: argparse.Namespace, until: float) -> None:
    """Fill the kernel languages' caches on disk. What fails here fails again, and is recorded, when it is measured."""
    command = [sys.executable, "-m", "kernel_reference.bench.run", str(chosen.cases), "--out", str(chosen.out)]
    if chosen.only:
        command += ["--only", chosen.only.pattern]
    commands = [[*command, "--share", f"{number}/{chosen.processes}"] for number in range(chosen.processes)]
    run_together(commands, [{}] * len(commands), until=until)


def _call_once(cases: Sequence[Case], bench: Bench) -> int:
    """Ours of all cases, and then their peers: what time there is for compiling is for ours first."""
    for of_peers in (False, True):
        for case in cases:
            with suppress(Exception):
                inputs = case.make_inputs()
                for call in _calls_of(case, of_peers):
                    with suppress(Exception):
                        call(inputs)
                del inputs
            bench.tidy()
    return 0


def _calls_of(case: Case, of_peers: bool) -> Iterator[Call]:
    """Ours of a case, or its peers that can be imported."""
    if not of_peers:
        yield from case.ours.values()
        return
    for import_peer in case.peers.values():
        with suppress(Exception):
            yield import_peer()


def _outcome(records: Iterable[Record]) -> str:
    return ", ".join(
        f"{r.implementation} {r.median_us:.4g} us" if r.median_us else f"{r.implementation} {r.status}" for r in records
    )


def _draw(records: Sequence[Record], path: Path) -> None:
    try:
        from kernel_reference.bench.plot import draw
    except ImportError as error:
        _say(f"no SVG: {error}")
        return
    draw(records, path)
    _say(f"wrote {path}")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
