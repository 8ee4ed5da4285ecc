"""What arguments must be, and the problem that they make: the ops ask once, so that no call goes unchecked.

``check_split``, ``check_merge`` and ``check_convolve`` take an op's tensors as a NamedTuple, its numbers behind them,
and return the one description of the problem that plan and launch work from. Every function raises ValueError or
TypeError naming the argument, what it must be and what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gdn_split.plan import ConvPlan, ConvProblem, GroupShape, MoveProblem, SplitPlan
from gdn_split.tensors import Convolve, Merge, Split
from kernel_reference.checks import (
    MemoryOverlap,
    check_dtype,
    check_elements_apart,
    check_same_device,
    describe,
    fail,
    known,
)
from kernel_reference.projection import LAYOUTS

Tensor = torch.Tensor

# Copies move bits, so that any dtype of these sizes will do.
_ITEM_SIZES = (1, 2, 4, 8)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Those that a kernel copies as they are. Others Triton cannot name, or would change (a bool is normalised to 0 and 1).
_COPIED_AS_THEY_ARE = frozenset(
    [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64]
)
PART_NAMES = ("mixed_qkv", "z", "b", "a")
# The tensors of the ops that write what they are given, and which of them are written, as errors name them.
_OUT_PARTS = tuple(f"out.{name}" for name in PART_NAMES)
_NAMES_OF = {
    "split_into": ("mixed_qkvz", "mixed_ba", *_OUT_PARTS),
    "merge_into": (*PART_NAMES, "out.mixed_qkvz", "out.mixed_ba"),
    "split_conv1d_update": (*Convolve._fields[:6], *_OUT_PARTS),
}
_WRITTEN_OF = {
    "split_into": _OUT_PARTS,
    "merge_into": ("out.mixed_qkvz", "out.mixed_ba"),
    "split_conv1d_update": ("conv_state", *_OUT_PARTS),
}


# One check and one problem an op. ``sizes`` are num_heads_qk, num_heads_v, head_qk, head_v, layout, and the plan as
# ints, which torch leaves out when it is None.


def check_split(t: Split, *sizes: Any) -> MoveProblem:
    """The fused projections and, where they are given, parts to write."""
    shape = check_sizes(*sizes[:5])
    check_projections(t.mixed_qkvz, t.mixed_ba, shape)
    _check_split_plan(t.mixed_qkvz.shape[0], shape, sizes)
    parts = None
    if t.mixed_qkv is not None and t.z is not None and t.b is not None and t.a is not None:
        parts = (t.mixed_qkv, t.z, t.b, t.a)
        check_parts(parts, shape, ("mixed_qkvz", t.mixed_qkvz), "out.")
        check_dtypes(t.mixed_qkvz.dtype, "mixed_qkvz", **{"out.mixed_qkv": t.mixed_qkv, "out.z": t.z})
        check_dtypes(t.mixed_ba.dtype, "mixed_ba", **{"out.b": t.b, "out.a": t.a})
        check_written(**dict(zip(_OUT_PARTS, parts, strict=True)))
    return _move_problem(shape, (t.mixed_qkvz, t.mixed_ba), parts, sizes, merge=False)


def check_merge(t: Merge, *sizes: Any) -> MoveProblem:
    """The parts and, where they are given, fused projections to write."""
    shape = check_sizes(*sizes[:5])
    parts = (t.mixed_qkv, t.z, t.b, t.a)
    check_parts(parts, shape)
    check_dtypes(t.mixed_qkv.dtype, "mixed_qkv", z=t.z)
    check_dtypes(t.b.dtype, "b", a=t.a)
    _check_split_plan(t.mixed_qkv.shape[0], shape, sizes)
    fused = None
    if t.mixed_qkvz is not None and t.mixed_ba is not None:
        fused = (t.mixed_qkvz, t.mixed_ba)
        check_projections(*fused, shape, ("mixed_qkv", t.mixed_qkv), "out.")
        check_dtypes(t.mixed_qkv.dtype, "mixed_qkv", **{"out.mixed_qkvz": t.mixed_qkvz})
        check_dtypes(t.b.dtype, "b", **{"out.mixed_ba": t.mixed_ba})
        check_written(**{"out.mixed_qkvz": t.mixed_qkvz, "out.mixed_ba": t.mixed_ba})
    return _move_problem(shape, fused, parts, sizes, merge=True)


def check_convolve(t: Convolve, tokens_per_sequence: int, silu: bool, *sizes: Any) -> ConvProblem:
    """The fused projections of new tokens, the convolution, its state and slots, and parts to write."""
    move = check_split(Split(t.mixed_qkvz, t.mixed_ba, t.mixed_qkv, t.z, t.b, t.a), *sizes[:5])
    shape = move.shape
    check_convolution(t.mixed_qkvz, t.conv_state, t.conv_weight, t.conv_bias, t.slots, tokens_per_sequence, shape)
    plan, sequences = ConvPlan.from_ints(plan_of(sizes)), t.slots.shape[0]
    problem = ConvProblem(
        shape, sequences, tokens_per_sequence, t.conv_state.shape[0], move.strides, t.conv_state.stride(),
        t.conv_weight.stride(), t.conv_weight.shape[1], move.interleaved, t.conv_bias is not None, silu,
        t.mixed_ba.dtype not in _COPIED_AS_THEY_ARE,
    )  # fmt: skip
    if plan is not None and not plan.covers(sequences, tokens_per_sequence, shape, problem.in_vectors):
        fail("plan", f"one made for {sequences} sequences of {tokens_per_sequence} tokens of {shape}", plan)
    return problem


def plan_of(sizes: Sequence[Any]) -> Any:
    """The plan as ints, or None."""
    return sizes[5] if len(sizes) > 5 else None


def overlap(op: str, tensors: Sequence[Tensor | None]) -> MemoryOverlap:
    """What refuses tensors of an op of which one that it writes shares memory with another."""
    return MemoryOverlap(dict(zip(_NAMES_OF[op], tensors, strict=True)), _WRITTEN_OF[op])


def names_of(op: str) -> tuple[str, ...]:
    """What errors call an op's tensors."""
    return _NAMES_OF[op]


