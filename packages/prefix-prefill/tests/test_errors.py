"""Does bad input say which argument, what it must be and what it was, and write nothing? One table.

Then what only device memory tells: named on a CPU and inside ``validate_values``, harmless elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

import prefix_prefill
from kernel_reference.checks import validate_values
from kernel_reference.testing.wrong import (
    Change,
    as_list,
    assert_kept,
    elsewhere,
    every_second,
    in_double,
    in_half,
    kept,
    needing_grad,
    one_less,
    one_rank_more,
    one_wider,
    overlapping,
    refused,
    replaced,
    sparse,
    together,
)
from prefix_prefill import PrefillPlan

Tensor = torch.Tensor
# 3 sequences of 2, 0 and 3 of 6 tokens, behind 20, 16 and 0; 4 query heads on 2 kv heads of 32 elements, pages of 16.
H, HKV, D, PAGE, BLOCKS, ROWS = 4, 2, 32, 16, 7, 6
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FUNCTIONS = {
    "prefill": prefix_prefill.prefix_prefill,
    "drop-in": prefix_prefill.context_attention_fwd,
    "merge": prefix_prefill.merge_attention_states,
}
ATTENDING = ("prefill", "drop-in")
# Arguments by function, where their names differ.
TABLE_OF = {"prefill": "block_table", "drop-in": "b_loc"}
CU_OF = {"prefill": "cu_seqlens_q", "drop-in": "b_start_loc"}
SEQLENS_OF = {"prefill": "seqlens_k", "drop-in": "b_seq_len"}
MOST_OF = {"prefill": "max_seqlen_q", "drop-in": "max_input_len"}
MOST_KEYS_OF = {"prefill": "max_seqlen_k", "drop-in": "max_seq_len"}
OUT_OF = {"prefill": "out", "drop-in": "o"}
OUT_SCALE_OF = {"prefill": "out_scale", "drop-in": "fp8_out_scale"}
SCALE_OF = {"prefill": "softmax_scale", "drop-in": "sm_scale"}
# A plan of nothing but zeros reaches no element.
NO_PLAN = PrefillPlan(*[0] * len(fields(PrefillPlan)))


def good(function: str, device: torch.device) -> dict[str, Any]:
    """Arguments that are right, with 8-bit caches, and everything optional that goes with the rest given."""

    def make(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(size, device=device).to(dtype)

    def integers(*numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    if function == "merge":
        return {
            "out_a": make(ROWS, H, D), "lse_a": make(H, ROWS, dtype=torch.float32), "out_b": make(ROWS, H, D),
            "lse_b": make(H, ROWS, dtype=torch.float32),
        }  # fmt: skip
    tensors = {
        "q": make(ROWS, H, D), "k": make(ROWS, HKV, D), "v": make(ROWS, HKV, D),
        "alibi_slopes": torch.rand(H, device=device), "sinks": torch.rand(H, device=device),
        "k_scale": torch.rand(HKV, device=device), "v_scale": torch.rand(HKV, device=device), "causal": True,
        "skip_decode": False, OUT_OF[function]: make(ROWS, H, D), SCALE_OF[function]: 0.25,
    }  # fmt: skip
    lengths = {
        TABLE_OF[function]: integers([3, 0], [5, 2], [6, 6]), CU_OF[function]: integers(0, 2, 2, 5),
        SEQLENS_OF[function]: integers(22, 16, 3), MOST_OF[function]: 3, MOST_KEYS_OF[function]: 22,
    }  # fmt: skip
    if function == "drop-in":
        return {
            **tensors, **lengths, "kv_cache_dtype": "fp8", "sliding_window": 30,
            "k_cache": make(BLOCKS, HKV, D // 16, PAGE, 16, dtype=E4M3),
            "v_cache": make(BLOCKS, HKV, D, PAGE, dtype=E4M3),
        }  # fmt: skip
    caches = {name: make(BLOCKS, PAGE, HKV, D, dtype=E4M3) for name in ("k_cache", "v_cache")}
    options = {
        "page_layout": "NHD", "window": (30, 0), "softcap": 3.0, "return_lse": True, "num_splits": 1,
        "draft_mask": torch.tensor([1, 3, 1, 3, 5, 0], device=device),
    }  # fmt: skip
    return {**tensors, **lengths, **caches, **options}


def in_layout(layout: str) -> Change:
    """Another layout, and caches that are right in it."""

    def change(arguments: dict[str, Any]) -> None:
        arguments["page_layout"] = layout
        for name in ("k_cache", "v_cache"):
            cache = arguments[name].view(torch.uint8)
            if layout == "HND":
                cache = cache.transpose(1, 2).contiguous()
            else:
                cache = cache.permute(0, 2, 3, 1).contiguous()
                cache = cache.unflatten(2, (-1, 16)).mT.contiguous() if name == "k_cache" else cache
            arguments[name] = cache.view(E4M3)

    return change


def with_head_dim(size: int) -> Change:
    def change(arguments: dict[str, Any]) -> None:
        for name in ("q", "k", "v", "out", "o"):
            if name in arguments:
                arguments[name] = arguments[name][..., :1].repeat(1, 1, size)
        for name in ("k_cache", "v_cache"):
            cache = arguments[name]
            if cache.ndim == 5:
                shape: tuple[int, ...] = (*cache.shape[:2], size, PAGE, 1)
            else:
                shape = (*cache.shape[:2], size, PAGE) if "o" in arguments else (*cache.shape[:3], size)
            arguments[name] = torch.zeros(shape, device=cache.device).to(cache.dtype)

    return change


def all_in(dtype: torch.dtype) -> Change:
    def change(arguments: dict[str, Any]) -> None:
        for name in ("q", "k", "v", "out", "o"):
            if name in arguments:
                arguments[name] = arguments[name].to(dtype)

    return change


def one_more_in(dim: int) -> Callable[[Tensor], Tensor]:
    def grown(tensor: Tensor) -> Tensor:
        sizes = [size + (i == dim) for i, size in enumerate(tensor.shape)]
        return torch.zeros(sizes, device=tensor.device).to(tensor.dtype)

    return grown


one_head_less = lambda tensor: tensor[:, :-1]  # noqa: E731
in_int16 = lambda tensor: tensor.short()  # noqa: E731
as_float = lambda tensor: tensor.float()  # noqa: E731
as_int = lambda tensor: tensor.int()  # noqa: E731
expanded = lambda tensor: tensor[:1].expand_as(tensor)  # noqa: E731
no_elements = lambda tensor: tensor[..., :0]  # noqa: E731

V, T = ValueError, TypeError
NO_TENSOR = (("not a tensor", T, as_list), ("None", T, None), ("sparse", T, sparse))
WRONG_TENSOR = (("not a tensor", T, as_list), ("sparse", T, sparse))
# Function, what is wrong, the error, the argument it must name, the change that makes it wrong.
TABLE = [
    *[
        (function, "q of nothing", V, "q", together(replaced("q", no_elements), replaced(SCALE_OF[function], None)))
        for function in ATTENDING
    ],
    *[
        (function, f"q: {what}", error, "q", replaced("q", change))
        for function in ATTENDING
        for what, error, change in (
            *NO_TENSOR, ("rank", V, one_rank_more), ("float64", T, in_double), ("integers", T, as_int),
            ("8 bits", T, lambda q: q.to(E4M3)), ("heads that kv heads do not divide", V, lambda q: q[:, :3]),
            ("no heads", V, lambda q: q[:, :0]),
        )
    ],
    *[
        (function, f"{name}: {what}", error, name, replaced(name, change))
        for function in ATTENDING
        for name in ("k", "v")
        for what, error, change in (
            *WRONG_TENSOR, ("rank", V, one_rank_more), ("another dtype", T, in_half),
            ("8 bits", T, lambda x: x.to(E4M3)), ("another device", V, elsewhere), ("other rows", V, one_less),
            ("another head size", V, one_wider),
        )
    ],
    *[(function, "v: other heads than k", V, "v", replaced("v", one_head_less)) for function in ATTENDING],
    *[
        ("prefill", f"{name} alone is None", V, name, replaced(name, None))
        for name in ("k", "v")
    ],
    *[("drop-in", f"{name} is None", T, name, replaced(name, None)) for name in ("k", "v", "o")],
    *[
        (function, "k and v of other heads than the cache", V, "k_cache",
         together(replaced("k", one_head_less), replaced("v", one_head_less)))
        for function in ATTENDING
    ],
    *[
        (function, f"of {size} elements", V, "q", with_head_dim(size))
        for function in ATTENDING
        for size in (0, 1, 15, 513, 1024)
    ],
    *[(function, "all in float64", T, "q", all_in(torch.float64)) for function in ATTENDING],
    *[
        (function, f"{name}: {what}", error, name, replaced(name, change))
        for function in ATTENDING
        for name in ("k_cache", "v_cache")
        for what, error, change in (
            *NO_TENSOR, ("rank", V, lambda x: x[0]), ("float16", T, in_half), ("float64", T, in_double),
            ("integers", T, as_int), ("another device", V, elsewhere),
        )
    ],
    *[
        (function, "caches of one head more", V, "k_cache",
         together(*[replaced(name, one_more_in(dim)) for name in ("k_cache", "v_cache")]))
        for function, dim in (("prefill", 2), ("drop-in", 1))
    ],
    *[
        ("prefill", f"{name}: {what}", V, name, replaced(name, change))
        for name, what, change in (
            ("k_cache", "another head size", lambda x: x[..., :8]),
            ("v_cache", "another head size", lambda x: x[..., :8]), ("v_cache", "fewer pages", one_less),
            ("v_cache", "smaller pages", one_head_less),
        )
    ],
    ("prefill", "pages of no tokens", V, "k_cache",
     together(*[replaced(name, lambda x: x[:, :0]) for name in ("k_cache", "v_cache")])),
    ("drop-in", "v_cache: fewer pages", V, "v_cache", replaced("v_cache", one_less)),
    ("drop-in", "k_cache: another head size", V, "k_cache", replaced("k_cache", lambda x: x[..., :8])),
    ("prefill", "v_cache: the other 8 bits", T, "v_cache", replaced("v_cache", lambda x: x.float().to(E5M2))),
    ("prefill", "v_cache: no 8 bits", T, "v_cache", replaced("v_cache", lambda x: x.to(torch.bfloat16))),
    ("prefill", "uint8 caches", T, "k_cache",
     together(*[replaced(name, lambda x: x.view(torch.uint8)) for name in ("k_cache", "v_cache")])),
    *[
        ("prefill", f"page_layout {value!r}", error, "page_layout", replaced("page_layout", value))
        for value, error in (("nhd", V), ("", V), ("BHSD", V), (None, T), (3, T), (["NHD"], T))
    ],
    ("prefill", "caches of another layout than said", V, "k_cache", replaced("page_layout", "HND")),
    ("prefill", "4-D keys said to be x-packed", V, "k_cache", replaced("page_layout", "x-packed")),
    *[
        ("prefill", f"v_cache of another layout, {layout}", V, "v_cache",
         together(in_layout(layout), replaced("v_cache", lambda x: x.mT)))
        for layout in ("HND", "x-packed")
    ],
    *[
        ("drop-in", f"kv_cache_dtype {value!r}", V, "kv_cache_dtype", replaced("kv_cache_dtype", value))
        for value in ("fp16", "FP8", "", None, torch.float8_e4m3fn, ["fp8"])
    ],
    ("drop-in", "uint8 caches as they say themselves", T, "k_cache", together(
        replaced("kv_cache_dtype", "auto"),
        *[replaced(name, lambda x: x.view(torch.uint8)) for name in ("k_cache", "v_cache")])),
    *[
        ("drop-in", f"caches of another dtype than {said}", T, "k_cache", replaced("kv_cache_dtype", said))
        for said in ("fp8_e5m2", "bfloat16", "float16")
    ],
    ("drop-in", "caches of another dtype than q's, as said", T, "k_cache", together(
        replaced("kv_cache_dtype", "float16"),
        *[replaced(name, lambda x: x.half()) for name in ("k_cache", "v_cache")])),
    ("drop-in", "a cache of no 8 bits", T, "v_cache", replaced("v_cache", lambda x: x.to(torch.bfloat16))),
    *[
        (function, f"{names[function]}: {what}", error, names[function], replaced(names[function], change))
        for function in ATTENDING
        for names in (TABLE_OF, CU_OF, SEQLENS_OF)
        for what, error, change in (
            *NO_TENSOR, ("int16", T, in_int16), ("floats", T, as_float), ("rank", V, one_rank_more),
            ("one too few", V, one_less), ("not contiguous", V, every_second), ("another device", V, elsewhere),
            ("a number", T, 3),
        )
    ],
    *[
        (function, f"{MOST_OF[function]}: {value!r}", error, MOST_OF[function], replaced(MOST_OF[function], value))
        for function in ATTENDING
        for value, error in ((-1, V), (2.5, T), ("3", T), (None, T))
    ],
    *[
        (function, f"{MOST_KEYS_OF[function]} {value!r}", error, MOST_KEYS_OF[function], change)
        for function in ATTENDING
        for value, error in ((2.5, T), (None, T), (True, T), (-1, V))
        if function == "drop-in" or value is not None
        for change in [replaced(MOST_KEYS_OF[function], value)]
    ],
    *[
        (function, f"{name}: {what}", error, name, replaced(name, change))
        for function in ATTENDING
        for name in ("alibi_slopes", "sinks")
        for what, error, change in (
            *WRONG_TENSOR, ("one too few", V, one_less), ("rank", V, one_rank_more), ("float64", T, in_double),
            ("integers", T, as_int), ("not contiguous", V, every_second), ("another device", V, elsewhere),
            ("a number", T, 0.5), ("of kv heads", V, lambda x: x[:HKV]),
        )
    ],
    *[
        ("prefill", f"draft_mask: {what}", error, "draft_mask", replaced("draft_mask", change))
        for what, error, change in (
            *WRONG_TENSOR, ("one too few", V, one_less), ("rank", V, one_rank_more), ("floats", T, in_double),
            ("32 bits", T, as_int), ("not contiguous", V, every_second), ("another device", V, elsewhere),
            ("a number", T, 5),
        )
    ],
    ("prefill", "max_seqlen_q: 64 with draft_mask", V, "max_seqlen_q", replaced("max_seqlen_q", 64)),
    *[
        (function, f"{name}: {what}", error, name, replaced(name, change))
        for function in ATTENDING
        for name in ("k_scale", "v_scale")
        for what, error, change in (
            ("not a number", T, "1.0"), ("a list", T, as_list), ("sparse", T, sparse), ("infinite", V, math.inf),
            ("NaN", V, math.nan), ("missing", V, None), ("float64", T, in_double), ("integers", T, as_int),
            ("of query heads", V, lambda x: x.repeat(2)), ("another device", V, elsewhere), ("a bool", T, True),
            ("per token without heads", V, lambda x: x.new_ones(BLOCKS, PAGE)),
            ("of pages too few", V, lambda x: x.new_ones(BLOCKS - 1, PAGE, HKV)),
            ("one element of rank 3", V, lambda x: x.new_ones(1, 1, 1)),
        )
    ],
    *[
        (function, f"{OUT_OF[function]}: {what}", error, OUT_OF[function], replaced(OUT_OF[function], change))
        for function in ATTENDING
        for what, error, change in (
            ("another head size", V, one_wider), ("fewer rows", V, one_less), ("rank", V, one_rank_more),
            ("overlapping rows", V, overlapping), ("expanded", V, expanded), ("another device", V, elsewhere),
            ("sparse", T, sparse), ("not a tensor", T, as_list), ("another dtype", T, in_half),
        )
    ],
    *[
        (function, "8-bit outputs without a scale", V, OUT_SCALE_OF[function],
         replaced(OUT_OF[function], lambda x: x.to(E4M3)))
        for function in ATTENDING
    ],
    *[
        (function, f"a scale, {scale}, of outputs that are not of 8 bits", T, OUT_OF[function],
         replaced(OUT_SCALE_OF[function], scale))
        for function in ATTENDING
        for scale in (0.5, 1.0)
    ],
    *[
        (function, f"{OUT_SCALE_OF[function]}: {what}", error, OUT_SCALE_OF[function],
         together(replaced(OUT_OF[function], lambda x: x.to(E5M2)), replaced(OUT_SCALE_OF[function], value)))
        for function in ATTENDING
        for what, error, value in (
            ("0", V, 0.0), ("below 0", V, -1.0), ("infinite", V, math.inf), ("NaN", V, math.nan), ("a name", T, "1"),
            ("a list", T, [1.0]), ("per head", V, torch.ones(H)), ("float64", T, torch.ones(1, dtype=torch.float64)),
            ("none at all", V, torch.ones(0)), ("meta", V, torch.ones(1, device="meta")),
        )
    ],
    *[
        (function, f"{SCALE_OF[function]} {value!r}", error, SCALE_OF[function], replaced(SCALE_OF[function], value))
        for function in ATTENDING
        for value, error in (("1", T), ([1.0], T), (math.nan, V), (math.inf, V), (torch.ones(1), T), (False, T))
    ],
    *[
        ("prefill", f"softcap {value!r}", error, "softcap", replaced("softcap", value))
        for value, error in ((-1.0, V), (math.nan, V), (math.inf, V), ("1", T), (None, T), (torch.ones(1), T))
    ],
    *[
        ("prefill", f"window {value!r}", error, "window", replaced("window", value))
        for value, error in (
            ((-2, 0), V), ((0, -2), V), ((-(2**40), 0), V), (3, T), ((3,), T), ((3, 0, 0), T), ((1.5, 0), T),
            (("3", 0), T), ("30", T), ((None, 0), T), ((True, 0), T),
        )
    ],
    *[
        ("drop-in", f"sliding_window {value!r}", T, "sliding_window", replaced("sliding_window", value))
        for value in (1.5, "3", (3, 0), True)
    ],
    *[
        (function, f"{name} {value!r}", T, name, replaced(name, value))
        for function in ATTENDING
        for name in ("causal", "skip_decode")
        for value in (None, 1, "yes")
    ],
    ("prefill", "widen_bytes below 0", V, "widen_bytes", replaced("widen_bytes", -1)),
    ("prefill", "widen_bytes 1.5", T, "widen_bytes", replaced("widen_bytes", 1.5)),
    ("prefill", "quantize_q 1", T, "quantize_q", replaced("quantize_q", 1)),
    ("prefill", "quantize_q with new keys", V, "quantize_q", replaced("quantize_q", True)),
    ("prefill", "quantize_q over e5m2", V, "quantize_q", together(
        replaced("quantize_q", True), replaced("k", None), replaced("v", None),
        *(replaced(name, lambda cache: cache.view(torch.float8_e5m2)) for name in ("k_cache", "v_cache")),
    )),
    *[("prefill", f"return_lse {value!r}", T, "return_lse", replaced("return_lse", value)) for value in (None, 1)],
    *[
        ("prefill", f"num_splits {value!r}", error, "num_splits", replaced("num_splits", value))
        for value, error in ((0, V), (-1, V), (1.5, T), ("2", T), (True, T))
    ],
    ("prefill", "num_splits beside a plan", V, "num_splits", replaced("plan", PrefillPlan(16, 16, 1, 4, 1))),
    *[
        ("prefill", f"plan: {what}", error, "plan",
         together(replaced("num_splits", None), replaced("plan", value)))
        for what, error, value in (
            ("a name", T, "fast"), ("numbers", T, [16, 16, 1, 4, 1, 0]), ("that reaches nothing", V, NO_PLAN),
            ("of no power of two", V, PrefillPlan(48, 16, 1, 4, 1)), ("of no stages", V, PrefillPlan(16, 16, 1, 4, 0)),
            ("of wider tiles than 8 bits take", V, PrefillPlan(64, 128, 1, 4, 2, hopper=True)),
        )
    ],
    *[
        (function, f"{name} needs a gradient", V, name, replaced(name, needing_grad))
        for function in ATTENDING
        for name in ("q", "k", "v", OUT_OF[function], "alibi_slopes", "sinks", "k_scale", "v_scale")
    ],
    *[
        ("merge", f"{name}: {what}", error, name, replaced(name, change))
        for name in ("out_a", "out_b")
        for what, error, change in (
            *NO_TENSOR, ("rank", V, one_rank_more), ("float64", T, in_double), ("8 bits", T, lambda x: x.to(E4M3)),
            ("needs a gradient", V, needing_grad),
        )
    ],
    *[
        ("merge", f"out_b: {what}", error, "out_b", replaced("out_b", change))
        for what, error, change in (
            ("another dtype", T, in_half), ("fewer rows", V, one_less), ("fewer heads", V, one_head_less),
            ("another head size", V, one_wider), ("another device", V, elsewhere),
        )
    ],
    *[
        ("merge", f"{name}: {what}", error, name, replaced(name, change))
        for name in ("lse_a", "lse_b")
        for what, error, change in (
            *NO_TENSOR, ("rank", V, one_rank_more), ("float64", T, in_double), ("bfloat16", T, lambda x: x.bfloat16()),
            ("heads last", V, lambda x: x.T), ("fewer rows", V, one_head_less), ("fewer heads", V, one_less),
            ("needs a gradient", V, needing_grad), ("another device", V, elsewhere),
        )
    ],
    *[
        ("merge", f"out: {what}", error, "out", lambda given, change=change: given.update(out=change(given["out_a"])))
        for what, error, change in (
            ("a list", T, lambda x: [1.0]), ("another dtype", T, in_half), ("fewer rows", V, one_less),
            ("the argument itself", V, lambda x: x), ("rows of one", V, lambda x: x[:1].expand_as(x)),
        )
    ],
    ("merge", "no heads", V, "out_a", together(
        *[replaced(name, lambda x: x[:, :0]) for name in ("out_a", "out_b")],
        *[replaced(name, lambda x: x[:0]) for name in ("lse_a", "lse_b")])),
]  # fmt: skip


def moved_to(arguments: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Tensors that the table makes once for all devices, on the one under test."""
    return {
        name: value.to(device) if isinstance(value, Tensor) and name in OUT_SCALE_OF.values() and not value.is_meta
        else value for name, value in arguments.items()
    }  # fmt: skip


