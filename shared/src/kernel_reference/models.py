"""Attention shapes of published models, by name, for tests, benchmarks and examples.

The numbers are those of the ``config.json`` that the model's authors publish beside its weights; the field it comes
from is named where the constant is defined.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .errors import fail


def _share(name: str, heads: int, ranks: int) -> int:
    if heads % ranks:
        fail("ranks", f"a divisor of the {heads} {name}", ranks)
    return heads // ranks


def _check_ranks(ranks: int) -> None:
    if ranks < 1:
        fail("ranks", "at least 1", ranks)


@dataclass(frozen=True)
class GatedDeltaNet:
    """Gated DeltaNet: QK heads of ``head_qk`` elements, V heads of ``head_v``, a convolution of ``conv_width`` taps."""

    name: str
    num_heads_qk: int
    num_heads_v: int
    head_qk: int
    head_v: int
    conv_width: int

    def tensor_parallel(self, ranks: int) -> GatedDeltaNet:
        """One rank's share of the heads; ``ranks`` must divide both head counts, or ValueError."""
        _check_ranks(ranks)
        return replace(
            self,
            name=f"{self.name} TP{ranks}" if ranks > 1 else self.name,
            num_heads_qk=_share("QK heads", self.num_heads_qk, ranks),
            num_heads_v=_share("V heads", self.num_heads_v, ranks),
        )


@dataclass(frozen=True)
class LinearAttention:
    """Linear attention with a per-head decay: as many key and value heads as query heads."""

    name: str
    num_heads: int
    head_qk: int
    head_v: int

    def tensor_parallel(self, ranks: int) -> LinearAttention:
        """One rank's share of the heads; ``ranks`` must divide their count, or ValueError."""
        _check_ranks(ranks)
        name = f"{self.name} TP{ranks}" if ranks > 1 else self.name
        return replace(self, name=name, num_heads=_share("heads", self.num_heads, ranks))


@dataclass(frozen=True)
class SoftmaxAttention:
    """Grouped-query softmax attention.

    ``window``: (left, right) in tokens as :func:`kernel_reference.attention.attention` takes it, or None.
    ``sinks``: whether the model learns one sink logit a query head.
    """

    name: str
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    window: tuple[int, int] | None = None
    sinks: bool = False

    def tensor_parallel(self, ranks: int) -> SoftmaxAttention:
        """One rank's share of the heads; more ranks than kv heads repeat those, as engines do. Else ValueError."""
        _check_ranks(ranks)
        if ranks > self.num_heads_kv and ranks % self.num_heads_kv:
            fail("ranks", f"a multiple of the {self.num_heads_kv} kv heads where it exceeds them", ranks)
        return replace(
            self,
            name=f"{self.name} TP{ranks}" if ranks > 1 else self.name,
            num_heads_q=_share("query heads", self.num_heads_q, ranks),
            num_heads_kv=1 if ranks > self.num_heads_kv else _share("kv heads", self.num_heads_kv, ranks),
        )


@dataclass(frozen=True)
class BlockSparseAttention:
    """Grouped-query attention over local blocks and every ``vert_stride``-th vertical block, shifted by head."""

    name: str
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    block_size: int
    local_blocks: int
    vert_stride: int


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: ``latent`` + ``rope`` elements cached a token, the latent being a value too."""

    name: str
    num_heads: int
    latent: int
    rope: int
    head_nope: int
    head_v: int

    @property
    def head_qk(self) -> int:
        """Elements of q and k in prefill, where the heads are separate."""
        return self.head_nope + self.rope

    def tensor_parallel(self, ranks: int) -> LatentAttention:
        """One rank's share of the heads (the latent is not split); ``ranks`` must divide their count, or ValueError."""
        _check_ranks(ranks)
        name = f"{self.name} TP{ranks}" if ranks > 1 else self.name
        return replace(self, name=name, num_heads=_share("heads", self.num_heads, ranks))


QWEN3_NEXT_80B = GatedDeltaNet("Qwen3-Next-80B", 16, 32, 128, 128, 4)
"""Qwen/Qwen3-Next-80B-A3B-Instruct: linear_num_key_heads, linear_num_value_heads, linear_key_head_dim,
linear_value_head_dim, linear_conv_kernel_dim. Its projections are interleaved by QK head."""

MINIMAX_01 = LinearAttention("MiniMax-01", 64, 128, 128)
"""MiniMaxAI/MiniMax-Text-01: num_attention_heads, head_dim, in its lightning attention layers."""

LLAMA3_70B = SoftmaxAttention("Llama-3-70B", 64, 8, 128)
"""meta-llama/Meta-Llama-3-70B: num_attention_heads, num_key_value_heads, hidden_size 8192 / num_attention_heads."""

GPT_OSS = SoftmaxAttention("gpt-oss", 64, 8, 64, window=(127, 0), sinks=True)
"""openai/gpt-oss-120b and -20b: num_attention_heads, num_key_value_heads, head_dim; sliding_window 128, the query's own
token counted, in every second layer."""

PHI3_SMALL = BlockSparseAttention("Phi-3-small", 32, 8, 128, 64, 16, 8)
"""microsoft/Phi-3-small-128k-instruct: num_attention_heads, num_key_value_heads, hidden_size 4096 /
num_attention_heads, blocksparse_block_size, blocksparse_num_local_blocks, blocksparse_vert_stride
(blocksparse_homo_head_pattern false)."""

DEEPSEEK_V3 = LatentAttention("DeepSeek-V3", 128, 512, 64, 128, 128)
"""deepseek-ai/DeepSeek-V3: num_attention_heads, kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim."""
