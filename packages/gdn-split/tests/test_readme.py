"""Does the README say what is so?"""

from pathlib import Path

from kernel_reference.testing.distributed import run
from kernel_reference.testing.readme import python_blocks, run_block

PACKAGE = Path(__file__).parents[1]
BLOCKS = python_blocks(PACKAGE / "README.md")


def test_the_first_example_is_the_quickstart_and_runs() -> None:
    quickstart = (PACKAGE / "examples" / "quickstart.py").read_text()
    assert quickstart.endswith(BLOCKS[0])
    printed = run_block(BLOCKS[0])
    assert "'mixed_qkv': [4096, 8192]" in printed
    assert "where its group starts: True" in printed
    assert "changed slots [0, 3, 5, 7]" in printed


def test_permuted_weights_make_the_split_free_as_the_second_example_says() -> None:
    assert run_block(BLOCKS[1]) == "True\n"


def test_two_ranks_share_tokens_or_heads_as_the_third_example_says() -> None:
    first, second = run(2, lambda rank: run_block(BLOCKS[2]))
    assert "[1, 8192, 3] zeros: True" in first
    assert "[1, 8192, 3] zeros: False" in second
    assert "(8, 16, 128, 128) rows of the weight: 6144" in first
    # The one inside transformers is run with its tests.
    assert len(BLOCKS) == 3 + 1
