"""Is a descriptor that Triton made encoded anew for another promotion, and left alone where it is not known?"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernel_reference import tensor_maps
from kernel_reference.launching import has_gluon
from kernel_reference.tensor_maps import TmaBox, promote

nvidia = pytest.importorskip("triton.backends.nvidia.driver")

META = {"swizzle": 2, "elem_size": 2, "elem_type": 9, "block_size": [1, 4, 32], "fp4_padded": False}


class Driver:
    """Stands for the driver: a map is all of its promotion's number."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.code = 0

    def __call__(self, to: Any, kind: int, rank: int, address: Any, *given: Any) -> int:
        self.calls.append((kind, rank, address.value, *(x if isinstance(x, int) else [*x] for x in given)))
        ctypes.memmove(to.value, bytes([given[-2]]) * 128, 128)
        assert to.value % 64 == 0
        return self.code


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    tensor_maps._warn_once.cache_clear()
    monkeypatch.setattr(tensor_maps, "_driver", lambda: made)
    return made


def promoted(monkeypatch: pytest.MonkeyPatch, held: bytes) -> Callable[[int], bytes]:
    """What an object that holds a map holds once it is promoted."""
    memory = ctypes.create_string_buffer(held, 128)
    monkeypatch.setattr(tensor_maps, "place_of", lambda made: ctypes.addressof(memory))

    def of(promotion: int) -> bytes:
        descriptor = SimpleNamespace(base=torch.empty(5, 6, 40), shape=[5, 6, 40], strides=[400, 48, 1])
        promote(None, META, descriptor, promotion)
        return memory.raw

    return of


def test_a_map_is_encoded_with_another_promotion_in_its_place(driver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert promoted(monkeypatch, bytes([2]) * 128)(0) == bytes(128)
    assert promoted(monkeypatch, bytes([2]) * 128)(64) == bytes([1]) * 128
    kind, rank, _, sizes, strides, box, steps, interleave, swizzle, _, fill = driver.calls[0]
    assert (kind, rank, interleave, swizzle, fill) == (nvidia.TMA_DTYPE_DEVICE_TO_HOST[9], 3, 0, 2, 0)
    # In bytes, what lies side by side first.
    assert (sizes, strides[:2], box, steps) == ([40, 6, 5], [96, 800], [32, 4, 1], [1, 1, 1])


@pytest.mark.filterwarnings("ignore:TMA descriptors")
def test_a_map_that_the_driver_would_have_made_otherwise_is_left_alone(driver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert promoted(monkeypatch, bytes([3]) * 128)(0) == bytes([3]) * 128
    driver.code = 1
    assert promoted(monkeypatch, bytes([2]) * 128)(0) == bytes([2]) * 128


def test_without_a_driver_or_for_another_object_nothing_is_done_and_one_warning_says_so(
    driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(UserWarning, match=r"^TMA descriptors of Triton \S+ cannot be encoded anew"):
        promote(("a map of another version",), META, None, 0)
    assert not driver.calls
    monkeypatch.undo()
    monkeypatch.setattr(tensor_maps, "_driver", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert promoted(monkeypatch, bytes([2]) * 128)(0) == bytes([2]) * 128


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_driver_encodes_tritons_map_anew() -> None:
    if not has_gluon():
        pytest.skip("needs Gluon for sm_90")
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    box = TmaBox([5, 6, 40], [400, 48, 1], [1, 4, 32])
    base = torch.empty(5, 400, dtype=torch.bfloat16, device="cuda")
    described = TensorDescriptor(base, list(box.sizes), list(box.strides), list(box.box), box.layout)
    others = (None,) * (nvidia.make_tensordesc_arg.__code__.co_argcount - 2)
    kind = {"elem_type": next(x for x in range(16) if nvidia.TMA_DTYPE_DEVICE_TO_HOST.get(x) == 9)}
    made, *_ = nvidia.make_tensordesc_arg(described, META | kind, *others)
    place = tensor_maps.place_of(made)
    assert place is not None
    before = ctypes.string_at(place, 128)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        promote(made, META | kind, described, 0)
    assert ctypes.string_at(place, 128) != before
