"""An attention layer of Llama-3-8B in a server's day, beside FA3: ``python -m kernel_reference.bench.serve``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import peers
import torch
from peers import FA3, Paged

from kernel_reference.attention import attention
from kernel_reference.bench.serve import Batch, Call, Setting, noise, present, rows_of
from kernel_reference.models import SoftmaxAttention
from kernel_reference.paging import cumulative, gather
from prefix_prefill import prefix_prefill

LLAMA_3_8B = SoftmaxAttention("Llama-3-8B", 32, 8, 128)
TINY = SoftmaxAttention("tiny", 4, 2, 16)
# Of a row's largest value: two roundings to bfloat16, of the weights and of the result, and their sums.
ALLOWED = 0.02


class Attention:
    """The layer over one pool of pages, which holds the new tokens too."""

    def __init__(self, setting: Setting) -> None:
        self.name = "prefix-prefill"
        self.limits, self.traffic = setting.limits, setting.traffic
        m = self.model = TINY if setting.dry else LLAMA_3_8B
        tokens, device = setting.limits.tokens, setting.device
        shape = (setting.limits.pages, setting.limits.page_size, m.num_heads_kv, m.head_dim)
        self.k_cache, self.v_cache = (torch.zeros(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        self._q, self._k, self._v = (
            noise(device, tokens, heads, m.head_dim) for heads in (m.num_heads_q, m.num_heads_kv, m.num_heads_kv)
        )
        # Where graphs find what a step's projections leave.
        self.q = torch.zeros_like(self._q[:tokens])
        found, self.absent = present(setting, {FA3: self._fa3})
        self.calls: dict[str, Call] = {"prefix-prefill": self._ours, **found}

    def fill(self, batch: Batch) -> None:
        tokens = batch.padded_tokens
        self.q[:tokens].copy_(rows_of(self._q, batch.number, tokens))
        for cache, source in ((self.k_cache, self._k), (self.v_cache, self._v)):
            written = sum(row.new for row in batch.rows)
            cache.flatten(0, 1)[batch.places[:written]] = rows_of(source, batch.number, written)

    def _ours(self, batch: Batch) -> torch.Tensor:
        return prefix_prefill(
            self.q[: batch.padded_tokens], None, None, self.k_cache, self.v_cache, batch.block_table,
            batch.cu_seqlens_q, batch.seqlens_k, max_seqlen_q=batch.max_seqlen_q,
        )  # fmt: skip

    def _fa3(self) -> Call:
        run = peers.fa3()

        def call(batch: Batch) -> torch.Tensor:
            # A server's graph does not know how long its sequences will be.
            longest = self.limits.longest if batch.each else max(row.cached + row.new for row in batch.rows)
            return run(
                Paged(
                    self.q[: batch.padded_tokens], self.k_cache, self.v_cache, batch.block_table, batch.cu_seqlens_q,
                    batch.seqlens_k, batch.max_seqlen_q, longest, self.model.head_dim**-0.5, None,
                )
            )  # fmt: skip

        return call

    def judge(self, label: str, batch: Batch, rows: Sequence[int]) -> Callable[[torch.Tensor], float]:
        """The last new token of each row."""
        at = torch.tensor(rows, device=self.q.device)
        last = torch.tensor([batch.range_of(row).stop - 1 for row in rows], device=self.q.device)
        packed = [gather(c, batch.block_table[at], batch.seqlens_k[at]) for c in (self.k_cache, self.v_cache)]
        one = cumulative(torch.ones_like(batch.seqlens_k[at]))
        wanted = attention(
            self.q[last], packed[0].tokens, packed[1].tokens,
            cu_seqlens_q=one, cu_seqlens_k=packed[0].cu_seqlens, causal=True,
        ).out.double()  # fmt: skip

        def error(out: torch.Tensor) -> float:
            largest = wanted.abs().amax(-1).clamp(min=1e-30)
            return float(((out[last].double() - wanted).abs().amax(-1) / largest).max()) / ALLOWED

        return error


def layers(setting: Setting) -> list[Attention]:
    """One layer."""
    return [Attention(setting)]
