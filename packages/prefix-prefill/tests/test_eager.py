"""Do eager calls that look alike go past torch's dispatcher, and are they the same calls there?"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import prefix_prefill
from kernel_reference import dispatch
from kernel_reference.checks import validate_values
from kernel_reference.dispatch import PreparedLaunches
from kernel_reference.launching import Launch
from kernel_reference.starting import Starter
from kernel_reference.testing.guards import assert_bitwise_equal
from kernel_reference.testing.specs import recorded_launches
from prefix_prefill import arguments as checked
from prefix_prefill import batches, launch, ops
from prefix_prefill.cascade import launch as cascade_launch
from prefix_prefill.merging import launch as merging
from prefix_prefill.plan import DeviceLimits

Tensor = torch.Tensor
ROWS, H, HKV, D, PAGE = 6, 4, 2, 16, 16


@pytest.fixture
def dispatched(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """How often the op was called; on a CPU its tensors stand for a GPU's, in Triton's interpreter."""
    monkeypatch.setattr(ops, "launches", PreparedLaunches())
    state = SimpleNamespace(count=0)

    def counted(op: Any, *given: Any) -> None:
        state.count += 1
        op(*given)

    for name in ("_prefill", "_cascade", "_merge"):
        monkeypatch.setattr(ops, name, partial(counted, getattr(ops, name)))
    library = None
    if device.type == "cpu":
        monkeypatch.setattr(dispatch, "has_kernel", lambda device: True)
        for module in (launch, cascade_launch):
            monkeypatch.setattr(module, "device_limits", lambda device: DeviceLimits(1))
        library = torch.library.Library("prefix_prefill", "IMPL", "CPU")
        with warnings.catch_warnings():
            # torch says once that an implementation is replaced.
            warnings.simplefilter("ignore")
            library.impl("prefill", ops._kernel_prefill, allow_override=True)
            library.impl("cascade", ops._kernel_cascade, allow_override=True)
            library.impl("merge", ops._kernel_merge, allow_override=True)
    with validate_values(False):
        yield state
    if library is not None:
        library._destroy()


def given(device: torch.device) -> dict[str, Any]:
    def make(*size: int) -> Tensor:
        return torch.randn(size, device=device).bfloat16()

    def integers(*numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    return {
        "q": make(ROWS, H, D), "k": None, "v": None, "k_cache": make(3, PAGE, HKV, D), "v_cache": make(3, PAGE, HKV, D),
        "block_table": integers([1], [2]), "cu_seqlens_q": integers(0, 2, 5), "seqlens_k": integers(9, 16),
        "max_seqlen_q": 3,
    }  # fmt: skip


def test_the_second_cascade_that_looks_like_the_first_is_not_dispatched_and_gives_the_same(device, dispatched) -> None:
    """Levels of one cache, and of two, which are other calls; a result that shares memory is still refused."""
    made = given(device)
    q, k_cache, v_cache, table, cu, seqlens = (
        made[name] for name in ("q", "k_cache", "v_cache", "block_table", "cu_seqlens_q", "seqlens_k")
    )
    before = prefix_prefill.CascadeLevel(k_cache, v_cache, table[:1], cu[::2].contiguous(), seqlens[1:])
    copies = before._replace(k_cache=k_cache.clone(), v_cache=v_cache.clone())
    last = prefix_prefill.CascadeLevel(k_cache, v_cache, table, cu, seqlens)
    for number, levels in enumerate(([before, last], [copies, last])):
        options = {"max_seqlen_q": 3, "return_lse": True}
        wanted = prefix_prefill.cascade_attention(q, levels, **options)
        got = prefix_prefill.cascade_attention(q.clone(), levels, **options)
        assert dispatched.count == number + 1
        assert_bitwise_equal(got.out, wanted.out)
        assert_bitwise_equal(got.lse, wanted.lse)
    out = torch.empty_like(q)
    for result in (out, out, q[:]):
        refused = result.data_ptr() == q.data_ptr()
        with pytest.raises(ValueError, match="share") if refused else nullcontext():
            prefix_prefill.cascade_attention(q, [before, last], max_seqlen_q=3, out=result)
    assert dispatched.count == 3
    assert_bitwise_equal(out, wanted.out)


def test_the_second_call_that_looks_like_the_first_is_not_dispatched_and_gives_the_same(device, dispatched) -> None:
    first, second = given(device), given(device)
    wanted = [prefix_prefill.prefix_prefill(**second, return_lse=True), prefix_prefill.prefix_prefill(**second)]
    assert dispatched.count == 2
    for arguments in (first, second):
        got = [prefix_prefill.prefix_prefill(**arguments, return_lse=True), prefix_prefill.prefix_prefill(**arguments)]
    assert dispatched.count == 2
    assert_bitwise_equal(got[0].out, wanted[0].out)
    assert_bitwise_equal(got[0].lse, wanted[0].lse)
    assert_bitwise_equal(got[1], wanted[1])
    assert len({x.data_ptr() for x in (*got[0], *wanted[0], got[1], wanted[1])}) == 6


def test_the_second_merge_that_looks_like_the_first_is_not_dispatched_and_gives_the_same(device, dispatched) -> None:
    parts = [torch.randn(ROWS, H, D, device=device), torch.randn(H, ROWS, device=device)]
    parts += [torch.randn_like(x) for x in parts]
    wanted = prefix_prefill.merge_attention_states(*parts)
    got = prefix_prefill.merge_attention_states(*[x.clone() for x in parts])
    assert dispatched.count == 1
    assert_bitwise_equal(got.out, wanted.out)
    assert_bitwise_equal(got.lse, wanted.lse)
    out = torch.empty_like(wanted.out)
    for result in (out, out, parts[0][:]):
        refused = result is not out
        with pytest.raises(ValueError, match="share") if refused else nullcontext():
            prefix_prefill.merge_attention_states(*parts, out=result)
    assert dispatched.count == 2
    assert_bitwise_equal(out, wanted.out)


def test_the_second_call_of_the_engines_function_is_not_dispatched_and_gives_the_same(device, dispatched) -> None:
    made = given(device)
    q, table, cu, seqlens = (made[name] for name in ("q", "block_table", "cu_seqlens_q", "seqlens_k"))
    new, cache = [torch.randn(ROWS, HKV, D, device=device).bfloat16() for _ in range(2)], made["k_cache"]
    caches = [
        cache.view(3, PAGE, HKV, 2, 8).permute(0, 2, 3, 1, 4).contiguous(),
        cache.permute(0, 2, 3, 1).contiguous(),
    ]

    def call(o: Tensor, **options: Any) -> Tensor:
        prefix_prefill.context_attention_fwd(
            q, *new, o, "auto", *caches, table, cu, seqlens, 16, 3, 1.0, 1.0, **options
        )  # fmt: skip
        return o

    wanted, got = call(torch.zeros_like(q)), torch.zeros_like(q)
    assert_bitwise_equal(call(got), wanted)
    assert dispatched.count == 1
    with pytest.raises(TypeError, match="causal"):
        call(got, causal=1)
    for _ in range(3):
        with pytest.raises(ValueError, match=r"^o must be a tensor that shares no memory with q"):
            call(q[:])
    assert dispatched.count == 1


def test_options_that_equal_those_of_a_call_before_but_are_of_another_type_are_refused(device, dispatched) -> None:
    right = {**given(device), "window": (1, 0)}
    prefix_prefill.prefix_prefill(**right)
    for wrong in ({"causal": 1}, {"return_lse": 0}, {"softcap": False}, {"max_seqlen_q": 3.0}, {"window": (True, 0)}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            prefix_prefill.prefix_prefill(**{**right, **wrong})
    prefix_prefill.prefix_prefill(**{**right, "window": [1, 0]})


def test_calls_with_other_options_are_not_taken_for_one_another(device, dispatched) -> None:
    arguments = given(device)
    sinks = torch.zeros(H, device=device)
    options: list[dict[str, Any]] = [
        {}, {"sinks": sinks}, {"alibi_slopes": sinks}, {"window": (1, 0)}, {"out_scale": 1.0},
        {"out": torch.empty_like(arguments["q"])}, {"return_lse": True},
    ]  # fmt: skip
    for option in options:
        before = dispatched.count
        wanted = prefix_prefill.prefix_prefill(**arguments, **option)
        got = prefix_prefill.prefix_prefill(**arguments, **option)
        assert dispatched.count == before + 1, option
        assert_bitwise_equal(getattr(got, "out", got), getattr(wanted, "out", wanted))
    assert prefix_prefill.prefix_prefill(**arguments, out_scale=1.0).dtype == torch.float8_e4m3fn


def test_an_out_that_shares_memory_is_refused_there_too(device, dispatched) -> None:
    arguments = given(device)
    out = torch.empty_like(arguments["q"])
    for _ in range(2):
        assert prefix_prefill.prefix_prefill(**arguments, out=out) is out
    before = arguments["q"].clone()
    with pytest.raises(ValueError, match=r"^out must be a tensor that shares no memory with q, got"):
        prefix_prefill.prefix_prefill(**arguments, out=arguments["q"][:])
    assert dispatched.count == 1
    assert_bitwise_equal(arguments["q"], before)


def test_bounds_of_keys_up_to_a_power_of_two_are_one_call_of_the_engine(device, dispatched) -> None:
    arguments = given(device)
    q = arguments["q"]
    k_cache = arguments["k_cache"].permute(0, 2, 3, 1).reshape(3, HKV, D // 8, 8, PAGE).transpose(3, 4).contiguous()
    v_cache = arguments["v_cache"].permute(0, 2, 3, 1).contiguous()
    tensors = (q, q[:, :HKV], q[:, :HKV], torch.empty_like(q), "auto", k_cache, v_cache)
    lengths = [arguments[name] for name in ("block_table", "cu_seqlens_q", "seqlens_k")]
    for most in (17, 20, 32):
        prefix_prefill.context_attention_fwd(*tensors, *lengths, most, 3, None, None)
    assert dispatched.count == 1
    prefix_prefill.context_attention_fwd(*tensors, *lengths, 33, 3, None, None)
    assert dispatched.count == 2


def test_where_values_are_checked_each_call_checks_them(device, dispatched) -> None:
    arguments = given(device)
    for _ in range(2):
        prefix_prefill.prefix_prefill(**arguments)
    arguments["seqlens_k"][1] = 99
    with validate_values(), pytest.raises(ValueError, match=r"^seqlens_k\[1\] must be"):
        prefix_prefill.prefix_prefill(**arguments)


# Batches of new sizes, as a server has them every step


class Server:
    """A layer over one cache, whose batches are the first rows of its buffers; none of its launches is started."""

    def __init__(self, device: torch.device, page: int = PAGE, **options: Any) -> None:
        def make(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        def integers(*size: int) -> Tensor:
            return make(*size, dtype=torch.int32)

        self.q, self.cache = make(600, 8, 64), [make(8, page, 2, 64) for _ in range(2)]
        self.new = [make(600, 2, 64) for _ in range(2)] if options.pop("new_kv", False) else [None, None]
        self.lengths = integers(64, 200), integers(65), integers(64)
        self.options = options
        rows = {"out": lambda: torch.empty_like(self.q), "draft_mask": lambda: make(600, dtype=torch.int64)}
        self.rows = {name: form() for name, form in rows.items() if options.pop(name, False)}

    def arguments(self, tokens: int, sequences: int, longest: int, columns: int = 200) -> dict[str, Any]:
        table, cu, seqlens = self.lengths
        k, v = [x if x is None else x[:tokens] for x in self.new]
        return {
            "q": self.q[:tokens], "k": k, "v": v, "k_cache": self.cache[0], "v_cache": self.cache[1],
            "block_table": table[:sequences, :columns], "cu_seqlens_q": cu[: sequences + 1],
            "seqlens_k": seqlens[:sequences], "max_seqlen_q": longest,
            **{name: x[:tokens] for name, x in self.rows.items()}, **self.options,
        }  # fmt: skip


# Decoding, drafts, a chunk among those that decode, chunks alone; few keys, for which nothing is merged.
SIZES = [
    *((n, n, 1) for n in (2, 3, 17, 64)), (24, 8, 3), (63, 9, 7), (400, 3, 398), (413, 4, 410), (491, 10, 482),
    (500, 1, 500), (30, 10, 3, 20), (31, 10, 4, 31), (600, 40, 17, 199),
]  # fmt: skip
SERVERS: dict[str, dict[str, Any]] = {
    "keys in the cache": {},
    "new keys": {"new_kv": True},
    "into out, with lse": {"out": True, "return_lse": True},
    "three splits": {"num_splits": 3, "return_lse": True},
    "pages for the portable kernel": {"page": 4, "new_kv": True, "return_lse": True},
    "drafts": {"draft_mask": True},
    "an 8-bit result": {"out_scale": 2.0, "window": (100, 0)},
}


@pytest.fixture
def hopper(dispatched: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The same, planned for an H200; and how often calls are checked, planned, and launches made from nothing."""
    monkeypatch.setattr(launch, "device_limits", lambda device: DeviceLimits(132, 227 * 1024, hopper=True))
    state = SimpleNamespace(dispatched=dispatched, checked=0, planned=0, made=0)

    def counting(where: Any, name: str, count: str) -> None:
        function = getattr(where, name)

        def counted(*given: Any, **options: Any) -> Any:
            setattr(state, count, getattr(state, count) + 1)
            return function(*given, **options)

        monkeypatch.setattr(where, name, counted)

    counting(checked, "check_prefill", "checked")
    counting(launch, "plan_prefill", "planned")
    counting(Launch, "__init__", "made")
    return state


