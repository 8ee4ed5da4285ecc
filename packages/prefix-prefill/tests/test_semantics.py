"""Do the public functions do what they promise? On the device: the kernels on a GPU, else the reference.

Every comparison is with attention in float64, beside what plain PyTorch of the same dtype makes of it. A GPU compiles a
kernel for nearly every set of options, so that dtypes, layouts and the like take turns where their product would not
show more.
"""

from __future__ import annotations

import inspect
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import prefix_prefill as package
from kernel_reference import attention as oracle
from kernel_reference.checks import validate_values
from kernel_reference.models import GPT_OSS, LLAMA3_70B
from kernel_reference.testing.guards import assert_bitwise_equal, poison_, poisoned
from kernel_reference.testing.numerics import assert_close_to_oracle
from prefix_prefill import AttentionResult, PrefillPlan, context_attention_fwd, merge_attention_states, prefix_prefill

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = (BF16, FP16, FP32)
LAYOUTS = ("NHD", "HND", "x-packed")
PAGES = (1, 16, 32, 64, 256, 544, 1056)
HEAD_SIZES = (16, 64, 80, 96, 128, 192, 256)
# (ctx, new tokens): a prompt, decoding, nothing new, a page's end, more tokens than a tile.
RAGGED = [(20, 5), (0, 17), (37, 1), (3, 0), (16, 16), (0, 1), (100, 70), (1, 2)]
SHORT = [(9, 3), (0, 5), (33, 1), (2, 0), (17, 20)]
FP8_CACHE = {"cache_dtype": E4M3, "k_scale": "number", "v_scale": "number"}
on_a_gpu = pytest.mark.gpu


def name_of(value: object) -> str:
    return str(getattr(value, "name", value)).replace(" ", "-").replace("torch.", "")


def in_turn(values, *keys):
    """One of ``values``, another for each set of keys that stands beside it."""
    return values[sum(keys) % len(values)]


def check(tensors, lengths, *, most: int | None = None, **options):
    """One call of a batch, into guarded memory, against the oracle."""
    batch = tensors.batch(lengths, **options)
    batch.run()
    batch.check(most=most)
    return batch


def test_the_plain_version_in_float32_is_the_oracle_in_float32(tensors) -> None:
    options = {"window": (30, 0), "sinks": True, "alibi": True, "softcap": 4.0, "k_scale": "tokens", "v_scale": "heads"}
    for how in ({}, options, {**options, "causal": False, "window": (7, 3)}):
        batch = tensors.batch(RAGGED, dtype=FP32, **how)
        for wanted in batch.wanted(batch.sample()):
            torch.testing.assert_close(wanted.plain.double(), wanted.exact, rtol=1e-5, atol=1e-5)


# Sizes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page", PAGES)
def test_pages_of_any_size_in_every_layout(tensors, page, layout) -> None:
    lengths = [(page, 1), (page + 1, 3), (2 * page - 1, 33), (0, 17), (max(0, page - 1), 2), (15, 1)]
    turn = (PAGES.index(page), LAYOUTS.index(layout))
    check(
        tensors,
        lengths,
        page=page,
        page_layout=layout,
        cached=in_turn((False, True), *turn),
        dtype=in_turn(DTYPES, *turn),
    )


@pytest.mark.parametrize("page", [3, 24, 100])
def test_trap_pages_need_not_be_of_a_power_of_two(tensors, page) -> None:
    for layout, cached in zip(LAYOUTS, (True, False, True), strict=True):
        check(
            tensors,
            [(5 * page + 2, 6), (0, page), (page, 1)],
            page=page,
            page_layout=layout,
            cached=cached,
            head_dim=16,
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_head_dims_not_only_powers_of_two(tensors, head_dim, dtype) -> None:
    turn = (HEAD_SIZES.index(head_dim), DTYPES.index(dtype))
    cached = in_turn((False, True), *turn)
    check(tensors, RAGGED, head_dim=head_dim, dtype=dtype, page_layout=in_turn(LAYOUTS, *turn), cached=cached)


# Of Gemma 4's global layers; of latent attention, expanded; neither a power of two.
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(512, 512), (192, 128), (100, 260)])
def test_heads_of_up_to_512_and_values_of_another_size_than_keys(tensors, head_dim, head_dim_v) -> None:
    batch = check(tensors, SHORT, head_dim=head_dim, head_dim_v=head_dim_v, heads=(2, 1))
    # A new result has the size of values.
    assert batch.run(out=None, return_lse=True).out.shape == batch.out.tensor.shape


@pytest.mark.parametrize("head_dim", [17, 33, 100, 255])
def test_head_dims_of_any_number(tensors, head_dim) -> None:
    check(tensors, SHORT, head_dim=head_dim, dtype=BF16 if head_dim % 2 else FP32, page_layout="HND", heads=(2, 1))


@pytest.mark.parametrize("heads_kv", [1, 2])
@pytest.mark.parametrize("ratio", [1, 3, 4, 7, 8, 16])
def test_any_number_of_query_heads_shares_a_kv_head(tensors, ratio, heads_kv) -> None:
    options = FP8_CACHE if heads_kv == 2 else {}
    check(tensors, RAGGED, heads=(ratio * heads_kv, heads_kv), head_dim=32, sinks=True, alibi=True, **options)


