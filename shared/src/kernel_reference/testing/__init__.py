"""Tools that hold a GPU kernel to its oracle. Each module is imported by its name; ``kernel-reference[testing]``.

numerics     is the error within twice that of plain PyTorch of the same dtype?
guards       buffers that show a write out of place, an element left unwritten, a read out of place; bitwise equality
contract     opcheck, torch.compile, CUDA graphs, determinism, batch invariance, no host sync, 64-bit offsets
interpreter  bfloat16 and fp8 made right in Triton's interpreter, so that kernels are tested on a machine with no GPU
codegen      compile for GPUs that are not here, and read registers, spills, traps and opcodes of the result
faults       plant each of a package's faults in a copy of it and see the tests go red
pytest_plugin  the fixture ``device``, the markers ``gpu``, ``sanitize`` and ``codegen``, and a seed for each test
"""

from __future__ import annotations

__all__ = ["codegen", "contract", "faults", "guards", "interpreter", "numerics", "pytest_plugin"]
