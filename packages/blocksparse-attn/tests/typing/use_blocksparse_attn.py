"""A user's code, for `nox -s types` to check with mypy in strict mode; it is never run.

Every file of such a folder has a name of its own, as mypy takes them together.
"""

from typing import Any, Literal, assert_type

import torch

from blocksparse_attn import (
    AttentionPlan,
    AttentionResult,
    BlockLayout,
    LocalStridedBlockSparseAttn,
    SelectedPlan,
    blocksparse_attention,
    blocksparse_flash_attn_varlen_fwd,
    select_blocks,
    selected_attention,
)
from blocksparse_attn.parallel import RowCut, blocksparse_attention_cp, selected_attention_cp
from kernel_reference.sharding import Interleave

q, k, v = torch.randn(3, 20, 4, 64)
cu_seqlens = torch.tensor([0, 5, 20], dtype=torch.int32)
layout = BlockLayout.local_strided(4, 64, local_blocks=1, vert_stride=2, block_size=16, device="cpu")


def attend(with_lse: bool, pages: Literal["NHD", "HND"]) -> torch.Tensor:
    """The type of a result follows from ``return_lse``."""
    assert_type(blocksparse_attention(q, k, v, layout, max_seqlen_q=15), torch.Tensor)
    assert_type(blocksparse_attention(q, k, v, layout, return_lse=False), torch.Tensor)
    out, lse = blocksparse_attention(
        q,
        k,
        v,
        layout,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=15,
        softmax_scale=0.1,
        window=(127, 0),
        out=torch.empty_like(q),
        return_lse=True,
        plan=AttentionPlan(16, 16, 1, 4, 1),
    )
    assert_type(lse, torch.Tensor)
    either = blocksparse_attention(q, k, v, layout, page_layout=pages, return_lse=with_lse)
    assert_type(either, torch.Tensor | AttentionResult)
    blocksparse_attention(q, k, v, layout, page_layout="NDH")  # type: ignore[call-overload]
    return out


def drop_in() -> torch.Tensor:
    """By keyword and by position, with a layout and with its lists."""
    lists = (layout.crow, layout.col)
    blocksparse_flash_attn_varlen_fwd(q, k, v, cu_seqlens, None, None, lists, block_size=16, max_seqlen=64)
    layer = LocalStridedBlockSparseAttn(4, 64, 1, 2, 16, dtype=torch.bfloat16)
    assert_type(layer.layout.density(), float)
    assert_type(layer.forward(q, k, v, cu_seqlens), torch.Tensor)
    return blocksparse_flash_attn_varlen_fwd(q, k, v, cu_seqlens, cu_seqlens, 0.1, layout.union(layout))


def select(cache: torch.Tensor, table: torch.Tensor, with_lse: bool) -> torch.Tensor:
    """Blocks are chosen, then attended to."""
    bounds, lengths = cu_seqlens, cu_seqlens.diff()
    lists = select_blocks(q, cache, topk=4, block_size=16, cu_seqlens_q=bounds, seqlens_k=lengths)
    out = selected_attention(
        q, cache, cache, lists, block_size=16, block_table=table, cu_seqlens_q=bounds, seqlens_k=lengths,
        plan=SelectedPlan(16, 16, 1, 4, 1),
    )  # fmt: skip
    assert_type(out, torch.Tensor)
    either = selected_attention(
        q, cache, cache, lists, block_size=16, block_table=table, cu_seqlens_q=bounds, seqlens_k=lengths,
        return_lse=with_lse,
    )  # fmt: skip
    assert_type(either, torch.Tensor | AttentionResult)
    return selected_attention(
        q, cache, cache, lists, block_size=16, block_table=table, cu_seqlens_q=bounds, seqlens_k=lengths, out=out,
        return_lse=True,
    ).lse  # fmt: skip


def over_ranks(group: Any, cache: torch.Tensor, table: torch.Tensor, with_lse: bool) -> AttentionResult:
    """Tokens that ranks share: of a prompt, and of a cache."""
    cut = RowCut.of(group, layout, 20, (4, 4))
    assert_type(blocksparse_attention_cp(q, k, v, cut, group=group), torch.Tensor)
    either = blocksparse_attention_cp(q, k, v, cut, group=group, return_lse=with_lse)
    assert_type(either, torch.Tensor | AttentionResult)
    assert_type(blocksparse_attention_cp(q, k, v, cut, group=group, return_lse=True), AttentionResult)
    own, bounds = Interleave.of(group, size=16), cu_seqlens
    out = selected_attention_cp(
        q, cache, cache, table, block_size=16, block_table=table, cu_seqlens_q=bounds, seqlens_k=bounds, layout=own,
        group=group,
    )  # fmt: skip
    assert_type(out, torch.Tensor)
    return selected_attention_cp(
        q, cache, cache, table, block_size=16, block_table=table, cu_seqlens_q=bounds, seqlens_k=bounds,
        layout=own.at(0), group=group, return_lse=True,
    )  # fmt: skip
