"""A user's code, for `nox -s types` to check with mypy in strict mode; it is never run.

Every file of such a folder has a name of its own, as mypy takes them together.
"""

from typing import Any, assert_type

import torch

from lightning_attn import (
    LightningResult,
    PackedResult,
    Snapshots,
    lightning_attention,
    lightning_attention_packed,
    lightning_attention_varlen,
    lightning_commit,
    lightning_decode,
    lightning_state,
    lightning_verify,
    linear_decode_forward_triton,
    slopes,
)
from lightning_attn.parallel import lightning_attention_cp, lightning_attention_packed_cp
from lightning_attn.plan import DecodePlan, PrefillPlan

rates = slopes(8, 3, 80, family="bailing")
slopes(8, family="alibi")  # type: ignore[arg-type]
pool = torch.zeros(12, 8, 64, 64)
slots = torch.tensor([3, 7], dtype=torch.int32)


def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """By position as engines call it, and by keyword."""
    result = lightning_attention(q, k, v, rates, 256, None)
    assert_type(result, LightningResult)
    out, kv = lightning_attention(q, k, v, rates, kv_history=result.kv[:, :, -1], scale=0.5)
    return out + kv.sum()


def train(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Packed sequences, and the states that they leave."""
    result = lightning_attention_packed(q, k, v, rates, cu_seqlens, initial_state=pool[:3], scale=0.5)
    assert_type(result, PackedResult)
    return result.final_state - lightning_state(k, v, rates, cu_seqlens, exact=True)


def serve(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Ragged, then a token, then drafts."""
    keep = Snapshots(positions=slots[:, None], slots=slots[:, None])
    out = lightning_attention_varlen(
        q,
        k,
        v,
        rates,
        cu_seqlens,
        state_pool=pool,
        slots=slots,
        has_initial_state=False,
        out=torch.empty_like(v),
        snapshot=keep,
        plan=PrefillPlan(16, 16, 0, 4, 1),
    )
    assert_type(out, torch.Tensor)
    lightning_attention_varlen(q, k, v, rates, cu_seqlens, state_pool=pool, slots=slots)  # type: ignore[call-arg]
    assert_type(lightning_decode(q, k, v, pool, slots, rates, out=out, plan=DecodePlan(16, 4)), torch.Tensor)
    assert_type(lightning_verify(q[:, None], k[:, None], v[:, None], pool, slots, rates), torch.Tensor)
    lightning_commit(k[:, None], v[:, None], pool, slots, rates, torch.ones_like(slots))
    lightning_verify(q[:, None], k[:, None], v[:, None], pool, slots, rates, parents=slots[:, None] * 0 - 1)
    lightning_commit(k[:, None], v[:, None], pool, slots, rates, torch.ones_like(slots), path=slots[:, None] * 0)
    return linear_decode_forward_triton(q, k, v, pool, rates, slots, 32)


def over_ranks(group: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Tokens that ranks share."""
    assert_type(lightning_attention_cp(q, k, v, rates, group=group), LightningResult)
    packed = lightning_attention_packed_cp(q, k, v, rates, cu_seqlens, group=group, exchange="symmetric")
    assert_type(packed, PackedResult)
    return packed.out
