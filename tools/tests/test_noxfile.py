from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Nox = Callable[..., subprocess.CompletedProcess[str]]

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"
dependencies = {dependencies}

[dependency-groups]
test = {test}
bench = []

[tool.hatch.build.targets.sdist]
include = ["/src"]
"""

HOUSE = {
    "shared/pyproject.toml": PROJECT.format(name="kernel-reference", dependencies=[], test=["pytest"]),
    "shared/src/kernel_reference/__init__.py": "",
    "shared/src/kernel_reference/testing/__init__.py": "",
    "shared/src/kernel_reference/testing/pytest_plugin.py": "",
    "packages/tiny/pyproject.toml": PROJECT.format(
        name="tiny", dependencies=["kernel-reference>=0.1"], test=["pytest>=8.3"]
    ),
    "packages/tiny/src/tiny/__init__.py": "VALUE = 1\n",
    "packages/tiny/tests/test_value.py": "import tiny\n\n\ndef test_value():\n    assert tiny.VALUE == 1\n",
    "packages/tiny/benchmarks/cases.py": "",
    "packages/tiny/benchmarks/tune.py": "",
    # Found first by whoever lets PYTHONPATH reach the tests.
    "elsewhere/tiny.py": "VALUE = 'not the wheel'\n",
    # A GPU's tools that find no GPU, before any that the machine has.
    "bin/nvidia-smi": "#!/bin/sh\nexit 9\n",
    "bin/rocminfo": "#!/bin/sh\nexit 1\n",
}


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """The project's own noxfile and pins over one tiny package, without torch."""
    for name in ("noxfile.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name, text in HOUSE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755 if name.startswith("bin/") else 0o644)
    return tmp_path


@pytest.fixture
def nox(house: Path) -> Nox:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NOX", "PYTEST"))}
    environment = kept | {
        "PATH": os.pathsep.join([str(house / "bin"), os.environ["PATH"]]),
        "PYTHONPATH": str(house / "elsewhere"),
    }

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "nox", *arguments]
        return subprocess.run(command, cwd=house, env=environment, capture_output=True, text=True, check=False)

    return run


@pytest.mark.parametrize("reuse", ["-R", "-r"])
def test_an_environment_that_is_kept_never_tests_a_stale_wheel(house: Path, nox: Nox, reuse: str) -> None:
    first = nox(reuse, "-s", "test(tiny)")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "1 passed" in first.stdout

    (house / "packages/tiny/src/tiny/__init__.py").write_text("VALUE = 2\n")
    second = nox(reuse, "-s", "test(tiny)")
    assert second.returncode != 0
    assert re.search("re-?using existing", second.stderr, re.IGNORECASE)
    assert "assert 2 == 1" in second.stdout


def test_a_tag_selects_what_needs_no_gpu_and_another_the_rest(nox: Nox) -> None:
    def sessions(*arguments: str) -> list[str]:
        listed = nox("-l", "--json", *arguments)
        assert listed.returncode == 0, listed.stderr
        return sorted(session["session"] for session in json.loads(listed.stdout))

    assert sessions("-t", "tiny") == ["build(tiny)", "minimums(tiny)", "test(tiny)", "types(tiny)"]
    assert sessions("-t", "tiny-release") == ["release(tiny)"]
    assert sessions("-t", "tiny-gpu") == ["bench(tiny)", "sanitize(tiny)", "tune(tiny)"]
    assert sessions("-s", "test") == ["test(shared)", "test(tiny)", "test(tools)"]


@pytest.mark.parametrize("session", ["bench(tiny)", "tune(tiny)", "sanitize(tiny)"])
def test_a_session_for_the_gpu_says_so_and_installs_nothing_without_one(house: Path, nox: Nox, session: str) -> None:
    stopped = nox("-s", session)
    assert stopped.returncode != 0
    assert "this needs a GPU" in stopped.stderr
    assert not list(house.glob(".nox/*/dist"))
    assert "install" not in stopped.stderr


def test_the_only_exact_versions_are_the_runtime_pins_and_none_names_a_build_of_torch() -> None:
    root, *others = [ROOT / "pyproject.toml", ROOT / "shared/pyproject.toml", *ROOT.glob("packages/*/pyproject.toml")]
    exact = re.compile(r'^\s*"([\w-]+)==[^"]+",$', re.MULTILINE)
    runtime = re.search(r"^runtime = \[\n(.*?)^\]", root.read_text(), re.MULTILINE | re.DOTALL)
    assert runtime is not None
    assert exact.findall(root.read_text()) == exact.findall(runtime[1])
    assert {"torch", "triton"} <= set(exact.findall(runtime[1]))
    assert [file for file in others if "==" in re.sub(r";[^\"]*", "", file.read_text())] == []
    assert "+cpu" not in root.read_text()
