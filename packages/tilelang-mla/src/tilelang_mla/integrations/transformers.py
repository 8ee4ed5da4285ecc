"""Latent attention in transformers: prefill with separate heads, then absorbed decoding over the latents."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from transformers import Cache, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite

from kernel_reference.checks import describe, fail
from kernel_reference.integrations.transformers import (
    Attention,
    enabled,
    key_lengths,
    lengths_mask,
    refuse_options,
)
from tilelang_mla.api import flash_mla_varlen_func, flash_mla_with_kvcache

Tensor = torch.Tensor

NAME = "tilelang_mla"


def enable() -> ExitStack:
    """Register ``attn_implementation="tilelang_mla"`` for models that are made until the result is closed.

    The models are DeepSeek-V2, V3 and GLM-4.7-Flash. Used as ``with enable():`` round ``from_pretrained`` or
    ``from_config`` and the model's use, or called once and left on. The first tokens of a batch are attended to with
    separate heads; those after them, any number at a time, are absorbed into the latents, so that a cache is never
    expanded. With a :class:`LatentCache` a token's latent and rope lie together, as the kernel reads them, and others
    are copied together in each step. bfloat16 and float16.

    Raises, in the model's call, ValueError for what is not covered, by name: padding and masks of the caller's own,
    dropout, weights of attention, projections that are quantised.
    """
    layers = {
        "DeepseekV2Attention": DeepseekV2Layer,
        "DeepseekV3Attention": DeepseekV3Layer,
        "Glm4MoeLiteAttention": Glm4MoeLiteLayer,
    }
    return enabled(layers, {NAME: Attention(attention, lengths_mask)})


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


class _JointLayer(StaticLayer):
    """Latents and ropes side by side, as one state [B, 1, max_cache_len, latent + rope]; the other is empty."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        joint = torch.cat((key_states, value_states), -1)
        return super().update(joint, joint[..., :0], *args, **kwargs)


class LatentCache(Cache):
    """A static cache whose tokens are rows of latent and rope, for models with ``attn_implementation="tilelang_mla"``.

    Args:
        config: the model's.
        max_cache_len: tokens of a sequence, prompt and answer; best a multiple of 64.
    """

    def __init__(self, config: Any, max_cache_len: int) -> None:
        layers = [_JointLayer(max_cache_len) for _ in StaticCache(config, max_cache_len).layers]
        super().__init__(layers=layers)


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
    refuse_options(module, dropout, options, "sliding_window", "softcap", "s_aux")
    weight = module.kv_b_proj.weight
    if type(module.kv_b_proj) is not torch.nn.Linear or weight.dtype != query.dtype:
        fail(
            "kv_b_proj", f"a torch.nn.Linear in {query.dtype}", f"{type(module.kv_b_proj).__name__}, {describe(weight)}"
        )
    batch, _, tokens, _ = query.shape
    lengths = key_lengths(attention_mask, batch, tokens, None)
    # A LatentCache gives both in one.
    cached = key if key.shape[3] == module.kv_lora_rank + module.qk_rope_head_dim else torch.cat((key, value), 3)
    if lengths is None:
        return _prefill(module, query, cached[:, :, :tokens], scaling), None
    return _decode(module, query, cached, lengths, scaling), None


def _prefill(module: LatentLayer, query: Tensor, cached: Tensor, scaling: float | None) -> Tensor:
    """New tokens that see each other alone, all heads separate."""
    batch, heads, tokens, _ = query.shape
    latent, rope = cached.split((module.kv_lora_rank, module.qk_rope_head_dim), 3)
    key, value = module.expanded(latent, rope)
    q, k, v = (states.transpose(1, 2).flatten(0, 1).contiguous() for states in (query, key, value))
    begins = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=q.device)
    out = flash_mla_varlen_func(q, k, v, begins, begins, tokens, tokens, scaling, causal=True)
    return out.view(batch, tokens, heads, module.v_head_dim)


def _decode(module: LatentLayer, query: Tensor, cached: Tensor, lengths: Tensor, scaling: float | None) -> Tensor:
    """New tokens over the cache that holds them already: kv_b_proj goes to the queries and to the result."""
    nope = module.qk_nope_head_dim
    weight = module.kv_b_proj.weight.view(-1, nope + module.v_head_dim, module.kv_lora_rank)
    q_nope, q_rope = query.split((nope, module.qk_rope_head_dim), 3)
    absorbed = torch.einsum("bhsn,hnl->bshl", q_nope, weight[:, :nope])
    # A sequence's part of the cache is one page.
    table = torch.arange(query.shape[0], dtype=torch.int32, device=query.device)[:, None]
    latents = flash_mla_with_kvcache(
        torch.cat((absorbed, q_rope.transpose(1, 2)), 3), cached.transpose(1, 2), lengths, table, module.kv_lora_rank,
        scaling, causal=True,
    )  # fmt: skip
    return torch.einsum("bshl,hvl->bshv", latents, weight[:, nope:])
