"""Softmax attention against torch's own in float64 and against loops over single scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_reference.attention import attention, merge_attention_states, mla_decode
from kernel_reference.checks import validate_values
from kernel_reference.models import DEEPSEEK_V3, GPT_OSS, LLAMA3_70B
from kernel_reference.paging import cumulative, paged_cache

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


@dataclass(frozen=True)
class Shape:
    name: str
    heads_q: int
    heads_kv: int
    dim: int
    dim_v: int


LLAMA3_TP8 = Shape("Llama-3-70B TP8", 8, 1, LLAMA3_70B.head_dim, LLAMA3_70B.head_dim)
GPT_OSS_TP4 = Shape("gpt-oss TP4", 16, 2, GPT_OSS.head_dim, GPT_OSS.head_dim)
DEEPSEEK_PREFILL = Shape("DeepSeek-V3 TP32", 4, 4, DEEPSEEK_V3.head_qk, DEEPSEEK_V3.head_v)
ODD = Shape("7 of 80 over 48", 7, 7, 80, 48)


def inputs(shape: Shape, q_tokens: int, k_tokens: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [
        normal(q_tokens, shape.heads_q, shape.dim, dtype=dtype),
        normal(k_tokens, shape.heads_kv, shape.dim, dtype=dtype, seed=1),
        normal(k_tokens, shape.heads_kv, shape.dim_v, dtype=dtype, seed=2),
    ]


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """torch's attention of one sequence [T, H, D] in float64."""
    q, k, v = (x.double().transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True, **options)[0].transpose(0, 1)