@pytest.mark.parametrize("context", [0, 1, 15, 16, 4096])
@pytest.mark.parametrize("tokens", [0, 1, 2, 17, 128, 1000])
def test_any_number_of_new_tokens_behind_any_context(tensors, tokens, context) -> None:
    check(tensors, [(context, tokens)], heads=(2, 1), dtype=in_turn(DTYPES, context, tokens), page=32)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_ragged_batches_with_padding_and_prefill_and_decode_rows(tensors, dtype) -> None:
    for rows_after in (0, 50):
        check(tensors, RAGGED, dtype=dtype, rows_after=rows_after)
    check(tensors, [(n, 1) for n in (300, 0, 5, 64, 63)], dtype=dtype, rows_after=3)
    check(tensors, [(0, n) for n in (1, 70, 0, 0, 3)], dtype=dtype, cached=True)


def test_empty_batches(tensors) -> None:
    for lengths in ([], [(0, 0)], [(0, 0), (40, 0), (0, 0)], [(16, 0)]):
        for rows_after, cached in product((0, 3), (False, True)):
            check(tensors, lengths, rows_after=rows_after, cached=cached)
            check(tensors, lengths, rows_after=rows_after, cached=cached, skip_decode=True, **FP8_CACHE)


@pytest.mark.parametrize("cached", [False, True], ids=["new keys", "cached"])
def test_a_pool_without_pages_or_a_table_without_columns_serves_where_there_is_no_context(tensors, cached) -> None:
    batch = tensors.batch([(0, 0)] if cached else [(0, 5), (0, 1), (0, 0)], cached=cached)
    for pages, columns in ((1, 0), (0, 0), (0, 1)):
        q, k, v, k_cache, v_cache, table, *rest = batch.inputs
        got = prefix_prefill(
            q, k, v, k_cache[:pages], v_cache[:pages], table[:, :columns], *rest, **batch.options, return_lse=True
        )
        batch.check_out(got.out, got.lse)


# Features, each alone and together

FEATURES = {
    "cached": {"cached": True},
    "not causal": {"causal": False},
    "not causal, cached": {"causal": False, "cached": True},
    "window": {"window": (10, 0)},
    "window on both sides": {"window": (10, 4), "causal": False},
    "softcap": {"softcap": 2.0},
    "ALiBi": {"alibi": True},
    "sinks": {"sinks": True},
    "scale": {"softmax_scale": 0.3},
    "e4m3 cache, a number": {"cache_dtype": E4M3, "k_scale": "number", "v_scale": "number"},
    "e4m3 cache, as stored": {"cache_dtype": E4M3, "k_scale": 1.0, "v_scale": 1.0},
    "e5m2 cache, a tensor": {"cache_dtype": E5M2, "k_scale": "tensor", "v_scale": "tensor"},
    "e4m3 cache, per head": {"cache_dtype": E4M3, "k_scale": "heads", "v_scale": "heads", "page_layout": "HND"},
    "e4m3 cache, per token": {"cache_dtype": E4M3, "k_scale": "tokens", "v_scale": "tokens"},
    "e5m2 cache, mixed": {"cache_dtype": E5M2, "k_scale": "tokens", "v_scale": "number", "page_layout": "x-packed"},
    "e4m3 cache, mixed": {"cache_dtype": E4M3, "k_scale": "heads", "v_scale": "tokens", "cached": True},
    "a scaled cache of no 8 bits": {"k_scale": "heads", "v_scale": "tensor"},
    "a scale of the keys alone": {"k_scale": "tokens"},
    "a scale of the values alone": {"v_scale": "heads", "cached": True},
    "e4m3 output": {"out_scale": 0.013},
    "e5m2 output": {"out_scale": 0.13, "out_dtype": E5M2},
    "skip_decode": {"skip_decode": True},
    "fused": {"fused": True},
    "interleaved": {"interleaved": True},
    "64-bit indices": {"index_dtype": torch.int64},
}


@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
def test_each_feature_alone(tensors, options) -> None:
    check(tensors, RAGGED, rows_after=2, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cached", [False, True], ids=["new keys", "cached"])
def test_all_features_together(tensors, cached, dtype) -> None:
    options = {
        "window": (40, 0), "softcap": 5.0, "alibi": True, "sinks": True, "softmax_scale": 0.4, "skip_decode": True,
        "cache_dtype": E5M2, "k_scale": "tokens", "v_scale": "heads", "rows_after": 3, "fused": True,
    }  # fmt: skip
    check(tensors, RAGGED, dtype=dtype, cached=cached, **options)
    check(tensors, RAGGED, dtype=dtype, cached=cached, **options, out_scale=0.02, page_layout="x-packed")


@settings(max_examples=60 if torch.cuda.is_available() else 180)
@given(data=st.data())
def test_features_in_any_combination(tensors, data) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**32), label="seed"))
    dtype = draw(st.sampled_from(DTYPES), label="dtype")
    cache = draw(st.sampled_from([None, E4M3, E5M2]), label="cache")
    scales = st.sampled_from(["number", "tensor", "heads", "tokens", *([] if cache else [None])])
    side = st.sampled_from([-1, -1, 0, 1, 7, 40])
    layout = draw(st.sampled_from(LAYOUTS), label="layout")
    heads_kv = draw(st.integers(1, 3), label="kv heads")
    lengths = draw(st.lists(st.tuples(st.integers(0, 90), st.sampled_from([0, 1, 1, 2, 5, 33, 70])), max_size=5))
    batch = tensors.batch(
        lengths,
        heads=(heads_kv * draw(st.sampled_from([1, 2, 3, 7])), heads_kv),
        head_dim=draw(st.sampled_from([16, 32, 48, 80] + ([] if layout == "x-packed" else [40, 17]))),
        page=draw(st.sampled_from([1, 5, 16, 24, 64])),
        page_layout=layout,
        dtype=dtype,
        cache_dtype=cache,
        k_scale=draw(scales),
        v_scale=draw(scales),
        cached=(cached := draw(st.booleans())),
        quantize_q=cached and cache == E4M3 and draw(st.booleans()),
        causal=draw(st.booleans()),
        window=draw(st.one_of(st.none(), st.tuples(side, side))),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
        softmax_scale=draw(st.sampled_from([None, None, 0.0, 0.5])),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
        out_scale=draw(st.sampled_from([None, None, 0.02])),
        skip_decode=draw(st.booleans()),
        rows_after=draw(st.integers(0, 2)),
        fused=draw(st.booleans()),
        interleaved=layout != "x-packed" and draw(st.booleans()),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        draft_mask=draw(st.booleans()) and max((new for _, new in lengths), default=0) <= 63,
    )
    with validate_values():
        batch.run(num_splits=draw(st.sampled_from([None, None, 1, 3])))
    batch.check()


