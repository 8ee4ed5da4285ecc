"""Does the package do what engines take for granted: torch.compile, CUDA graphs, autograd, streams, large tensors?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import gdn_split
from gdn_split import ops, reference
from gdn_split.plan import ConvPlan, DeviceLimits, GroupShape, SplitPlan, StepPlan, cdiv, plan_conv, plan_split
from gdn_split.prefill.plan import PrefillPlan
from kernel_reference import projection
from kernel_reference.dispatch import PreparedLaunches
from kernel_reference.models import QWEN3_NEXT_80B
from kernel_reference.testing import contract
from kernel_reference.testing.forks import run_alone
from kernel_reference.testing.guards import assert_bitwise_equal
from kernel_reference.testing.memory import check_far_apart, much_memory

Tensor = torch.Tensor

_TP8 = QWEN3_NEXT_80B.tensor_parallel(8)
TP8 = GroupShape(_TP8.num_heads_qk, _TP8.num_heads_v, _TP8.head_qk, _TP8.head_v)
TINY = GroupShape(2, 6, 3, 2)
SIZES = (2, 4, 128, 128)
TINY_SIZES = (2, 6, 3, 2)
LAYOUTS = ["interleaved", "contiguous"]
OF_A_GPU = DeviceLimits(132, 232448, 8)
# Of a sequence.
DRAFTS = 3


def projections(
    device: torch.device, rows: int, shape: GroupShape = TP8, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    return [
        torch.randn(rows, width, generator=generator, device=device).to(dtype)
        for width in (shape.qkvz_width, shape.ba_width)
    ]


def parts_of(
    device: torch.device, rows: int, shape: GroupShape = TP8, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> list[Tensor]:
    sizes = (shape.num_heads_qk, shape.num_heads_v, shape.head_qk, shape.head_v)
    return list(projection.split(*projections(device, rows, shape, dtype, seed), *sizes))


def convolution(device: torch.device, sequences: int, shape: GroupShape = TP8, seed: int = 0) -> list[Tensor]:
    """mixed_qkvz, mixed_ba, conv_state, conv_weight, conv_bias, slots."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).bfloat16()

    slots = torch.randperm(16, generator=generator, device=device)[:sequences].int()
    channels = shape.qkv_width
    state, weight, bias = random(16, channels, 3), random(channels, 4), random(channels)
    return [random(sequences, shape.qkvz_width), random(sequences, shape.ba_width), state, weight, bias, slots]


def split(mixed_qkvz: Tensor, mixed_ba: Tensor) -> gdn_split.SplitResult:
    return gdn_split.fused_qkvzba_split_reshape_cat(mixed_qkvz, mixed_ba, *SIZES)


def split_into(mixed_qkvz: Tensor, mixed_ba: Tensor, *out: Tensor) -> gdn_split.SplitResult:
    return gdn_split.fused_qkvzba_split_reshape_cat(mixed_qkvz, mixed_ba, *SIZES, out=out)


def merge(*parts: Tensor) -> gdn_split.MergeResult:
    return gdn_split.merge_qkvzba(*parts, *SIZES)


def merge_into(*parts_and_out: Tensor) -> gdn_split.MergeResult:
    return gdn_split.merge_qkvzba(*parts_and_out[:4], *SIZES, out=parts_and_out[4:])


def views(mixed_qkvz: Tensor, mixed_ba: Tensor) -> gdn_split.SplitResult:
    return gdn_split.split_views(mixed_qkvz, mixed_ba, *SIZES)


def convolve(*tensors: Tensor) -> gdn_split.SplitResult:
    return gdn_split.split_conv1d_update(*tensors, *SIZES)


def step(*tensors: Tensor) -> tuple[Tensor]:
    return (gdn_split.gdn_decode_step(*tensors[:-1], *SIZES, norm_weight=tensors[-1]),)


def verify(*tensors: Tensor) -> tuple[Tensor]:
    *first, norm, parents = tensors
    options = {"norm_weight": norm, "parents": parents, "tokens_per_sequence": DRAFTS}
    return (gdn_split.gdn_verify(*first, *SIZES, **options),)


def commit(*tensors: Tensor) -> tuple[()]:
    *first, path = tensors
    gdn_split.gdn_commit(*first, *SIZES, path=path, tokens_per_sequence=DRAFTS)
    return ()


def prefill(*tensors: Tensor) -> tuple[Tensor, ...]:
    *first, conv_state, slots = tensors
    return tuple(gdn_split.gdn_prefill_inputs(*first, *SIZES, conv_state=conv_state, slots=slots, chunk_size=16))


def packed(device: torch.device, rows: int, shape: GroupShape = TP8, seed: int = 0) -> list[Tensor]:
    """Rows of two sequences and a layer's weights, the convolution's state and slots."""
    qkvz, ba, conv_state, weight, bias, _ = convolution(device, rows, shape, seed)
    generator = torch.Generator(device).manual_seed(seed)
    a_log, dt_bias = torch.randn(2, shape.num_heads_v, generator=generator, device=device)
    bounds = torch.tensor([0, 2, rows], device=device)
    return [qkvz, ba, weight, bias, bounds, a_log, dt_bias, conv_state, torch.tensor([3, 1], device=device)]


