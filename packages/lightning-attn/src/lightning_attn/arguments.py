"""What arguments must be, and the problem that they make: the ops ask once, so that no call goes unchecked.

``check_<op>`` takes an op's tensors as a NamedTuple in the op's order, its numbers behind them, and returns the one
description of the problem that plan and launch work from. Every function raises ValueError or TypeError naming the
argument, what it must be and what it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kernel_reference.checks import (
    MemoryOverlap,
    check_dtype,
    check_elements_apart,
    check_float,
    check_same_device,
    check_same_dtype,
    check_shape,
    describe,
    differ,
    fail,
    known,
)
from kernel_reference.plans import check_covers
from kernel_reference.ragged import check_cu_seqlens, read_integers
from lightning_attn.plan import (
    BackwardProblem,
    DecodePlan,
    DecodeProblem,
    Heads,
    Operand,
    PrefillPlan,
    PrefillProblem,
)
from lightning_attn.tensors import Attention, AttentionBackward, Commit, Decode, PathCommit, TreeVerify, Varlen

Tensor = torch.Tensor
Ints = Sequence[int] | None

# More than anyone drafts: a kernel is compiled for each number of them.
MAX_DRAFTS = 16
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_HEAD_SIZES = (16, 256)


class Names(NamedTuple):
    """What a function calls the arguments that go by several names, for its errors."""

    state_pool: str = "state_pool"
    slots: str = "slots"
    slopes: str = "slopes"


_NAMES = Names()


# One check and one problem an op


def check_attention(t: Attention, scale: float, plan: Ints = None) -> PrefillProblem:
    """A batch of sequences of one length."""
    check_float("scale", scale)
    for name, tensor, tail in (("q", t.q, "d"), ("k", t.k, "d"), ("v", t.v, "e")):
        if tensor.ndim != 4:
            fail(name, f"[b, h, n, {tail}]", describe(tensor))
        check_like_first(name, tensor, "q", t.q)
    if differ(t.k.shape, t.q.shape):
        fail("k", f"{list(t.q.shape)} as q is{_if_tokens_first('k', t.k, t.q)}", describe(t.k))
    if differ(t.v.shape[:3], t.q.shape[:3]):
        leading = ", ".join(map(str, t.q.shape[:3]))
        fail("v", f"[{leading}, e] as q is{_if_tokens_first('v', t.v, t.q)}", describe(t.v))
    batch, num_heads, tokens, head_qk = t.q.shape
    head_v = t.v.shape[3]
    heads = check_heads("q", num_heads, num_heads, head_qk, head_v)
    check_slopes("ed", t.ed, num_heads, "q", t.q, "[b, h, n, d]")
    states = (batch, num_heads, head_qk, head_v)
    if t.kv_history is not None:
        hint = " (of an earlier call's kv: kv[:, :, -1])" + if_transposed("kv_history", t.kv_history, states)
        check_matrices("kv_history", t.kv_history, states, "q", t.q, hint)
    check_prefill_plan(plan, heads, t.q.dtype)
    return PrefillProblem(
        heads, of_dense(t.q), of_dense(t.k), of_dense(t.v), _dense_or_new(t.out, (batch, num_heads, tokens, head_v)),
        None if t.kv_history is None else t.kv_history.stride(),
        strides_of_new(states) if t.kv is None else t.kv[:, :, 0].stride(),
        tokens, batch, batch, scale, str(t.q.dtype).removeprefix("torch."),
    )  # fmt: skip


def check_attention_backward(t: AttentionBackward, scale: float, plan: Ints = None) -> BackwardProblem:
    """The gradients of what an attention gives, of any strides: three prefills.

    dq as outputs of the queries do, keys v and values k from the transposed initial state; dk (queries v, keys do,
    values q) and dv (queries k, keys q, values do) backwards from the final state's gradient. The state that the last
    one ends in is the initial state's gradient.
    """
    check_attention(Attention(*t[:5]), scale, plan)
    batch, num_heads, tokens, head_qk = t.q.shape
    head_v = t.v.shape[3]
    check_shape("d_out", t.d_out, (batch, num_heads, tokens, head_v))
    check_same_device("d_out", t.d_out, "q", t.q)
    check_same_dtype("d_out", t.d_out, "q", t.q)
    if t.d_kv is not None:
        check_matrices("d_kv", t.d_kv, (batch, num_heads, 1, head_qk, head_v), "q", t.q)
    q, k, v, d_out = (of_dense(tensor) for tensor in (t.q, t.k, t.v, t.d_out))
    d_q, d_k, d_v = (
        _dense_or_new(new, like.shape) for new, like in ((t.d_q, t.q), (t.d_k, t.k), (t.d_v, t.v))
    )  # fmt: skip
    history = None if t.kv_history is None else t.kv_history.stride()
    last = None if t.d_kv is None else t.d_kv[:, :, 0].stride()
    first = strides_of_new((batch, num_heads, head_qk, head_v)) if t.asks_for_states() else None
    dq = PrefillProblem(
        Heads(num_heads, num_heads, head_v, head_qk), d_out, v, k, d_q, transposed(history), None, tokens, batch,
        batch, scale, str(t.q.dtype).removeprefix("torch."), is_gradient=True,
    )  # fmt: skip
    dk = replace(dq, q=v, k=d_out, v=q, o=d_k, initial=transposed(last), reversed=True)
    dv = replace(
        dk, heads=Heads(num_heads, num_heads, head_qk, head_v), q=k, k=q, v=d_out, o=d_v, initial=last,
        final=first if t.d_history is None else t.d_history.stride(),
    )  # fmt: skip
    return BackwardProblem(dq, dk, dv)


def check_varlen(t: Varlen, all_have_initial_state: bool, scale: float, plan: Ints = None) -> PrefillProblem:
    """A ragged batch of packed tokens and the pool of its states."""
    check_float("scale", scale)
    heads = check_packed(("T",), t.q, t.k, t.v)
    like = ("q", t.q)
    check_slopes("slopes", t.slopes, heads.num_heads, *like, "[T, H, D]")
    for name, tensor in (("cu_seqlens", t.cu_seqlens), ("slots", t.slots)):
        if tensor.ndim != 1:
            fail(name, "[B + 1]" if name == "cu_seqlens" else "[B]", describe(tensor))
    sequences = t.slots.shape[0]
    if known(t.cu_seqlens.shape[0] != sequences + 1):
        fail("cu_seqlens, slots", "[B + 1] and [B]", f"{list(t.cu_seqlens.shape)} and {list(t.slots.shape)}")
    check_indices("cu_seqlens", t.cu_seqlens, (sequences + 1,), *like)
    check_indices("slots", t.slots, (sequences,), *like)
    if t.has_initial_state is not None:
        check_dtype("has_initial_state", t.has_initial_state, torch.bool)
        _check_contiguous("has_initial_state", t.has_initial_state, (sequences,), *like)
    if (t.positions is None) != (t.snapshot_slots is None):
        name = "positions" if t.positions is None else "slots"
        fail(f"snapshot.{name}", "given where the other of positions and slots is", None)
    snapshots = 0
    if t.positions is not None and t.snapshot_slots is not None:
        if t.positions.ndim != 2:
            fail("snapshot.positions", f"[{sequences}, P]", describe(t.positions))
        snapshots = t.positions.shape[1]
        check_indices("snapshot.positions", t.positions, (sequences, snapshots), *like)
        check_indices("snapshot.slots", t.snapshot_slots, (sequences, snapshots), *like)
    _check_pool("state_pool", t.state_pool, heads, *like)
    _check_out(t.out, (t.q.shape[0], heads.num_heads, heads.head_v), t.q)
    check_prefill_plan(plan, heads, t.q.dtype)
    pool = t.state_pool.stride()
    reads = t.has_initial_state is not None or all_have_initial_state
    return PrefillProblem(
        heads, of_rows(t.q), of_rows(t.k), of_rows(t.v), of_rows(t.out), pool if reads else None, pool, t.q.shape[0],
        sequences, t.state_pool.shape[0], scale, str(t.q.dtype).removeprefix("torch."), snapshots, ragged=True,
    )  # fmt: skip


def check_decode(t: Decode, scale: float, plan: Ints = None, names: Names = _NAMES) -> DecodeProblem:
    """One token of each sequence and the pool of their states."""
    check_float("scale", scale)
    heads = check_packed(("B",), t.q, t.k, t.v)
    check_states(t.state_pool, t.slots, t.slopes, heads, "q", t.q, names)
    _check_out(t.out, (t.q.shape[0], heads.num_heads, heads.head_v), t.q)
    check_decode_plan(plan, heads)
    q, k, v, out = (tensor[:, None].stride() for tensor in (t.q, t.k, t.v, t.out))
    pool = t.state_pool
    return DecodeProblem(heads, t.q.shape[0], 1, pool.shape[0], q, k, v, pool.stride(), out, scale, writes=True)


def check_verify(t: Decode, scale: float, plan: Ints = None) -> DecodeProblem:
    """Draft tokens of each sequence and the pool of their states, which is read alone."""
    problem = check_several(t, scale, plan)
    _check_drafts("q", t.q)
    return problem


def check_several(t: Decode | TreeVerify, scale: float, plan: Ints = None) -> DecodeProblem:
    """Any number of draft tokens of each sequence, which branch or do not."""
    check_float("scale", scale)
    heads = check_packed(("B", "T"), t.q, t.k, t.v)
    check_states(t.state_pool, t.slots, t.slopes, heads, "q", t.q)
    _check_out(t.out, (*t.q.shape[:2], heads.num_heads, heads.head_v), t.q)
    check_decode_plan(plan, heads)
    q, k, v, out = (tensor.stride() for tensor in (t.q, t.k, t.v, t.out))
    (sequences, tokens), pool = t.q.shape[:2], t.state_pool
    return DecodeProblem(heads, sequences, tokens, pool.shape[0], q, k, v, pool.stride(), out, scale, writes=False)


def check_commit(t: Commit, plan: Ints = None) -> DecodeProblem:
    """Draft tokens' keys and values, how many are accepted and the pool of states."""
    heads = check_packed(("B", "T"), None, t.k, t.v)
    _check_drafts("k", t.k)
    check_states(t.state_pool, t.slots, t.slopes, heads, "k", t.k)
    check_indices("accepted", t.accepted, (t.k.shape[0],), "k", t.k)
    check_decode_plan(plan, heads)
    k, v, pool = t.k.stride(), t.v.stride(), t.state_pool
    sequences, tokens = t.k.shape[:2]
    return DecodeProblem(heads, sequences, tokens, pool.shape[0], None, k, v, pool.stride(), None, 1.0, writes=True)


