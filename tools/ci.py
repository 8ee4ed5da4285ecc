"""Run every session of nox that needs no GPU, several at a time, and end with a table of what each took.

``python tools/ci.py [--jobs 2] [--table FILE] [session ...]``: all of ``lint``, ``types``, ``build``, ``engines``,
``docs``, ``demo``, ``minimums`` and ``test``, the latter with the planted faults, unless sessions are named. A
session's log is printed when it ends, so that they do not mix: the whole of it if it failed, else its end. The exit
code is 0 if all passed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Longest first, so that the last to end is a short one; seconds on one core, as .ci/run printed them. Types before all:
# what mypy remembers of torch is found again by the tests of a new package.
KINDS = ("types", "test", "minimums", "demo", "docs", "engines", "build", "lint")
LONGEST = ("tilelang-mla", "blocksparse-attn", "prefix-prefill", "lightning-attn", "gdn-split", "shared", "tools")
# An environment of virtualenv's takes 1.7 GB, one of uv's next to nothing.
_LEAST_FREE_BYTES = 12e9
_LINES_OF_A_PASSED_ONE = 12


@dataclass(frozen=True)
class Ended:
    """A session that has ended: how, after how many seconds, with what output."""

    session: str
    code: int
    seconds: float
    output: str


def sessions_of(*kinds: str) -> list[str]:
    """The sessions that nox has of these kinds: ``test`` has ``test(gdn-split)`` and others."""
    listed = subprocess.run(["nox", "--list", "--json", "-s", *kinds], cwd=ROOT, check=True, capture_output=True)
    return [entry["session"] for entry in json.loads(listed.stdout)]


def in_order(sessions: Iterable[str]) -> list[str]:
    """Longest first, but for types."""

    def place(session: str) -> tuple[int, int]:
        kind, _, package = session.rstrip(")").partition("(")
        return (
            KINDS.index(kind) if kind in KINDS else len(KINDS),
            LONGEST.index(package) if package in LONGEST else len(LONGEST),
        )

    return sorted(sessions, key=place)


def run(session: str) -> Ended:
    """One session, on one core, with the planted faults if it is a test."""
    # Two processes share the cores better than threads of each do.
    variables = os.environ | {"PYTEST_XDIST_AUTO_NUM_WORKERS": "1", "OMP_NUM_THREADS": "1"}
    arguments = ["--", "--faults"] if session.startswith("test(") and session != "test(tools)" else []
    command = ["nox", "--non-interactive", "-s", session, *arguments]
    started = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", check=False,
    )  # fmt: skip
    if shutil.disk_usage(ROOT).free < _LEAST_FREE_BYTES:
        folder = "".join(c if c.isalnum() or c in "-_" else "-" for c in session).rstrip("-")
        # A session that failed early has made none.
        shutil.rmtree(ROOT / ".nox" / folder, ignore_errors=True)
    return Ended(session, done.returncode, time.monotonic() - started, done.stdout)


def table(ended: Sequence[Ended], seconds: float, jobs: int) -> str:
    """Sessions and minutes as Markdown, the longest first."""
    rows = sorted(ended, key=lambda one: -one.seconds)
    lines = ["| session | minutes | |", "| --- | --- | --- |"]
    for one in rows:
        lines.append(f"| `{one.session}` | {one.seconds / 60:.1f} | {'passed' if one.code == 0 else 'FAILED'} |")
    return "\n".join([*lines, f"| all, {jobs} at a time | {seconds / 60:.1f} | |"])


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools/ci.py", description="Run the sessions that need no GPU.")
    parser.add_argument("sessions", nargs="*", help="sessions as nox lists them (default: all that need no GPU)")
    # Three at a time on two cores only slow each other: sessions of 271, 240 and 200 s took 444, 342 and 292 s.
    at_once = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=at_once, help=f"sessions at a time (default {at_once})")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table of minutes there too")
    chosen = parser.parse_args(arguments)
    sessions = in_order(chosen.sessions or sessions_of(*KINDS))
    started = time.monotonic()
    ended: list[Ended] = []
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for number, future in enumerate(as_completed([pool.submit(run, session) for session in sessions]), 1):
            one = future.result()
            ended.append(one)
            lines = one.output.rstrip().splitlines()
            shown = lines if one.code else lines[-_LINES_OF_A_PASSED_ONE:]
            verdict = "passed" if one.code == 0 else f"FAILED with code {one.code}"
            print(f"\n=== [{number}/{len(sessions)}] {one.session}: {verdict} after {one.seconds:.0f} s", flush=True)
            print("\n".join(shown), flush=True)
    text = table(ended, time.monotonic() - started, chosen.jobs)
    print(f"\n{text}\n")
    if chosen.table:
        chosen.table.write_text(text + "\n")
    failed = [one.session for one in ended if one.code]
    for session in failed:
        print(f"FAILED: {session}")
    print(f"sessions: {len(ended) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
