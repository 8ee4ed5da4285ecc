"""``--attention-backend prefix_prefill`` in sglang: attention over its paged cache, prefill, decoding and drafts alike.

sglang finds :func:`register` by the entry point ``sglang.srt.plugins`` and calls it in each of its processes. Its pool
keeps keys and values of a layer by the slot of a token, of which these kernels read views in pages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernel_reference.checks import fail
from prefix_prefill.api import prefix_prefill

try:
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc
    from sglang.srt.runtime_context import get_exec, get_parallel
except ImportError as missing:
    raise ImportError("this needs sglang 0.5.23: prefix-prefill[sglang]") from missing

Tensor = torch.Tensor

NAME = "prefix_prefill"
KV_CACHE_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")


def register() -> None:
    """Tell sglang of the backend; any number of times."""
    register_attention_backend(NAME)(PrefixPrefillBackend)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


class Step(NamedTuple):
    """One forward pass, the same for all layers, on the device.

    query_starts [B + 1], seq_lens [B] with new tokens, block_table [B, pages]: int32. max_query_len: an upper bound.
    """

    query_starts: Tensor
    seq_lens: Tensor
    block_table: Tensor
    max_query_len: int


class PrefixPrefillBackend(AttentionBackend):
    """Causal decoders over a pool of keys and values, not MLA, without context parallelism.

    Chunks, mixed batches, decoding and chains of drafts; windows, soft caps, sinks, caches of 8 bits with a scale a
    layer. Decoding and drafts are captured in graphs.

    Raises:
        ValueError: the server asks for what is not covered, by name, before it takes requests.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        runner, parallel = model_runner, get_parallel()
        self.pool = runner.token_to_kv_pool
        if runner.use_mla_backend:
            fail("attention_backend", "one for MLA in a model with MLA", repr(NAME))
        if runner.is_draft_worker:
            fail("speculative_draft_attention_backend", "one of sglang's own", repr(NAME))
        if isinstance(self.pool, BaseSWAKVPool):
            fail("disable_hybrid_swa_memory", "True with attention_backend='prefix_prefill'", "False")
        if runner.kv_index_translator.is_translating:
            fail("enable_unified_memory", "False with attention_backend='prefix_prefill'", "True")
        if runner.kv_cache_dtype_str not in KV_CACHE_DTYPES:
            fail("kv_cache_dtype", f"one of {', '.join(KV_CACHE_DTYPES)}", repr(runner.kv_cache_dtype_str))
        if parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1:
            fail("attention_context_parallel_size", "1", max(parallel.attn_cp_size, parallel.attn_dcp_size))
        self.page_size = runner.page_size
        self.tokens = runner.req_to_token_pool.req_to_token
        self.pages = -(-self.tokens.shape[1] // self.page_size)
        # With keys cut in a fixed number of pieces a sequence's bits do not depend on its neighbours.
        self.num_splits = 1 if get_exec().deterministic.enable_deterministic_inference else None
        self.buffers = (self.tokens.new_zeros(0), self.tokens.new_zeros((0, self.pages)))
        self.captured: dict[tuple[int, int], Step] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Before a forward pass that is no graph's."""
        batch = forward_batch
        if batch.forward_mode.is_idle() or batch.batch_size == 0:
            self.forward_metadata = None
            return
        mode = batch.forward_mode
        if mode.is_decode() or mode.is_target_verify():
            queries = _queries(batch)
            starts, longest = _even_starts(batch, queries), queries
            lengths = _lengths(batch, queries)
        elif mode.is_extend_without_speculative() and not mode.is_dllm_extend():
            starts = torch.nn.functional.pad(batch.extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
            longest = max(batch.extend_seq_lens_cpu)
            lengths = batch.seq_lens.int()
        else:
            fail("forward_mode", "EXTEND, MIXED, DECODE or TARGET_VERIFY", mode.name)
        self.forward_metadata = Step(starts, lengths, self._pages_of(batch), longest)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Memory that graphs read: a batch's lengths and pages."""
        self.buffers = (
            self.tokens.new_zeros(max_bs),
            self.tokens.new_zeros((max_bs, self.pages)),
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a graph is captured, and before each of its replays."""
        batch = forward_batch
        mode = batch.forward_mode
        if not (mode.is_decode_or_idle() or mode.is_target_verify()):
            fail("forward_mode", "DECODE or TARGET_VERIFY in a CUDA graph", mode.name)
        queries, count = _queries(batch), batch.batch_size
        if in_capture:
            lengths, table = (buffer[:count] for buffer in self.buffers)
            self.captured[queries, count] = Step(_even_starts(batch, queries), lengths, table, queries)
        step = self.captured[queries, count]
        step.seq_lens.copy_(_lengths(batch, queries))
        pages = self._pages_of(batch)
        step.block_table[:, : pages.shape[1]].copy_(pages)
        self.forward_metadata = step

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of a sequence that pads a graph's batch."""
        return 1

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Tensor:
        """A token of each sequence; as :meth:`forward_extend`."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Tensor:
        """Attention of q [T, Hq * D] over the pool, once k [T, Hkv, D] and v [T, Hkv, Dv] are there: [T, Hq * Dv].

        ``sinks`` [Hq] may come with it. Anything else, an encoder's or a cross attention raises ValueError by name.
        """
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def _attend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, batch: Any, save: bool, more: dict[str, Any]
    ) -> Tensor:
        sinks = more.pop("sinks", None)
        _refuse(layer, more)
        if save and k is not None and v is not None:
            where = KVWriteLoc(batch.out_cache_loc, physical=batch.out_cache_loc_is_physical)
            # It may scale k and v in place, as for sglang's own backends.
            self.pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        step: Any = self.forward_metadata
        heads = layer.tp_k_head_num
        keys, values = self.pool.get_kv_buffer(layer.layer_id)
        keys = _in_pages(keys, self.page_size, heads, layer.qk_head_dim)
        values = _in_pages(values, self.page_size, heads, layer.v_head_dim)
        scaled = keys.dtype.itemsize == 1
        window = layer.sliding_window_size
        out: Tensor = prefix_prefill(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), None, None, keys, values,
            step.block_table, step.query_starts, step.seq_lens,
            max_seqlen_q=step.max_query_len, softmax_scale=layer.scaling,
            # It counts the tokens before one's own already.
            window=None if window is None or window < 0 else (window, 0),
            softcap=layer.logit_cap or 0.0, sinks=sinks,
            k_scale=_scale(layer.k_scale) if scaled else None, v_scale=_scale(layer.v_scale) if scaled else None,
            num_splits=self.num_splits,
        )  # fmt: skip
        return out.flatten(1)

    def _pages_of(self, batch: Any) -> Tensor:
        """The pages [B, of the longest] of a batch, from the slots of its tokens."""
        longest = batch.seq_lens_cpu
        width = self.pages
        if longest is not None and len(longest):
            reach = int(longest.max()) + (_queries(batch) if batch.forward_mode.is_target_verify() else 0)
            width = min(width, -(-reach // self.page_size))
        firsts = self.tokens[:, : width * self.page_size : self.page_size]
        return torch.div(firsts[batch.req_pool_indices], self.page_size, rounding_mode="floor").int()


def _queries(batch: Any) -> int:
    """Queries of each sequence where all have as many."""
    if not batch.forward_mode.is_target_verify():
        return 1
    if batch.spec_info.tree_topk != 1:
        fail("speculative_eagle_topk", "1", batch.spec_info.tree_topk)
    return int(batch.spec_info.draft_token_num)


def _even_starts(batch: Any, queries: int) -> Tensor:
    rows = batch.batch_size
    return torch.arange(0, (rows + 1) * queries, queries, dtype=torch.int32, device=batch.seq_lens.device)


def _lengths(batch: Any, queries: int) -> Tensor:
    """Keys of each sequence: sglang counts a token to be decoded, and no draft."""
    lengths: Tensor = batch.seq_lens[: batch.batch_size]
    return (lengths + queries if batch.forward_mode.is_target_verify() else lengths).int()


def _in_pages(slots: Tensor, page_size: int, heads: int, head_dim: int) -> Tensor:
    """A pool's [slots, heads, size], or its [pages, heads, page, size], as [pages, page, heads, size]."""
    if slots.ndim == 4:
        return slots.transpose(1, 2)
    return slots.view(-1, heads, head_dim).unflatten(0, (-1, page_size))


def _scale(scale: Any) -> Any:
    """Of a layer without scales 1."""
    return 1.0 if scale is None else scale.view(-1)


def _refuse(layer: Any, more: dict[str, Any]) -> None:
    for name, value in more.items():
        if value is not None and value is not False:
            fail(name, "None", "a tensor" if isinstance(value, Tensor) else repr(value))
    if layer.attn_type is not AttentionType.DECODER:
        fail("attn_type", "DECODER", layer.attn_type.name)
    if layer.is_cross_attention:
        fail("is_cross_attention", "False", "True")
    if layer.use_irope or layer.xai_temperature_len > 0:
        fail("use_irope and xai_temperature_len", "off", f"{layer.use_irope} and {layer.xai_temperature_len}")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        fail("logit_capping_method", "'tanh'", repr(layer.logit_capping_method))
