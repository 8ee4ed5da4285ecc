"""Processes that begin with torch imported, and Triton without its interpreter where that is wanted: forks.

Importing both takes seconds of CPU, a fork milliseconds. The first fork starts the process that all are forked from,
which has imported torch alone and waits; with Triton they are forked from a fork of that. A fork has the environment
and the import path of its caller, and nothing that it does reaches another::

    run_alone("import sys, my_package; assert 'triton' not in sys.modules")
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

_TORCH = ("numpy", "torch")
_TRITON = ("triton", "triton.compiler", "triton.experimental.gluon._runtime")
_FIRST = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from kernel_reference.testing import forks
forks._wait_with_torch(int(sys.argv[2]))
"""
_HERE = __name__


def run_alone(script: str, *, timeout_s: float = 600) -> None:
    """Run lines of Python in a process that has imported torch and nothing else of ours or of Triton.

    script: indented or not. AssertionError, with what it printed, is raised if it fails or takes longer.
    """
    code, printed = outcome_alone(script, os.environ, timeout_s=timeout_s)
    if code is None:
        raise AssertionError(f"it takes longer than {timeout_s} s")
    if code != 0:
        raise AssertionError(printed)


def outcome_alone(script: str, environment: Mapping[str, str], *, timeout_s: float = 600) -> tuple[int | None, str]:
    """The exit code (None: it took longer) and what is printed by such lines, with these variables and no others."""
    with tempfile.TemporaryDirectory(prefix="kernel_reference_") as name:
        folder = Path(name)
        (folder / "script").write_text(textwrap.dedent(script))
        fork = Fork(f"{_HERE}:_run_script", folder, environment)
        try:
            code = fork.wait(timeout_s)
        finally:
            fork.end()
        return code, (folder / "log").read_text(errors="replace")


class Fork:
    """``function(str(folder))`` in a process of its own, whose output is written to ``folder/log``.

    function: ``module:name``. folder: exists; the process runs in it. environment: the process has these variables and
    no others. triton: whether Triton is imported already, as a compiler: TRITON_INTERPRET must not be among them.
    """

    def __init__(
        self, function: str, folder: Path, environment: Mapping[str, str], *, triton: bool = False, descriptor: int = -1
    ) -> None:
        what = {"function": function, "path": sys.path, "environment": dict(environment)}
        (folder / "request").write_text(json.dumps(what))
        (folder / "log").touch()
        self._said = b""
        self._told, its = os.pipe()
        try:
            passed = [its] if descriptor < 0 else [its, descriptor]
            socket.send_fds(_Waiting.get(triton).requests, [os.fsencode(folder)], passed)
        finally:
            os.close(its)

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, below 0 for a signal's number; None if the process still runs after so many seconds."""
        end = time.monotonic() + timeout_s
        while select.select([self._told], [], [], max(0.0, end - time.monotonic()))[0]:
            said = os.read(self._told, 64)
            if not said:
                # Its number and its exit code, or less if whoever waits for it was killed.
                numbers = self._said.split()
                return int(numbers[1]) if len(numbers) == 2 else 1
            self._said += said
        return None

    def end(self) -> None:
        """Kill the process if it still runs; nothing can be asked of it after."""
        # Its number is said at once, but for the first fork, which waits for torch.
        for patience in (0, 1, 10, 100):
            if self.wait(patience if not self._said else 0) is not None:
                break
            if self._said:
                with suppress(ProcessLookupError):
                    os.kill(int(self._said.split()[0]), signal.SIGKILL)
                break
        os.close(self._told)


class _Waiting:
    """A process that waits to be forked, as its caller sees it."""

    started: ClassVar[dict[bool, _Waiting]] = {}
    starting = threading.RLock()

    def __init__(self, triton: bool) -> None:
        # One message is one request, whichever thread or fork of the caller sends it.
        self.requests, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            if triton:
                self.folder = tempfile.TemporaryDirectory(prefix="kernel_reference_")
                environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
                function = f"{_HERE}:_wait_with_triton"
                self.fork = Fork(function, Path(self.folder.name), environment, descriptor=its.fileno())
            else:
                command = [sys.executable, "-c", _FIRST, json.dumps(sys.path), str(its.fileno())]
                self.process = subprocess.Popen(command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)

    @classmethod
    def get(cls, triton: bool) -> _Waiting:
        with cls.starting:
            if triton not in cls.started:
                cls.started[triton] = cls(triton)
            return cls.started[triton]


# What runs in the processes that wait.


def _wait_with_torch(descriptor: int) -> None:
    _wait(_TORCH, descriptor)


def _wait_with_triton(folder: str, descriptor: int) -> None:
    # Triton hashes all of its files before it compiles: a third of a second that each fork would take.
    with suppress(ImportError):
        importlib.import_module("triton.runtime.cache").triton_key()
    _wait(_TRITON, descriptor)


def _wait(modules: tuple[str, ...], descriptor: int) -> None:
    for name in modules:
        with suppress(ImportError):
            importlib.import_module(name)
    # Nobody asks what became of those that tell of a fork's end.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as requests:
        while True:
            folder, descriptors, _, _ = socket.recv_fds(requests, 1 << 16, 2)
            if not folder:
                return
            if os.fork() == 0:
                requests.close()
                _tell_of(Path(os.fsdecode(folder)), *descriptors)
            for one in descriptors:
                os.close(one)


def _tell_of(folder: Path, told: int, *descriptors: int) -> None:
    """Fork, and say the process's number and, when it has ended, its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    process = os.fork()
    if process == 0:
        os.close(told)
        _run(folder, *descriptors)
    for one in descriptors:
        os.close(one)
    # Nobody may want to know any more.
    with suppress(BrokenPipeError):
        os.write(told, f"{process}\n".encode())
        _, status = os.waitpid(process, 0)
        os.write(told, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _run(folder: Path, *descriptors: int) -> None:
    code = 1
    try:
        with (folder / "log").open("wb", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        request = json.loads((folder / "request").read_text())
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.path[:] = request["path"]
        importlib.invalidate_caches()
        module, _, name = request["function"].partition(":")
        getattr(importlib.import_module(module), name)(str(folder), *descriptors)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: what the process that waits has registered is not the fork's.
        os._exit(code)


def _run_script(folder: str) -> None:
    script = Path(folder, "script").read_text()
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
