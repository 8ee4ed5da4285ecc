"""Search launch plans on a GPU, beside those that a package makes.

A package's ``benchmarks/tune.py`` says of each of its problems which plan is in use, where searches begin and what
calls with a plan are, and leaves the rest to ``main``::

    def problems(device: torch.device) -> Iterable[Named[MyPlan]]: ...

    if __name__ == "__main__":
        sys.exit(main(__doc__, problems))

From each beginning one group of a plan's numbers after the other is tried, until none gets better. Plans that fail, or
whose results are not those of the plan in use, have no time and a reason.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from kernel_reference.bench.timers import Clock, CudaClock, rotation_count, tensor_bytes, time_interleaved

Plan = TypeVar("Plan")
Changes = list[dict[str, Any]]

# All rotating inputs together.
_MEMORY_BYTES = 20e9
# Plans that are timed beside each other: captured into graphs, each keeps the outputs of every set of inputs.
TOGETHER = 8


def changes(**values: Sequence[Any]) -> Changes:
    """Every combination of these values of a plan's numbers."""
    return [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]


def of_rows(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference over a row's largest value, [rows, ..., elements]; infinite where there is a NaN."""
    worst = 0.0
    for a, b in zip(result.split(1024), wanted.split(1024), strict=True):
        # Some rows at a time: in float32 all together may not fit.
        difference, size = (a.float() - b.float()).abs().amax(-1), b.float().abs().amax(-1)
        apart = float((difference / size.clamp(min=1e-30)).max())
        worst = max(worst, apart if apart == apart else float("inf"))
    return worst


def of_heads(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference over a head's largest value, heads in dimension 1; infinite where there is a NaN."""
    worst = 0.0
    for head in range(result.shape[1]):
        # One by one: in float32 all together may not fit.
        a, b = result[:, head].float(), wanted[:, head].float()
        apart = float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
        worst = max(worst, apart if apart == apart else float("inf"))
    return worst


def input_sets(first: Any, touched_bytes: int, output_bytes: int, clock: Clock) -> int:
    """How many sets like this one find the cache cold in turns, of which each plan keeps its outputs."""
    room = int(min(_MEMORY_BYTES, clock.free_bytes() * 2 / 5))
    held = tensor_bytes(first) + TOGETHER * output_bytes
    return rotation_count(min(tensor_bytes(first), touched_bytes), held, clock.l2_bytes, room)


@dataclass
class Problem(Generic[Plan]):
    """What a plan is searched for.

    ``used``: the package's plan. ``searches``: where to begin, and groups of changes; those of one group depend on each
    other, so all of them are tried. ``call``: with a plan and the number of a set of inputs, of which there are
    ``sets``. ``results``: of a plan, on inputs that are the same each time, to be compared by ``apart_by``; they are
    overwritten. ``forget``: drop what calls left behind.
    """

    used: Plan
    searches: Sequence[tuple[Plan, list[Changes]]]
    sets: int
    call: Callable[[Plan, int], object]
    results: Callable[[Plan], list[torch.Tensor]]
    apart_by: Callable[[torch.Tensor, torch.Tensor], float]
    apart_at_most: float
    forget: Callable[[], None] = lambda: None


class Measured(Protocol):
    """What a benchmark times, as far as a search needs it."""

    @property
    def bytes_moved(self) -> int:
        """Of a call."""

    def make_inputs(self) -> Any:
        """One set, whose ``q`` is as large as the output."""

    def call(self, inputs: Any, *, plan: Any) -> Any:
        """Attention with this plan; the output is the result's ``out``."""


def of_attention(
    measured: Measured, first: Any, used: Plan, searches: Sequence[tuple[Plan, list[Changes]]], clock: Clock,
    apart_at_most: float,
) -> Problem[Plan]:  # fmt: skip
    """The problem of attention whose calls change no input, with more sets of inputs like the first."""
    sets = input_sets(first, measured.bytes_moved, first.q.nbytes, clock)
    inputs = [first, *(measured.make_inputs() for _ in range(sets - 1))]
    return Problem(
        used=used,
        searches=searches,
        sets=sets,
        call=lambda plan, turn: measured.call(inputs[turn], plan=plan),
        results=lambda plan: [measured.call(first, plan=plan).out],
        apart_by=of_rows,
        apart_at_most=apart_at_most,
    )


@dataclass(frozen=True)
class Named(Generic[Plan]):
    """A problem whose inputs are made when its turn comes."""

    name: str
    prepare: Callable[[Clock], Problem[Plan]]


@dataclass
class Search(Generic[Plan]):
    """The time of every plan tried, or why it has none."""

    problem: Problem[Plan]
    clock: Clock
    seconds: float
    times_us: dict[Plan, float] = field(default_factory=dict)
    skipped: dict[Plan, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._wanted = self._results(self.problem.used)

    def run(self) -> Plan:
        """The best plan; its time and that of the one in use are taken beside each other."""
        used = self.problem.used
        best = used
        for start, groups in self.problem.searches:
            best = min((best, self._descend(start, groups)), key=self._time)
        self.times_us.update(self._timed(list(dict.fromkeys([used, best]))))
        return min((used, best), key=self._time)

    def _time(self, plan: Plan) -> float:
        return self.times_us.get(plan, float("inf"))

    def _descend(self, best: Plan, groups: list[Changes]) -> Plan:
        self._try([best])
        while True:
            before = best
            for group in groups:
                candidates: list[Plan] = [replace(best, **change) for change in group]  # type: ignore[type-var]
                self._try(candidates)
                best = min((best, *candidates), key=self._time)
            # All that a single group has was tried.
            if best == before or len(groups) == 1:
                return best

    def _try(self, plans: Sequence[Plan]) -> None:
        """Time the new ones among these that work and give the results of the plan in use."""
        new = [plan for plan in dict.fromkeys(plans) if plan not in self.times_us and plan not in self.skipped]
        fit = [plan for plan in new if self._fits(plan)]
        for first in range(0, len(fit), TOGETHER):
            self.times_us.update(self._timed(fit[first : first + TOGETHER]))

    def _fits(self, plan: Plan) -> bool:
        try:
            results = self._results(plan)
            apart = max(map(self.problem.apart_by, results, self._wanted), default=0.0)
            reason = "" if apart <= self.problem.apart_at_most else "wrong: not the results of the plan in use"
            for result in results:
                # The next plan is likely to get this memory: what it leaves unwritten must not be right.
                result.fill_(float("nan"))
        except Exception as error:
            # A broken device raises here, and ends the search.
            self.clock.synchronize()
            reason = _in_words(error)
        if reason:
            self.skipped[plan] = reason
        return not reason

    def _results(self, plan: Plan) -> list[torch.Tensor]:
        results = self.problem.results(plan)
        self.clock.synchronize()
        return results

    def _timed(self, plans: Sequence[Plan]) -> dict[Plan, float]:
        calls = {str(place): self._over_sets(plan) for place, plan in enumerate(plans)}
        timings = time_interleaved(calls, self.problem.sets, self.clock, seconds=self.seconds, rounds=3)
        self.problem.forget()
        return {plan: timings[str(place)].median_us for place, plan in enumerate(plans)}

    def _over_sets(self, plan: Plan) -> Callable[[int], object]:
        return lambda turn: self.problem.call(plan, turn)


def _in_words(error: Exception) -> str:
    """Why a plan is left out, in a few words that are the same for the same reason."""
    # A launch makes an error of the plan of Triton's: see bindings.bind.
    shortage = next((found for found in (error, error.__context__) if type(found).__name__ == "OutOfResources"), None)
    text = " ".join(str(shortage or error).split())
    if shortage is not None:
        return f"does not fit: {text.partition(',')[0]}"
    if isinstance(error, ValueError) and text.startswith("plan must be"):
        return "refused: it does not cover the problem"
    return f"fails: {type(error).__name__}: {text}"[:200]


def _described(plan: Any) -> dict[str, Any]:
    return {"kind": type(plan).__name__, **asdict(plan)}


def _shown(plan: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in asdict(plan).items())


def report(search: Search[Plan], best: Plan) -> Iterator[str]:
    """Lines for a reader: the plan in use and the best, and how many were left out, and why."""
    used = search.problem.used
    yield f"  in use {search.times_us[used]:9.2f} us  {_shown(used)}"
    yield f"  best   {search.times_us[best]:9.2f} us  {'the same' if best == used else _shown(best)}"
    for reason, count in Counter(search.skipped.values()).most_common():
        yield f"  {count} of {len(search.times_us) + len(search.skipped)} plans skipped: {reason}"


def record(name: str, search: Search[Plan], best: Plan) -> dict[str, Any]:
    """Every plan's time, the best first, as JSON has it."""
    used = search.problem.used
    times = sorted(search.times_us.items(), key=lambda item: item[1])
    return {
        "problem": name,
        "used": {"us": search.times_us[used], **_described(used)},
        "best": {"us": search.times_us[best], **_described(best)},
        "plans": [{"us": us, **_described(plan)} for plan, us in times],
        "skipped": [{"why": reason, **_described(plan)} for plan, reason in search.skipped.items()],
    }


def main(doc: str | None, problems: Callable[[torch.device], Iterable[Named[Plan]]]) -> int:
    """The command. Exit code 0: all searched; 2: nothing could be."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write every plan's time as JSON")
    parser.add_argument("--seconds", type=float, default=0.05, help="device time a plan")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX", help="only such problems")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("tune: searching plans needs a GPU, and torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    chosen = [problem for problem in problems(device) if arguments.only.search(problem.name)]
    if not chosen:
        print(f"tune: no problem is called like {arguments.only.pattern!r}", file=sys.stderr)
        return 2
    search_all(chosen, CudaClock(device), arguments.seconds, arguments.out)
    return 0


def search_all(problems: Sequence[Named[Plan]], clock: Clock, seconds: float, out: Path | None = None) -> None:
    """Search one problem after the other, and say and write what is found as soon as it is."""
    found = []
    for number, problem in enumerate(problems, start=1):
        print(f"[{number}/{len(problems)}] {problem.name}", flush=True)
        try:
            search = Search(problem.prepare(clock), clock, seconds)
            best = search.run()
        except torch.OutOfMemoryError as error:
            print(f"  left out: {str(error).partition('.')[0]}", flush=True)
            continue
        print(*report(search, best), sep="\n", flush=True)
        found.append(record(problem.name, search, best))
        if out is not None:
            # After each problem: what is found is kept if the search is stopped.
            out.write_text(json.dumps(found, indent=1) + "\n")
        del search
        torch.cuda.empty_cache()
