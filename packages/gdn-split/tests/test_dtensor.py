"""DTensors: are calls on shards those of one process, and do they send nothing?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

# Torch imports it under a dispatch mode: once here, and not in every fork for seconds.
import torch._dynamo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import gdn_split
from gdn_split import fused_qkvzba_split_reshape_cat, merge_qkvzba, split_conv1d_update, split_views
from gdn_split.dtensor import placements, sharded
from gdn_split.parallel import head_shard, shard_views
from kernel_reference.testing.distributed import run

Tensor = torch.Tensor
SIZES = (4, 8, 16, 16)
QKV, TOKENS, SLOTS = 2 * 4 * 16 + 8 * 16, 6, 9


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def fused() -> tuple[Tensor, Tensor]:
    return normal(TOKENS, QKV + 8 * 16), normal(TOKENS, 16)


def shares(mesh: Any, dim: int, *tensors: Tensor) -> list[Any]:
    return [distribute_tensor(x, mesh, [Shard(dim)]) for x in tensors]


def in_order_of_ranks(x: Tensor, dim: int, world: int = 2) -> Tensor:
    """Channels of q, k and v as ranks have them."""
    shards = [head_shard(*SIZES, world=world, rank=rank) for rank in range(world)]
    return torch.cat([view for shard in shards for view in shard_views(x, shard.qkv, dim)], dim)


def by_tokens(rank: int) -> None:
    """The functions themselves, and their gradients, on DTensors."""
    mesh = init_device_mesh("cpu", (2,))
    leaves = [x.requires_grad_() for x in fused()]
    wanted = fused_qkvzba_split_reshape_cat(*leaves, *SIZES)
    sum(part.sin().sum() for part in wanted).backward()
    own = [x.detach().requires_grad_() for x in shares(mesh, 0, *fused())]
    with CommDebugMode() as counted:
        got = fused_qkvzba_split_reshape_cat(*own, *SIZES)
        sum(part.to_local().sin().sum() for part in got).backward()
        merged = merge_qkvzba(*got, *SIZES)
        views = sharded("split_views", mesh)(*own, *SIZES)
    assert counted.get_total_counts() == 0
    for one, other in zip(got, wanted, strict=True):
        assert one.placements == (Shard(0),)
        assert torch.equal(one.full_tensor(), other)
    for one, leaf, back in zip(own, leaves, merged, strict=True):
        assert torch.equal(one.grad.full_tensor(), leaf.grad)
        assert torch.equal(back.full_tensor(), leaf)
    for one, other in zip(views, split_views(*fused(), *SIZES), strict=True):
        assert torch.equal(one.full_tensor(), other)


def by_heads(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    qkvz, ba = fused()
    own = shares(mesh, 1, qkvz, ba)
    wanted = fused_qkvzba_split_reshape_cat(qkvz, ba, *SIZES)
    got = sharded("fused_qkvzba_split_reshape_cat", mesh, "heads")(*own, *SIZES)
    assert torch.equal(got.mixed_qkv.full_tensor(), in_order_of_ranks(wanted.mixed_qkv, 1))
    for one, other in zip(got[1:], wanted[1:], strict=True):
        assert torch.equal(one.full_tensor(), other)
    back = sharded("merge_qkvzba", mesh, "heads")(*got, *SIZES)
    for one, other in zip(back, (qkvz, ba), strict=True):
        assert torch.equal(one.full_tensor(), other)
    state, weight, bias = normal(SLOTS, QKV, 3), normal(QKV, 4), normal(QKV)
    slots = torch.tensor([3, 0, -1, 7, 5, 1])
    ranked = [in_order_of_ranks(x, dim) for x, dim in ((state, 1), (weight, 0), (bias, 0))]
    convolution = [distribute_tensor(x, mesh, [Shard(dim)]) for x, dim in zip(ranked, (1, 0, 0), strict=True)]
    got = sharded("split_conv1d_update", mesh, "heads")(
        *own, *convolution, slots, num_heads_qk=4, num_heads_v=8, head_qk=16, head_v=16
    )
    wanted = split_conv1d_update(qkvz, ba, state, weight, bias, slots, *SIZES)
    torch.testing.assert_close(got.mixed_qkv.full_tensor(), in_order_of_ranks(wanted.mixed_qkv, 1))
    assert torch.equal(convolution[0].full_tensor(), in_order_of_ranks(state, 1))
    with pytest.raises(ValueError, match=r"^num_heads_qk must be a multiple of the mesh's 2 ranks, got 3"):
        sharded("merge_qkvzba", mesh, "heads")(*got, 3, 6, 16, 16)
    with pytest.raises(ValueError, match=r'^layout must be "interleaved" where heads are shared'):
        sharded("merge_qkvzba", mesh, "heads")(*got, *SIZES, layout="contiguous")
    with pytest.raises(ValueError, match=r'^by must be one of "heads" for split_conv1d_update'):
        placements("split_conv1d_update")


def layer_by_heads(rank: int) -> None:
    """What a layer does with its states, and the inputs of its prefill."""
    mesh = init_device_mesh("cpu", (2,))
    gates, norm, slots = (normal(8) - 2, normal(8)), normal(16), torch.tensor([3, 0])
    whole = (*fused(), normal(SLOTS, QKV, 3), normal(QKV, 4), normal(QKV), normal(SLOTS, 8, 16, 16), *gates)
    dims = (1, 1, 1, 0, 0, 1, 0, 0)
    ranked = [in_order_of_ranks(x, dim) if QKV in x.shape else x for x, dim in zip(whole, dims, strict=True)]
    own = [distribute_tensor(x.clone(), mesh, [Shard(dim)]) for x, dim in zip(ranked, dims, strict=True)]
    one, shared = ((*t[:6], slots, *t[6:]) for t in ([x.clone() for x in whole], own))
    options = {"tokens_per_sequence": 3, "norm_weight": norm}
    wanted = gdn_split.gdn_verify(*one, *SIZES, **options)
    got = sharded("gdn_verify", mesh, "heads")(*shared, *SIZES, **options)
    torch.testing.assert_close(got.full_tensor(), wanted)
    accepted = torch.tensor([2, 1])
    gdn_split.gdn_commit(*one, accepted, *SIZES, tokens_per_sequence=3)
    sharded("gdn_commit", mesh, "heads")(*shared, accepted, *SIZES, tokens_per_sequence=3)
    wanted = gdn_split.gdn_decode_step(*one, *SIZES, **options)
    got = sharded("gdn_decode_step", mesh, "heads")(*shared, *SIZES, **options)
    torch.testing.assert_close(got.full_tensor(), wanted)
    torch.testing.assert_close(shared[5].full_tensor(), one[5])
    torch.testing.assert_close(shared[2].full_tensor(), in_order_of_ranks(one[2], 1))
    bounds = torch.tensor([0, 2, 6])
    packed = [(*t[:2], *t[3:5], bounds, *t[7:]) for t in (one, shared)]
    states = [{"conv_state": t[2], "slots": slots, "chunk_size": 4} for t in (one, shared)]
    wanted = gdn_split.gdn_prefill_inputs(*packed[0], *SIZES, **states[0])
    got = sharded("gdn_prefill_inputs", mesh, "heads")(*packed[1], *SIZES, **states[1])
    for part, whole_part in zip(got, wanted, strict=True):
        torch.testing.assert_close(part.full_tensor(), whole_part)
    replicated = distribute_tensor(whole[5], mesh)
    with pytest.raises(ValueError, match=r"^state_pool must be placed as .*, as it is written in place"):
        sharded("gdn_decode_step", mesh, "heads")(*shared[:5], replicated, *shared[6:], *SIZES, **options)


@pytest.mark.parametrize("check", [by_tokens, by_heads, layer_by_heads], ids=lambda check: check.__name__)
def test_two_ranks_give_what_one_does(check) -> None:
    run(2, check)
