"""`nox -l` lists the sessions, `nox -s "test(gdn-split)"` runs one of them for one package, `nox -t gdn-split` all of
its sessions that need no GPU and send nothing away, `nox -t gdn-split-gpu` those for a GPU.

Packages are found by their pyproject.toml and listed nowhere. What is tested is the wheel, never the source tree: the
sdist is built, from that the wheel, once for each state of the sources (.nox/wheels), and installed over whatever `-r`
or `-R` kept. uv makes the environments where it is installed, in seconds, else virtualenv and pip do. Packages come
from where the user's pip configuration and PIP_ variables say, with either; what is pinned stands in pyproject.toml.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import cast

import nox

sys.path.insert(0, str(Path(__file__).parent / "tools"))
from environments import (
    HOMES,
    PROJECT,
    PROJECTS,
    ROOT,
    constrain,
    group,
    install,
    install_reference_alone,
    link_bytecode,
    lowest_versions,
    run_installed,
    runtime_pins,
    tell_uv_what_pip_knows,
    wheel,
    with_uv,
)

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["lint", "test"]

# The names of the GPU's tools that fail where there is no GPU; torch is not there yet when a session must know.
GPU_TOOLS = ("nvidia-smi", "rocminfo")
# Tests that would go on in the interpreter, because torch is a CPU build or finds no GPU, fail instead.
ON_GPU = {"KERNEL_REFERENCE_REQUIRE_GPU": "1"}

# A pip.conf in the environment that nox runs from would not be seen from the environments that it makes.
if (Path(sys.prefix) / "pip.conf").is_file():
    os.environ.setdefault("PIP_CONFIG_FILE", str(Path(sys.prefix) / "pip.conf"))
# Without bytecode every start of Python compiles torch again, 4 s of it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

tell_uv_what_pip_knows()

Session = Callable[[nox.Session, str], None]


def each(names: Iterable[str], tag: str = "{}") -> Callable[[Session], Session]:
    """Parametrise a session by package; the tag is what `nox -t` selects."""
    parameters = [nox.param(name, id=name, tags=[tag.format(name)]) for name in names]
    return cast("Callable[[Session], Session]", nox.parametrize("package", parameters))


def having(path: str) -> list[str]:
    """The packages that hold a file of this name."""
    return [name for name, home in HOMES.items() if (home / path).exists()]


@nox.session
def lint(session: nox.Session) -> None:
    """Check the style of the Python code and the safety of the workflows."""
    session.install(*nox.project.dependency_groups(PROJECT, "lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("zizmor", "--offline", "--pedantic", "--quiet", ".github/workflows")


@nox.session(tags=[*HOMES, "tools"])
def types(session: nox.Session) -> None:
    """Check the types of what the packages ship, of users' code (`tests/typing`, the documentation's) and of the tools:
    `-- gdn-split`."""
    wanted = session.posargs or [*HOMES, "tools"]
    needed = [*nox.project.dependency_groups(PROJECT, "types"), *nox.project.dependency_groups(PROJECT, "tools")]
    needed += chain.from_iterable(group(package, "test") for package in HOMES)
    install(session, *HOMES, requirements=needed)
    sources = [HOMES[package] / "src" for package in wanted if package != "tools"]
    sources += [file for package in wanted if package != "tools" for file in HOMES[package].glob("tests/typing/*.py")]
    if "tools" in wanted:
        sources += [ROOT / "noxfile.py", *sorted((ROOT / "tools").glob("*.py"))]
        snippets = Path(session.virtualenv.location) / "snippets"
        session.run("python", ROOT / "tools" / "snippets.py", snippets)
        sources += sorted(snippets.glob("*.py"))
    session.run("mypy", *map(str, sources))


@nox.session
@each([name for name, home in HOMES.items() if [*home.glob("src/*/layers.py")]], tag="{}-release")
def hub(session: nox.Session, package: str) -> None:
    """Make dist/hub/<package>, the tree of the Hugging Face Hub's kernel of this name, from the wheel."""
    install(session, package, requirements=[])
    out = ROOT / "dist" / "hub" / package
    shutil.rmtree(out, ignore_errors=True)
    run_installed(session, "python", "-m", "kernel_reference.hub", import_name(package), out)


