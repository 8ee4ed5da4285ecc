"""Does the README say what is so?"""

import contextlib
import io
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), flags=re.DOTALL)


def run(block: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, "README.md", "exec"), {})
    return printed.getvalue()


def test_the_first_example_is_the_quickstart_and_runs() -> None:
    quickstart = (PACKAGE / "examples" / "quickstart.py").read_text()
    assert quickstart.endswith(BLOCKS[0])
    printed = run(BLOCKS[0])
    assert "'mixed_qkv': [4096, 8192]" in printed
    assert "where its group starts: True" in printed
    assert "changed slots [0, 3, 5, 7]" in printed


def test_permuted_weights_make_the_split_free_as_the_second_example_says() -> None:
    assert run(BLOCKS[1]) == "True\n"
    assert len(BLOCKS) == 2
