"""Kernels' lines of PTX, on torch tensors: what a device would make of a text that no compiler looks into."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence

import torch

Tensor = torch.Tensor


def _as_float(register: Tensor) -> Tensor:
    return register.view(torch.float32)


def _of_floats(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *registers: compute(*map(_as_float, registers)).view(torch.int32)


def _in_pairs(high: Tensor, low: Tensor) -> Tensor:
    pair = torch.stack([_as_float(low), _as_float(high)], -1).bfloat16()
    return pair.view(torch.int32).squeeze(-1)


# By name, of registers of 32 bits; approximate results are as exact as torch has them.
INSTRUCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "mov.f32": lambda a: a,
    "abs.f32": _of_floats(torch.abs),
    "copysign.f32": _of_floats(lambda sign, size: torch.copysign(size, sign)),
    "min.f32": _of_floats(torch.fmin),
    "max.f32": _of_floats(torch.fmax),
    "min.NaN.f32": _of_floats(torch.minimum),
    "add.f32": _of_floats(torch.add),
    "sub.f32": _of_floats(torch.sub),
    "mul.f32": _of_floats(torch.mul),
    # A product of two float32 is exact in float64.
    "fma.rn.f32": _of_floats(lambda a, b, c: (a.double() * b.double() + c.double()).float()),
    "rcp.approx.ftz.f32": _of_floats(torch.reciprocal),
    "ex2.approx.ftz.f32": _of_floats(torch.exp2),
    "cvt.rn.bf16x2.f32": _in_pairs,
    "and.b32": torch.bitwise_and,
    "shl.b32": torch.bitwise_left_shift,
    # A predicate is a register of truths.
    "setp.le.f32": lambda a, b: torch.le(_as_float(a), _as_float(b)),
    "setp.gtu.f32": lambda a, b: ~torch.le(_as_float(a), _as_float(b)),
    "setp.le.s32": torch.le,
    "setp.ge.s32": torch.ge,
    "setp.neu.f32": lambda a, b: torch.ne(_as_float(a), _as_float(b)),
    "or.pred": torch.logical_or,
    "selp.f32": lambda a, b, chosen: torch.where(chosen, a, b),
}


def execute(
    text: str, outputs: int, *numbers: Tensor, dtypes: Sequence[torch.dtype] = (torch.float32,)
) -> tuple[Tensor, ...]:
    """What ``text`` makes of numbers of 32 bits: a tensor of each of ``dtypes``, in ``outputs`` registers $0 and on.

    As many of the first tensor at a time as fill those of one dtype are in the registers behind, then as many of the
    next, which is of the same shape.

    Raises:
        NotImplementedError: an instruction is not among ``INSTRUCTIONS``.
    """
    of_each = outputs // len(dtypes)
    together = of_each * 4 // dtypes[0].itemsize
    # A thread has as many elements as the text takes; what is left over stands beside ones.
    count, shape = numbers[0].numel(), numbers[0].shape
    flat = [torch.cat([each.flatten(), each.new_ones(-count % together)]).view(torch.int32) for each in numbers]
    lanes = torch.cat([each.view(-1, together) for each in flat], 1)
    registers = {f"${outputs + i}": lane.contiguous() for i, lane in enumerate(lanes.unbind(1))}
    registers = _carry_out(_lines_of(text), 0, registers)
    made = torch.stack([registers[f"${i}"] for i in range(outputs)], 1).split(of_each, 1)
    return tuple(
        one.contiguous().view(dtype).flatten()[:count].view(shape) for one, dtype in zip(made, dtypes, strict=True)
    )


def _lines_of(text: str) -> list[str]:
    """Instructions, and labels, each in a line of its own; without declarations."""
    lines = re.sub(r"[{}\n]", " ", re.sub(r"(\w+:)", r"\1;", text)).split(";")
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith(".reg")]


def _carry_out(lines: Sequence[str], at: int, registers: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is in the registers after the lines from ``at`` on. Where a warp votes, each thread is a warp of its own."""
    like = next(iter(registers.values()))
    while at < len(lines):
        name, _, operands = lines[at].partition(" ")
        at += 1
        if name[-1] == ":" or name.startswith("vote."):
            continue
        if name[0] == "@" or name == "bra.uni":
            target = lines.index(f"{lines[at - 1].split()[-1]}:")
            jumps = registers[name.lstrip("@!")] if name[0] == "@" else torch.ones(len(like), dtype=torch.bool)
            jumps = ~jumps if name.startswith("@!") else jumps
            if jumps.all() or not jumps.any():
                at = target if jumps.any() else at
                continue
            ends = [
                _carry_out(lines, then, {key: each[own] for key, each in registers.items()})
                for own, then in ((jumps, target), (~jumps, at))
            ]
            return {key: _together(jumps, *(end[key] for end in ends)) for key in ends[0].keys() & ends[1].keys()}
        if name not in INSTRUCTIONS:
            raise NotImplementedError(f"the simulator has no {name}")
        to, *given = (operand.strip() for operand in operands.split(","))
        registers[to] = INSTRUCTIONS[name](*(_operand(each, registers, like) for each in given))
    return registers


def _together(which: Tensor, chosen: Tensor, others: Tensor) -> Tensor:
    """The registers of the threads ``which``, and of the others, in order."""
    found = chosen.new_empty(len(which))
    found[which], found[~which] = chosen, others
    return found


def _operand(text: str, registers: Mapping[str, Tensor], like: Tensor) -> Tensor:
    if text.startswith("0f"):
        (bits,) = struct.unpack(">i", bytes.fromhex(text[2:]))
    elif text[0].isdigit():
        (bits,) = struct.unpack(">i", int(text, 0).to_bytes(4, "big"))
    else:
        return registers[text]
    return like.new_full((len(like),), bits)
