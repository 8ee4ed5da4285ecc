"""Does the first call of several launches compile their kernels beside one another, and start each once?"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar, copy_context
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernel_reference import together
from kernel_reference.launching import Launch
from kernel_reference.together import _Loading, begin_triton, compiled_together, gathered_launches

CUDA = torch.device("cuda", 0)
# As Triton has it: one mode a context.
HAS_A_MODE = ContextVar("HAS_A_MODE", default=False)


class Kernel:
    """Stands for one under ``triton.jit``: what it compiles waits until another does."""

    def __init__(self, both: threading.Barrier, pool: Callable[[], Any]) -> None:
        self.both, self.pool = both, pool
        self.compiled: list[tuple[Any, ...]] = []
        self.started: list[tuple[Any, ...]] = []

    def warmup(self, *given: Any, grid: tuple[int, int, int], **options: Any) -> None:
        def make() -> Any:
            self.both.wait(20)
            self.compiled.append((grid, given, options))
            return SimpleNamespace(run=None)

        self.pool().submit(make)

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *given, **options: self.started.append((grid, given, options))


@pytest.fixture
def modes(monkeypatch) -> list[Any]:
    """Those in which kernels were compiled, with a stand-in for Triton and a GPU."""
    opened: list[Any] = []

    def mode(pool: Any, *, ignore_errors: bool) -> Any:
        if HAS_A_MODE.get():
            raise RuntimeError("Another AsyncCompileMode is already active")
        opened.append(pool)
        return nullcontext()

    monkeypatch.setitem(__import__("sys").modules, "triton", SimpleNamespace(AsyncCompileMode=mode))
    # As from 3.7 on: see test_launchers.py.
    monkeypatch.setattr(together, "are_built", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return opened


def test_kernels_of_one_call_are_compiled_at_once_and_then_started_in_order(modes) -> None:
    both = threading.Barrier(2)
    kernels = [Kernel(both, lambda: modes[-1]) for _ in range(2)]
    launches = [
        Launch(kernel, (3, 1, 1), (number,), torch.device("cpu"), num_warps=4) for number, kernel in enumerate(kernels)
    ]
    x = torch.empty(8)

    def run(tensor: torch.Tensor) -> None:
        for launch in launches:
            launch(tensor)

    call = compiled_together(run, CUDA)
    # Whoever only asks for launches gets them, and has nothing compiled.
    assert [launch for launch, _ in gathered_launches(call, x)] == launches
    assert not modes
    for count in (1, 2):
        call(x)
        for number, kernel in enumerate(kernels):
            assert kernel.compiled == [((3, 1, 1), (x, number), {"num_warps": 4})]
            assert len(kernel.started) == count
    assert len(modes) == 1


def test_the_longest_kernels_are_compiled_first_and_of_equal_ones_the_last(modes) -> None:
    order: list[int] = []
    launches = []
    for number, length in enumerate((3, 9, 9, 5)):
        warmup = partial(lambda number, *given, **options: order.append(number), number)
        kernel = type("Long", (Kernel,), {"warmup": staticmethod(warmup), "src": "-" * length})
        kernel = kernel(threading.Barrier(1), lambda: modes[-1])
        launches.append(Launch(kernel, (3, 1, 1), (), torch.device("cpu")))
    compiled_together(lambda tensor: [launch(tensor) for launch in launches], CUDA)(torch.empty(8))
    assert order == [2, 1, 3, 0]


class Source:
    """Stands for what Triton's AsyncCompileMode is given to compile."""

    def __init__(self, name: str, order: list[str], begun: threading.Barrier) -> None:
        self.name, self.order, self.begun = name, order, begun

    def make_ir(self, target: str) -> str:
        assert target == "sm_90"
        self.order.append(self.name)
        # Where the next did not wait, it is here meanwhile.
        time.sleep(0.02)
        self.order.append(self.name)
        if self.name == "fails":
            raise ValueError("what does not trace")
        return self.name


