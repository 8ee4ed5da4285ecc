"""Do kernels in Gluon compile with the lowest Triton too? Where there is a GPU it is often the one that runs."""

from __future__ import annotations

from pathlib import Path

from kernel_reference.testing.lowest import compiled_with_lowest_triton


def test_a_kernel_for_sm_90_compiles() -> None:
    compiled = compiled_with_lowest_triton(Path(__file__).parents[1], "sm_90", "64, split, capped")
    assert compiled
    assert {name: made.error for name, made in compiled.items() if made.error} == {}
