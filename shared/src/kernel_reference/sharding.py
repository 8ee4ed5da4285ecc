"""Who owns which token of a sequence that several ranks share: layouts, and shards of packed tokens.

A layout is a value. ``tokens(n)`` are the positions of a rank's tokens of a sequence of n, ascending;
``visible(lengths)`` says on the device, with no host synchronisation, how many of a rank's tokens lie among the first
ones of a sequence.

===========  ========================================================  =====================================
Interleave   runs of ``size`` tokens in turn                           caches that grow: no token ever moves
Contiguous   one run a rank, as ``torch.chunk`` and DTensor's Shard    recurrences
ZigZag       two of 2 x world runs, the r-th and the r-th from behind  causal prefill: as much work for each
===========  ========================================================  =====================================

Of a sequence that is shorter than the world some ranks have no token. :func:`shard` and :func:`unshard` are the oracle:
from the positions, on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from .checks import check_int, check_tensors, describe, fail
from .integers import cdiv
from .paging import Packed, cumulative, sequence_ranges

Tensor = torch.Tensor


@dataclass(frozen=True)
class Layout:
    """What :class:`Interleave`, :class:`Contiguous` and :class:`ZigZag` have in common.

    Args:
        world: ranks of the group.
        rank: the one whose tokens these are, within the group.

    Raises TypeError or ValueError, naming the argument.
    """

    world: int
    rank: int

    def __post_init__(self) -> None:
        check_int("world", self.world, 1)
        check_int("rank", self.rank, 0, self.world - 1)

    @classmethod
    def of(cls, group: Any, **options: Any) -> Self:
        """The layout of this process over a ``torch.distributed.ProcessGroup``; None is the default group."""
        from torch import distributed

        return cls(distributed.get_world_size(group), distributed.get_rank(group), **options)

    def at(self, rank: int) -> Self:
        """The same layout for another rank."""
        return replace(self, rank=rank)

    def tokens(self, n: int, device: torch.device | str | None = None) -> Tensor:
        """Positions of this rank's tokens of a sequence of n: int64, ascending."""
        check_int("n", n, 0)
        runs = [torch.arange(begin, max(begin, end), device=device) for begin, end in self._runs(n)]
        return torch.cat(runs) if runs else torch.arange(0, device=device)

    def visible(self, lengths: Tensor, n: Tensor | None = None) -> Tensor:
        """How many of this rank's tokens are among the first ``lengths`` of sequences of ``n``, None being as many.

        Integers of any shape, and of the same shape and dtype come back; a length below 0 counts as 0. Torch operations
        alone, so that it runs under torch.compile and in a CUDA graph.
        """
        raise NotImplementedError

    def most_tokens(self, n: int, sequences: int = 1) -> int:
        """The most tokens that any rank can have of so many sequences with n tokens in all: rows to allocate."""
        raise NotImplementedError

    def _runs(self, n: int) -> list[tuple[int, int]]:
        raise NotImplementedError


@dataclass(frozen=True)
class Interleave(Layout):
    """Token t lives on rank ``(t // size) % world``, whatever the length: a cache grows and no token moves.

    ``size`` a multiple of the page size keeps pages whole; of 1, ranks are never more than a token apart. What a rank
    holds of a sequence is a prefix of what it will hold, so that ``visible`` needs no ``n``.
    """

    size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("size", self.size, 1)

    def visible(self, lengths: Tensor, n: Tensor | None = None) -> Tensor:
        """See :meth:`Layout.visible`."""
        lengths = _as_lengths(lengths)
        turn = self.size * self.world
        turns = lengths // turn
        return turns * self.size + (lengths - turns * turn - self.rank * self.size).clamp(0, self.size)

    def most_tokens(self, n: int, sequences: int = 1) -> int:
        """See :meth:`Layout.most_tokens`."""
        # Every sequence may end with a run that this rank alone has.
        return min(n, cdiv(n + sequences * self.size * (self.world - 1), self.world))

    def _runs(self, n: int) -> list[tuple[int, int]]:
        turn = self.size * self.world
        return [(begin, min(n, begin + self.size)) for begin in range(self.rank * self.size, n, turn)]


