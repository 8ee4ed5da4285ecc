"""Tables for a terminal: through rich where it is installed, else as aligned text, so that results always print."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TextIO

from kernel_reference.bench.record import Record

Section = Sequence[Sequence[str]]


@dataclass
class Table:
    """Columns and sections of rows, all of them text. Columns named in ``right`` are aligned to the right."""

    title: str
    columns: Sequence[str]
    sections: list[Section] = field(default_factory=list)
    right: frozenset[str] = frozenset()
    caption: str = ""


def show(table: Table, file: TextIO | None = None) -> None:
    """Print ``table`` to ``file`` (standard output): with rich where it is installed, else plain."""
    file = file or sys.stdout
    try:
        _show_rich(table, file)
    except ImportError:
        file.write(plain(table) + "\n")
    file.flush()


def plain(table: Table) -> str:
    """``table`` as aligned text without colour or frames."""
    rows = [row for section in table.sections for row in section]
    widths = [max(map(len, column)) for column in zip(table.columns, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if name in table.right else cell.ljust(width)
            for cell, width, name in zip(cells, widths, table.columns, strict=True)
        )
        return "  ".join(padded).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    lines = [table.title, rule, line(table.columns), rule]
    for section in table.sections:
        lines += [*map(line, section), rule]
    return "\n".join(lines + ([table.caption] if table.caption else []))


_STYLES = {
    "red": "bold red",
    "absent": "dim",
    "met": "green",
    "MISSED": "bold red",
    "REGRESSION": "bold red",
    "MISSING": "bold red",
    "faster": "green",
}


def _show_rich(table: Table, file: TextIO) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    # rich takes 80 columns where there is no terminal and would break every number into pieces.
    console = Console(file=file, width=None if file.isatty() else 240)
    out = RichTable(title=Text(table.title), caption=Text(table.caption) if table.caption else None, box=SIMPLE_HEAD)
    for name in table.columns:
        right = name in table.right
        out.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
    for section in table.sections:
        for row in section:
            out.add_row(*(Text(cell, style=_STYLES.get(cell.split(" ", 1)[0].rstrip(":"), "")) for cell in row))
        out.add_section()
    console.print(out)


def significant(value: float | None, digits: int = 3) -> str:
    """``value`` with ``digits`` significant digits and no exponent below a million; empty for None."""
    if value is None:
        return ""
    if value == 0 or not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}" if value else "0"
    text = f"{value:.{digits}g}"
    return f"{float(text):.0f}" if "e" in text else text


def duration(us: float | None) -> str:
    """A time in microseconds or, from 1000 of them, milliseconds; empty for None."""
    if us is None:
        return ""
    value, unit = (us, "us") if us < 1000 else (us / 1000, "ms")
    # Three digits, the last of them too where it is 0, so that numbers below each other look alike.
    return f"{value:#.3g}".rstrip(".") + f" {unit}"


def of_records(records: Iterable[Record]) -> Table:
    """The table of one run: a section a case, in the order of the records."""
    records = list(records)
    if not records:
        return Table("no measurements", ["case"])
    first = records[0]
    table = Table(
        title=f"{first.package} {first.package_version} on {first.device}",
        columns=[
            "case",
            "implementation",
            "us",
            "p20-p80",
            "by",
            "GB/s",
            "of copy",
            "TFLOP/s",
            "of GEMM",
            "x baseline",
            "host us",
            "error",
            "result",
        ],
        right=frozenset({"us", "p20-p80", "GB/s", "of copy", "TFLOP/s", "of GEMM", "x baseline", "host us", "error"}),
        caption=(
            f"roofs measured in this run: copy {first.copy_roof_gb_per_s:.0f} GB/s, "
            f"bf16 GEMM {first.gemm_roof_tflop_per_s:.0f} TFLOP/s; "
            f"driver {first.driver}, CUDA {first.cuda}, torch {first.torch}, triton {first.triton}, "
            f"Python {first.python}"
        ),
    )
    for case, group in groupby(records, key=lambda r: r.case):
        table.sections.append([_cells(r, case if i == 0 else "") for i, r in enumerate(group)])
    return table


def _cells(r: Record, case: str) -> list[str]:
    span = f"{significant(r.p20_us)}-{significant(r.p80_us)}" if r.status == "timed" else ""
    ratio = "" if r.ratio_to_baseline is None else f"{r.ratio_to_baseline:.3f}"
    computes = r.flops > 0
    return [
        case,
        r.implementation,
        significant(r.median_us, 4),
        span,
        f"{r.method or ''}{', L2 flushed' if r.l2 == 'flushed' else ''}",
        "" if r.gb_per_s is None else f"{r.gb_per_s:.0f}",
        "" if r.fraction_of_copy_roof is None else f"{r.fraction_of_copy_roof:.3f}",
        significant(r.tflop_per_s) if computes else "",
        "" if r.fraction_of_gemm_roof is None or not computes else f"{r.fraction_of_gemm_roof:.3f}",
        ratio,
        significant(r.host_us),
        "" if r.error is None else (f"{r.error:.1e}" if r.error else "0"),
        _result(r),
    ]


def _result(r: Record) -> str:
    if r.status != "timed":
        return f"{r.status}: {' '.join(r.note.split())[:100]}"
    if r.requirement is None:
        return ""
    verdict = {True: "met", False: "MISSED", None: "not measured"}[r.requirement_met]
    return f"{verdict}: {r.requirement}"
