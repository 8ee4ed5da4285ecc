"""Do the public functions do what they promise? On the device: the kernels on a GPU, else the reference.

Every comparison is with attention in float64 under the true mask of blocks, never with dense attention, beside what
plain PyTorch of the same dtype makes of it. A GPU compiles a kernel for nearly every set of options, so that dtypes,
kinds of batches and the like take turns where their product would not show more.
"""

from __future__ import annotations

import inspect
from itertools import accumulate, pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blocksparse_attn import (
    AttentionPlan,
    AttentionResult,
    BlockLayout,
    LocalStridedBlockSparseAttn,
    blocksparse_attention,
    blocksparse_flash_attn_varlen_fwd,
)
from kernel_reference import blocks
from kernel_reference.attention import attention
from kernel_reference.checks import validate_values
from kernel_reference.models import PHI3_SMALL
from kernel_reference.testing.guards import assert_bitwise_equal, poison_, poisoned

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
KINDS = ("ragged", "paged", "padded")
LAYOUTS = ("NHD", "HND", "x-packed")
SIZES = (16, 32, 64, 128)
# (ctx, new tokens): a prompt, decoding, nothing new, a block's end, more tokens than a tile.
RAGGED = [(20, 5), (0, 17), (37, 1), (3, 0), (16, 16), (0, 1), (100, 70), (1, 2)]
SHORT = [(9, 3), (0, 5), (33, 1), (2, 0), (17, 20)]
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


def ones(heads: int, rows: int, columns: int | None = None) -> Tensor:
    return torch.ones(heads, rows, rows if columns is None else columns, dtype=torch.bool)


def test_the_plain_version_in_float32_is_the_oracle_in_float32(tensors) -> None:
    for how in ({}, {"window": (30, 0), "sinks": True, "softcap": 4.0, "one_layout": True}):
        batch = tensors.batch(RAGGED, dtype=FP32, **how)
        for wanted in batch.wanted(batch.sample()):
            torch.testing.assert_close(wanted.plain.double(), wanted.exact, rtol=1e-5, atol=1e-5)


# Sizes


@pytest.mark.parametrize("k_block", SIZES)
@pytest.mark.parametrize("q_block", SIZES)
def test_blocks_of_queries_and_keys_of_any_two_sizes(tensors, q_block, k_block) -> None:
    turn = (SIZES.index(q_block), SIZES.index(k_block))
    lengths = [(q_block, k_block), (0, 2 * q_block + 1), (3 * k_block - 1, 1), (200, 70), (5, 0), (1, 2)]
    for kind in KINDS:
        check(tensors, lengths, blocks=(q_block, k_block), kind=kind, dtype=in_turn(DTYPES, *turn))


@pytest.mark.parametrize("blocks", [(48, 48), (48, 16), (32, 96), (16, 112)], ids=str)
def test_blocks_need_not_be_of_a_power_of_two(tensors, blocks) -> None:
    check(tensors, RAGGED, blocks=blocks)
    check(tensors, RAGGED, blocks=blocks, kind="paged", one_layout=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [
    (64, None), (96, None), (128, None), (256, None), (16, 256), (64, 96), (128, 64), (80, 17), (33, 192),
])  # fmt: skip
def test_head_sizes_of_keys_and_values_may_differ(tensors, head_dim, head_dim_v, dtype) -> None:
    kind = in_turn(KINDS, head_dim, DTYPES.index(dtype))
    check(tensors, RAGGED, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, kind=kind, heads=(2, 1))


