"""The fused projections of Gated DeltaNet: their two layouts, taken apart, put together, and convolved.

Sizes: ``num_heads_qk`` QK heads of ``head_qk`` elements and ``num_heads_v = r * num_heads_qk`` V heads of ``head_v``.

- ``interleaved`` (Qwen3-Next): per QK head q, k, then its r heads of v, then its r heads of z; and b (r), a (r).
- ``contiguous`` (Qwen3.5): all q, all k, all v, all z; and all b, all a.

Source of the layouts: the ``in_proj_qkvz`` and ``in_proj_ba`` layers of the models' published definitions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange, repeat

from .checks import as_int, check_tensors, fail

LAYOUTS = ("interleaved", "contiguous")


class Parts(NamedTuple):
    """What one token's projections hold: mixed_qkv [N, q|k|v], z [N, nv, hv], b [N, nv], a [N, nv]."""

    mixed_qkv: torch.Tensor
    z: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor


class Projections(NamedTuple):
    """The fused projections: mixed_qkvz [N, 2*nqk*hq + 2*nv*hv] and mixed_ba [N, 2*nv]."""

    mixed_qkvz: torch.Tensor
    mixed_ba: torch.Tensor


def _check_sizes(num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int, layout: str) -> int:
    """The V heads of a QK head."""
    sizes = {"num_heads_qk": num_heads_qk, "num_heads_v": num_heads_v, "head_qk": head_qk, "head_v": head_v}
    for name, size in sizes.items():
        if as_int(name, size) < 1:
            fail(name, "at least 1", size)
    if num_heads_v % num_heads_qk:
        fail("num_heads_v", f"a multiple of num_heads_qk = {num_heads_qk}", num_heads_v)
    if layout not in LAYOUTS:
        fail("layout", f"one of {', '.join(LAYOUTS)}", repr(layout))
    return num_heads_v // num_heads_qk


def split(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
    layout: str = "interleaved",
) -> Parts:
    """Take the projections apart; exact, for any dtype, differentiable. Results are packed copies."""
    ratio = _check_sizes(num_heads_qk, num_heads_v, head_qk, head_v, layout)
    of_both = (2 * num_heads_qk * head_qk + 2 * num_heads_v * head_v, 2 * num_heads_v)
    for name, tensor, width in zip(("mixed_qkvz", "mixed_ba"), (mixed_qkvz, mixed_ba), of_both, strict=True):
        check_tensors(**{name: tensor})
        if tensor.ndim != 2 or tensor.shape[1] != width:
            fail(name, f"of shape [N, {width}]", list(tensor.shape))
    if layout == "interleaved":
        per_head = mixed_qkvz.unflatten(1, (num_heads_qk, 2 * head_qk + 2 * ratio * head_v))
        parts = per_head.split([head_qk, head_qk, ratio * head_v, ratio * head_v], dim=2)
        q, k, v, z = (rearrange(part, "n g c -> n (g c)") for part in parts)
        b, a = (
            rearrange(part, "n g r -> n (g r)")
            for part in mixed_ba.unflatten(1, (num_heads_qk, 2 * ratio)).split([ratio, ratio], dim=2)
        )
    else:
        widths = [num_heads_qk * head_qk] * 2 + [num_heads_v * head_v] * 2
        q, k, v, z = mixed_qkvz.split(widths, dim=1)
        b, a = mixed_ba.split([num_heads_v, num_heads_v], dim=1)
    return Parts(
        torch.cat([q, k, v], dim=1),
        z.reshape(-1, num_heads_v, head_v).clone(memory_format=torch.contiguous_format),
        b.clone(memory_format=torch.contiguous_format),
        a.clone(memory_format=torch.contiguous_format),
    )


def merge(
    mixed_qkv: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
    layout: str = "interleaved",
) -> Projections:
    """Put the projections together again: the inverse, and so the backward, of :func:`split`."""
    _check_sizes(num_heads_qk, num_heads_v, head_qk, head_v, layout)
    check_tensors(mixed_qkv=mixed_qkv, z=z, b=b, a=a)
    shapes = (
        (2 * num_heads_qk * head_qk + num_heads_v * head_v,),
        (num_heads_v, head_v),
        (num_heads_v,),
        (num_heads_v,),
    )
    for name, tensor, shape in zip(("mixed_qkv", "z", "b", "a"), (mixed_qkv, z, b, a), shapes, strict=True):
        if tensor.shape[1:] != shape or tensor.ndim == 0:
            fail(name, f"of shape [N, {', '.join(map(str, shape))}]", list(tensor.shape))
    q, k, v = mixed_qkv.split([num_heads_qk * head_qk] * 2 + [num_heads_v * head_v], dim=1)
    z = z.flatten(1)
    if layout == "interleaved":
        q, k, v, z, b, a = (rearrange(part, "n (g c) -> n g c", g=num_heads_qk) for part in (q, k, v, z, b, a))
        return Projections(torch.cat([q, k, v, z], dim=2).flatten(1), torch.cat([b, a], dim=2).flatten(1))
    return Projections(torch.cat([q, k, v, z], dim=1), torch.cat([b, a], dim=1))


