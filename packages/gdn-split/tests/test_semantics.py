"""Do the public functions do what they promise? On the device: the kernels on a GPU, else the reference."""

from __future__ import annotations

import pytest
import torch

from gdn_split import (
    block_order,
    contiguous_row_order,
    fused_qkvzba_split_reshape_cat,
    merge_qkvzba,
    split_conv1d_update,
    split_views,
)
from gdn_split.plan import GroupShape
from kernel_reference import projection
from kernel_reference.checks import validate_values
from kernel_reference.models import QWEN3_NEXT_80B

LAYOUTS = ("interleaved", "contiguous")
MODELS = [QWEN3_NEXT_80B.tensor_parallel(ranks) for ranks in (1, 2, 4, 8)]
DTYPES = [
    torch.bool, torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
    torch.float16, torch.bfloat16, torch.int16, torch.uint16,
    torch.float32, torch.int32, torch.uint32, torch.complex32,
    torch.float64, torch.int64, torch.uint64, torch.complex64,
]  # fmt: skip
SMALL = GroupShape(2, 6, 8, 5)


def name_of(value: object) -> str:
    return str(getattr(value, "name", value)).replace(" ", "-")


def shape_of(model) -> GroupShape:
    return GroupShape(model.num_heads_qk, model.num_heads_v, model.head_qk, model.head_v)


def sizes_of(shape: GroupShape) -> tuple[int, int, int, int]:
    return shape.num_heads_qk, shape.num_heads_v, shape.head_qk, shape.head_v


def projections(tensors, rows, shape, dtype=torch.bfloat16, dtype_ba=torch.bfloat16):
    return tensors.random(rows, shape.qkvz_width, dtype=dtype), tensors.random(rows, shape.ba_width, dtype=dtype_ba)


def is_packed_and_aligned(tensor: torch.Tensor) -> bool:
    wanted = torch.empty(tensor.shape, device="meta").stride()
    return tensor.stride() == wanted and tensor.data_ptr() % 16 == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS, ids=name_of)
def test_split_and_merge_are_exact_at_model_shapes(tensors, model, layout) -> None:
    shape, sizes = shape_of(model), sizes_of(shape_of(model))
    rows = 4096 if tensors.device.type == "cuda" else 33
    qkvz, ba = projections(tensors, rows, shape)
    parts = fused_qkvzba_split_reshape_cat(qkvz, ba, *sizes, layout=layout)
    assert parts._fields == ("mixed_qkv", "z", "b", "a")
    assert tensors.all_same(parts, projection.split(qkvz, ba, *sizes, layout))
    assert tensors.all_same(parts, tensors.take_apart(qkvz, ba, shape, layout))
    fused = merge_qkvzba(*parts, *sizes, layout=layout)
    assert fused._fields == ("mixed_qkvz", "mixed_ba")
    assert tensors.all_same(fused, (qkvz, ba))


def test_4096_tokens_of_qwen3_next_split_exactly(tensors) -> None:
    shape = shape_of(QWEN3_NEXT_80B)
    qkvz, ba = projections(tensors, 4096, shape)
    parts = fused_qkvzba_split_reshape_cat(qkvz, ba, *sizes_of(shape))
    assert tensors.all_same(parts, tensors.take_apart(qkvz, ba, shape, "interleaved"))


