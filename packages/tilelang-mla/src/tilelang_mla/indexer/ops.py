"""The torch ops of the indexer: their schemas, and what they do on a CPU, on a GPU, and while torch.compile traces.

============  ======================================================================
index_scores  writes the score of each query token and key of a paged cache
index_topk    writes the positions of the highest scores, or where these are in the pool
============  ======================================================================
"""

from __future__ import annotations

from typing import Any

import torch

from kernel_reference.checks import MemoryOverlap, check_no_overlap, values_are_checked
from kernel_reference.dispatch import PreparedLaunches, implement, launch_module
from tilelang_mla.indexer import reference
from tilelang_mla.indexer.arguments import (
    ScoresOptions,
    ScoresTensors,
    TopkOptions,
    TopkTensors,
    check_scores,
    check_scores_values,
    check_topk,
    check_topk_values,
)

_library = torch.library.Library("tilelang_mla", "FRAGMENT")
_library.define(
    "index_scores(Tensor q, Tensor k_cache, Tensor weights, Tensor lengths, Tensor block_table, Tensor? cu_seqlens_q,"
    " Tensor(a!) out, bool clean_logits, int[]? plan=None) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "index_topk(Tensor scores, Tensor lengths, Tensor? block_table, Tensor? cu_seqlens_q, Tensor(a!) out,"
    " int page_size) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_SCORES, _TOPK = len(ScoresTensors._fields), len(TopkTensors._fields)
_WRITTEN = ("out",)

launches = PreparedLaunches()


def _launch_module() -> Any:
    # The package's own module of launches says what is missing.
    launch_module("tilelang_mla", "TileLang, which tilelang-mla[tilelang] brings")
    from tilelang_mla.indexer import launch

    return launch


# Scores


def _fake_scores(*given: Any) -> None:
    check_scores(ScoresTensors(*given[:_SCORES]), ScoresOptions(*given[_SCORES:]))


def _reference_scores(*given: Any) -> None:
    tensors = ScoresTensors(*given[:_SCORES])
    problem, _ = check_scores(tensors, ScoresOptions(*given[_SCORES:]))
    check_no_overlap(tensors._asdict(), _WRITTEN)
    if values_are_checked(tensors.q.device):
        check_scores_values(problem, tensors)
    reference.scores(problem, tensors)


def _prepare_scores(given: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = _launch_module()
    tensors = ScoresTensors(*given)
    problem, plan = check_scores(tensors, ScoresOptions(*numbers))
    return launch.prepare_scores(problem, plan, tensors), MemoryOverlap(tensors._asdict(), _WRITTEN), problem


def scores_now(*given: Any) -> None:
    """The op on a GPU, called at once: see ``kernel_reference.dispatch.runs_now``."""
    tensors = given[:_SCORES]
    run, check_overlap, problem = launches.find(_prepare_scores, tensors, given[_SCORES:])
    check_overlap(*tensors)
    if values_are_checked(tensors[0].device):
        check_scores_values(problem, ScoresTensors(*tensors))
    run(*tensors)


# Top-k


def _fake_topk(*given: Any) -> None:
    check_topk(TopkTensors(*given[:_TOPK]), TopkOptions(*given[_TOPK:]))


def _reference_topk(*given: Any) -> None:
    tensors = TopkTensors(*given[:_TOPK])
    problem = check_topk(tensors, TopkOptions(*given[_TOPK:]))
    check_no_overlap(tensors._asdict(), _WRITTEN)
    if values_are_checked(tensors.scores.device):
        check_topk_values(problem, tensors)
    reference.topk(problem, tensors)


def _prepare_topk(given: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    launch = _launch_module()
    tensors = TopkTensors(*given)
    problem = check_topk(tensors, TopkOptions(*numbers))
    return launch.prepare_topk(problem, tensors), MemoryOverlap(tensors._asdict(), _WRITTEN), problem


def topk_now(*given: Any) -> None:
    """The same of the top-k."""
    tensors = given[:_TOPK]
    run, check_overlap, problem = launches.find(_prepare_topk, tensors, given[_TOPK:])
    check_overlap(*tensors)
    if values_are_checked(tensors[0].device):
        check_topk_values(problem, TopkTensors(*tensors))
    run(*tensors)


implement(_library, "index_scores", reference=_reference_scores, kernel=scores_now, fake=_fake_scores)
implement(_library, "index_topk", reference=_reference_topk, kernel=topk_now, fake=_fake_topk)
