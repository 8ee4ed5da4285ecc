"""Decode steps for cases.py: one launch beside our split and convolution, gates in torch and fla's recurrence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import floors
import torch
from torch.nn.functional import silu, softplus

from gdn_split import (
    fused_qkvzba_split_reshape_cat,
    gdn_decode_step,
    gdn_prefill_inputs,
    split_conv1d_update,
)
from gdn_split.plan import GroupShape
from kernel_reference import gated_delta
from kernel_reference.bench import Case, Requirement
from kernel_reference.integers import cdiv
from kernel_reference.models import QWEN3_NEXT_80B

OURS = "gdn-split"
FLA_STEP, FLA_CHAIN = "split + convolution, torch, fla", "split, fla's convolution and norms, torch"
DTYPE = torch.bfloat16
WIDTH = QWEN3_NEXT_80B.conv_width
EPS = 1e-6
# Microseconds in a graph, by sequences.
TARGETS = {1: 5.0, 4: 8.0, 16: 22.0, 64: 72.0, 256: 280.0}


@dataclass
class Stepped:
    """A layer's projections, both of its states and its weights; ``other_pool``: the states in another dtype."""

    qkvz: torch.Tensor
    ba: torch.Tensor
    conv_state: torch.Tensor
    weight: torch.Tensor
    pool: torch.Tensor
    slots: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor | None
    other_pool: torch.Tensor | None = None


@dataclass(frozen=True)
class Setup:
    """What a case is about."""

    sequences: int
    shape: GroupShape
    tokens: int = 1
    state: torch.dtype = torch.float32
    state_layout: str = "KV"
    norm: bool = True

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.shape.num_heads_qk, self.shape.num_heads_v, self.shape.head_qk, self.shape.head_v

    def bytes_moved(self) -> int:
        s, rows = self.shape, self.sequences * self.tokens
        states = self.sequences * s.num_heads_v * s.head_qk * s.head_v * self.state.itemsize
        conv = self.sequences * s.qkv_width * (WIDTH - 1) * DTYPE.itemsize
        row = (s.qkvz_width + s.ba_width + s.num_heads_v * s.head_v) * DTYPE.itemsize
        return 2 * states + 2 * conv + rows * row + s.qkv_width * WIDTH * DTYPE.itemsize


def inputs(device: torch.device, setup: Setup, other: torch.dtype | None = None) -> Stepped:
    s, rows = setup.shape, setup.sequences * setup.tokens
    normal = partial(torch.randn, device=device)
    inner = (s.head_qk, s.head_v) if setup.state_layout == "KV" else (s.head_v, s.head_qk)
    pool = normal(setup.sequences, s.num_heads_v, *inner)
    conv_state = normal(setup.sequences, WIDTH - 1, s.qkv_width, dtype=DTYPE).transpose(1, 2)
    return Stepped(
        normal(rows, s.qkvz_width, dtype=DTYPE), normal(rows, s.ba_width, dtype=DTYPE), conv_state,
        normal(s.qkv_width, WIDTH, dtype=DTYPE) / 2, pool.to(setup.state),
        # As the peer has them, which takes states in the order of the sequences.
        torch.arange(setup.sequences, device=device, dtype=torch.int32),
        normal(s.num_heads_v) - 2, normal(s.num_heads_v), normal(s.head_v, dtype=DTYPE) if setup.norm else None,
        None if other is None else pool.to(other),
    )  # fmt: skip


def ours(i: Stepped, setup: Setup, tokens: int | None = None, other: bool = False) -> tuple[torch.Tensor, ...]:
    """One launch. ``tokens``: only so many; ``other``: on the other pool."""
    pool, qkvz, ba = i.other_pool if other else i.pool, i.qkvz, i.ba
    # Not otherwise: slices would be timed too.
    if tokens is not None:
        rows = setup.sequences * tokens
        qkvz, ba = qkvz[:rows], ba[:rows]
    tokens = setup.tokens if tokens is None else tokens
    out = gdn_decode_step(
        qkvz, ba, i.conv_state, i.weight, None, pool, i.slots, i.a_log, i.dt_bias, *setup.sizes,
        norm_weight=i.norm, state_layout=setup.state_layout, tokens_per_sequence=tokens,
    )  # fmt: skip
    return out, i.conv_state, pool


