"""Is the work laid out so that every row and key is taken once and no processor waits? Pure: no GPU, no kernel."""

from __future__ import annotations

import heapq
import inspect
import itertools
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
import torch

from tilelang_mla import plan_decode
from tilelang_mla.plan import (
    MOST_SPLITS,
    DecodeProblem,
    DecodeTiles,
    DeviceLimits,
    PrefillPlan,
    PrefillProblem,
    cdiv,
    decode_tiles,
    merge_cost,
    merge_grid,
    part_cost,
    plan_of_call,
    plan_of_whole_lists,
    plan_prefill,
    plan_without_schedule,
    tiles_8bit,
)
from tilelang_mla.sparse.tiles import has_a_part_each, plan_of_lists, tiles_of_few_lists
from tilelang_mla.waves import finds_long, get_splits

H200 = DeviceLimits(132)
A100 = DeviceLimits(108, 163 * 1024)
SMALL = DeviceLimits(8, 99 * 1024)
DEVICES = {"H200": H200, "A100": A100, "8 SMs": SMALL}
on_every_device = pytest.mark.parametrize("limits", DEVICES.values(), ids=DEVICES)
HEADS = (1, 8, 12, 16, 20, 24, 40, 64, 80, 96, 112, 128)
DECODING = DecodeProblem(16, 512, 64, 1, 32, 8192, 64)
PROMPT = PrefillProblem(128, 128, 192, 128, 8192, 1, 8192)


# The static rule, with 132 cores: sequences, heads, query tokens, keys -> splits


SPLITS = [
    # 264 tiles are wanted: more than a block of 128 keys has none.
    ((1, 128, 1, 8192), {}, 64), ((1, 64, 1, 65536), {}, 256), ((1, 16, 1, 65536), {}, 256),
    ((1, 16, 1, 8192), {}, 64), ((1, 16, 1, 128), {}, 1), ((1, 16, 1, 127), {}, 1), ((1, 16, 1, 0), {}, 1),
    ((1, 16, 1, 255), {}, 1), ((1, 16, 1, 256), {}, 2), ((1, 16, 1, 640), {}, 4), ((1, 16, 1, 1023), {}, 4),
    # ceil(264 / 32) = 9, ceil(264 / 64) = 5, ceil(264 / 66) = 4, rounded down to a power of two.
    ((32, 16, 1, 8192), {}, 8), ((64, 16, 1, 8192), {}, 4), ((66, 16, 1, 8192), {}, 4), ((88, 16, 1, 8192), {}, 2),
    ((128, 16, 1, 8192), {}, 2), ((132, 64, 1, 8192), {}, 2), ((263, 64, 1, 8192), {}, 2),
    # As many as wanted, or more.
    ((264, 64, 1, 8192), {}, 1), ((132, 128, 1, 8192), {}, 1), ((132, 64, 2, 8192), {}, 1), ((1000, 1, 1, 1), {}, 1),
    # Heads are counted in whole groups of 64, query tokens one by one.
    ((16, 65, 1, 8192), {}, 8), ((16, 128, 1, 8192), {}, 8), ((16, 129, 1, 8192), {}, 4), ((16, 16, 4, 8192), {}, 4),
    ((16, 16, 1, 8192), {"block_size_h": 8}, 8), ((16, 16, 1, 8192), {}, 16),
    ((1, 16, 1, 8192), {"block_size_n": 64}, 128), ((1, 16, 1, 8192), {"block_size_n": 1024}, 8),
    # At most sink and local blocks are read; a list that is too short says nothing.
    ((1, 16, 1, 8192), {"streaming_info": [1, 15]}, 16), ((1, 16, 1, 8192), {"streaming_info": [1, 6]}, 4),
    ((1, 16, 1, 8192), {"streaming_info": [0, 0]}, 1), ((1, 16, 1, 256), {"streaming_info": [8, 8]}, 2),
    ((1, 16, 1, 8192), {"streaming_info": [1]}, 64), ((1, 16, 1, 8192), {"streaming_info": []}, 64),
    ((1, 16, 1, 8192), {"streaming_info": [1, 6, 99]}, 4), ((1, 16, 1, 8192), {"streaming_info": None}, 64),
    ((1, 16, 1, 8192), {"streaming_info": [1, 15], "block_size_n": 64}, 16),
    # Nothing at all.
    ((0, 16, 1, 8192), {}, 1), ((4, 16, 0, 8192), {}, 1), ((4, 0, 1, 8192), {}, 1),
]  # fmt: skip


