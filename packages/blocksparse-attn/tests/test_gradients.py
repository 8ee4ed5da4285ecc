"""Gradients: are they those of the formulas in float64, for every batch and layout that the forward pass takes?

Expected is kernel_reference's oracle, which is given the mask itself; beside it the same formulas in the inputs' dtype.
Rows of padding and of no sequence are NaN in the inputs and in the gradients of the results.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import func

from blocksparse_attn import BlockLayout, blocksparse_attention
from blocksparse_attn.gradients import ops
from blocksparse_attn.gradients.arguments import Inputs, check_backward
from blocksparse_attn.gradients.plan import BackwardPlan, plan_backward
from blocksparse_attn.lists import transposed
from blocksparse_attn.plan import DeviceLimits, Problem
from kernel_reference import blocks, differentiable
from kernel_reference.attention_gradients import AttentionGradients, attention_gradients
from kernel_reference.differentiable import Backward
from kernel_reference.testing import contract
from kernel_reference.testing.guards import assert_bitwise_equal, canaried
from kernel_reference.testing.numerics import assert_close_to_oracle

Tensor = torch.Tensor
gpu = pytest.mark.gpu
FP16, FP32 = torch.float16, torch.float32
LENGTHS = [(0, 37), (23, 18), (0, 0), (40, 1)]
CASES: dict[str, dict[str, Any]] = {
    "ragged": {"rows_after": 2},
    "one layout, a window": {"one_layout": True, "window": (19, -1)},
    "capped, with sinks": {"softcap": 2.0, "sinks": True, "head_dim_v": 48},
    "rows of two blocks": {"blocks": (32, 16), "heads": (6, 2)},
    "wide blocks": {"blocks": (16, 48), "dtype": FP16, "heads": (2, 2)},
    "padded on the left": {"kind": "padded", "sinks": True},
    "padded on the right": {"kind": "padded", "side": "right", "softmax_scale": -0.2},
    "padded on both": {"kind": "padded", "side": "both", "window": (9, -1)},
    "heads of 40": {"head_dim": 40, "softmax_scale": 0.0},
    "float32": {"dtype": FP32, "softcap": 3.0, "sinks": True},
}
SMALL = BackwardPlan(16, 16, 4, 1, 16, 16, 4, 1)
NAMES = ("d_q", "d_k", "d_v", "d_sinks")


def results_of(batch: Any) -> tuple[Tensor, Tensor]:
    """The forward pass without autograd."""
    with torch.no_grad():
        found = batch.run(out=None, return_lse=True)
    return found.out, found.lse


def upstream(batch: Any, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the results: NaN in rows of no sequence."""
    d_out = torch.randn(out.shape, device=out.device).to(out.dtype)
    d_lse = torch.randn(lse.shape, device=out.device)
    d_out[batch._empty_rows()] = torch.nan
    return d_out, d_lse


def wanted(
    batch: Any, d_out: Tensor, d_lse: Tensor | None, *, moved: float = 0.0
) -> tuple[AttentionGradients, AttentionGradients]:
    """In float64, and in the dtype of the inputs; of these, or of inputs that are some part of themselves larger."""
    packed_out, packed_lse = batch.packed(d_out, d_lse)
    given = [
        (x.double() * (1 + moved * torch.randn(x.shape, device=x.device))).to(batch.dtype)
        for x in (batch.queries, batch.keys, batch.values, packed_out)
    ]
    exact, plain = (
        attention_gradients(
            *given, packed_lse, cu_seqlens_q=torch.tensor(batch.begins), cu_seqlens_k=torch.tensor(batch.begins_k),
            softmax_scale=batch.scale, left=-1 if batch.window is None else batch.window[0],
            mask=blocks.mask_function(batch.mask, *batch.blocks), sinks=batch.sinks, softcap=batch.softcap,
            compute_dtype=dtype,
        )
        for dtype in (torch.float64, batch.dtype)
    )  # fmt: skip
    return exact, plain


