"""What a first call waits for: TileLang's proofs and its linking, and kernels that could be built side by side."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import z3
from tilelang import tvm

_Wanted = TypeVar("_Wanted")

# What TVM writes in C of the code of a kernel, to be linked: an array of hexadecimal numbers.
_ARRAY = re.compile(r"const unsigned char (\w+)\[(\d+)\] = {([^}]*)}")
# The same for the assembler: a place with a name, and the bytes of a file.
_BYTES = """.section .rodata
.globl {name}
.type {name}, %object
.balign 64
{name}:
.incbin "{file}"
.size {name}, {size}
.section .note.GNU-stack,"",%progbits
"""

# Z3's solver of linear arithmetic that came before the present one.
_SOLVER, _EARLIER = "smt.arith.solver", 2
_lock = Lock()
# How many threads lower kernels, and what Z3 had before the first of them began.
_lowering: list[str] = []
# How TVM links kernels, while some are that are to be linked quicker.
_linking: list[Callable[..., Any]] = []


@contextmanager
def quick_proofs() -> Iterator[None]:
    """While it is open Z3 uses an earlier solver of linear arithmetic.

    Lowering a decoding kernel asks Z3 5700 questions and has three proofs. The present solver takes 2.4 s of 7.1 for
    them and the earlier one 0.9; both give up after as many steps. A setting that Z3's users made before comes back.
    """
    with _lock:
        before = _lowering[0] if _lowering else str(z3.get_param(_SOLVER))
        _lowering.append(before)
        z3.set_param(_SOLVER, _EARLIER)
    try:
        yield
    finally:
        with _lock:
            before = _lowering.pop()
            if not _lowering:
                z3.set_param(_SOLVER, before)


def packed(text: str, folder: str) -> str:
    """The file that is linked as this text in C would be, which has the code of a kernel."""
    array = _ARRAY.search(text)
    code = b"" if array is None else bytes.fromhex(array[3].replace("0x", "").replace(",", " "))
    own = Path(folder, "devc.c")
    if array is None or len(code) != int(array[2]) or text.count("const unsigned char ") != 2:
        own.write_text(text)
        return str(own)
    file, own = own.with_suffix(".bin"), own.with_suffix(".s")
    file.write_bytes(code)
    own.write_text(_BYTES.format(name=array[1], file=file, size=len(code)))
    return str(own)


@contextmanager
def quick_links() -> Iterator[None]:
    """While it is open the assembler reads the code of kernels that are linked, as it is.

    TVM links it as an array in C, for which g++ takes 0.4 s of a decoding kernel's 0.6.
    """
    to_c = tvm.get_global_func("runtime.ModulePackImportsToC", allow_missing=True)
    kind = tvm.runtime.Executable

    def export_library(self: Any, file_name: str, **given: Any) -> Any:
        def pack(module: Any, is_system_lib: bool, prefix: str, folder: str) -> str:
            return packed(to_c(module, is_system_lib, prefix), folder)

        return _linking[0](self, file_name, **({"fpack_imports": pack} | given if to_c else given))

    with _lock:
        _linking.append(_linking[0] if _linking else kind.export_library)
        kind.export_library = export_library
    try:
        yield
    finally:
        with _lock:
            before = _linking[0]
            _linking.pop()
            if not _linking:
                kind.export_library = before


def executable_of(compiled: Any) -> Any:
    """What has the functions of a kernel that TileLang compiled.

    TileLang links it for its cache, and once more, in 0.7 s, for the process that has compiled it: that one loads what
    is in the cache, too, as all later ones do.
    """
    executable = compiled.adapter.get_exportable_executable()
    saved = Path(getattr(compiled, "_tilelang_cache_path", ""), "executable.so")
    if isinstance(executable, tvm.runtime.Executable) and saved.is_file():
        return tvm.runtime.load_module(str(saved))
    return executable


def side_by_side(make: Callable[[_Wanted], Any], wanted: Sequence[_Wanted]) -> list[Any]:
    """What is made of each; nvcc's processes run beside the lowering of other kernels."""
    if len(wanted) < 2:
        return [make(one) for one in wanted]
    with ThreadPoolExecutor(len(wanted) - 1) as pool:
        # The last of a call are the smallest.
        rest = [pool.submit(make, one) for one in wanted[1:]]
        return [make(wanted[0]), *(one.result() for one in rest)]
