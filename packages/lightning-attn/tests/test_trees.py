"""Drafts that branch: are they decoding, path by path, bit for bit?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kernel_reference.checks import validate_values
from kernel_reference.testing.guards import assert_bitwise_equal
from lightning_attn import lightning_commit, lightning_decode, lightning_verify
from lightning_attn import tensors as groups
from lightning_attn.plan import DecodePlan
from lightning_attn.trees import arguments as tree_arguments

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLAN = DecodePlan(16, 4)
# By what hangs on what: a chain, all from the pool's state, two trees breadth first and depth first, and one of each.
TREES = {
    "chain": [-1, 0, 1, 2, 3],
    "star": [-1, -1, -1, -1, -1],
    "breadth first": [-1, 0, 0, 1, 2],
    "depth first": [-1, 0, 1, 0, 3],
    "two roots": [-1, -1, 0, 1, 2],
}


def path_of(parents: Sequence[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def ragged(tensors: Any, nodes: int, sequences: int, **options: Any) -> Any:
    slots = [*range(sequences, 0, -1)]
    slots[-1:] = [-1] if sequences > 2 else slots[-1:]
    return tensors.ragged([nodes] * sequences, slots=slots, num_slots=sequences + 2, **options)


def integers(batch: Any, rows: Sequence[Any], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(rows, dtype=dtype, device=batch.q.device)


def decoded(kernels: Any, batch: Any, sequence: int, path: Sequence[int], plan: Any) -> tuple[Tensor, Tensor]:
    """The output of a path's last token and the state after it, by decoding alone: through the kernels with a plan."""
    rows = [sequence * batch.lengths[0] + node for node in path]
    pool = batch.before[batch.slot_of[sequence]][None].clone()
    slots = integers(batch, [0])
    out = batch.out.tensor.new_empty(1, *batch.out.tensor.shape[1:])
    for row in rows:
        q, k, v = (x[row : row + 1] for x in (batch.q, batch.k, batch.v))
        if plan is None:
            lightning_decode(q, k, v, pool, slots, batch.slopes, scale=batch.scale, out=out)
        else:
            kernels.call("decode", (q, k, v, pool, slots, batch.slopes, out), batch.scale, plan=plan)
    return out[0], pool[0]


def verify(kernels: Any, batch: Any, parents: Tensor, plan: Any) -> Tensor:
    q, k, v, out = (kernels.drafts(batch, x) for x in (batch.q, batch.k, batch.v, batch.out.tensor))
    if plan is None:
        lightning_verify(
            q, k, v, batch.pool.tensor, batch.slots, batch.slopes, parents=parents, scale=batch.scale, out=out
        )
    else:
        from lightning_attn.trees import launch as tree_launch

        t = groups.TreeVerify(q, k, v, batch.pool.tensor, batch.slots, batch.slopes, parents, out)
        tree_launch.prepare_verify_tree(tree_arguments.check_verify_tree(t, batch.scale), plan, t)(t)
    return out


def commit(kernels: Any, batch: Any, accepted: Tensor, path: Tensor, plan: Any) -> None:
    k, v = (kernels.drafts(batch, x) for x in (batch.k, batch.v))
    given = (k, v, batch.pool.tensor, batch.slots, batch.slopes, accepted)
    if plan is None:
        lightning_commit(*given, path=path)
    else:
        from lightning_attn.trees import launch as tree_launch

        t = groups.PathCommit(*given, path)
        tree_launch.prepare_commit_path(tree_arguments.check_commit_path(t), plan, t)(t)


def check_trees(kernels: Any, batch: Any, trees: Sequence[Sequence[int]], plan: Any) -> None:
    out = verify(kernels, batch, integers(batch, trees), plan)
    batch.pool.check(written=False)
    assert_bitwise_equal(batch.pool.tensor, batch.before)
    for i, parents in enumerate(trees):
        if i not in batch.live:
            assert not bool(out[i].any())
            continue
        for node in range(len(parents)):
            wanted, _ = decoded(kernels, batch, i, path_of(parents, node), plan)
            assert_bitwise_equal(out[i, node], wanted, what=f"node {node} of sequence {i}")


