"""Where lightning-attn's speed falls off: grids round its cases, beside fla, vLLM and a plain copy.

Results are held here to a share of a head's largest value, on sampled sequences and heads: what the house's bound
says of every element is the tests' part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import peers
import torch
from cases import (
    AS_CHAIN,
    OURS,
    as_case,
    backward_fla,
    backward_problem,
    backward_references,
    tree_as_chain,
    tree_problem,
    tree_references,
)
from peers import VLLM, VLLM_PREFILL, has_peer

from kernel_reference.bench import Axis, Case, Map, Point
from kernel_reference.models import MINIMAX_01, LinearAttention
from kernel_reference.recurrence import linear_attention_chunked
from lightning_attn import lightning_attention, lightning_attention_varlen, lightning_decode, slopes

FLA, FLA_ONE = "fla-core, few configurations", "fla-core, one configuration"
BY_DECODE = "ours, lightning_decode"
# Of a head's largest value. Products of float32 may be rounded to 19 bits.
ERROR_AT_MOST = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 2e-3}
# vLLM's prefill does not follow the recurrence; see the README.
ANYTHING = 1.0
LENGTHS = {
    "16 x 500": (500,) * 16,
    "1 x 8192": (8192,),
    "ragged": (2048, 17, 5303, 1, 512, 333, 1024, 64, 1500, 100, 3001),
    "128 x 1": (1,) * 128,
    "64 x 33": (33,) * 64,
    "4 x 3000": (3000,) * 4,
}
# Elements of each of q, k and v.
MOST = 2**26


class Result(NamedTuple):
    """``out`` [tokens, heads, E] or [B, H, N, E]; ``states`` after each sequence, [B, H, D, E], or the whole pool."""

    out: torch.Tensor
    states: torch.Tensor
    error_at_most: float
    pooled: bool = False


@dataclass(eq=False)
class Given:
    """Sequences one after another, [tokens, heads, elements], each going on from its state in the pool.

    bhnd: the same as [B, H, N, D], which lightning_attention takes; vllm: that in float32, as vLLM's layer has it.
    """

    lengths: Sequence[int]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slopes: torch.Tensor
    cu_seqlens: torch.Tensor
    cu_seqlens_cpu: torch.Tensor
    pool: torch.Tensor
    slots: torch.Tensor
    goes_on: torch.Tensor
    bhnd: Sequence[torch.Tensor] = ()
    vllm: Sequence[torch.Tensor] = ()

    def batched(self, x: torch.Tensor) -> torch.Tensor:
        """[B, H, N, D] of sequences of one length, as a view."""
        return x.unflatten(0, (len(self.lengths), -1)).transpose(1, 2)


def given(
    device: torch.device, lengths: Sequence[int], heads: int, size: int, dtype: torch.dtype, size_v: int | None = None
) -> Given:
    size_v = size_v or size
    q, k, v = (torch.randn(sum(lengths), heads, width, device=device, dtype=dtype) for width in (size, size, size_v))
    # Those of the slowest decays: they can skip the least.
    rates = slopes(max(heads, MINIMAX_01.num_heads))[-heads:].to(device)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    count = len(lengths)
    return Given(
        lengths=lengths,
        q=q,
        k=k,
        v=v,
        slopes=rates,
        cu_seqlens=bounds.to(device, torch.int32),
        cu_seqlens_cpu=bounds,
        pool=torch.randn(count, heads, size, size_v, device=device),
        slots=torch.randperm(count, device=device, dtype=torch.int32),
        goes_on=torch.ones(count, device=device, dtype=torch.bool),
    )


_kept: WeakKeyDictionary[Given, list[tuple[int, torch.Tensor, torch.Tensor]]] = WeakKeyDictionary()


def check(result: Result, i: Given, from_zero: bool = False) -> float:
    """The largest error over a head's largest value, of the first and the last sequence's first and last heads."""
    heads = [0, i.q.shape[1] - 1]
    if i not in _kept:
        _kept[i] = []
        for b in {0, len(i.lengths) - 1}:
            own = slice(int(i.cu_seqlens_cpu[b]), int(i.cu_seqlens_cpu[b + 1]))
            before = None if from_zero else i.pool[i.slots[b].long(), heads][None]
            parts = [x[own, heads] for x in (i.q, i.k, i.v)]
            exact = linear_attention_chunked(*parts, i.slopes[heads], initial_state=before, chunk_size=256)
            _kept[i].append((b, exact.out, exact.state[0]))
    tokens = result.out.transpose(1, 2).flatten(0, 1) if result.out.ndim == 4 else result.out
    states = result.states[i.slots.long()] if result.pooled else result.states
    worst = 0.0
    for b, out, state in _kept[i]:
        own = slice(int(i.cu_seqlens_cpu[b]), int(i.cu_seqlens_cpu[b + 1]))
        for got, exact, dim in ((tokens[own, heads], out, (0, 2)), (states[b, heads], state, (1, 2))):
            error = (got.double() - exact).abs().amax(dim) / exact.abs().amax(dim)
            worst = max(worst, float(error.max()) if not error.isnan().any() else float("inf"))
    if not worst <= result.error_at_most:
        raise AssertionError(f"error {worst:.2g} of a head's largest value > {result.error_at_most:g}")
    return worst


def case_of(
    name: str, point: Point, make: Callable[[], Given], call: Callable[[Given], Result], peers: Any, **more: Any
) -> Case:
    heads, size = point["heads"], point["head size"]
    tokens, sequences = more.pop("tokens"), more.pop("sequences")
    itemsize = getattr(torch, point["dtype"]).itemsize
    size_v = point.get("head size of v", size)
    states = sequences * heads * size * size_v * 4
    return Case(
        name=name,
        shape={},
        make_inputs=make,
        ours={OURS: call},
        peers=peers,
        check=more.pop("check", check),
        # The bound is the check's own, which raises.
        tolerance=float("inf"),
        bytes_moved=2 * tokens * heads * (size + size_v) * itemsize + more.pop("states", 2) * states,
        flops=tokens * heads * 8 * size * size_v if tokens > sequences else 0,
    )


# Prompts of one length, from no state: what engines call lightning_attention with.


def prompts(
    device: torch.device, lengths: Sequence[int], heads: int, size: int, dtype: torch.dtype, size_v: int | None = None
) -> Given:
    i = given(device, lengths, heads, size, dtype, size_v)
    i.bhnd = [i.batched(x).contiguous() for x in (i.q, i.k, i.v)]
    i.vllm = [x.float() for x in i.bhnd] if has_peer("vllm") else ()
    return i


def prefill_fla(configurations: Literal["few", "one"] = "few") -> Callable[[Given], Result]:
    attend = peers.fla(configurations)

    def call(i: Given) -> Result:
        parts = (x.unflatten(0, (len(i.lengths), -1)) for x in (i.q, i.k, i.v))
        out, state = attend(*parts, -i.slopes, output_final_state=True)
        return Result(out.flatten(0, 1), state, 0.05)

    return call


def prefill_vllm() -> Callable[[Given], Result]:
    attend = peers.vllm_prefill()
    return lambda i: Result(*attend(*i.vllm, i.slopes), ANYTHING)


def prefill_point(device: torch.device, point: Point, configurations: Literal["few", "one"] = "one") -> Case:
    """``configurations``: of fla's kernels."""
    lengths = (point["tokens"],) * point["sequences"]
    most = ERROR_AT_MOST[point["dtype"]]

    def ours(i: Given) -> Result:
        out, kv = lightning_attention(*i.bhnd, i.slopes)
        return Result(out, kv[:, :, -1], most)

    dtype, size_v = getattr(torch, point["dtype"]), point.get("head size of v")
    make = partial(prompts, device, lengths, point["heads"], point["head size"], dtype, size_v)
    sizes = {"tokens": sum(lengths), "sequences": len(lengths), "states": 1, "check": partial(check, from_zero=True)}
    return case_of(
        "prefill",
        point,
        make,
        ours,
        {FLA_ONE if configurations == "one" else FLA: partial(prefill_fla, configurations), VLLM_PREFILL: prefill_vllm},
        **sizes,
    )


