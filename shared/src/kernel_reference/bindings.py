"""What Triton compiled, found again by launches of other sizes without its binding of arguments.

A server's batches have new sizes every step. Each is a launch of its own, for which Triton's ``kernel[grid](...)``
looks at every argument before it finds what it compiled for the batch before: 100 to 200 us of host time. This table
asks less, and more strictly: integers that a kernel is not specialised on may differ, all else must be equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kernel_reference.errors import fail
from kernel_reference.starting import Starter, find_starter

# More than any process compiles; past them all are forgotten and bound once more.
_MOST = 4096
# The kernel is kept, so that its number stays its own.
_found: dict[Hashable, tuple[Any, Compiled | None]] = {}
# Of what a GPU has too little, by Triton's name for it.
_COUNTED = {"shared memory": "bytes of shared memory", "tensor memory": "columns of tensor memory"}


def bind(kernel: Any, grid: tuple[int, int, int], arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Triton's own way to start a kernel, which compiles what is not compiled, and returns that.

    ValueError names ``plan`` where a program would need more than the GPU has: only the compiler knows how much.
    """
    try:
        return kernel[grid](*arguments, **options)
    except Exception as error:
        if type(error).__name__ != "OutOfResources":
            raise
        required, limit, name = (getattr(error, field, "?") for field in ("required", "limit", "name"))
        most = f"{limit} {_COUNTED.get(name, name)} at most"
        wanted = f"one whose kernels need {most}, as of smaller blocks or with fewer stages or warps"
        fail("plan", wanted, f"one that needs {required} in {getattr(kernel, '__name__', 'a kernel')}")


def signature_of(
    kernel: Any,
    rest: Sequence[Any],
    tensors: Sequence[torch.Tensor | None],
    others: Hashable,
    options: Mapping[str, Any],
) -> Hashable | None:
    """All that tells compiled forms of ``kernel`` apart: None where it cannot be told, as in the interpreter.

    rest: its last arguments, behind the tensors, which are 16-byte aligned. others: what else it is compiled for, as
    groups of tensors and boxes of descriptors.
    """
    params = getattr(kernel, "params", None)
    if not params or len(params) < len(rest):
        return None
    behind = params[len(params) - len(rest) :]
    values = tuple([_value(param, value) for param, value in zip(behind, rest, strict=True)])
    kinds = tuple([x if x is None else x.dtype for x in tensors])
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    signature = (id(kernel), device, kinds, values, others, tuple(options.items()))
    try:
        hash(signature)
    except TypeError:
        return None
    return signature


class Compiled(NamedTuple):
    """What ``kernel[grid](...)`` returned, and its short way: see starting.py. One for all launches that it serves."""

    compiled: Any
    starter: Starter | None


def find_compiled(signature: Hashable | None) -> Compiled | None:
    """What was compiled for it; None where nothing was."""
    return None if signature is None else _found.get(signature, (None, None))[1]


def keep_compiled(signature: Hashable | None, kernel: Any, compiled: Any) -> Compiled:
    """Remember what ``kernel[grid](...)`` returned."""
    kept = Compiled(compiled, find_starter(compiled))
    if signature is not None:
        if len(_found) >= _MOST:
            _found.clear()
        _found[signature] = kernel, kept
    return kept


def _value(param: Any, value: Any) -> Hashable:
    if param.do_not_specialize and type(value) is int:
        # Triton takes it as 32 bits, 64 bits, or 64 bits without a sign.
        return -(2**31) <= value < 2**31, value < 2**63
    return _frozen(value)


def _frozen(value: Any) -> Hashable:
    """With its type, as 1, 1.0 and True are equal."""
    if isinstance(value, tuple):
        return type(value), tuple([_frozen(one) for one in value])
    return type(value), value
