"""The torch ops: schemas, fake implementations, dispatch, autograd.

=========================  ==============================================================================
split, merge               functional, with derivatives of both modes
split_inference,           the same without derivatives, which cost an op 5 us an eager call even when unused; the
merge_inference            other two call these
split_into, merge_into     write given tensors, for ``out=``
split_conv1d_update        writes the convolution's state and four tensors it is given
decode_step                writes both states and one tensor it is given
verify, commit             of drafts: the former writes the tensor, the latter the states
=========================  ==============================================================================

Every implementation, the fake ones included, checks its arguments. On a GPU checks, plan and launch are made once for
each combination of shapes, strides, dtypes and sizes, and found again in a table; whether tensors to be written overlap
others is checked in each call.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gdn_split import arguments, derivatives, reference
from gdn_split.arguments import plan_of
from gdn_split.plan import ConvPlan, SplitPlan, StepPlan
from gdn_split.reference import Parts, new_parts, new_projections
from gdn_split.step import arguments as step_arguments
from gdn_split.step import reference as step_reference
from gdn_split.tensors import Commit, Convolve, Merge, Split, Step
from kernel_reference.checks import values_are_checked
from kernel_reference.dispatch import PreparedLaunches, allocator, implement, launch_module

Tensor = torch.Tensor

SIZES = "int num_heads_qk, int num_heads_v, int head_qk, int head_v, str layout, int[]? plan=None"
_PARTS = "Tensor(a!) mixed_qkv, Tensor(b!) z, Tensor(c!) b, Tensor(d!) a"

_STEP = "Tensor conv_weight, Tensor? conv_bias, Tensor{} state_pool, Tensor slots, Tensor A_log, Tensor dt_bias"
_STEP_NUMBERS = (
    f"int tokens_per_sequence, bool silu, bool qk_norm, str state_layout, float scale, float norm_eps, {SIZES}"
)

library = torch.library.Library("gdn_split", "DEF")
for _name, _arguments, _results in (
    ("split", f"Tensor mixed_qkvz, Tensor mixed_ba, {SIZES}", "(Tensor, Tensor, Tensor, Tensor)"),
    ("split_inference", f"Tensor mixed_qkvz, Tensor mixed_ba, {SIZES}", "(Tensor, Tensor, Tensor, Tensor)"),
    ("merge", f"Tensor mixed_qkv, Tensor z, Tensor b, Tensor a, {SIZES}", "(Tensor, Tensor)"),
    ("merge_inference", f"Tensor mixed_qkv, Tensor z, Tensor b, Tensor a, {SIZES}", "(Tensor, Tensor)"),
    ("split_into", f"Tensor mixed_qkvz, Tensor mixed_ba, {_PARTS}, {SIZES}", "()"),
    (
        "merge_into",
        f"Tensor mixed_qkv, Tensor z, Tensor b, Tensor a, Tensor(a!) mixed_qkvz, Tensor(b!) mixed_ba, {SIZES}",
        "()",
    ),
    (
        "split_conv1d_update",
        "Tensor mixed_qkvz, Tensor mixed_ba, Tensor(e!) conv_state, Tensor conv_weight, Tensor? conv_bias,"
        f" Tensor slots, {_PARTS}, int tokens_per_sequence, bool silu, {SIZES}",
        "()",
    ),
    (
        "decode_step",
        f"Tensor mixed_qkvz, Tensor mixed_ba, Tensor(a!) conv_state, {_STEP.format('(b!)')}, Tensor? norm_weight,"
        f" Tensor(c!) out, {_STEP_NUMBERS}",
        "()",
    ),
    (
        "verify",
        f"Tensor mixed_qkvz, Tensor mixed_ba, Tensor conv_state, {_STEP.format('')}, Tensor? norm_weight,"
        f" Tensor(a!) out, Tensor? parents, {_STEP_NUMBERS}",
        "()",
    ),
    (
        "commit",
        f"Tensor mixed_qkvz, Tensor mixed_ba, Tensor(a!) conv_state, {_STEP.format('(b!)')}, Tensor accepted,"
        f" Tensor? path, {_STEP_NUMBERS}",
        "()",
    ),
):
    library.define(f"{_name}({_arguments}) -> {_results}", tags=(torch.Tag.pt2_compliant_tag,))

launches = PreparedLaunches()

# Below, what an op is given is its tensors, then its numbers, the last of which are `sizes`: num_heads_qk, num_heads_v,
# head_qk, head_v, layout, and the plan as ints, which torch leaves out when it is None.


def _prepare_split(tensors: tuple[Any, ...], sizes: tuple[Any, ...]) -> Any:
    launch = launch_module("gdn_split")
    t = Split(*tensors)
    problem = arguments.check_split(t, *sizes)
    run = launch.prepare_move(problem, SplitPlan.from_ints(plan_of(sizes)), t)
    return [allocator(part) for part in new_parts(t.mixed_qkvz, t.mixed_ba, problem.shape)], run


def _prepare_merge(tensors: tuple[Any, ...], sizes: tuple[Any, ...]) -> Any:
    launch = launch_module("gdn_split")
    t = Merge(*tensors)
    problem = arguments.check_merge(t, *sizes)
    run = launch.prepare_move(problem, SplitPlan.from_ints(plan_of(sizes)), t)
    return [allocator(part) for part in new_projections(t.mixed_qkv, t.b, problem.shape)], run


def _prepare_split_into(tensors: tuple[Any, ...], sizes: tuple[Any, ...]) -> Any:
    launch = launch_module("gdn_split")
    t = Split(*tensors)
    problem = arguments.check_split(t, *sizes)
    return launch.prepare_move(problem, SplitPlan.from_ints(plan_of(sizes)), t), arguments.overlap("split_into", t)


def _prepare_merge_into(tensors: tuple[Any, ...], sizes: tuple[Any, ...]) -> Any:
    launch = launch_module("gdn_split")
    t = Merge(*tensors)
    problem = arguments.check_merge(t, *sizes)
    return launch.prepare_move(problem, SplitPlan.from_ints(plan_of(sizes)), t), arguments.overlap("merge_into", t)


def _prepare_convolve(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = launch_module("gdn_split")
    t = Convolve(*tensors)
    problem = arguments.check_convolve(t, *numbers)
    run = launch.prepare_split_conv1d_update(problem, ConvPlan.from_ints(plan_of(numbers[2:])), t)
    return run, arguments.overlap("split_conv1d_update", t)


def _prepare_step(op: str, kind: Any, tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch_module("gdn_split")
    from gdn_split.step import launch as step_launch

    t = kind(*tensors)
    problem = step_arguments.check_step(op, t, *numbers)
    run = step_launch.prepare_step(problem, StepPlan.from_ints(plan_of(numbers[6:])), t)
    return run, step_arguments.overlap(op, t), problem.path_length


_STEPS: dict[str, tuple[Any, int, Any]] = {
    "decode_step": (partial(_prepare_step, "decode_step", Step), 11, Step),
    "verify": (partial(_prepare_step, "verify", Step), 12, Step),
    "commit": (partial(_prepare_step, "commit", Commit), 11, Commit),
}


def _kernel_step(op: str, *given: Any) -> None:
    prepare, count, kind = _STEPS[op]
    tensors, numbers = given[:count], given[count:]
    # A step has no path: the last field.
    derivatives.refuse_tangents(kind._fields[:count], tensors)
    run, check_overlap, path_length = launches.find(prepare, tensors, numbers)
    check_overlap(*tensors)
    if values_are_checked(tensors[0].device):
        step_arguments.check_values(kind(*tensors), path_length)
    run(*tensors)


def _kernel_split(mixed_qkvz: Tensor, mixed_ba: Tensor, *sizes: Any) -> Parts:
    allocators, run = launches.find(_prepare_split, (mixed_qkvz, mixed_ba), sizes)
    parts: Parts = tuple([allocate() for allocate in allocators])
    run(mixed_qkvz, mixed_ba, *parts)
    return parts


def _kernel_merge(mixed_qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, *sizes: Any) -> tuple[Tensor, Tensor]:
    (new_qkvz, new_ba), run = launches.find(_prepare_merge, (mixed_qkv, z, b, a), sizes)
    mixed_qkvz, mixed_ba = new_qkvz(), new_ba()
    run(mixed_qkvz, mixed_ba, mixed_qkv, z, b, a)
    return mixed_qkvz, mixed_ba


def _kernel_split_into(*given: Any) -> None:
    tensors, sizes = given[:6], given[6:]
    derivatives.refuse_tangents(arguments.names_of("split_into"), tensors)
    run, check_overlap = launches.find(_prepare_split_into, tensors, sizes)
    check_overlap(*tensors)
    run(*tensors)


def _kernel_merge_into(*given: Any) -> None:
    tensors, sizes = given[:6], given[6:]
    derivatives.refuse_tangents(arguments.names_of("merge_into"), tensors)
    run, check_overlap = launches.find(_prepare_merge_into, tensors, sizes)
    check_overlap(*tensors)
    run(*tensors[4:], *tensors[:4])


def _kernel_split_conv1d_update(*given: Any) -> None:
    tensors, numbers = given[:10], given[10:]
    derivatives.refuse_tangents(arguments.names_of("split_conv1d_update"), tensors)
    run, check_overlap = launches.find(_prepare_convolve, tensors, numbers)
    check_overlap(*tensors)
    qkvz, ba, state, weight, bias, slots, *parts = tensors
    if values_are_checked(qkvz.device):
        arguments.check_slot_values(slots, state.shape[0])
    run(qkvz, ba, state, weight, weight if bias is None else bias, slots, *parts)


def _fake_split(mixed_qkvz: Tensor, mixed_ba: Tensor, *sizes: Any) -> Parts:
    problem = arguments.check_split(Split(mixed_qkvz, mixed_ba), *sizes)
    return new_parts(mixed_qkvz, mixed_ba, problem.shape)


def _fake_merge(mixed_qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, *sizes: Any) -> tuple[Tensor, Tensor]:
    problem = arguments.check_merge(Merge(mixed_qkv, z, b, a), *sizes)
    return new_projections(mixed_qkv, b, problem.shape)


def _fake_split_into(*given: Any) -> object:
    return arguments.check_split(Split(*given[:6]), *given[6:])


def _fake_merge_into(*given: Any) -> object:
    return arguments.check_merge(Merge(*given[:6]), *given[6:])


def _fake_split_conv1d_update(*given: Any) -> object:
    return arguments.check_convolve(Convolve(*given[:10]), *given[10:])


def _fake_step(op: str, *given: Any) -> object:
    _, count, kind = _STEPS[op]
    return step_arguments.check_step(op, kind(*given[:count]), *given[count:])


for _name, _reference, _kernel, _fake in (
    ("split", reference.split, _kernel_split, _fake_split),
    ("split_inference", reference.split, _kernel_split, _fake_split),
    ("merge", reference.merge, _kernel_merge, _fake_merge),
    ("merge_inference", reference.merge, _kernel_merge, _fake_merge),
    ("split_into", reference.split_into, _kernel_split_into, _fake_split_into),
    ("merge_into", reference.merge_into, _kernel_merge_into, _fake_merge_into),
    (
        "split_conv1d_update",
        reference.split_conv1d_update,
        _kernel_split_conv1d_update,
        _fake_split_conv1d_update,
    ),
):
    implement(library, _name, reference=_reference, kernel=_kernel, fake=_fake)

for _name in _STEPS:
    implement(
        library, _name, reference=getattr(step_reference, _name), kernel=partial(_kernel_step, _name),
        fake=partial(_fake_step, _name),
    )  # fmt: skip


library.impl("split", derivatives.split, "Autograd")
library.impl("merge", derivatives.merge, "Autograd")
