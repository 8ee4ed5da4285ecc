"""Does an engine's layer give the same with our kernels and with the engine's own, eagerly and in a CUDA graph?"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernel_reference.bench.engines import captured

Tensor = torch.Tensor
Call = Callable[[], Tensor]


def assert_alike(
    ours: Call, theirs: Call, *, heads: int, within: float, renew: Callable[[], None] | None = None
) -> None:
    """Compare two calls of a layer, each of which gives [tokens, heads * head size].

    Args:
        within: the largest difference, as a share of the largest element of a token's head.
        renew: writes other inputs over those that both calls read; ours is then replayed from a graph that was
            captured before. None: no graph, as where a batch is of another kind than those that an engine captures.

    Raises:
        AssertionError: a difference is larger, or not a number.
    """
    _assert_near(ours(), theirs(), heads, within)
    if renew is not None:
        replay = captured(ours)
        renew()
        _assert_near(replay(), theirs(), heads, within)


def _assert_near(ours: Tensor, theirs: Tensor, heads: int, within: float) -> None:
    ours, theirs = (x.double().unflatten(1, (heads, -1)) for x in (ours, theirs))
    worst = float(((ours - theirs).abs() / theirs.abs().amax(-1, keepdim=True)).max())
    # Not a number is not below.
    if not worst < within:
        raise AssertionError(f"differs by {worst:.4f} of a head's largest element, may differ by {within}")
