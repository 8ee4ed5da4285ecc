"""Qwen3-Next's Gated DeltaNet in a server's day: ``python -m kernel_reference.bench.serve``.

What decodes is timed, in every step: prompts are other kernels' part. Beside it stands the chain of `steps.chain`: our
split and convolution, gates and norm in torch, fla's recurrence over states that are gathered and put back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from steps import EPS, WIDTH, Setup, Stepped, chain, fla_rule

from gdn_split import gdn_commit, gdn_decode_step, gdn_verify
from gdn_split.plan import GroupShape
from kernel_reference import gated_delta
from kernel_reference.bench.serve import Batch, Call, Setting, noise, present, rows_of
from kernel_reference.models import QWEN3_NEXT_80B as MODEL

OURS, CHAIN = "gdn-split", "chain with fla"
TINY = GroupShape(2, 4, 16, 16)
# Of a row's largest value: roundings to bfloat16 of what is convolved, and of the result.
ALLOWED = 0.03


class Delta:
    """The layer over a pool of states and one of the convolution's last inputs."""

    def __init__(self, setting: Setting) -> None:
        self.name = "gdn-split"
        real = GroupShape(MODEL.num_heads_qk, MODEL.num_heads_v, MODEL.head_qk, MODEL.head_v)
        s = self.shape = TINY if setting.dry else real
        self.sizes = (s.num_heads_qk, s.num_heads_v, s.head_qk, s.head_v)
        self.each, device = 1 + setting.traffic.drafts, setting.device
        rows, sequences = setting.limits.sequences * self.each, setting.limits.sequences
        self._source = [noise(device, rows, width) for width in (s.qkvz_width, s.ba_width)]
        self.qkvz, self.ba = (torch.zeros_like(source[:rows]) for source in self._source)
        self.weight = torch.randn(s.qkv_width, WIDTH, device=device).bfloat16() / 2
        self.a_log, self.dt_bias = (torch.randn(s.num_heads_v, device=device) for _ in range(2))
        self.norm = torch.randn(s.head_v, device=device).bfloat16()
        found, self.absent = present(setting, {} if self.each > 1 else {CHAIN: self._chain})
        self.calls: dict[str, Call] = {OURS: self._ours, **found}
        # Each writes its own. One state more is where the chain puts those of padding.
        state = (sequences + 1, s.num_heads_v, s.head_qk, s.head_v)
        self.pools = {label: torch.zeros(state, device=device) for label in self.calls}
        conv = (sequences + 1, WIDTH - 1, s.qkv_width)
        self.convs = {
            label: torch.zeros(conv, device=device, dtype=torch.bfloat16).transpose(1, 2) for label in self.calls
        }

    def fill(self, batch: Batch) -> None:
        rows = self._rows(batch) * self.each
        for given, source in zip((self.qkvz, self.ba), self._source, strict=True):
            given[:rows].copy_(rows_of(source, batch.number, rows))

    def _rows(self, batch: Batch) -> int:
        return batch.padded_rows if batch.each else batch.decoding

    def _ours(self, batch: Batch) -> torch.Tensor:
        rows = self._rows(batch)
        new = (self.qkvz[: rows * self.each], self.ba[: rows * self.each])
        layer = (self.convs[OURS], self.weight, None, self.pools[OURS], batch.slots[:rows], self.a_log, self.dt_bias)
        if self.each == 1:
            return gdn_decode_step(*new, *layer, *self.sizes, norm_weight=self.norm)
        out = gdn_verify(*new, *layer, *self.sizes, norm_weight=self.norm, tokens_per_sequence=self.each)
        gdn_commit(*new, *layer, batch.kept[:rows], *self.sizes, tokens_per_sequence=self.each)
        return out

    def _chain(self) -> Call:
        rule = fla_rule()

        def call(batch: Batch) -> torch.Tensor:
            rows = self._rows(batch)
            if not rows:
                return self.qkvz[:0]
            slots = batch.slots[:rows]
            places = torch.where(slots < 0, len(self.pools[CHAIN]) - 1, slots).long()
            given = Stepped(
                self.qkvz[:rows], self.ba[:rows], self.convs[CHAIN], self.weight, self.pools[CHAIN][places], slots,
                self.a_log, self.dt_bias, self.norm,
            )  # fmt: skip
            out, _, states = chain(given, Setup(rows, self.shape), rule)
            self.pools[CHAIN][places] = states
            return out

        return call

    def judge(self, label: str, batch: Batch, rows: Sequence[int]) -> Callable[[torch.Tensor], float | None]:
        """The rows that decode."""
        at = torch.tensor([row for row in rows if row < batch.decoding], device=self.qkvz.device, dtype=torch.long)
        slots = batch.slots[at].long()
        tokens = (at[:, None] * self.each + torch.arange(self.each, device=at.device)).flatten()
        wanted = gated_delta.decode_step(
            self.qkvz[tokens], self.ba[tokens], self.convs[label][slots].double(), self.pools[label][slots].double(),
            torch.arange(len(at), device=at.device), gated_delta.Sizes(*self.sizes),
            gated_delta.Layer(self.weight, None, self.a_log, self.dt_bias), gated_delta.Options(self.norm, EPS),
            self.each,
        )  # fmt: skip

        def error(out: torch.Tensor) -> float | None:
            if not len(at):
                return None
            largest = wanted.abs().amax((1, 2)).clamp(min=1e-30)
            off = (out.view(-1, *wanted.shape[1:])[tokens].double() - wanted).abs().amax((1, 2))
            return float((off / largest).max()) / ALLOWED

        return error


def layers(setting: Setting) -> list[Delta]:
    """One layer."""
    return [Delta(setting)]
