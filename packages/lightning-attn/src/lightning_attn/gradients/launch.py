"""What launch.py does, for gradients: three prefills, of which two may run at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch

from kernel_reference.launching import launch_nothing, on_device
from kernel_reference.together import compiled_together
from lightning_attn import launch
from lightning_attn.gradients.plan import groups_at_once, suits_wide, wide_plan
from lightning_attn.launch import keep_state, prepare_prefill
from lightning_attn.plan import BackwardProblem, Operand, PrefillPlan, PrefillProblem, fitted
from lightning_attn.tensors import AttentionBackward, Prefill


def prepare_attention_backward(
    problem: BackwardProblem, plan: PrefillPlan | None, tensors: AttentionBackward
) -> Callable[[AttentionBackward], None]:
    """What makes the gradients: the problem says how."""
    if problem.dv.rows == 0:
        keeps = problem.dv.final is not None
        return (lambda t: keep_state(t.d_kv, t.d_history)) if keeps else launch_nothing
    if problem.dv.sequences == 0:
        return launch_nothing
    device = tensors.q.device
    other = None if plan is None else fitted(plan, problem.dq.heads)
    prefill_dq = prepare_prefill(problem.dq, other, device)
    groups = 0 if plan is not None else groups_at_once(problem, launch.device_limits(device))
    of_keys = _at_once(problem, groups, device) if groups else _in_turn(problem, plan, other, device)

    def run(t: AttentionBackward) -> None:
        prefill_dq(Prefill(t.d_out, t.v, t.k, t.d_q, t.ed, t.kv_history))
        of_keys(t)

    return compiled_together(run, device)


def _in_turn(
    problem: BackwardProblem, plan: PrefillPlan | None, other: PrefillPlan | None, device: torch.device
) -> Callable[[AttentionBackward], None]:
    """dk, and then dv."""
    prefill_dk = prepare_prefill(problem.dk, other, device)
    prefill_dv = prepare_prefill(problem.dv, plan, device)

    def run(t: AttentionBackward) -> None:
        _make_dk(prefill_dk, t)
        _make_dv(prefill_dv, t)

    return run


def _at_once(problem: BackwardProblem, groups: int, device: torch.device) -> Callable[[AttentionBackward], None]:
    """dk on a stream beside the current one, and dv, of one group of heads after the other."""
    count = problem.dv.heads.num_heads // groups
    plan = wide_plan(problem.dv.heads) if suits_wide(problem.dv.heads) else None
    prefill_dk = prepare_prefill(_of_heads(problem.dk, count), plan, device, whole=True)
    prefill_dv = prepare_prefill(_of_heads(problem.dv, count), plan, device, whole=True)

    def run(t: AttentionBackward) -> None:
        parts = [_part(t, slice(i * count, (i + 1) * count)) for i in range(groups)] if groups > 1 else [t]
        current = torch.cuda.current_stream(device)
        beside, begun, ended = _stream_beside(device, current.cuda_stream)
        begun.record(current)
        beside.wait_event(begun)
        try:
            # Without a context, which asks for devices and streams in twice the time.
            torch.cuda.set_stream(beside)
            try:
                for part in parts:
                    _make_dk(prefill_dk, part)
            finally:
                torch.cuda.set_stream(current)
            for part in parts:
                _make_dv(prefill_dv, part)
        finally:
            ended.record(beside)
            current.wait_event(ended)

    # To set a stream sets its device too.
    return on_device(device, run)


def _make_dk(prefill: Callable[[Prefill], None], t: AttentionBackward) -> None:
    prefill(Prefill(t.v, t.d_out, t.q, t.d_k, t.ed, t.d_kv))


def _make_dv(prefill: Callable[[Prefill], None], t: AttentionBackward) -> None:
    prefill(Prefill(t.k, t.q, t.d_out, t.d_v, t.ed, t.d_kv, t.d_history))


@lru_cache(maxsize=64)
def _stream_beside(device: torch.device, stream: int) -> tuple[torch.cuda.Stream, torch.cuda.Event, torch.cuda.Event]:
    """One for each stream that gradients are made on: two of those, of which one may be captured, share none.

    With the events that each waits for.
    """
    return torch.cuda.Stream(device), torch.cuda.Event(), torch.cuda.Event()


def _of_heads(problem: PrefillProblem, count: int) -> PrefillProblem:
    """The same for so many heads."""

    def fewer(operand: Operand) -> Operand:
        b, n, _, d = operand.sizes
        return Operand((b, n, count, d), operand.strides)

    heads = replace(problem.heads, num_heads_qk=count, num_heads_v=count)
    q, k, v, o = (fewer(operand) for operand in (problem.q, problem.k, problem.v, problem.o))
    return replace(problem, heads=heads, q=q, k=k, v=v, o=o)


def _part(t: AttentionBackward, heads: slice) -> AttentionBackward:
    """Those heads' of what dk and dv are made of."""

    def own(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[:, heads]

    return t._replace(
        q=t.q[:, heads], k=t.k[:, heads], v=t.v[:, heads], ed=t.ed.flatten()[heads], d_out=t.d_out[:, heads],
        d_kv=own(t.d_kv), d_k=own(t.d_k), d_v=own(t.d_v), d_history=own(t.d_history),
    )  # fmt: skip
