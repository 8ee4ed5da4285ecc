"""Do the ranks of a group, each with a share of the tokens, give what one process gives? A world's cases in one run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from kernel_reference import sharding
from kernel_reference.checks import validate_values
from kernel_reference.paging import cumulative, paged_cache
from kernel_reference.sharding import Interleave, ZigZag
from kernel_reference.testing.contract import check_no_host_sync
from kernel_reference.testing.distributed import SentBytes, peers_of_one_machine, run
from prefix_prefill import AttentionResult, prefix_prefill
from prefix_prefill.parallel import prefix_decode_cp, prefix_prefill_cp
from prefix_prefill.runs import share_decode, share_prefill

Tensor = torch.Tensor
D = 32


class Case(NamedTuple):
    """Packed tensors of (older, new) tokens, and the result of one process; ``options`` of the call."""

    lengths: Sequence[tuple[int, int]]
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    whole: AttentionResult

    @property
    def new(self) -> Tensor:
        """[B]."""
        return torch.tensor([new for _, new in self.lengths], dtype=torch.int32)

    @property
    def totals(self) -> Tensor:
        """[B]."""
        return torch.tensor([older + new for older, new in self.lengths], dtype=torch.int32)


def rows_of(lengths: Sequence[tuple[int, int]], *, new: bool) -> Tensor:
    """Rows of the packed keys that are new tokens, or older ones."""
    chosen = [torch.arange(older + n) >= older if new else torch.arange(older + n) < older for older, n in lengths]
    return torch.cat(chosen).nonzero()[:, 0]


def cache_of(keys: Tensor, values: Tensor, lengths: Tensor, page: int, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Pages in random order, NaN wherever there is no token."""
    cache = paged_cache(keys, values, cumulative(lengths), page, layout, seed=3)
    return cache.k_cache, cache.v_cache, cache.block_table


def make(
    lengths: Sequence[tuple[int, int]], *, heads: tuple[int, int] = (4, 2), dtype: Any = None, **options: Any
) -> Case:
    """Sequences, and what one process makes of them."""
    dtype = dtype or torch.float32
    total = sum(older + new for older, new in lengths)
    k, v = (torch.randn(total, heads[1], D).to(dtype) for _ in range(2))
    new = rows_of(lengths, new=True)
    q = torch.randn(len(new), heads[0], D).to(dtype)
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1, 2, heads[0])
    case = Case(lengths, q, k, v, options, AttentionResult(q, q))
    layout, page = options.get("page_layout", "NHD"), options.get("page", 16)
    older = rows_of(lengths, new=False)
    caches = cache_of(k[older], v[older], case.totals - case.new, page, layout)
    how = {name: value for name, value in options.items() if name != "page"}
    whole = prefix_prefill(
        q, k[new], v[new], *caches, cumulative(case.new), case.totals, max_seqlen_q=int(case.new.max()),
        return_lse=True, **how,
    )  # fmt: skip
    return case._replace(whole=whole)


def assert_near(got: AttentionResult, out: Tensor, lse: Tensor) -> None:
    atol = 2e-6 if out.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.out, out, rtol=0, atol=atol)
    torch.testing.assert_close(got.lse, lse, rtol=1e-6, atol=2e-6)


# Older and new tokens: none, fewer than any world, on and beside the cuts of 4 and of 8 runs, ragged.
LENGTHS = [(0, 1), (17, 3), (40, 0), (0, 8), (5, 9), (3, 64), (130, 31)]
PREFILL = {
    "ragged": (LENGTHS, {}),
    "one token": ([(33, 1)], {}),
    "nothing older": ([(0, 48), (0, 7), (0, 1)], {"sinks": True}),
    "page of one": ([(5, 21)], {"page": 1}),
    "large pages, HND": (LENGTHS, {"page": 64, "page_layout": "HND"}),
    "x-packed": (LENGTHS[3:6], {"page_layout": "x-packed"}),
    "sinks and soft cap": (LENGTHS[1:], {"sinks": True, "softcap": 5.0, "softmax_scale": 0.5}),
    "window": (LENGTHS, {"window": (19, 0), "sinks": True}),
    "window, x-packed": (LENGTHS[4:], {"window": (40, -1), "page_layout": "x-packed"}),
    "window, HND, of one token": (LENGTHS[2:6], {"window": (0, 0), "page_layout": "HND"}),
    "window past everything": ([(9, 30)], {"window": (4096, 0)}),
    "bfloat16": (LENGTHS[4:], {"dtype": torch.bfloat16}),
    "8-bit scales of one": (LENGTHS[4:6], {"k_scale": 0.5, "v_scale": torch.tensor([2.0])}),
}


