"""Does every call get a plan that a kernel can take, on any device? Plans are values, so that this needs no device."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from kernel_reference.integers import cdiv, power_of_two_at_least
from kernel_reference.models import GPT_OSS, LLAMA3_70B, SoftmaxAttention
from kernel_reference.testing.forks import run_alone
from prefix_prefill import PrefillPlan
from prefix_prefill.cascade.pieces import plan_in_pieces
from prefix_prefill.covering import why_not
from prefix_prefill.plan import (
    DeviceLimits,
    Problem,
    fits_hopper,
    kind_of_batch,
    plan_prefill,
)
from prefix_prefill.tiles import (
    column_tiles,
    heads_per_tile,
    most_tiles,
    num_slots,
    shared_bytes,
    stages_of_values,
    tokens_per_tile,
    units_of_keys,
    value_tiles,
)

KIB = 1024
H200 = DeviceLimits(132, 227 * KIB, hopper=True)
A100 = DeviceLimits(108, 163 * KIB)
# With the portable kernel, as where layouts are not for TMA.
SM_90 = replace(H200, hopper=False)
DEVICES = {
    "H200": H200, "A100": A100, "a consumer GPU": DeviceLimits(84, 99 * KIB), "MI300X": DeviceLimits(304, 64 * KIB),
    "B200": DeviceLimits(148, 227 * KIB), "T4": DeviceLimits(40, 64 * KIB, turing=True), "one core": DeviceLimits(1),
}  # fmt: skip
on_every_device = pytest.mark.parametrize("limits", DEVICES.values(), ids=DEVICES)
SIZES = (16, 24, 65, 80, 128, 129, 192, 256, 320, 512)


def problem_of(
    model: SoftmaxAttention, *, tokens: int = 2048, sequences: int = 1, longest: int | None = None,
    capacity: int = 32768, page: int = 16, new_kv: bool = True, tma: bool = True, **more: object,
) -> Problem:  # fmt: skip
    return Problem(
        model.num_heads_q, model.num_heads_kv, model.head_dim, page, tokens, sequences,
        tokens if longest is None else longest, capacity, new_kv=new_kv, tma=tma, **more,
    )  # fmt: skip


LLAMA = LLAMA3_70B.tensor_parallel(8)
PROMPT = problem_of(LLAMA)


def problems() -> Iterator[Problem]:
    """Every head size, dtype and number of heads; long and short sequences, few and many, narrow tables and wide."""
    shapes = itertools.product(SIZES, ((7, 7), (64, 8), (300, 1)), ((16, 16), (16, 8), (32, 32)))
    for (size, heads, bits), page, tma in itertools.product(shapes, (1, 544), (False, True)):
        alibi = size % 3 == 0
        for tokens, sequences, longest, capacity in (
            (0, 0, 0, 0), (1, 1, 1, 16), (32, 32, 1, 4096), (8192, 3, 8000, 131072), (70, 1, 0, 10**9), (5, 300, 9, 0),
        ):  # fmt: skip
            yield Problem(*heads, size, page, tokens, sequences, longest, capacity, *bits, True, alibi, tma)


@on_every_device
def test_the_plan_of_any_call_is_one_that_covers_it(limits: DeviceLimits) -> None:
    for problem in problems():
        for splits in (0, 1, 5):
            plan = plan_prefill(problem, limits, splits)
            assert plan.covers(problem), (problem, plan)
            assert splits in (0, plan.num_splits)


@on_every_device
def test_tiles_hold_every_query_head_of_every_token_once(limits: DeviceLimits) -> None:
    for problem in problems():
        plan = plan_prefill(problem, limits)
        heads, tokens = (of(problem.group, plan.block_m) for of in (heads_per_tile, tokens_per_tile))
        assert 1 <= heads * tokens <= plan.block_m
        # Of heads more than a tile has rows, several tiles share a token; else a tile has room for no token more.
        assert heads == problem.group or (heads, tokens) == (plan.block_m, 1)
        assert (tokens + 1) * heads > plan.block_m
        assert num_slots(problem, tokens) >= cdiv(problem.tokens, tokens) + max(problem.sequences - 1, 0)
        a_tile_each = cdiv(problem.tokens, tokens) + min(max(problem.sequences - 1, 0), problem.tokens)
        assert most_tiles(problem, plan.block_m) >= min(a_tile_each, problem.tokens) * problem.num_heads_kv


def tile_bytes(problem: Problem, plan: PrefillPlan) -> int:
    """q, and the keys and values in flight: what a program must hold in shared memory at the least."""
    padded = max(16, power_of_two_at_least(problem.head_dim))
    block_d = sum(column_tiles(problem.head_dim)) if plan.hopper else padded
    held = plan.num_stages * 2 * plan.block_n * problem.cache_bits // 8
    return block_d * (held + (plan.block_m * problem.bits // 8 if plan.hopper else 0))


@on_every_device
def test_keys_and_values_in_flight_fit_in_shared_memory(limits: DeviceLimits) -> None:
    for problem in problems():
        plan = plan_prefill(problem, limits)
        assert tile_bytes(problem, plan) <= limits.shared_memory - plan.hopper * KIB, (problem, plan)


def test_a_head_is_one_tile_of_columns_or_two_where_that_is_less() -> None:
    tiles = {16: (64,), 64: (64,), 72: (64, 16), 80: (64, 16), 96: (64, 32), 112: (128,), 128: (128,), 136: (128, 16),
             192: (128, 64), 200: (256,), 256: (256,), 272: (256, 16), 384: (256, 128), 512: (256, 256)}  # fmt: skip
    assert {size: column_tiles(size) for size in tiles} == tiles
    # No box of 8-bit floats may have less than 32 bytes.
    assert [column_tiles(size, 8) for size in (64, 80, 96, 128)] == [(64,), (64, 32), (64, 32), (128,)]
    # Nor is a product of fewer columns than 64 quicker.
    values = [value_tiles(*sizes) for sizes in ((64, 128), (72, 128), (96, 128), (96, 64), (192, 128), (96, 128, 8))]
    assert values == [(64,), (128,), (128,), (64, 32), (128, 64), (64, 32)]
    for size in range(16, 513):
        assert size <= sum(column_tiles(size)) < 1.25 * size + 64


def test_keys_of_192_come_in_units_of_columns_beside_two_whole_tiles_of_values() -> None:
    cached = problem_of(replace(LLAMA, head_dim=192), new_kv=False)
    assert (units_of_keys(cached, 128), stages_of_values(cached, 128, 2)) == (5, (2, 128))
    # Where these are not written, or take no more than there is.
    others = [replace(cached, **one) for one in ({"new_kv": True}, {"page_size": 24}, {"head_dim_v": 128})]
    assert [units_of_keys(other, 128) for other in others] == [0, 0, 0]
    assert units_of_keys(cached, 64) == 0
    assert [shared_bytes(one, 128, 128, 2) for one in (cached, others[0])] == [224 * KIB, 216 * KIB]


def test_tiles_fit_in_the_shared_memory_of_turing_which_holds_them_twice() -> None:
    """As the compiler makes it: see test_codegen.py. Larger heads take fewer rows, and only where they must."""
    limits = DEVICES["T4"]
    for problem in problems():
        plan = plan_prefill(problem, limits)
        if problem.bits == 32 and problem.head_dim > 256:
            # Not even the smallest tiles fit there.
            continue
        block_d = max(16, power_of_two_at_least(problem.head_dim))
        assert 2 * block_d * (plan.block_m + plan.block_n) * problem.bits // 8 <= limits.shared_memory, (problem, plan)
    for size, rows in ((128, 64), (129, 32), (256, 32)):
        problem = replace(PROMPT, head_dim=size, tma=False)
        assert plan_prefill(problem, limits).block_m == rows
        assert plan_prefill(problem, DEVICES["MI300X"]).block_m == 64


def test_what_the_kernel_for_sm_90_is_written_for_goes_to_it_and_nothing_else() -> None:
    assert plan_prefill(PROMPT, H200) == PrefillPlan(128, 128, 1, 4, 2, hopper=True, programs=132, loading=40)
    for change in (
        {"tma": False}, {"bits": 32, "cache_bits": 32}, {"page_size": 4, "cache_bits": 8}, {"head_dim": 100},
        {"cache_bits": 8, "head_dim": 256}, {"cache_bits": 8, "head_dim": 72}, {"bits": 32, "cache_bits": 8},
    ):  # fmt: skip
        assert not plan_prefill(replace(PROMPT, **change), H200).hopper, change
    assert not plan_prefill(PROMPT, replace(H200, hopper=False)).hopper
    for page in (1, 2, 3, 8, 12, 16, 24, 32, 48, 64, 256, 544, 1056):
        assert plan_prefill(replace(PROMPT, page_size=page), H200).hopper
    for size in range(16, 257):
        assert fits_hopper(replace(PROMPT, head_dim=size)) == (size % 8 == 0)


@pytest.mark.parametrize(
    ("model", "longest", "alibi", "rows", "keys"),
    [
        (LLAMA, 2048, False, 128, 128), (LLAMA, 8, False, 64, 128), (LLAMA, 9, False, 128, 128),
        (LLAMA, 1, False, 64, 128), (GPT_OSS, 2048, False, 128, 128), (GPT_OSS, 1, False, 64, 128),
        (replace(LLAMA, head_dim=96), 2048, False, 128, 128), (replace(LLAMA, head_dim=192), 2048, False, 128, 128),
        (replace(LLAMA, head_dim=256), 1, False, 64, 64), (LLAMA, 2048, True, 128, 64),
    ],
)  # fmt: skip
def test_tiles_of_models_on_an_h200(model, longest: int, alibi: bool, rows: int, keys: int) -> None:
    """64 rows where no sequence has more; tiles of keys whose scores stay in registers."""
    plan = plan_prefill(problem_of(model, tokens=2048, longest=longest, alibi=alibi), H200)
    assert (plan.block_m, plan.block_n, plan.hopper) == (rows, keys, True)


def test_queries_of_64_stay_in_registers_unless_a_window_or_a_bias_takes_those() -> None:
    chunk = problem_of(replace(LLAMA, head_dim=64), tokens=2048, longest=512, new_kv=False)
    plan = plan_prefill(chunk, H200)
    assert (plan.q_in_registers, plan.num_stages, plan.loading) == (1, 4, 40)
    for change in (
        {"left": 4095}, {"softcap": 30.0}, {"alibi": True}, {"cache_bits": 8}, {"head_dim_v": 128}, {"head_dim": 128},
        {"max_seqlen_q": 1}, {"new_kv": True}, {"page_size": 1},
    ):  # fmt: skip
        assert plan_prefill(replace(chunk, **change), H200).q_in_registers == 0, change


def test_decoding_over_8_bits_has_more_registers_for_what_converts_heads_of_128() -> None:
    decoding = problem_of(LLAMA, tokens=16, sequences=16, longest=1, new_kv=False, cache_bits=8)
    assert plan_prefill(decoding, H200).loading == 72
    for change in (
        {"cache_bits": 16}, {"max_seqlen_q": 2048, "tokens": 2048}, {"token_scales": True}, {"new_kv": True},
        {"head_dim": 64}, {"head_dim_v": 64},
    ):  # fmt: skip
        assert plan_prefill(replace(decoding, **change), H200).loading == 56, change


@pytest.mark.parametrize(
    ("change", "longest", "tiles"),
    [
        ({}, 2048, (128, 128, 8, 3)), ({}, 8, (64, 64, 4, 3)), ({}, 1, (16, 32, 4, 3)),
        ({"page_layout": "x-packed"}, 2048, (128, 128, 8, 3)), ({"page_layout": "x-packed"}, 1, (16, 32, 4, 3)),
        ({"softcap": 30.0}, 2048, (128, 64, 8, 3)), ({"left": 127}, 2048, (128, 128, 8, 3)),
        ({"capacity": 2048}, 2048, (128, 64, 8, 3)), ({"capacity": 2048}, 1, (16, 32, 4, 3)),
        ({"new_kv": True}, 2048, (128, 128, 8, 3)), ({"left": 127, "new_kv": True}, 2048, (128, 64, 8, 3)),
        ({"cache_bits": 8}, 2048, (128, 64, 8, 2)), ({"head_dim": 72}, 1, (16, 64, 4, 2)),
        ({"head_dim": 64}, 2048, (64, 64, 4, 2)), ({"head_dim": 64}, 1, (16, 64, 4, 2)),
        ({"head_dim": 64, "softcap": 30.0}, 2048, (64, 64, 4, 2)),
    ],
)  # fmt: skip
def test_tiles_on_an_h200_of_what_tma_does_not_load(change, longest: int, tiles: tuple[int, ...]) -> None:
    """As measured there, where no register is spilled in the main loop: see test_codegen.py."""
    problem = replace(
        problem_of(LLAMA, longest=longest, page=1, new_kv=False, tma=False), **{"head_dim_v": 0, **change}
    )
    plan = plan_prefill(problem, H200)
    assert (plan.block_m, plan.block_n, plan.num_warps, plan.num_stages) == tiles
    assert plan_prefill(problem, SM_90).block_m <= 64


def test_small_sequences_take_tiles_of_fewer_rows() -> None:
    rows = [plan_prefill(problem_of(LLAMA, longest=n), A100).block_m for n in (0, 1, 2, 3, 4, 8, 9, 1000)]
    assert rows == [16, 16, 16, 32, 32, 64, 64, 64]


def rounds(problem: Problem, plan: PrefillPlan, cores: int) -> float:
    """How long the device is busy, in the time that one tile takes with all its keys, lengths being equal."""
    sequences = max(1, problem.sequences)
    tokens = tokens_per_tile(problem.group, plan.block_m)
    tiles = sequences * cdiv(cdiv(problem.tokens, sequences), tokens) * problem.num_heads_kv
    tiles *= cdiv(problem.group, heads_per_tile(problem.group, plan.block_m))
    return cdiv(tiles * plan.num_splits, cores) / plan.num_splits


@pytest.mark.parametrize("model", [LLAMA, GPT_OSS], ids=str)
@pytest.mark.parametrize(("tokens", "sequences"), [(1, 1), (16, 16), (128, 1), (512, 1), (2048, 1)])
def test_splits_keep_the_cores_evenly_busy_behind_a_long_context(model, tokens: int, sequences: int) -> None:
    problem = problem_of(model, tokens=tokens, sequences=sequences, longest=max(tokens // sequences, 1), capacity=2**17)
    plan = plan_prefill(problem, SM_90)
    ideal = rounds(problem, replace(plan, num_splits=10**6), SM_90.cores)
    # Work shared out without loss, a quarter more, and a little where merging parts would cost more than that.
    assert rounds(problem, plan, SM_90.cores) <= 1.25 * ideal + 0.05, plan


def test_one_chunk_of_llama_is_one_pass_and_a_token_of_it_is_split() -> None:
    assert plan_prefill(PROMPT, SM_90).num_splits == 1
    decoding = problem_of(LLAMA, tokens=1, longest=1, capacity=131072)
    assert plan_prefill(decoding, SM_90).num_splits >= 16
    # 32 one-token rows are a quarter of the cores.
    batch = problem_of(LLAMA, tokens=32, sequences=32, longest=1, capacity=131072)
    assert plan_prefill(batch, SM_90).num_splits >= 4


def test_parts_are_never_so_small_that_they_cost_more_than_they_save() -> None:
    for problem in problems():
        for limits in DEVICES.values():
            plan = plan_prefill(problem, limits)
            assert plan.num_splits <= 1 or plan.num_splits * 4 * plan.block_n <= problem.capacity


def test_how_keys_are_shared_is_left_to_the_device_but_where_all_are_few() -> None:
    for tokens, sequences, longest in ((1, 1, 1), (32, 32, 1), (256, 1, 256), (2079, 32, 2048)):
        for capacity, splits in ((500, 1), (131072, 0)):
            problem = problem_of(
                LLAMA, tokens=tokens, sequences=sequences, longest=longest, capacity=capacity, new_kv=False
            )
            assert plan_prefill(problem, H200).num_splits == splits


def test_a_window_of_1024_leaves_tiles_of_larger_heads_and_of_8_bits_to_be_cut() -> None:
    for changes in ({"head_dim": 256, "head_dim_v": 256}, {"cache_bits": 8}):
        few = replace(
            problem_of(LLAMA_8B, tokens=1, sequences=1, longest=1, capacity=131072, new_kv=False, left=1023), **changes
        )
        assert plan_prefill(few, H200).num_splits == 9


def test_a_plan_is_the_same_for_every_batch_of_a_server_but_for_its_rows() -> None:
    """No table width and no length of it: kernels are compiled for what a plan says. One prompt may be left whole."""
    plans = set()
    for sequences, longest, capacity in itertools.product((1, 2, 17, 256), (1, 2, 2048), (2048, 131072)):
        problem = problem_of(LLAMA, tokens=sequences * longest, sequences=sequences, longest=longest, capacity=capacity)
        plans.add(plan_prefill(problem, H200))
    kinds = ((64, 0, 56), (128, 0, 56), (128, 1, 40))
    assert plans == {
        PrefillPlan(rows, 128, splits, 4, 2, hopper=True, programs=132, loading=loading)
        for rows, splits, loading in kinds
    }


LLAMA_8B = SoftmaxAttention("Llama-3-8B", 32, 8, 128)


@pytest.mark.parametrize(
    ("sequences", "longest", "window", "splits"),
    [
        # What was measured: 8 heads of as many tiles as there are 32 tokens, on 132 programs.
        (1, 2048, 0, 1), (1, 8192, 0, 0), (4, 512, 128, 1), (4, 512, 1024, 1),
        # Half of the programs have a tile, or all have one and a few two; four sequences may begin behind any contexts.
        (1, 256, 0, 0), (1, 544, 0, 0), (1, 512, 0, 1), (4, 512, 0, 0), (4, 2048, 0, 0),
        # Of few rows, or few tiles, those of a long window are cut; those of a short one never are.
        (1, 256, 1024, 1), (4, 512, 4096, 0), (64, 1, 1024, 1), (64, 1, 2048, 0), (64, 1, 128, 1), (1, 1, 512, 1),
    ],
)  # fmt: skip
def test_tiles_are_left_whole_where_shapes_tell_that_this_keeps_all_programs_busy(
    sequences: int, longest: int, window: int, splits: int
) -> None:
    problem = problem_of(
        LLAMA_8B, tokens=sequences * longest, sequences=sequences, longest=longest, capacity=131072, new_kv=False,
        left=window - 1,
    )  # fmt: skip
    assert plan_prefill(problem, H200).num_splits == splits
    # The kernel of a cascade's levels has one way to share, and one more would be a kernel more.
    for level in ({"shared": True}, {"carried": 1}):
        assert plan_prefill(replace(problem, **level), H200).num_splits == 0
    # A number that is given is that.
    assert plan_prefill(problem, H200, 3).num_splits == 3


def test_prompts_of_which_nothing_is_cached_are_left_whole_where_programs_have_many_tiles() -> None:
    prompt = problem_of(LLAMA_8B, tokens=8192, sequences=1, longest=8192, capacity=64, new_kv=True)
    for several in (prompt, replace(prompt, sequences=5, max_seqlen_q=4000)):
        plan = plan_prefill(several, H200)
        assert (plan.num_splits, plan.loading) == (1, 40)
        # Or the table has room for what may take long; or there are few tiles.
        for changes in ({"capacity": 131072}, {"tokens": 1000, "max_seqlen_q": 990}):
            assert plan_prefill(replace(several, **changes), H200).num_splits == 0


def test_prompts_are_left_whole_where_no_sequence_may_have_many_more_keys_than_the_longest_has_tokens() -> None:
    given = {"tokens": 9000, "sequences": 7, "longest": 4000, "new_kv": False}
    for options, splits in (({"capacity": 4096}, 1), ({"capacity": 8192}, 0)):
        prompts = problem_of(LLAMA_8B, **given, **options)
        assert plan_prefill(prompts, H200).num_splits == splits
        # A bound of tokens that says nothing.
        assert plan_prefill(replace(prompts, max_seqlen_q=2**20, capacity=2**17), H200).num_splits == 0
        assert plan_prefill(replace(prompts, sequences=1), H200).num_splits == 0


@pytest.mark.parametrize(
    ("sequences", "longest", "bound", "new_kv", "splits"),
    [
        (1, 256, 256, False, 1), (16, 512, 512, False, 1), (4, 2048, 2048, False, 1), (4, 2048, 4096, False, 1),
        (4, 2048, 8192, False, 0),
        (1, 8192, 8192, True, 1), (1, 8192, 8192, False, 0), (1, 8192, 16384, True, 0), (16, 1, 1024, False, 1),
        (1, 2048, 8192, False, 1), (1, 2048, 16384, False, 0),
    ],
)  # fmt: skip
def test_a_bound_of_all_tokens_says_as_much_as_a_table_of_no_more_room(
    sequences: int, longest: int, bound: int, new_kv: bool, splits: int
) -> None:
    given = {"tokens": sequences * longest, "sequences": sequences, "longest": longest, "new_kv": new_kv}
    problem = problem_of(LLAMA_8B, **given, capacity=131072)
    assert plan_prefill(replace(problem, max_seqlen_k=bound), H200).num_splits == splits
    # Without it, one prompt of some rounds, the last of which is filled, is left whole.
    assert plan_prefill(problem, H200).num_splits == ((sequences, longest) == (1, 2048))


def test_packed_keys_have_the_portable_kernel_for_few_rows_and_for_others_one_of_sm_90_that_cuts_tiles() -> None:
    """So that a layer, with what merges parts of either, has four kernels."""
    problem = problem_of(LLAMA_8B, new_kv=True, page_layout="x-packed", capacity=512)
    for tokens, hopper in ((2048, True), (9, True), (4, False)):
        plan = plan_prefill(replace(problem, tokens=tokens, max_seqlen_q=tokens), H200)
        assert (plan.hopper, plan.block_m) == (hopper, 128 if hopper else 16)
        assert plan.num_splits == 0 or not hopper
    chosen = plan_prefill(problem, H200)
    assert [replace(chosen, q_in_registers=each).covers(problem) for each in (0, 1)] == [True, False]
    for change in ({"page_size": 24}, {"head_dim": 96}, {"head_dim_v": 64}, {"cache_bits": 8}, {"tma": False}):
        assert not plan_prefill(replace(problem, **change), H200).hopper, change
    assert not plan_prefill(problem, replace(H200, gaps=False)).hopper


def test_few_rows_over_gathered_pages_have_small_tiles_in_as_many_stages_as_fit() -> None:
    problem = problem_of(LLAMA_8B, tokens=4, sequences=4, longest=1, page=1, new_kv=False)
    for size, sizes in ((128, (64, 4)), (256, (64, 2)), (512, (32, 2))):
        plan = plan_prefill(replace(problem, head_dim=size, head_dim_v=size), H200)
        assert (plan.block_n, plan.num_stages) == sizes
        assert plan.covers(replace(problem, head_dim=size, head_dim_v=size))


def test_plans_of_batches_of_one_kind_are_equal() -> None:
    """So that a layer need not make one for each batch: see ``launch.Layer``."""
    of_kinds: dict[object, PrefillPlan] = {}
    lengths = (1, 9, 64, 512, 640, 2048, 8192)
    layers = [{"left": left} for left in (-1, 127, 1023, 2047)]
    layers += [{"new_kv": False, "softcap": cap, "left": left} for cap, left in ((0.0, -1), (30.0, -1), (30.0, 4095))]
    layers += [{"new_kv": False, "draft": True}, {"new_kv": False, "head_dim": 192, "head_dim_v": 192}]
    of_33 = (33, 80)
    for sequences, longest, layer in itertools.product((1, 2, 4, 7, 64), lengths + of_33, layers):
        rows = {"tokens": sequences * longest, "sequences": sequences, "longest": longest}
        problem = replace(problem_of(LLAMA_8B, **rows, capacity=2048 if longest == 9 else 32768), **layer)
        kind = (str(layer), kind_of_batch(problem, H200))
        assert of_kinds.setdefault(kind, plan_prefill(problem, H200)) == plan_prefill(problem, H200)
    assert len(of_kinds) >= 8


def test_a_number_of_splits_that_is_given_means_the_same_tiles_whatever_the_batch() -> None:
    """How a tile's keys are cut depends on the tile: one of other rows would give a sequence other bits."""
    batches = [(1, 1, 1, 64), (9, 1, 9, 512), (4096, 9, 2048, 2**17), (64, 64, 1, 64)]
    for limits, splits, model in itertools.product(DEVICES.values(), (1, 3), (LLAMA, GPT_OSS)):
        plans = set()
        for tokens, sequences, longest, capacity in batches:
            problem = problem_of(model, tokens=tokens, sequences=sequences, longest=longest, capacity=capacity)
            plans.add(plan_prefill(problem, limits, splits))
        assert len(plans) == 1, plans


