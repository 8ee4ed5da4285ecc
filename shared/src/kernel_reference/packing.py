"""Launches that come again, started by the CUDA driver alone on arguments that are packed once.

Triton's C function parses every argument in each launch: 3 us of host time for the hundred and more of a kernel with
TMA descriptors. Here the driver is handed the bytes that it made of them, of which only addresses that are not known
before may differ::

    begin = packer.pack(grid, (q.data_ptr(), Late(0), 7))
    begin(workspace.data_ptr())

The names read here are private to Triton: where its version, or what the driver says of the kernel's parameters, is not
what they are known for, nothing is packed.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import lru_cache
from typing import Any, NamedTuple

from kernel_reference.tensor_maps import MAP_BYTES, place_of

# Of these the driver's parameters are known.
_VERSIONS = ("3.6.",)
_WORD = 8
_CONSTANT, _MAP = "constexpr", "map"
# Types of Triton as struct has them, each in a word of its own.
_FORMATS = {
    "i1": "b7x", "i8": "b7x", "i16": "h6x", "i32": "i4x", "i64": "q",
    "u1": "B7x", "u8": "B7x", "u16": "H6x", "u32": "I4x", "u64": "Q",
    "fp32": "f4x", "f32": "f4x", "fp64": "d", "*": "Q", _MAP: "8x",
}  # fmt: skip
# Of CUlaunchAttributeID.
MAY_START_BEFORE_THE_LAST_HAS_ENDED = 6
# Of any launch in Triton, behind its arguments: memory of its own and a profiler's, of which there is none here.
_SCRATCH = ("*", "*")


class Late(NamedTuple):
    """Stands for an address that each start is given, as its argument of this number."""

    number: int


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_int * 16))


# Programs of a grid, threads of a program, bytes of shared memory.
SIZES = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, c_uint) for name in SIZES), ("stream", c_void_p), ("attributes", c_void_p), ("count", c_uint)
    )  # fmt: skip


class Packer:
    """Packs the arguments of a compiled kernel, which is kept.

    kinds: the types of its arguments as Triton's signature has them, descriptors as ``map``, in tuples where it takes
    tuples. shape: threads of a program and bytes of its shared memory. stream_of: the current stream of ``device``.
    """

    def __init__(
        self, compiled: Any, kinds: Sequence[Any], shape: tuple[int, int], dependent: bool,
        stream_of: Callable[[int], int], device: int,
    ) -> None:  # fmt: skip
        self._kept, self._kinds, self._shape = compiled, kinds, shape
        self._stream_of, self._device = stream_of, device
        leaves = [*_leaves(kinds), *_SCRATCH]
        self._maps = [i for i, kind in enumerate(leaves) if kind == _MAP]
        self._struct = struct.Struct("<" + "".join([_FORMATS[kind] for kind in leaves]))
        own = [Attribute(MAY_START_BEFORE_THE_LAST_HAS_ENDED, 0, (c_int * 16)(1))] if dependent else []
        self._attributes = (Attribute * len(own))(*own)
        self._launch = driver().launch

    def pack(
        self, grid: tuple[int, int, int], arguments: tuple[Any, ...], is_watched: Callable[[], bool]
    ) -> Callable[..., bool] | None:
        """What starts the kernel, called with the addresses that :class:`Late` stands for: False, and nothing started,
        where it is watched or the driver refuses. None where an argument cannot be packed.
        """
        values: list[Any] = []
        _append(values, self._kinds, arguments)
        late = {i: value.number for i, value in enumerate(values) if type(value) is Late}
        of_maps = {i: place_of(values[i]) for i in self._maps}
        maps = {i: place for i, place in of_maps.items() if place is not None}
        plain = [0 if i in late else value for i, value in enumerate(values) if i not in of_maps]
        try:
            packed = self._struct.pack(*plain, 0, 0)
        except (struct.error, OverflowError):
            return None
        if len(maps) < len(of_maps) or 0 in grid:
            return None
        size, count = self._struct.size, 1 + max(late.values(), default=-1)
        launch, stream_of, device = self._launch, self._stream_of, self._device
        function, attributes = c_void_p(self._kept.function), self._attributes

        def make() -> tuple[Any, ...]:
            memory = (c_uint64 * (count + size // _WORD))()
            begin = ctypes.addressof(memory) + count * _WORD
            ctypes.memmove(begin, packed, size)
            places = list(range(begin, begin + size, _WORD))
            for i, number in late.items():
                places[i] = begin + (number - count) * _WORD
            for i, place in maps.items():
                places[i] = place
            at = ctypes.addressof(attributes), len(attributes)
            config = Config(*grid, self._shape[0], 1, 1, self._shape[1], None, *at)
            return memory, config, (byref(config), function, (c_void_p * len(places))(*places), None)

        # Each thread that starts it has memory of its own meanwhile.
        free = [make()]
        take, put = free.pop, free.append

        # Descriptors are handed on where they lie, of a kernel that is loaded.
        def start(*addresses: int, kept: Any = (self, [values[i] for i in maps])) -> bool:
            if is_watched():
                return False
            try:
                own = take()
            except IndexError:
                own = make()
            memory, config, given = own
            if count:
                memory[:count] = addresses
            config.stream = stream_of(device)
            code = launch(*given)
            put(own)
            return code == 0

        return start


def find_packer(compiled: Any, stream_of: Callable[[int], int], device: int) -> Packer | None:
    """What packs the arguments of what ``kernel[grid](...)`` returned; None where they are not known."""
    try:
        import triton

        launcher = compiled.run
        if not triton.__version__.startswith(_VERSIONS) or launcher.launch_cooperative_grid:
            return None
        warps, programs_of_a_cluster, shared = compiled.packed_metadata
        metas = getattr(compiled.metadata, "tensordesc_meta", None) or ()
        kinds = _kinds(compiled.src.signature.values(), metas)
        leaves = [*_leaves(kinds), *_SCRATCH]
        known = programs_of_a_cluster == 1 and all(kind in _FORMATS for kind in leaves)
        if not known or driver().sizes_of(compiled.function) != [_size(kind) for kind in leaves]:
            return None
        return Packer(compiled, kinds, (32 * warps, shared), launcher.launch_pdl, stream_of, device)
    except (ImportError, AttributeError, TypeError, ValueError, OSError):
        return None


def _kinds(signature: Iterable[Any], metas: Sequence[Any]) -> list[Any]:
    """The types of what Triton's C function is called with: a descriptor with its sizes and strides."""
    kinds: list[Any] = []
    descriptors = 0
    for kind in signature:
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            if descriptors >= len(metas) or metas[descriptors] is None:
                raise ValueError("a descriptor that travels as a pointer")
            descriptors += 1
            shape = re.match(r"tensordesc<[^[>]*\[([^]]*)\]", kind)
            if shape is None:
                raise ValueError(kind)
            rank = shape[1].count(",") + 1
            kinds += [_MAP, *rank * ["i32"], *rank * ["i64"]]
        else:
            kinds.append(_short(kind))
    return kinds


