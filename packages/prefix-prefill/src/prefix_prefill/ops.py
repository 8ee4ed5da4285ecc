"""The torch ops: schemas, and what implements them.

=======  =============================================================================
prefill  writes the outputs, and the logarithms of the sums, that it is given
cascade  the same over keys that groups of rows share, level by level
merge    writes likewise the whole of an attention from two parts of its keys
=======  =============================================================================

Every implementation, the fake ones included, checks its arguments. On a GPU checks, plan and launch are made once for
each set of shapes, strides, dtypes and numbers, and found again by it.
"""

from __future__ import annotations

from typing import Any

import torch

from kernel_reference.checks import values_are_checked
from kernel_reference.dispatch import PreparedLaunches, implement, launch_module
from kernel_reference.integers import power_of_two_at_least
from prefix_prefill import arguments, levels, reference
from prefix_prefill.arguments import MergeTensors, PrefillNumbers, PrefillTensors, prefill_arguments
from prefix_prefill.levels import CascadeNumbers
from prefix_prefill.plan import PrefillPlan, Problem
from prefix_prefill.values import check_values

Tensor = torch.Tensor

_library = torch.library.Library("prefix_prefill", "DEF")
for _schema in (
    "prefill(Tensor q, Tensor? k, Tensor? v, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor cu_seqlens_q,"
    " Tensor seqlens_k, Tensor? alibi_slopes, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, Tensor? out_scale,"
    " Tensor(a!) out, Tensor(b!)? lse, Tensor? draft_mask, SymInt max_seqlen_q, str page_layout,"
    " float softmax_scale, SymInt left, SymInt right, float softcap, bool skip_decode, float k_factor, float v_factor,"
    " float out_factor, SymInt num_splits, SymInt max_seqlen_k=2147483647, int[]? plan=None) -> ()",
    "cascade(Tensor q, Tensor[] k_cache, Tensor[] v_cache, Tensor[] block_table, Tensor[] cu_seqlens_q,"
    " Tensor[] seqlens_k, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, Tensor? out_scale, Tensor(a!) out,"
    " Tensor(b!)? lse, Tensor? draft_mask, SymInt max_seqlen_q, str page_layout, float softmax_scale, float softcap,"
    " float k_factor, float v_factor, float out_factor, SymInt num_splits) -> ()",
    "merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor(a!) out, Tensor(b!) lse) -> ()",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

launches = PreparedLaunches()
_TENSORS = len(PrefillTensors._fields)
# Where the numbers have it, if it is not the default, which torch leaves out.
_MAX_SEQLEN_K = PrefillNumbers._fields.index("max_seqlen_k")


def _fake_prefill(*given: Any) -> Problem:
    return arguments.check_prefill(*prefill_arguments(given))


def _prepare_prefill(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = launch_module("prefix_prefill")
    given, options = PrefillTensors(*tensors), PrefillNumbers(*numbers)
    problem = arguments.check_prefill(given, options)
    run = launch.prepare_prefill(problem, PrefillPlan.from_ints(options.plan), given)
    return arguments.overlap_of_prefill(given), run


def _kernel_prefill(*given: Any) -> None:
    tensors, numbers = given[:_TENSORS], given[_TENSORS:]
    if len(numbers) > _MAX_SEQLEN_K and numbers[_MAX_SEQLEN_K] > 1:
        # One launch for all bounds up to a power of two: sequences grow with every step of a server.
        rounded = power_of_two_at_least(numbers[_MAX_SEQLEN_K])
        numbers = (*numbers[:_MAX_SEQLEN_K], rounded, *numbers[_MAX_SEQLEN_K + 1 :])
    check_overlap, run = launches.find(_prepare_prefill, tensors, numbers)
    if values_are_checked(tensors[0].device):
        check_values(*prefill_arguments(given))
    check_overlap(*tensors)
    run(*tensors)


def _fake_cascade(*given: Any) -> list[Problem]:
    return levels.check_cascade(*levels.cascade_arguments(given))


def _prepare_cascade(tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch_module("prefix_prefill")
    from prefix_prefill import launch_cascade

    given = levels.from_flat(tensors)
    problems = levels.check_cascade(given, CascadeNumbers(*numbers))
    run = launch_cascade.prepare_cascade(problems, [None] * len(problems), levels.tensors_of_levels(given))
    return levels.overlap_of_cascade(given), run


def _kernel_cascade(*given: Any) -> None:
    tensors, numbers = levels.cascade_arguments(given)
    flat = levels.flat(tensors)
    check_overlap, run = launches.find(_prepare_cascade, flat, numbers)
    if values_are_checked(tensors.q.device):
        levels.check_cascade_values(tensors, numbers)
    check_overlap(*flat)
    run(levels.tensors_of_levels(tensors))


def _prepare_merge(tensors: tuple[Any, ...], _: tuple[Any, ...]) -> Any:
    launch = launch_module("prefix_prefill")
    arguments.check_merge(*tensors)
    given = MergeTensors(*tensors)
    return arguments.overlap_of_merge(given), launch.prepare_merge(given)


def _kernel_merge(*tensors: Tensor) -> None:
    check_overlap, run = launches.find(_prepare_merge, tensors, ())
    check_overlap(*tensors)
    run(*tensors)


implement(_library, "prefill", reference=reference.prefill, kernel=_kernel_prefill, fake=_fake_prefill)
implement(_library, "cascade", reference=reference.cascade, kernel=_kernel_cascade, fake=_fake_cascade)
implement(_library, "merge", reference=reference.merge, kernel=_kernel_merge, fake=arguments.check_merge)