def test_a_plan_follows_from_shapes_alone() -> None:
    assert [*inspect.signature(plan_prefill).parameters] == ["problem", "limits", "num_splits"]
    numbers = {
        "softmax_scale": 0.3, "softcap": 30.0, "left": 1023, "right": -1, "skip_decode": True, "k_scale": 0.5,
        "v_scale": 2.0, "out_scale": 0.1, "num_blocks": 7, "page_layout": "HND", "num_splits": 5,
    }  # fmt: skip
    for limits in DEVICES.values():
        assert plan_prefill(replace(PROMPT, **numbers), limits) == plan_prefill(PROMPT, limits)


def test_short_windows_take_small_tiles_by_two_programs_an_sm_on_sm_90() -> None:
    """Of tiles of 128 keys most would be masked; decoding rows have the same kernel as chunks."""
    short = replace(PROMPT, left=127)
    two = PrefillPlan(64, 64, 1, 4, 2, hopper=True, programs=264, per_core=2)
    assert plan_prefill(short, H200) == plan_prefill(replace(short, max_seqlen_q=1), H200) == two
    assert not replace(two, num_stages=3).covers(short)
    # Half of an SM has room for tiles of 32 keys of wider heads.
    wide = replace(short, head_dim=192, head_dim_v=192)
    assert plan_prefill(wide, H200) == replace(two, block_n=32)
    assert not replace(two, block_n=32).covers(short)
    assert not two.covers(wide)
    for other in (replace(short, left=256), replace(short, right=-1), replace(short, left=-1)):
        assert plan_prefill(other, H200).per_core == 1
        assert plan_prefill(other, H200).block_n == 128


