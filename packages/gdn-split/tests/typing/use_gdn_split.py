"""A user's code, for `nox -s types` to check with mypy in strict mode; it is never run.

Every file of such a folder has a name of its own, as mypy takes them together.
"""

from typing import Any, Literal, assert_type

import torch

from gdn_split import (
    GdnInputs,
    MergeResult,
    RowOrder,
    SplitResult,
    block_order,
    contiguous_row_order,
    fused_qkvzba_split_reshape_cat,
    gdn_commit,
    gdn_decode_step,
    gdn_prefill_inputs,
    gdn_verify,
    merge_qkvzba,
    split_conv1d_update,
    split_views,
)
from gdn_split.parallel import conv_halo, head_shard, shard_views
from gdn_split.plan import ConvPlan, SplitPlan

sizes = (16, 32, 128, 128)


def prefill(
    mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor, layout: Literal["interleaved", "contiguous"]
) -> MergeResult:
    """By position as engines call it; with tensors of the caller's; and back."""
    mixed_qkv, z, b, a = fused_qkvzba_split_reshape_cat(mixed_qkvz, mixed_ba, 16, 32, 128, 128)
    plan = SplitPlan(1, 0, 1, 1, 4)
    parts = fused_qkvzba_split_reshape_cat(
        mixed_qkvz, mixed_ba, *sizes, layout=layout, out=(mixed_qkv, z, b, a), plan=plan
    )
    assert_type(parts, SplitResult)
    assert_type(split_views(mixed_qkvz, mixed_ba, *sizes), SplitResult)
    fused_qkvzba_split_reshape_cat(mixed_qkvz, mixed_ba, *sizes, layout="packed")  # type: ignore[arg-type]
    return merge_qkvzba(*parts, *sizes, layout="contiguous", out=[mixed_qkvz, mixed_ba])


def load(weight: torch.Tensor) -> torch.Tensor:
    """The permutation of the weights' rows, and of their scales."""
    order = contiguous_row_order(*sizes)
    assert_type(order, RowOrder)
    return weight[block_order(order.qkvz, 128)]


def decode(mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor, state: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """With and without an activation."""
    slots = torch.tensor([1, -1], dtype=torch.int32)
    split_conv1d_update(mixed_qkvz, mixed_ba, state, weight, None, slots, *sizes, activation="gelu")  # type: ignore[arg-type]
    convolved = split_conv1d_update(
        mixed_qkvz, mixed_ba, state, weight, weight[:, 0], slots, *sizes, activation=None, tokens_per_sequence=2
    )
    assert_type(convolved, SplitResult)
    plan = ConvPlan(1, 1, 32, 16, 4)
    return split_conv1d_update(mixed_qkvz, mixed_ba, state, weight, None, slots, *sizes, plan=plan).mixed_qkv


def serve(mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor, pool: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A prompt's inputs; then a token, and drafts of which one is accepted."""
    slots = torch.tensor([1, 2], dtype=torch.int32)
    rates = torch.zeros(32)
    inputs = gdn_prefill_inputs(
        mixed_qkvz, mixed_ba, weight, None, slots, rates, rates, *sizes, conv_state=pool, slots=slots[:1]
    )
    assert_type(inputs, GdnInputs)
    step = (mixed_qkvz, mixed_ba, pool, weight, None, pool, slots, rates, rates)
    out = gdn_decode_step(*step, *sizes, state_layout="VK")
    gdn_verify(*step, *sizes)  # type: ignore[call-arg]
    drafts = gdn_verify(*step, *sizes, tokens_per_sequence=2, out=out)
    assert_type(drafts, torch.Tensor)
    gdn_commit(*step, slots, *sizes, tokens_per_sequence=2)
    return out


def over_ranks(group: Any, x: torch.Tensor, cu_seqlens: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Heads that ranks share, and tokens."""
    before, after = conv_halo(x, cu_seqlens, group=group, width=4)
    assert_type(before, torch.Tensor)
    assert_type(after, torch.Tensor)
    return shard_views(weight, head_shard(*sizes, world=4, rank=1).qkvz)