def layer(device: torch.device, sequences: int, shape: GroupShape = TP8, seed: int = 0) -> list[Tensor]:
    """A convolution's tensors, without a bias, and those of the delta rule and the norm behind it."""
    qkvz, ba, conv_state, weight, bias, slots = convolution(device, sequences, shape, seed)
    generator = torch.Generator(device).manual_seed(seed)
    heads, inner = shape.num_heads_v, (shape.head_qk, shape.head_v)
    sizes = ((16, heads, *inner), (heads,), (heads,), (shape.head_v,))
    pool, a_log, dt_bias, norm = [torch.randn(size, generator=generator, device=device) for size in sizes]
    return [qkvz, ba, conv_state, weight, bias, pool, slots, a_log, dt_bias, norm]


def drafts(device: torch.device, sequences: int, shape: GroupShape = TP8, seed: int = 0) -> list[Tensor]:
    """A layer's tensors, of drafts that branch: the second and the third continue the first."""
    tensors = layer(device, DRAFTS * sequences, shape, seed)
    tensors[6] = tensors[6][:sequences]
    return [*tensors, torch.tensor([-1, 0, 0], device=device).repeat(sequences, 1)]


def accepted_drafts(device: torch.device, sequences: int, shape: GroupShape = TP8, seed: int = 0) -> list[Tensor]:
    """The same, of which a path of none to two is accepted."""
    *tensors, _, _ = drafts(device, sequences, shape, seed)
    generator = torch.Generator(device).manual_seed(seed)
    accepted = torch.randint(3, (sequences,), generator=generator, device=device)
    return [*tensors, accepted, torch.tensor([0, 2], device=device).repeat(sequences, 1)]


def fused_and_out(device: torch.device, rows: int, seed: int = 0) -> list[Tensor]:
    return projections(device, rows, seed=seed) + [torch.zeros_like(part) for part in parts_of(device, rows)]


def parts_and_out(device: torch.device, rows: int, seed: int = 0) -> list[Tensor]:
    return parts_of(device, rows, seed=seed) + [torch.zeros_like(tensor) for tensor in projections(device, rows)]


PUBLIC: dict[str, tuple[Callable[..., Any], Callable[..., list[Tensor]]]] = {
    "split": (split, projections),
    "split, out=": (split_into, fused_and_out),
    "merge": (merge, parts_of),
    "merge, out=": (merge_into, parts_and_out),
    "split_views": (views, projections),
    "split_conv1d_update": (convolve, convolution),
    "gdn_decode_step": (step, layer),
}
every_public_function = pytest.mark.parametrize(("function", "inputs"), PUBLIC.values(), ids=PUBLIC)
# For more rows than these tests have.
MOVE, STEP = SplitPlan(64, 0, 2, 8, 2), StepPlan(32, 16, 4)
BY_A_PLAN: dict[str, tuple[Callable[..., Any], Callable[..., list[Tensor]]]] = {
    "split": (lambda *t: gdn_split.fused_qkvzba_split_reshape_cat(*t, *SIZES, plan=MOVE), projections),
    "split, out=": (
        lambda *t: gdn_split.fused_qkvzba_split_reshape_cat(*t[:2], *SIZES, out=t[2:], plan=MOVE),
        fused_and_out,
    ),
    "merge": (lambda *t: gdn_split.merge_qkvzba(*t, *SIZES, plan=MOVE), parts_of),
    "merge, out=": (lambda *t: gdn_split.merge_qkvzba(*t[:4], *SIZES, out=t[4:], plan=MOVE), parts_and_out),
    "split_conv1d_update": (
        lambda *t: gdn_split.split_conv1d_update(*t, *SIZES, plan=ConvPlan(128, 1, 128, 16, 4)),
        convolution,
    ),
    "gdn_decode_step": (
        lambda *t: gdn_split.gdn_decode_step(*t[:-1], *SIZES, norm_weight=t[-1], plan=STEP),
        layer,
    ),
    "gdn_verify": (
        lambda *t: gdn_split.gdn_verify(
            *t[:-2], *SIZES, norm_weight=t[-2], parents=t[-1], tokens_per_sequence=DRAFTS, plan=STEP
        ),
        drafts,
    ),
    "gdn_commit": (
        lambda *t: gdn_split.gdn_commit(*t[:-1], *SIZES, path=t[-1], tokens_per_sequence=DRAFTS, plan=STEP),
        accepted_drafts,
    ),
    "gdn_prefill_inputs": (
        lambda *t: gdn_split.gdn_prefill_inputs(
            *t[:-2], *SIZES, conv_state=t[-2], slots=t[-1], chunk_size=16, plan=PrefillPlan(4, 16, 4)
        ),
        packed,
    ),
}
# Of a row of drafts or of a prompt: what holds of a row alone, and costs a CPU seconds, is asked of the others.
OF_SEQUENCES: dict[str, tuple[Callable[..., Any], Callable[..., list[Tensor]]]] = {
    "gdn_verify": (verify, drafts),
    "gdn_commit": (commit, accepted_drafts),
    "gdn_prefill_inputs": (prefill, packed),
}


