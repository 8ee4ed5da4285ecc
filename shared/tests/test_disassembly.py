"""Kernels whose code is read together are read as one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_reference.testing.forks import run_alone

pytest.importorskip("triton", reason="needs triton, which is not installed")
pytestmark = pytest.mark.codegen

COMPARED = '''
import os, re, subprocess
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
import triton
from kernel_reference.testing.codegen import KernelSpec, _compiled
from kernel_reference.testing.disassembly import disassembled

copy = KernelSpec(f"{file}:copy", {"p_x": "*bf16", "p_y": "*bf16", "n": "i32"}, {"BLOCK": 1024})
divide = KernelSpec(f"{file}:divide", {"p_x": "*i64", "p_y": "*i64", "n": "i64"})
matmul = KernelSpec(f"{file}:matmul", {"p_a": "*bf16", "p_b": "*bf16", "p_c": "*fp32", "k": "i32"}, {"BLOCK": 64})
cubins = [_compiled(spec, target).asm["cubin"] for spec in (divide, matmul, copy, divide)]
tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


def read(sass):
    """Addresses and opcodes, of jumps also the address of where they lead to."""
    labels, waiting, lines = {}, [], []
    for text in sass.splitlines():
        if label := re.match(r"([.$]\\S+):$", text):
            waiting.append(label[1])
        elif line := re.match(r"\\s+/\\*([0-9a-f]+)\\*/\\s+(?:@\\S+\\s+)?(\\S+)(.*)", text):
            labels |= dict.fromkeys(waiting, line[1])
            waiting = []
            to = re.search(r"\\((\\S+)\\)", line[3])
            lines.append((line[1], line[2], to[1] if to and line[2].startswith(("BRA", "CALL")) else None))
    return [(at, name, to and (labels[to], to.startswith("$"))) for at, name, to in lines]


alone = []
for cubin in cubins:
    Path("cubin").write_bytes(cubin)
    alone.append(read(subprocess.check_output([tool, "-c", "--no-dataflow", "cubin"], text=True)))
assert any(to and not to[1] for _, _, to in alone[1]), "no loop"
assert any(to and to[1] for _, _, to in alone[0]), "no call"
for text, wanted in zip(disassembled(cubins, target, tool), alone, strict=True):
    differing = [pair for pair in zip(read(text), wanted) if pair[0] != pair[1]]
    assert not differing and len(read(text)) == len(wanted), differing[:4]
'''


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_kernels_read_together_have_the_instructions_and_the_jumps_that_each_has_by_itself(
    target: str, tmp_path: Path
) -> None:
    file = Path(__file__).with_name("codegen_kernels.py")
    run_alone(f"import os; os.chdir({str(tmp_path)!r})\nfile, target = {str(file)!r}, {target!r}\n" + COMPARED)
