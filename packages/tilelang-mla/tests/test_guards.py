"""Does anything read or write out of place, or leave an element unwritten? On a GPU the kernels, else the reference.

Every tensor stands inside a larger buffer of NaN (of noise where it holds integers) that differs from place to place;
pages of no sequence, the tails of pages and what the outputs held are NaN too. The tests marked `sanitize` hold every
kernel and every branch of the plans, for compute-sanitizer.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from kernel_reference.checks import validate_values
from kernel_reference.testing.guards import assert_bitwise_equal
from tilelang_mla import DecodeTiles, PrefillPlan, flash_mla_varlen_func, flash_mla_with_kvcache
from tilelang_mla.schedule import DecodePlan

sanitize = pytest.mark.sanitize
gpu = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16
# Pages of whole blocks are loaded by TMA, others row by row.
PAGES = (64, 128, 16, 1)
SMALL = {"dim_nope": 64, "dim_rope": 32}
MIXED = [0, 1, 63, 64, 65, 200]
RAGGED = [(5, 20), (17, 17), (40, 9), (0, 33), (7, 0), (0, 0), (1, 130), (128, 128), (65, 200)]


@sanitize
@pytest.mark.parametrize("how", [{"num_splits": 1}, {"num_splits": 3}, {"cores": 8}], ids=str)
@pytest.mark.parametrize("page", PAGES)
def test_decoding_touches_its_rows_and_nothing_else(tensors, page, how) -> None:
    """One tile of rows and two, the second of which is not full."""
    for heads, tokens, dtype in ((16, 2, BF16), (40, 2, FP16)):
        batch = tensors.decode(MIXED, heads=heads, seqlen_q=tokens, page=page, dtype=dtype, page_gap=64, **SMALL)
        batch.run(plan=batch.plan(**how))
        batch.check()


@sanitize
@pytest.mark.parametrize("page", [64, 16])
def test_decoding_over_latents_of_a_model_touches_its_rows_and_nothing_else(tensors, page) -> None:
    for how in ({"num_splits": 2}, {}):
        batch = tensors.decode(MIXED, heads=16, page=page)
        batch.run(plan=batch.plan(**how))
        batch.check()


@sanitize
@pytest.mark.parametrize(
    "tiles", [DecodeTiles(64, 32, 3, 2), DecodeTiles(64, 64, 1, 1), DecodeTiles(64, 128, 2, 2)], ids=str
)
def test_other_blocks_than_those_of_the_plan(tensors, tiles) -> None:
    for page in (128, 16):
        batch = tensors.decode(MIXED, heads=4, page=page, **SMALL)
        first = torch.arange(len(MIXED) + 1, device=batch.device, dtype=torch.int32) * tiles.num_splits
        order = torch.arange(tiles.num_parts(len(MIXED)), device=batch.device, dtype=torch.int32)
        batch.run(plan=DecodePlan(tiles, first, order))
        batch.check()


@sanitize
@pytest.mark.parametrize(
    "plan", [None, PrefillPlan(64, 32, 1), PrefillPlan(128, 64, 2), PrefillPlan(64, 128, 2, 3)], ids=str
)
def test_prefill_touches_its_rows_and_nothing_else(tensors, plan) -> None:
    """The last size's output has no room in the shared memory of q."""
    for causal, sizes, dtype in ((True, (192, 128), BF16), (False, (64, 64), FP16), (True, (32, 128), BF16)):
        batch = tensors.prefill(RAGGED, causal=causal, sizes=sizes, dtype=dtype, heads=(4, 2), rows_after=70)
        batch.run(plan=plan)
        batch.check()


