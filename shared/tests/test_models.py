"""What a rank of a tensor-parallel model holds, and what importing the package costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kernel_reference.models import DEEPSEEK_V3, LLAMA3_70B, MINIMAX_01, QWEN3_NEXT_80B
from kernel_reference.testing.forks import run_alone


@pytest.mark.parametrize(("ranks", "heads"), [(1, (16, 32)), (2, (8, 16)), (4, (4, 8)), (8, (2, 4))])
def test_a_rank_of_qwen3_next_holds_its_share_of_the_heads(ranks: int, heads: tuple[int, int]) -> None:
    part = QWEN3_NEXT_80B.tensor_parallel(ranks)
    assert (part.num_heads_qk, part.num_heads_v) == heads
    assert (part.head_qk, part.head_v, part.conv_width) == (128, 128, 4)
    assert part.name == ("Qwen3-Next-80B" if ranks == 1 else f"Qwen3-Next-80B TP{ranks}")


def test_more_ranks_than_kv_heads_repeat_those() -> None:
    part = LLAMA3_70B.tensor_parallel(16)
    assert (part.num_heads_q, part.num_heads_kv) == (4, 1)


@pytest.mark.parametrize("model", [QWEN3_NEXT_80B, MINIMAX_01, LLAMA3_70B, DEEPSEEK_V3], ids=lambda m: m.name)
@pytest.mark.parametrize("ranks", [0, -2, 3, 7])
def test_ranks_that_do_not_divide_the_heads_are_named(model: object, ranks: int) -> None:
    with pytest.raises(ValueError, match=rf"^ranks must be .*, got {ranks}"):
        model.tensor_parallel(ranks)  # type: ignore[attr-defined]


def test_importing_the_package_or_the_models_loads_no_torch() -> None:
    code = (
        "import sys, kernel_reference, kernel_reference.models, kernel_reference.errors;"
        "assert kernel_reference.__version__;"
        "print(sorted({'torch', 'einops', 'triton', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_oracles_need_nothing_but_torch_and_einops() -> None:
    run_alone("""
        import sys
        from kernel_reference import *

        assert callable(attention.attention) and callable(recurrence.linear_attention) and callable(paging.gather)
        assert not {"triton", "pytest", "hypothesis", "rich", "matplotlib"} & set(sys.modules)
    """)
