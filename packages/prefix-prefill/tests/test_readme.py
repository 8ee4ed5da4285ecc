"""Does the README say what is so?"""

import re
from pathlib import Path

import prefix_prefill
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
    assert len(BLOCKS) == 3 + 1


def test_every_public_name_is_in_the_readme() -> None:
    for name in prefix_prefill.__all__:
        assert re.search(rf"\b{name}\b", README) or name in ("AttentionResult", "PrefillPlan"), name
