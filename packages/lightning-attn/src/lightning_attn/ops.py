"""The torch ops: schemas, fake implementations, dispatch, autograd.

=====================  ==================================================================================
attention              functional, differentiable
attention_inference    attention without autograd, which costs an op 5 us an eager call even when unused
attention_backward     the gradients of attention
packed                 functional, differentiable: packed sequences without a pool
packed_backward        the gradients of packed
state                  functional: the states that keys and values leave, without outputs
varlen, decode         write the states' pool and the outputs they are given
verify                 writes the outputs it is given
commit                 writes the states' pool
verify_tree            as verify, of drafts that branch
commit_path            as commit, of drafts that branch
=====================  ==================================================================================

Every implementation, the fake ones included, checks its arguments. On a GPU checks, plan and launch are made once for
each combination of shapes, strides, dtypes and numbers, and found again in a table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kernel_reference.checks import values_are_checked
from kernel_reference.dispatch import (
    PreparedLaunches,
    allocator,
    implement,
    launch_module,
    past_dispatcher,
    with_gradients,
)
from lightning_attn import arguments, reference
from lightning_attn.packed import arguments as packed_arguments
from lightning_attn.packed import reference as packed_reference
from lightning_attn.packed.plan import StatePlan
from lightning_attn.packed.reference import new_packed_gradients, new_packed_results, new_packed_states
from lightning_attn.plan import DecodePlan, PrefillPlan
from lightning_attn.reference import new_gradients, new_results
from lightning_attn.tensors import (
    Attention,
    AttentionBackward,
    Commit,
    Decode,
    Packed,
    PackedBackward,
    PathCommit,
    State,
    TreeVerify,
    Varlen,
)
from lightning_attn.trees import arguments as tree_arguments

Tensor = torch.Tensor

_QKV = "Tensor q, Tensor k, Tensor v"
_HISTORY = "Tensor ed, Tensor? kv_history"
_SEQUENCES = "Tensor slopes, Tensor cu_seqlens, Tensor? initial_state"
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
    ("packed", f"{_QKV}, {_SEQUENCES}, {_LAST}", "(Tensor, Tensor)"),
    (
        "packed_backward",
        f"{_QKV}, {_SEQUENCES}, Tensor d_out, Tensor? d_final_state, {_LAST}",
        "(Tensor, Tensor, Tensor, Tensor)",
    ),
    (
        "state",
        "Tensor k, Tensor v, Tensor slopes, Tensor? cu_seqlens, Tensor? initial_state, float scale, bool exact,"
        f" bool reverse, {_PLAN}",
        "Tensor",
    ),
    (
        "varlen",
        f"{_QKV}, Tensor slopes, Tensor cu_seqlens, Tensor(a!) state_pool, Tensor slots, Tensor? has_initial_state,"
        " Tensor? snapshot_positions, Tensor? snapshot_slots, Tensor(b!) out, bool all_have_initial_state,"
        f" {_LAST}",
        "()",
    ),
    ("decode", f"{_QKV}, Tensor(a!) state_pool, {_STATES}, Tensor(b!) out, {_LAST}", "()"),
    ("verify", f"{_QKV}, Tensor state_pool, {_STATES}, Tensor(a!) out, {_LAST}", "()"),
    ("verify_tree", f"{_QKV}, Tensor state_pool, {_STATES}, Tensor parents, Tensor(a!) out, {_LAST}", "()"),
    (
        "commit_path",
        f"Tensor k, Tensor v, Tensor(a!) state_pool, {_STATES}, Tensor accepted, Tensor path, {_PLAN}",
        "()",
    ),
    ("commit", f"Tensor k, Tensor v, Tensor(a!) state_pool, {_STATES}, Tensor accepted, {_PLAN}", "()"),
):
    _library.define(f"{_name}({_arguments}) -> {_results}", tags=(torch.Tag.pt2_compliant_tag,))

launches = PreparedLaunches()

# Below, what an op is given is its tensors, then its numbers, the last of which is a plan as ints; torch leaves that
# out when it is None.


def _prepare_attention(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = launch_module("lightning_attn")
    t = Attention(*tensors)
    problem = arguments.check_attention(t, *numbers)
    run = launch.prepare_attention(problem, PrefillPlan.from_ints(_plan(numbers, 1)), t)
    return [allocator(result) for result in new_results(t.q, t.v)], run


def _prepare_attention_backward(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = launch_module("lightning_attn.gradients")
    t = AttentionBackward(*tensors)
    problem = arguments.check_attention_backward(t, *numbers)
    run = launch.prepare_attention_backward(problem, PrefillPlan.from_ints(_plan(numbers, 1)), t)
    return [allocator(result) for result in new_gradients(t)], run


def _prepare_packed(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = launch_module("lightning_attn.packed")
    t = Packed(*tensors)
    problem = packed_arguments.check_packed_attention(t, *numbers)
    run = launch.prepare_packed(problem, PrefillPlan.from_ints(_plan(numbers, 1)), t)
    return [allocator(result) for result in new_packed_results(t.q, t.v, t.cu_seqlens)], run


def _prepare_packed_backward(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = launch_module("lightning_attn.packed")
    t = PackedBackward(*tensors)
    problem = packed_arguments.check_packed_backward(t, *numbers)
    run = launch.prepare_packed_backward(problem, PrefillPlan.from_ints(_plan(numbers, 1)), t)
    return [allocator(result) for result in new_packed_gradients(t)], run


def _prepare_state(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = launch_module("lightning_attn.packed")
    t = State(*tensors)
    problem = packed_arguments.check_state(t, *numbers)
    run = launch.prepare_state(problem, StatePlan.from_ints(_plan(numbers, 3)), t)
    return allocator(new_packed_states(t.k, t.v, t.cu_seqlens)), run


def _prepare_varlen(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = launch_module("lightning_attn")
    t = Varlen(*tensors)
    problem = arguments.check_varlen(t, *numbers)
    run = launch.prepare_varlen(problem, PrefillPlan.from_ints(_plan(numbers, 2)), t)
    return arguments.overlap("varlen", t), run


def _prepare_decode(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = launch_module("lightning_attn")
    t = Decode(*tensors)
    problem = arguments.check_decode(t, *numbers)
    return arguments.overlap("decode", t), launch.prepare_decode(problem, DecodePlan.from_ints(_plan(numbers, 1)), t)


def _prepare_verify(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = launch_module("lightning_attn")
    t = Decode(*tensors)
    problem = arguments.check_verify(t, *numbers)
    return arguments.overlap("verify", t), launch.prepare_decode(problem, DecodePlan.from_ints(_plan(numbers, 1)), t)


def _prepare_commit(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = launch_module("lightning_attn")
    t = Commit(*tensors)
    problem = arguments.check_commit(t, *numbers)
    return arguments.overlap("commit", t), launch.prepare_commit(problem, DecodePlan.from_ints(_plan(numbers, 0)), t)


def _prepare_verify_tree(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = launch_module("lightning_attn.trees")
    t = TreeVerify(*tensors)
    problem = tree_arguments.check_verify_tree(t, *numbers)
    run = launch.prepare_verify_tree(problem, DecodePlan.from_ints(_plan(numbers, 1)), t)
    return arguments.overlap("verify_tree", t), run


def _prepare_commit_path(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = launch_module("lightning_attn.trees")
    t = PathCommit(*tensors)
    problem = tree_arguments.check_commit_path(t, *numbers)
    run = launch.prepare_commit_path(problem, DecodePlan.from_ints(_plan(numbers, 0)), t)
    return arguments.overlap("commit_path", t), run


def _plan(numbers: tuple[Any, ...], index: int) -> Any:
    return numbers[index] if len(numbers) > index else None


def _kernel_attention(*given: Any) -> tuple[Tensor, Tensor]:
    (new_out, new_kv), run = launches.find(_prepare_attention, given[:5], given[5:])
    q, k, v, ed, kv_history = given[:5]
    if values_are_checked(ed.device):
        arguments.check_rates("ed", ed)
    out, kv = new_out(), new_kv()
    run(Attention(q, k, v, ed, kv_history, out, kv))
    return out, kv


def _kernel_attention_backward(*given: Any) -> tuple[Tensor, ...]:
    allocators, run = launches.find(_prepare_attention_backward, given[:7], given[7:])
    ed = given[3]
    if values_are_checked(ed.device):
        arguments.check_rates("ed", ed)
    gradients = tuple([allocate() for allocate in allocators])
    run(AttentionBackward(*given[:7], *_asked_for(gradients)))
    return gradients


def _kernel_packed(*given: Any) -> tuple[Tensor, Tensor]:
    (new_out, new_final), run = launches.find(_prepare_packed, given[:6], given[6:])
    q, k, v, slopes, cu_seqlens, initial_state = given[:6]
    if values_are_checked(q.device):
        packed_arguments.check_packed_values(slopes, cu_seqlens, "q", q.shape[0])
    out, final = new_out(), new_final()
    run(Packed(q, k, v, slopes, cu_seqlens, initial_state, out, final))
    return out, final


def _kernel_packed_backward(*given: Any) -> tuple[Tensor, ...]:
    allocators, run = launches.find(_prepare_packed_backward, given[:8], given[8:])
    q, slopes, cu_seqlens = given[0], given[3], given[4]
    if values_are_checked(q.device):
        packed_arguments.check_packed_values(slopes, cu_seqlens, "q", q.shape[0])
    gradients = tuple([allocate() for allocate in allocators])
    run(PackedBackward(*given[:8], *_asked_for(gradients)))
    return gradients


def _asked_for(gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Without that of states, where it is of no elements: see :meth:`.AttentionBackward.asks_for_states`."""
    return gradients if gradients[3].shape[3] else (*gradients[:3], None)


