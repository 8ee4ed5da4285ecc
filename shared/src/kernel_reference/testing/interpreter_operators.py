"""Operators of interpreted tensors without Triton's front end: one call of numpy where it makes some twenty of Python.

For numbers that numpy has itself, where no operand is promoted; anything else is Triton's to decide, as are all errors.
Broadcasting is numpy's, whose rule for tensors of as many dimensions, and for scalars, is Triton's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Call = Callable[..., Any]


def quick_operators(core: Any, interpreter: Any) -> dict[str, Callable[[Call], Call]]:
    """By the name of a member of ``tl.tensor``, or of the language: what makes the quick function, given Triton's."""
    import numpy as np

    tensor, constexpr, handle_of = core.tensor, core.constexpr, interpreter.TensorHandle
    kinds: dict[str, Any] = {
        "int32": np.dtype(np.int32), "int64": np.dtype(np.int64),
        "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32), "fp64": np.dtype(np.float64),
    }  # fmt: skip
    limits = {"int32": 2**31, "int64": 2**63}
    truth = np.dtype(np.bool_)
    scalars = core.tensor(None, core.int32).shape
    known: dict[tuple[str, tuple[int, ...]], Any] = {}

    def typed(dtype: Any, shape: tuple[int, ...]) -> Any:
        """A tensor without a value of this type."""
        key = dtype.name, shape
        if key not in known:
            known[key] = tensor(None, core.block_type(dtype, list(shape)))
        return known[key]

    def make(like: Any, data: Any, dtype: Any) -> Any:
        made, handle = tensor.__new__(tensor), handle_of.__new__(handle_of)
        handle.data, handle.dtype, handle.attr = data, dtype, {}
        made.handle, made.type, made.dtype, made.shape, made.numel = (
            handle, like.type, like.dtype, like.shape, like.numel,
        )  # fmt: skip
        return made

    scalar_of = {dtype.name: tensor(None, dtype) for dtype in (core.int1, *map(core.dtype, kinds))}

    def shaped(dtype: Any, data: Any, *operands: Any) -> Any:
        """What is typed as a result of these operands is; None if Triton must look at their shapes."""
        rank = 0
        for operand in operands:
            if type(operand) is tensor and operand.shape is not scalars:
                own = len(operand.type.shape)
                if rank not in (0, own):
                    return None
                rank = own
        if not rank:
            return scalar_of[dtype.name]
        return typed(dtype, data.shape) if data.ndim == rank else None

    def value(other: Any, kind: str) -> Any:
        """The operand as numpy takes it beside a tensor of this kind; None if Triton would promote one of them."""
        if type(other) is tensor:
            return other.handle.data if other.dtype.name == kind else None
        if type(other) is int:
            most: float = limits.get(kind, 2**63)
        elif type(other) is float and kind not in limits:
            most = np.inf
        else:
            return None
        # Zero has no sign in Triton's constants.
        return kinds[kind].type(other or 0) if -most <= other < most or most == np.inf else None

    def arithmetic(operate: Call, reflected: bool = False, among: Any = kinds) -> Callable[[Call], Call]:
        def wrap(call: Call) -> Call:
            def quick(self: Any, other: Any) -> Any:
                kind = self.dtype.name
                if kind in among:
                    if type(other) is constexpr:
                        other = other.value
                    beside = value(other, kind)
                    if beside is not None:
                        own = self.handle.data
                        data = operate(beside, own) if reflected else operate(own, beside)
                        if data.dtype is kinds[kind]:
                            if type(other) is not tensor or other.shape is self.shape or other.shape is scalars:
                                return make(self, data, self.dtype)
                            like = shaped(self.dtype, data, self, other)
                            if like is not None:
                                return make(like, data, self.dtype)
                    elif kind in limits and type(other) is tensor and other.dtype.name in limits:
                        # Of 32 and of 64 bits.
                        own, beside = self.handle.data, other.handle.data
                        data = operate(beside, own) if reflected else operate(own, beside)
                        like = shaped(core.int64, data, self, other)
                        if like is not None and data.dtype is kinds["int64"]:
                            return make(like, data, core.int64)
                return call(self, other)

            return quick

        return wrap

    def addition(call: Call) -> Call:
        of_numbers = arithmetic(np.add)(call)

        def quick(self: Any, other: Any) -> Any:
            if type(self.dtype) is not core.pointer_type or type(other) is not tensor or other.dtype.name not in limits:
                return of_numbers(self, other)
            size = max(1, self.dtype.element_ty.primitive_bitwidth // 8)
            data = self.handle.data + size * other.handle.data.astype(np.uint64)
            if other.shape is self.shape or other.shape is scalars:
                return make(self, data, self.handle.dtype)
            if self.shape is scalars or len(self.type.shape) == len(other.type.shape) == data.ndim:
                like = tensor(None, core.block_type(self.dtype, list(data.shape)))
                return make(like, data, self.handle.dtype.scalar)
            return call(self, other)

        return quick

    def comparison(operate: Call) -> Callable[[Call], Call]:
        def wrap(call: Call) -> Call:
            def quick(self: Any, other: Any) -> Any:
                kind = self.dtype.name
                if kind in kinds:
                    if type(other) is constexpr:
                        other = other.value
                    # Beside a comparison a number is a tensor of 32 bits, which float16 would be promoted to.
                    alone = type(other) is not tensor
                    if not alone or (kind != "fp16" and _is_of_32_bits(other)):
                        beside = value(other, kind)
                        if beside is not None:
                            data = operate(self.handle.data, beside)
                            like = shaped(core.int1, data, self, other)
                            if like is not None and data.dtype is truth:
                                return make(like, data, self.dtype)
                return call(self, other)

            return quick

        return wrap

    def logic(operate: Call) -> Callable[[Call], Call]:
        def wrap(call: Call) -> Call:
            def quick(self: Any, other: Any) -> Any:
                if type(other) is tensor and self.dtype.name == other.dtype.name == "int1":
                    own, beside = self.handle.data, other.handle.data
                    if own.dtype is truth and beside.dtype is truth:
                        data = operate(own, beside)
                        like = shaped(core.int1, data, self, other)
                        if like is not None:
                            return make(like, data, self.handle.dtype.scalar)
                return call(self, other)

            return quick

        return wrap

    def extreme(of_integers: Call, of_floats: Call) -> Callable[[Call], Call]:
        def wrap(call: Call) -> Call:
            def quick(*arguments: Any, **named: Any) -> Any:
                if len(arguments) == 2 and not named:
                    x, y = (one.value if type(one) is constexpr else one for one in arguments)
                    one, other = (x, y) if type(x) is tensor else (y, x)
                    kind = one.dtype.name if type(one) is tensor else ""
                    if kind in kinds and (type(other) is tensor or (kind != "fp16" and _is_of_32_bits(other))):
                        left, right = value(x, kind), value(y, kind)
                        if left is not None and right is not None:
                            data = (of_integers if kind in limits else of_floats)(left, right)
                            like = shaped(one.dtype, data, x, y)
                            if like is not None and data.dtype is kinds[kind]:
                                return make(like, data, one.dtype)
                return call(*arguments, **named)

            return quick

        return wrap

    def choice(call: Call) -> Call:
        def quick(*arguments: Any, **named: Any) -> Any:
            if len(arguments) == 3 and not named:
                condition, x, y = (one.value if type(one) is constexpr else one for one in arguments)
                one = x if type(x) is tensor else y
                if type(one) is tensor and type(condition) is tensor and condition.dtype.name == "int1":
                    kind, where = one.dtype.name, condition.handle.data
                    if kind in kinds and where.dtype is truth:
                        left, right = value(x, kind), value(y, kind)
                        if left is not None and right is not None:
                            data = np.where(where, left, right)
                            like = shaped(one.dtype, data, condition, x, y)
                            if like is not None and data.dtype is kinds[kind]:
                                return make(like, data, one.dtype)
            return call(*arguments, **named)

        return quick

    def conversion(call: Call) -> Call:
        def quick(*arguments: Any, **named: Any) -> Any:
            if len(arguments) == 2 and not named:
                self, wanted = arguments
                if type(wanted) is core.dtype and wanted.name in kinds:
                    kind, own = self.dtype.name, self.handle.data
                    if kind != wanted.name and own.dtype is (truth if kind == "int1" else kinds.get(kind)):
                        like = scalar_of[wanted.name] if self.shape is scalars else typed(wanted, own.shape)
                        return make(like, own.astype(kinds[wanted.name]), wanted)
            return call(*arguments, **named)

        return quick

    def indexing(call: Call) -> Call:
        def quick(self: Any, places: Any) -> Any:
            if type(places) is tuple and self.shape is not scalars and self.dtype.name in scalar_of:
                kept = [place for place in places if place is not None]
                if len(kept) == len(self.type.shape) and all(place == slice(None) for place in kept):
                    data = self.handle.data[places]
                    return make(typed(self.dtype, data.shape), data, self.handle.dtype.scalar)
            return call(self, places)

        return quick

    def divided(numerator: Any, denominator: Any) -> Any:
        return (numerator - np.fmod(numerator, denominator)) // denominator

    return {
        "__add__": addition, "__radd__": arithmetic(np.add, reflected=True),
        "__sub__": arithmetic(np.subtract), "__rsub__": arithmetic(np.subtract, reflected=True),
        "__mul__": arithmetic(np.multiply), "__rmul__": arithmetic(np.multiply, reflected=True),
        "__floordiv__": arithmetic(divided, among=limits), "__mod__": arithmetic(np.fmod, among=limits),
        "__lt__": comparison(np.less), "__le__": comparison(np.less_equal), "__gt__": comparison(np.greater),
        "__ge__": comparison(np.greater_equal), "__eq__": comparison(np.equal), "__ne__": comparison(np.not_equal),
        "__and__": logic(np.bitwise_and), "__or__": logic(np.bitwise_or),
        "__getitem__": indexing, "to": conversion, "where": choice,
        "maximum": extreme(np.maximum, np.fmax), "minimum": extreme(np.minimum, np.fmin),
    }  # fmt: skip


def _is_of_32_bits(number: Any) -> bool:
    """Whether a constant of this value is of 32 bits, without a denormal."""
    if type(number) is int:
        return -(2**31) <= number < 2**31
    return type(number) is float and (number == 0 or 2**-126 <= abs(number) < 2**127 or abs(number) == float("inf"))
