"""What serving asks for beside chunks and decoding: drafts that are trees.

``python -m kernel_reference.bench.run packages/prefix-prefill/benchmarks/cascade.py --out DIR`` measures all of it. FA3
knows no such mask: beside trees it takes chains of as many tokens, which do the same work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from cases import DTYPE, LLAMA3_8B, OURS, TP8, Batch, Ours, Shape, Theirs, check, fa3, make_batch, over_pages
from peers import FA3

from kernel_reference.attention import attention
from kernel_reference.bench import Case, Requirement
from kernel_reference.paging import gather
from kernel_reference.testing.numerics import assert_close_to_oracle

CAUSAL = f"{OURS}, causal"


@dataclass(eq=False)
class Drafts:
    """A batch whose new tokens are a tree a sequence."""

    batch: Batch
    draft_mask: torch.Tensor


class Drafted(Ours):
    """An output under the mask of drafts."""


def make_drafts(device: torch.device, shape: Shape) -> Drafts:
    """Each new token's parent is the one at half its number: two branches everywhere, as deep as a logarithm."""
    masks: list[int] = []
    for _, new in shape.lengths:
        own: list[int] = []
        for i in range(new):
            own.append(1 << i | (own[(i - 1) // 2] if i else 0))
        masks += own
    return Drafts(make_batch(device, shape), torch.tensor(masks, dtype=torch.int64, device=device))


def drafted(i: Drafts) -> Drafted:
    return Drafted(over_pages(i.batch.paged, draft_mask=i.draft_mask))


def check_drafts(outputs: Drafted | Ours | Theirs, i: Drafts) -> float:
    """The largest error over the largest value; of trees in the rows of the first sequence and of the last."""
    if not isinstance(outputs, Drafted):
        return check(outputs, i.batch)
    shape, device = i.batch.shape, i.batch.q.device
    keys, values = (gather(x, i.batch.block_table, i.batch.seqlens_k) for x in (i.batch.k_cache, i.batch.v_cache))
    count = len(shape.lengths)
    begins, contexts = i.batch.cu_seqlens_q[:-1].long(), torch.tensor([ctx for ctx, _ in shape.lengths], device=device)

    def seen(sequence: torch.Tensor, _: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        context = contexts[sequence]
        bits = i.draft_mask[begins[sequence] + row - context] >> (key - context).clamp(min=0)
        return (key < context) | (bits & 1).bool()

    first, last = shape.lengths[0][1], len(i.batch.q)
    rows = torch.cat([torch.arange(first), torch.arange(last - shape.lengths[count - 1][1], last)]).unique().to(device)
    results = [
        attention(
            i.batch.q, keys.tokens, values.tokens, cu_seqlens_q=i.batch.cu_seqlens_q, cu_seqlens_k=keys.cu_seqlens,
            mask=seen, rows=rows, compute_dtype=dtype,
        ).out
        for dtype in (torch.float64, torch.float32)
    ]  # fmt: skip
    assert_close_to_oracle(outputs.out[rows], results[0], results[1].to(DTYPE))
    return float((outputs.out[rows].double() - results[0]).abs().max() / results[0].abs().max())


def draft_case(device: torch.device, shape: Shape) -> Case:
    return Case(
        name=f"tree drafts, {shape.words}",
        shape=shape.entry,
        make_inputs=partial(make_drafts, device, shape),
        ours={OURS: drafted, CAUSAL: lambda i: Ours(over_pages(i.batch.paged))},
        peers={FA3: lambda: (lambda call: lambda i: call(i.batch))(fa3())},
        check=check_drafts,
        tolerance=math.inf,
        bytes_moved=shape.bytes_moved(),
        flops=shape.flops,
        baseline=CAUSAL,
        requirements=(Requirement(OURS, CAUSAL, time_at_most=1.05), Requirement(OURS, FA3, speed_at_least=0.95)),
    )


def cases(device: torch.device) -> Iterator[Case]:
    for model, sequences, new, older in (
        (LLAMA3_8B, 16, 8, 8192), (LLAMA3_8B, 64, 8, 4096), (LLAMA3_8B, 4, 63, 16384), (TP8, 32, 16, 32768),
        (LLAMA3_8B, 1, 32, 1000),
    ):  # fmt: skip
        yield draft_case(device, Shape(model, ((older, new),) * sequences))
