"""Do the public functions do what they promise? On the device: the kernels on a GPU, else the reference.

Every comparison is with attention in float64, beside what plain PyTorch of the same dtype makes of it. A GPU compiles a
kernel for each head count, dtype and page size, so that these take turns where their product would not show more.
"""

from __future__ import annotations

import inspect
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilelang_mla
from kernel_reference.attention import attention
from kernel_reference.models import DEEPSEEK_V3
from kernel_reference.testing.guards import assert_bitwise_equal, poison_
from tilelang_mla import AttentionResult, calls, flash_mla, flash_mla_varlen_func, flash_mla_with_kvcache, plan_decode
from tilelang_mla.plan import DeviceLimits

Tensor = torch.Tensor
BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = (BF16, FP16)
HEADS = (1, 8, 12, 16, 20, 24, 40, 64, 80, 96, 112, 128)
PAGES = (1, 16, 32, 64, 128)
TOKENS = (1, 2, 3, 4)
# Nothing, one key, fewer than the query tokens, round a block's end, and some.
MIXED = [0, 1, 2, 3, 63, 64, 65, 1000]
# Prefill: (queries, keys): more keys, as many, more queries, none of either, a tile's end.
RAGGED = [(5, 20), (17, 17), (40, 9), (0, 33), (7, 0), (0, 0), (1, 130), (128, 128), (65, 200), (1, 1)]
SMALL = {"dim_nope": 64, "dim_rope": 32}
# Plans that a kernel is launched with; the reference computes what they all must give.
PLANS = {
    "no plan": None, "by lengths": {}, "1 part": {"num_splits": 1}, "3 parts": {"num_splits": 3},
    "16 parts": {"num_splits": 16}, "for 8 SMs": {"cores": 8},
}  # fmt: skip
every_plan = pytest.mark.parametrize("how", PLANS.values(), ids=PLANS)


def name_of(value: object) -> str:
    return str(value).replace("torch.", "")


def in_turn(values, *keys):
    """One of ``values``, another for each set of keys that stands beside it."""
    return values[sum(keys) % len(values)]


def decode(tensors, lengths, how=None, *, most: int | None = None, **options):
    """One call of a batch, into guarded memory, against the oracle."""
    batch = tensors.decode(lengths, **options)
    batch.run(plan=None if how is None else batch.plan(**how))
    batch.check(most=most)
    return batch


def prefill(tensors, lengths, *, most: int | None = None, plan=None, **options):
    batch = tensors.prefill(lengths, **options)
    batch.run(plan=plan)
    batch.check(most=most)
    return batch


def test_the_plain_version_is_the_oracle_rounded(tensors) -> None:
    for batch in (tensors.decode(MIXED, seqlen_q=2, dtype=FP16), tensors.prefill(RAGGED, dtype=FP16, heads=(4, 2))):
        for wanted in batch.wanted(batch.sample()):
            torch.testing.assert_close(wanted.plain.double(), wanted.exact, rtol=2e-3, atol=2e-3)


# Decoding: sizes


@pytest.mark.parametrize("heads", HEADS)
def test_trap_any_number_of_heads_in_one_batch_of_all_lengths(tensors, heads) -> None:
    """No grid of whole groups of 16 or 64 heads: fewer are not dropped, nor are those behind the last whole group."""
    turn = HEADS.index(heads)
    for i, causal in enumerate((True, False)):
        options = {
            "heads": heads, "seqlen_q": in_turn(TOKENS, turn, i), "page": in_turn(PAGES, turn, 2 * i),
            "dtype": in_turn(DTYPES, turn, i), "causal": causal,
        }  # fmt: skip
        # A GPU has several parts of it to merge; the reference on a CPU has no parts, and takes a second a head size.
        longest = 8192 if tensors.device.type != "cpu" else 1500
        decode(tensors, [*MIXED, longest] if causal else MIXED, {}, **options)


@pytest.mark.parametrize("seqlen_q", TOKENS)
@pytest.mark.parametrize("page", PAGES)
def test_pages_and_query_tokens_of_any_two_numbers(tensors, page, seqlen_q) -> None:
    """Several query tokens of few heads share a tile of rows, and each sees its own number of keys."""
    turn = PAGES.index(page)
    for causal, dtype in zip((True, False), DTYPES[:: 1 if turn % 2 else -1], strict=True):
        heads = in_turn((3, 16, 20, 33), turn, seqlen_q)
        decode(tensors, MIXED, page=page, seqlen_q=seqlen_q, causal=causal, dtype=dtype, heads=heads, **SMALL)


