from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from history import ROOT, set_back

# Older commits are named by records, and so keep the longer subjects that some of them have.
FIRST_WITHOUT_LONG_SUBJECTS = "5455216"


def test_no_commit_sets_files_of_another_package_back_silently() -> None:
    assert set_back(ROOT, 100) == []


def test_a_subject_has_at_most_72_characters() -> None:
    told = ["git", "-C", str(ROOT), "log", "--no-merges", "--format=%H %s", f"{FIRST_WITHOUT_LONG_SUBJECTS}..HEAD"]
    log = subprocess.run(told, capture_output=True, text=True)
    if log.returncode:
        pytest.skip(f"{FIRST_WITHOUT_LONG_SUBJECTS} is not in this clone")
    subjects = dict(line.split(" ", 1) for line in log.stdout.splitlines())
    assert [(commit[:8], subject) for commit, subject in subjects.items() if len(subject) > 72] == []


def test_a_file_set_back_is_found_unless_the_commit_says_so_or_works_there(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    def commit(subject: str, **files: str) -> None:
        for name, text in files.items():
            path = tmp_path / "packages" / name / "plan.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        git("add", ".")
        git("commit", "-q", "-m", subject)

    git("init", "-q")
    commit("Two packages", first="1", second="1")
    commit("first: a plan", first="2")
    commit("second: a plan", second="2", first="1")
    assert [(one.subject, one.path) for one in set_back(tmp_path, 9)] == [("second: a plan", "packages/first/plan.py")]
    commit("What was lost, once more", first="2")
    assert set_back(tmp_path, 9) == []
    (tmp_path / "packages/first/new.py").write_text("")
    commit("A plan fewer", first="1")
    assert set_back(tmp_path, 1) == []
    commit("The plan of first", first="2")
    assert set_back(tmp_path, 1) == []
