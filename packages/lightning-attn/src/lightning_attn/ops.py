"""The torch ops: schemas, fake implementations, the CPU implementation, autograd.

=====================  ==================================================================================
attention              functional, differentiable
attention_inference    attention without autograd, which costs an op 5 us an eager call even when unused
attention_backward     the gradients of attention
varlen, decode         write the states' pool and the outputs they are given
verify                 writes the outputs it is given
commit                 writes the states' pool
=====================  ==================================================================================

Every implementation, the fake ones included, checks its arguments. On a GPU checks, plan and launch are made once for
each set of shapes, strides, dtypes and numbers, and found again by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kernel_reference import recurrence
from kernel_reference.checks import check_float, fail, values_are_checked
from lightning_attn import arguments
from lightning_attn.arguments import Names
from lightning_attn.plan import DecodePlan, Heads, PrefillPlan

Tensor = torch.Tensor
Ints = Sequence[int] | None

_QKV = "Tensor q, Tensor k, Tensor v"
_HISTORY = "Tensor ed, Tensor? kv_history"
_STATES = "Tensor slots, Tensor slopes"
_PLAN = "int[]? plan=None"
_LAST = f"float scale, {_PLAN}"

_library = torch.library.Library("lightning_attn", "DEF")
for _name, _arguments, _results in (
    ("attention", f"{_QKV}, {_HISTORY}, {_LAST}", "(Tensor, Tensor)"),
    ("attention_inference", f"{_QKV}, {_HISTORY}, {_LAST}", "(Tensor, Tensor)"),
    (
        "attention_backward",
        f"{_QKV}, {_HISTORY}, Tensor d_out, Tensor? d_kv, {_LAST}",
        "(Tensor, Tensor, Tensor, Tensor)",
    ),
    (
        "varlen",
        f"{_QKV}, Tensor slopes, Tensor cu_seqlens, Tensor(a!) state_pool, Tensor slots, Tensor? has_initial_state,"
        " bool all_have_initial_state, Tensor? snapshot_positions, Tensor? snapshot_slots, Tensor(b!) out,"
        f" {_LAST}",
        "()",
    ),
    ("decode", f"{_QKV}, Tensor(a!) state_pool, {_STATES}, Tensor(b!) out, {_LAST}", "()"),
    ("verify", f"{_QKV}, Tensor state_pool, {_STATES}, Tensor(a!) out, {_LAST}", "()"),
    ("commit", f"Tensor k, Tensor v, Tensor(a!) state_pool, {_STATES}, Tensor accepted, {_PLAN}", "()"),
):
    _library.define(f"{_name}({_arguments}) -> {_results}", tags=(torch.Tag.pt2_compliant_tag,))

# Below, `plan` is a plan as ints, which torch leaves out when it is None.


def allocate_attention(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Packed, uninitialised out [b, h, n, e] and kv [b, h, 1, d, e] for these inputs."""
    batch, num_heads, tokens, head_qk = q.shape
    kv = q.new_empty((batch, num_heads, 1, head_qk, v.shape[3]), dtype=torch.float32)
    return q.new_empty((batch, num_heads, tokens, v.shape[3])), kv


