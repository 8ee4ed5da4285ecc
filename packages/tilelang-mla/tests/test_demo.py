"""The demo's part for a GPU, with small sizes on the CPU: each row is right and says what ran."""

from __future__ import annotations

from pathlib import Path

from kernel_reference.bench.demo import GPU_KERNEL
from kernel_reference.bench.dry import rehearse_demo

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


def test_on_a_gpu_every_row_is_of_its_kernels_within_the_limit_and_beside_plain_pytorch() -> None:
    rows = rehearse_demo(DEMO, SEQUENCES=3, LONGEST=200, PROMPT=70)
    assert [(row.kernel, row.plain_ms is not None) for row in rows] == [
        ("flash_mla_with_kvcache", True),
        ("flash_mla_varlen_func", True),
    ]
    assert all(row.is_ok and (row.implementation, row.device) == (GPU_KERNEL, "a GPU") for row in rows)
