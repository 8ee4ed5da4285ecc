"""The levels of a cascade: what they must be, and each as the arguments of an attention of its own.

All levels but the last are attention that is not causal, of groups of rows over keys that they share; the last one is
what ``prefill`` is. Checks are those of ``arguments``, whose errors then name the level.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kernel_reference.checks import MemoryOverlap, check_same_dtype, fail
from prefix_prefill.arguments import PrefillNumbers, PrefillTensors, check_prefill
from prefix_prefill.plan import Problem
from prefix_prefill.values import check_values

Tensor = torch.Tensor


class CascadeLevel(NamedTuple):
    """One level of a cascade, which cuts the rows into groups that share its keys, as ``prefix_prefill`` takes them.

    ``k_cache``, ``v_cache``: pages; ``block_table`` [G, max_blocks]: those of each group; ``cu_seqlens_q`` [G + 1]: its
    rows; ``seqlens_k`` [G]: its keys.
    """

    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    seqlens_k: Tensor


class CascadeTensors(NamedTuple):
    """The tensors of the op ``cascade``, whose lists are one level after another here."""

    q: Tensor
    levels: tuple[CascadeLevel, ...]
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    out_scale: Tensor | None
    out: Tensor
    lse: Tensor | None
    draft_mask: Tensor | None


class CascadeNumbers(NamedTuple):
    """What the op ``cascade`` takes behind its tensors, as ``PrefillNumbers`` has it."""

    max_seqlen_q: int
    page_layout: str
    softmax_scale: float
    softcap: float
    k_scale: float
    v_scale: float
    out_scale: float
    num_splits: int


_EACH, _BEHIND = len(CascadeLevel._fields), len(CascadeTensors._fields) - 2


def cascade_arguments(given: tuple[Any, ...]) -> tuple[CascadeTensors, CascadeNumbers]:
    """The arguments of the op ``cascade`` by name."""
    levels = tuple(map(CascadeLevel, *given[1 : 1 + _EACH]))
    behind, numbers = given[1 + _EACH : 1 + _EACH + _BEHIND], given[1 + _EACH + _BEHIND :]
    return CascadeTensors(given[0], levels, *behind), CascadeNumbers(*numbers)


def flat(tensors: CascadeTensors) -> tuple[Tensor | None, ...]:
    """All of them in one tuple."""
    q, levels, *behind = tensors
    return q, *[tensor for level in levels for tensor in level], *behind


def from_flat(tensors: tuple[Any, ...]) -> CascadeTensors:
    """What :func:`flat` was made of."""
    own = tensors[1:-_BEHIND]
    levels = tuple(CascadeLevel(*own[i : i + _EACH]) for i in range(0, len(own), _EACH))
    return CascadeTensors(tensors[0], levels, *tensors[-_BEHIND:])


def tensors_of_levels(tensors: CascadeTensors) -> list[PrefillTensors]:
    """Each level as an attention of its own; sinks, lse and the mask of drafts are the last one's."""
    q, levels, sinks, k_scale, v_scale, out_scale, out, lse, draft_mask = tensors
    scales = (k_scale, v_scale, out_scale)
    return [
        *[PrefillTensors(q, None, None, *level, None, None, *scales, out, None) for level in levels[:-1]],
        PrefillTensors(q, None, None, *levels[-1], None, sinks, *scales, out, lse, draft_mask),
    ]


def _numbers_of(tensors: CascadeTensors, numbers: CascadeNumbers, last: bool) -> PrefillNumbers:
    return PrefillNumbers(
        max_seqlen_q=numbers.max_seqlen_q if last else tensors.q.shape[0],
        page_layout=numbers.page_layout,
        softmax_scale=numbers.softmax_scale,
        left=-1,
        right=0 if last else -1,
        softcap=numbers.softcap,
        skip_decode=False,
        k_scale=numbers.k_scale,
        v_scale=numbers.v_scale,
        out_scale=numbers.out_scale,
        num_splits=numbers.num_splits,
    )


@contextmanager
def _naming_level(i: int) -> Iterator[None]:
    """Errors about an argument that each level has name the level."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if str(error).startswith(CascadeLevel._fields):
            raise type(error)(f"levels[{i}].{error}") from None
        raise


def check_cascade(tensors: CascadeTensors, numbers: CascadeNumbers) -> list[Problem]:
    """The problem of each level."""
    if not tensors.levels:
        fail("levels", "one level or more", "none")
    problems: list[Problem] = []
    for i, level in enumerate(tensors_of_levels(tensors)):
        last = i + 1 == len(tensors.levels)
        with _naming_level(i):
            problem = check_prefill(level, _numbers_of(tensors, numbers, last))
            check_same_dtype("k_cache", level.k_cache, "levels[0].k_cache", tensors.levels[0].k_cache)
            if problems and problem.num_heads_kv != problems[0].num_heads_kv:
                wanted = f"of {problems[0].num_heads_kv} kv heads as levels[0].k_cache is"
                fail("k_cache", wanted, problem.num_heads_kv)
        problems.append(replace(problem, shared=not last, carried=i if last else 0))
    return problems


def check_cascade_values(tensors: CascadeTensors, numbers: CascadeNumbers) -> None:
    """What only device memory tells."""
    for i, level in enumerate(tensors_of_levels(tensors)):
        last = i + 1 == len(tensors.levels)
        with _naming_level(i):
            check_values(level, _numbers_of(tensors, numbers, last), shared=not last)


def overlap_of_cascade(tensors: CascadeTensors) -> MemoryOverlap:
    """What refuses results that share memory with an argument; called with what :func:`flat` gives."""
    names = ["q", *[f"levels[{i}].{name}" for i in range(len(tensors.levels)) for name in CascadeLevel._fields]]
    named = zip([*names, *CascadeTensors._fields[2:]], flat(tensors), strict=True)
    return MemoryOverlap(dict(named), ("out", "lse"))
