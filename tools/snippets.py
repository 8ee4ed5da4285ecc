"""Write the Python blocks of READMEs, guides and references as modules, which `nox -s types` checks as users' code.

    python tools/snippets.py FOLDER

An excerpt, all lines of which but its imports stand in one of the package's examples, is checked as the whole example.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from docs import HERE, ROOT, homes

BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    """All pages that show code to users."""
    own = [page for home in homes().values() for page in (home / "README.md", home / "docs" / "reference.md")]
    return [ROOT / "README.md", *own, *sorted(HERE.glob("pages/**/*.md"))]


def snippets(page: Path) -> Iterator[tuple[str, str]]:
    """Name and text of a page's modules, the lines of each at the page's numbers, so that an error names the line."""
    examples = {file: lines_of(file.read_text()) for file in sorted(page.parent.glob("examples/*.py"))}
    text = page.read_text()
    for number, found in enumerate(BLOCK.finditer(text)):
        whole = [file for file, lines in examples.items() if lines_of(found[1]) <= lines]
        if whole:
            yield name_of(whole[0]), whole[0].read_text()
        else:
            yield f"{name_of(page)}_{number}", "\n" * text.count("\n", 0, found.start(1)) + found[1]


def lines_of(code: str) -> set[str]:
    """A block's lines, without indentation; an example may import more in one line."""
    return {line.strip() for line in code.splitlines() if line and not line.startswith(("from ", "import "))}


def name_of(file: Path) -> str:
    """A module's name for a file of the repository, as mypy takes all modules together."""
    return re.sub(r"\W", "_", str(file.relative_to(ROOT).with_suffix("")))


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for page in pages():
        for name, text in snippets(page):
            (folder / f"{name}.py").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
