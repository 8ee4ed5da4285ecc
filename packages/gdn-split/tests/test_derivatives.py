"""Are derivatives of every kind right, or refused by name, inside and outside torch.func's transforms?

Right is what torch gives for the reference of kernel_reference, which is made of its ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import gdn_split
from kernel_reference import projection

Tensor = torch.Tensor

# Three V heads to a QK head; rows of 36 and 12.
SIZES = (2, 6, 3, 2)
LAYOUTS = ("interleaved", "contiguous")
ROWS = 3


def split(*tensors: Tensor, layout: str) -> tuple[Tensor, ...]:
    return tuple(gdn_split.fused_qkvzba_split_reshape_cat(*tensors, *SIZES, layout=layout))


def merge(*tensors: Tensor, layout: str) -> tuple[Tensor, ...]:
    return tuple(gdn_split.merge_qkvzba(*tensors, *SIZES, layout=layout))


def views(*tensors: Tensor, layout: str) -> tuple[Tensor, ...]:
    return tuple(gdn_split.split_views(*tensors, *SIZES))


def convolve(mixed_qkvz: Tensor, mixed_ba: Tensor) -> tuple[Tensor, ...]:
    tensors = (torch.zeros(ROWS, 24, 3), torch.ones(24, 4), None, torch.arange(ROWS, dtype=torch.int32))
    state, weight, bias, slots = [tensor if tensor is None else tensor.to(mixed_qkvz.device) for tensor in tensors]
    return tuple(gdn_split.split_conv1d_update(mixed_qkvz, mixed_ba, state, weight, bias, slots, *SIZES))


def reference_split(*tensors: Tensor, layout: str) -> tuple[Tensor, ...]:
    return tuple(projection.split(*tensors, *SIZES, layout))


def reference_merge(*tensors: Tensor, layout: str) -> tuple[Tensor, ...]:
    return tuple(projection.merge(*tensors, *SIZES, layout))


def fused(device: torch.device, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    return torch.randn(ROWS, 36, dtype=dtype, device=device), torch.randn(ROWS, 12, dtype=dtype, device=device)


def parts(device: torch.device) -> tuple[Tensor, ...]:
    return tuple(projection.split(*fused(device), *SIZES))


LINEAR = {
    "split": (split, reference_split, fused),
    "merge": (merge, reference_merge, parts),
    "split_views": (views, lambda *tensors, layout: reference_split(*tensors, layout="contiguous"), fused),
}
every_linear_function = pytest.mark.parametrize(("function", "reference", "inputs"), LINEAR.values(), ids=LINEAR)


def loss_of(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """A number that weighs every element of every result differently, and its square too."""

    def loss(*tensors: Tensor) -> Tensor:
        results = function(*tensors)
        weights = [torch.arange(1, r.numel() + 1, dtype=r.dtype, device=r.device).view(r.shape) for r in results]
        return sum(((r + w) * r * w).sum() for r, w in zip(results, weights, strict=True))

    return loss


def batch_of(tensors: tuple[Tensor, ...], size: int = 4) -> tuple[Tensor, ...]:
    return tuple(torch.stack([tensor * (i + 1) for i in range(size)]) for tensor in tensors)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "jvp": lambda f, *a: torch.func.jvp(f, a, tuple(2 * x + 1 for x in a)),
    "jvp of the first alone": lambda f, *a: torch.func.jvp(lambda x: f(x, *a[1:]), a[:1], a[:1]),
    "vjp": lambda f, *a: torch.func.vjp(f, *a)[1](tuple(r + 1 for r in f(*a))),
    "grad": lambda f, *a: torch.func.grad(loss_of(f), argnums=tuple(range(len(a))))(*a),
    "jacfwd": lambda f, *a: torch.func.jacfwd(f, argnums=tuple(range(len(a))))(*a),
    "jacrev": lambda f, *a: torch.func.jacrev(f, argnums=tuple(range(len(a))))(*a),
    "hessian": lambda f, *a: torch.func.hessian(loss_of(f))(*a),
    "vmap": lambda f, *a: torch.vmap(f)(*batch_of(a)),
    "vmap along the second dimension": lambda f, *a: torch.vmap(f, in_dims=1)(*[x.movedim(0, 1) for x in batch_of(a)]),
    "vmap along the last": lambda f, *a: torch.vmap(f, in_dims=-1)(*[x.movedim(0, -1) for x in batch_of(a)]),
    "vmap of the first alone": lambda f, *a: torch.vmap(lambda x: f(x, *a[1:]))(batch_of(a)[0]),
    "vmap in vmap": lambda f, *a: torch.vmap(torch.vmap(f))(*batch_of(batch_of(a), 2)),
    "vmap of grad": lambda f, *a: torch.vmap(torch.func.grad(loss_of(f)))(*batch_of(a)),
    "grad of vmap": lambda f, *a: torch.func.grad(loss_of(torch.vmap(f)))(*batch_of(a)),
    "jvp of vmap": lambda f, *a: torch.func.jvp(torch.vmap(f), batch_of(a), batch_of(a)),
    "jvp of grad": lambda f, *a: torch.func.jvp(torch.func.grad(loss_of(f)), a, a),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@every_linear_function
def test_transforms_of_torch_func_give_what_they_give_for_the_reference(
    device, function, reference, inputs, transform, layout
) -> None:
    tensors = inputs(device)
    got = transform(lambda *a: function(*a, layout=layout), *tensors)
    wanted = transform(lambda *a: reference(*a, layout=layout), *tensors)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("requires_grad", [False, True])
@every_linear_function
def test_a_forward_mode_tangent_is_moved_as_values_are(device, function, reference, inputs, requires_grad) -> None:
    primals, tangents = inputs(device), inputs(device)
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(primal.clone().requires_grad_(requires_grad), tangent)
            for primal, tangent in zip(primals, tangents, strict=True)
        ]
        results = [forward_ad.unpack_dual(result) for result in function(*duals, layout="contiguous")]
    torch.testing.assert_close(tuple(r.primal for r in results), reference(*primals, layout="contiguous"))
    torch.testing.assert_close(tuple(r.tangent for r in results), reference(*tangents, layout="contiguous"))


@every_linear_function
def test_several_gradients_at_once_are_those_of_one_after_the_other(device, function, reference, inputs) -> None:
    tensors = [tensor.requires_grad_() for tensor in inputs(device)]
    result = function(*tensors, layout="interleaved")[0]
    gradients = torch.randn(4, *result.shape, dtype=result.dtype, device=device)
    (together,) = torch.autograd.grad(result, tensors[:1], gradients, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(result, tensors[:1], gradient, retain_graph=True)[0] for gradient in gradients]
    torch.testing.assert_close(together, torch.stack(each))


def test_numbers_with_an_imaginary_part_and_their_gradients_are_moved_like_any(device) -> None:
    tensors = [tensor.requires_grad_() for tensor in fused(device, torch.complex64)]
    results = split(*tensors, layout="interleaved")
    for one, other in zip(results, reference_split(*tensors, layout="interleaved"), strict=True):
        assert torch.equal(one, other)
    weights = [torch.randn_like(result) for result in results]
    got = torch.autograd.grad(results, tensors, weights)
    wanted = torch.autograd.grad(reference_split(*tensors, layout="interleaved"), tensors, weights)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


# What writes tensors that it is given has no derivative, and says so


def split_into(*tensors: Tensor) -> tuple[Tensor, ...]:
    out = [torch.zeros(size, dtype=torch.float64, device=tensors[0].device) for size in sizes_of_parts()]
    return tuple(gdn_split.fused_qkvzba_split_reshape_cat(*tensors, *SIZES, out=out))


def merge_into(*tensors: Tensor) -> tuple[Tensor, ...]:
    out = [torch.zeros(ROWS, width, dtype=torch.float64, device=tensors[0].device) for width in (36, 12)]
    return tuple(gdn_split.merge_qkvzba(*tensors, *SIZES, out=out))


def sizes_of_parts() -> tuple[tuple[int, ...], ...]:
    return (ROWS, 24), (ROWS, 6, 2), (ROWS, 6), (ROWS, 6)


WRITING = {
    "split, out=": (split_into, fused),
    "merge, out=": (merge_into, parts),
    "split_conv1d_update": (convolve, lambda device: fused(device, torch.float32)),
}
every_writing_function = pytest.mark.parametrize(("function", "inputs"), WRITING.values(), ids=WRITING)


@pytest.mark.parametrize("transform", ["jvp", "grad", "vmap", "vmap of grad", "jacfwd", "jacrev"])
@every_writing_function
def test_what_writes_given_tensors_is_refused_by_name_in_a_transform(device, function, inputs, transform) -> None:
    with pytest.raises(ValueError, match=r"(out|update|mixed_\w+|z)\b.* must be .*(outside|without|None).*, got"):
        TRANSFORMS[transform](function, *inputs(device))


@every_writing_function
def test_what_writes_given_tensors_refuses_the_tangent_that_it_would_drop(device, function, inputs) -> None:
    tensors = inputs(device)
    with forward_ad.dual_level():
        # A level alone changes nothing.
        function(*tensors)
        dual = forward_ad.make_dual(tensors[1], tensors[1])
        name = "z" if function is merge_into else "mixed_ba"
        with pytest.raises(ValueError, match=rf"{name} must be without a tangent.*, got"):
            function(tensors[0], dual, *tensors[2:])


@pytest.mark.torch_compile
@pytest.mark.parametrize("transform", ["jvp", "grad", "vmap"])
@pytest.mark.parametrize("name", [*LINEAR, *WRITING])
def test_transforms_inside_torch_compile_are_right_or_refused_by_name(device, name, transform) -> None:
    if name in LINEAR:
        with_layout, reference, inputs = LINEAR[name]
        function = lambda *a: with_layout(*a, layout="contiguous")  # noqa: E731
    else:
        function, inputs = WRITING[name]
    tensors = inputs(device)
    torch._dynamo.reset()
    run = torch.compile(lambda *a: TRANSFORMS[transform](function, *a), fullgraph=True, backend="aot_eager")
    if name == "split_views":
        wanted = TRANSFORMS[transform](lambda *a: reference(*a, layout="contiguous"), *tensors)
        torch.testing.assert_close(run(*tensors), wanted)
        return
    with pytest.raises(Exception, match=r"must be outside torch"):
        run(*tensors)


@pytest.mark.torch_compile
@pytest.mark.parametrize("name", ["split", "merge", *WRITING])
def test_a_tangent_into_compiled_code_is_refused_before_it_is_dropped(device, name) -> None:
    if name in LINEAR:
        with_layout, _, inputs = LINEAR[name]
        function = lambda *a: with_layout(*a, layout="contiguous")  # noqa: E731
    else:
        function, inputs = WRITING[name]
    tensors = inputs(device)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    compiled(*tensors)
    with forward_ad.dual_level(), pytest.raises(Exception, match=r"must be outside torch"):
        compiled(*[forward_ad.make_dual(tensor, tensor) for tensor in tensors])
