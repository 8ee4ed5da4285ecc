"""The words of an argument error, and who sees the switch for checks of values."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch
from hypothesis import given as random
from hypothesis import strategies as st
from torch.autograd import forward_ad

from kernel_reference import memory
from kernel_reference.checks import (
    MemoryOverlap,
    as_float,
    as_int,
    as_splits,
    as_window,
    check_bool,
    check_choice,
    check_dense,
    check_dtype,
    check_elements_apart,
    check_float,
    check_int,
    check_no_overlap,
    check_no_tangents,
    check_same_device,
    check_same_dtype,
    check_shape,
    check_window,
    describe,
    differ,
    fail,
    given,
    known,
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


def test_a_float_must_be_finite_in_float32_too() -> None:
    check_float("softcap", float(np.finfo(np.float32).max))
    with pytest.raises(
        ValueError,
        match=r"^softcap must be at most 3.4028234663852886e\+38, the largest float32, in magnitude, got -1e\+39$",
    ):
        check_float("softcap", -1e39)


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


def test_overlaps_are_found_at_each_address_and_alignment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MOST_APART", 2)
    pool = torch.zeros(64)
    overlap = MemoryOverlap({"q": pool[:8], "k": None, "out": pool[8:16]}, ["out"])
    for _ in range(2):
        for first, aligned in ((8, True), (9, False), (16, True), (10, False)):
            q, out = pool[:8], pool[first : first + 8]
            assert overlap.addresses(q, None, out) == ((q.data_ptr(), None, out.data_ptr()), aligned)
        with pytest.raises(ValueError, match=r"^out must be a tensor that shares no memory with q"):
            overlap.addresses(pool[:8], None, pool[7:15])


def test_what_is_asked_of_tensors_is_asked_of_longer_ones_by_their_own_lengths() -> None:
    pool = torch.zeros(16, 8)
    short = MemoryOverlap({"q": pool[:2], "k": None, "out": pool[8:10], "lse": None}, ["out", "lse"])
    for rows in (1, 8, 2):
        short.resized(pool[:rows], None, pool[8 : 8 + rows], None)(pool[:rows], None, pool[8 : 8 + rows], None)
    longer = short.resized(pool[:9], None, pool[8:10], None)
    with pytest.raises(ValueError, match=r"^out must be a tensor that shares no memory with q, got torch.float32"):
        longer(pool[:9], None, pool[8:10], None)
    short(pool[:9], None, pool[9:11], None)


@random(st.data())
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


# Sizes that only the device knows


def test_conditions_on_numbers_are_what_they_are() -> None:
    assert known(3 > 2)
    assert not known(2 > 3)
    assert known(np.int64(3) > 2)
    assert not known(np.int64(2) > 3)
    assert differ((2, 3), (2, 4))
    assert differ((2, 3), (2, 3, 1))
    assert not differ((2, 3), [2, 3])


def test_while_compiling_a_size_that_only_the_device_knows_raises_nothing_and_the_graph_serves_all() -> None:
    """Rows that a mask chooses: no guard is set and no break made, whatever is asked of their number."""

    def check(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        chosen = x[mask]
        if known(chosen.shape[0] < 2) or differ(chosen.shape, (5, x.shape[1])):
            return chosen + 100
        if known(chosen.shape[0] == 3) or known(chosen.shape[0] > 10**6):
            return chosen + 200
        check_shape("chosen", chosen, (7, x.shape[1]))
        return chosen + 1

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(check, backend="eager", fullgraph=True)
        x = torch.zeros(8, 4)
        for rows in (3, 5, 7):
            mask = torch.arange(8) < rows
            assert torch.equal(compiled(x, mask), torch.ones(rows, 4)), rows


def test_while_compiling_what_shapes_tell_is_known() -> None:
    def check(x: torch.Tensor) -> torch.Tensor:
        check_shape("x", x, (3, 4))
        return x + known(x.shape[1] == 4)

    compiled = torch.compile(check, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.zeros(3, 4)), torch.ones(3, 4))
    # torch.compile of torch 2.11 shows the line that raises; newer ones show the message as well.
    with pytest.raises(Exception, match=r'x must be \[3, 4\]|check_shape\("x", x, \(3, 4\)\)'):
        compiled(torch.zeros(3, 5))


# Numbers, options, windows


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: check_int("n", 2.0), TypeError, r"^n must be an int, got 2\.0 \(float\)$"),
        (lambda: check_int("n", True, 0), TypeError, r"^n must be an int, got True \(bool\)$"),
        (lambda: check_int("n", -1, 0), ValueError, r"^n must be at least 0, got -1$"),
        (lambda: check_int("n", 9, at_most=8), ValueError, r"^n must be at most 8, got 9$"),
        (lambda: check_int("n", 0, 1, 8), ValueError, r"^n must be from 1 to 8, got 0$"),
        (lambda: check_int("n", 9, 1, 8), ValueError, r"^n must be from 1 to 8, got 9$"),
        (lambda: check_bool("causal", 1), TypeError, r"^causal must be a bool, got 1 \(int\)$"),
        (lambda: check_choice("layout", 3, ("NHD", "HND")), TypeError, r'^layout must be one of "NHD", "HND", got 3'),
        (lambda: check_choice("layout", "x", ("NHD",)), ValueError, r"""^layout must be one of "NHD", got 'x'$"""),
        (lambda: as_float("scale", torch.ones(())), TypeError, r"^scale must be a float, got torch\.float32"),
        (lambda: as_float("scale", "1", "a float or None"), TypeError, r"^scale must be a float or None, got '1'"),
        (lambda: as_window((1, 2, 3)), TypeError, r"^window must be None or \(left, right\), got \(1, 2, 3\)"),
        (lambda: as_window(7), TypeError, r"^window must be None or \(left, right\), got 7 \(int\)$"),
        (lambda: as_window((1.5, 0)), TypeError, r"^window must be an int, got 1\.5"),
        (
            lambda: as_window((-2, 0)),
            ValueError,
            r"^window must be None or .* of -1 \(unlimited\) or more, got",
        ),
        (lambda: check_window(0, -2, "reach"), ValueError, r"^reach must be None or .* got \(0, -2\)$"),
        (lambda: as_splits(0), ValueError, r"^num_splits must be at least 1, got 0$"),
        (lambda: as_splits("2"), TypeError, r"^num_splits must be an int, got '2'"),
    ],
)
def test_a_wrong_number_or_option_is_named_with_what_it_must_be(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


def test_numbers_of_other_libraries_become_ints() -> None:
    assert [type(check_int("n", number, 0, 9)) for number in (3, np.int64(3))] == [int, int]
    assert as_splits(np.int32(4)) == 4
    assert as_splits(None) == 0
    assert as_float("scale", 2) == 2
    assert as_float("scale", 0.5) == 0.5


@pytest.mark.parametrize(
    ("window", "causal", "wanted"),
    [
        (None, True, (-1, 0)), (None, False, (-1, -1)), ((127, 0), True, (127, 0)), ((127, 5), True, (127, 0)),
        ([127, 5], False, (127, 5)), ((-1, -1), False, (-1, -1)), ((2**31 - 1, 2**40), False, (-1, -1)),
        ((2**31 - 2, 0), True, (2**31 - 2, 0)), ((np.int64(3), 0), True, (3, 0)),
    ],
)  # fmt: skip
def test_a_window_is_what_a_query_sees_to_either_side_causality_in_it(window, causal, wanted) -> None:
    assert as_window(window, causal) == wanted


# Tensors


def test_what_is_given_is_what_is_not_none() -> None:
    assert given(q=1, sinks=None, out=0) == {"q": 1, "out": 0}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: check_dense(q=torch.ones(2), k=[1.0]), TypeError, r"^k must be a torch\.Tensor, got \[1\.0\]"),
        (lambda: check_dense(q=torch.ones(2).to_sparse()), TypeError, r"^q must be a dense \(strided\) tensor, got"),
        (lambda: check_shape("out", torch.ones(2, 3), (2, 4)), ValueError, r"^out must be \[2, 4\], got torch"),
        (lambda: check_shape("v", torch.ones(2), (3,), " (pass v.T)"), ValueError, r"^v must be \[3\] \(pass v\.T\)"),
        (lambda: check_dtype("v", torch.ones(2), torch.int32), TypeError, r"^v\.dtype must be int32, got torch"),
        (
            lambda: check_dtype("v", torch.ones(2).int(), torch.bfloat16, torch.float16, torch.float32),
            TypeError, r"^v\.dtype must be bfloat16, float16 or float32, got torch\.int32$",
        ),
        (
            lambda: check_same_dtype("v", torch.ones(2), "q", torch.ones(2).half()),
            TypeError, r"^v\.dtype must be torch\.float16 as that of q is, got torch\.float32$",
        ),
        (
            lambda: check_same_device("v", torch.ones(2), "q", torch.ones(2, device="meta")),
            ValueError, r"^v\.device must be meta as q is, got cpu$",
        ),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_named_with_what_it_must_be(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


def test_right_tensors_pass() -> None:
    x = torch.ones(2, 3)
    check_dense(q=x, k=torch.ones(3).expand(2, 3))
    check_shape("q", x, [2, 3])
    check_dtype("q", x, torch.float16, torch.float32)
    check_same_dtype("q", x, "k", x)
    check_same_device("q", x, "k", x)


sizes_and_strides = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 14)), max_size=4)


@random(sizes_and_strides)
def test_no_two_elements_of_a_tensor_that_passes_share_memory(dims: list[tuple[int, int]]) -> None:
    tensor = torch.empty(256).as_strided([size for size, _ in dims], [stride for _, stride in dims])
    try:
        check_elements_apart("out", tensor)
    except ValueError:
        return
    places = torch.arange(256).as_strided(tensor.shape, tensor.stride()).reshape(-1).tolist()
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(4, 8), torch.empty(4, 8).T, torch.empty(4, 8)[:, ::2], torch.empty(6, 4, 8)[::2, 1:3].mT,
        torch.empty(0, 8).expand(0, 8), torch.empty(1, 8).expand(1, 8), torch.empty(()),
    ],
)  # fmt: skip
def test_tensors_that_kernels_may_write_pass(tensor: torch.Tensor) -> None:
    check_elements_apart("out", tensor)


def test_expanded_and_interleaved_tensors_are_refused() -> None:
    for tensor in (
        torch.empty(8).expand(4, 8),
        torch.empty(64).as_strided((4, 8), (2, 1)),
        torch.empty(9).unfold(0, 3, 1),
        torch.empty(3).unfold(0, 2, 1),  # One element alone is shared, the last that the smaller stride reaches.
    ):
        with pytest.raises(ValueError, match=r"^lse must be a tensor whose elements do not share memory, nor its dim"):
            check_elements_apart("lse", tensor)
    with pytest.raises(ValueError, match="interleave"):
        check_elements_apart("lse", torch.empty(64).as_strided((2, 3), (3, 2)))
