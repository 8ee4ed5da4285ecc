"""A record carries what is needed to repeat a measurement, survives its file, and can be compared."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernel_reference.bench import machine
from kernel_reference.bench.case import Case, Requirement
from kernel_reference.bench.compare import compare, machine_differences
from kernel_reference.bench.compare import main as compare_main
from kernel_reference.bench.record import MACHINE, Record, load, save
from kernel_reference.bench.table import Table, of_records, plain, show, significant


def record(**changes: Any) -> Record:
    values: dict[str, Any] = dict(
        package="gdn-split",
        package_version="0.1.0",
        case="QWEN3_NEXT n8192",
        shape={"tokens": 8192, "dtype": "bfloat16"},
        implementation="gdn-split",
        ours=True,
        status="timed",
        note="",
        median_us=100.0,
        p20_us=99.0,
        p80_us=101.0,
        host_us=9.0,
        method="events",
        input_sets=2,
        bytes=400_000_000,
        flops=0,
        gb_per_s=4000.0,
        tflop_per_s=0.0,
        copy_roof_gb_per_s=4270.0,
        gemm_roof_tflop_per_s=750.0,
        fraction_of_copy_roof=0.937,
        fraction_of_gemm_roof=0.0,
        baseline="copy",
        ratio_to_baseline=1.01,
        error=0.0,
        requirement="speed >= 0.97 of copy (0.985)",
        requirement_met=True,
        device="NVIDIA H200",
        driver="580.159.04",
        capability="9.0",
        cuda="13.0",
        torch="2.11.0",
        triton="3.6.0",
        python="3.12.3",
        commit=None,
        date="2026-11-21T10:00:00+00:00",
    )
    return Record(**(values | changes))


def absent(**changes: Any) -> Record:
    nothing = dict.fromkeys(("median_us", "p20_us", "p80_us", "host_us", "method", "input_sets", "gb_per_s", "error"))
    more = dict.fromkeys(("tflop_per_s", "fraction_of_copy_roof", "fraction_of_gemm_roof", "ratio_to_baseline"))
    return record(**(nothing | more | {"status": "absent", "note": "ImportError: no sglang"} | changes))


def rewritten(path: Path, **changes: Any) -> Path:
    line = dataclasses.asdict(record())
    for name, value in changes.items():
        if value is ...:
            del line[name]
        else:
            line[name] = value
    path.write_text(json.dumps(dataclasses.asdict(record())) + "\n" + json.dumps(line) + "\n")
    return path


def test_records_survive_their_file(tmp_path: Path) -> None:
    records = [
        record(),
        absent(implementation="sglang", ours=False),
        record(implementation="copy", flops=3, commit="abc"),
    ]
    save(records, tmp_path / "deep" / "gdn-split.jsonl")
    assert load(tmp_path / "deep" / "gdn-split.jsonl") == records


@pytest.mark.parametrize("value", [..., "", " ", None, 580])
@pytest.mark.parametrize("name", MACHINE)
def test_a_record_without_machine_driver_or_version_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    path = rewritten(tmp_path / "x.jsonl", **{name: value})
    with pytest.raises(ValueError, match=rf"x\.jsonl:2: a record must name its machine.*got none for {name}"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"median_us": ...}, "got none for median_us"),
        ({"median_us": None}, "must be positive numbers in a timed record"),
        ({"median_us": "100"}, "median_us must be"),
        ({"bytes": True}, "bytes must be int, got True"),
        ({"status": "guessed"}, "status must be"),
        ({"shape": {"tokens": 1.5}}, "shape must be"),
        ({"speedup": 2}, "must have known fields only, got speedup"),
        ({"p20_us": float("nan")}, "a number must be finite, got NaN"),
    ],
)
def test_a_malformed_record_is_refused_by_file_line_and_field(tmp_path: Path, changes: Any, words: str) -> None:
    with pytest.raises(ValueError, match=r"x\.jsonl:2: ") as caught:
        load(rewritten(tmp_path / "x.jsonl", **changes))
    assert words in str(caught.value)


def test_a_line_that_is_no_json_is_refused_by_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("[1]\n")
    with pytest.raises(ValueError, match=r"x\.jsonl:1: a record must be a JSON object, got list"):
        load(tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").write_text("\n\n{broken\n")
    with pytest.raises(ValueError, match=r"x\.jsonl:3: "):
        load(tmp_path / "x.jsonl")


def test_importing_the_package_loads_neither_torch_nor_rich_nor_matplotlib() -> None:
    code = "import sys, kernel_reference.bench; print([m for m in ('torch', 'rich', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_slower_median_outside_the_old_range_is_a_regression() -> None:
    slower = record(median_us=110.0, p20_us=109.0, p80_us=111.0)
    noisy = record(median_us=110.0, p20_us=100.5, p80_us=130.0)
    tiny = record(median_us=101.5, p20_us=101.2, p80_us=101.8)
    faster = record(median_us=90.0, p20_us=89.0, p80_us=91.0)
    verdicts = [compare([record()], [new])[0].verdict for new in (slower, noisy, tiny, faster)]
    assert verdicts == ["REGRESSION", "same", "same", "faster"]


def test_what_was_timed_and_is_red_now_is_a_regression_but_an_absent_peer_is_not() -> None:
    gone = compare([record()], [absent(status="red")])[0]
    assert gone.verdict == "red"
    assert gone.is_regression
    peer = record(implementation="sglang", ours=False)
    changes = compare([record(), peer], [record()])
    assert [(c.implementation, c.verdict, c.is_regression) for c in changes] == [
        ("gdn-split", "same", False),
        ("sglang", "MISSING", True),
    ]
    assert compare([peer], [absent(implementation="sglang", ours=False)])[0].verdict == "gone"
    slower = record(implementation="sglang", ours=False, median_us=200.0, p20_us=199.0, p80_us=201.0)
    assert not compare([peer], [slower])[0].is_regression


def test_comparing_names_what_the_machines_differ_in() -> None:
    assert machine_differences([record()], [record(driver="581.0")]) == ["driver: 580.159.04 -> 581.0"]
    assert machine_differences([record()], [record()]) == []


def test_what_is_no_longer_recorded_is_missing_unless_left_out(tmp_path: Path, capsys: Any) -> None:
    small, large = record(), record(case="QWEN3_NEXT n65536")
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    save([small, large, record(implementation="copy", ours=False)], old)
    save([small, record(implementation="copy", ours=False)], new)
    assert compare_main([str(old), str(new)]) == 1
    assert "1 regression(s): QWEN3_NEXT n65536 / gdn-split: MISSING" in capsys.readouterr().out
    assert compare_main([str(old), str(new), "--only", "n8192$"]) == 0
    save([small], new)
    assert compare_main([str(old), str(new), "--only", "n8192$"]) == 1


def test_a_measurement_recorded_twice_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="new must hold each measurement once, got gdn-split / QWEN3_NEXT n8192"):
        compare([], [record(), record()])


def test_the_compare_command_tells_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, same, worse = (str(tmp_path / name) for name in ("old", "same", "worse"))
    save([record()], old)
    save([record(date="2026-11-22T10:00:00+00:00")], same)
    save([record(median_us=200.0, p20_us=199.0, p80_us=201.0)], worse)
    assert compare_main([old, same]) == 0
    assert compare_main([old, worse]) == 1
    assert "1 regression(s): QWEN3_NEXT n8192 / gdn-split" in capsys.readouterr().out
    assert compare_main([old, str(tmp_path / "none")]) == 2


def test_the_table_shows_times_ratios_and_verdicts() -> None:
    missed = record(implementation="slow", requirement="time <= 1.12 x copy (1.300)", requirement_met=False)
    unknown = record(implementation="lone", requirement="speed >= 0.9 of fla", requirement_met=None)
    text = plain(of_records([record(), missed, unknown, absent(implementation="sglang", ours=False)]))
    assert "met: speed >= 0.97 of copy (0.985)" in text
    assert "MISSED: time <= 1.12 x copy (1.300)" in text
    assert "not measured: speed >= 0.9 of fla" in text
    assert "absent: ImportError: no sglang" in text
    assert "copy 4270 GB/s, bf16 GEMM 750 TFLOP/s" in text
    assert text.count("QWEN3_NEXT n8192") == 1
    lines = [line for line in text.splitlines() if " events " in line]
    assert len({line.index(" events ") for line in lines}) == 1


def test_a_table_prints_without_rich_and_is_not_wrapped_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    table = of_records([record(), absent(implementation="sglang", ours=False)])
    with_rich, without = io.StringIO(), io.StringIO()
    show(table, with_rich)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    show(table, without)
    assert without.getvalue() == plain(table) + "\n"
    for text in (with_rich.getvalue(), without.getvalue()):
        row = next(line for line in text.splitlines() if "QWEN3_NEXT" in line)
        assert "met: speed >= 0.97 of copy (0.985)" in row
    assert plain(Table("empty", ["case"])).splitlines()[0] == "empty"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0.0, "0"),
        (1.2345, "1.23"),
        (924.4, "924"),
        (65536.0, "65500"),
        (1e-5, "1.00e-05"),
        (2e7, "2.00e+07"),
    ],
)
def test_numbers_keep_three_significant_digits(value: float | None, text: str) -> None:
    assert significant(value) == text


def case(**changes: Any) -> Case:
    values: dict[str, Any] = dict(
        name="c",
        shape={},
        make_inputs=lambda: 0,
        ours={"ours": lambda x: x},
        peers={"peer": lambda: lambda x: x},
        check=lambda out, x: 0.0,
        bytes_moved=1,
    )
    return Case(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": ""}, "name must be a non-empty string"),
        ({"ours": {}}, "ours must be at least one implementation"),
        ({"bytes_moved": 0}, "bytes_moved must be a positive int, got 0"),
        ({"bytes_moved": 1e9}, "bytes_moved must be a positive int"),
        ({"flops": -1}, "flops must be an int >= 0, got -1"),
        ({"tolerance": float("nan")}, "tolerance must be >= 0, got nan"),
        ({"peers": {"ours": lambda: None}}, "peers must be labelled differently from ours"),
        ({"peers": {"copy": lambda: None}}, "without the label 'copy'"),
        ({"baseline": "fla"}, "baseline must be one of ['ours', 'peer', 'copy'], got 'fla'"),
        ({"copy": False}, "baseline must be one of ['ours', 'peer'], got 'copy'"),
        ({"requirements": [Requirement("ours", "fla", time_at_most=1.0)]}, "requirements must be between labels"),
    ],
)
def test_a_case_that_contradicts_itself_is_refused(changes: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        case(**changes)
    assert words in str(caught.value)


def test_requirements_bound_speed_from_below_or_time_from_above_or_in_microseconds() -> None:
    speed = Requirement("ours", speed_at_least=0.97)
    assert speed.is_met(time=103.0, against=100.0)
    assert not speed.is_met(time=104.0, against=100.0)
    time = Requirement("ours", "copy", time_at_most=1.12)
    assert time.is_met(time=112.0, against=100.0)
    assert not time.is_met(time=113.0, against=100.0)
    assert (speed.describe(), time.describe()) == ("speed >= 0.97 of copy", "time <= 1.12 x copy")
    alone = Requirement("ours", us_at_most=4.0)
    assert alone.is_met(time=4.0, against=1.0)
    assert not alone.is_met(time=4.1, against=100.0)
    assert (alone.describe(), alone.ratio(time=3.5, against=7.0)) == ("time <= 4 us", 3.5)
    for wrong in (
        {},
        {"speed_at_least": 1.0, "time_at_most": 1.0},
        {"time_at_most": 1.0, "us_at_most": 4.0},
        {"time_at_most": -1.0},
        {"us_at_most": float("inf")},
    ):
        with pytest.raises(ValueError, match="speed_at_least"):
            Requirement("ours", **wrong)


def test_the_driver_is_found_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (x@y)  Thu\n"
    )
    assert machine._from_proc(version) == "580.159.04"
    monkeypatch.setattr(machine, "_from_proc", lambda: machine.__dict__["_found"])
    monkeypatch.setitem(machine.__dict__, "_found", "570.1")
    assert machine.driver_version() == "570.1"
    for name in ("_from_nvml", "_from_amdgpu"):
        monkeypatch.setattr(machine, name, lambda: "")
    monkeypatch.setitem(machine.__dict__, "_found", "")
    assert machine.driver_version() == "unknown"


def test_a_package_is_named_by_the_nearest_project_file(tmp_path: Path) -> None:
    cases = tmp_path / "seqmix-not-installed" / "benchmarks" / "cases.py"
    cases.parent.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\nline-length = 120\n")
    assert machine.package_of(cases) == ("seqmix-not-installed", "0+source")
    (cases.parent.parent / "pyproject.toml").write_text('[project]\nname = "seqmix-of-a-test"\nversion = "1.2.3"\n')
    assert machine.package_of(cases) == ("seqmix-of-a-test", "1.2.3")


def test_the_commit_is_recorded_with_a_mark_for_changes_and_not_invented(tmp_path: Path) -> None:
    assert machine.commit_of(tmp_path) is None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-q", "-m", "x", "--no-gpg-sign", "--no-verify")
    assert machine.commit_of(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "a").write_text("2")
    assert machine.commit_of(tmp_path) == git("rev-parse", "HEAD") + "+changes"
