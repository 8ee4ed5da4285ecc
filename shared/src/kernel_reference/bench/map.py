"""Find where speed falls off: ``python -m kernel_reference.bench.map packages/<name>/benchmarks/map.py --out DIR``.

map.py defines ``maps(device: torch.device) -> Iterable[Map]``, grids round the package's cases, and may define
``sweep(device, batch) -> Callable[[], object]``, a call with so many sequences. A sample of every grid in which any two
values meet is measured, each point as `bench.run` measures a case, only more briefly: judged first, timed beside
every peer that runs it and a copy. What comes out is ``map.jsonl``, a picture of each grid and the slowest points.

Measuring is done in a process of its own, so that a peer that ends or hangs it costs one point. Before, other processes
call everything once, to compile side by side what is later found in the caches of Triton and TileLang; and one, with an
empty cache, counts what is compiled as a server's batch grows from 1 to 256.

Exit code 0: measured, perhaps not all of it in time; 1: a point of ours is red; 2: nothing could be measured.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kernel_reference.bench import machine, mapped
from kernel_reference.bench.compiled import compilations
from kernel_reference.bench.grid import Axis, Map, Value, key_of, words_of
from kernel_reference.bench.mapped import First, Header, Measured, Outcome, Sweep
from kernel_reference.bench.measure import Stamp, measure
from kernel_reference.bench.processes import LOST, POINT_SECONDS, run_together, started, supervise
from kernel_reference.bench.roofs import Roofs
from kernel_reference.bench.run import Bench, CudaBench, UnusableError, load_module
from kernel_reference.bench.table import show, significant
from kernel_reference.bench.timers import host_time_us

__all__ = ["Axis", "Map", "main"]

# A point's bytes read and written; all the sets of its inputs together, and how many: making them takes time.
POINT_BYTES, SETS_BYTES, SETS = 4 * 10**9, 8 * 10**9, 8
BATCHES = 256
# Device time for each implementation of a point.
SECONDS, ROUNDS = 0.03, 3
# Of the file beside the map that lists the points whose kernels are made.
READY = ".ready"
# Of the budget: the end, for the table and the pictures; and the most that compiling ahead and the sweep may take.
LAST_SECONDS, AHEAD = 8.0, 0.45
# Processes that compile ahead: of the cores, which the sweep and the measuring process need too; and of the memory.
OF_CORES, MOST_AHEAD = 0.75, 12


@dataclass(frozen=True)
class Item:
    """A point that is to be measured."""

    map: Map
    point: Mapping[str, Value]

    @property
    def key(self) -> str:
        return key_of(self.map.name, self.point)


def load_maps(path: Path, device: torch.device) -> tuple[list[Map], Callable[..., Callable[[], object]] | None]:
    """The maps of ``path``, and its ``sweep``. Raises UnusableError where it defines no maps, or one name twice."""
    module = load_module(path, "maps(device)")
    function = getattr(module, "maps", None)
    if not callable(function):
        raise UnusableError(f"{path} must define maps(device), got none")
    found: list[Map] = list(function(device))
    names = [one.name for one in found]
    if not found or len(set(names)) < len(names):
        raise UnusableError(f"{path} must name each map once and have one, got {names}")
    return found, getattr(module, "sweep", None)


def items_of(
    maps: Iterable[Map], *, seed: int = 0, points: int | None = None, only: re.Pattern[str] | None = None
) -> list[Item]:
    """The sample of every map, in turns, so that all have their share when time is up; of those that ``only`` is found
    in, as they are printed. ``points``: of all together.
    """
    maps = list(maps)
    samples = [[Item(one, point) for point in one.sample(seed=seed)] for one in maps]
    order = sorted(
        (
            (number / len(sample), which, item)
            for which, sample in enumerate(samples)
            for number, item in enumerate(sample)
        ),
        key=lambda entry: entry[:2],
    )
    known = {id(item): index < len(item.map.known) for sample in samples for index, item in enumerate(sample)}
    items = sorted((item for *_, item in order), key=lambda item: not known[id(item)])
    return [item for item in items if not only or only.search(f"{item.map.name} {words_of(item.point)}")][:points]


# Measuring, in its own process


def measure_items(
    items: Iterable[Item], bench: Bench, stamp: Stamp, file: Path, *, until: float, number: int = 0, total: int = 0
) -> Iterator[Measured]:
    """Measure each point and add it to ``file``; none is begun that ``until`` (of time.monotonic) is too near for."""
    running = file.with_suffix(".running")
    taken = [0.0]
    for count, item in enumerate(items, start=number + 1):
        # One that takes longer than most is ended by whoever watches, and blamed for nothing.
        if time.monotonic() + statistics.median(taken) > until:
            return
        # Whoever finds this file after the process has died knows at which point.
        running.write_text(json.dumps([item.map.name, dict(item.point)]), encoding="utf-8")
        start = time.monotonic()
        spent: dict[str, float] = {}
        with compilations() as compiled:
            found = measure_one(item, bench, stamp, spent)
        mapped.append(file, found)
        running.unlink()
        taken.append(time.monotonic() - start)
        words = f"{item.map.name} {words_of(item.point)}: {_outcome(found)} ({_where(found.seconds, spent, compiled)})"
        print(f"[{count}/{total}] {words}", flush=True)
        yield found


def _where(seconds: float, spent: Mapping[str, float], compiled: Sequence[str]) -> str:
    """The seconds of a point, and of one that took long what they went into."""
    longest = sorted(spent.items(), key=lambda entry: -entry[1])[:3] if seconds >= 1 else ()
    parts = [f"{seconds:.1f} s", *(f"{what} {took:.1f}" for what, took in longest)]
    # What was compiled ahead is not compiled again: a name here says what that missed.
    return ", ".join(parts + ([f"{len(compiled)} compiled: {' '.join(sorted(set(compiled)))}"] if compiled else []))


def measure_one(item: Item, bench: Bench, stamp: Stamp, spent: dict[str, float] | None = None) -> Measured:
    """One point. What raises is its note. ``spent``: takes the seconds by what they were spent on."""
    start = time.monotonic()

    def done(**values: Any) -> Measured:
        values["commit"] = stamp.commit
        return Measured(item.map.name, dict(item.point), round(time.monotonic() - start, 2), **values)

    try:
        case = item.map.case(item.point)
        if case is None:
            return done()
        if case.bytes_moved > POINT_BYTES:
            return done(note=f"moves {case.bytes_moved / 1e9:.1f} GB, and a point may move {POINT_BYTES / 1e9:g}")
        limits = {"seconds": SECONDS, "rounds": ROUNDS, "memory_bytes": SETS_BYTES, "most_sets": SETS, "again": False}
        records = measure(case, bench.device, bench.clock, stamp, spent=spent, **limits)  # type: ignore[arg-type]
        outcomes = tuple(Outcome.of(record) for record in records)
        return done(bytes=case.bytes_moved, flops=case.flops, outcomes=outcomes)
    except Exception as error:
        return done(note=f"{type(error).__name__}: {' '.join(str(error).split())}"[:500])
    finally:
        with suppress(Exception):
            bench.tidy()


def _outcome(found: Measured) -> str:
    if found.red:
        return f"RED {'; '.join(found.red)[:160]}"
    if not found.ours:
        return "no case"
    beside = f"{found.of_peer:.2f} of {found.peer.implementation}" if found.peer and found.of_peer else "no peer"
    absent = [o.implementation for o in found.outcomes if not o.ours and o.status != "timed"]
    without = f", without {', '.join(absent)}" if absent else ""
    return f"{significant(found.ours.us)} us, {beside}{without}"


def call_ahead(items: Iterable[Item], bench: Bench, ready: Path) -> None:
    """Call every implementation of these points once, so that it is compiled, and note each in ``ready``; what fails
    says so in its turn.
    """
    for item in items:
        start = time.monotonic()
        spent: dict[str, float] = {}
        with suppress(Exception), compilations() as compiled:
            case = item.map.case(item.point)
            if case is not None and case.bytes_moved <= POINT_BYTES:
                inputs = case.make_inputs()
                for label in (*case.ours, *case.peers):
                    begun = time.monotonic()
                    try:
                        call = case.ours[label] if label in case.ours else case.peers[label]()
                        call(inputs)
                        bench.clock.synchronize()
                    except Exception as error:
                        # Judging tells of errors; that there was no memory beside so many others is told only here.
                        if label in case.ours or isinstance(error, torch.OutOfMemoryError):
                            words = f"{words_of(item.point)}: {label}: {type(error).__name__}: {error}"
                            print(f"ahead: {item.map.name} {words}"[:400].splitlines()[0], flush=True)
                    finally:
                        spent[label] = time.monotonic() - begun
                del inputs
            where = _where(time.monotonic() - start, spent, compiled)
            print(f"ahead: {item.map.name} {words_of(item.point)} ({where})", flush=True)
            # In one piece, as several processes write here.
            with ready.open("a", encoding="utf-8") as file:
                file.write(item.key + "\n")
        with suppress(Exception):
            bench.tidy()


def make_ready(items: Iterable[Item], bench: Bench) -> None:
    """Import what measuring these needs, and touch the device, while there is time that is not for measuring."""
    torch.zeros(1, device=bench.device)
    for item in items:
        with suppress(Exception):
            case = item.map.case(item.point)
            for factory in case.peers.values() if case is not None else ():
                with suppress(Exception):
                    factory()


def run_sweep(
    sweep: Callable[..., Callable[[], object]], bench: Bench, file: Path, *, until: float, batches: int = BATCHES
) -> Sweep:
    """Go through the batch sizes, noting what each first call compiles; the host's time of a second call."""
    first: list[First] = []
    host: list[float] = []
    done = Sweep(0, batches, 0.0, ())
    # Whatever the package imports to make a call is imported before compiling is watched.
    call = sweep(bench.device, 1)
    with compilations() as compiled:
        for batch in range(1, batches + 1):
            if time.monotonic() > until:
                break
            call = call if batch == 1 else sweep(bench.device, batch)
            bench.clock.synchronize()
            before, start = len(compiled), time.monotonic()
            call()
            bench.clock.synchronize()
            if len(compiled) > before:
                first.append(First(batch, round(time.monotonic() - start, 3), tuple(compiled[before:])))
                # At once: compiling may have taken all the time there is.
                mapped.save_sweep(file, Sweep(batch, batches, done.host_us, tuple(first)))
            host.append(host_time_us(call, bench.clock, calls=4, bursts=3))
            done = Sweep(batch, batches, sorted(host)[len(host) // 2], tuple(first))
            if len(compiled) > before or batch % 16 == 0 or batch == batches:
                mapped.save_sweep(file, done)
    mapped.save_sweep(file, done)
    return done


# The command


def main(arguments: Sequence[str] | None = None, *, bench: Bench | None = None) -> int:
    """The command. Returns the exit code. ``bench``: measure on this one, in this process."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m kernel_reference.bench.map", description="Map where speed falls.")
    parser.add_argument("maps", type=Path, help="benchmarks/map.py of a package")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for map.jsonl and the pictures")
    parser.add_argument("--seconds", type=float, default=150.0, metavar="BUDGET", help="in all (default 150)")
    parser.add_argument("--resume", action="store_true", help="keep what map.jsonl holds and measure the rest")
    parser.add_argument("--points", type=int, metavar="N", help="at most so many, of all maps together")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default 0)")
    parser.add_argument("--only", type=re.compile, metavar="REGEX", help="only points whose map and values match")
    parser.add_argument(
        "--ahead", type=int, metavar="N", help="processes that compile ahead (default: most of the cores)"
    )
    parser.add_argument("--compile-only", action="store_true", help="call everything once, and measure nothing")
    parser.add_argument("--no-sweep", action="store_true", help="do not go through batch sizes")
    parser.add_argument("--commit", help="the commit to record where the sources are no git checkout")
    parser.add_argument("--role", choices=("ahead", "sweep", "measure"), help=argparse.SUPPRESS)
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    # Of time.monotonic(), which all processes share: a time left would begin anew with each.
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    until = chosen.until if chosen.until is not None else begun + chosen.seconds - LAST_SECONDS
    try:
        if chosen.role:
            return _play(chosen, bench or CudaBench(), until)
        if bench is not None and chosen.compile_only:
            return _play(_as(chosen, "ahead"), bench, until)
        if bench is not None:
            _prepare(chosen)
            _play(_as(chosen, "measure"), bench, until)
            if not chosen.no_sweep:
                _play(_as(chosen, "sweep"), bench, until)
        else:
            CudaBench()
            _prepare(chosen)
            _direct(chosen, list(sys.argv[1:] if arguments is None else arguments), begun, until)
        return 0 if chosen.compile_only else finish(chosen.out)
    except UnusableError as error:
        print(f"map: {error}", file=sys.stderr)
        return 2


def _as(chosen: argparse.Namespace, role: str) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(chosen), "role": role})


def _prepare(chosen: argparse.Namespace) -> None:
    chosen.out.mkdir(parents=True, exist_ok=True)
    if not chosen.resume:
        for name in (mapped.NAME, mapped.SWEEP_NAME):
            (chosen.out / name).unlink(missing_ok=True)
    for suffix in (".running", READY):
        (chosen.out / mapped.NAME).with_suffix(suffix).unlink(missing_ok=True)


def _play(chosen: argparse.Namespace, bench: Bench, until: float) -> int:
    """What one of the processes does."""
    file = chosen.out / mapped.NAME
    if hasattr(signal, "SIGUSR1") and chosen.until is not None:
        # Whoever ends this process asks first where it is.
        faulthandler.register(signal.SIGUSR1, all_threads=False)
    maps, sweep = load_maps(chosen.maps, bench.device)
    if chosen.role == "sweep":
        if sweep is not None and not (chosen.resume and (chosen.out / mapped.SWEEP_NAME).is_file()):
            print(run_sweep(sweep, bench, chosen.out / mapped.SWEEP_NAME, until=until).words(), flush=True)
        return 0
    items = items_of(maps, seed=chosen.seed, points=chosen.points, only=chosen.only)
    if not items:
        raise UnusableError(f"--only must match a point of {chosen.maps}, got none")
    done = {point.key for point in mapped.load(file)[1]} if file.is_file() else set()
    left = [item for item in items if item.key not in done]
    if chosen.role == "ahead":
        own, of = map(int, chosen.share.split("/"))
        chosen.out.mkdir(parents=True, exist_ok=True)
        call_ahead(left[own::of], bench, file.with_suffix(READY))
        return 0
    if chosen.wait:
        make_ready(left[:16], bench)
        if not sys.stdin.readline():
            return 0
    # Those whose kernels are made come first: compiling takes ten times as long as measuring.
    made = file.with_suffix(READY)
    ready = made.read_text(encoding="utf-8").splitlines() if made.is_file() else []
    left.sort(key=lambda item: item.key not in ready)
    stamp = _stamp(chosen, bench, maps, file)
    for _ in measure_items(left, bench, stamp, file, until=until, number=len(items) - len(left), total=len(items)):
        try:
            bench.clock.synchronize()
        except Exception as error:
            print(f"the device is lost to this process: {error}", flush=True)
            return LOST
    return 0


def _stamp(chosen: argparse.Namespace, bench: Bench, maps: Sequence[Map], file: Path) -> Stamp:
    """From the file's first line, which is written here where there is none, but for the commit. Raises UnusableError
    where the file is of another device.
    """
    commit = chosen.commit or machine.commit_of(chosen.maps.resolve().parent)
    described = bench.machine()
    if file.is_file():
        header, _ = mapped.load(file)
        if described.device != header.device:
            raise UnusableError(f"--resume must go on on the {header.device} of {file}, got {described.device}")
        roofs = Roofs(header.copy_roof_gb_per_s, header.gemm_roof_tflop_per_s)
        return Stamp(header.package, header.package_version, described, roofs, commit, header.date)
    package, version = machine.package_of(chosen.maps)
    roofs = bench.roofs()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    axes = {one.name: {axis.name: list(axis.values) for axis in one.axes} for one in maps}
    common: dict[str, Any] = {**asdict(described), "commit": commit, "date": date, "axes": axes}
    copied, multiplied = roofs.copy_gb_per_s, roofs.gemm_tflop_per_s
    mapped.begin(file, Header(package, version, copy_roof_gb_per_s=copied, gemm_roof_tflop_per_s=multiplied, **common))
    return Stamp(package, version, described, roofs, commit, date)


def finish(out: Path) -> int:
    """Show the slowest points and draw every map; the exit code."""
    file = out / mapped.NAME
    # Of this run's compiling alone: a later run's caches may be others.
    file.with_suffix(READY).unlink(missing_ok=True)
    if not file.is_file():
        raise UnusableError(f"nothing was measured: there is no {file}")
    header, points = mapped.load(file)
    show(mapped.of_points(header, points))
    sweep = mapped.load_sweep(out / mapped.SWEEP_NAME)
    print(sweep.words() if sweep is not None else "no sweep: not asked for, or ended before its first call was done")
    try:
        from kernel_reference.bench.heat import draw
    except ImportError as error:
        print(f"no SVG: {error}")
    else:
        for name in header.axes:
            target = out / f"map-{name}.svg"
            draw(header, [point for point in points if point.map == name], name, target)
            print(f"wrote {target}")
    print(f"wrote {file}: {len(points)} points", flush=True)
    return 1 if any(point.red for point in points) else 0


# The processes


def _direct(chosen: argparse.Namespace, arguments: list[str], begun: float, until: float) -> None:
    """Compile ahead and sweep, then measure, starting anew after each point that ended the process."""
    # So that the processes are ended with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    command = [sys.executable, "-m", __spec__.name if __spec__ else "kernel_reference.bench.map", *arguments]
    # What is done is in the file: every process goes on from it.
    command += [] if chosen.resume else ["--resume"]
    before = until if chosen.compile_only else min(until, begun + AHEAD * chosen.seconds)
    ahead = int((os.cpu_count() or 2) * OF_CORES) if chosen.ahead is None else chosen.ahead
    ahead = min(ahead, MOST_AHEAD)
    roles = [["--role", "ahead", "--share", f"{own}/{ahead}"] for own in range(ahead)]
    with (
        tempfile.TemporaryDirectory() as cache,
        started([*command, "--role", "measure", "--wait", "--until", f"{until:.3f}"]) as measuring,
    ):
        empty = {"TRITON_CACHE_DIR": f"{cache}/triton", "TILELANG_CACHE_DIR": f"{cache}/tilelang"}
        # Torch's threads of so many processes would wait for each other.
        environments: list[dict[str, str]] = [{"OMP_NUM_THREADS": "1"} for _ in roles]
        if not (chosen.no_sweep or chosen.compile_only):
            # It ends by itself a little before it would be ended.
            roles.insert(0, ["--role", "sweep"])
            environments.insert(0, empty)
        commands = [[*command, *role, "--until", f"{before - 2.0:.3f}"] for role in roles]
        codes = run_together(commands, environments, until=before)
        ends = [
            f"{role[-1]} {'had to be ended' if code is None else code}" for role, code in zip(roles, codes, strict=True)
        ]
        measured_from = time.monotonic()
        print(
            f"{measured_from - begun:.1f} s: of compiling ahead and sweep are over ({', '.join(ends)}); now measuring",
            flush=True,
        )
        if chosen.compile_only:
            return
        file = chosen.out / mapped.NAME
        # One point is not to have all the time.
        longest = min(POINT_SECONDS, max(10.0, (until - measured_from) / 2))
        supervise([*command, "--role", "measure"], file, until=until, point_seconds=longest, first=measuring)
    print(f"{time.monotonic() - begun:.1f} s: measured for {time.monotonic() - measured_from:.1f} s", flush=True)


if __name__ == "__main__":
    # As a script this module is __main__, and its Map would not be the Map that a map.py imports.
    from kernel_reference.bench import map as command

    sys.exit(command.main())
