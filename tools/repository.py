"""The repository as a release sees it: packages, tags, and copies of its commits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


class Refused(Exception):
    """Why a release does not go on, in one line."""


@dataclass(frozen=True)
class Package:
    """What the release of a package must know of its pyproject.toml."""

    folder: str
    name: str
    version: Version
    repository: str
    requirements: tuple[Requirement, ...]

    @classmethod
    def parse(cls, folder: str, pyproject: str) -> Package:
        project = tomllib.loads(pyproject)["project"]
        return cls(
            folder=folder,
            name=canonicalize_name(project["name"]),
            version=Version(project["version"]),
            repository=project.get("urls", {}).get("Repository", ""),
            requirements=tuple(map(Requirement, project.get("dependencies", []))),
        )

    @property
    def tag(self) -> str:
        return f"{self.name}-v{self.version}"

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


class House:
    """The repository: its packages, its tags, and copies of its commits."""

    def __init__(self) -> None:
        self.root = Path(run("git", "rev-parse", "--show-toplevel"))
        self.git_folder = run("git", "rev-parse", "--absolute-git-dir")

    def git(self, *arguments: str, copy: Path | None = None) -> str:
        """Run git on the working tree, or on a copy of a commit, which has an index beside it."""
        place = copy or self.root
        index = {"GIT_INDEX_FILE": f"{copy}.index"} if copy else {}
        where = [f"--git-dir={self.git_folder}", f"--work-tree={place}", "--no-optional-locks"]
        return run("git", *where, *arguments, cwd=place, **index)

    def packages(self) -> dict[str, Package]:
        """The packages of HEAD, by the name of their folder."""
        files = self.git("ls-tree", "-r", "--name-only", "HEAD", "shared", "packages").splitlines()
        found = filter(None, (re.fullmatch(r"(shared|packages/[^/]+)/pyproject\.toml", file) for file in files))
        return {Path(match[1]).name: self.package(match[1], "HEAD") for match in found}

    def package(self, folder: str, commit: str) -> Package:
        return Package.parse(folder, self.git("show", f"{commit}:{folder}/pyproject.toml"))

    def require_clean_tree(self) -> None:
        changed = self.git("status", "--porcelain").splitlines()
        if changed:
            more = f" and {len(changed) - 1} more" if changed[1:] else ""
            raise Refused(f"the tree is not clean ({changed[0].split()[-1]}{more}); commit it or take it away first")

    def is_tagged(self, package: Package) -> bool:
        return self.git("tag", "--list", package.tag) != ""

    def tagged_ahead(self, package: Package) -> Package | None:
        """The release that was stopped between its tag and the branch's step to it."""
        head = self.git("rev-parse", "HEAD")
        for tag in self.git("tag", "--list", f"{package.name}-v*", "--contains", head).splitlines():
            found = self.package(package.folder, tag)
            if found.tag == tag and head in self.git("log", "-1", "--format=%P", tag).split():
                return found
        return None

    def copy(self, commit: str, folder: Path) -> Path:
        """The files of a commit, and nothing else that lies in the working tree."""
        folder.mkdir()
        self.git("read-tree", commit, copy=folder)
        self.git("checkout-index", "--all", copy=folder)
        return folder

    def tag(self, copy: Path, package: Package) -> None:
        """Commit what a copy of HEAD has become and tag that, the step by which a release is there or not."""
        self.git("add", "--all", copy=copy)
        tree = self.git("write-tree", copy=copy)
        commit = self.git("commit-tree", tree, "-p", "HEAD", "-m", str(package))
        self.git("tag", "--annotate", "--message", str(package), package.tag, commit)

    def advance(self, package: Package) -> None:
        """Take the branch and the working tree to the tag, unless they are there or beyond."""
        self.git("merge", "--quiet", "--ff-only", f"{package.tag}^{{commit}}")


def run(*command: str, cwd: Path | None = None, **variables: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=os.environ | variables, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Refused(f"{command[0]} says: {(done.stderr.strip() or 'nothing').splitlines()[-1]}")
    return done.stdout.strip()


def tool(module: str, *arguments: str) -> None:
    """Run a tool of Python's whose report is worth reading only when it fails, and then whole."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout, file=sys.stderr)
        raise Refused(f"{module} fails, as it says above")
