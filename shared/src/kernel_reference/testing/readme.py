"""Run the examples of a README, so that none stands there that does not run."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

__all__ = ["python_blocks", "run_block"]


def python_blocks(readme: Path) -> list[str]:
    """The code blocks of a Markdown file that are marked as Python, in their order."""
    return re.findall(r"```python\n(.*?)```", readme.read_text(), flags=re.DOTALL)


def run_block(block: str) -> str:
    """What a block prints, run in a namespace of its own. Raises what the block raises."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, "README.md", "exec"), {})
    return printed.getvalue()
