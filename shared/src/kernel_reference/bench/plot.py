"""One SVG of a package's record: for every case, each implementation's speed beside the baseline's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kernel_reference.bench.record import Record
from kernel_reference.bench.table import significant

# Okabe and Ito's palette, told apart by colour-blind readers too; ours is the strong blue, the copy a grey.
_OURS = ("#0072B2", "#56B4E9", "#004B76")
_PEERS = ("#E69F00", "#009E73", "#CC79A7", "#D55E00", "#F0E442", "#8C6BB1", "#B3B3B3")
_COPY = "#9A9A9A"
_INK, _FAINT = "#222222", "#777777"
_ROW = 0.27
_WIDTH = 9.6
# Longer bars are cut here and say their value in words, so that one slow baseline does not flatten the others.
_LONGEST = 3.0


def draw(records: Iterable[Record], path: str | os.PathLike[str]) -> None:
    """Write ``records`` of one package as an SVG to ``path``. Equal records give equal bytes.

    A bar is the baseline's time / the implementation's time: longer is faster, and the line at 1 is the baseline. Where
    a case's baseline was not timed, its fastest implementation takes its place. The text gives the time and the
    fraction of the nearer of the two measured roofs. What was not timed is named with its reason.
    """
    records = list(records)
    if not records:
        raise ValueError("records must hold at least one record, got none")
    settings: dict[Any, Any] = {
        "svg.hashsalt": "kernel_reference",
        # Text stays text: it can be searched and read aloud, and the file does not depend on this machine's fonts.
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
        "font.size": 9,
    }
    with matplotlib.rc_context(settings):
        figure = _figure(records)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _figure(records: Sequence[Record]) -> Figure:
    cases = [(name, list(group)) for name, group in groupby(records, key=lambda r: r.case)]
    rows = sum(len(group) + 1.6 for _, group in cases)
    top, bottom = 0.85, 0.75
    height = rows * _ROW + top + bottom
    figure = Figure(figsize=(_WIDTH, height))
    left = (0.35 + 0.078 * max(len(r.implementation) for r in records)) / _WIDTH
    axes = figure.add_axes((left, bottom / height, 0.715 - left, 1 - (top + bottom) / height))
    colours = _colours(records)
    longest = 1.0
    y = 0.0
    for name, group in cases:
        y += 1.1
        title = _title(name, group, records[0].baseline)
        axes.text(0, y - 0.12, title, ha="left", va="center", weight="bold", color=_INK)
        y += 0.5
        reference = _reference(group)
        # Case by case: one line through the whole picture would cross the titles.
        axes.plot((1, 1), (y, y + len(group)), color=_INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
        for record in group:
            y += 0.5
            speed = _bar(axes, record, reference, y, colours[record.implementation])
            longest = max(longest, speed)
            y += 0.5
    _frame(axes, records[0], min(longest, _LONGEST) * 1.02, rows, figure, height)
    return figure


def _colours(records: Sequence[Record]) -> dict[str, str]:
    ours = dict.fromkeys(r.implementation for r in records if r.ours)
    peers = dict.fromkeys(r.implementation for r in records if not r.ours and r.implementation != "copy")
    colours = {"copy": _COPY}
    colours |= {label: _OURS[i % len(_OURS)] for i, label in enumerate(ours)}
    return colours | {label: _PEERS[i % len(_PEERS)] for i, label in enumerate(peers)}


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
    axes.text(-0.03, y, record.implementation, ha="right", va="center", color=_INK if record.ours else _FAINT)
    if reference is None or not record.median_us or not reference.median_us:
        note = " ".join(record.note.split())
        words = f"{record.status}: {note[:80]}"
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        axes.text(0.02, y, words, ha="left", va="center", color=_FAINT, style="italic", bbox=behind)
        return 0.0
    speed = reference.median_us / record.median_us
    shown = min(speed, _LONGEST)
    axes.barh(y, shown, height=0.72, color=colour, linewidth=0)
    if record.p20_us and record.p80_us and speed <= _LONGEST:
        ends = (reference.median_us / record.p80_us, reference.median_us / record.p20_us)
        axes.plot(ends, (y, y), color=_INK, linewidth=1, solid_capstyle="butt")
    right = axes.get_yaxis_transform()
    axes.text(1.13, y, f"{significant(record.median_us)} µs", transform=right, ha="right", va="center", color=_INK)
    axes.text(1.16, y, _words(record, speed), transform=right, ha="left", va="center", color=_FAINT)
    return speed


def _words(record: Record, speed: float) -> str:
    copy, gemm = record.fraction_of_copy_roof or 0.0, record.fraction_of_gemm_roof or 0.0
    roof = f"{gemm:.0%} of GEMM roof" if gemm > copy else f"{copy:.0%} of copy roof"
    return f"{roof}, {speed:.1f} x" if speed > _LONGEST else roof


def _frame(axes: Axes, first: Record, right: float, rows: float, figure: Figure, height: float) -> None:
    axes.set_xlim(0, right)
    axes.set_ylim(rows, 0.4)
    axes.set_yticks([])
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    axes.tick_params(colors=_FAINT)
    label = f"speed, 1 = {first.baseline} where a case names no other (longer is faster); thin line: p20 to p80"
    axes.set_xlabel(label, color=_FAINT)
    figure.text(0.02, 1 - 0.28 / height, f"{first.package} {first.package_version}", size=13, weight="bold", color=_INK)
    figure.text(
        0.02,
        1 - 0.53 / height,
        f"{first.device}, driver {first.driver}, CUDA {first.cuda}, torch {first.torch}, triton {first.triton}; "
        f"roofs: copy {first.copy_roof_gb_per_s:.0f} GB/s, bf16 GEMM {first.gemm_roof_tflop_per_s:.0f} TFLOP/s",
        size=8,
        color=_FAINT,
    )