def of_dense(tensor: Tensor) -> Operand:
    """Of a tensor [sequences, heads, rows, elements]."""
    (b, h, n, d), (s_b, s_h, s_n, s_d) = tensor.shape, tensor.stride()
    return Operand((b, n, h, d), (s_b, s_n, s_h, s_d))


def _dense_or_new(tensor: Tensor | None, shape: Sequence[int]) -> Operand:
    """The same; where the op allocates it, of a packed one."""
    if tensor is not None:
        return of_dense(tensor)
    (b, h, n, d), (s_b, s_h, s_n, s_d) = shape, strides_of_new(shape)
    return Operand((b, n, h, d), (s_b, s_n, s_h, s_d))


def of_rows(tensor: Tensor) -> Operand:
    """Of a tensor [rows, heads, elements]."""
    (n, h, d), (s_n, s_h, s_d) = tensor.shape, tensor.stride()
    return Operand((1, n, h, d), (0, s_n, s_h, s_d))


def strides_of_new(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def transposed(strides: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if strides is None else (*strides[:2], strides[3], strides[2])


# What only device memory tells, by one copy of all of it to the host


def check_rates(name: str, slopes: Tensor) -> None:
    """Decay rates: finite and 0 or more."""
    check_bits_of_rates(name, read_integers({"slopes": bits_of_rates(slopes)})["slopes"])


def check_varlen_values(t: Varlen) -> None:
    """Decay rates, bounds of sequences, slots and snapshots."""
    found = read_integers({
        "slopes": bits_of_rates(t.slopes), "slots": t.slots, "cu_seqlens": t.cu_seqlens, "positions": t.positions,
        "snapshot_slots": t.snapshot_slots,
    })  # fmt: skip
    check_bits_of_rates("slopes", found["slopes"])
    lengths = check_cu_seqlens("cu_seqlens", found["cu_seqlens"], t.q.shape[0])
    owned = [(f"slots[{sequence}]", slot, slot >= 0) for sequence, slot in enumerate(found["slots"])]
    positions = found.get("positions", [])
    for i, (position, slot) in enumerate(zip(positions, found.get("snapshot_slots", []), strict=True)):
        sequence, column = divmod(i, len(positions) // len(lengths))
        if position != -1 and not 1 <= position <= lengths[sequence]:
            name = f"snapshot.positions[{sequence}, {column}]"
            fail(name, f"-1 (unused) or from 1 to the sequence's {lengths[sequence]} tokens", position)
        owned.append((f"snapshot.slots[{sequence}, {column}]", slot, slot >= 0 and position != -1))
    check_owned(owned, t.state_pool.shape[0])


def check_decode_values(t: Decode | Commit, names: Names = _NAMES) -> None:
    """Decay rates and slots and, of a commit, how many drafts are accepted."""
    accepted = t.accepted if isinstance(t, Commit) else None
    found = read_integers({"slopes": bits_of_rates(t.slopes), "slots": t.slots, "accepted": accepted})
    check_bits_of_rates(names.slopes, found["slopes"])
    for sequence, count in enumerate(found.get("accepted", [])):
        if not 0 <= count <= t.k.shape[1]:
            fail(f"accepted[{sequence}]", f"from 0 to the {t.k.shape[1]} tokens given", count)
    owned = [(f"{names.slots}[{sequence}]", slot, slot >= 0) for sequence, slot in enumerate(found["slots"])]
    check_owned(owned, t.state_pool.shape[0])


def bits_of_rates(slopes: Tensor) -> Tensor:
    """Decay rates as the integers that their bits are, so that they travel with the others."""
    return slopes.reshape(-1).view(torch.int32)


def check_bits_of_rates(name: str, bits: list[int]) -> None:
    rates: list[float] = torch.tensor(bits, dtype=torch.int32).view(torch.float32).tolist()
    for head, rate in enumerate(rates):
        # NaN is not at least 0 either.
        if not 0 <= rate < math.inf:
            fail(f"{name}[{head}]", "finite and 0 or more", rate)


def check_owned(owned: list[tuple[str, int, bool]], num_slots: int) -> None:
    """Slots by name, and whether each is in use: all -1 or in the pool, none used twice."""
    user_of: dict[int, str] = {}
    for name, slot, used in owned:
        if not -1 <= slot < num_slots:
            fail(name, f"-1 (unused) or a slot below {num_slots}", slot)
        if used and slot in user_of:
            fail(name, f"a slot that nothing else in the call has, as {user_of[slot]} has this one", slot)
        if used:
            user_of[slot] = name


def overlap(op: str, tensors: Sequence[Tensor | None], names: Names = _NAMES) -> MemoryOverlap:
    """What refuses tensors of an op of which one that it writes shares memory with another."""
    kinds: dict[str, Any] = {
        "varlen": Varlen, "commit": Commit, "verify_tree": TreeVerify, "commit_path": PathCommit,
    }  # fmt: skip
    fields = kinds.get(op, Decode)._fields
    called = {**names._asdict(), "positions": "snapshot.positions", "snapshot_slots": "snapshot.slots"}
    order = [called.get(field, field) for field in fields]
    written = [names.state_pool] if op.startswith("commit") else ["out", names.state_pool]
    if op.startswith("verify"):
        written = ["out"]
    return MemoryOverlap(dict(zip(order, tensors, strict=True)), written)


# Parts of the checks


def check_packed(leading: tuple[str, ...], q: Tensor | None, k: Tensor, v: Tensor) -> Heads:
    """q, k [*leading, Hqk, D] and v [*leading, Hv, E], of any strides; the heads they make."""
    like = ("k", k) if q is None else ("q", q)
    for name, tensor, tail in (*([] if q is None else [("q", q, "Hqk, D")]), ("k", k, "Hqk, D"), ("v", v, "Hv, E")):
        if tensor.ndim != len(leading) + 2:
            fail(name, f"[{', '.join(leading)}, {tail}]", describe(tensor))
        check_like_first(name, tensor, *like)
    first_name, first = like
    if differ(k.shape, first.shape):
        fail("k", f"{list(first.shape)} as {first_name} is", describe(k))
    if differ(v.shape[:-2], first.shape[:-2]):
        fail("v", f"[{', '.join(map(str, first.shape[:-2]))}, Hv, E] as {first_name} is", describe(v))
    return check_heads(first_name, first.shape[-2], v.shape[-2], first.shape[-1], v.shape[-1])


def check_prefill_plan(ints: Ints, heads: Heads, dtype: torch.dtype) -> None:
    plan = PrefillPlan.from_ints(ints)
    if plan is None:
        return
    check_covers(plan, heads)
    if plan.hopper and dtype == torch.float32 and not plan.bf16x6:
        fail("plan", f"without hopper, or with bf16x6, for {dtype}", plan)
    if plan.hopper and dtype != torch.float32 and plan.bf16x6:
        fail("plan", f"without bf16x6 for {dtype}", plan)


def check_decode_plan(ints: Ints, heads: Heads) -> None:
    check_covers(DecodePlan.from_ints(ints), heads)


def _check_pool(name: str, state_pool: Tensor, heads: Heads, as_in: str, first: Tensor) -> None:
    """A pool of states [num_slots, H, D, E], of any strides that leave each element memory of its own."""
    shape = (heads.num_heads, heads.head_qk, heads.head_v)
    check_dtype(name, state_pool, torch.float32, torch.bfloat16, torch.float16)
    if state_pool.ndim != 4 or differ(state_pool.shape[1:], shape):
        hint = if_transposed(name, state_pool, (0, *shape))
        fail(name, f"[num_slots, {', '.join(map(str, shape))}]{hint}", describe(state_pool))
    check_same_device(name, state_pool, as_in, first)
    check_elements_apart(name, state_pool)


def _check_out(out: Tensor, shape: tuple[int, ...], q: Tensor) -> None:
    """A tensor for the outputs, of any strides that leave each element memory of its own."""
    check_shape("out", out, shape)
    check_same_device("out", out, "q", q)
    check_same_dtype("out", out, "q", q)
    check_elements_apart("out", out)


def check_states(
    state_pool: Tensor, slots: Tensor, slopes: Tensor, heads: Heads, as_in: str, first: Tensor, names: Names = _NAMES
) -> None:
    check_indices(names.slots, slots, (first.shape[0],), as_in, first)
    layout = "[B, H, D]" if first.ndim == 3 else "[B, T, H, D]"
    check_slopes(names.slopes, slopes, heads.num_heads, as_in, first, layout)
    _check_pool(names.state_pool, state_pool, heads, as_in, first)


def check_heads(first_name: str, heads_qk: int, heads_v: int, head_qk: int, head_v: int) -> Heads:
    for name, count in ((first_name, heads_qk), ("v", heads_v)):
        if count < 1:
            fail(name, "of at least 1 head", count)
    if heads_v % heads_qk and heads_qk % heads_v:
        fail("v", f"of a multiple or a divisor of the {heads_qk} heads of {first_name}", f"{heads_v} heads")
    least, most = _HEAD_SIZES
    for name, size in ((first_name, head_qk), ("v", head_v)):
        if not least <= size <= most:
            fail(name, f"of a head size from {least} to {most}", size)
    return Heads(heads_qk, heads_v, head_qk, head_v)


def _check_drafts(name: str, first: Tensor) -> None:
    if known(first.shape[1] > MAX_DRAFTS):
        fail(name, f"[B, T, ...] with at most {MAX_DRAFTS} tokens T", describe(first))


def check_slopes(name: str, slopes: Tensor, num_heads: int, as_in: str, first: Tensor, layout: str) -> None:
    """One rate a head of ``first``, laid out so; a layout in which as many heads as rates would stand is named."""
    check_dtype(name, slopes, torch.float32)
    if slopes.numel() != num_heads or not slopes.is_contiguous():
        hint = f" ({as_in}, {layout}, is {list(first.shape)})"
        names = layout.strip("[]").split(", ")
        heads = names.index("h" if "h" in names else "H")
        for other, size in enumerate(first.shape[:-1]):
            if other != heads and known(size == slopes.numel()) and not known(size == first.shape[heads]):
                swapped = names.copy()
                swapped[heads], swapped[other] = names[other], names[heads]
                fits = f"{as_in}.transpose({min(heads, other)}, {max(heads, other)}) if it is [{', '.join(swapped)}]"
                hint = f"{hint[:-1]}; {fits}, and so k and v)"
        fail(name, f"of {num_heads} elements, one a head, contiguous{hint}", describe(slopes))
    check_same_device(name, slopes, as_in, first)


def _if_tokens_first(name: str, tensor: Tensor, q: Tensor) -> str:
    """A hint for [b, n, h, d] beside a q [b, h, n, d]."""
    fits = not differ(tensor.shape[:3], [q.shape[0], q.shape[2], q.shape[1]])
    return f" (pass {name}.transpose(1, 2) if it is [b, n, h, d])" if fits else ""


def if_transposed(name: str, tensor: Tensor, shape: Sequence[int]) -> str:
    """A hint for states [.., D, E] that come as [.., E, D]."""
    fits = tensor.ndim == len(shape) and not differ(tensor.shape[1:], [*shape[1:-2], shape[-1], shape[-2]])
    return f" (pass {name}.mT if it is [.., E, D])" if fits else ""


def check_indices(name: str, indices: Tensor, shape: tuple[int, ...], as_in: str, first: Tensor) -> None:
    check_dtype(name, indices, torch.int32, torch.int64)
    _check_contiguous(name, indices, shape, as_in, first)


def _check_contiguous(name: str, tensor: Tensor, shape: tuple[int, ...], as_in: str, first: Tensor) -> None:
    if differ(tensor.shape, shape) or not tensor.is_contiguous():
        fail(name, f"{list(shape)}, contiguous", describe(tensor))
    check_same_device(name, tensor, as_in, first)


def check_matrices(
    name: str, tensor: Tensor, shape: tuple[int, ...], as_in: str, first: Tensor, hint: str = ""
) -> None:
    check_dtype(name, tensor, torch.float32)
    check_shape(name, tensor, shape, hint)
    check_same_device(name, tensor, as_in, first)


def check_like_first(name: str, tensor: Tensor, as_in: str, first: Tensor) -> None:
    """q, k or v: of a dtype that the kernels take, which is that of the first, and where the first is."""
    check_dtype(name, tensor, *_FLOATS)
    check_same_dtype(name, tensor, as_in, first)
    check_same_device(name, tensor, as_in, first)
