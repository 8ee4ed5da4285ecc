"""Drafts of decode steps: their outputs with both states untouched, and both states advanced by what was accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from steps import DTYPE, EPS, OURS, WIDTH, Setup, Stepped, inputs

from gdn_split import gdn_commit, gdn_verify
from gdn_split.plan import GroupShape
from kernel_reference import gated_delta
from kernel_reference.bench import Case


@dataclass
class Drafted:
    """A step's inputs, of drafts; ``parents`` of drafts that branch, and how many of those in a row are accepted."""

    of: Stepped
    parents: torch.Tensor | None
    accepted: torch.Tensor


def drafted(device: torch.device, setup: Setup, branching: bool) -> Drafted:
    """Of drafts that branch two continue each: 0 the pools' states, 1 and 2 draft 0, 3 and 4 draft 1 ..."""
    shape = (setup.sequences, setup.tokens)
    parents = ((torch.arange(setup.tokens, device=device) - 1) // 2).expand(shape).int().contiguous()
    accepted = torch.arange(setup.sequences, device=device, dtype=torch.int32) % (setup.tokens + 1)
    return Drafted(inputs(device, setup), parents if branching else None, accepted)


def verify(i: Drafted, setup: Setup) -> tuple[torch.Tensor, ...]:
    s = i.of
    out = gdn_verify(
        s.qkvz, s.ba, s.conv_state, s.weight, None, s.pool, s.slots, s.a_log, s.dt_bias, *setup.sizes,
        tokens_per_sequence=setup.tokens, parents=i.parents, norm_weight=s.norm,
    )  # fmt: skip
    return out, s.conv_state, s.pool


def commit(i: Drafted, setup: Setup) -> tuple[torch.Tensor, ...]:
    s = i.of
    gdn_commit(
        s.qkvz, s.ba, s.conv_state, s.weight, None, s.pool, s.slots, s.a_log, s.dt_bias, i.accepted, *setup.sizes,
        tokens_per_sequence=setup.tokens,
    )  # fmt: skip
    return s.conv_state, s.pool


def _oracle(i: Drafted, setup: Setup) -> tuple[Any, ...]:
    s = i.of
    layer = gated_delta.Layer(s.weight, None, s.a_log, s.dt_bias)
    return gated_delta.Sizes(*setup.sizes), layer, gated_delta.Options(s.norm, EPS), setup.tokens


def check_verified(outputs: tuple[torch.Tensor, ...], i: Drafted, setup: Setup) -> float:
    """Units of bfloat16's rounding, of 1 for small outputs."""
    s = i.of
    out, *states = outputs
    if not all(torch.equal(*pair) for pair in zip(states, (s.conv_state, s.pool), strict=True)):
        raise AssertionError("a state has changed")
    given = (s.qkvz, s.ba, s.conv_state.double(), s.pool.double(), s.slots)
    wanted = gated_delta.verify(*given, *_oracle(i, setup), parents=i.parents)
    return ((out.double() - wanted).abs() / wanted.abs().clamp(min=1) / 2**-8).max().item()


def check_committed(outputs: tuple[torch.Tensor, ...], i: Drafted, setup: Setup) -> float:
    """How far the states are from the definition's."""
    s = i.of
    conv_state, pool = s.conv_state.double(), s.pool.double()
    gated_delta.commit(s.qkvz, s.ba, conv_state, pool, s.slots, i.accepted, *_oracle(i, setup))
    if not torch.equal(outputs[0].double(), conv_state):
        raise AssertionError("the convolution's state differs")
    return ((outputs[1].double() - pool).abs() / pool.abs().clamp(min=1)).max().item()


def _bytes_of(setup: Setup, accepted: int, commits: bool) -> int:
    """A verification reads states and drafts and writes outputs; a commit reads and writes what has moved on."""
    s = setup.shape
    state = (s.num_heads_v * s.head_qk * s.head_v * setup.state.itemsize) + s.qkv_width * (WIDTH - 1) * DTYPE.itemsize
    moved = sum(min(n % (setup.tokens + 1), 1) for n in range(setup.sequences))
    row = (s.qkvz_width + s.ba_width) * DTYPE.itemsize
    of_weights = s.qkv_width * WIDTH * DTYPE.itemsize
    if commits:
        return 2 * moved * state + accepted * (row - s.num_heads_v * s.head_v * DTYPE.itemsize) + of_weights
    rows = setup.sequences * setup.tokens
    return setup.sequences * state + rows * (row + s.num_heads_v * s.head_v * DTYPE.itemsize) + of_weights


def draft_cases(device: torch.device, shape: GroupShape) -> Iterator[Case]:
    """Four drafts of 64 sequences and 16 of 16, in a row and branching; commits of none to all of them."""
    for sequences, tokens in ((64, 4), (16, 16)):
        setup = Setup(sequences, shape, tokens)
        accepted = sum(n % (tokens + 1) for n in range(sequences))
        kinds: list[tuple[str, bool, Callable[..., Any], Callable[..., float], float]] = [
            ("verify", False, verify, check_verified, 24.0),
            ("verify a tree of", True, verify, check_verified, 24.0),
            ("commit", False, commit, check_committed, 0.03),
        ]
        for name, branching, call, check, tolerance in kinds:
            yield Case(
                name=f"{name} {tokens} drafts of {sequences} sequences, float32 states",
                shape={"model": "Qwen3-Next", "sequences": sequences, "drafts": tokens},
                make_inputs=partial(drafted, device, setup, branching),
                ours={OURS: partial(call, setup=setup)},
                peers={},
                check=partial(check, setup=setup),
                tolerance=tolerance,
                bytes_moved=_bytes_of(setup, accepted, call is commit),
                in_graph=True,
            )
