"""Does bad input say which argument, what it must be and what it was, and write nothing? One table.

Then what only device memory tells: named on a CPU and inside ``validate_values``, harmless elsewhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import blocksparse_attn
from blocksparse_attn import AttentionPlan, BlockLayout, LocalStridedBlockSparseAttn
from kernel_reference.checks import validate_values
from kernel_reference.testing.guards import assert_bitwise_equal
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

Tensor = torch.Tensor
# 3 sequences of 2, 0 and 3 of 6 queries, after 20, 16 and 0 older tokens; 4 query heads on 2 kv heads of 32 elements,
# values of 48; pages of 16; a layout of 16 queries and 32 keys a block for 64 tokens.
H, HKV, D, DV, PAGE, BLOCKS, ROWS, KEYS = 4, 2, 32, 48, 16, 7, 6, 41
E4M3 = torch.float8_e4m3fn
FUNCTIONS = {
    "ragged": blocksparse_attn.blocksparse_attention,
    "paged": blocksparse_attn.blocksparse_attention,
    "padded": blocksparse_attn.blocksparse_attention,
    "drop-in": blocksparse_attn.blocksparse_flash_attn_varlen_fwd,
    "pair": blocksparse_attn.blocksparse_flash_attn_varlen_fwd,
}
MODERN = ("ragged", "paged", "padded")
ENGINES = ("drop-in", "pair")
SCALE_OF = dict.fromkeys(MODERN, "softmax_scale") | dict.fromkeys(ENGINES, "sm_scale")
# A plan of nothing but zeros reaches no element.
NO_PLAN = AttentionPlan(*[0] * len(fields(AttentionPlan)))


def lists(device: torch.device) -> tuple[Tensor, Tensor]:
    """All causally visible blocks, for each head."""
    crow = torch.tensor([[0, 1, 2, 4, 6]] * H, dtype=torch.int32, device=device)
    col = torch.tensor([[0, 0, 0, 1, 0, 1, -1]] * H, dtype=torch.int32, device=device)
    return crow, col


def good(function: str, device: torch.device) -> dict[str, Any]:
    """Arguments that are right, and everything optional that goes with the rest given."""

    def make(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(size, device=device).to(dtype)

    def integers(*numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    crow, col = lists(device)
    layout = BlockLayout.from_csr(crow, col, 16, 32)
    rows = {"q": make(ROWS, H, D), "k": make(KEYS, HKV, D), "v": make(KEYS, HKV, DV)}
    bounds = {"cu_seqlens_q": integers(0, 2, 2, 5), "cu_seqlens_k": integers(0, 22, 38, 41)}
    if function in ENGINES:
        given = layout if function == "drop-in" else (crow, col)
        sizes = {"block_size": 32, "q_block_size": 16, "max_seqlen": 22}
        return {**rows, **bounds, "sm_scale": 0.25, "sparse_layout": given, **sizes}
    options = {
        "layout": layout, "softmax_scale": 0.25, "softcap": 3.0, "sinks": torch.rand(H, device=device),
        "window": (30, 0), "return_lse": True, "num_splits": 1,
    }  # fmt: skip
    if function == "padded":
        return {
            "q": make(3, 4, H, D), "k": make(3, 24, HKV, D), "v": make(3, 24, HKV, DV), **options,
            "q_starts": integers(2, 0, 1), "q_ends": integers(4, 0, 4), "k_starts": integers(2, 0, 21),
            "k_ends": integers(24, 16, 24), "out": make(3, 4, H, DV), "max_seqlen_q": 4,
        }  # fmt: skip
    options |= {"out": make(ROWS, H, DV), "max_seqlen_q": 3}
    if function == "ragged":
        return {**rows, **bounds, **options}
    return {
        "q": make(ROWS, H, D), "k": make(BLOCKS, PAGE, HKV, D), "v": make(BLOCKS, PAGE, HKV, DV), **options,
        "cu_seqlens_q": bounds["cu_seqlens_q"], "seqlens_k": integers(22, 16, 3),
        "block_table": integers([3, 0], [5, 2], [6, 6]), "page_layout": "NHD",
    }  # fmt: skip


def of_pair(place: int, change: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    """A pair of lists, one of them changed."""
    return lambda pair: tuple(change(x) if i == place else x for i, x in enumerate(pair))


def sharing(name: str) -> Change:
    """``out`` begins in the last 16 bytes of another argument."""

    def change(arguments: dict[str, Any]) -> None:
        first, out = arguments[name], arguments["out"]
        begin = (first.nbytes - 1) // 16 * 16
        room = torch.zeros(begin + out.nbytes + 16, dtype=torch.uint8, device=first.device)
        arguments[name] = room[: first.nbytes].view(first.dtype).view(first.shape).copy_(first)
        arguments["out"] = room[begin : begin + out.nbytes].view(out.dtype).view(out.shape)

    return change


def with_tangent(name: str) -> Change:
    def change(arguments: dict[str, Any]) -> None:
        arguments[name] = forward_ad.make_dual(arguments[name], torch.ones_like(arguments[name]))

    return change


def longer_than_the_layout(arguments: dict[str, Any]) -> None:
    """The layout has rows for 64 queries, and without bounds all of 65 are a sequence's."""
    arguments |= dict.fromkeys(("q_starts", "q_ends", "k_starts", "k_ends", "max_seqlen_q"))
    for name in ("q", "k", "v", "out"):
        x = arguments[name]
        arguments[name] = torch.zeros(3, 65, *x.shape[2:], dtype=x.dtype, device=x.device)


def with_head_size(*names: str, size: int) -> Change:
    return together(*[replaced(name, lambda x: x[..., :1].repeat(*[1] * (x.ndim - 1), size)) for name in names])


def all_in(dtype: torch.dtype) -> Change:
    def change(arguments: dict[str, Any]) -> None:
        for name in ("q", "k", "v", "out"):
            if name in arguments:
                arguments[name] = arguments[name].to(dtype)

    return change