def _check_split_plan(rows: int, shape: GroupShape, sizes: Sequence[Any]) -> None:
    plan = SplitPlan.from_ints(plan_of(sizes))
    if plan is None:
        return
    if plan.rows_per_program and plan.dependent_launch:
        fail("plan", "without dependent_launch if it has rows_per_program: that kernel waits for none", plan)
    if not plan.covers(rows, shape):
        fail("plan", f"one made for {rows} rows of {shape}", plan)


def _move_problem(
    shape: GroupShape, fused: tuple[Tensor, ...] | None, parts: tuple[Tensor, ...] | None, sizes: Sequence[Any],
    merge: bool,
) -> MoveProblem:  # fmt: skip
    """What is not given the op allocates, packed."""
    strides_of_fused = (shape.qkvz_width, shape.ba_width) if fused is None else [x.stride(0) for x in fused]
    widths = (shape.qkv_width, shape.num_heads_v * shape.head_v, shape.num_heads_v, shape.num_heads_v)
    strides_of_parts = widths if parts is None else [x.stride(0) for x in parts]
    qkv, b = (parts[0], parts[2]) if parts is not None else (fused or ())
    row_bytes = shape.qkvz_width * qkv.element_size() + shape.ba_width * b.element_size()
    return MoveProblem(
        shape, qkv.shape[0], row_bytes, (*strides_of_fused, *strides_of_parts), sizes[4] == "interleaved", merge,
        not {qkv.dtype, b.dtype} <= _COPIED_AS_THEY_ARE,
    )  # fmt: skip


# Parts of the checks


def check_positive(**numbers: object) -> None:
    """Each must be an int of at least 1."""
    for name, number in numbers.items():
        if not isinstance(number, (int, torch.SymInt)):
            fail(name, "an int", describe(number), TypeError)
        # torch's dispatcher refuses numbers of more than 64 bits in words of its own.
        if not 1 <= number < 2**31:
            fail(name, "from 1 to 2**31 - 1", number)


