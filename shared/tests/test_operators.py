"""Quick operators of interpreted tensors, against Triton's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels run on the GPU here")


def _operands(tl: Any, interpreter: Any) -> dict[str, Any]:
    """Tensors of several shapes and types, and numbers: what operators are given in kernels."""
    import ml_dtypes

    of_numpy = {"int32": np.int32, "int64": np.int64, "uint32": np.uint32, "int8": np.int8, "int1": np.bool_,
                "float16": np.float16, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16}  # fmt: skip
    numbers = np.random.default_rng(0)
    made: dict[str, Any] = {}
    for name, kind in of_numpy.items():
        dtype = getattr(tl, name)
        for shape in ((), (4,), (4, 1), (1, 4), (4, 4)) if name in ("int32", "float32", "int1") else ((), (4, 4)):
            data = numbers.integers(1, 100, shape or (1,)).astype(kind)
            if name == "int1":
                data = numbers.integers(0, 2, shape or (1,)).astype(bool)
            type_ = tl.core.block_type(dtype, list(shape)) if shape else dtype
            made[f"{name} {shape}"] = tl.core.tensor(interpreter.TensorHandle(data, dtype), type_)
    pointer = tl.pointer_type(tl.float16)
    for shape in ((), (4, 4)):
        type_ = tl.core.block_type(pointer, list(shape)) if shape else pointer
        data = np.full(shape or (1,), 1 << 40, np.uint64)
        made[f"pointer {shape}"] = tl.core.tensor(interpreter.TensorHandle(data, pointer), type_)
    more = (0, 3, -2, True, 1 << 31, 1 << 62, 1 << 70, 0.5, -0.0, float("inf"), float("nan"), 1e-40, 1e300, None)
    return made | {str(number): number for number in more} | {"constexpr": tl.constexpr(5)}


def _outcome(call: Callable[[], Any]) -> tuple[Any, ...]:
    try:
        got = call()
    except Exception as error:
        return (type(error),)
    data = got.handle.data
    kinds = data.dtype, str(got.handle.dtype), str(got.type), str(got.dtype), str(got.shape), str(got.numel)
    return *kinds, data.shape, np.ascontiguousarray(data).tobytes()


@pytest.mark.filterwarnings("ignore")
def test_quick_operators_give_the_bits_and_types_that_triton_gives() -> None:
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    from kernel_reference.testing.interpreter_operators import quick_operators

    semantic = TritonSemantic(interpreter.interpreter_builder)
    operands = _operands(tl, interpreter)
    tensors = {name: one for name, one in operands.items() if isinstance(one, tl.core.tensor)}
    conditions = {name: one for name, one in tensors.items() if name.startswith("int1")}
    asked: dict[str, list[tuple[str, tuple[Any, ...]]]] = {}
    left_to_triton = set()
    for name in quick_operators(tl.core, interpreter):
        pairs = [(f"{x}, {y}", (tensors[x], operands[y])) for x in tensors for y in operands]
        if name == "where":
            pairs = [(f"{c}, {w}", (conditions[c], *pair)) for c in conditions for w, pair in pairs]
        elif name == "to":
            dtypes = (tl.int1, tl.int32, tl.int64, tl.uint32, tl.float16, tl.float32, tl.float64, tl.bfloat16)
            pairs = [(f"{x}, {dtype}", (tensors[x], dtype)) for x in tensors for dtype in dtypes]
        elif name == "__getitem__":
            whole = slice(None)
            places = ((whole, None), (None, whole), (whole, whole, None), (None,), whole, (whole,), None)
            pairs = [(f"{x}, {place}", (tensors[x], place)) for x in tensors for place in places]
        asked[name] = pairs
    for name, make in quick_operators(tl.core, interpreter).items():
        owner = tl.core.tensor if name in vars(tl.core.tensor) else tl.core
        original = partial(getattr(owner, name), _semantic=semantic)

        def falls_back(*arguments: Any, **named: Any) -> Any:
            raise NotImplementedError

        quick = make(falls_back)
        seen = 0
        for what, arguments in asked[name]:
            got = _outcome(partial(quick, *arguments))
            if got == (NotImplementedError,):
                left_to_triton.add(name)
                continue
            seen += 1
            assert got == _outcome(partial(original, *arguments)), f"{name} of {what}"
        assert seen > 5, name
    assert left_to_triton == set(asked)
