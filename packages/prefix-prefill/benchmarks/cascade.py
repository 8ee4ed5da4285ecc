"""What serving asks for beside chunks and decoding: keys that sequences share, and drafts that are trees.

``python -m kernel_reference.bench.run packages/prefix-prefill/benchmarks/cascade.py --out DIR`` measures all of it. FA3
knows neither: it takes tables that name the shared pages once a sequence, and for trees chains of as many tokens, which
do the same work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import peers
import torch
from cases import DTYPE, LLAMA3_8B, OURS, TP8, Batch, Ours, Shape, Theirs, check, fa3, make_batch, ours, over_pages
from peers import FA3, FA3_SCHEDULED

from kernel_reference.attention import attention
from kernel_reference.bench import Case, Requirement
from kernel_reference.models import SoftmaxAttention
from kernel_reference.paging import gather
from kernel_reference.testing.numerics import assert_close_to_oracle
from prefix_prefill import CascadeLevel, cascade_attention

CAUSAL, FLAT = f"{OURS}, causal", f"{OURS}, flat tables"


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


@dataclass(eq=False)
class Cascade:
    """Sequences behind pages that they share: as one flat batch, and as two levels."""

    flat: Batch
    shared: tuple[torch.Tensor, ...]
    own: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Shared:
    """So many sequences of ``own`` keys, the last ``new`` of them new tokens, behind ``shared`` keys of all."""

    model: SoftmaxAttention
    sequences: int
    new: int
    own: int
    shared: int

    @property
    def flat(self) -> Shape:
        return Shape(self.model, ((self.shared + self.own - self.new, self.new),) * self.sequences)

    @property
    def name(self) -> str:
        m, own = self.model, f"{self.own - self.new} + {self.new} of its own"
        return f"cascade, B{self.sequences} {own} behind {self.shared}, {m.num_heads_q}/{m.num_heads_kv}x{m.head_dim}"

    @property
    def bytes_moved(self) -> int:
        """q, the output, and each key and value once."""
        m = self.model
        keys = (self.shared + self.sequences * self.own) * m.num_heads_kv
        return 2 * m.head_dim * DTYPE.itemsize * (self.sequences * self.new * m.num_heads_q + keys)


def make_cascade(device: torch.device, s: Shared, page: int = 16) -> Cascade:
    m = s.model
    common, each = s.shared // page, -(-s.own // page)
    pages = torch.randperm(common + s.sequences * each, device=device, dtype=torch.int32)
    first, second = pages[:common][None].clone(), pages[common:].view(s.sequences, each).clone()
    k_cache, v_cache = torch.randn(2, len(pages), page, m.num_heads_kv, m.head_dim, device=device, dtype=DTYPE)
    rows = s.sequences * s.new
    bounds = torch.arange(0, rows + 1, s.new, device=device, dtype=torch.int32)
    one = torch.ones(1, device=device)

    def lengths(count: int, tokens: int) -> torch.Tensor:
        return torch.full((count,), tokens, device=device, dtype=torch.int32)

    q = torch.randn(rows, m.num_heads_q, m.head_dim, device=device, dtype=DTYPE)
    flat = Batch(
        shape=s.flat, q=q, k=one, v=one, k_cache=k_cache, v_cache=v_cache,
        block_table=torch.cat([first.expand(s.sequences, -1), second], dim=1).contiguous(), cu_seqlens_q=bounds,
        seqlens_k=lengths(s.sequences, s.shared + s.own), one=one, k_scale=one, v_scale=one,
    )  # fmt: skip
    flat.schedule = peers.fa3_schedule(flat.paged)
    whole = torch.tensor([0, rows], device=device, dtype=torch.int32)
    return Cascade(flat, (first, whole, lengths(1, s.shared)), (second, bounds, lengths(s.sequences, s.own)))


def cascaded(i: Cascade) -> Ours:
    cache = (i.flat.k_cache, i.flat.v_cache)
    levels = [CascadeLevel(*cache, *i.shared), CascadeLevel(*cache, *i.own)]
    return Ours(cascade_attention(i.flat.q, levels, max_seqlen_q=i.flat.shape.max_seqlen_q))


def on_flat(call: Callable[[Batch], Any]) -> Callable[[Cascade], Any]:
    return lambda i: call(i.flat)


def cascade_case(device: torch.device, s: Shared, against_fa3: float) -> Case:
    return Case(
        name=s.name,
        shape={**s.flat.entry, "shared": s.shared, "own": s.own},
        make_inputs=partial(make_cascade, device, s),
        ours={OURS: cascaded, FLAT: on_flat(ours)},
        peers={FA3: lambda: on_flat(fa3()), FA3_SCHEDULED: lambda: on_flat(fa3(scheduled=True))},
        check=lambda outputs, i: check(outputs, i.flat),
        tolerance=math.inf,
        bytes_moved=s.bytes_moved,
        flops=s.flat.flops,
        baseline=FA3,
        requirements=(Requirement(OURS, FA3, speed_at_least=against_fa3),),
    )


# Sequences, their new tokens and keys of their own, keys that they share; the target against FA3 over flat tables.
CASCADES = (
    (LLAMA3_8B, 64, 1, 512, 32768, 6.0), (LLAMA3_8B, 16, 256, 256, 16384, 1.1), (LLAMA3_8B, 8, 1, 512, 8192, 1.0),
    (TP8, 128, 1, 1024, 8192, 2.0), (LLAMA3_8B, 64, 8, 512, 8192, 2.0), (LLAMA3_8B, 4, 1024, 2048, 16384, 0.95),
)  # fmt: skip


def cases(device: torch.device) -> Iterator[Case]:
    for *sizes, target in CASCADES:
        yield cascade_case(device, Shared(*sizes), target)
    for model, sequences, new, older in (
        (LLAMA3_8B, 16, 8, 8192), (LLAMA3_8B, 64, 8, 4096), (LLAMA3_8B, 4, 63, 16384), (TP8, 32, 16, 32768),
        (LLAMA3_8B, 1, 32, 1000),
    ):  # fmt: skip
        yield draft_case(device, Shape(model, ((older, new),) * sequences))
