"""The JSONL record of a measurement: one line a case and implementation, with everything needed to repeat it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["timed", "absent", "red"]
Method = Literal["graph", "events"]


@dataclass(frozen=True)
class Record:
    """One implementation of one case, as measured.

    status: ``timed``; ``absent`` (a peer that could not be imported) or ``red`` (raised, or failed the check), with the
        reason in ``note`` and no times.
    median_us, p20_us, p80_us: time of one call on the device in microseconds; host_us: median host time of a call.
    method: ``graph`` (replays of a CUDA graph of many calls) or ``events`` (events round single calls).
    input_sets: how many sets of inputs rotated.
    bytes, flops: of the case; gb_per_s (1e9) and tflop_per_s (1e12) follow from them and the median.
    fraction_of_copy_roof: gb_per_s / copy_roof_gb_per_s, both measured in this run; likewise the bf16 GEMM roof.
    ratio_to_baseline: median / the baseline's median: above 1 is slower.
    requirement, requirement_met: the target, in words, and whether it was met; None where there was none, or
        nothing could be said.
    device ... cuda: the machine; commit: of the sources, None if unknown; date: UTC, ISO 8601.
    l2: how the cache was cold at each call: ``rotated`` (the sets of inputs together are several times its size) or
        ``flushed`` (they are not, and it was read through between calls, outside of what was timed). None in records
        of before this was said: there the smallest cases found their inputs in the cache.
    """

    package: str
    package_version: str
    case: str
    shape: Mapping[str, int | str]
    implementation: str
    ours: bool
    status: Status
    note: str
    median_us: float | None
    p20_us: float | None
    p80_us: float | None
    host_us: float | None
    method: Method | None
    input_sets: int | None
    bytes: int
    flops: int
    gb_per_s: float | None
    tflop_per_s: float | None
    copy_roof_gb_per_s: float
    gemm_roof_tflop_per_s: float
    fraction_of_copy_roof: float | None
    fraction_of_gemm_roof: float | None
    baseline: str
    ratio_to_baseline: float | None
    error: float | None
    requirement: str | None
    requirement_met: bool | None
    device: str
    driver: str
    capability: str
    cuda: str
    torch: str
    triton: str
    python: str
    commit: str | None
    date: str
    l2: Literal["rotated", "flushed"] | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies this measurement between two runs."""
        return self.package, self.case, self.implementation


# A number without these cannot be repeated, so it is not a result.
MACHINE = ("device", "driver", "capability", "cuda", "torch", "triton", "python")
_FIELDS = typing.get_type_hints(Record)


def save(records: Iterable[Record], path: str | os.PathLike[str]) -> None:
    """Write ``records`` to ``path`` as JSON lines, creating its folder. The file appears whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(dataclasses.asdict(r), allow_nan=False) + "\n" for r in records)
    beside = path.with_name(path.name + ".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def load(path: str | os.PathLike[str]) -> list[Record]:
    """Read the records of ``path``.

    Raises ValueError naming file, line and field where a line is no record, or lacks machine, driver or a version.
    """
    records = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                records.append(_parse(json.loads(line, parse_constant=_refuse_constant)))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    return records


def _refuse_constant(name: str) -> float:
    raise ValueError(f"a number must be finite, got {name}")


def _parse(line: Any) -> Record:
    if not isinstance(line, dict):
        raise ValueError(f"a record must be a JSON object, got {type(line).__name__}")
    nameless = [name for name in MACHINE if not (isinstance(line.get(name), str) and line[name].strip())]
    if nameless:
        raise ValueError(f"a record must name its machine, driver and versions, got none for {', '.join(nameless)}")
    line.setdefault("l2", None)
    missing = [name for name in _FIELDS if name not in line]
    if missing:
        raise ValueError(f"a record must have every field, got none for {', '.join(missing)}")
    unknown = sorted(set(line) - set(_FIELDS))
    if unknown:
        raise ValueError(f"a record must have known fields only, got {', '.join(unknown)}")
    for name, hint in _FIELDS.items():
        if not _fits(line[name], hint):
            raise ValueError(f"{name} must be {getattr(hint, '__name__', hint)}, got {line[name]!r}")
    if line["status"] == "timed" and not all(_positive(line[name]) for name in ("median_us", "p20_us", "p80_us")):
        raise ValueError("median_us, p20_us and p80_us must be positive numbers in a timed record")
    return Record(**line)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _fits(value: Any, hint: Any) -> bool:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in options
    if origin is Mapping or origin is dict or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return isinstance(value, dict) and all(
            isinstance(v, int | str) and not isinstance(v, bool) for v in value.values()
        )
    if options:
        return any(_fits(value, option) for option in options)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