def _short(kind: Any) -> Any:
    if isinstance(kind, tuple):
        return tuple([_short(one) for one in kind])
    return "*" if kind.startswith("*") else kind


def _leaves(kinds: Iterable[Any]) -> list[str]:
    """Of parameters of the kernel: constants are none."""
    found: list[str] = []
    for kind in kinds:
        if isinstance(kind, tuple):
            found += _leaves(kind)
        elif kind != _CONSTANT:
            found.append(kind)
    return found


def _append(values: list[Any], kinds: Sequence[Any], arguments: Sequence[Any]) -> None:
    for kind, value in zip(kinds, arguments, strict=True):
        if type(kind) is tuple:
            _append(values, kind, value)
        elif kind != _CONSTANT:
            values.append(value)


def _size(kind: str) -> int:
    return MAP_BYTES if kind == _MAP else struct.calcsize("<" + _FORMATS[kind][0])


class Driver:
    """The functions of the CUDA driver that are needed."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self.launch: Callable[..., int] = self._cuda.cuLaunchKernelEx

    def sizes_of(self, function: int) -> list[int]:
        """Bytes of each parameter of a CUfunction."""
        sizes: list[int] = []
        offset, size = c_size_t(), c_size_t()
        # Past the last one an error says so.
        while not self._cuda.cuFuncGetParamInfo(c_void_p(function), c_size_t(len(sizes)), byref(offset), byref(size)):
            sizes.append(size.value)
        return sizes


@lru_cache
def driver() -> Driver:
    return Driver()
