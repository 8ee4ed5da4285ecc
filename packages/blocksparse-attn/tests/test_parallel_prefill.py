"""Does a prompt whose tokens several ranks share give what one process gives? All cases of a world in one run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from blocksparse_attn import AttentionResult, BlockLayout, blocksparse_attention
from blocksparse_attn.cuts import cut_rows
from blocksparse_attn.parallel import RowCut, blocksparse_attention_cp
from kernel_reference.testing.contract import check_no_host_sync
from kernel_reference.testing.distributed import SentBytes, peers_of_one_machine, run

Tensor = torch.Tensor
HEADS, HEADS_KV, DIM, DIM_V = 8, 2, 32, 16


class Case(NamedTuple):
    """A prompt, the layout of its blocks, what is asked, and the result of one process."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: BlockLayout
    options: dict[str, Any]
    bounds: Sequence[int] | None
    whole: AttentionResult


def make(
    tokens: int, layout: BlockLayout, *, bounds: Sequence[int] | None = None, dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Case:  # fmt: skip
    torch.manual_seed(3)
    q, k, v = (torch.randn(tokens, *size).to(dtype) for size in ((HEADS, DIM), (HEADS_KV, DIM), (HEADS_KV, DIM_V)))
    ends = torch.tensor([0, tokens])
    whole = blocksparse_attention(
        q, k, v, layout, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=tokens, return_lse=True, **options
    )
    return Case(q, k, v, layout, options, bounds, whole)


def mask(case: Case) -> Tensor:
    """Blocks that a query of the sequence sees: [heads, rows, columns], from the layout alone, on the host."""
    layout, tokens = case.layout, len(case.q)
    found = layout.to_mask().expand(HEADS, -1, -1).clone()
    for row in range(layout.rows):
        last = min(tokens, (row + 1) * layout.q_block) - 1
        seen = 0 if row * layout.q_block >= tokens else last // layout.k_block + 1
        found[:, row, seen:] = False
    return found


def _attend(rank: int, world: int, cases: dict[str, Case], buffers: Tensor) -> None:
    # New memory is NaN: nobody reads what was not gathered.
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    for name, case in cases.items():
        for pieces in (1, 2):
            bounds = None if case.bounds is None else [case.bounds[i * 4 // world] for i in range(world + 1)]
            cut = RowCut.of(None, case.layout, len(case.q), (HEADS, HEADS_KV), bounds=bounds, pieces=pieces)
            what = f"{name}, {pieces} pieces, rank {rank}, {cut}"
            own = slice(cut.begin, cut.end)
            k_block = case.layout.k_block
            # Of each kv head and rank, which blocks its rows see; NaN in what no rank sees.
            seen = mask(case).unflatten(0, (HEADS_KV, -1)).any(1)
            k, v = case.k.clone(), case.v.clone()
            for head, block in (~seen.any(1)).nonzero().tolist():
                k[block * k_block : (block + 1) * k_block, head] = torch.nan
                v[block * k_block : (block + 1) * k_block, head] = torch.nan
            attend = partial(
                blocksparse_attention_cp, case.q[own], k[own], v[own], cut, group=None, return_lse=True, **case.options
            )
            with SentBytes() as counted:
                got = attend()
            assert isinstance(got, AttentionResult)
            if pieces == 2:
                with peers_of_one_machine(buffers):
                    again = attend(exchange="symmetric")
                assert torch.equal(again.out, got.out), what
            near = 2e-5 if case.q.dtype == torch.float32 else 2e-2
            try:
                torch.testing.assert_close(got.out, case.whole.out[own], rtol=near, atol=near)
                torch.testing.assert_close(got.lse, case.whole.lse[:, own], rtol=near, atol=near)
            except AssertionError as error:
                raise AssertionError(f"{what}: {error}") from error
            sent = 0
            for other in range(world):
                begin, end = cut.bounds[other : other + 2]
                rows = seen[:, begin // case.layout.q_block : -(-end // case.layout.q_block)].any(1)
                rows = rows if end > begin else torch.zeros_like(rows)
                lacked = rows[:, : begin // k_block]
                assert int(lacked.sum()) == cut.gathered[other], what
                if other != rank:
                    sent += int(lacked[:, cut.begin // k_block : -(-cut.end // k_block)].sum())
            assert counted.sent == sent * k_block * (DIM + DIM_V) * case.q.element_size(), what


@pytest.mark.parametrize("world", [2, 4])
def test_prompts_shared_by_ranks_are_those_of_one_process(world: int) -> None:
    generator = torch.Generator().manual_seed(1)
    drawn = BlockLayout.from_mask(torch.rand(HEADS, 12, 12, generator=generator) < 0.2, 32, 32)
    local = BlockLayout.local_strided(HEADS, 512, 2, 5, 16)
    cases = {
        "local and vertical": make(500, local),
        "on the ends of blocks, sinks and a cap": make(512, local, sinks=torch.randn(HEADS), softcap=3.0),
        "shorter than the ranks are many": make(20, local),
        "one token": make(1, local),
        "none": make(0, local),
        "drawn, with rows that list nothing": make(370, drawn),
        "long rows, one layout for all": make(300, BlockLayout.local_strided(1, 512, 2, 3, 16, q_block_size=64)),
        "short rows, a window": make(
            330, BlockLayout.local_strided(HEADS, 512, 2, 3, 64, q_block_size=16), window=(90, 0)
        ),
        "given bounds, empty runs, bfloat16": make(200, local, bounds=[0, 0, 96, 96, 200], dtype=torch.bfloat16),
    }
    run(world, _attend, world, cases, torch.zeros(world, 2**20, dtype=torch.uint8).share_memory_())


def test_a_cut_shares_listed_blocks_evenly() -> None:
    layout = BlockLayout.local_strided(32, 8192, 16, 8, 64)
    for world in (1, 2, 4, 8):
        for gathering in (0, 2000):
            cuts = [
                cut_rows(world, rank, layout, 8000, (32, 8), gathering=gathering, pieces=2) for rank in range(world)
            ]
            assert len({cut.bounds for cut in cuts}) == 1
            assert sum(cuts[0].listed) == sum(cut_rows(1, 0, layout, 8000, (32, 8)).listed)
            # A row of a head counts as two blocks.
            times = [
                listed + gathering / 64 * gathered + 2 * 32 * (end - begin) / 64
                for listed, gathered, begin, end in zip(
                    cuts[0].listed, cuts[0].gathered, cuts[0].bounds, cuts[0].bounds[1:], strict=False
                )
            ]
            assert max(times) < 1.05 * sum(times) / world, (world, gathering, times)
            for piece in range(2):
                assert len({str(cut.pieces[piece].counts) for cut in cuts}) == 1
                for rank, cut in enumerate(cuts):
                    counts = cut.pieces[piece].counts
                    assert cut.sent.shape[1] == sum(sum(one.counts[rank]) for one in cut.pieces)
                    assert len(cut.pieces[piece].lacked) == sum(row[rank] for row in counts)


def _refusals(rank: int) -> None:
    case = make(100, BlockLayout.local_strided(HEADS, 128, 1, 2, 16))
    heads = (HEADS, HEADS_KV)
    cut = RowCut.of(None, case.layout, 100, heads)
    own = slice(cut.begin, cut.end)
    given = {"q": case.q[own], "k": case.k[own], "v": case.v[own], "cut": cut, "group": None}

    def refused(match: str, error: type[Exception] = ValueError, **changed: Any) -> None:
        with pytest.raises(error, match=match):
            blocksparse_attention_cp(**(given | changed))

    refused(r"^cut must be a blocksparse_attn.parallel.RowCut, got ", TypeError, cut=case.layout)
    refused(r"^cut must be of world 2 and rank \d, as group is, got ", cut=cut_rows(3, rank, case.layout, 100, heads))
    refused(r"^q must be \[\d+, 8, D\], as cut is, got ", q=case.q)
    refused(r"^k must be \[\d+, 2, D\], as cut is, got ", k=case.k[own, :1])
    refused(r"^v must be \[\d+, 2, Dv\], as cut is, got ", v=case.v[own][1:])
    refused(r"^v.dtype must be ", TypeError, v=case.v[own].half())
    refused(r"^q must be without gradient", q=case.q[own].clone().requires_grad_())
    refused(r"^exchange must be one of ", exchange="ring")
    refused(r"^exchange must be one that goes by collectives where tensors are not on GPUs", exchange="symmetric")
    refused(r"^sinks", sinks=torch.zeros(3))
    alone = [torch.distributed.new_group([one]) for one in range(2)][rank]
    for pieces in (1, 2):
        whole = RowCut.of(alone, case.layout, 100, heads, pieces=pieces)
        got = blocksparse_attention_cp(case.q, case.k, case.v, whole, group=alone)
        assert isinstance(got, Tensor)
        assert torch.equal(got, case.whole.out)


def test_a_group_of_one_makes_the_plain_call_and_wrong_arguments_are_named() -> None:
    run(2, _refusals)


def test_cuts_of_wrong_arguments_are_refused() -> None:
    layout = BlockLayout.local_strided(HEADS, 128, 1, 2, 16, q_block_size=32)

    def refused(match: str, error: type[Exception] = ValueError, **changed: Any) -> None:
        given = {"world": 2, "rank": 0, "layout": layout, "tokens": 100, "heads": (HEADS, HEADS_KV)}
        with pytest.raises(error, match=match):
            cut_rows(**(given | changed))

    refused(r"^layout must be a blocksparse_attn.BlockLayout, got ", TypeError, layout=torch.zeros(1))
    refused(r"^tokens must be at most 128, for which layout has rows, got 129", tokens=129)
    refused(r"^heads must be \(query heads, kv heads\), got ", TypeError, heads=8)
    refused(r"^heads must be of 8 query heads, as layout is, got \(4, 2\)", heads=(4, 2))
    refused(r"^heads must be kv heads that divide the query heads, got \(8, 3\)", heads=(8, 3))
    refused(r"^pieces must be a divisor of the 2 kv heads, got 3", pieces=3)
    refused(r"^gathering", TypeError, gathering="much")
    for bounds in ([0, 100], [0, 48, 100], [0, 64, 99], [32, 64, 100]):
        refused(r"^bounds must be 3 from 0 to 100, never falling, multiples of 32 between, got ", bounds=bounds)


def _on_gpus(rank: int) -> None:
    for q_block, options in ((64, {}), (128, {"window": (300, 0)}), (64, {"sinks": torch.randn(HEADS)})):
        layout = BlockLayout.local_strided(HEADS, 4096, 4, 3, 64, q_block_size=q_block)
        case = make(1500, layout, dtype=torch.bfloat16, **options)
        on_gpu = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in options.items()}
        for exchange in ("all_to_all", "symmetric"):
            for pieces in (1, 2):
                cut = RowCut.of(None, layout.to("cuda"), 1500, (HEADS, HEADS_KV), pieces=pieces)
                own = slice(cut.begin, cut.end)
                prefill = partial(
                    blocksparse_attention_cp, *(x[own].cuda() for x in (case.q, case.k, case.v)), cut, group=None,
                    exchange=exchange, return_lse=True, **on_gpu,
                )  # fmt: skip
                prefill()
                check_no_host_sync(prefill)
                for _ in range(3):
                    got = prefill()
                    torch.testing.assert_close(got.out.cpu(), case.whole.out[own], rtol=2e-2, atol=2e-2)
                    torch.testing.assert_close(got.lse.cpu(), case.whole.lse[:, own], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_two_gpus_agree_with_one_process() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run(2, _on_gpus, backend="nccl", deadline=500)
