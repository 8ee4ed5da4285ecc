"""Does a cache whose tokens several ranks share give what one process gives? All cases of a world in one run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from blocksparse_attn import AttentionResult, selected_attention
from blocksparse_attn.parallel import selected_attention_cp
from blocksparse_attn.sharing.reference import own_blocks
from kernel_reference.paging import cumulative, paged_cache
from kernel_reference.sharding import Interleave, ZigZag, shard
from kernel_reference.testing.contract import check_no_host_sync
from kernel_reference.testing.distributed import SentBytes, peers_of_one_machine, run

Tensor = torch.Tensor
HEADS, HEADS_KV, DIM, TOPK = 8, 2, 32, 3


class Case(NamedTuple):
    """Packed keys and values [T, Hkv, D] of sequences, what is asked of them, and the result of one process."""

    keys: Tensor
    values: Tensor
    q: Tensor
    indices: Tensor
    lengths: dict[str, Tensor]
    options: dict[str, Any]
    size: int
    whole: AttentionResult


def make(
    lengths: Sequence[tuple[int, int]], *, block: int = 16, size: int = 16, padding: int = 0, sinks: bool = False,
    causal: bool = True, dtype: torch.dtype = torch.float32,
) -> Case:  # fmt: skip
    """Sequences of (all tokens, new ones); their lists, of blocks that lie behind some token too."""
    torch.manual_seed(3)
    seqlens_k = torch.tensor([total for total, _ in lengths], dtype=torch.int32)
    cu = cumulative(torch.tensor([new for _, new in lengths], dtype=torch.int32)).int()
    keys, values = torch.randn(2, int(seqlens_k.sum()), HEADS_KV, DIM).to(dtype)
    rows = int(cu[-1]) + padding
    q = torch.randn(rows, HEADS, DIM).to(dtype)
    indices = torch.full((rows, HEADS_KV, TOPK), -1, dtype=torch.int32)
    for (total, _), begin, end in zip(lengths, cu.tolist(), cu.tolist()[1:], strict=False):
        blocks = -(-total // block)
        for row in indices[begin:end].flatten(0, 1):
            chosen = torch.randperm(blocks)[: TOPK - 1].int()
            row[1 : 1 + len(chosen)] = chosen
    options = {"block_size": block, "causal": causal, "sinks": torch.randn(HEADS) if sinks else None}
    cache = paged_cache(keys, values, cumulative(seqlens_k), 16, seed=5)
    given = {"cu_seqlens_q": cu, "seqlens_k": seqlens_k}
    whole = selected_attention(
        q, cache.k_cache, cache.v_cache, indices, block_table=cache.block_table, return_lse=True, **given, **options
    )
    assert isinstance(whole, AttentionResult)
    return Case(keys, values, q, indices, given, options, size, whole)


def held(case: Case, layout: Interleave, page: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's pages, in random order, NaN wherever there is no token of its own."""
    ends = cumulative(case.lengths["seqlens_k"])
    own, other = (shard(x, layout, ends) for x in (case.keys, case.values))
    cache = paged_cache(own.tokens, other.tokens, own.cu_seqlens, page, seed=layout.rank)
    return cache.k_cache, cache.v_cache, cache.block_table


def _attend(rank: int, world: int, cases: dict[str, Case], buffers: Tensor) -> None:
    each = HEADS // world
    for name, case in cases.items():
        layout = Interleave(world, rank, case.size)
        k_cache, v_cache, table = held(case, layout)
        rows, bytes_each = len(case.q), case.q.element_size()
        near = 2e-5 if case.q.dtype == torch.float32 else 2e-2
        for heads, own in (("sharded", slice(rank * each, (rank + 1) * each)), ("replicated", slice(None))):
            for exchange in ("all_to_all", "reduce_scatter"):
                sinks = case.options["sinks"]
                options = case.options | {"sinks": None if sinks is None else sinks[own]}
                attend = partial(
                    selected_attention_cp, case.q[:, own], k_cache, v_cache, case.indices, block_table=table,
                    layout=layout, group=None, heads=heads, return_lse=True, **case.lengths, **options,
                )  # fmt: skip
                with SentBytes() as counted:
                    got = attend(exchange=exchange)
                if exchange == "all_to_all":
                    with peers_of_one_machine(buffers):
                        again = attend(exchange="symmetric")
                    torch.testing.assert_close(again.out, got.out, rtol=near, atol=near)
                    torch.testing.assert_close(again.lse, got.lse)
                assert isinstance(got, AttentionResult)
                what = f"{name}, {heads}, {exchange}, rank {rank}"
                try:
                    torch.testing.assert_close(got.out, case.whole.out[:, own], rtol=near, atol=near)
                    torch.testing.assert_close(got.lse, case.whole.lse[own], rtol=near, atol=near)
                except AssertionError as error:
                    raise AssertionError(f"{what}: {error}") from error
                results, shared = rows * HEADS, heads == "sharded"
                if exchange == "all_to_all":
                    sent = (world - 1) * results * (DIM * bytes_each + 4) / (world if shared else 1)
                else:
                    sent = (world - 1) * results * 4 + (1 if shared else 2) * (world - 1) / world * results * DIM * 4
                assert counted.sent == sent + ((world - 1) * rows * each * DIM * bytes_each if shared else 0), what


