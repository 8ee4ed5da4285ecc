"""gdn-split on DTensors: how the tensors of each public function may be shared, and sharding rules for its ops.

Importing this registers the rules: split and merge then take DTensors shared by tokens, and communicate nothing. By
heads :func:`sharded` runs a function on local shards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch

import gdn_split
from gdn_split.arguments import check_positive
from kernel_reference.checks import fail
from kernel_reference.dtensors import Placements, on_shards, placements_in, register_sharding

By = Literal["tokens", "heads"]

_PARTS = ("mixed_qkv", "z", "b", "a")
_FUSED = ("mixed_qkvz", "mixed_ba")

# By heads, of a whole layer: what all its functions take, and what those take that hold both states.
_LAYER = {**dict.fromkeys(_FUSED, 1), "conv_state": 1, **dict.fromkeys(("conv_weight", "conv_bias"), 0)}
_LAYER |= {"A_log": 0, "dt_bias": 0}
_STATES = {**_LAYER, "state_pool": 1}

_TABLE: dict[tuple[str, str], Placements] = {
    ("fused_qkvzba_split_reshape_cat", "tokens"): Placements(dict.fromkeys(_FUSED, 0), (0,) * 4),
    ("split_views", "tokens"): Placements(dict.fromkeys(_FUSED, 0), (0,) * 4),
    ("merge_qkvzba", "tokens"): Placements(dict.fromkeys(_PARTS, 0), (0, 0)),
    ("fused_qkvzba_split_reshape_cat", "heads"): Placements(dict.fromkeys(_FUSED, 1), (1,) * 4),
    ("merge_qkvzba", "heads"): Placements(dict.fromkeys(_PARTS, 1), (1, 1)),
    ("split_conv1d_update", "heads"): Placements(
        {**dict.fromkeys(_FUSED, 1), "conv_state": 1, "conv_weight": 0, "conv_bias": 0}, (1,) * 4, ("conv_state",)
    ),
    ("gdn_decode_step", "heads"): Placements({**_STATES, "out": 1}, (1,), ("conv_state", "state_pool", "out")),
    ("gdn_verify", "heads"): Placements({**_STATES, "out": 1}, (1,), ("out",)),
    ("gdn_commit", "heads"): Placements(_STATES, (), ("conv_state", "state_pool")),
    ("gdn_prefill_inputs", "heads"): Placements(_LAYER, (1,) * 6, ("conv_state",)),
}


def placements(function: str, by: By = "tokens") -> Placements:
    """How the tensors of a public function may lie on a mesh of one dimension.

    >>> placements("fused_qkvzba_split_reshape_cat").outputs
    (0, 0, 0, 0)

    Args:
        function: its name.
        by: what is shared. By "heads" layouts are interleaved, and a rank's channels of mixed_qkv, of the
            convolution's weight and of its state are q, k and v of its own heads, one behind the other: the DTensor has
            them in the order of ranks (:func:`gdn_split.parallel.head_shard` says which they are).

    Returns:
        kernel_reference.dtensors.Placements: by argument the dimension that is shared, and of each result; other
        tensors are replicated.

    Raises:
        ValueError: there is no such way to share the function's tensors.
    """
    return placements_in(_TABLE, function, by)


def sharded(function: str, mesh: Any, by: By = "tokens") -> Callable[..., Any]:
    """A public function over DTensors on this mesh, by ``local_map``: each rank works on its shards.

    Args:
        function, by: as for :func:`placements`.
        mesh: a ``torch.distributed.device_mesh.DeviceMesh`` of one dimension.

    Returns:
        The function with the same arguments, sizes of the whole layer among them. A tensor that is written must lie as
        :func:`placements` says; others are redistributed if they do not.

    Raises:
        TypeError, ValueError: as for :func:`placements`; heads that the mesh does not divide.
    """
    mapped = on_shards(getattr(gdn_split, function), mesh, placements(function, by))
    if by == "tokens":
        return mapped
    first = [*inspect.signature(getattr(gdn_split, function)).parameters].index("num_heads_qk")

    def call(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for at, name in ((first, "num_heads_qk"), (first + 1, "num_heads_v")):
            heads = given[at] if len(given) > at else kwargs[name]
            check_positive(**{name: heads})
            if heads % mesh.size():
                fail(name, f"a multiple of the mesh's {mesh.size()} ranks", heads)
            if len(given) > at:
                given[at] = heads // mesh.size()
            else:
                kwargs[name] = heads // mesh.size()
        if kwargs.get("layout", "interleaved") != "interleaved":
            fail("layout", '"interleaved" where heads are shared', repr(kwargs["layout"]))
        return mapped(*given, **kwargs)

    return call


def _register() -> None:
    ops: Any = torch.ops.gdn_split
    for name, function in (("split", "fused_qkvzba_split_reshape_cat"), ("merge", "merge_qkvzba")):
        for op in (getattr(ops, name), getattr(ops, f"{name}_inference")):
            register_sharding(op.default, [placements(function)])


_register()
