"""Decoding over caches of 8 bits, beside the same tokens in bfloat16 and vLLM's dense kernel with 8-bit queries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from dense import DTYPE, PAGE, SAMPLE, Batch, Ours, Reference, Shape, Theirs, make_batch, plain_attention, share

from kernel_reference.attention import attention
from kernel_reference.bench import Case, Requirement
from kernel_reference.testing.numerics import assert_close_to_oracle
from tilelang_mla import dequantize_kv, flash_mla_with_kvcache, quantize_kv

WIDE, ONE_SCALE, RECORDS, VLLM_FP8 = "bfloat16 cache", "e4m3", "656", "vLLM FlashMLA fp8"
KV_SCALE = 0.02
# Heads, sequences, keys of each, and the most time beside the bfloat16 cache.
CACHES = (
    (16, 128, 8192, 0.65),
    (16, 32, 8192, 0.65),
    (64, 64, 16384, 1.33),
    (128, 128, 4096, 1.33),
    (128, 64, 8192, 1.33),
)
# Of a query in 8 bits.
ERROR_OF_PEERS = 0.2


@dataclass(eq=False)
class Cached:
    """The same tokens in three formats; ``batch.kv`` holds them in bfloat16."""

    batch: Batch
    e4m3: torch.Tensor
    records: torch.Tensor
    kv_scale: torch.Tensor


class OfFormat(Ours):
    """An output over one of the caches."""

    format = WIDE


class OfE4m3(OfFormat):
    format = ONE_SCALE


class OfRecords(OfFormat):
    format = RECORDS


def make_cached(device: torch.device, shape: Shape, page: int = PAGE) -> Cached:
    batch = make_batch(device, shape, page)
    scale = torch.tensor([KV_SCALE], device=device)
    return Cached(batch, quantize_kv(batch.kv, "e4m3", scale), quantize_kv(batch.kv, "656"), scale)


def attend(i: Cached, kind: type[OfFormat]) -> OfFormat:
    b = i.batch
    kv = {WIDE: b.kv, ONE_SCALE: i.e4m3, RECORDS: i.records}[kind.format]
    scale = i.kv_scale if kind.format == ONE_SCALE else None
    given = (b.q, kv, b.seqlens_k, b.block_table, b.shape.model.latent, b.shape.scale, True)
    return kind(flash_mla_with_kvcache(*given, kv_scale=scale, plan=b.plan))


def vllm_fp8() -> Callable[[Cached], Theirs]:
    from vllm.v1.attention.ops.flashmla import (
        flash_mla_with_kvcache_fp8,
        get_mla_metadata_dense_fp8,
    )

    def call(i: Cached) -> Theirs:
        b = i.batch
        if "fp8" not in b.held:
            metadata = get_mla_metadata_dense_fp8(b.seqlens_k, b.shape.tokens * b.shape.model.num_heads, 1)
            b.held["fp8"] = (*metadata, b.q.to(torch.float8_e4m3fn), torch.ones(1, device=b.q.device))
        metadata, splits, q, one = b.held["fp8"]
        given = (q, i.e4m3, b.block_table, b.seqlens_k, b.shape.model.latent, metadata, splits, b.shape.scale, True)
        return Theirs(flash_mla_with_kvcache_fp8(*given, one, i.kv_scale)[0])

    return call


_references: WeakKeyDictionary[Cached, dict[str, Reference]] = WeakKeyDictionary()


def reference_of(i: Cached, format: str) -> Reference:
    """Sampled sequences over what the cache of a format holds."""
    made = _references.setdefault(i, {})
    if format not in made:
        b = i.batch
        which = torch.arange(min(SAMPLE, len(b.shape.lengths)))
        exact, plain = [], []
        for sequence in which.tolist():
            n, latent = b.shape.lengths[sequence], b.shape.model.latent
            pages = b.block_table[sequence, : -(-n // b.page)].long()
            held = {
                WIDE: lambda p: b.kv[p],
                ONE_SCALE: lambda p: dequantize_kv(i.e4m3[p], "e4m3", i.kv_scale, torch.float64),
                RECORDS: lambda p: dequantize_kv(i.records[p], "656", dtype=torch.float64),
            }[format](pages)
            keys = held.flatten(0, 1)[:n]
            given = {"softmax_scale": b.shape.scale, "causal": True}
            exact.append(attention(b.q[sequence].double(), keys.double(), keys[..., :latent].double(), **given).out)
            wide = keys.to(DTYPE)
            plain.append(plain_attention(b.q[sequence], wide, wide[..., :latent], b.shape.scale))
        made[format] = Reference(which, torch.stack(exact), torch.stack(plain))
    return made[format]


def check(outputs: OfFormat | Theirs, i: Cached) -> float:
    ours = isinstance(outputs, OfFormat)
    which, exact, plain = reference_of(i, outputs.format if ours else ONE_SCALE)
    got = outputs.out[which.to(outputs.out.device)]
    if ours:
        assert_close_to_oracle(got, exact, plain)
    error = float(((got.double() - exact).abs().amax(-1) / exact.abs().amax(-1)).max())
    if not error < ERROR_OF_PEERS:
        raise AssertionError(f"off by {error:.3g} of a row's largest value")
    return error


def cache_cases(device: torch.device) -> Iterator[Case]:
    kinds = {WIDE: OfFormat, ONE_SCALE: OfE4m3, RECORDS: OfRecords}
    for heads, sequences, keys, most in CACHES:
        shape = Shape(share(heads), (keys,) * sequences)
        yield Case(
            name=f"cache of 8 bits {shape.words}",
            shape=shape.entry,
            make_inputs=partial(make_cached, device, shape),
            ours={name: partial(attend, kind=kind) for name, kind in kinds.items()},
            peers={VLLM_FP8: vllm_fp8},
            check=check,
            tolerance=math.inf,
            bytes_moved=shape.bytes_moved,
            flops=shape.flops,
            copy=False,
            baseline=WIDE,
            requirements=[Requirement(name, WIDE, time_at_most=most) for name in (ONE_SCALE, RECORDS)],
        )