def chain(i: Stepped, setup: Setup, rule: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
    """Our split and convolution, gates and norm in torch, and a rule of fla's, which returns new states."""
    s, batch = setup.shape, setup.sequences
    parts = split_conv1d_update(
        i.qkvz, i.ba, i.conv_state, i.weight, None, i.slots, *setup.sizes, tokens_per_sequence=setup.tokens
    )
    q, k, v = parts.mixed_qkv.split([s.num_heads_qk * s.head_qk] * 2 + [s.num_heads_v * s.head_v], 1)
    q, k, v = (
        part.reshape(batch, setup.tokens, -1, size)
        for part, size in zip((q, k, v), (s.head_qk, s.head_qk, s.head_v), strict=True)
    )
    g = -i.a_log.exp() * softplus(parts.a.float() + i.dt_bias)
    gates = (gate.view(batch, setup.tokens, -1) for gate in (g, parts.b.sigmoid()))
    out, state = rule(q, k, v, *gates, initial_state=i.pool, output_final_state=True, use_qk_l2norm_in_kernel=True)
    out = out.flatten(0, 1)
    if i.norm is not None:
        o = out.float()
        o = o * (o.square().mean(-1, keepdim=True) + EPS).rsqrt()
        out = (o * i.norm * silu(parts.z.float())).to(out.dtype)
    return out, i.conv_state, state


def fla_rule() -> Callable[..., Any]:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    return lambda q, k, v, g, beta, **options: fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, **options)


def check(outputs: torch.Tensor | tuple[torch.Tensor, ...], i: Stepped, setup: Setup) -> float:
    """Units of bfloat16's rounding in the outputs, of 1 for small ones; states must be near."""
    if isinstance(outputs, torch.Tensor):
        return floors.check(outputs, i.pool)
    out, conv_state, pool = outputs
    rows = len(out)
    wanted_conv, wanted_pool = i.conv_state.double(), (i.pool if pool.dtype == i.pool.dtype else i.other_pool).double()
    options = gated_delta.Options(i.norm, EPS, state_layout=setup.state_layout)
    layer = gated_delta.Layer(i.weight, None, i.a_log, i.dt_bias)
    wanted = gated_delta.decode_step(
        i.qkvz[:rows], i.ba[:rows], wanted_conv, wanted_pool, i.slots, gated_delta.Sizes(*setup.sizes), layer, options,
        rows // setup.sequences,
    )  # fmt: skip
    if not torch.equal(conv_state.double(), wanted_conv):
        raise AssertionError("the convolution's state differs")
    error = ((pool.double() - wanted_pool).abs() / wanted_pool.abs().clamp(min=1)).max().item()
    if not error < 0.03:
        raise AssertionError(f"the states differ by {error}")
    return ((out.double() - wanted).abs() / wanted.abs().clamp(min=1) / 2**-8).max().item()


def floors_of(setup: Setup) -> dict[str, Callable[[], Callable[[Stepped], torch.Tensor]]]:
    """For few sequences: at the grid of a step, a program of 8 warps a head; states in smaller pieces too."""
    s = setup.shape
    heads, head = setup.sequences * s.num_heads_v, s.head_qk * s.head_v
    return {
        floors.LAUNCH: lambda: lambda i: floors.launch_alone(i.pool.device, heads, 8),
        floors.STATES: lambda: lambda i: floors.states_alone(i.pool, i.slots, head, 8),
        f"{floors.STATES}, quarters of heads": lambda: lambda i: floors.states_alone(i.pool, i.slots, head // 4, 8),
    }


def step_case(device: torch.device, setup: Setup, peer: bool = False, **more: Any) -> Case:
    name = f"{setup.sequences} sequences"
    if setup.tokens > 1:
        name += f" of {setup.tokens} tokens"
    model, s = "Qwen3-Next", setup.shape
    if s.head_v != QWEN3_NEXT_80B.head_v:
        model = f"{s.num_heads_v} heads of {s.head_v}"
        name += f", {model}"
    state = str(setup.state).removeprefix("torch.")
    name += f", {state} states{'' if setup.state_layout == 'KV' else ', VK'}{'' if setup.norm else ', no norm'}"
    peers: dict[str, Any] = {}
    if peer:
        peers[FLA_STEP] = lambda: partial(chain, setup=setup, rule=fla_rule())
    peers |= more.pop("peers", {})
    return Case(
        name=f"decode step, {name}",
        shape={"model": model, "sequences": setup.sequences, "tokens": setup.tokens, "state": state},
        make_inputs=partial(inputs, device, setup, more.pop("other", None)),
        ours={OURS: partial(ours, setup=setup)},
        peers=peers,
        check=partial(check, setup=setup),
        # The peer rounds q, k and v, and its gates' inputs, to bfloat16 on the way.
        tolerance=24.0,
        bytes_moved=setup.bytes_moved(),
        in_graph=True,
        **more,
    )


@dataclass
class Packed:
    """Projections of packed sequences and a layer's weights.

    ``bounds_of_chunks``, ``chunks``: the bounds, and the list of chunks of 64 rows that fla makes once for all layers.
    """

    qkvz: torch.Tensor
    ba: torch.Tensor
    weight: torch.Tensor
    bounds: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    bounds_of_chunks: torch.Tensor
    chunks: torch.Tensor


def packed(device: torch.device, shape: GroupShape, lengths: list[int]) -> Packed:
    normal = partial(torch.randn, device=device)
    rows, heads = sum(lengths), shape.num_heads_v
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0)
    chunks = [(i, j) for i, length in enumerate(lengths) for j in range(cdiv(length, 64))]
    return Packed(
        normal(rows, shape.qkvz_width, dtype=DTYPE), normal(rows, shape.ba_width, dtype=DTYPE),
        normal(shape.qkv_width, WIDTH, dtype=DTYPE) / 2, bounds.int(), normal(heads) - 2, normal(heads),
        bounds, torch.tensor(chunks, device=device),
    )  # fmt: skip


