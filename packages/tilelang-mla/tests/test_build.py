"""What does a first call wait for? On any machine: kernels are stood in for, or what nvcc makes of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier, Lock
from types import SimpleNamespace
from typing import Any

import pytest

from tilelang_mla.compile import main

# Who is made after another one waits for it as long, and fails.
PATIENCE_S = 10.0
SOLVER = "smt.arith.solver"


@pytest.fixture
def launch(launch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(launch, "_known", set())
    return launch


def test_new_kernels_of_a_call_are_made_side_by_side_and_once(launch, monkeypatch) -> None:
    both, made = Barrier(2), []

    def kernel(name: str, **constants: Any) -> str:
        if (name, constants) not in made:
            made.append((name, constants))
            both.wait(PATIENCE_S)
        return f"{name} {constants['dim']}"

    monkeypatch.setattr(launch, "kernel", kernel)
    for _ in range(2):
        got = launch.kernels(("decode", {"dim": 512}), None, ("merge", {"dim": 256}))
        assert got == ["decode 512", None, "merge 256"]
    assert sorted(name for name, _ in made) == ["decode", "merge"]


@pytest.mark.parametrize("failing", ["decode", "merge"])
def test_a_kernel_that_cannot_be_made_says_so_in_each_call(launch, monkeypatch, failing) -> None:
    def kernel(name: str) -> str:
        if name == failing:
            raise RuntimeError("no nvcc")
        return name

    monkeypatch.setattr(launch, "kernel", kernel)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no nvcc"):
            launch.kernels(("decode", {}), ("merge", {}))


@pytest.mark.parametrize("jobs", [1, 3])
def test_the_command_builds_as_many_kernels_at_a_time_as_it_is_told(launch, monkeypatch, capsys, jobs) -> None:
    together, lock = Barrier(jobs), Lock()
    now, most, made = 0, 0, 0

    def kernel(*_: Any, **__: Any) -> None:
        nonlocal now, most, made
        with lock:
            now, made = now + 1, made + 1
            most, is_early = max(most, now), made <= jobs
        if is_early:
            together.wait(PATIENCE_S)
        with lock:
            now -= 1

    monkeypatch.setattr(launch, "kernel", kernel)
    monkeypatch.setattr(sys, "argv", ["compile", "--prefill", "--jobs", str(jobs)])
    main()
    assert most == jobs
    assert len(capsys.readouterr().out.splitlines()) == made


def test_the_command_refuses_no_jobs(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["compile", "--jobs", "0"])
    with pytest.raises(SystemExit):
        main()
    assert "--jobs: must be at least 1, got 0" in capsys.readouterr().err


@pytest.fixture
def z3(launch: Any) -> Iterator[Any]:
    """With a setting that a user has made."""
    import z3

    before = z3.get_param(SOLVER)
    z3.set_param(SOLVER, "5")
    yield z3
    z3.set_param(SOLVER, before)


def test_z3_has_its_setting_again_when_the_last_kernel_is_lowered(launch, z3) -> None:
    first, second = launch.quick_proofs(), launch.quick_proofs()
    for begin in (first, second):
        begin.__enter__()
        assert z3.get_param(SOLVER) == "2"
    for end, then in ((first, "2"), (second, "5")):
        end.__exit__(None, None, None)
        assert z3.get_param(SOLVER) == then
    with pytest.raises(RuntimeError), launch.quick_proofs():
        raise RuntimeError
    assert z3.get_param(SOLVER) == "5"


def test_simplifications_behind_which_others_do_the_same_are_left_out(launch) -> None:
    from tilelang_mla.kernels.passes import Fewer

    one = Fewer()
    passes = ("tl.InjectAssumes", "tl.Simplify", "tl.UnrollLoop", "tl.Simplify", "tl.Simplify", "tl.UnrollLoop",
              "s_tir.RenormalizeSplitPattern", "tirx.Simplify")  # fmt: skip
    left_out = [i for i, name in enumerate(passes) if not one.should_run(None, SimpleNamespace(name=name))]
    assert left_out == [3, 7]
    one, passes = Fewer(in_c=True), ("tl.InjectAssumes", "tl.Simplify", "tl.IfStmtBinding", "tl.Simplify")
    assert [one.should_run(None, SimpleNamespace(name=name)) for name in passes] == [True, True, True, False]


def test_passes_are_left_to_nvcc_but_of_the_top_k_and_in_c(launch) -> None:
    from tilelang_mla.kernels.passes import Fewer

    passes = ("tl.PlanAndUpdateBufferAllocationLocation", "tl.LowerIntrin", "tirx.Simplify", "tl.LegalizeNegativeIndex",
              "tl.LowerTileOp", "tirx.Simplify")  # fmt: skip

    def left_out(one: Any) -> list[int]:
        return [i for i, name in enumerate(passes) if not one.should_run(None, SimpleNamespace(name=name))]

    assert [left_out(one) for one in (Fewer("decode"), Fewer("index_topk"), Fewer(in_c=True))] == [[0, 2, 3], [], []]


def test_passes_are_left_out_of_kernels_of_this_package_alone(launch) -> None:
    from tilelang.instrumentation import compile_pass_instrumentation, create_pass_instruments

    from tilelang_mla.kernels.passes import fewer_passes

    with fewer_passes():
        assert len(create_pass_instruments()) == 1
    assert create_pass_instruments() == []
    # Somebody looks at all of them.
    with compile_pass_instrumentation(), fewer_passes():
        assert create_pass_instruments() == []


def test_a_kernel_is_lowered_with_the_earlier_solver_and_linked_once(launch, z3, monkeypatch, tmp_path) -> None:
    from tilelang import language as T
    from tilelang.contrib import nvcc
    from tvm.contrib import cc

    @T.prim_func
    def zero(numbers: T.Tensor((64,), T.float32)):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                numbers[i] = 0

    solvers, linked, link = [], [], cc.create_shared

    def text_compiled(*_: Any, **__: Any) -> bytearray:
        solvers.append(z3.get_param(SOLVER))
        return bytearray(b"no GPU's code")

    def create_shared(output: str, files: list[str], *given: Any, **named: Any) -> None:
        linked.append(sorted(file.rpartition(".")[2] for file in files))
        link(output, files, *given, **named)

    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvcc, "compile_cuda", text_compiled)
    monkeypatch.setattr(cc, "create_shared", create_shared)
    monkeypatch.setattr(launch, "text_of", lambda *_: zero)
    compiled = launch.compiled.__wrapped__("zero")
    assert launch.executable_of(compiled)["main"] is not None
    assert solvers == ["2"]
    assert z3.get_param(SOLVER) == "5"
    # What the assembler reads takes it no time.
    assert linked == [["c", "s"]]
    [library] = tmp_path.rglob("executable.so")
    assert b"no GPU's code" in library.read_bytes()


def test_tvm_links_as_before_when_the_last_kernel_is_linked(launch) -> None:
    from tvm.runtime import Executable

    before = Executable.export_library
    first, second = launch.quick_links(), launch.quick_links()
    for begin in (first, second):
        begin.__enter__()
        assert Executable.export_library is not before
    first.__exit__(None, None, None)
    assert Executable.export_library is not before
    second.__exit__(None, None, None)
    assert Executable.export_library is before


@pytest.mark.parametrize("size", [3, 4])
def test_code_that_is_written_down_in_another_way_is_linked_as_it_is(launch, tmp_path, size) -> None:
    from tilelang_mla.kernels.build import packed

    text = f"extern const unsigned char code[];\nconst unsigned char code[{size}] = {{\n  0x0a,0xff,\n  0x00,\n}};\n"
    own = Path(packed(text, str(tmp_path)))
    assert own.suffix == (".s" if size == 3 else ".c")
    assert (tmp_path / "devc.bin").read_bytes() == b"\x0a\xff\x00" if size == 3 else own.read_text() == text
