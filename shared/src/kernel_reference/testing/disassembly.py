"""SASS of many kernels from one start of ``nvdisasm``, which takes it longer than to read a kernel.

It reads one file. The code of several kernels, one behind the other, is such a file; what it prints of that has numbers
in place of labels, and the labels are put back.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_INSTRUCTION = re.compile(r"^(\s+/\*)([0-9a-f]{4,})(\*/.*)$")
_JUMP = re.compile(r"(\b(?:BRA|CALL)\b.*?)\b0x([0-9a-f]+)(?=\s*;)")
# No address has more than six digits, which is what readers of the lines know.
_MOST_BYTES = 8 << 20
_SYMBOLS, _FUNCTION = 2, 2


class _Code(NamedTuple):
    """A kernel's instructions, and where among them its own functions begin."""

    instructions: bytes
    functions: dict[int, str]


def disassembled(cubins: Sequence[bytes], target: str, tool: Path) -> list[str]:
    """The instructions of each of these kernels, with the labels of branches and calls, as ``nvdisasm -c`` prints them.

    tool: nvdisasm.
    """
    # Those of Triton's kernels use what later GPUs of their kind may not have.
    kind = target.replace("sm_", "SM") + ("a" if int(target.removeprefix("sm_")) >= 90 else "")
    texts: list[str] = []
    for codes in _files([_code(cubin) for cubin in cubins]):
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"".join(code.instructions for code in codes))
            file.flush()
            command: list[str | Path] = [tool, "--binary", kind, "--no-dataflow", file.name]
            lines = iter(subprocess.check_output(command, text=True).splitlines())
        texts += _texts(lines, codes)
    return texts


def _files(codes: Sequence[_Code]) -> Iterator[list[_Code]]:
    file: list[_Code] = []
    for code in codes:
        if file and sum(len(one.instructions) for one in [*file, code]) > _MOST_BYTES:
            yield file
            file = []
        file.append(code)
    if file:
        yield file


def _code(cubin: bytes) -> _Code:
    """Read an ELF file of 64 bits with one kernel."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + number * size) for number in range(count)]

    def text(section: int, at: int) -> str:
        start = sections[section][4] + at
        return cubin[start : cubin.index(0, start)].decode()

    (code,) = (number for number, one in enumerate(sections) if text(names_at, one[0]).startswith(".text."))
    functions = {}
    for _, kind, _, _, start, length, names, *_ in sections:
        for at in range(start, start + length, 24) if kind == _SYMBOLS else ():
            name, info, _, section, value, _ = struct.unpack_from("<IBBHQQ", cubin, at)
            if section == code and info & 15 == _FUNCTION and value:
                functions[value] = text(names, name)
    _, _, _, _, start, length, *_ = sections[code]
    return _Code(cubin[start : start + length], functions)


def _texts(lines: Iterator[str], codes: Sequence[_Code]) -> Iterator[str]:
    """Share the lines out to the kernels, with addresses from each one's own beginning, and labels."""
    found = [instruction.groups() for line in lines if (instruction := _INSTRUCTION.match(line))]
    first, begin = 0, 0
    for code in codes:
        end = begin + len(code.instructions)
        last = first
        while last < len(found) and int(found[last][1], 16) < end:
            last += 1
        yield _labelled([(before, int(at, 16), words) for before, at, words in found[first:last]], code, begin)
        first, begin = last, end


def _labelled(found: Sequence[tuple[str, int, str]], code: _Code, begin: int) -> str:
    jumps = {int(jump[2], 16) for _, _, words in found if (jump := _JUMP.search(words))}
    labels = {at: f".L_x_{number}" for number, at in enumerate(sorted(jumps))}
    labels |= {at + begin: name for at, name in code.functions.items()}

    def named(jump: re.Match[str]) -> str:
        return f"{jump[1]}`({labels[int(jump[2], 16)]})"

    lines = []
    for before, at, words in found:
        if at in labels:
            lines.append(f"{labels[at]}:")
        lines.append(f"{before}{at - begin:04x}{_JUMP.sub(named, words)}")
    return "\n".join(lines) + "\n"
