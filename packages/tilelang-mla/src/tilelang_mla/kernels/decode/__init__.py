"""Attention of packed query tokens x heads to a paged latent cache: decoding, with split-KV."""

from tilelang_mla.kernels.decode.kernel import attend

__all__ = ["attend"]