# The ops


def requiring(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.requires_grad_() for tensor in tensors]


def cases_of(name: str, device: torch.device) -> list[tuple[Any, ...]]:
    sizes = (*TINY_SIZES, "interleaved")
    fused, parts = (make(device, 5, TINY, torch.float32) for make in (projections, parts_of))
    if name in ("split", "split_inference"):
        plan = plan_split(5, TINY, 4 * (TINY.qkvz_width + TINY.ba_width), OF_A_GPU).as_ints()
        wide = [torch.randn(5, tensor.shape[1] + 3, device=device)[:, : tensor.shape[1]] for tensor in fused]
        none = [tensor[:0] for tensor in fused]
        cases = [(*fused, *sizes), (*wide, *TINY_SIZES, "contiguous"), (*none, *sizes), (*fused, *sizes, plan)]
        if name == "split":
            cases.append((*requiring(projections(device, 5, TINY, torch.float32)), *sizes))
        return cases
    if name in ("merge", "merge_inference"):
        parts = parts_of(device, 5, TINY, torch.float32)
        if name == "merge_inference":
            return [(*parts, *sizes)]
        return [(*parts, *sizes), (*requiring(parts_of(device, 5, TINY, torch.float32)), *sizes)]
    if name == "split_into":
        return [(*fused, *[torch.zeros_like(part) for part in parts], *sizes)]
    if name == "merge_into":
        return [(*parts, *[torch.zeros_like(tensor) for tensor in fused], *sizes)]
    if name in ("prefill_inputs", "keep_inputs", "prefill_backward"):
        qkvz, ba, state, weight, bias, slots = convolution(device, 5, TINY)
        bounds, gates = torch.tensor([0, 3, 3, 5], device=device), torch.randn(2, TINY.num_heads_v, device=device)
        numbers = (True, True, True, 2, *sizes)
        whole = (qkvz, ba, weight, bias, bounds, state, slots[:3], torch.tensor([True, False, True], device=device))
        without = (qkvz, ba, weight, None, bounds.int(), None, None, None)
        if name == "prefill_backward":
            made = torch.ops.gdn_split.prefill_inputs(*without, *gates, *numbers)
            return [
                (*made, *without[:5], *gates, True, True, 2, *sizes),
                (*made, *whole[:5], *gates, False, False, 0, *sizes),
            ]
        return [(*given, *gates, *numbers) for given in ((whole, without) if name == "prefill_inputs" else (whole,))]
    if name in ("decode_step", "verify", "commit"):
        *tensors, norm = layer(device, 4, TINY)
        out = torch.zeros(4, TINY.num_heads_v, TINY.head_v, device=device)
        twos = torch.tensor([2, 1], device=device)
        others = {"decode_step": (norm, out), "verify": (None, out, torch.tensor([[-1, 0], [-1, -1]], device=device))}
        numbers = (2, True, True, "KV", 0.5, 1e-6, *sizes)
        tensors[6] = tensors[6][:2]
        return [(*tensors, *others.get(name, (twos, None)), *numbers)]
    assert name == "split_conv1d_update", f"an op that this test does not know: {name}"
    qkvz, ba, state, weight, bias, slots = convolution(device, 4, TINY)
    out = [torch.zeros_like(part) for part in parts_of(device, 4, TINY)]
    return [
        (qkvz, ba, state, weight, bias, slots, *out, 1, True, *sizes),
        (qkvz, ba, state, weight, None, slots[:2].long(), *out, 2, False, *sizes),
    ]


def op_names() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix("gdn_split::") for name in names if name.startswith("gdn_split::"))


@pytest.mark.parametrize("name", op_names())
def test_every_op_of_the_library_passes_opcheck(device: torch.device, name: str) -> None:
    contract.check_opcheck(getattr(torch.ops.gdn_split, name).default, cases_of(name, device))


@pytest.mark.torch_compile
@every_public_function
def test_public_functions_compile_whole_and_once_for_two_sizes(
    device: torch.device, function: Callable[..., Any], inputs: Callable[..., list[Tensor]]
) -> None:
    contract.check_compiles(function, inputs(device, 5), inputs(device, 9, seed=1))


@pytest.mark.torch_compile
@pytest.mark.parametrize(("function", "inputs"), OF_SEQUENCES.values(), ids=OF_SEQUENCES)
def test_functions_of_sequences_compile_whole_and_once_for_two_sizes(
    device: torch.device, function: Callable[..., Any], inputs: Callable[..., list[Tensor]]
) -> None:
    contract.check_compiles(function, inputs(device, 4), inputs(device, 5, seed=1))