# Whose keys a kernel places too.
PLACED = ("ragged", "window, x-packed")


def _prefill(rank: int, world: int, cases: dict[str, Case], buffers: Tensor) -> None:
    layout = ZigZag(world, rank)
    for name, case in cases.items():
        cu = cumulative(case.new)
        new, older = rows_of(case.lengths, new=True), rows_of(case.lengths, new=False)
        # Padding, of which every rank has its own amount, is NaN.
        most = layout.most_tokens(len(new), len(case.lengths))
        own = [sharding.shard(x, layout, cu).tokens for x in (case.q, case.k[new], case.v[new])]
        count = len(own[0])
        q, k, v = (torch.cat([x, x.new_full((most - count, *x.shape[1:]), torch.nan)]) for x in own)
        options = dict(case.options)
        caches = cache_of(
            case.k[older], case.v[older], case.totals - case.new, options.pop("page", 16),
            options.get("page_layout", "NHD"),
        )  # fmt: skip
        with SentBytes() as counted:
            got = prefix_prefill_cp(
                q, k, v, *caches, cu, case.totals, max_seqlen_q=int(case.new.max()), group=None, return_lse=True,
                **options,
            )  # fmt: skip
        how = {"max_seqlen_q": int(case.new.max()), "group": None}
        if name in PLACED:
            with peers_of_one_machine(buffers):
                for _ in range(2):
                    again = prefix_prefill_cp(
                        q, k, v, *caches, cu, case.totals, return_lse=True, exchange="symmetric", **how, **options
                    )
                    assert torch.equal(again.out, got.out), name
                    assert torch.equal(again.lse, got.lse), name
        if "window" not in options:
            # What the layers of a step have in common.
            share = share_prefill(caches[2], cu, case.totals, rows=len(q), **how)
            shared = prefix_prefill_cp(
                q, k, v, *caches, cu, case.totals, return_lse=True, share=share, **how, **options
            )
            assert torch.equal(shared.out, got.out), name
            assert torch.equal(shared.lse, got.lse), name
            if not len(older):
                # Where a table has no column there is one pass.
                empty = caches[2][:, :0]
                alone = prefix_prefill_cp(
                    q, k, v, *caches[:2], empty, cu, case.totals, return_lse=True, **how, **options
                )
                wanted = [sharding.shard(x, layout, cu).tokens for x in (case.whole.out, case.whole.lse.T)]
                assert_near(AttentionResult(alone.out[:count], alone.lse[:, :count]), wanted[0], wanted[1].T)
                assert torch.equal(alone.out[count:], torch.zeros_like(alone.out[count:])), name
            with pytest.raises(ValueError, match=r"^share must be of .* rows, longest sequence, world and rank"):
                prefix_prefill_cp(q, k, v, *caches, cu, case.totals, share=share._replace(rows=1 + len(q)), **how)
            with pytest.raises(ValueError, match=r"^share must be None under a window"):
                prefix_prefill_cp(q, k, v, *caches, cu, case.totals, share=share, window=(3, 0), **how)
        assert counted.by_op == {"all_gather_into_tensor": (world - 1) * 2 * k.numel() * k.element_size()}, name
        out = sharding.shard(case.whole.out, layout, cu).tokens
        lse = sharding.shard(case.whole.lse.T, layout, cu).tokens.T
        try:
            assert_near(AttentionResult(got.out[:count], got.lse[:, :count]), out, lse)
        except AssertionError as error:
            raise AssertionError(f"{name}, rank {rank}: {error}") from error
        assert torch.equal(got.out[count:], torch.zeros_like(got.out[count:])), name
        assert bool((got.lse[:, count:] == -torch.inf).all()), name
    # A tensor is all that comes back where lse is not asked for.
    assert isinstance(
        prefix_prefill_cp(
            q, k, v, *caches, cu, case.totals, max_seqlen_q=int(case.new.max()), group=None, **options
        ), Tensor,
    )  # fmt: skip


