"""Memory that tensors share: what a kernel writes may overlap neither its other arguments nor itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch

from kernel_reference.errors import fail
from kernel_reference.words import describe

# Addresses that each remembers: as many as a model has layers.
_MOST_APART = 64


class MemoryOverlap:
    """Whether tensors that a kernel writes share memory with others, prepared once for given shapes and strides.

    tensors: by the names of the arguments, in the order of later calls; None where one is left out. written: the names
    of those that the kernel writes. Calling it with tensors of the same shapes, strides and dtypes raises ValueError if
    a written one shares memory with any other. Slices of one tensor that interleave without sharing an element, as q,
    k and v of a fused projection do, pass. Costs the host 0.1 us a tensor, and at addresses
    that none of the last calls had 0.06 us a pair of which one is written.

    >>> overlap = MemoryOverlap({"q": q, "out": out}, written=["out"])
    >>> overlap(q, out)
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor | None], written: Sequence[str]) -> None:
        self._names = tuple(tensors)
        self._order = _order_of(tuple([None if x is None else name for name, x in tensors.items()]), tuple(written))
        self._pairs = self._with_spans(tuple(tensors.values()))
        self._apart: dict[tuple[int | None, ...], bool] = {}

    def resized(self, *tensors: torch.Tensor | None) -> MemoryOverlap:
        """The same for tensors of other shapes and strides, the same ones None; in half the time."""
        other = object.__new__(MemoryOverlap)
        other._names, other._order = self._names, self._order
        other._pairs = other._with_spans(tensors)
        other._apart = {}
        return other

    def addresses(self, *tensors: torch.Tensor | None) -> tuple[tuple[int | None, ...], bool]:
        """The same check, and what it looked at: each tensor's address, and whether all are 16-byte aligned."""
        starts = tuple([None if tensor is None else tensor.data_ptr() for tensor in tensors])
        aligned = self._apart.get(starts)
        if aligned is None:
            # Sizes and strides being fixed, addresses alone tell whether tensors meet.
            self._compare(starts, tensors)
            aligned = not any([start & 15 for start in starts if start is not None])
            if len(self._apart) >= _MOST_APART:
                self._apart.clear()
            self._apart[starts] = aligned
        return starts, aligned

    def _with_spans(self, tensors: tuple[torch.Tensor | None, ...]) -> list[tuple[int, int, list[tuple[int, int]]]]:
        spans = [0 if tensor is None else _bytes_spanned(tensor) for tensor in tensors]
        return [
            (one, spans[one], [(other, spans[other]) for other in others]) for one, others in self._order if spans[one]
        ]

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        self.addresses(*tensors)

    def _compare(self, starts: tuple[int | None, ...], tensors: tuple[torch.Tensor | None, ...]) -> None:
        for position, span, others in self._pairs:
            start: Any = starts[position]
            end = start + span
            for other, its_span in others:
                its_start: Any = starts[other]
                if its_start < end and start < its_start + its_span:
                    written: Any = tensors[position]
                    if share_memory(written, tensors[other]):  # type: ignore[arg-type]
                        self._fail(position, other, written)

    def _fail(self, position: int, other: int, written: torch.Tensor) -> NoReturn:
        fail(self._names[position], f"a tensor that shares no memory with {self._names[other]}", describe(written))


def check_no_overlap(tensors: Mapping[str, torch.Tensor | None], written: Sequence[str]) -> None:
    """:class:`MemoryOverlap` of these tensors, asked once: for calls whose host time does not count."""
    MemoryOverlap(tensors, written)(*tensors.values())


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two strided tensors of one device may share a byte.

    True if their ranges of addresses meet, unless both keep to columns of their own of rows of a common length.
    """
    if not one.numel() or not other.numel():
        return False
    distance = other.data_ptr() - one.data_ptr()
    if not -_bytes_spanned(other) < distance < _bytes_spanned(one):
        return False
    dims = [sorted(_dims_in_bytes(tensor)) for tensor in (one, other)]
    for length in {stride for tensor_dims in dims for stride, _ in tensor_dims}:
        widths = [_width_in_rows(tensor_dims, length) for tensor_dims in dims]
        if None not in widths:
            width, its_width = widths
            start = distance % length
            # Columns 0 to width of the one; start to start + its_width, on a circle, of the other.
            if start >= width and start + its_width <= length:  # type: ignore[operator]
                return False
    return True


def check_elements_apart(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless each element of a tensor that a kernel writes has memory of its own.

    Each stride must pass all that the smaller ones reach, so that dimensions do not interleave either. Of sizes that
    torch.compile traces as symbols nothing is said: the op asks again when it runs.

    >>> check_elements_apart("out", torch.empty(4, 8)[:, ::2])
    >>> check_elements_apart("out", torch.empty(8).expand(4, 8))
    Traceback (most recent call last):
    ValueError: out must be a tensor whose elements do not share memory, nor its dimensions interleave, got ...
    """
    if not all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride())) or not tensor.numel():
        return
    dims = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    reach = 0
    for stride, size in sorted(dims):
        if stride <= reach:
            fail(name, "a tensor whose elements do not share memory, nor its dimensions interleave", describe(tensor))
        reach += stride * (size - 1)


# As many as there are ops, and arguments that they may go without.
@lru_cache(maxsize=1024)
def _order_of(names: tuple[str | None, ...], written: tuple[str, ...]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Positions of written tensors, each with those of the others that it is compared with."""
    there = {name: position for position, name in enumerate(names) if name is not None}
    return tuple(
        (there[one], tuple(at for other, at in there.items() if _later(one, other, written)))
        for one in written
        if one in there
    )


def _later(one: str, other: str, written: Sequence[str]) -> bool:
    """Each pair once: two written ones are compared when the first is."""
    return one != other and (other not in written or list(written).index(other) > list(written).index(one))


def _dims_in_bytes(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """(stride, size) of the dimensions that have an extent, and of an element's own bytes."""
    size = tensor.element_size()
    dims = [(step * size, n) for step, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1 and step]
    return [(1, size), *dims]


def _bytes_spanned(tensor: torch.Tensor) -> int:
    """From the first to the last byte, both counted."""
    if not tensor.numel():
        return 0
    reach = sum([stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)])
    return (reach + 1) * tensor.element_size()


def _width_in_rows(dims: list[tuple[int, int]], length: int) -> int | None:
    """The bytes that a tensor spans of each row of ``length`` bytes; None where its dimensions do not keep to rows."""
    inner = [(stride, size) for stride, size in dims if stride % length]
    width = 1 + sum(stride * (size - 1) for stride, size in inner)
    return width if width <= length else None
