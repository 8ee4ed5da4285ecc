"""``attn_implementation="prefix_prefill"`` in transformers: the attention of any causal decoder, over static caches."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from kernel_reference.checks import fail
from kernel_reference.integrations.transformers import Attention, enabled, key_lengths, lengths_mask, refuse_options
from prefix_prefill.api import prefix_prefill

Tensor = torch.Tensor

NAME = "prefix_prefill"

# The page of the pool that nothing reads: a call without cached keys has one all the same.
_PAGE = 16


def enable() -> ExitStack:
    """Register the attention that ``attn_implementation="prefix_prefill"`` names, until the result is closed.

    Used as ``with enable():``, or called once and left on. Covered are causal decoders with any number of kv heads,
    with sliding windows, a soft cap and attention sinks, over a ``StaticCache`` (``cache_implementation="static"``),
    whose length is best a multiple of 128, or without a cache. The sequences of a batch are of one length.

    Raises, in the model's call, ValueError for what is not covered, by name: padding and masks of the caller's own,
    dropout, weights of attention, a cache that grows, where a kernel would be compiled for each of its lengths.
    """
    return enabled(attention={NAME: Attention(attention, mask)})


def mask(*, q_offset: int | Tensor = 0, local_size: int | None = None, **options: Any) -> Tensor | None:
    """:func:`kernel_reference.integrations.transformers.lengths_mask`, for caches that do not grow."""
    # What a static cache holds is told by a tensor.
    if local_size is None and isinstance(q_offset, int) and q_offset > 0:
        fail("past_key_values", 'a StaticCache (or cache_implementation="static")', "a cache that grows")
    return lengths_mask(q_offset=q_offset, local_size=local_size, **options)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [B, Hq, S, D], key and value [B, Hkv, L, D]; gives [B, S, Hq, D]."""
    refuse_options(module, dropout, options)
    batch, heads, tokens, head_dim = query.shape
    window = options.get("sliding_window")
    lengths = key_lengths(attention_mask, batch, tokens, window)
    if lengths is None and key.shape[2] < tokens:
        fail("key", f"at least the {tokens} tokens of query", f"{key.shape[2]}")
    new = key.shape[2] == tokens
    if lengths is None or new:
        lengths = torch.full((batch,), tokens, dtype=torch.int32, device=query.device)
    k_new: Tensor | None = None
    v_new: Tensor | None = None
    if new:
        k_new, v_new = _rows(key), _rows(value)
        k_cache = v_cache = key.new_zeros((1, key.shape[1], _PAGE, head_dim))
        table = torch.zeros((batch, 1), dtype=torch.int32, device=query.device)
    else:
        # Each sequence's part of a static cache is one page.
        k_cache, v_cache = key, value
        table = torch.arange(batch, dtype=torch.int32, device=query.device)[:, None]
    out = prefix_prefill(
        _rows(query), k_new, v_new, k_cache, v_cache, table,
        torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=query.device), lengths,
        max_seqlen_q=tokens, page_layout="HND", softmax_scale=scaling,
        window=None if window is None else (window - 1, 0), softcap=options.get("softcap") or 0.0,
        sinks=options.get("s_aux"),
    )  # fmt: skip
    return out.view(batch, tokens, heads, head_dim), None


def _rows(states: Tensor) -> Tensor:
    """[B, H, S, D] as [B * S, H, D]."""
    return states.transpose(1, 2).flatten(0, 1)
