"""Are joined levels of a cascade the attention over the keys of all of them? By the simulated kernel for sm_90."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernel_reference import launching
from kernel_reference.testing import gluon
from kernel_reference.testing.guards import assert_bitwise_equal
from prefix_prefill.arguments import PrefillTensors
from prefix_prefill.cascade import joined
from prefix_prefill.hopper import launch as launch_hopper
from prefix_prefill.merging import launch as merging
from prefix_prefill.plan import DeviceLimits, PrefillPlan, Problem

pytestmark = pytest.mark.simulated

FP16, E4M3 = torch.float16, torch.float8_e4m3fn
H100 = DeviceLimits(132, 232448, hopper=True)
Cuts = Sequence[tuple[Sequence[int], Sequence[int]]]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, hopper: SimpleNamespace, device: torch.device) -> None:
    """The launches without a GPU."""
    if device.type != "cpu":
        return
    monkeypatch.setattr(launch_hopper, "TmaLaunch", gluon.tma_launch(hopper))
    monkeypatch.setattr(merging, "Launch", gluon.tma_launch(hopper))
    monkeypatch.setattr(joined, "Launch", gluon.tma_launch(hopper))
    monkeypatch.setattr(merging, "_MERGING", 2)


def plan(block_n: int = 128, num_splits: int = 1, programs: int = 4) -> PrefillPlan:
    return PrefillPlan(128, block_n, num_splits, 4, 2, hopper=True, programs=programs)


def in_one_cache(batch: Any) -> Any:
    """The same cascade, its levels' pages side by side in one cache."""
    k, v = (torch.cat([level[i] for level in batch.levels]) for i in range(2))
    first = 0
    levels = []
    for level in batch.levels:
        levels.append(level._replace(k_cache=k, v_cache=v, block_table=level.block_table + first))
        first += len(level.k_cache)
    batch.levels = levels
    return batch


def attend(batch: Any, chosen: PrefillPlan) -> None:
    problems, each = batch.problems()
    assert joined.may_be_joined(problems, chosen)
    joined.prepare_joined(problems, chosen, each)(each)


# Of a page of 16: ends within a page, at a page's and at a tile's; no keys at all; groups that cut a sequence.
RAGGED: Cuts = [([40, 13], [2 * 128 + 5, 128]), ([1, 30, 9, 13], [150, 30, 300, 13])]
CUT: Cuts = [([20, 0, 33], [7, 50, 144]), ([1, 30, 9, 13], [150, 45, 20, 13])]
EMPTY: Cuts = [([40, 13], [0, 70]), ([1, 30, 9, 13], [1, 30, 129, 40])]
THREE: Cuts = [([53], [200]), ([12, 28, 13], [65, 0, 16]), ([1, 30, 0, 9, 13], [150, 30, 5, 9, 20])]
CASES: dict[str, tuple[Cuts, PrefillPlan, dict[str, Any]]] = {
    "ragged": (RAGGED, plan(), {"sinks": True, "rows_after": 2}),
    "pages of 64": (RAGGED, plan(), {"page": 64, "softcap": 4.0}),
    "pages of 8, tiles of 64 keys": (RAGGED, plan(64), {"page": 8, "dtype": FP16}),
    "groups that cut a sequence": (CUT, plan(), {}),
    "an empty prefix": (EMPTY, plan(), {"rows_after": 1}),
    "three levels": (THREE, plan(), {"page_layout": "HND"}),
    "in pieces": (RAGGED, plan(num_splits=3), {"sinks": True}),
    "shared by keys": (THREE, plan(num_splits=0, programs=5), {"heads": (4, 1)}),
    "8 bits": (RAGGED, plan(), {"cache_dtype": E4M3, "k_scale": 0.25, "v_scale": -0.5}),
    "heads of 192": (RAGGED, plan(), {"head_dim": 192, "heads": (4, 1)}),
    "heads of 96": (CUT, plan(64), {"head_dim": 96, "heads": (4, 1)}),
}  # fmt: skip


@pytest.mark.parametrize(("cuts", "chosen", "options"), CASES.values(), ids=CASES)
def test_joined_levels_are_attention_over_all_of_them(tensors, cuts, chosen, options) -> None:
    batch = in_one_cache(tensors.cascade(cuts, **{"heads": (8, 2), "head_dim": 64, "page": 16, **options}))
    attend(batch, chosen)
    batch.check()
    out, lse = batch.out.tensor.clone(), batch.lse.tensor.clone()
    attend(batch, chosen)
    assert_bitwise_equal(batch.out.tensor, out, what="out of a second call")
    assert_bitwise_equal(batch.lse.tensor, lse, what="lse of a second call")


