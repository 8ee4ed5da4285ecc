"""Decayed linear attention: the loop against its unrolled sum, the chunks against the loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_reference.checks import validate_values
from kernel_reference.models import MINIMAX_01
from kernel_reference.paging import cumulative
from kernel_reference.recurrence import RecurrenceResult, commit, linear_attention, linear_attention_chunked

CLOSE = {"rtol": 1e-11, "atol": 1e-11}
Form = Callable[..., RecurrenceResult]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def unrolled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor, state: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence of equal head counts: o_t = scale (sum_{j<=t} e^{-s(t-j)} (q_t.k_j) v_j + e^{-s(t+1)} S_0^T q_t)."""
    tokens, heads = q.shape[:2]
    out, final = torch.zeros_like(v), torch.zeros_like(state)
    for h in range(heads):
        s = float(slopes[h])
        weights = [[math.exp(-s * (t - j)) if j <= t else 0.0 for j in range(tokens)] for t in range(tokens)]
        weight = torch.tensor(weights, dtype=torch.float64).reshape(tokens, tokens)
        out[:, h] = (weight * (q[:, h] @ k[:, h].T)) @ v[:, h]
        for t in range(tokens):
            out[t, h] += math.exp(-s * (t + 1)) * (state[h].T @ q[t, h])
            final[h] += math.exp(-s * (tokens - 1 - t)) * torch.outer(k[t, h], v[t, h])
        final[h] += math.exp(-s * tokens) * state[h]
    return scale * out, final


@pytest.fixture(params=[linear_attention, linear_attention_chunked], ids=["loop", "chunks"])
def form(request: pytest.FixtureRequest) -> Form:
    chosen: Form = request.param
    return chosen


def test_agrees_with_the_unrolled_sum_for_a_ragged_batch(form: Form) -> None:
    heads, d, e = 3, 5, 4
    seqlens = [70, 0, 1, 129]
    q, k, v = normal(200, heads, d), normal(200, heads, d, seed=1), normal(200, heads, e, seed=2)
    slopes, initial = torch.tensor([0.0, 0.05, 1.7]), normal(4, heads, d, e, seed=3)
    ends = cumulative(torch.tensor(seqlens))
    got = form(q, k, v, slopes, cu_seqlens=ends, initial_state=initial, scale=0.3)
    for b, length in enumerate(seqlens):
        own = slice(int(ends[b]), int(ends[b]) + length)
        out, state = unrolled(q[own], k[own], v[own], slopes, initial[b], 0.3)
        torch.testing.assert_close(got.out[own], out, **CLOSE)
        torch.testing.assert_close(got.state[b], state, **CLOSE)


def test_a_token_after_a_carried_state_sees_it_decayed_once(form: Form) -> None:
    """Kernels in use pair exp(-s i) with exp(-s (last - j)), which leaves every earlier chunk exp(s) too large."""
    state, one = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1)
    got = form(one, 0 * one, one, torch.tensor([0.5]), initial_state=state)
    assert got.out.item() == pytest.approx(math.exp(-0.5), rel=1e-15)
    assert got.state.item() == pytest.approx(math.exp(-0.5), rel=1e-15)


@settings(max_examples=40, deadline=None)
@given(
    seqlens=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    chunk=st.integers(1, 50),
    heads=st.sampled_from([(1, 1, 1), (2, 2, 6), (6, 2, 2), (4, 4, 1), (2, 4, 4)]),
    steep=st.floats(0, 50),
    carried=st.booleans(),
)
def test_chunks_agree_with_the_loop(
    seqlens: list[int], chunk: int, heads: tuple[int, int, int], steep: float, carried: bool
) -> None:
    tokens, most = sum(seqlens), max(heads)
    q, k, v = normal(tokens, heads[0], 3), normal(tokens, heads[1], 3, seed=1), normal(tokens, heads[2], 2, seed=2)
    slopes = steep * torch.rand(most, generator=torch.Generator().manual_seed(tokens))
    options: dict[str, Any] = {"cu_seqlens": cumulative(torch.tensor(seqlens)), "scale": 0.5}
    if carried:
        options["initial_state"] = normal(len(seqlens), most, 3, 2, seed=4)
    loop = linear_attention(q, k, v, slopes, **options)
    chunks = linear_attention_chunked(q, k, v, slopes, chunk_size=chunk, **options)
    torch.testing.assert_close(chunks.out, loop.out, **CLOSE)
    torch.testing.assert_close(chunks.state, loop.state, **CLOSE)


