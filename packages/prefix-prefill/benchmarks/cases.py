"""What prefix-prefill is timed on: chunks of a prompt over a paged prefix, beside FA3, vLLM's and sglang's kernels.

Every peer gets its inputs in the layout and dtype that its callers give it, made outside of what is timed: vLLM's
`context_attention_fwd` an x-packed cache and the new keys and values apart, sglang a pool of single tokens and indices
into it, FA3 and vLLM's `unified_attention` pages that hold the new tokens already, as ours do. Results are compared to
float64 on sampled rows of every sequence. Ours must keep the house's bound there; a peer's error is recorded beside its
time, and must only be no garbage.

``python benchmarks/cases.py benchmarks/results/prefix-prefill.jsonl`` sums a record up: the geometric mean of the speed
against FA3, which no requirement of a single case can state.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import peers
import torch
from peers import (
    CONTEXT,
    CONTEXT_FP8,
    FA3,
    FA3_BF16,
    FA3_SCHEDULED,
    SGLANG,
    UNIFIED,
    UNIFIED_FP8,
    Paged,
    has_peer,
)

from kernel_reference.attention import attention
from kernel_reference.attention import merge_attention_states as merge_reference
from kernel_reference.bench import Case, Requirement
from kernel_reference.bench.record import Record, load
from kernel_reference.models import GPT_OSS, LLAMA3_70B, SoftmaxAttention
from kernel_reference.paging import cumulative, gather
from kernel_reference.testing.numerics import assert_close_to_oracle
from prefix_prefill import context_attention_fwd, merge_attention_states, prefix_prefill
from prefix_prefill.reference import quantised

OURS, OURS_X_PACKED, OURS_FP8 = "prefix-prefill", "prefix-prefill, x-packed", "prefix-prefill, fp8 cache"
OURS_QUANTISED, OURS_WIDENED = f"{OURS_FP8}, 8-bit queries", f"{OURS_FP8}, widened before"
DTYPE = torch.bfloat16
CACHE_DTYPE = torch.float8_e4m3fn
# Powers of two: what an 8-bit cache holds is then exact in bfloat16, so that one reference serves both caches. Unlike
# each other, so that one taken for the other shows; such that no random value is past the 8-bit range.
K_SCALE, V_SCALE = 2.0**-4, 2.0**-5
# Whatever a peer does, no element is further off than this, of a row's largest.
ERROR_AT_MOST = 0.05
# Rows looked at, of all sequences together, beside each one's first and its last.
SAMPLE = 32
# A prompt's chunk in a batch with as many sequences that decode as a small server has.
CHUNK, DECODING = (30720, 2048), (8192, 1)

# meta-llama/Meta-Llama-3-8B: num_attention_heads, num_key_value_heads, hidden_size 4096 / num_attention_heads.
LLAMA3_8B = SoftmaxAttention("Llama-3-8B", 32, 8, 128)
TP8 = LLAMA3_70B.tensor_parallel(8)
# The heads of its full-attention layers on one of four ranks; no sinks, as not every peer takes them.
GPT_OSS_TP4 = replace(GPT_OSS.tensor_parallel(4), name="gpt-oss TP4, no sinks", window=None, sinks=False)

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Shape:
    """Sequences of (older, new) tokens; ``window``: tokens that a token sees, its own counted."""

    model: SoftmaxAttention
    lengths: tuple[tuple[int, int], ...]
    window: int | None = None
    page: int = 16
    name: str = ""

    @property
    def words(self) -> str:
        m, (ctx, new) = self.model, self.lengths[0]
        sizes = self.name or f"B{len(self.lengths)} q{new} ctx{ctx}"
        window = f" window {self.window}" if self.window else ""
        return f"{sizes} {m.num_heads_q}/{m.num_heads_kv}x{m.head_dim}{window}, page {self.page}"

    @property
    def entry(self) -> dict[str, int | str]:
        """For the record."""
        new, older = sum(new for _, new in self.lengths), sum(ctx for ctx, _ in self.lengths)
        sizes = {"sequences": len(self.lengths), "tokens": new, "prefix": older, "window": self.window or 0}
        return {"model": self.model.name, "page": self.page, **sizes}

    @property
    def totals(self) -> list[int]:
        return [ctx + new for ctx, new in self.lengths]

    @property
    def max_seqlen_q(self) -> int:
        return max(new for _, new in self.lengths)

    @property
    def max_seqlen_k(self) -> int:
        return max(self.totals)

    @property
    def sides(self) -> tuple[int, int]:
        """The window as (left, right)."""
        return (self.window - 1 if self.window else -1), 0

    @property
    def scale(self) -> float:
        return self.model.head_dim**-0.5

    @property
    def flops(self) -> int:
        """Two products over each pair of a query and a key that it sees, whatever an implementation does."""
        pairs = sum(min(ctx + i + 1, self.window or math.inf) for ctx, new in self.lengths for i in range(new))
        return 4 * int(pairs) * self.model.num_heads_q * self.model.head_dim

    def bytes_moved(self, cache_dtype: torch.dtype = DTYPE) -> int:
        """q, the output, and each key and value that some row sees, once."""
        left, rows = self.sides[0], sum(new for _, new in self.lengths)
        keys = sum(ctx + new - (max(0, ctx - left) if self.window else 0) for ctx, new in self.lengths)
        m = self.model
        queries, cached = rows * m.num_heads_q * DTYPE.itemsize, keys * m.num_heads_kv * cache_dtype.itemsize
        return 2 * m.head_dim * (queries + cached)


class Ours(NamedTuple):
    """An output that must keep the house's bound."""

    out: torch.Tensor


