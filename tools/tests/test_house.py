"""Rules of the house that a linter does not know."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PACKAGES = [file.parent for file in sorted(ROOT.glob("packages/*/pyproject.toml"))]
HOMES = [ROOT / "shared", *PACKAGES]

each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


@each_package
def test_every_package_has_the_same_rooms(package: Path) -> None:
    source = package / "src" / package.name.replace("-", "_")
    rooms = ["README.md", "CHANGELOG.md", "LICENSE", "changelog.d", "tests", "benchmarks/cases.py"]
    rooms += ["docs/reference.md"]
    rooms += ["examples/quickstart.py", "examples/demo.py"]
    modules = ["__init__.py", "api.py", "arguments.py", "ops.py", "reference.py", "plan.py", "launch.py", "py.typed"]
    assert [room for room in rooms if not (package / room).exists()] == []
    assert [module for module in modules if not (source / module).is_file()] == []
    assert (source / "kernels.py").is_file() or (source / "kernels").is_dir()


@each_package
def test_a_family_of_functions_has_its_rooms_in_a_folder(package: Path) -> None:
    """gradients/launch.py, not gradients_launch.py: a room has the same name wherever it is."""
    rooms = ("api", "arguments", "launch", "ops", "plan", "reference")
    named = [file for room in rooms for file in package.glob(f"src/*/**/*_{room}.py")]
    assert [str(file.relative_to(package)) for file in named if "kernels" not in file.parts] == []


def imported_by(file: Path, source: Path) -> Iterator[str]:
    """The modules that a module imports, those of a package by name where they are taken from it."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), names=names) if (source / module.replace(".", "/")).is_dir():
                yield from (f"{module}.{name.name}" for name in names)
            case ast.ImportFrom(module=str(module)):
                yield module


@each_package
def test_a_plan_and_what_it_imports_know_neither_torch_nor_a_kernel_language(package: Path) -> None:
    source, pure = package / "src", {"kernel_reference.integers", "kernel_reference.plans", *sys.stdlib_module_names}
    waiting, seen, impure = [*source.glob("**/plan.py")], set[Path](), []
    while waiting:
        file = waiting.pop()
        for module in () if file in seen else imported_by(file, source):
            own = (source / module.replace(".", "/")).with_suffix(".py")
            if own.is_file():
                waiting.append(own)
            elif not {module, module.partition(".")[0]} & pure:
                impure.append((str(file.relative_to(source)), module))
        seen.add(file)
    assert seen
    assert impure == []


@each_package
def test_a_constant_of_device_code_has_one_value_under_its_name(package: Path) -> None:
    """Triton's key of a kernel orders constants of one name by where their modules lie in memory."""
    values: dict[str, set[str]] = {}
    for file in package.glob("src/*/**/*.py"):
        for node in ast.parse(file.read_text()).body:
            match node:
                case (
                    ast.AnnAssign(target=ast.Name(id=name), value=ast.Call(function, [value]))
                    | ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(function, [value]))
                ) if ast.unparse(function).endswith("constexpr"):
                    values.setdefault(name, set()).add(ast.unparse(value))
    assert {name: found for name, found in values.items() if len(found) > 1} == {}


@each_package
def test_a_users_code_that_mypy_checks_names_all_that_is_public(package: Path) -> None:
    """`nox -s types` compiles tests/typing in strict mode."""
    source = package / "src" / package.name.replace("-", "_")
    exported = re.search(r"__all__ = (\[.*?\])", (source / "__init__.py").read_text(), flags=re.DOTALL)
    parallel = source / "parallel.py"
    over_ranks = re.findall(r"^def (\w+_cp)\b", parallel.read_text() if parallel.exists() else "", flags=re.MULTILINE)
    users = "".join(file.read_text() for file in package.glob("tests/typing/*.py"))
    names = {*ast.literal_eval(exported[1] if exported else "[]"), *over_ranks}
    assert names
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", users)) == []


