"""What arguments.py does, for the inputs of a chunked delta rule."""

from __future__ import annotations

from typing import Any

import torch

from gdn_split.arguments import (
    FLOATS,
    check_projections,
    check_sizes,
    check_slot_values,
)
from gdn_split.prefill.plan import PrefillPlan, PrefillProblem
from gdn_split.tensors import Prefill, PrefillGradients
from kernel_reference.checks import (
    MemoryOverlap,
    check_dtype,
    check_elements_apart,
    check_same_device,
    describe,
    fail,
    known,
)
from kernel_reference.integers import is_power_of_two
from kernel_reference.ragged import check_cu_seqlens, read_integers

Tensor = torch.Tensor

MAX_CHUNK = 256


def check_prefill(t: Prefill, silu: bool, qk_norm: bool, initial: bool, chunk: int, *sizes: Any) -> PrefillProblem:
    """The op's tensors, then its numbers: the last are the sizes that arguments.py speaks of."""
    shape = check_sizes(*sizes[:5])
    check_projections(t.mixed_qkvz, t.mixed_ba, shape)
    x, channels, heads = t.mixed_qkvz, shape.qkv_width, shape.num_heads_v
    given = {name: tensor for name, tensor in t._asdict().items() if tensor is not None}
    for name, tensor in given.items():
        check_same_device(name, tensor, "mixed_qkvz", x)
        if name in ("cu_seqlens", "slots"):
            check_dtype(name, tensor, torch.int32, torch.int64)
        elif name == "has_initial_state":
            check_dtype(name, tensor, torch.bool)
        else:
            check_dtype(name, tensor, *FLOATS)
    if t.conv_weight.ndim != 2 or t.conv_weight.shape[0] != channels or not 2 <= t.conv_weight.shape[1] <= 4:
        fail("conv_weight", f"[{channels}, width] with width 2, 3 or 4", describe(t.conv_weight))
    _check_vector("cu_seqlens", t.cu_seqlens, None)
    if known(t.cu_seqlens.shape[0] < 1):
        fail("cu_seqlens", "[sequences + 1], at least 1 element", describe(t.cu_seqlens))
    sequences, taps = t.cu_seqlens.shape[0] - 1, t.conv_weight.shape[1] - 1
    _check_vector("A_log", t.A_log, heads)
    _check_vector("dt_bias", t.dt_bias, heads)
    if t.conv_bias is not None:
        _check_vector("conv_bias", t.conv_bias, channels)
    if (t.conv_state is None) != (t.slots is None):
        fail("slots", "given with conv_state, and only then", "one of the two")
    if t.conv_state is not None and t.slots is not None:
        if t.conv_state.ndim != 3 or t.conv_state.shape[1:] != (channels, taps):
            fail("conv_state", f"[num_slots, {channels}, {taps}]", describe(t.conv_state))
        check_elements_apart("conv_state", t.conv_state)
        _check_vector("slots", t.slots, sequences)
    if t.has_initial_state is not None:
        if t.conv_state is None:
            fail("has_initial_state", "True or False without conv_state", describe(t.has_initial_state))
        _check_vector("has_initial_state", t.has_initial_state, sequences)
    if chunk and not (is_power_of_two(chunk) and chunk <= MAX_CHUNK):
        fail("chunk_size", f"None or a power of two up to {MAX_CHUNK}", chunk)
    conv = t.conv_state
    problem = PrefillProblem(
        shape, x.shape[0], sequences, 0 if conv is None else conv.shape[0], (x.stride(0), t.mixed_ba.stride(0)),
        None if conv is None else conv.stride(), t.conv_weight.stride(), taps + 1, sizes[4] == "interleaved", silu,
        qk_norm, initial and conv is not None, chunk,
    )  # fmt: skip
    plan = PrefillPlan.from_ints(sizes[5] if len(sizes) > 5 else None)
    if plan is not None and not plan.covers(problem):
        fail("plan", f"one made for {x.shape[0]} rows of {shape} and chunks of {chunk}", plan)
    return problem


def check_backward(d: PrefillGradients, t: Prefill, *numbers: Any) -> PrefillProblem:
    """The gradients of what :func:`check_prefill` is about, whose numbers these are but for ``initial``."""
    silu, qk_norm, chunk, *sizes = numbers
    problem = check_prefill(t, silu, qk_norm, True, chunk, *sizes)
    shape, rows = problem.shape, t.mixed_qkvz.shape[0]
    heads = (shape.num_heads_qk, shape.head_qk), (shape.num_heads_v, shape.head_v)
    wanted = (*[(rows, *heads[0])] * 2, *[(rows, *heads[1])] * 2, *[(rows, shape.num_heads_v)] * 2)
    for (name, tensor), size in zip(d._asdict().items(), wanted, strict=True):
        check_same_device(f"the gradient of {name}", tensor, "mixed_qkvz", t.mixed_qkvz)
        if tuple(tensor.shape) != size or not tensor.is_contiguous():
            fail(f"the gradient of {name}", f"{list(size)}, contiguous", describe(tensor))
    return problem


def overlap(t: Prefill) -> MemoryOverlap:
    """What refuses a state, which is written, that shares memory with another tensor."""
    return MemoryOverlap(t._asdict(), ("conv_state",) if t.conv_state is not None else ())


def check_values(t: Prefill) -> None:
    """What only device memory tells: bounds and slots. Copies them to the host."""
    bounds = read_integers({"cu_seqlens": t.cu_seqlens})["cu_seqlens"]
    check_cu_seqlens("cu_seqlens", bounds, t.mixed_qkvz.shape[0], "mixed_qkvz")
    if t.slots is not None and t.conv_state is not None:
        check_slot_values(t.slots, t.conv_state.shape[0])


def _check_vector(name: str, tensor: Tensor, length: int | None) -> None:
    wrong = tensor.ndim != 1 or (length is not None and known(tensor.shape[0] != length))
    if wrong or (known(tensor.shape[0] > 1) and tensor.stride(0) != 1):
        fail(name, f"[{'sequences + 1' if length is None else length}], contiguous", describe(tensor))
