"""Launches: ask the plan, set the grid, start the kernel on the tensors' device and its current stream.

Nothing here checks arguments (arguments.py does). On CPU tensors a call works only under Triton's interpreter
(TRITON_INTERPRET=1, set before triton is imported) and with a plan given: that is how kernels are tested with no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton

from gdn_split.kernels import split_and_convolve, split_by_group, split_by_run
from gdn_split.plan import ConvPlan, DeviceLimits, GroupShape, SplitPlan, plan_conv, plan_split, power_of_two_at_least

Tensor = torch.Tensor

# Copies that Triton cannot name, or would change (bool is normalised to 0 and 1), travel as integers of their size.
_AS_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COPIED_AS_THEY_ARE = frozenset(
    [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64]
)


class Launch:
    """One launch made ready: a kernel, its grid and every argument but the tensors.

    Called with the tensors, in the kernel's order, all of the dtypes, strides and device it was made for. From the
    second call on Triton's binding of arguments is skipped (half of a launch's host time): all that it would specialise
    on is fixed here but the pointers' alignment, and tensors that are not 16-byte aligned go through it again.
    """

    def __init__(
        self,
        kernel: Any,
        plan: SplitPlan | ConvPlan,
        rest: tuple[int | bool, ...],
        device: torch.device,
        as_bits: Sequence[int] = (),
    ) -> None:
        self._kernel = kernel
        self._grid = (plan.programs, 1, 1)
        self._rest = rest
        self._options: dict[str, Any] = {"num_warps": plan.num_warps}
        if plan.dependent_launch:
            self._options["launch_pdl"] = True
        # The places of tensors to hand over as integers.
        self._as_bits = frozenset(as_bits)
        # Triton launches on the current device; with one device there is nothing to ask.
        self._guarded = device if device.type == "cuda" and torch.cuda.device_count() > 1 else None
        self._run: Callable[..., None] | None = None

    def __call__(self, *tensors: Tensor) -> None:
        if self._guarded is None or self._guarded.index == torch.cuda.current_device():
            self._start(tensors)
        else:
            with torch.cuda.device(self._guarded):
                self._start(tensors)

    def _start(self, tensors: tuple[Tensor, ...]) -> None:
        pointers = [tensor.data_ptr() for tensor in tensors]
        aligned = not any([pointer & 15 for pointer in pointers])
        if self._run is not None and aligned:
            self._run(*pointers, *self._rest)
            return
        if self._as_bits:
            tensors = tuple(
                tensor.view(_AS_BITS[tensor.element_size()]) if place in self._as_bits else tensor
                for place, tensor in enumerate(tensors)
            )
        compiled = self._kernel[self._grid](*tensors, *self._rest, **self._options)
        # The interpreter compiles nothing and returns None.
        if compiled is not None and aligned:
            self._run = compiled[self._grid]


@lru_cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of the device a tensor is on, from its Triton driver. The NPU branch, for Ascend, is unmeasured."""
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    if "num_vectorcore" in properties:
        return DeviceLimits(cores=properties["num_vectorcore"])
    return DeviceLimits(
        cores=properties["multiprocessor_count"],
        on_chip_bytes=properties["max_shared_mem"],
        programs_per_core=8,
        dependent_launch=torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0),
    )


def prepare_move(
    qkvz: Tensor, ba: Tensor, parts: Sequence[Tensor], shape: GroupShape, layout: str, merge: bool,
    plan: SplitPlan | None = None,
) -> Callable[..., None]:  # fmt: skip
    """What copies the projections into the parts, or back, called with (qkvz, ba, mixed_qkv, z, b, a) like these."""
    rows = qkvz.shape[0]
    if rows == 0:
        return _nothing
    if plan is None:
        row_bytes = qkvz.shape[1] * qkvz.element_size() + ba.shape[1] * ba.element_size()
        plan = plan_split(rows, shape, row_bytes, device_limits(qkvz.device))
    strides = [tensor.stride(0) for tensor in (qkvz, ba, *parts)]
    sizes = (shape.num_heads_qk, shape.ratio, shape.head_qk, shape.head_v, layout == "interleaved", merge)
    rest: tuple[int | bool, ...]
    if plan.rows_per_program:
        kernel = split_by_run
        rest = (rows, plan.rows_per_program, *strides, *sizes, plan.rows_per_step, *_blocks(shape))
    else:
        kernel = split_by_group
        steps = (plan.rows_per_step, plan.rows_per_step_ba)
        rest = (rows, *strides, *sizes, *steps, *_blocks(shape), plan.dependent_launch)
    return Launch(kernel, plan, rest, qkvz.device, () if {qkvz.dtype, ba.dtype} <= _COPIED_AS_THEY_ARE else range(6))


def prepare_split_conv1d_update(
    qkvz: Tensor, ba: Tensor, conv_state: Tensor, conv_weight: Tensor, has_bias: bool, slots: Tensor,
    parts: Sequence[Tensor], shape: GroupShape, tokens: int, silu: bool, layout: str, plan: ConvPlan | None = None,
) -> Callable[..., None]:  # fmt: skip
    """What splits and convolves when called with (qkvz, ba, state, weight, bias, slots, mixed_qkv, z, b, a) like these.

    Without a bias any tensor may stand in its place: it is not read.
    """
    sequences = slots.shape[0]
    if sequences == 0:
        return _nothing
    if plan is None:
        adjacent = conv_state.stride(2) == 1 and conv_state.stride(1) > 1
        plan = plan_conv(sequences, tokens, shape, device_limits(qkvz.device), adjacent)
    s_slot, s_channel, s_tap = conv_state.stride()
    rest = (
        sequences, conv_state.shape[0], qkvz.stride(0), ba.stride(0), s_slot, *[part.stride(0) for part in parts],
        s_channel, s_tap, *conv_weight.stride(),
        shape.num_heads_qk, shape.ratio, shape.head_qk, shape.head_v, layout == "interleaved",
        tokens, conv_weight.shape[1], has_bias, silu,
        plan.sequences_per_program, plan.rows_per_step_ba, plan.block, _blocks(shape)[2], plan.dependent_launch,
    )  # fmt: skip
    # mixed_ba, b and a are copied; all else is a float.
    return Launch(split_and_convolve, plan, rest, qkvz.device, () if ba.dtype in _COPIED_AS_THEY_ARE else (1, 8, 9))


def _nothing(*_: object) -> None:
    """The launch over no rows."""


def _blocks(shape: GroupShape) -> tuple[int, int, int]:
    return (
        power_of_two_at_least(shape.head_qk),
        power_of_two_at_least(shape.ratio * shape.head_v),
        power_of_two_at_least(shape.num_heads_v),
    )
