"""Does the kernel for sm_90 do what it should? On a CPU, with its barriers, copies and products as they behave.

``kernel_reference.testing.gluon`` runs the kernel's own text. What only hardware tells, swizzles, fences and registers
among it, is for the tests on a GPU and for test_codegen.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from types import ModuleType
from typing import Any

import pytest
import torch

from kernel_reference.testing import gluon
from kernel_reference.testing.guards import assert_bitwise_equal, canaried, poison_
from lightning_attn import apart, halves, launch
from lightning_attn import tensors as groups
from lightning_attn.packed import arguments as packed_arguments
from lightning_attn.packed import launch as packed_launch
from lightning_attn.packed.plan import StatePlan
from lightning_attn.plan import DecodePlan, PrefillPlan
from lightning_attn.trees import arguments as tree_arguments
from lightning_attn.trees import launch as tree_launch

pytestmark = pytest.mark.simulated

KERNELS = (
    "decay", "schedule", "hopper_ring", "hopper_rows", "hopper_apart", "hopper_long", "hopper_step", "hopper_chain",
    "chunked", "recurrent", "trees", "hopper_states", "hopper_lead", "hopper_follow", "hopper_roles", "hopper_parts",
    "hopper_float32_step", "states", "hopper_remembered", "hopper_round", "hopper_round_float32", "hopper",
    "hopper_tokens", "hopper_float32",
)  # fmt: skip


@pytest.fixture(scope="module")
def shadows() -> Sequence[ModuleType]:
    """Of the modules with kernels."""
    return gluon.shadow(*(f"lightning_attn.kernels.{name}" for name in KERNELS))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, shadows: Sequence[ModuleType], device: torch.device) -> None:
    """The launches of the kernels for sm_90, without a GPU."""
    if device.type != "cpu":
        pytest.skip("the kernel itself runs here")

    hopper, hopper_tokens, hopper_float32 = shadows[-3:]
    hopper_apart, in_float32 = (shadows[KERNELS.index(name)] for name in ("hopper_apart", "hopper_round_float32"))
    others = launch.Launch

    class Launch:
        def __init__(self, kernel: Any, grid: Any, rest: Any, _: Any, boxes: Any, **options: Any) -> None:
            self.grid, self.rest, self.group = grid, rest, options.get("group")
            module = next(shadow for shadow in shadows if shadow.__name__ == kernel.fn.__module__)
            self.kernel = getattr(module, kernel.fn.__name__)
            layout = hopper.gl.NVMMASharedLayout.get_default_for
            self.boxes = [(box.sizes, box.strides, box.box, layout(box.box, hopper.gl.bfloat16)) for box in boxes]

        def __call__(self, *tensors: torch.Tensor | None) -> None:
            count = len(self.boxes)
            described = [gluon.Descriptor(x, *box) for x, box in zip(tensors[:count], self.boxes, strict=True)]
            others = tensors[count:] if self.group is None else self.group(*tensors[count:])
            gluon.launch(self.kernel, self.grid[0], *described, *others, *self.rest)

    def launch_without_tma(kernel: Any, grid: Any, rest: Any, *more: Any, **options: Any) -> Any:
        for module in (hopper_apart, in_float32, hopper_tokens, hopper_float32):
            if kernel.fn.__module__ == module.__name__:
                shadow = getattr(module, kernel.fn.__name__)
                return lambda *tensors: gluon.launch(shadow, grid[0], *tensors, *rest)
        return others(kernel, grid, rest, *more, **options)

    for module in (launch, packed_launch):
        monkeypatch.setattr(module, "TmaLaunch", Launch)
    monkeypatch.setattr(launch, "Launch", launch_without_tma)
    monkeypatch.setattr(packed_launch, "Launch", launch_without_tma)
    monkeypatch.setattr(apart, "Launch", launch_without_tma)
    monkeypatch.setattr(halves, "Launch", launch_without_tma)
    monkeypatch.setattr(tree_launch, "Launch", launch_without_tma)


@pytest.mark.parametrize(("sizes", "dtype", "segment", "stages", "chained"), [
    ((64, 64), torch.bfloat16, 0, 4, False), ((64, 64), torch.float16, 128, 4, False),
    ((128, 64), torch.bfloat16, 64, 3, False), ((128, 64), torch.float16, 0, 2, False),
    ((72, 80), torch.float16, 0, 4, False),
    ((40, 104), torch.bfloat16, 128, 4, False), ((40, 104), torch.bfloat16, 0, 2, False),
    ((64, 64), torch.bfloat16, 64, 2, True), ((72, 80), torch.float16, 128, 3, True),
    ((40, 104), torch.bfloat16, 64, 2, True),
], ids=str)  # fmt: skip
def test_the_kernel_for_sm_90_is_the_recurrence(tensors, kernels, sizes, dtype, segment, stages, chained) -> None:
    plan = PrefillPlan(64, 64, segment, 4, stages, 128 if sizes[0] > 64 else 64, True, chained=chained)
    check_kinds_of_sequences(tensors, kernels, plan, sizes, dtype)


@pytest.mark.parametrize(("dtype", "segment", "chained"), [
    (torch.bfloat16, 0, False), (torch.float16, 128, False), (torch.bfloat16, 64, True),
], ids=str)  # fmt: skip
def test_two_warpgroups_of_128_columns_are_the_recurrence(tensors, kernels, dtype, segment, chained) -> None:
    plan = PrefillPlan(64, 128, segment, 8, 3, 64, True, chained=chained)
    check_kinds_of_sequences(tensors, kernels, plan, (40, 168), dtype)


@pytest.mark.parametrize(("sizes", "dtype", "segment", "followers"), [
    ((136, 40), torch.bfloat16, 0, 1), ((256, 72), torch.float16, 64, 1), ((80, 72), torch.bfloat16, 128, 2),
    ((72, 136), torch.float16, 0, 2),
], ids=str)  # fmt: skip
def test_roles_are_the_recurrence(tensors, kernels, sizes, dtype, segment, followers) -> None:
    """By one or two warpgroups that follow a state, of 64 columns each."""
    plan = PrefillPlan(64, 64 * followers, segment, 4 * followers, 3, 64, True, roles=True)
    check_kinds_of_sequences(tensors, kernels, plan, sizes, dtype)


@pytest.mark.parametrize(("dtype", "sizes", "shares", "initial"), [
    (torch.bfloat16, (48, 40), 2, False), (torch.float16, (72, 64), 4, False), (torch.bfloat16, (48, 40), 2, True),
    (torch.float16, (136, 40), 2, False), (torch.float32, (48, 40), 4, True), (torch.bfloat16, (72, 80), 4, False),
], ids=str)  # fmt: skip
def test_programs_that_share_a_segment_have_its_bits(tensors, kernels, dtype, sizes, shares, initial) -> None:
    """Of one, four and, in two segments, six and four chunks, the last of them short, of one token, and of padding.

    With states in the pool a sequence of one segment begins from the slot that it is stored in: none share it then.
    """
    options = {"heads": (1, 1), "sizes": sizes, "dtype": dtype, "slots": [3, 1, -1, 0], "num_slots": 4}
    batch = tensors.ragged([1, 580, 70, 200], initial=initial, rows_after=5, **options)
    before = batch.pool.tensor.clone()
    found = []
    for count in (1, shares):
        batch.pool.tensor.copy_(before)
        poison_(batch.out.tensor)
        by_two = {"block_e": 128, "num_warps": 8} if sizes == (72, 80) else {}
        plan = replace(PrefillPlan(64, 64, 384, 4, 3, 64, True, roles=True, shares=count), **by_two)
        if dtype == torch.float32:
            plan = PrefillPlan(64, 64, 384, 8, 1, 64, True, bf16x6=True, shares=count)
        kernels.prefill(batch, plan, initial=None if initial else False)
        found.append((batch.out.tensor.clone(), batch.pool.tensor.clone()))
    for one, other in zip(*found, strict=True):
        assert_bitwise_equal(one, other)
    batch.check()


@pytest.mark.parametrize("roles", [False, True])
def test_bounds_and_slots_may_be_written_by_the_kernel_ahead(tensors, kernels, monkeypatch, roles) -> None:
    """Here by each program's wait for it."""
    plan = PrefillPlan(64, 64, 384, 4, 3, 64, True, roles=roles, dependent_launch=True)
    batch = tensors.ragged([1, 130, 70], heads=(1, 1), sizes=(48, 40), dtype=torch.bfloat16, slots=[3, -1, 0])
    written = {tensor: tensor.clone() for tensor in (batch.cu_seqlens, batch.slots)}
    begin = gluon.Program.__init__

    def begin_unwritten(program: Any) -> None:
        begin(program)
        for tensor in written:
            tensor.zero_()

    def wait() -> None:
        for tensor, values in written.items():
            tensor.copy_(values)

    monkeypatch.setattr(gluon.Program, "__init__", begin_unwritten)
    monkeypatch.setattr(gluon.language.LANGUAGE["extra"].cuda, "gdc_wait", wait)
    kernels.prefill(batch, plan)
    batch.check()


