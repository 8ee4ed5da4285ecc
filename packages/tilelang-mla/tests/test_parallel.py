"""Does a cache whose tokens several ranks share give what one process gives? All cases of a world in one run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch

from kernel_reference.attention import mla_decode
from kernel_reference.checks import validate_values
from kernel_reference.paging import cumulative, paged_cache
from kernel_reference.sharding import Interleave, ZigZag, shard
from kernel_reference.testing.contract import check_no_host_sync
from kernel_reference.testing.distributed import SentBytes, run
from tilelang_mla import AttentionResult, flash_mla_with_kvcache, plan_decode
from tilelang_mla.parallel import (
    flash_mla_sparse_with_kvcache_cp,
    flash_mla_with_kvcache_cp,
    own_rows,
    visible_keys,
)

Tensor = torch.Tensor
NOPE, ROPE = 64, 32
# None, fewer than a world or than the query tokens, and on and beside the ends of runs and pages.
LENGTHS = [0, 1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200]


class Case(NamedTuple):
    """Packed latents [T, 1, NOPE + ROPE] of sequences, and the result over all of them in float64."""

    lengths: Tensor
    latents: Tensor
    q: Tensor
    causal: bool
    exact: AttentionResult
    size: int
    page: int


def paged(latents: Tensor, lengths: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Pages in random order, NaN wherever there is no token, and their table."""
    cache = paged_cache(latents, None, cumulative(lengths), page, seed=5)
    return cache.k_cache, cache.block_table


