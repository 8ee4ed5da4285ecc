"""Does every key of every tile have one program, whatever the lengths? And do all programs have as much to do?

Programs find out on the device: ``kernels/balance.py`` is asked here for what each of them takes.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from kernel_reference.integers import cdiv
from prefix_prefill.kernels import balance, batch, costs


class Config(NamedTuple):
    """What ``balance`` reads of a kernel's."""

    TOKENS: int = 8
    BLOCK_N: int = 16
    HEADS_KV: int = 2
    HEAD_TILES: int = 1
    D: int = 16
    IS_FP8: bool = False
    NEW_KV: bool = False
    HAS_LEFT: bool = False
    HAS_RIGHT: bool = True
    SKIP_DECODE: bool = False
    SHARED: bool = False
    GROUPS: int = 2


CAUSAL = Config()
FIELDS = tl.constexpr(8)
# The most pieces of a program in these tests, and room for what it has none of.
MOST = tl.constexpr(400)


class Piece(NamedTuple):
    sequence: int
    head: int
    tile: int
    low: int
    high: int
    parts: int
    number: int
    pieces: int


@triton.jit
def note(p_row, i_n, item):
    """One piece's numbers."""
    tl.store(p_row, i_n)
    tl.store(p_row + 1, item.i_head)
    tl.store(p_row + 2, item.i_tile)
    tl.store(p_row + 3, item.low)
    tl.store(p_row + 4, item.high)
    tl.store(p_row + 5, item.parts)
    tl.store(p_row + 6, item.i_piece)
    tl.store(p_row + 7, item.pieces)


