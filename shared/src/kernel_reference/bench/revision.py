"""One revision of a package in a process of its own, timed when told to: see :mod:`.beside`, which starts it as a file.

It imports nothing of ours but the cases, whose revision may be older than this file. Each line of the input is a
command in JSON, each line of the output the answer.
"""

from __future__ import annotations

import gc
import importlib.machinery
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

# Of all sets of inputs together: more than any L2 cache holds.
_SET_BYTES = 256 * 2**20
_MOST_SETS = 16
# Calls that one time is of, so that what a clock cannot tell does not count.
_TIMED_US = 200.0


def load_cases(path: Path, device: torch.device) -> dict[str, Any]:
    """The cases of the file, by name."""
    sys.path.insert(0, str(path.resolve().parent))
    name = "cases_of_a_revision"
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    module = ModuleType(name)
    module.__file__ = str(path)
    # Dataclasses look their module up by name.
    sys.modules[name] = module
    loader.exec_module(module)
    return {case.name: case for case in module.cases(device)}


class Timed:
    """The implementations of one case on rotating inputs, each as a CUDA graph where it can be one."""

    def __init__(self, case: Any, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        count = 1 if device.type == "cpu" else min(_MOST_SETS, max(2, _SET_BYTES // case.bytes_moved))
        self.sets = [case.make_inputs() for _ in range(count)]
        self.calls: dict[str, tuple[Callable[[], object], int]] = {}
        for label, call in case.ours.items():
            self.calls[label] = self._prepared(call)

    def _prepared(self, call: Callable[[Any], object]) -> tuple[Callable[[], object], int]:
        def once() -> None:
            for inputs in self.sets:
                call(inputs)

        once()
        if self.device.type == "cpu":
            return once, 1
        torch.cuda.synchronize(self.device)
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                once()
            run: Callable[[], object] = graph.replay
        except RuntimeError:
            torch.cuda.synchronize(self.device)
            run = once
        return run, max(1, round(_TIMED_US / max(self._time(run, 1), 0.1)))

    def _time(self, run: Callable[[], object], repeats: int) -> float:
        if self.device.type == "cpu":
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e6 / len(self.sets)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1000 / repeats / len(self.sets)

    def time(self, label: str) -> float:
        """Microseconds of a call: the median of five times, after one that is not counted."""
        run, repeats = self.calls[label]
        times = sorted(self._time(run, repeats) for _ in range(6 if self.device.type != "cpu" else 2))[:-1]
        return times[len(times) // 2]


def main(path: Path, device: torch.device) -> None:
    """Answer commands until the input ends."""
    # What compilers and libraries print, in C as well, must not stand among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    cases: dict[str, Any] = {}
    timed: Timed | None = None
    for line in sys.stdin:
        command = json.loads(line)
        answer: Any
        try:
            if command["do"] == "names":
                cases = load_cases(path, device)
                answer = list(cases)
            elif command["do"] == "release":
                timed = None
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                answer = True
            elif command["do"] == "prepare":
                timed = Timed(cases[command["case"]], device)
                answer = list(timed.calls)
            elif timed is not None:
                answer = timed.time(command["label"])
            else:
                answer = {"error": "nothing is prepared"}
        except Exception as error:
            # A revision that cannot run a case is an answer too.
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), torch.device(sys.argv[2]))
