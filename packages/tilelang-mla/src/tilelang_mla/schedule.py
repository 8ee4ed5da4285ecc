"""The split-KV schedule of a ragged batch, by torch operations on the device and without a host sync."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernel_reference.checks import known
from tilelang_mla.plan import DecodeTiles, cdiv, merge_cost, merging_cost, part_cost

Tensor = torch.Tensor

# Above any cost of a schedule, and small enough that keys made of it stay within 64 bits.
_NEVER = 2**50


class DecodePlan(NamedTuple):
    """How ``flash_mla_with_kvcache`` cuts a batch; made by :func:`tilelang_mla.plan_decode`.

    Sequence b has the parts ``first_part[b] .. first_part[b + 1] - 1``, at least one, which share its blocks of
    ``tiles.block_n`` keys equally. The kernel takes these from the lengths of its call: for others than a plan was made
    from it is as right, and less balanced.

    tiles: numbers that depend on neither lengths nor batch. first_part: int32 [B + 1], on the device. order: int32
    [tiles.num_parts(B)]: the parts in the order in which they start, the longest first, then those that are none; each
    number once.
    """

    tiles: DecodeTiles
    first_part: Tensor
    order: Tensor


def cut(
    seqlens_k: Tensor, tiles: DecodeTiles, rows: int, max_seqlen_k: int | None, at_once: int
) -> tuple[Tensor, Tensor]:
    """first_part and order of a plan; at most ``tiles.num_parts`` parts in all.

    Every sequence is cut in parts of at most ``share`` blocks. Of the shares that cut the longest sequence in 1, 2, ...
    ``at_once`` parts, that is taken whose schedule ends first where the parts, the longest first, are assigned to so
    many programs in snake order, as the kernel does.
    """
    sequences = seqlens_k.shape[0]
    device = seqlens_k.device
    # The longest that kernels count; a length that cannot be is as good as any.
    most = 2**31 - 1 if max_seqlen_k is None else max_seqlen_k
    blocks = (seqlens_k.long().clamp(0, most) + tiles.block_n - 1) // tiles.block_n
    if not tiles.spare_parts:
        first_part = torch.arange(sequences + 1, device=device) * tiles.num_splits
        of_parts = blocks[:, None].expand(-1, tiles.num_splits).flatten()
        return first_part.to(torch.int32), of_parts.sort(descending=True, stable=True).indices.to(torch.int32)
    # Two at least: torch.compile (2.11) can't search in one row.
    most_cuts = at_once
    if max_seqlen_k is not None and known(cdiv(max_seqlen_k, tiles.block_n) < at_once):
        most_cuts = cdiv(max_seqlen_k, tiles.block_n)
    candidates = max(2, most_cuts)
    cuts = torch.arange(1, candidates + 1, device=device)
    # One more, so that no sequence is no special case.
    longest = torch.nn.functional.pad(blocks, (1, 0), value=1).amax()
    share = ((longest + cuts - 1) // cuts)[:, None]
    parts = ((blocks + share - 1) // share).clamp(min=1)
    ends = parts.cumsum(1)

    # Of each place in the grid the sequence, none behind the last part, and the cost.
    num_parts = tiles.num_parts(sequences)
    places = torch.arange(num_parts, device=device).expand(candidates, -1)
    sequence = torch.searchsorted(ends, places.contiguous(), right=True)
    merged = (parts > 1).long() * merge_cost(rows)
    costs = torch.nn.functional.pad(part_cost((blocks + parts - 1) // parts, merged), (0, 1))
    costs, order = costs.gather(1, sequence).sort(dim=1, descending=True, stable=True)

    rounds = -(-num_parts // at_once)
    costs = torch.nn.functional.pad(costs, (0, rounds * at_once - num_parts)).reshape(candidates, rounds, at_once)
    cost = (costs[:, ::2].sum(1) + costs[:, 1::2].sum(1).flip(1)).amax(1)
    cost = cost + merging_cost(torch.where(parts > 1, parts, 0).sum(1), rows)
    cost = torch.where(parts.sum(1) <= num_parts, cost, _NEVER)
    # The fewest cuts of those that cost the least, told without argmin, which may give any.
    best = (cost * (candidates + 1) + cuts).amin(0, keepdim=True) % (candidates + 1) - 1
    first_part = torch.nn.functional.pad(ends.index_select(0, best)[0], (1, 0))
    return first_part.to(torch.int32), order.index_select(0, best)[0].to(torch.int32)
