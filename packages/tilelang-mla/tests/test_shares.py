"""Do programs share a batch that nobody has cut, evenly and each key once? The kernels' text in C tells its cuts."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from kernel_reference.testing.guards import poison_
from tilelang_mla.plan import DecodeProblem, DeviceLimits, cdiv, plan_without_schedule
from tilelang_mla.waves import shares_of

BLOCK = 64
# What a sequence costs beside its blocks, in blocks.
OVERHEAD = 2
H200 = DeviceLimits(132)


class Piece(NamedTuple):
    """What a share has of a sequence: blocks of its keys from ``first`` to before ``last``.

    place: of its partial result.
    """

    share: int
    sequence: int
    first: int
    last: int
    place: int


def line_of(lengths: Sequence[int], shares: int, rows: int) -> tuple[int, list[Piece]]:
    """The length of a share, and every piece of every share, by the rule that kernels/decode/shares.py tells of."""
    blocks = [cdiv(n, BLOCK) for n in lengths]
    extents = [max(1, n) + OVERHEAD for n in blocks]
    total = sum(extents)
    size = max(cdiv(total, shares), int(math.sqrt(total * rows / 1024)))
    turns, merging = cdiv(len(lengths), shares), min(cdiv(total, size), shares) * rows // 1024
    idle = size * (merging if rows <= 64 else 1) // 32
    alike, near = len(set(extents)) == 1, max(extents) <= size + size // 2 + 10
    sortable = merging >= 2 and 1 < turns <= 8 and len(lengths) <= (768 if merging >= 4 else 256)
    most = size + merging + merging // 2 - 2 + idle
    limit = size + 2 + 2 * alike + (merging + 1 - alike) // 2 + idle
    # One long one, or some, among many short ones; who has one is told by lane.
    beside = 32 <= len(lengths) <= 768 and 32 <= rows <= 64 and max(extents) <= 2**14 and size >= 8
    each = cdiv(len(lengths), 64)
    lanes = [extents[i : i + each] for i in range(0, len(lengths), each)]
    short = [extent for lane in lanes if max(lane) <= size + OVERHEAD for extent in lane]
    beside = beside and 4 * sum(short) <= 3 * len(short) * size and len(short) >= len(lengths) - 8 * each
    found = None
    if near and turns * max(extents) <= limit and (alike or not sortable):
        size, extents = turns * max(extents), [max(extents)] * len(extents)
    elif near and sortable and max(extents) <= most:
        found = by_length(extents, shares, size, most, True)
    elif not near and beside:
        found = by_length(extents, shares, size, size + size // 2 + 2, False)
    elif 2 * len(lengths) <= shares:
        even = max(
            cdiv(max(blocks), shares // len(lengths)), 3, size - (OVERHEAD if size == cdiv(total, shares) else 0)
        )
        if even <= size + size * (shares * rows // 1024 if rows <= 64 else 1) // 32:
            return even, cut_evenly(blocks, cdiv(max(blocks), even), even)
    if found is not None:
        size, taken, long, whole = found
        pieces = [Piece(share, b, 0, blocks[b], b + share) for share, b in taken]
        # No share has pieces of two.
        return size, pieces + cut_line(long, whole, blocks, extents, size, size)
    return size, cut_line(range(len(lengths)), 0, blocks, extents, size, 1)


def by_length(
    extents: Sequence[int], shares: int, size: int, most: int, near: bool
) -> tuple[int, list[tuple[int, int]], list[int], int] | None:
    """Whole sequences by turns, the longest first, as (share, sequence); and long ones, which other shares cut."""
    top = max(extents) if near else size + OVERHEAD
    steps = 64 if len(extents) <= 384 else 32
    step = [extent * (steps - 2) // top if extent <= top else steps - 1 for extent in extents]
    order = sorted(range(len(extents)), key=lambda b: -step[b])
    long = step.count(steps - 1)
    if long > 8:
        return None
    whole, end = shares, sum(extents[b] for b in order[:long])
    if not near:
        whole = min(cdiv(sum(extents) - end, size + 1), shares - 1)
        size = max(cdiv(end, max(shares - whole - long + 1, 1)), 1)
        whole = shares - sum(cdiv(extents[b], size) for b in order[:long])
    if whole < 1 or len(extents) - long > 8 * whole:
        return None
    taken = []
    for turn in range(cdiv(len(extents) - long, whole)):
        own = order[long + turn * whole : long + (turn + 1) * whole]
        taken += [(whole - 1 - i if turn % 2 else i, b) for i, b in enumerate(own)]
    loads = [0] * whole
    for share, b in taken:
        loads[share] += extents[b]
    return None if max(loads) > most else (size, taken, order[:long], whole)


def cut_evenly(blocks: Sequence[int], parts: int, size: int) -> list[Piece]:
    """Each sequence in as many parts, of a share each."""
    ends = [[min(i * size, n) for i in range(parts)] + [n] for n in blocks]
    return [
        Piece(b * parts + i, b, end[i], end[i + 1], b * parts + b + i)
        for b, end in enumerate(ends)
        for i in range(parts)
    ]


def cut_line(
    which: Sequence[int], before: int, blocks: Sequence[int], extents: Sequence[int], size: int, step: int
) -> list[Piece]:
    """Sequences one after the other on a line, at multiples of ``step``; each share behind ``before`` has a piece."""
    pieces, low = [], 0
    for b in which:
        begin, end = low + OVERHEAD, low + extents[b]
        for share in range(begin // size, (end - 1) // size + 1):
            last = min(blocks[b], (share + 1) * size - begin, end - begin)
            pieces.append(Piece(before + share, b, max(0, share * size - begin), last, b + share))
        low += cdiv(extents[b], step) * step
    return pieces


def lengths_of(kind: str, batch: int, longest: int = 8192) -> list[int]:
    generator = torch.Generator().manual_seed(batch)
    some = torch.randint(longest + 1, (batch,), generator=generator).tolist()
    return {
        "uniform": some, "equal": [longest] * batch, "one long": [100_000, *[min(n, 1000) for n in some]][:batch],
        "empty": [0] * batch, "short": [n % 100 for n in some],
    }[kind]  # fmt: skip


KINDS = ("uniform", "equal", "one long", "empty", "short")


def attend(lengths: Sequence[int], heads: int, shares: int) -> list[list[int]]:
    """First partial result and number of each sequence, and the outputs' errors, by the text in C."""
    from tilelang_mla.kernels import c

    torch.manual_seed(0)
    batch, page, dim, rope = len(lengths), 64, 64, 32
    tiles = cdiv(heads, 64)
    kv = torch.randn(3, page, dim + rope)
    table = torch.randint(3, (batch, max(1, cdiv(max(lengths), page))), dtype=torch.int32)
    q = torch.randn(batch, heads, dim + rope)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    num_parts = batch + shares - 1
    out, lse = poison_(torch.empty(batch, heads, dim)), poison_(torch.empty(batch, heads, 1))
    parts, part_lse = poison_(torch.empty(num_parts, heads, dim)), poison_(torch.empty(num_parts, heads))
    pieces = torch.full((2 * batch,), -7, dtype=torch.int32)
    kernel = c.kernel("decode", dim_nope=dim, dim_rope=rope, block_n=64, num_stages=2, gather=False)
    merge = c.kernel("merge", dim_nope=dim)
    kernel(
        q, kv, seqlens, table, seqlens, seqlens, out, lse, parts, part_lse, pieces, 0.1, heads, 0, num_parts, 1, 2, 0,
        1, shares * tiles,
    )  # fmt: skip
    merge(pieces, out, lse, parts, part_lse, heads, 1, 3, 2, 2, 1)
    for b, n in enumerate(lengths):
        keys = kv[table[b].long()].flatten(0, 1)[:n].double()
        scores = q[b].double() @ keys.mT * (0.1 * math.log(2))
        want = scores.softmax(-1) @ keys[:, :dim] if n else torch.zeros(heads, dim).double()
        torch.testing.assert_close(out[b].double(), want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[b, :, 0].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    return pieces.view(batch, 2).tolist()


@pytest.fixture(scope="module", autouse=True)
def _on_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("on a GPU test_kernel.py runs calls without a plan")
    try:
        import tilelang  # noqa: F401
    except ImportError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no TileLang: {error}")


CUTS: dict[str, tuple[list[int], int, int]] = {
    "one among many short": ([2000, 5, 64, 65, 0, 1, 130], 1, 9),
    "more sequences than lanes": ([(7 * i) % 150 for i in range(150)], 1, 13),
    "more shares than blocks": ([130, 1], 3, 20),
    "one share": ([130, 0, 70], 2, 1),
    "one sequence": ([1500], 2, 8),
    "alike": ([320] * 9, 2, 9),
    "alike, two a share": ([320] * 8, 2, 4),
    "alike, with a share to spare": ([640] * 8, 128, 9),
    "nearly alike": ([600, 640, 500, 577, 640, 0], 2, 6),
    "nearly alike, two a share": ([600, 640, 500, 577, 640, 0, 641], 2, 4),
    "not that alike": ([600, 640, 1800, 577, 640, 0], 2, 6),
    "by length": ([(37 * i) % 700 for i in range(64)], 64, 32),
    "by length, four tiles of rows": ([(37 * i) % 300 for i in range(18)], 200, 17),
    "by length, if one were not too long": ([*((37 * i) % 300 for i in range(17)), 900], 200, 17),
    "one is cut, others by length": ([*((37 * i) % 300 for i in range(40)), 9000, 130], 64, 17),
    "three are cut, others by length": ([6000, *((37 * i) % 300 for i in range(60)), 5000, 9000], 40, 22),
    "too many are long": ([*((37 * i) % 300 for i in range(110)), *(7000 + i for i in range(9))], 32, 60),
    "by length, in two rounds": ([(37 * i) % 350 for i in range(400)], 41, 100),
    "by length, in steps of many blocks": ([(997 * i) % 4200 for i in range(30)], 130, 16),
    "two are cut, others by length": ([6000, 5000, *((37 * i) % 300 for i in range(60))], 40, 22),
    "alike, in parts of one length": ([1024] * 5, 16, 23),
    "nearly alike, in parts of one length": ([1024, 961, 500, 1000, 63, 1024], 64, 25),
    "alike, of a share and less": ([1024] * 5, 16, 14),
    "nothing": ([0, 0, 0], 1, 5),
    "two tiles of rows": ([500, 64, 3, 700], 70, 4),
    "many rows to merge": ([640] * 3, 128, 30),
}


@pytest.mark.parametrize(("lengths", "heads", "shares"), CUTS.values(), ids=CUTS)
def test_programs_cut_a_batch_where_the_rule_says_and_take_each_key_once(lengths, heads, shares) -> None:
    told = attend(lengths, heads, shares)
    _, pieces = line_of(lengths, shares, heads)
    for b, (first, count) in enumerate(told):
        own = [piece for piece in pieces if piece.sequence == b]
        assert (first, count) == (own[0].place, len(own))


def test_lengths_that_cannot_be_are_no_keys_of_a_share() -> None:
    """Below 0 or beyond the table: the others keep theirs, and all of them are written."""
    from tilelang_mla.kernels import c

    heads, dim, rope = 2, 64, 32
    kv, q = torch.randn(3, 64, dim + rope), torch.randn(4, heads, dim + rope)
    table = torch.zeros(4, 2, dtype=torch.int32)
    kernel = c.kernel("decode", dim_nope=dim, dim_rope=rope, block_n=64, num_stages=2, gather=False)
    merge = c.kernel("merge", dim_nope=dim)
    for bad in (-1, -(2**31), 129, 2**31 - 1):
        seqlens = torch.tensor([100, bad, 128, bad], dtype=torch.int32)
        out, lse = poison_(torch.empty(4, heads, dim)), poison_(torch.empty(4, heads, 1))
        parts, part_lse, pieces = torch.empty(8, heads, dim), torch.empty(8, heads), torch.zeros(8, dtype=torch.int32)
        kernel(
            q, kv, seqlens, table, seqlens, seqlens, out, lse, parts, part_lse, pieces, 0.1, heads, 0, 8, 1, 2, 0, 1, 5
        )
        merge(pieces, out, lse, parts, part_lse, heads, 1, 3, 2, 2, 1)
        assert bool(out[[0, 2]].isfinite().all())
        assert bool(out[[0, 2]].any())
        assert not bool(out[[1, 3]].any())
        assert bool((lse[[1, 3]] == -torch.inf).all())


# Whole sequences, heads and programs, which take those of two blocks first.
TURNS: dict[str, tuple[list[int], int, int]] = {
    "more sequences than lanes": ([(37 * i) % 129 for i in range(150)], 1, 13),
    "two tiles of rows": ([(37 * i) % 129 for i in range(20)], 70, 7),
    "none is long": ([1] * 40, 2, 9),
    "all are long": ([128] * 40, 2, 9),
    "lengths that cannot be": ([-1, 500, 3, 65, 2**31 - 1, -(2**31), 64, 66], 2, 3),
}


@pytest.mark.parametrize(("lengths", "heads", "programs"), TURNS.values(), ids=TURNS)
def test_programs_take_long_ones_first_and_each_once(lengths, heads, programs) -> None:
    from tilelang_mla.kernels import c

    torch.manual_seed(0)
    batch, dim, rope = len(lengths), 64, 32
    kv, table = torch.randn(3, 64, dim + rope), torch.randint(3, (batch, 2), dtype=torch.int32)
    q, seqlens = torch.randn(batch, heads, dim + rope), torch.tensor(lengths, dtype=torch.int32)
    out, lse = poison_(torch.empty(batch, heads, dim)), poison_(torch.empty(batch, heads, 1))
    parts, part_lse = torch.empty(1, heads, dim), torch.empty(1, heads)
    kernel = c.kernel("decode", dim_nope=dim, dim_rope=rope, block_n=64, num_stages=2, gather=False)
    kernel(
        q, kv, seqlens, table, seqlens, seqlens, out, lse, parts, part_lse, seqlens, 0.1, heads, 0, batch, 1, 0, 2, 1,
        programs,
    )  # fmt: skip
    for b, n in enumerate(lengths):
        keys = kv[table[b].long()].flatten(0, 1)[: n if 0 <= n <= 128 else 0].double()
        scores = q[b].double() @ keys.mT * (0.1 * math.log(2))
        want = scores.softmax(-1) @ keys[:, :dim] if len(keys) else torch.zeros(heads, dim).double()
        torch.testing.assert_close(out[b].double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 16, 64, 128])
