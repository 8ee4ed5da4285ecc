"""Does the indexer score keys and list the highest? By the public functions, and by the kernels' text in C."""

from __future__ import annotations

import math
import os
from itertools import pairwise
from typing import Any

import pytest
import torch

from kernel_reference.checks import validate_values
from kernel_reference.indexing import index_scores as exact_scores
from kernel_reference.indexing import top_positions
from kernel_reference.testing.contract import check_compiles, check_no_host_sync, check_opcheck
from kernel_reference.testing.guards import assert_bitwise_equal, poison_
from tilelang_mla import (
    IndexPlan,
    flash_mla_with_kvcache,
    index_cache_views,
    index_lengths,
    index_scores,
    index_topk,
    quantize_index_k,
    quantize_kv,
)
from tilelang_mla.indexer.arguments import (
    ScoresOptions,
    ScoresTensors,
    TopkOptions,
    TopkTensors,
    check_scores,
    check_topk,
)
from tilelang_mla.indexer.plan import IndexProblem, plan_index_scores, topk_words
from tilelang_mla.plan import DeviceLimits

Tensor = torch.Tensor
E4M3 = torch.float8_e4m3fn
# Tensor cores keep 13 bits of a product beside the largest of those that are summed with it.
TRUNCATED = 2**-11


def ints(*values: Any, device: Any = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class Batch:
    """Ragged tokens over a paged cache; keys that no token sees are NaN, and so are the pages of no sequence.

    tokens: of each sequence; rows behind the last are ``rest``, of no sequence.
    """

    def __init__(self, lengths: list[int], tokens: list[int], *, heads: int = 32, page: int = 64, rest: int = 0,
                 device: Any = "cpu", seed: int = 3) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.bounds = [0]
        for count in tokens:
            self.bounds.append(self.bounds[-1] + count)
        rows, columns = self.bounds[-1] + rest, max(1, *(-(-length // page) for length in lengths)) + 1
        pages = len(lengths) * columns + 1
        self.block_table = torch.randperm(pages, generator=generator)[:-1].int().view(len(lengths), columns).to(device)
        self.k_cache = quantize_index_k(normal(pages, page, 128) * (1 + normal(pages, page, 1).abs())).to(device)
        views, keep = index_cache_views(self.k_cache), torch.zeros(pages, page, dtype=torch.bool)
        for i, length in enumerate(lengths):
            for position in range(0, length, page):
                keep[int(self.block_table[i, position // page]), : length - position] = True
        views.scales[~keep.to(device)] = math.nan
        views.keys.view(torch.uint8)[~keep.to(device)] = 0x7F
        self.q = normal(rows, heads, 128).to(E4M3).to(device)
        self.weights = normal(rows, heads).to(device)
        self.cu_seqlens_q = ints(*self.bounds, device=device)
        self.seqlens_k = ints(*lengths, device=device)
        self.lengths = index_lengths(self.seqlens_k, self.cu_seqlens_q, num_tokens=rows)

    def run(self, **options: Any) -> Tensor:
        given = (self.q, self.k_cache, self.weights, self.lengths, self.block_table, self.cu_seqlens_q)
        return index_scores(*given, **options)

    def check(self, got: Tensor, lengths: Tensor | None = None, truncated: float = TRUNCATED) -> None:
        lengths = self.lengths if lengths is None else lengths
        views = index_cache_views(self.k_cache)
        assert got.dtype == torch.float32
        for i, (begin, end) in enumerate(pairwise(self.bounds)):
            most = max([0, *lengths[begin:end].tolist()])
            pages = self.block_table[i].long()
            held = views.keys.view(torch.uint8)[pages].view(E4M3).float().double()
            keys = (held * views.scales[pages].double()[..., None]).flatten(0, 1)[:most]
            own = slice(begin, end)
            q = self.q[own].float()
            want = exact_scores(q, keys, self.weights[own], lengths[own])
            size = exact_scores(q.abs(), keys.abs(), self.weights[own].abs(), lengths[own])
            seen = want > -math.inf
            assert torch.equal(got[own, :most] > -math.inf, seen)
            assert bool((got[own, most:] == -math.inf).all())
            off = (got[own, :most].double() - want)[seen].abs()
            assert bool((off <= truncated * size[seen] + 1e-30).all()), float((off / size[seen]).max())
        assert bool((got[self.bounds[-1] :] == -math.inf).all())


RAGGED = ([300, 5, 0, 64, 200], [3, 1, 0, 20, 2])


def test_each_token_scores_the_keys_that_it_sees() -> None:
    batch = Batch(*RAGGED, rest=3)
    batch.check(batch.run(), truncated=1e-5)
    wide = batch.run(max_seqlen_k=1000)
    batch.check(wide, truncated=1e-5)
    not_cleaned = torch.full_like(wide, 7)
    batch.run(out=not_cleaned, clean_logits=False)
    assert_bitwise_equal(not_cleaned, torch.where(wide > -math.inf, wide, 7))


def test_decoding_is_the_same_call_with_tokens_of_each_sequence_in_a_dimension() -> None:
    batch = Batch([300, 5, 70], [2, 2, 2])
    packed = batch.run()
    views = (batch.q.view(3, 2, 32, 128), batch.k_cache.squeeze(2), batch.weights.view(3, 2, 32))
    assert_bitwise_equal(index_scores(*views, batch.lengths.view(3, 2), batch.block_table).flatten(0, 1), packed)
    one = index_scores(batch.q[:3], batch.k_cache, batch.weights[:3], ints(9, 1, 0), batch.block_table)
    assert (one > -math.inf).sum(1).tolist() == [9, 1, 0]


def test_lengths_are_those_of_causal_attention() -> None:
    assert index_lengths(ints(5, 2), ints(0, 3, 5), num_tokens=7).tolist() == [3, 4, 5, 1, 2, 0, 0]
    assert index_lengths(ints(5, 1), num_tokens=4).tolist() == [4, 5, 0, 1]
    assert index_lengths(ints(5, 7), ints(1, 3, 3), num_tokens=4).tolist() == [0, 4, 5, 0]
    with pytest.raises(ValueError, match=r"^cu_seqlens_q.device must be cpu as seqlens_k is, got meta"):
        index_lengths(ints(5, 7), ints(1, 3, 3).to("meta"), num_tokens=4)


def test_a_cache_holds_keys_first_and_scales_behind_them_page_by_page() -> None:
    keys = torch.randn(3, 16, 128)
    cache = quantize_index_k(keys)
    assert cache.shape == (3, 16, 1, 132)
    page = cache[1].flatten()
    scales = page[16 * 128 :].view(torch.float32)
    torch.testing.assert_close(scales, keys[1].abs().amax(-1) / 448, rtol=1e-6, atol=0)
    back = page[: 16 * 128].view(E4M3).view(16, 128).float() * scales[:, None]
    assert bool(((back - keys[1]).abs() <= keys[1].abs() / 15 + scales[:, None] / 256).all())
    views = index_cache_views(cache)
    assert_bitwise_equal(views.scales[1], scales)
    views.keys[2, 3], views.scales[2, 3] = torch.ones(128).to(E4M3), 2.0
    assert bool((index_cache_views(cache).keys[2, 3].float() == 1).all())


def hard_rows(device: Any = "cpu") -> tuple[Tensor, Tensor]:
    """Rows that a radix select may get wrong: ties, zeros of both signs, infinities, NaN, all alike, nearly alike."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(12, 3000, generator=generator)
    rows[1] = torch.randint(0, 4, (3000,), generator=generator).float()
    rows[2] = 0
    rows[2, ::3] = -0.0
    rows[3] = 100 + rows[3] * 1e-4
    rows[4, 5], rows[4, 6], rows[4, 7], rows[4, 8] = math.nan, math.inf, -math.nan, -math.inf
    rows[5, :2900] = -math.inf
    rows[6] = -rows[6].abs() * 1e-40
    rows[7] = torch.arange(3000.0)
    rows[8] = -torch.arange(3000.0)
    lengths = ints(3000, 2999, 3000, 3000, 3000, 3000, 3000, 2500, 2500, 0, 3, 257, device=device)
    return rows.to(device), lengths


def test_the_highest_scores_are_listed_by_position_and_ties_go_to_the_lower_one() -> None:
    rows, lengths = hard_rows()
    for k in (1, 31, 256, 2048):
        assert_bitwise_equal(index_topk(rows, lengths, k), top_positions(rows, lengths, k))
    got = index_topk(torch.tensor([[2.0, 1.0, 2.0, 2.0, 3.0]]), ints(5), 3)
    assert got.tolist() == [[0, 2, 4]]


def test_positions_become_rows_of_the_pool_that_sparse_decoding_takes() -> None:
    """Of a batch in which k is no less than the keys, sparse decoding is dense decoding."""
    batch = Batch([70, 5], [1, 1])
    indices = index_topk(batch.run(), batch.lengths, 100, block_table=batch.block_table, page_size=64)
    kv = quantize_kv(torch.randn(len(batch.k_cache), 64, 1, 576), "656")
    q = torch.randn(2, 1, 16, 576).bfloat16()
    sparse = flash_mla_with_kvcache(q, kv, None, None, 512, indices=indices.view(2, 1, 100))
    dense = flash_mla_with_kvcache(q, kv, batch.seqlens_k, batch.block_table, 512)
    torch.testing.assert_close(sparse, dense, rtol=1e-2, atol=1e-2)
    table = ints([7, -1], [3, 4])
    got = index_topk(
        torch.zeros(3, 200), ints(70, 65, 1), 70, block_table=table, page_size=64, cu_seqlens_q=ints(0, 1, 2)
    )
    assert got[0, [0, 63, 64, 69]].tolist() == [7 * 64, 7 * 64 + 63, -1, -1]
    assert got[1, [0, 64, 65]].tolist() == [3 * 64, 4 * 64, -1]
    # The last token is no sequence's.
    assert got[2].tolist() == [-1] * 70


# The kernels' text in C


@pytest.fixture(scope="module")
def in_c(device: torch.device) -> Any:
    if device.type != "cpu":
        pytest.skip("on a GPU the kernel itself runs")
    try:
        from tilelang_mla.kernels import c
    except ImportError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no TileLang: {error}")
    return c.kernel


def score_in_c(in_c: Any, batch: Batch, each: int = 0, width: int = 0, clean: int = 1, programs: int = 2) -> Tensor:
    tile, blocks = 2, {"block_n": 64, "num_stages": 2, "piece": 16, "warpgroups": 1, "chunk": 2}
    score = in_c("index_scores", heads=16, tile_tokens=tile, **blocks)
    views = index_cache_views(batch.k_cache)
    rows, heads, _ = batch.q.shape
    width = width or batch.block_table.shape[1] * batch.k_cache.shape[1]
    out = poison_(torch.empty(rows, width))
    batches = len(batch.seqlens_k)
    slots = batches * -(-each // tile) if each else rows // tile + batches + 2
    score(
        batch.q.float().view(rows * heads, 128), views.keys.float(), views.scales.contiguous(), batch.weights,
        batch.lengths, batch.block_table, batch.cu_seqlens_q, out, int(each == 0), each, clean, slots, programs,
    )  # fmt: skip
    return out


def test_the_kernel_scores_ragged_tokens_over_pages_chunk_by_chunk(in_c) -> None:
    batch = Batch(*RAGGED, heads=16, page=48, rest=3)
    batch.check(score_in_c(in_c, batch), truncated=1e-5)
    # Rows that begin late, a page that the pool does not have, and lengths that cannot be.
    batch.cu_seqlens_q[0], batch.bounds[0] = 2, 2
    batch.lengths[:2] = 0
    batch.lengths[2], batch.lengths[3] = -1, 2**31 - 1
    got = score_in_c(in_c, batch)
    assert bool((got[:2] == -math.inf).all())
    batch.check(got, batch.lengths.clamp(0, 300) * (batch.lengths < 2**30), truncated=1e-5)
    batch.lengths.fill_(40)
    batch.block_table[0, 0] = 10**6
    assert not bool(score_in_c(in_c, batch)[2, :40].any())


def test_the_kernel_scores_as_many_tokens_of_each_sequence_and_leaves_what_is_not_to_be_cleaned(in_c) -> None:
    batch = Batch([300, 5, 129], [3, 3, 3], heads=16, page=16)
    for programs in (1, 2, 5):
        batch.check(score_in_c(in_c, batch, each=3, programs=programs), truncated=1e-5)
    cut = score_in_c(in_c, batch, each=3, width=150)
    batch.check(cut, batch.lengths * (batch.lengths <= 150), truncated=1e-5)
    left = score_in_c(in_c, batch, each=3, clean=0)
    # Whole blocks are written, what is behind them is not.
    assert bool(left[3:6, 64:].isnan().all())
    batch.check(torch.where(left.isnan(), -math.inf, left), truncated=1e-5)


def test_the_kernel_selects_the_highest_whatever_the_row(in_c) -> None:
    select = in_c("index_topk", words=4096, threads=1024)
    rows, lengths = hard_rows()
    lengths[9] = -1
    # More than are kept, so that digits of positions are looked for in the row.
    alike = torch.zeros(1, 4096 + 700)
    for scores, of, k in ((rows, lengths, 1), (rows, lengths, 256), (alike[:, :4096], ints(4096), 3000)):
        out = poison_(torch.empty(len(scores), k)).to(torch.int32) * 0 - 7
        nothing = torch.zeros(1, 1, dtype=torch.int32)
        select(scores.contiguous().view(torch.int32), of, nothing, nothing[0], out, 0, 0, 1)
        assert_bitwise_equal(out, top_positions(scores, of.clamp(min=0), k))
    table, bounds = ints([5, -1], [2, 3]), ints(0, 2, 3)
    out = torch.zeros(4, 3, dtype=torch.int32)
    scores = torch.tensor([[0.0] * 16 + [1.0] * 20] * 4)
    select(scores.view(torch.int32), ints(17, 36, 36, 9), table, bounds, out, 16, 1, 0)
    assert out.tolist() == [[80, 81, -1], [-1, -1, -1], [48, 49, 50], [-1, -1, -1]]


def test_launches_hand_kernels_what_they_take(in_c, monkeypatch) -> None:
    """Views of the cache, packed rows of what has a dimension more, and strides of what is not packed."""
    from tilelang_mla.indexer import launch

    def kernel(name: str, dtype: torch.dtype, **constants: Any) -> Any:
        def run(*given: Any) -> None:
            packed = [x.float() if isinstance(x, Tensor) and x.dtype == E4M3 else x for x in given]
            packed = [x.contiguous() if isinstance(x, Tensor) else x for x in packed]
            in_c(name, **constants)(*packed)
            out = max(i for i, x in enumerate(given) if isinstance(x, Tensor))
            given[out].copy_(packed[out])

        return run

    monkeypatch.setattr(launch, "kernel", kernel)
    monkeypatch.setattr(launch, "device_limits", lambda _: DeviceLimits(132))
    batch, plan = Batch([300, 5, 129], [2, 2, 2], heads=16, page=16), IndexPlan(2, 64, 2, 1, 2, 3)
    wide = torch.zeros(len(batch.k_cache), 2 * 16 * 132, dtype=torch.uint8)
    wide[:, : 16 * 132] = batch.k_cache.flatten(1)
    cache, want = wide[:, : 16 * 132].view(-1, 16, 1, 132), batch.run(max_seqlen_k=310)
    tokens = (batch.q.view(3, 2, 16, 128), cache, batch.weights.view(3, 2, 16), batch.lengths.view(3, 2))
    out = torch.zeros(3, 2, 320)[..., :310]
    for leading in (tokens, (batch.q, cache, batch.weights, batch.lengths)):
        packed = len(leading[0].shape) == 3
        bounds = batch.cu_seqlens_q if packed else None
        tensors = ScoresTensors(*leading, batch.block_table[:, ::1], bounds, out.flatten(0, 1) if packed else out)
        problem, _ = check_scores(tensors, ScoresOptions(True))
        launch.prepare_scores(problem, plan, tensors)(*tensors)
        torch.testing.assert_close(tensors.out.view(6, 310), want, rtol=1e-5, atol=1e-4)
        tensors.out.zero_()
    listed = torch.zeros(3, 2, 31, dtype=torch.int32)
    for options in ({}, {"block_table": batch.block_table, "page_size": 16}):
        wanted = index_topk(want.view(3, 2, 310), tokens[3], 31, **options)
        picked = TopkTensors(want.view(3, 2, 310), tokens[3], options.get("block_table"), None, listed)
        problem_of_list = check_topk(picked, TopkOptions(options.get("page_size", 0)))
        launch.prepare_topk(problem_of_list, picked)(*picked)
        assert_bitwise_equal(listed, wanted)


def test_scores_that_are_no_numbers_stay_so_where_a_token_sees_and_nowhere_else() -> None:
    cache = torch.zeros(1, 64, 1, 132, dtype=torch.uint8)
    weights = torch.full((2, 1, 32), math.nan)
    weights[1] = -math.inf
    q, lengths, table = torch.zeros(2, 1, 32, 128).to(E4M3), ints(3, 2)[:, None], ints([0], [0])
    scores = index_scores(q, cache, weights, lengths, table, clean_logits=True)[:, 0]
    assert scores.isnan().sum(1).tolist() == [3, 2]
    assert bool((scores[0, 3:] == -math.inf).all())


@pytest.mark.parametrize("shape", [(0, 2), (2, 0)])
def test_no_tokens_have_no_scores_and_no_lists(shape: tuple[int, int]) -> None:
    lengths, table = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape[0], 3, dtype=torch.int32)
    cache = torch.zeros(5, 64, 1, 132, dtype=torch.uint8)
    scores = index_scores(torch.zeros(*shape, 32, 128).to(E4M3), cache, torch.zeros(*shape, 32), lengths, table)
    assert scores.shape == (*shape, 3 * 64)
    assert index_topk(scores, lengths, 7, block_table=table, page_size=64).shape == (*shape, 7)
    assert index_topk(scores, lengths, 7).shape == (*shape, 7)


# What is refused

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q in bfloat16": ({"q": lambda b: b.q.bfloat16()}, TypeError, r"^q.dtype must be float8_e4m3fn"),
    "48 heads": ({"q": lambda b: b.q.repeat(1, 2, 1)[:, :48].contiguous()}, ValueError, r"^q must be of 16, 32, 64 or"),
    "heads of 64": ({"q": lambda b: b.q[..., :64]}, ValueError, r"^q must be \[T, Hi, 128\]"),
    "weights of other tokens": ({"weights": lambda b: b.weights[1:]}, ValueError, r"^weights must be \[26, 32\]"),
    "a cache of tokens' records": (
        {"k_cache": lambda b: b.k_cache[..., :128]}, ValueError, r"^k_cache must be \[pages, page_size, 1, 132\]"
    ),
    "pages of 24": ({"k_cache": lambda b: b.k_cache[:, :24]}, ValueError, r"^k_cache must be of pages of a multi"),
    "pages of one memory": (
        {"k_cache": lambda b: b.k_cache[:1].expand(b.k_cache.shape)}, ValueError, r"^k_cache must be of pages 16 bytes"
    ),
    "a cache that begins late": (
        {"k_cache": lambda b: torch.zeros(b.k_cache.numel() + 1, dtype=torch.uint8)[1:].view(b.k_cache.shape)},
        ValueError, r"^k_cache must be a view that begins at a multiple of 4 bytes"
    ),
    "e4m3": ({"k_cache": lambda b: b.k_cache.view(E4M3)}, TypeError, r"^k_cache.dtype must be uint8"),
    "lengths in int64": ({"lengths": lambda b: b.lengths.long()}, TypeError, r"^lengths.dtype must be int32"),
    "lengths of sequences": ({"lengths": lambda b: b.seqlens_k}, ValueError, r"^lengths must be \[26\], one a query"),
    "too long": ({"lengths": lambda b: b.lengths + 999}, ValueError, r"^lengths\[0\] must be from 0 to 384"),
    "no bounds": ({"cu_seqlens_q": lambda b: None}, ValueError, r"^cu_seqlens_q must be given, or q of a token"),
    "bounds of fewer": ({"cu_seqlens_q": lambda b: b.cu_seqlens_q[:-1]}, ValueError, r"^cu_seqlens_q must be \[6\]"),
    "a list": ({"weights": lambda b: [1.0]}, TypeError, r"^weights must be a torch.Tensor"),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "match"), BAD.values(), ids=BAD)
def test_what_cannot_be_scored_is_refused_by_name(changed, error, match) -> None:
    batch = Batch(*RAGGED)
    for name, value in changed.items():
        setattr(batch, name, value(batch))
    with pytest.raises(error, match=match):
        batch.run()


def test_what_cannot_be_listed_is_refused_by_name() -> None:
    scores, lengths = torch.zeros(3, 50), ints(50, 1, 0)
    table = ints([0], [1], [2])
    for options, match in (
        ({"k": 0}, r"^k must be from 1 to 4096"), ({"k": 5000}, r"^k must be from 1 to 4096"),
        ({"block_table": table}, r"^page_size must be given with block_table"),
        ({"page_size": 64}, r"^page_size must be None without block_table"),
        ({"cu_seqlens_q": lengths}, r"^cu_seqlens_q must be None without block_table"),
        ({"block_table": table[:2], "page_size": 64}, r"^cu_seqlens_q must be given, or scores of a token"),
        ({"out": torch.zeros(3, 4, dtype=torch.int32)}, r"^out must be \[.., 2048\]"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            index_topk(scores, lengths, **options)
    with pytest.raises(ValueError, match=r"^lengths\[0\] must be from 0 to 50"):
        index_topk(scores, lengths + 1, 5)
    with pytest.raises(TypeError, match=r"^scores.dtype must be float32"):
        index_topk(scores.double(), lengths, 5)
    with validate_values(False):
        assert index_topk(scores, lengths + 1, 1).tolist() == [[-1], [0], [0]]


# What engines need


def layer(q: Tensor, k_cache: Tensor, weights: Tensor, seqlens_k: Tensor, table: Tensor, bounds: Tensor) -> Tensor:
    """From queries to what sparse attention takes."""
    lengths = index_lengths(seqlens_k, bounds, num_tokens=q.shape[0])
    scores = index_scores(q, k_cache, weights, lengths, table, bounds)
    return index_topk(scores, lengths, 8, block_table=table, page_size=64, cu_seqlens_q=bounds)


def layer_inputs(lengths: list[int], tokens: list[int]) -> tuple[Tensor, ...]:
    batch = Batch(lengths, tokens)
    return batch.q, batch.k_cache, batch.weights, batch.seqlens_k, batch.block_table, batch.cu_seqlens_q


def test_the_top_k_passes_torchs_own_checks() -> None:
    """Of scores: opcheck computes with its inputs, which torch cannot do with e4m3."""
    batch = Batch([70, 5], [2, 1])
    out = torch.zeros(3, 8, dtype=torch.int32)
    given = (batch.run(), batch.lengths, batch.block_table, batch.cu_seqlens_q, out, 64)
    check_opcheck(torch.ops.tilelang_mla.index_topk.default, [given])


def test_a_layer_compiles_whole_for_any_number_of_tokens() -> None:
    check_compiles(layer, layer_inputs([70, 5], [2, 3]), layer_inputs([130, 64, 3], [7, 4, 1]))


def test_plans_give_a_tile_as_many_tokens_as_sequences_have_and_fit() -> None:
    limits = DeviceLimits(132)
    for heads in (16, 32, 64, 128):
        for tokens, each in ((1, 1), (128, 1), (256, 2), (512, 4), (4096, 0), (100000, 0)):
            problem = IndexProblem(
                heads, tokens, max(1, tokens // each) if each else 1, each, 64, 9, 2**17, 2**17, True
            )
            plan = plan_index_scores(problem, limits)
            assert plan.covers(problem)
            assert plan.shared_memory(problem) <= limits.shared_memory
            assert plan.tile_tokens == (min(each, 512 // heads) or 512 // heads)
    assert [topk_words(width) for width in (1, 131072, 131073, 2**20)] == [4096, 4096, 32768, 32768]


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "page"), [(64, 64), (64, 48), (32, 128), (16, 64), (128, 64)])
def test_kernels_score_keys_by_every_plan(device, heads, page) -> None:
    cases = [([300, 5, 0, 64, 200, 2000], [3, 1, 0, 20, 2, 70])]
    if (heads, page) == (64, 64):
        cases += [([1500, 3], [1, 1]), ([999, 70], [4, 4]), ([900, 70], [2, 2])]
    for lengths, tokens in cases:
        batch = Batch(lengths, tokens, heads=heads, page=page, rest=3 * (len(tokens) > 2), device=device)
        got = batch.run()
        batch.check(got)
        assert_bitwise_equal(batch.run(), got)
        left = batch.run(clean_logits=False)
        seen = got > -math.inf
        assert_bitwise_equal(left[seen], got[seen])
        if (heads, page) == (64, 64):
            for plan in ((8, 64, 8, 4, 8, 1), (8, 64, 8, 4, 8, 3), (4, 64, 8, 2, 8, 2), (1, 128, 4, 2, 4, 3)):
                batch.check(batch.run(plan=IndexPlan(*plan)))
    batch.lengths[0] = -5
    batch.block_table[0, 0] = -1
    assert bool((batch.run()[0] == -math.inf).all())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4])
def test_scores_of_a_sequence_have_the_same_bits_alone_and_in_any_batch(device, tokens) -> None:
    batch = Batch([2000, 5, 900], [tokens] * 3, heads=64, device=device)
    whole = batch.run()
    for i in range(3):
        own = slice(i * tokens, (i + 1) * tokens)
        alone = index_scores(
            batch.q[own], batch.k_cache, batch.weights[own], batch.lengths[own], batch.block_table[i : i + 1],
            ints(0, tokens, device=device),
        )  # fmt: skip
        assert_bitwise_equal(alone, whole[own])


@pytest.mark.gpu
def test_kernels_list_the_highest(device) -> None:
    rows, lengths = hard_rows(device)
    lengths[9], lengths[10] = -1, 3001
    clamped = torch.where((lengths < 0) | (lengths > 3000), 0, lengths)
    for k in (1, 31, 256, 2048, 2999):
        assert_bitwise_equal(index_topk(rows, lengths, k), top_positions(rows, clamped, k))
    many = torch.randn(300, 7001, device=device).round(decimals=2)
    of = torch.randint(0, 7001, (300,), device=device).int()
    assert_bitwise_equal(index_topk(many, of, 2048), top_positions(many, of, 2048))
    long = torch.randn(3, 131072, device=device).relu()
    of = ints(131072, 131071, 2049, device=device)
    assert_bitwise_equal(index_topk(long, of, 2048), top_positions(long, of, 2048))
    zeros = torch.zeros(2, 131072, device=device)
    assert_bitwise_equal(index_topk(zeros, ints(131072, 5000, device=device), 2048),
                         torch.arange(2048, device=device).int().expand(2, 2048).contiguous())  # fmt: skip


@pytest.mark.gpu
def test_a_step_of_decoding_runs_in_a_graph_on_other_lengths_and_pages(device) -> None:
    batch = Batch([3000, 17, 900], [1, 1, 1], heads=64, device=device)

    def step() -> Tensor:
        lengths = index_lengths(batch.seqlens_k, num_tokens=3)
        scores = index_scores(batch.q, batch.k_cache, batch.weights, lengths, batch.block_table, clean_logits=False)
        return index_topk(scores, lengths, 512, block_table=batch.block_table, page_size=64)

    check_no_host_sync(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    for lengths in ([3000, 17, 900], [2000, 5, 0]):
        batch.seqlens_k.copy_(ints(*lengths))
        graph.replay()
        assert_bitwise_equal(replayed.clone(), step())
        assert (replayed >= 0).sum(1).tolist() == [min(512, length) for length in lengths]
