"""The torch op ``selected``: its schema and its implementations on a CPU, on a GPU, and while torch.compile traces."""

from __future__ import annotations

from typing import Any

import torch

from blocksparse_attn.selected import reference
from blocksparse_attn.selected.arguments import Options, Tensors, check_selected, check_values
from blocksparse_attn.selected.plan import Problem, SelectedPlan
from kernel_reference.checks import MemoryOverlap, check_no_overlap, values_are_checked
from kernel_reference.dispatch import PreparedLaunches, implement, launch_module
from kernel_reference.plans import check_covers

_library = torch.library.Library("blocksparse_attn", "FRAGMENT")
_library.define(
    "selected(Tensor q, Tensor k_cache, Tensor v_cache, Tensor indices, Tensor block_table, Tensor cu_seqlens_q,"
    " Tensor seqlens_k, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, Tensor(a!) out, Tensor(b!)? lse,"
    " int block_size, str page_layout, bool causal, float softmax_scale, float k_factor, float v_factor,"
    " int[]? plan=None) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# The tensors come first, and torch leaves out a plan that is None.
_TENSORS = len(Tensors._fields)
_WRITTEN = ("out", "lse")

launches = PreparedLaunches()


def _check(tensors: Tensors, options: Options) -> tuple[Problem, SelectedPlan | None]:
    problem = check_selected(tensors, options)
    plan = SelectedPlan.from_ints(options.plan)
    check_covers(plan, problem)
    return problem, plan


def _fake(*given: Any) -> None:
    _check(Tensors(*given[:_TENSORS]), Options(*given[_TENSORS:]))


def _reference(*given: Any) -> None:
    tensors = Tensors(*given[:_TENSORS])
    problem, _ = _check(tensors, Options(*given[_TENSORS:]))
    check_no_overlap(tensors._asdict(), _WRITTEN)
    if values_are_checked(tensors.q.device):
        check_values(problem, tensors)
    reference.attend(problem, tensors)


def prepare(given: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    """What :attr:`launches` find for the op's tensors and options: the launch, the check of overlaps, the problem."""
    launch = launch_module("blocksparse_attn.selected")
    tensors = Tensors(*given)
    problem, plan = _check(tensors, Options(*numbers))
    return launch.prepare_selected(problem, plan, tensors), MemoryOverlap(tensors._asdict(), _WRITTEN), problem


def attend_now(*given: Any) -> None:
    """The op on a GPU, called at once: see ``kernel_reference.dispatch.runs_now``."""
    tensors = given[:_TENSORS]
    run, check_overlap, problem = launches.find(prepare, tensors, given[_TENSORS:])
    pointers, aligned = check_overlap.addresses(*tensors)
    if values_are_checked(tensors[0].device):
        check_values(problem, Tensors(*tensors))
    if not (aligned and run.at(*pointers)):
        run(*tensors)


implement(_library, "selected", reference=_reference, kernel=attend_now, fake=_fake)
