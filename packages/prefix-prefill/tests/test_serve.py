"""Attention over pages in a server's day: are its results right at every step that is judged?"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import pytest

from kernel_reference.bench.serve import LIMITS, main
from kernel_reference.bench.server import Server, Step, first_prompts
from kernel_reference.bench.traffic import KINDS
from prefix_prefill.plan import DeviceLimits, Problem, kind_of_batch

FILE = Path(__file__).parents[1] / "benchmarks" / "serve.py"


@pytest.mark.parametrize("traffic", ["chat", "code"])
def test_a_dry_day_of_answers_with_and_without_drafts_ends_well(traffic: str, capsys: pytest.CaptureFixture[str]):
    assert main([str(FILE), "--dry", "--steps", "24", "--traffic", traffic]) == 0, capsys.readouterr().err
    assert "prefix-prefill" in capsys.readouterr().out


@pytest.mark.parametrize("traffic", KINDS.values(), ids=KINDS)
def test_steps_of_a_server_need_no_kernel_that_its_first_prompts_have_not(traffic):
    """A kernel compiled between two steps keeps everybody waiting; here for Llama-3-8B on an H200."""
    limits = DeviceLimits(132, 227 * 1024, hopper=True)

    def kinds(steps: Iterable[Step]) -> set[tuple[bool, bool]]:
        found = set()
        for step in steps:
            longest = max(row.new for row in step.rows)
            batch = Problem(32, 8, 128, 16, step.tokens, len(step.rows), longest, LIMITS.longest, tma=True)
            # Few tiles have the kernel of few rows, or one of their own only where heads are wide or scores capped.
            few_rows, of_64, *_, pieces, _ = kind_of_batch(batch, limits)
            # In how many pieces is a number that kernels are given.
            found.add((few_rows or of_64, pieces == 1))
        return found

    assert kinds(islice(Server(traffic, LIMITS, 0).steps(), 1500)) <= kinds(first_prompts(traffic, LIMITS))
