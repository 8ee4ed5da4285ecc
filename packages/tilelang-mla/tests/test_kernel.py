"""Are the kernels the attention, by every plan and page? On a GPU as they are, else in TileLang's C target in float32.

Without a GPU they become C, see kernels/c.py: indices, masks, pages, parts and clamps are tested. It has no
races, no TMA, no rounding to 16 bits and no roles, whose steps follow each other in one loop.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_reference.attention import attention
from kernel_reference.checks import validate_values
from kernel_reference.partials import merge_partials
from kernel_reference.testing.guards import assert_bitwise_equal, poison_
from tilelang_mla import DecodeTiles, plan_decode
from tilelang_mla.plan import DecodeProblem, DeviceLimits, PrefillPlan, decode_tiles, plan_without_schedule
from tilelang_mla.prompts import prefill_in_parts

Tensor = torch.Tensor
BF16 = torch.bfloat16
SMALL = {"dim_nope": 64, "dim_rope": 32}
MIXED = [0, 1, 2, 3, 63, 64, 65, 200]
RAGGED = [(5, 20), (17, 17), (40, 9), (0, 33), (7, 0), (0, 0), (1, 130), (70, 70), (65, 100)]
PLANS = {
    "no plan": None, "by lengths": {}, "1 part": {"num_splits": 1}, "3 parts": {"num_splits": 3},
    "for 8 SMs": {"cores": 8},
}  # fmt: skip
every_plan = pytest.mark.parametrize("how", PLANS.values(), ids=PLANS)
LOG2_E = 1.4426950408889634


def in_c(name: str, **constants: Any) -> Any:
    from tilelang_mla.kernels import c

    return c.kernel(name, **constants)


class OnCpu:
    """What launch.py does, for one thread in float32."""

    @staticmethod
    def decode(batch: Any, plan: Any = None, kv: Tensor | None = None) -> None:
        q, lengths, table = batch.q, batch.seqlens_k, batch.block_table.contiguous()
        kv = (batch.kv if kv is None else kv).float().squeeze(2).contiguous()
        count, tokens, heads, _ = q.shape
        rows, dim_nope, page = tokens * heads, batch.dim_nope, kv.shape[1]
        problem = DecodeProblem(heads, dim_nope, batch.dim_rope, tokens, count, table.shape[1] * page, page)
        tiles: DecodeTiles
        if plan is None:
            tiles, first, order = plan_without_schedule(problem, DeviceLimits(132)), None, None
        else:
            tiles, first, order = plan
        num_parts = tiles.num_parts(count)
        merged = num_parts > count
        # Who cuts sequences, as groups.py numbers it: all alike, a schedule, or the programs, here of 3 shares.
        by = 2 if plan is None else int(first is not None)
        shares = 3
        programs = shares * tiles.row_tiles(rows) if plan is None else 3
        num_parts = count + shares - 1 if plan is None else num_parts
        pieces = poison_(torch.empty(2 * count)).to(torch.int32) * 0 - 7
        out = poison_(torch.empty(count, rows, dim_nope))
        lse = poison_(torch.empty(count, heads, tokens))
        parts, part_lse = poison_(torch.empty(num_parts, rows, dim_nope)), poison_(torch.empty(num_parts, rows))
        attend = in_c(
            "decode", dim_nope=dim_nope, dim_rope=batch.dim_rope, block_n=tiles.block_n, num_stages=tiles.num_stages,
            gather=page % tiles.block_n != 0, per_token=lengths.ndim == 2,
        )  # fmt: skip
        flags = (by, int(order is not None), 1)
        bounds = lengths.view(-1) if first is None else first
        attend(
            q.float().reshape(count, rows, -1).contiguous(), kv, lengths, table, bounds,
            lengths.view(-1) if order is None else order, out, lse, parts, part_lse, pieces, batch.scale * LOG2_E,
            heads, int(batch.causal), num_parts, tiles.num_splits, *flags, programs,
        )  # fmt: skip
        bounds = pieces if by == 2 else bounds
        if merged:
            merge = in_c("merge", dim_nope=dim_nope)
            # Of several rows a program and several pieces a row, whatever merge_grid says of batches so small.
            merge(bounds, out, lse, parts, part_lse, heads, tiles.num_splits, 3, 2, flags[0], 1)
        batch.out.tensor.copy_(out.view(batch.out.tensor.shape))
        batch.lse.tensor.copy_(lse)

    @staticmethod
    def prefill(batch: Any, plan: PrefillPlan | None = None) -> None:
        plan = PrefillPlan(64, 32, 2) if plan is None else plan
        q, k, v = (x.float().contiguous() for x in (batch.q, batch.k, batch.v))
        out, lse = poison_(torch.empty(*q.shape[:2], v.shape[2])), poison_(torch.empty(q.shape[1], q.shape[0]))
        in_parts = {"in_parts": True} if plan.num_splits > 1 else {}
        attend = in_c(
            "prefill", head_dim=q.shape[2], head_dim_v=v.shape[2], block_m=plan.block_m, block_n=plan.block_n,
            num_stages=plan.num_stages, **in_parts,
        )  # fmt: skip
        if in_parts:
            attend = prefill_in_parts(
                of_rows(attend), of_rows(in_c("merge_ranks", dim_nope=v.shape[2])), plan.num_splits
            )
        num_slots = q.shape[0] // plan.block_m + len(batch.cu_seqlens_q) + 1
        taken = torch.zeros(1, dtype=torch.int32)
        attend(
            q, k, v, batch.cu_seqlens_q, batch.cu_seqlens_k, out, lse, taken, batch.scale * LOG2_E, int(batch.causal),
            num_slots, 1, 3, 2,
        )  # fmt: skip
        batch.out.tensor.copy_(out)
        batch.lse.tensor.copy_(lse)


def of_rows(kernel: Any) -> Any:
    """A kernel in C, which knows of no strides, over tensors that have some."""

    def call(*given: Any) -> None:
        packed = [x.contiguous() if isinstance(x, Tensor) else x for x in given]
        kernel(*packed)
        for tensor, copy in zip(given, packed, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)

    return call


class OnGpu:
    """The public functions."""

    @staticmethod
    def decode(batch: Any, plan: Any = None, kv: Tensor | None = None) -> None:
        if kv is not None:
            pytest.skip("kv of another shape is for the text in C")
        batch.run(plan=plan)

    @staticmethod
    def prefill(batch: Any, plan: PrefillPlan | None = None) -> None:
        batch.run(plan=plan)


@pytest.fixture(scope="module")
def kernels(device: torch.device) -> Any:
    if device.type != "cpu":
        return OnGpu()
    try:
        import tilelang  # noqa: F401
    except ImportError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no TileLang: {error}")
    from tilelang.contrib.cc import get_cplus_compiler

    if get_cplus_compiler() is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no C++ compiler")
    return OnCpu()


def decode(tensors: Any, kernels: Any, lengths: list[int], how: Any = None, **options: Any) -> Any:
    batch = tensors.decode(lengths, **{**SMALL, **options})
    kernels.decode(batch, None if how is None else batch.plan(**how))
    batch.check()
    return batch


def prefill(tensors: Any, kernels: Any, lengths: Any, plan: PrefillPlan | None = None, **options: Any) -> Any:
    batch = tensors.prefill(lengths, **options)
    kernels.prefill(batch, plan)
    batch.check()
    return batch


@every_plan
@pytest.mark.parametrize("page", [64, 16, 1])
def test_every_plan_over_pages_of_whole_blocks_and_of_less(tensors, kernels, page, how) -> None:
    for causal, tokens, heads in ((True, 2, 12), (False, 1, 5)):
        decode(tensors, kernels, MIXED, how, page=page, causal=causal, seqlen_q=tokens, heads=heads)


@pytest.mark.parametrize(("heads", "tokens"), [(1, 1), (64, 1), (80, 1), (20, 4), (16, 4), (128, 2), (33, 3)])
def test_heads_and_tokens_are_packed_into_tiles_without_a_rest(tensors, kernels, heads, tokens) -> None:
    decode(tensors, kernels, [0, 1, 70, 130], {"num_splits": 2}, heads=heads, seqlen_q=tokens)


@pytest.mark.parametrize("page", [128, 3, 48, 100])
def test_pages_of_other_sizes(tensors, kernels, page) -> None:
    decode(tensors, kernels, MIXED, {}, page=page, heads=4, seqlen_q=2)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [48, 24, 1, 128])
def test_keys_by_rows_over_pages_of_any_size(tensors, page) -> None:
    for lengths, tokens, heads in ((MIXED, 2, 12), ([1000, 0, 3000, 70], 1, 64)):
        for how in ({}, {"num_splits": 3}):
            batch = tensors.decode(lengths, page=page, seqlen_q=tokens, heads=heads)
            plan = batch.plan(**how)
            batch.run(plan=plan._replace(tiles=replace(plan.tiles, by_rows=True)))
            batch.check()


@pytest.mark.parametrize("dims", [(512, 64), (128, 96), (64, 0)], ids=str)
def test_latents_of_other_sizes(tensors, kernels, dims) -> None:
    page = 64 if dims[1] else 48
    decode(tensors, kernels, [0, 65], {"num_splits": 2}, dim_nope=dims[0], dim_rope=dims[1], heads=2, page=page)


def test_more_parts_than_a_chunk_of_the_merging_kernel(tensors, kernels) -> None:
    decode(tensors, kernels, [1500, 0, 64, 700], {"num_splits": 19}, heads=3)


def test_sums_follow_a_maximum_that_moves_far_and_one_that_moves_a_little(tensors, kernels) -> None:
    """From block to block, by more than the headroom and by less."""
    for page in (64, 16):
        decode(tensors, kernels, [330, 65, 200], {"num_splits": 1}, page=page, heads=16, softmax_scale=1.0)


def test_sums_of_prefill_follow_a_maximum_that_moves_far_and_one_that_moves_a_little(tensors, kernels) -> None:
    for causal in (True, False):
        prefill(tensors, kernels, [(330, 330), (65, 200)], heads=(2, 1), softmax_scale=1.0, causal=causal)


def test_a_plan_made_from_other_lengths_is_as_right(tensors, kernels) -> None:
    batch = tensors.decode([3, 0, 300, 65], heads=4, **SMALL)
    for others in ([300, 300, 0, 0], [0, 0, 0, 0], [2**31 - 1, -5, 1, 64]):
        plan = plan_decode(tensors.integers(*others), 4, cores=132, **SMALL)
        kernels.decode(batch, plan)
        batch.check()


@every_plan
@pytest.mark.parametrize("page", [64, 16])
def test_each_query_token_sees_as_many_keys_as_its_own_length_says(tensors, kernels, page, how) -> None:
    """As a rank of several has it, whose share of a sequence grows by none or one from token to token."""
    seen = [[0, 0, 0], [0, 0, 1], [2, 2, 3], [62, 63, 63], [64, 64, 65], [128, 200, 200]]
    # Of a length that cannot be the sequence is dead; before the last token one sees no more than that does.
    impossible = [[1, 2, -1], [1, 2, 2**31 - 1], [-1, 2**31 - 1, 65], [-(2**31), 5, 65]]
    lengths = [row[-1] for row in seen] + [65] * 4
    batch = tensors.decode(lengths, heads=24, seqlen_q=3, page=page, causal=False, **SMALL)
    batch.seqlens_k = tensors.integers(*seen, *impossible)
    plan = None if how is None else batch.plan_of(tensors.integers(*lengths), **how)
    with validate_values(False):
        kernels.decode(batch, plan)
    batch.check_guards()
    got, got_lse = batch.out.tensor.clone(), batch.lse.tensor.clone()
    capacity = batch.block_table.shape[1] * page
    last = batch.seqlens_k[:, -1].clone()
    for token in range(3):
        each = torch.minimum(batch.seqlens_k[:, token], last).clamp(min=0)
        each[(last < 0) | (last > capacity)] = 0
        alone = batch.alone(token, each)
        kernels.decode(alone, None if how is None else alone.plan(**how))
        torch.testing.assert_close(got[:, token], alone.out.tensor[:, 0], rtol=8e-3, atol=8e-3)
        torch.testing.assert_close(got_lse[:, :, token], alone.lse.tensor[:, :, 0], rtol=1e-5, atol=1e-5)
        assert bool((got_lse[:, 0, token] == -torch.inf).eq(each == 0).all())


@pytest.mark.parametrize("world", [1, 2, 5])
def test_parts_of_ranks_are_merged_by_their_lse(tensors, device, world) -> None:
    """Far apart and near; of ranks that saw nothing, as we and as FlashMLA say it, whatever their rows hold."""
    torch.manual_seed(world)
    parts = torch.randn(world, 12, 64, device=device).bfloat16()
    part_lse = torch.randn(world, 12, device=device) * torch.linspace(0, 200, 12, device=device)
    part_lse[0, 0], part_lse[-1, 1] = -torch.inf, torch.inf
    part_lse[:, 2] = -torch.inf
    poison_(parts[0, 0]), poison_(parts[-1, 1]), poison_(parts[:, 2])
    part_lse[0, 3] = torch.nan
    want = merge_partials(parts.double(), part_lse.double())
    out, lse = poison_(torch.empty(12, 64, device=device).bfloat16()), poison_(torch.empty(12, device=device))
    if device.type == "cpu":
        in_place = out.float()
        in_c("merge_ranks", dim_nope=64)(parts.float(), part_lse, in_place, lse)
        out.copy_(in_place)
    else:
        torch.ops.tilelang_mla.merge(parts, part_lse, out, lse)
    torch.testing.assert_close(out.double(), want.out.double(), rtol=8e-3, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(lse.double(), want.lse.double(), rtol=1e-6, atol=1e-6, equal_nan=True)
    assert not bool(out[2].any())
    assert float(lse[2]) == -torch.inf
    assert bool(out[3].isnan().all())


def test_nan_of_other_sequences_and_of_unused_tails_stays_away(tensors, kernels) -> None:
    for page in (64, 16):
        decode(tensors, kernels, [70, 33, 129], {"num_splits": 2}, page=page, heads=4, of_nan=(1,))
    for causal in (True, False):
        prefill(tensors, kernels, [(5, 20), (17, 17), (40, 9), (1, 33), (65, 100)], causal=causal, of_nan=(1, 3))


def test_nan_that_a_row_sees_is_not_hidden(tensors, kernels) -> None:
    for splits in (1, 2):
        batch = tensors.decode([70, 33, 129], heads=4, of_nan=(1,), **SMALL)
        kernels.decode(batch, batch.plan(num_splits=splits))
        assert bool(batch.out.tensor[1].isnan().all())
        assert bool(batch.lse.tensor[1].isnan().all())


@pytest.mark.parametrize("page", [64, 16])
def test_what_device_memory_may_hold_is_clamped(tensors, kernels, page) -> None:
    """Lengths, pages and parts that cannot be: nothing outside is read or written, and others do not change."""
    batch = tensors.decode([70, 33, 129, 64], heads=4, page=page, **SMALL)
    plan = batch.plan(num_splits=2)
    kernels.decode(batch, plan)
    want = (batch.out.tensor.clone(), batch.lse.tensor.clone())
    held = batch.seqlens_k.clone()
    for bad in (-1, -(2**31), 2**31 - 1, batch.block_table.shape[1] * page + 1):
        batch.seqlens_k[1] = bad
        kernels.decode(batch, plan)
        assert not bool(batch.out.tensor[1].any())
        assert bool((batch.lse.tensor[1] == -torch.inf).all())
        for got, wanted in zip((batch.out.tensor, batch.lse.tensor), want, strict=True):
            assert_bitwise_equal(got[[0, 2, 3]], wanted[[0, 2, 3]])
    batch.seqlens_k.copy_(held)
    for bad in (-1, 2**31 - 1, batch.kv.shape[0]):
        page_there = batch.block_table[1, 0].clone()
        batch.block_table[1, 0] = bad
        kernels.decode(batch, plan)
        assert bool(batch.out.tensor.isfinite().all())
        assert_bitwise_equal(batch.out.tensor[[0, 2, 3]], want[0][[0, 2, 3]])
        batch.block_table[1, 0] = page_there
    far, below = 2**31 - 1, -(2**31)
    for first in (
        [0, 0, 0, 0, 0], [-5, 2, 4, 6, 10**9], [8, 6, 4, 2, 0], [0, far, 4, 6, 8], [below, far, below, far, 8],
        [far, below, far, below, 8], [0, below, 4, far, far],
    ):  # fmt: skip
        for order in ([-1] * 8, [far] * 8, [below] * 8, list(range(8))):
            bounds, places = tensors.integers(*first), tensors.integers(*order)
            kernels.decode(batch, plan._replace(first_part=bounds, order=places))
            batch.check_inputs()
            batch.out.check(written=False)
            batch.lse.check(written=False)


def test_bounds_of_parts_are_clamped_to_the_grid_before_they_are_subtracted(tensors, kernels) -> None:
    """A sequence whose bounds reach beyond all parts has those there are, in both kernels."""
    batch = tensors.decode([70, 33, 129, 64], heads=4, **SMALL)
    plan = batch.plan(num_splits=2)
    for first in ([-(2**31), 2, 4, 6, 8], [0, 2, 4, 6, 2**31 - 1], [-(2**31) + 2, 2, 4, 6, 2**31 - 1]):
        poison_(batch.out.tensor)
        kernels.decode(batch, plan._replace(first_part=tensors.integers(*first)))
        batch.check()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "plan", [PrefillPlan(64, 32, 2, 8), PrefillPlan(128, 64, 1), PrefillPlan(128, 128, 2)], ids=str
)
def test_every_plan_of_prefill(tensors, kernels, plan, causal) -> None:
    prefill(tensors, kernels, RAGGED, plan, causal=causal, rows_after=9, sizes=(64, 64), heads=(4, 2))


@pytest.mark.parametrize("sizes", [(192, 128), (96, 64), (32, 192)], ids=str)
def test_head_dims_of_prefill(tensors, kernels, sizes) -> None:
    prefill(tensors, kernels, [(5, 20), (70, 70), (3, 0)], sizes=sizes)


@pytest.mark.parametrize(
    "lengths", [[(3, 5)] * 70, [(130, 200), (0, 9), (300, 300), (64, 1)] * 5, [(1, 40)] * 31 + [(129, 129)]],
    ids=["70 short", "20 of a few tiles", "32 and the last is long"],
)  # fmt: skip
def test_programs_take_one_tile_after_the_other_until_all_are_done(tensors, kernels, lengths) -> None:
    """More tiles than programs, and more sequences than a warp has threads."""
    # The text in C runs as three programs, a GPU's SMs are many.
    heads = (12, 4) if tensors.device.type != "cpu" else (3, 1)
    batch = prefill(tensors, kernels, lengths, PrefillPlan(64, 32, 2), heads=heads, sizes=(64, 64))
    want = batch.out.tensor.clone()
    kernels.prefill(batch, PrefillPlan(64, 32, 2))
    assert_bitwise_equal(batch.out.tensor, want)


def test_bounds_that_cannot_be_leave_other_sequences_as_they_are(tensors, kernels) -> None:
    batch = prefill(tensors, kernels, [(5, 20), (17, 17), (40, 9)], sizes=(64, 64))
    want = batch.out.tensor.clone()
    for place, bad in ((3, 10**6), (3, 2**31 - 1)):
        held = batch.cu_seqlens_k[place].clone()
        batch.cu_seqlens_k[place] = bad
        kernels.prefill(batch)
        assert_bitwise_equal(batch.out.tensor[:22], want[:22])
        assert not bool(batch.out.tensor[22:].any())
        batch.cu_seqlens_k[place] = held
    batch.cu_seqlens_q[3] = 2**31 - 1
    kernels.prefill(batch)
    assert_bitwise_equal(batch.out.tensor, want)
    # Rows that are no sequence's, before the first too.
    for bounds in ([20, 22, 22, 40], [-7, 5, 22, 62], [0, 62, 62, 62], [62, 62, 62, 62]):
        batch.cu_seqlens_q.copy_(tensors.integers(*bounds))
        poison_(batch.out.tensor)
        kernels.prefill(batch)
        got = batch.out.tensor
        assert bool(got.isfinite().all())
        assert not bool(got[: max(bounds[0], 0)].any())
        assert not bool(got[bounds[3] :].any())


# What an int32 bound may hold: of each pair the second behind the first, the same, or before it.
ANY_BOUND = (0, 5, 29, 30, 31, 2**31 - 1, -1, -5, -(2**31))


def bounds_by_pairs(values: Sequence[int]) -> list[int]:
    """Numbers that stand one behind another in every ordered pair, each with itself too."""
    walk = [values[0]]
    for i, one in enumerate(values):
        walk += [one]
        for other in values[i + 1 :]:
            walk += [other, one]
        walk += list(values[i + 1 : i + 2])
    return walk


def test_a_difference_of_bounds_that_wraps_is_no_length(tensors, kernels) -> None:
    """2^31 - 1 to -2^31 + 2 wraps to 3 keys, which are none."""
    for causal in (True, False):
        batch = tensors.prefill([(2, 5), (2, 25)], sizes=(64, 64), causal=causal)
        batch.cu_seqlens_k.copy_(tensors.integers(2**31 - 1, -(2**31) + 2, -(2**31) + 5))
        batch.forget_inputs()
        kernels.prefill(batch)
        assert not bool(batch.out.tensor.any())
        assert bool((batch.lse.tensor == -torch.inf).all())


def test_any_two_bounds_of_keys_give_their_keys_or_none(tensors, kernels) -> None:
    """In every order: below 0, falling, equal, behind the last key, and as far apart as int32 goes."""
    bounds = bounds_by_pairs(ANY_BOUND)
    sequences = len(bounds) - 1
    assert {*pairwise(bounds)} == {(one, other) for one in ANY_BOUND for other in ANY_BOUND}
    batch = tensors.prefill([(2, 30 if i == 0 else 0) for i in range(sequences)], sizes=(64, 64), causal=False)
    batch.cu_seqlens_k.copy_(tensors.integers(*bounds))
    batch.forget_inputs()
    kernels.prefill(batch)
    batch.check_guards()
    for i, (first, last) in enumerate(pairwise(bounds)):
        out, lse = batch.out.tensor[2 * i : 2 * i + 2], batch.lse.tensor[:, 2 * i : 2 * i + 2]
        if 0 <= first < last <= 30:
            k, v = (x[first:last].double() for x in (batch.k, batch.v))
            q = batch.q[2 * i : 2 * i + 2].double()
            want = attention(q, k, v, softmax_scale=batch.scale, causal=False)
            torch.testing.assert_close(out.double(), want.out, rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(lse.double(), want.lse, rtol=1e-3, atol=1e-3)
        else:
            assert not bool(out.any()), (first, last)
            assert bool((lse == -torch.inf).all()), (first, last)


def test_any_bounds_of_queries_write_nothing_outside_the_rows_there_are(tensors, kernels) -> None:
    batch = tensors.prefill([(20, 20), (30, 40), (7, 7)], sizes=(64, 64))
    for bounds in ([0, -(2**31), 20, 57], [0, 2**31 - 1, -(2**31), 57], [2**31 - 1, -(2**31), 2**31 - 1, 0],
                   [-(2**31), -1, 2**31 - 1, 57], [57, 50, 20, 0]):  # fmt: skip
        batch.cu_seqlens_q.copy_(tensors.integers(*bounds))
        batch.forget_inputs()
        poison_(batch.out.tensor)
        kernels.prefill(batch)
        batch.check_inputs()
        batch.out.check(written=False)
        batch.lse.check(written=False)


@given(st.data())
@settings(max_examples=15)
def test_any_batch(tensors, kernels, data) -> None:
    options = {
        "heads": data.draw(st.integers(1, 70)), "seqlen_q": data.draw(st.integers(1, 4)),
        "page": data.draw(st.sampled_from([64, 128, 1, 7, 16])), "causal": data.draw(st.booleans()),
    }  # fmt: skip
    lengths = data.draw(st.lists(st.integers(0, 200), min_size=1, max_size=4))
    decode(tensors, kernels, lengths, data.draw(st.sampled_from([*PLANS.values()])), **options)


@given(st.data())
@settings(max_examples=15)
def test_any_batch_of_prefill(tensors, kernels, data) -> None:
    length = st.integers(0, 140)
    lengths = data.draw(st.lists(st.tuples(length, length), min_size=1, max_size=4))
    if sum(k for _, k in lengths) == 0 or sum(q for q, _ in lengths) == 0:
        return
    prefill(
        tensors, kernels, lengths, heads=(2, 1), causal=data.draw(st.booleans()), sizes=(64, 64),
        rows_after=data.draw(st.sampled_from([0, 5, 200])),
    )  # fmt: skip


# Of decoding, latent, rope and dtype, and of prefill: each is a handful of kernels to compile, on a GPU.
MODELS = [(512, 64, BF16), (512, 0, BF16), (64, 32, BF16), (320, 96, torch.float16), (512, 128, BF16)]
HEAD_SIZES = [(192, 128), (192, 128), (128, 128), (64, 64)]


def test_a_random_batch_is_the_definition(tensors, kernels, device, random_case) -> None:
    rng = random.Random(random_case)
    on_gpu = device.type != "cpu"
    dim_nope, dim_rope, dtype = rng.choice(MODELS) if on_gpu else (64, 32, BF16)
    heads, tokens = rng.choice([1, 3, 8, 16, 20, 64, 80, 128] if on_gpu else [1, 3, 20]), rng.choice([1, 1, 1, 2, 3, 4])
    most = rng.choice([5, 200, 5000, 20000] if on_gpu else [5, 200])
    lengths = [rng.choice([0, 1, 64, rng.randint(0, 200), rng.randint(0, most)]) for _ in range(rng.randint(1, 12))]
    how = rng.choice([*PLANS.values(), {"num_splits": rng.randint(1, 40)}, {"max_seqlen_k": max(lengths)}])
    decode(
        tensors, kernels, lengths if on_gpu else lengths[:4], how, dim_nope=dim_nope, dim_rope=dim_rope, dtype=dtype,
        heads=heads, seqlen_q=tokens, page=rng.choice([64, 64, 128, 256, 1, 16, 48, 7]), causal=rng.random() < 0.7,
        softmax_scale=rng.choice([None, None, 1.5, *([0.0, -0.03] if on_gpu else [])]), page_gap=rng.choice([0, 0, 64]),
    )  # fmt: skip


def test_a_random_prompt_is_the_definition(tensors, kernels, device, random_case) -> None:
    rng = random.Random(random_case)
    on_gpu = device.type != "cpu"
    of_kv = rng.choice([1, 2, 4])
    most = rng.choice([5, 140, 2500]) if on_gpu else 100
    lengths = [
        (rng.choice([0, 1, rng.randint(0, most)]), rng.choice([1, rng.randint(1, most)]))
        for _ in range(rng.randint(1, 6))
    ]
    prefill(
        tensors, kernels, [*lengths, (3, 5)], sizes=rng.choice(HEAD_SIZES) if on_gpu else (64, 64),
        heads=(of_kv * rng.choice([1, 2, 8]), of_kv) if on_gpu else (2, 1), causal=rng.random() < 0.7,
        rows_after=rng.choice([0, 0, 5, 200]),
        softmax_scale=rng.choice([None, None, *([0.0, -0.05] if on_gpu else [])]),
    )  # fmt: skip


def test_tiles_of_plans_are_those_that_the_kernel_takes() -> None:
    """One tile is one warpgroup's rows."""
    assert decode_tiles(16, 512, 64, None, DeviceLimits(132)).block_m == 64
