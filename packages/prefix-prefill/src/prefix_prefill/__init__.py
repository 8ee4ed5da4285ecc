"""Attention of new tokens over a paged KV cache and themselves: chunked prefill, prefix caching, mixed batches."""

from importlib import metadata

from prefix_prefill.api import AttentionResult, merge_attention_states, prefix_prefill
from prefix_prefill.cascade.api import cascade_attention
from prefix_prefill.cascade.arguments import CascadeLevel
from prefix_prefill.plan import PrefillPlan
from prefix_prefill.vllm import context_attention_fwd

__all__ = [
    "AttentionResult",
    "CascadeLevel",
    "PrefillPlan",
    "cascade_attention",
    "context_attention_fwd",
    "merge_attention_states",
    "prefix_prefill",
]

try:
    __version__ = metadata.version("prefix-prefill")
except metadata.PackageNotFoundError:
    # Run from a source tree that was never installed.
    __version__ = "0+source"
