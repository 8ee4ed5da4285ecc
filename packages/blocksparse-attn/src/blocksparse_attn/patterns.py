"""Patterns of blocks as lists, built on the device without loops over heads, rows or blocks; and their cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from blocksparse_attn.lists import Names, check_blocks
from kernel_reference.checks import check_int, describe, fail
from kernel_reference.integers import cdiv

Tensor = torch.Tensor
Built = TypeVar("Built")

# Kernels count positions in 32 bits.
LONGEST = 2**31 - 1
# A model has one or two patterns; more would keep memory that nobody uses.
_MOST_KEPT = 8
# That of Phi-3-small takes 70 MB at 128k tokens, and 2 GB at a million.
_MOST_BYTES = 2**30


def local_and_vertical(
    first: Tensor, stride: int, rows: int, columns: int, local_blocks: int, k_block: int, q_block: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """crow and col of each row's vertical blocks ``first``, ``first + stride``, ... before its local ones, then those.

    A row lists two runs of equal steps, so that col is piecewise linear: its second differences are 0 except where a
    run begins, and two cumulative sums of them give the columns. first: [heads, 1] int64 on the host, where everything
    of the size of crow is computed, so that the device need not be asked how long lists are.
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
    # After the last row's, the padding up to the width: -1, -1, ...
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
    return crow.to(device, torch.int32), col.view(heads, width)


def _linear_in_pieces(position: Tensor, value: Tensor, slope: Tensor, length: int, device: torch.device) -> Tensor:
    """int32 [length]: ``value + slope * (place - position)`` from each position to the next one; positions never fall.

    Where several pieces begin at one position the last of them counts. Sums may wrap at 32 bits; columns, which fit,
    are right all the same.
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


def row_sizes(
    max_seqlen: int, last_blocks: int, name: str, block_size: int, q_block_size: int | None
) -> tuple[int, int, int, int, int]:
    """Rows, columns, the blocks that a row always lists, k_block and q_block."""
    check_int("max_seqlen", max_seqlen, 1)
    if max_seqlen > LONGEST:
        fail("max_seqlen", f"at most {LONGEST}", max_seqlen)
    check_int(name, last_blocks, 1)
    names = Names(q_block="q_block_size", k_block="block_size")
    check_int("block_size", block_size, 1)
    q_block = block_size if q_block_size is None else q_block_size
    check_blocks(q_block, block_size, names)
    columns = cdiv(max_seqlen, block_size)
    return cdiv(max_seqlen, q_block), columns, min(last_blocks, columns), block_size, q_block


def head_range(given: object, num_heads: int | None, name: str = "active_head_range") -> tuple[int, int]:
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


# The cache

_layouts: OrderedDict[Hashable, Any] = OrderedDict()
# All layouts that somebody holds, those that the cache has let go too.
_alive: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()
_lock = Lock()
_limit = _MOST_BYTES


def kept(
    arguments: tuple[Hashable, ...], device: torch.device | str | int | None,
    build: Callable[[torch.device], Built],
) -> Built:  # fmt: skip
    """The layout of these arguments: from the cache of the last few, of one that somebody holds, or newly built."""
    # Tensors of inference mode would be refused wherever a layout is used outside it.
    with torch.inference_mode(False):
        probe = torch.empty(0, device=device)
        if not may_keep(probe):
            return build(probe.device)
        key = (*arguments, probe.device)
        with _lock:
            found: Built | None = _alive.get(key)
            if found is not None:
                _keep(key, found)
                return found
        made = build(probe.device)
        with _lock:
            # Or another thread's, if it was faster.
            made = _alive.setdefault(key, made)
            _keep(key, made)
        return made


def _keep(key: Hashable, layout: Any) -> None:
    _layouts[key] = layout
    _layouts.move_to_end(key)
    _trim()


def _trim() -> None:
    while len(_layouts) > _MOST_KEPT or sum(layout.num_bytes for layout in _layouts.values()) > _limit:
        _layouts.popitem(last=False)


def clear_cache() -> None:
    """Let go of all layouts in the cache."""
    with _lock:
        _layouts.clear()


def set_cache_limit(num_bytes: int) -> None:
    """Let the cache hold so many bytes of lists from now on."""
    global _limit
    with _lock:
        _limit = num_bytes
        _trim()


def may_keep(probe: Tensor) -> bool:
    """Whether a layout built now may be cached: not with a tracer's tensors, nor in memory of a CUDA graph."""
    if type(probe) is not Tensor or torch.compiler.is_compiling():
        return False
    return not (probe.is_cuda and torch.cuda.is_current_stream_capturing())