def test_a_group_of_an_impossible_length_has_no_keys_and_a_sequence_no_result(tensors) -> None:
    batch = in_one_cache(tensors.cascade(RAGGED, heads=(4, 2), head_dim=64, page=16))
    wanted = batch.wanted()
    device = batch.q.device
    batch.levels[0] = batch.levels[0]._replace(seqlens_k=torch.tensor([2**30, 128], dtype=torch.int32, device=device))
    batch.levels[1] = batch.levels[1]._replace(
        seqlens_k=torch.tensor([150, 30, 300, 12], dtype=torch.int32, device=device)
    )
    attend(batch, plan())
    out, lse = batch.out.tensor, batch.lse.tensor
    assert not out[40:].any()
    assert bool((lse[:, 40:] == -torch.inf).all())
    assert bool(out[:40].isfinite().all())
    assert not torch.allclose(out[:40].double(), wanted.out[:40], atol=0.01)


@pytest.mark.parametrize("cuts", [RAGGED, CUT, EMPTY, THREE])
def test_runs_of_rows_have_the_pages_of_all_their_levels_each_from_a_whole_tile_on(tensors, monkeypatch, cuts) -> None:
    monkeypatch.setattr(joined, "Launch", launching.Launch)
    made: list[Any] = []
    monkeypatch.setattr(joined, "prepare_prefill", lambda *_: lambda *given: made.append(PrefillTensors(*given)))
    batch = in_one_cache(tensors.cascade(cuts, page=16, rows_after=3))
    attend(batch, plan())
    table, bounds, (lengths, *ends) = made[0].block_table, made[0].cu_seqlens_q.tolist(), made[0].seqlens_k.tolist()
    cut_at = [[0, *accumulate(rows)] for rows, _ in cuts]
    assert bounds == [*sorted(chain(*cut_at)), len(batch.q)]
    for i, (begin, end) in enumerate(pairwise(bounds)):
        if begin == end:
            continue
        first = 0
        for number, (level, own, (_, keys)) in enumerate(zip(batch.levels, cut_at, cuts, strict=True)):
            group = bisect_right(own, begin) - 1
            count = keys[group] if group < len(keys) else 0
            if number == len(cuts) - 1:
                count = count - own[group + 1] + end if group < len(keys) else 0
                assert lengths[i] == (first + count if group < len(keys) else 0)
            else:
                assert ends[number][i] == first + count
            pages = level.block_table[group, : -(-count // 16)].tolist() if count else []
            at, whole = first // 16, -(-count // 128) * 8
            assert table[i, at : at + whole].tolist() == pages + [-1] * (whole - len(pages))
            first += -(-count // 128) * 128


def problems_of(sequences: int, new: int, tokens: int | None = None, **options: Any) -> list[Problem]:
    """Of sequences that share one group's keys."""
    given: dict[str, Any] = {"tma": True, "tokens": tokens or sequences * new, "page_size": 16, **options}
    last = Problem(32, 8, 128, sequences=sequences, max_seqlen_q=new, capacity=256, carried=1, **given)
    shared = replace(last, sequences=1, max_seqlen_q=last.tokens, capacity=16384, shared=True, carried=0, right=-1)
    return [shared, last]


def test_levels_are_joined_where_each_sequence_has_rows_for_whole_tiles() -> None:
    for wanted, given in (
        (True, problems_of(16, 256)), (True, problems_of(10, 250)), (False, problems_of(64, 1)),
        (False, problems_of(64, 8)), (True, problems_of(4, 4096, 9000)), (False, problems_of(64, 4096, 4159)),
        (False, problems_of(16, 256, num_splits=2)), (False, problems_of(16, 256, draft=True)),
        (False, problems_of(16, 256, page_size=1)), (False, problems_of(16, 256, page_size=256)),
        (False, problems_of(16, 256, tma=False)), (False, problems_of(16, 256, page_layout="x-packed")),
    ):  # fmt: skip
        assert (joined.joined_plan(given, H100) is not None) == wanted, given[-1]
    assert joined.joined_plan(problems_of(16, 256), replace(H100, hopper=False)) is None
    assert joined.joined_plan([*problems_of(16, 256)[:1] * 3, *problems_of(16, 256)[1:]], H100) is None
