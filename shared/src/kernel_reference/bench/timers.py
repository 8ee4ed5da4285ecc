"""Times of several implementations, taken in turns, on rotating inputs, in CUDA graphs where launches would dominate.

What decides (how many input sets, graph or events, whose turn it is, the statistics) is plain Python over a ``Clock``;
``CudaClock`` is the only part that needs a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from kernel_reference.bench.record import Method
from kernel_reference.checks import fail

# Below this an event round a single call times the launch gaps as much as the call.
GRAPH_BELOW_US = 50.0
# A call this long is neither bound by the host nor worth capturing once for every input set.
EVENTS_FROM_US = 1000.0
# One replay is long enough to drown the launch of the graph (a few us), short enough to give hundreds of samples.
REPLAY_US = 2000.0
MAX_CALLS_PER_GRAPH = 2048
# Sets of inputs that together are this many times the cache leave nothing in it: it does not evict in order.
ROTATED = 3
# Sets of 2.2 MB, a layer's state of one sequence, fill the cache so: what is subtracted for flushing it is less exact.
# More make a call's host time longer, 22 us for 19 with 160: a server's tensors are fewer.
MOST_SETS = 96
# Times that reading through the cache is repeated to know how long it takes.
_FLUSHES = 16
# The launch queue holds 1024 kernels; beyond it the host waits and host times would be device times.
MAX_CALLS_PER_SAMPLE = 256


class Clock(Protocol):
    """The device, as the timers see it."""

    @property
    def l2_bytes(self) -> int:
        """Size of the last-level cache in bytes."""

    def free_bytes(self) -> int:
        """Device memory that can still be allocated."""

    def host_seconds(self) -> float:
        """A steady host clock."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def sample_us(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """Launch ``calls`` back to back and return each one's time on the device in microseconds."""

    def flush(self) -> None:
        """Launch what leaves nothing of earlier calls in the last-level cache."""

    def capture(self, run: Callable[[], None]) -> Callable[[], object]:
        """Record what ``run`` launches into a graph and return its replay. Raises where it cannot be captured."""


@dataclass(frozen=True)
class Timing:
    """Device time of one call (median, 20 % and 80 % quantiles) and median host time of a call, in microseconds.

    ``host_us`` is None for calls of 1 ms and more, which hide any host time. ``samples`` counts pairs of events.
    ``note`` says why a call that wanted a graph was timed by events.
    """

    median_us: float
    p20_us: float
    p80_us: float
    method: Method
    host_us: float | None
    samples: int
    note: str = ""


def tensors_of(inputs: Any) -> Iterator[torch.Tensor]:
    """All distinct tensors inside ``inputs``: nested dicts, sequences and dataclasses, always in the same order."""
    seen: set[int] = set()

    def walk(value: Any) -> Iterator[torch.Tensor]:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
            return
        parts: Sequence[Any] = ()
        if isinstance(value, Mapping):
            parts = tuple(value.values())
        elif isinstance(value, list | tuple):
            parts = value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
        for part in parts:
            yield from walk(part)

    return walk(inputs)


def tensor_bytes(inputs: Any) -> int:
    """Bytes of all distinct tensors inside ``inputs``, see :func:`tensors_of`."""
    # An expanded tensor has fewer bytes than elements say.
    return sum(min(x.numel() * x.element_size(), x.untyped_storage().nbytes()) for x in tensors_of(inputs))


def rotation_count(
    touched_bytes: int, held_bytes: int, l2_bytes: int, memory_bytes: int, *, most: int = MOST_SETS
) -> int:
    """How many sets of inputs must rotate for each call to find a cold L2.

    touched_bytes: read by one call. The sets together pass ``ROTATED`` times the cache.
    held_bytes: device memory that one more set costs; ``memory_bytes`` is what all may cost.
    At least 2, so that a call never reads what the one before it read; at most ``most``: where so many do not fill the
    cache, it must be flushed, see :func:`time_interleaved`.
    """
    if touched_bytes <= 0:
        fail("touched_bytes", "positive", touched_bytes)
    wanted = ROTATED * l2_bytes // touched_bytes + 1
    affordable = memory_bytes // max(held_bytes, 1)
    return max(2, min(wanted, affordable, most))


