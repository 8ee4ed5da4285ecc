"""Does the short way hand Triton's C function what Triton's own way does, and is it taken only where it is known?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernel_reference import launching
from kernel_reference.launching import TmaLaunch
from kernel_reference.starting import find_starter

triton = pytest.importorskip("triton")
nvidia = pytest.importorskip("triton.backends.nvidia.driver")

GRID = (132, 1, 1)
BOXES = 2
META = {
    "swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [1, 64], "fp4_padded": False,
}  # fmt: skip


class CFunction:
    """Stands for Triton's C function, which has no code of Python's: remembers what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *given: Any) -> None:
        self.calls.append(given)


class Kernel:
    """Stands for a kernel and, compiled, for what it gives: Triton's own launcher over a C function that is none."""

    def __init__(self, function: CFunction, device: Any) -> None:
        signature = {f"d{i}": "tensordesc<bf16[1, 64],L>" for i in range(BOXES)} | {"p": "*bf16", "n": "i32"}
        metadata = SimpleNamespace(
            target=SimpleNamespace(backend="cuda"), tensordesc_meta=[META] * BOXES, global_scratch_size=0,
            global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1, launch_cooperative_grid=False,
            launch_pdl=True,
        )  # fmt: skip
        self.metadata = metadata
        self.run = nvidia.CudaLauncher(SimpleNamespace(fn=None, constants={}, signature=signature), metadata)
        self.function, self.packed_metadata = 17, (4, 1, 8192)
        self.device = device
        self.bound = 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def whole(*given: Any, **options: Any) -> Any:
            self.bound += bool(options)
            numbers = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in given]
            # As Triton's own way, without hooks.
            self.run(*grid, self.device.get_current_stream(0), self.function, self.packed_metadata, None, None, None,
                     *numbers)  # fmt: skip
            return self

        return whole


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A kernel, the C function that starts it, and the addresses whose descriptors were encoded."""
    function, encoded = CFunction(), []

    def encode(pointer: int, *given: Any) -> tuple[Any, ...]:
        encoded.append(pointer)
        return "map", pointer, repr(given)

    utils = SimpleNamespace(
        launch=function, build_signature_metadata=tuple, fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode
    )
    state = SimpleNamespace(function=function, encoded=encoded, stream=5)
    device = SimpleNamespace(
        utils=utils, get_current_device=lambda: 0, get_current_stream=lambda index: state.stream + index
    )
    monkeypatch.setattr(type(triton.runtime.driver), "active", property(lambda self: device))
    for name in ("PyKernelArg", "ARG_TUPLE", "ARG_KERNEL", "ARG_CONSTEXPR"):
        monkeypatch.setattr(nvidia, name, lambda **given: given, raising=False)
    monkeypatch.setattr(nvidia, "library_dirs", list, raising=False)
    compiling = "compile_module_from_src"
    monkeypatch.setattr(nvidia, compiling, lambda **given: SimpleNamespace(launch=function), raising=False)
    state.kernel = Kernel(function, device)
    return state


def launch(kernel: Kernel) -> TmaLaunch:
    box = launching.TmaBox([8, 64], [64, 1], [1, 64])
    return TmaLaunch(kernel, GRID, (7,), torch.device("cpu"), [box] * BOXES, num_warps=4)


def tensors(count: int = 3) -> list[torch.Tensor]:
    return [torch.empty(8, 64, dtype=torch.bfloat16) for _ in range(count)]


def test_the_short_way_hands_on_what_tritons_own_way_does(started) -> None:
    made, given = launch(started.kernel), tensors()
    for _ in range(2):
        made(*given)
    one, other = started.function.calls
    assert [list(x) if isinstance(x, (list, tuple)) else x for x in one] == [
        list(x) if isinstance(x, (list, tuple)) else x for x in other
    ]
    assert started.kernel.bound == 1


def test_each_call_starts_on_the_stream_that_is_current_then(started) -> None:
    made, given = launch(started.kernel), tensors()
    for stream in (5, 6, 7):
        started.stream = stream
        made(*given)
    assert [call[3] for call in started.function.calls] == [5, 6, 7]


def test_a_descriptor_is_encoded_once_for_an_address_and_anew_for_another(started) -> None:
    made, (one, other, third, out) = launch(started.kernel), tensors(4)
    made(one, other, out)
    started.encoded.clear()
    for _ in range(3):
        for pair in ((one, other), (other, None), (third, other)):
            made(*pair, out)
    assert started.encoded == [x.data_ptr() for x in (one, other, other, other, third)]
    rounds = [str(started.function.calls[first : first + 3]) for first in (1, 4, 7)]
    assert rounds[0] == rounds[1] == rounds[2]


def test_addresses_start_what_tensors_have_compiled_and_encoded_and_nothing_else(started) -> None:
    made, given = launch(started.kernel), tensors()
    addresses = [x.data_ptr() for x in given]
    assert not made.at(*addresses)
    made(*given)
    # Compiled, but no descriptor was encoded on the short way yet.
    assert not made.at(*addresses)
    made(*given)
    assert made.at(*addresses)
    assert str(started.function.calls[-1]) == str(started.function.calls[-2])
    assert made.but_last(*addresses[:-1])(addresses[-1])
    assert str(started.function.calls[-1]) == str(started.function.calls.pop(-2))
    assert not made.at(addresses[1], *addresses[1:])
    hook = lambda metadata: None  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert not made.at(*addresses)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert len(started.function.calls) == 3


def test_a_launch_over_longer_tensors_encodes_those_alone_and_starts_over_its_own_grid(started) -> None:
    made, given = launch(started.kernel), tensors()
    for _ in range(2):
        made(*given)
    started.encoded.clear()
    longer = made.resized((66, 1, 1), (9,), {1: launching.TmaBox([6, 64], [64, 1], [1, 64])})
    for _ in range(2):
        longer(*given)
    assert started.encoded == [given[1].data_ptr()]
    assert longer.at(*[x.data_ptr() for x in given])
    assert {call[0] for call in started.function.calls[-3:]} == {66}
    last, first = (str(call) for call in (started.function.calls[-1], started.function.calls[0]))
    assert "[6, 64]" in last
    assert "[6, 64]" not in first
    assert started.kernel.bound == 1
    # Of the same descriptors, none is encoded again.
    made.resized((5, 1, 1), (8,))(*given)
    assert len(started.encoded) == 1


def test_a_launch_of_either_alignment_takes_addresses_once_the_aligned_one_is_made(started) -> None:
    made, given = launch(started.kernel), tensors()
    run = launching.by_alignment(lambda aligned: made, slice(2))
    addresses = [x.data_ptr() for x in given]
    assert not run.at(*addresses)
    for _ in range(2):
        run(*given)
    assert run.at(*addresses)
    plain = launching.by_alignment(lambda aligned: lambda *tensors: None, slice(2))
    plain(*given)
    assert not plain.at(*addresses)


def test_encoded_descriptors_are_kept_up_to_a_bound(started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_MOST_MAPS", 3)
    made, out = launch(started.kernel), tensors(1)[0]
    kept = tensors(9)
    for one in kept:
        made(one, None, out)
        assert len(made._maps) <= 3


def test_a_profilers_hooks_are_called_by_tritons_own_way(started) -> None:
    made, given = launch(started.kernel), tensors()
    made(*given)
    started.encoded.clear()
    hook = lambda metadata: None  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        made(*given)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert len(started.encoded) == BOXES
    assert not made._maps


@pytest.mark.parametrize("unknown", ["a version", "a device", "scratch memory", "a sanitizer", "another launcher"])
def test_what_is_not_known_goes_tritons_own_way(started, monkeypatch: pytest.MonkeyPatch, unknown: str) -> None:
    kernel = started.kernel
    assert find_starter(kernel) is not None
    if unknown == "a version":
        monkeypatch.setattr(triton, "__version__", "4.0.0")
    elif unknown == "a device":
        kernel.metadata.target.backend = "hip"
    elif unknown == "scratch memory":
        kernel.run.global_scratch_size = 128
    elif unknown == "a sanitizer":
        kernel.run.gsan_enabled = True
    else:
        kernel.run = SimpleNamespace(global_scratch_size=0)
    assert find_starter(kernel) is None