@pytest.mark.parametrize("page", [2, 3, 24, 48, 100, 256])
def test_pages_of_other_sizes(tensors, page) -> None:
    decode(tensors, [*MIXED, 2 * page, 5 * page + 1], page=page, heads=5, seqlen_q=2, **SMALL)


@pytest.mark.parametrize(("dim_nope", "dim_rope"), [(512, 64), (64, 32), (256, 96), (320, 0), (512, 128), (512, 0)])
def test_latents_and_ropes_of_any_sizes_that_are_multiples(tensors, dim_nope, dim_rope) -> None:
    for dtype in DTYPES:
        decode(tensors, MIXED, dim_nope=dim_nope, dim_rope=dim_rope, dtype=dtype, heads=12, seqlen_q=2)


def test_one_sequence_of_a_model_behind_a_long_context(tensors) -> None:
    model = DEEPSEEK_V3
    for ranks, length in ((8, 32768), (1, 4096)):
        heads = model.tensor_parallel(ranks).num_heads
        sizes = {"dim_nope": model.latent, "dim_rope": model.rope, "softmax_scale": model.head_qk**-0.5}
        decode(tensors, [length], {}, heads=heads, **sizes)


# Decoding: lengths


@every_plan
def test_trap_parts_with_no_work_leave_no_nan_in_a_ragged_batch(tensors, how) -> None:
    """Splits of the longest sequence are more than the shortest has blocks: 0 / 0 in those without any."""
    decode(tensors, [64, 640, 8192, 32768], how, heads=16, **SMALL)
    decode(tensors, [64, 1, 0, 1000], how, heads=16, seqlen_q=3)


@every_plan
@pytest.mark.parametrize("seqlen_q", TOKENS)
def test_trap_lengths_0_and_below_the_query_tokens_give_zero_and_minus_infinity(tensors, seqlen_q, how) -> None:
    lengths = [*range(seqlen_q + 2), 0]
    for causal in (True, False):
        batch = decode(tensors, lengths, how, seqlen_q=seqlen_q, heads=4, causal=causal, **SMALL)
        for i, length in enumerate(lengths):
            blind = max(0, seqlen_q - length) if causal else seqlen_q * (length == 0)
            assert not bool(batch.out.tensor[i, :blind].any())
            assert bool((batch.lse.tensor[i, :, :blind] == -torch.inf).all())
            assert bool(batch.lse.tensor[i, :, blind:].isfinite().all())
            assert bool((batch.out.tensor[i, blind:] != 0).any(-1).all())


def test_every_length_round_the_ends_of_blocks(tensors) -> None:
    for seqlen_q, page in ((1, 16), (4, 64), (2, 1)):
        decode(tensors, [*range(12), *range(60, 70), *range(124, 133)], page=page, seqlen_q=seqlen_q, heads=3, **SMALL)


def test_equal_lengths_and_batches_of_one(tensors) -> None:
    for lengths in ([1], [64] * 5, [1000] * 3, [0], [0, 0]):
        decode(tensors, lengths, {}, heads=5, **SMALL)


def test_no_sequences_no_query_tokens_and_no_pages(tensors) -> None:
    decode(tensors, [], {}, **SMALL)
    decode(tensors, [5, 0], {}, seqlen_q=0, **SMALL)
    batch = tensors.decode([0, 0], **SMALL)
    batch.kv = batch.kv[:0]
    batch.block_table = batch.block_table[:, :0]
    batch.run()
    batch.check()


def test_trap_nan_in_unused_tails_of_pages_and_behind_the_last_page_is_not_used(tensors) -> None:
    """Rows of values past the end must be zeroed: a weight of 0 times NaN is NaN. The batch holds NaN there already."""
    batch = tensors.decode([5, 70, 64, 1], page=64, heads=4, extra_columns=4, **SMALL)
    last_page = int(batch.block_table[0, 0])
    assert bool(batch.kv[last_page, 5:].isnan().all())
    assert bool(batch.kv[int(batch.block_table[3, 1])].isnan().all())
    batch.run()
    batch.check()


