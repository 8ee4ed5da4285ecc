"""What decoding over a cache that several GPUs share is timed on, beside one GPU with the whole cache.

From the package's folder: ``torchrun --nproc-per-node 2 benchmarks/parallel.py --out benchmarks/results``

A rank has the pages of every world-th place, of one pool that stands whole on each: the one that one GPU reads. "all
heads" are replicated. "reduce_scatter" is the scheme of vLLM's ``cp_lse_ag_out_rs``, with sums in float32. A rank's
share of larger worlds runs alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from parallel_peers import decode as peers_of_decode
from torch import distributed

from kernel_reference.bench.ranks import ONE, Call, RanksCase, main, memory_bytes
from kernel_reference.models import DEEPSEEK_V3
from kernel_reference.sharding import Interleave
from tilelang_mla import flash_mla_with_kvcache, plan_decode
from tilelang_mla.parallel import flash_mla_with_kvcache_cp, merge_of_ranks, visible_keys

PAGE = 64
WORLDS = (2, 4, 8)
# Of a device's memory: the whole pool, which one GPU reads.
MOST = 0.7
# From this time of one GPU on the target is an efficiency of 0.85.
TARGET_FROM_US = 200.0
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

    # As all layers of a step have it in common.
    visible = visible_keys(layout, lengths, tokens)

    def one() -> torch.Tensor:
        return flash_mla_with_kvcache(q, kv, lengths, table, NOPE, SCALE, plan=whole_plan)

    def shared(exchange: str, kind: str) -> torch.Tensor:
        return flash_mla_with_kvcache_cp(
            own_q if kind == "sharded" else q, kv, lengths, own_table, NOPE, SCALE, layout=layout, group=group,
            heads=kind, exchange=exchange, plan=plan, visible=visible,
        )  # fmt: skip

    seen = visible_keys(layout, lengths, tokens) if tokens > 1 else layout.visible(lengths)
    of_rank = flash_mla_with_kvcache(q, kv, seen, own_table, NOPE, SCALE, False, return_lse=True, plan=plan)

    def alone(exchange: str) -> torch.Tensor:
        """What follows the kernel: exchange and merge, of results that are there."""
        return merge_of_ranks(of_rank, group, "sharded", exchange).out

    exchanges = ["all_to_all", "reduce_scatter", *(["symmetric"] if device.type == "cuda" else [])]
    calls = {ONE: Call(one)}
    rows = sequences * tokens * heads
    of_result = rows * (NOPE * 2 + 4)
    sends = {w: (w - 1) / w * (rows * WIDTH * 2 + of_result) for w in WORLDS}
    for exchange in exchanges:
        sent = {} if exchange == "reduce_scatter" else sends
        calls[exchange] = Call(partial(shared, exchange, "sharded"), lambda whole: whole[:, :, own], sends=sent)
        calls[f"{exchange}, exchange alone"] = Call(partial(alone, exchange), lambda whole: whole[:, :, own], part=True)
        calls[f"{exchange}, all heads"] = Call(partial(shared, exchange, "replicated"))
    if device.type == "cuda" and world == 2:
        here, there = of_peer((rows * (NOPE + 2) // 2,), device, rank)
        calls["a plain copy of what is exchanged"] = Call(
            lambda: torch.add(here, 0, out=there), checked=False, part=True
        )
    if tokens == 1:
        of_all, of_own = (table, own_table), (lengths, layout.visible(lengths))
        calls.update(peers_of_decode(q, own_q, kv, of_all, of_own, (NOPE, SCALE), own))
        for w in WORLDS:
            if pages >= w:
                part, length = table[:, ::w].contiguous(), Interleave(w, 0, size=PAGE).visible(lengths)
                part_plan = plan_decode(length, heads, 1, max_seqlen_k=part.shape[1] * PAGE)
                attend = partial(
                    flash_mla_with_kvcache, q, kv, length, part, NOPE, SCALE, False, plan=part_plan
                )  # fmt: skip
                calls[f"share of {w}"] = Call(attend, share=w)
    return calls


def of_peer(shape: Sequence[int], device: torch.device, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of this rank, and one in the other's memory.

    A copy between them, which merges nothing and waits for nobody, is the least of an exchange.
    """
    from torch.distributed import _symmetric_memory

    elements = math.prod(shape)
    memory = _symmetric_memory.get_symm_mem_workspace(distributed.group.WORLD.group_name, 2 * elements)
    own = torch.ones(shape, dtype=torch.bfloat16, device=device)
    return own, memory.get_buffer(1 - rank, tuple(shape), own.dtype)


