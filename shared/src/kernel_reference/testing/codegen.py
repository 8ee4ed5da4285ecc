"""Compile Triton kernels for GPUs that are not here, and read what the compiler made of them.

::

    matmul = KernelSpec(
        "my_package.kernels:matmul",
        signature={"p_a": "*bf16", "p_b": "*bf16", "p_c": "*fp32", "m": "i32", "n": "i32", "k": "i32"},
        constexprs={"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64},
        options={"num_warps": 8},
    )
    # or, where there is a launch, with all that it gives: KernelSpec.of_call(matmul, (a, b, c, m, n, k, 128, 128, 64))
    reports = compile_specs([matmul], targets=("sm_80", "sm_90"))
    assert_clean(reports)
    assert all(report.uses_tensor_cores for report in reports)

Kernels are compiled in processes of their own without TRITON_INTERPRET, so that it makes no difference whether the
caller runs them in the interpreter, and nothing is cached. A process takes some seconds to start and a kernel 0.2 to
4 s: give all kernels of a package to one call. What NVIDIA targets get is read with the tools in the triton wheel.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_reference.checks import fail
from kernel_reference.testing.ptx import overwritten_barriers
from kernel_reference.testing.sass import unwritten_reads
from kernel_reference.testing.targets import TARGETS as TARGETS
from kernel_reference.testing.targets import target_named

# Triton's names of torch's dtypes.
_TYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5", "bool": "i1", "int8": "i8", "uint8": "u8", "int16": "i16", "int32": "i32", "int64": "i64",
}  # fmt: skip
# Triton specialises integers on being 1 and on being divisible by 16.
_MULTIPLE = 16
# Bits that one thread moves, by the ending of AMD's opcodes.
_AMD_WIDTHS = {"byte": 8, "short": 16, "dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}


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


def _dtype_of(tensor: Any) -> str:
    return _TYPES[str(tensor.dtype).removeprefix("torch.")]


@dataclass(frozen=True)
class Report:
    """What the compiler made of one :class:`KernelSpec` for one target.

    registers: of a thread (AMD: VGPRs, accumulators included).
    stack: bytes of local memory of a thread.
    shared: bytes of shared memory (AMD: LDS) of a program.
    vgpr_spills, sgpr_spills: AMD alone.
    trap: whether the kernel holds an instruction that aborts it, which is what some versions of the compiler emit for
        code that they cannot compile.
    opcodes: every instruction that occurs, as the disassembler spells it: ``LDG.E.128``, ``HGMMA.64x128x16.F32.BF16``,
        ``global_load_dwordx4``.
    unwritten: where registers are read that nothing has written (sm_80 and sm_90; see :mod:`.sass`).
    overwritten: stores to where a barrier was made in shared memory (NVIDIA; see :mod:`.ptx`).
    error: the compiler's message if it failed; the figures are then 0.
    """

    spec: str
    target: str
    registers: int = 0
    stack: int = 0
    shared: int = 0
    vgpr_spills: int = 0
    sgpr_spills: int = 0
    trap: bool = False
    opcodes: frozenset[str] = frozenset()
    unwritten: tuple[str, ...] = ()
    overwritten: tuple[str, ...] = ()
    error: str = ""

    @property
    def spills(self) -> bool:
        """Whether registers are kept in memory for lack of room."""
        return bool(self.stack or self.vgpr_spills or self.sgpr_spills or self.uses("LDL") or self.uses("STL"))

    @property
    def uses_tensor_cores(self) -> bool:
        """Whether there is a matrix instruction, of the target's newest kind (sm_90: wgmma; sm_100: tcgen05)."""
        pattern = re.compile(target_named(self.target).matrix)
        return any(pattern.fullmatch(opcode.partition(".")[0]) for opcode in self.opcodes)

    def uses(self, opcode: str) -> bool:
        """Whether an instruction occurs, with any suffix: ``LDG`` and ``LDG.E`` both find ``LDG.E.128``."""
        return any(f"{seen}.".startswith(f"{opcode}.") for seen in self.opcodes)

    @property
    def load_bits(self) -> frozenset[int]:
        """The widths, in bits of one thread, of the loads from global memory (TMA not among them)."""
        return self._widths("LDG", "LDGSTS", amd="load")

    @property
    def store_bits(self) -> frozenset[int]:
        """The widths, in bits of one thread, of the stores to global memory (TMA not among them)."""
        return self._widths("STG", amd="store")

    def _widths(self, *nvidia: str, amd: str) -> frozenset[int]:
        found = set()
        for opcode in self.opcodes:
            name, *suffixes = opcode.split(".")
            if name in nvidia:
                sizes = [int(size) for s in suffixes for size in re.findall(r"^[US]?(8|16|64|128|256)$", s)]
                found.add(sizes[-1] if sizes else 32)
            elif match := re.match(rf"(?:global|buffer|flat)_{amd}_(?:lds_)?[us]?(byte|short|dword(?:x\d)?)", opcode):
                found.add(_AMD_WIDTHS[match[1]])
        return frozenset(found)

    def problems(self) -> list[str]:
        """What no kernel should have: an error, more shared memory than there is, spilled registers, a trap and the
        like. One sentence each."""
        if self.error:
            return [f"does not compile: {self.error}"]
        found = []
        limit = target_named(self.target).shared_memory
        if self.shared > limit:
            found.append(f"takes {self.shared} bytes of shared memory, of which {self.target} has {limit}")
        if self.vgpr_spills or self.sgpr_spills:
            found.append(f"spills {self.vgpr_spills} vector and {self.sgpr_spills} scalar registers")
        elif self.spills:
            found.append(f"spills registers: {self.stack} bytes of stack a thread")
        if self.trap:
            found.append("holds a trap instruction")
        if self.unwritten:
            found.append(f"reads what nothing wrote, in {len(self.unwritten)} places: {self.unwritten[0]}")
        if self.overwritten:
            found.append(f"stores to the place of a barrier, {len(self.overwritten)} times: {self.overwritten[0]}")
        return found