# Ragged batches with pooled states.


def varlen_fla(configurations: Literal["few", "one"] = "few") -> Callable[[Given], Result]:
    attend = peers.fla(configurations)

    def call(i: Given) -> Result:
        out, state = attend(
            i.q[None],
            i.k[None],
            i.v[None],
            -i.slopes,
            # In the order of the slots, which its callers would bring into that of the sequences first.
            initial_state=i.pool[i.slots.long()],
            output_final_state=True,
            cu_seqlens=i.cu_seqlens.long(),
            cu_seqlens_cpu=i.cu_seqlens_cpu,
        )
        return Result(out[0], state, 0.05)

    return call


def by_decode(most: float) -> Callable[[], Callable[[Given], Result]]:
    def call(i: Given) -> Result:
        return Result(lightning_decode(i.q, i.k, i.v, i.pool, i.slots, i.slopes), i.pool, most, True)

    return lambda: call


def varlen_point(device: torch.device, point: Point) -> Case:
    lengths, most = LENGTHS[point["lengths"]], ERROR_AT_MOST[point["dtype"]]

    def ours(i: Given) -> Result:
        more = {"state_pool": i.pool, "slots": i.slots, "has_initial_state": i.goes_on}
        return Result(lightning_attention_varlen(i.q, i.k, i.v, i.slopes, i.cu_seqlens, **more), i.pool, most, True)

    beside: dict[str, Any] = {FLA_ONE: partial(varlen_fla, "one")}
    if max(lengths) == 1:
        beside[BY_DECODE] = by_decode(most)
    make = partial(given, device, lengths, point["heads"], point["head size"], getattr(torch, point["dtype"]))
    sizes = {"tokens": sum(lengths), "sequences": len(lengths)}
    return case_of("varlen", point, make, ours, beside, **sizes)