@pytest.mark.parametrize(("given", "options", "splits"), SPLITS, ids=str)
def test_the_static_rule(given, options, splits) -> None:
    assert get_splits(*given, **options, cores=132) == splits


def test_the_static_rule_is_that_of_the_specification_for_any_numbers() -> None:
    numbers = itertools.product((1, 3, 33, 200), (1, 16, 80, 128), (1, 2, 4), (0, 100, 1000, 8192, 10**6), (1, 78, 132))
    for batch, heads, tokens, keys, cores in numbers:
        natural = batch * tokens * -(-heads // 64)
        splits = get_splits(batch, heads, tokens, keys, cores=cores)
        most = min(-(-2 * cores // natural), max(1, keys // 128))
        assert splits == (1 if natural >= 2 * cores else max(2**n for n in range(40) if 2**n <= most))


def test_the_static_rule_takes_the_arguments_of_the_specification() -> None:
    parameters = inspect.signature(get_splits).parameters.values()
    defaults = [p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][4:]
    assert defaults == [64, 128, None]


# The grid of decoding: rows


def rows_of(tiles: DecodeTiles, rows: int) -> list[int]:
    """Every row that a grid of ``row_tiles`` takes."""
    count = tiles.row_tiles(rows)
    return [r for t in range(count) for r in range(t * tiles.block_m, (t + 1) * tiles.block_m) if r < rows]


@pytest.mark.parametrize("heads", HEADS)
def test_trap_tiles_hold_each_row_once_and_there_is_none_without_rows(heads) -> None:
    """``(sq * (h + 15)) // 16`` is 7 for 4 tokens of 16 heads; ``sq * h // 16`` is 0 for 8 heads, and 5 for 88 rows."""
    for tokens, block_m in itertools.product((0, 1, 2, 3, 4, 7), (64, 128)):
        tiles = DecodeTiles(block_m, 64, 2)
        rows = tokens * heads
        assert rows_of(tiles, rows) == [*range(rows)]
        assert (tiles.row_tiles(rows) - 1) * block_m < max(rows, 1)


def test_several_query_tokens_of_few_heads_share_a_tile() -> None:
    """So that the cache is read once for all of them."""
    for heads, tokens in ((16, 4), (8, 8), (20, 3), (32, 2), (64, 1), (1, 64)):
        assert DecodeTiles(64, 64, 2).row_tiles(heads * tokens) == 1
    assert DecodeTiles(64, 64, 2).row_tiles(16 * 5) == 2
    assert DecodeTiles(64, 64, 2).row_tiles(128 * 4) == 8


# The grid of decoding: keys


def part_range(blocks: int, part: int, parts: int) -> tuple[int, int]:
    """The blocks of keys (first, last + 1) that one of a sequence's parts takes, as kernels have it."""
    return blocks * part // parts, blocks * (part + 1) // parts


def test_trap_parts_take_each_block_of_keys_once_whatever_the_length() -> None:
    for blocks, parts in itertools.product((*range(20), 63, 64, 65, 1000, 2**25), (1, 2, 3, 7, 64, 256)):
        ranges = [part_range(blocks, part, parts) for part in range(parts)]
        assert (ranges[0][0], ranges[-1][1]) == (0, blocks)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
        sizes = {end - begin for begin, end in ranges}
        assert min(sizes) >= 0
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) == cdiv(blocks, parts)


def lengths_of(kind: str, batch: int, longest: int) -> list[int]:
    generator = torch.Generator().manual_seed(batch * longest)
    some = torch.randint(longest + 1, (batch,), generator=generator).tolist()
    return {
        "uniform": some, "equal": [longest] * batch, "one long": [longest, *[64] * (batch - 1)][:batch],
        "empty": [0] * batch, "skewed": [int(n**3 / longest**2) for n in some],
    }[kind]  # fmt: skip


KINDS = ("uniform", "equal", "one long", "empty", "skewed")
CASES = [*itertools.product(KINDS, (0, 1, 2, 16, 128, 700), (64, 1000, 8192, 65536))]


def schedule(lengths: Sequence[int], heads: int = 16, seqlen_q: int = 1, cores: int = 132, **options):
    plan = plan_decode(torch.tensor(lengths, dtype=torch.int32), heads, seqlen_q, cores=cores, **options)
    assert plan.first_part.dtype == torch.int32
    assert plan.first_part.shape == (len(lengths) + 1,)
    assert plan.order.dtype == torch.int32
    assert sorted(plan.order.tolist()) == [*range(plan.tiles.num_parts(len(lengths)))]
    return plan


@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_every_sequence_has_a_part_and_the_grid_has_room_for_all(heads, seqlen_q) -> None:
    for kind, batch, longest in CASES:
        lengths = lengths_of(kind, batch, longest)
        for options in ({}, {"max_seqlen_k": longest}, {"num_splits": 3}, {"cores": 1}, {"max_seqlen_k": 1}):
            plan = schedule(lengths, heads, seqlen_q, **options)
            bounds = plan.first_part.tolist()
            assert bounds[0] == 0
            assert all(before < after for before, after in itertools.pairwise(bounds))
            assert bounds[-1] <= plan.tiles.num_parts(batch)


def test_the_grid_follows_from_cores_and_batch_alone() -> None:
    for batch in (1, 16, 128):
        tiles = {
            schedule(lengths_of(kind, batch, longest), max_seqlen_k=most).tiles
            for kind, longest, most in itertools.product(KINDS, (64, 8192), (8192, 65536, None))
        }
        assert len(tiles) == 1
        # Of which there are no more than a second launch merges at no cost worth naming.
        assert tiles.pop().num_parts(batch) <= batch + 2 * 132
    assert schedule([5], max_seqlen_k=8192).tiles == schedule([5] * 300, max_seqlen_k=8192).tiles


def test_sequences_of_two_blocks_are_whole_with_a_plan_and_without() -> None:
    assert [decode_tiles(16, 512, 64, most, H200).spare_parts for most in (64, 128, 129)] == [0, 0, 264]
    found = [plan_of_call(replace(DECODING, capacity=most), H200) for most in (0, 128, 192)]
    assert [(tiles.num_parts(32), shared) for tiles, shared in found] == [(32, False), (32, False), (32 + 95, True)]


@pytest.mark.parametrize(
    ("capacity", "block_n", "rows", "places", "found"),
    [(128, 64, 1, 512, True), (65, 64, 16, 133, True), (64, 64, 1, 512, False), (129, 64, 1, 512, False),
     (128, 64, 17, 512, False), (128, 64, 1, 132, False), (128, 32, 1, 512, False), (128, 64, 1, 528, True),
     (128, 64, 1, 529, False)],
)  # fmt: skip
def test_programs_look_which_sequences_have_two_blocks_where_that_pays(capacity, block_n, rows, places, found) -> None:
    assert finds_long(capacity, block_n, rows, places, 132) == found


def test_numbers_of_numpy_make_the_plan_that_ints_make() -> None:
    numbers = {"num_heads": 16, "seqlen_q": 2, "max_seqlen_k": 900, "dim_nope": 256, "dim_rope": 64, "cores": 20}
    numpys = {name: np.int64(number) for name, number in numbers.items()}
    lengths = torch.tensor([700, 3], dtype=torch.int32)
    assert plan_decode(lengths, **numpys).tiles == plan_decode(lengths, **numbers).tiles  # type: ignore[arg-type]


def test_lengths_that_cannot_be_make_no_other_grid() -> None:
    for lengths in ([-1, -(2**31), 5], [2**31 - 1] * 3, [2**31 - 1, -5, 0]):
        for options in ({}, {"max_seqlen_k": 8192}, {"num_splits": 5}):
            plan = schedule(lengths, **options)
            bounds = plan.first_part.tolist()
            assert all(before < after for before, after in itertools.pairwise(bounds))
            assert bounds[-1] <= plan.tiles.num_parts(3)


def test_a_number_of_splits_that_is_given_is_that_of_every_sequence_in_every_batch() -> None:
    made = set()
    for (kind, batch, longest), splits in itertools.product(CASES, (1, 4, MOST_SPLITS)):
        for most in (None, 64, 8192):
            plan = schedule(lengths_of(kind, batch, longest), num_splits=splits, max_seqlen_k=most)
            assert plan.first_part.tolist() == [i * splits for i in range(batch + 1)]
            assert plan.tiles.num_parts(batch) == batch * splits
            made.add((splits, plan.tiles))
    assert len(made) == 3


# Balance


BLOCK = part_cost(1, 0) - part_cost(0, 0)


def makespan(
    lengths: Sequence[int], bounds: Sequence[int], order: Sequence[int], tiles: DecodeTiles, rows: int, cores: int,
    snake: bool = True,
) -> float:  # fmt: skip
    """When the last part ends, in blocks: in snake order, or as each core becomes free."""
    cost = [0] * len(order)
    for length, (first, last) in zip(lengths, itertools.pairwise(bounds), strict=True):
        blocks, parts = cdiv(length, tiles.block_n), last - first
        for part in range(parts):
            begin, end = part_range(blocks, part, parts)
            cost[first + part] = part_cost(end - begin, merge_cost(rows) if parts > 1 else 0)
    busy = [0] * cores
    for place, part in enumerate(part for part in order for _ in range(tiles.row_tiles(rows))):
        if snake:
            turn, program = divmod(place, cores)
            busy[program if turn % 2 == 0 else cores - 1 - program] += cost[part]
        else:
            heapq.heapreplace(busy, busy[0] + cost[part])
    return max(busy) / BLOCK


def quality(lengths: Sequence[int], heads: int, seqlen_q: int = 1, cores: int = 132, **options) -> tuple[float, float]:
    """The end of a schedule, and that of the blocks alone, shared without loss."""
    plan = schedule(lengths, heads, seqlen_q, cores, **options)
    rows = heads * seqlen_q
    blocks = sum(cdiv(n, plan.tiles.block_n) for n in lengths) * plan.tiles.row_tiles(rows)
    return makespan(lengths, *[x.tolist() for x in plan[1:]], plan.tiles, rows, cores), blocks / cores


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("batch", [1, 4, 16, 32, 64, 128, 256])
def test_ragged_batches_end_soon_after_the_work_shared_without_loss(batch, heads) -> None:
    for kind in ("uniform", "equal", "one long", "skewed"):
        end, ideal = quality(lengths_of(kind, batch, 8192), heads)
        # A quarter more, and eight blocks: starting, merging and a last block that not all have.
        assert end <= 1.25 * ideal + 8, (kind, end, ideal)


def test_trap_splits_from_the_mean_length_leave_a_long_sequence_to_few() -> None:
    """One of 65,536 among 31 of 64 tokens: the mean is 2,110."""
    lengths = [65536, *[64] * 31]
    end, ideal = quality(lengths, 16)
    by_mean = get_splits(32, 16, 1, sum(lengths) // 32, cores=132)
    worse, _ = quality(lengths, 16, num_splits=by_mean)
    assert end <= 1.25 * ideal + 8
    assert worse > 5 * end


def test_a_plan_made_for_other_lengths_costs_balance_only() -> None:
    lengths, others = lengths_of("uniform", 32, 8192), lengths_of("uniform", 32, 8000)

    def end_by(plan) -> float:
        return makespan(lengths, *[x.tolist() for x in plan[1:]], plan.tiles, 16, 132)

    best, _ = quality(lengths, 16)
    # Lengths of an earlier step, and lengths that have nothing to do with these: the longest may be in one part.
    assert end_by(schedule([max(n - 100, 0) for n in lengths])) <= 1.15 * best
    assert end_by(schedule(others)) <= best + cdiv(max(lengths), 64)


# Blocks


def decode_bytes(tiles: DecodeTiles, width: int) -> int:
    """Queries, the blocks of keys in flight, and weights."""
    return 2 * ((tiles.block_m + tiles.num_stages * tiles.block_n) * width + tiles.block_m * tiles.block_n)


@on_every_device
def test_what_a_tile_holds_fits_in_shared_memory(limits: DeviceLimits) -> None:
    for nope, rope in itertools.product((64, 128, 256, 512), (32, 64, 128)):
        tiles = decode_tiles(64, nope, rope, 8192, limits)
        if limits is not SMALL or nope + rope < 512:
            assert decode_bytes(tiles, nope + rope) <= limits.shared_memory, (nope, rope, tiles)
    for size, size_v in itertools.product((32, 64, 96, 128, 192, 256), (64, 128, 192, 256)):
        plan = plan_prefill(replace(PROMPT, head_dim=size, head_dim_v=size_v), limits)
        held = plan.block_m * max(size, size_v) + plan.num_stages * plan.block_n * (size + size_v)
        assert 2 * held <= limits.shared_memory, (size, size_v, plan)


def test_the_sizes_of_a_model_have_two_blocks_in_flight_on_hopper() -> None:
    assert decode_tiles(16, 512, 64, None, H200) == DecodeTiles(64, 64, 2, 1, 264, True, rows=16)
    # Of more than two tiles of rows products take longest.
    assert decode_tiles(256, 512, 64, None, H200) == DecodeTiles(64, 64, 2, 1, 66, True, early=True, rows=256)
    assert plan_prefill(PROMPT, H200) == PrefillPlan(128, 128, 2)


def test_wide_values_take_fewer_keys_since_a_thread_holds_both() -> None:
    """Accumulators of 64 rows of 192 values and weights of 128 keys would spill, though shared memory would do."""
    narrow, wide = (replace(PROMPT, head_dim=64, head_dim_v=size_v) for size_v in (128, 192))
    assert PrefillPlan(128, 128, 2).shared_memory(wide) <= H200.shared_memory
    assert plan_prefill(narrow, H200) == PrefillPlan(128, 128, 2)
    assert plan_prefill(wide, H200) == PrefillPlan(128, 64, 2)


# Keys of 640 bytes, and heads that have some.
KEYS_OF_HEADS = ((8704, 32), (1000, 32), (100_000, 32), (8704, 2), (0, 32))


def test_programs_share_the_keys_of_tiles_that_are_fewer_than_sms() -> None:
    def parts(heads: int, tokens: int, keys: int, sequences: int = 1) -> int:
        prompt = PrefillProblem(heads, heads, 192, 128, tokens, sequences, tokens, tokens_k=sequences * keys)
        return plan_prefill(prompt, H200).num_splits

    assert [parts(heads, 512, 10_000) for heads in (1, 4, 8, 16, 20, 32, 33)] == [8, 8, 4, 2, 3, 1, 1]
    # Of few blocks of keys merging takes longest.
    assert [parts(16, 512, keys) for keys in (0, 512, 2048, 100_000)] == [1, 1, 2, 2]
    assert [parts(1, 100, keys) for keys in (100, 1536, 100_000)] == [1, 3, 8]
    assert parts(16, 512, 10_000, sequences=9) == 1
    # Bits depend on no bound of lengths, which may be above them.
    prompt = PrefillProblem(16, 16, 192, 128, 512, 1, 512, tokens_k=600)
    assert {plan_prefill(replace(prompt, max_seqlen_q=n, max_seqlen_k=n), H200) for n in (600, 10**6)} == {
        PrefillPlan(128, 128, 2)
    }
    # Where all tiles run at once each slot has a program.
    prompt = PrefillProblem(32, 32, 192, 128, 512, 1, 512, tokens_k=8704)
    plan = PrefillPlan(128, 128, 2)
    assert [plan.num_programs(replace(prompt, num_heads=n), 132) for n in (32, 33, 34)] == [224, 231, 132]
    # Heads of like groups whose keys fit in L2 are taken together.
    of = [plan.heads_at_once(replace(prompt, tokens_k=n, num_heads_kv=h)) for n, h in KEYS_OF_HEADS]
    assert of == [6, 32, 1, 32, 32]
    # Their results are counted in 32 bits.
    many = PrefillProblem(128, 128, 192, 128, 2**14, 1, 2**14)
    assert [PrefillPlan(128, 128, 2, parts).covers(many) for parts in (1, 7, 8)] == [True, True, False]


@on_every_device
def test_the_plan_of_any_call_covers_it(limits: DeviceLimits) -> None:
    for heads, tokens, batch, page in itertools.product(HEADS, (0, 1, 4), (0, 1, 300), (1, 64)):
        problem = DecodeProblem(heads, 512, 64, tokens, batch, 100 * page, page)
        for splits in (None, 1, MOST_SPLITS):
            assert decode_tiles(problem.rows, 512, 64, 8192, limits, splits).covers(problem)
        assert plan_without_schedule(problem, limits).covers(problem)
        prompt = PrefillProblem(heads, heads, 192, 128, tokens * batch, batch, tokens)
        assert plan_prefill(prompt, limits).covers(prompt)


def test_programs_of_the_combine_kernel_run_at_once_and_find_no_more_sequences_than_they_have_threads() -> None:
    for sequences, rows, capacity in itertools.product((1, 3, 64, 300), (1, 16, 128, 512), (2048, 100000)):
        for tiles in (DecodeTiles(64, 64, 2, 1, 264), DecodeTiles(64, 64, 2, 16), DecodeTiles(64, 64, 2, 256)):
            each, pieces = merge_grid(sequences, rows, capacity, tiles, 132)
            assert 1 <= each <= min(sequences, 32)
            assert each == min(sequences, 32) or cdiv(sequences, each) * rows * pieces <= 16 * 132 + rows * pieces
    # Of equal parts a piece for each eight that are begun, whatever the batch.
    for sequences, parts, pieces in ((4, 8, 1), (4, 9, 2), (300, 16, 2), (1, 32, 4)):
        assert merge_grid(sequences, 128, 10**5, DecodeTiles(64, 64, 2, parts), 132)[1] == pieces
    # Programs fill the SMs, which would else have them where they are free first.
    assert merge_grid(1, 64, 65536, DecodeTiles(64, 64, 2, 1, 264), 132) == (1, 16)
    # Where one sequence may have most of the parts, rows are cut though most sequences may have one.
    long = [(64, 100000), (64, 8192), (128, 100000), (128, 8192), (192, 100000)]
    tiles = DecodeTiles(64, 64, 2, 1, 131)
    assert [merge_grid(64, rows, most, tiles, 132)[1] for rows, most in long] == [4, 1, 4, 1, 1]


def test_the_grid_of_prefill_has_a_tile_for_any_lengths() -> None:
    for lengths in ([1] * 50, [128] * 3, [129, 0, 1, 127], [0], [], [1000, 1, 1]):
        problem = replace(PROMPT, tokens=sum(lengths), sequences=len(lengths))
        needed = sum(cdiv(n, 128) for n in lengths) * problem.num_heads
        assert needed <= PrefillPlan(128, 128, 2).num_slots(problem) * problem.num_heads


# Plans that are given


REFUSED = {
    "48 rows": {"block_m": 48}, "no rows": {"block_m": 0}, "48 keys": {"block_n": 48}, "no keys": {"block_n": 0},
    "no stages": {"num_stages": 0}, "9 stages": {"num_stages": 9}, "no splits": {"num_splits": 0},
    "negative splits": {"num_splits": -1}, "too many splits": {"num_splits": MOST_SPLITS + 1},
    "negative spares": {"spare_parts": -1}, "pairs over 16 bits": {"paired": True},
}  # fmt: skip


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_a_plan_that_no_kernel_can_take_covers_nothing(change) -> None:
    good = DecodeTiles(64, 64, 2, 4, 0)
    assert good.covers(DECODING)
    assert not replace(good, **change).covers(DECODING)
    of_prefill = {name: value for name, value in change.items() if name in PrefillPlan.__dataclass_fields__}
    if of_prefill:
        assert PrefillPlan(128, 128, 2).covers(PROMPT)
        assert not replace(PrefillPlan(128, 128, 2), **of_prefill).covers(PROMPT)


def test_programs_of_tiles_side_by_side_share_what_they_widen_where_tiles_are_even() -> None:
    for cache, heads, tokens, paired in (("656", 64, 1, 0), ("656", 128, 1, 1), ("656", 64, 2, 1), ("656", 64, 3, 0)):
        problem = replace(DECODING, num_heads=heads, seqlen_q=tokens, cache=cache)
        tiles = tiles_8bit(problem, DecodeTiles(64, 64, 2), H200)
        assert (tiles.covers(problem), tiles.paired) == (True, paired)
        assert replace(tiles, paired=True).covers(problem) == bool(paired)


@pytest.mark.parametrize("plan", [DecodeTiles(64, 64, 2, 3, 7), PrefillPlan(128, 64, 2)], ids=str)
def test_a_plan_is_a_value_that_survives_the_way_through_an_op(plan) -> None:
    ints = plan.as_ints()
    assert all(type(number) is int for number in ints)
    assert ints == [getattr(plan, field.name) for field in fields(plan)]
    again = type(plan)(*ints)
    assert again == plan
    assert hash(again) == hash(plan)
    assert eval(repr(plan)) == plan
    with pytest.raises(FrozenInstanceError):
        plan.block_m = 1


def test_limits_and_problems_are_values_too() -> None:
    for value in (H200, DECODING, PROMPT):
        with pytest.raises(FrozenInstanceError):
            setattr(value, fields(value)[0].name, 1)


def test_lists_that_count_to_their_ends_have_equal_parts_that_run_at_once_where_these_cost_less_than_shares() -> None:
    def parts(heads: int, lists: int, cache: str = "656") -> int | None:
        problem = DecodeProblem(heads, 512, 64, 1, lists, 2048, 64, cache=cache)
        tiles, shared = plan_of_whole_lists(problem, H200)
        assert tiles.covers(problem)
        if shared:
            assert tiles == plan_without_schedule(problem, H200)
            return None
        assert tiles.spare_parts == 0
        assert tiles.num_splits == 1 or lists * tiles.num_splits * tiles.row_tiles(heads) <= 132
        return tiles.num_splits

    # A record costs more than a key of 16 bits, and so does a block of them beside what merges parts.
    assert [parts(128, 4), parts(128, 4, ""), parts(128, 64), parts(16, 64)] == [11, 8, 1, 2]
    # Two parts are merged by the programs that have them.
    few = ((16, "656", True), (64, "656", True), (64, "", True), (128, "656", False), (128, "", False))
    for heads, cache, joined in few:
        problem = DecodeProblem(heads, 512, 64, 1, 50, 2048, 64, cache=cache)
        tiles = plan_of_whole_lists(problem, H200)[0]
        assert (tiles.num_splits, tiles.joins(problem)) == (1 + joined, joined)
        assert replace(tiles, num_splits=2).joins(problem) == joined
        assert not replace(tiles, num_splits=3).joins(problem)
        assert not replace(tiles, spare_parts=1).joins(problem)
        assert not replace(tiles, num_splits=2, num_stages=1).joins(problem)
    # More lists than SMs, which are whole if they fill nearly all of the last turn.
    assert [parts(128, 256), parts(64, 256), parts(128, 100), parts(64, 140)] == [1, 1, None, None]
    problem = DecodeProblem(16, 512, 64, 1, 3, 0, 64)
    assert plan_of_whole_lists(problem, H200)[0].covers(problem)


@pytest.mark.parametrize("topk", [200, 512, 2048])
def test_few_lists_of_records_have_tiles_of_16_rows_whose_parts_run_at_once(topk) -> None:
    def few(heads: int, lists: int, cache: str = "656", cores: int = 132, counted: bool = False) -> bool:
        problem = DecodeProblem(heads, 512, 64, 1, lists, topk, 64, cache=cache)
        limits = DeviceLimits(cores)
        tiles, shared = plan_of_lists(problem, limits, counted)
        if tiles.block_m != 16 or heads <= 16:
            others = (plan_without_schedule(problem, limits), True) if counted else plan_of_whole_lists(problem, limits)
            assert (tiles, shared) == others
            return False
        assert (tiles, shared) == (tiles_of_few_lists(problem, limits), False)
        assert tiles.covers(problem)
        assert tiles.keys_are_rows(problem)
        # Records are not widened by rows then, and parts are not those of pairs.
        assert tiles_8bit(problem, tiles, limits) == tiles
        assert not tiles.joins(problem)
        programs = tiles.num_programs(problem, False, True, cores)
        assert lists * tiles.num_splits * tiles.row_tiles(heads) == programs <= cores
        assert has_a_part_each(tiles, problem, programs)
        assert tiles.num_splits <= cdiv(topk, 128)
        return True

    assert all(few(heads, lists) for heads, lists in ((64, 1), (64, 4), (32, 8), (40, 2)))
    assert all(few(heads, lists, counted=True) for heads, lists in ((64, 8), (128, 4), (32, 16)))
    assert not any(few(heads, lists, counted=True) for heads, lists in ((64, 9), (128, 5), (32, 17)))
    assert not any([few(64, 40), few(128, 20), few(128, 0), few(64, 4, ""), few(16, 4), few(128, 1, cores=4)])
    # Pairs of tiles are quicker where blocks are many.
    assert few(128, 16) == (topk <= 512)
    assert not few(128, 4) or topk <= 512