@pytest.mark.parametrize(("dtype", "size", "segment", "lengths"), [
    (torch.bfloat16, 64, 64, [1] * 6), (torch.bfloat16, 64, 64, [1, 70, 1, 0, 1]),
    (torch.bfloat16, 64, 64, [1, 0, 1, 65, 0, 4, *[0] * 70]), (torch.float16, 72, 0, [1] * 6),
    (torch.float16, 72, 0, [2, 1, 0, 1, 1, 1]), (torch.float32, 40, 64, [2, 1, 0, 1, 1, 1]),
    (torch.float32, 40, 64, [1, 70, 1, 0, 1]),
])  # fmt: skip
def test_tokens_that_are_taken_apart_have_the_same_bits(
    tensors, kernels, monkeypatch, shadows, dtype, size, segment, lengths
) -> None:
    """All, some of as many rows, and none of a batch that has more; padding and rows of no sequence among them."""
    monkeypatch.setattr(apart, "MOST_ROUND", 6 if dtype == torch.float32 else 3)
    hopper_apart = shadows[KERNELS.index("hopper_apart")]
    monkeypatch.setattr(hopper_apart, "TOGETHER", hopper_apart.gl.constexpr(4))
    slots, initial = [-1, 7, 1, 3, 0, 2, *range(10, 80)], [True, False, True, True, True, True, *[True] * 70]
    batch = tensors.ragged(
        lengths, heads=(1, 2), sizes=(size, 72), dtype=dtype, slots=slots[: len(lengths)], num_slots=80,
        initial=initial[: len(lengths)], rows_after=max(0, len(lengths) - sum(lengths)),
    )  # fmt: skip
    if len(lengths) > 6:
        # The first row is of none either.
        batch.cu_seqlens[0] = 1
    before = batch.pool.tensor.clone()
    found = []
    plan = PrefillPlan(64, 64, segment, 4, 2, 128 if size > 64 else 64, True)
    if dtype == torch.float32:
        plan = PrefillPlan(64, 64, segment, 8, 1, 64, True, bf16x6=True)
    for one in (plan, replace(plan, apart=True)):
        batch.pool.tensor.copy_(before)
        poison_(batch.out.tensor)
        kernels.prefill(batch, one)
        found.append((batch.out.tensor.clone(), batch.pool.tensor.clone()))
    for one, other in zip(*found, strict=True):
        assert_bitwise_equal(one, other)
    batch.check()


