"""Does the README say what is so?"""

import contextlib
import io
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1]
README = (PACKAGE / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def run(block: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, "README.md", "exec"), {})
    return printed.getvalue()


def test_the_first_example_is_the_quickstart() -> None:
    quickstart = (PACKAGE / "examples" / "quickstart.py").read_text()
    assert quickstart.endswith(BLOCKS[0])


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line {README[: README.index(block)].count(chr(10)) + 1}")
def test_every_example_runs_and_finds_true_what_it_prints(block) -> None:
    printed = run(block)
    assert printed
    assert "False" not in printed
    assert "nan" not in printed
