"""Time what the ranks of a group do together beside what one GPU does alone.

::

    torchrun --nproc-per-node 2 packages/<name>/benchmarks/parallel.py --out DIR     # two GPUs, nccl
    torchrun --nproc-per-node 2 packages/<name>/benchmarks/parallel.py --dry         # a CPU, small; times mean nothing

Such a file ends in ``main(cases)``. Calls of a case are checked against the one called ``ONE``, then timed in turns; a
call's time is that of the slowest rank, from a moment when all were ready. Its efficiency is the time of ``ONE``, by
the world, by its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import distributed

from kernel_reference.bench import machine
from kernel_reference.errors import fail

Tensor = torch.Tensor

ONE = "one GPU"
"""Label of the plain call over everything, which each rank makes by itself."""

_FLUSHED_BYTES = 2**28
# Of results of 16 bits, merged from partial ones of 16 bits, by the largest element.
_WORST = 0.03


@dataclass(frozen=True)
class Call:
    """An implementation: ``run()`` returns this rank's result, which is ``of_one(result of ONE)`` within tolerance."""

    run: Callable[[], Tensor]
    of_one: Callable[[Tensor], Tensor] = lambda whole: whole


@dataclass(frozen=True)
class RanksCase:
    """One shape.

    make: ``make(device, rank, world)`` gives the calls by label, with inputs of their own; one is ``ONE``.
    graph: whether calls are captured in CUDA graphs, as engines decode.
    efficiency: what a label owes. us_at_most: the most microseconds that one may take.
    """

    name: str
    shape: Mapping[str, int | str]
    make: Callable[[torch.device, int, int], Mapping[str, Call]]
    graph: bool = False
    efficiency: Mapping[str, float] = field(default_factory=dict)
    us_at_most: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Timed:
    """A line of the record: times in microseconds, of the slowest rank."""

    case: str
    shape: Mapping[str, int | str]
    implementation: str
    world: int
    median_us: float
    p20_us: float
    p80_us: float
    efficiency: float
    beyond_us: float
    error: float
    graph: bool
    owed: str = ""
    met: bool = True


def measure(case: RanksCase, device: torch.device, rounds: int) -> list[Timed]:
    """Check the calls of a case, and time them in turns. The same on every rank.

    Raises ValueError without a call ``ONE``, RuntimeError where a result is not that of one GPU.
    """
    rank, world = distributed.get_rank(), distributed.get_world_size()
    calls = case.make(device, rank, world)
    if ONE not in calls:
        fail("make", f"a function that gives a call {ONE!r}", sorted(calls))
    whole = calls[ONE].run()
    errors = {label: _error(call.run(), call.of_one(whole), case, label) for label, call in calls.items()}
    del whole
    runs = {
        label: _captured(call.run) if case.graph and device.type == "cuda" else call.run
        for label, call in calls.items()
    }
    flushed = torch.empty(_FLUSHED_BYTES if device.type == "cuda" else 1, dtype=torch.uint8, device=device)
    times: dict[str, list[float]] = {label: [] for label in runs}
    for turn in range(rounds):
        labels = list(runs)
        for label in labels[turn % len(labels) :] + labels[: turn % len(labels)]:
            flushed.zero_()
            times[label].append(_slowest(runs[label], device))
    one = statistics.median(times[ONE])
    return [_timed(case, label, times[label], one, errors[label], world) for label in runs]


def _error(got: Tensor, wanted: Tensor, case: RanksCase, label: str) -> float:
    worst = torch.zeros(1, device=got.device)
    if got.numel():
        worst[0] = (got.float() - wanted.float()).abs().max() / wanted.float().abs().max().clamp(min=1e-9)
    distributed.all_reduce(worst, distributed.ReduceOp.MAX)
    if not float(worst) < _WORST:
        raise RuntimeError(f"{case.name}, {label}: off by {float(worst):.3g} of the largest element of one GPU's")
    return float(worst)


def _captured(run: Callable[[], Tensor]) -> Callable[[], object]:
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    # The result lives as long as the graph that writes it.
    return lambda kept=kept: graph.replay()  # type: ignore[misc]


def _slowest(run: Callable[[], object], device: torch.device) -> float:
    """Microseconds from when all ranks are ready until the last is done."""
    together = torch.zeros(1, device=device)
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        # On the stream: the ranks' clocks start at the end of one collective.
        distributed.all_reduce(together)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        own = 1000 * begin.elapsed_time(end)
    else:
        distributed.all_reduce(together)
        start = time.perf_counter()
        run()
        own = 1e6 * (time.perf_counter() - start)
    together.fill_(own)
    distributed.all_reduce(together, distributed.ReduceOp.MAX)
    return float(together)


def _timed(case: RanksCase, label: str, times: list[float], one: float, error: float, world: int) -> Timed:
    median = statistics.median(times)
    low, *_, high = statistics.quantiles(times, n=5) if len(times) > 1 else (median, median)
    efficiency, beyond = one / world / median, median - one / world
    owed, met = [], True
    if label in case.efficiency:
        owed.append(f"efficiency >= {case.efficiency[label]:g}")
        met &= efficiency >= case.efficiency[label]
    if label in case.us_at_most:
        owed.append(f"at most {case.us_at_most[label]:g} us")
        met &= median <= case.us_at_most[label]
    return Timed(
        case.name, case.shape, label, world, median, low, high, efficiency, beyond, error, case.graph, ", ".join(owed),
        met,
    )  # fmt: skip


def main(cases: Callable[[bool], Iterable[RanksCase]]) -> None:
    """The command of a package's ``benchmarks/parallel.py``; ``cases(dry)`` are its cases, with ``dry`` small ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a folder for parallel.jsonl")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--dry", action="store_true", help="small cases on a CPU, to see that all of it runs")
    options = parser.parse_args()
    distributed.init_process_group("gloo" if options.dry else "nccl")
    rank = distributed.get_rank()
    device = torch.device("cpu") if options.dry else torch.device("cuda", rank)
    if not options.dry:
        torch.cuda.set_device(device)
    found: list[Timed] = []
    for case in cases(options.dry):
        if options.only in case.name:
            found += (lines := measure(case, device, 2 if options.dry else options.rounds))
            for line in lines if rank == 0 else []:
                verdict = f"{line.owed}: {'met' if line.met else 'MISSED'}" if line.owed else ""
                print(
                    f"{line.case:44} {line.implementation:32} {line.median_us:10.1f} us {line.efficiency:6.2f}"
                    f" {line.beyond_us:9.1f} us  {verdict}", flush=True,
                )  # fmt: skip
            if not options.dry:
                torch.cuda.empty_cache()
    if rank == 0 and options.out is not None and not options.dry:
        options.out.mkdir(parents=True, exist_ok=True)
        described = asdict(machine.describe(device))
        with (options.out / "parallel.jsonl").open("w") as file:
            file.writelines(json.dumps({**asdict(line), "machine": described}) + "\n" for line in found)
    distributed.destroy_process_group()
