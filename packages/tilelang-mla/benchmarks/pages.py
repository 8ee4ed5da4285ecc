"""Decoding over pages of other sizes, beside the same tokens in pages of 64, and FlashAttention-3."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from dense import FA3, OURS, PAGE, Batch, Ours, Shape, Theirs, check, fa3, make_batch, ours, share

from kernel_reference.bench import Case, Requirement

OF_64 = f"pages of {PAGE}"
# Heads, sequences of 8192 keys; of each these pages.
SHAPES = ((16, 64), (128, 64))
PAGES = (1, 16, 24, 32, 48)
SPEED_AT_LEAST = 0.93


@dataclass(eq=False)
class Paged:
    """The same tokens twice."""

    batch: Batch
    of_64: Batch


def make_paged(device: torch.device, shape: Shape, page: int) -> Paged:
    """Random pages in random order both; sequences of one length."""
    of_64 = make_batch(device, shape)
    [length] = {*shape.lengths}
    columns = -(-length // page)
    tokens = of_64.kv[of_64.block_table.long()].flatten(1, 2)[:, :length]
    padded = torch.nn.functional.pad(tokens, (0, 0, 0, 0, 0, columns * page - length))
    order = torch.randperm(len(shape.lengths) * columns, device=device)
    kv = torch.empty(len(order), page, *tokens.shape[2:], device=device, dtype=tokens.dtype)
    kv[order] = padded.unflatten(1, (columns, page)).flatten(0, 1)
    table = order.int().view(-1, columns)
    return Paged(replace(of_64, kv=kv, block_table=table, page=page, held={}), of_64)


def page_cases(device: torch.device) -> Iterator[Case]:
    for heads, sequences in SHAPES:
        shape = Shape(share(heads), (8192,) * sequences)
        for page in PAGES:
            yield Case(
                name=f"decode {shape.words}, pages of {page}",
                shape={**shape.entry, "page": page},
                make_inputs=partial(make_paged, device, shape, page),
                ours={OURS: lambda i: ours(i.batch)},
                peers={
                    OF_64: lambda: lambda i: Theirs(ours(i.of_64).out),
                    FA3: lambda: partial(lambda run, i: run(i.batch), fa3()),
                },
                check=_check,
                # The bound is the check's own, which raises.
                tolerance=math.inf,
                bytes_moved=shape.bytes_moved,
                flops=shape.flops,
                copy=False,
                baseline=OF_64,
                requirements=[Requirement(OURS, OF_64, speed_at_least=SPEED_AT_LEAST)],
            )


def _check(outputs: Ours | Theirs, i: Paged) -> float:
    return check(outputs, i.batch)
