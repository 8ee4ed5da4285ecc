"""What arguments must be. The ops call these, so that no call goes unchecked, not torch.compile's nor a direct one.

Every function raises ValueError or TypeError naming the argument, what it must be and what it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kernel_reference.checks import MemoryOverlap, describe, fail
from lightning_attn.plan import Heads

Tensor = torch.Tensor

# More than anyone drafts: a kernel is compiled for each number of them.
MOST_DRAFTS = 16
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_INTEGERS = (torch.int32, torch.int64)
_HEAD_SIZES = (16, 256)


class Names(NamedTuple):
    """What a function calls the arguments that go by several names, for its errors."""

    state_pool: str = "state_pool"
    slots: str = "slots"
    slopes: str = "slopes"


_NAMES = Names()


def known(condition: Any) -> bool:
    """A condition on sizes; False where only the device knows them: an op asks again when it runs."""
    if condition is True or condition is False:
        return condition
    # Torch imports it for itself when it makes symbolic sizes.
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def _differ(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    return len(shape) != len(wanted) or any(known(one != other) for one, other in zip(shape, wanted, strict=True))


def check_tensors(**tensors: object) -> None:
    """Each must be a dense tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            fail(name, "a torch.Tensor", describe(tensor), TypeError)
        if tensor.layout != torch.strided:
            fail(name, "a dense (strided) tensor", describe(tensor), TypeError)


def check_attention(q: Tensor, k: Tensor, v: Tensor, ed: Tensor, kv_history: Tensor | None) -> Heads:
    """The inputs of a batch of sequences of one length: q, k [b, h, n, d], v [b, h, n, e], and the heads they make."""
    for name, tensor, tail in (("q", q, "d"), ("k", k, "d"), ("v", v, "e")):
        if tensor.ndim != 4:
            fail(name, f"[b, h, n, {tail}]", describe(tensor))
        _check_like_first(name, tensor, "q", q)
    if _differ(k.shape, q.shape):
        fail("k", f"{list(q.shape)} as q is{_if_tokens_first('k', k, q)}", describe(k))
    if _differ(v.shape[:3], q.shape[:3]):
        fail("v", f"[{', '.join(map(str, q.shape[:3]))}, e] as q is{_if_tokens_first('v', v, q)}", describe(v))
    batch, num_heads, _, head_qk = q.shape
    heads = _check_heads("q", num_heads, num_heads, head_qk, v.shape[3])
    _check_slopes("ed", ed, num_heads, "q", q, "[b, h, n, d]")
    if kv_history is not None:
        states = (batch, num_heads, head_qk, v.shape[3])
        hint = " (of an earlier call's kv: kv[:, :, -1])" + _if_transposed("kv_history", kv_history, states)
        _check_matrices("kv_history", kv_history, states, "q", q, hint)
    return heads


def check_gradients(q: Tensor, v: Tensor, d_out: Tensor, d_kv: Tensor | None) -> None:
    """The gradients of what an attention over q and v gives, of any strides."""
    batch, num_heads, tokens, head_qk = q.shape
    head_v = v.shape[3]
    _check_shape("d_out", d_out, (batch, num_heads, tokens, head_v), "q", q)
    _check_dtype("d_out", d_out, "q", q)
    if d_kv is not None:
        _check_matrices("d_kv", d_kv, (batch, num_heads, 1, head_qk, head_v), "q", q)


def check_varlen(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, cu_seqlens: Tensor, state_pool: Tensor, slots: Tensor,
    has_initial_state: Tensor | None, positions: Tensor | None, snapshot_slots: Tensor | None, out: Tensor,
) -> Heads:  # fmt: skip
    """A ragged batch of packed tokens and the pool of its states; the heads they make."""
    heads = check_packed(("T",), q, k, v)
    like = ("q", q)
    _check_slopes("slopes", slopes, heads.num_heads, *like, "[T, H, D]")
    for name, tensor in (("cu_seqlens", cu_seqlens), ("slots", slots)):
        if tensor.ndim != 1:
            fail(name, "[B + 1]" if name == "cu_seqlens" else "[B]", describe(tensor))
    sequences = slots.shape[0]
    if known(cu_seqlens.shape[0] != sequences + 1):
        fail("cu_seqlens, slots", "[B + 1] and [B]", f"{list(cu_seqlens.shape)} and {list(slots.shape)}")
    _check_indices("cu_seqlens", cu_seqlens, (sequences + 1,), *like)
    _check_indices("slots", slots, (sequences,), *like)
    if has_initial_state is not None:
        name = "has_initial_state"
        if has_initial_state.dtype != torch.bool:
            fail(f"{name}.dtype", "bool", has_initial_state.dtype, TypeError)
        _check_packed_whole(name, has_initial_state, (sequences,), *like)
    if (positions is None) != (snapshot_slots is None):
        name = "positions" if positions is None else "slots"
        fail(f"snapshot.{name}", "given where the other of positions and slots is", None)
    if positions is not None and snapshot_slots is not None:
        if positions.ndim != 2:
            fail("snapshot.positions", f"[{sequences}, P]", describe(positions))
        _check_indices("snapshot.positions", positions, (sequences, positions.shape[1]), *like)
        _check_indices("snapshot.slots", snapshot_slots, (sequences, positions.shape[1]), *like)
    check_pool(state_pool, heads, *like)
    check_out(out, (q.shape[0], heads.num_heads, heads.head_v), q)
    return heads