def positions(q_len: int, k_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(q_len)[:, None] + k_len - q_len, torch.arange(k_len)


@pytest.mark.parametrize("shape", [LLAMA3_TP8, GPT_OSS_TP4, DEEPSEEK_PREFILL, ODD], ids=lambda s: s.name)
@pytest.mark.parametrize(("q_len", "k_len"), [(64, 64), (37, 300), (1, 129)])
def test_agrees_with_torch_for_causal_attention_aligned_to_the_right(shape: Shape, q_len: int, k_len: int) -> None:
    q, k, v = inputs(shape, q_len, k_len)
    query, key = positions(q_len, k_len)
    torch.testing.assert_close(attention(q, k, v, causal=True).out, sdpa(q, k, v, key <= query), **EXACT)
    torch.testing.assert_close(attention(q, k, v).out, sdpa(q, k, v), **EXACT)


@pytest.mark.parametrize("window", [(127, 0), (16, -1), (-1, 5), (3, 4), (0, 0), (-1, -1)])
def test_window_shows_keys_from_left_before_to_right_after_the_query(window: tuple[int, int]) -> None:
    q, k, v = inputs(GPT_OSS_TP4, 150, 290)
    query, key = positions(150, 290)
    left, right = window
    seen = ((left < 0) | (key >= query - left)) & ((right < 0) | (key <= query + right))
    torch.testing.assert_close(attention(q, k, v, window=window).out, sdpa(q, k, v, seen), **EXACT)
    seen &= key <= query
    torch.testing.assert_close(attention(q, k, v, window=window, causal=True).out, sdpa(q, k, v, seen), **EXACT)


def test_sink_acts_as_one_more_key_whose_value_is_zero() -> None:
    q, k, v = inputs(GPT_OSS_TP4, 20, 50)
    sinks = normal(16, seed=3) * 3
    query, key = positions(20, 50)
    zero_key, zero_value = k.new_zeros(1, 2, 64), v.new_zeros(1, 2, 64)
    bias = torch.where(key <= query, 0.0, -torch.inf).expand(16, 20, 50)
    bias = torch.cat([sinks[:, None, None].expand(16, 20, 1), bias], dim=2)
    want = sdpa(q, torch.cat([zero_key, k]), torch.cat([zero_value, v]), bias)
    torch.testing.assert_close(attention(q, k, v, causal=True, sinks=sinks).out, want, **EXACT)


def test_alibi_adds_slope_times_key_minus_query_position() -> None:
    q, k, v = inputs(LLAMA3_TP8, 20, 50)
    slopes = 2.0 ** -torch.arange(1, 9)
    query, key = positions(20, 50)
    bias = slopes[:, None, None] * (key - query)
    want = sdpa(q, k, v, bias.double())
    torch.testing.assert_close(attention(q, k, v, alibi_slopes=slopes).out, want, **EXACT)


def test_lse_is_the_natural_logarithm_of_the_sum_of_exponentials() -> None:
    q, k, v = inputs(LLAMA3_TP8, 20, 50)
    scores = torch.einsum("qhd,kd->hqk", q, k[:, 0]) * 0.3
    torch.testing.assert_close(attention(q, k, v, softmax_scale=0.3).lse, scores.logsumexp(2), **EXACT)


def test_a_scale_of_zero_weighs_all_keys_alike() -> None:
    q, k, v = inputs(LLAMA3_TP8, 4, 9)
    out = attention(q, k, v, softmax_scale=0.0).out
    torch.testing.assert_close(out, v.mean(0).expand(4, 8, 128), **EXACT)


def literal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: list[int],
    cu_k: list[int],
    sees: Callable[[int, int, int, int, int], bool],
    scale: float,
    softcap: float,
    slopes: list[float] | None,
    sinks: list[float] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, one score at a time; ``sees(sequence, head, i, query position, key position)``."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64)
    for b in range(len(cu_q) - 1):
        q_len, k_len = cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]
        for h in range(q.shape[1]):
            head_kv = h * k.shape[1] // q.shape[1]
            for i in range(q_len):
                position = k_len - q_len + i
                scores = {}
                for j in range(k_len):
                    if sees(b, h, i, position, j):
                        s = scale * sum((q[cu_q[b] + i, h] * k[cu_k[b] + j, head_kv]).tolist())
                        s = softcap * math.tanh(s / softcap) if softcap else s
                        scores[j] = s + (slopes[h] * (j - position) if slopes else 0.0)
                total = sum(math.exp(s) for s in scores.values()) + (math.exp(sinks[h]) if sinks else 0.0)
                if total:
                    lse[h, cu_q[b] + i] = math.log(total)
                for j, s in scores.items():
                    out[cu_q[b] + i, h] += math.exp(s) / total * v[cu_k[b] + j, head_kv]
    return out, lse


lengths = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(
    lengths=lengths,
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 2)]),
    causal=st.booleans(),
    window=st.none() | st.tuples(st.integers(-1, 3), st.integers(-1, 3)),
    softcap=st.sampled_from([0.0, 1.5]),
    with_slopes=st.booleans(),
    with_sinks=st.booleans(),
    masked=st.sampled_from(["no", "table", "function"]),
)
def test_agrees_with_the_definition_whatever_is_combined(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    causal: bool,
    window: tuple[int, int] | None,
    softcap: float,
    with_slopes: bool,
    with_sinks: bool,
    masked: str,
) -> None:
    cu_q = cumulative(torch.tensor([q_len for q_len, _ in lengths]))
    cu_k = cumulative(torch.tensor([k_len for _, k_len in lengths]))
    tokens_q, tokens_k = int(cu_q[-1]), int(cu_k[-1])
    q, k = normal(tokens_q, heads[0], 3), normal(tokens_k, heads[1], 3, seed=1)
    v = normal(tokens_k, heads[1], 2, seed=2)
    slopes = normal(heads[0], seed=4) if with_slopes else None
    sinks = normal(heads[0], seed=5) if with_sinks else None
    table = normal(heads[0], tokens_q, tokens_k, seed=6) > -0.5
    begins_q, begins_k = cu_q.tolist(), cu_k.tolist()
    left, right = window or (-1, -1)

    def chosen(b: int, h: int, position: int, j: int) -> bool:
        return (position * 5 + j * 3 + h + b) % 4 != 0

    def sees(b: int, h: int, i: int, position: int, j: int) -> bool:
        return (
            not (causal and j > position)
            and not (left >= 0 and position - j > left)
            and not (right >= 0 and j - position > right)
            and (masked != "table" or bool(table[h, begins_q[b] + i, begins_k[b] + j]))
            and (masked != "function" or chosen(b, h, position, j))
        )

    got = attention(
        q,
        k,
        v,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        softmax_scale=0.7,
        causal=causal,
        window=window,
        mask={"no": None, "table": table, "function": lambda b, h, i, j: (i * 5 + j * 3 + h + b) % 4 != 0}[masked],
        sinks=sinks,
        softcap=softcap,
        alibi_slopes=slopes,
    )
    out, lse = literal(
        q,
        k,
        v,
        begins_q,
        begins_k,
        sees,
        0.7,
        softcap,
        None if slopes is None else slopes.tolist(),
        None if sinks is None else sinks.tolist(),
    )
    torch.testing.assert_close(got.out, out, **EXACT)
    torch.testing.assert_close(got.lse, lse, **EXACT)


