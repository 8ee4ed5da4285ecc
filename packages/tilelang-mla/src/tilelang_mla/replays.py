"""Launches of decoding that are started again by the CUDA driver alone: see driver.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import add, itemgetter
from typing import Any

import torch

from kernel_reference.dispatch import allocator_of

Tensor = torch.Tensor

# Sources of what kernels are handed: tensors of a call, q and kv the first; out and lse; what stands in where something
# is left out; parts, part_lse and pieces.
_Q, _KV = 0, 1
# What of a key may lie behind its beginning, in bytes, and to what a workspace is aligned.
_OF_KEY, _ALIGNED = 2048, 256


class DecodeRun:
    """What attends, called with the tensors of the op, of a cache of 8 bits with it and its scale in kv's place.

    arguments: makes of these the arguments of ``kernels``, of the second only if there is one, and pairs of tensors of
    which one is copied from the other. work: bytes of parts, part_lse and pieces, which end the tensors that the first
    kernel is handed. stand_ins: tensors that it may be handed too.
    """

    def __init__(
        self, arguments: Callable[..., Any], kernels: Sequence[Any], work: Sequence[int], stand_ins: Sequence[Tensor]
    ) -> None:
        self._arguments, self._kernels = arguments, [kernel for kernel in kernels if kernel is not None]
        *self._begins, size = accumulate((size + -size % _ALIGNED for size in work), initial=0)
        self._device, self._stand_ins, self._found = stand_ins[0].device, stand_ins, False
        self._make_work = allocator_of((size,), (1,), torch.uint8, self._device)
        # Of each kernel its launch, and which source its tensors are, how far in it.
        self._replays: list[tuple[Any, Callable[..., Any], list[int]]] = []
        self._others = tuple(tensor.data_ptr() for tensor in stand_ins)

    def __call__(self, *tensors: Any) -> None:
        *given, copies = self._arguments(*tensors)
        for start, arguments in zip(self._kernels, given, strict=False):
            start(*arguments)
        for to, of in copies:
            to.copy_(of)

    def again(self, tensors: Sequence[Any], out: Tensor, lse: Tensor | None) -> bool:
        """Start the launches that :meth:`learn` has found. False where all is to be done by a call.

        tensors: those of the call, each by itself, before out and lse.
        """
        if not self._replays:
            return False
        work = self._make_work()
        at = work.data_ptr()
        sources = (
            *[0 if x is None else x.data_ptr() for x in (*tensors, out, lse)], *self._others,
            *[at + begin for begin in self._begins],
        )  # fmt: skip
        if (sources[_Q] | sources[_KV] | sources[len(tensors)]) & 15:
            return False
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        return all(replay(tuple(map(add, pick(sources), offsets)), stream) for replay, pick, offsets in self._replays)

    def learn(self, tensors: Sequence[Any], out: Tensor, lse: Tensor | None, call: Sequence[Any]) -> None:
        """Find the launches of such a call, once, if they can be found and are of the tensors alone.

        call: the tensors as this is called with them.
        """
        if self._found or torch.cuda.is_current_stream_capturing():
            return
        self._found = True
        from tilelang_mla.driver import Replay

        try:
            *given, copies = self._arguments(*call)
            if copies:
                return
            addresses = [0 if x is None else x.data_ptr() for x in (*tensors, out, lse)]
            of_kernels = [[x.data_ptr() for x in each if isinstance(x, Tensor)] for each in given]
            sources = [*addresses, *self._others, *of_kernels[0][-len(self._begins) :]]
            replays: list[tuple[Any, Callable[..., Any], list[int]]] = []
            for number, (start, arguments, places) in enumerate(zip(self._kernels, given, of_kernels, strict=False)):
                found = [_source(sources, place) for place in places]
                replay = Replay(start, arguments, dependent=number > 0)
                replays.append((replay, itemgetter(*[source for source, _ in found]), [offset for _, offset in found]))
            self._replays = replays
        except (RuntimeError, OSError, AttributeError):
            # Another driver, another TileLang: calls stay as they are.
            return


def _source(sources: list[int], address: int) -> tuple[int, int]:
    """Which source an address is of, and how far in it."""
    if address and address in sources:
        return sources.index(address), 0
    if address and 0 < address - sources[_KV] < _OF_KEY:
        return _KV, address - sources[_KV]
    raise RuntimeError("a tensor of no argument")
