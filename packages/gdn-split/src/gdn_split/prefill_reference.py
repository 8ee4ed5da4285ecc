"""What reference.py does, for the inputs of a chunked delta rule: kernel_reference's in float32."""

from __future__ import annotations

from typing import Any

import torch

from gdn_split import prefill_arguments
from gdn_split.plan import PrefillProblem
from gdn_split.tensors import Prefill
from kernel_reference import gated_delta
from kernel_reference.checks import values_are_checked

Tensor = torch.Tensor


def new_inputs(mixed_qkvz: Tensor, problem: PrefillProblem) -> tuple[Tensor, ...]:
    """Packed, uninitialised q, k, v, z, g and beta for these projections."""
    shape, rows = problem.shape, mixed_qkvz.shape[0]
    heads = [(shape.num_heads_qk, shape.head_qk)] * 2 + [(shape.num_heads_v, shape.head_v)] * 2
    gates = [mixed_qkvz.new_empty((rows, shape.num_heads_v), dtype=torch.float32) for _ in range(2)]
    return *[mixed_qkvz.new_empty((rows, *size)) for size in heads], *gates


def prefill_inputs(*given: Any) -> tuple[Tensor, ...]:
    """The op ``prefill_inputs``."""
    t, numbers = Prefill(*given[:10]), given[10:]
    prefill_arguments.check_prefill(t, *numbers)
    if values_are_checked(t.mixed_qkvz.device):
        prefill_arguments.check_values(t)
    return _inputs(t, numbers)


def _inputs(t: Prefill, numbers: tuple[Any, ...]) -> tuple[Tensor, ...]:
    silu, qk_norm, initial, chunk, *sizes = numbers
    options = gated_delta.Options(
        qk_norm=qk_norm, activation="silu" if silu else None, compute_dtype=torch.float32
    )  # fmt: skip
    found = gated_delta.prefill_inputs(
        t.mixed_qkvz, t.mixed_ba, t.cu_seqlens, gated_delta.Sizes(*sizes[:5]),
        gated_delta.Layer(t.conv_weight, t.conv_bias, t.A_log, t.dt_bias), options, conv_state=t.conv_state,
        slots=t.slots, has_initial_state=initial if t.has_initial_state is None else t.has_initial_state,
        chunk_size=chunk or None,
    )  # fmt: skip
    return *[each.to(t.mixed_qkvz.dtype).contiguous() for each in found[:4]], *[gate.contiguous() for gate in found[4:]]


def keep_inputs(*given: Any) -> None:
    """The op ``keep_inputs``."""
    t, numbers = Prefill(*given[:10]), given[10:]
    _, _, initial, _, *sizes = numbers
    prefill_arguments.check_prefill(t, *numbers)
    prefill_arguments.overlap(t)(*t)
    if t.conv_state is not None and t.slots is not None:
        has = initial if t.has_initial_state is None else t.has_initial_state
        gated_delta.keep_inputs(
            t.mixed_qkvz, t.cu_seqlens, t.conv_state, t.slots, gated_delta.Sizes(*sizes[:5]), has
        )  # fmt: skip
