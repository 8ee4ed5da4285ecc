"""A step of Gated DeltaNet from the fused projections to the gated outputs, token by token: its definition.

For each V head, with S [Dk, Dv] its state, q and k those of its QK head after the convolution, divided by
``sqrt(sum of squares + 1e-6)``, and v after the convolution::

    g = -exp(A_log) softplus(a + dt_bias)        beta = sigmoid(b)
    S = exp(g) S       u = beta (v - S^T k)      S = S + k u^T       o = S^T (scale q)

With a norm ``o / sqrt(mean(o^2) + eps) * weight * silu(z)`` follows. Source: Gated Delta Networks (arXiv 2412.06464),
and the layers ``Qwen3NextGatedDeltaNet`` and ``Qwen3NextRMSNormGated`` of the models' published definitions.

States are carried in ``compute_dtype`` from token to token, and rounded when they are written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import silu, softplus

from .checks import as_int, check_choice, check_tensors, fail
from .paging import sequence_ranges
from .projection import split

STATE_LAYOUTS = ("KV", "VK")
Tensor = torch.Tensor


class Sizes(NamedTuple):
    """Heads and head sizes of a layer, and the order in which its projections hold them."""

    num_heads_qk: int
    num_heads_v: int
    head_qk: int
    head_v: int
    layout: str = "interleaved"


class Layer(NamedTuple):
    """What a layer has learned: the convolution's weight [qkv_dim, width] and bias, A_log and dt_bias [Hv]."""

    conv_weight: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor


class Options(NamedTuple):
    """What :func:`decode_step` computes besides the recurrence; ``scale`` None is Dk^-0.5."""

    norm_weight: Tensor | None = None
    norm_eps: float = 1e-6
    qk_norm: bool = True
    scale: float | None = None
    activation: str | None = "silu"
    state_layout: str = "KV"
    compute_dtype: torch.dtype = torch.float64