def make_copies(rows: int, device: torch.device, rank: int, world: int) -> Mapping[str, Call]:
    """What an exchange of so many rows between two ranks sends, to the other's memory in several ways."""
    if device.type != "cuda" or world != 2:
        return {ONE: Call(lambda: torch.zeros(rows, NOPE, device=device))}
    from parallel_kernels import copy_rows, copy_rows_by_tma
    from triton.tools.tensor_descriptor import TensorDescriptor

    own, there = of_peer((rows, NOPE), device, rank)
    here = torch.empty_like(own)

    def by_kernel(programs: int, warps: int, tile: int) -> torch.Tensor:
        copy_rows[(programs,)](own, there.data_ptr(), rows, DIM=NOPE, ROWS=tile, num_warps=warps)
        return there

    def by_tma(programs: int, tile: int) -> torch.Tensor:
        source, target = (TensorDescriptor.from_tensor(x, [tile, NOPE]) for x in (own, there))
        copy_rows_by_tma[(programs,)](source, target, rows, ROWS=tile, num_warps=4)
        return there

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "torch.add": lambda: torch.add(own, 0, out=there),
        "the copy engine": lambda: there.copy_(own),
        **{
            f"a kernel, {programs} programs of {32 * warps} threads": partial(by_kernel, programs, warps, tile)
            for programs, warps, tile in ((132, 16, 16), (264, 8, 8), (528, 8, 8), (1024, 4, 8))
        },
        **{f"TMA, {programs} programs": partial(by_tma, programs, 16) for programs in (132, 264)},
    }
    calls = {ONE: Call(lambda: torch.add(own, 0, out=here))}
    return calls | {label: Call(run, checked=False, part=True) for label, run in ways.items()}


def cases(dry: bool) -> Iterator[RanksCase]:
    """1 to 128 sequences of 32k to 512k keys, 16 and 128 heads, in CUDA graphs; and 4 query tokens."""
    points = [
        (batch, keys, heads, 1) for keys in (2**17, 2**15, 2**19) for batch in (1, 32, 8, 128) for heads in (16, 128)
    ]
    points += [(8, 2**17, 16, 4), (32, 2**15, 128, 2)]
    # Where is one GPU faster?
    points += [(batch, keys, heads, 1) for batch in (1, 32) for heads in (16, 128) for keys in (2**13, 2**11)]
    yield RanksCase("copies", {"rows": 2**13, "width": NOPE}, partial(make_copies, 64 if dry else 2**13), graph=True)
    for batch, keys, heads, tokens in [(2, 300, 16, 2), (2, 300, 16, 1)] if dry else points:
        if batch * keys * WIDTH * 2 > MOST * memory_bytes(dry):
            continue
        targets = {} if dry or keys < 2**15 else {"all_to_all": 0.85, "symmetric": 0.85}
        yield RanksCase(
            name=f"B{batch} n{keys} h{heads}" + (f", {tokens} query tokens" if tokens > 1 else ""),
            shape={"sequences": batch, "keys": keys, "heads": heads, "tokens": tokens, "page": PAGE},
            make=partial(make, batch, keys, heads, tokens), graph=True, efficiency=targets,
            target_from_us=TARGET_FROM_US, axis="keys", us_at_most={} if dry else {"symmetric, exchange alone": 25.0},
        )  # fmt: skip


if __name__ == "__main__":
    main(cases)
