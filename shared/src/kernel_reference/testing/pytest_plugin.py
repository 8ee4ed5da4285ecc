"""Run one suite on the GPU if there is one, else in Triton's interpreter: a plugin of pytest, named in its ``addopts``
as ``-p kernel_reference.testing.pytest_plugin``.

Where torch finds no GPU, the plugin sets TRITON_INTERPRET=1, before anything imports triton, and installs the repair of
:mod:`kernel_reference.testing.interpreter`, so that the same tests run the kernels on CPU tensors. Setting
TRITON_INTERPRET=1 by hand asks for the same on a machine with a GPU.

It gives

- the fixture ``device`` (session): ``torch.device("cuda")``, or ``cpu`` where kernels are interpreted;
- the fixture ``on_device`` (module), within which torch makes tensors on that device, unless another one is named;
- the fixture ``seed`` (of every test): the integer that torch's generators were seeded with, made from the test's name
  and printed when the test fails. KERNEL_REFERENCE_SEED=<integer> sets it for all tests;
- the fixture ``one_thread`` (session), with which torch computes on one: the products of tests of kernels are so small
  that a second thread costs more than it does. A conftest asks for it by an autouse fixture of its own;
- the argument ``random_case`` of tests that draw all they test from one integer: they run for a few of these, and with
  ``--random-cases 500`` or ``--random-cases 500:1000`` for so many, or those, each a test of its own;
- ``--few-cases N``: of a test with more cases than N, N that are drawn by its name, the same in every run, for versions
  beside those that all cases run on. A test marked ``codegen`` keeps all: another compiler is what those versions are;
- the fixture ``unchecked``: what only device memory tells is not looked at on a CPU either, and bad values are clamped;
- the markers ``gpu`` (skipped, with the reason, where there is none), ``sanitize`` (the subset that runs under
  compute-sanitizer), ``codegen`` (compiles kernels for GPUs that need not be there), ``simulated`` (runs Gluon kernels
  in :mod:`kernel_reference.testing.gluon`, without Triton) and ``torch_compile`` (calls public functions under
  torch.compile);
- the hypothesis profiles ``cpu`` and ``gpu``, the right one loaded: no deadline, and on CI the same examples each time.

After a test the GPU's memory is given back, for other processes of tests: see :mod:`kernel_reference.testing.memory`.
Reasons of skipped tests are always printed. KERNEL_REFERENCE_REQUIRE_GPU=1 makes a missing GPU an error. Where Triton
is not installed, the tests that import it are skipped, and on CI (the variable CI is true) they fail.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import zlib
from collections.abc import Generator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest
import torch

from kernel_reference.checks import validate_values
from kernel_reference.testing.memory import give_back

_INTERPRET = "TRITON_INTERPRET"
_SEED = "KERNEL_REFERENCE_SEED"
_REQUIRE_GPU = "KERNEL_REFERENCE_REQUIRE_GPU"
_TRUE = ("1", "true", "on", "yes", "y")
_CASES = "--random-cases"
_FEW = "--few-cases"


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in _TRUE


def _why_no_gpu() -> str | None:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built for the CPU alone"
    # Counts devices and creates no context.
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False"
    return f"{_INTERPRET}=1 asks for the interpreter" if _is_set(_INTERPRET) else None


_no_gpu = _why_no_gpu()
_has_triton = find_spec("triton") is not None
_MISSING_TRITON = "needs triton, which is not installed"


def _prepare_interpreter() -> None:
    if "triton" in sys.modules and not _is_set(_INTERPRET):
        raise pytest.UsageError(
            "kernel_reference.testing.pytest_plugin must be loaded before triton is imported; name it in addopts as "
            "'-p kernel_reference.testing.pytest_plugin', or set TRITON_INTERPRET=1 in the environment"
        )
    os.environ[_INTERPRET] = "1"
    if _has_triton:
        from kernel_reference.testing import interpreter

        interpreter.repair()


def _load_hypothesis_profile() -> None:
    if find_spec("hypothesis") is None:
        return
    from hypothesis import HealthCheck, settings

    always = settings(
        deadline=None,
        derandomize=_is_set("CI"),
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    # An interpreted kernel takes tens of milliseconds, a launched one microseconds.
    settings.register_profile("cpu", always, max_examples=25)
    settings.register_profile("gpu", always, max_examples=200)
    settings.load_profile("cpu" if _no_gpu else "gpu")


# While this module is imported, since pytest imports plugins named by -p before any conftest.py and any test.
if _no_gpu:
    _prepare_interpreter()
_load_hypothesis_profile()


def _cases_of(text: str) -> range:
    """``N`` is the first N, ``A:B`` those from A to before B."""
    first, between, last = text.rpartition(":")
    try:
        return range(int(first) if between else 0, int(last))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be N or A:B, got {text}") from None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        _CASES, type=_cases_of, default=range(4), metavar="N or A:B",
        help="how many random cases, or which, of tests that draw them",
    )  # fmt: skip
    parser.addoption(_FEW, type=int, default=0, metavar="N", help="at most N cases of each test, drawn by its name")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "random_case" in metafunc.fixturenames:
        metafunc.parametrize("random_case", metafunc.config.getoption(_CASES))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if _no_gpu and _is_set(_REQUIRE_GPU):
        raise pytest.UsageError(f"{_REQUIRE_GPU}=1, but there is no GPU to test on: {_no_gpu}")
    config.addinivalue_line("markers", "gpu: needs a GPU; skipped, with the reason, where there is none")
    config.addinivalue_line("markers", "sanitize: in the subset that runs under compute-sanitizer")
    config.addinivalue_line("markers", "codegen: compiles kernels for GPUs that need not be there")
    config.addinivalue_line("markers", "simulated: runs Gluon kernels without Triton, in a simulator")
    config.addinivalue_line("markers", "torch_compile: calls public functions under torch.compile")
    if not set(config.option.reportchars) & set("sAa"):
        config.option.reportchars += "s"


def pytest_report_header() -> str:
    if _has_triton:
        import triton

        kernels = f"triton {triton.__version__}" + (", interpreted, bfloat16 and fp8 repaired" if _no_gpu else "")
    else:
        kernels = "no triton"
    where = f"cpu ({_no_gpu})" if _no_gpu else f"cuda ({torch.cuda.get_device_name()})"
    return f"kernel_reference: device {where}; torch {torch.__version__}; {kernels}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Last, so that what -k and -m leave out is not among the few.
    if few := config.getoption(_FEW):
        kept = _few_of_each(items, few)
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = kept
    if _no_gpu:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {_no_gpu}"))


def _few_of_each(items: list[pytest.Item], few: int) -> list[pytest.Item]:
    cases: dict[str, list[int]] = {}
    for place, item in enumerate(items):
        name = item.nodeid if item.get_closest_marker("codegen") else item.nodeid.partition("[")[0]
        cases.setdefault(name, []).append(place)
    drawn = [random.Random(Path(name).name).sample(places, min(few, len(places))) for name, places in cases.items()]
    return [items[place] for place in sorted(chain.from_iterable(drawn))]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tensors live that are given to kernels: the GPU, or the CPU where kernels are interpreted."""
    return torch.device("cpu" if _no_gpu else "cuda")


