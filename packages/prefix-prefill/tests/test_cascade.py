"""Is a cascade the attention over the keys of all its levels, one after another? By every implementation there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kernel_reference.checks import validate_values
from kernel_reference.testing.guards import assert_bitwise_equal
from prefix_prefill import CascadeLevel, PrefillPlan, cascade_attention, prefix_prefill

Tensor = torch.Tensor
FP16, FP32, E4M3 = torch.float16, torch.float32, torch.float8_e4m3fn

# Of each level the rows and the keys of its groups; of the last the new tokens are among the keys.
Cuts = Sequence[tuple[Sequence[int], Sequence[int]]]
# A prompt that all share, a document that some do, and their own; one decodes, one drafts, one has nothing new.
SERVED: Cuts = [([9], [40]), ([4, 5], [17, 3]), ([3, 1, 0, 5], [20, 33, 4, 5])]
# A shared prefix shorter than the rows that share it, and one that is empty.
SHORT: Cuts = [([6, 20], [3, 0]), ([6, 20], [6, 25])]


FEATURES: dict[str, tuple[Cuts, dict[str, Any]]] = {
    "three levels": (SERVED, {"rows_after": 3}),
    "one level": (SERVED[-1:], {"sinks": True}),
    "prefixes shorter than their groups": (SHORT, {"rows_after": 1}),
    "sinks, a cap": (SERVED, {"sinks": True, "softcap": 3.0, "page_layout": "HND"}),
    "tree drafts": (SERVED[1:], {"draft": True}),
    "8 bits in and out": (SERVED[1:], {"cache_dtype": E4M3, "k_scale": 0.25, "v_scale": 0.5, "out_scale": 0.01}),
    "x-packed, values of another size": (SERVED[1:], {"page_layout": "x-packed", "head_dim_v": 48, "dtype": FP16}),
}
every_feature = pytest.mark.parametrize(("cuts", "options"), FEATURES.values(), ids=FEATURES)


@every_feature
def test_a_cascade_is_attention_over_all_levels(tensors, cuts, options) -> None:
    batch = tensors.cascade(cuts, **options)
    for num_splits in (None, 2):
        with validate_values():
            batch.run(num_splits=num_splits)
        batch.check()


def test_a_cascade_is_the_attention_over_flat_tables_and_needs_no_lse(tensors) -> None:
    batch = tensors.cascade([([3], [32]), ([1, 2], [5, 9])], dtype=FP32)
    shared, own = batch.levels
    first, second = (level.block_table for level in batch.levels)
    whole = (torch.cat([shared.k_cache, own.k_cache]), torch.cat([shared.v_cache, own.v_cache]))
    table = torch.cat([first.expand(2, -1)[:, :4], second + len(shared.k_cache)], dim=1)
    flat = prefix_prefill(
        batch.q, None, None, *whole, table, own.cu_seqlens_q, own.seqlens_k + 32, max_seqlen_q=2, return_lse=True
    )
    out = cascade_attention(batch.q, batch.levels, max_seqlen_q=2)
    torch.testing.assert_close(out, flat.out)
    torch.testing.assert_close(batch.run().lse, flat.lse)


def portable(num_splits: int, block_m: int = 16) -> PrefillPlan:
    return PrefillPlan(block_m, 16, num_splits, 4, 1)


@every_feature
def test_the_portable_kernel_takes_every_level_in_any_number_of_pieces(tensors, cuts, options) -> None:
    batch = tensors.cascade(cuts, **options)
    batch.attend(*(portable(1 + (i + len(cuts)) % 3, 32 >> i % 2) for i in range(len(cuts))))
    batch.check()


def test_rows_share_no_bits_with_their_group_where_the_number_of_splits_is_given(tensors) -> None:
    both = tensors.cascade([([2], [40]), ([1, 1], [7, 12])])
    plans = [portable(3), portable(2)]
    both.attend(*plans)
    whole = both.out.tensor.clone()
    alone = tensors.cascade([([1], [40]), ([1], [7])])
    alone.levels = [
        level._replace(k_cache=other.k_cache, v_cache=other.v_cache, block_table=other.block_table[:1])
        for level, other in zip(alone.levels, both.levels, strict=True)
    ]
    alone.q = both.q[:1]
    alone.attend(*plans)
    assert_bitwise_equal(alone.out.tensor, whole[:1], what="a row alone")


WRONG: dict[str, tuple[type[Exception], str, Any]] = {
    "no levels": (ValueError, "levels ", lambda levels: []),
    "a single one": (TypeError, "levels ", lambda levels: levels[0]),
    "tuples": (TypeError, r"levels\[0\] ", lambda levels: [tuple(levels[0])]),
    "a list for a tensor": (TypeError, r"levels\[1\].seqlens_k ", lambda levels: changed(levels, seqlens_k=[1])),
    "a sparse tensor": (TypeError, r"levels\[1\].block_table ",
                        lambda levels: changed(levels, block_table=levels[1].block_table.to_sparse())),
    "bounds of floats": (TypeError, r"levels\[1\].cu_seqlens_q.dtype ",
                         lambda levels: changed(levels, cu_seqlens_q=levels[1].cu_seqlens_q.float())),
    "another dtype": (TypeError, r"levels\[1\].[kv]_cache.dtype ",
                      lambda levels: changed(levels, **{f"{x}_cache": levels[1].k_cache.to(E4M3) for x in "kv"})),
    "rows too many": (ValueError, r"levels\[1\].cu_seqlens_q\[2\] ",
                      lambda levels: changed(levels, cu_seqlens_q=levels[1].cu_seqlens_q + torch.tensor([0, 0, 9]))),
    "a length below 0": (ValueError, r"levels\[1\].seqlens_k\[0\] ",
                         lambda levels: changed(levels, seqlens_k=-levels[1].seqlens_k)),
    "a page past the last": (ValueError, r"levels\[1\].block_table\[0, 0\] ",
                             lambda levels: changed(levels, block_table=levels[1].block_table + 999)),
}  # fmt: skip


def changed(levels: list[CascadeLevel], **fields: Any) -> list[CascadeLevel]:
    return [levels[0], levels[1]._replace(**fields), *levels[2:]]


@pytest.mark.parametrize(("error", "name", "change"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named_with_its_level_and_nothing_is_written(tensors, error, name, change) -> None:
    batch = tensors.cascade(SERVED)
    before = batch.out.tensor.clone()
    levels = change([CascadeLevel(*(x.cpu() if x.ndim == 1 else x for x in level)) for level in batch.levels])
    if tensors.device.type != "cpu":
        pytest.skip("values are made on a CPU")
    with pytest.raises(error, match=f"^{name}.*must be "):
        cascade_attention(batch.q, levels, out=batch.out.tensor, k_scale=1.0, v_scale=1.0, max_seqlen_q=5)
    assert_bitwise_equal(batch.out.tensor, before, what="out")


def test_values_of_no_dimensions_are_named_where_the_result_is_sized_by_them(tensors) -> None:
    batch = tensors.cascade(SERVED)
    levels = [batch.levels[0]._replace(v_cache=batch.levels[0].v_cache.new_zeros(())), *batch.levels[1:]]
    with pytest.raises(ValueError, match=r"^levels\[0\].v_cache must be of 4 dimensions"):
        cascade_attention(batch.q, levels, k_scale=1.0, v_scale=1.0, max_seqlen_q=5)


def test_results_must_not_lie_in_a_level(tensors) -> None:
    batch = tensors.cascade([([2], [16]), ([2], [16])], heads=(2, 2))
    out = batch.levels[0].v_cache.flatten(0, 1)[:2]
    with pytest.raises(ValueError, match=r"^out must be a tensor that shares no memory with levels\[0\].v_cache"):
        cascade_attention(batch.q, batch.levels, out=out, max_seqlen_q=2)


def test_a_gradient_is_refused_by_name(tensors) -> None:
    batch = tensors.cascade(SERVED)
    levels = changed(batch.levels, k_cache=batch.levels[1].k_cache.float().requires_grad_().bfloat16())
    with pytest.raises(ValueError, match=r"^levels\[1\].k_cache must "):
        cascade_attention(batch.q, levels, max_seqlen_q=5)


def test_unchecked_a_group_of_an_impossible_length_has_no_keys_there_and_a_sequence_no_result(tensors) -> None:
    batch = tensors.cascade(SERVED)
    wanted = batch.wanted()
    levels = changed(batch.levels, seqlens_k=torch.tensor([10**6, 3], dtype=torch.int32, device=tensors.device))
    levels[2] = levels[2]._replace(seqlens_k=torch.tensor([20, 33, 4, 4], dtype=torch.int32, device=tensors.device))
    with validate_values(False):
        out, lse = cascade_attention(batch.q, levels, max_seqlen_q=5, return_lse=True)
    assert not out[4:].any()
    assert bool((lse[:, 4:] == -torch.inf).all())
    assert bool(out[:4].isfinite().all())
    assert not torch.allclose(out[:4].double(), wanted.out[:4], atol=0.01)
