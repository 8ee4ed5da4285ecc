"""Launch plans of gradients of selected attention: pure functions from a problem and the device's limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from blocksparse_attn.plan import DeviceLimits
from blocksparse_attn.selected.plan import Problem, rows_of_token
from kernel_reference.integers import is_power_of_two, power_of_two_at_least
from kernel_reference.plans import Plan


@dataclass(frozen=True)
class BackwardPlan(Plan):
    """Two kernels: one by tokens, one by pieces of ``piece`` keys, each of which lies in one block and one page.

    That of tokens walks ``block_n`` keys of its list at a time, those of several small pieces together; that of pieces
    walks the tokens that list its own, ``block_m`` rows of query heads at a time.
    """

    piece: int
    block_n: int
    num_warps: int
    num_stages: int
    block_m: int
    keys_warps: int
    keys_stages: int

    def covers(self, problem: Problem) -> bool:
        """Whether the kernels can run this problem with this plan."""
        if not is_power_of_two(self.piece, self.block_n, self.block_m, self.num_warps, self.keys_warps):
            return False
        if min(self.block_n, self.block_m) < 16 or min(self.num_stages, self.keys_stages) < 1:
            return False
        if problem.cache_bits != problem.bits or self.block_n < self.piece:
            return False
        return problem.block_size % self.piece == problem.page_size % self.piece == 0


def plan_backward(problem: Problem, limits: DeviceLimits) -> BackwardPlan:
    """The plan for a problem on this device."""
    block_d = power_of_two_at_least(max(16, problem.head_dim, problem.head_dim_v))
    if problem.bits == 32:
        most, num_warps, num_stages = 16, 4 if block_d <= 64 else 8, 1
    elif limits.shared_memory <= 64 * 1024:
        most, num_warps, num_stages = (32, 4, 1) if block_d <= 64 else (16, 4, 1)
    elif block_d <= 128:
        most, num_warps, num_stages = 64, 4, 2
    else:
        most, num_warps, num_stages = 32, 8, 1
    piece = min(math.gcd(problem.block_size, problem.page_size), most)
    # Rows as for ``blocksparse_attention``, where two accumulators leave no registers for more.
    block_m = min(32, most)
    return BackwardPlan(piece, max(min(32, most), piece), num_warps, num_stages, block_m, num_warps, num_stages)


def rows(problem: Problem, plan: BackwardPlan) -> int:
    """Query heads of a tile of one token."""
    return min(rows_of_token(problem), plan.block_m)
