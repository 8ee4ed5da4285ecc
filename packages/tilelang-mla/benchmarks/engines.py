"""DeepSeek-V3 and V3.2 in transformers beside sdpa, for ``python -m kernel_reference.bench.engines``."""

from __future__ import annotations

from transformers import DeepseekV3Config, DeepseekV32Config, StaticCache

from kernel_reference.bench.engines import Load, Stack
from tilelang_mla.integrations.transformers import NAME, LatentCache, enable

TINY = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip
# As the 671B is, but for the vocabulary, which is no layer's, and the number of layers, both dense.
DEEPSEEK_V3 = {
    "vocab_size": 8192, "num_hidden_layers": 2, "first_k_dense_replace": 2, "max_position_embeddings": 131072,
}  # fmt: skip
# Each token attends to the 2048 keys that the model's indexer lists.
DEEPSEEK_V3_2 = {
    "vocab_size": 8192, "num_hidden_layers": 2, "mlp_layer_types": ["dense", "dense"],
    "max_position_embeddings": 131072,
}  # fmt: skip


def stacks(dry: bool) -> list[Stack]:
    """Two layers with a dense feed-forward part, which leave the attention the larger share of a step."""
    loads = [Load(1, 16), Load(2, 1, 32)] if dry else [Load(1, 4096), Load(1, 1, 32768), Load(16, 1, 8192)]
    configs = {
        "DeepSeek-V3": DeepseekV3Config(**DEEPSEEK_V3 | (TINY if dry else {})),
        "DeepSeek-V3.2": DeepseekV32Config(**DEEPSEEK_V3_2 | (TINY | {"index_topk": 8} if dry else {})),
    }
    caches = (StaticCache, LatentCache)
    return [
        Stack(name, config, enable, caches, loads, "2 dense", attn_implementation=NAME)
        for name, config in configs.items()
    ]
