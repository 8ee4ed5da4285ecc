"""Search the launch plans on this GPU, beside those that `prefix_prefill.plan` makes; its thresholds come from here.

``python packages/prefix-prefill/benchmarks/tune.py [--only ctx131072] [--out plans.json]`` prints, for each problem of
`cases.py`, the plan in use and the best. The kernel for sm_90 and the portable one are searched each, one group of a
plan's numbers after the other until none gets better.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import cases
import peers
import torch

from kernel_reference.bench import tune
from kernel_reference.bench.timers import Clock
from kernel_reference.bench.tune import Changes, changes
from prefix_prefill.plan import DeviceLimits, PrefillPlan, Problem, plan_prefill

# Plans sum and round in different places; in 16 bits that is a unit or two in the last place of a row's largest value.
APART_AT_MOST = 0.02
# The most parts that the keys of a tile are cut in.
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


def problem_of(problem: cases.Problem, batch: cases.Batch) -> Problem:
    """What a plan is made from: here inputs are packed and aligned, and 8-bit caches have one scale each."""
    shape = problem.shape
    return Problem(
        num_heads=shape.model.num_heads_q,
        num_heads_kv=shape.model.num_heads_kv,
        head_dim=shape.model.head_dim,
        page_size=shape.page,
        tokens=batch.q.shape[0],
        sequences=len(shape.lengths),
        max_seqlen_q=shape.max_seqlen_q,
        capacity=batch.block_table.shape[1] * shape.page,
        bits=8 * batch.q.element_size(),
        cache_bits=8 if problem.kind == "fp8" else 8 * batch.k_cache.element_size(),
        new_kv=problem.kind == "x-packed",
        tma=problem.kind != "x-packed",
    )


def searches(problem: Problem, limits: DeviceLimits) -> list[tuple[PrefillPlan, list[Changes]]]:
    """Where to begin, and groups of changes: those of one group depend on each other, so all of them are tried."""
    used = plan_prefill(problem, limits)
    splits = changes(num_splits=SPLITS)
    found: list[tuple[PrefillPlan, list[Changes]]] = []
    if used.hopper:
        found.append((used, [changes(block_m=(64, 128), block_n=(64, 128), num_stages=(2, 3, 4)), splits]))
    portable = plan_prefill(replace(problem, tma=False), limits)
    tiles = changes(block_m=(16, 32, 64, 128), block_n=(32, 64, 128), num_warps=(4, 8))
    return [*found, (portable, [tiles, changes(num_warps=(2, 4, 8), num_stages=(1, 2, 3, 4)), splits])]


def prepare(problem: cases.Problem, limits: DeviceLimits, clock: Clock) -> tune.Problem[PrefillPlan]:
    """Inputs, and what to search them with."""
    first = problem.make_inputs()
    plans_for = problem_of(problem, first)
    used = plan_prefill(plans_for, limits)
    return tune.of_attention(problem, first, used, searches(plans_for, limits), clock, APART_AT_MOST)


def problems(device: torch.device) -> Iterator[tune.Named[PrefillPlan]]:
    """Those of the benchmark."""
    # Only here, as it brings Triton.
    from prefix_prefill import launch

    limits = launch.device_limits(device)
    # No peer runs here, and what they would be called with takes as much memory again.
    cases.has_peer = peers.has_peer = lambda name: False
    for problem in cases.problems(device):
        yield tune.Named(problem.name, partial(prepare, problem, limits))


if __name__ == "__main__":
    sys.exit(tune.main(__doc__, problems))