def layout_of_heads(heads: int) -> Callable[[BlockLayout], BlockLayout]:
    def change(layout: BlockLayout) -> BlockLayout:
        crow, col = (x[:1].repeat(heads, 1) for x in (layout.crow, layout.col))
        return BlockLayout(crow, col, 16, 32, 2)

    return change


one_head_less = lambda tensor: tensor[..., :-1, :]  # noqa: E731
two_ranks_more = lambda tensor: tensor[None, None]  # noqa: E731
in_int16 = lambda tensor: tensor.short()  # noqa: E731
as_float = lambda tensor: tensor.float()  # noqa: E731
as_int = lambda tensor: tensor.int()  # noqa: E731
expanded = lambda tensor: tensor[:1].expand_as(tensor)  # noqa: E731
no_elements = lambda tensor: tensor[..., :0]  # noqa: E731

V, T = ValueError, TypeError
NO_TENSOR = (("not a tensor", T, as_list), ("None", T, None), ("sparse", T, sparse))
WRONG_TENSOR = (("not a tensor", T, as_list), ("sparse", T, sparse), ("a number", T, 3))
LENGTHS = {
    "ragged": ("cu_seqlens_q", "cu_seqlens_k"), "paged": ("cu_seqlens_q", "seqlens_k"),
    "padded": ("q_starts", "q_ends", "k_starts", "k_ends"), "drop-in": ("cu_seqlens_q", "cu_seqlens_k"),
    "pair": ("cu_seqlens_q",),
}  # fmt: skip
# Function, what is wrong, the error, the argument it must name, the change that makes it wrong.
TABLE = [
    *[
        (function, f"q: {what}", error, "q", replaced("q", change))
        for function in FUNCTIONS
        for what, error, change in (
            *NO_TENSOR, ("rank", V, two_ranks_more), ("float64", T, in_double), ("integers", T, as_int),
            ("8 bits", T, lambda q: q.to(E4M3)), ("heads that kv heads do not divide", V, lambda q: q[..., :3, :]),
            ("no heads", V, lambda q: q[..., :0, :]),
        )
    ],
    *[
        (function, "q of nothing", V, "q", together(replaced("q", no_elements), replaced(SCALE_OF[function], None)))
        for function in FUNCTIONS
    ],
    *[(function, "v: no dimensions", V, "v", replaced("v", lambda v: v.new_zeros(()))) for function in FUNCTIONS],
    *[
        (function, f"{name}: {what}", error, name, replaced(name, change))
        for function in FUNCTIONS
        for name in ("k", "v")
        for what, error, change in (
            *NO_TENSOR, ("rank", V, one_rank_more), ("another dtype", T, in_half),
            ("8 bits", T, lambda x: x.to(E4M3)), ("another device", V, elsewhere),
        )
    ],
    *[
        (function, f"{what} of {name}", V, name, replaced(name, change))
        for function in FUNCTIONS
        for name, what, change in (
            ("k", "another head size", one_wider), ("v", "fewer rows", one_less), ("v", "other heads", one_head_less),
        )
    ],
    *[
        (function, f"q and k of {size} elements", V, "q", with_head_size("q", "k", size=size))
        for function in FUNCTIONS
        for size in (0, 1, 15, 257, 512)
    ],
    *[
        (function, f"v of {size} elements", V, "v", with_head_size("v", "out", size=size))
        for function in MODERN
        for size in (0, 15, 257)
    ],
    *[(function, "all in float64", T, "q", all_in(torch.float64)) for function in FUNCTIONS],
    ("ragged", "no kv heads", V, "k", together(*[replaced(name, lambda x: x[:, :0]) for name in "kv"])),
    ("padded", "k of other sequences", V, "k", together(*[replaced(name, one_less) for name in "kv"])),
    # A kind of batch takes the bounds of its own kind alone.
    ("ragged", "padded queries", V, "cu_seqlens_q", together(*[replaced(name, one_rank_more) for name in "qkv"])),
    ("padded", "rows of queries", V, "q_starts", replaced("q", lambda q: q[0])),
    *[
        (function, f"{name} that does not belong here", V, name, replaced(name, torch.zeros(4, dtype=torch.int32)))
        for function, names in (
            ("ragged", ("seqlens_k", "q_starts", "q_ends", "k_starts", "k_ends")),
            ("paged", ("cu_seqlens_k", "q_starts", "q_ends", "k_starts", "k_ends")),
            ("padded", ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "block_table")),
        )
        for name in names
    ],
    *[
        (function, f"{name} missing", V, name, replaced(name, None))
        for function in ("ragged", "paged")
        for name in (*LENGTHS[function], "max_seqlen_q")
    ],
    ("paged", "block_table missing", V, "k", replaced("block_table", None)),
    *[("drop-in", "cu_seqlens_k None", T, "cu_seqlens_k", replaced("cu_seqlens_k", None))],
    *[
        (function, f"{name}: {what}", error, name, replaced(name, change))
        for function, names in LENGTHS.items()
        for name in names
        for what, error, change in (
            *WRONG_TENSOR, ("int16", T, in_int16), ("floats", T, as_float), ("rank", V, one_rank_more),
            ("one too few", V, one_less), ("not contiguous", V, every_second), ("another device", V, elsewhere),
            ("none", V, lambda x: x[:0]),
        )
    ],
    *[
        ("paged", f"block_table: {what}", error, "block_table", replaced("block_table", change))
        for what, error, change in (
            *WRONG_TENSOR, ("int16", T, in_int16), ("rank", V, one_rank_more), ("a sequence too few", V, one_less),
            ("not contiguous", V, every_second), ("another device", V, elsewhere),
        )
    ],
    *[
        ("paged", f"page_layout {value!r}", error, "page_layout", replaced("page_layout", value))
        for value, error in (("nhd", V), ("", V), ("BHSD", V), (None, T), (3, T), (["NHD"], T))
    ],
    ("paged", "pages of 16 heads, as another layout has them", V, "q", replaced("page_layout", "HND")),
    ("paged", "4-D keys said to be x-packed", V, "k", replaced("page_layout", "x-packed")),
    ("paged", "pages of no tokens", V, "k", together(*[replaced(name, lambda x: x[:, :0]) for name in "kv"])),
    ("paged", "v of smaller pages", V, "v", replaced("v", lambda x: x[:, :-1])),
    *[
        (function, f"max_seqlen_q {value!r}", error, "max_seqlen_q", replaced("max_seqlen_q", value))
        for function in MODERN
        for value, error in ((-1, V), (2.5, T), ("3", T), (True, T), (65, V), (2**31, V))
    ],
    ("padded", "more rows than the layout has", V, "max_seqlen_q", longer_than_the_layout),
    *[
        (function, f"max_seqlen {value!r}", error, "max_seqlen", replaced("max_seqlen", value))
        for function in ENGINES
        for value, error in ((-1, V), (2.5, T), ("3", T), (65, V), (2**31, V))
    ],
    *[
        (function, f"{SCALE_OF[function]} {value!r}", error, SCALE_OF[function], replaced(SCALE_OF[function], value))
        for function in FUNCTIONS
        for value, error in (("1", T), ([1.0], T), (math.nan, V), (math.inf, V), (torch.ones(1), T), (False, T))
    ],
    *[
        ("ragged", f"softcap {value!r}", error, "softcap", replaced("softcap", value))
        for value, error in ((-1.0, V), (math.nan, V), (math.inf, V), ("1", T), (None, T), (torch.ones(1), T))
    ],
    *[
        ("ragged", f"window {value!r}", error, "window", replaced("window", value))
        for value, error in (
            ((-2, 0), V), ((0, -2), V), ((-(2**40), 0), V), (3, T), ((3,), T), ((3, 0, 0), T), ((1.5, 0), T),
            (("3", 0), T), ("30", T), ((None, 0), T), ((True, 0), T),
        )
    ],
    *[
        (function, f"sinks: {what}", error, "sinks", replaced("sinks", change))
        for function in MODERN
        for what, error, change in (
            *WRONG_TENSOR, ("one too few", V, one_less), ("rank", V, one_rank_more), ("float64", T, in_double),
            ("integers", T, as_int), ("not contiguous", V, every_second), ("another device", V, elsewhere),
            ("of kv heads", V, lambda x: x[:HKV]),
        )
    ],
    *[
        (function, f"out: {what}", error, "out", replaced("out", change))
        for function in MODERN
        for what, error, change in (
            ("another head size", V, one_wider), ("fewer rows", V, one_less), ("rank", V, one_rank_more),
            ("overlapping rows", V, overlapping), ("expanded", V, expanded), ("another device", V, elsewhere),
            ("sparse", T, sparse), ("not a tensor", T, as_list), ("another dtype", T, in_half),
        )
    ],
    *[
        (function, f"out in the memory of {name}", V, "out", sharing(name))
        for function in MODERN
        for name in ("q", "k", "v", "sinks", *LENGTHS[function], *(["block_table"] if function == "paged" else []))
    ],
    *[
        (function, f"{name}: an array of NumPy", T, name, replaced(name, lambda x: x.float().cpu().numpy()))
        for function in FUNCTIONS
        for name in ("q", "k", "v", *LENGTHS[function])
    ],
    *[
        (function, f"{name} with a tangent", V, name, with_tangent(name))
        for function in FUNCTIONS
        for name in ("q", "k", "v", *(["sinks", "out"] if function in MODERN else []))
    ],
    *[
        (function, f"layout: {what}", error, "layout", replaced("layout", change))
        for function in MODERN
        for what, error, change in (
            ("None", T, None), ("lists", T, lambda x: (x.crow, x.col)), ("a tensor", T, lambda x: x.crow),
            ("of two heads", V, layout_of_heads(2)), ("of more heads", V, layout_of_heads(8)),
            ("elsewhere", V, lambda x: x.to("meta" if x.device.type == "cpu" else "cpu")),
        )
    ],
    *[
        ("drop-in", f"sparse_layout: {what}", error, "sparse_layout", replaced("sparse_layout", change))
        for what, error, change in (
            ("None", T, None), ("a tensor", T, lambda x: x.crow), ("three", T, lambda x: (x.crow, x.col, x.col)),
            ("of two heads", V, layout_of_heads(2)),
            ("elsewhere", V, lambda x: x.to("meta" if x.device.type == "cpu" else "cpu")),
        )
    ],
    *[
        ("pair", f"{name} of the pair: {what}", error, "sparse_layout", replaced("sparse_layout", of_pair(i, change)))
        for i, name in enumerate(("crow", "col"))
        for what, error, change in (
            ("not a tensor", T, as_list), ("None", T, lambda x: None), ("sparse", T, sparse), ("int16", T, in_int16),
            ("floats", T, as_float), ("rank", V, lambda x: x[0]), ("of other heads", V, one_less),
            ("not contiguous", V, every_second), ("another device", V, elsewhere), ("no heads", V, lambda x: x[:0]),
        )
    ],
    ("pair", "a pair without rows", V, "sparse_layout", replaced("sparse_layout", of_pair(0, lambda x: x[:, :0]))),
    ("pair", "a pair of two heads", V, "sparse_layout", replaced("sparse_layout", lambda p: (p[0][:2], p[1][:2]))),
    *[
        (function, f"{name} {value!r}", error, name, replaced(name, value))
        for function, name, value, error in (
            *[(function, name, value, error) for function in ENGINES for name in ("block_size", "q_block_size")
              for value, error in ((0, V), (-16, V), (16.0, T), ("16", T), (True, T))],
            *[(function, "q_block_size", 48, V) for function in ENGINES],
            *[("pair", name, value, V) for name in ("block_size", "q_block_size") for value in (8, 24, 1)],
            ("drop-in", "block_size", 16, V), ("drop-in", "block_size", 64, V), ("drop-in", "q_block_size", 64, V),
        )
    ],
    ("drop-in", "no cu_seqlens_q for these rows", V, "cu_seqlens_q", replaced("cu_seqlens_q", None)),
    *[
        ("ragged", f"return_lse {value!r}", T, "return_lse", replaced("return_lse", value))
        for value in (None, 1, "yes")
    ],
    *[
        ("ragged", f"num_splits {value!r}", error, "num_splits", replaced("num_splits", value))
        for value, error in ((0, V), (-1, V), (1.5, T), ("2", T), (True, T))
    ],
    ("ragged", "num_splits beside a plan", V, "num_splits", replaced("plan", AttentionPlan(16, 16, 1, 4, 1))),
    *[
        ("ragged", f"plan: {what}", error, "plan", together(replaced("num_splits", None), replaced("plan", value)))
        for what, error, value in (
            ("a name", T, "fast"), ("numbers", T, [16, 16, 1, 4, 1]), ("that reaches nothing", V, NO_PLAN),
            ("of no power of two", V, AttentionPlan(48, 16, 1, 4, 1)),
            ("of no stages", V, AttentionPlan(16, 16, 1, 4, 0)),
        )
    ],
    *[
        (function, f"{name} needs a gradient", V, name, replaced(name, needing_grad))
        for function in FUNCTIONS
        for name in ("q", "k", "v", *(("out", "sinks") if function in MODERN else ()))
    ],
]  # fmt: skip


