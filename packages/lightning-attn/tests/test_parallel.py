"""Do the ranks of a group, each with its run of the tokens, give what one process gives? A world's cases in one run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

# Torch imports it under a dispatch mode: once here, and not in every fork for seconds.
import torch._dynamo
from torch import distributed

from kernel_reference.checks import validate_values
from kernel_reference.recurrence import linear_attention_chunked
from kernel_reference.sharding import Contiguous
from kernel_reference.testing.contract import check_no_host_sync
from kernel_reference.testing.distributed import SentBytes, peers_of_one_machine, run
from kernel_reference.testing.guards import assert_bitwise_equal
from lightning_attn import lightning_attention, lightning_attention_packed
from lightning_attn.parallel import lightning_attention_cp, lightning_attention_packed_cp

Tensor = torch.Tensor
BF16, FP32 = torch.bfloat16, torch.float32
HEADS, D, E = 3, 16, 20
SLOPES = torch.tensor([0.02, 0.0, 2.0])


class Case(NamedTuple):
    """Rows of each sequence on each rank [N][world], and the tensors of one process, packed.

    ``dense``: sequences of one length, given as [b, h, n, d].
    """

    runs: Sequence[Sequence[int]]
    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    initial: Tensor | None
    exact: bool
    dense: bool

    @property
    def lengths(self) -> list[int]:
        return [sum(runs) for runs in self.runs]

    def rows(self, rank: int) -> Tensor:
        """Which of all rows a rank has."""
        own = []
        for begin, runs in zip(accumulate(self.lengths, initial=0), self.runs, strict=False):
            first = begin + sum(runs[:rank])
            own.append(torch.arange(first, first + runs[rank]))
        return torch.cat(own)


class Result(NamedTuple):
    """What a rank got, packed, and what it sent."""

    out: Tensor
    state: Tensor
    gradients: list[Tensor]
    sent: tuple[float, float]


def make(runs: Sequence[Sequence[int]], *, dtype: Any = FP32, carried: bool = True, exact: bool = True) -> Case:
    rows, sequences = sum(map(sum, runs)), len(runs)
    q, k, v, d_out = (torch.randn(rows, HEADS, size).to(dtype) for size in (D, D, E, E))
    initial = torch.randn(sequences, HEADS, D, E) if carried else None
    dense = len({sum(run) for run in runs}) == 1 and len({tuple(run) for run in runs}) == 1
    return Case(runs, q, k, v, d_out, initial, exact, dense)


def contiguous(lengths: Sequence[int], world: int) -> list[list[int]]:
    return [[len(Contiguous(world, rank).tokens(n)) for rank in range(world)] for n in lengths]


def all_rows_at_once(lengths: Sequence[int], world: int) -> list[list[int]]:
    """Packed rows cut into equal parts: a cut may fall on the boundary of two sequences or inside one."""
    total, ends = sum(lengths), [*accumulate(lengths, initial=0)]
    cuts = [total * rank // world for rank in range(world + 1)]
    runs = []
    for begin, end in pairwise(ends):
        clamped = [min(max(cut, begin), end) for cut in cuts]
        runs.append([last - first for first, last in pairwise(clamped)])
    return runs


def cases(world: int) -> dict[str, Case]:
    rest = world - 2
    return {
        "equal parts": make(contiguous([48, 48], world)),
        "unequal parts": make([[7, 30, *[4] * rest]]),
        "shorter than the world": make(contiguous([1, 1], world), carried=False),
        "no tokens": make([[0] * world]),
        "first and last ranks without tokens": make([[0] * (world - 1) + [9]]),
        "all tokens on the first rank": make([[9] + [0] * (world - 1)]),
        "bfloat16": make([[70, 5, *[66] * rest]], dtype=BF16, exact=False),
        "packed, one by one": make(contiguous([1, 40, 0, 3, 64], world)),
        "packed, all rows at once": make(all_rows_at_once([24, 24, 0, 5, 43], world), carried=False),
        "packed, bfloat16": make(all_rows_at_once([100, 1, 91], world), dtype=BF16, exact=False),
    }


def part(case: Case, rank: int, x: Tensor) -> Tensor:
    """A rank's rows of packed ones, in the form that its function takes."""
    own = x[case.rows(rank)]
    return own.unflatten(0, (len(case.runs), -1 if len(own) else 0)).transpose(1, 2) if case.dense else own


def packed(case: Case, x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1) if case.dense else x


