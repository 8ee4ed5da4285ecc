"""Files that a commit sets back to an older state, and whose home it does not name.

    python tools/history.py [COMMITS]

A merge made from an older checkout does that, and no test fails where the tests go back too. A commit means it that
works on the package, changing or adding other files there, or names it in its message (the folder shared:
kernel_reference), or says so in its subject: "again", "back", "once more", "restore", "revert".
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MEANT = re.compile(r"\b(again|back|once more|restores?|reverts?)\b", re.IGNORECASE)
# Of git's raw format: blobs before and after, kind of change, path.
CHANGE = re.compile(r":\d{6} \d{6} (\w{40}) (\w{40}) (\w)\0([^\0]*)\0")


class SetBack(NamedTuple):
    """A file that was set back, and by which commit."""

    commit: str
    subject: str
    path: str


def set_back(root: Path, commits: int) -> list[SetBack]:
    """Of the last so many commits, and not changed since; a shallow clone knows no older states."""
    told = ("git", "-C", str(root), "log", "--reverse", "--raw", "--no-abbrev", "--no-renames", "--no-merges")
    log = subprocess.run([*told, "-z", "--format=%x01%h%x02%s%x02%B%x03"], capture_output=True, text=True, check=True)
    entries = log.stdout.split("\x01")[1:]
    states: dict[str, set[str]] = defaultdict(set)
    found: dict[str, SetBack] = {}
    for i, entry in enumerate(entries):
        head, changes = entry.split("\x03", 1)
        commit, subject, message = head.split("\x02")
        old, worked_on = [], set()
        for before, after, kind, path in CHANGE.findall(changes):
            if kind == "M" and after in states[path]:
                old.append(path)
            elif kind != "D":
                worked_on.add(home_of(path))
            states[path] |= {before, after}
            # What has been mended since is no longer told.
            found.pop(path, None)
        if i >= len(entries) - commits and not MEANT.search(subject):
            strange = [path for path in old if home_of(path) not in worked_on and home_of(path) not in message]
            found |= {path: SetBack(commit[:7], subject, path) for path in strange}
    return list(found.values())


def home_of(path: str) -> str:
    """How a commit's message would name the home of a file."""
    first, *rest = path.split("/")
    return {"packages": rest[0] if rest else first, "shared": "kernel_reference"}.get(first, first)


if __name__ == "__main__":
    lost = set_back(ROOT, int(sys.argv[1]) if sys.argv[1:] else 100)
    print(*(f"{one.commit} {one.subject}\n    set back: {one.path}" for one in lost), sep="\n")
    sys.exit(bool(lost))
