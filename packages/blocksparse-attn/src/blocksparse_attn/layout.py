"""Layouts: which blocks of keys each block of queries attends to, as sorted lists per head.

Builders work on the layout's device, without loops over heads, rows or blocks, and take little memory besides.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from os import PathLike
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import torch

from blocksparse_attn.arguments import (
    Names,
    check_blocks,
    check_bool,
    check_int,
    check_tensor,
    fail_lists,
    in_32_bits,
    list_faults,
    reach,
    with_heads,
)
from blocksparse_attn.plan import cdiv
from kernel_reference.checks import describe, fail

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Tensor = torch.Tensor

# Kernels count positions in 32 bits.
_LONGEST = 2**31 - 1
# A model has one or two patterns; more would keep memory that nobody uses.
_MOST_KEPT = 8


@dataclass(frozen=True, eq=False, repr=False, slots=True, weakref_slot=True)
class BlockLayout:
    """Row r of head h attends to the key blocks ``col[h, crow[h, r] : crow[h, r + 1]]``, as far as causality lets it.

    The query at position p of its sequence belongs to row ``p // q_block``, the key at position p to column
    ``p // k_block``. A layout of one head serves all heads. Columns of a row increase. One made by the methods below
    has been looked at and is right; the constructor looks at shapes and dtypes alone. Two layouts are equal when they
    are the same object.

    Attributes:
        crow: [heads or 1, rows + 1] int32, from 0, never falling. The constructor takes int64 too, and [rows + 1] of
            one head.
        col: [heads or 1, nnz] int32, as wide as the longest head's lists; what is behind a head's lists is not read,
            and -1 where made here. Taken as crow is.
        q_block, k_block: tokens of a block, multiples of 16 up to 65536, one of them a multiple of the other.
        columns: blocks of keys that there are: the longest sequence over k_block, rounded up.
    """

    crow: Tensor
    col: Tensor
    q_block: int
    k_block: int
    columns: int

    def __post_init__(self) -> None:
        check_blocks(self.q_block, self.k_block)
        crow, col = in_32_bits(*with_heads(self.crow, self.col))
        if crow is not self.crow or col is not self.col:
            object.__setattr__(self, "crow", crow)
            object.__setattr__(self, "col", col)
        _check_columns(self.columns, self.rows, self.q_block, self.k_block)

    def __repr__(self) -> str:
        sizes = f"num_heads={self.num_heads}, rows={self.rows}, columns={self.columns}"
        return f"BlockLayout({sizes}, q_block={self.q_block}, k_block={self.k_block}, device={str(self.device)!r})"

    @property
    def num_heads(self) -> int:
        """Heads that have lists of their own, or 1 for all."""
        return self.crow.shape[0]

    @property
    def rows(self) -> int:
        """Blocks of queries: a query at position ``rows * q_block`` or after sees nothing."""
        return self.crow.shape[1] - 1

    @property
    def device(self) -> torch.device:
        """Where the lists are."""
        return self.crow.device

    # Builders

    @staticmethod
    def from_mask(mask: Tensor, q_block: int, k_block: int) -> BlockLayout:
        """The layout that lists what is True in a block mask.

        Args:
            mask: [heads or 1, rows, columns] bool, any strides; columns at most those that the rows reach,
                ``ceil(rows * q_block / k_block)``. The device must tell how many are True: the call waits for it.
            q_block, k_block: tokens of a row and of a column, see the class.

        Raises:
            TypeError, ValueError: an argument is not as said above.
        """
        check_blocks(q_block, k_block)
        check_tensor("mask", mask)
        if mask.dtype != torch.bool:
            fail("mask.dtype", "bool", mask.dtype, TypeError)
        if mask.ndim != 3 or mask.shape[0] < 1:
            fail("mask", "[heads or 1, rows, columns]", describe(mask))
        heads, rows, columns = mask.shape
        most = reach(rows, q_block, k_block)
        if columns > most:
            fail("mask", f"of at most {most} columns, which its {rows} rows of {q_block} queries reach", describe(mask))
        return _from_keys(mask.reshape(-1).nonzero()[:, 0], heads, rows, columns, q_block, k_block)

    @staticmethod
    def from_csr(crow: Tensor, col: Tensor, q_block: int, k_block: int, *, columns: int | None = None) -> BlockLayout:
        """The layout of given lists, which are looked at once and, where int32, kept and not copied.

        Args:
            crow: [heads or 1, rows + 1] int32 or int64, rows contiguous: from 0, never falling, at most nnz.
            col: [heads or 1, nnz] likewise: increasing in each row, from 0 to columns - 1. What is behind
                ``crow[h, -1]`` may be anything. Of one head also [rows + 1] and [nnz].
            q_block, k_block: see the class.
            columns: see the class; None: as many as the rows reach, ``ceil(rows * q_block / k_block)``, which is also
                the most.

        Raises:
            TypeError, ValueError: an argument is not as said above; of the lists the first place that is not is named.
                To look at them the call waits for the device.
        """
        check_blocks(q_block, k_block)
        crow, col = with_heads(crow, col)
        rows = crow.shape[1] - 1
        if columns is None:
            columns = reach(rows, q_block, k_block)
        _check_columns(columns, rows, q_block, k_block)
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
            num_heads: of the whole model, which the shift follows from.
            max_seqlen: tokens of the longest sequence.
            local_blocks: blocks, the query's own counted; 1 or more.
            vert_stride: 1 or more; 1 makes the layout dense.
            block_size: tokens of a block of queries and of keys; a multiple of 16.
            homo_head: all heads have the pattern of head 0, and the layout one head.
            active_head_range: (lo, hi): the layout of heads lo .. hi - 1 alone, for a rank of a tensor-parallel model.
            device: of the lists; torch's default device when None.
            q_block_size: tokens of a row, a multiple or a divisor of block_size; block_size when None. A longer row
                lists what any of its blocks of queries would, a shorter one what its block does.

        Returns:
            The layout; the very same for the same arguments, as long as it is among the last few that were built.

        Raises:
            TypeError, ValueError: an argument is not as said above, or lists are longer than 32 bits can count.
        """
        check_int("num_heads", num_heads, 1)
        check_int("vert_stride", vert_stride, 1)
        if vert_stride > _LONGEST:
            fail("vert_stride", f"at most {_LONGEST}", vert_stride)
        check_bool("homo_head", homo_head)
        low, high = _head_range(active_head_range, num_heads)
        # Heads whose pattern is one need be listed once only.
        low, high = (0, 1) if homo_head else (low, high)
        step = 0 if homo_head else max(1, vert_stride // num_heads)
        sizes = _row_sizes(max_seqlen, local_blocks, "local_blocks", block_size, q_block_size)

        def build(device: torch.device) -> BlockLayout:
            first = (-torch.arange(low, high, device="cpu") * step - 1) % vert_stride
            return _local_and_vertical(first[:, None], vert_stride, *sizes, device)

        return _kept(("local and vertical", low, high, step, vert_stride, *sizes), device, build)

    @staticmethod
    def sliding(
        max_seqlen: int, window_blocks: int, block_size: int, device: torch.device | str | int | None = None
    ) -> BlockLayout:
        """The last blocks: key block j is visible to query block i when ``0 <= i - j < window_blocks``.

        Args:
            max_seqlen: tokens of the longest sequence.
            window_blocks: the query's own counted; 1 or more.
            block_size, device: as for :meth:`local_strided`.

        Returns:
            A layout of one head, kept as there. A window in tokens is ``window`` of the attention, with any layout.

        Raises:
            TypeError, ValueError: an argument is not as said above.
        """
        sizes = _row_sizes(max_seqlen, window_blocks, "window_blocks", block_size, None)

        def build(device: torch.device) -> BlockLayout:
            # The first vertical block is behind the last row.
            return _local_and_vertical(torch.full((1, 1), sizes[1], device="cpu"), 1, *sizes, device)

        return _kept(("sliding", *sizes), device, build)

    def union(self, other: BlockLayout) -> BlockLayout:
        """The layout that lists what either does.

        ``other``: of the same blocks and device, and of the same number of heads unless one has one for all; rows and
        columns are as many as the larger has. TypeError or ValueError where it is not so. Waits for the device.
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
        return _from_keys(keys, heads, rows, columns, self.q_block, self.k_block)

    # What it is

    def to_mask(self) -> Tensor:
        """The blocks listed, as bool [heads or 1, rows, columns] on the layout's device."""
        return block_mask(self.crow, self.col, self.rows, self.columns)

    def density(self) -> float:
        """The listed share of the blocks that causality leaves: those whose first key some query of the row may see.

        A number from 0 to 1, of all heads together; 0 where there is nothing to list. Waits for the device.
        """
        last_query = (torch.arange(self.rows, device=self.device) + 1) * self.q_block - 1
        possible = (last_query // self.k_block + 1).clamp(max=self.columns)
        row, place = _listed(self.crow, self.col)
        seen = int((self.col.reshape(-1)[place] < possible[row % max(1, self.rows)]).sum())
        return seen / max(1, int(possible.sum()) * self.num_heads)

    def plot(
        self, path: str | PathLike[str] | None = None, head: int = 0, *, max_seqlen: int | None = None,
        title: str | None = None,
    ) -> Figure:  # fmt: skip
        """A picture of one head's pattern: rows are queries, columns keys, both in tokens; hidden by causality is grey.

        Args:
            path: where to save it as well, in the format that the name's ending says.
            head: 0 .. num_heads - 1.
            max_seqlen: tokens to show, from the first; all when None.
            title: over the picture; the head and its density when None.

        Returns:
            A matplotlib Figure, which is not shown.

        Raises:
            TypeError, ValueError: an argument is not as said above.
            ModuleNotFoundError: matplotlib is not installed (``pip install blocksparse-attn[plot]``).
        """
        check_int("head", head)
        if not 0 <= head < self.num_heads:
            fail("head", f"from 0 to {self.num_heads - 1}", head)
        longest = max(self.rows * self.q_block, self.columns * self.k_block)
        if max_seqlen is not None:
            check_int("max_seqlen", max_seqlen, 1)
            longest = min(longest, max_seqlen)
        return _picture(self, path, head, longest, title)

    def to(self, device: torch.device | str | int) -> BlockLayout:
        """The layout on a device: itself where it is there."""
        wanted = _device(device)
        if wanted == self.device:
            return self
        return BlockLayout(self.crow.to(wanted), self.col.to(wanted), self.q_block, self.k_block, self.columns)

    def heads(self, lo: int, hi: int) -> BlockLayout:
        """The layout of heads lo .. hi - 1, for a rank of a tensor-parallel model; one for all heads stays as it is.

        TypeError or ValueError unless ``0 <= lo < hi`` and, where heads have lists of their own, ``hi <= num_heads``.
        """
        most = None if self.num_heads == 1 else self.num_heads
        lo, hi = _head_range((lo, hi), most, "lo, hi")
        if most is None or (lo, hi) == (0, most):
            return self
        return BlockLayout(self.crow[lo:hi], self.col[lo:hi], self.q_block, self.k_block, self.columns)


def block_mask(crow: Tensor, col: Tensor, rows: int, columns: int) -> Tensor:
    """What the first ``rows`` rows, of those there are, list of ``columns`` columns: bool [heads or 1, rows, columns].

    Lists of any content: columns in any order, and those that are not there, and rows whose bounds are impossible, list
    nothing.
    """
    row, place = _listed(crow[:, : rows + 1], col)
    column = col.reshape(-1)[place]
    there = (column >= 0) & (column < columns)
    mask = torch.zeros(crow.shape[0] * rows, columns, dtype=torch.bool, device=crow.device)
    mask[row[there], column[there].long()] = True
    return mask.view(crow.shape[0], rows, columns)


class _Listed(NamedTuple):
    """Of each entry of the lists, in their order: ``head * rows + row``, and ``head * nnz`` + its place in col."""

    row: Tensor
    place: Tensor


def _listed(crow: Tensor, col: Tensor) -> _Listed:
    heads, nnz = col.shape
    begin, end = crow[:, :-1].long(), crow[:, 1:].long()
    possible = (begin >= 0) & (begin <= end) & (end <= nnz)
    counts = torch.where(possible, end - begin, 0).reshape(-1)
    row = torch.repeat_interleave(torch.arange(counts.numel(), device=crow.device), counts)
    first = (begin + torch.arange(heads, device=crow.device)[:, None] * nnz).reshape(-1)
    before = counts.cumsum(0) - counts
    return _Listed(row, torch.arange(row.numel(), device=crow.device) + (first - before)[row])


def _keys(layout: BlockLayout, heads: int, rows: int, columns: int) -> Tensor:
    """Each entry as a number, ``(head * rows + row) * columns + column``, of a layout at most as large as said."""
    row, place = _listed(layout.crow, layout.col)
    head, row = row // max(1, layout.rows), row % max(1, layout.rows)
    keys = (head * rows + row) * columns + layout.col.reshape(-1)[place]
    if layout.num_heads == heads:
        return keys
    return (torch.arange(heads, device=keys.device)[:, None] * (rows * columns) + keys).reshape(-1)


def _from_keys(keys: Tensor, heads: int, rows: int, columns: int, q_block: int, k_block: int) -> BlockLayout:
    """The layout of numbers as :func:`_keys` gives them, increasing."""
    device = keys.device
    begins = torch.searchsorted(keys, torch.arange(heads * rows + 1, device=device) * columns)
    crow = begins[torch.arange(heads, device=device)[:, None] * rows + torch.arange(rows + 1, device=device)]
    crow = (crow - crow[:, :1]).to(torch.int32)
    width = int(crow[:, -1].max())
    col = torch.full((heads, width), -1, dtype=torch.int32, device=device)
    listed = torch.arange(width, device=device) < crow[:, -1:]
    col.masked_scatter_(listed, (keys % max(1, columns)).to(torch.int32))
    return BlockLayout(crow, col, q_block, k_block, columns)


def _local_and_vertical(
    first: Tensor, stride: int, rows: int, columns: int, local_blocks: int, k_block: int, q_block: int,
    device: torch.device,
) -> BlockLayout:  # fmt: skip
    """Each row's vertical blocks ``first``, ``first + stride``, ... before its local ones, then those.

    A row lists two runs of equal steps, so that columns are linear in pieces: their second differences are 0 but where
    a run begins, and two running sums of those give the columns. first: [heads, 1] int64 on the host, where all that is
    of the size of crow is made, so that the device need not be asked how long lists are.
    """
    row = torch.arange(rows, device="cpu")
    local = (row * q_block // k_block - local_blocks + 1).clamp(min=0)
    end = (((row + 1) * q_block - 1) // k_block).clamp(max=columns - 1) + 1
    vertical = ((local - first + stride - 1) // stride).clamp(min=0)
    crow = torch.nn.functional.pad((vertical + end - local).cumsum(1), (1, 0))
    heads, width = crow.shape[0], int(crow[:, -1].max())
    if width >= 2**31:
        fail("max_seqlen", "such that a head lists less than 2^31 blocks", f"{width} blocks")

    begin = torch.arange(heads, device="cpu")[:, None] * width + crow
    # Behind the last row's, what fills up the width: -1, -1, ...
    runs = [
        (torch.stack([vertical_run, local_run], dim=2).flatten(1), behind)
        for vertical_run, local_run, behind in (
            (begin[:, :-1], begin[:, :-1] + vertical, begin[:, -1:]),
            (first.expand_as(vertical), local.expand_as(vertical), torch.full_like(first, -1)),
            (torch.full_like(vertical, stride), torch.ones_like(vertical), torch.zeros_like(first)),
        )
    ]
    position, value, slope = (torch.cat(run, dim=1).reshape(-1) for run in runs)
    col = _linear_in_pieces(position, value, slope, heads * width, device)
    return BlockLayout(crow.to(device, torch.int32), col.view(heads, width), q_block, k_block, columns)


def _linear_in_pieces(position: Tensor, value: Tensor, slope: Tensor, length: int, device: torch.device) -> Tensor:
    """int32 [length]: ``value + slope * (place - position)`` from each position to the next one; positions never fall.

    Where several pieces begin at one position the last of them counts. Sums wrap at 32 bits, which the columns, all
    less, come through unharmed.
    """
    before_position, before_value, before_slope = (
        torch.nn.functional.pad(x[:-1], (1, 0)) for x in (position, value, slope)
    )
    jump = value - before_value - before_slope * (position - before_position)
    bend = slope - before_slope - jump
    place, second = torch.cat([position, position + 1]), torch.cat([jump, bend])
    inside = place < length
    place, second = place[inside].to(device), second[inside].to(device, torch.int32)
    return torch.zeros(length, dtype=torch.int32, device=device).index_add_(0, place, second).cumsum_(0).cumsum_(0)


# Arguments


def _check_columns(columns: object, rows: int, q_block: int, k_block: int) -> None:
    check_int("columns", columns, 0)
    most = reach(rows, q_block, k_block)
    if columns > most:  # type: ignore[operator]
        fail("columns", f"at most {most}, which {rows} rows of {q_block} queries reach", columns)


def _row_sizes(
    max_seqlen: int, last_blocks: int, name: str, block_size: int, q_block_size: int | None
) -> tuple[int, int, int, int, int]:
    """Rows, columns, the blocks that a row always lists, k_block and q_block."""
    check_int("max_seqlen", max_seqlen, 1)
    if max_seqlen > _LONGEST:
        fail("max_seqlen", f"at most {_LONGEST}", max_seqlen)
    check_int(name, last_blocks, 1)
    names = Names(q_block="q_block_size", k_block="block_size")
    check_int("block_size", block_size, 1)
    q_block = block_size if q_block_size is None else q_block_size
    check_blocks(q_block, block_size, names)
    columns = cdiv(max_seqlen, block_size)
    return cdiv(max_seqlen, q_block), columns, min(last_blocks, columns), block_size, q_block


def _head_range(given: object, num_heads: int | None, name: str = "active_head_range") -> tuple[int, int]:
    if given is None and num_heads is not None:
        return 0, num_heads
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        fail(name, "None or (lo, hi)", describe(given), TypeError)
    lo, hi = given
    for bound in (lo, hi):
        check_int(name, bound)
    if not 0 <= lo < hi or (num_heads is not None and hi > num_heads):
        fail(name, f"0 <= lo < hi{'' if num_heads is None else f' <= {num_heads}'}", (lo, hi))
    return lo, hi


# What has been built

_layouts: OrderedDict[Hashable, BlockLayout] = OrderedDict()
_lock = Lock()


def _kept(
    arguments: tuple[Hashable, ...], device: torch.device | str | int | None,
    build: Callable[[torch.device], BlockLayout],
) -> BlockLayout:  # fmt: skip
    """The layout of these arguments, built where it is not among the last few."""
    # Tensors of inference mode would be refused wherever a layout is used outside it.
    with torch.inference_mode(False):
        probe = torch.empty(0, device=device)
        if not _may_keep(probe):
            return build(probe.device)
        key = (*arguments, probe.device)
        with _lock:
            if key in _layouts:
                _layouts.move_to_end(key)
                return _layouts[key]
        made = build(probe.device)
        with _lock:
            # Another thread's, if it was faster.
            made = _layouts.setdefault(key, made)
            while len(_layouts) > _MOST_KEPT:
                _layouts.popitem(last=False)
        return made


def _may_keep(probe: Tensor) -> bool:
    """Whether what is built now serves later calls: not a tracer's tensors, nor memory that belongs to a CUDA graph."""
    if type(probe) is not Tensor or torch.compiler.is_compiling():
        return False
    return not (probe.is_cuda and torch.cuda.is_current_stream_capturing())


def _device(device: torch.device | str | int) -> torch.device:
    """With the number of the device that a name without one stands for."""
    return torch.empty(0, device=device).device


# Pictures


def _picture(
    layout: BlockLayout, path: str | PathLike[str] | None, head: int, longest: int, title: str | None
) -> Figure:
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        message = "plot needs matplotlib: pip install blocksparse-attn[plot]"
        raise ModuleNotFoundError(message, name=error.name) from error
    rows, columns = min(layout.rows, cdiv(longest, layout.q_block)), min(layout.columns, cdiv(longest, layout.k_block))
    mask = block_mask(layout.crow[head : head + 1], layout.col[head : head + 1], rows, columns)[0]
    if title is None:
        title = f"head {head}, density {layout.heads(head, head + 1).density():.3f}"
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(
        mask.cpu().numpy(), extent=(0, columns * layout.k_block, rows * layout.q_block, 0), vmin=0, vmax=1,
        cmap=ListedColormap(["white", "tab:blue"]), interpolation="nearest",
    )  # fmt: skip
    axes.fill([0, longest, longest], [0, longest, 0], color="lightgrey", linewidth=0)
    axes.set(xlim=(0, longest), ylim=(longest, 0), xlabel="key position", ylabel="query position", title=title)
    if path is not None:
        figure.savefig(path)
    return figure
