"""Figures that are quoted before there is a whole record: cliffs.py where plans changed, x-packed pages, soft caps.

``python -m kernel_reference.bench.run benchmarks/spots.py --quick --processes 8 --out DIR`` is to take 20 s. Cases that
cliffs.py has too have its names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import cliffs
import torch
from cases import LLAMA3_8B, OURS_X_PACKED, Shape, check, fa3, make_batch, ours, x_packed_by_plan
from map import OURS
from peers import FA3, UNIFIED

from kernel_reference.bench import Case, Requirement

FROM_CLIFFS = (
    "head size, chunks: head size 128",
    "head size, chunks: head size 192",
    "soft cap, chunks: soft cap 30",
    "Gemma 2, chunks",
    "chunk: plain; 1 of 256 behind 0",
    "chunk: plain; 1 of 2048 behind 0",
    "chunk: plain; 1 of 2048 behind 16384",
    "window, chunks: window 128, sinks no",
    "ragged: prompts of 17 to 4000",
    "decode: plain; 1 of 1 behind 500",
    "decode: plain; 1 of 1 behind 8000",
    "decode: plain; 4 of 1 behind 2000",
    "decode: plain; 64 of 1 behind 500",
    "decode: plain; 256 of 1 behind 500",
    "page, chunks: page 1;",
    "page, decode: page 1;",
    "mixed: 2048 behind 30720",
    "chunk: plain; 4 of",
    "chunk: plain; 8 of",
    "chunk: plain; 16 of",
    "ragged: chunks",
    "new keys:",
)
# The time of our own NHD pages that x-packed ones may take.
PACKED_AT_MOST = 1.3


def cases(device: torch.device) -> Iterator[Case]:
    for case in cliffs.cases(device):
        if case.name.startswith(FROM_CLIFFS):
            yield case.without(UNIFIED)
    yield large_scores(cliffs.case(device, "soft cap, chunks", cliffs.CHUNK, cliffs.as_fa3, soft_cap=30))
    yield cliffs.case(device, "drafts", (64, 8, 8000), cliffs.near_fa3, page=1)
    for sequences, new, older in (cliffs.CHUNK, cliffs.DECODE):
        yield packed(device, Shape(LLAMA3_8B, ((older, new),) * sequences))


def large_scores(case: Case) -> Case:
    """With scores to 0.6 of the cap, by queries that are so much larger."""
    make = case.make_inputs

    def make_inputs() -> object:
        batch = make()
        return replace(batch, q=batch.q * (0.25 * math.sqrt(batch.q.shape[2])))

    return replace(case, name=f"{case.name}, scores to 0.6 of it", make_inputs=make_inputs)


def packed(device: torch.device, shape: Shape) -> Case:
    """Pages as vLLM's older kernels pack them, beside pages of the same tokens as FA3 takes them."""
    return Case(
        name=f"x-packed, {shape.words}",
        shape=shape.entry,
        make_inputs=lambda: make_batch(device, shape, x_packed=True),
        ours={OURS_X_PACKED: x_packed_by_plan, OURS: ours},
        peers={FA3: fa3},
        check=check,
        # The bound is the check's own, which raises.
        tolerance=math.inf,
        bytes_moved=shape.bytes_moved(),
        flops=shape.flops,
        baseline=FA3,
        requirements=(Requirement(OURS_X_PACKED, OURS, time_at_most=PACKED_AT_MOST),),
    )
