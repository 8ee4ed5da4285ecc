"""Run Gluon kernels for NVIDIA's sm_90 on a CPU: barriers, copies, products and warps as they behave, without a GPU.

Triton's interpreter knows no Gluon. :func:`shadow` imports the modules of such kernels again over a language of torch
tensors, and :func:`launch` runs one, program after program, each warp-specialised partition in a thread of its own:

- shared memory is NaN until written, and lies as ``NVMMASharedLayout`` lays it (but for the swizzle, which views with
  the same swizzle share): views of the same bytes in other shapes are real;
- a copy of the tensor memory accelerator arrives late, at random, and is counted by its barrier in bytes; what lies
  outside of the tensor is zero; a barrier that is arrived at too often, or waited for in vain, is an error;
- a product reads its operands from shared memory when it is waited for, not when it is issued: a place that is freed
  too early is met with the next tile in it; accumulators cannot be read while in flight;
- in each program one partition, chosen at random, is slower than the others by far: a barrier tells only odd phases
  from even ones, and who runs ahead of it by two takes the past for the future;
- loads and stores outside of a tensor's memory raise IndexError.

Layouts of registers say nothing here, nor do swizzles, banks, fences, barriers within a partition, nor how threads of
one partition race. Products are in float32. Known are the names that the kernels of this repository use.
"""

from __future__ import annotations

import importlib.util
import inspect
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch

from kernel_reference.launching import TmaBox

__all__ = ["Descriptor", "launch", "shadow"]

Tensor = torch.Tensor
# Past this a barrier that nobody arrives at is taken for a deadlock; a step takes milliseconds.
_PATIENCE_S = 60.0
# The longest that a copy is on its way.
_LATE_S = 0.002
# How long the slow partition stops wherever it meets the others.
_SLOW_S = 0.001


class _DType:
    def __init__(self, dtype: torch.dtype) -> None:
        self.torch = dtype
        self.primitive_bitwidth = 8 * dtype.itemsize

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _DType) and other.torch == self.torch

    def __hash__(self) -> int:
        return hash(self.torch)


def _raw(value: Any) -> Any:
    return value.data if isinstance(value, _Value) else value


def _in_64_bits(value: Any) -> Tensor:
    return torch.as_tensor(_raw(value)).double()


def _truncated(a: Any, b: Any) -> Tensor:
    return torch.div(*_promoted(a, b), rounding_mode="trunc")


def _remainder(a: Any, b: Any) -> Tensor:
    return torch.fmod(*_promoted(a, b))


class _Value:
    """A number or a tile in registers; integers divide as in C."""

    def __init__(self, data: Any) -> None:
        self.data = data if isinstance(data, Tensor) else torch.tensor(data, dtype=_dtype_of_number(data))

    @property
    def dtype(self) -> _DType:
        return _DType(self.data.dtype)

    @property
    def type(self) -> SimpleNamespace:
        """Its layout is none: all threads have all."""
        return SimpleNamespace(layout=None)

    def to(self, dtype: _DType, bitcast: bool = False) -> _Value:
        return _Value(self.data.view(dtype.torch) if bitcast else self.data.to(dtype.torch))

    def __getitem__(self, place: Any) -> _Value:
        return _Value(self.data[place])

    def __index__(self) -> int:
        return int(self.data)

    __int__ = __index__

    def __bool__(self) -> bool:
        return bool(self.data)

    def __neg__(self) -> _Value:
        return _Value(-self.data)

    def __invert__(self) -> _Value:
        return _Value(~self.data)


def _dtype_of_number(number: Any) -> torch.dtype | None:
    return torch.int32 if isinstance(number, int) and not isinstance(number, bool) else None


def _define_operators() -> None:
    def define(name: str, function: Callable[[Any, Any], Any], mirrored: bool) -> None:
        def forwards(a: _Value, b: Any) -> Any:
            # A tile plus a pointer is a pointer.
            return NotImplemented if isinstance(b, _Pointer) else _Value(function(a.data, _raw(b)))

        setattr(_Value, f"__{name}__", forwards)
        if mirrored:
            setattr(_Value, f"__r{name}__", lambda a, b: _Value(function(_raw(b), a.data)))

    for name in ("add", "sub", "mul", "truediv", "and", "or", "xor"):
        define(name, lambda a, b, name=name: getattr(torch.as_tensor(a), f"__{name}__")(b), True)  # type: ignore[misc]
    define("floordiv", _truncated, True)
    define("mod", _remainder, True)
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        define(name, lambda a, b, name=name: getattr(a, f"__{name}__")(b), False)  # type: ignore[misc]


