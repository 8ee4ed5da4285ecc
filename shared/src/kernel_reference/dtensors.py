"""DTensors in functions and ops that know tensors alone: placements by argument, through torch's own experimental API.

A package's table says by which dimension its tensors may be shared, by heads say. :func:`on_shards` runs a function on
the local shards (``torch.distributed.tensor.experimental.local_map``); :func:`register_sharding` tells DTensor how an
op's tensors may be shared, so that calls on DTensors communicate nothing. Importing this imports DTensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.experimental import register_sharding as _register_sharding

from .checks import describe, fail

Tensor = torch.Tensor


class Placements(NamedTuple):
    """How the tensors of a call lie on a mesh of one dimension.

    inputs: by argument the dimension that is shared; those that are not named are replicated. outputs: the same of each
    result. written: the arguments that are written in place, which are never redistributed.
    """

    inputs: Mapping[str, int]
    outputs: tuple[int, ...]
    written: tuple[str, ...] = ()

    def of(self, name: str) -> Any:
        """The placement of an argument, a ``torch.distributed.tensor.Placement``."""
        return Shard(self.inputs[name]) if name in self.inputs else Replicate()


def on_shards(function: Callable[..., Any], mesh: Any, placements: Placements) -> Callable[..., Any]:
    """``function`` over DTensors: called with local shards, its results made DTensors again.

    Inputs that lie otherwise are redistributed; one that is written must lie as said. Arguments that are no tensors
    pass as they are. Sizes of shared dimensions are multiples of the mesh's.

    Args:
        function: with a signature whose tensors are arguments of their own.
        mesh: a ``torch.distributed.device_mesh.DeviceMesh`` of one dimension.
        placements: of its arguments and results.

    Raises TypeError or ValueError, naming the argument.
    """
    if mesh.ndim != 1:
        fail("mesh", 'of one dimension (mesh["tp"], say)', f"{mesh.ndim} dimensions")
    signature = inspect.signature(function)
    outputs = tuple([[Shard(dim)] for dim in placements.outputs]) or (None,)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        tensors = {name: given for name, given in bound.arguments.items() if isinstance(given, torch.Tensor)}
        for name, tensor in tensors.items():
            wanted = placements.of(name)
            if isinstance(tensor, DTensor):
                if name in placements.written and tensor.placements != (wanted,):
                    fail(name, f"placed as {wanted}, as it is written in place", tensor.placements)
                if isinstance(wanted, Shard) and tensor.shape[wanted.dim] % mesh.size():
                    fail(name, f"of a multiple of {mesh.size()} along dimension {wanted.dim}", list(tensor.shape))
            elif isinstance(wanted, Shard):
                fail(name, "a DTensor", describe(tensor), TypeError)

        def local(*shards: Tensor) -> Any:
            bound.arguments.update(zip(tensors, shards, strict=True))
            return function(*bound.args, **bound.kwargs)

        mapped: Any = local_map(
            local, outputs, tuple([[placements.of(name)] for name in tensors]), device_mesh=mesh,
            redistribute_inputs=True,
        )  # fmt: skip
        return mapped(*tensors.values())

    return call


def on_shards_of_calls(function: Callable[..., Any], mesh: Any, how: Callable[..., Placements]) -> Callable[..., Any]:
    """:func:`on_shards` where ``how`` says, of the arguments of each call, how its tensors lie.

    A plan is refused with ValueError: it is of a rank's own heads and lengths.
    """

    def call(*args: Any, plan: None = None, **kwargs: Any) -> Any:
        if plan is not None:
            fail("plan", "None on DTensors: it is of a rank's own heads and lengths", type(plan).__name__)
        return on_shards(function, mesh, how(*args, **kwargs))(*args, **kwargs)

    return call


def placements_in(table: Mapping[tuple[str, str], Placements], function: str, by: str) -> Placements:
    """The placements of a public function shared ``by`` heads, say; ValueError names the ways that there are."""
    found = table.get((function, by))
    if found is None:
        ways = ", ".join(f'"{way}"' for name, way in table if name == function)
        fail("by", f"one of {ways} for {function}" if ways else "of a public function", (function, by))
    return found


def register_sharding(
    op: Any, shardings: Iterable[Placements], offers: Callable[[Placements, Mapping[str, Any]], bool] | None = None
) -> None:
    """Tell DTensor that an op runs on shards without communication, placed by one of ``shardings`` or replicated.

    op: an overload such as ``torch.ops.my_package.attend.default`` that writes nothing in place. offers: whether a
    sharding is possible for given tensors, by name, all of which have a shape.
    """
    arguments = op._schema.arguments
    known = tuple(shardings)

    def acceptable(*given: Any) -> Sequence[tuple[list[Any], list[Any]]]:
        tensors = {
            argument.name: value for argument, value in zip(arguments, given, strict=False)
            if "Tensor" in str(argument.type) and value is not None
        }  # fmt: skip
        results = len(op._schema.returns)
        replicated = Placements({}, ())
        found: list[tuple[list[Any], list[Any]]] = [
            ([Replicate()] * results, _placed(replicated, given, arguments, tensors))
        ]
        for sharding in known:
            if offers is None or offers(sharding, tensors):
                outputs = [Shard(dim) for dim in sharding.outputs]
                found.append((outputs, _placed(sharding, given, arguments, tensors)))
        return found

    _register_sharding(op)(acceptable)


def _placed(placements: Placements, given: Sequence[Any], arguments: Any, tensors: Mapping[str, Any]) -> list[Any]:
    names = [argument.name for argument in arguments[: len(given)]]
    return [placements.of(name) if name in tensors else None for name in names]
