"""What a simulated kernel computes with: numbers and tiles in registers, pointers, loads and stores."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

Tensor = torch.Tensor


class DType:
    def __init__(self, dtype: torch.dtype) -> None:
        self.torch = dtype
        self.primitive_bitwidth = 8 * dtype.itemsize

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DType) and other.torch == self.torch

    def __hash__(self) -> int:
        return hash(self.torch)


def raw(value: Any) -> Any:
    return value.data if isinstance(value, Value) else value


def in_64_bits(value: Any) -> Tensor:
    return torch.as_tensor(raw(value)).double()


def truncated(a: Any, b: Any) -> Tensor:
    return torch.div(*promoted(a, b), rounding_mode="trunc")


def remainder(a: Any, b: Any) -> Tensor:
    return torch.fmod(*promoted(a, b))


class Value:
    """A number or a tile in registers; integers divide as in C."""

    def __init__(self, data: Any) -> None:
        self.data = data if isinstance(data, Tensor) else torch.tensor(data, dtype=dtype_of_number(data))

    @property
    def dtype(self) -> DType:
        return DType(self.data.dtype)

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def type(self) -> SimpleNamespace:
        """Its layout is none: all threads have all."""
        return SimpleNamespace(layout=None)

    def to(self, dtype: DType, bitcast: bool = False) -> Value:
        return Value(self.data.view(dtype.torch) if bitcast else self.data.to(dtype.torch))

    def __getitem__(self, index: Any) -> Value:
        return Value(self.data[index])

    def __index__(self) -> int:
        return int(self.data)

    __int__ = __index__

    def __bool__(self) -> bool:
        return bool(self.data)

    def __neg__(self) -> Value:
        return Value(-self.data)

    def __invert__(self) -> Value:
        return Value(~self.data)


def dtype_of_number(number: Any) -> torch.dtype | None:
    return torch.int32 if isinstance(number, int) and not isinstance(number, bool) else None


def like(number: Any, beside: Tensor) -> Any:
    """A Python integer as one of those beside it, where it fits."""
    if not isinstance(number, int) or isinstance(number, bool) or beside.dtype not in (torch.int32, torch.int64):
        return number
    fits = abs(number) <= torch.iinfo(beside.dtype).max
    return torch.tensor(number, dtype=beside.dtype) if fits else number


def define_operators() -> None:
    def define(name: str, function: Callable[[Any, Any], Any], mirrored: bool) -> None:
        def forwards(a: Value, b: Any) -> Any:
            if isinstance(b, Value):
                b = b.data
            elif isinstance(b, Pointer):
                # A tile plus a pointer is a pointer.
                return NotImplemented
            # As Value() does, which asks first what it is given: kernels spend most of their time here.
            result = Value.__new__(Value)
            result.data = function(a.data, b)
            return result

        def backwards(a: Value, b: Any) -> Value:
            b = like(raw(b), a.data)
            return Value(function(b if isinstance(b, Tensor) else torch.as_tensor(b), a.data))

        setattr(Value, f"__{name}__", forwards)
        if mirrored:
            setattr(Value, f"__r{name}__", backwards)

    for name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "lshift", "rshift"):
        define(name, getattr(operator, f"__{name}__"), True)
    define("floordiv", truncated, True)
    define("mod", remainder, True)
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        define(name, getattr(operator, name), False)


class Pointer:
    """A tensor's memory, and offsets in it counted in elements from the first one's."""

    def __init__(self, tensor: Tensor, offsets: Any = 0) -> None:
        self.tensor, self.offsets = tensor, offsets
        self.dtype = SimpleNamespace(element_ty=DType(tensor.dtype))

    def __add__(self, offsets: Any) -> Pointer:
        # In 64 bits: torch would take those of a tile for the sum's.
        return Pointer(self.tensor, torch.as_tensor(raw(offsets)).long() + self.offsets)

    __radd__ = __add__

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.tensor, torch.as_tensor(self.offsets)[key])

    def memory(self) -> Tensor:
        tensor = self.tensor
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return torch.as_strided(tensor, (reach + 1 if tensor.numel() else 0,), (1,), tensor.storage_offset())


define_operators()


def as_bytes(tensor: Tensor) -> Tensor:
    # Indexing is not implemented for 8-bit floats.
    return tensor.view(torch.uint8) if tensor.element_size() == 1 and tensor.dtype.is_floating_point else tensor


def reached(pointer: Pointer, *others: Any) -> list[Tensor]:
    """A pointer's offsets and others, broadcast; the offsets that the last one, a mask, leaves are in memory."""
    parts = [torch.as_tensor(raw(part)) for part in (pointer.offsets, *others)]
    offsets, *rest = torch.broadcast_tensors(*parts)
    used, size = offsets[rest[-1]], pointer.memory().numel()
    if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < size:
        raise IndexError(f"elements {int(used.min())} to {int(used.max())} of memory that holds {size}")
    return [offsets.long(), *rest]


def load(pointer: Pointer, mask: Any = True, other: Any = 0, cache_modifier: str = "") -> Value:
    offsets, seen = reached(pointer, mask)
    memory = as_bytes(pointer.memory())
    found = memory[offsets.clamp(0, max(memory.numel() - 1, 0))] if memory.numel() else memory.new_zeros(offsets.shape)
    return Value(torch.where(seen, found, torch.as_tensor(raw(other)).to(memory.dtype)).view(pointer.tensor.dtype))


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    memory = pointer.memory()
    offsets, values, seen = reached(pointer, torch.as_tensor(raw(value)), mask)
    as_bytes(memory)[offsets[seen]] = as_bytes(values[seen].to(memory.dtype))


def atomic_add(pointer: Pointer, value: Any, mask: Any = True, sem: str = "acq_rel") -> Value:
    """Of places that differ from each other: programs run one after the other."""
    before = load(pointer, mask)
    store(pointer, Value(before.data + raw(value)), mask)
    return before


def select(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, Value):
        return a if condition else b
    if isinstance(a, Pointer):
        return a if bool(condition.data) else b
    return Value(torch.where(condition.data, *promoted(raw(a), raw(b))))


def promoted(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Of one dtype: a Python number takes the other's."""
    if not isinstance(a, Tensor):
        a = torch.tensor(a, dtype=b.dtype if isinstance(b, Tensor) else dtype_of_number(a))
    if not isinstance(b, Tensor):
        b = torch.tensor(b, dtype=a.dtype)
    if a.dtype == b.dtype:
        return a, b
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def extreme(of_tensors: Callable[[Tensor, Tensor], Tensor], of_numbers: Callable[..., Any]) -> Callable[..., Any]:
    def extreme(a: Any, b: Any) -> Any:
        if not isinstance(a, Value) and not isinstance(b, Value):
            return of_numbers(a, b)
        return Value(of_tensors(*promoted(raw(a), raw(b))))

    return extreme
