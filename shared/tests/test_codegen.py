"""What is read from kernels compiled for GPUs that are not here."""

from __future__ import annotations

import dataclasses
import importlib
import os
from pathlib import Path

import pytest
import torch

from kernel_reference.launching import Launch
from kernel_reference.testing.codegen import (
    KernelSpec,
    Report,
    assert_clean,
    compile_by_target,
    compile_specs,
    launched_kernels,
    recorded_launches,
    table,
)
from kernel_reference.testing.targets import KNOWN, SMALL_TARGETS, TARGETS

pytest.importorskip("triton", reason="needs triton, which is not installed")
pytestmark = pytest.mark.codegen

FILE = Path(__file__).with_name("codegen_kernels.py")
POINTERS = {"p_x": "*bf16", "p_y": "*bf16"}
Reports = dict[tuple[str, str], Report]

SPECS = [
    KernelSpec(f"{FILE}:copy", POINTERS | {"n": "i32"}, {"BLOCK": 1024}, aligned=("p_x", "p_y", "n"), name="copy"),
    KernelSpec(f"{FILE}:copy", POINTERS | {"n": "i32"}, {"BLOCK": 1024}, aligned=(), name="unaligned copy"),
    KernelSpec(
        f"{FILE}:matmul", {"p_a": "*bf16", "p_b": "*bf16", "p_c": "*fp32", "k": "i32"}, {"BLOCK": 64}, name="matmul"
    ),
    KernelSpec(f"{FILE}:undefined", POINTERS, name="undefined"),
]
ON_ONE_TARGET = [
    KernelSpec(
        f"{FILE}:centre",
        {"p_x": "*fp32", "p_y": "*fp32"},
        {"BLOCK": 4096},
        {"num_warps": 1, "maxnreg": 32},
        name="centre",
    ),
    KernelSpec(f"{FILE}:halting", POINTERS, options={"debug": True}, name="halting"),
]
# Tiles of 32 KiB, of which so many stages are too much for the smaller GPUs.
DEEP = KernelSpec(
    f"{FILE}:matmul",
    SPECS[2].signature,
    {"BLOCK": 128},
    {"num_stages": 4, "num_warps": 8},
    name="deep",
)


@pytest.fixture(scope="module")
def reports() -> Reports:
    found = compile_specs(SPECS) + compile_specs(ON_ONE_TARGET, ["sm_90"], processes=1)
    return {(report.spec, report.target): report for report in found}


def test_every_spec_is_reported_for_every_target_in_order(reports: Reports) -> None:
    wanted = [(spec.name, target) for spec in SPECS for target in TARGETS]
    assert list(reports) == [*wanted, ("centre", "sm_90"), ("halting", "sm_90")]


@pytest.mark.parametrize("target", TARGETS)
def test_a_simple_kernel_is_clean_and_its_registers_are_counted(target: str, reports: Reports) -> None:
    report = reports["copy", target]
    assert report.problems() == []
    assert 0 < report.registers < 64
    assert (report.stack, report.shared, report.trap, report.uses_tensor_cores) == (0, 0, False, False)
    assert_clean([report])


@pytest.mark.parametrize("target", TARGETS)
def test_promised_alignment_widens_loads_and_stores(target: str, reports: Reports) -> None:
    # 1024 elements and 128 threads of 16 bytes; 256 threads on AMD.
    wide = frozenset({64 if target == "gfx942" else 128})
    assert (reports["copy", target].load_bits, reports["copy", target].store_bits) == (wide, wide)
    assert reports["unaligned copy", target].load_bits == {16}
    assert reports["unaligned copy", target].store_bits == {16}


@pytest.mark.parametrize(
    ("target", "opcode"), [("sm_80", "HMMA"), ("sm_90", "HGMMA"), ("sm_100", "UTCHMMA"), ("gfx942", "v_mfma")]
)
def test_a_product_of_tiles_uses_the_targets_own_matrix_instruction(target: str, opcode: str, reports: Reports) -> None:
    report = reports["matmul", target]
    assert_clean([report])
    assert report.uses_tensor_cores
    assert any(seen.startswith(opcode) for seen in report.opcodes)
    assert report.shared > 0


def test_what_takes_more_shared_memory_than_a_target_gives_to_a_program_is_a_problem() -> None:
    for report in compile_specs([SPECS[2]], SMALL_TARGETS):
        assert report.uses_tensor_cores, report
        assert_clean([report])
    deep = {report.target: report for report in compile_specs([DEEP], ["sm_86", "sm_80"])}
    assert_clean([deep["sm_80"]])
    taken = deep["sm_86"].shared
    assert 101376 < taken <= 166912
    # Of the others what is compiled needs not be seen again.
    for target in SMALL_TARGETS:
        message = f"takes {taken} bytes of shared memory, of which {target} has 101376"
        assert dataclasses.replace(deep["sm_86"], target=target).problems() == [message]


