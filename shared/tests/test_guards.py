"""Guarded buffers and the comparison of bits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernel_reference.testing.guards import (
    assert_bitwise_equal,
    assert_same_bits,
    bitwise_equal,
    canaried,
    guarded,
    nan_pages,
    poison_,
    poisoned,
)

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
          torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]  # fmt: skip
COMPLEX = [torch.complex64, torch.complex128]
INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = [*FLOATS, *COMPLEX, *INTEGERS]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The whole buffer that a view lies in."""
    return torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
def test_a_poisoned_tensor_is_nan_everywhere(dtype: torch.dtype, device: torch.device) -> None:
    tensor = poisoned((7, 33), dtype, device)
    # torch.isnan knows fp8 on no device.
    wide = tensor if dtype.is_complex else tensor.double()
    assert bool(wide.isnan().all())


def test_two_poisoned_tensors_hold_different_bits(device: torch.device) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn):
        assert not bitwise_equal(poisoned((64,), dtype, device), poisoned((64,), dtype, device))


def test_poisoning_a_strided_view_leaves_its_neighbours_alone(device: torch.device) -> None:
    buffer = torch.zeros(8, 32, dtype=torch.bfloat16, device=device)
    poison_(buffer[:, 4:20])
    assert bool(buffer[:, 4:20].isnan().all())
    assert int(buffer.isnan().sum()) == 8 * 16


@pytest.mark.parametrize("dtype", DTYPES)
def test_filling_the_tensor_alone_passes_its_check(dtype: torch.dtype, device: torch.device) -> None:
    guarded = canaried((5, 48), dtype, device, row_padding=16)
    guarded.tensor.copy_(torch.ones(5, 48, device=device).to(dtype))
    guarded.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("at", "message"),
    [(-1, "1 elements before"), (48, "between its rows"), (63, "between its rows"), (304, "1 elements after")],
)
def test_a_stray_write_of_one_element_fails(dtype: torch.dtype, at: int, message: str, device: torch.device) -> None:
    guarded = canaried((5, 48), dtype, device, row_padding=16)
    guarded.tensor.copy_(torch.ones(5, 48, device=device).to(dtype))
    storage = torch.tensor([], dtype=torch.uint8, device=device).set_(guarded.tensor.untyped_storage())
    # The complement differs from whatever noise was there.
    storage[(guarded.tensor.storage_offset() + at) * dtype.itemsize] ^= 0xFF
    with pytest.raises(AssertionError, match=f"1 elements beside the tensor were overwritten; the first is {message}"):
        guarded.check()


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, torch.bool, torch.int32, torch.int64])
def test_an_element_left_unwritten_fails_and_is_named(dtype: torch.dtype, device: torch.device) -> None:
    guarded = canaried((3, 2, 8), dtype, device)
    ones = torch.ones(3, 2, 8, device=device).to(dtype)
    guarded.tensor[:2].copy_(ones[:2])
    guarded.tensor[2, 0].copy_(ones[2, 0])
    with pytest.raises(AssertionError, match=r"8 of 48 elements were not written; the first is at \(2, 1, 0\)"):
        guarded.check()
    guarded.check(written=False)


def test_copying_the_guards_of_an_input_onto_those_of_an_output_fails(device: torch.device) -> None:
    source = canaried((4, 100), torch.bfloat16, device, row_padding=28)
    target = canaried((4, 100), torch.bfloat16, device, row_padding=28)
    # A copy kernel with its mask forgotten.
    flat(target.tensor).copy_(flat(source.tensor))
    with pytest.raises(AssertionError, match="beside the tensor"):
        target.check(written=False)


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_a_guarded_tensor_has_the_alignment_and_strides_asked_for(offset: int, device: torch.device) -> None:
    guarded = canaried((2, 3, 40), torch.float16, device, strides=(1000, 64, 1), offset=offset)
    assert guarded.tensor.stride() == (1000, 64, 1)
    assert guarded.tensor.data_ptr() % 16 == (2 * offset) % 16
    guarded.tensor.zero_()
    guarded.check()


