"""Exchanges of attention by kernels that write to the other ranks' memory over NVLink: one launch each.

That memory is torch's symmetric memory (``torch.distributed._symmetric_memory``), on GPUs of one host, without
multicast. A program writes, and takes what the same program of the other ranks writes as it comes: neither a
collective's latency nor a barrier lies between, and results are merged while others are on their way. Each purpose has
memory of its own, which grows by powers of two and stays, for the sake of the CUDA graphs that were captured over it;
the first call of a size synchronises all ranks, and belongs outside a capture.

Calls over one group follow each other on the device, in the same order on every rank, as those of one stream do: they
share memory. Streams whose calls may overlap need a group each.

What a rank writes to has been read, and nobody waits for that: calls take the halves of a memory in turn, and who has
ended a call has something of each other rank, which had ended the one before. Rows that kernels of other kinds read,
those of :func:`place_rows`, lie where the host knows it: in one memory, before and behind whose writing ranks meet.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch

from ..collectives import _by_symmetric_memory, _group_name, world_and_rank
from ..dispatch import PreparedLaunches
from ..integers import cdiv, power_of_two_at_least
from ..launching import Launch, device_properties

Tensor = torch.Tensor
Purpose = Literal["heads", "parts", "states", "rows"]

# As many as run at once: programs wait for those of the same number.
_MOST_PROGRAMS = 256
_WARPS = 8
_THREADS = 32 * _WARPS
# Of a program's tile: two loads of 16 bytes a thread.
_TILE_BYTES = _THREADS * 16 * 2
# Of one that ranks meet by.
_COUNTER_BYTES = 4
# Of a half of a memory: both begin where 16 bytes do.
_LEAST_BYTES = 16
# All bytes of what waits for the peers: see kernels.py.
_EMPTY_BYTE = 255
launches = PreparedLaunches()


class Memory(NamedTuple):
    """What each rank has of a group: ``own`` bytes that the others write to, and all addresses by rank.

    It has two halves, or rows and counters behind them. calls: one number of 32 bits, whose turn it is; see kernels.py.
    handle: what keeps the peers' memory mapped.
    """

    own: Tensor
    buffers: tuple[int, ...]
    calls: Tensor
    handle: Any


_kept: dict[tuple[Purpose, Any, torch.device], list[Memory]] = {}


def gather_heads(x: Tensor, group: Any) -> Tensor:
    """x [..., h, D] of every rank as [..., world * h, D], the heads of one rank behind another's."""
    world, _ = world_and_rank(group)
    whole = x.new_empty(*x.shape[:-2], world * x.shape[-2], x.shape[-1])
    rows = x.flatten(0, -3).flatten(1)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if rows.numel():
        _gather("heads", rows, whole.view(len(rows), world, rows.shape[1]), group)
    return whole


def gather_states(x: Tensor, group: Any) -> Tensor:
    """x of every rank as [world, ...], in the order of ranks; x has the same shape on all of them."""
    world, _ = world_and_rank(group)
    whole = x.new_empty(world, *x.shape)
    if x.numel():
        _gather("states", x.reshape(1, -1), whole.view(1, world, -1), group)
    return whole


def _gather(purpose: Purpose, rows: Tensor, whole: Tensor, group: Any) -> None:
    """Rows [rows, width] of every rank to whole [rows, world, width]."""
    rank = world_and_rank(group)[1]
    memory = _memory(purpose, whole.numel() * whole.element_size(), rows.device, group)
    rows, whole = _as_words(rows), _as_words(whole)
    numbers = (rank, memory.buffers, memory.own.numel() // 2)
    launches.find(_prepare_gather, (rows, whole), numbers)(rows, whole, memory.calls)


def place_rows(k: Tensor, v: Tensor, places: Tensor, nowhere: int, group: Any) -> Tensor:
    """Rows of every rank, each at its place on all of them: [nowhere + 1, 2, h, D], of keys and of values.

    The result is of the group until its next call of this, which waits until every rank's stream has come to it.

    Args:
        k, v: [rows, h, D], with as many rows on every rank.
        places: [rows] int64, of this rank's rows; from ``nowhere`` on, they are not placed.
    """
    world, rank = world_and_rank(group)
    shape = (nowhere + 1, 2, *k.shape[1:])
    size = math.prod(shape) * k.element_size()
    counters = _MOST_PROGRAMS * world * _COUNTER_BYTES
    memory = _memory("rows", size + counters, k.device, group)
    own = memory.own[:size].view(k.dtype).view(shape)
    if k.numel():
        rows = [x.flatten(1) for x in (k, v)]
        rows = [x if x.stride(1) == 1 else x.contiguous() for x in rows]
        words = [_as_words(x) for x in rows]
        if words[0].dtype != words[1].dtype:
            words = [x.view(torch.int8 if x.element_size() == 1 else torch.int16) for x in rows]
        behind = memory.own.numel() - counters
        numbers = (rank, nowhere, memory.buffers, behind)
        launches.find(_prepare_places, (*words, places), numbers)(*words, places)
    return own


def _as_words(x: Tensor) -> Tensor:
    """The same bytes as integers, of 32 bits where they fit."""
    size = x.element_size()
    if any(number * size % 4 for number in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])):
        return x.view(torch.int8 if size == 1 else torch.int16)
    return x.view(torch.int32)


