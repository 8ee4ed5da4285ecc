"""Figures that are quoted before there is a whole record: 8-bit caches, lists of keys, one long sequence, the indexer.

``python -m kernel_reference.bench.run benchmarks/spots.py --quick --processes 14 --out DIR`` is to take 10 s once
all is compiled. The cases are those of cases.py, without vLLM's Triton kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from caches import cache_cases
from dense import BESIDE_FLASH_MLA, VLLM, decode_case, one_long
from indexer import index_cases
from sparse import sparse_cases

from kernel_reference.bench import Case

LISTS = ("B64 top 2048 h16", "B64 top 2048 h64", "B64 top 2048 h128", "B4 top 2048 h128")
INDEXED = ("decode B1 of 131072", "decode B64 of 32768", "prefill B1 of 32768, 2048 query tokens")


def cases(device: torch.device) -> Iterator[Case]:
    yield from cache_cases(device)
    yield from (case for case in sparse_cases(device) if case.name.endswith(LISTS))
    yield from (case for case in index_cases(device) if case.name.endswith(INDEXED))
    for heads in (64, 128):
        yield decode_case(device, one_long(heads), targets=BESIDE_FLASH_MLA).without(VLLM)
