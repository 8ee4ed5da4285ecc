"""Packed sequences without a pool, their gradients, and states alone: are they the recurrence?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

import lightning_attn
from kernel_reference.checks import validate_values
from kernel_reference.models import MINIMAX_01
from kernel_reference.testing.guards import assert_bitwise_equal, canaried, poison_
from lightning_attn import lightning_attention, lightning_attention_packed, lightning_state
from lightning_attn.packed import arguments as packed_arguments
from lightning_attn.packed.plan import StatePlan
from lightning_attn.plan import PrefillPlan
from lightning_attn.tensors import Packed, PackedBackward, State

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TP8 = MINIMAX_01.tensor_parallel(8)
# Neither is a power of two; more than one tile of 16.
SIZES = (24, 20)
# Empty at the ends and inside, one token, several segments of 32 and a short one.
LENGTHS = [0, 70, 1, 0, 32, 0]
STATE_PLAN = StatePlan(16, 16, 16, 32, 4, 2)


class Batch:
    """Packed sequences with rows of no sequence behind them, and states before them."""

    def __init__(
        self, tensors: Any, lengths: Sequence[int] = LENGTHS, *, heads: tuple[int, int] = (3, 3),
        sizes: tuple[int, int] = SIZES, dtype: torch.dtype = FP32, initial: bool = True, rows_after: int = 3,
    ) -> None:  # fmt: skip
        rows, self.lengths, self.heads = sum(lengths) + rows_after, list(lengths), max(heads)
        self.rows = sum(lengths)
        (hk, hv), (d, e) = heads, sizes
        self.q, self.k = (tensors.normal(rows, hk, d, dtype=dtype) for _ in range(2))
        self.v, self.d_out = (tensors.normal(rows, h, e, dtype=dtype) for h in (hv, self.heads))
        for x in (self.q, self.k, self.v, self.d_out):
            poison_(x[self.rows :])
        self.slopes = tensors.slopes(self.heads)
        ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        self.cu = torch.tensor(ends, dtype=torch.int32, device=tensors.device)
        states = (len(lengths), self.heads, d, e)
        self.initial = tensors.normal(*states) if initial else None
        self.d_final = tensors.normal(*states)

    def of_sequences(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q[: self.rows], self.k[: self.rows], self.v[: self.rows]

    def states(self, tensors: Any, **how: Any) -> Any:
        """The states after the sequences: in float64, and by two plain versions."""
        return self.wanted(tensors, 1.0, **how)[1]

    def wanted(self, tensors: Any, scale: float, **how: Any) -> Any:
        """Outputs and states: in float64, and by two plain versions."""

        def forms_of(q: Tensor, k: Tensor, v: Tensor, initial: Tensor | None) -> list[tuple[Tensor, Tensor]]:
            forms = (tensors.exact, partial(tensors.plain, **how), partial(tensors.otherwise, **how))
            return [form(q, k, v, self.slopes, self.lengths, initial, scale) for form in forms]

        return tensors.wanted(forms_of, [*self.of_sequences(), self.initial])


def guarded(batch: Batch, tensors: Any) -> Any:
    shape = (len(batch.lengths), batch.heads, batch.k.shape[2], batch.v.shape[2])
    return canaried(shape, FP32, tensors.device)


def run_state(tensors: Any, t: State, plan: StatePlan, *numbers: Any) -> None:
    """Through the kernels: on a GPU, or in Triton's interpreter."""
    from lightning_attn.packed import launch as packed_launch

    problem = packed_arguments.check_state(t, *numbers)
    packed_launch.prepare_state(problem, plan, t)(t)


