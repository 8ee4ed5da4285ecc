"""How an attention whose results have gradients becomes two torch ops: itself and its backward, for autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from kernel_reference.checks import check_dtype, check_same_device, check_same_dtype, check_shape, describe, fail
from kernel_reference.dispatch import PreparedLaunches, allocator, implement, launch_module
from kernel_reference.transforms import are_active

Tensor = torch.Tensor

launches = PreparedLaunches()


class Backward(NamedTuple):
    """What the inputs' gradients come of: results, contiguous, and gradients of them."""

    out: Tensor
    lse: Tensor
    d_out: Tensor
    d_lse: Tensor | None


def _call_all(attend: Callable[..., Any], inputs: Any, numbers: tuple[Any, ...], out: Tensor, lse: Tensor) -> None:
    """The call of an attention that takes its inputs, its results and then all numbers."""
    attend(*inputs, out, lse, *numbers)


class Parts(NamedTuple):
    """What one attention has of its own.

    tensors, numbers: the ops' arguments, as a schema; more: numbers of the attention alone, behind the others. Inputs:
    a named tuple of the tensors; gradients: those of them, two or more, for which ``new_gradients`` allocates. attends:
    what computes, on a CPU and on a GPU; compute(attend, inputs, numbers, out, lse) calls one of them. reference: the
    gradients on a CPU. room: where ``launch`` is, with ``prepare_backward``, and what it needs.
    """

    tensors: str
    numbers: str
    more: str
    Inputs: Any
    gradients: tuple[str, ...]
    attends: tuple[Callable[..., Any], Callable[..., Any]]
    check_attention: Callable[..., Any]
    check_backward: Callable[..., Any]
    new_results: Callable[..., tuple[Tensor, Tensor]]
    new_gradients: Callable[..., tuple[Tensor, ...]]
    reference: Callable[..., None]
    room: tuple[str, ...]
    compute: Callable[..., None] = _call_all


class Ops(NamedTuple):
    """attention: the op; backward_now: what its backward runs on a GPU; library: what keeps both registered."""

    attention: Any
    backward_now: Callable[..., tuple[Tensor, ...]]
    library: torch.library.Library


def differentiable(package: str, name: str, parts: Parts) -> Ops:
    """Register the ops ``name`` and ``name``_backward of a package."""
    library = torch.library.Library(package, "FRAGMENT")
    backward = f"{name}_backward"
    for op, arguments, results in (
        (name, f"{parts.tensors}, {parts.numbers}, {parts.more}", 2),
        (
            backward,
            f"{parts.tensors}, Tensor out, Tensor lse, Tensor d_out, Tensor? d_lse, {parts.numbers}",
            len(parts.gradients),
        ),
    ):
        returned = ", ".join(["Tensor"] * results)
        library.define(f"{op}({arguments}) -> ({returned})", tags=(torch.Tag.pt2_compliant_tag,))
    on_cpu, on_gpu = (partial(_attend, parts, attend) for attend in parts.attends)
    implement(library, name, reference=on_cpu, kernel=on_gpu, fake=partial(_fake_attention, parts))
    # Made once: launches are found by who prepared them.
    backward_now = partial(_backward_now, len(parts.Inputs._fields), partial(_prepare_backward, parts))
    implement(
        library, backward, reference=partial(_reference_backward, parts), kernel=backward_now,
        fake=partial(_fake_backward, parts),
    )  # fmt: skip
    attention, of_backward = (getattr(getattr(torch.ops, package), op).default for op in (name, backward))
    _register_autograd(library, name, parts, of_backward)
    return Ops(attention, backward_now, library)


def are_wanted(*tensors: Any) -> bool:
    """Whether autograd, and no transform of torch.func, is to follow a call with these."""
    if not torch.is_grad_enabled() or are_active():
        return False
    return any([isinstance(x, Tensor) and x.requires_grad for x in tensors])


