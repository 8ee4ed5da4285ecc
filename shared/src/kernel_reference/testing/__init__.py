"""Tools that hold a GPU kernel to its oracle. Each module is imported by its name; ``kernel-reference[testing]``.

numerics     is the error within twice that of plain PyTorch of the same dtype?
guards       buffers that show writes and reads out of bounds, and elements left unwritten; bitwise equality
plain        attention in plain PyTorch of the dtype under test, and errors row by row
contract     opcheck, torch.compile, CUDA graphs, determinism, batch invariance, no host sync, 64-bit offsets
interpreter  Triton's interpreter with correct bfloat16 and fp8, so that kernels are tested without a GPU
gluon        a simulator of Gluon kernels for sm_90: mbarriers, TMA, WGMMA and warp specialisation on a CPU
codegen      compile for GPUs that are not here; registers, spills, traps, opcodes; compare with a revision
distributed  run a function in several ranks on one machine; count the bytes that they exchange
faults       mutation testing: plant each of a package's faults in a copy of it and see the tests go red
memory       tests that take much of a GPU's memory take turns, in all processes, and none keeps it
pytest_plugin  the fixture ``device``, the markers ``gpu``, ``sanitize`` and ``codegen``, and a seed for each test
"""

from __future__ import annotations

__all__ = [
    "codegen",
    "contract",
    "distributed",
    "faults",
    "gluon",
    "guards",
    "interpreter",
    "memory",
    "numerics",
    "plain",
    "pytest_plugin",
]