DRAFTS = [(100, 63), (0, 9), (37, 1), (3, 0), (16, 33), (0, 63)]


@pytest.mark.parametrize("cached", [False, True], ids=["new keys", "cached"])
def test_tree_drafts_see_their_prefix_and_their_own_path(tensors, cached) -> None:
    for options in ({}, {"window": (20, 3), "causal": False, "alibi": True}, {"num_splits": 3}):
        splits = options.pop("num_splits", None)
        batch = tensors.batch(DRAFTS, draft_mask=True, cached=cached, rows_after=2, **options)
        batch.run(num_splits=splits)
        batch.check()


def test_drafts_in_a_chain_are_causal_and_a_mask_alone_decides_without_causality(tensors) -> None:
    chain = torch.tensor([(2 << i) - 1 for _, new in DRAFTS for i in range(new)], device=tensors.device)
    batch = tensors.batch(DRAFTS, draft_mask=chain)
    out = batch.run(out=None)
    for options in ({"draft_mask": None}, {"causal": False}):
        assert_bitwise_equal(batch.run(out=None, **options).out, out.out, what=str(options))
    batch.draft_mask.fill_(2**63 - 1)
    for causal in (False, True):
        wanted = batch.run(out=None, causal=causal, draft_mask=None)
        assert_bitwise_equal(batch.run(out=None, causal=causal).out, wanted.out, what="a mask of ones")


def test_a_branch_of_a_tree_is_as_if_it_were_alone(tensors) -> None:
    # Tokens 0, 1, 3 are one path, 0, 2, 4 the other.
    batch = tensors.batch([(50, 5)], draft_mask=torch.tensor([1, 3, 5, 11, 21], device=tensors.device))
    batch.run()
    batch.check()
    for path in ([0, 1, 3], [0, 2, 4]):
        q, k, v = (x[path] for x in (batch.q, batch.k, batch.v))
        cu, total = batch.cu_seqlens_q.clone(), batch.seqlens_k.clone()
        cu[1], total[0] = 3, 53
        alone = prefix_prefill(q, k, v, batch.k_cache, batch.v_cache, batch.block_table, cu, total, max_seqlen_q=3)
        torch.testing.assert_close(batch.out.tensor[path].float(), alone.float(), rtol=0.02, atol=0.01)


WINDOWS = [(0, 0), (1, 0), (15, 0), (16, 0), (17, -1), (100, 0), (4095, 0), (2**31 - 1, 0), (2**40, -1), (-1, 0)]