def check_paths(kernels: Any, batch: Any, paths: Sequence[Sequence[int]], plan: Any, most: int) -> None:
    filled = [[*path, *[-7] * (most - len(path))] for path in paths]
    commit(kernels, batch, integers(batch, [len(path) for path in paths]), integers(batch, filled), plan)
    wanted = batch.before.clone()
    for i in batch.live:
        wanted[batch.slot_of[i]] = decoded(kernels, batch, i, paths[i], plan)[1]
    assert_bitwise_equal(batch.pool.tensor, wanted)
    batch.pool.check(written=False)


@pytest.mark.parametrize("plan", [None, PLAN], ids=["public", "kernels"])
@pytest.mark.parametrize(("pool_dtype", "heads"), [(FP32, (2, 1)), (BF16, (1, 2))], ids=str)
def test_every_node_has_the_bits_of_decoding_its_path_alone(tensors, kernels, plan, pool_dtype, heads) -> None:
    batch = ragged(tensors, 5, len(TREES), heads=heads, sizes=(20, 24), pool_dtype=pool_dtype, scale=0.7, initial=True)
    check_trees(kernels, batch, [*TREES.values()], plan)


@pytest.mark.parametrize("plan", [None, PLAN], ids=["public", "kernels"])
@pytest.mark.parametrize("pool_dtype", [FP32, FP16], ids=str)
def test_the_accepted_path_has_the_bits_of_decoding_it_alone(tensors, kernels, plan, pool_dtype) -> None:
    batch = ragged(tensors, 5, 5, heads=(1, 2), sizes=(20, 24), pool_dtype=pool_dtype, initial=True)
    check_paths(kernels, batch, [[0, 1, 4], [], [2], [0, 1, 2, 3], [3]], plan, 4)


@pytest.mark.parametrize("plan", [None, PLAN], ids=["public", "kernels"])
def test_a_tree_of_32_nodes_has_the_bits_of_its_paths(tensors, kernels, plan) -> None:
    chance = random.Random(19)
    parents = [chance.randrange(max(-1, node - 9), node) for node in range(32)]
    # The last bit, and the longest way.
    parents[31] = 30
    batch = ragged(tensors, 32, 1, heads=(1, 1), sizes=(16, 16), initial=True)
    out = verify(kernels, batch, integers(batch, [parents]), plan)
    for node in (0, 7, 30, 31):
        assert_bitwise_equal(out[0, node], decoded(kernels, batch, 0, path_of(parents, node), plan)[0])
    tensors.assert_rounded(out[0], batch_by_paths(tensors, batch, parents), apart=(1,), what="the outputs of a tree")


def batch_by_paths(tensors: Any, batch: Any, parents: Sequence[int]) -> Any:
    """Each node's output by the recurrence over its path."""

    def forms_of(q: Tensor, k: Tensor, v: Tensor, initial: Tensor) -> list[tuple[Tensor]]:
        found: list[list[Tensor]] = [[], []]
        for node in range(len(parents)):
            rows = path_of(parents, node)
            given = (q[rows], k[rows], v[rows], batch.slopes, [len(rows)], initial, batch.scale)
            found[0].append(tensors.exact(*given)[0][-1])
            found[1].append(tensors.plain(*given, products=FP32, chunk=1)[0][-1])
        return [(torch.stack(outs),) for outs in found]

    (wanted,) = tensors.wanted(forms_of, [batch.q, batch.k, batch.v, batch.before[batch.slot_of[0]][None]])
    return wanted


