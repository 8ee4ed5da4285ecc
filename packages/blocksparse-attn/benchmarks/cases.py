"""The benchmark of blocksparse-attn: Phi-3-small's layer, beside vLLM's old kernel, FlexAttention and dense FA3.

FLOP are four times the head size for every pair of a query and a key that it sees, so half the pairs of a block on the
diagonal; for FA3 over all keys n tokens have n (n + 1) / 2. A requirement in terms of FA3's rate is therefore a ratio
of times, multiplied by the share of pairs that the pattern keeps. The sweep over densities counts whole blocks, those
on the diagonal too. Bytes are q, the output, and, once, each key and value that some query head of its kv head sees.

Results are compared with float64 on sampled rows of every sequence, with the pattern taken from the reference, not from
the layout. Ours must keep the repository's bound there; a peer's error is recorded, and must only not be garbage.

``python benchmarks/cases.py benchmarks/results/blocksparse-attn.jsonl`` summarises a record: rates on the pairs seen,
the time of a block at every density, and the density below which a layout pays off.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import peers
import selected_cases
import torch
from peers import FLEX, VLLM, takes_vllm

from blocksparse_attn import BlockLayout, blocksparse_attention
from kernel_reference import blocks
from kernel_reference.attention import attention
from kernel_reference.bench import Case, Requirement
from kernel_reference.bench.record import Record, load
from kernel_reference.integers import is_power_of_two
from kernel_reference.models import PHI3_SMALL, BlockSparseAttention
from kernel_reference.testing.numerics import assert_close_to_oracle

OURS, FA3 = "blocksparse-attn", "FA3, all keys"
DTYPE = torch.bfloat16
# A peer's largest error, over the row's largest value, above which its result is garbage.
ERROR_AT_MOST = 0.05
# Sampled rows, of all sequences together, besides each one's first and last.
SAMPLE = 32

Tensors = tuple[torch.Tensor, ...]


class Work(NamedTuple):
    """What a pattern leaves of one sequence, all heads together; ``keys``: those that some head of a kv head sees."""

    blocks: int
    pairs: int
    keys: int


@dataclass(frozen=True)
class Shape:
    """``sequences`` of ``new`` tokens after ``ctx`` older ones; ``page`` 0: not in a paged cache."""

    model: BlockSparseAttention
    sequences: int
    ctx: int
    new: int
    page: int = 0

    @property
    def words(self) -> str:
        m = self.model
        what = f"q{self.new} ctx{self.ctx}"
        if self.new == 1:
            what = f"decode n{self.total}"
        elif not self.ctx:
            what = f"prefill n{self.total}"
        paged = f", page {self.page}" if self.page else ""
        return f"B{self.sequences} {what} {m.num_heads_q}/{m.num_heads_kv}x{m.head_dim}{paged}"

    @property
    def entry(self) -> dict[str, int | str]:
        """For the record."""
        m = self.model
        pattern = {"block": m.block_size, "local": m.local_blocks, "stride": m.vert_stride}
        lengths = {"sequences": self.sequences, "tokens": self.new, "prefix": self.ctx}
        counted = {"page": self.page, "blocks": self.work.blocks, "pairs": self.work.pairs, "all_pairs": self.all_pairs}
        return {"model": m.name, **pattern, **lengths, **counted}

    @property
    def total(self) -> int:
        return self.ctx + self.new

    @property
    def scale(self) -> float:
        return float(self.model.head_dim**-0.5)

    def mask(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """The pattern as the reference has it: [heads, rows, columns]."""
        m = self.model
        return blocks.local_strided(m.num_heads_q, self.total, m.local_blocks, m.vert_stride, m.block_size).to(device)

    def layout(self, device: torch.device | str) -> BlockLayout:
        m = self.model
        sizes = (m.num_heads_q, self.total, m.local_blocks, m.vert_stride, m.block_size)
        return BlockLayout.local_strided(*sizes, device=device)

    @property
    def work(self) -> Work:
        return work_of(self)

    @property
    def all_pairs(self) -> int:
        """Those of causal attention to all keys, of one sequence."""
        return self.model.num_heads_q * (self.new * self.ctx + self.new * (self.new + 1) // 2)

    @property
    def share(self) -> float:
        return self.work.pairs / self.all_pairs

    @property
    def flops(self) -> int:
        return 4 * self.model.head_dim * self.sequences * self.work.pairs

    @property
    def bytes_moved(self) -> int:
        queries = self.new * self.model.num_heads_q
        return 2 * self.sequences * (queries + self.work.keys) * self.model.head_dim * DTYPE.itemsize


@cache
def work_of(shape: Shape) -> Work:
    mask, size = shape.mask(), shape.model.block_size
    first = shape.ctx // size
    seen = mask[:, first:].tril(first)
    position = torch.arange(shape.ctx, shape.total)
    queries = torch.bincount(position // size, minlength=seen.shape[1] + first)[first:]
    # On the diagonal a query sees the keys of its block up to its own.
    diagonal = seen.diagonal(first, 1, 2)
    own = torch.zeros_like(queries).index_add_(0, position // size - first, position % size + 1)
    whole = (seen.sum(2) - diagonal.long()) * size
    read = seen.any(1).unflatten(0, (shape.model.num_heads_kv, -1)).any(1)
    ends = (torch.arange(1, mask.shape[2] + 1) * size).clamp(max=shape.total)
    sizes = ends.diff(prepend=ends.new_zeros(1))
    pairs = (whole * queries).sum() + (diagonal * own).sum()
    return Work(int(seen.sum()), int(pairs), int((read * sizes).sum()))


class Ours(NamedTuple):
    """An output that must keep this repository's bound of errors."""

    out: torch.Tensor