@every_plan
def test_trap_nan_in_a_neighbour_s_cache_stays_with_it(tensors, how) -> None:
    for page in PAGES:
        decode(tensors, [65, 70, 0, 1000, 3], how, of_nan=(1, 3), page=page, heads=4, **SMALL)


def test_trap_later_keys_hidden_from_a_query_token_are_masked_not_only_multiplied(tensors) -> None:
    """The last token's key gives the largest score by far: earlier tokens must not see it."""
    batch = tensors.decode([40, 64, 65], seqlen_q=4, heads=4, page=16, **SMALL)
    for i, length in enumerate(batch.lengths):
        page, place = int(batch.block_table[i, (length - 1) // 16]), (length - 1) % 16
        batch.kv[page, place] *= 40
        batch.keys[batch.begins_k[i] + length - 1] *= 40
    batch.forget_inputs()
    batch.run()
    batch.check()


# Decoding: what else is given


@pytest.mark.parametrize("scale", [None, 0.0, 0.135, 1, -0.2])
def test_any_scale(tensors, scale) -> None:
    decode(tensors, MIXED, softmax_scale=scale, heads=4, **SMALL)
    prefill(tensors, RAGGED, softmax_scale=scale)


def test_scores_of_hundreds_do_not_overflow(tensors) -> None:
    for scale in (4.0, -4.0):
        decode(tensors, MIXED, softmax_scale=scale, heads=4, seqlen_q=2, **SMALL)
        prefill(tensors, RAGGED, softmax_scale=scale)


def test_the_scale_without_one_is_that_of_all_elements_of_q(tensors) -> None:
    batch = tensors.decode([70, 3], heads=2, **SMALL)
    given = batch.given[:5]
    assert_bitwise_equal(flash_mla_with_kvcache(*given), flash_mla_with_kvcache(*given, 96**-0.5))
    batch = tensors.prefill(RAGGED)
    given = batch.given[:7]
    assert_bitwise_equal(flash_mla_varlen_func(*given), flash_mla_varlen_func(*given, 192**-0.5))


@pytest.mark.parametrize("page_gap", [64, 4096])
def test_the_cache_may_be_a_view_with_a_stride_between_pages(tensors, page_gap) -> None:
    for page in (1, 16, 64):
        decode(tensors, MIXED, page=page, page_gap=page_gap, heads=4, **SMALL)


def test_results_are_new_and_contiguous_or_those_that_are_given(tensors) -> None:
    batch = tensors.decode([70, 3, 0], heads=4, seqlen_q=2, **SMALL)
    got = batch.run()
    assert isinstance(got, AttentionResult)
    assert got.out is batch.out.tensor
    for options in ({}, {"return_lse": True}):
        new = flash_mla_with_kvcache(*batch.given, **options)
        out = new.out if options else new
        assert out.is_contiguous()
        assert_bitwise_equal(out, batch.out.tensor)
        if options:
            assert new.lse.is_contiguous()
            assert_bitwise_equal(new.lse, batch.lse.tensor)
    batch = tensors.prefill(RAGGED)
    got = batch.run()
    assert got.out is batch.out.tensor
    assert_bitwise_equal(flash_mla_varlen_func(*batch.given), batch.out.tensor)
    assert_bitwise_equal(flash_mla_varlen_func(*batch.given, return_lse=True).lse, batch.lse.tensor)


def test_outputs_of_other_strides_are_written_in_place(tensors) -> None:
    batch = tensors.decode([70, 3, 0], heads=4, seqlen_q=2, **SMALL)
    tokens_first = torch.empty(2, 4, 3, 64, dtype=BF16, device=batch.device).permute(2, 0, 1, 3)
    batch.check_out(*batch.run(out=tokens_first))
    batch = tensors.prefill(RAGGED)
    heads_first = torch.empty(4, len(batch.q), 128, dtype=BF16, device=batch.device).transpose(0, 1)
    batch.check_out(*batch.run(out=heads_first))


def test_the_logarithm_is_natural_and_lets_parts_be_merged(tensors) -> None:
    """Of equal scores it is their number's, and of two halves of the keys the whole follows."""
    batch = tensors.decode([1000, 64], heads=4, softmax_scale=0.0, **SMALL)
    batch.run()
    wanted = torch.tensor([1000.0, 64.0], device=batch.device).log()[:, None, None].expand(2, 4, 1)
    torch.testing.assert_close(batch.lse.tensor, wanted)


@every_plan
def test_trap_partial_results_and_their_logarithms_are_float32(tensors, how) -> None:
    """Rounded to 16 bits, their error is five times that of rounding the output: more than the oracle allows."""
    # The reference on a CPU has no parts.
    lengths = [4096, 3000, 500] if tensors.device.type != "cpu" else [1000, 700, 120]
    for dtype in DTYPES:
        batch = decode(tensors, lengths, how, heads=16, dtype=dtype, most=20)
        exact = batch.wanted(batch.sample())
        rounded = exact[0].exact.to(dtype)
        error = (batch.packed(batch.out.tensor, batch.lse.tensor)[0].double() - exact[0].exact).abs().mean()
        assert float(error) <= 2 * float((rounded.double() - exact[0].exact).abs().mean())


def test_trap_several_query_tokens_are_as_many_calls_of_one(tensors) -> None:
    batch = tensors.decode([70, 3, 200], heads=12, seqlen_q=3, **SMALL)
    batch.run()
    for token in range(3):
        lengths = (batch.seqlens_k - 2 + token).clamp(min=0)
        alone = flash_mla_with_kvcache(batch.q[:, token : token + 1], batch.kv, lengths, *batch.given[3:6], causal=True)
        torch.testing.assert_close(alone, batch.out.tensor[:, token : token + 1], rtol=1e-2, atol=1e-2)


@given(st.data())
@settings(max_examples=20)
def test_any_batch(tensors, data) -> None:
    lengths = data.draw(st.lists(st.integers(0, 300), max_size=6))
    options = {
        "heads": data.draw(st.integers(1, 70)), "seqlen_q": data.draw(st.integers(0, 4)), "page_gap": 0,
        "page": data.draw(st.integers(1, 130)), "causal": data.draw(st.booleans()),
        "dtype": data.draw(st.sampled_from(DTYPES)),
    }  # fmt: skip
    decode(tensors, lengths, data.draw(st.sampled_from([*PLANS.values()])), **options, **SMALL)


# A plan made from other lengths


@every_plan
def test_a_plan_made_from_other_lengths_is_as_right(tensors, how) -> None:
    batch = tensors.decode([3, 0, 1000, 65], heads=16, **SMALL)
    for others in ([1000, 1000, 0, 0], [0, 0, 0, 0], [2**31 - 1, -5, 1, 64]):
        options = None if how is None else {"cores": 132, **SMALL, **how}
        batch.run(plan=options and tilelang_mla.plan_decode(tensors.integers(*others), 16, **options))
        batch.check()


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "lists"])
def test_a_plan_for_other_heads_or_tokens_or_without_its_tensors_is_refused(tensors, sparse: bool) -> None:
    seqlen_q = 1 if sparse else 2
    batch = tensors.decode([3, 0, 1000, 65], heads=16, seqlen_q=seqlen_q, **SMALL)
    tables = {"seqlens_k": batch.seqlens_k, "block_table": batch.block_table, "dim_nope": 64}
    if sparse:
        lists = torch.zeros(4, 1, 64, dtype=torch.int32, device=batch.device)
        tables |= {"seqlens_k": None, "block_table": None, "indices": lists}
    for heads, tokens in ((1, 1), (128, 4), (16, 3)):
        plan = tilelang_mla.plan_decode(batch.seqlens_k, heads, tokens, **SMALL)
        said = (
            f"^plan must be made for {16 * seqlen_q} query tokens x heads, as q has, got one made for {heads * tokens}$"
        )
        with pytest.raises(ValueError, match=said):
            flash_mla_with_kvcache(batch.q, batch.kv, **tables, plan=plan)
    plan = tilelang_mla.plan_decode(batch.seqlens_k, 16, seqlen_q, **SMALL)
    with pytest.raises(ValueError, match=r"^plan\.first_part must be given with spare parts"):
        flash_mla_with_kvcache(batch.q, batch.kv, **tables, plan=plan._replace(first_part=None, order=None))
    plan = tilelang_mla.plan_decode(batch.seqlens_k, 16, seqlen_q, num_splits=2, **SMALL)
    with pytest.raises(ValueError, match=r"^plan\.order must be None without a plan"):
        flash_mla_with_kvcache(batch.q, batch.kv, **tables, plan=plan._replace(first_part=None))


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_a_sequence_has_the_same_bits_whatever_is_beside_it_where_splits_are_given(tensors, splits) -> None:
    batch = tensors.decode([70, 0, 300, 1, 1000, 64], heads=16, seqlen_q=2, **SMALL)
    whole = batch.run(out=None, plan=batch.plan(num_splits=splits))
    for group in [[i] for i in range(6)] + [[2, 0], [3, 5, 1], [5, 4, 3, 2, 1, 0]]:
        which = torch.tensor(group, device=batch.device)
        lengths = batch.seqlens_k[which]
        plan = tilelang_mla.plan_decode(lengths, 16, 2, num_splits=splits, **SMALL)
        given = (batch.q[which], batch.kv, lengths, batch.block_table[which], *batch.given[4:])
        got = flash_mla_with_kvcache(*given, return_lse=True, plan=plan)
        for one, other in zip(got, whole, strict=True):
            assert_bitwise_equal(one, other[which], what=f"sequences {group}")


