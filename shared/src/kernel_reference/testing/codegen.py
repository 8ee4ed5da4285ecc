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
caller runs them in the interpreter, and nothing is cached. The first call takes some seconds to start a process that
the others are forks of, a kernel 0.2 to 4 s. What NVIDIA targets get is read with the tools in the triton wheel.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kernel_reference.checks import fail
from kernel_reference.testing.disassembly import disassembled
from kernel_reference.testing.forks import Fork
from kernel_reference.testing.ptx import overwritten_barriers
from kernel_reference.testing.reports import Report as Report
from kernel_reference.testing.reports import assert_clean as assert_clean
from kernel_reference.testing.reports import table as table
from kernel_reference.testing.sass import spills_in_loops, unwritten_reads
from kernel_reference.testing.specs import GeneratedSource as GeneratedSource
from kernel_reference.testing.specs import KernelSpec as KernelSpec
from kernel_reference.testing.specs import launched_kernels as launched_kernels
from kernel_reference.testing.specs import recorded_launches as recorded_launches
from kernel_reference.testing.targets import TARGETS as TARGETS
from kernel_reference.testing.targets import target_named
from kernel_reference.testing.texts import plain_amdgcn, plain_ptx, plain_sass


def compile_specs(
    specs: Iterable[KernelSpec], targets: Iterable[str] = TARGETS, *, processes: int = 2, timeout_s: float = 600,
    keep_code: bool = False,
) -> list[Report]:  # fmt: skip
    """Compile every spec for every target (:data:`.targets.KNOWN`) and report on each, in that order.

    The work is shared by ``processes`` processes. A kernel that does not compile is a report with an ``error``;
    RuntimeError is raised if a process dies or takes longer than ``timeout_s`` seconds. No GPU is needed, nor used.
    keep_code: whether reports hold what the compiler wrote.
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
        started = [_start(share, folder / str(number), stack, keep_code) for number, share in enumerate(shares)]
        for first, (process, place) in enumerate(started):
            reports[first::processes] = _finish(process, place, timeout_s)
    return [report for report in reports if report is not None]


def compile_by_target(
    specs: Callable[[str], Iterable[KernelSpec]], targets: Iterable[str] = TARGETS, *, processes: int = 2,
    keep_code: bool = False,
) -> list[Report]:  # fmt: skip
    """Compile for each target what ``specs(target)`` yields: plans, and so specs, differ from target to target.

    A process for each target, so many of them at a time, the longest first. Otherwise as :func:`compile_specs`.
    """
    jobs = {target: list(specs(target)) for target in targets}
    order = sorted(jobs, key=lambda target: len(jobs[target]), reverse=True)

    def compile_one(target: str) -> list[Report]:
        return compile_specs(jobs[target], [target], processes=1, keep_code=keep_code)

    with ThreadPoolExecutor(processes) as pool:
        return [report for reports in pool.map(compile_one, order) for report in reports]


def _start(jobs: list[tuple[KernelSpec, str]], place: Path, stack: ExitStack, keep_code: bool) -> tuple[Fork, Path]:
    place.mkdir()
    (place / "jobs").write_bytes(pickle.dumps((jobs, keep_code)))
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(place / "cache"), "TRITON_ALWAYS_COMPILE": "1"}
    # In a folder of its own: a kernel's file may lie in one whose modules must not shadow installed ones.
    process = Fork(f"{_serve.__module__}:{_serve.__name__}", place, environment, triton=True)
    stack.callback(process.end)
    return process, place


def _finish(process: Fork, place: Path, timeout_s: float) -> list[Report]:
    code = process.wait(timeout_s)
    if code is None:
        raise RuntimeError(f"compiling took longer than {timeout_s} s\n{_tail(place)}")
    if code != 0:
        raise RuntimeError(f"the compiling process ended with code {code}\n{_tail(place)}")
    reports: list[Report] = pickle.loads((place / "reports").read_bytes())
    return reports


def _tail(place: Path) -> str:
    return (place / "log").read_text(errors="replace")[-4000:]


def _serve(place: str) -> None:
    """Run in the child: compile the jobs of this folder and leave the reports there."""
    jobs, keep_code = pickle.loads((Path(place) / "jobs").read_bytes())
    # Which no report is read from; with it LLVM and ptxas take 5 % longer.
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    compiled = [_compile(spec, target) for spec, target in jobs]
    sass = {} if keep_code else _disassembled(compiled, [target for _, target in jobs])
    reports = []
    for number, ((spec, target), kernel) in enumerate(zip(jobs, compiled, strict=True)):
        if isinstance(kernel, Report):
            reports.append(kernel)
        elif target.startswith("sm_"):
            reports.append(_read_nvidia(spec.name, target, kernel, sass.get(number)))
        else:
            reports.append(_read_amd(spec.name, target, kernel, keep_code))
    (Path(place) / "reports").write_bytes(pickle.dumps(reports))


def _compile(spec: KernelSpec, target: str) -> Any:
    """Triton's kernel, or a report of why there is none."""
    try:
        return _compiled(spec, target)
    except Exception as error:
        print(f"{spec.name} for {target}: {error!r}", flush=True)
        # The outermost error says where in the kernel, its causes say what.
        reasons = dict.fromkeys(f"{type(reason).__name__}: {reason}".strip() for reason in _causes(error))
        return Report(spec.name, target, error="\n".join(reasons))


