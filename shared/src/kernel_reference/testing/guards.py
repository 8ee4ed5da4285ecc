"""Buffers that show what a kernel must not do: write out of bounds, leave elements unwritten, read out of bounds.

Memory is filled with bit patterns that are NaN in floating-point dtypes, so that a value read out of bounds spoils the
result, and that differ from element to element and from buffer to buffer, so that copying one guard onto another shows
too. Comparisons are of bits, in every dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from kernel_reference.checks import as_int, check_dtype, check_tensors, describe, fail

# The bits that make any pattern a NaN, by dtype; the others have none to spare.
_NAN_BITS: dict[torch.dtype, tuple[int, torch.dtype]] = {
    torch.float64: (0x7FF8 << 48, torch.int64),
    torch.complex128: (0x7FF8 << 48, torch.int64),
    torch.float32: (0x7FC0 << 16, torch.int32),
    torch.complex64: (0x7FC0 << 16, torch.int32),
    torch.float16: (0x7E00, torch.int16),
    torch.bfloat16: (0x7FC0, torch.int16),
    torch.float8_e4m3fn: (0x7F, torch.int8),
    torch.float8_e5m2: (0x7D, torch.int8),
}
# Here NaN is one pattern alone, and a bool is a byte that is neither 0 nor 1.
_ONLY_PATTERN = {torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2fnuz: 0x80, torch.bool: 0xA5}
_buffers = itertools.count(1)


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Overwrite ``tensor`` (any dtype and strides) with NaN of varying payloads, or with noise in an integer dtype."""
    check_tensors(tensor=tensor)
    noise = _noise(tensor.numel() * tensor.element_size(), tensor.dtype, tensor.device)
    with torch.no_grad():
        _as_integers(tensor).copy_(noise.view(_integer_of(tensor.element_size())).view_as(_as_integers(tensor)))
    return tensor


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A packed tensor filled as by :func:`poison_`: an output that a kernel is to write."""
    _check_dtype(dtype)
    return poison_(torch.empty(_sizes("shape", shape), dtype=dtype, device=_device(device)))


class Grids:
    """Stands for the launches of ``modules``: remembers grids and calls, and starts nothing. On a device of ``limits``.

    grids: (kernel's name, grid) of each launch that was made ready; calls: (kernel's name, arguments) of each call.
    """

    def __init__(self, monkeypatch: Any, limits: Any, *modules: Any) -> None:
        self.grids: list[tuple[str, tuple[int, int, int]]] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        grids, calls = self.grids, self.calls

        class Recorded:
            def __init__(self, kernel: Any, grid: tuple[int, int, int], *rest: Any, **options: Any) -> None:
                self.name = kernel.fn.__name__
                grids.append((self.name, grid))

            def __call__(self, *given: Any) -> None:
                calls.append((self.name, given))

        stands_in = {"Launch": Recorded, "TmaLaunch": Recorded, "device_limits": lambda device: limits}
        for module in modules:
            for name in stands_in.keys() & vars(module).keys():
                monkeypatch.setattr(module, name, stands_in[name])


class Canaried:
    """A tensor inside a larger buffer, of which everything else is guarded. Made by :func:`canaried`.

    tensor: the view to hand to a kernel, filled as by :func:`poison_`.
    """

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device | str,
        before: int, after: int,
    ) -> None:  # fmt: skip
        extent = _extent(shape, strides)
        size = dtype.itemsize
        self._first = before
        self._buffer = _noise((before + extent + after) * size, dtype, torch.device(device))
        self._original = self._buffer.clone()
        self._integers = _integer_of(size)
        inside = torch.zeros(before + extent + after, dtype=torch.bool, device=device)
        torch.as_strided(inside, shape, strides, before).fill_(True)
        self._inside = inside
        self.tensor: torch.Tensor = torch.as_strided(self._buffer.view(dtype), shape, strides, before)

    def check(self, *, written: bool | None = None) -> None:
        """Raise AssertionError if a guard was overwritten, or if an element of the tensor was not written.

        written: whether every element must have changed. If left out, this is asked of all dtypes but integers of 8
        and 16 bits, in which a result may well equal the noise that was there before.
        """
        changed = self._buffer.view(self._integers) != self._original.view(self._integers)
        if self._integers == torch.int64 and changed.shape != self._inside.shape:
            # complex128: two words an element.
            changed = changed.view(-1, 2).any(-1)
        stray = (changed & ~self._inside).nonzero().flatten()
        if stray.numel():
            place = self._place(int(stray[0]))
            raise AssertionError(f"{stray.numel()} elements beside the tensor were overwritten; the first is {place}")
        dtype = self.tensor.dtype
        small_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool) and dtype.itemsize <= 2
        if written if written is not None else not small_integer:
            untouched = ~torch.as_strided(changed, self.tensor.shape, self.tensor.stride(), self._first)
            if bool(untouched.any()):
                where = tuple(untouched.nonzero()[0].tolist())
                raise AssertionError(
                    f"{int(untouched.sum())} of {untouched.numel()} elements were not written; the first is at {where}"
                )

    def _place(self, at: int) -> str:
        offset = at - self._first
        extent = _extent(tuple(self.tensor.shape), self.tensor.stride())
        if offset < 0:
            return f"{-offset} elements before the tensor"
        if offset >= extent:
            return f"{offset - extent + 1} elements after the tensor's last"
        return f"between its rows: {offset} elements after its first, strides {self.tensor.stride()}"


def canaried(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu", *,
    row_padding: int = 0, strides: Sequence[int] | None = None, band: int = 4096, offset: int = 0,
) -> Canaried:  # fmt: skip
    """A tensor with guard bands before, after and, where its rows are wider apart than their width, between its rows.

    row_padding: elements between the end of a row (the last dimension) and the next. strides: in elements, instead of
    row_padding; none may be negative. band: elements before and after, a multiple of 256 for the alignment that an
    allocator gives. offset: elements by which the tensor starts off that alignment. Take ``.tensor``, run the kernel,
    call ``.check()``.
    """
    _check_dtype(dtype)
    device = _device(device)
    sizes = _sizes("shape", shape)
    row_padding, band, offset = (
        as_int(name, number) for name, number in (("row_padding", row_padding), ("band", band), ("offset", offset))
    )
    if strides is None:
        if row_padding < 0:
            fail("row_padding", ">= 0", row_padding)
        steps = [1] * len(sizes)
        for dim in range(len(sizes) - 2, -1, -1):
            steps[dim] = steps[dim + 1] * sizes[dim + 1] + (row_padding if dim == len(sizes) - 2 else 0)
        strides = steps
    elif row_padding:
        fail("row_padding", "0 where strides are given", row_padding)
    strides = _sizes("strides", strides)
    if len(strides) != len(sizes):
        fail("strides", f"{len(sizes)} numbers >= 0", strides)
    if band < 0 or band % 256:
        fail("band", "a multiple of 256", band)
    if offset < 0:
        fail("offset", ">= 0", offset)
    return Canaried(sizes, strides, dtype, device, band + offset, band)


def guarded(tensor: torch.Tensor, **how: Any) -> Canaried:
    """The same bits inside a guarded buffer: an input. ``how``: as for :func:`canaried`."""
    check_tensors(tensor=tensor)
    place = canaried(tensor.shape, tensor.dtype, tensor.device, **how)
    with torch.no_grad():
        movable(place.tensor).copy_(movable(tensor))
    return place


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """A view whose elements can be copied and indexed: bytes of an 8-bit float, for which not every device can."""
    is_fp8 = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return tensor.view(torch.uint8) if is_fp8 else tensor


def nan_pages(cache: torch.Tensor, used: torch.Tensor | Iterable[int]) -> torch.Tensor:
    """Poison, in place, every page of ``cache`` [pages, ...] that is not in ``used``.

    used: page ids; negative ones are ignored. A kernel that reads a page which its block table does not name then
    returns NaN. Returns the ids of the poisoned pages.
    """
    check_tensors(cache=cache)
    if cache.ndim < 1:
        fail("cache", "[pages, ...]", describe(cache))
    if isinstance(used, torch.Tensor):
        check_dtype("used", used, torch.int32, torch.int64)
        used = used.flatten().tolist()
    ids = _integers("used", used, "page ids, or a tensor of them")
    free = sorted(set(range(cache.shape[0])) - set(ids))
    for page in free:
        poison_(cache[page])
    return torch.tensor(free, dtype=torch.int64)


def bitwise_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and bits are the same: -0 is not 0, and a NaN equals a NaN of the same payload."""
    check_tensors(a=a, b=b)
    return first_difference(a, b) is None


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor, *, what: str = "the result") -> None:
    """Raise AssertionError, saying where they first differ, unless :func:`bitwise_equal`."""
    difference = first_difference(actual, expected)
    if difference is not None:
        raise AssertionError(f"{what} is not bit for bit what it should be: {difference}")