def test_kernels_are_traced_one_after_another_in_the_order_in_which_they_are_asked_for(modes) -> None:
    order: list[str] = []
    names = ["first", "kept", "fails", "last"]
    begun = threading.Barrier(len(names))
    sources = [Source(name, order, begun) for name in names]

    def compiling(src: Source) -> Callable[[], Any]:
        """As Triton names it; one that its cache has is not traced."""

        def async_compile() -> Any:
            begun.wait(20)
            return SimpleNamespace(run=src.name if src.name == "kept" else src.make_ir(target="sm_90"))

        return async_compile

    with _Loading(len(names)) as pool:
        made = [pool.submit(compiling(source)) for source in sources]
    assert order == ["first", "first", "fails", "fails", "last", "last"]
    assert [future.result().run for future in made if future.exception() is None] == ["first", "kept", "last"]
    # As they were before.
    assert not any("make_ir" in vars(source) for source in sources if source.name != "kept")


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_no_garbage_is_collected_while_kernels_are_traced(modes, is_on) -> None:
    found: list[bool] = []
    both = threading.Barrier(2, lambda: found.append(gc.isenabled()))
    launches = [Launch(Kernel(both, lambda: modes[-1]), (3, 1, 1), (), torch.device("cpu")) for _ in range(2)]
    was_on = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        compiled_together(lambda tensor: [launch(tensor) for launch in launches], CUDA)(torch.empty(8))
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if was_on else gc.disable)()
    assert found == [False]


def test_a_first_call_inside_the_caller_s_own_mode_compiles_too(modes) -> None:
    both = threading.Barrier(2)
    launches = [Launch(Kernel(both, lambda: modes[-1]), (3, 1, 1), (), torch.device("cpu")) for _ in range(2)]
    call = compiled_together(lambda tensor: [launch(tensor) for launch in launches], CUDA)
    within = copy_context()
    within.run(HAS_A_MODE.set, True)
    within.run(call, torch.empty(8))
    assert [len(launch.kernel.started) for launch in launches] == [1, 1]


def test_what_triton_begins_with_goes_on_beside_a_first_call_until_a_kernel_is_compiled(monkeypatch) -> None:
    begun, order = threading.Event(), ["planned"]

    def hash_files() -> None:
        begun.wait(20)
        order.append("hashed")

    kernel = SimpleNamespace(warmup=lambda *given, **options: order.append("compiled"))
    monkeypatch.setattr(together, "_hash_triton", hash_files)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    begin_triton.cache_clear()
    try:
        # Without a GPU its driver fails, and whoever launches is told.
        assert len(begin_triton()) == 2
        threading.Timer(0.05, begun.set).start()
        Launch(kernel, (3, 1, 1), (), torch.device("cpu")).compile(torch.empty(8))
    finally:
        begun.set()
        begin_triton.cache_clear()
    assert order == ["planned", "hashed", "compiled"]


def test_a_call_of_one_launch_is_compiled_as_it_is_started(modes) -> None:
    kernel = Kernel(threading.Barrier(1), lambda: modes[-1])
    compiled_together(Launch(kernel, (3, 1, 1), (), torch.device("cpu")), CUDA)(torch.empty(8))
    assert not modes
    assert len(kernel.started) == 1


def test_launches_are_gathered_in_their_own_thread_alone_and_none_is_started() -> None:
    kernel = Kernel(threading.Barrier(1), lambda: None)
    launch = Launch(kernel, (3, 1, 1), (), torch.device("cpu"))
    x = torch.empty(8)

    def run() -> None:
        launch(x)
        other = threading.Thread(target=launch, args=(x,))
        other.start()
        other.join()

    gathered = gathered_launches(run)
    assert [found for found, _ in gathered] == [launch]
    assert gathered[0][1][0] is x
    assert len(kernel.started) == 1


def test_gathering_within_a_call_that_is_gathered_starts_nothing_and_leaves_its_launches(modes) -> None:
    kernels = [Kernel(threading.Barrier(1), lambda: modes[-1]) for _ in range(4)]
    first, inner, asked_for, last = (Launch(kernel, (3, 1, 1), (), torch.device("cpu")) for kernel in kernels)
    nested = compiled_together(inner, CUDA)

    def run(tensor: torch.Tensor) -> None:
        first(tensor)
        nested(tensor)
        assert [launch for launch, _ in gathered_launches(asked_for, tensor)] == [asked_for]
        last(tensor)

    x = torch.empty(8)
    call = compiled_together(run, CUDA)
    assert [launch for launch, _ in gathered_launches(call, x)] == [first, inner, last]
    assert not any(kernel.started or kernel.compiled for kernel in kernels)
    # As they are compiled beside each other, and then started, once.
    call(x)
    assert [len(kernel.started) for kernel in kernels] == [1, 1, 0, 1]
    assert [len(kernel.compiled) for kernel in kernels] == [1, 1, 0, 1]
