"""What prefill and decoding on several GPUs are timed on, beside one GPU.

From the package's folder: ``torchrun --nproc-per-node 2 benchmarks/parallel.py --out benchmarks/results``

Prefill: Phi-3-small's pattern, 32 and 8 heads of 128, prompts of 32k to 256k tokens, by runs of rows and by heads.
Decoding: selected blocks of MiniMax-M3 and Qwen3.8; a rank has the pages of every world-th place, of one pool that
stands whole on each. Shares of larger worlds run alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from selected_cases import M3, QWEN, Shape, caches, make_batch, where
from torch import distributed

from blocksparse_attn import BlockLayout, blocksparse_attention, selected_attention
from blocksparse_attn.cuts import cut_rows
from blocksparse_attn.parallel import RowCut, blocksparse_attention_cp, selected_attention_cp
from kernel_reference.bench.ranks import ONE, Call, RanksCase, main
from kernel_reference.models import PHI3_SMALL
from kernel_reference.sharding import Interleave

# Queries that attend to a block while one arrives. Copy engines let only the rank that lacks blocks wait: calculated,
# from 300 GB/s and 600 TFLOP/s.
GATHERING = {"all_to_all": 0.0, "symmetric": 2000.0}
# And the pieces of the kv heads that are exchanged one after another.
EXCHANGES = (("all_to_all", 1), ("all_to_all", 4), ("symmetric", 1), ("symmetric", 2), ("symmetric", 4))
WORLDS = (2, 4, 8)
HEADS, HEADS_KV, SIZE = PHI3_SMALL.num_heads_q, PHI3_SMALL.num_heads_kv, PHI3_SMALL.head_dim


def label_of(exchange: str, pieces: int) -> str:
    return f"rows, {exchange}, {pieces} piece{'s' if pieces > 1 else ''}"


def _rows(rows: slice, whole: torch.Tensor) -> torch.Tensor:
    return whole[rows]


def make_prefill(tokens: int, device: torch.device, rank: int, world: int) -> Mapping[str, Call]:
    """One prompt; the same values on every rank."""
    torch.manual_seed(0)
    pattern = (PHI3_SMALL.local_blocks, PHI3_SMALL.vert_stride, PHI3_SMALL.block_size)
    layout = BlockLayout.local_strided(HEADS, tokens, *pattern, device=device)
    q = torch.randn(tokens, HEADS, SIZE, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(2, tokens, HEADS_KV, SIZE, device=device, dtype=torch.bfloat16)
    ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    how: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": tokens}
    group = distributed.group.WORLD
    calls = {ONE: Call(lambda: blocksparse_attention(q, k, v, layout, **how))}
    shares = {w: cut_rows(w, w - 1, layout, tokens, (HEADS, HEADS_KV)) for w in WORLDS}
    sends = {w: sent_by(cut) for w, cut in shares.items()}
    for exchange, pieces in EXCHANGES if device.type == "cuda" else EXCHANGES[:2]:
        cut = RowCut.of(group, layout, tokens, (HEADS, HEADS_KV), pieces=pieces, gathering=GATHERING[exchange] / pieces)
        rows = slice(cut.begin, cut.end)
        own = tuple(x[rows].clone() for x in (q, k, v))
        calls[label_of(exchange, pieces)] = Call(
            partial(blocksparse_attention_cp, *own, cut, group=group, exchange=exchange), partial(_rows, rows),
            sends=sends,
        )  # fmt: skip
    heads, kv = (slice(rank * count // world, (rank + 1) * count // world) for count in (HEADS, HEADS_KV))
    of_heads = tuple(x[:, some].contiguous() for x, some in ((q, heads), (k, kv), (v, kv)))
    lists = layout.heads(heads.start, heads.stop)
    calls["heads"] = Call(lambda: blocksparse_attention(*of_heads, lists, **how), lambda out: out[:, heads])
    for w, cut in shares.items():
        if cut.begin < cut.end:
            calls[f"share of {w}"] = Call(share(q, k, v, cut), share=w)
    return calls


def share(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cut: RowCut) -> Callable[[], torch.Tensor]:
    """What the last rank of a world attends to, all keys in place."""
    own, keys, values = q[cut.begin : cut.end], k[: cut.end], v[: cut.end]
    bounds = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cut.cu_seqlens, strict=True))
    return lambda: blocksparse_attention(own, keys, values, cut.layout, **bounds, max_seqlen_q=len(own))


def sent_by(cut: RowCut) -> float:
    """The most bytes that a rank sends or gets."""
    [counts] = [piece.counts for piece in cut.pieces]
    most = max(max(map(sum, counts)), max(map(sum, zip(*counts, strict=True))))
    return float(most * cut.layout.k_block * 2 * SIZE * 2)


def make_decode(shape: Shape, device: torch.device, rank: int, world: int) -> Mapping[str, Call]:
    """Sequences of one length, a query token each."""
    torch.manual_seed(0)
    batch, group = make_batch(device, shape), distributed.group.WORLD
    given, heads = where(batch), shape.heads[0]
    k_cache, v_cache = caches(batch.kv)
    own = slice(rank * heads // world, (rank + 1) * heads // world)
    own_q = batch.q[:, own].contiguous()
    shared = given | {
        "block_table": batch.block_table[:, rank::world].contiguous(), "group": group,
        "layout": Interleave.of(group, size=shape.page),
    }  # fmt: skip
    # q, and results of 16 bits with their lse.
    rows, of_row = shape.sequences * shape.new, heads * shape.heads[2] * 2
    sends = {w: (w - 1) / w * rows * (2 * of_row + 4 * heads) for w in WORLDS}
    all_heads = {w: (w - 1) * rows * (of_row + 4 * heads) for w in WORLDS}
    calls = {
        ONE: Call(lambda: selected_attention(batch.q, k_cache, v_cache, batch.indices, **given)),
        "interleaved": Call(
            lambda: selected_attention_cp(own_q, k_cache, v_cache, batch.indices, **shared), lambda out: out[:, own],
            sends=sends,
        ),
        "interleaved, all heads": Call(
            lambda: selected_attention_cp(batch.q, k_cache, v_cache, batch.indices, heads="replicated", **shared),
            sends=all_heads,
        ),
    }  # fmt: skip
    if device.type == "cuda":
        calls["interleaved, symmetric"] = Call(
            partial(selected_attention_cp, own_q, k_cache, v_cache, batch.indices, exchange="symmetric", **shared),
            lambda out: out[:, own], sends=sends,
        )  # fmt: skip
    return calls


def prefill_case(tokens: int, dry: bool = False, *, how: str = "behind other work") -> RanksCase:
    """One prompt; but "on an idle GPU" the host's time does not count, which is most of that of short ones."""
    targets = {} if dry or tokens < 2**15 else {label_of(*how): 0.9 for how in EXCHANGES}
    return RanksCase(
        name=f"prefill {tokens}, {how}", shape={"tokens": tokens}, make=partial(make_prefill, tokens),
        graph=how == "in a graph", ahead=how == "behind other work", efficiency=targets, axis="tokens",
    )  # fmt: skip