def packed_keys(batch: Any, x: Tensor) -> Tensor:
    """Gradients of keys without padding, which must be zeros."""
    if batch.kind != "padded":
        assert not x[batch.begins_k[-1] :].any()
        return x[: batch.begins_k[-1]]
    starts = batch.positional["k_starts"]
    first = [0] * len(batch.totals) if starts is None else starts.tolist()
    rows = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    for i, (start, total) in enumerate(zip(first, batch.totals, strict=True)):
        rows[i, start : start + total] = True
    assert not x[~rows].any()
    return x[rows]


def check(batch: Any, got: list[Tensor | None], d_out: Tensor, d_lse: Tensor | None) -> None:
    exact, plain = wanted(batch, d_out, d_lse)
    d_q, d_k, d_v, d_sinks = got
    empty = batch._empty_rows()
    assert not d_q[empty].any()
    own = (batch.packed(d_q)[0], packed_keys(batch, d_k), packed_keys(batch, d_v), d_sinks)
    for i, (name, x, right, beside) in enumerate(zip(NAMES, own, exact, plain, strict=True)):
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
        from blocksparse_attn.gradients import launch

        out, lse = results_of(batch)
        lists = (batch.layout.crow, batch.layout.col, *batch.layout.transposed())
        lengths = [batch.positional[name] for name in Inputs._fields[7:13]]
        inputs = Inputs(batch.q, batch.k, batch.v, *lists, *lengths, batch.sinks)
        given = Backward(out, lse, d_out, d_lse)
        max_seqlen_q, *numbers = batch.numbers()
        numbers = (max_seqlen_q, *batch.blocks, *numbers[3:7])
        problem = check_backward(inputs, given, numbers)
        assert plan.covers(problem)
        places = [canaried(x.shape, x.dtype, device) for x in (batch.q, batch.k, batch.v)]
        d_sinks = torch.empty_like(batch.sinks) if batch.sinks is not None else out.new_empty(0)
        launch.prepare_backward(problem, plan, inputs, given)(
            *inputs, *given, *(place.tensor for place in places), d_sinks
        )
        for place in places:
            place.check()
        batch.check_guards(all_written=False)
        return [*(place.tensor for place in places), None if batch.sinks is None else d_sinks]

    return run


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_kernels_match_the_oracle(tensors, run, options) -> None:
    batch = tensors.batch(LENGTHS, **options)
    d_out, d_lse = upstream(batch, *results_of(batch))
    check(batch, run(batch, SMALL, d_out, d_lse), d_out, d_lse)


def test_tiles_of_any_size_make_the_same_gradients(tensors, run) -> None:
    batch = tensors.batch([(0, 70), (30, 40)], blocks=(32, 64), head_dim=16)
    d_out, _ = upstream(batch, *results_of(batch))
    for plan in (BackwardPlan(32, 64, 4, 1, 16, 32, 4, 2), BackwardPlan(16, 32, 4, 2, 16, 64, 4, 1, 2)):
        check(batch, run(batch, plan, d_out, None), d_out, None)


def test_keys_that_no_query_sees_contaminate_nothing(tensors, run) -> None:
    mask = torch.ones(4, 4, 4, dtype=torch.bool).tril()
    mask[:, :, 1] = False
    batch = tensors.batch([(0, 60)], mask=mask)
    before = results_of(batch)
    d_out, d_lse = upstream(batch, *before)
    clean = run(batch, SMALL, d_out, d_lse)
    batch.spoil(0, range(16, 32))
    for x, y in zip(clean[:3], run(batch, SMALL, d_out, d_lse)[:3], strict=True):
        assert_bitwise_equal(y, x)
    assert not clean[1][16:32].any()


# Autograd


def leaves_of(batch: Any) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in (batch.q, batch.k, batch.v, batch.sinks) if x is not None]


def call(batch: Any, leaves: list[Tensor], **options: Any) -> Any:
    sinks = leaves[3] if len(leaves) > 3 else None
    given = {**batch.options, "sinks": sinks, "return_lse": True, **options}
    return blocksparse_attention(*leaves[:3], batch.layout, **given)


