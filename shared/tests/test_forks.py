"""Processes that begin with torch imported: what is in them, what they say of their end, and that they are apart."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kernel_reference.testing.forks import Fork, run_alone


def test_a_script_finds_torch_imported_and_neither_triton_nor_what_another_has_left() -> None:
    for _ in range(2):
        run_alone(
            """
            import os, sys
            assert "torch" in sys.modules
            assert "triton" not in sys.modules
            assert "left" not in sys.modules and "LEFT" not in os.environ
            sys.modules["left"] = sys
            os.environ["LEFT"] = "it"
            """
        )


def test_a_script_that_fails_shows_what_it_has_printed() -> None:
    with pytest.raises(AssertionError, match=r"(?s)as far as this.*ZeroDivisionError"):
        run_alone("print('as far as this')\n1 / 0")
    with pytest.raises(AssertionError):
        run_alone("import os; os.abort()")
    with pytest.raises(AssertionError):
        run_alone("raise SystemExit(3)")


def test_a_script_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="longer than"):
        run_alone(f"import time; open({str(tmp_path / 'begun')!r}, 'w'); time.sleep(1000)", timeout_s=1)


def test_a_script_has_the_variables_and_the_import_path_of_its_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ONLY_HERE", "1")
    run_alone("import beside, os; assert (beside.VALUE, os.environ['ONLY_HERE']) == (5, '1')")
    monkeypatch.delenv("ONLY_HERE")
    run_alone("import os; assert 'ONLY_HERE' not in os.environ")


def fork(folder: Path, code: str, *, triton: bool = False) -> Fork:
    folder.mkdir()
    (folder / "script").write_text(code)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return Fork("kernel_reference.testing.forks:_run_script", folder, environment, triton=triton)


def test_the_exit_code_is_that_of_the_process_and_its_output_is_in_a_file(tmp_path: Path) -> None:
    codes = {"print('fine')": 0, "import os; os._exit(7)": 7, "import os; os.kill(os.getpid(), 9)": -9}
    forks = [fork(tmp_path / str(number), code) for number, code in enumerate(codes)]
    assert [one.wait(60) for one in forks] == [*codes.values()]
    assert (tmp_path / "0" / "log").read_text() == "fine\n"
    for one in forks:
        one.end()


def test_one_that_still_runs_has_no_exit_code_and_can_be_ended(tmp_path: Path) -> None:
    # Its number is what it says first: from then on it can be ended.
    code = "import os, time; open('pid', 'w').write(str(os.getpid())); os.rename('pid', 'begun'); time.sleep(1000)"
    one = fork(tmp_path / "long", code)
    while not (tmp_path / "long" / "begun").exists():
        assert one.wait(0.02) is None
    one.end()
    pid = int((tmp_path / "long" / "begun").read_text())
    for _ in range(3000):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        threading.Event().wait(0.01)
    pytest.fail("it still runs")


def test_several_threads_may_ask_at_once(tmp_path: Path) -> None:
    codes: dict[int, int | None] = {}

    def ask(number: int) -> None:
        one = fork(tmp_path / str(number), f"import os; os._exit({number})")
        codes[number] = one.wait(60)
        one.end()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == {number: number for number in range(8)}


def test_with_triton_it_is_the_compiler_that_is_imported(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs triton, which is not installed")
    code = "import sys; assert 'triton' in sys.modules\nimport triton\nfrom triton.runtime.jit import JITFunction\n"
    one = fork(tmp_path / "with", code + "assert isinstance(triton.language.zeros, JITFunction)", triton=True)
    assert one.wait(60) == 0, (tmp_path / "with" / "log").read_text()
    one.end()


def test_what_waits_ends_with_the_process_that_it_waits_for() -> None:
    code = (
        "import os\nfrom kernel_reference.testing import forks\n"
        "forks.run_alone('import os; print(os.getppid())')\n"
        "print(forks._Waiting.get(False).process.pid, flush=True)\nos._exit(0)"
    )
    # A pipe that what waits holds open would be read until that ends.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert int(done.stdout)
