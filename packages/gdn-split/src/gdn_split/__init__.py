"""The projection split of Gated DeltaNet (Qwen3-Next, Qwen3.5): one kernel, or none where it can be avoided."""

from importlib import metadata

from gdn_split.api import (
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
from gdn_split.prefill.api import GdnInputs, gdn_prefill_inputs
from gdn_split.step.api import gdn_commit, gdn_decode_step, gdn_verify

__all__ = [
    "GdnInputs",
    "MergeResult",
    "RowOrder",
    "SplitResult",
    "block_order",
    "contiguous_row_order",
    "fused_qkvzba_split_reshape_cat",
    "gdn_commit",
    "gdn_decode_step",
    "gdn_prefill_inputs",
    "gdn_verify",
    "merge_qkvzba",
    "split_conv1d_update",
    "split_views",
]

try:
    __version__ = metadata.version("gdn-split")
except metadata.PackageNotFoundError:
    # Run from a source tree that was never installed.
    __version__ = "0+source"
