"""Does the README say what is so?"""

import contextlib
import io
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import blocksparse_attn
from kernel_reference.testing.distributed import run
from kernel_reference.testing.readme import python_blocks, run_block

PACKAGE = Path(__file__).parents[1]
README = (PACKAGE / "README.md").read_text()
BLOCKS = python_blocks(PACKAGE / "README.md")


def test_the_first_example_is_the_quickstart_and_decodes_what_prefill_gives() -> None:
    quickstart = (PACKAGE / "examples" / "quickstart.py").read_text()
    assert quickstart.endswith(BLOCKS[0])
    printed = run_block(BLOCKS[0])
    assert "lists 14% of the blocks" in printed
    assert "32, 128] torch.bfloat16" in printed
    assert "decoded 8 tokens, the same: True" in printed


def test_the_second_reads_the_rows_that_the_picture_shows() -> None:
    printed = run_block(BLOCKS[1])
    local = [*range(47, 63)]
    assert f"head 0 lists {[7, 15, 23, 31, 39, *local]}" in printed
    assert f"head 1 lists {[6, 14, 22, 30, 38, 46, *local]}" in printed


def test_layouts_unite_and_a_padded_batch_leaves_its_padding_zero() -> None:
    printed = run_block(BLOCKS[2])
    assert "row 60 lists [0, 57, 58, 59, 60]" in printed
    assert "[2, 512, 4, 64] [2, 4, 512] padding is zero: True" in printed


def test_a_serving_step_zeroes_padding_and_keeps_sequences_independent() -> None:
    printed = run_block(BLOCKS[3])
    assert "[131, 8, 128] [8, 131] padding is zero: True" in printed
    assert "each sequence by itself: True" in printed


def test_the_module_and_its_lists_give_the_same() -> None:
    assert "[3, 32, 128] the same by the lists: True" in run_block(BLOCKS[4])


def test_blocks_are_chosen_for_every_token_and_attended_to() -> None:
    printed = run_block(BLOCKS[5])
    assert "[2, 8, 128] the shorter one lists [0, 1, 2, -1]" in printed


def test_scores_of_blocks_make_a_layout() -> None:
    printed = run_block(BLOCKS[6])
    found = [int(word) for word in re.findall(r"\d+", printed.split(":")[1])]
    assert len(found) == 6
    assert {0, 14, 15} < set(found)
    # The one inside transformers is run with its tests.
    assert len(BLOCKS) == 7 + 3


def test_the_five_lines_for_two_gpus_are_those_of_an_example_that_agrees_with_one_process() -> None:
    example = PACKAGE / "examples" / "two_ranks.py"
    blocks = [block for block in BLOCKS if "group=group" in block]
    assert len(blocks) == 2
    lines = {line.strip() for line in example.read_text().splitlines()}
    for block in blocks:
        assert {line for line in block.splitlines() if line and "import" not in line} <= lines
    printed = run(2, lambda rank: printed_by(runpy.run_path(str(example))["main"]))
    assert [line.count("the same as one process: True") for line in printed] == [3, 3]


def printed_by(function: Callable[[], None]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        function()
    return printed.getvalue()


def test_every_public_name_is_in_the_readme() -> None:
    for name in blocksparse_attn.__all__:
        assert re.search(rf"\b{name}\b", README) or name in ("AttentionResult", "AttentionPlan"), name
