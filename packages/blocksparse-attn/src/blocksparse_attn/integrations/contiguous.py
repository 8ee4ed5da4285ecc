"""Attention over caches without pages, as engines hold them: keys and values [B, Hkv, L, D], of as many slots each."""

from __future__ import annotations

import torch

from blocksparse_attn.api import blocksparse_attention
from blocksparse_attn.layout import BlockLayout
from blocksparse_attn.patterns import may_keep
from blocksparse_attn.selected.api import selected_attention
from kernel_reference.checks import describe, fail
from kernel_reference.integers import cdiv, power_of_two_at_least

Tensor = torch.Tensor

# Of layouts that list all: half as many entries for a program to read as blocks of 128 make.
_BLOCK = 256

# Scores of keys that are there at once: 1 GB of them.
_SCORES = 2**28

# A few for each device: their rows are powers of two. None is let go, as a CUDA graph may read it.
_layouts: dict[tuple[int, torch.device], BlockLayout] = {}


def attend_selected(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, block_indices: Tensor, *, block_size: int, topk: int,
    softmax_scale: float | None,
) -> Tensor:  # fmt: skip
    """Attention of query [B, Hq, S, D] to the blocks that each token lists, as [B, S, Hq, Dv].

    Args:
        query: the last tokens of each sequence, whose keys and values are in the cache.
        key, value: [B, Hkv, L, D]. They are read where they are if L is a multiple of block_size, and copied if not: a
            kernel is compiled for the length of a page, which is that of a block here.
        lengths: [B] int32: keys of each sequence.
        block_indices: [B, Hkv or a divisor of it, S, up to topk]: blocks, and -1 for nothing.
        block_size: tokens of a block, a power of two.
        topk: entries of the lists in all calls; a kernel is compiled for their number.
        softmax_scale: ``D ** -0.5`` when None.

    Raises:
        ValueError: block_indices have other heads than the cache, or the kernel refuses something.
    """
    batch, heads, tokens, _ = query.shape
    heads_kv, lists = key.shape[1], block_indices.shape[1]
    if heads_kv % lists:
        fail("block_indices", f"lists of {heads_kv} kv heads, or of a divisor of them", describe(block_indices))
    # [B, S, lists, topk]
    indices = block_indices.transpose(1, 2).to(torch.int32, memory_format=torch.contiguous_format)
    if indices.shape[3] < topk:
        indices = torch.nn.functional.pad(indices, (0, topk - indices.shape[3]), value=-1)
    if lists < heads_kv:
        indices = indices.repeat_interleave(heads_kv // lists, 2)
    pages = cdiv(key.shape[2], block_size)
    table = torch.arange(pages, dtype=torch.int32, device=query.device)
    table = table + torch.arange(batch, dtype=torch.int32, device=query.device)[:, None] * (heads_kv * pages)
    out = selected_attention(
        query.transpose(1, 2).flatten(0, 1), _pages(key, block_size), _pages(value, block_size), indices.flatten(0, 1),
        block_size=block_size, block_table=table,
        cu_seqlens_q=torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=query.device),
        seqlens_k=lengths, page_layout="HND", softmax_scale=softmax_scale,
    )  # fmt: skip
    return out.view(batch, tokens, heads, value.shape[3])


def _pages(states: Tensor, size: int) -> Tensor:
    """[B, H, L, D] as pages [., H, size, D]: page i of sequence b is number ``b * H * (L / size) + i``.

    Numbers between those of two sequences are pages of other heads, which no table names.
    """
    if states.shape[2] % size:
        states = torch.nn.functional.pad(states, (0, 0, 0, -states.shape[2] % size))
    states = states.contiguous()
    batch, heads, length, width = states.shape
    pages = ((batch - 1) * heads + 1) * (length // size)
    return states.as_strided((pages, heads, size, width), (size * width, length * width, width, 1))


def attend_all(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *, softmax_scale: float | None) -> Tensor:
    """Causal attention of query [B, Hq, S, D] to all keys, as [B, S, Hq, Dv]; arguments as above, and any strides."""
    return blocksparse_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), _all_blocks(key.shape[2], query),
        k_ends=lengths, softmax_scale=softmax_scale,
    )  # fmt: skip


def _all_blocks(tokens: int, query: Tensor) -> BlockLayout:
    """A layout of one head that lists all blocks of so many tokens at least, on the device of query."""
    rows = power_of_two_at_least(cdiv(tokens, _BLOCK))
    key = (rows, query.device)
    plain = type(query) is Tensor and not torch.compiler.is_compiling()
    found = _layouts.get(key) if plain else None
    if found is not None:
        return found
    # Tensors of inference mode would be refused wherever the layout is used outside it.
    with torch.inference_mode(False):
        row = torch.arange(rows + 1, dtype=torch.int32, device=query.device)
        col = torch.tril_indices(rows, rows, dtype=torch.int32, device=query.device)[1]
        made = BlockLayout((row * (row + 1) // 2)[None], col[None], _BLOCK, _BLOCK, rows)
    return _layouts.setdefault(key, made) if may_keep(query) else made


def best_of_blocks(query: Tensor, key: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """The best score that each token has in each block [B, H, S, blocks], in float32; -inf where it sees none.

    Args:
        query: [B, H, S, D], of heads that share the keys.
        key: [B, L, D]. Neither a copy for each head is made nor one in float32, but inside torch.compile.
        positions: [B, S], of the tokens.
        block_size: tokens of a block.
    """
    at_once = max(1, _SCORES // (query.shape[0] * query.shape[1] * key.shape[1]))
    parts = zip(query.split(at_once, 2), positions.split(at_once, 1), strict=True)
    return torch.cat([_best_of_blocks(*part, key, block_size) for part in parts], 2)


def _best_of_blocks(query: Tensor, positions: Tensor, key: Tensor, size: int) -> Tensor:
    batch, heads, tokens, _ = query.shape
    length = key.shape[1]
    rows = query.flatten(1, 2)
    if rows.is_cuda and rows.element_size() == 2 and not torch.compiler.is_compiling():
        scores = torch.bmm(rows, key.mT, out_dtype=torch.float32)
    else:
        scores = rows.float() @ key.mT.float()
    scores = scores.view(batch, heads, tokens, length)
    future = torch.arange(length, device=key.device) > positions[:, None, :, None]
    scores.masked_fill_(future, -torch.inf)
    whole = length // size
    best = scores[..., : whole * size].view(batch, heads, tokens, whole, size).amax(4)
    if length % size:
        best = torch.cat((best, scores[..., whole * size :].amax(3, keepdim=True)), 3)
    return best
