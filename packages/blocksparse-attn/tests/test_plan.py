"""Does every call get a plan that a kernel can take, on any device? Plans are values, so that this needs no device."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from blocksparse_attn import AttentionPlan
from blocksparse_attn.plan import (
    DeviceLimits,
    Problem,
    fits_hopper,
    heads_per_tile,
    hopper_columns,
    hopper_sizes,
    num_slots,
    plan_attention,
    query_stages,
    tokens_per_tile,
)
from kernel_reference.integers import cdiv, power_of_two_at_least
from kernel_reference.models import PHI3_SMALL

KIB = 1024
H200 = DeviceLimits(132, 227 * KIB, hopper=True)
A100 = DeviceLimits(108, 163 * KIB)
DEVICES = {
    "H200": H200, "A100": A100, "a consumer GPU": DeviceLimits(84, 99 * KIB), "MI300X": DeviceLimits(304, 64 * KIB),
    "B200": DeviceLimits(148, 227 * KIB), "one core": DeviceLimits(1),
}  # fmt: skip
on_every_device = pytest.mark.parametrize("limits", DEVICES.values(), ids=DEVICES)
LONGEST = 2**17


def phi(
    *, tokens: int = 8192, sequences: int = 1, longest: int | None = None, keys: int = 32768, kind: str = "paged",
    tensor_parallel: int = 1, **more: object,
) -> Problem:  # fmt: skip
    """A call of Phi-3-small's layer, or of a rank's share of it, under the layout of its longest sequence."""
    model = PHI3_SMALL
    heads, heads_kv = model.num_heads_q // tensor_parallel, model.num_heads_kv // tensor_parallel
    rows = LONGEST // model.block_size
    where = {"paged": {"page_size": 64}, "padded": {"padded": True}, "ragged": {}}[kind]
    given = Problem(
        heads, heads_kv, model.head_dim, model.head_dim, model.block_size, model.block_size, heads, rows,
        rows * (rows + 1) // 2, tokens, sequences, tokens // sequences if longest is None else longest,
        keys * sequences if kind == "ragged" else keys, tma=True, **where,
    )  # fmt: skip
    return replace(given, **more)


PROMPT = phi()
DECODING = phi(tokens=32, sequences=32)


def problems() -> Iterator[Problem]:
    """Head sizes, dtypes, groups and blocks of all kinds; long and short sequences, few and many."""
    shapes = itertools.product(
        ((16, 16), (80, 80), (128, 64), (192, 128), (256, 256), (100, 40)), ((7, 7), (32, 8), (300, 1)),
        ((64, 64), (48, 16), (128, 64), (16, 256)),
    )  # fmt: skip
    others = ((16, 0, True), (16, 48, True), (16, 24, False), (32, 1, False))
    for (sizes, heads, blocks), (bits, page, tma) in itertools.product(shapes, others):
        for tokens, sequences, longest, capacity in (
            (0, 0, 0, 0), (1, 1, 1, 16), (32, 32, 1, 4096), (8192, 3, 8000, LONGEST), (70, 1, 0, 10**9), (5, 300, 9, 0),
        ):  # fmt: skip
            yield Problem(
                *heads, *sizes, *blocks, heads[0], cdiv(capacity, blocks[0]), 1000, tokens, sequences, longest,
                capacity, page, bits=bits, tma=tma,
            )  # fmt: skip


ALL = [*problems()]


# Any call


@on_every_device
def test_the_plan_of_any_call_is_one_that_covers_it(limits: DeviceLimits) -> None:
    for problem in ALL:
        for splits in (0, 5):
            plan = plan_attention(replace(problem, num_splits=splits), limits)
            assert plan.covers(problem), (problem, plan)
            assert splits in (0, plan.num_splits)


def tile_bytes(problem: Problem, plan: AttentionPlan) -> int:
    """The least shared memory of a program: all stages of keys and values, and on Hopper of q."""
    wide, wide_v = (
        hopper_columns(size) if plan.hopper else max(16, power_of_two_at_least(size))
        for size in (problem.head_dim, problem.head_dim_v)
    )
    held = plan.num_stages * plan.block_n * (wide + wide_v)
    return (held + plan.hopper * plan.block_m * wide) * problem.bits // 8


@on_every_device
def test_keys_and_values_in_flight_fit_in_shared_memory(limits: DeviceLimits) -> None:
    for problem in ALL:
        plan = plan_attention(problem, limits)
        assert tile_bytes(problem, plan) <= limits.shared_memory - plan.hopper * KIB, (problem, plan)


@on_every_device
def test_tiles_of_packed_heads_hold_each_once_and_those_of_lists_lie_within_a_row_of_the_layout(limits) -> None:
    for problem in ALL:
        plan = plan_attention(problem, limits)
        if plan.packed:
            heads = heads_per_tile(problem.group, plan.block_m)
            # Of heads more than a tile has rows, several tiles share a token.
            assert heads * tokens_per_tile(plan) <= plan.block_m
            assert heads == problem.group or (heads, plan.packed) == (plan.block_m, 1)
        elif not plan.hopper:
            assert tokens_per_tile(plan) == plan.block_m
            assert problem.q_block % plan.block_m == 0


@on_every_device
def test_the_grid_has_a_slot_for_every_tile_of_every_segment(limits: DeviceLimits) -> None:
    """Padded: three segments a sequence; otherwise each sequence, and the rows before and after them."""
    for problem in ALL:
        plan = plan_attention(problem, limits)
        tokens = tokens_per_tile(plan)
        slack = 1 if plan.packed else 2
        assert num_slots(problem, plan) >= problem.tokens // tokens + (problem.sequences + 2) * slack
        padded = replace(problem, padded=True)
        assert num_slots(padded, plan) >= problem.tokens // tokens + 3 * problem.sequences * slack


def test_a_plan_depends_on_shapes_only() -> None:
    assert [*inspect.signature(plan_attention).parameters] == ["problem", "limits"]
    assert all(field.type in ("int", "bool", "float", "str") for field in fields(Problem))


def test_small_devices_and_float32_take_tiles_that_they_can_hold() -> None:
    for problem in (PROMPT, DECODING, replace(PROMPT, head_dim=256, head_dim_v=256)):
        large, small = (plan_attention(problem, replace(A100, shared_memory=n * KIB)) for n in (227, 64))
        assert small.block_n <= large.block_n
        assert small.num_stages <= large.num_stages
        assert tile_bytes(problem, small) <= 64 * KIB
        for limits in DEVICES.values():
            exact = plan_attention(replace(problem, bits=32), limits)
            assert not exact.hopper
            assert tile_bytes(replace(problem, bits=32), exact) <= limits.shared_memory
    rows = [plan_attention(replace(PROMPT, bits=32, head_dim=size), H200).block_m for size in (64, 128, 192)]
    assert rows == [32, 32, 16]
    exact = replace(DECODING, bits=32, entries=DECODING.rows * 8)
    single = [plan_attention(replace(exact, num_heads_kv=32 // group), H200) for group in (1, 8, 16)]
    assert [plan.block_m for plan in single] == [1, 1, 16]
    assert plan_attention(replace(exact, head_dim=256), H200).block_n == 8


def test_decoding_of_float32_multiplies_heads_together_where_they_list_most_blocks() -> None:
    eight, rows = replace(DECODING, num_heads_kv=4), DECODING.rows
    for share, thirds in ((0.2, False), (0.45, False), (0.55, True), (1.0, True)):
        problem = replace(eight, bits=32, entries=int(share * rows * (rows + 1) / 2))
        plan = plan_attention(problem, H200)
        assert (plan.thirds, plan.block_m) == (thirds, 16 if thirds else 1)
        assert not plan_attention(problem, A100).thirds
    every = replace(eight, bits=32, entries=rows**2)
    assert not any(
        plan_attention(replace(every, **change), H200).thirds
        for change in ({"bits": 16}, {"max_seqlen_q": 64}, {"head_dim": 192})
    )
    of = {heads: plan_attention(replace(every, num_heads_kv=heads), H200).thirds for heads in (4, 8, 16, 32)}
    assert of == {4: True, 8: True, 16: False, 32: False}
    small = replace(every, head_dim=64, head_dim_v=64)
    assert [plan_attention(replace(small, num_heads_kv=n), H200).thirds for n in (4, 8)] == [True, False]


# Which kernel


def test_prefill_takes_the_kernel_for_sm_90_and_decode_packs_heads() -> None:
    for kind, ranks in itertools.product(("paged", "padded", "ragged"), (1, 2, 4, 8)):
        given = {"kind": kind, "tensor_parallel": ranks}
        assert plan_attention(phi(**given), H200).hopper
        for limits in DEVICES.values():
            decoding = plan_attention(phi(tokens=32, sequences=32, **given), limits)
            assert decoding.packed
            assert not decoding.hopper
            if not limits.hopper:
                prompt = plan_attention(phi(**given), limits)
                assert (prompt.hopper, prompt.packed) == (False, 0)


def test_problems_that_the_kernel_for_sm_90_does_not_support_never_take_it() -> None:
    assert fits_hopper(PROMPT)
    assert plan_attention(PROMPT, H200).hopper
    assert not plan_attention(PROMPT, replace(H200, hopper=False)).hopper
    for change in (
        {"tma": False}, {"bits": 32}, {"page_size": 4}, {"page_size": 1}, {"page_size": 20}, {"head_dim": 100},
        {"head_dim_v": 20}, {"tokens": 2**31}, {"capacity": 2**31}, {"entries": 2**31},
    ):  # fmt: skip
        problem = replace(PROMPT, **change)
        plan = plan_attention(problem, H200)
        assert not plan.hopper, change
        assert plan.covers(problem), change
    for problem in ALL:
        plan = plan_attention(problem, H200)
        assert not plan.hopper or (problem.tma and fits_hopper(problem))


def test_page_and_head_sizes_of_models_take_the_kernel_for_sm_90() -> None:
    for page in (0, 8, 16, 24, 32, 48, 64, 256, 544):
        assert plan_attention(replace(PROMPT, page_size=page), H200).hopper
    for blocks in ((64, 64), (128, 64), (64, 128), (192, 64), (16, 16), (32, 32), (48, 96), (16, 64), (256, 32)):
        assert plan_attention(replace(PROMPT, q_block=blocks[0], k_block=blocks[1]), H200).hopper
    for size in range(16, 257):
        assert fits_hopper(replace(PROMPT, head_dim=size)) == (size % 8 == 0)
        assert fits_hopper(replace(PROMPT, head_dim_v=size)) == (size % 8 == 0)


def test_short_lists_are_walked_64_keys_at_a_time_on_sm_90() -> None:
    for listed, block_n in ((5, 64), (22, 64), (23, 128), (200, 128)):
        assert plan_attention(replace(PROMPT, entries=listed * PROMPT.rows), H200).block_n == block_n
    assert plan_attention(replace(PROMPT, entries=12 * PROMPT.rows, k_block=128), H200).block_n == 128
    # Of small blocks fewer are many.
    assert plan_attention(replace(PROMPT, entries=32 * PROMPT.rows, k_block=32), H200).block_n == 128
    assert plan_attention(replace(PROMPT, entries=5 * PROMPT.rows, head_dim=256, head_dim_v=256), H200).num_stages == 2


def test_head_sizes_are_multiplied_in_two_powers_of_two_rather_than_padded_to_one() -> None:
    sizes = {
        16: (64, 0), 64: (64, 0), 72: (64, 16), 80: (64, 16), 88: (64, 32), 96: (64, 32), 104: (128, 0), 128: (128, 0),
        136: (128, 16), 160: (128, 32), 168: (128, 64), 192: (128, 64), 200: (256, 0), 256: (256, 0),
    }  # fmt: skip
    assert {size: hopper_sizes(size) for size in sizes} == sizes


def test_scattered_rows_are_walked_a_block_at_a_time_on_sm_90() -> None:
    """Where two rows share a tile, and tiles are not as small for another reason."""
    scattered = replace(PROMPT, scattered=True)
    plan = plan_attention(scattered, H200)
    assert (plan.block_n, plan.num_stages) == (64, 5)
    assert plan.covers(scattered)
    assert replace(plan, block_n=128, num_stages=2) == plan_attention(PROMPT, H200)
    for change in ({"q_block": 128}, {"k_block": 32}, {"head_dim": 256, "head_dim_v": 256}):
        other = replace(PROMPT, **change)
        pattern = plan_attention(other, H200)
        assert plan_attention(replace(other, scattered=True), H200) == replace(pattern, as_free=True)


def test_programs_take_tiles_as_they_come_free_on_sm_90_but_tiles_of_64_keys_of_one_prompt() -> None:
    """Over blocks of whole tiles."""
    short = {"entries": 5 * PROMPT.rows}
    for change, as_free in (
        ({}, True), (short, False), ({"head_dim": 64, "head_dim_v": 64}, True), ({"k_block": 32}, True),
        ({"head_dim": 96, "head_dim_v": 96}, True), ({"q_block": 48, "k_block": 96}, True),
        ({"head_dim": 96, "head_dim_v": 96} | short, False), ({"k_block": 32} | short, True),
        ({"head_dim": 64, "head_dim_v": 64} | short, False), ({"head_dim": 192, "head_dim_v": 192}, False),
        ({"q_block": 16, "k_block": 16}, True), ({"head_dim": 96, "head_dim_v": 96, "sequences": 4} | short, True),
        ({"head_dim": 192, "head_dim_v": 192, "sequences": 4}, True),
    ):  # fmt: skip
        assert plan_attention(replace(PROMPT, **change), H200).as_free == as_free, change


def test_queries_have_two_stages_on_sm_90_where_shared_memory_allows() -> None:
    for size, size_v, stages in ((64, 64, 2), (128, 128, 2), (128, 64, 2), (192, 192, 2), (256, 256, 1)):
        problem = replace(PROMPT, head_dim=size, head_dim_v=size_v)
        assert query_stages(problem, plan_attention(problem, H200)) == stages


# Splits


def rounds(problem: Problem, plan: AttentionPlan, cores: int) -> float:
    """How long the device is busy, in the time that one tile takes with all its keys, lengths being equal."""
    sequences = max(1, problem.sequences)
    tiles = sequences * cdiv(cdiv(problem.tokens, sequences), tokens_per_tile(plan))
    if plan.packed:
        tiles *= problem.num_heads_kv * cdiv(problem.group, heads_per_tile(problem.group, plan.block_m))
    else:
        tiles *= problem.num_heads
    return cdiv(tiles * plan.num_splits, cores) / plan.num_splits


@pytest.mark.parametrize("limits", [H200, A100], ids=["H200", "A100"])
@pytest.mark.parametrize("kind", ["paged", "padded", "ragged"])
@pytest.mark.parametrize(("tokens", "sequences"), [(1, 1), (4, 4), (16, 16), (32, 32), (128, 1), (512, 1), (4, 1)])
def test_splits_keep_sms_evenly_busy_at_long_context(tokens, sequences, kind, limits) -> None:
    for ranks in (1, 8):
        problem = phi(tokens=tokens, sequences=sequences, keys=LONGEST, kind=kind, tensor_parallel=ranks)
        plan = plan_attention(problem, limits)
        ideal = rounds(problem, replace(plan, num_splits=10**6), limits.cores)
        # Perfectly balanced work, plus a third, and a little where merging would cost more than that.
        assert rounds(problem, plan, limits.cores) <= 4 / 3 * ideal + 0.05, plan


def test_decode_fills_132_sms_and_a_long_prompt_is_not_split() -> None:
    for sequences in (1, 2, 8, 16):
        problem = phi(tokens=sequences, sequences=sequences)
        plan = plan_attention(problem, H200)
        assert problem.num_heads_kv * sequences * plan.num_splits >= 0.75 * H200.cores
    assert plan_attention(phi(tokens=256, sequences=256), H200).num_splits == 1
    for limits in DEVICES.values():
        assert plan_attention(PROMPT, limits).num_splits == 1


def test_splits_are_never_so_small_that_they_cost_more_than_they_save() -> None:
    for problem in ALL:
        for limits in DEVICES.values():
            plan = plan_attention(problem, limits)
            assert plan.num_splits == 1 or plan.num_splits * plan.block_n * 2 <= problem.capacity
    # Nor are there more than keys of one sequence, of a ragged batch, or rows of the layout tell.
    one = plan_attention(phi(tokens=1), H200).num_splits
    assert one > 1
    assert plan_attention(phi(tokens=1, keys=64), H200).num_splits == 1
    assert plan_attention(phi(tokens=1, rows=1), H200).num_splits == 1
    assert plan_attention(phi(tokens=4, sequences=4, keys=64, kind="ragged"), H200).num_splits == 1


def test_given_splits_take_the_same_tiles_whatever_the_batch() -> None:
    """How a tile's keys are split depends on its rows: another tile size would give a sequence other bits."""
    batches = [(1, 1, 1, 64), (9, 1, 9, 512), (4096, 9, 2048, LONGEST), (64, 64, 1, 64)]
    for limits, splits, ranks in itertools.product(DEVICES.values(), (1, 3), (1, 8)):
        plans = set()
        for tokens, sequences, longest, keys in batches:
            problem = phi(tokens=tokens, sequences=sequences, longest=longest, keys=keys, tensor_parallel=ranks)
            plans.add(plan_attention(replace(problem, num_splits=splits), limits))
        assert len(plans) == 1, plans
        assert plans.pop().num_splits == splits


