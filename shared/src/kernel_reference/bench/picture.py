"""How the pictures of a benchmark look, and how they are written: as SVG, for light and dark pages, of equal bytes."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

# After Okabe and Ito's palette, which colour-blind readers tell apart; ours are blues, the copy is a grey.
OURS = ("#0068b0", "#2b9bd2", "#0b2f5e", "#7cc6ee")
PEERS = ("#bf8300", "#009e73", "#d1619f", "#d1480b", "#7a55c2", "#66760a", "#7a3b1d")
COPY = "#868b91"
INK, FAINT, PAPER, RULE = "#222222", "#777777", "#ffffff", "#d3d3d3"
# Of a cell without a value and of one that is no judgement; and words on a coloured cell, which keep their colour.
EMPTY, NEUTRAL = "#f6f6f6", "#e0e0e0"
ON_LIGHT, ON_DARK = "#222223", "#fffffe"

# The same colours on a dark page.
DARK = {
    **dict(zip(OURS, ("#56b4e9", "#b5e3fb", "#1f78c8", "#3a5fd9"), strict=True)),
    **dict(zip(PEERS, ("#e8b004", "#22bf95", "#ee97c6", "#f2703d", "#a583ec", "#c9e265", "#c58f6c"), strict=True)),
    COPY: "#8f979f", INK: "#e6e9ec", FAINT: "#9aa4ae", PAPER: "#14171a", RULE: "#343a41", EMPTY: "#1d2126",
}  # fmt: skip

_SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "kernel_reference",
    # Text stays text: it can be searched and read aloud, and the file does not depend on this machine's fonts.
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 9,
    # matplotlib leaves black out of the file, where no rule for a dark page would find it.
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), PAPER),
}


@contextmanager
def settings(**changed: Any) -> Iterator[None]:
    """matplotlib's settings for a picture; ``font_size=7`` changes ``font.size``."""
    with matplotlib.rc_context(_SETTINGS | {name.replace("_", "."): value for name, value in changed.items()}):
        yield


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write ``figure``, drawn under :func:`settings`, as an SVG that takes the colours of ``DARK`` on a dark page.

    A rule for each colour, by what the elements' styles say, and not variables in their place: a program that knows no
    style sheets still shows the light picture.
    """
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    text = drawn.getvalue()
    rules = [
        f'   [style*="{paint}: {light}"] {{ {paint}: {dark} !important }}'
        for light, dark in DARK.items()
        for paint in ("fill", "stroke")
        if f"{paint}: {light}" in text
    ]
    sheet = "\n".join(["  <style>", "  @media (prefers-color-scheme: dark) {", *rules, "  }", "  </style>"])
    head, found, rest = text.partition("</metadata>\n")
    if not found:
        head, found, rest = text.partition("<defs>")
        head, found, rest = head, "", found + rest
    Path(path).write_text(f"{head}{found}{sheet}\n{rest}", encoding="utf-8")
