"""Where prefix-prefill's speed falls off: grids round its cases, beside FA3 and vLLM's unified_attention.

Results are held here to a share of a row's largest value, on sampled rows of the first and the last sequence: what the
house's bound says of every element is the tests' part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from weakref import WeakKeyDictionary

import peers
import torch
from cases import DTYPE, ERROR_AT_MOST, OURS, Shape, over_pages
from peers import FA3, UNIFIED, Paged

from kernel_reference.attention import attention
from kernel_reference.bench import Axis, Case, Map, Point
from kernel_reference.models import SoftmaxAttention
from kernel_reference.paging import cumulative

# What an engine's table has room for, whatever its sequences hold.
WIDE = 131072
# One long sequence among short ones, as a server has them.
RAGGED = (50000, 17, 8000, 300, 1, 2000, 700, 120)
# Elements of the keys; FLOP of a call; entries of a block table.
MOST_KEYS, MOST_FLOP, MOST_TABLE = 2**28, 4e12, 2**26


@dataclass(frozen=True)
class Options:
    """What a call is given beside its tensors' sizes."""

    softcap: float
    sinks: bool
    columns: int


@dataclass(eq=False)
class Given:
    """A ragged batch whose pages [blocks, page, heads, elements] hold the new tokens too."""

    shape: Shape
    options: Options
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seqlens_k: torch.Tensor
    sinks: torch.Tensor | None
    one: torch.Tensor

    @cached_property
    def paged(self) -> Paged:
        """As peers take it; made once, as each call would pay for it."""
        shape = self.shape
        return Paged(
            self.q, self.k_cache, self.v_cache, self.block_table, self.cu_seqlens_q, self.seqlens_k, shape.max_seqlen_q,
            shape.max_seqlen_k, shape.scale, shape.sides if shape.window else None, self.options.softcap, self.sinks,
        )  # fmt: skip


