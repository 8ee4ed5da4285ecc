"""The processes of a map: some side by side for a while, and one that is started anew after what ended it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kernel_reference.bench import mapped
from kernel_reference.bench.grid import words_of
from kernel_reference.bench.mapped import Measured

# A point that takes longer hangs.
POINT_SECONDS = 40.0
# One that takes longer than this when time is up has its stack shown.
SLOW_SECONDS = 5.0
# A process that dies before its first point is started again once, one that dies at a point as often as this.
RESTARTS = 20
# What the measuring process exits with when the device is lost to it, as after an illegal access.
LOST = 3


def run_together(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], *, until: float
) -> list[int | None]:
    """Run these side by side; whichever has not ended by ``until`` is ended. Exit codes, None for those."""
    with ended() as processes:
        for command, environment in zip(commands, environments, strict=True):
            processes.append(subprocess.Popen(command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL))
        codes: list[int | None] = []
        for process in processes:
            try:
                codes.append(process.wait(max(0.0, until - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
        return codes


def supervise(
    command: Sequence[str],
    file: Path,
    *,
    until: float,
    point_seconds: float = POINT_SECONDS,
    first: subprocess.Popen[bytes] | None = None,
) -> None:
    """Run the measuring process until it has no more to do, or time is up.

    A point at which it dies or hangs is written to ``file`` with the reason, and the process started again.
    ``first``: such a process that waits for a line of its input, see :func:`started`.
    """
    running = file.with_suffix(".running")
    lives = 2
    for number in range(RESTARTS):
        if time.monotonic() >= until or not lives:
            return
        with ended() as processes:
            if number == 0 and first is not None:
                process = first
                go_on(process)
            else:
                process = subprocess.Popen([*command, "--until", f"{until:.3f}"], stdin=subprocess.DEVNULL)
            processes.append(process)
            reason = _watch(process, running, until, point_seconds)
        if reason is None:
            return
        if running.is_file():
            name, point = json.loads(running.read_text(encoding="utf-8"))
            seconds = round(time.time() - running.stat().st_mtime, 2)
            running.unlink()
            if file.is_file() and time.monotonic() < until:
                mapped.append(file, Measured(name, point, seconds, note=reason))
                print(f"{name} {words_of(point)}: RED {reason}", flush=True)
            else:
                print(f"{reason} after {seconds:.1f} s of {name} {words_of(point)}, not recorded", flush=True)
        elif reason != f"the process ended with {LOST}":
            print(f"measuring, at no point: {reason}", flush=True)
            lives -= 1


def _watch(process: subprocess.Popen[bytes], running: Path, until: float, point_seconds: float) -> str | None:
    """Wait for the process. Returns None where it ended well, else the reason."""
    while True:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(0.2)
            if code == 0:
                return None
            ended_by = signal.Signals(-code).name if code < 0 else code
            return f"the process ended with {ended_by}"
        if time.monotonic() > until:
            with suppress(FileNotFoundError):
                if time.time() - running.stat().st_mtime > SLOW_SECONDS:
                    _ask_where(process)
            return "time was up"
        with suppress(FileNotFoundError):
            if time.time() - running.stat().st_mtime > point_seconds:
                _ask_where(process)
                return f"no result within {point_seconds:g} s"


def _ask_where(process: subprocess.Popen[bytes]) -> None:
    """Have it write its stack to its standard error, before it is ended. One that does not know the signal ends."""
    if hasattr(signal, "SIGUSR1"):
        process.send_signal(signal.SIGUSR1)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.5)


@contextmanager
def started(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that makes itself ready while others run, and waits for a line: :func:`go_on` writes it."""
    with ended() as processes:
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        yield processes[0]


def go_on(process: subprocess.Popen[bytes]) -> None:
    """Let a waiting process go on; one that has died meanwhile is found out by whoever watches it."""
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.write(b"\n")
            process.stdin.flush()
        with suppress(OSError):
            process.stdin.close()


@contextmanager
def ended() -> Iterator[list[subprocess.Popen[bytes]]]:
    """A list of processes, none of which is left behind."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
