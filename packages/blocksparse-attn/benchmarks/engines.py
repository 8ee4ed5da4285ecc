"""MiniMax-M3 in transformers beside sdpa under the mask of blocks, for ``python -m kernel_reference.bench.engines``.

transformers' own kernels for selected blocks need sm_100: before it, its models attend to all keys and mask.
"""

from __future__ import annotations

from transformers import MiniMaxM3VLTextConfig, StaticCache

from blocksparse_attn.integrations.transformers import NAME, enable
from kernel_reference.bench.engines import Load, Stack

TINY = {
    "vocab_size": 64, "hidden_size": 64, "dense_intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 16,
    "index_topk_blocks": 2,
}  # fmt: skip
# But for the vocabulary, which is no layer's, the number of layers, and experts: the dense feed-forward part, of the
# model's first layers, leaves the attention the larger share of a step.
MINIMAX_M3 = {
    "vocab_size": 8192, "num_hidden_layers": 2, "mlp_layer_types": ["dense"] * 2, "max_position_embeddings": 131072,
}  # fmt: skip


def stacks(dry: bool) -> list[Stack]:
    """Two sparse layers, and two of the model's dense ones."""
    caches = (StaticCache, StaticCache)
    made = []
    for name, kind in (("MiniMax-M3", "minimax_m3_sparse"), ("MiniMax-M3, dense layers", "full_attention")):
        config = MiniMaxM3VLTextConfig(**MINIMAX_M3 | {"layer_types": [kind] * 2} | (TINY if dry else {}))
        loads = [Load(1, 16), Load(2, 1, 32)] if dry else [Load(1, 1, 32768), Load(32, 1, 32768), Load(1, 8192)]
        made.append(Stack(name, config, enable, caches, loads, "2", attn_implementation=NAME))
    return made