@pytest.mark.parametrize(
    ("function", "error", "name", "change"),
    [pytest.param(function, *rest, id=f"{function}-{what}") for function, what, *rest in TABLE],
)
def test_bad_input_is_named_with_what_it_must_be_and_what_it_was_and_nothing_is_written(
    device, function, error, name, change
) -> None:
    arguments = good(function, device)
    before = kept(arguments)
    change(arguments)
    arguments = moved_to(arguments, device)
    before += kept(arguments)
    with refused(error, name):
        FUNCTIONS[function](**arguments)
    assert_kept(before)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_right_arguments_of_the_table_are_taken(device, function) -> None:
    FUNCTIONS[function](**good(function, device))
    with validate_values():
        FUNCTIONS[function](**good(function, device))


@pytest.mark.parametrize("layout", ["HND", "x-packed"])
def test_the_caches_that_the_table_makes_of_other_layouts_are_taken(device, layout) -> None:
    arguments = good("prefill", device)
    wanted = prefix_prefill.prefix_prefill(**arguments)
    in_layout(layout)(arguments)
    got = prefix_prefill.prefix_prefill(**{**arguments, "out": None})
    torch.testing.assert_close(got.out, wanted.out)


def test_what_must_be_said_of_an_8_bit_cache_names_the_way_out(device) -> None:
    arguments = {**good("prefill", device), "v_scale": None}
    with pytest.raises(
        ValueError, match=r"^v_scale must be given with a cache of torch.float8_e4m3fn \(1.0 if .*None$"
    ):
        prefix_prefill.prefix_prefill(**arguments)
    prefix_prefill.prefix_prefill(**{**arguments, "v_scale": 1.0})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_refuse_gradients_and_say_how_to_go_on(device, function) -> None:
    arguments = good(function, device)
    first = next(name for name, value in arguments.items() if isinstance(value, Tensor))
    arguments[first] = needing_grad(arguments[first])
    with pytest.raises(ValueError, match=rf"^{first} must be without gradient \(call under torch.no_grad\(\)"):
        FUNCTIONS[function](**arguments)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            FUNCTIONS[function](**arguments)


