"""Do the CUDA functions of decoding do what they say, thread by thread, on a machine without a GPU?

rows_of_keys.cpp and rows.cpp compile their own text for the CPU, with what PTX says of WGMMA's fragments and swizzles.
They see neither barriers of the kernel nor bulk copies, which are not in that text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import tilelang_mla

KERNELS = Path(tilelang_mla.__file__).parent / "kernels" / "decode"
OF_ROWS = ("copied", "one scale", "one scale, float16", "records")
# What two programs widen for both.
OF_TWO = ("one scale, for two", "records, for two")


def said_by(name: str, folder: Path) -> str:
    """What a program of these tests prints."""
    compiler = shutil.which("g++")
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("no g++, in CI")
        pytest.skip("no g++")
    program, source = folder / name, Path(__file__).with_name(f"{name}.cpp")
    subprocess.run([compiler, "-std=c++20", "-Og", "-w", f"-I{KERNELS}", source, "-o", program], check=True)
    return subprocess.check_output([program], text=True)


def test_functions_of_keys_as_rows_attend_to_both_formats_as_float64_does(tmp_path) -> None:
    said = said_by("rows_of_keys", tmp_path)
    lines = re.findall(r"(.+): (\S+) (\S+)\n", said)
    assert len(lines) == 12, said
    for name, error, of_lse in lines:
        if name == "by 8 bits, large products cancel":
            # Why a plan alone asks for it.
            assert float(error) > 10 * 2**-8, said
            continue
        # Rounding of a result in bfloat16 is 2^-8 of it, of weights half of that; a part is a float32.
        bounds = {"values": 2**-40, "by 8 bits, no rope, a part": 2**-9}
        bounds |= dict.fromkeys(("one scale, float16, a part", "lists of records, 9 rows, a part"), 2**-10)
        assert float(error) < bounds.get(name, 1.5 * 2**-8), said
        # Sums of 8-bit products have 13 bits.
        assert float(of_lse) < (1e-2 if "by 8 bits" in name else 1e-3 if "cancel" in name else 1e-5), said


def test_loaders_by_rows_store_each_element_at_its_address_and_widen_what_has_8_bits(tmp_path) -> None:
    """Keys that are none are zeros; NaN stays. What one program sends to the other is what that one counts."""
    said = said_by("rows", tmp_path)
    elements, bytes_sent = str(3 * 64 * 576), str(2 * 3 * 32 * 576 * 2)
    want = [(name, "0", elements) for name in OF_ROWS]
    for name in OF_TWO:
        want += [(name, "0", elements)] * 2 + [(f"{name}, bytes sent", "0", bytes_sent)]
    assert re.findall(r"(.+): (-?\d+) (\d+)\n", said) == want, said
