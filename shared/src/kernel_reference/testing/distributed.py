"""Several ranks on one machine: run a function in each, count the bytes that they exchange.

::

    def check(rank):
        x = collectives.all_gather(torch.tensor([rank]), None)
        assert x.flatten().tolist() == [0, 1]

    distributed.run(2, check)
"""

from __future__ import annotations

import faulthandler
import importlib.util
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, Self
from unittest import mock

import pytest
import torch

# Each takes seconds, and is imported here once and not in every fork; a dispatch mode asks for the first.
import torch._dynamo
from torch.distributed import _functional_collectives as _functional_collectives
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_reference import collectives, peers

# Ranks whose peer is gone say so at once: time for the one that failed first to say it.
_GRACE_S = 0.5
_END_S = 2.0
# So few that they have more than one tile.
_MOST_PROGRAMS = 5


class _InFile(NamedTuple):
    """A function of a file that no path of imports leads to, as pytest loads tests."""

    file: str
    name: str

    def __call__(self, *args: Any) -> Any:
        spec = importlib.util.spec_from_file_location("of_ranks", self.file)
        if spec is None or spec.loader is None:
            raise ImportError(self.file)
        module = importlib.util.module_from_spec(spec)
        # Dataclasses look their module up by name.
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return getattr(module, self.name)(*args)


class _Report(NamedTuple):
    """What a rank says at its end: when, whether by an assertion, and the traceback or else the pickled result."""

    at: float
    failed: str
    asserted: bool
    result: bytes


def run(world: int, fn: Callable[..., Any], *args: Any, deadline: float = 60.0, backend: str = "gloo") -> list[Any]:
    """``fn(rank, *args)`` in ``world`` processes that have a default process group; the results by rank.

    With gloo the processes are forks of this one, which cost milliseconds, each on one thread: ``fn`` may be a closure
    and capture tensors. With another backend they are spawned, and ``fn`` is a function of a file, which is loaded
    again. They find each other by a file, so that no port is taken. Results are what ``torch.save`` takes.

    Args:
        deadline: seconds for all of it, and of a collective that waits for a rank that does not come.
        backend: of ``torch.distributed``; with "nccl" rank r is given GPU r.

    Raises:
        AssertionError: a rank's assertion failed; RuntimeError: it raised something else, or died. Either has the
            traceback of the rank that failed first, and the others are ended.
        pytest.skip.Exception: with gloo where there are GPUs.
        TimeoutError: ranks were not done at the deadline; it says where each of them was.
    """
    if backend == "gloo" and torch.cuda.is_available():
        # What a fork of a process inherits of CUDA it cannot use, and autograd's threads neither.
        pytest.skip("ranks over gloo are forks, which CUDA does not allow: hide the GPUs, by CUDA_VISIBLE_DEVICES=")
    method = "fork" if backend == "gloo" and sys.platform != "win32" else "spawn"
    context = multiprocessing.get_context(method)
    called = fn if method == "fork" else _InFile(fn.__code__.co_filename, fn.__name__)
    with tempfile.TemporaryDirectory() as folder:
        ranks, ends = [], []
        reports: dict[int, _Report] = {}
        for rank in range(world):
            receiving, sending = context.Pipe(duplex=False)
            how = (rank, world, backend, Path(folder), deadline)
            process = context.Process(target=_rank, args=(how, sending, called, args), daemon=True)  # type: ignore[attr-defined]
            with warnings.catch_warnings():
                # Python 3.12 warns of threads, which torch has and the child does not use.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            sending.close()
            ranks.append(process)
            ends.append(receiving)
        try:
            reports = _collect(ends, time.monotonic() + deadline)
            late = [rank for rank in range(world) if rank not in reports]
            _raise_first(reports, world, late, Path(folder))
            if late:
                places = "".join(f"\nrank {rank}:\n{_place(Path(folder), rank, ranks[rank].pid)}" for rank in late)
                raise TimeoutError(f"ranks {late} of {world} were not done after {deadline:g} s{places}")
            return [torch.load(io.BytesIO(reports[rank].result), weights_only=False) for rank in range(world)]
        finally:
            for process in ranks:
                process.join(0.0 if process.exitcode is None and len(reports) < world else _END_S)
                if process.is_alive():
                    process.kill()
                    process.join()


