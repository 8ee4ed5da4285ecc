"""What no kernel of a call can do without, at the grid of the call: being launched, and states found by their slots."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from gdn_split.kernels.split import wait_for_inputs
from gdn_split.launch import device_limits

LAUNCH, STATES = "empty kernel", "states through slots"


@triton.jit
def launched(p_out, DEPENDENT: tl.constexpr):
    wait_for_inputs(DEPENDENT)
    tl.store(p_out + tl.program_id(0), 1)


@triton.jit
def copy_states(p_pool, p_slots, s_slot, PIECES: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """A program reads BLOCK integers of its sequence's state and writes them back, one bit changed."""
    wait_for_inputs(DEPENDENT)
    slot = tl.load(p_slots + tl.program_id(0) // PIECES).to(tl.int64)
    p = p_pool + slot * s_slot + tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)
    tl.store(p, tl.load(p) ^ 1, cache_modifier=".cs")


def _start(kernel: Any, programs: int, num_warps: int, first: torch.Tensor, *others: object) -> None:
    dependent = device_limits(first.device).dependent_launch
    options = {"launch_pdl": True} if dependent else {}
    kernel[(programs,)](first, *others, dependent, num_warps=num_warps, **options)


def launch_alone(device: torch.device, programs: int, num_warps: int) -> torch.Tensor:
    """The least time that a kernel of so many programs and warps takes."""
    out = torch.empty(programs, dtype=torch.int32, device=device)
    _start(launched, programs, num_warps, out)
    return out


def states_alone(pool: torch.Tensor, slots: torch.Tensor, block: int, num_warps: int) -> torch.Tensor:
    """The states' way alone, of float32 pools; a program takes ``block`` elements."""
    sequences, elements = len(slots), pool[0].numel()
    pieces = elements // block
    integers = pool.view(torch.int32)
    _start(copy_states, sequences * pieces, num_warps, integers, slots, pool.stride(0), pieces, block)
    return integers


def check(outputs: torch.Tensor, pool: torch.Tensor) -> float:
    """Of either: every number is written, and every element has been there and back."""
    wanted = torch.ones_like(outputs) if outputs.shape != pool.shape else pool.view(torch.int32) ^ 1
    if not torch.equal(outputs, wanted):
        raise AssertionError("not all programs have run")
    return 0.0
