"""Does the kernel for sm_90 do what it should, warp by warp? On a CPU, with its partitions as threads.

``kernel_reference.testing.gluon`` runs the kernel's own text: its barriers, its copies box by box, its tiles and masks.
What only hardware tells, fences and registers among it, is for the tests on a GPU and for test_codegen.py.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernel_reference.testing import contract, gluon
from kernel_reference.testing.gluon.memory import Layout, Shared
from kernel_reference.testing.gluon.values import DType, Value
from prefix_prefill import widening
from prefix_prefill.hopper import launch as launch_hopper
from prefix_prefill.merging import launch as merging
from prefix_prefill.plan import PrefillPlan

pytestmark = pytest.mark.simulated

BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Less than a box, than a tile, several tiles, none, decoding.
LENGTHS = [(30, 5), (3, 0), (0, 40), (200, 1), (128, 9)]
# Two tiles of rows for each kv head; more tiles of cached keys than two rings have stages, and new ones after them.
LONG = [(460, 40)]
# As few as show tiles whose heads are not all there, of one token and of several.
FEW = [(30, 2), (0, 1), (70, 1)]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, hopper: SimpleNamespace, device: torch.device) -> None:
    """The launch of the kernel for sm_90, without a GPU."""
    if device.type != "cpu":
        pytest.skip("the kernel itself runs here")

    monkeypatch.setattr(launch_hopper, "TmaLaunch", gluon.tma_launch(hopper))
    monkeypatch.setattr(merging, "Launch", gluon.tma_launch(hopper))
    monkeypatch.setattr(widening, "Launch", gluon.tma_launch(hopper))
    # To start a program costs as much here as some rows.
    monkeypatch.setattr(merging, "_MERGING", 2)


def plan(block_m: int = 128, block_n: int = 128, num_splits: int = 1, num_stages: int = 2) -> PrefillPlan:
    """Of few programs, each with several items: to start one costs as much here as a tile of keys."""
    return PrefillPlan(block_m, block_n, num_splits, 4, num_stages, hopper=True, programs=4)


CASES: dict[str, tuple[PrefillPlan, dict[str, Any]]] = {
    "pages of 16": (plan(), {"heads": (8, 2), "head_dim": 128, "cached": True}),
    "pages of 64, new keys": (plan(), {"heads": (8, 2), "head_dim": 128, "page": 64}),
    "pages of 24": (plan(), {"heads": (8, 2), "head_dim": 64, "page": 24, "window": (50, -1)}),
    "pages of 8, 8 bits": (replace(plan(64, 64), loading=72), {
        "heads": (4, 2), "head_dim": 64, "page": 8, "cache_dtype": E4M3, "cached": True, "k_scale": "number",
        "v_scale": "number",
    }),
    "one consumer": (plan(64), {"heads": (4, 1), "head_dim": 64, "dtype": FP16, "page": 544}),
    "narrow tiles": (plan(128, 64, 1, 3), {"heads": (3, 1), "head_dim": 64, "page_layout": "HND", "page": 48}),
    "split": (plan(128, 64, 3), {"heads": (6, 2), "head_dim": 64, "sinks": True}),
    "a window": (plan(), {"heads": (8, 1), "head_dim": 64, "window": (50, -1), "sinks": True}),
    "a window that begins among new keys": (plan(64, 64), {"heads": (8, 1), "head_dim": 64, "window": (66, -1),
                                                           "lengths": [(130, 80)]}),
    "a window, cached": (plan(64, 64), {"heads": (7, 1), "head_dim": 64, "window": (31, -1), "cached": True}),
    "not causal": (plan(64, 64), {"heads": (4, 2), "head_dim": 64, "causal": False, "window": (40, 7)}),
    "head size 72": (plan(64, 64, 1, 3), {"heads": (4, 2), "head_dim": 72, "window": (50, -1)}),
    "head size 80": (plan(), {"heads": (4, 2), "head_dim": 80, "cached": True}),
    "head size 192, split": (plan(128, 128, 3), {"heads": (4, 2), "head_dim": 192, "sinks": True, "page": 128}),
    "head size 192, a window": (plan(), {"heads": (4, 2), "head_dim": 192, "window": (90, -1), "cached": True}),
    "many boxes": (plan(128, 128, 3), {"heads": (4, 2), "head_dim": 64, "page": 8, "cached": True, "sinks": True}),
    "head size 192, pages of 8": (plan(128, 128, 3), {"heads": (4, 2), "head_dim": 192, "page": 8, "cached": True}),
    "head size 160, pages of 1": (plan(), {"heads": (4, 2), "head_dim": 160, "page": 1, "window": (70, -1),
                                           "lengths": FEW}),
    "head size 256": (plan(128, 64), {"heads": (2, 2), "head_dim": 256}),
    "head size 208, two programs an SM": (replace(plan(64, 32), loading=40, per_core=2), {
        "heads": (4, 2), "head_dim": 208, "window": (50, -1), "page": 24, "cached": True}),
    "head size 512": (plan(64, 32), {"heads": (4, 2), "head_dim": 512, "cached": True, "page": 64}),
    "head size 320, split": (plan(64, 32, 3), {"heads": (4, 2), "head_dim": 320, "sinks": True, "window": (50, -1)}),
    "keys of 64, values of 272": (plan(64, 64), {"heads": (4, 2), "head_dim": 64, "head_dim_v": 272}),
    "keys of 288, values of 64": (plan(64, 64), {"heads": (4, 2), "head_dim": 288, "head_dim_v": 64}),
    "keys of 192, values of 128": (plan(128, 64), {"heads": (4, 2), "head_dim": 192, "head_dim_v": 128}),
    "keys of 64, values of 80": (plan(64, 64, 3), {"heads": (4, 2), "head_dim": 64, "head_dim_v": 80, "cached": True,
                                                   "window": (50, -1)}),
    "slopes": (plan(128, 64), {"heads": (4, 2), "head_dim": 64, "alibi": True}),
    "capped": (plan(64), {"heads": (4, 2), "head_dim": 64, "softcap": 5.0, "softmax_scale": 3.0, "cached": True}),
    "capped, small scores": (plan(), {"heads": (4, 2), "head_dim": 64, "softcap": 30.0, "window": (150, -1)}),
    "capped, 8 bits, new keys": (plan(64, 64, 3), {"heads": (4, 2), "head_dim": 64, "cache_dtype": E4M3,
                                                   "softcap": 30.0, "k_scale": -0.5, "v_scale": "tokens"}),
    "capped, no lse": (plan(), {"heads": (4, 2), "head_dim": 64, "softcap": 30.0, "sinks": True, "lse": False}),
    "capped, no lse, a window, split": (replace(plan(64, 64, 3), capping=4), {
        "heads": (4, 2), "head_dim": 96, "softcap": 50.0, "window": (50, -1), "lse": False}),
    "capped, no lse, drafts": (plan(64, 64), {"heads": (4, 1), "head_dim": 64, "softcap": 5.0, "softmax_scale": 3.0,
                                              "draft_mask": True, "cached": True, "lse": False}),
    "more heads than rows": (plan(64), {"heads": (70, 1), "head_dim": 64, "lengths": FEW}),
    "new keys, more registers": (replace(plan(), loading=40), {"heads": (8, 2), "head_dim": 128, "window": (90, -1)}),
    "pages of 1": (plan(), {"heads": (8, 2), "head_dim": 128, "page": 1, "cached": True}),
    "pages of 1, decoding": (plan(64, 64, 3), {"heads": (8, 2), "head_dim": 128, "page": 1, "cached": True,
                                               "lengths": FEW}),
    "pages of 12, new keys, a window": (plan(64, 64, 2), {"heads": (4, 2), "head_dim": 80, "page": 12,
                                                          "window": (50, -1), "page_layout": "HND"}),
    "pages of 1, new keys": (plan(128, 64, 0), {"heads": (4, 2), "head_dim": 96, "page": 1, "sinks": True}),
    "x-packed": (plan(num_splits=0), {"heads": (8, 2), "head_dim": 128, "page_layout": "x-packed", "cached": True,
                                      "page": 128, "window": (90, -1)}),
    "x-packed, new keys": (plan(128, 64, 2), {"heads": (4, 2), "head_dim": 64, "page_layout": "x-packed", "page": 48,
                                              "dtype": FP16, "sinks": True}),
    "8 bits": (plan(128, 64, 1, 3), {"heads": (8, 2), "head_dim": 128, "cache_dtype": E4M3, "cached": True,
                                     "k_scale": "number", "v_scale": "number"}),
    "8 bits, wide tiles": (plan(), {"heads": (8, 2), "head_dim": 128, "cache_dtype": E4M3, "cached": True,
                                    "k_scale": -0.5, "v_scale": "heads", "page": 64}),
    "8 bits, widened before": (replace(plan(), widened=1), {
        "heads": (8, 2), "head_dim": 128, "cache_dtype": E4M3, "cached": True, "k_scale": "heads", "v_scale": "number",
        "lse": True}),
    "8 bits, widened before, in pieces": (replace(plan(num_splits=0), widened=1, q_in_registers=1), {
        "heads": (4, 2), "head_dim": 96, "cache_dtype": E5M2, "cached": True, "k_scale": -0.5, "v_scale": "heads",
        "page": 24, "softcap": 30.0, "sinks": True}),
    "8-bit queries": (plan(128, 128, 1, 3), {"heads": (8, 2), "head_dim": 128, "cache_dtype": E4M3, "cached": True,
                                             "k_scale": -0.5, "v_scale": "heads", "quantize_q": True}),
    "8-bit queries, in registers": (replace(plan(), q_in_registers=1), {
        "heads": (8, 2), "head_dim": 96, "cache_dtype": E4M3, "cached": True, "k_scale": "heads", "v_scale": "number",
        "quantize_q": True, "window": (90, -1), "dtype": FP16}),
    "8 bits, decoding": (replace(plan(64), loading=72), {"heads": (8, 2), "head_dim": 128, "cache_dtype": E4M3,
                                                         "cached": True, "v_scale": "heads", "lengths": FEW}),
    "8 bits, queries in registers": (replace(plan(), q_in_registers=1), {
        "heads": (8, 2), "head_dim": 96, "cache_dtype": E4M3, "cached": True, "k_scale": "number",
        "v_scale": "number"}),
    "8-bit queries, split": (plan(64, 128, 3), {"heads": (4, 2), "head_dim": 64, "cache_dtype": E4M3, "cached": True,
                                                "window": (90, -1), "sinks": True, "softcap": 8.0, "k_scale": "heads",
                                                "v_scale": "number", "quantize_q": True}),
    "8 bits, new keys": (plan(128, 64, 1, 3), {"heads": (4, 2), "head_dim": 64, "cache_dtype": E4M3, "window": (90, -1),
                                            "k_scale": "heads", "v_scale": "heads"}),
    "8 bits, one consumer": (plan(64, 64, 2), {"heads": (4, 2), "head_dim": 64, "cache_dtype": E5M2, "dtype": FP16,
                                                "k_scale": "tensor", "v_scale": "tensor"}),
    "8 bits, head size 96": (plan(128, 64, 1, 3), {"heads": (4, 2), "head_dim": 96, "cache_dtype": E4M3, "page": 24,
                                                   "k_scale": "number", "v_scale": "heads"}),
    "8 bits, head size 80": (plan(64), {"heads": (4, 2), "head_dim": 80, "cache_dtype": E5M2, "cached": True,
                                        "k_scale": "number", "v_scale": "heads"}),
    "8-bit queries, scales of tokens": (plan(128, 64), {"heads": (8, 2), "head_dim": 128, "cache_dtype": E4M3,
                                                        "cached": True, "k_scale": "tokens", "v_scale": "tokens",
                                                        "window": (90, -1), "quantize_q": True}),
    "8 bits, scales of tokens, new keys": (plan(128, 64, 1, 3), {"heads": (4, 2), "head_dim": 64, "cache_dtype": E5M2,
                                                                 "k_scale": "tokens", "v_scale": "tokens"}),
    "8 bits, scales of tokens for keys": (plan(64, 64, 3), {"heads": (4, 1), "head_dim": 64, "cache_dtype": E4M3,
                                                            "k_scale": "tokens", "v_scale": "heads", "softcap": 8.0}),
    "8 bits, scales of tokens for values": (plan(64), {"heads": (4, 2), "head_dim": 80, "cache_dtype": E4M3, "page": 24,
                                                       "cached": True, "k_scale": "number", "v_scale": "tokens"}),
    "an output of 8 bits": (plan(64), {"heads": (4, 2), "head_dim": 64, "out_scale": 0.25}),
    "a scale of zero": (plan(), {"heads": (4, 2), "head_dim": 64, "softmax_scale": 0.0}),
    "a scale of zero, 8 bits": (plan(), {"heads": (4, 2), "head_dim": 64, "softmax_scale": 0.0, "cache_dtype": E4M3,
                                         "cached": True, "v_scale": "heads"}),
    "a scale of zero, slopes": (plan(128, 64), {"heads": (4, 2), "head_dim": 64, "softmax_scale": 0.0, "alibi": True}),
    "a scale of zero, slopes, split": (plan(64, 64, 3), {"heads": (4, 2), "head_dim": 64, "softmax_scale": 0.0,
                                                            "alibi": True, "cached": True, "sinks": True}),
    # More pieces than are merged at a time.
    "a tiny scale, slopes": (plan(64, 64, 17), {"heads": (4, 2), "head_dim": 64, "softmax_scale": 1e-41,
                                               "alibi": True, "lengths": FEW}),
    "tree drafts, new keys, a window": (plan(64, 64), {"heads": (4, 1), "head_dim": 64, "draft_mask": True,
                                                       "window": (20, -1)}),
    "decoding left": (plan(64), {"heads": (4, 2), "head_dim": 64, "skip_decode": True}),
}  # fmt: skip


@pytest.mark.parametrize(("chosen", "options"), CASES.values(), ids=CASES)
def test_the_kernel_for_sm_90_is_the_attention(tensors, kernels, chosen, options) -> None:
    batch = tensors.batch(**{"lengths": LENGTHS, "rows_after": 3, **options})
    kernels.prefill(batch, chosen)
    batch.check(most=90)


@pytest.mark.parametrize("box", [16, 32, 64])
def test_boxes_of_packed_values_are_a_tile_as_they_are_swizzled(hopper, box: int) -> None:
    values = torch.arange(2 * 128 * 64, dtype=torch.int16).reshape(2, 128, 64)
    memory = Shared(torch.zeros(values.numel(), dtype=torch.int16), DType(torch.int16), values.shape, Layout())
    ring = hopper.Ring((memory,), None, SimpleNamespace(shape=[2]), None)
    packed = hopper.packed_ring(ring, 64, True, SimpleNamespace(BLOCK_N=128, BOX=box))
    for i, part in enumerate(values.flatten(0, 1).split(box)):
        packed.boxes[0].index(i).store(Value(part.T))
    for stage in range(2):
        assert torch.equal(packed.tiles[0].index(stage).load().data, values[stage])


@pytest.mark.parametrize("share", [0.07, 0.4, 1.0])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("softcap", "lse"), [(10.0, True), (10.0, False), (50.0, False)])
def test_scores_of_either_sign_are_capped_whatever_their_share_of_the_cap(
    tensors, kernels, sign, share, softcap, lse
) -> None:
    """Small ones by a series, smaller ones by its first terms, which say nothing of larger ones."""
    batch = tensors.batch(
        [(130, 30)],
        heads=(2, 1),
        head_dim=64,
        softcap=softcap,
        softmax_scale=share * softcap / 40,
        cached=True,
        lse=lse,
    )
    batch.q.abs_().mul_(sign)
    for keys in (batch.k_cache, batch.keys):
        keys.abs_()
    batch.forget_inputs()
    # A cap of 10 without the longer series.
    for capping in (3 if softcap == 50 else 2, 4):
        kernels.prefill(batch, replace(plan(64), capping=capping))
        batch.check()


@pytest.mark.parametrize("share", [0.199, 0.25, 0.79, 0.95, 4.0])
def test_capped_scores_at_the_limits_of_each_series_weigh_as_by_the_cap_itself(tensors, kernels, share) -> None:
    """The largest scores are ``share`` of the cap, in the tile that all rows see and in the one that is masked, which
    no series takes. Values tell the two apart: were a series wrong at its end, weights of one would be too large.

    Beside what a running max gives: of weights that are all the same, rounding is no chance.
    """
    size, softcap = 64, 50.0
    batch = tensors.batch(
        [(130, 30)], heads=(2, 1), head_dim=size, softcap=softcap, softmax_scale=share * softcap / size, cached=True,
        lse=False,
    )  # fmt: skip
    batch.q.fill_(1.0)
    for keys in (batch.k_cache, batch.keys):
        keys.copy_(keys[..., :1].clamp(-1, 1).expand_as(keys))
    batch.v_cache.mul_(0).add_(1)
    batch.v_cache[batch.block_table[0, : 128 // 16].long()] = 0
    batch.forget_inputs()
    outs = []
    for chosen in (replace(plan(64), capping=0), plan(64), replace(plan(64), capping=4)):
        kernels.prefill(batch, chosen)
        outs.append(batch.out.tensor.clone())
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=0.01, atol=0)


def test_a_max_is_followed_wherever_scores_outgrow_it(tensors, kernels) -> None:
    """Of large heads within a factor of 256 it need not be. Of each head scores grow from tile to tile by as much."""
    batch = tensors.batch([(460, 40)], heads=(4, 1), head_dim=256, softmax_scale=1 / 256, cached=True)
    batch.q.copy_(torch.tensor([0.25, 1.0, 8.0, -8.0])[:, None].expand_as(batch.q))
    tiles = torch.tensor([0.0, 4.0, 8.0, 12.0, 4.0, 20.0, 22.0, 21.0], dtype=batch.keys.dtype)
    grown = tiles.repeat_interleave(64)[:500, None, None]
    batch.keys.copy_(grown.expand_as(batch.keys))
    position = torch.arange(500)
    pages = batch.block_table[0, position // batch.page].long()
    batch.k_cache[pages, position % batch.page] = batch.keys.to(batch.k_cache.dtype)
    batch.forget_inputs()
    kernels.prefill(batch, plan(128, 64, 3))
    batch.check()


def test_tree_drafts_are_masked_in_every_tile_that_holds_new_tokens(tensors, kernels) -> None:
    for causal in (True, False):
        # Bits of tokens before a token and after it.
        masks = torch.randint(2**62, (62,)) | 1
        batch = tensors.batch([(90, 60), (0, 2)], heads=(2, 1), draft_mask=masks, cached=True, causal=causal)
        kernels.prefill(batch, plan(128, 64))
        batch.check()


# Three pieces of a prefix, of programs more than tiles; rows of the last level in tiles of their own, or in parts too.
CASCADES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "a prefix in pieces": ((0, 1), {"sinks": True}),
    "all in pieces": ((2, 0), {"heads": (4, 1), "rows_after": 2, "softcap": 4.0}),
    "8 bits": ((0, 2), {"cache_dtype": E4M3, "k_scale": 0.25, "v_scale": -0.5, "sinks": True}),
    "heads of 96, drafts": ((1, 1), {"heads": (4, 1), "head_dim": 96, "draft": True}),
}


@pytest.mark.parametrize(("splits", "options"), CASCADES.values(), ids=CASCADES)
def test_the_kernel_for_sm_90_takes_the_levels_of_a_cascade(tensors, splits, options) -> None:
    cuts = [([30, 9], [2100, 70]), ([1, 20, 9, 9], [150, 20, 1300, 9])]
    batch = tensors.cascade(cuts, **{"heads": (8, 2), "head_dim": 64, "page": 16, **options})
    batch.attend(*(replace(plan(128, 64, number), programs=7) for number in splits))
    batch.check()


def test_queries_of_any_size_attend_to_a_cache_of_8_bits(tensors, kernels) -> None:
    batch = tensors.batch(LENGTHS, heads=(8, 2), head_dim=64, cache_dtype=E4M3, cached=True, k_scale="number")
    # Powers of two change no digit; their scores are all alike, or one is all that counts.
    sizes = torch.exp2(torch.randint(-90, 20, batch.q.shape[:2], device=batch.q.device).float())
    batch.q.mul_(sizes[:, :, None])
    batch.forget_inputs()
    kernels.prefill(batch, plan())
    batch.check(most=4)


@pytest.mark.parametrize("kind", ["8 bits, new keys", "8 bits, one consumer", "narrow tiles"])
def test_new_keys_wait_until_the_cached_ones_before_them_are_used(tensors, kernels, kind) -> None:
    chosen, options = CASES[kind]
    for _ in range(4):
        batch = tensors.batch(LONG, **{**options, "window": (-1, -1)})
        kernels.prefill(batch, chosen)
        batch.check(most=4)


@pytest.mark.parametrize(
    "options",
    [{}, {"cache_dtype": E4M3, "k_scale": "number", "v_scale": "heads", "window": (90, -1)}],
    ids=["16 bits", "8 bits, a window, new keys"],
)
def test_one_program_takes_more_items_than_its_table_holds(tensors, kernels, options) -> None:
    """Barriers go on counting from tile to tile, and from one table to the next."""
    batch = tensors.batch([(50, 3), (0, 1), (129, 2)] * 4, heads=(4, 2), head_dim=64, **options)
    kernels.prefill(batch, replace(plan(128, 64, 1, 3), programs=1))
    batch.check(most=4)


@pytest.mark.parametrize("programs", [3, 5])
def test_programs_share_a_batch_by_keys_where_lengths_differ(tensors, kernels, programs) -> None:
    batch = tensors.batch([(30, 1), (3500, 2), (0, 40), (700, 1)], heads=(2, 1), head_dim=64, sinks=True, cached=True)
    kernels.prefill(batch, replace(plan(128, 128, 0), programs=programs))
    batch.check(most=4)


# The tensors of a call, by their place, and the dimensions in which elements are laid 2^31 apart.
FAR = {
    "q": [(0, 0), (0, 1), (0, 2)], "block table": [(5, 0)], "scales of heads": [(10, 0), (11, 0)],
    "out": [(13, 0), (13, 1), (13, 2)], "lse": [(14, 0), (14, 1)],
}  # fmt: skip


@pytest.mark.parametrize("places", FAR.values(), ids=FAR)
def test_the_kernel_for_sm_90_follows_elements_more_than_2_to_the_31_apart(tensors, kernels, places) -> None:
    """Three or more of each, so that strides fit in 32 bits and products of them do not."""
    batch = tensors.batch(
        [(20, 3), (3, 2), (0, 1)], heads=(6, 3), cache_dtype=E4M3, k_scale="heads", v_scale="heads", cached=True
    )

    def attend(*given: Any) -> tuple[()]:
        batch.attend(given, plan(64, 64))
        return ()

    for place, dim in places:
        try:
            contract.check_int64_offsets(attend, batch.tensors, {place: dim})
        except IndexError as error:
            raise AssertionError(f"dimension {dim} of argument {place}: {error}") from error
        except RuntimeError as error:
            # 8 GiB of addresses and more, of which next to nothing is touched; a small machine refuses even that.
            if "allocate memory" not in str(error):
                raise
            pytest.skip("this machine does not give out so many addresses")