def test_batched_tensors_give_what_the_packed_ones_give() -> None:
    q, k, v = normal(3, 10, 8, 16), normal(3, 24, 2, 16, seed=1), normal(3, 24, 2, 5, seed=2)
    mask = normal(3, 1, 10, 24) > 0
    got = attention(q, k, v, causal=True, mask=mask)
    assert got.out.shape == (3, 10, 8, 5)
    assert got.lse.shape == (3, 8, 10)
    for b in range(3):
        want = attention(q[b], k[b], v[b], causal=True, mask=mask[b])
        torch.testing.assert_close(got.out[b], want.out, **EXACT)
        torch.testing.assert_close(got.lse[b], want.lse, **EXACT)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -3.0])])
def test_a_row_that_sees_no_key_is_zero_and_its_lse_the_sink(sinks: torch.Tensor | None) -> None:
    # More such rows than are computed at once, so that some blocks of rows see no key at all.
    q, k, v = normal(600, 2, 8), normal(2, 2, 8), normal(2, 2, 8)
    out, lse = attention(q, k, v, causal=True, sinks=sinks)
    assert torch.equal(out[:598], torch.zeros(598, 2, 8, dtype=torch.float64))
    nothing = torch.full((2, 598), -torch.inf) if sinks is None else sinks[:, None].expand(2, 598)
    assert torch.equal(lse[:, :598], nothing.double())
    assert bool((out[598:] != 0).all())


def test_rows_of_no_sequence_are_zero() -> None:
    q, k, v = normal(7, 2, 8), normal(9, 2, 8), normal(9, 2, 8)
    ends = torch.tensor([0, 4])
    out, lse = attention(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends)
    assert torch.equal(out[4:], torch.zeros(3, 2, 8, dtype=torch.float64))
    assert bool((lse[:, 4:] == -torch.inf).all())


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_that_a_row_does_not_see_change_nothing(poison: float) -> None:
    q, k, v = inputs(GPT_OSS_TP4, 6, 40)
    clean = attention(q, k, v, causal=True, window=(9, 0))
    k[:25], v[:25] = poison, poison
    dirty = attention(q, k, v, causal=True, window=(9, 0))
    assert torch.equal(dirty.out, clean.out)
    assert torch.equal(dirty.lse, clean.lse)


def test_a_later_key_that_is_nan_reaches_only_the_rows_that_see_it() -> None:
    q, k, v = inputs(GPT_OSS_TP4, 6, 6)
    clean = attention(q, k, v, causal=True).out
    v[4, 0, 7] = torch.nan
    k[5, 1] = torch.nan
    dirty = attention(q, k, v, causal=True).out
    bad = torch.zeros_like(dirty, dtype=torch.bool)
    bad[4:, :8, 7] = True
    bad[5:, 8:] = True
    assert torch.equal(dirty.isnan(), bad)
    assert torch.equal(dirty[~bad], clean[~bad])


