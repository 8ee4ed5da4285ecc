"""Launch plans of gradients: pure functions from a problem and the device's limits, see ``..plan``."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_reference.plans import Plan
from tilelang_mla.plan import DeviceLimits, PrefillProblem

# Shared memory beside the tiles: numbers of rows, what is found and barriers, each aligned to 1024 bytes.
_BESIDE = 4096
# Columns of both accumulators of the kernel of keys: of 64 rows, a warpgroup's registers have no more beside scores.
MOST_COLUMNS = 320


@dataclass(frozen=True)
class BackwardPlan(Plan):
    """Two kernels, of keys and of queries: own rows of a program, rows of a stage that meet them, stages in flight."""

    keys_m: int
    keys_n: int
    keys_stages: int
    queries_m: int
    queries_n: int
    queries_stages: int

    def covers(self, problem: PrefillProblem) -> bool:
        """Whether the kernels can run this problem with this plan."""
        own, met = (self.keys_m, self.queries_m), (self.keys_n, self.queries_n)
        sizes = set(own) <= {64, 128} and set(met) <= {32, 64, 96}
        stages = min(self.keys_stages, self.queries_stages) >= 1
        return sizes and stages and problem.head_dim + problem.head_dim_v <= MOST_COLUMNS

    def shared_memory(self, problem: PrefillProblem) -> int:
        """Bytes of a program of the kernel that has more."""
        width = (problem.head_dim + problem.head_dim_v) * problem.bits // 8
        rows = (self.keys_m + self.keys_stages * self.keys_n, self.queries_m + self.queries_stages * self.queries_n)
        return max(rows) * width + _BESIDE

    def slots(self, problem: PrefillProblem) -> tuple[int, int]:
        """Slots of a head in the grids of keys and of queries: see ``PrefillPlan.num_slots``."""
        more = problem.sequences + 2
        return problem.tokens_k // self.keys_m + more, problem.tokens // self.queries_m + more


def plan_backward(problem: PrefillProblem, limits: DeviceLimits) -> BackwardPlan | None:
    """The plan for a problem on this device; None where heads are too wide for the kernels."""
    for stages in (3, 2):
        plan = BackwardPlan(128, 64, 2, 128, 64, stages)
        if plan.covers(problem) and plan.shared_memory(problem) <= limits.shared_memory:
            return plan
    return None
