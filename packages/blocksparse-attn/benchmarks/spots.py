"""Figures that are quoted before there is a whole record: selected attention, gradients, pages of a chunk.

``python -m kernel_reference.bench.run benchmarks/spots.py --quick --processes 8 --out DIR`` is to take 20 s. The cases
are those of cases.py and gradients.py, without FlexAttention, which takes long to compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import selected_cases
import torch
from cases import CHUNK, attention_case, prefill
from gradients import FLEX_LABEL, gradient_case
from peers import FLEX, VLLM
from selected_cases import M3, OURS_ALONE, QWEN

from kernel_reference.bench import Case


def cases(device: torch.device) -> Iterator[Case]:
    for sequences, total in ((1, 131072), (32, 32768), (128, 16384)):
        yield selected_cases.case(
            device, replace(M3, sequences=sequences, new=1, total=total), of_triton=1.0, of_copy=0.85, fp8=True
        )
    yield selected_cases.case(device, QWEN, of_copy=0.5, fp8=True)
    for share, target in ((0.0, 1.6), (0.75, 2.2)):
        case = selected_cases.case(device, replace(M3, share=share), of_triton=target)
        yield replace(case, ours={label: call for label, call in case.ours.items() if label != OURS_ALONE})
    for shape, of_fa3 in ((CHUNK, None), (prefill(8192), 0.60), (prefill(32768), 0.80)):
        yield attention_case(device, shape, of_fa3=of_fa3).without(*FLEX, VLLM)
    for tokens, us in ((8192, 1300.0), (32768, None)):
        yield gradient_case(device, tokens, us).without(FLEX_LABEL)
