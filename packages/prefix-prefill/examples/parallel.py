"""A prompt's next tokens on two GPUs, or on a CPU as two processes: prefill in zigzag order, then a step of decoding.

torchrun --nproc-per-node 2 packages/prefix-prefill/examples/parallel.py
"""

import torch
from torch import Tensor, distributed

from kernel_reference import paging, sharding
from kernel_reference.sharding import Interleave, ZigZag
from prefix_prefill import prefix_prefill
from prefix_prefill.parallel import prefix_decode_cp, prefix_prefill_cp


def paged(keys: Tensor, values: Tensor, cu_seqlens: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """A cache of packed keys and values in pages of 16 tokens, and its block table."""
    cache = paging.paged_cache(keys, values, cu_seqlens, 16)
    return cache.k_cache.to(device), cache.v_cache.to(device), cache.block_table.to(device)


def main() -> None:
    group = distributed.group.WORLD
    rank, world = distributed.get_rank(), distributed.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    older, new = (16384, 8192) if device.type == "cuda" else (256, 400)
    heads, heads_kv, size = 8, 2, 128

    # The same everywhere: two sequences, one of a few tokens, and their older tokens in a cache that is whole.
    torch.manual_seed(0)
    starts = torch.tensor([0, new, new + 3], dtype=torch.int32)
    cu_seqlens_q, seqlens_k = starts.to(device), torch.tensor([older + new, 20], dtype=torch.int32, device=device)
    ends = torch.tensor([0, older + new, older + new + 20])
    keys, values = torch.randn(2, older + new + 20, heads_kv, size).bfloat16()
    q = torch.randn(new + 3, heads, size).bfloat16()
    is_new = torch.cat([torch.arange(older + new) >= older, torch.arange(20) >= 17])
    older_pages = paged(keys[~is_new], values[~is_new], torch.tensor([0, older, older + 17]), device)

    # A rank's rows: an early and a late run of each sequence, as many rows on every rank.
    layout = ZigZag.of(group)
    rows = layout.most_tokens(len(q), 2)

    def own(x: Tensor) -> Tensor:
        tokens = sharding.shard(x, layout, starts).tokens
        return torch.cat([tokens, x.new_zeros(rows - len(tokens), *x.shape[1:])]).to(device)

    new_keys, new_values = keys[is_new], values[is_new]
    shares = (own(q), own(new_keys), own(new_values))
    out = prefix_prefill_cp(*shares, *older_pages, cu_seqlens_q, seqlens_k, max_seqlen_q=new, group=group)

    new_rows = (q.to(device), new_keys.to(device), new_values.to(device))
    wanted = prefix_prefill(*new_rows, *older_pages, cu_seqlens_q, seqlens_k, max_seqlen_q=new)
    wanted = sharding.shard(wanted.cpu(), layout, starts).tokens
    same = torch.allclose(out[: len(wanted)].cpu(), wanted, rtol=0.02, atol=0.01)
    print(f"rank {rank} of {world} on {device}: prefill {[*out.shape]}, the same as one process: {same}")

    # Decoding over caches that share the tokens, a page in turn: one query token a sequence, this rank's heads.
    turns = Interleave.of(group, size=16)
    kept = [sharding.shard(x, turns, ends) for x in (keys, values)]
    pages = paged(kept[0].tokens, kept[1].tokens, kept[0].cu_seqlens, device)
    each = slice(rank * heads // world, (rank + 1) * heads // world)
    last = q[starts[1:].long() - 1].to(device)
    bounds = torch.arange(3, dtype=torch.int32, device=device)
    out = prefix_decode_cp(last[:, each], *pages, bounds, seqlens_k, max_seqlen_q=1, layout=turns, group=group)

    pages = paged(keys, values, ends, device)
    wanted = prefix_prefill(last, None, None, *pages, bounds, seqlens_k, max_seqlen_q=1)[:, each]
    same = torch.allclose(out, wanted, rtol=0.02, atol=0.01)
    print(f"rank {rank} of {world} on {device}: decode {[*out.shape]}, the same as one process: {same}")


if __name__ == "__main__":
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(distributed.get_rank())
    main()
    distributed.destroy_process_group()