def _kernel_state(*given: Any) -> Tensor:
    allocate, run = launches.find(_prepare_state, given[:5], given[5:])
    k, v, slopes, cu_seqlens, initial_state = given[:5]
    if values_are_checked(k.device):
        if cu_seqlens is None:
            arguments.check_rates("slopes", slopes)
        else:
            packed_arguments.check_packed_values(slopes, cu_seqlens, "k", k.shape[0])
    final: Tensor = allocate()
    run(State(k, v, slopes, cu_seqlens, initial_state, final))
    return final


def _kernel_varlen(*given: Any) -> None:
    tensors = given[:11]
    refuse_overlap, run = launches.find(_prepare_varlen, tensors, given[11:])
    refuse_overlap(*tensors)
    t = Varlen(*tensors)
    if values_are_checked(t.q.device):
        arguments.check_varlen_values(t)
    run(t)


def _kernel_decode(*given: Any) -> None:
    t = Decode(*given[:7])
    refuse_overlap, run = launches.find(_prepare_decode, t, given[7:])
    refuse_overlap(*t)
    if values_are_checked(t.slots.device):
        arguments.check_decode_values(t)
    run(t)


def _kernel_verify(*given: Any) -> None:
    t = Decode(*given[:7])
    refuse_overlap, run = launches.find(_prepare_verify, t, given[7:])
    refuse_overlap(*t)
    if values_are_checked(t.slots.device):
        arguments.check_decode_values(t)
    run(t)