def check_bit_for_bit(function: Callable[..., Any], *calls: Sequence[Any], dynamic: bool | None = None) -> None:
    """Compiled whole as without, in results and in what it writes, for each of these calls' arguments."""
    torch._dynamo.reset()
    backend = "inductor" if calls[0][0].is_cuda else "aot_eager"
    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
    for inputs in calls:
        copies = [[i.clone() if isinstance(i, Tensor) else i for i in inputs] for _ in range(2)]
        expected = function(*copies[0])
        try:
            results = compiled(*copies[1])
        except Exception as error:
            pytest.fail(f"does not compile: {error}")
        for one, other in zip((*results, *copies[1]), (*expected, *copies[0]), strict=True):
            if isinstance(one, Tensor):
                assert_bitwise_equal(one, other)


@pytest.mark.torch_compile
@every_public_function
def test_public_functions_compile_whole_where_every_size_may_change(
    device: torch.device, function: Callable[..., Any], inputs: Callable[..., list[Tensor]]
) -> None:
    check_bit_for_bit(function, inputs(device, 5), dynamic=True)


def the_first(keep: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    number = keep.sum().item()
    torch._check(number >= 0)
    torch._check(number <= keep.shape[0])
    return [tensor[:number] for tensor in tensors]


# Rows whose number the device alone knows.
SOME_ROWS: dict[str, Callable[[Tensor, list[Tensor]], list[Tensor]]] = {
    "nonzero": lambda keep, tensors: [tensor[rows] for rows in [keep.nonzero()[:, 0]] for tensor in tensors],
    "a mask": lambda keep, tensors: [tensor[keep] for tensor in tensors],
    "an item": the_first,
}


@pytest.mark.torch_compile
@pytest.mark.parametrize("choose", SOME_ROWS.values(), ids=SOME_ROWS)
@every_public_function
def test_public_functions_compile_whole_for_rows_whose_number_the_device_alone_knows(
    device: torch.device, function: Callable[..., Any], inputs: Callable[..., list[Tensor]], choose: Callable[..., Any]
) -> None:
    tensors = inputs(device, 9)
    # The pool, the weights and the bias are the same for all rows.
    with_rows = [place for place, tensor in enumerate(tensors) if tensor.shape[0] == 9]

    def of_some_rows(keep: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        some = list(tensors)
        for place, chosen in zip(with_rows, choose(keep, [tensors[place] for place in with_rows]), strict=True):
            some[place] = chosen.clone()
        return (*function(*some), *some)

    keep = torch.arange(9, device=device) % 3 != 1
    captured = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(captured):
        check_bit_for_bit(of_some_rows, (keep, *tensors), (keep & False, *tensors))


@pytest.mark.torch_compile
def test_rows_that_two_questions_to_the_device_count_are_compared_when_the_call_runs(device: torch.device) -> None:
    def split_some(qkvz: Tensor, ba: Tensor, one: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        return tuple(split(qkvz[one.nonzero()[:, 0]], ba[other.nonzero()[:, 0]]))

    tensors, keep = projections(device, 9), torch.arange(9, device=device) % 2 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check_bit_for_bit(split_some, (*tensors, keep, keep.clone()))
        compiled = torch.compile(split_some, fullgraph=True, backend="aot_eager")
        with pytest.raises(ValueError, match=r"mixed_ba must be \[N = 5, .*got"):
            compiled(*tensors, keep, ~keep)


NUMBERS = [(TINY_SIZES, 1), (TINY_SIZES, 2), ((1, 2, 5, 4), 1), ((2, 2, 4, 7), 3), ((3, 9, 3, 2), 1)]


@pytest.mark.torch_compile
@pytest.mark.parametrize("dynamic", [None, True])
def test_every_number_may_have_a_second_value_in_compiled_code(device: torch.device, dynamic: bool | None) -> None:
    def all_of_them(qkvz: Tensor, ba: Tensor, state: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        weight, bias, slots, *sizes, tokens = rest
        parts = gdn_split.fused_qkvzba_split_reshape_cat(qkvz, ba, *sizes)
        merged = gdn_split.merge_qkvzba(*parts, *sizes, layout="contiguous")
        seen = gdn_split.split_views(*merged, *sizes)
        convolved = gdn_split.split_conv1d_update(
            qkvz, ba, state, weight, bias, slots, *sizes, tokens_per_sequence=tokens
        )
        return (*parts, *merged, *seen, *convolved, state)

    torch._dynamo.reset()
    compiled = torch.compile(all_of_them, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for sizes, tokens in NUMBERS:
        tensors = convolution(device, 4, GroupShape(*sizes))
        tensors[:2] = projections(device, 4 * tokens, GroupShape(*sizes))
        for one, other in zip(
            compiled(*[tensor.clone() for tensor in tensors], *sizes, tokens),
            all_of_them(*[tensor.clone() for tensor in tensors], *sizes, tokens),
            strict=True,
        ):
            assert_bitwise_equal(one, other)


@pytest.mark.torch_compile
def test_gradients_compile_whole(device: torch.device) -> None:
    def loss(mixed_qkvz: Tensor, mixed_ba: Tensor) -> Tensor:
        mixed_qkv, z, b, _ = split(mixed_qkvz, mixed_ba)
        return (mixed_qkv.float() ** 2).sum() + z.float().sum() + b.float().exp().sum()

    plain, compiled = requiring(projections(device, 5)), requiring(projections(device, 5))
    loss(*plain).backward()
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    torch.compile(loss, fullgraph=True, backend=backend)(*compiled).backward()
    for one, other in zip(plain, compiled, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.torch_compile
def test_the_first_call_of_a_process_may_be_inside_torch_compile(device: torch.device) -> None:
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    run_alone(
        f"""
        import torch, gdn_split
        split = torch.compile(gdn_split.fused_qkvzba_split_reshape_cat, fullgraph=True, backend={backend!r})
        qkvz = torch.arange(3 * 12, device={device.type!r}).view(3, 12)
        result = split(qkvz, qkvz[:, :4].clone(), 1, 2, 2, 2)
        assert result.mixed_qkv.tolist() == qkvz[:, :8].tolist(), result
        assert result.z.flatten(1).tolist() == qkvz[:, 8:].tolist(), result
        """
    )


def test_importing_the_package_imports_no_triton_and_initialises_no_gpu() -> None:
    run_alone(
        """
        import sys, gdn_split, torch
        assert "triton" not in sys.modules, "triton was imported"
        assert not torch.cuda.is_initialized(), "CUDA was initialised"
        """
    )


def test_the_version_is_that_of_the_metadata_or_says_that_there_is_none() -> None:
    contract.check_version(gdn_split, "gdn-split")


@every_public_function
def test_public_functions_run_under_inference_mode(
    device: torch.device, function: Callable[..., Any], inputs: Callable[..., list[Tensor]]
) -> None:
    expected = function(*inputs(device, 5))
    with torch.inference_mode():
        for tensors in (inputs(device, 5), [tensor.clone() for tensor in inputs(device, 5)]):
            for one, other in zip(function(*tensors), expected, strict=True):
                assert_bitwise_equal(one, other)


@every_public_function
def test_the_same_call_gives_the_same_bits(
    device: torch.device, function: Callable[..., Any], inputs: Callable[..., list[Tensor]]
) -> None:
    contract.check_deterministic(lambda: function(*inputs(device, 7)))


@every_public_function
def test_a_row_does_not_depend_on_the_rows_beside_it(
    device: torch.device, function: Callable[..., Any], inputs: Callable[..., list[Tensor]]
) -> None:
    def run(rows: slice) -> Any:
        tensors = inputs(device, 12)
        # The pool, the weights and the bias are the same for all rows.
        return function(*[t.clone() if t.shape[0] != 12 else t[rows].contiguous() for t in tensors])

    contract.check_batch_invariant(run, 12)


# Gradients


def double(shape: GroupShape = TINY, rows: int = 2) -> list[Tensor]:
    return projections(torch.device("cpu"), rows, shape, torch.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_split_and_merge_match_finite_differences(device: torch.device, layout: str) -> None:
    fused = requiring([tensor.to(device) for tensor in double()])
    parts = requiring([tensor.to(device) for tensor in projection.split(*double(), *TINY_SIZES, layout)])

    def split_tiny(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(gdn_split.fused_qkvzba_split_reshape_cat(*tensors, *TINY_SIZES, layout=layout))

    def merge_tiny(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(gdn_split.merge_qkvzba(*tensors, *TINY_SIZES, layout=layout))

    for function, tensors in ((split_tiny, fused), (merge_tiny, parts)):
        torch.autograd.gradcheck(function, tensors)
        torch.autograd.gradgradcheck(function, tensors)


@pytest.mark.parametrize("used", range(4))
def test_the_gradient_of_one_output_alone_is_one_where_it_came_from_and_zero_elsewhere(
    device: torch.device, used: int
) -> None:
    # sum() hands backward a gradient of stride 0, and the outputs that are not used have none.
    fused = requiring([tensor.to(device) for tensor in double()])
    try:
        gdn_split.fused_qkvzba_split_reshape_cat(*fused, *TINY_SIZES)[used].sum().backward()
    except ValueError as error:
        pytest.fail(f"backward takes no such gradient: {error}")
    reference = requiring([tensor.to(device) for tensor in double()])
    projection.split(*reference, *TINY_SIZES)[used].sum().backward()
    for one, other in zip(fused, reference, strict=True):
        wanted = torch.zeros_like(other) if other.grad is None else other.grad
        assert_bitwise_equal(torch.zeros_like(one) if one.grad is None else one.grad, wanted)


@pytest.mark.parametrize("used", range(2))
def test_the_gradient_of_one_projection_alone_reaches_its_parts(device: torch.device, used: int) -> None:
    parts = requiring([part.to(device) for part in projection.split(*double(), *TINY_SIZES)])
    gdn_split.merge_qkvzba(*parts, *TINY_SIZES)[used].sum().backward()
    for place, part in enumerate(parts):
        wanted = torch.full_like(part, float((place < 2) == (used == 0)))
        assert_bitwise_equal(torch.zeros_like(part) if part.grad is None else part.grad, wanted)


def test_only_what_requires_a_gradient_gets_one(device: torch.device) -> None:
    qkvz, ba = (tensor.to(device) for tensor in double())
    qkvz.requires_grad_()
    result = gdn_split.fused_qkvzba_split_reshape_cat(qkvz, ba, *TINY_SIZES)
    (result.mixed_qkv.sum() + result.b.sum()).backward()
    assert qkvz.grad is not None
    assert ba.grad is None


# The kernels, from here on through launch, so that a CPU tensor goes through them too


def kernel_split(
    kernels: Any,
    qkvz: Tensor,
    ba: Tensor,
    *parts: Tensor,
    plan: SplitPlan | None,
    merge: bool = False,
    shape: GroupShape = TINY,
) -> None:
    kernels.move(qkvz, ba, parts, shape, "interleaved", merge, plan)


MOVE_PLANS = [
    pytest.param(SplitPlan(cdiv(3, 2) + 3 * TINY.num_heads_qk, 0, 1, 2, 4), id="by group"),
    pytest.param(SplitPlan(2, 2, 1, 1, 4), id="by run"),
]


@pytest.mark.parametrize("merge", [False, True], ids=["split", "merge"])
@pytest.mark.parametrize("plan", MOVE_PLANS)
def test_rows_more_than_2_to_the_31_elements_apart_are_copied(
    kernels: Any, device: torch.device, plan: SplitPlan, merge: bool
) -> None:
    tensors = [t.to(torch.int8) for t in [*projections(device, 3, TINY), *parts_of(device, 3, TINY, seed=1)]]

    def copy(*tensors: Tensor) -> tuple[()]:
        kernel_split(kernels, *tensors, plan=plan, merge=merge)
        return ()

    check_far_apart(copy, tensors, dict.fromkeys(range(6), 0))


def test_a_state_whose_slots_or_channels_are_more_than_2_to_the_31_elements_apart_is_updated(
    kernels: Any, device: torch.device
) -> None:
    shape = GroupShape(1, 1, 1, 2)
    qkvz, ba, _, weight, bias, _ = convolution(device, 3, shape)
    slots = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    state = torch.randn(3, shape.qkv_width, 3, device=device).bfloat16()
    parts = [torch.zeros_like(part) for part in parts_of(device, 3, shape)]
    plan = plan_conv(3, 1, shape, OF_A_GPU)

    def update(*tensors: Tensor) -> tuple[()]:
        kernels.convolve(tensors, shape, 1, True, "interleaved", plan)
        return ()

    tensors = (qkvz, ba, state, weight, bias, slots, *parts)
    # The state by slots, then by channels; and all that has rows.
    check_far_apart(update, tensors, dict.fromkeys((2, 0, 1, 3, 6, 7, 8, 9), 0))
    check_far_apart(update, tensors, {2: 1})


# What only a GPU shows

gpu = pytest.mark.gpu
every_function_on_a_gpu = pytest.mark.parametrize(
    ("function", "inputs"), [*PUBLIC.values(), *OF_SEQUENCES.values()], ids=[*PUBLIC, *OF_SEQUENCES]
)


@gpu
@pytest.mark.torch_compile
@pytest.mark.parametrize(("function", "inputs"), BY_A_PLAN.values(), ids=BY_A_PLAN)
def test_a_plan_may_be_given_in_plain_calls_in_a_graph_and_where_torch_compiles(
    device: torch.device, function: Callable[..., Any], inputs: Callable[..., list[Tensor]]
) -> None:
    contract.check_cuda_graph(function, lambda seed: inputs(device, 4, seed=seed))
    contract.check_compiles(function, inputs(device, 4), inputs(device, 5, seed=1))


@gpu
@every_function_on_a_gpu
def test_a_captured_graph_replays_the_bits_of_plain_calls(
    device: torch.device, function: Callable[..., Any], inputs: Callable[..., list[Tensor]]
) -> None:
    contract.check_cuda_graph(function, lambda seed: inputs(device, 5, seed=seed))


@gpu
@pytest.mark.torch_compile
@pytest.mark.parametrize(
    ("function", "inputs", "static"),
    [
        (split, projections, ()),
        (convolve, convolution, (2,)),
        (step, layer, (2, 5)),
        (verify, drafts, ()),
        (commit, accepted_drafts, (2, 5)),
    ],
    ids=["split", "split_conv1d_update", "gdn_decode_step", "gdn_verify", "gdn_commit"],
)
def test_graphs_that_torch_compile_captures_replay_the_bits_of_plain_calls(
    device: torch.device, function: Callable[..., Any], inputs: Callable[..., list[Tensor]], static: tuple[int, ...]
) -> None:
    contract.check_compiled_graphs(function, inputs(device, 5), inputs(device, 3), inputs(device, 4), static=static)


@gpu
@every_function_on_a_gpu
def test_no_call_waits_for_the_gpu(
    device: torch.device, function: Callable[..., Any], inputs: Callable[..., list[Tensor]]
) -> None:
    tensors = inputs(device, 5)
    contract.check_no_host_sync(lambda: function(*tensors))


@gpu
def test_backward_does_not_wait_for_the_gpu(device: torch.device) -> None:
    tensors = requiring(projections(device, 9))
    contract.check_no_host_sync(lambda: torch.autograd.grad(split(*tensors).z.sum(), tensors, allow_unused=True))


@gpu
def test_chains_of_splits_and_torch_ops_on_one_stream_see_each_others_results(device: torch.device) -> None:
    # A split that waits on the device may start before the op ahead of it ends: a missing wait reads old inputs, or
    # writes over what the op behind the last split still reads.
    rows = 4096
    qkvz, ba = projections(device, rows)
    out = reference.new_parts(qkvz, ba, TP8)
    sums = []
    for turn in range(50):
        qkvz.fill_(turn)
        ba.fill_(turn + 0.5)
        split_into(qkvz, ba, *out)
        merged = merge(*out)
        split_into(merged.mixed_qkvz, merged.mixed_ba, *out)
        sums.append(torch.stack([value for part in out for value in part.float().aminmax()]))
        # The next turn's fill stands behind reads that must have ended.
        for part in out:
            part.zero_()
    for turn, seen in enumerate(torch.stack(sums).tolist()):
        assert seen == [turn] * 4 + [turn + 0.5] * 4, turn


@gpu
def test_chains_of_convolutions_on_one_stream_carry_the_state(device: torch.device) -> None:
    turns, sequences = 50, 16
    inputs = convolution(device, sequences)
    bits = inputs[0].view(torch.int16).clone()
    states = []
    for turn in range(turns):
        inputs[0].view(torch.int16).copy_(bits + turn)
        convolve(*inputs)
        states.append(inputs[2][inputs[5].long()].view(torch.int16))
    order = projection.split(bits, inputs[1], *SIZES).mixed_qkv
    for turn in range(2, turns):
        wanted = torch.stack([order + turn - 2, order + turn - 1, order + turn], dim=2)
        # A NaN may lose its payload on the way through float32.
        is_nan = wanted.view(torch.bfloat16).isnan()
        assert torch.equal(states[turn].view(torch.bfloat16).isnan(), is_nan), turn
        assert torch.equal(states[turn][~is_nan], wanted[~is_nan]), turn


@gpu
def test_an_unaligned_tensor_after_an_aligned_one_of_the_same_shape_is_copied(device: torch.device) -> None:
    rows = 33
    for offset in (0, 0, 1, 0, 3, 8):
        tensors = []
        for tensor in projections(device, rows, seed=offset):
            room = torch.empty(tensor.numel() + 16, dtype=tensor.dtype, device=device)
            tensors.append(room[offset : offset + tensor.numel()].view_as(tensor).copy_(tensor))
        for one, other in zip(split(*tensors), projection.split(*tensors, *SIZES), strict=True):
            assert_bitwise_equal(one, other)


@gpu
def test_tensors_of_the_same_shape_at_other_addresses_are_not_confused(device: torch.device) -> None:
    inputs = [projections(device, 33, seed=seed) for seed in range(4)]
    results = [split(*tensors) for tensors in inputs]
    for tensors, result in zip(inputs, results, strict=True):
        for one, other in zip(result, projection.split(*tensors, *SIZES), strict=True):
            assert_bitwise_equal(one, other)


@gpu
def test_calls_that_differ_in_a_stride_or_a_dtype_alone_are_not_confused(device: torch.device) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.int8):
        for gap in (0, 8, 1):
            wide = [torch.nn.functional.pad(t, (0, gap)).to(dtype) for t in projections(device, 33)]
            tensors = [tensor[:, : tensor.shape[1] - gap] for tensor in wide]
            for one, other in zip(split(*tensors), projection.split(*tensors, *SIZES), strict=True):
                assert_bitwise_equal(one, other)


@gpu
def test_many_sizes_do_not_grow_the_table_of_launches_past_its_bound(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "launches", PreparedLaunches(most=8))
    for rows in range(1, 40):
        tensors = projections(device, rows, TINY)
        for one, other in zip(
            gdn_split.fused_qkvzba_split_reshape_cat(*tensors, *TINY_SIZES),
            projection.split(*tensors, *TINY_SIZES),
            strict=True,
        ):
            assert_bitwise_equal(one, other)
        assert len(ops.launches) <= 8


@gpu
def test_a_call_inside_another_stream_runs_there(device: torch.device) -> None:
    qkvz, ba = projections(device, 4096)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        qkvz.fill_(3)
        result = split(qkvz, ba)
    torch.cuda.current_stream().wait_stream(stream)
    assert (result.mixed_qkv == 3).all()
    assert (result.z == 3).all()


@gpu
@every_public_function
def test_tensors_on_a_device_that_is_not_the_current_one_are_taken_there(
    device: torch.device, function: Callable[..., Any], inputs: Callable[..., list[Tensor]]
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert torch.cuda.current_device() == 0
    expected = function(*inputs(torch.device("cuda:0"), 9))
    tensors = [tensor.to("cuda:1") for tensor in inputs(torch.device("cuda:0"), 9)]
    for one, other in zip(function(*tensors), expected, strict=True):
        assert one.device == torch.device("cuda:1")
        assert_bitwise_equal(one.cpu(), other.cpu())
    assert torch.cuda.current_device() == 0


@gpu
@pytest.mark.parametrize("plan", ["the device's", "of 40 cores"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
@much_memory()
def test_tensors_of_more_than_2_to_the_31_elements_are_split_and_merged_to_the_last_row(
    device: torch.device, dtype: torch.dtype, plan: str
) -> None:
    shape = GroupShape(QWEN3_NEXT_80B.num_heads_qk, QWEN3_NEXT_80B.num_heads_v, 128, 128)
    sizes = (shape.num_heads_qk, shape.num_heads_v, 128, 128)
    rows = 2**31 // (shape.num_heads_v * 128) + 200
    forced = plan_split(rows, shape, dtype.itemsize * (shape.qkvz_width + shape.ba_width), DeviceLimits(40))
    chosen = None if plan == "the device's" else forced
    qkvz = torch.empty(rows, shape.qkvz_width, dtype=dtype, device=device)
    ba = torch.empty(rows, shape.ba_width, dtype=dtype, device=device)
    for tensor in (qkvz, ba):
        tensor.view(torch.int8).random_(-128, 128)
    result = gdn_split.fused_qkvzba_split_reshape_cat(qkvz, ba, *sizes, plan=chosen)
    assert result.z.numel() > 2**31
    # Rows at the start, on both sides of where each tensor passes 2^31 elements and 2^32, and at the end.
    borders = [0, rows] + [2**n // tensor[0].numel() for tensor in (qkvz, *result) for n in (31, 32)]
    for border in {min(border, rows) for border in borders}:
        near = slice(max(0, border - 70), border + 70)
        for one, other in zip(result, projection.split(qkvz[near], ba[near], *sizes), strict=True):
            assert_bitwise_equal(one[near], other)
    merged = gdn_split.merge_qkvzba(*result, *sizes, plan=chosen)
    # All of it, in pieces, since a comparison makes a byte an element.
    for first in range(0, rows, 65536):
        piece = slice(first, first + 65536)
        assert torch.equal(merged.mixed_qkvz[piece].view(torch.int8), qkvz[piece].view(torch.int8))
    assert torch.equal(merged.mixed_ba.view(torch.int8), ba.view(torch.int8))


@gpu
@much_memory()
def test_a_packed_state_of_more_than_2_to_the_31_elements_is_updated_in_its_last_slots(device: torch.device) -> None:
    slots = 2**31 // (3 * TP8.qkv_width) + 100
    qkvz, ba, _, weight, bias, _ = convolution(device, 3)
    state = torch.zeros(slots, TP8.qkv_width, 3, dtype=torch.bfloat16, device=device)
    assert state.numel() > 2**31
    slot = torch.tensor([slots - 1, 0, slots - 70], device=device)
    state[slot] = torch.randn(3, TP8.qkv_width, 3, device=device).bfloat16()
    few = state[slot].clone()
    expected = convolve(qkvz, ba, few, weight, bias, torch.arange(3, device=device))
    result = convolve(qkvz, ba, state, weight, bias, slot)
    for one, other in zip(result, expected, strict=True):
        assert_bitwise_equal(one, other)
    assert_bitwise_equal(state[slot], few)
    state[slot] = 0
    assert not state.any()


@gpu
@pytest.mark.parametrize("waits", [False, True])
def test_waiting_on_the_device_changes_no_bit(device: torch.device, waits: bool) -> None:
    if waits and (torch.version.hip or torch.cuda.get_device_capability() < (9, 0)):
        pytest.skip("this GPU does not start kernels before the one ahead has ended")
    inputs = convolution(device, 9)
    move = plan_split(9, TP8, 2 * (TP8.qkvz_width + TP8.ba_width), replace(OF_A_GPU, dependent_launch=waits))
    convolving: ConvPlan = plan_conv(9, 1, TP8, replace(OF_A_GPU, dependent_launch=waits))
    split_result = gdn_split.fused_qkvzba_split_reshape_cat(*inputs[:2], *SIZES, plan=move)
    for one, other in zip(split_result, projection.split(*inputs[:2], *SIZES), strict=True):
        assert_bitwise_equal(one, other)
    once = [tensor.clone() for tensor in inputs]
    expected = convolve(*once)
    result = gdn_split.split_conv1d_update(*inputs, *SIZES, plan=convolving)
    for one, other in zip((*result, inputs[2]), (*expected, once[2]), strict=True):
        assert_bitwise_equal(one, other)
