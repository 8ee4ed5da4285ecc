"""The README's example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_the_example_prints_the_error_it_announces(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 1
    exec(examples[0], {})
    assert 1e-9 < float(capsys.readouterr().out) < 1e-6
