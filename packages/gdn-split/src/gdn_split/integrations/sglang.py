"""``SGLANG_PLUGINS=gdn_split`` for sglang: decoding of Qwen3.5's Gated DeltaNet layers.

sglang finds :func:`register` by the entry point ``sglang.srt.plugins`` and calls it in each of its processes. With
``SGLANG_ENABLE_GDN_DECODE_FUSED_PROJ_CONV=1`` its layers hand their projections to the backend whole; split,
convolution and recurrence are then one launch. The gated norm stays sglang's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from gdn_split.step.api import gdn_decode_step

try:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
except ImportError as missing:
    raise ImportError("this needs sglang 0.5.23: gdn-split[sglang]") from missing

Tensor = torch.Tensor

NAME = "gdn_split"
THEIRS = "sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend.forward_decode"

_registered: list[str] = []


def register() -> None:
    """Put this package round sglang's decode step, if ``SGLANG_PLUGINS`` names it; any number of times."""
    named = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")]
    if NAME in named and not _registered:
        HookRegistry.register(THEIRS, decode, HookType.AROUND)
        _registered.append(THEIRS)


def decode(
    theirs: Callable[..., Any],
    backend: Any,
    layer: Any,
    forward_batch: Any,
    mixed_qkv: Tensor | tuple[Tensor, Tensor],
    a: Tensor,
    b: Tensor,
    **kwargs: Any,
) -> Any:
    """What sglang's layer calls: from both projections to the outputs [1, B, Hv, Dv] before the norm, and to z.

    Layers that have split their projections already, and those that replay their states, stay sglang's own.
    """
    cache = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    conv_state, states = cache.conv[0], cache.temporal
    replays = getattr(cache, "replayssm_d", None) is not None
    taps = layer.conv_weights.shape[1] - 1
    if not isinstance(mixed_qkv, tuple) or replays or layer.activation != "silu" or conv_state.shape[2] != taps:
        return theirs(backend, layer, forward_batch, mixed_qkv, a, b, **kwargs)
    mixed_qkvz, mixed_ba = mixed_qkv
    slots = backend.forward_metadata.mamba_cache_indices
    out = gdn_decode_step(
        mixed_qkvz, mixed_ba, conv_state, layer.conv_weights, layer.bias, states, slots[: len(mixed_qkvz)],
        layer.A_log, layer.dt_bias, layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim,
        layout="contiguous", state_layout="VK",
    )  # fmt: skip
    # What the prefix cache keeps of both states.
    backend._track_mamba_state_decode(forward_batch, conv_state, states, slots, layer.layer_id)
    z = mixed_qkvz[:, -layer.v_dim :].unflatten(1, (layer.num_v_heads, layer.head_v_dim))
    return out[None], z