@pytest.mark.parametrize("ratio", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("heads_kv", [1, 2])
def test_any_number_of_query_heads_shares_a_kv_head_each_with_lists_of_its_own(tensors, ratio, heads_kv) -> None:
    for one_layout in (False, True):
        kind = in_turn(KINDS, ratio, heads_kv, one_layout)
        check(tensors, RAGGED, heads=(ratio * heads_kv, heads_kv), kind=kind, one_layout=one_layout, sinks=True)


@pytest.mark.parametrize("context", [0, 1, 15, 16, 1000])
@pytest.mark.parametrize("tokens", [0, 1, 2, 17, 128, 500])
def test_any_number_of_queries_up_to_that_of_keys(tensors, tokens, context) -> None:
    kind = in_turn(KINDS, tokens, context)
    check(tensors, [(context, tokens), (3, 2)], heads=(2, 1), dtype=in_turn(DTYPES, tokens, context), kind=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_ragged_batches_with_padding_and_prefill_and_decode_rows(tensors, dtype, kind) -> None:
    for rows_after in (0, 50):
        check(tensors, RAGGED, dtype=dtype, rows_after=rows_after, kind=kind)
    check(tensors, [(n, 1) for n in (300, 0, 5, 64, 63)], dtype=dtype, rows_after=3, kind=kind)
    check(tensors, [(0, n) for n in (1, 70, 0, 0, 3)], dtype=dtype, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_empty_batches(tensors, kind) -> None:
    for lengths in ([], [(0, 0)], [(0, 0), (40, 0), (0, 0)], [(16, 0)]):
        for rows_after, sinks in product((0, 3), (False, True)):
            check(tensors, lengths, rows_after=rows_after, kind=kind, sinks=sinks)


# Layouts

LISTS = {
    "nothing": torch.zeros(1, 12, 12), "all": torch.ones(1, 12, 12), "the diagonal": torch.eye(12)[None],
    "the first": torch.ones(1, 12, 1).expand(-1, -1, 12) * (torch.arange(12) == 0),
    "what is to come": torch.ones(1, 12, 12).triu(1), "what came": torch.ones(1, 12, 12).tril(-1),
    "every second": (torch.arange(12)[:, None] + torch.arange(12) + torch.arange(4)[:, None, None]) % 2,
    "one head nothing": torch.arange(4)[:, None, None].clamp(max=1) * torch.ones(12, 12),
    "fewer rows than the longest": torch.ones(1, 5, 5), "no rows": torch.ones(1, 0, 0),
    "no columns": torch.ones(1, 12, 0),
}  # fmt: skip


@pytest.mark.parametrize("mask", LISTS.values(), ids=LISTS)
def test_layouts_of_every_kind(tensors, mask) -> None:
    """Queries past the end of a layout see nothing, where values are not checked."""
    for kind, sinks in zip(KINDS, (False, True, False), strict=True):
        with validate_values(False):
            check(tensors, RAGGED, mask=mask.bool(), kind=kind, sinks=sinks)


@pytest.mark.parametrize("kind", KINDS)
def test_the_pattern_of_a_model_built_and_attended_to(tensors, kind) -> None:
    model = PHI3_SMALL
    options = (2, 5, 16)
    mask = blocks.local_strided(8, 600, *options)
    batch = tensors.batch(
        [(0, 300), (500, 70), (599, 1), (100, 1)], kind=kind, heads=(8, 2), head_dim=model.head_dim, mask=mask
    )
    batch.run(BlockLayout.local_strided(8, 600, *options, device=tensors.device))
    batch.check(most=5)
    merged = blocks.merge_query_blocks(mask, 4)
    batch = tensors.batch([(0, 300), (599, 1)], kind=kind, heads=(8, 2), mask=merged, blocks=(64, 16))
    batch.run(BlockLayout.local_strided(8, 600, *options, device=tensors.device, q_block_size=64))
    batch.check(most=5)


def test_a_layout_longer_than_any_sequence_serves(tensors) -> None:
    mask = tensors.random_mask(4, 100, 100)
    for kind in KINDS:
        check(tensors, RAGGED, mask=mask, kind=kind)


@settings(max_examples=30 if torch.cuda.is_available() else 120)
@given(data=st.data())
def test_features_in_any_combination(tensors, data) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**32), label="seed"))
    kind = draw(st.sampled_from(KINDS), label="kind")
    heads_kv = draw(st.integers(1, 3), label="kv heads")
    page_layout = draw(st.sampled_from(LAYOUTS), label="cache")
    sizes = st.sampled_from([16, 32, 48, 80, *([] if kind == "paged" and page_layout == "x-packed" else [40, 17])])
    fused = kind == "ragged" and draw(st.booleans())
    context = st.just(0) if fused else st.integers(0, 90)
    head_dim = draw(sizes)
    batch = tensors.batch(
        draw(st.lists(st.tuples(context, st.sampled_from([0, 1, 1, 2, 5, 33, 70])), max_size=5)),
        kind=kind,
        heads=(heads_kv * draw(st.sampled_from([1, 2, 3, 7])), heads_kv),
        head_dim=head_dim,
        head_dim_v=head_dim if fused else draw(sizes),
        blocks=(draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES))),
        one_layout=draw(st.booleans()),
        page=draw(st.sampled_from([1, 5, 16, 24, 64])),
        page_layout=page_layout,
        side=draw(st.sampled_from(["left", "right", "both"])),
        dtype=draw(st.sampled_from(DTYPES), label="dtype"),
        window=draw(st.one_of(st.none(), st.tuples(st.sampled_from([-1, 0, 1, 7, 40]), st.sampled_from([-1, 0, 5])))),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
        softmax_scale=draw(st.sampled_from([None, None, 0.0, 0.5])),
        sinks=draw(st.booleans()),
        rows_after=draw(st.integers(0, 2)),
        fused=fused,
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
    )
    with validate_values():
        batch.run(batch.layout, num_splits=draw(st.sampled_from([None, None, 1, 3])))
    batch.check()


# Known traps of kernels of this kind


