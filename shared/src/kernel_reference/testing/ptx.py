"""A look at PTX for barriers in shared memory whose place is written to as if it were free.

Where nothing uses a barrier that a kernel makes, Triton 3.6 gives its place to what comes next: in a Gluon kernel, to
what is handed to the partitions of ``warp_specialize``. Making a barrier and storing a number are not kept in order,
so that the partitions may read a piece of a barrier in place of a pointer.
"""

from __future__ import annotations

import re

_BASE = re.compile(r"^\s*mov\.[bu]32\s+(%r\d+), global_smem;", re.MULTILINE)
_SUM = re.compile(r"^\s*add\.s32\s+(%r\d+), (%r\d+|global_smem), (\d+);", re.MULTILINE)
_BARRIER = re.compile(r"mbarrier\.init\S* \[\s*(%r\d+|global_smem)(?:\s*\+\s*(\d+))?\s*\]")
_STORE = re.compile(r"st\.shared(?:\.v(\d))?\.[a-z](\d+)\s+\[\s*(%r\d+|global_smem)(?:\s*\+\s*(\d+))?\s*\]")
_BARRIER_BYTES = 8


def overwritten_barriers(ptx: str) -> list[str]:
    """The stores to shared memory that meet a barrier made there, as far as places are constants."""
    places = {"global_smem": 0} | {match[1]: 0 for match in _BASE.finditer(ptx)}
    for match in _SUM.finditer(ptx):
        if match[2] in places:
            places[match[1]] = places[match[2]] + int(match[3])
    barriers = {places[match[1]] + int(match[2] or 0) for match in _BARRIER.finditer(ptx) if match[1] in places}
    found = []
    for match in _STORE.finditer(ptx):
        if match[3] in places:
            begin = places[match[3]] + int(match[4] or 0)
            end = begin + int(match[1] or 1) * int(match[2]) // 8
            if any(begin < barrier + _BARRIER_BYTES and barrier < end for barrier in barriers):
                found.append(match[0])
    return found
