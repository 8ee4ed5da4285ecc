"""The peers that blocksparse-attn is timed beside, each as a function of tensors; for cases.py and map.py.

A function of this module imports its peer when it is called, and returns what calls it: where the import fails, a run
goes on without that peer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor

VLLM = "vLLM blocksparse"
# The size of a sparse block that FlexAttention takes by default, and one with fewer keys in it: queries, keys.
FLEX = {"FlexAttention": (128, 128), "FlexAttention, 128 x 64": (128, 64)}


def has_peer(name: str) -> bool:
    """Whether inputs for this peer are worth their memory."""
    return importlib.util.find_spec(name) is not None


class Lists(NamedTuple):
    """A layout as vLLM's kernel takes it: crow and col, in int64 as ``dense_to_crow_col`` makes them, and its block."""

    crow: Tensor
    col: Tensor
    block: int


def vllm() -> Callable[..., Tensor]:
    """The kernel of vLLM 0.6 to 0.9, called as its layer did; it takes whole prompts and single tokens only."""
    from vllm.attention.ops.blocksparse_attention.blocksparse_attention_kernel import blocksparse_flash_attn_varlen_fwd

    def call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_k: Tensor, scale: float, lists: Lists, longest: int) -> Tensor:
        sizes = {"block_size": lists.block, "max_seqlen": longest}
        out: Tensor = blocksparse_flash_attn_varlen_fwd(q, k, v, cu_seqlens_k, None, scale, lists[:2], **sizes)
        return out

    return call


def takes_vllm(ctx: int, new: int, page: int) -> bool:
    """Whether vLLM's kernel takes sequences of ``new`` tokens after ``ctx``: whole prompts and single tokens only."""
    return not page and (not ctx or new == 1)


class Queries(NamedTuple):
    """Queries of a ragged batch and the most of a sequence."""

    q: Tensor
    cu_seqlens_q: Tensor
    most: int


def fa3() -> Callable[..., Tensor]:
    """FlashAttention-3 over all keys, as vLLM builds it: ragged, or with ``block_table`` and ``seqused_k`` paged."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    def call(queries: Queries, k: Tensor, v: Tensor, longest: int, scale: float, causal: bool, **where: Any) -> Tensor:
        q, cu_seqlens_q, most = queries
        out: Tensor = flash_attn_varlen_func(
            q, k, v, most, cu_seqlens_q, longest, softmax_scale=scale, causal=causal, fa_version=3, **where
        )
        return out

    return call


def minimax() -> tuple[Callable[..., None], Callable[..., None]]:
    """vLLM's Triton kernels for MiniMax-M3, for prefill and for decode: pages of 128, keys and values side by side."""
    from vllm.models.minimax_m3.common.ops.sparse_attn import minimax_m3_sparse_attn, minimax_m3_sparse_attn_decode

    return minimax_m3_sparse_attn, minimax_m3_sparse_attn_decode


class Pattern(NamedTuple):
    """Local and vertical blocks of sequences of ``new`` tokens after ``ctx``, and the same as a mask of blocks."""

    mask: Tensor
    block: int
    local: int
    stride: int
    ctx: int
    new: int


def flex(make_pattern: Callable[[], Pattern], size: tuple[int, int]) -> Callable[..., Tensor]:
    """FlexAttention over q, k and v [B, H, T, D], compiled for one pattern; its mask is made in the first call."""
    from torch.nn.attention.flex_attention import flex_attention

    # Compilations for other cases count against a limit, past which it would run uncompiled.
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    # One mask for all inputs: another would be compiled for again.
    mask: list[Any] = []

    def call(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if not mask:
            mask.append(flex_mask(make_pattern(), size))
        out: Tensor = compiled(q, k, v, block_mask=mask[0], scale=scale, enable_gqa=True)
        return out

    return call


def flex_mask(pattern: Pattern, size: tuple[int, int]) -> Any:
    """FlexAttention's BlockMask of sparse blocks of these many queries and keys, those seen whole apart.

    It is made of lists of blocks: torch's own way, from a function of tokens, takes more memory than there is.
    """
    from torch.nn.attention.flex_attention import BlockMask

    (each, block, local, stride, ctx, new), (q_size, k_size) = pattern, size
    heads, total, device = each.shape[0], ctx + new, each.device
    step = max(1, stride // heads)
    if q_size % block or k_size % block or (ctx % q_size and new > 1):
        raise ValueError(f"sparse blocks must be whole blocks of {block} and begin with one, got {size} after {ctx}")

    def visible(_: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = query + ctx
        near = position // block - key // block < local
        return (key <= position) & (near | ((key // block + head * step + 1) % stride == 0))

    rows, columns = -(-new // q_size), -(-total // k_size)
    each = each[:, ctx // block :]
    # Padded to whole sparse blocks, with what neither sees nor keeps a block from being seen whole.
    wide = (0, columns * (k_size // block) - each.shape[2], 0, rows * (q_size // block) - each.shape[1])
    tiles = (rows, q_size // block, columns, k_size // block)
    some = torch.nn.functional.pad(each, wide).unflatten(1, tiles[:2]).unflatten(3, tiles[2:]).any(4).any(2)
    every = torch.nn.functional.pad(each, wide, value=True).unflatten(1, tiles[:2]).unflatten(3, tiles[2:])
    row = torch.arange(rows, device=device)[:, None] * q_size + ctx
    end = (torch.arange(columns, device=device) + 1) * k_size
    whole = every.all(4).all(2) & (end - 1 <= row) & (end <= total)
    return BlockMask.from_kv_blocks(
        *listed(some & ~whole), *listed(whole), BLOCK_SIZE=size, mask_mod=visible, seq_lengths=(new, total)
    )


def listed(mask: Tensor) -> tuple[Tensor, Tensor]:
    """A block mask [H, rows, columns] as FlexAttention has it: how many, and which ones first."""
    order = mask.to(torch.int8).argsort(dim=2, descending=True, stable=True)
    return mask.sum(2).to(torch.int32)[None], order.to(torch.int32)[None]
