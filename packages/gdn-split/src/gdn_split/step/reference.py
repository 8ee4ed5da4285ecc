"""What reference.py does, for decode steps and drafts: kernel_reference's steps in float32."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gdn_split import derivatives
from gdn_split.step import arguments
from gdn_split.tensors import Commit, Step
from kernel_reference import gated_delta
from kernel_reference.checks import values_are_checked


class _Given(NamedTuple):
    """Behind the tensors, what the steps of kernel_reference take."""

    sizes: gated_delta.Sizes
    layer: gated_delta.Layer
    options: gated_delta.Options
    tokens: int


def decode_step(*given: Any) -> None:
    """The op ``decode_step``."""
    t = Step(*given[:11])
    to = _checked("decode_step", t, given[11:])
    out = gated_delta.decode_step(t.mixed_qkvz, t.mixed_ba, t.conv_state, t.state_pool, t.slots, *to)
    t.out.copy_(out)


def verify(*given: Any) -> None:
    """The op ``verify``."""
    t = Step(*given[:12])
    to = _checked("verify", t, given[12:])
    out = gated_delta.verify(
        t.mixed_qkvz, t.mixed_ba, t.conv_state, t.state_pool, t.slots, *to, parents=t.parents
    )  # fmt: skip
    t.out.copy_(out)


def commit(*given: Any) -> None:
    """The op ``commit``."""
    t = Commit(*given[:11])
    to = _checked("commit", t, given[11:])
    gated_delta.commit(
        t.mixed_qkvz, t.mixed_ba, t.conv_state, t.state_pool, t.slots, t.accepted, *to, path=t.path
    )  # fmt: skip


def _checked(op: str, t: Step | Commit, numbers: tuple[Any, ...]) -> _Given:
    problem = arguments.check_step(op, t, *numbers)
    derivatives.refuse_tangents(t._fields, t)
    arguments.overlap(op, t)(*t)
    if values_are_checked(t.mixed_qkvz.device):
        arguments.check_values(t, problem.path_length)
    tokens, silu, qk_norm, state_layout, scale, norm_eps, *sizes = numbers
    norm_weight = t.norm_weight if isinstance(t, Step) else None
    activation = "silu" if silu else None
    options = gated_delta.Options(norm_weight, norm_eps, qk_norm, scale, activation, state_layout, torch.float32)
    layer = gated_delta.Layer(t.conv_weight, t.conv_bias, t.A_log, t.dt_bias)
    return _Given(gated_delta.Sizes(*sizes[:5]), layer, options, tokens)