def check_decode(
    q: Tensor, k: Tensor, v: Tensor, state_pool: Tensor, slots: Tensor, slopes: Tensor, out: Tensor,
    names: Names = _NAMES,
) -> Heads:  # fmt: skip
    """One token of each sequence and the pool of their states; the heads they make."""
    heads = check_packed(("B",), q, k, v)
    _check_states(state_pool, slots, slopes, heads, "q", q, names)
    check_out(out, (q.shape[0], heads.num_heads, heads.head_v), q)
    return heads


def check_verify(
    q: Tensor, k: Tensor, v: Tensor, state_pool: Tensor, slots: Tensor, slopes: Tensor, out: Tensor
) -> Heads:
    """Draft tokens of each sequence and the pool of their states; the heads they make."""
    heads = check_packed(("B", "T"), q, k, v)
    _check_drafts("q", q)
    _check_states(state_pool, slots, slopes, heads, "q", q)
    check_out(out, (*q.shape[:2], heads.num_heads, heads.head_v), q)
    return heads


def check_commit(k: Tensor, v: Tensor, state_pool: Tensor, slots: Tensor, slopes: Tensor, accepted: Tensor) -> Heads:
    """Draft tokens' keys and values, how many are accepted and the pool of states; the heads they make."""
    heads = check_packed(("B", "T"), None, k, v)
    _check_drafts("k", k)
    _check_states(state_pool, slots, slopes, heads, "k", k)
    _check_indices("accepted", accepted, (k.shape[0],), "k", k)
    return heads


def check_packed(leading: tuple[str, ...], q: Tensor | None, k: Tensor, v: Tensor) -> Heads:
    """q, k [*leading, Hqk, D] and v [*leading, Hv, E], of any strides; the heads they make."""
    like = ("k", k) if q is None else ("q", q)
    for name, tensor, tail in (*([] if q is None else [("q", q, "Hqk, D")]), ("k", k, "Hqk, D"), ("v", v, "Hv, E")):
        if tensor.ndim != len(leading) + 2:
            fail(name, f"[{', '.join(leading)}, {tail}]", describe(tensor))
        _check_like_first(name, tensor, *like)
    first_name, first = like
    if _differ(k.shape, first.shape):
        fail("k", f"{list(first.shape)} as {first_name} is", describe(k))
    if _differ(v.shape[:-2], first.shape[:-2]):
        fail("v", f"[{', '.join(map(str, first.shape[:-2]))}, Hv, E] as {first_name} is", describe(v))
    return _check_heads(first_name, first.shape[-2], v.shape[-2], first.shape[-1], v.shape[-1])


def check_pool(state_pool: Tensor, heads: Heads, as_in: str, first: Tensor, name: str = "state_pool") -> None:
    """A pool of states [num_slots, H, D, E], of any strides that leave each element a place of its own."""
    shape = (heads.num_heads, heads.head_qk, heads.head_v)
    if state_pool.dtype not in _FLOATS:
        fail(f"{name}.dtype", "float32, bfloat16 or float16", state_pool.dtype, TypeError)
    if state_pool.ndim != 4 or _differ(state_pool.shape[1:], shape):
        hint = _if_transposed(name, state_pool, (0, *shape))
        fail(name, f"[num_slots, {', '.join(map(str, shape))}]{hint}", describe(state_pool))
    _check_device(name, state_pool, as_in, first)
    _check_places(name, state_pool)


def check_out(out: Tensor, shape: tuple[int, ...], q: Tensor) -> None:
    """A tensor for the outputs, of any strides that leave each element a place of its own."""
    _check_shape("out", out, shape, "q", q)
    _check_dtype("out", out, "q", q)
    _check_places("out", out)


