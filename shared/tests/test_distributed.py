"""Does the spawner of ranks say what happened, and do collectives and the count of their bytes hold?"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

from kernel_reference import collectives
from kernel_reference.sharding import Contiguous, Interleave
from kernel_reference.testing.distributed import SentBytes, peers_of_one_machine, run


def test_ranks_return_their_results_in_order() -> None:
    captured = torch.tensor([1.0, 2.0])

    def double(rank: int, factor: int) -> dict[str, Any]:
        return {"rank": rank, "group": collectives.world_and_rank(None), "x": captured * factor + rank}

    for rank, result in enumerate(run(3, double, 2)):
        assert result["rank"] == rank
        assert result["group"] == (3, rank)
        assert result["x"].tolist() == [2 + rank, 4 + rank]


def test_the_assertion_that_failed_first_is_the_test_s_own() -> None:
    def fail_on_one(rank: int) -> None:
        assert rank != 1, "rank one is odd"
        collectives.all_gather(torch.zeros(1), None)

    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 2 failed:.*in fail_on_one.*rank one is odd"):
        run(2, fail_on_one)


def test_another_error_is_told_with_its_traceback() -> None:
    def raise_on_zero(rank: int) -> None:
        if rank == 0:
            raise KeyError("lost")
        collectives.all_gather(torch.zeros(1), None)

    with pytest.raises(RuntimeError, match=r"(?s)rank 0 of 2 failed:.*in raise_on_zero.*KeyError: 'lost'"):
        run(2, raise_on_zero)


def test_a_rank_that_dies_is_named() -> None:
    def die(rank: int) -> None:
        if rank == 1:
            os._exit(7)
        collectives.all_gather(torch.zeros(1), None)

    with pytest.raises(RuntimeError, match=r"rank 1 of 2 failed:\nit ended without a word"):
        run(2, die)


def test_ranks_that_wait_for_one_that_never_comes_are_named_with_their_place() -> None:
    def one_stays_away(rank: int) -> None:
        if rank == 0:
            collectives.all_gather(torch.zeros(1), None)
        time.sleep(3600)

    with pytest.raises(TimeoutError, match=r"(?s)ranks \[0, 1\] of 2 were not done.*in one_stays_away"):
        run(2, one_stays_away, deadline=4.0)


# Of 4 ranks: what each has, and what it must have after each collective, in one spawn.
def _all_collectives(rank: int, world: int) -> None:
    x = torch.arange(6.0).view(2, 3) + 10 * rank
    of_all = torch.stack([torch.arange(6.0).view(2, 3) + 10 * other for other in range(world)])
    with SentBytes() as counted:
        assert torch.equal(collectives.all_gather(x, None), of_all)
    assert counted.by_op == {"all_gather_into_tensor": (world - 1) * 24}
    # A transposed tensor is no other, nor is one without dimensions.
    assert torch.equal(collectives.all_gather(x.T, None), of_all.mT)
    assert collectives.all_gather(torch.tensor(rank), None).tolist() == [*range(world)]
    assert collectives.all_gather(torch.zeros(0, 5), None).shape == (world, 0, 5)

    addressed = torch.tensor([[100.0 * rank + other, 0.5] for other in range(world)])
    with SentBytes() as counted:
        mine = collectives.all_to_all(addressed, None)
    assert mine.tolist() == [[100.0 * other + rank, 0.5] for other in range(world)]
    assert counted.sent == (world - 1) * 8

    with SentBytes() as counted:
        assert collectives.reduce_scatter(addressed, None).tolist() == [
            sum(100.0 * other + rank for other in range(world)),
            0.5 * world,
        ]
        assert torch.equal(collectives.all_reduce(x, None), of_all.sum(0))
    assert counted.by_op == {"reduce_scatter_tensor": (world - 1) * 8, "all_reduce": 2 * (world - 1) / world * 24}
    assert torch.equal(x, of_all[rank]), "an argument was written"

    # The derivative of a gather is the sum of what all ranks made of one's own; of a sum, the gather.
    weight = torch.arange(float(world)) + rank
    x.requires_grad_()
    (collectives.all_gather(x, None).sum((1, 2)) * weight).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), sum(float(rank + other) for other in range(world))))
    for collective in (collectives.reduce_scatter, collectives.all_to_all):
        parts = torch.ones(world, 3, requires_grad=True)
        (collective(parts, None) * (rank + 1)).sum().backward()
        assert parts.grad[:, 0].tolist() == [other + 1 for other in range(world)]
    y = torch.ones(3, requires_grad=True)
    (collectives.all_reduce(y, None) * (rank + 1)).sum().backward()
    assert y.grad.tolist() == [sum(range(1, world + 1))] * 3

    assert Interleave.of(None, size=4) == Interleave(world, rank, 4)
    assert Contiguous.of(torch.distributed.group.WORLD) == Contiguous(world, rank)
    with pytest.raises(ValueError, match=rf"^x must be \[{world}, \.\.\.\], a part a rank, got "):
        collectives.all_to_all(torch.zeros(world + 1), None)
    alone = [torch.distributed.new_group([one]) for one in range(world)]
    assert collectives.all_gather(y, alone[rank]).data_ptr() == y.data_ptr()
    with pytest.raises(ValueError, match=r"^group must be one that this process is in, got another$"):
        collectives.all_gather(y, alone[rank - 1])


@pytest.mark.parametrize("world", [2, 4])
def test_collectives_give_and_send_what_their_table_says(world: int) -> None:
    run(world, _all_collectives, world)


def _uneven(rank: int, world: int) -> None:
    counts = [[(source + 2 * to) % 3 if source != to else 1 for to in range(world)] for source in range(world)]
    counts[0] = [0] * world
    rows = [[rank, to, i] for to in range(world) for i in range(counts[rank][to])]
    x = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
    wanted = [[source, rank, i] for source in range(world) for i in range(counts[source][rank])]
    with SentBytes() as counted:
        assert collectives.start_exchange(x, counts, None)().tolist() == wanted
    assert counted.sent == 24 * (sum(counts[rank]) - counts[rank][rank])
    with pytest.raises(ValueError, match=rf"^x must be of {len(x)} rows, as counts\[{rank}\] says, got "):
        collectives.start_exchange(torch.cat([x, x, torch.zeros(1, 3)]), counts, None)
    with pytest.raises(ValueError, match=rf"^counts must be {world} times {world} numbers, got "):
        collectives.start_exchange(x, counts[1:], None)
    alone = [torch.distributed.new_group([one]) for one in range(world)][rank]
    assert collectives.start_exchange(x, [[len(x)]], alone)() is x


@pytest.mark.parametrize("world", [2, 4])
def test_parts_that_differ_in_size_are_exchanged(world: int) -> None:
    run(world, _uneven, world)


def _of_peers(rank: int, world: int, buffers: torch.Tensor) -> None:
    uneven = [[(source + 2 * to) % 3 for to in range(world)] for source in range(world)]
    counts = [uneven, [[0] * world] * world, [row[::-1] for row in uneven]]

    def rows(source: int, to: int, i: int, times: int) -> list[list[float]]:
        return [[i + 100.0 * times + 10 * source + to, n] for n in range(counts[i][source][to])]

    def fill(out: torch.Tensor) -> None:
        mine = [row for i in range(3) for to in range(world) for row in rows(rank, to, i, times)]
        out.copy_(torch.tensor(mine))

    with peers_of_one_machine(buffers):
        how = {"row": (2,), "dtype": torch.float32, "device": torch.device("cpu"), "group": None}
        for times in range(3):
            waits = collectives.start_symmetric_exchanges(fill, counts=counts, **how)
            for i, wait in enumerate(waits):
                wanted = [row for source in range(world) for row in rows(source, rank, i, times)]
                assert torch.equal(wait(), torch.tensor(wanted).view(-1, 2))
        [wait] = collectives.start_symmetric_exchanges(fill, counts=counts[1:2], **how)
        assert wait().shape == (0, 2)


@pytest.mark.parametrize("world", [2, 4])
def test_parts_are_read_from_the_memory_of_peers(world: int) -> None:
    run(world, _of_peers, world, torch.zeros(world, 8192, dtype=torch.uint8).share_memory_())


def test_a_group_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match=r"^group must be a process group where torch.distributed has no default one"):
        collectives.world_and_rank(None)
    with pytest.raises(TypeError, match=r"^group must be a torch.distributed.ProcessGroup or None, got "):
        collectives.world_and_rank("the others")
