from __future__ import annotations

import functools
import io
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import release as tool
from environments import link_bytecode
from packaging.version import Version
from twine.utils import DEFAULT_REPOSITORY

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
URL = "https://example.org/seqmix"

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"  # a comment that a bump leaves alone
requires-python = ">=3.11"
readme = "README.md"
dependencies = {dependencies}

[project.urls]
Repository = "https://example.org/seqmix"

[tool.hatch.build.targets.sdist]
include = ["/src", "/CHANGELOG.md"]
"""
PACKAGE = {
    "README.md": "# a package\n",
    "CHANGELOG.md": "# Changelog\n\nOf this package.\n\n<!-- towncrier release notes start -->\n",
    "changelog.d/.gitkeep": "",
    "changelog.d/+first.added.md": "What it does.\n",
}
HOUSE = {
    ".gitignore": "dist/\n__pycache__/\n",
    "shared/pyproject.toml": PROJECT.format(name="kernel-reference", dependencies=[]),
    "shared/src/kernel_reference/__init__.py": "",
    **{f"shared/{name}": text for name, text in PACKAGE.items()},
    "packages/tiny/pyproject.toml": PROJECT.format(name="tiny", dependencies=["Kernel_Reference>=0.1,<0.2"]),
    "packages/tiny/src/tiny/__init__.py": "",
    "packages/tiny/src/tiny/value.py": "VALUE = 1\n",
    **{f"packages/tiny/{name}": text for name, text in PACKAGE.items()},
}
FRAGMENT = "packages/tiny/changelog.d/+second.fixed.md"

# Nobody's git configuration, and git waits for no disk. twine wants a name and a password of any index.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "NOX", "PYTEST"))} | {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "core.fsync",
    "GIT_CONFIG_VALUE_0": "none",
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "TWINE_USERNAME": "a",
    "TWINE_PASSWORD": "a",
}
Answer = subprocess.CompletedProcess[str]


def run(where: Path, *command: str | Path, **variables: str | None) -> Answer:
    return subprocess.run(command, cwd=where, env=given(variables), capture_output=True, text=True, check=False)


def given(variables: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in (ENVIRONMENT | variables).items() if value is not None}


def git(house: Path, *arguments: str) -> str:
    answer = run(house, "git", *arguments)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def release(house: Path, *arguments: str, dies_after: str = "", victim: int = 0, **variables: str | None) -> Answer:
    """Release in a process of its own, forked so that it need not import anything again.

    ``dies_after`` is the step after which it, or the process ``victim`` in its place, is killed at once.
    """
    out, err = house.with_name("out"), house.with_name("err")
    what = (house, arguments, variables, out, err, dies_after, victim)
    child = multiprocessing.get_context("fork").Process(target=release_here, args=what)
    child.start()
    child.join()
    assert child.exitcode is not None
    return subprocess.CompletedProcess(arguments, child.exitcode, out.read_text(), err.read_text())


def release_here(
    house: Path,
    arguments: tuple[str, ...],
    variables: dict[str, str | None],
    out: Path,
    err: Path,
    step: str,
    victim: int,
) -> None:
    os.chdir(house)
    os.environ.clear()
    os.environ.update(given(variables))
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    if step:
        *path, name = step.split(".")
        die_after(functools.reduce(getattr, path, tool), name, victim or os.getpid())
    sys.exit(tool.main(arguments))


def die_after(holder: object, name: str, victim: int) -> None:
    whole = getattr(holder, name)

    def then_die(*values: object) -> object:
        result = whole(*values)
        os.kill(victim, signal.SIGKILL)
        return result

    setattr(holder, name, then_die)


def released(house: Path, *arguments: str, **variables: str | None) -> str:
    answer = release(house, *arguments, **variables)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def refused(house: Path, *arguments: str, **variables: str | None) -> str:
    """The one line that says why, after which the repository is as it was."""
    before = contents(house)
    answer = release(house, *arguments, **variables)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert len(answer.stderr.splitlines()) == 1, answer.stderr
    assert contents(house) == before
    return answer.stderr


def contents(house: Path) -> dict[str, bytes]:
    """Every file there, those of git included."""
    return {str(file.relative_to(house)): file.read_bytes() for file in house.rglob("*") if file.is_file()}


def write(house: Path, name: str, text: str) -> None:
    (house / name).parent.mkdir(parents=True, exist_ok=True)
    (house / name).write_text(text)


def commit(house: Path) -> None:
    git(house, "add", "--all")
    git(house, "commit", "--quiet", "--message", "a change")


def make_repository(house: Path) -> None:
    git(house, "init", "--quiet", "--initial-branch=main")
    commit(house)


@dataclass
class Server:
    """A pypiserver of one's own."""

    folder: Path
    port: int
    options: tuple[str, ...] = ("-a", ".", "-P", ".")
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    @property
    def simple(self) -> str:
        return f"{self.url}simple/"

    def start(self) -> None:
        where = ["-i", "127.0.0.1", "-p", str(self.port), "--disable-fallback", *self.options, str(self.folder)]
        command = [sys.executable, "-m", "pypiserver", "run", *where]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(300):
            try:
                urlopen(self.url, timeout=10).close()
                return
            except URLError:
                time.sleep(0.1)
        raise TimeoutError(f"no pypiserver answers at {self.url}")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def holds(self) -> list[str]:
        return sorted(file.name for file in self.folder.iterdir())


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