# FlashMLA's names


@pytest.mark.parametrize("causal", [False, True])
def test_the_drop_in_gives_the_same_bits_with_and_without_metadata(tensors, causal) -> None:
    batch = tensors.decode(MIXED, heads=16, seqlen_q=2, causal=causal)
    want = batch.run()
    batch.check()
    given = (batch.q, batch.kv, batch.block_table, batch.seqlens_k, 512)
    metadata = flash_mla.get_mla_metadata(batch.seqlens_k, 2 * 16, 1)
    for own in ((None, None), metadata, [x.clone() for x in metadata]):
        got = flash_mla.flash_mla_with_kvcache(*given, *own, None, causal)
        assert type(got) is tuple
        if own[0] is None:
            for one, other in zip(got, want, strict=True):
                assert_bitwise_equal(one, other)
        batch.check_out(*got)


def test_the_drop_in_has_the_names_of_flash_mla_in_its_order() -> None:
    names = [*inspect.signature(flash_mla.flash_mla_with_kvcache).parameters]
    assert names[:9] == [
        "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits",
        "softmax_scale", "causal",
    ]  # fmt: skip
    names = [*inspect.signature(flash_mla.get_mla_metadata).parameters]
    assert names[:3] == ["cache_seqlens", "num_q_tokens_per_head_k", "num_heads_k"]


