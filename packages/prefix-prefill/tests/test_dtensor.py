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

from kernel_reference.testing.distributed import run
from prefix_prefill import CascadeLevel, cascade_attention, merge_attention_states, prefix_prefill
from prefix_prefill.dtensor import placements, sharded

Tensor = torch.Tensor


def share(mesh: Any, x: Tensor, dim: int) -> Any:
    return distribute_tensor(x, mesh, [Shard(dim)])


def by_heads(rank: int) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    q, k, v, sinks = torch.randn(9, 8, 32), torch.randn(9, 4, 32), torch.randn(9, 4, 32), torch.randn(8)
    table, cu, lengths = torch.randperm(6).int().view(2, 3), torch.tensor([0, 4, 9]).int(), torch.tensor([20, 5]).int()
    for page_layout, shape, dim in (("NHD", (6, 16, 4, 32), 2), ("HND", (6, 4, 16, 32), 1)):
        k_cache, v_cache = torch.randn(2, *shape)
        options = {"max_seqlen_q": 5, "page_layout": page_layout, "return_lse": True}
        wanted = prefix_prefill(q, k, v, k_cache, v_cache, table, cu, lengths, sinks=sinks, **options)
        own = [share(mesh, x, 1) for x in (q, k, v)] + [share(mesh, x, dim) for x in (k_cache, v_cache)]
        own_sinks = share(mesh, sinks, 0)
        with CommDebugMode() as counted:
            got = sharded("prefix_prefill", mesh)(*own, table, cu, lengths, sinks=own_sinks, **options)
            twice = sharded("merge_attention_states", mesh)(*got, *got)
        assert counted.get_total_counts() == 0
        assert (got.out.placements, got.lse.placements) == ((Shard(1),), (Shard(0),))
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one.full_tensor(), other)
        for one, other in zip(twice, merge_attention_states(*wanted, *wanted), strict=True):
            torch.testing.assert_close(one.full_tensor(), other)
    levels = [
        CascadeLevel(
            k_cache, v_cache, table[:1, :1].contiguous(), torch.tensor([0, 9]).int(), torch.tensor([16]).int()
        ),
        CascadeLevel(k_cache, v_cache, table[:, 1:].contiguous(), cu, torch.tensor([20, 6]).int()),
    ]
    how = {"max_seqlen_q": 5, "page_layout": "HND", "return_lse": True}
    shares = [one._replace(k_cache=own[3], v_cache=own[4]) for one in levels]
    got = sharded("cascade_attention", mesh)(own[0], shares, sinks=own_sinks, **how)
    for one, other in zip(got, cascade_attention(q, levels, sinks=sinks, **how), strict=True):
        torch.testing.assert_close(one.full_tensor(), other)
    out = torch.empty(9, 8, 32)
    with pytest.raises(ValueError, match=r"^out must be placed as .*, as it is written in place"):
        sharded("prefix_prefill", mesh)(
            *own, table, cu, lengths, max_seqlen_q=5, page_layout="HND", out=distribute_tensor(out, mesh)
        )


def test_two_ranks_give_what_one_does() -> None:
    run(2, by_heads)


def test_what_cannot_be_shared_is_named() -> None:
    with pytest.raises(ValueError, match=r"^function must be .*, got 'share_prefill'"):
        placements("share_prefill")