@pytest.mark.parametrize("batch", [1, 4, 16, 65, 128, 256])
def test_shares_are_even_whatever_the_lengths(batch, heads) -> None:
    """Each within 1 1/8 of what it would be without loss, and some blocks for beginnings and merging."""
    tiles = cdiv(heads, 64)
    for kind in KINDS:
        lengths = lengths_of(kind, batch)
        shares = shares_of(tiles, 132)
        _, pieces = line_of(lengths, shares, heads)
        ideal = sum(cdiv(n, BLOCK) for n in lengths) * tiles / 132
        load = [0] * shares
        for piece in pieces:
            load[piece.share] += piece.last - piece.first + 1
        merged = sum(1 for piece in pieces if len([p for p in pieces if p.sequence == piece.sequence]) > 1)
        end = max(load) + merged * heads / 1024
        alone = cdiv(batch, shares)
        assert end <= 1.125 * ideal + alone + 12, (kind, end, ideal)


def test_partial_results_have_slots_of_their_own() -> None:
    for kind, batch, shares in itertools.product(KINDS, (1, 2, 7, 150), (1, 2, 9, 132)):
        _, pieces = line_of(lengths_of(kind, batch), shares, 16)
        places = [piece.place for piece in pieces]
        assert len(places) == len(set(places))
        assert max(places) < batch + shares - 1
        for b, n in enumerate(lengths_of(kind, batch)):
            own = [piece for piece in pieces if piece.sequence == b]
            assert [own[0].first, own[-1].last] == [0, cdiv(n, BLOCK)]
            assert all(one.last == other.first for one, other in itertools.pairwise(own))


def test_shares_fill_the_device_whatever_the_rows() -> None:
    for tiles in (1, 2, 3, 4, 7, 44, 66, 67, 100, 132, 200):
        shares = shares_of(tiles, 132)
        waves = cdiv(shares * tiles, 132)
        assert waves <= 4
        assert shares * tiles >= 0.74 * waves * 132, (tiles, shares)
    assert (shares_of(1, 132), shares_of(2, 132), shares_of(0, 132)) == (132, 66, 132)


def test_a_batch_of_few_blocks_has_no_more_shares_than_those() -> None:
    problem = DecodeProblem(16, 512, 64, 1, 2, 128, 64)
    assert plan_without_schedule(problem, H200).spare_parts == 3
    assert plan_without_schedule(DecodeProblem(16, 512, 64, 1, 0, 0, 64), H200).spare_parts == 0
