"""Search the launch plans on this GPU, beside those that `blocksparse_attn.plan` makes; its thresholds come from here.

``python packages/blocksparse-attn/benchmarks/tune.py [--only decode] [--out plans.json]`` prints, for each problem of
`cases.py`, the plan in use and the best. The kernel for sm_90 and the portable one are searched each, one group of a
plan's numbers after the other until none gets better.
"""

from __future__ import annotations

import argparse
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

from blocksparse_attn.plan import AttentionPlan, DeviceLimits, Problem, plan_attention
from kernel_reference.bench.timers import Clock, CudaClock, rotation_count, tensor_bytes, time_interleaved

Changes = list[dict[str, Any]]

# All rotating inputs together.
MEMORY_BYTES = 20e9
# Plans sum and round in different places; in 16 bits that is a unit or two in the last place of a row's largest value.
APART_AT_MOST = 0.02
# Plans that are timed beside each other: captured into graphs, each keeps the outputs of every set of inputs.
TOGETHER = 8
# The most parts that the keys of a tile are cut in.
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)


def problem_of(batch: cases.Batch) -> Problem:
    """What a plan is made from: here inputs are packed and aligned."""
    shape, m = batch.shape, batch.shape.model
    return Problem(
        num_heads=m.num_heads_q,
        num_heads_kv=m.num_heads_kv,
        head_size=m.head_dim,
        head_size_v=m.head_dim,
        q_block=m.block_size,
        k_block=m.block_size,
        layouts=batch.layout.num_heads,
        rows=batch.layout.rows,
        entries=batch.layout.col.shape[1],
        tokens=batch.q.shape[0],
        sequences=shape.sequences,
        max_seqlen_q=shape.new,
        capacity=shape.total if shape.page else batch.k.shape[0],
        page_size=shape.page,
        bits=8 * batch.q.element_size(),
        described=True,
    )


