"""The repair of Triton's interpreter, against PyTorch on the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kernel_reference.testing import interpreter
from kernel_reference.testing.contract import far_apart
from kernel_reference.testing.forks import outcome_alone
from kernel_reference.testing.guards import assert_bitwise_equal, bitwise_equal
from kernel_reference.testing.numerics import assert_close_to_oracle

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels run on the GPU here")

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    place = Path(__file__).parent / "interpreter_kernels.py"
    spec = importlib.util.spec_from_file_location("interpreter_kernels", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Triton reads the source of a kernel by way of its module.
    sys.modules["interpreter_kernels"] = module
    spec.loader.exec_module(module)
    return module


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    exit_code, printed = outcome_alone(code, environment | variables)
    return subprocess.CompletedProcess(code, -1 if exit_code is None else exit_code, printed, printed)


def test_a_softmax_in_bfloat16_is_as_exact_as_pytorchs(kernels: ModuleType) -> None:
    x = torch.randn(6, 151).bfloat16()
    y = torch.empty_like(x)
    kernels.softmax[(6,)](x, y, 151, x.stride(0), 256)
    assert_close_to_oracle(y, x.double().softmax(-1), x.softmax(-1))


def test_every_float16_becomes_the_bfloat16_that_pytorch_makes_of_it(kernels: ModuleType) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    y = torch.empty(2**16, dtype=torch.bfloat16)
    kernels.cast[(1,)](x, y, 2**16)
    finite = ~x.isnan()
    assert_bitwise_equal(y[finite], x[finite].bfloat16())
    assert bool(y[~finite].isnan().all())


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
def test_every_16_bit_value_becomes_the_nearest_fp8_and_large_ones_the_largest(
    source: torch.dtype, dtype: torch.dtype, kernels: ModuleType
) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(source)
    y = torch.empty(2**16, dtype=dtype)
    kernels.cast[(1,)](x, y, 2**16)
    numbers = ~x.isnan()
    limit = torch.finfo(dtype).max
    assert_bitwise_equal(y[numbers], x[numbers].float().clamp(-limit, limit).to(dtype))
    assert bool(y[~numbers].double().isnan().all())


@pytest.mark.parametrize("dtype", [*FP8, torch.bfloat16])
def test_every_value_of_a_small_float_is_widened_exactly(dtype: torch.dtype, kernels: ModuleType) -> None:
    count = 2 ** (8 * dtype.itemsize)
    x = torch.arange(-count // 2, count // 2).to(torch.int8 if dtype.itemsize == 1 else torch.int16).view(dtype)
    y = torch.empty(count)
    kernels.cast[(1,)](x, y, count)
    numbers = ~x.float().isnan()
    assert_bitwise_equal(y[numbers], x[numbers].float())
    assert bool(y[~numbers].isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_maximum_minimum_and_clamp_return_the_operand_that_is_a_number(dtype: torch.dtype, kernels: ModuleType) -> None:
    nan = float("nan")
    a = torch.tensor([1.5, nan, -3.0, nan, 0.25, -0.5, 7.0, -9.0]).to(dtype)
    b = torch.tensor([nan, 2.0, -2.5, nan, 0.125, -0.25, 9.0, -7.0]).to(dtype)
    largest, least, clamped, absolute = (torch.empty_like(a) for _ in range(4))
    kernels.extremes[(1,)](a, b, largest, least, clamped, absolute, 8)
    assert torch.equal(largest.nan_to_num(99), torch.fmax(a, b).nan_to_num(99))
    assert torch.equal(least.nan_to_num(99), torch.fmin(a, b).nan_to_num(99))
    assert clamped[0] == 1
    assert clamped[2] == -1
    assert torch.equal(absolute.nan_to_num(99), a.abs().nan_to_num(99))


def test_fused_multiply_add_in_bfloat16_rounds_once(kernels: ModuleType) -> None:
    x = torch.tensor([1 + 2**-7, 1.0, 3.0, -5.0]).bfloat16()
    z = torch.tensor([-1 - 2**-6, 2.0, -9.0, 0.5]).bfloat16()
    y = torch.empty_like(x)
    kernels.fused[(1,)](x, x, z, y, 4)
    # Rounding the product first would give 0.
    assert y[0] == 2**-14
    assert_bitwise_equal(y, (x.double() * x.double() + z.double()).bfloat16())


def test_a_sum_of_bfloat16_does_not_stop_at_256(kernels: ModuleType) -> None:
    x = torch.ones(1024, dtype=torch.bfloat16)
    sums, total = torch.empty_like(x), torch.empty(1, dtype=torch.bfloat16)
    kernels.running[(1,)](x, sums, total, 1024)
    assert total.item() == 1024
    assert_bitwise_equal(sums, torch.arange(1.0, 1025).bfloat16())


def test_compare_and_swap_of_bfloat16_compares_bits(kernels: ModuleType) -> None:
    y, expected, new, old = (torch.tensor([value]).bfloat16() for value in (2.5, 2.5, -1.25, 0.0))
    kernels.swap[(1,)](y, expected, new, old)
    assert (y.item(), old.item()) == (-1.25, 2.5)
    kernels.swap[(1,)](y, expected, new.neg(), old)
    assert (y.item(), old.item()) == (-1.25, -1.25)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_rows_more_than_two_to_the_31_elements_apart_are_reached(dtype: torch.dtype, kernels: ModuleType) -> None:
    x = torch.randint(-100, 100, (2, 64)).to(dtype)
    y = torch.empty_like(x)
    far = far_apart(x)
    kernels.move[(2,)](far, y, far.stride(0), 64)
    assert bitwise_equal(y, x)


def test_triton_puts_the_interpreter_in_its_language_once_a_launch_and_not_once_a_call(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton.language as tl
    from triton.runtime import interpreter as tritons

    patches = []
    patch = tritons._LangPatchScope.set_attr
    monkeypatch.setattr(tritons._LangPatchScope, "set_attr", lambda *given: (patches.append(given), patch(*given)))
    x = torch.ones(8)
    before = tl.load, tl.core.load
    counts = []
    for programs in (1, 6):
        patches.clear()
        # Each program calls two device functions, of a module that sees the language by another name.
        kernels.softmax[(programs,)](torch.ones(programs, 8).bfloat16(), torch.empty(6, 8).bfloat16(), 8, 8, 8)
        counts.append(len(patches))
        assert (tl.load, tl.core.load) == before
    assert counts[0] == counts[1] > 0
    with pytest.raises(Exception, match="power of 2"):
        kernels.softmax[(1,)](x.bfloat16(), x.bfloat16(), 8, 8, 7)
    assert (tl.load, tl.core.load) == before


def test_repairing_and_testing_takes_few_calls_and_a_second_time_none() -> None:
    """Calls of Python's functions, a million of which take about a second; every test run pays for them."""
    code = """
import sys, torch, triton
from kernel_reference.testing import interpreter
calls = [0, 0]
for time in (0, 1):
    sys.setprofile(lambda frame, event, argument: calls.__setitem__(time, calls[time] + (event == "call")))
    interpreter.repair()
    sys.setprofile(None)
assert 10_000 < calls[0] < 600_000, calls
assert calls[1] < 10, calls
"""
    done = python(code, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr


def test_a_second_import_repairs_what_the_first_has_repaired() -> None:
    """As in a fork in which a fault is planted: modules are imported anew, and Triton is as the first ones left it."""
    code = """
import sys
from kernel_reference.testing import interpreter
interpreter.repair()
for name in [name for name in sys.modules if name.startswith("kernel_reference")]:
    del sys.modules[name]
from kernel_reference.testing import interpreter as again
assert again is not interpreter
again.repair()
"""
    done = python(code, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("code", "variables", "message"),
    [
        ("", {}, "TRITON_INTERPRET must be 1"),
        (
            "import os, triton; os.environ['TRITON_INTERPRET'] = '1'",
            {},
            "triton was imported before TRITON_INTERPRET=1",
        ),
    ],
)
def test_a_wrong_order_of_setting_and_importing_is_an_error(code: str, variables: dict[str, str], message: str) -> None:
    done = python(f"{code}\nfrom kernel_reference.testing import interpreter; interpreter.repair()", **variables)
    assert f"RuntimeError: {message}" in done.stderr


def test_a_triton_without_a_private_name_is_named_as_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.delattr(InterpreterBuilder, "create_dot")
    message = rf"triton {triton.__version__} .*InterpreterBuilder\.create_dot, which the repair replaces, is gone"
    with pytest.raises(RuntimeError, match=message):
        interpreter.self_test()


def _drop_cast(builder: type) -> tuple[str, object]:
    import ml_dtypes
    import numpy as np
    from triton.runtime.interpreter import TensorHandle

    kept = builder.cast_impl  # type: ignore[attr-defined]

    def truncating(self: object, src: object, dst_type: object) -> object:
        result = kept(self, src, dst_type)
        if result.data.dtype != ml_dtypes.bfloat16:
            return result
        bits = src.data.astype(np.float32).view(np.uint32) >> 16  # type: ignore[attr-defined]
        return TensorHandle(bits.astype(np.uint16).view(ml_dtypes.bfloat16), result.dtype)

    return "cast_impl", truncating


def _drop_nan(builder: type) -> tuple[str, object]:
    import numpy as np

    return "create_maxnumf", lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.maximum)


