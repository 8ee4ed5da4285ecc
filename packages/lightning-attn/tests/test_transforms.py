"""Are the derivatives right under torch.func and forward mode, and refused by name where there are none?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import lightning_attn
from kernel_reference.dispatch import with_gradients
from kernel_reference.recurrence import linear_attention
from lightning_attn import ops, reference

Tensor = torch.Tensor
NAMES = ("q", "k", "v", "kv_history")


def inputs(tensors, batch: int = 2, heads: int = 3, tokens: int = 9, d: int = 16, e: int = 24) -> list[Tensor]:
    return [tensors.normal(batch, heads, tokens, size) for size in (d, d, e)] + [tensors.normal(batch, heads, d, e)]


def attend(slopes: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(q: Tensor, k: Tensor, v: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
        result = lightning_attn.lightning_attention(q, k, v, slopes, kv_history=history, scale=0.5)
        return result.out, result.kv[:, :, 0]

    return run


def literally(slopes: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    """The recurrence in float64, through which torch differentiates."""

    def run(q: Tensor, k: Tensor, v: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
        tokens = q.shape[2]
        packed = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        cu = torch.arange(q.shape[0] + 1) * tokens
        out, state = linear_attention(*packed, slopes, cu_seqlens=cu, initial_state=history, scale=0.5)
        return out.unflatten(0, (-1, tokens)).transpose(1, 2), state

    return run


def assert_near(got: Any, wanted: Any) -> None:
    for one, other in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(wanted), strict=True):
        assert one.shape == other.shape
        size = other.abs().max()
        assert size > 0.1
        assert (one.double() - other.double()).abs().max() <= 1e-4 * size


@pytest.mark.parametrize("wrt", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)], ids=lambda wrt: " ".join(NAMES[i] for i in wrt))
def test_forward_mode_gives_the_derivative_of_the_recurrence(tensors, wrt) -> None:
    given, slopes = inputs(tensors), tensors.slopes(3)
    tangents = [torch.randn_like(given[i]) for i in wrt]

    def of(run: Callable[..., Any], given: list[Tensor]) -> Callable[..., Any]:
        return lambda *chosen: run(*[chosen[wrt.index(i)] if i in wrt else x for i, x in enumerate(given)])

    doubles = [x.double() for x in given]
    wanted = torch.func.jvp(
        of(literally(slopes), doubles), tuple(doubles[i] for i in wrt), tuple(t.double() for t in tangents)
    )
    got = torch.func.jvp(of(attend(slopes), given), tuple(given[i] for i in wrt), tuple(tangents))
    if wrt == (0,):
        # The state does not depend on q.
        assert not got[1][1].any()
        got, wanted = (got[0], got[1][0]), (wanted[0], wanted[1][0])
    assert_near(got, wanted)


def test_a_dual_level_gives_the_derivative_that_torch_func_does(tensors) -> None:
    given, run = inputs(tensors), attend(tensors.slopes(3))
    tangents = [torch.randn_like(x) for x in given]
    wanted = torch.func.jvp(run, tuple(given), tuple(tangents))[1]
    with forward_ad.dual_level():
        results = run(*[forward_ad.make_dual(x, t) for x, t in zip(given, tangents, strict=True)])
        assert_near([forward_ad.unpack_dual(result).tangent for result in results], wanted)


def loss_of(run: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    def loss(*given: Tensor) -> Tensor:
        out, state = run(*given)
        return (out**2).sum() + state.sin().sum()

    return loss


def test_grad_jacrev_and_jacfwd_give_the_gradients_of_autograd(tensors) -> None:
    given, loss = inputs(tensors, 1, 2, 3, 16, 16), loss_of(attend(tensors.slopes(2)))
    leaves = [x.clone().requires_grad_() for x in given]
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        assert_near(transform(loss, argnums=(0, 1, 2, 3))(*given), wanted)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("own_rates", [False, True], ids=["shared rates", "rates of their own"])
def test_vmap_and_vmap_of_grad_are_the_loop(tensors, own_rates) -> None:
    many = [torch.stack(samples, dim=1) for samples in zip(*[inputs(tensors) for _ in range(4)], strict=True)]
    rates = torch.stack([tensors.slopes(3) * (1 + i * own_rates) for i in range(4)])

    def call(rates: Tensor, *given: Tensor) -> Any:
        return attend(rates)(*given)

    def gradients(rates: Tensor, *given: Tensor) -> Any:
        return torch.func.grad(loss_of(attend(rates)), argnums=(0, 3))(*given)

    for function in (call, gradients):
        one_by_one = [function(rates[i], *[x[:, i] for x in many]) for i in range(4)]
        wanted = [torch.stack(parts) for parts in zip(*one_by_one, strict=True)]
        rates_given = rates if own_rates else rates[0]
        dims = (0 if own_rates else None, 1, 1, 1, 1)
        assert_near(torch.vmap(function, in_dims=dims)(rates_given, *many), wanted)
    # Keys that all samples share.
    shared = torch.vmap(call, in_dims=(None, 1, None, None, None))(rates[0], many[0], *[x[:, 0] for x in many[1:]])
    assert_near(shared[0][2], call(rates[0], many[0][:, 2], *[x[:, 0] for x in many[1:]])[0])


@pytest.mark.parametrize("unused", ["neither", "the outputs", "the states"])
def test_gradients_past_the_dispatcher_are_those_of_the_op(tensors, monkeypatch, unused) -> None:
    """Of eager calls on a GPU: on a CPU by the reference, in the kernels' places."""
    given = [x.requires_grad_() for x in inputs(tensors, 1, 2, 5)]

    def gradients(op: Any) -> tuple[Tensor, ...]:
        out, state = op(*given[:3], tensors.slopes(2), given[3], 0.5, None)
        loss = (0 if unused == "the outputs" else (out**2).sum()) + (0 if unused == "the states" else state.sin().sum())
        return torch.autograd.grad(loss, given, allow_unused=True)

    wanted = gradients(torch.ops.lightning_attn.attention.default)
    on_gpu = given[0].is_cuda
    kernel = ops._kernel_attention if on_gpu else reference.attention
    now = with_gradients(kernel, ops._remember_inputs, ops._attention_backward)
    if not on_gpu:
        monkeypatch.setattr(ops, "_gradients_of_attention", reference.attention_backward)
    for one, other in zip(gradients(now), wanted, strict=True):
        assert one is other is None or torch.equal(one, other)


