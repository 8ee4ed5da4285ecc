"""prefix-prefill on DTensors: how the tensors of each public function may be shared, and the functions on local shards.

Its ops write into memory that they are given, so that DTensor has no rules for them: :func:`sharded` runs a public
function on each rank's shards. Nothing is sent unless a tensor lies otherwise than :func:`placements` says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import prefix_prefill
from kernel_reference.checks import fail
from kernel_reference.dtensors import Placements, on_shards, on_shards_of_calls
from prefix_prefill.api import PageLayout

_NEW = {"q": 1, "k": 1, "v": 1, "alibi_slopes": 0, "sinks": 0}


def placements(function: str, *, page_layout: PageLayout = "NHD", return_lse: bool = False) -> Placements:
    """How the tensors of a public function lie on a mesh of one dimension whose ranks share the heads.

    >>> placements("prefix_prefill").inputs["k_cache"]
    2

    Args:
        function: its name.
        page_layout: of the pages that it is called with.
        return_lse: whether the function returns lse too.

    Returns:
        kernel_reference.dtensors.Placements: by argument the dimension that is shared, and of each result; other
        tensors are replicated, scales of a cache too, which are one number then. Caches of ``cascade_attention`` are
        those of each level.

    Raises:
        ValueError: the function is none whose heads may be shared.
    """
    if function in ("prefix_prefill", "cascade_attention"):
        cache = 2 if page_layout == "NHD" else 1
        new = _NEW if function == "prefix_prefill" else {"q": 1, "sinks": 0}
        inputs = {**new, "k_cache": cache, "v_cache": cache, "out": 1}
        return Placements(inputs, (1, 0) if return_lse else (1,), ("out",))
    if function == "context_attention_fwd":
        return Placements({**_NEW, "o": 1, "k_cache": 1, "v_cache": 1}, (), ("o",))
    if function == "merge_attention_states":
        return Placements({"out_a": 1, "lse_a": 0, "out_b": 1, "lse_b": 0, "out": 1}, (1, 0), ("out",))
    known = '"prefix_prefill", "cascade_attention", "context_attention_fwd" or "merge_attention_states"'
    fail("function", known, repr(function))


def sharded(function: str, mesh: Any) -> Callable[..., Any]:
    """A public function over DTensors on this mesh, by ``local_map``: each rank works on its heads.

    Args:
        function: as for :func:`placements`.
        mesh: a ``torch.distributed.device_mesh.DeviceMesh`` of one dimension.

    Returns:
        The function with the same arguments, without a plan. What is written must lie as :func:`placements` says;
        others are redistributed if they do not.

    Raises:
        TypeError, ValueError: as for :func:`placements`; heads that the mesh does not divide.
    """
    placements(function)

    def how(*_: Any, **kwargs: Any) -> Placements:
        return placements(function, **{name: kwargs[name] for name in ("page_layout", "return_lse") if name in kwargs})

    if function == "cascade_attention":
        return lambda q, levels, **options: _cascade(mesh, how(**options), levels, q=q, **options)
    return on_shards_of_calls(getattr(prefix_prefill, function), mesh, how)


def _cascade(mesh: Any, of_level: Placements, levels: Sequence[prefix_prefill.CascadeLevel], **given: Any) -> Any:
    """Cascade attention on shards: each tensor of each level is an argument of its own, ``k_cache_1`` say."""
    fields = prefix_prefill.CascadeLevel._fields
    flat = {f"{field}_{i}": getattr(level, field) for i, level in enumerate(levels) for field in fields}

    def local(**own: Any) -> Any:
        of_rank = [
            prefix_prefill.CascadeLevel(*(own.pop(f"{name}_{i}") for name in fields)) for i in range(len(levels))
        ]
        return prefix_prefill.cascade_attention(levels=of_rank, **own)

    names = [*given, *flat]
    local.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    )
    inputs = {name: of_level.inputs[key] for name in names for key in (name, name.rpartition("_")[0])
              if key in of_level.inputs}  # fmt: skip
    return on_shards(local, mesh, of_level._replace(inputs=inputs))(**given, **flat)
