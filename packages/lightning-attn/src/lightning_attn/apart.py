"""A launch for packed sequences of one token, ahead of the prefill, which then takes the others.

Only the device knows which of a batch with as many rows as sequences have one: see kernels/hopper_apart.py.
"""

from __future__ import annotations

import torch

from kernel_reference.integers import cdiv
from kernel_reference.launching import Launch
from lightning_attn.kernels.schedule import Sizes, Strides
from lightning_attn.plan import PrefillPlan, PrefillProblem
from lightning_attn.tensors import MainPrefill, Prefill

# Programs of a prefill that goes round the segments of other sequences than of one token: as many as 132 SMs hold at
# once, two each, in float32 one. On an H200, 64 sequences of two tokens and as many of none, 64 heads of 128, us by
# 132, 264 and 1056: 500, 329 and 332.
MOST_ROUND = 264


def programs_apart(problem: PrefillProblem, programs: int) -> int:
    """How many of a prefill's programs are started."""
    if problem.rows != problem.sequences:
        return programs
    return min(programs, MOST_ROUND // 2 if problem.dtype == "float32" else MOST_ROUND)


def programs_besides(plan: PrefillPlan, segments: int) -> int:
    """How many programs a head and tile there are beside those of a packed batch's segments, for the long of these.

    Fewer than of these: a grid of twice as many shares all alike.
    """
    return min(plan.besides, segments - 1)


def behind_tokens(
    prefill: MainPrefill, problem: PrefillProblem, sizes: Sizes, strides: Strides, device: torch.device
) -> MainPrefill:
    """The prefill behind the launch of tokens, where there is one."""
    if problem.rows != problem.sequences:
        return prefill
    from lightning_attn.kernels import hopper_apart

    grid = (cdiv(sizes.E, sizes.BLOCK_E) * sizes.H * problem.sequences, 1, 1)
    # One kernel whatever segments and stages the prefill has. Of a float32 program's eight warps four are quicker.
    sizes = sizes._replace(SEGMENT=0, STAGES=1, DEPENDENT_LAUNCH=False, SHARED=False, APART=False, LONG=0, WARPS=4)
    rest = (problem.rows, problem.sequences, problem.num_slots, problem.scale, strides._replace(carried=None), sizes)
    tokens = Launch(hopper_apart.tokens, grid, rest, device, num_warps=sizes.WARPS, dependent_launch=True)

    def run(t: Prefill, between: torch.Tensor | None = None) -> None:
        tokens(t.q, t.k, t.v, t.out, t.slopes, t.cu_seqlens, t.slots, t.has_initial, t.initial, t.final)
        prefill(t, between)

    return run
