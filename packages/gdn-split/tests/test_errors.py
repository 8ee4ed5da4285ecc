"""Does bad input say which argument, what it must be and what it was, and write nothing? One table."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import gdn_split
from gdn_split.plan import ConvPlan, SplitPlan
from kernel_reference.testing.wrong import (
    as_list,
    assert_kept,
    elsewhere,
    every_second,
    in_half,
    kept,
    needing_grad,
    one_rank_more,
    one_wider,
    overlapping,
    replaced,
    sparse,
)

# 2 QK heads and 6 V heads, of 4 and 8 elements: rows of 112 and 12, parts of 64, 48, 6 and 6.
ROWS = 6
SIZES = {"num_heads_qk": 2, "num_heads_v": 6, "head_qk": 4, "head_v": 8}
FUNCTIONS = {
    "split": gdn_split.fused_qkvzba_split_reshape_cat,
    "merge": gdn_split.merge_qkvzba,
    "views": gdn_split.split_views,
    "convolve": gdn_split.split_conv1d_update,
}
PARTS = ("mixed_qkv", "z", "b", "a")


def good(function: str, device: torch.device) -> dict[str, Any]:
    """Arguments that are right, results preallocated where the function takes them."""
    make = lambda *size: torch.randn(*size, device=device)  # noqa: E731
    fused = {"mixed_qkvz": make(ROWS, 112), "mixed_ba": make(ROWS, 12)}
    parts = dict(zip(PARTS, (make(ROWS, 64), make(ROWS, 6, 8), make(ROWS, 6), make(ROWS, 6)), strict=True))
    if function == "views":
        return {**fused, **SIZES}
    if function == "merge":
        return {**parts, **SIZES, "out": list(fused.values())}
    if function == "split":
        return {**fused, **SIZES, "out": list(parts.values())}
    convolution = {
        "conv_state": make(5, 64, 3), "conv_weight": make(64, 4), "conv_bias": make(64),
        "slots": torch.tensor([3, -1, 0], device=device), "tokens_per_sequence": 2,
    }  # fmt: skip
    return {**fused, **convolution, **SIZES, "out": list(parts.values())}


def in_out(place: int, value: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def change(arguments: dict[str, Any]) -> None:
        arguments["out"][place] = value(arguments["out"][place])

    return change


complex128 = lambda tensor: tensor.to(torch.complex128)  # noqa: E731
one_row_less = lambda tensor: tensor[:-1]  # noqa: E731
no_dimensions = lambda tensor: tensor.new_zeros(())  # noqa: E731


def integers(arguments: dict[str, Any]) -> None:
    arguments.update(mixed_qkvz=arguments["mixed_qkvz"].int(), out=None)


E, T = ValueError, TypeError
# Function, what is wrong, the error, the argument it must name, the change that makes it wrong.
TABLE = [
    *[
        (function, f"{name}: {what}", error, name, replaced(name, change))
        for function, names in {
            "split": ("mixed_qkvz", "mixed_ba"), "merge": PARTS, "views": ("mixed_qkvz", "mixed_ba"),
            "convolve": ("mixed_qkvz", "mixed_ba"),
        }.items()
        for name in names
        for what, error, change in (
            ("wrong rank", E, one_rank_more),
            ("no dimensions", E, no_dimensions),
            ("wrong row length", E, one_wider),
            ("last dimension not contiguous", E, every_second),
            ("not a tensor", T, as_list),
            ("None", T, None),
            ("sparse", T, sparse),
            ("16-byte dtype", T, complex128),
        )
    ],
    *[
        (function, f"{name} {value!r}", error, name, replaced(name, value))
        for function in FUNCTIONS
        for name in SIZES
        for value, error in ((0, E), (-2, E), (4.0, T), ("4", T))
    ],
    # Too large for the 64 bits in which torch hands integers to an op.
    *[
        (function, f"{name} {exponent} bits", E, name, replaced(name, 6 * 2**exponent))
        for function in FUNCTIONS
        for name in ("num_heads_v", "head_qk", "head_v")
        for exponent in (60, 70)
    ],
    *[(function, "heads no multiple", E, "num_heads_v", replaced("num_heads_v", 5)) for function in FUNCTIONS],
    *[(function, "fewer V heads", E, "num_heads_v", replaced("num_heads_v", 1)) for function in FUNCTIONS],
    *[(function, "sizes past 2**31", E, "head_v", replaced("head_v", 2**40)) for function in FUNCTIONS],
    *[(function, "head_qk past 2**31", E, "head_qk", replaced("head_qk", 2**30)) for function in FUNCTIONS],
    *[
        (function, f"layout {value!r}", error, "layout", replaced("layout", value))
        for function in ("split", "merge", "convolve")
        for value, error in (("blocked", E), ("", E), (None, T), (1, T))
    ],
    *[
        (function, f"plan {value!r}", T, "plan", replaced("plan", value))
        for function, other in (
            ("split", ConvPlan(*[1] * 6)), ("merge", ConvPlan(*[1] * 6)), ("convolve", SplitPlan(1, 0, 1, 1, 4)),
        )
        for value in (other, [1, 0, 1, 1, 4, 0], "fast")
    ],
    # Its kernel does not wait for the one ahead.
    *[
        (function, "plan by runs, dependent", E, "plan", replaced("plan", SplitPlan(3, 2, 1, 1, 4, True)))
        for function in ("split", "merge")
    ],
    # A plan that leaves rows out, or whose steps are no tile's.
    *[
        (function, f"plan {value}", E, "plan", replaced("plan", value))
        for function, values in (
            ("split", (SplitPlan(1, 0, 1, 1, 4), SplitPlan(2, 2, 1, 1, 4), SplitPlan(99, 0, 3, 1, 4))),
            ("merge", (SplitPlan(1, 0, 1, 1, 4), SplitPlan(2, 2, 1, 1, 4), SplitPlan(99, 0, 1, 1, 0))),
            ("convolve", (ConvPlan(1, 1, 16, 16, 4), ConvPlan(999, 1, 48, 16, 4), ConvPlan(999, 3, 16, 16, 4))),
        )
        for value in values
    ],
    *[
        (function, "rows of mixed_ba differ", E, "mixed_ba", replaced("mixed_ba", one_row_less))
        for function in ("split", "views", "convolve")
    ],
    *[
        (function, "mixed devices", E, "mixed_ba", replaced("mixed_ba", elsewhere))
        for function in ("split", "views", "convolve")
    ],
    *[("merge", f"{name}: fewer rows", E, name, replaced(name, one_row_less)) for name in PARTS[1:]],
    *[("merge", f"{name}: other device", E, name, replaced(name, elsewhere)) for name in PARTS[1:]],
    ("merge", "z of another dtype", T, "z", replaced("z", in_half)),
    ("merge", "a of another dtype", T, "a", replaced("a", in_half)),
    *[
        (function, f"out {name}: {what}", error, name, in_out(place, change))
        for function, names in {
            "split": PARTS, "convolve": PARTS, "merge": ("mixed_qkvz", "mixed_ba"),
        }.items()
        for place, name in enumerate(names)
        for what, error, change in (
            ("wrong shape", E, one_wider),
            ("fewer rows", E, one_row_less),
            ("wrong rank", E, one_rank_more),
            ("not contiguous", E, every_second),
            ("overlapping rows", E, overlapping),
            ("other device", E, elsewhere),
            ("sparse", T, sparse),
            ("not a tensor", T, as_list),
            ("needs a gradient", E, needing_grad),
            ("wrong dtype", T, in_half),
        )
    ],
    *[
        (function, f"out: {what}", T, "out", replaced("out", change))
        for function in ("split", "merge", "convolve")
        for what, change in (
            ("one too few", lambda out: out[:-1]), ("one too many", lambda out: [*out, out[0]]),
            ("one tensor", lambda out: out[0]), ("a dict", lambda out: dict(enumerate(out))),
        )
    ],
    ("split", "mixed_qkvz needs a gradient with out=", E, "out", replaced("mixed_qkvz", needing_grad)),
    ("split", "mixed_ba needs a gradient with out=", E, "out", replaced("mixed_ba", needing_grad)),
    *[("merge", f"{name} needs a gradient with out=", E, "out", replaced(name, needing_grad)) for name in PARTS],
    *[
        ("convolve", f"{name} needs a gradient", E, name, replaced(name, needing_grad))
        for name in ("mixed_qkvz", "mixed_ba", "conv_state", "conv_weight", "conv_bias")
    ],
    *[
        ("convolve", f"{name}: {what}", error, name, replaced(name, change))
        for name, what, error, change in (
            ("conv_state", "rank", E, lambda s: s[0]),
            ("conv_state", "channels", E, lambda s: s[:, :-1]),
            ("conv_state", "taps", E, one_wider),
            ("conv_state", "expanded", E, lambda s: s[:1].expand(5, -1, -1)),
            ("conv_state", "slots that overlap", E, lambda s: s.flatten().as_strided((5, 64, 3), (191, 3, 1))),
            ("conv_state", "channels that overlap", E, lambda s: s.flatten().as_strided((5, 64, 3), (192, 2, 1))),
            ("conv_state", "dtype", T, lambda s: s.double()),
            ("conv_state", "device", E, elsewhere),
            ("conv_state", "not a tensor", T, as_list),
            ("conv_state", "sparse", T, sparse),
            ("conv_weight", "width 5", E, one_wider),
            ("conv_weight", "width 1", E, lambda w: w[:, :1]),
            ("conv_weight", "rank", E, one_rank_more),
            ("conv_weight", "channels", E, one_row_less),
            ("conv_weight", "dtype", T, lambda w: w.long()),
            ("conv_weight", "device", E, elsewhere),
            ("conv_bias", "length", E, one_row_less),
            ("conv_bias", "rank", E, one_rank_more),
            ("conv_bias", "not contiguous", E, every_second),
            ("conv_bias", "dtype", T, lambda b: b.double()),
            ("conv_bias", "device", E, elsewhere),
            ("conv_bias", "a number", T, 0.5),
            ("slots", "dtype", T, lambda s: s.short()),
            ("slots", "floats", T, lambda s: s.float()),
            ("slots", "rank", E, lambda s: s[:, None]),
            ("slots", "not contiguous", E, every_second),
            ("slots", "device", E, elsewhere),
            ("slots", "a list", T, as_list),
            ("tokens_per_sequence", "0", E, 0),
            ("tokens_per_sequence", "negative", E, -1),
            ("tokens_per_sequence", "float", T, 2.0),
            ("activation", "gelu", E, "gelu"),
            ("activation", "True", E, True),
        )
    ],
    ("convolve", "more tokens than rows", E, "mixed_qkvz", replaced("tokens_per_sequence", 3)),
    ("convolve", "mixed_qkvz of integers", T, "mixed_qkvz", integers),
]  # fmt: skip


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
    before += kept(arguments)
    with pytest.raises((ValueError, TypeError)) as raised:
        FUNCTIONS[function](**arguments)
    assert type(raised.value) is error, raised.value
    said, _, was = str(raised.value).partition(" must be ")
    # A formula of sizes names several arguments; what is wrong of all results names out.
    assert name in re.findall(r"\w+", said) or said == "out.dtype", raised.value
    assert ", got " in was, raised.value
    assert_kept(before)


def test_the_right_arguments_of_the_table_are_taken(device) -> None:
    for function in FUNCTIONS:
        FUNCTIONS[function](**good(function, device))


def op_arguments(function: str, device: torch.device) -> list[Any]:
    arguments = good(function, device)
    out = arguments.pop("out", [])
    sizes = [arguments.pop(name) for name in SIZES]
    tokens = [arguments.pop("tokens_per_sequence"), True] if function == "convolve" else []
    return [*arguments.values(), *out, *tokens, *sizes, "interleaved"]


OPS = {"split": "split_into", "merge": "merge_into", "convolve": "split_conv1d_update"}


@pytest.mark.parametrize("function", OPS)
@pytest.mark.parametrize(
    ("name", "place", "change"),
    [
        ("num_heads_v", -4, lambda _: 5),
        ("layout", -1, lambda _: "blocked"),
        ("mixed_", 0, one_wider),
        ("mixed_", 0, every_second),
    ],
    ids=["heads", "layout", "row length", "strides"],
)
def test_the_ops_check_for_those_who_call_them_directly(device, function, name, place, change) -> None:
    arguments = op_arguments(function, device)
    getattr(torch.ops.gdn_split, OPS[function])(*arguments)
    arguments[place] = change(arguments[place])
    before = [(tensor, tensor.clone()) for tensor in arguments if isinstance(tensor, torch.Tensor)]
    with pytest.raises((ValueError, TypeError), match=rf"{name}\w* must be .*, got"):
        getattr(torch.ops.gdn_split, OPS[function])(*arguments)
    assert all(torch.equal(tensor, copy) for tensor, copy in before)


# Layouts mixed up


def transposed(*names: str) -> Callable[[dict[str, Any]], None]:
    """Swap the last two dimensions of these arguments."""

    def change(arguments: dict[str, Any]) -> None:
        for name in names:
            arguments[name] = arguments[name].mT.contiguous()

    return change


def swapped(one: str, other: str) -> Callable[[dict[str, Any]], None]:
    def change(arguments: dict[str, Any]) -> None:
        arguments[one], arguments[other] = arguments[other], arguments[one]

    return change


MIX_UPS = [
    *[
        (function, swapped("mixed_qkvz", "mixed_ba"), "mixed_qkvz and mixed_ba must be .*112.*12.*, got them swapped")
        for function in ("split", "views", "convolve")
    ],
    *[
        (function, swapped("num_heads_qk", "num_heads_v"), r"num_heads_v must be .*, got 2 \(are the two swapped\?\)")
        for function in FUNCTIONS
    ],
    ("split", transposed("mixed_qkvz", "mixed_ba"), r"got .*\[112, 6\].*; mixed_qkvz.T would fit"),
    (
        "split",
        replaced("mixed_qkvz", lambda x: x[None]),
        r"got .*\[1, 6, 112\].*; mixed_qkvz.flatten\(0, 1\) would fit",
    ),
    ("split", replaced("mixed_ba", lambda x: x[:, None]), r"got .*\[6, 1, 12\].*; mixed_ba.squeeze\(1\) would fit"),
    ("merge", replaced("z", lambda z: z.flatten(1)), r"got .*\[6, 48\].*; z.unflatten\(1, \(6, 8\)\) would fit"),
    ("convolve", transposed("conv_weight"), r"got .*\[4, 64\].*; conv_weight.T would fit"),
    ("convolve", replaced("conv_weight", lambda w: w[:, None]), r"\[64, 1, 4\].*; conv_weight.squeeze\(1\) would fit"),
    ("convolve", transposed("conv_state"), r"got .*\[5, 3, 64\].*; conv_state.transpose\(1, 2\) would fit"),
    ("convolve", replaced("conv_state", one_wider), r"got .*\[5, 64, 4\].*; conv_state\[..., 1:\] would fit"),
    ("split", in_out(1, lambda z: z.flatten(1)), r"out.z must .* got .*; out.z.unflatten\(1, \(6, 8\)\) would fit"),
]


@pytest.mark.parametrize(("function", "change", "said"), MIX_UPS)
def test_an_argument_of_another_layout_is_told_what_would_fit(device, function, change, said) -> None:
    arguments = good(function, device)
    change(arguments)
    with pytest.raises(ValueError, match=said):
        FUNCTIONS[function](**arguments)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_array_of_another_library_is_named_in_one_line(device, function) -> None:
    for name, right in good(function, device).items():
        if isinstance(right, torch.Tensor) or name == "out":
            arguments = good(function, device)
            arguments[name] = numpy.zeros((300, 12288))
            with pytest.raises(
                TypeError, match=rf"{name} must be .*, got a numpy ndarray float64 \[300, 12288\]"
            ) as raised:
                FUNCTIONS[function](**arguments)
            assert len(str(raised.value)) < 200


# Memory that is shared


def names_of_tensors(function: str) -> list[str]:
    """What a function reads, then what it writes."""
    read = {"split": ["mixed_qkvz", "mixed_ba"], "merge": [*PARTS]}.get(function)
    read = read or ["mixed_qkvz", "mixed_ba", "conv_weight", "conv_bias", "slots", "conv_state"]
    return read + [f"out.{name}" for name in (("mixed_qkvz", "mixed_ba") if function == "merge" else PARTS)]


def tensors_by_name(function: str, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    out = dict(zip([n for n in names_of_tensors(function) if "." in n], arguments["out"], strict=True))
    return {name: out[name] if name in out else arguments[name] for name in names_of_tensors(function)}


PAIRS = [
    (function, one, other)
    for function in OPS
    for place, one in enumerate(names_of_tensors(function))
    for other in names_of_tensors(function)[:place]
    if "." in one or one == "conv_state"
]


@pytest.mark.parametrize("compiled", [False, True], ids=["api", "op"])
@pytest.mark.parametrize(("function", "one", "other"), PAIRS)
def test_a_tensor_to_write_that_shares_a_byte_with_another_is_refused(device, function, one, other, compiled) -> None:
    arguments = good(function, device)
    arguments["slots"] = arguments.get("slots", torch.zeros(1)).long()
    named = tensors_by_name(function, arguments)
    # The one begins in the last element of the other, in one allocation.
    before, behind = named[other], named[one]
    allocation = torch.zeros(8 * (before.numel() + behind.numel()), dtype=torch.uint8, device=device)

    def place(tensor: torch.Tensor, byte: int) -> torch.Tensor:
        room = allocation[byte : byte + tensor.numel() * tensor.element_size()].view(tensor.dtype)
        return room.view(tensor.shape).copy_(tensor)

    size = max(before.element_size(), behind.element_size())
    for overlap, refused in ((size, True), (0, False)):
        end = -(-before.numel() * before.element_size() // 8) * 8
        replacements = {other: place(before, 0), one: place(behind, end - overlap)}
        if "slots" in replacements:
            replacements["slots"].copy_(torch.tensor([3, -1, 0]))
        call = {**arguments, **{name: t for name, t in replacements.items() if "." not in name}}
        call["out"] = [replacements.get(n, t) for n, t in named.items() if "." in n]
        if function != "convolve":
            del call["slots"]
        content = allocation.clone()
        run = (lambda: FUNCTIONS[function](**call)) if not compiled else (lambda: call_op(function, call))  # noqa: B023
        if refused:
            with pytest.raises(ValueError, match=r"must be a tensor that shares no memory with \w+.*, got") as raised:
                run()
            assert one in str(raised.value)
            assert other in str(raised.value)
            assert torch.equal(allocation, content)
        else:
            run()


def call_op(function: str, arguments: dict[str, Any]) -> None:
    out = arguments["out"]
    tensors = [value for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    tokens = [arguments["tokens_per_sequence"], True] if function == "convolve" else []
    sizes = [arguments[name] for name in SIZES]
    getattr(torch.ops.gdn_split, OPS[function])(*tensors, *out, *tokens, *sizes, "interleaved")


def test_parts_that_are_columns_of_one_tensor_are_written(device) -> None:
    arguments = good("split", device)
    wanted = FUNCTIONS["split"](**{**arguments, "out": None})
    wide = torch.zeros(ROWS, 64 + 48 + 6 + 6, device=device)
    mixed_qkv, z, b, a = wide.split([64, 48, 6, 6], dim=1)
    got = FUNCTIONS["split"](**{**arguments, "out": [mixed_qkv, z.unflatten(1, (6, 8)), b, a]})
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


def test_a_state_in_pages_of_a_larger_tensor_is_taken_in_any_order_of_its_dimensions(device) -> None:
    arguments = good("convolve", device)
    for strides in ((200, 3, 1), (200, 1, 64), (1, 15, 5), (3, 15, 1), (64, 1, 320)):
        room = torch.zeros(5 * 200, device=device)
        arguments["conv_state"] = room.as_strided((5, 64, 3), strides)
        FUNCTIONS["convolve"](**arguments)