def test_heads_of_256_in_windows_up_to_128_are_by_two_programs_an_sm() -> None:
    """If what loads has fewer registers, there are some for values of 256 numbers. Others were not timed."""
    cached = replace(PROMPT, left=127, head_dim=256, head_dim_v=256, new_kv=False)
    two = PrefillPlan(64, 32, 1, 4, 2, hopper=True, programs=264, loading=40, per_core=2)
    assert plan_prefill(cached, H200) == plan_prefill(replace(cached, max_seqlen_q=1), H200) == two
    assert not replace(two, loading=56).covers(cached)
    assert not two.covers(replace(cached, head_dim_v=264))
    others = ({"left": 128}, {"right": 1}, {"new_kv": True}, {"draft": True}, {"page_size": 1},
              {"head_dim": 248}, {"head_dim_v": 248}, {"head_dim_v": 264}, {"alibi": True})  # fmt: skip
    for other in others:
        assert plan_prefill(replace(cached, **other), H200).per_core == 1


def test_heads_of_64_decode_in_three_stages_on_sm_90() -> None:
    """As many bytes are on their way then as with heads of 96. New keys, drafts and caps were not timed so."""
    small = problem_of(replace(LLAMA_8B, head_dim=64), tokens=64, sequences=64, longest=1, capacity=2**17, new_kv=False)
    assert plan_prefill(small, H200) == PrefillPlan(64, 128, 0, 4, 3, hopper=True, programs=132)
    others = ({"new_kv": True}, {"draft": True}, {"alibi": True}, {"head_dim_v": 72}, {"page_size": 1})
    for other in others:
        assert plan_prefill(replace(small, **other), H200).num_stages != 3


