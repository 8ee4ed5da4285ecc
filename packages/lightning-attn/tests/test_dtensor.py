"""DTensors: are calls on shards those of one process, and do they send nothing?"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

# Torch imports it under a dispatch mode: once here, and not in every fork for seconds.
import torch._dynamo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import lightning_attn
from kernel_reference.testing.distributed import run
from lightning_attn import (
    lightning_attention,
    lightning_attention_packed,
    lightning_attention_varlen,
    lightning_commit,
    lightning_decode,
    lightning_state,
    lightning_verify,
    linear_decode_forward_triton,
)
from lightning_attn.dtensor import placements, sharded

Tensor = torch.Tensor
HEADS, D, E, SLOTS = 4, 16, 24, 5


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def shared(mesh: Any, function: str, by: str, **tensors: Any) -> dict[str, Any]:
    """Tensors as DTensors that lie as the function's table says."""
    how = placements(function, by)
    return {
        name: distribute_tensor(x, mesh, [how.of(name)]) if isinstance(x, Tensor) else x for name, x in tensors.items()
    }


def assert_same(got: Any, wanted: Any) -> None:
    got, wanted = ((x,) if isinstance(x, Tensor) else x for x in (got, wanted))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-5, atol=1e-5)


RATES = torch.tensor([0.02, 0.0, 2.0, 0.3])


def dense() -> dict[str, Tensor]:
    q, k, v = (normal(2, HEADS, 10, size) for size in (D, D, E))
    return {"q": q, "k": k, "v": v, "ed": RATES, "kv_history": normal(2, HEADS, D, E)}


def packed() -> dict[str, Tensor]:
    q, k, v = (normal(12, HEADS, size) for size in (D, D, E))
    initial, cu = normal(3, HEADS, D, E), torch.tensor([0, 7, 7, 12])
    return {"q": q, "k": k, "v": v, "slopes": RATES, "cu_seqlens": cu, "initial_state": initial}


def by_rules(rank: int) -> None:
    """The public functions themselves, on DTensors: forward and backward without a collective."""
    mesh = init_device_mesh("cpu", (2,))
    counted = CommDebugMode()
    for dim, by in ((1, "heads"), (0, "sequences")):
        tensors = dense()
        leaves = {name: x.clone().requires_grad_() for name, x in tensors.items() if name != "ed"}
        wanted = lightning_attention(**leaves, ed=RATES, scale=0.7)
        (wanted.out.sum() + wanted.kv.sin().sum()).backward()
        own = shared(mesh, "lightning_attention", by, **tensors)
        own = {name: x.detach().requires_grad_(name != "ed") for name, x in own.items()}
        with counted:
            got = lightning_attention(**own, scale=0.7)
            (got.out.to_local().sum() + got.kv.to_local().sin().sum()).backward()
        assert counted.get_total_counts() == 0
        assert [x.placements for x in got] == [(Shard(dim),)] * 2
        assert_same(got, wanted)
        assert_same([own[name].grad for name in leaves], [leaf.grad for leaf in leaves.values()])
        assert all(own[name].grad.placements == (Shard(dim),) for name in leaves)
    tensors = packed()
    leaves = {name: tensors[name].clone().requires_grad_() for name in ("q", "k", "v", "initial_state")}
    wanted = lightning_attention_packed(**{**tensors, **leaves})
    (wanted.out.sum() + wanted.final_state.sum()).backward()
    own = shared(mesh, "lightning_attention_packed", "heads", **tensors)
    own = {name: x.detach().requires_grad_(name in leaves) for name, x in own.items()}
    with counted:
        got = lightning_attention_packed(**own)
        (got.out.to_local().sum() + got.final_state.to_local().sum()).backward()
        with torch.no_grad():
            state = lightning_state(*list(own.values())[1:5], initial_state=own["initial_state"])
    assert counted.get_total_counts() == 0
    assert_same(got, wanted)
    assert_same([own[name].grad for name in leaves], [leaf.grad for leaf in leaves.values()])
    assert state.placements == (Shard(1),)
    assert_same(state, wanted.final_state.detach())
    # Heads that k shares cannot be told apart by their shards: all is replicated.
    k, v = (distribute_tensor(normal(12, heads, D), mesh, [Shard(1)]) for heads in (2, 4))
    grouped = lightning_state(k, v, own["slopes"], own["cu_seqlens"])
    assert grouped.placements == (Replicate(),)
    assert_same(grouped, lightning_state(k.full_tensor(), v.full_tensor(), RATES, tensors["cu_seqlens"]))


