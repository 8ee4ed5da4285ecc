"""Search the launch plans on this GPU, beside those that `lightning_attn.plan` makes; its thresholds come from here.

``python packages/lightning-attn/benchmarks/tune.py [--only 'decode.*TP8'] [--out plans.json]`` prints, for each problem
of `cases.py`, the plan in use and the best. Of prefill the kernel for sm_90 and the portable one are searched each, one
group of a plan's numbers after the other until none gets better; of decoding all plans are timed.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import cases
import torch

from kernel_reference.bench.timers import Clock, CudaClock, rotation_count, tensor_bytes, time_interleaved
from lightning_attn import launch
from lightning_attn.plan import DecodePlan, DeviceLimits, Heads, PrefillPlan, plan_decode, plan_prefill

Plan = PrefillPlan | DecodePlan
Changes = list[dict[str, Any]]

# All rotating inputs together.
MEMORY_BYTES = 20e9
# Two plans round in different places: twice what the benchmark has seen either be off by, of a head's largest value.
APART_AT_MOST = 0.012
# Plans that are timed beside each other: captured into graphs, each keeps the outputs of every set of inputs.
TOGETHER = 8
SEGMENTS = (0, 512, 1024, 2048, 4096, 8192)


def in_use(problem: cases.Problem, heads: Heads, limits: DeviceLimits) -> Plan:
    """The plan that the package makes for the benchmark's inputs: in bfloat16, packed, aligned."""
    if problem.kind in ("prefill", "varlen", "backward"):
        return plan_prefill(heads, True, limits, hopper=True)
    return plan_decode(heads, limits)


def heads_of(problem: cases.Problem, inputs: Any) -> Heads:
    # [batch, heads, tokens, elements] where sequences have one length, else [..., heads, elements].
    heads = 1 if problem.kind in ("prefill", "backward") else -2
    return Heads(inputs.q.shape[heads], inputs.v.shape[heads], inputs.q.shape[-1], inputs.v.shape[-1])


def searches(used: Plan, heads: Heads, limits: DeviceLimits) -> list[tuple[Plan, list[Changes]]]:
    """Where to begin, and groups of changes: those of one group depend on each other, so all of them are tried."""
    if isinstance(used, DecodePlan):
        waits = (False, True) if limits.dependent_launch else (False,)
        return [(used, [changes(block_e=(16, 32, 64, 128), num_warps=(1, 2, 4, 8), dependent_launch=waits)])]
    found: list[tuple[Plan, list[Changes]]] = []
    if used.hopper:
        found.append((used, [changes(num_stages=(2, 3, 4, 5, 6)), changes(segment=SEGMENTS)]))
    portable = plan_prefill(heads, True, limits, hopper=False)
    tiles = changes(chunk=(16, 32, 64), block_e=(16, 32, 64, 128), block_d=(32, 64, 128))
    found.append((portable, [tiles, changes(num_warps=(2, 4, 8), num_stages=(1, 2, 3)), changes(segment=SEGMENTS)]))
    return found


def changes(**values: Sequence[Any]) -> Changes:
    """Every combination of these values of a plan's numbers."""
    return [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]


