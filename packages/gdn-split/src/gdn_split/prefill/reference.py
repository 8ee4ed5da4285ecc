"""What reference.py does, for the inputs of a chunked delta rule: kernel_reference's in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import softplus

from gdn_split import reference
from gdn_split.prefill import arguments
from gdn_split.prefill.plan import PrefillProblem
from gdn_split.tensors import Prefill, PrefillGradients
from kernel_reference import gated_delta
from kernel_reference.checks import values_are_checked
from kernel_reference.paging import sequence_ranges

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
    arguments.check_prefill(t, *numbers)
    if values_are_checked(t.mixed_qkvz.device):
        arguments.check_values(t)
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


def new_gradients(t: Prefill, problem: PrefillProblem) -> tuple[Tensor, ...]:
    """Packed, uninitialised gradients of mixed_qkvz, mixed_ba, conv_weight, conv_bias (or of none), A_log, dt_bias."""
    widths = problem.shape.qkvz_width, problem.shape.ba_width
    fused = [x.new_empty((x.shape[0], width)) for x, width in zip((t.mixed_qkvz, t.mixed_ba), widths, strict=True)]
    bias = t.mixed_qkvz.new_empty(0) if t.conv_bias is None else t.conv_bias.new_empty(t.conv_bias.shape)
    rest = [weight.new_empty(weight.shape) for weight in (t.A_log, t.dt_bias)]
    return *fused, t.conv_weight.new_empty(t.conv_weight.shape), bias, *rest


def prefill_backward(*given: Any) -> tuple[Tensor, ...]:
    """The op ``prefill_backward``, in float32."""
    d, t, numbers = gradients_and_inputs(given)
    problem = arguments.check_backward(d, t, *numbers)
    silu, qk_norm, chunk, *sizes = numbers
    dq, dk, dv, dz, dg, dbeta = (each.float() for each in d)
    x, _, b, a = (part.float() for part in reference.split(t.mixed_qkvz, t.mixed_ba, *sizes[:5]))
    weight, bias = t.conv_weight.float(), 0.0 if t.conv_bias is None else t.conv_bias.float()
    slope = -t.A_log.float().exp()
    g, of_softplus, beta = (
        softplus(a + t.dt_bias.float()) * slope,
        (a + t.dt_bias.float()).sigmoid() * slope,
        b.sigmoid(),
    )
    d_x, d_y, d_z, d_gate, inside = (torch.zeros_like(each) for each in (x, x, dz, dg, b[:, :1]))
    d_weight, taps = torch.zeros_like(weight), weight.shape[1] - 1
    for begin, end in sequence_ranges("cu_seqlens", t.cu_seqlens, len(x)):
        rows, count = slice(begin, end), end - begin
        if count == 0:
            continue
        window = torch.cat([x.new_zeros(taps, x.shape[1]), x[rows]]).unfold(0, taps + 1, 1)
        y = (window * weight).sum(2) + bias
        made = y * y.sigmoid() if silu else y
        parts = made.split([dq[0].numel()] * 2 + [dv[0].numel()], 1)
        found: list[Tensor] = []
        for part, gradient in zip(parts, (dq[rows], dk[rows], dv[rows]), strict=True):
            part = part.reshape(gradient.shape)
            if qk_norm and len(found) < 2:
                r = (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
                gradient = r * (gradient - part * r * r * (part * gradient).sum(-1, keepdim=True))
            found.append(gradient.flatten(1))
        of_y = torch.cat(found, 1)
        d_y[rows] = of_y * (y.sigmoid() * (1 + y * (1 - y.sigmoid()))) if silu else of_y
        d_weight += (d_y[rows, :, None] * window).sum(0)
        of_window = d_y[rows, :, None] * weight
        padded = x.new_zeros(count + taps, x.shape[1])
        for i in range(taps + 1):
            padded[i : i + count] += of_window[:, :, i]
        d_x[rows], d_z[rows], inside[rows] = padded[taps:], dz[rows], 1
        pieces = dg[rows].split(chunk or count)
        d_gate[rows] = torch.cat([each.flip(0).cumsum(0).flip(0) for each in pieces]) if chunk else dg[rows]
    d_a = d_gate * of_softplus
    inside = inside != 0
    d_b = torch.where(inside, dbeta * beta * (1 - beta), 0)
    qkvz, ba = reference.merge(d_x, d_z, d_b, d_a, *sizes[:5])
    sums = torch.where(inside, d_gate * g, 0).sum(0), d_a.sum(0)
    d_bias = x.new_zeros(0) if t.conv_bias is None else d_y.sum(0)
    results = new_gradients(t, problem)
    for into, source in zip(results, (qkvz, ba, d_weight, d_bias, *sums), strict=True):
        into.copy_(source)
    return results


def gradients_and_inputs(given: tuple[Any, ...]) -> tuple[PrefillGradients, Prefill, tuple[Any, ...]]:
    """What the op ``prefill_backward`` is given."""
    qkvz, ba, weight, bias, cu_seqlens, a_log, dt_bias, *numbers = given[6:]
    t = Prefill(qkvz, ba, weight, bias, cu_seqlens, None, None, None, a_log, dt_bias)
    return PrefillGradients(*given[:6]), t, tuple(numbers)


def keep_inputs(*given: Any) -> None:
    """The op ``keep_inputs``."""
    t, numbers = Prefill(*given[:10]), given[10:]
    _, _, initial, _, *sizes = numbers
    arguments.check_prefill(t, *numbers)
    arguments.overlap(t)(*t)
    if t.conv_state is not None and t.slots is not None:
        has = initial if t.has_initial_state is None else t.has_initial_state
        gated_delta.keep_inputs(
            t.mixed_qkvz, t.cu_seqlens, t.conv_state, t.slots, gated_delta.Sizes(*sizes[:5]), has
        )  # fmt: skip
