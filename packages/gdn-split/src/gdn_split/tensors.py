"""The tensors of each op, in its order: what checks, references and launches take as one argument."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Split(NamedTuple):
    """The fused projections and, if allocated, their parts."""

    mixed_qkvz: Tensor
    mixed_ba: Tensor
    mixed_qkv: Tensor | None = None
    z: Tensor | None = None
    b: Tensor | None = None
    a: Tensor | None = None


class Merge(NamedTuple):
    """The parts and, if allocated, the fused projections."""

    mixed_qkv: Tensor
    z: Tensor
    b: Tensor
    a: Tensor
    mixed_qkvz: Tensor | None = None
    mixed_ba: Tensor | None = None


class Convolve(NamedTuple):
    """The fused projections of new tokens, the convolution, each sequence's slot of its state, and the parts."""

    mixed_qkvz: Tensor
    mixed_ba: Tensor
    conv_state: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    slots: Tensor
    mixed_qkv: Tensor
    z: Tensor
    b: Tensor
    a: Tensor


class Step(NamedTuple):
    """The fused projections of new tokens, a layer's weights, each sequence's slot of both states, and the results.

    A verification has ``parents`` too, where drafts branch.
    """

    mixed_qkvz: Tensor
    mixed_ba: Tensor
    conv_state: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    state_pool: Tensor
    slots: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor | None
    out: Tensor
    parents: Tensor | None = None


class Commit(NamedTuple):
    """The same of a commit: how many drafts are accepted and, where they branch, on which path."""

    mixed_qkvz: Tensor
    mixed_ba: Tensor
    conv_state: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    state_pool: Tensor
    slots: Tensor
    A_log: Tensor
    dt_bias: Tensor
    accepted: Tensor
    path: Tensor | None = None


class Prefill(NamedTuple):
    """The fused projections of packed sequences, a layer's weights, and the inputs before the sequences."""

    mixed_qkvz: Tensor
    mixed_ba: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    cu_seqlens: Tensor
    conv_state: Tensor | None
    slots: Tensor | None
    has_initial_state: Tensor | None
    A_log: Tensor
    dt_bias: Tensor


class PrefillGradients(NamedTuple):
    """The gradients of q, k, v, z, g and beta, packed."""

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    g: Tensor
    beta: Tensor