def test_short_prompts_of_large_heads_have_the_kernel_that_decodes_if_each_program_has_one_tile() -> None:
    rows = {"tokens": 256, "sequences": 1, "longest": 256, "capacity": 2048, "new_kv": False}
    large = problem_of(replace(LLAMA_8B, head_dim=192), **rows)
    decoding = replace(large, tokens=1, max_seqlen_q=1)
    assert plan_prefill(large, H200) == replace(plan_prefill(decoding, H200), num_splits=0)
    assert plan_prefill(large, H200).block_m == 64
    others = ({"capacity": 2064}, {"tokens": 272, "max_seqlen_q": 272}, {"new_kv": True}, {"softcap": 30.0},
              {"left": 511}, {"joined": 1}, {"head_dim": 96, "head_dim_v": 96})  # fmt: skip
    for other in others:
        assert plan_prefill(replace(large, **other), H200).block_m == 128


def test_short_prompts_with_heads_of_128_have_the_kernel_that_decodes_while_two_programs_an_sm_fill_its_tiles() -> None:
    """Of an odd number of tiles of 64 rows a sequence, of which tiles of 128 would leave a half empty, more."""
    rows = {"tokens": 33, "sequences": 1, "longest": 33, "capacity": 2048, "new_kv": False}
    short = problem_of(LLAMA_8B, **rows)
    decoding = replace(short, tokens=1, max_seqlen_q=1)
    assert plan_prefill(short, H200) == replace(plan_prefill(decoding, H200), num_splits=0, programs=132)
    for sequences, new, rows, splits, programs in (
        (1, 256, 64, 1, 132), (1, 512, 128, 1, 132), (4, 33, 64, 1, 132), (16, 33, 64, 1, 264), (17, 33, 128, 0, 132),
        (2, 64, 64, 0, 132), (4, 128, 128, 0, 132), (3, 32, 64, 0, 132),
    ):  # fmt: skip
        plan = plan_prefill(replace(short, tokens=sequences * new, sequences=sequences, max_seqlen_q=new), H200)
        assert (plan.block_m, plan.num_splits, plan.programs) == (rows, splits, programs), (sequences, new)
    # A tree has them too; new keys, windows and pages of 1 were not timed so.
    assert plan_prefill(replace(short, draft=True), H200).block_m == 64
    for other in ({"new_kv": True}, {"left": 511}, {"page_size": 1}, {"alibi": True}, {"joined": 1}):
        assert plan_prefill(replace(short, **other), H200).block_m == 128
    # Of many keys there must be so few tiles that all programs share each.
    long = replace(short, capacity=2**17)
    for sequences, new, block_m in ((1, 33, 64), (2, 33, 64), (3, 33, 128), (1, 48, 64), (1, 49, 128), (1, 80, 128)):
        plan = plan_prefill(replace(long, tokens=sequences * new, sequences=sequences, max_seqlen_q=new), H200)
        assert (plan.block_m, plan.num_splits, plan.programs) == (block_m, 0, 264 if block_m == 64 else 132)
    assert plan_prefill(replace(long, draft=True), H200).block_m == 128
    five = replace(long, tokens=80, max_seqlen_q=80)
    assert [plan_prefill(replace(five, max_seqlen_k=keys), H200).block_m for keys in (16384, 32768)] == [64, 128]


