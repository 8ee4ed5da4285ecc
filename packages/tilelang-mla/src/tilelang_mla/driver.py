"""Starts of compiled kernels by the CUDA driver alone.

The host function that TileLang makes of a kernel checks shapes and encodes descriptors in every call, 5 to 8 us of the
host's time. Where shapes are those of an earlier call, what it hands to the driver differs in addresses alone. So it is
recorded once, in a captured graph that never runs, and launched with other addresses from then on::

    again = Replay(attend, arguments)  # a compiled function, and arguments of a call
    again([tensor.data_ptr(), ...], stream)  # the same with other tensors, in the arguments' order
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p
from functools import lru_cache
from operator import itemgetter
from threading import Lock
from typing import Any, NamedTuple

import torch

from kernel_reference.packing import MAY_START_BEFORE_THE_LAST_HAS_ENDED, SIZES, Attribute, Config

# CUtensorMap, which is aligned so; an address.
_MAP, _ALIGNED, _ADDRESS = 128, 64, 8
# Encoded descriptors that a launch keeps, of each of its tensors: as many as a model has layers.
_MOST_MAPS = 512
_RELAXED, _PROGRAMS_OF_A_CLUSTER = 2, 4


class Found(NamedTuple):
    """A launch: CUfunction; programs, threads and bytes of shared memory as in SIZES; its parameters' bytes.

    cluster: its programs in each dimension, 0 where there are none.
    """

    function: int
    sizes: tuple[int, ...]
    parameters: list[bytes]
    cluster: tuple[int, ...] = (0, 0, 0)


class _Node(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", c_void_p), *((name, c_uint) for name in SIZES), ("parameters", ctypes.POINTER(c_void_p)),
        ("extra", c_void_p), ("kernel", c_void_p), ("context", c_void_p),
    )  # fmt: skip


class Driver:
    """The functions of the CUDA driver that are needed. RuntimeError where one fails."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self.launch: Callable[..., int] = self._cuda.cuLaunchKernelEx

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {code}")

    def find(self, start: Callable[[], object]) -> Found:
        """The one launch that ``start`` makes on the current stream; nothing is launched."""
        side, graph = torch.cuda.Stream(), c_void_p()
        with torch.cuda.stream(side):
            self._call("cuStreamBeginCapture_v2", c_void_p(side.cuda_stream), _RELAXED)
            try:
                start()
            finally:
                self._call("cuStreamEndCapture", c_void_p(side.cuda_stream), byref(graph))
        try:
            return self._of_graph(graph)
        finally:
            self._call("cuGraphDestroy", graph)

    def _of_graph(self, graph: c_void_p) -> Found:
        count = c_size_t(0)
        self._call("cuGraphGetNodes", graph, None, byref(count))
        nodes = (c_void_p * count.value)()
        self._call("cuGraphGetNodes", graph, nodes, byref(count))
        if count.value != 1:
            raise RuntimeError(f"a graph of {count.value} nodes")
        node, function = _Node(), c_void_p()
        self._call("cuGraphKernelNodeGetParams_v2", c_void_p(nodes[0]), byref(node))
        function.value = node.function
        if not node.function:
            self._call("cuKernelGetFunction", byref(function), c_void_p(node.kernel))
        parameters: list[bytes] = []
        offset, size = c_size_t(), c_size_t()
        # Past the last one an error says so.
        while not self._cuda.cuFuncGetParamInfo(function, c_size_t(len(parameters)), byref(offset), byref(size)):
            parameters.append(ctypes.string_at(node.parameters[len(parameters)], size.value))
        value = (c_int * 16)()
        self._call("cuGraphKernelNodeGetAttribute", c_void_p(nodes[0]), c_int(_PROGRAMS_OF_A_CLUSTER), byref(value))
        return Found(function.value or 0, tuple(getattr(node, name) for name in SIZES), parameters, tuple(value[:3]))

    def readdress(self, place: int, address: int) -> None:
        """Let the CUtensorMap at ``place`` be that of another tensor of the same form."""
        self._call("cuTensorMapReplaceAddress", c_void_p(place), c_void_p(address))


@lru_cache
def driver() -> Driver:
    return Driver()


