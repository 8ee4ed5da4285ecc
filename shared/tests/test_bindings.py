"""When does a launch of other sizes take what was compiled before, and when must Triton be asked again?"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from kernel_reference import bindings
from kernel_reference.launching import Launch

CPU = torch.device("cpu")


class Sizes(NamedTuple):
    HEADS: int
    scale: float


class Kernel:
    """Stands for a kernel of (tensors ..., tokens, stride, sizes), specialised on all but the tokens."""

    def __init__(self) -> None:
        self.params = [
            SimpleNamespace(name=name, do_not_specialize=name == "tokens")
            for name in ("x", "tokens", "stride", "sizes")
        ]
        self.bound, self.started = 0, 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        def bind(*given: Any, **options: Any) -> Any:
            self.bound += 1
            return self.compiled

        return bind

    @property
    def compiled(self) -> Any:
        def start(*given: Any) -> None:
            self.started += 1

        class Compiled:
            def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
                return start

        return Compiled()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(bindings, "_found", {})
    return Kernel()


def aligned(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    room = torch.empty(32, dtype=dtype)
    return room[(-room.data_ptr() % 16) // room.element_size() :][:8]


SIZES = Sizes(4, 0.5)


def called(
    kernel: Kernel, tokens: int, stride: Any = 8, sizes: Any = SIZES, *, tensors: Any = None, **more: Any
) -> Launch:
    made = Launch(kernel, (tokens % 7 + 1, 1, 1), (tokens, stride, sizes), CPU, **{"num_warps": 4, **more})
    made(*([aligned()] if tensors is None else tensors))
    return made


def test_a_launch_of_other_sizes_takes_what_was_compiled_without_asking_triton(kernel: Kernel) -> None:
    made = [called(kernel, tokens) for tokens in (100, 101, 4096, 2**31 - 1)]
    assert (kernel.bound, kernel.started) == (1, 3)
    # What tells them apart is 6 kB, and kept once for all.
    assert [launch._kept.signature for launch in made] == [None] * 4


def test_a_resized_launch_shares_what_either_compiled_and_asks_triton_for_wider_integers(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Launch(kernel, (3, 1, 1), (100, 8, SIZES), CPU, num_warps=4)
    other = first.resized((5, 1, 1), (2**31 - 1,))
    assert (other.grid, other.rest) == ((5, 1, 1), (2**31 - 1, 8, SIZES))
    other(aligned())
    monkeypatch.setattr(bindings, "signature_of", None)
    for made in (first, other, first.resized((7, 1, 1), (1,))):
        made(aligned())
    assert (kernel.bound, kernel.started, first.rest) == (1, 3, (100, 8, SIZES))
    monkeypatch.undo()
    for tokens in (2**31, 2**63):
        first.resized((5, 1, 1), (tokens,))(aligned())
    assert kernel.bound == 3


@pytest.mark.parametrize(
    "other",
    [
        {"stride": 9},
        {"sizes": Sizes(8, 0.5)},
        {"sizes": (4, 0.5)},
        {"stride": 8.0},
        {"sizes": Sizes(4, 1)},
        {"num_warps": 8},
        {"as_integers": [0]},
        {"tokens": 2**31},
        {"tokens": 2**63},
        {"tensors": [aligned(torch.int32)]},
        {"tensors": [None]},
        {"group": lambda x: (x,)},
    ],
    ids=lambda other: " ".join(other),
)
def test_what_triton_would_compile_anew_goes_to_triton(kernel: Kernel, other: dict[str, Any]) -> None:
    called(kernel, 100, sizes=Sizes(4, 1.0) if other.get("sizes") == Sizes(4, 1) else SIZES)
    called(kernel, **{"tokens": 100, **other})
    assert kernel.bound == 2


def test_tensors_that_are_not_aligned_and_kernels_of_unknown_parameters_go_to_triton(kernel: Kernel) -> None:
    called(kernel, 100)
    called(kernel, 101, tensors=[aligned()[1:]])
    assert kernel.bound == 2
    kernel.params = []
    called(kernel, 102)
    called(kernel, 103)
    assert kernel.bound == 4


def test_the_table_is_emptied_before_it_grows_without_end(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "_MOST", 3)
    for stride in range(10):
        called(kernel, 100, stride=stride)
        assert len(bindings._found) <= 3
