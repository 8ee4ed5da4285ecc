"""A user's code: what a type checker says of it in strict mode (``nox -s types``). Never run."""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch import Tensor

from kernel_reference.sharding import Interleave
from prefix_prefill import (
    AttentionResult,
    CascadeLevel,
    PrefillPlan,
    cascade_attention,
    context_attention_fwd,
    merge_attention_states,
    prefix_prefill,
)
from prefix_prefill.parallel import prefix_decode_cp, prefix_prefill_cp


def chunk(q: Tensor, k: Tensor, v: Tensor, cache: Tensor, table: Tensor, cu: Tensor, lengths: Tensor) -> Tensor:
    """New tokens beside the cache; then in it, with more options."""
    out = prefix_prefill(q, k, v, cache, cache, table, cu, lengths, max_seqlen_q=512)
    assert_type(out, Tensor)
    plan = PrefillPlan(block_m=64, block_n=64, num_splits=2, num_warps=4, num_stages=2)
    assert_type(
        prefix_prefill(
            q, None, None, cache, cache, table, cu, lengths, max_seqlen_q=512, max_seqlen_k=None, page_layout="HND",
            window=(127, 0), k_scale=0.5, v_scale=torch.ones(1), out=out, return_lse=False, plan=plan,
        ),
        Tensor,
    )  # fmt: skip
    # A layout that there is not.
    prefix_prefill(q, k, v, cache, cache, table, cu, lengths, max_seqlen_q=512, page_layout="NDH")  # type: ignore[call-overload]
    return out


def cascade(q: Tensor, cache: Tensor, table: Tensor, cu: Tensor, lengths: Tensor, with_lse: bool) -> Tensor:
    """Two results over different keys, merged."""
    one = prefix_prefill(q, None, None, cache, cache, table, cu, lengths, max_seqlen_q=1, return_lse=True)
    assert_type(one, AttentionResult)
    either = prefix_prefill(q, None, None, cache, cache, table, cu, lengths, max_seqlen_q=1, return_lse=with_lse)
    assert_type(either, Tensor | AttentionResult)
    out, lse = one
    merged = merge_attention_states(out, lse, one.out, one.lse, out=torch.empty_like(out))
    assert_type(merged, AttentionResult)
    return merged.out


def as_engines_do(q: Tensor, k: Tensor, v: Tensor, o: Tensor, cache: Tensor, table: Tensor, cu: Tensor) -> None:
    """vLLM's signature."""
    scale = torch.ones(1)
    context_attention_fwd(q, k, v, o, "auto", cache, cache, table, cu, cu[1:], 4096, 512, scale, scale)


def over_levels(q: Tensor, cache: Tensor, table: Tensor, cu: Tensor, lengths: Tensor) -> AttentionResult:
    """Levels of shared keys."""
    level = CascadeLevel(cache, cache, table, cu, lengths)
    assert_type(cascade_attention(q, [level, level], max_seqlen_q=1), Tensor)
    return cascade_attention(q, (level,), max_seqlen_q=1, k_scale=0.5, v_scale=0.5, return_lse=True)


def over_ranks(group: Any, q: Tensor, cache: Tensor, table: Tensor, cu: Tensor, lengths: Tensor) -> AttentionResult:
    """Tokens that ranks share: of a prompt, and of a cache."""
    out = prefix_prefill_cp(q, q, q, cache, cache, table, cu, lengths, max_seqlen_q=512, group=group)
    assert_type(out, Tensor)
    layout = Interleave.of(group, size=16)
    return prefix_decode_cp(
        q, cache, cache, table, cu, lengths, max_seqlen_q=1, layout=layout, group=group, return_lse=True
    )
