"""What ranks need around attention to selected blocks, in torch: on a CPU, and what the kernels are held to."""

from __future__ import annotations

import torch

from kernel_reference.partials import merge_partials
from kernel_reference.sharding import Interleave

Tensor = torch.Tensor


def own_blocks(layout: Interleave, indices: Tensor, ends: Tensor, block_size: int) -> Tensor:
    """The blocks of whole sequences as blocks of what a rank holds; -1 where another rank has one, or nobody sees it.

    indices: [T, Hkv, topk] int32; ends: [T], the tokens that each query token may see. Torch operations alone.

    >>> layout = Interleave(world=2, rank=1, size=64)
    >>> own_blocks(layout, torch.tensor([[[0, 1, 3, 5, -1]]], dtype=torch.int32), torch.tensor([300]), 64)
    tensor([[[-1,  0,  1, -1, -1]]], dtype=torch.int32)
    """
    begins = indices.long() * block_size
    before = layout.visible(begins)
    is_own = (layout.visible(begins + 1) > before) & (indices >= 0) & (begins < ends[:, None, None])
    return torch.where(is_own, before // block_size, -1).to(torch.int32)


def own_lists(
    indices: Tensor, table: Tensor, cu_seqlens_q: Tensor, seqlens_k: Tensor, own: Tensor, own_table: Tensor,
    seen: Tensor, bounds: Tensor, inside: Tensor, world: int, rank: int, size: int, block_size: int, causal: bool,
) -> None:  # fmt: skip
    """Write the last five, of query tokens each as a sequence: see :class:`blocksparse_attn.sharing.ops.Own`."""
    layout = Interleave(world, rank, size)
    row = torch.arange(len(indices), device=cu_seqlens_q.device, dtype=cu_seqlens_q.dtype)
    sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), row, right=True)
    there = sequence < len(seqlens_k)
    sequence = sequence.clamp(max=len(seqlens_k) - 1)
    lengths = seqlens_k[sequence]
    ends = lengths - (cu_seqlens_q[1:][sequence] - row - 1) if causal else lengths
    # A length that cannot be stays one; rows behind the last sequence see nothing.
    ends = torch.where(lengths < cu_seqlens_q.diff()[sequence], -1, ends)
    ends = torch.where(there, ends, 0)
    held = layout.visible(ends)
    own.copy_(own_blocks(layout, indices, ends, block_size))
    # A sequence of one query has a key or more: of one that this rank has none of, in a list that names nothing.
    own_table.copy_(torch.where(held[:, None] > 0, table[sequence], 0) if table.shape[1] else own_table.new_zeros(1))
    seen.copy_(torch.where(ends < 0, -1, held.clamp(min=1)))
    bounds.copy_(torch.arange(len(indices) + 1, device=bounds.device))
    inside.copy_(there & (ends >= 0))


def pack_parts(out: Tensor, lse: Tensor, parts: Tensor) -> None:
    """Write ``parts`` [world, T, H / world, D + 4 bytes] of out [T, H, D] and lse [H, T]."""
    behind = lse.T.contiguous().view(out.dtype).unflatten(-1, (lse.shape[0], -1))
    parts.copy_(torch.cat([out, behind], -1).unflatten(1, (len(parts), -1)).transpose(0, 1))


def merge_parts(parts: Tensor, sinks: Tensor | None, inside: Tensor, out: Tensor, lse: Tensor) -> None:
    """Write out [T, H, D] and lse [H, T] of parts [world, T, H, D + 4 bytes]; sinks [H]."""
    size = out.shape[2]
    merged = merge_partials(parts[..., :size], parts[..., size:].contiguous().view(torch.float32)[..., 0])
    if sinks is None:
        out.copy_(merged.out)
        lse.copy_(merged.lse.T)
        return
    # A logit of all keys together, which no rank may count for itself.
    sink = sinks.float().masked_fill(inside[:, None] == 0, -torch.inf)
    both = torch.logaddexp(merged.lse, sink)
    out.copy_(merged.out.float() * torch.exp(merged.lse - both.masked_fill(both == -torch.inf, 0))[..., None])
    lse.copy_(both.T)