def fla_chain(shape: GroupShape) -> Callable[[Packed], tuple[torch.Tensor, ...]]:
    """Our split, fla's convolution and norms, gates in torch."""
    from fla.modules.convolution import causal_conv1d
    from fla.modules.l2norm import l2norm

    s = shape
    sizes = (s.num_heads_qk, s.num_heads_v, s.head_qk, s.head_v)
    widths = [s.num_heads_qk * s.head_qk] * 2 + [s.num_heads_v * s.head_v]

    def run(i: Packed) -> tuple[torch.Tensor, ...]:
        parts = fused_qkvzba_split_reshape_cat(i.qkvz, i.ba, *sizes)
        y, _ = causal_conv1d(
            parts.mixed_qkv[None], i.weight, activation="silu", cu_seqlens=i.bounds_of_chunks, chunk_indices=i.chunks
        )
        heads = zip(y[0].split(widths, 1), (s.head_qk, s.head_qk, s.head_v), strict=True)
        q, k, v = (part.reshape(len(i.qkvz), -1, size) for part, size in heads)
        g = -i.a_log.exp() * softplus(parts.a.float() + i.dt_bias)
        return l2norm(q), l2norm(k), v, parts.z, g, parts.b.float().sigmoid()

    return run


def prefill_case(device: torch.device, shape: GroupShape, lengths: list[int]) -> Case:
    rows = sum(lengths)
    sizes = (shape.num_heads_qk, shape.num_heads_v, shape.head_qk, shape.head_v)

    def ours(i: Packed) -> tuple[torch.Tensor, ...]:
        return gdn_prefill_inputs(i.qkvz, i.ba, i.weight, None, i.bounds, i.a_log, i.dt_bias, *sizes)

    def check(outputs: tuple[torch.Tensor, ...], i: Packed) -> float:
        layer = gated_delta.Layer(i.weight, None, i.a_log, i.dt_bias)
        wanted = gated_delta.prefill_inputs(
            i.qkvz, i.ba, i.bounds, gated_delta.Sizes(*sizes), layer, gated_delta.Options(compute_dtype=torch.float32)
        )
        errors = [
            ((one.float() - want).abs() / want.abs().clamp(min=0.1) / 2**-8).max().item()
            for one, want in zip(outputs, wanted, strict=True)
        ]
        return max(errors)

    row = 2 * shape.qkvz_width * DTYPE.itemsize + shape.ba_width * (DTYPE.itemsize + 4)
    return Case(
        name=f"inputs of prefill, {len(lengths)} sequences, N={rows}",
        shape={"model": "Qwen3-Next", "sequences": len(lengths), "tokens": rows},
        make_inputs=partial(packed, device, shape, lengths),
        ours={OURS: ours},
        peers={FLA_CHAIN: partial(fla_chain, shape)},
        check=check,
        tolerance=8.0,
        bytes_moved=rows * row,
        requirements=[Requirement(OURS, speed_at_least=0.85), Requirement(OURS, FLA_CHAIN, time_at_most=0.5)],
    )


@dataclass
class Differentiated:
    """Projections, and gradients of the results that they give."""

    of: Packed
    gradients: tuple[torch.Tensor, ...]


