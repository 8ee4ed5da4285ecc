"""Which calls the kernel for sm_90 can take, as far as strides and scales tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernel_reference.checks import known

if TYPE_CHECKING:
    from prefix_prefill.arguments import PrefillNumbers, PrefillTensors

Tensor = torch.Tensor


def is_tma_addressable(tensors: PrefillTensors, numbers: PrefillNumbers) -> bool:
    """``Problem.tma``: what can be told without the alignment of memory, which a fake tensor has none of."""
    unscaled = tensors.k_scale is None and tensors.v_scale is None and numbers.k_scale == numbers.v_scale == 1
    addressed = (tensors.k, tensors.v, tensors.k_cache, tensors.v_cache)
    return (
        known(tensors.k_cache.shape[0] > 0)
        and (tensors.k_cache.element_size() == 1 or unscaled)
        and numbers.softmax_scale >= 0
        and all(_in_boxes(tensor) for tensor in addressed if tensor is not None)
        and (numbers.page_layout != "x-packed" or _is_in_groups_of_8(tensors))
    )


def _in_boxes(tensor: Tensor) -> bool:
    """Whether strides are such that TMA can address it: whole 16 bytes, all but the last."""
    *steps, last = tensor.stride()
    size = tensor.element_size()
    return known(last == 1) and all(
        known(step > 0) and known(step < 2**39) and known(step * size % 16 == 0) for step in steps
    )


def _is_in_groups_of_8(tensors: PrefillTensors) -> bool:
    """Whether packed pages have keys in groups of 8 elements, and a head's elements side by side, as vLLM's have."""
    page = tensors.k_cache.shape[3]
    found = (tensors.k_cache.shape[4], *tensors.k_cache.stride()[2:], *tensors.v_cache.stride()[2:])
    wanted = (8, 8 * page, 8, 1, page, 1)
    return all(known(one == other) for one, other in zip(found, wanted, strict=True))