def test_every_target_that_is_known_can_be_compiled_for() -> None:
    others = [name for name in KNOWN if name not in (*TARGETS, *SMALL_TARGETS)]
    assert others == ["sm_75", "sm_86"]
    assert_clean(compile_specs(SPECS[:1], others))


def test_a_kernel_with_too_few_registers_is_reported_to_spill(reports: Reports) -> None:
    report = reports["centre", "sm_90"]
    assert report.registers <= 32
    assert report.stack > 0
    assert report.uses("STL")
    assert report.spills
    assert report.problems() == [f"spills registers: {report.stack} bytes of stack a thread"]


def test_a_kernel_that_can_abort_is_reported_to_trap(reports: Reports) -> None:
    assert reports["halting", "sm_90"].problems() == ["holds a trap instruction"]


def test_a_kernel_that_does_not_compile_is_reported_with_the_reason(reports: Reports) -> None:
    report = reports["undefined", "sm_80"]
    assert "missing is not defined" in report.problems()[0]


def test_the_assertion_shows_a_table_of_the_broken_kernels_alone(reports: Reports) -> None:
    with pytest.raises(AssertionError, match=f"5 of {len(reports) - 1} compiled kernels have problems") as caught:
        assert_clean([report for report in reports.values() if report.spec != "halting"])
    assert "centre" in str(caught.value)
    assert "matmul" not in str(caught.value)


def test_no_report_at_all_is_not_clean() -> None:
    with pytest.raises(AssertionError, match="no kernel was compiled"):
        assert_clean([])


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        (Report("k", "gfx942", vgpr_spills=3), "spills 3 vector and 0 scalar registers"),
        (Report("k", "gfx942", sgpr_spills=2), "spills 0 vector and 2 scalar registers"),
        (Report("k", "sm_90", stack=16), "spills registers: 16 bytes of stack a thread"),
        (Report("k", "sm_90", opcodes=frozenset({"LDL.64"})), "spills registers: 0 bytes of stack a thread"),
        (Report("k", "sm_100", trap=True), "holds a trap instruction"),
        (Report("k", "sm_75", shared=65537), "takes 65537 bytes of shared memory, of which sm_75 has 65536"),
        (Report("k", "gfx942", shared=80 << 10), "takes 81920 bytes of shared memory, of which gfx942 has 65536"),
    ],
)
def test_each_sign_of_trouble_is_a_problem(report: Report, problem: str) -> None:
    assert report.problems() == [problem]
    assert problem in table([report])


def test_the_widths_of_accesses_are_read_from_opcodes() -> None:
    nvidia = {"LDG.E", "LDG.E.U8", "LDG.E.U16.CONSTANT", "LDGSTS.E.BYPASS.LTC128B.128", "LDG.E.ENL2.256", "STG.E.64"}
    report = Report("k", "sm_100", opcodes=frozenset(nvidia))
    assert report.load_bits == {8, 16, 32, 128, 256}
    assert report.store_bits == {64}
    amd = {"global_load_ushort", "buffer_load_dwordx4", "global_store_dword", "global_store_byte", "ds_read_b128"}
    report = Report("k", "gfx942", opcodes=frozenset(amd))
    assert report.load_bits == {16, 128}
    assert report.store_bits == {8, 32}


def test_an_opcode_is_found_by_whole_parts_of_its_name() -> None:
    report = Report("k", "sm_90", opcodes=frozenset({"LDGSTS.E.128"}))
    assert report.uses("LDGSTS")
    assert report.uses("LDGSTS.E")
    assert not report.uses("LDG")


def test_a_kernel_that_cannot_be_imported_names_the_reason_and_leaves_the_others(tmp_path: Path) -> None:
    specs = [
        KernelSpec("no_such_package.kernels:copy", {}),
        KernelSpec(f"{FILE}:copy", POINTERS),
        KernelSpec(f"{FILE}:copy", POINTERS | {"n": "i32", "m": "i32"}, {"BLOCK": 64}),
    ]
    errors = [report.error for report in compile_specs(specs, ["sm_80"], processes=1)]
    assert "No module named 'no_such_package'" in errors[0]
    assert "nothing for ['n', 'BLOCK']" in errors[1]
    assert "['m'] besides" in errors[2]


