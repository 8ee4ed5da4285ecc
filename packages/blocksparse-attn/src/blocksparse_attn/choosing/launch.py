"""Launches of ``choose``: one program a row of scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blocksparse_attn.choosing import reference
from blocksparse_attn.kernels.choose import ChooseConfig, PackConfig, choose, pack
from kernel_reference.integers import cdiv, power_of_two_at_least
from kernel_reference.launching import Launch, launch_nothing

# Columns that a program holds in registers; torch sorts wider rows.
_MOST_COLUMNS = 2**14
# Rows whose lists a program moves, and counts that it adds up at once.
_ROWS, _COUNTS = 64, 512
# Columns of a warp.
_COLUMNS_OF_WARP = 512


def prepare_choose(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Callable[..., None]:
    """A prepared launch, called with scores, possible, indices and counts."""
    scores, possible, indices, _ = tensors
    rows, columns = scores.shape
    topk, local, sink, within, *reach = numbers
    if not rows:
        return launch_nothing
    if columns > _MOST_COLUMNS:
        return lambda *four: reference.choose(*four, *numbers)
    block = max(_COLUMNS_OF_WARP, power_of_two_at_least(max(1, columns)))
    warps = block // _COLUMNS_OF_WARP
    config = ChooseConfig(
        BLOCK_C=block, QUADS=columns % 4 == 0, GROUPS=min(64, power_of_two_at_least(max(1, topk))), LANES=32 * warps,
        WIDTH=indices.shape[1], BLOCK_W=max(16, power_of_two_at_least(max(1, indices.shape[1]))), TOPK=topk,
        LOCAL=local, SINK=sink, WITHIN=within,
    )  # fmt: skip
    # Where the kernel counts rows anew in each head, heads are in the other dimension.
    grid = (reach[0], rows // reach[0], 1) if possible is None else (rows, 1, 1)
    return Launch(choose, grid, (columns, *reach, scores.stride(0), config), scores.device, num_warps=warps)


def prepare_pack(tensors: tuple[Any, ...]) -> Callable[..., None]:
    """A prepared launch, called with indices, counts, crow and col: some rows of one head a program."""
    indices = tensors[0]
    heads, rows, width = indices.shape
    if not rows or not width:
        return lambda *four: reference.pack(*four)
    config = PackConfig(WIDTH=width, BLOCK_W=max(16, power_of_two_at_least(width)), BLOCK_R=_ROWS, TOGETHER=_COUNTS)
    return Launch(pack, (heads * cdiv(rows, _ROWS), 1, 1), (rows, config), indices.device, num_warps=4)