def compile_specs(
    specs: Iterable[KernelSpec], targets: Iterable[str] = TARGETS, *, processes: int = 2, timeout_s: float = 600
) -> list[Report]:
    """Compile every spec for every target (:data:`.targets.KNOWN`) and report on each, in that order.

    The work is shared by ``processes`` processes. A kernel that does not compile is a report with an ``error``;
    RuntimeError is raised if a process dies or takes longer than ``timeout_s`` seconds. No GPU is needed, nor used.
    """
    wanted = list(targets)
    for name in wanted:
        target_named(name)
    if processes < 1:
        fail("processes", ">= 1", processes)
    jobs = [(spec, name) for spec in specs for name in wanted]
    shares = [jobs[first::processes] for first in range(min(processes, len(jobs)))]
    reports: list[Report | None] = [None] * len(jobs)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kernel_reference_")))
        started = [_start(share, folder / str(number), stack) for number, share in enumerate(shares)]
        for first, (process, place) in enumerate(started):
            reports[first::processes] = _finish(process, place, timeout_s)
    return [report for report in reports if report is not None]


def assert_clean(reports: Sequence[Report], *, most_stack: int = 0) -> None:
    """Raise AssertionError, with a table, if any report has problems, or if there is no report at all.

    most_stack: bytes a thread that a kernel may spill, as on a GPU for which no plan was tuned; a warning then.
    """
    if not reports:
        raise AssertionError("no kernel was compiled: the list of reports is empty")
    let_pass = [report for report in reports if report.spills and 0 < report.stack <= most_stack]
    if let_pass:
        warnings.warn(f"{len(let_pass)} of {len(reports)} compiled kernels spill:\n{table(let_pass)}", stacklevel=2)
    broken = [
        report for report in reports
        if [problem for problem in report.problems() if report not in let_pass or not problem.startswith("spills ")]
    ]  # fmt: skip
    if broken:
        raise AssertionError(f"{len(broken)} of {len(reports)} compiled kernels have problems:\n{table(broken)}")


def table(reports: Iterable[Report]) -> str:
    """The reports as lines of text, one each, under a heading."""
    rows: list[tuple[str, ...]] = [("kernel", "target", "registers", "stack", "shared", "problems")]
    for report in reports:
        figures = (report.registers, report.stack, report.shared)
        problems = textwrap.shorten("; ".join(report.problems()), 300) or "none"
        rows.append((report.spec, report.target, *map(str, figures), problems))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