def test_heads_of_128_decode_by_two_programs_an_sm_and_drafts_of_few_tiles_by_one() -> None:
    """More pieces of tiles of several tokens take longer to merge than they save."""
    one = problem_of(LLAMA_8B, tokens=16, sequences=16, longest=1, capacity=2**17, new_kv=False)
    two = PrefillPlan(64, 64, 0, 4, 2, hopper=True, programs=264, per_core=2)
    drafts = replace(one, tokens=64, max_seqlen_q=4)
    assert plan_prefill(one, H200) == plan_prefill(replace(drafts, sequences=17), H200) == two
    assert plan_prefill(drafts, H200) == replace(two, programs=132)
    # Of few keys, which need not be shared.
    short = replace(drafts, capacity=2048)
    assert plan_prefill(short, H200) == replace(two, programs=132, num_splits=1)
    assert plan_prefill(replace(short, sequences=8), H200) == replace(two, programs=132)
    assert plan_prefill(replace(one, capacity=2048), H200) == two
    capped = replace(drafts, softcap=30.0)
    assert plan_prefill(capped, H200) == replace(two, programs=132)
    others = ({"new_kv": True}, {"page_size": 1}, {"alibi": True}, {"joined": 1}, {"head_dim_v": 96},
              {"head_dim": 96, "head_dim_v": 96}, {"draft": True, "left": 4095})  # fmt: skip
    for other in others:
        assert plan_prefill(replace(one, **other), H200).per_core == 1
    # In a window of 1024, too, a tile is worth its pieces, where there are programs for them.
    short = replace(one, left=1023)
    for sequences, splits in ((1, 9), (4, 0), (8, 0), (9, 1), (64, 1)):
        assert plan_prefill(replace(short, tokens=sequences, sequences=sequences), H200).num_splits == splits