@pytest.mark.parametrize("world", [2, 4])
def test_selected_blocks_of_a_cache_shared_by_ranks_are_those_of_one_process(world: int) -> None:
    cases = {
        "decoding": make([(1, 1), (15, 1), (16, 1), (17, 1), (33, 1), (200, 1)]),
        "drafts on the ends of blocks, padding": make([(4, 4), (18, 4), (65, 2), (0, 0), (130, 3)], padding=2),
        "runs of two blocks, sinks": make([(7, 2), (129, 3)], size=32, sinks=True, padding=1),
        "not causal, blocks of one": make([(40, 3), (9, 1)], block=1, size=1, causal=False),
        "longer runs than sequences, bfloat16": make([(90, 2), (3, 1)], size=256, dtype=torch.bfloat16),
    }
    run(world, _attend, world, cases, torch.zeros(world, 2**20, dtype=torch.uint8).share_memory_())


def test_blocks_of_a_rank_are_those_of_its_positions() -> None:
    for world, size, block in ((1, 4, 4), (2, 4, 4), (4, 8, 2)):
        for rank in range(world):
            layout = Interleave(world, rank, size)
            blocks = torch.arange(-1, 30, dtype=torch.int32)
            positions = layout.tokens(20 * block).tolist()
            wanted = [
                positions.index(one * block) // block if one >= 0 and one * block in positions else -1
                for one in blocks.tolist()
            ]
            assert (
                own_blocks(layout, blocks[None, None], torch.tensor([20 * block]), block).flatten().tolist() == wanted
            )


def _refusals(rank: int) -> None:
    case = make([(20, 2), (3, 1)])
    layout = Interleave(2, rank, 16)
    k_cache, v_cache, table = held(case, layout)
    given = {
        "q": case.q, "k_cache": k_cache, "v_cache": v_cache, "indices": case.indices, "block_table": table,
        "layout": layout, "group": None, "heads": "replicated", **case.lengths, **case.options,
    }  # fmt: skip

    def refused(match: str, error: type[Exception] = ValueError, **changed: Any) -> None:
        with pytest.raises(error, match=match):
            selected_attention_cp(**(given | changed))

    refused(r"^layout must be a kernel_reference.sharding.Interleave, got ", TypeError, layout=ZigZag(2, rank))
    refused(r"^layout must be of world 2 and rank \d, as group is, got ", layout=Interleave(3, rank))
    refused(r"^layout must be of a size that blocks of 16 divide, got ", layout=Interleave(2, rank, 8))
    refused(r'^heads must be one of "sharded", "replicated", got ', heads="split")
    refused(r"^exchange must be one of ", exchange="ring")
    refused(r"^q must be without gradient", q=case.q.clone().requires_grad_())
    refused(r"^indices must be \[3, Hkv, topk\]", indices=case.indices[:2])
    refused(r"^seqlens_k", seqlens_k=case.lengths["seqlens_k"][None])
    refused(r"^sinks", sinks=torch.zeros(3))
    alone = [torch.distributed.new_group([one]) for one in range(2)][rank]
    whole = held(case, Interleave(1, 0), 16)
    got = selected_attention_cp(
        case.q, *whole[:2], case.indices, block_table=whole[2], layout=Interleave(1, 0, 16), group=alone,
        **case.lengths, **case.options,
    )  # fmt: skip
    assert isinstance(got, Tensor)
    torch.testing.assert_close(got, case.whole.out, rtol=1e-6, atol=1e-6)


def test_a_group_of_one_makes_the_plain_call_and_wrong_arguments_are_named() -> None:
    run(2, _refusals)


def _on_gpus(rank: int) -> None:
    case = make([(1, 1), (200, 1), (130, 3), (1000, 2)], size=32, dtype=torch.bfloat16, sinks=True)
    cache = [x.cuda() for x in held(case, Interleave(2, rank, 32), 32)]
    own = slice(rank * HEADS // 2, (rank + 1) * HEADS // 2)
    options = case.options | {"sinks": case.options["sinks"][own].cuda()}
    for exchange in ("all_to_all", "reduce_scatter", "symmetric"):
        decode = partial(
            selected_attention_cp, case.q[:, own].cuda(), *cache[:2], case.indices.cuda(), block_table=cache[2],
            layout=Interleave(2, rank, 32), group=None, exchange=exchange, return_lse=True,
            **{name: x.cuda() for name, x in case.lengths.items()}, **options,
        )  # fmt: skip
        decode()
        check_no_host_sync(decode)
        got = decode()
        torch.testing.assert_close(got.out.cpu(), case.whole.out[:, own], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(got.lse.cpu(), case.whole.lse[own], rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
def test_two_gpus_agree_with_one_process() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run(2, _on_gpus, backend="nccl", deadline=500)
