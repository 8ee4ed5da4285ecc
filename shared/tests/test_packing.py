"""Is the driver handed what Triton's C function would hand it? By a driver that reads that and starts nothing."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from kernel_reference import packing
from kernel_reference.packing import Late, find_packer

triton = pytest.importorskip("triton")

GRID = (132, 2, 1)
SIGNATURE = {
    "d": "tensordesc<bf16[1, 64],L>", "q": "*bf16", "results": ("*bf16", "constexpr", ("i64", "fp32")), "n": "i32",
    "absent": "constexpr", "flag": "i1", "config": "constexpr", "workspace": "*fp32",
}  # fmt: skip
# A descriptor and its sizes and strides; pointers; numbers, each of its size; and what Triton adds.
SIZES = [128, 4, 4, 8, 8, 8, 8, 8, 4, 4, 1, 8, 8, 8]
FORMATS = "iiqqQQqfibQQQ"


class Config(NamedTuple):
    pair: tuple[int, int] = (1, 2)


class Driver:
    """Notes what it is to launch, and answers with a code."""

    def __init__(self) -> None:
        self.sizes, self.launched, self.code = list(SIZES), list[Any](), 0
        self.meanwhile: Callable[[], object] = lambda: None

    def sizes_of(self, function: int) -> list[int]:
        return self.sizes

    def launch(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        if self.code:
            return self.code
        self.meanwhile()
        it, (place, *places) = config._obj, parameters
        values = [
            struct.unpack_from(f"<{kind}", ctypes.string_at(at, 8))[0] for kind, at in zip(FORMATS, places, strict=True)
        ]
        own = (packing.Attribute * it.count).from_address(it.attributes)
        attributes = [(attribute.id, attribute.value[0]) for attribute in own]
        shape = (*(getattr(it, size) for size in packing.SIZES), it.stream)
        self.launched.append((function.value, shape, attributes, place, values))
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(packing, "driver", lambda: made)
    monkeypatch.setattr(packing, "place_of", lambda value: value.place)
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    return made


def compiled() -> SimpleNamespace:
    return SimpleNamespace(
        run=SimpleNamespace(launch_cooperative_grid=False, launch_pdl=True), packed_metadata=(4, 1, 8192), function=17,
        metadata=SimpleNamespace(tensordesc_meta=[{}]), src=SimpleNamespace(signature=SIGNATURE),
    )  # fmt: skip


MAP = SimpleNamespace(place=1 << 40)


def arguments(workspace: Any, out: Any = 64) -> tuple[Any, ...]:
    return MAP, 7, 64, 64, 1, 2**47, (out, None, (-3, 0.5)), -1, None, True, Config(), workspace


def values(workspace: int, out: int = 64) -> list[Any]:
    return [7, 64, 64, 1, 2**47, out, -3, 0.5, -1, 1, workspace, 0, 0]


def test_the_driver_is_handed_every_argument_and_late_addresses_as_they_come(driver) -> None:
    streams = [5, 6, 7, 8]
    packer = find_packer(compiled(), lambda device: streams[len(driver.launched)] + device, 100)
    begin = packer.pack(GRID, arguments(Late(1), Late(0)), lambda: False)
    for out, workspace in ((32, 48), (80, 96), (16, 2**48)):
        assert begin(out, workspace)
    shape = (*GRID, 128, 1, 1, 8192)
    assert driver.launched == [
        (17, (*shape, stream + 100), [(6, 1)], MAP.place, values(workspace, out))
        for stream, (out, workspace) in zip(streams, ((32, 48), (80, 96), (16, 2**48)), strict=False)
    ]
    assert packer.pack(GRID, arguments(112), lambda: False)()
    assert driver.launched[-1][-1] == values(112)


def test_starts_within_a_start_as_of_other_threads_have_memory_of_their_own(driver) -> None:
    begin = find_packer(compiled(), lambda device: 0, 0).pack(GRID, arguments(Late(0)), lambda: False)

    def other() -> None:
        driver.meanwhile = lambda: None
        begin(96)

    for _ in range(2):
        driver.meanwhile = other
        begin(48)
    assert [launched[-1] for launched in driver.launched] == [values(96), values(48)] * 2


def test_nothing_is_started_where_a_profiler_watches_or_the_driver_refuses(driver) -> None:
    hooks: list[str] = []
    begin = find_packer(compiled(), lambda device: 0, 0).pack(GRID, arguments(16), lambda: bool(hooks))
    hooks.append("a profiler's")
    assert not begin()
    hooks.clear()
    driver.code = 700
    assert not begin()
    assert not driver.launched
    driver.code = 0
    assert begin()


@pytest.mark.parametrize("wrong", ["a number too large", "no place for a descriptor", "no program"])
def test_what_cannot_be_packed_is_left_to_triton(driver, wrong: str) -> None:
    packer = find_packer(compiled(), lambda device: 0, 0)
    given, grid = list(arguments(16)), GRID
    if wrong == "a number too large":
        given[7] = 2**31
    elif wrong == "no place for a descriptor":
        given[0] = SimpleNamespace(place=None)
    else:
        grid = (0, 1, 1)
    assert packer.pack(grid, tuple(given), lambda: False) is None


@pytest.mark.parametrize(
    "unknown", ["a version", "parameters", "a cluster", "a cooperative grid", "a type", "a descriptor", "no signature"]
)
def test_nothing_is_packed_for_what_is_not_known(driver, monkeypatch: pytest.MonkeyPatch, unknown: str) -> None:
    kernel = compiled()
    assert find_packer(kernel, lambda device: 0, 0) is not None
    if unknown == "a version":
        monkeypatch.setattr(triton, "__version__", "3.7.1")
    elif unknown == "parameters":
        driver.sizes[3] = 4
    elif unknown == "a cluster":
        kernel.packed_metadata = (4, 2, 8192)
    elif unknown == "a cooperative grid":
        kernel.run.launch_cooperative_grid = True
    elif unknown == "a type":
        kernel.src.signature = {**SIGNATURE, "n": "bf16"}
    elif unknown == "a descriptor":
        kernel.metadata.tensordesc_meta = [None]
    else:
        del kernel.src.signature
    assert find_packer(kernel, lambda device: 0, 0) is None