@dataclass(frozen=True)
class Contiguous(Layout):
    """Rank r has the r-th of ``world`` runs of ``ceil(n / world)`` tokens; the last ones may be short or empty."""

    def visible(self, lengths: Tensor, n: Tensor | None = None) -> Tensor:
        """See :meth:`Layout.visible`."""
        lengths = _as_lengths(lengths)
        n = lengths if n is None else _as_lengths(n)
        return torch.minimum((torch.minimum(lengths, n) - self.rank * self._size(n)).clamp(min=0), self._size(n))

    def begins(self, n: Tensor) -> Tensor:
        """The position of this rank's first token in sequences of n; n where it has none."""
        n = _as_lengths(n)
        return torch.minimum(self.rank * self._size(n), n)

    def _size(self, n: Tensor) -> Tensor:
        # Rounded up, of lengths up to the greatest of their dtype.
        return (n - 1) // self.world + 1

    def most_tokens(self, n: int, sequences: int = 1) -> int:
        """See :meth:`Layout.most_tokens`."""
        return min(n, (n + sequences * (self.world - 1)) // self.world)

    def _runs(self, n: int) -> list[tuple[int, int]]:
        size = cdiv(n, self.world)
        return [(min(n, self.rank * size), min(n, (self.rank + 1) * size))]


@dataclass(frozen=True)
class ZigZag(Layout):
    """Rank r has the runs r and ``2 world - 1 - r`` of ``2 world`` runs of ``ceil(n / (2 world))`` tokens.

    Under a causal mask an early run has little to see and a late one much: together every rank has the same.
    """

    @property
    def halves(self) -> tuple[Contiguous, Contiguous]:
        """The early run and the late one, each as a layout of its own over twice as many ranks."""
        return Contiguous(2 * self.world, self.rank), Contiguous(2 * self.world, 2 * self.world - 1 - self.rank)

    def visible(self, lengths: Tensor, n: Tensor | None = None) -> Tensor:
        """See :meth:`Layout.visible`."""
        early, late = self.halves
        return early.visible(lengths, n) + late.visible(lengths, n)

    def most_tokens(self, n: int, sequences: int = 1) -> int:
        """See :meth:`Layout.most_tokens`."""
        return min(n, 2 * ((n + sequences * (2 * self.world - 1)) // (2 * self.world)))

    def _runs(self, n: int) -> list[tuple[int, int]]:
        return [run for half in self.halves for run in half._runs(n)]


def shard(tokens: Tensor, layout: Layout, cu_seqlens: Tensor) -> Packed:
    """A rank's tokens [T_r, ...] of packed sequences [T, ...], in the order of their positions, and their cu_seqlens.

    Raises TypeError or ValueError, naming the argument, for a layout that is none and bounds that do not fit.
    """
    check_tensors(tokens=tokens)
    _check_layout(layout)
    own, lengths = [tokens[:0]], []
    for begin, end in sequence_ranges("cu_seqlens", cu_seqlens, tokens.shape[0]):
        positions = layout.tokens(end - begin, tokens.device)
        own.append(tokens[begin + positions])
        lengths.append(len(positions))
    return Packed(torch.cat(own), cumulative(torch.tensor(lengths, dtype=torch.int64, device="cpu")).to(tokens.device))


def unshard(shards: Sequence[Tensor], layout: Layout, cu_seqlens: Tensor) -> Tensor:
    """The inverse of :func:`shard`: shards by rank to the packed tokens of sequences ``cu_seqlens`` [B + 1].

    Rows of a shard behind its last token are left out. The layout's own rank does not matter. Raises TypeError or
    ValueError, naming the argument.
    """
    _check_layout(layout)
    if len(shards) != layout.world:
        fail("shards", f"{layout.world}, one a rank", len(shards))
    total = int(cu_seqlens[-1]) if cu_seqlens.numel() else 0
    whole = shards[0].new_zeros(total, *shards[0].shape[1:])
    taken = [0] * layout.world
    for begin, end in sequence_ranges("cu_seqlens", cu_seqlens, total):
        for rank, own in enumerate(shards):
            positions = layout.at(rank).tokens(end - begin, whole.device)
            if taken[rank] + len(positions) > len(own):
                fail(f"shards[{rank}]", f"of at least {taken[rank] + len(positions)} rows", len(own))
            whole[begin + positions] = own[taken[rank] : taken[rank] + len(positions)]
            taken[rank] += len(positions)
    return whole


def check_interleave(layout: Interleave, world: int, rank: int) -> None:
    """Raise TypeError or ValueError where a layout is no :class:`Interleave`, or is of another group or process."""
    if not isinstance(layout, Interleave):
        fail("layout", "a kernel_reference.sharding.Interleave", describe(layout), TypeError)
    if (layout.world, layout.rank) != (world, rank):
        fail("layout", f"of world {world} and rank {rank}, as group is", layout)


def _as_lengths(lengths: Tensor) -> Tensor:
    if not isinstance(lengths, torch.Tensor) or lengths.dtype not in (torch.int32, torch.int64):
        fail("lengths", "an int32 or int64 tensor", describe(lengths), TypeError)
    return lengths.clamp(min=0)


def _check_layout(layout: Layout) -> None:
    if not isinstance(layout, (Interleave, Contiguous, ZigZag)):
        fail("layout", "an Interleave, a Contiguous or a ZigZag", describe(layout), TypeError)
