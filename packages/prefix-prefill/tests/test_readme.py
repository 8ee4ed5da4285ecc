"""Does the README say what is so?"""

import contextlib
import io
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import prefix_prefill
from kernel_reference.testing.distributed import run
from kernel_reference.testing.readme import python_blocks, run_block

PACKAGE = Path(__file__).parents[1]
README = (PACKAGE / "README.md").read_text()
BLOCKS = python_blocks(PACKAGE / "README.md")


def test_the_first_example_is_the_quickstart_and_gives_the_same_in_pieces() -> None:
    quickstart = (PACKAGE / "examples" / "quickstart.py").read_text()
    assert quickstart.endswith(BLOCKS[0])
    printed = run_block(BLOCKS[0])
    assert "[2048, 8, 128] torch.bfloat16" in printed
    assert "the same in pieces: True" in printed


def test_a_step_of_a_server_leaves_padding_zero_and_does_not_read_what_the_window_has_passed() -> None:
    printed = run_block(BLOCKS[1])
    assert "[304, 8, 64] [8, 304] padding is zero: True" in printed
    assert "without the pages before the window, no bit changed: True" in printed


def test_a_common_prompt_merged_with_what_each_has_of_its_own_is_the_whole() -> None:
    printed = run_block(BLOCKS[2])
    assert "the same out: True" in printed
    assert "the same lse: True" in printed
    # The one inside transformers is run with its tests.
    assert len(BLOCKS) == 3 + 2


def test_the_five_lines_for_two_gpus_are_those_of_an_example_that_agrees_with_one_process() -> None:
    example = PACKAGE / "examples" / "parallel.py"
    [block] = [block for block in BLOCKS if "group=group" in block]
    lines = {line.strip() for line in example.read_text().splitlines()}
    assert set(filter(None, block.splitlines())) <= lines
    printed = run(2, lambda rank: printed_by(runpy.run_path(str(example))["main"]))
    assert [line.count("the same as one process: True") for line in printed] == [2, 2]


def printed_by(function: Callable[[], None]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        function()
    return printed.getvalue()


def test_every_public_name_is_in_the_readme() -> None:
    for name in prefix_prefill.__all__:
        assert re.search(rf"\b{name}\b", README) or name in ("AttentionResult", "PrefillPlan"), name
