"""Does anything read or write out of place, or leave an element unwritten? The kernels, and the public functions.

Every tensor stands inside a larger buffer of NaN (of noise where it holds integers) that differs from place to place,
with gaps between its rows. The tests marked `sanitize` hold every kernel and every branch of the plans, for
compute-sanitizer.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import lightning_attn
from kernel_reference.testing.guards import Canaried, Grids, assert_bitwise_equal, canaried
from kernel_reference.testing.memory import check_far_apart, much_memory
from lightning_attn import launch
from lightning_attn.kernels import schedule
from lightning_attn.plan import DecodePlan, DeviceLimits, Heads, PrefillPlan, cdiv

sanitize = pytest.mark.sanitize
gpu = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Several rows of the widest tensor here.
BAND = 4096


def amid_noise(tensor: torch.Tensor, *, gap: int = 0, offset: int = 0) -> Canaried:
    """The same bits inside a guarded buffer, rows ``gap`` elements apart, off the alignment by ``offset``."""
    buffer = canaried(tensor.shape, tensor.dtype, tensor.device, row_padding=gap, offset=offset, band=BAND)
    if tensor.dtype.is_floating_point:
        bits = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
        buffer.tensor.view(bits).copy_(tensor.view(bits))
    else:
        buffer.tensor.copy_(tensor)
    return buffer


class Inputs:
    """What a call only reads, each tensor in a guarded buffer of its own, none aligned like another."""

    def __init__(self) -> None:
        self.buffers: list[tuple[str, Canaried, torch.Tensor]] = []

    def hide(self, batch: Any, *, aligned: bool) -> None:
        """Put the inputs of a ragged batch into such buffers."""
        for place, name in enumerate(("q", "k", "v")):
            tensor = getattr(batch, name)
            gap, offset = (8, 0) if aligned else (3 + place, 1 + place)
            setattr(batch, name, self.guard(name, tensor, gap=gap, offset=offset))
        for place, name in enumerate(("slopes", "cu_seqlens", "slots", "has_initial_state")):
            setattr(batch, name, self.guard(name, getattr(batch, name), offset=0 if aligned else 1 + place))

    def guard(self, name: str, tensor: torch.Tensor, *, gap: int = 0, offset: int = 0) -> torch.Tensor:
        buffer = amid_noise(tensor, gap=gap if tensor.ndim > 1 else 0, offset=offset)
        self.buffers.append((name, buffer, tensor.clone()))
        return buffer.tensor

    def check(self) -> None:
        for name, buffer, original in self.buffers:
            buffer.check(written=False)
            assert_bitwise_equal(buffer.tensor, original, what=f"{name} after the call")


# Every branch: in one go, in segments and token by token, each chunk and number of columns, and of the snapshots those
# that a chunk ends at and those inside one.
WALKS = [
    pytest.param(PrefillPlan(16, 16, 0, 4, 1, 16), BF16, (24, 20), id="in one go, chunk 16", marks=sanitize),
    pytest.param(PrefillPlan(64, 64, 0, 4, 3, 16), BF16, (17, 33), id="in one go, chunk 64", marks=sanitize),
    pytest.param(PrefillPlan(32, 16, 64, 4, 2, 32), BF16, (33, 17), id="segments, chunk 32", marks=sanitize),
    pytest.param(PrefillPlan(64, 64, 64, 4, 1, 32), BF16, (31, 65), id="segments, chunk 64", marks=sanitize),
    pytest.param(PrefillPlan(1, 16, 0, 1, 1, 64), FP16, (33, 20), id="by token, float16", marks=sanitize),
    pytest.param(PrefillPlan(1, 32, 0, 4, 1, 32), FP32, (17, 24), id="by token, float32", marks=sanitize),
]
every_walk = pytest.mark.parametrize(("plan", "dtype", "sizes"), WALKS)


@every_walk
def test_ragged_walks_touch_their_rows_and_slots_and_nothing_else(tensors, kernels, plan, dtype, sizes) -> None:
    aligned = plan.block_e == 16
    chunk = max(plan.chunk, 8)
    lengths = [1, 0, max(chunk, plan.segment) + 8, 2, chunk, 1]
    positions = [[-1, 1], [-1, -1], [chunk, chunk + 5], [1, 2], [chunk, -1], [1, -1]]
    batch = tensors.ragged(
        lengths, heads=(1, 2) if aligned else (2, 1), sizes=sizes, dtype=dtype, slots=[5, 2, 0, -1, 9, 2**31 - 1],
        num_slots=20, pool="gaps", initial=[True, False, True, True, False, True], rows_after=2,
    )  # fmt: skip
    inputs = Inputs()
    inputs.hide(batch, aligned=aligned)
    how = {"products": FP32, "chunk": 1} if plan.chunk == 1 else {}
    batch.check(snapshots=kernels.prefill(batch, plan, positions), **how)
    inputs.check()


@every_walk
def test_dense_walks_and_their_gradients_touch_their_results_and_nothing_else(
    tensors, kernels, plan, dtype, sizes
) -> None:
    d, e = sizes
    tokens = max(plan.segment, plan.chunk) + 3
    q, k, v, d_out = (tensors.normal(1, 1, tokens, size, dtype=dtype) for size in (d, d, e, e))
    history, d_state = (tensors.normal(1, 1, d, e) for _ in range(2))
    slopes = torch.tensor([0.05], device=tensors.device)
    inputs = Inputs()
    q, k, v, d_out, history, d_state = (
        inputs.guard(name, tensor, gap=5 + place, offset=place)
        for place, (name, tensor) in enumerate(
            {"q": q, "k": k, "v": v, "d_out": d_out, "kv_history": history, "d_kv": d_state}.items()
        )
    )
    # The results stand in guarded memory, of which the fixture sees to it that it is whole.
    out, state = kernels.attention(plan, q, k, v, slopes, history)
    gradients = kernels.gradients(plan, q, k, v, slopes, history, d_out, d_state)
    inputs.check()
    assert all(bool(result.isfinite().all()) for result in (out, state, *gradients))


@pytest.mark.parametrize(("plan", "dtype", "pool_dtype", "pool"), [
    pytest.param(DecodePlan(block_e, num_warps), *rest, id=f"{block_e} columns, {str(rest[0])[6:]}", marks=sanitize)
    for block_e, num_warps, *rest in (
        (16, 1, BF16, FP32, "gaps"), (16, 1, FP32, FP16, "heads last"), (32, 4, FP16, BF16, "transposed"),
        (64, 8, FP32, FP16, "gaps"), (64, 8, FP16, FP32, "heads last"), (128, 4, BF16, FP32, "transposed"),
    )
])  # fmt: skip
def test_decoding_verifying_and_committing_touch_their_rows_and_slots_and_nothing_else(
    tensors, kernels, plan, dtype, pool_dtype, pool
) -> None:
    options = {
        "heads": (1, 2), "sizes": (33, 20), "dtype": dtype, "pool_dtype": pool_dtype, "pool": pool, "num_slots": 7,
        "slots": [6, -1, 0, 7, 2],
    }  # fmt: skip
    batch, inputs = tensors.ragged([1] * 5, **options), Inputs()
    inputs.hide(batch, aligned=False)
    kernels.decode(batch, plan)
    batch.check(products=FP32)
    inputs.check()
    batch, inputs = tensors.ragged([3] * 5, **options), Inputs()
    inputs.hide(batch, aligned=True)
    kernels.verify(batch, plan)
    batch.check(states=[0] * 5, products=FP32, chunk=1, stored=pool_dtype)
    kernels.commit(batch, [3, 3, 1, 2, 0], plan)
    batch.check(states=[3, 3, 1, 2, 0], products=FP32, chunk=1, stored=pool_dtype)
    inputs.check()


@sanitize
def test_public_functions_write_only_their_outputs_from_inputs_amid_nan(tensors) -> None:
    options = {"sizes": (48, 40), "slots": [2, -1, 0], "pool": "gaps"}
    inputs = Inputs()
    batch = tensors.ragged([70, 5, 1], rows_after=1, **options)
    inputs.hide(batch, aligned=False)
    shared = {"state_pool": batch.pool.tensor, "slots": batch.slots}
    lightning_attn.lightning_attention_varlen(
        batch.q, batch.k, batch.v, batch.slopes, batch.cu_seqlens, has_initial_state=batch.has_initial_state,
        out=batch.out.tensor, **shared,
    )  # fmt: skip
    batch.check()
    batch = tensors.ragged([1] * 3, **options)
    inputs.hide(batch, aligned=True)
    shared = {"state_pool": batch.pool.tensor, "slots": batch.slots, "slopes": batch.slopes}
    lightning_attn.lightning_decode(batch.q, batch.k, batch.v, out=batch.out.tensor, **shared)
    batch.check(products=FP32)
    batch = tensors.ragged([4] * 3, **options)
    inputs.hide(batch, aligned=False)
    shared = {"state_pool": batch.pool.tensor, "slots": batch.slots, "slopes": batch.slopes}
    q, k, v, out = (x.unflatten(0, (3, 4)) for x in (batch.q, batch.k, batch.v, batch.out.tensor))
    lightning_attn.lightning_verify(q, k, v, out=out, **shared)
    batch.check(states=[0] * 3)
    accepted = inputs.guard("accepted", torch.tensor([4, 4, 3], device=tensors.device), offset=1)
    lightning_attn.lightning_commit(k, v, accepted=accepted, **shared)
    batch.check(states=[4, 4, 3], products=FP32)
    inputs.check()


@sanitize
@pytest.mark.parametrize("tokens", [1, 70])
def test_new_results_are_packed_and_16_byte_aligned_whatever_the_inputs_strides(tensors, tokens) -> None:
    inputs = Inputs()
    q, k, v = (
        inputs.guard(name, tensors.normal(1, 3, tokens, size, dtype=BF16), gap=3, offset=1)
        for name, size in {"q": 17, "k": 17, "v": 31}.items()
    )
    result = lightning_attn.lightning_attention(q.requires_grad_(), k, v, tensors.slopes(3))
    gradients = torch.autograd.grad(result.out.float().sum() + result.kv.sum(), [q])
    for tensor in (*result, *gradients):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0


# The kernel for sm_90, which runs on a GPU alone


@sanitize
@gpu
@pytest.mark.parametrize("segment", [0, 64, 128])
@pytest.mark.parametrize("size", [64, 80, 128])
def test_the_walk_for_hopper_touches_its_rows_and_slots_and_nothing_else(tensors, kernels, size, segment) -> None:
    if not launch.device_limits(torch.device("cuda", 0)).hopper:
        pytest.skip("needs an sm_90 GPU and a Triton that brings Gluon")
    plan = PrefillPlan(64, 64, segment, 4, 4, block_d=64 if size <= 64 else 128, hopper=True)
    positions = [[-1, 1], [-1, -1], [64, 69], [1, 2], [64, -1], [1, -1]]
    batch = tensors.ragged(
        [1, 0, 131, 2, 64, 1], heads=(2, 4), sizes=(size, size), slots=[5, 2, 0, -1, 9, 2**31 - 1], num_slots=20,
        initial=[True, False, True, True, False, True], rows_after=2,
    )  # fmt: skip
    inputs = Inputs()
    inputs.hide(batch, aligned=True)
    batch.check(snapshots=kernels.prefill(batch, plan, positions))
    inputs.check()
    q, k, v, d_out = (inputs.guard("qkv", tensors.normal(2, 2, 131, size, dtype=BF16), gap=8) for _ in range(4))
    history, d_state = (tensors.normal(2, 2, size, size) for _ in range(2))
    kernels.attention(plan, q, k, v, tensors.slopes(2), history)
    kernels.gradients(plan, q, k, v, tensors.slopes(2), history, d_out, d_state)
    inputs.check()


# Offsets past 2^31 elements


def on_hopper_or_skip(plan: PrefillPlan, device: torch.device) -> None:
    if plan.hopper and (device.type != "cuda" or not launch.device_limits(torch.device("cuda", 0)).hopper):
        pytest.skip("needs an sm_90 GPU and a Triton that brings Gluon")


FAR_WALKS = [
    pytest.param(PrefillPlan(16, 16, 0, 4, 2), 16, id="in one go"),
    pytest.param(PrefillPlan(16, 16, 16, 4, 2), 16, id="segments"),
    pytest.param(PrefillPlan(1, 16, 0, 1, 1, 16), 16, id="by token"),
    pytest.param(PrefillPlan(64, 64, 0, 4, 4, block_d=64, hopper=True), 64, id="on Hopper, in one go", marks=gpu),
    pytest.param(PrefillPlan(64, 64, 64, 4, 4, block_d=64, hopper=True), 64, id="on Hopper, segments", marks=gpu),
]


def ragged_tensors(tensors, size: int, chunk: int, heads: int = 1) -> list[torch.Tensor]:
    """The tensors of prepare_varlen: a sequence of two segments and a snapshot inside a chunk."""
    device, length = tensors.device, max(chunk, 4) + 3
    # The interpreter's loops count in Python's numbers, which meet a stride as 32 bits: there no sequence has the row.
    rows = length + (device.type == "cpu")
    q, k, v, out = (tensors.normal(rows, heads, size, dtype=BF16) for _ in range(4))
    pool = tensors.normal(4, heads, size, size, dtype=BF16)
    cu, slots, positions, targets = (
        torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, length], [3], [[length - 1]], [[2]])
    )
    has = torch.tensor([True], device=device)
    return [q, k, v, tensors.slopes(heads), cu, pool, slots, has, positions, targets, out]


@pytest.mark.parametrize(("plan", "size"), FAR_WALKS)
@pytest.mark.parametrize(
    "dims",
    [{0: 0, 1: 0, 2: 0, 5: 0, 10: 0}, {0: 1, 1: 1, 2: 1, 5: 1, 10: 1}],
    ids=["rows and slots", "heads"],
)
def test_ragged_walks_follow_rows_slots_and_heads_more_than_2_to_the_31_elements_apart(
    tensors, kernels, plan, size, dims
) -> None:
    on_hopper_or_skip(plan, tensors.device)

    def walk(*given: torch.Tensor) -> tuple[()]:
        kernels.call("varlen", given, False, 1.0, plan=plan)
        return ()

    check_far_apart(walk, ragged_tensors(tensors, size, plan.chunk, heads=1 + dims[0]), dims)


@pytest.mark.parametrize(("plan", "size"), FAR_WALKS[:3])
@pytest.mark.parametrize("dims", [{0: 2, 1: 2, 2: 2, 5: 2, 10: 2}, {5: 3}], ids=["elements", "columns of states"])
def test_ragged_walks_follow_elements_whose_last_is_more_than_2_to_the_31_elements_off(
    tensors, kernels, plan, size, dims
) -> None:
    def walk(*given: torch.Tensor) -> tuple[()]:
        kernels.call("varlen", given, False, 1.0, plan=plan)
        return ()

    check_far_apart(walk, ragged_tensors(tensors, size, plan.chunk), dims)


@pytest.mark.parametrize(("plan", "size"), FAR_WALKS)
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["sequences", "heads", "rows"])
def test_dense_walks_and_gradients_follow_dimensions_more_than_2_to_the_31_elements_apart(
    tensors, kernels, plan, size, dim
) -> None:
    on_hopper_or_skip(plan, tensors.device)
    if tensors.device.type == "cpu":
        if dim == 2 and plan.chunk == 1:
            pytest.skip("the interpreter's loops count in Python's numbers, which meet a stride as 32 bits")
        if dim < 2 and plan.segment:
            pytest.skip("takes long in the interpreter, which addresses segments as it does whole sequences")
    batch, heads = 1 + (dim == 0), 1 + (dim == 1)
    q, k, v, d_out, *results = (tensors.normal(batch, heads, plan.chunk + 3, size, dtype=BF16) for _ in range(8))
    history, kv, d_history = (tensors.normal(batch, heads, size, size) for _ in range(3))
    slopes = tensors.slopes(heads)

    def attend(q, k, v, out) -> tuple[()]:
        given = (q, k, v, slopes, history, out, kv[:, :, None])
        kernels.call("attention", given, 1.0, plan=plan)
        return ()

    def differentiate(q, k, v, d_out, dq, dk, dv) -> tuple[()]:
        given = (q, k, v, slopes, history, d_out, kv[:, :, None], dq, dk, dv, d_history)
        kernels.call("attention_backward", given, 1.0, plan=plan)
        return ()

    check_far_apart(attend, (q, k, v, results[0]), dict.fromkeys((1, 3) if dim else range(4), dim))
    if tensors.device.type == "cuda" or not plan.segment:
        check_far_apart(differentiate, (q, k, v, d_out, *results[:3]), dict.fromkeys((3, 5) if dim else (5,), dim))


@pytest.mark.parametrize("dim", [0, 1, 2, 3], ids=["slots or sequences", "tokens or heads", "heads or d", "elements"])
def test_decoding_verifying_and_committing_follow_dimensions_more_than_2_to_the_31_elements_apart(
    tensors, kernels, dim
) -> None:
    sequences, heads = 1 + (dim == 0), 1 + (dim in (1, 2))
    q, k, v, out = (tensors.normal(sequences, 3, heads, 16, dtype=BF16) for _ in range(4))
    pool = tensors.normal(3, heads, 16, 16, dtype=BF16)
    slots, accepted = (torch.tensor(n[:sequences], dtype=torch.int32, device=q.device) for n in ([2, 0], [3, 2]))
    slopes, plan = tensors.slopes(heads), DecodePlan(16, 4)

    def verify_and_commit(q, k, v, pool, out) -> tuple[()]:
        drafts = (q, k, v, pool, slots, slopes, out)
        kernels.call("verify", drafts, 1.0, plan=plan)
        taken = (k, v, pool, slots, slopes, accepted)
        kernels.call("commit", taken, plan=plan)
        return ()

    check_far_apart(verify_and_commit, (q, k, v, pool, out), dict.fromkeys(range(5), dim))
    if dim < 3:
        tokens = [x[:, 0].contiguous() for x in (q, k, v)]

        def decode(q, k, v, pool, out) -> tuple[()]:
            given = (q, k, v, pool, slots, slopes, out)
            kernels.call("decode", given, 1.0, plan=plan)
            return ()

        check_far_apart(decode, (*tokens, pool, out[:, 0].contiguous()), dict.fromkeys((0, 3, 4), dim))


@gpu
@much_memory()
def test_a_packed_pool_of_more_than_2_to_the_31_elements_is_read_and_written_in_its_last_slots(
    tensors, kernels
) -> None:
    size, heads = 128, 8
    slots = 2**31 // (heads * size * size) + 9
    for plan in (PrefillPlan(64, 64, 0, 4, 2), PrefillPlan(64, 64, 64, 4, 2), None):
        batch = tensors.ragged(
            [200, 1, 64], heads=(heads, heads), sizes=(size, size), pool_dtype=BF16, num_slots=slots,
            slots=[slots - 1, 0, slots - 3],
        )  # fmt: skip
        assert batch.pool.tensor.numel() > 2**31
        used = [slots - 1, 0, slots - 3]
        kernels.prefill(batch, plan)
        attended = batch.attend({0: 200, 1: 1, 2: 64})
        tensors.assert_rounded(batch.pool.tensor[used], attended.state, apart=(0, 1))
        batch.check_out(batch.out.tensor)
        del batch


# Grids


PLAIN = DeviceLimits(108, 166912)


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def prepare_ragged(
    kernels: Any, rows: int, sequences: int, plan: PrefillPlan | None = None, snapshots: int = 0, heads: int = 2
) -> None:
    """Make a ragged call of tensors that have no memory."""
    q = meta(rows, heads, 16)
    cu, slots = meta(sequences + 1, dtype=torch.int32), meta(sequences, dtype=torch.int32)
    pool = meta(5, heads, 16, 16)
    places = (meta(sequences, snapshots, dtype=torch.int32),) * 2 if snapshots else (None, None)
    given = (q, q, q, meta(heads, dtype=FP32), cu, pool, slots, None, *places, q)
    kernels.call("varlen", given, True, 1.0, plan=plan)


MANY = 70_000


@pytest.mark.parametrize("segment", [0, 16])
def test_the_grids_of_many_sequences_rows_and_snapshots_are_such_as_a_launch_can_take(
    monkeypatch, kernels, segment
) -> None:
    grids = Grids(monkeypatch, PLAIN, launch)
    plan = PrefillPlan(16, 16, segment, 4, 2)
    prepare_ragged(kernels, MANY, MANY, plan)
    prepare_ragged(kernels, 2**21, 3, plan)
    prepare_ragged(kernels, 1000, 1000, plan, snapshots=70)
    q, kv = meta(MANY, 1, 40, 16), meta(MANY, 1, 1, 16, 16, dtype=FP32)
    given = (q, q, q, meta(1, dtype=FP32), None, q, kv)
    kernels.call("attention", given, 1.0, plan=plan)
    q, pool = meta(MANY, 1, 16), meta(5, 1, 16, 16)
    given = (q, q, q, pool, meta(MANY, dtype=torch.int32), meta(1, dtype=FP32), q)
    kernels.call("decode", given, 1.0, plan=DecodePlan(16, 1))
    for name, grid in grids.grids:
        # CUDA's limits of the three dimensions of a grid.
        for size, most in zip(grid, (2**31 - 1, 65535, 65535), strict=True):
            assert 0 < size <= most, (name, grid)


def test_no_drafts_launch_nothing(monkeypatch, kernels) -> None:
    """There are no rows to read then, not even one too many."""
    grids = Grids(monkeypatch, PLAIN, launch)
    for sequences, tokens in ((3, 0), (0, 4), (0, 0)):
        q, pool = meta(sequences, tokens, 2, 16), meta(5, 2, 16, 16)
        slots, slopes = meta(sequences, dtype=torch.int32), meta(2, dtype=FP32)
        for plan in (None, DecodePlan(16, 1)):
            kernels.call("verify", (q, q, q, pool, slots, slopes, q), 1.0, plan=plan)
            kernels.call("commit", (q, q, pool, slots, slopes, slots), plan=plan)
    assert not grids.calls


@gpu
def test_more_sequences_than_a_grid_has_in_its_last_dimensions_are_all_decoded_and_walked(tensors, kernels) -> None:
    batch = tensors.ragged([1] * MANY, heads=(1, 1), sizes=(16, 16), num_slots=MANY, slots=range(MANY))
    before = batch.before
    kernels.decode(batch, DecodePlan(16, 1))
    factor = torch.exp(-batch.slopes.double())
    wanted = factor * before.double() + batch.k.double()[..., :, None] * batch.v.double()[..., None, :]
    torch.testing.assert_close(batch.pool.tensor.double(), wanted, rtol=1e-6, atol=1e-6)
    for segment in (0, 16):
        batch.pool.tensor.copy_(before)
        kernels.prefill(batch, PrefillPlan(16, 16, segment, 4, 1))
        torch.testing.assert_close(batch.pool.tensor.double(), wanted, rtol=1e-2, atol=1e-2)


# Which program takes which segment: the arithmetic of schedule.locate and schedule.carried_slot, in Python and on the
# device


def located(cu: Sequence[int], rows: int, segment: int, place: int) -> tuple[int, int, int, int]:
    """chunked.locate: sequence, segment, and the sequence's rows; sequence B stands for the rows of none."""

    def first_segment(i: int) -> int:
        return min(max(cu[i], 0), rows) // segment + i

    count = len(cu) - 1
    # Which of several it is matters where bounds are impossible.
    sequence, above = min(max(place - rows // segment, 0), count), min(place, count) + 1
    while above - sequence > 1:
        middle = (sequence + above) // 2
        if first_segment(middle) <= place:
            sequence = middle
        else:
            above = middle
    begin = min(max(cu[sequence], 0), rows)
    end = min(max(cu[sequence + 1] if sequence < count else rows, begin), rows)
    i_segment = place - first_segment(sequence)
    # Places before the first sequence's are nobody's.
    return sequence, max(i_segment, 0), begin, begin if i_segment < 0 else end


def carried(begin: int, sequence: int, segment: int) -> int:
    """schedule.carried_slot of ragged sequences."""
    return begin // segment + min(begin // segment, sequence)


def located_state(cu: Sequence[int], rows: int, segment: int, state: int, chains: bool = False) -> tuple[int, int]:
    """schedule.locate_state (chains: locate_chain): sequence and segment of a slot in the workspace, or (-1, 0)."""
    for i in range(len(cu) - 1):
        begin = min(max(cu[i], 0), rows)
        length = min(max(cu[i + 1], begin), rows) - begin
        if chains and length > segment and min(begin // segment, i) == state:
            return i, 0
        i_segment = state - carried(begin, i, segment)
        if not chains and length > segment and 0 <= i_segment < -(-length // segment):
            return i, i_segment
    return -1, 0


def grid_places(rows: int, sequences: int, segment: int) -> int:
    return rows // segment + sequences + 1


def states_between(rows: int, sequences: int, segment: int) -> int:
    return rows // segment + min(sequences, rows // segment)


def check_places(cu: Sequence[int], rows: int, segment: int) -> None:
    """Every row of every sequence, and every row of none, has one place; states carried never share theirs."""
    count = len(cu) - 1
    owner: dict[int, tuple[int, int]] = {}
    taken: dict[int, tuple[int, int]] = {}
    for place in range(grid_places(rows, count, segment)):
        sequence, i_segment, begin, end = located(cu, rows, segment, place)
        assert i_segment >= 0
        first, last = (min(begin + i * segment, end) for i in (i_segment, i_segment + 1))
        for row in range(first, last):
            assert row not in owner, (cu, rows, segment, row)
            owner[row] = (sequence, i_segment)
        if sequence < count and end - begin > segment and first < last:
            state = carried(begin, sequence, segment) + i_segment
            assert 0 <= state < states_between(rows, count, segment), (cu, rows, segment)
            assert state not in taken, (cu, rows, segment)
            taken[state] = (sequence, i_segment)
    wanted = {row: (i, (row - cu[i]) // segment) for i in range(count) for row in range(cu[i], cu[i + 1])}
    wanted |= {row: (count, (row - cu[count]) // segment) for row in range(cu[count], rows)}
    assert owner == wanted, (cu, rows, segment)


def test_in_all_small_batches_each_row_has_one_program_and_each_carried_state_a_slot() -> None:
    for rows, segment, count in itertools.product(range(9), (1, 2, 3), range(4)):
        for bounds in itertools.combinations_with_replacement(range(rows + 1), count):
            check_places([0, *bounds], rows, segment)


def random_bounds(rng: random.Random) -> tuple[list[int], int]:
    count = rng.randint(0, 9)
    lengths = [rng.choice([0, 0, 1, 15, 16, 17, 31, 32, 33, rng.randint(0, 200)]) for _ in range(count)]
    return [0, *itertools.accumulate(lengths)], sum(lengths) + rng.choice([0, 0, 1, 40])


def test_in_random_batches_each_row_has_one_program_and_each_carried_state_a_slot() -> None:
    rng = random.Random(0)
    for _ in range(300):
        cu, rows = random_bounds(rng)
        for segment in (16, 32, 48):
            check_places(cu, rows, segment)


def impossible_bounds(rng: random.Random) -> tuple[list[int], int]:
    rows = rng.randint(0, 100)
    numbers = [-(2**31), -5, 0, rows, rows + 1, 2**31 - 1]
    return [rng.choice([*numbers, rng.randint(0, 100)]) for _ in range(rng.randint(1, 7))], rows


def test_segments_of_impossible_bounds_stay_within_rows_and_states() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        cu, rows = impossible_bounds(rng)
        count = len(cu) - 1
        for place in range(grid_places(rows, count, 16)):
            sequence, i_segment, begin, end = located(cu, rows, 16, place)
            assert 0 <= begin <= end <= rows
            assert 0 <= sequence <= count
            first, last = (min(begin + i * 16, end) for i in (i_segment, i_segment + 1))
            if first < last:
                assert begin <= first, "another's rows would be written"
                if end - begin > 16 and sequence < count:
                    assert 0 <= carried(begin, sequence, 16) + i_segment < states_between(rows, count, 16)


@triton.jit
def tabulate_states(p_cu, p_table, num_sequences, rows, SEGMENT: tl.constexpr):
    """Of each slot, and of each chain, sequence, segment and rows."""
    i_w = tl.program_id(0)
    batch = schedule.Batch(p_cu, None, None, schedule.Counts(rows, num_sequences, num_sequences))
    i_n, i_segment, begin, end = schedule.locate_state(batch, i_w, SEGMENT, False)
    tl.store(p_table + i_w * 5, i_n)
    tl.store(p_table + i_w * 5 + 1, i_segment)
    tl.store(p_table + i_w * 5 + 2, end - begin)
    i_n, begin, end = schedule.locate_chain(batch, i_w, SEGMENT)
    tl.store(p_table + i_w * 5 + 3, i_n)
    tl.store(p_table + i_w * 5 + 4, end - begin)


@triton.jit
def tabulate(p_cu, p_table, num_sequences, rows, SEGMENT: tl.constexpr):
    i_w = tl.program_id(0)
    batch = schedule.Batch(p_cu, None, None, schedule.Counts(rows, num_sequences, num_sequences))
    i_n, i_segment, begin, end = schedule.locate(batch, i_w, SEGMENT)
    slot = schedule.carried_slot(batch, i_n, begin, SEGMENT)
    tl.store(p_table + i_w * 5, i_n)
    tl.store(p_table + i_w * 5 + 1, i_segment)
    tl.store(p_table + i_w * 5 + 2, begin)
    tl.store(p_table + i_w * 5 + 3, end)
    tl.store(p_table + i_w * 5 + 4, slot)


def all_bounds() -> Iterator[tuple[list[int], int]]:
    rng = random.Random(2)
    for _ in range(6):
        yield random_bounds(rng)
        yield impossible_bounds(rng)
    yield [0, 0, 0, 0], 0
    yield [0], 33


@pytest.mark.parametrize(("shares", "order"), [(1, [2, 1, 0, 3]), (2, [5, 4, 3, 2, 1, 0, 7, 6])])
def test_prompts_which_come_last_begin_first_but_the_rows_of_no_sequence_end(shares: int, order: list[int]) -> None:
    """Of three sequences by roles, of one program or two that share."""
    assert [schedule.last_first.fn(i, len(order), shares) for i in range(len(order))] == order


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("segment", [16, 32])
def test_the_device_finds_the_segments_that_python_does(device: torch.device, segment: int, dtype: torch.dtype) -> None:
    for cu, rows in all_bounds():
        places = grid_places(rows, len(cu) - 1, segment)
        table = torch.full((places, 5), -9, dtype=torch.int64, device=device)
        bounds = torch.tensor(cu, dtype=dtype, device=device)
        tabulate[(places,)](bounds, table, len(cu) - 1, rows, SEGMENT=segment)
        for place, found in enumerate(table.tolist()):
            sequence, i_segment, begin, end = located(cu, rows, segment, place)
            assert found == [sequence, i_segment, begin, end, carried(begin, sequence, segment)], (cu, rows, place)


@pytest.mark.parametrize("segment", [16, 32])
def test_the_device_finds_whose_each_carried_state_and_chain_is(device: torch.device, segment: int) -> None:
    rng = random.Random(4)
    for cu, rows in [random_bounds(rng) for _ in range(12)]:
        count, states = len(cu) - 1, states_between(rows, len(cu) - 1, segment)
        if not states:
            continue
        table = torch.full((states, 5), -9, dtype=torch.int64, device=device)
        tabulate_states[(states,)](torch.tensor(cu, device=device), table, count, rows, SEGMENT=segment)
        for state, (i_n, i_segment, length, of_chain, length_of_chain) in enumerate(table.tolist()):
            is_carried = i_n < count and length > max(i_segment, 1) * segment
            found = (i_n, i_segment) if is_carried else (-1, 0)
            assert found == located_state(cu, rows, segment, state), (cu, rows, state)
            found = (of_chain, 0) if of_chain < count and length_of_chain > segment else (-1, 0)
            assert found == located_state(cu, rows, segment, state, chains=True), (cu, rows, state)


@pytest.mark.parametrize("segment", [16, 32, 48])
def test_launches_have_a_program_for_each_segment_and_a_state_between_them(monkeypatch, kernels, segment: int) -> None:
    rng = random.Random(3)
    plan = PrefillPlan(16, 16, segment, 4, 2)
    for _ in range(20):
        cu, rows = random_bounds(rng)
        if not rows:
            continue
        grids = Grids(monkeypatch, PLAIN, launch)
        prepare_ragged(kernels, rows, len(cu) - 1, plan)
        assert grids.calls[-1][0] == "prefill"
        states = states_between(rows, len(cu) - 1, segment)
        for name, grid in grids.grids:
            # Of two heads, one tile each.
            if name == "prefill":
                assert grid == (2 * grid_places(rows, len(cu) - 1, segment), 1, 1)
            elif rows > segment and name == "segment_states":
                assert grid == (2 * states, 1, 1)
            elif rows > segment and name == "carry_states":
                assert grid == (2 * (states - rows // segment), 1, 1)
        if rows > segment:
            assert [name for name, _ in grids.calls] == ["segment_states", "carry_states", "prefill"]
            between = next(given for name, given in grids.calls if name == "segment_states")[5]
            assert between.shape[0] == states
        else:
            # One segment each: nothing is carried.
            assert [name for name, _ in grids.calls] == ["prefill"]


def test_states_between_segments_are_allocated_only_for_sequences_longer_than_a_segment(monkeypatch, kernels) -> None:
    """Many short sequences would otherwise take more memory for states that nothing carries than for q, k and v."""
    made: list[int] = []

    def counted(size: tuple[int, ...], device: torch.device) -> Callable[[], torch.Tensor]:
        def allocate() -> torch.Tensor:
            made.append(math.prod(size))
            return torch.empty(size, device="meta")

        return allocate

    Grids(monkeypatch, PLAIN, launch)
    monkeypatch.setattr(launch, "_workspace", counted)
    plan = PrefillPlan(16, 16, 64, 4, 2)
    q, kv, ed = meta(1000, 2, 64, 16), meta(1000, 2, 1, 16, 16, dtype=FP32), meta(2, dtype=FP32)
    given = (q, q, q, ed, None, q, kv)
    run, given_tensors = kernels.prepare("attention", given, 1.0, plan=plan)
    run(given_tensors)
    assert made == [0]
    assert Heads(2, 2, 16, 16).num_heads * cdiv(16, plan.block_e) == 2


# None: token by token.
every_way = pytest.mark.parametrize("segment", [0, 16, None])


def plan_of(segment: int | None) -> PrefillPlan:
    return PrefillPlan(1, 16, 0, 1, 1, 16) if segment is None else PrefillPlan(16, 16, segment, 4, 1, 16)


@every_way
@pytest.mark.parametrize(
    ("cu", "rows"),
    [([0, 40, 2**31 - 1], 70), ([0, 70, 90, 200], 70), ([-7, 30, 70], 70), ([-9, -5, -1], 20), ([25, 40, 70], 75)],
    ids=["past the end", "all past the end", "before the beginning", "all before the beginning", "from later on"],
)
def test_kernels_clamp_impossible_sequences_and_zero_the_rows_of_none(tensors, kernels, cu, rows, segment) -> None:
    clamped = [min(max(bound, 0), rows) for bound in cu]
    lengths = [max(end - begin, 0) for begin, end in itertools.pairwise(clamped)]
    dtype = FP32 if segment is None else BF16
    batch = tensors.ragged(lengths, heads=(1, 1), sizes=(16, 16), rows_after=rows - sum(lengths), dtype=dtype)
    batch.cu_seqlens.copy_(torch.tensor(cu))
    before = clamped[0]
    if before:
        # The rows of the sequences stand behind rows of none.
        for name in ("q", "k", "v"):
            tensor = getattr(batch, name)
            tensor.copy_(tensor.roll(before, 0))
        batch.begins = [begin + before for begin in batch.begins]
    kernels.prefill(batch, plan_of(segment))
    batch.check()


@every_way
@pytest.mark.parametrize("cu", [[0, 50, 10, 60], [70, 0, 35], [0, 2**31 - 1, -(2**31), 70]], ids=str)
def test_kernels_stay_within_the_rows_and_slots_when_sequences_overlap(tensors, kernels, cu, segment) -> None:
    rows, count = 70, len(cu) - 1
    batch = tensors.ragged([rows] + [0] * (count - 1), heads=(1, 1), sizes=(16, 16))
    batch.cu_seqlens.copy_(torch.tensor(cu))
    for slot in batch.slot_of:
        batch.pool.tensor[slot] = 1
    batch.before.copy_(batch.pool.tensor)
    inputs = Inputs()
    inputs.hide(batch, aligned=True)
    kernels.prefill(batch, plan_of(segment))
    inputs.check()
    batch.pool.check(written=False)
    batch.out.check(written=False)
    assert bool(batch.pool.tensor[batch.slot_of].isfinite().all()), "a state was made of what lies outside the rows"
    for slot in set(range(batch.num_slots)) - set(batch.slot_of):
        assert_bitwise_equal(batch.pool.tensor[slot], batch.before[slot], what=f"slot {slot}, which is not in use,")


@every_way
def test_kernels_leave_out_impossible_snapshots(tensors, kernels, segment) -> None:
    ends = torch.iinfo(torch.int64)
    batch = tensors.ragged(
        [40, 0, 17], heads=(1, 1), sizes=(16, 16), slots=[3, 1, 0], num_slots=8, index_dtype=torch.int64
    )
    positions = [[16, 41, 0, -2, 1], [1, 0, -1, 16, 2], [ends.max, ends.min, 17, 18, 3]]
    slots = [[5, 6, 6, 6, 8], [6, 6, 6, 6, 6], [6, 6, 7, 6, ends.max]]
    snapshot = [torch.tensor(values, device=tensors.device) for values in (positions, slots)]
    given = (
        batch.q, batch.k, batch.v, batch.slopes, batch.cu_seqlens, batch.pool.tensor, batch.slots,
        batch.has_initial_state, *snapshot, batch.out.tensor,
    )  # fmt: skip
    kernels.call("varlen", given, False, 1.0, plan=plan_of(segment))
    batch.check(snapshots=[(0, 16, 5), (2, 17, 7)])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_kernels_take_an_impossible_number_of_accepted_drafts_for_0(tensors, kernels, dtype) -> None:
    ends = torch.iinfo(dtype)
    batch = tensors.ragged([3] * 6, heads=(1, 1), sizes=(16, 16), index_dtype=dtype)
    kernels.commit(batch, [4, -1, 3, ends.max, ends.min, 2**31 + 1 if dtype == torch.int64 else 0], DecodePlan(16, 4))
    batch.check(states=[0, 0, 3, 0, 0, 0], products=FP32, out=False)