def allocate_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed, uninitialised dq, dk, dv and d_history [b, h, d, e] for these inputs."""
    history = (*q.shape[:2], q.shape[3], v.shape[3])
    d_q, d_k, d_v = (tensor.new_empty(tuple(tensor.shape)) for tensor in (q, k, v))
    return d_q, d_k, d_v, q.new_empty(history, dtype=torch.float32)


# What the arguments of an op must be


def _checked_attention(
    q: Tensor, k: Tensor, v: Tensor, ed: Tensor, kv_history: Tensor | None, scale: float, plan: Ints = None
) -> None:
    check_float("scale", scale)
    _check_prefill_plan(plan, arguments.check_attention(q, k, v, ed, kv_history), q.dtype)


def _checked_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, ed: Tensor, kv_history: Tensor | None, d_out: Tensor, d_kv: Tensor | None,
    scale: float, plan: Ints = None,
) -> None:  # fmt: skip
    _checked_attention(q, k, v, ed, kv_history, scale, plan)
    arguments.check_gradients(q, v, d_out, d_kv)


def _checked_varlen(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, cu_seqlens: Tensor, state_pool: Tensor, slots: Tensor,
    has_initial_state: Tensor | None, all_have_initial_state: bool, positions: Tensor | None,
    snapshot_slots: Tensor | None, out: Tensor, scale: float, plan: Ints = None,
) -> None:  # fmt: skip
    check_float("scale", scale)
    heads = arguments.check_varlen(
        q, k, v, slopes, cu_seqlens, state_pool, slots, has_initial_state, positions, snapshot_slots, out
    )
    _check_prefill_plan(plan, heads, q.dtype)


def _checked_decode(*tensors_and_numbers: Any) -> None:
    *tensors, scale, plan = _with_plan(tensors_and_numbers, 8)
    check_float("scale", scale)
    _check_plan(DecodePlan, plan, arguments.check_decode(*tensors))


def _checked_verify(*tensors_and_numbers: Any) -> None:
    *tensors, scale, plan = _with_plan(tensors_and_numbers, 8)
    check_float("scale", scale)
    _check_plan(DecodePlan, plan, arguments.check_verify(*tensors))


def _checked_commit(*tensors_and_plan: Any) -> None:
    *tensors, plan = _with_plan(tensors_and_plan, 6)
    _check_plan(DecodePlan, plan, arguments.check_commit(*tensors))


def _with_plan(arguments_of_op: tuple[Any, ...], place: int) -> tuple[Any, ...]:
    """An op's arguments, the plan at this place among them even when torch left it out."""
    return arguments_of_op if len(arguments_of_op) > place else (*arguments_of_op, None)


def _plan(kind: type[PrefillPlan] | type[DecodePlan], plan: Ints) -> Any:
    return None if plan is None else kind(*plan)  # type: ignore[arg-type]


def _check_plan(kind: type[PrefillPlan] | type[DecodePlan], plan: Ints, heads: Heads) -> None:
    made = _plan(kind, plan)
    if made is not None and not made.covers(heads):
        fail("plan", f"one that covers {heads}", made)


def _check_prefill_plan(plan: Ints, heads: Heads, dtype: torch.dtype) -> None:
    _check_plan(PrefillPlan, plan, heads)
    made = _plan(PrefillPlan, plan)
    if made is not None and made.chunk > 1 and dtype != torch.bfloat16:
        # Tensor cores would round what they multiply.
        fail("plan", f"of chunk 1 for {dtype}, which is walked token by token", made)


# What only device memory tells: on a CPU, and inside validate_values


def _check_ed(ed: Tensor) -> None:
    if values_are_checked(ed.device):
        arguments.check_values(Names(slopes="ed"), slopes=ed)


def _check_varlen_values(
    q: Tensor, slopes: Tensor, cu_seqlens: Tensor, state_pool: Tensor, slots: Tensor, positions: Tensor | None,
    snapshot_slots: Tensor | None,
) -> None:  # fmt: skip
    if values_are_checked(q.device):
        arguments.check_values(
            slopes=slopes, slots=slots, num_slots=state_pool.shape[0], cu_seqlens=cu_seqlens, tokens=q.shape[0],
            positions=positions, snapshot_slots=snapshot_slots,
        )  # fmt: skip


def _check_state_values(state_pool: Tensor, slots: Tensor, slopes: Tensor) -> None:
    if values_are_checked(slots.device):
        arguments.check_values(slopes=slopes, slots=slots, num_slots=state_pool.shape[0])


