"""Are caches of 8 bits what engines write, and is attention over them that over the tokens they hold?"""

from __future__ import annotations

import itertools
import math
import os
import random
import struct
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernel_reference.attention import attention
from kernel_reference.testing.guards import assert_bitwise_equal, poison_
from kernel_reference.testing.numerics import assert_close_to_oracle
from tilelang_mla import dequantize_kv, flash_mla_with_kvcache, plan_decode, quantize_kv
from tilelang_mla.caches import E4M3, RECORD
from tilelang_mla.plan import (
    DecodeProblem,
    DeviceLimits,
    decode_tiles,
    plan_without_schedule,
    tiles_8bit,
    tiles_of_keys,
)

Tensor = torch.Tensor
BF16 = torch.bfloat16
MIXED = [70, 0, 33, 129, 64, 1, 32]
FORMATS = ["e4m3", "656"]
every_format = pytest.mark.parametrize("format", FORMATS)


def tokens(*shape: int) -> Tensor:
    """Latents whose tiles are of unlike size, and ropes."""
    kv = torch.randn(*shape, 576)
    kv[..., :128] *= 30
    kv[..., 128:256] *= 1e-3
    return kv.bfloat16()


# Formats


def test_a_record_is_512_bytes_of_e4m3_four_scales_and_64_ropes_in_bfloat16() -> None:
    kv = tokens(1)[0]
    kv[256:384] = 0
    [record] = quantize_kv(kv[None], "656").tolist()
    assert len(record) == RECORD == 656
    scales = struct.unpack("<4f", bytes(record[512:528]))
    for tile, scale in enumerate(scales):
        own = kv[tile * 128 : (tile + 1) * 128].float()
        assert scale == pytest.approx(max(float(own.abs().max()) / 448, torch.finfo(torch.float32).tiny))
        codes = torch.tensor(record[tile * 128 : (tile + 1) * 128], dtype=torch.uint8).view(E4M3).float()
        assert float(codes.abs().max()) == (448 if tile != 2 else 0)
        assert bool(((codes * scale - own).abs() <= own.abs() / 16 + scale / 512).all())
    rope = torch.tensor(record[528:], dtype=torch.uint8).view(BF16)
    assert_bitwise_equal(rope, kv[512:])


@every_format
def test_what_is_quantised_comes_back_to_within_a_sixteenth(format) -> None:
    kv = tokens(3, 5)
    held = quantize_kv(kv, format)
    assert held.shape == (3, 5, 656 if format == "656" else 576)
    back = dequantize_kv(held, format)
    assert back.dtype == BF16
    assert back.shape == kv.shape
    # Of the smallest numbers a format of one scale keeps less.
    least = kv.float()[..., :512].unflatten(-1, (4, 128)).abs().amax(-1, keepdim=True) / 448 / 256
    least = least.expand(3, 5, 4, 128).flatten(-2) if format == "656" else torch.tensor(2.0**-9)
    error = (back.float() - kv.float()).abs()
    assert bool((error[..., :512] <= kv[..., :512].abs().float() / 15.5 + least).all())


def test_numbers_beyond_e4m3_are_clamped_and_nan_stays() -> None:
    kv = torch.tensor([[1000.0, -1e30, math.inf, math.nan, 2.0, 0.0]])
    for scale in (None, 1.0, torch.ones(1)):
        assert dequantize_kv(quantize_kv(kv, "e4m3", scale), "e4m3", scale, torch.float32).nan_to_num(7).tolist() == [
            [448, -448, 448, 7, 2, 0]
        ]
    assert dequantize_kv(quantize_kv(kv[:, :1], "e4m3", 4.0), "e4m3", 4.0).item() == 1024


# Attention


