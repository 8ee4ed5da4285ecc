"""Where blocksparse-attn's speed falls off: grids around its cases, beside vLLM's old kernel and dense FA3.

FA3 attends here to as many keys as ours does on average, the same for every row: what so many pairs cost a dense
kernel. Errors on sampled rows are measured against a row's largest value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import peers
import selected_cases
import torch
from cases import ERROR_AT_MOST, OURS, paged
from peers import VLLM

from blocksparse_attn import BlockLayout, blocksparse_attention
from kernel_reference.bench import Axis, Case, Map, Point

FA3 = "FA3, as many pairs"
# Local blocks and the stride of vertical ones, or the share of blocks listed anywhere.
PATTERNS: dict[str, tuple[int, int] | float] = {
    "16 + 1/8": (16, 8),
    "8 + 1/48": (8, 48),
    "1 + 1/2": (1, 2),
    "all": (1, 1),
    "random 5 %": 0.05,
    "random 20 %": 0.2,
}
# Elements of the keys; FLOP of a call that sees all keys; blocks of a mask of all heads.
MOST_KEYS, MOST_FLOP, MOST_BLOCKS = 2**28, 5e12, 2**27
HASH = (73856093, 19349663, 83492791, 1274126177)


@dataclass(frozen=True)
class Shape:
    """``sequences`` of ``new`` tokens after ``ctx`` older ones; ``page`` 0: not in a paged cache."""

    heads: tuple[int, int]
    size: int
    dtype: torch.dtype
    block: int
    pattern: str
    sequences: int
    ctx: int
    new: int
    page: int

    @property
    def total(self) -> int:
        return self.ctx + self.new

    @property
    def rows(self) -> int:
        """Of the layout."""
        return -(-self.total // self.block)

    @property
    def pairs(self) -> int:
        """Of a query and a key that it sees, one sequence's, all heads together."""
        return pairs_of(self)


