"""The kernels in TileLang's own language, for GPUs."""

from typing import Any

import tilelang.language as T
import torch

from tilelang_mla.kernels import backward, decode, indexer, merge, prefill, ranks

_BUILDERS: dict[str, Any] = {
    "decode": decode.attend, "decode_8bit": decode.attend_8bit, "decode_sparse": decode.attend_sparse,
    "merge": merge.merge, "merge_ranks": ranks.merge_ranks, "prefill": prefill.attend,
    "prefill_sparse": decode.attend_sparse_prefill,
    "index_scores": indexer.score, "index_topk": indexer.select, "delta": backward.delta,
    "backward_of_keys": backward.of_keys, "backward_of_queries": backward.of_queries,
}  # fmt: skip
_DTYPES = {
    torch.bfloat16: T.bfloat16, torch.float16: T.float16, torch.float8_e4m3fn: T.float8_e4m3fn, torch.int32: T.int32,
}  # fmt: skip


def text_of(name: str, dtype: torch.dtype, **constants: Any) -> Any:
    """A kernel traced by TileLang, not compiled yet."""
    return _BUILDERS[name](T, dtype=_DTYPES[dtype], **constants)
