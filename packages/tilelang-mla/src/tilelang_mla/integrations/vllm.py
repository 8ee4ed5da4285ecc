"""``--attention-backend TILELANG_MLA`` in vLLM: decoding and drafts of DeepSeek V2 and V3 over the latent cache.

vLLM finds :func:`register` by the entry point ``vllm.general_plugins`` and calls it in each of its processes. Prompts
are attended to by vLLM's own prefill, with separate heads. ``VLLM_PLUGINS=tilelang_mla`` puts these kernels into vLLM's
backend of sparse MLA, :mod:`tilelang_mla.integrations.flashmla_sparse`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kernel_reference.checks import fail
from tilelang_mla.api import flash_mla_with_kvcache, plan_decode

try:
    from vllm import envs
    from vllm.model_executor.layers.attention.mla_attention import (
        MLACommonBackend,
        MLACommonImpl,
        MLACommonMetadataBuilder,
        QueryLenSupport,
    )
    from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
except ImportError as missing:
    raise ImportError("this needs vLLM 0.33: tilelang-mla[vllm]") from missing

Tensor = torch.Tensor

NAME, PLUGIN = "TILELANG_MLA", "tilelang_mla"
FP8 = ("fp8", "fp8_e4m3")
SPARSE = "tilelang_mla.integrations.flashmla_sparse.SparseBackend"
# Of the kernel's tiles, each of which is then one page.
PAGE_SIZE = 64


def register() -> None:
    """Tell vLLM of the backend, and of that of sparse MLA if ``VLLM_PLUGINS`` names this; any number of times."""
    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, f"{__name__}.{TilelangMLABackend.__qualname__}")
    if PLUGIN in (envs.VLLM_PLUGINS or ()):
        # A path: it imports vLLM's own backend, which is not wanted before somebody takes it.
        register_backend(AttentionBackendEnum.FLASHMLA_SPARSE, SPARSE)


class MetadataBuilder(MLACommonMetadataBuilder):
    """vLLM's: lengths and pages of what decodes are the kernel's arguments as they are."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[Any] = QueryLenSupport.UNIFORM


class Implementation(MLACommonImpl):
    """The attention of one layer."""

    # Contexts shared by ranks are not taken, so that nobody needs the logarithms of sums.
    can_return_lse_for_decode: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        refused = {
            "alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap,
        }  # fmt: skip
        for name, value in refused.items():
            if value is not None:
                fail(name, "None", repr(value))
        if attn_type != "decoder":
            fail("attn_type", "'decoder'", repr(str(attn_type)))
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, **mla_args,
        )  # fmt: skip
        # Queries stay in 16 bits beside a cache of 8.
        self.supports_quant_query_input = False

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, None]:
        """Attention of the absorbed queries [T, H, latent + rope], as many of each sequence; gives [T, H, latent]."""
        queries = torch.cat(q, -1) if isinstance(q, tuple) else q
        step = attn_metadata.decode
        latent = self.kv_lora_rank
        sequences, heads = len(step.seq_lens), queries.shape[1]
        if len(queries) % sequences:
            fail("q", f"as many tokens of each of {sequences} sequences", f"{len(queries)} tokens")
        rows = queries.view(sequences, -1, heads, queries.shape[2])
        plan = None
        if envs.VLLM_BATCH_INVARIANT:
            # With keys in one piece a sequence's bits do not depend on its neighbours.
            rope = queries.shape[2] - latent
            plan = plan_decode(step.seq_lens, heads, rows.shape[1], num_splits=1, dim_nope=latent, dim_rope=rope)
        out = flash_mla_with_kvcache(
            rows, kv_c_and_k_pe_cache.unsqueeze(2), step.seq_lens, step.block_table, latent, self.scale,
            causal=attn_metadata.causal, kv_scale=layer._k_scale if self.kv_cache_dtype in FP8 else None, plan=plan,
        )  # fmt: skip
        return out.flatten(0, 1), None


class TilelangMLABackend(MLACommonBackend):
    """What vLLM asks before it takes the backend: dense MLA on sm_90, without context parallelism."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *FP8]

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[Implementation]:
        return Implementation

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        # The kernel takes pages of any size, these the fastest.
        return [PAGE_SIZE, MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return PAGE_SIZE

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major == 9)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True