def test_consumers_multiply_in_turn_where_that_is_faster() -> None:
    for size, in_turn, slack in ((64, True, 8), (96, True, 0), (128, False, 0), (192, True, 8), (256, True, 8)):
        plan = plan_attention(phi(head_dim=size, head_dim_v=size), H200)
        assert (plan.in_turn, plan.slack) == (in_turn, slack)
    for block in (16, 32, 48, 96):
        entries = LONGEST // block * (LONGEST // block + 1) // 2
        problem = phi(q_block=block, k_block=block, rows=LONGEST // block, entries=entries)
        assert plan_attention(problem, H200).in_turn == (block > 16)


def test_long_prompts_and_their_chunks_take_half_of_many_heads_first() -> None:
    for kind in ("paged", "ragged", "padded"):
        for tokens, keys, together in ((2048, 65536, 16), (1024, 65536, 0), (65536, 65536, 16), (16384, 16384, 0)):
            assert plan_attention(phi(tokens=tokens, keys=keys, kind=kind), H200).heads_together == together
    for change in ({"sequences": 2}, {"tensor_parallel": 2}, {"num_splits": 2}, {"head_dim": 256}):
        assert plan_attention(phi(**{"tokens": 65536, "keys": 65536, **change}), H200).heads_together == 0


# Plans that are given


GOOD = AttentionPlan(64, 64, 1, 4, 2)
PACKED = AttentionPlan(16, 64, 1, 4, 2, packed=4)
ON_HOPPER = AttentionPlan(128, 128, 1, 4, 2, hopper=True)
REFUSED = {
    "rows that are no power of two": {"block_m": 48}, "rows below 16": {"block_m": 8},
    "negative rows": {"block_m": -64},
    "keys that are no power of two": {"block_n": 24}, "keys below 16": {"block_n": 8}, "no keys": {"block_n": 0},
"no splits": {"num_splits": 0}, "negative splits": {"num_splits": -2},
    "warps that are no power of two": {"num_warps": 3}, "no warps": {"num_warps": 0}, "no stages": {"num_stages": 0},
    "heads in turn, without hopper": {"heads_together": 2},
    "products in turn, without hopper": {"in_turn": True}, "slack, without hopper": {"slack": 8},
    "tiles as programs come free, without hopper": {"as_free": True},
}  # fmt: skip
REFUSED_ON_HOPPER = {
    "64 rows": {"block_m": 64}, "256 rows": {"block_m": 256}, "32 keys": {"block_n": 32}, "256 keys": {"block_n": 256},
    "8 warps": {"num_warps": 8}, "one stage": {"num_stages": 1}, "packed": {"packed": 1},
    "negative heads": {"heads_together": -2}, "negative slack": {"slack": -1}, "much slack": {"slack": 9},
    "heads that are no share of all": {"heads_together": 3},
}  # fmt: skip


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_a_plan_that_no_kernel_can_take_covers_nothing(change: dict[str, int]) -> None:
    for plan in (GOOD, PACKED):
        assert plan.covers(PROMPT)
        assert not replace(plan, **change).covers(PROMPT)


def test_tiles_of_lists_have_the_rows_of_one_row_of_the_layout_and_packed_ones_room_for_their_tokens() -> None:
    for q_block in (16, 32, 64, 96, 128):
        problem = replace(PROMPT, q_block=q_block)
        for rows in (16, 32, 64, 128):
            plan = replace(GOOD, block_m=rows)
            assert plan.covers(problem) == (q_block % rows == 0)
            assert replace(PACKED, block_m=rows).covers(problem)
    for heads in (8, 16, 24, 32, 64, 128, 256):
        problem = replace(PROMPT, num_heads=heads, layouts=heads)
        room = max(1, 16 // problem.group)
        for tokens in range(-1, 20):
            assert replace(PACKED, packed=tokens).covers(problem) == (1 <= tokens <= room or (tokens == 0)), tokens


@pytest.mark.parametrize("change", REFUSED_ON_HOPPER.values(), ids=REFUSED_ON_HOPPER)
def test_a_plan_for_hopper_has_block_sizes_that_its_kernel_supports(change: dict[str, int]) -> None:
    assert ON_HOPPER.covers(PROMPT)
    assert replace(ON_HOPPER, heads_together=4).covers(PROMPT)
    assert not replace(ON_HOPPER, **change).covers(PROMPT)


def test_a_plan_for_hopper_covers_only_what_its_kernel_supports() -> None:
    for change in ({"tma": False}, {"bits": 32}, {"page_size": 20}, {"head_dim": 100}, {"head_dim_v": 100}):
        assert GOOD.covers(replace(PROMPT, **change))
        assert not ON_HOPPER.covers(replace(PROMPT, **change))
    for name, size in itertools.product(("head_dim", "head_dim_v"), range(16, 257, 8)):
        problem = replace(PROMPT, **{name: size})
        assert ON_HOPPER.covers(problem) == (size <= 128)
        assert replace(ON_HOPPER, block_n=64).covers(problem)


# What plans are


@pytest.mark.parametrize("plan", [GOOD, PACKED, ON_HOPPER, plan_attention(DECODING, A100)], ids=str)
def test_a_plan_survives_the_round_trip_through_an_op(plan: AttentionPlan) -> None:
    assert all(type(number) is int for number in plan.as_ints())
    again = AttentionPlan(*plan.as_ints())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.as_ints() == plan.as_ints()
    assert eval(repr(plan)) == plan
    with pytest.raises(FrozenInstanceError):
        plan.block_m = 1  # type: ignore[misc]


def test_limits_and_problems_are_values_too() -> None:
    for value in (H200, PROMPT):
        with pytest.raises(FrozenInstanceError):
            setattr(value, fields(value)[0].name, 1)
