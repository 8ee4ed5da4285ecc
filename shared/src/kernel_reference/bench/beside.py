"""Did a change make a package slower? Its cases at an old revision and now, timed in turn in one run.

``git worktree add ../old REV``, then ``python -m kernel_reference.bench.beside packages/<name>/benchmarks/cases.py
--old ../old --out DIR``. Each revision is a process with its own sources and cases. They are ready at the same time and
timed one after the other, in another order each round, since a GPU that has just been busy is slower; and twice, since
where their memory lies changes times too: each takes it first once. A revision beside itself (``--old`` of the same
sources) shows how much such a ratio is worth. Nothing is judged here: that is what tests and :mod:`.run` do. Peers are
not timed. DIR/<package>-beside.jsonl holds a line a case.

Exit code 0: nothing is slower than ``--most`` times its old time; 1: something is, or one revision cannot run it; 2:
nothing could be timed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import IO, Any

import torch

from kernel_reference.bench import machine
from kernel_reference.bench.processes import ended, run_together
from kernel_reference.bench.table import Table, show, significant

_WORKER = Path(__file__).with_name("revision.py")
_NAMES = ("old", "new")


class Revision:
    """A process that times the cases of one tree of sources."""

    def __init__(self, process: subprocess.Popen[bytes], commands: IO[bytes], answers: IO[bytes]) -> None:
        self._process, self._commands, self._answers = process, commands, answers

    def tell(self, **command: Any) -> None:
        """Send a command, whose answer :meth:`hear` waits for."""
        self._commands.write(json.dumps(command).encode() + b"\n")
        self._commands.flush()

    def hear(self) -> Any:
        """The answer to the command before; {"error": why} where there is none."""
        line = self._answers.readline()
        return json.loads(line) if line else {"error": f"its process ended with {self._process.wait()}"}

    def ask(self, **command: Any) -> Any:
        """Send a command and wait for its answer."""
        self.tell(**command)
        return self.hear()


def environment_of(root: Path) -> dict[str, str]:
    """The variables of a process that imports the packages of this tree."""
    sources = [root / "shared/src", *sorted((root / "packages").glob("*/src"))]
    path = os.pathsep.join([*map(str, sources), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path}


@contextmanager
def revisions(files: Mapping[str, tuple[Path, Path]], device: torch.device) -> Iterator[dict[str, Revision]]:
    """A process for each tree and its cases."""
    with ended() as processes:
        found = {}
        for name, (root, cases) in files.items():
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", str(_WORKER), str(cases), str(device)], stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, env={**os.environ, **environment_of(root)},
                )
            )  # fmt: skip
            commands, answers = processes[-1].stdin, processes[-1].stdout
            if commands and answers:
                found[name] = Revision(processes[-1], commands, answers)
        yield found


def _times(both: Mapping[str, Revision], label: str, rounds: int, order: random.Random) -> dict[str, list[float]] | str:
    """Times of each revision, one a round; or why there are none."""
    found: dict[str, list[float]] = {name: [] for name in _NAMES}
    for _ in range(rounds):
        for name in order.sample(_NAMES, 2):
            answer = both[name].ask(do="time", label=label)
            if isinstance(answer, dict):
                return f"{name}: {answer['error']}"
            found[name].append(answer)
    return found


def _prepared(both: Mapping[str, Revision], case: str, names: Sequence[str]) -> dict[str, list[str]] | str:
    """What each revision has for a case, once they took their memory one after the other; or why there is nothing."""
    for name in names:
        both[name].ask(do="release")
    labels = {}
    for name in names:
        answer = both[name].ask(do="prepare", case=case)
        if isinstance(answer, dict):
            return f"{name}: {answer['error']}"
        labels[name] = answer
    return labels


def time_case(
    both: Mapping[str, Revision], case: str, rounds: int, order: random.Random, memories: int = 1
) -> list[dict[str, Any]]:
    """A record for each implementation of a case.

    Where a process's memory lies alone makes a kernel several percent faster or slower. All is made anew ``memories``
    times, so that each revision is sometimes the first to take what is free.
    """
    found: dict[str, dict[str, list[float]] | str] = {}
    first = order.sample(_NAMES, 2)
    for turn in range(memories):
        labels = _prepared(both, case, first if turn % 2 == 0 else first[::-1])
        if isinstance(labels, str):
            return [{"case": case, "implementation": "", "note": labels}]
        for label in [label for label in labels["new"] if label in labels["old"]]:
            before = found.setdefault(label, {name: [] for name in _NAMES})
            times = before if isinstance(before, str) else _times(both, label, rounds, order)
            if isinstance(before, str) or isinstance(times, str):
                found[label] = times
            else:
                found[label] = {name: before[name] + times[name] for name in _NAMES}
    return [_record(case, label, times) for label, times in found.items()]


def _record(case: str, label: str, times: dict[str, list[float]] | str) -> dict[str, Any]:
    record: dict[str, Any] = {"case": case, "implementation": label}
    if isinstance(times, str):
        return record | {"note": times}
    record |= {f"{name}_us": median(times[name]) for name in _NAMES}
    return record | {"ratio": record["new_us"] / record["old_us"], "times_us": times}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kernel_reference.bench.beside", description=__doc__.split("\n")[0])
    parser.add_argument("cases", type=Path, help="benchmarks/cases.py of a package")
    parser.add_argument("--old", type=Path, required=True, metavar="DIR", help="root of the old revision's sources")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for <package>-beside.jsonl")
    parser.add_argument("--only", type=re.compile, metavar="REGEX", help="only cases whose name matches")
    parser.add_argument("--rounds", type=int, default=5, help="times of each revision (default 5)")
    parser.add_argument(
        "--memories", type=int, default=2, metavar="N", help="make inputs anew N times, with --rounds each (default 2)"
    )
    parser.add_argument("--most", type=float, default=1.02, metavar="RATIO", help="slower than this fails (1.02)")
    parser.add_argument("--processes", type=int, default=0, metavar="N", help="compile in N processes first")
    parser.add_argument("--within", type=float, default=1e9, metavar="SECONDS", help="begin no case later than this")
    parser.add_argument(
        "--commits", nargs=2, metavar=("OLD", "NEW"), help="commits to record where the sources are no git checkouts"
    )
    # Of what --processes starts: which cases, as I/N.
    parser.add_argument("--share", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    start = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    root = chosen.cases.resolve().parents[3]
    old = chosen.old.resolve()
    files = {"old": (old, old / chosen.cases.resolve().relative_to(root)), "new": (root, chosen.cases.resolve())}
    for _, file in files.values():
        if not file.is_file():
            print(f"beside: {file} must be a file of cases, and is not there", file=sys.stderr)
            return 2
    if chosen.processes:
        _compile(arguments or sys.argv[1:], chosen.processes, start + chosen.within)
        print(f"compiled in {chosen.processes} processes ({time.monotonic() - start:.0f} s)", flush=True)
    with revisions(files, device) as both:
        for name in _NAMES:
            both[name].tell(do="names")
        names = {name: both[name].hear() for name in _NAMES}
        for name, answer in names.items():
            if isinstance(answer, dict):
                print(f"beside: the cases of {name} cannot be read: {answer['error']}", file=sys.stderr)
                return 2
        wanted = [case for case in names["new"] if chosen.only is None or chosen.only.search(case)]
        cases = [case for case in wanted if case in names["old"]]
        if chosen.share:
            number, count = map(int, chosen.share.split("/"))
            for case in cases[number::count]:
                for name in _NAMES:
                    both[name].ask(do="prepare", case=case)
            return 0
        records = _time_all(both, cases, chosen, files["new"][1], device, start)
    missing = len(wanted) - len(cases)
    print(f"{len(records)} timed; {missing} cases are new; {len(set(names['old']) - set(names['new']))} are gone")
    if not records:
        print("beside: nothing could be timed", file=sys.stderr)
        return 2
    slower = [one for one in records if one.get("ratio", math.inf) > chosen.most]
    if slower:
        rows = [_cells(one) for one in sorted(slower, key=lambda one: -one.get("ratio", math.inf))]
        columns = ("case", "implementation", "old us", "new us", "new / old")
        show(Table(f"Slower than {chosen.most:g} times", columns, [rows], frozenset(columns[2:])))
    return 1 if slower else 0


def _compile(arguments: Sequence[str], processes: int, until: float) -> None:
    command = [sys.executable, "-m", "kernel_reference.bench.beside", *arguments, "--processes", "0"]
    shares = [[*command, "--share", f"{i}/{processes}"] for i in range(processes)]
    run_together(shares, [{}] * processes, until=until)


def _time_all(
    both: Mapping[str, Revision], cases: Sequence[str], chosen: argparse.Namespace, file: Path, device: torch.device,
    start: float,
) -> list[dict[str, Any]]:  # fmt: skip
    package, _ = machine.package_of(file)
    described = vars(machine.describe(device)) if device.type == "cuda" else {"device": "cpu"}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    old, new = chosen.commits or (machine.commit_of(folder) for folder in (chosen.old, file.parent))
    stamp = {"old_commit": old, "commit": new, "date": date, **described}
    chosen.out.mkdir(parents=True, exist_ok=True)
    target = chosen.out / f"{package}-beside.jsonl"
    order = random.Random(0)
    records: list[dict[str, Any]] = []
    for number, case in enumerate(cases, start=1):
        if time.monotonic() - start > chosen.within:
            print(f"{chosen.within:g} s are over: {len(cases) - number + 1} of {len(cases)} cases are not timed")
            break
        found = time_case(both, case, chosen.rounds, order, chosen.memories)
        records += found
        # After every case, so that a process that dies takes no result with it.
        target.write_text("".join(json.dumps({**one, **stamp}) + "\n" for one in records), encoding="utf-8")
        for one in found:
            print(f"[{number}/{len(cases)}] " + "  ".join(_cells(one)), flush=True)
    return records


def _cells(one: Mapping[str, Any]) -> list[str]:
    if "ratio" not in one:
        return [one["case"], one["implementation"], one["note"], "", ""]
    times = [significant(one[f"{name}_us"]) for name in _NAMES]
    return [one["case"], one["implementation"], *times, f"{one['ratio']:.3f}"]


if __name__ == "__main__":
    sys.exit(main())
