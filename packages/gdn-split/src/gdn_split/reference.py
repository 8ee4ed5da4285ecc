"""The ops on a CPU: copies and the convolution as kernel_reference has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gdn_split import arguments, derivatives
from gdn_split.plan import GroupShape
from gdn_split.tensors import Convolve, Merge, Split
from kernel_reference import projection
from kernel_reference.checks import values_are_checked

Tensor = torch.Tensor
Parts = tuple[Tensor, Tensor, Tensor, Tensor]


def new_parts(mixed_qkvz: Tensor, mixed_ba: Tensor, shape: GroupShape) -> Parts:
    """Packed, uninitialised mixed_qkv, z, b, a for these projections."""
    rows, heads = mixed_qkvz.shape[0], shape.num_heads_v
    return (
        mixed_qkvz.new_empty((rows, shape.qkv_width)),
        mixed_qkvz.new_empty((rows, heads, shape.head_v)),
        mixed_ba.new_empty((rows, heads)),
        mixed_ba.new_empty((rows, heads)),
    )


def new_projections(mixed_qkv: Tensor, b: Tensor, shape: GroupShape) -> tuple[Tensor, Tensor]:
    """Packed, uninitialised mixed_qkvz and mixed_ba for these parts."""
    rows = mixed_qkv.shape[0]
    return mixed_qkv.new_empty((rows, shape.qkvz_width)), b.new_empty((rows, shape.ba_width))


def split(mixed_qkvz: Tensor, mixed_ba: Tensor, *sizes: Any) -> Parts:
    """The op ``split``."""
    arguments.check_split(Split(mixed_qkvz, mixed_ba), *sizes)
    mixed_qkv, z, b, a = projection.split(mixed_qkvz, mixed_ba, *sizes[:5])
    return mixed_qkv, z, b, a


def merge(mixed_qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, *sizes: Any) -> tuple[Tensor, Tensor]:
    """The op ``merge``."""
    arguments.check_merge(Merge(mixed_qkv, z, b, a), *sizes)
    mixed_qkvz, mixed_ba = projection.merge(mixed_qkv, z, b, a, *sizes[:5])
    return mixed_qkvz, mixed_ba


def split_into(*given: Any) -> None:
    """The op ``split_into``."""
    t, sizes = Split(*given[:6]), given[6:]
    arguments.check_split(t, *sizes)
    _check_written("split_into", t)
    _copy_into(t[2:], projection.split(t.mixed_qkvz, t.mixed_ba, *sizes[:5]))


def merge_into(*given: Any) -> None:
    """The op ``merge_into``."""
    t, sizes = Merge(*given[:6]), given[6:]
    arguments.check_merge(t, *sizes)
    _check_written("merge_into", t)
    _copy_into(t[4:], projection.merge(*t[:4], *sizes[:5]))


def split_conv1d_update(*given: Any) -> None:
    """The op ``split_conv1d_update``."""
    t, (tokens, silu, *sizes) = Convolve(*given[:10]), given[10:]
    arguments.check_convolve(t, tokens, silu, *sizes)
    _check_written("split_conv1d_update", t)
    if values_are_checked(t.mixed_qkvz.device):
        arguments.check_slot_values(t.slots, t.conv_state.shape[0])
    results = projection.split_conv1d_update(
        *t[:6], *sizes[:4], layout=sizes[4], tokens_per_sequence=tokens, activation="silu" if silu else None,
        compute_dtype=torch.float32,
    )  # fmt: skip
    _copy_into(t[6:], results)


def _check_written(op: str, tensors: Sequence[Tensor | None]) -> None:
    derivatives.refuse_tangents(arguments.names_of(op), tensors)
    arguments.overlap(op, tensors)(*tensors)


def _copy_into(destinations: Sequence[Any], sources: Sequence[Tensor]) -> None:
    for destination, source in zip(destinations, sources, strict=True):
        destination.copy_(source)
