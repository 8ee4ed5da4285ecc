"""Figures that are quoted before there is a whole record: dtypes, head sizes, few heads, short prompts, tokens, drafts.

``python -m kernel_reference.bench.run benchmarks/spots.py --quick --processes 8 --out DIR`` is to take 20 s. Cases that
cliffs.py has too have its names, without peers that take long to compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from cases import OURS, RAGGED, as_case, decode_problem, step_references, verify_case, verify_problem
from cliffs import beside_bfloat16, model, prefill, varlen
from map import FLA
from peers import VLLM_PREFILL

from kernel_reference.bench import Case, Requirement
from kernel_reference.models import MINIMAX_01


def cases(device: torch.device) -> Iterator[Case]:
    for case in with_peers(device):
        yield case.without(FLA, VLLM_PREFILL)


def with_peers(device: torch.device) -> Iterator[Case]:
    for heads, tokens, us in ((64, 8192, 1262.0), (8, 32768, 811.0)):
        target = Requirement(OURS, us_at_most=us)
        yield prefill(device, "float32", target, dtype="float32", heads=heads, tokens=tokens)
    yield prefill(device, "float32", dtype="float32", size=64, tokens=8192)
    for heads, tokens in ((64, 8192), (8, 32768)):
        yield beside_bfloat16(prefill(device, "float16", dtype="float16", heads=heads, tokens=tokens))
    for heads, size, speed in ((64, 64, 0.75), (32, 96, 0.6), (32, 128, 0.55)):
        yield prefill(device, "head size", Requirement(OURS, speed_at_least=speed), heads=heads, size=size)
    for heads in (4, 16):
        yield prefill(device, "few heads", Requirement(OURS, speed_at_least=0.55), heads=heads)
    yield varlen(device, "few heads, ragged", RAGGED, Requirement(OURS, speed_at_least=0.45), heads=8)
    for sequences, tokens in ((64, 128), (32, 256), (16, 512)):
        target = Requirement(OURS, speed_at_least=0.55)
        yield prefill(device, "short", target, heads=16, tokens=tokens, sequences=sequences)
    for drafts in (1, 2, 4):
        verify = verify_case(verify_problem(device, MINIMAX_01, 32, drafts))
        yield replace(verify, name=f"verify: {verify.name}", requirements=(Requirement(OURS, time_at_most=1.4),))
    for heads, sequences, speed in ((8, 1, 0.8), (64, 32, 0.93)):
        decode = decode_problem(device, model(heads, 128), sequences)
        case = as_case(decode, {}, step_references, Requirement(OURS, speed_at_least=speed))
        yield replace(case, name=f"decode: {case.name}")
