"""Print as JSON which packages a git range touches, dependants included.

    python tools/affected.py main..HEAD        ["gdn-split"]

A name is a folder of packages/, or "shared", or "tools"; it is what `nox -t` takes. Without a range it is every name.
A change to a package's documents touches that package alone, a change to the root's documents nothing, and a change to
anything else at the root, or to what the noxfile imports, of which every session is made, everything.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

# No wheel holds these but as text for people, so no dependant can tell the difference.
DOCUMENTS = {".md", ".cff", ".svg", ".png"}
# The noxfile imports it.
OF_EVERY_SESSION = "tools/environments.py"
# The picture in the README, which a test of the tools holds to them, is drawn of these.
RECORDS = "packages/*/benchmarks/results/*.jsonl"


def packages(root: Path) -> dict[str, set[str]]:
    """Each package's name and that of the tools, and the names of those they depend on, however far down."""
    homes = [root / "shared", *sorted(file.parent for file in root.glob("packages/*/pyproject.toml"))]
    projects = {home.name: tomllib.loads((home / "pyproject.toml").read_text())["project"] for home in homes}
    owner = {canonical(project["name"]): name for name, project in projects.items()}
    direct = {
        name: {owner[wanted] for wanted in map(canonical, project.get("dependencies", [])) if wanted in owner}
        for name, project in projects.items()
    }

    def reach(name: str, seen: frozenset[str]) -> frozenset[str]:
        for wanted in direct[name] - seen:
            seen = reach(wanted, seen | {wanted})
        return seen

    # The tools read the records of kernel-reference, and make packages that use all of it.
    return {name: set(reach(name, frozenset())) for name in projects} | {"tools": {"shared"}}


def canonical(requirement: str) -> str:
    """The name in a requirement, as the index compares names."""
    name = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", name[0]).lower() if name else ""


def affected(changed: Iterable[str], depends: dict[str, set[str]]) -> list[str]:
    """The names that a change of these files touches; ``depends`` is what :func:`packages` gives."""
    everything = sorted(depends)
    touched: set[str] = set()
    for file in map(PurePosixPath, changed):
        document = file.suffix in DOCUMENTS or file.name == "LICENSE"
        top = file.parts[0]
        name = file.parts[1] if top == "packages" and len(file.parts) > 2 else top
        if file.match(RECORDS):
            touched.add("tools")
        if str(file) == OF_EVERY_SESSION:
            return everything
        if top == "tools":
            touched.add("tools")
        elif name in depends and (top == "packages" or top == name == "shared"):
            touched |= {name} if document else {name, *(other for other in depends if name in depends[other])}
        elif not (document and len(file.parts) == 1):
            return everything
    return sorted(touched)


def main(arguments: list[str]) -> int:
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        print("usage: affected.py [<git range>]", file=sys.stderr)
        return 2
    try:
        root = Path(git("rev-parse", "--show-toplevel").strip())
        depends = packages(root)
        if arguments:
            # Without renames a file that moved counts where it was and where it is.
            changed = git("diff", "--name-only", "--no-renames", "-z", arguments[0], "--").split("\0")[:-1]
            print(json.dumps(affected(changed, depends)))
        else:
            print(json.dumps(sorted(depends)))
    except subprocess.CalledProcessError as error:
        print(f"affected: git says: {error.stderr.strip().splitlines()[0]}", file=sys.stderr)
        return 2
    return 0


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
