"""MiniMax-Text-01 in transformers beside its own layers, for ``python -m kernel_reference.bench.engines``."""

from __future__ import annotations

from typing import Any

from transformers import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from kernel_reference.bench.engines import Load, Stack
from lightning_attn.integrations.transformers import enable

TINY = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_local_experts": 2}
# As the 456B is, but for the vocabulary, which is no layer's, the number of layers and that of experts, of 32.
MINIMAX = {
    "vocab_size": 8192, "num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"],
    "hidden_size": 6144, "intermediate_size": 9216, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 128, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def cache(config: Any, length: int) -> MiniMaxCache:
    """The only one that the model takes; it grows, which no CUDA graph can hold."""
    return MiniMaxCache()


def stacks(dry: bool) -> list[Stack]:
    """One layer of either kind."""
    loads = [Load(1, 16), Load(2, 1, 32)] if dry else [Load(1, 8192), Load(1, 1, 8192), Load(32, 1, 8192)]
    config = MiniMaxConfig(**MINIMAX | (TINY if dry else {}))
    return [Stack("MiniMax-Text-01", config, enable, (cache, cache), loads, "1 lightning, 1 attention", graphs=False)]