# What torch says of itself where tangents are first made.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize(
    ("function", "error", "name", "change"),
    [pytest.param(function, *rest, id=f"{function}-{what}") for function, what, *rest in TABLE],
)
def test_bad_input_is_named_with_what_it_must_be_and_what_it_was_and_nothing_is_written(
    device, function, error, name, change
) -> None:
    arguments = good(function, device)
    before = kept(arguments)
    with forward_ad.dual_level():
        change(arguments)
        before += kept(arguments)
        with refused(error, name):
            FUNCTIONS[function](**arguments)
    assert_kept(before)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_right_arguments_of_the_table_are_taken(device, function) -> None:
    FUNCTIONS[function](**good(function, device))
    numpys = {name: np.int64(x) if type(x) is int else x for name, x in good(function, device).items()}
    with validate_values():
        FUNCTIONS[function](**numpys)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_refuse_gradients_and_say_how_to_go_on(device, function) -> None:
    arguments = good(function, device)
    arguments["q"] = needing_grad(arguments["q"])
    with pytest.raises(ValueError, match=r"^q must be without gradient \(call under torch.no_grad\(\)"):
        FUNCTIONS[function](**arguments)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            FUNCTIONS[function](**arguments)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_refuse_transforms_by_name(device, function) -> None:
    """Forward-mode derivatives would be zeros, and torch's own error for vmap speaks of a fallback path."""
    arguments = good(function, device)
    names = [name for name in ("q", "k", "v", "out") if name in arguments]
    arguments |= {name: arguments[name].float() for name in names}
    q, func = arguments["q"], torch.func

    def attend(q: Tensor) -> Tensor:
        got = FUNCTIONS[function](**{**arguments, "q": q})
        return got if isinstance(got, Tensor) else got.out

    batch = torch.stack([q, q])
    for transformed, said in (
        (lambda: func.jvp(attend, (q,), (q,)), "without a tangent"),
        # Compiled code would drop the tangent, and give 0.
        (lambda: torch.compile(lambda q: func.jvp(attend, (q,), (q,)), backend="aot_eager")(q), "without a tangent"),
        (lambda: func.jvp(torch.compile(attend, backend="aot_eager"), (q,), (q,)), "without a tangent"),
        (lambda: func.jacfwd(attend)(q), "without a tangent"),
        (lambda: func.grad(lambda q: attend(q).sum())(q), "without gradient"),
        (lambda: func.vmap(func.grad(lambda q: attend(q).sum()))(batch), "without gradient"),
        (lambda: func.vmap(attend)(batch), "outside torch.vmap"),
    ):
        with pytest.raises(ValueError, match=rf"^q must be {said}.*, got "):
            transformed()
    # What is derived or batched may be something else.
    scaled = func.vmap(lambda scale: attend(q) * scale)(torch.ones(2, device=device))
    assert_bitwise_equal(scaled[1], attend(q))


