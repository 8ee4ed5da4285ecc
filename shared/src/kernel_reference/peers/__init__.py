"""Exchanges of attention by kernels that write to the other ranks' memory over NVLink: one launch each.

That memory is torch's symmetric memory (``torch.distributed._symmetric_memory``), on GPUs of one host, without
multicast. A program writes, and takes what the same program of the other ranks writes as it comes: neither a
collective's latency nor a barrier lies between, and results are merged while others are on their way. Each purpose has
memory of its own, which grows by powers of two and stays, for the sake of the CUDA graphs that were captured over it;
the first call of a size synchronises all ranks, and belongs outside a capture.

Calls over one group follow each other on the device, in the same order on every rank, as those of one stream do: they
share memory and counters. Streams whose calls may overlap need a group each.

What a rank writes to has been read. A rank passes a call only when a program of each other rank has entered it, whose
stream has ended the call before: so a rank is never more than one call ahead. Partial results are written behind a
meeting of that call, or behind the heads' gathering, for which the others write when they have read the last ones.
Heads are written behind the exchange before, for which the others write when they have read theirs.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from ..collectives import _by_symmetric_memory, _group_name, world_and_rank
from ..dispatch import PreparedLaunches
from ..integers import cdiv, power_of_two_at_least
from ..launching import Launch, device_properties

Tensor = torch.Tensor
Purpose = Literal["heads", "parts", "states"]

# As many as run at once: programs wait for those of the same number.
_MOST_PROGRAMS = 256
_WARPS = 8
_THREADS = 32 * _WARPS
# Of a program's tile: two loads of 16 bytes a thread.
_TILE_BYTES = _THREADS * 16 * 2
# All bytes of what waits for the peers: see kernels.py.
_EMPTY_BYTE = 255
launches = PreparedLaunches()


class Memory(NamedTuple):
    """What each rank has of a group: ``own`` bytes that the others write to, and all addresses by rank.

    counters: how many of 32 bits stand at each of ``signals``. handle: what keeps the peers' memory mapped.
    """

    own: Tensor
    buffers: tuple[int, ...]
    signals: tuple[int, ...]
    counters: int
    handle: Any


_kept: dict[tuple[Purpose, Any, torch.device], list[Memory]] = {}


def gather_heads(x: Tensor, group: Any) -> Tensor:
    """x [..., h, D] of every rank as [..., world * h, D], the heads of one rank behind another's.

    An :func:`exchange_and_merge` has to come between this and the group's next call.
    """
    world, _ = world_and_rank(group)
    whole = x.new_empty(*x.shape[:-2], world * x.shape[-2], x.shape[-1])
    rows = x.flatten(0, -3).flatten(1)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if rows.numel():
        _gather("heads", rows, whole.view(len(rows), world, rows.shape[1]), group, ready=True)
    return whole


def gather_states(x: Tensor, group: Any) -> Tensor:
    """x of every rank as [world, ...], in the order of ranks; x has the same shape on all of them."""
    world, _ = world_and_rank(group)
    whole = x.new_empty(world, *x.shape)
    if x.numel():
        _gather("states", x.reshape(1, -1), whole.view(1, world, -1), group, ready=False)
    return whole


def _gather(purpose: Purpose, rows: Tensor, whole: Tensor, group: Any, ready: bool) -> None:
    """Rows [rows, width] of every rank to whole [rows, world, width]; ``ready`` as in :func:`exchange_and_merge`."""
    rank = world_and_rank(group)[1]
    memory = _memory(purpose, whole.numel() * whole.element_size(), rows.device, group)
    rows, whole = _as_words(rows), _as_words(whole)
    numbers = (rank, ready, memory.counters, memory.buffers, memory.signals)
    launches.find(_prepare_gather, (rows, whole), numbers)(rows, whole)


def _as_words(x: Tensor) -> Tensor:
    """The same bytes as integers, of 32 bits where they fit."""
    size = x.element_size()
    if any(number * size % 4 for number in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])):
        return x.view(torch.int8 if size == 1 else torch.int16)
    return x.view(torch.int32)


def exchange_and_merge(out: Tensor, lse: Tensor, group: Any, *, sharded: bool, ready: bool) -> tuple[Tensor, Tensor]:
    """Partial results of all heads, out [N, H, D] and lse [N, H] in float32, to those of all ranks' keys.

    sharded: for this rank's H / world heads, or else for all. ready: all ranks have waited for each other since the
    last exchange, as in :func:`gather_heads`; else they do first.
    """
    world, rank = world_and_rank(group)
    rows, heads, size = out.shape
    heads = heads // world if sharded else heads
    merged, merged_lse = out.new_empty(rows, heads, size), lse.new_empty(rows, heads)
    if not merged.numel():
        return merged, merged_lse
    if out.stride(2) != 1:
        out = out.contiguous()
    bytes_of = rows * heads * world * (size * out.element_size() + lse.element_size()) + 16
    memory = _memory("parts", bytes_of, out.device, group)
    numbers = (rank, sharded, ready, memory.counters, memory.buffers, memory.signals)
    launches.find(_prepare_exchange, (out, lse), numbers)(out, lse, merged, merged_lse)
    return merged, merged_lse


def _prepare_gather(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Launch:
    from .kernels import GatherConfig, WholeStrides, gather_rows

    x, whole = tensors
    rank, ready, counters, buffers, signals = numbers
    world = len(buffers)
    rows, width = x.shape
    dependent = _is_dependent(x.device)
    each = power_of_two_at_least(cdiv(rows * width, _MOST_PROGRAMS))
    block = max(_THREADS, min(_TILE_BYTES // x.element_size(), each))
    config = GatherConfig(world, block, _THREADS, counters // world, ready, dependent)
    programs = min(rows * cdiv(width, block), _MOST_PROGRAMS)
    strides = WholeStrides(*whole.stride()[:2])
    rest = (rank, rows, width, x.stride(0), strides, _peers(rank, buffers, signals), config)
    return Launch(gather_rows, (programs, 1, 1), rest, x.device, num_warps=_WARPS, dependent_launch=dependent)


def _prepare_exchange(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Launch:
    from .kernels import ExchangeConfig, PartStrides, exchange_and_merge

    out, lse = tensors
    rank, sharded, ready, counters, buffers, signals = numbers
    world = len(buffers)
    rows, heads, size = out.shape
    heads = heads // world if sharded else heads
    block_d = power_of_two_at_least(size)
    together = max(1, _TILE_BYTES // out.element_size() // block_d)
    each = max(cdiv(rows * heads, _MOST_PROGRAMS), cdiv(_THREADS, block_d))
    tile = min(together, power_of_two_at_least(each))
    dependent = _is_dependent(out.device)
    config = ExchangeConfig(
        world, heads, size, block_d, tile, _THREADS, counters // world, sharded, ready, dependent
    )  # fmt: skip
    strides = PartStrides(*out.stride()[:2], *lse.stride())
    rest = (rank, rows, strides, _peers(rank, buffers, signals), config)
    programs = min(_MOST_PROGRAMS, cdiv(rows * heads, tile))
    return Launch(exchange_and_merge, (programs, 1, 1), rest, out.device, num_warps=_WARPS, dependent_launch=dependent)


def _peers(rank: int, buffers: tuple[int, ...], signals: tuple[int, ...]) -> Any:
    from .kernels import Peers

    return Peers(buffers[rank:] + buffers[:rank], signals[rank:] + signals[:rank])


def _is_dependent(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and device_properties(device).capability >= (9, 0)


def _memory(purpose: Purpose, size: int, device: torch.device, group: Any) -> Memory:
    kept = _kept.setdefault((purpose, _group_name(group), device), [])
    if not kept or kept[-1].own.numel() < size:
        kept.append(_allocate(power_of_two_at_least(size), device, group))
    return kept[-1]


def _allocate(size: int, device: torch.device, group: Any) -> Memory:
    def allocate(symmetric: Any) -> Memory:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("symmetric exchange: its memory must be made by a call before a CUDA graph is captured")
        memory = symmetric._SymmetricMemory
        own = memory.empty_strided_p2p((size,), [1], torch.uint8, device, _group_name(group)).fill_(_EMPTY_BYTE)
        # That, and zeros, are written by the device, behind what it has to do; a peer may write once all have met.
        torch.cuda.synchronize(device)
        handle = memory.rendezvous(own)
        buffers, signals = tuple(handle.buffer_ptrs), tuple(handle.signal_pad_ptrs)
        return Memory(own, buffers, signals, memory.signal_pad_size // 4, handle)

    return _by_symmetric_memory(allocate, device)