def test_capped_tiles_of_64_that_are_about_one_for_each_of_two_programs_an_sm_stay_whole() -> None:
    """33 tokens of 8 query heads are 264 rows, of tiles of 128 384. A few more than programs are in four pieces."""
    model = replace(LLAMA_8B, num_heads_q=64, head_dim=96)
    rows = {"tokens": 33 * 8, "sequences": 8, "longest": 33, "capacity": 2**17, "softcap": 50.0, "new_kv": False}
    capped = replace(problem_of(model, **rows), left=4095)
    decoding = replace(capped, tokens=8, max_seqlen_q=1)
    assert plan_prefill(capped, H200) == replace(plan_prefill(decoding, H200), num_splits=4)
    assert plan_prefill(replace(capped, left=-1), H200).block_m == 128
    for sequences, block_m, splits in ((4, 64, 0), (5, 128, 0), (6, 64, 1), (7, 64, 4), (9, 128, 0), (16, 128, 0)):
        plan = plan_prefill(replace(capped, tokens=33 * sequences, sequences=sequences), H200)
        assert (plan.block_m, plan.num_splits) == (block_m, splits)


def test_warps_choose_a_series_of_capped_scores_where_two_programs_share_an_sm_and_it_was_timed() -> None:
    short = replace(PROMPT, left=127, softcap=50.0, new_kv=False)
    for size, capping in ((64, 4), (72, 3), (80, 3), (96, 4), (128, 3), (192, 3), (256, 4)):
        plan = plan_prefill(replace(short, head_dim=size, head_dim_v=size), H200)
        assert (plan.per_core, plan.capping) == (2, capping)
    large = plan_prefill(replace(short, left=4095, head_dim=192, head_dim_v=192), H200)
    assert (large.per_core, large.capping) == (1, 4)
    small = replace(short, head_dim=64, head_dim_v=64)
    for other in ({"softcap": 0.0}, {"new_kv": True}, {"page_size": 1}, {"head_dim_v": 96}, {"draft": True}):
        assert plan_prefill(replace(small, **other), H200).capping == 3
    prompt = plan_prefill(replace(small, left=-1, tokens=2**16, max_seqlen_q=2**16), H200)
    assert (prompt.per_core, prompt.capping) == (1, 3)


