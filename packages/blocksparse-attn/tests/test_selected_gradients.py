"""Gradients of selected attention: are they those of the formulas in float64, for every cache and every list?

Pages of no sequence, unused tails of pages, and rows of no sequence in inputs and gradients of results are NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import func

from blocksparse_attn.plan import DeviceLimits
from blocksparse_attn.selected.gradients import ops
from blocksparse_attn.selected.gradients.arguments import Inputs, check_backward
from blocksparse_attn.selected.gradients.plan import BackwardPlan, plan_backward
from blocksparse_attn.selected.plan import Problem
from kernel_reference import differentiable
from kernel_reference.attention_gradients import AttentionGradients
from kernel_reference.checks import validate_values
from kernel_reference.differentiable import Backward
from kernel_reference.selection import selected_attention_gradients
from kernel_reference.testing import contract
from kernel_reference.testing.guards import assert_bitwise_equal, canaried
from kernel_reference.testing.numerics import assert_close_to_oracle

Tensor = torch.Tensor
gpu = pytest.mark.gpu
BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
H200 = DeviceLimits(132, 232448, hopper=True)
LENGTHS = [(70, 1), (5, 12), (0, 0), (130, 6)]
NAMES = ("d_q", "d_k", "d_v", "d_sinks")
_KEYS = ("block_size", "block_table", "cu_seqlens_q", "seqlens_k", "page_layout", "causal", "sinks")


def upstream(batch: Any, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the results: NaN in rows of no sequence."""
    d_out = torch.randn(out.shape, device=out.device).to(out.dtype)
    d_lse = torch.randn(lse.shape, device=out.device)
    d_out[~batch.own] = torch.nan
    return d_out, d_lse


def wanted(batch: Any, d_out: Tensor, d_lse: Tensor | None, moved: float = 0.0) -> list[AttentionGradients]:
    """In float64, and in the dtype of the inputs; of these, or of inputs that are some part of themselves larger."""
    own = {**{key: batch.options[key] for key in (*_KEYS, "k_scale", "v_scale")}}
    given = [
        (x.double() * (1 + moved * torch.randn(x.shape, device=x.device))).to(batch.dtype)
        for x in (torch.where(batch.own[:, None, None], batch.q, 0), batch.k, batch.v, d_out)
    ]
    with validate_values(False):
        return [
            selected_attention_gradients(
                *given[:3], batch.indices, given[3], d_lse, **own, compute_dtype=dtype
            )
            for dtype in (torch.float64, batch.dtype)
        ]  # fmt: skip


def check(batch: Any, got: list[Tensor | None], d_out: Tensor, d_lse: Tensor | None) -> None:
    exact, plain = wanted(batch, d_out, d_lse)
    assert not got[0][~batch.own].any()
    for i, (name, x, right, beside) in enumerate(zip(NAMES, got, exact, plain, strict=True)):
        if right is None:
            continue

        def again(i: int = i, dtype: torch.dtype = x.dtype) -> tuple[Tensor, Tensor]:
            other, beside = wanted(batch, d_out, d_lse, moved=0.03)
            return other[i], beside[i].to(dtype)

        assert_close_to_oracle(x, right, beside.to(x.dtype), what=name, again=again)


@pytest.fixture
def run(device: torch.device) -> Callable[..., list[Tensor]]:
    """The kernels themselves, into guarded memory."""

    def run(batch: Any, plan: BackwardPlan, d_out: Tensor, d_lse: Tensor | None) -> list[Tensor]:
        from blocksparse_attn.selected.gradients import launch

        o = batch.options
        with validate_values(False):
            found = batch.call(return_lse=True)
        scales = [o[name] if isinstance(o[name], Tensor) else None for name in ("k_scale", "v_scale")]
        factors = [o[name] if isinstance(o[name], float) else 1.0 for name in ("k_scale", "v_scale")]
        lengths = (o[name] for name in Inputs._fields[4:7])
        inputs = Inputs(batch.q, batch.k, batch.v, batch.indices, *lengths, o["sinks"], *scales)
        given = Backward(*found, d_out, d_lse)
        numbers = (o["block_size"], o["page_layout"], o["causal"], batch.q.shape[2] ** -0.5, *factors)
        problem = check_backward(inputs, given, numbers)
        assert plan.covers(problem)
        places = [canaried(x.shape, x.dtype, device) for x in inputs[:3]]
        d_sinks = None if o["sinks"] is None else torch.empty_like(o["sinks"])
        launch.prepare_backward(problem, plan, inputs, given)(
            *inputs, *given, *(place.tensor for place in places), d_sinks
        )
        for place in places:
            place.check()
        return [*(place.tensor for place in places), d_sinks]

    return run


def plan(piece: int = 16, keys: int = 16, rows: int = 16, stages: int = 1) -> BackwardPlan:
    return BackwardPlan(piece, keys, 4, stages, rows, 4, stages)


