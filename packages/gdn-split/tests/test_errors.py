"""Does bad input say which argument, what it must be and what it was, and write nothing? One table."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn_split
from gdn_split.plan import ConvPlan, SplitPlan

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


def replaced(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Change one argument: to a value, or to what a function makes of the right one."""

    def change(arguments: dict[str, Any]) -> None:
        arguments[name] = value(arguments[name]) if callable(value) else value

    return change


def in_out(place: int, value: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def change(arguments: dict[str, Any]) -> None:
        arguments["out"][place] = value(arguments["out"][place])

    return change


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a tensor whose last dimension is not contiguous."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu() if tensor.is_cuda else tensor.to("meta")


def overlapping(tensor: torch.Tensor) -> torch.Tensor:
    strides = (tensor.stride(0) - 1, *tensor.stride()[1:])
    return torch.zeros(tensor.numel(), device=tensor.device).as_strided(tensor.shape, strides)


def needing_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_()


complex128 = lambda tensor: tensor.to(torch.complex128)  # noqa: E731
one_wider = lambda tensor: torch.cat([tensor, tensor[..., :1]], dim=-1)  # noqa: E731
one_row_less = lambda tensor: tensor[:-1]  # noqa: E731
one_rank_more = lambda tensor: tensor[None]  # noqa: E731
sparse = lambda tensor: tensor.to_sparse()  # noqa: E731
as_list = lambda tensor: tensor.tolist()  # noqa: E731
in_half = lambda tensor: tensor.half()  # noqa: E731


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


def snapshot(arguments: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every tensor among the arguments, with a copy of its bytes."""
    values = [*arguments.values(), *(arguments["out"] if isinstance(arguments.get("out"), (list, tuple)) else ())]
    found = [v for v in values if isinstance(v, torch.Tensor) and v.device.type != "meta" and v.layout == torch.strided]
    return [(tensor, tensor.detach().clone()) for tensor in found]


@pytest.mark.parametrize(
    ("function", "error", "name", "change"),
    [pytest.param(function, *rest, id=f"{function}-{what}") for function, what, *rest in TABLE],
)
def test_bad_input_is_named_with_what_it_must_be_and_what_it_was_and_nothing_is_written(
    device, function, error, name, change
) -> None:
    arguments = good(function, device)
    written = list(arguments.get("out") or ())
    change(arguments)
    before = snapshot(arguments) + [(tensor, tensor.clone()) for tensor in written]
    with pytest.raises((ValueError, TypeError)) as raised:
        FUNCTIONS[function](**arguments)
    assert type(raised.value) is error, raised.value
    said, _, was = str(raised.value).partition(" must be ")
    # A formula of sizes names several arguments; what is wrong of all results names out.
    assert name in re.findall(r"\w+", said) or said == "out.dtype", raised.value
    assert ", got " in was, raised.value
    assert all(torch.equal(tensor, copy) for tensor, copy in before)


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
