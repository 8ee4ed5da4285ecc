"""The torch ops: schemas, fake implementations, the CPU implementation, autograd.

=========================  ==============================================================================
split, merge               functional, with derivatives of both modes
split_inference,           the same without derivatives, which cost an op 5 us an eager call even when unused; it is
merge_inference            these that the other two call
split_into, merge_into     write tensors they are given, for ``out=``
split_conv1d_update        writes the convolution's state and four tensors it is given
=========================  ==============================================================================

Every implementation, the fake ones included, checks its arguments. On a GPU checks, plan and launch are made once for
each set of shapes, strides, dtypes and sizes, and found again by it; whether tensors to be written share memory with
others is asked in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from gdn_split import arguments, derivatives
from gdn_split.plan import ConvPlan, GroupShape, SplitPlan
from kernel_reference import projection
from kernel_reference.checks import MemoryOverlap, check_no_overlap, fail, values_are_checked

Tensor = torch.Tensor
Parts = tuple[Tensor, Tensor, Tensor, Tensor]

_SIZES = "int num_heads_qk, int num_heads_v, int head_qk, int head_v, str layout, int[]? plan=None"
_PARTS = "Tensor(a!) mixed_qkv, Tensor(b!) z, Tensor(c!) b, Tensor(d!) a"

_library = torch.library.Library("gdn_split", "DEF")
for _name, _arguments, _results in (
    ("split", f"Tensor mixed_qkvz, Tensor mixed_ba, {_SIZES}", "(Tensor, Tensor, Tensor, Tensor)"),
    ("split_inference", f"Tensor mixed_qkvz, Tensor mixed_ba, {_SIZES}", "(Tensor, Tensor, Tensor, Tensor)"),
    ("merge", f"Tensor mixed_qkv, Tensor z, Tensor b, Tensor a, {_SIZES}", "(Tensor, Tensor)"),
    ("merge_inference", f"Tensor mixed_qkv, Tensor z, Tensor b, Tensor a, {_SIZES}", "(Tensor, Tensor)"),
    ("split_into", f"Tensor mixed_qkvz, Tensor mixed_ba, {_PARTS}, {_SIZES}", "()"),
    (
        "merge_into",
        f"Tensor mixed_qkv, Tensor z, Tensor b, Tensor a, Tensor(a!) mixed_qkvz, Tensor(b!) mixed_ba, {_SIZES}",
        "()",
    ),
    (
        "split_conv1d_update",
        "Tensor mixed_qkvz, Tensor mixed_ba, Tensor(e!) conv_state, Tensor conv_weight, Tensor? conv_bias,"
        f" Tensor slots, {_PARTS}, int tokens_per_sequence, bool silu, {_SIZES}",
        "()",
    ),
):
    _library.define(f"{_name}({_arguments}) -> {_results}", tags=(torch.Tag.pt2_compliant_tag,))

# The tensors of the ops that write what they are given, and which they write, as errors name them.
_OUT_PARTS = tuple(f"out.{name}" for name in arguments.PART_NAMES)
_OUT_PROJECTIONS = ("out.mixed_qkvz", "out.mixed_ba")
_SPLIT_INTO = ("mixed_qkvz", "mixed_ba", *_OUT_PARTS)
_MERGE_INTO = (*arguments.PART_NAMES, *_OUT_PROJECTIONS)
_CONVOLVE = ("mixed_qkvz", "mixed_ba", "conv_state", "conv_weight", "conv_bias", "slots", *_OUT_PARTS)
_OUT_CONVOLVE = ("conv_state", *_OUT_PARTS)

# Below, `sizes` are an op's last arguments: num_heads_qk, num_heads_v, head_qk, head_v, layout, and the plan as ints,
# which torch leaves out when it is None.


def allocate_parts(mixed_qkvz: Tensor, mixed_ba: Tensor, shape: GroupShape) -> Parts:
    """Packed, uninitialised mixed_qkv, z, b, a for these projections."""
    rows, heads = mixed_qkvz.shape[0], shape.num_heads_v
    return (
        mixed_qkvz.new_empty((rows, shape.qkv_width)),
        mixed_qkvz.new_empty((rows, heads, shape.head_v)),
        mixed_ba.new_empty((rows, heads)),
        mixed_ba.new_empty((rows, heads)),
    )


def allocate_projections(mixed_qkv: Tensor, b: Tensor, shape: GroupShape) -> tuple[Tensor, Tensor]:
    """Packed, uninitialised mixed_qkvz and mixed_ba for these parts."""
    rows = mixed_qkv.shape[0]
    return mixed_qkv.new_empty((rows, shape.qkvz_width)), b.new_empty((rows, shape.ba_width))


def _checked_split(mixed_qkvz: Tensor, mixed_ba: Tensor, *sizes: Any) -> GroupShape:
    shape = arguments.check_sizes(*sizes[:5])
    arguments.check_projections(mixed_qkvz, mixed_ba, shape)
    _check_plan(mixed_qkvz.shape[0], shape, sizes)
    return shape


def _checked_merge(mixed_qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, *sizes: Any) -> GroupShape:
    shape = arguments.check_sizes(*sizes[:5])
    arguments.check_parts((mixed_qkv, z, b, a), shape)
    arguments.check_dtypes(mixed_qkv.dtype, "mixed_qkv", z=z)
    arguments.check_dtypes(b.dtype, "b", a=a)
    _check_plan(mixed_qkv.shape[0], shape, sizes)
    return shape


def _check_plan(rows: int, shape: GroupShape, sizes: tuple[Any, ...]) -> None:
    plan = _plan(SplitPlan, sizes)
    if plan is None:
        return
    if plan.rows_per_program and plan.dependent_launch:
        fail("plan", "without dependent_launch if it has rows_per_program: that kernel waits for none", plan)
    if not plan.covers(rows, shape):
        fail("plan", f"one made for {rows} rows of {shape}", plan)


def _checked_split_into(
    mixed_qkvz: Tensor, mixed_ba: Tensor, mixed_qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, *sizes: Any
) -> GroupShape:
    shape = _checked_split(mixed_qkvz, mixed_ba, *sizes)
    arguments.check_parts((mixed_qkv, z, b, a), shape, ("mixed_qkvz", mixed_qkvz), "out.")
    arguments.check_dtypes(mixed_qkvz.dtype, "mixed_qkvz", **{"out.mixed_qkv": mixed_qkv, "out.z": z})
    arguments.check_dtypes(mixed_ba.dtype, "mixed_ba", **{"out.b": b, "out.a": a})
    arguments.check_written(**{"out.mixed_qkv": mixed_qkv, "out.z": z, "out.b": b, "out.a": a})
    return shape


def _checked_merge_into(
    mixed_qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, mixed_qkvz: Tensor, mixed_ba: Tensor, *sizes: Any
) -> GroupShape:
    shape = _checked_merge(mixed_qkv, z, b, a, *sizes)
    arguments.check_projections(mixed_qkvz, mixed_ba, shape, ("mixed_qkv", mixed_qkv), "out.")
    arguments.check_dtypes(mixed_qkv.dtype, "mixed_qkv", **{"out.mixed_qkvz": mixed_qkvz})
    arguments.check_dtypes(b.dtype, "b", **{"out.mixed_ba": mixed_ba})
    arguments.check_written(**{"out.mixed_qkvz": mixed_qkvz, "out.mixed_ba": mixed_ba})
    return shape


def _checked_conv(
    mixed_qkvz: Tensor, mixed_ba: Tensor, conv_state: Tensor, conv_weight: Tensor, conv_bias: Tensor | None,
    slots: Tensor, mixed_qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, tokens_per_sequence: int, silu: bool,
    *sizes: Any,
) -> GroupShape:  # fmt: skip
    shape = _checked_split_into(mixed_qkvz, mixed_ba, mixed_qkv, z, b, a, *sizes[:5])
    arguments.check_convolution(mixed_qkvz, conv_state, conv_weight, conv_bias, slots, tokens_per_sequence, shape)
    plan, sequences = _plan(ConvPlan, sizes), slots.shape[0]
    if plan is not None and not plan.covers(sequences, tokens_per_sequence, shape):
        fail("plan", f"one made for {sequences} sequences of {tokens_per_sequence} tokens of {shape}", plan)
    return shape


_launches: dict[tuple[object, ...], Any] = {}
# Room for the sizes of a server's life; past it all are made anew, which costs one slow call each.
_MOST_LAUNCHES = 8192


def _ready(prepare: Callable[..., Any], tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]) -> Any:
    """What ``prepare(tensors, numbers)`` made the last time that tensors and numbers looked like this."""
    if type(numbers[-1]) is list:
        # A plan, as torch passes it: a key wants it hashable.
        numbers = (*numbers[:-1], tuple(numbers[-1]))
    key = (prepare, numbers, *[t if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors])
    found = _launches.get(key)
    if found is None:
        found = prepare(tensors, numbers)
        if len(_launches) >= _MOST_LAUNCHES:
            _launches.clear()
        _launches[key] = found
    return found


def _plan(kind: type[SplitPlan] | type[ConvPlan], sizes: Sequence[Any]) -> Any:
    return kind(*sizes[5]) if len(sizes) > 5 and sizes[5] is not None else None


def _launches_of_gpu() -> Any:
    """The launches, imported when a tensor on a GPU first asks for them: all else works without Triton."""
    try:
        from gdn_split import launch
    except ImportError as error:
        raise RuntimeError(
            "tensors on a GPU need Triton, which torch's GPU builds bring; here it is missing"
        ) from error
    return launch


def _prepare_split(tensors: tuple[Tensor, ...], sizes: tuple[Any, ...]) -> Any:
    launch = _launches_of_gpu()
    qkvz, ba = tensors
    shape = _checked_split(qkvz, ba, *sizes)
    parts = allocate_parts(qkvz, ba, shape)
    run = launch.prepare_move(qkvz, ba, parts, shape, sizes[4], merge=False, plan=_plan(SplitPlan, sizes))
    return [_allocator(part) for part in parts], run


def _prepare_split_into(tensors: tuple[Tensor, ...], sizes: tuple[Any, ...]) -> Any:
    launch = _launches_of_gpu()
    shape = _checked_split_into(*tensors, *sizes)
    qkvz, ba, *parts = tensors
    run = launch.prepare_move(qkvz, ba, parts, shape, sizes[4], merge=False, plan=_plan(SplitPlan, sizes))
    return run, MemoryOverlap(dict(zip(_SPLIT_INTO, tensors, strict=True)), _OUT_PARTS)


def _prepare_merge_into(tensors: tuple[Tensor, ...], sizes: tuple[Any, ...]) -> Any:
    launch = _launches_of_gpu()
    shape = _checked_merge_into(*tensors, *sizes)
    *parts, qkvz, ba = tensors
    run = launch.prepare_move(qkvz, ba, parts, shape, sizes[4], merge=True, plan=_plan(SplitPlan, sizes))
    return run, MemoryOverlap(dict(zip(_MERGE_INTO, tensors, strict=True)), _OUT_PROJECTIONS)


def _prepare_conv(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = _launches_of_gpu()
    tokens, silu, *sizes = numbers
    shape = _checked_conv(*tensors, *numbers)
    qkvz, ba, state, weight, bias, slots, *parts = tensors
    run = launch.prepare_split_conv1d_update(
        qkvz, ba, state, weight, bias is not None, slots, parts, shape, tokens, silu, sizes[4], _plan(ConvPlan, sizes)
    )
    return run, MemoryOverlap(dict(zip(_CONVOLVE, tensors, strict=True)), _OUT_CONVOLVE)


def _kernel_split(mixed_qkvz: Tensor, mixed_ba: Tensor, *sizes: Any) -> Parts:
    allocators, run = _ready(_prepare_split, (mixed_qkvz, mixed_ba), sizes)
    parts: Parts = tuple([allocate() for allocate in allocators])
    run(mixed_qkvz, mixed_ba, *parts)
    return parts


def _kernel_split_into(mixed_qkvz: Tensor, mixed_ba: Tensor, *parts_and_sizes: Any) -> None:
    tensors = (mixed_qkvz, mixed_ba, *parts_and_sizes[:4])
    derivatives.refuse_tangents(_SPLIT_INTO, tensors)
    run, check_overlap = _ready(_prepare_split_into, tensors, parts_and_sizes[4:])
    check_overlap(*tensors)
    run(*tensors)


def _kernel_merge_into(
    mixed_qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, mixed_qkvz: Tensor, mixed_ba: Tensor, *sizes: Any
) -> None:
    tensors = (mixed_qkv, z, b, a, mixed_qkvz, mixed_ba)
    derivatives.refuse_tangents(_MERGE_INTO, tensors)
    run, check_overlap = _ready(_prepare_merge_into, tensors, sizes)
    check_overlap(*tensors)
    run(mixed_qkvz, mixed_ba, mixed_qkv, z, b, a)


def _kernel_merge(mixed_qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, *sizes: Any) -> tuple[Tensor, Tensor]:
    fused = allocate_projections(mixed_qkv, b, _checked_merge(mixed_qkv, z, b, a, *sizes))
    run, _ = _ready(_prepare_merge_into, (mixed_qkv, z, b, a, *fused), sizes)
    run(*fused, mixed_qkv, z, b, a)
    return fused


def _kernel_split_conv1d_update(*arguments_of_op: Any) -> None:
    tensors, numbers = arguments_of_op[:10], arguments_of_op[10:]
    derivatives.refuse_tangents(_CONVOLVE, tensors)
    run, check_overlap = _ready(_prepare_conv, tensors, numbers)
    check_overlap(*tensors)
    qkvz, ba, state, weight, bias, slots, *parts = tensors
    if values_are_checked(qkvz.device):
        arguments.check_slot_values(slots, state.shape[0])
    run(qkvz, ba, state, weight, weight if bias is None else bias, slots, *parts)


# The allocator of torch.compile's generated code: half of torch.empty's host time, of which a split pays four. It is a
# private name, so that where it is missing the public one serves; and it knows only the current device.
_empty_strided_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def _allocator(like: Tensor) -> Callable[[], Tensor]:
    """What makes an uninitialised tensor like this one."""
    size, stride, dtype, device = tuple(like.shape), like.stride(), like.dtype, like.device
    if _empty_strided_cuda is not None and device.type == "cuda" and torch.cuda.device_count() == 1:
        return partial(_empty_strided_cuda, size, stride, dtype)
    return partial(torch.empty_strided, size, stride, dtype=dtype, device=device)


def _reference_split(mixed_qkvz: Tensor, mixed_ba: Tensor, *sizes: Any) -> Parts:
    _checked_split(mixed_qkvz, mixed_ba, *sizes)
    mixed_qkv, z, b, a = projection.split(mixed_qkvz, mixed_ba, *sizes[:5])
    return mixed_qkv, z, b, a


def _reference_merge(mixed_qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, *sizes: Any) -> tuple[Tensor, Tensor]:
    _checked_merge(mixed_qkv, z, b, a, *sizes)
    mixed_qkvz, mixed_ba = projection.merge(mixed_qkv, z, b, a, *sizes[:5])
    return mixed_qkvz, mixed_ba


def _reference_split_into(mixed_qkvz: Tensor, mixed_ba: Tensor, *parts_and_sizes: Any) -> None:
    _checked_split_into(mixed_qkvz, mixed_ba, *parts_and_sizes)
    tensors = (mixed_qkvz, mixed_ba, *parts_and_sizes[:4])
    derivatives.refuse_tangents(_SPLIT_INTO, tensors)
    check_no_overlap(dict(zip(_SPLIT_INTO, tensors, strict=True)), _OUT_PARTS)
    _copy_into(parts_and_sizes[:4], projection.split(mixed_qkvz, mixed_ba, *parts_and_sizes[4:9]))


def _reference_merge_into(
    mixed_qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, mixed_qkvz: Tensor, mixed_ba: Tensor, *sizes: Any
) -> None:
    _checked_merge_into(mixed_qkv, z, b, a, mixed_qkvz, mixed_ba, *sizes)
    tensors = (mixed_qkv, z, b, a, mixed_qkvz, mixed_ba)
    derivatives.refuse_tangents(_MERGE_INTO, tensors)
    check_no_overlap(dict(zip(_MERGE_INTO, tensors, strict=True)), _OUT_PROJECTIONS)
    _copy_into((mixed_qkvz, mixed_ba), projection.merge(mixed_qkv, z, b, a, *sizes[:5]))


def _reference_split_conv1d_update(*arguments_of_op: Any) -> None:
    _checked_conv(*arguments_of_op)
    derivatives.refuse_tangents(_CONVOLVE, arguments_of_op[:10])
    check_no_overlap(dict(zip(_CONVOLVE, arguments_of_op[:10], strict=True)), _OUT_CONVOLVE)
    qkvz, ba, state, weight, bias, slots, *parts, tokens, silu = arguments_of_op[:12]
    sizes = arguments_of_op[12:]
    if values_are_checked(qkvz.device):
        arguments.check_slot_values(slots, state.shape[0])
    results = projection.split_conv1d_update(
        qkvz, ba, state, weight, bias, slots, *sizes[:4], layout=sizes[4], tokens_per_sequence=tokens,
        activation="silu" if silu else None, compute_dtype=torch.float32,
    )  # fmt: skip
    _copy_into(parts, results)


def _copy_into(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for destination, source in zip(destinations, sources, strict=True):
        destination.copy_(source)


def _fake_split(mixed_qkvz: Tensor, mixed_ba: Tensor, *sizes: Any) -> Parts:
    return allocate_parts(mixed_qkvz, mixed_ba, _checked_split(mixed_qkvz, mixed_ba, *sizes))


def _fake_merge(mixed_qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, *sizes: Any) -> tuple[Tensor, Tensor]:
    return allocate_projections(mixed_qkv, b, _checked_merge(mixed_qkv, z, b, a, *sizes))


def _only_checking(check: Callable[..., object]) -> Callable[..., None]:
    def fake(*arguments_of_op: Any) -> None:
        check(*arguments_of_op)

    return fake


for _name, _kernel, _reference, _fake in (
    ("split", _kernel_split, _reference_split, _fake_split),
    ("split_inference", _kernel_split, _reference_split, _fake_split),
    ("merge", _kernel_merge, _reference_merge, _fake_merge),
    ("merge_inference", _kernel_merge, _reference_merge, _fake_merge),
    ("split_into", _kernel_split_into, _reference_split_into, _only_checking(_checked_split_into)),
    ("merge_into", _kernel_merge_into, _reference_merge_into, _only_checking(_checked_merge_into)),
    ("split_conv1d_update", _kernel_split_conv1d_update, _reference_split_conv1d_update, _only_checking(_checked_conv)),
):
    _library.impl(_name, _reference, "CPU")
    # CUDA is also ROCm's key; PrivateUse1 that of out-of-tree devices such as Ascend's NPUs.
    for _key in ("CUDA", "PrivateUse1"):
        _library.impl(_name, _kernel, _key)
    torch.library.register_fake(f"gdn_split::{_name}", _fake, lib=_library)


_library.impl("split", derivatives.split, "Autograd")
_library.impl("merge", derivatives.merge, "Autograd")
