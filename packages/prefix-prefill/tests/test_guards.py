"""Does anything read or write out of place, or leave an element unwritten? The kernels, and where their tiles stand.

Every tensor stands inside a larger buffer of NaN (of noise where it holds integers) that differs from place to place;
pages that no sequence has, the tails of pages and what the outputs held are NaN too. The tests marked `sanitize` hold
every kernel and every branch of the plans, for compute-sanitizer.
"""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kernel_reference.integers import cdiv
from kernel_reference.testing.guards import Grids, assert_bitwise_equal
from kernel_reference.testing.memory import check_far_apart, much_memory
from prefix_prefill import launch
from prefix_prefill.arguments import MergeTensors, PrefillNumbers, PrefillTensors, check_prefill
from prefix_prefill.hopper import launch as launch_hopper
from prefix_prefill.kernels import schedule
from prefix_prefill.merging import launch as launch_merging
from prefix_prefill.plan import DeviceLimits, PrefillPlan, Problem
from prefix_prefill.tiles import heads_per_tile, num_slots, tokens_per_tile

sanitize = pytest.mark.sanitize
gpu = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def portable(block_m: int = 16, block_n: int = 16, num_splits: int = 1, num_stages: int = 1) -> PrefillPlan:
    return PrefillPlan(block_m, block_n, num_splits, 4, num_stages)


def hopper(block_m: int = 128, block_n: int = 128, num_splits: int = 1) -> PrefillPlan:
    return PrefillPlan(block_m, block_n, num_splits, 4, 2, hopper=True)


def on_hopper_or_skip(plan: PrefillPlan, device: torch.device) -> None:
    if plan.hopper and (device.type != "cuda" or not launch.device_limits(torch.device("cuda", 0)).hopper):
        pytest.skip("needs an sm_90 GPU and a Triton that brings Gluon")


# Every kernel and every branch: rows, keys, splits; where new tokens are; each kind of scale and of score.
SMALL: dict[str, tuple[PrefillPlan, dict[str, Any]]] = {
    "new keys": (portable(), {}),
    "cached, split": (portable(num_splits=3), {"cached": True, "sinks": True}),
    "a window, 32 x 32": (portable(32, 32), {"window": (5, -1), "dtype": FP16, "page_layout": "HND"}),
    "64 x 64, x-packed": (portable(64, 64, 1, 2), {"page_layout": "x-packed", "softcap": 3.0, "page": 24}),
    "float32": (portable(16, 32), {"dtype": FP32, "alibi": True, "window": (9, 3), "causal": False, "page": 1}),
    "8 bits, of tokens": (portable(), {"cache_dtype": E4M3, "k_scale": "tokens", "v_scale": "tokens"}),
    "8 bits, of heads": (portable(), {"cache_dtype": E5M2, "k_scale": "heads", "v_scale": "heads", "out_scale": 1.0}),
    "leaving decoding rows, split": (portable(num_splits=2), {"skip_decode": True, "fused": True}),
}  # fmt: skip


@pytest.mark.parametrize("num_splits", [1, 2])
def test_what_is_made_ready_keeps_no_tensor_of_its_first_call_alive(tensors, num_splits) -> None:
    """It is kept for as long as the process lives, and a call's tensors may be gigabytes."""

    def call() -> tuple[Callable[..., None], list[weakref.ref[torch.Tensor]]]:
        batch = tensors.batch([(5, 3), (1, 20)], heads=(2, 1), head_dim=16)
        problem = check_prefill(batch.tensors, batch.numbers())
        run = launch.prepare_prefill(problem, portable(num_splits=num_splits), batch.tensors)
        run(*batch.tensors)
        return run, [weakref.ref(tensor) for tensor in batch.tensors if tensor is not None]

    run, remembered = call()
    gc.collect()
    assert len(remembered) >= 10
    assert [alive() for alive in remembered if alive() is not None] == []
    del run


@sanitize
@pytest.mark.parametrize(("plan", "options"), SMALL.values(), ids=SMALL)
def test_calls_touch_their_rows_and_nothing_else(tensors, kernels, plan, options) -> None:
    options = {"heads": (2, 1), "head_dim": 24, "rows_after": 3, **options}
    batch = tensors.batch([(19, 6), (0, 0), (16, 1), (0, 2)], **options)
    kernels.prefill(batch, plan)
    batch.check()


