"""What arguments.py does, for drafts that branch."""

from __future__ import annotations

import torch

from kernel_reference.checks import describe, fail, known
from kernel_reference.ragged import read_integers
from lightning_attn.arguments import (
    Ints,
    bits_of_rates,
    check_bits_of_rates,
    check_decode_plan,
    check_indices,
    check_owned,
    check_packed,
    check_several,
    check_states,
)
from lightning_attn.plan import DecodeProblem
from lightning_attn.tensors import PathCommit, TreeVerify

Tensor = torch.Tensor

# A kernel has them as bits.
MAX_NODES = 32


def check_verify_tree(t: TreeVerify, scale: float, plan: Ints = None) -> DecodeProblem:
    """A tree of draft tokens of each sequence and the pool of their states, which is read alone."""
    problem = check_several(t, scale, plan)
    _check_nodes("q", t.q)
    check_indices("parents", t.parents, tuple(t.q.shape[:2]), "q", t.q)
    return problem


def check_commit_path(t: PathCommit, plan: Ints = None) -> DecodeProblem:
    """Draft tokens' keys and values, which of them are accepted, and the pool of states."""
    heads = check_packed(("B", "T"), None, t.k, t.v)
    _check_nodes("k", t.k)
    check_states(t.state_pool, t.slots, t.slopes, heads, "k", t.k)
    sequences, nodes = t.k.shape[:2]
    check_indices("accepted", t.accepted, (sequences,), "k", t.k)
    if t.path.ndim != 2 or known(t.path.shape[1] > nodes):
        fail("path", f"[{sequences}, P] with at most {nodes} nodes P", describe(t.path))
    check_indices("path", t.path, (sequences, t.path.shape[1]), "k", t.k)
    check_decode_plan(plan, heads)
    k, v, pool = t.k.stride(), t.v.stride(), t.state_pool
    return DecodeProblem(
        heads, sequences, nodes, pool.shape[0], None, k, v, pool.stride(), None, 1.0, writes=True
    )  # fmt: skip


def check_tree_values(t: TreeVerify | PathCommit) -> None:
    """Decay rates, slots and parents or, of a commit, the accepted path."""
    named = {"slopes": bits_of_rates(t.slopes), "slots": t.slots}
    if isinstance(t, PathCommit):
        found = read_integers({**named, "accepted": t.accepted, "path": t.path})
        most, nodes = t.path.shape[1], t.k.shape[1]
        for sequence, count in enumerate(found["accepted"]):
            if not 0 <= count <= most:
                fail(f"accepted[{sequence}]", f"from 0 to the {most} nodes of a path", count)
            before = -1
            for i, node in enumerate(found["path"][sequence * most :][:count]):
                if not before < node < nodes:
                    fail(
                        f"path[{sequence}, {i}]",
                        f"from {before + 1} to {nodes - 1}: children come behind their parents",
                        node,
                    )
                before = node
    else:
        found = read_integers({**named, "parents": t.parents})
        nodes = t.q.shape[1]
        for i, parent in enumerate(found["parents"]):
            sequence, node = divmod(i, nodes)
            if not -1 <= parent < node:
                wanted = f"from -1 (the state of the pool) to {node - 1}" if node else "-1, the state of the pool"
                fail(f"parents[{sequence}, {node}]", wanted, parent)
    check_bits_of_rates("slopes", found["slopes"])
    owned = [(f"slots[{sequence}]", slot, slot >= 0) for sequence, slot in enumerate(found["slots"])]
    check_owned(owned, t.state_pool.shape[0])


def _check_nodes(name: str, first: Tensor) -> None:
    if known(first.shape[1] > MAX_NODES):
        fail(name, f"[B, T, ...] with at most {MAX_NODES} nodes T", describe(first))
