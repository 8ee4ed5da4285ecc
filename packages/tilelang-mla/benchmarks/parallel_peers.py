"""What parallel.py is timed beside: FlashMLA, as vLLM ships it, inside the two exchanges that vLLM has.

vLLM's own modules of them are part of an engine; what is here sends the same messages in the same order: q is
gathered, every rank attends with all heads, then the first gathers the lse, scales a rank's output by one kernel and
sums it by a reduce-scatter in 16 bits (``cp_lse_ag_out_rs``), and the second sends outputs and lse to whom the heads
belong and merges them there (``a2a``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping

import torch

from kernel_reference.bench.ranks import Call
from kernel_reference.collectives import all_gather, all_to_all, reduce_scatter, world_and_rank

Tensor = torch.Tensor
AG_RS = "FlashMLA, lse all-gather and reduce-scatter, as vLLM"
A2A = "FlashMLA, all-to-all, as vLLM"


def decode(
    q: Tensor, own_q: Tensor, kv: Tensor, tables: tuple[Tensor, Tensor], lengths: tuple[Tensor, Tensor],
    numbers: tuple[int, float], own: slice,
) -> Mapping[str, Call]:  # fmt: skip
    """Calls by label. tables, lengths: of the whole cache, and of this rank's part; numbers: dim_nope and scale."""
    if q.device.type != "cuda" or importlib.util.find_spec("vllm") is None:
        return {}
    attend = [flash_mla(kv, table, length, *numbers) for table, length in zip(tables, lengths, strict=True)]

    def gathered() -> tuple[Tensor, Tensor]:
        out, lse = attend[1](all_gather(own_q, None).movedim(0, 2).flatten(2, 3))
        return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    def whole(out: Tensor) -> Tensor:
        return out[:, :, own]

    return {
        "FlashMLA, one GPU": Call(lambda: attend[0](q)[0], part=True),
        AG_RS: Call(lambda: lse_all_gather(*gathered()).unflatten(0, q.shape[:2]), whole),
        A2A: Call(lambda: merged_by_owner(*gathered()).unflatten(0, q.shape[:2]), whole),
    }


def flash_mla(
    kv: Tensor, table: Tensor, lengths: Tensor, nope: int, scale: float
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Its schedule is made at the first call, as an engine makes one a step."""
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

    metadata = get_mla_metadata()[0]

    def run(q: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flash_mla_with_kvcache(q, kv, table, lengths, nope, metadata, softmax_scale=scale, causal=False)
        return out, lse

    return run


def lse_all_gather(out: Tensor, lse: Tensor) -> Tensor:
    """out [N, H, D], lse [N, H] of a rank to [N, H / world, D] of all."""
    world, rank = world_and_rank(None)
    scaled = _scaled(out, all_gather(lse, None), rank)
    return reduce_scatter(scaled.unflatten(0, (world, -1)), None).transpose(0, 1)


def merged_by_owner(out: Tensor, lse: Tensor) -> Tensor:
    """The same by two exchanges, and a merge where the heads belong."""
    world, _ = world_and_rank(None)
    outs = all_to_all(out.unflatten(1, (world, -1)).transpose(0, 1).contiguous(), None)
    lses = all_to_all(lse.unflatten(1, (world, -1)).transpose(0, 1).contiguous(), None)
    _, rows, heads, dim = outs.shape
    merged, merged_lse = out.new_empty(rows * heads, dim), lse.new_empty(rows * heads)
    torch.ops.tilelang_mla.merge.default(outs.flatten(1, 2), lses.flatten(1, 2), merged, merged_lse)
    return merged.unflatten(0, (rows, heads))


def _scaled(out: Tensor, of_ranks: Tensor, rank: int) -> Tensor:
    """out [N, H, D] by its share of the softmax, heads first [H, N, D]; of_ranks: lse [world, N, H]."""
    from parallel_kernels import scale_by_lse

    rows, heads, dim = out.shape
    scaled = out.new_empty(heads, rows, dim)
    world = of_ranks.shape[0]
    scale_by_lse[rows, heads](out.contiguous(), of_ranks.contiguous(), scaled, rank, rows, heads, DIM=dim, WORLD=world)
    return scaled
