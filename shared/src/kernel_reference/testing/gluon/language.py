"""Gluon's language over torch tensors: the modules that stand in for Triton's while a kernel is imported."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from kernel_reference.testing.gluon.memory import (
    Descriptor,
    Layout,
    MBarrierLayout,
    NVMMASharedLayout,
    SharedLinearLayout,
)
from kernel_reference.testing.gluon.pipeline import (
    Program,
    allocate,
    arrive,
    arrive_behind_copies,
    copy_elements,
    copy_from_shared,
    copy_to_shared,
    expect,
    init,
    linger,
    multiply,
    wait,
    wait_for_products,
    warp_specialize,
)
from kernel_reference.testing.gluon.ptx import execute
from kernel_reference.testing.gluon.values import DType, Value, atomic_add, extreme, in_64_bits, load, select, store


def _assume(condition: Any) -> None:
    if not condition:
        raise RuntimeError("what the kernel assumes is not so")


def _constexpr(value: Any = None) -> Any:
    return value


def _filled(shape: Sequence[int], value: Any, dtype: DType, layout: Any = None) -> Value:
    return Value(torch.full(list(shape), value).to(dtype.torch))


def _in_assembler(asm: str, constraints: str, arguments: Sequence[Any], dtype: Any, **_: Any) -> Any:
    """What moves numbers, or computes with them."""
    if ".f32" not in asm:
        return arguments[0]
    dtypes = [one.torch for one in (dtype if isinstance(dtype, tuple) else (dtype,))]
    given = [one.data if isinstance(one, Value) else torch.tensor(one, dtype=torch.float32) for one in arguments]
    numbers = torch.broadcast_tensors(*given)
    made = tuple(Value(one) for one in execute(asm, constraints.count("="), *numbers, dtypes=dtypes))
    return made if isinstance(dtype, tuple) else made[0]


LANGUAGE: dict[str, Any] = {
    "constexpr": _constexpr,
    "static_range": lambda *bounds: range(*map(int, bounds)),
    "range": lambda *bounds, **_: range(*map(int, bounds)),
    "program_id": lambda axis: Value(Program.number),
    "num_programs": lambda axis: Value(Program.count),
    "arange": lambda begin, end, layout=None: Value(torch.arange(begin, end, dtype=torch.int32)),
    "zeros": lambda shape, dtype, layout=None: _filled(shape, 0, dtype),
    "full": _filled,
    "where": select,
    "minimum": extreme(torch.minimum, min),
    "maximum": extreme(torch.maximum, max),
    "cdiv": lambda a, b: (a + b - 1) // b,
    "exp": lambda x: Value(torch.exp(x.data)),
    "exp2": lambda x: Value(torch.exp2(x.data)),
    "log": lambda x: Value(torch.log(x.data)),
    "log2": lambda x: Value(torch.log2(x.data)),
    "fma": lambda x, y, z: Value((in_64_bits(x) * in_64_bits(y) + in_64_bits(z)).float()),
    "abs": lambda x: Value(torch.abs(x.data)),
    "floor": lambda x: Value(torch.floor(x.data)),
    "ceil": lambda x: Value(torch.ceil(x.data)),
    "div_rn": lambda x, y: x / y,
    "sqrt": lambda x: Value(torch.sqrt(x.data)),
    "rsqrt": lambda x: Value(torch.rsqrt(x.data)),
    "max": lambda x, axis: Value(x.data.amax(axis)),
    "min": lambda x, axis: Value(x.data.amin(axis)),
    # Integers of 32 bits stay so.
    "sum": lambda x, axis: Value(x.data.sum(axis, dtype=x.data.dtype)),
    "cumsum": lambda x, axis: Value(x.data.cumsum(axis, dtype=x.data.dtype)),
    "load": load,
    "store": store,
    "atomic_add": atomic_add,
    "reshape": lambda x, shape: Value(x.data.reshape([int(size) for size in shape])),
    "permute": lambda x, dims: Value(x.data.permute([int(dim) for dim in dims])),
    "split": lambda x: tuple(Value(half) for half in x.data.unbind(-1)),
    "convert_layout": lambda x, layout: x,
    "inline_asm_elementwise": _in_assembler,
    "to_tensor": lambda x: x if isinstance(x, Value) else Value(x),
    "allocate_shared_memory": allocate,
    "warp_specialize": warp_specialize,
    "debug_barrier": linger,
    "extra": SimpleNamespace(cuda=SimpleNamespace(gdc_launch_dependents=lambda: None, gdc_wait=lambda: None)),
    "assume": _assume,
    "NVMMASharedLayout": NVMMASharedLayout,
    "SharedLinearLayout": SharedLinearLayout,
    **dict.fromkeys(
        (
            "SwizzledSharedLayout", "NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout",
            "DistributedLinearLayout",
        ), Layout
    ),
    **{str(dtype).removeprefix("torch."): DType(dtype) for dtype in (
        torch.int32, torch.int64, torch.float32, torch.float64, torch.float16, torch.bfloat16
    )},
}  # fmt: skip


def _jit(function: Any = None, **_: Any) -> Any:
    return (lambda decorated: decorated) if function is None else function


def languages() -> dict[str, ModuleType]:
    barrier = SimpleNamespace(
        MBarrierLayout=MBarrierLayout, init=init, expect=expect, arrive=arrive, wait=wait,
        invalidate=lambda barrier: None,
    )  # fmt: skip
    copies = SimpleNamespace(
        async_copy_global_to_shared=copy_to_shared, async_copy_shared_to_global=copy_from_shared,
        store_wait=lambda pendings: None,
    )  # fmt: skip
    hopper = {
        "fence_async_shared": linger, "mbarrier": barrier, "tma": copies, "warpgroup_mma": multiply,
        "warpgroup_mma_wait": wait_for_products,
    }  # fmt: skip
    ampere = {
        "async_copy": SimpleNamespace(async_copy_global_to_shared=copy_elements, mbarrier_arrive=arrive_behind_copies)
    }
    jit = {"jit": _jit, "constexpr_function": lambda function: function}
    contents = {
        "triton": {**jit, "cdiv": LANGUAGE["cdiv"]}, "triton.language": LANGUAGE, "triton.experimental": {},
        "triton.experimental.gluon": jit, "triton.experimental.gluon.language": LANGUAGE,
        "triton.experimental.gluon.language.nvidia": {}, "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "triton.experimental.gluon.language.nvidia.ampere": ampere,
        "triton.experimental.gluon.nvidia": {},
        "triton.experimental.gluon.nvidia.hopper": {"TensorDescriptor": Descriptor},
    }  # fmt: skip
    modules: dict[str, ModuleType] = {}
    for name, content in contents.items():
        module = modules[name] = ModuleType(name)
        module.__dict__.update(content, __path__=[])
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(modules[parent], leaf, module)
    return modules
