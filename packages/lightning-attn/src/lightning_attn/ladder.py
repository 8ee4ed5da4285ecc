"""The decay rates of the model family."""

from __future__ import annotations

import torch

from kernel_reference.checks import as_int, describe, fail

# By how much the layer that counts as the first lies ahead of index 0.
_SHIFTS = {"minimax": 0, "bailing": 1}


def slopes(
    num_heads: int, layer_idx: int | None = None, num_layers: int | None = None, *, family: str = "minimax"
) -> torch.Tensor:
    """The decay rates of a layer: head i forgets by exp(-slopes[i]) a token.

    For H heads, H a power of two, the rungs are ``2**(-8 (i + 1) / H)``. Otherwise, c being the greatest power of two
    below H, they are the c rungs of c heads and then every second rung of 2c heads (the first, the third, ...), as many
    as are missing. These are ALiBi's slopes (arXiv 2108.12409), which MiniMax-01 (arXiv 2501.08313) takes as decay
    rates. Layers scale them, so that later ones remember for longer: MiniMax's modelling code
    (``modeling_minimax_m1.py``) by ``1 - layer_idx / (num_layers - 1) + 1e-5``, that of Ling linear and Ring linear
    (``modeling_bailing_moe_linear.py``) by ``1 - (layer_idx - 1) / (num_layers - 1) + 1e-5``, layer_idx from 0 there
    too, so that its first layer has rates above the rungs.

    Args:
        num_heads: H >= 1, of the whole model: a tensor-parallel rank takes its slice of the result.
        layer_idx, num_layers: the layer, 0 to num_layers - 1, and how many there are; both or neither. A single layer
            has a divisor of 1.
        family: ``"minimax"`` or ``"bailing"``, whose rule the layers follow. Without a layer they are the same.

    Returns:
        float32 [H], on the CPU.

    Raises:
        TypeError, ValueError: an argument is not as said above.
    """
    num_heads = as_int("num_heads", num_heads)
    if num_heads < 1:
        fail("num_heads", "at least 1", num_heads)
    if not isinstance(family, str):
        fail("family", " or ".join(map(repr, _SHIFTS)), describe(family), TypeError)
    if family not in _SHIFTS:
        fail("family", " or ".join(map(repr, _SHIFTS)), repr(family))
    if (layer_idx is None) != (num_layers is None):
        missing, given = ("layer_idx", "num_layers") if layer_idx is None else ("num_layers", "layer_idx")
        fail(missing, f"given where {given} is", None)
    rungs = _rungs(num_heads)
    if layer_idx is not None and num_layers is not None:
        num_layers, layer_idx = as_int("num_layers", num_layers), as_int("layer_idx", layer_idx)
        if num_layers < 1:
            fail("num_layers", "at least 1", num_layers)
        if not 0 <= layer_idx < num_layers:
            fail("layer_idx", f"from 0 to num_layers - 1 = {num_layers - 1}", layer_idx)
        factor = 1 - (layer_idx - _SHIFTS[family]) / max(1, num_layers - 1) + 1e-5
        rungs = [rung * factor for rung in rungs]
    return torch.tensor(rungs, dtype=torch.float32, device="cpu")


def _rungs(heads: int) -> list[float]:
    whole = 1 << (heads.bit_length() - 1)
    rungs = _even_rungs(whole)
    return rungs + _even_rungs(2 * whole)[::2][: heads - whole]


def _even_rungs(heads: int) -> list[float]:
    return [2.0 ** (-8 * (i + 1) / heads) for i in range(heads)]