def _kernel_commit(*given: Any) -> None:
    t = Commit(*given[:6])
    refuse_overlap, run = launches.find(_prepare_commit, t, given[6:])
    refuse_overlap(*t)
    if values_are_checked(t.slots.device):
        arguments.check_decode_values(t)
    run(t)


def _kernel_verify_tree(*given: Any) -> None:
    t = TreeVerify(*given[:8])
    refuse_overlap, run = launches.find(_prepare_verify_tree, t, given[8:])
    refuse_overlap(*t)
    if values_are_checked(t.slots.device):
        tree_arguments.check_tree_values(t)
    run(t)


def _kernel_commit_path(*given: Any) -> None:
    t = PathCommit(*given[:7])
    refuse_overlap, run = launches.find(_prepare_commit_path, t, given[7:])
    refuse_overlap(*t)
    if values_are_checked(t.slots.device):
        tree_arguments.check_tree_values(t)
    run(t)


def _fake_attention(*given: Any) -> tuple[Tensor, Tensor]:
    t = Attention(*given[:5])
    arguments.check_attention(t, *given[5:])
    return new_results(t.q, t.v)


def _fake_attention_backward(*given: Any) -> tuple[Tensor, ...]:
    t = AttentionBackward(*given[:7])
    arguments.check_attention_backward(t, *given[7:])
    return new_gradients(t)


def _fake_packed(*given: Any) -> tuple[Tensor, Tensor]:
    t = Packed(*given[:6])
    packed_arguments.check_packed_attention(t, *given[6:])
    return new_packed_results(t.q, t.v, t.cu_seqlens)


def _fake_packed_backward(*given: Any) -> tuple[Tensor, ...]:
    t = PackedBackward(*given[:8])
    packed_arguments.check_packed_backward(t, *given[8:])
    return new_packed_gradients(t)


def _fake_state(*given: Any) -> Tensor:
    t = State(*given[:5])
    packed_arguments.check_state(t, *given[5:])
    return new_packed_states(t.k, t.v, t.cu_seqlens)


def _fake_varlen(*given: Any) -> object:
    return arguments.check_varlen(Varlen(*given[:11]), *given[11:])


