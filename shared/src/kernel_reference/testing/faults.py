"""Plant a package's faults and see its tests go red: ``python -m kernel_reference.testing.faults packages/<name>``.

A fault is a patch in the package's ``tests/faults``, of files under its ``src``. It is applied to a copy in a temporary
folder, never to the working tree, and the package's tests are run against the copy, which is found before any installed
wheel. The lines before the patch proper may say, in one line each, what the fault is and which tests must catch it::

    # the last row is written whether or not it is there
    # tests: tests/test_split.py -k "ragged or empty"

Without the second line the whole suite runs, up to its first failure. Each selection of tests is run on an unchanged
copy first, since a suite that is red anyway catches nothing. Arguments after the package's folder go to pytest. The
exit code is 0 if every fault is caught, 1 if one survives, does not apply or cannot be judged, 2 if there are none.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

CAUGHT = "caught"
SURVIVED = "SURVIVED"
BROKEN = "BROKEN"

_TIMEOUT_S = 900


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


def run_faults(package: Path, pytest_args: Sequence[str] = (), *, jobs: int = 2) -> list[Outcome]:
    """Plant each fault of ``package`` and return what became of it, in the patches' order; ``jobs`` of them at a time.

    Prints a line for each as it is done. ValueError is raised if the package has no ``src`` folder.
    """
    package = package.resolve()
    if not (package / "src").is_dir():
        raise ValueError(f"package must be a folder that holds src and tests/faults, got {package}")
    faults = [Fault.read(patch) for patch in sorted((package / "tests" / "faults").glob("*.patch"))]
    started = time.monotonic()
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(jobs) as pool:
        selections = dict.fromkeys(fault.tests for fault in faults)
        clean = {tests: pool.submit(_run, package, None, tests, pytest_args) for tests in selections}
        pending = [pool.submit(_judge, package, fault, clean[fault.tests], pytest_args) for fault in faults]
        for number, future in enumerate(pending, 1):
            outcome = future.result()
            outcomes.append(outcome)
            elapsed = time.monotonic() - started
            name = outcome.fault.patch.stem
            print(f"[{number}/{len(faults)}] {elapsed:4.0f} s  {name}: {outcome.verdict}, {outcome.reason}", flush=True)
    return outcomes


@dataclass(frozen=True)
class _Run:
    code: int
    culprit: str
    output: str
    seconds: float


class _DoesNotApplyError(Exception):
    pass


def _judge(package: Path, fault: Fault, clean: Future[_Run], pytest_args: Sequence[str]) -> Outcome:
    before = clean.result()
    if before.code != 0:
        why = before.culprit or f"pytest ended with code {before.code}"
        return Outcome(fault, BROKEN, f"its tests fail without it: {why}", before.seconds, before.output)
    try:
        run = _run(package, fault.patch, fault.tests, pytest_args)
    except _DoesNotApplyError as error:
        return Outcome(fault, BROKEN, "the patch does not apply", 0, str(error))
    if run.code == 1:
        return Outcome(fault, CAUGHT, f"by {run.culprit}", run.seconds)
    if run.code == 0:
        return Outcome(fault, SURVIVED, "all tests pass", run.seconds, run.output)
    return Outcome(fault, BROKEN, run.culprit or f"pytest ended with code {run.code}", run.seconds, run.output)


def _run(package: Path, patch: Path | None, tests: tuple[str, ...], pytest_args: Sequence[str]) -> _Run:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kernel_reference_fault_") as folder:
        copy = Path(folder)
        shutil.copytree(package / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
        if patch is not None:
            _apply(patch, copy)
        path = [str(copy / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}
        _check_shadowing(copy, environment)
        selected = [str(package / test) if _is_test_path(package, test) else test for test in tests]
        if not any(_is_test_path(package, test) for test in tests):
            selected.append(str(package / "tests"))
        # The temporary folder as the current one, since `python -m` puts that first on sys.path.
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-rfE",
            "-p",
            "no:cacheprovider",
            *pytest_args,
            *selected,
        ]
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, timeout=_TIMEOUT_S, text=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            # A kernel that never ends is as visible as a wrong result.
            return _Run(1, f"a run longer than {_TIMEOUT_S} s", "", time.monotonic() - started)
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    culprit = found[1].rpartition("/")[2] if found else ""
    return _Run(done.returncode, culprit, done.stdout, time.monotonic() - started)


def _is_test_path(package: Path, test: str) -> bool:
    return not test.startswith("-") and (package / test.partition("::")[0]).exists()


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


def _check_shadowing(copy: Path, environment: dict[str, str]) -> None:
    name = next(file.parent.name for file in sorted((copy / "src").glob("*/__init__.py")))
    code = f"import importlib.util; print(importlib.util.find_spec({name!r}).origin)"
    found = subprocess.check_output([sys.executable, "-c", code], cwd=copy, env=environment, text=True).strip()
    if not Path(found).resolve().is_relative_to(copy.resolve()):
        raise RuntimeError(f"{name} is imported from {found}, not from the copy that holds the fault")


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    if not arguments or arguments[0].startswith("-"):
        print(
            "usage: python -m kernel_reference.testing.faults <package folder> [-- pytest arguments]", file=sys.stderr
        )
        return 2
    package = Path(arguments[0])
    outcomes = run_faults(package, [argument for argument in arguments[1:] if argument != "--"])
    if not outcomes:
        print(f"no faults: {package / 'tests' / 'faults'} holds no *.patch", file=sys.stderr)
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
