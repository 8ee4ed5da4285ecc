"""Does ``max_seq_len`` size the launch, and nothing but the launch?"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import prefix_prefill
from kernel_reference.checks import validate_values
from kernel_reference.dispatch import PreparedLaunches
from prefix_prefill import launch, ops
from prefix_prefill.plan import DeviceLimits, PrefillPlan, Problem, plan_prefill

LENGTHS = [(20, 3), (70, 1)]
LONGEST = 71


@pytest.fixture
def planned(device, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Problem]]:
    """The problems that plans were made for; on a CPU its tensors are sent to the kernels, in Triton's interpreter."""
    problems: list[Problem] = []

    def plan(problem: Problem, limits: DeviceLimits, splits: int = 0) -> PrefillPlan:
        problems.append(problem)
        return plan_prefill(problem, limits, splits)

    monkeypatch.setattr(launch, "plan_prefill", plan)
    monkeypatch.setattr(ops, "launches", PreparedLaunches())
    library = None
    if device.type == "cpu":
        monkeypatch.setattr(launch, "device_limits", lambda device: DeviceLimits(1))
        library = torch.library.Library("prefix_prefill", "IMPL", "CPU")
        with warnings.catch_warnings():
            # torch says once that an implementation is replaced.
            warnings.simplefilter("ignore")
            library.impl("prefill", ops._kernel_prefill, allow_override=True)
    yield problems
    if library is not None:
        library._destroy()


def call(batch: Any, max_seq_len: int) -> None:
    tensors = (batch.q, batch.k, batch.v, batch.out.tensor, "auto", batch.k_cache, batch.v_cache)
    lengths = (batch.block_table, batch.cu_seqlens_q, batch.seqlens_k)
    prefix_prefill.context_attention_fwd(*tensors, *lengths, max_seq_len, batch.max_seqlen_q, None, None)
    batch.check()


def small(tensors: Any) -> Any:
    return tensors.batch(LENGTHS, heads=(2, 1), head_dim=16, page_layout="x-packed", lse=False, extra_columns=200)


def test_a_plan_reckons_with_as_many_keys_as_the_longest_sequence_may_have(tensors, planned) -> None:
    """A table has columns for the longest sequence that there can be; those of a call are far shorter."""
    batch = small(tensors)
    for most, reckoned in ((LONGEST, 128), (128, 128), (129, 256), (10**9, batch.block_table.shape[1] * batch.page)):
        call(batch, most)
        assert min(planned[-1].capacity, planned[-1].max_seqlen_k) == reckoned


def test_sequences_that_grow_find_the_launch_of_the_step_before(tensors, planned) -> None:
    batch = small(tensors)
    for most in range(LONGEST, 256, 20):
        call(batch, most)
    assert len(ops.launches) == len(planned) == 2


def test_a_bound_that_does_not_hold_is_named_where_values_are_looked_at_and_changes_no_result_elsewhere(
    tensors, planned
) -> None:
    batch = small(tensors)
    for most in (0, 23, LONGEST - 1):
        with validate_values(), pytest.raises(ValueError, match=rf"^max_seq_len must be at least \d+, .*, got {most}$"):
            call(batch, most)
        with validate_values(False):
            call(batch, most)


def test_a_shorter_bound_cuts_keys_in_fewer_parts() -> None:
    """One token behind a table of 131072 keys; 4096 are less work than so many programs cost."""
    device = DeviceLimits(132, 232448)
    wide = Problem(8, 1, 128, 16, 1, 1, 1, 131072)
    splits = [
        plan_prefill(problem, device).num_splits
        for problem in (wide, replace(wide, max_seqlen_k=4096), replace(wide, capacity=4096))
    ]
    assert splits[0] > splits[1] == splits[2]


def test_a_bound_of_few_keys_saves_the_launch_that_merges() -> None:
    """On sm_90 no tile of 500 keys is cut, whatever the table has room for."""
    device = DeviceLimits(132, 232448, hopper=True)
    wide = Problem(8, 1, 128, 16, 1, 1, 1, 131072, tma=True)
    splits = [
        plan_prefill(problem, device).num_splits
        for problem in (wide, replace(wide, max_seqlen_k=500), replace(wide, capacity=500))
    ]
    assert splits == [0, 1, 1]
