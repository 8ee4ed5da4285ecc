"""Time what the ranks of a group do together beside what one GPU does alone.

::

    torchrun --nproc-per-node 2 packages/<name>/benchmarks/parallel.py --out DIR     # two GPUs, nccl
    torchrun --nproc-per-node 2 packages/<name>/benchmarks/parallel.py --dry         # a CPU, small; times mean nothing
    python -m kernel_reference.bench.ranks --table DIR/parallel.jsonl                # markdown

Such a file ends in ``main(cases)``. Calls of a case are checked against the one called ``ONE``, then timed in turns; a
call's time is that of the slowest rank, from a moment when all were ready. Its efficiency is the time of ``ONE``, by
the world, by its own. A CUDA graph has several calls, each behind a flush of the L2 cache, and what so many
flushes take is taken off: a graph's launch does not count, as it hardly does in a model of many layers.

What a call raises is a line of the record, and the others go on. Ranks tell each other on the host, by gloo, before any
waits for its device. Where a device does not come to its end, for a peer that failed on the way, the processes
end, and what was measured stays; ``--resume`` goes on without the call that was under way.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed

from kernel_reference.bench import machine
from kernel_reference.bench.judged import error_by_largest
from kernel_reference.bench.ranked import LINKS, ONE, Failed, Kept, Line, Timed, read, tables
from kernel_reference.collectives import all_gather
from kernel_reference.errors import fail

Tensor = torch.Tensor
T = TypeVar("T")

_FLUSHED_BYTES = 2**28
# Of results of 16 bits, merged from partial ones of 16 bits, by the largest element.
_WORST = 0.03
# What NCCL, gloo and a device have to come to an end; kernels are compiled meanwhile.
_DEADLINE_S = 60.0
_GRACE_S = 5.0
# Cycles that a device waits while the host launches all that is timed: half a millisecond for a graph, six for calls of
# a few hundred launches.
_GRAPH_CYCLES, _AHEAD_CYCLES = 10**6, 12 * 10**6
# Calls in a graph: so many, or as many as take this long.
_CALLS, _CALLS_US = 8, 2000.0
_FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class Call:
    """An implementation: ``run()`` returns this rank's result, which is ``of_one(result of ONE)`` within tolerance.

    share: of how many ranks one does this, alone; it is timed and not compared, for what larger worlds would give.
    checked: whether it is compared. part: it is a step, or all of it on one GPU by
    another kernel, and has no efficiency. sends: the bytes that a rank of a world sends, by the world.
    """

    run: Callable[[], Tensor]
    of_one: Callable[[Tensor], Tensor] = lambda whole: whole
    share: int = 0
    checked: bool = True
    part: bool = False
    sends: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RanksCase:
    """One shape.

    make: ``make(device, rank, world)`` gives the calls by label, with inputs of their own; one is ``ONE``.
    graph: whether calls are captured in CUDA graphs, as engines decode. ahead: whether they are launched while the
    device is busy, as a model's layers are; else the device is idle, and what the host takes counts.
    efficiency: a label's target, where one GPU takes at least ``target_from_us``.
    us_at_most: the most microseconds that one may take.
    axis: the number of the shape that is a length, for tables.
    """

    name: str
    shape: Mapping[str, int | str]
    make: Callable[[torch.device, int, int], Mapping[str, Call]]
    graph: bool = False
    ahead: bool = False
    efficiency: Mapping[str, float] = field(default_factory=dict)
    us_at_most: Mapping[str, float] = field(default_factory=dict)
    target_from_us: float = 0.0
    axis: str = ""


class Limits(NamedTuple):
    """rounds: at most. seconds: that the turns of a case may take, from three rounds on. skipped: labels left out."""

    rounds: int
    seconds: float = float("inf")
    skipped: Collection[str] = ()


def memory_bytes(dry: bool) -> int:
    """What the device has, to size cases by; of a dry run a gigabyte."""
    return 2**30 if dry else int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def measure(
    case: RanksCase, device: torch.device, limits: Limits | int, *, host: Any = None,
    note: Callable[[str], None] = lambda label: None,
) -> list[Line]:  # fmt: skip
    """Check the calls of a case, and time them in turns. The same on every rank.

    Args:
        limits: or the rounds alone.
        host: a group of all ranks over gloo, None being the default one.
        note: is told what is under way: a label, or "" for all of them.

    Raises ValueError without a call ``ONE``, TimeoutError where a device does not come to its end.
    """
    limits = Limits(limits) if isinstance(limits, int) else limits
    rank, world = distributed.get_rank(), distributed.get_world_size()
    together = partial(_together, device=device, host=host)
    broken = partial(Failed, case.name, case.shape, world=world)
    note("")
    calls, failed = together(lambda: dict(case.make(device, rank, world)))
    if calls is None:
        return [broken("", failed=failed)]
    if ONE not in calls:
        fail("make", f"a function that gives a call {ONE!r}", sorted(calls))
    calls = {label: call for label, call in calls.items() if label not in limits.skipped}
    lines: list[Line] = []
    errors: dict[str, float] = {}
    runs: dict[str, Callable[[], object]] = {}
    whole: Tensor | None = None
    for label in sorted(calls, key=lambda label: label != ONE):
        note(label)
        result, failed = together(calls[label].run)
        if result is not None:
            whole = result if label == ONE else whole
            worst, failed = together(partial(_worst_of, calls[label], result, whole))
            if worst is not None:
                errors[label] = worst
        if label not in errors:
            lines.append(broken(label, failed=failed))
        if ONE not in errors:
            return lines
        del result
    whole = None
    flush = _flush_of(device)
    numbers = dict.fromkeys(errors, 0)
    for label in errors:
        note(label)
        runs[label] = calls[label].run
        if case.graph and device.type == "cuda":
            numbers[label] = min(_CALLS, max(1, int(_CALLS_US / _slowest(calls[label].run, device, _AHEAD_CYCLES))))
            captured, failed = together(partial(_captured, flush, calls[label].run, numbers[label], device))
            if captured is None:
                lines.append(broken(label, failed=f"capture: {failed}"))
                del runs[label]
            else:
                runs[label] = captured
    note("")
    if ONE not in runs:
        return lines
    flushes = {number: f"{number} flushes" for number in {numbers[label] for label in runs} - {0}}
    for number, label in flushes.items():
        runs[label] = _captured(flush, lambda: None, number, device)
    cycles = _GRAPH_CYCLES if case.graph else _AHEAD_CYCLES if case.ahead else 0
    times = _turns(runs, flush, cycles, device, limits)
    for label, number in numbers.items():
        if label in runs and number:
            beside = statistics.median(times[flushes[number]])
            times[label] = [(us - beside) / number for us in times[label]]
    one = statistics.median(times[ONE])
    lines += [
        replace(_timed(case, label, calls[label], times[label], one, errors[label], world), calls=numbers[label])
        for label in calls
        if label in runs
    ]
    return lines


def _flush_of(device: torch.device) -> Callable[[], object]:
    """What empties the L2 cache: read and not written, as a call would wait for lines that are to be written back."""
    return torch.zeros(_FLUSHED_BYTES // 4 if device.type == "cuda" else 1, device=device).sum


def _worst_of(call: Call, result: Tensor, whole: Tensor | None) -> float:
    if whole is None or call.share or not call.checked:
        return 0.0
    worst = error_by_largest(result, call.of_one(whole))
    if not worst < _WORST:
        raise ValueError(f"off by {worst:.3g} of the largest element of one GPU's")
    return worst


def _together(act: Callable[[], T], *, device: torch.device, host: Any) -> tuple[T | None, str]:
    """What it gives, or None and what the first rank of those that failed said."""
    result, said = None, ""
    try:
        result = act()
    except TimeoutError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        traceback.print_exc(limit=-6)
    of_ranks: list[str] = [""] * distributed.get_world_size()
    distributed.all_gather_object(of_ranks, said, group=host)
    said = next((f"rank {rank}: {words}" for rank, words in enumerate(of_ranks) if words), "")
    if said:
        result = None
        # The traceback's frames held what a case is made of.
        gc.collect()
    # A rank that went on where another failed may wait for it for ever.
    _finish(device, _GRACE_S if said else _DEADLINE_S)
    if said and device.type == "cuda":
        torch.cuda.empty_cache()
    return result, said


def _finish(device: torch.device, seconds: float = _DEADLINE_S) -> None:
    """Wait for the device; no longer than so many seconds, as a kernel that waits for a peer waits for ever."""
    if device.type != "cuda":
        return
    done = torch.cuda.Event()
    done.record()
    until = time.monotonic() + seconds
    while not done.query():
        if time.monotonic() > until:
            raise TimeoutError(f"the device was not done after {seconds:g} s")
        time.sleep(2e-5)


def _captured(
    flush: Callable[[], object], run: Callable[[], object], number: int, device: torch.device
) -> Callable[[], object]:
    """A graph of ``number`` times both."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # On the stream of the capture, so that what is kept by stream is there before.
    with torch.cuda.stream(stream):
        flush()
        for _ in range(2):
            run()
        _finish(device)
    graph = torch.cuda.CUDAGraph()
    # NCCL's thread asks for events meanwhile, which the mode "global" forbids all threads.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(number):
            flush()
            kept = run()
    # The result lives as long as the graph that writes it.
    return lambda kept=kept: graph.replay()  # type: ignore[misc]


