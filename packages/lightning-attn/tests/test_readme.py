"""Does the README say what is so?"""

import re
from pathlib import Path

import lightning_attn
from kernel_reference.testing.distributed import run
from kernel_reference.testing.readme import python_blocks, run_block

PACKAGE = Path(__file__).parents[1]
README = (PACKAGE / "README.md").read_text()
BLOCKS = python_blocks(PACKAGE / "README.md")


def test_the_first_example_is_the_quickstart_and_decodes_what_prefill_gives() -> None:
    quickstart = (PACKAGE / "examples" / "quickstart.py").read_text()
    assert quickstart.endswith(BLOCKS[0])
    printed = run_block(BLOCKS[0])
    assert "[1, 64, 1000, 128] torch.bfloat16 and a state [1, 64, 128, 128] torch.float32" in printed
    assert "decoded 24 tokens; the same as in one call to 1 %: True" in printed


def test_a_step_of_a_server_leaves_padding_zero_and_a_snapshot_to_go_on_from() -> None:
    printed = run_block(BLOCKS[1])
    assert "[303, 8, 128] padding is zero: True" in printed
    assert "from the snapshot on, the same: True" in printed


def test_drafts_are_verified_and_committed_as_the_third_example_says() -> None:
    printed = run_block(BLOCKS[2])
    assert "[2, 4, 8, 128] states untouched: True" in printed
    assert "the same as three decode steps: True" in printed
    assert "none accepted, no bit changed: True" in printed


def test_two_ranks_share_a_sequence_as_the_fourth_example_says() -> None:
    printed = run(2, lambda rank: run_block(BLOCKS[3]))
    assert "rank 0: [1, 8, 2000, 128], and the state after token 2000" in printed[0]
    assert "rank 1: [1, 8, 2000, 128], and the state after token 4000" in printed[1]
    # The one inside transformers is run with its tests.
    assert len(BLOCKS) == 4 + 1


def test_every_public_function_is_in_the_readme() -> None:
    for name in lightning_attn.__all__:
        assert re.search(rf"\b{name}\b", README) or name == "LightningResult", name
