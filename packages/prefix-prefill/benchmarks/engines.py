"""Llama-3-8B in transformers beside sdpa over the same cache, for ``python -m kernel_reference.bench.engines``."""

from __future__ import annotations

from transformers import LlamaConfig, StaticCache

from kernel_reference.bench.engines import Load, Stack
from prefix_prefill.integrations.transformers import NAME, enable

TINY = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
# But for the vocabulary, which is no layer's, and the number of layers.
LLAMA_3_8B = {
    "vocab_size": 8192, "num_hidden_layers": 4, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
}  # fmt: skip


def stacks(dry: bool) -> list[Stack]:
    """Four layers."""
    loads = [Load(1, 16), Load(2, 1, 32), Load(2, 4, 32)]
    if not dry:
        loads = [Load(1, 8192), Load(1, 1, 32768), Load(32, 1, 8192), Load(1, 512, 32768)]
    config = LlamaConfig(**LLAMA_3_8B | (TINY if dry else {}))
    return [Stack("Llama-3-8B", config, enable, (StaticCache, StaticCache), loads, "4", attn_implementation=NAME)]
