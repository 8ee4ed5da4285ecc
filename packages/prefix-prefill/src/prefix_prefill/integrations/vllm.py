"""``--attention-backend PREFIX_PREFILL`` in vLLM: attention over its paged cache, prefill, decoding and drafts alike.

vLLM finds :func:`register` by the entry point ``vllm.general_plugins`` and calls it in each of its processes. Its cache
of a layer is [pages, Hkv, page, D + Dv] with any strides: keys and values side by side, of which these kernels take
slices as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from kernel_reference.checks import fail
from prefix_prefill.api import prefix_prefill

try:
    from vllm import envs
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionCGSupport,
        AttentionImpl,
        AttentionMetadataBuilder,
        MultipleOf,
    )
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
except ImportError as missing:
    raise ImportError("this needs vLLM 0.33: prefix-prefill[vllm]") from missing

Tensor = torch.Tensor

NAME = "PREFIX_PREFILL"
# What vLLM calls the dtypes of caches of 8 bits, whose bytes it may have in tensors of uint8.
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def register() -> None:
    """Tell vLLM of the backend; any number of times."""
    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, f"{__name__}.{PrefixPrefillBackend.__qualname__}")


@dataclass
class Metadata:
    """What the attention of one step needs of vLLM's ``CommonAttentionMetadata``, all of it on the device.

    query_start_loc [B + 1], seq_lens [B], block_table [B, pages of the longest]: int32. num_actual_tokens: rows of
    the queries that count; max_query_len, max_seq_len: upper bounds of a sequence's new tokens, and of all.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor


class MetadataBuilder(AttentionMetadataBuilder):
    """Takes the step's tensors as they are: the kernels schedule their work on the device."""

    # A launch is sized by max_query_len, which in a batch of any lengths may be another when a graph is replayed.
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """The step's metadata, for all layers of a group.

        Raises:
            ValueError: tokens would see later ones.
        """
        common = common_attn_metadata
        if common.causal is not True:
            fail("causal", "True for every sequence", common.causal)
        return Metadata(
            common.num_actual_tokens, common.max_query_len, common.max_seq_len, common.query_start_loc, common.seq_lens,
            common.block_table_tensor, common.slot_mapping,
        )  # fmt: skip

    def update_block_table(self, metadata: Metadata, blk_table: Tensor, slot_mapping: Tensor) -> Metadata:
        """The same step over another group's pages."""
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


class Implementation(AttentionImpl):
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if attn_type != "decoder":
            fail("attn_type", "'decoder'", repr(str(attn_type)))
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.window = None if sliding_window is None else (sliding_window - 1, 0)
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = logits_soft_cap or 0.0
        self.sinks = sinks
        # With keys cut in a fixed number of pieces a sequence's bits do not depend on its neighbours.
        self.num_splits = 1 if envs.VLLM_BATCH_INVARIANT else None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of query [T, Hq, D] over the cache, which holds the new keys and values already.

        Writes, and returns, output [T, Hq, Dv]; in 8 bits with output_scale. Without metadata, as when vLLM measures
        its memory, zeros.
        """
        if output_block_scale is not None:
            fail("output_block_scale", "None", "a tensor")
        if attn_metadata is None:
            return output.zero_()
        step = attn_metadata
        keys, values = self.halves(kv_cache)
        k_scale = v_scale = None
        if self.kv_cache_dtype in FP8:
            dtype = FP8[self.kv_cache_dtype]
            keys, values = keys.view(dtype), values.view(dtype)
            k_scale, v_scale = layer._k_scale.view(-1), layer._v_scale.view(-1)
        tokens = step.num_actual_tokens
        prefix_prefill(
            query[:tokens], None, None, keys, values, step.block_table, step.query_start_loc, step.seq_lens,
            max_seqlen_q=step.max_query_len, max_seqlen_k=step.max_seq_len, page_layout="HND", softmax_scale=self.scale,
            window=self.window, softcap=self.softcap, alibi_slopes=self.alibi_slopes, sinks=self.sinks, k_scale=k_scale,
            v_scale=v_scale, out_scale=output_scale, out=output[:tokens], num_splits=self.num_splits,
        )  # fmt: skip
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write key [T, Hkv, D] and value [T, Hkv, Dv] to the slots [T] of the cache, -1 nowhere: vLLM's own kernel."""
        caches = [half.transpose(1, 2) for half in self.halves(kv_cache)]
        if kv_cache.is_cuda:
            from vllm._custom_ops import reshape_and_cache_flash

            reshape_and_cache_flash(
                key, value, *caches, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
            )
            return
        scales = (layer._k_scale, layer._v_scale)
        live = slot_mapping >= 0
        slots = slot_mapping[live]
        for new, cache, scale in zip((key, value), caches, scales, strict=True):
            rows = new[: len(live)][live]
            if self.kv_cache_dtype in FP8:
                rows = (rows / scale).to(FP8[self.kv_cache_dtype]).view(cache.dtype)
            cache[slots // cache.shape[1], slots % cache.shape[1]] = rows.to(cache.dtype)

    def halves(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [pages, Hkv, page, D] and values [pages, Hkv, page, Dv]."""
        return kv_cache[..., : self.head_size], kv_cache[..., self.head_size :]

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether ``forward`` can write what vLLM would make of its result: floats of 8 bits with one scale."""
        from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

        return bool(quant_key == kFp8StaticTensorSym)


class PrefixPrefillBackend(AttentionBackend):
    """What vLLM asks before it takes the backend: decoders, not sparse, not MLA, without context parallelism."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *FP8]
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True

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
        # The kernels take pages of any size, these the fastest.
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 16 <= head_size <= 512

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True
