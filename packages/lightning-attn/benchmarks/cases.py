"""What lightning-attn is timed on: MiniMax-01's heads, all and one rank's share, beside fla, vLLM and a plain copy.

Every peer gets its inputs in the layout and dtype that its callers give it, made outside of what is timed. Results are
taken against float64 on three whole heads (the first, one a third of the way, the last), over all tokens. Ours must
keep the house's bound there. A peer's error is recorded beside its time; it must only be no garbage.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import peers
import torch
from peers import FLA, VLLM, VLLM_PREFILL, has_peer
from plain import CHUNK, DTYPE, plain_attention

from kernel_reference.bench import Case, Requirement
from kernel_reference.models import MINIMAX_01, LinearAttention
from kernel_reference.recurrence import commit, linear_attention, linear_attention_chunked
from kernel_reference.testing.numerics import assert_close_to_oracle
from lightning_attn import (
    lightning_attention,
    lightning_attention_packed,
    lightning_attention_varlen,
    lightning_commit,
    lightning_decode,
    lightning_state,
    lightning_verify,
    slopes,
)

OURS, AS_CHAIN = "lightning-attn", "ours, as one chain"
# Sums to 65536; a batch as a server sees it, from one token to a third of all.
RAGGED = (2048, 17, 25303, 1, 512, 4096, 333, 1024, 12345, 64, 6000, 1500, 100, 8192, 1000, 3001)
TP8 = MINIMAX_01.tensor_parallel(8)

Tensors = tuple[torch.Tensor, ...]


class Ours(NamedTuple):
    """Results with the heads in dimension 1; ``pool`` is checked at the inputs' slots, as the last of them."""

    results: Tensors
    pool: torch.Tensor | None = None


class Theirs(NamedTuple):
    """The same of a peer, which is timed if no head's error passes ``error_at_most`` of its largest value."""

    results: Tensors
    error_at_most: float
    pool: torch.Tensor | None = None


