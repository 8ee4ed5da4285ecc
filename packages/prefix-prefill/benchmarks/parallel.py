"""What prefill and decoding on several GPUs are timed on, beside one GPU.

From the package's folder: ``torchrun --nproc-per-node 2 benchmarks/parallel.py --out benchmarks/results``

Llama-3-8B's heads. Prefill: prompts of 32k to 256k tokens, and a chunk of 16k behind 128k older ones. Decoding: a rank
has the pages of every world-th place, of one pool that stands whole on each. Shares of larger worlds run alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from parallel_peers import prefill as peers_of_prefill
from torch import distributed

from kernel_reference.bench.ranks import ONE, Call, RanksCase, main, memory_bytes
from kernel_reference.sharding import Interleave, ZigZag
from prefix_prefill import prefix_prefill
from prefix_prefill.parallel import prefix_decode_cp, prefix_prefill_cp
from prefix_prefill.runs import share_decode, share_prefill

PAGE, HEADS, HEADS_KV, SIZE = 64, 32, 8, 128
WORLDS = (2, 4, 8)
OF_KEY = 2 * HEADS_KV * SIZE * 2


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
    sends = {w: (w - 1) * -(-new // w) * OF_KEY for w in WORLDS}
    # As all layers of a step have it in common.
    share = share_prefill(cache[2], bounds, lengths, rows=len(rows), max_seqlen_q=new, group=group)
    prefill = partial(prefix_prefill_cp, *own, *cache, bounds, lengths, group=group, **how)
    calls = {
        ONE: Call(lambda: prefix_prefill(q, k, v, *cache, bounds, lengths, **how)),
        "zigzag": Call(partial(prefill, share=share), lambda out: out[rows], sends=sends),
        "zigzag, no share": Call(prefill, lambda out: out[rows]),
    }
    of_gpus = device.type == "cuda"
    if of_gpus:
        placed = partial(prefill, share=share, exchange="symmetric")
        calls["zigzag, symmetric"] = Call(placed, lambda out: out[rows], sends=sends)
    if not older:
        # Of an engine that knows it, a table without columns.
        nothing = (*cache[:2], cache[2][:, :0])
        empty = share_prefill(nothing[2], bounds, lengths, rows=len(rows), max_seqlen_q=new, group=group)
        alone = partial(prefix_prefill_cp, *own, *nothing, bounds, lengths, group=group, share=empty, **how)
        calls["zigzag, one pass"] = Call(alone, lambda out: out[rows], sends=sends)
        if of_gpus:
            placed = partial(alone, exchange="symmetric")
            calls["zigzag, one pass, symmetric"] = Call(placed, lambda out: out[rows], sends=sends)
        calls.update(peers_of_prefill((*own,), (q, k, v), rows, SIZE**-0.5, device))
    for w in WORLDS:
        if new // (2 * w):
            calls[f"share of {w}"] = Call(share_of(q, new, older, w, device), share=w)
    return calls


def share_of(q: torch.Tensor, new: int, older: int, world: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """What the first rank of a world attends to, all keys in pages."""
    layout = ZigZag(world, 0)
    own = q[layout.tokens(new, device)]
    pages = cached(older + new, 1, device)
    table = pages[2].repeat(2, 1)
    ends = [older + int(half.tokens(new)[-1]) + 1 for half in layout.halves]
    counts = [len(half.tokens(new)) for half in layout.halves]
    bounds = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32, device=device)
    seen = torch.tensor(ends, dtype=torch.int32, device=device)
    return lambda: prefix_prefill(
        own, None, None, *pages[:2], table, bounds, seen, max_seqlen_q=max(counts)
    )  # fmt: skip


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
    share = share_decode(layout, cache[2], bounds, lengths, rows=sequences * tokens, page_size=PAGE, **how)
    shared: dict[str, Any] = {"layout": layout, "group": group, **how}
    decode = partial(prefix_decode_cp, own_q, *cache, bounds, lengths, **shared)
    rows = sequences * tokens
    # q, and results of 16 bits with their lse.
    of_row = HEADS * SIZE * 2
    sends = {w: (w - 1) / w * rows * (of_row + of_row + 4 * HEADS) for w in WORLDS}
    all_heads = {w: (w - 1) * rows * (of_row + 4 * HEADS) for w in WORLDS}
    calls = {
        ONE: Call(lambda: prefix_prefill(q, None, None, k_cache, v_cache, table, bounds, lengths, **how)),
        "interleaved": Call(partial(decode, share=share), lambda out: out[:, own], sends=sends),
        "interleaved, no share": Call(decode, lambda out: out[:, own]),
        "interleaved, all heads": Call(
            lambda: prefix_decode_cp(q, *cache, bounds, lengths, heads="replicated", share=share, **shared),
            sends=all_heads,
        ),
    }  # fmt: skip
    if device.type == "cuda":
        symmetric = partial(decode, share=share, exchange="symmetric")
        calls["interleaved, symmetric"] = Call(symmetric, lambda out: out[:, own], sends=sends)
    for w in WORLDS:
        if tokens == 1 and keys // PAGE >= w:
            part = table[:, ::w].contiguous()
            seen = Interleave(w, 0, size=PAGE).visible(lengths)
            attend = partial(prefix_prefill, q, None, None, k_cache, v_cache, part, bounds, seen, causal=False, **how)
            calls[f"share of {w}"] = Call(attend, share=w)
    return calls


ONE_PASS = ("zigzag, one pass", "zigzag, one pass, symmetric")


def prefill_case(new: int, older: int = 0, *, ahead: bool = True, target: float = 0.93) -> RanksCase:
    name = f"prefill {new}" + (f" behind {older}" if older else "") + ("" if ahead else ", on an idle GPU")
    return RanksCase(
        name=name, shape={"new": new, "older": older}, make=partial(make_prefill, new, older), ahead=ahead,
        efficiency=dict.fromkeys(("zigzag", "zigzag, symmetric", *ONE_PASS), target) if target else {}, axis="new",
    )  # fmt: skip


def decode_case(batch: int, keys: int, tokens: int = 1) -> RanksCase:
    """In a CUDA graph."""
    return RanksCase(
        name=f"decode B{batch} n{keys}" + (f", {tokens} query tokens" if tokens > 1 else ""),
        shape={"sequences": batch, "keys": keys, "tokens": tokens}, make=partial(make_decode, batch, keys, tokens),
        graph=True, axis="keys",
    )  # fmt: skip


def cases(dry: bool) -> Iterator[RanksCase]:
    """What has a target first, but for a prompt that takes a second."""
    if dry:
        yield from (
            prefill_case(600, target=0),
            prefill_case(300, 200, target=0),
            decode_case(2, 300, 2),
            decode_case(2, 600),
        )
        return
    for new, older in ((2**15, 0), (2**16, 0), (2**14, 2**17), (2**17, 0)):
        yield prefill_case(new, older)
    # With shorter ones: where is one GPU faster?
    for keys in (2**17, 2**15, 2**13):
        for batch in (1, 16):
            yield decode_case(batch, keys)
    for ahead in (True, False):
        for new in (2**14, 2**13, 2**12, 2**11, 2**10):
            yield prefill_case(new, ahead=ahead, target=0)
    yield prefill_case(2**15, ahead=False, target=0)
    for batch, keys, tokens in ((16, 2**15, 4), (1, 2**19, 1), (16, 2**19, 1)):
        if batch * keys * OF_KEY < 0.7 * memory_bytes(dry):
            yield decode_case(batch, keys, tokens)
    yield prefill_case(2**18)


if __name__ == "__main__":
    main(cases)
