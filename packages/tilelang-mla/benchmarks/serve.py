"""DeepSeek-V3's attention on one of eight GPUs in a server's day: ``python -m kernel_reference.bench.serve``.

What decodes is timed, in every step: a server calls other kernels for prompts. Schedules are made within each call, as
lengths change from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernel_reference.attention import mla_decode
from kernel_reference.bench.serve import Batch, Call, Setting, noise, present, rows_of
from kernel_reference.models import DEEPSEEK_V3
from tilelang_mla import flash_mla_with_kvcache

# FlashMLA takes no other.
PAGE_SIZE = 64
# Of a row's largest value: two roundings to bfloat16, of the weights and of the result, and their sums.
ALLOWED = 0.02
OURS, FLASH_MLA = "tilelang-mla", "FlashMLA"


class Latent:
    """The layer over one pool of pages, which holds the new tokens too."""

    def __init__(self, setting: Setting) -> None:
        self.name = "tilelang-mla"
        m, device, limits = DEEPSEEK_V3, setting.device, setting.limits
        heads = 2 if setting.dry else m.num_heads // 8
        self.latent, self.dim, self.scale = m.latent, m.latent + m.rope, m.head_qk**-0.5
        self.each = 1 + setting.traffic.drafts
        self.kv = torch.zeros(limits.pages, limits.page_size, 1, self.dim, device=device, dtype=torch.bfloat16)
        self._new = noise(device, limits.tokens, 1, self.dim)
        self._q = noise(device, limits.sequences * self.each, heads, self.dim)
        self.q = torch.zeros_like(self._q[: limits.sequences * self.each])
        found, self.absent = present(setting, {FLASH_MLA: self._flash_mla})
        self.calls: dict[str, Call] = {OURS: self._ours, **found}

    def fill(self, batch: Batch) -> None:
        rows = batch.decoding * self.each if not batch.each else batch.padded_tokens
        self.q[:rows].copy_(rows_of(self._q, batch.number, rows))
        written = sum(row.new for row in batch.rows)
        self.kv.flatten(0, 1)[batch.places[:written]] = rows_of(self._new, batch.number, written)

    def _given(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [rows, tokens, heads, dim], seqlens_k and block_table of the rows that decode."""
        rows = batch.padded_rows if batch.each else batch.decoding
        q = self.q[: rows * self.each].unflatten(0, (rows, self.each))
        return q, batch.seqlens_k[:rows], batch.block_table[:rows]

    def _ours(self, batch: Batch) -> torch.Tensor:
        q, seqlens_k, block_table = self._given(batch)
        return flash_mla_with_kvcache(q, self.kv, seqlens_k, block_table, self.latent, self.scale)

    def _flash_mla(self) -> Call:
        from vllm.third_party.flashmla.flash_mla_interface import flash_mla_with_kvcache as run
        from vllm.third_party.flashmla.flash_mla_interface import get_mla_metadata

        def call(batch: Batch) -> torch.Tensor:
            q, seqlens_k, block_table = self._given(batch)
            if not len(q):
                return q
            metadata: Any = get_mla_metadata()[0]
            out: torch.Tensor = run(
                q, self.kv, block_table, seqlens_k, self.latent, metadata, None, self.scale, True
            )[0]  # fmt: skip
            return out

        return call

    def judge(self, label: str, batch: Batch, rows: Sequence[int]) -> Callable[[torch.Tensor], float | None]:
        """The rows that decode."""
        at = torch.tensor([row for row in rows if row < batch.decoding], device=self.q.device, dtype=torch.long)
        q, seqlens_k, block_table = self._given(batch)
        given = (q[at], self.kv, seqlens_k[at], block_table[at], self.latent)
        wanted = mla_decode(*given, softmax_scale=self.scale).out.double()

        def error(out: torch.Tensor) -> float | None:
            if not len(at):
                return None
            largest = wanted.abs().amax(-1).clamp(min=1e-30)
            return float(((out[at].double() - wanted).abs().amax(-1) / largest).max()) / ALLOWED

        return error


def layers(setting: Setting) -> list[Latent]:
    """One layer."""
    return [Latent(setting)]
