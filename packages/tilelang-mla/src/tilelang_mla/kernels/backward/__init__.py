"""Gradients of the attention with separate heads: of q by tiles of queries, of k and v by tiles of keys."""

from tilelang_mla.kernels.backward.delta import delta
from tilelang_mla.kernels.backward.kernel import of_keys, of_queries

__all__ = ["delta", "of_keys", "of_queries"]
