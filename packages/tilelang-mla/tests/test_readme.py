"""Does the README say what is so?"""

import contextlib
import io
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import tilelang_mla
from kernel_reference.testing.distributed import run
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
    assert len(BLOCKS) == 4 + 3


def test_the_example_of_caches_of_8_bits_attends_to_both() -> None:
    block, sparse = [block for block in BLOCKS if "quantize_kv" in block]
    assert "sparse [2, 1, 16, 512]" in run_block(sparse)
    [prompt] = [block for block in BLOCKS if "sparse_fwd" in block]
    assert "listed [5, 16, 512]" in run_block(prompt)
    [indexer] = [block for block in BLOCKS if "index_topk" in block]
    assert "indexed [2, 1, 128] [2, 1, 16, 512]" in run_block(indexer)
    printed = run_block(block)
    assert "torch.float8_e4m3fn [8, 64, 1, 576] [2, 1, 16, 512]" in printed
    assert "torch.uint8 [8, 64, 1, 656] [2, 1, 16, 512]" in printed


def test_the_five_lines_for_two_gpus_are_those_of_an_example_that_agrees_with_one_process() -> None:
    example = PACKAGE / "examples" / "parallel.py"
    [block] = [block for block in BLOCKS if "group=group" in block]
    lines = {line.strip() for line in example.read_text().splitlines()}
    assert set(filter(None, block.splitlines())) <= lines
    printed = run(2, lambda rank: printed_by(runpy.run_path(str(example))["main"]))
    assert [line.count("the same as one process: True") for line in printed] == [1, 1]


def printed_by(function: Callable[[], None]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        function()
    return printed.getvalue()


def test_every_public_name_is_in_the_readme() -> None:
    for name in tilelang_mla.__all__:
        assert re.search(rf"\b{name}\b", README) or name in ("AttentionResult", "SparseResult"), name
