"""Eager calls of selected attention on a GPU past torch's dispatcher, see ``..straight``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from blocksparse_attn.arguments import lse_shape
from blocksparse_attn.selected import ops
from blocksparse_attn.selected.arguments import Options, Tensors, check_values
from blocksparse_attn.straight import Inputs, Made, begin, made_of
from kernel_reference.checks import values_are_checked
from kernel_reference.dispatch import PreparedLaunches

Tensor = torch.Tensor

launches = PreparedLaunches()


class Numbers(NamedTuple):
    """What tells calls apart but their tensors: as the caller gave them, where None stands for what shapes say."""

    return_lse: bool
    block_size: int
    page_layout: str
    causal: bool
    softmax_scale: float | None
    k_factor: float
    v_factor: float
    plan: Any


def attended_again(inputs: Inputs, numbers: tuple[Any, ...]) -> tuple[Tensor, Tensor | None] | None:
    """The results of a call that looks like the last one, if it can be said at once; else None.

    numbers: :class:`Numbers`, as a plain tuple, which takes the host less time.
    """
    # True and 1.0 would be found in the table as 1, and a plan, a list, not at all.
    if type(numbers[1]) is not int or type(numbers[2]) is not str or numbers[-1] is not None:
        return None
    made = launches.again(_prepare, inputs, numbers)
    return None if made is None else begin(made, inputs)


def attended(inputs: Inputs, numbers: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
    """The op's work, into new tensors, where nothing is lost without the dispatcher."""
    made = launches.find(_prepare, inputs, numbers)
    if values_are_checked(inputs[0].device):
        check_values(made.problem, Tensors(*(*inputs, *new_results(inputs, Numbers(*numbers)))))
    return begin(made, inputs)


def new_results(inputs: Inputs, numbers: Numbers, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """What results are written to; ``out``: given by the caller."""
    q = inputs[0]
    if out is None:
        out = q.new_empty((*q.shape[:-1], inputs[2].shape[-1]))
    return out, q.new_empty(lse_shape(q), dtype=torch.float32) if numbers.return_lse else None


def options_of(inputs: Inputs, numbers: Numbers) -> Options:
    """The op's other arguments."""
    scale = inputs[0].shape[-1] ** -0.5 if numbers.softmax_scale is None else numbers.softmax_scale
    return Options._make((*numbers[1:4], scale, *numbers[5:]))


def _prepare(inputs: Inputs, numbers: tuple[Any, ...]) -> Made:
    given = Numbers(*numbers)
    out, lse = new_results(inputs, given)
    run, _, problem = ops.launches.find(ops.prepare, (*inputs, out, lse), tuple(options_of(inputs, given)))
    return made_of(run, out, lse, problem)
