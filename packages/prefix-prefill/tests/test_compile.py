"""Is a compiled call the plain one, bit for bit: for other numbers, for symbolic sizes and those of the device alone?

And under torch.func's transforms: is what cannot be derived or batched refused by name?
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vmap

import prefix_prefill
from kernel_reference.checks import validate_values
from kernel_reference.testing.guards import assert_same_bits

Tensor = torch.Tensor
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HEADS, HEADS_KV, D, PAGE, BLOCKS = 4, 2, 32, 16, 12


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    backend = "inductor" if torch.cuda.is_available() else "aot_eager"
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def batch(device: torch.device, rows: int = 11, sequences: int = 3, cache_dtype: torch.dtype = BF16) -> list[Tensor]:
    """q, k, v, k_cache, v_cache, block_table, cu_seqlens_q, seqlens_k: sequences of as many rows, and some after."""
    q, k, v = (torch.randn(rows, heads, D, device=device).to(BF16) for heads in (HEADS, HEADS_KV, HEADS_KV))
    k_cache, v_cache = (torch.randn(BLOCKS, PAGE, HEADS_KV, D, device=device).to(cache_dtype) for _ in range(2))
    each = rows // sequences
    table = torch.randint(BLOCKS, (sequences, 3), dtype=torch.int32, device=device)
    cu = torch.arange(sequences + 1, dtype=torch.int32, device=device) * each
    return [q, k, v, k_cache, v_cache, table, cu, torch.full((sequences,), 20 + each, device=device)]


def packed(tensors: list[Tensor]) -> list[Tensor]:
    """The same with caches in the layout that context_attention_fwd takes."""
    q, k, v, k_cache, v_cache, *lengths = tensors
    bits = [cache.view(torch.uint8) if cache.dtype == E4M3 else cache for cache in (k_cache, v_cache)]
    keys, values = (cache.permute(0, 2, 3, 1).contiguous() for cache in bits)
    keys = keys.unflatten(2, (-1, 8)).mT.contiguous()
    return [q, k, v, keys.view(k_cache.dtype), values.view(v_cache.dtype), *lengths]


def attend(*tensors: Tensor, **options: Any) -> Any:
    return prefix_prefill.prefix_prefill(*tensors, max_seqlen_q=tensors[0].shape[0], return_lse=True, **options)


def attend_as_engines_do(*tensors: Tensor, kind: str = "auto", **options: Any) -> Any:
    q, k, v, k_cache, v_cache, *lengths = tensors
    k_scale, v_scale, most = options.pop("k_scale", None), options.pop("v_scale", None), options.pop("most", 48)
    o = torch.zeros_like(q, dtype=E4M3 if options.get("fp8_out_scale") else q.dtype)
    prefix_prefill.context_attention_fwd(
        q, k, v, o, kind, k_cache, v_cache, *lengths, most, q.shape[0], k_scale, v_scale, **options
    )
    return o


def merge(*tensors: Tensor) -> Any:
    out_a, out_b = tensors[0], tensors[0] * 0.5
    lse = out_a.float().sum(2).T.contiguous()
    return prefix_prefill.merge_attention_states(out_a, lse, out_b, lse * 0.3)


ENGINES = "as engines do"
# Values of one argument that are called in turn. Integers are symbols from the second on; torch compiles for each float
# anew, as no op can be handed a symbolic one.
NUMBERS: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "softmax_scale": ("prefill", "softmax_scale", (0.3, 0.17, 0.9)),
    "softcap": ("prefill", "softcap", (3.0, 7.5, 30.0)),
    "k_scale": ("8 bits", "k_scale", (0.5, 0.02, 2.0)),
    "v_scale": ("8 bits", "v_scale", (0.5, 0.02, 2.0)),
    "out_scale": ("prefill", "out_scale", (0.5, 0.02, 0.07)),
    "window": ("prefill", "window", ((5, 0), (9, 0), (12, 0))),
    "num_splits": ("prefill", "num_splits", (2, 3, 4)),
    "sm_scale": (ENGINES, "sm_scale", (0.3, 0.17, 0.9)),
    "fp8_out_scale": (ENGINES, "fp8_out_scale", (0.5, 0.02, 0.07)),
    "k_scale of engines": (f"{ENGINES}, 8 bits", "k_scale", (0.5, 0.02, 2.0)),
    "v_scale of engines": (f"{ENGINES}, 8 bits", "v_scale", (0.5, 0.02, 2.0)),
    "sliding_window": (ENGINES, "sliding_window", (5, 9, 12)),
    "max_seq_len": (ENGINES, "most", (23, 40, 48)),
}


@pytest.mark.torch_compile
@pytest.mark.parametrize(("way", "name", "values"), NUMBERS.values(), ids=NUMBERS)
def test_a_compiled_call_takes_other_values_of_each_number(
    device, way: str, name: str, values: tuple[Any, ...]
) -> None:
    tensors = batch(device, cache_dtype=E4M3 if "8 bits" in way else BF16)
    scales = {"k_scale": 0.3, "v_scale": 0.6} if "8 bits" in way else {}
    function = attend_as_engines_do if way.startswith(ENGINES) else attend
    if function is attend_as_engines_do:
        tensors = packed(tensors)
    call = compiled(lambda value: function(*tensors, **{**scales, name: value}))
    for turn, value in enumerate(values):
        with torch._dynamo.config.patch(error_on_recompile=turn > 1 and not isinstance(value, float)):
            actual = call(value)
        assert_same_bits(actual, function(*tensors, **{**scales, name: value}), f"{name} of {value}")


@pytest.mark.torch_compile
@pytest.mark.parametrize("function", [attend, attend_as_engines_do, merge], ids=["prefill", ENGINES, "merge"])
def test_a_call_compiles_once_for_all_sizes_where_they_are_dynamic(device, function: Callable[..., Any]) -> None:
    # No two sizes are alike at first, or torch would take them for one.
    call = compiled(function, dynamic=True)
    for turn, (rows, sequences) in enumerate(((19, 6), (29, 7), (90, 9))):
        tensors = batch(device, rows, sequences)
        tensors = packed(tensors) if function is attend_as_engines_do else tensors
        with torch._dynamo.config.patch(error_on_recompile=turn > 0):
            actual = call(*tensors)
        assert_same_bits(actual, function(*tensors), f"{rows} rows of {sequences} sequences")


@pytest.mark.torch_compile
@pytest.mark.parametrize("way", ["prefill", "cached", "8-bit output", ENGINES, "merge"])
def test_a_call_compiles_where_only_the_device_knows_how_many_tokens_there_are(device, way: str) -> None:
    """Rows are chosen by a mask, in one tensor after the other, so that each has a size of its own."""

    def step(keep: Tensor, *tensors: Tensor) -> Any:
        q, k, v, *rest = tensors
        q, k, v = (x[keep.nonzero()[:, 0]] for x in (q, k, v))
        if way == "merge":
            return merge(q)
        if way == ENGINES:
            return attend_as_engines_do(q, k, v, *rest)
        if way == "cached":
            return prefix_prefill.prefix_prefill(q, None, None, *rest, max_seqlen_q=11, out=torch.zeros_like(q))
        return attend(q, k, v, *rest, **({"out_scale": 0.1} if way == "8-bit output" else {}))

    tensors = batch(device, rows=14)
    tensors[6] = tensors[6].new_tensor([0, 3, 6, 9])
    tensors = packed(tensors) if way == ENGINES else tensors
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        call = compiled(step)
        for count in (9, 11, 14):
            keep = torch.arange(14, device=device) < count
            with torch._dynamo.config.patch(error_on_recompile=count > 9):
                assert_same_bits(call(keep, *tensors), step(keep, *tensors), f"{count} rows")


@pytest.mark.torch_compile
def test_a_call_compiles_where_only_the_device_knows_the_most_tokens_and_the_sequences(device) -> None:
    def step(count: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Any:
        k_cache, v_cache, table, cu, seqlens = rest
        sequences = count.item()
        torch._check(sequences >= 1)
        torch._check(sequences <= table.shape[0])
        most = seqlens.max().item()
        return prefix_prefill.prefix_prefill(
            q, k, v, k_cache, v_cache, table[:sequences], cu[: sequences + 1], seqlens[:sequences], max_seqlen_q=most
        )

    tensors = batch(device)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        call = compiled(step)
        for sequences in (3, 1, 2):
            count = torch.tensor(sequences, device=device)
            assert_same_bits(call(count, *tensors), step(count, *tensors), f"{sequences} sequences")


@pytest.mark.torch_compile
def test_sizes_that_do_not_fit_are_refused_by_name_when_a_compiled_call_runs(device) -> None:
    def step(keep: Tensor, q: Tensor, *rest: Tensor) -> Any:
        return attend(q[keep.nonzero()[:, 0]], *rest)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        call = compiled(step)
        tensors = batch(device)
        call(torch.ones(11, device=device), *tensors)
        with pytest.raises(ValueError, match=r"^k must be \[9, Hkv, 32\] as q is, got "):
            call(torch.arange(11, device=device) < 9, *tensors)


# Transforms


def call_of(name: str, device: torch.device) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A public function of one of its tensors, and that tensor."""
    q, *rest = batch(device)
    if name == "prefill":
        return lambda q: attend(q, *rest).out, q.float().to(BF16)
    if name == "v":
        return lambda v: attend(q, rest[0], v, *rest[2:]).out, rest[1]
    if name == ENGINES:
        _, *others = packed([q, *rest])
        return lambda q: attend_as_engines_do(q, *others), q
    return lambda q: merge(q).out, q


