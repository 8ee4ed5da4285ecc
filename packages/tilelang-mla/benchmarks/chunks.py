"""Chunked prefill, new tokens behind older ones: for cases and for the map; and prompts of unlike lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from dense import DTYPE, ERROR_AT_MOST, FA3, OURS, prefill_case, ragged, share

from kernel_reference.attention import attention
from kernel_reference.bench import Case, Requirement
from kernel_reference.paging import cumulative
from tilelang_mla import flash_mla_varlen_func

# Heads, new tokens, older ones, sequences.
CHUNKS = ((128, 512, 60000, 1), (16, 1024, 16384, 4), (16, 4096, 131072, 1), (64, 2048, 8192, 2))
# Heads, and prompts of 1 to 8192 tokens.
RAGGED = ((16, 16), (128, 4))
# Of FA3's speed.
SPEED = 0.97


@dataclass(eq=False)
class Chunks:
    """New tokens behind older ones, with separate heads."""

    new: int
    older: int
    scale: float
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor


def make_chunks(device: torch.device, heads: int, new: int, older: int, sequences: int) -> Chunks:
    m = share(heads)
    sizes = ((new, m.head_qk), (new + older, m.head_qk), (new + older, m.head_v))
    q, k, v = (torch.randn(sequences * n, m.num_heads, size, device=device, dtype=DTYPE) for n, size in sizes)
    bounds = [cumulative(torch.tensor([n] * sequences)).to(device) for n in (new, new + older)]
    return Chunks(new, older, float(m.head_qk**-0.5), q, k, v, *bounds)


def ours_chunks(i: Chunks) -> torch.Tensor:
    bounds = (i.cu_seqlens_q, i.cu_seqlens_k, i.new, i.new + i.older)
    return flash_mla_varlen_func(i.q, i.k, i.v, *bounds, i.scale, True)


def fa3_chunks() -> Callable[[Chunks], torch.Tensor]:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    def call(i: Chunks) -> torch.Tensor:
        bounds = (i.new, i.cu_seqlens_q, i.new + i.older, i.cu_seqlens_k)
        out: torch.Tensor = flash_attn_varlen_func(
            i.q, i.k, i.v, *bounds, softmax_scale=i.scale, causal=True, fa_version=3
        )
        return out

    return call


_kept: WeakKeyDictionary[Chunks, torch.Tensor] = WeakKeyDictionary()


def check_chunks(out: torch.Tensor, i: Chunks) -> float:
    """The largest error of the last sequence's sampled rows, over a row's largest value."""
    rows = torch.tensor(sorted({0, i.new // 3, i.new - 1}), device=i.q.device)
    if i not in _kept:
        q, k, v = i.q[-i.new :], i.k[-i.new - i.older :], i.v[-i.new - i.older :]
        bounds = {"cu_seqlens_q": torch.tensor([0, len(q)]), "cu_seqlens_k": torch.tensor([0, len(k)])}
        _kept[i] = attention(q, k, v, **bounds, softmax_scale=i.scale, causal=True, rows=rows).out
    exact = _kept[i]
    error = float(((out[-i.new :][rows].double() - exact).abs().amax(-1) / exact.abs().amax(-1)).max())
    if not error <= ERROR_AT_MOST:
        raise AssertionError(f"error {error:.2g} of a row's largest value > {ERROR_AT_MOST:g}")
    return error


def chunk_cases(device: torch.device) -> Iterator[Case]:
    for heads, new, older, sequences in CHUNKS:
        m, rows = share(heads), sequences * new
        pairs = int(sequences * new * (older + (new + 1) / 2))
        yield Case(
            name=f"prefill {sequences} x {new} behind {older} h{heads}",
            shape={"heads": heads, "new": new, "older": older, "sequences": sequences},
            make_inputs=partial(make_chunks, device, heads, new, older, sequences),
            ours={OURS: ours_chunks},
            peers={FA3: fa3_chunks},
            check=check_chunks,
            tolerance=float("inf"),
            bytes_moved=(2 * rows + sequences * older) * m.num_heads * (m.head_qk + m.head_v) * DTYPE.itemsize,
            flops=2 * pairs * m.num_heads * (m.head_qk + m.head_v),
            copy=False,
            baseline=FA3,
            requirements=(Requirement(OURS, FA3, speed_at_least=SPEED),),
        )
    for heads, sequences in RAGGED:
        yield prefill_case(device, ragged(heads, sequences), SPEED)
