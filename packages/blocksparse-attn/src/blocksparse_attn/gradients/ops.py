"""The torch ops of gradients.

==================  ====================================
attention           functional, differentiable
attention_backward  the gradients of attention
==================  ====================================
"""

from __future__ import annotations

from typing import Any

import torch

from blocksparse_attn import ops
from blocksparse_attn.gradients import reference
from blocksparse_attn.gradients.arguments import (
    Inputs,
    check_attention,
    check_backward,
    new_gradients,
    new_results,
    options_of,
)
from kernel_reference.differentiable import Parts, differentiable

Tensor = torch.Tensor


def _compute(attend: Any, inputs: Inputs, numbers: tuple[Any, ...], out: Tensor, lse: Tensor) -> None:
    attend(*inputs.attending(out, lse), *options_of(numbers))


attention, backward_now, _library = differentiable(
    "blocksparse_attn",
    "attention",
    Parts(
        tensors=(
            "Tensor q, Tensor k, Tensor v, Tensor crow, Tensor col, Tensor crow_t, Tensor col_t, Tensor? cu_seqlens_q,"
            " Tensor? cu_seqlens_k, Tensor? q_starts, Tensor? q_ends, Tensor? k_starts, Tensor? k_ends, Tensor? sinks"
        ),
        numbers=(
            "SymInt max_seqlen_q, int q_block, int k_block, float softmax_scale, int left, int right, float softcap"
        ),
        more="int num_splits, bool scattered, int[]? plan=None",
        Inputs=Inputs,
        gradients=("q", "k", "v", "sinks"),
        attends=(torch.ops.blocksparse_attn.attend.default, ops.attend_now),
        compute=_compute,
        check_attention=check_attention,
        check_backward=check_backward,
        new_results=new_results,
        new_gradients=new_gradients,
        reference=reference.backward,
        room=("blocksparse_attn.gradients",),
    ),
)