def test_a_second_derivative_is_refused(tensors) -> None:
    given, loss = inputs(tensors, 1, 2, 3), loss_of(attend(tensors.slopes(2)))
    first = torch.func.grad(loss)
    for second in (torch.func.grad(lambda *x: first(*x).sum()), torch.func.jacfwd(first)):
        with pytest.raises(RuntimeError, match="lightning_attention is differentiable once"):
            second(*given)


def test_decay_rates_have_neither_gradient_nor_tangent(tensors) -> None:
    given, slopes = inputs(tensors), tensors.slopes(3)
    with pytest.raises(ValueError, match=r"^ed must be without gradient"):
        torch.func.grad(lambda rates: attend(rates)(*given)[0].sum())(slopes)
    with pytest.raises(ValueError, match=r"^ed must be without a tangent"):
        torch.func.jvp(lambda rates: attend(rates)(*given)[0], (slopes,), (slopes,))


def stateful(tensors) -> dict[str, tuple[Callable[[Tensor], Any], Tensor]]:
    """Functions that keep a state, of q or k, and what they are given."""
    pool, slots = tensors.normal(4, 3, 16, 16), torch.tensor([2, 0], dtype=torch.int32, device=tensors.device)
    rates, x = tensors.slopes(3), tensors.normal(2, 3, 16)
    cu, given = slots.new_tensor([0, 1, 2]), {"slots": slots, "slopes": rates}
    return {
        "varlen": (
            lambda q: lightning_attn.lightning_attention_varlen(
                q, x, x, rates, cu, state_pool=pool, slots=slots, has_initial_state=True
            ),
            x,
        ),
        "decode": (lambda q: lightning_attn.lightning_decode(q, x, x, pool, **given), x),
        "drop-in": (
            lambda q: lightning_attn.linear_decode_forward_triton(
                q, x[:, :, None], x[:, :, None], pool, rates, slots
            ),
            x[:, :, None],
        ),
        "verify": (lambda q: lightning_attn.lightning_verify(q, x[:, None], x[:, None], pool, **given), x[:, None]),
        "commit": (
            lambda k: lightning_attn.lightning_commit(k, x[:, None], pool, accepted=slots * 0, **given),
            x[:, None],
        ),
    }  # fmt: skip


@pytest.mark.parametrize("function", ["varlen", "decode", "drop-in", "verify", "commit"])
def test_functions_that_keep_a_state_refuse_tangents_and_batches_by_name(tensors, function) -> None:
    run, x = stateful(tensors)[function]
    name = "k" if function == "commit" else "q"
    run(x)
    with pytest.raises(ValueError, match=rf"^{name} must be without a tangent: .*, got a dual tensor"):
        torch.func.jvp(lambda given: run(given), (x,), (x,))
    with pytest.raises(ValueError, match=rf"^{name} must be outside torch.vmap \(.*\), got a batched"):
        torch.vmap(run)(torch.stack([x, x]))
    with pytest.raises(ValueError, match=rf"^{name} must be without gradient"):
        torch.func.grad(lambda given: run(given).sum())(x)


@pytest.mark.torch_compile
def test_transforms_are_not_compiled_and_say_so_where_the_graph_must_be_whole(tensors) -> None:
    """Dynamo would otherwise trace the forward alone, and the derivatives be 0."""
    x, slopes = tensors.normal(1, 2, 3, 16), tensors.slopes(2)

    def loss(x: Tensor) -> Tensor:
        return lightning_attn.lightning_attention(x, x, x, slopes).out.sum()

    def tangent(x: Tensor) -> Tensor:
        return torch.func.jvp(loss, (x,), (x,))[1]

    for transform in (torch.func.grad(loss), tangent):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="transforms of lightning_attention are not compiled"):
            torch.compile(lambda x, run=transform: run(x), fullgraph=True, backend="eager")(x)
    run, x = stateful(tensors)["decode"]
    with pytest.raises(ValueError, match=r"^q must be without a tangent"):
        torch.compile(lambda q: torch.func.jvp(run, (q,), (q,)), backend="eager")(x)
