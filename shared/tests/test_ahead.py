"""Are kernels compiled without a GPU, each once and none by a dry run, so that another process finds them?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernel_reference.ahead import compile_calls
from kernel_reference.testing.forks import outcome_alone

KERNELS = """
import triton
import triton.language as tl

FACTOR = tl.constexpr(3.0)


@triton.jit
def grown(x):
    return x * FACTOR


@triton.jit
def add(p_x, number, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(p_x + o, grown(tl.load(p_x + o)) + number)


@triton.jit
def subtract(p_x, number, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(p_x + o, grown(tl.load(p_x + o)) - number)
"""
COMPILE = """
import pathlib, sys, torch
sys.path.insert(0, {folder!r})
import kernels as both
from kernel_reference.ahead import compile_calls
from kernel_reference.launching import Launch

x = torch.empty(64, device="meta")
order = {order!r}
starts = [Launch(getattr(both, name), (1, 1, 1), (0.5, 64), x.device) for name in (*order, order[0])]
calls = [(str(number), lambda start=start: start(x)) for number, start in enumerate(starts)]
wanted = [(name, str(number)) for number, name in enumerate(order)]
seen = []
cubins = lambda: len([*pathlib.Path({cache!r}).rglob("*.cubin")])
dry = compile_calls(calls, "sm_90", dry_run=True, report=lambda *given: seen.append(given))
assert [(k.name, k.call) for k in dry] == wanted, dry
assert [given[1:] for given in seen] == [(1, 2), (2, 2)] and cubins() == {before}, (seen, cubins())
seen.clear()
kernels = compile_calls(calls, "sm_90", report=lambda *given: seen.append(given))
assert [(k.name, k.call) for k in kernels] == wanted, kernels
assert [given[1:] for given in seen] == [(1, 2), (2, 2)] and cubins() == 2, (seen, cubins())
"""


def test_each_kernel_is_compiled_once_and_found_by_another_process_in_any_order(tmp_path: Path) -> None:
    # They call one function, which reads a constant.
    (tmp_path / "kernels.py").write_text(KERNELS)
    cache = str(tmp_path / "cache")
    environment = {**os.environ, "TRITON_CACHE_DIR": cache, "TRITON_INTERPRET": "0"}
    for before, order in ((0, ("add", "subtract")), (2, ("subtract", "add"))):
        script = COMPILE.format(folder=str(tmp_path), cache=cache, before=before, order=order)
        code, said = outcome_alone(script, environment)
        assert code == 0, said
    dates = {file: file.stat().st_mtime_ns for file in Path(cache).rglob("*.cubin")}
    assert len(dates) == 2


def test_a_target_that_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^target must be one of sm_80, .*, got .*sm_7"):
        compile_calls([], "sm_7")
