"""Eager calls past torch's dispatcher, and batches of new sizes among them. Torch only.

A server's batches have new sizes every step: numbers of tokens and sequences, the longest of which. What they change of
a call that has been checked, planned and launched are a few integers, so that here the launch of another batch takes
these. All else must look alike (guards of kernel_reference.dispatch), and the sizes must fit each other as
:func:`prefix_prefill.arguments.check_prefill` asks; where they do not, or decide more than integers, the op is called,
which checks everything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from itertools import count
from operator import or_
from typing import Any

import torch

from kernel_reference.checks import MemoryOverlap
from kernel_reference.dispatch import Free, PreparedLaunches, allocator_of
from prefix_prefill import arguments
from prefix_prefill.addressing import Batch
from prefix_prefill.arguments import PrefillTensors
from prefix_prefill.cascade import arguments as levels

Tensor = torch.Tensor

_NAMES = PrefillTensors._fields
_OUT, _LSE = _NAMES.index("out"), _NAMES.index("lse")
# Of a cascade, whose levels come before.
_FLAT_OUT, _FLAT_LSE = (
    levels.CascadeTensors._fields.index(name) - len(levels.CascadeTensors._fields) for name in ("out", "lse")
)
# Of a call: what tells it from others, beside its tensors.
Kind = tuple[Any, ...]
_MAX_SEQLEN_Q = 3
# Tensors of a row a token, and lengths of a sequence each.
_ROWS = ("q", "k", "v", "out", "draft_mask")
_LENGTHS = ("cu_seqlens_q", "seqlens_k")
# Launches that a layer's batches keep: a kilobyte each, and new ones take 30 us.
_MOST_BATCHES = 2048
# What starts calls on addresses that have come again, by the number of what serves them: 3 kilobytes each. Those of the
# layers of a model come every step, a batch of other sizes seldom twice: of what was seen once there is None.
_MOST_AGAIN = 8192
_again: dict[tuple[int | None, ...], Callable[[], bool] | None] = {}
_numbers = count()


def of_any_batch(kind: Kind) -> Kind:
    """What tells layers apart: the kind of a call without its longest sequence."""
    return "batches", *kind[:_MAX_SEQLEN_Q], *kind[_MAX_SEQLEN_Q + 1 :]


def free_sizes(tensors: tuple[Tensor | None, ...]) -> dict[int, Free]:
    """The sizes and strides of a call that may differ from batch to batch."""
    free = {_NAMES.index(name): Free(sizes=(0,)) for name in (*_ROWS, *_LENGTHS)}
    free[_NAMES.index("block_table")] = Free(sizes=(0, 1), strides=(0,))
    return {position: dims for position, dims in free.items() if tensors[position] is not None}


def has_free_sizes(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether what was checked of these tensors holds for others whose free sizes differ.

    Of a dimension of one element no check sees the stride, so that longer ones might have any.
    """
    given = PrefillTensors(*tensors)  # type: ignore[arg-type]
    vectors = (given.cu_seqlens_q, given.seqlens_k, *([] if given.draft_mask is None else [given.draft_mask]))
    # Tokens further apart than anything else never meet, however many there are.
    apart = given.out is None or given.out.stride(0) == max(given.out.stride())
    long = given.q.shape[0] > 1 and given.block_table.shape[1] > 1
    return long and apart and all(tensor.stride(0) == 1 for tensor in vectors)


class Batches:
    """What serves the batches of a layer, by their sizes.

    layer: of ``prefix_prefill.launch``, made for a call with these tensors, ``out`` and ``lse``.
    """

    def __init__(
        self, layer: Any, launches: PreparedLaunches, tensors: tuple[Any, ...], out: Tensor, lse: Tensor | None
    ) -> None:
        self._layer, self._launches = layer, launches
        self._overlap = arguments.overlap_of_prefill(PrefillTensors(*tensors)._replace(out=out, lse=lse))
        self._makes_out, self._out, self._has_lse = tensors[_OUT] is None, (out.shape[1:], out.dtype), lse is not None
        self._page_size, self._device = layer.problem.page_size, out.device
        self._made: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, tensors: tuple[Any, ...], kind: Kind, asked: Kind) -> Callable[..., Any] | None:
        """What serves a call of this kind with tensors that look like the layer's; None where the op must be asked.

        It is kept for calls that are ``asked`` for so.
        """
        q, k, v, _, _, table, cu, lengths, _, _, _, _, _, out, _, draft = tensors
        sizes = (
            q.shape[0], lengths.shape[0], kind[_MAX_SEQLEN_Q], table.shape, table.stride(), cu.shape[0],
            *[x.shape[0] for x in (k, v, out, draft) if x is not None],
        )  # fmt: skip
        found = self._made.get(sizes)
        if found is not None:
            # Other layers of the same step: these find it without looking at sizes.
            self._launches.keep_direct(tensors, asked, lambda: found)
            return found
        made = self._make(*sizes)
        if made is not None:
            if len(self._made) >= _MOST_BATCHES:
                self._made.clear()
            self._made[sizes] = made
        return made

    def _make(
        self, tokens: int, sequences: int, most: Any, table: Any, s_table: Any, bounds: int, *rows: int
    ) -> Callable[..., Any] | None:
        alike = bounds == sequences + 1 and table[0] == sequences > 0 and all([n == tokens for n in rows])
        few_drafts = not self._layer.problem.draft or most <= arguments.MOST_DRAFTED
        if not (alike and tokens > 1 and table[1] > 1 and type(most) is int and most >= 0 and few_drafts):
            return None
        problem = self._layer.problem.of_batch(tokens, sequences, most, table[1] * self._page_size)
        batch = Batch(problem, s_table[0], (tokens, 1) if self._has_lse else (0, 0))
        (heads, size), dtype = self._out
        new_out: Any = _nothing
        new_lse: Any = _nothing
        if self._makes_out:
            new_out = allocator_of((tokens, heads, size), (heads * size, size, 1), dtype, self._device)
        if self._has_lse:
            new_lse = allocator_of((heads, tokens), (tokens, 1), torch.float32, self._device)
        return _calling(self._layer.of_batch(batch), self._overlap, new_out, new_lse, resized=True)