def test_metadata_for_a_graph_is_of_a_shape_that_lengths_do_not_change(tensors) -> None:
    looks = set()
    for lengths in ([0, 0, 0], [1, 64, 65], [8192, 1, 100_000]):
        for tensor in flash_mla.get_mla_metadata(tensors.integers(*lengths), 64, 1):
            assert tensor.dtype == torch.int32
            assert tensor.device == tensors.integers(0).device
            looks.add(tuple(tensor.shape))
    assert len(looks) == 2


@pytest.mark.parametrize("rows", [1, 16, 64, 65, 128, 512, 9000])
def test_metadata_has_a_row_for_each_core_at_most_and_keeps_the_schedule(tensors, monkeypatch, rows) -> None:
    """Engines allocate as many rows, and assert that there are no more."""
    monkeypatch.setattr(calls, "device_limits", lambda _: DeviceLimits(132))
    lengths = tensors.integers(8192, 1, 700, 0, 100_000)
    plan = plan_decode(lengths, rows)
    metadata, num_splits = flash_mla.get_mla_metadata(lengths, rows, 1)
    assert 1 <= metadata.shape[0] <= 132
    assert metadata.shape[1] == 8
    assert_bitwise_equal(num_splits, plan.first_part)
    q = torch.zeros(5, 1, rows, 576, dtype=BF16, device=lengths.device)
    parts = flash_mla._parts(q, 512, flash_mla.FlashMLASchedMeta(metadata, num_splits))
    assert parts is not None
    assert parts[2] == plan.tiles


