"""Is attention to selected blocks that of a mask written out token by token?"""

from __future__ import annotations

import pytest
import torch

from kernel_reference.attention import attention
from kernel_reference.paging import gather, paged_cache
from kernel_reference.selection import selected_attention, selection_mask


@pytest.mark.parametrize("causal", [True, False])
def test_each_token_sees_the_blocks_listed_for_its_kv_head(causal: bool) -> None:
    totals, new, block = [21, 9], [3, 9], 4
    cu_k, cu_q = torch.tensor([0, 21, 30]), torch.tensor([0, 3, 12])
    q = torch.randn(12, 4, 8)
    keys, values = torch.randn(2, 30, 2, 8)
    paged = paged_cache(keys, values, cu_k, 5, v_scale=2.0)
    indices = torch.stack([torch.randperm(3)[:2] for _ in range(24)]).view(12, 2, 2)
    indices[5, 0, 1] = -1
    got = selected_attention(
        q, paged.k_cache, paged.v_cache, indices, block_size=block, block_table=paged.block_table, cu_seqlens_q=cu_q,
        seqlens_k=paged.seqlens_k, causal=causal, v_scale=2.0, sinks=torch.ones(4),
    )  # fmt: skip
    mask = torch.zeros(4, 12, 30, dtype=torch.bool)
    for sequence in range(2):
        for i in range(new[sequence]):
            token = int(cu_q[sequence]) + i
            for head in range(4):
                for key in range(totals[sequence]):
                    seen = not causal or key <= totals[sequence] - new[sequence] + i
                    mask[head, token, int(cu_k[sequence]) + key] = seen and key // block in indices[token, head // 2]
    values = gather(paged.v_cache, paged.block_table, paged.seqlens_k, scale=2.0).tokens
    wanted = attention(q, keys, values, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, mask=mask, sinks=torch.ones(4))
    torch.testing.assert_close(got.out, wanted.out)
    torch.testing.assert_close(got.lse, wanted.lse)


def test_what_is_no_block_lists_nothing() -> None:
    mask = selection_mask(torch.tensor([[3, -1, 0], [5, 9, -4]]), 5)
    assert mask.tolist() == [[True, False, False, True, False], [False] * 5]


def test_a_block_size_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^block_size must be at least 1, got 0$"):
        selected_attention(
            torch.zeros(1, 1, 8), torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 1, 8), torch.zeros(1, 1, 1).int(),
            block_size=0, block_table=torch.zeros(1, 1).int(), cu_seqlens_q=torch.tensor([0, 1]),
            seqlens_k=torch.tensor([1]),
        )  # fmt: skip