@pytest.mark.parametrize("page", PAGES)
def test_pages_outside_the_pool_read_as_zeros(tensors, page) -> None:
    """Those below it and past it, under weights that are not 0."""
    length = 3 * max(page, 64)
    batch = tensors.decode([length, 70], heads=4, page=page, **SMALL)
    columns = -(-length // page)
    wrong = {0: -1, columns // 2: batch.kv.shape[0], columns - 1: 2**31 - 1}
    for column, number in wrong.items():
        batch.block_table[0, column] = number
        batch.keys[column * page : min((column + 1) * page, length)] = 0
    batch.forget_inputs()
    for how in ({"num_splits": 1}, {"num_splits": 2}):
        with validate_values(False):
            batch.run(plan=batch.plan(**how))
        batch.check()


def test_no_lse_is_written_where_none_is_asked_for(tensors) -> None:
    batch = tensors.decode(MIXED, heads=4, **SMALL)
    for how in ({"num_splits": 1}, {"num_splits": 2}):
        with_lse = batch.run(out=None, plan=batch.plan(**how)).out
        assert_bitwise_equal(batch.run(out=None, return_lse=False, plan=batch.plan(**how)), with_lse)
    batch = tensors.prefill(RAGGED)
    assert_bitwise_equal(batch.run(out=None, return_lse=False), batch.run(out=None).out)


def test_queries_and_outputs_that_are_no_rows_one_behind_another(tensors) -> None:
    """What a TMA descriptor cannot address is copied: heads of a wider tensor, an output of odd strides."""
    batch = tensors.decode(MIXED, heads=4, seqlen_q=2, **SMALL)
    want = batch.run(out=None, plan=batch.plan(num_splits=2)).out
    wide = torch.zeros(len(MIXED), 2, 8, 96, dtype=BF16, device=batch.device)
    wide[:, :, :4] = batch.q
    narrow = torch.full((len(MIXED), 2, 4, 67), 7.0, dtype=BF16, device=batch.device)
    out = flash_mla_with_kvcache(wide[:, :, :4], *batch.given[1:], out=narrow[..., 1:65], plan=batch.plan(num_splits=2))
    assert_bitwise_equal(out, want)
    assert bool((narrow[..., 0] == 7).all())
    assert bool((narrow[..., 65:] == 7).all())
    batch = tensors.prefill(RAGGED, sizes=(64, 64))
    want = batch.run(out=None).out
    narrow = torch.full((*want.shape[:2], 67), 7.0, dtype=BF16, device=batch.device)
    assert_bitwise_equal(flash_mla_varlen_func(*batch.given, out=narrow[..., 1:65]), want)
    assert bool((narrow[..., 0] == 7).all())
    assert bool((narrow[..., 65:] == 7).all())


# Of launches


@gpu
def test_addresses_that_the_copy_engine_cannot_take_are_refused_by_name(tensors) -> None:
    batch = tensors.decode([70, 3], heads=4, **SMALL)
    for place, name in ((0, "q"), (1, "kv")):
        held = batch.given[place]
        room = torch.empty(held.numel() + 8, dtype=held.dtype, device=held.device)
        moved = room[1 : held.numel() + 1].view(held.shape)
        given = list(batch.given)
        given[place] = moved.copy_(held)
        with pytest.raises(ValueError, match=rf"^{name} must be at an address that is a multiple of 16"):
            flash_mla_with_kvcache(*given)


@gpu
def test_blocks_that_do_not_fit_in_shared_memory_are_refused_by_name(tensors) -> None:
    batch = tensors.decode([70], heads=4)
    plan = DecodePlan(DecodeTiles(64, 128, 4, 1), tensors.integers(0, 1), tensors.integers(0))
    with pytest.raises(ValueError, match=r"^plan must be of blocks that fit in"):
        batch.run(plan=plan)


@gpu
def test_what_is_made_ready_keeps_no_tensor_of_its_first_call_alive(tensors) -> None:
    """It is kept for as long as the process lives, and a call's tensors may be gigabytes."""
    from tilelang_mla import launch
    from tilelang_mla.arguments import DecodeOptions, DecodeTensors, check_decode

    def call() -> tuple[Any, list[weakref.ref[torch.Tensor]]]:
        batch = tensors.decode([70, 3], heads=4, **SMALL)
        given = batch.op_arguments(batch.plan(num_splits=2))
        first = DecodeTensors(*given[:8])
        problem, plan = check_decode(first, DecodeOptions(*given[8:]))
        run = launch.prepare_decode(problem, plan, first)
        run(*given[:8])
        return run, [weakref.ref(tensor) for tensor in given[:8] if tensor is not None]

    run, remembered = call()
    gc.collect()
    assert [alive() for alive in remembered if alive() is not None] == []
    del run
