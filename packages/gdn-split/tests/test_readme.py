"""Does the README say what is so?"""

from pathlib import Path

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
    # The one inside transformers is run with its tests.
    assert len(BLOCKS) == 2 + 1