def test_lse_that_shares_memory_with_another_argument_is_refused_by_the_op(tensors) -> None:
    batch = tensors.batch([(20, 5)], dtype=torch.float32, head_dim_v=64)
    given = list(batch.tensors)
    for said, other in (("out must be .* with lse", batch.out.tensor), ("lse must be .* with q", batch.q)):
        given[15] = other[:4, 0, :5]
        with pytest.raises(ValueError, match=f"^{said}, got "):
            torch.ops.blocksparse_attn.attend(*given, *batch.numbers())


def nhd(cache: Tensor) -> Tensor:
    return cache


def hnd(cache: Tensor) -> Tensor:
    return cache.transpose(1, 2).contiguous()


CACHES = {
    "NHD": (nhd, nhd),
    "HND": (hnd, hnd),
    "x-packed": (
        lambda cache: cache.unflatten(3, (-1, 8)).permute(0, 2, 3, 1, 4).contiguous(),
        lambda cache: cache.permute(0, 2, 3, 1).contiguous(),
    ),
}


@pytest.mark.parametrize(("given", "said"), [*permutations(CACHES, 2)])
def test_a_cache_in_another_page_layout_is_named_with_the_one_it_fits(device, given, said) -> None:
    arguments = {**good("paged", device), "page_layout": said}
    for name, lay_out in zip("kv", CACHES[given], strict=True):
        arguments[name] = lay_out(arguments[name])
    with pytest.raises(ValueError, match=rf"^[qkv] must be .*, got .*, which fits page_layout '{given}'$"):
        FUNCTIONS["paged"](**arguments)


def test_rows_of_queries_that_are_neither_of_decoding_nor_as_many_as_keys_need_bounds_and_say_why(device) -> None:
    arguments = {**good("drop-in", device), "cu_seqlens_q": None}
    wanted = (
        r"^cu_seqlens_q must be given unless q has one row a sequence \(3\) or as many as k \(41\), got None with 6"
    )
    with pytest.raises(ValueError, match=wanted):
        FUNCTIONS["drop-in"](**arguments)