Serve = Callable[..., Server]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    servers: list[Server] = []

    def start(*options: str) -> Server:
        port = free_port()
        folder = tmp_path / f"index-{port}"
        folder.mkdir()
        servers.append(Server(folder, port, *([options] if options else [])))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def index(serve: Serve) -> Server:
    """An index that holds nothing but kernel-reference 0.1.4, as ours."""
    server = serve()
    put_wheel(server, "kernel_reference", "0.1.4", URL)
    return server


def put_wheel(index: Server, name: str, version: str, url: str) -> None:
    metadata = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nProject-URL: Source, {url}\n"
    with zipfile.ZipFile(index.folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}-{version}.dist-info/METADATA", metadata)
        wheel.writestr(f"{name}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-{version}.dist-info/RECORD", "")


def put_sdist(index: Server, name: str, version: str, url: str) -> None:
    metadata = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nHome-page: {url}\n".encode()
    with tarfile.open(index.folder / f"{name}-{version}.tar.gz", "w:gz") as sdist:
        for file, text in [("PKG-INFO", metadata), ("setup.py", b"")]:
            member = tarfile.TarInfo(f"{name}-{version}/{file}")
            member.size = len(text)
            sdist.addfile(member, io.BytesIO(text))


@pytest.fixture(scope="module")
def made_house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    house = tmp_path_factory.mktemp("made") / "house"
    for name, text in HOUSE.items():
        write(house, name, text)
    shutil.copy(ROOT / "pyproject.toml", house)
    make_repository(house)
    return house


@pytest.fixture
def house(made_house: Path, tmp_path: Path) -> Path:
    """A repository of the shared package and of one that needs it, each with something new."""
    shutil.copytree(made_house, tmp_path / "house")
    return tmp_path / "house"