def test_the_most_new_tokens_must_be_said(device) -> None:
    arguments = good("prefill", device)
    del arguments["max_seqlen_q"]
    with pytest.raises(TypeError, match="max_seqlen_q"):
        prefix_prefill.prefix_prefill(**arguments)


@pytest.mark.parametrize("name", ["prefill", "merge"])
def test_the_ops_check_what_reaches_them_by_another_way(device, tensors, name) -> None:
    if name == "merge":
        a, lse = tensors.normal(5, 2, 16), tensors.normal(2, 5)
        with pytest.raises(ValueError, match=r"^lse must be \[2, 5\], got "):
            torch.ops.prefix_prefill.merge(a, lse, a, lse, torch.empty_like(a), lse.T)
        return
    batch = tensors.batch([(20, 5)])
    *numbers, _, most, _, _, _ = batch.numbers()
    for splits, plan, said in ((-1, None, "num_splits"), (2, [16, 16, 1, 4, 1, 0], "num_splits"), (0, [0] * 6, "plan")):
        with pytest.raises(ValueError, match=f"^{said} must be "):
            torch.ops.prefix_prefill.prefill(*batch.tensors, *numbers, splits, most, plan=plan)
    numbers[3] = -2
    with pytest.raises(ValueError, match=r"^window must be "):
        torch.ops.prefix_prefill.prefill(*batch.tensors, *numbers, 0)