@pytest.mark.parametrize("options", [{"sinks": True, "rows_after": 1}, {"kind": "padded", "dtype": FP32}], ids=str)
@pytest.mark.parametrize("of", ["both", "out", "lse"])
def test_autograd_gives_the_gradients_of_both_results(tensors, of, options) -> None:
    batch = tensors.batch(LENGTHS, **options)
    leaves = leaves_of(batch)
    found = call(batch, leaves)
    with torch.no_grad():
        for got, without in zip(found, call(batch, leaves), strict=True):
            assert_bitwise_equal(got.detach(), without)
    d_out, d_lse = upstream(batch, *found)
    if of == "lse":
        d_out = torch.zeros_like(d_out)
    used = {"both": found, "out": found[:1], "lse": found[1:]}[of]
    given = {"both": (d_out, d_lse), "out": (d_out,), "lse": (d_lse,)}[of]
    got = list(torch.autograd.grad(used, leaves, given))
    got += [None] * (4 - len(got))
    check(batch, got, d_out, None if of == "out" else d_lse)


@pytest.fixture
def by_kernels(interpreted: Callable[..., Any]) -> Iterator[None]:
    """The op runs the kernels on CPU tensors, interpreted."""
    from blocksparse_attn.gradients import launch

    with interpreted("attention_backward", ops.backward_now, differentiable, launch, cores=2):
        yield


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("options", [{"sinks": True}, {"kind": "padded", "side": "none"}], ids=str)
def test_a_backward_pass_reaches_the_kernels_with_every_argument_in_its_place(tensors, options) -> None:
    lengths = [(3, 20), (3, 20)] if options.get("side") else LENGTHS
    batch = tensors.batch(lengths, head_dim_v=48, softcap=4.0, window=(20, -1), **options)
    d_out, d_lse = upstream(batch, *results_of(batch))
    for _ in range(2):
        leaves = leaves_of(batch)
        got = list(torch.autograd.grad(call(batch, leaves), leaves, (d_out, d_lse)))
        check(batch, got + [None] * (4 - len(got)), d_out, d_lse)


