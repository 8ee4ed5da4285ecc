"""TMA descriptors: how a tensor is addressed by one, and what the L2 cache fetches for its loads.

Triton encodes all of them so that L2 fetches whole lines of 128 bytes. Where rows are no whole lines, such as heads of
80 numbers of 16 bits, what is read of memory then includes a part of their neighbours. The driver encodes others.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

# CUtensorMapL2promotion by bytes, and the one that Triton has; bytes of a CUtensorMap.
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
TRITONS = 128
MAP_BYTES = 128


class TmaBox(NamedTuple):
    """How a tensor is addressed by a TMA descriptor: sizes and strides in its order of dimensions, the last of stride 1
    and the others of whole 16 bytes; and the box that one TMA load or store moves.

    Shared memory is swizzled over the 128, 64 or 32 bytes that divide the box's last dimension, if any do; or, not
    ``swizzled``, it holds the box as it is.
    ``promotion``: the bytes, 64, 128 or 256, of which L2 fetches all where a load takes any; 0: what it takes.
    """

    sizes: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]
    element_bits: int = 16
    promotion: int = TRITONS
    swizzled: bool = True

    @property
    def layout(self) -> Any:
        """Gluon's layout of the box in shared memory."""
        return _swizzled(self.swizzle_bytes, self.element_bits, len(self.box))

    @property
    def swizzle_bytes(self) -> int:
        """Bytes of a row over which shared memory is swizzled, 0 if it is not."""
        row_bytes = self.box[-1] * self.element_bits // 8
        return next((width for width in (128, 64, 32) if self.swizzled and row_bytes % width == 0), 0)


@lru_cache
def _swizzled(swizzle_bytes: int, element_bits: int, rank: int) -> Any:
    # Making one takes 30 us of host time, and each new size of a batch makes several.
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_bytes, element_bits, rank=rank)


def promote(made: Any, meta: Mapping[str, Any], descriptor: Any, promotion: int) -> None:
    """Encode ``made``, Triton's map of a descriptor for a kernel's ``meta``, with another promotion, in its place.

    Where that is not laid out as it is known to be, or the driver is not found, it stays as it is, which a warning says
    once: loads are as right.
    """
    encode, place = _driver(), place_of(made)
    if encode is not None and place is not None:
        wanted = _encoded(encode, meta, descriptor, promotion)
        if wanted is not None and ctypes.string_at(place, MAP_BYTES) == _encoded(encode, meta, descriptor, TRITONS):
            ctypes.memmove(place, wanted, MAP_BYTES)
            return
    _warn_once()


@lru_cache
def _warn_once() -> None:
    """An engine may bring a Triton that this was not written for, with which kernels would be slower without a word."""
    import triton

    said = f"TMA descriptors of Triton {triton.__version__} cannot be encoded anew"
    warnings.warn(f"{said}: narrow heads take more of the memory's bandwidth; results are right", stacklevel=2)


def place_of(made: Any) -> int | None:
    """Where Triton's object has its CUtensorMap, which ends it."""
    known = type(made).__name__ == "PyCUtensorMap" and type(made).__basicsize__ >= 2 * MAP_BYTES
    return id(made) + type(made).__basicsize__ - MAP_BYTES if known else None


def _encoded(encode: Callable[..., int], meta: Mapping[str, Any], descriptor: Any, promotion: int) -> bytes | None:
    """What the driver makes of it; None where it does not."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    rank = len(descriptor.shape)
    # Aligned to 64 bytes, as the driver wants it.
    memory = (ctypes.c_char * (MAP_BYTES + 64))()
    place = -(-ctypes.addressof(memory) // 64) * 64
    # The dimension in which elements lie side by side comes first, and its stride is not asked for.
    sizes = (ctypes.c_uint64 * rank)(*reversed(descriptor.shape))
    strides = (ctypes.c_uint64 * rank)(*(meta["elem_size"] * stride for stride in reversed(descriptor.strides[:-1])))
    box = (ctypes.c_uint32 * rank)(*reversed(meta["block_size"]))
    steps = (ctypes.c_uint32 * rank)(*rank * (1,))
    address, kind = ctypes.c_void_p(descriptor.base.data_ptr()), TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    # Not interleaved, and zeros out of bounds.
    code = encode(
        ctypes.c_void_p(place), kind, rank, address, sizes, strides, box, steps, 0, meta["swizzle"],
        _PROMOTIONS[promotion], 0,
    )  # fmt: skip
    return None if code else ctypes.string_at(place, MAP_BYTES)


@lru_cache
def _driver() -> Callable[..., int] | None:
    """The driver's cuTensorMapEncodeTiled."""
    try:
        found: Callable[..., int] = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
        return found
    except (OSError, AttributeError):
        return None