def tensors_in(results: Any) -> list[torch.Tensor]:
    """The tensors of what a function returned or took, in any nesting."""
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def assert_same_bits(actual: Any, expected: Any, what: str = "the result:") -> None:
    """:func:`assert_bitwise_equal` of all tensors in results, as many of them in the one as in the other."""
    seen, wanted = tensors_in(actual), tensors_in(expected)
    if not wanted and any(leaf is not None for leaf in tree_leaves(expected)):
        raise AssertionError(f"{what} no tensor in {expected!r}: nothing would be compared")
    if len(seen) != len(wanted):
        raise AssertionError(f"{what} {len(seen)} tensors, should be {len(wanted)}")
    for position, (one, other) in enumerate(zip(seen, wanted, strict=True)):
        assert_bitwise_equal(one, other, what=f"{what} tensor {position}")


def first_difference(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """The first difference in bits (or in shape or dtype) as a sentence, or None. Any dtype and strides."""
    check_tensors(actual=actual, expected=expected)
    if actual.dtype != expected.dtype:
        return f"dtype {actual.dtype}, should be {expected.dtype}"
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, should be {tuple(expected.shape)}"
    seen, wanted = (_as_integers(tensor.detach()) for tensor in (actual, expected.to(actual.device)))
    differs = seen != wanted
    if seen.shape != actual.shape:
        differs = differs.any(-1)
    if not bool(differs.any()):
        return None
    at = tuple(differs.nonzero()[0].tolist())
    bits = [_hexadecimal(tensor, at) for tensor in (seen, wanted)]
    return (
        f"{int(differs.sum())} of {differs.numel()} elements differ; the first, at {at}, is {_value(actual, at)} "
        f"(bits {bits[0]}), should be {_value(expected, at)} (bits {bits[1]})"
    )


def _check_dtype(dtype: object) -> None:
    if not isinstance(dtype, torch.dtype):
        fail("dtype", "a torch.dtype", describe(dtype), TypeError)


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        fail("device", "a torch.device, or the name of one", describe(device), TypeError)


def _sizes(name: str, sizes: Any) -> tuple[int, ...]:
    """Numbers of 0 or more."""
    found = tuple(_integers(name, sizes, "a sequence of ints"))
    if min(found, default=0) < 0:
        fail(name, f"{len(found)} numbers >= 0", found)
    return found


def _integers(name: str, numbers: Any, wanted: str) -> list[int]:
    if not isinstance(numbers, Iterable) or isinstance(numbers, (str, torch.Tensor)):
        fail(name, wanted, describe(numbers), TypeError)
    return [as_int(name, number, wanted) for number in numbers]


def _value(tensor: torch.Tensor, at: tuple[int, ...]) -> object:
    return tensor.detach()[at].cpu().item()


def _hexadecimal(integers: torch.Tensor, at: tuple[int, ...]) -> str:
    word = 8 * integers.element_size()
    words = integers[at].reshape(-1).tolist()
    return " ".join(f"0x{value % (1 << word):0{word // 4}x}" for value in words)


def _integer_of(size: int) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}[size]


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers of its shape and strides; complex128 gains a last dimension of 2."""
    if tensor.is_complex():
        tensor = tensor.resolve_conj()
        if tensor.element_size() == 16:
            return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_integer_of(tensor.element_size()))


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last of such a tensor, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _noise(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``size`` bytes that are NaN where read in ``dtype``, other ones in every call, the same in every run."""
    if dtype in _ONLY_PATTERN:
        return torch.full((size,), _ONLY_PATTERN[dtype], dtype=torch.uint8, device=device)
    generator = torch.Generator(device).manual_seed(next(_buffers))
    # Eight bytes at a time: a number for each takes most of the time of a test of small tensors. Not torch.empty, which
    # tests that look for unwritten memory replace by what is filled here.
    words = torch.zeros(-(-size // 8), dtype=torch.int64, device=device).random_(generator=generator)
    noise = words.view(torch.uint8)[:size]
    if dtype in _NAN_BITS:
        bits, word = _NAN_BITS[dtype]
        noise.view(word).bitwise_or_(bits)
    return noise
