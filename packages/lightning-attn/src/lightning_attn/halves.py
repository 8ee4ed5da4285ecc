"""A prefill of a larger state as two, of half of its rows each: outputs are the sum of theirs, in float32.

On an H100, 4 x 8192 tokens at 8 heads of 256, a kernel for all rows, whose registers spilled, took 2.98 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kernel_reference.integers import cdiv
from lightning_attn.plan import Operand, PrefillProblem, Strides

Tensor = torch.Tensor

Prefill = Callable[..., None]


def by_halves(problem: PrefillProblem, make: Callable[[PrefillProblem], Prefill]) -> Prefill:
    """What runs a prefill, of what ``make`` makes for a problem of fewer rows."""
    rows = problem.heads.head_qk
    # Those of q and k stay aligned to 16 bytes.
    half = cdiv(rows, 8) * 4
    halves = (
        (slice(0, half), make(_of_rows(problem, half))),
        (slice(half, rows), make(replace(_of_rows(problem, rows - half), adds=True))),
    )

    def run(q, k, v, o, slopes, cu, slots, has, first, last, positions, targets):  # type: ignore[no-untyped-def]
        for part, prefill in halves:
            own = (_states_of(problem, part, *of) for of in ((first, problem.initial), (last, problem.final)))
            prefill(q[..., part], k[..., part], v, o, slopes, cu, slots, has, *own, positions, targets)

    return run


def _states_of(problem: PrefillProblem, rows: slice, states: Tensor | None, strides: Strides | None) -> Tensor | None:
    """Those rows of states: columns of the tensor where a gradient takes it transposed, as only the strides tell."""
    if states is None or strides is None:
        return None
    shape = (*states.shape[:2], rows.stop - rows.start, problem.heads.head_v)
    return states.as_strided(shape, strides, states.storage_offset() + rows.start * strides[2])


def _of_rows(problem: PrefillProblem, count: int) -> PrefillProblem:
    """The same for so many rows of the state."""
    q, k = (Operand((*operand.sizes[:3], count), operand.strides) for operand in (problem.q, problem.k))
    return replace(problem, heads=replace(problem.heads, head_qk=count), q=q, k=k)
