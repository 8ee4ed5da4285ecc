"""How an attention whose results have gradients becomes two torch ops: itself and its backward, for autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from blocksparse_attn.gradients.arguments import Backward
from kernel_reference.dispatch import PreparedLaunches, allocator, implement, launch_module

Tensor = torch.Tensor

launches = PreparedLaunches()


class Parts(NamedTuple):
    """What one attention has of its own.

    tensors, numbers: the ops' arguments, as a schema; more: numbers of the attention alone, behind the others. Inputs:
    a named tuple of the tensors, of which q, k and v are the first three. compute(attend, inputs, numbers, out, lse)
    calls one of ``attends``: on a CPU and on a GPU. reference: the gradients on a CPU. room: where ``launch`` is.
    """

    tensors: str
    numbers: str
    more: str
    Inputs: Any
    attends: tuple[Callable[..., Any], Callable[..., Any]]
    compute: Callable[..., None]
    check_attention: Callable[..., Any]
    check_backward: Callable[..., Any]
    new_results: Callable[..., tuple[Tensor, Tensor]]
    new_gradients: Callable[..., Any]
    reference: Callable[..., None]
    room: str


class Ops(NamedTuple):
    """attention: the op; backward_now: what its backward runs on a GPU; library: what keeps both registered."""

    attention: Any
    backward_now: Callable[..., tuple[Tensor, ...]]
    library: torch.library.Library


def differentiable(name: str, parts: Parts) -> Ops:
    """Register the ops ``name`` and ``name``_backward."""
    library = torch.library.Library("blocksparse_attn", "FRAGMENT")
    backward = f"{name}_backward"
    for op, arguments, results in (
        (name, f"{parts.tensors}, {parts.numbers}, {parts.more}", "(Tensor, Tensor)"),
        (
            backward,
            f"{parts.tensors}, Tensor out, Tensor lse, Tensor d_out, Tensor? d_lse, {parts.numbers}",
            "(Tensor, Tensor, Tensor, Tensor)",
        ),
    ):
        library.define(f"{op}({arguments}) -> {results}", tags=(torch.Tag.pt2_compliant_tag,))
    on_cpu, on_gpu = (partial(_attend, parts, attend) for attend in parts.attends)
    implement(library, name, reference=on_cpu, kernel=on_gpu, fake=partial(_fake_attention, parts))
    # Made once: launches are found by who prepared them.
    backward_now = partial(_backward_now, len(parts.Inputs._fields), partial(_prepare_backward, parts))
    implement(
        library, backward, reference=partial(_reference_backward, parts), kernel=backward_now,
        fake=partial(_fake_backward, parts),
    )  # fmt: skip
    attention, of_backward = (getattr(torch.ops.blocksparse_attn, op).default for op in (name, backward))
    _register_autograd(library, name, parts, of_backward)
    return Ops(attention, backward_now, library)


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
    gradients: tuple[Tensor, ...] = parts.new_gradients(inputs)
    parts.reference(problem, inputs, backward, gradients)
    return gradients


def _fake_backward(parts: Parts, *given: Any) -> tuple[Tensor, ...]:
    inputs, backward, numbers = _split(parts, given)
    parts.check_backward(inputs, backward, numbers)
    gradients: tuple[Tensor, ...] = parts.new_gradients(inputs)
    return gradients


def _prepare_backward(parts: Parts, given: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    inputs, backward, _ = _split(parts, given)
    problem = parts.check_backward(inputs, backward, numbers)
    run = launch_module(parts.room).prepare_backward(problem, None, inputs, backward)
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
    count, sinks = len(parts.Inputs._fields), parts.Inputs._fields.index("sinks")
    numbers = parts.numbers.count(",") + 1

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
        d_q, d_k, d_v, d_sinks = of_backward(
            *inputs, out, lse, d_out, None if d_lse is None else d_lse.contiguous(), *ctx.numbers
        )
        found[:3] = d_q, d_k, d_v
        found[sinks] = None if inputs[sinks] is None else d_sinks
        return tuple(found)

    torch.library.register_autograd(f"blocksparse_attn::{name}", backward, setup_context=remember, lib=library)