@pytest.mark.parametrize("shape", [(0, 16), (), (1,)])
def test_empty_and_scalar_tensors_are_guarded(shape: tuple[int, ...], device: torch.device) -> None:
    guarded = canaried(shape, torch.float32, device)
    guarded.tensor.fill_(1)
    guarded.check()
    flat(guarded.tensor)[0] = 1
    with pytest.raises(AssertionError, match="before the tensor"):
        guarded.check()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"row_padding": -1}, "row_padding must be >= 0"),
        ({"strides": (1,)}, "strides must be 2 numbers"),
        ({"strides": (8, 1), "row_padding": 2}, "row_padding must be 0 where strides are given"),
        ({"band": 100}, "band must be a multiple of 256"),
        ({"offset": -1}, "offset must be >= 0"),
    ],
)
def test_impossible_guards_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        canaried((2, 8), torch.float32, **arguments)  # type: ignore[arg-type]


def test_pages_that_no_table_names_are_nan_and_the_others_untouched(device: torch.device) -> None:
    cache = torch.ones(8, 16, 2, 64, dtype=torch.bfloat16, device=device)
    table = torch.tensor([[5, 2, -1], [0, 5, -1]], device=device)
    assert nan_pages(cache, table).tolist() == [1, 3, 4, 6, 7]
    finite = cache.flatten(1).isfinite()
    assert finite.all(1).tolist() == [True, False, True, False, False, True, False, False]
    assert not bool(finite[[1, 3, 4, 6, 7]].any())


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_flipped_bit_is_found_and_named(dtype: torch.dtype, device: torch.device) -> None:
    a = poisoned((3, 4, 5), dtype, device)
    # By bytes, since copying a bool makes it 0 or 1.
    b = a.flatten().view(torch.uint8).clone().view(dtype).view(3, 4, 5)
    assert bitwise_equal(a, b)
    assert_bitwise_equal(a, b)
    # In the last byte, which is in the imaginary part of a complex number.
    flat(b).view(torch.uint8)[28 * dtype.itemsize - 1] ^= 1
    assert not bitwise_equal(a, b)
    with pytest.raises(
        AssertionError, match=r"z is not bit for bit .* 1 of 60 elements differ; the first, at \(1, 1, 2\)"
    ):
        assert_bitwise_equal(a, b, what="z")


def test_minus_zero_is_not_zero_and_nan_equals_itself(device: torch.device) -> None:
    zero = torch.zeros(1, device=device)
    nan = torch.full((1,), float("nan"), device=device)
    assert not bitwise_equal(zero, -zero)
    assert bitwise_equal(nan, nan.clone())
    assert not bitwise_equal(nan, (nan.view(torch.int32) + 1).view(torch.float32))


def test_strides_do_not_matter_but_shape_and_dtype_do(device: torch.device) -> None:
    a = torch.randn(16, 24, device=device)
    assert bitwise_equal(a.t(), a.t().contiguous())
    assert bitwise_equal(
        torch.view_as_complex(a.view(16, 12, 2)).conj(), torch.view_as_complex(a.view(16, 12, 2)).conj()
    )
    with pytest.raises(AssertionError, match=r"shape \(16, 24\), should be \(24, 16\)"):
        assert_bitwise_equal(a, a.t())
    with pytest.raises(AssertionError, match=r"dtype torch\.float32, should be torch\.float16"):
        assert_bitwise_equal(a, a.half())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64], ids=str)
def test_an_input_keeps_its_bits_between_guards(dtype: torch.dtype, device: torch.device) -> None:
    given = torch.randn(3, 5, device=device).to(dtype)
    place = guarded(given, row_padding=7, offset=1)
    assert_bitwise_equal(place.tensor, given)
    assert place.tensor.stride() == (12, 1)
    place.check()


def test_all_tensors_in_results_are_compared_and_results_that_hide_theirs_are_refused() -> None:
    x = torch.randn(3)
    assert_same_bits((x, [x + 1]), (x.clone(), [x + 1]))
    assert_same_bits(None, None)
    for other, why in (((x, [x]), "tensor 1 is not bit for bit"), ((x,), "2 tensors, should be 1")):
        with pytest.raises(AssertionError, match=why):
            assert_same_bits((x, [x + 1]), other)
    with pytest.raises(AssertionError, match="nothing would be compared"):
        assert_same_bits(SimpleNamespace(x=x), SimpleNamespace(x=x))
