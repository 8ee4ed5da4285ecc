"""DeepSeek-V3's decoding on two GPUs, or on a CPU as two processes, each with half of every sequence's cache.

torchrun --nproc-per-node 2 packages/tilelang-mla/examples/parallel.py
"""

import torch
from torch import distributed

from kernel_reference import sharding
from kernel_reference.sharding import Interleave
from tilelang_mla import flash_mla_with_kvcache
from tilelang_mla.parallel import flash_mla_with_kvcache_cp


def main() -> None:
    group = distributed.group.WORLD
    rank, world = distributed.get_rank(), distributed.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    longest, heads, page, scale = (65536 if device.type == "cuda" else 512), 16, 64, (128 + 64) ** -0.5

    # The same everywhere: two query tokens of four sequences, and the whole cache, to compare with.
    torch.manual_seed(0)
    seqlens_k = torch.tensor([longest, 3, longest // 2, 65], dtype=torch.int32)
    bounds = torch.nn.functional.pad(seqlens_k.cumsum(0), (1, 0))
    latents = torch.randn(int(bounds[-1]), 1, 512 + 64).bfloat16()
    q = torch.randn(4, 2, heads, 512 + 64).bfloat16().to(device)

    # A rank's cache holds its own tokens: every other page, whatever the length grows to.
    layout = Interleave.of(group, size=page)
    kv, block_table = paged(*sharding.shard(latents, layout, bounds), page, device)
    own = slice(rank * heads // world, (rank + 1) * heads // world)

    lengths = seqlens_k.to(device)
    out = flash_mla_with_kvcache_cp(q[:, :, own], kv, lengths, block_table, 512, scale, layout=layout, group=group)

    whole, table = paged(latents, bounds, page, device)
    wanted = flash_mla_with_kvcache(q, whole, lengths, table, 512, scale)[:, :, own]
    same = torch.allclose(out, wanted, rtol=0.02, atol=0.005)
    print(f"rank {rank} of {world} on {device}: {[*out.shape]}, the same as one process: {same}")


def paged(tokens: torch.Tensor, bounds: torch.Tensor, page: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Sequences one after another in pages of their own, and the table of these."""
    counts = -(-bounds.diff() // page)
    table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
    pages = tokens.new_zeros(int(counts.sum()), page, *tokens.shape[1:])
    firsts = (counts.cumsum(0) - counts).tolist()
    for row, first, count, begin, end in zip(table, firsts, counts.tolist(), bounds, bounds[1:], strict=False):
        row[:count] = torch.arange(first, first + count)
        pages[first : first + count].flatten(0, 1)[: end - begin] = tokens[begin:end]
    return pages.to(device), table.to(device)


if __name__ == "__main__":
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(distributed.get_rank())
    main()
    distributed.destroy_process_group()