def test_interleaved_is_a_loop_over_rows_and_heads(tensors) -> None:
    nqk, r, hq, hv = 3, 2, 4, 3
    shape = GroupShape(nqk, nqk * r, hq, hv)
    qkvz = torch.arange(5 * shape.qkvz_width, device=tensors.device).view(5, -1)
    ba = -torch.arange(5 * shape.ba_width, device=tensors.device).view(5, -1)
    parts = fused_qkvzba_split_reshape_cat(qkvz, ba, *sizes_of(shape))
    mixed_qkv, z, b, a = (part.tolist() for part in parts)
    rows_qkvz, rows_ba = qkvz.tolist(), ba.tolist()
    for n in range(5):
        for g in range(nqk):
            group = rows_qkvz[n][g * (2 * hq + 2 * r * hv) :]
            for i in range(hq):
                assert mixed_qkv[n][g * hq + i] == group[i]
                assert mixed_qkv[n][nqk * hq + g * hq + i] == group[hq + i]
            for j in range(r):
                h = g * r + j
                for i in range(hv):
                    assert mixed_qkv[n][2 * nqk * hq + h * hv + i] == group[2 * hq + j * hv + i]
                    assert z[n][h][i] == group[2 * hq + r * hv + j * hv + i]
                assert b[n][h] == rows_ba[n][g * 2 * r + j]
                assert a[n][h] == rows_ba[n][g * 2 * r + r + j]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ratio", range(1, 9))
def test_any_whole_number_of_value_heads_per_qk_head_works_three_and_six_too(tensors, ratio, layout) -> None:
    shape = GroupShape(3, 3 * ratio, 20, 12)
    qkvz, ba = projections(tensors, 19, shape)
    parts = fused_qkvzba_split_reshape_cat(qkvz, ba, *sizes_of(shape), layout=layout)
    assert tensors.all_same(parts, tensors.take_apart(qkvz, ba, shape, layout))
    assert tensors.all_same(merge_qkvzba(*parts, *sizes_of(shape), layout=layout), (qkvz, ba))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_every_dtype_of_1_2_4_and_8_bytes_is_copied_bit_for_bit(tensors, dtype) -> None:
    layout = LAYOUTS[DTYPES.index(dtype) % 2]
    qkvz, ba = projections(tensors, 9, SMALL, dtype, dtype)
    parts = fused_qkvzba_split_reshape_cat(qkvz, ba, *sizes_of(SMALL), layout=layout)
    assert tensors.all_same(parts, tensors.take_apart(qkvz, ba, SMALL, layout))
    assert tensors.all_same(merge_qkvzba(*parts, *sizes_of(SMALL), layout=layout), (qkvz, ba))


@pytest.mark.parametrize(
    ("dtype", "dtype_ba"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.float32, torch.bool),
        (torch.int8, torch.complex64),
        (torch.float64, torch.uint16),
    ],
    ids=name_of,
)
def test_b_and_a_follow_the_dtype_of_mixed_ba(tensors, dtype, dtype_ba) -> None:
    qkvz, ba = projections(tensors, 7, SMALL, dtype, dtype_ba)
    parts = fused_qkvzba_split_reshape_cat(qkvz, ba, *sizes_of(SMALL))
    assert [part.dtype for part in parts] == [dtype, dtype, dtype_ba, dtype_ba]
    assert tensors.all_same(parts, tensors.take_apart(qkvz, ba, SMALL, "interleaved"))
    assert tensors.all_same(merge_qkvzba(*parts, *sizes_of(SMALL)), (qkvz, ba))


@pytest.mark.parametrize(
    ("dtype", "first_nan"),
    [
        (torch.bfloat16, 0x7F81),
        (torch.float16, 0x7C01),
        (torch.float32, 0x7F800001),
        (torch.float64, 0x7FF0000000000001),
    ],
    ids=name_of,
)
def test_the_payloads_of_quiet_and_signalling_nans_survive(tensors, dtype, first_nan) -> None:
    stored = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    counted = torch.arange(4 * SMALL.qkvz_width, device=tensors.device).view(4, -1) % 100
    qkvz = (first_nan + counted).to(stored).view(dtype)
    ba = qkvz[:, : SMALL.ba_width].contiguous()
    assert qkvz.isnan().all()
    parts = fused_qkvzba_split_reshape_cat(qkvz, ba, *sizes_of(SMALL))
    assert tensors.all_same(parts, tensors.take_apart(qkvz, ba, SMALL, "interleaved"))
    assert tensors.all_same(merge_qkvzba(*parts, *sizes_of(SMALL)), (qkvz, ba))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_with_a_stride_are_not_read_as_packed(tensors, layout) -> None:
    qkvz, ba = projections(tensors, 11, SMALL)
    parts = tensors.take_apart(qkvz, ba, SMALL, layout)

    def slice_of(values, left, right):
        return tensors.band(11, *values.shape[1:], left=left, right=right, values=values).view

    strided = fused_qkvzba_split_reshape_cat(slice_of(qkvz, 3, 5), slice_of(ba, 1, 8), *sizes_of(SMALL), layout=layout)
    assert tensors.all_same(strided, parts)
    every_other = torch.cat([qkvz, qkvz], dim=1).view(22, -1)[::2]
    assert tensors.all_same(fused_qkvzba_split_reshape_cat(every_other, ba, *sizes_of(SMALL), layout=layout), parts)
    wide_parts = [slice_of(part, 2 * i, 7 - i) for i, part in enumerate(parts)]
    assert tensors.all_same(merge_qkvzba(*wide_parts, *sizes_of(SMALL), layout=layout), (qkvz, ba))