def test_scores_far_below_any_finite_mask_value_are_still_weighed() -> None:
    q, k, v = torch.full((1, 1, 2), 300.0), torch.full((3, 1, 2), -300.0), normal(3, 1, 2)
    out = attention(q, k, v, softmax_scale=1.0, window=(1, 0)).out
    torch.testing.assert_close(out[0, 0], v[1:, 0].mean(0), **EXACT)


def test_no_tensor_of_all_scores_ever_stands_in_memory() -> None:
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    tokens, heads = 3000, 8
    q, k, v = normal(tokens, heads, 2), normal(tokens, 1, 2), normal(tokens, 1, 2)
    with Watch():
        attention(q, k, v, rows=torch.arange(0, tokens, 10))
        attention(q, k, v, causal=True, window=(31, 0))
        attention(q, k, v, window=(2500, 0), rows=torch.arange(tokens - 300, tokens))
    assert largest <= 2**22 < tokens // 10 * tokens * heads


def test_chosen_rows_come_in_the_order_asked_for() -> None:
    q, k, v = inputs(GPT_OSS_TP4, 30, 50)
    cu_q, cu_k = torch.tensor([0, 12, 30]), torch.tensor([0, 30, 50])
    rows = torch.tensor([29, 3, 11, 12])
    whole = attention(q, k, v, causal=True, window=(5, 0), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    some = attention(q, k, v, causal=True, window=(5, 0), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, rows=rows)
    torch.testing.assert_close(some.out, whole.out[rows], **EXACT)
    torch.testing.assert_close(some.lse, whole.lse[:, rows], **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_inputs_are_taken_at_their_value_and_computed_in_the_dtype_asked_for(dtype: torch.dtype) -> None:
    q, k, v = inputs(GPT_OSS_TP4, 9, 30, dtype=dtype)
    out, lse = attention(q, k, v, causal=True)
    want = attention(q.double(), k.double(), v.double(), causal=True)
    assert out.dtype == lse.dtype == torch.float64
    assert torch.equal(out, want.out)
    single = attention(q, k, v, causal=True, compute_dtype=torch.float32)
    assert single.out.dtype == torch.float32
    torch.testing.assert_close(single.out.double(), out, rtol=1e-4, atol=1e-5)
    assert not torch.equal(single.out.double(), out)
    assert attention(q, k, v, causal=True, out_dtype=torch.bfloat16).out.dtype == torch.bfloat16


def test_strided_inputs_give_what_packed_ones_give() -> None:
    fused = normal(20, 16 + 2 + 2, 64)
    q, k, v = fused.split([16, 2, 2], dim=1)
    got = attention(q, k, v, causal=True)
    want = attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    assert torch.equal(got.out, want.out)


def test_results_over_two_parts_of_the_keys_merge_to_the_result_over_all() -> None:
    q, k, v = inputs(GPT_OSS_TP4, 9, 30)
    sinks = normal(16, seed=8)
    whole = attention(q, k, v, sinks=sinks)
    near = attention(q, k[:11], v[:11], sinks=sinks)
    far = attention(q, k[11:], v[11:])
    merged = merge_attention_states(*near, *far)
    torch.testing.assert_close(merged.out, whole.out, **EXACT)
    torch.testing.assert_close(merged.lse, whole.lse, **EXACT)


@pytest.mark.parametrize("empty", [-torch.inf, torch.inf])
def test_merging_leaves_out_a_part_that_saw_nothing_even_if_it_holds_nan(empty: float) -> None:
    out, lse = normal(3, 2, 4), normal(2, 3)
    nothing, never = torch.full_like(out, torch.nan), torch.full_like(lse, empty)
    for merged in (
        merge_attention_states(out, lse, nothing, never),
        merge_attention_states(nothing, never, out, lse),
    ):
        torch.testing.assert_close(merged.out, out, **EXACT)
        torch.testing.assert_close(merged.lse, lse, **EXACT)
    neither = merge_attention_states(nothing, never, nothing, never)
    assert torch.equal(neither.out, torch.zeros_like(out))
    assert torch.equal(neither.lse, torch.full_like(lse, -torch.inf))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_latent_decode_attends_to_each_sequence_up_to_its_own_length(page: int, causal: bool) -> None:
    latent, rope, heads, new_tokens = DEEPSEEK_V3.latent, DEEPSEEK_V3.rope, 3, 4
    seqlens = [130, 0, 2, 64]
    kv = normal(sum(seqlens), 1, latent + rope)
    cache, _, table, lengths, _, _ = paged_cache(kv, None, cumulative(torch.tensor(seqlens)), page)
    q = normal(4, new_tokens, heads, latent + rope, seed=1)
    got = mla_decode(q, cache, lengths, table, latent, causal=causal)
    begin = 0
    for b, length in enumerate(seqlens):
        own = kv[begin : begin + length]
        begin += length
        for j in range(new_tokens):
            sees = length - new_tokens + j + 1 if causal else length
            if sees <= 0:
                assert not bool(got.out[b, j].any())
                assert bool((got.lse[b, :, j] == -torch.inf).all())
            else:
                want = sdpa(q[b, j : j + 1], own[:sees], own[:sees, :, :latent])
                torch.testing.assert_close(got.out[b, j], want[0], **EXACT)


def test_impossible_lengths_are_named_when_values_are_checked_and_otherwise_see_nothing() -> None:
    q, k, v = normal(8, 2, 4), normal(8, 2, 4), normal(8, 2, 4)
    cu_q, cu_k = torch.tensor([0, 4, 8]), torch.tensor([0, 4, 9])
    good = attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_q)
    with validate_values(False):
        out, lse = attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    assert torch.equal(out[:4], good.out[:4])
    assert not bool(out[4:].any())
    assert bool((lse[:, 4:] == -torch.inf).all())
    with pytest.raises(ValueError, match=r"cu_seqlens_k\[2\] must be from .* = 4 to 8 .*, got 9"):
        attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    with pytest.raises(ValueError, match=r"cu_seqlens_q\[0\] must be 0, got 1"):
        attention(q, k, v, cu_seqlens_q=cu_q + 1, cu_seqlens_k=cu_q)


two = torch.tensor([0, 8])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"q": [1.0]}, TypeError, "q must be a tensor, got .1.0"),
        ({"q": torch.zeros(8, 4, 16, dtype=torch.int32)}, TypeError, "q must be of a floating-point dtype"),
        ({"q": torch.zeros(8, 16)}, ValueError, "q must be 3-D .* got 2-D"),
        ({"k": torch.zeros(1, 8, 2, 16)}, ValueError, "k must be 3-D as q is, got 4-D"),
        ({"k": torch.zeros(8, 2, 16, device="meta")}, ValueError, "k must be on cpu, got meta"),
        ({"k": torch.zeros(8, 2, 17)}, ValueError, "k must be of head size 16, as q, got 17"),
        ({"v": torch.zeros(9, 2, 16)}, ValueError, r"v must be of shape \[8, 2, 'Dv'\], got \[9, 2, 16\]"),
        ({"q": torch.zeros(8, 3, 16)}, ValueError, "q must be of a multiple of 2 heads, k's, got 3"),
        ({"window": (-2, 0)}, ValueError, r"window must be .* got \(-2, 0\)"),
        ({"softcap": -1.0}, ValueError, "softcap must be 0 .off. or more, got -1.0"),
        ({"softcap": math.nan}, ValueError, "softcap must be finite, got nan"),
        ({"sinks": torch.zeros(2)}, ValueError, r"sinks must be of shape \[4\], .* got \[2\]"),
        ({"alibi_slopes": torch.zeros(1)}, ValueError, r"alibi_slopes must be of shape \[4\], .* got \[1\]"),
        ({"mask": torch.zeros(8, 8)}, TypeError, "mask must be bool, got torch.float32"),
        ({"mask": torch.ones(8, 9) > 0}, ValueError, r"mask must be broadcastable to \[4, 8, 8\], got \[8, 9\]"),
        ({"cu_seqlens_q": two}, ValueError, "cu_seqlens_k must be given, as cu_seqlens_q is, got None"),
        ({"cu_seqlens_k": two}, ValueError, "cu_seqlens_q must be given, as cu_seqlens_k is, got None"),
        ({"cu_seqlens_q": two.float(), "cu_seqlens_k": two}, TypeError, "cu_seqlens_q must be an int32 or int64"),
        ({"cu_seqlens_q": two, "cu_seqlens_k": two[None]}, ValueError, r"cu_seqlens_k must be of shape \[any\]"),
        ({"cu_seqlens_q": two, "cu_seqlens_k": two[:0]}, ValueError, "cu_seqlens_k must be of at least 1 element"),
        ({"cu_seqlens_q": two, "cu_seqlens_k": two[:1]}, ValueError, "cu_seqlens_k must be of 2 elements, .* got 1"),
        ({"rows": torch.tensor([8])}, ValueError, r"rows must be from 0 to 7, got \[8, 8\]"),
        ({"rows": torch.tensor([0.5])}, TypeError, "rows must be an int32 or int64 tensor"),
        ({"compute_dtype": torch.int32}, TypeError, "compute_dtype must be a floating-point dtype"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"q": torch.zeros(8, 4, 16), "k": torch.zeros(8, 2, 16), "v": torch.zeros(8, 2, 16)}
    with pytest.raises(error, match=f"^{message}"):
        attention(**(arguments | changed))


