"""Make Triton's interpreter compute bfloat16 and fp8 as a GPU does.

``TRITON_INTERPRET=1`` runs a kernel on the CPU in numpy. numpy has neither bfloat16 nor fp8, so Triton keeps them as
unsigned integers, on which it then adds, multiplies and compares: the results are silently wrong. :func:`repair` keeps
them as arrays of ml_dtypes instead, whose arithmetic is that of the formats, and rounds casts to the nearest, ties to
even.

What the repair takes for the GPU's rule, where there is a choice:

- a cast to fp8 saturates at the largest finite value, infinities included; NaN stays NaN;
- an integer is converted to bfloat16 or fp8 in float32;
- ``tl.dot`` multiplies and accumulates in float32;
- ``tl.sum`` and ``tl.cumsum`` of bfloat16 or fp8 add in float32 and round once; a GPU, which adds in a tree and rounds
  at each step, is a little less exact;
- ``tl.maximum``, ``tl.minimum`` and ``tl.clamp`` return the operand that is not NaN, unless asked to propagate it (all
  float dtypes; Triton 3.9 has this itself).

The interpreter models neither tf32 nor races, shared memory or accesses out of bounds; ``float8e4b15`` is left as
Triton has it. Private names of Triton are replaced, hence :func:`self_test`. Tried with Triton 3.6.0, 3.7.1 and 3.9.0.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace as replace_fields
from functools import cache
from typing import Any

from kernel_reference.testing.interpreter_shortcuts import take_shortcuts

_PRIVATE_NAMES = {
    "": ("InterpreterBuilder", "InterpretedFunction", "ReduceOps", "ScanOps", "TensorHandle", "_LangPatchScope",
         "_get_np_dtype", "_interpreter", "_ir", "_patch_lang", "_patch_lang_tensor", "interpreter_builder"),
    "InterpreterBuilder": ("binary_op", "cast_impl", "create_atomic_cas", "create_atomic_rmw", "create_clampf",
                           "create_dot", "create_fma", "create_fp_to_fp", "create_masked_load", "create_masked_store",
                           "create_maxnumf", "create_minnumf", "ternary_op"),
    "ReduceOps": ("sum", "to_tensor"),
    "ScanOps": ("cumsum", "cumprod", "to_tensor"),
}  # fmt: skip


@cache
def repair() -> None:
    """Install the repair in this process, once, and check it with :func:`self_test`.

    Raises RuntimeError if TRITON_INTERPRET=1 is not set or was set after triton was imported, if this Triton lacks a
    private name that the repair replaces, or if a kernel of the self-test computes something else than the GPU would.
    """
    _install(_interpreter_module())
    self_test()


def self_test() -> None:
    """Run small kernels over what the repair touches (well under a second) and compare with PyTorch's CPU results.

    Raises RuntimeError that names the version of Triton and the operation that failed.
    """
    _interpreter_module()
    from kernel_reference.testing.interpreter_checks import CHECKS

    for operation, check in CHECKS.items():
        try:
            problem = check()
        except Exception as error:
            raise RuntimeError(_unfit(f"{operation} raised {type(error).__name__}: {error}")) from error
        if problem is not None:
            raise RuntimeError(_unfit(f"{operation}: {problem}"))


def _unfit(why: str) -> str:
    from importlib.metadata import version

    import triton

    return (
        f"the interpreter of triton {triton.__version__} (numpy {version('numpy')}, ml_dtypes {version('ml_dtypes')}) "
        f"does not compute what a GPU does: {why}. Reproduce: "
        "TRITON_INTERPRET=1 python -c 'from kernel_reference.testing import interpreter; interpreter.repair()'"
    )


def _interpreter_module() -> Any:
    if os.environ.get("TRITON_INTERPRET", "").lower() not in ("1", "true", "on", "yes", "y"):
        raise RuntimeError(
            "TRITON_INTERPRET must be 1, from before triton is imported, to run kernels in the interpreter"
        )
    import triton
    from triton.runtime import interpreter

    for owner, names in _PRIVATE_NAMES.items():
        for name in names:
            if not hasattr(getattr(interpreter, owner) if owner else interpreter, name):
                path = ".".join(filter(None, ("triton.runtime.interpreter", owner, name)))
                raise RuntimeError(_unfit(f"{path}, which the repair replaces, is gone"))
    # Triton's own library functions were decorated when it was imported; what they became tells what it saw then.
    if not isinstance(triton.language.zeros, interpreter.InterpretedFunction):
        raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set; set it first, in the environment")
    return interpreter


def _install(interpreter: Any) -> None:
    import ml_dtypes
    import numpy as np
    import triton.language as tl

    finfo: Any = ml_dtypes.finfo
    storage: dict[str, Any] = {
        "bf16": np.dtype(ml_dtypes.bfloat16),
        "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
        "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
        "fp8e4b8": np.dtype(ml_dtypes.float8_e4m3fnuz),
        "fp8e5b16": np.dtype(ml_dtypes.float8_e5m2fnuz),
    }
    largest = {dtype: float(finfo(dtype).max) for dtype in storage.values()}
    stored = frozenset(storage.values())
    unsigned = {1: tl.uint8, 2: tl.uint16}
    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    numpy_dtype = interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype, tl)
    # A third of an interpreted kernel's time repeats integer operations in 64 bits, for an assertion that is left out
    # without debug.
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace_fields(options, sanitize_overflow=False)

    take_shortcuts(interpreter)

    def storage_of(dtype: Any) -> Any:
        return storage.get(dtype.scalar.name)

    def replace(owner: Any, *names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Put a function in the place of others; it is given the one that it replaces as its first argument."""

        def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
            for name in names:
                setattr(owner, name, _bound(function, getattr(owner, name)))
            return function

        return decorator

    def as_bits(value: Any) -> Any:
        """The handle, for the part of the interpreter that is compiled and knows only numpy's own dtypes."""
        if value is None or value.data.dtype not in stored:
            return value
        bits = unsigned[value.data.dtype.itemsize]
        return handle(value.data.view(numpy_dtype(bits)), bits)

    def widened(data: Any) -> Any:
        return data.astype(np.float32) if data.dtype in stored or data.dtype.kind in "biu" else data

    def to_nearest(data: Any, target: Any) -> Any:
        with np.errstate(all="ignore"):
            data = widened(data)
            if target.itemsize == 1:
                limit = data.dtype.type(largest[target])
                data = np.clip(data, -limit, limit)
            return data.astype(target)

    def toward_zero(data: Any, target: Any) -> Any:
        nearest = to_nearest(data, target)
        too_far = np.abs(nearest.astype(np.float64)) > np.abs(widened(data).astype(np.float64))
        # One bit pattern less is the next value towards zero, down from infinity too.
        bits = nearest.view(f"u{target.itemsize}")
        return (bits - too_far.astype(bits.dtype)).view(target)

    @replace(interpreter, "_get_np_dtype")
    def get_numpy_dtype(original: Any, dtype: Any) -> Any:
        return storage_of(dtype) or original(dtype)

    @replace(interpreter, "_patch_lang_tensor")
    def patch_tensor(original: Any, tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        # A scalar is an array of one element and one dimension, which int() refuses from numpy 2.4 on.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    # The modules that a launch has patched so far, and what takes the patches of its device functions back.
    patched: set[str] = set()
    inner: list[Any] = []
    # What is patched by what in these modules: looking for it takes milliseconds, as long as a small kernel.
    patches: dict[frozenset[str], list[tuple[Any, str, Any]]] = {}
    # Which of the modules a function's module sees; kept with its names, so that no other's have their place.
    visible: dict[tuple[int, int], tuple[frozenset[str], Any]] = {}

    @replace(interpreter, "_patch_lang")
    def patch_language(original: Any, function: Any) -> Any:
        """Triton does so again at each call of a device function, for a third of a kernel's time; once a launch do."""
        # Triton adds to a module's names when it first rewrites one of its functions.
        seen = id(function.__globals__), len(function.__globals__)
        if seen not in visible:
            names = function.__globals__.values()
            visible[seen] = frozenset(x.__name__ for x in names if x is tl or x is tl.core), function.__globals__
        languages, _ = visible[seen]
        if languages and languages <= patched:
            return interpreter._LangPatchScope()
        outermost = not patched
        if outermost and languages in patches:
            scope = interpreter._LangPatchScope()
            for owner, name, member in patches[languages]:
                scope.set_attr(owner, name, member)
        else:
            scope = original(function)
            if outermost:
                changed = dict.fromkeys((owner, name) for owner, name, _ in scope._changes)
                patches[languages] = [(owner, name, getattr(owner, name)) for owner, name in changed]
        patched.update(languages)
        if not outermost:
            inner.append(scope)
            return scope
        restore = scope.restore

        def restore_all() -> None:
            patched.clear()
            while inner:
                inner.pop().restore()
            restore()

        scope.restore = restore_all
        return scope

    @replace(builder, "create_masked_load")
    def load(original: Any, self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        dtype = ptrs.get_element_ty()
        target = storage_of(dtype)
        if target is None:
            return original(self, ptrs, mask, other, *rest, **named)
        pointers = handle(ptrs.data, tl.pointer_type(unsigned[target.itemsize]))
        loaded = original(self, pointers, mask, as_bits(other), *rest, **named)
        return handle(loaded.data.view(target), dtype)

    @replace(builder, "create_masked_store")
    def store(original: Any, self: Any, ptrs: Any, value: Any, *rest: Any, **named: Any) -> Any:
        return original(self, ptrs, as_bits(value), *rest, **named)

    @replace(builder, "cast_impl")
    def cast(original: Any, self: Any, src: Any, dst_type: Any) -> Any:
        target = storage_of(dst_type)
        if target is not None:
            return handle(to_nearest(src.data, target), dst_type.scalar)
        # The dtype decides, not the data: the result of a comparison is an array of bools that is called bfloat16.
        if storage_of(src.dtype) is None:
            return original(self, src, dst_type)
        with np.errstate(all="ignore"):
            return handle(src.data.astype(numpy_dtype(dst_type)), dst_type.scalar)

    @replace(builder, "create_fp_to_fp")
    def convert(original: Any, self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        target, source = storage_of(dst_type), storage_of(src.dtype)
        if (target is None and source is None) or "fp8e4b15" in (src.dtype.scalar.name, dst_type.scalar.name):
            return original(self, src, dst_type, rounding_mode)
        if target is not None and rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ:
            return handle(toward_zero(src.data, target), dst_type.scalar)
        return self.cast_impl(src, dst_type)

    @replace(builder, "binary_op")
    def operate(original: Any, self: Any, lhs: Any, rhs: Any, operation: Any) -> Any:
        if lhs.data.dtype not in stored and rhs.data.dtype not in stored:
            return original(self, lhs, rhs, operation)
        # ml_dtypes reports a comparison with NaN, as numpy does not for its own floats.
        with np.errstate(all="ignore"):
            return original(self, lhs, rhs, operation)

    @replace(builder, "ternary_op")
    def operate_on_three(original: Any, self: Any, *operands: Any) -> Any:
        if not any(operand.data.dtype in stored for operand in operands[:-1]):
            return original(self, *operands)
        with np.errstate(all="ignore"):
            return original(self, *operands)

    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)

    @replace(builder, "create_clampf")
    def clamp(original: Any, self: Any, value: Any, low: Any, high: Any, propagate_nans: Any) -> Any:
        if propagate_nans == interpreter._ir.PROPAGATE_NAN.NONE:
            return self.create_minnumf(self.create_maxnumf(value, low), high)
        return original(self, value, low, high, propagate_nans)

    @replace(builder, "create_fma")
    def fma(original: Any, self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.data.dtype not in stored:
            return original(self, x, y, z)
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return handle(exact.astype(z.data.dtype), z.dtype.scalar)

    @replace(builder, "create_dot")
    def dot(original: Any, self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if a.data.dtype not in stored and b.data.dtype not in stored:
            return original(self, a, b, d, *rest)
        result = np.matmul(widened(a.data), widened(b.data), dtype=np.float32) + widened(d.data)
        return handle(result.astype(d.data.dtype), d.dtype.scalar)

    # Triton 3.7 cannot make a bfloat16 constant other than 0, and has not the scaled dot of 3.9, which reads bits.
    builder.get_bf16 = lambda self, value: handle(np.array([value], dtype=storage["bf16"]), tl.bfloat16)
    if hasattr(interpreter, "_mxfp_value_handle_to_float32"):

        @replace(interpreter, "_mxfp_value_handle_to_float32")
        def scaled_dot_operand(original: Any, value: Any) -> Any:
            return widened(value.data) if value.data.dtype in stored else original(value)

    @replace(builder, "create_atomic_cas")
    def compare_and_swap(original: Any, self: Any, ptr: Any, cmp: Any, val: Any, *rest: Any) -> Any:
        old = original(self, ptr, as_bits(cmp), as_bits(val), *rest)
        return handle(old.data.view(cmp.data.dtype), cmp.dtype.scalar)

    @replace(builder, "create_atomic_rmw")
    def read_modify_write(original: Any, self: Any, operation: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        if val.data.dtype not in stored:
            return original(self, operation, ptr, val, mask, *rest)
        # Triton's front end refuses all others.
        if operation != interpreter._ir.ATOMIC_OP.FADD:
            raise ValueError(f"unsupported atomic operation {operation} on {val.dtype}")
        target = val.data.dtype
        bits = np.dtype(f"u{target.itemsize}")
        shape = np.broadcast_shapes(ptr.data.shape, val.data.shape, mask.data.shape)
        addresses, values, pending = (np.broadcast_to(h.data, shape).reshape(-1) for h in (ptr, val, mask))
        pending = pending.copy()
        old = np.zeros(values.shape, target)
        while pending.any():
            # Several elements may name one address: each round takes one of each, in their order.
            (waiting,) = np.nonzero(pending)
            now = waiting[np.unique(addresses[waiting], return_index=True)[1]]
            everywhere = np.ones(now.shape, bool)
            loaded = interpreter._interpreter.load(addresses[now], everywhere, np.zeros(now.shape, bits), bits)
            old[now] = loaded.view(target)
            interpreter._interpreter.store(addresses[now], (old[now] + values[now]).view(bits), everywhere)
            pending[now] = False
        return handle(old.reshape(shape), val.dtype.scalar)

    @replace(interpreter.ReduceOps, "sum")
    def total(original: Any, self: Any, input: Any) -> Any:
        data = input.handle.data
        if data.dtype not in stored:
            return original(self, input)
        return self.to_tensor(np.sum(widened(data), axis=self.axis, keepdims=self.keep_dims), input.dtype)

    for name, accumulate in {"cumsum": np.cumsum, "cumprod": np.cumprod}.items():

        @replace(interpreter.ScanOps, name)
        def running(original: Any, self: Any, input: Any, accumulate: Any = accumulate) -> Any:
            data = input.handle.data
            if data.dtype not in stored:
                return original(self, input)
            return [self.to_tensor(accumulate(widened(data), axis=self.axis), input.dtype)]


def _remembered(numpy_dtype: Callable[[Any], Any], tl: Any) -> Callable[[Any], Any]:
    """The same function without the table that it builds anew in each call, a tenth of an interpreted kernel's time."""
    known: dict[str, Any] = {}

    def of(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if isinstance(scalar, tl.pointer_type):
            return numpy_dtype(scalar)
        found = known.get(scalar.name)
        if found is None:
            found = known[scalar.name] = numpy_dtype(scalar)
        return found

    return of


def _bound(function: Callable[..., Any], original: Any) -> Callable[..., Any]:
    # A plain function and not a partial, so that in a class it becomes a method.
    return lambda *operands, **named: function(original, *operands, **named)
