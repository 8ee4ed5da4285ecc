"""Shared memory of a simulated kernel: layouts, views of tiles, TMA descriptors."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from kernel_reference.testing.gluon.values import DType, Pointer, Value, as_bytes, raw

Tensor = torch.Tensor


class Layout:
    """A layout of registers, which says nothing here, or of shared memory without an order of its own."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


class MBarrierLayout(Layout): ...


class NVMMASharedLayout(Layout):
    """Rows of ``swizzle_byte_width`` bytes; a tile's further columns come after all of its rows."""

    def __init__(self, swizzle_byte_width: int, element_bitwidth: int, rank: int = 2, **_: Any) -> None:
        if swizzle_byte_width not in (0, 32, 64, 128):
            raise ValueError(f"shared memory is swizzled over 128, 64 or 32 bytes, not over {swizzle_byte_width}")
        self.columns = swizzle_byte_width * 8 // element_bitwidth

    @staticmethod
    def get_default_for(block: Sequence[int], dtype: DType, **_: Any) -> NVMMASharedLayout:
        width = min(128, block[-1] * dtype.primitive_bitwidth // 8)
        return NVMMASharedLayout(width, dtype.primitive_bitwidth)


class Shared:
    """A view of shared memory: tiles of the last two dimensions, one after the other."""

    def __init__(self, memory: Tensor, dtype: DType, shape: Sequence[int], layout: Any, first: int = 0) -> None:
        self.memory, self.dtype, self.shape, self.layout, self.first = memory, dtype, list(shape), layout, first
        self.window: tuple[int, int, int, int] | None = None
        self.transposed = False

    def _view(self, shape: Sequence[int], layout: Any, first: int) -> Shared:
        return Shared(self.memory, self.dtype, shape, layout, first)

    def index(self, i: Any) -> Shared:
        if not 0 <= int(i) < self.shape[0]:
            raise IndexError(f"stage {int(i)} of {self.shape[0]} in shared memory")
        size = int(torch.tensor(self.shape[1:]).prod())
        return self._view(self.shape[1:], self.layout, self.first + int(i) * size)

    def reshape(self, shape: Sequence[int]) -> Shared:
        return self._view(shape, self.layout, self.first)

    def _reinterpret(self, dtype: DType, shape: Sequence[int], layout: Any) -> Shared:
        if dtype.torch.itemsize != self.dtype.torch.itemsize:
            raise ValueError(f"{dtype.torch} has not the size of {self.dtype.torch}")
        if int(torch.tensor(shape).prod()) != self.memory.numel():
            raise ValueError(f"{list(shape)} is not the whole of shared memory that holds {self.memory.numel()}")
        return Shared(self.memory.view(dtype.torch), dtype, shape, layout, self.first)

    def permute(self, order: Sequence[int]) -> Shared:
        view = self._view(self.shape[::-1], self.layout, self.first)
        view.window, view.transposed = self.window, not self.transposed
        return view

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise IndexError(f"from {start} to {start + length} of {self.shape[dim]} in shared memory")
        shape, window = list(self.shape), list(self.window or (0, 0, *self.shape))
        shape[dim] = length
        window[dim] += start
        view = self._view(shape, self.layout, self.first)
        view.window = (window[0], window[1], window[2], window[3])
        return view

    def _offsets(self) -> Tensor:
        shape = [1, *self.shape][-2:]
        rows, columns = shape[::-1] if self.transposed else shape
        first_row, first_column, all_rows, all_columns = self.window or (0, 0, rows, columns)
        row = first_row + torch.arange(rows)[:, None]
        column = first_column + torch.arange(columns)
        width = self.layout.columns if isinstance(self.layout, NVMMASharedLayout) else all_columns
        offsets = self.first + column // width * (all_rows * width) + row * width + column % width
        return (offsets.T if self.transposed else offsets).reshape(self.shape[-2:])

    def load(self, layout: Any = None) -> Value:
        return Value(as_bytes(self.memory)[self._offsets()].view(self.memory.dtype))

    def store(self, value: Any) -> None:
        offsets, new = self._offsets(), raw(value).to(self.memory.dtype)
        as_bytes(self.memory)[offsets] = as_bytes(new.reshape(offsets.shape) if new.numel() == offsets.numel() else new)


class Descriptor:
    """A TMA descriptor: a tensor's sizes and strides in elements, and the box that one load or store moves."""

    def __init__(
        self, tensor: Tensor, shape: Sequence[int], strides: Sequence[int], block_shape: Sequence[int], layout: Any
    ) -> None:
        self.tensor, self.sizes, self.strides, self.layout = tensor, shape, strides, layout
        self.dtype = DType(tensor.dtype)
        size = int(torch.tensor(block_shape).prod()) * tensor.element_size()
        self.block_type = SimpleNamespace(shape=list(block_shape), nbytes=size)

    def box(self, coordinates: Sequence[Any]) -> tuple[Pointer, Tensor]:
        """Where a box begins and which of its elements the tensor has."""
        shape = self.block_type.shape
        offsets, there = torch.zeros(shape, dtype=torch.long), torch.ones(shape, dtype=torch.bool)
        for dim, first in enumerate(coordinates):
            along = (int(first) + torch.arange(shape[dim])).reshape([-1 if d == dim else 1 for d in range(len(shape))])
            offsets = offsets + along * self.strides[dim]
            there = there & (along >= 0) & (along < self.sizes[dim])
        return Pointer(self.tensor, offsets), there
