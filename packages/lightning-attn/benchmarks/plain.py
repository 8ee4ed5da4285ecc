"""The recurrence in plain PyTorch in the dtype that is timed: errors are held against its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]

DTYPE = torch.bfloat16
# Tokens of a chunk; multiplications too are counted as in chunks of this many, whatever an implementation does.
CHUNK = 64


class Product(torch.autograd.Function):
    """A matrix product, and those of its backward, of operands rounded to 16 bits and summed in float32."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = rounded(a), rounded(b)
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> Tensors:
        a, b = ctx.saved_tensors
        return rounded(d_out) @ b.mT, a.mT @ rounded(d_out)


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.to(DTYPE).float()


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor, bounds: Sequence[int], initial: torch.Tensor
) -> Tensors:
    """Outputs and states as plain PyTorch gives them: 16-bit operands, everything else in float32.

    `linear_attention_chunked` with a 16-bit compute_dtype would round the state too, after every chunk, and so let
    errors pass that are many times those of a good kernel.
    """
    s = s[:, None, None]
    outs, states = [], []
    for begin, end, state in zip(bounds[:-1], bounds[1:], initial.float(), strict=True):
        for first in range(begin, end, CHUNK):
            # [heads, tokens, elements]
            qc, kc, vc = (x[first : min(first + CHUNK, end)].transpose(0, 1).float() for x in (q, k, v))
            place = torch.arange(qc.shape[1], device=q.device)[:, None]
            distance = place - place.mT
            seen = torch.where(distance >= 0, torch.exp(-s * distance.clamp(min=0)), 0) * Product.apply(qc, kc.mT)
            before = torch.exp(-s * (place + 1)) * Product.apply(qc, state)
            outs.append((Product.apply(seen, vc) + before).transpose(0, 1))
            entering = torch.exp(-s * (place[-1] - place)) * kc
            state = torch.exp(-s * (place[-1] + 1)) * state + Product.apply(entering.mT, vc)
        states.append(state)
    return torch.cat(outs).to(DTYPE), torch.stack(states)
