"""The torch ops of prefill: what ops.py is for the others.

=================  =====================================================================
prefill_inputs     functional, with gradients where it is given no state
prefill_backward   these gradients
keep_inputs        writes the convolution's state, which prefill_inputs has read
=================  =====================================================================
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from gdn_split.ops import SIZES, launches, library
from gdn_split.prefill import arguments, reference
from gdn_split.prefill.plan import PrefillPlan
from gdn_split.prefill.reference import gradients_and_inputs, new_gradients, new_inputs
from gdn_split.tensors import Prefill
from kernel_reference.checks import fail, values_are_checked
from kernel_reference.dispatch import allocator, implement, launch_module

Tensor = torch.Tensor

_GIVEN = (
    "Tensor mixed_qkvz, Tensor mixed_ba, Tensor conv_weight, Tensor? conv_bias, Tensor cu_seqlens, {} conv_state,"
    " Tensor? slots, Tensor? has_initial_state, Tensor A_log, Tensor dt_bias,"
    f" bool silu, bool qk_norm, bool initial, int chunk_size, {SIZES}"
)
for _name, _state, _results in (
    ("prefill_inputs", "Tensor?", "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"),
    ("keep_inputs", "Tensor(a!)", "()"),
):
    library.define(f"{_name}({_GIVEN.format(_state)}) -> {_results}", tags=(torch.Tag.pt2_compliant_tag,))
library.define(
    "prefill_backward(Tensor d_q, Tensor d_k, Tensor d_v, Tensor d_z, Tensor d_g, Tensor d_beta, Tensor mixed_qkvz,"
    " Tensor mixed_ba, Tensor conv_weight, Tensor? conv_bias, Tensor cu_seqlens, Tensor A_log, Tensor dt_bias,"
    f" bool silu, bool qk_norm, int chunk_size, {SIZES}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _prepare_inputs(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch_module("gdn_split")
    from gdn_split.prefill import launch

    t = Prefill(*tensors)
    problem = arguments.check_prefill(t, *numbers)
    run = launch.prepare_inputs(problem, PrefillPlan.from_ints(numbers[9] if len(numbers) > 9 else None), t)
    allocators = [allocator(out) for out in new_inputs(t.mixed_qkvz, problem)]
    return allocators, run, launch.in_order, problem.initial


def _kernel_inputs(*given: Any) -> tuple[Tensor, ...]:
    t = Prefill(*given[:10])
    allocators, run, in_order, initial = launches.find(_prepare_inputs, t, given[10:])
    if values_are_checked(t.mixed_qkvz.device):
        arguments.check_values(t)
    outs = tuple([allocate() for allocate in allocators])
    run(*in_order(t, outs, initial))
    return outs


def _prepare_backward(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch_module("gdn_split")
    from gdn_split.prefill import launch

    d, t, numbers = gradients_and_inputs((*tensors, *numbers))
    problem = arguments.check_backward(d, t, *numbers)
    allocators = [allocator(made) for made in new_gradients(t, problem)]
    return allocators, launch.prepare_backward(problem, None, t)


def _kernel_backward(*given: Any) -> tuple[Tensor, ...]:
    allocators, run = launches.find(_prepare_backward, given[:13], given[13:])
    d, t, _ = gradients_and_inputs(given)
    made = tuple([allocate() for allocate in allocators])
    run(d, t, made)
    return made


def _prepare_kept(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch_module("gdn_split")
    from gdn_split.prefill import launch

    t = Prefill(*tensors)
    problem = arguments.check_prefill(t, *numbers)
    return launch.prepare_kept(problem, t), arguments.overlap(t)


def _kernel_kept(*given: Any) -> None:
    t = Prefill(*given[:10])
    run, check_overlap = launches.find(_prepare_kept, t, given[10:])
    check_overlap(*t)
    run(t.mixed_qkvz, t.cu_seqlens, t.conv_state, t.slots, t.has_initial_state)


def _fake_inputs(*given: Any) -> tuple[Tensor, ...]:
    t = Prefill(*given[:10])
    return new_inputs(t.mixed_qkvz, arguments.check_prefill(t, *given[10:]))


def _fake_backward(*given: Any) -> tuple[Tensor, ...]:
    d, t, numbers = gradients_and_inputs(given)
    return new_gradients(t, arguments.check_backward(d, t, *numbers))


def _fake_kept(*given: Any) -> object:
    return arguments.check_prefill(Prefill(*given[:10]), *given[10:])


implement(
    library, "prefill_inputs", reference=reference.prefill_inputs, kernel=_kernel_inputs, fake=_fake_inputs
)  # fmt: skip
implement(library, "keep_inputs", reference=reference.keep_inputs, kernel=_kernel_kept, fake=_fake_kept)
implement(
    library, "prefill_backward", reference=reference.prefill_backward, kernel=_kernel_backward,
    fake=_fake_backward,
)  # fmt: skip


def _remember_inputs(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    t = Prefill(*inputs[:10])
    ctx.save_for_backward(*t[:5], *t[8:])
    silu, qk_norm, _, *sizes = inputs[10:]
    # torch leaves out a plan that is None, and one of the forward call is none of the gradients'.
    ctx.numbers = (silu, qk_norm, *sizes[:6])
    ctx.stateless = t.conv_state is None


@once_differentiable
def _inputs_backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    if not ctx.stateless:
        fail("conv_state", "None where gradients are asked for", "a Tensor")
    # Autograd hands over expanded gradients (of a sum, for one).
    d = [gradient.contiguous() for gradient in gradients]
    d_qkvz, d_ba, d_weight, d_bias, d_a_log, d_dt_bias = torch.ops.gdn_split.prefill_backward(
        *d, *ctx.saved_tensors, *ctx.numbers
    )
    if ctx.saved_tensors[3] is None:
        d_bias = None
    return (d_qkvz, d_ba, d_weight, d_bias, None, None, None, None, d_a_log, d_dt_bias, *[None] * 10)


torch.library.register_autograd(
    "gdn_split::prefill_inputs", _inputs_backward, setup_context=_remember_inputs, lib=library
)