def tensor_of(numbers: list[Any]) -> Callable[[Tensor], Tensor]:
    return lambda given: torch.tensor(numbers, dtype=given.dtype, device=given.device).view(given.shape)


# What only device memory tells: the argument, what is wrong, the element named, and what it holds.
VALUES = [
    *[
        (CU_OF, f"{name}{bad}", rf"{{}}\[{place}\]", tensor_of(bad))
        for name, place, bad in (
            ("begins late: ", 0, [1, 2, 2, 5]), ("begins early: ", 0, [-1, 2, 2, 5]), ("falls: ", 2, [0, 3, 2, 5]),
            ("ends past the rows: ", 3, [0, 2, 2, 7]), ("far: ", 3, [0, 2, 2, 2**31 - 1]),
            ("below 0: ", 1, [0, -2, 2, 5]),
        )
    ],
    *[
        (SEQLENS_OF, f"of {bad}", rf"{{}}\[{place}\]", tensor_of(bad))
        for place, bad in (
            (0, [1, 16, 3]), (1, [22, -1, 3]), (2, [22, 16, 2]), (0, [35, 16, 3]), (1, [22, 33, 3]),
            (2, [22, 16, 2**31 - 1]), (0, [-(2**31), 16, 3]),
        )
    ],
    *[
        (TABLE_OF, f"of {bad}", rf"{{}}\[{row}, {column}\]", tensor_of(bad))
        for row, column, bad in (
            (0, 1, [[3, -1], [5, 2], [6, 6]]), (0, 0, [[BLOCKS, 0], [5, 2], [6, 6]]),
            (0, 1, [[0, 2**31 - 1], [5, 2], [6, 6]]),
        )
    ],
    ({"prefill": "draft_mask"}, "below 0", r"{}\[3\]", tensor_of([1, 3, 1, -3, 5, -1])),
    (MOST_OF, "too few", "{}", lambda most: 2),
    (MOST_KEYS_OF, "too few", "{}", lambda most: 21),
    (TABLE_OF, "too narrow", "seqlens", lambda table: table[:, :1]),
]  # fmt: skip


