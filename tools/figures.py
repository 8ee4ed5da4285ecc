"""What report.py draws: axes, marks and roofs as plain values that a template writes down, with no pixel in them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kernel_reference.bench.case import COPY
from kernel_reference.bench.record import Record
from kernel_reference.bench.table import duration, significant

# How many colours and shapes the templates define, of ours and of peers. The two numbers share no factor, so that
# colour and shape together tell the first 12 of ours and the first 35 peers of a package apart.
OUR_COLOURS, OUR_SHAPES = 3, 4
COLOURS, SHAPES = 7, 5
MOST_TICKS = 7


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis; places on it are percents of its length."""

    low: float
    high: float
    has_zero: bool = False

    @classmethod
    def over(cls, values: Iterable[float], margin: float = 1.25) -> Axis:
        """An axis for these values, a decade long at least, with some room at both ends; a 0 stands at its left end."""
        values = list(values)
        positive = [value for value in values if value > 0] or [1.0]
        has_zero = any(value <= 0 for value in values)
        # A zero keeps its distance from the smallest number, as it has no place of its own on such an axis.
        low, high = min(positive) / margin ** (4 if has_zero else 1), max(positive) * margin
        widening = max(1.0, math.sqrt(10 * low / high))
        return cls(low / widening, high * widening, has_zero)

    def at(self, value: float) -> float:
        if value <= 0:
            return 0.0
        # So fine that a mark just left of its bar has another place than the bar.
        return round(100 * math.log(value / self.low) / math.log(self.high / self.low), 4)

    @property
    def ticks(self) -> list[float]:
        """1, 2 and 5 of every decade, or fewer where those are many."""
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found: list[float] = []
        for steps, stride in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 3)):
            every = (step * 10.0**decade for decade in decades if decade % stride == 0 for step in steps)
            found = [tick for tick in every if self.low <= tick <= self.high]
            if len(found) <= MOST_TICKS:
                break
        # The words of the first one beside a zero need room.
        return [0.0, *(tick for tick in found if self.at(tick) >= 8)] if self.has_zero else found


@dataclass(frozen=True)
class Look:
    """How an implementation is drawn, by names of colours and shapes that the templates define."""

    label: str
    colour: str
    shape: str


@dataclass(frozen=True)
class Point:
    """A value on an axis, and the words that hovering shows."""

    look: Look
    value: float
    tip: str


@dataclass(frozen=True)
class Row:
    """One line of a chart: points, the targets there, and what stands at its end; ``asked`` is what was judged."""

    label: str
    points: Sequence[Point]
    bars: Sequence[Point] = ()
    value: str = ""
    verdict: str = ""
    asked: str = ""


@dataclass(frozen=True)
class Chart:
    """Rows over one axis, which holds ``line`` too, where there is one."""

    rows: Sequence[Row]
    line: float | None = None

    @property
    def axis(self) -> Axis:
        values = [point.value for row in self.rows for point in (*row.points, *row.bars)]
        return Axis.over(values if self.line is None else [*values, self.line])

    @property
    def looks(self) -> list[Look]:
        """What the legend must explain."""
        return list(dict.fromkeys(point.look for row in self.rows for point in (*row.points, *row.bars)))


@dataclass(frozen=True)
class Mark:
    """A point of a plot, in percents from the left and from the top."""

    look: Look
    x: float
    y: float
    tip: str


@dataclass(frozen=True)
class Roof:
    """A line from one place to another, all in percents from the left and from the top.

    Its name ends above ``name_at``, where marks are few, or begins below it.
    """

    start: tuple[float, float]
    end: tuple[float, float]
    label: str
    name_at: tuple[float, float]
    above: bool = True


@dataclass(frozen=True)
class Plot:
    """Marks under roofs. ``kind`` is "roofline" (TFLOP/s over FLOP/byte) or "bandwidth" (TB/s over bytes)."""

    kind: str
    x: Axis
    y: Axis
    marks: Sequence[Mark]
    roofs: Sequence[Roof]

    @property
    def looks(self) -> list[Look]:
        """What the legend must explain: an implementation that was absent has no mark."""
        return list(dict.fromkeys(mark.look for mark in self.marks))