class Inputs(NamedTuple):
    """What a chunked delta rule takes: q, k [T, Hqk, Dk], v, z [T, Hv, Dv], the log decays g and beta [T, Hv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    g: Tensor
    beta: Tensor


class _Nodes(NamedTuple):
    """Of each token of each sequence the output, and the inputs and the state that the token after it begins with."""

    out: Tensor  # [B, T, Hv, Dv]
    history: Tensor  # [B, T, qkv_dim, width - 1]
    state: Tensor  # [B, T, Hv, Dk, Dv]


def decode_step(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    conv_state: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    sizes: Sizes,
    layer: Layer,
    options: Options = Options(),  # noqa: B008  immutable
    tokens_per_sequence: int = 1,
) -> Tensor:
    """The outputs [N, Hv, Dv] of each sequence's new tokens, in ``compute_dtype``; both states advance in their pools.

    Args:
        mixed_qkvz, mixed_ba: [N, ...] as :func:`.projection.split` takes them, N = len(slots) * tokens_per_sequence.
        conv_state: [slots, qkv_dim, width - 1], the newest input last.
        state_pool: [slots, Hv, Dk, Dv], or [slots, Hv, Dv, Dk] with ``state_layout="VK"``.
        slots: [S]; one that is in no pool is padding, whose outputs are 0.
    """
    nodes, live, rows = _nodes(mixed_qkvz, mixed_ba, conv_state, state_pool, slots, sizes, layer, options,
                               tokens_per_sequence)  # fmt: skip
    if nodes.out.shape[1]:
        _write(conv_state, state_pool, rows, nodes.history[:, -1], nodes.state[:, -1], options)
    return _with_padding(nodes.out, live)


def verify(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    conv_state: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    sizes: Sizes,
    layer: Layer,
    options: Options = Options(),  # noqa: B008  immutable
    tokens_per_sequence: int = 1,
    parents: Tensor | None = None,
) -> Tensor:
    """What :func:`decode_step` returns, the states left as they are.

    parents: [S, T]: the token that each one continues, before it in its sequence, or -1 for the states of the pools;
    without it each continues the one before.
    """
    nodes, live, _ = _nodes(mixed_qkvz, mixed_ba, conv_state, state_pool, slots, sizes, layer, options,
                            tokens_per_sequence, parents)  # fmt: skip
    return _with_padding(nodes.out, live)


def commit(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    conv_state: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    accepted: Tensor,
    sizes: Sizes,
    layer: Layer,
    options: Options = Options(),  # noqa: B008  immutable
    tokens_per_sequence: int = 1,
    path: Tensor | None = None,
) -> None:
    """Advance both states by the first ``accepted`` [S] tokens of each sequence, or of a ``path`` [S, P] of them."""
    sequences = len(slots)
    if path is not None:
        order = path.long() + tokens_per_sequence * torch.arange(sequences, device=path.device)[:, None]
        mixed_qkvz, mixed_ba = mixed_qkvz[order.flatten()], mixed_ba[order.flatten()]
        tokens_per_sequence = path.shape[1]
    if not tokens_per_sequence:
        return
    nodes, live, rows = _nodes(mixed_qkvz, mixed_ba, conv_state, state_pool, slots, sizes, layer, options,
                               tokens_per_sequence)  # fmt: skip
    counts = accepted[live].long()
    some = counts > 0
    last = counts[some] - 1
    _write(
        conv_state, state_pool, rows[some], nodes.history[some, last], nodes.state[some, last], options
    )  # fmt: skip


def prefill_inputs(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    cu_seqlens: Tensor,
    sizes: Sizes,
    layer: Layer,
    options: Options = Options(),  # noqa: B008  immutable
    *,
    conv_state: Tensor | None = None,
    slots: Tensor | None = None,
    has_initial_state: Tensor | bool = True,
    chunk_size: int | None = None,
) -> Inputs:
    """What the delta rule is given for packed sequences: split, convolved, q and k normed, gates; all in compute_dtype.

    Sequence i is rows cu_seqlens[i] to cu_seqlens[i + 1] - 1; rows of none are 0. Where it has an initial state, the
    inputs before its first are ``conv_state[slots[i]]`` [qkv_dim, width - 1], which :func:`keep_inputs` advances; else
    zeros. ``chunk_size``: g is summed from the first token of each chunk of so many on. Differentiable.
    """
    dtype, hq, hv = options.compute_dtype, sizes.head_qk, sizes.head_v
    parts = split(mixed_qkvz, mixed_ba, *sizes[:4], sizes.layout)
    x, z, b, a = (part.to(dtype) for part in parts)
    z = z.clone()
    g = -layer.A_log.to(dtype).exp() * softplus(a + layer.dt_bias.to(dtype))
    beta = b.sigmoid()
    taps, weight = layer.conv_weight.shape[1] - 1, layer.conv_weight.to(dtype)
    rows, sums, inside = [], [], torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for i, (begin, end) in enumerate(sequence_ranges("cu_seqlens", cu_seqlens, len(x))):
        before = _initial_inputs(conv_state, slots, has_initial_state, i)
        before = x.new_zeros(taps, x.shape[1]) if before is None else before.to(dtype).T
        inputs = torch.cat([before, x[begin:end]])
        rows.append((inputs.unfold(0, taps + 1, 1) * weight).sum(2) if end > begin else inputs[:0])
        pieces = g[begin:end].split(chunk_size or max(1, end - begin))
        sums.append(torch.cat([piece.cumsum(0) for piece in pieces]) if chunk_size else g[begin:end])
        inside[begin:end] = True
    y = x.new_zeros(x.shape).index_put((inside.nonzero()[:, 0],), torch.cat(rows)) if rows else x * 0
    if layer.conv_bias is not None:
        y = y + layer.conv_bias.to(dtype)
    y = silu(y) if options.activation == "silu" else y
    g = g.new_zeros(g.shape).index_put((inside.nonzero()[:, 0],), torch.cat(sums)) if sums else g * 0
    widths = [sizes.num_heads_qk * hq] * 2 + [sizes.num_heads_v * hv]
    q, k, v = (part.unflatten(1, (-1, size)) for part, size in zip(y.split(widths, 1), (hq, hq, hv), strict=True))
    if options.qk_norm:
        q, k = (each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (q, k))
    q, k, v, z = (torch.where(inside[:, None, None], each, 0) for each in (q, k, v, z))
    return Inputs(q, k, v, z, g, torch.where(inside[:, None], beta, 0))


def keep_inputs(
    mixed_qkvz: Tensor,
    cu_seqlens: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    sizes: Sizes,
    has_initial_state: Tensor | bool = True,
) -> None:
    """Write each sequence's last inputs to its slot of ``conv_state``; an empty sequence leaves it as it was."""
    x = split(mixed_qkvz, mixed_qkvz[:, : 2 * sizes.num_heads_v], *sizes[:4], sizes.layout).mixed_qkv
    taps = conv_state.shape[2]
    kept = []
    for i, (begin, end) in enumerate(sequence_ranges("cu_seqlens", cu_seqlens, len(x))):
        slot = int(slots[i])
        if end > begin and 0 <= slot < len(conv_state):
            before = _initial_inputs(conv_state, slots, has_initial_state, i)
            before = torch.zeros_like(conv_state[slot]) if before is None else before
            kept.append((slot, torch.cat([before, x[begin:end].T.to(before.dtype)], 1)[:, -taps:]))
    for slot, inputs in kept:
        conv_state[slot] = inputs