def _check_commit_values(k: Tensor, state_pool: Tensor, slots: Tensor, slopes: Tensor, accepted: Tensor) -> None:
    if values_are_checked(slots.device):
        arguments.check_values(
            slopes=slopes, slots=slots, num_slots=state_pool.shape[0], accepted=accepted, drafts=k.shape[1]
        )


# The kernels

_launches: dict[tuple[object, ...], Any] = {}
# Room for the sizes of a server's life; past it all are made anew, which costs one slow call each.
_MOST_LAUNCHES = 8192


def _ready(prepare: Callable[..., Any], tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]) -> Any:
    """What ``prepare(tensors, numbers)`` made the last time that tensors and numbers looked like this."""
    if type(numbers[-1]) is list:
        # A plan, as torch passes it: a key wants it hashable.
        numbers = (*numbers[:-1], tuple(numbers[-1]))
    key = (prepare, numbers, *[t if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors])
    found = _launches.get(key)
    if found is None:
        found = prepare(tensors, numbers)
        if len(_launches) >= _MOST_LAUNCHES:
            _launches.clear()
        _launches[key] = found
    return found


def _launches_of_gpu() -> Any:
    """The launches, imported when a tensor on a GPU first asks for them: all else works without Triton."""
    try:
        from lightning_attn import launch
    except ImportError as error:
        raise RuntimeError(
            "tensors on a GPU need Triton, which torch's GPU builds bring; here it is missing"
        ) from error
    return launch


