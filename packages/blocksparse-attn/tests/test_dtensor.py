"""DTensors: are calls on shards those of one process, and do they send nothing?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

# Torch imports it under a dispatch mode: once here, and not in every fork for seconds.
import torch._dynamo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication

from blocksparse_attn import BlockLayout, blocksparse_attention, select_blocks, selected_attention
from blocksparse_attn.dtensor import placements, sharded
from kernel_reference.testing.distributed import run

Tensor = torch.Tensor


def share(mesh: Any, x: Tensor, dim: int) -> Any:
    return distribute_tensor(x, mesh, [Shard(dim)])


def check_gradients(mesh: Any, call: Callable[..., Any], given: dict[str, tuple[Tensor, int]]) -> None:
    """Those of a call by the rules of its ops, in which plain tensors are replicated; ``given``: tensors and what is
    shared of them."""

    def gradients(leaves: list[Any], local: Callable[[Any], Tensor]) -> tuple[Any, ...]:
        results = call(**dict(zip(given, leaves, strict=True)))
        return torch.autograd.grad(sum(local(x).square().sum() for x in results), leaves)

    wanted = gradients([x.detach().requires_grad_() for x, _ in given.values()], lambda x: x)
    shards = [share(mesh, x, dim).requires_grad_() for x, dim in given.values()]
    with CommDebugMode() as counted, implicit_replication():
        found = gradients(shards, lambda x: x.to_local())
    assert counted.get_total_counts() == 0
    for one, other, shard in zip(found, wanted, shards, strict=True):
        assert one.placements == shard.placements
        torch.testing.assert_close(one.full_tensor(), other)


def by_heads(rank: int) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    # Ranks whose lists differ.
    layout = BlockLayout.local_strided(4, 128, 1, 4, 16)
    cu = torch.tensor([0, 20, 128]).int()
    ragged = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 108}
    for shape, dim, options in (((128, 4, 32), 1, ragged), ((2, 128, 4, 32), 2, {})):
        q, k, v = torch.randn(3, *shape)
        wanted = blocksparse_attention(q, k, v, layout, return_lse=True, **options)
        own = [share(mesh, x, dim) for x in (q, k, v)]
        with CommDebugMode() as counted:
            got = sharded("blocksparse_attention", mesh)(*own, layout, return_lse=True, **options)
        assert counted.get_total_counts() == 0
        assert got.out.placements == (Shard(dim),)
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one.full_tensor(), other)
        if dim == 1:
            of_vllm = sharded("blocksparse_flash_attn_varlen_fwd", mesh)(*own, cu, cu, None, layout)
            torch.testing.assert_close(of_vllm.full_tensor(), wanted.out)
        given = {"q": (q, dim), "k": (k, dim), "v": (v, dim)}
        with_lists = partial(blocksparse_attention, return_lse=True, **options)
        check_gradients(mesh, partial(with_lists, layout=layout), given | {"sinks": (torch.randn(4), 0)})
        check_gradients(mesh, partial(with_lists, layout=layout.heads(0, 1)), given)
    lengths = {"cu_seqlens_q": torch.tensor([0, 1, 3]).int(), "seqlens_k": torch.tensor([40, 9]).int()}
    table, means = torch.randperm(8).int().view(2, 4), torch.randn(2, 4, 4, 32)
    q, (k_cache, v_cache), sinks = torch.randn(3, 8, 32), torch.randn(2, 8, 16, 4, 32), torch.randn(8)
    chosen = select_blocks(q, means, topk=2, block_size=16, **lengths)
    found = sharded("select_blocks", mesh)(share(mesh, q, 1), share(mesh, means, 2), topk=2, block_size=16, **lengths)
    assert torch.equal(found.full_tensor(), chosen)
    for page_layout, dim in (("NHD", 2), ("HND", 1)):
        caches = [x if dim == 2 else x.transpose(1, 2).contiguous() for x in (k_cache, v_cache)]
        options = {"block_size": 16, "block_table": table, "page_layout": page_layout, "return_lse": True, **lengths}
        wanted = selected_attention(q, *caches, chosen, sinks=sinks, **options)
        own = [share(mesh, q, 1), *(share(mesh, x, dim) for x in caches), found]
        got = sharded("selected_attention", mesh)(*own, sinks=share(mesh, sinks, 0), **options)
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one.full_tensor(), other)

        given = {"q": (q, 1), "k_cache": (caches[0], dim), "v_cache": (caches[1], dim), "sinks": (sinks, 0)}
        check_gradients(mesh, partial(selected_attention, indices=chosen, **options), given)


def test_two_ranks_give_what_one_does() -> None:
    run(2, by_heads)


def test_what_cannot_be_shared_is_named() -> None:
    with pytest.raises(ValueError, match=r"^function must be .*, got 'LocalStridedBlockSparseAttn'"):
        placements("LocalStridedBlockSparseAttn")