def listed(shape: Shape, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Whether the pattern has these blocks: tensors that broadcast."""
    pattern = PATTERNS[shape.pattern]
    if isinstance(pattern, tuple):
        local, stride = pattern
        step = max(1, stride // shape.heads[0])
        return (column <= row) & ((row - column < local) | ((column + head * step + 1) % stride == 0))
    mixed = (head * HASH[0]) ^ (row * HASH[1]) ^ (column * HASH[2])
    mixed = ((mixed ^ (mixed >> 13)) * HASH[3]) >> 16
    return (column <= row) & ((mixed % 1000 < round(1000 * pattern)) | (column == row))


def row_masks(shape: Shape, rows: torch.Tensor) -> torch.Tensor:
    """These rows of the pattern: [heads, rows, columns]."""
    head = torch.arange(shape.heads[0], device=rows.device)[:, None, None]
    return listed(shape, head, rows[:, None], torch.arange(shape.rows, device=rows.device))


@cache
def pairs_of(shape: Shape) -> int:
    """From some rows of the pattern, spread evenly: making a case must be cheap."""
    first, last = shape.ctx // shape.block, shape.rows - 1
    rows = torch.linspace(first, last, min(16, last - first + 1)).round().long()
    blocks = row_masks(shape, rows).sum((0, 2)).double()
    # On the diagonal half the pairs; a single query's block too, on average.
    mean = float((blocks - shape.heads[0] / 2).mean())
    return max(shape.heads[0], int(mean * shape.block * shape.new))


class AsMany(NamedTuple):
    """A result over the first ``keys`` keys of each sequence, all seen by every row."""

    out: torch.Tensor
    keys: int


@dataclass(eq=False)
class Given:
    """Sequences one after another; ``pages``: a cache that holds the same; ``theirs``: vLLM's lists."""

    shape: Shape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seqlens_k: torch.Tensor
    layout: BlockLayout
    pages: tuple[torch.Tensor, ...] = ()
    theirs: tuple[torch.Tensor, ...] = ()
    fa3: dict[str, Any] = field(default_factory=dict)


def layout_of(shape: Shape, device: torch.device) -> BlockLayout:
    pattern = PATTERNS[shape.pattern]
    if isinstance(pattern, tuple):
        return BlockLayout.local_strided(shape.heads[0], shape.total, *pattern, shape.block, device=device)
    at = torch.arange(shape.rows, device=device)
    # Head by head: the hash takes eight bytes a block.
    heads = [listed(shape, at.new_tensor(head), at[:, None], at) for head in range(shape.heads[0])]
    return BlockLayout.from_mask(torch.stack(heads), shape.block, shape.block)


def given(device: torch.device, shape: Shape) -> Given:
    b, (q_heads, kv_heads) = shape.sequences, shape.heads
    sizes = ((shape.new, q_heads), (shape.total, kv_heads), (shape.total, kv_heads))
    q, k, v = (torch.randn(b * n, heads, shape.size, device=device, dtype=shape.dtype) for n, heads in sizes)
    order = torch.arange(b + 1, dtype=torch.int32, device=device)
    layout = layout_of(shape, device)
    pages = paged(k, v, b, shape.page) if shape.page else ()
    keys = keys_of(shape)
    fa3: dict[str, Any] = {"cu_seqlens_k": order * keys}
    if pages:
        fa3 = {"block_table": pages[2], "seqused_k": torch.full((b,), keys, dtype=torch.int32, device=device)}
    return Given(
        shape=shape,
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=order * shape.new,
        cu_seqlens_k=order * shape.total,
        seqlens_k=torch.full((b,), shape.total, dtype=torch.int32, device=device),
        layout=layout,
        pages=pages,
        theirs=(layout.crow.long(), layout.col.long()) if peers.takes_vllm(shape.ctx, shape.new, shape.page) else (),
        fa3=fa3,
    )


def keys_of(shape: Shape) -> int:
    """How many keys a row sees, on average."""
    return max(1, min(shape.total, shape.pairs // (shape.new * shape.heads[0])))


def ours(i: Given) -> torch.Tensor:
    shape = i.shape
    where: dict[str, Any] = {"cu_seqlens_k": i.cu_seqlens_k}
    k, v = i.k, i.v
    if shape.page:
        k, v, table = i.pages
        where = {"block_table": table, "seqlens_k": i.seqlens_k}
    out = blocksparse_attention(i.q, k, v, i.layout, cu_seqlens_q=i.cu_seqlens_q, max_seqlen_q=shape.new, **where)
    return out


def fa3() -> Callable[[Given], AsMany]:
    kernel = peers.fa3()

    def call(i: Given) -> AsMany:
        shape, keys = i.shape, keys_of(i.shape)
        k, v = i.pages[:2] if shape.page else (i.k[: keys * shape.sequences], i.v[: keys * shape.sequences])
        queries = peers.Queries(i.q, i.cu_seqlens_q, shape.new)
        return AsMany(kernel(queries, k, v, keys, shape.size**-0.5, False, **i.fa3), keys)

    return call


def vllm() -> Callable[[Given], torch.Tensor]:
    kernel = peers.vllm()

    def call(i: Given) -> torch.Tensor:
        shape = i.shape
        lists = peers.Lists(*i.theirs, shape.block)
        return kernel(i.q, i.k, i.v, i.cu_seqlens_k, shape.size**-0.5, lists, shape.total)

    return call


_kept: WeakKeyDictionary[Given, dict[bool, torch.Tensor]] = WeakKeyDictionary()


def check(result: torch.Tensor | AsMany, i: Given) -> float:
    """The largest error of the last sequence's sampled rows, over a row's largest value."""
    shape, dense = i.shape, isinstance(result, AsMany)
    places = sorted({0, shape.new // 3, shape.new - 1})
    kept = _kept.setdefault(i, {})
    if dense not in kept:
        kept[dense] = torch.stack([exact_row(i, place, dense) for place in places])
    out = result.out if isinstance(result, AsMany) else result
    got = out[torch.tensor(places, device=out.device) + (shape.sequences - 1) * shape.new]
    error = float(((got.double() - kept[dense]).abs().amax(-1) / kept[dense].abs().amax(-1)).max())
    if not error <= ERROR_AT_MOST:
        raise AssertionError(f"error {error:.2g} of a row's largest value > {ERROR_AT_MOST:g}")
    return error


def exact_row(i: Given, place: int, dense: bool) -> torch.Tensor:
    """A row of the last sequence in float64, [heads, elements]."""
    shape, last = i.shape, i.shape.sequences - 1
    position = shape.ctx + place
    if dense:
        keys = keys_of(shape)
        own = slice(last * shape.total, last * shape.total + keys)
        if not shape.page:
            own = slice(last * keys, last * keys + keys)
        seen = torch.ones(shape.heads[0], keys, dtype=torch.bool, device=i.q.device)
    else:
        own = slice(last * shape.total, last * shape.total + position + 1)
        blocks = row_masks(shape, torch.tensor([position // shape.block], device=i.q.device))[:, 0]
        seen = blocks.repeat_interleave(shape.block, dim=1)[:, : position + 1]
    query = i.q[last * shape.new + place].double().unflatten(0, (shape.heads[1], -1))
    scores = torch.einsum("hgd,nhd->hgn", query, i.k[own].double()) * shape.size**-0.5
    weights = scores.masked_fill(~seen.view_as(scores), -torch.inf).softmax(-1)
    return torch.einsum("hgn,nhd->hgd", weights, i.v[own].double()).flatten(0, 1)


def shape_of(point: Point) -> Shape:
    q_heads, kv_heads = map(int, point["heads"].split("/"))
    return Shape(
        (q_heads, kv_heads),
        point["head size"],
        getattr(torch, point["dtype"]),
        point["block"],
        point["pattern"],
        point["sequences"],
        point["keys"] - point.get("new", 1),
        point.get("new", 1),
        point["page"],
    )


def point_case(device: torch.device, point: Point) -> Case:
    shape = shape_of(point)
    beside: dict[str, Callable[[], Callable[[Given], Any]]] = {FA3: fa3}
    if peers.takes_vllm(shape.ctx, shape.new, shape.page):
        beside[VLLM] = vllm
    # At most the union of all heads of a kv head.
    group = shape.heads[0] // shape.heads[1]
    keys = min(shape.total, keys_of(shape) * (group if shape.new == 1 else shape.total))
    elements = 2 * shape.sequences * (shape.new * shape.heads[0] + keys * shape.heads[1]) * shape.size
    return Case(
        name="attention",
        shape={},
        make_inputs=partial(given, device, shape),
        ours={OURS: ours},
        peers=beside,
        check=check,
        # The bound is the check's own, which raises.
        tolerance=float("inf"),
        bytes_moved=elements * shape.dtype.itemsize,
        flops=4 * shape.size * shape.sequences * shape.pairs,
    )


def allows(point: Point) -> bool:
    q_heads, kv_heads = map(int, point["heads"].split("/"))
    keys, new, page = point["keys"], point.get("new", 1), point["page"]
    flop = 4 * point["sequences"] * new * keys * q_heads * point["head size"]
    return (
        new <= keys
        and (keys - new) % point["block"] in (0, point["block"] - 1)
        and (not page or keys % page == 0)
        and point["sequences"] * keys * kv_heads * point["head size"] <= MOST_KEYS
        and (keys // point["block"]) ** 2 * q_heads <= MOST_BLOCKS
        # float32 runs at an eighth of the 16-bit rate or, on CUDA cores, a fortieth.
        and flop <= (MOST_FLOP if point["dtype"] != "float32" else MOST_FLOP / 16)
    )


def selected_shape(point: Point) -> selected_cases.Shape:
    q_heads, kv_heads = map(int, point["heads"].split("/"))
    return selected_cases.Shape(
        "any",
        (q_heads, kv_heads, point["head size"]),
        point["block"],
        point["top"],
        point["sequences"],
        point["new"],
        point["keys"],
        point["share"],
        point["page"],
    )


def selected_case(device: torch.device, point: Point) -> Case:
    shape = selected_shape(point)
    case = selected_cases.case(device, shape, fp8=shape.new == 1)
    theirs = (shape.heads, shape.block, shape.page) == (selected_cases.M3.heads, 128, 128)
    calls = {label: call for label, call in case.ours.items() if label != selected_cases.OURS_ALONE}
    peer = {"peers": case.peers if theirs else {}, "baseline": case.baseline if theirs else selected_cases.OURS}
    return replace(case, name="selected", ours=calls, requirements=(), **peer)


def allows_selected(point: Point) -> bool:
    shape = selected_shape(point)
    listed = shape.block * shape.topk
    return (
        # Every token has blocks enough behind it.
        listed <= shape.total - shape.new
        and shape.sequences * shape.total * shape.heads[1] * shape.heads[2] <= MOST_KEYS
        and shape.sequences * shape.new * shape.heads[1] * (shape.total // shape.block) <= MOST_BLOCKS
        and 4 * shape.heads[2] * shape.pairs <= MOST_FLOP
    )


def maps(device: torch.device) -> Iterator[Map]:
    axes = (
        Axis("block", (16, 32, 64, 128)),
        Axis("head size", (64, 80, 96, 128, 256)),
        Axis("pattern", tuple(PATTERNS)),
        Axis("dtype", ("bfloat16", "float16", "float32")),
        Axis("heads", ("32/8", "8/1", "16/16")),
    )
    phi3 = {"head size": 128, "dtype": "bfloat16", "heads": "32/8", "page": 0, "sequences": 1, "pattern": "16 + 1/8"}
    yield Map(
        name="prefill",
        axes=(
            *axes,
            Axis("sequences", (1, 4)),
            Axis("new", (128, 1024, 4096, 16384)),
            Axis("keys", (1024, 4096, 16384, 65536)),
            Axis("page", (0, 16)),
        ),
        case=partial(point_case, device),
        allows=allows,
        known=[
            {**phi3, "block": 32, "new": 16384, "keys": 16384},
            {**phi3, "block": 64, "new": 16384, "keys": 16384, "pattern": "random 20 %"},
            {**phi3, "block": 64, "new": 4096, "keys": 65536},
        ],
        points=38,
    )
    yield Map(
        name="decode",
        axes=(
            *axes,
            Axis("sequences", (1, 8, 32, 128)),
            Axis("keys", (1024, 8192, 32768, 131072)),
            Axis("page", (0, 8, 16, 64)),
        ),
        case=partial(point_case, device),
        allows=allows,
        points=34,
    )

    m3 = {"block": 128, "top": 16, "heads": "64/4", "head size": 128, "page": 128, "share": 0.0}
    yield Map(
        name="selected",
        axes=(
            Axis("block", (1, 4, 16, 32, 64, 128)),
            Axis("top", (1, 16, 64, 512)),
            Axis("heads", ("64/4", "24/2", "64/1", "16/16")),
            Axis("head size", (64, 128, 256)),
            Axis("page", (16, 64, 128)),
            Axis("share", (0.0, 0.75)),
            Axis("sequences", (1, 8, 32)),
            Axis("new", (1, 4, 1024)),
            Axis("keys", (4096, 32768)),
        ),
        case=partial(selected_case, device),
        allows=allows_selected,
        known=[{**m3, "sequences": 1, "new": 1, "keys": 32768}, {**m3, "sequences": 8, "new": 1024, "keys": 4096}],
        points=26,
    )


def sweep(device: torch.device, batch: int) -> Callable[[], object]:
    """A decode step of Phi-3-small over a paged cache."""
    shape = Shape((32, 8), 128, torch.bfloat16, 64, "16 + 1/8", batch, 1023, 1, 16)
    return partial(ours, given(device, shape))
