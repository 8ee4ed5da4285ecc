"""Block layouts: lists against masks, masks against loops over tokens, the Phi-3 pattern against its words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_reference.attention import attention
from kernel_reference.blocks import (
    csr_to_mask,
    density,
    local_strided,
    mask_function,
    mask_to_csr,
    merge_query_blocks,
    token_mask,
)
from kernel_reference.checks import validate_values
from kernel_reference.models import PHI3_SMALL


def random_mask(heads: int, rows: int, columns: int, share: float = 0.5, seed: int = 0) -> torch.Tensor:
    return torch.rand(heads, rows, columns, generator=torch.Generator().manual_seed(seed)) < share


masks = st.builds(
    random_mask,
    st.integers(0, 4),
    st.integers(0, 9),
    st.integers(0, 9),
    st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    st.integers(0, 1000),
)


@settings(max_examples=100, deadline=None)
@given(mask=masks)
def test_lists_name_the_columns_of_each_row_in_order(mask: torch.Tensor) -> None:
    crow, col = mask_to_csr(mask)
    assert crow.dtype == col.dtype == torch.int32
    assert crow.shape == (mask.shape[0], mask.shape[1] + 1)
    for h in range(mask.shape[0]):
        for r in range(mask.shape[1]):
            listed = col[h, crow[h, r] : crow[h, r + 1]].tolist()
            assert listed == [c for c in range(mask.shape[2]) if mask[h, r, c]]
        assert bool((col[h, crow[h, -1] :] == -1).all())
    with validate_values():
        assert torch.equal(csr_to_mask(crow, col, mask.shape[2]), mask)


def test_entries_past_the_last_row_are_never_read() -> None:
    crow, col = mask_to_csr(random_mask(3, 4, 5, seed=3))
    junk = torch.cat([col, torch.full((3, 4), 999, dtype=torch.int32)], dim=1)
    junk[junk == -1] = -77
    with validate_values():
        assert torch.equal(csr_to_mask(crow, junk, 5), csr_to_mask(crow, col, 5))


@pytest.mark.parametrize(
    ("crow", "col", "message"),
    [
        ([[0, 2]], [[1, 4]], r"^col\[0, 0:2\] must be increasing, from 0 to 3, got \[1, 4\]"),
        ([[0, 2]], [[-1, 1]], r"^col\[0, 0:2\] must be increasing, from 0 to 3, got \[-1, 1\]"),
        ([[0, 2]], [[2, 1]], r"^col\[0, 0:2\] must be increasing"),
        ([[0, 2]], [[1, 1]], r"^col\[0, 0:2\] must be increasing"),
        ([[0, 3]], [[0, 1]], r"^crow\[0, 1\] must be from crow\[0, 0\] = 0 to 2, got 3"),
        ([[0, 2, 1]], [[0, 1]], r"^crow\[0, 2\] must be from crow\[0, 1\] = 2 to 2, got 1"),
    ],
)
def test_impossible_lists_are_named_when_values_are_checked(
    crow: list[list[int]], col: list[list[int]], message: str
) -> None:
    lists = torch.tensor(crow), torch.tensor(col)
    with pytest.raises(ValueError, match=message):
        csr_to_mask(*lists, 4)
    with validate_values(False):
        csr_to_mask(*lists, 4)


def test_impossible_columns_and_rows_list_nothing_and_order_does_not_matter() -> None:
    with validate_values(False):
        mask = csr_to_mask(torch.tensor([[0, 3, 5, 9]]), torch.tensor([[3, 7, 0, -1, 2]]), 4)
    assert mask.tolist() == [[[True, False, False, True], [False, False, True, False], [False] * 4]]


@settings(max_examples=60, deadline=None)
@given(
    mask=masks,
    q_block=st.integers(1, 5),
    k_block=st.integers(1, 5),
    q_len=st.integers(0, 12),
    k_len=st.integers(0, 12),
    causal=st.booleans(),
)
def test_a_query_at_its_absolute_position_sees_the_listed_blocks(
    mask: torch.Tensor, q_block: int, k_block: int, q_len: int, k_len: int, causal: bool
) -> None:
    heads, rows, columns = mask.shape
    got = token_mask(mask, q_block, k_block, q_len, k_len, causal=causal)
    assert got.shape == (heads, q_len, k_len)
    for h in range(heads):
        for i in range(q_len):
            for j in range(k_len):
                p = k_len - q_len + i
                row, column = p // q_block, j // k_block
                listed = 0 <= row < rows and column < columns and bool(mask[h, row, column])
                assert bool(got[h, i, j]) == (listed and (j <= p or not causal))


@pytest.mark.parametrize(("q_block", "k_block"), [(16, 16), (64, 16), (16, 64)])
@pytest.mark.parametrize("heads", [1, 4])
def test_attention_takes_a_layout_without_expanding_it(q_block: int, k_block: int, heads: int) -> None:
    mask = random_mask(heads, -(-200 // q_block), -(-200 // k_block), seed=5)
    mask[:, 2] = False
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(size, 4, 8, generator=generator) for size in (150, 200, 200))
    got = attention(q, k, v, causal=True, mask=mask_function(mask, q_block, k_block))
    want = attention(q, k, v, mask=token_mask(mask, q_block, k_block, 150, 200))
    torch.testing.assert_close(got.out, want.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-12, atol=1e-12)
    assert bool(want.out.any())
    if q_block == 64:
        # Row 2 lists nothing: positions 128 .. 191 are queries 78 .. 141.
        assert not bool(got.out[78:142].any())
        assert bool((got.lse[:, 78:142] == -torch.inf).all())


@pytest.mark.parametrize(
    ("num_heads", "local", "stride", "homo"),
    [(32, 16, 8, False), (4, 2, 8, False), (3, 1, 8, False), (4, 2, 8, True), (4, 3, 1, False), (1, 2, 5, False)],
)
@pytest.mark.parametrize("tokens", [1, 64, 65, 2000])
def test_local_strided_lists_local_and_shifted_vertical_blocks(
    num_heads: int, local: int, stride: int, homo: bool, tokens: int
) -> None:
    mask = local_strided(num_heads, tokens, local, stride, 64, homo_head=homo)
    rows = (tokens + 63) // 64
    assert mask.shape == (1 if homo else num_heads, rows, rows)
    step = 0 if homo else max(1, stride // num_heads)
    for h in range(mask.shape[0]):
        for i in range(rows):
            want = {j for j in range(i + 1) if i - j < local}
            want |= {j for j in range(i + 1) if (j + h * step + 1) % stride == 0}
            assert set(mask[h, i].nonzero()[:, 0].tolist()) == want


def test_phi3_small_has_the_known_first_rows_and_density() -> None:
    model = PHI3_SMALL
    shape = model.num_heads_q, model.local_blocks, model.vert_stride, model.block_size
    heads, local, stride, block = shape
    long = local_strided(heads, 32768, local, stride, block)
    # Row 23 reaches back to block 8 locally; head 0 adds block 7, head 1 block 6, head 8 again block 7.
    assert long[0, 23].nonzero()[:, 0].tolist() == [7, *range(8, 24)]
    assert long[1, 23].nonzero()[:, 0].tolist() == [6, *range(8, 24)]
    assert torch.equal(long[8], long[0])
    assert density(long) == pytest.approx(0.18, abs=0.005)
    assert density(local_strided(heads, 8192, local, stride, block)) == pytest.approx(0.33, abs=0.005)


def test_a_rank_keeps_its_heads_as_they_are_numbered_in_the_whole_model() -> None:
    whole = local_strided(32, 3000, 4, 8, 64)
    assert torch.equal(local_strided(32, 3000, 4, 8, 64, active_head_range=(5, 9)), whole[5:9])
    assert local_strided(32, 3000, 4, 8, 64, homo_head=True, active_head_range=(5, 9)).shape[0] == 1


def test_density_counts_only_what_causality_leaves() -> None:
    assert density(torch.ones(2, 5, 5, dtype=torch.bool)) == 1.0
    assert density(torch.zeros(2, 5, 5, dtype=torch.bool)) == 0.0
    assert density(torch.eye(4, dtype=torch.bool)[None]) == pytest.approx(4 / 10)
    # Rows of 4 queries over columns of 2 keys: 2 + 4 blocks are possible.
    wide = torch.zeros(1, 2, 4, dtype=torch.bool)
    wide[0, 0] = True
    assert density(wide, 4, 2) == pytest.approx(2 / 6)


def test_longer_query_blocks_list_what_any_of_their_rows_listed() -> None:
    mask = random_mask(3, 7, 7, 0.3, seed=9)
    merged = merge_query_blocks(mask, 2)
    assert merged.shape == (3, 4, 7)
    for r in range(4):
        assert torch.equal(merged[:, r], mask[:, 2 * r : 2 * r + 2].any(1))


good = torch.ones(1, 2, 2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mask_to_csr(good.float()), TypeError, "mask must be bool, got torch.float32"),
        (lambda: mask_to_csr(good[0]), ValueError, "mask must be 3-D .*, got 2-D"),
        (lambda: csr_to_mask(torch.zeros(3), torch.zeros(3), 2), TypeError, "crow must be an int32 or int64 tensor"),
        (lambda: csr_to_mask(good[0].int(), good[0, :1].int(), 2), ValueError, r"col must be of shape \[2, any\]"),
        (
            lambda: csr_to_mask(good[0, :, :0].int(), good[0].int(), 2),
            ValueError,
            r"crow must be of shape \[heads, rows",
        ),
        (lambda: token_mask(good, 0, 1, 1, 1), ValueError, "q_block must be at least 1, got 0"),
        (lambda: mask_function(good, 1, -1), ValueError, "k_block must be at least 1, got -1"),
        (lambda: density(good[0]), ValueError, "mask must be 3-D"),
        (lambda: merge_query_blocks(good, 0), ValueError, "factor must be at least 1, got 0"),
        (lambda: local_strided(0, 64, 1, 1, 64), ValueError, "num_heads must be at least 1, got 0"),
        (lambda: local_strided(4, 64, 0, 1, 64), ValueError, "local_blocks must be at least 1, got 0"),
        (lambda: local_strided(4, 64, 1, 0, 64), ValueError, "vert_stride must be at least 1, got 0"),
        (lambda: local_strided(4, 64, 1, 1, 0), ValueError, "block_size must be at least 1, got 0"),
        (
            lambda: local_strided(4, 64, 1, 1, 64, active_head_range=(2, 5)),
            ValueError,
            r"active_head_range must be \(lo, hi\) with 0 <= lo < hi <= 4, got \(2, 5\)",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        call()
