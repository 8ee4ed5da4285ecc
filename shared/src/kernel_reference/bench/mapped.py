"""What a map found, line by line: ``map.jsonl`` begins with the machine and the axes, then has a line a point.

A line is written when its point is done and never touched again, so whatever ends the run leaves what came before. What
the points mean (which peer was best, how far the roof is) is worked out when they are read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from kernel_reference.bench.case import COPY
from kernel_reference.bench.grid import key_of, words_of
from kernel_reference.bench.record import MACHINE, Record
from kernel_reference.bench.table import Table, significant

NAME = "map.jsonl"
SWEEP_NAME = "map-sweep.json"
T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """One implementation at one point; see Record for its fields. ``us``: the median."""

    implementation: str
    ours: bool
    status: str
    note: str
    us: float | None
    p20_us: float | None
    p80_us: float | None
    host_us: float | None
    method: str | None
    error: float | None

    @classmethod
    def of(cls, record: Record) -> Outcome:
        """What a map keeps of a record; the rest is the same for all of a run, or stands beside the point."""
        return cls(
            record.implementation,
            record.ours,
            record.status,
            record.note,
            record.median_us,
            record.p20_us,
            record.p80_us,
            record.host_us,
            record.method,
            record.error,
        )


@dataclass(frozen=True)
class Measured:
    """A point of a map. ``seconds``: it took in all; ``note``: why it has no outcomes, where it has none; ``commit``:
    it was measured at, as a map may be gone on with.
    """

    map: str
    point: Mapping[str, Any]
    seconds: float
    note: str = ""
    bytes: int = 0
    flops: int = 0
    outcomes: Sequence[Outcome] = field(default=())
    commit: str | None = None

    @property
    def key(self) -> str:
        return key_of(self.map, self.point)

    @property
    def ours(self) -> Outcome | None:
        """Ours; of several the slowest, as each is somebody's."""
        return max((o for o in self.outcomes if o.ours and o.us), key=lambda o: o.us or 0.0, default=None)

    @property
    def peer(self) -> Outcome | None:
        """The fastest peer that ran and gave the right result."""
        peers = (o for o in self.outcomes if not o.ours and o.us and o.implementation != COPY)
        return min(peers, key=lambda o: o.us or 0.0, default=None)

    @property
    def of_peer(self) -> float | None:
        """Our speed over the best peer's; None where either has no time."""
        return self.peer.us / self.ours.us if self.ours and self.peer and self.ours.us and self.peer.us else None

    @property
    def red(self) -> list[str]:
        """Why this point is red, an entry for each of ours that raised or was wrong, or for the point itself."""
        wrong = [f"{o.implementation}: {o.note}" for o in self.outcomes if o.ours and o.status == "red"]
        return wrong or ([self.note] if self.note else [])


@dataclass(frozen=True)
class Header:
    """Where a map was measured, and its axes: map -> axis -> values in order."""

    package: str
    package_version: str
    device: str
    driver: str
    capability: str
    cuda: str
    torch: str
    triton: str
    python: str
    copy_roof_gb_per_s: float
    gemm_roof_tflop_per_s: float
    commit: str | None
    date: str
    axes: Mapping[str, Mapping[str, Sequence[Any]]]

    def of_roof(self, point: Measured) -> float | None:
        """Our speed over the roof's: the time of a copy of the same bytes, or of the operations at the GEMM's rate."""
        ours = point.ours
        if ours is None or not ours.us:
            return None
        copied = next((o.us for o in point.outcomes if o.implementation == COPY and o.us), None)
        moved = copied or point.bytes / self.copy_roof_gb_per_s * 1e-3
        return max(moved, point.flops / self.gemm_roof_tflop_per_s * 1e-6) / ours.us

    def ratio(self, point: Measured) -> float | None:
        """Our speed over the best peer's, or over the roof's where no peer runs."""
        return point.of_peer if point.of_peer is not None else self.of_roof(point)


@dataclass(frozen=True)
class First:
    """A batch size whose first call compiled, or took a noticeable time."""

    batch: int
    seconds: float
    kernels: Sequence[str]


@dataclass(frozen=True)
class Sweep:
    """Calls with one batch size after another, in a process with an empty cache of kernels.

    batches: how many of the sizes were gone through; of: how many there are; host_us: of an eager call once all is
    compiled, the median over the sizes; first: the sizes whose first call compiled.
    """

    batches: int
    of: int
    host_us: float
    first: Sequence[First]

    @property
    def kernels(self) -> int:
        return sum(len(one.kernels) for one in self.first)

    @property
    def seconds(self) -> float:
        """Of all first calls that compiled."""
        return sum(one.seconds for one in self.first)

    def words(self) -> str:
        """The sweep in a line."""
        sizes = ", ".join(f"{one.batch} ({one.seconds:.1f} s)" for one in self.first)
        cut = "" if self.batches == self.of else f" (of {self.of}: time was up)"
        kernels = f"{self.kernels} kernel{'' if self.kernels == 1 else 's'}"
        return (
            f"batch sizes 1 to {self.batches}{cut}: {kernels} compiled in {self.seconds:.1f} s of first calls, at "
            f"sizes {sizes or 'none'}; an eager call keeps the host {significant(self.host_us)} us"
        )