def _prepare_attention(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = _launches_of_gpu()
    _checked_attention(*tensors, *numbers)
    q, _, v, _, _ = tensors
    scale, plan = numbers
    results = allocate_attention(q, v)
    run = launch.prepare_attention(*tensors, *results, scale, _plan(PrefillPlan, plan))
    return [_allocator(result) for result in results], run


def _prepare_attention_backward(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = _launches_of_gpu()
    _checked_attention_backward(*tensors, *numbers)
    scale, plan = numbers
    results = allocate_gradients(*tensors[:3])
    run = launch.prepare_attention_backward(*tensors, *results, scale, _plan(PrefillPlan, plan))
    return [_allocator(result) for result in results], run


def _prepare_varlen(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = _launches_of_gpu()
    all_have_initial_state, scale, plan = numbers
    in_order: tuple[Any, ...] = (*tensors[:8], all_have_initial_state, *tensors[8:], scale, plan)
    _checked_varlen(*in_order)
    run = launch.prepare_varlen(*in_order[:-1], _plan(PrefillPlan, plan))
    return arguments.overlap("varlen", tensors), run


def _prepare_decode(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = _launches_of_gpu()
    _checked_decode(*tensors, *numbers)
    scale, plan = numbers
    return arguments.overlap("decode", tensors), launch.prepare_decode(*tensors, scale, _plan(DecodePlan, plan))


def _prepare_verify(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = _launches_of_gpu()
    _checked_verify(*tensors, *numbers)
    scale, plan = numbers
    return arguments.overlap("verify", tensors), launch.prepare_verify(*tensors, scale, _plan(DecodePlan, plan))


def _prepare_commit(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = _launches_of_gpu()
    _checked_commit(*tensors, *numbers)
    return arguments.overlap("commit", tensors), launch.prepare_commit(*tensors, _plan(DecodePlan, numbers[0]))


def _kernel_attention(
    q: Tensor, k: Tensor, v: Tensor, ed: Tensor, kv_history: Tensor | None, scale: float, plan: Ints = None
) -> tuple[Tensor, Tensor]:
    (allocate_out, allocate_kv), run = _ready(_prepare_attention, (q, k, v, ed, kv_history), (scale, plan))
    _check_ed(ed)
    out, kv = allocate_out(), allocate_kv()
    run(q, k, v, ed, kv_history, out, kv)
    return out, kv


def _kernel_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, ed: Tensor, kv_history: Tensor | None, d_out: Tensor, d_kv: Tensor | None,
    scale: float, plan: Ints = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    tensors = (q, k, v, ed, kv_history, d_out, d_kv)
    allocators, run = _ready(_prepare_attention_backward, tensors, (scale, plan))
    _check_ed(ed)
    gradients = tuple([allocate() for allocate in allocators])
    run(*tensors, *gradients)
    return gradients


def _kernel_varlen(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, cu_seqlens: Tensor, state_pool: Tensor, slots: Tensor,
    has_initial_state: Tensor | None, all_have_initial_state: bool, positions: Tensor | None,
    snapshot_slots: Tensor | None, out: Tensor, scale: float, plan: Ints = None,
) -> None:  # fmt: skip
    tensors = (
        q, k, v, slopes, cu_seqlens, state_pool, slots, has_initial_state, positions, snapshot_slots, out
    )  # fmt: skip
    refuse_overlap, run = _ready(_prepare_varlen, tensors, (all_have_initial_state, scale, plan))
    refuse_overlap(*tensors)
    _check_varlen_values(q, slopes, cu_seqlens, state_pool, slots, positions, snapshot_slots)
    run(*tensors)


def _kernel_decode(
    q: Tensor, k: Tensor, v: Tensor, state_pool: Tensor, slots: Tensor, slopes: Tensor, out: Tensor, scale: float,
    plan: Ints = None,
) -> None:  # fmt: skip
    tensors = (q, k, v, state_pool, slots, slopes, out)
    refuse_overlap, run = _ready(_prepare_decode, tensors, (scale, plan))
    refuse_overlap(*tensors)
    _check_state_values(state_pool, slots, slopes)
    run(*tensors)


def _kernel_verify(
    q: Tensor, k: Tensor, v: Tensor, state_pool: Tensor, slots: Tensor, slopes: Tensor, out: Tensor, scale: float,
    plan: Ints = None,
) -> None:  # fmt: skip
    tensors = (q, k, v, state_pool, slots, slopes, out)
    refuse_overlap, run = _ready(_prepare_verify, tensors, (scale, plan))
    refuse_overlap(*tensors)
    _check_state_values(state_pool, slots, slopes)
    run(*tensors)


def _kernel_commit(
    k: Tensor, v: Tensor, state_pool: Tensor, slots: Tensor, slopes: Tensor, accepted: Tensor, plan: Ints = None
) -> None:
    tensors = (k, v, state_pool, slots, slopes, accepted)
    refuse_overlap, run = _ready(_prepare_commit, tensors, (plan,))
    refuse_overlap(*tensors)
    _check_commit_values(k, state_pool, slots, slopes, accepted)
    run(*tensors)


# The allocator of torch.compile's generated code: half of torch.empty's host time. It is a private name, so that where
# it is missing the public one serves; and it knows only the current device.
_empty_strided_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def _allocator(like: Tensor) -> Callable[[], Tensor]:
    """What makes an uninitialised tensor like this one."""
    size, stride, dtype, device = tuple(like.shape), like.stride(), like.dtype, like.device
    if _empty_strided_cuda is not None and device.type == "cuda" and torch.cuda.device_count() == 1:
        return partial(_empty_strided_cuda, size, stride, dtype)
    return partial(torch.empty_strided, size, stride, dtype=dtype, device=device)


# The references

# What a sequence of these many tokens takes in float32 is alive at once, some ten times; a multiple of the chunk.
_PIECE = 2048


def _refuse_overlap(op: str, *tensors: Tensor | None) -> None:
    arguments.overlap(op, tensors)(*tensors)


def _rates(slopes: Tensor) -> Tensor:
    """Decay rates as the kernels take them: one below 0 and NaN count as 0; from 256 on nothing is left in float32."""
    return torch.where(slopes > 0, slopes, 0).clamp(max=256)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor, scale: float, out: Tensor | None = None
) -> Tensor:
    """One sequence, q, k [n, Hqk, D], v [n, Hv, E], from state [H, D, E]: its out [n, H, E] and the state after it."""
    state = state.to(torch.float32)
    for first in range(0, q.shape[0], _PIECE):
        piece = slice(first, first + _PIECE)
        result = recurrence.linear_attention_chunked(
            q[piece], k[piece], v[piece], _rates(slopes), initial_state=state[None], scale=scale,
            compute_dtype=torch.float32,
        )  # fmt: skip
        if out is not None:
            out[piece] = result.out
        state = result.state[0]
    return state


def _reference_attention(
    q: Tensor, k: Tensor, v: Tensor, ed: Tensor, kv_history: Tensor | None, scale: float, plan: Ints = None
) -> tuple[Tensor, Tensor]:
    _checked_attention(q, k, v, ed, kv_history, scale, plan)
    _check_ed(ed)
    out, kv = allocate_attention(q, v)
    initial = torch.zeros_like(kv[:, :, 0]) if kv_history is None else kv_history
    for i in range(q.shape[0]):
        q_i, k_i, v_i, out_i = _tokens_first(i, q, k, v, out)
        kv[i, :, 0] = _attend(q_i, k_i, v_i, ed, initial[i], scale, out_i)
    return out, kv


def _tokens_first(i: int, *tensors: Tensor) -> Iterator[Tensor]:
    """Sequence i of each [b, h, n, d] as [n, h, d]: a view."""
    return (tensor[i].transpose(0, 1) for tensor in tensors)


def _reference_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, ed: Tensor, kv_history: Tensor | None, d_out: Tensor, d_kv: Tensor | None,
    scale: float, plan: Ints = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients as linear attentions of their own.

    With g_t the gradient of out_t, a = exp(-s) and R_t the gradient of the state S_t, through all that comes of it:
    ``R_t = a R_{t+1} + scale q_t g_t^T`` from the last token to the first, with R_n = d_kv / a. Then
    ``dq_t = scale S_t g_t``, ``dk_t = R_t v_t``, ``dv_t = R_t^T k_t`` and ``d_history = a R_0``.
    """
    _checked_attention_backward(q, k, v, ed, kv_history, d_out, d_kv, scale, plan)
    _check_ed(ed)
    d_q, d_k, d_v, d_history = gradients = allocate_gradients(q, k, v)
    rates = _rates(ed).reshape(-1)
    decay = torch.exp(-rates)[:, None, None]
    zeros = torch.zeros_like(d_history[0]) if q.shape[0] else d_history
    # What the final state's gradient brings is added apart: d_kv / a, as an initial state, would overflow.
    age = torch.arange(q.shape[2], dtype=torch.float32, device=q.device)
    weight = torch.exp(-age[:, None] * rates)[:, :, None]
    for i in range(q.shape[0]):
        history = zeros if kv_history is None else kv_history[i]
        q_i, k_i, v_i, g_i, d_q_i = _tokens_first(i, q, k, v, d_out, d_q)
        _attend(g_i, v_i, k_i, ed, history.mT, scale, d_q_i)

        q_i, k_i, v_i, g_i = (tensor.flip(0) for tensor in (q_i, k_i, v_i, g_i))
        d_k_i, d_v_i = (torch.empty(t.shape, dtype=torch.float32, device=t.device) for t in (k_i, v_i))
        _attend(v_i, g_i, q_i, ed, zeros.mT, scale, d_k_i)
        d_first = scale * _attend(k_i, q_i, g_i, ed, zeros, scale, d_v_i)
        d_history[i] = decay * d_first
        if d_kv is not None:
            d_last = d_kv[i, :, 0]
            d_k_i += weight * torch.einsum("nhe,hde->nhd", v_i.float(), d_last)
            d_v_i += weight * torch.einsum("nhd,hde->nhe", k_i.float(), d_last)
            d_history[i] += torch.exp(-rates * q.shape[2])[:, None, None] * d_last
        for whole, part in ((d_k, d_k_i), (d_v, d_v_i)):
            whole[i] = part.flip(0).transpose(0, 1)
    return gradients


def _reference_varlen(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, cu_seqlens: Tensor, state_pool: Tensor, slots: Tensor,
    has_initial_state: Tensor | None, all_have_initial_state: bool, positions: Tensor | None,
    snapshot_slots: Tensor | None, out: Tensor, scale: float, plan: Ints = None,
) -> None:  # fmt: skip
    _checked_varlen(
        q, k, v, slopes, cu_seqlens, state_pool, slots, has_initial_state, all_have_initial_state, positions,
        snapshot_slots, out, scale, plan,
    )  # fmt: skip
    _refuse_overlap(
        "varlen", q, k, v, slopes, cu_seqlens, state_pool, slots, has_initial_state, positions, snapshot_slots, out
    )
    _check_varlen_values(q, slopes, cu_seqlens, state_pool, slots, positions, snapshot_slots)
    out.zero_()
    ranges = _clamped_ranges(cu_seqlens, q.shape[0])
    for i, slot in _in_pool(slots, state_pool):
        begin, end = ranges[i]
        if begin == end:
            continue
        starts_from_pool = all_have_initial_state if has_initial_state is None else bool(has_initial_state[i])
        state = state_pool[slot] if starts_from_pool else torch.zeros_like(state_pool[slot])
        stops = [] if positions is None else [*zip(positions[i].tolist(), _listed(snapshot_slots, i), strict=True)]
        first = begin
        for position, kept_in in [*sorted(stops), (end - begin, slot)]:
            if 1 <= position <= end - begin and 0 <= kept_in < state_pool.shape[0]:
                rows = slice(first, begin + position)
                state = _attend(q[rows], k[rows], v[rows], slopes, state, scale, out[rows])
                state_pool[kept_in] = state
                first = begin + position


def _listed(snapshot_slots: Tensor | None, sequence: int) -> list[int]:
    return [] if snapshot_slots is None else snapshot_slots[sequence].tolist()


def _clamped_ranges(cu_seqlens: Tensor, tokens: int) -> list[tuple[int, int]]:
    """The rows of each sequence, within 0 and ``tokens`` whatever cu_seqlens holds."""
    bounds = [min(max(bound, 0), tokens) for bound in cu_seqlens.tolist()]
    return [(begin, max(begin, end)) for begin, end in pairwise(bounds)]


def _in_pool(slots: Tensor, state_pool: Tensor) -> list[tuple[int, int]]:
    """The sequences that are not padding, each with its slot."""
    return [(i, slot) for i, slot in enumerate(slots.tolist()) if 0 <= slot < state_pool.shape[0]]


def _step(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One token of one sequence, [H, D|E]: its output and the state after it, rounded to the dtype of the pool.

    So drafts have the bits of decoding. In float32 the factor exp(-s) would be rounded the same way at every token, and
    over many that shows.
    """
    result = recurrence.linear_attention(
        q[None], k[None], v[None], _rates(slopes), initial_state=state[None], scale=scale, compute_dtype=torch.float64
    )
    return result.out[0], result.state[0].to(state.dtype)


def _reference_decode(
    q: Tensor, k: Tensor, v: Tensor, state_pool: Tensor, slots: Tensor, slopes: Tensor, out: Tensor, scale: float,
    plan: Ints = None,
) -> None:  # fmt: skip
    _checked_decode(q, k, v, state_pool, slots, slopes, out, scale, plan)
    _refuse_overlap("decode", q, k, v, state_pool, slots, slopes, out)
    _check_state_values(state_pool, slots, slopes)
    out.zero_()
    for i, slot in _in_pool(slots, state_pool):
        out[i], state_pool[slot] = _step(q[i], k[i], v[i], slopes, state_pool[slot], scale)


def _reference_verify(
    q: Tensor, k: Tensor, v: Tensor, state_pool: Tensor, slots: Tensor, slopes: Tensor, out: Tensor, scale: float,
    plan: Ints = None,
) -> None:  # fmt: skip
    _checked_verify(q, k, v, state_pool, slots, slopes, out, scale, plan)
    _refuse_overlap("verify", q, k, v, state_pool, slots, slopes, out)
    _check_state_values(state_pool, slots, slopes)
    out.zero_()
    for i, slot in _in_pool(slots, state_pool):
        state = state_pool[slot]
        for t in range(q.shape[1]):
            out[i, t], state = _step(q[i, t], k[i, t], v[i, t], slopes, state, scale)


def _reference_commit(
    k: Tensor, v: Tensor, state_pool: Tensor, slots: Tensor, slopes: Tensor, accepted: Tensor, plan: Ints = None
) -> None:
    _checked_commit(k, v, state_pool, slots, slopes, accepted, plan)
    _refuse_overlap("commit", k, v, state_pool, slots, slopes, accepted)
    _check_commit_values(k, state_pool, slots, slopes, accepted)
    counts = accepted.tolist()
    for i, slot in _in_pool(slots, state_pool):
        if 1 <= counts[i] <= k.shape[1]:
            state = state_pool[slot]
            for t in range(counts[i]):
                _, state = _step(k[i, t], k[i, t], v[i, t], slopes, state, 1.0)
            state_pool[slot] = state


# The fakes


def _fake_attention(
    q: Tensor, k: Tensor, v: Tensor, ed: Tensor, kv_history: Tensor | None, scale: float, plan: Ints = None
) -> tuple[Tensor, Tensor]:
    _checked_attention(q, k, v, ed, kv_history, scale, plan)
    return allocate_attention(q, v)


def _fake_attention_backward(*arguments_of_op: Any) -> tuple[Tensor, ...]:
    _checked_attention_backward(*arguments_of_op)
    return allocate_gradients(*arguments_of_op[:3])


for _name, _kernel, _reference, _fake in (
    ("attention", _kernel_attention, _reference_attention, _fake_attention),
    ("attention_inference", _kernel_attention, _reference_attention, _fake_attention),
    ("attention_backward", _kernel_attention_backward, _reference_attention_backward, _fake_attention_backward),
    ("varlen", _kernel_varlen, _reference_varlen, _checked_varlen),
    ("decode", _kernel_decode, _reference_decode, _checked_decode),
    ("verify", _kernel_verify, _reference_verify, _checked_verify),
    ("commit", _kernel_commit, _reference_commit, _checked_commit),
):
    _library.impl(_name, _reference, "CPU")
    # CUDA is also ROCm's key; PrivateUse1 that of out-of-tree devices such as Ascend's NPUs.
    for _key in ("CUDA", "PrivateUse1"):
        _library.impl(_name, _kernel, _key)
    torch.library.register_fake(f"lightning_attn::{_name}", _fake, lib=_library)


def _remember_inputs(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    *tensors, ctx.scale, ctx.plan = inputs
    ctx.save_for_backward(*tensors)
    # An output that nothing uses has no gradient, and no zeros are made for it.
    ctx.set_materialize_grads(False)


@once_differentiable
def _attention_backward(ctx: Any, d_out: Tensor | None, d_kv: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, ed, kv_history = ctx.saved_tensors
    if d_out is None and d_kv is None:
        return (None,) * 7
    if d_out is None:
        d_out = q.new_zeros(()).expand(*q.shape[:3], v.shape[3])
    d_q, d_k, d_v, d_history = torch.ops.lightning_attn.attention_backward(
        q, k, v, ed, kv_history, d_out, d_kv, ctx.scale, ctx.plan
    )
    return d_q, d_k, d_v, None, None if kv_history is None else d_history, None, None


torch.library.register_autograd(
    "lightning_attn::attention", _attention_backward, setup_context=_remember_inputs, lib=_library
)
