"""Does every call get a plan that a kernel can take, on any device? Plans are values, so that this needs no device."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from kernel_reference.models import MINIMAX_01
from kernel_reference.testing.forks import run_alone
from lightning_attn.fitting import (
    SHORT,
    apart,
    besides,
    narrowed,
    packed_by_two,
    shared,
    staged,
    staged_by_mean,
    widened,
)
from lightning_attn.gradients.plan import groups_at_once
from lightning_attn.packed.plan import StateProblem, in_one_launch, plan_state
from lightning_attn.plan import (
    BackwardProblem,
    DecodePlan,
    DeviceLimits,
    Heads,
    Operand,
    PrefillPlan,
    PrefillProblem,
    cdiv,
    fits_hopper,
    fitted,
    plan_decode,
    plan_prefill,
    unsegmented,
)

KIB = 1024
H200 = DeviceLimits(132, 227 * KIB, hopper=True, dependent_launch=True, bf16=True)
A100 = DeviceLimits(108, 163 * KIB, bf16=True)
CONSUMER = DeviceLimits(84, 99 * KIB, bf16=True)
RTX_50 = DeviceLimits(170, 99 * KIB, blackwell=True, dependent_launch=True, bf16=True)
T4 = DeviceLimits(40, 64 * KIB)
MI300X = DeviceLimits(304, 64 * KIB)
B200 = DeviceLimits(148, 227 * KIB, blackwell=True, dependent_launch=True, bf16=True)
DEVICES = {
    "H200": H200, "A100": A100, "a consumer GPU": CONSUMER, "MI300X": MI300X, "B200": B200, "one core": DeviceLimits(1),
    "RTX 50": RTX_50, "T4": T4,
}  # fmt: skip
on_every_device = pytest.mark.parametrize("limits", DEVICES.values(), ids=DEVICES)
DTYPES = ("bfloat16", "float16", "float32")
SIZES = (16, 17, 31, 32, 33, 48, 64, 65, 80, 96, 100, 128, 129, 192, 250, 255, 256)
MINIMAX = Heads(MINIMAX_01.num_heads, MINIMAX_01.num_heads, MINIMAX_01.head_qk, MINIMAX_01.head_v)
TP8 = replace(MINIMAX, num_heads_qk=8, num_heads_v=8)


def prefill_plans(limits: DeviceLimits):
    """Plans of every arithmetic, head size and number of heads, for Hopper's kernel or not, for snapshots or not."""
    some = (1, 8, 64)
    for d, e, heads, dtype, *flags in itertools.product(SIZES, SIZES, some, DTYPES, (False, True), (False, True)):
        shape = Heads(heads, heads, d, e)
        yield shape, dtype, plan_prefill(shape, dtype, limits, *flags)


@on_every_device
def test_the_plan_of_any_heads_is_one_that_covers_them(limits: DeviceLimits) -> None:
    for shape, *_, plan in prefill_plans(limits):
        assert plan.covers(shape), (shape, plan)
        assert plan_decode(shape, limits).covers(shape)


@on_every_device
def test_segments_are_whole_chunks_at_all_head_sizes(limits: DeviceLimits) -> None:
    for d, e in itertools.product(range(16, 257, 3), range(16, 257, 3)):
        for dtype, hopper in itertools.product(DTYPES, (False, True)):
            plan = plan_prefill(Heads(8, 8, d, e), dtype, limits, hopper)
            assert plan.segment % plan.chunk == 0
            assert plan.segment == 0 or plan.segment >= 4 * plan.chunk


@on_every_device
def test_blocks_are_powers_of_two_that_waste_less_than_half_of_a_state(limits: DeviceLimits) -> None:
    for shape, _, plan in prefill_plans(limits):
        assert 16 <= plan.block_e <= (128 if plan.roles else 64)
        assert 16 <= plan.block_d <= 256
        assert plan.block_e < 2 * shape.head_v
        assert plan.block_d < 2 * shape.head_qk
        # A tensor core's products are of 16 at least.
        assert 16 <= plan.chunk <= 64
    for e in SIZES:
        block_e = plan_decode(Heads(1, 1, 64, e), limits).block_e
        assert 16 <= block_e <= 64
        assert block_e < 2 * e


