"""One SVG of a package's record: for every case, each implementation's speed beside the baseline's."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kernel_reference.bench import picture
from kernel_reference.bench.case import COPY
from kernel_reference.bench.picture import FAINT, INK, PAPER
from kernel_reference.bench.record import Record
from kernel_reference.bench.table import duration

_ROW = 0.27
_WIDTH = 9.6
# Inches of a character at 9 points, in the widest font that a reader may have; bold ones are wider.
_CHARACTER, _BOLD_CHARACTER = 0.078, 0.086
# Longer bars are broken here and say their value in words, so that one slow baseline does not flatten the others.
_LONGEST = 3.0


def draw(records: Iterable[Record], path: str | os.PathLike[str]) -> None:
    """Write ``records`` of one package as an SVG to ``path``. Equal records give equal bytes.

    A bar is the baseline's time / the implementation's time: longer is faster, and the line at 1 is the baseline. Where
    a case's baseline was not timed, its fastest implementation takes its place. The text gives the time and the
    fraction of the nearer of the two measured roofs. What failed is named with its reason; an absent peer has no row.
    """
    records = list(records)
    if not records:
        raise ValueError("records must hold at least one record, got none")
    with picture.settings():
        picture.save(_figure(records), path)


def _figure(records: Sequence[Record]) -> Figure:
    records = [record for record in records if record.ours or record.status != "absent"]
    cases = [(name, list(group)) for name, group in groupby(records, key=lambda r: r.case)]
    left = (0.35 + _CHARACTER * max(len(r.implementation) for r in records)) / _WIDTH
    across = int(_WIDTH * (0.98 - left) / _BOLD_CHARACTER)
    titles = {name: textwrap.wrap(_title(name, group, records[0].baseline), across) for name, group in cases}
    rows = sum(len(group) + 1.0 + 0.6 * len(titles[name]) for name, group in cases)
    top, bottom = 0.85, 0.9
    height = rows * _ROW + top + bottom
    figure = Figure(figsize=(_WIDTH, height))
    axes = figure.add_axes((left, bottom / height, 0.715 - left, 1 - (top + bottom) / height))
    colours = _colours(records)
    longest = 1.0
    y = 0.0
    for name, group in cases:
        y += 0.5
        for line in titles[name]:
            y += 0.6
            axes.text(0, y - 0.12, line, ha="left", va="center", weight="bold", color=INK)
        y += 0.5
        reference = _reference(group)
        # Case by case: one line through the whole picture would cross the titles.
        axes.plot((1, 1), (y, y + len(group)), color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
        for record in group:
            y += 0.5
            speed = _bar(axes, record, reference, y, colours[record.implementation])
            longest = max(longest, speed)
            y += 0.5
    _frame(axes, records[0], min(longest, _LONGEST) * 1.02, rows, figure, height)
    return figure


def _colours(records: Sequence[Record]) -> dict[str, str]:
    ours = dict.fromkeys(r.implementation for r in records if r.ours)
    peers = dict.fromkeys(r.implementation for r in records if not r.ours and r.implementation != COPY)
    colours = {COPY: picture.COPY}
    colours |= {label: picture.OURS[i % len(picture.OURS)] for i, label in enumerate(ours)}
    return colours | {label: picture.PEERS[i % len(picture.PEERS)] for i, label in enumerate(peers)}


def _title(name: str, group: Sequence[Record], usual: str) -> str:
    reference = _reference(group)
    if reference is None or reference.implementation == usual:
        return name
    missing = "" if reference.implementation == reference.baseline else f": {reference.baseline} was not timed"
    return f"{name} (1 = {reference.implementation}{missing})"


def _reference(group: Sequence[Record]) -> Record | None:
    timed = [r for r in group if r.median_us]
    base = [r for r in timed if r.implementation == r.baseline]
    return base[0] if base else min(timed, key=lambda r: r.median_us or 0.0, default=None)


def _bar(axes: Axes, record: Record, reference: Record | None, y: float, colour: str) -> float:
    axes.text(-0.03, y, record.implementation, ha="right", va="center", color=INK if record.ours else FAINT)
    if reference is None or not record.median_us or not reference.median_us:
        note = " ".join(record.note.split())
        words = textwrap.shorten(f"{record.status}: {note}", 80, placeholder=" …")
        behind = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.0}
        axes.text(0.02, y, words, ha="left", va="center", color=FAINT, style="italic", bbox=behind)
        return 0.0
    speed = reference.median_us / record.median_us
    shown = min(speed, _LONGEST)
    axes.barh(y, shown, height=0.72, color=colour, linewidth=0)
    if speed > _LONGEST:
        for at in (0.955, 0.985):
            (gap,) = axes.plot(
                (at * _LONGEST - 0.015, at * _LONGEST + 0.015), (y + 0.45, y - 0.45), color=PAPER, linewidth=2
            )
            gap.set_gid(f"break-{y:.1f}-{at}")
    elif record.p20_us and record.p80_us:
        ends = (reference.median_us / record.p80_us, reference.median_us / record.p20_us)
        axes.plot(ends, (y, y), color=INK, linewidth=1, solid_capstyle="butt")
    right = axes.get_yaxis_transform()
    axes.text(1.13, y, duration(record.median_us), transform=right, ha="right", va="center", color=INK)
    axes.text(1.16, y, _words(record, speed), transform=right, ha="left", va="center", color=FAINT)
    return speed


def _words(record: Record, speed: float) -> str:
    copy, gemm = record.fraction_of_copy_roof or 0.0, record.fraction_of_gemm_roof or 0.0
    # What goes far beyond the GEMM roof leaves products out, to show what the rest takes: bytes alone measure it.
    roof = f"{gemm:.0%} of GEMM roof" if copy < gemm < 1.1 else f"{copy:.0%} of copy roof"
    return f"{roof}, {speed:.1f} x" if speed > _LONGEST else roof


def _frame(axes: Axes, first: Record, right: float, rows: float, figure: Figure, height: float) -> None:
    axes.set_xlim(0, right)
    axes.set_ylim(rows, 0.4)
    axes.set_yticks([])
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=FAINT)
    label = f"speed, 1 = {first.baseline} where a case names no other (longer is faster); thin line: p20 to p80"
    axes.set_xlabel("\n".join(textwrap.wrap(label, 60)), color=FAINT)
    figure.text(0.02, 1 - 0.28 / height, f"{first.package} {first.package_version}", size=13, weight="bold", color=INK)
    figure.text(
        0.02,
        1 - 0.53 / height,
        f"{first.device}, driver {first.driver}, CUDA {first.cuda}, torch {first.torch}, triton {first.triton}; "
        f"roofs: copy {first.copy_roof_gb_per_s * 1e-3:.2f} TB/s, bf16 GEMM {first.gemm_roof_tflop_per_s:.0f} TFLOP/s",
        size=8,
        color=FAINT,
    )
