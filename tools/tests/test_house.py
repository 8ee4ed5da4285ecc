"""Rules of the house that a linter does not know."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [file.parent for file in sorted(ROOT.glob("packages/*/pyproject.toml"))]
HOMES = [ROOT / "shared", *PACKAGES]

each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


@each_package
def test_every_package_has_the_same_rooms(package: Path) -> None:
    source = package / "src" / package.name.replace("-", "_")
    rooms = ["README.md", "CHANGELOG.md", "LICENSE", "changelog.d", "tests", "benchmarks/cases.py"]
    rooms += ["examples/quickstart.py", "examples/demo.py"]
    modules = ["__init__.py", "api.py", "ops.py", "plan.py", "launch.py", "py.typed"]
    assert [room for room in rooms if not (package / room).exists()] == []
    assert [module for module in modules if not (source / module).is_file()] == []
    assert (source / "kernels.py").is_file() or (source / "kernels").is_dir()


@each_package
def test_a_plan_knows_neither_triton_nor_the_gpu(package: Path) -> None:
    [plan] = package.glob("src/*/plan.py")
    known: set[str] = set()
    for node in ast.walk(ast.parse(plan.read_text())):
        match node:
            case ast.Import(names=names):
                known |= {name.name for name in names}
            case ast.ImportFrom(module=str(module), names=names):
                known |= {module, *(f"{module}.{name.name}" for name in names)}
            case ast.Attribute(value=ast.Name(id="torch"), attr=attribute):
                known.add(f"torch.{attribute}")
    assert [name for name in sorted(known) if re.match(r"(triton|tilelang|torch\.cuda)\b", name)] == []


@pytest.mark.parametrize("folder", ["shared", *(f"packages/{package.name}" for package in PACKAGES)])
def test_every_distribution_carries_the_whole_licence(folder: str) -> None:
    assert (ROOT / folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("home", HOMES, ids=lambda home: home.name)
def test_every_planted_fault_still_applies(home: Path) -> None:
    """`-- --faults` would say so after minutes, and is seldom run."""
    for patch in sorted(home.glob("tests/faults/*.patch")):
        place = home.relative_to(ROOT)
        subprocess.run(["git", "apply", "--check", f"--directory={place}", patch], cwd=ROOT, check=True)


def test_no_module_is_called_after_nothing() -> None:
    modules = [file for home in HOMES for file in home.glob("src/**/*.py")]
    assert [file for file in modules if file.stem in {"utils", "util", "helpers", "misc"}] == []


def test_every_action_is_pinned_by_its_commit_with_the_version_beside_it() -> None:
    uses = re.compile(r"^\s*(?:- )?uses: (.*)$", re.MULTILINE)
    pinned = re.compile(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    found = [use for file in ROOT.glob(".github/workflows/*.yml") for use in uses.findall(file.read_text())]
    assert found
    assert [use for use in found if not pinned.fullmatch(use)] == []


def test_every_distribution_names_the_repository_by_which_an_index_shows_that_it_is_ours() -> None:
    projects = {home.name: tomllib.loads((home / "pyproject.toml").read_text())["project"] for home in HOMES}
    named = {name: project.get("urls", {}).get("Repository") for name, project in projects.items()}
    assert named == dict.fromkeys(named, named["shared"])
    assert named["shared"]
