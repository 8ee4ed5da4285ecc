"""Do the CUDA functions of decoding do what they say, thread by thread, on a machine without a GPU?

rows_of_keys.cpp, keys_16bit.cpp, records.cpp and rows.cpp compile their own text for the CPU, with what PTX says of
fragments and swizzles. They see neither barriers of the kernel nor bulk copies, which are not in that text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from itertools import islice
from pathlib import Path

import pytest

import tilelang_mla

KERNELS = Path(tilelang_mla.__file__).parent / "kernels" / "decode"
OF_ROWS = ("copied", "boxes", "one scale", "one scale, float16", "records")
# What two programs widen for both.
OF_TWO = ("one scale, for two", "records, for two")


# As rows_of_keys.cpp numbers them, with the lines that each prints.
CASES = {
    "every value": 1, "one scale": 2, "a part": 1, "not widened": 2, "no rope": 1, "records": 2, "lists": 1,
    "sinks": 1, "two programs": 1,
}  # fmt: skip


def said_by(name: str, folder: Path, *flags: str) -> str:
    """What a program of these tests prints."""
    compiler = shutil.which("g++")
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("no g++, in CI")
        pytest.skip("no g++")
    program, source = folder / name, Path(__file__).with_name(f"{name}.cpp")
    subprocess.run([compiler, "-std=c++20", "-Og", "-w", f"-I{KERNELS}", *flags, source, "-o", program], check=True)
    return subprocess.check_output([program], text=True)


@pytest.fixture(scope="module")
def of_cases(request, tmp_path_factory) -> dict[str, list[tuple[str, ...]]]:
    """Names, errors of values and of lse; all cases are compiled at once, and one that is chosen alone by itself."""
    items = [item for item in request.session.items if "of_cases" in getattr(item, "fixturenames", ())]
    chosen = [item.callspec.params["case"] for item in items]
    number = [*CASES].index(chosen[0]) if len(chosen) == 1 else -1
    said = said_by("rows_of_keys", tmp_path_factory.mktemp("keys"), f"-DCASE={number}")
    lines = iter(re.findall(r"(.+): (\S+) (\S+)\n", said))
    found = {case: list(islice(lines, CASES[case])) for case in (chosen if number >= 0 else CASES)}
    assert [len(found[case]) for case in found] == [CASES[case] for case in found], said
    assert next(lines, None) is None, said
    return found


@pytest.mark.parametrize("case", CASES)
def test_functions_of_keys_as_rows_attend_to_both_formats_as_float64_does(of_cases, case) -> None:
    for name, error, of_lse in of_cases[case]:
        if name == "by 8 bits, large products cancel":
            # Why a plan alone asks for it.
            assert float(error) > 10 * 2**-8, name
            continue
        # Rounding of a result in bfloat16 is 2^-8 of it, of weights half of that; a part is a float32.
        bounds = {"values": 2**-40, "by 8 bits, no rope, a part": 2**-9}
        bounds |= dict.fromkeys(("one scale, float16, a part", "lists of records, 9 rows, a part"), 2**-10)
        assert float(error) < bounds.get(name, 1.5 * 2**-8), name
        # Sums of 8-bit products have 13 bits.
        assert float(of_lse) < (1e-2 if "by 8 bits" in name else 1e-3 if "cancel" in name else 1e-5), name


def test_loaders_by_rows_and_stores_of_tiles_put_each_element_at_its_address_and_widen_8_bits(tmp_path) -> None:
    """Keys that are none are zeros; NaN stays. What one program sends to the other is what that one counts. Of a tile
    only rows that are there are stored."""
    said = said_by("rows", tmp_path)
    elements, bytes_sent = str(3 * 64 * 576), str(2 * 3 * 32 * 576 * 2)
    want = [("a part", "0", str(64 * 512)), ("a tile", "0", str(128 * 152)), ("a tile, float16", "0", str(128 * 88))]
    want += [(name, "0", elements) for name in OF_ROWS]
    for name in OF_TWO:
        want += [(name, "0", elements)] * 2 + [(f"{name}, bytes sent", "0", bytes_sent)]
    assert re.findall(r"(.+): (-?\d+) (\d+)\n", said) == want, said


def test_functions_of_keys_of_16_bits_as_rows_attend_as_float64_does(tmp_path) -> None:
    """Sums of unlike size, lists with entries that are no keys, fewer heads than a tile has."""
    said = re.findall(r"(.+): (\S+) (\S+) (\S+)\n", said_by("keys_16bit", tmp_path))
    assert [name for name, *_ in said] == ["16 heads", "11 heads with sinks", "no rope, float16"]
    for name, error, of_lse, of_max in said:
        assert float(error) < (2**-9 if "float16" in name else 1.5 * 2**-8), name
        assert float(of_lse) < 1e-4, name
        assert float(of_max) < 1e-4, name


def test_functions_of_records_as_rows_for_64_rows_attend_as_float64_does(tmp_path) -> None:
    """Keys in float16, whose scales are rounded to as much: as near as bfloat16's rounding of a result lets tell."""
    said = re.findall(r"(.+): (\S+) (\S+)\n", said_by("records", tmp_path))
    lists = ["lists with sinks, 64 rows", "lists with sinks in two programs, 50 rows"]
    assert [name for name, *_ in said] == ["64 rows", "50 rows, a part", *lists]
    for name, error, of_lse in said:
        assert float(error) < (2**-10 if "a part" in name else 1.5 * 2**-8), name
        assert float(of_lse) < 4e-3, name