def test_the_ops_pass_opcheck_and_compile(tensors) -> None:
    batch = tensors.batch([(0, 20), (5, 9)], sinks=True, dtype=FP32, head_dim=16)
    leaves = leaves_of(batch)
    lists = (batch.layout.crow, batch.layout.col, *batch.layout.transposed())
    lengths = [batch.positional[name] for name in Inputs._fields[7:13]]
    numbers = (batch.max_seqlen_q, *batch.blocks, 0.25, -1, 0, 0.0, 0, False)
    torch.library.opcheck(
        ops.attention, (*leaves[:3], *lists, *lengths, leaves[3], *numbers),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip

    def loss(*given: Tensor) -> Tensor:
        found = call(batch, list(given))
        return found.out.square().sum() + found.lse.sum()

    wanted = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for got, right in zip(torch.autograd.grad(compiled(*leaves), leaves), wanted, strict=True):
        assert_bitwise_equal(got, right)


def test_what_has_no_derivative_is_refused_in_our_words(tensors) -> None:
    batch = tensors.batch([(0, 20)])
    leaves = leaves_of(batch)
    whole = tensors.batch([(4, 9)], kind="paged")
    with pytest.raises(ValueError, match=r"^q must be without gradient"):
        call(batch, leaves, out=torch.empty_like(batch.out.tensor))
    with pytest.raises(ValueError, match=r"^q must be without gradient"):
        call(whole, leaves_of(whole))
    plain = [x.detach() for x in leaves]

    def attend(q: Tensor) -> Tensor:
        return call(batch, [q, *plain[1:]]).out

    for ask, words in (
        (lambda: func.jvp(attend, (plain[0],), (plain[0],)), "without a tangent"),
        (lambda: func.vmap(attend)(plain[0][None]), "outside torch.vmap"),
        (lambda: func.grad(lambda q: attend(q).sum())(plain[0]), "without gradient"),
    ):
        with pytest.raises(ValueError, match=words):
            ask()
    first = torch.autograd.grad(attend(leaves[0]).sum(), leaves[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        torch.autograd.grad(first.sum(), leaves[0])


def test_wrong_arguments_are_named_where_gradients_are_wanted_too(tensors) -> None:
    batch = tensors.batch([(0, 20)])
    leaves = leaves_of(batch)
    with pytest.raises(ValueError, match=r"^sinks must be \[4\]"):
        call(batch, leaves, sinks=torch.ones(3, device=batch.device))
    with pytest.raises(ValueError, match=r"^max_seqlen_q must be at most"):
        call(batch, leaves, max_seqlen_q=10**6)


def test_a_layer_trains_as_a_dense_one_under_the_same_mask() -> None:
    train = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "train.py"))["train"]
    losses = torch.tensor(train(12, report=lambda line: None))
    torch.testing.assert_close(losses[:, 0], losses[:, 1], rtol=1e-3, atol=0)
    assert losses[-1, 0] < losses[0, 0]


# The transposed layout


def test_a_transposed_layout_lists_the_rows_of_each_column_in_order(tensors) -> None:
    mask = tensors.random_mask(3, 7, 6)
    layout = tensors.layout_of(mask, 16, 16, tensors.device)
    crow, col = transposed(layout.crow, layout.col, 6)
    assert_bitwise_equal(blocks.csr_to_mask(crow, col, 7), mask.transpose(1, 2).to(crow.device))
    for head in range(3):
        for column in range(6):
            rows = col[head, crow[head, column] : crow[head, column + 1]].tolist()
            assert rows == sorted(rows)


def test_a_layout_keeps_its_transposed_lists_and_counts_their_bytes(tensors) -> None:
    layout = BlockLayout.from_mask(torch.ones(1, 4, 4, dtype=torch.bool, device=tensors.device), 16, 16)
    before = layout.num_bytes
    crow, col = layout.transposed()
    assert layout.transposed()[0] is crow
    assert layout.num_bytes == before + crow.nbytes + col.nbytes


# Plans


def test_every_problem_has_a_plan_that_covers_it() -> None:
    for q_block, k_block in ((16, 16), (48, 16), (64, 64), (64, 128), (16, 96)):
        for size, bits in ((16, 16), (96, 16), (256, 16), (128, 32)):
            problem = Problem(8, 2, size, size, q_block, k_block, 8, 64, 100, 512, 2, 512, 512, bits=bits)
            for limits in (DeviceLimits(132, 232448, hopper=True), DeviceLimits(108, 166912), DeviceLimits(1)):
                chosen = plan_backward(problem, limits)
                assert chosen.covers(problem), (problem, chosen)


def test_keys_are_held_in_pairs_of_16_bits_alone() -> None:
    for bits in (16, 32):
        problem = Problem(8, 2, 64, 64, 64, 64, 8, 64, 100, 512, 2, 512, 512, bits=bits)
        assert SMALL.covers(problem)
        assert replace(SMALL, keys_held=True).covers(problem) == (bits == 16)


def test_tiles_of_all_kv_heads_come_in_turn_where_programs_are_few() -> None:
    for tokens, together in ((8192, 8), (32768, 2)):
        problem = Problem(32, 8, 128, 128, 64, 64, 32, 512, tokens, tokens, 1, tokens, 2**18)
        assert plan_backward(problem, DeviceLimits(132, 232448, hopper=True)).heads_together == together


@gpu
@pytest.mark.parametrize("options", [{}, {"kind": "padded"}, {"dtype": FP32}, {"head_dim": 256}], ids=str)
def test_phi_3_small_at_its_sizes(tensors, options) -> None:
    sizes = {"heads": (8, 2), "head_dim": 128, "blocks": (64, 64), **options}
    batch = tensors.batch([(0, 700), (300, 200)], **sizes)
    d_out, d_lse = upstream(batch, *results_of(batch))
    leaves = leaves_of(batch)
    found = call(batch, leaves)

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(found, leaves, (d_out, d_lse), retain_graph=True))

    check(batch, [*gradients(), None], d_out, d_lse)
    contract.check_deterministic(gradients)
