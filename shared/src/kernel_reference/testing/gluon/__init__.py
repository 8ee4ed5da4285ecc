"""Run Gluon kernels for NVIDIA's sm_90 on a CPU: barriers, TMA, WGMMA and warps as they behave, without a GPU.

Triton's interpreter knows no Gluon. :func:`shadow` imports the modules of such kernels again over a language of torch
tensors (:mod:`.language`), and :func:`launch` runs one, program after program. Its warp-specialised partitions take
turns at random wherever they may meet, in a time of the simulation's own:

- shared memory is NaN until written, and lies as ``NVMMASharedLayout`` and ``SharedLinearLayout`` lay it: views of the
  same bytes in other shapes are real;
- a TMA load arrives late, at random, and its barrier counts it in bytes; what is out of the tensor's bounds is zero; a
  barrier that is arrived at too often, or never completed, is an error;
- elements that are copied one by one (`async_copy`) arrive late too, and a barrier is arrived at behind them;
- a WGMMA reads its operands from shared memory when it is waited for, not when it is issued: a stage that is freed too
  early is met with the next tile in it; accumulators cannot be read while in flight;
- in each program one partition, chosen at random or by :func:`slow_partition`, is far slower than the others: a
  barrier tells only odd phases from even ones, and a partition that runs ahead of it by two takes the past for the
  future;
- loads and stores out of a tensor's memory raise IndexError.

Layouts of registers say nothing here, nor do banks, fences, barriers within a partition, nor races between
the threads of one partition. Products are summed in float32, and under :func:`truncated_sums` as tensor cores sum them.
Known are the names that the kernels of this repository use.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import torch

from kernel_reference.launching import TmaBox
from kernel_reference.testing.gluon.language import languages
from kernel_reference.testing.gluon.memory import Descriptor, NVMMASharedLayout
from kernel_reference.testing.gluon.pipeline import Products, Program, Stopped
from kernel_reference.testing.gluon.values import Pointer, Value

__all__ = ["Descriptor", "launch", "shadow", "slow_partition", "tma_launch", "truncated_sums"]

Tensor = torch.Tensor


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
    with _in_place_of(languages(), names):
        for name, spec in zip(names, specs, strict=True):
            if spec is None or spec.loader is None:
                raise ImportError(f"there is no module {name}")
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
            shadows.append(module)
    return shadows


@contextmanager
def truncated_sums() -> Iterator[None]:
    """Sum products as tensor cores do: 16 columns at a time, each sum cut off to a float32 toward zero.

    Operands are 16-bit floats. A kernel whose results are to have float32's own precision is launched within this: a
    long sum in one accumulator, or one of many small terms behind a large one, then drifts as it does on a GPU (Fasi,
    Higham, Mikaitis and Pranesh, doi:10.7717/peerj-cs.330).
    """
    Products.truncated = True
    try:
        yield
    finally:
        Products.truncated = False


@contextmanager
def slow_partition(i: int) -> Iterator[None]:
    """Make the i-th partition of each program the slow one, so that the others run ahead of it wherever they may."""
    Program.slow = i
    try:
        yield
    finally:
        Program.slow = None


def _pointers_in(argument: Any) -> Any:
    """A tensor's pointer; of a tuple, a NamedTuple too, those of the tensors in it beside all else."""
    if isinstance(argument, tuple):
        found = [_pointers_in(element) for element in argument]
        return type(argument)(*found) if hasattr(argument, "_fields") else tuple(found)
    return Pointer(argument) if isinstance(argument, Tensor) else argument


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
            given.append(Value(argument))
        else:
            given.append(argument)
    Program.count = programs
    for number in range(programs):
        Program.number = number
        program = Program.current = Program()
        # A partition that only stops, as another has failed, says nothing.
        with suppress(Stopped):
            kernel(*given)
        if program.failed:
            raise program.failed
        if program.loads_in_flight:
            raise RuntimeError("a program ended while TMA loads to its shared memory were in flight")


def tma_launch(module: Any) -> type:
    """What stands in for :class:`kernel_reference.launching.TmaLaunch`, or its ``Launch``, where kernels run here.

    ``module`` is the :func:`shadow` of the one that holds the kernels, or has them by name. A test puts it in place::

        monkeypatch.setattr(launch, "TmaLaunch", gluon.tma_launch(hopper))
    """

    class Launch:
        def __init__(
            self, kernel: Any, grid: tuple[int, int, int], rest: tuple[Any, ...], device: torch.device,
            boxes: Sequence[TmaBox] = (), *, group: Callable[..., tuple[Any, ...]] | None = None, **_: Any,
        ) -> None:  # fmt: skip
            self.kernel = getattr(module, kernel.fn.__name__)
            self.programs, self.rest, self.group = grid[0], rest, group
            self.forms = [
                (box.sizes, box.strides, box.box, NVMMASharedLayout(box.swizzle_bytes, box.element_bits, len(box.box)))
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
