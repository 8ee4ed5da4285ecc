"""Pages against loops over single tokens, and every way of laying tokens out against its inverse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_reference.attention import attention
from kernel_reference.blocks import csr_to_mask, local_strided, mask_to_csr
from kernel_reference.checks import validate_values
from kernel_reference.models import DEEPSEEK_V3, LLAMA3_70B
from kernel_reference.paging import LAYOUTS, Packed, append, cumulative, gather, pack, paged_cache, scatter, unpack
from kernel_reference.sharding import ZigZag, shard

SEQLENS = torch.tensor([37, 0, 16, 5], dtype=torch.int32)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def element(cache: torch.Tensor, layout: str, block: int, place: int, head: int, d: int) -> torch.Tensor:
    """One stored number, by the layouts' definitions."""
    if layout == "NHD":
        return cache[block, place, head, d]
    if layout == "HND":
        return cache[block, head, place, d]
    if cache.ndim == 5:
        x = cache.shape[4]
        return cache[block, head, d // x, place, d % x]
    return cache[block, head, d, place]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page", [1, 3, 16])
def test_gather_reads_each_number_from_where_the_layout_puts_it(layout: str, page: int) -> None:
    heads, dim, dim_v = 2, 8, 6
    cu_seqlens = cumulative(SEQLENS)
    k, v = normal(58, heads, dim), normal(58, heads, dim_v)
    paged = paged_cache(k, v, cu_seqlens, page, layout, x=4)
    for cache, tokens in ((paged.k_cache, k), (paged.v_cache, v)):
        assert cache is not None
        got = gather(cache, paged.block_table, paged.seqlens_k, layout)
        assert torch.equal(got.tokens, tokens)
        assert torch.equal(got.cu_seqlens, cu_seqlens)
        row = 0
        for b, length in enumerate(SEQLENS.tolist()):
            for position in range(length):
                block = int(paged.block_table[b, position // page])
                for h in range(heads):
                    for d in range(tokens.shape[2]):
                        assert element(cache, layout, block, position % page, h, d) == tokens[row, h, d]
                row += 1


@settings(max_examples=60, deadline=None)
@given(
    seqlens=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    page=st.integers(1, 20),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]),
    heads=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_every_dtype_length_and_page_survives_the_way_into_pages_and_back(
    seqlens: list[int], page: int, layout: str, dtype: torch.dtype, heads: int, seed: int
) -> None:
    k, v = normal(sum(seqlens), heads, 32, dtype=dtype), normal(sum(seqlens), heads, 24, dtype=dtype)
    cu_seqlens = cumulative(torch.tensor(seqlens))
    paged = paged_cache(k, v, cu_seqlens, page, layout, seed=seed)
    for cache, tokens in ((paged.k_cache, k), (paged.v_cache, v)):
        assert cache is not None
        assert cache.dtype == dtype
        got = gather(cache, paged.block_table, paged.seqlens_k, layout)
        assert got.tokens.dtype == dtype
        assert torch.equal(got.tokens.view(torch.uint8), tokens.view(torch.uint8))
        # Whatever is no token is NaN.
        assert int(cache.float().isnan().sum()) == cache.numel() - tokens.numel()
    used = [paged.block_table[b, : -(-length // page)] for b, length in enumerate(seqlens)]
    pages = torch.cat(used).tolist()
    assert len(set(pages)) == len(pages)
    assert paged.k_cache.shape[0] == len(pages) + 2
    for b, length in enumerate(seqlens):
        assert not set(paged.block_table[b, -(-length // page) :].tolist()) & set(pages)


@pytest.mark.parametrize("page", [16, 32, 64, 256, 544, 1056])
def test_pages_of_hybrid_models_hold_long_sequences(page: int) -> None:
    heads, dim = LLAMA3_70B.tensor_parallel(8).num_heads_kv, LLAMA3_70B.head_dim
    seqlens = torch.tensor([2000, 1, 544])
    k = normal(2545, heads, dim, dtype=torch.bfloat16)
    paged = paged_cache(k, k, cumulative(seqlens), page, "x-packed")
    assert paged.k_cache.shape[1:] == (heads, dim // 8, page, 8)
    assert torch.equal(gather(paged.k_cache, paged.block_table, seqlens, "x-packed").tokens, k)


def test_a_latent_cache_is_one_head_of_keys_without_values() -> None:
    latent = normal(58, 1, DEEPSEEK_V3.latent + DEEPSEEK_V3.rope, dtype=torch.bfloat16)
    paged = paged_cache(latent, None, cumulative(SEQLENS), 64)
    assert paged.v_cache is None
    assert paged.k_cache.shape[1:] == (64, 1, 576)
    assert torch.equal(gather(paged.k_cache, paged.block_table, paged.seqlens_k).tokens, latent)


def test_the_order_of_pages_depends_on_the_seed_alone() -> None:
    k = normal(58, 1, 8)
    tables = [paged_cache(k, None, cumulative(SEQLENS), 4, seed=seed).block_table for seed in (0, 0, 1)]
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])


def test_table_entries_past_a_sequence_hold_the_padding_asked_for_and_are_never_read() -> None:
    k = normal(58, 1, 8)
    paged = paged_cache(k, None, cumulative(SEQLENS), 4, padding=-1)
    assert paged.block_table[1].tolist() == [-1] * 10
    with validate_values():
        assert torch.equal(gather(paged.k_cache, paged.block_table, paged.seqlens_k).tokens, k)


def test_strided_caches_are_read_and_written_where_they_lie() -> None:
    fused = torch.full((7, 2, 16, 1, 8), torch.nan)
    cache = fused[:, 1]
    table, ends = torch.tensor([[3, 1], [6, 0]]), torch.tensor([0, 20, 24])
    tokens = normal(24, 1, 8)
    scatter(tokens, cache, table, ends)
    assert torch.equal(gather(cache, table, torch.tensor([20, 4])).tokens, tokens)
    assert bool(fused[:, 0].isnan().all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_tokens_go_behind_those_already_there(layout: str) -> None:
    old, new = normal(20, 2, 8), normal(9, 2, 8, seed=1)
    before, after = cumulative(torch.tensor([7, 13])), cumulative(torch.tensor([6, 3]))
    both = append(Packed(old, before), Packed(new, after))
    assert torch.equal(both.tokens, torch.cat([old[:7], new[:6], old[7:], new[6:]]))
    assert both.cu_seqlens.tolist() == [0, 13, 29]
    paged = paged_cache(both.tokens, None, both.cu_seqlens, 5, layout, x=4)
    paged.k_cache.fill_(torch.nan)
    scatter(old, paged.k_cache, paged.block_table, before, layout)
    scatter(new, paged.k_cache, paged.block_table, after, layout, starts=torch.tensor([7, 13]))
    assert torch.equal(gather(paged.k_cache, paged.block_table, paged.seqlens_k, layout).tokens, both.tokens)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("kind", ["tensor", "number", "head", "token and head"])
def test_scales_give_back_what_was_stored_times_the_scale(layout: str, dtype: torch.dtype, kind: str) -> None:
    k = normal(58, 2, 16)
    scale: Any = {
        "tensor": torch.tensor(0.03),
        "number": 0.03,
        "head": torch.tensor([0.03, 0.5]),
        "token and head": normal(58, 2).abs() + 0.01,
    }[kind]
    paged = paged_cache(k, k, cumulative(SEQLENS), 8, layout, dtype=dtype, k_scale=scale, v_scale=scale)
    by_token = torch.as_tensor(scale, dtype=torch.float64).expand(58, 2)[..., None]
    limit = torch.finfo(dtype).max
    stored = (k.double() / by_token).clamp(-limit, limit).to(dtype)
    assert paged.v_cache is not None
    for cache, paged_scale in ((paged.k_cache, paged.k_scale), (paged.v_cache, paged.v_scale)):
        if kind == "token and head":
            assert isinstance(paged_scale, torch.Tensor)
            assert paged_scale.shape == (cache.shape[0], 8, 2)
        got = gather(cache, paged.block_table, paged.seqlens_k, layout, scale=paged_scale)
        assert torch.equal(got.tokens, stored.double() * by_token)
    single = gather(paged.k_cache, paged.block_table, paged.seqlens_k, layout, scale=paged.k_scale, dtype=torch.float32)
    assert torch.equal(single.tokens, (stored.double() * by_token).float())


@pytest.mark.parametrize(("dtype", "greatest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)])
def test_values_past_the_range_of_fp8_are_stored_as_its_greatest(dtype: torch.dtype, greatest: float) -> None:
    k = torch.tensor([1e6, -1e6]).reshape(1, 1, 2)
    paged = paged_cache(k, None, torch.tensor([0, 1]), 1, dtype=dtype)
    stored = gather(paged.k_cache, paged.block_table, paged.seqlens_k).tokens.float()
    assert stored.flatten().tolist() == [greatest, -greatest]


def test_a_page_that_does_not_exist_reads_as_zeros_is_not_written_and_is_named_when_checked() -> None:
    cache, scale, ends = torch.ones(3, 2, 1, 4), torch.full((3, 2, 1), 5.0), torch.tensor([0, 4, 8])
    table, seqlens = torch.tensor([[2, 3], [-1, 1]]), torch.tensor([4, 4])
    cache[0], scale[0] = torch.nan, torch.nan
    with pytest.raises(ValueError, match=r"^block_table\[0, 1\] must be a page from 0 to 2, got 3"):
        gather(cache, table, seqlens)
    with pytest.raises(ValueError, match=r"^block_table\[1, 0\] must be a page from 0 to 2, got -1"):
        scatter(torch.zeros(1, 1, 4), cache, table, torch.tensor([0, 0, 1]))
    with validate_values(False):
        assert gather(cache, table, seqlens).tokens[:, 0, 0].tolist() == [1, 1, 0, 0, 0, 0, 1, 1]
        assert gather(cache, table, seqlens, scale=scale).tokens[:, 0, 0].tolist() == [5, 5, 0, 0, 0, 0, 5, 5]
        scatter(torch.full((8, 1, 4), 7.0), cache, table, ends)
    assert bool(cache[0].isnan().all())
    assert bool((cache[1:] == 7).all())


def test_a_sequence_of_impossible_length_has_no_tokens_and_is_named_when_checked() -> None:
    cache, table = normal(3, 2, 1, 4), torch.tensor([[0, 1], [2, 1], [1, 0]])
    for wrong in (-1, 5):
        seqlens = torch.tensor([3, wrong, 1])
        with validate_values(False):
            assert gather(cache, table, seqlens).cu_seqlens.tolist() == [0, 3, 3, 4]
        with pytest.raises(ValueError, match=rf"^seqlens\[1\] must be from 0 to 4 .*, got {wrong}"):
            gather(cache, table, seqlens)


@pytest.mark.parametrize(
    ("starts", "ends"),
    [(None, None), (None, [3, 0, 6]), ([2, 6, 0], None), ([1, 4, 0], [5, 4, 6])],
    ids=["none", "right", "left", "both"],
)
def test_packing_keeps_the_places_between_start_and_end(starts: list[int] | None, ends: list[int] | None) -> None:
    padded = normal(3, 6, 2, 4)
    first, last = starts or [0, 0, 0], ends or [6, 6, 6]
    tensors = [None if bounds is None else torch.tensor(bounds) for bounds in (starts, ends)]
    packed = pack(padded, *tensors)
    assert torch.equal(packed.tokens, torch.cat([padded[b, first[b] : last[b]] for b in range(3)]))
    assert packed.cu_seqlens.diff().tolist() == [last[b] - first[b] for b in range(3)]
    back = unpack(packed.tokens, 6, *tensors, batch=3, fill=-1.0)
    for b in range(3):
        inside = torch.zeros(6, dtype=torch.bool)
        inside[first[b] : last[b]] = True
        assert torch.equal(back[b, inside], padded[b, inside])
        assert bool((back[b, ~inside] == -1).all())


ints = {"dtype": torch.int32}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"layout": "NDH"}, ValueError, "layout must be one of NHD, HND, x-packed, got 'NDH'"),
        ({"cache": torch.zeros(4, 2, 8)}, ValueError, "cache must be 4-D, got 3-D"),
        ({"cache": torch.zeros(4, 2, 8), "layout": "x-packed"}, ValueError, r"cache must be 5-D .* got 3-D"),
        ({"cache": torch.zeros(0, 2, 1, 8)}, ValueError, "cache must be of at least one page"),
        ({"block_table": torch.zeros(2, **ints)}, ValueError, r"block_table must be of shape \[any, any\], got \[2\]"),
        (
            {"block_table": torch.zeros(2, 3)},
            TypeError,
            "block_table must be an int32 or int64 tensor, got torch.float",
        ),
        ({"block_table": [[0]]}, TypeError, "block_table must be an int32 or int64 tensor, got ."),
        ({"block_table": torch.zeros(2, 3, **ints, device="meta")}, ValueError, "block_table must be on cpu, as cache"),
        ({"seqlens": torch.zeros(2, **ints, device="meta")}, ValueError, "seqlens must be on cpu, as cache, got meta"),
        ({"seqlens": torch.zeros(3, **ints)}, ValueError, r"seqlens must be of shape \[2\], got \[3\]"),
        ({"scale": torch.zeros(3)}, ValueError, r"scale must be a number, \[1\] or \[blocks, page, 1\], got \[3\]"),
    ],
)
def test_gather_names_what_does_not_fit(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {
        "cache": torch.zeros(4, 2, 1, 8),
        "block_table": torch.zeros(2, 3, **ints),
        "seqlens": torch.ones(2, **ints),
    }
    with pytest.raises(error, match=f"^{message}"):
        gather(**(arguments | changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": torch.zeros(4, 2, 8)}, r"tokens must be of shape \[T, 1, 8\], got \[4, 2, 8\]"),
        ({"tokens": torch.zeros(4, 1, 8, device="meta")}, "tokens must be on cpu, as cache, got meta"),
        ({"cu_seqlens": torch.zeros(2, **ints)}, r"cu_seqlens must be of shape \[3\], got \[2\]"),
        ({"starts": torch.zeros(3, **ints)}, r"starts must be of shape \[2\], got \[3\]"),
    ],
)
def test_scatter_names_what_does_not_fit(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "tokens": torch.zeros(4, 1, 8),
        "cache": torch.zeros(4, 2, 1, 8),
        "block_table": torch.zeros(2, 3, **ints),
        "cu_seqlens": torch.tensor([0, 2, 4]),
    }
    with pytest.raises(ValueError, match=f"^{message}"):
        scatter(**(arguments | changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": torch.zeros(4, 8)}, "k must be 3-D"),
        ({"v": torch.zeros(5, 1, 8)}, r"v must be of shape \[4, 1, Dv\], got \[5, 1, 8\]"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"unused_pages": 0}, "unused_pages must be at least 1, got 0"),
        ({"layout": "x-packed", "x": 3}, "x must be a divisor of D = 8, got 3"),
        ({"layout": "packed"}, "layout must be one of"),
        ({"k_scale": torch.ones(4, 2)}, r"k_scale must be a number, \[1\] or \[4, 1\], got \[4, 2\]"),
    ],
)
def test_the_builder_names_what_does_not_fit(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "k": torch.zeros(4, 1, 8),
        "v": None,
        "cu_seqlens": torch.tensor([0, 4]),
        "page_size": 2,
    }
    with pytest.raises(ValueError, match=f"^{message}"):
        paged_cache(**(arguments | changed))


def test_packed_and_padded_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"^ends must be of shape \[3\], got \[2\]"):
        pack(torch.zeros(3, 6), None, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"^tokens must be of 5 rows, as starts and ends say, got 4"):
        unpack(torch.zeros(4, 1), 3, ends=torch.tensor([2, 3]), batch=2)
    with pytest.raises(ValueError, match=r"^new.cu_seqlens must be of 1 sequences, as in prefix, got 2"):
        append(Packed(torch.zeros(2, 1), torch.tensor([0, 2])), Packed(torch.zeros(2, 1), torch.tensor([0, 1, 2])))


def test_oracles_of_tensors_on_a_cpu_ask_for_no_other_default_device() -> None:
    """Of whom tests a kernel, the default device is often the GPU; here it is one without memory."""
    k, bounds, mask = torch.randn(6, 2, 16), torch.tensor([0, 4, 6]), torch.ones(2, 3, 3, dtype=torch.bool).tril()
    crow, col = mask_to_csr(mask)
    with torch.device("meta"):
        for layout in LAYOUTS:
            cache = paged_cache(k, k, bounds, page_size=2, layout=layout)
            assert torch.equal(gather(cache.k_cache, cache.block_table, cache.seqlens_k, layout).tokens, k)
        assert torch.equal(pack(k[None], None, torch.tensor([4], device="cpu")).tokens, k[:4])
        both = append(Packed(k, bounds), Packed(k, bounds)).cu_seqlens
        assert both.tolist() == [0, 8, 12]
        assert attention(k[None], k[None], k[None], causal=True).out.isfinite().all()
        assert torch.equal(csr_to_mask(crow, col, 3), mask)
        assert local_strided(2, 64, 1, 2, 16).device.type == "cpu"
        assert shard(k, ZigZag(2, 0), bounds).cu_seqlens.tolist() == [0, 2, 3]
