"""A look at SASS that a compiler should make superfluous: uniform registers that are read before any write,
and registers that are kept in memory where it costs time.

ptxas 12.8 was seen to do so (sm_90, a matrix product whose operand's address it had computed on one way through a loop
only): the kernel then multiplies whatever lies where a register left over from other work points, or faults.
"""

from __future__ import annotations

import collections
import itertools
import re
from typing import NamedTuple

# torch requires it.
import networkx

_LABEL = re.compile(r"^(\.L_x_\d+|\.LBB\d+_\d+):")
_ANY_LABEL = re.compile(r"\.L_x_\d+|\.LBB\d+_\d+")
_AMD_INSTRUCTION = re.compile(r"^\s+((?:[sv]|ds|flat|global|buffer|scratch)_\w.*)$")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(?:@(!?U?P\w+)\s+)?(.*?)\s*;")
_TARGET = re.compile(r"\((\.L_x_\d+)\)")
# Of ptxas' own functions, as of a division in 64 bits.
_FUNCTION = re.compile(r"^(\$\S+):")
_CALLED = re.compile(r"CALL\S* `\((\$\S+)\)")
_REGISTER = re.compile(r"(gdesc\[|desc\[)?\bUR(\d+)\b")
# What writes uniform registers, its first operand but for predicates, and what looks like it and does not.
_WRITES = re.compile(r"(?!UISETP|UPLOP3|UTMA|USETMAXREG|UCGABAR)(U|R2UR|S2UR|VOTEU|REDUX)")
_ALL = frozenset(range(64))
_PRODUCT = re.compile(r"[HIUQD]\w*MMA\b|v_(mfma|dot\d)")
# AMD keeps scalar registers in the lanes of vector ones.
_SPILL = re.compile(r"(LDL|STL)\b|v_(read|write)lane_b32|scratch_")
_BRANCH = re.compile(r"BRA|BRX|s_c?branch")
_ENDS = re.compile(r"BRA|BRX|EXIT|RET|s_branch|s_endpgm")


class _Line(NamedTuple):
    at: str
    words: str
    reads: frozenset[int]
    writes: frozenset[int]
    after: tuple[int, ...]


def unwritten_reads(sass: str) -> list[str]:
    """Where uniform registers are read that on some way from the kernel's start nothing has written.

    sass: what ``nvdisasm -c`` prints of one kernel for sm_80 or sm_90. A kernel that branches by a table, as those do
    whose warps are specialised, is not looked into: nothing is found there. A call writes what its function does.
    """
    lines = _parse(sass)
    written: list[frozenset[int] | None] = [None] * len(lines)
    if lines:
        written[0] = frozenset()
    waiting = [0] if lines else []
    while waiting:
        i = waiting.pop()
        left = (written[i] or frozenset()) | lines[i].writes
        for after in lines[i].after:
            before = written[after]
            now = left if before is None else before & left
            if now != before:
                written[after] = now
                waiting.append(after)
    found = []
    for line, known in zip(lines, written, strict=True):
        if known is not None and line.reads - known:
            names = ", ".join(f"UR{number}" for number in sorted(line.reads - known))
            found.append(f"{names} at 0x{line.at}: {line.words}")
    return found


