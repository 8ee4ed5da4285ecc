"""What an eager call keeps the host, function by function; beside them FA3's call, which makes no plan of its own.

``python -m kernel_reference.bench.run packages/prefix-prefill/benchmarks/host.py --quick --out DIR`` measures them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from cascade import Shared, cascade_case
from cases import LLAMA3_8B, OURS, OURS_FP8, OURS_X_PACKED, Shape, fp8_case, merge_case, ours_x_packed
from cliffs import case, new_keys
from peers import FA3
from spots import packed

from kernel_reference.bench import Case

MOST_US = 25.0
host_case = partial(Case.of_host, us_at_most=MOST_US, beside=FA3)
# Few rows, which the GPU is done with before the host has called again.
DECODING = Shape(LLAMA3_8B, ((500, 1),) * 4)


def cases(device: torch.device) -> Iterator[Case]:
    yield host_case(case(device, "decode", (4, 1, 500)), "prefix_prefill, 4 rows that decode", OURS)
    yield host_case(new_keys(device, (256,)), "prefix_prefill, a prompt of 256 new keys", OURS)
    yield host_case(fp8_case(device, DECODING), "prefix_prefill, scales of an 8-bit cache as tensors", OURS_FP8)
    by_engines = replace(packed(device, DECODING), ours={OURS_X_PACKED: ours_x_packed}, requirements=())
    yield host_case(by_engines, "context_attention_fwd", OURS_X_PACKED)
    yield host_case(cascade_case(device, Shared(LLAMA3_8B, 4, 1, 64, 512), 1.0), "cascade_attention, two levels", OURS)
    yield host_case(merge_case(device, LLAMA3_8B, 4), "merge_attention_states", OURS)