class SentBytes(TorchDispatchMode):
    """Counts, inside a ``with``, what this rank's functional collectives send: ``sent``, and by op ``by_op``.

    By the formulas of :mod:`kernel_reference.collectives`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_op: dict[str, float] = {}

    def __enter__(self) -> Self:  # torch's has no types
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @property
    def sent(self) -> float:
        """Bytes in all."""
        return sum(self.by_op.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace.startswith("_c10d_functional"):
            name = func._schema.name.split("::")[1]
            factor = _sent_of(name, args)
            if factor:
                x = args[0]
                self.by_op[name] = self.by_op.get(name, 0) + factor * x.numel() * x.element_size()
        return func(*args, **(kwargs or {}))


def _sent_of(name: str, args: Any) -> float:
    c10d: Any = torch.distributed.distributed_c10d
    if name == "all_gather_into_tensor":
        return float(args[1] - 1)
    if name == "all_to_all_single":
        # But for the rows that stay here.
        stays = args[2][c10d._resolve_process_group(args[3]).rank()]
        return float(1 - stays / max(1, sum(args[2])))
    if name == "reduce_scatter_tensor":
        return 1 - 1 / float(args[2])
    if name == "all_reduce":
        world: int = c10d._get_group_size_by_name(args[2])
        return 2 * (1 - 1 / world)
    if name == "wait_tensor":
        return 0
    raise NotImplementedError(f"no formula for the bytes of {name}")


@contextmanager
def peers_of_one_machine(buffers: torch.Tensor) -> Iterator[None]:
    """Inside it exchanges by symmetric memory run on a CPU, through ``buffers`` [world, bytes] uint8 that forks share.

    Where all is in order: that nobody waits for a stream is not seen. Kernels run in Triton's interpreter; theirs is
    the second half, and of rows the first, which copy engines have too: their programs do wait for those of the other
    ranks.
    """
    rank = torch.distributed.get_rank()
    rows, heads, parts = (_memory_of_kernels(rank, buffers, *quarters) for quarters in ((0, 2), (2, 3), (3, 4)))
    memories: dict[peers.Purpose, peers.Memory] = {"heads": heads, "states": heads, "parts": parts, "rows": rows}
    for memory in memories.values():
        memory.own.fill_(peers._EMPTY_BYTE)
    # Rows are NaN where nobody has placed any, and ranks meet by what is behind them.
    rows.own[-_MOST_PROGRAMS * len(buffers) * peers._COUNTER_BYTES :].zero_()
    torch.distributed.barrier()
    stream = mock.MagicMock()
    with ExitStack() as changed:
        for place, name, value in (
            (collectives, "_workspace", lambda *_: _Memory(rank, buffers)),
            (collectives, "_side_stream", lambda _: stream),
            (peers, "_MOST_PROGRAMS", _MOST_PROGRAMS),
            (peers, "_memory", partial(_large_enough, memories)),
            (torch.cuda, "stream", lambda _: nullcontext()),
            (torch.cuda, "current_stream", lambda _: stream),
        ):
            changed.enter_context(mock.patch.object(place, name, value))
        yield


class _Memory:
    """What torch's symmetric memory is for, of processes on one machine; its barriers are those of their group."""

    def __init__(self, rank: int, buffers: torch.Tensor) -> None:
        self.rank, self.buffers = rank, buffers

    def barrier(self, channel: int) -> None:
        torch.distributed.barrier()

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        begin = storage_offset * dtype.itemsize
        size = torch.Size(sizes).numel() * dtype.itemsize
        return self.buffers[rank, begin : begin + size].view(dtype).view(sizes)


