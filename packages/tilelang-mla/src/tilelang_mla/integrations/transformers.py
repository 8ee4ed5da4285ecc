"""Latent attention in transformers: prefill with separate heads, then absorbed decoding over the latents.

Where a model's indexer lists the keys of each token, as in DeepSeek-V3.2, all tokens are absorbed and attend to those.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from transformers import Cache, StaticCache
from transformers.cache_utils import StaticIndexedLayer, StaticLayer
from transformers.masking_utils import sdpa_mask
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

from kernel_reference.checks import describe, fail
from kernel_reference.integrations.transformers import (
    Attention,
    enabled,
    key_lengths,
    lengths_mask,
    refuse_options,
)
from tilelang_mla import flash_mla_sparse_fwd, flash_mla_varlen_func, flash_mla_with_kvcache

Tensor = torch.Tensor

NAME = "tilelang_mla"
# From so many new tokens of a sequence on, lists are those of a prompt.
_PROMPT = 16


def enable() -> ExitStack:
    """Register ``attn_implementation="tilelang_mla"`` for models that are made until the result is closed.

    The models are DeepSeek-V2, V3, V3.2, GLM-4.7-Flash and GLM-5. Used as ``with enable():`` round ``from_pretrained``
    or ``from_config`` and the model's use, or called once and left on. The first tokens of a batch are attended to with
    separate heads; those after them, any number at a time, are absorbed into the latents, so that a cache is never
    expanded. With a :class:`LatentCache` a token's latent and rope lie together, as the kernel reads them, and others
    are copied together in each step. Of DeepSeek-V3.2 and GLM-5 every token attends to the keys that the model's own
    indexer lists, and padding is allowed. bfloat16 and float16.

    Raises, in the model's call, ValueError for what is not covered, by name: padding (but for lists) and masks of the
    caller's own, dropout, weights of attention, projections that are quantised.
    """
    layers = {
        "DeepseekV2Attention": DeepseekV2Layer,
        "DeepseekV3Attention": DeepseekV3Layer,
        "Glm4MoeLiteAttention": Glm4MoeLiteLayer,
        "DeepseekV32Attention": DeepseekV32Layer,
        "GlmMoeDsaAttention": GlmMoeDsaLayer,
    }
    return enabled(layers, {NAME: Attention(attention, _mask)})


def _mask(*args: Any, config: Any = None, **options: Any) -> Tensor | None:
    """Lengths; for an indexer, which scores all keys, the mask that it looks at."""
    if getattr(config, "index_topk", None) is None:
        return lengths_mask(*args, **options)
    return sdpa_mask(*args, **options | {"allow_is_causal_skip": False})


class LatentLayer:
    """Of the layers below: latents reach the attention function as the cache holds them."""

    config: Any
    kv_b_proj: Any
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Left to :func:`attention`; other attention functions get what they expect."""
        return (kv_nope, k_rot) if self.config._attn_implementation == NAME else self.expanded(kv_nope, k_rot)

    def expanded(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads, as transformers makes them."""
        return super().expand_kv(latent, rope)  # type: ignore[misc]


class DeepseekV3Layer(LatentLayer, modeling_deepseek_v3.DeepseekV3Attention):
    """``DeepseekV3Attention``."""


class DeepseekV2Layer(LatentLayer, modeling_deepseek_v2.DeepseekV2Attention):
    """``DeepseekV2Attention``."""


class Glm4MoeLiteLayer(LatentLayer, modeling_glm4_moe_lite.Glm4MoeLiteAttention):
    """``Glm4MoeLiteAttention``, of GLM-4.7-Flash."""


class DeepseekV32Layer(LatentLayer, modeling_deepseek_v32.DeepseekV32Attention):
    """``DeepseekV32Attention``."""


class GlmMoeDsaLayer(LatentLayer, modeling_glm_moe_dsa.GlmMoeDsaAttention):
    """``GlmMoeDsaAttention``, of GLM-5."""


class _Joint:
    """Latents and ropes side by side, as one state [B, 1, max_cache_len, latent + rope]; the other is empty."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        joint = torch.cat((key_states, value_states), -1)
        held: tuple[Tensor, Tensor] = super().update(joint, joint[..., :0], *args, **kwargs)  # type: ignore[misc]
        return held


class _JointLayer(_Joint, StaticLayer):
    pass


class _JointIndexedLayer(_Joint, StaticIndexedLayer):
    """With an indexer's keys beside them."""


class LatentCache(Cache):
    """A static cache whose tokens are rows of latent and rope, for models with ``attn_implementation="tilelang_mla"``.

    Args:
        config: the model's.
        max_cache_len: tokens of a sequence, prompt and answer; best a multiple of 64.
    """

    def __init__(self, config: Any, max_cache_len: int) -> None:
        layers = StaticCache(config, max_cache_len).layers
        kinds = [_JointIndexedLayer if isinstance(layer, StaticIndexedLayer) else _JointLayer for layer in layers]
        super().__init__(layers=[kind(max_cache_len) for kind in kinds])


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [B, H, S, nope + rope], latents and ropes [B, 1, L, ...]; gives [B, S, H, v]."""
    if not isinstance(module, LatentLayer):
        fail(
            "attn_implementation",
            f'one for {type(module).__name__} ("{NAME}" is for models made inside enable())',
            NAME,
        )
    indices = options.pop("indices", None)
    refuse_options(module, dropout, options, "sliding_window", "softcap", "s_aux")
    weight = module.kv_b_proj.weight
    if type(module.kv_b_proj) is not torch.nn.Linear or weight.dtype != query.dtype:
        fail(
            "kv_b_proj", f"a torch.nn.Linear in {query.dtype}", f"{type(module.kv_b_proj).__name__}, {describe(weight)}"
        )
    batch, _, tokens, width = query.shape
    # Of separate heads, which absorbed ones are wider than.
    scaling = width**-0.5 if scaling is None else scaling
    # A LatentCache gives both in one.
    cached = key if key.shape[3] == module.kv_lora_rank + module.qk_rope_head_dim else torch.cat((key, value), 3)
    if indices is not None:
        return _listed(module, query, cached, _rows(indices, attention_mask, cached.shape[2]), scaling), None
    lengths = key_lengths(attention_mask, batch, tokens, None)
    if lengths is None:
        return _prefill(module, query, cached[:, :, :tokens], scaling), None
    return _decode(module, query, cached, lengths, scaling), None


def _prefill(module: LatentLayer, query: Tensor, cached: Tensor, scaling: float) -> Tensor:
    """New tokens that see each other alone, all heads separate."""
    batch, heads, tokens, _ = query.shape
    latent, rope = cached.split((module.kv_lora_rank, module.qk_rope_head_dim), 3)
    key, value = module.expanded(latent, rope)
    # Of a batch of one views: the kernel takes any strides of tokens and heads.
    q, k, v = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    begins = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=q.device)
    out = flash_mla_varlen_func(q, k, v, begins, begins, tokens, tokens, scaling, causal=True)
    return out.view(batch, tokens, heads, module.v_head_dim)


def _decode(module: LatentLayer, query: Tensor, cached: Tensor, lengths: Tensor, scaling: float) -> Tensor:
    """New tokens over the cache that holds them already."""
    # A sequence's part of the cache is one page.
    table = torch.arange(query.shape[0], dtype=torch.int32, device=query.device)[:, None]
    latents = flash_mla_with_kvcache(
        _absorbed(module, query), cached.transpose(1, 2), lengths, table, module.kv_lora_rank, scaling, causal=True
    )
    return _values(module, latents)


def _listed(module: LatentLayer, query: Tensor, cached: Tensor, rows: Tensor, scaling: float) -> Tensor:
    """New tokens over the keys in rows [B, S, topk] of the cache that holds them already."""
    batch, _, tokens, _ = query.shape
    q, latent = _absorbed(module, query), module.kv_lora_rank
    if tokens < _PROMPT:
        return _values(
            module, flash_mla_with_kvcache(q, cached.transpose(1, 2), None, None, latent, scaling, indices=rows)
        )
    keys = cached.transpose(1, 2).flatten(0, 1)
    out, _, _ = flash_mla_sparse_fwd(q.flatten(0, 1), keys, rows.flatten(0, 1)[:, None], scaling, latent)
    return _values(module, out.unflatten(0, (batch, tokens)))


def _rows(indices: Tensor, mask: Tensor | None, length: int) -> Tensor:
    """Rows of all sequences' keys, ``length`` each, that are listed [B, S, topk] and not masked; -1 for the others.

    An indexer fills its lists up with keys that a token does not see where it sees fewer.
    """
    batch, tokens, _ = indices.shape
    shape = (batch, 1, tokens, length)
    if mask is None or mask.dtype != torch.bool or mask.shape != shape:
        wanted = f"None or a 2-D mask in the model's call, of which transformers makes {list(shape)} of torch.bool"
        fail("attention_mask", wanted, "None" if mask is None else describe(mask))
    begins = torch.arange(0, batch * length, length, dtype=indices.dtype, device=indices.device)[:, None, None]
    return torch.where(mask[:, 0].gather(2, indices.long()), begins + indices, -1).to(torch.int32)


def _absorbed(module: LatentLayer, query: Tensor) -> Tensor:
    """Queries [B, H, S, nope + rope] times the part of kv_b_proj that makes keys: [B, S, H, latent + rope]."""
    q_nope, q_rope = query.split((module.qk_nope_head_dim, module.qk_rope_head_dim), 3)
    to_keys = _weight(module)[:, : module.qk_nope_head_dim]
    return torch.cat((torch.einsum("bhsn,hnl->bshl", q_nope, to_keys), q_rope.transpose(1, 2)), 3)


def _values(module: LatentLayer, latents: Tensor) -> Tensor:
    """Results [B, S, H, latent] times the part of kv_b_proj that makes values: [B, S, H, v]."""
    return torch.einsum("bshl,hvl->bshv", latents, _weight(module)[:, module.qk_nope_head_dim :])


def _weight(module: LatentLayer) -> Tensor:
    weight: Tensor = module.kv_b_proj.weight
    return weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, module.kv_lora_rank)
