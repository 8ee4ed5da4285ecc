"""Launches of decoding that are started again by the CUDA driver alone: see driver.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import add, itemgetter
from typing import Any

import torch

from kernel_reference.dispatch import allocator_of

Tensor = torch.Tensor

# Sources of what kernels are handed: q, kv, seqlens_k, block_table, first_part, order, kv_scale, out, lse; what stands
# in for an lse that nobody wants; parts, part_lse, pieces.
_Q, _KV, _OUT = 0, 1, 7
# What of a key may lie behind its beginning, in bytes, and to what a workspace is aligned.
_OF_KEY, _ALIGNED = 2048, 256


class DecodeRun:
    """What attends, called with the tensors of the op, of a cache of 8 bits with it and its scale in kv's place.

    ``arguments`` makes of these the arguments of ``attend`` and ``merge``, and what is to be copied. ``work``: bytes of
    parts, part_lse and pieces, which end the tensors that ``attend`` is handed.
    """

    def __init__(
        self, run: Callable[..., None], arguments: Callable[..., Any], attend: Any, merge: Any, work: Sequence[int],
        device: torch.device,
    ) -> None:  # fmt: skip
        self._run, self._arguments, self._kernels = run, arguments, [attend] if merge is None else [attend, merge]
        *self._begins, size = accumulate((size + -size % _ALIGNED for size in work), initial=0)
        self._make_work = allocator_of((size,), (1,), torch.uint8, device)
        self._device, self._found = device, False
        # Of each kernel its launch, and which source its tensors are, how far in it.
        self._replays: list[tuple[Any, Callable[..., Any], list[int]]] = []
        self._no_lse = 0

    def __call__(self, *tensors: Any) -> None:
        self._run(*tensors)

    def again(self, tensors: Sequence[Any], out: Tensor, lse: Tensor | None) -> bool:
        """Start the launches that :meth:`learn` has found. False where all is to be done by a call.

        tensors: q, kv, seqlens_k, block_table, first_part, order and kv_scale.
        """
        if not self._replays:
            return False
        work = self._make_work()
        at = work.data_ptr()
        sources = (
            *[0 if x is None else x.data_ptr() for x in (*tensors, out, lse)], self._no_lse,
            *[at + begin for begin in self._begins],
        )  # fmt: skip
        if (sources[_Q] | sources[_KV] | sources[_OUT]) & 15:
            return False
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        return all(replay(tuple(map(add, pick(sources), offsets)), stream) for replay, pick, offsets in self._replays)

    def learn(self, tensors: Sequence[Any], out: Tensor, lse: Tensor | None) -> None:
        """Find the launches of a call with these tensors, once, if they can be found and are of the tensors alone."""
        if self._found or torch.cuda.is_current_stream_capturing():
            return
        self._found = True
        from tilelang_mla.driver import Replay

        q, kv, *others, kv_scale = tensors
        try:
            *given, copied = self._arguments(
                q, kv if kv_scale is None and not _is_8bit(kv) else (kv, kv_scale), *others, out, lse
            )
            if copied is not None:
                return
            addresses = [0 if x is None else x.data_ptr() for x in (*tensors, out, lse)]
            of_kernels = [[x.data_ptr() for x in each if isinstance(x, Tensor)] for each in given]
            workspace = of_kernels[0][-3:]
            # The one that is handed over before the workspace is lse.
            self._no_lse = of_kernels[0][-4] if lse is None else 0
            sources = [*addresses, self._no_lse, *workspace]
            replays: list[tuple[Any, Callable[..., Any], list[int]]] = []
            for number, (start, arguments, places) in enumerate(zip(self._kernels, given, of_kernels, strict=False)):
                found = [_source(sources, place) for place in places]
                replay = Replay(start, arguments, dependent=number > 0)
                replays.append((replay, itemgetter(*[source for source, _ in found]), [offset for _, offset in found]))
            self._replays = replays
        except (RuntimeError, OSError, AttributeError):
            # Another driver, another TileLang: calls stay as they are.
            return


def _is_8bit(kv: Tensor) -> bool:
    return kv.element_size() == 1


def _source(sources: list[int], address: int) -> tuple[int, int]:
    """Which source an address is of, and how far in it."""
    if address and address in sources:
        return sources.index(address), 0
    if address and 0 < address - sources[_KV] < _OF_KEY:
        return _KV, address - sources[_KV]
    raise RuntimeError("a tensor of no argument")
