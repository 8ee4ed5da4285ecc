"""Neighbours of the benchmark's shapes at which speed fell off, and its targets now.

``python -m kernel_reference.bench.run packages/lightning-attn/benchmarks/cliffs.py --out DIR`` measures them all; names
begin with what was slow: ``--only '^float16'``. Results are held to what map.py holds its own to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from cases import (
    AS_CHAIN,
    OURS,
    RAGGED,
    as_case,
    backward_fla,
    backward_problem,
    backward_references,
    decode_problem,
    decode_vllm,
    packed_problem,
    ragged_references,
    step_references,
    tree_as_chain,
    tree_problem,
    tree_references,
    verify_case,
    verify_problem,
)
from map import ERROR_AT_MOST, FLA, Given, Result, by_decode, case_of, given, prefill_point, varlen_fla
from peers import VLLM, VLLM_PREFILL

from kernel_reference.bench import Case, Requirement
from kernel_reference.models import LinearAttention
from lightning_attn import lightning_attention, lightning_attention_varlen, lightning_decode

IN_BFLOAT16, BY_DECODE, APART = "ours, bfloat16", "ours, lightning_decode", "ours, decode and prompt apart"
target_of = partial(Requirement, OURS)


def prefill(
    device: torch.device, row: str, *requirements: Requirement, dtype: str = "bfloat16", size: int = 128,
    size_v: int | None = None, heads: int = 64, tokens: int = 16384, sequences: int = 1,
) -> Case:  # fmt: skip
    """``lightning_attention`` on prompts of one length, from no state."""
    point = {"dtype": dtype, "head size": size, "heads": heads, "tokens": tokens, "sequences": sequences}
    if size_v is not None:
        point["head size of v"] = size_v
    sizes = f"{size}" if size_v is None else f"{size} and {size_v}"
    name = f"{row}: {dtype}, {heads} heads of {sizes}, {sequences} x {tokens}"
    return replace(prefill_point(device, point, "few"), name=name, shape=point, requirements=requirements)


def beside_bfloat16(case: Case) -> Case:
    """With the same call in bfloat16 as a peer, which takes all but as long."""
    make = case.make_inputs

    def make_both() -> Given:
        i = make()
        # Copied with the inputs, as a part of them.
        i.vllm = [*i.vllm, *(x.bfloat16() for x in i.bhnd)]
        return i

    def call(i: Given) -> Result:
        out, kv = lightning_attention(*i.vllm[-3:], i.slopes)
        return Result(out, kv[:, :, -1], ERROR_AT_MOST["bfloat16"])

    peers = {name: peer for name, peer in case.peers.items() if name != VLLM_PREFILL}
    target = target_of(time_at_most=1.05, against=IN_BFLOAT16)
    return replace(case, make_inputs=make_both, peers={**peers, IN_BFLOAT16: lambda: call}, requirements=(target,))


def varlen(
    device: torch.device, row: str, lengths: Sequence[int], *requirements: Requirement, heads: int = 64,
    beside: dict[str, Callable[[], Callable[[Given], Result]]] | None = None,
) -> Case:  # fmt: skip
    """``lightning_attention_varlen`` in bfloat16, heads of 128."""
    point: dict[str, Any] = {"dtype": "bfloat16", "head size": 128, "heads": heads}
    make = partial(given, device, lengths, heads, 128, torch.bfloat16)
    case = case_of(
        f"{row}: {heads} heads, {len(lengths)} sequences of {sum(lengths)} tokens", point, make, ragged,
        {FLA: varlen_fla, **(beside or {})}, tokens=sum(lengths), sequences=len(lengths),
    )  # fmt: skip
    return replace(case, shape={**point, "tokens": sum(lengths), "sequences": len(lengths)}, requirements=requirements)


def ragged(i: Given) -> Result:
    more = {"state_pool": i.pool, "slots": i.slots, "has_initial_state": i.goes_on}
    out = lightning_attention_varlen(i.q, i.k, i.v, i.slopes, i.cu_seqlens, **more)
    return Result(out, i.pool, ERROR_AT_MOST["bfloat16"], True)


def apart() -> Callable[[Given], Result]:
    """Sequences of one token by ``lightning_decode``, and the last, a prompt, by itself."""

    def call(i: Given) -> Result:
        rows = len(i.lengths) - 1
        q, k, v = ([x[:rows], x[rows:]] for x in (i.q, i.k, i.v))
        first = lightning_decode(q[0], k[0], v[0], i.pool, i.slots[:rows], i.slopes)
        more = {"state_pool": i.pool, "slots": i.slots[rows:], "has_initial_state": i.goes_on[rows:]}
        bounds = i.cu_seqlens[rows:] - rows
        last = lightning_attention_varlen(q[1], k[1], v[1], i.slopes, bounds, **more)
        return Result(torch.cat([first, last]), i.pool, ERROR_AT_MOST["bfloat16"], True)

    return call


def model(heads: int, size: int) -> LinearAttention:
    return LinearAttention(f"{heads} heads of {size}", heads, size, size)


def cases(device: torch.device) -> Iterator[Case]:
    for size, heads, tokens, sequences in (
        (128, 64, 8192, 1), (128, 8, 32768, 1), (128, 16, 500, 16), (64, 40, 8192, 1), (96, 32, 16384, 1),
        (256, 32, 16384, 1),
    ):  # fmt: skip
        sizes = {"size": size, "heads": heads, "tokens": tokens, "sequences": sequences}
        yield beside_bfloat16(prefill(device, "float16", dtype="float16", **sizes))
    as_vllm = target_of(time_at_most=0.6, against=VLLM_PREFILL)
    for heads, tokens in ((64, 8192), (8, 32768)):
        yield prefill(device, "float32", as_vllm, dtype="float32", heads=heads, tokens=tokens)
    beside_fla = target_of(time_at_most=1 / 1.8, against=FLA)
    for speed, sizes in ((0.75, (64,)), (0.6, (96, 112)), (0.5, (72, 80)), (0.45, (192, 256))):
        for size in sizes:
            for heads in (32, 64):
                targets = (target_of(speed_at_least=speed), beside_fla)
                yield prefill(device, "head size", *targets, size=size, heads=heads)
    targets = (target_of(speed_at_least=0.45), beside_fla)
    for size, size_v in ((128, 64), (64, 128), (96, 64), (192, 128)):
        yield prefill(device, "head sizes", *targets, size=size, size_v=size_v, heads=32)
    for heads in (4, 8, 16):
        for tokens in (16384, 32768, 131072):
            speed = 0.55 if 4 * tokens * heads * 128 * 2 >= 64e6 else 0.45
            yield prefill(device, "few heads", target_of(speed_at_least=speed), heads=heads, tokens=tokens)
    for sequences, tokens in ((4, 3000), (16, 500), (64, 128)):
        target = target_of(speed_at_least=0.55)
        yield prefill(device, "short", target, heads=16, tokens=tokens, sequences=sequences)
        yield varlen(device, "short, ragged", (tokens,) * sequences, target, heads=16)
    decode = {BY_DECODE: by_decode(ERROR_AT_MOST["bfloat16"])}
    for heads in (8, 64):
        like_decode = target_of(time_at_most=1.15, against=BY_DECODE)
        yield varlen(device, "decode rows", (1,) * 128, like_decode, heads=heads, beside=decode)
        at_most_the_sum = target_of(time_at_most=1.0, against=APART)
        yield varlen(device, "mixed", ((1,) * 128 + (4096,)), at_most_the_sum, heads=heads, beside={APART: apart})
    verify = verify_case(verify_problem(device, model(64, 128), 32, 4))
    yield replace(verify, name=f"verify: {verify.name}", requirements=(target_of(time_at_most=1.4),))
    like_chain = target_of(time_at_most=2.0, against=AS_CHAIN)
    tree = as_case(
        tree_problem(device, model(64, 128), 32), {AS_CHAIN: lambda: tree_as_chain}, tree_references, like_chain
    )
    yield replace(tree, name=f"drafts: {tree.name}")
    for heads, lengths in ((8, (3000,) * 4), (64, RAGGED)):
        packed = packed_problem(device, model(heads, 128), lengths)
        target = target_of(speed_at_least=0.55)
        yield replace(as_case(packed, {}, ragged_references, target), name=f"packed: {packed.name}")
    for heads in (8, 16, 64):
        for sequences in (1, 4, 8):
            problem = decode_problem(device, model(heads, 128), sequences)
            case = as_case(problem, {VLLM: decode_vllm}, step_references, target_of(speed_at_least=0.8))
            yield replace(case, name=f"decode: {case.name}")
    for size, heads in ((64, 64), (96, 64), (72, 64), (80, 64), (112, 64), (192, 32), (256, 32), (128, 8), (128, 16)):
        problem = backward_problem(device, model(heads, size), 16384)
        peer = {FLA: partial(backward_fla, "few")}
        case = as_case(problem, peer, backward_references, target_of(time_at_most=0.5, against=FLA))
        yield replace(case, name=f"backward: {case.name}")
