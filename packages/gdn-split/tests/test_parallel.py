"""Do ranks that share tokens or heads have what one process has? A world's cases in one run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

# Torch imports it under a dispatch mode: once here, and not in every fork for seconds.
import torch._dynamo

from gdn_split import fused_qkvzba_split_reshape_cat, split_views
from gdn_split.parallel import conv_halo, head_shard, shard_views
from kernel_reference.sharding import Contiguous
from kernel_reference.testing.distributed import SentBytes, run

Tensor = torch.Tensor
C = 6


class Case(NamedTuple):
    """Tokens of each sequence on each rank [N][world], all rows, what comes before them, and gradients of results."""

    runs: Sequence[Sequence[int]]
    width: int
    x: Tensor
    initial: Tensor | None
    d_before: Tensor
    d_after: Tensor

    def rows(self, rank: int) -> Tensor:
        begins = accumulate(map(sum, self.runs), initial=0)
        firsts = [(begin + sum(runs[:rank]), runs[rank]) for begin, runs in zip(begins, self.runs, strict=False)]
        return torch.cat([torch.arange(first, first + count) for first, count in firsts])


def make(world: int, runs: Sequence[Sequence[int]], width: int, dtype: torch.dtype, *, carried: bool = True) -> Case:
    x = torch.randn(sum(map(sum, runs)), C).to(dtype)
    shape = (len(runs), C, width - 1)
    initial = torch.randn(shape).to(dtype) if carried else None
    # Whole numbers, which add up exactly in any order.
    d_before, d_after = torch.randint(-3, 4, (2, world, *shape)).to(dtype)
    return Case(runs, width, x, initial, d_before, d_after)


def cases(world: int) -> dict[str, Case]:
    """Among them sequences shorter than the world and than the convolution, empty runs, and none at all."""
    lengths = [40, 1, 0, 5, 3 * world]
    one_by_one = [[len(Contiguous(world, rank).tokens(n)) for rank in range(world)] for n in lengths]
    single = [[1] * world, [2] + [0] * (world - 2) + [1], [0] * (world - 1) + [7], [7] + [0] * (world - 1)]
    return {
        "width 4": make(world, one_by_one, 4, torch.bfloat16),
        "width 2, from zeros": make(world, one_by_one, 2, torch.float32, carried=False),
        "runs shorter than the taps": make(world, single, 4, torch.float16),
        "from zeros": make(world, single, 3, torch.float64, carried=False),
        "no tokens": make(world, [[0] * world] * 2, 4, torch.float32),
    }


def by_rank(rank: int, given: dict[str, Case]) -> dict[str, Any]:
    found = {}
    for name, case in given.items():
        x = case.x[case.rows(rank)].requires_grad_()
        initial = case.initial
        if initial is not None:
            # It is the first rank's alone that counts.
            initial = (initial if rank == 0 else torch.full_like(initial, torch.nan)).clone().requires_grad_()
        cu = torch.tensor([0, *accumulate(runs[rank] for runs in case.runs)])
        with SentBytes() as forward:
            halo = conv_halo(x, cu, group=None, width=case.width, initial_state=initial)
        with SentBytes() as backward:
            torch.autograd.backward(halo, [case.d_before[rank], case.d_after[rank]])
        d_initial = None if initial is None or rank > 0 else initial.grad
        found[name] = (halo.before.detach(), halo.after.detach(), x.grad, d_initial, forward.sent, backward.sent)
    return found


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def ran(request: pytest.FixtureRequest) -> tuple[int, dict[str, Case], list[dict[str, Any]]]:
    torch.manual_seed(20)
    given = cases(request.param)
    return request.param, given, run(request.param, by_rank, given)


def literally(case: Case, world: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """(before, after) of each rank by slicing whole sequences, and the gradients of all rows and the initial states."""
    x = case.x.double().requires_grad_()
    shape = case.d_before.shape[1:]
    initial = (torch.zeros(shape) if case.initial is None else case.initial).double().requires_grad_()
    results = []
    taps = case.width - 1
    for rank in range(world):
        states: list[list[Tensor]] = [[], []]
        for i, (begin, runs) in enumerate(zip(accumulate(map(sum, case.runs), initial=0), case.runs, strict=False)):
            whole = torch.cat([initial[i].T, x[begin : begin + sum(runs)]])
            for which, end in zip(states, (sum(runs[:rank]), sum(runs[: rank + 1])), strict=True):
                which.append(whole[end : end + taps].T)
        results.append((torch.stack(states[0]), torch.stack(states[1])))
    pairs = zip(results, case.d_before.double(), case.d_after.double(), strict=True)
    loss = sum((before * one).sum() + (after * other).sum() for (before, after), one, other in pairs)
    gradients = torch.autograd.grad(loss, [x, initial], materialize_grads=True)
    return results, *gradients


def test_the_inputs_before_and_at_the_end_of_a_run_are_those_of_the_whole_sequence_and_so_are_gradients(ran) -> None:
    world, given, results = ran
    for name, case in given.items():
        wanted, d_x, d_initial = literally(case, world)
        for rank in range(world):
            before, after, got_d_x, got_d_initial, *_ = results[rank][name]
            assert torch.equal(before.double(), wanted[rank][0]), (name, rank)
            assert torch.equal(after.double(), wanted[rank][1]), (name, rank)
            assert torch.equal(got_d_x.double(), d_x[case.rows(rank)]), (name, rank)
            if got_d_initial is not None:
                assert torch.equal(got_d_initial.double(), d_initial), name


def test_ranks_send_the_taps_of_each_sequence_and_its_length(ran) -> None:
    world, given, results = ran
    for name, case in given.items():
        sequences, size = len(case.runs), case.x.element_size()
        taps = sequences * (case.width - 1) * C * size
        lengths = sequences * max(4, size)
        for result in results:
            *_, forward, backward = result[name]
            assert forward == (world - 1) * (taps + lengths), name
            assert backward == (world - 1) * taps, name


def alone(rank: int) -> None:
    x, cu = torch.randn(5, C), torch.tensor([0, 2, 5])
    before, after = conv_halo(x, cu, group=None, width=4)
    assert not bool(before.any())
    assert torch.equal(after, torch.stack([torch.cat([torch.zeros(1, C), x[:2]]).T, x[2:].T]))
    for wrong, said in (
        ({"width": 1}, "width must be at least 2"),
        ({"x": x[0]}, r"x must be \[T, C\]"),
        ({"cu_seqlens": cu + 1}, r"cu_seqlens\[0\] must be 0"),
        ({"initial_state": x}, r"initial_state must be \[2, 6, 3\]"),
    ):
        with pytest.raises(ValueError, match=said):
            conv_halo(**{"x": x, "cu_seqlens": cu, "group": None, "width": 4, **wrong})


def test_a_group_of_one_sends_nothing_and_what_does_not_fit_is_named() -> None:
    run(1, alone)


def example(rank: int, file: str) -> None:
    import runpy

    runpy.run_path(file, run_name="__main__")


def test_the_example_for_two_ranks_has_the_convolution_of_one(capfd) -> None:
    """What ``torchrun --nproc-per-node 2`` runs."""
    run(2, example, str(Path(__file__).parents[1] / "examples" / "two_ranks.py"))
    assert capfd.readouterr().out.count("as on one rank: True") == 2


SIZES = (8, 24, 4, 6)


@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
def test_the_parts_of_ranks_are_views_and_split_as_the_whole(world, layout) -> None:
    tokens, (nqk, nv, hq, hv) = 3, SIZES
    qkvz, ba = torch.randn(tokens, 2 * nqk * hq + 2 * nv * hv), torch.randn(tokens, 2 * nv)
    whole = fused_qkvzba_split_reshape_cat(qkvz, ba, *SIZES, layout=layout)
    for rank in range(world):
        shard = head_shard(*SIZES, world=world, rank=rank, layout=layout)
        views = shard_views(qkvz, shard.qkvz, 1), shard_views(ba, shard.ba, -1)
        assert all(view.untyped_storage().data_ptr() == qkvz.untyped_storage().data_ptr() for view in views[0])
        if layout == "interleaved":
            [own_qkvz], [own_ba] = views
        else:
            own_qkvz, own_ba = (torch.cat(parts, dim=1) for parts in views)
        own = fused_qkvzba_split_reshape_cat(own_qkvz, own_ba, *shard.sizes, layout=layout)
        assert torch.equal(own.mixed_qkv, torch.cat(shard_views(whole.mixed_qkv, shard.qkv, 1), dim=1))
        for name in ("z", "b", "a"):
            [wanted] = shard_views(getattr(whole, name), shard.heads_v, 1)
            assert torch.equal(getattr(own, name), wanted)
        if layout == "contiguous":
            assert torch.equal(split_views(own_qkvz, own_ba, *shard.sizes).z, own.z)


def test_heads_that_cannot_be_shared_are_named() -> None:
    with pytest.raises(ValueError, match=r"^world must be a divisor of the 8 QK heads, got 3"):
        head_shard(*SIZES, world=3, rank=0)
    with pytest.raises(ValueError, match=r"^rank must be from 0 to 1, got 2"):
        head_shard(*SIZES, world=2, rank=2)
    shard = head_shard(*SIZES, world=2, rank=1)
    with pytest.raises(ValueError, match=r"^tensor must be of at least 208 along dimension 0"):
        shard_views(torch.zeros(207, 3), shard.qkv)