@pytest.fixture(scope="module")
def on_device(device: torch.device) -> Generator[None, None, None]:
    """A module's tensors are made there, unless another device is named: of models that are made of a config."""
    with device:
        yield


@pytest.fixture(scope="session")
def one_thread() -> Generator[None, None, None]:
    """Torch's products on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def unchecked() -> Generator[None, None, None]:
    """A test inside ``validate_values(False)``."""
    with validate_values(False):
        yield


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """The seed given to torch's generators and to Python's before this test: its own, the same in every run."""
    value = _seed_of(request.node)
    torch.manual_seed(value)
    random.seed(value)
    return value


def _seed_of(item: pytest.Item) -> int:
    if os.environ.get(_SEED):
        return int(os.environ[_SEED])
    # The folder is left out, so that a test has the same seed wherever pytest is started.
    return zlib.crc32(f"{item.path.name}::{item.nodeid.partition('::')[2]}".encode())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        line = f'{_SEED}={_seed_of(item)} python -m pytest "{item.nodeid}"'
        drawn = getattr(item, "callspec", None)
        if drawn is not None and (case := drawn.params.get("random_case")) is not None:
            line += f" {_CASES} {case}:{case + 1}"
        report.sections.append(("reproduce", line if _no_gpu is None else f"{_INTERPRET}=1 {line}"))
    return report


def _may_lack_triton(error: BaseException | None) -> bool:
    if _has_triton or _is_set("CI"):
        return False
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "triton":
            return True
        error = error.__cause__ or error.__context__
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if _may_lack_triton(error):
            # Located at the test, not here.
            raise pytest.skip.Exception(_MISSING_TRITON, _use_item_location=True) from error
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    yield
    give_back()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    call = getattr(report, "call", None)
    if report.failed and call is not None and _may_lack_triton(call.excinfo.value):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: {_MISSING_TRITON}")
    return report