def check_results(q: Tensor, backward: Backward, out: tuple[int, ...], lse: tuple[int, ...]) -> None:
    """Raise where results, or gradients of them, are not of these shapes, as an attention of q returns them."""
    for name, tensor in (("out", backward.out), ("d_out", backward.d_out)):
        check_shape(name, tensor, out)
        check_same_dtype(name, tensor, "q", q)
    for name, given in (("lse", backward.lse), ("d_lse", backward.d_lse)):
        if given is not None:
            check_shape(name, given, lse)
            check_dtype(name, given, torch.float32)
    for name, given in backward._asdict().items():
        if given is not None:
            check_same_device(name, given, "q", q)
            if name != "d_out" and not given.is_contiguous():
                fail(name, "contiguous", describe(given))


def _attend(parts: Parts, attend: Callable[..., Any], *given: Any) -> tuple[Tensor, Tensor]:
    count = len(parts.Inputs._fields)
    inputs, numbers = parts.Inputs(*given[:count]), given[count:]
    out, lse = parts.new_results(inputs)
    parts.compute(attend, inputs, numbers, out, lse)
    return out, lse


def _fake_attention(parts: Parts, *given: Any) -> tuple[Tensor, Tensor]:
    count = len(parts.Inputs._fields)
    inputs = parts.Inputs(*given[:count])
    parts.check_attention(inputs, given[count:])
    return parts.new_results(inputs)


def _split(parts: Parts, given: tuple[Any, ...]) -> tuple[Any, Backward, tuple[Any, ...]]:
    """The arguments of a backward: inputs, what the gradients come of, numbers."""
    count = len(parts.Inputs._fields)
    tensors = count + len(Backward._fields)
    return parts.Inputs(*given[:count]), Backward(*given[count:tensors]), given[tensors:]


def _reference_backward(parts: Parts, *given: Any) -> tuple[Tensor, ...]:
    inputs, backward, numbers = _split(parts, given)
    problem = parts.check_backward(inputs, backward, numbers)
    gradients = parts.new_gradients(inputs)
    parts.reference(problem, inputs, backward, gradients)
    return tuple(gradients)


def _fake_backward(parts: Parts, *given: Any) -> tuple[Tensor, ...]:
    inputs, backward, numbers = _split(parts, given)
    parts.check_backward(inputs, backward, numbers)
    return tuple(parts.new_gradients(inputs))


def _prepare_backward(parts: Parts, given: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    inputs, backward, _ = _split(parts, given)
    problem = parts.check_backward(inputs, backward, numbers)
    run = launch_module(*parts.room).prepare_backward(problem, None, inputs, backward)
    return [allocator(x) for x in parts.new_gradients(inputs)], run


def _backward_now(count: int, prepare: Any, *given: Any) -> tuple[Tensor, ...]:
    """The op of the backward on a GPU."""
    count += len(Backward._fields)
    tensors = given[:count]
    allocators, run = launches.find(prepare, tensors, given[count:])
    gradients = tuple([allocate() for allocate in allocators])
    run(*tensors, *gradients)
    return gradients


def _register_autograd(library: torch.library.Library, name: str, parts: Parts, of_backward: Any) -> None:
    count, numbers = len(parts.Inputs._fields), parts.numbers.count(",") + 1
    places = [parts.Inputs._fields.index(wanted) for wanted in parts.gradients]

    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:count], *output)
        ctx.numbers = inputs[count : count + numbers]
        ctx.given = len(inputs)
        # An output that nothing uses has no gradient, and no zeros are made for it.
        ctx.set_materialize_grads(False)

    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        found: list[Tensor | None] = [None] * ctx.given
        if d_out is None and d_lse is None:
            return tuple(found)
        if d_out is None:
            d_out = out.new_zeros(()).expand(out.shape)
        gradients = of_backward(*inputs, out, lse, d_out, None if d_lse is None else d_lse.contiguous(), *ctx.numbers)
        for place, gradient in zip(places, gradients, strict=True):
            found[place] = None if inputs[place] is None else gradient
        return tuple(found)

    torch.library.register_autograd(f"{library.ns}::{name}", backward, setup_context=remember, lib=library)
