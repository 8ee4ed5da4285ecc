"""Causal block-sparse attention over a per-head layout of key blocks; ragged, paged and padded batches."""

from importlib import metadata

from blocksparse_attn.api import AttentionResult, blocksparse_attention, blocksparse_flash_attn_varlen_fwd
from blocksparse_attn.choosing.api import select_blocks
from blocksparse_attn.layout import BlockLayout
from blocksparse_attn.module import LocalStridedBlockSparseAttn
from blocksparse_attn.plan import AttentionPlan
from blocksparse_attn.selected.api import selected_attention
from blocksparse_attn.selected.plan import SelectedPlan

__all__ = [
    "AttentionPlan",
    "AttentionResult",
    "BlockLayout",
    "LocalStridedBlockSparseAttn",
    "SelectedPlan",
    "blocksparse_attention",
    "blocksparse_flash_attn_varlen_fwd",
    "select_blocks",
    "selected_attention",
]

try:
    __version__ = metadata.version("blocksparse-attn")
except metadata.PackageNotFoundError:
    # Run from a source tree that was never installed.
    __version__ = "0+source"