def split_conv1d_update(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    conv_state: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    slots: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
    *,
    tokens_per_sequence: int = 1,
    activation: str | None = "silu",
    layout: str = "interleaved",
    compute_dtype: torch.dtype = torch.float64,
) -> Parts:
    """Split, then advance a causal depthwise convolution by each sequence's new tokens; changes ``conv_state``.

    ``y_t = act(bias + sum_i weight[c, i] * x[t - width + 1 + i])`` for channel c of q|k|v, older x from
    ``conv_state`` [slots, qkv_dim, width - 1] (newest last). Products and sum are formed in ``compute_dtype``, in which
    ``mixed_qkv`` is returned; the other parts keep their dtype. A slot outside 0 .. len(conv_state) - 1 marks padding:
    its rows are 0 and no state is touched.
    """
    parts = split(mixed_qkvz, mixed_ba, num_heads_qk, num_heads_v, head_qk, head_v, layout)
    check_tensors(conv_state=conv_state, conv_weight=conv_weight, slots=slots)
    check_tensors(**({} if conv_bias is None else {"conv_bias": conv_bias}))
    channels = parts.mixed_qkv.shape[1]
    if conv_state.ndim != 3 or conv_state.shape[1] != channels:
        fail("conv_state", f"of shape [slots, {channels}, width - 1]", list(conv_state.shape))
    if conv_weight.shape != (channels, conv_state.shape[2] + 1):
        fail("conv_weight", f"of shape [{channels}, {conv_state.shape[2] + 1}]", list(conv_weight.shape))
    if conv_bias is not None and conv_bias.shape != (channels,):
        fail("conv_bias", f"of shape [{channels}]", list(conv_bias.shape))
    if as_int("tokens_per_sequence", tokens_per_sequence) < 1:
        fail("tokens_per_sequence", "at least 1", tokens_per_sequence)
    if slots.ndim != 1 or len(slots) * tokens_per_sequence != len(mixed_qkvz):
        fail("slots", f"of shape [N / {tokens_per_sequence}] for N = {len(mixed_qkvz)}", list(slots.shape))
    if activation not in (None, "silu"):
        fail("activation", "None or 'silu'", repr(activation))
    live = (slots >= 0) & (slots < conv_state.shape[0])
    taps = conv_state.shape[2]
    x = rearrange(parts.mixed_qkv, "(s t) c -> s c t", t=tokens_per_sequence)
    history = conv_state[slots[live].long()]
    inputs = torch.cat([history.to(compute_dtype), x[live].to(compute_dtype)], dim=2)
    windows = inputs.unfold(2, taps + 1, 1)
    y = torch.einsum("sctw,cw->sct", windows, conv_weight.to(compute_dtype))
    if conv_bias is not None:
        y = y + conv_bias.to(compute_dtype)[:, None]
    if activation == "silu":
        y = torch.nn.functional.silu(y)
    mixed_qkv = y.new_zeros(x.shape)
    mixed_qkv[live] = y
    conv_state[slots[live].long()] = torch.cat([history, x[live].to(history.dtype)], dim=2)[:, :, -taps:]
    rows = repeat(live, "s -> (s t)", t=tokens_per_sequence)
    zero = torch.zeros((), dtype=torch.bool, device=rows.device)
    return Parts(
        rearrange(mixed_qkv, "s c t -> (s t) c"),
        *(torch.where(rows.view(-1, *[1] * (p.ndim - 1)), p, zero.to(p.dtype)) for p in parts[1:]),
    )


def contiguous_row_order(num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int) -> Projections:
    """For each row of the contiguous projections, that of the interleaved ones that holds it: int64 [rows], [2*nv]."""
    qkvz = torch.arange(2 * num_heads_qk * head_qk + 2 * num_heads_v * head_v, device="cpu")[None]
    ba = torch.arange(2 * num_heads_v, device="cpu")[None]
    parts = split(qkvz, ba, num_heads_qk, num_heads_v, head_qk, head_v, "interleaved")
    return Projections(
        torch.cat([parts.mixed_qkv, parts.z.flatten(1)], dim=1)[0], torch.cat([parts.b, parts.a], dim=1)[0]
    )
