"""The text of compiled kernels without what says nothing of a machine's work, so that two builds can be compared."""

from __future__ import annotations

import re

_SECTION = re.compile(r"^\s*\.section\s+\.debug_\w+\s*\{.*?\}", re.MULTILINE | re.DOTALL)
_SASS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?;)|^(\.L_x_\d+:)", re.MULTILINE)


def plain_ptx(ptx: str) -> str:
    """PTX without comments, line numbers and debug sections, its function called ``kernel`` whatever its name is."""
    text = _SECTION.sub("", re.sub(r"//.*", "", ptx))
    if entry := re.search(r"\.entry\s+(\w+)", text):
        text = re.sub(rf"\b{entry[1]}(?=\b|_param_)", "kernel", text)
    return _without(text, (".loc", ".file", "$L__tmp", "$L__func"))


def plain_sass(sass: str) -> str:
    """The instructions and labels of what ``nvdisasm -c`` prints."""
    return "\n".join(instruction or label for instruction, label in _SASS.findall(sass))


def plain_amdgcn(assembly: str) -> str:
    """AMD's assembly up to its tables of symbols, likewise."""
    name = re.search(r"^\s*\.globl\s+(\w+)", assembly, re.MULTILINE)
    text = re.sub(r";.*", "", assembly)
    if name:
        text = re.sub(rf"\b{name[1]}\b", "kernel", text)
    text = re.split(r"^\s*\.section\s+\.debug_", text, maxsplit=1, flags=re.MULTILINE)[0]
    return _without(text, (".loc", ".file", ".ident", ".cfi", ".Ltmp", ".Lfunc", ".size"))


def _without(text: str, beginnings: tuple[str, ...]) -> str:
    lines = [line.strip() for line in text.splitlines()]
    return "\n".join(line for line in lines if line and not line.startswith(beginnings))