class Cached:
    """Sequences of ``lengths`` tokens in a paged cache of 8 bits, and what their rows must be.

    cancelling: two latents are 128 times as large as the others, in q and in keys, and their products cancel. As values
    they are not looked at.
    """

    def __init__(
        self, format: str, lengths: list[int], *, heads: int = 3, seqlen_q: int = 1, page: int = 48, width: int = 576,
        cancelling: bool = False, device: Any = "cpu",
    ) -> None:  # fmt: skip
        torch.manual_seed(len(lengths) * page)
        self.format, self.lengths, self.device, self.page = format, lengths, device, page
        columns = max(1, -(-max(lengths) // page))
        held = torch.randn(len(lengths) * columns, page, 1, width).bfloat16()
        self.values = slice(2 if cancelling else 0, 512)
        if cancelling:
            held *= 0.1
            held[..., 0], held[..., 1] = 12.8, -12.8
        self.kv_scale = torch.tensor([0.04], device=device) if format == "e4m3" else None
        scale = None if self.kv_scale is None else self.kv_scale.cpu()
        self.kv = quantize_kv(held, format, scale).to(device)
        self.table = torch.randperm(len(held)).int().view(len(lengths), columns).to(device)
        # Unused tails of pages: NaN in the cache, of e4m3 and of the records' scales alike.
        for b, n in enumerate(lengths):
            if n % page:
                self.kv[self.table[b, n // page], n % page :] = (
                    torch.full((), math.nan).to(E4M3) if format == "e4m3" else torch.tensor(127, dtype=torch.uint8)
                )
        self.q = torch.randn(len(lengths), seqlen_q, heads, width).bfloat16().to(device)
        if cancelling:
            self.q[..., :2] = 128
        self.seqlens_k = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.scale = width**-0.5

    def run(self, **options: Any) -> Any:
        given = (self.q, self.kv, self.seqlens_k, self.table, 512, self.scale, True)
        return flash_mla_with_kvcache(*given, kv_scale=self.kv_scale, return_lse=True, **options)

    def check(self, out: Tensor, lse: Tensor) -> None:
        """Beside float64 on what the cache holds; plain is PyTorch on that in bfloat16, as keys are dequantised."""
        whole = dequantize_kv(self.kv, self.format, self.kv_scale, torch.float64)  # type: ignore[arg-type]
        of_lse = []
        for b, n in enumerate(self.lengths):
            keys = whole[self.table[b].long()].flatten(0, 1)[:n]
            rounded = keys.bfloat16().float()
            exact, plain = (
                attention(q, k, k[..., self.values], softmax_scale=self.scale, causal=True)
                for q, k in ((self.q[b].double(), keys), (self.q[b].float(), rounded))
            )
            if n == 0:
                assert not bool(out[b].any())
                assert bool((lse[b] == -torch.inf).all())
                continue
            assert_close_to_oracle(out[b, ..., self.values].to(BF16), exact.out, plain.out.to(BF16))
            of_lse.append((lse[b], exact.lse, plain.lse.float()))
        assert_close_to_oracle(*[torch.stack(each) for each in zip(*of_lse, strict=True)], what="lse")


@every_format
def test_attention_over_a_cache_of_8_bits_is_that_over_the_tokens_it_holds(format) -> None:
    for seqlen_q, page, width in ((1, 48, 512 if format == "e4m3" else 576), (3, 64, 576)):
        batch = Cached(format, MIXED, seqlen_q=seqlen_q, page=page, width=width)
        batch.check(*batch.run())
        planned = batch.run(plan=plan_decode(batch.seqlens_k, 3, seqlen_q, dim_rope=width - 512, cores=132))
        batch.check(*planned)


def test_a_scale_may_be_a_number() -> None:
    batch = Cached("e4m3", MIXED)
    want = batch.run().out
    batch.kv_scale = 0.04  # type: ignore[assignment]
    torch.testing.assert_close(batch.run().out, want, rtol=0, atol=0)


@pytest.mark.gpu
@every_format
@pytest.mark.parametrize("page", [64, 1, 48])
@pytest.mark.parametrize("heads", [1, 16, 24, 64, 128])
def test_kernels_attend_to_a_cache_of_8_bits(device, format, page, heads) -> None:
    lengths = [*MIXED, 1000, 3000]
    for seqlen_q, width in ((1, 576), (2, 576), *([(1, 512)] if format == "e4m3" else [])):
        batch = Cached(format, lengths, heads=heads, seqlen_q=seqlen_q, page=page, width=width, device=device)
        batch.check(*batch.run())
        for how in ({}, {"num_splits": 1}, {"num_splits": 3}):
            plan = plan_decode(batch.seqlens_k, heads, seqlen_q, dim_rope=width - 512, **how)
            batch.check(*batch.run(plan=plan))
            problem = DecodeProblem(heads, 512, width - 512, seqlen_q, len(lengths), 4096, page, cache=format)
            of_keys = tiles_of_keys(problem, plan.tiles, DeviceLimits(132))
            for tiles in (of_keys, replace(of_keys, narrow=True)):
                if tiles.covers(problem):
                    batch.check(*batch.run(plan=plan._replace(tiles=tiles)))


def test_a_random_batch_over_a_cache_of_8_bits_is_the_definition(device, random_case) -> None:
    rng = random.Random(random_case)
    most = rng.choice([5, 300, 4000] if device.type != "cpu" else [5, 300])
    lengths = [rng.choice([1, 64, rng.randint(1, 200), rng.randint(0, most)]) for _ in range(rng.randint(1, 9))]
    heads, tokens = rng.choice([1, 8, 16, 20, 32, 64, 128]), rng.choice([1, 1, 2, 3])
    format, page = rng.choice(["e4m3", "656"]), rng.choice([64, 128, 1, 16, 48])
    width, cancelling = rng.choice([576, 576, 512]) if format == "e4m3" else 576, rng.random() < 0.2
    batch = Cached(
        format, [*lengths, 3], heads=heads, seqlen_q=tokens, page=page, width=width, cancelling=cancelling,
        device=device,
    )  # fmt: skip
    how = rng.choice([None, {}, {"num_splits": rng.randint(1, 20)}])
    plan = None if how is None else plan_decode(batch.seqlens_k, heads, tokens, dim_rope=width - 512, **how)
    batch.check(*batch.run(plan=plan))


@every_format
@pytest.mark.parametrize("heads", [3, 20, 64])
def test_trap_small_products_count_beside_large_ones_that_cancel(device, format, heads) -> None:
    """Sums of 13 bits, as tensor cores keep of products of 8 bits, lose them."""
    batch = Cached(format, [300, 70], heads=heads, cancelling=True, device=device)
    batch.check(*batch.run())
    batch.check(*batch.run(plan=plan_decode(batch.seqlens_k, heads, num_splits=2)))


@pytest.mark.gpu
@pytest.mark.parametrize(("format", "width"), [("e4m3", 576), ("e4m3", 512), ("656", 576)])
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_a_number_of_splits_gives_the_same_bits_alone_and_in_any_batch_of_8_bits(device, format, width, heads) -> None:
    batch = Cached(format, [3000, 70, 129], heads=heads, width=width, device=device)
    how = {"num_splits": 4, "dim_rope": width - 512}
    whole = batch.run(plan=plan_decode(batch.seqlens_k, heads, **how))
    for b in range(3):
        own = slice(b, b + 1)
        plan = plan_decode(batch.seqlens_k[own], heads, **how)
        alone = flash_mla_with_kvcache(
            batch.q[own], batch.kv, batch.seqlens_k[own], batch.table[own], 512, batch.scale, True,
            kv_scale=batch.kv_scale, plan=plan, return_lse=True,
        )  # fmt: skip
        assert_bitwise_equal(alone.out, whole.out[own])
        assert_bitwise_equal(alone.lse, whole.lse[own])


# The kernel's text in C


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


@pytest.mark.parametrize("splits", [0, 2], ids=["shares", "parts"])
def test_the_kernel_widens_every_key_and_scales_it_once(in_c, splits) -> None:
    """By shares without a rope, and by equal parts and tiles of 16 rows. What records add, test_sparse.py looks at."""
    torch.manual_seed(1)
    dim, rope, page, pages, batch = 64, 32 if splits else 0, 48, 7, len(MIXED)
    heads, tiles = (20, {"block_m": 16, "block_n": 128}) if splits else (3, {"block_n": 32})
    kernel = in_c("decode_8bit", cache="e4m3", dim_nope=dim, dim_rope=rope, num_stages=2, **tiles)
    merge = in_c("merge", dim_nope=dim)
    kv, ropes, scales = torch.randn(pages, page, dim), torch.randn(pages, page, rope), torch.full((1, 1, 1), 0.7)
    wide = torch.cat([kv, ropes], -1).double() * 0.7
    # Without a rope the latents stand in.
    ropes = ropes if rope else kv
    table = torch.randint(pages, (batch, 3), dtype=torch.int32)
    q, lengths = torch.randn(batch, heads, dim + rope), torch.tensor(MIXED, dtype=torch.int32)
    num_parts = batch * splits if splits else batch + 3
    out, lse = poison_(torch.empty(batch, heads, dim)), poison_(torch.empty(batch, heads, 1))
    parts, part_lse = poison_(torch.empty(num_parts, heads, dim)), poison_(torch.empty(num_parts, heads))
    pieces, by = torch.zeros(2 * batch, dtype=torch.int32), 0 if splits else 2
    kernel(
        q, kv, ropes, scales, lengths, table, lengths, lengths, out, lse, parts, part_lse, pieces, 0.1, heads, 0,
        num_parts, max(splits, 1), by, 0, 1, num_parts if splits else 4,
    )  # fmt: skip
    merge(lengths if splits else pieces, out, lse, parts, part_lse, heads, max(splits, 1), 3, 2, by, 1)
    for b, n in enumerate(MIXED):
        keys = wide[table[b].long()].flatten(0, 1)[:n]
        scores = q[b].double() @ keys.mT * (0.1 * math.log(2))
        want = scores.softmax(-1) @ keys[:, :dim]
        torch.testing.assert_close(out[b].double(), want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lse[b, :, 0].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_blocks_of_8_bits_fit_beside_those_that_are_widened() -> None:
    limits = DeviceLimits(132)
    for nope, rope in (*itertools.product((64, 320, 448), (32, 64, 128)), (512, 32), (512, 96)):
        problem = DecodeProblem(16, nope, rope, 1, 4, 8192, 64, cache="e4m3")
        tiles = tiles_8bit(problem, decode_tiles(16, nope, rope, 8192, limits), limits)
        assert tiles.shared_memory(problem) <= limits.shared_memory
        assert (tiles.spare_parts, tiles.block_n) == (264, 32)


@pytest.mark.parametrize(("rows", "block_m"), [(1, 16), (16, 16), (17, 32), (32, 32)])
def test_keys_are_rows_where_latents_are_512_and_two_of_their_stages_are_loaded_beside_a_block(rows, block_m) -> None:
    limits = DeviceLimits(132)
    for cache, rope in (("656", 64), ("e4m3", 64), ("e4m3", 0), ("e4m3", 128)):
        problem = DecodeProblem(rows, 512, rope, 1, 4, 8192, 64, cache=cache)
        planned = decode_tiles(rows, 512, rope, 8192, limits)
        tiles = tiles_8bit(problem, planned, limits)
        assert (tiles.block_m, tiles.block_n, tiles.spare_parts) == (block_m, 128, planned.spare_parts)
        assert tiles.num_stages >= 4
        assert tiles.covers(problem)
        assert tiles.shared_memory(problem) <= limits.shared_memory
        # By choice alone: its sums have 13 bits.
        assert not tiles.narrow
        assert replace(tiles, narrow=True).covers(problem) == (block_m == 16 and cache == "e4m3")
        # As a plan has them.
        fewer = replace(tiles, num_stages=3)
        assert tiles_8bit(problem, fewer, limits) == fewer


def test_more_than_32_rows_are_widened_by_rows_unless_a_plan_asks_for_keys_as_rows() -> None:
    limits = DeviceLimits(132)
    for rows, dims, by_rows in ((33, (512, 64), 1), (128, (512, 64), 1), (32, (512, 64), 0), (128, (512, 0), 0)):
        for cache in FORMATS:
            problem = DecodeProblem(rows, *dims, 1, 4, 8192, 64, cache=cache)
            planned = decode_tiles(rows, 512, 64, 8192, limits)
            tiles = tiles_8bit(problem, planned, limits)
            assert (tiles.by_rows, tiles.block_m, tiles.spare_parts) == (
                by_rows,
                64 if by_rows else 32,
                planned.spare_parts,
            )
            assert tiles.covers(problem)
            assert tiles.shared_memory(problem) <= limits.shared_memory
            of_keys = tiles_of_keys(problem, planned, limits)
            assert tiles_8bit(problem, of_keys, limits) == of_keys


def test_shares_without_a_plan_fill_the_sms_with_tiles_of_as_many_rows_as_the_kernel_takes() -> None:
    for rows, block_m in ((96, 64), (32, 32)):
        tiles = plan_without_schedule(DecodeProblem(rows, 512, 64, 1, 4, 8192, 64, cache="e4m3"), DeviceLimits(132))
        assert (tiles.spare_parts + 1) * tiles.row_tiles(rows) == 132
        assert tiles.block_m == block_m


# Errors

BAD: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "another format": (
        "e4m3", {"kv": lambda b: b.kv.view(torch.float8_e5m2)}, TypeError, r"^kv.dtype must be .*e4m3fn"
    ),
    "bytes that are no records": (
        "e4m3", {"kv": lambda b: b.kv.view(torch.uint8)}, ValueError, r"^kv_scale must be None"
    ),
    "a scale with records": ("656", {"kv_scale": lambda b: 2.0}, ValueError, r"^kv_scale must be None with records"),
    "a scale with a wide cache": (
        "e4m3", {"kv": lambda b: b.kv.to(BF16)}, ValueError, r"^kv_scale must be None with a cache of torch.bfloat16"
    ),
    "a cache of another dtype and a scale": (
        "e4m3", {"kv": lambda b: b.kv.view(torch.float8_e5m2), "kv_scale": lambda b: 1.0}, TypeError, r"^kv.dtype must"
    ),
    "two scales": ("e4m3", {"kv_scale": lambda b: torch.ones(2)}, ValueError, r"^kv_scale must be a float, or one"),
    "a scale in float64": (
        "e4m3", {"kv_scale": lambda b: torch.ones(1).double()}, ValueError, r"^kv_scale must be a float, or one"
    ),
    "float16 beside records": (
        "656", {"q": lambda b: b.q.half()}, ValueError, r"^q must be torch.bfloat16 of 512 \+ 64 elements"
    ),
    "records of another length": (
        "656", {"kv": lambda b: b.kv[..., :640]}, ValueError, r"^kv must be \[pages, page_size, 1, 656\]"
    ),
    "records a byte apart": (
        "656", {"kv": lambda b: torch.zeros(9, 48, 1, 657, dtype=torch.uint8)[..., :656]}, ValueError, r"^kv must be of"
    ),
    "records a byte late": (
        "656", {"kv": lambda b: torch.zeros(b.kv.numel() + 1, dtype=torch.uint8)[1:].view(b.kv.shape)}, ValueError,
        r"^kv must be a view that begins at a multiple of 4 bytes of its storage, got offset 1"
    ),
    "a scale that is a str": ("e4m3", {"kv_scale": lambda b: "2"}, TypeError, r"^kv_scale must be a float, one"),
    "a scale of infinity": ("e4m3", {"kv_scale": lambda b: math.inf}, ValueError, r"^kv_scale must be finite, got inf"),
    "a scale of 0": ("e4m3", {"kv_scale": lambda b: 0.0}, ValueError, r"^kv_scale must be above 0, got 0.0"),
}  # fmt: skip


@pytest.mark.parametrize(("format", "changed", "error", "match"), BAD.values(), ids=BAD)
def test_a_cache_that_cannot_be_is_refused_by_name(format, changed, error, match) -> None:
    batch = Cached(format, MIXED)
    for name, value in changed.items():
        setattr(batch, name, value(batch))
    with pytest.raises(error, match=match):
        batch.run()


def test_formats_and_tensors_that_cannot_be_are_refused_by_name() -> None:
    kv = tokens(2)
    with pytest.raises(ValueError, match=r"^format must be 'e4m3' or '656', got 'e5m2'"):
        quantize_kv(kv, "e5m2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^kv must be floating"):
        quantize_kv(kv.int())
    with pytest.raises(ValueError, match=r"^kv must be \[..., 576\]"):
        quantize_kv(kv[..., :512], "656")
    with pytest.raises(ValueError, match=r"^kv_scale must be None with format"):
        quantize_kv(kv, "656", 1.0)
    for wrong, error in ("1", TypeError), (True, TypeError), (math.nan, ValueError), (-1.0, ValueError):
        with pytest.raises(error, match=r"^kv_scale must be (a float|finite|above 0)"):
            quantize_kv(kv, kv_scale=wrong)  # type: ignore[arg-type]
    for records in torch.zeros(2, 657, dtype=torch.uint8)[:, :656], torch.zeros(657, dtype=torch.uint8)[1:]:
        with pytest.raises(ValueError, match=r"^cache must be (of contiguous rows 4 bytes apart|a view that begins)"):
            dequantize_kv(records, "656")
    with pytest.raises(TypeError, match=r"^cache must be of torch.float8_e4m3fn"):
        dequantize_kv(kv)
    with pytest.raises(TypeError, match=r"^cache must be of torch.uint8"):
        dequantize_kv(kv, "656")
    with pytest.raises(ValueError, match=r"^cache must be \[..., 656\]"):
        dequantize_kv(kv.view(torch.uint8), "656")
