"""Which specialisations of kernels are compiled: what a launch would make Triton compile, said without a GPU.

:mod:`.codegen` compiles them, and offers these names.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_reference.checks import fail
from kernel_reference.launching import Launch
from kernel_reference.together import gathered_launches

# Triton's names of torch's dtypes.
_TYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5", "bool": "i1", "int8": "i8", "uint8": "u8", "int16": "i16", "int32": "i32", "int64": "i64",
}  # fmt: skip
# Triton specialises integers on being 1 and on being divisible by 16.
_MULTIPLE = 16


@dataclass(frozen=True)
class KernelSpec:
    """One specialisation of a kernel.

    kernel: ``package.module:function``, or ``path/to/file.py:function``.
    signature: the type of each argument that is not a constexpr: ``*bf16``, ``*i64``, ``i32``, ``fp32``; in Gluon also
        ``tensordesc<bf16[64, 128],...>``. The elements of a tuple are named ``strides[0]``, ``strides[1][0]``.
    constexprs: the value of each constexpr. An argument that Triton would specialise on 1 belongs here, as ``1``.
    options: of the compiler: num_warps, num_stages, maxnreg.
    aligned: the arguments promised to be divisible by 16 (pointers: in bytes); None stands for all pointers.
    name: what reports call it; made from the function and its constexprs if left out.
    groups: the class of each argument, or element of one, that is a NamedTuple, so that the kernel finds its fields.
    """

    kernel: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    aligned: Sequence[str] | None = None
    name: str = ""
    groups: Mapping[str, type] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kernel.count(":") != 1:
            fail("kernel", "'package.module:function' or 'path/to/file.py:function'", repr(self.kernel))
        if both := set(self.signature) & set(self.constexprs):
            fail("constexprs", "disjoint from signature", f"{sorted(both)} in both")
        if unknown := set(self.aligned or ()) - set(self.signature):
            fail("aligned", "a subset of signature", f"{sorted(unknown)} besides")
        if not self.name:
            settings = {**self.constexprs, **self.options}
            shown = ", ".join(f"{key}={value}" for key, value in settings.items())
            object.__setattr__(self, "name", f"{self.kernel.rpartition(':')[2]}({shown})")

    @classmethod
    def of_call(
        cls, kernel: Any, values: Sequence[Any], *, options: Mapping[str, Any] | None = None, name: str = "",
        descriptors: Sequence[tuple[Sequence[int], Any]] = (),
    ) -> KernelSpec:  # fmt: skip
        """What Triton would compile where ``kernel`` is launched with ``values``, were their tensors on a GPU.

        kernel: a function under ``triton.jit`` or ``gluon.jit``, interpreted or not. values: all its arguments, by
        position: tensors (taken to be 16-byte aligned; their contents are not looked at), numbers, None, tuples and
        NamedTuples of these. descriptors: block and layout of each of the first arguments that reaches a Gluon kernel
        as a tensor descriptor; None among these has the dtype of the first.
        """
        parameters = list(inspect.signature(kernel.fn).parameters.items())
        if len(values) != len(parameters):
            fail("values", f"of {len(parameters)} arguments, as the kernel has", len(values))
        # The interpreter's functions keep it among their keyword arguments. Names, or places among the parameters.
        given = getattr(kernel, "kwargs", {}).get("do_not_specialize")
        listed = getattr(kernel, "do_not_specialize", None) or given or ()
        as_they_come = {parameters[one][0] if isinstance(one, int) else one for one in listed}
        signature: dict[str, str] = {}
        constexprs: dict[str, Any] = {}
        aligned = []

        groups: dict[str, type] = {}

        def give(argument: str, value: Any, constant: bool, specialized: bool) -> None:
            if value is None or constant:
                constexprs[argument] = value
            elif isinstance(value, tuple):
                if hasattr(value, "_fields"):
                    groups[argument] = type(value)
                for place, element in enumerate(value):
                    # Triton 3.6 and 3.7 specialise on elements of tuples whatever do_not_specialize says.
                    give(f"{argument}[{place}]", element, False, True)
            elif hasattr(value, "data_ptr"):
                signature[argument] = f"*{_dtype_of(value)}"
                aligned.append(argument)
            elif isinstance(value, float):
                signature[argument] = "fp32"
            elif value == 1 and specialized:
                constexprs[argument] = 1
            else:
                signature[argument] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % _MULTIPLE == 0 and specialized:
                    aligned.append(argument)

        for i, ((argument, parameter), value) in enumerate(zip(parameters, values, strict=True)):
            if i < len(descriptors):
                block, layout = descriptors[i]
                kind = _dtype_of(values[0] if value is None else value)
                signature[argument] = f"tensordesc<{kind}[{','.join(map(str, block))}],{layout!r}>"
            else:
                give(argument, value, "constexpr" in str(parameter.annotation), argument not in as_they_come)
        place = f"{kernel.fn.__module__}:{kernel.fn.__name__}"
        return cls(place, signature, constexprs, dict(options or {}), aligned, name, groups)

    @classmethod
    def of_launch(cls, start: Launch, tensors: Sequence[Any], *, name: str = "") -> KernelSpec:
        """What a :class:`~kernel_reference.launching.Launch` compiles when it is called with these tensors."""
        boxes = [box[2:] for box in start.boxes]
        values = start.arguments(*tensors)
        return cls.of_call(start.kernel, values, options=start.options, name=name, descriptors=boxes)


def _dtype_of(tensor: Any) -> str:
    return _TYPES[str(tensor.dtype).removeprefix("torch.")]


@dataclass(frozen=True)
class GeneratedSource:
    """A kernel that another compiler than Triton makes, as the source that it generates: TileLang's CUDA, say.

    name: what reports call it. make: returns the source; what it takes is only waited for where it is wanted.
    """

    name: str
    make: Callable[[], str]


def recorded_launches(run: Callable[..., Any], *tensors: Any) -> list[tuple[Launch, tuple[Any, ...]]]:
    """The launches that ``run(*tensors)`` would make, each with its tensors; none is started.

    >>> run = launch.prepare_attend(problem, plan, tensors)
    >>> specs = [KernelSpec.of_launch(*call) for call in recorded_launches(run, *tensors)]
    """
    return gathered_launches(run, *tensors)


def launched_kernels(package: Any) -> set[str]:
    """``package.kernels:function`` of every kernel of a package that is launched from the host.

    package: the imported package; its device code is ``kernels.py`` or the files of ``kernels/``. Launched are the
    functions under a ``jit`` decorator that no other function there mentions. A test holds its specs to them::

        assert {spec.kernel for spec in specs("sm_90")} == launched_kernels(my_package)
    """
    root = Path(package.__file__).parent
    found: dict[str, str] = {}
    mentioned: set[str] = set()
    for file in [*root.glob("kernels.py"), *root.glob("kernels/**/*.py")]:
        module = ".".join([package.__name__, *file.relative_to(root).with_suffix("").parts])
        for function in ast.parse(file.read_text()).body:
            if isinstance(function, ast.FunctionDef):
                if any("jit" in ast.unparse(line) for line in function.decorator_list):
                    found[f"{module}:{function.name}"] = function.name
                mentioned |= _mentioned_in(function)
    return {place for place, name in found.items() if name not in mentioned}


def _mentioned_in(function: ast.FunctionDef) -> set[str]:
    """Names that a function takes from outside itself."""
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    own = {node.id for node in names if isinstance(node.ctx, ast.Store)} | {function.name}
    own |= {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    attributes = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
    return {node.id for node in names} - own | (attributes - own)
