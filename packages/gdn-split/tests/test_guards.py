"""Does anything read or write out of place, or leave an element unwritten? The kernels, and the public functions.

Every tensor stands inside a larger buffer of NaN that differs from place to place, with gaps between its rows. The
tests marked `sanitize` hold every kernel and every branch of the plans, for compute-sanitizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import gdn_split
from gdn_split import reference
from gdn_split.plan import ConvPlan, DeviceLimits, GroupShape, SplitPlan, cdiv, plan_conv, plan_split
from kernel_reference import projection
from kernel_reference.models import QWEN3_NEXT_80B
from kernel_reference.testing.guards import Canaried, assert_bitwise_equal, canaried, nan_pages
from kernel_reference.testing.numerics import assert_close_to_oracle, assert_no_lean

sanitize = pytest.mark.sanitize

_TP8 = QWEN3_NEXT_80B.tensor_parallel(8)
TP8 = GroupShape(_TP8.num_heads_qk, _TP8.num_heads_v, _TP8.head_qk, _TP8.head_v)
# r*hv = 60 and hq = 12 fill no power of two, and rows of these are not multiples of 16 bytes.
RATIO_3 = GroupShape(2, 6, 12, 20)
RATIO_6 = GroupShape(1, 6, 64, 32)
SHAPES = {"Qwen3-Next TP8": TP8, "r=3": RATIO_3, "r=6": RATIO_6}
# More than the 64 rows of a step's largest overshoot at 2 * nv columns, and several rows of the widest tensor.
BAND = 16384


def by_group(rows: int, shape: GroupShape, step: int, step_ba: int) -> SplitPlan:
    return SplitPlan(cdiv(rows, step_ba) + cdiv(rows, step) * shape.num_heads_qk, 0, step, step_ba, 4)


def by_run(rows: int, shape: GroupShape, cores: int) -> SplitPlan:
    return plan_split(rows, shape, 2 * (shape.qkvz_width + shape.ba_width), DeviceLimits(cores))


def waiting(plan: SplitPlan | ConvPlan, device: torch.device) -> SplitPlan | ConvPlan:
    """The plan as a launch that waits on the device for the one ahead, where the device knows that."""
    can_wait = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability() >= (9, 0)
    return replace(plan, dependent_launch=can_wait)


# 5 rows in steps of 4, 7 and 2 cores' runs of 1 and 3, and as few rows as leave most of a step empty.
MOVES = [
    pytest.param(5, lambda n, s: by_group(n, s, 4, 8), id="5 rows, 4 a step", marks=sanitize),
    pytest.param(3, lambda n, s: by_group(n, s, 1, 2), id="3 rows, 1 a step"),
    pytest.param(9, lambda n, s: by_group(n, s, 8, 64), id="9 rows, 8 a step"),
    pytest.param(1, lambda n, s: by_group(n, s, 16, 64), id="1 row, 16 a step", marks=sanitize),
    pytest.param(5, lambda n, s: by_run(n, s, 2), id="5 rows on 2 cores", marks=sanitize),
    pytest.param(7, lambda n, s: SplitPlan(1, 7, 4, 4, 4), id="7 rows on 1 core, 4 a step"),
    pytest.param(6, lambda n, s: SplitPlan(2, 4, 4, 4, 4), id="6 rows in runs of 4", marks=sanitize),
    pytest.param(5, lambda n, s: SplitPlan(2, 3, 2, 2, 4), id="5 rows in runs of 3, 2 a step"),
]
MakePlan = Callable[[int, GroupShape], SplitPlan]


def guarded(
    device: torch.device, rows: int, tail: Sequence[int], dtype: torch.dtype = torch.bfloat16, gap: int = 24,
    offset: int = 0,
) -> Canaried:  # fmt: skip
    """A tensor [rows, *tail] with `gap` guarded elements between its rows."""
    strides = list(torch.empty((1, *tail), device="meta").stride())
    strides[0] = torch.Size(tail).numel() + gap
    return canaried((rows, *tail), dtype, device, strides=strides, band=BAND, offset=offset)


def filled(buffer: Canaried) -> Canaried:
    buffer.tensor.copy_(torch.randn(buffer.tensor.shape, device=buffer.tensor.device))
    return buffer


def projections(
    device: torch.device, rows: int, shape: GroupShape, ba_dtype: torch.dtype = torch.bfloat16
) -> list[Canaried]:
    return [guarded(device, rows, [shape.qkvz_width]), guarded(device, rows, [shape.ba_width], ba_dtype, gap=3)]


def parts_of(
    device: torch.device, rows: int, shape: GroupShape, ba_dtype: torch.dtype = torch.bfloat16
) -> list[Canaried]:
    heads = shape.num_heads_v
    return [
        guarded(device, rows, [shape.qkv_width]),
        guarded(device, rows, [heads, shape.head_v], gap=40),
        guarded(device, rows, [heads], ba_dtype, gap=5),
        guarded(device, rows, [heads], ba_dtype, gap=1),
    ]


def tensors_of(buffers: Sequence[Canaried]) -> list[torch.Tensor]:
    return [buffer.tensor for buffer in buffers]


def sizes_of(shape: GroupShape) -> tuple[int, int, int, int]:
    return shape.num_heads_qk, shape.num_heads_v, shape.head_qk, shape.head_v


Tensors = Sequence[torch.Tensor]


def check(written: Sequence[Canaried], wanted: Tensors, read: Sequence[Canaried], before: Tensors) -> None:
    for buffer, expected in zip(written, wanted, strict=True):
        buffer.check(written=True)
        assert_bitwise_equal(buffer.tensor, expected)
    for buffer, original in zip(read, before, strict=True):
        buffer.check(written=False)
        assert_bitwise_equal(buffer.tensor, original, what="an input")


@pytest.mark.parametrize(("rows", "make_plan"), MOVES)
@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_split_writes_every_element_of_its_outputs_and_nothing_beside_them(
    kernels: Any, device: torch.device, shape: GroupShape, layout: str, rows: int, make_plan: MakePlan
) -> None:
    read, written = projections(device, rows, shape), parts_of(device, rows, shape)
    for buffer in read:
        filled(buffer)
    (qkvz, ba), parts = tensors_of(read), tensors_of(written)
    before = [qkvz.clone(), ba.clone()]
    plan = make_plan(rows, shape)
    kernels.move(qkvz, ba, parts, shape, layout, False, plan)
    check(written, projection.split(*before, *sizes_of(shape), layout), read, before)


@pytest.mark.parametrize(("rows", "make_plan"), MOVES)
@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_merge_writes_every_element_of_its_outputs_and_nothing_beside_them(
    kernels: Any, device: torch.device, shape: GroupShape, layout: str, rows: int, make_plan: MakePlan
) -> None:
    written, read = projections(device, rows, shape), parts_of(device, rows, shape)
    for buffer in read:
        filled(buffer)
    (qkvz, ba), parts = tensors_of(written), tensors_of(read)
    before = [part.clone() for part in parts]
    plan = make_plan(rows, shape)
    kernels.move(qkvz, ba, parts, shape, layout, True, plan)
    check(written, projection.merge(*before, *sizes_of(shape), layout), read, before)


@sanitize
@pytest.mark.parametrize("merge", [False, True], ids=["split", "merge"])
def test_copies_that_start_off_16_bytes_write_every_element_and_nothing_beside(
    kernels: Any, device: torch.device, merge: bool
) -> None:
    rows, shape = 5, TP8
    # Each tensor starts one or more elements off, so that no two of them are aligned alike.
    widths = [[shape.qkvz_width], [shape.ba_width], [shape.qkv_width], [4, 128], [4], [4]]
    buffers = [guarded(device, rows, tail, gap=7, offset=1 + place) for place, tail in enumerate(widths)]
    read, written = (buffers[2:], buffers[:2]) if merge else (buffers[:2], buffers[2:])
    for buffer in read:
        filled(buffer)
    before = [tensor.clone() for tensor in tensors_of(read)]
    (qkvz, ba), parts = tensors_of(buffers[:2]), tensors_of(buffers[2:])
    plan = by_group(rows, shape, 4, 8)
    kernels.move(qkvz, ba, parts, shape, "interleaved", merge, plan)
    wanted = (projection.merge if merge else projection.split)(*before, *sizes_of(shape))
    check(written, wanted, read, before)


@sanitize
@pytest.mark.parametrize("few_cores", [False, True], ids=["by group", "by run"])
@pytest.mark.parametrize(
    ("dtype", "ba_dtype"),
    [(torch.int8, torch.float32), (torch.float64, torch.bfloat16), (torch.float8_e4m3fn, torch.int64)],
    ids=["int8 and float32", "float64 and bfloat16", "fp8 and int64"],
)
def test_elements_of_1_to_8_bytes_are_written_and_nothing_beside_them(
    kernels: Any, device: torch.device, dtype: torch.dtype, ba_dtype: torch.dtype, few_cores: bool
) -> None:
    rows, shape = 5, RATIO_3
    qkvz, ba = guarded(device, rows, [shape.qkvz_width], dtype), guarded(device, rows, [shape.ba_width], ba_dtype)
    tails = [[shape.qkv_width], [6, 20], [6], [6]]
    parts = [guarded(device, rows, tail, d) for tail, d in zip(tails, [dtype, dtype, ba_dtype, ba_dtype], strict=True)]
    plan = by_run(rows, shape, 2) if few_cores else by_group(rows, shape, 2, 8)
    tensors = tensors_of(parts)
    # What stands in the inputs is noise of its own already, so that no output can hold it but by copying.
    kernels.move(qkvz.tensor, ba.tensor, tensors, shape, "interleaved", False, plan)
    wanted = projection.split(qkvz.tensor, ba.tensor, *sizes_of(shape))
    for part, expected in zip(parts, wanted, strict=True):
        # In a byte the copied noise may equal the noise that was there: all bits together cannot.
        part.check(written=False)
        assert_bitwise_equal(part.tensor, expected)


# Sequences, tokens, width, and the plan's choices: sequences a program and columns a program.
CONVOLUTIONS = [
    pytest.param(TP8, 4, 1, 4, "packed", None, id="TP8, decode", marks=sanitize),
    pytest.param(TP8, 5, 1, 4, "packed", (4, 128), id="TP8, 5 sequences in fours", marks=sanitize),
    pytest.param(TP8, 3, 2, 4, "channels last", (2, 128), id="TP8, channels last, 2 tokens", marks=sanitize),
    pytest.param(RATIO_3, 3, 3, 4, "packed", (2, 64), id="r=3, masked block", marks=sanitize),
    pytest.param(RATIO_3, 5, 1, 3, "gaps", (4, 16), id="r=3, width 3, gaps", marks=sanitize),
    pytest.param(RATIO_3, 3, 4, 2, "packed", (1, 32), id="r=3, width 2, more tokens than taps", marks=sanitize),
    pytest.param(RATIO_6, 3, 2, 4, "gaps", None, id="r=6, gaps"),
]


def pool(device: torch.device, slots: int, channels: int, taps: int, kind: str) -> Canaried:
    strides = {
        "packed": (channels * taps + 16, taps, 1),
        "channels last": (channels * taps + 9, 1, channels + 3),
        "gaps": (channels * (taps + 2) + 1, taps + 2, 1),
    }[kind]
    return canaried((slots, channels, taps), torch.bfloat16, device, strides=strides, band=BAND)


@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
@pytest.mark.parametrize(("shape", "sequences", "tokens", "width", "kind", "choices"), CONVOLUTIONS)
def test_the_convolution_touches_its_outputs_and_the_slots_it_was_given_and_nothing_else(
    kernels: Any, device: torch.device, shape: GroupShape, sequences: int, tokens: int, width: int, kind: str,
    choices: tuple[int, int] | None, layout: str,
) -> None:  # fmt: skip
    rows, channels, slots = sequences * tokens, shape.qkv_width, 8
    read = projections(device, rows, shape)
    state = pool(device, slots, channels, width - 1, kind)
    weight = canaried((channels, width), torch.bfloat16, device, row_padding=1 if kind == "gaps" else 0, band=BAND)
    bias = canaried((channels,), torch.bfloat16, device, band=BAND)
    slot = canaried((sequences,), torch.int32, device, band=BAND)
    for buffer in (*read, state, weight, bias):
        filled(buffer)
    # In the middle a sequence that pads, of the kinds that there are: -1, past the pool, far below it.
    named = [6, {1: -1, 2: slots, 3: 2**31 - 1, 4: -(2**31)}[tokens], 1, 7, 0][:sequences]
    slot.tensor.copy_(torch.tensor(named, dtype=torch.int32))
    # A state that no sequence of the call names is NaN: whoever reads it shows it.
    nan_pages(state.tensor, [s for s in named if 0 <= s < slots])
    written = parts_of(device, rows, shape)
    (qkvz, ba), parts = tensors_of(read), tensors_of(written)
    inputs = [*read, weight, bias, slot]
    before = [tensor.clone() for tensor in tensors_of(inputs)]
    wanted_state = state.tensor.clone()

    plan = plan_conv(sequences, tokens, shape, DeviceLimits(132, 232448, 8))
    if choices is not None:
        a_program, block = choices
        tiles = 2 * (cdiv(shape.head_qk, block) + cdiv(shape.ratio * shape.head_v, block)) * shape.num_heads_qk
        programs = cdiv(rows, 16) + cdiv(sequences, a_program) * tiles
        fours = kind != "gaps" and width == 4 and shape.head_qk % block == 0
        plan = ConvPlan(programs, a_program, block, 16, 4, fours=fours)
    else:
        plan = waiting(plan, device)
    given = (qkvz, ba, state.tensor, weight.tensor, bias.tensor, slot.tensor, *parts)
    kernels.convolve(given, shape, tokens, True, layout, plan)

    clean_qkvz, clean_ba, clean_weight, clean_bias, clean_slot = before
    common = dict(tokens_per_sequence=tokens, layout=layout)
    oracle = projection.split_conv1d_update(
        clean_qkvz, clean_ba, wanted_state.clone(), clean_weight, clean_bias, clean_slot, *sizes_of(shape), **common
    )
    plain = projection.split_conv1d_update(
        clean_qkvz, clean_ba, wanted_state, clean_weight, clean_bias, clean_slot, *sizes_of(shape), **common,
        compute_dtype=torch.bfloat16,
    )  # fmt: skip
    assert_close_to_oracle(parts[0], oracle.mixed_qkv, plain.mixed_qkv)
    # A channel is a row here: there are few tokens. The kernel rounds once, which the plain version does not.
    channelwise = oracle.mixed_qkv.T
    assert_no_lean(parts[0].T, channelwise, channelwise.bfloat16())
    written[0].check(written=True)
    check(written[1:], oracle[1:], inputs, before)
    state.check(written=False)
    assert_bitwise_equal(state.tensor, wanted_state, what="the state")
    if sequences > 1:
        assert not any(part[tokens : 2 * tokens].any() for part in parts)


@sanitize
def test_public_functions_write_only_their_outputs_from_inputs_amid_nan(device: torch.device) -> None:
    rows, shape = 6, TP8
    sizes = sizes_of(shape)
    fused, parts, back = (make(device, rows, shape) for make in (projections, parts_of, projections))
    for buffer in fused:
        filled(buffer)
    before = [tensor.clone() for tensor in tensors_of(fused)]
    result = gdn_split.fused_qkvzba_split_reshape_cat(*tensors_of(fused), *sizes, out=tensors_of(parts))
    wanted = projection.split(*before, *sizes)
    check(parts, wanted, fused, before)
    fresh = gdn_split.fused_qkvzba_split_reshape_cat(*tensors_of(fused), *sizes)
    for part, expected in zip(fresh, wanted, strict=True):
        assert_bitwise_equal(part, expected)
    gdn_split.merge_qkvzba(*result, *sizes, out=tensors_of(back))
    check(back, before, fused, before)


@sanitize
@pytest.mark.parametrize("rows", [1, 67])
def test_the_plan_of_the_device_itself_writes_every_element_and_nothing_beside(
    kernels: Any, device: torch.device, rows: int
) -> None:
    if device.type == "cpu":
        plan = plan_split(rows, RATIO_3, 2 * (RATIO_3.qkvz_width + RATIO_3.ba_width), DeviceLimits(132, 232448, 8))
    else:
        plan = None
    read, written = projections(device, rows, RATIO_3), parts_of(device, rows, RATIO_3)
    for buffer in read:
        filled(buffer)
    (qkvz, ba), parts = tensors_of(read), tensors_of(written)
    before = [qkvz.clone(), ba.clone()]
    kernels.move(qkvz, ba, parts, RATIO_3, "interleaved", False, plan)
    check(written, projection.split(*before, *sizes_of(RATIO_3)), read, before)


@sanitize
@pytest.mark.gpu
def test_launches_that_wait_on_the_device_write_every_element_and_nothing_beside(
    kernels: Any, device: torch.device
) -> None:
    rows, shape = 5, TP8
    read, written = projections(device, rows, shape), parts_of(device, rows, shape)
    for buffer in read:
        filled(buffer)
    (qkvz, ba), parts = tensors_of(read), tensors_of(written)
    before = [qkvz.clone(), ba.clone()]
    plan = waiting(by_group(rows, shape, 2, 8), device)
    kernels.move(qkvz, ba, parts, shape, "interleaved", False, plan)
    check(written, projection.split(*before, *sizes_of(shape)), read, before)


@sanitize
@pytest.mark.parametrize("ba_dtype", [torch.bfloat16, torch.float32])
def test_new_outputs_are_packed_and_16_byte_aligned_whatever_the_inputs_strides(
    device: torch.device, ba_dtype: torch.dtype
) -> None:
    # 3 heads of 5 rows: b and a are 30 or 60 bytes each, so that one cut from behind the other would stand askew.
    shape = GroupShape(1, 3, 12, 20)
    qkvz, ba = (filled(buffer).tensor for buffer in projections(device, 5, shape, ba_dtype))
    assert not qkvz.is_contiguous()
    assert not ba.is_contiguous()
    parts = gdn_split.fused_qkvzba_split_reshape_cat(qkvz, ba, *sizes_of(shape))
    # The last two are what a launch and split_conv1d_update allocate; on a CPU the first two are the reference's.
    made = (
        parts,
        gdn_split.merge_qkvzba(*parts, *sizes_of(shape)),
        reference.new_parts(qkvz, ba, shape),
        reference.new_projections(qkvz[:, : shape.qkv_width], ba[:, :3], shape),
    )
    for tensor in (tensor for tensors in made for tensor in tensors):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0