@pytest.mark.parametrize("q_block", [32, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_trap_no_query_attends_to_the_future_where_its_row_lists_blocks_after_it(tensors, kind, q_block) -> None:
    """A row of queries longer than blocks of keys lists several that only its later queries may see."""
    for lengths in ([(0, 2 * q_block)], [(7, q_block + 5), (0, 1)], [(q_block - 1, 1), (3, 60)]):
        rows = -(-max(sum(one) for one in lengths) // q_block)
        check(tensors, lengths, mask=ones(1, rows, rows * q_block // 16), blocks=(q_block, 16), kind=kind)
        # Blocks after the queries as the row's only ones, too.
        check(tensors, lengths, blocks=(q_block, 16), kind=kind)


def test_trap_a_key_changes_no_bit_of_the_queries_before_it(tensors) -> None:
    for q_block, k_block in ((64, 16), (16, 64), (32, 32)):
        rows = -(-150 // q_block)
        batch = tensors.batch([(20, 130)], mask=ones(1, rows, -(-rows * q_block // k_block)), blocks=(q_block, k_block))
        first = batch.run(out=None).out
        for changed in (21, 63, 64, 100, 149):
            keys, values = batch.k.clone(), batch.v.clone()
            keys[changed:] += 1
            values[changed:] -= 3
            options = {**batch.options, "return_lse": True}
            got = blocksparse_attention(batch.q, keys, values, batch.layout, **options).out
            before = max(0, changed - 20)
            assert_bitwise_equal(got[:before], first[:before], what=f"queries before the key at {changed}")
            assert not torch.equal(got[before:], first[before:])


@pytest.mark.parametrize("kind", KINDS)
def test_trap_an_empty_row_sees_nothing_and_not_the_last_block_of_the_row_before(tensors, kind) -> None:
    mask = ones(4, 12)
    mask[0, 3:6], mask[1, ::2], mask[2, 0], mask[3, 11] = False, False, False, False
    for splits in (None, 3):
        batch = tensors.batch([(0, 190), (70, 20), (48, 1), (0, 16)], mask=mask, kind=kind)
        batch.run(num_splits=splits)
        batch.check(most=40)
        out, lse = batch.packed(batch.out.tensor, batch.lse.tensor)
        assert not bool(out[48:96, 0].any())
        assert bool((lse[0, 48:96] == -torch.inf).all())
        assert bool(out[48:96, 1:].any())


@pytest.mark.parametrize("kind", KINDS)
def test_trap_a_fully_masked_row_gives_0_and_not_nan(tensors, kind) -> None:
    """It lists blocks, all of them after its queries, or before the window."""
    future = ones(4, 12).triu(1)
    for options in ({}, {"sinks": True}, {"softcap": 3.0}, {"softmax_scale": 0.0}, {"softmax_scale": -1.0}):
        batch = check(tensors, [(0, 100), (50, 9), (30, 1)], mask=future, kind=kind, **options)
        assert not bool(batch.packed(batch.out.tensor)[0].any())
        check(tensors, [(0, 190), (50, 9), (180, 1)], mask=ones(1, 12).tril(-2), window=(20, 0), kind=kind, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_trap_a_prompt_in_chunks_is_the_whole_prompt(tensors, dtype) -> None:
    """Rows of the layout are those of absolute positions; chunks begin and end anywhere in them."""
    for q_block, k_block, page in ((16, 16, 16), (64, 16, 24), (32, 64, 64)):
        whole = tensors.batch(
            [(0, 200)], dtype=dtype, blocks=(q_block, k_block), kind="paged", page=page, sinks=True, window=(120, 0)
        )
        whole.run()
        whole.check(most=30)
        outs, lses = [], []
        for begin, end in pairwise([0, 1, 17, 64, 100, 199, 200]):
            options = {
                **whole.options, "cu_seqlens_q": tensors.integers(0, end - begin), "max_seqlen_q": end - begin,
                "seqlens_k": tensors.integers(end),
            }  # fmt: skip
            got = blocksparse_attention(whole.q[begin:end], whole.k, whole.v, whole.layout, **options, return_lse=True)
            outs.append(got.out)
            lses.append(got.lse)
        whole.check_out(torch.cat(outs), torch.cat(lses, dim=1), again=True)


def test_trap_a_scale_of_0_is_a_scale_and_not_the_lack_of_one(tensors) -> None:
    """Every key that is seen then weighs the same."""
    for kind in KINDS:
        batch = check(tensors, RAGGED, softmax_scale=0.0, kind=kind)
        other = batch.run(out=None, softmax_scale=None)
        assert not torch.equal(batch.packed(other.out)[0], batch.packed(batch.out.tensor)[0])
    batch = tensors.batch([(0, 40)], softmax_scale=0.0, lse=False)
    batch.check_out(legacy(batch))
    module = LocalStridedBlockSparseAttn(4, 64, 1, 2, 16, device=tensors.device)
    cu = batch.positional["cu_seqlens_k"]
    seen = module.layout.to_mask()[:, 0, 0]
    assert bool(seen.all())
    got = module(batch.q, batch.k, batch.v, cu, sm_scale=0.0)
    mean = batch.values[:16].cumsum(0) / torch.arange(1, 17, device=tensors.device)[:, None, None]
    torch.testing.assert_close(got[:16].double(), mean.repeat_interleave(2, 1), rtol=2e-2, atol=2e-2)


def test_trap_the_oracle_of_these_tests_is_sparse_and_tells_dense_attention_and_zeros_apart(tensors) -> None:
    """A suite that compares with dense attention passes a kernel that ignores its layout."""
    for kind in KINDS:
        batch = tensors.batch(RAGGED, kind=kind)
        dense = BlockLayout.sliding(170, 100, 16, tensors.device)
        wrong = batch.run(dense, out=None).out
        for given_out in (wrong, torch.zeros_like(wrong)):
            with pytest.raises(AssertionError):
                batch.check_out(given_out)
        batch.run()
        batch.check()


def test_trap_columns_out_of_order_are_refused_or_attended_to_but_never_wrong(tensors) -> None:
    mask = tensors.random_mask(4, 11, 11)
    batch = tensors.batch(RAGGED, mask=mask, lse=False)
    crow, col = blocks.mask_to_csr(mask)
    for head, bounds in enumerate(crow.tolist()):
        for begin, end in pairwise(bounds):
            col[head, begin:end] = col[head, begin:end].flip(0)
    crow, col = crow.to(tensors.device), col.to(tensors.device)
    with pytest.raises(ValueError, match=r"^col\[\d+, \d+\] must be above \d+, the one before it in row \d+, got \d+$"):
        BlockLayout.from_csr(crow, col, 16, 16)
    with validate_values(), pytest.raises(ValueError, match=r"^sparse_layout\[1\]\[\d+, \d+\] must be above "):
        legacy(batch, (crow, col), block_size=16)
    with validate_values(False):
        batch.check_out(legacy(batch, (crow, col), block_size=16))


def test_entries_past_the_lists_are_never_read(tensors) -> None:
    """Padding of -1, and columns that there are: a row that has no end would list them."""
    mask = tensors.random_mask(4, 11, 11)
    mask[:, 10] = False
    batch = tensors.batch(RAGGED, mask=mask, lse=False)
    crow, col = blocks.mask_to_csr(mask)
    for filling in (-1, 0, 10, 2**31 - 1):
        padded = torch.nn.functional.pad(col, (0, 7), value=filling)
        padded[torch.arange(padded.shape[1]) >= crow[:, -1:]] = filling
        pair = (crow.to(tensors.device), padded.to(tensors.device))
        batch.check_out(legacy(batch, pair, block_size=16), again=True)


@pytest.mark.parametrize("kind", ["ragged", "paged"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_trap_nan_in_keys_that_no_query_sees_changes_no_bit(tensors, dtype, kind) -> None:
    """0 times NaN is NaN. Blocks that no row lists, and what is before the window."""
    mask = torch.zeros(1, 13, 13, dtype=torch.bool)
    mask[:, :, ::3] = True
    mask |= torch.eye(13).bool()
    for window in (None, (40, 0)):
        batch = tensors.batch([(150, 40), (64, 9), (199, 1)], mask=mask, dtype=dtype, kind=kind, window=window)
        batch.run()
        batch.check()
        kept = batch.out.tensor.clone()
        for i, (ctx, new) in enumerate(batch.lengths):
            rows = set(range(ctx // 16, (ctx + new - 1) // 16 + 1))
            seen = {j for row in rows for j in range(13) if mask[0, row, j]}
            first = 0 if window is None else max(0, ctx - window[0])
            hidden = [p for p in range(ctx + new) if p // 16 not in seen or p < first]
            assert hidden
            batch.spoil(i, hidden)
        batch.run()
        assert_bitwise_equal(batch.out.tensor, kept, what="the output with NaN in what is not seen")
        batch.check_guards()


# Features, each alone and together

FEATURES = {
    "window": {"window": (10, 0)},
    "a window of one key": {"window": (0, 0)},
    "a window to the right": {"window": (25, 7)},
    "a window without end": {"window": (-1, -1)},
    "a window wider than anything": {"window": (2**40, 0)},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "scale": {"softmax_scale": 0.3},
    "a scale below 0": {"softmax_scale": -0.3},
    "one layout": {"one_layout": True},
    "64-bit indices": {"index_dtype": torch.int64},
    "all": {"window": (40, 0), "softcap": 5.0, "sinks": True, "softmax_scale": 0.4},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
def test_each_feature_alone_and_all_together(tensors, options, kind) -> None:
    check(tensors, RAGGED, rows_after=2, kind=kind, **options)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=name_of)
def test_sinks_of_any_float_dtype_and_of_minus_infinity(tensors, dtype) -> None:
    sinks = torch.tensor([-30.0, 2.5, -torch.inf, 40.0], device=tensors.device).to(dtype)
    for kind in KINDS:
        check(tensors, RAGGED, sinks=sinks, kind=kind)


def test_the_lse_of_a_query_that_sees_nothing_is_its_sink_and_padding_has_none(tensors) -> None:
    sinks = torch.tensor([1.5, -2.0, 0.0, 7.0], device=tensors.device)
    mask = torch.zeros(1, 11, 11, dtype=torch.bool)
    for kind in KINDS:
        batch = check(tensors, SHORT, sinks=sinks, mask=mask, kind=kind, rows_after=3)
        _, lse = batch.packed(batch.out.tensor, batch.lse.tensor)
        torch.testing.assert_close(lse, sinks[:, None].expand_as(lse))


def test_the_window_of_a_call_is_the_same_whether_given_as_a_list_or_a_tuple(tensors) -> None:
    batch = tensors.batch(SHORT, window=(7, 0))
    assert_bitwise_equal(batch.run(out=None, window=[7, 0]).out, batch.run(out=None).out)


def test_sizes_of_the_softmax_are_those_of_the_largest_score_and_do_not_overflow(tensors) -> None:
    for size, dtype in product((8.0, 30.0), DTYPES):
        check(tensors, RAGGED, dtype=dtype, size=size)


# Kinds of batches


@pytest.mark.parametrize("page_layout", LAYOUTS)
@pytest.mark.parametrize("page", [1, 3, 16, 24, 64, 544])
def test_pages_of_any_size_in_every_layout_give_what_dense_keys_do(tensors, page, page_layout) -> None:
    lengths = [(page, 1), (page + 1, 3), (2 * page - 1, 33), (0, 17), (max(0, page - 1), 2)]
    dtype = in_turn(DTYPES, page, LAYOUTS.index(page_layout))
    batch = check(
        tensors, lengths, kind="paged", page=page, page_layout=page_layout, dtype=dtype, head_dim_v=48, most=5
    )
    keys, values = batch.keys.to(dtype), batch.values.to(dtype)
    got = blocksparse_attention(
        batch.q, keys, values, batch.layout, cu_seqlens_q=batch.positional["cu_seqlens_q"],
        cu_seqlens_k=tensors.integers(0, *accumulate(batch.totals)), max_seqlen_q=batch.max_seqlen_q, return_lse=True,
    )  # fmt: skip
    batch.check_out(got.out, got.lse, again=True)


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_padded_batches_give_what_ragged_ones_do(tensors, dtype, side) -> None:
    batch = check(tensors, RAGGED, kind="padded", side=side, dtype=dtype, sinks=True)
    got = blocksparse_attention(
        batch.queries, batch.keys.to(dtype), batch.values.to(dtype), batch.layout,
        cu_seqlens_q=tensors.integers(*batch.begins), cu_seqlens_k=tensors.integers(*batch.begins_k),
        max_seqlen_q=batch.max_seqlen_q, sinks=batch.sinks, return_lse=True,
    )  # fmt: skip
    out, lse = batch.packed(batch.out.tensor, batch.lse.tensor)
    torch.testing.assert_close(got.out, out)
    torch.testing.assert_close(got.lse, lse)


def test_padded_batches_without_padding_need_no_bounds(tensors) -> None:
    for lengths in ([(0, 33)] * 3, [(20, 1)] * 4, [(40, 17)]):
        batch = check(tensors, lengths, kind="padded", side="none")
        assert not any(name.endswith(("starts", "ends")) for name in batch.options)


def test_a_page_outside_the_pool_reads_as_zeros(tensors) -> None:
    for page_id in (-1, 2**31 - 1, -(2**31), None):
        batch = tensors.batch([(70, 5), (40, 1), (0, 3)], kind="paged", mask=ones(1, 5))
        table = batch.positional["block_table"]
        bad = batch.k.shape[0] if page_id is None else page_id
        table[0, 1] = bad
        table[1, 2] = bad
        batch.forget_inputs()
        for x in (batch.keys, batch.values):
            x[16:32] = 0
            x[75 + 32 : 75 + 41] = 0
        with validate_values(False):
            batch.run()
        batch.check()


def test_a_pool_without_pages_serves_where_there_is_nothing_to_read(tensors) -> None:
    batch = tensors.batch([(0, 0), (0, 0)], kind="paged", rows_after=2)
    for pages, columns in ((1, 0), (0, 0), (0, 1)):
        options = {**batch.options, "block_table": batch.positional["block_table"][:, :columns]}
        got = blocksparse_attention(batch.q, batch.k[:pages], batch.v[:pages], batch.layout, **options, return_lse=True)
        batch.check_out(got.out, got.lse)


# Results


def test_results_are_new_packed_tensors_where_no_out_is_given(tensors) -> None:
    for kind in KINDS:
        batch = tensors.batch(SHORT, kind=kind, rows_after=2, head_dim_v=48)
        got = batch.run(out=None)
        assert isinstance(got, AttentionResult)
        assert got._fields == ("out", "lse")
        assert got.out.is_contiguous()
        assert got.lse.is_contiguous()
        batch.check_out(*got)
        out = batch.run(out=None, return_lse=False)
        assert isinstance(out, Tensor)
        assert_bitwise_equal(out, got.out)
        assert batch.run(return_lse=False) is batch.out.tensor


def test_slices_of_one_fused_tensor_are_read_in_place(tensors) -> None:
    for dtype in DTYPES:
        check(tensors, [(0, n) for n in (5, 40, 0, 1, 70)], fused=True, dtype=dtype, rows_after=2)


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 2, 1)], ids=str)
def test_tensors_and_outputs_of_any_strides(tensors, order) -> None:
    """Dimensions in another order in memory, NaN between every two elements."""

    def laid_out(tensor: Tensor) -> Tensor:
        dims = (*order, *range(3, tensor.ndim))
        wide = poisoned([*[tensor.shape[dim] for dim in dims], 2], tensor.dtype, tensor.device)
        return wide[..., 0].permute([dims.index(dim) for dim in range(tensor.ndim)]).copy_(tensor)

    for kind, dtype, names in product(KINDS, (BF16, FP32), ("k v", "q k v out")):
        batch = tensors.batch(SHORT, dtype=dtype, kind=kind)
        for name in set(names.split()) - {"out"}:
            setattr(batch, name, laid_out(getattr(batch, name)))
        out = laid_out(batch.out.tensor) if "out" in names else None
        got = batch.run(out=out)
        assert out is None or got.out is out
        batch.check_out(*got)


def test_lists_of_any_row_strides_are_read(tensors) -> None:
    """One row of lists expanded to all heads, and heads with others between them."""
    batch = tensors.batch(RAGGED, one_layout=True)
    made = batch.layout
    expanded = BlockLayout(made.crow.expand(4, -1), made.col.expand(4, -1), 16, 16, made.columns)
    batch.check_out(*batch.run(expanded, out=None))
    batch = tensors.batch(RAGGED)
    made = batch.layout
    crow, col = (torch.stack([x, torch.full_like(x, -(2**31))], dim=1)[:, 0] for x in (made.crow, made.col))
    assert not col.is_contiguous()
    batch.check_out(*batch.run(BlockLayout(crow, col, 16, 16, made.columns), out=None))


def test_new_tensors_hold_zeros_in_rows_of_no_sequence_and_not_what_the_memory_held(tensors) -> None:
    for kind in KINDS:
        batch = tensors.batch(SHORT, rows_after=5, kind=kind)
        # Freed at once, so that the next allocation of its size finds it.
        poisoned(tuple(batch.q.shape), BF16, tensors.device)
        batch.check_out(*batch.run(out=None))


# Plans


@pytest.mark.parametrize("num_splits", [1, 2, 3, 8, 50])
def test_any_number_of_splits_gives_the_same_attention(tensors, num_splits) -> None:
    for kind in KINDS:
        batch = tensors.batch([(300, 5), (0, 1), (0, 40), (70, 1), (1000, 2)], kind=kind, sinks=True)
        batch.run(num_splits=num_splits)
        batch.check()


def test_a_plan_may_be_given(tensors) -> None:
    batch = tensors.batch(RAGGED, sinks=True)
    batch.run(plan=AttentionPlan(16, 16, 1, 4, 1))
    batch.check()


def test_max_seqlen_q_may_be_larger_than_the_longest(tensors) -> None:
    for kind in KINDS:
        batch = tensors.batch(RAGGED, kind=kind)
        for most in (73, 128, 176):
            batch.run(max_seqlen_q=most)
            batch.check(again=True)


# The drop-in function


def legacy(batch, layout=None, **options) -> Tensor:
    """A ragged batch through the signature of vLLM's function."""
    given = {"block_size": batch.blocks[1], "q_block_size": batch.blocks[0], **options}
    cu_seqlens_q, cu_seqlens_k = batch.positional["cu_seqlens_q"], batch.positional["cu_seqlens_k"]
    chosen = batch.layout if layout is None else layout
    return blocksparse_flash_attn_varlen_fwd(
        batch.q, batch.k, batch.v, cu_seqlens_k, cu_seqlens_q, batch.softmax_scale, chosen, **given
    )


@pytest.mark.parametrize(("q_block", "k_block"), [(16, 16), (64, 64), (128, 32), (16, 64)])
def test_the_drop_in_takes_a_layout_or_its_lists(tensors, q_block, k_block) -> None:
    for dtype, softmax_scale in zip(DTYPES, (None, 0.3, 1), strict=True):
        batch = tensors.batch(
            RAGGED, dtype=dtype, softmax_scale=softmax_scale, lse=False, blocks=(q_block, k_block), head_dim_v=64,
            rows_after=1,
        )  # fmt: skip
        batch.check_out(legacy(batch))
        for pair in ((batch.layout.crow, batch.layout.col), [batch.layout.crow, batch.layout.col]):
            for most in (None, 170, batch.layout.rows * q_block):
                batch.check_out(legacy(batch, pair, max_seqlen=most), again=True)


def test_the_drop_in_defaults_to_blocks_of_64_queries_and_keys(tensors) -> None:
    batch = tensors.batch(RAGGED, blocks=(64, 64), lse=False)
    cu_seqlens_q, cu_seqlens_k = batch.positional["cu_seqlens_q"], batch.positional["cu_seqlens_k"]
    for layout in (batch.layout, (batch.layout.crow, batch.layout.col)):
        out = blocksparse_flash_attn_varlen_fwd(batch.q, batch.k, batch.v, cu_seqlens_k, cu_seqlens_q, None, layout)
        batch.check_out(out, again=True)
    # A layout knows its blocks.
    batch = tensors.batch(RAGGED, blocks=(32, 16), lse=False)
    batch.check_out(legacy(batch, block_size=None, q_block_size=None))


def test_without_cu_seqlens_q_the_drop_in_decodes_one_query_a_sequence(tensors) -> None:
    for dtype in (torch.int32, torch.int64):
        batch = tensors.batch([(n, 1) for n in (300, 0, 17, 64)], lse=False, index_dtype=dtype)
        out = blocksparse_flash_attn_varlen_fwd(
            batch.q, batch.k, batch.v, batch.positional["cu_seqlens_k"], None, None, batch.layout
        )
        batch.check_out(out)
    # As many keys as sequences too: one query each all the same.
    batch = tensors.batch([(0, 1)] * 3, lse=False)
    out = blocksparse_flash_attn_varlen_fwd(
        batch.q, batch.k, batch.v, batch.positional["cu_seqlens_k"], None, None, batch.layout
    )
    batch.check_out(out)


def test_without_cu_seqlens_q_the_drop_in_takes_as_many_queries_as_keys_where_rows_are_as_many(tensors) -> None:
    batch = tensors.batch([(0, 40), (0, 3), (0, 0), (0, 70)], lse=False)
    out = blocksparse_flash_attn_varlen_fwd(
        batch.q, batch.k, batch.v, batch.positional["cu_seqlens_k"], None, None, batch.layout
    )
    batch.check_out(out)


def test_the_drop_in_keeps_the_arguments_that_engines_pass_by_position_and_name() -> None:
    parameters = inspect.signature(blocksparse_flash_attn_varlen_fwd).parameters
    assert [*parameters] == [
        "q", "k", "v", "cu_seqlens_k", "cu_seqlens_q", "sm_scale", "sparse_layout", "block_size", "q_block_size",
        "max_seqlen",
    ]  # fmt: skip
    kinds = [parameter.kind for parameter in parameters.values()]
    assert kinds == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 7 + [inspect.Parameter.KEYWORD_ONLY] * 3
    assert [parameter.default for parameter in [*parameters.values()][7:]] == [None, None, None]


# The module


def test_the_module_attends_by_the_pattern_of_its_arguments(tensors) -> None:
    for homo, q_block in product((False, True), (None, 32)):
        module = LocalStridedBlockSparseAttn(
            4, 200, 2, 4, 16, device=tensors.device, dtype=BF16, homo_head=homo, q_block_size=q_block
        )
        mask = blocks.local_strided(4, 200, 2, 4, 16, homo)
        if q_block:
            mask = blocks.merge_query_blocks(mask, 2)
        batch = tensors.batch(RAGGED, mask=mask, blocks=(q_block or 16, 16), lse=False, softmax_scale=0.2)
        cu_seqlens_q, cu_seqlens_k = batch.positional["cu_seqlens_q"], batch.positional["cu_seqlens_k"]
        batch.check_out(module(batch.q, batch.k, batch.v, cu_seqlens_k, cu_seqlens_q, 0.2))
    batch = tensors.batch([(n, 1) for n in (100, 0, 17)], mask=mask, blocks=(32, 16), lse=False)
    batch.check_out(module(batch.q, batch.k, batch.v, batch.positional["cu_seqlens_k"]))


def test_trap_modules_of_ranks_give_side_by_side_what_the_module_of_all_heads_does(tensors) -> None:
    """active_head_range: each rank has its query heads, with their shifts, and their kv heads."""
    mask = blocks.local_strided(8, 200, 1, 8, 16)
    batch = tensors.batch(RAGGED, heads=(8, 4), mask=mask, lse=False)
    cu_seqlens_q, cu_seqlens_k = batch.positional["cu_seqlens_q"], batch.positional["cu_seqlens_k"]
    parts = []
    for rank in range(4):
        module = LocalStridedBlockSparseAttn(
            8, 200, 1, 8, 16, device=tensors.device, active_head_range=(2 * rank, 2 * rank + 2)
        )
        heads, heads_kv = slice(2 * rank, 2 * rank + 2), slice(rank, rank + 1)
        parts.append(module(batch.q[:, heads], batch.k[:, heads_kv], batch.v[:, heads_kv], cu_seqlens_k, cu_seqlens_q))
    batch.check_out(torch.cat(parts, dim=1))


def test_the_module_keeps_the_arguments_that_models_pass() -> None:
    parameters = inspect.signature(LocalStridedBlockSparseAttn).parameters
    assert [*parameters] == [
        "n_heads", "max_seqlen", "local_blocks", "vert_stride", "block_size", "device", "dtype", "homo_head",
        "active_head_range", "q_block_size",
    ]  # fmt: skip
    assert [parameter.default for parameter in [*parameters.values()][5:]] == [None, None, False, None, None]
    forward = inspect.signature(LocalStridedBlockSparseAttn.forward).parameters
    assert [*forward] == ["self", "q", "k", "v", "cu_seqlens_k", "cu_seqlens_q", "sm_scale"]


def test_the_module_follows_its_model_from_device_to_device_and_is_no_part_of_its_checkpoint(device) -> None:
    with torch.device("meta"):
        module = torch.nn.Sequential(LocalStridedBlockSparseAttn(4, 200, 2, 4, 16), torch.nn.Linear(2, 2))
    assert module[0].layout.col.is_meta
    assert sorted(module.state_dict()) == ["1.bias", "1.weight"]
    module.to_empty(device=device)
    wanted = BlockLayout.local_strided(4, 200, 2, 4, 16, device=device)
    assert module[0].layout is wanted
    assert module.to(BF16)[0].layout is wanted
    assert module.to("meta")[0].layout.col.is_meta
    assert repr(module[0]) == (
        "LocalStridedBlockSparseAttn(n_heads=4, max_seqlen=200, local_blocks=2, vert_stride=4, block_size=16, "
        "homo_head=False, active_head_range=None)"
    )


# Shapes of models


@pytest.mark.parametrize("kind", KINDS)
def test_the_shapes_of_a_model_in_sampled_rows(tensors, kind) -> None:
    """Phi-3-small: a chunk of prefill after a prefix, decode, a short prompt."""
    model = PHI3_SMALL
    lengths = [(8000, 192), (8191, 1), (0, 100), (3000, 1)]
    if torch.cuda.is_available():
        lengths += [(0, 8192), (4096, 4096), (16383, 1)]
    longest = max(sum(one) for one in lengths)
    pattern = (model.local_blocks, model.vert_stride, model.block_size)
    heads = (model.num_heads_q, model.num_heads_kv) if torch.cuda.is_available() else (8, 2)
    mask = blocks.local_strided(heads[0], longest, *pattern)
    batch = tensors.batch(
        lengths if torch.cuda.is_available() else [(2000, 48), (2047, 1), (0, 100)], heads=heads, kind=kind,
        head_dim=model.head_dim, mask=mask, blocks=(model.block_size, model.block_size), page=64,
    )  # fmt: skip
    batch.run(BlockLayout.local_strided(heads[0], longest, *pattern, device=tensors.device))
    batch.check(most=4)


def test_a_part_of_a_prefix_merged_with_the_rest_by_lse_is_the_whole(tensors) -> None:
    """lse is the natural logarithm of the sum: halves of a layout's columns, merged, are the layout."""
    from kernel_reference.attention import merge_attention_states

    mask = ones(4, 11)
    batch = tensors.batch(RAGGED, mask=mask, dtype=FP32)
    halves = [mask.clone(), mask.clone()]
    halves[0][:, :, ::2], halves[1][:, :, 1::2] = False, False
    parts = [batch.run(tensors.layout_of(half, 16, 16, tensors.device), out=None) for half in halves]
    got = merge_attention_states(*parts[0], *parts[1])
    exact = attention(
        batch.q.double(), batch.keys, batch.values, cu_seqlens_q=batch.positional["cu_seqlens_q"],
        cu_seqlens_k=batch.positional["cu_seqlens_k"], causal=True,
    )  # fmt: skip
    torch.testing.assert_close(got.out, exact.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.lse, exact.lse, rtol=1e-5, atol=1e-5)


def test_nan_that_a_query_sees_shows_in_it(tensors) -> None:
    batch = tensors.batch([(20, 5)], heads=(1, 1), mask=ones(1, 2))
    poison_(batch.v[22, 0, 7])
    got = batch.run(out=None).out[:, 0]
    assert bool(got[2:, 7].isnan().all())
    others = [column for column in range(32) if column != 7]
    assert bool(got[:, others].isfinite().all())