class Rotation:
    """Calls an implementation on the next set of inputs, as given by ``turns``.

    Each set's outputs live until that set's next turn. Otherwise the allocator would hand the same output block to
    every call, and writes would stay in the L2 cache.
    """

    def __init__(self, call: Callable[[int], object], sets: int, turns: Iterator[int]) -> None:
        self._call, self._sets, self._turns = call, sets, turns
        self._kept: list[object] = [None] * sets

    def __call__(self) -> None:
        turn = next(self._turns) % self._sets
        self._kept[turn] = self._call(turn)

    def release(self) -> None:
        """Forget the outputs, so that the next implementation can have their memory."""
        self._kept = [None] * self._sets


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, 20 % and 80 % quantile."""
    if not values:
        fail("values", "at least one time", values)
    if len(values) == 1:
        return values[0], values[0], values[0]
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return statistics.median(values), fifths[0], fifths[3]


def host_time_us(call: Callable[[], object], clock: Clock, *, calls: int = 32, bursts: int = 15) -> float:
    """Median host time of one ``call`` in microseconds, the device never waited for.

    ``calls`` follow each other from an idle device, few enough that the launch queue never fills; ``bursts`` such runs.
    """
    times = []
    for _ in range(bursts):
        clock.synchronize()
        start = clock.host_seconds()
        for _ in range(calls):
            call()
        times.append((clock.host_seconds() - start) / calls * 1e6)
    clock.synchronize()
    return statistics.median(times)


@dataclass
class _Entry:
    """One implementation on its way through the rounds."""

    rotation: Rotation
    estimate_us: float
    host_us: float | None
    step: Callable[[], object]
    method: Method = "events"
    calls_per_step: int = 1
    step_us: float = 0.0
    # What a step takes besides its calls.
    extra_us: float = 0.0
    note: str = ""
    times: list[float] = dataclasses.field(default_factory=list)


def time_interleaved(
    implementations: Mapping[str, Callable[[int], object]],
    sets: int,
    clock: Clock,
    *,
    seconds: float = 0.4,
    rounds: int = 10,
    flush: bool = False,
    calls_per_graph: int = MAX_CALLS_PER_GRAPH,
    in_graph: bool = False,
) -> dict[str, Timing]:
    """Time ``implementations`` (each a function of the index of an input set) beside each other.

    They take turns in ``rounds`` rounds, the first of a round changing, so that drift of clocks and heat meets all
    alike; ``seconds`` is the device time spent on each. Where one of them takes less than 50 us, or launching takes
    longer than half of what events show, all that take less than 1 ms are captured into CUDA graphs that run over all
    sets: a ratio needs both sides timed alike. What cannot be captured is timed by events, and its ``method`` says so.

    flush: the sets do not fill the L2 cache, so it is flushed: before each call that events time, and in a graph once a
    cycle over the sets, each of which is met once there. The time that this takes is measured apart and subtracted.
    calls_per_graph: the most; capturing takes the host as long as the calls do. in_graph: they are captured however
    long they take, if less than 1 ms.
    """
    turns = itertools.count()
    entries = {}
    for label, call in implementations.items():
        entries[label] = _estimate(Rotation(call, sets, turns), clock, flush)
    if in_graph or any(_launch_bound(entry) for entry in entries.values()):
        flush_us = _flush_us(clock) if flush else None
        for label, entry in entries.items():
            if entry.estimate_us < EVENTS_FROM_US:
                _use_graph(entry, implementations[label], sets, clock, flush_us, calls_per_graph)
    order = list(entries)
    for number in range(rounds):
        shift = number % len(order) if order else 0
        for label in order[shift:] + order[:shift]:
            _take_turn(entries[label], number, seconds, rounds, clock, flush)
    timings = {}
    for label, entry in entries.items():
        median, p20, p80 = spread(entry.times)
        timings[label] = Timing(median, p20, p80, entry.method, entry.host_us, len(entry.times), entry.note)
    return timings


def _sampled(step: Callable[[], object], count: int, clock: Clock, flush: bool) -> list[float]:
    if not flush:
        return clock.sample_us([step] * count)
    return clock.sample_us([clock.flush, step] * count)[1::2]


def _flush_us(clock: Clock) -> float | None:
    """How long a flush takes in a graph, where it can be captured."""

    def run() -> None:
        for _ in range(_FLUSHES):
            clock.flush()

    try:
        return statistics.median(clock.sample_us([clock.capture(run)] * 8)[1:]) / _FLUSHES
    except Exception:
        return None


def _estimate(rotation: Rotation, clock: Clock, flush: bool) -> _Entry:
    rotation()
    clock.synchronize()
    # The least: what holds up the host makes a call longer, and one of 10 us must not be taken for one of 1 ms.
    estimate = min(_sampled(rotation, 4, clock, flush)[1:])
    host = None
    if estimate < EVENTS_FROM_US:
        calls = max(4, min(32, int(5000 / max(estimate, 1.0))))
        host = host_time_us(rotation, clock, calls=calls)
    rotation.release()
    return _Entry(rotation, estimate, host, rotation, step_us=estimate)


def _launch_bound(entry: _Entry) -> bool:
    return entry.estimate_us < GRAPH_BELOW_US or (entry.host_us is not None and entry.estimate_us < 2 * entry.host_us)


def _use_graph(
    entry: _Entry, call: Callable[[int], object], sets: int, clock: Clock, flush_us: float | None, most_calls: int
) -> None:
    # The estimate may be the host's time, so the length of one cycle over the sets is read from a graph of one cycle.
    cycles = 1
    for _ in range(2):
        try:
            replay = clock.capture(_cycles(call, sets, cycles, clock.flush if flush_us else None))
            step_us = statistics.median(clock.sample_us([replay] * 4)[1:])
        except Exception as error:
            # A peer is what it is: one that cannot be captured is timed as it would run, and the record says why.
            entry.note = f"not captured into a CUDA graph: {error}".splitlines()[0]
            return
        entry.step, entry.method, entry.calls_per_step, entry.step_us = replay, "graph", cycles * sets, step_us
        entry.extra_us = cycles * (flush_us or 0.0)
        wanted = min(math.ceil(REPLAY_US / max(step_us, 1e-3)), most_calls // sets)
        if wanted <= cycles:
            return
        cycles = wanted


def _cycles(
    call: Callable[[int], object], sets: int, cycles: int, flush: Callable[[], None] | None
) -> Callable[[], None]:
    def run() -> None:
        rotation = Rotation(call, sets, itertools.count())
        for number in range(cycles * sets):
            if flush is not None and number % sets == 0:
                flush()
            rotation()

    return run


def _take_turn(entry: _Entry, number: int, seconds: float, rounds: int, clock: Clock, flush: bool) -> None:
    affordable = max(3, int(3 * seconds * 1e6 / max(entry.step_us, 1e-3)))
    if number % math.ceil(rounds / min(rounds, affordable)):
        return
    steps = max(1, min(MAX_CALLS_PER_SAMPLE, int(seconds * 1e6 / rounds / max(entry.step_us, 1e-3))))
    # The first step after another implementation's turn pays for the idle gap between them.
    warm = 1 if entry.step_us < 10_000 else 0
    times = _sampled(entry.step, warm + steps, clock, flush and entry.method == "events")[warm:]
    entry.times.extend(max(us - entry.extra_us, 1e-3) / entry.calls_per_step for us in times)
    entry.rotation.release()


class CudaClock:
    """The Clock of a CUDA device: events on the current stream, and graphs captured on a side stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(self._device)
        self._side = torch.cuda.Stream(self._device)
        self._read: torch.Tensor | None = None

    @property
    def l2_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self._device).L2_cache_size)

    def free_bytes(self) -> int:
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + cached

    def host_seconds(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def sample_us(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        new_event = partial(torch.cuda.Event, enable_timing=True)
        events = [new_event() for _ in range(len(calls) + 1)]
        events[0].record()
        for call, event in zip(calls, events[1:], strict=True):
            call()
            event.record()
        self.synchronize()
        return [before.elapsed_time(after) * 1e3 for before, after in itertools.pairwise(events)]

    def flush(self) -> None:
        # Read and not written: lines that are no one's to write back cost the next call nothing.
        if self._read is None:
            self._read = torch.zeros(ROTATED * self.l2_bytes // 4, device=self._device)
        self._read.sum()

    def capture(self, run: Callable[[], None]) -> Callable[[], object]:
        # By hand and not through torch.cuda.graph: that one empties the allocator's cache before every capture, and
        # leaves its side stream current when a capture fails.
        graph = torch.cuda.CUDAGraph()
        # A pool of its own: one kept across cases is dead once its last graph is, and capturing into it fails.
        pool = torch.cuda.graph_pool_handle()
        self.synchronize()
        try:
            with torch.cuda.stream(self._side):
                graph.capture_begin(pool=pool)
                try:
                    run()
                finally:
                    graph.capture_end()
        except Exception:
            self._recover_from_failed_capture(pool)
            raise
        self.synchronize()
        return graph.replay

    def _recover_from_failed_capture(self, pool: Any) -> None:
        # Up to torch 2.11 a failing capture_end leaves the allocator believing that the capture goes on
        # (pytorch#180395), and the next empty_cache dies of an internal assertion. Later ones have ended it and raise.
        end: Callable[[int, Any], None] | None = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            with suppress(RuntimeError):
                end(self._device.index, pool)
        self.synchronize()
