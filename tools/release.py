"""Release one package: its version, changelog, commit, tag, sdist and wheel, and their way to an index.

    python tools/release.py gdn-split minor --index URL [--dry-run]

All that can fail comes before the tag and happens in a folder of its own, so that until then nothing has changed. From
the tag on the release is unfinished until the index holds its files, and the same command takes it up where it stopped,
building from the tag: hatchling makes the same bits of the same files, and an index that holds others is an error.

Files are sent to `--index` by twine, which takes user name and password as ever (TWINE_USERNAME and TWINE_PASSWORD, or
keyring). Without it the release ends with the tag: pushed, it starts the workflow, which runs this same command on the
tag and publishes to the public index, where nothing else does.

A tag is `<distribution>-v<version>`, by the name that people install: `kernel-reference-v0.1.0` for the folder shared.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import tomlkit
from package_index import Index, version_of
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pypi_simple import DistributionPackage
from repository import House, Package, Refused, tool
from tomlkit.items import Table
from twine.package import PackageFile


def release(folder: str, request: str, url: str | None, dry_run: bool) -> None:
    """Do what the module says; raise :class:`Refused` where it cannot be done."""
    house = House()
    packages = house.packages()
    if folder not in packages:
        raise Refused(f"there is no package {folder}, but {', '.join(packages)}")
    house.require_clean_tree()
    index = Index(url)
    held = index.files(packages[folder].name)
    package, resumed = target(house, packages[folder], request, held, index)
    require_our_name(index, package, held)
    require_requirements(index, package, {other.name for other in packages.values()})
    index.require_upload_rights()
    if not resumed:
        house.git("var", "GIT_COMMITTER_IDENT")
    say(f"{package}: taken up from its tag" if resumed else f"{packages[folder]} is released as {package.version}")

    with tempfile.TemporaryDirectory() as scratch:
        copy = house.copy(package.tag if resumed else "HEAD", Path(scratch, "copy"))
        if not resumed:
            require_fragments(copy, package)
            set_version(copy, package)
            write_changelog(copy, package)
        built = build(copy / package.folder, Path(scratch, "dist"))
        notes = check(built, package, (copy / package.folder / "CHANGELOG.md").read_text())
        missing = not_held(built, held, index)
        say(f"built and checked {', '.join(file.name for file in built)}")
        if dry_run:
            tagging = "" if resumed else f"commit and tag {package.tag}, "
            say(f"would {tagging}{last_step(package, index, missing)}; its notes would be\n\n{notes}")
            return
        if not resumed:
            house.tag(copy, package)
        house.advance(package)
        keep(built, notes, house.root / "dist", package)

    try:
        for file in missing:
            index.send(house.root / "dist" / folder / file.name)
    except Refused as error:
        raise Refused(f"{error}; {package.tag} is set, and the same command goes on from it") from error
    say(f"{package} is on {index}" if url else f"{package} is tagged; {last_step(package, index, missing)}")


def target(
    house: House, package: Package, request: str, held: Sequence[DistributionPackage], index: Index
) -> tuple[Package, bool]:
    """What is to be released, and whether its tag is there already.

    A release that was stopped comes first: asked for in the same words it is taken up, and anything else has to wait.
    """
    unfinished = house.tagged_ahead(package)
    if unfinished is None and house.is_tagged(package) and not is_complete(package, held):
        unfinished = package
    if unfinished is not None:
        before = house.package(package.folder, f"{unfinished.tag}~1")
        if next_version(before.version, request) != unfinished.version:
            raise Refused(f"{unfinished} is tagged, but not on {index}: release {unfinished.version} first")
        return unfinished, True

    wanted = replace(package, version=next_version(package.version, request))
    if wanted.version < package.version:
        raise Refused(f"{wanted.version} goes back behind {package}")
    if wanted == package and house.is_tagged(package):
        raise Refused(f"{package} is already on {index}")
    if house.is_tagged(wanted):
        raise Refused(f"{wanted.tag} is set, but on another branch: merge it first")
    if any(version_of(file) == wanted.version for file in held):
        raise Refused(f"{wanted} is already on {index}, but not tagged here: git fetch --tags")
    return wanted, False


def next_version(version: Version, request: str) -> Version:
    major, minor, patch = version.major, version.minor, version.micro
    bumped = {"major": f"{major + 1}.0.0", "minor": f"{major}.{minor + 1}.0", "patch": f"{major}.{minor}.{patch + 1}"}
    try:
        return Version(bumped.get(request, request))
    except InvalidVersion:
        raise Refused(f"{request!r} is neither major, minor or patch nor a version") from None


def is_complete(package: Package, held: Sequence[DistributionPackage]) -> bool:
    return {"sdist", "wheel"} <= {file.package_type for file in held if version_of(file) == package.version}


def require_our_name(index: Index, package: Package, held: Sequence[DistributionPackage]) -> None:
    """Stop where the name is another project's: of two things with one name, pip would install either for the other."""
    if not package.repository:
        raise Refused(f"{package.folder}/pyproject.toml has no project URL `Repository`, by which a name is ours")
    if not held:
        return
    metadata = index.metadata(held[-1])
    urls = [*metadata.get("project_urls", {}).values(), metadata.get("home_page", "")]
    if plain(package.repository) not in map(plain, urls):
        raise Refused(f"{package.name} on {index} is another project, which does not name {package.repository}")