def test_an_expanded_row_is_read_once_for_each_row(tensors) -> None:
    qkvz, ba = (one.expand(6, -1) for one in projections(tensors, 1, SMALL))
    parts = fused_qkvzba_split_reshape_cat(qkvz, ba, *sizes_of(SMALL))
    assert tensors.all_same(parts, tensors.take_apart(qkvz, ba, SMALL, "interleaved"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows_and_one_row_work(tensors, rows, layout) -> None:
    qkvz, ba = projections(tensors, rows, SMALL)
    parts = fused_qkvzba_split_reshape_cat(qkvz, ba, *sizes_of(SMALL), layout=layout)
    assert tensors.all_same(parts, tensors.take_apart(qkvz, ba, SMALL, layout))
    assert [part.shape[0] for part in parts] == [rows] * 4
    assert tensors.all_same(merge_qkvzba(*parts, *sizes_of(SMALL), layout=layout), (qkvz, ba))
    state = tensors.random(3, SMALL.qkv_width, 3, dtype=torch.int16)
    weight = torch.ones(SMALL.qkv_width, 4, device=tensors.device)
    slots = torch.full((rows,), -1, device=tensors.device)
    padded = split_conv1d_update(
        qkvz, ba, state.view(torch.bfloat16), weight, None, slots, *sizes_of(SMALL), layout=layout
    )
    assert all((part == 0).all() and part.shape[0] == rows for part in padded)


@pytest.mark.parametrize("rows", [1, 2, 13])
def test_results_of_slices_are_packed_and_not_strided_as_empty_like_would_make_them(tensors, rows) -> None:
    qkvz = tensors.band(rows, SMALL.qkvz_width, left=1, right=6, values=tensors.random(rows, SMALL.qkvz_width)).view
    ba = tensors.band(rows, SMALL.ba_width, left=3, right=2, values=tensors.random(rows, SMALL.ba_width)).view
    parts = fused_qkvzba_split_reshape_cat(qkvz, ba, *sizes_of(SMALL))
    assert all(is_packed_and_aligned(part) for part in parts)
    wide = [tensors.band(rows, *part.shape[1:], left=1, right=4, values=part).view for part in parts]
    assert all(is_packed_and_aligned(fused) for fused in merge_qkvzba(*wide, *sizes_of(SMALL)))
    state = torch.zeros(3, SMALL.qkv_width, 1, dtype=torch.bfloat16, device=tensors.device)
    weight, slots = (
        torch.ones(SMALL.qkv_width, 2, device=tensors.device),
        torch.full((rows,), -1, device=tensors.device),
    )
    convolved = split_conv1d_update(qkvz, ba, state, weight, None, slots, *sizes_of(SMALL))
    assert all(is_packed_and_aligned(part) for part in convolved)


@pytest.mark.parametrize("rows", [1, 3, 7, 4096])
def test_b_and_a_are_16_byte_aligned_for_any_number_of_rows(tensors, rows) -> None:
    shape = GroupShape(1, 3, 2, 1)
    for dtype in (torch.int8, torch.bfloat16):
        parts = fused_qkvzba_split_reshape_cat(*projections(tensors, rows, shape, dtype, dtype), *sizes_of(shape))
        assert all(is_packed_and_aligned(part) for part in parts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_is_written_at_any_row_stride_and_nothing_around_it(tensors, layout) -> None:
    qkvz, ba = projections(tensors, 10, SMALL, torch.bfloat16, torch.float32)
    parts = tensors.take_apart(qkvz, ba, SMALL, layout)
    for left, right in ((0, 0), (3, 0), (5, 2)):
        bands = [tensors.band(10, *p.shape[1:], dtype=p.dtype, left=left, right=right) for p in parts]
        out = [band.view for band in bands]
        got = fused_qkvzba_split_reshape_cat(qkvz, ba, *sizes_of(SMALL), layout=layout, out=out)
        assert all(one is other for one, other in zip(got, out, strict=True))
        assert all(band.holds(part) for band, part in zip(bands, parts, strict=True))
        bands = [tensors.band(10, p.shape[1], dtype=p.dtype, left=left, right=right) for p in (qkvz, ba)]
        out = tuple(band.view for band in bands)
        got = merge_qkvzba(*parts, *sizes_of(SMALL), layout=layout, out=out)
        assert all(one is other for one, other in zip(got, out, strict=True))
        assert all(band.holds(fused) for band, fused in zip(bands, (qkvz, ba), strict=True))


def test_inputs_are_not_changed(tensors) -> None:
    qkvz, ba = projections(tensors, 10, SMALL)
    copies = qkvz.clone(), ba.clone()
    parts = fused_qkvzba_split_reshape_cat(qkvz, ba, *sizes_of(SMALL))
    assert tensors.all_same((qkvz, ba), copies)
    assert not {p.untyped_storage().data_ptr() for p in parts} & {t.untyped_storage().data_ptr() for t in (qkvz, ba)}


@pytest.mark.parametrize("model", MODELS, ids=name_of)
def test_split_views_are_the_contiguous_split_and_copy_nothing(tensors, model) -> None:
    shape = shape_of(model)
    values = projections(tensors, 9, shape)
    for left in (0, 3):
        qkvz, ba = (tensors.band(9, v.shape[1], left=left, right=left, values=v).view for v in values)
        views = split_views(qkvz, ba, *sizes_of(shape))
        assert tensors.all_same(views, fused_qkvzba_split_reshape_cat(qkvz, ba, *sizes_of(shape), layout="contiguous"))
        for view, source in zip(views, (qkvz, qkvz, ba, ba), strict=True):
            assert view._is_view()
            assert view.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
            assert view.stride(0) == source.stride(0)
    assert [view.shape[0] for view in split_views(qkvz[:0], ba[:0], *sizes_of(shape))] == [0] * 4


@pytest.mark.parametrize("shape", [GroupShape(4, 8, 16, 16), GroupShape(3, 18, 7, 5), GroupShape(2, 6, 4, 12)])
def test_permuted_weights_and_the_contiguous_layout_equal_the_split_of_interleaved(tensors, shape) -> None:
    hidden = torch.randn(12, 10, dtype=torch.float64, device=tensors.device)
    weight_qkvz = torch.randn(shape.qkvz_width, 10, dtype=torch.float64, device=tensors.device)
    weight_ba = torch.randn(shape.ba_width, 10, dtype=torch.float64, device=tensors.device)
    linear = torch.nn.functional.linear
    wanted = fused_qkvzba_split_reshape_cat(linear(hidden, weight_qkvz), linear(hidden, weight_ba), *sizes_of(shape))
    order = contiguous_row_order(*sizes_of(shape))
    assert order._fields == ("qkvz", "ba")
    for one, rows in ((order.qkvz, shape.qkvz_width), (order.ba, shape.ba_width)):
        assert one.dtype == torch.int64
        assert sorted(one.tolist()) == list(range(rows))
    contiguous = [
        linear(hidden, weight[rows.to(tensors.device)])
        for weight, rows in ((weight_qkvz, order.qkvz), (weight_ba, order.ba))
    ]
    got = split_views(*contiguous, *sizes_of(shape))
    for one, other in zip(got, wanted, strict=True):
        # A matrix product may sum in another order for another row; nothing but that may differ.
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
    kernel = fused_qkvzba_split_reshape_cat(*contiguous, *sizes_of(shape), layout="contiguous")
    assert tensors.all_same(kernel, got)


@pytest.mark.parametrize("model", MODELS, ids=name_of)
def test_the_row_order_is_the_literal_one(tensors, model) -> None:
    shape = shape_of(model)
    columns = tensors.literal_columns(shape, "interleaved")
    order = contiguous_row_order(*sizes_of(shape))
    assert order.qkvz.tolist() == columns.mixed_qkv + columns.z
    assert order.ba.tolist() == columns.b + columns.a


@pytest.mark.parametrize("model", MODELS, ids=name_of)
def test_scales_of_128_rows_follow_the_rows_of_an_fp8_weight(model) -> None:
    shape = shape_of(model)
    order = contiguous_row_order(*sizes_of(shape)).qkvz
    weight = torch.randn(shape.qkvz_width, 4).to(torch.float8_e4m3fn).float()
    scales = torch.rand(shape.qkvz_width // 128)
    dequantised = weight * scales.repeat_interleave(128)[:, None]
    permuted = weight[order] * scales[block_order(order, 128)].repeat_interleave(128)[:, None]
    assert torch.equal(permuted, dequantised[order])


def test_int4_rows_packed_eight_to_an_element_can_be_permuted_packed() -> None:
    shape = GroupShape(2, 6, 16, 24)
    order = contiguous_row_order(*sizes_of(shape)).qkvz
    rows = torch.randint(0, 16, (shape.qkvz_width, 3))

    def pack(rows):
        return (rows.view(-1, 8, 3) << (4 * torch.arange(8))[None, :, None]).sum(1)

    assert torch.equal(pack(rows)[block_order(order, 8)], pack(rows[order]))
    assert torch.equal(block_order(order, 1), order)
    # A loader may have another default device.
    with torch.device("meta"):
        assert torch.equal(block_order(contiguous_row_order(*sizes_of(shape)).qkvz, 1), order)


def test_row_scales_follow_the_rows_themselves() -> None:
    order = contiguous_row_order(*sizes_of(SMALL)).ba
    assert torch.equal(block_order(order, 1), order)


@pytest.mark.parametrize(
    ("shape", "rows_per_block"),
    [
        (GroupShape(2, 6, 16, 24), 64),
        (GroupShape(4, 4, 64, 64), 128),
        (GroupShape(2, 4, 12, 8), 8),
        (GroupShape(2, 2, 8, 8), 7),
        (GroupShape(2, 2, 8, 8), 0),
    ],
    ids=str,
)
def test_blocks_that_the_row_order_would_tear_apart_are_refused(shape, rows_per_block) -> None:
    with pytest.raises(ValueError, match=r"rows_per_block must be .*, got"):
        block_order(contiguous_row_order(*sizes_of(shape)).qkvz, rows_per_block)


def test_blocks_that_begin_within_a_block_of_the_source_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows_per_block must be .*, got"):
        block_order(torch.arange(4, 12), 8)


def convolve_literally(x, state, weight, bias, slots, tokens, silu):
    """Token by token in float64: y, the sum of the magnitudes in y before the activation, and the state after."""
    taps = state.shape[2]
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    magnitude = torch.zeros_like(y)
    after = state.clone()
    for s, slot in enumerate(slots.tolist()):
        if not 0 <= slot < state.shape[0]:
            continue
        new = x[s * tokens : (s + 1) * tokens]
        inputs = torch.cat([state[slot].double(), new.double().T], dim=1)
        for t in range(tokens):
            products = inputs[:, t : t + taps + 1] * weight.double()
            y[s * tokens + t] = products.sum(1)
            magnitude[s * tokens + t] = products.abs().sum(1)
            if bias is not None:
                y[s * tokens + t] += bias.double()
                magnitude[s * tokens + t] += bias.double().abs()
        after[slot] = torch.cat([state[slot], new.T.to(state.dtype)], dim=1)[:, -taps:]
    return (y * torch.sigmoid(y) if silu else y), magnitude, after


def is_within_rounding(got, y, magnitude, width, silu) -> bool:
    """Float32 products, sum and activation, one rounding to the dtype: the bound that follows from those, no more."""
    eps = torch.finfo(torch.float32).eps
    error = (width + 2) * eps * magnitude
    if silu:
        # silu's slope is below 1.1; exp's relative error grows with its argument.
        error = 1.1 * error + (8 + 2 * magnitude) * eps * y.abs()
    limits = torch.finfo(got.dtype)
    error = error + limits.eps * (y.abs() + error) + limits.smallest_normal * limits.eps
    return bool(((got.double() - y).abs() <= error).all())


def check_convolution(
    tensors, shape, layout, width, bias, silu, tokens, slots, num_slots, dtype=torch.bfloat16, dtype_state=None,
    state=None,
) -> None:  # fmt: skip
    device = tensors.device
    rows = len(slots) * tokens
    qkvz = torch.randn(rows, shape.qkvz_width, device=device).to(dtype)
    ba = tensors.random(rows, shape.ba_width, dtype=torch.float32)
    if state is None:
        state = torch.randn(num_slots, shape.qkv_width, width - 1, device=device).to(dtype_state or dtype)
    weight = torch.randn(shape.qkv_width, width, device=device).to(dtype)
    bias = torch.randn(shape.qkv_width, device=device).to(dtype) if bias else None
    slots = torch.tensor(slots, dtype=torch.int32, device=device)
    mixed_qkv, z, b, a = tensors.take_apart(qkvz, ba, shape, layout)
    y, magnitude, after = convolve_literally(mixed_qkv, state, weight, bias, slots, tokens, silu)
    state_of_reference = state.double()
    reference = projection.split_conv1d_update(
        qkvz, ba, state_of_reference, weight, bias, slots, *sizes_of(shape), layout=layout,
        tokens_per_sequence=tokens, activation="silu" if silu else None,
    )  # fmt: skip
    torch.testing.assert_close(reference.mixed_qkv, y, rtol=1e-12, atol=1e-12)
    got = split_conv1d_update(
        qkvz, ba, state, weight, bias, slots, *sizes_of(shape), layout=layout, tokens_per_sequence=tokens,
        activation="silu" if silu else None,
    )  # fmt: skip
    live = ((slots >= 0) & (slots < state.shape[0])).repeat_interleave(tokens)
    assert got.mixed_qkv.dtype == dtype
    assert is_within_rounding(got.mixed_qkv, y, magnitude, width, silu)
    for part, raw in ((got.z, z), (got.b, b), (got.a, a)):
        assert tensors.same(part[live], raw[live])
    for part in got:
        assert (tensors.bits(part[~live]) == 0).all()
    assert tensors.same(state, after)


@pytest.mark.parametrize("silu", [True, False], ids=["silu", "linear"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [2, 3, 4])
def test_the_convolution_is_the_formula_for_tokens_fewer_and_more_than_its_taps(
    tensors, width, layout, bias, silu
) -> None:
    for tokens in (1, 2, 3, 5):
        slots = [4, -1, 0, 6, 2, -1, -1]
        check_convolution(tensors, GroupShape(2, 6, 8, 12), layout, width, bias, silu, tokens, slots, 7)


@pytest.mark.parametrize("model", MODELS, ids=name_of)
def test_the_convolution_at_model_shapes(tensors, model) -> None:
    many = tensors.device.type == "cuda"
    slots = torch.randperm(300)[: 256 if many else 12].tolist()
    slots[5] = -1
    for tokens in (1, 2):
        check_convolution(tensors, shape_of(model), "interleaved", model.conv_width, False, True, tokens, slots, 300)


@pytest.mark.parametrize(
    ("dtype", "dtype_state"),
    [
        (torch.float16, None),
        (torch.float32, None),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
    ids=name_of,
)
def test_the_convolution_in_every_float_dtype(tensors, dtype, dtype_state) -> None:
    for tokens in (1, 3, 5):
        check_convolution(tensors, SMALL, "interleaved", 4, True, True, tokens, [2, 0, -1, 1], 4, dtype, dtype_state)


@pytest.mark.parametrize("kind", ["packed", "channels last", "a slice of a pool"])
def test_the_state_may_have_any_strides_and_its_surroundings_stay(tensors, kind) -> None:
    channels = SMALL.qkv_width
    pool = torch.randn(11, channels + 5, 7, device=tensors.device).bfloat16()
    if kind == "packed":
        state = pool = pool[:8, :channels, :3].contiguous()
    elif kind == "channels last":
        pool = pool[:, :channels, :3].transpose(1, 2).contiguous()
        state = pool.transpose(1, 2)[1:9]
    else:
        state = pool[1:9, 2 : 2 + channels, 3:6]
    for tokens in (1, 2, 5):
        before = pool.clone()
        window = state.clone()
        check_convolution(tensors, SMALL, "interleaved", 4, True, True, tokens, [7, -1, 0, 3], 8, state=state)
        touched = (state != window).any(2).any(1)
        assert touched.tolist() == [slot in (0, 3, 7) for slot in range(8)]
        # What the window was, put back, must give the whole pool back.
        state.copy_(window)
        assert tensors.same(pool, before)


def test_padded_sequences_give_zeros_and_touch_no_state(tensors) -> None:
    qkvz, ba = projections(tensors, 6, SMALL)
    state = tensors.random(4, SMALL.qkv_width, 3)
    before = state.clone()
    weight = torch.randn(SMALL.qkv_width, 4, device=tensors.device)
    slots = torch.full((3,), -1, dtype=torch.int64, device=tensors.device)
    # The rows of padding hold NaNs here: zeros must not be products of them.
    qkvz.fill_(torch.nan)
    got = split_conv1d_update(qkvz, ba, state, weight, None, slots, *sizes_of(SMALL), tokens_per_sequence=2)
    assert all((tensors.bits(part) == 0).all() for part in got)
    assert tensors.same(state, before)


@pytest.mark.parametrize("dtype_slots", [torch.int32, torch.int64], ids=name_of)
def test_slots_outside_the_pool_are_padding_and_nothing_outside_is_written(tensors, dtype_slots) -> None:
    pool = torch.randn(9, SMALL.qkv_width, 3, device=tensors.device).bfloat16()
    state = pool[3:6]
    qkvz, ba = torch.randn(7, SMALL.qkvz_width, device=tensors.device).bfloat16(), tensors.random(7, SMALL.ba_width)
    weight = torch.randn(SMALL.qkv_width, 4, device=tensors.device)
    slots = torch.tensor([3, -2, 1, 5, -(2**31), 2**31 - 1, 4], dtype=dtype_slots, device=tensors.device)
    before = pool.clone()
    with validate_values(False):
        got = split_conv1d_update(qkvz, ba, state, weight, None, slots, *sizes_of(SMALL))
    for part in got:
        assert (tensors.bits(part[[0, 1, 3, 4, 5, 6]]) == 0).all()
        assert (tensors.bits(part[2]) != 0).any()
    before[4] = state[1]
    assert tensors.same(pool, before)


def test_single_token_calls_equal_one_call_of_several_tokens(tensors) -> None:
    for tokens in (2, 3, 5):
        qkvz = torch.randn(4 * tokens, SMALL.qkvz_width, device=tensors.device).bfloat16()
        ba = tensors.random(4 * tokens, SMALL.ba_width)
        state = torch.randn(6, SMALL.qkv_width, 3, device=tensors.device).bfloat16()
        weight = torch.randn(SMALL.qkv_width, 4, device=tensors.device).bfloat16()
        bias = torch.randn(SMALL.qkv_width, device=tensors.device).bfloat16()
        slots = torch.tensor([3, 0, -1, 5], device=tensors.device)
        state_single = state.clone()
        together = split_conv1d_update(
            qkvz, ba, state, weight, bias, slots, *sizes_of(SMALL), tokens_per_sequence=tokens
        )
        for t in range(tokens):
            one = split_conv1d_update(
                qkvz[t::tokens], ba[t::tokens], state_single, weight, bias, slots, *sizes_of(SMALL)
            )
            for got, wanted in zip(one, together, strict=True):
                assert torch.equal(tensors.bits(got), tensors.bits(wanted[t::tokens]))
        assert tensors.same(state, state_single)


def test_the_convolution_writes_out_and_nothing_around_it(tensors) -> None:
    qkvz = torch.randn(4, SMALL.qkvz_width, device=tensors.device).bfloat16()
    ba = tensors.random(4, SMALL.ba_width)
    state = torch.randn(6, SMALL.qkv_width, 2, device=tensors.device).bfloat16()
    weight = torch.randn(SMALL.qkv_width, 3, device=tensors.device)
    slots = torch.tensor([3, -1, 0, 5], device=tensors.device)
    wanted = split_conv1d_update(qkvz, ba, state.clone(), weight, None, slots, *sizes_of(SMALL))
    bands = [tensors.band(4, *p.shape[1:], dtype=p.dtype, left=3, right=2) for p in wanted]
    out = [band.view for band in bands]
    got = split_conv1d_update(qkvz, ba, state, weight, None, slots, *sizes_of(SMALL), out=out)
    assert all(one is other for one, other in zip(got, out, strict=True))
    assert all(band.holds(part) for band, part in zip(bands, wanted, strict=True))


@pytest.mark.parametrize("bad", [[1, 2, 1], [0, 3, -1], [0, -2, -1]], ids=["twice", "past the pool", "below -1"])
def test_validate_values_refuses_bad_slots_before_anything_is_written(tensors, bad) -> None:
    qkvz, ba = torch.randn(3, SMALL.qkvz_width, device=tensors.device), tensors.random(3, SMALL.ba_width)
    state = torch.randn(3, SMALL.qkv_width, 3, device=tensors.device)
    weight = torch.randn(SMALL.qkv_width, 4, device=tensors.device)
    before = state.clone()
    bands = [tensors.band(3, *p.shape[1:], dtype=p.dtype) for p in tensors.take_apart(qkvz, ba, SMALL, "interleaved")]
    with validate_values(), pytest.raises(ValueError, match=r"slots\[\d\] must be .*, got"):
        split_conv1d_update(
            qkvz, ba, state, weight, None, torch.tensor(bad, device=tensors.device), *sizes_of(SMALL),
            out=[band.view for band in bands],
        )  # fmt: skip
    assert tensors.same(state, before)
    assert all(band.is_unchanged() for band in bands)


@pytest.mark.parametrize("bad", [[1, 2, 1], [0, 3, -1], [0, -2, -1]], ids=["twice", "past the pool", "below -1"])
def test_on_a_cpu_slots_are_checked_by_default(bad) -> None:
    qkvz, ba = torch.randn(3, SMALL.qkvz_width), torch.randn(3, SMALL.ba_width)
    state, weight = torch.randn(3, SMALL.qkv_width, 3), torch.randn(SMALL.qkv_width, 4)
    before = state.clone()
    with pytest.raises(ValueError, match=r"slots\[\d\] must be .*, got"):
        split_conv1d_update(qkvz, ba, state, weight, None, torch.tensor(bad), *sizes_of(SMALL))
    assert torch.equal(state, before)
    with validate_values(False):
        split_conv1d_update(qkvz, ba, state, weight, None, torch.tensor(bad), *sizes_of(SMALL))
    assert not torch.equal(state, before)


def test_validate_values_lets_padding_repeat(tensors) -> None:
    with validate_values():
        check_convolution(tensors, SMALL, "interleaved", 4, True, True, 2, [-1, 2, -1, 0], 3)
