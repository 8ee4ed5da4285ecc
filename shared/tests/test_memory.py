"""Do many processes of tests fit on one GPU?"""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest
import torch

from kernel_reference.testing import memory

GIB = 2**30


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, int]:
    """What a GPU that is not there has reserved, in bytes, and a lock of this test's own."""
    held = {"bytes": 0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: held["bytes"])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: held.update(bytes=0))
    monkeypatch.setattr(memory, "lock_file", lambda: tmp_path / "lock")
    return held


def test_what_takes_much_memory_waits_for_its_turn_and_keeps_nothing(reserved, tmp_path: Path) -> None:
    began = threading.Event()

    @memory.much_memory()
    def large() -> None:
        began.set()
        reserved["bytes"] = GIB // 2

    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        other = threading.Thread(target=large)
        other.start()
        assert not began.wait(0.1)
    other.join(10)
    assert began.is_set()
    assert reserved["bytes"] == 0


@pytest.mark.parametrize("text", ["CUDA out of memory. Tried to allocate 4.00 GiB", "can't allocate memory"])
def test_where_memory_is_too_small_a_test_is_skipped_and_other_errors_are_errors(text: str) -> None:
    with pytest.raises(pytest.skip.Exception, match="more memory"), memory.much_memory():
        raise RuntimeError(text)
    with pytest.raises(RuntimeError, match="shape"), memory.much_memory():
        raise RuntimeError("shape")


def test_processes_on_other_gpus_take_turns_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for devices in ("0", "1", "MIG-GPU-5/1/0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        names.add(memory.lock_file())
    assert len(names) == 3
    assert len({name.parent for name in names}) == 1


def test_bytes_alive_grow_by_what_is_held_and_a_sparse_tensor_is_no_obstacle() -> None:
    sparse = torch.eye(3).to_sparse()
    before = memory.bytes_alive()
    held = torch.empty(1000)
    assert memory.bytes_alive() == before + 4000
    del held, sparse
