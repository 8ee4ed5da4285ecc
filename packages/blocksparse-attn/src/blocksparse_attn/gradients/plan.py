"""Launch plans of gradients: pure functions from a problem and the device's limits, see ``..plan``."""

from __future__ import annotations

from dataclasses import dataclass

from blocksparse_attn.plan import DeviceLimits, Problem
from kernel_reference.integers import is_power_of_two, power_of_two_at_least, power_of_two_in
from kernel_reference.plans import Plan


@dataclass(frozen=True)
class BackwardPlan(Plan):
    """Two kernels: one by tiles of queries, of one row of the layout, and one by tiles of keys, of one block.

    That of queries has ``block_m`` of them, and walks ``block_n`` keys at a time; that of keys has ``keys_n``, and
    walks ``keys_m`` queries at a time; the tiles of ``heads_together`` kv heads come in turn, and with ``keys_held``
    their keys stay in registers (NVIDIA's GPUs, 16 bits).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    keys_m: int
    keys_n: int
    keys_warps: int
    keys_stages: int
    heads_together: int = 1
    keys_held: bool = False

    def covers(self, problem: Problem) -> bool:
        """Whether the kernels can run this problem with this plan."""
        sizes = (self.block_m, self.block_n, self.keys_m, self.keys_n)
        if not is_power_of_two(*sizes, self.num_warps, self.keys_warps) or min(sizes) < 16:
            return False
        if min(self.num_stages, self.keys_stages, self.heads_together) < 1 or problem.page_size:
            return False
        if problem.num_heads_kv % self.heads_together or (self.keys_held and problem.bits != 16):
            return False
        rows = problem.q_block % self.block_m == self.block_m % self.keys_m == 0
        return rows and problem.k_block % self.block_n == problem.k_block % self.keys_n == 0


def plan_backward(problem: Problem, limits: DeviceLimits) -> BackwardPlan:
    """The plan for a problem on this device."""
    block_d = power_of_two_at_least(max(16, problem.head_dim, problem.head_dim_v))
    keys_m, keys_stages = 16, 1
    if problem.bits == 32:
        most, num_warps, num_stages = 16, 4 if block_d <= 64 else 8, 1
    elif limits.shared_memory <= 64 * 1024:
        most, num_warps, num_stages = (32, 4, 1) if block_d <= 64 else (16, 4, 1)
        keys_m = most
    elif block_d <= 128:
        # Four warps: of eight, each half would multiply all of a tile of 64 x 64. Phi-3-small, 8192 tokens, on an H200
        # (triton 3.6.0, 2026-11-23): 1502 us; 1548 with 64 queries at a time for the kernel of keys, which two
        # accumulators leave no registers for, 1521 with four stages, 1563 with 32 keys at a time for that of queries.
        most, num_warps, num_stages = 64, 4, 2
        keys_m, keys_stages = 32, 3
    else:
        most, num_warps, num_stages = 32, 8, 1
        keys_m = most
    block_m, block_n = (min(most, power_of_two_in(block)) for block in (problem.q_block, problem.k_block))
    # Without warpgroups' registers two accumulators of 128 would spill from four warps of sm_100.
    keys_warps = 8 if limits.shared_memory > 200 * 1024 and not limits.hopper else num_warps
    # Phi-3-small on an H200: 8192 tokens 1311 us, 1368 with two heads together, 1448 with one, as the first tiles of a
    # head are the heaviest and the last programs would wait for them; 32768, sixteen rounds of programs, 10.63 ms with
    # one, 10.41 with two, whose last programs end sooner, 11.25 with four (2026-11-27).
    rounds = problem.tokens // block_n * problem.num_heads_kv / (2 * limits.cores)
    together = problem.num_heads_kv if rounds <= 8 else 2 - problem.num_heads_kv % 2
    # Keys in registers, 32768 tokens on an H100 (2026-11-27): 10.5 and 10.9 ms for 11.2 and 11.2; 8192 1.34 for 1.35.
    held = limits.hopper and keys_stages == 3 and block_n == 64
    return BackwardPlan(
        block_m, block_n, num_warps, num_stages, min(keys_m, block_m), block_n, keys_warps, keys_stages, together, held
    )


def num_tiles(tokens: int, block: int, problem: Problem, slack: int) -> int:
    """Slots in the grid for tiles of queries, with slack 2, or of keys, with slack 1: see kernels/tiles.py."""
    segments = 3 * problem.sequences if problem.padded else problem.sequences + 2
    return tokens // block + segments * slack
