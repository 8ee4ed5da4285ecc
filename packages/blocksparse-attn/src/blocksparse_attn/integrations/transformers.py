"""``attn_implementation="blocksparse_attn"`` in transformers: MiniMax-M3, whose indexer selects blocks of keys."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl

from blocksparse_attn.integrations.contiguous import attend_all, attend_selected, best_of_blocks
from kernel_reference.checks import fail
from kernel_reference.integrations.transformers import Attention, enabled, key_lengths, lengths_mask, refuse_options

Tensor = torch.Tensor

NAME = "blocksparse_attn"


def enable() -> ExitStack:
    """Register the attention that ``attn_implementation="blocksparse_attn"`` names, until the result is closed.

    Used as ``with enable():``, or called once and left on. Covered is the language model of MiniMax-M3: its sparse
    layers by :func:`blocksparse_attn.selected_attention`, which reads the blocks that the indexer selects, and no
    others; its dense ones by :func:`blocksparse_attn.blocksparse_attention` with a layout that lists all blocks. The
    indexers of models that are made meanwhile are :class:`Indexer`; those of others stay transformers', and select the
    same blocks more slowly. Caches may grow or be static; they are read where they are if their length is a
    multiple of the blocks' 128 tokens, and copied in each step if not. The sequences of a batch are of one length. A
    whole model leaves its vision tower's attention to another:
    ``attn_implementation={"text_config": "blocksparse_attn", "vision_config": "sdpa"}``.

    Raises, in the model's call, ValueError for what is not covered, by name: padding and masks of the caller's own,
    dropout, weights of attention, sliding windows, soft caps and sinks, which MiniMax-M3 has not, and layers that are
    not causal, as its vision tower's are.
    """
    return enabled({"MiniMaxM3VLIndexer": Indexer}, {NAME: Attention(attention, lengths_mask)})


class Indexer(modeling_minimax_m3_vl.MiniMaxM3VLIndexer):
    """``MiniMaxM3VLIndexer``, which makes no copy of the cache for each head, nor one in float32."""

    @torch.no_grad()
    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], cache: Any, position_ids: Tensor
    ) -> Tensor:
        """Blocks of each token [B, index heads, S, topk], the best first, and -1 after those that it may see."""
        batch, tokens, _ = hidden_states.shape
        query = self.q_norm(self.q_proj(hidden_states).view(batch, tokens, -1, self.head_dim)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(batch, tokens, 1, self.head_dim)).transpose(1, 2)
        angles = [part[..., : self.head_dim] for part in position_embeddings]
        query, key = modeling_minimax_m3_vl.apply_rotary_pos_emb(query, key, *angles)
        if cache is not None:
            key = cache.layers[self.layer_idx].update_index(key)
        best = best_of_blocks(query, key[:, 0], position_ids, self.block_size)
        if self.local_blocks:
            local = torch.arange(self.local_blocks, device=best.device)
            own = (position_ids[..., None] // self.block_size - local).clamp(min=0)
            best.scatter_(3, own[:, None].expand(-1, best.shape[1], -1, -1), torch.inf)
        scores, blocks = best.topk(min(self.topk_blocks, best.shape[3]))
        return blocks.masked_fill(scores == -torch.inf, -1)


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
    """What transformers calls: query [B, Hq, S, D], key and value [B, Hkv, L, D]; gives [B, S, Hq, D].

    Of sparse layers ``block_indices`` [B, index heads, S, topk].
    """
    refuse_options(module, dropout, options, "sliding_window", "softcap", "s_aux", computed=("block_indices",))
    batch, _, tokens, _ = query.shape
    if key.shape[2] < tokens:
        fail("key", f"at least the {tokens} tokens of query", key.shape[2])
    lengths = key_lengths(attention_mask, batch, tokens, None)
    if lengths is None:
        lengths = torch.full((batch,), tokens, dtype=torch.int32, device=query.device)
    block_indices = options.get("block_indices")
    if block_indices is None:
        return attend_all(query, key, value, lengths, softmax_scale=scaling), None
    indexer = getattr(module, "indexer", None)
    if indexer is None:
        fail("block_indices", "those of a layer whose indexer has a block_size", type(module).__name__)
    out = attend_selected(
        query, key, value, lengths, block_indices, block_size=indexer.block_size, topk=indexer.topk_blocks,
        softmax_scale=scaling,
    )  # fmt: skip
    return out, None