@pytest.mark.parametrize("world", [2, 4])
def test_a_prefill_shared_by_ranks_is_that_of_one_process(world: int) -> None:
    buffers = torch.zeros(world, 2**21, dtype=torch.uint8).share_memory_()
    run(
        world,
        _prefill,
        world,
        {name: make(lengths, **options) for name, (lengths, options) in PREFILL.items()},
        buffers,
    )


# 1 to 4 new tokens, behind none, fewer than a world, and on and beside the ends of runs and pages.
DECODE = [(0, 1), (1, 1), (2, 2), (3, 4), (15, 1), (16, 3), (31, 2), (63, 1), (64, 4), (200, 3), (9, 0)]


def _decode(rank: int, world: int, cases: dict[str, tuple[Case, int, int]]) -> None:
    for name, (case, size, page) in cases.items():
        layout = Interleave(world, rank, size)
        keys = sharding.shard(case.k, layout, cumulative(case.totals))
        values = sharding.shard(case.v, layout, cumulative(case.totals)).tokens
        page_layout = case.options.get("page_layout", "NHD")
        caches = cache_of(keys.tokens, values, keys.cu_seqlens.diff(), page, page_layout)
        num_heads = case.q.shape[1]
        each = num_heads // world
        for heads, own in (("sharded", slice(rank * each, (rank + 1) * each)), ("replicated", slice(None))):
            with SentBytes() as counted:
                got = prefix_decode_cp(
                    case.q[:, own], *caches, cumulative(case.new), case.totals, max_seqlen_q=int(case.new.max()),
                    layout=layout, group=None, heads=heads, return_lse=True, **case.options,
                )  # fmt: skip
            try:
                assert_near(got, case.whole.out[:, own], case.whole.lse[own])
            except AssertionError as error:
                raise AssertionError(f"{name}, {heads}, rank {rank}: {error}") from error
            # What the layers of a step have in common, and sums in place of partial results.
            how = {"max_seqlen_q": int(case.new.max()), "rows": case.q.shape[0]}
            share = share_decode(layout, caches[2], cumulative(case.new), case.totals, page_size=page, **how)
            summed = prefix_decode_cp(
                case.q[:, own], *caches, cumulative(case.new), case.totals, max_seqlen_q=int(case.new.max()),
                layout=layout, group=None, heads=heads, return_lse=True, share=share, exchange="reduce_scatter",
                **case.options,
            )  # fmt: skip
            assert_near(summed, case.whole.out[:, own], case.whole.lse[own])
            size_of = case.q.element_size()
            partial = case.q.shape[0] * num_heads * (D * size_of + 4) * (world - 1)
            q_sent = (world - 1) * case.q[:, own].numel() * size_of
            assert counted.sent == (q_sent + partial / world if heads == "sharded" else partial), name