def given(device: torch.device, shape: Shape, options: Options) -> Given:
    """Random pages in random order, all of them used."""
    m = shape.model
    counts = [-(-total // shape.page) for total in shape.totals]
    pages = torch.randperm(sum(counts), device=device, dtype=torch.int32)
    # Past a sequence's last page stands page 0, as in an engine's tables.
    table = torch.zeros(len(counts), max(*counts, options.columns), dtype=torch.int32, device=device)
    for row, own in zip(table, pages.split(counts), strict=True):
        row[: len(own)] = own
    size = (sum(counts), shape.page, m.num_heads_kv, m.head_dim)
    rows = sum(new for _, new in shape.lengths)
    return Given(
        shape=shape,
        options=options,
        q=torch.randn(rows, m.num_heads_q, m.head_dim, device=device, dtype=DTYPE),
        k_cache=torch.randn(size, device=device, dtype=DTYPE),
        v_cache=torch.randn(size, device=device, dtype=DTYPE),
        block_table=table,
        cu_seqlens_q=cumulative(torch.tensor([new for _, new in shape.lengths])).to(device),
        seqlens_k=torch.tensor(shape.totals, dtype=torch.int32, device=device),
        sinks=torch.randn(m.num_heads_q, device=device, dtype=DTYPE) if options.sinks else None,
        one=torch.ones(1, device=device),
    )


def ours(i: Given) -> torch.Tensor:
    return over_pages(i.paged)


def fa3() -> Callable[[Given], torch.Tensor]:
    call = peers.fa3()
    return lambda i: call(i.paged)


def unified() -> Callable[[Given], torch.Tensor]:
    call = peers.unified()
    return lambda i: call(i.paged, i.one, i.one)


def peers_of(device: torch.device, head_size: int) -> dict[str, Callable[[], Callable[[Given], torch.Tensor]]]:
    """FA3 where it runs, and the best other one."""
    hopper = device.type != "cuda" or torch.cuda.get_device_capability(device) == (9, 0)
    return {**({FA3: fa3} if hopper and head_size <= 256 else {}), UNIFIED: unified}


_kept: WeakKeyDictionary[Given, tuple[torch.Tensor, torch.Tensor]] = WeakKeyDictionary()


def check(out: torch.Tensor, i: Given) -> float:
    """The largest error of a sampled row of the first and the last sequence, over the row's largest value."""
    if i not in _kept:
        _kept[i] = reference(i)
    rows, exact = _kept[i]
    size = exact.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    error = float(((out[rows].double() - exact).abs() / size).max())
    if not error <= ERROR_AT_MOST:
        raise AssertionError(f"error {error:.2g} of a row's largest value > {ERROR_AT_MOST:g}")
    return error


def reference(i: Given) -> tuple[torch.Tensor, torch.Tensor]:
    shape, found, outs = i.shape, [], []
    for b in sorted({0, len(shape.lengths) - 1}):
        total, new = shape.totals[b], shape.lengths[b][1]
        pages = i.block_table[b, : -(-total // shape.page)].long()
        keys, values = (cache[pages].flatten(0, 1)[:total] for cache in (i.k_cache, i.v_cache))
        begin = int(i.cu_seqlens_q[b])
        rows = torch.tensor(sorted({0, new // 3, new - 1}), device=i.q.device)
        exact = attention(
            i.q[begin : begin + new],
            keys,
            values,
            softmax_scale=shape.scale,
            causal=True,
            cu_seqlens_q=torch.tensor([0, new]),
            cu_seqlens_k=torch.tensor([0, total]),
            window=shape.sides,
            softcap=i.options.softcap,
            sinks=i.sinks,
            rows=rows,
        )
        found.append(rows + begin)
        outs.append(exact.out)
    return torch.cat(found), torch.cat(outs)


def shape_of(point: Point) -> Shape:
    q_heads, kv_heads = map(int, point["heads"].split("/"))
    model = SoftmaxAttention(point["heads"], q_heads, kv_heads, point["head size"])
    older = [point["context"]] * point["sequences"] if point["context"] != "ragged" else list(RAGGED)
    return Shape(model, tuple((ctx, point["new"]) for ctx in older), point["window"] or None, point["page"])


def point_case(device: torch.device, point: Point) -> Case:
    shape = shape_of(point)
    columns = WIDE // shape.page if point["table"] == "wide" else 0
    options = Options(float(point["soft cap"]), point["sinks"] == "yes", columns)
    return Case(
        name="attention",
        shape={},
        make_inputs=partial(given, device, shape, options),
        ours={OURS: ours},
        peers=peers_of(device, shape.model.head_dim),
        check=check,
        # The bound is the check's own, which raises.
        tolerance=float("inf"),
        bytes_moved=shape.bytes_moved(),
        flops=shape.flops,
    )


def allows(point: Point) -> bool:
    q_heads, kv_heads = map(int, point["heads"].split("/"))
    size, new, ragged = point["head size"], point["new"], point["context"] == "ragged"
    if ragged and point["sequences"] != len(RAGGED):
        return False
    sequences = point["sequences"]
    older = sum(RAGGED) if ragged else point["context"] * sequences
    keys = older + sequences * new
    longest = (max(RAGGED) if ragged else point["context"]) + new
    table = sequences * (WIDE // point["page"] if point["table"] == "wide" else -(-longest // point["page"]))
    seen = min(point["window"], keys // sequences) if point["window"] else keys // sequences
    flop = 4 * sequences * new * seen * q_heads * size
    # A window as wide as the sequence is none.
    return (
        keys * kv_heads * size <= MOST_KEYS
        and flop <= MOST_FLOP
        and table <= MOST_TABLE
        and longest <= WIDE
        and (not point["window"] or point["window"] < longest)
    )


def maps(device: torch.device) -> Iterator[Map]:
    heads = Axis("heads", ("32/8", "64/8", "8/1", "16/16"))
    sizes = Axis("head size", (64, 80, 96, 128, 192, 256))
    extras = (Axis("window", (0, 128, 4096)), Axis("soft cap", (0, 50)), Axis("sinks", ("no", "yes")))
    table = Axis("table", ("wide", "fits"))
    plain = {"heads": "32/8", "head size": 128, "page": 16, "window": 0, "soft cap": 0, "sinks": "no", "table": "fits"}
    gpt_oss = {**plain, "heads": "64/8", "head size": 64, "window": 128, "sinks": "yes"}
    yield Map(
        name="prefill",
        axes=(
            heads,
            sizes,
            Axis("page", (1, 8, 16, 24, 64)),
            *extras,
            table,
            Axis("sequences", (1, 4, 16)),
            Axis("new", (33, 512, 2048)),
            Axis("context", (0, 1000, 16384, 60000)),
        ),
        case=partial(point_case, device),
        allows=allows,
        known=[{**gpt_oss, "sequences": 4, "new": 512, "context": 16384}],
        points=40,
    )
    yield Map(
        name="decode",
        axes=(
            heads,
            sizes,
            Axis("page", (8, 16, 24, 64)),
            *extras,
            table,
            Axis("sequences", (1, 8, 16, 64, 200)),
            Axis("new", (1, 5)),
            Axis("context", (20, 1000, 8000, 120000, "ragged")),
        ),
        case=partial(point_case, device),
        allows=allows,
        known=[
            {**plain, "table": "wide", "sequences": 16, "new": 1, "context": 1000},
            {**plain, "table": "wide", "sequences": 1, "new": 1, "context": 1000},
            {**plain, "window": 128, "sequences": 1, "new": 1, "context": 120000},
        ],
        points=40,
    )


def sweep(device: torch.device, batch: int) -> Callable[[], object]:
    """A decode step of Llama-3-8B."""
    shape = Shape(SoftmaxAttention("32/8", 32, 8, 128), ((500, 1),) * batch, None, 16)
    return partial(ours, given(device, shape, Options(0.0, False, 512)))