def _drop_dot(builder: type) -> tuple[str, object]:
    import ml_dtypes
    from triton.runtime.interpreter import TensorHandle

    def narrow(self: object, a: Any, b: Any, d: Any, *rest: object) -> object:
        return TensorHandle((a.data @ b.data).astype(ml_dtypes.bfloat16).astype(d.data.dtype), d.dtype)

    return "create_dot", narrow


def _drop_mask(builder: type) -> tuple[str, object]:
    kept = builder.create_masked_load  # type: ignore[attr-defined]
    return "create_masked_load", lambda self, ptrs, mask, other, *rest: kept(self, ptrs, mask, None, *rest)


@pytest.mark.parametrize(
    ("breaking", "operation"),
    [
        (_drop_cast, "cast to bfloat16: element 1 "),
        (_drop_nan, r"bfloat16 arithmetic: maximum\(a, b\)"),
        (_drop_dot, "dot: of torch.bfloat16"),
        (_drop_mask, "load and store: torch.int8"),
    ],
)
def test_the_self_test_names_the_operation_that_is_wrong(
    breaking: object, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setattr(InterpreterBuilder, *breaking(InterpreterBuilder))  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=operation):
        interpreter.self_test()


def test_without_the_repair_the_self_test_fails() -> None:
    done = python("from kernel_reference.testing import interpreter; interpreter.self_test()", TRITON_INTERPRET="1")
    assert "does not compute what a GPU does" in done.stderr


