"""What gradients of prefill cost, beside cuDNN's and FlexAttention's.

Gradients of q, k and v of one layer of DeepSeek-V3, by autograd through a forward pass that is not timed. FLOP are
those of five products over each pair that is seen. Results are held to float64 on the first head.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import dense
import torch

from kernel_reference.attention_gradients import attention_gradients
from kernel_reference.bench import Case, Requirement
from tilelang_mla import flash_mla_varlen_func

Tensor = torch.Tensor
Tensors = tuple[Tensor, ...]
CUDNN, FLEX = "cuDNN, backward", "FlexAttention, backward"
# Of a row's largest value.
ERROR_AT_MOST = 0.02
# The least speed beside each.
TARGETS = {CUDNN: 0.8, FLEX: 1.3}
# (heads, lengths).
PROMPTS = ((32, (8192,)), (32, (2048,) * 4), (128, (4096,)))
RAGGED = tuple(range(100, 2000, 80))


@dataclass(eq=False)
class Training:
    """Prompts whose q, k and v want gradients, and that of the output. ``graphs``: forward passes once made."""

    prompt: dense.Prompt
    d_out: Tensor
    graphs: dict[str, tuple[Tensor, Tensors, Tensor]] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Training:
        # A copy makes its own graphs: torch does not copy tensors that hang on one.
        parts = [getattr(self, part.name) for part in fields(self) if part.name != "graphs"]
        return Training(*copy.deepcopy(parts, memo))


def make_inputs(device: torch.device, shape: dense.Shape) -> Training:
    prompt = dense.make_prompt(device, shape)
    return Training(prompt, torch.randn_like(prompt.v))


def gradients(i: Training, label: str, forward: Callable[[Tensors], Tensor], padded: bool = False) -> Tensors:
    """Only the backward pass is timed: a set's second turn finds its graph, and the first is never timed.

    padded: prompts as a batch [B, H, T, D].
    """
    if i.d_out.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("autograd runs a backward on the stream of its forward, which is not this one")
    if label not in i.graphs:
        p = i.prompt
        rows = [p.q, p.k, p.v, i.d_out]
        if padded:
            rows = [x.unflatten(0, (len(p.shape.lengths), -1)).transpose(1, 2).contiguous() for x in rows]
        *leaves, d_out = (x.detach() for x in rows)
        for leaf in leaves:
            leaf.requires_grad_()
        i.graphs[label] = forward(tuple(leaves)), tuple(leaves), d_out
    out, leaves, d_out = i.graphs[label]
    found = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
    return tuple(x.transpose(1, 2).flatten(0, 1) for x in found) if padded else found


def ours(i: Training) -> Tensors:
    p = i.prompt

    def forward(leaves: Tensors) -> Tensor:
        return flash_mla_varlen_func(*leaves, p.cu_seqlens, p.cu_seqlens, p.most, p.most, p.shape.scale, True)

    return gradients(i, dense.OURS, forward)


def cudnn() -> Callable[[Training], Tensors]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def call(i: Training) -> Tensors:
        def forward(leaves: Tensors) -> Tensor:
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
                return torch.nn.functional.scaled_dot_product_attention(
                    *leaves, is_causal=True, scale=i.prompt.shape.scale
                )

        return gradients(i, CUDNN, forward, padded=True)

    return call


def flex(device: torch.device, shape: dense.Shape) -> Callable[[Training], Tensors]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens = shape.lengths[0]
    seen = create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device=device)
    attend = torch.compile(flex_attention, dynamic=False)

    def call(i: Training) -> Tensors:
        return gradients(i, FLEX, lambda leaves: attend(*leaves, block_mask=seen, scale=shape.scale), padded=True)

    return call


_kept: WeakKeyDictionary[Training, Tensors] = WeakKeyDictionary()


def check(outputs: Tensors, i: Training) -> float:
    """The largest error of a row of the first head, over the row's largest value."""
    p = i.prompt
    if i not in _kept:
        own = [x.detach()[:, :1] for x in (p.q, p.k, p.v, i.d_out)]
        bounds = {"cu_seqlens_q": p.cu_seqlens, "cu_seqlens_k": p.cu_seqlens}
        _kept[i] = tuple(attention_gradients(*own, **bounds, softmax_scale=p.shape.scale)[:3])
    firsts = [row for begin in p.cu_seqlens[:-1].tolist() for row in range(begin, begin + 64)]
    worst = 0.0
    for got, exact in zip(outputs, _kept[i], strict=True):
        most = float(exact.abs().max())
        size = exact.abs().amax(-1, keepdim=True).clamp(min=1e-2 * most)
        # Of few keys nearly all of a query's gradient may cancel.
        size[firsts] = most
        worst = max(worst, float(((got[:, :1].double() - exact).abs() / size).max()))
    if not worst <= ERROR_AT_MOST:
        raise AssertionError(f"error {worst:.2g} of a row's largest value > {ERROR_AT_MOST:g}")
    return worst


def gradient_case(device: torch.device, shape: dense.Shape) -> Case:
    m, pairs = shape.model, sum(n * (n + 1) // 2 for n in shape.lengths)
    alike = len(set(shape.lengths)) == 1
    peers = {CUDNN: cudnn, FLEX: partial(flex, device, shape)} if alike else {}
    # q, k and v and their gradients; the output and its own.
    elements = sum(shape.lengths) * m.num_heads * (4 * m.head_qk + 4 * m.head_v)
    return Case(
        name=f"gradients of {shape.words}",
        shape={**shape.entry, "tokens": sum(shape.lengths)},
        make_inputs=partial(make_inputs, device, shape),
        ours={dense.OURS: ours},
        peers=peers,
        check=check,
        # The bound is the check's own, which raises.
        tolerance=math.inf,
        bytes_moved=elements * dense.DTYPE.itemsize,
        flops=2 * pairs * m.num_heads * (3 * m.head_qk + 2 * m.head_v),
        copy=False,
        baseline=CUDNN if alike else dense.OURS,
        requirements=[Requirement(dense.OURS, peer, speed_at_least=TARGETS[peer]) for peer in peers],
    )


def gradient_cases(device: torch.device) -> Iterator[Case]:
    for heads, lengths in PROMPTS:
        yield gradient_case(device, dense.Shape(dense.share(heads), lengths))
    yield gradient_case(device, dense.Shape(dense.share(32), RAGGED, name="B24 n100..1940"))


def cases(device: torch.device) -> Iterator[Case]:
    """For ``bench.run`` alone."""
    yield from gradient_cases(device)