class Quantised(NamedTuple):
    """One of ours, that must keep it beside the attention of queries rounded to 8 bits."""

    out: torch.Tensor


class Theirs(NamedTuple):
    """One of a peer, which is timed if it is no garbage."""

    out: torch.Tensor


class Reference(NamedTuple):
    """Sampled rows; in float64, and as plain PyTorch gives them."""

    rows: torch.Tensor
    exact: torch.Tensor
    plain: torch.Tensor


@dataclass(eq=False)
class Batch:
    """A ragged batch. Its pages [blocks, page, heads, elements] hold the new tokens too, copied in ``k``, ``v``.

    x_packed: the same pages as vLLM's older kernel takes them. tokens, token_starts, window_starts: where each older
    token lies in the pool of single tokens, where a sequence's begin in that list, and the position of its first.
    fp8, fp8_x_packed: the pages with 8-bit elements. one, k_scale, v_scale: [1] float32. schedule: FA3's, or None.
    """

    shape: Shape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seqlens_k: torch.Tensor
    one: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    x_packed: Tensors = ()
    tokens: torch.Tensor | None = None
    token_starts: torch.Tensor | None = None
    window_starts: torch.Tensor | None = None
    fp8: Tensors = ()
    fp8_x_packed: Tensors = ()
    schedule: torch.Tensor | None = None

    @cached_property
    def paged(self) -> Paged:
        """As peers take it; made once, as each call would pay for it."""
        shape = self.shape
        return Paged(
            self.q, self.k_cache, self.v_cache, self.block_table, self.cu_seqlens_q, self.seqlens_k, shape.max_seqlen_q,
            shape.max_seqlen_k, shape.scale, shape.sides if shape.window else None,
        )  # fmt: skip

    @cached_property
    def paged_fp8(self) -> Paged:
        """The same over the pages with 8-bit elements."""
        k_cache, v_cache = self.fp8
        return self.paged._replace(k_cache=k_cache, v_cache=v_cache)


@dataclass(frozen=True)
class Problem:
    """What one public function is called with. ``call(inputs, plan=None)``: benchmarks/tune.py pins other plans."""

    shape: Shape
    kind: str
    name: str
    make_inputs: Callable[[], Batch]
    call: Callable[..., Ours]
    bytes_moved: int


# Inputs


