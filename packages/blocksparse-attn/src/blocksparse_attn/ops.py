"""The torch op: its schema and its implementations on a CPU, on a GPU, and while torch.compile traces.

======  =============================================================================
attend  writes the outputs, and the logarithms of the sums, that it is given
======  =============================================================================

Every implementation checks its arguments. On a GPU checks, plan and launch are made once for each set of shapes,
strides, dtypes and numbers, and found again by it.
"""

from __future__ import annotations

from typing import Any

import torch

from blocksparse_attn import reference
from blocksparse_attn.arguments import Options, Tensors, check_attend
from blocksparse_attn.plan import AttentionPlan, Problem
from blocksparse_attn.values import check_values
from kernel_reference.checks import MemoryOverlap, check_no_overlap, fail, values_are_checked
from kernel_reference.dispatch import PreparedLaunches, implement, launch_module
from kernel_reference.plans import check_covers

_library = torch.library.Library("blocksparse_attn", "DEF")
_library.define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor crow, Tensor col, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,"
    " Tensor? block_table, Tensor? seqlens_k, Tensor? q_starts, Tensor? q_ends, Tensor? k_starts, Tensor? k_ends,"
    " Tensor? sinks, Tensor(a!) out, Tensor(b!)? lse, SymInt max_seqlen_q, int q_block, int k_block, str page_layout,"
    " float softmax_scale, int left, int right, float softcap, int num_splits, bool scattered=False,"
    " int[]? plan=None) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# The tensors come first, and torch leaves out a plan that is None.
_TENSORS = len(Tensors._fields)
_WRITTEN = ("out", "lse")

launches = PreparedLaunches()


def _check(tensors: Tensors, options: Options) -> tuple[Problem, AttentionPlan | None]:
    problem = check_attend(tensors, options)
    plan = AttentionPlan.from_ints(options.plan)
    if plan is not None:
        if options.num_splits:
            fail("num_splits", "None where a plan is given, which has its own", options.num_splits)
        check_covers(plan, problem)
    return problem, plan


def _fake_attend(*given: Any) -> None:
    _check(Tensors(*given[:_TENSORS]), Options(*given[_TENSORS:]))


def _reference_attend(*given: Any) -> None:
    tensors = Tensors(*given[:_TENSORS])
    problem, _ = _check(tensors, Options(*given[_TENSORS:]))
    check_no_overlap(tensors._asdict(), _WRITTEN)
    if values_are_checked(tensors.q.device):
        check_values(problem, tensors)
    reference.attend(problem, tensors)


def prepare_attend(given: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    """What :attr:`launches` find for the op's tensors and options: the launch, the check of overlaps, the problem."""
    launch = launch_module("blocksparse_attn")
    tensors = Tensors(*given)
    problem, plan = _check(tensors, Options(*numbers))
    return launch.prepare_attend(problem, plan, tensors), MemoryOverlap(tensors._asdict(), _WRITTEN), problem


def attend_now(*given: Any) -> None:
    """The op on a GPU, called at once: see ``kernel_reference.dispatch.runs_now``."""
    tensors = given[:_TENSORS]
    run, check_overlap, problem = launches.find(prepare_attend, tensors, given[_TENSORS:])
    pointers, aligned = check_overlap.addresses(*tensors)
    if values_are_checked(tensors[0].device):
        check_values(problem, Tensors(*tensors))
    if not (aligned and run.at(*pointers)):
        run(*tensors)


implement(_library, "attend", reference=_reference_attend, kernel=attend_now, fake=_fake_attend)
