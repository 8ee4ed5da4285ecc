"""The words of an argument error, and who sees the switch for checks of values."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad

from kernel_reference.checks import (
    MemoryOverlap,
    as_int,
    check_float,
    check_no_overlap,
    check_no_tangents,
    describe,
    fail,
    share_memory,
    validate_values,
    values_are_checked,
)


def test_an_error_names_the_argument_what_it_must_be_and_what_it_was() -> None:
    with pytest.raises(ValueError, match=r"^mixed_ba must be on cuda:0, got cpu$"):
        fail("mixed_ba", "on cuda:0", "cpu")
    with pytest.raises(TypeError, match=r"^q must be a tensor, got list$"):
        fail("q", "a tensor", "list", TypeError)


def test_values_are_checked_inside_the_block_alone() -> None:
    assert not values_are_checked()
    with validate_values():
        assert values_are_checked()
    assert not values_are_checked()


def test_leaving_an_inner_block_does_not_end_the_outer_one() -> None:
    with validate_values():
        with validate_values():
            assert values_are_checked()
        assert values_are_checked()
    assert not values_are_checked()


def test_an_exception_passes_and_ends_the_block() -> None:
    with pytest.raises(KeyError), validate_values():
        raise KeyError("mine")
    assert not values_are_checked()


def test_one_block_can_be_entered_again_and_again() -> None:
    for _ in range(3):
        with validate_values():
            assert values_are_checked()
        assert not values_are_checked()


def test_other_threads_are_not_affected() -> None:
    inside, seen = threading.Event(), []
    done = threading.Event()

    def checks() -> None:
        with validate_values():
            inside.set()
            done.wait(10)
            seen.append(values_are_checked())

    thread = threading.Thread(target=checks)
    thread.start()
    assert inside.wait(10)
    seen.append(values_are_checked())
    with validate_values():
        seen.append(values_are_checked())
    seen.append(values_are_checked())
    done.set()
    thread.join(10)
    assert seen == [False, True, False, True]


def test_tasks_that_interleave_each_keep_their_own_setting() -> None:
    async def checks(enter: bool, seen: list[bool]) -> None:
        if enter:
            with validate_values():
                await asyncio.sleep(0)
                seen.append(values_are_checked())
        else:
            await asyncio.sleep(0)
            seen.append(values_are_checked())

    async def both() -> tuple[list[bool], list[bool]]:
        on: list[bool] = []
        off: list[bool] = []
        await asyncio.gather(checks(True, on), checks(False, off))
        return on, off

    assert asyncio.run(both()) == ([True], [False])


def test_values_on_a_cpu_are_checked_by_default_and_can_be_left_unchecked() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert values_are_checked(cpu)
    assert not values_are_checked(gpu)
    with validate_values(False):
        assert not values_are_checked(cpu)
    with validate_values():
        assert values_are_checked(gpu)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(2, 3), "torch.float32 [2, 3] with strides [3, 1]"),
        (np.zeros((300, 70), np.float32), "a numpy ndarray float32 [300, 70]"),
        (3, "3 (int)"),
        (None, "None (NoneType)"),
    ],
)
def test_an_argument_is_described_in_one_short_line(value: object, words: str) -> None:
    assert describe(value) == words


def test_a_long_value_is_cut() -> None:
    words = describe(list(range(1000)))
    assert len(words) < 140
    assert words.endswith("... (list)")


def test_an_int_is_any_type_with_an_index_and_neither_a_bool_nor_a_float_nor_a_tensor() -> None:
    assert as_int("n", np.int32(7)) == 7
    assert type(as_int("n", np.int64(7))) is int
    for wrong in (True, 7.0, torch.tensor(7), "7", None):
        with pytest.raises(TypeError, match=r"^n must be an int, got "):
            as_int("n", wrong)


def test_a_float_must_be_finite() -> None:
    check_float("scale", 1)
    check_float("scale", 0.5)
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"^scale must be finite, got (nan|inf)$"):
            check_float("scale", wrong)
    with pytest.raises(TypeError, match=r"^scale must be a float, got '1' \(str\)$"):
        check_float("scale", "1")


def test_a_float_that_changes_between_calls_compiles_as_one_graph() -> None:
    def scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
        check_float("scale", scale)
        return x * scale

    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    x = torch.ones(3)
    for scale in (0.5, 0.25, 0.125):
        assert torch.equal(compiled(x, scale), x * scale)
    torch.compiler.reset()


def test_a_tangent_is_refused_by_name_and_a_plain_call_is_not() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        check_no_tangents(x=x, y=None)
        return 2 * x

    x = torch.ones(3)
    assert torch.equal(twice(x), 2 * x)
    with pytest.raises(ValueError, match=r"^x must be without a tangent"):
        torch.func.jvp(twice, (x,), (x,))
    with pytest.raises(ValueError, match=r"^x must be without a tangent"):
        torch.func.jacfwd(twice)(x)
    with forward_ad.dual_level(), pytest.raises(ValueError, match=r"^x must be without a tangent"):
        twice(forward_ad.make_dual(x, x))
    assert torch.equal(torch.func.grad(lambda x: twice(x).sum())(x), torch.full((3,), 2.0))


def test_slices_of_one_fused_tensor_share_no_memory() -> None:
    fused = torch.zeros(16, 3 * 64)
    q, k, v = (part.unflatten(1, (2, 32)) for part in fused.split(64, 1))
    assert not share_memory(q, k)
    assert not share_memory(v, q)
    assert share_memory(q, fused)
    assert share_memory(q, fused[:, 32:96])
    assert not share_memory(fused[:8], fused[8:])
    assert share_memory(fused[:9], fused[8:])


def test_a_column_that_wraps_into_the_next_row_shares_memory() -> None:
    flat = torch.zeros(200)
    rows = torch.as_strided(flat, (4, 16), (32, 1), 0)
    assert not share_memory(rows, torch.as_strided(flat, (4, 16), (32, 1), 16))
    assert share_memory(rows, torch.as_strided(flat, (3, 16), (32, 1), 24))


def test_heads_apart_and_tokens_apart_may_share_memory() -> None:
    pool = torch.zeros(4, 8, 16)
    assert share_memory(pool[:, 2:], pool[2:])
    assert not share_memory(pool[:, :4], pool[:, 4:])
    assert not share_memory(pool[..., :8], pool[..., 8:])


def test_an_expanded_tensor_and_an_empty_one_are_looked_at_too() -> None:
    row = torch.zeros(1, 8)
    assert share_memory(row.expand(4, 8), row)
    assert not share_memory(row[:0], row)


def test_what_is_written_must_share_no_memory_with_anything_else() -> None:
    q, out, lse = torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(4)
    names = {"q": q, "k": None, "out": out, "lse": lse}
    overlap = MemoryOverlap(names, ["out", "lse"])
    overlap(q, None, out, lse)
    with pytest.raises(ValueError, match=r"^out must be a tensor that shares no memory with q, got torch.float32"):
        overlap(out, None, out, lse)
    with pytest.raises(ValueError, match=r"^out must be a tensor that shares no memory with lse"):
        check_no_overlap(names | {"lse": out[0, :4]}, ["out", "lse"])
    check_no_overlap({"q": q, "k": q, "out": out}, ["out"])


@given(st.data())
def test_no_shared_element_is_missed(data: st.DataObject) -> None:
    flat = torch.arange(4096)

    def view() -> torch.Tensor:
        sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        strides = data.draw(st.lists(st.integers(0, 24), min_size=len(sizes), max_size=len(sizes)))
        return torch.as_strided(flat, sizes, strides, data.draw(st.integers(0, 64)))

    one, other = view(), view()
    shared = bool(set(one.flatten().tolist()) & set(other.flatten().tolist()))
    if shared:
        assert share_memory(one, other)
