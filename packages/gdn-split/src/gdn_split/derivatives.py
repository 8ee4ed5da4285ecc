"""Derivatives and batching of the split and the merge, for autograd and the transforms of torch.func.

Both are linear, and each is the other's transpose: a tangent is moved as values are, a gradient by the other one. Rows
are independent, so that a batch (torch.vmap) is a call with more rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from kernel_reference.checks import check_no_tangents

Tensor = torch.Tensor


def may_be_asked(*tensors: Tensor) -> bool:
    """Whether a derivative, or a batch, of a result of these tensors may be wanted."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return True
    return is_forward_or_transformed()


def is_transformed() -> bool:
    """Whether a transform of torch.func (grad, jvp, vmap...) is under way. torch.compile knows the name."""
    return torch._C._are_functorch_transforms_active()


def is_forward_or_transformed() -> bool:
    """The same, or a level of torch.autograd.forward_ad.

    Not kernel_reference's ``are_active``, which torch.compile does not trace: here it guards on the level, so that code
    compiled before refuses a tangent.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def refuse_tangents(names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    """For ops that write given tensors: they have no derivative, and a tangent would be dropped."""
    if forward_ad._current_level >= 0:
        check_no_tangents(**dict(zip(names, tensors, strict=True)))


class _Linear(torch.autograd.Function):
    """Inputs are tensors, then the six sizes of the op."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.sizes = inputs[-6:]


class _Split(_Linear):
    @staticmethod
    def forward(*inputs: Any) -> Any:
        return torch.ops.gdn_split.split_inference(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd hands over expanded gradients (of a sum, for one); the op wants packed rows.
        fused = merge(*[gradient.contiguous() for gradient in gradients], *ctx.sizes)
        return (*fused, *[None] * len(ctx.sizes))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return split(*[tangent.contiguous() for tangent in tangents[:2]], *ctx.sizes)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        return _batched(split, info.batch_size, in_dims, inputs)


class _Merge(_Linear):
    @staticmethod
    def forward(*inputs: Any) -> Any:
        return torch.ops.gdn_split.merge_inference(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        parts = split(*[gradient.contiguous() for gradient in gradients], *ctx.sizes)
        return (*parts, *[None] * len(ctx.sizes))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return merge(*[tangent.contiguous() for tangent in tangents[:4]], *ctx.sizes)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        return _batched(merge, info.batch_size, in_dims, inputs)


def split(*inputs: Any) -> Any:
    """The op ``split`` with all derivatives; also its autograd kernel."""
    return _Split.apply(*_with_plan(inputs))  # type: ignore[no-untyped-call]


def merge(*inputs: Any) -> Any:
    """The op ``merge``, likewise."""
    return _Merge.apply(*_with_plan(inputs))  # type: ignore[no-untyped-call]


def _with_plan(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """torch leaves out a plan that is None."""
    return (*inputs, None) if isinstance(inputs[-1], str) else inputs


def _batched(op: Any, batch: int, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...]) -> Any:
    tensors = []
    for tensor, dim in zip(inputs, in_dims, strict=True):
        if isinstance(tensor, Tensor):
            of_batch = tensor.expand(batch, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            tensors.append(of_batch.flatten(0, 1).contiguous())
    results = op(*tensors, *inputs[len(tensors) :])
    rows = tensors[0].shape[0] // batch
    return tuple(result.unflatten(0, (batch, rows)) for result in results), (0,) * len(results)