def of_launch(start: Launch, given: tuple[Any, ...]) -> tuple[Any, ...]:
    looks = [x if x is None else (x.shape, x.stride(), x.dtype) for x in given]
    return start.kernel, start.grid, start.rest, start.options, start.group, start.boxes, looks


@pytest.mark.parametrize("options", SERVERS.values(), ids=SERVERS)
def test_batches_of_new_sizes_are_launched_as_if_each_were_the_first(device, hopper, options) -> None:
    server = Server(device, **options)
    sizes = [size for size in SIZES if "draft_mask" not in options or size[2] <= 63]
    for size in sizes:
        call = partial(prefix_prefill.prefix_prefill, **server.arguments(*size))
        got = recorded_launches(call)
        with patch.object(ops, "launches", PreparedLaunches()):
            wanted = recorded_launches(call)
        assert [of_launch(*start) for start in got] == [of_launch(*start) for start in wanted], size
    # Each of those made from nothing was dispatched, of the server's the first alone.
    assert hopper.dispatched.count == len(sizes) + 1


def test_fifty_batches_of_new_sizes_are_checked_once_planned_twice_and_never_dispatched_again(device, hopper) -> None:
    server = Server(device, new_kv=True)
    with patch.object(Launch, "__call__", lambda *_: None):
        for tokens in range(100, 600, 10):
            prefix_prefill.prefix_prefill(**server.arguments(tokens, 2 + tokens % 7, tokens - 6))
            prefix_prefill.prefix_prefill(**server.arguments(tokens // 10, tokens // 10, 1))
    # Of two kinds, a kernel that attends and one that merges each.
    assert (hopper.dispatched.count, hopper.checked, hopper.planned, hopper.made) == (1, 1, 2, 4)


WRONG: dict[str, Any] = {
    "seqlens_k": lambda given: given | {"seqlens_k": given["seqlens_k"][1:]},
    "cu_seqlens_q": lambda given: given | {"cu_seqlens_q": given["cu_seqlens_q"][1:]},
    "block_table": lambda given: given | {"block_table": given["block_table"][1:]},
    "k": lambda given: given | {"k": given["k"][1:]},
    "v": lambda given: given | {"v": given["v"][1:]},
    "out": lambda given: given | {"out": given["out"][1:]},
    "draft_mask": lambda given: given | {"draft_mask": given["draft_mask"][1:]},
    "max_seqlen_q": lambda given: given | {"max_seqlen_q": 64},
    "max_seqlen_q must be at least 0": lambda given: given | {"max_seqlen_q": -1},
}


@pytest.mark.parametrize(("message", "wrong"), WRONG.items(), ids=WRONG)
def test_sizes_that_do_not_fit_each_other_are_refused_after_a_batch_that_did(device, hopper, message, wrong) -> None:
    server = Server(device, new_kv=True, out=True, draft_mask=True)
    with patch.object(Launch, "__call__", lambda *_: None):
        prefix_prefill.prefix_prefill(**server.arguments(24, 8, 3))
        prefix_prefill.prefix_prefill(**server.arguments(20, 7, 3))
        assert hopper.dispatched.count == 1
        with pytest.raises(ValueError, match=message):
            prefix_prefill.prefix_prefill(**wrong(server.arguments(22, 9, 3)))


def test_strides_that_a_check_could_not_see_are_checked_in_longer_batches(device, hopper) -> None:
    server = Server(device)
    twice = torch.zeros(64, 2, dtype=torch.int32, device=device)
    apart = torch.zeros(600, 8, 64, dtype=torch.bfloat16, device=device)
    with patch.object(Launch, "__call__", lambda *_: None):
        # Of one length no stride is wrong, of two this one is.
        for length in (1, 2):
            arguments = server.arguments(10, length, 10) | {"seqlens_k": twice[:length, 0]}
            if length == 2:
                with pytest.raises(ValueError, match=r"^seqlens_k must be contiguous"):
                    prefix_prefill.prefix_prefill(**arguments)
            else:
                prefix_prefill.prefix_prefill(**arguments)
        # Heads that lie further apart than tokens, until there are more of those.
        close = torch.as_strided(apart, (600, 8, 64), (64, 64 * 8, 1))
        prefix_prefill.prefix_prefill(**server.arguments(8, 2, 7), out=close[:8])
        with pytest.raises(ValueError, match=r"^out must be a tensor whose elements do not share memory"):
            prefix_prefill.prefix_prefill(**server.arguments(9, 2, 7), out=close[:9])


def test_an_out_that_a_longer_batch_reaches_is_refused_there(device, hopper) -> None:
    server = Server(device)
    # Rows of q, then of outputs.
    pool = torch.zeros(60, 8, 64, dtype=torch.bfloat16, device=device)
    with patch.object(Launch, "__call__", lambda *_: None):
        for tokens in (10, 20, 30):
            rows = {"q": pool[:tokens], "out": pool[30:][:tokens]}
            prefix_prefill.prefix_prefill(**server.arguments(tokens, 2, 9) | rows)
        assert hopper.dispatched.count == 1
        with pytest.raises(ValueError, match=r"^out must be a tensor that shares no memory with q, got"):
            prefix_prefill.prefix_prefill(**server.arguments(25, 2, 9) | {"q": pool[:25], "out": pool[24:49]})


def test_batches_of_new_sizes_give_what_they_give_alone(device, dispatched, monkeypatch) -> None:
    arguments = given(device)
    smaller = arguments | {
        "q": arguments["q"][:3], "cu_seqlens_q": torch.tensor([0, 3], dtype=torch.int32, device=device),
        "block_table": arguments["block_table"][1:], "seqlens_k": arguments["seqlens_k"][1:],
    }  # fmt: skip
    # Both tables of two columns, so that the second may differ in sizes.
    for each in (arguments, smaller):
        each["block_table"] = each["block_table"].repeat(1, 2)
    wanted = prefix_prefill.prefix_prefill(**smaller, return_lse=True)
    monkeypatch.setattr(ops, "launches", PreparedLaunches())
    before = dispatched.count
    prefix_prefill.prefix_prefill(**arguments, return_lse=True)
    out = torch.empty_like(smaller["q"])
    got = prefix_prefill.prefix_prefill(**smaller, return_lse=True)
    assert dispatched.count == before + 1
    assert_bitwise_equal(got.out, wanted.out)
    assert_bitwise_equal(got.lse, wanted.lse)
    prefix_prefill.prefix_prefill(**arguments, out=torch.empty_like(arguments["q"]))
    assert_bitwise_equal(prefix_prefill.prefix_prefill(**smaller, out=out), wanted.out)
    with pytest.raises(ValueError, match=r"^out must be a tensor that shares no memory with q, got"):
        prefix_prefill.prefix_prefill(**smaller, out=smaller["q"][:])
    assert dispatched.count == before + 2


@pytest.fixture
def replayed(device: torch.device, hopper: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What launches start, of a device that starts none; and those that were asked for it."""
    state = SimpleNamespace(started=[], hooks=[], asked=[], watched=0)
    starter = Starter(
        lambda *given: state.started.append(given), lambda at, one, _: (at, one.base.data_ptr()),
        lambda: bool(state.hooks),
    )  # fmt: skip

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            def run(*_: Any) -> None:
                state.watched += 1

            return run

    monkeypatch.setattr(Launch, "_find", lambda self, _: self._kept.take((Kernel(), starter)))
    monkeypatch.setattr(batches, "_again", {})

    def of_one(size: Any, *form: Any) -> Any:
        # Of size, dtype and device, or of size, strides, dtype and device.
        one = torch.empty(size, dtype=form[-2], device=device)
        return lambda: one

    # Scratch memory lies in the same place each time.
    monkeypatch.setattr(merging, "_scratch", of_one)
    monkeypatch.setattr(cascade_launch, "allocator_of", of_one)
    at = Launch.at
    monkeypatch.setattr(Launch, "at", lambda self, *given: state.asked.append(self) or at(self, *given))

    def starts(call: Any) -> list[Any]:
        state.started.clear()
        call()
        return [*state.started]

    state.starts = starts
    return state


@pytest.mark.parametrize("size", [(3, 3, 1), (500, 1, 500), (30, 10, 3, 20)], ids=str)
@pytest.mark.parametrize("options", [{}, {"num_splits": 3}, {"window": (100, 0)}, {"page": 4}], ids=str)
def test_calls_whose_addresses_come_again_start_what_they_started(device, replayed, monkeypatch, options, size) -> None:
    """By what was kept for these addresses, without asking launches; unless a profiler watches, or others come."""
    server = Server(device, out=True, **options)

    def starts() -> list[Any]:
        return replayed.starts(lambda: prefix_prefill.prefix_prefill(**server.arguments(*size)))

    # The op's call has scratch memory in several pieces.
    assert starts()
    wanted = starts()
    for _ in range(5):
        assert starts() == wanted
    assert sum(begin is not None for begin in batches._again.values()) == 1
    before = len(replayed.asked)
    starts()
    assert len(replayed.asked) == before
    replayed.hooks.append("a profiler's")
    assert not starts()
    assert replayed.watched == len(wanted)
    replayed.hooks.clear()
    server.q = server.q.clone()
    others = starts()
    assert others != wanted
    assert starts() == starts() == others
    # However many addresses come, few are kept, and calls start what they started.
    monkeypatch.setattr(batches, "_MOST_AGAIN", 3)
    kept = [server.q]
    for _ in range(4):
        server.q = server.q.clone()
        kept.append(server.q)
        assert starts() == starts() == starts()
        assert len(batches._again) <= 3


@pytest.mark.parametrize("page", [16, 4], ids=["for sm_90", "portable"])
@pytest.mark.parametrize("shared", [1, 2], ids=["two levels", "three levels"])
def test_cascades_whose_addresses_come_again_start_what_they_started(device, replayed, page, shared) -> None:
    server = Server(device, page)
    given, out = server.arguments(3, 3, 1), torch.empty_like(server.q[:3])
    table, cu, lengths = (given[name] for name in ("block_table", "cu_seqlens_q", "seqlens_k"))
    bounds = [torch.zeros(2, dtype=torch.int32, device=device) for _ in range(shared)]
    before = [
        prefix_prefill.CascadeLevel(*server.cache, table[i : i + 1], cu, lengths[:1]) for i, cu in enumerate(bounds)
    ]
    levels = [*before, prefix_prefill.CascadeLevel(*server.cache, table, cu, lengths)]

    def starts() -> list[Any]:
        return replayed.starts(
            lambda: prefix_prefill.cascade_attention(given["q"], levels, max_seqlen_q=1, out=out)
        )  # fmt: skip

    assert len(starts()) > shared
    wanted = starts()
    asked = len(replayed.asked)
    assert starts() == wanted
    assert len(replayed.asked) > asked
    asked = len(replayed.asked)
    assert starts() == starts() == wanted
    assert len(replayed.asked) == asked


@pytest.mark.parametrize("columns", [20, 200], ids=["few keys", "in pieces"])
def test_a_call_of_the_op_keeps_no_memory(device, hopper, columns) -> None:
    """CUDA graphs that torch.compile makes own all that is allocated under them, and refuse what stays."""
    server = Server(device)
    seen: list[weakref.ref[Tensor]] = []

    def noted(_: Launch, *tensors: Tensor | None) -> None:
        seen.extend(weakref.ref(tensor) for tensor in tensors if tensor is not None)

    with patch.object(Launch, "__call__", noted):
        prefix_prefill.prefix_prefill(**server.arguments(3, 3, 1, columns))
    gc.collect()
    # With memory of the call's own.
    assert len(seen) >= 10
    alive = [tensor for known in seen if (tensor := known()) is not None]
    assert [tensor.shape for tensor in alive if all(tensor is not cache for cache in server.cache)] == []


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [20, 200], ids=["few keys", "in pieces"])
def test_calls_whose_addresses_come_again_give_their_bits_in_graphs_and_on_other_threads(device, columns) -> None:
    """What is handed to the driver alone, by several threads at a time."""
    generator = torch.Generator(device).manual_seed(0)
    q, *cache = (
        torch.randn(size, generator=generator, device=device).bfloat16()
        for size in ((4, 32, 128), *2 * [(4 * columns, PAGE, 8, 128)])
    )
    table = torch.arange(4 * columns, dtype=torch.int32, device=device).view(4, columns)
    cu, lengths = (torch.arange(n, dtype=torch.int32, device=device) for n in (5, 4))
    lengths += columns * PAGE - 3
    outs = [torch.empty_like(q) for _ in range(4)]

    def attend(out: Tensor) -> None:
        prefix_prefill.prefix_prefill(q, None, None, *cache, table, cu, lengths, max_seqlen_q=1, out=out)

    attend(outs[0])
    wanted = outs[0].clone()
    torch.cuda.synchronize()

    def repeat(out: Tensor) -> bool:
        same = []
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                out.zero_()
                attend(out)
                same.append(torch.equal(out, wanted))
        return all(same)

    assert all(map(repeat, outs))
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(repeat, outs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(outs[0])
    outs[0].zero_()
    graph.replay()
    assert_bitwise_equal(outs[0], wanted)
