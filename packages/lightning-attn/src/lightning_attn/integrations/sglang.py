"""``SGLANG_PLUGINS=lightning_attn`` for sglang: the lightning attention of Bailing's and MiniCPM's hybrid models.

sglang finds :func:`register` by the entry point ``sglang.srt.plugins`` and calls it in each of its processes. Its
backend keeps its metadata, states and snapshots for the prefix cache; the recurrence of a step is one launch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from lightning_attn.api import Snapshots, lightning_attention_varlen, lightning_decode

try:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
except ImportError as missing:
    raise ImportError("this needs sglang 0.5.23: lightning-attn[sglang]") from missing

Tensor = torch.Tensor

NAME = "lightning_attn"
THEIRS = "sglang.srt.layers.attention.linear.lightning_backend.LightningAttentionBackend._linear_attention_entry"

_registered: list[str] = []


def register() -> None:
    """Put this package round sglang's recurrence, if ``SGLANG_PLUGINS`` names it; any number of times."""
    named = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")]
    if NAME in named and not _registered:
        HookRegistry.register(THEIRS, recurrence, HookType.AROUND)
        _registered.append(THEIRS)


def recurrence(
    theirs: Callable[..., Tensor],
    backend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    state_indices_tensor: Tensor,
    metadata: Any,
    layer: Any,
    mask: Tensor | None = None,
    temp_cache: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    track_lens: Tensor | None = None,
    track_state_indices: Tensor | None = None,
) -> Tensor:
    """What sglang's backend calls: q, k and v [T, H, D] to [T, H, D], states [slots, H, D, D] advanced.

    Steps that verify drafts, which have a mask or a cache of states for each of them, stay sglang's own.
    """
    if mask is not None or temp_cache is not None:
        return theirs(
            backend, q, k, v, kv_cache, state_indices_tensor, metadata, layer, mask, temp_cache,
            intermediate_state_indices, track_lens, track_state_indices,
        )  # fmt: skip
    slopes = backend.tp_slope[layer.layer_id]
    if metadata.num_prefills == 0:
        return lightning_decode(q, k, v, kv_cache, state_indices_tensor[: len(q)], slopes, scale=layer.scaling)
    sequences = len(metadata.query_start_loc) - 1
    snapshot = None
    if track_lens is not None and track_state_indices is not None:
        # Tokens of each sequence after which its state is kept too; 0, and slot -1, where none is.
        kept = track_state_indices[:sequences, None]
        snapshot = Snapshots(torch.where(kept < 0, -1, track_lens[:sequences, None]), kept)
    return lightning_attention_varlen(
        q, k, v, slopes, metadata.query_start_loc, state_pool=kv_cache, slots=state_indices_tensor[:sequences],
        has_initial_state=metadata.has_initial_states, scale=layer.scaling, snapshot=snapshot,
    )  # fmt: skip