@sanitize
def test_merging_touches_its_results_and_nothing_else(tensors, kernels) -> None:
    for dtype, size in ((BF16, 20), (FP32, 16)):
        parts = [tensors.normal(17, 2, size, dtype=dtype), tensors.normal(2, 17)]
        places = [tensors.guarded(part, row_padding=3, offset=1) for part in parts * 2]
        kernels.merge(*(place.tensor for place in places))
        for place, part in zip(places, parts * 2, strict=True):
            place.check(written=False)
            assert_bitwise_equal(place.tensor, part)


@sanitize
@gpu
@pytest.mark.parametrize("options", [
    {}, {"cached": True, "page": 64}, {"window": (70, -1), "sinks": True},
    {"page_layout": "HND", "page": 544, "softcap": 3.0}, {"alibi": True, "cached": True, "skip_decode": True},
    {"dtype": FP16, "out_scale": 0.1, "causal": False},
    {"cache_dtype": E4M3, "k_scale": "heads", "v_scale": "tensor"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("turn", range(3))
def test_calls_on_hopper_touch_their_rows_and_nothing_else(tensors, kernels, options, turn) -> None:
    plan = (hopper(), hopper(64, 128, 3), hopper(128, 64))[turn]
    on_hopper_or_skip(plan, tensors.device)
    eight = "cache_dtype" in options
    if eight:
        plan = PrefillPlan(plan.block_m, 64, plan.num_splits, 4, 3, hopper=True)
    head_dim = (128, 80, 128 if eight else 256)[turn]
    lengths = [(190, 37), (0, 0), (16, 1), (0, 2), (5, 70)]
    batch = tensors.batch(lengths, heads=(8, 2), head_dim=head_dim, rows_after=40, **options)
    kernels.prefill(batch, plan)
    batch.check()


# What must not be touched, or must be zero


EVERY_WALK = {
    "one pass": portable(), "split": portable(num_splits=2),
    "on Hopper": hopper(), "on Hopper, 64 rows, split": hopper(64, 128, 3),
}  # fmt: skip
every_kernel = pytest.mark.parametrize(
    "plan", [pytest.param(p, id=name, marks=[gpu] if p.hopper else []) for name, p in EVERY_WALK.items()]
)
# Such as every kernel takes.
SHAPE = {"heads": (2, 1), "head_dim": 16}


@sanitize
@every_kernel
def test_rows_of_padding_are_zero_and_those_of_decoding_left_where_that_is_asked_for(tensors, kernels, plan) -> None:
    on_hopper_or_skip(plan, tensors.device)
    lengths = [(20, 1), (0, 1), (9, 3), (0, 0), (40, 1)]
    for cached in (False, True):
        batch = tensors.batch(lengths, skip_decode=True, rows_after=20, sinks=True, cached=cached, **SHAPE)
        kernels.prefill(batch, plan)
        batch.check()
        assert int(batch.untouched.sum()) == 3


IMPOSSIBLE = [-1, 0, 2, 2**31 - 1, -(2**31)]


@sanitize
@every_kernel
@pytest.mark.parametrize("cached", [False, True], ids=["new keys", "cached"])
def test_rows_of_impossible_lengths_are_zero(tensors, kernels, plan, cached) -> None:
    """Fewer tokens than are new, or more than a row of the table has room for; the neighbours are as ever."""
    on_hopper_or_skip(plan, tensors.device)
    lengths = [(7, 3)] * 5 + [(20, 5)]
    batch = tensors.batch(lengths, cached=cached, sinks=True, window=(6, -1), index_dtype=torch.int64, **SHAPE)
    capacity = batch.block_table.shape[1] * batch.page
    wrong = [*IMPOSSIBLE[:3], capacity + 1 + (0 if cached else 3), 2**40]
    batch.seqlens_k[:5] = torch.tensor(wrong, device=batch.seqlens_k.device)
    batch.forget_inputs()
    assert batch.possible == [5]
    kernels.prefill(batch, plan)
    batch.check()
    assert bool((batch.lse.tensor[:, :15] == -torch.inf).all())


@sanitize
@every_kernel
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_past_the_pool_and_below_it_read_as_zeros(tensors, kernels, plan, layout) -> None:
    on_hopper_or_skip(plan, tensors.device)
    options = {**SHAPE, "index_dtype": torch.int64} if not plan.hopper else SHAPE
    ends = torch.iinfo(options.get("index_dtype", torch.int32))
    batch = tensors.batch([(100, 3)], page_layout=layout, **options)
    blocks = batch.k_cache.shape[0]
    wrong = torch.tensor([blocks, -1, ends.max, ends.min], device=batch.block_table.device)
    batch.block_table[0, 1:5] = wrong
    for held in (batch.keys, batch.values):
        held[16:80] = 0
    batch.forget_inputs()
    kernels.prefill(batch, plan)
    batch.check()


@sanitize
@every_kernel
@pytest.mark.parametrize(
    ("cu", "rows"),
    [([0, 40, 2**31 - 1], 45), ([0, 45, 90, 200], 45), ([-7, 30, 45], 45), ([-9, -5, -1], 20), ([25, 40, 45], 60)],
    ids=["past the end", "all past the end", "before the beginning", "all before the beginning", "from later on"],
)
def test_impossible_bounds_are_clamped_and_the_rows_of_none_are_zero(tensors, kernels, cu, rows, plan) -> None:
    on_hopper_or_skip(plan, tensors.device)
    clamped = [min(max(bound, 0), rows) for bound in cu]
    new = [max(end - begin, 0) for begin, end in itertools.pairwise(clamped)]
    batch = tensors.batch([(18, n) for n in new], rows_after=rows - sum(new), cached=True, **SHAPE)
    batch.cu_seqlens_q.copy_(torch.tensor(cu))
    if before := clamped[0]:
        # The rows of the sequences stand behind rows of none.
        batch.q.copy_(batch.q.roll(before, 0))
        batch.begins = [begin + before for begin in batch.begins]
    batch.forget_inputs()
    kernels.prefill(batch, plan)
    got = batch.out.tensor
    none = torch.ones(rows, dtype=torch.bool, device=got.device)
    for begin, end in itertools.pairwise(batch.begins):
        none[begin:end] = False
    assert not got[none].any()
    assert bool((batch.lse.tensor[:, none] == -torch.inf).all())
    assert bool(got.isfinite().all())
    batch.check_guards()
    if not before:
        batch.check_out(got, batch.lse.tensor)


@sanitize
@every_kernel
@pytest.mark.parametrize("cached", [False, True], ids=["new keys", "cached"])
@pytest.mark.parametrize("cu", [[0, 50, 10, 60], [60, 0, 35, 7], [0, 2**31 - 1, -(2**31), 60]], ids=str)
def test_falling_bounds_touch_nothing_outside(tensors, kernels, cu, plan, cached) -> None:
    on_hopper_or_skip(plan, tensors.device)
    batch = tensors.batch([(18, 60), (30, 0), (5, 0)], cached=cached, **SHAPE)
    batch.cu_seqlens_q.copy_(torch.tensor(cu))
    # Sequences that are longer than they were read on in their pages: what they find there shall be numbers.
    for cache in (batch.k_cache, batch.v_cache):
        cache.nan_to_num_()
    batch.forget_inputs()
    kernels.prefill(batch, plan)
    for place in (batch.out, batch.lse):
        place.check(written=False)
    if plan.num_splits == 1:
        # Which of two sequences a row belongs to is open, and with splits, whether it has parts.
        batch.check_guards(all_written=False)


# Offsets past 2^31 elements


FAR = {
    "one pass": portable(), "split": portable(num_splits=2), "on Hopper": hopper(64, 64),
    "on Hopper, split": hopper(64, 64, 2),
}  # fmt: skip
far_kernels = pytest.mark.parametrize(
    "plan", [pytest.param(p, id=name, marks=[gpu] if p.hopper else []) for name, p in FAR.items()]
)
# The tensors of a call that have dimensions to be far apart: q, k, v, the caches, scales, out and lse.
Q, K, V, K_CACHE, V_CACHE, TABLE, K_SCALE, V_SCALE, OUT, LSE = 0, 1, 2, 3, 4, 5, 10, 11, 13, 14


def far_calls(tensors, plan: PrefillPlan, **options: Any) -> tuple[Callable[..., tuple[()]], list[Any]]:
    """Three sequences, three kv heads, some pages; the tensors of a call, and the call.

    Three or more of each, so that strides fit in 32 bits and products of them do not.
    """
    # The interpreter's loops count in Python's numbers, which meet a stride as 32 bits: there sequences are short.
    batch = tensors.batch([(18, 2), (0, 2), (3, 1)], heads=(6, 3), head_dim=16, page=16, **options)

    def call(*given: Any) -> tuple[()]:
        batch.attend(given, plan)
        return ()

    return call, [None if tensor is None else tensor.clone() for tensor in batch.tensors]


@far_kernels
@pytest.mark.parametrize("dims", [
    {Q: 0, K: 0, V: 0, OUT: 0, LSE: 1}, {Q: 1, K: 1, V: 1, OUT: 1, LSE: 0}, {Q: 2, OUT: 2},
    {K_CACHE: 0, V_CACHE: 0, TABLE: 0}, {K_CACHE: 1, V_CACHE: 1}, {K_CACHE: 2, V_CACHE: 2}, {K_SCALE: 0, V_SCALE: 0},
], ids=["rows", "heads", "elements", "pages", "tokens of pages", "heads of pages", "scales of heads"])  # fmt: skip
def test_kernels_follow_dimensions_more_than_2_to_the_31_elements_apart(tensors, plan, dims) -> None:
    on_hopper_or_skip(plan, tensors.device)
    options = {"cache_dtype": E4M3, "k_scale": "heads", "v_scale": "heads"} if K_SCALE in dims else {}
    if plan.num_splits > 1 and tensors.device.type == "cpu":
        # Parts are read and written as they are; only the results' addresses are made anew.
        dims = {place: dim for place, dim in dims.items() if place in (OUT, LSE)}
        if not dims:
            pytest.skip("as in one pass")
    check_far_apart(*far_calls(tensors, plan, **options), dims)


@pytest.mark.parametrize(
    ("layout", "dims"),
    [("NHD", {Q: 2, OUT: 2, K: 2, V: 2, K_CACHE: 3, V_CACHE: 3}), ("x-packed", {K_CACHE: 2, V_CACHE: 2})],
)  # fmt: skip
def test_kernels_follow_elements_whose_last_is_more_than_2_to_the_31_elements_off(tensors, layout, dims) -> None:
    if layout == "x-packed":
        check_far_apart(*far_calls(tensors, portable(), page_layout=layout), {**dims, K_CACHE: 4})
    check_far_apart(*far_calls(tensors, portable(), page_layout=layout), dims)


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["pages", "tokens", "heads"])
def test_kernels_follow_scales_more_than_2_to_the_31_elements_apart(tensors, dim) -> None:
    # Four bytes each: 16 GiB of addresses.
    options = {"cache_dtype": E4M3, "k_scale": "tokens", "v_scale": "tokens"}
    check_far_apart(*far_calls(tensors, portable(), **options), {K_SCALE: dim, V_SCALE: dim})


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_merging_follows_dimensions_more_than_2_to_the_31_elements_apart(tensors, dim) -> None:
    dims = {0: dim, 2: dim, 4: dim} | ({} if dim == 2 else {1: dim, 3: dim, 5: dim})
    parts = [tensors.normal(3, 3, 16), tensors.normal(3, 3)] * 2
    results = [torch.zeros_like(part) for part in parts[:2]]

    def merge(*given: torch.Tensor) -> tuple[()]:
        launch.prepare_merge(MergeTensors(*given))(*given)
        return ()

    check_far_apart(merge, [*parts, *results], dims)


def last_rows(plan: PrefillPlan, batch: Any, **changed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A call of a batch of two sequences with some tensors changed: the results of the last sequence's rows."""
    places = {"q": Q, "k_cache": K_CACHE, "v_cache": V_CACHE, "table": TABLE, "cu": 6, "seqlens": 7}
    given = list(batch.tensors)
    for name, tensor in changed.items():
        given[places[name]] = tensor
    rows = given[Q].shape[0]
    given[OUT], given[LSE] = torch.empty_like(given[Q]), given[Q].new_empty(given[Q].shape[1], rows, dtype=FP32)
    batch.attend(given, plan)
    new = batch.lengths[-1][1]
    return given[OUT][-new:].clone(), given[LSE][:, -new:].clone()


@gpu
@pytest.mark.parametrize("plan", [portable(64, 64), portable(64, 64, 2), hopper(), hopper(64, 128, 2)], ids=str)
@much_memory()
def test_packed_queries_and_caches_of_more_than_2_to_the_31_elements_are_read_to_their_ends(tensors, plan) -> None:
    on_hopper_or_skip(plan, tensors.device)
    batch = tensors.batch([(0, 100), (300, 100)], heads=(64, 8), head_dim=128, cached=True)
    wanted = last_rows(plan, batch)
    rows = 2**31 // (64 * 128) + 300
    q = torch.zeros(rows, 64, 128, dtype=BF16, device=batch.q.device)
    q[-100:] = batch.q[-100:]
    # All but the last rows belong to a sequence that cannot be.
    cu, seqlens = batch.cu_seqlens_q.clone(), batch.seqlens_k.clone()
    cu[1:], seqlens[0] = torch.tensor([rows - 100, rows]), 0
    if plan.num_splits == 1:
        got = last_rows(plan, batch, q=q, cu=cu, seqlens=seqlens)
        for one, other in zip(got, wanted, strict=True):
            assert_bitwise_equal(one, other, what="the last of many rows")
    del q
    before = 2**31 // batch.k_cache[0].numel() + 5
    pools = []
    for cache in (batch.k_cache, batch.v_cache):
        pool = torch.zeros(before + cache.shape[0], *cache.shape[1:], dtype=cache.dtype, device=cache.device)
        pool[before:] = cache
        pools.append(pool)
    got = last_rows(plan, batch, k_cache=pools[0], v_cache=pools[1], table=(batch.block_table + before).contiguous())
    for one, other in zip(got, wanted, strict=True):
        assert_bitwise_equal(one, other, what="with the last of many pages")


# Grids


@pytest.fixture
def grids(monkeypatch) -> Grids:
    return Grids(monkeypatch, DeviceLimits(132, 232448, hopper=True), launch, launch_hopper, launch_merging)


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def prepare(rows: int, sequences: int, plan: PrefillPlan | None, heads: tuple[int, int] = (8, 2)) -> None:
    """Make a call ready, of tensors that have no memory, and call it."""
    q, cache = meta(rows, heads[0], 128), meta(50, 16, heads[1], 128)
    table, cu, seqlens = (meta(*n, dtype=torch.int32) for n in ((sequences, 9), (sequences + 1,), (sequences,)))
    lse = meta(heads[0], rows, dtype=FP32)
    given = PrefillTensors(q, None, None, cache, cache, table, cu, seqlens, None, None, None, None, None, q, lse)
    numbers = PrefillNumbers(rows, "NHD", 0.1, -1, 0, 0.0, False, 1.0, 1.0, 1.0, 0)
    launch.prepare_prefill(check_prefill(given, numbers), plan, given)(*given)


MANY = 70_000


@pytest.mark.parametrize("plan", [portable(), portable(64, 64, 3), hopper(), hopper(64, 64, 2), None], ids=str)
def test_grids_of_many_sequences_and_rows_have_one_dimension(grids, plan) -> None:
    for rows, sequences in ((MANY, MANY), (2**21, 3), (1, 1), (2**20, MANY)):
        prepare(rows, sequences, plan)
    part, lse = meta(2**21, 8, 128), meta(8, 2**21, dtype=FP32)
    launch.prepare_merge(MergeTensors(part, lse, part, lse, part, lse))
    assert len(grids.grids) > 4
    for name, (size, *others) in grids.grids:
        assert 0 < size < 2**31, name
        assert others == [1, 1], name


def test_no_rows_launch_nothing(grids) -> None:
    for sequences in (0, 3):
        prepare(0, sequences, portable())
    part, lse = meta(0, 2, 16), meta(2, 0, dtype=FP32)
    launch.prepare_merge(MergeTensors(part, lse, part, lse, part, lse))
    assert not grids.grids


def test_a_portable_launch_has_a_slot_for_every_tile_kv_head_and_split_and_no_more_than_two_to_spare(
    grids,
) -> None:
    """The grid does not grow with the longest sequence: tiles past a sequence's end would load its prefix in vain."""
    for rows, sequences, splits in ((1, 1, 1), (2079, 32, 1), (2079, 32, 3), (32, 32, 7)):
        plan = portable(16, 16, splits)
        prepare(rows, sequences, plan)
        place = next(grid for name, grid in reversed(grids.grids) if name == "attend")
        assert place[0] == (rows // (plan.block_m // 4) + sequences + 2) * 2 * splits


def test_a_launch_for_sm_90_has_no_more_programs_than_pieces_of_tiles_or_than_its_plan_says(grids) -> None:
    """Nor does it grow with the longest sequence, or with the width of the block table."""
    for rows, sequences, splits in ((1, 1, 1), (2079, 32, 1), (2079, 32, 3), (32, 32, 7), (32, 32, 0)):
        plan = hopper(128, 128, splits)
        prepare(rows, sequences, plan)
        place = next(grid for name, grid in reversed(grids.grids) if name == "attend")
        pieces = (rows // (plan.block_m // 4) + min(sequences + 2, rows)) * 2 * splits
        assert place[0] == (min(pieces, plan.programs) if splits else plan.programs)


# Where tiles stand, and which keys they take: the arithmetic of kernels/schedule.py, in Python and on the device


def located(cu: Sequence[int], rows: int, tokens: int, slot: int) -> tuple[int, int, int, int]:
    """schedule.find_tile: sequence, tile, first row and number of rows; sequences -1 and B are the rows of none."""
    count = len(cu) - 1

    def row_at(i: int) -> int:
        return 0 if i < 0 else rows if i > count else min(max(cu[i], 0), rows)

    def first_slot(i: int) -> int:
        return row_at(i) // tokens + i + 1

    sequence, above = -1, count + 1
    while above - sequence > 1:
        middle = (sequence + above) // 2
        if first_slot(middle) <= slot:
            sequence = middle
        else:
            above = middle
    begin = row_at(sequence)
    end = max(row_at(sequence + 1), begin)
    i_own = slot - first_slot(sequence)
    i_tile = cdiv(end - begin, tokens) - 1 - i_own
    here = i_tile >= 0 and i_own >= 0
    return sequence, max(i_tile, 0), begin, end - begin if here else 0


def slots_of(rows: int, sequences: int, tokens: int) -> int:
    return num_slots(Problem(1, 1, 16, 16, rows, sequences, rows, 16), tokens)


def check_slots(cu: Sequence[int], rows: int, tokens: int) -> None:
    """Every row of every sequence, and every row of none, has one slot."""
    count = len(cu) - 1
    owner: dict[int, int] = {}
    for slot in range(slots_of(rows, count, tokens)):
        sequence, i_tile, begin, length = located(cu, rows, tokens, slot)
        for row in range(begin + i_tile * tokens, min(begin + (i_tile + 1) * tokens, begin + length)):
            assert row not in owner, (cu, rows, tokens, row)
            owner[row] = sequence
    wanted = {row: i for i in range(count) for row in range(cu[i], cu[i + 1])}
    wanted |= dict.fromkeys(range(cu[0]), -1) | dict.fromkeys(range(cu[count], rows), count)
    assert owner == wanted, (cu, rows, tokens)


def random_bounds(rng: random.Random) -> tuple[list[int], int]:
    lengths = [rng.choice([0, 0, 1, 15, 16, 17, 31, 32, 33, rng.randint(0, 200)]) for _ in range(rng.randint(0, 9))]
    first = rng.choice([0, 0, 0, 5, 40])
    return [first, *itertools.accumulate(lengths, initial=first)][1:], first + sum(lengths) + rng.choice([0, 0, 1, 40])


def impossible_bounds(rng: random.Random) -> tuple[list[int], int]:
    rows = rng.randint(1, 100)
    numbers = [-(2**31), -5, 0, rows, rows + 1, 2**31 - 1]
    return [rng.choice([*numbers, rng.randint(0, 100)]) for _ in range(rng.randint(1, 7))], rows


def test_every_row_of_all_small_batches_has_one_slot() -> None:
    for rows, tokens, count in itertools.product(range(8), (1, 2, 3), range(4)):
        for bounds in itertools.combinations_with_replacement(range(rows + 1), count + 1):
            check_slots(bounds, rows, tokens)


def test_every_row_of_random_batches_has_one_slot() -> None:
    rng = random.Random(0)
    for _ in range(200):
        cu, rows = random_bounds(rng)
        for tokens in (1, 4, 18, 64):
            check_slots(cu, rows, tokens)


def test_slots_of_impossible_bounds_stay_within_the_rows() -> None:
    rng = random.Random(1)
    for _ in range(1000):
        cu, rows = impossible_bounds(rng)
        for slot in range(slots_of(rows, len(cu) - 1, 16)):
            sequence, i_tile, begin, length = located(cu, rows, 16, slot)
            assert -1 <= sequence <= len(cu) - 1
            assert 0 <= begin <= begin + length <= rows
            assert length == 0 or i_tile * 16 < length


@triton.jit
def tabulate_slots(p_cu, p_table, num_sequences, rows, TOKENS: tl.constexpr):
    i_slot = tl.program_id(0)
    i_n, i_tile, begin, q_len = schedule.find_tile(p_cu, i_slot, num_sequences, rows, TOKENS)
    tl.store(p_table + i_slot * 4, i_n)
    tl.store(p_table + i_slot * 4 + 1, i_tile)
    tl.store(p_table + i_slot * 4 + 2, begin)
    tl.store(p_table + i_slot * 4 + 3, q_len)


def all_bounds() -> Iterator[tuple[list[int], int]]:
    rng = random.Random(2)
    for _ in range(5):
        yield random_bounds(rng)
        yield impossible_bounds(rng)
    yield [0, 0, 0, 0], 3
    yield [0], 33


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_the_device_finds_the_slots_that_python_does(device: torch.device, dtype: torch.dtype) -> None:
    for cu, rows in all_bounds():
        for tokens in (5, 32):
            places = slots_of(rows, len(cu) - 1, tokens)
            table = torch.full((places, 4), -9, dtype=torch.int64, device=device)
            bounds = torch.tensor(cu, dtype=dtype, device=device)
            tabulate_slots[(places,)](bounds, table, len(cu) - 1, rows, TOKENS=tokens)
            for slot, found in enumerate(table.tolist()):
                wanted = list(located(cu, rows, tokens, slot))
                # Of a place without rows it matters only that it has none.
                assert found[3] == wanted[3], (cu, rows, tokens, slot)
                assert found == wanted or not wanted[3], (cu, rows, tokens, slot)


@triton.jit
def tabulate_keys(
    p_table, context, length, q_len, left, right, count, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    i_tile = tl.program_id(0)
    low, high = schedule.key_range(context, length, i_tile, q_len, left, right, TOKENS, HAS_LEFT, HAS_RIGHT)
    tl.store(p_table + i_tile * (2 + 2 * SPLITS), low)
    tl.store(p_table + i_tile * (2 + 2 * SPLITS) + 1, high)
    for i_split in range(SPLITS):
        first, last = schedule.split_range((high + BLOCK_N - 1) // BLOCK_N - low // BLOCK_N, i_split, SPLITS)
        tl.store(p_table + i_tile * (2 + 2 * SPLITS) + 2 + 2 * i_split, first)
        tl.store(p_table + i_tile * (2 + 2 * SPLITS) + 3 + 2 * i_split, last)


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_a_tile_takes_the_keys_that_its_rows_see_and_each_split_its_share(device: torch.device, splits: int) -> None:
    """A window bounds the main loop whatever the context: it would be 8 times too long at 32k."""
    tokens, block_n, most = 8, 16, 2**31 - 1
    for context, q_len, (left, right) in itertools.product(
        (0, 5, 100_000), (1, 8, 21), ((-1, -1), (-1, 0), (0, 0), (20, 0), (most, 0), (9, 4), (3, -1), (-1, most))
    ):
        count, length = cdiv(q_len, tokens), context + q_len
        table = torch.full((count, 2 + 2 * splits), -9, dtype=torch.int64, device=device)
        tabulate_keys[(count,)](
            table, context, length, q_len, left, right, count, TOKENS=tokens, BLOCK_N=block_n, SPLITS=splits,
            HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0,
        )  # fmt: skip
        for i_tile, (low, high, *shares) in enumerate(table.tolist()):
            first, last = context + i_tile * tokens, context + min((i_tile + 1) * tokens, q_len) - 1
            assert low == (max(first - left, 0) if left >= 0 else 0)
            assert high == (min(last + right + 1, length) if right >= 0 else length)
            taken = [tile for begin, end in zip(shares[::2], shares[1::2], strict=True) for tile in range(begin, end)]
            assert taken == [*range(cdiv(high, block_n) - low // block_n)], (context, q_len, left, right)


def test_tiles_are_as_full_as_heads_allow() -> None:
    for group, block_m in itertools.product((1, 3, 4, 7, 8, 16, 100), (16, 64, 128)):
        assert tokens_per_tile(group, block_m) == max(1, block_m // group)
        assert heads_per_tile(group, block_m) == min(group, block_m)
