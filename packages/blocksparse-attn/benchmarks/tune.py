"""Search the launch plans on this GPU, beside those that `blocksparse_attn.plan` makes; its thresholds come from here.

``python packages/blocksparse-attn/benchmarks/tune.py [--only decode] [--out plans.json]`` prints, for each problem of
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

from blocksparse_attn.plan import AttentionPlan, DeviceLimits, Problem, plan_attention
from kernel_reference.bench import tune
from kernel_reference.bench.timers import Clock
from kernel_reference.bench.tune import Changes, changes

# Plans round in different places: in 16 bits, a unit or two in the last place of a row's largest value.
APART_AT_MOST = 0.02
# Splits of the keys of a tile.
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)


def problem_of(batch: cases.Batch) -> Problem:
    """The problem of a plan, of packed and aligned inputs."""
    shape, m = batch.shape, batch.shape.model
    return Problem(
        num_heads=m.num_heads_q,
        num_heads_kv=m.num_heads_kv,
        head_dim=m.head_dim,
        head_dim_v=m.head_dim,
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
        tma=True,
    )


def searches(problem: Problem, limits: DeviceLimits) -> list[tuple[AttentionPlan, list[Changes]]]:
    """Where to begin, and groups of changes: those of one group depend on each other, so all of them are tried."""
    used = plan_attention(problem, limits)
    splits = changes(num_splits=SPLITS)
    found: list[tuple[AttentionPlan, list[Changes]]] = []
    # The kernel for long prompts is tried on few tokens too: where it begins to pay is a threshold of the plan.
    long = plan_attention(replace(problem, tokens=2**20, max_seqlen_q=2**20), limits)
    if long.hopper:
        start = replace(long, num_splits=used.num_splits)
        found.append((start, [changes(block_n=(64, 128), num_stages=(2, 3, 4)), splits]))
    portable = plan_attention(replace(problem, tma=False), limits)
    tiles = changes(block_m=(16, 32, 64, 128), block_n=(16, 32, 64), num_warps=(4, 8), packed=(0, 1, 2, 4))
    return [*found, (portable, [tiles, changes(num_warps=(2, 4, 8), num_stages=(1, 2, 3, 4)), splits])]


def prepare(problem: cases.Problem, limits: DeviceLimits, clock: Clock) -> tune.Problem[AttentionPlan]:
    """Inputs, and what to search them with."""
    first = problem.make_inputs()
    plans_for = problem_of(first)
    used = plan_attention(plans_for, limits)
    return tune.of_attention(problem, first, used, searches(plans_for, limits), clock, APART_AT_MOST)


def problems(device: torch.device) -> Iterator[tune.Named[AttentionPlan]]:
    """Those of the benchmark."""
    # Only here, as it brings Triton.
    from blocksparse_attn import launch

    limits = launch.device_limits(device)
    # No peer runs here, and their inputs would take as much memory again.
    peers.has_peer = lambda name: False
    for problem in cases.problems(device):
        yield tune.Named(problem.name, partial(prepare, problem, limits))


if __name__ == "__main__":
    sys.exit(tune.main(__doc__, problems))
