"""A bench without a GPU: results are judged on the CPU, and every call takes the same made-up time.

It shows that cases, maps and demos can be made, run and judged; no time that it gives means anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from kernel_reference.bench import demo
from kernel_reference.bench import map as maps_of
from kernel_reference.bench.case import Case
from kernel_reference.bench.machine import Machine
from kernel_reference.bench.measure import Stamp, measure
from kernel_reference.bench.roofs import Roofs
from kernel_reference.bench.run import load_cases, load_module

# So long that a call is not repeated more than it must be.
CALL_US = 20_000.0


class DryClock:
    """Every call costs ``CALL_US`` of device time, and looking at the host's clock 10 us."""

    # So small that inputs rotate no further than they must.
    l2_bytes = 2**16

    def __init__(self) -> None:
        self.host_us = 0.0

    def free_bytes(self) -> int:
        return 10**9

    def host_seconds(self) -> float:
        self.host_us += 10.0
        return self.host_us * 1e-6

    def synchronize(self) -> None:
        return None

    def sample_us(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        # As each takes the same, one of many is enough.
        for call in dict.fromkeys(calls):
            call()
        return [CALL_US] * len(calls)

    def flush(self) -> None:
        return None

    def capture(self, run: Callable[[], None]) -> Callable[[], object]:
        raise RuntimeError("there are no graphs without a GPU")


class DryBench:
    """The CPU as the device of a run."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.clock = DryClock()

    def roofs(self) -> Roofs:
        return Roofs(4000.0, 800.0)

    def machine(self) -> Machine:
        return Machine("no GPU", "none", "0.0", "none", str(torch.__version__), "none", "3")

    def tidy(self) -> None:
        return None


def rehearse(path: Path, *, judged: int = 1) -> dict[str, int]:
    """Make the case of every point that the maps of ``path`` measure, judge the smallest, and call the sweep once.

    Returns how many points each map has. Raises AssertionError where a point has no case, moves more than a point may,
    or is red.
    """
    bench = DryBench()
    maps, sweep = maps_of.load_maps(path, bench.device)
    stamp = Stamp("dry", "0", bench.machine(), bench.roofs(), None, "")
    counts = {}
    for one in maps:
        items = [maps_of.Item(one, point) for point in one.sample()]
        sizes = []
        for item in items:
            case = one.case(item.point)
            if case is None or case.bytes_moved > maps_of.POINT_BYTES:
                moved = "no case" if case is None else f"{case.bytes_moved} bytes"
                raise AssertionError(f"{one.name} {dict(item.point)}: {moved}")
            sizes.append(_work(case))
        for number in sorted(range(len(items)), key=sizes.__getitem__)[:judged]:
            found = maps_of.measure_one(items[number], bench, stamp)
            if found.red or found.ours is None:
                raise AssertionError(f"{one.name} {dict(items[number].point)}: {found.red}")
        counts[one.name] = len(items)
    if sweep is not None:
        sweep(bench.device, 3)()
    return counts


def rehearse_cases(path: Path, *, judged: int = 1) -> list[str]:
    """Make every case of ``path``, and judge the smallest. Returns all names.

    Raises UnusableError where two have one name, AssertionError where one of ours is red.
    """
    cases = load_cases(path, DryBench.device)
    for case in sorted(cases, key=_work)[:judged]:
        judge(case)
    return [case.name for case in cases]


def judge(case: Case) -> None:
    """Measure ``case`` on the CPU. Raises AssertionError where one of ours is red."""
    bench = DryBench()
    stamp = Stamp("dry", "0", bench.machine(), bench.roofs(), None, "")
    for record in measure(case, bench.device, bench.clock, stamp, seconds=0.0, rounds=1, most_sets=1):
        if record.ours and record.status != "timed":
            raise AssertionError(f"{record.case}, {record.implementation}: {record.note}")


def _work(case: Case) -> int:
    # On a CPU the reference's work counts as much as bytes do.
    return 20 * case.bytes_moved + case.flops


class _OnCpu(TorchFunctionMode):
    """Whatever torch is asked to do on a GPU it does on the CPU."""

    def __torch_function__(self, function: Any, types: Any, given: Any = (), options: Any = None) -> Any:
        given = tuple(map(_on_cpu, given))
        return function(*given, **{name: _on_cpu(value) for name, value in (options or {}).items()})


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


def rehearse_demo(path: Path, **sizes: int) -> list[demo.Row]:
    """The rows that ``real_size`` of a package's demo.py has on a GPU, by the CPU's implementations, each call once.

    ``sizes``: constants of demo.py that are replaced by smaller ones. Raises AttributeError for one that it lacks.
    """
    example = load_module(path, "real_size(device)")
    changes: dict[str, Any] = {"median_ms": _called_once, **sizes}
    with (
        mock.patch.multiple(example, **changes),
        mock.patch.object(demo, "median_ms", _called_once),
        mock.patch.object(torch.cuda, "get_device_name", return_value="a GPU"),
        _OnCpu(),
    ):
        return list(example.real_size(torch.device("cuda")))


def _called_once(call: Callable[[], object], *rest: Any, **more: Any) -> float:
    call()
    return CALL_US / 1e3
