"""All sessions in one run: their order, their table, and a run of a pretended nox."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ci
import pytest

NOX = """#!{python}
import sys
if "--list" in sys.argv:
    print('[{{"session": "lint"}}, {{"session": "test(tiny)"}}]')
else:
    session = sys.argv[sys.argv.index("-s") + 1]
    print("\\n".join(f"line {{number}} of {{session}}" for number in range(40)), *sys.argv[-2:])
    sys.exit(session in {broken!r})
"""


@pytest.fixture
def nox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path / "nox"


def pretend(nox: Path, *broken: str) -> None:
    nox.write_text(NOX.format(python=sys.executable, broken=broken))
    nox.chmod(0o755)


def test_long_sessions_start_first() -> None:
    sessions = ["lint", "build(shared)", "minimums(shared)", "test(gdn-split)", "test(blocksparse-attn)", "new(x)"]
    assert ci.in_order(sessions) == [
        "test(blocksparse-attn)",
        "test(gdn-split)",
        "minimums(shared)",
        "build(shared)",
        "lint",
        "new(x)",
    ]


def test_a_run_ends_with_the_minutes_of_every_session(
    nox: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(nox)
    assert ci.main(["lint", "test(tiny)", "--jobs", "2", "--table", str(tmp_path / "table.md")]) == 0
    printed = capsys.readouterr().out
    assert "| `test(tiny)` | 0.0 | passed |" in printed
    assert printed.rstrip().endswith("sessions: 2 passed, 0 failed")
    assert "| all, 2 at a time |" in (tmp_path / "table.md").read_text()
    # Tests are run with the planted faults, and of what passed only the end is shown.
    assert "line 39 of test(tiny) -- --faults" in printed
    assert "line 1 of lint" not in printed


def test_a_session_that_fails_is_shown_whole_and_fails_the_run(nox: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(nox, "lint")
    assert ci.main(["lint", "test(tiny)"]) == 1
    printed = capsys.readouterr().out
    assert "line 1 of lint" in printed
    assert "FAILED: lint" in printed
    assert printed.rstrip().endswith("sessions: 1 passed, 1 failed")