def test_the_op_checks_direct_calls(tensors) -> None:
    for kind in ("ragged", "paged", "padded"):
        batch = tensors.batch([(20, 5)], kind=kind)
        *numbers, _ = batch.numbers()
        for splits, plan, said in (
            (-1, None, "num_splits"), (2, [16, 16, 1, 4, 1], "num_splits"), (0, [0] * 5, "plan"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=f"^{said} must be "):
                torch.ops.blocksparse_attn.attend(*batch.tensors, *numbers, splits, False, plan)
        for place, value, said in ((1, 24, "q_block"), (2, 8, "k_block"), (5, -2, "window"), (3, "nhd", "page_layout")):
            changed = [value if i == place else number for i, number in enumerate(numbers)]
            with pytest.raises(ValueError, match=f"^{said} must be "):
                torch.ops.blocksparse_attn.attend(*batch.tensors, *changed, 0)
        wrong = [x.flip(0)[:0] if i == 15 else x for i, x in enumerate(batch.tensors)]
        with pytest.raises(ValueError, match=r"^lse must be "):
            torch.ops.blocksparse_attn.attend(*wrong, *numbers, 0)


# Layouts and the module

MASK = torch.ones(2, 4, 4, dtype=torch.bool)
CROW = torch.tensor([[0, 1, 2], [0, 1, 3]], dtype=torch.int32)
COL = torch.tensor([[0, 1, -1], [0, 0, 1]], dtype=torch.int32)
BUILDERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "from_mask": (BlockLayout.from_mask, {"mask": MASK, "q_block": 16, "k_block": 32}),
    "from_scores": (
        BlockLayout.from_scores,
        {"scores": MASK[:, :, :2].float(), "topk": 1, "q_block": 16, "k_block": 32},
    ),
    "from_csr": (BlockLayout.from_csr, {"crow": CROW, "col": COL, "q_block": 16, "k_block": 16, "columns": 2}),
    "constructor": (BlockLayout, {"crow": CROW, "col": COL, "q_block": 16, "k_block": 16, "columns": 2}),
    "local_strided": (
        BlockLayout.local_strided,
        {"num_heads": 4, "max_seqlen": 100, "local_blocks": 2, "vert_stride": 4, "block_size": 16},
    ),
    "sliding": (BlockLayout.sliding, {"max_seqlen": 100, "window_blocks": 2, "block_size": 16}),
    "module": (
        LocalStridedBlockSparseAttn,
        {"n_heads": 4, "max_seqlen": 100, "local_blocks": 2, "vert_stride": 4, "block_size": 16},
    ),
}
BUILDERS["from_mask"][1]["mask"] = MASK[:, :, :2]
NO_INT = ((16.0, T), ("16", T), (None, T), (True, T))
BUILDING = [
    *[
        (builder, name, value, error)
        for builder in ("from_mask", "from_csr", "constructor")
        for name in ("q_block", "k_block")
        for value, error in (*NO_INT, (0, V), (-16, V), (8, V), (24, V))
    ],
    *[
        ("from_mask", "mask", value, error)
        for value, error in (
            (MASK.int(), T), (MASK[0], V), (MASK[:0], V), (MASK.tolist(), T), (None, T), (MASK.float().to_sparse(), T),
            (MASK[:, :3], V), (MASK, V),
        )
    ],
    ("from_scores", "scores", MASK.float(), V),
    *[
        (builder, name, change(value), error)
        for builder in ("from_csr", "constructor")
        for name, value in (("crow", CROW), ("col", COL))
        for change, error in (
            (as_list, T), (lambda x: None, T), (as_float, T), (in_int16, T), (lambda x: x[0], V), (lambda x: x[:0], V),
            (every_second, V), (lambda x: x.to_sparse(), T),
        )
    ],
    ("from_csr", "col", COL[:1], V), ("from_csr", "crow", CROW[:, :0], V),
    ("from_csr", "col", COL.to("meta"), V),
    *[
        (builder, "columns", value, error)
        for builder in ("from_csr", "constructor")
        for value, error in ((3, V), (-1, V), (2.0, T), ("2", T), (True, T))
    ],
    ("constructor", "columns", None, T),
    *[
        (builder, name, value, error)
        for builder in ("local_strided", "module")
        for name in ("max_seqlen", "local_blocks", "vert_stride", "block_size")
        for value, error in (*NO_INT, (0, V), (-1, V))
    ],
    *[
        (builder, name, value, error)
        for builder in ("local_strided", "module")
        for name, values in {
            "block_size": ((8, V), (24, V)), "q_block_size": ((8, V), (24, V), (0, V), (1.5, T), ("16", T)),
            "homo_head": ((None, T), (1, T)),
            "active_head_range": (
                ((0, 5), V), ((-1, 2), V), ((2, 2), V), ((3, 1), V), ((0, 1, 2), T), (3, T), ((0.0, 2), T), ("02", T),
                ((None, 2), T), ((True, 2), T),
            ),
        }.items()
        for value, error in values
    ],
    ("local_strided", "max_seqlen", 2**40, V), ("local_strided", "vert_stride", 2**70, V),
    *[("local_strided", "num_heads", value, error) for value, error in (*NO_INT, (0, V), (-1, V))],
    *[("module", "n_heads", value, error) for value, error in (*NO_INT, (0, V), (-1, V))],
    *[
        ("sliding", name, value, error)
        for name in ("max_seqlen", "window_blocks", "block_size")
        for value, error in (*NO_INT, (0, V), (-1, V))
    ],
]  # fmt: skip


def named(value: object) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)


@pytest.mark.parametrize(
    ("builder", "name", "value", "error"),
    [pytest.param(*one, id=f"{one[0]}-{one[1]} {named(one[2])}") for one in BUILDING],
)
def test_builders_name_what_is_wrong(builder, name, value, error) -> None:
    build, given = BUILDERS[builder]
    build(**given)
    with pytest.raises((ValueError, TypeError)) as raised:
        build(**{**given, name: value})
    said, _, was = str(raised.value).partition(" must be ")
    assert name in re.findall(r"\w+", said), raised.value
    assert ", got " in was, raised.value
    assert type(raised.value) is error, raised.value


