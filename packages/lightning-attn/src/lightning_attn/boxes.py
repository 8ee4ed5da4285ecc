"""How q, k, v and o come to the prefills for sm_90: in boxes of TMA and, where those are not worth it, by pointers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernel_reference.launching import TmaBox
from lightning_attn.fitting import takes_tokens
from lightning_attn.kernels.hopper_groups import Operands
from lightning_attn.kernels.schedule import Strides
from lightning_attn.plan import Operand, PrefillPlan, PrefillProblem
from lightning_attn.tensors import Prefill

Given = tuple[torch.Tensor | None, ...]


class Boxed(NamedTuple):
    """The boxes of a launch's first tensors, the strides that its kernel is told of, what gives these tensors, and
    those that travel as pointers, of q, k, v and o, and what groups the latter for the kernel.
    """

    boxes: list[TmaBox]
    strides: Strides
    given: Callable[[Prefill], Given]
    group: Callable[..., tuple[Any, ...]] | None


def prefill_boxes(problem: PrefillProblem, plan: PrefillPlan, strides: Strides) -> Boxed:
    """Those of a prefill."""
    # Of 128 columns by roles lanes store those beyond 64, where they are few.
    is_few = plan.roles and plan.block_e == 128 and problem.heads.head_qk > 64 and 0 < problem.heads.head_v - 64 <= 32
    columns = (plan.block_d, plan.block_d, plan.block_e, 64 if is_few else plan.block_e)
    operands = (problem.q, problem.k, problem.v, problem.o)
    boxes = [tma_box(operand, plan.chunk, width) for operand, width in zip(operands, columns, strict=True)]
    by_pointer = takes_tokens(problem)
    # Of the last piece by roles: half of its columns are boxes of their own, fewer are copied by lanes.
    rest = problem.heads.head_qk % plan.block_d if plan.roles else 0
    is_half, is_copied = 2 * rest == plan.block_d, 0 < 2 * rest < plan.block_d
    if is_half:
        boxes += [tma_box(operand, plan.chunk, rest) for operand in (problem.q, problem.k)]
    if not by_pointer:
        strides = strides._replace(v=None) if is_copied else strides._replace(q=None, k=None, v=None)

    def given(t: Prefill) -> Given:
        q, k, v, out = t[:4]
        last: Given = (q, k) if is_half else (None, None) if plan.roles else ()
        rows = (q, k, v) if by_pointer else (q, k, None) if is_copied else (None, None, None)
        # out travels as a pointer too: the rows of a last, short chunk are stored one by one.
        return (q, k, v, out, *last, *rows, out)

    group = None
    if plan.roles:
        group = _behind_six if is_half else _behind_four
    return Boxed(boxes, strides, given, group)


def _behind_four(q_last: Any, k_last: Any, q: Any, k: Any, v: Any, o: Any, *others: Any) -> tuple[Any, ...]:
    return (q_last, k_last, Operands(q, k, v, o), *others)


def _behind_six(q: Any, k: Any, v: Any, o: Any, *others: Any) -> tuple[Any, ...]:
    return (Operands(q, k, v, o), *others)


def tma_box(operand: Operand, rows: int, columns: int) -> TmaBox:
    """In a descriptor's order: [sequences, heads, rows, elements]."""
    (b, n, h, d), (s_b, s_n, s_h, s_d) = operand.sizes, operand.strides
    # The stride of a dimension of size 1 is never used, but must be a whole 16 bytes.
    strides = [8 if size == 1 else stride for size, stride in ((b, s_b), (h, s_h), (n, s_n))]
    return TmaBox((b, h, n, d), (*strides, s_d), (1, 1, rows, columns))
