"""Make of the committed benchmark records one HTML page that needs no network, and a picture of its summary.

    python tools/report.py        writes dist/report.html and tools/report.svg

Records are what ``packages/*/benchmarks/results/*.jsonl`` hold, and maps of where speed falls off ``map.jsonl`` and
``map-*.svg`` there; who adds a package or a peer changes nothing here. The
same records give the same bytes. A record that does not say on what it was measured is refused, with its file and line.
"""

from __future__ import annotations

import argparse
import base64
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jinja2
from figures import (
    Chart,
    Plot,
    Point,
    Row,
    bandwidth,
    bytes_per_second,
    errors,
    looks_of,
    roofline,
    speed_beside,
    speeds,
    spread,
    verdict,
)

from kernel_reference.bench import mapped, ranked
from kernel_reference.bench.grid import words_of
from kernel_reference.bench.record import MACHINE, Record, load
from kernel_reference.bench.table import duration

ROOT = Path(__file__).parents[1]
TEMPLATES = Path(__file__).parent / "templates" / "report"
RECORDS = "packages/*/benchmarks/results/*.jsonl"
# Of which these are records of other kinds: maps, engines' models, several ranks.
OTHERS = (mapped.NAME, "engines.jsonl", ranked.NAME)

# What the records of one run have in common; figures count only beside figures of the same run.
STAMP = ("package", "package_version", *MACHINE, "commit", "date", "copy_roof_gb_per_s", "gemm_roof_tflop_per_s")

# The columns of a run's table: heading, explanation, and whether they hold numbers.
COLUMNS = (
    ("case", "what was measured", False),
    ("implementation", "what it was measured on", False),
    ("time", "median time of one call on the device", True),
    ("spread", "p80 less p20, the range of the middle three fifths of the times, over the median", True),
    ("TB/s", "bytes of the case over the median", True),
    ("of copy", "TB/s over the copy roof", True),
    ("TFLOP/s", "operations of the case over the median", True),
    ("of GEMM", "TFLOP/s over the GEMM roof", True),
    ("× baseline", "median over the baseline's median: above 1 is slower", True),
    ("host time", "median time that a call keeps the host", True),
    ("error", "as the package's check counts it; 0 is exact", True),
    ("L2", "how the cache was cold at each call: by rotating more inputs than it holds, or flushed between", False),
    ("result", "the target and whether it was met, or why there is no time", False),
)


# Of a map: the slowest points, of which this many are shown.
SLOWEST = 20
MAP_COLUMNS = (
    ("map", "which of the package's grids", False),
    ("point", "the value on each axis", False),
    ("time", "median time of one call on the device", True),
    ("best peer", "the fastest that ran and gave the right result", False),
    ("of peer", "our speed over the best peer's", True),
    ("of roof", "our speed over that of a copy of the same bytes, or of a GEMM of as many operations", True),
    ("host time", "median time that a call keeps the host", True),
    ("result", "why there is no time", False),
)


class ReportError(Exception):
    """No page can be made; the message says why in one line."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, the number that it is sorted by, what hovering says, and how it is marked."""

    text: str
    exact: float | None = None
    tip: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Table:
    columns: Sequence[tuple[str, str, bool]]
    rows: Sequence[Sequence[Cell]]


