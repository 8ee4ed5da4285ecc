"""What a kernel of attention is measured beside: plain PyTorch in its own dtype, and its errors row by row.

::

    exact = attention(q, k, v, mask=seen, softmax_scale=scale)                       # float64
    out, lse = plain_rows(q, k, v, seen, scale)                                      # the dtype under test
    assert_rounded(kernel_out, Wanted(exact.out, out.to(q.dtype)))
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernel_reference.testing.numerics import assert_close_to_oracle, assert_no_lean
from kernel_reference.testing.tensor_cores import truncated_product

Tensor = torch.Tensor

# Numbers of this many rows and heads or fewer do not tell a version's errors: one weight may be exact by chance.
_TOO_FEW = 64
# float16's range of exponents, by which rows are scaled.
_MOST_EXPONENT = 14


class Wanted(NamedTuple):
    """A result in float64, and what a plain version makes of it in the dtype under test."""

    exact: Tensor
    plain: Tensor


def plain_rows(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, *, softcap: float = 0.0, bias: Tensor | None = None,
    sinks: Tensor | None = None, on_tensor_cores: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rows of one sequence in the dtype of q: out [R, H, Dv] and lse [H, R], both in float32.

    Each matrix product takes operands of that dtype and sums in float32, which is what the hardware's matrix
    instructions do; the softmax is float32 and its weights, at most 1, are rounded to the dtype for the second product.
    A row that sees nothing is 0, its lse -inf or its sink.

    Args:
        q: [R, H, D]; k, v: [K, H or 1, D] and [K, H or 1, Dv].
        seen: [R, K] or [H, R, K] bool.
        bias: added to capped scores, broadcast to [H, R, K]: ALiBi's slope * (key - query position).
        sinks: [H].
        on_tensor_cores: sum the scores as a GPU's matrix instructions do (:mod:`.tensor_cores`), on any device. A
            library's own product will not do: of one key, or an odd number of them, cuBLAS takes no tensor cores.
    """

    def heads_first(x: Tensor) -> Tensor:
        return x.transpose(0, 1)

    keys = heads_first(k).mT
    product = truncated_product(heads_first(q), keys) if on_tensor_cores else heads_first(q).float() @ keys.float()
    scores = product * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~seen, -torch.inf)
    running_max = scores.amax(2) if scores.shape[2] else scores.new_full(scores.shape[:2], -torch.inf)
    if sinks is not None:
        running_max = torch.maximum(running_max, sinks.float()[:, None])
    shift = running_max.masked_fill(running_max == -torch.inf, 0)
    weights = torch.exp(scores - shift[..., None])
    row_sum = weights.sum(2)
    if sinks is not None:
        row_sum = row_sum + torch.exp(sinks.float()[:, None] - shift)
    out = weights.to(q.dtype).float() @ heads_first(v).float() / row_sum[..., None]
    out = torch.where(seen.any(-1)[..., None], out, 0)
    return out.transpose(0, 1), shift + torch.log(row_sum)


def moved(wanted: Wanted, *, logarithm: bool = False, units: float = 1) -> Wanted:
    """With the plain version at least some units in the last place off, where numbers are too few to tell its errors.

    logarithm: of a sum, whose last place it is too; the logarithm itself may be near 0.
    """
    exact, plain = wanted
    unit = units * torch.finfo(plain.dtype).eps * (exact.abs().clamp(min=1) if logarithm else exact.abs())
    other = (exact + torch.where(exact < 0, -unit, unit)).to(plain.dtype)
    near = (plain.double() - exact).abs() < (other.double() - exact).abs()
    return Wanted(exact, torch.where(near, other.float(), plain.float()).to(plain.dtype))


def assert_rounded(got: Tensor, wanted: Wanted, *, what: str = "the output", units: float = 1) -> None:
    """:func:`.numerics.assert_close_to_oracle` of [..., D] with every row scaled to the same size.

    A row that sees few keys holds values many times those of one that sees thousands, whose errors it would hide. Rows
    are scaled by powers of two, which is exact; 8-bit results, whose range is too small for that, are not. units: what
    plain PyTorch may be off, in units in the last place, where there are few rows (:func:`moved`).
    """
    if wanted.exact.shape[:-1].numel() <= _TOO_FEW:
        # What is moved is off by more than its last rounding, and tells nothing of a lean.
        assert_no_lean(got, *wanted, what=what)
        wanted = moved(wanted, units=units)
    exact, plain = wanted
    if exact.numel() and got.element_size() > 1:
        size = exact.abs().amax(-1, keepdim=True)
        exponent = -torch.where(size > 0, size, 1).log2().round().clamp(-_MOST_EXPONENT, _MOST_EXPONENT)
        factor = torch.exp2(exponent)
        got, exact, plain = got * factor.to(got.dtype), exact * factor, plain * factor.to(got.dtype)
    assert_close_to_oracle(got, exact, plain, what=what)