# The child finds modules where its parent does, be it a source tree, a wheel or a folder that a test put on sys.path.
_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from kernel_reference.testing.codegen import _serve
_serve(sys.argv[2])
"""


def _start(jobs: list[tuple[KernelSpec, str]], place: Path, stack: ExitStack) -> tuple[subprocess.Popen[bytes], Path]:
    place.mkdir()
    (place / "jobs").write_bytes(pickle.dumps(jobs))
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(place / "cache"), "TRITON_ALWAYS_COMPILE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", _CHILD, json.dumps(sys.path), str(place)],
        env=environment,
        stdout=stack.enter_context((place / "log").open("wb")),
        stderr=subprocess.STDOUT,
        # A kernel's file may lie in a folder whose modules must not shadow installed ones.
        cwd=place,
    )
    stack.callback(process.kill)
    return process, place


def _finish(process: subprocess.Popen[bytes], place: Path, timeout_s: float) -> list[Report]:
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"compiling took longer than {timeout_s} s\n{_tail(place)}") from None
    if code != 0:
        raise RuntimeError(f"the compiling process ended with code {code}\n{_tail(place)}")
    reports: list[Report] = pickle.loads((place / "reports").read_bytes())
    return reports


def _tail(place: Path) -> str:
    return (place / "log").read_text(errors="replace")[-4000:]


def _serve(place: str) -> None:
    """Run in the child: compile the jobs of this folder and leave the reports there."""
    jobs: list[tuple[KernelSpec, str]] = pickle.loads((Path(place) / "jobs").read_bytes())
    (Path(place) / "reports").write_bytes(pickle.dumps([_compile(spec, target) for spec, target in jobs]))


def _compile(spec: KernelSpec, target: str) -> Report:
    try:
        kernel = _compiled(spec, target)
    except Exception as error:
        print(f"{spec.name} for {target}: {error!r}", flush=True)
        # The outermost error says where in the kernel, its causes say what.
        reasons = dict.fromkeys(f"{type(reason).__name__}: {reason}".strip() for reason in _causes(error))
        return Report(spec.name, target, error="\n".join(reasons))
    if target.startswith("sm_"):
        return _read_nvidia(spec.name, target, kernel)
    return _read_amd(spec.name, target, kernel)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _compiled(spec: KernelSpec, target: str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = _load(spec.kernel)
    names = function.arg_names
    paths = {name: _path(name, names) for name in (*spec.signature, *spec.constexprs)}
    if unknown := [name for name, path in paths.items() if path is None]:
        fail("signature", f"of arguments of {spec.kernel}", f"{unknown} besides")
    types: dict[tuple[int, ...], str] = {paths[name]: kind for name, kind in spec.signature.items()}
    types |= {paths[name]: "constexpr" for name in spec.constexprs}
    given = {path[0] for path in types}
    if missing := [name for place, name in enumerate(names) if place not in given]:
        fail("signature", f"complete for {spec.kernel}", f"nothing for {missing}")
    pointers = [name for name, kind in spec.signature.items() if kind.startswith("*")]
    aligned = pointers if spec.aligned is None else spec.aligned
    groups = {_path(name, names): group for name, group in spec.groups.items()}
    make_source: Any = ASTSource
    if getattr(function, "is_gluon", bool)():
        from triton.experimental.gluon._runtime import GluonASTSource

        make_source = GluonASTSource
    source = make_source(
        fn=function,
        signature={name: _type_of((place,), types, groups) for place, name in enumerate(names)},
        constexprs={paths[name]: value for name, value in spec.constexprs.items()},
        attrs={paths[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    family, _, arch = target.rpartition("_")
    gpu = GPUTarget("cuda", int(arch), 32) if family == "sm" else GPUTarget("hip", target, 64)
    return triton.compile(source, target=gpu, options=dict(spec.options))


def _path(name: str, names: Sequence[str]) -> Any:
    """Where an argument, or ``name[i][j]`` within one that is a tuple, stands among a kernel's; None if it has none."""
    argument, elements = re.fullmatch(r"(\w+)((?:\[\d+\])*)", name).groups()  # type: ignore[union-attr]
    if argument not in names:
        return None
    return (names.index(argument), *map(int, re.findall(r"\d+", elements)))


def _type_of(path: tuple[int, ...], types: Mapping[tuple[int, ...], str], groups: Mapping[Any, type]) -> Any:
    """The type of the argument or element at this path, or the tuple of its elements' types."""
    if path in types:
        return types[path]
    depth = len(path) + 1
    elements = [_type_of(one, types, groups) for one in sorted({p[:depth] for p in types if p[: depth - 1] == path})]
    return groups[path](*elements) if path in groups else tuple(elements)


def _load(kernel: str) -> Any:
    place, _, name = kernel.rpartition(":")
    if place.endswith(".py"):
        loader = importlib.util.spec_from_file_location(Path(place).stem, place)
        if loader is None or loader.loader is None:
            fail("kernel", "a Python file's", repr(kernel))
        module = importlib.util.module_from_spec(loader)
        sys.modules[loader.name] = module
        loader.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = getattr(module, name)
    # Decorators such as heuristics wrap the function that is compiled.
    while not hasattr(function, "arg_names"):
        function = function.fn
    return function


def _read_nvidia(name: str, target: str, kernel: Any) -> Report:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.check_output([tools / "cuobjdump", "-res-usage", file.name], text=True)
        sass = subprocess.check_output([tools / "nvdisasm", "-c", file.name], text=True)
    figures = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return Report(
        name,
        target,
        registers=figures["REG"],
        stack=figures["STACK"] + figures["LOCAL"],
        shared=kernel.metadata.shared,
        trap=re.search(r"^\s*(@\S+\s+)?trap;", kernel.asm["ptx"], re.MULTILINE) is not None,
        unwritten=tuple(unwritten_reads(sass)) if target in ("sm_80", "sm_90") else (),
        overwritten=tuple(overwritten_barriers(kernel.asm["ptx"])),
        opcodes=frozenset(re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", sass, re.MULTILINE)),
    )


def _read_amd(name: str, target: str, kernel: Any) -> Report:
    assembly: str = kernel.asm["amdgcn"]
    figures = {key: int(value) for key, value in re.findall(r"^\s*\.(\w+):\s+(\d+)\s*$", assembly, re.MULTILINE)}
    opcodes = frozenset(re.findall(r"^\s+([sv]_\w+|(?:global|buffer|flat|ds|scratch)_\w+)", assembly, re.MULTILINE))
    return Report(
        name,
        target,
        registers=figures["vgpr_count"],
        stack=figures["private_segment_fixed_size"],
        shared=kernel.metadata.shared,
        vgpr_spills=figures["vgpr_spill_count"],
        sgpr_spills=figures["sgpr_spill_count"],
        trap="s_trap" in opcodes,
        opcodes=opcodes,
    )
