"""Does the kernel for sm_90 do what it should, warp by warp? On a CPU, with its partitions as threads.

``kernel_reference.testing.gluon`` runs the kernel's own text: its barriers, its copies box by box, its tiles and masks.
What only hardware tells, swizzles, fences and registers among it, is for the tests on a GPU and for test_codegen.py.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from blocksparse_attn import AttentionPlan, launch
from kernel_reference.testing import contract, gluon
from kernel_reference.testing.guards import assert_bitwise_equal

BF16, FP16 = torch.bfloat16, torch.float16
pytestmark = pytest.mark.simulated

# Less than a block, than a tile, several tiles, none, decoding, a tile that begins within a block.
LENGTHS = [(30, 5), (3, 0), (0, 140), (200, 1), (70, 70)]


@pytest.fixture(scope="module")
def shadows() -> list[ModuleType]:
    modules = (
        "tiles",
        "softmax",
        "hopper.memory",
        "hopper.pieces",
        "hopper.walks",
        "hopper.producers",
        "hopper.softmax",
        "hopper.consumers",
        "hopper.kernel",
    )
    return gluon.shadow(*(f"blocksparse_attn.kernels.{name}" for name in modules))


@pytest.fixture(scope="module")
def hopper(shadows: list[ModuleType]) -> ModuleType:
    return shadows[-1]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, hopper: ModuleType, device: torch.device) -> None:
    """The launch of the kernel for sm_90, without a GPU."""
    if device.type != "cpu":
        # It runs there itself.
        return
    monkeypatch.setattr(launch, "TmaLaunch", gluon.tma_launch(hopper))


def plan(block_n: int = 128, num_splits: int = 1, num_stages: int = 2) -> AttentionPlan:
    return AttentionPlan(128, block_n, num_splits, 4, num_stages, hopper=True)


CASES: dict[str, tuple[AttentionPlan, dict[str, Any]]] = {
    "one block at a time": (plan(64), {"heads": (2, 1), "head_dim": 64}),
    "two blocks at a time": (plan(), {"heads": (2, 1), "head_dim": 128}),
    "three stages": (plan(64, 1, 3), {"heads": (2, 2), "head_dim": 64, "dtype": FP16}),
    "in parts": (plan(64, 3), {"heads": (2, 1), "head_dim": 64, "sinks": True}),
    "pages of 16": (plan(), {"heads": (2, 1), "head_dim": 64, "kind": "paged", "page": 16}),
    "pages of 48": (plan(64), {"heads": (1, 1), "head_dim": 64, "kind": "paged", "page": 48, "page_layout": "HND"}),
    "pages of 128": (plan(), {"heads": (1, 1), "head_dim": 64, "kind": "paged", "page": 128}),
    "padded": (plan(), {"heads": (1, 1), "head_dim": 64, "kind": "padded", "side": "both"}),
    "rows of 128": (plan(), {"heads": (1, 1), "head_dim": 64, "blocks": (128, 64)}),
    "columns of 128": (plan(), {"heads": (1, 1), "head_dim": 64, "blocks": (64, 128)}),
    "columns of 192": (plan(64), {"heads": (1, 1), "head_dim": 64, "blocks": (64, 192)}),
    "values wider than keys": (plan(), {"heads": (1, 1), "head_dim": 64, "head_dim_v": 96}),
    "keys wider than values": (plan(64), {"heads": (1, 1), "head_dim": 192, "head_dim_v": 64}),
    "head size 80": (plan(), {"heads": (1, 1), "head_dim": 80}),
    "head size 256": (plan(64), {"heads": (1, 1), "head_dim": 256}),
    "head size 96": (plan(64), {"heads": (1, 1), "head_dim": 96, "kind": "paged", "page": 8}),
    "head sizes 72 and 160": (plan(64), {"heads": (1, 1), "head_dim": 72, "head_dim_v": 160}),
    "head size 192, in parts": (plan(64, 2), {"heads": (1, 1), "head_dim": 192}),
    "blocks of 32, products in turn": (
        replace(plan(), in_turn=True), {"heads": (1, 1), "head_dim": 64, "blocks": (32, 32)},
    ),
    "tiles as programs come free, in parts": (
        replace(plan(128, 2), as_free=True), {"heads": (2, 1), "head_dim": 80, "kind": "paged", "page": 16},
    ),
    "blocks of 16, in parts": (plan(64, 2), {"heads": (1, 1), "head_dim": 64, "blocks": (16, 16)}),
    "blocks of 48 and 96": (plan(), {"heads": (1, 1), "head_dim": 64, "blocks": (48, 96), "one_layout": True}),
    "blocks of 48, in parts, a window": (
        plan(64, 3), {"heads": (1, 1), "head_dim": 64, "blocks": (48, 48), "window": (70, -1)},
    ),
    "blocks of 16 keys, pages of 24": (
        plan(64), {"heads": (1, 1), "head_dim": 64, "blocks": (64, 16), "kind": "paged", "page": 24},
    ),
    "a window": (plan(), {"heads": (1, 1), "head_dim": 64, "window": (50, -1), "kind": "paged"}),
    "a window, blocks of 16": (
        plan(64), {"heads": (1, 1), "head_dim": 80, "blocks": (16, 32), "window": (9, -1), "softcap": 3.0},
    ),
    "capped": (plan(), {"heads": (2, 1), "head_dim": 64, "softcap": 5.0, "sinks": True}),
    "a scale of zero": (plan(), {"heads": (1, 1), "head_dim": 64, "softmax_scale": 0.0}),
    "heads two by two": (replace(plan(), heads_together=2), {"heads": (4, 2), "head_dim": 64}),
    "heads one by one, in parts": (replace(plan(64, 2), heads_together=1), {"heads": (2, 1), "head_dim": 64}),
    "one layout": (plan(), {"heads": (3, 1), "head_dim": 64, "one_layout": True, "lse": False}),
}  # fmt: skip


@pytest.mark.parametrize(("chosen", "options"), CASES.values(), ids=CASES)
def test_the_kernel_for_sm_90_matches_the_oracle(tensors, kernels, chosen, options) -> None:
    options = {"blocks": (64, 64), "rows_after": 0 if options.get("kind") == "padded" else 3, **options}
    batch = tensors.batch(LENGTHS, **options)
    kernels.attend(batch, chosen)
    batch.check(most=4)


@pytest.mark.parametrize("block_n", [64, 128])
def test_columns_may_be_in_any_order(tensors, kernels, block_n) -> None:
    batch = tensors.batch([(300, 100)], heads=(2, 1), head_dim=64, blocks=(64, 64))
    crow, col = batch.layout.crow, batch.layout.col
    for head in range(2):
        for row in range(crow.shape[1] - 1):
            own = slice(int(crow[head, row]), int(crow[head, row + 1]))
            col[head, own] = col[head, own].flip(0)
    kernels.attend(batch, plan(block_n))
    batch.check(most=4)


def test_the_past_is_rescaled_where_scores_are_far_apart(tensors, kernels) -> None:
    mask = torch.ones(1, 5, 5, dtype=torch.bool)
    options = {"heads": (1, 1), "head_dim": 80, "blocks": (64, 64), "mask": mask, "softmax_scale": 1.0}
    batch = tensors.batch([(0, 300)], **options)
    kernels.attend(batch, replace(plan(64), slack=8))
    batch.check(most=30)


def test_columns_out_of_bounds_are_skipped(tensors, kernels) -> None:
    """Past the diagonal, past the last, and negative ones."""
    mask = torch.eye(4, dtype=torch.bool).expand(2, 4, 4)
    batch = tensors.batch([(100, 156)], heads=(2, 1), head_dim=64, blocks=(64, 64), mask=mask)
    crow, col = batch.layout.crow, batch.layout.col
    wide = torch.tensor([2**31 - 1, -1, 0, -(2**31), 3, 40_000_000], dtype=torch.int32, device=col.device)
    # Each row lists its own block among others that no row of it may see, row 0 aside.
    lists = [torch.cat([wide[:2], col[0, row : row + 1], wide[3:4], wide[5:]]) for row in range(4)]
    given = list(batch.tensors)
    given[3] = (torch.arange(5, dtype=torch.int32) * 5).expand(2, 5).contiguous().to(crow.device)
    given[4] = torch.cat(lists).expand(2, 20).contiguous()
    assert crow[0].tolist() == [0, 1, 2, 3, 4]
    batch.prepare(plan(), given)(*given)
    batch.check(most=4)


def test_lists_that_have_nothing_in_common_are_each_walked_once(tensors, kernels) -> None:
    mask = torch.zeros(1, 8, 8, dtype=torch.bool)
    mask[:, 0::2, 0::2] = True
    mask[:, 1::2, 1::2] = True
    for block_n in (64, 128):
        batch = tensors.batch([(256, 256)], heads=(1, 1), head_dim=64, blocks=(64, 64), mask=mask)
        kernels.attend(batch, plan(block_n))
        batch.check(most=4)


@pytest.mark.parametrize(("long", "programs"), [(1, 3), (1000, 3), (1, 12)])
def test_which_program_takes_a_tile_changes_no_bit_and_the_next_call_has_the_same_counter(
    monkeypatch, tensors, kernels, shadows, long, programs
) -> None:
    """Asked for as the one before begins, or as it ends, and few of them for each."""
    monkeypatch.setattr(shadows[-4], "LONG", long)
    monkeypatch.setattr(launch, "persistent_programs", lambda device: programs)
    counter = torch.zeros(1, dtype=torch.int32, device=tensors.device)
    monkeypatch.setattr(launch, "counters_of", lambda device: SimpleNamespace(new=lambda: counter))
    batch = tensors.batch([(70, 200)], heads=(2, 1), head_dim=64, blocks=(64, 64))
    found = []
    for as_free in (False, True, True):
        batch.out.tensor.fill_(float("nan"))
        kernels.attend(batch, replace(plan(64), as_free=as_free))
        found.append((batch.out.tensor.clone(), batch.lse.tensor.clone()))
        assert not int(counter)
    for later in found[1:]:
        for one, other in zip(found[0], later, strict=True):
            assert_bitwise_equal(one, other)


# The arguments of the op that are stretched, and in which dimensions: three or more of each, so that strides fit in 32
# bits and products of them do not. Results are stretched in every one.
Q, K, V, CROW, COL, TABLE, OUT, LSE = 0, 1, 2, 3, 4, 7, 14, 15
FAR: dict[str, tuple[dict[str, Any], dict[int, tuple[int, ...]]]] = {
    "ragged": ({"heads": (3, 3)}, {Q: (0, 1), K: (0, 1), V: (0, 1), CROW: (0,), COL: (0,)}),
    "paged": ({"kind": "paged"}, {K: (0, 1), V: (0, 1), TABLE: (0,)}),
    "paged, HND": ({"kind": "paged", "page_layout": "HND", "heads": (3, 3)}, {K: (1, 2), V: (1, 2)}),
    "padded": ({"kind": "padded", "side": "both"}, {Q: (0, 1), K: (0, 1), V: (0, 1)}),
}  # fmt: skip


@pytest.mark.parametrize(("options", "dims"), FAR.values(), ids=FAR)
def test_the_kernel_for_sm_90_follows_dimensions_more_than_2_to_the_31_elements_apart(tensors, options, dims) -> None:
    """Elements of ``out`` that far apart were written before it."""
    mask = torch.ones(options.get("heads", (1, 1))[0], 2, 2, dtype=torch.bool)
    options = {"heads": (1, 1), "head_dim": 64, "blocks": (64, 64), "mask": mask, **options}
    batch = tensors.batch([(17, 3), (2, 1), (3, 1)], **options)

    def run(*given: Any) -> tuple[()]:
        batch.prepare(plan(64), given)(*given)
        return ()

    # Results of a paged batch lie as those of a ragged one.
    written = [] if options.get("kind") == "paged" else [OUT, LSE]
    try:
        contract.check_int64_offsets(run, batch.tensors, dims, written=written)
    except IndexError as error:
        pytest.fail(f"the kernel left its tensors: {error}")
    except RuntimeError as error:
        # 8 GiB of addresses, of which next to nothing is touched; a small machine refuses even that.
        if "allocate memory" not in str(error) and "out of memory" not in str(error):
            raise
        pytest.skip("this machine does not give out 8 GiB of addresses")


@pytest.mark.parametrize("block", [16, 64])
def test_keys_before_the_window_are_not_read_in_blocks_that_it_cuts(tensors, kernels, block) -> None:
    mask = torch.ones(2, 256 // block, 256 // block, dtype=torch.bool)
    batch = tensors.batch([(200, 20)], heads=(2, 1), head_dim=96, blocks=(block, block), mask=mask, window=(90, -1))
    batch.spoil(0, range(200 - 90))
    kernels.attend(batch, plan(64))
    batch.check(most=4)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_consumer_skips_what_only_the_other_lists_and_goes_on_behind_it(tensors, kernels, slow) -> None:
    """Runs of tiles of one consumer, longer than the rings, between those of both; ahead of the other, and behind."""
    mask = torch.zeros(1, 16, 16, dtype=torch.bool)
    mask[0, 14, [0, 1, 2, 3, 4, 9, 11, 14]] = True
    mask[0, 15, [0, 5, 6, 7, 8, 10, 11, 12, 13, 15]] = True
    for block_n in (64, 128):
        batch = tensors.batch([(16 * 64 - 128, 128)], heads=(1, 1), head_dim=64, blocks=(64, 64), mask=mask)
        try:
            with gluon.slow_partition(slow):
                kernels.attend(batch, plan(block_n))
        except RuntimeError as error:
            pytest.fail(f"a consumer was ahead of a barrier by two phases: {error}")
        batch.check(most=4)
