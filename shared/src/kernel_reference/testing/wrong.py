"""Changes that make right arguments wrong, for a package's table of the calls that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
