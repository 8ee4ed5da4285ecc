"""Is attention to selected blocks that of a mask written out token by token?"""

from __future__ import annotations

import pytest
import torch

from kernel_reference.attention import attention
from kernel_reference.paging import gather, paged_cache
from kernel_reference.selection import selected_attention, selected_attention_gradients, selection_mask


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


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_are_those_of_autograd_and_pages_of_two_sequences_have_the_sum(causal: bool) -> None:
    q, d_out = torch.randn(2, 5, 4, 8, dtype=torch.float64)
    k_cache, v_cache = torch.randn(2, 6, 2, 4, 8, dtype=torch.float64)  # 6 pages of 4, HND
    d_lse, sinks = torch.randn(4, 5, dtype=torch.float64), torch.linspace(-1, 1, 4, dtype=torch.float64)
    indices = torch.tensor(
        [[[0, 2], [1, -1]], [[2, 1], [0, 2]], [[2, 0], [1, 2]], [[0, 1], [0, -1]], [[1, 0], [1, -1]]]
    )
    table = torch.tensor([[5, 1, 2], [5, 3, 9]])
    scale = torch.tensor([0.5, 2.0], dtype=torch.float64)
    given = {
        "block_size": 4, "block_table": table, "cu_seqlens_q": torch.tensor([0, 3, 5]), "causal": causal,
        "seqlens_k": torch.tensor([11, 7]), "page_layout": "HND",
    }  # fmt: skip
    got = selected_attention_gradients(
        q, k_cache, v_cache, indices, d_out, d_lse, sinks=sinks, k_scale=scale, v_scale=0.5, **given
    )
    leaves = [x.clone().requires_grad_() for x in (q, k_cache, v_cache, sinks)]
    # Scales move to what they multiply, from the pages to queries and results.
    widened = scale.repeat_interleave(2)[:, None]
    found = selected_attention(leaves[0] * widened, leaves[1], leaves[2], indices, sinks=leaves[3], **given)
    (0.5 * (found.out * d_out).sum() + (found.lse * d_lse).sum()).backward()
    for x, leaf in zip(got, leaves, strict=True):
        torch.testing.assert_close(x, leaf.grad)
    assert got.k[5].any()
    assert not got.k[[0, 4]].any()


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
