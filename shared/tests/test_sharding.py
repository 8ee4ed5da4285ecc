"""Does every token of a sequence have one owner, and do the counts on the device agree with the positions?"""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_reference.paging import cumulative
from kernel_reference.sharding import Contiguous, Interleave, Layout, ZigZag, shard, unshard

# None, fewer than a world, on and beside the cuts of every layout, and many turns.
LENGTHS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000]
WORLDS = [1, 2, 3, 4, 8]


def layouts(world: int) -> list[Layout]:
    """Of rank 0; sizes of one token, an odd run, and a page."""
    return [*(Interleave(world, 0, size) for size in (1, 3, 16, 64)), Contiguous(world, 0), ZigZag(world, 0)]


each_layout = pytest.mark.parametrize(
    "layout", [one for world in WORLDS for one in layouts(world)], ids=lambda one: repr(one).replace(" ", "")
)


@each_layout
def test_every_token_has_one_owner_who_has_them_in_ascending_order(layout: Layout) -> None:
    for n in LENGTHS:
        owned = [layout.at(rank).tokens(n).tolist() for rank in range(layout.world)]
        assert all(before < after for own in owned for before, after in pairwise(own))
        assert sorted(chain(*owned)) == [*range(n)]


@each_layout
def test_counts_are_those_of_the_positions(layout: Layout) -> None:
    n = torch.tensor(LENGTHS)
    for rank in range(layout.world):
        one = layout.at(rank)
        assert one.visible(n).tolist() == [len(one.tokens(length)) for length in LENGTHS]
        for whole in (5, 65, 129):
            until = torch.tensor([length for length in LENGTHS if length <= whole])
            wanted = [int((one.tokens(whole) < length).sum()) for length in until.tolist()]
            assert one.visible(until, torch.full_like(until, whole)).tolist() == wanted


@each_layout
def test_no_rank_has_more_tokens_than_are_allocated(layout: Layout) -> None:
    for lengths in ([0], [1, 1, 1], [5], [17, 0, 3], [64, 64], [1000, 1, 63]):
        most = layout.most_tokens(sum(lengths), len(lengths))
        held = [sum(len(layout.at(rank).tokens(n)) for n in lengths) for rank in range(layout.world)]
        assert max(held) <= most <= sum(lengths)


@pytest.mark.parametrize("size", [1, 16])
def test_an_interleaved_cache_grows_at_its_end_alone(size: int) -> None:
    layout = Interleave(4, 2, size)
    for n in range(0, 300, 7):
        before, after = layout.tokens(n).tolist(), layout.tokens(n + 9).tolist()
        assert after[: len(before)] == before


def test_runs_of_contiguous_shards_are_those_of_torch_chunk() -> None:
    # DTensor's Shard cuts as torch.chunk does.
    assert Contiguous(4, 3).begins(torch.tensor([0, 5, 7, 16])).tolist() == [0, 5, 6, 12]
    for n in LENGTHS[1:]:
        chunks = [chunk.tolist() for chunk in torch.arange(n).chunk(4)]
        assert [Contiguous(4, rank).tokens(n).tolist() for rank in range(len(chunks))] == chunks


def test_causal_work_of_zigzag_shards_is_nearly_equal() -> None:
    work = [int((ZigZag(4, rank).tokens(4096) + 1).sum()) for rank in range(4)]
    assert max(work) == min(work)
    assert max(int((Contiguous(4, rank).tokens(4096) + 1).sum()) for rank in range(4)) > 1.7 * work[0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts_have_the_shape_and_dtype_of_the_lengths_and_none_is_below_zero(dtype: torch.dtype) -> None:
    lengths = torch.tensor([[-5, 0, 9], [17, 2**31 - 1, -(2**31)]], dtype=dtype)
    for layout in layouts(4):
        counts = layout.visible(lengths)
        assert counts.dtype == dtype
        assert counts.shape == lengths.shape
        assert int(counts.min()) >= 0


@each_layout
def test_shards_come_together_again(layout: Layout) -> None:
    cu_seqlens = cumulative(torch.tensor([1, 0, 37, 64]))
    tokens = torch.randn(int(cu_seqlens[-1]) + 3, 2, 5)
    shards = [shard(tokens, layout.at(rank), cu_seqlens) for rank in range(layout.world)]
    for rank, own in enumerate(shards):
        assert own.cu_seqlens.tolist() == cumulative(layout.at(rank).visible(cu_seqlens.diff())).tolist()
    # Rows behind a shard's last token, of a tensor that all ranks allocate alike, belong to nobody.
    padded = [torch.cat([own.tokens, torch.full((2, 2, 5), torch.nan)]) for own in shards]
    assert torch.equal(unshard(padded, layout, cu_seqlens), tokens[: int(cu_seqlens[-1])])


def test_wrong_layouts_and_shards_are_named() -> None:
    with pytest.raises(ValueError, match=r"^rank must be from 0 to 3, got 4$"):
        ZigZag(4, 4)
    with pytest.raises(ValueError, match=r"^world must be at least 1, got 0$"):
        Contiguous(0, 0)
    with pytest.raises(ValueError, match=r"^size must be at least 1, got 0$"):
        Interleave(2, 0, 0)
    with pytest.raises(TypeError, match=r"^lengths must be an int32 or int64 tensor, got "):
        Interleave(2, 0).visible(7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^layout must be an Interleave, a Contiguous or a ZigZag, got "):
        shard(torch.zeros(3), Layout(2, 0), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match=r"^shards must be 2, one a rank, got 1$"):
        unshard([torch.zeros(3)], Contiguous(2, 0), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match=r"^shards\[1\] must be of at least 1 rows, got 0$"):
        unshard([torch.zeros(3), torch.zeros(0)], Contiguous(2, 0), torch.tensor([0, 3]))


class NothingIsRead(TorchDispatchMode):
    """Fails where a value comes back to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func)
        return func(*args, **(kwargs or {}))


def test_counts_read_nothing_back_from_the_device() -> None:
    lengths = torch.tensor([[3, 70], [1, 0]])
    with NothingIsRead():
        assert [layout.visible(lengths).shape for layout in layouts(4)] == [(2, 2)] * 6
    with pytest.raises(AssertionError), NothingIsRead():
        Contiguous(4, 0).tokens(int(lengths.max()))