def _memory_of_kernels(rank: int, buffers: torch.Tensor, first: int, last: int) -> peers.Memory:
    begin, end = (buffers.shape[1] // 4 * quarter for quarter in (first, last))
    addresses = tuple(buffers[one, begin:].data_ptr() for one in range(len(buffers)))
    return peers.Memory(buffers[rank, begin:end], addresses, torch.zeros(1, dtype=torch.int32), None)


def _large_enough(
    memories: dict[peers.Purpose, peers.Memory], purpose: peers.Purpose, size: int, *_: object
) -> peers.Memory:  # fmt: skip
    memory = memories[purpose]
    if (1 if purpose == "rows" else 2) * size > memory.own.numel():
        needed = (2 if purpose == "rows" else 8) * size
        raise ValueError(f"buffers must have {needed} bytes a rank of {purpose}")
    return memory


def _rank(how: tuple[int, int, str, Path, float], sending: Connection, fn: Callable[..., Any], args: Any) -> None:
    """What a process does, a fork of a test's: nothing of that test's own ends may run here."""
    rank, world, backend, folder, deadline = how
    failed, asserted, result = "", False, b""
    try:
        with (folder / f"where-{rank}").open("w") as where:
            # Not by dump_traceback_later, which waits for ever in a fork of a process that has one running, as pytest.
            faulthandler.register(signal.SIGUSR1, file=where)
            torch.set_num_threads(1)
            if backend == "gloo" and sys.platform == "linux":
                # A machine's own name may lead nowhere.
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            if backend == "nccl":
                torch.cuda.set_device(rank)
            c10d: Any = torch.distributed
            store = c10d.FileStore(str(folder / "ranks"), world)
            torch.distributed.init_process_group(
                backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=deadline)
            )
            if backend == "gloo":
                # A rank that is done already would close connections that another is still making.
                torch.distributed.barrier()
            held = io.BytesIO()
            torch.save(fn(rank, *args), held)
            result = held.getvalue()
    except BaseException as error:
        failed, asserted = traceback.format_exc(), isinstance(error, AssertionError)
    sending.send(_Report(time.monotonic(), failed, asserted, result))
    sending.close()
    if not failed:
        if backend == "gloo":
            # Nor may it close those that another still reads from; one that failed has closed its own.
            with suppress(RuntimeError):
                torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _collect(ends: list[Connection], until: float) -> dict[int, _Report]:
    """The reports by rank: all, or those that came by the deadline or shortly after a failure."""
    reports: dict[int, _Report] = {}
    open_ends = dict(enumerate(ends))
    while open_ends:
        ready = wait([*open_ends.values()], max(0.0, until - time.monotonic()))
        if not ready:
            break
        for rank, end in list(open_ends.items()):
            if end in ready:
                try:
                    reports[rank] = end.recv()
                except EOFError:
                    # Before any of those to whom its end is an error.
                    reports[rank] = _Report(0.0, "it ended without a word\n", False, b"")
                del open_ends[rank]
                if reports[rank].failed:
                    until = min(until, time.monotonic() + _GRACE_S)
    return reports


def _raise_first(reports: dict[int, _Report], world: int, late: list[int], folder: Path) -> None:
    failures = sorted((report.at, rank) for rank, report in reports.items() if report.failed)
    if failures:
        _, rank = failures[0]
        report = reports[rank]
        raise (AssertionError if report.asserted else RuntimeError)(f"rank {rank} of {world} failed:\n{report.failed}")


def _place(folder: Path, rank: int, pid: int) -> str:
    """The stack of a rank, which it writes down when it is asked to."""
    where = folder / f"where-{rank}"
    until = time.monotonic() + _GRACE_S
    if where.exists():
        os.kill(pid, signal.SIGUSR1)
        while not where.stat().st_size and time.monotonic() < until:
            time.sleep(0.01)
    return where.read_text() if where.exists() else ""
