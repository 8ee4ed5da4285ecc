"""Attention of a ragged batch with separate heads: prefill."""

from tilelang_mla.kernels.prefill.kernel import attend

__all__ = ["attend"]