def attend(
    case: Case, rank: int, q: Tensor, k: Tensor, v: Tensor, initial: Tensor | None = None, group: Any = None,
    **options: Any,
) -> Any:  # fmt: skip
    """The call of a rank: its outputs and states."""
    options |= {"group": group, "scale": 0.7, "exact": case.exact}
    if case.dense:
        out, kv = lightning_attention_cp(q, k, v, SLOPES, kv_history=initial, **options)
        return out, kv[:, :, 0]
    cu = torch.tensor([0, *accumulate([runs[rank] for runs in case.runs])], device=q.device)
    return lightning_attention_packed_cp(q, k, v, SLOPES, cu, initial_state=initial, **options)


def by_rank(rank: int, world: int, given: dict[str, Case]) -> dict[str, Result]:
    found = {}
    for name, case in given.items():
        leaves = [part(case, rank, x).clone().requires_grad_() for x in (case.q, case.k, case.v)]
        if case.initial is not None:
            # It is the first rank's alone that counts.
            initial = case.initial if rank == 0 else torch.full_like(case.initial, torch.nan)
            leaves.append(initial.clone().requires_grad_())
        with SentBytes() as forward:
            out, state = attend(case, rank, *leaves[:3], leaves[3] if case.initial is not None else None)
        with SentBytes() as backward:
            # The states of all ranks count, each for itself.
            torch.autograd.backward([out, state], [part(case, rank, case.d_out), torch.ones_like(state)])
        gradients = [packed(case, leaf.grad) for leaf in leaves[:3]] + [leaf.grad for leaf in leaves[3:]]
        sent = (forward.sent, backward.sent)
        found[name] = Result(packed(case, out.detach()), state.detach(), gradients, sent)
    return found


