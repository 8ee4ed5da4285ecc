"""Mutation testing: plant faults and see a package's tests go red: ``python -m kernel_reference.testing.faults DIR``.

A fault is a patch in the package's ``tests/faults``, of files under its ``src``. It is applied to a copy in a temporary
folder, never to the working tree, and the package's tests are run against the copy, which is found before any installed
wheel. The lines before the patch proper may say, in one line each, what the fault is and which tests must catch it::

    # the last row is written whether or not it is there
    # tests: tests/test_split.py -k "ragged or empty"

Without the second line the whole suite runs. A fault is caught if a test that passes without it fails with it, and
fails by an assertion: a NameError, an illegal instruction or a run that never ends would be seen without any test. What
passes without faults is read from ``--passed FILE``, which the suite writes when it runs with
``-p kernel_reference.testing.results --write-passed FILE``; without it each selection of tests runs once clean.

Tests run in forks of this process, which has imported torch, Triton and pytest once for all of them. Arguments after
``--`` go to pytest. The exit code is 0 if every fault is caught, 1 if one survives, does not apply or cannot be judged,
2 if there are none.
"""

from __future__ import annotations

import argparse
import compileall
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest

from kernel_reference.testing.results import Observer

CAUGHT = "caught"
SURVIVED = "SURVIVED"
BROKEN = "BROKEN"

