"""Figures that are quoted before there is a whole record: decode steps, convolutions, prefill, host times.

``python -m kernel_reference.bench.run benchmarks/spots.py --quick --processes 8 --out DIR`` is to take 20 s, and some
more for fla's kernels, which search for their plans, in the last cases. Cases that cases.py has too have its names.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from cases import MODELS, OURS, conv_case, conv_host_case, further_splits
from steps import FLA_STEP, Setup, gradient_case, ours, prefill_case, step_case, step_cases

from kernel_reference.bench import Case, Requirement


def cases(device: torch.device) -> Iterator[Case]:
    shape = MODELS["Qwen3-Next"]
    for case in step_cases(device, shape):
        if not case.name.endswith("no norm"):
            yield case.without(FLA_STEP)
    setup = Setup(64, shape, tokens=4, state_layout="VK")
    one = partial(ours, setup=setup, tokens=1)
    targets = [Requirement(OURS, "one token", time_at_most=1.25)]
    yield step_case(device, setup, peers={"one token": lambda: one}, requirements=targets)
    yield conv_host_case(device)
    for case in further_splits(device):
        yield case.without(*case.peers)
    for sequences in (1, 16, 64, 256):
        for packed in (True, False):
            yield conv_case(device, sequences, packed)
    for lengths in ([8192], [1, 4000, 17, 900, 3, 2048, 1223]):
        yield gradient_case(device, shape, lengths)
    for lengths in ([8192], [1, 4000, 17, 900, 3, 2048, 1223], [128] * 256):
        yield prefill_case(device, shape, lengths)
