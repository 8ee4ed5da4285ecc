"""Does the kernel copy every bit, whatever the shape, stride, dtype and plan? Through launch: on a GPU or interpreted.

Interpreted, hypothesis draws the examples, each of few programs. On a GPU a new combination of head counts and sizes
costs a compilation and another number of rows costs nothing: there 60 seeded combinations meet 34 row counts each
(2,040 cases), and strides, dtypes, layout and plan are drawn with the combination.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gdn_split import launch, reference
from gdn_split.plan import ConvPlan, DeviceLimits, GroupShape, SplitPlan, cdiv, plan_conv, plan_split
from kernel_reference import projection
from kernel_reference.models import QWEN3_NEXT_80B
from kernel_reference.testing.memory import much_memory

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = DeviceLimits(132, 232448, 8, dependent_launch=False)
LAYOUTS = ("interleaved", "contiguous")
STEPS = (1, 2, 4, 8, 16, 32, 64)
DTYPES = (
    torch.bool, torch.uint8, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.uint16,
    torch.float32, torch.int32, torch.float64, torch.complex64, torch.int64,
)  # fmt: skip
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# An interpreted program takes some milliseconds, and elements past this many begin to count too.
MOST_ELEMENTS = 50_000


@pytest.mark.parametrize("ratio", [1, 2, 3, 6])
def test_every_side_of_a_tile_is_a_power_of_two_whatever_the_heads(ratio: int) -> None:
    shape = GroupShape(num_heads_qk=3, num_heads_v=3 * ratio, head_qk=96, head_v=80)
    sides = launch._sizes(shape, True)[-3:]
    assert [side & (side - 1) for side in sides] == [0, 0, 0]
    assert all(side >= least for side, least in zip(sides, (96, 80 * ratio, 3 * ratio), strict=True))


@dataclass(frozen=True)
class Move:
    """All of a split or merge but its number of rows."""

    shape: GroupShape
    layout: str
    dtype: torch.dtype
    dtype_ba: torch.dtype
    margins: tuple[int, ...]
    step: int
    cores: int | None

    def plan(self, rows: int) -> SplitPlan:
        if self.cores is None:
            step_ba = min(64, 4 * self.step)
            programs = cdiv(rows, step_ba) + cdiv(rows, self.step) * self.shape.num_heads_qk
            return SplitPlan(programs, 0, self.step, step_ba, 4)
        run = max(1, cdiv(rows, self.cores))
        return SplitPlan(cdiv(rows, run), run, self.step, self.step, 4)


def move(tensors, case: Move, rows: int, plan: SplitPlan | None = None) -> None:
    """Split, then merge: every bit is right and nothing around the results is written."""
    shape = case.shape
    plan = plan or case.plan(rows)
    left = case.margins
    qkvz = tensors.random(rows, shape.qkvz_width, dtype=case.dtype)
    ba = tensors.random(rows, shape.ba_width, dtype=case.dtype_ba)
    sizes = (shape.num_heads_qk, shape.num_heads_v, shape.head_qk, shape.head_v, case.layout)
    as_ints = projection.split(tensors.bits(qkvz), tensors.bits(ba), *sizes)
    parts = [one.view(dtype) for one, dtype in zip(as_ints, [case.dtype] * 2 + [case.dtype_ba] * 2, strict=True)]
    sources = [tensors.band(rows, s.shape[1], dtype=s.dtype, left=i, right=i, values=s) for s, i in
               zip((qkvz, ba), left, strict=False)]  # fmt: skip
    results = [tensors.band(rows, *p.shape[1:], dtype=p.dtype, left=i, right=0) for p, i in
               zip(parts, left[2:], strict=True)]  # fmt: skip
    fused, out = [band.view for band in sources], [band.view for band in results]
    tensors.kernels.move(*fused, out, shape, case.layout, False, plan)
    assert all(band.holds(part) for band, part in zip(results, parts, strict=True)), (case, rows, plan)
    assert all(band.is_unchanged() for band in sources), (case, rows, plan)

    targets = [
        tensors.band(rows, s.shape[1], dtype=s.dtype, left=i, right=i) for s, i in zip((qkvz, ba), left, strict=False)
    ]
    fused = [band.view for band in targets]
    tensors.kernels.move(*fused, out, shape, case.layout, True, plan)
    assert all(band.holds(source) for band, source in zip(targets, (qkvz, ba), strict=True)), (case, rows, plan)
    assert all(band.holds(part) for band, part in zip(results, parts, strict=True)), (case, rows, plan)


@st.composite
def moves(draw) -> tuple[Move, int, int]:
    nqk = draw(st.integers(1, 3))
    shape = GroupShape(nqk, nqk * draw(st.integers(1, 8)), draw(st.integers(1, 320)), draw(st.integers(1, 320)))
    step = draw(st.sampled_from(STEPS))
    cores = draw(st.none() | st.integers(1, 9))
    margins = tuple(draw(st.lists(st.sampled_from([0, 1, 3, 8, 16]), min_size=6, max_size=6)))
    case = Move(
        shape, draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES)),
        margins, step, cores,
    )  # fmt: skip
    rows = draw(st.integers(0, max(1, min(500, 6 * step, MOST_ELEMENTS // shape.qkvz_width))))
    return case, rows, draw(st.integers(0, 2**31))


@settings(max_examples=110 if INTERPRETED else 10)
@given(drawn=moves())
def test_split_and_merge_are_exact_for_any_shape_stride_dtype_and_plan(tensors, drawn) -> None:
    case, rows, seed = drawn
    torch.manual_seed(seed)
    move(tensors, case, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(60))
def test_the_whole_range_in_bulk(tensors, number: int) -> None:
    rng = random.Random(number)
    nqk = rng.choice([1, 1, 2, 3, 4, 5, 16])
    shape = GroupShape(nqk, nqk * (number % 8 + 1), rng.randint(1, 320), rng.randint(1, 320))
    margins = tuple(rng.choice([0, 0, 8, 16, 1, 3]) for _ in range(6)) if number % 3 else (0,) * 6
    most = max(1, 8192 // (shape.qkvz_width // nqk))
    step = rng.choice([step for step in STEPS if step <= most])
    case = Move(shape, LAYOUTS[number // 8 % 2], rng.choice(DTYPES), rng.choice(DTYPES), margins, step, None)
    for turn in range(34):
        rows = (0, 1, 500)[turn] if turn < 3 else rng.randint(0, 500)
        if number % 4 == 3:
            case = Move(*list(case.__dict__.values())[:-1], cores=rng.choice([1, 7, 40, 48, 200]))
        move(tensors, case, rows)


@pytest.mark.parametrize("cores", [1, 7, 40, 48])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plan_for_few_cores_is_bit_exact(tensors, layout, cores) -> None:
    on_gpu = tensors.device.type == "cuda"
    shape = GroupShape(2, 6, 24, 20)
    row_bytes = 2 * (shape.qkvz_width + shape.ba_width)
    case = Move(shape, layout, torch.bfloat16, torch.bfloat16, (3, 0, 0, 0, 1, 0), 1, cores)
    for rows in (1, 6, 41, 100, 500, 4096) if on_gpu else (41, 100):
        move(tensors, case, rows, plan_split(rows, shape, row_bytes, DeviceLimits(cores)))
    # A buffer of fewer rows than a run has makes the loop of steps turn.
    move(tensors, case, 45, plan_split(45, shape, row_bytes, DeviceLimits(cores, on_chip_bytes=9 * row_bytes)))
    # A row that exceeds the buffer is taken alone.
    move(tensors, case, 9, plan_split(9, shape, row_bytes, DeviceLimits(cores, on_chip_bytes=row_bytes)))


@pytest.mark.parametrize("ratio", range(1, 9))
def test_three_and_six_value_heads_per_qk_head_compile_and_copy_exactly(tensors, ratio) -> None:
    shape = GroupShape(2, 2 * ratio, 16, 16)
    for layout in LAYOUTS:
        case = Move(shape, layout, torch.bfloat16, torch.float32, (0,) * 6, 4, None)
        move(tensors, case, 7, plan_split(7, shape, 2 * shape.qkvz_width, GPU))


@pytest.mark.sanitize
@pytest.mark.parametrize("limits", [GPU, DeviceLimits(3)], ids=["tiles", "runs"])
def test_numbers_of_rows_that_are_no_power_of_two_compile_and_copy_exactly(tensors, limits) -> None:
    shape = GroupShape(1, 3, 12, 20)
    case = Move(shape, "interleaved", torch.bfloat16, torch.bfloat16, (0,) * 6, 1, None)
    for rows in (3, 5, 6, 7, 9, 17, 33, 67):
        move(tensors, case, rows, plan_split(rows, shape, 2 * (shape.qkvz_width + shape.ba_width), limits))


@pytest.mark.parametrize("merge", [False, True], ids=["split", "merge"])
def test_no_rows_launch_nothing_and_divide_nothing_by_zero(tensors, merge) -> None:
    shape = GroupShape(1, 2, 4, 4)
    for plan in (None, plan_split(0, shape, 100, GPU), plan_split(0, shape, 100, DeviceLimits(40))):
        qkvz, ba = tensors.random(0, shape.qkvz_width), tensors.random(0, shape.ba_width)
        parts = reference.new_parts(qkvz, ba, shape)
        tensors.kernels.move(qkvz, ba, parts, shape, "interleaved", merge, plan)


@pytest.mark.parametrize("rows", [1, 2, 13])
def test_allocations_for_slices_are_packed_and_16_byte_aligned_unlike_empty_like(tensors, rows) -> None:
    shape = GroupShape(1, 3, 5, 7)
    qkvz = tensors.band(rows, shape.qkvz_width, left=1, right=9).view
    ba = tensors.band(rows, shape.ba_width, left=1, right=9).view
    parts = reference.new_parts(qkvz, ba, shape)
    for tensor in (*parts, *reference.new_projections(qkvz, ba, shape)):
        assert tensor.stride() == torch.empty(tensor.shape, device="meta").stride()
        assert tensor.data_ptr() % 16 == 0


def far_apart(tensors, width: int) -> torch.Tensor:
    """Three rows of bytes, the last further than 2^31 elements from the first. Only the rows' pages are ever touched.

    An offset that wraps around at 32 bits stays inside this memory, so that it makes a wrong answer and no crash.
    """
    stride = 2**30 + 16
    memory = torch.empty(2**31 + 2 * stride + width, dtype=torch.int8, device=tensors.device)
    return memory[2**31 :].as_strided((3, width), (stride, 1))


@pytest.mark.parametrize("limits", [GPU, DeviceLimits(2)], ids=["tiles", "runs"])
@much_memory()
def test_offsets_past_32_bits_are_followed_as_from_174000_tokens_on(tensors, limits) -> None:
    shape = GroupShape(1, 2, 8, 8)
    sizes = (1, 2, 8, 8, "interleaved")
    plan = plan_split(3, shape, shape.qkvz_width, limits)
    qkvz, ba = (
        tensors.random(3, shape.qkvz_width, dtype=torch.int8),
        tensors.random(3, shape.ba_width, dtype=torch.int8),
    )
    wanted = projection.split(qkvz, ba, *sizes)
    far = far_apart(tensors, shape.qkvz_width)
    far.copy_(qkvz)
    parts = [part.zero_() for part in reference.new_parts(qkvz, ba, shape)]
    tensors.kernels.move(far, ba, parts, shape, "interleaved", False, plan)
    assert tensors.all_same(tuple(parts), wanted)
    far.zero_()
    tensors.kernels.move(far, ba, parts, shape, "interleaved", True, plan)
    assert tensors.same(far, qkvz)


@pytest.mark.gpu
@much_memory()
def test_180000_tokens_of_qwen3_next_are_split_to_the_last_row(tensors) -> None:
    model = QWEN3_NEXT_80B
    shape = GroupShape(model.num_heads_qk, model.num_heads_v, model.head_qk, model.head_v)
    qkvz, ba = tensors.random(180_000, shape.qkvz_width), tensors.random(180_000, shape.ba_width)
    assert qkvz.numel() > 2**31
    parts = reference.new_parts(qkvz, ba, shape)
    tensors.kernels.move(qkvz, ba, parts, shape, "interleaved", False)
    for first in range(0, 180_000, 20_000):
        rows = slice(first, first + 20_000)
        wanted = projection.split(qkvz[rows], ba[rows], *(16, 32, 128, 128))
        assert all(tensors.same(got[rows], one) for got, one in zip(parts, wanted, strict=True))


@dataclass(frozen=True)
class Convolution:
    """All of a split with convolution but its sequences."""

    shape: GroupShape
    layout: str
    dtype: torch.dtype
    dtype_state: torch.dtype
    width: int
    bias: bool
    silu: bool
    tokens: int
    margins: tuple[int, ...]
    state_order: tuple[int, int, int]
    limits: DeviceLimits
    packed: bool = False


def convolve(tensors, case: Convolution, sequences: int, rng: random.Random, plan: ConvPlan | None = None) -> None:
    shape, device, rows = case.shape, tensors.device, sequences * case.tokens
    plan = plan or plan_conv(sequences, case.tokens, shape, case.limits)
    torch.manual_seed(rng.getrandbits(31))
    qkvz = torch.randn(rows, shape.qkvz_width, device=device).to(case.dtype)
    ba = tensors.random(rows, shape.ba_width, dtype=torch.bfloat16)
    num_slots = sequences + rng.randint(1, 3)
    # Outside the pool on both sides, -1, and else no slot twice.
    slots = rng.sample(range(num_slots), sequences)
    slots = [rng.choice([-1, -1, num_slots, -7]) if rng.random() < 0.2 else slot for slot in slots]
    slots = torch.tensor(slots, dtype=rng.choice([torch.int32, torch.int64]), device=device)
    around = (2, 0, 0) if case.packed else (2, 3, 2)
    size = [n + more for n, more in zip((num_slots, shape.qkv_width, case.width - 1), around, strict=True)]
    pool = torch.randn([size[i] for i in case.state_order], device=device).to(case.dtype_state)
    pool = pool.permute([case.state_order.index(i) for i in range(3)])
    inner = (slice(1, -1), slice(None), slice(None)) if case.packed else (slice(1, -1), slice(2, -1), slice(1, -1))
    state = pool[inner]
    weight = torch.randn(shape.qkv_width, case.width, device=device).to(case.dtype)
    bias = torch.randn(shape.qkv_width, device=device).to(case.dtype) if case.bias else None
    pool_after = pool.clone()
    sizes = (shape.num_heads_qk, shape.num_heads_v, shape.head_qk, shape.head_v)
    wanted = projection.split_conv1d_update(
        qkvz, ba, pool_after[inner], weight, bias, slots, *sizes, layout=case.layout,
        tokens_per_sequence=case.tokens, activation="silu" if case.silu else None,
    )  # fmt: skip
    plain = projection.split_conv1d_update(
        qkvz.abs(), ba, state.double().abs(), weight.abs(), None if bias is None else bias.abs(), slots, *sizes,
        layout=case.layout, tokens_per_sequence=case.tokens, activation=None,
    )  # fmt: skip
    fused = [tensors.band(rows, s.shape[1], dtype=s.dtype, left=i, right=i, values=s).view for s, i in
             zip((qkvz, ba), case.margins, strict=False)]  # fmt: skip
    bands = [tensors.band(rows, *p.shape[1:], dtype=d, left=i, right=1) for p, d, i in
             zip(wanted, (case.dtype, case.dtype, ba.dtype, ba.dtype), case.margins[2:], strict=True)]  # fmt: skip
    parts = [band.view for band in bands]
    given = (*fused, state, weight, bias, slots, *parts)
    tensors.kernels.convolve(given, shape, case.tokens, case.silu, case.layout, plan)
    eps, limits = torch.finfo(torch.float32).eps, torch.finfo(case.dtype)
    y, magnitude = wanted.mixed_qkv, plain.mixed_qkv
    # What float32 products, sum and activation and one rounding can do to these operands.
    error = 1.1 * (case.width + 2) * eps * magnitude + (8 + 2 * magnitude) * eps * y.abs()
    error += limits.eps * (y.abs() + error) + limits.smallest_normal * limits.eps
    assert ((parts[0].double() - y).abs() <= error).all(), (case, sequences, slots, plan)
    assert bands[0].holds(parts[0].clone())
    assert all(band.holds(part) for band, part in zip(bands[1:], wanted[1:], strict=True)), (case, slots, plan)
    padding = ((slots < 0) | (slots >= num_slots)).repeat_interleave(case.tokens)
    assert all((tensors.bits(part[padding]) == 0).all() for part in parts)
    assert tensors.same(pool, pool_after), (case, slots, plan)


PACKED, CHANNEL_LAST = (0, 1, 2), (0, 2, 1)
ORDERS = [PACKED, CHANNEL_LAST, (2, 0, 1), (1, 0, 2)]


@st.composite
def convolutions(draw) -> tuple[Convolution, int, int]:
    nqk = draw(st.integers(1, 2))
    sizes = st.integers(1, 24) | st.sampled_from([32, 64, 128])
    shape = GroupShape(nqk, nqk * draw(st.integers(1, 4)), draw(sizes), draw(sizes))
    case = Convolution(
        shape, draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(FLOATS)), draw(st.sampled_from(FLOATS)),
        draw(st.integers(2, 4)), draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from([1, 2, 3, 5])),
        tuple(draw(st.lists(st.sampled_from([0, 1, 8]), min_size=6, max_size=6))), draw(st.sampled_from(ORDERS)),
        # A single core makes programs take several sequences.
        draw(st.sampled_from([GPU, DeviceLimits(1)])),
    )  # fmt: skip
    return case, draw(st.integers(0, 7)), draw(st.integers(0, 2**31))


@settings(max_examples=30 if INTERPRETED else 10)
@given(drawn=convolutions())
def test_the_convolution_is_exact_but_for_rounding_for_any_shape_stride_dtype_and_slots(tensors, drawn) -> None:
    case, sequences, seed = drawn
    convolve(tensors, case, sequences, random.Random(seed))


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(40))
def test_the_convolution_in_bulk(tensors, number) -> None:
    rng = random.Random(number)
    nqk = rng.choice([1, 2, 4])
    sizes = [rng.randint(1, 320), 64, 128, 256]
    shape = GroupShape(nqk, nqk * (number % 8 + 1), rng.choice(sizes), rng.choice(sizes))
    case = Convolution(
        shape, LAYOUTS[number % 2], rng.choice(FLOATS), rng.choice(FLOATS), number % 3 + 2, rng.random() < 0.5,
        rng.random() < 0.7, rng.choice([1, 1, 2, 3, 5]), tuple(rng.choice([0, 0, 1, 8]) for _ in range(6)),
        rng.choice(ORDERS), GPU,
    )  # fmt: skip
    pinned = plan_conv(rng.choice([1, 64, 256]), case.tokens, shape, GPU)
    tiles = 2 * sum(cdiv(width, pinned.block) for width in (shape.head_qk, shape.ratio * shape.head_v)) * nqk
    for turn in range(10):
        n = (0, 1, 256)[turn] if turn < 3 else rng.randint(0, 256)
        programs = cdiv(n * case.tokens, pinned.rows_per_step_ba) + cdiv(n, pinned.sequences_per_program) * tiles
        convolve(tensors, case, n, rng, replace(pinned, programs=programs))


@pytest.mark.sanitize
@pytest.mark.parametrize(("order", "dtype", "state", "block", "tile", "tokens"), [
    (PACKED, torch.bfloat16, torch.bfloat16, 16, 2, 1), (CHANNEL_LAST, torch.float16, torch.bfloat16, 8, 4, 3),
    (PACKED, torch.float32, torch.float32, 4, 1, 2), (CHANNEL_LAST, torch.bfloat16, torch.bfloat16, 128, 8, 1),
    (PACKED, torch.bfloat16, torch.float32, 8, 4, 1),
], ids=str)  # fmt: skip
def test_four_channels_of_a_state_in_vectors_are_convolved_as_one_is(
    tensors, order, dtype, state, block, tile, tokens
) -> None:
    shape = GroupShape(1, 1, block, 2 * block) if block > 100 else GroupShape(2, 6, 3 * block, block)
    case = Convolution(
        shape, LAYOUTS[tile > 2], dtype, state, 4, tile != 4, tile != 1, tokens, (tile % 4,) * 6, order, GPU,
        packed=True,
    )  # fmt: skip
    programs = cdiv(7 * tokens, 16) + cdiv(7, tile) * (shape.qkvz_width // block)
    plan = ConvPlan(programs, tile, block, 16, num_warps=2, fours=True)
    # Numbers that draw padding of each, and three of four no sequence in slot 0.
    convolve(tensors, case, 7, random.Random(block + 3), plan)


@pytest.mark.parametrize("dtype", [
    torch.bool, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.complex32, torch.uint32,
    torch.float64, torch.uint64, torch.complex64,
], ids=str)  # fmt: skip
def test_b_and_a_of_any_dtype_of_up_to_8_bytes_pass_beside_the_convolution_bit_for_bit(tensors, dtype) -> None:
    shape, sizes = GroupShape(2, 6, 16, 8), (2, 6, 16, 8)
    qkvz = torch.randn(5, shape.qkvz_width, device=tensors.device).bfloat16()
    ba = tensors.random(5, shape.ba_width, dtype=dtype)
    state = torch.randn(8, shape.qkv_width, 3, device=tensors.device).bfloat16()
    weight = torch.randn(shape.qkv_width, 4, device=tensors.device).bfloat16()
    slots = torch.tensor([3, 0, -1, 7, 5], device=tensors.device)
    parts = reference.new_parts(qkvz, ba, shape)
    given = (qkvz, ba, state, weight, None, slots, *parts)
    try:
        tensors.kernels.convolve(given, shape, 1, True, "interleaved", plan_conv(5, 1, shape, GPU))
    except KeyError as error:
        pytest.fail(f"Triton has no name for this dtype: {error}")
    wanted = projection.split(qkvz, ba, *sizes)
    for got, part in zip(parts[1:], wanted[1:], strict=True):
        assert (tensors.bits(got[2]) == 0).all()
        live = [0, 1, 3, 4]
        assert torch.equal(tensors.bits(got)[live], tensors.bits(part)[live])


def test_slots_past_32_bits_of_state_are_followed(tensors) -> None:
    shape = GroupShape(1, 1, 4, 4)
    # As rows of two bytes each; the state's slots are as far apart as the rows above.
    state = far_apart(tensors, 2 * shape.qkv_width).view(torch.float16).unflatten(1, (shape.qkv_width, 1))
    values = torch.randn(3, shape.qkv_width, 1, device=tensors.device).half()
    state.copy_(values)
    qkvz, ba = torch.randn(3, shape.qkvz_width, device=tensors.device).half(), tensors.random(3, shape.ba_width)
    weight = torch.randn(shape.qkv_width, 2, device=tensors.device).half()
    slots = torch.tensor([2, 0, 1], device=tensors.device)
    wanted = projection.split_conv1d_update(qkvz, ba, values, weight, None, slots, 1, 1, 4, 4)
    parts = reference.new_parts(qkvz, ba, shape)
    plan = plan_conv(3, 1, shape, GPU)
    tensors.kernels.convolve((qkvz, ba, state, weight, None, slots, *parts), shape, 1, True, "interleaved", plan)
    assert tensors.same(state.contiguous(), values)
    torch.testing.assert_close(parts[0].double(), wanted.mixed_qkv, rtol=2e-3, atol=1e-4)
