"""How tests ended, for `kernel_reference.testing.faults`: which passed, which failed by an assertion, which raised.

As a plugin, ``-p kernel_reference.testing.results --write-passed FILE``, it writes the names of the tests that passed.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import pytest


class Observer:
    """Notes which tests passed and how the others failed; ``stop``: ends the run at the first failed assertion."""

    def __init__(self, *, stop: bool) -> None:
        self.passed: list[str] = []
        self.asserted: list[str] = []
        self.raised: dict[str, str] = {}
        self._stop = stop

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        name = name_of(item)
        if report.failed:
            error = call.excinfo.value if call.excinfo else None
            if call.when == "call" and isinstance(error, (AssertionError, pytest.fail.Exception)):
                self.asserted.append(name)
                if self._stop:
                    # Not shouldstop, which has pytest look the traceback's sources up once more.
                    item.session.shouldfail = "an assertion failed"
            else:
                self.raised[name] = type(error).__name__
        elif report.when == "call" and report.passed:
            self.passed.append(name)
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.raised[report.nodeid] = "error of collection"


def name_of(item: pytest.Item) -> str:
    """A test's name wherever pytest was started: file, class, function and parameters without the folder."""
    return f"{item.path.name}::{item.nodeid.partition('::')[2]}"


# As a plugin of the suite's own run.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-passed", metavar="FILE", help="write the names of the tests that passed, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist hand their reports to the process that has no `workerinput`.
    if config.getoption("--write-passed") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(Path(config.getoption("--write-passed"))))


class _Writer:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._passed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            path, _, rest = report.nodeid.partition("::")
            self._passed.append(f"{path.rpartition('/')[2]}::{rest}")

    def pytest_sessionfinish(self) -> None:
        self._file.write_text(json.dumps(self._passed))