def make(
    lengths: Sequence[int], *, seqlen_q: int, heads: int = 8, causal: bool = True, size: int = 1, page: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:  # fmt: skip
    """Sequences, and the oracle's result."""
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    latents = torch.randn(int(seqlens.sum()), 1, NOPE + ROPE).to(dtype)
    q = torch.randn(len(lengths), seqlen_q, heads, NOPE + ROPE).to(dtype)
    kv, table = paged(latents, seqlens, page)
    exact = mla_decode(q, kv, seqlens, table, NOPE, causal=causal)
    return Case(seqlens, latents, q, causal, AttentionResult(*exact), size, page)


def _decode(rank: int, world: int, cases: dict[str, Case]) -> None:
    for name, case in cases.items():
        layout = Interleave(world, rank, case.size)
        own = shard(case.latents, layout, cumulative(case.lengths))
        kv, table = paged(own.tokens, own.cu_seqlens.diff(), case.page)
        batch, seqlen_q, num_heads, width = case.q.shape
        each = num_heads // world
        rows = batch * seqlen_q * num_heads
        for heads, chosen in (("sharded", slice(rank * each, (rank + 1) * each)), ("replicated", slice(None))):
            q = case.q[:, :, chosen]
            for exchange in ("all_to_all", "reduce_scatter"):
                with SentBytes() as counted:
                    got = flash_mla_with_kvcache_cp(
                        q, kv, case.lengths, table, NOPE, None, case.causal, layout=layout, group=None, heads=heads,
                        exchange=exchange, return_lse=True,
                    )  # fmt: skip
                what = f"{name}, {heads}, {exchange}, rank {rank}"
                try:
                    # Partial results are rounded to 16 bits, and so is the whole.
                    torch.testing.assert_close(got.out.double(), case.exact.out[:, :, chosen], rtol=8e-3, atol=8e-3)
                    torch.testing.assert_close(got.lse.double(), case.exact.lse[:, chosen], rtol=1e-6, atol=4e-6)
                except AssertionError as error:
                    raise AssertionError(f"{what}: {error}") from error
                sharded = heads == "sharded"
                if exchange == "all_to_all":
                    sent = (world - 1) * rows * (2 * NOPE + 4) / (world if sharded else 1)
                else:
                    sent = (world - 1) * rows * 4 + (1 if sharded else 2) * (world - 1) / world * rows * NOPE * 4
                gathered = (world - 1) * batch * seqlen_q * each * width * 2 if sharded else 0
                assert counted.sent == sent + gathered, what
        if seqlen_q:
            # A plan of this rank's lengths for all heads.
            plan = plan_decode(layout.visible(case.lengths), num_heads, seqlen_q, dim_nope=NOPE, dim_rope=ROPE)
            # And what the layers of a step share.
            seen = visible_keys(layout, case.lengths, seqlen_q, case.causal)
            for visible in (None, seen):
                planned = flash_mla_with_kvcache_cp(
                    q, kv, case.lengths, table, NOPE, None, case.causal, layout=layout, group=None, heads="replicated",
                    plan=plan, visible=visible,
                )  # fmt: skip
                assert isinstance(planned, Tensor)
                torch.testing.assert_close(planned.double(), case.exact.out, rtol=8e-3, atol=8e-3)
            with pytest.raises(ValueError, match=r"^visible must be "):
                flash_mla_with_kvcache_cp(
                    q, kv, case.lengths, table, NOPE, layout=layout, group=None, heads="replicated", visible=seen[:, 1:]
                )


@pytest.mark.parametrize("world", [2, 4])
def test_decoding_over_a_cache_shared_by_ranks_is_that_of_one_process(world: int) -> None:
    cases = {
        "one token": make(LENGTHS, seqlen_q=1),
        "two tokens, runs of a page": make(LENGTHS, seqlen_q=2, size=16),
        "three tokens, runs of 3, pages of 1": make(LENGTHS[:9], seqlen_q=3, size=3, page=1),
        "four tokens": make(LENGTHS, seqlen_q=4),
        "four tokens that see each other, runs of 16, pages of 64": make(
            LENGTHS, seqlen_q=4, causal=False, size=16, page=64
        ),
        "runs longer than any sequence, in float16": make([5, 200, 64], seqlen_q=2, size=256, dtype=torch.float16),
        "no tokens": make([5, 20], seqlen_q=0),
        "nothing cached": make([0, 0], seqlen_q=1),
    }
    run(world, _decode, world, cases)


def _listed(case: Case, topk: int, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Lists of positions, some of which are none, and out and lse over what they name, in float64."""
    torch.manual_seed(4)
    batch, seqlen_q, heads, width = case.q.shape
    positions = torch.full((batch, seqlen_q, topk), -1, dtype=torch.int32)
    out, lse = torch.zeros(batch, seqlen_q, heads, NOPE).double(), torch.full((batch, heads, seqlen_q), -torch.inf)
    lse = lse.double()
    bounds = cumulative(case.lengths).tolist()
    for b, (begin, end) in enumerate(pairwise(bounds)):
        for j in range(seqlen_q):
            seen = max(0, end - begin - seqlen_q + j + 1)
            chosen = torch.randperm(seen)[: topk - 2]
            positions[b, j, 1 : 1 + len(chosen)] = chosen.int()
            # None, as -1 is: behind the sequence.
            positions[b, j, 0] = end - begin
            if len(chosen):
                keys = case.latents[begin + chosen, 0].double()
                scores = case.q[b, j].double() @ keys.T * width**-0.5
                lse[b, :, j] = scores.logsumexp(-1)
                out[b, j] = torch.softmax(scores, -1) @ keys[:, :NOPE]
    if sink is not None:
        out = out * torch.sigmoid(lse - sink.double()[:, None]).transpose(1, 2)[..., None]
    return positions, out, lse


def _sparse(rank: int, world: int, cases: dict[str, Case], place: str = "cpu") -> None:
    for name, case in cases.items():
        heads_all = case.q.shape[2]
        sink = torch.linspace(-1, 2, heads_all) if "sink" in name else None
        positions, exact, exact_lse = _listed(case, 16, sink)
        layout = Interleave(world, rank, case.size)
        own = shard(case.latents, layout, cumulative(case.lengths))
        kv, table = (x.to(place) for x in paged(own.tokens, own.cu_seqlens.diff(), case.page))
        each = heads_all // world
        rows = case.q.shape[0] * case.q.shape[1]
        listed, lengths = positions.to(place), case.lengths.to(place)
        for heads, chosen in (("sharded", slice(rank * each, (rank + 1) * each)), ("replicated", slice(None))):
            with SentBytes() as counted:
                got = flash_mla_sparse_with_kvcache_cp(
                    case.q[:, :, chosen].to(place), kv, listed, lengths, table, NOPE, layout=layout, group=None,
                    heads=heads, attn_sink=None if sink is None else sink[chosen].to(place),
                )  # fmt: skip
            what = f"{name}, {heads}, rank {rank}"
            try:
                torch.testing.assert_close(got.out.cpu().double(), exact[:, :, chosen], rtol=1e-2, atol=1e-2)
                torch.testing.assert_close(got.lse.cpu().double(), exact_lse[:, chosen], rtol=1e-6, atol=4e-6)
            except AssertionError as error:
                raise AssertionError(f"{what}: {error}") from error
            sharded = heads == "sharded"
            sent = (world - 1) * rows * heads_all * (2 * NOPE + 4) / (world if sharded else 1)
            assert counted.sent == sent + ((world - 1) * rows * each * (NOPE + ROPE) * 2 if sharded else 0), what


@pytest.mark.parametrize("world", [2, 4])
def test_listed_tokens_of_a_cache_shared_by_ranks_are_those_of_one_process(world: int) -> None:
    cases = {
        "one token": make([1, 3, 16, 200, 33, 5], seqlen_q=1),
        "two tokens, runs of a page, a sink": make([2, 64, 65, 130], seqlen_q=2, size=16),
        "runs of 3, pages of 4": make([7, 40], seqlen_q=3, size=3, page=4),
        "runs longer than any sequence": make([5, 100], seqlen_q=1, size=256),
    }
    run(world, _sparse, world, cases)


@pytest.mark.gpu
def test_listed_tokens_are_shared_by_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    cases = {
        "one token": make([1, 3, 16, 200, 33, 5], seqlen_q=1, heads=32),
        "two tokens, runs of a page, a sink": make([2, 64, 65, 130], seqlen_q=2, size=16, heads=32),
    }
    run(2, _sparse, 2, cases, "cuda", backend="nccl", deadline=300)


def test_rows_of_a_rank_are_those_of_its_tokens() -> None:
    table = torch.tensor([[3, 0, 9], [1, 2, -1]], dtype=torch.int32)
    positions = torch.tensor([[[5, 2, 0, 40, 8]], [[-1, 4, 3, 12, 1]]], dtype=torch.int32)
    lengths = torch.tensor([9, 13], dtype=torch.int32)
    # Of rank 0 in pairs: tokens 0, 1, 4, 5, 8, 9, 12, .. in pages of 2; the pool has 8 pages, so that 9 is none.
    rows, counts = own_rows(Interleave(2, 0, 2), positions, lengths, table, (8, 2))
    assert rows.flatten(0, 1).tolist() == [[1, 6, -1, -1, -1], [4, 3, -1, -1, -1]]
    assert counts.flatten().tolist() == [2, 2]


def _sparse_refusals(rank: int) -> None:
    case = make([20, 3], seqlen_q=1)
    layout = Interleave(2, rank)
    positions = torch.zeros(2, 1, 16, dtype=torch.int32)
    kv, table = paged(case.latents, case.lengths, 16)
    given = {
        "q": case.q, "kv": kv, "positions": positions, "seqlens_k": case.lengths, "block_table": table,
        "dim_nope": NOPE, "layout": layout, "group": None, "heads": "replicated",
    }  # fmt: skip
    for match, error, changed in (
        (r"^layout must be of world 2", ValueError, {"layout": Interleave(3, rank)}),
        (r"^layout must be a ", TypeError, {"layout": ZigZag(2, rank)}),
        (r"^positions must be \[B, Sq, topk\]", ValueError, {"positions": positions[0]}),
        (r"^positions", TypeError, {"positions": positions.long()}),
        (r"^attn_sink", ValueError, {"attn_sink": torch.zeros(3)}),
        (r"^q must be without gradient", ValueError, {"q": case.q.clone().requires_grad_()}),
    ):
        with pytest.raises(error, match=match):
            flash_mla_sparse_with_kvcache_cp(**(given | changed))
    alone = [torch.distributed.new_group([one]) for one in range(2)][rank]
    listed, exact, _ = _listed(case, 16, None)
    got = flash_mla_sparse_with_kvcache_cp(
        case.q, kv, listed, case.lengths, table, NOPE, layout=Interleave(1, 0), group=alone
    )
    torch.testing.assert_close(got.out.double(), exact, rtol=1e-2, atol=1e-2)


def test_wrong_lists_are_named_and_a_group_of_one_exchanges_nothing() -> None:
    run(2, _sparse_refusals)


def test_visible_keys_are_those_of_the_positions() -> None:
    for world in (1, 2, 4):
        for size in (1, 3, 16):
            for rank in range(world):
                layout = Interleave(world, rank, size)
                lengths = torch.tensor([*LENGTHS, -7], dtype=torch.int32)
                seen = visible_keys(layout, lengths, 4)
                assert seen.dtype == torch.int32
                assert seen.is_contiguous()
                for length, row in zip(LENGTHS, seen.tolist(), strict=False):
                    positions = layout.tokens(length)
                    assert row == [int((positions < length - 4 + j + 1).sum()) for j in range(4)]
                # One that cannot be stays one, so that its sequence gives 0 and -inf.
                assert seen[-1].tolist() == [-1] * 4
                whole = visible_keys(layout, lengths, 2, causal=False)
                assert whole[:-1].tolist() == [[len(layout.tokens(length))] * 2 for length in LENGTHS]


def _refusals(rank: int) -> None:
    case = make([20, 3], seqlen_q=2)
    layout = Interleave(2, rank)
    own = shard(case.latents, layout, cumulative(case.lengths))
    kv, table = paged(own.tokens, own.cu_seqlens.diff(), 16)
    alone = [torch.distributed.new_group([one]) for one in range(2)][rank]
    whole = paged(case.latents, case.lengths, 16)
    got = flash_mla_with_kvcache_cp(
        case.q, whole[0], case.lengths, whole[1], NOPE, layout=Interleave(1, 0), group=alone, exchange="symmetric"
    )
    assert torch.equal(got, flash_mla_with_kvcache(case.q, whole[0], case.lengths, whole[1], NOPE))

    def refused(match: str, error: type[Exception] = ValueError, **changed: Any) -> None:
        given = {
            "q": case.q, "kv": kv, "seqlens_k": case.lengths, "block_table": table, "dim_nope": NOPE,
            "layout": layout, "group": None, "heads": "replicated",
        }  # fmt: skip
        with pytest.raises(error, match=match):
            flash_mla_with_kvcache_cp(**(given | changed))

    refused(r"^layout must be a kernel_reference.sharding.Interleave, got ", TypeError, layout=ZigZag(2, rank))
    refused(r"^layout must be of world 2 and rank \d, as group is, got ", layout=Interleave(2, 1 - rank))
    refused(r"^layout must be of world 2 and rank \d, as group is, got ", layout=Interleave(3, rank))
    refused(r'^heads must be one of "sharded", "replicated", got ', heads="split")
    refused(r"^exchange must be one of ", exchange="ring")
    refused(r"^exchange must be one that goes by collectives where tensors are not on GPUs", exchange="symmetric")
    refused(r"^q must be without gradient", q=case.q.clone().requires_grad_())
    refused(r"^seqlens_k", seqlens_k=case.lengths[:1])
    refused(r"^seqlens_k", TypeError, seqlens_k=case.lengths.long())
    refused(r"^seqlens_k\[0, 0\] must be from 0 to ", seqlens_k=-case.lengths)
    with validate_values(False):
        dead = flash_mla_with_kvcache_cp(
            case.q, kv, case.lengths * torch.tensor([-1, 1], dtype=torch.int32), table, NOPE, layout=layout, group=None,
            heads="replicated", return_lse=True,
        )  # fmt: skip
    assert torch.equal(dead.out[0], torch.zeros_like(dead.out[0]))
    assert bool((dead.lse[0] == -torch.inf).all())
    torch.testing.assert_close(dead.out[1].double(), case.exact.out[1], rtol=8e-3, atol=8e-3)


def test_a_group_of_one_makes_the_plain_call_and_wrong_arguments_are_named() -> None:
    run(2, _refusals)


def _compiled(rank: int) -> None:
    case = make([20, 3], seqlen_q=2)
    layout = Interleave(2, rank, 16)
    own = shard(case.latents, layout, cumulative(case.lengths))
    kv, table = paged(own.tokens, own.cu_seqlens.diff(), 16)
    each = slice(4 * rank, 4 * rank + 4)

    def decode(q: Tensor, kv: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        return flash_mla_with_kvcache_cp(
            q, kv, lengths, table, NOPE, layout=layout, group=torch.distributed.group.WORLD
        )  # fmt: skip

    # What one rank traces meets what the other calls.
    called = torch.compile(decode, fullgraph=True, backend="aot_eager") if rank == 0 else decode
    got = called(case.q[:, :, each], kv, case.lengths, table)
    torch.testing.assert_close(got.double(), case.exact.out[:, :, each], rtol=8e-3, atol=8e-3)


@pytest.mark.torch_compile
def test_a_step_compiles_as_one_graph() -> None:
    run(2, _compiled, deadline=300)


# Each of them compiles kernels of its own.
ON_GPUS: dict[str, tuple[list[int], dict[str, int]]] = {
    "two tokens": ([700, 0, 5, 4096], {"seqlen_q": 2, "heads": 32}),
    "one token": ([4096], {"seqlen_q": 1, "heads": 128, "size": 64, "page": 64}),
}


def _on_gpus(rank: int, name: str) -> None:
    torch.manual_seed(0)
    lengths_of, options = ON_GPUS[name]
    case = make(lengths_of, **options)
    layout = Interleave(2, rank, case.size)
    own = shard(case.latents, layout, cumulative(case.lengths))
    kv, table = (x.cuda() for x in paged(own.tokens, own.cu_seqlens.diff(), case.page))
    q, lengths = case.q.cuda(), case.lengths.cuda()
    each = q.shape[2] // 2
    for heads, chosen in (("sharded", slice(rank * each, (rank + 1) * each)), ("replicated", slice(None))):
        for exchange in ("all_to_all", "reduce_scatter", "symmetric"):
            decode = partial(
                flash_mla_with_kvcache_cp, q[:, :, chosen], kv, lengths, table, NOPE, layout=layout, group=None,
                heads=heads, exchange=exchange, return_lse=True,
            )  # fmt: skip
            decode()
            check_no_host_sync(decode)
            got = decode()
            torch.testing.assert_close(got.out.cpu().double(), case.exact.out[:, :, chosen], rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(got.lse.cpu().double(), case.exact.lse[:, chosen], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPUS)
def test_every_exchange_between_two_gpus(name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run(2, _on_gpus, name, backend="nccl", deadline=300)