@pytest.fixture(scope="module")
def made_stopped_house(made_house: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    house = tmp_path_factory.mktemp("stopped") / "house"
    shutil.copytree(made_house, house)
    server = Server(house.with_name("index"), free_port())
    server.folder.mkdir()
    put_wheel(server, "kernel_reference", "0.1.4", URL)
    server.start()
    killed = release(house, "tiny", "minor", "--index", server.url, dies_after="House.advance")
    server.stop()
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    return house


@pytest.fixture
def stopped_house(made_stopped_house: Path, tmp_path: Path) -> Path:
    """The same repository, in which a release of tiny 0.2.0 was stopped before anything was sent."""
    shutil.copytree(made_stopped_house, tmp_path / "house")
    return tmp_path / "house"


TINY = ["tiny-0.2.0-py3-none-any.whl", "tiny-0.2.0.tar.gz"]
OTHERS = ["kernel_reference-0.1.4-py3-none-any.whl"]


def assert_released_once(house: Path, index: Server) -> None:
    assert git(house, "tag") == "tiny-v0.2.0"
    assert git(house, "log", "--format=%s") == "tiny 0.2.0\na change"
    assert git(house, "rev-parse", "tiny-v0.2.0^{commit}") == git(house, "rev-parse", "main")
    assert git(house, "status", "--porcelain") == ""
    assert index.holds() == OTHERS + TINY


def test_a_release_is_one_commit_one_tag_and_two_files_of_it(house: Path, index: Server) -> None:
    write(house, "packages/tiny/src/tiny/dist/left.py", "it lies about, ignored\n")
    released(house, "tiny", "minor", "--index", index.url)

    assert_released_once(house, index)
    changed = set(git(house, "diff", "--name-status", "HEAD~1").splitlines())
    home = "packages/tiny"
    assert changed == {f"M\t{home}/CHANGELOG.md", f"M\t{home}/pyproject.toml", f"D\t{home}/changelog.d/+first.added.md"}
    assert 'version = "0.2.0"  # a comment that a bump leaves alone' in (house / home / "pyproject.toml").read_text()
    assert "\n## 0.2.0 (2" in (house / home / "CHANGELOG.md").read_text()
    assert (house / "dist/tiny-v0.2.0.md").read_text() == "### Added\n\n- What it does.\n"
    assert sorted(file.name for file in (house / "dist/tiny").iterdir()) == TINY
    with zipfile.ZipFile(index.folder / TINY[0]) as wheel:
        assert [name for name in wheel.namelist() if name.endswith(".py")] == ["tiny/__init__.py", "tiny/value.py"]


def test_the_shared_package_is_tagged_by_the_name_that_people_install(house: Path, serve: Serve) -> None:
    index = serve()
    released(house, "shared", "0.1.0", "--index", index.url)
    assert git(house, "tag") == "kernel-reference-v0.1.0"
    assert index.holds() == ["kernel_reference-0.1.0-py3-none-any.whl", "kernel_reference-0.1.0.tar.gz"]


def test_a_dry_run_builds_checks_and_changes_nothing(house: Path, index: Server) -> None:
    before = contents(house)
    said = released(house, "tiny", "minor", "--index", index.url, "--dry-run")
    assert f"would commit and tag tiny-v0.2.0, send {TINY[0]} and {TINY[1]} to {index.url}" in said
    assert "- What it does." in said
    assert contents(house) == before
    assert index.holds() == OTHERS


@pytest.mark.parametrize("step", ["build", "House.tag", "House.advance", "Index.send"])
def test_a_release_killed_after_any_step_is_finished_by_the_same_command(house: Path, index: Server, step: str) -> None:
    before = contents(house)
    command = ["tiny", "minor", "--index", index.url]
    assert release(house, *command, dies_after=step).returncode == -signal.SIGKILL
    assert index.holds() == OTHERS + (TINY[:1] if step == "Index.send" else [])
    if step == "build":
        assert contents(house) == before
    else:
        assert git(house, "tag") == "tiny-v0.2.0"

    said = released(house, *command)
    assert ("taken up from its tag" in said) == (step != "build")
    assert_released_once(house, index)


def test_an_index_that_breaks_off_leaves_a_release_that_the_same_command_finishes(house: Path, index: Server) -> None:
    assert index.process is not None
    command = ["tiny", "minor", "--index", index.url]
    broken = release(house, *command, dies_after="Index.send", victim=index.process.pid)
    assert broken.returncode == 1
    assert len(broken.stderr.splitlines()) == 1
    assert "tiny-v0.2.0 is set, and the same command goes on from it" in broken.stderr
    assert index.holds() == OTHERS + TINY[:1]

    index.stop()
    index.start()
    released(house, *command)
    assert_released_once(house, index)


def test_an_unfinished_release_comes_before_any_other(stopped_house: Path, index: Server) -> None:
    for other in ["patch", "0.3.0"]:
        assert "tiny 0.2.0 is tagged, but not on" in refused(stopped_house, "tiny", other, "--index", index.url)

    released(stopped_house, "tiny", "0.2.0", "--index", index.url)
    assert_released_once(stopped_house, index)


def test_a_version_that_an_index_has_is_never_sent_again(house: Path, index: Server) -> None:
    released(house, "tiny", "minor", "--index", index.url)
    assert f"tiny 0.2.0 is already on {index.url}" in refused(house, "tiny", "0.2.0", "--index", index.url)
    assert "nothing is new in tiny" in refused(house, "tiny", "minor", "--index", index.url)

    git(house, "reset", "--quiet", "--hard", "HEAD~1")
    git(house, "tag", "--delete", "tiny-v0.2.0")
    assert "not tagged here: git fetch --tags" in refused(house, "tiny", "minor", "--index", index.url)

    again = ["twine", "upload", "--repository-url", index.url, *map(str, (house / "dist/tiny").iterdir())]
    assert "409" in (sent := run(house, sys.executable, "-m", *again).stdout) or "400" in sent


def test_a_file_on_the_index_that_the_tag_does_not_make_stops_it(stopped_house: Path, index: Server) -> None:
    put_wheel(index, "tiny", "0.2.0", URL)
    assert f"holds another {TINY[0]} than the tag makes" in refused(
        stopped_house, "tiny", "minor", "--index", index.url
    )


def test_a_name_that_is_another_projects_is_left_to_it(house: Path, index: Server) -> None:
    command = ["tiny", "minor", "--index", index.url]
    put_wheel(index, "tiny", "0.0.4", "https://example.org/seqmix-of-others")
    assert f"tiny on {index.url} is another project" in refused(house, *command)
    put_sdist(index, "tiny", "0.0.5", "https://example.org/others")
    assert f"tiny on {index.url} is another project" in refused(house, *command)

    put_sdist(index, "tiny", "0.0.6", f"{URL}.git/")
    released(house, *command)
    assert set(index.holds()) > set(TINY)


def test_a_package_without_a_project_url_is_not_released(house: Path, index: Server) -> None:
    file = house / "packages/tiny/pyproject.toml"
    file.write_text(file.read_text().replace("Repository", "Homepage"))
    commit(house)
    assert "has no project URL `Repository`" in refused(house, "tiny", "minor", "--index", index.url)


def test_a_package_waits_for_a_reference_in_its_range(house: Path, serve: Serve) -> None:
    index = serve()
    missing = refused(house, "tiny", "minor", "--index", index.url)
    assert f"needs Kernel_Reference<0.2,>=0.1, and {index.url} has none: release Kernel_Reference first" in missing

    put_wheel(index, "kernel_reference", "0.2.0", URL)
    assert "has 0.2.0 at most" in refused(house, "tiny", "minor", "--index", index.url)


def test_without_an_index_the_release_ends_with_a_tag_that_the_workflow_takes_up(house: Path, index: Server) -> None:
    public = {"PIP_INDEX_URL": index.simple}
    for _ in range(2):
        said = released(house, "tiny", "minor", **public)
        assert "git push --atomic origin HEAD tiny-v0.2.0" in said
        assert index.holds() == OTHERS
    made = {file.name: file.read_bytes() for file in (house / "dist/tiny").iterdir()}

    runner = house.with_name("runner")
    git(house, "clone", "--quiet", "--branch", "tiny-v0.2.0", str(house), str(runner))
    nobody = {f"GIT_{who}_{what}": "" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    released(runner, "tiny", "0.2.0", **public, **nobody)
    assert {file.name: file.read_bytes() for file in (runner / "dist/tiny").iterdir()} == made
    assert (runner / "dist/tiny-v0.2.0.md").is_file()

    put_sdist(index, "tiny", "0.0.5", "https://example.org/others")
    assert "another project" in refused(runner, "tiny", "0.2.0", **public)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["huge", "minor"], "there is no package huge, but tiny, shared"),
        (["tiny", "0.0.9"], "0.0.9 goes back behind tiny 0.1.0"),
        (["tiny", "later"], "'later' is neither major, minor or patch nor a version"),
        (["tiny", "minor", "--index", "http://127.0.0.1:9/"], "http://127.0.0.1:9/ cannot be reached"),
        (["tiny", "minor", "--index", "http://a:secret@127.0.0.1:9/"], ": http://127.0.0.1:9/ cannot be reached"),
        (["tiny", "minor", "--index", DEFAULT_REPOSITORY], "only the workflow publishes to the public index"),
        (["tiny", "minor", "--index", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_asked_is_told_in_one_line(house: Path, index: Server, arguments: list[str], why: str) -> None:
    if "--index" not in arguments:
        arguments = [*arguments, "--index", index.url]
    assert why in refused(house, *arguments)
    assert index.holds() == OTHERS


@pytest.mark.parametrize("name", ["packages/tiny/src/tiny/__init__.py", "packages/tiny/src/tiny/new.py", FRAGMENT])
def test_a_tree_that_is_not_clean_is_told_in_one_line(house: Path, index: Server, name: str) -> None:
    write(house, name, "changed = True\n")
    assert f"the tree is not clean ({name})" in refused(house, "tiny", "minor", "--index", index.url)


def test_without_anything_new_there_is_no_release(house: Path, index: Server) -> None:
    (house / "packages/tiny/changelog.d/+first.added.md").unlink()
    commit(house)
    assert "no fragments in packages/tiny/changelog.d" in refused(house, "tiny", "minor", "--index", index.url)


def test_a_fragment_that_the_changelog_would_leave_out_is_told(house: Path, index: Server) -> None:
    write(house, "packages/tiny/changelog.d/7.improved.md", "More.\n")
    commit(house)
    assert "7.improved.md in packages/tiny/changelog.d is none" in refused(house, "tiny", "minor", "--index", index.url)


def test_who_commits_must_be_known_before_anything_is_done(house: Path, index: Server) -> None:
    unknown = {"GIT_COMMITTER_NAME": "", "GIT_AUTHOR_NAME": ""}
    assert "empty ident name" in refused(house, "tiny", "minor", "--index", index.url, **unknown)


def test_an_index_that_refuses_is_noticed_before_the_tag(house: Path, serve: Serve) -> None:
    index = serve("-a", "update")
    put_wheel(index, "kernel_reference", "0.1.4", URL)
    assert f"{index.url} answers 403 Forbidden" in refused(house, "tiny", "minor", "--index", index.url)
    nobody = {"TWINE_USERNAME": None, "PYTHON_KEYRING_BACKEND": "keyring.backends.null.Keyring"}
    assert "twine says: " in refused(house, "tiny", "minor", "--index", index.url, **nobody)


@pytest.mark.parametrize(
    ("name", "old", "new", "why"),
    [
        ("packages/tiny/pyproject.toml", "README.md", "README", "build fails, as it says above"),
        ("packages/tiny/pyproject.toml", 'readme = "README.md"', "", "twine fails, as it says above"),
        ("packages/tiny/src/tiny/__init__.py", "", "VALUE = 1\n", "check_wheel_contents fails, as it says above"),
        ("pyproject.toml", '"## {version} ({project_date})"', '"# {version}"', "and a changelog of none"),
    ],
)
def test_what_does_not_pass_the_checks_is_not_tagged(
    house: Path, index: Server, name: str, old: str, new: str, why: str
) -> None:
    text = (house / name).read_text()
    assert old in text
    write(house, name, text.replace(old, new))
    commit(house)
    before = contents(house)
    answer = release(house, "tiny", "minor", "--index", index.url)
    assert answer.returncode == 1
    assert why in answer.stderr.splitlines()[-1]
    assert contents(house) == before


@pytest.mark.parametrize(
    ("version", "asked", "following"),
    [
        ("0.1.9", "patch", "0.1.10"),
        ("0.1.9", "minor", "0.2.0"),
        ("0.1.9", "major", "1.0.0"),
        ("1.2rc1", "minor", "1.3.0"),
        ("0.1", "v0.2.0-rc.1", "0.2.0rc1"),
    ],
)
def test_a_bump_takes_the_numbers_below_it_to_zero(version: str, asked: str, following: str) -> None:
    assert str(tool.next_version(Version(version), asked)) == following


def test_the_release_notes_are_what_stands_first_in_the_changelog() -> None:
    changelog = (
        "# Changelog\n\nWords.\n\n## 0.2.0 (2026-11-21)\n\n### Added\n\n- A.\n\n\n## 0.1.0 (2026-11-20)\n\n- B\n"
    )
    assert tool.newest_section(changelog) == ("0.2.0", "### Added\n\n- A.\n")
    assert tool.newest_section("# Changelog\n") == ("none", "")


def test_the_house_as_it_is_is_released_installed_and_run(tmp_path: Path, serve: Serve) -> None:
    index, house, fresh = serve(), tmp_path / "house", tmp_path / "fresh"
    ignored = shutil.ignore_patterns(".*_cache", "__pycache__", ".hypothesis")
    for name in ("shared", "packages", "tools"):
        shutil.copytree(ROOT / name, house / name, ignore=ignored)
    for name in (".gitignore", "noxfile.py", "pyproject.toml"):
        shutil.copy(ROOT / name, house)
    make_repository(house)

    # What the packages need of others comes meanwhile, from wherever pip is told to take it; by uv, a second for torch,
    # if the noxfile has told it too.
    venv.create(fresh, with_pip=True)
    python = fresh / "bin" / "python"
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["runtime"]
    wanted = [pin for pin in pins if pin.startswith(("torch==", "einops=="))]
    install = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
    uv = Path(sys.executable).with_name("uv")
    if uv.exists() and "UV_INDEX_STRATEGY" in ENVIRONMENT:
        install = [uv, "pip", "install", "--quiet", "--python", python]
    others = subprocess.Popen([*install, *wanted], env=ENVIRONMENT)

    # The session's own command, in this environment, which has what it would install.
    nox = [sys.executable, "-m", "nox", "--no-venv", "--no-install", "-s", "release(shared)", "--"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    session = run(house, *nox, "0.1.0", "--index", index.url, PATH=path)
    assert session.returncode == 0, session.stdout + session.stderr
    released(house, "gdn-split", "minor", "--index", index.url)
    assert git(house, "tag").split() == ["gdn-split-v0.2.0", "kernel-reference-v0.1.0"]
    assert len(index.holds()) == 4

    assert others.wait() == 0
    ours = ["--isolated", "--index-url", index.simple, "gdn-split==0.2.0"]
    link_bytecode(fresh)
    installed = run(tmp_path, python, "-m", "pip", "install", *ours)
    assert installed.returncode == 0, installed.stderr
    assert "kernel-reference-0.1.0" in installed.stdout
    shown = run(tmp_path, python, "-I", house / "packages" / "gdn-split" / "examples" / "quickstart.py")
    assert "changed slots [0, 3, 5, 7]" in shown.stdout, shown.stderr