def of_tokens(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    tensors = dense()
    own = shared(mesh, "lightning_attention", "tokens", **tensors)
    out, kv = sharded("lightning_attention", mesh, "tokens")(**own)
    wanted = lightning_attention(**tensors)
    assert_same(out, wanted.out)
    # The states after each rank's tokens.
    torch.testing.assert_close(kv.full_tensor()[:, :, -1:], wanted.kv)


def pool_and_slots() -> dict[str, Tensor]:
    return {"state_pool": normal(SLOTS, HEADS, D, E), "slots": torch.tensor([3, -1, 0]), "slopes": RATES}


def step(tokens: int | None) -> dict[str, Tensor]:
    lead = (3,) if tokens is None else (3, tokens)
    return {name: normal(*lead, HEADS, size) for name, size in (("q", D), ("k", D), ("v", E))}


def by_local_map(rank: int) -> None:
    """Every public function, its pool updated in place."""
    mesh = init_device_mesh("cpu", (2,))
    drop_in = {name: x[:, :, None] for name, x in step(None).items()}
    pool, slots, rates = pool_and_slots().values()
    drop_in |= {"kv_caches": pool, "slope_rate": rates, "slot_idx": slots}
    counts = torch.tensor([2, 3, 0])
    drafts = step(3)
    rows = {name: x for name, x in packed().items() if name in ("q", "k", "v", "slopes", "cu_seqlens")}
    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (lightning_attention, dense()),
        (lightning_attention_packed, packed()),
        (lightning_state, {name: x for name, x in packed().items() if name != "q"}),
        (
            lightning_attention_varlen,
            {**rows, **pool_and_slots(), "has_initial_state": True, "out": normal(12, HEADS, E)},
        ),
        (lightning_decode, {**step(None), **pool_and_slots(), "scale": 0.7}),
        (linear_decode_forward_triton, drop_in),
        (lightning_verify, {**drafts, **pool_and_slots(), "parents": torch.tensor([[-1, 0, 0]] * 3)}),
        (lightning_commit, {"k": drafts["k"], "v": drafts["v"], **pool_and_slots(), "accepted": counts}),
    ]
    assert {function.__name__ for function, _ in calls} == {
        name
        for name in lightning_attn.__all__
        if inspect.isfunction(getattr(lightning_attn, name)) and name != "slopes"
    }
    for function, given in calls:
        name = function.__name__
        own = shared(
            mesh, name, "heads", **{key: x.clone() if isinstance(x, Tensor) else x for key, x in given.items()}
        )
        got = sharded(name, mesh)(**own)
        given = {key: x.clone() if isinstance(x, Tensor) else x for key, x in given.items()}
        wanted = function(**given)
        assert isinstance(got, (type(wanted), DTensor))
        if wanted is not None:
            assert_same(got, wanted)
        for written in placements(name).written:
            if written in given:
                assert_same(own[written], given[written])


@pytest.mark.parametrize("check", [by_rules, of_tokens, by_local_map], ids=lambda check: check.__name__)
def test_two_ranks_give_what_one_does(check) -> None:
    run(2, check)


def refusals(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(ValueError, match=r'^by must be one of "heads" for lightning_decode'):
        placements("lightning_decode", "tokens")
    with pytest.raises(ValueError, match=r"^by must be of a public function, got"):
        placements("lightning_attn")
    given = {**step(None), **pool_and_slots()}
    with pytest.raises(TypeError, match=r"^q must be a DTensor"):
        sharded("lightning_decode", mesh)(**given)
    own = shared(mesh, "lightning_decode", "heads", **given)
    own["state_pool"] = distribute_tensor(given["state_pool"], mesh, [Replicate()])
    with pytest.raises(ValueError, match=r"^state_pool must be placed as S"):
        sharded("lightning_decode", mesh)(**own)


def test_what_cannot_be_shared_is_named() -> None:
    run(1, refusals)
