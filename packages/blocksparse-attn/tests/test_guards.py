"""Does anything read or write out of bounds, or leave an element unwritten? The kernels, and where their tiles are.

Every tensor is inside a larger buffer of NaN (of noise for integers) that differs from element to element; pages of no
sequence, the tails of pages and the outputs before the call are NaN too. The tests marked `sanitize` cover every kernel
and every branch of the plans, for compute-sanitizer.
"""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from blocksparse_attn import AttentionPlan, BlockLayout, blocksparse_attention, launch
from blocksparse_attn.arguments import Options, Tensors, check_attend
from blocksparse_attn.kernels import groups, portable, tiles
from blocksparse_attn.plan import DeviceLimits, Problem, num_slots
from kernel_reference import blocks
from kernel_reference.integers import cdiv
from kernel_reference.testing import contract
from kernel_reference.testing.guards import Grids, assert_bitwise_equal, poison_
from kernel_reference.testing.memory import check_far_apart, much_memory

sanitize = pytest.mark.sanitize
gpu = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS = ("ragged", "paged", "padded")
X_PACKED = {"kind": "paged", "page_layout": "x-packed"}
FAR_OFF = (torch.iinfo(torch.int64).min, -1, 2**40, torch.iinfo(torch.int64).max)


def lists(block_m: int = 16, block_n: int = 16, num_splits: int = 1, num_stages: int = 1) -> AttentionPlan:
    return AttentionPlan(block_m, block_n, num_splits, 4, num_stages)


def packed(
    block_m: int = 16, block_n: int = 16, num_splits: int = 1, num_stages: int = 1, tokens: int = 1
) -> AttentionPlan:
    return AttentionPlan(block_m, block_n, num_splits, 4, num_stages, packed=tokens)


def hopper(block_n: int = 128, num_splits: int = 1) -> AttentionPlan:
    return AttentionPlan(128, block_n, num_splits, 4, 2, hopper=True)


EVERY_WALK = {
    "lists": lists(), "lists, split": lists(num_splits=2), "packed": packed(tokens=8),
    "packed, split": packed(num_splits=2, tokens=5), "on Hopper": hopper(), "on Hopper, narrow, split": hopper(64, 3),
}  # fmt: skip


def walks(*names: str) -> pytest.MarkDecorator:
    """Each of these plans; those for Hopper on a GPU alone."""
    chosen = [(name, EVERY_WALK[name]) for name in names or EVERY_WALK]
    return pytest.mark.parametrize(
        "plan", [pytest.param(plan, id=name, marks=[gpu] if plan.hopper else []) for name, plan in chosen]
    )


every_walk = walks()
one_pass = walks("lists", "packed", "on Hopper")


def on_hopper_or_skip(plan: AttentionPlan, device: torch.device) -> None:
    if plan.hopper and (device.type != "cuda" or not launch.device_limits(torch.device("cuda", 0)).hopper):
        pytest.skip("needs an sm_90 GPU and a Triton that brings Gluon")


def batch_for(plan: AttentionPlan, tensors: Any, lengths: Sequence[tuple[int, int]], **options: Any) -> Any:
    """A batch of two query heads that the plan's kernel takes."""
    on_hopper_or_skip(plan, tensors.device)
    sizes = {"heads": (2, 1), "head_dim": 16, "blocks": (64, 64) if plan.hopper else (16, 16)}
    return tensors.batch(lengths, **{**sizes, **options})


def attend(batch: Any, plan: AttentionPlan | None, most: int | None = None, layout: BlockLayout | None = None) -> None:
    """Into the batch's guarded output as it was at first, with another max_seqlen_q or layout."""
    for place, before in zip((batch.out, batch.lse), batch._before, strict=True):
        if place is not None:
            place.tensor.copy_(before)
    given, numbers = list(batch.tensors), list(batch.numbers())
    if most is not None:
        numbers[0] = most
    if layout is not None:
        given[CROW], given[COL] = layout.crow, layout.col
    batch.prepare(plan, given, numbers)(*given)


# The positions of tensors in a call.
Q, K, V, CROW, COL, CU_Q, CU_K, TABLE, SEQLENS_K, Q_STARTS, Q_ENDS, K_STARTS, K_ENDS, SINKS, OUT, LSE = range(16)


# What is read and written


# Every kernel and every branch: rows, keys, splits; where keys are; each kind of score.
SMALL: dict[str, tuple[AttentionPlan, dict[str, Any]]] = {
    "lists": (lists(), {}),
    "lists, paged, split": (lists(num_splits=3), {"kind": "paged", "sinks": True}),
    "lists, padded": (lists(), {"kind": "padded", "side": "both", "softcap": 3.0}),
    "lists, a window, 32 x 32": (lists(32, 32), {"window": (5, -1), "dtype": FP16, "blocks": (32, 64)}),
    "lists, x-packed": (lists(16, 16, 1, 2), {**X_PACKED, "head_dim_v": 40}),
    "lists, float32": (lists(16, 32, 2), {"dtype": FP32, "blocks": (48, 96), "head_dim_v": 40}),
    "packed, one token": (packed(), {"window": (9, -1)}),
    "packed, some tokens": (packed(tokens=3), {"window": (9, -1), "softcap": 3.0}),
    "packed, paged, split": (
        packed(16, 16, 3, 1, 8), {"kind": "paged", "sinks": True, "page_layout": "HND", "page": 24},
    ),
    "packed, padded, split": (packed(16, 16, 2, 1, 8), {"kind": "padded", "side": "right"}),
    "packed, 32 x 32": (packed(32, 32, 1, 1, 16), {"dtype": FP16, "blocks": (16, 64), "one_layout": True}),
    "packed, more heads than rows": (packed(16, 16, 1, 3), {"heads": (20, 1), "softcap": 3.0}),
    "packed, x-packed, float32": (packed(16, 16, 1, 1, 8), {**X_PACKED, "dtype": FP32}),
}  # fmt: skip


@sanitize
@pytest.mark.parametrize(("plan", "options"), SMALL.values(), ids=SMALL)
def test_calls_touch_their_rows_and_nothing_else(tensors, kernels, plan, options) -> None:
    options = {"heads": (2, 1), "head_dim": 24, **options}
    if options.get("page_layout") == "x-packed":
        options["head_dim"] = 16
    if options.get("kind") != "padded":
        options["rows_after"] = 3
    batch = tensors.batch([(19, 6), (0, 0), (16, 1)], **options)
    kernels.attend(batch, plan)
    batch.check()


