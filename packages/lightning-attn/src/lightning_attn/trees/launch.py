"""What launch.py does, for drafts that branch."""

from __future__ import annotations

from collections.abc import Callable

from kernel_reference.integers import cdiv, power_of_two_at_least
from kernel_reference.launching import Launch, launch_nothing
from lightning_attn import launch
from lightning_attn.fitting import narrowed
from lightning_attn.kernels import trees
from lightning_attn.kernels.schedule import DecodeStrides, RowStrides, Sizes, StateStrides
from lightning_attn.plan import DecodePlan, DecodeProblem, plan_decode
from lightning_attn.tensors import PathCommit, TreeVerify


def prepare_verify_tree(
    problem: DecodeProblem, plan: DecodePlan | None, tensors: TreeVerify
) -> Callable[[TreeVerify], None]:
    """What makes the outputs of all nodes."""
    if problem.sequences == 0 or problem.tokens == 0 or problem.q is None or problem.o is None:
        return launch_nothing
    if plan is None:
        limits = launch.device_limits(tensors.k.device)
        plan = narrowed(plan_decode(problem.heads, limits), problem.heads, problem.sequences, limits)
    sizes = _sizes(problem, plan)
    strides = DecodeStrides(
        RowStrides(*problem.q), RowStrides(*problem.k), RowStrides(*problem.v), StateStrides(*problem.pool),
        RowStrides(*problem.o),
    )  # fmt: skip
    most_nodes: tuple[int, ...] = ()
    kernel = trees.verify_tree
    if plan.hopper:
        # Gluon, which comes with the Triton that device_limits found.
        from lightning_attn.kernels import hopper_tokens

        kernel = hopper_tokens.verify_tree
        sizes = sizes._replace(WARPS=plan.num_warps, STATE_D=problem.pool[2], STATE_E=problem.pool[3])
        # Their rows lie in shared memory.
        most_nodes = (power_of_two_at_least(problem.tokens),)
    rest = (problem.tokens, problem.num_slots, problem.scale, strides, sizes, plan.dependent_launch, *most_nodes)
    run = _launch(kernel, problem, plan, sizes, rest, tensors)
    return lambda t: run(t.q, t.k, t.v, t.state_pool, t.slots, t.slopes, t.parents, t.out)


def prepare_commit_path(
    problem: DecodeProblem, plan: DecodePlan | None, tensors: PathCommit
) -> Callable[[PathCommit], None]:
    """What advances states by the accepted nodes of a path."""
    most = tensors.path.shape[1]
    if problem.sequences == 0 or problem.tokens == 0 or most == 0:
        return launch_nothing
    if plan is None:
        plan = plan_decode(problem.heads, launch.device_limits(tensors.k.device))
    sizes = _sizes(problem, plan)
    strides = DecodeStrides(
        k=RowStrides(*problem.k), v=RowStrides(*problem.v), pool=StateStrides(*problem.pool)
    )  # fmt: skip
    rest = (problem.tokens, most, problem.num_slots, strides, sizes, plan.dependent_launch)
    run = _launch(trees.commit_path, problem, plan, sizes, rest, tensors)
    return lambda t: run(t.k, t.v, t.state_pool, t.slots, t.slopes, t.accepted, t.path)


def _sizes(problem: DecodeProblem, plan: DecodePlan) -> Sizes:
    heads = problem.heads
    num_heads, block_d = heads.num_heads, max(16, power_of_two_at_least(heads.head_qk))
    return Sizes(
        num_heads, num_heads // heads.num_heads_qk, num_heads // heads.num_heads_v, heads.head_qk, heads.head_v,
        block_d, plan.block_e,
    )  # fmt: skip


def _launch(
    kernel: object, problem: DecodeProblem, plan: DecodePlan, sizes: Sizes, rest: tuple[object, ...],
    tensors: TreeVerify | PathCommit,
) -> Launch:  # fmt: skip
    grid = (cdiv(sizes.E, sizes.BLOCK_E) * sizes.H * problem.sequences, 1, 1)
    # As launch.py has it: what is fused in decoding must be here, for the same bits.
    return Launch(
        kernel, grid, rest, tensors.k.device, num_warps=plan.num_warps, enable_fp_fusion=bool(plan.hopper),
        dependent_launch=bool(plan.dependent_launch),
    )  # fmt: skip
