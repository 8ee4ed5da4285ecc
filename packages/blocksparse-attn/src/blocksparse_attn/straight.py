"""Eager calls on a GPU past torch's dispatcher: one that looks like the last is begun at once, into new tensors.

Results that are new overlap nothing. All else that is checked depends on what :class:`.PreparedLaunches` compares, so
that it is checked once for each form of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from blocksparse_attn import ops
from blocksparse_attn.arguments import Options, Tensors, lse_shape, most_queries
from blocksparse_attn.values import check_values
from kernel_reference.checks import values_are_checked
from kernel_reference.dispatch import PreparedLaunches, allocator
from kernel_reference.launching import Run

Tensor = torch.Tensor
# The op's tensors but for its results.
Inputs = tuple[Any, ...]

launches = PreparedLaunches()
# Addresses of which it is known whether they are aligned: those of a model's layers.
_MOST_ADDRESSES = 512


class Numbers(NamedTuple):
    """What tells calls apart but their tensors: as the caller gave them, where None stands for what shapes say."""

    max_seqlen_q: int | None
    return_lse: bool
    q_block: int
    k_block: int
    page_layout: str
    softmax_scale: float | None
    left: int
    right: int
    softcap: float
    num_splits: int
    scattered: bool
    plan: Any


class Made(NamedTuple):
    """A launch made ready, and what makes its results; ``aligned``: whether tensors at these addresses all are."""

    run: Run
    new_out: Callable[[], Tensor]
    new_lse: Callable[[], Tensor] | None
    aligned: dict[tuple[int | None, ...], bool]
    problem: Any


def made_of(run: Run, out: Tensor, lse: Tensor | None, problem: Any) -> Made:
    """For results like these."""
    return Made(run, allocator(out), None if lse is None else allocator(lse), {}, problem)


def begin(made: Made, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Start what was made ready, into new tensors."""
    out, lse = made.new_out(), None if made.new_lse is None else made.new_lse()
    starts = tuple([None if tensor is None else tensor.data_ptr() for tensor in inputs])
    aligned = made.aligned.get(starts)
    if aligned is None:
        if len(made.aligned) >= _MOST_ADDRESSES:
            made.aligned.clear()
        aligned = made.aligned[starts] = not any([start & 15 for start in starts if start is not None])
    # What torch allocates is aligned.
    if not (aligned and made.run.at(*starts, out.data_ptr(), None if lse is None else lse.data_ptr())):
        made.run(*inputs, out, lse)
    return out, lse


def attended_again(inputs: Inputs, numbers: tuple[Any, ...]) -> tuple[Tensor, Tensor | None] | None:
    """The results of a call that looks like the last one, if it can be said at once; else None.

    numbers: :class:`Numbers`, as a plain tuple, which takes the host less time.
    """
    most = numbers[0]
    # True and 1.0 would be found in the table as 1; lists, as plans are, have no hash.
    if not (most is None or type(most) is int) or type(numbers[4]) is not str or numbers[-1] is not None:
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
    q, v = inputs[0], inputs[2]
    if out is None:
        size = v.shape[2] if inputs[7] is not None and numbers.page_layout == "x-packed" else v.shape[-1]
        out = q.new_empty((*q.shape[:-1], size))
    return out, q.new_empty(lse_shape(q), dtype=torch.float32) if numbers.return_lse else None


def options_of(inputs: Inputs, numbers: Numbers) -> Options:
    """The op's other arguments."""
    q, crow = inputs[0], inputs[3]
    without_padding = inputs[9] is None and inputs[10] is None
    most = most_queries(q, numbers.max_seqlen_q, without_padding, (crow.shape[1] - 1) * numbers.q_block)
    scale = q.shape[-1] ** -0.5 if numbers.softmax_scale is None else numbers.softmax_scale
    return Options._make((most, *numbers[2:5], scale, *numbers[6:]))


def _prepare(inputs: Inputs, numbers: tuple[Any, ...]) -> Made:
    given = Numbers(*numbers)
    out, lse = new_results(inputs, given)
    run, _, problem = ops.launches.find(ops.prepare_attend, (*inputs, out, lse), tuple(options_of(inputs, given)))
    return made_of(run, out, lse, problem)