def test_long_steep_sequences_neither_overflow_nor_lose_the_nearest_token() -> None:
    tokens = 3000
    q, k, v = normal(tokens, 2, 4), normal(tokens, 2, 4, seed=1), normal(tokens, 2, 4, seed=2)
    out, state = linear_attention_chunked(q, k, v, torch.tensor([300.0, 0.9]), chunk_size=1024)
    assert bool(out.isfinite().all())
    torch.testing.assert_close(out[:, 0], (q[:, 0] * k[:, 0]).sum(1, keepdim=True) * v[:, 0], **CLOSE)
    torch.testing.assert_close(state[0, 0], torch.outer(k[-1, 0], v[-1, 0]), **CLOSE)


@pytest.mark.parametrize(("heads_q", "heads_k", "heads_v"), [(2, 2, 6), (6, 2, 2), (6, 6, 2), (3, 1, 1)])
def test_fewer_heads_are_repeated_side_by_side(form: Form, heads_q: int, heads_k: int, heads_v: int) -> None:
    q, k, v = normal(20, heads_q, 4), normal(20, heads_k, 4, seed=1), normal(20, heads_v, 3, seed=2)
    heads = max(heads_q, heads_v)
    slopes = torch.linspace(0, 1, heads)
    got = form(q, k, v, slopes)
    for h in range(heads):
        own = [x[:, h * x.shape[1] // heads][:, None] for x in (q, k, v)]
        want = form(*own, slopes[h : h + 1])
        torch.testing.assert_close(got.out[:, h : h + 1], want.out, **CLOSE)
        torch.testing.assert_close(got.state[:, h], want.state[:, 0], **CLOSE)


def test_pieces_with_the_state_carried_give_what_the_whole_gives(form: Form) -> None:
    model = MINIMAX_01.tensor_parallel(32)
    heads, d = model.num_heads, model.head_qk
    q, k, v = normal(90, heads, d), normal(90, heads, d, seed=1), normal(90, heads, model.head_v, seed=2)
    slopes = torch.tensor([0.84, 0.01])
    whole = form(q, k, v, slopes)
    outs, state = [], None
    for piece in (slice(0, 64), slice(64, 65), slice(65, 90)):
        result = form(q[piece], k[piece], v[piece], slopes, initial_state=state)
        outs.append(result.out)
        state = result.state
    torch.testing.assert_close(torch.cat(outs), whole.out, **CLOSE)
    torch.testing.assert_close(state, whole.state, **CLOSE)


def test_rows_of_no_sequence_are_zero_and_the_initial_state_is_left_alone(form: Form) -> None:
    x, initial = normal(6, 2, 3), normal(1, 2, 3, 3)
    kept = initial.clone()
    out, _ = form(x, x, x, torch.ones(2), cu_seqlens=torch.tensor([0, 4]), initial_state=initial)
    assert not bool(out[4:].any())
    assert bool(out[:4].all())
    assert torch.equal(initial, kept)


def test_no_tokens_and_no_sequences_are_fine(form: Form) -> None:
    x = normal(0, 2, 3)
    out, state = form(x, x, x, torch.ones(2))
    assert out.shape == (0, 2, 3)
    assert torch.equal(state, torch.zeros(1, 2, 3, 3, dtype=torch.float64))
    assert form(x, x, x, torch.ones(2), cu_seqlens=torch.tensor([0])).state.shape == (0, 2, 3, 3)


def test_gradients_are_those_of_the_formula(form: Form) -> None:
    q, k, v = normal(7, 2, 3), normal(7, 1, 3, seed=1), normal(7, 2, 2, seed=2)
    slopes, initial = torch.tensor([0.1, 0.9], dtype=torch.float64), normal(3, 2, 3, 2, seed=3)
    ends = torch.tensor([0, 4, 4, 7])

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor, state: torch.Tensor
    ) -> RecurrenceResult:
        options = {"chunk_size": 2} if form is linear_attention_chunked else {}
        return form(q, k, v, s, cu_seqlens=ends, initial_state=state, **options)

    assert torch.autograd.gradcheck(run, tuple(x.requires_grad_() for x in (q, k, v, slopes, initial)))


def test_results_are_of_the_compute_dtype(form: Form) -> None:
    x = normal(9, 2, 4).bfloat16()
    slopes = torch.tensor([0.1, 0.9])
    exact = form(x, x, x, slopes)
    assert exact.out.dtype == exact.state.dtype == torch.float64
    assert torch.equal(exact.out, form(x.double(), x.double(), x.double(), slopes.double()).out)
    single = form(x, x, x, slopes, compute_dtype=torch.float32)
    assert single.out.dtype == single.state.dtype == torch.float32
    torch.testing.assert_close(single.out.double(), exact.out, rtol=1e-5, atol=1e-5)


def test_committing_advances_each_state_by_the_tokens_accepted() -> None:
    k, v, state = normal(4, 5, 2, 3), normal(4, 5, 4, 2, seed=1), normal(4, 4, 3, 2, seed=2)
    slopes, accepted = torch.tensor([0.0, 0.1, 1.0, 3.0]), torch.tensor([0, 5, 2, 1])
    got = commit(k, v, state, slopes, accepted)
    assert torch.equal(got[0], state[0])
    for b in range(1, 4):
        taken = int(accepted[b])
        keys = k[b, :taken].repeat_interleave(2, dim=1)
        _, want = unrolled(keys, keys, v[b, :taken], slopes, state[b], 1.0)
        torch.testing.assert_close(got[b], want, **CLOSE)


def test_counts_that_cannot_be_accepted_leave_the_state_and_are_named_when_checked() -> None:
    k, state = normal(2, 5, 2, 3), normal(2, 2, 3, 3)
    accepted = torch.tensor([6, -1])
    with validate_values(False):
        assert torch.equal(commit(k, k, state, torch.ones(2), accepted), state)
    with pytest.raises(ValueError, match=r"^accepted must be from 0 to 5, got \[6, -1\]"):
        commit(k, k, state, torch.ones(2), accepted)


def test_a_negative_decay_is_named_when_values_are_checked(form: Form) -> None:
    x = normal(3, 2, 4)
    for worst in (-0.5, math.nan):
        with pytest.raises(ValueError, match=r"^slopes must be 0 or more, got"):
            form(x, x, x, torch.tensor([0.5, worst]))
        with validate_values(False):
            form(x, x, x, torch.tensor([0.5, worst]))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"q": torch.zeros(4, 2, 3, dtype=torch.int32)}, TypeError, "q must be of a floating-point dtype"),
        ({"k": torch.zeros(4, 2, 3, device="meta")}, ValueError, "k must be on cpu, got meta"),
        ({"q": torch.zeros(4, 6)}, ValueError, "q must be 3-D"),
        ({"v": torch.zeros(5, 2, 3)}, ValueError, "v must be of 4 tokens, as q, got 5"),
        ({"k": torch.zeros(4, 2, 5)}, ValueError, "k must be of head size 3, as q, got 5"),
        ({"v": torch.zeros(4, 3, 3)}, ValueError, "q must be of heads that divide 3, got 2"),
        ({"slopes": torch.zeros(3)}, ValueError, "slopes must be of 2 elements, one for each head, got 3"),
        ({"cu_seqlens": torch.zeros(2)}, TypeError, "cu_seqlens must be an int32 or int64 tensor"),
        ({"initial_state": torch.zeros(2, 3, 3)}, ValueError, r"initial_state must be of shape \[1, 2, 3, 3\], got"),
        (
            {"initial_state": torch.zeros(1, 2, 3, 3, device="meta")},
            ValueError,
            "initial_state must be on cpu, got meta",
        ),
        ({"compute_dtype": torch.int64}, TypeError, "compute_dtype must be a floating-point dtype"),
    ],
)
def test_arguments_that_do_not_fit_are_named(
    form: Form, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    x = torch.zeros(4, 2, 3)
    arguments: dict[str, Any] = {"q": x, "k": x, "v": x, "slopes": torch.zeros(2, 1, 1)}
    with pytest.raises(error, match=f"^{message}"):
        form(**(arguments | changed))


def test_chunks_of_no_tokens_and_commits_of_wrong_rank_are_named() -> None:
    x = torch.zeros(4, 2, 3)
    with pytest.raises(ValueError, match=r"^chunk_size must be at least 1, got 0"):
        linear_attention_chunked(x, x, x, torch.zeros(2), chunk_size=0)
    state, none = torch.zeros(4, 2, 3, 3), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^k must be 4-D \[B, T, Hk, D\], got 3-D"):
        commit(x, x, state, torch.zeros(2), none)
    with pytest.raises(ValueError, match=r"^v must be of shape \[4, 2, Hv, E\]"):
        commit(x[:, :, None], x, state, torch.zeros(2), none)
    with pytest.raises(ValueError, match=r"^accepted must be of shape \[4\], got \[3\]"):
        commit(x[:, :, None], x[:, :, None], state, torch.zeros(2), none[:3])