def decode_case(shape: Shape) -> RanksCase:
    """In a CUDA graph."""
    return RanksCase(
        name=shape.words, shape={"model": shape.name, "sequences": shape.sequences, "keys": shape.total},
        make=partial(make_decode, shape), graph=True, axis="keys",
    )  # fmt: skip


def cases(dry: bool) -> Iterator[RanksCase]:
    """What is worth most first; prompts of 1k to 16k: where is one GPU faster?"""
    if dry:
        small = replace(M3, heads=(8, 2, 32), block=16, topk=3, sequences=2, new=1, total=300, page=16)
        yield from (prefill_case(600, dry), decode_case(small), decode_case(replace(small, block=4, topk=20)))
        return
    yield prefill_case(2**15, how="in a graph")
    yield from (decode_case(replace(model, sequences=16, new=1, total=2**15)) for model in (M3, QWEN))
    for tokens in (2**18, 2**16, 2**15, 2**17):
        yield prefill_case(tokens)
    for tokens in (2**16, 2**14, 2**13, 2**12, 2**11, 2**10):
        yield from (prefill_case(tokens, how=how) for how in ("in a graph", "on an idle GPU"))
    for sequences, total in ((1, 2**15), (16, 2**18), (128, 2**15), (1, 2**18), (16, 2**16), (1, 2**16)):
        yield from (decode_case(replace(model, sequences=sequences, new=1, total=total)) for model in (M3, QWEN))


if __name__ == "__main__":
    main(cases)