@pytest.mark.parametrize("function", ATTENDING)
@pytest.mark.parametrize(
    ("names", "element", "change"), [pytest.param(names, *rest, id=f"{next(iter(names.values()))} {what}")
                                     for names, what, *rest in VALUES]
)  # fmt: skip
def test_validate_values_names_what_only_device_memory_tells_before_anything_is_written(
    device, function, names, element, change
) -> None:
    if function not in names:
        pytest.skip("an argument that it has not")
    arguments = good(function, device)
    replaced(names[function], change)(arguments)
    before = kept(arguments)
    element = rf"{SEQLENS_OF[function]}\[0\]" if element == "seqlens" else element.format(names[function])
    with validate_values(), pytest.raises(ValueError, match=f"^{element} must be .*, got -?[0-9]+$"):
        FUNCTIONS[function](**arguments)
    assert_kept(before)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=f"^{element} must be "):
            FUNCTIONS[function](**arguments)
        assert_kept(before)
    if names is MOST_OF:
        return
    # Nor does it do harm without the check.
    with validate_values(False):
        out = FUNCTIONS[function](**arguments) or arguments["o"]
    assert bool((out if function == "drop-in" else out.out).isfinite().all())


def test_validate_values_lets_pages_be_that_no_row_reads(device) -> None:
    """Those behind the last key, those wholly before a window, and all of a sequence without new tokens."""
    arguments = good("prefill", device)
    table = arguments["block_table"]
    table[1], table[2] = -1, -1
    with validate_values():
        prefix_prefill.prefix_prefill(**arguments)
        table[0, 0] = -1
        for window in ((3, 0), (4, 0)):
            prefix_prefill.prefix_prefill(**{**arguments, "window": window})
        with pytest.raises(ValueError, match=r"^block_table\[0, 0\] must be a page from 0 to 6, got -1$"):
            prefix_prefill.prefix_prefill(**{**arguments, "window": (5, 0)})
        # Rows that another kernel writes are not read for either.
        changes = {"seqlens_k": tensor_of([21, 16, 4]), "cu_seqlens_q": tensor_of([0, 1, 1, 5])}
        arguments.update({name: change(arguments[name]) for name, change in changes.items()}, max_seqlen_q=4)
        prefix_prefill.prefix_prefill(**{**arguments, "skip_decode": True})