def wanted_of(case: Case, world: int, form: Any, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """By a form of the recurrence in one process: outputs and states by rank, and the gradients."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (case.q, case.k, case.v))
    shape = (len(case.runs), HEADS, D, E)
    initial = torch.zeros(shape, dtype=dtype) if case.initial is None else case.initial.to(dtype)
    initial.requires_grad_()
    # Run by run, as the ranks have them.
    outs, states, before = [], [], initial
    for rank in range(world):
        rows = case.rows(rank)
        lengths = [runs[rank] for runs in case.runs]
        out, before = form(q[rows], k[rows], v[rows], SLOPES, lengths, before, 0.7)
        outs.append(out)
        states.append(before)
    loss = sum((out.to(dtype) * case.d_out[case.rows(rank)].to(dtype)).sum() for rank, out in enumerate(outs))
    loss = loss + sum(state.sum() for state in states)
    gradients = torch.autograd.grad(loss, [q, k, v, initial], materialize_grads=True)
    return [x.detach() for x in outs], [x.detach() for x in states], [*gradients]


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def ran(request: pytest.FixtureRequest) -> tuple[int, dict[str, Case], list[dict[str, Result]]]:
    torch.manual_seed(20)
    given = cases(request.param)
    return request.param, given, run(request.param, by_rank, request.param, given)


def assert_near(tensors: Any, got: Tensor, pair: tuple[Tensor, Tensor], what: str) -> None:
    """In float32 as near as a plain version, rounding at all of it; in bfloat16 to a rounding of the largest."""
    wanted, beside = pair
    if got.dtype == BF16 or what.endswith("bfloat16"):
        error = (got.double() - wanted).abs().max() if got.numel() else 0
        assert error <= 2.0**-6 * max(1.0, float(wanted.abs().max())) if got.numel() else True, what
    else:
        apart = (1,) if got.ndim == 3 else (0, 1)
        tensors.assert_rounded(got, tensors.Wanted(wanted, beside), apart=apart, what=what)


def test_ranks_together_give_outputs_states_and_gradients_of_one_process(tensors, ran) -> None:
    world, given, results = ran
    for name, case in given.items():
        exact = wanted_of(case, world, tensors.exact, torch.float64)
        plain = wanted_of(case, world, tensors.plain, FP32)
        for rank in range(world):
            got = results[rank][name]
            what = f"{name}, rank {rank}, {str(case.q.dtype).removeprefix('torch.')}"
            assert_near(tensors, got.out, (exact[0][rank], plain[0][rank]), f"the output, {what}")
            assert_near(tensors, got.state, (exact[1][rank], plain[1][rank]), f"the state, {what}")
            for i, gradient in enumerate(got.gradients[:3]):
                pair = (exact[2][i][case.rows(rank)], plain[2][i][case.rows(rank)])
                assert_near(tensors, gradient, pair, f"gradient {i}, {what}")
            if case.initial is not None:
                pair = (exact[2][3], plain[2][3]) if rank == 0 else (exact[2][3] * 0, plain[2][3] * 0)
                assert_near(tensors, got.gradients[3], pair, f"the gradient of the initial state, {what}")


def test_ranks_send_a_state_and_a_length_a_sequence_and_a_state_backward(ran) -> None:
    world, given, results = ran
    for name, case in given.items():
        sequences, state = len(case.runs), 4 * HEADS * D * E
        for result in results:
            # Between two ranks lie no tokens.
            lengths = 4 * (world - 1) * sequences if world > 2 else 0
            states = (world - 1) * sequences * state
            assert result[name].sent == (states + lengths, states), name


def by_bound(rank: int, case: Case) -> tuple[Tensor, Tensor]:
    """A rank's outputs by states of all tokens, less those by states of as many as heads remember."""
    results = []
    for exact in (True, False):
        own = [part(case, rank, x) for x in (case.q, case.k, case.v)]
        out, state = attend(case._replace(exact=exact), rank, *own, None)
        results.append((out.double(), state.double()))
    (one, one_state), (other, other_state) = results
    return one - other, one_state - other_state


def test_what_inexact_states_leave_out_stays_within_its_bound() -> None:
    """All products k v^T are 1 and those with q are D: what is missing before a run is 4e-11 / (1 - exp(-s))."""
    case = make([[600, 30]], carried=False)
    ones = [torch.ones_like(x) for x in (case.q, case.k, case.v)]
    case = case._replace(q=ones[0], k=ones[1], v=ones[2])
    (first, first_state), (last, last_state) = run(2, by_bound, case)
    assert not bool(first.any())
    assert not bool(first_state.any())
    # Of a head without decay nothing is left out; what another leaves out is below a rounding of what it keeps.
    bound = torch.exp(torch.tensor(-24.0)) / (1 - torch.exp(-SLOPES))
    rounding = 2.0**-22 / (1 - torch.exp(-SLOPES))
    for h in (0, 2):
        assert float(last[:, h].abs().max()) <= 0.7 * D * float(bound[h] + rounding[h])
        assert float(last_state[:, h].abs().max()) <= float(bound[h] + rounding[h])
    assert not bool(last[:, 1].any())


def alone(rank: int, dense: Case, ragged: Case) -> None:
    groups = [distributed.new_group([one]) for one in range(2)]
    with SentBytes() as sent:
        own = attend(dense, 0, *(part(dense, 0, x) for x in (dense.q, dense.k, dense.v)), dense.initial, groups[rank])
        q, k, v = (part(dense, 0, x) for x in (dense.q, dense.k, dense.v))
        plain = lightning_attention(q, k, v, SLOPES, kv_history=dense.initial, scale=0.7)
        assert_bitwise_equal(own[0], plain.out)
        assert_bitwise_equal(own[1], plain.kv[:, :, 0])
        own = attend(ragged, 0, ragged.q, ragged.k, ragged.v, ragged.initial, groups[rank])
        cu = torch.tensor([0, *accumulate(ragged.lengths)])
        wanted = lightning_attention_packed(
            ragged.q, ragged.k, ragged.v, SLOPES, cu, initial_state=ragged.initial, scale=0.7
        )
        for one, other in zip(own, wanted, strict=True):
            assert_bitwise_equal(one, other)
    assert sent.sent == 0
    with pytest.raises(ValueError, match=r"^group must be one that this process is in"):
        attend(ragged, 0, ragged.q, ragged.k, ragged.v, None, groups[1 - rank])
    with pytest.raises(TypeError, match=r"^group must be a torch.distributed.ProcessGroup or None, got 3"):
        attend(ragged, 0, ragged.q, ragged.k, ragged.v, None, 3)
    with pytest.raises(TypeError, match=r"^exact must be a bool"):
        lightning_attention_cp(q, k, v, SLOPES, group=None, exact=1)
    with pytest.raises(ValueError, match=r"^ed must be without gradient"):
        lightning_attention_cp(q, k, v, SLOPES.clone().requires_grad_(), group=None)
    with pytest.raises(TypeError, match=r"^ed must be a torch.Tensor, got None"):
        lightning_attention_cp(q, k, v, None, group=None)
    with validate_values(), pytest.raises(ValueError, match=r"^ed|^slopes"):
        lightning_attention_cp(q, k, v, -SLOPES, group=None)
    # The same on every rank, of the last of which no state is read.
    with pytest.raises(ValueError, match=r"^ed must be of 3 elements, one a head, contiguous \(q, \[b, h, n, d\], is "):
        lightning_attention_cp(q, k, v, SLOPES[:2], group=None)


def test_a_group_of_one_makes_the_plain_call_and_refusals_come_before_anything_is_sent() -> None:
    run(2, alone, make([[5], [5]]), make([[5], [0], [9]]))


def to_peers(rank: int, case: Case, buffers: Tensor) -> None:
    found = []
    for exchange in ("all_gather", "symmetric", "symmetric"):
        leaves = [part(case, rank, x).clone().requires_grad_() for x in (case.q, case.k, case.v)]
        with peers_of_one_machine(buffers):
            results = attend(case, rank, *leaves, case.initial, exchange=exchange)
            # What is kept for the gradients is not in the memory that others write to.
            buffers[rank].fill_(255)
            distributed.barrier()
            torch.autograd.backward([*results], [torch.ones_like(x) for x in results])
        found.append([*(x.detach() for x in results), *(leaf.grad for leaf in leaves)])
    for other in found[1:]:
        for x, wanted in zip(other, found[0], strict=True):
            assert_bitwise_equal(x, wanted)
    with pytest.raises(ValueError, match=r"^exchange must be one of "):
        attend(case, rank, *leaves, exchange="gossip")


def test_states_that_kernels_write_to_peers_are_those_of_the_collective() -> None:
    pytest.importorskip("kernel_reference.peers.kernels")
    run(2, to_peers, make([[5, 4], [7, 9]]), torch.zeros(2, 2**17, dtype=torch.uint8).share_memory_())


def compiled(rank: int, dense: Case, ragged: Case) -> None:
    for case in (dense, ragged):
        run_case = partial(attend, case, rank, group=distributed.group.WORLD)
        # What one rank traces meets what the other calls.
        called = torch.compile(run_case, fullgraph=True, backend="aot_eager") if rank == 0 else run_case
        pairs = []
        for function in (called, run_case):
            leaves = [part(case, rank, x).clone().requires_grad_() for x in (case.q, case.k, case.v)]
            results = function(*leaves, case.initial)
            torch.autograd.backward([*results], [torch.ones_like(x) for x in results])
            pairs.append([*results, *(leaf.grad for leaf in leaves)])
        for one, other in zip(*pairs, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.torch_compile
def test_calls_and_their_gradients_compile_as_one_graph() -> None:
    run(2, compiled, make([[5, 4]]), make([[5, 3], [0, 9]]), deadline=300)


def on_gpus(rank: int) -> None:
    """Longer than a segment, in bfloat16 and in float32, beside one GPU."""
    torch.manual_seed(0)
    global SLOPES
    SLOPES = SLOPES.cuda()
    for dtype, worst in ((BF16, 2.0**-6), (FP32, 2.0**-14)):
        for runs in ([[5000, 3001]], [[700, 0], [0, 0], [1, 6000], [40, 30]]):
            case = make(runs, dtype=dtype, exact=False)
            case = case._replace(**{name: getattr(case, name).cuda() for name in ("q", "k", "v", "d_out", "initial")})
            leaves = [part(case, rank, x).contiguous().requires_grad_() for x in (case.q, case.k, case.v)]
            how = {"group": None, "scale": 0.7, "exact": False, "exchange": "symmetric" if case.dense else "all_gather"}
            cu = torch.tensor([0, *accumulate([runs[rank] for runs in case.runs])], device="cuda")
            if case.dense:
                call = partial(lightning_attention_cp, *leaves, SLOPES, kv_history=case.initial, **how)
            else:
                call = partial(lightning_attention_packed_cp, *leaves, SLOPES, cu, initial_state=case.initial, **how)
            with torch.no_grad():
                call()
                check_no_host_sync(call)
            out, state = call()
            state = state.reshape(case.initial.shape)
            torch.autograd.backward([out, state], [part(case, rank, case.d_out), torch.ones_like(state)])
            cpu = case._replace(**{name: getattr(case, name).cpu() for name in ("q", "k", "v", "d_out", "initial")})
            outs, states, gradients = wanted_of(cpu, 2, oracle, torch.float64)
            pairs = [(packed(case, out.detach()), outs[rank]), (state.detach(), states[rank])]
            pairs += [(packed(case, x.grad), w[cpu.rows(rank)]) for x, w in zip(leaves, gradients, strict=False)]
            for got, wanted in pairs:
                error = (got.cpu().double() - wanted).abs().max() / wanted.abs().max() if got.numel() else 0
                assert error < worst, (runs, dtype, float(error))


def oracle(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, lengths: list[int], initial: Tensor, scale: float) -> Any:
    cu = torch.tensor([0, *accumulate(lengths)])
    return linear_attention_chunked(q, k, v, slopes.cpu(), cu_seqlens=cu, initial_state=initial, scale=scale)


@pytest.mark.gpu
def test_two_gpus_agree_with_one_process() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run(2, on_gpus, backend="nccl", deadline=500)


def example(rank: int, file: str) -> None:
    import runpy

    runpy.run_path(file, run_name="__main__")


def test_the_example_for_two_ranks_agrees_with_one(capfd) -> None:
    """What ``torchrun --nproc-per-node 2`` runs."""
    run(2, example, str(Path(__file__).parents[1] / "examples" / "two_ranks.py"))
    assert "as on one rank to 1e-2: True" in capfd.readouterr().out