def test_few_rows_of_capped_scores_are_shared_by_two_programs_an_sm() -> None:
    capped = problem_of(LLAMA_8B, tokens=33, sequences=1, longest=33, capacity=2**17, softcap=50.0, new_kv=False)
    decoding = replace(capped, tokens=4096, sequences=4096, max_seqlen_q=1)
    assert plan_prefill(capped, H200) == plan_prefill(decoding, H200)
    assert plan_prefill(capped, H200) == PrefillPlan(64, 64, 0, 4, 2, hopper=True, programs=264, per_core=2)
    # Of more tiles and many keys two would share too little.
    three = {"tokens": 99, "sequences": 3}
    assert plan_prefill(replace(capped, left=4095, **three), H200).per_core == 2
    for other in (
        three,
        {"softcap": 0.0, **three},
        {"new_kv": True},
        {"page_size": 1},
        {"tokens": 4096, "max_seqlen_q": 4096},
    ):
        assert plan_prefill(replace(capped, **other), H200).per_core == 1


def test_few_tiles_of_wide_heads_in_pages_of_one_are_of_64_rows() -> None:
    few = problem_of(LLAMA_8B, tokens=33, sequences=1, longest=33, capacity=2**17, new_kv=False)
    few = replace(few, page_size=1)
    wide = replace(few, head_dim=192, head_dim_v=192)
    assert plan_prefill(wide, H200) == plan_prefill(replace(wide, tokens=2, sequences=2, max_seqlen_q=1), H200)
    assert [plan_prefill(x, H200).block_m for x in (few, wide, replace(wide, tokens=4096))] == [128, 64, 128]


def test_pieces_of_one_sequence_that_decodes_follow_from_its_bound() -> None:
    """Where they save no more keys than merging costs tiles stay whole; many pieces are left to the device."""
    for keys, pieces in ((500, 1), (700, 6), (1000, 8), (2000, 16), (131072, 16)):
        problem = problem_of(LLAMA_8B, tokens=1, sequences=1, longest=1, capacity=131072, new_kv=False)
        bounded = replace(problem, max_seqlen_k=keys)
        assert plan_prefill(bounded, H200).num_splits == pieces
        assert kind_of_batch(bounded, H200) == (True, True, True, False, False, pieces, False)
    assert plan_prefill(replace(bounded, num_heads=4, num_heads_kv=1), H200).num_splits == 0
    assert plan_prefill(replace(bounded, sequences=2), H200).num_splits == 0


@pytest.mark.parametrize(
    ("heads", "sequences", "keys", "programs"),
    [
        pytest.param((8, 1), 128, 8192, 8 * 9, id="a row's part costs as much as 92 keys of the level"),
        pytest.param((8, 1), 32, 8192, 2 * 11, id="less where few programs have tiles behind it"),
        pytest.param((32, 8), 32, 8192, 8 * 6, id="twice as much where each has two"),
        pytest.param((32, 8), 16, 32768, 8 * 8, id="more than half of the programs would wait for memory"),
        pytest.param((8, 1), 128, 32768, 132, id="many keys, as many as there are"),
        pytest.param((32, 8), 128, 8192, 32 * 4, id="of fewer than four pieces none is quicker"),
    ],
)
def test_a_level_is_cut_in_as_many_pieces_as_are_worth_their_parts(heads, sequences, keys, programs) -> None:
    last = Problem(*heads, 128, 16, sequences, sequences, 1, 512, tma=True, carried=1)
    level = replace(last, sequences=1, max_seqlen_q=sequences, capacity=keys, carried=0, shared=True)
    plan = plan_prefill(level, H200)
    assert plan_in_pieces(plan, level, last) == replace(plan, programs=programs)
    for pinned in (replace(plan, num_splits=3), PrefillPlan(64, 64, 1, 4, 2)):
        assert plan_in_pieces(pinned, level, last) == pinned
    # A bound that is too far off leaves it to the device.
    more = [plan_in_pieces(plan, replace(level, capacity=keys * times), last).programs for times in (1, 2, 4, 64)]
    assert more == sorted(more)


GOOD = PrefillPlan(64, 64, 1, 4, 2)
REFUSED = {
    "rows that are no power of two": replace(GOOD, block_m=48), "rows below 16": replace(GOOD, block_m=8),
    "negative rows": replace(GOOD, block_m=-64), "keys that are no power of two": replace(GOOD, block_n=24),
    "keys below 16": replace(GOOD, block_n=8), "no keys": replace(GOOD, block_n=0),
    "no programs": replace(GOOD, programs=0),
    "no splits": replace(GOOD, num_splits=0), "negative splits": replace(GOOD, num_splits=-2),
    "warps that are no power of two": replace(GOOD, num_warps=3), "no warps": replace(GOOD, num_warps=0),
    "no stages": replace(GOOD, num_stages=0), "rows that compile for minutes": replace(GOOD, block_m=512),
    "keys that compile for minutes": replace(GOOD, block_n=2**20),
    "more warps than a program has": replace(GOOD, num_warps=64),
}  # fmt: skip
ON_HOPPER = PrefillPlan(128, 128, 1, 4, 2, hopper=True)
REFUSED_ON_HOPPER = {
    "32 rows": replace(ON_HOPPER, block_m=32), "256 rows": replace(ON_HOPPER, block_m=256),
    "32 keys": replace(ON_HOPPER, block_n=32), "256 keys": replace(ON_HOPPER, block_n=256),
    "8 warps": replace(ON_HOPPER, num_warps=8), "one stage": replace(ON_HOPPER, num_stages=1),
    "more stages than memory has room for": replace(ON_HOPPER, num_stages=4),
    "two programs of 128 rows": replace(ON_HOPPER, per_core=2), "no registers": replace(ON_HOPPER, loading=0),
}  # fmt: skip