@on_every_device
def test_stages_fit_the_shared_memory_that_there_is(limits: DeviceLimits) -> None:
    """Counted by hand: q, k and v of each stage, and at the least a chunk's scores and weighted values."""
    for shape, dtype, plan in prefill_plans(limits):
        itemsize = 4 if dtype == "float32" else 2
        # Without copies ahead a piece of a chunk is held at a time.
        pieces = cdiv(shape.head_qk, plan.block_d) if plan.num_stages > 1 else 1
        tile = plan.chunk * (2 * pieces * plan.block_d + plan.block_e) * itemsize
        # By roles values wait in registers.
        operands = plan.chunk * (plan.chunk + plan.block_e * (not plan.roles)) * itemsize
        assert plan.num_stages * tile + operands <= limits.shared_memory, (shape, plan)


def test_less_shared_memory_never_means_more_stages() -> None:
    for d, e in itertools.product(SIZES, SIZES):
        for dtype in DTYPES:
            stages = [
                plan_prefill(Heads(8, 8, d, e), dtype, DeviceLimits(100, kib * KIB)).num_stages
                for kib in (16, 64, 99, 163, 227)
            ]
            assert stages == sorted(stages)


def test_hoppers_kernel_takes_16_bits_of_its_head_sizes_where_strides_and_device_allow_it() -> None:
    asked = Heads(64, 64, 128, 128)
    plan = plan_prefill(asked, "bfloat16", H200, suits_tma=True)
    assert plan == PrefillPlan(64, 64, 0, 4, 4, block_d=64, hopper=True, roles=True)
    assert not plan_prefill(asked, "bfloat16", H200, suits_tma=False).hopper
    assert not plan_prefill(asked, "bfloat16", replace(H200, hopper=False), suits_tma=True).hopper
    # Float32's takes any strides.
    for suits_tma in (False, True):
        of_float32 = PrefillPlan(64, 64, 0, 8, 1, block_d=64, hopper=True, bf16x6=True)
        assert plan_prefill(asked, "float32", H200, suits_tma) == of_float32
    assert plan_prefill(asked, "float16", H200, suits_tma=True) == plan
    for d, e in itertools.product(range(16, 257), range(16, 257)):
        shape = Heads(64, 64, d, e)
        fits = 32 < d <= 256 and e > 32
        assert fits_hopper(shape) == fits
        assert plan_prefill(shape, "bfloat16", H200, suits_tma=True).hopper == fits
        assert plan_prefill(shape, "float32", H200).hopper == fits


def test_hoppers_plan_fits_its_shared_memory() -> None:
    for d, e in itertools.product((40, 64, 72, 128, 192, 256), (64, 96, 128, 256)):
        plan = plan_prefill(Heads(8, 8, d, e), "bfloat16", H200, suits_tma=True)
        # q, k and v of each stage, and the scores; but by roles tiles of outputs, and the weights within a chunk in
        # float32.
        columns = cdiv(d, plan.block_d) * plan.block_d
        stages = plan.num_stages * plan.chunk * (2 * columns + plan.block_e) * 2
        tiles = 0 if plan.roles else min(2, plan.num_stages - 1) * plan.chunk * plan.block_e * 2 + plan.chunk**2 * 4
        assert stages + tiles + plan.chunk**2 * 2 <= H200.shared_memory - KIB


def test_segments_are_taken_where_heads_alone_leave_a_quarter_of_the_device_idle() -> None:
    for limits in DEVICES.values():
        for heads, e in itertools.product((1, 2, 8, 24, 40, 64, 100, 256), (32, 64, 128, 256)):
            plan = plan_prefill(Heads(heads, heads, 64, e), "bfloat16", limits)
            programs = heads * cdiv(e, plan.block_e)
            assert (plan.segment == 0) == (programs >= 0.75 * limits.cores), (limits, heads, e)
    assert plan_prefill(MINIMAX, "bfloat16", H200).segment == 0
    assert plan_prefill(TP8, "bfloat16", H200).segment == 2048
    # Grouped heads are walked one by one, whichever of q and v has them.
    for shape in (Heads(8, 64, 128, 128), Heads(64, 8, 128, 128)):
        assert plan_prefill(shape, "bfloat16", H200) == plan_prefill(MINIMAX, "bfloat16", H200)