SHORTCUTS = """
import itertools, sys, warnings
import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.language.semantic import TritonSemantic
from kernel_reference.testing.interpreter_shortcuts import take_shortcuts

warnings.simplefilter("ignore")
semantic = TritonSemantic(interpreter.interpreter_builder)
handle = interpreter.TensorHandle
DTYPES = [tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.uint64, tl.float16, tl.float32, tl.float64]
NUMBERS = [0, 1, -1, 127, 128, -129, 2**31 - 1, 2**31, -2**31 - 1, 2**63 - 1, -2**63, 2**63, 2**64 - 1, 2**64,
           0.0, -0.5, 1e300, float("inf"), float("nan"), True, False]
SHAPES = [(), (4,), (1,), (4, 1), (1, 4), (4, 4), (2, 4), (8,)]

def operand(kind, shape):
    size = shape or (1,)
    if kind == "pointer":
        dtype, data = tl.pointer_type(tl.float32), np.full(size, 4096, np.uint64)
    else:
        dtype = kind
        data = np.arange(np.prod(size)).reshape(size).astype(interpreter._get_np_dtype(dtype))
    return tl.tensor(handle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)

def outcome(function, *arguments, **named):
    try:
        made = function(*arguments, **named)
    except Exception as error:
        return type(error).__name__, str(error)
    made = made if isinstance(made, tuple) else (made,)
    return [(repr(one.type), repr(one.dtype), repr(one.shape), repr(one.numel), repr(one.handle.dtype),
             one.handle.data.dtype, one.handle.data.shape, one.handle.data.tobytes()) for one in made]

def everything():
    kinds = [*DTYPES, "pointer"]
    tensors = [operand(kind, shape) for kind in kinds for shape in ((), (4,))]
    shaped = [operand(kind, shape) for kind in (tl.int32, tl.float32, "pointer") for shape in SHAPES]
    pairs = [*itertools.product(tensors, tensors), *itertools.product(shaped, shaped)]
    pairs += [*itertools.product(tensors, NUMBERS), *itertools.product(NUMBERS, tensors)]
    flags = [(), (True, True), (False, False, False), (False, False, True, True), (True, False)]
    for (a, b), given in itertools.product(pairs, flags):
        yield outcome(semantic.binary_op_type_checking_impl, a, b, *given)
    for a, b in itertools.product(shaped, shaped):
        yield outcome(semantic.broadcast_impl_value, a, b)
    for a, b in itertools.product([*kinds[:-1], tl.pointer_type(tl.int8), tl.block_type(tl.int8, [4]), 3], repeat=2):
        yield repr(a == b)
    for kind in DTYPES:
        yield kind.is_int(), [repr(vars(tl.block_type(kind, shape))) for shape in ([4, 8], [1], [tl.constexpr(4)])]
    for shape in ([3], [], [0], "4", (4, 8), tl.tuple([4, 8]), [4.0], [True]):
        try:
            yield repr(vars(tl.block_type(tl.int8, shape)))
        except Exception as error:
            yield type(error).__name__, str(error)
    for data, dtype in itertools.product((np.zeros(2, np.int64), np.zeros(2, np.int8), np.zeros(1, bool)), kinds[:-1]):
        try:
            yield repr(vars(handle(data, dtype))), handle(data, dtype, {"a": 1}).attr
        except Exception as error:
            yield type(error).__name__, str(error)

wanted = list(everything())
functions = [semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value, tl.dtype.__eq__,
             tl.block_type.__init__, handle.__init__, tl.core.tensor.__init__, interpreter._patch_attr]
take_shortcuts(interpreter)
now = [semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value, tl.dtype.__eq__,
       tl.block_type.__init__, handle.__init__, tl.core.tensor.__init__, interpreter._patch_attr]
assert all(before != after for before, after in zip(functions, now)), "a shortcut is not taken"
# Twice: the second time from memory.
for _ in range(2):
    for number, (before, after) in enumerate(zip(wanted, everything(), strict=True)):
        assert before == after, (number, before, after)
print(len(wanted), len({str(one) for one in wanted}))
"""


def test_shortcuts_give_what_triton_gives_types_values_and_errors_for_operands_of_all_kinds() -> None:
    done = python(SHORTCUTS, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    compared, different = map(int, done.stdout.split())
    assert compared > 5000
    assert different > 100
