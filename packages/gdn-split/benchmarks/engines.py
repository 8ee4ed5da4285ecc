"""Qwen3-Next and Qwen3.5 in transformers beside its own layers, for ``python -m kernel_reference.bench.engines``."""

from __future__ import annotations

from transformers import Qwen3_5TextConfig, Qwen3NextConfig, StaticCache

from gdn_split.integrations.transformers import enable
from kernel_reference.bench.engines import Load, Stack

TINY = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_experts": 0, "head_dim": 16}
# As the 80B and the 27B are, but for the vocabulary, which is no layer's, and the number of layers.
QWEN3_NEXT = {
    "vocab_size": 8192, "num_hidden_layers": 4, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 512, "num_experts_per_tok": 10,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
QWEN3_5 = {
    "vocab_size": 8192, "num_hidden_layers": 4, "hidden_size": 5120, "intermediate_size": 17408,
    "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip


def stacks(dry: bool) -> list[Stack]:
    """Three layers of Gated DeltaNet and one of attention."""
    loads = [Load(1, 16), Load(2, 1, 32)] if dry else [Load(1, 8192), Load(1, 1, 8192), Load(64, 1, 8192)]
    made = []
    for name, kind, sizes in (
        ("Qwen3-Next-80B", Qwen3NextConfig, QWEN3_NEXT),
        ("Qwen3.5-27B", Qwen3_5TextConfig, QWEN3_5),
    ):
        config = kind(**sizes | (TINY if dry else {}))
        made.append(Stack(name, config, enable, (StaticCache, StaticCache), loads, "3 GDN, 1 attention"))
    return made
