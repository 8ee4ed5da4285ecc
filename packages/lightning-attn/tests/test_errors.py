"""Does bad input say which argument, what it must be and what it was, and write nothing? One table.

Then what only memory tells: named on a CPU and inside ``validate_values``, harmless elsewhere.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import numpy
import pytest
import torch

import lightning_attn
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
)
from lightning_attn import Snapshots
from lightning_attn.plan import DecodePlan, PrefillPlan

# 3 sequences: of 2, 0 and 3 of 6 tokens, of 1, or of 4 drafts. 2 QK heads of 16 elements and 4 V heads of 24; 5 slots.
H, HQK, HV, D, E, SLOTS = 4, 2, 4, 16, 24, 5
FUNCTIONS = {
    "prefill": lightning_attn.lightning_attention,
    "varlen": lightning_attn.lightning_attention_varlen,
    "decode": lightning_attn.lightning_decode,
    "drop-in": lightning_attn.linear_decode_forward_triton,
    "verify": lightning_attn.lightning_verify,
    "commit": lightning_attn.lightning_commit,
}
LEADING = {"varlen": (6,), "decode": (3,), "verify": (3, 4), "commit": (3, 4)}
# The arguments of each kind, by function.
QKV = {name: ("k", "v") if name == "commit" else ("q", "k", "v") for name in FUNCTIONS}
POOL = {"varlen": "state_pool", "decode": "state_pool", "drop-in": "kv_caches", "verify": "state_pool"}
POOL["commit"] = "state_pool"
SLOTS_OF = {name: "slot_idx" if name == "drop-in" else "slots" for name in POOL}
SLOPES_OF = {name: {"prefill": "ed", "drop-in": "slope_rate"}.get(name, "slopes") for name in FUNCTIONS}
WITH_OUT = ("varlen", "decode", "verify")
WITH_SCALE = ("prefill", "varlen", "decode", "verify")
# A plan of nothing but zeros reaches no element.
NO_PREFILL, NO_DECODE = (kind(*[0] * len(fields(kind))) for kind in (PrefillPlan, DecodePlan))
PLAN_OF = {"prefill": PrefillPlan, "varlen": PrefillPlan, "decode": DecodePlan, "verify": DecodePlan,
           "commit": DecodePlan}  # fmt: skip


def good(function: str, device: torch.device) -> dict[str, Any]:
    """Arguments that are right, everything optional given."""

    def make(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(size, device=device).to(dtype)

    def integers(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    slopes = torch.rand(H, device=device)
    if function == "prefill":
        return {
            "q": make(2, H, 5, D), "k": make(2, H, 5, D), "v": make(2, H, 5, E), "ed": slopes, "block_size": 256,
            "kv_history": make(2, H, D, E, dtype=torch.float32), "scale": 1.0,
        }  # fmt: skip
    pool, slots = make(SLOTS, H, D, E, dtype=torch.float32), integers(3, -1, 0)
    if function == "drop-in":
        return {
            "q": make(3, H, 1, D), "k": make(3, H, 1, D), "v": make(3, H, 1, E), "kv_caches": pool,
            "slope_rate": slopes, "slot_idx": slots, "BLOCK_SIZE": 32,
        }  # fmt: skip
    leading = LEADING[function]
    found = {
        "q": make(*leading, HQK, D), "k": make(*leading, HQK, D), "v": make(*leading, HV, E), "slopes": slopes,
        "state_pool": pool, "slots": slots,
    }  # fmt: skip
    if function == "commit":
        del found["q"]
        return {**found, "accepted": integers(4, 0, 2)}
    found.update(out=make(*leading, H, E), scale=1.0)
    if function == "varlen":
        found.update(
            cu_seqlens=integers(0, 2, 2, 5), has_initial_state=torch.tensor([True, False, True], device=device),
            snapshot=Snapshots(integers(1, -1, 3)[:, None], integers(1, -1, 2)[:, None]),
        )  # fmt: skip
    return found


def in_snapshot(field: str, value: Any) -> Change:
    def change(arguments: dict[str, Any]) -> None:
        given = arguments["snapshot"]
        made = value(getattr(given, field)) if callable(value) else value
        arguments["snapshot"] = given._replace(**{field: made})

    return change


def with_drafts(count: int) -> Change:
    """``count`` draft tokens of each sequence in all tensors that hold some."""

    def change(arguments: dict[str, Any]) -> None:
        for name in ("q", "k", "v", "out"):
            if name in arguments:
                arguments[name] = arguments[name][:, :1].repeat(1, count, 1, 1)

    return change


def with_head_size(names: tuple[str, ...], size: int) -> Change:
    """Another head size wherever D (q, k) or E (v) stands, the pool included."""

    def change(arguments: dict[str, Any]) -> None:
        for name in names:
            arguments[name] = arguments[name][..., :1].repeat(*[1] * (arguments[name].ndim - 1), size)
        d, e = arguments["k"].shape[-1], arguments["v"].shape[-1]
        for name in ("state_pool", "kv_caches", "kv_history"):
            if name in arguments:
                arguments[name] = arguments[name].new_zeros((*arguments[name].shape[:2], d, e))
        if "out" in arguments:
            arguments["out"] = arguments["out"].new_zeros((*arguments["out"].shape[:-1], e))

    return change


def more_v_heads(arguments: dict[str, Any]) -> None:
    """3 heads of v: neither a multiple nor a divisor of the 2 of q and k."""
    arguments["v"] = arguments["v"][..., :3, :]


def all_in(dtype: torch.dtype) -> Change:
    def change(arguments: dict[str, Any]) -> None:
        for name in ("q", "k", "v", "out"):
            if name in arguments:
                arguments[name] = arguments[name].to(dtype)

    return change


in_int16 = lambda tensor: tensor.short()  # noqa: E731
as_float = lambda tensor: tensor.float()  # noqa: E731
as_int = lambda tensor: tensor.int()  # noqa: E731
expanded = lambda tensor: tensor[:1].expand_as(tensor)  # noqa: E731

V, T = ValueError, TypeError
NO_TENSOR = (("not a tensor", T, as_list), ("None", T, None), ("sparse", T, sparse))
# Function, what is wrong, the error, the argument it must name, the change that makes it wrong.
TABLE = [
    *[
        (function, f"{name}: {what}", error, name, replaced(name, change))
        for function, names in QKV.items()
        for name in names
        for what, error, change in (
            *NO_TENSOR, ("wrong rank", V, one_rank_more), ("float64", T, in_double), ("integers", T, as_int),
        )
    ],
    *[
        (function, f"{name}: {what}", error, name, replaced(name, change))
        for function, names in QKV.items()
        for name in names[1:]
        for what, error, change in (
            ("another dtype", T, in_half), ("another device", V, elsewhere), ("other rows", V, one_less),
        )
    ],
    *[
        (function, "k: another head size", V, "k", replaced("k", one_wider))
        for function in FUNCTIONS
        if function != "commit"
    ],
    *[
        (function, "k: other heads", V, "k", replaced("k", lambda k: k.repeat_interleave(2, dim=-2)))
        for function in ("varlen", "decode", "verify")
    ],
    *[
        (function, f"{name}: other heads", V, name, replaced(name, lambda x: x[:, :2]))
        for function in ("prefill", "drop-in")
        for name in ("k", "v")
    ],
    *[
        (function, "v: heads that q's neither divide nor multiply", V, "v", more_v_heads)
        for function in ("varlen", "decode", "verify", "commit")
    ],
    *[
        (function, f"{names} of {size} elements", V, names[0], with_head_size(names, size))
        for function in FUNCTIONS
        for names in (("k",) if function == "commit" else ("q", "k"), ("v",))
        for size in (0, 1, 15, 257, 512)
    ],
    *[(function, "all in float64", T, QKV[function][0], all_in(torch.float64)) for function in FUNCTIONS],
    *[
        ("prefill", f"{name}: other tokens", V, name, replaced(name, lambda x: x[:, :, :-1]))
        for name in ("k", "v")
    ],
    *[
        ("drop-in", f"{name}: 2 tokens", V, name, replaced(name, lambda x: torch.cat([x, x], dim=2)))
        for name in ("q", "k", "v")
    ],
    *[
        (function, f"{name}: {what}", error, name, replaced(name, change))
        for function, name in SLOPES_OF.items()
        for what, error, change in (
            *NO_TENSOR, ("one too few", V, one_less), ("twice as many", V, lambda s: torch.stack([s, s])),
            ("bfloat16", T, lambda s: s.bfloat16()), ("float64", T, in_double), ("integers", T, as_int),
            ("not contiguous", V, every_second), ("another device", V, elsewhere), ("one number", T, 0.5),
        )
    ],
    *[
        (function, f"{name}: {what}", error, name, replaced(name, change))
        for function, name in POOL.items()
        for what, error, change in (
            *NO_TENSOR, ("rank", V, lambda p: p[0]), ("heads", V, lambda p: p[:, :-1]),
            ("D", V, lambda p: p[:, :, :-1]), ("E", V, one_wider), ("D and E exchanged", V, lambda p: p.mT),
            ("float64", T, in_double), ("integers", T, as_int), ("expanded", V, expanded),
            ("overlapping slots", V, overlapping), ("another device", V, elsewhere),
        )
    ],
    *[
        (function, f"{name}: {what}", error, name, replaced(name, change))
        for function, name in [
            *SLOTS_OF.items(), ("varlen", "cu_seqlens"), ("commit", "accepted"),
        ]
        for what, error, change in (
            *NO_TENSOR, ("int16", T, in_int16), ("floats", T, as_float), ("rank", V, lambda x: x[:, None]),
            ("one too few", V, one_less), ("not contiguous", V, every_second), ("another device", V, elsewhere),
            ("a number", T, 3),
        )
    ],
    *[
        ("varlen", f"has_initial_state: {what}", error, "has_initial_state", replaced("has_initial_state", change))
        for what, error, change in (
            ("None", T, None), ("a list", T, as_list), ("an int", T, 1), ("int32", T, as_int),
            ("one too few", V, one_less), ("rank", V, lambda x: x[:, None]), ("another device", V, elsewhere),
            ("sparse", T, sparse),
        )
    ],
    *[
        ("varlen", f"snapshot: {what}", T, "snapshot", replaced("snapshot", change))
        for what, change in (
            ("one tensor", lambda s: s.positions), ("positions alone", lambda s: (s.positions,)), ("a number", 3),
            ("a dict", lambda s: s._asdict()),
        )
    ],
    *[
        ("varlen", f"snapshot.{field}: {what}", error, field, in_snapshot(field, change))
        for field in ("positions", "slots")
        for what, error, change in (
            *NO_TENSOR, ("int16", T, in_int16), ("floats", T, as_float), ("rank", V, lambda x: x[:, 0]),
            ("one sequence too few", V, one_less), ("another device", V, elsewhere),
        )
    ],
    ("varlen", "snapshot.slots: one too many", V, "slots", in_snapshot("slots", one_wider)),
    *[
        (function, f"out: {what}", error, "out", replaced("out", change))
        for function in WITH_OUT
        for what, error, change in (
            ("wrong shape", V, one_wider), ("fewer rows", V, one_less), ("wrong rank", V, one_rank_more),
            ("overlapping rows", V, overlapping), ("expanded", V, expanded), ("another device", V, elsewhere),
            ("sparse", T, sparse), ("not a tensor", T, as_list), ("wrong dtype", T, in_half),
            ("needs a gradient", V, needing_grad),
        )
    ],
    *[
        ("prefill", f"kv_history: {what}", error, "kv_history", replaced("kv_history", change))
        for what, error, change in (
            ("rank", V, one_rank_more), ("batch", V, one_less), ("heads", V, lambda x: x[:, :-1]),
            ("E", V, one_wider), ("D", V, lambda x: x[:, :, :-1]), ("bfloat16", T, lambda x: x.bfloat16()),
            ("float64", T, in_double), ("another device", V, elsewhere), ("not a tensor", T, as_list),
            ("sparse", T, sparse),
        )
    ],
    *[
        (function, f"scale {value!r}", T, "scale", replaced("scale", value))
        for function in WITH_SCALE
        for value in ("1", None, [1.0])
    ],
    *[
        (function, f"{name} {value!r}", T, name, replaced(name, value))
        for function, name in (("prefill", "block_size"), ("drop-in", "BLOCK_SIZE"))
        for value in (2.5, "256", None)
    ],
    *[
        (function, "17 drafts", V, QKV[function][0], with_drafts(17))
        for function in ("verify", "commit")
    ],
    *[
        (function, f"plan: {what}", error, "plan", replaced("plan", value))
        for function, kind in PLAN_OF.items()
        for what, error, value in (
            ("a name", T, "fast"), ("numbers", T, [1, 2, 3]),
            ("of another kind", T, NO_DECODE if kind is PrefillPlan else NO_PREFILL),
            ("that reaches nothing", V, NO_PREFILL if kind is PrefillPlan else NO_DECODE),
        )
    ],
    *[
        (function, f"{name} needs a gradient", V, name, replaced(name, needing_grad))
        for function in POOL
        for name in (*QKV[function], POOL[function], SLOPES_OF[function])
    ],
    ("prefill", "ed needs a gradient", V, "ed", replaced("ed", needing_grad)),
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
    with refused(error, name):
        FUNCTIONS[function](**arguments)
    assert_kept(before)


def test_a_plan_for_hopper_is_refused_for_float32_alone(device) -> None:
    plan = PrefillPlan(64, 64, 0, 4, 4, block_d=64, hopper=True)
    slopes = torch.ones(1, device=device)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.zeros(1, 1, 2, 64, dtype=dtype, device=device)
        says = pytest.raises(ValueError, match=r"^plan must be without hopper, or with bf16x6, for torch\.float32, got")
        with says if dtype == torch.float32 else nullcontext():
            lightning_attn.lightning_attention(x, x, x, slopes, plan=plan)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_right_arguments_of_the_table_are_taken(device, function) -> None:
    FUNCTIONS[function](**good(function, device))
    with validate_values():
        FUNCTIONS[function](**good(function, device))


@pytest.mark.parametrize("function", [*POOL])
def test_functions_that_keep_a_state_refuse_gradients_and_say_how_to_go_on(device, function) -> None:
    arguments = good(function, device)
    pool = POOL[function]
    arguments[pool] = needing_grad(arguments[pool])
    with pytest.raises(ValueError, match=rf"^{pool} must be without gradient \(call under torch.no_grad\(\)"):
        FUNCTIONS[function](**arguments)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            FUNCTIONS[function](**arguments)


def test_decays_that_require_a_gradient_are_refused_and_taken_without_one(device) -> None:
    arguments = good("prefill", device)
    arguments["ed"].requires_grad_()
    with pytest.raises(ValueError, match=r"^ed must be without gradient"):
        lightning_attn.lightning_attention(**arguments)
    with torch.no_grad():
        lightning_attn.lightning_attention(**arguments)


def test_whether_states_exist_must_be_said(device) -> None:
    arguments = good("varlen", device)
    del arguments["has_initial_state"]
    with pytest.raises(TypeError, match="has_initial_state"):
        lightning_attn.lightning_attention_varlen(**arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("num_heads", {"num_heads": 0}, V),
        ("num_heads", {"num_heads": -8}, V),
        ("num_heads", {"num_heads": 8.0}, T),
        ("num_heads", {"num_heads": "8"}, T),
        ("num_heads", {"num_heads": None}, T),
        ("num_layers", {"num_heads": 8, "layer_idx": 3}, V),
        ("layer_idx", {"num_heads": 8, "num_layers": 3}, V),
        ("layer_idx", {"num_heads": 8, "layer_idx": -1, "num_layers": 3}, V),
        ("layer_idx", {"num_heads": 8, "layer_idx": 3, "num_layers": 3}, V),
        ("layer_idx", {"num_heads": 8, "layer_idx": 1.5, "num_layers": 3}, T),
        ("num_layers", {"num_heads": 8, "layer_idx": 0, "num_layers": 3.0}, T),
        ("num_layers", {"num_heads": 8, "layer_idx": 0, "num_layers": 0}, V),
        ("family", {"num_heads": 8, "layer_idx": 0, "num_layers": 3, "family": "ling"}, V),
        ("family", {"num_heads": 8, "family": "ling"}, V),
        ("family", {"num_heads": 8, "family": None}, T),
    ],
    ids=str,
)
def test_bad_arguments_of_slopes_are_named(name, arguments, error) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"^{name} must be .*, got ") as raised:
        lightning_attn.slopes(**arguments)
    assert type(raised.value) is error


def tensor_of(numbers: list[Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda given: torch.tensor(numbers, dtype=given.dtype, device=given.device).view(given.shape)


# What only device memory tells. Function, what is wrong, the argument named, the change.
VALUES = [
    *[
        (function, f"{name} {bad}", name, replaced(name, tensor_of([0.5, 0.0, bad, 0.1])))
        for function, name in SLOPES_OF.items()
        for bad in (-1e-6, math.nan, math.inf, -math.inf)
    ],
    *[
        (function, f"{name} {slots}", name, replaced(name, tensor_of(slots)))
        for function, name in SLOTS_OF.items()
        for slots in ([3, -2, 0], [3, SLOTS, 0], [3, 0, 3], [2**31 - 1, -1, 0], [-(2**31), 1, 0])
    ],
    *[
        ("varlen", f"cu_seqlens {ends}", "cu_seqlens", replaced("cu_seqlens", tensor_of(ends)))
        for ends in ([1, 2, 2, 5], [-1, 2, 2, 5], [0, 3, 2, 5], [0, 2, 2, 7], [0, 2, 2, 2**31 - 1], [0, -2, 2, 5])
    ],
    *[
        ("varlen", f"snapshot positions {positions}", "positions", in_snapshot("positions", tensor_of(positions)))
        for positions in ([0, -1, 3], [3, -1, 3], [1, -1, 4], [1, -1, -2], [1, 1, 3], [2**31 - 1, -1, 3])
    ],
    *[
        ("varlen", f"snapshot slots {slots}", "slots", in_snapshot("slots", tensor_of(slots)))
        for slots in ([1, -1, 1], [3, -1, 2], [1, -1, SLOTS], [-2, -1, 2])
    ],
    *[
        ("commit", f"accepted {accepted}", "accepted", replaced("accepted", tensor_of(accepted)))
        for accepted in ([4, 5, 0], [-1, 4, 0], [2**31 - 1, 0, 0], [0, 0, -(2**31)])
    ],
]


@pytest.mark.parametrize(
    ("function", "name", "change"),
    [pytest.param(function, *rest, id=f"{function}-{what}") for function, what, *rest in VALUES],
)
def test_what_only_memory_tells_is_named_on_a_cpu_or_if_asked_for_before_anything_is_written(
    device, function, name, change
) -> None:
    arguments = good(function, device)
    change(arguments)
    before = kept(arguments)
    for context in (validate_values, *([nullcontext] if device.type == "cpu" else [])):
        with context(), pytest.raises(ValueError) as raised:
            FUNCTIONS[function](**arguments)
        said, _, was = str(raised.value).partition(" must be ")
        assert name in re.findall(r"[a-z_]+", said), raised.value
        assert ", got " in was, raised.value
        assert_kept(before)


def low_32_bits(number: int, dtype: torch.dtype) -> int:
    """A bad value that is a good one where only 32 of its 64 bits are looked at; just a bad one in 32 bits."""
    return number + 2**32 if dtype == torch.int64 else -(2**31) + number


# Without that check, on a GPU or where it is off, such values are clamped. Slots outside the pool: past it, before it,
# at the ends of 32 and 64 bits.
BAD_SLOTS = {
    torch.int32: [8, -2, 1, -(2**31), 4, 2**31 - 1],
    torch.int64: [8, -(2**40), 1, 2**32 + 2, 4, 2**63 - 1],
}


def varlen(batch, **options: Any) -> torch.Tensor:
    return lightning_attn.lightning_attention_varlen(
        batch.q, batch.k, batch.v, batch.slopes, batch.cu_seqlens, state_pool=batch.pool.tensor, slots=batch.slots,
        **{"has_initial_state": batch.has_initial_state, "out": batch.out.tensor, **options},
    )  # fmt: skip


def commit(batch, tokens: int, accepted: list[int], dtype: torch.dtype = torch.int32) -> None:
    k, v = (x.unflatten(0, (-1, tokens)) for x in (batch.k, batch.v))
    counts = torch.tensor(accepted, dtype=dtype, device=batch.q.device)
    lightning_attn.lightning_commit(k, v, batch.pool.tensor, batch.slots, batch.slopes, counts)


@pytest.mark.parametrize("dtype", BAD_SLOTS, ids=str)
@validate_values(False)
def test_slots_outside_the_pool_are_padding_and_nothing_outside_is_written(tensors, dtype) -> None:
    options = {"slots": BAD_SLOTS[dtype], "num_slots": 8, "index_dtype": dtype, "sizes": (48, 32)}
    batch = tensors.ragged([70, 1, 65, 0, 1, 3], **options, rows_after=1)
    varlen(batch)
    batch.check()
    batch = tensors.ragged([1] * 6, **options)
    lightning_attn.lightning_decode(
        batch.q, batch.k, batch.v, batch.pool.tensor, batch.slots, batch.slopes, out=batch.out.tensor
    )
    batch.check(products=torch.float32)
    batch = tensors.ragged([1] * 6, **options)
    q, k, v = (x[:, :, None] for x in (batch.q, batch.k, batch.v))
    got = lightning_attn.linear_decode_forward_triton(q, k, v, batch.pool.tensor, batch.slopes, batch.slots)
    batch.check_out(got.unflatten(1, (4, 32)), products=torch.float32)
    batch.check(out=False, products=torch.float32)
    batch = tensors.ragged([5] * 6, **options)
    q, k, v, out = (x.unflatten(0, (6, 5)) for x in (batch.q, batch.k, batch.v, batch.out.tensor))
    lightning_attn.lightning_verify(q, k, v, batch.pool.tensor, batch.slots, batch.slopes, out=out)
    batch.check(states=[0] * 6)
    commit(batch, 5, [5, 5, 5, 5, 2, 5], dtype)
    batch.check(states=[5, 5, 5, 5, 2, 5], products=torch.float32)


# cu_seqlens as given for 100 rows and what they are clamped to: a sequence's begin to the rows there are, its end to
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


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("ends", "clamped"), BAD_ENDS.values(), ids=BAD_ENDS)
@validate_values(False)
def test_impossible_sequences_are_clamped_and_nothing_outside_is_read_or_written(tensors, ends, clamped, dtype) -> None:
    """Where no row is claimed twice the result is that of the clamped sequences; otherwise nothing else is touched."""
    count = len(ends) - 1
    whole = clamped or [0, 100] + [100] * (count - 1)
    lengths = [whole[i + 1] - whole[i] for i in range(count)]
    batch = tensors.ragged(lengths, rows_after=100 - sum(lengths), index_dtype=dtype)
    batch.cu_seqlens.copy_(torch.tensor(ends))
    if dtype == torch.int64:
        # Far outside 32 bits, and within the rows where only those are looked at.
        far = batch.cu_seqlens.abs() > 2**30
        batch.cu_seqlens[far] = batch.cu_seqlens[far].sign() * 2**32 + 50
    if clamped is not None:
        varlen(batch)
        batch.check()
        return
    for x in (batch.q, batch.k, batch.v):
        x.copy_(torch.randn(x.shape))
    for slot in batch.slot_of:
        batch.pool.tensor[slot] = 1
    batch.before.copy_(batch.pool.tensor)
    varlen(batch)
    batch.pool.check(written=False)
    batch.out.check(written=False)
    used = batch.pool.tensor[batch.slot_of]
    assert bool(used.isfinite().all()), "a state was made of what lies outside the rows"
    for slot in set(range(batch.num_slots)) - set(batch.slot_of):
        assert_bitwise_equal(batch.pool.tensor[slot], batch.before[slot], what=f"slot {slot}, which is not in use,")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@validate_values(False)
def test_impossible_snapshots_are_left_out_and_touch_nothing(tensors, dtype) -> None:
    ends = torch.iinfo(dtype)
    batch = tensors.ragged([130, 0, 65], slots=[3, 1, 0], num_slots=8, index_dtype=dtype)
    positions = [[64, 131, 0, -2, 1], [1, 0, -1, 64, 2], [ends.max, ends.min, 65, low_32_bits(9, dtype), 3]]
    slots = [[5, 6, 6, 6, 8], [6, 6, 6, 6, 6], [6, 6, 7, 6, low_32_bits(6, dtype)]]
    snapshot = [torch.tensor(rows, dtype=dtype, device=tensors.device) for rows in (positions, slots)]
    varlen(batch, snapshot=Snapshots(*snapshot))
    batch.check(snapshots=[(0, 64, 5), (2, 65, 7)])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@validate_values(False)
def test_counts_that_cannot_be_accepted_leave_the_bits_of_the_state(tensors, dtype) -> None:
    ends = torch.iinfo(dtype)
    batch = tensors.ragged([4] * 8, index_dtype=dtype)
    commit(batch, 4, [5, -1, 4, ends.max, ends.min, 0, 1, low_32_bits(3, dtype)], dtype)
    batch.check(states=[0, 0, 4, 0, 0, 0, 1, 0], products=torch.float32, out=False)


@pytest.mark.parametrize("bad", [-0.5, -1e30, math.nan, math.inf])
@validate_values(False)
def test_decays_that_are_none_harm_no_other_head_and_one_below_0_or_nan_counts_as_0(tensors, bad) -> None:
    batch = tensors.ragged([70, 1], slots=[2, 0])
    batch.slopes[1] = bad
    varlen(batch)
    batch.pool.check(written=False)
    batch.out.check(written=False)
    batch.slopes[1] = 0
    judged = [0, 2, 3] if bad == math.inf else slice(None)
    wanted = batch.attend({0: 70, 1: 1}).out
    tensors.assert_rounded(batch.out.tensor[:, judged], tensors.Wanted(*(x[:, judged] for x in wanted[:3])), apart=(1,))


# What a call writes must be memory that nothing else has. By function: the tensor written, and one that shares its.
SHARED = [
    *[(function, "out", other) for function in WITH_OUT for other in ("q", "v", "slopes", "state_pool", "slots")],
    *[
        (function, POOL[function], other)
        for function in ("varlen", "decode", "drop-in", "commit")
        for other in ("k", "v")
    ],
    *[
        ("varlen", "out", other)
        for other in ("cu_seqlens", "has_initial_state", "snapshot.positions", "snapshot.slots")
    ],
    ("commit", "state_pool", "accepted"),
]


@pytest.mark.parametrize(("function", "written", "other"), SHARED)
def test_a_tensor_that_is_written_and_shares_memory_with_another_is_refused(device, function, written, other) -> None:
    arguments = good(function, device)
    # Of one size, so that a part of q may stand for v's, and the other's elements may stand inside what is written.
    target = arguments[written]
    field = other.partition(".")[2]
    given = getattr(arguments["snapshot"], field) if field else arguments[other]
    room = target.view(-1).view(torch.uint8)
    offset = room.numel() - given.numel() * given.element_size()
    if offset < 0:
        # The other is the larger one: what is written lies in its midst.
        room, target, given = given.view(-1).view(torch.uint8), given, target
        offset = 16
    inside = room[offset : offset + given.numel() * given.element_size()].view(given.dtype).view(given.shape)
    inside.copy_(given)
    if given is arguments.get(written):
        arguments[written] = inside
    elif field:
        arguments["snapshot"] = arguments["snapshot"]._replace(**{field: inside})
    else:
        arguments[other] = inside
    before = kept(arguments)
    with pytest.raises(ValueError) as raised:
        FUNCTIONS[function](**arguments)
    assert re.match(
        rf"{written} must be a tensor that shares no memory with {re.escape(other)}, got ", str(raised.value)
    )
    assert_kept(before)


def test_an_output_may_lie_between_the_columns_of_a_fused_projection(tensors) -> None:
    """Slices of one tensor that interleave and share no element."""
    batch = tensors.ragged([1] * 3, sizes=(16, 16), slots=[0, 2, 1])
    fused = torch.zeros(3, 4 * 4 * 16, dtype=batch.q.dtype, device=tensors.device)
    parts = [part.unflatten(1, (4, 16)) for part in fused.chunk(4, dim=1)]
    for part, x in zip(parts, (batch.q, batch.k, batch.v), strict=False):
        part.copy_(x)
    lightning_attn.lightning_decode(*parts[:3], batch.pool.tensor, batch.slots, batch.slopes, out=parts[3])
    batch.check_out(parts[3], products=torch.float32)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_array_of_another_library_is_told_in_a_line_and_not_printed(function) -> None:
    for name, value in good(function, torch.device("cpu")).items():
        if not isinstance(value, torch.Tensor):
            continue
        arguments = good(function, torch.device("cpu"))
        arguments[name] = numpy.zeros((300, 300))
        with torch.no_grad(), pytest.raises(TypeError) as raised:
            FUNCTIONS[function](**arguments)
        told = "".join(traceback.format_exception(raised.value))
        assert re.search(
            rf"^TypeError: {name} must be .*, got a numpy ndarray float64 \[300, 300\]$", told, re.MULTILINE
        )
        assert len(told) < 3000
        assert "[[0." not in told


heads_and_tokens = lambda x: x.transpose(-3, -2)  # noqa: E731
transposed = lambda x: x.mT  # noqa: E731
# Layouts that are mixed up: what is laid out otherwise, the argument named, and what the error says would fit.
LAYOUTS = [
    ("prefill", ("q", "k", "v"), heads_and_tokens, "ed", "q.transpose(1, 2) if it is [b, n, h, d]"),
    ("prefill", ("k",), heads_and_tokens, "k", "k.transpose(1, 2) if it is [b, n, h, d]"),
    ("prefill", ("v",), heads_and_tokens, "v", "v.transpose(1, 2) if it is [b, n, h, d]"),
    ("prefill", ("kv_history",), transposed, "kv_history", "kv_history.mT if it is [.., E, D]"),
    ("varlen", ("q", "k", "v"), heads_and_tokens, "slopes", "q.transpose(0, 1) if it is [H, T, D]"),
    ("verify", ("q", "k", "v"), heads_and_tokens, "slopes", "q.transpose(1, 2) if it is [B, H, T, D]"),
    ("drop-in", ("q",), heads_and_tokens, "q", "q.transpose(1, 2) if it is [B, 1, H, D]"),
    *[(function, (name,), transposed, name, f"{name}.mT if it is [.., E, D]") for function, name in POOL.items()],
]


@pytest.mark.parametrize(("function", "names", "change", "named", "fits"), LAYOUTS)
def test_an_error_over_a_layout_that_is_mixed_up_says_what_would_fit(
    device, function, names, change, named, fits
) -> None:
    arguments = good(function, device)
    if function == "varlen":
        # As many heads of q and k as of v.
        arguments["q"], arguments["k"] = (arguments[name].repeat(1, H // HQK, 1) for name in ("q", "k"))
    if function == "verify":
        arguments["q"], arguments["k"] = (arguments[name][:, :3].repeat(1, 1, H // HQK, 1) for name in ("q", "k"))
        arguments["v"] = arguments["v"][:, :3]
    for name in names:
        arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=rf"^{named} must be .*{re.escape(fits)}.*, got "):
        FUNCTIONS[function](**arguments)
