"""How gradients are laid over a device."""

from __future__ import annotations

from kernel_reference.integers import cdiv
from lightning_attn.plan import BackwardProblem, DeviceLimits, Heads, PrefillPlan, suits_roles

# Of shorter sequences launches would take longer than what they launch.
SHORTEST = 2048


def suits_halves(heads: Heads, dtype: str, limits: DeviceLimits) -> bool:
    """Whether programs of whole sequences fill half of the device, or nearly, and memory is what they wait for."""
    of_memory = max(heads.head_qk, heads.head_v) <= 128 and (suits_roles(heads) or suits_wide(heads))
    return limits.hopper and dtype != "float32" and of_memory and 4 * _programs(heads) >= 3 * (limits.cores // 2)


def suits_wide(heads: Heads) -> bool:
    """Whether two warpgroups share a head, which by roles would not be faster: half of the device has room for that.

    On an H100, 64 heads of 72, 16384 tokens: dq, dk and dv one after the other 1067 us, dk and dv at once 882. On an
    H200, with autograd, dk and dv by two warpgroups 1134 us, by roles 1193; of 80 1051 and 1081.
    """
    return min(heads.head_qk, heads.head_v) > 64 and (heads.head_qk < 96 or not suits_roles(heads))


def wide_plan() -> PrefillPlan:
    """A program for a whole sequence and head, by two warpgroups."""
    return PrefillPlan(64, 128, 0, 8, 3, 128, hopper=True)


def groups_at_once(problem: BackwardProblem, limits: DeviceLimits) -> int:
    """Groups of heads of which dk and dv are made at once, each by half of the device. 0: one after the other.

    Both read q and the output's gradient from the last token to the first: what one has read, the other finds in the
    L2 cache. On an H100, 16384 tokens, us one after the other and at once: 64 heads of 64 664 and 582, of 96, in two
    groups, 995 and 865; but 8 of 128, in segments, 301 and 348.
    """
    heads, sequences = problem.dv.heads, problem.dv.sequences
    if problem.dv.rows < SHORTEST or not suits_halves(heads, problem.dv.dtype, limits):
        return 0
    groups = min(heads.num_heads, cdiv(sequences * _programs(heads), limits.cores // 2))
    return next(n for n in range(groups, heads.num_heads + 1) if heads.num_heads % n == 0)


def _programs(heads: Heads) -> int:
    """For whole sequences, each: of dk or of dv, whichever has more."""
    return heads.num_heads * cdiv(max(heads.head_qk, heads.head_v), 128 if suits_wide(heads) else 64)
