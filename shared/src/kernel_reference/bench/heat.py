"""One SVG of a map: for any two of its axes the worst speed where two of their values meet."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from kernel_reference.bench import picture
from kernel_reference.bench.mapped import Header, Measured
from kernel_reference.bench.picture import EMPTY, FAINT, INK, NEUTRAL, ON_DARK, ON_LIGHT, PAPER

_RED = "#d1480b"
# Speeds as powers of two; beyond, all are one colour.
_SLOWEST, _FASTEST = -3.0, 3.0
_CELL, _LEFT, _GAP = 0.42, 1.15, 0.22
_TOP, _BOTTOM = 0.95, 0.75


def draw(
    header: Header, points: Sequence[Measured], name: str, path: str | os.PathLike[str], most_axes: int = 9
) -> None:
    """Write the points of map ``name`` as an SVG to ``path``. Equal points give equal bytes.

    A panel for any two axes, a cell for any two of their values: the lowest speed of its points beside the best peer,
    or, in italics and on grey, beside the roof where no peer ran at any of them. ``x``: a point there is red.
    """
    axes = {axis: list(values) for axis, values in header.axes[name].items() if len(values) > 1}
    with picture.settings(font_size=7):
        picture.save(_figure(header, points, name, dict(list(axes.items())[:most_axes])), path)


def _figure(header: Header, points: Sequence[Measured], name: str, axes: Mapping[str, Sequence[Any]]) -> Figure:
    """The lower triangle of all pairs: a column an axis but the last, a row an axis but the first."""
    across, down = list(axes)[:-1], list(axes)[1:]
    widths = [_CELL * len(axes[axis]) for axis in across]
    heights = [_CELL * 0.62 * len(axes[axis]) for axis in down]
    width = max(_LEFT + sum(widths) + _GAP * len(widths), 7.5)
    height = _TOP + _BOTTOM + sum(heights) + _GAP * len(heights)
    figure = Figure(figsize=(width, height))
    top = height - _TOP
    for row, second in enumerate(down):
        top -= heights[row]
        left = _LEFT
        for column, first in enumerate(across[: row + 1]):
            place = (left / width, top / height, widths[column] / width, heights[row] / height)
            panel = figure.add_axes(place)
            _panel(panel, header, points, (first, axes[first]), (second, axes[second]))
            _name(
                panel, first if row == len(down) - 1 else "", second if column == 0 else "", axes[first], axes[second]
            )
            left += widths[column] + _GAP
        top -= _GAP
    timed = sum(header.ratio(point) is not None for point in points)
    figure.text(
        0.1 / width, 1 - 0.28 / height, f"{header.package} {header.package_version}: {name}", size=12, weight="bold"
    )
    versions = f"driver {header.driver}, torch {header.torch}, triton {header.triton}"
    words = f"{header.device}, {versions}; {timed} of {len(points)} points timed"
    figure.text(0.1 / width, 1 - 0.5 / height, words, color=FAINT)
    key = "lowest speed beside the best peer (1: as fast; on grey beside the roof, where no peer ran); x: a red point"
    figure.text(0.1 / width, 1 - 0.7 / height, key, color=FAINT)
    return figure


def _panel(
    panel: Axes, header: Header, points: Sequence[Measured], x: tuple[str, Sequence[Any]], y: tuple[str, Sequence[Any]]
) -> None:
    colours = matplotlib.colormaps["RdBu"]
    scale = TwoSlopeNorm(0.0, _SLOWEST, _FASTEST)
    for column, a in enumerate(x[1]):
        for row, b in enumerate(y[1]):
            here = [point for point in points if point.point.get(x[0]) == a and point.point.get(y[0]) == b]
            beside = [point.of_peer for point in here if point.of_peer is not None]
            roofs = [ratio for point in here if (ratio := header.of_roof(point)) is not None]
            found = min(beside or roofs, default=None)
            if found is None:
                colour: Any = EMPTY
            elif beside:
                colour = colours(scale(math.log2(max(found, 1e-9))))
            else:
                # No judgement: how near a roof a kernel can come differs from kernel to kernel.
                colour = NEUTRAL
            panel.add_patch(
                matplotlib.patches.Rectangle((column, row), 1, 1, facecolor=colour, edgecolor=PAPER, lw=0.8)
            )
            dark = bool(beside) and found is not None and abs(math.log2(max(found, 1e-9))) > 1.9
            words = "" if found is None else f"{found:.2f}" if found < 9.95 else f"{found:.0f}"
            style = "normal" if beside or found is None else "italic"
            ink = ON_DARK if dark else ON_LIGHT
            panel.text(column + 0.5, row + 0.52, words, ha="center", va="center", color=ink, style=style, size=6.5)
            if any(point.red for point in here):
                panel.text(column + 0.93, row + 0.22, "x", ha="right", va="center", color=_RED, weight="bold", size=6.5)
    panel.set_xlim(0, len(x[1]))
    panel.set_ylim(len(y[1]), 0)


def _name(panel: Axes, across: str, down: str, columns: Sequence[Any], rows: Sequence[Any]) -> None:
    for side in panel.spines.values():
        side.set_visible(False)
    panel.tick_params(length=0, colors=FAINT, pad=2)
    panel.set_xticks([i + 0.5 for i in range(len(columns))] if across else [])
    panel.set_yticks([i + 0.5 for i in range(len(rows))] if down else [])
    if across:
        panel.set_xticklabels([_short(value) for value in columns], rotation=35, ha="right", rotation_mode="anchor")
        panel.set_xlabel(across, color=INK, weight="bold")
    if down:
        panel.set_yticklabels([_short(value) for value in rows])
        panel.set_ylabel(down, color=INK, weight="bold")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 14 else text[:13] + "…"