@pytest.mark.parametrize(("q_block", "k_block"), [(48, 32), (32, 48), (80, 64)])
def test_blocks_of_which_neither_divides_the_other_are_refused(device, q_block, k_block) -> None:
    wanted = rf"^{{}} must be a multiple or a divisor of {{}} = {k_block}, got {q_block}$"
    mask = torch.zeros(1, 1, 1, dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match=wanted.format("q_block", "k_block")):
        BlockLayout.from_mask(mask, q_block, k_block)
    with pytest.raises(ValueError, match=wanted.format("q_block_size", "block_size")):
        BlockLayout.local_strided(2, 100, 1, 2, k_block, device=device, q_block_size=q_block)
    arguments = {**good("pair", device), "block_size": k_block, "q_block_size": q_block}
    with pytest.raises(ValueError, match=wanted.format("q_block_size", "block_size")):
        FUNCTIONS["pair"](**arguments)


def test_layouts_that_do_not_go_together_are_refused(device) -> None:
    made = BlockLayout.from_mask(MASK.to(device), 16, 16)
    for other, error in (
        (MASK, T), (None, T), (BlockLayout.from_mask(MASK.to(device), 32, 16), V),
        (BlockLayout.from_mask(MASK.to(device), 32, 32), V), (made.to("meta"), V),
        (BlockLayout.from_mask(MASK[:1].repeat(3, 1, 1).to(device), 16, 16), V),
    ):  # fmt: skip
        with pytest.raises(error, match=r"^other must be .*, got "):
            made.union(other)
    for lo, hi, error in ((0, 3, V), (-1, 1, V), (1, 1, V), (0.0, 1, T), (0, None, T)):
        with pytest.raises(error, match=r"^lo, hi must be .*, got "):
            made.heads(lo, hi)
    for head, error in ((2, V), (-1, V), ("0", T), (None, T)):
        with pytest.raises(error, match=r"^head must be .*, got "):
            made.plot(head=head)
    for most, error in ((0, V), ("all", T)):
        with pytest.raises(error, match=r"^max_seqlen must be .*, got "):
            made.plot(max_seqlen=most)


# Invalid lists, and what the error says.
FAULTS = {
    "begins late": ([[0, 1, 2], [1, 1, 3]], None, r"crow\[1, 0\] must be 0, got 1"),
    "falls": ([[0, 2, 1], [0, 1, 3]], None, r"crow\[0, 2\] must be from crow\[0, 1\] = 2 to 3 \(.*\), got 1"),
    "past the end": ([[0, 1, 2], [0, 1, 4]], None, r"crow\[1, 2\] must be from crow\[1, 1\] = 1 to 3 .*, got 4"),
    "far": ([[0, 1, 2**31 - 1], [0, 1, 3]], None, r"crow\[0, 2\] must be from .*, got 2147483647"),
    "below 0": ([[0, -1, 2], [0, 1, 3]], None, r"crow\[0, 1\] must be from .*, got -1"),
    "a column too far": (None, [[0, 2, -1], [0, 0, 1]], r"col\[0, 1\] must be a block of keys from 0 to 1, got 2"),
    "a column below 0": (None, [[0, 1, -1], [-1, 0, 1]], r"col\[1, 0\] must be a block of keys from 0 to 1, got -1"),
    "a column far off": (None, [[0, 1, -1], [0, 0, 2**31 - 1]], r"col\[1, 2\] must be a block .*, got 2147483647"),
    "out of order": (None, [[0, 1, -1], [0, 1, 0]], r"col\[1, 2\] must be above 1, the one before it in row 1, got 0"),
    "twice": (None, [[0, 1, -1], [0, 1, 1]], r"col\[1, 2\] must be above 1, the one before it in row 1, got 1"),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("crow", "col", "said"), FAULTS.values(), ids=FAULTS)
def test_trap_invalid_lists_are_refused_when_a_layout_is_built_and_the_entry_named(
    device, crow, col, said, dtype
) -> None:
    crow = torch.tensor(crow, dtype=dtype) if crow else CROW.to(dtype)
    col = torch.tensor(col, dtype=dtype) if col else COL.to(dtype)
    for columns in (2, None):
        with pytest.raises(ValueError, match=f"^{said}$"):
            BlockLayout.from_csr(crow.to(device), col.to(device), 16, 16, columns=columns)


def test_lists_of_int64_are_validated_before_conversion(device) -> None:
    for name, place, far in (("crow", (1, 2), 2**32 + 3), ("col", (0, 0), 2**32)):
        given = {"crow": CROW.long(), "col": COL.long()}
        given[name][place] = far
        with pytest.raises(ValueError, match=rf"^{name}\[{place[0]}, {place[1]}\] must be .*, got {far}$"):
            BlockLayout.from_csr(given["crow"].to(device), given["col"].to(device), 16, 16)


@pytest.mark.parametrize("kind", ["ragged", "paged", "padded"])
@pytest.mark.parametrize(("crow", "col", "said"), FAULTS.values(), ids=FAULTS)
def test_invalid_lists_are_named_inside_validate_values_and_harmless_outside(tensors, crow, col, said, kind) -> None:
    """Rows of impossible bounds and columns out of bounds list nothing; nothing else changes."""
    crow = torch.tensor(crow, dtype=torch.int32) if crow else CROW
    col = torch.tensor(col, dtype=torch.int32) if col else COL
    mask = BlockLayout(CROW, COL, 16, 16, 2).to_mask()
    for head in range(2):
        for row in range(2):
            begin, end = crow[head, row : row + 2].tolist()
            there = 0 <= begin <= end <= 3
            mask[head, row] = False
            mask[head, row, [c for c in (col[head, begin:end].tolist() if there else []) if 0 <= c < 2]] = True
    batch = tensors.batch([(10, 20), (0, 32), (30, 1)], mask=mask, heads=(2, 1), kind=kind)
    made = BlockLayout(crow.to(tensors.device), col.to(tensors.device), 16, 16, 2)
    renamed = re.sub(r"(crow|col)(?=\\\[| is|\))", r"layout.\1", said)
    with checked_values(tensors.device), pytest.raises(ValueError, match=f"^{renamed}$"):
        batch.run(made)
    batch.check_guards(all_written=False)
    if said.startswith(r"col\[1, 2\] must be above 1") and col[1, 2] == 1:
        # A column listed twice would count twice; kernels do not check that.
        return
    with validate_values(False):
        batch.run(made)
    batch.check()


