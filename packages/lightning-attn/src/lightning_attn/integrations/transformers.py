"""MiniMax-Text-01's lightning attention in transformers, by this package: prefill, continuation and decoding."""

from __future__ import annotations

from contextlib import ExitStack

from transformers.models.minimax import modeling_minimax

from kernel_reference.integrations.transformers import enabled
from lightning_attn.layers import MiniMaxLightningAttention


def enable() -> ExitStack:
    """Put this package into the lightning attention of MiniMax models that are made until the result is closed.

    Used as ``with enable():`` round ``from_pretrained`` or ``from_config``, or called once and left on. A model made
    meanwhile keeps its layers. Prefill, chunks that continue a cache, and decoding go through the kernels. The states
    in transformers' cache, and the decay rates, are float32 whatever the model's dtype. Padding is zeroed as
    transformers zeroes it. Prefill is differentiable; decoding raises ValueError where gradients are recorded.
    """
    return enabled({"MiniMaxLightningAttention": LightningLayer})


class LightningLayer(modeling_minimax.MiniMaxLightningAttention):
    """``MiniMaxLightningAttention`` with its recurrence in one or two launches."""

    forward = MiniMaxLightningAttention.forward
