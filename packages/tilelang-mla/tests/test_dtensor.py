"""DTensors: are calls on shards those of one process, and do they send nothing?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

# Torch imports it under a dispatch mode: once here, and not in every fork for seconds.
import torch._dynamo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from kernel_reference.testing.distributed import run
from tilelang_mla import (
    dequantize_kv,
    flash_mla_sparse_fwd,
    flash_mla_varlen_func,
    flash_mla_with_kvcache,
    index_scores,
    index_topk,
    quantize_index_k,
    quantize_kv,
)
from tilelang_mla.dtensor import placements, sharded

Tensor = torch.Tensor


def share(mesh: Any, x: Tensor, dim: int) -> Any:
    return distribute_tensor(x, mesh, [Shard(dim)])


def by_shards(rank: int) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    q, kv = torch.randn(4, 2, 8, 96).bfloat16(), torch.randn(8, 16, 1, 96).bfloat16()
    lengths, table = torch.tensor([20, 3, 32, 7]).int(), torch.randperm(8).int().view(4, 2)
    wanted = flash_mla_with_kvcache(q, kv, lengths, table, 64, return_lse=True)
    for by, dim in (("heads", 2), ("sequences", 0)):
        own = share(mesh, q, dim)
        bounds = (lengths, table) if by == "heads" else (share(mesh, lengths, 0), share(mesh, table, 0))
        decode = sharded("flash_mla_with_kvcache", mesh, by)
        with CommDebugMode() as counted:
            got = decode(own, kv, *bounds, 64, return_lse=True)
            out = decode(own, kv, *bounds, 64)
        assert counted.get_total_counts() == 0
        assert got.out.placements == (Shard(dim),)
        torch.testing.assert_close(got.out.full_tensor(), wanted.out)
        torch.testing.assert_close(out.full_tensor(), wanted.out)
        torch.testing.assert_close(got.lse.full_tensor(), wanted.lse)
    listed = torch.randint(-1, 128, (4, 2, 16)).int()
    sink = torch.randn(8)
    wanted = flash_mla_with_kvcache(q, kv, None, None, 64, indices=listed, attn_sink=sink)
    got = sharded("flash_mla_with_kvcache", mesh)(
        share(mesh, q, 2), kv, None, None, 64, indices=listed, attn_sink=share(mesh, sink, 0)
    )
    torch.testing.assert_close(got.full_tensor(), wanted)
    keys = torch.randn(8, 16, 128).bfloat16()
    index_q, weights = torch.randn(4, 2, 16, 128).to(torch.float8_e4m3fn), torch.randn(4, 2, 16)
    seen = torch.stack([lengths - 1, lengths], 1).contiguous()
    cache = sharded("quantize_index_k", mesh, "sequences")(share(mesh, keys, 0))
    assert torch.equal(cache.full_tensor(), quantize_index_k(keys))
    # gloo knows no 8 bits.
    own_q = DTensor.from_local(index_q.chunk(2)[rank], mesh, [Shard(0)])
    shares = [own_q, *(share(mesh, x, 0) for x in (weights, seen, table))]
    with CommDebugMode() as counted:
        scores = sharded("index_scores", mesh, "sequences")(shares[0], quantize_index_k(keys), *shares[1:])
        topk = sharded("index_topk", mesh, "sequences")(scores, shares[2], 8)
    assert counted.get_total_counts() == 0
    wanted = index_scores(index_q, quantize_index_k(keys), weights, seen, table)
    torch.testing.assert_close(scores.full_tensor(), wanted)
    assert torch.equal(topk.full_tensor(), index_topk(wanted, seen, 8))
    latents = torch.randn(6, 96).bfloat16()
    small = sharded("quantize_kv", mesh, "sequences")(share(mesh, latents, 0))
    again = sharded("dequantize_kv", mesh, "sequences")(small)
    assert torch.equal(again.full_tensor(), dequantize_kv(quantize_kv(latents)))
    rows = kv.view(-1, 1, 96)
    found = sharded("flash_mla_sparse_fwd", mesh)(share(mesh, q[:, 0], 1), rows, listed[:, :1].contiguous(), 0.1, 64)
    exact = flash_mla_sparse_fwd(q[:, 0], rows, listed[:, :1].contiguous(), 0.1, 64)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.full_tensor(), other)
    q, k, v = (torch.randn(30, 4, width).bfloat16() for width in (96, 96, 64))
    cu = torch.tensor([0, 11, 30]).int()
    exact = flash_mla_varlen_func(q, k, v, cu, cu, 19, 19, return_lse=True)
    found = sharded("flash_mla_varlen_func", mesh)(
        *(share(mesh, x, 1) for x in (q, k, v)), cu, cu, 19, 19, return_lse=True
    )
    torch.testing.assert_close(found.out.full_tensor(), exact.out)
    torch.testing.assert_close(found.lse.full_tensor(), exact.lse)
    # By rules of the ops: the function itself, and its gradients.
    given = [x.requires_grad_() for x in (q, k, v)]
    loss = sum(x.float().square().sum() for x in flash_mla_varlen_func(*given, cu, cu, 19, 19, return_lse=True))
    wanted = torch.autograd.grad(loss, given)
    shards = [share(mesh, x.detach(), 1).requires_grad_() for x in given]
    bounds = distribute_tensor(cu, mesh, [Replicate()])
    with CommDebugMode() as counted:
        results = flash_mla_varlen_func(*shards, bounds, bounds, 19, 19, return_lse=True)
        found = torch.autograd.grad(sum(x.to_local().float().square().sum() for x in results), shards)
    assert counted.get_total_counts() == 0
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.full_tensor(), other)
    with pytest.raises(ValueError, match=r"^q must be of a multiple of 2 along dimension 1"):
        sharded("flash_mla_sparse_fwd", mesh)(share(mesh, torch.zeros(4, 3, 96).bfloat16(), 1), rows, listed, 0.1)


def test_two_ranks_give_what_one_does() -> None:
    run(2, by_shards)


def test_what_cannot_be_shared_is_named() -> None:
    with pytest.raises(ValueError, match=r"^function must be .*, got \('flash_mla_varlen_func', 'sequences'\)"):
        placements("flash_mla_varlen_func", "sequences")
