"""The plain version that kernels are measured beside, itself measured beside the oracle."""

from __future__ import annotations

import math

import pytest
import torch

from kernel_reference.attention import attention
from kernel_reference.testing.numerics import assert_close_to_oracle
from kernel_reference.testing.plain import Wanted, assert_rounded, moved, plain_rows
from kernel_reference.testing.tensor_cores import truncated_product

R, K, H, D, DV = 40, 56, 4, 32, 16


def inputs(dtype: torch.dtype, heads_kv: int = H) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(size).to(dtype) for size in ((R, H, D), (K, heads_kv, D), (K, heads_kv, DV)))


@pytest.mark.parametrize("kind", ["plain", "capped", "sinks", "biased", "one kv head", "a mask of each head"])
def test_in_float32_it_is_the_oracle(kind: str) -> None:
    q, k, v = inputs(torch.float32, 1 if kind == "one kv head" else H)
    distance = torch.arange(K) - torch.arange(K - R, K)[:, None]
    seen = distance <= 0
    slopes, sinks = torch.rand(H), torch.randn(H)
    ours, theirs = {}, {}
    if kind == "capped":
        ours["softcap"] = theirs["softcap"] = 3.0
    elif kind == "sinks":
        ours["sinks"] = theirs["sinks"] = sinks
    elif kind == "biased":
        ours["bias"], theirs["alibi_slopes"] = slopes[:, None, None] * distance, slopes
    elif kind == "a mask of each head":
        seen = torch.rand(H, R, K) < 0.5
        seen[:, 3] = False
        theirs["causal"] = False
    out, lse = plain_rows(q, k, v, seen, 0.3, **ours)
    wanted = attention(q, k, v, softmax_scale=0.3, mask=seen if seen.ndim == 3 else None,
                       **{"causal": True, **theirs})  # fmt: skip
    assert (out.double() - wanted.out).abs().max() < 1e-5
    assert torch.allclose(lse.double(), wanted.lse, rtol=0, atol=1e-5)


def test_rows_that_see_nothing_are_0_and_minus_infinity_or_their_sink() -> None:
    q, k, v = inputs(torch.bfloat16)
    none = torch.zeros(R, K, dtype=torch.bool)
    out, lse = plain_rows(q, k, v, none, 1.0)
    assert not out.any()
    assert (lse == -torch.inf).all()
    out, lse = plain_rows(q, k, v, none, 1.0, sinks=torch.arange(4.0))
    assert not out.any()
    assert torch.equal(lse, torch.arange(4.0)[:, None].expand(4, R))
    out, lse = plain_rows(q, k[:0], v[:0], none[:, :0], 1.0)
    assert out.shape == (R, H, DV)
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_its_errors_are_those_of_the_dtype_under_test() -> None:
    q, k, v = inputs(torch.bfloat16)
    seen = torch.ones(R, K, dtype=torch.bool)
    exact = attention(q, k, v, softmax_scale=0.2).out
    errors = [
        (plain_rows(*(x.to(dtype) for x in (q, k, v)), seen, 0.2)[0].double() - exact).abs().mean()
        for dtype in (torch.bfloat16, torch.float32)
    ]
    assert errors[1] < 1e-6 < 1e-4 < errors[0] < 1e-2


def test_a_plain_version_that_is_exact_by_chance_is_moved_by_a_unit_and_another_left() -> None:
    exact = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    by_chance = Wanted(exact, exact.half())
    eps = torch.finfo(torch.float16).eps
    assert moved(by_chance).plain.tolist() == [1 + eps, -2 - 2 * eps, 0.0]
    assert moved(by_chance, units=4).plain.tolist() == [1 + 4 * eps, -2 - 8 * eps, 0.0]
    # A logarithm's last place is that of the sum, also where it is near 0.
    assert moved(by_chance, logarithm=True).plain.tolist() == [1 + eps, -2 - 2 * eps, eps]
    off = Wanted(exact, exact.half() + 1)
    assert torch.equal(moved(off).plain, off.plain)


def test_an_error_in_a_row_of_small_values_is_seen_beside_rows_of_large_ones() -> None:
    exact = torch.randn(100, 2, 8, dtype=torch.float64)
    exact[50] *= 2.0**-10
    wanted = Wanted(exact, exact.bfloat16())
    got = exact.bfloat16()
    assert_rounded(got, wanted)
    got[50] *= 1.2
    with pytest.raises(AssertionError, match="the output"):
        assert_rounded(got, wanted)


def test_of_few_rows_an_error_of_the_last_place_passes_and_a_larger_one_does_not() -> None:
    exact = torch.full((2, 3, 4), 1.5, dtype=torch.float64)
    wanted = Wanted(exact, exact.half())
    assert_rounded((exact * (1 + 2**-10)).half(), wanted)
    with pytest.raises(AssertionError, match="lse"):
        assert_rounded((exact * (1 + 2**-6)).half(), wanted, what="lse")
    assert_rounded((exact * (1 + 2**-6)).half(), wanted, units=32)


def test_8_bit_results_and_empty_ones_are_compared_as_they_are() -> None:
    exact = 300 * torch.rand(100, 1, 8, dtype=torch.float64)
    assert_rounded(exact.to(torch.float8_e4m3fn), Wanted(exact, exact.to(torch.float8_e4m3fn)))
    empty = torch.empty(0, 2, 8, dtype=torch.float64)
    assert_rounded(empty.half(), Wanted(empty, empty.half()))


def lse_of(products: torch.Tensor, scale: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """By powers of two, as kernels have it; the base is undone in two parts. dtype: of the weights that are summed."""
    scores = products.double() * scale / math.log(2)
    highest = scores.amax(-1).float().double()
    row_sum = torch.exp2((scores - highest[..., None]).float()).to(dtype).float().sum(-1)
    return ((highest + torch.log2(row_sum.double())) * math.log(2)).float()


def products_of(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return truncated_product(q.transpose(0, 1), k.transpose(0, 1).mT)


def in_18_bits(x: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int32) & ~0x3F).view(torch.float32)


@pytest.mark.parametrize("keys", [1, 47])
def test_the_lse_of_a_kernel_on_tensor_cores_is_judged_beside_their_sums(keys: int) -> None:
    """Heads of 576 whose scores are far apart are 7.8e-5 off at 103 on an H200. Float32 operands are nearer."""
    q, k = (torch.randn(rows, heads, 576).bfloat16() for rows, heads in ((8, 80), (keys, 1)))
    seen = torch.ones(8, keys, dtype=torch.bool)
    exact = attention(q.double(), k, k, softmax_scale=1.5).lse
    beside = {cut: plain_rows(q, k, k, seen, 1.5, on_tensor_cores=cut)[1] for cut in (False, True)}
    # The same columns in another order.
    products = products_of(q.flip(2), k.flip(2))
    right = lse_of(products, 1.5)
    assert_close_to_oracle(right, exact, beside[True])
    with pytest.raises(AssertionError, match="ABOVE"):
        assert_close_to_oracle(right, exact, beside[False])
    wrong = [right.half().float(), lse_of(in_18_bits(products), 1.5)]
    if keys > 1:
        wrong += [lse_of(products_of(q, k[:-1]), 1.5), lse_of(products, 1.5, torch.bfloat16)]
    for lse in wrong:
        with pytest.raises(AssertionError, match="ABOVE"):
            assert_close_to_oracle(lse, exact, beside[True])