@pytest.mark.gpu
@pytest.mark.parametrize("plan", [None, DecodePlan(32, 4, hopper=True)], ids=["public", "for sm_90"])
@pytest.mark.parametrize("pool_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("sizes", [(128, 128), (64, 96), (256, 80)], ids=str)
def test_trees_and_paths_of_models_have_the_bits_of_decoding_on_a_gpu(
    tensors, kernels, sizes, pool_dtype, plan
) -> None:
    if plan is not None and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for sm_90")
    chance = random.Random(19)
    trees = [[chance.randrange(-1, node) for node in range(12)] for _ in range(7)]
    options = {"heads": (8, 8), "sizes": sizes, "pool_dtype": pool_dtype, "initial": True}
    check_trees(kernels, ragged(tensors, 12, 7, **options), trees, plan)
    paths = [path_of(parents, 11) for parents in trees]
    check_paths(kernels, ragged(tensors, 12, 7, **options), paths, plan, 12)


def test_a_chain_and_no_parents_are_the_same(tensors, kernels) -> None:
    batch = ragged(tensors, 5, 3, heads=(2, 2), sizes=(16, 32), initial=True)
    q, k, v = (kernels.drafts(batch, x) for x in (batch.q, batch.k, batch.v))
    given = (q, k, v, batch.pool.tensor, batch.slots, batch.slopes)
    chain = integers(batch, [TREES["chain"]] * 3, torch.int64)
    assert_bitwise_equal(lightning_verify(*given, parents=chain), lightning_verify(*given))
    accepted, before = integers(batch, [5, 2, 0]), batch.pool.tensor.clone()
    lightning_commit(*given[1:], accepted)
    plain = batch.pool.tensor.clone()
    batch.pool.tensor.copy_(before)
    lightning_commit(*given[1:], accepted, path=integers(batch, [[*range(5)]] * 3))
    assert_bitwise_equal(batch.pool.tensor, plain)


@pytest.mark.parametrize("plan", [None, PLAN], ids=["public", "kernels"])
def test_parents_and_paths_that_are_none_do_no_harm(tensors, kernels, plan) -> None:
    """A parent that is not below its child counts as -1, a token that is none as the nearest."""
    with validate_values(False):
        batch = ragged(tensors, 5, 2, heads=(1, 1), sizes=(16, 16), initial=True)
        bad = [[3, 1, -9, 2**30, 3], [-1, 0, 1, 3, -(2**31)]]
        out = verify(kernels, batch, integers(batch, bad), plan).clone()
        good = [[-1, -1, -1, -1, 3], [-1, 0, 1, -1, -1]]
        assert_bitwise_equal(verify(kernels, batch, integers(batch, good), plan), out)
        commit(kernels, batch, integers(batch, [2, 4]), integers(batch, [[-5, 99, 0], [0, 1, 2]]), plan)
        wanted = batch.before.clone()
        wanted[batch.slot_of[0]] = decoded(kernels, batch, 0, [0, 4], plan)[1]
        assert_bitwise_equal(batch.pool.tensor, wanted)


@pytest.mark.parametrize(
    ("parents", "path", "named"),
    [
        ([[-1, 1]], None, r"parents\[0, 1\] must be from -1 \(the state of the pool\) to 0, got 1"),
        ([[-2, 0]], None, r"parents\[0, 0\] must be -1, the state of the pool, got -2"),
        ([[-1]], None, r"parents must be \[1, 2\], contiguous"),
        (None, [[1, 1]], r"path\[0, 1\] must be from 2 to 1"),
        (None, [[0]], r"accepted\[0\] must be from 0 to the 1 nodes of a path, got 2"),
        (None, [[0, 1, 1]], r"path must be \[1, P\] with at most 2 nodes P"),
    ],
)
def test_a_tree_that_is_none_is_named(tensors, kernels, parents, path, named) -> None:
    batch = tensors.ragged([2], heads=(1, 1), sizes=(16, 16), initial=True)
    run = verify if path is None else commit
    given = [parents] if path is None else [[2], path]
    with validate_values(), pytest.raises(ValueError, match=named):
        run(kernels, batch, *(integers(batch, rows) for rows in given), None)
