"""Multi-head latent attention: ragged prefill with separate heads, and decoding over a paged latent cache."""

from importlib import metadata

from tilelang_mla import flash_mla
from tilelang_mla.api import AttentionResult, flash_mla_varlen_func, flash_mla_with_kvcache, get_splits, plan_decode
from tilelang_mla.caches import dequantize_kv, quantize_kv
from tilelang_mla.indexer.api import index_lengths, index_scores, index_topk
from tilelang_mla.indexer.cache import IndexViews, index_cache_views, quantize_index_k
from tilelang_mla.indexer.plan import IndexPlan
from tilelang_mla.plan import DecodeTiles, PrefillPlan
from tilelang_mla.schedule import DecodePlan
from tilelang_mla.sparse.api import SparseResult, flash_mla_sparse_fwd

__all__ = [
    "AttentionResult",
    "DecodePlan",
    "DecodeTiles",
    "IndexPlan",
    "IndexViews",
    "PrefillPlan",
    "SparseResult",
    "dequantize_kv",
    "flash_mla",
    "flash_mla_sparse_fwd",
    "flash_mla_varlen_func",
    "flash_mla_with_kvcache",
    "get_splits",
    "index_cache_views",
    "index_lengths",
    "index_scores",
    "index_topk",
    "plan_decode",
    "quantize_index_k",
    "quantize_kv",
]

try:
    __version__ = metadata.version("tilelang-mla")
except metadata.PackageNotFoundError:
    # Run from a source tree that was never installed.
    __version__ = "0+source"
