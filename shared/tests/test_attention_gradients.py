"""The oracle of gradients: does it agree with autograd through the oracle of attention?"""

from __future__ import annotations

import pytest
import torch

from kernel_reference.attention import attention
from kernel_reference.attention_gradients import attention_gradients

LENGTHS = [(5, 3), (0, 4), (2, 0)]


def seen(sequence: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A key in three, and the query's own."""
    return ((key + head) % 3 == 0) | (key == query)


@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 2.0, "sinks": True}, {"left": 2, "softmax_scale": -0.3}, {"mask": seen, "sinks": True}],
    ids=["plain", "soft cap and sinks", "window and scale", "mask and sinks"],
)
def test_gradients_are_those_of_autograd(options) -> None:
    new, totals = [n for _, n in LENGTHS], [sum(pair) for pair in LENGTHS]
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(x).cumsum(0)]) for x in (new, totals))
    # A row of no sequence at the end.
    q, d_out = (torch.randn(sum(new) + 1, 4, size, dtype=torch.float64) for size in (16, 24))
    k, v = (torch.randn(sum(totals) + 1, 2, size, dtype=torch.float64) for size in (16, 24))
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64) if options.get("sinks") else None
    d_lse = torch.randn(4, len(q), dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]
    given = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **options}
    left = given.pop("left", -1)
    given["sinks"] = None if sinks is None else leaves[3]
    found = attention(*leaves[:3], causal=True, window=(left, 0), **given)
    own = slice(0, sum(new))
    ((found.out * d_out)[own].sum() + (found.lse * d_lse)[:, own].sum()).backward()
    given["sinks"] = sinks
    wanted = attention_gradients(q, k, v, d_out, d_lse, left=left, **given)
    for got, leaf in zip((x for x in wanted if x is not None), leaves, strict=True):
        torch.testing.assert_close(got, leaf.grad)


def test_a_row_that_sees_nothing_has_no_gradient_and_gives_none() -> None:
    q, k, v, d_out = torch.randn(4, 3, 1, 16, dtype=torch.float64)
    k[1:], v[1:] = torch.nan, torch.nan
    cu = torch.tensor([0, 3])

    def first(sequence: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key == 0) & (query == 2)

    got = attention_gradients(q, k, v, d_out, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=first)
    # A weight of 1 whatever the score is.
    for x in (got.q, got.k):
        torch.testing.assert_close(x, torch.zeros_like(x), atol=1e-12, rtol=0)
    torch.testing.assert_close(got.v[0], d_out[2])
    assert not got.v[1:].any()


def test_shapes_that_differ_are_refused() -> None:
    q = torch.randn(3, 2, 16)
    cu = torch.tensor([0, 3])
    with pytest.raises(ValueError, match=r"^d_out must be of shape \[3, 2, 16\]"):
        attention_gradients(q, q, q, q[:2], cu_seqlens_q=cu, cu_seqlens_k=cu)
    with pytest.raises(ValueError, match=r"^d_lse must be of shape \[2, 3\]"):
        attention_gradients(q, q, q, q, q[:, :, 0], cu_seqlens_q=cu, cu_seqlens_k=cu)
