"""Planted faults, in a package made for the purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kernel_reference.testing import faults

SOURCE = "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n"


def patch(old: str, new: str, before: str = "", folder: str = "") -> str:
    lines = SOURCE.splitlines(keepends=True)
    at = lines.index(old)
    shown = [f"-{line}+{new}" if place == at else f" {line}" for place, line in enumerate(lines)]
    head = f"--- a/{folder}src/doubling/__init__.py\n+++ b/{folder}src/doubling/__init__.py\n"
    return f"{before}{head}@@ -1,{len(lines)} +1,{len(lines)} @@\n{''.join(shown)}"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of two functions, of which the tests look at one."""
    (tmp_path / "src/doubling").mkdir(parents=True)
    (tmp_path / "src/doubling/__init__.py").write_text(SOURCE)
    (tmp_path / "tests/faults").mkdir(parents=True)
    (tmp_path / "tests/test_double.py").write_text(
        textwrap.dedent("""
        from doubling import double

        def test_two_becomes_four():
            assert double(2) == 4

        def test_nought_stays():
            assert double(0) == 0
        """)
    )
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '--import-mode=importlib'\n")
    return tmp_path


def plant(package: Path, name: str, text: str) -> None:
    (package / "tests/faults" / f"{name}.patch").write_text(text)


def run(package: Path) -> list[tuple[str, str]]:
    return [(outcome.verdict, outcome.reason) for outcome in faults.run_faults(package)]


def test_a_fault_that_a_test_sees_is_caught_and_one_that_none_sees_survives(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(package, "a_tripled", patch("    return 2 * x\n", "    return 3 * x\n", "# it triples\n"))
    plant(package, "b_thirds", patch("    return x / 2\n", "    return x / 3\n", folder="packages/doubling/"))
    assert faults.main([str(package)]) == 1
    printed = capsys.readouterr().out
    assert "[2/2]" in printed
    assert "a_tripled  caught    test_double.py::test_two_becomes_four  it triples" in printed
    assert "b_thirds   SURVIVED  all tests pass" in printed
    assert "1 of 2 faults caught" in printed
    assert (package / "src/doubling/__init__.py").read_text() == SOURCE


def test_all_caught_is_success_and_no_fault_is_not(package: Path) -> None:
    assert faults.main([str(package)]) == 2
    plant(package, "tripled", patch("    return 2 * x\n", "    return 3 * x\n"))
    assert faults.main([str(package), "--", "-W", "ignore"]) == 0


def test_faults_of_the_package_that_plants_them_are_seen_too(package: Path) -> None:
    """Its modules are loaded before the fork, and are imported again from the copy."""
    (package / "src/doubling").rename(package / "src/kernel_reference")
    tests = package / "tests/test_double.py"
    tests.write_text(tests.read_text().replace("doubling", "kernel_reference"))
    fault = patch("    return 2 * x\n", "    return 3 * x\n")
    plant(package, "tripled", fault.replace("doubling", "kernel_reference"))
    assert run(package) == [(faults.CAUGHT, "by test_double.py::test_two_becomes_four")]


def test_a_fault_is_judged_by_the_tests_that_it_names(package: Path) -> None:
    fault = patch("    return 2 * x\n", "    return 3 * x\n", "# it triples\n# tests: tests/test_double.py -k nought\n")
    plant(package, "unseen", fault)
    plant(package, "unknown", fault.replace("-k nought", "-k no_such_test"))
    assert run(package) == [
        (faults.BROKEN, "its tests fail without it: pytest ended with code 5"),
        (faults.SURVIVED, "all tests pass"),
    ]


def test_an_error_is_no_assertion(package: Path) -> None:
    plant(package, "unknown", patch("    return 2 * x\n", "    return 2 * y\n"))
    assert run(package) == [(faults.BROKEN, "no assertion failed: test_double.py::test_two_becomes_four (NameError)")]


def test_a_run_without_end_is_no_assertion(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests without the fault are not run, so that the limit is the endless run's alone."""
    monkeypatch.setattr(faults, "_TIMEOUT_S", 4)
    plant(package, "endless", patch("    return 2 * x\n", "    import threading; threading.Event().wait()\n"))
    passed = package / "passed.json"
    passed.write_text('["test_double.py::test_two_becomes_four"]')
    (outcome,) = faults.run_faults(package, passed=passed)
    assert (outcome.verdict, outcome.reason) == (faults.BROKEN, "a run longer than 4 s is no assertion")


def test_what_passes_clean_may_be_known_from_the_suite(package: Path) -> None:
    plant(package, "tripled", patch("    return 2 * x\n", "    return 3 * x\n"))
    passed = package / "passed.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "kernel_reference.testing.results", "--write-passed", passed]
    path = os.pathsep.join([str(package / "src"), *sys.path])
    subprocess.run(command, cwd=package, env=os.environ | {"PYTHONPATH": path}, check=True)
    assert sorted(json.loads(passed.read_text())) == [
        "test_double.py::test_nought_stays",
        "test_double.py::test_two_becomes_four",
    ]
    assert faults.main([str(package), "--passed", str(passed)]) == 0
    passed.write_text("[]")
    (outcome,) = faults.run_faults(package, passed=passed)
    assert (outcome.verdict, outcome.reason) == (
        faults.BROKEN,
        "test_double.py::test_two_becomes_four did not pass without it",
    )


def test_a_test_that_expects_an_error_and_gets_none_asserts(package: Path) -> None:
    (package / "tests/test_half.py").write_text(
        "import pytest\nfrom doubling import half\n\ndef test_a_word_has_no_half():\n"
        "    with pytest.raises(TypeError):\n        half('word')\n"
    )
    plant(package, "lenient", patch("    return x / 2\n", "    return x\n", "# tests: tests/test_half.py\n"))
    assert run(package) == [(faults.CAUGHT, "by test_half.py::test_a_word_has_no_half")]


def test_a_patch_that_does_not_apply_is_an_error(package: Path) -> None:
    plant(package, "stale", patch("    return 2 * x\n", "    return 3 * x\n").replace("-    return 2", "-    return 5"))
    plant(package, "tests", patch("    return 2 * x\n", "    return 3 * x\n").replace("src/doubling", "tests"))
    assert run(package) == [(faults.BROKEN, "the patch does not apply")] * 2
    assert faults.main([str(package)]) == 1


def test_a_suite_that_is_red_anyway_catches_nothing(package: Path) -> None:
    plant(package, "tripled", patch("    return 2 * x\n", "    return 3 * x\n"))
    (package / "tests/test_red.py").write_text("def test_red():\n    assert False\n")
    assert run(package) == [(faults.BROKEN, "its tests fail without it: test_red.py::test_red")]


def test_a_suite_that_cannot_be_collected_catches_nothing(package: Path) -> None:
    plant(package, "syntax", patch("    return 2 * x\n", "    return 2 *\n"))
    assert run(package) == [(faults.BROKEN, "no assertion failed: tests/test_double.py (error of collection)")]


def test_the_copy_is_found_before_an_installed_package(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = package / "site"
    (installed / "doubling").mkdir(parents=True)
    (installed / "doubling/__init__.py").write_text(SOURCE)
    monkeypatch.setenv("PYTHONPATH", str(installed))
    plant(package, "tripled", patch("    return 2 * x\n", "    return 3 * x\n"))
    assert run(package) == [(faults.CAUGHT, "by test_double.py::test_two_becomes_four")]


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="package must be a folder"):
        faults.run_faults(tmp_path)
