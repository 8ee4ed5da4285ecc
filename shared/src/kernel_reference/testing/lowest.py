"""Kernels compiled with the lowest Triton that a package allows: what a newer one takes, it may not."""

from __future__ import annotations

import re
from importlib.metadata import requires
from pathlib import Path

import pytest
import torch

from kernel_reference.testing.compare import Compiled, dump


def compiled_with_lowest_triton(package: Path, target: str, only: str) -> dict[str, Compiled]:
    """The codegen cases of a package's folder whose names contain ``only``, by name; each must have compiled.

    The test is skipped with another Triton, with which tests/test_codegen.py compiles all, and where a GPU runs them.
    """
    if torch.cuda.is_available():
        pytest.skip("compiles for a GPU that is not here")
    triton = pytest.importorskip("triton", reason="needs triton, which is not installed")
    bounds = re.findall(r"^triton\b[^;]*>=\s*(\d+\.\d+)", "\n".join(requires(package.name) or ()), re.MULTILINE)
    if not bounds or not triton.__version__.startswith(bounds[0]):
        pytest.skip(f"compiles with the lowest Triton, {bounds}, and not with {triton.__version__}")
    return dump(package, [target], processes=1, only=only)
