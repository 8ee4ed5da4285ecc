"""Changes that make right arguments wrong, and what calls with them do: for a package's table of refused calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_reference.testing.guards import assert_bitwise_equal, tensors_in

Change = Callable[[dict[str, Any]], None]


def replaced(name: str, value: Any) -> Change:
    """Change one argument: to a value, or to what a function makes of the right one."""

    def change(arguments: dict[str, Any]) -> None:
        arguments[name] = value(arguments.get(name)) if callable(value) else value

    return change


def together(*changes: Change) -> Change:
    """One change after the other."""

    def change(arguments: dict[str, Any]) -> None:
        for one in changes:
            one(arguments)

    return change


@contextmanager
def refused(error: type[Exception], name: str) -> Iterator[None]:
    """A call in here raises this error, in a few lines that name the argument, what it must be and what it was."""
    with pytest.raises((ValueError, TypeError)) as raised:
        yield
    said, _, was = str(raised.value).partition(" must be ")
    assert name in re.findall(r"\w+", said), raised.value
    assert ", got " in was, raised.value
    assert type(raised.value) is error, raised.value
    assert len(str(raised.value)) < 1000, raised.value


def kept(*arguments: Any) -> list[tuple[Tensor, Tensor]]:
    """Every tensor among arguments, with a copy."""
    found = [one for one in tensors_in(arguments) if one.device.type != "meta" and one.layout == torch.strided]
    return [(tensor, tensor.detach().clone()) for tensor in found]


def assert_kept(before: list[tuple[Tensor, Tensor]]) -> None:
    """What :func:`kept` found has been written by nobody."""
    for tensor, copy in before:
        assert_bitwise_equal(tensor, copy, what="a tensor given")


# What `replaced` makes of a tensor that is right.


def elsewhere(tensor: Tensor) -> Tensor:
    """On another device."""
    return tensor.cpu() if tensor.is_cuda else tensor.to("meta")


def overlapping(tensor: Tensor, by: int = 1) -> Tensor:
    """Rows of which each begins in the one before, by so many elements."""
    strides = (tensor.stride(0) - by, *tensor.stride()[1:])
    return torch.zeros(tensor.numel(), dtype=tensor.dtype, device=tensor.device).as_strided(tensor.shape, strides)


def needing_grad(tensor: Tensor) -> Tensor:
    """With gradients, of any dtype: a leaf or what was made of one."""
    return tensor.float().clone().requires_grad_().to(tensor.dtype)


def every_second(tensor: Tensor) -> Tensor:
    """The same values, the last dimension not contiguous."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def one_wider(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor[..., :1]], dim=-1)


def one_less(tensor: Tensor) -> Tensor:
    return tensor[:-1]


def one_rank_more(tensor: Tensor) -> Tensor:
    return tensor[None]


def sparse(tensor: Tensor) -> Tensor:
    return tensor.float().to_sparse()


def as_list(tensor: Tensor) -> Any:
    return tensor.tolist()


def in_half(tensor: Tensor) -> Tensor:
    return tensor.half()


def in_double(tensor: Tensor) -> Tensor:
    return tensor.double()