def overlap(op: str, tensors: Sequence[Tensor | None], names: Names = _NAMES) -> MemoryOverlap:
    """What refuses tensors of an op, in its order, of which one that it writes shares memory with another."""
    state_pool, slots, slopes = names
    if op == "varlen":
        order = ["q", "k", "v", slopes, "cu_seqlens", state_pool, slots, "has_initial_state"]
        order += ["snapshot.positions", "snapshot.slots", "out"]
    elif op == "commit":
        order = ["k", "v", state_pool, slots, slopes, "accepted"]
    else:
        order = ["q", "k", "v", state_pool, slots, slopes, "out"]
    written = {"verify": ["out"], "commit": [state_pool]}.get(op, ["out", state_pool])
    return MemoryOverlap(dict(zip(order, tensors, strict=True)), written)


def check_values(
    names: Names = _NAMES, *, slopes: Tensor, slots: Tensor | None = None, num_slots: int = 0,
    cu_seqlens: Tensor | None = None, tokens: int = 0, positions: Tensor | None = None,
    snapshot_slots: Tensor | None = None, accepted: Tensor | None = None, drafts: int = 0,
) -> None:  # fmt: skip
    """What only device memory tells, by one copy of all of it to the host."""
    none = slopes.new_empty(0, dtype=torch.int64)
    integers = [none if t is None else t for t in (slots, cu_seqlens, positions, snapshot_slots, accepted)]
    # Decay rates travel as the integers that their bits are.
    flat = [slopes.reshape(-1).view(torch.int32).long(), *[tensor.reshape(-1).long() for tensor in integers]]
    parts = torch.cat(flat).cpu().split([part.numel() for part in flat])
    decay_rates: list[float] = parts[0].int().view(torch.float32).tolist()
    slot_of, bounds, position_of, snapshot_of, counts = (part.tolist() for part in parts[1:])

    for head, rate in enumerate(decay_rates):
        # NaN is not at least 0 either.
        if not 0 <= rate < math.inf:
            fail(f"{names.slopes}[{head}]", "finite and 0 or more", rate)
    if bounds:
        _check_bounds(bounds, tokens)
    for sequence, count in enumerate(counts):
        if not 0 <= count <= drafts:
            fail(f"accepted[{sequence}]", f"from 0 to the {drafts} tokens given", count)
    owned = [(f"{names.slots}[{sequence}]", slot, slot >= 0) for sequence, slot in enumerate(slot_of)]
    if position_of:
        per_sequence = len(position_of) // len(slot_of)
        for place, (position, slot) in enumerate(zip(position_of, snapshot_of, strict=True)):
            sequence, column = divmod(place, per_sequence)
            length = bounds[sequence + 1] - bounds[sequence]
            if position != -1 and not 1 <= position <= length:
                name = f"snapshot.positions[{sequence}, {column}]"
                fail(name, f"-1 (unused) or from 1 to the sequence's {length} tokens", position)
            owned.append((f"snapshot.slots[{sequence}, {column}]", slot, slot >= 0 and position != -1))
    _check_owned(owned, num_slots)


def _check_bounds(bounds: list[int], tokens: int) -> None:
    if bounds[0] != 0:
        fail("cu_seqlens[0]", "0", bounds[0])
    for place in range(1, len(bounds)):
        before = bounds[place - 1]
        if not before <= bounds[place] <= tokens:
            wanted = f"from cu_seqlens[{place - 1}] = {before} to {tokens} (the rows of q)"
            fail(f"cu_seqlens[{place}]", wanted, bounds[place])


def _check_owned(owned: list[tuple[str, int, bool]], num_slots: int) -> None:
    """Slots by name, and whether each is in use: all -1 or in the pool, none used twice."""
    user_of: dict[int, str] = {}
    for name, slot, used in owned:
        if not -1 <= slot < num_slots:
            fail(name, f"-1 (unused) or a slot below {num_slots}", slot)
        if used and slot in user_of:
            fail(name, f"a slot that nothing else in the call has, as {user_of[slot]} has this one", slot)
        if used:
            user_of[slot] = name


def _check_states(
    state_pool: Tensor, slots: Tensor, slopes: Tensor, heads: Heads, as_in: str, first: Tensor, names: Names = _NAMES
) -> None:
    _check_indices(names.slots, slots, (first.shape[0],), as_in, first)
    layout = "[B, H, D]" if first.ndim == 3 else "[B, T, H, D]"
    _check_slopes(names.slopes, slopes, heads.num_heads, as_in, first, layout)
    check_pool(state_pool, heads, as_in, first, names.state_pool)