def test_the_compiling_process_is_told_neither_to_interpret_nor_to_use_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "showing.py").write_text(
        "import os\nraise RuntimeError(f\"{os.environ.get('TRITON_INTERPRET')} {os.environ['TRITON_CACHE_DIR']}\")\n"
    )
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "users"))
    monkeypatch.syspath_prepend(tmp_path)
    (report,) = compile_specs([KernelSpec("showing:kernel", {})], ["sm_90"])
    assert "RuntimeError: None " in report.error
    assert str(tmp_path / "users") not in report.error
    assert os.environ["TRITON_INTERPRET"] == "1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernel": "package.kernels", "signature": {}}, "kernel must be"),
        ({"kernel": "m:f", "signature": {"x": "i32"}, "constexprs": {"x": 1}}, "constexprs must be disjoint"),
        ({"kernel": "m:f", "signature": {"x": "*i8"}, "aligned": ("y",)}, "aligned must be a subset"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KernelSpec(**arguments)  # type: ignore[arg-type]


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(ValueError, match=r"target must be among .*sm_120"):
        compile_specs(SPECS, ["sm_50"])


def test_a_spec_is_named_after_its_function_and_settings() -> None:
    spec = KernelSpec("gdn_split.kernels.split:split_by_group", {}, {"ROWS": 4}, {"num_warps": 2})
    assert spec.name == "split_by_group(ROWS=4, num_warps=2)"


def test_a_call_says_what_is_compiled_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "calling.py").write_text(
        "import triton\nimport triton.language as tl\n\n\n@triton.jit(do_not_specialize=['rows'])\n"
        "def scale(d_x, p_x, p_y, rows, s, factor, p_none, BLOCK: tl.constexpr):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    kernel = importlib.import_module("calling").scale
    x = torch.empty(2, device="meta", dtype=torch.bfloat16)
    values = (x, x, x.float(), 32, (48, 1, 2**31), 0.5, None, 64)
    spec = KernelSpec.of_call(
        kernel, values, options={"num_warps": 2}, name="a call", descriptors=[([8, 64], "layout")]
    )
    assert spec == KernelSpec(
        "calling:scale",
        {"d_x": "tensordesc<bf16[8,64],'layout'>", "p_x": "*bf16", "p_y": "*fp32", "rows": "i32", "s[0]": "i32",
         "s[2]": "i64", "factor": "fp32"},
        {"s[1]": 1, "p_none": None, "BLOCK": 64}, {"num_warps": 2}, ["p_x", "p_y", "s[0]", "s[2]"], "a call",
    )  # fmt: skip
    with pytest.raises(ValueError, match="values must be of 8 arguments, as the kernel has, got 7"):
        KernelSpec.of_call(kernel, values[:-1])


def test_a_call_of_a_kernel_that_leaves_nothing_out_of_specialisation_says_so_too() -> None:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def scale(p_x, rows, columns):
        pass

    x = torch.empty(2, device="meta", dtype=torch.bfloat16)
    whole = KernelSpec.of_call(JITFunction(scale), (x, 32, 1))
    assert (whole.signature, whole.constexprs, whole.aligned) == (
        {"p_x": "*bf16", "rows": "i32"},
        {"columns": 1},
        ["p_x", "rows"],
    )
    assert KernelSpec.of_call(InterpretedFunction(scale), (x, 32, 1)) == whole
    # Triton takes places for names.
    for listed in (["rows", "columns"], [1, 2]):
        for make in (JITFunction, InterpretedFunction):
            spec = KernelSpec.of_call(make(scale, do_not_specialize=listed), (x, 32, 1))
            assert (spec.signature["columns"], spec.constexprs, spec.aligned) == ("i32", {}, ["p_x"])
            assert KernelSpec.of_call(make(scale, do_not_specialize=None), (x, 32, 1)) == whole


def test_elements_of_an_argument_that_is_a_tuple_are_named_by_their_places(tmp_path: Path) -> None:
    file = tmp_path / "striding.py"
    file.write_text(
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef stride(p, s):\n"
        "    o = tl.arange(0, 32)\n    tl.store(p + o * s[0] + o * s[1], o)\n"
    )
    spec = KernelSpec(f"{file}:stride", {"p": "*i32", "s[0]": "i32"}, {"s[1]": 1})
    (report,) = compile_specs([spec], ["sm_90"])
    assert not report.problems()
    (report,) = compile_specs([KernelSpec(f"{file}:stride", {"p": "*i32", "t[0]": "i32"}, {"s[1]": 1})], ["sm_90"])
    assert "of arguments of" in report.error


def test_the_fields_of_named_tuples_reach_a_kernel_as_in_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    (tmp_path / "grouping.py").write_text(
        "from typing import NamedTuple\nimport triton\nimport triton.language as tl\n\n\n"
        "class Shape(NamedTuple):\n    rows: int\n    strides: tuple\n\n\n"
        "class Tile(NamedTuple):\n    ROWS: int\n    WIDE: bool\n\n\n"
        "@triton.jit(do_not_specialize=['shape'])\ndef stride(p, shape, tile: tl.constexpr):\n"
        "    T: tl.constexpr = Tile(tile.ROWS, tile.WIDE)\n"
        "    o = tl.arange(0, T.ROWS)\n    tl.store(p + o * shape.strides[1], o, mask=o < shape.rows)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("grouping")
    p = torch.empty(2, device="meta", dtype=torch.int32)
    spec = KernelSpec.of_call(module.stride, (p, module.Shape(16, (16, 1)), module.Tile(32, False)))
    assert spec.signature == {"p": "*i32", "shape[0]": "i32", "shape[1][0]": "i32"}
    assert spec.constexprs == {"shape[1][1]": 1, "tile": module.Tile(32, False)}
    assert spec.aligned == ["p", "shape[0]", "shape[1][0]"]
    # What Triton itself says of the tuple, told not to specialise on it.
    said = native_specialize_impl(CUDABackend, module.Shape(16, (16, 1)), False, False, True)
    assert said == (module.Shape("i32", ("i32", "constexpr")), module.Shape("D", ("D", 1)))
    (report,) = compile_specs([spec], ["sm_90"])
    assert not report.problems()


def test_a_few_bytes_of_spills_can_be_a_warning_and_more_are_a_problem() -> None:
    report = Report("kernel", "sm_120", registers=168, stack=8, shared=1024)
    with pytest.raises(AssertionError, match="spills registers: 8 bytes"):
        assert_clean([report])
    with pytest.warns(UserWarning, match="1 of 1 compiled kernels spill"):
        assert_clean([report], most_stack=8)
    with pytest.raises(AssertionError, match="spills registers"):
        assert_clean([report], most_stack=4)
    with pytest.warns(UserWarning, match="spill"), pytest.raises(AssertionError, match="trap"):
        assert_clean([dataclasses.replace(report, trap=True)], most_stack=8)
    # Not a word of what costs next to nothing.
    assert_clean([report], most_stack_outside_loops=8)
    with pytest.raises(AssertionError, match="spills registers"):
        assert_clean([dataclasses.replace(report, spills_in_loops=1)], most_stack_outside_loops=8)


# Launches


def test_a_launch_is_recorded_with_its_tensors_and_not_started(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "launched.py").write_text(
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
        "def scale(p_x, p_y, rows, BLOCK: tl.constexpr):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    kernel = importlib.import_module("launched").scale
    start = Launch(kernel, (1, 1, 1), (32, 64), torch.device("cpu"), num_warps=8)
    x = torch.empty(4, dtype=torch.float16)
    calls = recorded_launches(lambda *tensors: [start(*tensors), start(*tensors)], x, None)
    assert [(one is start, given) for one, given in calls] == [(True, (x, None))] * 2
    spec = KernelSpec.of_launch(*calls[0], name="scaled")
    assert (spec.kernel, spec.name, spec.options) == ("launched:scale", "scaled", {"num_warps": 8})
    assert spec.signature == {"p_x": "*fp16", "rows": "i32"}
    assert spec.constexprs == {"p_y": None, "BLOCK": 64}


def test_kernels_that_the_host_launches_are_those_that_no_other_mentions(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "kernels_of_mine" / "kernels"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "tiles.py").write_text("@triton.jit\ndef load(p):\n    pass\n\n\ndef on_the_host():\n    pass\n")
    (folder / "attend.py").write_text(
        "@gluon.jit\ndef consume(merge):\n    merge = 1\n\n\n@gluon.jit\ndef attend(p):\n"
        "    warp_specialize([(tiles.load, p), (consume, p)])\n\n\n@gluon.jit(do_not_specialize=['p'])\n"
        "def merge(p):\n    load(p)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module("kernels_of_mine")
    prefix = "kernels_of_mine.kernels.attend"
    assert launched_kernels(package) == {f"{prefix}:attend", f"{prefix}:merge"}


def test_specs_of_each_target_are_compiled_for_it_and_their_code_is_kept_where_it_is_wanted() -> None:
    def specs(target: str) -> list[KernelSpec]:
        return SPECS[:1] if target == "sm_80" else SPECS[:2]

    found = compile_by_target(specs, ["sm_80", "gfx942"], keep_code=True)
    assert [(report.target, report.spec) for report in found] == [
        ("gfx942", "copy"), ("gfx942", "unaligned copy"), ("sm_80", "copy"),
    ]  # fmt: skip
    assert [set(report.code) for report in found] == [{"amdgcn"}, {"amdgcn"}, {"ptx", "sass"}]
    assert all(text for report in found for text in report.code.values())
    assert "EXIT" in found[2].code["sass"]
