"""Search the launch plans on this GPU, beside those that `lightning_attn.plan` makes; its thresholds come from here.

``python packages/lightning-attn/benchmarks/tune.py [--only 'decode.*TP8'] [--out plans.json]`` prints, for each problem
of `cases.py`, the plan in use and the best. Of prefill the kernel for sm_90 and the portable one are searched each, one
group of a plan's numbers after the other until none gets better; of decoding all plans are timed.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import cases
import torch

from kernel_reference.bench import tune
from kernel_reference.bench.timers import Clock
from kernel_reference.bench.tune import Changes, changes
from lightning_attn import launch
from lightning_attn.plan import DecodePlan, DeviceLimits, Heads, PrefillPlan, plan_decode, plan_prefill

Plan = PrefillPlan | DecodePlan

# Two plans round in different places: twice what the benchmark has seen either be off by, of a head's largest value.
APART_AT_MOST = 0.012
SEGMENTS = (0, 512, 1024, 2048, 4096, 8192)


def in_use(problem: cases.Problem, heads: Heads, limits: DeviceLimits) -> Plan:
    """The plan that the package makes for the benchmark's inputs: in bfloat16, packed, aligned."""
    if problem.kind in ("prefill", "varlen", "backward"):
        return plan_prefill(heads, "bfloat16", limits, suits_tma=True)
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
    portable = plan_prefill(heads, "bfloat16", limits, suits_tma=False)
    tiles = changes(chunk=(16, 32, 64), block_e=(16, 32, 64, 128), block_d=(32, 64, 128))
    found.append((portable, [tiles, changes(num_warps=(2, 4, 8), num_stages=(1, 2, 3)), changes(segment=SEGMENTS)]))
    return found


def prepare(problem: cases.Problem, limits: DeviceLimits, clock: Clock) -> tune.Problem[Plan]:
    """Inputs, and what to search them with."""
    first = problem.make_inputs()
    # Timing advances the states of a pool; results are compared from those that nothing has touched.
    untouched = copy.deepcopy(first)
    heads = heads_of(problem, first)
    used = in_use(problem, heads, limits)
    sets = tune.input_sets(first, problem.bytes_moved, problem.bytes_moved // 4, clock)
    inputs = [first, *(problem.make_inputs() for _ in range(sets - 1))]

    def results(plan: Plan) -> list[torch.Tensor]:
        ours = problem.call(copy.deepcopy(untouched), plan=plan)
        return [*ours.results, *([] if ours.pool is None else [ours.pool])]

    def forget() -> None:
        for given in inputs:
            if isinstance(given, cases.Training):
                # The outputs of every plan's forward.
                given.graphs.clear()

    return tune.Problem(
        used=used,
        searches=searches(used, heads, limits),
        sets=sets,
        call=lambda plan, turn: problem.call(inputs[turn], plan=plan),
        results=results,
        apart_by=tune.of_heads,
        apart_at_most=APART_AT_MOST,
        forget=forget,
    )


def problems(device: torch.device) -> Iterator[tune.Named[Plan]]:
    """Those of the benchmark."""
    limits = launch.device_limits(device)
    # No peer runs here, and what they would be called with takes as much memory again.
    cases.has_peer = lambda name: False
    for problem in cases.problems(device):
        yield tune.Named(problem.name, partial(prepare, problem, limits))


if __name__ == "__main__":
    sys.exit(tune.main(__doc__, problems))
