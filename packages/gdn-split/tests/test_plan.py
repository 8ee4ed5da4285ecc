"""Does every row get copied exactly once, on any device? Plans are values, so that this needs no device."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from itertools import product

import pytest
import torch

from gdn_split.plan import (
    MAX_PROGRAMS,
    ConvPlan,
    ConvProblem,
    DeviceLimits,
    GroupShape,
    SplitPlan,
    StepProblem,
    cdiv,
    columns_of_z,
    plan_conv,
    plan_split,
    plan_step,
    power_of_two_at_least,
    power_of_two_at_most,
)
from gdn_split.prefill.plan import PrefillProblem, plan_prefill, plan_prefill_backward, prefill_programs
from kernel_reference.models import QWEN3_NEXT_80B
from kernel_reference.testing.forks import run_alone

H200 = DeviceLimits(132, 232448, programs_per_core=8, dependent_launch=True, register_limit=True)
# A consumer GPU, whose SMs have the least shared memory of all that are planned for.
CONSUMER = DeviceLimits(cores=84, on_chip_bytes=99 * 1024, programs_per_core=8)
BUFFER = 85 * 1024
CORES = range(1, 201)
ROWS = range(4097)


def shape_of(model) -> GroupShape:
    return GroupShape(model.num_heads_qk, model.num_heads_v, model.head_qk, model.head_v)


QWEN = shape_of(QWEN3_NEXT_80B)
QWEN_ROW_BYTES = 2 * (QWEN.qkvz_width + QWEN.ba_width)
# Of a row of TP 8, of a row of many to the buffer, of one that exceeds it, and sizes that are no power of two.
ROW_BYTES = (QWEN_ROW_BYTES // 8, 10, 2 * BUFFER, 12_345)


def rows_walked(plan: SplitPlan, rows: int) -> list[int]:
    """The rows that split_by_run copies, in its own words: program by program, step by step."""
    walked = []
    for program in range(plan.programs):
        first = program * plan.rows_per_program
        end = min(first + plan.rows_per_program, rows)
        for row in range(first, end, plan.rows_per_step):
            walked += [row + i for i in range(plan.rows_per_step) if row + i < end]
    return walked


@pytest.mark.parametrize("row_bytes", ROW_BYTES)
def test_few_cores_cover_every_row_exactly_once_for_any_rows_and_cores(row_bytes: int) -> None:
    # Every core count with every fourth row count each time: four row sizes make the whole range.
    offset = ROW_BYTES.index(row_bytes)
    for cores in CORES:
        limits = DeviceLimits(cores)
        some_rows = ROWS[offset::4]
        plans = [plan_split(rows, QWEN, row_bytes, limits) for rows in some_rows]
        rows = torch.tensor(some_rows)
        programs = torch.tensor([plan.programs for plan in plans])
        run = torch.tensor([plan.rows_per_program for plan in plans])
        step = torch.tensor([plan.rows_per_step for plan in plans])
        # Runs of `run` rows lie side by side from row 0, so these cover all rows, and none begins past the last.
        assert (run >= 1).all()
        assert (programs * run >= rows).all()
        assert ((programs - 1) * run < torch.where(rows == 0, 1, rows)).all()
        assert ((programs == 0) == (rows == 0)).all()
        assert (programs <= cores).all()
        assert (step >= 1).all()


@pytest.mark.parametrize("cores", [1, 7, 24, 40, 48, 200])
def test_the_row_loop_of_few_cores_walks_each_row_once(cores: int) -> None:
    for row_bytes in ROW_BYTES:
        for rows in (0, 1, 2, 3, 6, 7, 39, 40, 41, 63, 64, 65, 100, 1000, 1025, 4096):
            plan = plan_split(rows, QWEN, row_bytes, DeviceLimits(cores))
            assert rows_walked(plan, rows) == list(range(rows))


def test_rows_per_step_is_a_power_of_two_of_at_most_64_although_rows_over_cores_is_not() -> None:
    seen_runs = set()
    for row_bytes in (*ROW_BYTES, QWEN_ROW_BYTES, 1, 700):
        for rows in (*range(1, 4097, 13), 3 * 40, 5 * 48, 100 * 7):
            for cores in (1, 3, 7, 24, 40, 48, 96, 200):
                plan = plan_split(rows, QWEN, row_bytes, DeviceLimits(cores))
                seen_runs.add(plan.rows_per_program)
                assert plan.rows_per_step in (1, 2, 4, 8, 16, 32, 64)
    assert {3, 5, 6, 7, 100} <= seen_runs


def test_a_step_fits_the_buffer_with_inputs_and_outputs_counted_or_is_a_single_row() -> None:
    for row_bytes in (1, 10, 679, 680, 681, 700, 1360, 2720, QWEN_ROW_BYTES // 8, QWEN_ROW_BYTES, BUFFER // 2, BUFFER):
        for rows_per_core in (1, 2, 3, 30, 64, 1000):
            plan = plan_split(rows_per_core * 40, QWEN, row_bytes, DeviceLimits(40))
            step = plan.rows_per_step
            assert step == 1 or step * 2 * row_bytes <= BUFFER
            # As many as fit: twice as many would not fit, would pass 64, or have no rows to take.
            assert step == 64 or 2 * step * 2 * row_bytes > BUFFER or step >= rows_per_core


def test_the_buffer_is_85_kib_unless_the_device_says_otherwise() -> None:
    assert DeviceLimits(40).on_chip_bytes == BUFFER
    assert plan_split(4096, QWEN, BUFFER // 16, DeviceLimits(8)).rows_per_step == 8
    assert plan_split(4096, QWEN, BUFFER // 16, DeviceLimits(8, on_chip_bytes=BUFFER // 2)).rows_per_step == 4


def test_a_row_bigger_than_the_buffer_is_still_copied_one_a_step() -> None:
    plan = plan_split(100, QWEN, 10 * BUFFER, DeviceLimits(40))
    assert plan.rows_per_step == 1
    assert rows_walked(plan, 100) == list(range(100))


def test_no_rows_make_a_plan_and_divide_nothing_by_zero() -> None:
    for limits in (H200, DeviceLimits(1), DeviceLimits(40)):
        try:
            plan = plan_split(0, QWEN, QWEN_ROW_BYTES, limits)
        except ZeroDivisionError:
            pytest.fail(f"no rows are divided by zero on {limits}")
        assert plan.programs == 0
        assert plan.rows_per_step >= 1
        assert plan.rows_per_step_ba >= 1
        assert plan_conv(0, 1, QWEN, limits).programs == 0


@pytest.mark.parametrize(
    "limits", [H200, CONSUMER, DeviceLimits(cores=1, programs_per_core=2), DeviceLimits(7, BUFFER, 3)]
)
@pytest.mark.parametrize("shape", [QWEN, GroupShape(3, 18, 7, 5), GroupShape(1, 1, 1, 1), GroupShape(2, 16, 320, 320)])
def test_one_program_a_tile_covers_each_group_of_each_row_and_each_row_of_b_and_a_once(
    shape: GroupShape, limits: DeviceLimits
) -> None:
    row_bytes = 2 * (shape.qkvz_width + shape.ba_width)
    for rows in (1, 2, 3, 15, 16, 17, 64, 65, 129, 257, 500):
        plan = plan_split(rows, shape, row_bytes, limits)
        assert plan.rows_per_program == 0
        step, step_ba = plan.rows_per_step, plan.rows_per_step_ba
        programs_ba = cdiv(rows, step_ba)
        groups = torch.zeros(rows, shape.num_heads_qk, dtype=torch.int64)
        b_and_a = torch.zeros(rows, dtype=torch.int64)
        for program in range(plan.programs):
            if program < programs_ba:
                b_and_a[program * step_ba : (program + 1) * step_ba] += 1
            else:
                tile, group = divmod(program - programs_ba, shape.num_heads_qk)
                assert tile * step < rows
                groups[tile * step : (tile + 1) * step, group] += 1
        assert (groups == 1).all()
        assert (b_and_a == 1).all()


@pytest.mark.parametrize("shape", [QWEN, shape_of(QWEN3_NEXT_80B.tensor_parallel(8)), GroupShape(8, 24, 128, 128)])
def test_an_sm_with_99_kib_of_shared_memory_holds_the_tiles_of_all_its_programs(shape: GroupShape) -> None:
    row_bytes = 2 * (shape.qkvz_width + shape.ba_width)
    for rows in (1, 64, 1024, 8192, 65536):
        plan = plan_split(rows, shape, row_bytes, CONSUMER)
        assert plan.covers(rows, shape)
        assert not plan.rows_per_program
        tile_bytes = plan.rows_per_step * row_bytes // shape.num_heads_qk
        assert CONSUMER.programs_per_core * tile_bytes <= CONSUMER.on_chip_bytes
    for sequences in (1, 64, 1024):
        plan = plan_conv(sequences, 1, shape, CONSUMER)
        assert plan.covers(sequences, 1, shape)
        # An input, a weight and three of the state for each channel, in float32.
        tile_bytes = 4 * 5 * plan.sequences_per_program * plan.block
        assert CONSUMER.programs_per_core * tile_bytes <= CONSUMER.on_chip_bytes


def test_steps_on_a_gpu_are_powers_of_two_of_at_most_64() -> None:
    for shape in (QWEN, GroupShape(3, 18, 7, 5), GroupShape(1, 1, 1, 1)):
        for rows in (*range(1, 2000, 17), 174_763, 2**20 + 1):
            plan = plan_split(rows, shape, 2 * (shape.qkvz_width + shape.ba_width), H200)
            for step in (plan.rows_per_step, plan.rows_per_step_ba):
                assert 1 <= step <= 64
                assert power_of_two_at_least(step) == step


def check_grids(most_rows: int) -> None:
    """The grid for row counts around each power of two up to ``most_rows``."""
    for exponent in range(most_rows.bit_length()):
        for rows in (2**exponent - 1, 2**exponent, 2**exponent + 1):
            for shape in (QWEN, GroupShape(64, 64, 1, 1), GroupShape(1, 8, 320, 320)):
                plan = plan_split(rows, shape, 2 * (shape.qkvz_width + shape.ba_width), H200)
                assert plan.programs <= MAX_PROGRAMS == 2**31 - 1
                tiles = cdiv(rows, plan.rows_per_step)
                assert plan.programs == cdiv(rows, plan.rows_per_step_ba) + tiles * shape.num_heads_qk
                for step in (plan.rows_per_step, plan.rows_per_step_ba):
                    assert power_of_two_at_least(step) == step


def test_the_grid_never_passes_what_a_launch_can_take() -> None:
    check_grids(2**32)


def test_planning_for_more_rows_than_any_memory_holds_ends() -> None:
    # In a process of its own, which can be stopped: a plan that grows towards no end would hold up the suite.
    program = f"import runpy; runpy.run_path({__file__!r})['check_grids'](2**40)"
    run_alone(program, timeout_s=15)


@pytest.mark.parametrize("limits", [H200, DeviceLimits(1), DeviceLimits(40)])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_the_convolution_takes_each_column_of_each_sequence_once(tokens: int, limits: DeviceLimits) -> None:
    for shape in (GroupShape(1, 3, 16, 16), GroupShape(3, 18, 7, 5), GroupShape(4, 8, 128, 128), QWEN):
        widths = (shape.head_qk, shape.head_qk, shape.ratio * shape.head_v, shape.ratio * shape.head_v)
        for sequences in (1, 2, 3, 7, 64, 255, 256, 1000):
            in_vectors = sequences % 2 == 1
            plan = plan_conv(sequences, tokens, shape, limits, in_vectors, in_vectors)
            assert plan.covers(sequences, tokens, shape, in_vectors)
            together = plan.sequences_per_program
            for power in (together, plan.block, plan.rows_per_step_ba):
                assert power_of_two_at_least(power) == power
            blocks = (*[plan.block] * 3, columns_of_z(shape, plan.block))
            tiles = [(part, i) for part in range(4) for i in range(cdiv(widths[part], blocks[part]))]
            units = len(tiles) * shape.num_heads_qk
            ids = torch.arange(plan.programs - cdiv(sequences * tokens, plan.rows_per_step_ba))
            # A program's sequences, part and tile; tiles lie side by side in a part.
            assert all(cdiv(width, block) * block >= width for width, block in zip(widths, blocks, strict=True))
            taken = torch.zeros(sequences + together, units, dtype=torch.int64)
            for i in range(together):
                taken.index_put_((ids // units * together + i, ids % units), torch.ones_like(ids), accumulate=True)
            assert (taken[:sequences] == 1).all()


@pytest.mark.parametrize("sequences", [1, 64])
def test_states_in_vectors_go_to_threads_of_four_channels_where_tiles_are_full(sequences: int) -> None:
    for adjacent in (True, False):
        plan = plan_conv(sequences, 1, QWEN, H200, adjacent, True)
        assert plan.fours
        assert not plan.covers(sequences, 1, QWEN)
        assert not plan_conv(sequences, 1, QWEN, H200, adjacent).fours
        ragged = GroupShape(3, 18, 7, 5)
        assert not plan_conv(sequences, 1, ragged, H200, adjacent, True).fours
        assert not replace(plan, programs=10**6).covers(sequences, 1, ragged, True)


@pytest.mark.parametrize(("width", "strides", "whether"), [
    (4, (99, 3, 1), True), (4, (99, 1, 40), True), (4, (99, 4, 1), False), (3, (99, 2, 1), False),
])  # fmt: skip
def test_a_state_of_three_taps_is_in_vectors_if_it_is_packed_or_channel_last(
    width: int, strides: tuple[int, int, int], whether: bool
) -> None:
    problem = ConvProblem(QWEN, 1, 1, 9, (), strides, (width, 1), width, True, False, True, False)
    assert problem.in_vectors is whether


@pytest.mark.parametrize("plan", [
    plan_split(4096, QWEN, QWEN_ROW_BYTES, H200),
    plan_split(4096, QWEN, QWEN_ROW_BYTES, DeviceLimits(40)),
    plan_conv(256, 2, QWEN, H200),
])  # fmt: skip
def test_a_plan_survives_crossing_an_op(plan: SplitPlan | ConvPlan) -> None:
    assert all(type(number) is int for number in plan.as_ints())
    again = type(plan)(*plan.as_ints())
    assert again == plan
    assert hash(again) == hash(plan)
    assert eval(repr(plan)) == plan
    with pytest.raises(FrozenInstanceError):
        plan.programs = 1  # type: ignore[misc]


def test_a_plan_depends_on_nothing_but_its_arguments() -> None:
    for limits in (H200, DeviceLimits(40)):
        assert plan_split(777, QWEN, QWEN_ROW_BYTES, limits) == plan_split(777, QWEN, QWEN_ROW_BYTES, limits)
        assert plan_conv(77, 2, QWEN, limits) == plan_conv(77, 2, QWEN, limits)


def test_only_devices_that_can_wait_on_the_device_are_asked_to() -> None:
    for plan in (plan_split(64, QWEN, QWEN_ROW_BYTES, DeviceLimits(40)), plan_conv(64, 1, QWEN, DeviceLimits(40))):
        assert not plan.dependent_launch


def test_only_the_kernel_that_waits_is_launched_before_the_one_ahead_has_ended() -> None:
    by_run = plan_split(64, QWEN, QWEN_ROW_BYTES, DeviceLimits(40))
    by_group = plan_split(64, QWEN, QWEN_ROW_BYTES, H200)
    assert by_run.covers(64, QWEN)
    assert not replace(by_run, dependent_launch=True).covers(64, QWEN)
    assert by_group.dependent_launch
    assert by_group.covers(64, QWEN)
    assert replace(by_group, dependent_launch=False).covers(64, QWEN)


def test_limits_and_shapes_are_values_too() -> None:
    for value in (H200, QWEN):
        with pytest.raises(FrozenInstanceError):
            setattr(value, fields(value)[0].name, 1)
    assert (QWEN.ratio, QWEN.qkv_width, QWEN.qkvz_width, QWEN.ba_width) == (2, 8192, 12288, 64)


def test_powers_of_two_round_as_their_names_say() -> None:
    for n in range(1, 1000):
        at_most, at_least = power_of_two_at_most(n), power_of_two_at_least(n)
        assert at_most <= n <= at_least
        assert at_most & (at_most - 1) == at_least & (at_least - 1) == 0
        assert 2 * at_most > n
        assert at_least < 2 * n


def test_importing_the_package_and_planning_touch_no_gpu_and_import_no_triton() -> None:
    program = (
        "import sys, gdn_split, torch\n"
        "from gdn_split.plan import *\n"
        "plan_split(4096, GroupShape(16, 32, 128, 128), 24704, DeviceLimits(132, 232448, 8))\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'triton.language' not in sys.modules, 'triton is imported'\n"
        "assert 'gdn_split.kernels' not in sys.modules\n"
    )
    run_alone(program)


STEP = StepProblem(
    GroupShape(16, 32, 128, 128), 64, 1, 512, (12288, 64), (24576, 1, 8192), (4, 1), (524288, 16384, 128, 1), 4,
    (4096, 128), 4, True, True, True, True, 128**-0.5, 1e-6, True, 0,
)  # fmt: skip


@pytest.mark.parametrize("inner", [(128, 1), (1, 128)])
@pytest.mark.parametrize("state_bytes", [2, 4])
def test_a_warp_of_few_programs_sums_a_step_over_dk_by_itself(inner: tuple[int, int], state_bytes: int) -> None:
    problem = replace(STEP, state_strides=(524288, 16384, *inner), state_bytes=state_bytes, sequences=31)
    plan = plan_step(problem, H200)
    assert plan.covers(problem)
    # Along Dv each warp has a run of its own; along Dk runs are summed by the lanes that read them.
    assert plan.block_v == 128
    assert plan.run == (128 // state_bytes if problem.k_inner else 128 // plan.num_warps)
    # Of float32 states along Dk half as long, while each program has an SM to itself.
    alone = plan_step(replace(problem, sequences=4), H200)
    assert alone.run == (16 if problem.k_inner and state_bytes == 4 else plan.run)


def test_a_step_of_many_programs_of_float32_states_shares_runs_or_has_four_warps() -> None:
    along_k = replace(STEP, state_strides=(524288, 16384, 1, 128))
    found = {
        (layout, tokens, sequences): (plan.run, plan.num_warps, plan.max_registers)
        for layout, problem in (("KV", STEP), ("VK", along_k))
        for tokens in (1, 2, 3, 4)
        for sequences in (31, 32, 47, 48)
        for plan in (plan_step(replace(problem, tokens=tokens, sequences=sequences), H200),)
    }
    few = {of: (16 if of[0] == "KV" else 32, 8, 128) for of in found}
    many = {("KV", 1, sequences): (32, 8, 128) for sequences in (32, 47, 48)}
    many |= {("KV", 4, 48): (32, 4, 255), ("VK", 4, 48): (32, 4, 255)}
    assert found == few | many
    assert plan_step(replace(STEP, tokens=4), replace(H200, register_limit=False)).num_warps == 8


@pytest.mark.parametrize(
    ("sizes", "block_v"), [((256, 256), 64), ((192, 192), 64), ((128, 256), 128), ((192, 128), 64)]
)
def test_a_large_head_is_taken_in_slices_by_programs_of_the_size_of_others(
    sizes: tuple[int, int], block_v: int
) -> None:
    of_128 = plan_step(replace(STEP, state_bytes=2), H200)
    large = plan_step(replace(STEP, shape=GroupShape(4, 8, *sizes), state_bytes=2), H200)
    assert large == replace(of_128, block_v=block_v, run=block_v // 4, ahead=0)


def test_a_step_of_16_bit_states_along_dv_has_four_warps_where_registers_can_be_limited() -> None:
    short = replace(STEP, state_bytes=2)
    found = [
        (plan.num_warps, plan.max_registers)
        for plan in (
            plan_step(short, H200),
            plan_step(short, replace(H200, register_limit=False)),
            plan_step(replace(short, state_strides=(524288, 16384, 1, 128)), H200),
            plan_step(replace(short, tokens=2), H200),
            plan_step(replace(short, writes=False), H200),
            plan_step(STEP, H200),
        )
    ]
    assert found == [(4, 168), (8, 0), (8, 128), (8, 128), (8, 128), (8, 128)]


@pytest.mark.parametrize("inner", [(128, 1), (1, 128)])
def test_a_step_of_four_tokens_and_16_bit_states_has_four_warps_where_not_all_programs_start_at_once(
    inner: tuple[int, int],
) -> None:
    short = replace(STEP, state_bytes=2, tokens=4, state_strides=(524288, 16384, *inner))
    few, many = (plan_step(replace(short, sequences=sequences), H200) for sequences in (8, 9))
    assert (few.num_warps, few.max_registers, few.early) == (8, 128, True)
    assert (many.num_warps, many.max_registers, many.early, many.run) == (4, 255, True, 32)


def test_a_step_loads_all_first_where_there_are_more_programs_than_cores() -> None:
    # Of 32 heads.
    assert [plan_step(replace(STEP, sequences=n), H200).first for n in (1, 4, 5, 64)] == [False, False, True, True]
    for problem in (replace(STEP, sequences=64, writes=False), replace(STEP, sequences=64, out_strides=None)):
        assert not plan_step(problem, H200).first
    assert not plan_step(replace(STEP, sequences=64), DeviceLimits(132, 232448, 8)).first


def test_a_state_written_early_after_one_token_is_the_first_to_leave_the_cache() -> None:
    found = [
        plan_step(problem, H200).streams
        for problem in (
            STEP,
            replace(STEP, sequences=1, state_bytes=2),
            replace(STEP, tokens=2),
            replace(STEP, writes=False),
            replace(STEP, shape=GroupShape(16, 32, 64, 64), state_strides=(131072, 4096, 64, 1)),
        )
    ]
    assert found == [True, True, False, False, False]


def test_a_step_fetches_ahead_where_more_programs_follow_than_start_at_once() -> None:
    assert plan_step(STEP, H200).ahead == 99
    assert plan_step(replace(STEP, state_bytes=2), H200).ahead == 264
    assert [plan_step(replace(STEP, sequences=number), H200).ahead for number in (1, 8, 9)] == [0, 0, 99]
    older = replace(H200, dependent_launch=False)
    assert plan_step(STEP, older).ahead == 0


def test_a_step_writes_its_state_early_where_registers_hold_the_outputs_that_wait() -> None:
    along_k = replace(STEP, state_strides=(524288, 16384, 1, 128))
    for tokens, problem, size in product((1, 2, 4, 5), (STEP, along_k), (4, 2)):
        assert plan_step(replace(problem, tokens=tokens, state_bytes=size), H200).early == (tokens < 5)
    assert not plan_step(replace(STEP, writes=False), H200).early
    assert not plan_step(replace(STEP, out_strides=None), H200).early


@pytest.mark.parametrize("size", [64, 256])
def test_a_step_through_heads_of_which_a_program_holds_more_or_less_than_one_fetches_nothing(size: int) -> None:
    shape = GroupShape(16, 32, size, size)
    problem = replace(STEP, shape=shape, state_strides=(32 * size * size, size * size, size, 1))
    assert plan_step(problem, H200).ahead == 0


def test_only_states_that_are_one_piece_of_memory_are_fetched_ahead() -> None:
    assert not replace(plan_step(STEP, H200), ahead=-1).covers(STEP)
    for inner in ((1, 128), (128, 1), (160, 1), (128, 2)):
        apart = replace(STEP, state_strides=(524288, 32768, *inner))
        plan = plan_step(apart, H200)
        assert (plan.ahead > 0) == (inner in ((1, 128), (128, 1)))
        assert plan.covers(apart)
        assert replace(plan, ahead=264).covers(apart) == (plan.ahead > 0)


PREFILL = PrefillProblem(
    GroupShape(16, 32, 128, 128), 8192, 7, 0, (12288, 64), None, (4, 1), 4, True, True, True, False, 64
)  # fmt: skip


def test_a_walk_of_prefill_is_of_whole_tiles_and_of_four_rows_at_least() -> None:
    plan = plan_prefill(PREFILL, CONSUMER)
    assert (plan.walk, plan.max_registers) == (16, 0)
    found = [replace(plan, rows=2, walk=walk).covers(PREFILL) for walk in (0, 2, 4, 64, 96)]
    assert found == [True, False, True, True, False]
    assert not replace(plan, rows=16, walk=8).covers(PREFILL)
    assert prefill_programs(PREFILL, replace(plan, walk=64)) == 128 + 128 * 96


def test_rows_are_walked_where_they_are_many_and_eight_to_a_sequence() -> None:
    large = replace(PREFILL, shape=GroupShape(16, 32, 256, 256))
    for problem in (large, replace(PREFILL, rows=1000), replace(PREFILL, sequences=2000)):
        assert plan_prefill(problem, H200).walk == 0
    assert plan_prefill(replace(PREFILL, sequences=1000), H200).walk == 16
    assert (plan_prefill(PREFILL, H200).walk, plan_prefill(PREFILL, H200).num_warps) == (16, 1)
    assert [plan_prefill(replace(PREFILL, rows=rows), H200).ahead for rows in (2048, 8000, 32768)] == [4, 8, 8]


@pytest.mark.parametrize("width", [2, 3, 4])
def test_walks_of_prefills_gradients_pass_every_row_and_are_short_where_rows_are_few(width: int) -> None:
    for rows in (1, 15, 16, 1000, 8192, 100_000):
        problem = replace(PREFILL, rows=rows, width=width)
        plan = plan_prefill_backward(problem, H200)
        gates, walks = plan.programs(problem)
        # A walk's last rows are the next one's first.
        own = plan.steps - (width - 1)
        assert (walks - 1) * own < rows <= walks * own
        assert (gates - 1) * 64 < rows <= gates * 64
        assert plan.steps % 4 == 0
        assert plan.steps == {8192: 64, 100_000: 128}.get(rows, 16)


def test_gradients_of_many_rows_are_fetched_ahead_and_of_heads_of_128_the_least() -> None:
    found = {
        (size, rows): plan_prefill_backward(replace(PREFILL, shape=GroupShape(8, 8, size, size), rows=rows), H200).ahead
        for size in (64, 96, 128, 256)
        for rows in (512, 8192, 32768)
    }
    many = {(size, rows): 12 for size, rows in found if size != 128 and rows > 512}
    assert found == dict.fromkeys(found, 0) | many | {(128, 8192): 4}