@nox.session
@each([*HOMES, "tools"])
def test(session: nox.Session, package: str) -> None:
    """Test a package's wheel; `-- --faults` shows after it that each planted fault turns the suite red."""
    if package == "tools":
        session.install(*nox.project.dependency_groups(PROJECT, "tools"))
        # Half of the time goes into releases and half into a new package.
        session.run("pytest", "--override-ini=addopts=", *at_once(), "tools/tests", *session.posargs)
        return
    faults = "--faults" in session.posargs
    rest = [argument for argument in session.posargs if argument != "--faults"]
    if faults and package not in having("tests/faults"):
        session.log(f"no faults are planted in {package}")
        faults = False
    install(session, package, requirements=tests_of(package))
    suite: list[str | Path] = ["pytest", *at_once(), HOMES[package] / "tests", *rest]
    if not faults:
        run_installed(session, *suite)
        return
    # Not session.create_tmp: it makes a folder of this checkout TMPDIR, and tests' folders would be in git's.
    passed = Path(session.virtualenv.location) / "passed.json"
    run_installed(session, *suite, "-p", "kernel_reference.testing.results", "--write-passed", passed)
    judge: list[str | Path] = ["python", "-m", "kernel_reference.testing.faults", HOMES[package], "--passed", passed]
    run_installed(session, *judge, "--jobs", os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS") or "2", "--", *rest)


# `minimums` compiles this package's kernels too, the quickest ones, for a target of each vendor: `test` has all.
# Kernels compile with the lowest Triton on every GPU whose torch brings it.
COMPILED_AT_THE_LOWEST = "gdn-split"
TARGETS_AT_THE_LOWEST = {"KERNEL_REFERENCE_TARGETS": "sm_90 gfx942"}
# Left to `test`, besides opcheck: files of tests of what torch or Python do alone, and of benchmarks.
AS_IN_TEST = (
    "bench_demo", "bench_map", "bench_ranks", "bench_run", "bench_serve", "bench_tune", "beside", "demo", "distributed",
    "dtensor", "map", "parallel*", "plan", "plans", "readme", "serve",
)  # fmt: skip
# And those that run torch alone where there is no GPU: oracles, checks of arguments, semantics, engines' interfaces.
ON_A_CPU_AS_IN_TEST = (
    "attention*", "contiguous", "*errors", "layout", "messages", "paging", "recurrence", "semantics", "sglang",
    "sharding", "vllm",
)  # fmt: skip


@nox.session
@each(HOMES)
def minimums(session: nox.Session, package: str) -> None:
    """Test a package on the lowest versions that its ranges allow; torch, and what it does alone, stays at the pin."""
    session.log("torch stays at its pin: an older CPU build may not be at hand")
    install(session, package, requirements=tests_of(package), versions=lowest_versions(package))
    # torch.compile is that of the pin, and the simulator, which a GPU does without, has no Triton: as in `test`.
    left_out, files = ["torch_compile"], [*AS_IN_TEST]
    if not has_gpu():
        left_out.append("simulated")
        files += ON_A_CPU_AS_IN_TEST
    if package != COMPILED_AT_THE_LOWEST:
        left_out.append("codegen")
    chosen = ["-m", " and ".join(f"not {marker}" for marker in left_out), "-k", "not opcheck and not launches_compile"]
    chosen += [f"--ignore-glob=*/test_{name}.py" for name in files]
    if not has_gpu():
        # Two cases of each test, and all kernels that are compiled: `test` has all of both.
        chosen += ["--few-cases", "2"]
    suite: list[str | Path] = ["pytest", *at_once(), HOMES[package] / "tests", *chosen, *session.posargs]
    run_installed(session, *suite, **TARGETS_AT_THE_LOWEST)


# All packages' in one run of pytest: to import the engine costs more than its tests do.
IN_TRANSFORMERS = "tests/test_transformers.py"


@nox.session(tags=having(IN_TRANSFORMERS))
@nox.parametrize("versions", [nox.param(kind, id=kind) for kind in ("lowest", "newest")])
def engines(session: nox.Session, versions: str) -> None:
    """Test packages inside transformers' models, with the lowest version that they allow or the newest, pinned one."""
    packages = having(IN_TRANSFORMERS)
    if not packages:
        session.skip("no package is tested inside transformers")
    needed = [*(f"{PROJECTS[package]['project']['name']}[transformers]" for package in packages)]
    needed.append("kernel-reference[testing]")
    if versions == "lowest":
        pins = sorted({pin for package in packages for pin in lowest_versions(package)})
        # What is traced is torch's of the pin either way.
        chosen = ["-m", "not torch_compile"]
    else:
        pins = [*runtime_pins()]
        chosen = []
        needed += nox.project.dependency_groups(PROJECT, "engines")
    install(session, *packages, requirements=needed, versions=pins)
    tests = [HOMES[package] / IN_TRANSFORMERS for package in packages]
    # A model that is made from a config needs nothing from the hub.
    run_installed(session, "pytest", *tests, *chosen, *session.posargs, HF_HUB_OFFLINE="1")


@nox.session
@each(HOMES)
def build(session: nox.Session, package: str) -> None:
    """Build a package into dist/, check sdist and wheel, and import the wheel where there is no GPU."""
    session.install(*nox.project.dependency_groups(PROJECT, "build"))
    out = ROOT / "dist" / package
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(Path(wheel(session, package)).parent, out)
    made = sorted(out.iterdir())
    session.run("twine", "check", "--strict", *made)
    session.run("check-wheel-contents", *(file for file in made if file.suffix == ".whl"))

    # An environment of its own, in which nothing but what the wheel asks for is installed.
    fresh = Path(session.virtualenv.location) / "fresh"
    python = fresh / "bin" / "python"
    # Triton is there, so that not importing it is a choice.
    needed = [*constrain(session, runtime_pins()), *map(str, out.glob("*.whl")), "triton"]
    if package != "shared":
        needed.append(wheel(session, "shared"))
    if with_uv(session):
        session.run("uv", "venv", "--quiet", "--clear", fresh, external=True)
        session.run("uv", "pip", "install", "--quiet", "--python", python, *needed, external=True)
        link_bytecode(fresh)
    else:
        session.run("python", "-m", "virtualenv", "--quiet", "--clear", fresh)
        session.run(python, "-m", "pip", "install", "--quiet", *needed, external=True)
    without_gpu = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    session.run(python, "-I", "-c", IMPORT_CHECK, import_name(package), env=without_gpu, external=True)


IMPORT_CHECK = """
import importlib, sys
module = importlib.import_module(sys.argv[1])
import torch
print(module.__name__, module.__version__, "from", module.__file__)
if torch.cuda.is_initialized():
    sys.exit("importing it initialised CUDA")
if "triton" in sys.modules:
    sys.exit("importing it imported triton, which reads TRITON_INTERPRET then and never again")
"""


@nox.session(reuse_venv=False)
def demo(session: nox.Session) -> None:
    """Build every wheel, install them afresh and run every package's example on real-size input, GPU or not."""
    # A GPU build of torch brings its own Triton.
    extras = {"bench", "tilelang"} if has_gpu() else {"bench", "tilelang", "triton"}
    wanted = []
    for name in HOMES:
        session.log(f"{name}: building the sdist, and from it the wheel")
        started = time.monotonic()
        built = wheel(session, name)
        session.log(f"{name}: {Path(built).name} after {time.monotonic() - started:.0f} s")
        own = sorted(extras.intersection(PROJECTS[name]["project"].get("optional-dependencies", {})))
        wanted.append(f"{built}[{','.join(own)}]" if own else built)
    session.log("installing the wheels and what they need, of which torch is the largest")
    session.install(*constrain(session, runtime_pins()), *wanted, silent=False)
    link_bytecode(Path(session.virtualenv.location))
    examples = sorted(ROOT.glob("packages/*/examples/demo.py"))
    run_installed(session, "python", "-m", "kernel_reference.bench.demo", *examples)


@nox.session
@each(having("benchmarks/cases.py"), tag="{}-gpu")
def bench(session: nox.Session, package: str) -> None:
    """GPU: test a package, then measure it beside every peer that can be imported; `-- --compare old.jsonl`."""
    require_gpu(session)
    install(session, package, requirements=[*group(package, "test"), *group(package, "bench")])
    run_installed(session, "pytest", HOMES[package] / "tests", **ON_GPU)
    benchmarks = HOMES[package] / "benchmarks"
    # Unlike a test, this keeps PYTHONPATH: a peer that has no wheel is found there.
    measure = ["python", "-m", "kernel_reference.bench.run", str(benchmarks / "cases.py")]
    session.run(*measure, "--out", benchmarks / "results", *session.posargs)


@nox.session(name="map")
@each(having("benchmarks/map.py"), tag="{}-gpu")
def map_speed(session: nox.Session, package: str) -> None:
    """GPU: find where a package's speed falls off, round its cases; `-- --seconds 150 --resume`."""
    require_gpu(session)
    install(session, package, requirements=group(package, "bench"))
    benchmarks = HOMES[package] / "benchmarks"
    # Peers are found on PYTHONPATH, as in a benchmark.
    command = ["python", "-m", "kernel_reference.bench.map", str(benchmarks / "map.py")]
    session.run(*command, "--out", benchmarks / "results", *session.posargs)


@nox.session
@each(having("benchmarks/tune.py"), tag="{}-gpu")
def tune(session: nox.Session, package: str) -> None:
    """GPU: search for a package's launch plans."""
    require_gpu(session)
    install(session, package, requirements=group(package, "bench"))
    run_installed(session, "python", HOMES[package] / "benchmarks" / "tune.py", *session.posargs)


@nox.session
@each([name for name in having("tests") if name != "shared"], tag="{}-gpu")
def sanitize(session: nox.Session, package: str) -> None:
    """GPU: run the tests marked `sanitize` under compute-sanitizer's memcheck and racecheck."""
    require_gpu(session)
    if shutil.which("compute-sanitizer") is None:
        session.error("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
    install(session, package, requirements=group(package, "test"))
    for tool in ("memcheck", "racecheck"):
        checked = [*f"compute-sanitizer --tool {tool} --error-exitcode 1".split(), f"{session.bin}/pytest"]
        # torch's caching allocator would hand out memory beyond a tensor's end, where a stray access goes unseen.
        variables = ON_GPU | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        run_installed(session, *checked, "-m", "sanitize", HOMES[package] / "tests", **variables)


@nox.session
@each(HOMES, tag="{}-release")
def release(session: nox.Session, package: str) -> None:
    """Release a package: `-- major|minor|patch|<version> [--index URL] [--dry-run]`."""
    session.install(*nox.project.dependency_groups(PROJECT, "release"))
    session.run("python", ROOT / "tools" / "release.py", package, *session.posargs)


@nox.session(venv_backend="none")
def affected(session: nox.Session) -> None:
    """Print as JSON the packages that a git range touches, dependants included: `-- main..HEAD`."""
    session.run(sys.executable, ROOT / "tools" / "affected.py", *session.posargs, external=True)


@nox.session
def report(session: nox.Session) -> None:
    """Make dist/report.html, and the picture in the README, of the committed records."""
    session.install(*nox.project.dependency_groups(PROJECT, "templates"))
    install_reference_alone(session)
    session.run("python", ROOT / "tools" / "report.py", *session.posargs)


@nox.session(tags=[*HOMES, "tools"])
def docs(session: nox.Session) -> None:
    """Run the documentation's examples, build it into dist/docs and check its links."""
    needed = [*nox.project.dependency_groups(PROJECT, "docs"), *chain.from_iterable(group(p, "test") for p in HOMES)]
    install(session, *HOMES, requirements=needed)
    run_installed(session, "pytest", "--override-ini=addopts=", "tools/tests/test_docs.py")
    session.run("python", ROOT / "tools" / "docs.py", *session.posargs)


@nox.session
def new(session: nox.Session) -> None:
    """Make an empty package that passes every session: `-- <name>`."""
    session.install(*nox.project.dependency_groups(PROJECT, "templates", "lint"))
    session.run("python", ROOT / "tools" / "new.py", *session.posargs)


def tests_of(package: str) -> tuple[str, ...]:
    return (*group(package, "test"), *nox.project.dependency_groups(PROJECT, "tests"))


def at_once() -> tuple[str, ...]:
    """A package's files of tests on two processors (PYTEST_XDIST_AUTO_NUM_WORKERS says another number); one at a time
    on a GPU, whose memory they would share."""
    workers = os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS") or "2"
    return () if has_gpu() or workers == "1" else (f"--numprocesses={workers}", "--dist=loadfile")


def import_name(package: str) -> str:
    return str(PROJECTS[package]["project"]["name"]).replace("-", "_")


def has_gpu() -> bool:
    return any(shutil.which(tool) and subprocess.run([tool], capture_output=True).returncode == 0 for tool in GPU_TOOLS)


def require_gpu(session: nox.Session) -> None:
    if not has_gpu():
        session.error(f"this needs a GPU, and neither of {', '.join(GPU_TOOLS)} finds one")