# States alone


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("heads", [(3, 3), (2, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_states_are_those_of_the_recurrence(tensors, dtype, heads, exact) -> None:
    batch = Batch(tensors, heads=heads, dtype=dtype)
    got = lightning_state(batch.k, batch.v, batch.slopes, batch.cu, initial_state=batch.initial, exact=exact)
    tensors.assert_rounded(got, batch.states(tensors), apart=(0, 1))


@pytest.mark.parametrize(
    ("plan", "dtype", "heads", "carried"),
    [
        (STATE_PLAN, BF16, (1, 2), True),
        (StatePlan(32, 32, 32, 32, 4, 1), FP32, (4, 2), False),
        (StatePlan(16, 16, 32, 128, 4, 2), FP16, (3, 3), True),
    ],
    ids=str,
)
def test_every_branch_of_the_kernels_for_states_is_the_recurrence(tensors, plan, dtype, heads, carried) -> None:
    batch = Batch(tensors, heads=heads, dtype=dtype, initial=carried)
    for exact in (False, True):
        final = guarded(batch, tensors)
        t = State(batch.k, batch.v, batch.slopes, batch.cu, batch.initial, final.tensor)
        run_state(tensors, t, plan, 1.0, exact, False)
        final.check(written=True)
        tensors.assert_rounded(final.tensor, batch.states(tensors), apart=(0, 1))


@pytest.mark.parametrize("segment", [32, 128])
def test_states_backwards_are_the_gradient_that_reaches_the_first_token(tensors, segment) -> None:
    """Dense, as gradients of context parallelism take them: token j enters with exp(-s (j + 1))."""
    q, d_out = tensors.normal(2, 3, 70, 24, dtype=BF16), tensors.normal(2, 3, 70, 20, dtype=BF16)
    slopes, last = tensors.slopes(3), tensors.normal(2, 3, 24, 20)

    def forms_of(q: Tensor, d_out: Tensor, last: Tensor) -> list[tuple[Tensor]]:
        """In float64, and with weights that bfloat16 rounds once they are multiplied into queries, or into values."""
        rate, place = slopes.double()[:, None, None], torch.arange(1, 71, device=tensors.device)[:, None]
        weight, before = 0.7 * torch.exp(-rate * place), torch.exp(-70 * rate) * last.double()
        exact = (weight * q.double()).mT @ d_out.double() + before
        of_q = (weight * q.double()).to(BF16).float().mT @ d_out.float()
        of_values = q.float().mT @ (weight * d_out.double()).to(BF16).float()
        return [(exact,), *((plain + before.float(),) for plain in (of_q, of_values))]

    (wanted,) = tensors.wanted(forms_of, [q, d_out, last])
    final = canaried((2, 3, 24, 20), FP32, tensors.device)
    t = State(q, d_out, slopes, None, last, final.tensor)
    run_state(tensors, t, StatePlan(16, 16, 32, segment, 4, 2), 0.7, True, True)
    final.check(written=True)
    by_reference = torch.ops.lightning_attn.state(q, d_out, slopes, None, last, 0.7, True, True)
    for got in (final.tensor, by_reference):
        tensors.assert_rounded(got, wanted, apart=(0, 1))


RATES = [0.5, 3.0, 0.3, 24.0, 0.7]


def beyond(reverse: bool, tokens: int, count: int) -> slice:
    return slice(count, None) if reverse else slice(0, tokens - count)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_head_reads_no_token_that_its_decay_has_forgotten_and_exactly_all(tensors, reverse) -> None:
    """Tokens beyond ceil(24 / slope) are NaN; one nearer shows."""
    tokens, slopes = 100, torch.tensor(RATES, device=tensors.device)
    counts = [min(tokens, math.ceil(24 / rate)) for rate in RATES]
    for nearer in (0, 1):
        k, v = (tensors.normal(1, len(RATES), tokens, size, dtype=BF16) for size in SIZES)
        for h, count in enumerate(counts):
            poison_(k[0, h, beyond(reverse, tokens, count - nearer)])
        for by_kernel in (True, False):
            numbers = (1.0, False, reverse)
            if by_kernel:
                final = canaried((1, len(RATES), *SIZES), FP32, tensors.device)
                run_state(tensors, State(k, v, slopes, None, None, final.tensor), STATE_PLAN, *numbers)
                got = final.tensor
            else:
                got = torch.ops.lightning_attn.state(k, v, slopes, None, None, *numbers)
            spoiled = got[0].isnan().any(2).any(1).tolist()
            # Of a head that reaches all tokens none is beyond.
            assert spoiled == [bool(nearer)] * len(RATES)


def test_what_is_left_out_stays_within_its_bound(tensors) -> None:
    """All products are 1, so that what is missing adds up to the bound, but for the sequence's length."""
    tokens, slopes = 4000, torch.tensor([0.1, 0.01, 1.0], device=tensors.device)
    k, v = (torch.ones(tokens, 3, 16, device=tensors.device) for _ in range(2))
    cu = torch.tensor([0, tokens], device=tensors.device)
    near, every = (lightning_state(k, v, slopes, cu, exact=exact).double() for exact in (False, True))
    bound = math.exp(-24) / (1 - torch.exp(-slopes.double()))
    rounding = 2.0**-22 * every
    assert bool(((every - near).abs() <= bound[:, None, None] + rounding).all())
    assert_bitwise_equal(lightning_state(k, v, slopes, cu), lightning_state(k, v, slopes, cu))


def test_states_of_no_sequences_and_of_no_tokens(tensors) -> None:
    for lengths in ([], [0, 0]):
        batch = Batch(tensors, lengths, rows_after=0)
        assert_bitwise_equal(
            lightning_state(batch.k, batch.v, batch.slopes, batch.cu, initial_state=batch.initial), batch.initial
        )
        final = guarded(batch, tensors)
        t = State(batch.k, batch.v, batch.slopes, batch.cu, batch.initial, final.tensor)
        run_state(tensors, t, STATE_PLAN, 1.0, False, False)
        assert_bitwise_equal(final.tensor, batch.initial)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (96, 80), (256, 256), (16, 256)], ids=str)
def test_states_of_long_sequences_are_those_of_the_recurrence_on_a_gpu(tensors, sizes, dtype) -> None:
    batch = Batch(tensors, [9000, 1, 0, 4096, 70], heads=(8, 8), sizes=sizes, dtype=dtype)
    for exact in (False, True):
        got = lightning_state(batch.k, batch.v, batch.slopes, batch.cu, initial_state=batch.initial, exact=exact)
        tensors.assert_rounded(got, batch.states(tensors), apart=(0, 1))


# Packed sequences


def wanted_gradients(
    tensors: Any, batch: Batch, scale: float, form: Any, dtype: torch.dtype, *inputs: Tensor | None
) -> list[Tensor]:
    """Of q, k, v and the initial states, the batch's unless given, by autograd through a form of the recurrence."""
    *rows, initial = inputs or (*batch.of_sequences(), batch.initial)
    initial = batch.d_final * 0 if initial is None else initial
    leaves = [x.detach().to(dtype).requires_grad_() for x in (*rows, initial)]
    q, k, v, initial = leaves
    out, final = form(q, k, v, batch.slopes, batch.lengths, initial, scale)
    through_out = (out.to(dtype) * batch.d_out[: batch.rows].to(dtype)).sum()
    (through_out + (final.to(dtype) * batch.d_final.to(dtype)).sum()).backward()
    return [leaf.grad for leaf in leaves]


def check_packed(tensors: Any, batch: Batch, scale: float, out: Tensor, final: Tensor) -> None:
    wanted_out, wanted_final = batch.wanted(tensors, scale)
    tensors.assert_rounded(out[: batch.rows], wanted_out, apart=(1,), what="out")
    assert not bool(out[batch.rows :].any())
    tensors.assert_rounded(final, wanted_final, apart=(0, 1), what="final_state")


def check_gradients(tensors: Any, batch: Batch, scale: float, gradients: Sequence[Tensor]) -> None:
    def forms_of(*inputs: Tensor | None) -> list[list[Tensor]]:
        forms = ((tensors.exact, torch.float64), (tensors.plain, FP32))
        return [wanted_gradients(tensors, batch, scale, *form, *inputs) for form in forms]

    wanted = tensors.wanted(forms_of, [*batch.of_sequences(), batch.initial])
    for got, of, name in zip(gradients, wanted, ("q", "k", "v", "initial_state"), strict=True):
        if name == "initial_state":
            tensors.assert_rounded(got, of, apart=(0, 1), what=f"the gradient of {name}")
            continue
        assert not bool(got[batch.rows :].any())
        # Rounded to the dtype once more than the plain version in float32 is.
        tensors.assert_rounded(got[: batch.rows], of, apart=(1,), what=f"the gradient of {name}")


@pytest.mark.parametrize("carried", [False, True], ids=["from zeros", "carried"])
def test_packed_sequences_and_their_gradients_are_the_recurrence(tensors, carried) -> None:
    batch = Batch(tensors, initial=carried)
    leaves = [x.requires_grad_() for x in (batch.q, batch.k, batch.v)]
    if carried:
        leaves.append(batch.initial.requires_grad_())
    result = lightning_attention_packed(
        batch.q, batch.k, batch.v, batch.slopes, batch.cu, initial_state=batch.initial, scale=0.7
    )
    assert result.out.is_contiguous()
    torch.autograd.backward(result, [batch.d_out, batch.d_final])
    with torch.no_grad():
        check_packed(tensors, batch, 0.7, *result)
    gradients = [leaf.grad for leaf in leaves]
    if not carried:
        gradients.append(wanted_gradients(tensors, batch, 0.7, tensors.plain, FP32)[3])
    check_gradients(tensors, batch, 0.7, gradients)


WAYS = {
    "in one go": (PrefillPlan(16, 16, 0, 4, 2, block_d=16), BF16),
    "segments": (PrefillPlan(16, 16, 32, 4, 1, block_d=32), BF16),
    "by token": (PrefillPlan(1, 16, 0, 1, 1, block_d=32), FP32),
}


@pytest.mark.parametrize(
    ("plan", "dtype", "carried"),
    [(*way, carried) for way, carried in zip(WAYS.values(), (False, True, True), strict=True)],
    ids=WAYS,
)
def test_every_way_through_packed_sequences_and_their_gradients_is_the_recurrence(
    tensors, plan, dtype, carried
) -> None:
    from lightning_attn.packed import launch as packed_launch

    lengths = [0, 15 if plan.chunk == 1 else 40, 1, 0, 5, 0]
    batch = Batch(tensors, lengths, heads=(2, 2), dtype=dtype, initial=carried)
    batch.slopes = torch.tensor([0.02, 3.0], device=tensors.device)
    inputs = (batch.q, batch.k, batch.v, batch.slopes, batch.cu, batch.initial)
    out, final = canaried((*batch.q.shape[:2], 20), dtype, tensors.device), guarded(batch, tensors)
    t = Packed(*inputs, out.tensor, final.tensor)
    packed_launch.prepare_packed(packed_arguments.check_packed_attention(t, 0.7), plan, t)(t)
    results = [out, final]
    check_packed(tensors, batch, 0.7, out.tensor, final.tensor)
    results += [canaried(tuple(x.shape), dtype, tensors.device) for x in (batch.q, batch.k, batch.v)]
    results.append(guarded(batch, tensors))
    gradients = [result.tensor for result in results[2:]]
    t = PackedBackward(*inputs, batch.d_out, batch.d_final, *gradients)
    packed_launch.prepare_packed_backward(packed_arguments.check_packed_backward(t, 0.7), plan, t)(t)
    for result in results:
        result.check(written=True)
    if dtype == BF16:
        # Values in bfloat16: the plain version multiplies in bfloat16 too, backwards as well.
        gradients = [x.float() if x.dtype == BF16 else x for x in gradients]
        exact = wanted_gradients(tensors, batch, 0.7, tensors.exact, torch.float64)
        for got, want in zip(gradients, exact, strict=True):
            error = (got[: len(want)].double() - want).norm() / want.norm()
            assert error < 2 * 2.0**-8
        return
    check_gradients(tensors, batch, 0.7, gradients)


def test_sequences_of_one_length_have_the_bits_of_the_batch(tensors) -> None:
    q, k, v = (tensors.normal(2, 3, 70, size, dtype=BF16) for size in (24, 24, 20))
    initial, cu = tensors.normal(2, 3, 24, 20), torch.tensor([0, 70, 140], device=tensors.device)
    out, kv = lightning_attention(q, k, v, tensors.slopes(3), kv_history=initial)
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    got = lightning_attention_packed(*rows, tensors.slopes(3), cu, initial_state=initial)
    assert_bitwise_equal(got.out, out.transpose(1, 2).flatten(0, 1))
    assert_bitwise_equal(got.final_state, kv[:, :, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_gradients_of_a_packed_model_batch_have_the_same_bits_in_every_run_on_a_gpu(tensors, dtype) -> None:
    runs = []
    for _ in range(3):
        torch.manual_seed(0)
        batch = Batch(tensors, [5000, 0, 1, 700], heads=(8, 8), sizes=(TP8.head_qk, TP8.head_v), dtype=dtype)
        leaves = [x.requires_grad_() for x in (batch.q, batch.k, batch.v, batch.initial)]
        result = lightning_attention_packed(*leaves[:3], batch.slopes, batch.cu, initial_state=leaves[3])
        torch.autograd.backward(result, [batch.d_out, batch.d_final])
        runs.append([*result, *(leaf.grad for leaf in leaves)])
    for other in runs[1:]:
        for one, same in zip(runs[0], other, strict=True):
            assert_bitwise_equal(one, same)
    exact = wanted_gradients(tensors, batch, 1.0, tensors.exact, torch.float64)
    for got, want in zip(runs[0][2:], exact, strict=True):
        error = (got[: len(want)].double() - want).norm() / want.norm()
        assert error < (2.0**-7 if dtype == BF16 else 2.0**-20)


# Refusals


def refused(name: str, tensors: Any) -> dict[str, Any]:
    batch = Batch(tensors)
    given = {
        "q": batch.q, "k": batch.k, "v": batch.v, "slopes": batch.slopes, "cu_seqlens": batch.cu,
        "initial_state": batch.initial,
    }  # fmt: skip
    wrong = {
        "v": batch.v[:, :2], "slopes": batch.slopes[:2], "cu_seqlens": batch.cu.float(),
        "initial_state": batch.initial.mT, "k": batch.k.to(FP16),
    }  # fmt: skip
    return {**given, name: wrong[name]}


@pytest.mark.parametrize("name", ["v", "k", "slopes", "cu_seqlens", "initial_state"])
def test_an_argument_that_does_not_fit_is_named(tensors, name) -> None:
    given = refused(name, tensors)
    with pytest.raises((ValueError, TypeError), match=rf"^{name}\b.* must be "):
        lightning_attention_packed(**given)
    del given["q"]
    # Of keys and values the values' dtype is then the other one.
    with pytest.raises((ValueError, TypeError), match=rf"^{'v' if name == 'k' else name}\b.* must be "):
        lightning_state(**given)


def test_bounds_that_fall_are_named_on_a_cpu_and_inside_validate_values(tensors) -> None:
    batch = Batch(tensors)
    cu = batch.cu.clone()
    cu[2] = 200
    with validate_values():
        for function, first in ((lightning_attention_packed, (batch.q,)), (lightning_state, ())):
            with pytest.raises(ValueError, match=r"^cu_seqlens\[2\] must be from cu_seqlens\[1\] = 0 to 106"):
                function(*first, batch.k, batch.v, batch.slopes, cu)


def test_derivatives_that_are_not_there_are_refused_by_name(tensors) -> None:
    batch = Batch(tensors)
    given = (batch.q, batch.k, batch.v, batch.slopes, batch.cu)
    with pytest.raises(ValueError, match=r"^k must be without gradient"):
        lightning_state(batch.k.requires_grad_(), *given[2:])
    with pytest.raises(ValueError, match=r"^slopes must be without gradient"):
        lightning_attention_packed(*given[:3], batch.slopes.clone().requires_grad_(), batch.cu)
    with pytest.raises(ValueError, match=r"^q must be without a tangent"):
        torch.func.jvp(lambda q: lightning_attention_packed(q, *given[1:]).out, (batch.q,), (batch.q,))
    with pytest.raises(TypeError, match=r"^exact must be a bool"):
        lightning_state(*given[1:], exact=1)
    assert "lightning_state" in lightning_attn.__all__
