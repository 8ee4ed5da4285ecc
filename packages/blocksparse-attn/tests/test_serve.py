"""Selected attention in a server's day: are its results right at every step that is judged?"""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_reference.bench.serve import main

FILE = Path(__file__).parents[1] / "benchmarks" / "serve.py"


@pytest.mark.parametrize("traffic", ["chat", "code"])
def test_a_dry_day_of_answers_with_and_without_drafts_ends_well(traffic: str, capsys: pytest.CaptureFixture[str]):
    assert main([str(FILE), "--dry", "--steps", "24", "--traffic", traffic]) == 0, capsys.readouterr().err
    assert "blocksparse-attn" in capsys.readouterr().out
