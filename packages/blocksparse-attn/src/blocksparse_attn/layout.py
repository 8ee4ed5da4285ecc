"""Layouts: which blocks of keys each block of queries attends to, as sorted lists per head."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING

import torch

from blocksparse_attn.choosing.ops import Reach, chosen, packed
from blocksparse_attn.lists import (
    block_mask,
    check_blocks,
    check_columns,
    fail_lists,
    in_32_bits,
    list_faults,
    listed,
    reach,
    transposed,
    with_heads,
)
from blocksparse_attn.patterns import (
    LONGEST,
    clear_cache,
    head_range,
    kept,
    local_and_vertical,
    row_sizes,
    set_cache_limit,
)
from blocksparse_attn.picture import picture
from kernel_reference.checks import (
    check_bool,
    check_dense,
    check_dtype,
    check_int,
    describe,
    fail,
    values_are_checked,
)
from kernel_reference.integers import cdiv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False, repr=False, slots=True, weakref_slot=True)
class BlockLayout:
    """Row r of head h attends to the key blocks ``col[h, crow[h, r] : crow[h, r + 1]]``, as far as causality lets it.

    The query at position p of its sequence belongs to row ``p // q_block``, the key at position p to column
    ``p // k_block``. A layout of one head serves all heads. Columns of a row increase. The methods below make valid
    layouts; the constructor checks shapes and dtypes only. Two layouts are equal when they are the same object.

    Attributes:
        crow: [heads or 1, rows + 1] int32, from 0, never falling. The constructor takes int64 too, and [rows + 1] of
            one head.
        col: [heads or 1, nnz] int32, as wide as the longest head's lists; entries past a head's lists are not read, and
            are -1 in layouts made here. The constructor takes what it takes for crow.
        q_block, k_block: tokens of a block, multiples of 16 up to 65536, one of them a multiple of the other.
        columns: blocks of keys: the longest sequence divided by k_block, rounded up.
        scattered: whether rows that follow one another list mostly different blocks. It changes no result, only the
            launch plan. :meth:`from_scores` and ``from_mask(capacity=)`` say so, :meth:`from_mask` looks.
    """

    crow: Tensor
    col: Tensor
    q_block: int
    k_block: int
    columns: int
    scattered: bool = False
    _transposed: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_blocks(self.q_block, self.k_block)
        check_bool("scattered", self.scattered)
        crow, col = in_32_bits(*with_heads(self.crow, self.col))
        if crow is not self.crow or col is not self.col:
            object.__setattr__(self, "crow", crow)
            object.__setattr__(self, "col", col)
        check_columns(self.columns, self.rows, self.q_block, self.k_block)

    def __repr__(self) -> str:
        sizes = f"num_heads={self.num_heads}, rows={self.rows}, columns={self.columns}"
        return f"BlockLayout({sizes}, q_block={self.q_block}, k_block={self.k_block}, device={str(self.device)!r})"

    @property
    def num_heads(self) -> int:
        """Heads with lists of their own, or 1 for all."""
        return self.crow.shape[0]

    @property
    def rows(self) -> int:
        """Blocks of queries: a query at position ``rows * q_block`` or later sees nothing."""
        return self.crow.shape[1] - 1

    @property
    def device(self) -> torch.device:
        """Where the lists are."""
        return self.crow.device

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the lists take."""
        return sum(lists.nbytes for lists in (self.crow, self.col, *(self._transposed or ())))

    def transposed(self) -> tuple[Tensor, Tensor]:
        """The rows that list each column, in order: crow [heads or 1, columns + 1] and col [heads or 1, nnz].

        Of all columns that the rows reach. Made on the device without synchronising, the first time that gradients want
        them, and kept with the layout.
        """
        if self._transposed is not None:
            return self._transposed
        # Not in memory of a CUDA graph, nor a tracer's tensors.
        keeps = type(self.col) is Tensor and not torch.compiler.is_compiling()
        keeps = keeps and not (self.col.is_cuda and torch.cuda.is_current_stream_capturing())
        with torch.inference_mode(False), torch.no_grad():
            made = transposed(self.crow, self.col, reach(self.rows, self.q_block, self.k_block))
        if keeps:
            object.__setattr__(self, "_transposed", made)
        return made

    # The cache of patterns

    @staticmethod
    def clear_cache() -> None:
        """Let go of the layouts that :meth:`local_strided` and :meth:`sliding` keep; those in use stay as they are."""
        clear_cache()

    @staticmethod
    def set_cache_limit(num_bytes: int) -> None:
        """Keep at most so many bytes of lists, of all devices together; 1 GiB unless set.

        The least recently asked for go first, and 0 keeps none. A layout that somebody holds is found again all the
        same. TypeError or ValueError unless num_bytes is an int of 0 or more.
        """
        set_cache_limit(check_int("num_bytes", num_bytes, 0))

    # Builders

    @staticmethod
    def from_mask(mask: Tensor, q_block: int, k_block: int, *, capacity: int | None = None) -> BlockLayout:
        """The layout that lists what is True in a block mask.

        Args:
            mask: [heads or 1, rows, columns] bool, any strides; columns at most those that the rows reach,
                ``ceil(rows * q_block / k_block)``. Counting the listed blocks synchronises with the device.
            q_block, k_block: tokens of a row and of a column, see the class.
            capacity: blocks that a head may list. Given, nothing synchronises, and a CUDA graph may make the layout
                anew at each replay; blocks past it are left out, the last rows' first.

        Raises:
            TypeError, ValueError: an argument is not as described; or, where values are checked, a head lists more than
                capacity.
        """
        check_blocks(q_block, k_block)
        check_dense(mask=mask)
        if mask.dtype != torch.bool:
            fail("mask.dtype", "bool", mask.dtype, TypeError)
        if mask.ndim != 3 or mask.shape[0] < 1:
            fail("mask", "[heads or 1, rows, columns]", describe(mask))
        heads, rows, columns = mask.shape
        most = reach(rows, q_block, k_block)
        if columns > most:
            fail("mask", f"of at most {most} columns, which its {rows} rows of {q_block} queries reach", describe(mask))
        if capacity is not None:
            return listed_within(mask, q_block, k_block, check_int("capacity", capacity, 0))
        scattered = bool(2 * (mask[:, 1:] & mask[:, :-1]).sum() < mask[:, 1:].sum())
        return _from_keys(mask.reshape(-1).nonzero()[:, 0], (heads, rows, columns), q_block, k_block, scattered)

    @staticmethod
    def from_scores(
        scores: Tensor, topk: int, *, q_block: int, k_block: int, local: int = 0, sink: int = 0
    ) -> BlockLayout:
        """The layout of the blocks that score best, chosen on the device without synchronising.

        Row r lists, of the columns that causality leaves it, the last ``local``, the first ``sink``, and the ``topk``
        best of the others; of equal scores the lower column, and of -inf and NaN none. A CUDA graph may choose anew at
        each replay.

        Args:
            scores: [heads or 1, rows, columns], bfloat16, float16 or float32, any strides; columns at most those that
                the rows reach, ``ceil(rows * q_block / k_block)``.
            topk: blocks of a row, beside the others; 0 or more.
            q_block, k_block: tokens of a row and of a column, see the class.
            local, sink: blocks, 0 or more.

        Raises:
            TypeError, ValueError: an argument is not as described.
        """
        check_blocks(q_block, k_block)
        check_dense(scores=scores)
        check_dtype("scores", scores, torch.bfloat16, torch.float16, torch.float32)
        for name, number in (("topk", topk), ("local", local), ("sink", sink)):
            check_int(name, number, 0)
        if scores.ndim != 3 or scores.shape[0] < 1:
            fail("scores", "[heads or 1, rows, columns]", describe(scores))
        heads, rows, columns = scores.shape
        if columns > (most := reach(rows, q_block, k_block)):
            fail("scores", f"of at most {most} columns, which {rows} rows of {q_block} queries reach", describe(scores))
        flat = scores.reshape(heads * rows, columns)
        flat = flat if flat.stride(1) == 1 else flat.contiguous()
        indices, counts = chosen(flat, Reach(rows, q_block, k_block), topk, local, sink, False)
        crow, col = packed(indices.view(heads, rows, indices.shape[1]), counts)
        return BlockLayout(crow, col, q_block, k_block, columns, scattered=True)

    @staticmethod
    def from_csr(crow: Tensor, col: Tensor, q_block: int, k_block: int, *, columns: int | None = None) -> BlockLayout:
        """The layout of given lists, which are validated once; int32 lists are not copied.

        Args:
            crow: [heads or 1, rows + 1] int32 or int64, rows contiguous: from 0, never falling, at most nnz.
            col: [heads or 1, nnz] likewise: increasing in each row, from 0 to columns - 1. Entries past
                ``crow[h, -1]`` may be anything. For one head also [rows + 1] and [nnz].
            q_block, k_block: see the class.
            columns: see the class; at most, and for None exactly, those that the rows reach,
                ``ceil(rows * q_block / k_block)``.

        Raises:
            TypeError, ValueError: an argument is not as described; the first bad entry of the lists is named. The
                check synchronises with the device.
        """
        check_blocks(q_block, k_block)
        crow, col = with_heads(crow, col)
        rows = crow.shape[1] - 1
        if columns is None:
            columns = reach(rows, q_block, k_block)
        check_columns(columns, rows, q_block, k_block)
        if bool(list_faults(crow, col, columns).any()):
            fail_lists(crow, col, columns)
        return BlockLayout(crow, col, q_block, k_block, columns)

    @staticmethod
    def local_strided(
        num_heads: int,
        max_seqlen: int,
        local_blocks: int,
        vert_stride: int,
        block_size: int,
        homo_head: bool = False,
        active_head_range: tuple[int, int] | None = None,
        device: torch.device | str | int | None = None,
        q_block_size: int | None = None,
    ) -> BlockLayout:
        """Phi-3-small's pattern: the last blocks, and every ``vert_stride``-th one, shifted by head.

        Key block j is visible to query block i of head h when ``j <= i`` and (``i - j < local_blocks`` or
        ``(j + h * step + 1) % vert_stride == 0``), with ``step = max(1, vert_stride // num_heads)``, or 0 with
        homo_head. Source: Phi-3 technical report (arXiv 2404.14219), section 2.

        Args:
            num_heads: query heads of the whole model, from which the shift follows.
            max_seqlen: tokens of the longest sequence.
            local_blocks: blocks, the query's own included; 1 or more.
            vert_stride: 1 or more; 1 makes the layout dense.
            block_size: tokens of a block of queries and of keys; a multiple of 16.
            homo_head: all heads share the pattern of head 0, and the layout has one head.
            active_head_range: (lo, hi): the layout of heads lo .. hi - 1 only, for a rank of a tensor-parallel model.
            device: of the lists; torch's default device when None.
            q_block_size: tokens of a row, a multiple or a divisor of block_size; block_size when None. A longer row
                lists what any of its blocks of queries would, a shorter one what its block does.

        Returns:
            The layout; the same object for the same arguments while somebody holds it or it is among the last few in
            the cache (:meth:`clear_cache`, :meth:`set_cache_limit`).

        Raises:
            TypeError, ValueError: an argument is not as described, or lists are longer than 32 bits can count.
        """
        check_int("num_heads", num_heads, 1)
        check_int("vert_stride", vert_stride, 1)
        if vert_stride > LONGEST:
            fail("vert_stride", f"at most {LONGEST}", vert_stride)
        check_bool("homo_head", homo_head)
        low, high = head_range(active_head_range, num_heads)
        # A pattern that all heads share is listed once.
        low, high = (0, 1) if homo_head else (low, high)
        step = 0 if homo_head else max(1, vert_stride // num_heads)
        sizes = row_sizes(max_seqlen, local_blocks, "local_blocks", block_size, q_block_size)

        def build(device: torch.device) -> BlockLayout:
            first = (-torch.arange(low, high, device="cpu") * step - 1) % vert_stride
            return _built(first[:, None], vert_stride, sizes, device)

        return kept(("local and vertical", low, high, step, vert_stride, *sizes), device, build)

    @staticmethod
    def sliding(
        max_seqlen: int, window_blocks: int, block_size: int, device: torch.device | str | int | None = None
    ) -> BlockLayout:
        """The last blocks: key block j is visible to query block i when ``0 <= i - j < window_blocks``.

        Args:
            max_seqlen: tokens of the longest sequence.
            window_blocks: the query's own included; 1 or more.
            block_size, device: as for :meth:`local_strided`.

        Returns:
            A layout of one head, cached as there. A window in tokens is the attention's ``window``, with any layout.

        Raises:
            TypeError, ValueError: an argument is not as described.
        """
        sizes = row_sizes(max_seqlen, window_blocks, "window_blocks", block_size, None)

        def build(device: torch.device) -> BlockLayout:
            # The first vertical block is past the last row.
            return _built(torch.full((1, 1), sizes[1], device="cpu"), 1, sizes, device)

        return kept(("sliding", *sizes), device, build)

    def union(self, other: BlockLayout) -> BlockLayout:
        """The layout that lists what either does.

        ``other``: of the same block sizes and device, and of as many heads unless one of the two has one for all; the
        union has the rows and columns of the larger. TypeError or ValueError otherwise. Synchronises with the device.
        """
        if not isinstance(other, BlockLayout):
            fail("other", "a BlockLayout", describe(other), TypeError)
        for name in ("q_block", "k_block", "device"):
            if getattr(other, name) != getattr(self, name):
                fail("other", f"of {name} {getattr(self, name)} as this layout is", getattr(other, name))
        heads = max(self.num_heads, other.num_heads)
        if {self.num_heads, other.num_heads} - {1, heads}:
            fail("other", f"of 1 head or of {self.num_heads}, as this layout", other.num_heads)
        rows, columns = max(self.rows, other.rows), max(self.columns, other.columns)
        keys = torch.cat([_keys(layout, heads, rows, columns) for layout in (self, other)]).unique()
        scattered = self.scattered or other.scattered
        return _from_keys(keys, (heads, rows, columns), self.q_block, self.k_block, scattered)

    # What it is

    def to_mask(self) -> Tensor:
        """The blocks listed, as bool [heads or 1, rows, columns] on the layout's device."""
        return block_mask(self.crow, self.col, self.rows, self.columns)

    def density(self) -> float:
        """The listed share of the causally visible blocks: those whose first key some query of the row may see.

        A number from 0 to 1 over all heads; 0 where there is nothing to list. Synchronises with the device.
        """
        last_query = (torch.arange(self.rows, device=self.device) + 1) * self.q_block - 1
        possible = (last_query // self.k_block + 1).clamp(max=self.columns)
        row, place = listed(self.crow, self.col)
        seen = int((self.col.reshape(-1)[place] < possible[row % max(1, self.rows)]).sum())
        return seen / max(1, int(possible.sum()) * self.num_heads)

    def plot(
        self, path: str | PathLike[str] | None = None, head: int = 0, *, max_seqlen: int | None = None,
        title: str | None = None,
    ) -> Figure:  # fmt: skip
        """A picture of one head's pattern: rows are queries, columns keys, both in tokens; causally masked is grey.

        Args:
            path: also save it there, in the format of the name's suffix.
            head: 0 .. num_heads - 1.
            max_seqlen: tokens to show, from the first; all when None.
            title: the head and its density when None.

        Returns:
            A matplotlib Figure; it is not shown.

        Raises:
            TypeError, ValueError: an argument is not as described.
            ModuleNotFoundError: matplotlib is not installed (``pip install blocksparse-attn[plot]``).
        """
        check_int("head", head)
        if not 0 <= head < self.num_heads:
            fail("head", f"from 0 to {self.num_heads - 1}", head)
        longest = max(self.rows * self.q_block, self.columns * self.k_block)
        if max_seqlen is not None:
            check_int("max_seqlen", max_seqlen, 1)
            longest = min(longest, max_seqlen)
        rows, columns = min(self.rows, cdiv(longest, self.q_block)), min(self.columns, cdiv(longest, self.k_block))
        mask = block_mask(self.crow[head : head + 1], self.col[head : head + 1], rows, columns)[0]
        if title is None:
            title = f"head {head}, density {self.heads(head, head + 1).density():.3f}"
        return picture(mask, self.q_block, self.k_block, longest, title, path)

    def to(self, device: torch.device | str | int) -> BlockLayout:
        """The layout on a device; the layout itself if it is there already."""
        # With the number of the device that a name without one stands for.
        wanted = torch.empty(0, device=device).device
        if wanted == self.device:
            return self
        return replace(self, crow=self.crow.to(wanted), col=self.col.to(wanted))

    def heads(self, lo: int, hi: int) -> BlockLayout:
        """The layout of heads lo .. hi - 1, for a rank of a tensor-parallel model; one for all heads is returned as is.

        TypeError or ValueError unless ``0 <= lo < hi`` and, where heads have lists of their own, ``hi <= num_heads``.
        """
        most = None if self.num_heads == 1 else self.num_heads
        lo, hi = head_range((lo, hi), most, "lo, hi")
        if most is None or (lo, hi) == (0, most):
            return self
        return replace(self, crow=self.crow[lo:hi], col=self.col[lo:hi])


def listed_within(mask: Tensor, q_block: int, k_block: int, capacity: int) -> BlockLayout:
    """The layout of a checked mask whose heads list ``capacity`` blocks at most."""
    crow = torch.nn.functional.pad(mask.sum(2).cumsum(1), (1, 0))
    if values_are_checked(mask.device) and bool((crow[:, -1] > capacity).any()):
        fail("capacity", f"at least {int(crow[:, -1].max())}, the blocks that a head lists", capacity)
    column = torch.arange(mask.shape[2], device=mask.device).expand_as(mask)
    place = (crow[:, :-1, None] + mask.cumsum(2) - 1).where(mask, capacity).clamp(max=capacity)
    col = torch.full((mask.shape[0], capacity + 1), -1, dtype=torch.int32, device=mask.device)
    col.scatter_(1, place.flatten(1), column.flatten(1).to(torch.int32))
    crow = crow.clamp(max=capacity).to(torch.int32)
    return BlockLayout(crow, col[:, :capacity], q_block, k_block, mask.shape[2], scattered=True)


def _keys(layout: BlockLayout, heads: int, rows: int, columns: int) -> Tensor:
    """Each entry as a number, ``(head * rows + row) * columns + column``, of a layout at most as large as said."""
    row, place = listed(layout.crow, layout.col)
    head, row = row // max(1, layout.rows), row % max(1, layout.rows)
    keys = (head * rows + row) * columns + layout.col.reshape(-1)[place]
    if layout.num_heads == heads:
        return keys
    return (torch.arange(heads, device=keys.device)[:, None] * (rows * columns) + keys).reshape(-1)


def _from_keys(
    keys: Tensor, sizes: tuple[int, int, int], q_block: int, k_block: int, scattered: bool
) -> BlockLayout:  # fmt: skip
    """The layout of heads, rows and columns of numbers as :func:`_keys` gives them, increasing."""
    heads, rows, columns = sizes
    device = keys.device
    begins = torch.searchsorted(keys, torch.arange(heads * rows + 1, device=device) * columns)
    crow = begins[torch.arange(heads, device=device)[:, None] * rows + torch.arange(rows + 1, device=device)]
    crow = (crow - crow[:, :1]).to(torch.int32)
    width = int(crow[:, -1].max())
    col = torch.full((heads, width), -1, dtype=torch.int32, device=device)
    inside = torch.arange(width, device=device) < crow[:, -1:]
    col.masked_scatter_(inside, (keys % max(1, columns)).to(torch.int32))
    return BlockLayout(crow, col, q_block, k_block, columns, scattered)


def _built(first: Tensor, stride: int, sizes: tuple[int, int, int, int, int], device: torch.device) -> BlockLayout:
    """Of vertical and local blocks, see :func:`local_and_vertical`."""
    _, columns, _, k_block, q_block = sizes
    return BlockLayout(*local_and_vertical(first, stride, *sizes, device), q_block, k_block, columns)