@pytest.mark.parametrize("world", [2, 4])
def test_decoding_over_an_interleaved_cache_is_that_of_one_process(world: int) -> None:
    ones = [(older, 1) for older, _ in DECODE[:-1]]
    cases = {
        "every other token, small pages": (make(DECODE), 1, 2),
        "runs of a page": (make(DECODE), 16, 16),
        "runs of 3, pages of 8, HND": (make(DECODE, page_layout="HND"), 3, 8),
        "runs longer than any sequence": (make(DECODE), 256, 16),
        "one token each": (make(ones, softcap=3.0), 1, 16),
        "bfloat16": (make(DECODE, dtype=torch.bfloat16), 16, 16),
    }
    # What a larger world adds are other runs.
    run(world, _decode, world, dict(list(cases.items())[: 12 // world]))


def _refusals(rank: int) -> None:
    case = make([(4, 6)])
    caches = cache_of(case.k[:4], case.v[:4], case.totals - case.new, 16, "NHD")
    cu = cumulative(case.new)
    new = rows_of(case.lengths, new=True)
    alone = [torch.distributed.new_group([one]) for one in range(2)][rank]

    # A group of one makes the plain call.
    got = prefix_prefill_cp(
        case.q, case.k[new], case.v[new], *caches, cu, case.totals, max_seqlen_q=6, group=alone, return_lse=True
    )
    assert torch.equal(got.out, case.whole.out)
    assert torch.equal(got.lse, case.whole.lse)
    whole_cache = cache_of(case.k, case.v, case.totals, 16, "NHD")
    decoded = prefix_decode_cp(
        case.q, *whole_cache, cu, case.totals, max_seqlen_q=6, layout=Interleave(1, 0), group=alone
    )
    torch.testing.assert_close(decoded, case.whole.out)

    own = [sharding.shard(x, ZigZag(2, rank), cu).tokens for x in (case.q, case.k[new], case.v[new])]
    q, k, v = (torch.cat([x, x.new_zeros(4 - len(x), *x.shape[1:])]) for x in own)

    def refused(match: str, error: type[Exception] = ValueError, **changed: Any) -> None:
        given = {
            "q": q, "k": k, "v": v, "k_cache": caches[0], "v_cache": caches[1], "block_table": caches[2],
            "cu_seqlens_q": cu, "seqlens_k": case.totals, "max_seqlen_q": 6, "group": None,
        }  # fmt: skip
        with pytest.raises(error, match=match):
            prefix_prefill_cp(**(given | changed))

    refused(r'^scheme must be one of "zigzag", got \'ring\'$', scheme="ring")
    refused(r"^q must be without gradient", q=q.clone().requires_grad_())
    refused(r"^k must be \[4, Hkv, 32\], with the rows of q, got ", k=k[:2])
    refused(r"^cu_seqlens_q must be ", cu_seqlens_q=cu[:1])
    refused(r"^group must be a torch.distributed.ProcessGroup or None, got ", TypeError, group=2)
    refused(r"^window must be None where the cache is scaled, got \(4, 0\)$", window=(4, 0), k_scale=0.5)
    refused(r"^seqlens_k\[0\] must be ", seqlens_k=case.totals - 5, window=(4, 0))

    def decode_refused(match: str, error: type[Exception] = ValueError, **changed: Any) -> None:
        given = {
            "q": case.q[:, :2], "k_cache": caches[0], "v_cache": caches[1], "block_table": caches[2],
            "cu_seqlens_q": cu, "seqlens_k": case.totals, "max_seqlen_q": 6, "layout": Interleave(2, rank),
            "group": None,
        }  # fmt: skip
        with pytest.raises(error, match=match):
            prefix_decode_cp(**(given | changed))

    decode_refused(r"^layout must be a kernel_reference.sharding.Interleave, got ", TypeError, layout=ZigZag(2, rank))
    decode_refused(r"^layout must be of world 2 and rank \d, as group is, got ", layout=Interleave(2, 1 - rank))
    decode_refused(r'^heads must be one of "sharded", "replicated", got ', heads="split")
    decode_refused(r"^exchange must be one of ", exchange="gossip")
    decode_refused(r"^share must be a DecodeShare or None, got ", TypeError, share=1)
    short = share_decode(Interleave(2, rank), caches[2], cu, case.totals, rows=5, max_seqlen_q=6, page_size=16)
    decode_refused(r"^share must be of \(6, 6, 2, \d\) rows, longest sequence, world and rank, ", share=short)
    decode_refused(r"^block_table\[0, 0\] must be a page from 0 to ", block_table=caches[2] * 0 + 99)
    decode_refused(r"^seqlens_k\[0\] must be from 6 \(the sequence's new tokens\) to ", seqlens_k=case.totals * 100)
    decode_refused(r"^seqlens_k\[0\] must be from 1 ", seqlens_k=case.totals - 5)
    refused(r"^block_table\[0, 0\] must be a page from 0 to ", block_table=caches[2] * 0 - 1, window=(4, 0))
    with validate_values(False):
        # Nobody looks: an impossible sequence is 0 and -inf, and nothing else changes.
        got = prefix_prefill_cp(
            q, k, v, *caches, cu, case.totals - 5, max_seqlen_q=6, group=None, return_lse=True
        )  # fmt: skip
        assert torch.equal(got.out, torch.zeros_like(q))
        assert bool((got.lse == -torch.inf).all())
        for window in (None, (4, 0)):
            out = prefix_prefill_cp(
                q, k, v, *caches, cu, case.totals - 5, max_seqlen_q=6, group=None, window=window
            )  # fmt: skip
            assert torch.equal(out, torch.zeros_like(q))
        decoded = prefix_decode_cp(
            case.q, *caches, cu, case.totals - 5, max_seqlen_q=6, layout=Interleave(2, rank), group=None,
            heads="replicated",
        )  # fmt: skip
        assert torch.equal(decoded, torch.zeros_like(case.q))


def test_a_group_of_one_makes_the_plain_call_and_wrong_arguments_are_named() -> None:
    run(2, _refusals)


def _compiled(rank: int) -> None:
    case = make([(20, 16), (3, 8)])
    layout, cu = ZigZag(2, rank), cumulative(case.new)
    new, older = rows_of(case.lengths, new=True), rows_of(case.lengths, new=False)
    shares = [sharding.shard(x, layout, cu).tokens for x in (case.q, case.k[new], case.v[new])]
    cache = cache_of(case.k[older], case.v[older], case.totals - case.new, 16, "NHD")

    def prefill(q: Tensor, k: Tensor, v: Tensor, totals: Tensor) -> Tensor:
        return prefix_prefill_cp(
            q, k, v, *cache, cu, totals, max_seqlen_q=16, group=torch.distributed.group.WORLD
        )  # fmt: skip

    # What one rank traces meets what the other calls.
    called = torch.compile(prefill, fullgraph=True, backend="aot_eager") if rank == 0 else prefill
    got = called(*shares, case.totals)
    torch.testing.assert_close(got, sharding.shard(case.whole.out, layout, cu).tokens, rtol=0, atol=2e-6)


@pytest.mark.torch_compile
def test_a_prefill_compiles_as_one_graph() -> None:
    run(2, _compiled, deadline=300)


# Each of them compiles kernels of its own.
ON_GPUS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": (511, 0)}, "soft cap, HND": {"softcap": 20.0, "page_layout": "HND"},
}  # fmt: skip


def _prefill_on_gpus(rank: int, name: str) -> None:
    torch.manual_seed(0)
    lengths, options = [(0, 1), (1000, 700), (5, 9), (300, 4096)], ON_GPUS[name]
    case = make(lengths, heads=(8, 2), dtype=torch.bfloat16, **options)
    layout, cu = ZigZag(2, rank), cumulative(case.new)
    new, older = rows_of(lengths, new=True), rows_of(lengths, new=False)
    own = [sharding.shard(x, layout, cu).tokens for x in (case.q, case.k[new], case.v[new])]
    most = layout.most_tokens(len(new), len(lengths))
    shares = [torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])]).cuda() for x in own]
    how = options.get("page_layout", "NHD")
    cache = [x.cuda() for x in cache_of(case.k[older], case.v[older], case.totals - case.new, 16, how)]
    prefill = partial(
        prefix_prefill_cp, *shares, *cache, cu.cuda(), case.totals.cuda(), max_seqlen_q=4096, group=None,
        return_lse=True, **options,
    )  # fmt: skip
    count = len(own[0])
    wanted = [sharding.shard(x, layout, cu).tokens for x in (case.whole.out, case.whole.lse.T)]
    for exchange in ("all_gather", "symmetric"):
        prefill(exchange=exchange)
        check_no_host_sync(partial(prefill, exchange=exchange))
        # One behind another, with what is to be read still in use.
        for got in [prefill(exchange=exchange) for _ in range(3)]:
            torch.testing.assert_close(got.out[:count].cpu(), wanted[0], rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(got.lse[:, :count].cpu(), wanted[1].T, rtol=1e-4, atol=1e-4)


def _decode_on_gpus(rank: int) -> None:
    torch.manual_seed(0)
    case = make([(older, 1 + older % 4) for older in (0, 1, 63, 700, 4000)], heads=(8, 2), dtype=torch.bfloat16)
    turns = Interleave(2, rank, 16)
    keys, values = (sharding.shard(x, turns, cumulative(case.totals)) for x in (case.k, case.v))
    cache = [x.cuda() for x in cache_of(keys.tokens, values.tokens, keys.cu_seqlens.diff(), 16, "NHD")]
    each = slice(4 * rank, 4 * rank + 4)
    for exchange in ("all_to_all", "symmetric"):
        decode = partial(
            prefix_decode_cp, case.q[:, each].cuda(), *cache, cumulative(case.new).cuda(), case.totals.cuda(),
            max_seqlen_q=4, layout=turns, group=None, exchange=exchange,
        )  # fmt: skip
        decode()
        check_no_host_sync(decode)
        torch.testing.assert_close(decode().cpu(), case.whole.out[:, each], rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*ON_GPUS, "decode"])
def test_two_gpus_agree_with_one_process(name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    what = (_decode_on_gpus,) if name == "decode" else (_prefill_on_gpus, name)
    run(2, *what, backend="nccl", deadline=300)
