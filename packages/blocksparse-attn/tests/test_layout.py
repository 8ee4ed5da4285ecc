"""Does a layout list what it says? Against definitions spelt out block by block, and the reference's masks."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blocksparse_attn import (
    AttentionPlan,
    BlockLayout,
    api,
    blocksparse_attention,
    blocksparse_flash_attn_varlen_fwd,
    lists,
    patterns,
)
from kernel_reference import blocks
from kernel_reference.models import PHI3_SMALL
from kernel_reference.testing.forks import run_alone
from kernel_reference.testing.guards import assert_bitwise_equal

Tensor = torch.Tensor
gpu = pytest.mark.gpu
SIZES = (16, 32, 64, 128)


def visible(i: int, j: int, head: int, num_heads: int, local: int, stride: int, homo: bool) -> bool:
    """The definition of the pattern, as it is written."""
    step = 0 if homo else max(1, stride // num_heads)
    return j <= i and (i - j < local or (j + head * step + 1) % stride == 0)


def literal(
    num_heads: int, max_seqlen: int, local: int, stride: int, block: int, homo: bool = False,
    active: tuple[int, int] | None = None, q_block: int | None = None,
) -> Tensor:  # fmt: skip
    """Block by block: a row of queries lists what any of the block rows that it meets does."""
    q_block = q_block or block
    rows, columns = -(-max_seqlen // q_block), -(-max_seqlen // block)
    low, high = (0, 1) if homo else active or (0, num_heads)
    mask = torch.zeros(high - low, rows, columns, dtype=torch.bool)
    for head in range(low, high):
        for row in range(rows):
            met = {p // block for p in range(row * q_block, (row + 1) * q_block)}
            for j in range(columns):
                mask[head - low, row, j] = any(
                    visible(i, j, head, num_heads, local, stride, homo) for i in met if i < columns
                )
    return mask


def check_lists(made: BlockLayout, mask: Tensor) -> None:
    """The lists are the reference's of this mask, to the last bit, and so is the mask that they give."""
    crow, col = blocks.mask_to_csr(mask.cpu())
    assert_bitwise_equal(made.crow.cpu(), crow, what="crow")
    assert_bitwise_equal(made.col.cpu(), col, what="col")
    assert made.columns == mask.shape[2]
    assert (made.num_heads, made.rows) == mask.shape[:2]
    assert_bitwise_equal(made.to_mask().cpu(), mask.cpu(), what="the mask")
    for tensor in (made.crow, made.col):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


def same(one: BlockLayout, other: BlockLayout) -> None:
    check_lists(one, other.to_mask())
    assert (one.q_block, one.k_block, one.device) == (other.q_block, other.k_block, other.device)


