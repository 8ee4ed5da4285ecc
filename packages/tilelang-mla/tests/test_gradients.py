"""Are the gradients of ``flash_mla_varlen_func`` those of attention in float64? Public function, and kernels in C."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch

from kernel_reference.attention_gradients import attention_gradients
from kernel_reference.differentiable import Backward
from kernel_reference.testing import contract
from kernel_reference.testing.guards import assert_bitwise_equal, poison_
from kernel_reference.testing.numerics import assert_close_to_oracle
from tilelang_mla import flash_mla_varlen_func
from tilelang_mla.gradients import ops
from tilelang_mla.gradients.arguments import Inputs, check_backward, new_gradients
from tilelang_mla.gradients.plan import BackwardPlan, plan_backward
from tilelang_mla.plan import DeviceLimits, PrefillProblem

Tensor = torch.Tensor
BF16, FP16 = torch.bfloat16, torch.float16
# (queries, keys): more keys, as many, more queries, none of either, a tile's end.
SIZES = [(192, 128), (192, 128), (128, 128), (64, 64)]
RAGGED = [(5, 20), (17, 17), (40, 9), (0, 33), (7, 0), (0, 0), (1, 130), (70, 70), (65, 100)]
H200 = DeviceLimits(132)
# Plain versions beside which a kernel is judged.
DRAWS = 6
# Both sizes of all blocks, a kernel each.
SMALL = BackwardPlan(64, 32, 2, 128, 64, 2)


class Batch:
    """Packed sequences of lengths (queries, keys); rows behind the last, and sequences ``of_nan``, are NaN."""

    def __init__(
        self, device: torch.device, lengths: Sequence[tuple[int, int]], *, heads: tuple[int, int] = (4, 2),
        sizes: tuple[int, int] = (64, 64), dtype: torch.dtype = BF16, causal: bool = True, scale: float = 0.2,
        rows_after: int = 5, of_nan: Sequence[int] = (), wants_lse: bool = True,
    ) -> None:  # fmt: skip
        self.lengths, self.causal, self.scale, self.of_nan = lengths, causal, scale, of_nan
        begins, begins_k = ([0, *accumulate(pair[side] for pair in lengths)] for side in (0, 1))
        held = []
        for starts, num_heads, size in (
            (begins, heads[0], sizes[0]), (begins_k, heads[1], sizes[0]), (begins_k, heads[1], sizes[1]),
            (begins, heads[0], sizes[1]),
        ):  # fmt: skip
            rows = torch.randn(starts[-1] + rows_after, num_heads, size, device=device).to(dtype)
            poison_(rows[starts[-1] :])
            for i in of_nan:
                poison_(rows[starts[i] : starts[i + 1]])
            held.append(rows)
        self.q, self.k, self.v, self.d_out = held
        self.d_lse = torch.randn(heads[0], len(self.q), device=device) if wants_lse else None
        self.begins, self.begins_k = begins, begins_k
        self.cu_seqlens_q, self.cu_seqlens_k = (
            torch.tensor(starts, dtype=torch.int32, device=device) for starts in (begins, begins_k)
        )
        self.most = [max((pair[side] for pair in lengths), default=0) for side in (0, 1)]

    @property
    def inputs(self) -> Inputs:
        return Inputs(self.q, self.k, self.v, self.cu_seqlens_q, self.cu_seqlens_k)

    @property
    def numbers(self) -> tuple[Any, ...]:
        return (*self.most, self.scale, self.causal)

    def run(self) -> list[Tensor]:
        """By autograd of the public function."""
        leaves = [x.detach().requires_grad_() for x in self.inputs[:3]]
        out, lse = flash_mla_varlen_func(*leaves, *self.inputs[3:], *self.numbers, return_lse=True)
        given = [(out, self.d_out), (lse, self.d_lse)]
        results, gradients = zip(*[pair for pair in given if pair[1] is not None], strict=True)
        return list(torch.autograd.grad(results, leaves, gradients))

    def of_sequences(self, dtype: torch.dtype) -> list[Tensor]:
        """In float64, or rounded as a plain version: what is multiplied is of 16 bits."""
        found = [torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in self.inputs[:3]]
        for i, (length, keys) in enumerate(self.lengths):
            seeing = self.seeing(i)
            own = slice(self.begins_k[i], self.begins_k[i + 1])
            if not length or not keys or i in self.of_nan:
                continue
            q, k, v, d_out = (x.double() for x in (self.q[seeing], self.k[own], self.v[own], self.d_out[seeing]))
            d_lse = None if self.d_lse is None else self.d_lse[:, seeing].double()
            both = [torch.tensor([0, rows], device=q.device) for rows in (len(q), keys)]
            if dtype == torch.float64:
                made = attention_gradients(
                    q, k, v, d_out, d_lse, cu_seqlens_q=both[0], cu_seqlens_k=both[1], causal=self.causal,
                    softmax_scale=self.scale,
                )  # fmt: skip
                parts = made.q, made.k, made.v
            else:
                parts = plain_gradients(q, k, v, d_out, d_lse, self.scale, self.causal, dtype)
            for into, part, rows in zip(found, parts, (seeing, own, own), strict=True):
                into[rows] = part
        return found

    def seeing(self, i: int) -> slice:
        """Queries of a sequence that see a key."""
        begin, end = self.begins[i], self.begins[i + 1]
        return slice(max(begin, end - self.lengths[i][1]) if self.causal else begin, end)

    def reached(self) -> list[Tensor]:
        """Which rows of q, k and v have a part in the results."""
        masks = [torch.zeros(len(x), dtype=torch.bool, device=x.device) for x in self.inputs[:3]]
        for i, (length, keys) in enumerate(self.lengths):
            if length and keys:
                masks[0][self.seeing(i)] = True
                for mask in masks[1:]:
                    mask[self.begins_k[i] : self.begins_k[i + 1]] = True
        return masks

    def check(self, gradients: Sequence[Tensor]) -> None:
        exact, *plains = (self.of_sequences(dtype) for dtype in (torch.float64, *[self.q.dtype] * DRAWS))
        plain = [worst_rows(want, beside) for want, *beside in zip(exact, *plains, strict=True)]
        of_rows = (self.begins, self.begins_k, self.begins_k)
        for name, got, want, beside, begins, reached in zip(
            "qkv", gradients, exact, plain, of_rows, self.reached(), strict=True
        ):
            looked = torch.ones(len(got), dtype=torch.bool, device=got.device)
            for i in self.of_nan:
                looked[begins[i] : begins[i + 1]] = False
            got, want, beside = got[looked], want[looked], beside[looked]
            # Of a row of one key the gradient is 0, and a kernel's what rounding leaves of it.
            assert not bool((got[~reached[looked]] != 0).any()), f"rows of d_{name} that nothing reaches"
            if want.any():
                assert_close_to_oracle(got, want, beside.to(got.dtype), what=f"d_{name}")


def worst_rows(exact: Tensor, draws: Sequence[Tensor]) -> Tensor:
    """Of several plain versions, in each row the one that is furthest off."""
    errors = torch.stack([(draw - exact).square().sum(-1) for draw in draws])
    worst = errors.argmax(0)[None, ..., None].expand(1, *exact.shape)
    return torch.stack(list(draws)).gather(0, worst)[0]


def rounded_anyhow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """To one of the two numbers beside each, at random: the nearer one the more often."""
    return (x * (1 + (torch.rand_like(x) - 0.5) * torch.finfo(dtype).eps)).to(dtype)


def plain_gradients(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, d_lse: Tensor | None, scale: float, causal: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one sequence, [rows, heads, size], whose weights and gradients of scores are rounded to 16 bits."""
    group = q.shape[1] // k.shape[1]
    q, k, v, d_out = (x.transpose(0, 1) for x in (q, k, v, d_out))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(k.shape[1] - q.shape[1] + 1) == 1, -torch.inf)
    weights = scores.softmax(-1)
    rounded = weights.to(dtype).double()
    # What an output is rounded by is one number for all of a row's gradient, where a key has nearly all of its weight.
    delta = ((rounded_anyhow(rounded @ v, dtype) * d_out).sum(-1) - (0 if d_lse is None else d_lse))[..., None]
    slopes = (weights * (d_out @ v.mT - delta)).to(dtype).double()
    d_q, d_k, d_v = slopes @ k * scale, slopes.mT @ q * scale, rounded.mT @ d_out
    d_k, d_v = (x.unflatten(0, (-1, group)).sum(1) for x in (d_k, d_v))
    return d_q.transpose(0, 1), d_k.transpose(0, 1), d_v.transpose(0, 1)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_any_lengths_are_those_of_attention(device, causal) -> None:
    for dtype, sizes, heads in ((BF16, (192, 128), (2, 2)), (FP16, (64, 64), (4, 1)), (BF16, (96, 64), (4, 2))):
        batch = Batch(device, RAGGED, dtype=dtype, sizes=sizes, heads=heads, causal=causal)
        batch.check(batch.run())