_TIMEOUT_S = 600
# Imported before the first fork where they are installed: seconds of each test run, and no thread is started by it.
# The plugin first: it says, before Triton is imported, whether kernels are interpreted.
_WARM = (
    "kernel_reference.testing.pytest_plugin", "torch._dynamo", "triton", "hypothesis", "numpy", "xdist.plugin",
    "xdist.looponfail", "tilelang",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A patch, what it does, and the pytest arguments that select the tests which must catch it (none: all tests)."""

    patch: Path
    description: str
    tests: tuple[str, ...]

    @classmethod
    def read(cls, patch: Path) -> Fault:
        """Parse the lines before the first ``diff`` or ``---``."""
        described: list[str] = []
        tests: list[str] = []
        for line in patch.read_text().splitlines():
            if line.startswith(("diff ", "--- ")):
                break
            text = line.removeprefix("#").strip()
            if text.startswith("tests:"):
                tests += shlex.split(text.removeprefix("tests:"))
            elif text:
                described.append(text)
        return cls(patch, " ".join(described), tuple(tests))


@dataclass(frozen=True)
class Outcome:
    """CAUGHT, SURVIVED or BROKEN, and by which test or why; output is pytest's, for the last two."""

    fault: Fault
    verdict: str
    reason: str
    seconds: float
    output: str = ""


def run_faults(
    package: Path, pytest_args: Sequence[str] = (), *, jobs: int = 2, passed: Path | None = None, only: str = ""
) -> list[Outcome]:
    """Plant each fault of ``package`` and return what became of it, in the patches' order; ``jobs`` of them at a time.

    passed: a file with the tests that pass without faults; if left out, they are run. only: a regular expression that
    the names of the patches must match. Prints a line for each fault as it is done. ValueError is raised if the package
    has no ``src`` folder.
    """
    package = package.resolve()
    if not (package / "src").is_dir():
        raise ValueError(f"package must be a folder that holds src and tests/faults, got {package}")
    faults = [Fault.read(patch) for patch in sorted((package / "tests" / "faults").glob("*.patch"))]
    faults = [fault for fault in faults if re.search(only, fault.patch.stem)]
    if not faults:
        return []
    _warm_up()
    if passed is None:
        selections = list(dict.fromkeys(fault.tests for fault in faults))
        runs = _in_forks([_Task(package, None, tests, pytest_args) for tests in selections], jobs)
        clean = dict(zip(selections, [run for _, run in sorted(runs, key=lambda pair: pair[0])], strict=True))
    else:
        known = _Run(0, passed=json.loads(passed.read_text()))
        clean = {fault.tests: known for fault in faults}
    started = time.monotonic()
    outcomes: dict[int, Outcome] = {}
    judged = [place for place, fault in enumerate(faults) if clean[fault.tests].code == 0]
    for place, fault in enumerate(faults):
        if place not in judged:
            before = clean[fault.tests]
            outcomes[place] = Outcome(fault, BROKEN, f"its tests fail without it: {before.why}", 0, before.output)
    tasks = [_Task(package, faults[place].patch, faults[place].tests, pytest_args) for place in judged]
    for number, (index, run) in enumerate(_in_forks(tasks, jobs), 1 + len(outcomes)):
        fault = faults[judged[index]]
        outcome = outcomes[judged[index]] = _judge(fault, clean[fault.tests], run)
        elapsed = time.monotonic() - started
        line = f"[{number}/{len(faults)}] {elapsed:4.0f} s  {fault.patch.stem}: {outcome.verdict}, {outcome.reason}"
        line += f" ({outcome.seconds:.1f} s)"
        print(line, flush=True)
    return [outcomes[place] for place in range(len(faults))]


@dataclass(frozen=True)
class _Task:
    package: Path
    patch: Path | None
    tests: tuple[str, ...]
    pytest_args: Sequence[str]


@dataclass(frozen=True)
class _Run:
    """code: pytest's, or below 0 if it did not end by itself. asserted, raised: the tests that failed, and how."""

    code: int
    passed: list[str] = field(default_factory=list)
    asserted: list[str] = field(default_factory=list)
    raised: dict[str, str] = field(default_factory=dict)
    output: str = ""
    seconds: float = 0.0

    @property
    def why(self) -> str:
        failed = [*self.asserted, *(f"{test} ({error})" for test, error in self.raised.items())]
        return failed[0] if failed else f"pytest ended with code {self.code}"


def _judge(fault: Fault, clean: _Run, run: _Run) -> Outcome:
    caught = [test for test in run.asserted if test in clean.passed]
    if caught:
        return Outcome(fault, CAUGHT, f"by {caught[0]}", run.seconds)
    if run.code == _DOES_NOT_APPLY:
        return Outcome(fault, BROKEN, "the patch does not apply", 0, run.output)
    if run.code == _TOO_LONG:
        return Outcome(fault, BROKEN, f"a run longer than {_TIMEOUT_S} s is no assertion", run.seconds, run.output)
    if run.asserted:
        return Outcome(fault, BROKEN, f"{run.asserted[0]} did not pass without it", run.seconds, run.output)
    if run.raised or run.code not in (0, 1):
        return Outcome(fault, BROKEN, f"no assertion failed: {run.why}", run.seconds, run.output)
    return Outcome(fault, SURVIVED, "all tests pass", run.seconds, run.output)


# By process: which task, since when, in which folder.
_Running = dict[int, tuple[int, float, "tempfile.TemporaryDirectory[str]"]]

_DOES_NOT_APPLY = -1001
_TOO_LONG = -1002


def _warm_up() -> None:
    for name in _WARM:
        with suppress(ImportError):
            importlib.import_module(name)
    if "torch" in sys.modules:
        # OpenMP's threads do not survive a fork, and whoever asks for them there waits for ever.
        sys.modules["torch"].set_num_threads(1)
    # Torch asks where each op is defined, and to answer that inspect looks all modules up, once. None holds this.
    inspect.getmodule(compile("", "<no module>", "exec"))
    # What is there now stays: forks need not look through it, nor copy the pages that looking writes to.
    gc.collect()
    gc.freeze()


def _in_forks(tasks: Sequence[_Task], jobs: int) -> Iterator[tuple[int, _Run]]:
    """Each task in a process of its own, ``jobs`` at a time; yields (index, run) as they end."""
    waiting = list(enumerate(tasks))[::-1]
    running: _Running = {}
    whole = tempfile.TemporaryDirectory(prefix="kernel_reference_faults_")
    if tasks:
        _compile(tasks[0].package, Path(whole.name))
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                index, task = waiting.pop()
                folder = tempfile.TemporaryDirectory(prefix="kernel_reference_fault_")
                try:
                    _copy(task, Path(whole.name), Path(folder.name))
                except _DoesNotApplyError as error:
                    folder.cleanup()
                    yield index, _Run(_DOES_NOT_APPLY, output=str(error))
                    continue
                pid = _fork(partial(_child, task, Path(folder.name)))
                running[pid] = (index, time.monotonic(), folder)
            if not running:
                continue
            for pid, code in _wait(running):
                index, started, folder = running.pop(pid)
                run = _read(Path(folder.name), code, time.monotonic() - started)
                folder.cleanup()
                yield index, run
    finally:
        for pid, (_, _, folder) in running.items():
            _kill(pid)
            os.waitpid(pid, 0)
            folder.cleanup()
        whole.cleanup()


def _wait(running: _Running) -> list[tuple[int, int]]:
    """The processes that ended, with their exit codes; one that takes too long is ended."""
    while True:
        ended = []
        for pid, (_, started, _) in running.items():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended.append((pid, os.waitstatus_to_exitcode(status)))
            elif time.monotonic() - started > _TIMEOUT_S:
                _kill(pid)
                os.waitpid(pid, 0)
                ended.append((pid, _TOO_LONG))
        if ended:
            return ended
        time.sleep(0.02)


def _kill(pid: int) -> None:
    # Its own group, so that what it has started ends too.
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _fork(work: Callable[[], int]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    # Its thread (pytest's faulthandler_timeout) stays behind, and whoever cancels it in the fork waits for ever.
    faulthandler.cancel_dump_traceback_later()
    pid = os.fork()
    if pid:
        # Here too, so that the group is there whoever runs first.
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        return pid
    code = 70
    try:
        os.setpgid(0, 0)
        code = work()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: the parent's handlers must not run twice.
        os._exit(code)


def _child(task: _Task, copy: Path) -> int:
    with (copy / "output").open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(copy)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(copy / "src"))
    # For the processes that tests start.
    path = [str(copy / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}
    importlib.invalidate_caches()
    _check_shadowing(copy)
    selected = [str(task.package / test) if _is_test_path(task.package, test) else test for test in task.tests]
    if not any(_is_test_path(task.package, test) for test in task.tests):
        selected.append(str(task.package / "tests"))
    observer = Observer(stop=task.patch is not None)
    # Hypothesis's plugin parses all modules for constants, and tracebacks other than native ones their sources: a third
    # of the time of a fault that its first test catches.
    options = ["-q", "--tb=native", *(f"-pno:{name}" for name in ("cacheprovider", "xdist", "hypothesispytest"))]
    options += task.pytest_args
    code = int(pytest.main([*options, *selected], plugins=[observer]))
    found = {"passed": observer.passed, "asserted": observer.asserted, "raised": observer.raised}
    (copy / "found.json").write_text(json.dumps(found | {"code": code}))
    return 0


def _read(copy: Path, code: int, seconds: float) -> _Run:
    output = (copy / "output").read_text(errors="replace") if (copy / "output").exists() else ""
    file = copy / "found.json"
    if not file.exists():
        return _Run(code or 70, output=output, seconds=seconds)
    return _Run(**json.loads(file.read_text()), output=output, seconds=seconds)


class _DoesNotApplyError(Exception):
    pass


def _is_test_path(package: Path, test: str) -> bool:
    return not test.startswith("-") and (package / test.partition("::")[0]).exists()


def _compile(package: Path, whole: Path) -> None:
    """A copy of the package's sources that all others are made of, with bytecode that says what source it is of."""
    shutil.copytree(package / "src", whole / "src", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(whole / "src", quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)


def _copy(task: _Task, whole: Path, copy: Path) -> None:
    # Links: git and patch write a new file in the place of one that they change.
    shutil.copytree(whole / "src", copy / "src", copy_function=os.link)
    if task.patch is not None:
        _apply(task.patch, copy)


def _apply(patch: Path, copy: Path) -> None:
    target = re.search(r"^\+\+\+ (\S+)", patch.read_text(), re.MULTILINE)
    parts = target[1].split("/") if target else []
    if "src" not in parts:
        raise _DoesNotApplyError("it changes no file under src")
    strip = f"-p{parts.index('src')}"
    if shutil.which("git"):
        command = ["git", "apply", strip, str(patch)]
    else:
        command = ["patch", strip, "--no-backup-if-mismatch", "--fuzz=0", "-i", str(patch)]
    # Inside a repository git would take paths from its root, and skip silently those outside.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(copy.parent)}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise _DoesNotApplyError(done.stdout + done.stderr)


def _check_shadowing(copy: Path) -> None:
    name = next(file.parent.name for file in sorted((copy / "src").glob("*/__init__.py")))
    if name == "kernel_reference":
        # What runs here: imported again, from the copy, by the tests.
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            del sys.modules[module]
    if name in sys.modules:
        raise RuntimeError(f"{name} is imported before its copy: the process that forks must not need it")
    spec = importlib.util.find_spec(name)
    if spec is None or not Path(str(spec.origin)).resolve().is_relative_to(copy.resolve()):
        raise RuntimeError(f"{name} is imported from {spec and spec.origin}, not from the copy that holds the fault")


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    own, pytest_args = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(prog="python -m kernel_reference.testing.faults", description="Mutation testing.")
    parser.add_argument("package", type=Path, help="the package's folder; arguments after -- go to pytest")
    parser.add_argument("--passed", type=Path, metavar="FILE", help="the tests that pass clean; else they are run")
    parser.add_argument("--only", default="", metavar="REGEX", help="only faults whose name matches")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default 2)")
    chosen = parser.parse_args(own)
    outcomes = run_faults(chosen.package, pytest_args, jobs=chosen.jobs, passed=chosen.passed, only=chosen.only)
    if not outcomes:
        print(f"no faults: {chosen.package / 'tests' / 'faults'} holds no such *.patch", file=sys.stderr)
        return 2
    for outcome in outcomes:
        if outcome.verdict != CAUGHT:
            print(f"\n--- {outcome.fault.patch.name}: {outcome.verdict}\n{outcome.output[-3000:]}")
    rows = [("fault", "verdict", "by or why", "what it does")]
    rows += [(o.fault.patch.stem, o.verdict, o.reason.removeprefix("by "), o.fault.description) for o in outcomes]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    caught = sum(outcome.verdict == CAUGHT for outcome in outcomes)
    print(f"\n{caught} of {len(outcomes)} faults caught")
    return 0 if caught == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
