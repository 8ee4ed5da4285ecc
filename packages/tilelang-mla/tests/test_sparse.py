"""Is decoding over listed keys the attention over them? By the public function, and by the kernel's text in C."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernel_reference.dispatch import PreparedLaunches
from kernel_reference.testing.guards import assert_bitwise_equal, poison_
from kernel_reference.testing.numerics import assert_close_to_oracle
from tilelang_mla import (
    calls,
    dequantize_kv,
    flash_mla,
    flash_mla_with_kvcache,
    ops,
    plan_decode,
    quantize_kv,
    reference,
    straight,
)

Tensor = torch.Tensor
BF16 = torch.bfloat16
every_cache = pytest.mark.parametrize("cache", ["", "656"], ids=["bfloat16", "records"])


def lists_of(lists: int, topk: int, positions: int) -> Tensor:
    """Positions of the pool, -1, positions beyond it, and a list of nothing."""
    generator = torch.Generator().manual_seed(lists * topk)
    indices = torch.randint(positions, (lists, topk), generator=generator, dtype=torch.int32)
    indices[torch.rand(lists, topk, generator=generator) < 0.2] = -1
    indices[0, :3] = torch.tensor([positions, 2**31 - 1, -(2**31)])
    indices[-1] = -1
    return indices


class Listed:
    """Queries, a pool, and a list of keys for each query token; what no list names is NaN."""

    def __init__(self, cache: str, *, batch: int = 3, seqlen_q: int = 2, heads: int = 5, topk: int = 70, page: int = 48,
                 width: int = 576, device: Any = "cpu") -> None:  # fmt: skip
        torch.manual_seed(topk)
        tokens = torch.randn(9, page, 1, width).bfloat16()
        self.indices = lists_of(batch * seqlen_q, topk, 9 * page).view(batch, seqlen_q, topk).to(device)
        if not cache:
            named = torch.zeros(9 * page, dtype=torch.bool)
            own = self.indices[(self.indices >= 0) & (self.indices < 9 * page)]
            named[own.long().cpu()] = True
            tokens.view(9 * page, width)[~named] = math.nan
        self.kv = (quantize_kv(tokens, "656") if cache else tokens).to(device)
        # What the cache holds; a plain version has keys rounded to bfloat16.
        whole = dequantize_kv(self.kv, "656", dtype=torch.float64) if cache else self.kv
        self.tokens = whole.flatten(0, 2)
        self.q = torch.randn(batch, seqlen_q, heads, width).bfloat16().to(device)
        self.topk_length = torch.tensor([topk, topk // 3, 0], dtype=torch.int32)[:batch].to(device)
        self.attn_sink = torch.linspace(-3, 3, heads).to(device)
        self.attn_sink[0] = -math.inf
        self.scale = width**-0.5

    def run(self, **options: Any) -> Any:
        given = (self.q, self.kv, None, None, 512, self.scale)
        return flash_mla_with_kvcache(*given, indices=self.indices, return_lse=True, **options)

    def check(self, got: Any, topk_length: Tensor | None = None, attn_sink: Tensor | None = None) -> None:
        for b in range(self.q.shape[0]):
            for token in range(self.q.shape[1]):
                own = self.indices[b, token].long()
                own = own[: len(own) if topk_length is None else int(topk_length[b])]
                keys = self.tokens[own[(own >= 0) & (own < len(self.tokens))]].double()
                out, lse = got.out[b, token], got.lse[b, :, token]
                if not len(keys):
                    assert not bool(out.any())
                    assert bool((lse == -torch.inf).all())
                    continue
                rounded = keys.bfloat16().double()
                scores, near = (self.q[b, token].double() @ k.mT * self.scale for k in (keys, rounded))
                exact_lse = scores.logsumexp(-1)
                share = 1 if attn_sink is None else torch.sigmoid(exact_lse - attn_sink.double())[:, None]
                exact = scores.softmax(-1) @ keys[:, :512] * share
                weights = torch.exp(near - near.amax(-1, keepdim=True)).float()
                plain = weights.to(BF16).float() @ rounded[:, :512].float() / weights.sum(-1, keepdim=True) * share
                assert_close_to_oracle(out, exact, plain.to(BF16))
                if self.kv.dtype == BF16:
                    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-3, atol=2e-3)
                else:
                    assert_close_to_oracle(lse, exact_lse, near.logsumexp(-1).float(), what="lse")


@every_cache
def test_each_query_token_attends_to_the_keys_it_lists(cache) -> None:
    batch = Listed(cache)
    batch.check(batch.run())
    batch.check(batch.run(topk_length=batch.topk_length), batch.topk_length)
    bare = batch if cache else Listed("", width=512)
    bare.check(bare.run(attn_sink=bare.attn_sink), None, bare.attn_sink)
    out, lse = flash_mla.flash_mla_with_kvcache(
        batch.q, batch.kv, None, None, 512, flash_mla.get_mla_metadata()[0], None, batch.scale,
        is_fp8_kvcache=bool(cache), indices=batch.indices,
    )  # fmt: skip
    torch.testing.assert_close(out, batch.run().out, rtol=0, atol=0)
    torch.testing.assert_close(lse, batch.run().lse, rtol=0, atol=0)


@pytest.mark.gpu
@every_cache
@pytest.mark.parametrize("heads", [1, 8, 16, 64, 128])
def test_kernels_attend_to_listed_keys(device, cache, heads) -> None:
    for topk, page, width in ((70, 48, 576), (2048, 64, 576), (64, 1, 576), *([] if cache else [(500, 16, 512)])):
        batch = Listed(cache, heads=heads, topk=topk, page=page, width=width, device=device)
        for given in ({}, {"topk_length": batch.topk_length}, {"attn_sink": batch.attn_sink}):
            batch.check(batch.run(**given), *[given.get(name) for name in ("topk_length", "attn_sink")])
            for splits in (1, 3):
                lengths = torch.full((6,), topk, dtype=torch.int32, device=device)
                plan = plan_decode(lengths, heads, num_splits=splits, dim_rope=width - 512)
                for own in (plan, plan._replace(tiles=replace(plan.tiles, by_rows=True))):
                    batch.check(
                        batch.run(**given, plan=own), *[given.get(name) for name in ("topk_length", "attn_sink")]
                    )


@pytest.mark.gpu
@every_cache
@pytest.mark.parametrize("heads", [5, 32, 64])
def test_two_parts_of_lists_are_merged_by_the_programs_that_have_them(device, cache, heads) -> None:
    batch = Listed(cache, batch=50, seqlen_q=1, heads=heads, topk=1000, device=device)
    for given in ({}, {"attn_sink": batch.attn_sink}):
        got, again = batch.run(**given), batch.run(**given)
        batch.check(got, None, given.get("attn_sink"))
        assert_bitwise_equal(again.out, got.out)
        assert_bitwise_equal(again.lse, got.lse)


def test_random_lists_are_the_definition(device, random_case) -> None:
    rng = random.Random(random_case)
    topk = rng.choice([3, 64, 65, 512, 2048, rng.randint(3, 3000)] if device.type != "cpu" else [3, 64, 130])
    sizes = {"batch": rng.randint(1, 3), "seqlen_q": rng.choice([1, 1, 2, 3]), "page": rng.choice([64, 1, 48, 256])}
    heads = rng.choice([1, 3, 8, 16, 32, 64, 80, 128])
    cache = rng.choice(["", "656"])
    width = 576 if cache else rng.choice([576, 512])
    batch = Listed(cache, heads=heads, topk=topk, width=width, device=device, **sizes)
    lengths = torch.full((sizes["batch"] * sizes["seqlen_q"],), topk, dtype=torch.int32, device=device)
    how = rng.choice([None, None, {}, {"num_splits": rng.randint(1, 20)}])
    given = {name: getattr(batch, name) for name in ("topk_length", "attn_sink") if rng.random() < 0.5}
    plan = None if how is None else plan_decode(lengths, heads, dim_rope=width - 512, **how)
    got = batch.run(**given, plan=plan)
    batch.check(got, *[given.get(name) for name in ("topk_length", "attn_sink")])


@pytest.mark.gpu
@pytest.mark.parametrize(("cache", "width"), [("", 576), ("", 512), ("656", 576)], ids=["bfloat16", "bare", "records"])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_a_number_of_splits_gives_the_same_bits_alone_and_in_any_batch_of_lists(device, cache, width, heads) -> None:
    batch = Listed(cache, heads=heads, topk=500, width=width, device=device)
    lengths, how = torch.full((6,), 500, dtype=torch.int32, device=device), {"num_splits": 4, "dim_rope": width - 512}
    whole = batch.run(plan=plan_decode(lengths, heads, **how))
    for b in range(3):
        own = slice(b, b + 1)
        alone = flash_mla_with_kvcache(
            batch.q[own], batch.kv, None, None, 512, batch.scale, indices=batch.indices[own].contiguous(),
            return_lse=True, plan=plan_decode(lengths[:2], heads, **how),
        )  # fmt: skip
        assert_bitwise_equal(alone.out, whole.out[own])


CASES: dict[str, tuple[str, int, bool, bool]] = {
    "shares, lengths and sinks": ("", 0, True, True), "three parts, one empty, sinks": ("", 3, False, True),
    "one part": ("", 1, True, False), "one part, sinks": ("", 1, True, True), "records": ("656", 0, True, True),
}  # fmt: skip


@pytest.mark.parametrize(("cache", "splits", "counted", "sunk"), CASES.values(), ids=CASES)
def test_the_kernel_hides_what_is_no_key_and_counts_sinks_once(device, cache, splits, counted, sunk) -> None:
    if device.type != "cpu":
        pytest.skip("on a GPU the kernel itself runs")
    try:
        from tilelang_mla.kernels import c
    except ImportError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no TileLang: {error}")
    torch.manual_seed(2)
    lists, topk, page, pages, heads = 6, 70, 48, 7, 3
    dim, rope = (512, 64) if cache else (64, 0 if splits == 3 else 32)
    attend = c.kernel(
        "decode_sparse", cache=cache, dim_nope=dim, dim_rope=rope, block_n=32 if cache else 64, num_stages=2,
        even=splits == 3,
    )  # fmt: skip
    merge = c.kernel("merge", dim_nope=dim, sink=sunk)
    kv, ropes = torch.randn(pages, page, dim), torch.randn(pages, page, rope)
    scales = torch.rand(pages, page, dim // 128) + 0.5 if cache else torch.zeros(1)
    whole = torch.cat([kv, ropes], -1)
    indices, lengths = lists_of(lists, topk, pages * page), torch.tensor([70, 20, 0], dtype=torch.int32)
    ropes = ropes if rope else whole
    q, sink = torch.randn(lists, heads, dim + rope), torch.tensor([-math.inf, 0.5, 3.0])
    num_parts = lists * splits if splits else lists + 3
    out, lse = poison_(torch.empty(lists, heads, dim)), poison_(torch.empty(lists, heads, 1))
    parts, part_lse = poison_(torch.empty(num_parts, heads, dim)), poison_(torch.empty(num_parts, heads))
    pieces, by = torch.zeros(2 * lists, dtype=torch.int32), 0 if splits else 2
    attend(
        q, kv if cache else whole, ropes, scales, lengths, indices, sink, lengths, lengths, out, lse, parts, part_lse,
        pieces, 0.1, num_parts, max(splits, 1), by, 0, 1, 2 if counted else 0, int(sunk), num_parts if splits else 4,
    )  # fmt: skip
    if num_parts > lists:
        cuts = lengths if splits else pieces
        merge(cuts, out, lse, parts, part_lse, *([sink] if sunk else []), heads, max(splits, 1), 3, 2, by, 1)
    tokens = torch.cat([kv * scales.repeat_interleave(128, -1), ropes], -1) if cache else whole
    tokens = tokens.flatten(0, 1).double()
    for i in range(lists):
        own = indices[i, : int(lengths[i // 2]) if counted else topk].long()
        keys = tokens[own[(own >= 0) & (own < len(tokens))]]
        scores = q[i].double() @ keys.mT * (0.1 * math.log(2))
        log_of = scores.logsumexp(-1)
        want = scores.softmax(-1) @ keys[:, :dim]
        if sunk:
            want = want * torch.where(log_of == -math.inf, 0, torch.sigmoid(log_of - sink))[:, None]
        torch.testing.assert_close(out[i].double(), want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lse[i, :, 0].double(), log_of, rtol=1e-5, atol=1e-5)


@every_cache
@pytest.mark.parametrize("lse", [False, True])
def test_lists_like_the_last_ones_are_begun_at_once(monkeypatch, cache, lse) -> None:
    ran: list[Any] = []

    class Launch:
        """Stands in for launch.py, by the reference."""

        @staticmethod
        def prepare_sparse(problem: Any, _: Any, given: Any) -> Any:
            ran.append(problem)
            return lambda *tensors: reference.decode_sparse(problem, type(given)(*tensors))

    asked: list[int] = []
    monkeypatch.setattr(ops, "_launch_module", lambda: Launch)
    monkeypatch.setattr(straight, "launches", PreparedLaunches())
    monkeypatch.setattr(calls, "runs_now", lambda given: asked.append(1) or True)
    batch = Listed(cache)
    for _ in range(3):
        for given in ({}, {"topk_length": batch.topk_length, "attn_sink": batch.attn_sink}):
            got = flash_mla_with_kvcache(
                batch.q, batch.kv, None, None, 512, batch.scale, indices=batch.indices, return_lse=lse, **given
            )
            want = batch.run(**given)
            assert_bitwise_equal(got.out if lse else got, want.out)
            if lse:
                assert_bitwise_equal(got.lse, want.lse)
    assert len(ran) == (2 if lse else 4)
    with pytest.raises(ValueError, match=r"^q must be without gradient"):
        flash_mla_with_kvcache(batch.q.requires_grad_(), batch.kv, None, None, 512, batch.scale, indices=batch.indices)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "lists of another batch": ({"indices": lambda b: b.indices[:2]}, ValueError, r"^indices must be \[3, 2, topk\]"),
    "lists in int64": ({"indices": lambda b: b.indices.long()}, TypeError, r"^indices.dtype must be int32"),
    "lists apart": ({"indices": lambda b: b.indices[..., ::2]}, ValueError, r"^indices must be contiguous"),
    "e4m3": ({"kv": lambda b: quantize_kv(b.kv)}, TypeError, r"^kv.dtype must be torch.bfloat16 as q is, or torch.ui"),
    "a narrow cache": ({"kv": lambda b: b.kv[..., :544]}, ValueError, r"^kv must be \[pages, page_size, 1, 576\]"),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "match"), BAD.values(), ids=BAD)
def test_lists_that_cannot_be_are_refused_by_name(changed, error, match) -> None:
    batch = Listed("")
    for name, value in changed.items():
        setattr(batch, name, value(batch))
    with pytest.raises(error, match=match):
        batch.run()


def test_what_belongs_to_lists_is_refused_by_name_without_them_and_where_it_cannot_be() -> None:
    batch = Listed("")
    with pytest.raises(ValueError, match=r"^topk_length must be \[3\]"):
        batch.run(topk_length=batch.topk_length[:2])
    with pytest.raises(ValueError, match=r"^attn_sink must be \[5\]"):
        batch.run(attn_sink=batch.attn_sink[:2])
    with pytest.raises(ValueError, match=r"^kv_scale must be None with indices"):
        batch.run(kv_scale=1.0)
    table, lengths = torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    for name in ("topk_length", "attn_sink"):
        with pytest.raises(ValueError, match=rf"^{name} must be None without indices"):
            flash_mla_with_kvcache(batch.q, batch.kv, lengths, table, 512, **{name: getattr(batch, name)})
    with pytest.raises(TypeError, match=r"^seqlens_k must be a torch.Tensor, got None"):
        flash_mla_with_kvcache(batch.q, batch.kv, None, table, 512)
