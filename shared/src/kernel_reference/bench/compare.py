"""What changed between two records: ``python -m kernel_reference.bench.compare old.jsonl new.jsonl``.

Exit code 0: no regression; 1: at least one, or something is missing; 2: a record cannot be read. Two runs are two runs:
a change of clocks or driver looks like a change of code, so a regression here is a question, and the ratios within one
run are the answer.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kernel_reference.bench.record import MACHINE, Record, load
from kernel_reference.bench.table import Table, show, significant

Verdict = Literal["same", "faster", "REGRESSION", "red", "new", "gone", "MISSING"]
# Medians of one version differ this much between two runs on one machine.
NOISE = 0.02


@dataclass(frozen=True)
class Change:
    """One implementation of one case in both records. A time is None where there is none; ``ratio`` is new / old."""

    case: str
    implementation: str
    ours: bool
    old_us: float | None
    new_us: float | None
    ratio: float | None
    verdict: Verdict

    @property
    def is_regression(self) -> bool:
        """Whether this one of ours became slower beyond noise or went red, or is missing from the new record.

        A peer too may not go missing: one that cannot be imported is recorded, as absent.
        """
        return self.verdict == "MISSING" or (self.ours and self.verdict in ("REGRESSION", "red"))


def compare(old: Iterable[Record], new: Iterable[Record], *, noise: float = NOISE) -> list[Change]:
    """Compare two runs, in the order of ``new``, then what only ``old`` has, and so is missing.

    A difference counts when the ranges p20-p80 do not overlap and the medians differ by more than ``noise``. Raises
    ValueError where a run holds a measurement twice.
    """
    before, after = _by_key(old, "old"), _by_key(new, "new")
    changes = [_change(before.get(key), record, noise) for key, record in after.items()]
    for key, record in before.items():
        if key not in after:
            changes.append(
                Change(record.case, record.implementation, record.ours, record.median_us, None, None, "MISSING")
            )
    return changes


def _by_key(records: Iterable[Record], name: str) -> dict[tuple[str, str, str], Record]:
    found: dict[tuple[str, str, str], Record] = {}
    for record in records:
        if record.key in found:
            raise ValueError(f"{name} must hold each measurement once, got {' / '.join(record.key)} twice")
        found[record.key] = record
    return found


def _change(old: Record | None, new: Record, noise: float) -> Change:
    ratio = None
    verdict: Verdict = "new"
    if old is not None and old.median_us is not None and new.median_us is not None:
        ratio = new.median_us / old.median_us
        verdict = "same"
        if _above(new, old) and ratio > 1 + noise:
            verdict = "REGRESSION"
        elif _above(old, new) and ratio < 1 / (1 + noise):
            verdict = "faster"
    elif new.status == "red":
        verdict = "red"
    elif new.status == "absent":
        verdict = "gone"
    old_us = None if old is None else old.median_us
    return Change(new.case, new.implementation, new.ours, old_us, new.median_us, ratio, verdict)


def _above(a: Record, b: Record) -> bool:
    return a.p20_us is not None and b.p80_us is not None and a.p20_us > b.p80_us


def machine_differences(old: Iterable[Record], new: Iterable[Record]) -> list[str]:
    """What differs between the machines of the two runs, in words: ``driver: 580.1 -> 581.0``."""
    old, new = list(old), list(new)
    lines = []
    for name in MACHINE:
        before, after = ({getattr(r, name) for r in records} for records in (old, new))
        if before != after:
            lines.append(f"{name}: {', '.join(sorted(before)) or 'none'} -> {', '.join(sorted(after)) or 'none'}")
    return lines


def of_changes(changes: Sequence[Change]) -> Table:
    """The table of a comparison."""
    rows = [
        [
            c.case,
            c.implementation,
            significant(c.old_us, 4),
            significant(c.new_us, 4),
            "" if c.ratio is None else f"{c.ratio:.3f}",
            c.verdict,
        ]
        for c in changes
    ]
    columns = ["case", "implementation", "old us", "new us", "new / old", "verdict"]
    return Table("change since the old record", columns, [rows] if rows else [], frozenset(columns[2:5]))


def report(old: Sequence[Record], new: Sequence[Record]) -> int:
    """Print the comparison and return the exit code: 1 where one of ours regressed."""
    for line in machine_differences(old, new):
        print(f"not the same machine: {line}")
    changes = compare(old, new)
    show(of_changes(changes))
    worse = [c for c in changes if c.is_regression]
    if worse:
        print(f"{len(worse)} regression(s): " + "; ".join(map(_in_words, worse)))
    return 1 if worse else 0


def _in_words(change: Change) -> str:
    missing = ": MISSING" if change.verdict == "MISSING" else ""
    return f"{change.case} / {change.implementation}{missing}"


def only(records: Iterable[Record], pattern: re.Pattern[str] | None) -> list[Record]:
    """The records of cases whose name matches; all without a pattern."""
    return [record for record in records if pattern is None or pattern.search(record.case)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m kernel_reference.bench.compare", description="Compare two records of a package."
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", type=re.compile, metavar="REGEX", help="leave out cases whose name does not match")
    chosen = parser.parse_args(arguments)
    try:
        old, new = (only(load(path), chosen.only) for path in (chosen.old, chosen.new))
        return report(old, new)
    except (OSError, ValueError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