def test_segments_for_sm_90_are_a_program_an_sm_for_a_sequence_of_16384_tokens() -> None:
    for heads, size, segment, stages in (
        (64, 64, 8192, 6), (16, 64, 2048, 6), (128, 64, 0, 6), (32, 96, 8192, 4), (32, 128, 8192, 4),
        (40, 128, 8192, 4), (40, 64, 4096, 6), (16, 128, 4096, 4), (8, 128, 2048, 4), (4, 128, 2048, 4),
        (1, 64, 1024, 6), (64, 128, 0, 4), (32, 192, 0, 3),
        (8, 256, 4096, 3), (64, 72, 8192, 4), (32, 72, 4096, 4), (16, 72, 4096, 4), (8, 72, 2048, 4),
        (64, 80, 8192, 4), (32, 80, 4096, 4), (128, 72, 0, 4), (32, 104, 4096, 4), (16, 104, 2048, 4),
    ):  # fmt: skip
        shape = Heads(heads, heads, size, size)
        plan = plan_prefill(shape, "bfloat16", H200, suits_tma=True)
        assert (plan.segment, plan.num_stages) == (segment, stages), shape
        # Of 104 the last piece would cost as much as one of 64 rows, of 72 and 80 it has fewer columns.
        assert plan.roles == (size != 104 or heads > 16), shape
        assert (plan.block_e == 128) == (size in (72, 80, 104) and heads > 16), shape
        assert plan_prefill(shape, "float16", H200, suits_tma=True) == plan


