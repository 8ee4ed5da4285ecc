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
    """Whether two warpgroups share a head, of which half of the device has room for as many as there are.

    On an H100, 16384 tokens, us with dq, by one each and by two: 64 heads of 112 1719 and 1463, of 96 896 and 999.
    """
    least, most = sorted((heads.head_qk, heads.head_v))
    return least > 64 and most < 128 and not heads.head_qk == heads.head_v == 96


def wide_plan(heads: Heads) -> PrefillPlan:
    """A program for a whole sequence and head, by two warpgroups that follow its state, or, of 80, do all.

    On an H100, 16384 tokens, us with dq, these doing all and following: 64 heads of 72 905 and 752, of 88 1141 and
    1104, of 80 812 and 910.
    """
    if heads.head_qk == heads.head_v == 80:
        return PrefillPlan(64, 128, 0, 8, 3, 128, hopper=True)
    return PrefillPlan(64, 128, 0, 8, 4, 64, hopper=True, roles=True)


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
