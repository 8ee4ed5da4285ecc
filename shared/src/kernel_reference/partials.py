"""Attention whose keys several ranks share: each has a partial result over its own, which are exchanged and merged.

With natural logarithms of the softmax's denominators, over parts r,

    lse = log(sum_r exp(lse_r)),    out = sum_r out_r exp(lse_r - lse).

Source: Flash-Decoding (https://pytorch.org/blog/flash-decoding/), FlashInfer (arXiv 2501.01005), section 2.2. Sums are
in float32; exponents are taken below the greatest logarithm, so that none overflows. What an exchange sends of a rank's
partial result, out of N x H x D elements of e bytes:

==============  ==================================================  =========================================
exchange        heads="sharded"                                     heads="replicated"
==============  ==================================================  =========================================
all_to_all      (world - 1) / world N H (D e + 4)                   (world - 1) N H (D e + 4)
reduce_scatter  (world - 1) N H 4 + (world - 1) / world N H D 4     (world - 1) N H 4 + 2 (world - 1) / world N H D 4
symmetric       as all_to_all, written to the peers' memory         as all_to_all
==============  ==================================================  =========================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .checks import check_choice
from .collectives import all_gather, all_reduce, all_to_all, reduce_scatter, world_and_rank
from .errors import fail
from .peers import exchange_and_merge, gather_heads
from .words import describe

Tensor = torch.Tensor

HEADS = ("sharded", "replicated")
EXCHANGES = ("all_to_all", "reduce_scatter", "symmetric")


class Partial(NamedTuple):
    """``out`` [N, H, D] over some of the keys, and its ``lse`` [N, H] in float32; or of W parts [W, N, H, ...]."""

    out: Tensor
    lse: Tensor


def merge_partials(out: Tensor, lse: Tensor) -> Partial:
    """The attention over all keys from W parts, out [W, N, H, D] and lse [W, N, H]; out in the dtype of the parts.

    A part whose lse is -inf, or +inf as FlashMLA writes it, saw no key and is left out, whatever its out holds; where
    all are, out is 0 and lse -inf. NaN in an lse stays.
    """
    lse = lse.float().masked_fill(lse.isinf(), -torch.inf)
    highest = lse.amax(0)
    shift = highest.masked_fill(highest == -torch.inf, 0)
    weights = torch.exp(lse - shift)
    total = weights.sum(0)
    merged = torch.where((lse == -torch.inf)[..., None], 0, out.float() * weights[..., None]).sum(0)
    merged = merged / total.masked_fill(total == 0, 1)[..., None]
    return Partial(merged.to(out.dtype), shift + torch.log(total))


def gathered_heads(q: Tensor, group: Any, exchange: str = "all_to_all") -> Tensor:
    """q [..., H / world, D] of every rank as [..., H, D], the heads of rank 0 first."""
    if world_and_rank(group)[0] == 1:
        return q
    if exchange == "symmetric":
        return gather_heads(q, group)
    return all_gather(q, group).movedim(0, -3).flatten(-3, -2)


def exchange_partials(
    own: Partial, group: Any, *, heads: str = "sharded", exchange: str = "all_to_all",
    merge: Callable[[Tensor, Tensor], Partial] = merge_partials,
) -> Partial:  # fmt: skip
    """Every rank's partial results of all heads to the attention over all ranks' keys.

    Args:
        own: out [N, H, D] and lse [N, H] over this rank's keys.
        heads: "sharded": a rank gets its H / world heads, those from ``rank * H / world`` on; "replicated": all.
        exchange: see the module's table. "reduce_scatter" sums in float32.
        merge: what merges parts [W, ...] in place of :func:`merge_partials`; "symmetric" has a kernel of its own.

    Raises TypeError or ValueError, naming the argument: heads that the world does not divide, options that do not
    exist, "symmetric" on ranks without it.
    """
    check_choice("heads", heads, HEADS)
    check_choice("exchange", exchange, EXCHANGES)
    world, rank = world_and_rank(group)
    out, lse = own
    if heads == "sharded" and out.shape[1] % world:
        fail("q", f"of a number of heads that the world of {world} divides", describe(out))
    if world == 1:
        return own
    if exchange == "reduce_scatter":
        return _summed(own, group, world, rank, heads)
    if exchange == "symmetric":
        return Partial(*exchange_and_merge(out, lse.float(), group, sharded=heads == "sharded"))
    # [N, H, D] and [N, H, 4 bytes]: a message for both, so that one collective is enough.
    packed = torch.cat([out, lse.float().contiguous().view(out.dtype).unflatten(-1, (lse.shape[1], -1))], -1)
    if heads == "sharded":
        # A message a rank, [world, N, H / world, ..].
        parts = all_to_all(packed.unflatten(1, (world, -1)).transpose(0, 1), group)
    else:
        parts = all_gather(packed, group)
    return merge(*_unpacked(parts, out.shape[2]))


def _unpacked(parts: Tensor, head_dim: int) -> Partial:
    behind = parts if head_dim * parts.element_size() % 4 == 0 else parts[..., head_dim:].contiguous()
    return Partial(parts[..., :head_dim], behind.view(torch.float32)[..., -1])


def _summed(own: Partial, group: Any, world: int, rank: int, heads: str) -> Partial:
    out, lse = own
    lse = lse.float().masked_fill(lse.isinf(), -torch.inf)
    of_ranks = all_gather(lse, group)
    highest = of_ranks.amax(0)
    shift = highest.masked_fill(highest == -torch.inf, 0)
    total = torch.exp(of_ranks - shift).sum(0)
    weight = torch.exp(lse - shift) / total.masked_fill(total == 0, 1)
    scaled = torch.where((lse == -torch.inf)[..., None], 0, out.float() * weight[..., None])
    of_all = shift + torch.log(total)
    if heads == "replicated":
        return Partial(all_reduce(scaled, group).to(out.dtype), of_all)
    each = out.shape[1] // world
    summed = reduce_scatter(scaled.unflatten(1, (world, each)).transpose(0, 1), group)
    return Partial(summed.to(out.dtype), of_all[:, rank * each : (rank + 1) * each])
