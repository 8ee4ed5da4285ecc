"""Does a package made of the templates pass all that is asked of a package, and is a wrong name told in one line?"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import new
import pytest

ROOT = Path(__file__).parents[2]
NAME, MODULE = "zeta-scan", "zeta_scan"
LONG_NAME = "x" * new.LONGEST_NAME
# Made by sessions, and no part of the sources.
MADE = shutil.ignore_patterns("__pycache__", "dist", ".*_cache", ".hypothesis")


def run(where: Path, *command: str | Path) -> str:
    """What a command prints, where it succeeds."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NOX", "PYTEST"))}
    # Compiling all of torch takes longer than what is then run of it.
    environment = kept | {"PIP_NO_COMPILE": "1"}
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tool(where: Path, *command: str | Path) -> str:
    return run(where, sys.executable, "-m", *command)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository whose only package is a new one."""
    copy = tmp_path_factory.mktemp("house") / "copy"
    (copy / "packages").mkdir(parents=True)
    for name in ("noxfile.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    for name in (".ci", ".github", "shared", "tools"):
        shutil.copytree(ROOT / name, copy / name, ignore=MADE)
    # What others have made of torch's sources, if sessions were run here before: 30 s.
    if (ROOT / ".mypy_cache").is_dir():
        shutil.copytree(ROOT / ".mypy_cache", copy / ".mypy_cache")
    (copy / ".nox").mkdir()
    for bytecode in sorted(ROOT.glob(".nox/test-*/lib/python*/site-packages/torch/__pycache__"))[:1]:
        (copy / ".nox" / "other").symlink_to(bytecode.parents[4])
    said = run(copy, sys.executable, "tools/new.py", NAME)
    assert said.startswith(f"made packages/{NAME}")
    return copy


def test_a_new_package_passes_its_tests_and_types_and_its_fault_is_caught(house: Path) -> None:
    tool(house, "nox", "-s", "types", "--", NAME)
    caught = tool(house, "nox", "-s", f"test({NAME})", "--", "--faults")
    assert "1 of 1 faults caught" in caught
    python = house / ".nox" / f"test-{NAME}" / "bin" / "python"
    shown = run(house, python, "-m", "kernel_reference.bench.demo", f"packages/{NAME}/examples/demo.py")
    assert re.search(rf"{NAME}\n  CPU implementation, cpu\n    scale +.* ok\n", shown)
    assert re.search(r"  kernel in Triton's interpreter, cpu\n    scale_blocks +.* ok\n", shown)


def test_a_new_package_is_in_style_and_has_the_rooms_of_the_others(house: Path) -> None:
    # As the session lint does for all of them.
    tool(house, "ruff", "check", f"packages/{NAME}")
    tool(house, "ruff", "format", "--check", f"packages/{NAME}")
    tool(house, "pytest", "--override-ini=addopts=", "tools/tests/test_house.py")


def test_a_new_package_is_built_and_its_files_are_sound(house: Path, tmp_path: Path) -> None:
    # As the session build does, which then installs torch only to import the wheel; the tests above did that.
    tool(house, "build", "--no-isolation", "--outdir", tmp_path, f"packages/{NAME}")
    made = sorted(tmp_path.iterdir())
    assert [file.name for file in made] == [f"{MODULE}-0.1.0-py3-none-any.whl", f"{MODULE}-0.1.0.tar.gz"]
    tool(house, "twine", "check", "--strict", *made)
    tool(house, "check_wheel_contents", made[0])


def test_a_new_package_belongs_to_every_session_and_has_something_to_release(house: Path) -> None:
    sessions = tool(house, "nox", "-l")
    for session in ("test", "build", "minimums", "bench", "sanitize", "release"):
        assert f"{session}({NAME})" in sessions
    assert "* types" in tool(house, "nox", "-l", "-t", NAME)
    draft = ["towncrier", "build", "--draft", "--config", "pyproject.toml", "--dir", f"packages/{NAME}"]
    assert "- `scale`: a tensor times a number." in tool(house, *draft, "--name", NAME, "--version", "0.1.0")


def test_the_longest_name_still_fits_the_lines(house: Path) -> None:
    home = new.make(LONG_NAME, house)
    tool(house, "ruff", "check", home)
    shutil.rmtree(home)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([NAME], f"name must be new, and there is a {NAME} already"),
        (["kernel-reference"], "name must be new, and there is a kernel-reference already"),
        (["tools"], "name must be new, and there is a tools already"),
        (["Block_Scan"], "name must be kebab-case, such as block-scan, got 'Block_Scan'"),
        (["block--scan"], "name must be kebab-case, such as block-scan, got 'block--scan'"),
        (["../block"], "name must be kebab-case, such as block-scan, got '../block'"),
        (["2-pass"], "name must be kebab-case, such as block-scan, got '2-pass'"),
        (["json"], "name must be none of Python's own, got json"),
        (["torch"], "name must be no other project's, got torch, which is installed or which packages need"),
        (["ml-dtypes"], "name must be no other project's, got ml-dtypes, which is installed or which packages need"),
        (["pytest"], "name must be no other project's, got pytest, which is installed or which packages need"),
        (["lambda"], "name must be none of Python's own, got lambda"),
        ([LONG_NAME + "x"], f"name must be at most 30 characters long, got 31: {LONG_NAME}x"),
        ([], "usage: new.py <name>, kebab-case, such as block-scan"),
        (["one", "two"], "usage: new.py <name>, kebab-case, such as block-scan"),
    ],
)
def test_a_wrong_name_is_told_in_one_line_and_makes_nothing(house: Path, arguments: list[str], why: str) -> None:
    before = sorted((house / "packages").iterdir())
    command = [sys.executable, "tools/new.py", *arguments]
    done = subprocess.run(command, cwd=house, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr in (f"new: {why}\n", f"{why}\n")
    assert sorted((house / "packages").iterdir()) == before


@pytest.mark.parametrize("name", ["jinja2", "markupsafe"])
def test_what_is_installed_here_is_refused_though_no_package_names_it(house: Path, name: str) -> None:
    with pytest.raises(new.NewError, match=f"no other project's, got {name}"):
        new.check(name, house)


def test_a_module_without_a_distribution_is_refused(
    house: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new.check("lone-module", house)
    (tmp_path / "lone_module.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(new.NewError, match="no other project's, got lone-module"):
        new.check("lone-module", house)


def test_a_package_that_cannot_be_finished_is_not_begun(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(subprocess.CalledProcessError):
        new.make("half-done", house)
    assert not [path for path in (house / "packages").iterdir() if "half-done" in path.name]