class Theirs(NamedTuple):
    """A peer's, which is timed unless it is garbage; FlexAttention's is [B, Hq, new, D]."""

    out: torch.Tensor


class AllKeys(NamedTuple):
    """That of a peer that attends to all keys, and is compared with that."""

    out: torch.Tensor


class Reference(NamedTuple):
    """Sampled rows; in float64, and as plain PyTorch gives them."""

    rows: torch.Tensor
    exact: torch.Tensor
    plain: torch.Tensor


@dataclass(eq=False)
class Batch:
    """Sequences one after another, and ``pages``: keys, values and block table of a paged cache that holds the same.

    mask: the pattern as the reference has it. theirs: the layout's lists in the dtype in which vLLM makes them.
    """

    shape: Shape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seqlens_k: torch.Tensor
    layout: BlockLayout
    mask: torch.Tensor
    theirs: Tensors = ()
    pages: Tensors = ()


@dataclass(frozen=True)
class Problem:
    """What the public function is called with. ``call(inputs, plan=None)``: benchmarks/tune.py pins other plans."""

    shape: Shape
    name: str
    make_inputs: Callable[[], Batch]
    call: Callable[..., Ours]
    bytes_moved: int


# Inputs


def make_batch(device: torch.device, shape: Shape) -> Batch:
    m, b = shape.model, shape.sequences
    sizes = ((shape.new, m.num_heads_q), (shape.total, m.num_heads_kv), (shape.total, m.num_heads_kv))
    q, k, v = (torch.randn(b * n, heads, m.head_dim, device=device, dtype=DTYPE) for n, heads in sizes)
    order = torch.arange(b + 1, dtype=torch.int32, device=device)
    layout = shape.layout(device)
    return Batch(
        shape=shape,
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=order * shape.new,
        cu_seqlens_k=order * shape.total,
        seqlens_k=torch.full((b,), shape.total, dtype=torch.int32, device=device),
        layout=layout,
        mask=shape.mask(device),
        theirs=(layout.crow.long(), layout.col.long()) if peers.has_peer("vllm") and not shape.page else (),
        pages=paged(k, v, b, shape.page) if shape.page else (),
    )


