"""Plans fitted to a call, by how many sequences it has and how long they are: only where that changes no bits."""

from __future__ import annotations

from dataclasses import replace

from kernel_reference.integers import cdiv
from lightning_attn.plan import (
    MOST_SHARES,
    DecodePlan,
    DeviceLimits,
    Heads,
    PrefillPlan,
    PrefillProblem,
    hopper_columns,
    plan_prefill,
    stages_of_roles,
    unsegmented,
)

# Measured on an H200, 16 heads of 128: 16 x 512 tokens 52 us with 2 stages, 54 with 4; 64 x 128 70 and 87; 8 x 1024 49
# and 47.
SHORT = 512
# Tokens of a segment that may have programs besides, and of one that a batch is worth them for.
LONG_SEGMENT, WORTH_MORE = 512, 2048


def takes_tokens(problem: PrefillProblem) -> bool:
    """Whether sequences of one token, of which a ragged batch may have many, are taken without chunks and TMA."""
    return problem.ragged and problem.final is not None and not (problem.snapshots or problem.reversed)


def fitted_prefill(problem: PrefillProblem, limits: DeviceLimits, suits_tma: bool) -> PrefillPlan:
    """The plan of :func:`plan_prefill` for a problem, fitted to it. ``suits_tma``: TMA can address its tensors."""
    heads, rows, sequences = problem.heads, problem.rows, problem.sequences
    plan = plan_prefill(heads, problem.dtype, limits, suits_tma, problem.snapshots > 0)
    if problem.ragged:
        plan = packed_by_two(plan, heads, rows, sequences, limits, problem.snapshots > 0)
    of_rows = cdiv(rows, plan.segment) if plan.segment else 1
    if plan.segment and may_share(problem, plan.segment):
        # Of a ragged batch the least that it may have.
        plan = shared(plan, heads, max(sequences, of_rows) if problem.ragged else sequences * of_rows, limits)
        if plan.shares > 1:
            return besides(plan, heads, rows, sequences, limits) if takes_tokens(problem) else plan
    # How long each of a ragged batch's is only the device knows.
    if problem.ragged:
        plan = staged_by_mean(plan, heads, rows, sequences, limits)
        if takes_tokens(problem):
            plan = besides(apart(plan, heads, rows, sequences), heads, rows, sequences, limits)
        return plan
    if rows <= SHORT or problem.is_gradient:
        return staged(plan, heads, rows)
    return widened(plan, heads, sequences * of_rows, limits)


def staged(plan: PrefillPlan, heads: Heads, tokens: int) -> PrefillPlan:
    """A plan of :func:`plan_prefill` for sequences of ``tokens`` each, with the same results bit for bit.

    A short sequence ends before many stages are filled: two programs an SM, of two stages each, hide one's first loads
    behind the other's chunks. Those of three stages are two an SM as it is, and those by roles one.
    """
    if not plan.hopper or plan.bf16x6 or plan.num_stages < 4 or tokens > SHORT or heads.head_qk > 128:
        return plan
    columns = hopper_columns(heads)
    stages = 3 if plan.segment and columns == 64 else 2
    return replace(plan, num_stages=stages, block_d=columns, block_e=64, num_warps=4, roles=False)


def staged_by_mean(plan: PrefillPlan, heads: Heads, tokens: int, sequences: int, limits: DeviceLimits) -> PrefillPlan:
    """:func:`staged` for packed sequences, of which only the device knows how long each is.

    On an H100, 64 heads of 128, 128 rows of one token alone, with a prompt of 4096 and of 16384: 391, 530 and 931 us
    with 2 stages, 496, 602 and 944 with 4; but 15 rows with a prompt of 16384, 600 and 511. Longer ones where there
    are so many that the rows of all take as long as a segment: 64 sequences of 250 at 16 heads 208 -> 167, 61 rows and
    a prompt of 15800 227 -> 210; but 32 of lognormal lengths with a mean of 256 at 32 heads 201 -> 171, and 30 rows
    and a prompt of 7900 157 -> 200.
    """
    programs = heads.num_heads * cdiv(heads.head_v, 64)
    longest = min(tokens, plan.segment) if plan.segment else tokens
    most = 128
    if programs * sequences >= 15 * limits.cores and 10 * tokens * programs >= 9 * limits.cores * longest:
        most = 512 if plan.segment and programs * sequences >= 30 * limits.cores else 256
    return staged(plan, heads, 1) if tokens <= most * sequences else plan