def _turns(
    runs: Mapping[str, Callable[[], object]], flush: Callable[[], object], cycles: int, device: torch.device,
    limits: Limits,
) -> dict[str, list[float]]:  # fmt: skip
    """The times of each, in turns. A first turn, of which nothing is kept, says how many there is time for."""
    times: dict[str, list[float]] = {label: [] for label in runs}
    labels = list(runs)
    turn, rounds = 0, limits.rounds
    while turn <= rounds:
        for label in labels[turn % len(labels) :] + labels[: turn % len(labels)]:
            flush()
            times[label].append(_slowest(runs[label], device, cycles))
        if turn == 0:
            # As slow on every rank: they count alike.
            taken = sum(times[label].pop() for label in labels) / 1e6
            rounds = max(min(_FEWEST_ROUNDS, rounds), min(rounds, int(min(limits.seconds / max(taken, 1e-9), rounds))))
        turn += 1
    return times


def _slowest(run: Callable[[], object], device: torch.device, cycles: int) -> float:
    """Microseconds from when all ranks are ready until the last is done."""
    together = torch.zeros(1, device=device)
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        _finish(device)
        if cycles:
            # What is timed is queued before it begins: graphs of 20 us, and not how long a host takes to launch them.
            torch.cuda._sleep(cycles)
        # On the stream: the ranks' clocks start at the end of one collective.
        distributed.all_reduce(together)
        begin.record()
        run()
        end.record()
        _finish(device)
        own = 1000 * begin.elapsed_time(end)
    else:
        distributed.all_reduce(together)
        start = time.perf_counter()
        run()
        own = 1e6 * (time.perf_counter() - start)
    together.fill_(own)
    distributed.all_reduce(together, distributed.ReduceOp.MAX)
    return float(together)


