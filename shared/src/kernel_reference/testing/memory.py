"""The memory of a GPU that several processes test on: tests that take much of it take turns, and none keeps it.

The pytest plugin calls :func:`give_back` after every test. A test that takes 4 GiB or more is decorated with
``@much_memory()``. Nothing of this does anything where there is no GPU.
"""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kernel_reference.testing import contract
from kernel_reference.testing.guards import tensors_in

# What a process may keep between two tests: of 16 processes, a fifth of an 80 GB GPU.
KEPT_BYTES = 2**30


def give_back(most: int = KEPT_BYTES) -> None:
    """Return the memory that torch's allocator keeps for the next test to the GPU, if it is more than this."""
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > most:
        # Autograd's graphs hold tensors in cycles.
        gc.collect()
        torch.cuda.empty_cache()


def bytes_alive() -> int:
    """Bytes of all plain tensors that somebody holds: what is kept from call to call shows as growth."""
    gc.collect()
    plain = [one for one in gc.get_objects() if type(one) is torch.Tensor and not one.is_meta]
    # Sparse ones, such as tests of arguments hold, have no storage of their own.
    storages = [one.untyped_storage() for one in plain if one.layout is torch.strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def peak_beyond(run: Callable[[], Any]) -> int:
    """Bytes of a GPU that a second call takes at its peak beyond what stood before it and what it returns."""
    run()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = run()
    torch.cuda.synchronize()
    returned = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(results))
    return torch.cuda.max_memory_allocated() - before - returned


def lock_file() -> Path:
    """What processes on the same GPUs lock for their turn."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "all").replace(os.sep, "-")
    return Path(tempfile.gettempdir(), f"kernel-reference-{os.getuid()}-gpu-{devices}.lock")


@contextmanager
def much_memory() -> Iterator[None]:
    """For a ``with``, or to decorate a test that takes 4 GiB or more: one process of all at a time is in here.

    Where memory is too small all the same, on a CPU too, the test is skipped.
    """
    with ExitStack() as turn:
        if torch.cuda.is_available():
            file = turn.enter_context(lock_file().open("w"))
            # Until the file is closed.
            fcntl.flock(file, fcntl.LOCK_EX)
            turn.callback(give_back, 0)
        try:
            yield
        except RuntimeError as error:
            if "allocate memory" not in str(error) and "out of memory" not in str(error):
                raise
            pytest.skip("needs more memory than this machine gives out")


def check_far_apart(
    function: Callable[..., Any], inputs: Sequence[Any], dims: Mapping[int, int | Sequence[int]] | None = None
) -> None:
    """:func:`.contract.check_int64_offsets` as a test that takes :func:`much_memory`."""
    with much_memory():
        contract.check_int64_offsets(function, inputs, dims)