def looks_of(records: Iterable[Record]) -> dict[str, Look]:
    """The look of every implementation: ours first, then the peers, then the copy, which looks alike everywhere."""
    records = list(records)
    ours = dict.fromkeys(record.implementation for record in records if record.ours)
    others = dict.fromkeys(record.implementation for record in records if not record.ours)
    looks = {
        label: Look(label, f"ours-{i % OUR_COLOURS}", f"ours-shape-{i % OUR_SHAPES}") for i, label in enumerate(ours)
    }
    for i, label in enumerate(label for label in others if label != COPY):
        looks[label] = Look(label, f"peer-{i % COLOURS}", f"shape-{i % SHAPES}")
    if COPY in others:
        looks[COPY] = Look(COPY, "copy", "diamond")
    return looks


def roofline(records: Sequence[Record], looks: Mapping[str, Look]) -> Plot:
    """Speed over operations per byte, under the copy's slope and the GEMM's ceiling."""
    copy, gemm = records[0].copy_roof_gb_per_s * 1e-3, records[0].gemm_roof_tflop_per_s
    ridge = gemm / copy
    x = Axis.over([ridge, *(record.flops / record.bytes for record in records)], margin=2)
    y = Axis.over([gemm, *(record.tflop_per_s or gemm for record in records)], margin=1.6)
    # Where the slope enters the picture: at its left edge or at its lower one.
    first = max(x.low, y.low / copy)
    foot, top, right = (_place(x.at(i), y.at(min(gemm, copy * i))) for i in (first, ridge, x.high))
    # As far up as leaves the ceiling its own name; a short slope has no room for words to the left of it.
    along = min(1.0, 60 / top[0])
    named = (round(along * top[0], 2), round(foot[1] + along * (top[1] - foot[1]), 2))
    if not (above := named[0] >= 33):
        named = (round((foot[0] + top[0]) / 2, 2), round((foot[1] + top[1]) / 2, 2))
    roofs = [
        Roof(foot, top, f"copy {bytes_per_second(1e3 * copy)}", named, above),
        Roof(top, right, f"GEMM {gemm:.0f} TFLOP/s", right),
    ]
    marks = _marks(records, looks, lambda r: _place(x.at(r.flops / r.bytes), y.at(r.tflop_per_s or 0)))
    return Plot("roofline", x, y, marks, roofs)


def bandwidth(records: Sequence[Record], looks: Mapping[str, Look]) -> Plot:
    """Speed over size, under the copy's ceiling."""
    copy = records[0].copy_roof_gb_per_s
    x = Axis.over((record.bytes for record in records), margin=2)
    y = Axis.over([1e-3 * speed for speed in (copy, *(record.gb_per_s or copy for record in records))], margin=1.6)
    left, right = _place(0, y.at(1e-3 * copy)), _place(100, y.at(1e-3 * copy))
    marks = _marks(records, looks, lambda r: _place(x.at(r.bytes), y.at(1e-3 * (r.gb_per_s or 0))))
    return Plot("bandwidth", x, y, marks, [Roof(left, right, f"copy {bytes_per_second(copy)}", right)])


def _place(from_left: float, from_below: float) -> tuple[float, float]:
    """A place as SVG counts it, from the top."""
    return from_left, round(100 - from_below, 2)


def _marks(
    records: Sequence[Record], looks: Mapping[str, Look], place: Callable[[Record], tuple[float, float]]
) -> list[Mark]:
    # What comes last lies on top: ours.
    order = sorted(records, key=lambda record: (record.ours, record.implementation != COPY))
    return [Mark(looks[record.implementation], *place(record), words(record)) for record in order]


