"""What prefill and decoding on several GPUs are timed on, beside one GPU.

From the package's folder: ``torchrun --nproc-per-node 2 benchmarks/parallel.py --out benchmarks/results``

Llama-3-8B's heads. Prefill: prompts of 32k to 256k tokens, and a chunk of 16k behind 128k older ones. Decoding: a rank
has the pages of every world-th place, of one pool that stands whole on each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import distributed

from kernel_reference.bench.ranks import ONE, Call, RanksCase, main
from kernel_reference.sharding import Interleave, ZigZag
from prefix_prefill import prefix_prefill
from prefix_prefill.parallel import prefix_decode_cp, prefix_prefill_cp

PAGE, HEADS, HEADS_KV, SIZE = 64, 32, 8, 128


def cached(older: int, sequences: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pages = max(1, -(-older // PAGE))
    pool = torch.randn(2, sequences * pages, PAGE, HEADS_KV, SIZE, device=device, dtype=torch.bfloat16)
    table = torch.randperm(sequences * pages, device=device, dtype=torch.int32).view(sequences, pages)
    return pool[0], pool[1], table


def make_prefill(new: int, older: int, device: torch.device, rank: int, world: int) -> Mapping[str, Call]:
    """One sequence; the same values on every rank."""
    torch.manual_seed(0)
    cache = cached(older, 1, device)
    q = torch.randn(new, HEADS, SIZE, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(2, new, HEADS_KV, SIZE, device=device, dtype=torch.bfloat16)
    group = distributed.group.WORLD
    rows = ZigZag(world, rank).tokens(new, device)
    own = [x[rows] for x in (q, k, v)]
    bounds = torch.tensor([0, new], dtype=torch.int32, device=device)
    how: dict[str, Any] = {"max_seqlen_q": new}
    lengths = torch.tensor([older + new], dtype=torch.int32, device=device)
    return {
        ONE: Call(lambda: prefix_prefill(q, k, v, *cache, bounds, lengths, **how)),
        "zigzag": Call(
            lambda: prefix_prefill_cp(*own, *cache, bounds, lengths, group=group, **how), lambda out: out[rows]
        ),
    }


def make_decode(
    sequences: int, keys: int, tokens: int, device: torch.device, rank: int, world: int
) -> Mapping[str, Call]:
    """Sequences of one length, a few query tokens each."""
    torch.manual_seed(0)
    k_cache, v_cache, table = cached(keys, sequences, device)
    q = torch.randn(sequences * tokens, HEADS, SIZE, device=device, dtype=torch.bfloat16)
    bounds = torch.arange(sequences + 1, dtype=torch.int32, device=device) * tokens
    lengths = torch.full((sequences,), keys, dtype=torch.int32, device=device)
    group = distributed.group.WORLD
    layout = Interleave.of(group, size=PAGE)
    cache = (k_cache, v_cache, table[:, rank::world].contiguous())
    own = slice(rank * HEADS // world, (rank + 1) * HEADS // world)
    own_q = q[:, own].contiguous()
    how: dict[str, Any] = {"max_seqlen_q": tokens}
    shared: dict[str, Any] = {"layout": layout, "group": group, **how}
    return {
        ONE: Call(lambda: prefix_prefill(q, None, None, k_cache, v_cache, table, bounds, lengths, **how)),
        "interleaved": Call(
            lambda: prefix_decode_cp(own_q, *cache, bounds, lengths, **shared), lambda out: out[:, own]
        ),
        "interleaved, all heads": Call(
            lambda: prefix_decode_cp(q, *cache, bounds, lengths, heads="replicated", **shared)
        ),
    }  # fmt: skip


def cases(dry: bool) -> Iterator[RanksCase]:
    """Prefill, then decoding in CUDA graphs."""
    prompts = [(600, 0), (300, 200)] if dry else [(2**15, 0), (2**16, 0), (2**17, 0), (2**18, 0), (2**14, 2**17)]
    for new, older in prompts:
        yield RanksCase(
            name=f"prefill {new}" + (f" behind {older}" if older else ""), shape={"new": new, "older": older},
            make=partial(make_prefill, new, older), efficiency={} if dry else {"zigzag": 0.93},
        )  # fmt: skip
    steps = (
        [(2, 300, 2)]
        if dry
        else [(batch, keys, 1) for keys in (2**15, 2**17, 2**19) for batch in (1, 16)] + [(16, 2**15, 4)]
    )
    for batch, keys, tokens in steps:
        yield RanksCase(
            name=f"decode B{batch} n{keys}" + (f", {tokens} query tokens" if tokens > 1 else ""),
            shape={"sequences": batch, "keys": keys, "tokens": tokens}, make=partial(make_decode, batch, keys, tokens),
            graph=True,
        )  # fmt: skip


if __name__ == "__main__":
    main(cases)