CASES: dict[str, tuple[BackwardPlan, dict[str, Any]]] = {
    "a piece is a block and a page": (plan(), {"sinks": True}),
    "two pieces at a time, and two tokens": (plan(keys=32, rows=32, stages=2), {"share": 0.9, "head_dim_v": 48}),
    "blocks of one token": (plan(1), {"block": 1, "topk": 20, "dtype": FP16}),
    "blocks of 4, pages of 24": (plan(4, 32), {"block": 4, "topk": 11, "page": 24, "page_layout": "HND"}),
    "blocks of 32 in pages of 3": (plan(1), {"block": 32, "topk": 1, "page": 3, "heads": (2, 2)}),
    "heads of 40, scaled": (plan(8), {"head_dim": 40, "dtype": FP16, "scales": "numbers"}),
    "scales of heads": (plan(), {"scales": "heads"}),
    "more heads than rows": (plan(), {"heads": (40, 2)}),
    "a group of 12": (plan(rows=32), {"heads": (12, 1)}),
    "not causal": (plan(8), {"causal": False, "sinks": True}),
    "float32": (plan(rows=16), {"dtype": FP32, "sinks": True}),
}


@pytest.mark.parametrize(("chosen", "options"), CASES.values(), ids=CASES)
def test_the_kernels_match_the_oracle(selected, run, chosen, options) -> None:
    batch = selected(LENGTHS, **options)
    if batch.dtype == FP32:
        # Scores round otherwise than those that lse came of; in the plain version these roundings cancel.
        batch.q *= 0.25
    d_out, d_lse = upstream(batch, batch.out.tensor, batch.out.tensor[..., 0].T.float())
    check(batch, run(batch, chosen, d_out, d_lse), d_out, d_lse)


def test_a_page_of_two_sequences_has_the_sum_of_their_gradients(selected, run) -> None:
    """As a prefix that a cache keeps once."""
    batch = selected([(32, 3), (32, 4)], rows_after=0)
    batch.options["block_table"][1, :2] = batch.options["block_table"][0, :2]
    d_out, _ = upstream(batch, batch.out.tensor, batch.out.tensor[..., 0].T.float())
    check(batch, run(batch, plan(), d_out, None), d_out, None)


def test_lists_of_any_content_and_impossible_lengths_have_no_gradient_elsewhere(selected, device, run) -> None:
    batch = selected(LENGTHS, topk=5)
    wild = torch.tensor([2**31 - 1, -(2**31), 9, -7, 2**26], dtype=torch.int32, device=device)
    batch.indices[::2, :, 1:3], batch.indices[1::2, :, 3:] = wild[:2], wild[3:]
    d_out, d_lse = upstream(batch, batch.out.tensor, batch.out.tensor[..., 0].T.float())
    before = run(batch, plan(), d_out, d_lse)
    check(batch, before, d_out, d_lse)
    # A page that there is not, of the last sequence; and a length that cannot be, of the second.
    batch.options["block_table"][3, 0] = 2**30
    batch.options["seqlens_k"][1] = 5
    got = run(batch, plan(), d_out, d_lse)
    assert not got[0][1:13].any()
    assert_bitwise_equal(got[0][:1], before[0][:1])
    assert all(bool(x.isfinite().all()) for x in got[:3])


# Autograd


def leaves_of(batch: Any) -> list[Tensor]:
    tensors = (batch.q, batch.k, batch.v, batch.options["sinks"])
    return [x.detach().clone().requires_grad_() for x in tensors if x is not None]


def call(batch: Any, leaves: list[Tensor], **options: Any) -> Any:
    batch.q, batch.k, batch.v = leaves[:3]
    return batch.call(return_lse=True, **({"sinks": leaves[3]} if len(leaves) > 3 else {}), **options)


@pytest.mark.parametrize("of", ["both", "out", "lse"])
def test_autograd_gives_the_gradients_of_both_results(selected, of) -> None:
    batch = selected(LENGTHS, sinks=True)
    with torch.no_grad():
        without = batch.call(return_lse=True)
    leaves = leaves_of(batch)
    found = call(batch, leaves)
    for got, alone in zip(found, without, strict=True):
        assert_bitwise_equal(got.detach(), alone)
    d_out, d_lse = upstream(batch, *without)
    if of == "lse":
        d_out = torch.zeros_like(d_out)
    used = {"both": found, "out": found[:1], "lse": found[1:]}[of]
    given = {"both": (d_out, d_lse), "out": (d_out,), "lse": (d_lse,)}[of]
    got = torch.autograd.grad(used, leaves, given)
    batch.q, batch.k, batch.v = (x.detach() for x in leaves[:3])
    check(batch, list(got), d_out, None if of == "out" else d_lse)