class Replay:
    """A launch of a compiled function, found with these arguments.

    Args:
        start: the function. It is kept, and with it the module of its kernel.
        given: its arguments; their tensors are at addresses that tell them apart, but for those that always are one.
        dependent: whether the kernel may be started before the one ahead of it has ended, and waits on the device.

    Called with the addresses of all tensors, in the order of the arguments, and a stream: whether it was started.
    RuntimeError if what was found has a parameter that cannot be told.
    """

    def __init__(self, start: Callable[..., object], given: Sequence[Any], dependent: bool = False) -> None:
        self._start, self._driver = start, driver()
        known = [x.data_ptr() for x in given if isinstance(x, torch.Tensor)]
        found = self._driver.find(lambda: start(*given))
        pointers, maps = [], []
        for number, value in enumerate(found.parameters):
            if len(value) == _ADDRESS:
                pointers.append((number, _position(value, known)))
            elif len(value) == _MAP:
                maps.append((number, _position(value, known)))
        self._memory, base, places = _arranged(found.parameters, [number for number, _ in pointers])
        self._base = base
        self._pack = struct.Struct(f"<{len(pointers)}Q").pack_into
        self._pick = _picker([position for _, position in pointers])
        # Of each descriptor its offset, its tensor, what is encoded, and the address that it has now.
        self._maps: list[tuple[int, int, dict[int, bytes]]] = [(places[n], position, {}) for n, position in maps]
        self._at = [0] * len(maps)
        self._parameters = (c_void_p * len(places))(*[base + place for place in places])
        own = [Attribute(MAY_START_BEFORE_THE_LAST_HAS_ENDED, 0, (c_int * 16)(1))] if dependent else []
        if any(found.cluster):
            own.append(Attribute(_PROGRAMS_OF_A_CLUSTER, 0, (c_int * 16)(*found.cluster)))
        self._attributes = (Attribute * len(own))(*own)
        self._config = Config(*found.sizes, None, ctypes.addressof(self._attributes), len(own))
        self._launched = (byref(self._config), c_void_p(found.function), self._parameters, None)
        self._lock = Lock()

    def __call__(self, addresses: Sequence[int], stream: int) -> bool:
        with self._lock:
            self._pack(self._memory, 0, *self._pick(addresses))
            for i, (place, position, encoded) in enumerate(self._maps):
                address = addresses[position]
                if self._at[i] != address:
                    of_tensor = encoded.get(address) or self._encode(place, address, encoded)
                    self._memory[place : place + _MAP] = of_tensor
                    self._at[i] = address
            self._config.stream = stream
            return self._driver.launch(*self._launched) == 0

    def _encode(self, place: int, address: int, encoded: dict[int, bytes]) -> bytes:
        if len(encoded) >= _MOST_MAPS:
            encoded.clear()
        self._driver.readdress(self._base + place, address)
        encoded[address] = bytes(self._memory[place : place + _MAP])
        return encoded[address]


def _position(value: bytes, known: list[int]) -> int:
    """Which tensor a parameter is of: its address, or a descriptor with its address in it."""
    for (address,) in struct.iter_unpack("<Q", value):
        if address and address in known:
            return known.index(address)
    raise RuntimeError("a parameter of no tensor")


def _picker(positions: list[int]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda addresses: tuple(addresses[position] for position in positions)


def _arranged(parameters: list[bytes], first: list[int]) -> tuple[memoryview, int, list[int]]:
    """Memory with the parameters, its address, and where each is: those named lie first, side by side."""
    places, at = [0] * len(parameters), 0
    for number in (*first, *(number for number in range(len(parameters)) if number not in first)):
        size = len(parameters[number])
        at += -at % (_ALIGNED if size == _MAP else _ADDRESS)
        places[number] = at
        at += size
    raw = ctypes.create_string_buffer(at + _ALIGNED)
    skipped = -ctypes.addressof(raw) % _ALIGNED
    memory = memoryview(raw).cast("B")[skipped : skipped + at]
    for place, value in zip(places, parameters, strict=True):
        memory[place : place + len(value)] = value
    return memory, ctypes.addressof(raw) + skipped, places