def packed_by_two(
    plan: PrefillPlan, heads: Heads, tokens: int, sequences: int, limits: DeviceLimits, snapshots: bool = False
) -> PrefillPlan:
    """For packed sequences a plan of :func:`plan_prefill` whose two warpgroups follow a state of 128 columns.

    Where programs of 64 columns fill the device it has no segments, whose kernels would be a layer's seventh and
    eighth. A short batch that leaves half of the SMs idle has a program for each, with the same bits, but with
    snapshots, where it would be the seventh too. On an H100, one sequence at 64 heads of 72, us by one each and by
    both: 3000 tokens 60 and 78, 16384 557 and 395.
    """
    if not plan.roles or plan.block_e != 128:
        return plan
    if 4 * heads.num_heads * cdiv(heads.head_v, 64) >= 3 * limits.cores:
        plan = unsegmented(plan)
    is_idle = 2 * heads.num_heads * sequences <= limits.cores and tokens <= 4096
    return replace(plan, block_e=64, num_warps=4) if is_idle and not snapshots else plan


def apart(plan: PrefillPlan, heads: Heads, tokens: int, sequences: int) -> PrefillPlan:
    """A plan of :func:`plan_prefill` for packed sequences that may have one token each, with the same bits.

    In 16 bits not of few heads, for which it would be a layer's seventh kernel. One kernel for all short batches would
    be the sixth: on an H200, 16 heads of 128, 128 rows of one token 97 -> 73 us, but 64 sequences of 33 68 -> 75.
    """
    is_seventh = plan.segment > 0 and not plan.bf16x6
    if not plan.hopper or plan.roles or plan.chained or heads.head_qk > 128 or is_seventh:
        return plan
    return replace(plan, apart=tokens == sequences)


