"""A picture of one head's pattern."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def picture(
    mask: torch.Tensor, q_block: int, k_block: int, longest: int, title: str, path: str | PathLike[str] | None
) -> Figure:
    """Of a block mask [rows, columns], up to ``longest`` tokens; saved where a path is given."""
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        message = "plot needs matplotlib: pip install blocksparse-attn[plot]"
        raise ModuleNotFoundError(message, name=error.name) from error
    rows, columns = mask.shape
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(
        mask.cpu().numpy(), extent=(0, columns * k_block, rows * q_block, 0), vmin=0, vmax=1,
        cmap=ListedColormap(["white", "tab:blue"]), interpolation="nearest",
    )  # fmt: skip
    axes.fill([0, longest, longest], [0, longest, 0], color="lightgrey", linewidth=0)
    axes.set(xlim=(0, longest), ylim=(longest, 0), xlabel="key position", ylabel="query position", title=title)
    if path is not None:
        figure.savefig(path)
    return figure