def make_batch(device: torch.device, shape: Shape, *, fp8: bool = False, x_packed: bool = False) -> Batch:
    """Random pages in random order, all of them used. ``fp8``: values that 8 bits hold, and pages of those too."""
    m = shape.model
    counts = [-(-total // shape.page) for total in shape.totals]
    pages = torch.randperm(sum(counts), device=device, dtype=torch.int32)
    # Past a sequence's last page stands page 0, as in an engine's tables.
    block_table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    for row, own in zip(block_table, pages.split(counts), strict=True):
        row[: len(own)] = own
    size = (sum(counts), shape.page, m.num_heads_kv, m.head_dim)
    small: Tensors = ()
    if fp8:
        scales = (K_SCALE, V_SCALE)
        small = tuple((torch.randn(size, device=device, dtype=DTYPE) / scale).to(CACHE_DTYPE) for scale in scales)
        k_cache, v_cache = (cache.to(DTYPE) * scale for cache, scale in zip(small, scales, strict=True))
    else:
        k_cache, v_cache = (torch.randn(size, device=device, dtype=DTYPE) for _ in range(2))
    spans = [(ctx, ctx + new) for ctx, new in shape.lengths]
    own = torch.cat([places(row, shape.page, *span) for row, span in zip(block_table, spans, strict=True)])
    batch = Batch(
        shape=shape,
        q=torch.randn(len(own), m.num_heads_q, m.head_dim, device=device, dtype=DTYPE),
        k=k_cache.flatten(0, 1)[own],
        v=v_cache.flatten(0, 1)[own],
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        cu_seqlens_q=cumulative(torch.tensor([new for _, new in shape.lengths])).to(device),
        seqlens_k=torch.tensor(shape.totals, dtype=torch.int32, device=device),
        one=torch.ones(1, device=device),
        k_scale=torch.tensor([K_SCALE], device=device),
        v_scale=torch.tensor([V_SCALE], device=device),
        fp8=small,
    )
    if x_packed:
        batch.x_packed = packed_by_x(k_cache, v_cache)
        batch.fp8_x_packed = packed_by_x(*small) if small else ()
    if has_peer("sglang"):
        add_tokens(batch)
    batch.schedule = peers.fa3_schedule(batch.paged)
    return batch


def places(pages: torch.Tensor, page: int, begin: int, end: int) -> torch.Tensor:
    """Where positions begin .. end - 1 of a sequence lie, in a pool of single tokens."""
    position = torch.arange(begin, end, device=pages.device)
    return pages[position // page].long() * page + position % page


def packed_by_x(k_cache: torch.Tensor, v_cache: torch.Tensor) -> Tensors:
    """Pages [blocks, page, H, D] as [blocks, H, D / x, page, x], 16 bytes together, and [blocks, H, D, page]."""
    keys = k_cache.unflatten(3, (-1, 16 // k_cache.itemsize)).permute(0, 2, 3, 1, 4)
    return keys.contiguous(), v_cache.permute(0, 2, 3, 1).contiguous()


def add_tokens(batch: Batch) -> None:
    """What sglang says of the older tokens: of a window those that some new token sees, all of them else."""
    shape, device = batch.shape, batch.q.device
    left = shape.sides[0]
    begins = [max(0, ctx - left) if left >= 0 else 0 for ctx, _ in shape.lengths]
    spans = [(begin, ctx) for begin, (ctx, _) in zip(begins, shape.lengths, strict=True)]
    batch.tokens = torch.cat([places(row, shape.page, *s) for row, s in zip(batch.block_table, spans, strict=True)])
    batch.token_starts = cumulative(torch.tensor([end - begin for begin, end in spans])).to(device)
    batch.window_starts = torch.tensor(begins, dtype=torch.int32, device=device)


# Implementations


def ours(batch: Batch, plan: Any = None) -> Ours:
    return Ours(over_pages(batch.paged, plan=plan))


def ours_fp8(batch: Batch, plan: Any = None) -> Ours:
    return Ours(over_pages(batch.paged_fp8, k_scale=batch.k_scale, v_scale=batch.v_scale, plan=plan))


def ours_widened(batch: Batch) -> Ours:
    scales = {"k_scale": batch.k_scale, "v_scale": batch.v_scale}
    return Ours(over_pages(batch.paged_fp8, **scales, widen_bytes=2**30))


def ours_quantised(batch: Batch) -> Quantised:
    scales = {"k_scale": batch.k_scale, "v_scale": batch.v_scale}
    return Quantised(over_pages(batch.paged_fp8, **scales, quantize_q=True))


def over_pages(i: Paged, **options: Any) -> torch.Tensor:
    """Ours, where the cache holds the new tokens already."""
    rest = (i.block_table, i.cu_seqlens_q, i.seqlens_k)
    out: torch.Tensor = prefix_prefill(
        i.q, None, None, i.k_cache, i.v_cache, *rest, max_seqlen_q=i.max_seqlen_q, max_seqlen_k=i.max_seqlen_k,
        window=i.window, softcap=i.softcap, sinks=i.sinks, **options,
    )  # fmt: skip
    return out


def ours_x_packed(batch: Batch) -> Ours:
    return Ours(engines(context_attention_fwd, batch, batch.x_packed, "auto", (batch.one, batch.one)))


def x_packed_by_plan(batch: Batch, plan: Any = None) -> Ours:
    """The same through the function that takes a plan."""
    i = batch.paged
    rest = (i.block_table, i.cu_seqlens_q, i.seqlens_k)
    return Ours(
        prefix_prefill(
            i.q, batch.k, batch.v, *batch.x_packed, *rest, max_seqlen_q=i.max_seqlen_q, page_layout="x-packed",
            window=i.window, plan=plan,
        )
    )  # fmt: skip


def engines(function: Any, batch: Batch, caches: Tensors, dtype: str, scales: Tensors) -> torch.Tensor:
    call = peers.by_engines_signature(function)
    return call(batch.paged, batch.k, batch.v, caches, dtype, scales, batch.shape.window)


def context(fp8: bool = False) -> Callable[[Batch], Theirs]:
    call = peers.context()

    def run(batch: Batch) -> Theirs:
        caches, dtype, scales = batch.x_packed, "auto", (batch.one, batch.one)
        if fp8:
            caches, dtype, scales = batch.fp8_x_packed, "fp8", (batch.k_scale, batch.v_scale)
        return Theirs(call(batch.paged, batch.k, batch.v, caches, dtype, scales, batch.shape.window))

    return run


def unified(fp8: bool = False) -> Callable[[Batch], Theirs]:
    call = peers.unified(fp8)
    if fp8:
        return lambda batch: Theirs(call(batch.paged_fp8, batch.k_scale, batch.v_scale))
    return lambda batch: Theirs(call(batch.paged, batch.one, batch.one))


def fa3(scheduled: bool = False) -> Callable[[Batch], Theirs]:
    call = peers.fa3()

    def run(batch: Batch) -> Theirs:
        if scheduled and batch.schedule is None:
            raise RuntimeError("FA3 made no schedule for these lengths")
        return Theirs(call(batch.paged, batch.schedule if scheduled else None))

    return run


def sglang() -> Callable[[Batch], Theirs]:
    call = peers.sglang()
    return lambda b: Theirs(call(b.paged, b.k, b.v, b.tokens, b.token_starts, b.window_starts))


# Their check

_kept: WeakKeyDictionary[Batch, dict[bool, Reference]] = WeakKeyDictionary()


def check(outputs: Ours | Quantised | Theirs, batch: Batch) -> float:
    """The largest error of a sampled row, over the row's largest value. Raises where it is more than may be."""
    in_8_bits = isinstance(outputs, Quantised)
    found = _kept.setdefault(batch, {})
    if in_8_bits not in found:
        found[in_8_bits] = reference(batch, quantised(batch.q).to(DTYPE) if in_8_bits else batch.q)
    rows, exact, plain = found[in_8_bits]
    got = outputs.out[rows]
    # A row that sees few keys holds values many times those of one that sees thousands, and would hide its errors: all
    # are scaled to one size, by powers of two, which change no digit.
    size = exact.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    factor = torch.exp2(-size.log2().round())
    if not isinstance(outputs, Theirs):
        assert_close_to_oracle(got * factor.to(got.dtype), exact * factor, plain * factor.to(plain.dtype))
    error = float(((got.double() - exact).abs() / size).max())
    if not error <= ERROR_AT_MOST:
        raise AssertionError(f"error {error:.2g} of a row's largest value > {ERROR_AT_MOST:g}")
    return error


def check_all(outputs: Mapping[str, Ours | Theirs], batches: Mapping[str, Batch]) -> float:
    """Of a case over several batches, of which an implementation may give some only."""
    return max(check(output, batches[name]) for name, output in outputs.items())


def reference(batch: Batch, q: torch.Tensor) -> Reference:
    shape = batch.shape
    rows = sampled_rows(shape).to(batch.q.device)
    keys, values = (gather(x, batch.block_table, batch.seqlens_k) for x in (batch.k_cache, batch.v_cache))
    exact = attention(
        q,
        keys.tokens,
        values.tokens,
        cu_seqlens_q=batch.cu_seqlens_q,
        cu_seqlens_k=keys.cu_seqlens,
        window=shape.sides,
        rows=rows,
    )
    plain = plain_attention(q, keys.tokens, values.tokens, shape, rows)
    return Reference(rows, exact.out, plain)


def sampled_rows(shape: Shape) -> torch.Tensor:
    """Each sequence's first row and its last, and some between."""
    found = []
    begins = accumulate((new for _, new in shape.lengths), initial=0)
    for begin, (_, new) in zip(begins, shape.lengths, strict=False):
        some = torch.randint(new, (1 + SAMPLE // len(shape.lengths),))
        found.append(begin + torch.cat([torch.tensor([0, new - 1]), some]).unique())
    return torch.cat(found)


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: Shape, rows: torch.Tensor
) -> torch.Tensor:
    """These rows as plain PyTorch gives them: products of 16-bit operands summed in float32, the softmax in float32.

    `attention` with a 16-bit compute_dtype would round scores and sums too, and so let errors pass that are many times
    those of a good kernel.
    """
    group = shape.model.num_heads_q // shape.model.num_heads_kv
    outs = []
    ends = zip(accumulate(new for _, new in shape.lengths), accumulate(shape.totals), shape.lengths, strict=True)
    for end, end_k, (ctx, new) in ends:
        own = rows[(rows >= end - new) & (rows < end)]
        keys, values = (x[end_k - ctx - new : end_k].float() for x in (k, v))
        position = own - end + ctx + new
        distance = torch.arange(ctx + new, device=q.device) - position[:, None]
        seen = (distance <= 0) & (distance >= -(shape.window or ctx + new) + 1)
        for one in range(len(own)):
            # Row by row, and keys that it does not see left out: a long prefix has scores for all heads at once then.
            kept = seen[one]
            query = q[own[one]].float().unflatten(0, (-1, group))
            scores = torch.einsum("hgd,nhd->hgn", query, keys[kept]) * shape.scale
            weights = torch.exp(scores - scores.amax(-1, keepdim=True))
            sums = torch.einsum("hgn,nhd->hgd", weights.to(DTYPE).float(), values[kept])
            outs.append((sums / weights.sum(-1, keepdim=True)).flatten(0, 1))
    return torch.stack(outs).to(DTYPE)


# Cases


def prefill_case(device: torch.device, shape: Shape, against_context: float) -> Case:
    """Ours in both layouts beside everyone; ``against_context``: the target speed against vLLM's older kernel."""
    return Case(
        name=shape.words,
        shape=shape.entry,
        make_inputs=partial(make_batch, device, shape, x_packed=True),
        ours={OURS: ours, OURS_X_PACKED: ours_x_packed},
        peers={
            FA3: fa3,
            FA3_SCHEDULED: partial(fa3, scheduled=True),
            CONTEXT: context,
            UNIFIED: unified,
            SGLANG: sglang,
        },
        check=check,
        # The bound is the check's own, which raises; of all cases here.
        tolerance=math.inf,
        bytes_moved=shape.bytes_moved(),
        flops=shape.flops,
        copy=False,
        baseline=FA3,
        requirements=(
            Requirement(OURS, FA3, speed_at_least=0.75),
            Requirement(OURS, CONTEXT, speed_at_least=against_context),
            Requirement(OURS_X_PACKED, CONTEXT, speed_at_least=against_context),
        ),
    )


def fp8_case(device: torch.device, shape: Shape) -> Case:
    return Case(
        name=f"fp8 cache, {shape.words}",
        shape={**shape.entry, "cache": "float8_e4m3fn"},
        make_inputs=partial(make_batch, device, shape, fp8=True, x_packed=has_peer("vllm")),
        ours={OURS_FP8: ours_fp8, OURS_WIDENED: ours_widened, OURS_QUANTISED: ours_quantised, OURS: ours},
        peers={
            FA3_BF16: fa3,
            CONTEXT_FP8: partial(context, fp8=True),
            UNIFIED_FP8: partial(unified, fp8=True),
        },
        check=check,
        tolerance=math.inf,
        bytes_moved=shape.bytes_moved(CACHE_DTYPE),
        flops=shape.flops,
        copy=False,
        baseline=OURS,
        requirements=(
            Requirement(OURS_FP8, OURS, speed_at_least=0.97),
            Requirement(OURS_WIDENED, OURS, speed_at_least=0.97),
            Requirement(OURS_QUANTISED, OURS_FP8, speed_at_least=1.4),
        ),
    )


def decode_case(device: torch.device, shape: Shape) -> Case:
    """One new token a sequence, which reads the prefix and computes hardly anything: a copy is what it compares to."""
    return Case(
        name=shape.words,
        shape=shape.entry,
        make_inputs=partial(make_batch, device, shape),
        ours={OURS: ours},
        peers={FA3: fa3, FA3_SCHEDULED: partial(fa3, scheduled=True), UNIFIED: unified},
        check=check,
        tolerance=math.inf,
        bytes_moved=shape.bytes_moved(),
        flops=shape.flops,
        baseline=FA3,
        requirements=(Requirement(OURS, FA3, time_at_most=1.15),),
    )


def each_of(call: Callable[[Batch], Any], *names: str) -> Callable[[Mapping[str, Batch]], dict[str, Any]]:
    """``call`` on these batches of several, one after the other."""
    return lambda batches: {name: call(batches[name]) for name in names}


def peer_on(peer: Callable[[], Callable[[Batch], Any]], name: str) -> Callable[[], Callable[..., Any]]:
    return lambda: each_of(peer(), name)


def mixed_inputs(device: torch.device, shape: Shape) -> dict[str, Batch]:
    """A batch, its first sequence alone and all the others alone, over one cache."""
    mixed = make_batch(device, shape)
    first = shape.lengths[0][1]
    found = {"mixed": mixed}
    for name, rows, sequences in (("chunk", slice(first), slice(1)), ("decode", slice(first, None), slice(1, None))):
        part = replace(
            mixed,
            shape=replace(shape, lengths=shape.lengths[sequences]),
            q=mixed.q[rows],
            k=mixed.k[rows],
            v=mixed.v[rows],
            block_table=mixed.block_table[sequences],
            cu_seqlens_q=cumulative(torch.tensor([new for _, new in shape.lengths[sequences]])).to(device),
            seqlens_k=mixed.seqlens_k[sequences],
            schedule=None,
        )
        found[name] = part
    return found


def mixed_case(device: torch.device, shape: Shape) -> Case:
    """One call over a chunk and rows that decode, beside one over each."""
    parts = f"{OURS}, the chunk and then the others"
    return Case(
        name=shape.words,
        shape=shape.entry,
        make_inputs=partial(mixed_inputs, device, shape),
        ours={OURS: each_of(ours, "mixed"), parts: each_of(ours, "chunk", "decode")},
        peers={
            FA3: peer_on(fa3, "mixed"),
            FA3_SCHEDULED: peer_on(partial(fa3, scheduled=True), "mixed"),
            UNIFIED: peer_on(unified, "mixed"),
        },
        check=check_all,
        tolerance=math.inf,
        bytes_moved=shape.bytes_moved(),
        flops=shape.flops,
        copy=False,
        baseline=FA3,
        requirements=(Requirement(OURS, parts, time_at_most=1.15), Requirement(OURS, FA3, speed_at_least=0.75)),
    )


def window_inputs(device: torch.device, shape: Shape, contexts: Sequence[int]) -> dict[str, Batch]:
    """The same new tokens over one cache behind these many older ones."""
    longest = make_batch(device, replace(shape, lengths=((max(contexts), shape.max_seqlen_q),)))
    found = {}
    for ctx in contexts:
        one = replace(shape, lengths=((ctx, shape.max_seqlen_q),))
        batch = replace(longest, shape=one, seqlens_k=longest.seqlens_k - (max(contexts) - ctx))
        batch.schedule = peers.fa3_schedule(batch.paged)
        found[shown(ctx)] = batch
    return found


def shown(ctx: int) -> str:
    return f"{ctx // 1024}k" if ctx >= 1024 else str(ctx)


def window_case(device: torch.device, shape: Shape, contexts: Sequence[int]) -> Case:
    """What lies before the window must cost nothing."""
    labels = {shown(ctx): f"{OURS}, behind {shown(ctx)}" for ctx in contexts}
    first, *others = labels.values()
    return Case(
        name=shape.words,
        shape=shape.entry,
        make_inputs=partial(window_inputs, device, shape, contexts),
        ours={label: each_of(ours, name) for name, label in labels.items()},
        peers={f"{FA3}, behind {shown(ctx)}": peer_on(fa3, shown(ctx)) for ctx in (contexts[0], contexts[-1])},
        check=check_all,
        tolerance=math.inf,
        bytes_moved=shape.bytes_moved(),
        flops=shape.flops,
        copy=False,
        baseline=first,
        requirements=[Requirement(other, first, time_at_most=1.1) for other in others],
    )


# Merging


@dataclass(eq=False)
class Parts:
    """Results over two halves of the keys."""

    out_a: torch.Tensor
    lse_a: torch.Tensor
    out_b: torch.Tensor
    lse_b: torch.Tensor


def make_parts(device: torch.device, model: SoftmaxAttention, tokens: int) -> Parts:
    outs = [torch.randn(tokens, model.num_heads_q, model.head_dim, device=device, dtype=DTYPE) for _ in range(2)]
    lses = [torch.randn(model.num_heads_q, tokens, device=device) for _ in range(2)]
    return Parts(outs[0], lses[0], outs[1], lses[1])


def ours_merged(i: Parts) -> Tensors:
    return tuple(merge_attention_states(i.out_a, i.lse_a, i.out_b, i.lse_b))


def check_merged(outputs: Tensors, i: Parts) -> float:
    parts = (i.out_a, i.lse_a, i.out_b, i.lse_b)
    exact = merge_reference(*parts)
    plain = merge_reference(*parts, compute_dtype=torch.float32)
    assert_close_to_oracle(outputs[0], exact.out, plain.out.to(DTYPE))
    assert_close_to_oracle(outputs[1], exact.lse, plain.lse, what="lse")
    return float((outputs[0].double() - exact.out).abs().max() / exact.out.abs().max())


def merge_case(device: torch.device, model: SoftmaxAttention, tokens: int) -> Case:
    elements = tokens * model.num_heads_q
    return Case(
        name=f"merge two parts, {tokens} tokens {model.num_heads_q}x{model.head_dim}",
        shape={"model": model.name, "tokens": tokens},
        make_inputs=partial(make_parts, device, model, tokens),
        ours={OURS: ours_merged},
        peers={},
        check=check_merged,
        tolerance=math.inf,
        # Two parts read and one result written.
        bytes_moved=3 * elements * (model.head_dim * DTYPE.itemsize + 4),
    )


# What is measured

# (sequences, new, older, window), and the target speed against vLLM's older kernel.
PREFILLS: tuple[tuple[SoftmaxAttention, int, int, int, int | None, float], ...] = (
    (LLAMA3_8B, 1, 2048, 0, None, 2.5),
    (LLAMA3_8B, 1, 8192, 0, None, 2.5),
    (LLAMA3_8B, 1, 2048, 30720, None, 3.0),
    (TP8, 1, 512, 131072, None, 8.0),
    (LLAMA3_8B, 16, 256, 4096, None, 3.0),
    (LLAMA3_8B, 4, 1024, 16384, 4096, 8.0),
    (GPT_OSS_TP4, 8, 512, 8192, None, 3.0),
)
MIXED = (CHUNK, *[DECODING] * 31)
CONTEXTS = (16384, 32768, 65536, 131072)
PAGES = (16, 64)


def prefill_shapes(page: int) -> list[Shape]:
    return [Shape(model, ((ctx, new),) * b, window, page) for model, b, new, ctx, window, _ in PREFILLS]


def mixed_shape() -> Shape:
    return Shape(LLAMA3_8B, MIXED, name="a chunk of 2048 behind 30720, 31 of 1 behind 8192,")


def problem(device: torch.device, shape: Shape, kind: str = "paged") -> Problem:
    call = {"paged": ours, "fp8": ours_fp8, "x-packed": x_packed_by_plan}[kind]
    make_inputs = partial(make_batch, device, shape, fp8=kind == "fp8", x_packed=kind == "x-packed")
    moved = shape.bytes_moved(CACHE_DTYPE if kind == "fp8" else DTYPE)
    return Problem(shape, kind, f"{kind}, {shape.words}", make_inputs, call, moved)


def problems(device: torch.device) -> Iterator[Problem]:
    """What is worth a plan of its own, for benchmarks/tune.py: the shapes of `cases`, and some between them."""
    for shape in prefill_shapes(PAGES[0]):
        for kind in ("paged", "x-packed", "fp8"):
            yield problem(device, shape, kind)
    for shape in prefill_shapes(PAGES[1]):
        yield problem(device, shape)
    for kind in ("paged", "fp8"):
        yield problem(device, Shape(LLAMA3_8B, (DECODING,) * 31), kind)
        yield problem(device, Shape(TP8, ((131072, 1),)), kind)
        yield problem(device, Shape(TP8, ((8192, 1),) * 64), kind)
    yield problem(device, mixed_shape())
    # Drafts of speculative decoding.
    yield problem(device, Shape(LLAMA3_8B, ((8192, 5),) * 16))


def cases(device: torch.device) -> Iterator[Case]:
    for page in PAGES:
        for shape, (*_, target) in zip(prefill_shapes(page), PREFILLS, strict=True):
            yield prefill_case(device, shape, target)
    decoding = Shape(LLAMA3_8B, (DECODING,) * 31)
    for shape in (*prefill_shapes(PAGES[0])[2:5], decoding):
        yield fp8_case(device, shape)
    yield decode_case(device, decoding)
    yield mixed_case(device, mixed_shape())
    by_context = Shape(LLAMA3_8B, ((CONTEXTS[0], 2048),), 4096, name="B1 q2048 by context")
    yield window_case(device, by_context, CONTEXTS)
    yield merge_case(device, LLAMA3_8B, 8192)


def summary(records: Iterable[Record]) -> Iterator[str]:
    """The geometric mean of the speed against FA3 over the seven shapes, for each page; the target is 0.82."""
    times = {(record.case, record.implementation): record.median_us for record in records if record.median_us}
    for page in PAGES:
        names = [shape.words for shape in prefill_shapes(page)]
        for ours_label in (OURS, OURS_X_PACKED):
            pairs = [(times.get((name, FA3)), times.get((name, ours_label))) for name in names]
            speeds = [fa3_us / us for fa3_us, us in pairs if fa3_us and us]
            if speeds:
                mean = math.exp(sum(map(math.log, speeds)) / len(speeds))
                verdict = "met" if mean >= 0.82 else "MISSED"
                target = f", target 0.82: {verdict}" if ours_label == OURS else ""
                yield f"page {page}, {ours_label}: {mean:.3f} of FA3 over {len(speeds)} of {len(names)} shapes{target}"


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit("give one record, such as benchmarks/results/prefix-prefill.jsonl")
    print(*summary(load(sys.argv[1])), sep="\n")