def plain(url: str) -> str:
    return url.casefold().rstrip("/").removesuffix(".git")


def require_requirements(index: Index, package: Package, ours: set[str]) -> None:
    """Stop where nobody could install the package for want of another of this repository."""
    for needed in package.requirements:
        if canonicalize_name(needed.name) not in ours:
            continue
        there = [version_of(file) for file in index.files(needed.name) if not file.is_yanked]
        if not any(needed.specifier.contains(version) for version in there):
            newest = f"has {there[-1]} at most" if there else "has none"
            raise Refused(f"{package} needs {needed}, and {index} {newest}: release {needed.name} first")


def require_fragments(copy: Path, package: Package) -> None:
    """Stop where towncrier would have nothing to say, or leave something out."""
    towncrier = tomllib.loads((copy / "pyproject.toml").read_text())["tool"]["towncrier"]
    kinds = [kind["directory"] for kind in towncrier["type"]]
    known = re.compile(rf".+\.({'|'.join(kinds)})(\.\d+)?\.md")
    fragments = [file.name for file in sorted((copy / package.folder / "changelog.d").glob("[!.]*"))]
    unknown = [name for name in fragments if not known.fullmatch(name)]
    if unknown:
        raise Refused(f"{unknown[0]} in {package.folder}/changelog.d is none of {', '.join(kinds)}")
    if not fragments:
        raise Refused(f"nothing is new in {package.name}: no fragments in {package.folder}/changelog.d")


def set_version(copy: Path, package: Package) -> None:
    file = copy / package.folder / "pyproject.toml"
    document = tomlkit.parse(file.read_text())
    cast(Table, document["project"])["version"] = str(package.version)
    file.write_text(tomlkit.dumps(document))


def write_changelog(copy: Path, package: Package) -> None:
    where = ["--config", str(copy / "pyproject.toml"), "--dir", str(copy / package.folder)]
    tool("towncrier", "build", *where, "--name", package.name, "--version", str(package.version), "--yes")


def newest_section(changelog: str) -> tuple[str, str]:
    """The version that stands first in a changelog, and what is said of it."""
    _, *sections = re.split(r"^## (\S+) \(.*\)$", changelog, flags=re.MULTILINE)
    return (sections[0], sections[1].strip() + "\n") if sections else ("none", "")


def build(home: Path, out: Path) -> list[Path]:
    """The sdist, and from it the wheel; the wheel comes first, it is the one to have where only one arrives."""
    tool("build", "--no-isolation", "--outdir", str(out), str(home))
    return sorted(out.iterdir(), key=lambda file: file.suffix != ".whl")


def check(built: Sequence[Path], package: Package, changelog: str) -> str:
    """Check what was built, and that tag, files and changelog speak of one version; the release notes."""
    tool("twine", "check", "--strict", *map(str, built))
    tool("check_wheel_contents", *(str(file) for file in built if file.suffix == ".whl"))
    newest, notes = newest_section(changelog)
    packed = {PackageFile.from_filename(str(file), None).version for file in built}
    if {newest, *packed} != {str(package.version)}:
        raise Refused(f"{package.tag} holds files of {', '.join(sorted(packed))} and a changelog of {newest}")
    return notes


def not_held(built: Sequence[Path], held: Sequence[DistributionPackage], index: Index) -> list[Path]:
    """The files that the index lacks; those that it holds must be the same, bit for bit."""
    digests = {file.filename: file.digests for file in held}
    for file in built:
        ours = {name: hashlib.new(name, file.read_bytes()).hexdigest() for name in digests.get(file.name, {})}
        if ours != digests.get(file.name, {}):
            raise Refused(f"{index} holds another {file.name} than the tag makes")
    return [file for file in built if file.name not in digests]


def keep(built: Sequence[Path], notes: str, dist: Path, package: Package) -> None:
    """Leave the files in dist/<folder>, and the release notes beside it."""
    out = dist / Path(package.folder).name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for file in built:
        shutil.copy(file, out)
    (dist / f"{package.tag}.md").write_text(notes)


def last_step(package: Package, index: Index, missing: Sequence[Path]) -> str:
    if index.settings is None:
        return f"leave the rest to the workflow that `git push --atomic origin HEAD {package.tag}` starts"
    return f"send {' and '.join(file.name for file in missing)} to {index}"


def say(what: str) -> None:
    print(f"release: {what}", flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="release", description="Release one package.", allow_abbrev=False)
    parser.add_argument("package", help="its folder's name")
    parser.add_argument("request", metavar="major|minor|patch|VERSION")
    parser.add_argument("--index", metavar="URL", help="where twine uploads to; URL/simple/ is where pip installs from")
    parser.add_argument("--dry-run", action="store_true", help="build and check, and change nothing")
    options = parser.parse_args(arguments)
    try:
        release(options.package, options.request, options.index, options.dry_run)
    except Refused as refused:
        print(f"release: {refused}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
