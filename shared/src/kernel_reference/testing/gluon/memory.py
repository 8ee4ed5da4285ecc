"""Shared memory of a simulated kernel: layouts, views of tiles, TMA descriptors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
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
    """Rows of ``swizzle_byte_width`` bytes; a tile's further columns come after all of its rows. The number of 128
    bytes is added, without carry, to that of 16 bytes among those of a row.
    """

    def __init__(self, swizzle_byte_width: int, element_bitwidth: int, rank: int = 2, **_: Any) -> None:
        if swizzle_byte_width not in (0, 32, 64, 128):
            raise ValueError(f"shared memory is swizzled over 128, 64 or 32 bytes, not over {swizzle_byte_width}")
        self.columns = swizzle_byte_width * 8 // element_bitwidth
        self.chunks, self.in_chunk = max(1, swizzle_byte_width // 16), 128 // element_bitwidth

    def swizzled(self, offsets: Tensor) -> Tensor:
        """Where the elements lie that would lie at these offsets."""
        return offsets ^ (offsets // (8 * self.in_chunk) % self.chunks * self.in_chunk)

    @staticmethod
    def get_default_for(block: Sequence[int], dtype: DType, **_: Any) -> NVMMASharedLayout:
        width = min(128, block[-1] * dtype.primitive_bitwidth // 8)
        return NVMMASharedLayout(width, dtype.primitive_bitwidth)


class SharedLinearLayout(Layout):
    """By the row and column that each bit of an offset adds, without carry; none where the tile has gaps."""

    def __init__(self, offset_bases: Sequence[Sequence[int]], **_: Any) -> None:
        self.bases = tuple(tuple(base) for base in offset_bases)


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
        size = prod(self.shape[1:])
        return self._view(self.shape[1:], self.layout, self.first + int(i) * size)

    def reshape(self, shape: Sequence[int]) -> Shared:
        return self._view(shape, self.layout, self.first)

    def _reinterpret(self, dtype: DType, shape: Sequence[int], layout: Any) -> Shared:
        if dtype.torch.itemsize != self.dtype.torch.itemsize:
            raise ValueError(f"{dtype.torch} has not the size of {self.dtype.torch}")
        if prod(shape) != self.memory.numel() and not isinstance(layout, SharedLinearLayout):
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
        if isinstance(self.layout, SharedLinearLayout):
            offsets = self.first + _offsets_by_bits(self.layout.bases)
            return offsets.T if self.transposed else offsets
        if isinstance(self.layout, NVMMASharedLayout):
            width = self.layout.columns
            # The rows of a box that has more dimensions come one after the other.
            shape = (prod((1, *self.shape)[:-1]), self.shape[-1])
            offsets = self.first + _offsets_of_tile(shape, width, self.window, self.transposed)
            return self.layout.swizzled(offsets)
        return self.first + _offsets_of_tile(tuple(self.shape[-2:]), 0, self.window, self.transposed)

    def load(self, layout: Any = None) -> Value:
        return Value(as_bytes(self.memory)[self._offsets()].view(self.memory.dtype))

    def store(self, value: Any) -> None:
        offsets, new = self._offsets(), raw(value).to(self.memory.dtype)
        as_bytes(self.memory)[offsets] = as_bytes(new.reshape(offsets.shape) if new.numel() == offsets.numel() else new)


@lru_cache(maxsize=1000)
def _offsets_of_tile(
    shape: tuple[int, ...], width: int, window: tuple[int, int, int, int] | None, transposed: bool
) -> Tensor:
    """Of a tile's elements from where it begins, in rows of ``width``; 0: of all columns."""
    rows, columns = (1, *shape)[-2:]
    if transposed:
        rows, columns = columns, rows
    first_row, first_column, all_rows, all_columns = window or (0, 0, rows, columns)
    row = first_row + torch.arange(rows)[:, None]
    column = first_column + torch.arange(columns)
    width = width or all_columns
    offsets = column // width * (all_rows * width) + row * width + column % width
    return (offsets.T if transposed else offsets).reshape(shape)


@lru_cache
def _offsets_by_bits(bases: tuple[tuple[int, ...], ...]) -> Tensor:
    """Of the elements of a tile of two dimensions."""
    offsets = torch.zeros(1, dtype=torch.long)
    places = torch.zeros(2, 1, dtype=torch.long)
    for bit, base in enumerate(bases):
        if any(base):
            offsets = torch.cat([offsets, offsets + 2**bit])
            places = torch.cat([places, places ^ torch.tensor(base)[:, None]], 1)
    found = torch.empty([int(most) + 1 for most in places.amax(1)], dtype=torch.long)
    found[places[0], places[1]] = offsets
    return found


@lru_cache(maxsize=1000)
def _offsets_of_box(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Of a box's elements from its first one, and that the tensor has all of them."""
    offsets = torch.zeros(shape, dtype=torch.long)
    for dim, size in enumerate(shape):
        along = torch.arange(size).reshape([-1 if d == dim else 1 for d in range(len(shape))])
        offsets = offsets + along * strides[dim]
    return offsets, torch.ones(shape, dtype=torch.bool)


class Descriptor:
    """A TMA descriptor: a tensor's sizes and strides in elements, and the box that one load or store moves."""

    def __init__(
        self, tensor: Tensor, shape: Sequence[int], strides: Sequence[int], block_shape: Sequence[int], layout: Any
    ) -> None:
        self.tensor, self.sizes, self.strides, self.layout = tensor, shape, strides, layout
        self.dtype = DType(tensor.dtype)
        size = prod(block_shape) * tensor.element_size()
        self.block_type = SimpleNamespace(shape=list(block_shape), nbytes=size)

    def box(self, coordinates: Sequence[Any]) -> tuple[Pointer, Tensor]:
        """Where a box begins and which of its elements the tensor has."""
        shape, firsts = self.block_type.shape, [int(first) for first in coordinates]
        offsets, there = _offsets_of_box(tuple(shape), tuple(self.strides))
        for dim, (first, size, most) in enumerate(zip(firsts, shape, self.sizes, strict=True)):
            if not 0 <= first <= most - size:
                along = (first + torch.arange(size)).reshape([-1 if d == dim else 1 for d in range(len(shape))])
                there = there & (along >= 0) & (along < most)
        first = sum(first * stride for first, stride in zip(firsts, self.strides, strict=True))
        return Pointer(self.tensor, offsets + first), there