@on_every_device
def test_states_between_segments_take_at_most_5_percent_of_q_k_and_v(limits: DeviceLimits) -> None:
    """For a sequence of 131072 tokens of equal heads in 16 bits; states are float32, a segment's and its parts'."""
    tokens = 131072
    for d, e in itertools.product(range(16, 257), repeat=2):
        if max(d, e) > 2 * min(d, e):
            continue
        heads = 8 if d % 16 else 40
        plan = plan_prefill(Heads(heads, heads, d, e), "bfloat16", limits, suits_tma=True)
        if plan.segment:
            states = cdiv(tokens, plan.segment) * (1 + (plan.segment // plan.part if plan.part else 0))
            assert states * d * e * 4 <= 0.05 * tokens * (2 * d + e) * 2, (d, e, plan)


def test_plans_do_not_depend_on_how_many_sequences_or_tokens_there_are() -> None:
    """A sequence has the same bits whatever its neighbours, of which there is no way to tell a plan."""
    assert [*inspect.signature(plan_prefill).parameters] == [
        "heads", "dtype", "limits", "suits_tma", "snapshots",
    ]  # fmt: skip
    assert [*inspect.signature(plan_decode).parameters] == ["heads", "limits"]
    for limits in DEVICES.values():
        assert plan_prefill(TP8, "bfloat16", limits) == plan_prefill(TP8, "bfloat16", limits)
        assert plan_decode(TP8, limits) == plan_decode(TP8, limits)


def test_a_long_segment_among_few_other_rows_has_programs_besides() -> None:
    """In all batches of one kernel: as many as SMs have room for, where the others' rows take less time than it."""
    shape = Heads(16, 16, 128, 128)
    short = staged(plan_prefill(shape, "bfloat16", H200, suits_tma=True), shape, 1)
    for tokens, sequences, more in (
        (4096 + 32, 33, 3), (4096 + 127, 128, 3), (8192 + 64, 65, 3), (16384 + 64, 65, 0), (4096 + 255, 256, 0),
        (2048 + 32, 33, 3), (2047 + 32, 33, 0), (128, 128, 0), (64 * 33, 64, 3),
    ):  # fmt: skip
        found = besides(short, shape, tokens, sequences, H200)
        assert found == replace(short, long=512, besides=more), (tokens, sequences)
        assert found.covers(shape)
    exact = plan_prefill(TP8, "float32", H200, suits_tma=True)
    assert besides(exact, TP8, 4096 + 8, 9, H200) == replace(exact, long=512, besides=7)
    alike = replace(exact, shares=2)
    assert besides(alike, TP8, 4096, 2, H200) == replace(alike, long=512)
    # Nor where a program takes whole sequences, where segments are shorter, or where roles have other programs.
    many = staged(plan_prefill(MINIMAX, "bfloat16", H200, suits_tma=True), MINIMAX, 1)
    narrow = Heads(8, 8, 64, 64)
    for plan, heads in (
        (many, MINIMAX), (plan_prefill(shape, "bfloat16", H200, suits_tma=True), shape),
        (replace(exact, apart=True), TP8), (plan_prefill(TP8, "bfloat16", A100), TP8),
        (staged(plan_prefill(narrow, "bfloat16", H200, suits_tma=True), narrow, 1), narrow),
    ):  # fmt: skip
        assert besides(plan, heads, 4096 + 8, 9, H200) == plan
    assert not replace(short, besides=1).covers(shape)
    for wrong in (-1, 1024):
        assert not replace(short, long=512, besides=wrong).covers(shape)
    assert not replace(short, long=192, besides=3).covers(shape)
    assert not replace(short, long=2048, roles=True, block_d=64).covers(shape)


def test_longer_sequences_take_two_stages_where_there_are_many() -> None:
    """Whichever is long: few, of which one is long, are slower than by roles."""
    for heads, sequences, mean, is_short in (
        (8, 16, 250, False), (16, 62, 256, True), (16, 62, 257, False), (16, 61, 256, False), (32, 31, 256, False),
        (32, 62, 256, True), (32, 62, 512, True), (32, 62, 513, False), (64, 16, 256, True), (64, 15, 256, False),
        (64, 31, 512, False), (16, 62, 200, False),
    ):  # fmt: skip
        shape = Heads(heads, heads, 128, 128)
        plan = plan_prefill(shape, "bfloat16", H200, suits_tma=True)
        found = staged_by_mean(plan, shape, mean * sequences, sequences, H200)
        assert found == (staged(plan, shape, 1) if is_short else plan), (heads, sequences, mean)


def test_short_sequences_take_two_stages_of_the_kernel_for_sm_90_and_nothing_else_of_another_plan() -> None:
    for shape in (MINIMAX, TP8, Heads(128, 128, 64, 64)):
        plan = plan_prefill(shape, "bfloat16", H200, suits_tma=True)
        short = replace(plan, num_stages=2, block_d=shape.head_qk, roles=False)
        assert staged(plan, shape, SHORT) == short
        assert staged(plan, shape, SHORT + 1) == plan
        assert short.covers(shape)
        for other in (plan_prefill(shape, "float32", H200), plan_prefill(shape, "bfloat16", A100)):
            assert staged(other, shape, 1) == other
        assert staged_by_mean(plan, shape, 128 * 7, 7, H200) == short
        assert staged_by_mean(plan, shape, 128 * 7 + 1, 7, H200) == plan
        assert apart(short, shape, 9, 9) == replace(short, apart=short.segment == 0)
        assert apart(short, shape, 10, 9) == short
        assert apart(plan, shape, 9, 9) == plan
        assert replace(short, apart=True).covers(shape)
        assert not replace(plan, apart=True).covers(shape)
        exact = plan_prefill(shape, "float32", H200, suits_tma=True)
        assert apart(exact, shape, 9, 9) == replace(exact, apart=True)
        assert apart(exact, shape, 10, 9) == exact
    # With three, two programs share an SM.
    shape = Heads(64, 64, 64, 64)
    plan = plan_prefill(shape, "bfloat16", H200, suits_tma=True)
    assert staged(plan, shape, 1) == replace(plan, num_stages=3, roles=False)
    wide = Heads(8, 8, 256, 256)
    of_wide = plan_prefill(wide, "bfloat16", H200, suits_tma=True)
    assert staged(of_wide, wide, 1) == of_wide


def test_packed_sequences_of_heads_that_fill_the_device_have_no_segments_by_two_warpgroups() -> None:
    shape = Heads(64, 64, 72, 72)
    plan = plan_prefill(shape, "bfloat16", H200, suits_tma=True)
    assert (plan.roles, plan.block_e, plan.segment, plan.part) == (True, 128, 8192, 1024)
    whole = unsegmented(plan)
    assert packed_by_two(plan, shape, 8192, 2, H200) == packed_by_two(plan, shape, 4097, 1, H200) == whole
    assert packed_by_two(plan, shape, 4096, 1, H200, snapshots=True) == whole
    assert packed_by_two(plan, shape, 4096, 1, H200) == replace(whole, block_e=64, num_warps=4)
    assert whole.covers(shape)
    for other, segment in ((Heads(32, 32, 72, 72), 4096), (Heads(16, 16, 88, 80), 4096), (Heads(8, 8, 72, 72), 2048)):
        plan = plan_prefill(other, "bfloat16", H200, suits_tma=True)
        assert plan.segment == segment
        assert (plan.block_e == 128) == (other.num_heads > 16)
        assert packed_by_two(plan, other, 16384, 1, H200) == plan


def test_two_warpgroups_share_scores_where_a_program_an_sm_is_left_and_nowhere_else() -> None:
    for heads, size, tokens, sequences, wide in (
        (8, 128, 32768, 1, True), (8, 128, 16384, 1, False), (4, 128, 16384, 1, False), (16, 128, 16384, 1, False),
        (16, 128, 32768, 1, True), (16, 128, 3000, 4, False), (32, 104, 16384, 1, False), (32, 128, 16384, 1, False),
        (64, 128, 16384, 1, False), (64, 64, 16384, 1, False), (16, 256, 16384, 1, False),
        (64, 128, 16384, 2, True), (64, 128, 4096, 3, False), (64, 96, 4096, 16, True), (96, 64, 4096, 4, False),
    ):  # fmt: skip
        shape = Heads(heads, heads, size, size)
        plan = plan_prefill(shape, "bfloat16", H200, suits_tma=True)
        segments = sequences * -(-tokens // plan.segment) if plan.segment else sequences
        found = widened(plan, shape, segments, H200)
        by_two = replace(plan, block_e=128, num_warps=8, num_stages=3, block_d=128, roles=False)
        if not plan.segment:
            by_two = replace(plan, block_e=128, num_warps=8)
        assert found == (by_two if wide else plan), (heads, size, tokens)
        assert found.covers(shape)
    for other in (plan_prefill(TP8, "float32", H200, suits_tma=True), plan_prefill(TP8, "bfloat16", A100)):
        assert widened(other, TP8, 16, H200) == other


def test_programs_share_segments_where_they_leave_sms_idle_and_nowhere_else() -> None:
    for heads, size, segments, shares in (
        (4, 128, 8, 2), (4, 128, 2, 4), (4, 128, 1, 4), (8, 128, 2, 4), (8, 128, 8, 1), (8, 96, 4, 2), (8, 96, 5, 1),
        (16, 128, 1, 4), (16, 128, 3, 1), (32, 64, 1, 4), (4, 256, 1, 4), (16, 256, 1, 2), (64, 128, 1, 1),
    ):  # fmt: skip
        shape = Heads(heads, heads, size, size)
        plan = plan_prefill(shape, "bfloat16", H200, suits_tma=True)
        found = shared(plan, shape, segments, H200)
        assert found == replace(plan, shares=shares), (heads, size, segments)
        assert found.covers(shape)
    exact, wide = plan_prefill(TP8, "float32", H200, suits_tma=True), Heads(8, 8, 256, 256)
    assert [shared(exact, TP8, segments, H200).shares for segments in (1, 2, 4, 5)] == [4, 4, 2, 1]
    assert shared(exact, TP8, 1, H200).covers(TP8)
    of_wide = plan_prefill(wide, "float32", H200, suits_tma=True)
    assert [shared(of_wide, wide, segments, H200).shares for segments in (1, 2)] == [2, 1]
    # Those of another kernel, by roles then.
    odd = Heads(8, 8, 104, 104)
    plan = plan_prefill(odd, "bfloat16", H200, suits_tma=True)
    assert not plan.roles
    assert shared(plan, odd, 1, H200) == replace(plan, block_d=64, roles=True, shares=4)
    assert shared(plan, odd, 8, H200) == plan


def test_few_heads_are_decoded_by_whole_columns_a_warp_on_sm_90() -> None:
    for heads, size in ((8, 96), (16, 64)):
        assert plan_decode(Heads(heads, heads, size, size), H200).hopper
        assert not plan_decode(Heads(heads, heads, size, size), H200).lines
    assert not plan_decode(TP8, A100).hopper
    for heads in (Heads(40, 40, 48, 48), Heads(32, 32, 128, 64)):
        assert not plan_decode(heads, H200).hopper


def test_a_thread_has_64_registers_of_a_state_at_most_that_is_stored_by_lines() -> None:
    """A tree's walks have two states."""
    for heads, size, columns in ((40, 72, 64), (40, 128, 64), (64, 96, 64), (8, 256, 32), (32, 192, 32)):
        plan = plan_decode(Heads(heads, heads, size, size), H200)
        assert plan == DecodePlan(columns, 4, True, hopper=True, lines=True)


def test_few_sequences_of_many_heads_take_small_programs_with_as_many_columns_a_warp() -> None:
    plan = plan_decode(MINIMAX, H200)
    for sequences in (1, 2):
        assert narrowed(plan, MINIMAX, sequences, H200) == replace(plan, block_e=16, num_warps=1)
    assert narrowed(plan, MINIMAX, 3, H200) == plan
    for heads in (TP8, Heads(64, 64, 96, 96), Heads(40, 40, 128, 128)):
        assert narrowed(plan_decode(heads, H200), heads, 1, H200) == plan_decode(heads, H200)


def test_heads_of_128_are_decoded_by_whole_lines_with_the_bits_of_drafts_by_columns_on_sm_90() -> None:
    assert plan_decode(MINIMAX, H200) == DecodePlan(64, 4, True, hopper=True, lines=True)
    assert plan_decode(TP8, H200) == DecodePlan(32, 4, True, hopper=True, lines=True)
    assert not plan_decode(MINIMAX, A100).lines


def test_only_devices_that_can_wait_on_the_device_are_asked_to() -> None:
    assert plan_decode(TP8, H200).dependent_launch
    assert not plan_decode(TP8, A100).dependent_launch
    # Of a prefill those that have a launch ahead.
    assert plan_prefill(TP8, "bfloat16", H200, suits_tma=True).dependent_launch
    assert not plan_prefill(TP8, "bfloat16", H200).dependent_launch
    assert not plan_prefill(MINIMAX, "bfloat16", H200, suits_tma=True).dependent_launch


def test_a_walk_by_token_holds_all_rows_of_a_state() -> None:
    plan = PrefillPlan(1, 16, 0, 1, 1, block_d=64)
    for d in (16, 48, 64):
        assert plan.covers(Heads(1, 1, d, 256))
    for d in (65, 128, 256):
        assert not plan.covers(Heads(1, 1, d, 16))


def test_no_dtype_goes_token_by_token_and_float32_takes_tensor_cores_where_they_multiply_bfloat16() -> None:
    for limits in DEVICES.values():
        for shape, dtype, plan in prefill_plans(limits):
            assert plan.chunk >= 32
            assert plan.bf16x6 == (dtype == "float32" and limits.bf16), shape


GOOD = PrefillPlan(32, 32, 64, 4, 2)
REFUSED = {
    "by token, in segments": PrefillPlan(1, 16, 64, 1, 1, block_d=128),
    "by token, for Hopper": PrefillPlan(1, 64, 0, 4, 2, block_d=128, hopper=True),
    "a chunk of 2": PrefillPlan(2, 16, 0, 1, 1, block_d=128),
    "a chunk that is no power of two": replace(GOOD, chunk=48, segment=96),
    "a chunk below 16": replace(GOOD, chunk=8),
    "a chunk of 0": replace(GOOD, chunk=0, segment=0),
    "a negative chunk": replace(GOOD, chunk=-32),
    "columns that are no power of two": replace(GOOD, block_e=40),
    "columns below 16": replace(GOOD, block_e=8),
    "rows of a state that are no power of two": replace(GOOD, block_d=48),
    "rows of a state below 16": replace(GOOD, block_d=8),
    "a segment of broken chunks": replace(GOOD, segment=48),
    "a segment below a chunk": replace(GOOD, segment=16),
    "a negative segment": replace(GOOD, segment=-64),
    "warps that are no power of two": replace(GOOD, num_warps=3),
    "no warps": replace(GOOD, num_warps=0),
    "no stages": replace(GOOD, num_stages=0),
    "segments that wait on the device, not for Hopper": replace(GOOD, dependent_launch=True),
    "segments in a chain, not for Hopper": replace(GOOD, chained=True),
}


def test_states_of_many_sequences_are_one_launch_and_lanes_depend_on_heads_alone() -> None:
    of_64 = Heads(64, 64, 64, 64)
    lanes = {heads: plan_state(heads, False, H200, True, True) for heads in (MINIMAX, TP8, of_64)}
    assert [(plan.segment, plan.lanes) for plan in lanes.values()] == [(1536, 6), (1024, 8), (1024, 8)]

    def is_one(heads: Heads, sequences: int, tokens: int, is_float32: bool = False) -> bool:
        operand = Operand((1, sequences * tokens, heads.num_heads, 128), (0, 0, 0, 1))
        plan = plan_state(heads, is_float32, H200, not is_float32, True)
        rest = (None, (0, 0, 0, 1), sequences * tokens, sequences, 1.0, 24.0, is_float32, True, False)
        return in_one_launch(StateProblem(heads, operand, operand, *rest), plan)

    assert [is_one(MINIMAX, n, 4096) for n in (1, 7, 8, 16)] == [False, False, True, True]
    larger = Heads(64, 64, 256, 256)
    # Where most have one lane.
    assert is_one(larger, 16, 1024)
    assert not is_one(larger, 16, 4096)
    assert not is_one(MINIMAX, 16, 1024, is_float32=True)


ON_HOPPER = PrefillPlan(64, 64, 128, 4, 2, block_d=128, hopper=True)
REFUSED_ON_HOPPER = {
    "another chunk": replace(ON_HOPPER, chunk=32),
    "other columns": replace(ON_HOPPER, block_e=32),
    "other rows of a state": replace(ON_HOPPER, block_d=64),
    "other warps": replace(ON_HOPPER, num_warps=8),
    "roles of other pieces": replace(ON_HOPPER, roles=True),
    "shares without roles": replace(ON_HOPPER, segment=64, shares=2),
    "shares of two stages": PrefillPlan(64, 64, 64, 4, 2, 64, hopper=True, roles=True, shares=2),
    "shares of two that follow": PrefillPlan(64, 128, 64, 8, 3, 64, hopper=True, roles=True, shares=2),
    "more shares than 4": PrefillPlan(64, 64, 64, 4, 3, 64, hopper=True, roles=True, shares=5),
    "one stage": replace(ON_HOPPER, num_stages=1),
    "stages of 241 KiB": replace(ON_HOPPER, num_stages=5),
    "a segment of broken chunks": replace(ON_HOPPER, segment=96),
    "one launch that waits for another": replace(ON_HOPPER, segment=0, dependent_launch=True),
    "float32 with the warps of 16 bits": replace(ON_HOPPER, bf16x6=True),
    "a chain of whole sequences": replace(ON_HOPPER, segment=0, chained=True),
    "a chain of launches": replace(ON_HOPPER, dependent_launch=True, chained=True),
    "parts of broken chunks": replace(ON_HOPPER, part=32),
    "parts longer than a segment": replace(ON_HOPPER, part=256),
    "a chain of parts": replace(ON_HOPPER, part=64, chained=True),
}


@pytest.mark.parametrize("plan", REFUSED.values(), ids=REFUSED)
def test_a_plan_that_no_kernel_can_take_covers_nothing(plan: PrefillPlan) -> None:
    assert GOOD.covers(MINIMAX)
    assert not plan.covers(MINIMAX)


@pytest.mark.parametrize("plan", REFUSED_ON_HOPPER.values(), ids=REFUSED_ON_HOPPER)
def test_a_plan_for_hopper_is_of_the_blocks_that_its_kernel_is_written_for(plan: PrefillPlan) -> None:
    assert ON_HOPPER.covers(MINIMAX)
    assert not plan.covers(MINIMAX)


def test_a_plan_for_hopper_covers_the_head_sizes_that_its_kernel_is_written_for() -> None:
    # Every multiple of 16, and what lies beside it.
    sizes = [size + beside for size in range(16, 257, 16) for beside in (-1, 0, 1) if 16 <= size + beside <= 256]
    for d, e in itertools.product(sizes, sizes):
        shape = Heads(1, 2, d, e)
        assert replace(ON_HOPPER, block_d=64).covers(shape) == (32 < d <= 64 and e > 32)
        assert replace(ON_HOPPER, block_d=128).covers(shape) == (64 < d <= 128 and e > 32)
        wide = replace(ON_HOPPER, block_d=64, block_e=128, num_warps=8, num_stages=3)
        assert wide.covers(shape) == (32 < d <= 64 and e > 64)
        by_roles = replace(ON_HOPPER, block_d=64, num_stages=3, roles=True)
        assert by_roles.covers(shape) == (d > 32 and e > 32)
        # A last piece of 32 columns or less takes as much memory as it has columns.
        assert replace(by_roles, num_stages=4).covers(shape) == (32 < d <= 160 and e > 32)
        assert replace(by_roles, block_e=128, num_warps=8).covers(shape) == (32 < d <= 128 and e > 64)
        assert not replace(by_roles, chained=True).covers(shape)
        assert GOOD.covers(shape)


def test_a_pinned_plan_of_128_columns_has_64_for_gradients_of_as_many() -> None:
    """Those of queries and keys of 128 elements, of values of 64 or fewer, have the sizes the other way round."""
    wide = replace(ON_HOPPER, block_d=64, block_e=128, num_warps=8, num_stages=3)
    assert fitted(wide, Heads(2, 2, 64, 128)) == wide
    assert fitted(wide, Heads(2, 2, 128, 64)) == replace(wide, block_d=128, block_e=64, num_warps=4)
    by_roles = replace(wide, roles=True)
    assert fitted(by_roles, Heads(2, 2, 128, 64)) == replace(by_roles, block_e=64, num_warps=4)


def test_a_pinned_plan_goes_by_roles_for_gradients_of_states_of_more_than_128_rows() -> None:
    by_roles = replace(ON_HOPPER, block_d=64, num_stages=3, roles=True)
    assert fitted(ON_HOPPER, Heads(2, 2, 192, 96)) == by_roles
    assert fitted(by_roles, Heads(2, 2, 96, 192)) == by_roles
    exact = replace(ON_HOPPER, block_d=64, num_warps=8, num_stages=1, bf16x6=True)
    assert fitted(exact, Heads(2, 2, 192, 96)) == exact
    assert not fitted(exact, Heads(2, 2, 192, 32)).hopper


@pytest.mark.parametrize(
    "plan", [
        DecodePlan(8, 4), DecodePlan(48, 4), DecodePlan(0, 4), DecodePlan(32, 3), DecodePlan(32, 0),
        DecodePlan(16, 32, hopper=True), DecodePlan(256, 1, hopper=True), DecodePlan(64, 4, lines=True),
        DecodePlan(16, 8, hopper=True, lines=True), DecodePlan(256, 4, hopper=True, lines=True),
    ], ids=str
)  # fmt: skip
def test_a_decoding_plan_that_no_kernel_can_take_covers_nothing(plan: DecodePlan) -> None:
    assert DecodePlan(32, 4).covers(TP8)
    assert not plan.covers(TP8)


@pytest.mark.parametrize("plan", [
    plan_prefill(MINIMAX, "bfloat16", H200, suits_tma=True), plan_prefill(TP8, "float32", A100), GOOD,
    plan_decode(TP8, H200), plan_decode(MINIMAX, MI300X),
], ids=str)  # fmt: skip
def test_a_plan_survives_crossing_an_op(plan: PrefillPlan | DecodePlan) -> None:
    assert all(type(number) is int for number in plan.as_ints())
    again = type(plan)(*plan.as_ints())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.as_ints() == plan.as_ints()
    assert eval(repr(plan)) == plan
    with pytest.raises(FrozenInstanceError):
        plan.block_e = 1  # type: ignore[misc]


def test_limits_and_heads_are_values_too() -> None:
    for value in (H200, MINIMAX):
        with pytest.raises(FrozenInstanceError):
            setattr(value, fields(value)[0].name, 1)
    assert Heads(2, 6, 16, 32).num_heads == Heads(6, 2, 16, 32).num_heads == 6


def test_importing_the_package_and_planning_touch_no_gpu_and_import_no_triton() -> None:
    program = (
        "import sys, lightning_attn, torch\n"
        "from lightning_attn.plan import *\n"
        "plan_prefill(Heads(8, 8, 128, 128), 'bfloat16', DeviceLimits(132, 232448, True), True)\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'triton' not in sys.modules, 'triton is imported'\n"
        "assert 'lightning_attn.launch' not in sys.modules\n"
        "assert 'lightning_attn.kernels' not in sys.modules\n"
    )
    run_alone(program)


def test_gradients_of_keys_and_values_are_made_at_once_where_halves_of_a_device_are_full() -> None:
    for heads, size, sequences, rows, groups in (
        (64, 64, 1, 16384, 1), (64, 96, 1, 16384, 2), (64, 64, 4, 16384, 4), (32, 96, 1, 16384, 1),
        # By two warpgroups, whose tiles are as wide as a head.
        (64, 72, 1, 16384, 1), (64, 80, 2, 16384, 2),
        # Too few programs; too short; sizes that wait for products, not for memory.
        (8, 128, 1, 16384, 0), (64, 64, 1, 2047, 0), (32, 80, 1, 16384, 0), (64, 256, 1, 16384, 0),
    ):  # fmt: skip
        operand = Operand((sequences, rows, heads, size), (1, 1, 1, 1))
        shape = Heads(heads, heads, size, size)
        one = PrefillProblem(
            shape, operand, operand, operand, operand, None, None, rows, sequences, sequences, 1.0, "bfloat16"
        )
        assert groups_at_once(BackwardProblem(one, one, one), H200) == groups, (heads, size, sequences, rows)