def check_sizes(num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int, layout: str) -> GroupShape:
    """The shape that these numbers make."""
    check_positive(num_heads_qk=num_heads_qk, num_heads_v=num_heads_v, head_qk=head_qk, head_v=head_v)
    if num_heads_v % num_heads_qk:
        swapped = "" if num_heads_qk % num_heads_v else " (are the two swapped?)"
        fail("num_heads_v", f"a multiple of num_heads_qk = {num_heads_qk}", f"{num_heads_v}{swapped}")
    if layout not in LAYOUTS:
        fail("layout", " or ".join(f'"{name}"' for name in LAYOUTS), repr(layout))
    shape = GroupShape(num_heads_qk, num_heads_v, head_qk, head_v)
    if shape.qkvz_width >= 2**31:
        fail("2*num_heads_qk*head_qk + 2*num_heads_v*head_v", "less than 2**31 elements", shape.qkvz_width)
    return shape


def check_projections(
    mixed_qkvz: Tensor, mixed_ba: Tensor, shape: GroupShape, like: tuple[str, Tensor] | None = None, prefix: str = ""
) -> None:
    """The fused projections: as wide as the shape says, rows packed, as many as in ``like`` (a name, a tensor)."""
    like = like or ("mixed_qkvz", mixed_qkvz)
    widths = (shape.qkvz_width, shape.ba_width)
    if mixed_qkvz.ndim == mixed_ba.ndim == 2 and widths == (mixed_ba.shape[1], mixed_qkvz.shape[1]) != widths[::-1]:
        names = f"{prefix}mixed_qkvz and {prefix}mixed_ba"
        fail(names, f"[N, {widths[0]}] and [N, {widths[1]}]", f"them swapped: {describe(mixed_qkvz)} first")
    for name, tensor, width in (("mixed_qkvz", mixed_qkvz, shape.qkvz_width), ("mixed_ba", mixed_ba, shape.ba_width)):
        _check_rows(prefix + name, tensor, (width,))
        _check_companion(prefix + name, tensor, *like)


def check_parts(
    parts: Sequence[Tensor], shape: GroupShape, like: tuple[str, Tensor] | None = None, prefix: str = ""
) -> None:
    """The parts mixed_qkv, z, b and a: likewise."""
    like = like or ("mixed_qkv", parts[0])
    heads = shape.num_heads_v
    tails = ((shape.qkv_width,), (heads, shape.head_v), (heads,), (heads,))
    for name, part, tail in zip(PART_NAMES, parts, tails, strict=True):
        _check_rows(prefix + name, part, tail)
        _check_companion(prefix + name, part, *like)


def check_dtypes(wanted: torch.dtype, as_in: str, **tensors: Tensor) -> None:
    """Each must have the dtype ``wanted``, that of the argument ``as_in``."""
    for name, tensor in tensors.items():
        if tensor.dtype != wanted:
            fail(f"{name}.dtype", f"{wanted} as that of {as_in} is", tensor.dtype, TypeError)


def check_written(**tensors: Tensor) -> None:
    """Tensors to be written: no two elements share memory."""
    for name, tensor in tensors.items():
        width = tensor.shape[1:].numel()
        if known(tensor.shape[0] > 1) and known(tensor.stride(0) < width):
            fail(name, f"a tensor whose rows do not overlap (row stride >= {width})", describe(tensor))


