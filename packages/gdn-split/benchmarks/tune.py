"""Search the launch plans on this GPU, beside those that `gdn_split.plan` makes and whose thresholds come from here.

``python packages/gdn-split/benchmarks/tune.py [--out plans.json]`` prints, for each size, the plan in use and the best.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import torch
from steps import Setup, Stepped
from steps import inputs as step_inputs

from gdn_split import arguments, launch
from gdn_split.plan import ConvPlan, GroupShape, SplitPlan, StepPlan, plan_conv, plan_split, plan_step
from gdn_split.reference import new_parts
from gdn_split.step import arguments as step_arguments
from gdn_split.step import launch as step_launch
from gdn_split.tensors import Convolve, Split, Step
from kernel_reference.bench.timers import CudaClock, time_interleaved
from kernel_reference.integers import cdiv

QWEN3_NEXT = GroupShape(16, 32, 128, 128)
SHAPES = {
    "Qwen3-Next": QWEN3_NEXT,
    "TP4": GroupShape(4, 8, 128, 128),
    "ratio 3": GroupShape(16, 48, 128, 128),
    "heads of 96": GroupShape(16, 32, 96, 96),
}
TOKENS = (1, 64, 1024, 2000, 8192, 32768)
SEQUENCES = (1, 16, 64, 256)
STEPS = [
    *[Setup(n, QWEN3_NEXT) for n in (1, 4, 16, 64, 256)],
    *[Setup(n, QWEN3_NEXT, state_layout="VK") for n in (1, 64)],
    *[Setup(64, QWEN3_NEXT, state=torch.bfloat16, state_layout=layout) for layout in ("KV", "VK")],
    *[Setup(64, QWEN3_NEXT, tokens=tokens) for tokens in (2, 4)],
]
# Rotating inputs of this much memory find the L2 cache cold.
ROTATED_BYTES = 300e6


def split_plans(rows: int, shape: GroupShape, used: SplitPlan) -> Iterator[SplitPlan]:
    for rows_per_step, num_warps in product((1, 2, 4, 8), (1, 2, 4, 8)):
        rows_per_step_ba = min(64, 4 * rows_per_step)
        programs = cdiv(rows, rows_per_step_ba) + cdiv(rows, rows_per_step) * shape.num_heads_qk
        yield replace(used, programs=programs, rows_per_step=rows_per_step, rows_per_step_ba=rows_per_step_ba,
                      num_warps=num_warps)  # fmt: skip


def conv_plans(sequences: int, shape: GroupShape, used: ConvPlan) -> Iterator[ConvPlan]:
    for tile, block, num_warps, fours in product((1, 2, 4, 8), (64, 128, 256), (1, 2, 4), {False, used.fours}):
        if tile <= sequences and tile * block >= 32 * num_warps:
            tiles = 2 * (cdiv(shape.head_qk, block) + cdiv(shape.ratio * shape.head_v, block)) * shape.num_heads_qk
            plan = replace(
                used, programs=cdiv(sequences, used.rows_per_step_ba) + cdiv(sequences, tile) * tiles,
                sequences_per_program=tile, block=block, num_warps=num_warps, fours=fours,
            )  # fmt: skip
            if plan.covers(sequences, 1, shape, used.fours):
                yield plan


def split_problem(
    rows: int, shape: GroupShape
) -> tuple[SplitPlan, Callable[[SplitPlan], Callable[[int], object]], int]:
    row_bytes = 2 * (shape.qkvz_width + shape.ba_width)
    sets = max(2, min(32, int(ROTATED_BYTES / (2 * rows * row_bytes))))
    inputs = []
    for _ in range(sets):
        qkvz = torch.randn(rows, shape.qkvz_width, device="cuda", dtype=torch.bfloat16)
        ba = torch.randn(rows, shape.ba_width, device="cuda", dtype=torch.bfloat16)
        inputs.append((qkvz, ba, new_parts(qkvz, ba, shape)))

    def under(plan: SplitPlan) -> Callable[[int], object]:
        t = Split(*inputs[0][:2], *inputs[0][2])
        sizes = (shape.num_heads_qk, shape.num_heads_v, shape.head_qk, shape.head_v, "interleaved")
        run = launch.prepare_move(arguments.check_split(t, *sizes), plan, t)
        return lambda turn: run(inputs[turn][0], inputs[turn][1], *inputs[turn][2])

    return plan_split(rows, shape, row_bytes, launch.device_limits(inputs[0][0].device)), under, sets


def conv_problem(sequences: int, packed: bool) -> tuple[ConvPlan, Callable[[ConvPlan], Callable[[int], object]], int]:
    shape, width = QWEN3_NEXT, 4
    set_bytes = sequences * (4 * (shape.qkvz_width + shape.ba_width) + 4 * shape.qkv_width * (width - 1))
    sets = max(2, min(32, int(ROTATED_BYTES / set_bytes)))
    weight, bias = torch.randn(shape.qkv_width, width, device="cuda"), torch.randn(shape.qkv_width, device="cuda")
    weight, bias = weight.bfloat16(), bias.bfloat16()
    inputs = []
    for _ in range(sets):
        qkvz = torch.randn(sequences, shape.qkvz_width, device="cuda", dtype=torch.bfloat16)
        ba = torch.randn(sequences, shape.ba_width, device="cuda", dtype=torch.bfloat16)
        state = torch.randn(sequences, shape.qkv_width, width - 1, device="cuda", dtype=torch.bfloat16)
        state = state if packed else state.transpose(1, 2).contiguous().transpose(1, 2)
        slots = torch.randperm(sequences, device="cuda", dtype=torch.int32)
        inputs.append((qkvz, ba, state, weight, bias, slots, *new_parts(qkvz, ba, shape)))

    def under(plan: ConvPlan) -> Callable[[int], object]:
        t = Convolve(*inputs[0])
        sizes = (shape.num_heads_qk, shape.num_heads_v, shape.head_qk, shape.head_v, "interleaved")
        run = launch.prepare_split_conv1d_update(arguments.check_convolve(t, 1, True, *sizes), plan, t)
        return lambda turn: run(*inputs[turn])

    return plan_conv(sequences, 1, shape, launch.device_limits(weight.device), packed, True), under, sets


def step_plans(setup: Setup, used: StepPlan) -> Iterator[StepPlan]:
    for warps, bytes_of_run, registers in product((4, 8, 16), (32, 64, 128, 256), (0, 64, 80, 128, 168, 255)):
        # What a thread holds of the state must leave it some.
        if 128 * 128 // (32 * warps) < (registers or 255):
            run = bytes_of_run // setup.state.itemsize
            yield replace(used, num_warps=warps, run=min(128, run), max_registers=registers)
    # Programs of a quarter of a wave to two, of an H200.
    for ahead, early in product((66, 99, 132, 264, 528), (False, True)):
        yield replace(used, ahead=ahead, early=early)
    yield replace(used, first=not used.first)


def step_problem(setup: Setup) -> tuple[StepPlan, Callable[[StepPlan], Callable[[int], object]], int]:
    sets = max(2, min(16, int(ROTATED_BYTES / setup.bytes_moved())))
    device = torch.device("cuda")
    numbers = (setup.tokens, True, True, setup.state_layout, 128**-0.5, 1e-6, *setup.sizes, "interleaved")

    def tensors(i: Stepped) -> Step:
        out = torch.empty(len(i.qkvz), setup.shape.num_heads_v, setup.shape.head_v, device=device, dtype=i.qkvz.dtype)
        return Step(
            i.qkvz, i.ba, i.conv_state, i.weight, None, i.pool, i.slots, i.a_log, i.dt_bias, i.norm, out
        )  # fmt: skip

    given = [tensors(step_inputs(device, setup)) for _ in range(sets)]
    problem = step_arguments.check_step("decode_step", given[0], *numbers)

    def under(plan: StepPlan) -> Callable[[int], object]:
        run = step_launch.prepare_step(problem, plan, given[0])
        return lambda turn: run(*given[turn][:11])

    return plan_step(problem, launch.device_limits(device)), under, sets


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write every plan's time as JSON")
    parser.add_argument("--seconds", type=float, default=0.05, help="device time a plan")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX", help="only such problems")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("tune: searching plans needs a GPU, and torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    clock = CudaClock(torch.device("cuda"))
    found = []
    problems = [(f"split {name} N={rows}", split_plans, (rows, shape), split_problem, (rows, shape))
                for name, shape in SHAPES.items() for rows in TOKENS]  # fmt: skip
    problems += [(f"conv {n} sequences, {'packed' if packed else 'channel-last'}", conv_plans, (n, QWEN3_NEXT),
                  conv_problem, (n, packed)) for n in SEQUENCES for packed in (True, False)]  # fmt: skip
    problems += [(f"step {setup.sequences} x {setup.tokens}, {setup.state_layout} {setup.state}", step_plans, (setup,),
                  step_problem, (setup,)) for setup in STEPS]  # fmt: skip
    problems = [problem for problem in problems if options.only.search(problem[0])]
    for number, (name, candidates, sizes, problem, of) in enumerate(problems, start=1):
        used, under, sets = problem(*of)
        plans = list(dict.fromkeys([used, *candidates(*sizes, used)]))
        calls = {str(i): under(plan) for i, plan in enumerate(plans)}
        for call in calls.values():
            for turn in range(sets):
                # What a first call makes is not timed.
                call(turn)
        timings = time_interleaved(calls, sets, clock, seconds=options.seconds, rounds=3)
        times = [timings[str(i)].median_us for i in range(len(plans))]
        order = sorted(range(len(plans)), key=times.__getitem__)
        found.append(
            {"problem": name, "used": times[0], "plans": [{"us": times[i], **asdict(plans[i])} for i in order]}
        )
        best = ", ".join(f"{key}={value}" for key, value in asdict(plans[order[0]]).items() if key != "programs")
        print(
            f"[{number}/{len(problems)}] {name}: in use {times[0]:.2f} us, best {times[order[0]]:.2f} us ({best})",
            flush=True,
        )
        del under, calls
        torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
