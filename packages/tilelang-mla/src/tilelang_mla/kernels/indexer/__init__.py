"""The indexer's kernels: scores of keys, and the positions of the highest of them."""

from tilelang_mla.kernels.indexer.scores import score as score
from tilelang_mla.kernels.indexer.topk import select as select
