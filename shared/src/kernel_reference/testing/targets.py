"""GPUs that kernels are compiled for, whether they are here or not: how much shared memory each gives to a program, and
what its matrix instructions are called.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from kernel_reference.checks import fail


@dataclass(frozen=True)
class Target:
    """shared_memory: bytes that a program may have at most (CUDA's opt-in maximum of a block; AMD's LDS).
    matrix: a regular expression of the opcodes, without suffixes, of the newest matrix instructions.
    """

    shared_memory: int
    matrix: str


KNOWN = {
    "sm_75": Target(64 * 1024, r"[HI]MMA"),
    "sm_80": Target(163 * 1024, r"[HI]MMA"),
    "sm_86": Target(99 * 1024, r"[HI]MMA"),
    "sm_89": Target(99 * 1024, r"[HIQ]MMA"),
    "sm_90": Target(227 * 1024, r"[HQI]GMMA"),
    "sm_100": Target(227 * 1024, r"UTC\w*MMA"),
    "sm_120": Target(99 * 1024, r"[HIQO]MMA"),
    "gfx942": Target(64 * 1024, r"v_s?mfma\w*|v_smfmac\w*"),
}
"""NVIDIA T4; A100; A10, RTX 30; L4, L40S, RTX 40; H100, H200; B200; RTX 50, RTX PRO; AMD MI300."""

TARGETS = tuple(os.environ.get("KERNEL_REFERENCE_TARGETS", "sm_80 sm_90 sm_100 gfx942").split())
"""Those that every portable kernel compiles for, or what the variable names of them."""

SMALL_TARGETS = ("sm_89", "sm_120")
"""Those whose programs have 99 KiB of shared memory, for which plans are made with less of everything. sm_86 is
given the PTX of sm_89."""


def target_named(name: str) -> Target:
    """ValueError if it is not one of :data:`KNOWN`."""
    if name not in KNOWN:
        fail("target", f"among {tuple(KNOWN)}", repr(name))
    return KNOWN[name]
