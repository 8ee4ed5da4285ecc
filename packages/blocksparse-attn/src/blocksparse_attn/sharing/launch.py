"""Launches around attention to selected blocks of a cache that ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blocksparse_attn.kernels.sharing import OwnConfig, PartConfig, merge_parts, own_lists, pack_parts
from kernel_reference.integers import power_of_two_at_least
from kernel_reference.launching import Launch, launch_nothing

# Entries, columns and sequences that a program looks at together.
_MOST_TOGETHER = 1024


def prepare_own_lists(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Callable[..., None]:
    """A prepared launch, called with the op's nine tensors: a token a program."""
    indices, table, _, lengths, *_ = tensors
    world, rank, size, block_size, causal = numbers
    rows, heads, topk = indices.shape
    if not rows:
        return launch_nothing
    config = OwnConfig(
        WORLD=world, SIZE=size, BLOCK=block_size, TOPK=max(1, topk), ENTRIES=heads * topk,
        BLOCK_E=_together(heads * topk), BLOCK_C=_together(table.shape[1]), BLOCK_S=_together(len(lengths)),
        CAUSAL=causal,
    )  # fmt: skip
    rest = (len(lengths), table.shape[1], rank, *indices.stride()[:2], table.stride(0), config)
    return Launch(own_lists, (rows, 1, 1), rest, indices.device, num_warps=4)


def prepare_pack_parts(tensors: tuple[Any, ...]) -> Callable[..., None]:
    """A prepared launch, called with out, lse and parts: a row of a head a program."""
    out, _, parts = tensors
    rows, heads, size = out.shape
    return _of_rows(pack_parts, rows, heads, size, parts)


def prepare_merge_parts(tensors: tuple[Any, ...]) -> Callable[..., None]:
    """A prepared launch, called with parts, sinks, inside, out and lse: a row of a head a program."""
    parts, out = tensors[0], tensors[3]
    rows, heads, size = out.shape
    return _of_rows(merge_parts, rows, heads, size, parts)


def _of_rows(kernel: Any, rows: int, heads: int, size: int, parts: Any) -> Callable[..., None]:
    if not rows:
        return launch_nothing
    config = PartConfig(
        WORLD=parts.shape[0], H=heads, D=size, BLOCK_D=power_of_two_at_least(size), PAD=parts.shape[3] - size
    )
    return Launch(kernel, (rows * heads, 1, 1), (rows, config), parts.device, num_warps=1)


def _together(count: int) -> int:
    return min(_MOST_TOGETHER, max(16, power_of_two_at_least(max(1, count))))