def exchange_and_merge(out: Tensor, lse: Tensor, group: Any, *, sharded: bool) -> tuple[Tensor, Tensor]:
    """Partial results of all heads, out [N, H, D] and lse [N, H] in float32, to those of all ranks' keys.

    sharded: for this rank's H / world heads, or else for all.
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
    numbers = (rank, sharded, memory.buffers, memory.own.numel() // 2)
    launches.find(_prepare_exchange, (out, lse), numbers)(out, lse, merged, merged_lse, memory.calls)
    return merged, merged_lse


def _prepare_gather(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Launch:
    from .kernels import GatherConfig, Peers, WholeStrides, gather_rows

    x, whole = tensors
    rank, buffers, half = numbers
    world = len(buffers)
    rows, width = x.shape
    dependent = _is_dependent(x.device)
    each = power_of_two_at_least(cdiv(rows * width, _MOST_PROGRAMS))
    block = max(_THREADS, min(_TILE_BYTES // x.element_size(), each))
    config = GatherConfig(world, block, _THREADS, dependent)
    programs = min(rows * cdiv(width, block), _MOST_PROGRAMS)
    strides = WholeStrides(*whole.stride()[:2])
    rest = (rank, rows, width, x.stride(0), strides, Peers(buffers[rank:] + buffers[:rank], half), config)
    return Launch(gather_rows, (programs, 1, 1), rest, x.device, num_warps=_WARPS, dependent_launch=dependent)


def _prepare_exchange(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Launch:
    from .kernels import ExchangeConfig, PartStrides, Peers, exchange_and_merge

    out, lse = tensors
    rank, sharded, buffers, half = numbers
    world = len(buffers)
    rows, heads, size = out.shape
    heads = heads // world if sharded else heads
    block_d = power_of_two_at_least(size)
    together = max(1, _TILE_BYTES // out.element_size() // block_d)
    each = max(cdiv(rows * heads, _MOST_PROGRAMS), cdiv(_THREADS, block_d))
    tile = min(together, power_of_two_at_least(each))
    dependent = _is_dependent(out.device)
    config = ExchangeConfig(world, heads, size, block_d, tile, _THREADS, sharded, dependent)
    strides = PartStrides(*out.stride()[:2], *lse.stride())
    rest = (rank, rows, strides, Peers(buffers[rank:] + buffers[:rank], half), config)
    programs = min(_MOST_PROGRAMS, cdiv(rows * heads, tile))
    return Launch(exchange_and_merge, (programs, 1, 1), rest, out.device, num_warps=_WARPS, dependent_launch=dependent)


def _prepare_places(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Launch:
    from .kernels import PlaceConfig, Pools, place_rows

    k, v, _ = tensors
    rank, nowhere, buffers, behind = numbers
    rows, width = k.shape
    dependent = _is_dependent(k.device)
    block = power_of_two_at_least(width)
    tile = max(1, _TILE_BYTES // k.element_size() // block)
    config = PlaceConfig(len(buffers), width, block, tile, dependent)
    turned = buffers[rank:] + buffers[:rank]
    pools = Pools(turned, tuple(address + behind for address in turned))
    programs = min(_MOST_PROGRAMS, cdiv(rows, tile))
    rest = (rank, rows, nowhere, k.stride(0), v.stride(0), pools, config)
    return Launch(place_rows, (programs, 1, 1), rest, k.device, num_warps=_WARPS, dependent_launch=dependent)


def _is_dependent(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and device_properties(device).capability >= (9, 0)


def _memory(purpose: Purpose, size: int, device: torch.device, group: Any) -> Memory:
    kept = _kept.setdefault((purpose, _group_name(group), device), [])
    # Rows have no halves, and counters behind them.
    size, empty = (size, 0) if purpose == "rows" else (2 * size, _EMPTY_BYTE)
    if not kept or kept[-1].own.numel() < size:
        kept.append(_allocate(power_of_two_at_least(max(size, 2 * _LEAST_BYTES)), empty, device, group))
    return kept[-1]


def _allocate(size: int, empty: int, device: torch.device, group: Any) -> Memory:
    def allocate(symmetric: Any) -> Memory:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("symmetric exchange: its memory must be made by a call before a CUDA graph is captured")
        memory = symmetric._SymmetricMemory
        own = memory.empty_strided_p2p((size,), [1], torch.uint8, device, _group_name(group)).fill_(empty)
        calls = torch.zeros(1, dtype=torch.int32, device=device)
        # By the device, behind what it has to do; a peer may write once all have met.
        torch.cuda.synchronize(device)
        handle = memory.rendezvous(own)
        return Memory(own, tuple(handle.buffer_ptrs), calls, handle)

    return _by_symmetric_memory(allocate, device)
