"""What an engine's calls look like beside the benchmark's shapes, and each one's targets beside FA3.

``python -m kernel_reference.bench.run packages/prefix-prefill/benchmarks/cliffs.py --out DIR`` measures them all; names
begin with what was slow: ``--only '^page'``. Results are held to what map.py holds its own to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import peers
import torch
from cases import Shape, mixed_case, places
from map import OURS, WIDE, Given, Options, check, given, point_case
from peers import FA3, UNIFIED

from kernel_reference.bench import Case, Requirement
from kernel_reference.models import SoftmaxAttention
from prefix_prefill import prefix_prefill

LLAMA = {"heads": "32/8", "head size": 128, "page": 16, "window": 0, "soft cap": 0, "sinks": "no", "table": "wide"}
as_fa3 = Requirement(OURS, FA3, speed_at_least=0.95)
near_fa3 = Requirement(OURS, FA3, speed_at_least=0.85)
past_unified = Requirement(OURS, UNIFIED, speed_at_least=1.5)
# A prompt's chunk, some drafts, and rows that decode: (sequences, new, older).
CHUNK, DRAFTS, DECODE = (4, 512, 16384), (16, 4, 8000), (64, 1, 8000)
KINDS = {"chunks": CHUNK, "decode": DECODE}


def case(device: torch.device, row: str, sizes: tuple[int, int, int], *targets: Requirement, **changed: object) -> Case:
    """``sizes``: sequences, new and older tokens. ``changed``: of ``LLAMA``, with _ for a space."""
    sequences, new, older = sizes
    given_by = {name.replace("_", " "): value for name, value in changed.items()}
    point = {**LLAMA, **given_by, "sequences": sequences, "new": new, "context": older}
    words = ", ".join(f"{name} {value}" for name, value in given_by.items()) or "plain"
    name = f"{row}: {words}; {sequences} of {new} behind {older}"
    found = point_case(device, point)
    first = next(iter(found.peers))
    own = {first: found.peers[first]}
    return replace(found, name=name, shape=point, requirements=targets, baseline=first, peers=own)


def mixed(device: torch.device) -> Case:
    """A chunk among 100 sequences that decode, each behind 8192 tokens or more."""
    lengths = ((30720, 2048), *[(8192, 1)] * 100)
    shape = Shape(SoftmaxAttention("Llama-3-8B", 32, 8, 128), lengths, name="mixed: 2048 behind 30720 and 100 decodes,")
    return mixed_case(device, shape)


def ragged(device: torch.device, name: str, lengths: tuple[tuple[int, int], ...]) -> Case:
    shape = Shape(SoftmaxAttention("32/8", 32, 8, 128), lengths)
    found = point_case(device, {**LLAMA, "sequences": 1, "new": 1, "context": 20}).without(UNIFIED)
    make = partial(given, device, shape, Options(0.0, False, WIDE // 16))
    moved, flops = shape.bytes_moved(), shape.flops
    return replace(
        found, name=f"ragged: {name}", shape={"lengths": str(lengths[:4])}, make_inputs=make, bytes_moved=moved,
        flops=flops, requirements=(as_fa3,), baseline=FA3,
    )  # fmt: skip


class Prompts(NamedTuple):
    """Prompts with nothing cached, their keys and values in tensors [T, heads, elements] of their own."""

    given: Given
    k: torch.Tensor
    v: torch.Tensor


def make_prompts(device: torch.device, shape: Shape) -> Prompts:
    i = given(device, shape, Options(0.0, False, WIDE // shape.page))
    spans = zip(i.block_table, shape.lengths, strict=True)
    own = torch.cat([places(row, shape.page, 0, new) for row, (_, new) in spans])
    k, v = (cache.flatten(0, 1)[own] for cache in (i.k_cache, i.v_cache))
    return Prompts(i, k, v)


def over_new_keys(p: Prompts) -> torch.Tensor:
    i = p.given.paged
    rest = (i.k_cache, i.v_cache, i.block_table, i.cu_seqlens_q, i.seqlens_k)
    out: torch.Tensor = prefix_prefill(i.q, p.k, p.v, *rest, max_seqlen_q=i.max_seqlen_q, max_seqlen_k=i.max_seqlen_k)
    return out


def fa3_contiguous() -> Callable[[Prompts], torch.Tensor]:
    call = peers.fa3_contiguous()
    return lambda p: call(p.given.paged, p.k, p.v)


def new_keys(device: torch.device, lengths: tuple[int, ...]) -> Case:
    """Beside FA3 over the same tensors, which is quicker there than over pages."""
    shape = Shape(SoftmaxAttention("32/8", 32, 8, 128), tuple((0, new) for new in lengths))
    return replace(
        point_case(device, {**LLAMA, "sequences": 1, "new": 1, "context": 20}),
        name=f"new keys: {len(lengths)} of {lengths[0]}",
        shape={"new": str(lengths[:4]), "sequences": len(lengths)},
        make_inputs=partial(make_prompts, device, shape),
        ours={OURS: over_new_keys},
        peers={FA3: fa3_contiguous},
        check=lambda out, p: check(out, p.given),
        bytes_moved=shape.bytes_moved(),
        flops=shape.flops,
        requirements=(as_fa3,),
        baseline=FA3,
    )


def cases(device: torch.device) -> Iterator[Case]:
    for kind, sizes in KINDS.items():
        for size in (64, 72, 80, 96, 128, 192, 256):
            yield case(device, f"head size, {kind}", sizes, as_fa3, head_size=size)
        # Larger than FA3 takes.
        yield case(device, f"head size, {kind}", sizes, past_unified, heads="16/2", head_size=512)
        for page in (1, 8, 16, 24, 48, 64, 128, 256):
            yield case(device, f"page, {kind}", sizes, near_fa3 if page % 16 else as_fa3, page=page)
        for soft_cap in (30, 50):
            yield case(device, f"soft cap, {kind}", sizes, as_fa3, soft_cap=soft_cap)
        for window in (0, 4096):
            gemma = {"heads": "16/8", "head_size": 256, "soft_cap": 50, "window": window}
            yield case(device, f"Gemma 2, {kind}", sizes, as_fa3, **gemma)
        for window in (128, 1024, 4096):
            for sinks in ("no", "yes"):
                yield case(device, f"window, {kind}", sizes, as_fa3, window=window, sinks=sinks)
        for heads in ("16/16", "16/8", "32/8", "64/8", "16/1"):
            yield case(device, f"heads, {kind}", sizes, as_fa3, heads=heads)
    for sizes in ((1, 1, 8000), (16, 1, 1000)):
        yield case(device, "page, decode", sizes, near_fa3, page=1)
    for sequences, older in (
        (1, 500), (1, 8000), (1, 120000), (4, 2000), (16, 500), (16, 8000), (64, 500), (256, 500), (256, 2000),
    ):  # fmt: skip
        yield case(device, "decode", (sequences, 1, older), as_fa3)
    for new in (2, 4, 8):
        yield case(device, "drafts", (16, new, 8000), as_fa3)
    for new in (256, 2048, 8192):
        for older in (0, 16384, 120000):
            yield case(device, "chunk", (1, new, older), as_fa3)
    for sizes in ((4, 2048, 0), (8, 1024, 0), (16, 512, 0)):
        yield case(device, "chunk", sizes, as_fa3)
    for lengths in ((256,), (2048,), (8192,), (16384,), (65536,), (1024,) * 8):
        yield new_keys(device, lengths)
    yield mixed(device)
    short = tuple((500 + 55 * i, 1) for i in range(63))
    yield ragged(device, "decode behind 120000 and 63 of 500 to 4000", ((120000, 1), *short))
    yield ragged(device, "chunks behind 0 to 20000", tuple((n, 512) for n in (0, 1000, 20000, 300, 5000, 12000)))
    yield ragged(device, "prompts of 17 to 4000", tuple((0, n) for n in (4000, 17, 2000, 300, 1200, 700, 120, 3000)))
