"""What an eager call keeps the host, function by function; beside it FA3's, which looks for no list.

``python -m kernel_reference.bench.run packages/blocksparse-attn/benchmarks/host.py --quick --out DIR`` measures all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import selected_cases
import torch
from cases import FA3, OURS, Shape, attention_case, prefill

from kernel_reference.bench import Case
from kernel_reference.models import PHI3_SMALL

MOST_US = 25.0
host_case = partial(Case.of_host, us_at_most=MOST_US, beside=FA3)


def cases(device: torch.device) -> Iterator[Case]:
    decode = Shape(PHI3_SMALL, 64, 1023, 1, page=16)
    yield host_case(attention_case(device, decode), "decode of 64", OURS)
    yield host_case(attention_case(device, replace(decode, sequences=1, ctx=4095)), "decode of one, split", OURS)
    yield host_case(attention_case(device, prefill(1024)), "a prompt of 1024", OURS)
    for sequences in (1, 32):
        shape = replace(selected_cases.M3, sequences=sequences, new=1, total=4096)
        yield host_case(
            selected_cases.case(device, shape), f"selected blocks, decode of {sequences}", selected_cases.OURS
        )
