"""``lightning_attention`` under torch.func (jvp, grad, vmap, nested too) and under forward_ad.

The op's own autograd knows only reverse mode, and would drop tangents. The recurrence is linear in q, in k, and in v
and the initial state together: a tangent is the recurrence again, over tangents.
"""

from __future__ import annotations

from typing import Any

import torch

from kernel_reference.checks import fail
from lightning_attn.ops import gradients_of_inputs

Tensor = torch.Tensor

_forward = torch.ops.lightning_attn.attention_inference.default
_backward = torch.ops.lightning_attn.attention_backward.default


def attention(
    q: Tensor, k: Tensor, v: Tensor, ed: Tensor, kv_history: Tensor | None, scale: float, plan: Any = None
) -> tuple[Tensor, Tensor]:
    """The op ``attention``, under any transform."""
    if torch.compiler.is_compiling():
        # Dynamo would take the forward for the whole, and derivatives would be 0.
        torch._dynamo.graph_break(msg="torch.func's transforms of lightning_attention are not compiled")
    apply: Any = _Attention.apply
    found: tuple[Tensor, Tensor] = apply(q, k, v, ed, kv_history, scale, plan)
    return found


def _heads_first(info: Any, dims: Any, tensors: tuple[Tensor | None, ...]) -> list[Any]:
    """Tensors [b, h, ...], the fourth of them the rates, with vmap's dimension folded into the heads."""
    folded: list[Any] = []
    for i, (dim, tensor) in enumerate(zip(dims, tensors, strict=True)):
        if tensor is None:
            folded.append(None)
        elif i == 3:
            rows = tensor.reshape(1, -1) if dim is None else tensor.movedim(dim, 0).reshape(info.batch_size, -1)
            folded.append(rows.expand(info.batch_size, -1).contiguous().view(-1))
        else:
            beside = tensor[:, None] if dim is None else tensor.movedim(dim, 0).transpose(0, 1)
            folded.append(beside.expand(-1, info.batch_size, *beside.shape[2:]).flatten(1, 2))
    return folded


def _apart(info: Any, results: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    return tuple(result.unflatten(1, (info.batch_size, -1)) for result in results), (1,) * len(results)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(q: Any, k: Any, v: Any, ed: Any, kv_history: Any, scale: Any, plan: Any) -> Any:
        return _forward(q, k, v, ed, kv_history, scale, plan)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
        *tensors, ctx.scale, ctx.plan = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, d_out: Any, d_kv: Any) -> Any:
        return gradients_of_inputs(_Gradients.apply, ctx, d_out, d_kv)

    @staticmethod
    def jvp(ctx: Any, d_q: Any, d_k: Any, d_v: Any, d_ed: Any, d_history: Any, *_: Any) -> Any:
        q, k, v, ed, kv_history = ctx.saved_tensors
        if d_ed is not None:
            fail("ed", "without a tangent: decay rates have no derivative here", "a dual tensor")
        rest = (ctx.scale, ctx.plan)
        outs, states = [], []
        if d_q is not None:
            out, state = attention(d_q, k, v, ed, kv_history, *rest)
            outs.append(out)
            # It does not depend on q; torch takes no None for a tangent.
            states.append(torch.zeros_like(state))
        if d_k is not None:
            out, state = attention(q, d_k, v, ed, None, *rest)
            outs.append(out)
            states.append(state)
        if d_v is not None or d_history is not None:
            out, state = attention(q, k, torch.zeros_like(v) if d_v is None else d_v, ed, d_history, *rest)
            outs.append(out)
            states.append(state)
        return sum(outs[1:], outs[0]), sum(states[1:], states[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, q: Any, k: Any, v: Any, ed: Any, kv_history: Any, scale: Any, plan: Any) -> Any:
        tensors = _heads_first(info, in_dims[:5], (q, k, v, ed, kv_history))
        q, k, v, ed, kv_history = tensors
        return _apart(info, attention(q, k, v, ed, kv_history, scale, plan))


class _Gradients(torch.autograd.Function):
    """The gradients, which are not differentiable."""

    @staticmethod
    def forward(q: Any, k: Any, v: Any, ed: Any, kv_history: Any, d_out: Any, d_kv: Any, scale: Any, plan: Any) -> Any:
        return _backward(q, k, v, ed, kv_history, d_out, d_kv, scale, plan)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("lightning_attention is differentiable once: its gradients have no derivative")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError("lightning_attention is differentiable once: its gradients have no derivative")

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        q: Any,
        k: Any,
        v: Any,
        ed: Any,
        kv_history: Any,
        d_out: Any,
        d_kv: Any,
        scale: Any,
        plan: Any,
    ) -> Any:
        tensors = _heads_first(info, in_dims[:7], (q, k, v, ed, kv_history, d_out, d_kv))
        apply: Any = _Gradients.apply
        return _apart(info, apply(*tensors, scale, plan))
