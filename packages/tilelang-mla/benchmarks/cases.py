"""What tilelang-mla is timed on, a file each: dense, pages, chunks, gradients, 8-bit caches, lists, the indexer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from caches import cache_cases
from chunks import chunk_cases
from dense import dense_cases
from gradients import gradient_cases
from indexer import index_cases
from pages import page_cases
from sparse import sparse_cases
from sparse_prefill import sparse_prefill_cases

from kernel_reference.bench import Case


def cases(device: torch.device) -> Iterator[Case]:
    yield from dense_cases(device)
    yield from page_cases(device)
    yield from chunk_cases(device)
    yield from gradient_cases(device)
    yield from cache_cases(device)
    yield from sparse_cases(device)
    yield from sparse_prefill_cases(device)
    yield from index_cases(device)
