"""Do values that only the device knows, and that cannot be, stay harmless? Ends of 32 and of 64 bits, and NaN."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch

import lightning_attn
from kernel_reference.checks import validate_values
from kernel_reference.testing.guards import assert_bitwise_equal, canaried
from lightning_attn import launch
from lightning_attn.plan import DecodePlan, PrefillPlan

gpu = pytest.mark.gpu
BF16, FP32 = torch.bfloat16, torch.float32
ROWS = 40
HOSTILE = {
    torch.int32: (-(2**31), -1, 5, 30, ROWS + 1, 2**31 - 1),
    # Among them one that is possible where only the low half is looked at.
    torch.int64: (-(2**63), -(2**31), 5, 2**31, 2**32 + 30, 2**63 - 1),
}
PLANS = [
    pytest.param(PrefillPlan(16, 16, 0, 4, 1, 16), BF16, 16, id="in one go"),
    pytest.param(PrefillPlan(16, 16, 16, 4, 1, 16), BF16, 16, id="segments"),
    pytest.param(PrefillPlan(1, 16, 0, 1, 1, 16), FP32, 16, id="by token"),
    pytest.param(PrefillPlan(64, 64, 0, 4, 4, block_d=64, hopper=True), BF16, 64, id="on Hopper", marks=gpu),
    pytest.param(PrefillPlan(64, 64, 64, 4, 4, 64, hopper=True), BF16, 64, id="on Hopper, segments", marks=gpu),
]


def each_after_each(values: tuple[int, ...]) -> Iterator[int]:
    """The values in an order in which every one of them follows every one, itself too, once."""
    for i, value in enumerate(values):
        yield value
        for other in values[i + 1 :]:
            yield from (value, other)
    yield values[0]


def test_each_value_follows_each() -> None:
    for values in HOSTILE.values():
        pairs = [*itertools.pairwise(each_after_each(values))]
        assert sorted(pairs) == sorted(itertools.product(values, repeat=2))


@pytest.mark.parametrize("dtype", HOSTILE, ids=str)
@pytest.mark.parametrize(("plan", "kind", "size"), PLANS)
def test_bounds_at_the_ends_of_their_integers_read_no_row_and_change_no_slot_but_those_of_the_clamped_sequences(
    tensors, kernels, plan, kind, size, dtype
) -> None:
    """Inputs stand amid NaN, so that a row which does not exist shows in the state that is made of it."""
    device = tensors.device
    if plan.hopper and not launch.device_limits(torch.device("cuda", 0)).hopper:
        pytest.skip("needs an sm_90 GPU and a Triton that brings Gluon")
    bounds = [*each_after_each(HOSTILE[dtype])]
    sequences = len(bounds) - 1
    clamped = [min(max(bound, 0), ROWS) for bound in bounds]
    lengths = [max(end - begin, 0) for begin, end in itertools.pairwise(clamped)]
    # Inside a chunk, at the end of one, past the rows, and as far as the integers go.
    wanted = [9, 16, ROWS + 9, torch.iinfo(dtype).max, torch.iinfo(dtype).min]
    positions = torch.tensor([wanted] * sequences, dtype=dtype, device=device)
    targets = torch.arange(sequences * len(wanted), dtype=dtype, device=device).view(sequences, -1) + sequences
    slots = torch.arange(sequences, dtype=dtype, device=device)
    given = [canaried((ROWS, 1, size), kind, device) for _ in range(3)]
    for x in given:
        x.tensor.normal_()
    q, k, v = (x.tensor for x in given)
    pool = canaried((sequences * (1 + len(wanted)), 1, size, size), FP32, device)
    pool.tensor.fill_(1)
    out = canaried((ROWS, 1, size), kind, device)
    cu = torch.tensor(bounds, dtype=dtype, device=device)
    rates = torch.tensor([0.1], device=device)
    call = (q, k, v, rates, cu, pool.tensor, slots, None, positions, targets, out.tensor)
    kernels.call("varlen", call, True, 1.0, plan=plan)

    assert bool(pool.tensor.isfinite().all()), "a state was made of rows that do not exist"
    pool.check(written=False)
    out.check(written=False)
    changed = {i for i, length in enumerate(lengths) if length}
    for i, length in enumerate(lengths):
        changed |= {int(targets[i, j]) for j, position in enumerate(wanted) if 1 <= position <= length}
    for slot, state in enumerate(pool.tensor):
        if slot not in changed:
            assert_bitwise_equal(state, torch.ones_like(state), what=f"slot {slot}, which nothing writes,")
        elif not plan.segment:
            # Sequences that claim the same rows share the places of their segments.
            assert not bool((state == 1).all()), f"slot {slot} was not written"


# Rates that are none, and what they count as, in float32: 1e4 leaves nothing of a state after one token.
COUNTS_AS = {3.3e38: 1e4, math.inf: 1e4, math.nan: 0.0, -math.inf: 0.0, -2.5: 0.0, 0.3: 0.3}


def both_rates(device: torch.device) -> list[torch.Tensor]:
    return [torch.tensor([*rates], device=device) for rates in (COUNTS_AS.keys(), COUNTS_AS.values())]


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize(("plan", "kind", "size"), PLANS)
def test_kernels_take_a_rate_below_0_or_nan_for_0_and_an_infinite_one_to_forget_all(
    tensors, kernels, plan, kind, size
) -> None:
    if plan.hopper and not launch.device_limits(torch.device("cuda", 0)).hopper:
        pytest.skip("needs an sm_90 GPU and a Triton that brings Gluon")
    heads, tokens = len(COUNTS_AS), 2 * max(plan.chunk, 8) + 3
    q, k, v, d_out = (tensors.normal(1, heads, tokens, size, dtype=kind) for _ in range(4))
    history, d_state = (tensors.normal(1, heads, size, size) for _ in range(2))
    batch = tensors.ragged([3] * 2, heads=(heads, heads), sizes=(size, size), dtype=kind, slots=[1, 0])
    results: list[list[torch.Tensor]] = []
    for rates in both_rates(tensors.device):
        dense = kernels.attention(plan, q, k, v, rates, history)
        gradients = kernels.gradients(plan, q, k, v, rates, history, d_out, d_state)
        batch.slopes = rates
        batch.pool.tensor.copy_(batch.before)
        kernels.verify(batch, DecodePlan(16, 1))
        drafts = batch.out.tensor.clone()
        kernels.commit(batch, [3, 2], DecodePlan(16, 1))
        results.append([*dense, *gradients, drafts, batch.pool.tensor[:2].clone()])
    for one, other in zip(*results, strict=True):
        assert bool(one.isfinite().all())
        assert_bitwise_equal(one, other)


@pytest.mark.parametrize("kind", [BF16, FP32], ids=str)
def test_an_invalid_rate_counts_the_same_on_every_device(tensors, kind) -> None:
    heads = len(COUNTS_AS)
    q, k, v = (tensors.normal(1, heads, 70, 32, dtype=kind) for _ in range(3))
    history = tensors.normal(1, heads, 32, 32)
    batch = tensors.ragged([3] * 2, heads=(heads, heads), sizes=(32, 32), dtype=kind, slots=[1, 0])
    results: list[list[torch.Tensor]] = []
    with validate_values(False):
        for rates in both_rates(tensors.device):
            leaves = [x.clone().requires_grad_() for x in (q, k, v, history)]
            dense = lightning_attn.lightning_attention(*leaves[:3], rates, kv_history=leaves[3])
            gradients = torch.autograd.grad([*dense], leaves, [v, history[:, :, None]])
            pool, states = batch.before.clone(), {"slots": batch.slots, "slopes": rates}
            tokens = [x[:2] for x in (batch.q, batch.k, batch.v)]
            drafts = [x.unflatten(0, (2, 3)) for x in (batch.q, batch.k, batch.v)]
            decoded = lightning_attn.lightning_decode(*tokens, pool, **states)
            verified = lightning_attn.lightning_verify(*drafts, pool, **states)
            accepted = torch.tensor([3, 2], device=tensors.device)
            lightning_attn.lightning_commit(*drafts[1:], pool, accepted=accepted, **states)
            ragged = lightning_attn.lightning_attention_varlen(
                batch.q, batch.k, batch.v, rates, batch.cu_seqlens, state_pool=pool, slots=batch.slots,
                has_initial_state=True,
            )  # fmt: skip
            results.append([*(x.detach() for x in dense), *gradients, decoded, verified, ragged, pool[:2]])
    for one, other in zip(*results, strict=True):
        assert bool(one.isfinite().all())
        assert_bitwise_equal(one, other)
