"""The environments of nox's sessions: the packages' wheels, the versions beside them, and bytecode that others have."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path

import nox
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
HOMES = {"shared": ROOT / "shared"} | {
    file.parent.name: file.parent for file in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
PROJECTS = {name: nox.project.load_toml(home / "pyproject.toml") for name, home in HOMES.items()}
OWN = {project["project"]["name"] for project in PROJECTS.values()}


def tell_uv_what_pip_knows() -> None:
    """Set uv's variables, unless they are set, from pip's configuration, which uv does not read."""
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    known: dict[str, str] = {}
    # Of one setting the file's line comes before the variable's, which is the stronger.
    for line in sorted(told.splitlines(), key=lambda line: line.startswith(":env:")):
        if found := re.fullmatch(r"(?:global|install|:env:)\.([\w-]+)='(.*)'", line):
            known[found[1]] = " ".join(found[2].replace("\\n", " ").split())
    settings = {
        "UV_DEFAULT_INDEX": known.get("index-url", ""),
        "UV_INDEX": known.get("extra-index-url", ""),
        "UV_FIND_LINKS": ",".join(known.get("find-links", "").split()),
        "SSL_CERT_FILE": known.get("cert", ""),
        # pip's rule, which the CPU builds of torch need: the best version of all sources, not the first source's.
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    for name, value in settings.items():
        if value:
            os.environ.setdefault(name, value)


def wheel(session: nox.Session, package: str) -> str:
    """A package's wheel, beside its sdist, built from that once for each state of the package's files."""
    made = ROOT / ".nox" / "wheels" / package / digest(HOMES[package])
    if not made.is_dir():
        session.install(*nox.project.dependency_groups(PROJECT, "build"))
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
            out = Path(scratch) / "dist"
            session.run("python", "-m", "build", "--no-isolation", "--outdir", out, HOMES[package], silent=True)
            try:
                out.rename(made)
            except OSError:
                # A session beside this one was quicker; what it made is of the same files.
                if not made.is_dir():
                    raise
    return str(next(made.glob("*.whl")))


def digest(home: Path) -> str:
    """Tells the states of a package's files apart."""
    hashed = hashlib.sha256()
    for file in sorted(home.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            hashed.update(f"{file.relative_to(home)} {file.stat().st_size}\n".encode())
            hashed.update(file.read_bytes())
    return hashed.hexdigest()[:16]


def install(
    session: nox.Session, *packages: str, requirements: Iterable[str], versions: Iterable[str] | None = None
) -> None:
    """Install the wheels of packages and of kernel-reference, with all that they and the requirements ask for."""
    wheels = [wheel(session, name) for name in dict.fromkeys(["shared", *packages])]
    session.install(*constrain(session, runtime_pins() if versions is None else versions), *wheels, *requirements)
    install_again(session, *wheels)
    link_bytecode(Path(session.virtualenv.location))


def install_reference_alone(session: nox.Session) -> None:
    """Install kernel-reference without what it asks for: reading its records takes no torch."""
    install_again(session, wheel(session, "shared"))


def install_again(session: nox.Session, *wheels: str) -> None:
    """Install these files over what is there: `-R` skips session.install, and an installed version would be kept."""
    if with_uv(session):
        session.run("uv", "pip", "install", "--quiet", "--reinstall", "--no-deps", *wheels)
    else:
        session.run("python", "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", *wheels)


def link_bytecode(environment: Path) -> None:
    """Give an environment the bytecode that others have of the very same files: uv links files from its cache, and
    makes none. Torch's and what comes with it take each environment 7 s of CPU.
    """
    for mine in environment.glob("lib/python*/site-packages"):
        for other in ROOT.glob(f".nox/*/lib/{mine.parent.name}/site-packages"):
            # Strings where paths would take seconds: there are 3,000 files in each of 20 environments.
            for folder, _, names in () if other == mine else os.walk(other):
                if folder.endswith("__pycache__"):
                    own = f"{mine}{folder.removeprefix(str(other))}"
                    there = set(os.listdir(own)) if os.path.isdir(own) else set()
                    for name in set(names) - there:
                        link_if_same(Path(folder, name), Path(own, name))


def link_if_same(compiled: Path, wanted: Path) -> None:
    """Link a file of bytecode if its source and the one that it is wanted for are one file."""
    # Else not of a file that both have, or pytest's own; a session beside this one may be writing it.
    with suppress(OSError, ValueError):
        sources = (Path(importlib.util.source_from_cache(str(file))) for file in (compiled, wanted))
        if os.path.samefile(*sources):
            wanted.parent.mkdir(exist_ok=True)
            wanted.hardlink_to(compiled)


def with_uv(session: nox.Session) -> bool:
    return session.virtualenv.venv_backend == "uv"


def run_installed(session: nox.Session, *command: str | Path, **variables: str) -> None:
    """Run a command that can import the installed wheels, and no source tree in their place."""
    session.run(*command, env={"PYTHONPATH": None, **variables}, external=command[0] == "compute-sanitizer")


def constrain(session: nox.Session, versions: Iterable[str]) -> list[str]:
    file = Path(session.virtualenv.location) / "constraints.txt"
    file.write_text("\n".join(versions) + "\n")
    return ["--constraint", str(file)]


def runtime_pins() -> tuple[str, ...]:
    return nox.project.dependency_groups(PROJECT, "runtime")


def lowest_versions(package: str) -> list[str]:
    """What a package and kernel-reference ask for, in extras and tests too, at the lower bounds; torch as pinned."""
    asked: list[str] = []
    for name in {"shared", package}:
        project = PROJECTS[name]["project"]
        asked += [*project.get("dependencies", []), *chain(*project.get("optional-dependencies", {}).values())]
        asked += group(name, "test")
    bounds = {
        requirement.name: f"{requirement.name}=={bound.version}"
        for requirement in map(Requirement, asked)
        for bound in requirement.specifier
        if bound.operator == ">=" and requirement.name not in OWN
    }
    return sorted((bounds | {"torch": next(pin for pin in runtime_pins() if pin.startswith("torch=="))}).values())


def group(package: str, name: str) -> tuple[str, ...]:
    return nox.project.dependency_groups(PROJECTS[package], name)
