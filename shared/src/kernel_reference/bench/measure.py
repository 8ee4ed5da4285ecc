"""One case measured: every implementation checked first, those that passed timed beside each other, then checked again.

Timing calls an implementation thousands of times on the same few sets of inputs. One that knows a set again by its
addresses and returns what it gave before passes the first check and looks a hundred times as fast as an honest one; so
after the last round new values are written over a set, at the same addresses, and the result must be theirs.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kernel_reference.bench.case import COPY, Call, Case, Requirement
from kernel_reference.bench.machine import Machine
from kernel_reference.bench.record import Record, Status
from kernel_reference.bench.roofs import Roofs
from kernel_reference.bench.timers import (
    MAX_CALLS_PER_GRAPH,
    MOST_SETS,
    ROTATED,
    Clock,
    Timing,
    rotation_count,
    tensor_bytes,
    tensors_of,
    time_interleaved,
)

# All rotating sets together; more would only shorten the list of machines that can repeat a measurement.
MEMORY_BYTES = 20 * 10**9
# A set that is this many times the L2 cache, and has no memory for another beside it, is read cold by itself.
ALONE = 50
# Times its bytes that must be free to copy a set once more: an implementation's own memory is as much again.
FRESH_ROOM = 2
# Of the most sets this makes the longest graph that is worth capturing.
CYCLES_PER_GRAPH = MAX_CALLS_PER_GRAPH // MOST_SETS


@dataclass(frozen=True)
class Stamp:
    """What every record of one run shares."""

    package: str
    package_version: str
    machine: Machine
    roofs: Roofs
    commit: str | None
    date: str


@dataclass(frozen=True)
class _Verdict:
    """Whether an implementation may be timed: its callable and error, or why not."""

    status: Status
    call: Call | None = None
    error: float | None = None
    note: str = ""


def measure(
    case: Case,
    device: torch.device,
    clock: Clock,
    stamp: Stamp,
    *,
    seconds: float = 0.4,
    rounds: int = 10,
    memory_bytes: int = MEMORY_BYTES,
    most_sets: int = MOST_SETS,
    again: bool = True,
    spent: dict[str, float] | None = None,
) -> list[Record]:
    """Check every implementation of ``case``, then time those that passed, in turns, on the same rotating inputs.

    seconds: device time for each implementation. memory_bytes: for all sets of inputs together; most_sets: of them.
    again: check once more after the timing. spent: takes the seconds by what they were spent on.
    Returns one record an implementation, in the order of ``case.labels()``.
    What raises becomes a red record, never an exception.
    """
    torch.manual_seed(0)
    verdicts: dict[str, _Verdict] = {}
    timings: dict[str, Timing] = {}
    sets, flushed = 0, False
    spent = {} if spent is None else spent
    try:
        with _counted(spent, "inputs"):
            first = case.make_inputs()
        for label, call in case.ours.items():
            with _counted(spent, f"judging {label}"):
                verdicts[label] = _judge(case, call, first, clock)
        for label, factory in case.peers.items():
            with _counted(spent, f"judging {label}"):
                verdicts[label] = _judge_peer(case, factory, first, clock)
        passed = {label: verdict.call for label, verdict in verdicts.items() if verdict.call is not None}
        if passed:
            sets = _count_sets(case, first, clock, memory_bytes, most_sets)
            with _counted(spent, "inputs"):
                inputs = [first, *(case.make_inputs() for _ in range(sets - 1))]
            calls = {label: _over(call, inputs) for label, call in passed.items()}
            if case.copy:
                calls[COPY] = _copy_of(case.bytes_moved, sets, device)
                verdicts[COPY] = _Verdict("timed", error=0.0)
            clock.synchronize()
            flushed = sets * _touched(case, first) < ROTATED * clock.l2_bytes
            how: dict[str, Any] = {"flush": flushed, "calls_per_graph": most_sets * CYCLES_PER_GRAPH}
            how["in_graph"] = case.in_graph
            with _counted(spent, "timing"):
                timings = time_interleaved(calls, sets, clock, seconds=seconds, rounds=rounds, **how)
            if again:
                del calls
                last = inputs[-1]
                inputs.clear()
                for label, failed in _judge_again(case, passed, last, timings, clock).items():
                    verdicts[label] = failed
                    del timings[label]
    except Exception as error:
        for label in case.labels():
            if label not in verdicts or verdicts[label].status == "timed":
                verdicts[label] = _Verdict("red", note=_in_words(error))
    return _records(case, verdicts, timings, sets, flushed, stamp)


@contextmanager
def _counted(spent: dict[str, float], what: str) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    finally:
        spent[what] = spent.get(what, 0.0) + time.monotonic() - start


def _judge_peer(case: Case, factory: Callable[[], Call], inputs: Any, clock: Clock) -> _Verdict:
    try:
        call = factory()
    except ImportError as error:
        return _Verdict("absent", note=_in_words(error))
    except Exception as error:
        return _Verdict("red", note=_in_words(error))
    return _judge(case, call, inputs, clock)


def _judge(case: Case, call: Call, inputs: Any, clock: Clock) -> _Verdict:
    try:
        used = copy.deepcopy(inputs)
        # Both copies before the first call: its outputs, poisoned and freed, are then what the allocator gives the
        # second call, and an element that it leaves unwritten is NaN and not the right answer of an earlier run.
        fresh = copy.deepcopy(inputs) if tensor_bytes(inputs) * FRESH_ROOM < clock.free_bytes() else None
        outputs = call(used)
        _poison(outputs)
        del outputs
        if fresh is None:
            # Two copies leave too little memory: the same values again, over whatever the call has changed.
            fresh = copy.deepcopy(inputs, write_over(used, inputs))
        return _verdict_on(case, call(fresh), inputs, call, clock)
    except Exception as failure:
        return _Verdict("red", note=_in_words(failure))


def _verdict_on(case: Case, outputs: Any, inputs: Any, call: Call, clock: Clock) -> _Verdict:
    clock.synchronize()
    error = float(case.check(outputs, inputs))
    clock.synchronize()
    finite = error if math.isfinite(error) else None
    if not error <= case.tolerance:
        return _Verdict("red", error=finite, note=f"error {error:g} > {case.tolerance:g}")
    return _Verdict("timed", call, finite)


def _judge_again(
    case: Case, calls: Mapping[str, Call], used: Any, timings: Mapping[str, Timing], clock: Clock
) -> dict[str, _Verdict]:
    """Which implementations fail on new values at the addresses of a set that they have been timed on."""
    values = case.make_inputs()
    failed = {}
    for label, call in calls.items():
        verdict = _judge_refilled(case, call, used, values, clock, captured=timings[label].method == "graph")
        if verdict.call is None:
            note = f"passed, and failed on new values at old addresses after it was timed: {verdict.note}"
            failed[label] = _Verdict("red", error=verdict.error, note=note[:500])
    return failed


def _judge_refilled(case: Case, call: Call, used: Any, values: Any, clock: Clock, *, captured: bool) -> _Verdict:
    try:
        inputs = copy.deepcopy(values, write_over(used, values))
        verdict = _verdict_on(case, call(inputs), values, call, clock)
        if verdict.call is not None and captured:
            # As it was timed: in a graph other things may happen than in a plain call.
            kept: list[Any] = []
            replay = clock.capture(lambda: kept.append(call(inputs)))
            _poison(kept)
            write_over(used, values)
            replay()
            verdict = _verdict_on(case, kept[0], values, call, clock)
    except Exception as failure:
        return _Verdict("red", note=_in_words(failure))
    return verdict


def write_over(used: Any, values: Any) -> dict[int, Any]:
    """Give the tensors of ``used`` those values, and return what makes ``deepcopy`` put them in place of the new ones.

    A tensor whose like ``used`` does not have is left out, and so copied.
    """
    memo: dict[int, Any] = {}
    for old, new in zip(tensors_of(used), tensors_of(values), strict=False):
        alike = (old.shape, old.stride(), old.dtype, old.device) == (new.shape, new.stride(), new.dtype, new.device)
        if alike and not any(step == 0 and size > 1 for step, size in zip(old.stride(), old.shape, strict=True)):
            # Not through autograd's count of changes: a graph of an earlier turn may hang on these, and is done.
            old.data.copy_(new.data)
            memo[id(new)] = old
    return memo


def _poison(outputs: Any) -> None:
    if isinstance(outputs, torch.Tensor):
        # 0xFF in every byte is NaN in every float format and -1 in every signed integer.
        torch.empty(0, dtype=torch.uint8, device=outputs.device).set_(outputs.untyped_storage()).fill_(0xFF)
    elif isinstance(outputs, Mapping):
        _poison(tuple(outputs.values()))
    elif isinstance(outputs, list | tuple):
        for part in outputs:
            _poison(part)


def _touched(case: Case, inputs: Any) -> int:
    """Bytes of a set that a call reads."""
    return min(tensor_bytes(inputs), case.bytes_moved) or case.bytes_moved


def _count_sets(case: Case, inputs: Any, clock: Clock, memory_bytes: int, most: int) -> int:
    # Besides its inputs a set costs the copy's two buffers, and outputs that events and graphs each keep.
    held = tensor_bytes(inputs) + 3 * case.bytes_moved
    free = clock.free_bytes()
    if 2 * held - tensor_bytes(inputs) > free and _touched(case, inputs) > ALONE * clock.l2_bytes:
        return 1
    room = min(memory_bytes, free * 2 // 5)
    return rotation_count(_touched(case, inputs), held, clock.l2_bytes, room, most=most)


def _over(call: Call, inputs: Sequence[Any]) -> Callable[[int], object]:
    return lambda turn: call(inputs[turn])


def _copy_of(bytes_moved: int, sets: int, device: torch.device) -> Callable[[int], object]:
    """torch's copy that reads half of ``bytes_moved`` and writes the other half, with buffers for every set.

    While a graph of them is alive, each kernel of the other graphs takes an H100 0.2 to 0.4 us longer (designs.jsonl of
    gdn-split): figures of a few us are that much too large, of all that are timed beside each other.
    """
    half = max(1, bytes_moved // 2)
    sources = [torch.randint(0, 256, (half,), dtype=torch.uint8, device=device) for _ in range(sets)]
    destinations = [torch.empty_like(source) for source in sources]
    return lambda turn: destinations[turn].copy_(sources[turn])


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def _records(
    case: Case, verdicts: Mapping[str, _Verdict], timings: Mapping[str, Timing], sets: int, flushed: bool, stamp: Stamp
) -> list[Record]:
    records = []
    roofs, base = stamp.roofs, timings.get(case.baseline)
    untimed = _Verdict("absent", note="no implementation passed its check")
    for label in case.labels():
        verdict, timing = verdicts.get(label, untimed), timings.get(label)
        median = timing.median_us if timing else None
        gb = case.bytes_moved / median * 1e-3 if median else None
        tflop = case.flops / median * 1e-6 if median else None
        requirement, met = _requirements((r for r in case.requirements if r.implementation == label), timings)
        records.append(
            Record(
                package=stamp.package,
                package_version=stamp.package_version,
                case=case.name,
                shape=dict(case.shape),
                implementation=label,
                ours=label in case.ours,
                status=verdict.status,
                note=verdict.note or (timing.note if timing else ""),
                median_us=median,
                p20_us=timing.p20_us if timing else None,
                p80_us=timing.p80_us if timing else None,
                host_us=timing.host_us if timing else None,
                method=timing.method if timing else None,
                input_sets=sets if timing else None,
                bytes=case.bytes_moved,
                flops=case.flops,
                gb_per_s=gb,
                tflop_per_s=tflop,
                copy_roof_gb_per_s=roofs.copy_gb_per_s,
                gemm_roof_tflop_per_s=roofs.gemm_tflop_per_s,
                fraction_of_copy_roof=gb / roofs.copy_gb_per_s if gb is not None else None,
                fraction_of_gemm_roof=tflop / roofs.gemm_tflop_per_s if tflop is not None else None,
                baseline=case.baseline,
                ratio_to_baseline=median / base.median_us if median and base else None,
                error=verdict.error,
                requirement=requirement,
                requirement_met=met,
                **asdict(stamp.machine),
                commit=stamp.commit,
                date=stamp.date,
                l2=("flushed" if flushed else "rotated") if timing else None,
            )
        )
    return records


def _requirements(targets: Iterable[Requirement], timings: Mapping[str, Timing]) -> tuple[str | None, bool | None]:
    words: list[str] = []
    met: list[bool | None] = []
    for requirement in targets:
        mine = _quantity(timings.get(requirement.implementation), requirement)
        # A bound in microseconds stands alone.
        other = mine if requirement.us_at_most is not None else _quantity(timings.get(requirement.against), requirement)
        if mine is None or other is None:
            words.append(requirement.describe())
            met.append(None)
        else:
            words.append(f"{requirement.describe()} ({requirement.ratio(mine, other):.3f})")
            met.append(requirement.is_met(mine, other))
    if not words:
        return None, None
    return "; ".join(words), False if False in met else None if None in met else True


def _quantity(timing: Timing | None, requirement: Requirement) -> float | None:
    if timing is None:
        return None
    return timing.host_us if requirement.quantity == "host" else timing.median_us
