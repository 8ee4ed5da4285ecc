from __future__ import annotations

import json
import os
import py_compile
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
    "shared/src/kernel_reference/testing/pytest_plugin.py": (
        "def pytest_addoption(parser):\n    parser.addoption('--few-cases')\n"
    ),
    "packages/tiny/pyproject.toml": PROJECT.format(
        name="tiny", dependencies=["kernel-reference>=0.1"], test=["pytest>=8.3"]
    ),
    "packages/tiny/src/tiny/__init__.py": "VALUE = 1\n",
    "packages/tiny/tests/test_value.py": "import tiny\n\n\ndef test_value():\n    assert tiny.VALUE == 1\n",
    "packages/tiny/benchmarks/cases.py": "",
    "packages/tiny/benchmarks/map.py": "",
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
    for name in ("noxfile.py", "pyproject.toml", "tools/environments.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
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


def test_a_tag_selects_what_needs_no_gpu_and_another_the_rest(nox: Nox) -> None:
    def sessions(*arguments: str) -> list[str]:
        listed = nox("-l", "--json", *arguments)
        assert listed.returncode == 0, listed.stderr
        return sorted(session["session"] for session in json.loads(listed.stdout))

    assert sessions("-t", "tiny") == ["build(tiny)", "docs", "minimums(tiny)", "test(tiny)", "types"]
    assert sessions("-t", "tiny-release") == ["release(tiny)"]
    assert sessions("-t", "tiny-gpu") == ["bench(tiny)", "map(tiny)", "sanitize(tiny)", "tune(tiny)"]
    assert sessions("-s", "test") == ["test(shared)", "test(tiny)", "test(tools)"]


@pytest.mark.parametrize("session", ["bench(tiny)", "map(tiny)", "tune(tiny)", "sanitize(tiny)"])
def test_a_session_for_the_gpu_says_so_and_installs_nothing_without_one(house: Path, nox: Nox, session: str) -> None:
    stopped = nox("-s", session)
    assert stopped.returncode != 0
    assert "this needs a GPU" in stopped.stderr
    assert not list(house.glob(".nox/*/dist"))
    assert "install" not in stopped.stderr


def test_the_only_exact_versions_are_those_of_runtime_engines_build_and_docs_and_none_names_a_build_of_torch() -> None:
    root, *others = [ROOT / "pyproject.toml", ROOT / "shared/pyproject.toml", *ROOT.glob("packages/*/pyproject.toml")]
    exact = re.compile(r'"([\w-]+)==[^"]+"')
    pinned = {}
    for name in ("runtime", "engines", "build", "docs"):
        found = re.search(rf"^{name} = \[(.*?)\]$", root.read_text(), re.MULTILINE | re.DOTALL)
        assert found is not None
        pinned[name] = exact.findall(found[1])
    assert sorted(exact.findall(root.read_text())) == sorted(pin for pins in pinned.values() for pin in pins)
    assert {"torch", "triton"} <= set(pinned["runtime"])
    assert {"build", "hatchling", "twine"} <= set(pinned["build"])
    assert [file for file in others if "==" in re.sub(r";[^\"]*", "", file.read_text())] == []
    assert "+cpu" not in root.read_text()


def test_a_wheel_is_built_once_for_each_state_of_its_files_and_tested_in_environments_that_are_kept(
    house: Path, nox: Nox
) -> None:
    def built(done: subprocess.CompletedProcess[str]) -> int:
        return len([line for line in done.stderr.splitlines() if "-m build" in line])

    first = nox("-s", "test(tiny)", "minimums(tiny)")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "1 passed" in first.stdout
    # Its own and kernel-reference's.
    assert built(first) == 2
    assert sorted(file.suffix for file in house.glob(".nox/wheels/tiny/*/*")) == [".gz", ".whl"]
    again = nox("-s", "minimums(tiny)")
    assert (again.returncode, built(again)) == (0, 0), again.stderr

    for value, reuse in ((2, "-R"), (3, "-r")):
        (house / "packages/tiny/src/tiny/__init__.py").write_text(f"VALUE = {value}\n")
        kept = nox(reuse, "-s", "test(tiny)")
        assert kept.returncode != 0
        assert re.search("re-?using existing", kept.stderr, re.IGNORECASE)
        assert f"assert {value} == 1" in kept.stdout


def test_uv_is_told_what_pip_is_configured_to(house: Path) -> None:
    """What uv would not read: indexes, sources of files and certificates of pip's files and variables."""
    code = "import noxfile, os, json; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('UV_')}))"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
    (house / "pip.conf").write_text("[global]\nindex-url = https://one.test/simple\nfind-links =\n    /a\n    /b\n")
    told = {
        "PIP_CONFIG_FILE": str(house / "pip.conf"),
        "PIP_EXTRA_INDEX_URL": "https://two.test/x https://three.test/y",
    }
    done = subprocess.run([sys.executable, "-c", code], cwd=house, env=kept | told, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    variables = json.loads(done.stdout)
    assert variables["UV_DEFAULT_INDEX"] == "https://one.test/simple"
    assert variables["UV_INDEX"] == "https://two.test/x https://three.test/y"
    assert variables["UV_FIND_LINKS"] == "/a,/b"
    own = subprocess.run(
        [sys.executable, "-c", code], cwd=house, env=kept | told | {"UV_INDEX": "mine"}, capture_output=True, text=True
    )
    assert json.loads(own.stdout)["UV_INDEX"] == "mine"


def test_without_uv_environments_are_made_by_virtualenv(house: Path, nox: Nox) -> None:
    done = nox("-db", "virtualenv", "-s", "test(tiny)")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert "uv pip" not in done.stderr


def test_bytecode_is_linked_from_environments_that_have_the_very_same_file(house: Path) -> None:
    """A file of the same name, size and time may be another version's, whose bytecode Python would take for its own."""
    site = "lib/python3.11/site-packages"
    first, second = (house / ".nox" / name / site for name in ("first", "second"))
    for name, linked in (("same", True), ("other", False)):
        (first / name).mkdir(parents=True)
        (second / name).mkdir(parents=True)
        (first / name / "it.py").write_text("VALUE = 1\n")
        py_compile.compile(str(first / name / "it.py"))
        if linked:
            (second / name / "it.py").hardlink_to(first / name / "it.py")
        else:
            shutil.copy2(first / name / "it.py", second / name / "it.py")
    code = "import noxfile, pathlib; noxfile.link_bytecode(pathlib.Path('.nox/second'))"
    subprocess.run([sys.executable, "-c", code], cwd=house, check=True)
    (compiled,) = first.glob("same/__pycache__/*.pyc")
    assert [file.samefile(compiled) for file in second.glob("*/__pycache__/*.pyc")] == [True]