def check_convolution(
    mixed_qkvz: Tensor, conv_state: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, slots: Tensor,
    tokens_per_sequence: int, shape: GroupShape,
) -> None:  # fmt: skip
    """The state, weight, bias and slots of a convolution over the channels of mixed_qkv."""
    check_positive(tokens_per_sequence=tokens_per_sequence)
    floats = {"mixed_qkvz": mixed_qkvz, "conv_state": conv_state, "conv_weight": conv_weight}
    if conv_bias is not None:
        floats["conv_bias"] = conv_bias
    for name, tensor in floats.items():
        check_dtype(name, tensor, *FLOATS)
    for name, tensor in (*floats.items(), ("slots", slots)):
        check_same_device(name, tensor, "mixed_qkvz", mixed_qkvz)
    channels = shape.qkv_width
    if conv_weight.ndim != 2 or conv_weight.shape[0] != channels or not 2 <= conv_weight.shape[1] <= 4:
        fits = what_fits("conv_weight", conv_weight, *[(channels, width) for width in (2, 3, 4)])
        fail("conv_weight", f"[{channels}, width] with width 2, 3 or 4", describe(conv_weight) + fits)
    taps = conv_weight.shape[1] - 1
    if conv_state.ndim != 3 or conv_state.shape[1:] != (channels, taps):
        fits = what_fits("conv_state", conv_state, (None, channels, taps))
        fail("conv_state", f"[num_slots, {channels}, {taps}]", describe(conv_state) + fits)
    check_elements_apart("conv_state", conv_state)
    if conv_bias is not None and (conv_bias.shape != (channels,) or (channels > 1 and conv_bias.stride(0) != 1)):
        fail("conv_bias", f"[{channels}], contiguous, or None", describe(conv_bias))
    check_dtype("slots", slots, torch.int32, torch.int64)
    if slots.ndim != 1 or (known(slots.shape[0] > 1) and slots.stride(0) != 1):
        fail("slots", "[sequences], contiguous", describe(slots))
    if known(slots.shape[0] * tokens_per_sequence != mixed_qkvz.shape[0]):
        rows = slots.shape[0] * tokens_per_sequence
        fail("mixed_qkvz", f"[len(slots) * tokens_per_sequence = {rows}, ...]", describe(mixed_qkvz))


def check_slot_values(slots: Tensor, num_slots: int) -> None:
    """What only device memory tells: -1 or a slot of the pool, none twice. Copies the slots to the host."""
    seen: set[int] = set()
    for i, slot in enumerate(slots.tolist()):
        if not -1 <= slot < num_slots:
            fail(f"slots[{i}]", f"-1 (padding) or a slot below {num_slots}", slot)
        if slot in seen:
            fail(f"slots[{i}]", "a slot that no other sequence of the call has", slot)
        if slot >= 0:
            seen.add(slot)


def _check_rows(name: str, tensor: Tensor, tail: tuple[int, ...]) -> None:
    """A tensor [N, *tail] whose rows are packed."""
    if tensor.ndim != 1 + len(tail) or tensor.shape[1:] != tail:
        fits = what_fits(name, tensor, (None, *tail))
        fail(name, f"[N, {', '.join(map(str, tail))}]", describe(tensor) + fits)
    if tensor.element_size() not in _ITEM_SIZES:
        fail(f"{name}.dtype", "a dtype of 1, 2, 4 or 8 bytes", tensor.dtype, TypeError)
    packed = 1
    for size, stride in zip(reversed(tail), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != packed:
            fail(name, "contiguous in each row (only the row stride is free)", describe(tensor))
        packed *= size


def _check_companion(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """As many rows as the other, on the same device."""
    if known(tensor.shape[0] != other.shape[0]):
        fail(name, f"[N = {other.shape[0]}, ...] as {other_name} is", describe(tensor))
    check_same_device(name, tensor, other_name, other)


def what_fits(name: str, tensor: Tensor, *wanted: tuple[int | None, ...]) -> str:
    """The end of an error message: the view of a tensor that has a wanted shape, in which None stands for any size."""
    views: dict[str, Callable[[], Tensor]] = {
        ".T": lambda: tensor.transpose(*range(tensor.ndim)),
        ".transpose(1, 2)": lambda: tensor.transpose(1, 2),
        ".squeeze(1)": lambda: tensor.squeeze(1),
        ".flatten(0, 1)": lambda: tensor.flatten(0, 1),
        "[..., 1:]": lambda: tensor[..., 1:],
    }
    for shape in wanted:
        if len(shape) > 2:
            views[f".unflatten(1, {shape[1:]})"] = lambda heads=shape[1:]: tensor.unflatten(1, heads)  # type: ignore[misc]
        else:
            views[".flatten(1)"] = lambda: tensor.flatten(1)
    for view, make in views.items():
        try:
            made = make().shape
        except (IndexError, RuntimeError, TypeError):
            continue
        for shape in wanted:
            if len(made) == len(shape) and all(size in (None, got) for size, got in zip(shape, made, strict=True)):
                return f"; {name}{view} would fit"
    return ""
