"""The torch ops of prefill: what ops.py is for the others.

=================  =====================================================================
prefill_inputs     functional, without derivatives
keep_inputs        writes the convolution's state, which prefill_inputs has read
=================  =====================================================================
"""

from __future__ import annotations

from typing import Any

import torch

from gdn_split import prefill_arguments, prefill_reference
from gdn_split.ops import _SIZES, _library, launches
from gdn_split.plan import PrefillPlan
from gdn_split.prefill_reference import new_inputs
from gdn_split.tensors import Prefill
from kernel_reference.checks import values_are_checked
from kernel_reference.dispatch import allocator, implement, launch_module

Tensor = torch.Tensor

_GIVEN = (
    "Tensor mixed_qkvz, Tensor mixed_ba, Tensor conv_weight, Tensor? conv_bias, Tensor cu_seqlens, {} conv_state,"
    " Tensor? slots, Tensor? has_initial_state, Tensor A_log, Tensor dt_bias,"
    f" bool silu, bool qk_norm, bool initial, int chunk_size, {_SIZES}"
)
for _name, _state, _results in (
    ("prefill_inputs", "Tensor?", "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"),
    ("keep_inputs", "Tensor(a!)", "()"),
):
    _library.define(f"{_name}({_GIVEN.format(_state)}) -> {_results}", tags=(torch.Tag.pt2_compliant_tag,))


def _prepare_inputs(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch_module("gdn_split")
    from gdn_split import prefill_launch

    t = Prefill(*tensors)
    problem = prefill_arguments.check_prefill(t, *numbers)
    run = prefill_launch.prepare_inputs(problem, PrefillPlan.from_ints(numbers[9] if len(numbers) > 9 else None), t)
    allocators = [allocator(out) for out in new_inputs(t.mixed_qkvz, problem)]
    return allocators, run, prefill_launch.in_order, problem.initial


def _kernel_inputs(*given: Any) -> tuple[Tensor, ...]:
    t = Prefill(*given[:10])
    allocators, run, in_order, initial = launches.find(_prepare_inputs, t, given[10:])
    if values_are_checked(t.mixed_qkvz.device):
        prefill_arguments.check_values(t)
    outs = tuple([allocate() for allocate in allocators])
    run(*in_order(t, outs, initial))
    return outs


def _prepare_kept(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch_module("gdn_split")
    from gdn_split import prefill_launch

    t = Prefill(*tensors)
    problem = prefill_arguments.check_prefill(t, *numbers)
    return prefill_launch.prepare_kept(problem, t), prefill_arguments.overlap(t)


def _kernel_kept(*given: Any) -> None:
    t = Prefill(*given[:10])
    run, check_overlap = launches.find(_prepare_kept, t, given[10:])
    check_overlap(*t)
    run(t.mixed_qkvz, t.cu_seqlens, t.conv_state, t.slots, t.has_initial_state)


def _fake_inputs(*given: Any) -> tuple[Tensor, ...]:
    t = Prefill(*given[:10])
    return new_inputs(t.mixed_qkvz, prefill_arguments.check_prefill(t, *given[10:]))


def _fake_kept(*given: Any) -> object:
    return prefill_arguments.check_prefill(Prefill(*given[:10]), *given[10:])


implement(
    _library, "prefill_inputs", reference=prefill_reference.prefill_inputs, kernel=_kernel_inputs, fake=_fake_inputs
)  # fmt: skip
implement(_library, "keep_inputs", reference=prefill_reference.keep_inputs, kernel=_kernel_kept, fake=_fake_kept)
