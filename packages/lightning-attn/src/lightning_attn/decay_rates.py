"""The decay rates of published models."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from kernel_reference.checks import check_choice, check_int, fail

Family = Literal["minimax", "bailing"]

# By how much the layer that counts as the first lies ahead of index 0.
_SHIFTS = {"minimax": 0, "bailing": 1}


def slopes(
    num_heads: int, layer_idx: int | None = None, num_layers: int | None = None, *, family: Family = "minimax"
) -> torch.Tensor:
    """The decay rates of a layer: head i forgets by exp(-slopes[i]) a token.

    For H heads, H a power of two, the rates are ``2**(-8 (i + 1) / H)``. Otherwise, c being the greatest power of two
    below H, they are the c rates of c heads and then every second one of 2c heads (the first, the third, ...), as many
    as are missing. These are ALiBi's slopes (arXiv 2108.12409), which MiniMax-01 (arXiv 2501.08313) takes as decay
    rates. Layers scale them, so that later ones remember for longer: ``"minimax"``, as MiniMax's modelling code and
    serving engines do, by ``1 - layer_idx / (num_layers - 1) + 1e-5`` (transformers' own divides by 1e-5 more, which
    changes the eighth digit); ``"bailing"``, as the modelling code of Ling and Ring linear does
    (``modeling_bailing_moe_linear.py``, ``modeling_bailing_moe_v2_5.py``), by
    ``1 - (layer_idx - 1) / (num_layers - 1) + 1e-5``, layer_idx from 0 there too, so that its first layer has higher
    rates than these.

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
    num_heads = check_int("num_heads", num_heads, 1)
    check_choice("family", family, get_args(Family))
    if (layer_idx is None) != (num_layers is None):
        missing, given = ("layer_idx", "num_layers") if layer_idx is None else ("num_layers", "layer_idx")
        fail(missing, f"given where {given} is", None)
    rates = _alibi(num_heads)
    if layer_idx is not None and num_layers is not None:
        num_layers = check_int("num_layers", num_layers, 1)
        layer_idx = check_int("layer_idx", layer_idx, 0, num_layers - 1)
        factor = 1 - (layer_idx - _SHIFTS[family]) / max(1, num_layers - 1) + 1e-5
        rates = [rate * factor for rate in rates]
    return torch.tensor(rates, dtype=torch.float32, device="cpu")


def _alibi(heads: int) -> list[float]:
    whole = 1 << (heads.bit_length() - 1)
    rates = _geometric(whole)
    return rates + _geometric(2 * whole)[::2][: heads - whole]


def _geometric(heads: int) -> list[float]:
    return [2.0 ** (-8 * (i + 1) / heads) for i in range(heads)]