@sanitize
@gpu
@pytest.mark.parametrize("options", [
    {}, {"kind": "paged", "page": 64, "sinks": True}, {"kind": "paged", "page": 48, "page_layout": "HND"},
    {"kind": "padded", "side": "both", "softcap": 3.0}, {"dtype": FP16, "blocks": (64, 128)},
    {"blocks": (128, 64), "kind": "paged", "page": 16, "head_dim_v": 64}, {"one_layout": True, "softmax_scale": 0.0},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("turn", range(3))
def test_calls_on_hopper_touch_their_rows_and_nothing_else(tensors, kernels, options, turn) -> None:
    plan = (hopper(), hopper(128, 3), hopper(64))[turn]
    on_hopper_or_skip(plan, tensors.device)
    given = {"heads": (8, 2), "blocks": (64, 64), "head_dim": (128, 80, 256)[turn], **options}
    if given.get("kind") != "padded":
        given["rows_after"] = 40
    batch = tensors.batch([(190, 37), (0, 0), (16, 1), (0, 2), (5, 300)], **given)
    kernels.attend(batch, plan)
    batch.check()


# What device memory may hold


@sanitize
@every_walk
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_impossible_keys_are_zero_and_leave_others_alone(tensors, kernels, plan, kind) -> None:
    """Bounds that fall, are negative, far off or past the end; fewer keys than queries."""
    far = plan.num_splits > 1
    # In a padded batch the rows before and after each sequence have programs too.
    heads = (1, 1) if kind == "padded" else (2, 1)
    # A layout with rows for more keys than the cache has slots for.
    mask = torch.ones(heads[0], 4, 4, dtype=torch.bool)
    options = {"kind": kind, "side": "both", "index_dtype": torch.int64, "sinks": far, "heads": heads, "mask": mask}
    batch = batch_for(plan, tensors, [(7, 3)] * 4 + [(20, 5)], **options)
    batch.dead = {0, 1, 2, 3}
    if kind == "ragged":
        # Each bound is two sequences'.
        wrong, batch.dead = ([0, -1, 28, 30, 40, FAR_OFF[3]], {0, 1, 2, 4})
        if far:
            wrong, batch.dead = ([FAR_OFF[0], 10, 20, 2**40, 40, 65], {0, 2, 3})
        batch.positional["cu_seqlens_k"].copy_(torch.tensor(wrong))
    elif kind == "paged":
        room = batch.positional["block_table"].shape[1] * batch.page
        batch.positional["seqlens_k"][:4] = torch.tensor(FAR_OFF if far else (-1, 0, 2, room + 1))
    else:
        starts, ends, room = batch.positional["k_starts"], batch.positional["k_ends"], batch.k.shape[1]
        wrong = FAR_OFF if far else (-1, room + 1, room, int(starts[3]) + 2)
        starts[0], ends[1], starts[2], ends[3] = wrong
    batch.forget_inputs()
    kernels.attend(batch, plan)
    batch.check()


@sanitize
@every_walk
@pytest.mark.parametrize("layout", ["NHD", "x-packed"])
def test_pages_past_the_pool_and_below_it_read_as_zeros(tensors, kernels, plan, layout) -> None:
    if plan.hopper:
        layout = "HND"
    mask = torch.ones(2, *((2, 2) if plan.hopper else (7, 7)), dtype=torch.bool)
    batch = batch_for(plan, tensors, [(100, 3)], kind="paged", page_layout=layout, mask=mask, index_dtype=torch.int64)
    batch.positional["block_table"][0, 1:5] = torch.tensor([batch.k.shape[0], *FAR_OFF[:3]])
    for held in (batch.keys, batch.values):
        held[16:80] = 0
    batch.forget_inputs()
    kernels.attend(batch, plan)
    batch.check()


@sanitize
@one_pass
@pytest.mark.parametrize(
    ("cu", "rows"),
    [([0, 17, 2**31 - 1], 22), ([0, 22, 40, 90], 22), ([-7, 5, 22], 22), ([-9, -5, -1], 20), ([18, 18, 22], 40)],
    ids=["past the end", "all past the end", "before the beginning", "all before the beginning", "from later on"],
)
def test_impossible_bounds_are_clamped_and_the_rows_of_none_are_zero(tensors, kernels, cu, rows, plan) -> None:
    clamped = [min(max(bound, 0), rows) for bound in cu]
    new = [end - begin for begin, end in itertools.pairwise(clamped)]
    batch = batch_for(plan, tensors, [(18, n) for n in new], rows_after=rows - sum(new), kind="paged", sinks=True)
    batch.positional["cu_seqlens_q"].copy_(torch.tensor(cu))
    if clamped[0]:
        # The rows of the sequences come after rows of none.
        batch.q.copy_(batch.q.roll(clamped[0], 0))
    batch.forget_inputs()
    attend(batch, plan)
    out, lse = batch.out.tensor.roll(-clamped[0], 0), batch.lse.tensor.roll(-clamped[0], 1)
    batch.q.copy_(batch.q.roll(-clamped[0], 0))
    batch.check_out(out, lse)
    batch.q.copy_(batch.q.roll(clamped[0], 0))
    batch.check_guards()


@sanitize
@walks("lists", "packed", "packed, split", "on Hopper")
def test_impossible_bounds_of_padded_queries_are_clamped_to_their_own_rows(tensors, kernels, plan) -> None:
    """A sequence keeps to its own row of the batch, wherever its bounds are."""
    given = {"kind": "padded", "side": "none", "index_dtype": torch.int64}
    batch = batch_for(plan, tensors, [(5, 18)] * 2, **given)
    kernels.attend(batch, plan)
    batch.check()
    whole = batch.out.tensor.clone()
    row = torch.arange(18, device=tensors.device)
    for name, wrong in (("q_starts", (-9, 2**31)), ("q_starts", (FAR_OFF[0], 11)), ("q_ends", (-1, FAR_OFF[3]))):
        clamped = torch.tensor([min(max(bound, 0), 18) for bound in wrong], device=tensors.device)[:, None]
        own = row >= clamped if name == "q_starts" else row < clamped
        batch.positional |= {"q_starts": None, "q_ends": None, name: torch.tensor(wrong, device=tensors.device)}
        attend(batch, plan)
        # Queries are counted from the last one, so that those that are left keep their positions.
        assert_bitwise_equal(batch.out.tensor[own], whole[own])
        assert not batch.out.tensor[~own].any()
        assert bool((batch.lse.tensor.mT[~own] == -torch.inf).all())
        batch.check_guards()


# Rows that are in no sequence now have no partial results: what memory held is merged.
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.filterwarnings("ignore:overflow")
@sanitize
@walks("lists", "packed", "packed, split", "on Hopper")
@pytest.mark.parametrize("cu", [[0, 18, 5, 20], [20, 0, 19, 7], [0, 2**31 - 1, -(2**31), 20]], ids=str)
def test_falling_bounds_touch_nothing_outside(tensors, cu, plan) -> None:
    batch = batch_for(plan, tensors, [(10, 20), (30, 0), (5, 0)], kind="ragged" if cu[0] else "paged")
    batch.positional["cu_seqlens_q"].copy_(torch.tensor(cu))
    # Sequences that are longer now read on in their pages, which must hold numbers.
    for x in (batch.k, batch.v):
        x.nan_to_num_()
    batch.forget_inputs()
    attend(batch, plan)
    for place in (batch.out, batch.lse):
        place.check(written=False)
    if plan.num_splits == 1:
        # Which of two sequences a row belongs to is open, and with splits, whether it has partial results.
        batch.check_guards(all_written=False)


# Lists


@sanitize
@pytest.mark.parametrize(
    "plan", [lists(32), packed(32, 16, 1, 1, 32), packed(32, 32, 1, 1, 8)], ids=["lists", "packed", "packed, wider"]
)
def test_rows_of_a_tile_of_several_blocks_of_keys_see_none_past_their_own_position(tensors, kernels, plan) -> None:
    """Rows of the layout longer than a block of keys list blocks that only their later queries may see."""
    mask = torch.ones(1, 2, 64 // plan.block_n, dtype=torch.bool)
    batch = tensors.batch([(3, 50)], heads=(1, 1), head_dim=16, blocks=(32, plan.block_n), mask=mask)
    kernels.attend(batch, plan)
    batch.check(most=50)


@sanitize
@every_walk
def test_a_row_that_lists_nothing_sees_nothing_and_not_the_blocks_of_its_neighbours(tensors, kernels, plan) -> None:
    size = 64 if plan.hopper else 16
    mask = torch.ones(2, 4, 4, dtype=torch.bool)
    mask[0, 2] = mask[1, 0] = mask[1, 3] = False
    batch = batch_for(plan, tensors, [(size - 3, 2 * size + 9)], mask=mask, sinks=True)
    kernels.attend(batch, plan)
    batch.check()
    empty = slice(size + 3, 2 * size + 3)
    assert not bool(batch.out.tensor[empty, 0].any())
    assert bool((batch.lse.tensor[0, empty] == batch.sinks[0]).all())


@sanitize
def test_nan_of_keys_that_a_row_lists_and_no_row_of_the_tile_sees_does_not_spread(tensors, kernels) -> None:
    """Tokens 14 and 15 list nothing; 16 and 17, in the same tile, list the keys there, and their windows hide them."""
    mask = torch.zeros(2, 2, 2, dtype=torch.bool)
    mask[0, 1, 0] = mask[1, 1, 1] = True
    for dtype in (BF16, FP32):
        batch = tensors.batch([(14, 4)], heads=(2, 1), head_dim=16, mask=mask, window=(0, 0), dtype=dtype)
        batch.spoil(0, range(16))
        kernels.attend(batch, packed(tokens=4))
        batch.check()


def wrong_lists(rng: random.Random, rows: int, columns: int, wrong_row: int) -> tuple[list[int], list[int]]:
    """crow and col of one head: an impossible bound and many columns out of bounds; no column twice in a row."""
    nnz = rows * columns
    crow = [0, *itertools.accumulate(rng.randint(1, columns) for _ in range(rows))]
    crow[wrong_row] = rng.choice([-(2**31), -1, nnz + 9, 2**31 - 1]) if wrong_row < rows else nnz + 1
    col = [column % columns for column in range(nnz)]
    for place in rng.sample(range(nnz), nnz // 2):
        col[place] = rng.choice([-(2**31), -1, columns, columns + 1, 2**26, 2**28, 2**31 - 1])
    return crow, col


@sanitize
@every_walk
@pytest.mark.usefixtures("unchecked")
def test_lists_of_any_content_list_what_is_there_and_touch_nothing_else(tensors, plan) -> None:
    """Rows of impossible bounds and columns out of bounds list nothing; the others are unchanged."""
    rng = random.Random(3)
    size = 64 if plan.hopper else 16
    for kind, wrong_rows in (("ragged", (4, 2)), ("paged", (3, 0))):
        made = [wrong_lists(rng, 4, 4, row) for row in wrong_rows]
        crow, col = (torch.tensor(x, dtype=torch.int32) for x in zip(*made, strict=True))
        mask = blocks.csr_to_mask(crow, col, 4)
        assert bool(mask[:, 2:].any())
        batch = batch_for(plan, tensors, [(2 * size, size + 5)], mask=mask, kind=kind)
        held = [tensors.guarded(x.to(tensors.device), row_padding=2) for x in (crow, col)]
        attend(batch, plan, layout=BlockLayout(*(x.tensor for x in held), *batch.blocks, 4))
        batch.check()
        for x in held:
            x.check(written=False)


@sanitize
@one_pass
def test_a_column_that_is_listed_twice_touches_its_own_rows_alone(tensors, kernels, plan) -> None:
    mask = torch.ones(2, 4, 4, dtype=torch.bool)
    size = 64 if plan.hopper else 16
    batch = batch_for(plan, tensors, [(size + 3, 2 * size)], mask=mask)
    kernels.attend(batch, plan)
    wanted = [batch.out.tensor.clone(), batch.lse.tensor.clone()]
    # The first head's row 2: in any order, the last block of a piece of 64 among them.
    batch.layout.col[0, 8:12] = torch.tensor([2, 1, 2, 2])
    kernels.attend(batch, plan)
    others = torch.ones(2 * size, 2, dtype=torch.bool, device=tensors.device)
    others[size - 3 : 2 * size - 3, 0] = False
    same = others.clone()
    if plan.hopper:
        # Row 3 of the layout is in the same tile of 128: its keys come in other pairs of 64, so are summed in others.
        same[2 * size - 3 :, 0] = False
    for got, before, eps in ((batch.out.tensor, wanted[0], 2**-7), (batch.lse.tensor.mT, wanted[1].mT, 2**-20)):
        assert_bitwise_equal(got[same], before[same])
        torch.testing.assert_close(got[others], before[others], rtol=eps, atol=eps)
        assert bool(got.isfinite().all())
    batch.check_guards()


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else poison_(tensor)


@walks("lists, split", "packed, split", "on Hopper, narrow, split")
def test_rows_that_no_sequence_claims_hold_nothing_of_old_memory(monkeypatch, tensors, plan) -> None:
    """A falling cu_seqlens_q leaves rows out, for which no program writes partial results, nor merges them."""
    batch = batch_for(plan, tensors, [(30, 100), (130, 0), (130, 0)], kind="paged")
    batch.positional["cu_seqlens_q"] = torch.tensor([0, 80, 20, 90], dtype=torch.int32, device=tensors.device)
    for name in ("empty", "empty_strided"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *size, make=make, **options: poisoned(make(*size, **options)))
    attend(batch, plan)
    monkeypatch.undo()
    batch.check_guards(all_written=False)


@sanitize
@every_walk
def test_entries_past_the_lists_change_no_bit(tensors, plan) -> None:
    """Entries past ``crow[h, -1]``, and bounds past those of the layout's rows: sequences are longer than it."""
    size = 64 if plan.hopper else 16
    mask = torch.ones(2, 3, 3, dtype=torch.bool).tril()
    batch = batch_for(plan, tensors, [(3 * size - 3, size)], mask=mask, sinks=True, kind="paged")
    crow, col = blocks.mask_to_csr(mask)
    results = []
    for filling in (1, -1, 2**31 - 1):
        rows, columns = (torch.nn.functional.pad(x, (0, n), value=filling) for x, n in ((crow, 3), (col, 70)))
        if filling == 1:
            # Lists that there could be, in either.
            rows[:, 4:], columns[:, 6:] = torch.tensor([8, 9, 9]), torch.arange(70)
        rows, columns = (x.to(tensors.device, torch.int32) for x in (rows, columns))
        attend(batch, plan, layout=BlockLayout(rows[:, :4], columns, *batch.blocks, 3))
        batch.check(again=True)
        results.append((batch.out.tensor.clone(), batch.lse.tensor.clone()))
    tail = slice(3, size)
    assert not bool(results[0][0][tail].any())
    assert bool((results[0][1][:, tail] == batch.sinks[:, None]).all())
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            assert_bitwise_equal(one, other)


@one_pass
def test_max_seqlen_q_only_sizes_the_launch(tensors, kernels, plan) -> None:
    """Too few cost speed at most; the bits are those of the plan."""
    batch = batch_for(plan, tensors, [(5, 20)])
    kernels.attend(batch, plan)
    batch.check()
    wanted = batch.out.tensor.clone()
    for most in (0, 1, batch.layout.rows * batch.blocks[0]):
        attend(batch, plan, most)
        assert_bitwise_equal(batch.out.tensor, wanted)


@pytest.mark.parametrize("most", [0, 1, 7, 20])
def test_a_plan_made_for_fewer_queries_than_there_are_still_computes_them_all(tensors, monkeypatch, most) -> None:
    if tensors.device.type == "cpu":
        monkeypatch.setattr(launch, "device_limits", lambda device: DeviceLimits(1))
    batch = tensors.batch([(5, 20), (17, 3)], heads=(2, 1), head_dim=16)
    attend(batch, None, most)
    batch.check()


# Plans that are given


UNSUITED = {
    "rows of two rows of the layout": (lists(32), {}),
    "more tokens than a tile has rows for": (packed(tokens=9), {}), "no splits": (lists(num_splits=0), {}),
    "on Hopper, float32": (hopper(), {"blocks": (64, 64), "dtype": FP32}),
    "on Hopper, a negative scale": (hopper(), {"blocks": (64, 64), "softmax_scale": -0.1}),
    "on Hopper, pages of 20": (hopper(), {"blocks": (64, 64), "kind": "paged", "page": 20}),
    "on Hopper, x-packed": (hopper(), {"blocks": (64, 64), "kind": "paged", "page_layout": "x-packed"}),
    "on Hopper, packed": (AttentionPlan(128, 64, 1, 4, 2, 1, True), {"blocks": (64, 64)}),
}  # fmt: skip


@pytest.mark.parametrize(("plan", "options"), UNSUITED.values(), ids=UNSUITED)
def test_a_plan_that_does_not_suit_a_call_is_refused_by_name_and_nothing_is_written(tensors, plan, options) -> None:
    batch = tensors.batch([(5, 3)], heads=(2, 1), head_dim=16, **options)
    with pytest.raises(
        ValueError, match=r"^plan must be one made for Problem\(.*\), (as with .*, )?got AttentionPlan\("
    ):
        blocksparse_attention(
            batch.q, batch.k, batch.v, batch.layout, **batch.options, out=batch.out.tensor, plan=plan
        )  # fmt: skip
    assert bool(batch.out.tensor.isnan().all())


def test_a_plan_for_hopper_is_refused_for_unaligned_keys(tensors) -> None:
    batch = tensors.batch([(5, 3)], heads=(2, 1), head_dim=16, blocks=(64, 64))
    for place in (K, V):
        given = list(batch.tensors)
        room = torch.empty(given[place].numel() + 1, dtype=BF16, device=tensors.device)
        given[place] = room[1:].view(given[place].shape).copy_(given[place])
        with pytest.raises(ValueError, match=r"^plan must be without hopper where .* 16-byte aligned"):
            batch.prepare(hopper(), given)(*given)


# Prepared launches


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_prepared_launch_keeps_no_tensor_of_its_first_call_alive(tensors, num_splits) -> None:
    """It is kept for as long as the process lives, and a call's tensors may be gigabytes."""

    def call() -> tuple[Callable[..., None], list[weakref.ref[torch.Tensor]]]:
        batch = tensors.batch([(5, 3)], heads=(2, 1), head_dim=16, sinks=True, kind="paged")
        run = batch.prepare(lists(num_splits=num_splits))
        run(*batch.tensors)
        return run, [weakref.ref(tensor) for tensor in batch.tensors if tensor is not None]

    run, remembered = call()
    gc.collect()
    assert len(remembered) >= 10
    assert [alive() for alive in remembered if alive() is not None] == []
    del run


@every_walk
def test_a_prepared_launch_serves_other_tensors_that_look_alike(tensors, plan) -> None:
    mask = torch.ones(2, 2, 2, dtype=torch.bool)
    first = batch_for(plan, tensors, [(5, 3), (1, 20)], mask=mask, index_dtype=torch.int64)
    run = first.prepare(plan)
    run(*first.tensors)
    first.check()
    kept = first.out.tensor.clone()
    other = batch_for(plan, tensors, [(2, 17), (4, 6)], mask=mask, index_dtype=torch.int64)
    assert not {x.data_ptr() for x in first.tensors if x is not None} & {
        x.data_ptr() for x in other.tensors if x is not None
    }
    run(*other.tensors)
    other.check()
    assert_bitwise_equal(first.out.tensor, kept)


class Value:
    """What is no pointer, of a number."""

    def __init__(self, number: int) -> None:
        self.number = number


def numbers_in(arguments: Any) -> Any:
    """Plain tuples of the numbers in an argument."""
    return (
        tuple(map(numbers_in, arguments)) if isinstance(arguments, tuple) else getattr(arguments, "number", arguments)
    )


@pytest.mark.parametrize("by_tma", [False, True], ids=["portable", "TMA"])
@pytest.mark.parametrize("padded", [False, True], ids=["ragged", "padded"])
def test_pointers_reach_a_kernel_in_the_places_of_their_tensors(padded, by_tma) -> None:
    """From the second call on pointers come in tuples without names."""
    group = launch._grouped(padded, by_tma)
    pointers = range(3 if by_tma else 0, 18)
    named = group(*map(Value, pointers))
    assert numbers_in(named) == group(*pointers)
    assert [type(argument) for argument in named[-5:]] == [groups.Lists, Value, groups.Bounds, Value, groups.Outputs]
    assert numbers_in(named[-3]) == ((9, 10, 11, 12) if padded else (5, None, 6, 8))
    merging, pointers = launch._grouped_for_merging(padded), range(5, 18)
    named = merging(*map(Value, pointers))
    assert numbers_in(named) == merging(*pointers)
    assert numbers_in(named) == ((9, 10, 11, 12) if padded else (5, None, 6, 8), 13, (14, 15, 16, 17))


@pytest.mark.parametrize(
    ("plan", "kernels"),
    [
        (lists(), ["attend_lists"]),
        (lists(num_splits=2), ["attend_lists", "merge"]),
        (packed(16, 32, 4, 3, 4), ["attend_packed", "merge"]),
    ],
    ids=["at once", "in parts", "merged lists in parts"],
)
def test_addresses_start_what_their_tensors_would(tensors, started, plan, kernels) -> None:
    batch = tensors.batch([(3, 30), (2, 9)], kind="paged")
    by_tensors, by_addresses = started(batch.prepare(plan), batch.tensors)
    assert [kernel for kernel, *_ in by_tensors] == kernels
    assert by_addresses == by_tensors


# What only a GPU shows


GRAPHS = {
    "lists": lists(64, 64, 1, 2), "lists, split": lists(64, 32, 3, 2), "packed": packed(16, 64, 1, 3),
    "packed, split": packed(16, 32, 4, 3, 4), "on Hopper": hopper(), "on Hopper, split": hopper(64, 2),
    "on Hopper, as free": replace(hopper(64), as_free=True), "as free, split": replace(hopper(64, 2), as_free=True),
}  # fmt: skip


def call_of(batch: Any, plan: AttentionPlan) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """A call of the kernels that makes its own results, and the tensors that it takes."""

    def run(*inputs: torch.Tensor | None) -> list[torch.Tensor]:
        out = inputs[Q].new_empty(batch.out.tensor.shape)
        lse = inputs[Q].new_empty(batch.lse.tensor.shape, dtype=FP32)
        batch.prepare(plan, (*inputs, out, lse))(*inputs, out, lse)
        return [out, lse]

    return run, list(batch.tensors[:OUT])


@gpu
@pytest.mark.parametrize("plan", GRAPHS.values(), ids=GRAPHS)
def test_every_kernel_is_captured_in_a_graph_and_never_synchronises(tensors, plan) -> None:
    on_hopper_or_skip(plan, tensors.device)
    for kind in KINDS:
        options = {"heads": (8, 2), "head_dim": 64, "blocks": (64, 64), "kind": kind, "side": "both"}
        mask = torch.ones(8, 8, 8, dtype=torch.bool)

        def made(seed: int, options: Any = options, mask: torch.Tensor = mask) -> Any:
            torch.manual_seed(seed)
            return tensors.batch([(200, 70), (300, 1), (0, 130)], mask=mask, **options)

        run, inputs = call_of(made(0), plan)
        contract.check_no_host_sync(lambda run=run, inputs=inputs: run(*inputs))
        contract.check_cuda_graph(run, lambda seed, made=made: call_of(made(seed), plan)[1])
        contract.check_deterministic(lambda run=run, inputs=inputs: run(*inputs))


@gpu
def test_counters_of_streams_and_of_captured_calls_are_apart(device) -> None:
    counters = launch.Counters(torch.empty(0, device=device).device)
    places: list[set[int]] = []
    for stream in [torch.cuda.Stream() for _ in range(2)]:
        with torch.cuda.stream(stream):
            places.append({counters.new().data_ptr() for _ in range(200)})
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        captured = [counters.new() for _ in range(200)]
        # An empty graph is warned of.
        torch.zeros(1, device=device)
    places.append({counter.data_ptr() for counter in captured})
    assert len(places[-1]) == len(captured)
    assert not any(place % 16 for place in set.union(*places))
    assert len(set.union(*places)) == sum(map(len, places))
    assert not any(int(counter[0]) for counter in captured)


def test_counters_that_graphs_were_given_outlive_the_last_one(monkeypatch) -> None:
    """A graph holds an address alone."""
    made: list[weakref.ref[torch.Tensor]] = []
    zeros, capturing = torch.zeros, False

    def seen(*size: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
        found = zeros(*size, dtype=dtype)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(torch, "zeros", seen)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(launch, "lasting", lambda make, device: make())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    counters = launch.Counters(SimpleNamespace(type="cuda", index=0))  # type: ignore[arg-type]
    eager = {counters.new().data_ptr() for _ in range(200)}
    capturing = True
    found = [counters.new().data_ptr() for _ in range(5000)]
    given = set(found[: launch._MOST_CAPTURED])
    assert len(given) == launch._MOST_CAPTURED
    assert not given & (eager | set(found[launch._MOST_CAPTURED :]))
    assert made[0]() is not None


@gpu
def test_calls_on_two_streams_at_once_take_their_tiles_apart(tensors) -> None:
    plan = replace(hopper(64), as_free=True)
    on_hopper_or_skip(plan, tensors.device)
    options = {"heads": (8, 2), "head_dim": 64, "blocks": (64, 64), "mask": torch.ones(8, 32, 32, dtype=torch.bool)}
    calls = [call_of(tensors.batch([(0, 2000), (1000, 1000)], **options), plan) for _ in range(2)]
    wanted = [run(*inputs) for run, inputs in calls]
    streams, found = [torch.cuda.Stream() for _ in calls], []
    torch.cuda.synchronize()
    for _ in range(20):
        for (run, inputs), stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(run(*inputs))
    torch.cuda.synchronize()
    for number, results in enumerate(found):
        for one, other in zip(results, wanted[number % 2], strict=True):
            assert_bitwise_equal(one, other)


# Offsets past 2^31 elements


# What is stretched: the argument and its dimension, three or more of each, so that strides fit in 32 bits and products
# of them do not. Those that both kernels read alike are stretched for one of them.
FAR: dict[str, tuple[AttentionPlan, dict[str, Any], dict[int, int]]] = {
    "packed, rows": (packed(tokens=4), {}, {Q: 0, K: 0, V: 0, OUT: 0, LSE: 1}),
    "packed, heads": (packed(tokens=4), {}, {Q: 1, K: 1, V: 1, CROW: 0, COL: 0, OUT: 1, LSE: 0}),
    "packed, elements": (packed(tokens=4), {}, {Q: 2, OUT: 2}),
    "packed, pages": (packed(), {"kind": "paged"}, {K: 0, TABLE: 0}),
    "packed, sequences": (packed(), {"kind": "padded"}, {Q: 0, K: 0, OUT: 0}),
    "lists, pages of runs": (lists(), X_PACKED, {K: 0, V: 0}),
    "lists, heads of runs": (lists(), X_PACKED, {K: 1, V: 1}),
    "lists, runs and elements": (lists(), X_PACKED, {K: 2, V: 2}),
}  # fmt: skip


@pytest.mark.parametrize(("plan", "options", "dims"), FAR.values(), ids=FAR)
def test_kernels_follow_dimensions_more_than_2_to_the_31_elements_apart(tensors, plan, options, dims) -> None:
    lengths = [(2, 1)] * 3 if options else [(16, 3)]
    heads = (3, 3) if {1, 2} & set(dims.values()) else (1, 1)
    mask = torch.ones(heads[0], 2, 2, dtype=torch.bool)
    batch = tensors.batch(lengths, heads=heads, head_dim=32, page=8, side="none", mask=mask, **options)
    if options.get("kind") == "paged":
        # The page that lies furthest off is one that is read.
        batch.positional["block_table"][:, 0] = batch.k.shape[0] - 1
        for x in (batch.k, batch.v):
            x[-1] = tensors.normal(*x.shape[1:])

    def run(*given: Any) -> tuple[()]:
        batch.prepare(plan, given)(*given)
        return ()

    check_far_apart(run, batch.tensors, dims)


@pytest.mark.parametrize("dims", [{OUT: 0, LSE: 1}, {OUT: 1, LSE: 0}, {OUT: 2}], ids=["rows", "heads", "elements"])
def test_merging_follows_dimensions_more_than_2_to_the_31_elements_apart(tensors, dims) -> None:
    batch = tensors.batch([(16, 3)], heads=(3, 3), head_dim=16)

    def run(*given: Any) -> tuple[()]:
        batch.prepare(packed(num_splits=2, tokens=8), given)(*given)
        return ()

    check_far_apart(run, batch.tensors, dims)


@pytest.mark.parametrize(
    ("plan", "programs"), [(lists(num_splits=2), 8), (packed(num_splits=2, tokens=4), 4)], ids=["lists", "packed"]
)
@much_memory()
def test_partial_results_more_than_2_to_the_31_elements_apart_are_found(tensors, monkeypatch, plan, programs) -> None:
    """A great many rows, of which only the first are launched: partial results of two splits are 8 GiB apart."""
    size, tokens = 256, 2**31 // 256 + 16
    mask = torch.ones(1, 3, 3, dtype=torch.bool)
    batch = tensors.batch([(40, 2)], heads=(1, 1), head_dim=16, head_dim_v=size, mask=mask)
    wanted, _ = batch.wanted(batch.sample())

    class First(launch.Launch):
        def __init__(self, kernel: Any, grid: tuple[int, int, int], *rest: Any, **options: Any) -> None:
            # Of the merge kernel, which has one for each row.
            most = 64 if kernel.fn.__name__ == "merge" else programs
            super().__init__(kernel, (min(grid[0], most), 1, 1), *rest, **options)

    monkeypatch.setattr(launch, "Launch", First)
    given = list(batch.tensors)
    given[Q] = batch.q[1:].expand(tokens, 1, 16)
    given[LSE] = None

    def run() -> torch.Tensor:
        given[OUT] = torch.empty(tokens, 1, size, dtype=BF16, device=tensors.device)
        batch.prepare(plan, given)(*given)
        return given[OUT][1:2]

    tensors.assert_rounded(run(), tensors.Wanted(wanted.exact[1:], wanted.plain[1:].to(BF16)))


@pytest.mark.parametrize("plan", [lists(), packed(tokens=4)], ids=["lists", "packed"])
@much_memory()
def test_lists_are_read_up_to_the_last_place_that_32_bits_count(tensors, plan) -> None:
    """Two rows of one tile: the last entry of all, and before it more than one pass reads."""
    mask = torch.zeros(1, 3, 3, dtype=torch.bool)
    mask[0, 1, 0] = mask[0, 2, 2] = True
    batch = tensors.batch([(30, 4)], heads=(1, 1), head_dim=16, mask=mask)
    width = 2**31 - 1
    # Memory on both sides, so that an offset that wraps finds other entries.
    room = torch.empty(2 * width + 1024, dtype=torch.int32, device=tensors.device)
    col = room[-width:][None]
    crow = tensors.integers(0, width - 201, width - 1, width)[None]
    col[0, -201:] = -1
    col[0, -201], col[0, -1] = 0, 2
    attend(batch, plan, layout=BlockLayout(crow, col, 16, 16, 3))
    batch.check()


@gpu
@pytest.mark.parametrize("plan", [lists(64, 64), packed(16, 64, 2, 3), hopper(), hopper(64, 2)], ids=str)
@much_memory()
def test_caches_of_more_than_2_to_the_31_elements_are_read_to_their_ends(tensors, plan) -> None:
    options = {"heads": (8, 8), "head_dim": 128, "blocks": (64, 64), "kind": "paged"}
    batch = batch_for(plan, tensors, [(0, 100), (300, 100)], **options)
    attend(batch, plan)
    batch.check()
    wanted = [batch.out.tensor.clone(), batch.lse.tensor.clone()]
    given = list(batch.tensors)
    before = 2**31 // batch.k[0].numel() + 5
    for place in (K, V):
        cache = given[place]
        given[place] = torch.zeros(before + cache.shape[0], *cache.shape[1:], dtype=BF16, device=cache.device)
        given[place][before:] = cache
    given[TABLE] = (given[TABLE] + before).contiguous()
    batch.prepare(plan, given)(*given)
    for one, other in zip((given[OUT], given[LSE]), wanted, strict=True):
        assert_bitwise_equal(one, other, what="with the last of many pages")


# Grids


@pytest.fixture
def grids(monkeypatch) -> Grids:
    return Grids(monkeypatch, DeviceLimits(132, 232448, hopper=True), launch)


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def prepare(rows: int, sequences: int, plan: AttentionPlan | None, kind: str = "paged") -> None:
    """Prepare a call of 8 query and 2 kv heads, of tensors without memory, and call it."""
    sizes = ((8, rows // 64 + 2), (8, 64), (sequences + 1,), (sequences,), (sequences, 9))
    crow, col, cu, lengths, table = (meta(*size, dtype=torch.int32) for size in sizes)
    if kind == "padded":
        q, k = meta(sequences, rows, 8, 128), meta(sequences, rows, 2, 128)
        out, lse = q, meta(sequences, 8, rows, dtype=FP32)
        bounds = [None] * 4 + [lengths] * 4
    else:
        q, k = meta(rows, 8, 128), meta(50, 16, 2, 128) if kind == "paged" else meta(rows, 2, 128)
        out, lse = q, meta(8, rows, dtype=FP32)
        bounds = [cu, None, table, lengths] if kind == "paged" else [cu, cu, None, None]
        bounds += [None] * 4
    given = Tensors(q, k, k, crow, col, *bounds, None, out, lse)
    problem = check_attend(given, Options(rows, 64, 64, "NHD", 0.1, -1, 0, 0.0, 0))
    launch.prepare_attend(problem, plan, given)(*given)


MANY = 70_000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "plan", [lists(), lists(64, 64, 3), packed(), packed(64, 64, 3, 1, 8), hopper(), None], ids=str
)
def test_grids_of_many_sequences_and_rows_have_one_dimension(grids, plan, kind) -> None:
    for rows, sequences in ((MANY, MANY), (2**21, 3), (1, 1), (2**20, MANY)):
        prepare(rows // sequences if kind == "padded" else rows, sequences, plan, kind)
    assert len(grids.grids) >= 4
    for name, (size, *others) in grids.grids:
        assert 0 < size < 2**31, name
        assert others == [1, 1], name


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_launch_nothing(grids, kind) -> None:
    for sequences in (0, 3):
        prepare(0, sequences, lists(), kind)
    assert not grids.grids


def test_the_grid_grows_with_rows_and_sequences_and_never_with_the_longest(grids, monkeypatch) -> None:
    """At most two slots a sequence are empty, one if packed; programs past a sequence's end would walk keys in vain.

    The kernel for sm_90 has no more programs than there are SMs.
    """
    monkeypatch.setattr(launch, "persistent_programs", lambda device: 100)
    for rows, sequences, splits in ((1, 1, 1), (2079, 32, 1), (2079, 32, 3), (32, 32, 7)):
        for plan, tokens, heads, spare in (
            (lists(16, 16, splits), 16, 8, 2), (packed(16, 16, splits), 1, 2, 1), (hopper(128, splits), 128, 8, 2),
            (packed(16, 16, splits, 1, 3), 3, 2, 1),
        ):  # fmt: skip
            prepare(rows, sequences, plan)
            _, grid = next(grid for grid in reversed(grids.grids) if grid[0] != "merge")
            tiles = (rows // tokens + (sequences + 2) * spare) * heads * splits
            assert grid == (min(tiles, 100) if plan.hopper else tiles, 1, 1)


# Where tiles are, and what they walk: the arithmetic of kernels/tiles.py


@triton.jit
def tabulate_places(
    p_starts, p_ends, p_table, num_sequences, rows, TOKENS: tl.constexpr, SLACK: tl.constexpr, KIND: tl.constexpr
):
    i_w = tl.program_id(0)
    batch = groups.Batch(groups.Bounds(p_starts, p_ends, None, None), num_sequences, rows, None)
    i_n, i_place, begin, q_len = tiles.locate(batch, i_w, TOKENS, SLACK, KIND)
    tl.store(p_table + i_w * 4, i_n)
    tl.store(p_table + i_w * 4 + 1, i_place)
    tl.store(p_table + i_w * 4 + 2, begin)
    tl.store(p_table + i_w * 4 + 3, q_len)


def places_of(
    bounds: tuple[Sequence[int], Sequence[int] | None], rows: int, tokens: int, wide_tiles: bool, padded: bool,
    device: torch.device, dtype: torch.dtype = torch.int64,
) -> list[list[int]]:  # fmt: skip
    """What the device computes for every slot of the grid: sequence, tile from the last, first row, number of rows."""
    starts, ends = (None if x is None else torch.tensor(x, dtype=dtype, device=device) for x in bounds)
    sequences = len(bounds[0]) - (0 if padded else 1)
    total = rows * sequences if padded else rows
    problem = Problem(1, 1, 16, 16, 16, 16, 1, 1, 1, total, sequences, rows, rows, padded=padded)
    places = num_slots(problem, lists(tokens) if wide_tiles else packed(tokens=tokens))
    table = torch.full((places, 4), -9, dtype=torch.int64, device=device)
    kind = tiles.PADDED if padded else tiles.RAGGED
    slack = 2 if wide_tiles else 1
    tabulate_places[(places,)](starts, ends, table, sequences, rows, TOKENS=tokens, SLACK=slack, KIND=kind)
    return table.tolist()


def rows_of_tile(place: list[int], tokens: int, context: int | None) -> range:
    """The rows that a program takes: tiles of ``packed`` begin with the sequence, others at multiples of their size."""
    _, i_place, begin, q_len = place
    shift = 0 if context is None else context
    i_tile = (shift + q_len - 1) // tokens - i_place
    if q_len <= 0 or i_place < 0 or i_tile < shift // tokens:
        return range(0)
    first, last = max(i_tile * tokens, shift), min((i_tile + 1) * tokens, shift + q_len)
    return range(begin + first - shift, begin + last - shift)


def random_bounds(rng: random.Random) -> tuple[list[int], int]:
    lengths = [rng.choice([0, 0, 1, 3, 4, 5, 8, rng.randint(0, 40)]) for _ in range(rng.randint(0, 5))]
    first = rng.choice([0, 0, 0, 5])
    return [first, *itertools.accumulate(lengths, initial=first)][1:], first + sum(lengths) + rng.choice([0, 0, 1, 10])


def impossible_bounds(rng: random.Random) -> tuple[list[int], int]:
    rows = rng.randint(1, 40)
    numbers = [-(2**31), -5, 0, rows, rows + 1, 2**31 - 1]
    return [rng.choice([*numbers, rng.randint(0, 40)]) for _ in range(rng.randint(1, 5))], rows


def test_every_row_of_a_ragged_batch_has_one_slot_in_the_grid(device: torch.device) -> None:
    rng = random.Random(0)
    for turn in range(16):
        cu, rows = random_bounds(rng)
        tokens, packed_tiles = rng.choice([1, 4, 16]), turn % 2
        owner: dict[int, int] = {}
        for place in places_of((cu, None), rows, tokens, not packed_tiles, False, device):
            # A sequence's context is any number; rows of none have none.
            context = None if packed_tiles else 7 * place[0] if place[0] >= 0 else 0
            for row in rows_of_tile(place, tokens, context):
                assert row not in owner, (cu, rows, tokens, row)
                owner[row] = place[0]
        wanted = dict.fromkeys(range(rows), -1)
        wanted |= {row: i for i in range(len(cu) - 1) for row in range(cu[i], cu[i + 1])}
        assert owner == wanted, (cu, rows, tokens)


def padded_bounds(rng: random.Random) -> Iterator[tuple[tuple[list[int], list[int]], int]]:
    """Starts and ends of sequences of so many rows; some that cannot be."""
    for turn in range(10):
        rows, count = rng.choice([1, 4, 9, 20]), rng.randint(1, 3)
        pairs = [sorted(rng.randint(0, rows) for _ in range(2)) for _ in range(count)]
        if turn >= 6:
            far = [-(2**31), -1, rows + 1, 2**31 - 1, 0, rows // 2]
            pairs = [[rng.choice(far), rng.choice(far)] for _ in range(count)]
        yield ([begin for begin, _ in pairs], [end for _, end in pairs]), rows


def test_every_row_of_a_padded_batch_has_one_slot_in_the_grid_whatever_its_bounds(device: torch.device) -> None:
    rng = random.Random(1)
    for turn, (bounds, rows) in enumerate(padded_bounds(rng)):
        tokens, packed_tiles = rng.choice([1, 4, 16]), turn % 2
        owner: dict[int, int] = {}
        for place in places_of(bounds, rows, tokens, not packed_tiles, True, device):
            context = None if packed_tiles else 5 if place[0] >= 0 else 0
            for row in rows_of_tile(place, tokens, context):
                assert row not in owner, (bounds, rows, tokens, row)
                owner[row] = place[0]
        wanted = {}
        for i, (begin, end) in enumerate(zip(*bounds, strict=True)):
            begin = min(max(begin, 0), rows)
            end = min(max(end, begin), rows)
            wanted |= {i * rows + row: i if begin <= row < end else -1 for row in range(rows)}
        assert owner == wanted, (bounds, rows, tokens)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_slots_of_impossible_bounds_stay_within_the_rows(device: torch.device, dtype: torch.dtype) -> None:
    rng = random.Random(2)
    for turn in range(12):
        cu, rows = impossible_bounds(rng)
        for i_n, _, begin, q_len in places_of((cu, None), rows, 4, bool(turn % 2), False, device, dtype):
            assert -1 <= i_n < max(1, len(cu) - 1)
            assert 0 <= begin <= begin + q_len <= rows


@triton.jit
def tabulate_shares(p_table, count, num_splits):
    i_split = tl.program_id(0)
    first, last = tiles.share(count, i_split, num_splits)
    tl.store(p_table + i_split * 2, first)
    tl.store(p_table + i_split * 2 + 1, last)


def test_splits_share_all_that_there_is_and_nothing_twice(device: torch.device) -> None:
    for splits, count in itertools.product((1, 2, 7), (0, 1, 6, 7, 8, 100)):
        table = torch.full((splits, 2), -9, dtype=torch.int64, device=device)
        tabulate_shares[(splits,)](table, count, splits)
        shares = [range(first, last) for first, last in table.tolist()]
        assert [i for own in shares for i in own] == [*range(count)]
        assert max(len(own) for own in shares) == cdiv(count, splits)


@triton.jit
def tabulate_lowest_bits(p_bits, p_table):
    i = tl.program_id(0)
    tl.store(p_table + i, portable.lowest_bit(tl.load(p_bits + i)))


def test_the_lowest_bit_of_a_number_is_found_whatever_stands_above_it(device: torch.device) -> None:
    """The last one is the number's sign."""
    rng = random.Random(4)
    wanted = [*range(64)] * 2
    above = [0] * 64 + [rng.getrandbits(64) for _ in range(64)]
    bits = [(1 << bit) | (more >> bit + 1 << bit + 1) for bit, more in zip(wanted, above, strict=True)]
    given = torch.tensor([x - 2**64 if x >= 2**63 else x for x in bits], dtype=torch.int64, device=device)
    table = torch.full((128,), -9, dtype=torch.int64, device=device)
    tabulate_lowest_bits[(128,)](given, table)
    assert table.tolist() == wanted