def searches(problem: Problem, limits: DeviceLimits) -> list[tuple[AttentionPlan, list[Changes]]]:
    """Where to begin, and groups of changes: those of one group depend on each other, so all of them are tried."""
    used = plan_attention(problem, limits)
    splits = changes(num_splits=SPLITS)
    found: list[tuple[AttentionPlan, list[Changes]]] = []
    # What it takes for long prompts is tried on few tokens too: where that begins to pay is a threshold of the plan.
    long = plan_attention(replace(problem, tokens=2**20, max_seqlen_q=2**20), limits)
    if long.hopper:
        start = replace(long, num_splits=used.num_splits)
        found.append((start, [changes(block_n=(64, 128), num_stages=(2, 3, 4)), splits]))
    portable = plan_attention(replace(problem, described=False), limits)
    tiles = changes(block_m=(16, 32, 64, 128), block_n=(16, 32, 64), num_warps=(4, 8), packed=(0, 1, 2, 4))
    return [*found, (portable, [tiles, changes(num_warps=(2, 4, 8), num_stages=(1, 2, 3, 4)), splits])]


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
    times_us: dict[AttentionPlan, float] = field(default_factory=dict)
    skipped: dict[AttentionPlan, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        first = self.problem.make_inputs()
        self._plans_for = problem_of(first)
        self.used = plan_attention(self._plans_for, self.limits)
        self._inputs = [first]
        self._wanted = self._result(self.used)
        moved = self.problem.bytes_moved
        touched = min(tensor_bytes(first), moved)
        room = int(min(MEMORY_BYTES, self.clock.free_bytes() * 2 / 5))
        # A set also holds the outputs that each plan leaves in its graph.
        held = tensor_bytes(first) + TOGETHER * first.q.nbytes
        sets = rotation_count(touched, held, self.clock.l2_bytes, room)
        self._inputs += [self.problem.make_inputs() for _ in range(sets - 1)]

    def run(self) -> AttentionPlan:
        """The best plan; its time and that of the one in use are taken beside each other."""
        best = self.used
        for start, groups in searches(self._plans_for, self.limits):
            found = self._descend(start, groups)
            best = min((best, found), key=self._time)
        self.times_us.update(self._timed(list(dict.fromkeys([self.used, best]))))
        return min((self.used, best), key=self._time)

    def _time(self, plan: AttentionPlan) -> float:
        return self.times_us.get(plan, float("inf"))

    def _descend(self, best: AttentionPlan, groups: list[Changes]) -> AttentionPlan:
        """From this plan by one group of changes after the other to the best, until none gets better."""
        self._try([best])
        while True:
            before = best
            for group in groups:
                candidates = [replace(best, **change) for change in group]
                self._try(candidates)
                best = min((best, *candidates), key=self._time)
            if best == before:
                return best

    def _try(self, plans: Sequence[AttentionPlan]) -> None:
        """Time the new ones among these that work and give the results of the plan in use."""
        new = [plan for plan in dict.fromkeys(plans) if plan not in self.times_us and plan not in self.skipped]
        fit = [plan for plan in new if self._fits(plan)]
        for first in range(0, len(fit), TOGETHER):
            self.times_us.update(self._timed(fit[first : first + TOGETHER]))

    def _fits(self, plan: AttentionPlan) -> bool:
        try:
            result = self._result(plan)
            reason = "" if apart_by(result, self._wanted) <= APART_AT_MOST else "wrong: not the results of the one used"
            # The next plan is likely to get this memory: what it leaves unwritten must not be right.
            result.fill_(float("nan"))
        except Exception as error:
            # A broken device raises here, and ends the search.
            self.clock.synchronize()
            reason = in_words(error)
        if reason:
            self.skipped[plan] = reason
        return not reason

    def _result(self, plan: AttentionPlan) -> torch.Tensor:
        out = self.problem.call(self._inputs[0], plan=plan).out
        self.clock.synchronize()
        return out

    def _timed(self, plans: Sequence[AttentionPlan]) -> dict[AttentionPlan, float]:
        calls = {str(place): self._over_sets(plan) for place, plan in enumerate(plans)}
        timings = time_interleaved(calls, len(self._inputs), self.clock, seconds=self.seconds, rounds=3)
        return {plan: timings[str(place)].median_us for place, plan in enumerate(plans)}

    def _over_sets(self, plan: AttentionPlan) -> Callable[[int], object]:
        return lambda turn: self.problem.call(self._inputs[turn], plan=plan)


def apart_by(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference over a row's largest value, [T, H, D]; infinite where there is a NaN."""
    worst = 0.0
    for a, b in zip(one.split(1024), other.split(1024), strict=True):
        # Some rows at a time: in float32 all together may not fit.
        difference, size = (a.float() - b.float()).abs().amax(-1), b.float().abs().amax(-1)
        apart = float((difference / size.clamp(min=1e-30)).max())
        worst = max(worst, apart if apart == apart else float("inf"))
    return worst


def in_words(error: Exception) -> str:
    """Why a plan is left out, in a few words that are the same for the same reason."""
    text = " ".join(str(error).split())
    if type(error).__name__ == "OutOfResources":
        return f"does not fit: {text.partition(',')[0]}"
    if isinstance(error, ValueError) and text.startswith("plan must be"):
        return "refused: it does not cover the problem"
    return f"fails: {type(error).__name__}: {text}"[:200]


def shown(plan: AttentionPlan) -> str:
    return ", ".join(f"{name}={value}" for name, value in asdict(plan).items())


def report(search: Search, best: AttentionPlan) -> Iterator[str]:
    used_us, best_us = search.times_us[search.used], search.times_us[best]
    yield f"  in use {used_us:9.2f} us  {shown(search.used)}"
    yield f"  best   {best_us:9.2f} us  {'the same' if best == search.used else shown(best)}"
    for reason, count in Counter(search.skipped.values()).most_common():
        yield f"  {count} of {len(search.times_us) + len(search.skipped)} plans skipped: {reason}"


def record(search: Search, best: AttentionPlan) -> dict[str, Any]:
    times = sorted(search.times_us.items(), key=lambda item: item[1])
    return {
        "problem": search.problem.name,
        "used": {"us": search.times_us[search.used], **asdict(search.used)},
        "best": {"us": search.times_us[best], **asdict(best)},
        "plans": [{"us": us, **asdict(plan)} for plan, us in times],
        "skipped": [{"why": reason, **asdict(plan)} for plan, reason in search.skipped.items()],
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
    # Only here, as it brings Triton.
    from blocksparse_attn import launch

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
