"""Collectives over a process group as functions: nothing is written in place, and gradients pass.

These are torch's functional collectives (``torch.ops._c10d_functional``) with the ranks as a dimension of their own. On
a GPU the stream waits for them, and not the host. A group of one is the identity. What a rank sends, of x's bytes, by
the ring and pairwise algorithms of NCCL:

==============  =================  ==============================
all_gather      [...]              (world - 1) x
all_to_all      [world, ...]       (world - 1) / world x
start_exchange  [rows, ...]        what counts gives other ranks
reduce_scatter  [world, ...]       (world - 1) / world x
all_reduce      [...]              2 (world - 1) / world x
==============  =================  ==============================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch

from .errors import fail
from .words import describe

Tensor = torch.Tensor
T = TypeVar("T")


def world_and_rank(group: Any) -> tuple[int, int]:
    """Ranks of a ``torch.distributed.ProcessGroup``, None being the default one, and this process's within it.

    Raises TypeError where it is no group, ValueError where this process is not in it or there is no default group.
    """
    from torch import distributed

    if group is None and not (distributed.is_available() and distributed.is_initialized()):
        fail("group", "a process group where torch.distributed has no default one", None)
    if group is distributed.GroupMember.NON_GROUP_MEMBER:
        fail("group", "one that this process is in", "another")
    if group is not None and not isinstance(group, distributed.ProcessGroup):
        fail("group", "a torch.distributed.ProcessGroup or None", describe(group), TypeError)
    return distributed.get_world_size(group), distributed.get_rank(group)


def start_all_gather(x: Tensor, group: Any) -> Callable[[], Tensor]:
    """Begin an :func:`all_gather`; what is launched before the result is asked for runs beside it."""
    world, _ = world_and_rank(group)
    if world == 1:
        return lambda: x[None]
    gathered = _op("all_gather_into_tensor", x)(x[None].contiguous(), world, _group_name(group))
    return lambda: _with_contiguous_gradient(_wait(gathered))


def all_gather(x: Tensor, group: Any) -> Tensor:
    """x of every rank, [world, ...], in the order of ranks; x has the same shape on all of them."""
    return start_all_gather(x, group)()


def all_to_all(x: Tensor, group: Any) -> Tensor:
    """x [world, ...], of which ``x[r]`` goes to rank r: ``result[r]`` is what rank r had for this one."""
    world, _ = world_and_rank(group)
    _check_ranks(x, world)
    if world == 1:
        return x
    shares = [x.shape[0] // world] * world
    return _wait(_op("all_to_all_single", x)(x.contiguous(), shares, shares, _group_name(group)))


def start_exchange(x: Tensor, counts: Sequence[Sequence[int]], group: Any) -> Callable[[], Tensor]:
    """Begin an all_to_all of parts that differ in size; see :func:`start_all_gather`.

    Args:
        x: [sum(counts[rank]), ...]: the first ``counts[rank][0]`` rows go to rank 0, the next to rank 1, and so on.
        counts: [world][world] rows from each rank to each, which all ranks know beforehand.

    What waits gives the rows that come, in the order of ranks.
    """
    world, rank = world_and_rank(group)
    sends, receives = _shares(counts, world, rank)
    if x.ndim < 1 or x.shape[0] != sum(sends):
        fail("x", f"of {sum(sends)} rows, as counts[{rank}] says", describe(x))
    if world == 1:
        return lambda: x
    exchanged = _op("all_to_all_single", x)(x.contiguous(), receives, sends, _group_name(group))
    return lambda: _wait(exchanged)


def reduce_scatter(x: Tensor, group: Any) -> Tensor:
    """The sum over ranks of x [world, ...], of which this rank gets its own part [...]."""
    world, _ = world_and_rank(group)
    _check_ranks(x, world)
    if world == 1:
        return x[0]
    return _wait(_op("reduce_scatter_tensor", x)(x.contiguous(), "sum", world, _group_name(group)))[0]


def all_reduce(x: Tensor, group: Any) -> Tensor:
    """The sum over ranks of x."""
    world, _ = world_and_rank(group)
    if world == 1:
        return x
    # A sum whose derivative torch knows in every version: of x from all ranks.
    if x.requires_grad and torch.is_grad_enabled():
        return all_gather(x, group).sum(0)
    return _wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", _group_name(group)))


def start_symmetric_exchanges(
    fill: Callable[[Tensor], object], row: Sequence[int], dtype: torch.dtype, device: torch.device,
    counts: Sequence[Sequence[Sequence[int]]], group: Any,
) -> list[Callable[[], Tensor]]:  # fmt: skip
    """Several :func:`start_exchange` one after another, read from the peers' memory over NVLink by copy engines.

    Kernels that are launched before an exchange is waited for keep all SMs, which a collective would share. Each has to
    be waited for. What is sent lies in torch's workspace of symmetric memory (``torch.distributed._symmetric_memory``),
    which the first call of a size allocates: make it outside a CUDA graph. No multicast.

    Args:
        fill: writes what this rank sends, ``[rows, *row]`` of dtype: the rows of the first exchange, then of the next.
        counts: of each exchange, as there.

    Raises ValueError where ranks have no symmetric memory: tensors on a CPU, ranks on several hosts.
    """
    world, rank = world_and_rank(group)
    shares = [_shares(each, world, rank) for each in counts]
    held = [sum(sum(each[other]) for each in counts) for other in range(world)]
    size = math.prod(row) * dtype.itemsize
    arrived = [torch.empty(sum(receives), *row, dtype=dtype, device=device) for _, receives in shares]
    if max(held) == 0:
        return [partial(_as_is, whole) for whole in arrived]
    memory = _workspace(max(held) * size, device, group)
    # Nobody reads any more what the last exchange left.
    memory.barrier(channel=0)
    if held[rank]:
        fill(memory.get_buffer(rank, (held[rank], *row), dtype))
    memory.barrier(channel=1)
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    waits, passed = [], [0] * world
    with torch.cuda.stream(stream):
        for each, (_, receives), whole in zip(counts, shares, arrived, strict=True):
            place = 0
            for other, count in enumerate(receives):
                if count:
                    first = passed[other] + sum(each[other][:rank])
                    there = memory.get_buffer(other, (count, *row), dtype, first * math.prod(row))
                    whole[place : place + count].copy_(there)
                place += count
                passed[other] += sum(each[other])
            waits.append(_after(stream.record_event(), whole))
    return waits


def _as_is(x: Tensor) -> Tensor:
    return x


def _after(event: torch.cuda.Event, x: Tensor) -> Callable[[], Tensor]:
    def wait() -> Tensor:
        torch.cuda.current_stream(x.device).wait_event(event)
        return x

    return wait


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _shares(counts: Sequence[Sequence[int]], world: int, rank: int) -> tuple[list[int], list[int]]:
    """What a rank sends to each, and what comes from each."""
    if len(counts) != world or any(len(row) != world for row in counts):
        fail("counts", f"{world} times {world} numbers", counts)
    return list(counts[rank]), [row[rank] for row in counts]


def _workspace(size: int, device: torch.device, group: Any) -> Any:
    return _by_symmetric_memory(lambda symmetric: symmetric.get_symm_mem_workspace(_group_name(group), size), device)


def _by_symmetric_memory(make: Callable[[Any], T], device: torch.device) -> T:
    """What ``make`` makes of torch's module; raises ValueError where ranks have no symmetric memory."""
    if device.type != "cuda":
        fail("exchange", "one that goes by collectives where tensors are not on GPUs with symmetric memory", device)
    try:
        from torch.distributed import _symmetric_memory

        return make(_symmetric_memory)
    except (ImportError, RuntimeError) as error:
        if torch.cuda.is_current_stream_capturing():
            raise
        found = str(error).splitlines()[0]
        raise ValueError(f"exchange must be one that goes by collectives on these ranks, got {found}") from error


def _check_ranks(x: Tensor, world: int) -> None:
    if x.ndim < 1 or x.shape[0] != world:
        fail("x", f"[{world}, ...], a part a rank", describe(x))


def _group_name(group: Any) -> Any:
    """What torch's ops know a group by; None is the default one."""
    from torch import distributed

    whole: Any = distributed.group.WORLD if group is None else group
    return whole.group_name


def _op(name: str, x: Tensor) -> Any:
    # torch 2.11 has derivatives in a namespace of their own.
    asked = x.requires_grad and torch.is_grad_enabled()
    return getattr(torch.ops._c10d_functional_autograd if asked else torch.ops._c10d_functional, name)


def _with_contiguous_gradient(x: Tensor) -> Tensor:
    """x, whose gradient torch 2.11 sends as it comes, and gloo wants contiguous: that of a sum is expanded."""
    if x.requires_grad and not torch.compiler.is_compiling():
        x.register_hook(Tensor.contiguous)
    return x


def _wait(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)  # type: ignore[no-any-return]