def gradient_case(device: torch.device, shape: GroupShape, lengths: list[int]) -> Case:
    rows = sum(lengths)
    s = shape
    sizes = gated_delta.Sizes(s.num_heads_qk, s.num_heads_v, s.head_qk, s.head_v)

    def make_inputs() -> Differentiated:
        normal = partial(torch.randn, device=device)
        heads = [(rows, s.num_heads_qk, s.head_qk)] * 2 + [(rows, s.num_heads_v, s.head_v)] * 2
        gates = [normal(rows, s.num_heads_v) for _ in range(2)]
        return Differentiated(packed(device, s, lengths), (*[normal(size, dtype=DTYPE) for size in heads], *gates))

    def ours(i: Differentiated) -> tuple[torch.Tensor, ...]:
        t = i.of
        tensors = (t.qkvz, t.ba, t.weight, None, t.bounds, t.a_log, t.dt_bias)
        made: tuple[torch.Tensor, ...] = torch.ops.gdn_split.prefill_backward(
            *i.gradients, *tensors, True, True, 0, *sizes
        )
        return made

    def check(outputs: tuple[torch.Tensor, ...], i: Differentiated) -> float:
        t = i.of
        inputs = [each.float().requires_grad_() for each in (t.qkvz, t.ba)]
        layer = gated_delta.Layer(t.weight, None, t.a_log, t.dt_bias)
        outs = gated_delta.prefill_inputs(
            inputs[0], inputs[1], t.bounds, sizes, layer, gated_delta.Options(compute_dtype=torch.float32)
        )
        wanted = torch.autograd.grad(outs, inputs, [each.float() for each in i.gradients])
        errors = [
            ((one.float() - want).abs() / want.abs().clamp(min=0.1) / 2**-8).max().item()
            for one, want in zip(outputs, wanted, strict=False)
        ]
        return max(errors)

    # Gradients of q, k, v and z are read, and the projections but for z; the projections' are written.
    row = 3 * s.qkvz_width * DTYPE.itemsize - s.num_heads_v * s.head_v * DTYPE.itemsize
    return Case(
        name=f"gradients of prefill's inputs, {len(lengths)} sequences, N={rows}",
        shape={"model": "Qwen3-Next", "sequences": len(lengths), "tokens": rows},
        make_inputs=make_inputs,
        ours={OURS: ours},
        peers={},
        check=check,
        tolerance=8.0,
        bytes_moved=rows * row,
        requirements=[Requirement(OURS, speed_at_least=0.7)],
    )


def prefill_cases(device: torch.device, shape: GroupShape) -> Iterator[Case]:
    yield prefill_case(device, shape, [8192])
    yield prefill_case(device, shape, [1, 4000, 17, 900, 3, 2048, 1223])
    yield prefill_case(device, shape, [128] * 256)
    yield gradient_case(device, shape, [8192])
    yield gradient_case(device, shape, [1, 4000, 17, 900, 3, 2048, 1223])


def step_cases(device: torch.device, shape: GroupShape) -> Iterator[Case]:
    for sequences, us in TARGETS.items():
        targets = [Requirement(OURS, us_at_most=us)]
        setup = Setup(sequences, shape)
        peers = floors_of(setup) if sequences <= 4 else {}
        yield step_case(device, setup, peer=True, peers=peers, requirements=targets)
        yield step_case(device, Setup(sequences, shape, norm=False), peer=True, requirements=targets)
    for sequences in (1, 64):
        setup = Setup(sequences, shape, state_layout="VK")
        yield step_case(device, setup, requirements=[Requirement(OURS, us_at_most=TARGETS[sequences])])
    for sequences in (64, 256):
        for layout in ("KV", "VK"):
            setup = Setup(sequences, shape, state=torch.bfloat16, state_layout=layout)
            in_float32 = partial(ours, setup=setup, other=True)
            yield step_case(
                device, setup, other=torch.float32, peers={"float32 states": lambda call=in_float32: call},
                requirements=[Requirement(OURS, "float32 states", time_at_most=0.6)],
            )  # fmt: skip
        for tokens in (2, 4):
            setup = Setup(sequences, shape, tokens=tokens)
            one = partial(ours, setup=setup, tokens=1)
            yield step_case(
                device, setup, peers={"one token": lambda call=one: call},
                requirements=[Requirement(OURS, "one token", time_at_most=1.25)],
            )  # fmt: skip
    yield step_case(
        device, Setup(2, shape), requirements=[Requirement(OURS, us_at_most=20.0, quantity="host")],
    )  # fmt: skip