def spills_in_loops(code: str) -> int:
    """How many instructions move spilled registers in the innermost loops that multiply matrices.

    code: what ``nvdisasm -c`` prints of one kernel, or AMD's assembly. A kernel that works on one tile after another
    may keep in memory what belongs to all of them: that costs once a tile, a spill in such a loop once a step.
    """
    labels: dict[str, int] = {}
    found: list[tuple[bool, str]] = []
    for text in code.splitlines():
        if label := _LABEL.match(text):
            labels[label[1]] = len(found)
        elif instruction := _INSTRUCTION.match(text):
            # What a table of branches may lead to stands behind the instruction.
            rest = text[instruction.end() :] if instruction[3].startswith("BRX") else ""
            found.append((bool(instruction[2]), instruction[3] + rest))
        elif instruction := _AMD_INSTRUCTION.match(text):
            found.append((False, instruction[1]))
    # Where each instruction may go but for the next one, and whether it may go on to that.
    jumps: list[list[int]] = []
    goes_on: list[bool] = []
    for predicated, words in found:
        targets = _ANY_LABEL.findall(words) if _BRANCH.match(words) else []
        jumps.append([labels[target] for target in targets if labels.get(target, len(found)) < len(found)])
        # A branch may also name its predicate among its operands.
        goes_on.append(predicated or bool(re.match(r"BRA\S* !?U?P\d", words)) or not _ENDS.match(words))
    # Blocks of instructions that follow each other, named by their first: a hundredth of the nodes.
    behind_jumps = {i + 1 for i, targets in enumerate(jumps) if targets or not goes_on[i]}
    firsts = sorted({0, *behind_jumps, *itertools.chain(*jumps)} - {len(found)}) if found else []
    flow = networkx.DiGraph()
    spilled: collections.Counter[int] = collections.Counter()
    products: set[int] = set()
    for first, end in itertools.pairwise([*firsts, len(found)]):
        flow.add_edges_from((first, target) for target in jumps[end - 1])
        if goes_on[end - 1] and end < len(found):
            flow.add_edge(first, end)
        inside = [words for _, words in found[first:end]]
        spilled[first] = sum(_SPILL.match(words) is not None for words in inside)
        if any(_PRODUCT.match(words) for words in inside):
            products.add(first)
    return sum(spilled[block] for loop in _innermost(flow, products) for block in loop)


def _innermost(flow: networkx.DiGraph, wanted: set[int]) -> list[set[int]]:
    """The innermost loops with something that is wanted."""
    loops: list[set[int]] = []
    for loop in networkx.strongly_connected_components(flow):
        if loop & wanted and (len(loop) > 1 or flow.has_edge(*loop, *loop)):
            # Without the ways to its beginning a loop is no loop; what is one still lies within it.
            inside = flow.subgraph(loop).copy()
            entered = {i for i in loop if any(before not in loop for before in flow.predecessors(i))} or {min(loop)}
            inside.remove_edges_from([*inside.in_edges(entered)])
            loops += _innermost(inside, wanted) or [loop]
    return loops


def _parse(sass: str) -> list[_Line]:
    labels: dict[str, int] = {}
    found: list[tuple[str, str, str]] = []
    functions: dict[str, set[int]] = {}
    inside: set[int] = set()
    for text in sass.splitlines():
        if label := _LABEL.match(text):
            labels[label[1]] = len(found)
        elif function := _FUNCTION.match(text):
            inside = functions[function[1]] = set()
        elif instruction := _INSTRUCTION.match(text):
            found.append((instruction[1], instruction[2] or "", instruction[3]))
            inside |= _uniform(instruction[3].partition(" ")[0], instruction[3])[1]
    if any(words.startswith("BRX") for _, _, words in found):
        return []
    lines = []
    for i, (at, predicate, words) in enumerate(found):
        after = []
        name = words.partition(" ")[0]
        if name.startswith("BRA"):
            target = _TARGET.search(words)
            if target and target[1] in labels:
                after.append(labels[target[1]])
        # A branch may also name its predicate among its operands.
        goes_on = predicate or re.match(r"BRA\S* !?U?P\d", words)
        if goes_on or not name.startswith(("BRA", "EXIT", "RET")):
            after.append(i + 1)
        reads, writes = _uniform(name, words)
        if called := _CALLED.match(words):
            writes |= functions.get(called[1], set())
        lines.append(_Line(at, words, reads, writes, tuple(j for j in after if j < len(found))))
    return lines


def _uniform(name: str, words: str) -> tuple[frozenset[int], frozenset[int]]:
    """The uniform registers that an instruction reads and writes."""
    operands = words[len(name) :]
    reads: set[int] = set()
    writes: set[int] = set()
    for place, (kind, digits) in enumerate(_REGISTER.findall(operands)):
        number = int(digits)
        first = place == 0 and re.match(rf"\s*(U?P\d, |U?PT, )*UR{number}\b", operands)
        if kind == "gdesc[":
            # Two descriptors, the first of which does not count where the first operand comes from registers.
            from_registers = re.match(r"\s*R\d+, R\d+", operands)
            reads |= {number + 2, number + 3} if from_registers else {number + i for i in range(4)}
        elif kind == "desc[":
            reads |= {number, number + 1}
        elif first and _WRITES.match(name):
            writes |= {number, number + 1} if ".64" in name or ".WIDE" in name else {number}
        else:
            reads |= {number, number + 1} if name.startswith("UIADD3.64") else {number}
    return frozenset(reads) & _ALL, frozenset(writes) & _ALL