class Run:
    """The records of one package that were measured together, and the figures made of them."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.first = records[0]
        self.looks = looks_of(records)

    @property
    def facts(self) -> list[tuple[str, str]]:
        """By name what a reader needs to repeat the run."""
        first = self.first
        return [
            ("version", first.package_version),
            ("commit", (first.commit or "unknown")[:12]),
            ("measured", first.date[:16].replace("T", " ")),
            ("device", f"{first.device}, capability {first.capability}"),
            ("driver", first.driver),
            ("CUDA", first.cuda),
            ("torch", first.torch),
            ("triton", first.triton),
            ("Python", first.python),
            ("copy roof", bytes_per_second(first.copy_roof_gb_per_s)),
            ("bf16 GEMM roof", f"{first.gemm_roof_tflop_per_s:,.0f} TFLOP/s"),
        ]

    @cached_property
    def cases(self) -> dict[str, list[Record]]:
        cases: dict[str, list[Record]] = {}
        for record in self.records:
            cases.setdefault(record.case, []).append(record)
        return cases

    @property
    def plots(self) -> list[Plot]:
        """The roofline of what computes, and the bandwidth of what only moves bytes and so has no place in it."""
        timed = [record for record in self.records if record.median_us]
        computing, moving = ([r for r in timed if bool(r.flops) is computes] for computes in (True, False))
        figures = ((roofline, computing), (bandwidth, moving))
        return [draw(records, self.looks) for draw, records in figures if records]

    @property
    def speeds(self) -> Chart:
        return speeds(self.cases, self.looks)

    @property
    def errors(self) -> Chart:
        return errors(self.cases, self.looks)

    @property
    def summary(self) -> list[Row]:
        """A row a peer: how many times as fast ours is in each case that both were timed in, and the middle of it."""
        ours = {record.case: record for record in reversed(self.records) if record.ours}
        rows = []
        for label, look in self.looks.items():
            points = [
                Point(look, speed, f"{speed:.2f} × as fast as {label}\n{record.case}")
                for record in self.records
                if record.implementation == label and not record.ours and record.case in ours
                if (speed := speed_beside(ours[record.case], record)) is not None
            ]
            if points:
                middle = statistics.median(point.value for point in points)
                rows.append(Row(label, points, [Point(look, middle, "the median case")], f"{middle:.2f} ×"))
        return rows

    @property
    def verdicts(self) -> str:
        """How many of the requirements were met, in words."""
        targets = [verdict(record) for record in self.records if record.requirement]
        return f"{targets.count('met')} of {len(targets)}" if targets else "no target"

    @property
    def table(self) -> Table:
        """Every record, without the columns that none of them fills."""
        rows = [cells(record) for record in self.records]
        filled = [i for i in range(len(COLUMNS)) if any(row[i].text for row in rows)]
        return Table([COLUMNS[i] for i in filled], [[row[i] for i in filled] for row in rows])


class Map:
    """What a package's map found: its slowest points, and its pictures as they were drawn."""

    def __init__(self, file: Path) -> None:
        self.header, self.points = mapped.load(file)
        self.sweep = mapped.load_sweep(file.with_name(mapped.SWEEP_NAME))
        drawn = ((name, file.with_name(f"map-{name}.svg")) for name in self.header.axes)
        self.pictures = [
            (name, base64.b64encode(picture.read_bytes()).decode()) for name, picture in drawn if picture.is_file()
        ]

    @property
    def table(self) -> Table:
        """The slowest points, then those that are red."""
        slow = mapped.worst(self.header, self.points, SLOWEST)
        red = [point for point in self.points if point.red and point not in slow]
        rows = [self._cells(point) for point in (*slow, *red)]
        filled = [i for i in range(len(MAP_COLUMNS)) if any(row[i].text for row in rows)]
        return Table([MAP_COLUMNS[i] for i in filled], [[row[i] for i in filled] for row in rows])

    def _cells(self, point: mapped.Measured) -> list[Cell]:
        ours, peer = point.ours, point.peer
        return [
            Cell(point.map),
            Cell(words_of(point.point)),
            time_of(ours.us if ours else None),
            Cell(peer.implementation if peer else "", tip=duration(peer.us) if peer else ""),
            number(point.of_peer, ".2f"),
            number(self.header.of_roof(point), ".2f"),
            time_of(ours.host_us if ours else None),
            Cell("; ".join(point.red), mark="missed" if point.red else ""),
        ]


