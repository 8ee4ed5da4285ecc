"""Lay the documentation's pages together, build the site and check its links; `nox -s docs` calls it.

The pages are those of ``tools/docs/pages``, of every package its README and ``docs/reference.md``, and the measured
report. A link of a README to a picture brings the picture, one to another package goes to its page, and one to any
other file of the repository to the web.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent / "docs"
REPOSITORY = "https://github.com/seqmix/seqmix"
# Columns that ruff does not break a signature within; a name or a default may be longer than mkdocs.yml's line_length.
SIGNATURE_AT_MOST = 110
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")


def homes() -> dict[str, Path]:
    """Distributions and their folders."""
    files = [*sorted(ROOT.glob("packages/*/pyproject.toml")), ROOT / "shared" / "pyproject.toml"]
    return {tomllib.loads(file.read_text())["project"]["name"]: file.parent for file in files}


def pinned_torch() -> str:
    runtime = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["runtime"]
    return next(str(pin).removeprefix("torch==") for pin in runtime if str(pin).startswith("torch=="))


def lay_together(source: Path) -> None:
    """Write into ``source`` what mkdocs reads."""
    shutil.copytree(HERE / "pages", source)
    index = source / "index.md"
    index.write_text(index.read_text().replace("torch==TORCH", f"torch=={pinned_torch()}"))
    for folder in ("packages", "reference"):
        (source / folder).mkdir(exist_ok=True)
    for name, home in homes().items():
        shutil.copyfile(home / "docs" / "reference.md", source / "reference" / f"{name}.md")
        (source / "packages" / f"{name}.md").write_text(readme(home, source, name))
    # The page alone is shown; the picture is the root README's.
    report: list[str | Path] = [sys.executable, ROOT / "tools" / "report.py", "--page", source / "report.html"]
    subprocess.run([*report, "--picture", source.with_name("report.svg")], check=True)


def readme(home: Path, source: Path, name: str) -> str:
    """A package's README, with links that hold on the site."""
    pages = {folder: f"{other}.md" for other, folder in homes().items()}

    def moved(found: re.Match[str]) -> str:
        words, link = found[1], found[2]
        path, _, anchor = link.partition("#")
        if not path or urlsplit(link).scheme:
            return found[0]
        target = (home / path).resolve()
        there = f"#{anchor}" if anchor else ""
        if target in pages:
            return f"{words}({pages[target]}{there})"
        if target.suffix == ".svg" and target.is_file():
            picture = source / "packages" / name / target.name
            picture.parent.mkdir(exist_ok=True)
            shutil.copyfile(target, picture)
            return f"{words}({name}/{target.name})"
        if not target.exists():
            raise SystemExit(f"docs: {home.relative_to(ROOT)}/README.md links to {path}, which is not there")
        kind = "tree" if target.is_dir() else "blob"
        return f"{words}({REPOSITORY}/{kind}/main/{target.relative_to(ROOT)}{there})"

    text = (home / "README.md").read_text()
    blocks = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(block if block.startswith("```") else LINK.sub(moved, block) for block in blocks)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.links.append(value)
            elif value and name in ("id", "name"):
                self.anchors.add(value)


def broken_links(site: Path) -> Iterator[str]:
    """Links of the built pages to pages, files and anchors that are not there; other hosts are not asked."""
    pages: dict[Path, _Page] = {}
    for file in sorted(site.rglob("*.html")):
        pages[file] = _Page()
        pages[file].feed(file.read_text(encoding="utf-8"))
    for file, page in pages.items():
        # mkdocs' page for wrong addresses has links from the root of the server.
        for link in page.links if file.name != "404.html" else ():
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                yield f"{file.relative_to(site)}: {link} is not there"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{file.relative_to(site)}: {link} has no such anchor"


def ill_shown(site: Path) -> Iterator[str]:
    """Pages whose signatures need a sideways scroll, or that show as text what docstrings mean as code or a table."""
    for file in sorted(site.rglob("*.html")):
        text = file.read_text(encoding="utf-8")
        signatures = re.findall(r'<div class="[^"]*doc-signature[^"]*">.*?</div>', text, flags=re.DOTALL)
        lines = [line for found in signatures for line in unescape(re.sub("<[^>]*>", "", found)).splitlines()]
        longest = max(map(len, lines), default=0)
        if longest > SIGNATURE_AT_MOST:
            yield f"{file.relative_to(site)}: a line of a signature has {longest} characters: is ruff installed?"
        if re.search(r"<blockquote>\s*<blockquote>", text):
            yield f"{file.relative_to(site)}: a quote in a quote, as of lines of an interpreter"
        if re.search(r"<p>[^<]*===[= ]*==", text):
            yield f"{file.relative_to(site)}: the rulers of a table, in a paragraph"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="docs", description="Build the documentation and check its links.")
    parser.add_argument("--site", type=Path, default=ROOT / "dist" / "docs", help="where to (default dist/docs)")
    site = parser.parse_args(arguments).site.resolve()
    source = site.with_name(f"{site.name}-source")
    for folder in (site, source):
        shutil.rmtree(folder, ignore_errors=True)
    lay_together(source)
    # Read from the sources: what is documented is not imported.
    paths = [str(home / "src") for home in homes().values()]
    text = (HERE / "mkdocs.yml").read_text()
    text = text.replace("        python:\n", f"        python:\n          paths: {paths}\n")
    text = text.replace("[ROLES]", f"[{HERE / 'roles.py'}]")
    for section in ("Packages", "Reference"):
        pages = [f"{section.lower()}/{name}.md" for name in homes()]
        text = text.replace(f"{section}: []", f"{section}: {pages}")
    config = source.with_name(f"{site.name}.yml")
    config.write_text(f"docs_dir: {source}\nsite_dir: {site}\n{text}")
    mkdocs: list[str | Path] = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", config]
    built = subprocess.run(mkdocs, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=False)
    if built.returncode:
        return 1
    broken = [*broken_links(site), *ill_shown(site)]
    for line in broken:
        print(f"docs: {line}", file=sys.stderr)
    if not broken:
        shutil.rmtree(source)
        config.unlink()
        print(f"wrote {site}/index.html")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