class _Pointer:
    """A tensor's memory, and places in it counted in elements from the first one's."""

    def __init__(self, tensor: Tensor, places: Any = 0) -> None:
        self.tensor, self.places = tensor, places
        self.dtype = SimpleNamespace(element_ty=_DType(tensor.dtype))

    def __add__(self, places: Any) -> _Pointer:
        return _Pointer(self.tensor, _raw(places) + self.places)

    __radd__ = __add__

    def memory(self) -> Tensor:
        tensor = self.tensor
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return torch.as_strided(tensor, (reach + 1 if tensor.numel() else 0,), (1,), tensor.storage_offset())


_define_operators()


def _bytes(tensor: Tensor) -> Tensor:
    # Indexing is not implemented for 8-bit floats.
    return tensor.view(torch.uint8) if tensor.element_size() == 1 and tensor.dtype.is_floating_point else tensor


def _reached(pointer: _Pointer, *others: Any) -> list[Tensor]:
    """A pointer's places and others, broadcast; the places that the last one, a mask, leaves are in memory."""
    parts = [torch.as_tensor(_raw(part)) for part in (pointer.places, *others)]
    places, *rest = torch.broadcast_tensors(*parts)
    used, size = places[rest[-1]], pointer.memory().numel()
    if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < size:
        raise IndexError(f"elements {int(used.min())} to {int(used.max())} of memory that holds {size}")
    return [places.long(), *rest]


def _load(pointer: _Pointer, mask: Any = True, other: Any = 0) -> _Value:
    places, seen = _reached(pointer, mask)
    memory = _bytes(pointer.memory())
    found = memory[places.clamp(0, max(memory.numel() - 1, 0))] if memory.numel() else memory.new_zeros(places.shape)
    return _Value(torch.where(seen, found, torch.as_tensor(_raw(other)).to(memory.dtype)).view(pointer.tensor.dtype))


def _store(pointer: _Pointer, value: Any, mask: Any = True) -> None:
    memory = pointer.memory()
    places, values, seen = _reached(pointer, torch.as_tensor(_raw(value)), mask)
    _bytes(memory)[places[seen]] = _bytes(values[seen].to(memory.dtype))