@pytest.mark.parametrize(("dtype", "size", "segment", "besides", "lengths"), [
    (torch.bfloat16, 64, 512, 3, [1, 0, 800, 1, 70, 1]), (torch.float16, 72, 0, 3, [1, 300, 200, 1, 1]),
    (torch.bfloat16, 128, 256, 5, [400, 0, 300, 1, 1, 1]), (torch.float32, 64, 256, 2, [1, 0, 400, 1, 70, 1]),
    (torch.float32, 72, 256, 1, [256, 1, 1, 260, 1, 257]), (torch.bfloat16, 64, 0, 1, [600, 300, 1, 270, 1, 1]),
], ids=str)  # fmt: skip
def test_programs_besides_take_part_of_long_segments_with_the_same_bits(
    tensors, kernels, monkeypatch, shadows, dtype, size, segment, besides, lengths
) -> None:
    """Of those that begin in the pool, where they end, and of longer sequences; rows of no sequence are as many."""
    for name in ("hopper_apart", "hopper_long"):
        module = shadows[KERNELS.index(name)]
        monkeypatch.setattr(module, "TOGETHER", module.gl.constexpr(4))
    batch = tensors.ragged(
        lengths, heads=(1, 2), sizes=(size, 72), dtype=dtype, slots=[3, 7, 1, 2, 0, 5][: len(lengths)], num_slots=12,
        initial=[True, True, False, True, True, True][: len(lengths)], rows_after=205,
    )  # fmt: skip
    before = batch.pool.tensor.clone()
    found = []
    plan = PrefillPlan(64, 64, segment, 4, 2, 128 if size > 64 else 64, True)
    if dtype == torch.float32:
        plan = PrefillPlan(64, 64, segment, 8, 1, 64, True, bf16x6=True)
    for one in (plan, replace(plan, long=256, besides=besides)):
        batch.pool.tensor.copy_(before)
        poison_(batch.out.tensor)
        kernels.prefill(batch, one)
        found.append((batch.out.tensor.clone(), batch.pool.tensor.clone()))
    for one, other in zip(*found, strict=True):
        assert_bitwise_equal(one, other)
    batch.check()
    if dtype != torch.float32:
        assert not launch.counters.of(batch.pool.tensor, 1).any()