def paged(k: torch.Tensor, v: torch.Tensor, sequences: int, page: int) -> Tensors:
    """Pages in random order, all of them used: [pages, page, Hkv, D] twice, and [B, pages of one] int32."""
    if k.shape[0] % (sequences * page):
        raise ValueError(f"sequences must be whole pages of {page}, got {k.shape[0]} tokens of {sequences}")
    place = torch.randperm(k.shape[0] // page, device=k.device)
    caches = [torch.empty_like(x).unflatten(0, (-1, page)) for x in (k, v)]
    for cache_, x in zip(caches, (k, v), strict=True):
        cache_[place] = x.unflatten(0, (-1, page))
    return *caches, place.to(torch.int32).view(sequences, -1)


# Implementations


def ours(batch: Batch, plan: Any = None) -> Ours:
    shape = batch.shape
    where: dict[str, Any] = {"cu_seqlens_k": batch.cu_seqlens_k}
    k, v = batch.k, batch.v
    if shape.page:
        k, v, block_table = batch.pages
        where = {"block_table": block_table, "seqlens_k": batch.seqlens_k}
    out = blocksparse_attention(
        batch.q, k, v, batch.layout, cu_seqlens_q=batch.cu_seqlens_q, max_seqlen_q=shape.new, plan=plan, **where
    )
    return Ours(out)


def vllm() -> Callable[[Batch], Theirs]:
    kernel = peers.vllm()

    def call(batch: Batch) -> Theirs:
        shape = batch.shape
        lists = peers.Lists(*batch.theirs, shape.model.block_size)
        return Theirs(kernel(batch.q, batch.k, batch.v, batch.cu_seqlens_k, shape.scale, lists, shape.total))

    return call


def fa3() -> Callable[[Batch], AllKeys]:
    kernel = peers.fa3()

    def call(batch: Batch) -> AllKeys:
        shape = batch.shape
        k, v = batch.k, batch.v
        where: dict[str, Any] = {"cu_seqlens_k": batch.cu_seqlens_k}
        if shape.page:
            k, v, block_table = batch.pages
            where = {"block_table": block_table, "seqused_k": batch.seqlens_k}
        queries = peers.Queries(batch.q, batch.cu_seqlens_q, shape.new)
        return AllKeys(kernel(queries, k, v, shape.total, shape.scale, True, **where))

    return call


def flex(shape: Shape, size: tuple[int, int], device: torch.device) -> Callable[[Batch], Theirs]:
    m = shape.model
    kernel = peers.flex(
        lambda: peers.Pattern(
            shape.mask(device), m.block_size, m.local_blocks, m.vert_stride, shape.ctx, shape.new
        ),
        size,
    )  # fmt: skip

    def call(batch: Batch) -> Theirs:
        q, k, v = (x.unflatten(0, (shape.sequences, -1)).transpose(1, 2) for x in (batch.q, batch.k, batch.v))
        return Theirs(kernel(q, k, v, shape.scale))

    return call


# The check

_kept: WeakKeyDictionary[Batch, dict[bool, Reference]] = WeakKeyDictionary()


def check(outputs: Ours | Theirs | AllKeys, batch: Batch) -> float:
    """The largest error of a sampled row, over the row's largest value. Raises where it is more than may be."""
    all_keys = isinstance(outputs, AllKeys)
    kept = _kept.setdefault(batch, {})
    if all_keys not in kept:
        kept[all_keys] = reference(batch, all_keys)
    rows, exact, plain = kept[all_keys]
    out = outputs.out
    got = (out.transpose(1, 2).flatten(0, 1) if out.ndim == 4 else out)[rows]
    # A row that sees few keys holds values many times those of one that sees thousands, and would hide its errors: rows
    # are scaled to one size by powers of two, which is exact.
    size = exact.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    factor = torch.exp2(-size.log2().round())
    if isinstance(outputs, Ours):
        assert_close_to_oracle(got * factor.to(got.dtype), exact * factor, plain * factor.to(plain.dtype))
    error = float(((got.double() - exact).abs() / size).max())
    if not error <= ERROR_AT_MOST:
        raise AssertionError(f"error {error:.2g} of a row's largest value > {ERROR_AT_MOST:g}")
    return error


def reference(batch: Batch, all_keys: bool) -> Reference:
    shape = batch.shape
    rows = sampled_rows(shape).to(batch.q.device)
    mask = torch.ones_like(batch.mask) if all_keys else batch.mask
    size = shape.model.block_size
    exact = attention(
        batch.q,
        batch.k,
        batch.v,
        cu_seqlens_q=batch.cu_seqlens_q,
        cu_seqlens_k=batch.cu_seqlens_k,
        causal=True,
        mask=blocks.mask_function(mask, size, size),
        rows=rows,
    )
    return Reference(rows, exact.out, plain_attention(batch, mask, rows))


def sampled_rows(shape: Shape) -> torch.Tensor:
    """Each sequence's first row and its last, and some between."""
    found = []
    for sequence in range(shape.sequences):
        some = torch.randint(shape.new, (1 + SAMPLE // shape.sequences,))
        found.append(sequence * shape.new + torch.cat([torch.tensor([0, shape.new - 1]), some]).unique())
    return torch.cat(found)


def plain_attention(batch: Batch, mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """These rows as plain PyTorch gives them: products of 16-bit operands summed in float32, the softmax in float32.

    `attention` with a 16-bit compute_dtype would round scores and sums too, and so let errors pass that are many times
    those of a good kernel.
    """
    shape, m = batch.shape, batch.shape.model
    outs = []
    for row in rows.tolist():
        sequence, place = divmod(row, shape.new)
        position = shape.ctx + place
        own = slice(sequence * shape.total, sequence * shape.total + position + 1)
        keys, values = batch.k[own], batch.v[own]
        seen = mask[:, position // m.block_size].repeat_interleave(m.block_size, dim=1)[:, : position + 1]
        query = batch.q[row].float().unflatten(0, (m.num_heads_kv, -1))
        scores = torch.einsum("hgd,nhd->hgn", query, keys.float()) * shape.scale
        scores = scores.masked_fill(~seen.view_as(scores), -torch.inf)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        sums = torch.einsum("hgn,nhd->hgd", weights.to(DTYPE).float(), values.float())
        outs.append((sums / weights.sum(-1, keepdim=True)).flatten(0, 1))
    return torch.stack(outs).to(DTYPE)


# Cases


def attention_case(
    device: torch.device,
    shape: Shape,
    *,
    of_fa3: float | None = None,
    of_vllm: float | None = None,
    of_copy: float | None = None,
) -> Case:
    """Ours beside whoever takes such a batch.

    of_fa3: the target share of FA3's rate on all keys, in FLOP of pairs seen by each; of_vllm, of_copy: target speeds.
    """
    beside: dict[str, Callable[[], Callable[[Any], Any]]] = {FA3: fa3}
    if takes_vllm(shape.ctx, shape.new, shape.page):
        beside[VLLM] = vllm
    # To decode over a paged cache it would need a copy of the cache.
    m = shape.model
    takes_flex = is_power_of_two(m.head_dim)
    flexible = {name: size for name, size in FLEX.items() if takes_flex and not any(n % m.block_size for n in size)}
    if not (shape.page and shape.new == 1):
        beside |= {label: partial(flex, shape, size, device) for label, size in flexible.items()}
    requirements = []
    if of_fa3 is not None:
        requirements.append(Requirement(OURS, FA3, speed_at_least=round(of_fa3 / shape.share, 3)))
        requirements += [Requirement(OURS, label, speed_at_least=1.0) for label in flexible]
    if of_vllm is not None:
        requirements.append(Requirement(OURS, VLLM, speed_at_least=of_vllm))
    if of_copy is not None:
        requirements.append(Requirement(OURS, speed_at_least=of_copy))
    return Case(
        name=shape.words,
        shape=shape.entry,
        make_inputs=partial(make_batch, device, shape),
        ours={OURS: ours},
        peers=beside,
        check=check,
        # The bound is the check's own, which raises; of all cases of attention here.
        tolerance=math.inf,
        bytes_moved=shape.bytes_moved,
        flops=shape.flops,
        copy=shape.new == 1,
        baseline=FA3,
        requirements=requirements,
    )


# The sweep over densities


def at_density(shape: Shape, local: int, stride: int) -> Shape:
    return replace(shape, model=replace(shape.model, local_blocks=local, vert_stride=stride))


def random_mask(shape: Shape) -> torch.Tensor:
    """About as many blocks as the pattern has, at random up to the diagonal; the same in every run."""
    rows = -(-shape.total // shape.model.block_size)
    generator = torch.Generator().manual_seed(0)
    share = entries_of(shape) / entries_of(at_density(shape, 1, 1))
    some = torch.rand(shape.model.num_heads_q, rows, rows, generator=generator) < share
    return (some | torch.eye(rows, dtype=torch.bool)).tril()


def densities(shape: Shape, patterns: Iterable[tuple[int, int]]) -> dict[str, Shape]:
    """The shape under each pattern, by the share of the blocks that it keeps, in words."""
    found = {}
    for one in (at_density(shape, *pattern) for pattern in patterns):
        share = entries_of(one) / entries_of(at_density(shape, 1, 1))
        found[f"{100 * share:.0f} % of blocks"] = one
    return found


RANDOM = "random blocks"


def sweep_inputs(device: torch.device, shape: Shape, shapes: Mapping[str, Shape]) -> dict[str, Batch]:
    """One set of tokens under every pattern."""
    batch = make_batch(device, shape)
    found = {
        name: replace(batch, shape=one, layout=one.layout(device), mask=one.mask(device), theirs=())
        for name, one in shapes.items()
    }
    mask = random_mask(shape).to(device)
    size = shape.model.block_size
    found[RANDOM] = replace(batch, layout=BlockLayout.from_mask(mask, size, size), mask=mask, theirs=())
    return found


def on(name: str, call: Callable[[Batch], Any]) -> Callable[[Mapping[str, Batch]], dict[str, Any]]:
    return lambda batches: {name: call(batches[name])}


def fa3_on(name: str) -> Callable[[Mapping[str, Batch]], dict[str, Any]]:
    return on(name, fa3())


def check_all(outputs: Mapping[str, Any], batches: Mapping[str, Batch]) -> float:
    return max(check(output, batches[name]) for name, output in outputs.items())


def sweep_case(device: torch.device, shape: Shape, patterns: Iterable[tuple[int, int]]) -> Case:
    """Time must be proportional to the number of blocks: that of a block at most 1.15 of the densest pattern's.

    The FLOP differ by implementation, and the record of a case has but one number of them: it has none. Blocks stand in
    its ``shape``.
    """
    shapes = densities(shape, patterns)
    counts = {name: entries_of(one) for name, one in shapes.items()}
    densest = max(counts, key=counts.__getitem__)
    counts[RANDOM] = int(random_mask(shape).sum())
    targets = [
        Requirement(label(name), label(densest), time_at_most=round(1.15 * count / counts[densest], 4))
        for name, count in counts.items()
        if name not in (densest, RANDOM)
    ]
    # Tiles walk what either of two rows lists, of which a consumer skips what its own does not.
    targets += [Requirement(label(RANDOM), label(name), time_at_most=1.7) for name in counts if name.startswith("18 %")]
    return Case(
        name=f"by density, {shape.words}",
        shape={"model": shape.model.name, "tokens": shape.total, "all_blocks": counts[densest], **counts},
        make_inputs=partial(sweep_inputs, device, shape, shapes),
        ours={label(name): on(name, ours) for name in counts},
        peers={FA3: partial(fa3_on, densest)},
        check=check_all,
        tolerance=math.inf,
        bytes_moved=shapes[densest].bytes_moved,
        copy=False,
        baseline=FA3,
        requirements=targets,
    )


def label(name: str) -> str:
    return f"{OURS}, {name}"


# Building a layout


class Lists(NamedTuple):
    crow: torch.Tensor
    col: torch.Tensor


# More than the builders cache, so that each is built.
LENGTHS = 16
_turns = itertools.count()


def built(shape: Shape) -> Callable[[torch.Tensor], Lists]:
    """Build the layout of the shape, or of up to 15 blocks more, and wait for it."""

    def call(where: torch.Tensor) -> Lists:
        size = shape.model.block_size
        longer = replace(shape, ctx=0, new=shape.total + size * (next(_turns) % LENGTHS))
        layout = longer.layout(where.device)
        # The first use, a sync; it also keeps the call out of CUDA graphs.
        int(layout.col[-1, -1])
        return Lists(layout.crow, layout.col)

    return call


def check_lists(lists: Lists, _: torch.Tensor, *, shape: Shape) -> float:
    """The share of entries that differ from the reference's lists."""
    size = shape.model.block_size
    longer = replace(shape, ctx=0, new=(lists.crow.shape[1] - 1) * size)
    wanted = blocks.mask_to_csr(longer.mask(lists.crow.device))
    if [x.shape for x in wanted] != [x.shape for x in lists]:
        raise AssertionError("not as many columns as the reference lists")
    return max(float((got != want).double().mean()) for got, want in zip(lists, wanted, strict=True))


def layout_case(device: torch.device, shape: Shape) -> Case:
    """From arguments to the first use of the lists: host time counts, so nothing is captured into a CUDA graph."""
    m, rows = shape.model, -(-shape.total // shape.model.block_size)
    entries = entries_of(shape)
    return Case(
        name=f"layout of {m.num_heads_q} heads, {shape.total} tokens",
        shape={"model": m.name, "tokens": shape.total, "blocks": entries},
        make_inputs=partial(torch.empty, 1, device=device),
        ours={OURS: built(shape)},
        peers={},
        check=partial(check_lists, shape=shape),
        bytes_moved=4 * (entries + m.num_heads_q * (rows + 1)),
        copy=False,
        baseline=OURS,
        requirements=(Requirement(OURS, OURS, us_at_most=50_000),),
    )


@cache
def entries_of(shape: Shape) -> int:
    """Blocks listed, over all heads, computed without a layout: that is built when its case runs."""
    m, rows = shape.model, -(-shape.total // shape.model.block_size)
    local = min(m.local_blocks, rows)
    # Rows have local blocks, the first ones fewer; a vertical block is seen, beyond those, from row j + local on.
    count = m.num_heads_q * (rows * local - local * (local - 1) // 2)
    step = max(1, m.vert_stride // m.num_heads_q)
    for head in range(m.num_heads_q):
        count += sum(rows - j - local for j in range((-head * step - 1) % m.vert_stride, rows - local, m.vert_stride))
    return count


# What is measured

PREFILLS = ((8192, 0.60), (32768, 0.80))
DECODE = Shape(PHI3_SMALL, 32, 32767, 1)
CHUNK = Shape(PHI3_SMALL, 1, 30720, 2048, page=16)
LONGEST = Shape(PHI3_SMALL, 1, 0, 131072)
# Local blocks and the stride of vertical ones: 5, 9, 18, 30, 53 and 100 % of the blocks of 32768 tokens.
PATTERNS = ((8, 48), (16, 32), (16, 8), (16, 4), (16, 2), (1, 1))


# By tokens of a block, the target share of FA3's rate; of 16 on the same pattern as of 64, in tokens.
BLOCKS = {16: 0.25, 32: 0.5, 48: 0.8, 96: 0.8, 128: 0.8, 256: 0.8}
HEAD_DIMS = (64, 72, 80, 96, 192, 256)
FAR_BEHIND = Shape(PHI3_SMALL, 1, 196608, 4096)


def prefill(tokens: int) -> Shape:
    return Shape(PHI3_SMALL, 1, 0, tokens)


def of_blocks(shape: Shape, size: int) -> Shape:
    """The shape with blocks of another size, and as many local tokens and one vertical block in as many."""
    m = shape.model
    local = max(1, m.local_blocks * m.block_size // size)
    return replace(shape, model=replace(m, name=f"{m.name}, blocks of {size}", block_size=size, local_blocks=local))


def of_head_dim(shape: Shape, size: int) -> Shape:
    return replace(shape, model=replace(shape.model, name=f"{shape.model.name}, heads of {size}", head_dim=size))


def cliffs(device: torch.device) -> Iterator[Case]:
    """Neighbours of the other cases' shapes at which speed fell off once."""
    for size, target in BLOCKS.items():
        case = attention_case(device, of_blocks(prefill(32768), size), of_fa3=target)
        yield replace(case, name=f"cliffs, blocks of {size}, {case.name}")
    for size in HEAD_DIMS:
        case = attention_case(device, of_head_dim(prefill(32768), size), of_fa3=0.8)
        yield replace(case, name=f"cliffs, {case.name}")
    case = attention_case(device, FAR_BEHIND, of_fa3=0.9)
    yield replace(case, name=f"cliffs, {case.name}")
    for size in (16, 32):
        case = attention_case(device, of_blocks(replace(DECODE, page=16), size), of_copy=0.8)
        yield replace(case, name=f"cliffs, blocks of {size}, {case.name}")


def problem(device: torch.device, shape: Shape) -> Problem:
    m = shape.model
    other = "" if m == PHI3_SMALL else f", {m.local_blocks} local, stride {m.vert_stride}"
    return Problem(shape, f"{shape.words}{other}", partial(make_batch, device, shape), ours, shape.bytes_moved)


def problems(device: torch.device) -> Iterator[Problem]:
    """Shapes to tune plans for, for benchmarks/tune.py: those of `cases`, and some between them."""
    for tokens in (2048, *(tokens for tokens, _ in PREFILLS)):
        yield problem(device, prefill(tokens))
    for pattern in (PATTERNS[0], PATTERNS[-1]):
        yield problem(device, at_density(prefill(32768), *pattern))
    yield problem(device, replace(CHUNK, page=0))
    yield problem(device, CHUNK)
    for sequences, total in ((1, 32768), (1, 131072), (8, 32768), (32, 8192), (32, 32768)):
        yield problem(device, replace(DECODE, sequences=sequences, ctx=total - 1))
    yield problem(device, replace(DECODE, page=16))
    # Speculative decoding.
    yield problem(device, Shape(PHI3_SMALL, 16, 8192 - 5, 5))


def cases(device: torch.device) -> Iterator[Case]:
    for tokens, target in PREFILLS:
        yield attention_case(device, prefill(tokens), of_fa3=target)
    yield attention_case(device, CHUNK)
    yield attention_case(device, DECODE, of_vllm=1.35, of_copy=0.85)
    yield attention_case(device, replace(DECODE, page=16), of_copy=0.85)
    yield sweep_case(device, prefill(32768), PATTERNS)
    yield layout_case(device, LONGEST)
    yield from cliffs(device)
    yield from selected_cases.cases(device)


def summary(records: Iterable[Record]) -> Iterator[str]:
    """Verdicts over several cases of a record."""
    found: dict[str, dict[str, Record]] = {}
    for record in records:
        if record.median_us:
            found.setdefault(record.case, {})[record.implementation] = record
    for name, timed in found.items():
        first = next(iter(timed.values()))
        if "pairs" in first.shape and OURS in timed and int(first.shape["tokens"]) > 1:
            yield from _rates(name, timed)
        elif "all_blocks" in first.shape:
            yield from _by_density(name, timed)


def _rates(name: str, timed: Mapping[str, Record]) -> Iterator[str]:
    shape = timed[OURS].shape
    share = int(shape["pairs"]) / int(shape["all_pairs"])
    rates = {}
    for implementation, record in timed.items():
        if record.median_us and implementation != "copy":
            all_keys = 1 / share if implementation == FA3 else 1
            rates[implementation] = record.flops * all_keys / record.median_us * 1e-6
    words = ", ".join(f"{implementation} {rate:.0f}" for implementation, rate in rates.items())
    against = f"; {rates[OURS] / rates[FA3]:.3f} of FA3's" if FA3 in rates else ""
    yield f"{name}: TFLOP/s on the pairs that each sees, of ours {share:.1%}: {words}{against}"


def _by_density(name: str, timed: Mapping[str, Record]) -> Iterator[str]:
    shape = next(iter(timed.values())).shape
    dense = int(shape["all_blocks"])
    points = sorted(
        (int(count) / dense, timed[label(pattern)].median_us or 0.0, pattern)
        for pattern, count in shape.items()
        if label(pattern) in timed
    )
    if not points or points[-1][0] < 1:
        return
    base = points[-1][1]
    for share, us, pattern in points:
        of_dense = us / base / share
        verdict = "" if pattern == RANDOM else ", target 1.15: met" if of_dense <= 1.15 else ", target 1.15: MISSED"
        yield f"{name}: {pattern}: {us:.0f} us, a block {of_dense:.3f} of the time of one of all{verdict}"
    if FA3 not in timed:
        return
    fa3_us = timed[FA3].median_us or 0.0
    line = [(share, us) for share, us, pattern in points if pattern != RANDOM]
    for (low, low_us), (high, high_us) in itertools.pairwise(line):
        if low_us <= fa3_us < high_us:
            even = low + (high - low) * (fa3_us - low_us) / (high_us - low_us)
            yield f"{name}: as fast as FA3 over all keys ({fa3_us:.0f} us) at {even:.1%} of the blocks"
            return
    yield f"{name}: FA3 over all keys takes {fa3_us:.0f} us; no density between is as fast"


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit("give one record, such as benchmarks/results/blocksparse-attn.jsonl")
    print(*summary(load(sys.argv[1])), sep="\n")