@dataclass
class Search:
    """One problem: its plan in use, and the time of every plan tried, or why it has none."""

    problem: cases.Problem
    clock: Clock
    limits: DeviceLimits
    seconds: float
    times_us: dict[Plan, float] = field(default_factory=dict)
    skipped: dict[Plan, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        first = self.problem.make_inputs()
        # Timing advances the states of a pool; results are compared from those that nothing has touched.
        self._untouched = copy.deepcopy(first)
        self.heads = heads_of(self.problem, first)
        self.used = in_use(self.problem, self.heads, self.limits)
        self._wanted = self._results(self.used)
        moved = self.problem.bytes_moved
        touched = min(tensor_bytes(first), moved)
        room = int(min(MEMORY_BYTES, self.clock.free_bytes() * 2 / 5))
        # A set also holds the outputs that each plan leaves in its graph.
        held = tensor_bytes(first) + TOGETHER * moved // 4
        sets = rotation_count(touched, held, self.clock.l2_bytes, room)
        self._inputs = [first, *(self.problem.make_inputs() for _ in range(sets - 1))]

    def run(self) -> Plan:
        """The best plan; its time and that of the one in use are taken beside each other."""
        best = self.used
        for start, groups in searches(self.used, self.heads, self.limits):
            found = self._descend(start, groups)
            best = min((best, found), key=self._time)
        self.times_us.update(self._timed(list(dict.fromkeys([self.used, best]))))
        return min((self.used, best), key=self._time)

    def _time(self, plan: Plan) -> float:
        return self.times_us.get(plan, float("inf"))

    def _descend(self, best: Plan, groups: list[Changes]) -> Plan:
        """From this plan by one group of changes after the other to the best, until none gets better."""
        self._try([best])
        while True:
            before = best
            for group in groups:
                candidates = [replace(best, **change) for change in group]
                self._try(candidates)
                best = min((best, *candidates), key=self._time)
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
            apart = max(map(apart_by, results, self._wanted), default=0.0)
            reason = "" if apart <= APART_AT_MOST else "wrong: not the results of the plan in use"
            for result in results:
                # The next plan is likely to get this memory: what it leaves unwritten must not be right.
                result.fill_(float("nan"))
        except Exception as error:
            # A broken device raises here, and ends the search.
            self.clock.synchronize()
            reason = in_words(error)
        if reason:
            self.skipped[plan] = reason
        return not reason

    def _results(self, plan: Plan) -> list[torch.Tensor]:
        ours = self.problem.call(copy.deepcopy(self._untouched), plan=plan)
        self.clock.synchronize()
        return [*ours.results, *([] if ours.pool is None else [ours.pool])]

    def _timed(self, plans: Sequence[Plan]) -> dict[Plan, float]:
        calls = {str(place): self._over_sets(plan) for place, plan in enumerate(plans)}
        timings = time_interleaved(calls, len(self._inputs), self.clock, seconds=self.seconds, rounds=3)
        for inputs in self._inputs:
            if isinstance(inputs, cases.Training):
                # The outputs of every plan's forward.
                inputs.graphs.clear()
        return {plan: timings[str(place)].median_us for place, plan in enumerate(plans)}

    def _over_sets(self, plan: Plan) -> Callable[[int], object]:
        return lambda turn: self.problem.call(self._inputs[turn], plan=plan)


def apart_by(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference over a head's largest value, heads in dimension 1; infinite where there is a NaN."""
    worst = 0.0
    for head in range(one.shape[1]):
        # One by one: in float32 all together may not fit.
        a, b = one[:, head].float(), other[:, head].float()
        apart = float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
        worst = max(worst, apart if apart == apart else float("inf"))
    return worst


def in_words(error: Exception) -> str:
    """Why a plan is left out, in a few words that are the same for the same reason."""
    text = " ".join(str(error).split())
    if type(error).__name__ == "OutOfResources":
        return f"does not fit: {text.partition(',')[0]}"
    if isinstance(error, ValueError) and text.startswith("plan must be"):
        return "refused: it does not cover the heads"
    return f"fails: {type(error).__name__}: {text}"[:200]


def shown(plan: Plan) -> str:
    return ", ".join(f"{name}={value}" for name, value in asdict(plan).items())


def report(search: Search, best: Plan) -> Iterator[str]:
    used_us, best_us = search.times_us[search.used], search.times_us[best]
    yield f"  in use {used_us:9.2f} us  {shown(search.used)}"
    yield f"  best   {best_us:9.2f} us  {'the same' if best == search.used else shown(best)}"
    for reason, count in Counter(search.skipped.values()).most_common():
        yield f"  {count} of {len(search.times_us) + len(search.skipped)} plans skipped: {reason}"


def record(search: Search, best: Plan) -> dict[str, Any]:
    def described(plan: Plan) -> dict[str, Any]:
        return {"kind": type(plan).__name__, **asdict(plan)}

    times = sorted(search.times_us.items(), key=lambda item: item[1])
    return {
        "problem": search.problem.name,
        "used": {"us": search.times_us[search.used], **described(search.used)},
        "best": {"us": search.times_us[best], **described(best)},
        "plans": [{"us": us, **described(plan)} for plan, us in times],
        "skipped": [{"why": reason, **described(plan)} for plan, reason in search.skipped.items()],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write every plan's time as JSON")
    parser.add_argument("--seconds", type=float, default=0.05, help="device time a plan")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX", help="only such problems")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("tune: searching plans needs a GPU, and torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    clock, limits = CudaClock(device), launch.device_limits(device)
    # No peer runs here, and what they would be called with takes as much memory again.
    cases.has_peer = lambda name: False
    problems = [problem for problem in cases.problems(device) if arguments.only.search(problem.name)]
    if not problems:
        print(f"tune: no problem is called like {arguments.only.pattern!r}", file=sys.stderr)
        return 2
    found = []
    for number, problem in enumerate(problems, start=1):
        print(f"[{number}/{len(problems)}] {problem.name}", flush=True)
        try:
            search = Search(problem, clock, limits, arguments.seconds)
            best = search.run()
        except torch.OutOfMemoryError as error:
            print(f"  left out: {str(error).partition('.')[0]}", flush=True)
            continue
        print(*report(search, best), sep="\n", flush=True)
        found.append(record(search, best))
        if arguments.out:
            # After each problem: what is found is kept if the search is stopped.
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")
        del search
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