def cells(record: Record) -> list[Cell]:
    """A row of the table: as many cells as there are COLUMNS."""
    computes = bool(record.flops)
    return [
        Cell(record.case),
        Cell(record.implementation, mark="ours" if record.ours else ""),
        time_of(record.median_us),
        spread_of(record),
        number(record.gb_per_s and record.gb_per_s * 1e-3, ".3f"),
        number(record.fraction_of_copy_roof, ".3f"),
        number(record.tflop_per_s if computes else None, ",.2f"),
        number(record.fraction_of_gemm_roof if computes else None, ".3f"),
        number(record.ratio_to_baseline, ",.3f"),
        time_of(record.host_us),
        Cell("0", 0.0) if record.error == 0 else number(record.error, ".2e"),
        Cell(record.l2 or ""),
        result(record),
    ]


def number(value: float | None, shown: str) -> Cell:
    return Cell("" if value is None else format(value, shown), value, "" if value is None else str(value))


def time_of(us: float | None) -> Cell:
    """Sorted by microseconds, shown in the unit that fits."""
    return Cell(duration(us), us, "" if us is None else f"{us} us")


def spread_of(record: Record) -> Cell:
    if not (record.median_us and record.p20_us and record.p80_us):
        return Cell("")
    share = (record.p80_us - record.p20_us) / record.median_us
    return Cell(f"{share:.1%}", share, spread(record))


def result(record: Record) -> Cell:
    note = " ".join(record.note.split())
    if record.status != "timed":
        return Cell(f"{record.status}: {note}", mark="missed" if record.ours else "absent")
    said = verdict(record)
    words = [f"{said}: {record.requirement}" if said else "", note]
    return Cell("; ".join(filter(None, words)), mark=said.replace(" ", "-"))


def read(root: Path) -> list[Run]:
    """The runs of every package under ``root``, in the order of their files. Raises ReportError."""
    files = sorted(file for file in root.glob(RECORDS) if file.name not in OTHERS)
    runs: dict[tuple[object, ...], list[Record]] = {}
    for file in files:
        try:
            records = load(file)
        except (OSError, ValueError) as error:
            raise ReportError(" ".join(str(error).replace(f"{root}/", "").split())) from error
        for record in records:
            runs.setdefault((file, *(getattr(record, name) for name in STAMP)), []).append(record)
    if not runs:
        raise ReportError(f"no record in {RECORDS}")
    return [Run(records) for records in runs.values()]


def read_maps(root: Path) -> list[Map]:
    """The maps of every package under ``root``. Raises ReportError."""
    try:
        return [Map(file) for file in sorted(root.glob(RECORDS)) if file.name == mapped.NAME]
    except (OSError, ValueError) as error:
        raise ReportError(" ".join(str(error).replace(f"{root}/", "").split())) from error


def render(template: str, runs: Sequence[Run], maps: Sequence[Map] = ()) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["short"] = short
    environment.filters["count"] = counted
    summary = Chart([row for run in runs for row in run.summary], line=1.0)
    return environment.get_template(template).render(runs=runs, maps=maps, summary=summary)


def counted(number: int, thing: str) -> str:
    """1 case, 2 cases."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def short(number: float) -> str:
    """A number of an axis: 0.1, 20, 1e-7, 1,000."""
    return f"{number:.0e}".replace("e-0", "e-") if 0 < number < 1e-3 else f"{number:,g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="report.py", description="Make a page of the committed benchmark records.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository whose records are read")
    parser.add_argument("--page", type=Path, help="by default dist/report.html there")
    parser.add_argument("--picture", type=Path, help="by default tools/report.svg there")
    chosen = parser.parse_args(arguments)
    targets = {
        "page.html.jinja": chosen.page or chosen.root / "dist" / "report.html",
        "picture.svg.jinja": chosen.picture or chosen.root / "tools" / "report.svg",
    }
    try:
        runs, maps = read(chosen.root), read_maps(chosen.root)
    except ReportError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    for template, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(render(template, runs, maps), encoding="utf-8")
        print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
