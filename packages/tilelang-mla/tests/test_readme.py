"""Does the README say what is so?"""

import re
from pathlib import Path

import tilelang_mla
from kernel_reference.testing.readme import python_blocks, run_block

PACKAGE = Path(__file__).parents[1]
README = (PACKAGE / "README.md").read_text()
BLOCKS = python_blocks(PACKAGE / "README.md")


def test_the_first_example_is_the_quickstart_and_one_token_alone_is_the_same() -> None:
    quickstart = (PACKAGE / "examples" / "quickstart.py").read_text()
    assert quickstart.endswith(BLOCKS[0])
    printed = run_block(BLOCKS[0])
    assert "decode [16, 2, 16, 512] torch.bfloat16" in printed
    assert "the same alone: True" in printed
    # The one inside transformers is run with its tests.
    assert len(BLOCKS) == 1 + 1


def test_every_public_name_is_in_the_readme() -> None:
    for name in tilelang_mla.__all__:
        assert re.search(rf"\b{name}\b", README) or name in ("AttentionResult",), name
