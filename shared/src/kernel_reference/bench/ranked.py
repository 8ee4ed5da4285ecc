"""What :mod:`kernel_reference.bench.ranks` measured: the lines of ``parallel.jsonl``, and tables for a README of them.

::

    python -m kernel_reference.bench.ranks --table benchmarks/results/parallel.jsonl

A case that is under way is noted in a file beside the record, so that a process that was ended leaves its name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ONE = "one GPU"
"""Label of the plain call over everything, which each rank makes by itself."""

NAME = "parallel.jsonl"
_NOW = "parallel.now"
# Of the cases that say how fast ranks exchange.
LINKS = "links"
_LARGER = (4, 8)
# What records made before 2026-11-26 call a target.
_TARGET_BEFORE = "owed"


@dataclass(frozen=True)
class Timed:
    """A line of the record: times in microseconds, of the slowest rank.

    axis: which number of the shape is a length. share: of how many ranks one does this, alone; 0: all do it together.
    part: without an efficiency. sends: bytes that a rank of a world sends. beyond_us: what is more than half of one
    GPU's time, say. calls: how many were in a graph, behind a flush each, whose time is taken off; of a record made
    before 2026-11-26 08:00, and of calls in no graph, 0.
    """

    case: str
    shape: Mapping[str, int | str]
    implementation: str
    world: int
    median_us: float
    p20_us: float
    p80_us: float
    efficiency: float
    beyond_us: float
    error: float
    graph: bool
    rounds: int = 0
    target: str = ""
    met: bool = True
    axis: str = ""
    share: int = 0
    part: bool = False
    sends: Mapping[int, float] = field(default_factory=dict)
    ahead: bool = False
    calls: int = 0

    def words(self) -> str:
        """For a terminal."""
        verdict = f"{self.target}: {'met' if self.met else 'MISSED'}" if self.target else ""
        return (
            f"{self.case:44} {self.implementation:32} {self.median_us:10.1f} us {self.efficiency:6.2f}"
            f" {self.beyond_us:9.1f} us  {verdict}"
        )


@dataclass(frozen=True)
class Failed:
    """A line of the record: what a rank failed with; without an implementation all of the case did."""

    case: str
    shape: Mapping[str, int | str]
    implementation: str
    world: int
    failed: str

    def words(self) -> str:
        """For a terminal."""
        return f"{self.case:44} {self.implementation:32} FAILED: {self.failed}"


Line = Timed | Failed


class Kept:
    """The record of a run in a folder, whole after each case; of a run that was ended, which this one goes on with.

    lines: of this run and of the one before. begun: when the first of them began, by ``time.time()``.
    """

    def __init__(self, folder: Path, described: Mapping[str, Any], resume: bool) -> None:
        self.lines: list[Line] = []
        self.begun = time.time()
        self._file, self._now, self._described = folder / NAME, folder / _NOW, described
        folder.mkdir(parents=True, exist_ok=True)
        if resume and self._file.exists():
            self.lines = read(self._file)
        if resume and self._now.exists():
            noted = json.loads(self._now.read_text())
            self.begun = noted.pop("begun")
            if noted:
                self.add([Failed(**noted, failed="it ended the process, or did not come to its end")])

    def note(self, case: str, shape: Mapping[str, int | str], implementation: str, world: int) -> None:
        """Say what is under way."""
        noted = {"case": case, "shape": dict(shape), "implementation": implementation, "world": world}
        self._now.write_text(json.dumps({"begun": self.begun, **noted}))

    def add(self, lines: Iterable[Line]) -> None:
        """Write the lines of a case that is done."""
        self.lines += lines
        whole = "".join(json.dumps({**asdict(line), **self._described}) + "\n" for line in self.lines)
        beside = self._file.with_suffix(".new")
        beside.write_text(whole)
        beside.replace(self._file)
        self._now.write_text(json.dumps({"begun": self.begun}))

    def close(self) -> None:
        """Nothing is under way."""
        self._now.unlink(missing_ok=True)


def read(file: Path) -> list[Line]:
    """The lines of a record, without the machine."""
    found: list[Line] = []
    for text in file.read_text().splitlines():
        line = json.loads(text)
        if _TARGET_BEFORE in line:
            line["target"] = line.pop(_TARGET_BEFORE)
        kind: type[Timed] | type[Failed] = Failed if "failed" in line else Timed
        known = {name: line[name] for name in kind.__dataclass_fields__ if name in line}
        if "sends" in known:
            known["sends"] = {int(world): number for world, number in known["sends"].items()}
        found.append(kind(**known))
    return found


def tables(lines: Sequence[Line]) -> str:
    """Markdown: times and efficiencies, from which length on several GPUs are faster, and what more would give."""
    timed = [line for line in lines if isinstance(line, Timed) and line.case != LINKS]
    parts = [_times(timed), _crossovers(timed), _calculated(timed, _bandwidth(lines)), _failures(lines)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _times(timed: Sequence[Timed]) -> str:
    rows = []
    ones = {line.case: line for line in timed if line.implementation == ONE}
    for line in timed:
        if line.implementation != ONE and not line.share and line.case in ones:
            target = f"{line.target}: {'met' if line.met else '**missed**'}" if line.target else ""
            one = ones[line.case]
            efficiency = "" if line.part else f"{line.efficiency:.2f}"
            rows.append([line.case, line.implementation, _us(one.median_us), _us(line.median_us), efficiency, target])
    worlds = sorted({line.world for line in timed})
    named = "/".join(map(str, worlds))
    return _table(["case", "", "one GPU, us", f"{named} GPUs, us", "efficiency", "target"], rows)


def _crossovers(timed: Sequence[Timed]) -> str:
    """Series of cases that differ in their length alone, from three lengths on."""
    series: dict[tuple[str, ...], dict[int, Timed]] = {}
    for line in timed:
        if line.axis and line.implementation != ONE and not (line.share or line.part):
            others = ", ".join(f"{name} {value}" for name, value in line.shape.items() if name != line.axis)
            key = (others, line.axis, line.implementation, _how(line))
            series.setdefault(key, {})[int(line.shape[line.axis])] = line
    rows = []
    for (others, axis, label, how), lengths in series.items():
        if len(lengths) >= 3:
            slower = [n for n in sorted(lengths) if lengths[n].efficiency * lengths[n].world < 1]
            faster = [n for n in sorted(lengths) if not slower or n > slower[-1]]
            first = _length(faster[0]) if faster else f"above {_length(max(lengths))}"
            last = _length(slower[-1]) if slower else f"below {_length(min(lengths))}"
            rows.append([others, label, how, axis, last, first])
    return _table(["shape", "", "", "length in", "one GPU is faster up to", "several from"], rows)


def _calculated(timed: Sequence[Timed], bandwidth: float | None) -> str:
    """Of a rank's share, which one GPU was timed on, of the counted bytes, and of what two GPUs take beyond both."""
    shares = {(line.case, line.share): line.median_us for line in timed if line.share}
    ones = {line.case: line.median_us for line in timed if line.implementation == ONE}
    rows = []
    for line in timed:
        known = [world for world in _LARGER if world in line.sends and (line.case, world) in shares]
        own = shares.get((line.case, line.world))
        if bandwidth is None or not known or own is None or line.world not in line.sends:
            continue
        # Latencies, merging, and what hides behind the exchange, with its sign: as with the world that was measured.
        beyond = line.median_us - own - line.sends[line.world] / bandwidth
        cells = []
        for world in _LARGER:
            if world in known:
                us = shares[line.case, world] + line.sends[world] / bandwidth + beyond
                cells += [_us(us), f"{ones[line.case] / world / us:.2f}"]
            else:
                cells += ["", ""]
        rows.append([line.case, line.implementation, f"{line.efficiency:.2f}", *cells])
    names = [name for world in _LARGER for name in (f"{world} GPUs, us", "efficiency")]
    table = _table(["case", "", "measured efficiency", *names], rows)
    if not table or bandwidth is None:
        return ""
    return (
        f"Calculated, not measured: a rank's share of the work as one GPU was timed on it, the counted bytes at the"
        f" measured {bandwidth / 1e3:.0f} GB/s, and what the measured world takes beyond both.\n\n{table}"
    )


def _bandwidth(lines: Sequence[Line]) -> float | None:
    """Bytes a microsecond, the best that an exchange of its own was measured at."""
    rates = [
        line.sends[line.world] / line.median_us
        for line in lines
        if isinstance(line, Timed) and line.case == LINKS and line.world in line.sends
    ]
    return max(rates, default=None)


def _failures(lines: Sequence[Line]) -> str:
    rows = [[line.case, line.implementation, line.failed] for line in lines if isinstance(line, Failed)]
    return _table(["case", "", "failed"], rows)


def _how(line: Timed) -> str:
    return "CUDA graph" if line.graph else "behind other work" if line.ahead else "on an idle GPU"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows))


def _us(us: float) -> str:
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def _length(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)