def _timed(case: RanksCase, label: str, call: Call, times: list[float], one: float, error: float, world: int) -> Timed:
    median = statistics.median(times)
    low, *_, high = statistics.quantiles(times, n=5, method="inclusive") if len(times) > 1 else (median, median)
    efficiency, beyond = one / world / median, median - one / world
    targets, met = [], True
    if label in case.efficiency and one >= case.target_from_us:
        targets.append(f"efficiency >= {case.efficiency[label]:g}")
        met &= efficiency >= case.efficiency[label]
    if label in case.us_at_most:
        targets.append(f"at most {case.us_at_most[label]:g} us")
        met &= median <= case.us_at_most[label]
    return Timed(
        case.name, case.shape, label, world, median, low, high, efficiency, beyond, error, case.graph, len(times),
        ", ".join(targets), met, case.axis, call.share, call.part, call.sends, case.ahead,
    )  # fmt: skip


def links(dry: bool) -> Iterable[RanksCase]:
    """How fast ranks exchange: latency in a graph and outside, and the rate of large pieces."""

    def make(size: int, device: torch.device, rank: int, world: int) -> Mapping[str, Call]:
        x = torch.ones(size // 4, device=device)
        gathered = Call(lambda: all_gather(x, None), sends={world: (world - 1) * size})
        return {ONE: Call(lambda: x.expand(world, -1).contiguous()), "all_gather": gathered}

    for size, graph in ((2**13, True), (2**13, False), (2**16 if dry else 2**28, False)):
        yield RanksCase(LINKS, {"bytes": size, "graph": str(graph)}, partial(make, size), graph)


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """The command's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder for parallel.jsonl")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=10.0, help="for the turns of a case, from three rounds on")
    parser.add_argument("--fast", action="store_true", help="10 rounds, 2 seconds")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case later")
    parser.add_argument("--resume", action="store_true", help="go on with a record, less what was under way")
    parser.add_argument("--commit", help="the commit to record where the sources are no git checkout")
    parser.add_argument("--dry", action="store_true", help="small cases on a CPU, to see that all of it runs")
    options = parser.parse_args(arguments)
    if options.fast:
        options.rounds, options.seconds = min(options.rounds, 10), min(options.seconds, 2.0)
    return options


def main(cases: Callable[[bool], Iterable[RanksCase]]) -> None:
    """The command of a package's ``benchmarks/parallel.py``; ``cases(dry)`` are its cases, with ``dry`` small ones.

    They come in their order: what is worth most first, as time may end.
    """
    options = options_of(sys.argv[1:])
    local = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
    device = torch.device("cpu") if options.dry else torch.device("cuda", local)
    if sys.platform == "linux":
        # A machine's own name may lead nowhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    deadline = timedelta(seconds=_DEADLINE_S)
    if options.dry:
        distributed.init_process_group("gloo", timeout=deadline)
    else:
        torch.cuda.set_device(device)
        # With its device, so that NCCL connects now and knows which GPU is whose.
        distributed.init_process_group("nccl", timeout=deadline, device_id=device)
    # Ranks compile for as long as each needs, and meet there.
    host = None if options.dry else distributed.new_group(backend="gloo", timeout=3 * deadline)
    # A capture collects garbage: not through all modules each time.
    gc.collect()
    gc.freeze()
    try:
        run_cases(cases, options, device, host)
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not by the interpreter's end, which waits for a device that waits for a peer.
        os._exit(1)
    distributed.destroy_process_group()


def run_cases(
    cases: Callable[[bool], Iterable[RanksCase]], options: argparse.Namespace, device: torch.device, host: Any
) -> None:
    """Measure them and keep the record; see :func:`main`."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    kept = None
    if rank == 0 and options.out is not None:
        described: dict[str, Any] = {"device": "cpu"} if options.dry else asdict(machine.describe(device))
        commit = options.commit or machine.commit_of(Path(sys.argv[0]).resolve().parent)
        kept = Kept(options.out, {"machine": described, "commit": commit}, options.resume)
    began = time.time() if kept is None else kept.begun
    chosen = [case for case in cases(options.dry) if options.only in case.name]
    for case in [*links(options.dry), *chosen]:
        done: list[Line] = []
        if kept is not None:
            done = [line for line in kept.lines if (line.case, dict(line.shape)) == (case.name, dict(case.shape))]
        late = time.time() - began > 60 * options.minutes
        skipped = [line.implementation for line in done if isinstance(line, Failed)]
        is_done = any(isinstance(line, Timed) for line in done) or bool({"", ONE} & {*skipped})
        told: list[Any] = [(late, is_done, skipped)]
        distributed.broadcast_object_list(told, src=0, group=host)
        late, is_done, skipped = told[0]
        if late:
            if rank == 0:
                print(f"{case.name}: not begun, {options.minutes:g} minutes are over", flush=True)
            break
        if is_done:
            continue

        def note(label: str, case: RanksCase = case) -> None:
            if kept is not None:
                kept.note(case.name, case.shape, label, world)

        rounds = min(2, options.rounds) if options.dry else options.rounds
        lines = measure(case, device, Limits(rounds, options.seconds, skipped), host=host, note=note)
        for line in lines if rank == 0 else []:
            print(line.words(), flush=True)
        if kept is not None:
            kept.add(lines)
        gc.collect()
        if not options.dry:
            torch.cuda.empty_cache()
    if kept is not None:
        kept.close()


def _print_tables() -> None:
    parser = argparse.ArgumentParser(description="Markdown of a record.")
    parser.add_argument("--table", type=Path, required=True, metavar="PARALLEL.JSONL")
    print(tables(read(parser.parse_args().table)), end="")


if __name__ == "__main__":
    _print_tables()
