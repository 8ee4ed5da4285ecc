"""Sparse decoding, top 2048 of the pool: over bfloat16 and over records, beside FlashMLA, which takes records alone.

What brings the listed rows to the SMs and does no more stands beside as the roof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from dense import DTYPE, ERROR_AT_MOST, FLASH_MLA, PAGE, SAMPLE, Ours, Reference, Theirs, share

from kernel_reference.bench import Case, Requirement
from kernel_reference.integers import power_of_two_at_most
from kernel_reference.testing.numerics import assert_close_to_oracle
from tilelang_mla import dequantize_kv, flash_mla_with_kvcache, quantize_kv

# Here, as files beside are found only while this one is loaded; without Triton its rows are absent.
try:
    import gather
except ImportError:
    gather = None  # type: ignore[assignment]

WIDE, RECORDS = "bfloat16 cache", "656"
ROWS_ALONE, RECORDS_ALONE = "listed rows alone", "listed records alone"
TOPK, KEYS = 2048, 32768
# Heads, sequences, query tokens. FlashMLA takes 64 and 128 heads.
SPARSE = ((128, 64, 1), (128, 128, 2), (64, 64, 1), (128, 4, 1), (16, 64, 1), (8, 64, 1), (32, 64, 1), (16, 128, 2))
# Of the bytes of bfloat16 beside those of records, 1.76, and a little.
WIDE_AT_MOST = 1.85
# Of a copy of the listed bytes, where heads are few.
OF_COPY = 0.75
# Programs of what brings rows alone, at most, and keys of one, at least.
PROGRAMS, KEYS_OF_PROGRAM = 528, 64


@dataclass(eq=False)
class Lists:
    """A pool in two formats, and a list of its positions for each query token."""

    q: torch.Tensor
    kv: torch.Tensor
    records: torch.Tensor
    indices: torch.Tensor
    scale: float
    held: dict[str, Any] = field(default_factory=dict)


class Rows(NamedTuple):
    """Sums of what the rows of parts of lists hold, as words of 32 bits, and of which cache."""

    sums: torch.Tensor
    records: bool


class OverWide(Ours):
    """Over bfloat16."""

    records = False


class OverRecords(Ours):
    """Over records."""

    records = True


def make_lists(device: torch.device, heads: int, batch: int, tokens: int) -> Lists:
    m = share(heads)
    q = torch.randn(batch, tokens, heads, 576, device=device, dtype=DTYPE)
    # Each sequence's own part of a pool that fills the L2 many times over.
    own = min(KEYS, 2**21 // batch)
    kv = torch.randn(batch * own // PAGE, PAGE, 1, 576, device=device, dtype=DTYPE)
    order = torch.rand(batch * tokens, own, device=device).topk(TOPK, dim=1).indices.int()
    begins = torch.arange(batch, device=device, dtype=torch.int32).repeat_interleave(tokens) * own
    indices = (order + begins[:, None]).view(batch, tokens, TOPK)
    return Lists(q, kv, quantize_kv(kv, "656"), indices, float(m.head_qk**-0.5))


def ours(i: Lists, kind: type[OverWide] | type[OverRecords]) -> OverWide | OverRecords:
    kv = i.records if kind.records else i.kv
    return kind(flash_mla_with_kvcache(i.q, kv, None, None, 512, i.scale, indices=i.indices))


def flash_mla() -> Callable[[Lists], Theirs]:
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_with_kvcache as run
    from vllm.third_party.flashmla.flash_mla_interface import get_mla_metadata

    def call(i: Lists) -> Theirs:
        metadata = i.held.setdefault("flash_mla", get_mla_metadata()[0])
        return Theirs(run(i.q, i.records, None, None, 512, metadata, None, i.scale, False, True, i.indices)[0])

    return call


def rows_alone(records: bool) -> Callable[[Lists], Rows]:
    if gather is None:
        raise ImportError("what brings rows alone needs Triton")
    sums_of_rows = gather.sums_of_rows

    def call(i: Lists) -> Rows:
        lists = i.indices.shape[0] * i.indices.shape[1]
        parts = power_of_two_at_most(max(1, min(PROGRAMS // lists, TOPK // KEYS_OF_PROGRAM)))
        return Rows(sums_of_rows(i.records if records else i.kv, i.indices, parts), records)

    return call


def check_rows(outputs: Rows, i: Lists) -> float:
    words = (i.records if outputs.records else i.kv).view(torch.int32).flatten(0, 2)
    for got, listed in zip(outputs.sums[:SAMPLE], i.indices.flatten(0, 1)[:SAMPLE], strict=True):
        if not torch.equal(got.sum(0, dtype=torch.int32), words[listed.long()].sum(0, dtype=torch.int32)):
            raise AssertionError("sums of listed rows are wrong")
    return 0.0


_references: WeakKeyDictionary[Lists, dict[bool, Reference]] = WeakKeyDictionary()


def reference_of(i: Lists, records: bool) -> Reference:
    """The first lists, over what the cache holds."""
    made = _references.setdefault(i, {})
    if records not in made:
        which = torch.arange(min(SAMPLE, len(i.q)))
        exact, plain = [], []
        for b in which.tolist():
            listed = i.indices[b, 0].long()
            held = (i.records if records else i.kv).flatten(0, 2)[listed]
            # What the cache holds, and as it is dequantised for plain PyTorch.
            keys = dequantize_kv(held, "656", dtype=torch.float64) if records else held.double()
            rounded = keys.to(DTYPE)
            scores, near = (i.q[b, 0].double() @ k.mT.double() * i.scale for k in (keys, rounded))
            exact.append(scores.softmax(-1) @ keys[:, :512])
            weights = torch.exp(near - near.amax(-1, keepdim=True)).float()
            out = weights.to(DTYPE).float() @ rounded[:, :512].float() / weights.sum(-1, keepdim=True)
            plain.append(out.to(DTYPE))
        made[records] = Reference(which, torch.stack(exact), torch.stack(plain))
    return made[records]


def check(outputs: OverWide | OverRecords | Theirs | Rows, i: Lists) -> float:
    if isinstance(outputs, Rows):
        return check_rows(outputs, i)
    mine = isinstance(outputs, OverWide | OverRecords)
    which, exact, plain = reference_of(i, outputs.records if mine else True)
    got = outputs.out[which.to(outputs.out.device), 0]
    if mine:
        assert_close_to_oracle(got, exact, plain)
    error = float(((got.double() - exact).abs().amax(-1) / exact.abs().amax(-1)).max())
    if not error < ERROR_AT_MOST:
        raise AssertionError(f"off by {error:.3g} of a row's largest value")
    return error


def sparse_cases(device: torch.device) -> Iterator[Case]:
    roofs = {RECORDS_ALONE: partial(rows_alone, True), ROWS_ALONE: partial(rows_alone, False)}
    for heads, batch, tokens in SPARSE:
        lists = batch * tokens
        beside = heads in (64, 128)
        requirements = [Requirement(WIDE, RECORDS, time_at_most=WIDE_AT_MOST)]
        if beside:
            requirements.append(Requirement(RECORDS, FLASH_MLA, speed_at_least=1.0))
        elif tokens == 1:
            requirements.append(Requirement(RECORDS, speed_at_least=OF_COPY))
        yield Case(
            name=f"sparse decode B{batch} top {TOPK} h{heads}" + (f", {tokens} query tokens" if tokens > 1 else ""),
            shape={"heads": heads, "sequences": batch, "tokens": tokens, "topk": TOPK},
            make_inputs=partial(make_lists, device, heads, batch, tokens),
            ours={RECORDS: partial(ours, kind=OverRecords), WIDE: partial(ours, kind=OverWide)},
            peers={**({FLASH_MLA: flash_mla} if beside else {}), **roofs},
            check=check,
            tolerance=math.inf,
            bytes_moved=lists * (TOPK * 656 + heads * 2 * (576 + 512)),
            flops=2 * lists * TOPK * heads * (576 + 512),
            copy=not beside,
            baseline=FLASH_MLA if beside else RECORDS,
            requirements=requirements,
        )
