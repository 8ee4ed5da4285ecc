"""Launches made ready once and started many times, on the tensors' device and its current stream.

``launch.py`` of a package asks its plan, and makes of it a :class:`Launch` or, where tensors travel as TMA descriptors,
a :class:`TmaLaunch`::

    grid = (cdiv(problem.tokens, plan.block_m) * problem.num_heads, 1, 1)
    rest = (problem.tokens, softmax_scale, q.stride(), plan.block_m, plan.block_n)
    attend = Launch(kernels.attend, grid, rest, q.device, num_warps=plan.num_warps)
    attend(q, k, v, out)  # now, and again with tensors that look like these

Importing this module imports torch alone: neither Triton nor Gluon before the first launch on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from kernel_reference.bindings import Compiled, bind, find_compiled, keep_compiled, signature_of
from kernel_reference.cache_keys import settle_keys
from kernel_reference.devices import DeviceProperties as DeviceProperties
from kernel_reference.devices import device_properties as device_properties
from kernel_reference.devices import has_gluon as has_gluon
from kernel_reference.grouping import checked
from kernel_reference.packing import Late
from kernel_reference.starting import Starter, ensure_context
from kernel_reference.tensor_maps import TmaBox as TmaBox
from kernel_reference.together import begin_triton, gathering

Tensor = torch.Tensor

# Encoded descriptors that a launch keeps, of 1 KB a call: those of a model's layers and of some temporary tensors.
_MOST_MAPS = 512
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Launch:
    """One launch made ready: a kernel, its grid and every argument but the tensors, which are the kernel's first.

    Args:
        kernel: a function under ``triton.jit`` or ``gluon.jit``.
        grid: of three numbers.
        rest: the arguments behind the tensors, by position.
        device: of the tensors.
        as_integers: positions of tensors that travel as integers of their element's size: copies of dtypes that Triton
            does not know, or would change (a bool is normalised to 0 and 1).
        group: makes the kernel's first arguments of the tensors, which it is called with, or of their pointers: tuples,
            NamedTuples, as many of either. Descriptors are not among them. None: each tensor is an argument.
        dependent_launch: whether the kernel may be started before the one ahead of it has ended, and waits on the
            device (programmatic dependent launch: NVIDIA from sm_90 on).
        options: of the compiler: num_warps, num_stages, enable_fp_fusion ...

    Called with tensors, or None where the kernel takes none, of the dtypes, strides and device it was made for. From
    the second call on Triton's binding of arguments is skipped (most of a launch's host time): all that it would
    specialise on is fixed here but the pointers' alignment; tensors that are not 16-byte aligned go through it again.
    In the first call too, where a launch of other sizes has been through it: see bindings.py.
    Where it is known how, Triton's C function is called at once (see starting.py), unless a profiler has set hooks.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        rest: tuple[Any, ...],
        device: torch.device,
        *,
        as_integers: Sequence[int] = (),
        group: Callable[..., tuple[Any, ...]] | None = None,
        dependent_launch: bool = False,
        **options: Any,
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.rest = rest
        self.options = {**options, "launch_pdl": True} if dependent_launch else options
        self.group = group
        # Sizes, strides, box and layout of each TMA descriptor: see TmaLaunch.
        self.boxes: list[tuple[list[int], list[int], list[int], Any]] = []
        self._as_integers = frozenset(as_integers)
        self._guarded = _guarded(device)
        self._kept = _Kept()
        self._run: Callable[..., None] | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        if gathering.found is not None:
            gathering.found.append((self, tensors))
        elif self._guarded is None or self._guarded.index == torch.cuda.current_device():
            self._start(tensors)
        else:
            with torch.cuda.device(self._guarded):
                self._start(tensors)

    def compile(self, *tensors: Tensor | None) -> None:
        """Have Triton compile it for tensors like these, and start nothing."""
        _prepare_triton(self.kernel)
        self.kernel.warmup(*self._bound(tensors), grid=self.grid, **self.options)

    def is_compiled(self, *tensors: Tensor | None) -> bool:
        """Whether it is, for tensors like these, or a launch like this one."""
        if self._kept.compiled is None:
            self._find(tensors)
        return self._kept.compiled is not None

    def resized(self, grid: tuple[int, int, int], counts: tuple[int, ...]) -> Self:
        """The same launch over a batch of other sizes: another grid, and other integers where ``rest`` begins.

        The kernel is not specialised on these (``do_not_specialize``); all else is as it was, the tensors' dtypes and
        strides too. What Triton compiled for either serves both, and nothing is checked or bound for it again.
        """
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.grid, other.rest, other._run = grid, (*counts, *self.rest[len(counts) :]), None
        if not (_are_narrow(counts) and _are_narrow(self.rest[: len(counts)])):
            other._kept = _Kept()
        return other

    def is_ready(self) -> bool:
        """Whether :meth:`at` would start it."""
        starter = self._kept.starter
        return starter is not None and self._guarded is None and not starter.is_watched()

    def at(self, *pointers: int | None) -> bool:
        """Start it on the addresses of tensors, all 16-byte aligned. False, and nothing started, where it must be
        called with the tensors: to be compiled, on another device, for a profiler.

        A call of several launches asks each tensor for its address once.
        """
        if not self.is_ready():
            return False
        grouped: Sequence[Any] = pointers if self.group is None else self.group(*pointers)
        self._kept.starter.start(self.grid, (*grouped, *self.rest))  # type: ignore[union-attr]
        return True

    def but_last(self, *pointers: int | None) -> Callable[[int], bool]:
        """What :meth:`at` does with these addresses and the last tensor's, which it is called with: for what comes
        again. Only where this :meth:`is_ready`."""
        if self.boxes or self.group is not None or self._kept.starter is None:
            return lambda last: self.at(*pointers, last)
        return self._kept.starter.but_last(self.grid, pointers, self.rest)

    def again(self, *pointers: int | Late | None) -> Callable[..., bool] | None:
        """What :meth:`at` does with these addresses, which have come again, called with those that :class:`Late` stands
        for among them. None where :meth:`at` would start nothing.
        """
        count = len(self.boxes)
        maps = self._kept_maps(pointers[:count])
        if maps is None or not self.is_ready():
            return None
        grouped = pointers[count:] if self.group is None else self.group(*pointers[count:])
        return self._kept.starter.again(self.grid, (*maps, *grouped, *self.rest))  # type: ignore[union-attr]

    def arguments(self, *tensors: Tensor | None) -> tuple[Any, ...]:
        """Every argument as the kernel gets it, by position, descriptors as their tensors: for a look at a launch."""
        count = len(self.boxes)
        return *tensors[:count], *self._given(tensors[count:]), *self.rest

    def _start(self, tensors: tuple[Tensor | None, ...]) -> None:
        pointers = [tensor if tensor is None else tensor.data_ptr() for tensor in tensors]
        aligned = not any([pointer & 15 for pointer in pointers if pointer is not None])
        if self._kept.compiled is None and aligned:
            self._find(tensors)
        if self._kept.compiled is not None and aligned:
            grouped: Sequence[Any] = pointers if self.group is None else self.group(*pointers)
            starter = self._kept.starter
            if starter is None or starter.is_watched():
                self._tritons_own_way(*grouped, *self.rest)
            else:
                starter.start(self.grid, (*grouped, *self.rest))
            return
        self._bind(tensors, aligned)

    def _bind(self, tensors: tuple[Tensor | None, ...], aligned: bool) -> None:
        """Triton's own way, which compiles what is not compiled."""
        _prepare_triton(self.kernel)
        compiled = bind(self.kernel, self.grid, self._bound(tensors), self.options)
        # The interpreter compiles nothing and returns None.
        if compiled is not None and aligned:
            self._kept.take(keep_compiled(self._kept.signature, self.kernel, compiled))

    def _bound(self, tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
        """Every argument, as Triton takes it."""
        return *checked(self._given(tensors), self.group, tensors), *self.rest

    def _kept_maps(self, addresses: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """What C takes for the descriptors of tensors with these addresses; None where that is to be made."""
        return ()

    def _find(self, tensors: tuple[Tensor | None, ...]) -> None:
        """Take what a launch like this one compiled, if there was one."""
        boxes = tuple([(tuple(box), layout) for _, _, box, layout in self.boxes])
        others = (self.group, self._as_integers, boxes)
        self._kept.signature = signature_of(self.kernel, self.rest, tensors, others, self.options)
        found = find_compiled(self._kept.signature)
        if found is not None:
            self._kept.take(found)

    def _tritons_own_way(self, *arguments: Any) -> None:
        """What was compiled, with hooks and descriptors, and without binding."""
        if self._run is None:
            self._run = self._kept.compiled[self.grid]
        self._run(*arguments)

    def _given(self, tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
        """The tensors, without those that travel as descriptors, as the kernel gets them."""
        if self._as_integers:
            tensors = tuple([self._as_integer(position, tensor) for position, tensor in enumerate(tensors)])
        return tensors if self.group is None else self.group(*tensors)

    def _as_integer(self, position: int, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or position not in self._as_integers:
            return tensor
        return tensor.view(_INTEGER_OF_SIZE[tensor.element_size()])


class _Kept:
    """What Triton compiled for a launch, and those resized from it, once it has."""

    def __init__(self) -> None:
        self.compiled: Any = None
        self.starter: Starter | None = None
        self.signature: Hashable | None = None

    def take(self, found: Compiled) -> None:
        self.compiled, self.starter = found
        # Asked for no more, and 6 kB.
        self.signature = None


def _prepare_triton(kernel: Any) -> None:
    for thread in begin_triton():
        thread.join()
    settle_keys(kernel)


def _are_narrow(numbers: tuple[int, ...]) -> bool:
    """Whether Triton takes all of these integers as 32 bits: wider ones are another kernel's."""
    return not numbers or (min(numbers) >= -(2**31) and max(numbers) < 2**31)


class TmaLaunch(Launch):
    """A launch whose first tensors travel as TMA descriptors, one for each of ``boxes``: for kernels in Gluon.

    A tensor among them that is None travels as the first. One that a kernel wants as a pointer too is passed once more
    behind them. The descriptors' tensors are 16-byte aligned; the caller sees to that (:func:`by_alignment`).

    >>> walk = TmaLaunch(hopper.walk, grid, rest, q.device, [TmaBox(q.shape, q.stride(), [64, 64]), ...], num_warps=4)
    >>> walk(q, k, v, out, out, slopes)
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        rest: tuple[Any, ...],
        device: torch.device,
        boxes: Sequence[TmaBox],
        **options: Any,
    ) -> None:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        super().__init__(kernel, grid, rest, device, **options)
        self._descriptor = TensorDescriptor
        self.boxes += [(list(box.sizes), list(box.strides), list(box.box), box.layout) for box in boxes]
        self._promotions = [box.promotion for box in boxes]
        # What a box's descriptors have in common, once one of them has passed the checks of its class.
        self._checked: dict[int, dict[str, Any]] = {}
        # What C takes for all descriptors, and for each, by their tensors' addresses: sizes and strides are fixed.
        self._maps: dict[tuple[int | None, ...], tuple[Any, ...]] = {}
        self._map_of: list[dict[Hashable, tuple[Any, ...]]] = [{} for _ in boxes]

    def resized(
        self, grid: tuple[int, int, int], counts: tuple[int, ...], boxes: Mapping[int, TmaBox] | None = None
    ) -> Self:
        """As of a :class:`Launch`; ``boxes``, by position, of tensors of other sizes, with boxes and strides as they
        were. Descriptors of the others stay encoded.
        """
        other = super().resized(grid, counts)
        if boxes:
            other.boxes, other._map_of = list(self.boxes), list(self._map_of)
            for position, box in boxes.items():
                other.boxes[position] = (list(box.sizes), *self.boxes[position][1:])
                other._map_of[position] = {}
            other._checked = dict(self._checked)
            for position in boxes.keys() & self._checked.keys():
                other._checked[position] = {**self._checked[position], "shape": other.boxes[position][0]}
            other._maps = {}
        return other

    def _start(self, tensors: tuple[Tensor | None, ...]) -> None:
        count = len(self.boxes)
        pointers = [tensor if tensor is None else tensor.data_ptr() for tensor in tensors]
        others = pointers[count:]
        aligned = not any([pointer & 15 for pointer in others if pointer is not None])
        if self._kept.compiled is None and aligned:
            self._find(tensors)
        if self._kept.compiled is None or not aligned:
            self._bind(tensors, aligned)
            return
        grouped: Sequence[Any] = others if self.group is None else self.group(*others)
        starter = self._kept.starter
        if starter is None or starter.is_watched():
            self._tritons_own_way(*self._descriptors(tensors[:count]), *grouped, *self.rest)
            return
        addresses = tuple(pointers[:count])
        maps = self._maps.get(addresses)
        if maps is None:
            if len(self._maps) >= _MOST_MAPS:
                self._maps.clear()
            maps = self._maps[addresses] = self._encoded(starter, tensors[:count], addresses)
        starter.start(self.grid, (*maps, *grouped, *self.rest))

    def at(self, *pointers: int | None) -> bool:
        """As of a :class:`Launch`, and of descriptors that a call with tensors has encoded."""
        count = len(self.boxes)
        maps = self._maps.get(pointers[:count])
        if maps is None or not self.is_ready():
            return False
        grouped: Sequence[Any] = pointers[count:] if self.group is None else self.group(*pointers[count:])
        self._kept.starter.start(self.grid, (*maps, *grouped, *self.rest))  # type: ignore[union-attr]
        return True

    def _encoded(
        self, starter: Starter, tensors: tuple[Tensor | None, ...], addresses: tuple[int | None, ...]
    ) -> tuple[Any, ...]:
        maps: list[Any] = []
        for position, tensor in enumerate(tensors):
            of, known = (0, tensors[0]) if tensor is None else (position, tensor), self._map_of[position]
            # By the first tensor's address, but as none that is given here.
            address = addresses[position] if tensor is not None else (addresses[0],)
            one = known.get(address)
            if one is None:
                if len(known) >= _MOST_MAPS:
                    known.clear()
                described = self._describe(*of)  # type: ignore[arg-type]
                one = known[address] = starter.map(position, described, self._promotions[position])
            maps += one
        return tuple(maps)

    def _kept_maps(self, addresses: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return self._maps.get(addresses)

    def _bound(self, tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
        count = len(self.boxes)
        return *self._descriptors(tensors[:count]), *super()._bound(tensors[count:])

    def _descriptors(self, tensors: tuple[Tensor | None, ...]) -> list[Any]:
        descriptors: list[Any] = []
        for position, tensor in enumerate(tensors):
            descriptors.append(descriptors[0] if tensor is None else self._describe(position, tensor))
        return descriptors

    def _describe(self, position: int, tensor: Tensor) -> Any:
        """A descriptor of this tensor. They differ in address alone, and checking four takes 16 us of host time."""
        ensure_context(tensor.device)
        common = self._checked.get(position)
        if common is None:
            described = self._descriptor(tensor, *self.boxes[position])
            self._checked[position] = {name: value for name, value in vars(described).items() if name != "base"}
            return described
        described = object.__new__(self._descriptor)
        described.__dict__.update(common, base=tensor)
        return described


def _guarded(device: torch.device) -> torch.device | None:
    """The device that must be the current one; None where there is only one, and nothing to ask in each call."""
    return device if device.type == "cuda" and torch.cuda.device_count() > 1 else None


def on_device(device: torch.device, run: Callable[..., None]) -> Callable[..., None]:
    """``run`` with the tensors' device as the current one, for what is not a :class:`Launch`: TileLang's kernels, say.

    Where there is one device it is ``run`` itself.
    """
    guarded = _guarded(device)
    if guarded is None:
        return run

    def run_there(*tensors: Tensor | None) -> None:
        with torch.cuda.device(guarded):
            run(*tensors)

    return run_there


def _never_again(*_: int | None) -> None:
    return None


@dataclass(frozen=True)
class Run:
    """Launches that are one call: with tensors, or with their addresses as :meth:`Launch.at` takes them, and, of
    addresses that have come again, what starts it on these: None where it must be called with them.
    """

    run: Callable[..., None]
    at: Callable[..., bool]
    again: Callable[..., Callable[..., bool] | None] = _never_again

    def __call__(self, *tensors: Any) -> None:
        self.run(*tensors)


def by_alignment(make: Callable[[bool], Callable[..., None]], tensors: slice) -> Run:
    """A launch with two plans: slices of a fused tensor or of a cache may come 16-byte aligned or not.

    ``make(aligned)`` makes a launch the first time that it is wanted; ``tensors``: which of them must be aligned.
    """
    made: dict[bool, Any] = {}

    def run(*given: Tensor | None) -> None:
        aligned = not any([tensor.data_ptr() & 15 for tensor in given[tensors] if tensor is not None])
        if aligned not in made:
            made[aligned] = make(aligned)
        made[aligned](*given)

    def at(*pointers: int | None) -> bool:
        if True not in made:
            made[True] = make(True)
        start = getattr(made[True], "at", None)
        return start is not None and start(*pointers)

    def again(*pointers: int | None) -> Callable[..., bool] | None:
        find: Callable[..., Callable[..., bool] | None] = getattr(made.get(True), "again", _never_again)
        return find(*pointers)

    return Run(run, at, again)


def launch_nothing(*_: object) -> None:
    """The launch over nothing."""


def without_memory(tensor: Tensor | None) -> Tensor | None:
    """A tensor of the same form on the device ``meta``: what is made ready must not keep a call's tensors alive."""
    if tensor is None:
        return None
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