def besides(plan: PrefillPlan, heads: Heads, tokens: int, sequences: int, limits: DeviceLimits) -> PrefillPlan:
    """A plan of :func:`plan_prefill` for packed sequences of which some may be long, with the same results bit for bit.

    Where the rows of all others take less time than its longest segment, long ones have programs more, as many as
    would be a program an SM of the long alone. On an H100, us: 32 rows of one token and a prompt of 4096, 16 heads of
    128 123 -> 78, in float16 146 -> 90, and four prompts of 1024 at 8 heads 48 -> 41; 32 sequences of 100 there, of
    which none is long, 34.9 -> 39.9. Of 255 rows and four prompts, all long, it would be 187 -> 225.
    """
    is_short = plan.hopper and not (plan.roles or plan.chained or plan.apart) and plan.num_stages <= 3
    if not is_short or heads.head_qk > 128 or plan.segment < (1024 if plan.bf16x6 else WORTH_MORE):
        return plan
    plan = replace(plan, long=LONG_SEGMENT)
    # That the longest may have: each other has one, or a row at least.
    most = tokens - sequences + 1
    programs = heads.num_heads * cdiv(heads.head_v, plan.block_e)
    is_worth = most >= min(WORTH_MORE, plan.segment) and sequences * programs <= min(most, plan.segment)
    # Of a prompt of several segments each has some.
    if plan.shares > 1 or not is_worth or 2 * programs * cdiv(most, plan.segment) > limits.cores:
        return plan
    return replace(plan, besides=limits.cores // programs - 1)


def widened(plan: PrefillPlan, heads: Heads, segments: int, limits: DeviceLimits) -> PrefillPlan:
    """A plan of :func:`plan_prefill` for so many segments, or sequences, of all, with the same results bit for bit.

    Two warpgroups of one program share a head's scores, and load its q and k once: two tiles of 64 columns take 1.84
    times as long as one, where they would take two rounds of the device's SMs. On an H200, us: 8 heads x 32768 tokens
    128 -> 118, 16 x 131072 1017 -> 915; but 4 x 16384, which leaves SMs idle, 67 -> 89. Of whole sequences they go by
    roles: at 64 heads of 128 4 x 8192 561 -> 541, 16 x 4096 1152 -> 1084, in float16 1391 -> 1125, of 96 953 -> 819, of
    112 1110 -> 952, 2 x 16384 550 -> 553; but packed, one of 16384 273 -> 415.
    """
    is_narrow = plan.hopper and not plan.bf16x6 and plan.block_e == 64 and heads.head_qk <= 128
    if not (is_narrow and heads.head_v > 64 and (plan.segment or (plan.roles and heads.head_qk > 64))):
        return plan
    rounds, wide_rounds = (cdiv(heads.num_heads * cdiv(heads.head_v, e) * segments, limits.cores) for e in (64, 128))
    if 1.84 * wide_rounds >= rounds:
        return plan
    if not plan.segment:
        return replace(plan, block_e=128, num_warps=8, num_stages=min(4, stages_of_roles(heads, 128)))
    return replace(plan, block_e=128, num_warps=8, num_stages=3, block_d=hopper_columns(heads), roles=False)


def may_share(problem: PrefillProblem, segment: int) -> bool:
    """Whether programs may share a segment: not backwards, nor with snapshots, nor where none is of several.

    A sequence of one, in a pool that states are begun from too, is taken by one program: see the kernel. In float32
    neither is dq made so, nor a part of a larger state whose launches follow each other.
    """
    is_short = problem.ragged and problem.initial is not None and problem.rows <= segment
    is_plain = not (is_short or problem.reversed or problem.snapshots or problem.in_turn)
    return is_plain and not (problem.is_gradient and problem.dtype == "float32")


def shared(plan: PrefillPlan, heads: Heads, segments: int, limits: DeviceLimits) -> PrefillPlan:
    """A plan of :func:`plan_prefill` for so many segments of all sequences, with the same results bit for bit.

    Where they leave SMs idle, several programs share each, by roles. On an H100, us: 4 x 500 tokens, 4 heads of 64,
    11.5, by two and four programs 9.9 and 9.4; 500 tokens, 8 heads of 72, 13.6, 10.4 and 9.7. Where two warpgroups that
    follow a state leave half of the SMs idle, each has a program: 64 heads of 72, 3000 tokens, 55, by two programs that
    share 62.
    """
    if not (plan.hopper and plan.segment and segments):
        return plan
    if plan.roles and plan.block_e == 128:
        if 2 * heads.num_heads * cdiv(heads.head_v, 128) * segments > limits.cores:
            return plan
        plan = replace(plan, block_e=64, num_warps=4)
    # In float32 a state of more than 128 rows is two programs'.
    of_segment = heads.num_heads * cdiv(heads.head_v, 64) * (2 if plan.bf16x6 and heads.head_qk > 128 else 1)
    shares = limits.cores // (of_segment * segments)
    if shares < 2:
        return plan
    if not plan.roles and not plan.bf16x6:
        stages = min(4, stages_of_roles(heads))
        plan = replace(plan, roles=True, block_d=64, block_e=64, num_warps=4, num_stages=stages)
    return replace(plan, shares=min(shares, MOST_SHARES))


def narrowed(plan: DecodePlan, heads: Heads, sequences: int, limits: DeviceLimits) -> DecodePlan:
    """A plan of :func:`plan_decode` for so many sequences, with the same results bit for bit.

    Few programs of 64 columns are more of 16, whose warps have as many columns each. On an H200, 64 heads, 1 and 2
    sequences: 4.0 -> 3.8 and 6.4 -> 6.2 us. Of fewer heads, 2.5 -> 2.4, it would be a layer's seventh kernel.
    """
    is_many = heads.num_heads * cdiv(heads.head_v, 16) * sequences > 8 * limits.cores
    may_be = plan.lines and heads.num_heads >= 48 and heads.head_qk in (64, 128)
    if not may_be or plan.block_e != 16 * plan.num_warps or is_many:
        return plan
    return replace(plan, block_e=16, num_warps=1)
