"""lightning-attn on DTensors: how the tensors of each public function may be shared, and sharding rules for its ops.

Importing this registers the rules: ops that write nothing in place then take DTensors, shared by heads or by sequences,
and communicate nothing. For the other functions, and to share tokens, :func:`sharded` runs a function on local shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

import lightning_attn
from kernel_reference.dtensors import Placements, on_shards, placements_in, register_sharding
from lightning_attn import parallel

By = Literal["heads", "sequences", "tokens"]

_DENSE = {"q": 1, "k": 1, "v": 1, "ed": 0, "kv_history": 1}
_PACKED = {"q": 1, "k": 1, "v": 1, "slopes": 0, "initial_state": 1}
_TOKEN = {"q": 1, "k": 1, "v": 1, "slopes": 0, "state_pool": 1, "out": 1}
_DRAFTS = {**_TOKEN, "q": 2, "k": 2, "v": 2, "out": 2}

_TABLE: dict[tuple[str, str], Placements] = {
    ("lightning_attention", "heads"): Placements(_DENSE, (1, 1)),
    ("lightning_attention", "sequences"): Placements({"q": 0, "k": 0, "v": 0, "kv_history": 0}, (0, 0)),
    # The state after each rank's tokens, one behind the other: the last is that of the whole sequence.
    ("lightning_attention", "tokens"): Placements({"q": 2, "k": 2, "v": 2}, (2, 2)),
    ("lightning_attention_packed", "heads"): Placements(_PACKED, (1, 1)),
    ("lightning_state", "heads"): Placements(_PACKED, (1,)),
    ("lightning_attention_varlen", "heads"): Placements(_TOKEN, (1,), ("state_pool", "out")),
    ("lightning_decode", "heads"): Placements(_TOKEN, (1,), ("state_pool", "out")),
    ("linear_decode_forward_triton", "heads"): Placements(
        {"q": 1, "k": 1, "v": 1, "kv_caches": 1, "slope_rate": 0}, (1,), ("kv_caches",)
    ),
    ("lightning_verify", "heads"): Placements(_DRAFTS, (2,), ("out",)),
    ("lightning_commit", "heads"): Placements(_DRAFTS, (), ("state_pool",)),
}


def placements(function: str, by: By = "heads") -> Placements:
    """How the tensors of a public function may lie on a mesh of one dimension.

    >>> placements("lightning_attention").inputs["q"]
    1

    Args:
        function: its name.
        by: what is shared: "heads", of every function; "sequences" or "tokens", of ``lightning_attention``. The tensor
            of decay rates is [H]; where heads of q and k and those of v are not as many, both are multiples of the
            mesh's size.

    Returns:
        kernel_reference.dtensors.Placements: by argument the dimension that is shared, and of each result; other
        tensors are replicated.

    Raises:
        ValueError: there is no such way to share the function's tensors.
    """
    return placements_in(_TABLE, function, by)


def sharded(function: str, mesh: Any, by: By = "heads") -> Callable[..., Any]:
    """A public function over DTensors on this mesh, by ``local_map``: each rank works on its shards.

    Args:
        function, by: as for :func:`placements`. By "tokens" it is
            :func:`lightning_attn.parallel.lightning_attention_cp` over the mesh's group, whose ``kv`` are then the
            states after each rank's tokens.
        mesh: a ``torch.distributed.device_mesh.DeviceMesh`` of one dimension.

    Returns:
        The function with the same arguments. A tensor that is written must lie as :func:`placements` says; others are
        redistributed if they do not.

    Raises:
        TypeError, ValueError: as for :func:`placements`.
    """
    how = placements(function, by)
    if by == "tokens":

        def attend(
            q: Any, k: Any, v: Any, ed: Any, *, kv_history: Any = None, scale: float = 1.0, exact: bool = False
        ) -> Any:
            return parallel.lightning_attention_cp(
                q, k, v, ed, group=mesh.get_group(), kv_history=kv_history, scale=scale, exact=exact
            )

        return on_shards(attend, mesh, how)
    return on_shards(getattr(lightning_attn, function), mesh, how)


def _as_many_heads(sharding: Placements, tensors: Mapping[str, Any]) -> bool:
    """Whether a rank's heads of k are those that its heads of v read; a batch [b, h, n, d] has as many."""
    if sharding.inputs["k"] == 0:
        return bool(tensors["k"].ndim == 4)
    return bool(tensors["k"].shape[1] == tensors["v"].shape[1])


def _register() -> None:
    ops: Any = torch.ops.lightning_attn
    heads = placements("lightning_attention", "heads")
    sequences = placements("lightning_attention", "sequences")
    for op in (ops.attention, ops.attention_inference):
        register_sharding(op.default, [heads, sequences])
    packed = placements("lightning_attention_packed", "heads")
    register_sharding(ops.packed.default, [packed])
    backward = [
        Placements({**heads.inputs, "d_out": 1, "d_kv": 1}, (1, 1, 1, 1)),
        Placements({**sequences.inputs, "d_out": 0, "d_kv": 0}, (0, 0, 0, 0)),
    ]
    register_sharding(ops.attention_backward.default, backward)
    of_packed = Placements({**packed.inputs, "d_out": 1, "d_final_state": 1}, (1, 1, 1, 1))
    register_sharding(ops.packed_backward.default, [of_packed])
    by_sequences = Placements({"k": 0, "v": 0, "initial_state": 0}, (0,))
    register_sharding(ops.state.default, [placements("lightning_state"), by_sequences], _as_many_heads)


_register()
