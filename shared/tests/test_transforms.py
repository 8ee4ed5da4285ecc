"""What is refused by an op that has no derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from kernel_reference.transforms import are_active, check_no_transforms, refuse_derivatives

x = torch.ones(3)


def test_plain_tensors_none_and_what_is_no_tensor_pass() -> None:
    refuse_derivatives(q=x, sinks=None, k=[1.0], scale=2.0)
    check_no_transforms(q=x, sinks=None, k=[1.0])


def test_a_tensor_that_requires_a_gradient_is_named_where_gradients_are_on() -> None:
    wanting = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match=r"^k must be without gradient \(call under torch\.no_grad\(\)"):
        refuse_derivatives(q=x, k=wanting)
    with torch.no_grad():
        refuse_derivatives(q=x, k=wanting)
    with torch.inference_mode():
        refuse_derivatives(q=x, k=wanting)


def test_a_tangent_is_refused_with_gradients_off_too() -> None:
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones(3))
        with pytest.raises(ValueError, match=r"^v must be without a tangent"):
            refuse_derivatives(q=x, v=dual)
        refuse_derivatives(q=x)


def test_a_batch_of_vmap_is_refused_and_what_vmap_left_whole_is_not() -> None:
    def call(q: torch.Tensor) -> torch.Tensor:
        refuse_derivatives(cache=x)
        refuse_derivatives(q=q)
        return q

    with pytest.raises(ValueError, match=r"^q must be outside torch\.vmap \(pass all sequences in one call\), got a"):
        torch.vmap(call)(torch.ones(2, 3))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd], ids=["grad", "jacfwd"])
def test_derivatives_of_torch_func_are_refused(transform: Any) -> None:
    def call(q: torch.Tensor) -> torch.Tensor:
        refuse_derivatives(q=q)
        return q.sum()

    with pytest.raises(ValueError, match=r"^q must be without a (gradient|tangent)|^q must be without gradient"):
        transform(call)(x)


def test_functionalize_is_refused_by_name() -> None:
    def call(q: torch.Tensor) -> torch.Tensor:
        refuse_derivatives(q=q)
        return q

    with pytest.raises(ValueError, match=r"^q must be outside torch\.func\.functionalize"):
        torch.func.functionalize(call)(x)


def test_transforms_are_active_inside_them_alone() -> None:
    seen = []

    def call(q: torch.Tensor) -> torch.Tensor:
        seen.append(are_active())
        return q.sum()

    assert not are_active()
    torch.vmap(call)(torch.ones(2, 3))
    torch.func.grad(call)(x)
    with forward_ad.dual_level():
        seen.append(are_active())
    assert seen == [True, True, True]
    assert not are_active()


def test_compiled_code_refuses_nothing_that_is_plain_and_does_not_break() -> None:
    def call(q: torch.Tensor) -> torch.Tensor:
        refuse_derivatives(q=q, sinks=None)
        return q + 1

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), x + 1)
    with torch.no_grad():
        assert torch.equal(compiled(torch.ones(3)), x + 1)