def test_validate_values_takes_new_tokens_that_need_no_room_and_asks_for_it_where_they_do(tensors) -> None:
    batch = tensors.batch([(16, 9), (0, 40)], extra_columns=0)
    assert batch.block_table.shape == (2, 1)
    with validate_values():
        batch.run()
        batch.check()
        q, _, _, *rest = batch.inputs
        with pytest.raises(ValueError, match=r"^seqlens_k\[0\] must be from 9 .* to 16 .*, got 25$"):
            prefix_prefill.prefix_prefill(q, None, None, *rest, **batch.options)
        q, _, _, *rest = tensors.batch([(0, 40), (16, 9)], extra_columns=0).inputs
        wanted = "of columns for at least 40 keys, the new tokens of sequence 0"
        with pytest.raises(ValueError, match=f"^block_table must be {wanted}, got room for 16$"):
            prefix_prefill.prefix_prefill(q, None, None, *rest, **batch.options)


# Without that check such values are clamped.


def far_off(number: int, dtype: torch.dtype) -> int:
    """A bad value that is a good one where only 32 of its 64 bits are looked at; just a bad one in 32 bits."""
    return number + 2**32 if dtype == torch.int64 else -(2**31) + number


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("cached", [False, True], ids=["new keys", "cached"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_sequences_of_impossible_lengths_give_zeros_and_harm_no_other(tensors, dtype, cached, splits) -> None:
    ends = torch.iinfo(dtype)
    lengths = [(20, 5), (7, 3), (0, 4), (30, 1), (9, 2), (33, 6), (3, 1)]
    bad = [25, 2, ends.max, ends.min, far_off(11, dtype), 39, 0]
    batch = tensors.batch(lengths, index_dtype=dtype, cached=cached, rows_after=2, sinks=True)
    batch.seqlens_k.copy_(torch.tensor(bad))
    batch.forget_inputs()
    assert batch.possible == [0, 5]
    batch.run(num_splits=splits)
    batch.check()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("cached", [False, True], ids=["new keys", "cached"])
def test_more_keys_than_the_table_has_columns_for_give_zeros(tensors, cached) -> None:
    batch = tensors.batch([(20, 5), (60, 20), (64, 1), (65, 1)], cached=cached)
    batch.block_table = batch.block_table[:, :4]
    assert batch.possible == ([0] if cached else [0, 1, 2])
    batch.run()
    batch.check()


# cu_seqlens as given for 100 rows and what they are clamped to: a sequence's begin to the rows there are, its end to
# those from its begin on.
BAD_ENDS = {
    "past the end": ([0, 70, 2**31 - 1], [0, 70, 100]),
    "all past the end": ([0, 100, 170, 300], [0, 100, 100, 100]),
    "before the beginning": ([-5, 70, 100], [0, 70, 100]),
    "all before the beginning": ([-(2**31), -7, -1], [0, 0, 0]),
    "late": ([10, 70, 100], [10, 70, 100]),
    "falling at the end": ([0, 100, 30], None),
    "falling in the middle": ([0, 80, 20, 90], None),
    "falling from the end": ([100, 0, 50], None),
    "far past and back": ([0, 2**31 - 1, -(2**31), 100], None),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("ends", "clamped"), BAD_ENDS.values(), ids=BAD_ENDS)
def test_impossible_bounds_are_clamped_and_nothing_outside_is_read_or_written(tensors, ends, clamped, dtype) -> None:
    """Where no row is claimed twice the result is that of the clamped sequences; otherwise nothing else is touched."""
    count = len(ends) - 1
    whole = clamped or [0, 100] + [100] * (count - 1)
    new = [whole[i + 1] - whole[i] for i in range(count)]
    before = whole[0]
    # Rows before the first sequence are those of another, whose result is not looked at.
    lengths = [(30, n) for n in ([before] if before else []) + new]
    batch = tensors.batch(lengths, rows_after=100 - before - sum(new), index_dtype=dtype)
    first = len(lengths) - count
    cu = torch.tensor(ends, dtype=dtype, device=tensors.device)
    if dtype == torch.int64:
        # Far outside 32 bits, and within the rows where only those are looked at.
        far = cu.abs() > 2**30
        cu[far] = cu[far].sign() * 2**32 + 50
    q, k, v, k_cache, v_cache, table, _, seqlens = batch.inputs
    got = prefix_prefill.prefix_prefill(
        q, k, v, k_cache, v_cache, table[first:], cu, seqlens[first:], **batch.options, out=batch.out.tensor,
        return_lse=True,
    )  # fmt: skip
    batch.take_lse(got.lse)
    if clamped is None:
        batch.check_guards(all_written=False)
        return
    if before:
        assert not bool(got.out[:before].any())
        assert bool((got.lse[:, :before] == -torch.inf).all())
        kept = got.out[before:].clone(), got.lse[:, before:].clone()
        batch.run()
        batch.out.tensor[before:], batch.lse.tensor[:, before:] = kept
    batch.check()