def _initial_inputs(conv_state: Tensor | None, slots: Tensor | None, has: Tensor | bool, i: int) -> Tensor | None:
    if conv_state is None or slots is None or not 0 <= int(slots[i]) < len(conv_state):
        return None
    return conv_state[int(slots[i])] if bool(has if isinstance(has, bool) else has[i]) else None


def _nodes(
    mixed_qkvz: Tensor, mixed_ba: Tensor, conv_state: Tensor, state_pool: Tensor, slots: Tensor, sizes: Sizes,
    layer: Layer, options: Options, tokens: int, parents: Tensor | None = None,
) -> tuple[_Nodes, Tensor, Tensor]:  # fmt: skip
    """Every token of the sequences that are no padding; which these are, and their slots."""
    check_tensors(conv_state=conv_state, state_pool=state_pool, slots=slots)
    check_choice("state_layout", options.state_layout, STATE_LAYOUTS)
    if as_int("tokens_per_sequence", tokens) < 1:
        fail("tokens_per_sequence", "at least 1", tokens)
    if slots.ndim != 1 or len(slots) * tokens != len(mixed_qkvz):
        fail("slots", f"of shape [N / {tokens}] for N = {len(mixed_qkvz)}", list(slots.shape))
    if options.activation not in (None, "silu"):
        fail("activation", "None or 'silu'", repr(options.activation))
    dtype, hq, hv = options.compute_dtype, sizes.head_qk, sizes.head_v
    parts = split(mixed_qkvz, mixed_ba, *sizes[:4], sizes.layout)
    live = (slots >= 0) & (slots < min(len(conv_state), len(state_pool)))
    rows = slots[live].long()
    x, z, b, a = (part.unflatten(0, (-1, tokens))[live].to(dtype) for part in parts)
    history = conv_state[rows].to(dtype)
    state = state_pool[rows].to(dtype)
    state = state if options.state_layout == "KV" else state.mT
    scale = hq**-0.5 if options.scale is None else options.scale
    g = -layer.A_log.to(dtype).exp() * softplus(a + layer.dt_bias.to(dtype))
    beta = b.sigmoid()
    outs: list[Tensor] = []
    # Entry 0 is the pools', entry t + 1 what token t leaves.
    histories, states = [history], [state]
    for t in range(tokens):
        if parents is None:
            before, carried = histories[t], states[t]
        else:
            of = (parents[live, t].long() + 1, torch.arange(len(rows), device=rows.device))
            before, carried = torch.stack(histories)[of], torch.stack(states)[of]
        inputs = torch.cat([before, x[:, t, :, None]], dim=2)
        y = (inputs * layer.conv_weight.to(dtype)).sum(2)
        if layer.conv_bias is not None:
            y = y + layer.conv_bias.to(dtype)
        y = silu(y) if options.activation == "silu" else y
        widths = [sizes.num_heads_qk * hq] * 2 + [sizes.num_heads_v * hv]
        q, k, v = (part.unflatten(1, (-1, size)) for part, size in zip(y.split(widths, 1), (hq, hq, hv), strict=True))
        if options.qk_norm:
            q, k = (each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (q, k))
        q, k = (each.repeat_interleave(sizes.num_heads_v // sizes.num_heads_qk, 1) for each in (q, k))
        carried = carried * g[:, t, :, None, None].exp()
        u = beta[:, t, :, None] * (v - torch.einsum("bhkv,bhk->bhv", carried, k))
        carried = carried + k[..., None] * u[..., None, :]
        o = torch.einsum("bhkv,bhk->bhv", carried, scale * q)
        if options.norm_weight is not None:
            o = o * (o.square().mean(-1, keepdim=True) + options.norm_eps).rsqrt()
            o = o * options.norm_weight.to(dtype) * silu(z[:, t])
        outs.append(o)
        histories.append(inputs[:, :, 1:])
        states.append(carried)
    return _Nodes(torch.stack(outs, 1), torch.stack(histories[1:], 1), torch.stack(states[1:], 1)), live, rows


def _write(
    conv_state: Tensor, state_pool: Tensor, rows: Tensor, history: Tensor, state: Tensor, options: Options
) -> None:
    conv_state[rows] = history.to(conv_state.dtype)
    state_pool[rows] = (state if options.state_layout == "KV" else state.mT).to(state_pool.dtype)


def _with_padding(out: Tensor, live: Tensor) -> Tensor:
    padded = out.new_zeros((len(live), *out.shape[1:]))
    padded[live] = out
    return padded.flatten(0, 1)
