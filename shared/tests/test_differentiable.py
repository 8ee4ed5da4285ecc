"""Do gradients of an attention reach its inputs, whichever of its results is used?"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from kernel_reference.differentiable import Backward, Parts, check_results, differentiable

Tensor = torch.Tensor


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    sinks: Tensor | None


def new_results(inputs: Inputs) -> tuple[Tensor, Tensor]:
    return torch.empty_like(inputs.q), inputs.q.new_empty(inputs.q.shape[0], dtype=torch.float32)


def new_gradients(inputs: Inputs) -> tuple[Tensor, ...]:
    sinks = inputs.q.new_empty(0) if inputs.sinks is None else torch.empty_like(inputs.sinks)
    return torch.empty_like(inputs.q), torch.empty_like(inputs.k), sinks


def attend(q: Tensor, k: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, scale: float) -> None:
    """In place of an attention, sums of which every derivative is another number."""
    out.copy_(scale * q + 3 * k)
    lse.copy_(5 * q.sum(1) + (0 if sinks is None else 7 * sinks))


def backward(problem: None, inputs: Inputs, given: Backward, gradients: tuple[Tensor, ...]) -> None:
    d_lse = torch.zeros(()) if given.d_lse is None else given.d_lse
    gradients[0].copy_(2 * given.d_out + 5 * d_lse[..., None])
    gradients[1].copy_(3 * given.d_out)
    gradients[2].copy_(7 * d_lse if inputs.sinks is not None else torch.empty(0))


def check_backward(inputs: Inputs, given: Backward, numbers: tuple[Any, ...]) -> None:
    assert given.d_out.is_contiguous() or given.d_out.stride() == (0, 0)
    assert given.d_lse is None or given.d_lse.is_contiguous()


attention, _, _library = differentiable(
    "kernel_reference_tests",
    "attention",
    Parts(
        tensors="Tensor q, Tensor k, Tensor? sinks", numbers="float scale", more="int[]? plan=None", Inputs=Inputs,
        gradients=("q", "k", "sinks"), attends=(attend, attend), check_attention=lambda inputs, numbers: None,
        check_backward=check_backward, new_results=new_results, new_gradients=new_gradients, reference=backward,
        room=("kernel_reference_tests",),
    ),
)  # fmt: skip


@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize(("of_out", "of_lse"), [(1, 1), (1, 0), (0, 1)])
def test_gradients_of_either_result_reach_every_input(of_out: int, of_lse: int, sinks: bool) -> None:
    q, k, logits = (torch.randn(size, requires_grad=True) for size in ((4, 6), (4, 6), (4,)))
    results = attention(q, k, logits if sinks else None, 2.0)
    # Strides of 0 and 1, as a sum and a slice give them.
    d_out, d_lse = torch.ones(()).expand(4, 6), torch.arange(8.0)[::2]
    used = [(result, d) for result, d, wanted in zip(results, (d_out, d_lse), (of_out, of_lse), strict=True) if wanted]
    leaves = [q, k, logits][: 3 if sinks else 2]
    # Zeros for what no gradient reaches.
    found = torch.autograd.grad(
        [x for x, _ in used], leaves, [d for _, d in used], allow_unused=True, materialize_grads=True
    )
    wanted = [2.0 * of_out + 5 * of_lse * d_lse[:, None].expand(4, 6), 3.0 * of_out * d_out, 7 * of_lse * d_lse]
    for one, other in zip(found, wanted, strict=False):
        assert torch.equal(one, other)


def test_results_that_are_not_contiguous_are_named() -> None:
    q = torch.randn(4, 6)
    given = Backward(torch.randn(6, 4).T, torch.randn(4), q, None)
    with pytest.raises(ValueError, match=r"^out must be contiguous"):
        check_results(q, given, (4, 6), (4,))
    with pytest.raises(ValueError, match=r"^lse must be \[3\]"):
        check_results(q, given._replace(out=q), (4, 6), (3,))
