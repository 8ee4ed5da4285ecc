"""The pytest plugin, in runs of pytest of its own."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest
import torch

from kernel_reference.checks import values_are_checked
from kernel_reference.testing.forks import outcome_alone

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")


def run(folder: Path, code: str, *arguments: str, first: str = "", **variables: str) -> str:
    (folder / "test_it.py").write_text(textwrap.dedent(code))
    # So that pytest takes no configuration of a folder above.
    (folder / "pytest.ini").touch()
    ours = ("CI", "TRITON_INTERPRET", "PYTEST_ADDOPTS")
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    environment |= variables
    options = ["-p", "no:cacheprovider", "-p", "kernel_reference.testing.pytest_plugin", "--strict-markers", *arguments]
    script = f"{first}\nimport os, pytest; os.chdir({str(folder)!r}); pytest.main({options})"
    _, printed = outcome_alone(script, environment)
    return printed


def test_without_a_gpu_kernels_run_interpreted_on_cpu_tensors(tmp_path: Path) -> None:
    printed = run(
        tmp_path,
        """
        import os, pytest, torch, triton

        def test_device(device):
            assert device == torch.device("cpu")
            assert os.environ["TRITON_INTERPRET"] == "1"
            assert type(triton.language.zeros).__name__ == "InterpretedFunction"

        @pytest.mark.gpu
        def test_gpu(): ...

        @pytest.mark.sanitize
        @pytest.mark.codegen
        def test_marked(): ...
        """,
    )
    assert "2 passed, 1 skipped" in printed
    assert "kernel_reference: device cpu" in printed
    assert "interpreted, bfloat16 and fp8 repaired" in printed
    assert "SKIPPED [1] test_it.py:9: needs a GPU: " in printed


def test_a_missing_gpu_is_an_error_where_one_is_required(tmp_path: Path) -> None:
    printed = run(tmp_path, "def test_nothing(): ...", KERNEL_REFERENCE_REQUIRE_GPU="1")
    assert "ERROR: KERNEL_REFERENCE_REQUIRE_GPU=1, but there is no GPU to test on" in printed


def test_a_test_draws_the_same_numbers_in_every_run_and_says_how_to_repeat_a_failure(tmp_path: Path) -> None:
    code = """
        import torch
        def test_one(seed):
            assert torch.initial_seed() == seed
            assert False, f"drew {torch.rand(1).item()}"
        """
    first, second = run(tmp_path, code), run(tmp_path, "\n" + code)

    def drawn(printed: str) -> str:
        return next(line for line in printed.splitlines() if "AssertionError: drew" in line)

    assert drawn(first) == drawn(second)
    line = next(line for line in first.splitlines() if "KERNEL_REFERENCE_SEED=" in line)
    assert line.endswith('python -m pytest "test_it.py::test_one"')
    assert drawn(run(tmp_path, code, KERNEL_REFERENCE_SEED="1")) != drawn(first)


def test_random_cases_are_as_many_as_are_asked_for_and_one_that_fails_is_named(tmp_path: Path) -> None:
    code = """
        def test_drawn(random_case):
            assert random_case != 7
        """
    printed = run(tmp_path, code, "--random-cases", "5:9")
    assert "1 failed, 3 passed" in printed
    assert 'python -m pytest "test_it.py::test_drawn[7]" --random-cases 7:8' in printed
    assert "must be N or A:B, got few" in run(tmp_path, code, "--random-cases", "few")


def test_few_cases_are_some_of_each_test_the_same_in_every_run_and_of_those_that_are_chosen(tmp_path: Path) -> None:
    code = """
        import pytest

        @pytest.mark.parametrize("one", range(5))
        @pytest.mark.parametrize("other", "abcdefgh")
        def test_many(one, other): ...

        @pytest.mark.codegen
        @pytest.mark.parametrize("target", range(7))
        def test_compiled(target): ...
        """
    printed = run(tmp_path, code, "--few-cases", "3", "-v")
    assert "10 passed, 37 deselected" in printed
    assert printed.count("test_it.py::test_many[") == 3
    assert [line for line in run(tmp_path, code, "--few-cases", "3", "-v").splitlines() if "PASSED" in line] == [
        line for line in printed.splitlines() if "PASSED" in line
    ]
    # Two are left of forty, and both run.
    assert "2 passed, 45 deselected" in run(tmp_path, code, "--few-cases", "3", "-k", "a-0 or b-4")


def test_the_hypothesis_profile_has_no_deadline_and_is_derandomised_on_ci(tmp_path: Path) -> None:
    code = """
        import os
        from hypothesis import settings

        def test_profile():
            assert settings().deadline is None
            assert settings().print_blob
            assert settings().derandomize == (os.environ.get("CI") == "true")
            assert settings.get_profile("gpu").max_examples > settings.get_profile("cpu").max_examples
            assert settings().max_examples == settings.get_profile("cpu").max_examples
        """
    assert "1 passed" in run(tmp_path, code)
    assert "1 passed" in run(tmp_path, code, CI="true")


WITHOUT_TRITON = """
    import sys

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "triton":
                raise ModuleNotFoundError("No module named 'triton'", name="triton")

    sys.meta_path.insert(0, Absent())
    import importlib.util
    kept = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name == "triton" else kept(name, package)
    """


@pytest.mark.parametrize("ci", ["", "true"])
def test_without_triton_what_imports_it_is_skipped_and_on_ci_fails(tmp_path: Path, ci: str) -> None:
    (tmp_path / "test_module.py").write_text("import triton\n")
    printed = run(
        tmp_path,
        """
        def test_that_needs_none(): ...
        def test_that_imports_it():
            import triton
        """,
        "--continue-on-collection-errors",
        first=textwrap.dedent(WITHOUT_TRITON),
        CI=ci,
    )
    if ci:
        assert "1 failed, 1 passed, 1 error" in printed
    else:
        assert "1 passed, 2 skipped" in printed
        assert "SKIPPED [1] test_it.py:3: needs triton, which is not installed" in printed
        assert "SKIPPED [1] test_module.py:0: needs triton, which is not installed" in printed


def test_a_plugin_loaded_after_triton_says_where_to_name_it(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text("import triton\n")
    first = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    assert "1 passed" in run(tmp_path, "def test_nothing(): ...", first=first, PYTEST_PLUGINS="early")
    code = "import triton; import kernel_reference.testing.pytest_plugin"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    _, printed = outcome_alone(code, environment)
    assert "must be loaded before triton is imported; name it in addopts" in printed


def test_of_a_gpus_memory_a_test_keeps_no_more_than_a_gib_for_the_next(tmp_path: Path) -> None:
    code = """
        import pytest, torch
        reserved = 0

        def set_to(number):
            global reserved
            reserved = number

        torch.cuda.is_initialized, torch.cuda.memory_reserved = lambda: True, lambda: reserved
        torch.cuda.empty_cache = lambda: set_to(0)

        @pytest.mark.parametrize(("before", "taken"), [(0, 2**29), (2**29, 3 * 2**30), (0, 0)])
        def test_of_a_gpu(before, taken):
            assert reserved == before
            set_to(taken)
        """
    assert "3 passed" in run(tmp_path, code)


def test_a_test_may_ask_for_one_thread(one_thread: None) -> None:
    assert torch.get_num_threads() == 1


def test_a_test_may_ask_that_values_are_not_looked_at(unchecked: None) -> None:
    assert not values_are_checked(torch.device("cpu"))