def speeds(cases: Mapping[str, Sequence[Record]], looks: Mapping[str, Look]) -> Chart:
    """Case by case how many times as fast as each peer ours is, with its targets."""
    rows = []
    for records in cases.values():
        for ours in (record for record in records if record.ours):
            targets = bars_of(ours)
            # A target may be beside another of ours: it is met, or not, by a mark too.
            rivals = [
                record
                for record in records
                if not record.ours or record.implementation in (label for label, _ in targets)
            ]
            points = [
                Point(
                    looks[peer.implementation],
                    speed,
                    f"{speed:.3f} × as fast as {peer.implementation}\n"
                    f"{duration(ours.median_us)}, {peer.implementation} {duration(peer.median_us)}",
                )
                for peer in rivals
                if (speed := speed_beside(ours, peer)) is not None
            ]
            bars = [
                Point(looks[label], bar, f"target: {bar:.3g} × as fast as {label}")
                for label, bar in targets
                if label in looks
            ]
            value = duration(ours.median_us) or ours.status
            rows.append(Row(_label(ours, records), points, bars, value, verdict(ours), ours.requirement or ""))
    return Chart(rows, line=1.0)


def errors(cases: Mapping[str, Sequence[Record]], looks: Mapping[str, Look]) -> Chart:
    """Case by case the error of each implementation, where it is not 0 for all of them."""
    rows = []
    for label, records in cases.items():
        counted = [record for record in records if record.error is not None and record.implementation != COPY]
        if any(record.error for record in counted):
            points = [
                Point(looks[r.implementation], r.error or 0.0, f"{r.implementation}: {error_of(r)}")
                for r in sorted(counted, key=lambda r: r.ours)
            ]
            rows.append(Row(label, points, value=_range([r for r in counted if r.ours])))
    return Chart(rows)


def _range(records: Sequence[Record]) -> str:
    """The least and the largest error, or the one that all have."""
    by_size = sorted(records, key=lambda record: record.error or 0.0)
    return " to ".join(dict.fromkeys(error_of(record) for record in (by_size[:1] + by_size[-1:])))


def speed_beside(ours: Record, peer: Record) -> float | None:
    """How many times as fast as the peer ours is; None where either has no time."""
    return peer.median_us / ours.median_us if ours.median_us and peer.median_us else None


def bars_of(record: Record) -> list[tuple[str, float]]:
    """The peers and the speeds beside them that a record's requirement asks for.

    The words are those of :meth:`kernel_reference.bench.case.Requirement.describe`. A bound on host time or in
    microseconds has no place among speeds: it stands in the table alone.
    """
    bars = []
    for target in re.split(r"; (?=(?:host )?(?:time|speed) [<>]=)", record.requirement or ""):
        found = re.fullmatch(r"(time <=|speed >=) (\S+) (?:x|of) (.+?)(?: \([\d.]+\))?", target)
        if found:
            bound = float(found[2])
            bars.append((found[3], 1 / bound if found[1] == "time <=" else bound))
    return bars


def verdict(record: Record) -> str:
    """Whether the target was met, in a word; empty where there was none."""
    if not record.requirement:
        return ""
    return {True: "met", False: "missed", None: "not measured"}[record.requirement_met]


def words(record: Record) -> str:
    """A record in a few lines."""
    lines = [f"{record.implementation}: {record.case}", f"{duration(record.median_us)} ({spread(record)})"]
    lines.append(f"{bytes_per_second(record.gb_per_s or 0)}, {record.fraction_of_copy_roof:.3f} of the copy roof")
    if record.flops:
        lines.append(f"{significant(record.tflop_per_s)} TFLOP/s, {record.fraction_of_gemm_roof:.3f} of the GEMM roof")
    return "\n".join(lines)


def bytes_per_second(gb_per_s: float) -> str:
    """In TB/s, as the READMEs have it, whatever the size, so that two of them compare at a glance."""
    return f"{gb_per_s * 1e-3:#.3g}".rstrip(".") + " TB/s"


def error_of(record: Record) -> str:
    """The error of a record that has one."""
    error = record.error or 0.0
    return "exact" if error == 0 else f"{error:.2f}" if error >= 0.01 else f"{error:.1e}".replace("e-0", "e-")


def spread(record: Record) -> str:
    """Where the middle three fifths of the times lie."""
    return f"p20 to p80: {duration(record.p20_us)} to {duration(record.p80_us)}"


def _label(ours: Record, records: Sequence[Record]) -> str:
    """The case; with the implementation where the package brings several."""
    several = sum(record.ours for record in records) > 1
    return f"{ours.case}: {ours.implementation}" if several else ours.case
