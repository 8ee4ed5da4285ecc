"""The torch ops of gradients.

===========================  ===============================
selected_attention           functional, differentiable
selected_attention_backward  the gradients of that
===========================  ===============================
"""

from __future__ import annotations

from typing import Any

import torch

from blocksparse_attn.selected import ops
from blocksparse_attn.selected.gradients import reference
from blocksparse_attn.selected.gradients.arguments import (
    Inputs,
    check_attention,
    check_backward,
    new_gradients,
    new_results,
)
from kernel_reference.differentiable import Parts, differentiable

Tensor = torch.Tensor


def _compute(attend: Any, inputs: Inputs, numbers: tuple[Any, ...], out: Tensor, lse: Tensor) -> None:
    # An 8-bit cache is refused before anything is written.
    check_attention(inputs, numbers)
    attend(*inputs, out, lse, *numbers)


attention, backward_now, _library = differentiable(
    "blocksparse_attn",
    "selected_attention",
    Parts(
        tensors=(
            "Tensor q, Tensor k_cache, Tensor v_cache, Tensor indices, Tensor block_table, Tensor cu_seqlens_q,"
            " Tensor seqlens_k, Tensor? sinks, Tensor? k_scale, Tensor? v_scale"
        ),
        numbers="int block_size, str page_layout, bool causal, float softmax_scale, float k_factor, float v_factor",
        more="int[]? plan=None",
        Inputs=Inputs,
        gradients=("q", "k_cache", "v_cache", "sinks"),
        attends=(torch.ops.blocksparse_attn.selected.default, ops.attend_now),
        compute=_compute,
        check_attention=check_attention,
        check_backward=check_backward,
        new_results=new_results,
        new_gradients=new_gradients,
        reference=reference.backward,
        room=("blocksparse_attn.selected.gradients",),
    ),
)