class _Layout:
    """A layout of registers, which says nothing here, or of shared memory without an order of its own."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


class _MBarrierLayout(_Layout): ...


class _NVMMASharedLayout(_Layout):
    """Rows of ``swizzle_byte_width`` bytes; a tile's further columns come after all of its rows."""

    def __init__(self, swizzle_byte_width: int, element_bitwidth: int, rank: int = 2, **_: Any) -> None:
        self.columns = swizzle_byte_width * 8 // element_bitwidth

    @staticmethod
    def get_default_for(block: Sequence[int], dtype: _DType, **_: Any) -> _NVMMASharedLayout:
        width = min(128, block[-1] * dtype.primitive_bitwidth // 8)
        return _NVMMASharedLayout(width, dtype.primitive_bitwidth)


class _Shared:
    """A view of shared memory: tiles of the last two dimensions, one after the other."""

    def __init__(self, memory: Tensor, dtype: _DType, shape: Sequence[int], layout: Any, first: int = 0) -> None:
        self.memory, self.dtype, self.shape, self.layout, self.first = memory, dtype, list(shape), layout, first
        self.window: tuple[int, int, int, int] | None = None
        self.transposed = False

    def _view(self, shape: Sequence[int], layout: Any, first: int) -> _Shared:
        return _Shared(self.memory, self.dtype, shape, layout, first)

    def index(self, i: Any) -> _Shared:
        if not 0 <= int(i) < self.shape[0]:
            raise IndexError(f"place {int(i)} of {self.shape[0]} in shared memory")
        size = int(torch.tensor(self.shape[1:]).prod())
        return self._view(self.shape[1:], self.layout, self.first + int(i) * size)

    def reshape(self, shape: Sequence[int]) -> _Shared:
        return self._view(shape, self.layout, self.first)

    def _reinterpret(self, dtype: _DType, shape: Sequence[int], layout: Any) -> _Shared:
        if dtype.torch.itemsize != self.dtype.torch.itemsize:
            raise ValueError(f"{dtype.torch} has not the size of {self.dtype.torch}")
        if int(torch.tensor(shape).prod()) != self.memory.numel():
            raise ValueError(f"{list(shape)} is not the whole of shared memory that holds {self.memory.numel()}")
        return _Shared(self.memory.view(dtype.torch), dtype, shape, layout, self.first)

    def permute(self, order: Sequence[int]) -> _Shared:
        view = self._view(self.shape[::-1], self.layout, self.first)
        view.window, view.transposed = self.window, not self.transposed
        return view

    def slice(self, start: int, length: int, dim: int = 0) -> _Shared:
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise IndexError(f"from {start} to {start + length} of {self.shape[dim]} in shared memory")
        shape, window = list(self.shape), list(self.window or (0, 0, *self.shape))
        shape[dim] = length
        window[dim] += start
        view = self._view(shape, self.layout, self.first)
        view.window = (window[0], window[1], window[2], window[3])
        return view

    def _places(self) -> Tensor:
        shape = [1, *self.shape][-2:]
        rows, columns = shape[::-1] if self.transposed else shape
        first_row, first_column, all_rows, all_columns = self.window or (0, 0, rows, columns)
        row = first_row + torch.arange(rows)[:, None]
        column = first_column + torch.arange(columns)
        width = self.layout.columns if isinstance(self.layout, _NVMMASharedLayout) else all_columns
        places = self.first + column // width * (all_rows * width) + row * width + column % width
        return (places.T if self.transposed else places).reshape(self.shape[-2:])

    def load(self, layout: Any = None) -> _Value:
        return _Value(_bytes(self.memory)[self._places()].view(self.memory.dtype))

    def store(self, value: Any) -> None:
        places, new = self._places(), _raw(value).to(self.memory.dtype)
        _bytes(self.memory)[places] = _bytes(new.reshape(places.shape) if new.numel() == places.numel() else new)


class _Barrier:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.pending = self.bytes = self.phase = 0

    def take(self, arrivals: int, expected: int) -> None:
        with self.changed:
            self.pending -= arrivals
            self.bytes += expected
            if self.pending < 0 or self.bytes < 0:
                raise RuntimeError("a barrier was arrived at more often, or by more bytes, than it waits for")
            if self.pending == self.bytes == 0:
                self.phase ^= 1
                self.pending = self.count
                self.changed.notify_all()


class _Barriers:
    def __init__(self, count: int) -> None:
        self.barriers = [_Barrier() for _ in range(count)]

    def index(self, i: Any) -> _Barrier:
        return self.barriers[int(i)]


class _Stopped(Exception):
    """Another partition has failed."""


class _Program:
    """What the threads of one program share."""

    number = 0
    count = 1
    failed = threading.Event()
    errors: ClassVar[list[BaseException]] = []
    # Copies that have not arrived.
    on_the_way: ClassVar[set[threading.Timer]] = set()
    landing = threading.RLock()
    own = threading.local()

    @classmethod
    def fail(cls, error: BaseException) -> None:
        cls.errors.append(error)
        cls.failed.set()


def _linger() -> None:
    """Let another partition go first, now and then."""
    if getattr(_Program.own, "slow", False):
        time.sleep(_SLOW_S)
    elif random.random() < 0.3:
        time.sleep(0)


def _init(barrier: _Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def _expect(barrier: _Barrier, size: int, pred: Any = True) -> None:
    if pred:
        barrier.take(1, int(size))


def _arrive(barrier: _Barrier, count: int = 1, pred: Any = True) -> None:
    _linger()
    if pred:
        barrier.take(count, 0)


def _wait(barrier: _Barrier, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    end = time.monotonic() + _PATIENCE_S
    with barrier.changed:
        while pred and barrier.phase == int(phase):
            barrier.changed.wait(0.1)
            if _Program.failed.is_set():
                raise _Stopped
            if time.monotonic() > end:
                raise RuntimeError("a deadlock: a barrier is waited for that nobody arrives at")
    _linger()


class Descriptor:
    """A tensor as the tensor memory accelerator sees it: sizes and strides in elements, and the box that it copies."""

    def __init__(
        self, tensor: Tensor, shape: Sequence[int], strides: Sequence[int], block_shape: Sequence[int], layout: Any
    ) -> None:
        self.tensor, self.sizes, self.strides, self.layout = tensor, shape, strides, layout
        self.dtype = _DType(tensor.dtype)
        size = int(torch.tensor(block_shape).prod()) * tensor.element_size()
        self.block_type = SimpleNamespace(shape=list(block_shape), nbytes=size)

    def box(self, coordinates: Sequence[Any]) -> tuple[_Pointer, Tensor]:
        """Where a box begins and which of its elements the tensor has."""
        shape = self.block_type.shape
        places, there = torch.zeros(shape, dtype=torch.long), torch.ones(shape, dtype=torch.bool)
        for dim, first in enumerate(coordinates):
            along = (int(first) + torch.arange(shape[dim])).reshape([-1 if d == dim else 1 for d in range(len(shape))])
            places = places + along * self.strides[dim]
            there = there & (along >= 0) & (along < self.sizes[dim])
        return _Pointer(self.tensor, places), there


def _copy_to_shared(d: Descriptor, coordinates: Any, barrier: _Barrier, place: _Shared, pred: Any = True) -> None:
    if not pred:
        return
    box = _load(*d.box(coordinates))

    def arrive() -> None:
        place.store(_Value(box.data.reshape(box.data.shape[-2:])))
        # Otherwise a program could end between the two.
        with _Program.landing:
            _Program.on_the_way.discard(timer)
            try:
                barrier.take(0, -d.block_type.nbytes)
            except RuntimeError as error:
                # Raised in a thread of its own, it would be nobody's.
                _Program.fail(error)

    timer = threading.Timer(random.random() * _LATE_S, arrive)
    if random.random() < 0.5:
        arrive()
    else:
        _Program.on_the_way.add(timer)
        timer.start()


def _copy_from_shared(d: Descriptor, coordinates: Any, place: _Shared) -> None:
    pointer, there = d.box(coordinates)
    _store(pointer, _Value(place.load().data.reshape(there.shape)), there)


class _InFlight:
    """A product that has been issued, and is made when it is waited for."""

    def __init__(self, make: Callable[[], _Value]) -> None:
        self.make = make
        self.made: _Value | None = None


def _multiply(a: Any, b: _Shared, acc: Any, use_acc: Any = True, is_async: bool = False, **_: Any) -> Any:
    def make() -> _Value:
        left = (a if isinstance(a, _Value) else a.load()).data
        product = left.float() @ b.load().data.float()
        return _Value(product + acc.data if use_acc else product)

    issued = _InFlight(make)
    _queue().append(issued)
    return issued if is_async else _wait_for_products(0, [issued])


def _queue() -> list[_InFlight]:
    queue: list[_InFlight] = _Program.own.__dict__.setdefault("queue", [])
    return queue


def _wait_for_products(num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
    _linger()
    queue = _queue()
    while len(queue) > num_outstanding:
        oldest = queue.pop(0)
        oldest.made = oldest.make()
    results = tuple(x.made if isinstance(x, _InFlight) else x for x in deps)
    if any(result is None for result in results):
        raise RuntimeError("an accumulator is read while its product is in flight")
    return results[0] if len(results) == 1 else results


def _warp_specialize(partitions: Sequence[Any], worker_num_warps: Any, worker_num_regs: Any = None) -> None:
    slow = random.randrange(len(partitions))

    def run(i: int, function: Callable[..., None], arguments: Any) -> None:
        _Program.own.slow = i == slow
        try:
            function(*arguments)
        except _Stopped:
            pass
        except BaseException as error:
            _Program.fail(error)

    threads = [threading.Thread(target=run, args=(i, *partition)) for i, partition in enumerate(partitions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if _Program.errors:
        raise _Program.errors[0]


def _allocate(dtype: _DType, shape: Sequence[int], layout: Any, value: Any = None) -> Any:
    if isinstance(layout, _MBarrierLayout):
        return _Barriers(shape[0])
    size = int(torch.tensor(shape).prod())
    nothing = torch.full((size,), torch.nan if dtype.torch.is_floating_point else -1).to(dtype.torch)
    shared = _Shared(nothing, dtype, shape, layout)
    if value is not None:
        shared.store(value)
    return shared


def _select(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, _Value):
        return a if condition else b
    return _Value(torch.where(condition.data, *_promoted(_raw(a), _raw(b))))


def _promoted(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Of one dtype: a Python number takes the other's."""
    if not isinstance(a, Tensor):
        a = torch.tensor(a, dtype=b.dtype if isinstance(b, Tensor) else _dtype_of_number(a))
    if not isinstance(b, Tensor):
        b = torch.tensor(b, dtype=a.dtype)
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def _extreme(of_tensors: Callable[[Tensor, Tensor], Tensor], of_numbers: Callable[..., Any]) -> Callable[..., Any]:
    def extreme(a: Any, b: Any) -> Any:
        if not isinstance(a, _Value) and not isinstance(b, _Value):
            return of_numbers(a, b)
        return _Value(of_tensors(*_promoted(_raw(a), _raw(b))))

    return extreme


def _assume(condition: Any) -> None:
    if not condition:
        raise RuntimeError("what the kernel assumes is not so")


def _constexpr(value: Any = None) -> Any:
    return value


def _filled(shape: Sequence[int], value: Any, dtype: _DType, layout: Any = None) -> _Value:
    return _Value(torch.full(list(shape), value).to(dtype.torch))


_LANGUAGE: dict[str, Any] = {
    "constexpr": _constexpr,
    "static_range": lambda *bounds: range(*map(int, bounds)),
    "range": lambda *bounds, **_: range(*map(int, bounds)),
    "program_id": lambda axis: _Value(_Program.number),
    "num_programs": lambda axis: _Value(_Program.count),
    "arange": lambda begin, end, layout=None: _Value(torch.arange(begin, end, dtype=torch.int32)),
    "zeros": lambda shape, dtype, layout=None: _filled(shape, 0, dtype),
    "full": _filled,
    "where": _select,
    "minimum": _extreme(torch.minimum, min),
    "maximum": _extreme(torch.maximum, max),
    "cdiv": lambda a, b: (a + b - 1) // b,
    "exp": lambda x: _Value(torch.exp(x.data)),
    "exp2": lambda x: _Value(torch.exp2(x.data)),
    "log": lambda x: _Value(torch.log(x.data)),
    "log2": lambda x: _Value(torch.log2(x.data)),
    "fma": lambda x, y, z: _Value((_in_64_bits(x) * _in_64_bits(y) + _in_64_bits(z)).float()),
    "abs": lambda x: _Value(torch.abs(x.data)),
    "max": lambda x, axis: _Value(x.data.amax(axis)),
    "sum": lambda x, axis: _Value(x.data.sum(axis)),
    "load": _load,
    "store": _store,
    "reshape": lambda x, shape: _Value(x.data.reshape([int(size) for size in shape])),
    "convert_layout": lambda x, layout: x,
    "inline_asm_elementwise": lambda asm, constraints, arguments, *_, **__: arguments[0],
    "to_tensor": lambda x: x if isinstance(x, _Value) else _Value(x),
    "allocate_shared_memory": _allocate,
    "warp_specialize": _warp_specialize,
    "debug_barrier": _linger,
    "assume": _assume,
    "NVMMASharedLayout": _NVMMASharedLayout,
    **dict.fromkeys(
        ("SwizzledSharedLayout", "NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout"), _Layout
    ),
    **{str(dtype).removeprefix("torch."): _DType(dtype) for dtype in (
        torch.int32, torch.int64, torch.float32, torch.float16, torch.bfloat16
    )},
}  # fmt: skip


def _jit(function: Any = None, **_: Any) -> Any:
    return (lambda decorated: decorated) if function is None else function


def _languages() -> dict[str, ModuleType]:
    barrier = SimpleNamespace(MBarrierLayout=_MBarrierLayout, init=_init, expect=_expect, arrive=_arrive, wait=_wait)
    copies = SimpleNamespace(
        async_copy_global_to_shared=_copy_to_shared, async_copy_shared_to_global=_copy_from_shared,
        store_wait=lambda pendings: None,
    )  # fmt: skip
    hopper = {
        "fence_async_shared": _linger, "mbarrier": barrier, "tma": copies, "warpgroup_mma": _multiply,
        "warpgroup_mma_wait": _wait_for_products,
    }  # fmt: skip
    jit = {"jit": _jit, "constexpr_function": lambda function: function}
    contents = {
        "triton": {**jit, "cdiv": _LANGUAGE["cdiv"]}, "triton.language": _LANGUAGE, "triton.experimental": {},
        "triton.experimental.gluon": jit, "triton.experimental.gluon.language": _LANGUAGE,
        "triton.experimental.gluon.language.nvidia": {}, "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "triton.experimental.gluon.nvidia": {},
        "triton.experimental.gluon.nvidia.hopper": {"TensorDescriptor": Descriptor},
    }  # fmt: skip
    modules: dict[str, ModuleType] = {}
    for name, content in contents.items():
        module = modules[name] = ModuleType(name)
        module.__dict__.update(content, __path__=[])
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(modules[parent], leaf, module)
    return modules


@contextmanager
def _in_place_of(modules: dict[str, ModuleType], anew: Sequence[str]) -> Iterator[None]:
    before = {name: sys.modules.get(name) for name in (*modules, *anew)}
    try:
        sys.modules.update(modules)
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def shadow(*names: str) -> list[ModuleType]:
    """Modules of device code, imported again over the language of this module, in the order of their imports.

    ``names`` are all those of which a kernel takes device functions. The modules that were imported before stay as they
    are, and so does Triton. Raises ImportError for a name that there is not.
    """
    specs = [importlib.util.find_spec(name) for name in names]
    shadows = []
    with _in_place_of(_languages(), names):
        for name, spec in zip(names, specs, strict=True):
            if spec is None or spec.loader is None:
                raise ImportError(f"there is no module {name}")
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
            shadows.append(module)
    return shadows


def _pointers_in(argument: Any) -> Any:
    """A tensor's pointer; of a tuple, a NamedTuple too, those of the tensors in it beside all else."""
    if isinstance(argument, tuple):
        found = [_pointers_in(element) for element in argument]
        return type(argument)(*found) if hasattr(argument, "_fields") else tuple(found)
    return _Pointer(argument) if isinstance(argument, Tensor) else argument


def launch(kernel: Callable[..., None], programs: int, *arguments: Any) -> None:
    """Run a shadow's kernel, one program after the other.

    ``arguments`` are the kernel's: :class:`Descriptor`, torch tensors on the CPU for pointers, None, numbers, and
    tuples of all these but descriptors. Raises what the kernel does: IndexError for memory that is not a tensor's,
    RuntimeError for a deadlock, a barrier arrived at too often, an accumulator read too early, and a copy that nobody
    waited for.
    """
    parameters = inspect.signature(kernel).parameters.values()
    given: list[Any] = []
    for parameter, argument in zip(parameters, arguments, strict=True):
        if isinstance(argument, (Tensor, tuple)):
            given.append(_pointers_in(argument))
        elif isinstance(argument, int) and parameter.annotation is inspect.Parameter.empty:
            given.append(_Value(argument))
        else:
            given.append(argument)
    _Program.count = programs
    for number in range(programs):
        _Program.number = number
        _Program.failed.clear()
        _Program.errors.clear()
        _Program.on_the_way.clear()
        kernel(*given)
        with _Program.landing:
            late = bool(_Program.on_the_way)
        if _Program.errors:
            raise _Program.errors[0]
        if late:
            raise RuntimeError("a program ended while copies to its shared memory were on their way")


def tma_launch(module: ModuleType) -> type:
    """What stands in for :class:`kernel_reference.launching.TmaLaunch` where kernels run here.

    ``module`` is the :func:`shadow` of the one that holds the kernels. A test puts it in place::

        monkeypatch.setattr(launch, "TmaLaunch", gluon.tma_launch(hopper))
    """

    class Launch:
        def __init__(
            self, kernel: Any, grid: tuple[int, int, int], rest: tuple[Any, ...], device: torch.device,
            boxes: Sequence[TmaBox], *, group: Callable[..., tuple[Any, ...]] | None = None, **_: Any,
        ) -> None:  # fmt: skip
            self.kernel = getattr(module, kernel.fn.__name__)
            self.programs, self.rest, self.group = grid[0], rest, group
            self.forms = [
                (box.sizes, box.strides, box.box, _NVMMASharedLayout(box.swizzle_bytes, box.element_bits, len(box.box)))
                for box in boxes
            ]

        def __call__(self, *tensors: Tensor | None) -> None:
            described, others = tensors[: len(self.forms)], tensors[len(self.forms) :]
            descriptors: list[Descriptor] = []
            for tensor, form in zip(described, self.forms, strict=True):
                descriptors.append(descriptors[0] if tensor is None else Descriptor(tensor, *form))
            grouped = others if self.group is None else self.group(*others)
            launch(self.kernel, self.programs, *descriptors, *grouped, *self.rest)

    return Launch
