"""Attention over levels of shared keys against attention over each sequence's keys, one after another."""

from __future__ import annotations

import pytest
import torch

from kernel_reference.attention import attention
from kernel_reference.cascade import Level, cascade_attention

# Rows of each sequence, and its group on the first level and on the second.
ROWS = [2, 1, 0, 3, 1]
GROUPS = [[0, 0, 0, 1, 1], [0, 1, 1, 2, 2]]
KEYS = [[7, 3], [4, 0, 5], [3, 1, 6, 5, 1]]


def bounds(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0)


def rows_of_groups(groups: list[int]) -> list[int]:
    return [sum(n for n, g in zip(ROWS, groups, strict=True) if g == group) for group in range(max(groups) + 1)]


def make() -> tuple[torch.Tensor, list[Level]]:
    cuts = [*(rows_of_groups(groups) for groups in GROUPS), ROWS]
    levels = []
    for rows, keys in zip(cuts, KEYS, strict=True):
        k, v = torch.randn(sum(keys), 2, 8).double(), torch.randn(sum(keys), 2, 6).double()
        levels.append(Level(k, v, bounds(rows), bounds(keys)))
    return torch.randn(sum(ROWS) + 2, 4, 8).double(), levels


@pytest.mark.parametrize("options", [{}, {"sinks": torch.tensor([1.0, -1.0, 0.0, 2.0]), "softcap": 3.0}], ids=str)
def test_a_cascade_is_attention_over_the_keys_of_all_levels_one_after_another(options) -> None:
    q, levels = make()
    result = cascade_attention(q, levels, **options)
    begin = 0
    for i, new in enumerate(ROWS):
        groups = [GROUPS[0][i], GROUPS[1][i], i]
        own = [slice(*level.cu_seqlens_k[g : g + 2].tolist()) for level, g in zip(levels, groups, strict=True)]
        k, v = (
            torch.cat([getattr(level, name)[part] for level, part in zip(levels, own, strict=True)]) for name in "kv"
        )
        alone = attention(q[begin : begin + new], k, v, causal=True, **options)
        torch.testing.assert_close(result.out[begin : begin + new], alone.out)
        torch.testing.assert_close(result.lse[:, begin : begin + new], alone.lse)
        begin += new
    assert not result.out[begin:].any()
    assert bool((result.lse[:, begin:] == -torch.inf).all())


def test_a_sample_of_rows_is_that_of_the_whole_and_a_mask_is_the_last_levels() -> None:
    q, levels = make()
    rows = torch.tensor([8, 0, 5])
    whole, some = cascade_attention(q, levels), cascade_attention(q, levels, rows=rows)
    torch.testing.assert_close(some.out, whole.out[rows])
    torch.testing.assert_close(some.lse, whole.lse[:, rows])
    nothing = torch.zeros(len(q), len(levels[-1].k), dtype=torch.bool)
    masked = cascade_attention(q, levels, mask=nothing)
    keys = levels[-1]._replace(k=levels[-1].k[:0], v=levels[-1].v[:0], cu_seqlens_k=0 * levels[-1].cu_seqlens_k)
    torch.testing.assert_close(masked.out, cascade_attention(q, [*levels[:-1], keys]).out)


def test_wrong_levels_are_named() -> None:
    q, levels = make()
    for name, wrong in (
        ("levels ", []),
        (r"levels\[1\].cu_seqlens_k ", [levels[0], levels[1]._replace(cu_seqlens_k=bounds([9]))]),
        (r"levels\[0\].cu_seqlens_q", [levels[0]._replace(cu_seqlens_q=bounds([99, 1])), levels[1]]),
    ):
        with pytest.raises(ValueError, match=f"^{name}.*must be "):
            cascade_attention(q, wrong)
    with pytest.raises(ValueError, match=r"^mask must be bool \[9, 16\]"):
        cascade_attention(q, levels, mask=torch.ones(9, 3, dtype=torch.bool))