@pytest.mark.parametrize(("bounds", "segment"), [
    ([334, 424, 478, 624, 199, 455], 256), ([78, 328, 533, 6, 262, 379], 256), ([599, 442, 550, -4, 256, 209], 256),
], ids=str)  # fmt: skip
def test_programs_besides_leave_no_count_whatever_the_bounds_are(
    tensors, kernels, monkeypatch, shadows, bounds, segment
) -> None:
    """Where they fall the grid may have no program of a segment that others share."""
    for name in ("hopper_apart", "hopper_long"):
        module = shadows[KERNELS.index(name)]
        monkeypatch.setattr(module, "TOGETHER", module.gl.constexpr(4))
    sequences, rows = len(bounds) - 1, 640
    batch = tensors.ragged([rows // sequences] * sequences, heads=(1, 1), sizes=(64, 64), slots=range(sequences))
    batch.cu_seqlens.copy_(torch.tensor(bounds))
    plan = PrefillPlan(64, 64, segment, 4, 2, 64, True, long=256, besides=1)
    kernels.prefill(batch, plan)
    assert not launch.counters.of(batch.pool.tensor, 1).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_token_at_the_end_of_a_segment_of_all_rows_is_taken_once(tensors, kernels, dtype) -> None:
    """The grid has a second segment for it."""
    plan = PrefillPlan(64, 64, 64, 4, 2, 64, True)
    if dtype == torch.float32:
        plan = PrefillPlan(64, 64, 64, 8, 1, 64, True, bf16x6=True)
    batch = tensors.ragged([63, 1, 70, 58, 1], heads=(1, 1), sizes=(64, 64), dtype=dtype, initial=True)
    kernels.prefill(batch, plan)
    batch.check()


def check_kinds_of_sequences(tensors: Any, kernels: Any, plan: PrefillPlan, sizes: Any, dtype: torch.dtype) -> None:
    """Short and long ones, with and without an initial state, padding and, but for two stages, snapshots."""
    batch = tensors.ragged(
        [1, 200, 0, 64, 70], heads=(1, 2), sizes=sizes, dtype=dtype, slots=[3, 7, 1, -1, 0], num_slots=12,
        initial=[True, False, True, True, True], rows_after=5,
    )  # fmt: skip
    # With snapshots a sequence of one token is a chunk too.
    has_snapshots = plan.num_stages > 2 or (plan.num_warps == 8 and plan.segment)
    positions = [[-1, 1], [128, 130], [-1, -1], [-1, -1], [64, 70]] if has_snapshots else None
    batch.check(snapshots=kernels.prefill(batch, plan, positions))


@pytest.mark.parametrize(("segment", "sizes"), [
    (0, (64, 64)), (64, (72, 104)), (128, (64, 64)), (128, (136, 40)), (0, (140, 40)),
], ids=str)  # fmt: skip
def test_float32_on_sm_90_is_the_recurrence_as_exactly_as_float32(tensors, kernels, segment, sizes) -> None:
    plan = PrefillPlan(64, 64, segment, 8, 1, 64, True, bf16x6=True)
    batch = tensors.ragged(
        [1, 200, 0, 64, 70], heads=(1, 2), sizes=sizes, dtype=torch.float32, slots=[3, 7, 1, -1, 0], num_slots=12,
        initial=[True, False, True, True, True], rows_after=5,
    )  # fmt: skip
    positions = [[-1, 1], [128, 130], [-1, -1], [-1, -1], [64, 70]] if segment else None
    batch.check(snapshots=kernels.prefill(batch, plan, positions))


def test_two_launches_beside_each_other_are_the_recurrence_of_a_larger_state_whoever_shares(tensors, kernels) -> None:
    """Of three segments, the last one short, of which each has one or two programs a launch."""
    q, k, v = (tensors.normal(1, 2, 261, size) for size in (140, 140, 40))
    history, slopes = tensors.normal(1, 2, 140, 40), torch.tensor([0.0, 0.02])
    wanted = tensors.attend(q, k, v, slopes, history, 0.7)
    plan = PrefillPlan(64, 64, 128, 8, 1, 64, True, bf16x6=True)
    found = [kernels.attention(replace(plan, shares=n), q, k, v, slopes, history, 0.7) for n in (1, 2)]
    for one, other, forms in zip(*found, wanted, strict=True):
        assert_bitwise_equal(one, other)
        tensors.assert_rounded(one, forms, apart=(0, 1))


@pytest.mark.parametrize(("sizes", "tokens"), [((48, 48), 130), ((128, 64), 300)], ids=str)
def test_states_that_do_not_decay_are_seen_in_float32_for_all_that_tensor_cores_cut_off(
    tensors, kernels, sizes, tokens
) -> None:
    plan = PrefillPlan(64, 64, 0, 8, 1, 64, True, bf16x6=True)
    batch = tensors.ragged(
        [tokens], heads=(2, 2), sizes=sizes, dtype=torch.float32, slopes=torch.tensor([0.0, 1e-3])
    )  # fmt: skip
    with gluon.truncated_sums():
        kernels.prefill(batch, plan)
    batch.check()


@pytest.mark.parametrize("of", ["a state", "keys"])
def test_float32_loses_no_more_of_sums_over_128_columns_than_of_those_over_64(tensors, kernels, of) -> None:
    """Nothing of these sums cancels, so that what is cut off them adds up: half a unit in the last place a time."""
    plan = PrefillPlan(64, 64, 0, 8, 1, 64, True, bf16x6=True)
    q, k, v = (tensors.normal(1, 1, 64, size).abs() for size in (128, 128, 48))
    history = tensors.normal(1, 1, 128, 48).abs()
    # All that is seen is the state, or the first token.
    if of == "a state":
        v.zero_()
    else:
        history.zero_()
        v[:, :, 1:] = 0
        v[:, :, 0] = 1
    with gluon.truncated_sums():
        out, _ = kernels.attention(plan, q, k, v, torch.zeros(1), history)
    exact = tensors.padded(q, k, v, torch.zeros(1), history, 1.0, tensors.exact)[0]
    # 0.6 or 0.7 units in sums over 64, 1.2 to 1.4 in one over all.
    assert (1 - out / exact).mean().abs() < torch.finfo(torch.float32).eps


@pytest.mark.parametrize("slope", [1.0, 0.3, 37.0])
def test_weights_of_float32_are_exact_however_many_tokens_they_decay_over(tensors, kernels, slope) -> None:
    """Of a state that is seen, of one that is left, and of a key that is: each is a sum of positive terms."""
    plan, slopes = PrefillPlan(64, 64, 0, 8, 1, 64, True, bf16x6=True), torch.tensor([slope])
    q, k, v = (tensors.normal(1, 1, 64, 48).abs() for _ in range(3))
    history = tensors.normal(1, 1, 48, 48).abs()
    no_keys = torch.zeros_like(k)
    first_key = no_keys.clone()
    first_key[:, :, 0] = k[:, :, 0]
    for keys, before in ((no_keys, history), (first_key, torch.zeros_like(history))):
        results = kernels.attention(plan, q, keys, v, slopes, before)
        exact = tensors.padded(q, keys, v, slopes, before, 1.0, tensors.exact)
        for got, wanted in zip(results, exact, strict=True):
            # Where float32 has all its bits.
            normal = wanted > 2.0**-110
            assert ((got / wanted - 1).abs() < 8 * torch.finfo(torch.float32).eps)[normal].all()


def test_nan_and_infinities_pass_through_the_parts_of_float32(tensors, kernels) -> None:
    """NaN with the bits that GPUs give it, all of which are set but the sign's."""
    plan = PrefillPlan(64, 64, 0, 8, 1, 64, True, bf16x6=True)
    q, k, v = (tensors.normal(1, 1, 70, 40) for _ in range(3))
    v[..., 10, 3] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    v[..., 66, 5] = torch.inf
    out, state = kernels.attention(plan, q, k, v, torch.tensor([0.02]), None)
    not_finite = ~out[0, 0].isfinite()
    assert not_finite[10:, 3].all()
    assert not_finite[66:, 5].all()
    # A value that is multiplied by 0 reaches the other rows of its chunk, and no other column.
    not_finite[:, [3, 5]] = False
    assert not not_finite.any()
    assert (~state.isfinite()).sum() == 2 * 40


# Of more than 128 columns of a state, which are rows of dq's and dk's, only their strides tell where the others begin.
@pytest.mark.parametrize(("sizes", "tokens"), [((64, 48), 140), ((40, 136), 70), ((136, 136), 5)], ids=str)
def test_gradients_of_float32_on_sm_90_are_those_of_the_portable_kernel(tensors, kernels, sizes, tokens) -> None:
    d, e = sizes
    q, k, v, d_out = (tensors.normal(1, 2, tokens, size) for size in (d, d, e, e))
    history, d_state = (tensors.normal(1, 2, d, e) for _ in range(2))
    plans = PrefillPlan(32, 16, 0, 4, 1, 32), PrefillPlan(64, 64, 64, 8, 1, 64, True, bf16x6=True)
    slopes = torch.tensor([0.02, 0.5])
    results = [kernels.gradients(plan, q, k, v, slopes, history, d_out, d_state, 0.7) for plan in plans]
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() <= 2e-6 * one.abs().max()


@pytest.mark.parametrize(("dtype", "tokens", "slope"), [
    (torch.bfloat16, 300, 0.02), (torch.float16, 384, 0.02), (torch.bfloat16, 356, 3.0), (torch.bfloat16, 140, 256.0),
], ids=str)  # fmt: skip
def test_chained_segments_have_the_results_of_whole_sequences_in_both_directions(
    tensors, kernels, dtype, tokens, slope
) -> None:
    whole = PrefillPlan(64, 64, 0, 4, 2, block_d=64, hopper=True)
    q, k, v, d_out = (tensors.normal(2, 1, tokens, size, dtype=dtype) for size in (48, 48, 80, 80))
    history, d_state = (tensors.normal(2, 1, 48, 80) for _ in range(2))
    slopes = torch.tensor([slope])
    results = [
        [
            *kernels.attention(plan, q, k, v, slopes, history, 0.7),
            *kernels.gradients(plan, q, k, v, slopes, history, d_out, d_state, 0.7),
        ]
        for plan in (whole, replace(whole, segment=128, chained=True))
    ]
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() <= 4 * torch.finfo(dtype).eps * one.abs().max()


@pytest.mark.parametrize(("plan", "tokens"), [
    (PrefillPlan(64, 64, 128, 4, 4, 64, True, part=64), 259),
    (PrefillPlan(64, 64, 64, 8, 1, 64, True, bf16x6=True), 67),
], ids=["16 bits, parts", "float32"])  # fmt: skip
def test_segments_read_no_state_that_was_not_written_however_steep_the_rate(
    tensors, kernels, monkeypatch, plan, tokens
) -> None:
    """At 0.02 all of a segment reaches the next one, at 3 its last 64 tokens, from 104 on nothing."""
    dtype = torch.float32 if plan.bf16x6 else torch.bfloat16
    whole = replace(plan, segment=0, part=0)
    q, k, v, d_out = (tensors.normal(1, 3, tokens, 64, dtype=dtype) for _ in range(4))
    history, d_state = (tensors.normal(1, 3, 64, 64) for _ in range(2))
    monkeypatch.setattr(launch, "_workspace", lambda size, device: lambda: poison_(torch.empty(size)))
    slopes = torch.tensor([0.02, 3.0, torch.inf])
    # By roles they sum states by themselves, which a launch carries for the others.
    plans = (whole, plan) if plan.bf16x6 else (whole, plan, replace(plan, roles=True))
    of_whole, *of_segments = [
        [
            *kernels.attention(each, q, k, v, slopes, history),
            *kernels.gradients(each, q, k, v, slopes, history, d_out, d_state),
        ]
        for each in plans
    ]
    for results in of_segments:
        for one, other in zip(of_whole, results, strict=True):
            assert (one - other).abs().max() <= 4 * torch.finfo(dtype).eps * one.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_stages_columns_and_roles_of_a_program_change_no_bits(tensors, kernels, dtype) -> None:
    q, k, v = (tensors.normal(1, 1, 140, size, dtype=dtype) for size in (48, 48, 72))
    plan, slopes = PrefillPlan(64, 64, 0, 4, 4, 64, True), torch.tensor([0.02])
    first = kernels.attention(plan, q, k, v, slopes, None)
    for change in (
        {"num_stages": 2}, {"num_stages": 3, "block_e": 128, "num_warps": 8}, {"roles": True},
        {"num_stages": 3, "block_e": 128, "num_warps": 8, "roles": True},
    ):  # fmt: skip
        for one, other in zip(first, kernels.attention(replace(plan, **change), q, k, v, slopes, None), strict=True):
            assert_bitwise_equal(one, other)


@pytest.mark.parametrize("stages", [2, 4])
def test_powers_of_two_come_through_float16_on_sm_90(tensors, kernels, powers, stages) -> None:
    plan = PrefillPlan(64, 64, 0, 4, stages, block_d=64, hopper=True)
    tensors.check_powers(partial(kernels.attention, plan), partial(kernels.gradients, plan), 64, 80, powers)


@pytest.mark.parametrize(("plan", "sizes", "dtype", "pool_dtype", "pool"), [
    (DecodePlan(64, 4, hopper=True), (72, 80), torch.bfloat16, torch.float32, "transposed"),
    (DecodePlan(32, 2, hopper=True), (128, 64), torch.float16, torch.bfloat16, "packed"),
    (DecodePlan(16, 4, hopper=True), (20, 24), torch.float32, torch.float16, "gaps"),
    (DecodePlan(64, 4, hopper=True, lines=True), (72, 80), torch.bfloat16, torch.bfloat16, "transposed"),
    (DecodePlan(32, 8, hopper=True, lines=True), (40, 96), torch.float16, torch.float32, "gaps"),
], ids=str)  # fmt: skip
def test_token_by_token_on_sm_90_is_the_recurrence_and_drafts_have_the_bits_of_decoding(
    tensors, kernels, plan, sizes, dtype, pool_dtype, pool
) -> None:
    options = {"heads": (1, 2), "sizes": sizes, "dtype": dtype, "pool_dtype": pool_dtype, "scale": 0.7}
    options |= {"slots": [4, 7, -1, 0], "num_slots": 9, "pool": pool}
    drafts = kernels.drafts_with_the_bits_of_decoding(tensors, plan, [3, 0, 3, 2], 3, **options)
    drafts.check(states=[3, 0, 3, 2], products=torch.float32, chunk=1, stored=pool_dtype)


def test_trees_on_sm_90_have_the_bits_of_their_paths(tensors, kernels) -> None:
    plan, parents = DecodePlan(32, 4, hopper=True), torch.tensor([[-1, 0, 0, 2], [-1, -1, 1, 0], [-1, 0, 1, 2]])
    options = {"heads": (1, 2), "sizes": (40, 24), "pool_dtype": torch.bfloat16, "slots": [2, 0, -1], "num_slots": 4}
    tree = tensors.ragged([4] * 3, initial=True, **options)
    q, k, v, out = (kernels.drafts(tree, x) for x in (tree.q, tree.k, tree.v, tree.out.tensor))
    t = groups.TreeVerify(q, k, v, tree.pool.tensor, tree.slots, tree.slopes, parents.int(), out)
    tree_launch.prepare_verify_tree(tree_arguments.check_verify_tree(t, 1.0), plan, t)(t)
    for path in ([0, 1], [0, 2, 3], [1, 2]):
        sequences = [i for i in tree.live if all(parents[i, b] == a for a, b in zip([-1, *path], path, strict=False))]
        alone = tensors.ragged([len(path)] * 3, initial=True, **options)
        alone.pool.tensor.copy_(tree.pool.tensor)
        alone.q, alone.k, alone.v = (x[:, path].flatten(0, 1) for x in (q, k, v))
        kernels.verify(alone, plan)
        assert sequences
        for i in sequences:
            assert_bitwise_equal(out[i, path], kernels.drafts(alone, alone.out.tensor)[i], what=f"a path of {i}")
    assert not out[2].any()


@pytest.mark.parametrize(("kind", "dtype", "sizes"), [
    ("few", torch.bfloat16, (72, 40)), ("many", torch.bfloat16, (72, 40)), ("dense", torch.bfloat16, (72, 104)),
    ("reversed", torch.bfloat16, (72, 40)), ("few", torch.bfloat16, (136, 40)), ("dense", torch.bfloat16, (136, 104)),
    ("reversed", torch.bfloat16, (136, 40)), ("many", torch.float32, (72, 40)), ("few", torch.float32, (72, 40)),
    ("reversed", torch.float32, (136, 40)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("programs", [264, 3])
def test_states_of_what_is_remembered_are_those_of_the_recurrence(
    tensors, monkeypatch, kind, dtype, sizes, programs
) -> None:
    """In two or five lanes at most, of 64 tokens or more where that is not all; what a head does not remember is NaN.

    A program each or, of larger heads and in float32, several lanes by each program; in 16 bits one launch or two.
    """
    is_each = sizes[0] <= 128 and dtype != torch.float32
    is_one = programs == 3 and dtype != torch.float32
    monkeypatch.setattr(packed_launch, "in_one_launch", lambda *_: is_one)
    for name in ("MOST_ROUND", "MOST_IN_FLOAT32"):
        monkeypatch.setattr(packed_launch, name, programs)
    (d, e), lengths = sizes, [0, 70, 1, 300, 0]
    faster, remembered = (0.5, (300, 48)) if kind == "few" else (0.1, (300, 240))
    rates = torch.tensor([0.005, faster])
    if kind == "many":
        # Of so many each program searches for its own.
        lengths += [3] * (59 if programs == 264 and is_each else 20)
    if kind in ("few", "many"):
        ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        # Heads of k are shared, rows behind the last sequence nobody's.
        k, v = (tensors.normal(ends[-1] + 3, heads, size, dtype=dtype) for heads, size in ((1, d), (2, e)))
        cu = torch.tensor(ends, dtype=torch.int32)
        for rows in (k, v):
            poison_(rows[ends[-1] :])
        for h, count in enumerate(remembered):
            poison_(v[71 : 371 - count, h])
    else:
        k, v = (tensors.normal(2, 2, 300, size, dtype=dtype) for size in (d, e))
        cu, lengths = None, [300, 300]
        for h, count in enumerate(remembered):
            for rows in (k, v):
                poison_(rows[:, h, count:] if kind == "reversed" else rows[:, h, : 300 - count])
    states = (len(lengths), 2, d, e)
    initial = None if kind == "many" else tensors.normal(*states)
    final, numbers = canaried(states, torch.float32, tensors.device), (0.7, False, kind == "reversed")
    t = groups.State(k, v, rates, cu, initial, final.tensor)
    problem = packed_arguments.check_state(t, *numbers)
    plan = StatePlan(64, 64, 64, 64, 4, 2, lanes=5 if is_one else 2)
    if dtype == torch.float32:
        plan = replace(plan, num_warps=8, num_stages=1, bf16x6=True)
    packed_launch.prepare_state(problem, plan, t)(t)
    final.check(written=True)
    if is_one:
        by_two = t._replace(final_state=torch.full_like(final.tensor, torch.nan))
        monkeypatch.setattr(packed_launch, "in_one_launch", lambda *_: False)
        packed_launch.prepare_state(problem, plan, by_two)(by_two)
        if initial is None or tensors.device.type == "cuda":
            assert_bitwise_equal(final.tensor, by_two.final_state)
        if kind == "few":
            # Of the rows of no sequence.
            none = t._replace(cu_seqlens=torch.zeros_like(cu), final_state=torch.full_like(final.tensor, torch.nan))
            monkeypatch.setattr(packed_launch, "in_one_launch", lambda *_: True)
            packed_launch.prepare_state(problem, plan, none)(none)
            assert_bitwise_equal(none.final_state, initial)
    if cu is None:
        k, v = (rows.transpose(1, 2).flatten(0, 1) for rows in (k, v))
    exact = exact_states(k, v, rates, lengths, initial, scale=0.7, reverse=kind == "reversed")
    # In 16 bits values are rounded once they are weighted.
    bound = 2**-8 if dtype == torch.bfloat16 else 2**-21
    assert (final.tensor - exact).abs().max() < bound * exact.abs().max()


def exact_states(k, v, rates, lengths, initial, *, scale: float, reverse: bool) -> torch.Tensor:
    """In float64, of packed rows [T, H, D|E]; those of NaN are of tokens that weigh nothing."""
    k, v, rates = (x.double() for x in (k.nan_to_num(), v.nan_to_num(), rates))
    states = []
    for i, end in enumerate(accumulate(lengths)):
        rows, place = slice(end - lengths[i], end), torch.arange(lengths[i])
        weights = scale * torch.exp(-rates[:, None] * (place + 1 if reverse else place.flip(0)))
        own = torch.einsum("hn,nhd,nhe->hde", weights, k[rows].expand(-1, len(rates), -1), v[rows])
        states.append(own if initial is None else own + torch.exp(-rates * lengths[i])[:, None, None] * initial[i])
    return torch.stack(states)