# Local and vertical blocks


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("stride", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("local", [1, 2, 5, 100])
def test_the_pattern_is_its_definition_block_by_block(device, local, stride, block) -> None:
    for num_heads, max_seqlen in ((1, 1), (3, 7 * block), (8, 12 * block + 1), (2, block), (1, 20 * block - 1)):
        made = BlockLayout.local_strided(num_heads, max_seqlen, local, stride, block, device=device)
        check_lists(made, literal(num_heads, max_seqlen, local, stride, block))
        assert (made.q_block, made.k_block) == (block, block)


@pytest.mark.parametrize(("q_block", "k_block"), [(32, 16), (128, 16), (16, 64), (64, 128), (48, 16), (16, 48)])
@pytest.mark.parametrize("max_seqlen", [1, 100, 384, 500])
def test_longer_rows_list_what_any_of_their_blocks_does_and_shorter_ones_what_theirs_does(
    device, q_block, k_block, max_seqlen
) -> None:
    for local, stride in ((1, 4), (3, 2), (2, 100)):
        made = BlockLayout.local_strided(3, max_seqlen, local, stride, k_block, device=device, q_block_size=q_block)
        check_lists(made, literal(3, max_seqlen, local, stride, k_block, q_block=q_block))
        assert (made.q_block, made.k_block) == (q_block, k_block)
        if q_block > k_block:
            merged = blocks.merge_query_blocks(
                blocks.local_strided(3, max_seqlen, local, stride, k_block), q_block // k_block
            )
            check_lists(made, merged)


@settings(max_examples=200)
@given(
    num_heads=st.integers(1, 9), rows=st.integers(1, 40), local=st.integers(1, 12), stride=st.integers(1, 50),
    homo=st.booleans(), data=st.data(),
)  # fmt: skip
def test_any_pattern_is_the_one_of_the_reference(device, num_heads, rows, local, stride, homo, data) -> None:
    low = data.draw(st.integers(0, num_heads - 1))
    active = data.draw(st.sampled_from([None, (low, data.draw(st.integers(low + 1, num_heads)))]))
    made = BlockLayout.local_strided(num_heads, 16 * rows, local, stride, 16, homo, active, device)
    check_lists(made, blocks.local_strided(num_heads, 16 * rows, local, stride, 16, homo, active))


def test_trap_a_range_of_active_heads_keeps_the_shifts_of_the_whole_model(device) -> None:
    """Ranks of a tensor-parallel model: their patterns together are those of all heads."""
    whole = BlockLayout.local_strided(8, 1000, 2, 8, 16, device=device)
    parts = [
        BlockLayout.local_strided(8, 1000, 2, 8, 16, active_head_range=(low, low + 2), device=device)
        for low in (0, 2, 4, 6)
    ]
    assert [part.num_heads for part in parts] == [2] * 4
    assert_bitwise_equal(torch.cat([part.to_mask() for part in parts]), whole.to_mask())
    # Not those of the first heads, nor of a model that has only two.
    assert not torch.equal(parts[1].to_mask(), parts[0].to_mask())
    assert not torch.equal(parts[1].to_mask(), BlockLayout.local_strided(2, 1000, 2, 8, 16, device=device).to_mask())
    for part, low in zip(parts, (0, 2, 4, 6), strict=True):
        assert_bitwise_equal(whole.heads(low, low + 2).to_mask(), part.to_mask())
        check_lists(part, literal(8, 1000, 2, 8, 16, active=(low, low + 2)))


def test_one_pattern_for_all_heads_is_listed_once_and_is_that_of_head_0(device) -> None:
    for active in (None, (3, 5)):
        made = BlockLayout.local_strided(8, 500, 2, 8, 16, True, active, device)
        assert made.num_heads == 1
        check_lists(made, literal(8, 500, 2, 8, 16, homo=True))
        assert_bitwise_equal(made.to_mask()[0], BlockLayout.local_strided(8, 500, 2, 8, 16, device=device).to_mask()[0])


def test_a_vertical_stride_of_1_is_dense(device) -> None:
    made = BlockLayout.local_strided(3, 300, 1, 1, 16, device=device)
    check_lists(made, torch.ones(19, 19).tril().bool().expand(3, -1, -1))
    assert made.density() == 1.0


def test_heads_shift_by_one_block_where_there_are_more_of_them_than_the_stride(device) -> None:
    """Without the 1, all heads of Phi-3-small would have the pattern of head 0."""
    mask = BlockLayout.local_strided(32, 64 * 40, 1, 8, 64, device=device).to_mask()
    assert_bitwise_equal(mask[8], mask[0])
    assert len({tuple(head.flatten().tolist()) for head in mask.cpu()}) == 8


def test_patterns_wider_than_any_sequence_are_dense_or_without_vertical_blocks(device) -> None:
    made = BlockLayout.local_strided(2, 300, 2**70, 5, 16, device=device)
    check_lists(made, torch.ones(19, 19).tril().bool().expand(2, -1, -1))
    made = BlockLayout.local_strided(2, 300, 1, 2**31 - 1, 16, device=device)
    check_lists(made, torch.eye(19).bool().expand(2, -1, -1))


def test_sliding_lists_the_last_blocks(device) -> None:
    for window, max_seqlen in ((1, 100), (3, 333), (50, 200)):
        rows = -(-max_seqlen // 16)
        difference = torch.arange(rows)[:, None] - torch.arange(rows)
        made = BlockLayout.sliding(max_seqlen, window, 16, device)
        check_lists(made, ((difference >= 0) & (difference < window))[None])


def test_the_pattern_of_a_model_at_its_longest_is_the_definition_in_rows_checked_one_by_one(device) -> None:
    model, max_seqlen = PHI3_SMALL, 131072
    made = BlockLayout.local_strided(
        model.num_heads_q, max_seqlen, model.local_blocks, model.vert_stride, model.block_size, device=device
    )
    assert made.rows == made.columns == 2048
    assert made.col.shape[1] == int(made.crow[:, -1].max())
    crow, generator = made.crow.cpu(), torch.Generator().manual_seed(1)
    for head in range(model.num_heads_q):
        some = torch.randint(2048, (4,), generator=generator).tolist()
        for row in (0, 15, 16, 17, 2047, *some):
            wanted = [
                j for j in range(row + 1)
                if visible(row, j, head, model.num_heads_q, model.local_blocks, model.vert_stride, False)
            ]  # fmt: skip
            assert made.col[head, int(crow[head, row]) : int(crow[head, row + 1])].tolist() == wanted
        assert bool((made.col[head, int(crow[head, -1]) :] == -1).all())


class Counted(TorchDispatchMode):
    """Operations of torch, which on a GPU are launches, and the elements of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.elements = 0

    def __torch_dispatch__(self, op: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        result = op(*given, **(named or {}))
        self.operations += 1
        self.elements += sum(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        return result


def test_a_pattern_of_any_length_is_built_in_as_many_operations_that_make_a_few_times_its_lists(device) -> None:
    """On a GPU it is there within 50 ms: no walk over rows or heads, and no mask of all blocks."""
    model, counts = PHI3_SMALL, set()
    # Lengths of no other test, since the last few patterns are cached.
    for max_seqlen in (16384 - 64, 131072 - 64):
        with Counted() as counted:
            made = BlockLayout.local_strided(
                model.num_heads_q, max_seqlen, model.local_blocks, model.vert_stride, model.block_size, device=device
            )
        counts.add(counted.operations)
        assert counted.elements <= 10 * (made.col.numel() + made.crow.numel())
    assert len(counts) == 1
    assert max(counts) <= 120


@gpu
def test_the_pattern_of_a_million_tokens_takes_no_more_memory_than_twice_its_lists() -> None:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = BlockLayout.local_strided(32, 2**20, 16, 8, 64, device="cuda")
    size = 4 * (made.col.numel() + made.crow.numel())
    assert torch.cuda.max_memory_allocated() - before <= 2 * size + 2**24
    last = made.col[31, int(made.crow[31, -2]) : int(made.crow[31, -1])].tolist()
    assert last == [j for j in range(16384) if visible(16383, j, 31, 32, 16, 8, False)]


# Masks and lists


def test_a_mask_of_any_rows_round_trips_through_lists(device, tensors) -> None:
    for heads, rows, columns in ((1, 1, 1), (3, 7, 5), (2, 20, 20), (5, 0, 0), (1, 4, 0)):
        mask = tensors.random_mask(heads, rows, columns)
        check_lists(BlockLayout.from_mask(mask.to(device), 16, 16), mask)
    none = torch.zeros(2, 4, 4, dtype=torch.bool)
    check_lists(BlockLayout.from_mask(none.to(device), 32, 32), none)


@given(data=st.data())
def test_any_mask_round_trips_through_lists_and_has_the_density_of_the_reference(device, tensors, data) -> None:
    q_block, k_block = data.draw(st.sampled_from(SIZES)), data.draw(st.sampled_from(SIZES))
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    rows = data.draw(st.integers(0, 12))
    columns = data.draw(st.integers(0, min(20, -(-rows * q_block // k_block))))
    mask = tensors.random_mask(data.draw(st.integers(1, 4)), rows, columns)
    made = BlockLayout.from_mask(mask.to(device), q_block, k_block)
    check_lists(made, mask)
    # The reference's is of float32.
    assert made.density() == pytest.approx(blocks.density(mask, q_block, k_block), rel=1e-6)
    assert 0 <= made.density() <= 1
    again = BlockLayout.from_csr(made.crow, made.col, q_block, k_block, columns=columns)
    same(again, made)


def test_masks_of_any_strides_are_taken(device, tensors) -> None:
    mask = tensors.random_mask(4, 6, 6)
    turned = mask.permute(2, 1, 0).contiguous().to(device).permute(2, 1, 0)
    assert not turned.is_contiguous()
    check_lists(BlockLayout.from_mask(turned, 16, 16), mask)
    check_lists(BlockLayout.from_mask(mask[:1].to(device).expand(3, -1, -1), 16, 16), mask[:1].expand(3, -1, -1))


def test_given_lists_are_not_copied_and_entries_past_them_are_not_read(device) -> None:
    crow = torch.tensor([[0, 1, 1, 3], [0, 0, 2, 2]], dtype=torch.int32, device=device)
    col = torch.tensor([[0, 1, 2, 7], [0, 1, -5, 2**30]], dtype=torch.int32, device=device)
    made = BlockLayout.from_csr(crow, col, 16, 16)
    assert made.crow is crow
    assert made.col is col
    assert made.columns == 3
    wanted = torch.tensor([[[1, 0, 0], [0, 0, 0], [0, 1, 1]], [[0, 0, 0], [1, 1, 0], [0, 0, 0]]]).bool()
    assert_bitwise_equal(made.to_mask().cpu(), wanted)
    long = BlockLayout.from_csr(crow.long(), col.long(), 16, 16, columns=3)
    assert long.crow.dtype == long.col.dtype == torch.int32
    assert_bitwise_equal(long.to_mask().cpu(), wanted)
    # A layout is no better for being wider than it must.
    assert long.density() == made.density() == BlockLayout.from_mask(wanted.to(device), 16, 16).density()


def dense_to_crow_col(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As vLLM's function of that name (vllm/attention/ops/blocksparse_attention/utils.py at fc10a0496cfd) returns them.

    int64 (int32 in releases that took SciPy for it), padded with -1; of a mask [rows, columns], lists without heads.
    """
    heads = [head.to_sparse_csr() for head in (mask[None] if mask.ndim == 2 else mask).float()]
    width = max(head.col_indices().numel() for head in heads)
    crow = torch.vstack([head.crow_indices() for head in heads])
    col = [head.col_indices() for head in heads]
    col = torch.vstack([torch.cat([own, own.new_full((width - len(own),), -1)]) for own in col])
    return (crow[0], col[0]) if mask.ndim == 2 else (crow, col)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("heads", [1, 4])
def test_lists_as_vllm_makes_them_are_taken_wherever_lists_are(device, heads, dtype) -> None:
    """Of one pattern for all heads there is no dimension for those."""
    mask = blocks.local_strided(4, 512, 2, 4, 64)[:heads].to(device)
    crow, col = (x.to(dtype) for x in dense_to_crow_col(mask if heads > 1 else mask[0]))
    assert crow.ndim == col.ndim == (2 if heads > 1 else 1)
    q, k, v = torch.randn(3, 512, 4, 16, device=device)
    cu = torch.tensor([0, 500], device=device)
    want = blocksparse_flash_attn_varlen_fwd(q, k, v, cu, cu, None, BlockLayout.from_mask(mask, 64, 64))
    assert want[:500].any(2).all()
    for pair in (
        (crow, col), BlockLayout(crow, col, 64, 64, 8), BlockLayout.from_csr(crow, col, 64, 64),
        # As it expands one pattern to all heads.
        (crow.expand(4, -1), col.expand(4, -1)),
    ):  # fmt: skip
        if isinstance(pair, BlockLayout):
            assert pair.crow.dtype == pair.col.dtype == torch.int32
            assert torch.equal(pair.to_mask(), mask)
        assert_bitwise_equal(blocksparse_flash_attn_varlen_fwd(q, k, v, cu, cu, None, pair), want)


def test_columns_default_to_those_that_the_rows_reach(device) -> None:
    for rows, q_block, k_block, wanted in (
        (4, 16, 16, 4),
        (4, 16, 64, 1),
        (5, 16, 64, 2),
        (3, 64, 16, 12),
        (0, 16, 16, 0),
    ):
        crow = torch.zeros(1, rows + 1, dtype=torch.int32, device=device)
        made = BlockLayout.from_csr(crow, crow[:, :0], q_block, k_block)
        assert made.columns == wanted
        assert made.density() == 0


@given(data=st.data())
def test_a_union_lists_what_either_does(device, tensors, data) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    heads = data.draw(st.integers(1, 3))
    masks = []
    for count in data.draw(st.permutations([heads, data.draw(st.sampled_from([1, heads]))])):
        rows = data.draw(st.integers(0, 7))
        masks.append(tensors.random_mask(count, rows, data.draw(st.integers(0, 2 * rows))))
    one, other = (BlockLayout.from_mask(mask.to(device), 32, 16) for mask in masks)
    wanted = torch.zeros(heads, *(max(mask.shape[dim] for mask in masks) for dim in (1, 2)), dtype=torch.bool)
    for mask in masks:
        wanted[:, : mask.shape[1], : mask.shape[2]] |= mask
    check_lists(one.union(other), wanted)
    same(one.union(one), one)


def test_a_pattern_is_the_union_of_its_local_and_its_vertical_blocks(device) -> None:
    whole = BlockLayout.local_strided(4, 1000, 3, 5, 16, device=device)
    vertical = BlockLayout.local_strided(4, 1000, 1, 5, 16, device=device)
    same(BlockLayout.sliding(1000, 3, 16, device).union(vertical), whole)


def test_heads_of_a_layout_are_those_asked_for(device, tensors) -> None:
    mask = tensors.random_mask(6, 5, 5)
    made = BlockLayout.from_mask(mask.to(device), 16, 16)
    for lo, hi in ((0, 6), (2, 3), (3, 6)):
        assert_bitwise_equal(made.heads(lo, hi).to_mask().cpu(), mask[lo:hi])
        assert made.heads(lo, hi).density() == pytest.approx(blocks.density(mask[lo:hi], 16, 16), rel=1e-6)
    one = BlockLayout.from_mask(mask[:1].to(device), 16, 16)
    assert one.heads(3, 7) is one


def test_a_layout_moves_to_a_device_or_is_returned_if_it_is_there(device) -> None:
    made = BlockLayout.sliding(100, 2, 16, device)
    assert made.to(device) is made
    elsewhere = made.to("meta")
    assert elsewhere.device.type == elsewhere.col.device.type == "meta"
    assert elsewhere.crow.shape == made.crow.shape


# What a layout is


def test_a_layout_cannot_be_changed_and_equals_itself_alone(device) -> None:
    one, other = (BlockLayout.from_mask(torch.ones(1, 2, 2, dtype=torch.bool, device=device), 16, 16) for _ in range(2))
    assert one != other
    assert len({one, other, one}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.q_block = 32  # type: ignore[misc]
    for twin in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        same(twin, one)


def test_the_repr_of_a_layout_leaves_out_its_lists(device) -> None:
    made = BlockLayout.local_strided(4, 1000, 2, 4, 16, device=device, q_block_size=32)
    wanted = f"BlockLayout(num_heads=4, rows=32, columns=63, q_block=32, k_block=16, device='{made.device}')"
    assert repr(made) == wanted


def test_the_same_arguments_give_the_same_layout_object(device) -> None:
    made = BlockLayout.local_strided(4, 1000, 2, 4, 16, device=device)
    named = {"num_heads": 4, "max_seqlen": 1000, "local_blocks": 2, "vert_stride": 4, "block_size": 16}
    assert BlockLayout.local_strided(**named, device=str(device), q_block_size=16, active_head_range=(0, 4)) is made
    others = [
        {"num_heads": 5}, {"max_seqlen": 1001 + 16}, {"local_blocks": 3}, {"vert_stride": 5}, {"block_size": 32},
        {"homo_head": True}, {"active_head_range": (0, 3)}, {"active_head_range": (1, 4)}, {"q_block_size": 32},
    ]  # fmt: skip
    for other in others:
        changed = BlockLayout.local_strided(**{**named, **other}, device=device)
        assert changed is not made
        assert not torch.equal(changed.crow, made.crow) or not torch.equal(changed.col, made.col), other
    assert BlockLayout.sliding(1000, 2, 16, device) is BlockLayout.sliding(1000, 2, 16, device)


def test_the_cache_evicts_the_least_recently_used_layout(device) -> None:
    first = BlockLayout.sliding(10000, 1, 16, device)
    for window in range(2, patterns._MOST_KEPT + 1):
        BlockLayout.sliding(10000, window, 16, device)
    assert BlockLayout.sliding(10000, 1, 16, device) is first
    for window in range(2, 3 * patterns._MOST_KEPT):
        BlockLayout.sliding(20000, window, 16, device)
        assert len(patterns._layouts) <= patterns._MOST_KEPT
    # Somebody holds it.
    assert BlockLayout.sliding(10000, 1, 16, device) is first
    gone = weakref.ref(first)
    del first
    for window in range(2, 3 * patterns._MOST_KEPT):
        BlockLayout.sliding(20000, window, 16, device)
    gc.collect()
    assert gone() is None


@pytest.fixture
def usual_limit() -> Iterator[None]:
    yield
    BlockLayout.set_cache_limit(patterns._MOST_BYTES)


@pytest.mark.usefixtures("usual_limit")
def test_the_cache_holds_as_many_bytes_as_it_may_and_no_more(device) -> None:
    BlockLayout.clear_cache()
    one = BlockLayout.sliding(30000, 1, 16, device)
    assert one.num_bytes == 4 * (one.crow.numel() + one.col.numel())
    BlockLayout.set_cache_limit(5 * one.num_bytes)
    for window in range(1, 5):
        # Each as large as so many of the first.
        BlockLayout.sliding(30000, window, 16, device)
        held = sum(layout.num_bytes for layout in patterns._layouts.values())
        assert 0 < held <= 5 * one.num_bytes
    BlockLayout.set_cache_limit(0)
    assert not patterns._layouts
    assert BlockLayout.sliding(30000, 1, 16, device) is one
    assert not patterns._layouts
    for wrong, kind in ((-1, ValueError), (1.5, TypeError)):
        with pytest.raises(kind, match="num_bytes"):
            BlockLayout.set_cache_limit(wrong)


def test_a_cleared_cache_keeps_no_layout_alive(device) -> None:
    held = weakref.ref(BlockLayout.local_strided(4, 3000, 2, 4, 16, device=device))
    assert held() is not None
    BlockLayout.clear_cache()
    gc.collect()
    assert held() is None


def test_layouts_are_built_on_the_default_device_where_none_is_said(device) -> None:
    with torch.device("meta"):
        made = BlockLayout.local_strided(4, 1000, 2, 4, 16)
        assert made.col.is_meta
        assert BlockLayout.sliding(1000, 2, 16, device).device.type == device.type
    assert BlockLayout.local_strided(4, 1000, 2, 4, 16).device.type == "cpu"
    assert made.col.shape == BlockLayout.local_strided(4, 1000, 2, 4, 16).col.shape


def test_a_layout_built_in_inference_mode_serves_outside_it(device) -> None:
    with torch.inference_mode():
        made = BlockLayout.sliding(777, 3, 16, device)
    assert not made.col.is_inference()


@pytest.mark.usefixtures("unchecked")
def test_lists_of_any_content_list_what_is_there() -> None:
    """Columns in any order, twice, or out of bounds; rows of impossible bounds."""
    crow = torch.tensor([[0, 3, 2, 5, 99, 6], [-1, 1, 3, 3, 6, 2**31 - 1]], dtype=torch.int32)
    col = torch.tensor([[2, 0, 2, 5, -1, 1], [0, 1, 3, 2**31 - 1, -(2**31), 2]], dtype=torch.int32)
    got = lists.block_mask(crow, col, 5, 4)
    assert_bitwise_equal(got, blocks.csr_to_mask(crow, col, 4))
    assert_bitwise_equal(lists.block_mask(crow, col, 3, 2), got[:, :3, :2])


# Pictures


def test_a_picture_shows_one_head_and_is_saved_where_asked(device, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = BlockLayout.local_strided(4, 1000, 2, 4, 32, device=device)
    for name in ("pattern.svg", "pattern.png"):
        figure = made.plot(tmp_path / name, 3)
        assert (tmp_path / name).stat().st_size > 1000
    shown = figure.axes[0].images[0].get_array()
    assert torch.equal(torch.from_numpy(shown.data.astype(bool)), made.to_mask()[3].cpu())
    assert figure.axes[0].get_title() == f"head 3, density {made.heads(3, 4).density():.3f}"
    part = made.plot(max_seqlen=300, title="The first tokens").axes[0]
    assert part.images[0].get_array().shape == (10, 10)
    assert part.get_xlim() == (0, 300)
    assert part.get_ylim() == (300, 0)
    assert part.get_title() == "The first tokens"


def test_a_picture_without_matplotlib_says_how_to_get_it_and_nothing_else_needs_it() -> None:
    script = """
        import sys
        sys.modules["matplotlib"] = None
        from blocksparse_attn import BlockLayout
        made = BlockLayout.sliding(100, 2, 16)
        try:
            made.plot()
        except ModuleNotFoundError as error:
            assert "pip install blocksparse-attn[plot]" in str(error), error
        else:
            raise AssertionError("no error")
        """
    run_alone(script)


def test_rows_of_lists_never_fall_and_columns_in_them_increase(device) -> None:
    made = BlockLayout.local_strided(3, 2000, 3, 7, 16, device=device, q_block_size=64)
    for bounds, listed in zip(made.crow.tolist(), made.col.tolist(), strict=True):
        assert bounds[0] == 0
        for begin, end in pairwise(bounds):
            assert begin <= end
            assert listed[begin:end] == sorted(set(listed[begin:end]))


def test_layouts_say_whether_rows_that_follow_one_another_list_different_blocks(device, monkeypatch) -> None:
    pattern = torch.ones(2, 8, 8, dtype=torch.bool, device=device).tril()
    apart = torch.eye(8, dtype=torch.bool, device=device)[None].expand(2, 8, 8)
    alike, scattered = (BlockLayout.from_mask(mask, 64, 64) for mask in (pattern, apart))
    assert not alike.scattered
    assert not BlockLayout.local_strided(2, 512, 2, 4, 64, device=device).scattered
    others = scattered.heads(0, 1), scattered.to("cpu"), alike.union(scattered)
    chosen = BlockLayout.from_scores(torch.rand(2, 8, 8, device=device), 2, q_block=64, k_block=64)
    assert all(one.scattered for one in (scattered, *others, chosen))
    assert BlockLayout.from_mask(pattern, 64, 64, capacity=64).scattered
    # The plan is told; one that is given is a list, as torch passes it.
    told = []
    monkeypatch.setattr(api, "_call", lambda _, numbers, *__, **___: told.append(numbers[-2:]) or (None, None))
    q = torch.randn(70, 2, 64, device=device)
    cu = torch.tensor([0, 70], device=device)
    for layout in (alike, scattered):
        blocksparse_attention(q, q, q, layout, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=70)
        blocksparse_flash_attn_varlen_fwd(q, q, q, cu, cu, None, layout)
    assert told == [(False, None)] * 2 + [(True, None)] * 2
    blocksparse_attention(
        q, q, q, scattered, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=70, plan=AttentionPlan(16, 16, 1, 4, 1)
    )
    assert type(told[-1][1]) is list
    # So is the forward pass of gradients.
    monkeypatch.setattr(api.gradients, "attention", lambda *given: told.append(given[-2:]) or given[:2])
    for layout in (alike, scattered):
        x = q.requires_grad_()
        blocksparse_attention(x, x, x, layout, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=70)
    assert told[-2:] == [(False, None), (True, None)]