def begin(path: Path, header: Header) -> None:
    """Start the file anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(_line({"header": asdict(header)}), encoding="utf-8")
    beside.replace(path)


def append(path: Path, point: Measured) -> None:
    """Add a point, on the disk when this returns."""
    with path.open("rb+") as file:
        # A process that was killed may have left half a line.
        text = file.read()
        whole = text.rfind(b"\n") + 1
        file.truncate(whole)
        file.seek(whole)
        file.write(_line({"point": asdict(point)}).encode())
        file.flush()
        os.fsync(file.fileno())


def _line(value: Any) -> str:
    return json.dumps(value, allow_nan=False) + "\n"


def load(path: str | os.PathLike[str]) -> tuple[Header, list[Measured]]:
    """Read a map. A last line without its end is no line. Raises ValueError naming file, line and what is wrong."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")[:-1]
    header: Header | None = None
    points: dict[str, Measured] = {}
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if header is None:
                header = _header(entry)
            else:
                outcomes = tuple(_made(Outcome, one) for one in entry["point"]["outcomes"])
                point = _made(Measured, {**entry["point"], "outcomes": outcomes})
                points[point.key] = point
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: must be a line of a map, got {error!r}") from None
    if header is None:
        raise ValueError(f"{path}: must begin with the machine, got an empty file")
    return header, list(points.values())


def _header(entry: Any) -> Header:
    header = _made(Header, entry["header"])
    nameless = [name for name in MACHINE if not str(getattr(header, name) or "").strip()]
    if nameless:
        raise ValueError(f"no {', '.join(nameless)}")
    return header


def _made(kind: type[T], values: Mapping[str, Any]) -> T:
    known = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    if set(values) - known:
        raise ValueError(f"unknown {sorted(set(values) - known)}")
    return kind(**values)


def save_sweep(path: Path, sweep: Sweep) -> None:
    """Write the sweep so far; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(_line(asdict(sweep)), encoding="utf-8")
    beside.replace(path)


def load_sweep(path: Path) -> Sweep | None:
    """The sweep, or None where none was made."""
    if not path.is_file():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    first = tuple(_made(First, {**one, "kernels": tuple(one["kernels"])}) for one in values["first"])
    return _made(Sweep, {**values, "first": first})


def worst(header: Header, points: Iterable[Measured], most: int = 15) -> list[Measured]:
    """The slowest points beside their peer, and where none runs beside the roof, the slowest first."""
    timed = [point for point in points if header.ratio(point) is not None]
    return sorted(timed, key=lambda point: header.ratio(point) or math.inf)[:most]


def of_points(header: Header, points: Sequence[Measured], most: int = 15) -> Table:
    """The table of the worst points, and beneath it whatever has no time of ours."""
    right = ("us", "best peer us", "of peer", "of roof", "host us")
    table = Table(
        title=f"{header.package} {header.package_version} on {header.device}: the slowest of {len(points)} points",
        columns=["map", "point", "us", "best peer", "best peer us", "of peer", "of roof", "host us", "result"],
        right=frozenset(right),
        caption=f"speed of ours over the best peer's, over the roof's; copy {header.copy_roof_gb_per_s:.0f} GB/s, bf16 "
        f"GEMM {header.gemm_roof_tflop_per_s:.0f} TFLOP/s; driver {header.driver}, torch {header.torch}, "
        f"triton {header.triton}",
    )
    slow = worst(header, points, most)
    table.sections = [[_cells(header, point) for point in slow if point.of_peer is not None]]
    table.sections.append([_cells(header, point) for point in slow if point.of_peer is None])
    table.sections.append([_cells(header, point) for point in points if point.red])
    table.sections = [section for section in table.sections if section]
    return table


def _cells(header: Header, point: Measured) -> list[str]:
    ours, peer, of_roof = point.ours, point.peer, header.of_roof(point)
    red = "; ".join(point.red)
    return [
        point.map,
        words_of(point.point),
        significant(ours.us, 4) if ours else "",
        peer.implementation if peer else "",
        significant(peer.us, 4) if peer else "",
        "" if point.of_peer is None else f"{point.of_peer:.2f}",
        "" if of_roof is None else f"{of_roof:.2f}",
        significant(ours.host_us) if ours else "",
        f"red: {' '.join(red.split())[:100]}" if red else "",
    ]
