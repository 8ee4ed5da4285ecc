"""Decoding on two GPUs, or on a CPU as two processes, that share a cache block by block; a prompt by rows and by heads.

torchrun --nproc-per-node 2 packages/blocksparse-attn/examples/two_ranks.py
"""

from typing import Any

import torch
from torch import distributed

from blocksparse_attn import BlockLayout, blocksparse_attention, selected_attention
from blocksparse_attn.parallel import RowCut, blocksparse_attention_cp, selected_attention_cp
from kernel_reference import paging, sharding
from kernel_reference.sharding import Interleave


def main() -> None:
    group = distributed.group.WORLD
    rank, world = distributed.get_rank(), distributed.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    heads, heads_kv, size, block, topk = 8, 2, 128, 64, 4

    # The same everywhere: the keys of two sequences, a new token of each, and the blocks that are selected for it.
    torch.manual_seed(0)
    ends = torch.tensor([0, 1500, 1700])
    keys, values = torch.randn(2, 1700, heads_kv, size).bfloat16()
    q = torch.randn(2, heads, size).bfloat16().to(device)
    lists = [torch.stack([torch.randperm(blocks)[:topk] for _ in range(heads_kv)]) for blocks in (24, 4)]
    indices = torch.stack(lists).int().to(device)
    bounds = torch.tensor([0, 1, 2])
    lengths: dict[str, Any] = {"cu_seqlens_q": bounds.to(device), "seqlens_k": ends.diff().to(device)}

    # A rank keeps every world-th page, and has some of the query heads.
    layout = Interleave.of(group, size=block)
    kept = [sharding.shard(x, layout, ends) for x in (keys, values)]
    cache = paging.paged_cache(kept[0].tokens, kept[1].tokens, kept[0].cu_seqlens, block)
    what: dict[str, Any] = {"indices": indices, "block_size": block}
    names = ("k_cache", "v_cache", "block_table")
    pages = what | {name: x.to(device) for name, x in cache._asdict().items() if name in names}
    own = slice(rank * heads // world, (rank + 1) * heads // world)
    out = selected_attention_cp(q[:, own], **pages, **lengths, layout=layout, group=group)

    cache = paging.paged_cache(keys, values, ends, block)
    pages = what | {name: x.to(device) for name, x in cache._asdict().items() if name in names}
    wanted = selected_attention(q, **pages, **lengths)[:, own]
    same = torch.allclose(out, wanted, rtol=0.02, atol=0.01)
    print(f"rank {rank} of {world} on {device}: selected {[*out.shape]}, the same as one process: {same}")

    # A prompt by rows of its layout: ranks get the listed blocks of keys that they lack.
    pattern = BlockLayout.local_strided(heads, 512, 2, 4, block, device=device)
    q, k, v = torch.randn(3, 1, 500, heads, size).bfloat16().to(device)
    wanted = blocksparse_attention(q, k, v, pattern)[0]
    q, k, v = q[0], k[0], v[0]
    cut = RowCut.of(group, pattern, len(q), (heads, heads))
    rows = slice(cut.begin, cut.end)
    out = blocksparse_attention_cp(q[rows], k[rows], v[rows], cut, group=group)
    same = torch.allclose(out, wanted[rows], rtol=0.02, atol=0.01)
    print(f"rank {rank} of {world} on {device}: rows {[*out.shape]}, the same as one process: {same}")

    # By heads no rank sends anything.
    listed = pattern.heads(own.start, own.stop)
    out = blocksparse_attention(q[None, :, own], k[None, :, own], v[None, :, own], listed)[0]
    same = torch.allclose(out, wanted[:, own], rtol=0.02, atol=0.01)
    print(f"rank {rank} of {world} on {device}: heads {[*out.shape]}, the same as one process: {same}")


if __name__ == "__main__":
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(distributed.get_rank())
    main()
    distributed.destroy_process_group()
