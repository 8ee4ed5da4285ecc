"""What a change makes of compiled code: ``python -m kernel_reference.testing.codegen --compare REV [package ...]``.

A package says what is to be compiled in ``tests/test_codegen.py``, by a function ``specs(target)`` that its tests use
as well: it yields the :class:`.KernelSpec` (or, of another compiler than Triton, the :class:`.GeneratedSource`) of each
case, under a name that does not depend on the names or the number of a kernel's arguments. Cases are compiled as they
stand in the working tree, and as they stood at a revision; what differs is counted in lines.

The revision's cases are compiled by the revision's own ``--dump``, in an archive of it in a temporary folder, and kept
in a cache by the trees of the package and of this one, the compilers' versions and the targets.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from kernel_reference.testing.codegen import compile_by_target
from kernel_reference.testing.reports import columns
from kernel_reference.testing.specs import GeneratedSource, KernelSpec
from kernel_reference.testing.targets import TARGETS, target_named

CASES = "tests/test_codegen.py"
# In the order of their making. Where PTX is the same SASS is too, but for what ptxas makes of names and line numbers.
_KINDS = ("source", "ptx", "sass", "amdgcn")
_COMPILERS = ("triton", "tilelang")


class Compiled(NamedTuple):
    """A case as it was compiled: its code by kind, registers and bytes of spills of a thread, the error if there was
    one. Figures of a source that nothing has compiled are None."""

    code: Mapping[str, str]
    registers: int | None
    spilled: int | None
    error: str = ""


class Difference(NamedTuple):
    """A row of the table. verdict: "unchanged", "unchanged SASS", "changed (n lines)", "new" or "gone"."""

    case: str
    verdict: str
    before: Compiled | None
    after: Compiled | None

    @property
    def matters(self) -> bool:
        """Whether code that there was is no longer the same."""
        return self.verdict.startswith(("changed", "gone"))


def dump(package: Path, targets: Sequence[str], processes: int = 2, only: str = "") -> dict[str, Compiled]:
    """Compile the cases of a package, which is imported from where Python finds it. By ``target/name``.

    ``only``: those whose name contains it.
    """
    all_cases = _cases(package)

    def specs(target: str) -> list[KernelSpec | GeneratedSource]:
        return [case for case in all_cases(target) if only in f"{package.name}/{target}/{case.name}"]

    sources = {target: [case for case in specs(target) if isinstance(case, GeneratedSource)] for target in targets}

    def kernels(target: str) -> Iterator[KernelSpec]:
        return (case for case in specs(target) if isinstance(case, KernelSpec))

    found: list[tuple[str, Compiled]] = []
    for report in compile_by_target(kernels, targets, processes=processes, keep_code=True):
        spilled = report.stack + 4 * (report.vgpr_spills + report.sgpr_spills)
        compiled = Compiled(report.code, report.registers, spilled, report.error)
        found.append((f"{report.target}/{report.spec}", compiled))
    for target, cases in sources.items():
        found += [(f"{target}/{case.name}", Compiled({"source": case.make()}, None, None)) for case in cases]
    return {_numbered(name, i, found): compiled for i, (name, compiled) in enumerate(found)}


def _numbered(name: str, i: int, found: Sequence[tuple[str, Compiled]]) -> str:
    """The launches of one call may share a name: the second is "name (2)"."""
    before = sum(other == name for other, _ in found[:i])
    return f"{name} ({before + 1})" if before else name


def _cases(package: Path) -> Any:
    file = package / CASES
    spec = importlib.util.spec_from_file_location(f"codegen_cases_of_{package.name.replace('-', '_')}", file)
    if spec is None or spec.loader is None or not file.exists():
        raise SystemExit(f"{package.name} has no {CASES}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not hasattr(module, "specs"):
        raise SystemExit(f"{package.name}: {CASES} has no function specs(target)")
    return module.specs


def differences(before: Mapping[str, Compiled], after: Mapping[str, Compiled]) -> list[Difference]:
    """One row for each case of either, in the order of the later ones."""
    names = [*after, *[name for name in before if name not in after]]
    return [Difference(name, _verdict(before.get(name), after.get(name)), before.get(name), after.get(name))
            for name in names]  # fmt: skip


def _verdict(before: Compiled | None, after: Compiled | None) -> str:
    if before is None:
        return "new"
    if after is None:
        return "gone"
    if before.error or after.error:
        return "unchanged" if before.error == after.error else "changed (does not compile)"
    kinds = [kind for kind in _KINDS if kind in before.code or kind in after.code]
    unlike = [kind for kind in kinds if before.code.get(kind) != after.code.get(kind)]
    if not unlike or ("ptx" in kinds and "ptx" not in unlike):
        return "unchanged"
    if unlike == ["ptx"] and "sass" in kinds:
        return "unchanged SASS"
    kind = unlike[-1]
    return f"changed ({_lines_changed(before.code.get(kind, ''), after.code.get(kind, ''))} lines)"


def _lines_changed(before: str, after: str) -> int:
    """Lines that are gone and lines that are new; where lines stand elsewhere alone, 1."""
    old, new = Counter(before.splitlines()), Counter(after.splitlines())
    return max(1, (old - new).total() + (new - old).total())


def table(rows: Iterable[Difference]) -> str:
    """The rows as text, with registers and spilled bytes of a thread before and after."""

    def figures(before: int | None, after: int | None) -> str:
        shown = ["-" if number is None else str(number) for number in (before, after)]
        return shown[0] if shown[0] == shown[1] else " -> ".join(shown)

    def of(row: Difference, name: str) -> str:
        return figures(*[None if one is None else getattr(one, name) for one in (row.before, row.after)])

    heading = ("case", "code", "registers", "spilled bytes")
    return columns([heading, *[(row.case, row.verdict, of(row, "registers"), of(row, "spilled")) for row in rows]])


def patch_of(row: Difference, most: int) -> str:
    """The first lines of what changed in a case, as a diff."""
    if row.before is None or row.after is None:
        return ""
    for kind in reversed(_KINDS):
        old, new = (one.code.get(kind, "").splitlines() for one in (row.before, row.after))
        if old != new:
            return "\n".join(
                [f"{row.case}, {kind}", *[*difflib.unified_diff(old, new, lineterm="", n=1)][2 : most + 2]]
            )
    return ""


# Revisions


def _git(root: Path, *words: str) -> bytes:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True)
    if done.returncode:
        raise SystemExit(f"git {words[0]}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "none"


def _trees(root: Path, revision: str, package: str) -> list[str]:
    """What the code of a package depends on, by the names of git's trees; a folder that is not there is left out."""
    listed = _git(root, "ls-tree", revision, "shared/", f"packages/{package}/").decode()
    return [line.split()[2] for line in listed.splitlines() if line.endswith(("/src", "/tests"))]


