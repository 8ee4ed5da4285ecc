"""The torch ops of gradients.

==================  ====================================
attention           functional, differentiable
attention_backward  the gradients of attention
==================  ====================================
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kernel_reference.checks import fail
from kernel_reference.dispatch import PreparedLaunches, allocator, implement, launch_module
from kernel_reference.transforms import are_active
from tilelang_mla import ops
from tilelang_mla.gradients import reference
from tilelang_mla.gradients.arguments import (
    Backward,
    Inputs,
    check_attention,
    check_backward,
    new_gradients,
    new_results,
)
from tilelang_mla.gradients.plan import MOST_COLUMNS

Tensor = torch.Tensor

_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k"
_NUMBERS = "SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, bool causal"
_library = torch.library.Library("tilelang_mla", "FRAGMENT")
_library.define(
    f"attention({_TENSORS}, {_NUMBERS}, int[]? plan=None) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"attention_backward({_TENSORS}, Tensor out, Tensor lse, Tensor d_out, Tensor? d_lse, {_NUMBERS})"
    " -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_INPUTS, _GIVEN = len(Inputs._fields), len(Inputs._fields) + len(Backward._fields)
_NUMBERS_OF = _NUMBERS.count(",") + 1

launches = PreparedLaunches()


def are_wanted(*tensors: Any) -> bool:
    """Whether autograd, and no transform of torch.func, is to follow a call with these."""
    if not torch.is_grad_enabled() or are_active():
        return False
    return any([isinstance(x, Tensor) and x.requires_grad for x in tensors])


def _attend(run: Any, given: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    inputs = Inputs(*given[:_INPUTS])
    results = new_results(inputs)
    run(*inputs, *results, *given[_INPUTS:])
    return results


def _on_cpu(*given: Any) -> tuple[Tensor, Tensor]:
    return _attend(torch.ops.tilelang_mla.prefill.default, given)


def _on_gpu(*given: Any) -> tuple[Tensor, Tensor]:
    # Before anything runs: its backward would refuse them.
    if given[0].shape[2] + given[2].shape[2] > MOST_COLUMNS:
        sizes = [given[0].shape[2], given[2].shape[2]]
        fail("q", f"of heads of at most {MOST_COLUMNS} with those of v, for a gradient", sizes)
    return _attend(ops.prefill_now, given)


def _fake_attention(*given: Any) -> tuple[Tensor, Tensor]:
    inputs = Inputs(*given[:_INPUTS])
    check_attention(inputs, given[_INPUTS:])
    return new_results(inputs)


def _split(given: tuple[Any, ...]) -> tuple[Inputs, Backward, tuple[Any, ...]]:
    return Inputs(*given[:_INPUTS]), Backward(*given[_INPUTS:_GIVEN]), given[_GIVEN:]


def _reference_backward(*given: Any) -> tuple[Tensor, ...]:
    inputs, backward, numbers = _split(given)
    problem = check_backward(inputs, backward, numbers)
    gradients = new_gradients(inputs)
    reference.backward(problem, inputs, backward, gradients)
    return tuple(gradients)


def _fake_backward(*given: Any) -> tuple[Tensor, ...]:
    inputs, backward, numbers = _split(given)
    check_backward(inputs, backward, numbers)
    return tuple(new_gradients(inputs))


def _prepare_backward(given: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    inputs, backward, _ = _split(given)
    problem = check_backward(inputs, backward, numbers)
    launch = launch_module("tilelang_mla.gradients", "TileLang, which tilelang-mla[tilelang] brings")
    run = launch.prepare_backward(problem, None, inputs, backward)
    return [allocator(x) for x in new_gradients(inputs)], run


def backward_now(*given: Any) -> tuple[Tensor, ...]:
    """The op of the backward on a GPU."""
    tensors = given[:_GIVEN]
    allocators, run = launches.find(_prepare_backward, tensors, given[_GIVEN:])
    gradients = tuple([allocate() for allocate in allocators])
    run(*tensors, *gradients)
    return gradients


implement(_library, "attention", reference=_on_cpu, kernel=_on_gpu, fake=_fake_attention)
implement(_library, "attention_backward", reference=_reference_backward, kernel=backward_now, fake=_fake_backward)
attention = torch.ops.tilelang_mla.attention.default
_of_backward = torch.ops.tilelang_mla.attention_backward.default


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_INPUTS], *output)
    ctx.numbers = inputs[_INPUTS : _INPUTS + _NUMBERS_OF]
    ctx.given = len(inputs)
    # An output that nothing uses has no gradient, and no zeros are made for it.
    ctx.set_materialize_grads(False)


@once_differentiable
def _backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, out, lse = ctx.saved_tensors
    found: list[Tensor | None] = [None] * ctx.given
    if d_out is None and d_lse is None:
        return tuple(found)
    if d_out is None:
        d_out = out.new_zeros(()).expand(out.shape)
    found[:3] = _of_backward(*inputs, out, lse, d_out, None if d_lse is None else d_lse.contiguous(), *ctx.numbers)
    return tuple(found)


torch.library.register_autograd("tilelang_mla::attention", _backward, setup_context=_remember, lib=_library)
