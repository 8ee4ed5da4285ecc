"""Kernels' lines of PTX, on torch tensors: what a device would make of a text that no compiler looks into."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping

import torch

Tensor = torch.Tensor

# By name: numbers of 32 bits, approximate ones as exact as torch has them.
INSTRUCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "mov.f32": lambda a: a,
    "abs.f32": torch.abs,
    "copysign.f32": lambda sign, size: torch.copysign(size, sign),
    "min.f32": torch.fmin,
    "min.NaN.f32": torch.minimum,
    "add.f32": torch.add,
    "mul.f32": torch.mul,
    # A product of two float32 is exact in float64.
    "fma.rn.f32": lambda a, b, c: (a.double() * b.double() + c.double()).float(),
    "rcp.approx.ftz.f32": torch.reciprocal,
    "ex2.approx.ftz.f32": torch.exp2,
    "setp.le.f32": torch.le,
    "selp.f32": lambda a, b, chosen: torch.where(chosen, a, b),
}


def execute(text: str, outputs: int, numbers: Tensor) -> Tensor:
    """What ``text`` makes of numbers of float32, ``outputs`` of them at a time: $0 and on are made of as many behind.

    Raises:
        NotImplementedError: an instruction is not among ``INSTRUCTIONS``.
    """
    # A thread has as many elements as the text takes; what is left over stands beside ones.
    flat = numbers.flatten()
    rest = -flat.numel() % outputs
    lanes = torch.cat([flat, flat.new_ones(rest)]).view(-1, outputs)
    registers = {f"${outputs + i}": lanes[:, i] for i in range(outputs)}
    for line in re.sub(r"[{}\n]", " ", text).split(";"):
        name, _, operands = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        if name not in INSTRUCTIONS:
            raise NotImplementedError(f"the simulator has no {name}")
        to, *given = (operand.strip() for operand in operands.split(","))
        registers[to] = INSTRUCTIONS[name](*(_operand(each, registers, lanes) for each in given))
    made = torch.stack([registers[f"${i}"] for i in range(outputs)], 1)
    return made.flatten()[: flat.numel()].view(numbers.shape)


def _operand(text: str, registers: Mapping[str, Tensor], like: Tensor) -> Tensor:
    if text.startswith("0f"):
        return like.new_full((len(like),), struct.unpack(">f", bytes.fromhex(text[2:]))[0])
    return registers[text]
