"""Attention of packed query tokens x heads to a paged latent cache: decoding, with split-KV."""

from tilelang_mla.kernels.decode.kernel import attend
from tilelang_mla.kernels.decode.kernel_8bit import attend_8bit
from tilelang_mla.kernels.decode.kernel_sparse import attend_sparse
from tilelang_mla.kernels.decode.kernel_sparse_prefill import attend_sparse_prefill

__all__ = ["attend", "attend_8bit", "attend_sparse", "attend_sparse_prefill"]
