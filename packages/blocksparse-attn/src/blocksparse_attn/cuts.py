"""Which rows of a layout each rank of a group has, and which blocks of keys it lacks for them: known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from blocksparse_attn.layout import BlockLayout
from blocksparse_attn.lists import block_mask
from kernel_reference.checks import as_float, check_int, describe, fail
from kernel_reference.collectives import world_and_rank
from kernel_reference.integers import cdiv

Tensor = torch.Tensor

# Prologue and epilogue of a row: at 13 blocks a row they take a seventh of the time.
_BLOCKS_AS_LONG_AS_A_ROW = 2
# The gathered blocks follow from the bounds, and the bounds from what is gathered.
_ROUNDS = 3


class Piece(NamedTuple):
    """What is exchanged of some kv heads, at once.

    heads: those of kv. counts: [world][world], blocks from each rank to each. lacked: of each block that comes,
    ``head * columns + block``, head from 0.
    """

    heads: tuple[int, int]
    counts: list[list[int]]
    lacked: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class RowCut:
    """One sequence of ``tokens``, of which rank r has those from ``bounds[r]`` to ``bounds[r + 1] - 1``.

    Ranks have runs of whole blocks, as long as their listed blocks take equal times: under causality the first run is
    the longest. A rank's rows list blocks of keys that earlier ranks have; which, follows from the layout, for each kv
    head. A cut is made once for a layout and a length, by all ranks alike, and reads the layout on the host; calls with
    it wait for nothing.

    Attributes:
        layout: of the whole sequence.
        tokens: of the sequence, on all ranks together.
        heads: query heads and kv heads.
        world, rank: of the group.
        bounds: world + 1 positions, multiples of the larger block but for the last.
        listed: blocks that the rows of each rank list, heads together.
        gathered: blocks that each rank lacks, kv heads together.
        pieces: exchanges, one after another.
        cu_seqlens: of this rank's queries, and of the keys up to the last of them.
        sent: [2, blocks] positions of the blocks that this rank sends, among its own, and their heads, piece by piece.
    """

    layout: BlockLayout
    tokens: int
    heads: tuple[int, int]
    world: int
    rank: int
    bounds: tuple[int, ...]
    listed: tuple[int, ...]
    gathered: tuple[int, ...]
    pieces: list[Piece]
    sent: Tensor
    cu_seqlens: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        ends = torch.tensor([[0, self.end - self.begin], [0, self.end]], dtype=torch.int32)
        object.__setattr__(self, "cu_seqlens", tuple(ends.to(self.layout.device).unbind()))

    def __repr__(self) -> str:
        return f"RowCut(tokens={self.tokens}, heads={self.heads}, rank={self.rank}, bounds={self.bounds})"

    @property
    def begin(self) -> int:
        """The position of this rank's first token."""
        return self.bounds[self.rank]

    @property
    def end(self) -> int:
        """The position behind this rank's last token."""
        return self.bounds[self.rank + 1]

    @property
    def columns(self) -> int:
        """Blocks of keys up to this rank's last token."""
        return cdiv(self.end, self.layout.k_block)

    @staticmethod
    def of(
        group: Any, layout: BlockLayout, tokens: int, heads: tuple[int, int], *, bounds: Sequence[int] | None = None,
        pieces: int = 1, gathering: float = 0.0,
    ) -> RowCut:  # fmt: skip
        """The cut for this process. Every rank makes it with the same arguments; nothing is sent.

        Args:
            group: a ``torch.distributed.ProcessGroup``; None is the default one.
            layout: of all query heads or of one for all, with rows for the sequence.
            tokens: of the sequence.
            heads: query heads and kv heads, all of them.
            bounds: positions instead of the balanced ones: from 0 to tokens, never falling, those between them
                multiples of the larger of layout.q_block and layout.k_block.
            pieces: of the kv heads, exchanged and attended to one after another, so that a piece is gathered while
                another is attended to; divides the kv heads.
            gathering: how many queries attend to a block in the time that a rank alone waits for one that it lacks: who
                lacks blocks has fewer rows. On H100s 2000 by the pieces for "symmetric"; with "all_to_all" all wait.

        Raises:
            TypeError, ValueError: an argument is not as described.
        """
        return cut_rows(*world_and_rank(group), layout, tokens, heads, bounds, pieces, gathering)