def test_metadata_without_arguments_is_made_by_the_first_call_and_used_by_those_behind_it(tensors) -> None:
    batch = tensors.decode(MIXED, heads=16, seqlen_q=2)
    made, none = flash_mla.get_mla_metadata()
    assert none is None
    assert made == flash_mla.FlashMLASchedMeta()
    given = (batch.q, batch.kv, batch.block_table, batch.seqlens_k, 512, made, none, None, True)
    with pytest.raises(ValueError, match=r"^indices must be \[8, 2, topk\]"):
        flash_mla.flash_mla_with_kvcache(*given, indices=batch.block_table)
    with pytest.raises(ValueError, match=r"^block_table must be \[8, max_pages\]"):
        flash_mla.flash_mla_with_kvcache(batch.q, batch.kv, batch.block_table[:3], *given[3:])
    assert made == flash_mla.FlashMLASchedMeta(), "a call that was refused has filled it"
    first = flash_mla.flash_mla_with_kvcache(*given)
    batch.check_out(*first)
    plan = plan_decode(batch.seqlens_k, 16, 2)
    assert_bitwise_equal(made.num_splits, plan.first_part)
    assert_bitwise_equal(made.order, plan.order)
    planned = batch.run(out=None, plan=plan)
    held = made.num_splits
    again = flash_mla.flash_mla_with_kvcache(*given)
    assert made.num_splits is held
    for one, other, third in zip(first, again, planned, strict=True):
        assert_bitwise_equal(one, other)
        assert_bitwise_equal(one, third)
    with pytest.raises(ValueError, match=r"^num_splits must be None beside a FlashMLASchedMeta"):
        flash_mla.flash_mla_with_kvcache(*given[:6], held)
    few = (batch.q[:3], batch.kv, batch.block_table[:3], batch.seqlens_k[:3])
    with pytest.raises(ValueError, match=r"^num_splits must be \[4\], made for the 3 sequences of q"):
        flash_mla.flash_mla_with_kvcache(*few, *given[4:])


def test_public_functions_take_arguments_in_the_order_of_the_specification() -> None:
    wanted = {
        flash_mla_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k softmax_scale causal",
        flash_mla_with_kvcache: "q kv seqlens_k block_table dim_nope softmax_scale causal",
        tilelang_mla.get_splits: (
            "batch_size num_heads seqlen_q avg_seqlen_k block_size_h block_size_n streaming_info"
        ),
        tilelang_mla.plan_decode: "seqlens_k num_heads seqlen_q",
    }  # fmt: skip
    for function, names in wanted.items():
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == names.split()


def test_own_functions_are_causal_by_default_and_the_drop_in_is_not_as_in_flash_mla() -> None:
    for function, default in (
        (flash_mla_varlen_func, True), (flash_mla_with_kvcache, True), (flash_mla.flash_mla_with_kvcache, False)
    ):  # fmt: skip
        assert inspect.signature(function).parameters["causal"].default is default


# Prefill


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("sizes", [(192, 128), (128, 128), (64, 64), (96, 64), (256, 256), (32, 192)], ids=str)
def test_prefill_of_any_lengths_and_head_dims(tensors, sizes, dtype, causal) -> None:
    """Fewer, as many and more queries than keys, and sequences that lack either."""
    prefill(tensors, RAGGED, sizes=sizes, dtype=dtype, causal=causal)


@pytest.mark.parametrize("heads", [(1, 1), (8, 2), (12, 4), (6, 1), (20, 20), (128, 128)], ids=str)
def test_query_heads_share_kv_heads(tensors, heads) -> None:
    for causal in (True, False):
        prefill(tensors, [(5, 20), (40, 9), (0, 3), (66, 130)], heads=heads, causal=causal)


def test_queries_before_the_first_key_see_nothing(tensors) -> None:
    batch = prefill(tensors, [(40, 9), (7, 0)], causal=True)
    assert not bool(batch.out.tensor[:31].any())
    assert bool((batch.lse.tensor[:, :31] == -torch.inf).all())
    assert bool(batch.lse.tensor[:, 31:40].isfinite().all())
    assert bool((batch.lse.tensor[:, 40:] == -torch.inf).all())


def test_empty_batches_of_prefill(tensors) -> None:
    for lengths, rows_after in product(([], [(0, 0)], [(0, 5), (0, 0)], [(6, 0)]), (0, 3)):
        prefill(tensors, lengths, rows_after=rows_after)