def test_nan_of_a_neighbour_stays_with_it(device) -> None:
    batch = Batch(device, [(5, 20), (17, 17), (40, 9), (1, 33), (65, 200)], of_nan=(1, 3))
    batch.check(batch.run())


def test_either_result_alone_has_gradients(device) -> None:
    batch = Batch(device, RAGGED, wants_lse=False)
    batch.check(batch.run())
    q = batch.q.detach().requires_grad_()
    given = (*batch.inputs[1:], *batch.numbers)
    out = flash_mla_varlen_func(q, *given)
    assert isinstance(out, Tensor)
    [d_q] = torch.autograd.grad(out, q, batch.d_out)
    batch.check([d_q, *batch.run()[1:]])
    batch = Batch(device, RAGGED)
    batch.d_out.zero_()
    q = batch.q.detach().requires_grad_()
    _, lse = flash_mla_varlen_func(q, *batch.inputs[1:], *batch.numbers, return_lse=True)
    [d_q] = torch.autograd.grad(lse, q, batch.d_lse)
    batch.check([d_q, *batch.run()[1:]])


def test_a_call_that_is_differentiated_gives_the_same_results_and_has_no_second_derivative(device) -> None:
    batch = Batch(device, RAGGED, rows_after=0)
    with torch.no_grad():
        plain = flash_mla_varlen_func(*batch.inputs, *batch.numbers, return_lse=True)
    q = batch.q.detach().requires_grad_()
    got = flash_mla_varlen_func(q, *batch.inputs[1:], *batch.numbers, return_lse=True)
    for one, other in zip(got, plain, strict=True):
        assert one.requires_grad
        assert_bitwise_equal(one.detach(), other)
    [d_q] = torch.autograd.grad(got.out, q, batch.d_out, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(d_q.sum(), q)


def test_a_given_out_and_tangents_are_refused(device) -> None:
    batch = Batch(device, [(3, 5)], rows_after=0)
    q = batch.q.detach().requires_grad_()
    given = (*batch.inputs[1:], *batch.numbers)
    with pytest.raises(ValueError, match=r"^q must be without gradient"):
        flash_mla_varlen_func(q, *given, out=torch.empty_like(batch.d_out))
    with pytest.raises(ValueError, match=r"^q must be without a tangent"):
        torch.func.jvp(lambda q: flash_mla_varlen_func(q, *given), (batch.q,), (batch.q,))


def test_wrong_arguments_of_a_differentiated_call_are_named(device) -> None:
    batch = Batch(device, [(3, 5)], rows_after=0)
    q = batch.q.detach().requires_grad_()
    k, v, *bounds = batch.inputs[1:]
    for message, error, arguments in (
        (r"^k must be a torch.Tensor, got \[", TypeError, (q, [1], v, *bounds)),
        (r"^q must be \[Tq, H, dqk\], got", ValueError, (q[None], k, v, *bounds)),
        (r"^k must be \[Tk, Hkv, 64\] as q is", ValueError, (q, k[..., :32], v, *bounds)),
        (r"^q.dtype must be bfloat16 or float16", TypeError, (q.float(), k, v, *bounds)),
    ):
        with pytest.raises(error, match=message):
            flash_mla_varlen_func(*arguments, *batch.numbers)


def test_the_ops_pass_opcheck(device) -> None:
    batch = Batch(device, [(3, 5), (0, 2), (4, 4)], rows_after=0)
    leaves = [x.detach().requires_grad_() for x in batch.inputs[:3]]
    contract.check_opcheck(ops.attention, [(*leaves, *batch.inputs[3:], *batch.numbers)])
    with torch.no_grad():
        out, lse = ops.attention(*batch.inputs, *batch.numbers)
    backward = torch.ops.tilelang_mla.attention_backward.default
    contract.check_opcheck(
        backward,
        [(*batch.inputs, out, lse, batch.d_out, d_lse, *batch.numbers) for d_lse in (None, batch.d_lse)],
    )


@pytest.mark.torch_compile
def test_gradients_under_torch_compile_are_the_same(device) -> None:
    batch = Batch(device, RAGGED)
    eager = batch.run()
    compiled = torch.compile(flash_mla_varlen_func, fullgraph=True, backend="aot_eager")
    leaves = [x.detach().requires_grad_() for x in batch.inputs[:3]]
    out, lse = compiled(*leaves, *batch.inputs[3:], *batch.numbers, return_lse=True)
    got = torch.autograd.grad((out, lse), leaves, (batch.d_out, batch.d_lse))
    for one, other in zip(got, eager, strict=True):
        assert_bitwise_equal(one, other)


def test_gradients_are_the_same_bits_each_time_and_a_sequence_s_in_any_batch(device) -> None:
    batch = Batch(device, [(70, 130), (300, 300), (1, 40)], rows_after=0, wants_lse=False)
    whole = batch.run()
    for _ in range(3):
        for one, other in zip(batch.run(), whole, strict=True):
            assert_bitwise_equal(one, other)
    rows, keys = slice(70, 370), slice(130, 430)
    alone = Batch(device, [(300, 300)], rows_after=0, wants_lse=False)
    alone.q, alone.k, alone.v, alone.d_out = batch.q[rows], batch.k[keys], batch.v[keys], batch.d_out[rows]
    for one, other, own in zip(alone.run(), whole, (rows, keys, keys), strict=True):
        assert_bitwise_equal(one, other[own])


@pytest.mark.gpu
def test_the_backward_may_be_captured_in_a_cuda_graph_and_waits_for_nothing(device) -> None:
    numbers = Batch(device, RAGGED).numbers
    backward = torch.ops.tilelang_mla.attention_backward.default

    def inputs(seed: int) -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        batch = Batch(device, RAGGED, rows_after=0)
        return (*batch.inputs, *ops.attention(*batch.inputs, *numbers), batch.d_out, batch.d_lse)

    contract.check_cuda_graph(lambda *given: backward(*given, *numbers), inputs)
    given = inputs(0)
    contract.check_no_host_sync(lambda: backward(*given, *numbers))


@pytest.mark.gpu
def test_heads_too_wide_for_the_kernels_are_refused_before_anything_runs(device) -> None:
    batch = Batch(device, [(3, 5)], sizes=(256, 128))
    with pytest.raises(ValueError, match=r"^q must be of heads of at most 320 with those of v, for a gradient"):
        batch.run()


# Plans


def test_the_kernels_of_deepseek_fit_and_wider_heads_have_no_plan() -> None:
    problem = PrefillProblem(128, 128, 192, 128, 4096, 3, 4096, tokens_k=5000)
    plan = plan_backward(problem, H200)
    assert plan is not None
    assert plan.shared_memory(problem) <= H200.shared_memory
    assert plan.slots(problem) == (5000 // 128 + 5, 4096 // 128 + 5)
    assert plan_backward(PrefillProblem(1, 1, 256, 128, 10, 1, 10), H200) is None
    assert not BackwardPlan(128, 16, 2, 128, 64, 2).covers(problem)


# The kernels, in C


@pytest.fixture(scope="module")
def launch() -> Any:
    try:
        from tilelang_mla.gradients import launch
        from tilelang_mla.kernels import c

        assert c
    except ImportError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no TileLang: {error}")
    return launch


def in_c(name: str, dtype: torch.dtype, **constants: Any) -> Any:
    """A kernel in C, which takes tensors of 16 bits as float32."""
    from tilelang_mla.kernels import c

    kernel = c.kernel(name, **constants)

    def run(*given: Any) -> None:
        wide = [x.float().contiguous() if isinstance(x, Tensor) and x.dtype == dtype else x for x in given]
        kernel(*wide)
        for narrow, one in zip(given, wide, strict=True):
            if narrow is not one:
                narrow.copy_(one)

    return run


def run_kernels(launch: Any, monkeypatch: pytest.MonkeyPatch, batch: Batch) -> list[Tensor]:
    monkeypatch.setattr(launch, "kernels", lambda *wanted: [in_c(name, **constants) for name, constants in wanted])
    monkeypatch.setattr(launch, "device_limits", lambda _: H200)
    with torch.no_grad():
        out, lse = ops.attention(*batch.inputs, *batch.numbers)
    backward = Backward(out, lse, batch.d_out, batch.d_lse)
    problem = check_backward(batch.inputs, backward, batch.numbers)
    gradients = [poison_(x) for x in new_gradients(batch.inputs)]
    launch.prepare_backward(problem, SMALL, batch.inputs, backward)(*batch.inputs, *backward, *gradients)
    return gradients


@pytest.mark.parametrize("causal", [True, False])
def test_kernels_have_the_gradients_of_any_lengths(launch, monkeypatch, causal) -> None:
    for heads in ((4, 2), (2, 2)):
        batch = Batch(torch.device("cpu"), RAGGED, heads=heads, causal=causal)
        batch.check(run_kernels(launch, monkeypatch, batch))


def test_kernels_have_those_of_several_tiles_too(launch, monkeypatch) -> None:
    batch = Batch(torch.device("cpu"), [(130, 260), (200, 140), (64, 64)], heads=(2, 1), wants_lse=False)
    batch.check(run_kernels(launch, monkeypatch, batch))


@pytest.mark.parametrize("scale", [0.0, -0.1])
def test_kernels_take_any_scale(launch, monkeypatch, scale) -> None:
    batch = Batch(torch.device("cpu"), RAGGED, scale=scale)
    batch.check(run_kernels(launch, monkeypatch, batch))


def test_kernels_leave_nan_of_a_neighbour_with_it(launch, monkeypatch) -> None:
    for causal in (True, False):
        batch = Batch(
            torch.device("cpu"), [(5, 20), (17, 17), (40, 9), (1, 33), (65, 100)], of_nan=(1, 3), causal=causal
        )
        batch.check(run_kernels(launch, monkeypatch, batch))


def test_rows_of_impossible_bounds_and_of_no_sequence_are_zero(launch, monkeypatch, unchecked) -> None:
    batch = Batch(torch.device("cpu"), [(5, 20), (17, 17), (40, 9)], rows_after=0)
    batch.cu_seqlens_k[3] = 100
    got = run_kernels(launch, monkeypatch, batch)
    batch.lengths = [(5, 20), (17, 17), (40, 0)]
    batch.check(got)


def test_a_random_batch_has_its_gradients(launch, monkeypatch, device, random_case) -> None:
    rng = random.Random(random_case)
    on_gpu = device.type != "cpu"
    kv = rng.choice([1, 2])
    most = rng.choice([5, 70, 150, *([1500] if on_gpu else [])])
    lengths = [
        (rng.choice([0, 1, rng.randint(0, most)]), rng.choice([0, 1, rng.randint(0, most)]))
        for _ in range(rng.randint(1, 4))
    ]
    batch = Batch(
        device, [*lengths, (3, 5)], sizes=rng.choice(SIZES) if on_gpu else (64, 64),
        heads=(kv * rng.choice([1, 2]), kv), causal=rng.random() < 0.7, rows_after=rng.choice([0, 70]),
        scale=rng.choice([0.125, -0.05, 0.5]), wants_lse=rng.random() < 0.5,
    )  # fmt: skip
    batch.check(batch.run() if on_gpu else run_kernels(launch, monkeypatch, batch))


def test_there_are_no_gradients_where_there_are_no_rows(launch, monkeypatch) -> None:
    for lengths in ([(0, 5)], [(5, 0)]):
        batch = Batch(torch.device("cpu"), lengths, rows_after=0)
        assert not any(bool(x.any()) for x in run_kernels(launch, monkeypatch, batch))
