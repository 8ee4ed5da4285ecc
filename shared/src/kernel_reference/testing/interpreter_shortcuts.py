"""What Triton's interpreter works out again for each operation, remembered: two thirds of a small kernel's time.

An operation on a tile of 16 x 16 takes numpy microseconds, and Triton's front end ten times as much: which type a sum
has, whether the shapes agree, what a block of this type and shape is called. The answers are Triton's own. A Triton
that is built otherwise is left as it is, only slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kernel_reference.testing.interpreter_operators import quick_operators


def take_shortcuts(interpreter: Any) -> None:
    """Install them, where their results are those of the functions that they replace."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    core = tl.core
    _share_shapes(core)
    _name_blocks_once(core)
    _compare_by_name(core)
    _check_operands_once(core, TritonSemantic)
    _broadcast_what_differs(core, TritonSemantic)
    _make_handles(core, interpreter)
    _call_builtins_directly(core, interpreter, TritonSemantic)


def _share_shapes(core: Any) -> None:
    """Tensors of one shape share what says so: a seventh of the time."""
    # They are told apart by identity, also by a second import of these modules, as in a fork for a planted fault.
    known: dict[tuple[int, ...], tuple[Any, Any]] = getattr(core.tensor.__init__, "shapes", {})

    def create(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in known:
            known[sizes] = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[sizes]

    for type in (core.float32, core.block_type(core.int32, [4, 8])):
        wanted, made = core.tensor(None, type), core.tensor.__new__(core.tensor)
        create(made, None, type)
        if _shown(wanted) != _shown(made):
            return
    create.shapes = known  # type: ignore[attr-defined]
    core.tensor.__init__ = create


def _name_blocks_once(core: Any) -> None:
    """Types of blocks: checked and named once for each type of their elements and shape; a tenth of the time."""
    original = core.block_type.__init__
    known: dict[tuple[str, tuple[Any, ...]], tuple[Any, int, str]] = {}

    def create(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape) if isinstance(shape, (list, core.tuple)) else (None,)
        if not all(type(size) is int for size in sizes):
            original(self, element_ty, shape)
            return
        key = element_ty.name, sizes
        if key not in known:
            original(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known[key]

    for element in (core.float32, core.pointer_type(core.int8)):
        wanted, *made = core.block_type(element, [4, 8]), *(core.block_type.__new__(core.block_type) for _ in range(2))
        for one in made:
            create(one, element, [4, 8])
            if _shown(wanted) != _shown(one):
                return
    core.block_type.__init__ = create


def _compare_by_name(core: Any) -> None:
    """Types are mostly compared with themselves, after a search for constants among them: a twentieth of the time."""
    original = core.dtype.__eq__
    integers = frozenset((*core.dtype.SINT_TYPES, *core.dtype.UINT_TYPES))

    def equal(self: Any, other: Any) -> bool:
        if self is other:
            return True
        return bool(self.name == other.name) if type(other) is core.dtype else bool(original(self, other))

    core.dtype.__eq__ = equal
    core.dtype.is_int = lambda self: self.name in integers


def _check_operands_once(core: Any, semantic: Any) -> None:
    """Operands of one type, and numbers beside a type that holds them, need no promotion: a fifth of the time."""
    original = semantic.binary_op_type_checking_impl
    tensor = core.tensor

    def check(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        of_lhs = lhs.dtype if type(lhs) is tensor else None
        of_rhs = rhs.dtype if type(rhs) is tensor else None
        if of_lhs is not None and of_rhs is not None:
            if of_lhs.is_ptr():
                if allow_lhs_ptr and of_rhs.is_int():
                    return self.broadcast_impl_value(lhs, rhs)
            elif of_lhs.name == of_rhs.name and (not div_or_mod or of_lhs.is_int()):
                return self.broadcast_impl_value(lhs, rhs)
        elif arithmetic_check and of_lhs is not None and _holds(of_lhs, rhs) and (not div_or_mod or of_lhs.is_int()):
            return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, dtype=of_lhs))
        elif arithmetic_check and of_rhs is not None and _holds(of_rhs, lhs) and (not div_or_mod or of_rhs.is_int()):
            return self.broadcast_impl_value(self.scalar_constant(lhs, dtype=of_rhs), rhs)
        return original(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    semantic.binary_op_type_checking_impl = check


def _holds(dtype: Any, number: Any) -> bool:
    """Whether a number beside a tensor of this type becomes one of this type."""
    if type(number) is int:
        if dtype.is_int_signed():
            return bool(-(1 << (dtype.int_bitwidth - 1)) <= number < 1 << (dtype.int_bitwidth - 1))
        return -(2**63) <= number < 2**63 and bool(dtype.is_floating())
    return type(number) is float and bool(dtype.is_floating())


def _broadcast_what_differs(core: Any, semantic: Any) -> None:
    """Tensors of one shape are broadcast already, and a number is told from a tile at once: a tenth of the time."""
    original = semantic.broadcast_impl_value

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if lhs.type.is_block() and not rhs.type.is_block():
            kind = core.block_type(rhs.dtype, lhs.type.shape)
            return lhs, self.tensor(self.builder.create_splat(kind, rhs.handle), kind)
        if rhs.type.is_block() and not lhs.type.is_block():
            kind = core.block_type(lhs.dtype, rhs.type.shape)
            return self.tensor(self.builder.create_splat(kind, lhs.handle), kind), rhs
        return original(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast


def _make_handles(core: Any, interpreter: Any) -> None:
    """What holds a value is made and checked in one function: a twentieth of the time."""
    import numpy as np

    handle = interpreter.TensorHandle
    check = handle.__post_init__

    def create(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        size = data.itemsize
        if size > 1 and not (type(dtype) is core.dtype and 8 * size <= dtype.primitive_bitwidth):
            check(self)

    wanted, made = handle(np.zeros(1, np.int32), core.int32), handle.__new__(handle)
    create(made, wanted.data, core.int32)
    if _shown(wanted) == _shown(made):
        handle.__init__ = create


def _call_builtins_directly(core: Any, interpreter: Any, semantic: Any) -> None:
    """Functions of the language are called through one in place of three, operators through none of Triton's."""
    made: dict[int, Any] = {}
    quick = quick_operators(core, interpreter)
    of_triton = {name: vars(core.tensor if name in vars(core.tensor) else core)[name] for name in quick}

    def patch(owner: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
        given = getattr(interpreter, "interpreter_semantic", None) or made.setdefault(id(builder), semantic(builder))
        call = getattr(member, "__wrapped__", member)

        def interpreted(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = given
            return call(*arguments, **named)

        as_given = member is of_triton.get(name)
        scope.set_attr(owner, name, quick[name](interpreted) if as_given else interpreted)

    interpreter._patch_attr = patch


def _shown(value: Any) -> dict[str, str]:
    return {name: repr(part) for name, part in vars(value).items()}