def _sources(root: Path) -> list[str]:
    return [
        str(path) for path in (root / "shared" / "src", *sorted((root / "packages").glob("*/src"))) if path.exists()
    ]


def _dumped(root: Path, package: str, targets: Sequence[str], processes: int, only: str) -> dict[str, Compiled]:
    """The cases of a package of the checkout in this folder, compiled by its own kernel_reference if it has one."""
    with tempfile.TemporaryDirectory(prefix="kernel_reference_dump_") as folder:
        file = Path(folder) / "dump.json"
        words = [
            "--dump",
            str(file),
            f"--processes={processes}",
            f"--only={only}",
            *[f"--target={target}" for target in targets],
        ]
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        # Where lines of source have other numbers ptxas allocates registers otherwise.
        environment["TRITON_DISABLE_LINE_INFO"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join([*_sources(root), *[path for path in sys.path if path]])
        command = [sys.executable, "-m", "kernel_reference.testing.codegen", *words, str(root / "packages" / package)]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        if done.returncode or not file.exists():
            raise SystemExit(f"{package} at {root}: {(done.stderr or done.stdout).strip()[-3000:]}")
        return _read(file)


def _at(
    root: Path, revision: str, package: str, targets: Sequence[str], cache: Path, processes: int, only: str
) -> Any:  # fmt: skip
    """The cases of a package at a revision: from the cache, or compiled in an archive of it, where an older tool
    compiles all of them.
    """
    key = [
        "no lines",
        _trees(root, revision, package),
        [_version(name) for name in _COMPILERS],
        list(targets),
        sys.version,
        only,
    ]
    file = cache / f"{package}-{sha256(json.dumps(key).encode()).hexdigest()[:24]}.json"
    if not file.exists():
        with tempfile.TemporaryDirectory(prefix="kernel_reference_revision_") as folder:
            wanted = _git(root, "ls-tree", "--name-only", revision, "shared", "packages").decode().split()
            archive = _git(root, "archive", "--format=tar", revision, *wanted)
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                # Python 3.11.0 to 3.11.3 have no such filter; what is unpacked is git's own archive.
                files.extraction_filter = getattr(tarfile, "data_filter", None)
                files.extractall(folder)
            if not (Path(folder) / "packages" / package).exists():
                return {}
            found = _dumped(Path(folder), package, targets, processes, only)
        cache.mkdir(parents=True, exist_ok=True)
        _write(file, found)
    return _read(file)


def _write(file: Path, found: Mapping[str, Compiled]) -> None:
    whole = file.with_name(f"{file.name}.{os.getpid()}")
    whole.write_text(json.dumps({name: compiled._asdict() for name, compiled in found.items()}))
    whole.replace(file)


def _read(file: Path) -> dict[str, Compiled]:
    return {name: Compiled(**fields) for name, fields in json.loads(file.read_text()).items()}


def main(words: Sequence[str] | None = None) -> int:
    """The command. Returns 1 if code that there was is no longer the same."""
    parser = argparse.ArgumentParser(
        prog="python -m kernel_reference.testing.codegen",
        description="Compile the codegen cases of packages at a revision and in the working tree, and compare.",
    )
    parser.add_argument("package", nargs="*", help="names of folders in packages/; all that have cases if left out")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--compare", metavar="REV", help="the revision to compare the working tree with")
    action.add_argument("--dump", metavar="FILE", help="compile the cases of one package folder, and write JSON")
    parser.add_argument("--target", action="append", help=f"of {', '.join(TARGETS)}; all if left out")
    parser.add_argument("--only", default="", help="compile the cases whose name contains this text")
    parser.add_argument("--diff", type=int, default=0, metavar="N", help="show N lines of what changed in each case")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--cache", type=Path, default=Path(tempfile.gettempdir()) / f"kernel_reference_codegen_{os.getuid()}"
    )
    chosen = parser.parse_args(words)
    targets = chosen.target or list(TARGETS)
    for target in targets:
        target_named(target)
    if chosen.dump:
        if len(chosen.package) != 1:
            parser.error("--dump wants one package folder")
        _write(Path(chosen.dump), dump(Path(chosen.package[0]), targets, chosen.processes, chosen.only))
        return 0
    root = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel").decode().strip())
    packages = chosen.package or [file.parents[1].name for file in sorted(root.glob(f"packages/*/{CASES}"))]
    rows: list[Difference] = []
    for package in packages:
        before = _at(root, chosen.compare, package, targets, chosen.cache, chosen.processes, chosen.only)
        after = _dumped(root, package, targets, chosen.processes, chosen.only)
        rows += [row._replace(case=f"{package}/{row.case}") for row in differences(before, after)]
    rows = [row for row in rows if chosen.only in row.case]
    print(table(rows))
    changed = [row for row in rows if row.matters]
    for row in changed[:20] if chosen.diff else []:
        print("\n" + patch_of(row, chosen.diff))
    print(f"\n{len(rows)} cases: {len(rows) - len(changed)} not changed or new, {len(changed)} changed or gone")
    return 1 if changed else 0