# Who stands higher may import who stands lower, in CONTRIBUTING's drawing; other modules of a package are not in it.
ROOMS = ["kernels", "plan", "arguments", "launch reference", "ops", "api", "layers parallel", "dtensor", "integrations"]
HEIGHT = {room: height for height, rooms in enumerate(ROOMS) for room in rooms.split()}


@each_package
def test_no_room_imports_one_above_it_or_beside_it(package: Path) -> None:
    name = package.name.replace("-", "_")
    upwards = []
    for file in package.glob(f"src/{name}/**/*.py"):
        room = file.relative_to(package / "src" / name).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.ImportFrom(module=str(module), names=names):
                    paths = [module, *(f"{module}.{alias.name}" for alias in names)]
                case ast.Import(names=names):
                    paths = [alias.name for alias in names]
                case _:
                    continue
            others = {path.split(".")[1] for path in paths if path.startswith(f"{name}.")} - {room}
            upwards += [(room, other) for other in others if HEIGHT.get(other, -1) >= HEIGHT.get(room, 99)]
    assert upwards == []


@pytest.mark.parametrize("home", HOMES, ids=lambda home: home.name)
def test_no_module_imports_what_another_keeps_to_itself(home: Path) -> None:
    """A name with an underscore is its module's own."""
    own = {folder.name for folder in home.glob("src/*/")} | {"kernel_reference"}
    private = []
    for file in home.glob("src/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] in own:
                    private += [(file.name, name.name) for name in names if re.match(r"_(?!_)", name.name)]
    assert private == []


@each_package
def test_an_engine_is_imported_by_its_integration_alone(package: Path) -> None:
    imports = re.compile(r"^\s*(?:from|import) (?:sglang|transformers|vllm)\b", re.MULTILINE)
    elsewhere = [file for file in package.glob("src/**/*.py") if file.parent.name != "integrations"]
    assert [file.name for file in elsewhere if imports.search(file.read_text())] == []


@each_package
def test_what_a_package_imports_of_kernel_reference_stands_in_its_readme(package: Path) -> None:
    named = set(re.findall(r"`(\w+)", (ROOT / "shared" / "README.md").read_text()))
    groups = ("testing", "bench", "integrations")
    of_module = re.compile(r"(?:from|import) kernel_reference((?:\.\w+)+)")
    of_group = re.compile(rf"from kernel_reference(?:\.(?:{'|'.join(groups)}))? import ([\w, ]+)")
    imported = set[str]()
    for text in (file.read_text() for file in package.glob("**/*.py")):
        for path in of_module.findall(text):
            imported.update([name for name in path.split(".")[1:] if name not in groups][:1])
        for names in of_group.findall(text):
            imported.update(name.split(" as ")[0].strip() for name in names.split(","))
    # Classes of a group have their module's row.
    modules = {name for name in imported if name.islower()}
    assert modules
    assert sorted(modules - named) == []


# Sizes that one can read: arguments travel in NamedTuples, and a file has one duty.
MOST_ARGUMENTS = {"device function": 12, "kernel": 25}
MOST_LINES = 449


def device_functions(package: Path) -> Iterator[tuple[str, str, int]]:
    """Name, kind and number of arguments of the functions in a package's kernels that are compiled for a GPU.

    A kernel is what the host launches: a prim_func of TileLang, or what Triton compiles and no other function mentions.
    """
    trees = [ast.parse(file.read_text()) for file in package.glob("src/*/kernels*/**/*.py")]
    trees += [ast.parse(file.read_text()) for file in package.glob("src/*/kernels.py")]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    mentioned = {name for function in functions for name in names_used(function)}
    for function in functions:
        decorators = " ".join(ast.unparse(line) for line in function.decorator_list)
        if re.search(r"\b(jit|macro|prim_func)\b", decorators):
            launched = "prim_func" in decorators or ("macro" not in decorators and function.name not in mentioned)
            count = sum(1 for node in ast.walk(function.args) if isinstance(node, ast.arg))
            yield function.name, "kernel" if launched else "device function", count


def names_used(function: ast.FunctionDef) -> set[str]:
    """Names that a function takes from outside itself."""
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    own = {node.id for node in names if isinstance(node.ctx, ast.Store)} | {function.name}
    own |= {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    attributes = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
    return {node.id for node in names} - own | (attributes - own)


@each_package
def test_device_functions_take_few_arguments(package: Path) -> None:
    found = [one for one in device_functions(package) if one[2] > MOST_ARGUMENTS[one[1]]]
    assert found == []


@pytest.mark.parametrize("files", [*(f"{home.relative_to(ROOT)}/src/**/*" for home in HOMES), "tools/*", "*"])
def test_source_files_are_short(files: str) -> None:
    sources = [file for file in ROOT.glob(files) if file.suffix in (".py", ".cuh")]
    lengths = {file.relative_to(ROOT): len(file.read_text().splitlines()) for file in sources}
    assert lengths
    assert {file: lines for file, lines in lengths.items() if lines > MOST_LINES} == {}


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


def workflow(name: str) -> dict[str, Any]:
    # YAML 1.1 reads the key `on` as true.
    return yaml.safe_load((ROOT / ".github/workflows" / f"{name}.yml").read_text())


def test_one_check_waits_for_every_other_job_and_is_red_unless_all_are_green() -> None:
    jobs = workflow("ci")["jobs"]
    last = jobs["all-green"]
    assert last["name"] == "all green"
    assert last["if"] == "always()"
    assert set(last["needs"]) == set(jobs) - {"all-green"}
    passed = last["steps"][0]["env"]["PASSED"]
    assert all(f"needs.{name}.result" in passed for name in last["needs"])


def test_a_push_to_main_is_never_cancelled_by_the_next_one() -> None:
    concurrency = workflow("ci")["concurrency"]
    assert concurrency["cancel-in-progress"] == "${{ github.event_name == 'pull_request' }}"
    assert "|| github.sha" in concurrency["group"]


def test_tests_run_on_every_python_that_the_packages_allow() -> None:
    assert '["3.11", "3.12", "3.13", "3.14"]' in (ROOT / ".github/workflows/ci.yml").read_text()
    for file in [ROOT / "shared/pyproject.toml", *ROOT.glob("packages/*/pyproject.toml")]:
        assert 'requires-python = ">=3.11"' in file.read_text(), file


def test_faults_are_planted_on_a_schedule() -> None:
    faults = workflow("faults")
    assert faults[True]["schedule"]
    assert faults["jobs"]["faults"]["steps"][-1]["run"] == 'nox -s "test($PACKAGE)" -- --faults'


def test_a_release_is_built_with_pinned_tools_from_a_tag_on_main() -> None:
    steps = workflow("release")["jobs"]["build"]["steps"]
    commands = [step.get("run", "") for step in steps]
    on_main = next(at for at, command in enumerate(commands) if "merge-base --is-ancestor" in command)
    built = next(at for at, command in enumerate(commands) if "nox -s" in command)
    assert on_main < built
    requirements = (ROOT / ".ci/requirements.txt").read_text()
    assert {line.split("==")[0] for line in requirements.splitlines() if "==" in line} == {"nox", "pip", "uv"}
    for file in (ROOT / ".github/workflows").glob("*.yml"):
        assert "pip install nox" not in file.read_text(), file


def test_softmax_helpers_of_one_name_are_the_same_code() -> None:
    """Each package carries its own, as it is released on its own; what is mended in one is mended in all."""
    bodies: dict[str, dict[str, str]] = {}
    for file in ROOT.glob("packages/*/src/*/kernels/softmax.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                node.body = node.body[ast.get_docstring(node) is not None :]
                bodies.setdefault(node.name, {})[str(file.relative_to(ROOT))] = ast.unparse(node)
    shared = {name: found for name, found in bodies.items() if len(found) > 1}
    assert [(name, *found) for name, found in shared.items() if len(set(found.values())) > 1] == []
