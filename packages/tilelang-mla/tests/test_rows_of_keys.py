"""Do the CUDA functions of decoding with keys as rows attend, thread by thread, on a machine without a GPU?

rows_of_keys.cpp compiles their own text for the CPU, with what PTX says of WGMMA's fragments and swizzles. It sees
neither barriers of the kernel nor copies, which are not in that text.
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


def test_functions_of_keys_as_rows_attend_to_both_formats_as_float64_does(tmp_path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("no g++, in CI")
        pytest.skip("no g++")
    program = tmp_path / "rows_of_keys"
    source = Path(__file__).with_name("rows_of_keys.cpp")
    subprocess.run([compiler, "-std=c++20", "-w", "-pthread", f"-I{KERNELS}", source, "-o", program], check=True)
    said = subprocess.check_output([program], text=True)
    lines = re.findall(r"(.+): (\S+) (\S+)\n", said)
    assert len(lines) == 5, said
    for name, error, of_lse in lines:
        # Rounding of a result in bfloat16 is 2^-8 of it, of weights half of that; a part is a float32.
        bounds = {"values": 2**-40, "one scale, float16, no rope, a part": 2**-10}
        assert float(error) < bounds.get(name, 1.5 * 2**-8), said
        assert float(of_lse) < 1e-5, said
