"""MiniMax-M3's selected attention in a server's day: ``python -m kernel_reference.bench.serve``.

A token's lists are drawn at random, and hold its own block, as a model's would; they are made outside of what is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import peers
import torch

from blocksparse_attn import selected_attention
from kernel_reference.bench.serve import Batch, Call, Setting, noise, present, rows_of
from kernel_reference.selection import selected_attention as oracle

# Query heads, kv heads, elements; keys of a block, which is a page too; blocks that a token and kv head list.
HEADS, BLOCK, TOPK = (64, 4, 128), 128, 16
TINY_HEADS, TINY_TOPK = (4, 2, 16), 3
PAGE_SIZE = BLOCK
# Of a row's largest value: two roundings to bfloat16, of the weights and of the result, and their sums.
ALLOWED = 0.02
OURS, TRITON = "blocksparse-attn", "vLLM MiniMax-M3"


class Selected:
    """The layer over one pool of pages [pages, Hkv, page, 2 D], keys and values side by side as vLLM has them."""

    def __init__(self, setting: Setting) -> None:
        self.name = OURS
        (q_heads, self.kv_heads, self.size), self.topk = (
            (TINY_HEADS, TINY_TOPK) if setting.dry else (HEADS, TOPK)
        )  # fmt: skip
        tokens, device, self.limits = setting.limits.tokens, setting.device, setting.limits
        pages = (setting.limits.pages, self.kv_heads, setting.limits.page_size, 2 * self.size)
        self.kv = torch.zeros(pages, device=device, dtype=torch.bfloat16)
        self._q, self._new = (
            noise(device, tokens, q_heads, self.size),
            noise(device, tokens, self.kv_heads, 2 * self.size),
        )
        self.q = torch.zeros_like(self._q[:tokens])
        self.indices = torch.full((tokens, self.kv_heads, self.topk), -1, device=device, dtype=torch.int32)
        self.by_head = torch.full((self.kv_heads, tokens, self.topk), -1, device=device, dtype=torch.int32)
        found, self.absent = present(setting, {TRITON: self._triton})
        self.calls: dict[str, Call] = {OURS: self._ours, **found}

    def fill(self, batch: Batch) -> None:
        tokens, written = batch.padded_tokens, sum(row.new for row in batch.rows)
        self.q[:tokens].copy_(rows_of(self._q, batch.number, tokens))
        # Which page, and where in it: heads lie between the two.
        places = batch.places[:written]
        page, offset = places // self.limits.page_size, places % self.limits.page_size
        self.kv[page, :, offset] = rows_of(self._new, batch.number, written)
        self.indices[:tokens] = -1
        positions = [torch.arange(row.cached, row.cached + row.new) for row in batch.rows]
        if positions:
            self._list(torch.cat(positions).to(self.q.device) // self.limits.page_size)
        self.by_head[:, :tokens] = self.indices[:tokens].transpose(0, 1)

    def _list(self, own: torch.Tensor) -> None:
        """Random blocks before each token's own, and that one, in order; -1 where there are no more."""
        blocks = torch.arange(max(self.topk, int(own.max()) + 1), device=own.device)
        for first in range(0, len(own), 1024):
            mine = own[first : first + 1024, None, None]
            scores = torch.rand(len(mine), self.kv_heads, len(blocks), device=own.device)
            scores = scores.masked_fill(blocks > mine, -1.0).masked_fill(blocks == mine, 2.0)
            best = scores.topk(self.topk, dim=2)
            listed = torch.where(best.values < 0, len(blocks), best.indices).sort(dim=2).values
            self.indices[first : first + len(mine)] = torch.where(listed == len(blocks), -1, listed).int()

    def _caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv[..., : self.size], self.kv[..., self.size :]

    def _ours(self, batch: Batch) -> torch.Tensor:
        return selected_attention(
            self.q[: batch.padded_tokens], *self._caches(), self.indices[: batch.padded_tokens],
            block_size=self.limits.page_size, block_table=batch.block_table, cu_seqlens_q=batch.cu_seqlens_q,
            seqlens_k=batch.seqlens_k, page_layout="HND",
        )  # fmt: skip

    def _triton(self) -> Call:
        prefill, decode = peers.minimax()

        def call(batch: Batch) -> torch.Tensor:
            q, lists = self.q[: batch.padded_tokens], self.by_head[:, : batch.padded_tokens]
            out, scale = torch.empty_like(q), self.size**-0.5
            if batch.each:
                given = (q, self.kv, lists, batch.block_table, batch.seqlens_k)
                decode(*given, self.kv_heads, scale, out, batch.each)
            else:
                where = (batch.block_table, batch.cu_seqlens_q, batch.seqlens_k, batch.cached, batch.max_seqlen_q)
                prefill(q, self.kv, lists, *where, self.kv_heads, scale, out)
            return out

        return call

    def judge(self, label: str, batch: Batch, rows: Sequence[int]) -> Callable[[torch.Tensor], float]:
        """The last new token of each row."""
        last = torch.tensor([batch.range_of(row).stop - 1 for row in rows], device=self.q.device)
        count = len(batch.rows)
        wanted = oracle(
            self.q[: batch.range_of(count - 1).stop], *self._caches(), self.indices[: batch.range_of(count - 1).stop],
            block_size=self.limits.page_size, block_table=batch.block_table[:count],
            cu_seqlens_q=batch.cu_seqlens_q[: count + 1], seqlens_k=batch.seqlens_k[:count], page_layout="HND",
            rows=last,
        ).out.double()  # fmt: skip

        def error(out: torch.Tensor) -> float:
            largest = wanted.abs().amax(-1).clamp(min=1e-30)
            return float(((out[last].double() - wanted).abs().amax(-1) / largest).max()) / ALLOWED

        return error


def layers(setting: Setting) -> list[Selected]:
    """One layer."""
    return [Selected(setting)]
