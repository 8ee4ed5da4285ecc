"""Sparse prefill, top 2048 of 65536 keys for each of 4096 tokens, beside FlashMLA.

Where heads are few, the roof is what brings a token's 2.4 MB of keys through L2: a kernel beside does that alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from dense import DTYPE, ERROR_AT_MOST, FLASH_MLA, OURS, Ours, Reference, Theirs

from kernel_reference.bench import Case, Requirement
from kernel_reference.testing.numerics import assert_close_to_oracle
from tilelang_mla import flash_mla_sparse_fwd

# Here, as files beside are found only while this one is loaded; without Triton its rows are absent.
try:
    import gather
except ImportError:
    gather = None  # type: ignore[assignment]

ROWS_ALONE = "listed rows alone"
TOKENS, KEYS, TOPK, LATENT = 4096, 65536, 2048, 512
# Heads, elements of a key, and how many times as fast as FlashMLA.
PROMPTS = ((128, 576, 1.0), (64, 576, 1.0), (32, 576, 1.25), (16, 576, 1.5), (128, 512, 1.0), (64, 512, 1.0))
# Heads up to which rows alone are timed, too.
FEW_HEADS = 32
# Tokens that are looked at.
SAMPLE = (0, 1, 2047, 4095)


class Rows(NamedTuple):
    """Sums of what the rows of a list hold, as words of 32 bits."""

    sums: torch.Tensor


@dataclass(eq=False)
class Prompt:
    """Query tokens, keys, and a list of keys for each token."""

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    scale: float


def make_prompt(device: torch.device, heads: int, width: int) -> Prompt:
    q = torch.randn(TOKENS, heads, width, device=device, dtype=DTYPE)
    kv = torch.randn(KEYS, 1, width, device=device, dtype=DTYPE)
    # A part of the tokens at a time: what is sorted is as large as all lists of all keys.
    lists = [torch.rand(TOKENS // 16, KEYS, device=device).topk(TOPK, dim=1).indices.int() for _ in range(16)]
    return Prompt(q, kv, torch.cat(lists)[:, None].contiguous(), 192**-0.5)


def ours(i: Prompt) -> Ours:
    return Ours(flash_mla_sparse_fwd(i.q, i.kv, i.indices, i.scale).out)


def flash_mla() -> Callable[[Prompt], Theirs]:
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_sparse_fwd as run

    return lambda i: Theirs(run(i.q, i.kv, i.indices, i.scale)[0])


def rows_alone() -> Callable[[Prompt], Rows]:
    if gather is None:
        raise ImportError("what brings rows alone needs Triton")
    sums_of_rows = gather.sums_of_rows
    return lambda i: Rows(sums_of_rows(i.kv, i.indices))


_references: WeakKeyDictionary[Prompt, Reference] = WeakKeyDictionary()


def reference_of(i: Prompt) -> Reference:
    """Some tokens."""
    if i not in _references:
        exact, plain = [], []
        for token in SAMPLE:
            keys = i.kv[i.indices[token, 0].long(), 0]
            scores = i.q[token].double() @ keys.mT.double() * i.scale
            exact.append(scores.softmax(-1) @ keys[:, :LATENT].double())
            weights = torch.exp(scores - scores.amax(-1, keepdim=True)).float()
            out = weights.to(DTYPE).float() @ keys[:, :LATENT].float() / weights.sum(-1, keepdim=True)
            plain.append(out.to(DTYPE))
        _references[i] = Reference(torch.tensor(SAMPLE), torch.stack(exact), torch.stack(plain))
    return _references[i]


def check(outputs: Ours | Theirs | Rows, i: Prompt) -> float:
    if isinstance(outputs, Rows):
        words = i.kv.view(torch.int32).flatten(1)
        for token in SAMPLE:
            if not torch.equal(outputs.sums[token, 0], words[i.indices[token, 0].long()].sum(0, dtype=torch.int32)):
                raise AssertionError(f"sums of the rows of token {token} are wrong")
        return 0.0
    which, exact, plain = reference_of(i)
    got = outputs.out[which.to(outputs.out.device)]
    if isinstance(outputs, Ours):
        assert_close_to_oracle(got, exact, plain)
    error = float(((got.double() - exact).abs().amax(-1) / exact.abs().amax(-1)).max())
    if not error < ERROR_AT_MOST:
        raise AssertionError(f"off by {error:.3g} of a row's largest value")
    return error


def sparse_prefill_cases(device: torch.device) -> Iterator[Case]:
    for heads, width, speed in PROMPTS:
        yield Case(
            name=f"sparse prefill {TOKENS} top {TOPK} of {KEYS} h{heads}" + ("" if width == 576 else ", no rope"),
            shape={"heads": heads, "tokens": TOKENS, "topk": TOPK, "keys": KEYS, "width": width},
            make_inputs=partial(make_prompt, device, heads, width),
            ours={OURS: ours},
            peers={FLASH_MLA: flash_mla} | ({ROWS_ALONE: rows_alone} if heads <= FEW_HEADS else {}),
            check=check,
            tolerance=math.inf,
            bytes_moved=2 * (TOKENS * heads * (width + LATENT) + KEYS * width) + 4 * TOKENS * TOPK,
            flops=2 * TOKENS * TOPK * heads * (width + LATENT),
            copy=False,
            baseline=FLASH_MLA,
            requirements=[Requirement(OURS, FLASH_MLA, speed_at_least=speed)],
        )
