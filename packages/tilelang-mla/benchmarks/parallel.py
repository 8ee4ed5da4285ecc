"""What decoding over a cache that several GPUs share is timed on, beside one GPU with the whole cache.

From the package's folder: ``torchrun --nproc-per-node 2 benchmarks/parallel.py --out benchmarks/results``

A rank has the pages of every world-th place, of one pool that stands whole on each: the one that one GPU reads. "all
heads" are replicated. "reduce_scatter" is the scheme of vLLM's ``cp_lse_ag_out_rs``, with sums in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import distributed

from kernel_reference.bench.ranks import ONE, Call, RanksCase, main
from kernel_reference.models import DEEPSEEK_V3
from kernel_reference.sharding import Interleave
from tilelang_mla import flash_mla_with_kvcache, plan_decode
from tilelang_mla.parallel import flash_mla_with_kvcache_cp, merge_of_ranks, visible_keys

PAGE = 64
# Of one rank: the whole pool, which one GPU reads.
MOST_BYTES = 60 * 2**30
# From this time of one GPU on half of it is owed at 0.85.
OWED_FROM_US = 200.0
NOPE, WIDTH = DEEPSEEK_V3.latent, DEEPSEEK_V3.latent + DEEPSEEK_V3.rope
SCALE = float(DEEPSEEK_V3.head_qk**-0.5)


def make(
    sequences: int, keys: int, heads: int, tokens: int, device: torch.device, rank: int, world: int
) -> Mapping[str, Call]:
    """The same values on every rank."""
    torch.manual_seed(0)
    pages = -(-keys // PAGE)
    kv = torch.randn(sequences * pages, PAGE, 1, WIDTH, device=device, dtype=torch.bfloat16)
    table = torch.randperm(sequences * pages, device=device, dtype=torch.int32).view(sequences, pages)
    q = torch.randn(sequences, tokens, heads, WIDTH, device=device, dtype=torch.bfloat16)
    lengths = torch.full((sequences,), keys, dtype=torch.int32, device=device)
    group = distributed.group.WORLD
    layout = Interleave.of(group, size=PAGE)
    own_table = table[:, rank::world].contiguous()
    each = heads // world
    own = slice(rank * each, (rank + 1) * each)
    own_q = q[:, :, own].contiguous()
    whole_plan = plan_decode(lengths, heads, tokens, max_seqlen_k=keys)
    plan = plan_decode(layout.visible(lengths), heads, tokens, max_seqlen_k=own_table.shape[1] * PAGE)

    def one() -> torch.Tensor:
        return flash_mla_with_kvcache(q, kv, lengths, table, NOPE, SCALE, plan=whole_plan)

    def shared(exchange: str, kind: str) -> torch.Tensor:
        return flash_mla_with_kvcache_cp(
            own_q if kind == "sharded" else q, kv, lengths, own_table, NOPE, SCALE, layout=layout, group=group,
            heads=kind, exchange=exchange, plan=plan,
        )  # fmt: skip

    seen = visible_keys(layout, lengths, tokens) if tokens > 1 else layout.visible(lengths)
    of_rank = flash_mla_with_kvcache(q, kv, seen, own_table, NOPE, SCALE, False, return_lse=True, plan=plan)

    def alone(exchange: str) -> torch.Tensor:
        """What follows the kernel: exchange and merge, of results that are there."""
        return merge_of_ranks(of_rank, group, "sharded", exchange).out

    exchanges = ["all_to_all", "reduce_scatter", *(["symmetric"] if device.type == "cuda" else [])]
    calls = {ONE: Call(one)}
    for exchange in exchanges:
        calls[exchange] = Call(partial(shared, exchange, "sharded"), lambda whole: whole[:, :, own])
        calls[f"{exchange}, exchange alone"] = Call(partial(alone, exchange), lambda whole: whole[:, :, own])
        calls[f"{exchange}, all heads"] = Call(partial(shared, exchange, "replicated"))
    return calls


def cases(dry: bool) -> Iterator[RanksCase]:
    """1 to 128 sequences of 32k to 512k keys, 16 and 128 heads, in CUDA graphs; and 4 query tokens."""
    points = [
        (batch, keys, heads, 1) for keys in (2**15, 2**17, 2**19) for batch in (1, 8, 32, 128) for heads in (16, 128)
    ]
    points += [(8, 2**17, 16, 4), (32, 2**15, 128, 2)]
    for batch, keys, heads, tokens in [(2, 300, 16, 2)] if dry else points:
        held = batch * keys * WIDTH * 2
        if held > MOST_BYTES:
            continue
        # At 4 TB/s, what decides whether a speed is owed.
        slow = held / 4e6 > OWED_FROM_US
        owed = {"all_to_all": 0.85, "symmetric": 0.85} if slow and not dry else {}
        yield RanksCase(
            name=f"B{batch} n{keys} h{heads}" + (f", {tokens} query tokens" if tokens > 1 else ""),
            shape={"sequences": batch, "keys": keys, "heads": heads, "tokens": tokens, "page": PAGE},
            make=partial(make, batch, keys, heads, tokens), graph=True, efficiency=owed,
            us_at_most={} if dry else {"symmetric, exchange alone": 25.0},
        )  # fmt: skip


if __name__ == "__main__":
    main(cases)