def test_rows_behind_the_last_sequence_are_zero_and_read_nothing(tensors) -> None:
    for rows_after in (1, 50, 200):
        prefill(tensors, RAGGED, rows_after=rows_after)


def test_trap_nan_in_a_neighbour_s_keys_values_or_queries_stays_with_it(tensors) -> None:
    """Values behind a sequence's end are the next one's: tiles reach into them."""
    for causal in (True, False):
        prefill(tensors, [(5, 20), (17, 17), (40, 9), (1, 33), (65, 200)], of_nan=(1, 3), causal=causal)


def test_values_may_be_a_part_of_what_one_projection_makes(tensors) -> None:
    prefill(tensors, RAGGED, fused=True)


def test_a_prompt_and_the_rest_of_it_are_the_prompt(tensors) -> None:
    batch = tensors.prefill([(150, 150)])
    whole = batch.run(out=None)
    for cut in (1, 64, 100):
        cu_q, cu_k = tensors.integers(0, 150 - cut), tensors.integers(0, 150)
        rest = flash_mla_varlen_func(batch.q[cut:], batch.k, batch.v, cu_q, cu_k, 150 - cut, 150, None, True)
        torch.testing.assert_close(rest, whole.out[cut:], rtol=1e-2, atol=1e-2)


def test_bounds_on_lengths_may_be_above_them(tensors) -> None:
    batch = tensors.prefill(RAGGED)
    want = batch.run(out=None)
    for most in ((128, 200), (4096, 200), (128, 10**6)):
        got = flash_mla_varlen_func(*batch.given[:5], *most, *batch.given[7:], return_lse=True)
        for one, other in zip(got, want, strict=True):
            assert_bitwise_equal(one, other)


@given(st.data())
@settings(max_examples=20)
def test_any_batch_of_prefill(tensors, data) -> None:
    length = st.integers(0, 140)
    lengths = data.draw(st.lists(st.tuples(length, length), max_size=5))
    group, heads_kv = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    prefill(
        tensors, lengths, heads=(group * heads_kv, heads_kv), causal=data.draw(st.booleans()),
        dtype=data.draw(st.sampled_from(DTYPES)), rows_after=data.draw(st.sampled_from([0, 0, 5])),
        sizes=data.draw(st.sampled_from([(192, 128), (96, 64)])),
    )  # fmt: skip


# Absorbed and separate heads are the same attention


def test_decoding_with_absorbed_projections_is_attention_with_separate_heads(tensors) -> None:
    """The identity that latent attention rests on: q_nope (W_k c) = (q_nope W_k) c, and W_v goes behind the softmax."""
    heads, latent, rope, nope, size_v, length = 4, 64, 32, 32, 64, 50
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    w_k, w_v = make(heads, nope, latent) / 8, make(heads, size_v, latent) / 8
    cache, q_nope, q_rope = make(length, latent + rope), make(1, heads, nope), make(1, heads, rope)
    k = torch.cat(
        [torch.einsum("hnl,tl->thn", w_k, cache[:, :latent]), cache[:, None, latent:].expand(-1, heads, -1)], 2
    )
    v = torch.einsum("hvl,tl->thv", w_v, cache[:, :latent])
    scale = (nope + rope) ** -0.5
    separate = attention(torch.cat([q_nope, q_rope], 2), k, v, softmax_scale=scale, causal=True)
    q = torch.cat([torch.einsum("qhn,hnl->qhl", q_nope, w_k), q_rope], 2)[None].to(tensors.device, BF16)
    pages = poison_(torch.empty(4, 16, 1, latent + rope, dtype=BF16, device=tensors.device))
    pages.flatten(0, 1)[:length, 0] = cache.to(tensors.device, BF16)
    table = tensors.integers(0, 1, 2, 3)[None]
    got = flash_mla_with_kvcache(q, pages, tensors.integers(length), table, latent, scale, True, return_lse=True)
    out = torch.einsum("bqhl,hvl->bqhv", got.out.double().cpu(), w_v)
    torch.testing.assert_close(out[0], separate.out, rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(got.lse[0].double().cpu(), separate.lse, rtol=3e-2, atol=3e-2)
