"""Does bad input say which argument, what it must be and what it was, and write nothing? One table.

Then what only device memory tells: named inside ``validate_values``, and on a CPU by default; clamped outside it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import tilelang_mla
from kernel_reference.checks import validate_values
from kernel_reference.testing.guards import assert_bitwise_equal
from kernel_reference.testing.wrong import elsewhere, needing_grad, overlapping, replaced, together
from tilelang_mla import DecodePlan, DecodeTiles, PrefillPlan, calls, flash_mla
from tilelang_mla.plan import DeviceLimits

Tensor = torch.Tensor
# Decoding: 3 sequences of 2 query tokens, 4 heads, 64 + 32 elements, 7 pages of 16, 3 columns. Prefill: 3 sequences of
# 2, 0 and 3 of 6 queries and 22, 16 and 3 keys, 4 heads on 2.
B, SQ, H, HKV, NOPE, ROPE, PAGE, PAGES, COLUMNS = 3, 2, 4, 2, 64, 32, 16, 7, 3
FUNCTIONS = {
    "prefill": tilelang_mla.flash_mla_varlen_func,
    "decode": tilelang_mla.flash_mla_with_kvcache,
    "drop-in": flash_mla.flash_mla_with_kvcache,
    "metadata": flash_mla.get_mla_metadata,
    "plan": tilelang_mla.plan_decode,
    "splits": tilelang_mla.get_splits,
}
CALLS = ("prefill", "decode", "drop-in")
DECODING = ("decode", "drop-in")
KV = {"decode": "kv", "drop-in": "k_cache"}
LENGTH = {"decode": "seqlens_k", "drop-in": "cache_seqlens", "plan": "seqlens_k", "metadata": "cache_seqlens"}
DIM = {"decode": "dim_nope", "drop-in": "head_dim_v"}
FIRST = {"decode": "plan.first_part", "drop-in": "num_splits"}


def good(function: str, device: torch.device) -> dict[str, Any]:
    """Arguments that are right, and everything optional that goes with the rest given."""

    def make(*size: int) -> Tensor:
        return torch.randn(size, device=device).bfloat16()

    def integers(*numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    if function == "prefill":
        return {
            "q": make(6, H, 192), "k": make(41, HKV, 192), "v": make(41, HKV, 128),
            "cu_seqlens_q": integers(0, 2, 2, 5), "cu_seqlens_k": integers(0, 22, 38, 41), "max_seqlen_q": 3,
            "max_seqlen_k": 22, "softmax_scale": 0.25, "causal": True, "out": make(6, H, 128), "return_lse": True,
            "plan": PrefillPlan(128, 64, 2),
        }  # fmt: skip
    lengths = integers(22, 0, 33)
    if function == "plan":
        return {"seqlens_k": lengths, "num_heads": H, "seqlen_q": SQ, "max_seqlen_k": 48, "num_splits": 2,
                "dim_nope": NOPE, "dim_rope": ROPE, "cores": 132}  # fmt: skip
    if function == "metadata":
        return {"cache_seqlens": lengths, "num_q_tokens_per_head_k": SQ * H, "num_heads_k": 1}
    if function == "splits":
        return {"batch_size": 3, "num_heads": 16, "seqlen_q": 1, "avg_seqlen_k": 8192, "block_size_h": 64,
                "block_size_n": 128, "streaming_info": [1, 15], "device": device}  # fmt: skip
    q, kv = make(B, SQ, H, NOPE + ROPE), make(PAGES, PAGE, 1, NOPE + ROPE)
    table = integers([3, 0, 99], [-1, 99, 99], [5, 2, 6])
    if function == "drop-in":
        metadata, num_splits = flash_mla.get_mla_metadata(lengths, SQ * H, 1)
        return {"q": q, "k_cache": kv, "block_table": table, "cache_seqlens": lengths, "head_dim_v": NOPE,
                "tile_scheduler_metadata": metadata, "num_splits": num_splits, "softmax_scale": 0.25,
                "causal": True}  # fmt: skip
    plan = tilelang_mla.plan_decode(lengths, H, SQ, dim_nope=NOPE, dim_rope=ROPE, cores=8)
    return {"q": q, "kv": kv, "seqlens_k": lengths, "block_table": table, "dim_nope": NOPE, "softmax_scale": 0.25,
            "causal": True, "out": make(B, SQ, H, NOPE), "return_lse": True, "plan": plan}  # fmt: skip


def narrower(tensor: Tensor) -> Tensor:
    return tensor[..., :-32]


def columns_apart(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def rows_unaligned(tensor: Tensor) -> Tensor:
    wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 1, dtype=tensor.dtype, device=tensor.device)
    return wide[..., :-1]


def every_other(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2)[::2]


def in_plan(**fields: Any) -> Callable[[DecodePlan], DecodePlan]:
    """A plan with some of its parts, or what functions make of them."""

    def change(plan: DecodePlan) -> DecodePlan:
        made = {name: value(getattr(plan, name)) if callable(value) else value for name, value in fields.items()}
        return plan._replace(**made)

    return change


def cases() -> dict[str, list[Any]]:
    """By name: functions, what to change in their arguments, the error and what it says."""
    table: dict[str, list[Any]] = {}

    def case(what: str, functions: Any, change: Any, error: type[Exception], message: Any) -> None:
        functions = (functions,) if isinstance(functions, str) else functions
        for function in functions:
            made = change(function) if change.__name__ == "<lambda>" else change
            said = message(function) if callable(message) else message
            table[f"{what} ({function})"] = [function, made, error, said]

    # Kinds of arguments
    for function in CALLS:
        kinds = {"prefill": "q k v cu_seqlens_q cu_seqlens_k out", "decode": "q kv seqlens_k block_table out",
                 "drop-in": "q k_cache block_table cache_seqlens"}  # fmt: skip
        for name in kinds[function].split():
            case(
                f"{name} is a list",
                function,
                replaced(name, [1, 2]),
                TypeError,
                rf"{name} must be a torch.Tensor, got \[",
            )
            case(f"{name} is sparse", function, replaced(name, lambda x: x.to_sparse()), TypeError,
                 rf"{name} must be a dense")  # fmt: skip
            if name != "out":
                case(f"{name} is elsewhere", function, replaced(name, elsewhere), ValueError, r"device must be .* got")
        # Prefill has gradients.
        for name in kinds[function].split()[: 0 if function == "prefill" else 2]:
            case(f"{name} needs a gradient", function, replaced(name, needing_grad), ValueError,
                 rf"{name} must be without gradient .* got requires_grad=True")  # fmt: skip
    case(
        "no block table",
        DECODING,
        replaced("block_table", None),
        TypeError,
        "block_table must be a torch.Tensor, got None",
    )
    # Dtypes
    case("float32", CALLS, replaced("q", lambda x: x.float()), TypeError,
         r"q.dtype must be bfloat16 or float16, got torch.float32")  # fmt: skip
    case("another dtype than q's", DECODING, lambda f: replaced(KV[f], lambda x: x.half()), TypeError,
         lambda f: rf"{KV[f]}.dtype must be torch.bfloat16 as that of q is, got torch.float16")  # fmt: skip
    for name in ("k", "v"):
        case(f"{name} of another dtype", "prefill", replaced(name, lambda x: x.half()), TypeError,
             rf"{name}.dtype must be torch.bfloat16 as that of q is, got torch.float16")  # fmt: skip
    case("an fp8 cache of another kind", DECODING,
         lambda f: replaced(KV[f], lambda x: x.to(torch.float8_e5m2)), TypeError,
         lambda f: rf"{KV[f]}.dtype must be .*float8_e4m3fn, or torch.uint8 .* 656 bytes, got torch.f")  # fmt: skip
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        case(f"{name} in int64", "prefill", replaced(name, lambda x: x.long()), TypeError,
             rf"{name}.dtype must be int32, got torch.int64")  # fmt: skip
    case("a block table in int64", DECODING, replaced("block_table", lambda x: x.long()), TypeError,
         "block_table.dtype must be int32, got torch.int64")  # fmt: skip
    case("lengths in int64", LENGTH, lambda f: replaced(LENGTH[f], lambda x: x.long()), TypeError,
         lambda f: f"{LENGTH[f]}.dtype must be int32, got torch.int64")  # fmt: skip
    # Shapes
    case("q of three dimensions", DECODING, replaced("q", lambda x: x[0]), ValueError,
         lambda f: rf"q must be \[B, Sq, Hq, {DIM[f]} \+ dpe\], got torch.bfloat16 \[2, 4, 96\]")  # fmt: skip
    case("q of four dimensions", "prefill", replaced("q", lambda x: x[None]), ValueError, r"q must be \[Tq, H, dqk\]")
    case("no heads", CALLS, replaced("q", lambda x: x[..., :0, :]), ValueError, "q must be of at least 1 head")
    case("two kv heads", DECODING, lambda f: replaced(KV[f], lambda x: x.expand(-1, -1, 2, -1)), ValueError,
         lambda f: rf"{KV[f]} must be \[pages, page_size, 1, 96\], of 1 kv head, got .* \[7, 16, 2, 96\]")  # fmt: skip
    case("no kv heads", DECODING, lambda f: replaced(KV[f], lambda x: x[:, :, :0]), ValueError, "of 1 kv head")
    case("pages of no tokens", DECODING, lambda f: replaced(KV[f], lambda x: x[:, :0]), ValueError,
         lambda f: rf"{KV[f]} must be .* with a page_size of at least 1, got .* \[7, 0, 1, 96\]")  # fmt: skip
    case("a cache of three dimensions", DECODING, lambda f: replaced(KV[f], lambda x: x[:, :, 0]), ValueError,
         lambda f: rf"{KV[f]} must be \[pages, page_size, 1, 96\], got torch.bfloat16 \[7, 16, 96\]")  # fmt: skip
    case("a cache of another width", DECODING, lambda f: replaced(KV[f], narrower), ValueError,
         lambda f: rf"{KV[f]} must be \[pages, page_size, 1, 96\] as q is, got .* \[7, 16, 1, 64\]")  # fmt: skip
    for size in (-64, 0, 32, 63, 100, 576):
        case(f"a latent of {size}", DECODING, lambda f, size=size: replaced(DIM[f], size), ValueError,
             lambda f, size=size: rf"{DIM[f]} must be a multiple of 64 from 64 to 512, got {size}")  # fmt: skip
        case(f"a latent of {size}", "plan", replaced("dim_nope", size), ValueError,
             rf"dim_nope must be a multiple of 64 from 64 to 512, got {size}")  # fmt: skip
    for rope in (16, 31, 160):
        case(f"a rope of {rope}", DECODING,
             lambda f, rope=rope: replaced("q", lambda x: x[..., :1].repeat(1, 1, 1, NOPE + rope)), ValueError,
             lambda f, rope=rope: rf"q must be of {DIM[f]} = 64 elements and a multiple of 32 from 0 to 128 more, "
             rf"got {NOPE + rope} elements")  # fmt: skip
        case(f"a rope of {rope}", "plan", replaced("dim_rope", rope), ValueError,
             rf"dim_rope must be a multiple of 32 from 0 to 128, got {rope}")  # fmt: skip
    case("lengths of fewer sequences", DECODING, lambda f: replaced(LENGTH[f], lambda x: x[:2]), ValueError,
         lambda f: rf"{LENGTH[f]} must be \[3\], one a sequence of q, got torch.int32 \[2\]")  # fmt: skip
    case("a block table of fewer sequences", DECODING, replaced("block_table", lambda x: x[:2]), ValueError,
         r"block_table must be \[3, max_pages\], a row a sequence of q, got torch.int32 \[2, 3\]")  # fmt: skip
    case("a flat block table", DECODING, replaced("block_table", lambda x: x[0]), ValueError,
         r"block_table must be \[B, max_pages\], got")  # fmt: skip
    case("lengths in two dimensions", [f for f in LENGTH if f not in DECODING],
         lambda f: replaced(LENGTH[f], lambda x: x[None]), ValueError,
         lambda f: rf"{LENGTH[f]} must be \[B\], got torch.int32 \[1, 3\]")  # fmt: skip
    case("lengths of another number of sequences, one a token", DECODING,
         lambda f: replaced(LENGTH[f], lambda x: x[None]), ValueError,
         lambda f: rf"{LENGTH[f]} must be \[3\], one a sequence of q, got torch.int32 \[1, 3\]")  # fmt: skip
    case("lengths of another number of tokens", DECODING,
         lambda f: replaced(LENGTH[f], lambda x: x[:, None].repeat(1, SQ + 1)), ValueError,
         lambda f: rf"{LENGTH[f]} must be \[3\] or, one a query token, \[3, {SQ}\], got torch.int32 \[3, ")  # fmt: skip
    case("lengths in three dimensions", DECODING, lambda f: replaced(LENGTH[f], lambda x: x[:, None, None]),
         ValueError, lambda f: rf"{LENGTH[f]} must be \[B\] or \[B, Sq\], got torch.int32 \[3, 1, 1\]")  # fmt: skip
    for size in (16, 31, 100, 288):
        case(f"heads of {size}", "prefill",
             together(*[replaced(n, lambda x, size=size: x[..., :1].repeat(1, 1, size)) for n in "qk"]), ValueError,
             rf"q must be of a head size that is a multiple of 32 from 32 to 256, got {size}")  # fmt: skip
    for size in (32, 100, 320):
        case(f"values of {size}", "prefill", together(
            replaced("v", lambda x, size=size: x[..., :1].repeat(1, 1, size)), replaced("out", None)), ValueError,
            rf"v must be of a head size that is a multiple of 64 from 64 to 256, got {size}")  # fmt: skip
    case(
        "k of another head size", "prefill", replaced("k", narrower), ValueError, r"k must be \[Tk, Hkv, 192\] as q is"
    )
    case("heads that do not divide", "prefill",
         together(*[replaced(n, lambda x: x[:, :1].repeat(1, 3, 1)) for n in "kv"]), ValueError,
         r"k must be of a number of heads that divides the 4 of q, got torch.bfloat16 \[41, 3, 192\]")  # fmt: skip
    case(
        "fewer values", "prefill", replaced("v", lambda x: x[:40]), ValueError, r"v must be \[41, 2, dv\] as k is, got"
    )
    case("values of fewer heads", "prefill", replaced("v", lambda x: x[:, :1]), ValueError, r"v must be \[41, 2, dv\]")
    case(
        "no bounds",
        "prefill",
        replaced("cu_seqlens_q", lambda x: x[:0]),
        ValueError,
        r"cu_seqlens_q must be \[B \+ 1\]",
    )
    case("bounds of fewer sequences", "prefill", replaced("cu_seqlens_k", lambda x: x[:3]), ValueError,
         r"cu_seqlens_q, cu_seqlens_k must be \[B \+ 1\] both, got \[4\] and \[3\]")  # fmt: skip
    # Strides
    for function, names in (("prefill", ("q", "k", "v")), ("decode", ("q", "kv")), ("drop-in", ("q", "k_cache"))):
        for name in names:
            for how in (columns_apart, rows_unaligned):
                case(f"{name} {how.__name__}", function, replaced(name, how), ValueError,
                     rf"{name} must be of contiguous rows 16 bytes apart or a multiple of that, got")  # fmt: skip
    for function, name in (("prefill", "cu_seqlens_q"), ("prefill", "cu_seqlens_k"), ("decode", "seqlens_k"),
                           ("plan", "seqlens_k")):  # fmt: skip
        case(f"{name} with gaps", function, replaced(name, every_other), ValueError, rf"{name} must be contiguous, got")
    case("a block table with gaps", DECODING, replaced("block_table", columns_apart), ValueError,
         "block_table must be of contiguous rows, got")  # fmt: skip
    # Results
    for function, shape in (("prefill", r"\[6, 4, 128\]"), ("decode", r"\[3, 2, 4, 64\]")):
        case("out of another shape", function, replaced("out", narrower), ValueError, rf"out must be {shape}, got")
        case("out of another dtype", function, replaced("out", lambda x: x.float()), TypeError, "out.dtype must be")
        case("out elsewhere", function, replaced("out", elsewhere), ValueError, "out.device must be")
        case(
            "out overlapping",
            function,
            replaced("out", partial(overlapping, by=8)),
            ValueError,
            "out must be a tensor whose elements do",
        )
        case(
            "out with columns apart",
            function,
            replaced("out", columns_apart),
            ValueError,
            "out must be of contiguous rows",
        )
    # Numbers
    for function in ("prefill", "decode"):
        case(
            "return_lse 1", function, replaced("return_lse", 1), TypeError, r"return_lse must be a bool, got 1 \(int\)"
        )
    case("causal None", CALLS, replaced("causal", None), TypeError, "causal must be a bool, got None")
    for scale, said in ((math.nan, "finite, got nan"), (math.inf, "finite, got inf")):
        case(
            f"a scale of {scale}", CALLS, replaced("softmax_scale", scale), ValueError, f"softmax_scale must be {said}"
        )
    for scale in ("1", torch.tensor(1.0), True):
        case(f"a scale of {scale!r}", CALLS, replaced("softmax_scale", lambda _, scale=scale: scale), TypeError,
             "softmax_scale must be a float or None, got")  # fmt: skip
    case("no elements", CALLS, lambda f: together(replaced("softmax_scale", None), replaced("q", lambda q: q[..., :0])),
         ValueError, r"q must be \[")  # fmt: skip
    for name in ("max_seqlen_q", "max_seqlen_k"):
        case(f"{name} below 0", "prefill", replaced(name, -1), ValueError, f"{name} must be at least 0, got -1")
        case(f"{name} no int", "prefill", replaced(name, 3.0), TypeError, rf"{name} must be an int, got 3.0 \(float\)")
    case("a latent that is no int", DECODING, lambda f: replaced(DIM[f], 64.0), TypeError,
         lambda f: rf"{DIM[f]} must be an int, got 64.0")  # fmt: skip
    for name, least in (
        ("num_heads", 1),
        ("seqlen_q", 0),
        ("max_seqlen_k", 0),
        ("num_splits", 1),
        ("cores", 1),
    ):
        case(
            f"{name} too small",
            "plan",
            replaced(name, least - 1),
            ValueError,
            f"{name} must be (at least {least}|from {least} to 256), got",
        )
        case(f"{name} no int", "plan", replaced(name, 1.5), TypeError, f"{name} must be an int, got 1.5")
    case(
        "too many splits", "plan", replaced("num_splits", 257), ValueError, "num_splits must be from 1 to 256, got 257"
    )
    case("lengths that are a list", ("plan", "metadata"), lambda f: replaced(LENGTH[f], [1]), TypeError,
         lambda f: f"{LENGTH[f]} must be a torch.Tensor")  # fmt: skip
    for name, least in (("batch_size", 0), ("num_heads", 0), ("seqlen_q", 0), ("avg_seqlen_k", 0), ("block_size_h", 1),
                        ("block_size_n", 1)):  # fmt: skip
        case(
            f"{name} too small",
            "splits",
            replaced(name, least - 1),
            ValueError,
            f"{name} must be at least {least}, got",
        )
        case(f"{name} no int", "splits", replaced(name, 1.5), TypeError, f"{name} must be an int, got 1.5")
    case("streaming_info no list", "splits", replaced("streaming_info", 3), TypeError, r"streaming_info must be \[sink")
    case(
        "streaming_info of floats",
        "splits",
        replaced("streaming_info", [1, 2.0]),
        TypeError,
        r"streaming_info\[1\] must",
    )
    case(
        "streaming_info below 0", "splits", replaced("streaming_info", [-1, 2]), ValueError, r"streaming_info\[0\] must"
    )
    # Plans
    case("a plan of another kind", "prefill", replaced("plan", [128, 64, 2]), TypeError, "plan must be a .*PrefillPlan")
    case("a plan of another kind", "decode", replaced("plan", (1, 2)), TypeError, "plan must be a .*DecodePlan")
    case("tiles of another kind", "decode", replaced("plan", in_plan(tiles=(64, 64))), TypeError, "plan.tiles must be")
    case("a plan that no kernel takes", "prefill", replaced("plan", PrefillPlan(100, 64, 2)), ValueError,
         r"plan must be one made for PrefillProblem\(.*, as with block_m 64 or 128, got PrefillPlan\(")  # fmt: skip
    case("tiles that no kernel takes", "decode", replaced("plan", in_plan(tiles=DecodeTiles(64, 48, 2))), ValueError,
         r"plan must be one made for DecodeProblem\(.*, as with block_n 16, 32, 64 or 128, got Dec")  # fmt: skip
    case("a plan for fewer sequences", "decode", replaced("plan", in_plan(first_part=lambda x: x[:3])), ValueError,
         r"plan.first_part must be \[4\], made for the 3 sequences of q, got torch.int32 \[3\]")  # fmt: skip
    case("a plan for fewer sequences", "drop-in", replaced("num_splits", lambda x: x[:3]), ValueError,
         r"num_splits must be \[4\], made for the 3 sequences of q, got torch.int32 \[3\]")  # fmt: skip
    case("a shorter order", "decode", replaced("plan", in_plan(order=lambda x: x[:3])), ValueError,
         r"plan.order must be \[19\], made for the 3 sequences of q, got torch.int32 \[3\]")  # fmt: skip
    case("a plan in int64", "decode", replaced("plan", in_plan(first_part=lambda x: x.long())), TypeError,
         "plan.first_part.dtype must be int32, got torch.int64")  # fmt: skip
    case("an order in int64", "decode", replaced("plan", in_plan(order=lambda x: x.long())), TypeError,
         "plan.order.dtype must be int32")  # fmt: skip
    case(
        "a plan without tensors",
        "decode",
        replaced("plan", in_plan(first_part=None)),
        ValueError,
        "plan.first_part must be",
    )
    case("a plan elsewhere", "decode", replaced("plan", in_plan(first_part=elsewhere)), ValueError, "device must be")
    # FlashMLA's
    case("metadata without splits", "drop-in", replaced("num_splits", None), ValueError, "num_splits must be given")
    case("splits without metadata", "drop-in", replaced("tile_scheduler_metadata", None), ValueError,
         "tile_scheduler_metadata must be given")  # fmt: skip
    case("metadata for other heads", "drop-in", replaced("tile_scheduler_metadata", lambda x: x.repeat(2, 1)),
         ValueError, r"tile_scheduler_metadata must be \[\d+, 8\], made for 2 query tokens x 4 heads, got")  # fmt: skip
    case("metadata of another shape", "drop-in", replaced("tile_scheduler_metadata", lambda x: x[:, :4]), ValueError,
         r"tile_scheduler_metadata must be \[parts at once, 8\] from get_mla_metadata, got")  # fmt: skip
    for name in (
        "attn_sink",
        "extra_k_cache",
        "extra_indices_in_kvcache",
        "topk_length",
        "extra_topk_length",
    ):
        case(f"{name} given", "drop-in", replaced(name, lambda _: torch.zeros(3)), ValueError,
             f"{name} must be None, all that is supported, got torch.float32")  # fmt: skip
    case("is_fp8_kvcache", ("drop-in", "metadata"), replaced("is_fp8_kvcache", True), ValueError,
         "is_fp8_kvcache must be False, all that is supported, got True")  # fmt: skip
    case("topk", "metadata", replaced("topk", 2048), ValueError, "topk must be None, all that is supported, got 2048")
    case("two kv heads", "metadata", replaced("num_heads_k", 2), ValueError, "num_heads_k must be 1, got 2")
    case("no tokens", "metadata", replaced("num_q_tokens_per_head_k", 0), ValueError, "at least 1, got 0")
    return table


CASES = cases()


def call(function: str, arguments: dict[str, Any]) -> Any:
    return FUNCTIONS[function](**arguments)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_arguments_that_are_right_raise_nothing(device, function) -> None:
    call(function, good(function, device))
    if function in CALLS:
        with validate_values():
            call(function, good(function, device))


@pytest.mark.parametrize(("function", "change", "error", "message"), CASES.values(), ids=CASES)
def test_bad_arguments_are_named_and_nothing_is_written(device, function, change, error, message) -> None:
    arguments = good(function, device)
    if function not in ("drop-in", "metadata") and "out" in arguments:
        arguments["out"].fill_(7)
    before = arguments.get("out")
    kept = None if before is None else before.clone()
    change(arguments)
    with pytest.raises(error) as raised:
        call(function, arguments)
    assert re.search(message, str(raised.value)), str(raised.value)
    if before is not None and kept is not None:
        assert_bitwise_equal(before, kept, what="out after an error")


def test_queries_elsewhere_are_refused_as_such_and_not_for_their_metadata(device, monkeypatch) -> None:
    monkeypatch.setattr(calls, "device_limits", lambda of: DeviceLimits(132 if of.type == device.type else 1))
    arguments = good("drop-in", device)
    assert arguments["tile_scheduler_metadata"].shape[0] == 132
    arguments["q"] = elsewhere(arguments["q"])
    with pytest.raises(ValueError, match=r"device must be .* got"):
        call("drop-in", arguments)


@pytest.mark.parametrize("function", ["prefill", "decode"])
def test_the_ops_check_their_arguments_too(tensors, function) -> None:
    """A direct call of the op is no way round the checks."""
    batch = tensors.prefill([(3, 5)]) if function == "prefill" else tensors.decode([3], dim_nope=64, dim_rope=32)
    op = getattr(torch.ops.tilelang_mla, function)
    arguments = [*batch.op_arguments()]
    op(*arguments)
    batch.check()
    for place, message in ((0, "q"), (1, "k"), (2, "v|seqlens_k"), (3, "cu_seqlens_q|block_table")):
        changed = [*arguments]
        changed[place] = changed[place][..., None, None]
        with pytest.raises(ValueError, match=message):
            op(*changed)
    with pytest.raises(ValueError, match="lse must be"):
        op(*[x[..., :0] if x is batch.lse.tensor else x for x in arguments])
    with pytest.raises(TypeError, match=r"lse.dtype must be float32"):
        op(*[x.double() if x is batch.lse.tensor else x for x in arguments])


def test_the_op_that_merges_names_what_is_wrong(device) -> None:
    parts = torch.randn(2, 6, 64, device=device).bfloat16()
    right = {"parts": parts, "part_lse": parts[..., 0].float(), "out": parts[0].clone(), "lse": parts[0, :, 0].float()}
    torch.ops.tilelang_mla.merge(*right.values())
    odd = torch.randn(2, 6, 65, device=device).bfloat16()[..., :64]
    for name, wrong, message in (
        ("parts", parts[0], r"parts must be \[world, N, dim_nope\], got"),
        ("parts", parts.float(), r"parts.dtype must be"),
        ("parts", parts[..., :32], r"parts must be of rows of a multiple of 64 from 64 to 512, got"),
        ("parts", odd, r"parts must be of contiguous rows an even number of elements apart, got"),
        ("part_lse", right["part_lse"][:1], r"part_lse must be"),
        ("part_lse", parts[..., 0], r"part_lse.dtype must be"),
        ("out", right["out"][:5], r"out must be"), ("out", parts[0].half(), r"out.dtype must be"),
        ("out", torch.stack([right["out"]] * 2, 2)[..., 0], r"out must be contiguous"),
        ("lse", right["lse"][:5], r"lse must be"),
        ("lse", torch.stack([right["lse"]] * 2, 1)[..., 0], r"lse must be contiguous"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=message):
            torch.ops.tilelang_mla.merge(*(right | {name: wrong}).values())


# What only device memory tells

SMALL = {"dim_nope": 64, "dim_rope": 32, "heads": 4}


def spoilt(tensors, name: str, place: Any, value: int, **options: Any):
    """A batch of decoding with one number changed, and the sequence that it belongs to."""
    batch = tensors.decode([70, 20, 33], page=16, seqlen_q=2, **SMALL, **options)
    getattr(batch, name)[place] = value
    batch.forget_inputs()
    return batch


LENGTHS = {"below 0": -1, "far below 0": -(2**31), "above the table": 16 * 6 + 1, "far above it": 2**31 - 1}


@pytest.mark.parametrize("value", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("sequence", [0, 1, 2])
def test_a_length_that_cannot_be_is_named_and_outside_the_check_its_rows_are_nothing(tensors, sequence, value) -> None:
    batch = spoilt(tensors, "seqlens_k", sequence, value)
    assert batch.block_table.shape[1] == 6
    wanted = rf"seqlens_k\[{sequence}\] must be from 0 to 96, what the 6 columns of block_table .* got {value}"
    with validate_values(), pytest.raises(ValueError, match=wanted):
        batch.run()
    batch.check_inputs()
    batch.dead = {sequence}
    for how in (None, {}, {"num_splits": 3}):
        with validate_values(False):
            batch.run(plan=None if how is None else batch.plan(**how))
        batch.check()


def test_a_block_table_too_narrow_for_a_length_is_named_and_outside_the_check_never_read_past(tensors) -> None:
    batch = tensors.decode([70, 20, 33], page=16, seqlen_q=2, **SMALL)
    batch.block_table = batch.block_table[:, :4]
    with validate_values(), pytest.raises(ValueError, match=r"seqlens_k\[0\] must be from 0 to 64, .* got 70"):
        batch.run()
    batch.dead = {0}
    with validate_values(False):
        batch.run(plan=batch.plan())
    batch.check()


@pytest.mark.parametrize("page", [-1, -(2**31), 10**6, 2**31 - 1])
@pytest.mark.parametrize(("sequence", "column"), [(0, 0), (0, 4), (2, 1)])
def test_a_page_that_is_none_is_named_and_outside_the_check_reads_as_zeros(tensors, sequence, column, page) -> None:
    batch = spoilt(tensors, "block_table", (sequence, column), page)
    pages = batch.kv.shape[0]
    with validate_values():
        with pytest.raises(ValueError) as raised:
            batch.run()
        said = f"block_table[{sequence}, {column}] must be a page from 0 to {pages - 1}, got {page}"
        assert str(raised.value) == said
    begin = batch.begins_k[sequence] + 16 * column
    batch.keys[begin : min(begin + 16, batch.begins_k[sequence + 1])] = 0
    with validate_values(False):
        batch.run(plan=batch.plan())
    batch.check()


def test_pages_behind_a_sequence_are_not_looked_at(tensors) -> None:
    batch = spoilt(tensors, "block_table", (1, slice(2, None)), -7)
    with validate_values():
        batch.run()
    batch.check()


def test_a_pool_of_no_pages_reads_as_zeros(tensors) -> None:
    batch = tensors.decode([20, 3], page=16, **SMALL)
    batch.kv = batch.kv[:0]
    batch.keys.zero_()
    with validate_values(False):
        batch.run(plan=batch.plan())
    batch.check()
    with validate_values(), pytest.raises(ValueError, match=r"block_table\[0, 0\] must be a page from 0 to -1"):
        batch.run()


FIRST_PARTS = {
    "not from 0": ([1, 2, 3, 4], r"first_part\[0\] must be 0, got 1"),
    "falling": ([0, 2, 1, 3], r"first_part\[2\] must be from 3 to \d+, the parts of the grid, got 1"),
    "no part": ([0, 1, 1, 2], r"first_part\[2\] must be from 2 to \d+, the parts of the grid, got 1"),
    "behind the grid": ([0, 1, 2, 10**6], r"first_part\[3\] must be from 3 to \d+, the parts of the grid, got 1000000"),
}


@pytest.mark.parametrize(("first_part", "message"), FIRST_PARTS.values(), ids=FIRST_PARTS)
def test_parts_that_are_none_are_named(tensors, first_part, message) -> None:
    batch = tensors.decode([70, 20, 33], page=16, seqlen_q=2, **SMALL)
    plan = batch.plan()._replace(first_part=tensors.integers(*first_part))
    with validate_values(), pytest.raises(ValueError, match=message):
        batch.run(plan=plan)
    plan = batch.plan()
    with validate_values(), pytest.raises(ValueError, match=r"plan.order must be each of 0 to \d+ once, got \[0, 0"):
        batch.run(plan=plan._replace(order=plan.order * 0))
    with validate_values():
        batch.run(plan=batch.plan())
    batch.check()


BOUNDS = {
    "not from 0": ("cu_seqlens_q", 0, 1, r"cu_seqlens_q\[0\] must be 0, got 1"),
    "falling": (
        "cu_seqlens_q",
        2,
        1,
        r"cu_seqlens_q\[2\] must be from cu_seqlens_q\[1\] = 5 to 17 \(the rows of q\), got 1",
    ),
    "behind q": ("cu_seqlens_q", 3, 99, r"cu_seqlens_q\[3\] must be from .* got 99"),
    "behind k": ("cu_seqlens_k", 3, 99, r"cu_seqlens_k\[3\] must be from cu_seqlens_k\[2\] = 29 to 36 .* got 99"),
    "below 0": ("cu_seqlens_k", 1, -5, r"cu_seqlens_k\[1\] must be from cu_seqlens_k\[0\] = 0 to 36 .* got -5"),
}


@pytest.mark.parametrize(("name", "place", "value", "message"), BOUNDS.values(), ids=BOUNDS)
def test_bounds_that_cannot_be_are_named_and_outside_the_check_write_only_their_own(
    tensors, name, place, value, message
) -> None:
    batch = tensors.prefill([(5, 20), (8, 9), (4, 7)])
    want = batch.run(out=None)
    getattr(batch, name)[place] = value
    batch.forget_inputs()
    with validate_values(), pytest.raises(ValueError, match=message):
        batch.run()
    batch.check_inputs()
    with validate_values(False):
        batch.run()
    batch.check_guards()
    if name == "cu_seqlens_k":
        # A sequence whose keys cannot be sees none; those beside it are as they were.
        for i, (begin, end) in enumerate(zip(batch.begins, batch.begins[1:], strict=False)):
            first, last = (int(bound) for bound in batch.cu_seqlens_k[i : i + 2])
            if not 0 <= first <= last <= len(batch.k):
                assert not bool(batch.out.tensor[begin:end].any())
                assert bool((batch.lse.tensor[:, begin:end] == -torch.inf).all())
            elif place not in (i, i + 1):
                assert_bitwise_equal(batch.out.tensor[begin:end], want.out[begin:end])


@pytest.mark.parametrize("side", ["q", "k"])
def test_a_bound_below_a_length_is_named(tensors, side) -> None:
    batch = tensors.prefill([(5, 20), (8, 9)])
    batch.most["qk".index(side)] -= 1
    longest, place = (8, 1) if side == "q" else (20, 0)
    wanted = f"max_seqlen_{side} must be at least {longest}, the length of sequence {place}, got {longest - 1}"
    with validate_values(), pytest.raises(ValueError, match=wanted):
        batch.run()


CPU_ONLY = torch.device("cpu")


@pytest.mark.parametrize(
    ("function", "name", "place", "value", "message"),
    [
        ("decode", "seqlens_k", 1, 97, r"^seqlens_k\[1\] must be from 0 to 48, what the 3 columns"),
        ("drop-in", "block_table", (2, 1), 7, r"^block_table\[2, 1\] must be a page from 0 to 6, got 7"),
        ("decode", "plan", 3, 10**6, r"^plan.first_part\[3\] must be from .* got 1000000"),
        ("drop-in", "num_splits", 1, 0, r"^num_splits\[1\] must be from 1 to .* got 0"),
        ("prefill", "cu_seqlens_k", 2, 5, r"^cu_seqlens_k\[2\] must be from cu_seqlens_k\[1\] = 22 to 41 .* got 5"),
        ("prefill", "cu_seqlens_q", 3, 7, r"^cu_seqlens_q\[3\] must be from .* to 6 \(the rows of q\), got 7"),
    ],
)  # fmt: skip
def test_values_of_tensors_on_a_cpu_are_checked_unless_that_is_turned_off(
    function, name, place, value, message
) -> None:
    arguments = good(function, CPU_ONLY)
    held = arguments[name].first_part if name == "plan" else arguments[name]
    held[place] = value
    if "out" in arguments:
        arguments["out"].fill_(7)
    with pytest.raises(ValueError, match=message):
        call(function, arguments)
    assert "out" not in arguments or bool((arguments["out"] == 7).all())
    with validate_values(False):
        call(function, arguments)


# Derivatives, and memory that is shared


def floats_of(function: str) -> list[str]:
    return {"prefill": ["q", "k", "v", "out"], "decode": ["q", "kv", "out"], "drop-in": ["q", "k_cache"]}[function]


@pytest.mark.parametrize(("function", "name"), [(f, name) for f in CALLS for name in floats_of(f)])
def test_derivatives_of_either_mode_are_refused_by_name(device, function, name) -> None:
    arguments = good(function, device)

    def run(x: Tensor) -> Tensor:
        return call(function, {**arguments, name: x})[0].float().sum()

    x = arguments[name]
    with pytest.raises(ValueError, match=rf"^{name} must be without a tangent: .*jvp"):
        torch.func.jvp(run, (x,), (x,))
    # Compiled code would drop the tangent, and give 0.
    for compiled in (
        torch.compile(lambda x: torch.func.jvp(run, (x,), (x,)), backend="aot_eager"),
        lambda x: torch.func.jvp(torch.compile(run, backend="aot_eager"), (x,), (x,)),
    ):
        with pytest.raises(ValueError, match=rf"^{name} must be without a tangent"):
            compiled(x)
    with pytest.raises(ValueError, match=rf"^{name} must be without gradient"):
        torch.func.grad(run)(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(ValueError, match=rf"^{name} must be without a tangent"):
            run(dual)
        run(x)


@pytest.mark.parametrize(("function", "name"), [(f, name) for f in CALLS for name in floats_of(f)] + [
    ("decode", "seqlens_k"), ("drop-in", "block_table"), ("prefill", "cu_seqlens_q"), ("plan", "seqlens_k"),
    ("metadata", "cache_seqlens")])  # fmt: skip
def test_vmap_is_refused_by_name(device, function, name) -> None:
    arguments = good(function, device)

    def run(x: Tensor) -> Tensor:
        return call(function, {**arguments, name: x})[1]

    twice = torch.stack([arguments[name]] * 2)
    with pytest.raises(ValueError, match=rf"^{name} must be outside torch.vmap"):
        torch.vmap(run)(twice)
    if twice.is_floating_point():
        with pytest.raises(ValueError, match=rf"^{name} must be (outside torch.vmap|without gradient)"):
            torch.vmap(torch.func.grad(lambda x: call(function, {**arguments, name: x})[0].float().sum()))(twice)


@pytest.mark.parametrize("function", ["prefill", "decode"])
def test_the_ops_refuse_vmap_too(tensors, function) -> None:
    batch = tensors.prefill([(3, 5)]) if function == "prefill" else tensors.decode([3], dim_nope=64, dim_rope=32)
    first, *others = batch.op_arguments()
    with pytest.raises(ValueError, match=r"^q must be outside torch.vmap"):
        torch.vmap(lambda q: getattr(torch.ops.tilelang_mla, function)(q, *others))(torch.stack([first, first]))


def test_an_output_that_shares_memory_with_an_input_is_refused_and_nothing_is_written(tensors) -> None:
    prompt = tensors.prefill([(4, 4), (3, 3)], sizes=(128, 128))
    batch = tensors.decode([20, 33], dim_nope=64, dim_rope=32, heads=4)
    room = torch.zeros_like(prompt.q)
    cases: list[tuple[Any, Any, str]] = [(prompt, getattr(prompt, name), name) for name in "qkv"]
    cases += [(batch, batch.q[..., :64], "q"), (batch, batch.q[..., 8:72], "q")]
    pages = batch.kv.flatten(0, 2)[: 2 * 4, :64].view(2, 1, 4, 64)
    cases.append((batch, pages, "kv"))
    for given, out, name in cases:
        with pytest.raises(ValueError, match=rf"^out must be a tensor that shares no memory with {name}, got"):
            given.run(out=out)
        given.check_inputs()
    # Columns of one wide row, which lie between each other and share nothing.
    fused = torch.cat([prompt.q, room], -1)
    out = fused[..., 128:]
    tilelang_mla.flash_mla_varlen_func(fused[..., :128], *prompt.given[1:], out=out)
    prompt.check_out(out)
    arguments = [*batch.op_arguments()]
    room = torch.zeros(2, 4, 64, device=batch.device)
    arguments[6], arguments[7] = room.to(batch.dtype)[:, None], room[..., :1]
    torch.ops.tilelang_mla.decode(*arguments)
    arguments[6] = room.view(batch.dtype)[..., :64][:, None]
    with pytest.raises(ValueError, match=r"^out must be a tensor that shares no memory with lse"):
        torch.ops.tilelang_mla.decode(*arguments)


@pytest.mark.gpu
def test_overlap_is_looked_for_in_every_call_that_finds_its_launch_ready(tensors) -> None:
    prompt = tensors.prefill([(4, 4), (3, 3)], sizes=(128, 128))
    apart = torch.empty_like(prompt.q.contiguous())
    q = prompt.q.contiguous()
    run = tilelang_mla.flash_mla_varlen_func
    run(q, *prompt.given[1:], out=apart)
    held = q.clone()
    with pytest.raises(ValueError, match=r"^out must be a tensor that shares no memory with q"):
        run(q, *prompt.given[1:], out=q)
    assert_bitwise_equal(q, held)


# Arrays of other libraries, and layouts of other libraries


@pytest.mark.parametrize(
    ("function", "name"), [(f, name) for f in CALLS for name in [*floats_of(f)[:2], "softmax_scale"]]
)
def test_an_array_of_numpy_is_told_in_a_line(device, function, name) -> None:
    array = torch.zeros(300, 300).numpy()
    with pytest.raises(TypeError) as raised:
        call(function, {**good(function, device), name: array})
    assert str(raised.value).endswith(", got a numpy ndarray float32 [300, 300]")
    assert len(str(raised.value)) < 120


LAYOUTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "pages with heads first": ("decode", {"kv": lambda x: x.transpose(1, 2)},
                               r"another layout: kv.transpose\(1, 2\) would fit"),
    "pages without a head": ("drop-in", {"k_cache": lambda x: x.squeeze(2)}, r"k_cache.unsqueeze\(2\) would fit"),
    "the latent alone": ("decode", {"kv": lambda x: x[..., :64]}, r"a row is torch.cat\(\[latent, rope\], -1\)"),
    "the rope alone": ("decode", {"kv": lambda x: x[..., :32]}, r"a row is torch.cat\(\[latent, rope\], -1\)"),
    "q of one token": ("decode", {"q": lambda x: x[:, 0]}, r"q.unsqueeze\(1\) would fit"),
    "q of a batch": ("prefill", {"q": lambda x: x[None]}, r"q.flatten\(0, 1\) would fit"),
    "k with heads first": ("prefill", {"k": lambda x: x.transpose(0, 1), "v": lambda x: x.transpose(0, 1)},
                           r"another layout: k.transpose\(0, 1\) would fit"),
}  # fmt: skip


@pytest.mark.parametrize(("function", "changes", "said"), LAYOUTS.values(), ids=LAYOUTS)
def test_another_layout_is_named_with_what_would_fit(device, function, changes, said) -> None:
    arguments = good(function, device)
    for name, change in changes.items():
        arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=rf"^\w+ must be .*, got .*; .*{said}$"):
        call(function, arguments)


def test_arguments_in_each_others_place_are_told(device) -> None:
    arguments = good("decode", device)
    swapped = {"seqlens_k": arguments["block_table"], "block_table": arguments["seqlens_k"]}
    with pytest.raises(ValueError, match=r"seqlens_k and block_table are in each other's place$"):
        call("decode", {**arguments, **swapped})
    arguments = good("prefill", device)
    with pytest.raises(ValueError, match=r"k and v are in each other's place$"):
        call("prefill", {**arguments, "k": arguments["v"], "v": arguments["k"], "out": None})


def test_a_gpu_tensor_without_tilelang_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from tilelang_mla import ops

    monkeypatch.setitem(sys.modules, "tilelang_mla.launch", None)
    monkeypatch.delattr(tilelang_mla, "launch", raising=False)
    with pytest.raises(RuntimeError, match="tensors on a GPU need TileLang, which"):
        ops._launch_module()
