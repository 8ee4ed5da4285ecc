"""What arguments must be. The ops call these, so that no call goes unchecked, not torch.compile's nor a direct one.

Every function raises ValueError or TypeError naming the argument, what it must be and what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gdn_split.plan import GroupShape
from kernel_reference.checks import describe, fail
from kernel_reference.projection import LAYOUTS

Tensor = torch.Tensor

# Copies move bits, so that any dtype of these sizes will do.
_ITEM_SIZES = (1, 2, 4, 8)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
PART_NAMES = ("mixed_qkv", "z", "b", "a")


def check_tensors(**tensors: object) -> None:
    """Each must be a dense tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            fail(name, "a torch.Tensor", describe(tensor), TypeError)
        if tensor.layout != torch.strided:
            fail(name, "a dense (strided) tensor", describe(tensor), TypeError)


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
    """Tensors to be written: no two elements in one place."""
    for name, tensor in tensors.items():
        width = tensor.shape[1:].numel()
        if _holds(tensor.shape[0] > 1) and _holds(tensor.stride(0) < width):
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
        if tensor.dtype not in _FLOATS:
            fail(f"{name}.dtype", "bfloat16, float16 or float32", tensor.dtype, TypeError)
    for name, tensor in (*floats.items(), ("slots", slots)):
        if tensor.device != mixed_qkvz.device:
            fail(f"{name}.device", f"{mixed_qkvz.device} as mixed_qkvz is", tensor.device)
    channels = shape.qkv_width
    if conv_weight.ndim != 2 or conv_weight.shape[0] != channels or not 2 <= conv_weight.shape[1] <= 4:
        fits = _what_fits("conv_weight", conv_weight, *[(channels, width) for width in (2, 3, 4)])
        fail("conv_weight", f"[{channels}, width] with width 2, 3 or 4", describe(conv_weight) + fits)
    taps = conv_weight.shape[1] - 1
    if conv_state.ndim != 3 or conv_state.shape[1:] != (channels, taps):
        fits = _what_fits("conv_state", conv_state, (None, channels, taps))
        fail("conv_state", f"[num_slots, {channels}, {taps}]", describe(conv_state) + fits)
    if _elements_share_memory(conv_state):
        fail("conv_state", "a tensor whose elements do not share memory", describe(conv_state))
    if conv_bias is not None and (conv_bias.shape != (channels,) or (channels > 1 and conv_bias.stride(0) != 1)):
        fail("conv_bias", f"[{channels}], contiguous, or None", describe(conv_bias))
    if slots.dtype not in (torch.int32, torch.int64):
        fail("slots.dtype", "int32 or int64", slots.dtype, TypeError)
    if slots.ndim != 1 or (_holds(slots.shape[0] > 1) and slots.stride(0) != 1):
        fail("slots", "[sequences], contiguous", describe(slots))
    if _holds(slots.shape[0] * tokens_per_sequence != mixed_qkvz.shape[0]):
        rows = slots.shape[0] * tokens_per_sequence
        fail("mixed_qkvz", f"[len(slots) * tokens_per_sequence = {rows}, ...]", describe(mixed_qkvz))


def check_slot_values(slots: Tensor, num_slots: int) -> None:
    """What only device memory tells: -1 or a slot of the pool, none twice. Copies the slots to the host."""
    seen: set[int] = set()
    for place, slot in enumerate(slots.tolist()):
        if not -1 <= slot < num_slots:
            fail(f"slots[{place}]", f"-1 (padding) or a slot below {num_slots}", slot)
        if slot in seen:
            fail(f"slots[{place}]", "a slot that no other sequence of the call has", slot)
        if slot >= 0:
            seen.add(slot)


def _check_rows(name: str, tensor: Tensor, tail: tuple[int, ...]) -> None:
    """A tensor [N, *tail] whose rows are packed."""
    if tensor.ndim != 1 + len(tail) or tensor.shape[1:] != tail:
        fits = _what_fits(name, tensor, (None, *tail))
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
    if _holds(tensor.shape[0] != other.shape[0]):
        fail(name, f"[N = {other.shape[0]}, ...] as {other_name} is", describe(tensor))
    if tensor.device != other.device:
        fail(f"{name}.device", f"{other.device} as {other_name} is", tensor.device)


def _holds(condition: Any) -> bool:
    """Whether a comparison of sizes is true. One that only the device can tell, of torch.compile, counts as false:
    the op asks again when it runs."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def _elements_share_memory(tensor: Tensor) -> bool:
    """Whether two elements may lie in one place: a stride is shorter than what the dimensions inside it span."""
    dims = [(stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if _holds(size > 1)]
    if not all(type(number) is int for dim in dims for number in dim):
        return False
    span = 1
    for stride, size in sorted(dims):
        if stride < span:
            return True
        span += stride * (size - 1)
    return False


def _what_fits(name: str, tensor: Tensor, *wanted: tuple[int | None, ...]) -> str:
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
