"""Figures that are quoted before there is a whole record: decode steps, drafts, convolutions, prefill, host times.

``python -m kernel_reference.bench.run benchmarks/spots.py --quick --processes 8 --out DIR`` is to take 30 s, and some
more for fla's kernels, which search for their plans, in the last cases. Cases that cases.py has too have its names.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from cases import MODELS, OURS, conv_case, conv_host_case, further_splits
from drafts import draft_cases
from steps import FLA_STEP, Setup, gradient_case, ours, prefill_case, step_case, step_cases

from gdn_split.plan import GroupShape
from kernel_reference.bench import Case, Requirement


def further_steps(device: torch.device, shape: GroupShape) -> Iterator[Case]:
    """Without targets of their own: fewer sequences in other dtypes and layouts, larger heads."""
    for sequences in (4, 16, 256):
        yield step_case(device, Setup(sequences, shape, state_layout="VK"))
    for sequences in (1, 4, 16):
        for layout in ("KV", "VK"):
            yield step_case(device, Setup(sequences, shape, state=torch.bfloat16, state_layout=layout))
    for size in (192, 256):
        for sequences in (1, 64):
            yield step_case(device, Setup(sequences, GroupShape(4, 8, size, size)))


def cases(device: torch.device) -> Iterator[Case]:
    shape = MODELS["Qwen3-Next"]
    for case in step_cases(device, shape):
        if not case.name.endswith("no norm"):
            yield case.without(FLA_STEP)
    setup = Setup(64, shape, tokens=4, state_layout="VK")
    one = partial(ours, setup=setup, tokens=1)
    targets = [Requirement(OURS, "one token", time_at_most=1.25)]
    yield step_case(device, setup, peers={"one token": lambda: one}, requirements=targets)
    yield from further_steps(device, shape)
    yield from draft_cases(device, shape)
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
