"""What do the compilers make of the kernels, for GPUs that are not here?

The configurations are those that plans and launches make for real models: all arguments of a spec come from a Launch.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path

import pytest
import torch

import gdn_split
from gdn_split import arguments, launch
from gdn_split.plan import DeviceLimits, GroupShape, plan_conv, plan_split, plan_step
from gdn_split.prefill import arguments as prefill_arguments
from gdn_split.prefill import launch as prefill_launch
from gdn_split.prefill.plan import plan_prefill, plan_prefill_backward
from gdn_split.prefill.reference import new_inputs
from gdn_split.reference import new_parts
from gdn_split.step import arguments as step_arguments
from gdn_split.step import launch as step_launch
from gdn_split.tensors import Commit, Convolve, Merge, Prefill, Split, Step
from kernel_reference.models import QWEN3_NEXT_80B
from kernel_reference.testing.codegen import (
    KernelSpec,
    Report,
    assert_clean,
    compile_by_target,
    compile_specs,
    launched_kernels,
)
from kernel_reference.testing.forks import outcome_alone
from kernel_reference.testing.targets import SMALL_TARGETS, TARGETS

pytestmark = pytest.mark.codegen

TP1, TP8 = (
    GroupShape(m.num_heads_qk, m.num_heads_v, m.head_qk, m.head_v)
    for m in (QWEN3_NEXT_80B, QWEN3_NEXT_80B.tensor_parallel(8))
)
RATIO_3 = GroupShape(8, 24, 128, 128)
# As launch.device_limits reads them from an H200 and from an older GPU; and a processor of few cores.
WAITS = DeviceLimits(132, 232448, 8, True, True)
PLAIN = DeviceLimits(108, 166912, 8, False)
FEW_CORES = DeviceLimits(40)
WAITING_TARGETS = ("sm_90", "sm_100")


def move(
    name: str, shape: GroupShape, rows: int, limits: DeviceLimits, merge: bool = False, layout: str = "interleaved",
    dtype: torch.dtype = torch.bfloat16,
) -> KernelSpec:  # fmt: skip
    widths = (shape.qkvz_width, shape.ba_width)
    qkvz, ba = (torch.empty(rows, width, dtype=dtype, device="meta") for width in widths)
    parts = new_parts(qkvz, ba, shape)
    plan = plan_split(rows, shape, dtype.itemsize * (shape.qkvz_width + shape.ba_width), limits)
    sizes = (shape.num_heads_qk, shape.num_heads_v, shape.head_qk, shape.head_v, layout)
    t = Merge(*parts, qkvz, ba) if merge else Split(qkvz, ba, *parts)
    problem = (arguments.check_merge if merge else arguments.check_split)(t, *sizes)
    return KernelSpec.of_launch(launch.prepare_move(problem, plan, t), (qkvz, ba, *parts), name=name)


def convolution(
    name: str, shape: GroupShape, sequences: int, limits: DeviceLimits, tokens: int = 1, width: int = 4,
    layout: str = "interleaved", packed: bool = True,
) -> KernelSpec:  # fmt: skip
    rows, channels = sequences * tokens, shape.qkv_width
    widths = (shape.qkvz_width, shape.ba_width)
    fused = [torch.empty(rows, columns, dtype=torch.bfloat16, device="meta") for columns in widths]
    parts = new_parts(*fused, shape)
    state = torch.empty(512, channels, width - 1, dtype=torch.bfloat16, device="meta")
    if not packed:
        state = torch.empty(512, width - 1, channels, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    weight = torch.empty(channels, width, dtype=torch.bfloat16, device="meta")
    slots = torch.empty(sequences, dtype=torch.int32, device="meta")
    plan = plan_conv(sequences, tokens, shape, limits, packed, width == 4)
    t = Convolve(*fused, state, weight, torch.empty(channels, dtype=torch.bfloat16, device="meta"), slots, *parts)
    sizes = (shape.num_heads_qk, shape.num_heads_v, shape.head_qk, shape.head_v, layout)
    problem = arguments.check_convolve(t, tokens, True, *sizes)
    return KernelSpec.of_launch(launch.prepare_split_conv1d_update(problem, plan, t), t, name=name)


def step(
    name: str, shape: GroupShape, limits: DeviceLimits, tokens: int = 1, state: torch.dtype = torch.float32,
    state_layout: str = "KV", op: str = "decode_step",
) -> KernelSpec:  # fmt: skip
    sequences, slots = 64, 512
    make = lambda *size, dtype=torch.bfloat16: torch.empty(*size, dtype=dtype, device="meta")  # noqa: E731
    rows, heads = sequences * tokens, shape.num_heads_v
    inner = (shape.head_qk, shape.head_v) if state_layout == "KV" else (shape.head_v, shape.head_qk)
    layer = (
        make(rows, shape.qkvz_width), make(rows, shape.ba_width), make(slots, 3, shape.qkv_width).transpose(1, 2),
        make(shape.qkv_width, 4), None, make(slots, heads, *inner, dtype=state), make(sequences, dtype=torch.int32),
        make(heads, dtype=torch.float32), make(heads),
    )  # fmt: skip
    integers = make(sequences, dtype=torch.int32)
    out = make(rows, heads, shape.head_v)
    parents = make(sequences, tokens, dtype=torch.int32) if op == "verify" else None
    t = Commit(*layer, integers) if op == "commit" else Step(*layer, make(shape.head_v), out, parents)
    sizes = (shape.num_heads_qk, shape.num_heads_v, shape.head_qk, shape.head_v, "interleaved")
    problem = step_arguments.check_step(op, t, tokens, True, True, state_layout, 0.1, 1e-6, *sizes)
    plan = plan_step(problem, limits)
    assert plan.covers(problem)
    slices = -(-shape.head_v // plan.block_v)
    parts = problem.has_norm and slices > 1
    counters = integers if (problem.writes and shape.ratio * slices > 1) or parts else None
    raw = make(1, dtype=torch.float32) if parts else None
    tensors = step_launch.in_order(problem, t, counters, raw)
    return KernelSpec.of_launch(step_launch.launch_of(problem, plan, t), tensors, name=name)


def prefill(
    name: str, shape: GroupShape, rows: int, limits: DeviceLimits, chunk: int = 64, kept: bool = False
) -> KernelSpec:
    make = lambda *size, dtype=torch.bfloat16: torch.empty(*size, dtype=dtype, device="meta")  # noqa: E731
    heads, integers = shape.num_heads_v, make(9, dtype=torch.int32)
    t = Prefill(
        make(rows, shape.qkvz_width), make(rows, shape.ba_width), make(shape.qkv_width, 4), None, integers,
        make(64, 3, shape.qkv_width).transpose(1, 2), integers[1:], make(8, dtype=torch.bool),
        make(heads, dtype=torch.float32), make(heads),
    )  # fmt: skip
    sizes = (shape.num_heads_qk, shape.num_heads_v, shape.head_qk, shape.head_v, "interleaved")
    problem = prefill_arguments.check_prefill(t, True, True, True, chunk, *sizes)
    if kept:
        launched = prefill_launch.prepare_kept(problem, t, dependent=limits.dependent_launch)
        return KernelSpec.of_launch(launched, (t[0], t.cu_seqlens, *t[5:8]), name=name)
    launched = prefill_launch.prepare_inputs(problem, plan_prefill(problem, limits), t)
    tensors = prefill_launch.in_order(t, new_inputs(t.mixed_qkvz, problem), True)
    return KernelSpec.of_launch(launched, tensors, name=name)


def prefill_gradients(name: str, shape: GroupShape, rows: int, limits: DeviceLimits, which: int) -> KernelSpec:
    make = lambda *size, dtype=torch.bfloat16: torch.empty(*size, dtype=dtype, device="meta")  # noqa: E731
    heads, single = shape.num_heads_v, torch.float32
    t = Prefill(
        make(rows, shape.qkvz_width), make(rows, shape.ba_width), make(shape.qkv_width, 4), None,
        make(9, dtype=torch.int32), None, None, None, make(heads, dtype=single), make(heads),
    )  # fmt: skip
    sizes = (shape.num_heads_qk, shape.num_heads_v, shape.head_qk, shape.head_v, "interleaved")
    problem = prefill_arguments.check_prefill(t, True, True, True, 64, *sizes)
    plan = plan_prefill_backward(problem, limits)
    launched = prefill_launch.backward_launches(problem, plan, t)[which]
    position, sums, d = make(rows, dtype=torch.int32), make(9, 9, 9, dtype=single), new_inputs(t.mixed_qkvz, problem)
    if which == 1:
        tensors = (t.mixed_qkvz, t.conv_weight, None, position, *d[:4], make(rows, shape.qkvz_width), sums)
    elif which == 2:
        tensors = (sums, sums, t.conv_weight, None, t.A_log, t.dt_bias)
    else:
        tensors = (t.mixed_ba, t.cu_seqlens, t.A_log, t.dt_bias, *d[4:], make(rows, shape.ba_width), sums, position)
    return KernelSpec.of_launch(launched, tensors, name=name)


LARGE_HEADS = GroupShape(8, 8, 256, 256)


def of_any_gpu(limits: DeviceLimits) -> list[KernelSpec]:
    return [
        move("split TP1, 65536 tokens", TP1, 65536, limits),
        move("split TP8, 64 tokens", TP8, 64, limits),
        move("split r=3, 8192 tokens", RATIO_3, 8192, limits),
        move("merge TP1, 8192 tokens", TP1, 8192, limits, merge=True),
        move("split by run TP1, 4096 tokens", TP1, 4096, FEW_CORES),
        convolution("convolution TP1, 256 sequences", TP1, 256, limits),
        convolution("convolution TP8, 3 tokens, width 3", TP8, 1, limits, tokens=3, width=3, packed=False),
        convolution("convolution r=3, contiguous", RATIO_3, 64, limits, layout="contiguous"),
        step("step TP1", TP1, limits),
        prefill("inputs of prefill, TP1", TP1, 8192, limits),
        prefill("states after prefill, r=3", RATIO_3, 8192, limits, kept=True),
        prefill_gradients("gradients of prefill's gates, TP1", TP1, 8192, limits, 0),
        prefill_gradients("gradients of prefill, TP1", TP1, 8192, limits, 1),
        prefill_gradients("gradients of prefill's weights, TP1", TP1, 8192, limits, 2),
        step("tree of 8 drafts, TP1", TP1, limits, 8, op="verify"),
    ]


EVERYWHERE, WAITING = of_any_gpu(PLAIN), of_any_gpu(WAITS)

# More plans for one target: to compile takes seconds.
HOPPER = [
    move("merge r=3, 64 tokens", RATIO_3, 64, WAITS, merge=True),
    step("step TP1, VK", TP1, WAITS, state_layout="VK"),
    step("step TP1, VK, bfloat16 states, 4 tokens", TP1, WAITS, 4, torch.bfloat16, "VK"),
    step("step TP1, 4 tokens", TP1, WAITS, 4),
    step("commit r=3, 4 tokens", RATIO_3, WAITS, 4, op="commit"),
    step("step TP1, bfloat16 states", TP1, WAITS, state=torch.bfloat16),
    prefill("inputs of prefill, r=3, no chunks, few rows", RATIO_3, 1000, WAITS, 0),
    prefill("inputs of prefill, few rows", TP1, 1000, WAITS),
    step("step of large heads", LARGE_HEADS, WAITS),
]


def specs(target: str) -> list[KernelSpec]:
    """The cases that ``python -m kernel_reference.testing.codegen --compare REV`` compiles too."""
    return [*(WAITING if target in WAITING_TARGETS else EVERYWHERE), *(HOPPER if target == "sm_90" else ())]


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    return compile_by_target(specs)


def test_every_kernel_compiles_for_every_target_without_spills_or_traps(reports: list[Report]) -> None:
    # A tree's walk and a commit of some of its tokens keep what they begin with in 64 bytes of stack at most.
    assert_clean(reports, most_stack_outside_loops=64)
    assert len(reports) == sum(len(specs(target)) for target in TARGETS)


def test_the_largest_launches_compile_for_gpus_that_have_99_kib_of_shared_memory() -> None:
    smaller = DeviceLimits(84, 101376, 8, False)
    largest = [
        move("split TP1, 65536 tokens", TP1, 65536, smaller),
        convolution("convolution TP1, 256 sequences", TP1, 256, smaller),
    ]
    assert_clean(compile_specs(largest, SMALL_TARGETS))


def test_no_kernel_is_left_out() -> None:
    assert {spec.kernel for spec in EVERYWHERE} == launched_kernels(gdn_split)


def test_copies_by_group_of_aligned_bfloat16_move_16_bytes_a_thread(reports: list[Report]) -> None:
    copies = [spec.name for spec in specs("sm_90") if spec.kernel.endswith(":split_by_group")]
    seen = [report for report in reports if report.spec in copies and report.target == "sm_90"]
    assert len(seen) == 5
    for report in seen:
        assert 128 in report.load_bits, report.spec
        assert 128 in report.store_bits, report.spec


def test_a_convolution_of_packed_states_moves_vectors_and_leaves_registers_for_many_programs(
    reports: list[Report],
) -> None:
    # An SM holds 32 programs of a warp each with up to 64.
    (seen,) = [r for r in reports if r.spec == "convolution TP1, 256 sequences" and r.target == "sm_90"]
    assert seen.registers <= 64
    assert 64 in seen.load_bits
    assert 64 in seen.store_bits


def test_states_move_16_bytes_a_thread(reports: list[Report]) -> None:
    seen = [report for report in reports if report.spec.startswith(("step ", "commit ")) and report.target == "sm_90"]
    assert len(seen) == 7
    for report in seen:
        assert 128 in report.load_bits, report.spec
        assert 128 in report.store_bits, report.spec


def test_only_targets_that_can_wait_on_the_device_are_given_the_wait(reports: list[Report]) -> None:
    # ACQBULK and PREEXIT are griddepcontrol.wait and .launch_dependents in SASS.
    for report in reports:
        waits = report.target in WAITING_TARGETS and not report.spec.startswith("split by run")
        assert report.uses("ACQBULK") == waits, (report.spec, report.target)
        assert not report.uses("PREEXIT"), (report.spec, report.target)


def test_a_launch_that_may_start_early_waits_for_the_kernel_ahead_of_it() -> None:
    # One of them: the others wait by the same function, which the test above sees.
    (report,) = compile_specs([move("split TP8, 64 tokens", TP8, 64, WAITS)], ["sm_90"])
    assert report.uses("ACQBULK"), report


def test_what_is_fetched_ahead_is_a_state_at_once_and_inputs_by_lines(reports: list[Report]) -> None:
    # UBLKPF and CCTL are cp.async.bulk.prefetch and prefetch in SASS.
    for report in reports:
        waits = report.target in WAITING_TARGETS
        states = waits and report.spec.startswith(("step TP1", "commit "))
        lines = states or (waits and report.spec == "gradients of prefill, TP1")
        assert (report.uses("UBLKPF"), report.uses("CCTL.E.PF2")) == (states, lines), (report.spec, report.target)


_PRINT_MULTIPLICATIONS = """
import json, pathlib, pickle
from kernel_reference.testing.codegen import _compiled
found = []
for spec in pickle.loads(pathlib.Path("{specs}").read_bytes()):
    lines = _compiled(spec, "sm_90").asm["ttir"].splitlines()
    found.append("\\n".join(line for line in lines if "arith.muli" in line))
pathlib.Path("{found}").write_text(json.dumps(found))
"""


def test_rows_are_multiplied_by_strides_in_64_bits(tmp_path: Path) -> None:
    # The interpreter computes some 32-bit numbers in 64 bits, so that it alone does not tell.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    # Several rows a step each: one row is no tile.
    run = move("split by run TP8", TP8, 4096, FEW_CORES)
    specs = [EVERYWHERE[0], run, convolution("convolution TP1", TP1, 1024, PLAIN)]
    given, found = tmp_path / "specs", tmp_path / "found"
    given.write_bytes(pickle.dumps(specs))
    code, printed = outcome_alone(_PRINT_MULTIPLICATIONS.format(specs=given, found=found), environment)
    assert code == 0, printed
    for spec, multiplications in zip(specs, json.loads(found.read_text()), strict=True):
        # Rows stand in the first of a tile's dimensions: tensor<ROWSx1>, or tensor<ROWSx1x1>.
        of_rows = re.findall(r"tensor<\d+x1(?:x1)?x(i\d+)>", multiplications)
        assert of_rows, spec.name
        assert set(of_rows) == {"i64"}, f"{spec.name}:\n{multiplications}"