@pytest.mark.parametrize("cached", [False, True], ids=["new keys", "cached"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows_of_any_width(tensors, window, cached) -> None:
    check(tensors, [(300, 40), (0, 20), (17, 1), (16, 17), (40, 3)], window=window, cached=cached, heads=(2, 1))


@pytest.mark.parametrize("window", [(0, 0), (0, 5), (5, -1), (-1, 5), (3, 3), (-1, -1), (2**31, 2**31 - 1)], ids=str)
def test_windows_to_both_sides_where_tokens_after_may_be_seen(tensors, window) -> None:
    for cached in (False, True):
        check(tensors, [(40, 30), (0, 20), (17, 1)], window=window, cached=cached, causal=False, heads=(2, 1))
        # Causality leaves of a window its left side alone.
        check(tensors, [(40, 30), (0, 20), (17, 1)], window=window, cached=cached, heads=(2, 1))


def test_the_window_of_a_call_is_the_same_whether_given_as_a_list_or_a_tuple(tensors) -> None:
    batch = tensors.batch(SHORT, window=(7, 0))
    assert_bitwise_equal(batch.run(out=None, window=[7, 0]).out, batch.run(out=None).out)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=name_of)
def test_sinks_and_slopes_of_any_float_dtype(tensors, dtype) -> None:
    sinks = torch.tensor([-30.0, 2.5, 0.0, 40.0], device=tensors.device).to(dtype)
    slopes = torch.tensor([0.5, 0.0, -0.25, 2.0], device=tensors.device).to(dtype)
    check(tensors, RAGGED, sinks=sinks)
    check(tensors, RAGGED, alibi=slopes)
    check(tensors, RAGGED, alibi=slopes, sinks=sinks, cached=True, window=(13, 0), softcap=3.0)


def test_a_sink_of_minus_infinity_is_no_sink(tensors) -> None:
    sinks = torch.tensor([-torch.inf, 1.0, -torch.inf, 0.0], device=tensors.device)
    check(tensors, RAGGED, sinks=sinks)
    check(tensors, RAGGED, sinks=sinks, window=(3, 0), cached=True)


def test_a_sink_is_neither_scaled_nor_capped(tensors) -> None:
    sinks = torch.tensor([3.0, 30.0, -3.0, 0.5], device=tensors.device)
    batch = check(tensors, SHORT, sinks=sinks, softmax_scale=0.01, softcap=1.0)
    # Without q the scores are 0, so that n keys and the sink make a sum of n + exp(sink).
    batch.q.zero_()
    got = batch.run(out=None)
    seen = torch.cat([torch.arange(ctx + 1, ctx + new + 1) for ctx, new in SHORT]).double()
    wanted = torch.log(seen + torch.exp(sinks.double().cpu())[:, None])
    torch.testing.assert_close(got.lse.double().cpu(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softmax_scale", [0.0, -0.2, 1.0, 3.0])
def test_trap_scores_are_scaled_before_they_are_masked(tensors, softmax_scale) -> None:
    """-inf times 0 would be NaN, and times a negative scale the largest score of all."""
    for options in ({}, {"window": (5, 0)}, {"softcap": 2.0}, {"cached": True}):
        check(tensors, RAGGED, softmax_scale=softmax_scale, **options)
    check(tensors, SHORT, softmax_scale=softmax_scale, cache_dtype=E4M3, k_scale=-0.5, v_scale=-2.0)
    check(tensors, SHORT, softmax_scale=softmax_scale, cache_dtype=E4M3, k_scale=0.5, v_scale=1.0, window=(3, 0))


@pytest.mark.parametrize("cached", [False, True], ids=["new keys", "cached"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=name_of)
def test_trap_what_a_window_hides_weighs_nothing_even_where_true_scores_are_below_minus_10000(
    tensors, dtype, cached
) -> None:
    """Masked with a number instead of -inf, hidden keys would weigh more than those that are seen."""
    batch = tensors.batch([(100, 20), (0, 40), (33, 1)], window=(6, 0), dtype=dtype, cached=cached, softmax_scale=1.0)
    # Every score of a seen key is near -64 * 40 * 20 = -51200.
    far = tensors.batch(
        batch.lengths, window=(6, 0), dtype=dtype, cached=cached, softmax_scale=1.0, offset=(40.0, -20.0)
    )
    for one in (batch, far):
        one.run()
        one.check()
    rows = far.sample()
    assert float(far.wanted(rows)[1].exact.max()) < -30000


def test_sizes_of_the_softmax_are_those_of_the_largest_score_and_do_not_overflow(tensors) -> None:
    for size, dtype in product((8.0, 30.0), DTYPES):
        check(tensors, RAGGED, dtype=dtype, size=size)
    check(tensors, RAGGED, size=30.0, sinks=True, window=(9, 0), softcap=50.0)


# NaN where it must not matter


@pytest.mark.parametrize("options", [
    {}, {"cached": True}, {"page_layout": "HND"}, {"page_layout": "x-packed", "page": 32}, {"page": 1}, {"page": 256},
    FP8_CACHE, {**FP8_CACHE, "k_scale": "tokens", "v_scale": "tokens", "cached": True}, {"dtype": FP32},
    {"alibi": True, "sinks": True, "softcap": 3.0},
], ids=name_of)  # fmt: skip
def test_trap_nan_before_the_window_and_in_what_no_token_fills_changes_no_bit(tensors, options) -> None:
    """0 times NaN is NaN. What no token fills, tails of pages among it, is NaN in every batch here."""
    for window, causal in (((5, 0), True), ((8, 2), False)):
        batch = tensors.batch([(100, 3), (30, 70), (0, 90), (300, 1)], window=window, causal=causal, **options)
        batch.run()
        batch.check()
        kept = batch.out.tensor.clone()
        for i, (ctx, _) in enumerate(batch.lengths):
            batch.spoil(i, range(max(0, ctx - window[0])))
        batch.run()
        assert_bitwise_equal(batch.out.tensor, kept, what="the output with NaN before the window")
        batch.check_guards()


def test_trap_nan_in_tokens_far_after_a_row_does_not_reach_it_nor_other_sequences(tensors) -> None:
    """Rows up to a tile's length before it may show it: in their product it is multiplied by 0."""
    lengths, bad, tile = [(5, 3), (30, 170), (9, 4)], 165, 128
    for cached in (False, True):
        batch = tensors.batch(lengths, cached=cached, heads=(2, 2), head_dim=16)
        batch.run()
        kept = batch.out.tensor.clone()
        if cached:
            batch.spoil(1, range(30 + bad, 200))
        else:
            for x in (batch.k, batch.v):
                poison_(x[3 + bad : 173])
        batch.run()
        before, after = slice(0, 3 + bad - tile), slice(173, 177)
        for rows in (before, after):
            assert_bitwise_equal(batch.out.tensor[rows], kept[rows], what="rows that do not see the NaN")
        assert bool(batch.out.tensor[3 + bad : 173].isnan().all()), "rows that see NaN are not NaN"


def test_a_value_of_nan_or_infinity_that_is_seen_shows_in_its_column_alone(tensors) -> None:
    batch = tensors.batch([(20, 5)], heads=(1, 1))
    batch.v[2, 0, 7] = torch.nan
    batch.v[3, 0, 9] = torch.inf
    got = batch.run(out=None).out[:, 0]
    assert bool(got[2:, 7].isnan().all())
    assert bool((got[3:, 9].isnan() | (got[3:, 9] == torch.inf)).all())
    others = [column for column in range(64) if column not in (7, 9)]
    assert bool(got[:, others].isfinite().all())


# Results


def test_results_are_new_packed_tensors_where_no_out_is_given(tensors) -> None:
    batch = tensors.batch(SHORT, fused=True, rows_after=2)
    got = batch.run(out=None)
    assert isinstance(got, AttentionResult)
    assert got._fields == ("out", "lse")
    assert got.out.is_contiguous()
    assert got.lse.is_contiguous()
    assert got.lse.dtype == FP32
    batch.check_out(*got)
    out = batch.run(out=None, return_lse=False)
    assert isinstance(out, Tensor)
    assert_bitwise_equal(out, got.out)
    assert batch.run(return_lse=False) is batch.out.tensor
    batch = tensors.batch(SHORT, out_scale=0.02)
    assert batch.run(out=None, return_lse=False).dtype == E4M3


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 2, 1)], ids=str)
def test_tensors_and_outputs_of_any_strides(tensors, order) -> None:
    """Dimensions in another order in memory, NaN between every two elements."""

    def laid_out(tensor: Tensor) -> Tensor:
        wide = poisoned([*[tensor.shape[dim] for dim in order], 2], tensor.dtype, tensor.device)
        return wide[..., 0].permute([order.index(dim) for dim in range(3)]).copy_(tensor)

    for dtype, names in ((BF16, "q"), (FP32, "k"), (FP16, "v"), (BF16, "q k v out"), (FP32, "out")):
        batch = tensors.batch(RAGGED, dtype=dtype)
        for name in set(names.split()) - {"out"}:
            setattr(batch, name, laid_out(getattr(batch, name)))
        out = laid_out(batch.out.tensor) if "out" in names else None
        got = batch.run(out=out)
        assert out is None or got.out is out
        batch.check_out(*got)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_caches_and_scales_of_any_strides(tensors, layout) -> None:
    def spread(tensor: Tensor, turn: int) -> Tensor:
        """Dimensions the other way round in memory, or NaN between every two elements."""
        if turn == 0:
            dims = [*range(tensor.ndim)][::-1]
            return tensor.permute(dims).contiguous().permute(dims)
        wide = poisoned((*tensor.shape, 2), tensor.dtype, tensor.device)
        raw = torch.uint8 if tensor.element_size() == 1 else tensor.dtype
        wide.view(raw)[..., 0] = tensor.view(raw)
        return wide[..., 0]

    for turn, options in product((0, 1), ({}, {"cache_dtype": E5M2, "k_scale": "tokens", "v_scale": "tokens"})):
        batch = tensors.batch(RAGGED, page_layout=layout, cached=turn == 1, **options)
        batch.k_cache, batch.v_cache = spread(batch.k_cache, turn), spread(batch.v_cache, 1 - turn)
        if options:
            batch.k_scale, batch.v_scale = spread(batch.k_scale, 1 - turn), spread(batch.v_scale, turn)
        batch.run()
        batch.check()


def test_scales_of_one_element_of_any_rank_and_output_scales_of_tensors(tensors) -> None:
    for shape in ((), (1,), (1, 1)):
        batch = tensors.batch(SHORT, cache_dtype=E4M3, k_scale="number", v_scale="number")
        got = batch.run(
            out=None, k_scale=torch.full(shape, batch.k_scale, device=tensors.device),
            v_scale=torch.full(shape, batch.v_scale, device=tensors.device),
        )  # fmt: skip
        batch.check_out(*got)
        for dtype in (E4M3, E5M2):
            check(tensors, SHORT, out_scale=torch.full(shape, 0.03, device=tensors.device), out_dtype=dtype)


@pytest.mark.parametrize("out_dtype", [E4M3, E5M2], ids=name_of)
def test_outputs_of_8_bits_are_held_within_their_range(tensors, out_dtype) -> None:
    limit = torch.finfo(out_dtype).max
    batch = check(tensors, RAGGED, out_scale=1e-9, out_dtype=out_dtype)
    out = batch.out.tensor.float()[batch.live]
    assert bool((out.abs() == limit).any())
    assert bool(out.isfinite().all())
    for scale in (1e-3, 0.5, 30.0):
        check(tensors, RAGGED, out_scale=scale, out_dtype=out_dtype, sinks=True)


def test_scales_multiply_the_cache_and_not_the_new_tokens(tensors) -> None:
    batch = tensors.batch([(0, 20), (0, 3)], dtype=FP32)
    plain, scaled = batch.run(out=None), batch.run(out=None, k_scale=7.0, v_scale=11.0)
    assert_bitwise_equal(scaled.out, plain.out)
    assert_bitwise_equal(scaled.lse, plain.lse)
    check(tensors, [(20, 20), (30, 1)], k_scale=0.5, v_scale=3.0)


# Rows that nothing is written to, or zero


def test_decoding_rows_are_left_untouched_where_that_is_asked_for(tensors) -> None:
    lengths = [(20, 1), (0, 1), (5, 3), (0, 0), (64, 1), (0, 2)]
    for options in ({}, {"cached": True}, {"out_scale": 0.02}, {"num_splits": 3}, {"sinks": True}):
        splits = {"num_splits": options["num_splits"]} if "num_splits" in options else {}
        how = {name: value for name, value in options.items() if name not in splits}
        batch = tensors.batch(lengths, skip_decode=True, rows_after=2, **how)
        assert batch.untouched.nonzero().flatten().tolist() == [0, 1, 5]
        batch.run(**splits)
        batch.check()
    check(tensors, [(20, 1), (0, 1)], skip_decode=True, rows_after=1)


@pytest.mark.usefixtures("unchecked")
def test_trap_rows_of_impossible_sequences_are_zero_and_their_lse_minus_infinity(tensors) -> None:
    """Not what the memory held, and not the 0 that a sum begun at 1 would give; sinks do not show there either."""
    for sinks, cached, splits in product((False, True), (False, True), (None, 4)):
        batch = tensors.batch([(20, 5), (7, 3), (0, 4), (30, 1)], sinks=sinks, cached=cached)
        batch.seqlens_k.copy_(torch.tensor([25, 2, 2**31 - 1, 0]))
        batch.forget_inputs()
        assert batch.possible == [0]
        batch.run(num_splits=splits)
        batch.check()
        assert bool((batch.out.tensor[5:] == 0).all())
        assert bool((batch.lse.tensor[:, 5:] == -torch.inf).all())


def test_new_tensors_hold_zeros_in_rows_of_no_sequence_and_not_what_the_memory_held(tensors) -> None:
    for splits in (None, 3):
        batch = tensors.batch(SHORT, rows_after=5, head_dim=32)
        # Freed at once, so that the next allocation of its size finds it.
        poisoned(tuple(batch.q.shape), BF16, tensors.device)
        batch.check_out(*batch.run(out=None, num_splits=splits))


# Pages that do not exist, and other content of the block table


@pytest.mark.usefixtures("unchecked")
def test_a_page_outside_the_pool_reads_as_zeros(tensors) -> None:
    for page_id, cached in product((-1, 2**31 - 1, -(2**31), None), (False, True)):
        for scales in ({}, {"cache_dtype": E4M3, "k_scale": "tokens", "v_scale": "tokens"}):
            batch = tensors.batch([(70, 5), (40, 1), (0, 3)], cached=cached, **scales)
            bad = batch.k_cache.shape[0] if page_id is None else page_id
            batch.block_table[0, 1] = bad
            batch.block_table[1, 2] = bad
            batch.forget_inputs()
            begin = batch.totals[0]
            for x in (batch.keys, batch.values):
                x[16:32] = 0
                x[begin + 32 : begin + (41 if cached else 40)] = 0
            batch.run()
            batch.check()


def test_two_sequences_may_share_pages(tensors) -> None:
    batch = tensors.batch([(48, 5), (48, 9)])
    batch.block_table[1, :3] = batch.block_table[0, :3]
    batch.forget_inputs()
    for x in (batch.keys, batch.values):
        x[53 : 53 + 48] = x[:48]
    batch.run()
    batch.check()


# Plans


@pytest.mark.parametrize("num_splits", [1, 2, 3, 8, 50])
def test_any_number_of_splits_gives_the_same_attention(tensors, num_splits) -> None:
    for options in ({}, {"cached": True, "sinks": True, "window": (30, 0)}, {"out_scale": 0.02, "alibi": True}):
        batch = tensors.batch([(300, 5), (0, 1), (0, 40), (70, 1), (1000, 2)], rows_after=1, **options)
        batch.run(num_splits=num_splits)
        batch.check()


@pytest.mark.parametrize("plan", [PrefillPlan(16, 16, 1, 4, 1), PrefillPlan(64, 32, 2, 4, 2)], ids=str)
def test_a_plan_may_be_given(tensors, plan) -> None:
    batch = tensors.batch(RAGGED, sinks=True)
    batch.run(plan=plan)
    batch.check()


def test_the_most_new_tokens_may_be_given_larger_than_they_are(tensors) -> None:
    batch = tensors.batch(RAGGED)
    for most in (70, 71, 128, 4096, 2**31 - 1):
        batch.run(max_seqlen_q=most)
        batch.check(again=True)


# The drop-in function


def legacy(batch, **options) -> Tensor:
    """The batch through the signature that engines call."""
    given = {
        "kv_cache_dtype": "auto", "k_scale": batch.k_scale, "v_scale": batch.v_scale,
        "alibi_slopes": batch.alibi_slopes, "sm_scale": batch.softmax_scale, "skip_decode": batch.skip_decode,
        "fp8_out_scale": batch.out_scale, "sinks": batch.sinks, "causal": batch.causal, **options,
    }  # fmt: skip
    kv_cache_dtype, k_scale, v_scale = (given.pop(name) for name in ("kv_cache_dtype", "k_scale", "v_scale"))
    caches = [given.pop(name, own) for name, own in (("k_cache", batch.k_cache), ("v_cache", batch.v_cache))]
    got = context_attention_fwd(
        batch.q, batch.k, batch.v, batch.out.tensor, kv_cache_dtype, *caches, batch.block_table, batch.cu_seqlens_q,
        batch.seqlens_k, max(batch.totals, default=0), batch.max_seqlen_q, k_scale, v_scale, **given,
    )  # fmt: skip
    assert got is None
    return batch.out.tensor


@pytest.mark.parametrize("sliding_window", [None, 0, -1, 1, 2, 16, 40, 10**9])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not causal"])
def test_the_drop_in_sees_less_than_its_window_before_a_token(tensors, sliding_window, causal) -> None:
    off = sliding_window is None or sliding_window <= 0
    window = None if off else (sliding_window - 1, -1)
    batch = tensors.batch(RAGGED, page_layout="x-packed", window=window, causal=causal, lse=False)
    legacy(batch, sliding_window=sliding_window)
    batch.check()


@pytest.mark.parametrize("page", [16, 32, 1056])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_the_drop_in_at_sizes_of_models(tensors, head_dim, page) -> None:
    options = in_turn(({"alibi": True}, {"sinks": True, "softmax_scale": 0.2}, {"skip_decode": True}), head_dim, page)
    dtype = in_turn(DTYPES, head_dim // 16, page // 16)
    batch = tensors.batch(
        RAGGED, page_layout="x-packed", lse=False, head_dim=head_dim, page=page, rows_after=1, dtype=dtype, **options
    )
    legacy(batch)
    batch.check()


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp8", E4M3), ("fp8_e4m3", E4M3), ("fp8_inc", E4M3), ("fp8_e5m2", E5M2)], ids=name_of
)
def test_the_drop_in_takes_8_bit_caches_by_the_names_of_their_dtypes(tensors, name, dtype) -> None:
    for scale, stored in product(("number", "tensor", "heads", "tokens"), (torch.uint8, dtype)):
        batch = tensors.batch(
            RAGGED, page_layout="x-packed", lse=False, cache_dtype=dtype, k_scale=scale, v_scale=scale, head_dim=32
        )
        caches = {"k_cache": batch.k_cache.view(stored), "v_cache": batch.v_cache.view(stored)}
        legacy(batch, kv_cache_dtype=name, **caches)
        batch.check()
        if stored == dtype:
            legacy(batch, kv_cache_dtype="auto", **caches)
            batch.check(again=True)


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", BF16), ("float16", FP16)])
def test_the_drop_in_takes_caches_of_16_bits_by_the_names_of_their_dtypes(tensors, name, dtype) -> None:
    batch = tensors.batch(RAGGED, page_layout="x-packed", lse=False, dtype=dtype)
    legacy(batch, kv_cache_dtype=name)
    batch.check()


def test_the_drop_in_gives_scales_no_effect_on_a_cache_that_is_not_of_8_bits(tensors) -> None:
    for scales in ((3.0, 5.0), (None, None), (torch.full((1,), 7.0, device=tensors.device), 2.0)):
        batch = tensors.batch(RAGGED, page_layout="x-packed", lse=False)
        legacy(batch, k_scale=scales[0], v_scale=scales[1])
        batch.check()


@pytest.mark.parametrize("out_dtype", [E4M3, E5M2], ids=name_of)
def test_the_drop_in_writes_8_bit_outputs(tensors, out_dtype) -> None:
    for scale in (0.02, torch.tensor([0.05], device=tensors.device)):
        batch = tensors.batch(RAGGED, page_layout="x-packed", lse=False, out_scale=scale, out_dtype=out_dtype)
        legacy(batch)
        batch.check()


def test_the_drop_in_keeps_the_arguments_that_engines_pass_by_place_and_name() -> None:
    given = inspect.signature(context_attention_fwd).parameters
    assert [*given] == [
        "q", "k", "v", "o", "kv_cache_dtype", "k_cache", "v_cache", "b_loc", "b_start_loc", "b_seq_len", "max_seq_len",
        "max_input_len", "k_scale", "v_scale", "alibi_slopes", "sliding_window", "sm_scale", "skip_decode",
        "fp8_out_scale", "sinks", "causal",
    ]  # fmt: skip
    defaults = [p.default for p in given.values()]
    assert defaults == [inspect.Parameter.empty] * 14 + [None, None, None, False, None, None, True]


# Merging


def check_merge(tensors, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> AttentionResult:
    got = merge_attention_states(out_a, lse_a, out_b, lse_b)
    assert got.out.shape == out_a.shape
    assert got.out.dtype == out_a.dtype
    assert got.out.is_contiguous()
    assert got.lse.shape == lse_a.shape
    assert got.lse.dtype == FP32
    exact = oracle.merge_attention_states(out_a, lse_a, out_b, lse_b)
    beside = oracle.merge_attention_states(out_a, lse_a, out_b, lse_b, compute_dtype=FP32)
    tensors.assert_rounded(got.out, tensors.Wanted(exact.out, beside.out.to(got.out.dtype)))
    # To another base and back costs a kernel two roundings that the plain version is spared.
    assert_close_to_oracle(got.lse, *tensors.moved(tensors.Wanted(exact.lse, beside.lse), logarithm=True), what="lse")
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("size", [1, 16, 64, 80, 100, 128, 256, 512])
def test_merging_weighs_each_part_by_its_sum(tensors, size, dtype) -> None:
    for tokens, heads in ((1, 1), (0, 3), (37, 3), (130, 8)):
        outs = [tensors.normal(tokens, heads, size, dtype=dtype) for _ in range(2)]
        lses = [3 * tensors.normal(heads, tokens) for _ in range(2)]
        check_merge(tensors, outs[0], lses[0], outs[1], lses[1])


def test_merging_parts_of_any_strides(tensors) -> None:
    outs = [tensors.normal(4, 50, 64, dtype=BF16).transpose(0, 1), tensors.normal(50, 4, 128, dtype=BF16)[..., ::2]]
    lses = [tensors.normal(50, 4).T, tensors.normal(4, 100)[:, ::2]]
    check_merge(tensors, outs[0], lses[0], outs[1], lses[1])
    check_merge(tensors, outs[1], lses[0], outs[0][:, :1].expand(50, 4, 64), lses[1])


def test_merging_parts_far_apart_gives_the_larger_and_does_not_overflow(tensors) -> None:
    for large in (90.0, 800.0, 30000.0):
        outs = [tensors.normal(20, 4, 64) for _ in range(2)]
        lse = tensors.normal(4, 20)
        for sign in (1, -1):
            check_merge(tensors, outs[0], lse + sign * large, outs[1], lse)
            check_merge(tensors, outs[0], lse + sign * large, outs[1], lse + sign * large)


@pytest.mark.parametrize("empty", [(-torch.inf, -torch.inf), (torch.inf, torch.inf), (torch.inf, -torch.inf)], ids=str)
def test_trap_a_part_that_saw_no_key_is_left_out_whatever_it_holds(tensors, empty) -> None:
    """Its lse is -inf, or, as FlashMLA has it, +inf."""
    a, b = (tensors.normal(20, 4, 64, dtype=BF16) for _ in range(2))
    lse_a, lse_b = tensors.normal(4, 20), tensors.normal(4, 20)
    lse_a[:, 3:7], lse_b[:, 5:9] = empty
    a[3:7], b[5:9] = torch.nan, torch.inf
    got = merge_attention_states(a, lse_a, b, lse_b)
    assert_bitwise_equal(got.out[3:5], b[3:5])
    assert_bitwise_equal(got.out[7:9], a[7:9])
    torch.testing.assert_close(got.lse[:, 3:5], lse_b[:, 3:5])
    torch.testing.assert_close(got.lse[:, 7:9], lse_a[:, 7:9])
    assert not bool(got.out[5:7].any())
    assert bool((got.lse[:, 5:7] == -torch.inf).all())
    assert bool(got.out.isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_the_prefix_merged_with_the_new_tokens_is_the_whole_with_the_sinks_in_one_part(tensors, dtype) -> None:
    """A cascade: all keys of the prefix, then the new tokens among themselves."""
    lengths = [(100, 30), (64, 64), (33, 1), (70, 5)]
    for with_sinks in (None, 0, 1):
        whole = tensors.batch(lengths, dtype=dtype, sinks=with_sinks is not None)
        q, k, v, k_cache, v_cache, table, cu, seqlens = whole.inputs
        sinks = [whole.sinks if with_sinks == part else None for part in range(2)]
        options = {"max_seqlen_q": whole.max_seqlen_q, "return_lse": True}
        context = seqlens - cu.diff()
        prefix = prefix_prefill(
            q, None, None, k_cache, v_cache, table, cu, context, causal=False, sinks=sinks[0], **options
        )
        new = prefix_prefill(q, k, v, k_cache, v_cache, table[:, :0], cu, cu.diff(), sinks=sinks[1], **options)
        got = merge_attention_states(*prefix, *new)
        whole.check_merged(got, prefix, new)


def test_a_merged_output_goes_where_it_is_told(tensors) -> None:
    parts = [tensors.normal(7, 3, 16, dtype=BF16), tensors.normal(3, 7)] * 2
    wanted = merge_attention_states(*parts)
    place = torch.full((7, 2, 3, 16), torch.nan, dtype=BF16, device=wanted.out.device)
    got = merge_attention_states(*parts, out=place[:, 1])
    assert got.out.data_ptr() == place[:, 1].data_ptr()
    torch.testing.assert_close(place[:, 1], wanted.out, rtol=0, atol=0)
    torch.testing.assert_close(got.lse, wanted.lse, rtol=0, atol=0)
    assert bool(place[:, 0].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_halves_of_the_context_merged_are_the_whole(tensors, dtype) -> None:
    """Two ranks that hold half of the pages each: the first sees them all, the second its own and the new tokens."""
    whole = tensors.batch([(96, 17), (160, 32), (96, 1)], dtype=dtype, sinks=True)
    q, k, v, k_cache, v_cache, table, cu, seqlens = whole.inputs
    half = torch.tensor([48, 80, 48], dtype=seqlens.dtype, device=tensors.device)
    second = torch.stack([row[n // 16 : n // 16 + 5] for row, n in zip(table, half.tolist(), strict=True)])
    options = {"max_seqlen_q": whole.max_seqlen_q, "return_lse": True}
    one = prefix_prefill(q, None, None, k_cache, v_cache, table, cu, half, causal=False, **options)
    other = prefix_prefill(q, k, v, k_cache, v_cache, second, cu, seqlens - half, sinks=whole.sinks, **options)
    whole.check_merged(merge_attention_states(*one, *other), one, other)
    whole.check_merged(merge_attention_states(*other, *one), other, one)


# At sizes of models

CASES = {
    "a prompt": [(0, 2048)],
    "a long prompt": [(0, 8192)],
    "a chunk": [(30720, 2048)],
    "a far chunk": [(131072, 512)],
    "many chunks": [(4096, 256)] * 16,
    "a mixed batch": [(4096, 1)] * 40 + [(0, 700), (8192, 1), (300, 2000), (15, 0), (1, 1)],
}


@on_a_gpu
@pytest.mark.parametrize("model", [LLAMA3_70B.tensor_parallel(8), LLAMA3_70B.tensor_parallel(2), GPT_OSS], ids=name_of)
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
def test_at_sizes_of_models(tensors, lengths, model) -> None:
    for page, layout, cached in ((16, "NHD", False), (64, "HND", True)):
        check(
            tensors, lengths, most=6, heads=(model.num_heads_q, model.num_heads_kv), head_dim=model.head_dim,
            page=page, page_layout=layout, cached=cached, window=model.window, sinks=model.sinks, rows_after=7,
        )  # fmt: skip


@on_a_gpu
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
def test_8_bit_caches_at_sizes_of_models(tensors, lengths) -> None:
    for kind, layout in (("number", "NHD"), ("tokens", "x-packed")):
        check(
            tensors, lengths, most=6, heads=(8, 1), head_dim=128, cache_dtype=E4M3, k_scale=kind, v_scale=kind,
            page_layout=layout, page=32,
        )  # fmt: skip


@on_a_gpu
def test_a_window_far_into_a_long_context(tensors) -> None:
    for cached in (False, True):
        check(tensors, [(16384, 1024)] * 4, most=8, heads=(32, 8), head_dim=128, window=(4095, 0), cached=cached)
        check(tensors, [(100000, 300), (5000, 1)], most=8, heads=(8, 1), head_dim=256, window=(999, 0), cached=cached)


def test_the_package_exports_what_it_documents() -> None:
    assert {"prefix_prefill", "context_attention_fwd", "merge_attention_states"} <= set(package.__all__)