@pytest.mark.parametrize("plan", REFUSED.values(), ids=REFUSED)
def test_a_plan_that_no_kernel_can_take_covers_nothing(plan: PrefillPlan) -> None:
    assert GOOD.covers(PROMPT)
    assert not plan.covers(PROMPT)


@pytest.mark.parametrize("plan", REFUSED_ON_HOPPER.values(), ids=REFUSED_ON_HOPPER)
def test_a_plan_for_hopper_is_of_the_blocks_that_its_kernel_is_written_for(plan: PrefillPlan) -> None:
    assert ON_HOPPER.covers(PROMPT)
    assert not plan.covers(PROMPT)


@pytest.mark.parametrize("plan", [*REFUSED.values(), *REFUSED_ON_HOPPER.values()], ids=[*REFUSED, *REFUSED_ON_HOPPER])
def test_an_error_says_in_one_line_what_of_a_plan_is_wrong(plan: PrefillPlan) -> None:
    right = ON_HOPPER if plan.hopper else GOOD
    [changed] = (name for name in plan.__dataclass_fields__ if getattr(plan, name) != getattr(right, name))
    words = why_not(plan, PROMPT)
    assert changed in words or words.startswith("of tiles that fit in 229376 bytes of shared memory, not of 294912")
    assert len(f"plan must be {words}, got {plan}") < 200


def test_stages_of_a_plan_for_other_heads_or_another_cache_are_refused() -> None:
    """Four stages of heads of 64 fit in shared memory, of 128 do not; over 8 bits tiles are there twice."""
    small = replace(PROMPT, head_dim=64, head_dim_v=64, new_kv=False)
    plan = plan_prefill(small, H200)
    assert (plan.hopper, plan.block_n, plan.num_stages) == (True, 128, 4)
    assert plan.covers(small)
    for size, bits in ((128, 16), (96, 8)):
        assert not replace(plan, q_in_registers=0).covers(
            replace(small, head_dim=size, head_dim_v=size, cache_bits=bits)
        )


def test_a_plan_for_hopper_covers_only_what_its_kernel_can_take() -> None:
    for change in ({"tma": False}, {"cache_bits": 8}, {"bits": 32, "cache_bits": 32}):
        assert GOOD.covers(replace(PROMPT, **change))
        assert not ON_HOPPER.covers(replace(PROMPT, **change))
    for size in range(16, 257):
        problem = replace(PROMPT, head_dim=size, head_dim_v=size)
        assert ON_HOPPER.covers(problem) == (size <= 192 and size % 8 == 0)
        assert replace(ON_HOPPER, block_n=64).covers(problem) == (size % 8 == 0)
    # Scores of 128 keys fit beside an accumulator of 128 values, whatever is summed up for them.
    assert ON_HOPPER.covers(replace(PROMPT, head_dim=192))


@pytest.mark.parametrize("plan", [GOOD, ON_HOPPER, plan_prefill(PROMPT, A100), plan_prefill(PROMPT, H200, 7)], ids=str)
def test_a_plan_is_a_value_that_survives_the_way_through_an_op(plan: PrefillPlan) -> None:
    assert all(type(number) is int for number in plan.as_ints())
    again = PrefillPlan(*plan.as_ints())
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


def test_importing_the_package_and_planning_touch_no_gpu_and_import_no_triton() -> None:
    program = (
        "import sys, prefix_prefill, torch\n"
        "from prefix_prefill.plan import *\n"
        "plan_prefill(Problem(8, 1, 128, 16, 2048, 1, 2048, 32768, tma=True), DeviceLimits(132, 232448, True))\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'triton' not in sys.modules, 'triton is imported'\n"
        "assert 'prefix_prefill.launch' not in sys.modules\n"
        "assert 'prefix_prefill.kernels' not in sys.modules\n"
    )
    run_alone(program)


def test_a_cache_is_widened_before_where_it_is_asked_for_pays_and_has_room() -> None:
    prompt = replace(
        problem_of(LLAMA_8B, tokens=2048, sequences=1, longest=2048, capacity=32768, new_kv=False), cache_bits=8
    )
    most = 32768 * 8 * 256 * 2 + 256 * 4
    asked = replace(prompt, widen_bytes=most)
    assert plan_prefill(asked, H200).widened
    for left in (
        prompt, replace(prompt, widen_bytes=most - 1), replace(asked, tokens=1023), replace(asked, sequences=3),
        replace(asked, cache_bits=16), replace(asked, new_kv=True), replace(asked, left=4096),
        replace(asked, token_scales=True), replace(asked, quantize_q=True), replace(asked, capacity=32769),
        replace(asked, capacity=0), replace(asked, sequences=0),
    ):  # fmt: skip
        assert not plan_prefill(left, H200).widened
        if left != prompt:
            assert kind_of_batch(left, H200) != kind_of_batch(asked, H200)
    splits = plan_prefill(asked, H200, 3)
    assert splits.widened
    assert replace(splits, widened=0, loading=56) == replace(plan_prefill(prompt, H200, 3), q_in_registers=0)