WAYS = {"prefill": "q", "v": "v", ENGINES: "q", "merge": "out_a"}
TRANSFORMS: dict[str, tuple[Callable[..., Any], str]] = {
    "jvp": (lambda f, x: jvp(f, (x,), (x,)), "without a tangent: it has no forward-mode derivative"),
    "jvp without gradients": (
        lambda f, x: torch.no_grad()(jvp)(f, (x,), (x,)), "without a tangent: it has no forward-mode derivative",
    ),
    # Compiled code would drop the tangent, and give 0.
    "jvp inside torch.compile": (
        lambda f, x: torch.compile(lambda y: jvp(f, (y,), (y,)), backend="aot_eager")(x), "without a tangent",
    ),
    "jvp of compiled code": (
        lambda f, x: jvp(torch.compile(f, backend="aot_eager"), (x,), (x,)), "without a tangent",
    ),
    "jacfwd": (lambda f, x: jacfwd(f)(x), "without a tangent"),
    "grad": (lambda f, x: grad(lambda y: f(y).float().sum())(x), "without gradient"),
    "jacrev": (lambda f, x: jacrev(f)(x), "without gradient"),
    "hessian": (lambda f, x: hessian(f)(x), "without gradient"),
    "vmap of grad": (
        lambda f, x: vmap(grad(lambda y: f(y).float().sum()))(torch.stack([x, x])), "without gradient",
    ),
    "vmap": (lambda f, x: vmap(f)(torch.stack([x, x])), "outside torch.vmap"),
    "functionalize": (lambda f, x: functionalize(f)(x), "outside torch.func.functionalize"),
}  # fmt: skip


@pytest.mark.parametrize(("transform", "said"), TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("way", WAYS)
def test_transforms_that_cannot_be_are_refused_by_name(
    device, way: str, transform: Callable[..., Any], said: str
) -> None:
    function, given = call_of(way, device)
    with pytest.raises((ValueError, TypeError), match=f"must be {said}") as raised:
        transform(function, given)
    # Under functionalize torch's own tensors stand for all, the first of them too.
    assert str(raised.value).split()[0] in (WAYS[way], "q" if "functionalize" in said else WAYS[way])


def test_dual_numbers_are_refused_inside_validate_values_and_out_of_it(device) -> None:
    from torch.autograd import forward_ad

    q, *rest = batch(device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        for enabled in (False, True):
            with validate_values(enabled), pytest.raises(ValueError, match=r"^q must be without a tangent"):
                attend(dual, *rest)
        attend(q, *rest)