def _fake_decode(*given: Any) -> object:
    return arguments.check_decode(Decode(*given[:7]), *given[7:])


def _fake_verify(*given: Any) -> object:
    return arguments.check_verify(Decode(*given[:7]), *given[7:])


def _fake_commit(*given: Any) -> object:
    return arguments.check_commit(Commit(*given[:6]), *given[6:])


def _fake_verify_tree(*given: Any) -> object:
    return tree_arguments.check_verify_tree(TreeVerify(*given[:8]), *given[8:])


def _fake_commit_path(*given: Any) -> object:
    return tree_arguments.check_commit_path(PathCommit(*given[:7]), *given[7:])


for _name, _reference, _kernel, _fake in (
    ("attention", reference.attention, _kernel_attention, _fake_attention),
    ("attention_inference", reference.attention, _kernel_attention, _fake_attention),
    ("attention_backward", reference.attention_backward, _kernel_attention_backward, _fake_attention_backward),
    ("packed", packed_reference.packed, _kernel_packed, _fake_packed),
    ("packed_backward", packed_reference.packed_backward, _kernel_packed_backward, _fake_packed_backward),
    ("state", packed_reference.state, _kernel_state, _fake_state),
    ("varlen", reference.varlen, _kernel_varlen, _fake_varlen),
    ("decode", reference.decode, _kernel_decode, _fake_decode),
    ("verify", reference.verify, _kernel_verify, _fake_verify),
    ("commit", reference.commit, _kernel_commit, _fake_commit),
    ("verify_tree", reference.verify_tree, _kernel_verify_tree, _fake_verify_tree),
    ("commit_path", reference.commit_path, _kernel_commit_path, _fake_commit_path),
):
    implement(_library, _name, reference=_reference, kernel=_kernel, fake=_fake)


attention_inference = past_dispatcher(torch.ops.lightning_attn.attention_inference.default, _kernel_attention, 5)
_gradients_of_attention = past_dispatcher(
    torch.ops.lightning_attn.attention_backward.default, _kernel_attention_backward, 7
)
_gradients_of_packed = past_dispatcher(torch.ops.lightning_attn.packed_backward.default, _kernel_packed_backward, 8)


def _remember_inputs(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    *tensors, ctx.scale, ctx.plan = inputs
    ctx.save_for_backward(*tensors)
    # An output that nothing uses has no gradient, and no zeros are made for it.
    ctx.set_materialize_grads(False)


def gradients_of_inputs(
    make: Callable[..., Any], ctx: Any, d_out: Tensor | None, d_kv: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Of the arguments of the op ``attention``, of which ``make`` makes those of q, k, v and kv_history."""
    q, k, v, ed, kv_history = ctx.saved_tensors
    if d_out is None and d_kv is None:
        return (None,) * 7
    if d_out is None:
        d_out = q.new_zeros(()).expand(*q.shape[:3], v.shape[3])
    d_q, d_k, d_v, d_history = make(q, k, v, ed, kv_history, d_out, d_kv, ctx.scale, ctx.plan)
    return d_q, d_k, d_v, None, None if kv_history is None else d_history, None, None


@once_differentiable
def _attention_backward(ctx: Any, d_out: Tensor | None, d_kv: Tensor | None) -> tuple[Tensor | None, ...]:
    return gradients_of_inputs(_gradients_of_attention, ctx, d_out, d_kv)


torch.library.register_autograd(
    "lightning_attn::attention", _attention_backward, setup_context=_remember_inputs, lib=_library
)
attention = past_dispatcher(
    torch.ops.lightning_attn.attention.default,
    with_gradients(_kernel_attention, _remember_inputs, _attention_backward),
    5,
)


@once_differentiable
def _packed_backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, slopes, cu_seqlens, initial_state = ctx.saved_tensors
    if d_out is None and d_final is None:
        return (None,) * 8
    if d_out is None:
        d_out = q.new_zeros(()).expand(*q.shape[:2], v.shape[2])
    d_q, d_k, d_v, d_initial = _gradients_of_packed(
        q, k, v, slopes, cu_seqlens, initial_state, d_out, d_final, ctx.scale, ctx.plan
    )
    return d_q, d_k, d_v, None, None, None if initial_state is None else d_initial, None, None


torch.library.register_autograd(
    "lightning_attn::packed", _packed_backward, setup_context=_remember_inputs, lib=_library
)
packed = past_dispatcher(
    torch.ops.lightning_attn.packed.default, with_gradients(_kernel_packed, _remember_inputs, _packed_backward), 6
)