def _disassembled(compiled: Sequence[Any], targets: Sequence[str]) -> dict[int, str]:
    """The SASS of NVIDIA's among these, by their places."""
    found: dict[int, str] = {}
    for target in dict.fromkeys(targets):
        places = [i for i, kernel in enumerate(compiled) if targets[i] == target and not isinstance(kernel, Report)]
        if target.startswith("sm_"):
            texts = disassembled([compiled[i].asm["cubin"] for i in places], target, _tools() / "nvdisasm")
            found |= dict(zip(places, texts, strict=True))
    return found


def _tools() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


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


def _read_nvidia(name: str, target: str, kernel: Any, sass: str | None) -> Report:
    """sass: what was made of it with others; else it is made here, and the report holds the code."""
    keep_code = sass is None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.check_output([_tools() / "cuobjdump", "-res-usage", file.name], text=True)
        if sass is None:
            # With the branches that a table leads to.
            sass = subprocess.check_output([_tools() / "nvdisasm", "-c", file.name], text=True)
    figures = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return Report(
        name,
        target,
        registers=figures["REG"],
        stack=figures["STACK"] + figures["LOCAL"],
        shared=kernel.metadata.shared,
        spills_in_loops=spills_in_loops(sass),
        trap=re.search(r"^\s*(@\S+\s+)?trap;", kernel.asm["ptx"], re.MULTILINE) is not None,
        unwritten=tuple(unwritten_reads(sass)) if target in ("sm_80", "sm_90") else (),
        overwritten=tuple(overwritten_barriers(kernel.asm["ptx"])),
        opcodes=frozenset(re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", sass, re.MULTILINE)),
        code={"ptx": plain_ptx(kernel.asm["ptx"]), "sass": plain_sass(sass)} if keep_code else {},
    )


def _read_amd(name: str, target: str, kernel: Any, keep_code: bool) -> Report:
    assembly: str = kernel.asm["amdgcn"]
    figures = {key: int(value) for key, value in re.findall(r"^\s*\.(\w+):\s+(\d+)\s*$", assembly, re.MULTILINE)}
    opcodes = frozenset(re.findall(r"^\s+([sv]_\w+|(?:global|buffer|flat|ds|scratch)_\w+)", assembly, re.MULTILINE))
    return Report(
        name,
        target,
        registers=figures["vgpr_count"],
        stack=figures["private_segment_fixed_size"],
        shared=kernel.metadata.shared,
        spills_in_loops=spills_in_loops(assembly),
        vgpr_spills=figures["vgpr_spill_count"],
        sgpr_spills=figures["sgpr_spill_count"],
        trap="s_trap" in opcodes,
        opcodes=opcodes,
        code={"amdgcn": plain_amdgcn(assembly)} if keep_code else {},
    )


if __name__ == "__main__":
    from kernel_reference.testing.compare import main

    sys.exit(main())
