"""For mkdocstrings: what docstrings have that Markdown does not know, or takes for something else.

Sphinx's roles, :func:`split`, become code, `split`; lines of an interpreter, which would be quotes in quotes, a block;
and tables between rulers of ``===``, which would be one paragraph, tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc|obj):`~?\.?([^`]+)`")

# From the first prompt to the end of the paragraph.
SESSION = re.compile(r"^( *)>>> .*(?:\n *\S.*)*", re.MULTILINE)
# Two rulers or three, the second below a heading.
RULER = re.compile(r"^ *=+(?: +=+)+ *$")


def _cells(line: str, ruler: str) -> list[str]:
    begins = [found.start() for found in re.finditer("=+", ruler)]
    return [line[begin:end].strip().replace("|", r"\|") for begin, end in pairwise([*begins, None])]


def _table(lines: Sequence[str]) -> Iterator[str]:
    """Of the lines from the first ruler to the last; one that begins with no cell goes on with the row before."""
    ruler, rows = lines[0], list[list[str]]()
    headed = len([line for line in lines if RULER.match(line)]) == 3
    for line in lines[1:-1]:
        if RULER.match(line):
            continue
        cells = _cells(line, ruler)
        if cells[0] or not rows:
            rows.append(cells)
        else:
            rows[-1] = [f"{cell} {more}".strip() for cell, more in zip(rows[-1], cells, strict=True)]
    heading = rows.pop(0) if headed else [""] * len(_cells(ruler, ruler))
    for row in (heading, ["---"] * len(heading), *rows):
        yield "| " + " | ".join(row) + " |"


def with_tables(text: str) -> str:
    lines = text.split("\n")
    rulers = [number for number, line in enumerate(lines) if RULER.match(line)]
    # From the last table to the first, so that numbers of lines stay.
    while rulers:
        last = first = rulers.pop()
        while rulers and "" not in map(str.strip, lines[rulers[-1] : first]):
            first = rulers.pop()
        lines[first : last + 1] = _table(lines[first : last + 1])
    return "\n".join(lines)


def as_markdown(text: str) -> str:
    text = with_tables(ROLE.sub(r"`\1`", text))
    return SESSION.sub(r"\1```pycon\n\g<0>\n\1```", text)


class Roles(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