class References(NamedTuple):
    """The results on the sampled heads: in float64, and as plain PyTorch gives them."""

    exact: Sequence[torch.Tensor]
    plain: Sequence[torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """What one public function is called with. ``call(inputs, plan=None)``: benchmarks/tune.py pins other plans."""

    kind: str
    name: str
    shape: Mapping[str, int | str]
    make_inputs: Callable[[], Any]
    call: Callable[..., Ours]
    bytes_moved: int
    flops: int


def sampled(heads: int) -> list[int]:
    return [0, heads // 3, heads - 1]


def decays(model: LinearAttention, device: torch.device) -> torch.Tensor:
    """The model's; of one rank's share the slowest ones, as all ranks wait for the one that can skip the least."""
    return slopes(MINIMAX_01.num_heads)[-model.num_heads :].to(device)


def checked_against(reference: Callable[[Any], References]) -> Callable[[Any, Any], float]:
    """A check by ``reference(inputs)``, which is kept for as long as those inputs live."""
    kept: WeakKeyDictionary[Any, References] = WeakKeyDictionary()

    def check(outputs: Ours | Theirs, inputs: Any) -> float:
        if inputs not in kept:
            kept[inputs] = reference(inputs)
        results = outputs.results
        if outputs.pool is not None:
            results = (*results, outputs.pool[inputs.slots.long()])
        return max(judge(outputs, *one) for one in zip(results, *kept[inputs], strict=True))

    return check


def judge(outputs: Ours | Theirs, result: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> float:
    """The largest error over a head's largest value, of the worst head."""
    taken = result[:, sampled(result.shape[1])]
    if isinstance(outputs, Ours):
        # Head by head: one that hardly decays holds values so large that they would hide the errors of the others.
        for head in range(taken.shape[1]):
            assert_close_to_oracle(taken[:, head], exact[:, head], plain[:, head], what=f"sampled head {head}")
    by_head = [values.transpose(0, 1).flatten(1).amax(1) for values in ((taken.double() - exact).abs(), exact.abs())]
    error = float((by_head[0] / by_head[1]).max())
    if isinstance(outputs, Theirs) and not error <= outputs.error_at_most:
        raise AssertionError(f"error {error:.2g} of a head's largest value > {outputs.error_at_most:g}")
    return error


# One sequence, [1, heads, tokens, elements].


@dataclass(eq=False)
class Prefill:
    """``fla``: q, k, v as it takes them, [1, tokens, heads, elements]; ``vllm``: in float32, as its layer does."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slopes: torch.Tensor
    log_decay: torch.Tensor
    fla: Tensors
    vllm: Tensors


def prefill_inputs(device: torch.device, model: LinearAttention, tokens: int) -> Prefill:
    shape = (1, model.num_heads, tokens, model.head_qk)
    qkv = tuple(torch.randn(shape, device=device, dtype=DTYPE) for _ in range(3))
    s = decays(model, device)
    fla = tuple(x.transpose(1, 2).contiguous() for x in qkv) if has_peer("fla") else ()
    vllm = tuple(x.float() for x in qkv) if has_peer("vllm") else ()
    return Prefill(*qkv, s, -s, fla, vllm)


def prefill_ours(i: Prefill, plan: Any = None) -> Ours:
    out, kv = lightning_attention(i.q, i.k, i.v, i.slopes, plan=plan)
    return Ours((out[0].transpose(0, 1), kv[:, :, -1]))


def prefill_fla() -> Callable[[Prefill], Theirs]:
    attend = peers.fla()

    def call(i: Prefill) -> Theirs:
        out, state = attend(*i.fla, i.log_decay, output_final_state=True)
        return Theirs((out[0], state), 0.05)

    return call


def prefill_vllm() -> Callable[[Prefill], Theirs]:
    attend = peers.vllm_prefill()

    def call(i: Prefill) -> Theirs:
        out, state = attend(*i.vllm, i.slopes)
        return Theirs((out[0].transpose(0, 1), state), 1.0)

    return call


def prefill_references(i: Prefill) -> References:
    heads = sampled(i.q.shape[1])
    qkv = [x[0, heads].transpose(0, 1) for x in (i.q, i.k, i.v)]
    s, zeros = i.slopes[heads], i.slopes.new_zeros(1, len(heads), i.q.shape[3], i.v.shape[3])
    exact = linear_attention_chunked(*qkv, s, chunk_size=256)
    return References(exact, plain_attention(*qkv, s, (0, i.q.shape[2]), zeros))


def prefill_problem(device: torch.device, model: LinearAttention, tokens: int) -> Problem:
    return Problem(
        kind="prefill",
        name=f"prefill {model.name}, n={tokens}",
        shape={"model": model.name, "tokens": tokens, "sequences": 1},
        make_inputs=partial(prefill_inputs, device, model, tokens),
        call=prefill_ours,
        bytes_moved=forward_bytes(model, tokens),
        flops=tokens * forward_flops(model),
    )


def forward_bytes(model: LinearAttention, tokens: int) -> int:
    """q, k, v and the output, once each."""
    return 2 * tokens * model.num_heads * (model.head_qk + model.head_v) * DTYPE.itemsize


def forward_flops(model: LinearAttention) -> int:
    """Of one token: its scores in the chunk and their product with v, q with the state, k with v."""
    d, e = model.head_qk, model.head_v
    return model.num_heads * (2 * CHUNK * (d + e) + 4 * d * e)


def prefill_case(device: torch.device, model: LinearAttention, tokens: int, *requirements: Requirement) -> Case:
    beside = {FLA: prefill_fla, VLLM_PREFILL: prefill_vllm}
    return as_case(prefill_problem(device, model, tokens), beside, prefill_references, *requirements)


def as_case(
    problem: Problem,
    beside: Mapping[str, Callable[[], Callable[[Any], Theirs]]],
    reference: Callable[[Any], References],
    *requirements: Requirement,
) -> Case:
    return Case(
        name=problem.name,
        shape=problem.shape,
        make_inputs=problem.make_inputs,
        ours={OURS: problem.call},
        peers=beside,
        check=checked_against(reference),
        # The bound is the check's own, which raises.
        tolerance=float("inf"),
        bytes_moved=problem.bytes_moved,
        flops=problem.flops,
        requirements=requirements,
    )


# Memory: what a prefill allocates and does not return.


class Metered(NamedTuple):
    """``extra``: the most that was held beyond inputs and results, over the bytes of q, k and v."""

    results: Tensors
    extra: float
    extra_at_most: float


def metered(call: Callable[[Prefill], Ours | Theirs], inputs_of: str | None, at_most: float) -> Callable[..., Metered]:
    def run(i: Prefill) -> Metered:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = call(i).results
        most = torch.cuda.max_memory_allocated()
        qkv = getattr(i, inputs_of) if inputs_of else (i.q, i.k, i.v)
        extra = most - before - sum(result.nbytes for result in results)
        return Metered(results, extra / sum(x.nbytes for x in qkv), at_most)

    return run


def memory_case(device: torch.device, model: LinearAttention, tokens: int) -> Case:
    problem = prefill_problem(device, model, tokens)

    def check(outputs: Metered, inputs: Prefill) -> float:
        if not outputs.extra <= outputs.extra_at_most:
            raise AssertionError(f"memory of {outputs.extra:.3f} x q, k and v > {outputs.extra_at_most:g}")
        return outputs.extra

    return Case(
        name=f"memory of {problem.name} (as error: what it takes beyond its results, over q, k and v)",
        shape=problem.shape,
        make_inputs=problem.make_inputs,
        ours={OURS: metered(problem.call, None, 0.05)},
        peers={
            FLA: lambda: metered(prefill_fla(), "fla", float("inf")),
            VLLM_PREFILL: lambda: metered(prefill_vllm(), "vllm", float("inf")),
        },
        check=check,
        tolerance=float("inf"),
        bytes_moved=problem.bytes_moved,
        flops=problem.flops,
        copy=False,
        baseline=OURS,
    )


# A ragged batch, [tokens, heads, elements], every sequence going on from a state.


@dataclass(eq=False)
class Ragged:
    """``initial``: the pool's states in the sequences' order, for peers; ``vllm``: q, k, v and state by sequence."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slopes: torch.Tensor
    log_decay: torch.Tensor
    cu_seqlens: torch.Tensor
    cu_seqlens_fla: torch.Tensor
    cu_seqlens_cpu: torch.Tensor
    pool: torch.Tensor
    slots: torch.Tensor
    goes_on: torch.Tensor
    initial: torch.Tensor
    vllm: Sequence[Tensors]


def ragged_inputs(device: torch.device, model: LinearAttention, lengths: Sequence[int]) -> Ragged:
    shape = (sum(lengths), model.num_heads, model.head_qk)
    qkv = tuple(torch.randn(shape, device=device, dtype=DTYPE) for _ in range(3))
    s = decays(model, device)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    pool = torch.randn(len(lengths), model.num_heads, model.head_qk, model.head_v, device=device)
    slots = torch.randperm(len(lengths), device=device, dtype=torch.int32)
    initial = pool[slots.long()]
    rows = zip(*(x.split(list(lengths)) for x in qkv), strict=True) if has_peer("vllm") else ()
    vllm = [(*(x.transpose(0, 1).float().contiguous()[None] for x in one), initial[[i]]) for i, one in enumerate(rows)]
    return Ragged(
        *qkv,
        s,
        -s,
        cu_seqlens.to(device, torch.int32),
        cu_seqlens.to(device),
        cu_seqlens,
        pool,
        slots,
        torch.ones(len(lengths), device=device, dtype=torch.bool),
        initial,
        vllm,
    )


def ragged_ours(i: Ragged, plan: Any = None) -> Ours:
    out = lightning_attention_varlen(
        i.q, i.k, i.v, i.slopes, i.cu_seqlens, state_pool=i.pool, slots=i.slots, has_initial_state=i.goes_on, plan=plan
    )
    return Ours((out,), i.pool)


def ragged_fla() -> Callable[[Ragged], Theirs]:
    attend = peers.fla()

    def call(i: Ragged) -> Theirs:
        more = {"initial_state": i.initial, "cu_seqlens": i.cu_seqlens_fla, "cu_seqlens_cpu": i.cu_seqlens_cpu}
        out, state = attend(i.q[None], i.k[None], i.v[None], i.log_decay, output_final_state=True, **more)
        return Theirs((out[0], state), 0.05)

    return call


def ragged_vllm() -> Callable[[Ragged], Theirs]:
    """One sequence after another and then one tensor of them all, as its layer does."""
    attend = peers.vllm_prefill()

    def call(i: Ragged) -> Theirs:
        done = [attend(q, k, v, i.slopes, 256, state) for q, k, v, state in i.vllm]
        outs = torch.cat([out[0].transpose(0, 1) for out, _ in done])
        return Theirs((outs, torch.cat([state for _, state in done])), 1.0)

    return call


def ragged_references(i: Ragged) -> References:
    heads = sampled(i.q.shape[1])
    qkv, s, initial = [x[:, heads] for x in (i.q, i.k, i.v)], i.slopes[heads], i.initial[:, heads]
    exact = linear_attention_chunked(*qkv, s, cu_seqlens=i.cu_seqlens, initial_state=initial, chunk_size=256)
    return References(exact, plain_attention(*qkv, s, i.cu_seqlens_cpu.tolist(), initial))


def ragged_problem(device: torch.device, model: LinearAttention, lengths: Sequence[int]) -> Problem:
    tokens = sum(lengths)
    return Problem(
        kind="varlen",
        name=f"prefill {model.name}, {len(lengths)} ragged sequences, n={tokens}",
        shape={"model": model.name, "tokens": tokens, "sequences": len(lengths)},
        make_inputs=partial(ragged_inputs, device, model, lengths),
        call=ragged_ours,
        bytes_moved=forward_bytes(model, tokens),
        flops=tokens * forward_flops(model),
    )


# The same batch as training has it, without a pool.


def packed_ours(i: Ragged, plan: Any = None) -> Ours:
    more = {"initial_state": i.initial, "plan": plan}
    return Ours(tuple(lightning_attention_packed(i.q, i.k, i.v, i.slopes, i.cu_seqlens, **more)))


def packed_problem(device: torch.device, model: LinearAttention, lengths: Sequence[int]) -> Problem:
    ragged = ragged_problem(device, model, lengths)
    name = f"packed {model.name}, {len(lengths)} sequences, n={sum(lengths)}"
    return replace(ragged, kind="packed", name=name, call=packed_ours)


# States alone, of one packed sequence: what context parallelism makes before its all-gather.


def state_ours(exact: bool, i: Ragged, plan: Any = None) -> Ours:
    return Ours((lightning_state(i.k, i.v, i.slopes, i.cu_seqlens, exact=exact, plan=plan),))


def state_references(i: Ragged) -> References:
    heads = sampled(i.k.shape[1])
    k, v, s, zeros = i.k[:, heads], i.v[:, heads], i.slopes[heads], torch.zeros_like(i.initial[:, heads])
    exact = linear_attention_chunked(k, k, v, s, cu_seqlens=i.cu_seqlens, chunk_size=256)[1]
    bounds = i.cu_seqlens_cpu.tolist()
    # Weights may be keys' or values', which are rounded with them: by chance either has twice the other's error.
    both = plain_attention(k, k, v, s, bounds, zeros)[1], plain_attention(v, v, k, s, bounds, zeros.mT)[1].mT
    errors = [(plain.double() - exact).abs().amax((-2, -1), keepdim=True) for plain in both]
    return References([exact], [torch.where(errors[0] > errors[1], *both)])


def state_problem(device: torch.device, model: LinearAttention, tokens: int, exact: bool) -> Problem:
    rates = decays(model, torch.device("cpu")).tolist()
    read = sum(tokens if exact else min(tokens, math.ceil(24 / rate)) for rate in rates)
    d, e = model.head_qk, model.head_v
    return Problem(
        kind="state",
        name=f"states {model.name}, n={tokens}" + (", exact" if exact else ""),
        shape={"model": model.name, "tokens": tokens, "sequences": 1},
        make_inputs=partial(ragged_inputs, device, model, (tokens,)),
        call=partial(state_ours, exact),
        # k and v of the tokens that a head remembers, and the states.
        bytes_moved=read * (d + e) * DTYPE.itemsize + model.num_heads * d * e * 4,
        flops=2 * read * d * e,
    )


# The backward: gradients of q, k, v and the first state.


@dataclass(eq=False)
class Training:
    """``fla``: q, k, v and the output's gradient, [1, tokens, heads, elements]. ``graphs``: forward passes once made.

    A set's second turn finds its graph there, and the first is never timed.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    history: torch.Tensor
    d_out: torch.Tensor
    slopes: torch.Tensor
    log_decay: torch.Tensor
    fla: Tensors
    graphs: dict[Any, tuple[torch.Tensor, Tensors, torch.Tensor]] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Training:
        # A copy makes its own graphs: torch does not copy tensors that hang on one.
        parts = [getattr(self, part.name) for part in fields(self) if part.name != "graphs"]
        return Training(*copy.deepcopy(parts, memo))


def training_inputs(device: torch.device, model: LinearAttention, tokens: int) -> Training:
    sizes = (model.head_qk, model.head_qk, model.head_v, model.head_v)
    q, k, v, d_out = (torch.randn(1, model.num_heads, tokens, size, device=device, dtype=DTYPE) for size in sizes)
    history = torch.randn(1, model.num_heads, model.head_qk, model.head_v, device=device)
    fla = tuple(x.transpose(1, 2).contiguous() for x in (q, k, v, d_out)) if has_peer("fla") else ()
    for leaf in (q, k, v, history, *fla[:3]):
        leaf.requires_grad_()
    s = decays(model, device)
    return Training(q, k, v, history, d_out, s, -s, fla)


def gradients(
    i: Training, key: Any, forward: Callable[[], tuple[torch.Tensor, Tensors, torch.Tensor]]
) -> tuple[torch.Tensor, ...]:
    """Those of the leaves that ``forward() -> (output, leaves, its gradient)`` names; only this part is timed."""
    if i.q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("autograd runs a backward on the stream of its forward, which is not this one")
    if key not in i.graphs:
        i.graphs[key] = forward()
    out, leaves, d_out = i.graphs[key]
    return torch.autograd.grad(out, leaves, d_out, retain_graph=True)


def backward_ours(i: Training, plan: Any = None) -> Ours:
    def forward() -> tuple[torch.Tensor, Tensors, torch.Tensor]:
        out, _ = lightning_attention(i.q, i.k, i.v, i.slopes, kv_history=i.history, plan=plan)
        return out, (i.q, i.k, i.v, i.history), i.d_out

    *by_token, d_history = gradients(i, (OURS, plan), forward)
    return Ours((*(x[0].transpose(0, 1) for x in by_token), d_history))


def backward_fla(configurations: Literal["all", "few", "one"] = "all") -> Callable[[Training], Theirs]:
    attend = peers.fla(configurations)

    def call(i: Training) -> Theirs:
        def forward() -> tuple[torch.Tensor, Tensors, torch.Tensor]:
            *qkv, d_out = i.fla
            out, _ = attend(*qkv, i.log_decay, initial_state=i.history)
            return out, (*qkv, i.history), d_out

        *by_token, d_history = gradients(i, FLA, forward)
        return Theirs((*(x[0] for x in by_token), d_history), 0.05)

    return call


def backward_references(i: Training) -> References:
    heads = sampled(i.q.shape[1])
    *qkv, d_out = (x.detach()[0, heads].transpose(0, 1) for x in (i.q, i.k, i.v, i.d_out))
    leaves = [*qkv, i.history.detach()[:, heads]]
    s = i.slopes[heads]

    exact = [leaf.double().requires_grad_() for leaf in leaves]
    out, _ = linear_attention_chunked(*exact[:3], s, initial_state=exact[3], chunk_size=256)
    of_exact = torch.autograd.grad(out, exact, d_out.double())

    plain = [leaf.clone().requires_grad_() for leaf in leaves]
    out, _ = plain_attention(*plain[:3], s, (0, i.q.shape[2]), plain[3])
    return References(of_exact, torch.autograd.grad(out, plain, d_out))


def backward_problem(device: torch.device, model: LinearAttention, tokens: int) -> Problem:
    heads, d, e = model.num_heads, model.head_qk, model.head_v
    return Problem(
        kind="backward",
        name=f"backward {model.name}, n={tokens}",
        shape={"model": model.name, "tokens": tokens, "sequences": 1},
        make_inputs=partial(training_inputs, device, model, tokens),
        call=backward_ours,
        # q, k, v, the output's gradient, and those of q, k, v; the first state and its gradient.
        bytes_moved=tokens * heads * (4 * d + 3 * e) * DTYPE.itemsize + 2 * heads * d * e * 4,
        # In the chunk: scores, their gradient, dq, dk, dv; with states: both of them, dq, dk, dv.
        flops=tokens * heads * (2 * CHUNK * (3 * d + 2 * e) + 10 * d * e),
    )


# Decoding: states of a pool, one or a few tokens a sequence.


@dataclass(eq=False)
class Step:
    """``vllm``: q, k, v in float32, [sequences, heads, 1, elements], as its layer passes them.

    ``parents``: of drafts that branch.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slopes: torch.Tensor
    pool: torch.Tensor
    slots: torch.Tensor
    accepted: torch.Tensor
    vllm: Tensors
    parents: torch.Tensor | None = None


def step_inputs(device: torch.device, model: LinearAttention, sequences: int, drafts: int = 0) -> Step:
    """One token a sequence, [sequences, heads, elements]; with ``drafts``, [sequences, drafts, heads, elements]."""
    tokens = (drafts,) if drafts else ()
    shape = (sequences, *tokens, model.num_heads, model.head_qk)
    qkv = tuple(torch.randn(shape, device=device, dtype=DTYPE) for _ in range(3))
    return Step(
        *qkv,
        decays(model, device),
        torch.randn(sequences, model.num_heads, model.head_qk, model.head_v, device=device),
        torch.randperm(sequences, device=device, dtype=torch.int32),
        # Not 0: a sequence that accepts nothing moves no bytes.
        torch.randint(1, max(drafts, 1) + 1, (sequences,), device=device, dtype=torch.int32),
        tuple(x.float()[:, :, None].contiguous() for x in qkv) if has_peer("vllm") and not drafts else (),
    )


def decode_ours(i: Step, plan: Any = None) -> Ours:
    return Ours((lightning_decode(i.q, i.k, i.v, i.pool, i.slots, i.slopes, plan=plan),), i.pool)


def decode_vllm() -> Callable[[Step], Theirs]:
    decode = peers.vllm_decode()
    return lambda i: Theirs((decode(*i.vllm, i.pool, i.slopes, i.slots),), 0.01, i.pool)


def step_references(i: Step) -> References:
    """By the recurrence, from each sequence's state; plain PyTorch in float32, as the state is."""
    heads = sampled(i.pool.shape[1])
    drafts = i.q.shape[1] if i.q.ndim == 4 else 1
    rows = [x[..., heads, :].flatten(0, -3) for x in (i.q, i.k, i.v)]
    ends = torch.arange(len(i.slots) + 1, device=i.q.device) * drafts
    state = i.pool[i.slots.long()][:, heads]
    exact, plain = (
        linear_attention(*rows, i.slopes[heads], cu_seqlens=ends, initial_state=state, compute_dtype=dtype)
        for dtype in (torch.float64, torch.float32)
    )
    return References(exact, (plain.out.to(DTYPE), plain.state))


def decode_problem(device: torch.device, model: LinearAttention, sequences: int) -> Problem:
    heads, d, e = model.num_heads, model.head_qk, model.head_v
    return Problem(
        kind="decode",
        name=f"decode {model.name}, {sequences} sequence{'s' if sequences > 1 else ''}",
        shape={"model": model.name, "tokens": sequences, "sequences": sequences},
        make_inputs=partial(step_inputs, device, model, sequences),
        call=decode_ours,
        bytes_moved=2 * sequences * heads * d * e * 4 + forward_bytes(model, sequences),
        flops=4 * sequences * heads * d * e,
    )


def verify_ours(i: Step, plan: Any = None) -> Ours:
    out = lightning_verify(i.q, i.k, i.v, i.pool, i.slots, i.slopes, plan=plan)
    return Ours((out.flatten(0, 1),), i.pool)


def verify_by_decoding(i: Step) -> Theirs:
    """What it takes without it: a decode step for every draft token; that the state moves on is not looked at."""
    steps = zip(*(x.unbind(1) for x in (i.q, i.k, i.v)), strict=True)
    outs = torch.stack([lightning_decode(*step, i.pool, i.slots, i.slopes) for step in steps], dim=1)
    return Theirs((outs.flatten(0, 1),), 0.01)


def verify_problem(device: torch.device, model: LinearAttention, sequences: int, drafts: int) -> Problem:
    heads, d, e = model.num_heads, model.head_qk, model.head_v
    tokens = sequences * drafts
    return Problem(
        kind="verify",
        name=f"verify {model.name}, {sequences} sequences of {drafts} drafts",
        shape={"model": model.name, "tokens": tokens, "sequences": sequences},
        make_inputs=partial(step_inputs, device, model, sequences, drafts),
        call=verify_ours,
        # The state is only read.
        bytes_moved=sequences * heads * d * e * 4 + forward_bytes(model, tokens),
        # Each draft with the state, and with the drafts up to itself.
        flops=2 * tokens * heads * d * e + sequences * heads * drafts * (drafts + 1) * (d + e),
    )


def verify_case(problem: Problem) -> Case:
    def check(outputs: Ours | Theirs, i: Step) -> float:
        if outputs.pool is not None and not torch.equal(outputs.pool, i.pool):
            raise AssertionError("changed the states")
        return by_value(outputs._replace(pool=None), i)

    by_value = checked_against(lambda i: References(*(results[:1] for results in step_references(i))))
    return Case(
        name=problem.name,
        shape=problem.shape,
        make_inputs=problem.make_inputs,
        ours={OURS: problem.call},
        peers={"ours, by decode steps": lambda: verify_by_decoding},
        check=check,
        tolerance=float("inf"),
        bytes_moved=problem.bytes_moved,
        flops=problem.flops,
    )


# Drafts that branch: each token goes on from another, or from the pool's state (-1).
TREE = (-1, 0, 0, 1, 1, 2, 2, 3)


def tree_ours(i: Step, plan: Any = None) -> Ours:
    out = lightning_verify(i.q, i.k, i.v, i.pool, i.slots, i.slopes, parents=i.parents, plan=plan)
    return Ours((out.flatten(0, 1),))


def tree_as_chain(i: Step) -> Theirs:
    """As many drafts, each of which follows the one before: other results, for less work."""
    return Theirs((lightning_verify(i.q, i.k, i.v, i.pool, i.slots, i.slopes).flatten(0, 1),), float("inf"))


def tree_inputs(device: torch.device, model: LinearAttention, sequences: int) -> Step:
    inputs = step_inputs(device, model, sequences, len(TREE))
    inputs.parents = torch.tensor(TREE, device=device, dtype=torch.int32).repeat(sequences, 1)
    return inputs


def tree_references(i: Step) -> References:
    """Node by node, each from its parent's state."""
    heads = sampled(i.pool.shape[1])
    first = i.pool[i.slots.long()][:, heads]
    outs = []
    for dtype in (torch.float64, torch.float32):
        q, k, v = (x[:, :, heads].to(dtype) for x in (i.q, i.k, i.v))
        kept = torch.exp(-i.slopes[heads].to(dtype))[:, None, None]
        states, rows = {-1: first.to(dtype)}, []
        for node, parent in enumerate(TREE):
            states[node] = kept * states[parent] + k[:, node, :, :, None] * v[:, node, :, None]
            rows.append((q[:, node, :, None] @ states[node]).squeeze(-2))
        outs.append(torch.stack(rows, dim=1).flatten(0, 1))
    return References((outs[0],), (outs[1].to(DTYPE),))


def tree_problem(device: torch.device, model: LinearAttention, sequences: int) -> Problem:
    chain = verify_problem(device, model, sequences, len(TREE))
    name = f"verify {model.name}, {sequences} trees of {len(TREE)} drafts"
    make = partial(tree_inputs, device, model, sequences)
    return replace(chain, kind="tree", name=name, make_inputs=make, call=tree_ours)


def commit_ours(i: Step, plan: Any = None) -> Ours:
    lightning_commit(i.k, i.v, i.pool, i.slots, i.slopes, i.accepted, plan=plan)
    return Ours((), i.pool)


def commit_references(i: Step) -> References:
    heads = sampled(i.pool.shape[1])
    k, v, state = i.k[:, :, heads], i.v[:, :, heads], i.pool[i.slots.long()][:, heads]
    exact, plain = (
        commit(k, v, state, i.slopes[heads], i.accepted, compute_dtype=dtype)
        for dtype in (torch.float64, torch.float32)
    )
    return References((exact,), (plain,))


def commit_problem(device: torch.device, model: LinearAttention, sequences: int, drafts: int) -> Problem:
    heads, d, e = model.num_heads, model.head_qk, model.head_v
    tokens = sequences * drafts
    return Problem(
        kind="commit",
        name=f"commit {model.name}, {sequences} sequences of {drafts} drafts",
        shape={"model": model.name, "tokens": tokens, "sequences": sequences},
        make_inputs=partial(step_inputs, device, model, sequences, drafts),
        call=commit_ours,
        # k and v as if all were accepted.
        bytes_moved=2 * sequences * heads * d * e * 4 + tokens * heads * (d + e) * DTYPE.itemsize,
        flops=2 * tokens * heads * d * e,
    )


def problems(device: torch.device) -> Iterator[Problem]:
    """What is worth a plan of its own, for benchmarks/tune.py: the shapes of `cases`, and those between them."""
    for model in (MINIMAX_01, TP8):
        for tokens in (256, 1024, 8192, 32768, 131072):
            yield prefill_problem(device, model, tokens)
        yield ragged_problem(device, model, RAGGED)
        for tokens in (8192, 32768, 65536):
            yield backward_problem(device, model, tokens)
        for sequences in (1, 8, 32, 64, 128, 256):
            yield decode_problem(device, model, sequences)
        for sequences, drafts in ((1, 4), (32, 4), (32, 16)):
            yield verify_problem(device, model, sequences, drafts)
            yield commit_problem(device, model, sequences, drafts)


def cases(device: torch.device) -> Iterator[Case]:
    large = (Requirement(OURS, FLA, time_at_most=0.45), Requirement(OURS, speed_at_least=0.7))
    backward = Requirement(OURS, FLA, time_at_most=0.8)
    yield prefill_case(device, MINIMAX_01, 1024, Requirement(OURS, FLA, time_at_most=0.5))
    for tokens in (8192, 16384, 32768, 65536, 131072):
        yield prefill_case(device, MINIMAX_01, tokens, *large)
    yield as_case(
        ragged_problem(device, MINIMAX_01, RAGGED),
        {FLA: ragged_fla, VLLM_PREFILL: ragged_vllm},
        ragged_references,
        *large,
    )
    packed = packed_problem(device, MINIMAX_01, RAGGED)
    yield as_case(packed, {FLA: ragged_fla, VLLM_PREFILL: ragged_vllm}, ragged_references, *large)
    yield prefill_case(device, TP8, 32768, Requirement(OURS, FLA, time_at_most=0.6))
    for model, tokens in ((MINIMAX_01, 8192), (MINIMAX_01, 65536), (TP8, 32768)):
        yield as_case(backward_problem(device, model, tokens), {FLA: backward_fla}, backward_references, backward)
    for sequences in (32, 64, 128, 256):
        target = Requirement(OURS, speed_at_least=0.93)
        yield as_case(decode_problem(device, MINIMAX_01, sequences), {VLLM: decode_vllm}, step_references, target)
    at_once = Requirement(OURS, us_at_most=4.0)
    yield as_case(decode_problem(device, TP8, 1), {VLLM: decode_vllm}, step_references, at_once)
    yield verify_case(verify_problem(device, MINIMAX_01, 32, 4))
    yield as_case(tree_problem(device, MINIMAX_01, 32), {AS_CHAIN: lambda: tree_as_chain}, tree_references)
    yield as_case(commit_problem(device, MINIMAX_01, 32, 4), {}, commit_references)
    for exact in (False, True):
        target = Requirement(OURS, speed_at_least=0.8)
        yield as_case(state_problem(device, MINIMAX_01, 65536, exact), {}, state_references, target)
    yield memory_case(device, MINIMAX_01, 131072)