def _check_heads(first_name: str, heads_qk: int, heads_v: int, head_qk: int, head_v: int) -> Heads:
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
    if known(first.shape[1] > MOST_DRAFTS):
        fail(name, f"[B, T, ...] with at most {MOST_DRAFTS} tokens T", describe(first))


def _check_slopes(name: str, slopes: Tensor, num_heads: int, as_in: str, first: Tensor, layout: str) -> None:
    """One rate a head of ``first``, laid out so; a layout in which as many heads as rates would stand is named."""
    if slopes.dtype != torch.float32:
        fail(f"{name}.dtype", "float32", slopes.dtype, TypeError)
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
    _check_device(name, slopes, as_in, first)


def _if_tokens_first(name: str, tensor: Tensor, q: Tensor) -> str:
    """A hint for [b, n, h, d] beside a q [b, h, n, d]."""
    fits = not _differ(tensor.shape[:3], [q.shape[0], q.shape[2], q.shape[1]])
    return f" (pass {name}.transpose(1, 2) if it is [b, n, h, d])" if fits else ""


def _if_transposed(name: str, tensor: Tensor, shape: Sequence[int]) -> str:
    """A hint for states [.., D, E] that come as [.., E, D]."""
    fits = tensor.ndim == len(shape) and not _differ(tensor.shape[1:], [*shape[1:-2], shape[-1], shape[-2]])
    return f" (pass {name}.mT if it is [.., E, D])" if fits else ""


def _check_indices(name: str, indices: Tensor, shape: tuple[int, ...], as_in: str, first: Tensor) -> None:
    if indices.dtype not in _INTEGERS:
        fail(f"{name}.dtype", "int32 or int64", indices.dtype, TypeError)
    _check_packed_whole(name, indices, shape, as_in, first)


def _check_packed_whole(name: str, tensor: Tensor, shape: tuple[int, ...], as_in: str, first: Tensor) -> None:
    if _differ(tensor.shape, shape) or not tensor.is_contiguous():
        fail(name, f"{list(shape)}, contiguous", describe(tensor))
    _check_device(name, tensor, as_in, first)


def _check_matrices(
    name: str, tensor: Tensor, shape: tuple[int, ...], as_in: str, first: Tensor, hint: str = ""
) -> None:
    if tensor.dtype != torch.float32:
        fail(f"{name}.dtype", "float32", tensor.dtype, TypeError)
    _check_shape(name, tensor, shape, as_in, first, hint)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], as_in: str, first: Tensor, hint: str = "") -> None:
    if _differ(tensor.shape, shape):
        fail(name, f"[{', '.join(map(str, shape))}]{hint}", describe(tensor))
    _check_device(name, tensor, as_in, first)


def _check_like_first(name: str, tensor: Tensor, as_in: str, first: Tensor) -> None:
    """q, k or v: of a dtype that the kernels take, which is that of the first, and where the first is."""
    if tensor.dtype not in _FLOATS:
        fail(f"{name}.dtype", "bfloat16, float16 or float32", tensor.dtype, TypeError)
    _check_dtype(name, tensor, as_in, first)
    _check_device(name, tensor, as_in, first)


def _check_dtype(name: str, tensor: Tensor, as_in: str, first: Tensor) -> None:
    if tensor.dtype != first.dtype:
        fail(f"{name}.dtype", f"{first.dtype} as that of {as_in} is", tensor.dtype, TypeError)


def _check_device(name: str, tensor: Tensor, as_in: str, first: Tensor) -> None:
    if tensor.device != first.device:
        fail(f"{name}.device", f"{first.device} as {as_in} is", tensor.device)


def _check_places(name: str, tensor: Tensor) -> None:
    """A tensor to be written: each stride passes all that the smaller ones reach, so that no place is shared."""
    sizes = [*tensor.shape, *tensor.stride()]
    if any(isinstance(size, torch.SymInt) for size in sizes) or 0 in sizes[: tensor.ndim]:
        # Of symbolic sizes the op asks when it runs.
        return
    dims = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    reach = 0
    for stride, size in sorted(dims, key=lambda dim: dim[0]):
        if stride <= reach:
            fail(name, "a tensor whose elements do not share memory, nor its dimensions interleave", describe(tensor))
        reach += stride * (size - 1)
