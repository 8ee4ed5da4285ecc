"""Where tilelang-mla's speed falls off: grids round its cases, beside FlashMLA and FA3.

Caches of 8 bits stand beside the same tokens in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import caches
import sparse
import torch
from chunks import check_chunks, fa3_chunks, make_chunks, ours_chunks
from dense import (
    DTYPE,
    FA3,
    FLASH_MLA,
    OURS,
    PAGE,
    Shape,
    check,
    fa3,
    flash_mla,
    make_batch,
    ours,
    share,
)

from kernel_reference.bench import Axis, Case, Map, Point

# Keys of all sequences together, and FLOP of a call.
MOST_KEYS, MOST_FLOP = 2**20, 4e12
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def lengths_of(point: Point) -> tuple[int, ...]:
    """``keys`` of each sequence; in a ragged batch any number up to that, and in one the first has 100000."""
    keys, sequences = point["keys"], point["sequences"]
    if point["lengths"] == "equal":
        return (keys,) * sequences
    generator = torch.Generator().manual_seed(sequences)
    some = torch.randint(min(point["tokens"], keys), keys + 1, (sequences,), generator=generator).tolist()
    return (100_000, *some[1:]) if point["lengths"] == "one of 100k" else tuple(some)


def decode_point(device: torch.device, point: Point) -> Case:
    shape = Shape(share(point["heads"]), lengths_of(point), point["tokens"], dtype=DTYPES[point["dtype"]])
    peers = {FA3: fa3}
    if point["page"] == PAGE:
        # It takes no other.
        peers[FLASH_MLA] = flash_mla
    return Case(
        name="decode",
        shape={},
        make_inputs=partial(make_batch, device, shape, point["page"]),
        ours={OURS: partial(ours, planned=point["plan"] == "made")},
        peers=peers,
        check=check,
        # The bound is the check's own, which raises.
        tolerance=float("inf"),
        bytes_moved=shape.bytes_moved,
        flops=shape.flops,
    )


def allows_decode(point: Point) -> bool:
    longest = 100_000 if point["lengths"] == "one of 100k" else point["keys"]
    keys = point["sequences"] * point["keys"] + longest
    return keys <= MOST_KEYS and keys * point["heads"] * point["tokens"] * 2200 <= MOST_FLOP


# Caches of 8 bits


def cache_point(device: torch.device, point: Point) -> Case:
    shape = Shape(share(point["heads"]), (point["keys"],) * point["sequences"], point["tokens"])
    kind = {caches.ONE_SCALE: caches.OfE4m3, caches.RECORDS: caches.OfRecords}[point["cache"]]
    return Case(
        name="8 bits",
        shape={},
        make_inputs=partial(caches.make_cached, device, shape, point["page"]),
        ours={OURS: partial(caches.attend, kind=kind)},
        peers={caches.WIDE: lambda: partial(caches.attend, kind=caches.OfFormat)},
        check=caches.check,
        tolerance=float("inf"),
        bytes_moved=shape.bytes_moved,
        flops=shape.flops,
    )


def allows_cache(point: Point) -> bool:
    keys = point["sequences"] * point["keys"]
    return keys <= MOST_KEYS and keys * point["heads"] * point["tokens"] * 2200 <= MOST_FLOP


# Lists


def list_point(device: torch.device, point: Point) -> Case:
    heads, lists = point["heads"], point["sequences"] * point["tokens"]
    records = point["cache"] == sparse.RECORDS
    beside = records and heads in (64, 128)
    return Case(
        name="lists",
        shape={},
        make_inputs=partial(sparse.make_lists, device, heads, point["sequences"], point["tokens"]),
        ours={OURS: partial(sparse.ours, kind=sparse.OverRecords if records else sparse.OverWide)},
        peers={FLASH_MLA: sparse.flash_mla} if beside else {},
        check=sparse.check,
        tolerance=float("inf"),
        bytes_moved=lists * (sparse.TOPK * (656 if records else 1152) + heads * 2 * (576 + 512)),
        flops=2 * lists * sparse.TOPK * heads * (576 + 512),
    )


# Prefill


def pairs_of(point: Point) -> int:
    new, older = point["new"], point["older"]
    return int(point["sequences"] * new * (older + (new + 1) / 2))


def prefill_point(device: torch.device, point: Point) -> Case:
    m, rows = share(point["heads"]), point["sequences"] * point["new"]
    keys = rows + point["sequences"] * point["older"]
    return Case(
        name="prefill",
        shape={},
        make_inputs=partial(make_chunks, device, point["heads"], point["new"], point["older"], point["sequences"]),
        ours={OURS: ours_chunks},
        peers={FA3: fa3_chunks},
        check=check_chunks,
        tolerance=float("inf"),
        bytes_moved=(rows + keys) * m.num_heads * (m.head_qk + m.head_v) * DTYPE.itemsize,
        flops=2 * pairs_of(point) * m.num_heads * (m.head_qk + m.head_v),
    )


def allows_prefill(point: Point) -> bool:
    elements = point["sequences"] * (point["new"] + point["older"]) * point["heads"] * 320
    # One prefill of 512 behind 60000 with 128 heads moves 5 GB, more than a point may.
    return elements <= 1.6e9 and pairs_of(point) * point["heads"] * 640 <= MOST_FLOP


def maps(device: torch.device) -> Iterator[Map]:
    ragged = {"heads": 16, "page": PAGE, "lengths": "one of 100k", "keys": 1000, "sequences": 64, "tokens": 1}
    ragged["dtype"] = "bfloat16"
    yield Map(
        name="decode",
        axes=(
            Axis("heads", (1, 8, 16, 32, 64, 128)),
            Axis("page", (1, 16, 24, 32, PAGE, 128)),
            Axis("lengths", ("equal", "ragged", "one of 100k")),
            Axis("keys", (100, 1000, 8192, 65536)),
            Axis("sequences", (1, 4, 16, 64, 128, 512)),
            Axis("tokens", (1, 2, 4)),
            Axis("dtype", tuple(DTYPES)),
            Axis("plan", ("made", "none")),
        ),
        case=partial(decode_point, device),
        allows=allows_decode,
        known=[{**ragged, "plan": plan} for plan in ("none", "made")]
        + [{**ragged, "plan": "made", "lengths": "equal", "keys": 8192, "page": page} for page in (24, 32)],
        points=40,
    )
    yield Map(
        name="8 bits",
        axes=(
            Axis("heads", (1, 8, 16, 32, 64, 128)),
            Axis("cache", (caches.ONE_SCALE, caches.RECORDS)),
            Axis("page", (1, 16, PAGE)),
            Axis("keys", (1000, 8192, 65536)),
            Axis("sequences", (1, 4, 32, 128, 512)),
            Axis("tokens", (1, 2, 4)),
        ),
        case=partial(cache_point, device),
        allows=allows_cache,
        # A test judges the smallest point.
        known=[{"heads": 1, "cache": caches.ONE_SCALE, "page": PAGE, "keys": 1000, "sequences": 1, "tokens": 1}],
        points=16,
    )
    yield Map(
        name="lists",
        axes=(
            Axis("heads", (1, 8, 16, 32, 64, 128)),
            Axis("cache", (sparse.WIDE, sparse.RECORDS)),
            Axis("sequences", (1, 4, 16, 64, 128, 512)),
            Axis("tokens", (1, 2)),
        ),
        case=partial(list_point, device),
        points=12,
    )
    yield Map(
        name="prefill",
        axes=(
            Axis("heads", (1, 8, 16, 64, 128)),
            Axis("new", (33, 512, 1024, 8192)),
            Axis("older", (0, 1000, 16384, 60000)),
            Axis("sequences", (1, 4, 16)),
        ),
        case=partial(prefill_point, device),
        allows=allows_prefill,
        known=[
            {"heads": 16, "new": 1024, "older": 16384, "sequences": 4},
            {"heads": 8, "new": 33, "older": 0, "sequences": 1},
        ],
    )


def sweep(device: torch.device, batch: int) -> Callable[[], object]:
    """A decode step of 16 heads, with a plan."""
    if device.type == "cuda":
        # What compiles is watched where it is imported already.
        import tilelang_mla.launch  # noqa: F401
    i = make_batch(device, Shape(share(16), (500,) * batch))
    return partial(ours, i)