def checked_values(device: torch.device) -> AbstractContextManager[None]:
    """Where values are checked: on a CPU by default, on a GPU where that is asked for."""
    return nullcontext() if device.type == "cpu" else validate_values()


clamping = pytest.mark.usefixtures("unchecked")


# What only device memory tells: the kind of batch, the argument, what is wrong with it, the element named.


def tensor_of(numbers: list[Any]) -> Callable[[Tensor], Tensor]:
    return lambda given: torch.tensor(numbers, dtype=given.dtype, device=given.device).view(given.shape)


VALUES = [
    *[
        (function, "cu_seqlens_q", rf"cu_seqlens_q\[{place}\]", bad)
        for function in ("ragged", "paged", "drop-in", "pair")
        for place, bad in (
            (0, [1, 2, 2, 5]), (0, [-1, 2, 2, 5]), (2, [0, 3, 2, 5]), (3, [0, 2, 2, 7]), (3, [0, 2, 2, 2**31 - 1]),
            (1, [0, -2, 2, 5]),
        )
    ],
    *[
        (function, "cu_seqlens_k", rf"cu_seqlens_k\[{place}\]", bad)
        for function in ("ragged", "drop-in", "pair")
        for place, bad in (
            (0, [1, 22, 38, 41]), (2, [0, 22, 21, 41]), (3, [0, 22, 38, 42]), (3, [0, 22, 38, 2**31 - 1]),
            (1, [0, 1, 38, 41]), (3, [0, 22, 40, 41]),
        )
    ],
    *[
        ("paged", "seqlens_k", rf"seqlens_k\[{place}\]", bad)
        for place, bad in (
            (0, [1, 16, 3]), (1, [22, -1, 3]), (2, [22, 16, 2]), (0, [33, 16, 3]), (2, [22, 16, 2**31 - 1]),
            (0, [-(2**31), 16, 3]),
        )
    ],
    *[
        ("paged", "block_table", rf"block_table\[{row}, {column}\]", bad)
        for row, column, bad in (
            (0, 1, [[3, -1], [5, 2], [6, 6]]), (0, 0, [[BLOCKS, 0], [5, 2], [6, 6]]),
            (0, 1, [[0, 2**31 - 1], [5, 2], [6, 6]]), (2, 0, [[0, 1], [5, 2], [-(2**31), 6]]),
        )
    ],
    *[
        ("padded", name, rf"{element}\[{place}\]", bad)
        for name, element, place, bad in (
            ("q_starts", "q_starts", 0, [-1, 0, 1]), ("q_starts", "q_starts", 2, [2, 0, 5]),
            ("q_ends", "q_ends", 0, [5, 0, 4]), ("q_ends", "q_ends", 2, [4, 0, 0]),
            ("q_starts", "q_ends", 1, [2, 1, 1]),
            ("k_starts", "k_starts", 1, [2, -3, 21]), ("k_ends", "k_ends", 2, [24, 16, 25]),
            ("k_starts", "k_ends", 0, [23, 0, 21]), ("k_ends", "k_ends", 1, [24, -1, 24]),
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "name", "element", "bad"),
    [pytest.param(*one, id=f"{one[0]} {one[1]} {one[3]}") for one in VALUES],
)
def test_validate_values_names_what_only_device_memory_tells_before_anything_is_written(
    device, function, name, element, bad
) -> None:
    arguments = good(function, device)
    replaced(name, tensor_of(bad))(arguments)
    before = kept(arguments)
    with checked_values(device), pytest.raises(ValueError, match=f"^{element} must be .*, got "):
        FUNCTIONS[function](**arguments)
    assert_kept(before)
    # Harmless without the check, too.
    with validate_values(False):
        got = FUNCTIONS[function](**arguments)
    assert bool((got if isinstance(got, Tensor) else got.out).isfinite().all())


@pytest.mark.parametrize(("function", "name"), [*[(f, "max_seqlen_q") for f in MODERN], ("pair", "max_seqlen")])
def test_validate_values_names_a_bound_that_is_too_small(device, function, name) -> None:
    arguments = {**good(function, device), name: 2}
    with (
        checked_values(device),
        pytest.raises(ValueError, match=f"^{name} must be at least 3, the queries of .* 2, got 2$"),
    ):
        FUNCTIONS[function](**arguments)


def test_validate_values_names_a_sequence_that_is_longer_than_its_layout_and_its_tail_sees_nothing(tensors) -> None:
    """80 tokens under a layout for 64: queries past its rows see nothing, not what the last row lists."""
    mask = torch.ones(4, 4, 4, dtype=torch.bool)
    for kind, said in (("ragged", r"cu_seqlens_k\[2\]"), ("paged", r"seqlens_k\[1\]"), ("padded", r"k_ends\[1\]")):
        batch = tensors.batch([(20, 5), (40, 40), (64, 0)], kind=kind, mask=mask)
        wanted = f"^{said} must be such that the sequence has at most 64 keys, as its layout has rows for, got 80$"
        with checked_values(tensors.device), pytest.raises(ValueError, match=wanted):
            batch.run()
        with validate_values(False):
            batch.run()
        batch.check(most=80)
        out, _ = batch.packed(batch.out.tensor)
        assert not bool(out[5 + 24 : 45].any())
        assert bool(out[5 : 5 + 24].any())


def test_validate_values_lets_pages_be_that_no_row_reads(device) -> None:
    """Those past the last key, those wholly before a window, and all of a sequence without queries."""
    arguments = good("paged", device)
    table = arguments["block_table"]
    table[1] = -1
    table[2, 1] = -1
    with validate_values():
        FUNCTIONS["paged"](**arguments)
        table[0, 0] = -1
        for window in ((3, 0), (4, 0)):
            FUNCTIONS["paged"](**{**arguments, "window": window})
        with pytest.raises(ValueError, match=r"^block_table\[0, 0\] must be a page from 0 to 6, got -1$"):
            FUNCTIONS["paged"](**{**arguments, "window": (5, 0)})


# Without that check such values are clamped.


def far_off(number: int, dtype: torch.dtype) -> int:
    """A bad value whose low 32 of 64 bits are a good one; for 32 bits just a bad one."""
    return number + 2**32 if dtype == torch.int64 else -(2**31) + number


@clamping
@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_sequences_of_impossible_lengths_give_zeros_and_leave_others_alone(tensors, dtype, splits) -> None:
    ends = torch.iinfo(dtype)
    lengths = [(20, 5), (7, 3), (0, 4), (30, 1), (9, 2), (33, 6), (3, 1)]
    bad = [25, 2, ends.max, ends.min, far_off(11, dtype), 39, 0]
    batch = tensors.batch(lengths, kind="paged", index_dtype=dtype, rows_after=2, sinks=True)
    batch.positional["seqlens_k"].copy_(torch.tensor(bad))
    batch.dead = {1, 2, 3, 4, 6}
    batch.forget_inputs()
    batch.run(num_splits=splits)
    batch.check()


@clamping
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_impossible_bounds_of_keys_give_zeros_and_leave_other_sequences_alone(tensors, dtype) -> None:
    lengths = [(20, 5), (7, 3), (0, 4), (9, 2)]
    for place, bad, dead in (
        (1, -1, {0, 1}), (2, 200, {1, 2}), (2, 25, {1}), (3, far_off(39, dtype), {2, 3}), (4, 40, {3}), (4, 51, {3}),
        (4, torch.iinfo(dtype).max, {3}), (0, -7, {0}),
    ):  # fmt: skip
        batch = tensors.batch(lengths, index_dtype=dtype, sinks=True)
        assert batch.begins_k == [0, 25, 35, 39, 50]
        bounds = batch.positional["cu_seqlens_k"]
        bounds[place] = bad
        batch.dead = dead
        batch.forget_inputs()
        if place == 2 and bad == 25:
            # What is left of the next sequence's keys begins earlier, and is another sequence.
            assert batch.run(out=None).out.isfinite().all()
            continue
        batch.run()
        batch.check()


@clamping
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_impossible_bounds_of_padded_keys_give_zeros_and_those_of_queries_are_clamped(tensors, dtype) -> None:
    lengths = [(20, 5), (7, 3), (0, 4), (9, 2)]
    for name, bad in (
        ("k_starts", -1), ("k_starts", 29), ("k_starts", far_off(0, dtype)), ("k_ends", 29), ("k_ends", -1),
        ("k_ends", far_off(20, dtype)), ("k_ends", torch.iinfo(dtype).max), ("k_starts", torch.iinfo(dtype).min),
    ):  # fmt: skip
        batch = tensors.batch(lengths, kind="padded", side="both", index_dtype=dtype)
        assert batch.k.shape[1] == 28
        batch.positional[name][1] = bad
        batch.dead = {1}
        batch.forget_inputs()
        batch.run()
        batch.check()
    for name, side, bad in (("q_starts", "left", -9), ("q_ends", "right", far_off(9, dtype)), ("q_ends", "right", 9)):
        batch = tensors.batch([(0, 8)] * 3, kind="padded", side="none", index_dtype=dtype)
        own = dict.fromkeys(("q_starts", "q_ends", "k_starts", "k_ends"))
        bounds = torch.full((3,), 0 if side == "left" else 8, dtype=dtype, device=tensors.device)
        bounds[1] = bad
        batch.positional.update(own | {name: bounds})
        if dtype == torch.int32 and bad < 0 and name == "q_ends":
            batch.dead = {1}
        batch.run()
        batch.check()


@clamping
def test_more_keys_than_the_table_has_columns_for_give_zeros(tensors) -> None:
    batch = tensors.batch([(20, 5), (60, 20), (63, 1), (64, 1)], kind="paged")
    batch.positional["block_table"] = batch.positional["block_table"][:, :4]
    batch.dead = {1, 3}
    batch.run()
    batch.check()


# cu_seqlens_q as given for 100 rows and what they are clamped to: a sequence's begin to the rows there are, its end to
# those from its begin on.
BAD_ENDS = {
    "past the end": ([0, 70, 2**31 - 1], [0, 70, 100]),
    "all past the end": ([0, 100, 170, 300], [0, 100, 100, 100]),
    "before the beginning": ([-5, 70, 100], [0, 70, 100]),
    "all before the beginning": ([-(2**31), -7, -1], [0, 0, 0]),
    "falling at the end": ([0, 100, 30], None),
    "falling in the middle": ([0, 80, 20, 90], None),
    "falling from the end": ([100, 0, 50], None),
    "far past and back": ([0, 2**31 - 1, -(2**31), 100], None),
}


@clamping
@pytest.mark.parametrize("kind", ["ragged", "paged"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("ends", "clamped"), BAD_ENDS.values(), ids=BAD_ENDS)
def test_impossible_bounds_are_clamped_and_nothing_outside_is_read_or_written(
    tensors, ends, clamped, dtype, kind
) -> None:
    """Where no row is claimed twice the result is that of the clamped sequences; otherwise nothing else is touched."""
    count = len(ends) - 1
    whole = clamped or [0, 100] + [100] * (count - 1)
    new = [whole[i + 1] - whole[i] for i in range(count)]
    batch = tensors.batch([(130 - n, n) for n in new], rows_after=100 - sum(new), index_dtype=dtype, kind=kind)
    cu = torch.tensor(ends, dtype=dtype, device=tensors.device)
    if dtype == torch.int64:
        # Far outside 32 bits, but with low 32 bits within the rows.
        far = cu.abs() > 2**30
        cu[far] = cu[far].sign() * 2**32 + 50
    batch.positional["cu_seqlens_q"] = cu
    batch.run()
    if clamped is None:
        batch.check_guards(all_written=False)
    else:
        batch.check()
