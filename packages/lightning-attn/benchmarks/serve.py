"""A MiniMax-01 linear-attention layer in a server's day: ``python -m kernel_reference.bench.serve``.

Beside it stand vLLM's kernel where all rows decode and fla's elsewhere, as a server on today's kernels would run it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import peers
import torch

from kernel_reference.bench.serve import Batch, Call, Setting, noise, present, rows_of
from kernel_reference.models import MINIMAX_01, LinearAttention
from kernel_reference.recurrence import linear_attention_chunked
from lightning_attn import lightning_attention_varlen, lightning_commit, lightning_decode, lightning_verify, slopes

TINY = LinearAttention("tiny", 4, 16, 16)
# Of a head's largest value: bfloat16's rounding of inputs' products and of the result.
ALLOWED = 0.02
OURS, PEERS = "lightning-attn", "vLLM and fla"


class Linear:
    """The layer over a pool of states; of a shared prefix there is a snapshot, as caches of prefixes keep them."""

    def __init__(self, setting: Setting) -> None:
        self.name = "lightning-attn"
        m = TINY if setting.dry else MINIMAX_01
        tokens, device, sequences = setting.limits.tokens, setting.device, setting.limits.sequences
        self.slopes = slopes(m.num_heads).to(device)
        self.drafts = setting.traffic.drafts
        self._source = [noise(device, tokens, m.num_heads, size) for size in (m.head_qk, m.head_qk, m.head_v)]
        self.q, self.k, self.v = (torch.zeros_like(source[:tokens]) for source in self._source)
        state = (m.num_heads, m.head_qk, m.head_v)
        self.snapshots = torch.randn(max(1, setting.traffic.prefixes), *state, device=device)
        found, self.absent = present(setting, {} if self.drafts else {PEERS: self._theirs})
        self.calls: dict[str, Call] = {OURS: self._ours, **found}
        # Each writes its own.
        self.pools = {label: torch.zeros(sequences, *state, device=device) for label in self.calls}
        self.begun = torch.zeros(sequences, dtype=torch.bool, device=device)

    def fill(self, batch: Batch) -> None:
        tokens = batch.padded_tokens
        for given, source in zip((self.q, self.k, self.v), self._source, strict=True):
            given[:tokens].copy_(rows_of(source, batch.number, tokens))
        self.begun[: batch.padded_rows] = batch.cached > 0
        for row in batch.rows:
            if row.begins and row.prefix is not None:
                for pool in self.pools.values():
                    pool[row.slot].copy_(self.snapshots[row.prefix])

    def _ours(self, batch: Batch) -> torch.Tensor:
        pool, tokens, rows = self.pools[OURS], batch.padded_tokens, batch.padded_rows
        q, k, v = self.q[:tokens], self.k[:tokens], self.v[:tokens]
        if not batch.each:
            return lightning_attention_varlen(
                q, k, v, self.slopes, batch.cu_seqlens_q, state_pool=pool, slots=batch.slots,
                has_initial_state=self.begun[:rows],
            )  # fmt: skip
        if batch.each == 1:
            return lightning_decode(q, k, v, pool, batch.slots, self.slopes)
        q, k, v = (x.unflatten(0, (rows, batch.each)) for x in (q, k, v))
        out = lightning_verify(q, k, v, pool, batch.slots, self.slopes)
        lightning_commit(k, v, pool, batch.slots, self.slopes, batch.kept)
        return out.flatten(0, 1)

    def _theirs(self) -> Call:
        # With all of fla's configurations half a minute is spent on choosing.
        decode, prefill = peers.vllm_decode(), peers.fla("few")

        def call(batch: Batch) -> torch.Tensor:
            pool, tokens = self.pools[PEERS], batch.padded_tokens
            q, k, v = self.q[:tokens], self.k[:tokens], self.v[:tokens]
            if batch.each:
                return decode(q[:, :, None], k[:, :, None], v[:, :, None], pool, self.slopes, batch.slots)
            slots = batch.slots.long()
            before = pool[slots] * self.begun[: len(slots), None, None, None]
            options = {"cu_seqlens": batch.cu_seqlens_q.long(), "initial_state": before, "output_final_state": True}
            out, state = prefill(q[None], k[None], v[None], -self.slopes, **options)
            pool[slots] = state
            return out[0]

        return call

    def judge(self, label: str, batch: Batch, rows: Sequence[int]) -> Callable[[torch.Tensor], float]:
        """All new tokens of the rows."""
        wanted = []
        for row in rows:
            r = batch.rows[row]
            at = batch.range_of(row)
            state = self.pools[label][r.slot].double() * bool(r.cached)
            given = (self.q[at], self.k[at], self.v[at], self.slopes)
            wanted.append((at, linear_attention_chunked(*given, initial_state=state[None]).out))

        def error(out: torch.Tensor) -> float:
            out = out.view(len(out), *self.v.shape[1:])
            return (
                max(
                    float(((out[at].double() - one).abs().amax((0, 2)) / one.abs().amax((0, 2)).clamp(min=1e-30)).max())
                    for at, one in wanted
                )
                / ALLOWED
            )

        return error


def layers(setting: Setting) -> list[Linear]:
    """One layer."""
    return [Linear(setting)]
