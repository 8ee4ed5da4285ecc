"""The torch ops of gradients.

==================  ====================================
attention           functional, differentiable
attention_backward  the gradients of attention
==================  ====================================
"""

from __future__ import annotations

from typing import Any

import torch

from kernel_reference.checks import fail
from kernel_reference.differentiable import Parts, differentiable
from tilelang_mla import ops
from tilelang_mla.gradients import reference
from tilelang_mla.gradients.arguments import (
    Inputs,
    check_attention,
    check_backward,
    new_gradients,
    new_results,
)
from tilelang_mla.gradients.plan import MOST_COLUMNS


def _on_gpu(*given: Any) -> None:
    # Before anything runs: its backward would refuse them.
    if given[0].shape[2] + given[2].shape[2] > MOST_COLUMNS:
        sizes = [given[0].shape[2], given[2].shape[2]]
        fail("q", f"of heads of at most {MOST_COLUMNS} with those of v, for a gradient", sizes)
    ops.prefill_now(*given)


attention, backward_now, _library = differentiable(
    "tilelang_mla",
    "attention",
    Parts(
        tensors="Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k",
        numbers="SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, bool causal",
        more="int[]? plan=None",
        Inputs=Inputs,
        gradients=("q", "k", "v"),
        attends=(torch.ops.tilelang_mla.prefill.default, _on_gpu),
        check_attention=check_attention,
        check_backward=check_backward,
        new_results=new_results,
        new_gradients=new_gradients,
        reference=reference.backward,
        room=("tilelang_mla.gradients", "TileLang, which tilelang-mla[tilelang] brings"),
    ),
)