def cut_rows(
    world: int, rank: int, layout: BlockLayout, tokens: int, heads: tuple[int, int],
    bounds: Sequence[int] | None = None, pieces: int = 1, gathering: float = 0.0,
) -> RowCut:  # fmt: skip
    """As :meth:`RowCut.of`, for any rank."""
    if not isinstance(layout, BlockLayout):
        fail("layout", "a blocksparse_attn.BlockLayout", describe(layout), TypeError)
    check_int("tokens", tokens, 0)
    if tokens > layout.rows * layout.q_block:
        fail("tokens", f"at most {layout.rows * layout.q_block}, for which layout has rows", tokens)
    heads = _checked_heads(heads, layout)
    check_int("pieces", pieces, 1)
    if heads[1] % pieces:
        fail("pieces", f"a divisor of the {heads[1]} kv heads", pieces)
    unit = max(layout.q_block, layout.k_block)
    lists = _Lists(layout, tokens, heads)
    if bounds is None:
        cuts = lists.balanced(world, as_float("gathering", gathering))
    else:
        given = [check_int("bounds", bound, 0) for bound in bounds]
        ends = len(given) == world + 1 and given[0] == 0 and given[-1] == tokens and given == sorted(given)
        if not ends or any(bound % unit and bound != tokens for bound in given):
            fail("bounds", f"{world + 1} from 0 to {tokens}, never falling, multiples of {unit} between", bounds)
        cuts = given
    needs = lists.lacked(cuts)
    listed = [int(lists.counts[cdiv(a, layout.q_block) : cdiv(b, layout.q_block)].sum()) for a, b in _runs(cuts)]
    blocks = [cdiv(bound, layout.k_block) for bound in cuts]
    found = [_piece(layout, rank, blocks, needs, heads[1] // pieces, i) for i in range(pieces)]
    sent = torch.cat([places for _, places in found], 1).to(layout.device)
    return RowCut(
        layout, tokens, heads, world, rank, tuple(cuts), tuple(listed), tuple(int(need.sum()) for need in needs),
        [piece for piece, _ in found], sent,
    )  # fmt: skip


class _Lists:
    """Of the rows that a sequence has: the blocks that each lists, and those that each kv head's query heads list."""

    def __init__(self, layout: BlockLayout, tokens: int, heads: tuple[int, int]) -> None:
        self.layout, self.tokens, self.heads = layout, tokens, heads
        rows, columns = cdiv(tokens, layout.q_block), cdiv(tokens, layout.k_block)
        last = ((torch.arange(rows) + 1) * layout.q_block).clamp(max=tokens) - 1
        seen = (torch.arange(columns) * layout.k_block <= last[:, None]).to(layout.device)
        counts = torch.zeros(rows, dtype=torch.int64, device=layout.device)
        own = max(1, layout.num_heads // heads[1])
        self.unions: list[Tensor] = []
        # Masks of a kv head at a time: of all heads they would take gigabytes.
        for first in range(0, layout.num_heads, own):
            part = slice(first, first + own)
            mask = block_mask(layout.crow[part], layout.col[part], rows, columns) & seen
            counts += mask.sum((0, 2))
            self.unions.append(mask.any(0))
        self.counts = counts.cpu() * (heads[0] // layout.num_heads)
        self.unions *= heads[1] // len(self.unions)

    def lacked(self, bounds: list[int]) -> list[Tensor]:
        """Of each rank, the blocks of earlier ranks that its rows list: bool [kv heads, columns], on the host."""
        q_block, k_block = self.layout.q_block, self.layout.k_block
        found = []
        for begin, end in _runs(bounds):
            rows = slice(begin // q_block, cdiv(end, q_block) if end > begin else begin // q_block)
            need = torch.stack([union[rows].any(0) for union in self.unions])
            need[:, begin // k_block :] = False
            found.append(need.cpu())
        return found

    def balanced(self, world: int, waiting: float) -> list[int]:
        """Bounds between which rows take equal times, each with the gathering of what it lacks."""
        q_block, unit = self.layout.q_block, max(self.layout.q_block, self.layout.k_block)
        times = self.counts.double() + _BLOCKS_AS_LONG_AS_A_ROW * self.heads[0]
        together = unit // q_block
        times = torch.nn.functional.pad(times, (0, -len(times) % together)).view(-1, together).sum(1)
        until = torch.nn.functional.pad(times.cumsum(0), (1, 0))
        gathering = torch.zeros(world, dtype=torch.float64)
        bounds = [0, self.tokens]
        for _ in range(_ROUNDS if world > 1 else 0):
            share = (until[-1] + gathering.sum()) / world - gathering
            targets = share.clamp(min=0).cumsum(0)[:-1]
            places = (until - targets[:, None]).abs().argmin(1).tolist()
            bounds = [0, *(min(place * unit, self.tokens) for place in places), self.tokens]
            lacked = torch.tensor([float(need.sum()) for need in self.lacked(bounds)], dtype=torch.float64)
            gathering = lacked * (waiting / q_block)
        return bounds


def _piece(
    layout: BlockLayout, rank: int, blocks: list[int], needs: list[Tensor], size: int, i: int
) -> tuple[Piece, Tensor]:
    """The i-th piece and its blocks that this rank sends, in the order of ranks, of kv heads and of positions."""
    heads = slice(i * size, (i + 1) * size)
    counts = [[int(need[heads, begin:end].sum()) for need in needs] for begin, end in _runs(blocks)]
    lacked = [needs[rank][heads, begin:end].nonzero() + torch.tensor([0, begin]) for begin, end in _runs(blocks)]
    place = torch.cat([pairs[:, 0] * blocks[rank + 1] + pairs[:, 1] for pairs in lacked])
    sent = torch.cat([need[heads, blocks[rank] : blocks[rank + 1]].nonzero() for need in needs]).flip(1).T.contiguous()
    sent[1] += heads.start
    return Piece((heads.start, heads.stop), counts, place.to(layout.device)), sent


def _runs(bounds: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(bounds))


def _checked_heads(heads: Any, layout: BlockLayout) -> tuple[int, int]:
    if not isinstance(heads, (tuple, list)) or len(heads) != 2:
        fail("heads", "(query heads, kv heads)", describe(heads), TypeError)
    queries, keys = (check_int("heads", number, 1) for number in heads)
    if layout.num_heads not in (1, queries):
        fail("heads", f"of {layout.num_heads} query heads, as layout is", (queries, keys))
    if queries % keys:
        fail("heads", "kv heads that divide the query heads", (queries, keys))
    return queries, keys
