"""Make a package with the rooms that every package has, round a kernel of four lines that passes every session.

    python tools/new.py block-scan        packages/block-scan, imported as block_scan

What it is made of lies in templates/package, where MODULE stands for the name that is imported, and files whose names
start with an underscore are parts of others. It wants jinja2 and ruff.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import keyword
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jinja2
from affected import canonical

ROOT = Path(__file__).parents[1]
TEMPLATES = Path(__file__).parent / "templates" / "package"
# Longer ones would not fit the lines of the templates.
LONGEST_NAME = 30


class NewError(Exception):
    """No package can be made of this name; the message says why in one line."""


def check(name: str, root: Path) -> None:
    """Raise NewError where a package of this name would not do."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise NewError(f"name must be kebab-case, such as block-scan, got {name!r}")
    if len(name) > LONGEST_NAME:
        raise NewError(f"name must be at most {LONGEST_NAME} characters long, got {len(name)}: {name}")
    module = name.replace("-", "_")
    if keyword.iskeyword(module) or module in sys.stdlib_module_names:
        raise NewError(f"name must be none of Python's own, got {name}")
    taken = {"shared", "tools", *(project(home)["name"] for home in [root / "shared", *homes(root)])}
    if name in taken or (root / "packages" / name).exists():
        raise NewError(f"name must be new, and there is a {name} already")
    # Where either is imported the other would be hidden. This process may lack what the packages need.
    if name in needed(root) | installed() or importlib.util.find_spec(module) is not None:
        raise NewError(f"name must be no other project's, got {name}, which is installed or which packages need")


def installed() -> set[str]:
    return {canonical(str(distribution.metadata["Name"])) for distribution in importlib.metadata.distributions()}


def needed(root: Path) -> set[str]:
    """What the repository's packages and tools are made of, and so what every environment of theirs holds."""
    groups = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8")).get("dependency-groups", {})
    lists = list(groups.values())
    for home in [root / "shared", *homes(root)]:
        found = project(home)
        lists += [found.get("dependencies", []), *found.get("optional-dependencies", {}).values()]  # type: ignore[attr-defined]
    return {canonical(one) for requirements in lists for one in requirements if isinstance(one, str)}


def homes(root: Path) -> list[Path]:
    return [file.parent for file in sorted(root.glob("packages/*/pyproject.toml"))]


def project(home: Path) -> dict[str, object]:
    found: dict[str, object] = tomllib.loads((home / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def compatible(version: str) -> str:
    """The versions that promise what this one does: before 1.0 to the next minor one, after it to the next major."""
    major, minor = map(int, version.split(".")[:2])
    return f">={major}.{minor},<{major + 1}" if major else f">=0.{minor},<0.{minor + 1}"


def files(name: str, root: Path) -> Iterator[tuple[str, str]]:
    """Path and text of every file of the package, but for its licence."""
    shared = tomllib.loads((root / "shared" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module = name.replace("-", "_")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    for template in sorted(environment.list_templates()):
        if not Path(template).name.startswith("_") or Path(template).name.startswith("__"):
            text = environment.get_template(template).render(
                name=name,
                module=module,
                reference=compatible(shared["version"]),
                repository=shared["urls"]["Repository"],
            )
            yield template.replace("MODULE", module).removesuffix(".jinja"), text


def make(name: str, root: Path) -> Path:
    """Write the package and return its folder, which appears whole or not at all. Raises NewError."""
    check(name, root)
    home = root / "packages" / name
    made = home.with_name(f".{name}")
    shutil.rmtree(made, ignore_errors=True)
    try:
        for path, text in files(name, root):
            (made / path).parent.mkdir(parents=True, exist_ok=True)
            (made / path).write_text(text, encoding="utf-8")
        shutil.copy(root / "LICENSE", made / "LICENSE")
        # Where an import stands and how a line is broken depends on the name.
        for command in (["check", "--quiet", "--fix", "--select=I"], ["format", "--quiet"]):
            subprocess.run([sys.executable, "-m", "ruff", *command, made], cwd=root, check=True)
        made.rename(home)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return home


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: new.py <name>, kebab-case, such as block-scan", file=sys.stderr)
        return 2
    try:
        home = make(arguments[0], ROOT)
    except NewError as error:
        print(f"new: {error}", file=sys.stderr)
        return 2
    print(f"made {home.relative_to(ROOT)}; see it pass, nox -t {home.name}, then put your kernel in place of its own")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
