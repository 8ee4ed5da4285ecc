"""Cases of selected attention, beside vLLM's Triton kernels for MiniMax-M3; yielded by cases.py.

FLOP are four times the head size for every pair of a query and a key that it lists. Bytes are q, the output, and the
keys and values that decoding lists; in prefill each block once. Lists hold the token's own block, and others drawn at
random, of which a share is that of the token before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import peers
import torch

from blocksparse_attn import BlockLayout, SelectedPlan, selected_attention
from kernel_reference.bench import Case, Requirement
from kernel_reference.selection import selected_attention as oracle

Tensor = torch.Tensor

OURS, OURS_FP8, OURS_ALONE = "selected", "selected, e4m3", "selected, a token at a time"
TRITON = "vLLM MiniMax-M3"
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
ERROR_AT_MOST = 0.02
SAMPLE = 24


@dataclass(frozen=True)
class Shape:
    """``sequences`` of ``new`` tokens, the last of ``total``; ``share``: of a list, what neighbours have alike."""

    name: str
    heads: tuple[int, int, int]
    block: int
    topk: int
    sequences: int
    new: int
    total: int
    share: float = 0.0
    page: int = 128

    @property
    def words(self) -> str:
        what = f"decode of {self.total}" if self.new <= 4 else f"q{self.new} of {self.total}"
        alike = f", {self.share:.0%} alike" if self.share else ""
        tokens = f", {self.new} tokens" if 1 < self.new <= 4 else ""
        return f"selected, {self.name}, B{self.sequences} {what}{tokens}{alike}"

    @property
    def pairs(self) -> int:
        return self.sequences * self.new * self.heads[0] * self.topk * self.block

    @property
    def bytes_moved(self) -> int:
        q_heads, kv_heads, size = self.heads
        queries = 2 * self.sequences * self.new * q_heads * size
        listed = self.sequences * kv_heads * min(self.new * self.topk * self.block, self.total)
        return 2 * (queries + 2 * listed * size)


M3 = Shape("MiniMax-M3", (64, 4, 128), 128, 16, 1, 8192, 32768)
QWEN = Shape("Qwen3.8", (24, 2, 256), 4, 512, 32, 1, 32768, page=64)


@dataclass(eq=False)
class Batch:
    """``kv`` [pages, Hkv, page, 2 D]: keys and values side by side, as vLLM has them."""

    shape: Shape
    q: Tensor
    kv: Tensor
    fp8: Tensor
    indices: Tensor
    indices_by_head: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    prefix: Tensor


def lists_of(shape: Shape, device: torch.device) -> Tensor:
    """[T, Hkv, topk] int32: random blocks before a token's own, and that one; sorted, as the peer wants them."""
    count, topk = shape.sequences * shape.new, shape.topk
    position = torch.arange(shape.total - shape.new, shape.total, device=device).repeat(shape.sequences)
    own = position // shape.block
    blocks = -(-shape.total // shape.block)
    found = torch.empty(count, shape.heads[1], topk, dtype=torch.int32, device=device)
    alike = round(shape.share * topk)
    base = torch.rand(shape.heads[1], blocks, device=device)
    for first in range(0, count, 1024):
        rows = slice(first, min(first + 1024, count))
        scores = torch.rand(rows.stop - first, shape.heads[1], blocks, device=device)
        if alike:
            # The best of one draw for all, then of the token's own.
            common = base.topk(alike, dim=1).indices
            scores.scatter_(2, common.expand(len(scores), -1, -1), 2.0)
        scores.masked_fill_(torch.arange(blocks, device=device) > own[rows, None, None], -1.0)
        scores.scatter_(2, own[rows, None, None].expand(-1, shape.heads[1], 1), 3.0)
        found[rows] = scores.topk(topk, dim=2).indices.sort(dim=2).values.int()
    return found


def make_batch(device: torch.device, shape: Shape) -> Batch:
    q_heads, kv_heads, size = shape.heads
    tokens, columns = shape.sequences * shape.new, -(-shape.total // shape.page)
    kv = torch.randn(shape.sequences * columns, kv_heads, shape.page, 2 * size, device=device).to(BF16)
    order = torch.arange(shape.sequences + 1, dtype=torch.int32, device=device)
    indices = lists_of(shape, device)
    return Batch(
        shape=shape,
        q=torch.randn(tokens, q_heads, size, device=device, dtype=BF16),
        kv=kv,
        fp8=kv.to(E4M3),
        indices=indices,
        indices_by_head=indices.transpose(0, 1).contiguous(),
        block_table=torch.randperm(len(kv), device=device).int().view(shape.sequences, columns),
        cu_seqlens_q=order * shape.new,
        seqlens_k=torch.full((shape.sequences,), shape.total, dtype=torch.int32, device=device),
        prefix=torch.full((shape.sequences,), shape.total - shape.new, dtype=torch.int32, device=device),
    )


def caches(kv: Tensor) -> tuple[Tensor, Tensor]:
    size = kv.shape[3] // 2
    return kv[..., :size], kv[..., size:]


def where(batch: Batch) -> dict[str, Any]:
    return {
        "block_size": batch.shape.block, "block_table": batch.block_table, "cu_seqlens_q": batch.cu_seqlens_q,
        "seqlens_k": batch.seqlens_k, "page_layout": "HND",
    }  # fmt: skip


def ours(batch: Batch, plan: SelectedPlan | None = None) -> Tensor:
    return selected_attention(batch.q, *caches(batch.kv), batch.indices, plan=plan, **where(batch))


def ours_fp8(batch: Batch) -> Tensor:
    return selected_attention(batch.q, *caches(batch.fp8), batch.indices, **where(batch))


def triton() -> Callable[[Batch], Tensor]:
    prefill, decode = peers.minimax()

    def call(batch: Batch) -> Tensor:
        shape = batch.shape
        out = torch.empty_like(batch.q)
        scale = shape.heads[2] ** -0.5
        if shape.new <= 4:
            decode(
                batch.q, batch.kv, batch.indices_by_head, batch.block_table, batch.seqlens_k, shape.heads[1], scale,
                out, shape.new,
            )  # fmt: skip
        else:
            prefill(
                batch.q, batch.kv, batch.indices_by_head, batch.block_table, batch.cu_seqlens_q, batch.seqlens_k,
                batch.prefix, shape.new, shape.heads[1], scale, out,
            )  # fmt: skip
        return out

    return call


_kept: WeakKeyDictionary[Batch, tuple[Tensor, dict[str, Tensor]]] = WeakKeyDictionary()


def check(out: Tensor, batch: Batch, *, fp8: bool = False) -> float:
    """The largest error of a sampled row, over the row's largest value: of e4m3 against that cache itself."""
    if batch not in _kept:
        rows = torch.randint(len(batch.q), (SAMPLE,), device=out.device).unique()
        exact = {
            name: oracle(batch.q, *caches(kv), batch.indices, rows=rows, **where(batch)).out
            for name, kv in (("bf16", batch.kv), ("fp8", batch.fp8.to(BF16)))
        }
        _kept[batch] = rows, exact
    rows, exact = _kept[batch]
    errors = []
    for wanted in exact.values():
        size = wanted.abs().amax(-1, keepdim=True)
        errors.append(float(((out[rows].double() - wanted).abs() / size).max()))
    # Which of the two caches was read is told by the smaller one.
    if not min(errors) <= ERROR_AT_MOST:
        raise AssertionError(f"error {min(errors):.2g} of a row's largest value > {ERROR_AT_MOST:g}")
    return min(errors)


def case(
    device: torch.device, shape: Shape, *, of_triton: float | None = None, of_copy: float | None = None,
    fp8: bool = False,
) -> Case:  # fmt: skip
    targets = []
    if of_triton is not None:
        targets.append(Requirement(OURS, TRITON, speed_at_least=of_triton))
    if of_copy is not None:
        targets.append(Requirement(OURS, speed_at_least=of_copy))
    calls: dict[str, Callable[[Batch], Tensor]] = {OURS: ours}
    if fp8:
        calls[OURS_FP8] = ours_fp8
        targets.append(Requirement(OURS_FP8, OURS, time_at_most=0.65))
    if shape.new > 4:
        # What tiles of several tokens gain, or lose where their lists have little in common.
        calls[OURS_ALONE] = partial(ours, plan=SelectedPlan(16, 64, 1, 4, 3))
    takes_triton = shape.heads == M3.heads
    return Case(
        name=shape.words,
        shape={"model": shape.name, "tokens": shape.new, "total": shape.total, "sequences": shape.sequences},
        make_inputs=partial(make_batch, device, shape),
        ours=calls,
        peers={TRITON: triton} if takes_triton else {},
        check=check,
        # The bound is the check's own, which raises.
        tolerance=math.inf,
        bytes_moved=shape.bytes_moved,
        flops=4 * shape.heads[2] * shape.pairs,
        copy=shape.new <= 4,
        baseline=TRITON if takes_triton else OURS,
        requirements=targets,
    )


CHOSEN = "from_scores"


def choose(scores: Tensor) -> tuple[Tensor, Tensor]:
    layout = BlockLayout.from_scores(scores, 16, q_block=64, k_block=64, local=4, sink=1)
    return layout.crow, layout.col


def check_chosen(lists: tuple[Tensor, Tensor], scores: Tensor) -> float:
    """The share of blocks that differ from those of a full sort."""
    made = BlockLayout(*lists, 64, 64, scores.shape[2]).to_mask()
    row = torch.arange(scores.shape[1], device=scores.device)[:, None]
    column = torch.arange(scores.shape[2], device=scores.device)
    always = (column <= row) & ((row - column < 4) | (column < 1))
    rest = scores.masked_fill(always | (column > row), -torch.inf)
    kept = rest.sort(dim=2, descending=True, stable=True)
    best = torch.zeros_like(made).scatter_(2, kept.indices[..., :16], kept.values[..., :16] > -torch.inf)
    return float((made != (best | always)).double().mean())


def choosing_case(device: torch.device) -> Case:
    """New lists for 32 heads and 32768 tokens: the time of reading the scores, of which a copy takes twice."""
    shape = (32, 512, 512)
    return Case(
        name="choosing, 32 heads x 32768 tokens",
        shape={"heads": 32, "rows": 512, "columns": 512, "topk": 16},
        make_inputs=partial(torch.randn, *shape, device=device),
        ours={CHOSEN: choose},
        peers={},
        check=check_chosen,
        bytes_moved=4 * math.prod(shape),
        baseline=CHOSEN,
        requirements=(Requirement(CHOSEN, time_at_most=1.5),),
    )


def cases(device: torch.device) -> Iterator[Case]:
    yield choosing_case(device)
    yield case(device, M3, of_triton=1.6)
    yield case(device, replace(M3, share=0.75), of_triton=2.2)
    yield case(device, replace(M3, new=2048, total=131072), of_triton=1.6)
    yield case(device, replace(M3, sequences=8, new=1024, total=16384, share=0.75), of_triton=2.2)
    yield case(device, replace(M3, sequences=1, new=1, total=131072), of_triton=1.0)
    yield case(device, replace(M3, sequences=32, new=1), of_triton=1.0, of_copy=0.85, fp8=True)
    yield case(device, replace(M3, sequences=128, new=1, total=16384), of_triton=1.0, of_copy=0.85, fp8=True)
    yield case(device, replace(M3, sequences=32, new=4, share=0.75), of_triton=1.0)
    yield case(device, QWEN, of_copy=0.5)
