"""Is what starts a kernel built beside it, as Triton would build it, where Triton builds one?"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kernel_reference import together
from kernel_reference.launchers import are_built, launcher_builder
from kernel_reference.launching import Launch
from kernel_reference.together import compiled_together

DRIVER = "triton.backends.nvidia.driver"


def module(name: str, **names: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(names)
    return made


@pytest.fixture
def built(monkeypatch) -> list[Any]:
    """What a C compiler was asked for, by a stand-in for Triton 3.6's driver."""
    asked: list[Any] = []

    def compile_module_from_src(**given: Any) -> None:
        asked.append(given)

    driver = module(
        DRIVER, make_launcher=lambda *given: given, compile_module_from_src=compile_module_from_src,
        library_dirs=lambda: ["lib"], include_dirs=["include"], libraries=["cuda"],
    )  # fmt: skip
    nvidia = module("triton.backends.nvidia", driver=driver)
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia", nvidia)
    monkeypatch.setitem(sys.modules, DRIVER, driver)
    return asked


def compiling(backend: str, make: Callable[[], Any] = lambda: None, **source: Any) -> Callable[[], Any]:
    """As Triton gives it to a mode."""
    src, target = SimpleNamespace(**source), SimpleNamespace(backend=backend)

    def async_compile() -> Any:
        return make() if (src, target) else None

    return async_compile


def test_one_is_built_of_the_types_that_its_kernel_is_compiled_for(built) -> None:
    kinds = {"d_x": "tensordesc<bf16[1,1,64,64],L>", "p_x": "*bf16", "n": "i32", "strides": ("i32", "constexpr"),
             "SIZE": "constexpr"}  # fmt: skip
    source = {
        "signature": kinds, "fn": SimpleNamespace(arg_names=list(kinds)), "constants": {"SIZE": 64, (3, 1): 1},
    }  # fmt: skip
    build = launcher_builder(compiling("cuda", **source))
    assert build is not None
    assert not built
    build()
    # Whatever the descriptor is: one of the GPU's own is None to Triton only where it is taken apart.
    text = ({(4,): 64, (3, 1): 1}, kinds, [{}])
    rest = {"library_dirs": ["lib"], "include_dirs": ["include"], "libraries": ["cuda"]}
    assert built == [{"src": text, "name": "__triton_launcher", **rest}]


def test_what_fails_is_left_to_whoever_loads_the_kernel(built) -> None:
    build = launcher_builder(compiling("cuda", signature={}, fn=None, constants={}))
    assert build is not None
    build()
    assert not built


def test_none_is_built_for_other_makes_nor_where_triton_builds_none(built, monkeypatch) -> None:
    assert are_built()
    assert launcher_builder(compiling("hip")) is None
    assert launcher_builder(lambda: None) is None
    monkeypatch.delattr(sys.modules[DRIVER], "make_launcher")
    assert not are_built()
    assert launcher_builder(compiling("cuda")) is None


@pytest.mark.parametrize("count", [1, 2])
def test_a_first_call_begins_those_of_all_kernels_before_any_is_compiled(built, monkeypatch, count) -> None:
    order: list[str] = []
    begun = threading.Barrier(2 * count)

    class Compiled:
        @property
        def run(self) -> None:
            order.append("loaded")

    def make() -> Compiled:
        # Of each kernel two threads are here, or this fails.
        begun.wait(20)
        order.append("compiled")
        return Compiled()

    def build(**_: Any) -> None:
        begun.wait(20)
        order.append("built")

    class Kernel:
        def warmup(self, *given: Any, **options: Any) -> None:
            source = {"signature": {}, "fn": SimpleNamespace(arg_names=[]), "constants": {}}
            pools[-1].submit(compiling("cuda", make, **source))

        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
            return lambda *given, **options: order.append("started")

    pools: list[Any] = []
    triton = module("triton", AsyncCompileMode=lambda pool, ignore_errors: pools.append(pool) or nullcontext())
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(sys.modules[DRIVER], "compile_module_from_src", build)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(together, "begin_triton", lambda: ())
    launches = [Launch(Kernel(), (1, 1, 1), (), torch.device("cpu")) for _ in range(count)]
    run = compiled_together(lambda x: [launch(x) for launch in launches], torch.device("cuda", 0))
    run(torch.empty(8))
    # A kernel is loaded once what starts it is there, and started once all are.
    assert order.count("built") == order.count("compiled") == order.count("loaded") == count
    assert order.index("loaded") > order.index("built")
    assert order[-count:] == ["started"] * count
