"""The torch ops of gradients: their schemas, implementations and autograd.

===========================  ===============================
selected_attention           functional, differentiable
selected_attention_backward  the gradients of that
===========================  ===============================
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from blocksparse_attn.gradients.arguments import Backward
from blocksparse_attn.selected import ops
from blocksparse_attn.selected.gradients import reference
from blocksparse_attn.selected.gradients.arguments import (
    Inputs,
    check_attention,
    check_backward,
    new_gradients,
    new_results,
)
from kernel_reference.dispatch import PreparedLaunches, allocator, implement, launch_module

Tensor = torch.Tensor

_INPUTS = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor indices, Tensor block_table, Tensor cu_seqlens_q,"
    " Tensor seqlens_k, Tensor? sinks, Tensor? k_scale, Tensor? v_scale"
)
_NUMBERS = "int block_size, str page_layout, bool causal, float softmax_scale, float k_factor, float v_factor"
_library = torch.library.Library("blocksparse_attn", "FRAGMENT")
for _name, _arguments, _results in (
    ("selected_attention", f"{_INPUTS}, {_NUMBERS}, int[]? plan=None", "(Tensor, Tensor)"),
    (
        "selected_attention_backward",
        f"{_INPUTS}, Tensor out, Tensor lse, Tensor d_out, Tensor? d_lse, {_NUMBERS}",
        "(Tensor, Tensor, Tensor, Tensor)",
    ),
):
    _library.define(f"{_name}({_arguments}) -> {_results}", tags=(torch.Tag.pt2_compliant_tag,))

_ALL_INPUTS = len(Inputs._fields)
_TENSORS = _ALL_INPUTS + len(Backward._fields)

launches = PreparedLaunches()


def _attention(attend: Any) -> Any:
    def run(*given: Any) -> tuple[Tensor, Tensor]:
        inputs = Inputs(*given[:_ALL_INPUTS])
        # An 8-bit cache is refused before anything is written.
        check_attention(inputs, given[_ALL_INPUTS:])
        out, lse = new_results(inputs)
        attend(*inputs, out, lse, *given[_ALL_INPUTS:])
        return out, lse

    return run


def _fake_attention(*given: Any) -> tuple[Tensor, Tensor]:
    inputs = Inputs(*given[:_ALL_INPUTS])
    check_attention(inputs, given[_ALL_INPUTS:])
    return new_results(inputs)


def _reference_backward(*given: Any) -> tuple[Tensor, ...]:
    inputs, backward = Inputs(*given[:_ALL_INPUTS]), Backward(*given[_ALL_INPUTS:_TENSORS])
    problem = check_backward(inputs, backward, given[_TENSORS:])
    gradients = new_gradients(inputs)
    reference.backward(problem, inputs, backward, gradients)
    return gradients


def _prepare_backward(given: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = launch_module("blocksparse_attn.selected.gradients")
    inputs, backward = Inputs(*given[:_ALL_INPUTS]), Backward(*given[_ALL_INPUTS:])
    problem = check_backward(inputs, backward, numbers)
    run = launch.prepare_backward(problem, None, inputs, backward)
    return [allocator(x) for x in new_gradients(inputs)], run


def backward_now(*given: Any) -> tuple[Tensor, ...]:
    """The op ``selected_attention_backward`` on a GPU."""
    tensors = given[:_TENSORS]
    allocators, run = launches.find(_prepare_backward, tensors, given[_TENSORS:])
    gradients = tuple([allocate() for allocate in allocators])
    run(*tensors, *gradients)
    return gradients


def _fake_backward(*given: Any) -> tuple[Tensor, ...]:
    inputs = Inputs(*given[:_ALL_INPUTS])
    check_backward(inputs, Backward(*given[_ALL_INPUTS:_TENSORS]), given[_TENSORS:])
    return new_gradients(inputs)


implement(
    _library, "selected_attention", reference=_attention(torch.ops.blocksparse_attn.selected.default),
    kernel=_attention(ops.attend_now), fake=_fake_attention,
)  # fmt: skip
implement(
    _library, "selected_attention_backward", reference=_reference_backward, kernel=backward_now, fake=_fake_backward
)  # fmt: skip


attention = torch.ops.blocksparse_attn.selected_attention.default


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_ALL_INPUTS], *output)
    ctx.numbers = inputs[_ALL_INPUTS : _ALL_INPUTS + 6]
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
    d_q, d_k, d_v, d_sinks = torch.ops.blocksparse_attn.selected_attention_backward(
        *inputs, out, lse, d_out, None if d_lse is None else d_lse.contiguous(), *ctx.numbers
    )
    found[:3] = d_q, d_k, d_v
    found[7] = None if inputs[7] is None else d_sinks
    return tuple(found)


torch.library.register_autograd(
    "blocksparse_attn::selected_attention", _backward, setup_context=_remember, lib=_library
)
