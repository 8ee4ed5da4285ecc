"""A user's code, for `nox -s types` to check with mypy in strict mode; it is never run.

Every file of such a folder has a name of its own, as mypy takes them together.
"""

from typing import Literal, assert_type

import torch

from gdn_split import (
    MergeResult,
    RowOrder,
    SplitResult,
    block_order,
    contiguous_row_order,
    fused_qkvzba_split_reshape_cat,
    merge_qkvzba,
    split_conv1d_update,
    split_views,
)
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
