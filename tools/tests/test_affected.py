from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

AFFECTED = Path(__file__).parents[1] / "affected.py"
Change = Callable[[dict[str, str | None]], list[str]]

HOUSE = {
    "README.md": "# a house\n",
    "pyproject.toml": "",
    "noxfile.py": "",
    "tools/affected.py": "",
    "shared/pyproject.toml": '[project]\nname = "kernel-reference"\n',
    "shared/src/kernel_reference/attention.py": "",
    "packages/one/pyproject.toml": '[project]\nname = "one"\ndependencies = ["kernel_reference>=0.1,<0.2", "torch"]\n',
    "packages/one/src/one/kernels.py": "",
    "packages/one/README.md": "",
    "packages/two/pyproject.toml": '[project]\nname = "two"\ndependencies = ["One>=1", "kernel-reference>=0.1"]\n',
    "packages/two/src/two/kernels.py": "",
    "packages/alone/pyproject.toml": '[project]\nname = "alone"\n',
    "packages/alone/tests/test_alone.py": "",
}
EVERYTHING = ["alone", "one", "shared", "tools", "two"]


def git(root: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


def write(root: Path, files: dict[str, str | None]) -> None:
    for name, text in files.items():
        file = root / name
        if text is None:
            file.unlink()
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)


def ask(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, AFFECTED, *arguments], cwd=root, capture_output=True, text=True)


@pytest.fixture
def house(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    write(tmp_path, HOUSE)
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "-m", "a house")
    return tmp_path


@pytest.fixture
def affected_by(house: Path) -> Change:
    def change(files: dict[str, str | None]) -> list[str]:
        write(house, files)
        git(house, "add", "--all")
        git(house, "commit", "--quiet", "-m", "a change")
        answer = ask(house, "HEAD~1..HEAD")
        assert answer.returncode == 0, answer.stderr
        return json.loads(answer.stdout)

    return change


def test_a_kernel_touches_its_package_and_who_depends_on_it(affected_by: Change) -> None:
    assert affected_by({"packages/one/src/one/kernels.py": "x = 1\n"}) == ["one", "two"]


def test_the_shared_package_touches_every_dependant_however_its_name_is_spelt(affected_by: Change) -> None:
    touched = affected_by({"shared/src/kernel_reference/attention.py": "x = 1\n"})
    assert touched == ["one", "shared", "tools", "two"]


def test_a_record_touches_the_tools_which_draw_a_picture_of_it(affected_by: Change) -> None:
    assert affected_by({"packages/alone/benchmarks/results/alone.jsonl": "{}\n"}) == ["alone", "tools"]


@pytest.mark.parametrize(
    "file",
    ["pyproject.toml", "noxfile.py", "tools/environments.py", ".ci/run", ".github/workflows/ci.yml", "conftest.py"],
)
def test_what_every_session_is_made_of_touches_everything(affected_by: Change, file: str) -> None:
    assert affected_by({file: "# changed\n"}) == EVERYTHING


def test_documents_touch_nobody_but_the_package_whose_page_they_are(affected_by: Change) -> None:
    assert affected_by({"README.md": "# changed\n", "CONTRIBUTING.md": "how\n", "LICENSE": "as is\n"}) == []
    assert affected_by({"packages/one/README.md": "# one\n", "packages/one/changelog.d/+new.added.md": "new\n"}) == [
        "one"
    ]


def test_a_file_that_moves_touches_both_ends(affected_by: Change) -> None:
    moved: dict[str, str | None] = {"packages/alone/tests/test_alone.py": None, "packages/two/tests/test_alone.py": ""}
    assert affected_by(moved) == ["alone", "two"]


def test_the_tools_touch_only_their_own_tests(affected_by: Change) -> None:
    assert affected_by({"tools/affected.py": "# changed\n"}) == ["tools"]


def test_a_package_that_goes_touches_everything_since_its_dependants_are_forgotten(affected_by: Change) -> None:
    gone: dict[str, str | None] = {name: None for name in HOUSE if name.startswith("packages/alone/")}
    assert affected_by(gone) == ["one", "shared", "tools", "two"]


def test_a_name_with_odd_characters_is_read_whole(affected_by: Change) -> None:
    assert affected_by({"packages/alone/tests/a b\tü.py": ""}) == ["alone"]


def test_without_a_range_it_is_everything(house: Path) -> None:
    assert json.loads(ask(house).stdout) == EVERYTHING


@pytest.mark.parametrize("wrong", [["nowhere..HEAD"], ["HEAD", "HEAD"], ["--output=x"]])
def test_a_wrong_range_is_an_error_of_one_line_and_prints_no_list(house: Path, wrong: list[str]) -> None:
    answer = ask(house, *wrong)
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert len(answer.stderr.splitlines()) == 1
