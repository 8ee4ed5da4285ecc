"""The indexer of DeepSeek-V3.2, 64 heads of 128: scores of keys beside a copy, and the top 2048 beside torch.topk.

DeepGEMM, whose ``fp8_mqa_logits`` and ``fp8_paged_mqa_logits`` would be the peers of scores, is in no wheel that the
benchmark finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from dense import OURS, PAGE

from kernel_reference.bench import Case
from kernel_reference.indexing import index_scores as exact_scores
from kernel_reference.indexing import top_positions
from tilelang_mla import index_cache_views, index_lengths, index_scores, index_topk

HEADS, TOPK = 64, 2048
TORCH = "torch.topk"
# Sequences, query tokens of each, keys of each.
DECODE = tuple((batch, 1, keys) for batch in (1, 16, 64) for keys in (8192, 32768, 131072))
DECODE += ((128, 1, 8192), (128, 2, 8192), (128, 1, 32768), (128, 2, 32768))
PREFILL = ((1, 2048, 32768), (1, 4096, 16384), (1, 4096, 65536), (1, 4096, 131072), (8, 512, 32768))
# Rows that are looked at; beside the sum of the sizes of its products a score is off by no more than tensor cores cut.
SAMPLE, CUT = 3, 2**-11


@dataclass(eq=False)
class Keys:
    """Queries, weights and a cache of keys, each sequence of as many."""

    q: torch.Tensor
    cache: torch.Tensor
    weights: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor


class Scores(NamedTuple):
    """What is checked."""

    scores: torch.Tensor


@dataclass(eq=False)
class Rows:
    """Scores of keys, and how many there are of each row."""

    scores: torch.Tensor
    lengths: torch.Tensor


class Positions(NamedTuple):
    """Of the highest scores; torch's are in the order of the scores."""

    positions: torch.Tensor
    exact: bool


def make_keys(device: torch.device, batch: int, tokens: int, keys: int) -> Keys:
    columns = keys // PAGE
    cache = torch.empty(batch * columns, PAGE, 1, 132, dtype=torch.uint8, device=device)
    held = index_cache_views(cache)
    # Any e4m3 but the largest, and NaN, of either sign.
    signs = torch.randint(0, 2, held.keys.shape, dtype=torch.uint8, device=device) * 128
    held.keys.view(torch.uint8).copy_(torch.randint(0, 120, held.keys.shape, dtype=torch.uint8, device=device) + signs)
    held.scales.uniform_(0.5, 1.5)
    q = torch.randn(batch, tokens, HEADS, 128, device=device).to(torch.float8_e4m3fn)
    seqlens_k = torch.full((batch,), keys, dtype=torch.int32, device=device)
    lengths = index_lengths(seqlens_k, num_tokens=batch * tokens).view(batch, tokens)
    table = torch.randperm(batch * columns, device=device).int().view(batch, columns)
    return Keys(q, cache, torch.randn(batch, tokens, HEADS, device=device), lengths, table)


def make_rows(device: torch.device, batch: int, tokens: int, keys: int) -> Rows:
    seqlens_k = torch.full((batch,), keys, dtype=torch.int32, device=device)
    lengths = index_lengths(seqlens_k, num_tokens=batch * tokens)
    scores = torch.randn(batch * tokens, keys, device=device) * 3 + 2
    return Rows(scores.masked_fill_(torch.arange(keys, device=device) >= lengths[:, None], -math.inf), lengths)


def score(i: Keys) -> Scores:
    return Scores(index_scores(i.q, i.cache, i.weights, i.lengths, i.block_table, clean_logits=False))


def select(i: Rows) -> Positions:
    return Positions(index_topk(i.scores, i.lengths, TOPK), True)


def torch_topk() -> Callable[[Rows], Positions]:
    return lambda i: Positions(i.scores.topk(TOPK, dim=1).indices, False)


def check_scores(outputs: Scores, i: Keys) -> float:
    held, worst = index_cache_views(i.cache), 0.0
    for b in range(min(SAMPLE, len(i.q))):
        pages = i.block_table[b].long()
        codes = held.keys.view(torch.uint8)[pages].view(torch.float8_e4m3fn).double()
        keys = (codes * held.scales[pages][..., None]).flatten(0, 1)
        q, weights, lengths = i.q[b, -1:].float(), i.weights[b, -1:], i.lengths[b, -1:]
        want = exact_scores(q, keys, weights, lengths)
        size = exact_scores(q.abs(), keys.abs(), weights.abs(), lengths)
        worst = max(worst, float(((outputs.scores[b, -1:].double() - want).abs() / size).max()))
    if not worst < CUT:
        raise AssertionError(f"off by {worst:.3g} of the sizes of the products")
    return worst


def check_positions(outputs: Positions, i: Rows) -> float:
    for row in {0, len(i.scores) // 2, len(i.scores) - 1}:
        want = top_positions(i.scores[row : row + 1], i.lengths[row : row + 1], TOPK)[0]
        got = outputs.positions[row].sort().values.int()
        # Of equal scores torch takes any.
        if outputs.exact and not torch.equal(got, want):
            raise AssertionError(f"row {row} lists other positions")
        if not torch.equal(i.scores[row][got.long()].sort().values, i.scores[row][want.long()].sort().values):
            raise AssertionError(f"row {row} lists other scores")
    return 0.0


def index_cases(device: torch.device) -> Iterator[Case]:
    for batch, tokens, keys in DECODE + PREFILL:
        seen = sum(keys - token for token in range(tokens)) * batch
        kind = "prefill" if tokens > 4 else "decode"
        name = f"B{batch} of {keys}" + (f", {tokens} query tokens" if tokens > 1 else "")
        shape: dict[str, int | str] = {"sequences": batch, "tokens": tokens, "keys": keys}
        yield Case(
            name=f"index scores, {kind} {name}",
            shape={**shape, "heads": HEADS},
            make_inputs=partial(make_keys, device, batch, tokens, keys),
            ours={OURS: score},
            peers={},
            check=check_scores,
            tolerance=math.inf,
            bytes_moved=batch * keys * 132 + 4 * seen,
            flops=2 * seen * HEADS * 128,
        )
        yield Case(
            name=f"index top {TOPK}, {kind} {name}",
            shape={**shape, "topk": TOPK},
            make_inputs=partial(make_rows, device, batch, tokens, keys),
            ours={OURS: select},
            peers={TORCH: torch_topk},
            check=check_positions,
            bytes_moved=4 * seen + 4 * batch * tokens * TOPK,
            baseline=TORCH,
        )