@pytest.fixture
def by_kernels(interpreted: Callable[..., Any]) -> Iterator[None]:
    """The op runs the kernels on CPU tensors, interpreted."""
    from blocksparse_attn.selected.gradients import launch

    with interpreted("selected_attention_backward", ops.backward_now, differentiable, launch, cores=2):
        yield


@pytest.mark.usefixtures("by_kernels")
def test_a_backward_pass_reaches_the_kernels_with_every_argument_in_its_place(selected) -> None:
    batch = selected(LENGTHS, sinks=True, head_dim_v=48, page_layout="HND", causal=False)
    for _ in range(2):
        leaves = leaves_of(batch)
        found = call(batch, leaves)
        d_out, d_lse = upstream(batch, *(x.detach() for x in found))
        got = torch.autograd.grad(found, leaves, (d_out, d_lse))
        batch.q, batch.k, batch.v = (x.detach() for x in leaves[:3])
        check(batch, list(got), d_out, d_lse)


def test_the_ops_pass_opcheck_and_compile(selected) -> None:
    batch = selected([(20, 3), (5, 9)], sinks=True, dtype=FP32)
    leaves, o = leaves_of(batch), batch.options
    lengths = (o[name] for name in Inputs._fields[4:7])
    torch.library.opcheck(
        ops.attention, (*leaves[:3], batch.indices, *lengths, leaves[3], None, None, 16, "NHD", True, 0.25, 1.0, 1.0),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip

    def loss(*given: Tensor) -> Tensor:
        found = call(batch, list(given))
        return found.out[:12].square().sum() + found.lse[:, :12].sum()

    right = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for got, x in zip(torch.autograd.grad(compiled(*leaves), leaves), right, strict=True):
        assert_bitwise_equal(got, x)


def test_what_has_no_gradient_is_refused_in_our_words(selected) -> None:
    batch, eight = selected([(20, 3)]), selected([(20, 3)], cache=E4M3, scales="one")
    scaled = selected([(20, 3)], scales="one")
    scaled.options["k_scale"].requires_grad_()
    eight.q.requires_grad_()
    leaves = leaves_of(batch)
    for ask, kind, words in (
        (lambda: call(batch, leaves, out=batch.out.tensor), ValueError, "^q must be without gradient"),
        (eight.call, TypeError, "^k_cache.dtype must be torch.bfloat16 as that of q is, where gradients are wanted"),
        (scaled.call, ValueError, "^k_scale must be without gradient"),
        (lambda: call(scaled, leaves_of(scaled)), ValueError, "^k_scale must be without gradient"),
        (lambda: call(batch, leaves, block_table=batch.indices[:, 0]), ValueError, r"^block_table must be \[1, "),
        (lambda: func.grad(lambda k: call(batch, [leaves[0], k, leaves[2]]).out.sum())(leaves[1].detach()), ValueError,
         "without gradient"),
    ):  # fmt: skip
        with pytest.raises(kind, match=words):
            ask()


# Plans


def test_every_call_gets_a_plan_that_covers_it() -> None:
    groups, blocks, pages = ((64, 4), (24, 2), (7, 7), (128, 1)), (1, 4, 64, 256), (1, 16, 24, 64)
    for (heads, kv), block, page, size, bits in product(groups, blocks, pages, (64, 256), (16, 32)):
        problem = Problem(heads, kv, size, size, block, 16, 8192, 1, 32768, page, bits=bits, cache_bits=bits)
        for limits in (H200, DeviceLimits(108, 166912), DeviceLimits(304, 65536), DeviceLimits(1)):
            chosen = plan_backward(problem, limits)
            assert chosen.covers(problem), (problem, chosen)
    whole = plan_backward(Problem(64, 4, 128, 128, 128, 16, 8192, 1, 32768, 64), H200)
    assert (whole.piece, whole.block_n) == (64, 64)


@gpu
@pytest.mark.parametrize(
    "options", [{}, {"dtype": FP32, "heads": (8, 2)}, {"heads": (24, 2), "head_dim": 256, "block": 4, "topk": 64}],
    ids=str,
)  # fmt: skip
def test_models_at_their_sizes(selected, options) -> None:
    sizes = {"heads": (64, 4), "head_dim": 128, "block": 64, "topk": 6, "page": 64, "share": 0.7, **options}
    batch = selected([(600, 200), (300, 100)], dtype=sizes.pop("dtype", BF16), **sizes)
    leaves = leaves_of(batch)
    found = call(batch, leaves)
    d_out, d_lse = upstream(batch, *(x.detach() for x in found))

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(found, leaves, (d_out, d_lse), retain_graph=True))

    got = gradients()
    contract.check_deterministic(gradients)
    batch.q, batch.k, batch.v = (x.detach() for x in leaves[:3])
    check(batch, [*got, None], d_out, d_lse)
