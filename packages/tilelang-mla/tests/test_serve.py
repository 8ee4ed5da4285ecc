"""A latent cache in a server's day: are its results right at every step that is judged?"""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_reference.bench.serve import main

FILE = Path(__file__).parents[1] / "benchmarks" / "serve.py"


def test_a_dry_day_of_prompts_and_answers_ends_well(capsys: pytest.CaptureFixture[str]):
    assert main([str(FILE), "--dry", "--steps", "24"]) == 0, capsys.readouterr().err
    assert "tilelang-mla" in capsys.readouterr().out
