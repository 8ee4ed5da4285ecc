"""One case measured: every implementation checked first, then those that passed timed beside each other."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kernel_reference.bench.case import COPY, Call, Case, Requirement
from kernel_reference.bench.machine import Machine
from kernel_reference.bench.record import Record, Status
from kernel_reference.bench.roofs import Roofs
from kernel_reference.bench.timers import Clock, Timing, rotation_count, tensor_bytes, time_interleaved

# All rotating sets together; more would only shorten the list of machines that can repeat a measurement.
MEMORY_BYTES = 20 * 10**9


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
) -> list[Record]:
    """Check every implementation of ``case``, then time those that passed, in turns, on the same rotating inputs.

    seconds: device time for each implementation. memory_bytes: for all sets of inputs together. Returns one record an
    implementation, in the order of ``case.labels()``. What raises becomes a red record, never an exception.
    """
    torch.manual_seed(0)
    verdicts: dict[str, _Verdict] = {}
    timings: dict[str, Timing] = {}
    sets = 0
    try:
        first = case.make_inputs()
        for label, call in case.ours.items():
            verdicts[label] = _judge(case, call, first, clock)
        for label, factory in case.peers.items():
            verdicts[label] = _judge_peer(case, factory, first, clock)
        passed = {label: verdict.call for label, verdict in verdicts.items() if verdict.call is not None}
        if passed:
            sets = _count_sets(case, first, clock, memory_bytes)
            inputs = [first, *(case.make_inputs() for _ in range(sets - 1))]
            calls = {label: _over(call, inputs) for label, call in passed.items()}
            if case.copy:
                calls[COPY] = _copy_of(case.bytes_moved, sets, device)
                verdicts[COPY] = _Verdict("timed", error=0.0)
            clock.synchronize()
            timings = time_interleaved(calls, sets, clock, seconds=seconds, rounds=rounds)
    except Exception as error:
        for label in case.labels():
            if label not in verdicts or verdicts[label].status == "timed":
                verdicts[label] = _Verdict("red", note=_in_words(error))
    return _records(case, verdicts, timings, sets, stamp)


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
        # Both copies before the first call: its outputs, poisoned and freed, are then what the allocator gives the
        # second call, and an element that it leaves unwritten is NaN and not the right answer of an earlier run.
        used, fresh = copy.deepcopy(inputs), copy.deepcopy(inputs)
        outputs = call(used)
        _poison(outputs)
        del outputs
        outputs = call(fresh)
        clock.synchronize()
        error = float(case.check(outputs, inputs))
        clock.synchronize()
    except Exception as failure:
        return _Verdict("red", note=_in_words(failure))
    finite = error if math.isfinite(error) else None
    if not error <= case.tolerance:
        return _Verdict("red", error=finite, note=f"error {error:g} > {case.tolerance:g}")
    return _Verdict("timed", call, finite)


def _poison(outputs: Any) -> None:
    if isinstance(outputs, torch.Tensor):
        # 0xFF in every byte is NaN in every float format and -1 in every signed integer.
        torch.empty(0, dtype=torch.uint8, device=outputs.device).set_(outputs.untyped_storage()).fill_(0xFF)
    elif isinstance(outputs, Mapping):
        _poison(tuple(outputs.values()))
    elif isinstance(outputs, list | tuple):
        for part in outputs:
            _poison(part)


def _count_sets(case: Case, inputs: Any, clock: Clock, memory_bytes: int) -> int:
    held = tensor_bytes(inputs)
    touched = min(held, case.bytes_moved) or case.bytes_moved
    # Besides its inputs a set costs the copy's two buffers, and outputs that events and graphs each keep.
    room = min(memory_bytes, clock.free_bytes() * 2 // 5)
    return rotation_count(touched, held + 3 * case.bytes_moved, clock.l2_bytes, room)


def _over(call: Call, inputs: Sequence[Any]) -> Callable[[int], object]:
    return lambda turn: call(inputs[turn])


def _copy_of(bytes_moved: int, sets: int, device: torch.device) -> Callable[[int], object]:
    """torch's copy that reads half of ``bytes_moved`` and writes the other half, with buffers for every set."""
    half = max(1, bytes_moved // 2)
    sources = [torch.randint(0, 256, (half,), dtype=torch.uint8, device=device) for _ in range(sets)]
    destinations = [torch.empty_like(source) for source in sources]
    return lambda turn: destinations[turn].copy_(sources[turn])


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def _records(
    case: Case, verdicts: Mapping[str, _Verdict], timings: Mapping[str, Timing], sets: int, stamp: Stamp
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
            )
        )
    return records


def _requirements(owed: Iterable[Requirement], timings: Mapping[str, Timing]) -> tuple[str | None, bool | None]:
    words: list[str] = []
    met: list[bool | None] = []
    for requirement in owed:
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