@triton.jit(do_not_specialize=["rows", "num_sequences", "capacity", "left", "right", "num_splits"])
def tabulate(p_cu, p_seqlens, p_table, rows, num_sequences, capacity, left, right, num_splits, config: tl.constexpr):
    """Each program's pieces: [programs, MOST, FIELDS]."""
    C: tl.constexpr = config._replace()
    i_program = tl.program_id(0)
    o_lane = tl.arange(0, balance.LANES)
    given = batch.Batch(p_cu, p_seqlens, rows, num_sequences, capacity, left, right)
    work, pieces = balance.share_work(o_lane, tl.num_programs(0), num_splits, given, C)
    p_row = p_table + i_program * (MOST * FIELDS)
    if work.line:
        i_line, i_own, i_all = balance.place_on_lines(i_program, work)
        x = i_own * work.share
        end = tl.where(i_own < work.programs // work.lines, x + work.share, x)
        block = balance.first_block(o_lane, given, True)
        while x < end:
            block = balance.block_at(x, block, o_lane, work, given, True, C)
            if x < block.high:
                place = balance.place_at(x, block)
                own_costs = costs.costs_of(batch.sequence_at(given, place.i_n, C), given, C)
                item, x = balance.share_at(x, end, i_own, place, own_costs, work, C)
                note(p_row, place.i_n, balance.on_line(item, i_line, i_all - i_own, work))
                p_row += FIELDS
            else:
                x = end
    else:
        i_round = i_program * 0
        place_on_line = balance.round_of(i_round, i_program, work)
        while place_on_line < work.most:
            pieces = balance.block_at(place_on_line, pieces, o_lane, work, given, False, C)
            if place_on_line < pieces.high:
                found = balance.place_at(place_on_line, pieces)
                own_costs = costs.costs_of(batch.sequence_at(given, found.i_n, C), given, C)
                note(p_row, found.i_n, balance.piece_at(place_on_line, found, own_costs, work, C))
                p_row += FIELDS
            i_round += 1
            place_on_line = balance.round_of(i_round, i_program, work)


def pieces(
    device: torch.device, cu: Sequence[int], seqlens: Sequence[int], rows: int, *, programs: int = 13,
    num_splits: int = 0, capacity: int = 2**30, window: tuple[int, int] = (-1, 0), config: Config = CAUSAL,
) -> list[list[Piece]]:  # fmt: skip
    """The pieces of each program."""
    table = torch.full((programs, MOST.value, FIELDS.value), -9, dtype=torch.int64, device=device)
    lengths = (torch.tensor(given, dtype=torch.int64, device=device) for given in (cu, [*seqlens, 0]))
    tabulate[(programs,)](*lengths, table, rows, len(cu) - 1, capacity, *window, num_splits, config)
    return [[Piece(*row) for row in own if row[1] >= 0 and row[7]] for own in table.tolist()]


def of_lengths(device: torch.device, lengths: Sequence[tuple[int, int]], **options: object) -> list[list[Piece]]:
    cu = [*accumulate([new for _, new in lengths], initial=0)]
    return pieces(device, cu, [context + new for context, new in lengths], cu[-1], **options)  # type: ignore[arg-type]


def check(found: list[list[Piece]], wanted: set[tuple[int, int, int]]) -> None:
    """Each tile wanted is there, its pieces one after another and with nothing between them."""
    taken = defaultdict(list)
    for piece in itertools.chain(*found):
        taken[piece[:3]].append(piece)
    assert set(taken) == wanted
    for own in taken.values():
        own.sort(key=lambda piece: piece.number)
        assert [piece.number for piece in own] == [*range(own[0].pieces)], own
        assert len({(piece.pieces, piece.parts) for piece in own}) == 1
        assert (own[0].low, own[-1].high) == (0, own[0].parts)
        assert [piece.low for piece in own[1:]] == [piece.high for piece in own[:-1]]


BATCHES = {
    "one token": [(500, 1)],
    "decoding, a long one among short ones": [(1000, 1)] * 5 + [(90_000, 1)] + [(700, 1)] * 5,
    "a prompt and decoding": [(0, 2000), *[(1500, 1)] * 7],
    "a chunk far behind": [(50_000, 100)],
    "prompts": [(0, 700), (300, 400), (0, 90)],
    "nothing": [(0, 0), (10, 0)],
    "empty ones between": [(3000, 0), (9000, 1), (0, 0), (0, 30), (4, 0)],
    "more than are looked at together": [(3, 1)] * 140 + [(40_000, 5)],
    "likewise, all short": [(3, 1)] * 80 + [(40, 5)],
}


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_every_tile_is_taken_once_and_whole(device: torch.device, lengths, num_splits: int) -> None:
    found = of_lengths(device, lengths, num_splits=num_splits, programs=5 if len(lengths) > 50 else 13)
    tiles = [cdiv(new, CAUSAL.TOKENS) for _, new in lengths]
    check(found, {(i, head, tile) for i, count in enumerate(tiles) for head in range(2) for tile in range(count)})
    if num_splits:
        assert all(piece.pieces == num_splits for piece in itertools.chain(*found))


def test_heads_come_group_by_group_where_the_cache_does_not_hold_the_keys_of_all(device: torch.device) -> None:
    config = CAUSAL._replace(HEADS_KV=4)
    up, down = [*range(8)], [*reversed(range(8))]
    # 61 MB a head, of which the cache holds 32: one after another, and where two meet their tiles are alike.
    one_by_one = [(head, tile) for head in range(4) for tile in (down if head % 2 else up)]
    for context, wanted in ((1_000_000, one_by_one), (4000, [(head, tile) for tile in down for head in range(4)])):
        found = of_lengths(device, [(context, 60)], num_splits=1, programs=8, config=config)
        rounds = [[own[i] for own in (found if i % 2 == 0 else reversed(found))] for i in range(4)]
        assert [(piece.head, piece.tile) for piece in itertools.chain(*rounds)] == wanted


def test_rows_of_no_sequence_are_tiles_too(device: torch.device) -> None:
    rng = random.Random(0)
    for _ in range(6):
        first = rng.choice([0, 5, 40])
        lengths = [rng.choice([0, 1, 7, 8, 9, rng.randint(0, 99)]) for _ in range(rng.randint(0, 5))]
        cu = [*accumulate(lengths, initial=first)]
        after = rng.choice([0, 1, 40])
        found = pieces(device, cu, [9999] * len(lengths), cu[-1] + after, programs=4)
        counts = {-1: first, **dict(enumerate(lengths)), len(lengths): after}
        wanted = {(i, head, tile) for i, n in counts.items() for head in range(2) for tile in range(cdiv(n, 8))}
        check(found, wanted)


def test_impossible_bounds_make_no_more_pieces_than_there_is_memory_for(device: torch.device) -> None:
    rng = random.Random(1)
    for _ in range(6):
        rows = rng.randint(1, 60)
        numbers = [-(2**31), -5, 0, rows, rows + 1, 2**31 - 1]
        cu = [rng.choice(numbers) for _ in range(rng.randint(2, 7))]
        found = pieces(device, cu, [2**40, *[-7] * len(cu)][: len(cu) - 1], rows, programs=4, num_splits=2)
        most = (rows // CAUSAL.TOKENS + min(len(cu) + 1, rows)) * CAUSAL.HEADS_KV * 2
        assert sum(map(len, found)) <= most
        for piece in itertools.chain(*found):
            assert piece.sequence < 0 or piece.tile * CAUSAL.TOKENS < rows


def loads(
    found: list[list[Piece]], lengths: Sequence[tuple[int, int]], left: int = -1, tokens: int = CAUSAL.TOKENS
) -> list[float]:
    """Keys that each program reads for its tiles, and what their beginnings and ends cost."""

    def keys(piece: Piece) -> float:
        context, new = lengths[piece.sequence]
        last = context + min((piece.tile + 1) * tokens, new)
        seen = last if left < 0 else min(last, left + tokens)
        return costs.OVERHEAD.value + seen * (piece.high - piece.low) / piece.parts

    return [sum(map(keys, own)) for own in found]


def test_prompts_whose_tiles_keep_step_with_the_programs_are_shared_evenly(device: torch.device) -> None:
    """A prompt has somewhat fewer tiles than two rounds: one after another, the same programs took the longest ones."""
    config = CAUSAL._replace(TOKENS=512)
    lengths = [(0, 512 * 11)] * 6 + [(0, 0), (0, 2500)]
    for num_splits in (0, 1):
        found = of_lengths(device, lengths, num_splits=num_splits, programs=12, config=config)
        done = loads(found, lengths, tokens=512)
        assert max(done) <= 1.1 * sum(done) / len(done), done


BALANCED = {
    "a prompt": ([(0, 2048)], -1),
    "a chunk behind a long prefix": ([(60_000, 64)], -1),
    "a long sequence among short ones": ([(1000, 1)] * 10 + [(200_000, 1)] + [(700, 1)] * 10, -1),
    "a chunk and decoding": ([(8000, 512), *[(9000, 1)] * 20], -1),
    "a window": ([(0, 1200), (50_000, 300)], 1000),
}


@pytest.mark.parametrize(("lengths", "left"), BALANCED.values(), ids=BALANCED)
def test_programs_have_as_much_to_do(device: torch.device, lengths, left: int) -> None:
    config = CAUSAL._replace(HAS_LEFT=left >= 0)
    done = loads(of_lengths(device, lengths, window=(left, 0), config=config), lengths, left)
    assert max(done) <= 1.1 * sum(done) / len(done) + balance.LEAST.value, done


@pytest.mark.parametrize(("head_size", "cut"), [(16, True), (256, False)], ids=["in the cache", "more than it holds"])
def test_tiles_stay_whole_where_only_so_they_find_their_keys_in_the_cache(device: torch.device, head_size, cut) -> None:
    """Shares of a chunk's tiles would begin at different keys, and each be read from memory."""
    found = of_lengths(device, [(60_000, 8 * 12)], config=CAUSAL._replace(D=head_size))
    assert any(piece.pieces > 1 for piece in itertools.chain(*found)) is cut


def test_programs_read_the_keys_of_all_heads_at_a_time_where_tiles_are_of_few_rows(device: torch.device) -> None:
    config = CAUSAL._replace(GROUPS=1, HEADS_KV=4)
    lengths = [(700, 1)] * 20 + [(9000, 1)] + [(20, 1), (0, 0), (3000, 1)]
    found = of_lengths(device, lengths, programs=33, config=config)
    check(found, {(i, head, 0) for i, (_, new) in enumerate(lengths) for head in range(4) if new})
    assert not found[-1]
    for i in range(0, 32, 4):
        others = [[piece._replace(head=0) for piece in own] for own in found[i : i + 4]]
        assert others[1:] == others[:-1]
        assert [{piece.head for piece in own} for own in found[i : i + 4]] == [{0}, {1}, {2}, {3}]


@pytest.mark.parametrize(("keys", "count"), [(500, 1), (2000, 16), (30000, 17)])
def test_tiles_of_few_rows_are_cut_into_short_pieces(device: torch.device, keys: int, count: int) -> None:
    own = of_lengths(device, [(keys - 1, 1)], programs=34, config=CAUSAL._replace(GROUPS=1))
    assert {piece.pieces for pieces in own for piece in pieces} == {count}


def test_few_keys_are_not_cut_into_pieces_that_cost_more_than_they_save(device: torch.device) -> None:
    found = of_lengths(device, [(499, 1), (30, 1)], programs=132)
    assert {piece.pieces for piece in itertools.chain(*found)} == {1}


def test_a_sequence_longer_than_its_row_of_the_table_has_no_keys(device: torch.device) -> None:
    found = of_lengths(device, [(50_000, 1), (30, 1)], programs=132, capacity=40_000)
    assert {piece.pieces for piece in itertools.chain(*found)} == {1}


def test_keys_outside_a_window_count_for_nothing(device: torch.device) -> None:
    """One token behind 100,000 that sees 128 of them is one piece, and not one for each program."""
    config = CAUSAL._replace(HAS_LEFT=True)
    found = of_lengths(device, [(100_000, 1)], programs=132, window=(127, 0), config=config)
    assert [len(own) for own in found] == [1, 1] + [0] * 130
