"""What arguments.py does, for decode steps and drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gdn_split.arguments import (
    FLOATS,
    check_convolution,
    check_positive,
    check_projections,
    check_sizes,
    check_slot_values,
    what_fits,
)
from gdn_split.plan import GroupShape, StepPlan, StepProblem
from gdn_split.tensors import Commit, Step
from kernel_reference.checks import (
    MemoryOverlap,
    check_choice,
    check_dtype,
    check_elements_apart,
    check_float,
    check_same_device,
    describe,
    fail,
    known,
)
from kernel_reference.gated_delta import STATE_LAYOUTS
from kernel_reference.ragged import read_integers

Tensor = torch.Tensor

MAX_HEAD_SIZE = 256
# A kernel has the nodes of a tree as bits.
MAX_DRAFTS = 16
_WRITTEN = {
    "decode_step": ("conv_state", "state_pool", "out"),
    "verify": ("out",),
    "commit": ("conv_state", "state_pool"),
}


# What an op is given behind its tensors: tokens_per_sequence, silu, qk_norm, state_layout, scale and norm_eps, and then
# the sizes that arguments.py speaks of.


def check_step(op: str, t: Step | Commit, *numbers: Any) -> StepProblem:
    """The tensors and numbers of the op ``decode_step``, ``verify`` or ``commit``."""
    tokens, silu, qk_norm, state_layout, scale, norm_eps, *sizes = numbers
    shape = check_sizes(*sizes[:5])
    check_projections(t.mixed_qkvz, t.mixed_ba, shape)
    for name, size in (("head_qk", shape.head_qk), ("head_v", shape.head_v)):
        if size > MAX_HEAD_SIZE:
            fail(name, f"at most {MAX_HEAD_SIZE}", size)
    check_dtype("mixed_ba", t.mixed_ba, *FLOATS)
    given = (t.mixed_qkvz, t.conv_state, t.conv_weight, t.conv_bias, t.slots, tokens, shape)
    check_convolution(*given)
    if op != "decode_step" and tokens > MAX_DRAFTS:
        fail("tokens_per_sequence", f"at most {MAX_DRAFTS} drafts", tokens)
    _check_state(t, state_layout, shape)
    per_head = {"A_log": (t.A_log, shape.num_heads_v), "dt_bias": (t.dt_bias, shape.num_heads_v)}
    if isinstance(t, Step) and t.norm_weight is not None:
        per_head["norm_weight"] = (t.norm_weight, shape.head_v)
    for name, (tensor, length) in per_head.items():
        check_dtype(name, tensor, *FLOATS)
        check_same_device(name, tensor, "mixed_qkvz", t.mixed_qkvz)
        if tensor.shape != (length,) or (length > 1 and tensor.stride(0) != 1):
            fail(name, f"[{length}], contiguous", describe(tensor))
    check_float("scale", scale)
    check_float("norm_eps", norm_eps)
    sequences, path_length, out_strides = t.slots.shape[0], tokens, None
    if isinstance(t, Step):
        _check_out(t.out, t.mixed_qkvz, shape)
        out_strides = (t.out.stride(0), t.out.stride(1))
        if t.parents is not None:
            _check_integers("parents", t.parents, (sequences, tokens), t)
    else:
        _check_integers("accepted", t.accepted, (sequences,), t)
        if t.path is not None:
            if t.path.ndim != 2 or known(t.path.shape[1] > tokens):
                fail("path", f"[{sequences}, P] with at most {tokens} tokens P", describe(t.path))
            path_length = t.path.shape[1]
            _check_integers("path", t.path, (sequences, path_length), t)
    s_slot, s_head, *inner = t.state_pool.stride()
    problem = StepProblem(
        shape, sequences, tokens, min(t.conv_state.shape[0], t.state_pool.shape[0]),
        (t.mixed_qkvz.stride(0), t.mixed_ba.stride(0)), t.conv_state.stride(), t.conv_weight.stride(),
        (s_slot, s_head, *(inner if state_layout == "KV" else inner[::-1])), t.state_pool.element_size(), out_strides,
        t.conv_weight.shape[1], sizes[4] == "interleaved", silu, qk_norm,
        isinstance(t, Step) and t.norm_weight is not None, float(scale), float(norm_eps), op != "verify", path_length,
    )  # fmt: skip
    plan = StepPlan.from_ints(sizes[5] if len(sizes) > 5 else None)
    if plan is not None and not plan.covers(problem):
        fail("plan", f"one made for {shape} and this state_pool", plan)
    return problem


def overlap(op: str, t: Step | Commit) -> MemoryOverlap:
    """What refuses tensors of which one that is written shares memory with another."""
    return MemoryOverlap(t._asdict(), _WRITTEN[op])


def check_values(t: Step | Commit, path_length: int) -> None:
    """What only device memory tells: slots, parents, and what is accepted. Copies them to the host."""
    check_slot_values(t.slots, min(t.conv_state.shape[0], t.state_pool.shape[0]))
    tokens = t.mixed_qkvz.shape[0] // max(1, t.slots.shape[0])
    if isinstance(t, Step):
        if t.parents is not None:
            for i, parent in enumerate(read_integers({"parents": t.parents})["parents"]):
                sequence, node = divmod(i, tokens)
                if not -1 <= parent < node:
                    fail(f"parents[{sequence}, {node}]", f"from -1 (the states of the pools) to {node - 1}", parent)
        return
    for sequence, count in enumerate(read_integers({"accepted": t.accepted})["accepted"]):
        if not 0 <= count <= path_length:
            fail(f"accepted[{sequence}]", f"from 0 to {path_length}", count)
        if t.path is None:
            continue
        before = -1
        for i, node in enumerate(t.path[sequence, :count].tolist()):
            if not before < node < tokens:
                wanted = f"from {before + 1} to {tokens - 1}: a token comes behind the one that it continues"
                fail(f"path[{sequence}, {i}]", wanted, node)
            before = node


def _check_state(t: Step | Commit, state_layout: str, shape: GroupShape) -> None:
    check_choice("state_layout", state_layout, STATE_LAYOUTS)
    pool = t.state_pool
    check_dtype("state_pool", pool, *FLOATS)
    check_same_device("state_pool", pool, "mixed_qkvz", t.mixed_qkvz)
    inner = (shape.head_qk, shape.head_v)
    tail = (shape.num_heads_v, *(inner if state_layout == "KV" else inner[::-1]))
    if pool.ndim != 4 or pool.shape[1:] != tail:
        other = pool.ndim == 4 and pool.shape[1:] == (tail[0], tail[2], tail[1])
        hint = f'; state_layout="{"VK" if state_layout == "KV" else "KV"}" would fit' if other else ""
        hint = hint or what_fits("state_pool", pool, (None, *tail))
        fail("state_pool", f"[num_slots, {', '.join(map(str, tail))}]", describe(pool) + hint)
    check_elements_apart("state_pool", pool)


def _check_out(out: Tensor, mixed_qkvz: Tensor, shape: GroupShape) -> None:
    tail = (shape.num_heads_v, shape.head_v)
    if out.ndim != 3 or out.shape[1:] != tail or known(out.shape[0] != mixed_qkvz.shape[0]):
        fail("out", f"[{mixed_qkvz.shape[0]}, {tail[0]}, {tail[1]}]", describe(out))
    check_same_device("out", out, "mixed_qkvz", mixed_qkvz)
    check_dtype("out", out, *FLOATS)
    if shape.head_v > 1 and out.stride(2) != 1:
        fail("out", "contiguous in each head (the strides of rows and heads are free)", describe(out))
    check_elements_apart("out", out)


def _check_integers(name: str, tensor: Tensor, shape: Sequence[int], t: Step | Commit) -> None:
    check_dtype(name, tensor, torch.int32, torch.int64)
    check_same_device(name, tensor, "mixed_qkvz", t.mixed_qkvz)
    if tensor.shape != tuple(shape) or not tensor.is_contiguous():
        fail(name, f"[{', '.join(map(str, shape))}], contiguous", describe(tensor))


def check_drafts(tokens: object) -> None:
    """The number of a sequence's drafts."""
    check_positive(tokens_per_sequence=tokens)
