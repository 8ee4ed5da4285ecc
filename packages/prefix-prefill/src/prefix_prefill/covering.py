"""Which plans a kernel can take for a problem, and what is wrong with others, as pure functions of both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_reference.integers import is_power_of_two
from prefix_prefill.problem import Problem, is_gathered, is_packed, may_be_widened
from prefix_prefill.tiles import shared_bytes, tiles_in_registers
from prefix_prefill.two_programs import LOADING_LARGE, fits_twice, keys_of_two

if TYPE_CHECKING:
    from prefix_prefill.plan import PrefillPlan

# Shared memory of sm_90 in bytes, without what barriers, positions and items take.
MOST_SHARED = 224 * 1024
# Of a tile: more compile for minutes, or for no GPU.
_MOST_BLOCK, _MOST_WARPS = 256, 32


def why_not(plan: PrefillPlan, problem: Problem) -> str:
    """What a plan must be for a kernel to take it for this problem, where it is not: an error's words; else ""."""
    for name in ("block_m", "block_n", "num_warps"):
        if not is_power_of_two(getattr(plan, name)):
            return f"of a {name} that is a power of two"
    least = (("block_m", 16), ("block_n", 16), ("num_stages", 1), ("programs", 1), ("num_splits", int(not plan.hopper)))
    for name, number in least:
        if getattr(plan, name) < number:
            return f"of {name} {number} or more"
    for name, number in (("block_m", _MOST_BLOCK), ("block_n", _MOST_BLOCK), ("num_warps", _MOST_WARPS)):
        if getattr(plan, name) > number:
            return f"of {name} {number} or less"
    return _why_not_hopper(plan, problem) if plan.hopper else ""


def _why_not_hopper(plan: PrefillPlan, problem: Problem) -> str:
    """The same of a plan for sm_90."""
    if not problem.tma:
        return "without hopper, where TMA cannot address keys and values"
    if not fits_hopper(problem):
        sizes = f"heads of {problem.head_dim} and {problem.head_dim_v}, pages of {problem.page_size}"
        return f"without hopper for {sizes}, q of {problem.bits} bits and a cache of {problem.cache_bits}"
    keys = blocks_of_keys(problem)
    if keys_of_two(problem) == 32 and 32 not in keys:
        keys = (32, *keys)
    in_registers = 0 if is_packed(problem) else tiles_in_registers(problem.head_dim)
    allowed: dict[str, tuple[int, ...]] = {
        "block_m": (64,) if problem.largest_head > 256 else (64, 128),
        "block_n": keys,
        "num_warps": (4,), "capping": (0, 1, 2, 3, 4), "loading": (24, 40, 56, 72), "per_core": (1, 2),
        "widened": (0, 1) if plan.block_m == 128 and may_be_widened(problem) else (0,),
        "q_in_registers": tuple(range(in_registers + 1)),
    }  # fmt: skip
    for name, numbers in allowed.items():
        if getattr(plan, name) not in numbers:
            return f"of {name} {' or '.join(map(str, numbers))} for this call"
    if plan.num_stages < 2:
        return "of num_stages 2 or more with hopper"
    needed = shared_bytes(problem, plan.block_m, plan.block_n, plan.num_stages, plan.widened == 1)
    if needed > MOST_SHARED:
        return f"of tiles that fit in {MOST_SHARED} bytes of shared memory, not of {needed}"
    if plan.per_core == 2 and not _is_shared_by_two(plan, problem, needed):
        return "of per_core 1, as no two of its programs fit on an SM"
    return ""


def _is_shared_by_two(plan: PrefillPlan, problem: Problem, needed: int) -> bool:
    """Whether registers and shared memory of an SM suffice for two of its programs."""
    fits = 2 * needed <= MOST_SHARED - 8 * 1024
    fits = fits and plan.block_m == 64 and plan.block_n == keys_of_two(problem) and fits_twice(problem)
    return fits and (problem.head_dim_v <= 192 or plan.loading == LOADING_LARGE)


def blocks_of_keys(problem: Problem) -> tuple[int, ...]:
    """Numbers of keys in a tile that the kernel for sm_90 takes, the best one last."""
    if problem.largest_head > 256:
        # Of 512 not even two stages of 64 keys fit in shared memory.
        return (32, 64) if shared_bytes(problem, 64, 64, 2) <= MOST_SHARED else (32,)
    # Scores of 128 keys and an accumulator of more than 192 values do not fit in registers, nor do slopes beside 128.
    wide = problem.head_dim_v <= (128 if problem.alibi else 192) and shared_bytes(problem, 128, 128, 2) <= MOST_SHARED
    # Between tiles of 8 bits and of 16 there is no room for scales of 128 keys.
    no_room = problem.token_scales and problem.largest_head > 96
    return (64, 128) if wide and not is_mixed(problem) and not no_room else (64,)


def fits_hopper(problem: Problem) -> bool:
    """Whether sizes and dtypes are such that the kernel for sm_90 is written for them."""
    if problem.bits != 16 or (is_gathered(problem) and problem.cache_bits == 8):
        return False
    heads = (problem.head_dim, problem.head_dim_v)
    if is_packed(problem):
        # As one tile of columns. By 8 tokens of values, heads of 64 were NaN in 19 of 70 random calls on an H200.
        return heads in ((64, 64), (128, 128)) and problem.page_size % 16 == 0 and problem.cache_bits == 16
    if problem.cache_bits == 8:
        # Larger heads leave no room for the tiles twice, of 8 bits and of 16.
        return all(size % 16 == 0 and size <= 128 for size in heads)
    return all(size % 8 == 0 for size in heads)


def is_mixed(problem: Problem) -> bool:
    """Whether the cache has 8 bits an element and the new keys 16."""
    return problem.cache_bits == 8 and problem.new_kv
