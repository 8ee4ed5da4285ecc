"""Attention over an engine's caches without pages: does each token see what it may of its own sequence, and no more?

The slots after a sequence's last token are NaN. Expected is kernel_reference's oracle in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from blocksparse_attn.integrations import contiguous
from blocksparse_attn.integrations.contiguous import attend_all, attend_selected, best_of_blocks
from kernel_reference.attention import attention
from kernel_reference.testing import contract
from kernel_reference.testing.numerics import assert_close_to_oracle
from kernel_reference.testing.plain import plain_rows

Tensor = torch.Tensor
HEADS, KV_HEADS, DIM, BLOCK, TOPK, SCALE = 4, 2, 32, 16, 3, 0.3
LENGTHS, TOKENS = (70, 5, 39), 4


class Steps:
    """The last tokens of three sequences, a cache with so many slots of each, and for each token some blocks."""

    def __init__(self, device: torch.device, slots: int, lists: int = KV_HEADS, entries: int = TOPK) -> None:
        batch = len(LENGTHS)
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
        # As a projection leaves them, token by token.
        self.query = torch.randn(batch, TOKENS, HEADS, DIM, device=device).bfloat16().transpose(1, 2)
        self.key, self.value = torch.randn(2, batch, KV_HEADS, slots, DIM, device=device).bfloat16()
        for i, length in enumerate(LENGTHS):
            self.key[i, :, length:] = self.value[i, :, length:] = torch.nan
        positions = self.lengths[:, None] + torch.arange(-TOKENS, 0, device=device)
        last = (positions // BLOCK)[:, None, :, None].expand(-1, lists, -1, -1)
        # A list has the token's own block, others before it, and -1 for those that are not.
        other = torch.rand(batch, lists, TOKENS, 5, device=device).argsort(-1)[..., :entries]
        self.blocks = torch.where(other < last, other, -1)
        self.blocks[..., :1] = torch.where((self.blocks == last).any(-1, keepdim=True), self.blocks[..., :1], last)

    def selected(self) -> Tensor:
        return attend_selected(
            self.query, self.key, self.value, self.lengths, self.blocks, block_size=BLOCK, topk=TOPK,
            softmax_scale=SCALE,
        )  # fmt: skip

    def every(self) -> Tensor:
        return attend_all(self.query, self.key, self.value, self.lengths, softmax_scale=SCALE)

    def check(self, out: Tensor, selected: bool) -> None:
        """Hold a result [B, S, Hq, D] to the oracle's, sequence by sequence."""
        for i, length in enumerate(LENGTHS):
            q, k, v = (
                states[i].transpose(0, 1) for states in (self.query, self.key[:, :, :length], self.value[:, :, :length])
            )
            at = torch.arange(length, device=q.device)
            seen = at <= (length - TOKENS + torch.arange(TOKENS, device=q.device))[:, None]
            if selected:
                listed = (self.blocks[i, ..., None] == at // BLOCK).any(-2)
                seen = seen & listed.repeat_interleave(HEADS // len(listed), 0)
            exact = attention(q, k, v, mask=seen, softmax_scale=SCALE)
            keys, values = (states.repeat_interleave(HEADS // KV_HEADS, 1) for states in (k, v))
            plain, _ = plain_rows(q, keys, values, seen.expand(HEADS, -1, -1), SCALE)
            assert_close_to_oracle(out[i], exact.out, plain.to(out.dtype))


Make = Callable[..., Steps]


@pytest.fixture
def make(device: torch.device) -> Make:
    return lambda *arguments: Steps(device, *arguments)


@pytest.mark.parametrize("slots", [80, 75], ids=["whole blocks", "part of a block"])
def test_a_token_sees_the_blocks_that_it_lists_of_its_own_sequence(make: Make, slots: int) -> None:
    steps = make(slots)
    steps.check(steps.selected(), True)


@pytest.mark.parametrize(("lists", "entries"), [(1, TOPK), (2, 2)], ids=["one for all kv heads", "short"])
def test_lists_may_be_those_of_all_kv_heads_and_shorter(make: Make, lists: int, entries: int) -> None:
    steps = make(80, lists, entries)
    steps.check(steps.selected(), True)


@pytest.mark.parametrize("slots", [80, 75, 600])
def test_without_lists_a_token_sees_all_keys_up_to_itself(make: Make, slots: int) -> None:
    steps = make(slots)
    steps.check(steps.every(), False)


def test_lists_of_other_heads_are_refused(make: Make) -> None:
    with pytest.raises(ValueError, match=r"^block_indices must be lists of 2 kv heads, or of a divisor of them, got "):
        make(80, 3).selected()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("slots", [80, 75, 9])
def test_the_best_score_of_a_block_is_of_keys_that_the_token_sees(
    device: torch.device, slots: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three tokens at a time.
    monkeypatch.setattr(contiguous, "_SCORES", 2 * 3 * 3 * slots)
    query = torch.randn(2, 3, 7, DIM, device=device).to(dtype)
    key = torch.randn(2, slots, DIM, device=device).to(dtype)
    positions = torch.stack([torch.arange(7, device=device), torch.arange(slots - 7, slots, device=device)])
    best = best_of_blocks(query, key, positions, BLOCK)
    scores = query.double() @ key.double()[:, None].mT
    scores.masked_fill_(torch.arange(slots, device=device) > positions[:, None, :, None], -torch.inf)
    expected = torch.stack([block.amax(-1) for block in scores.split(BLOCK, -1)], -1)
    assert best.dtype == torch.float32
    torch.testing.assert_close(best.double(), expected, rtol=1e-5, atol=1e-4)


def test_caches_of_about_one_length_share_a_layout(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[Any, Any] = {}
    monkeypatch.setattr(contiguous, "_layouts", kept)
    for slots in (600, 601, 1024):
        make(slots).every()
    assert [layout.to_mask().tolist() for layout in kept.values()] == [[torch.ones(4, 4).tril().bool().tolist()]]
    with torch.inference_mode():
        make(1025).every()
    assert [layout.rows for layout in kept.values()] == [4, 8]
    assert not any(layout.col.is_inference() for layout in kept.values())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["selected", "every"])
def test_a_cuda_graph_takes_new_lengths_and_lists(make: Make, name: str) -> None:
    steps = make(80)

    def run(*tensors: Tensor) -> Tensor:
        steps.query, steps.key, steps.value, steps.lengths, steps.blocks = tensors
        result: Tensor = getattr(steps, name)()
        return result

    def inputs(seed: int) -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        new = make(80)
        return new.query, new.key, new.value, new.lengths, new.blocks

    given = inputs(0)
    contract.check_no_host_sync(lambda: run(*given))
    contract.check_cuda_graph(run, inputs)
