"""A prefill of a larger state as two launches, of a part of its rows each, whose outputs are added up, in float32.

On an H100, 4 x 8192 tokens at 8 heads of 256, a kernel for all rows, whose registers spilled, took 2.98 ms, two one
after the other 2.49. Segments of dense sequences, which few heads have, are taken by two beside each other, which add
their outputs to zeros: of two terms the order changes no bit. On an H200, 16 heads of 192 x 3000 tokens take 397 us,
one after the other 764.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kernel_reference.integers import cdiv
from kernel_reference.launching import Launch
from lightning_attn.kernels.schedule import Sizes
from lightning_attn.plan import Operand, PrefillPlan, PrefillProblem, Strides
from lightning_attn.tensors import MainPrefill, Prefill

Tensor = torch.Tensor

# As many as the kernel's registers hold.
MOST_ROWS = 128


def are_beside(problem: PrefillProblem, plan: PrefillPlan) -> bool:
    """Whether both are launched beside each other: of gradients and ragged batches no GPU has run that."""
    is_larger = plan.hopper and plan.bf16x6 and problem.heads.head_qk > MOST_ROWS
    return is_larger and plan.segment > 0 and not (problem.ragged or problem.is_gradient)


def in_turn(
    problem: PrefillProblem, make: Callable[[PrefillProblem], Callable[[Prefill], None]]
) -> Callable[[Prefill], None]:
    """What runs a prefill, of what ``make`` makes for a problem of fewer rows."""
    rows = problem.heads.head_qk
    # Those of q and k stay aligned to 16 bytes.
    half = cdiv(rows, 8) * 4
    halves = (
        (slice(0, half), make(_of_rows(problem, half, 1))),
        (slice(half, rows), make(_of_rows(problem, rows - half, 2))),
    )

    def run(t: Prefill) -> None:
        for part, prefill in halves:
            prefill(_of_part(problem, t, part))

    return run


def beside(
    problem: PrefillProblem, kernel: Any, grid: tuple[int, int, int], rest: tuple[Any, ...], sizes: Sizes,
    device: torch.device,
) -> MainPrefill:  # fmt: skip
    """What runs the kernel twice for segments whose states are there. ``rest``: its arguments but the sizes, which are
    of a whole state.
    """
    of_first = sizes._replace(D=MOST_ROWS, BESIDE=1)
    of_second = sizes._replace(D=sizes.D - MOST_ROWS, BESIDE=2)
    launches = (
        (slice(0, MOST_ROWS), Launch(kernel, grid, (*rest, of_first), device, num_warps=sizes.WARPS)),
        (
            slice(MOST_ROWS, sizes.D),
            Launch(kernel, grid, (*rest, of_second), device, num_warps=sizes.WARPS, dependent_launch=True),
        ),
    )

    def run(t: Prefill, between: Tensor | None = None) -> None:
        t.out.zero_()
        for part, launch in launches:
            own = _of_part(problem, t, part)
            carried = None if between is None else between[..., part]
            launch(
                own.q, own.k, own.v, own.out, own.slopes, own.cu_seqlens, own.slots, own.has_initial, own.initial,
                own.final, carried, own.positions, own.snapshot_slots,
            )  # fmt: skip

    return run


def _of_part(problem: PrefillProblem, t: Prefill, rows: slice) -> Prefill:
    """What a prefill of these rows of the state reads and writes."""
    initial = _states_of(problem, rows, t.initial, problem.initial)
    final = _states_of(problem, rows, t.final, problem.final)
    # All but these are the same. With _replace each call would take a microsecond more.
    return Prefill(t.q[..., rows], t.k[..., rows], t.v, t.out, t.slopes, initial, final, *t[7:])


def _states_of(problem: PrefillProblem, rows: slice, states: Tensor | None, strides: Strides | None) -> Tensor | None:
    """Those rows of states: columns of the tensor where a gradient takes it transposed, as only the strides tell."""
    if states is None or strides is None:
        return None
    shape = (*states.shape[:2], rows.stop - rows.start, problem.heads.head_v)
    return states.as_strided(shape, strides, states.storage_offset() + rows.start * strides[2])


def _of_rows(problem: PrefillProblem, count: int, turn: int) -> PrefillProblem:
    """The same for so many rows of the state, by the first or the second launch."""
    q, k = (Operand((*operand.sizes[:3], count), operand.strides) for operand in (problem.q, problem.k))
    return replace(problem, heads=replace(problem.heads, head_qk=count), q=q, k=k, in_turn=turn)
