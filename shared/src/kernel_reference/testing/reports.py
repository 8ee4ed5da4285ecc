"""What the compiler made of a kernel: registers, spills, traps, opcodes. :mod:`.codegen` offers these names."""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kernel_reference.testing.targets import target_named

# How NVIDIA's instructions begin that move spilled registers.
_MOVES = ("LDL", "STL")
# Bits that one thread moves, by the ending of AMD's opcodes.
_AMD_WIDTHS = {"byte": 8, "short": 16, "dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}


@dataclass(frozen=True)
class Report:
    """What the compiler made of one :class:`KernelSpec` for one target.

    registers: of a thread (AMD: VGPRs, accumulators included).
    stack: bytes of local memory of a thread.
    shared: bytes of shared memory (AMD: LDS) of a program.
    spills_in_loops: instructions that move spilled registers in the innermost loops that multiply matrices (NVIDIA; see
        :mod:`.sass`).
    vgpr_spills, sgpr_spills: AMD alone.
    trap: whether the kernel holds an instruction that aborts it, which is what some versions of the compiler emit for
        code that they cannot compile.
    opcodes: every instruction that occurs, as the disassembler spells it: ``LDG.E.128``, ``HGMMA.64x128x16.F32.BF16``,
        ``global_load_dwordx4``.
    unwritten: where registers are read that nothing has written (sm_80 and sm_90; see :mod:`.sass`).
    overwritten: stores to where a barrier was made in shared memory (NVIDIA; see :mod:`.ptx`).
    error: the compiler's message if it failed; the figures are then 0.
    code: where it was asked for, what the compiler wrote, without what says nothing of the machine's work (comments,
        lines of source, the function's name): ``ptx`` and ``sass``, or ``amdgcn``.
    """

    spec: str
    target: str
    registers: int = 0
    stack: int = 0
    shared: int = 0
    spills_in_loops: int = 0
    vgpr_spills: int = 0
    sgpr_spills: int = 0
    trap: bool = False
    opcodes: frozenset[str] = frozenset()
    unwritten: tuple[str, ...] = ()
    overwritten: tuple[str, ...] = ()
    error: str = ""
    code: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

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


def assert_clean(
    reports: Sequence[Report], *, most_stack: int = 0, most_stack_outside_loops: int = 0, most_in_loops: int = 0
) -> None:
    """Raise AssertionError, with a table, if any report has problems, or if there is no report at all.

    most_stack: bytes a thread that a kernel may spill, as on a GPU for which no plan was tuned; a warning then.
    most_stack_outside_loops: likewise, of a kernel that spills nothing in the loops that multiply matrices: one that
        works on one tile after another and keeps what belongs to all of them. No warning. AMD's scalar registers count
        4 bytes each.
    most_in_loops: instructions in such loops that may, beside that, move spilled registers: on a way seldom taken, say.
    """
    if not reports:
        raise AssertionError("no kernel was compiled: the list of reports is empty")
    reports = [
        replace(report, stack=0, sgpr_spills=0, opcodes=frozenset(op for op in report.opcodes if op[:3] not in _MOVES))
        if max(report.stack, 4 * report.sgpr_spills) <= most_stack_outside_loops
        and report.spills_in_loops <= most_in_loops
        else report
        for report in reports
    ]
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
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines of text, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