def test_batched_tensors_refuse_what_belongs_to_packed_ones() -> None:
    q = torch.zeros(2, 8, 4, 16)
    with pytest.raises(ValueError, match=r"^q must be packed"):
        attention(q, q, q, rows=torch.tensor([0]))
    with pytest.raises(ValueError, match=r"^k must be of batch 2, as q, got 3"):
        attention(q, torch.zeros(3, 8, 4, 16), torch.zeros(3, 8, 4, 16))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"out_a": torch.zeros(2, 4)}, "out_a must be 3-D"),
        ({"out_b": torch.zeros(3, 2, 5)}, r"out_b must be of shape \[3, 2, 4\], as out_a"),
        ({"lse_b": torch.zeros(3, 2)}, r"lse_b must be of shape \[2, 3\], got \[3, 2\]"),
    ],
)
def test_states_that_do_not_fit_each_other_are_named(changed: dict[str, torch.Tensor], message: str) -> None:
    out, lse = torch.zeros(3, 2, 4), torch.zeros(2, 3)
    arguments = {"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse}
    with pytest.raises(ValueError, match=f"^{message}"):
        merge_attention_states(**(arguments | changed))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"q": torch.zeros(2, 4, 576)}, ValueError, "q must be 4-D"),
        ({"kv": torch.zeros(4, 16, 2, 576)}, ValueError, r"kv must be of shape \[pages, page, 1, 576\]"),
        ({"dim_nope": 577}, ValueError, "dim_nope must be from 1 to 576, got 577"),
        ({"cache_seqlens": torch.zeros(3, dtype=torch.int32)}, ValueError, r"cache_seqlens must be of shape \[2\]"),
        ({"block_table": torch.zeros(2, 2)}, TypeError, "block_table must be an int32 or int64 tensor"),
    ],
)
def test_latent_decode_names_what_does_not_fit(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(2, 1, 4, 576),
        "kv": torch.zeros(4, 16, 1, 576),
        "cache_seqlens": torch.zeros(2, dtype=torch.int32),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "dim_nope": 512,
    }
    with pytest.raises(error, match=f"^{message}"):
        mla_decode(**(arguments | changed))
