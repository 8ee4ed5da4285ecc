"""Thousands of the same exchanges by symmetric memory, with ranks that come late in turn: the same bits each time?"""

from __future__ import annotations

import random
import time
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed

from kernel_reference import peers
from kernel_reference.partials import Partial, exchange_partials, gathered_heads, merge_partials
from kernel_reference.testing.distributed import run

Tensor = torch.Tensor
SHAPES = [(1, 16, 512), (32, 128, 512), (7, 32, 128)]


class Given(NamedTuple):
    """Partial results of all ranks, and q of all heads."""

    outs: Tensor
    lses: Tensor
    q: Tensor


def _is_read(purpose: str, wrong: Tensor) -> None:
    """What the peers have written is gone, but for the half of the next call, in which they may be."""
    from kernel_reference.peers import kernels

    for (name, _, _), kept in peers._kept.items():
        if name == purpose:
            turn = (kept[-1].calls // kernels.CALL.value + 1) % 2
            wrong[0] += (kept[-1].own.view(2, -1)[turn.long()] != peers._EMPTY_BYTE).any()


def _exchanged(given: Given, rank: int, kind: str, wrong: Tensor) -> Partial | None:
    """What a call gives; what it gathers is compared at once."""
    world, heads = len(given.outs), given.q.shape[1]
    if kind == "states":
        found = peers.gather_states(given.outs[rank], None)
        _is_read("states", wrong)
        wrong[0] += (found.view(torch.int16) != given.outs.view(torch.int16)).any()
        return None
    if kind == "rows":
        rows = len(given.q)
        last = (world - rank) * rows - 1
        places = torch.arange(last, last - rows, -1, device="cuda")
        placed = peers.place_rows(given.outs[rank], given.outs[rank], places, world * rows, None)
        wrong[0] += (placed[:-1].flip(0).view(torch.int16) != given.outs.flatten(0, 1)[:, None].view(torch.int16)).any()
        return None
    if kind == "sharded":
        whole = gathered_heads(given.q[:, rank * heads // world : (rank + 1) * heads // world], None, "symmetric")
        wrong[0] += (whole != given.q).any()
        _is_read("heads", wrong)
    own = Partial(given.outs[rank], given.lses[rank])
    got = exchange_partials(own, None, heads=kind, exchange="symmetric")
    _is_read("parts", wrong)
    return got


def _compare(got: Partial | None, wanted: Partial | None, wrong: Tensor) -> None:
    if got is not None and wanted is not None:
        # As bits: NaN differs from itself.
        wrong[1] += (got.out.view(torch.int16) != wanted.out.view(torch.int16)).any()
        wrong[2] += (got.lse.view(torch.int32) != wanted.lse.view(torch.int32)).any()


def _stress(rank: int, seconds: float) -> tuple[int, list[int]]:
    torch.manual_seed(0)
    world = distributed.get_world_size()
    given = {
        (shape, number): Given(
            torch.randn(world, *shape, device="cuda").bfloat16(), torch.randn(world, *shape[:2], device="cuda") * 3,
            torch.randn(shape, device="cuda").bfloat16(),
        )
        for shape in SHAPES for number in range(2)
    }  # fmt: skip
    wrong = torch.zeros(3, device="cuda", dtype=torch.int64)
    wanted: dict[Any, Partial | None] = {}
    for key, one in given.items():
        heads = one.q.shape[1]
        for kind in ("sharded", "replicated", "states", "rows"):
            got = wanted[key, kind] = _exchanged(one, rank, kind, wrong)
            if got is not None:
                own = slice(rank * heads // world, (rank + 1) * heads // world) if kind == "sharded" else slice(None)
                close = merge_partials(one.outs[:, :, own], one.lses[:, :, own])
                torch.testing.assert_close(got.out, close.out, rtol=8e-3, atol=1e-5)
                torch.testing.assert_close(got.lse, close.lse, rtol=1e-6, atol=1e-6)
    # The same on all ranks, and another on each.
    same, other = random.Random(7), random.Random(100 + rank)
    cases = list(wanted)
    graphs, stream = [], torch.cuda.Stream()
    for _ in range(4):
        chosen = [same.choice(cases) for _ in range(9)]
        with torch.cuda.stream(stream):
            for key, kind in chosen:
                _exchanged(given[key], rank, kind, wrong)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for key, kind in chosen:
                if other.random() < 0.3:
                    torch.cuda._sleep(other.randint(1, 90000))
                _compare(_exchanged(given[key], rank, kind, wrong), wanted[key, kind], wrong)
        graphs.append(graph)
    count, until = 0, time.monotonic() + seconds
    stop = torch.zeros((), device="cuda")
    while not float(stop):
        for _ in range(200):
            if same.random() < 0.7:
                if other.random() < 0.1:
                    torch.cuda._sleep(other.randint(1, 400000))
                same.choice(graphs).replay()
                count += 9
            else:
                key, kind = same.choice(cases)
                _compare(_exchanged(given[key], rank, kind, wrong), wanted[key, kind], wrong)
                count += 1
        stop.fill_(float(time.monotonic() > until))
        distributed.all_reduce(stop, distributed.ReduceOp.MAX)
    return count, wrong.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_each_of_thousands_of_exchanges_gives_the_same_bits(world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    for count, wrong in run(world, _stress, 5.0, backend="nccl", deadline=120):
        assert count > 1000
        # Heads, states, rows and what is left in memory; outputs; logarithms.
        assert wrong == [0, 0, 0]