def direct_call(
    check_overlap: MemoryOverlap, run: Any, tensors: tuple[Any, ...], out: Tensor, lse: Tensor | None
) -> Callable[..., Any]:
    """What serves calls like one that the op has served with these tensors, ``out`` and ``lse``."""
    new_out = _nothing if tensors[_OUT] is not None else allocator_of(out.shape, out.stride(), out.dtype, out.device)
    new_lse = _nothing if lse is None else allocator_of(lse.shape, lse.stride(), lse.dtype, lse.device)
    return _calling(run, check_overlap, new_out, new_lse)


def direct_cascade(
    check_overlap: MemoryOverlap, run: Any, makes_out: bool, out: Tensor, lse: Tensor | None
) -> Callable[..., Any]:
    """The same of a cascade, called with its tensors in one list, which it puts its results in."""
    new_out = allocator_of(out.shape, out.stride(), out.dtype, out.device)
    new_lse = _nothing if lse is None else allocator_of(lse.shape, lse.stride(), lse.dtype, lse.device)
    # New memory overlaps none.
    check: Any = _nothing if makes_out else check_overlap
    start = _starting(
        lambda *flat: run(levels.tensors_of_levels(levels.from_flat(flat))),
        lambda *flat: run.at(levels.tensors_of_levels(levels.from_flat(flat))),
        lambda *flat: run.again(levels.tensors_of_levels(levels.from_flat(flat))),
        check,
    )

    def call(flat: list[Any]) -> tuple[Tensor, Tensor | None]:
        flat[_FLAT_LSE] = lse = new_lse()
        if makes_out:
            flat[_FLAT_OUT] = new_out()
        start(*flat)
        return flat[_FLAT_OUT], lse

    return call


def direct_merge(
    check_overlap: MemoryOverlap, run: Any, makes_out: bool, out: Tensor, lse: Tensor
) -> Callable[..., Any]:
    """The same of a merge, whose tensors are those of ``MergeTensors``."""
    new_out = allocator_of(out.shape, out.stride(), out.dtype, out.device)
    new_lse = allocator_of(lse.shape, lse.stride(), lse.dtype, lse.device)
    check: Any = _nothing if makes_out else check_overlap
    start = _starting(run, run.at, run.again, check)

    def call(*given: Any) -> tuple[Tensor, Tensor]:
        *parts, out = given
        lse = new_lse()
        if makes_out:
            out = new_out()
        start(*parts, out, lse)
        return out, lse

    return call


def _starting(run: Any, at: Any, again: Any, check_overlap: Callable[..., object]) -> Callable[..., None]:
    """What starts a call with its tensors, those on addresses that have come again by what was kept for these: they
    alone tell whether memory is shared, so that it is not looked at again.
    """
    number = next(_numbers)

    def start(*given: Tensor | None) -> None:
        pointers = [x if x is None else x.data_ptr() for x in given]
        key = number, *pointers
        known = _again.get(key, _unseen)
        if known is not None and known():
            return
        check_overlap(*given)
        aligned = not reduce(or_, filter(None, pointers), 0) & 15
        if not (aligned and at(*pointers)):
            run(*given)
        elif known is _unseen:
            if len(_again) >= _MOST_AGAIN:
                _again.clear()
            _again[key] = None
        elif known is None:
            _again[key] = again(*pointers)

    return start


def _calling(
    run: Any, check_overlap: MemoryOverlap, new_out: Any, new_lse: Any, resized: bool = False
) -> Callable[..., Any]:
    """resized: the tensors are of other sizes than those that ``check_overlap`` was made for."""

    def check(*given: Any) -> None:
        nonlocal check_overlap, resized
        if resized:
            check_overlap, resized = check_overlap.resized(*given), False
        check_overlap(*given)

    # New memory overlaps none.
    start = _starting(run, run.at, run.again, check if new_out is _nothing else _nothing)

    def into(*given: Any) -> tuple[Tensor, Tensor | None]:
        lse = new_lse()
        start(*given[:_LSE], lse, *given[_LSE + 1 :])
        return given[_OUT], lse

    def anew(*given: Any) -> tuple[Tensor, Tensor | None]:
        out, lse = new_out(), new_lse()
        start(*given[:_OUT], out, lse, *given[_LSE + 1 :])
        return out, lse

    return into if new_out is _nothing else anew


def _unseen() -> bool:
    return False


def _nothing(*_: Any) -> Any:
    return None