# One token a sequence.


def decode_vllm() -> Callable[[Given], Result]:
    decode = peers.vllm_decode()

    def call(i: Given) -> Result:
        out = decode(i.q[:, :, None], i.k[:, :, None], i.v[:, :, None], i.pool, i.slopes, i.slots)
        return Result(out, i.pool, 0.02, True)

    return call


def decode_point(device: torch.device, point: Point) -> Case:
    lengths = (1,) * point["sequences"]
    most = ERROR_AT_MOST[point["dtype"]]
    make = partial(given, device, lengths, point["heads"], point["head size"], getattr(torch, point["dtype"]))
    sizes = {"tokens": len(lengths), "sequences": len(lengths)}
    return case_of("decode", point, make, by_decode(most)(), {VLLM: decode_vllm}, **sizes)


# Cases of cases.py, in bfloat16 and by its checks.


def model_of(point: Point) -> LinearAttention:
    heads, size = point["heads"], point["head size"]
    return LinearAttention(f"{heads} heads of {size}", heads, size, size)


def backward_point(device: torch.device, point: Point) -> Case:
    problem = backward_problem(device, model_of(point), point["tokens"])
    return as_case(problem, {FLA_ONE: partial(backward_fla, "one")}, backward_references)


def tree_point(device: torch.device, point: Point) -> Case:
    problem = tree_problem(device, model_of(point), point["sequences"])
    return as_case(problem, {AS_CHAIN: lambda: tree_as_chain}, tree_references)


def maps(device: torch.device) -> Iterator[Map]:
    dtypes = Axis("dtype", ("bfloat16", "float16", "float32"))
    sizes = Axis("head size", (64, 72, 96, 128, 256))
    yield Map(
        name="prefill",
        axes=(
            dtypes,
            sizes,
            Axis("heads", (4, 8, 16, 40, 64)),
            Axis("tokens", (100, 500, 3000, 8192, 32768)),
            Axis("sequences", (1, 4, 16)),
        ),
        case=partial(prefill_point, device),
        allows=lambda p: p["head size"] * p["heads"] * p["tokens"] * p["sequences"] <= MOST,
        known=[
            {"dtype": dtype, "head size": 128, "heads": 8, "tokens": 32768, "sequences": 1}
            for dtype in ("float16", "float32", "bfloat16")
        ],
    )
    yield Map(
        name="varlen",
        axes=(dtypes, Axis("head size", (64, 96, 128)), Axis("heads", (8, 16, 64)), Axis("lengths", tuple(LENGTHS))),
        case=partial(varlen_point, device),
    )
    yield Map(
        name="decode",
        axes=(dtypes, sizes, Axis("heads", (4, 8, 40, 64)), Axis("sequences", (1, 3, 16, 64, 200))),
        case=partial(decode_point, device),
        # Elements of the states.
        allows=lambda p: p["head size"] ** 2 * p["heads"] * p["sequences"] <= 2**28,
        points=22,
    )
    yield Map(
        name="backward",
        axes=(
            Axis("head size", (64, 80, 112, 128, 256)),
            Axis("heads", (8, 64)),
            Axis("tokens", (500, 16384)),
        ),
        case=partial(backward_point, device),
        allows=lambda p: p["head size"] * p["heads"] * p["tokens"] <= MOST,
        points=10,
    )
    yield Map(
        name="trees",
        axes=(Axis("head size", (64, 128)), Axis("heads", (8, 64)), Axis("sequences", (1, 8, 32))),
        case=partial(tree_point, device),
        points=6,
    )


def sweep(device: torch.device, batch: int) -> Callable[[], object]:
    """A decode step, and a prefill of two tokens a sequence, of one of eight ranks."""
    i = given(device, (2,) * batch, 8, 128, torch.bfloat16)
    step = [x[:batch] for x in (i.q, i.k, i.v)]

    def call() -> None:
        lightning_decode(*step, i.pool, i.slots, i.slopes)
        more = {"state_pool": i.pool, "slots": i.slots, "has_initial_state": i.goes_on}
        lightning_attention_varlen(i.q, i.k, i.v, i.slopes, i.cu_seqlens, **more)

    return call
